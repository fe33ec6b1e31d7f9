"""Arms that pay 0 or 1, and no context: the plainest bandit there is."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.bandits.environments._draws import as_numbers
from diskbuf.bandits.environments.bandit_environment import BanditEnvironment
from diskbuf.errors import OptionError
from diskbuf.specs import ArraySpec


class BernoulliEnvironment(BanditEnvironment):
    """Arm a pays 1 with probability means[a], else 0. The context is the number 1, as TF-Agents has it.

    Example 1.1 in Russo, Van Roy, Kazerouni, Osband and Wen, "A Tutorial on Thompson Sampling", 2018.

        >>> env = BernoulliEnvironment([0.1, 1.0], batch_size=3, seed=0)
        >>> env.reset().observation
        array([1., 1., 1.], dtype=float32)
        >>> env.step(np.array([1, 1, 1])).reward
        array([1., 1., 1.], dtype=float32)

    Args:
        means: [K] probabilities.
        batch_size: B.
        seed: Of the rewards; None takes entropy from the system.

    Raises:
        OptionError: If an argument is outside its rule.
    """

    def __init__(self, means: Sequence[float], batch_size: int = 1, *, seed: int | None = None) -> None:
        if np.ndim(means) != 1 or len(means) == 0:
            raise OptionError(f"means must hold a probability for each of at least one arm, got {means!r}.")
        self._means = as_numbers("means", means, (len(means),))
        if (self._means < 0).any() or (self._means > 1).any():
            raise OptionError(f"means must lie within [0, 1], got {self._means.tolist()}.")
        self._best = np.int32(self._means.argmax())
        super().__init__(ArraySpec((), np.float32, "observation"), len(means), batch_size=batch_size, seed=seed)

    def _observe(self) -> npt.NDArray[np.float32]:
        return np.ones(self._batch_size, np.float32)

    def _apply_action(self, action: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        is_paid: npt.NDArray[np.bool_] = self._rng.random(self._batch_size) < self._means.take(action)
        return is_paid.astype(np.float32)

    def optimal_reward(self, observation: Any) -> npt.NDArray[np.float32]:
        """Returns [B] float32 the highest of the means.

        Args:
            observation: [B].
        """
        return np.full(len(observation), self._means[self._best], np.float32)

    def optimal_action(self, observation: Any) -> npt.NDArray[np.int32]:
        """Returns [B] int32 the arm with the highest mean, of equal ones the first.

        Args:
            observation: [B].
        """
        return np.full(len(observation), self._best)
