"""Contexts and rewards that have nothing to do with the arms: there is nothing to learn."""

from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.bandits.environments._draws import as_arrays, as_draw, as_numbers, spec_of_batch
from diskbuf.bandits.environments.bandit_environment import BanditEnvironment
from diskbuf.bandits.environments.stationary_stochastic_environment import as_reward
from diskbuf.errors import SpecError
from diskbuf.tree import Structure, describe


class RandomBanditEnvironment(BanditEnvironment):
    """Draws contexts from one function and rewards from another, whichever arm is pulled: for tests of agents.

    TF-Agents' environment of that name takes distributions of TensorFlow Probability, and an action_spec where this one
    takes num_actions. These are functions, which get the environment's generator if they have a parameter named `rng`.
    What the observations are says B; one draw, which isn't of the seed, tells.

        >>> env = RandomBanditEnvironment(
        ...     lambda rng: rng.normal(size=(2, 3)).astype(np.float32), lambda rng: rng.normal(size=2), num_actions=4
        ... )
        >>> env
        RandomBanditEnvironment(batch_size=2, num_actions=4)

    Args:
        observation_distribution: Draws contexts, nest of [B, *shape] arrays.
        reward_distribution: Draws [B] rewards.
        num_actions: K.
        reward_mean: Expected reward, for `optimal_reward`; None if it isn't known.
        seed: None takes entropy from the system.

    Raises:
        OptionError: If an argument is outside its rule.
        SpecError: If contexts have no batch axis, or there aren't as many rewards.
    """

    def __init__(
        self,
        observation_distribution: Any,
        reward_distribution: Any,
        *,
        num_actions: int,
        reward_mean: float | None = None,
        seed: int | None = None,
    ) -> None:
        self._sample_context = as_draw("observation_distribution", observation_distribution)
        self._sample_reward = as_draw("reward_distribution", reward_distribution)
        example = self._sample_context(np.random.default_rng(0))
        spec, batch_size = spec_of_batch("observation_distribution", example)
        self._drawn = Structure(example)
        rewards = self._sample_reward(np.random.default_rng(0))
        if np.shape(rewards) != (batch_size,):
            raise SpecError(
                f"reward_distribution must draw numbers [{batch_size}], as many as observation_distribution draws "
                f"contexts, got {describe(rewards)}."
            )
        self._mean = None if reward_mean is None else np.float32(as_numbers("reward_mean", reward_mean, ()))
        super().__init__(spec, num_actions, batch_size=batch_size, seed=seed)

    def _observe(self) -> Any:
        return as_arrays(self._drawn, self._sample_context(self._rng))

    def _apply_action(self, action: npt.NDArray[Any]) -> npt.NDArray[Any]:  # noqa: ARG002  no arm matters
        return np.array(as_reward(self._sample_reward(self._rng), self._reward_spec))

    def optimal_reward(self, observation: Any) -> npt.NDArray[np.float32]:
        """Returns [B] float32 reward_mean, which every arm has.

        Args:
            observation: Nest of [B, *shape] arrays.

        Raises:
            NotImplementedError: If reward_mean wasn't given.
        """
        if self._mean is None:
            raise NotImplementedError(f"{self} doesn't know the expected reward. Give reward_mean.")
        return np.full(len(self._drawn.flatten(observation)[0]), self._mean)

    def optimal_action(self, observation: Any) -> npt.NDArray[np.int32]:
        """Returns [B] int32 zeros: all arms are equal, and this is the first.

        Args:
            observation: Nest of [B, *shape] arrays.
        """
        return np.zeros(len(self._drawn.flatten(observation)[0]), np.int32)
