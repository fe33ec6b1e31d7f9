"""Linear rewards whose weights change as time goes by: what the piecewise and the drifting environment share."""

import abc
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.bandits.environments._draws import as_arrays, as_draw, as_parameter_draw, as_spreads, spec_of_batch
from diskbuf.bandits.environments.bandit_environment import BanditEnvironment
from diskbuf.errors import OptionError, SpecError
from diskbuf.specs import ArraySpec
from diskbuf.tree import describe


class LinearEnvironment(BanditEnvironment):
    """Pays context @ weights + additive, and normal noise; a subclass changes the two in `_advance`.

    Args:
        observation_distribution: Draws [B, d] contexts.
        observation_to_reward_distribution: Draws [d, K] weights, or is them.
        additive_reward_distribution: Draws [K], or is it.
        reward_std: Standard deviation of the noise.
        seed: None takes entropy from the system.

    Raises:
        OptionError: If an argument is outside its rule, or something that is drawn has another shape.
        SpecError: If contexts aren't [B, d].
    """

    _changing: tuple[str, ...] = ("_weights", "_additive")

    def __init__(
        self,
        observation_distribution: Any,
        observation_to_reward_distribution: Any,
        *,
        additive_reward_distribution: Any,
        reward_std: float,
        seed: int | None,
    ) -> None:
        self._sample_context = as_draw("observation_distribution", observation_distribution)
        example = np.asarray(self._sample_context(np.random.default_rng(0)))  # isn't of the seed
        spec, batch_size = spec_of_batch("observation_distribution", example)
        if not isinstance(spec, ArraySpec) or len(spec.shape) != 1:
            raise SpecError(f"observation_distribution must draw numbers [B, d], got {describe(example)}.")
        num_actions = _num_actions(additive_reward_distribution)
        self._draw_weights = as_parameter_draw(
            "observation_to_reward_distribution", observation_to_reward_distribution, (*spec.shape, num_actions)
        )
        self._draw_additive = as_parameter_draw(
            "additive_reward_distribution", additive_reward_distribution, (num_actions,)
        )
        self._reward_std = float(as_spreads("reward_std", reward_std, ()))
        super().__init__(spec, num_actions, batch_size=batch_size, seed=seed)
        self._weights = self._draw_weights(self._rng)  # never written to, only replaced
        self._additive = self._draw_additive(self._rng)

    @property
    def observation_to_reward(self) -> npt.NDArray[np.float64]:
        """[d, K] the weights of the last step's rewards, a copy."""
        return np.array(self._weights)

    @property
    def additive_reward(self) -> npt.NDArray[np.float64]:
        """[K] what was added to the last step's rewards, a copy."""
        return np.array(self._additive)

    @abc.abstractmethod
    def _advance(self) -> None:
        """Changes weights and additive rewards, if it is time to, before a step's rewards are worked out."""

    def _observe(self) -> npt.NDArray[Any]:
        return np.asarray(as_arrays(self._observations, self._sample_context(self._rng)))

    def _apply_action(self, action: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        self._advance()
        context = self.current_time_step().observation
        reward: npt.NDArray[np.float64] = np.einsum("bd,bd->b", context, self._weights.T.take(action, axis=0))
        reward = reward + self._additive.take(action)
        if self._reward_std > 0:
            reward += self._reward_std * self._rng.standard_normal(self._batch_size)
        return reward.astype(np.float32)

    def optimal_reward(self, observation: Any) -> npt.NDArray[np.float32]:
        """Returns [B] float32 the expected reward of the best arm, by the weights of the last step's rewards.

        So it is the baseline of that step's regret when it is asked for right after the step. What is added to the
        rewards counts, which TF-Agents leaves out.

        Args:
            observation: [B, d], the contexts that the step's arms were chosen in.
        """
        return np.asarray(self._means(observation).max(axis=1), np.float32)

    def optimal_action(self, observation: Any) -> npt.NDArray[np.int32]:
        """Returns [B] int32 the best arm by the weights of the last step's rewards, of equal ones the first.

        Args:
            observation: [B, d], the contexts that the step's arms were chosen in.
        """
        return np.asarray(self._means(observation).argmax(axis=1), np.int32)

    def _means(self, observation: Any) -> npt.NDArray[Any]:
        return np.asarray(np.asarray(observation) @ self._weights + self._additive)


def _num_actions(additive_reward_distribution: Any) -> int:
    example = additive_reward_distribution
    if callable(example):
        example = as_draw("additive_reward_distribution", example)(np.random.default_rng(0))
    shape = np.shape(example)
    if len(shape) != 1 or shape[0] == 0:
        raise OptionError(
            f"additive_reward_distribution must draw numbers [K], one for each arm, got {describe(example)}."
        )
    return int(shape[0])
