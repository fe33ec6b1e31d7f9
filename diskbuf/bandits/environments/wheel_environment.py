"""The wheel: a bandit whose best arm differs from the safe one only at the rim, so that it asks for exploration."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.bandits.environments._draws import as_numbers, as_spreads
from diskbuf.bandits.environments.bandit_environment import BanditEnvironment
from diskbuf.errors import OptionError
from diskbuf.specs import ArraySpec

_NUM_ACTIONS = 5
_PLACES = np.array([2, 1], np.int8)  # what a negative coordinate counts
_ARMS = np.array([1, 2, 3, 4])  # beyond delta, by the sum of those
_TO_BEST = np.array([0, _NUM_ACTIONS])  # from an arm's row to its row where it is the best


class WheelEnvironment(BanditEnvironment):
    """Contexts from the unit disc, five arms.

    A context is drawn uniformly from the unit disc. Arm a pays a normal reward of mean mu_base[a] and standard
    deviation std_base[a]. Where the context is further than delta from the middle, the one arm that belongs to its
    quadrant pays mu_high and std_high instead: arm 1 where both coordinates are positive, arm 2 where the second is
    negative, arm 3 where the first is, arm 4 where both are. With delta near 1 that happens rarely.

    Section 5.4 of Riquelme, Tucker and Snoek, "Deep Bayesian Bandits Showdown", ICLR 2018; parameters and quadrants
    are those of TF-Agents' WheelPyEnvironment. A coordinate of exactly 0 counts as positive.

        >>> env = WheelEnvironment(0.5, [1.2, 1.0, 1.0, 1.0, 1.0], [0.01] * 5, 50.0, 0.01, batch_size=2, seed=0)
        >>> env.reset().observation.shape
        (2, 2)
        >>> env.optimal_action(np.array([[0.1, 0.1], [0.6, -0.6]], np.float32))
        array([0, 2], dtype=int32)

    Args:
        delta: Radius within which arm 0 is best, inside (0, 1).
        mu_base: [5] mean rewards, the first the highest.
        std_base: [5] standard deviations.
        mu_high: Mean reward of a quadrant's arm beyond delta, at least mu_base[0].
        std_high: Its standard deviation.
        batch_size: B.
        seed: Of contexts and rewards; None takes entropy from the system.

    Raises:
        OptionError: If an argument is outside its rule.
    """

    def __init__(
        self,
        delta: float,
        mu_base: Sequence[float],
        std_base: Sequence[float],
        mu_high: float,
        std_high: float,
        batch_size: int = 1,
        *,
        seed: int | None = None,
    ) -> None:
        self._delta = float(as_numbers("delta", delta, ()))
        if not 0 < self._delta < 1:
            raise OptionError(f"delta must lie inside (0, 1), got {delta!r}.")
        means = as_numbers("mu_base", mu_base, (_NUM_ACTIONS,))
        if means[0] < means.max():
            raise OptionError(f"the first of mu_base must be the highest, got {means.tolist()}. Put that arm first.")
        self._mu_high = float(as_numbers("mu_high", mu_high, ()))
        if self._mu_high < means[0]:
            raise OptionError(
                f"mu_high must be at least the {means[0]} of mu_base[0], got {self._mu_high}. "
                "Otherwise no quadrant's arm is ever the best."
            )
        self._mu_base = float(means[0])
        # [10]: at a of arm a where another is the best, at 5 + a where it is; of arm 0 there is one reward only.
        self._means = np.append(means, [self._mu_base] + [self._mu_high] * (_NUM_ACTIONS - 1))
        if np.ndim(std_base) == 0:
            raise OptionError(f"std_base must be numbers [{_NUM_ACTIONS}], got {std_base!r}.")
        spreads = as_spreads("std_base", std_base, (_NUM_ACTIONS,))
        highs = [float(as_spreads("std_high", std_high, ()))] * (_NUM_ACTIONS - 1)
        self._spreads = np.concatenate([spreads, spreads[:1], highs])
        super().__init__(ArraySpec((2,), np.float32, "observation"), _NUM_ACTIONS, batch_size=batch_size, seed=seed)

    def _observe(self) -> npt.NDArray[np.float32]:
        drawn = self._rng.random((2, self._batch_size))
        radius, angle = np.sqrt(drawn[0]), drawn[1] * (2 * np.pi)  # the root, so that equal areas are equally likely
        observation = np.empty((self._batch_size, 2), np.float32)
        np.multiply(radius, np.cos(angle), out=observation[:, 0], casting="same_kind")
        np.multiply(radius, np.sin(angle), out=observation[:, 1], casting="same_kind")
        return observation

    def _apply_action(self, action: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        row = action + _TO_BEST.take(action == _best_arms(self.current_time_step().observation, self._delta))
        reward = self._rng.standard_normal(self._batch_size)
        reward *= self._spreads.take(row)
        reward += self._means.take(row)
        return reward.astype(np.float32)

    def optimal_reward(self, observation: Any) -> npt.NDArray[np.float32]:
        """Returns [B] float32 the mean reward of the best arm: mu_base[0] within delta, mu_high beyond.

        Args:
            observation: [B, 2].
        """
        return compute_optimal_reward(observation, self._delta, self._mu_base, self._mu_high)

    def optimal_action(self, observation: Any) -> npt.NDArray[np.int32]:
        """Returns [B] int32 the best arm: 0 within delta, the quadrant's beyond.

        Args:
            observation: [B, 2].
        """
        return compute_optimal_action(observation, self._delta)


def compute_optimal_action(observation: Any, delta: float) -> npt.NDArray[np.int32]:
    """Returns [B] int32 the best arm of a wheel, by TF-Agents' name for it.

    Args:
        observation: [B, 2].
        delta: The wheel's radius.
    """
    return _best_arms(np.asarray(observation), delta).astype(np.int32)


def compute_optimal_reward(observation: Any, delta: float, mu_inside: float, mu_high: float) -> npt.NDArray[np.float32]:
    """Returns [B] float32 the mean reward of a wheel's best arm, by TF-Agents' name for it.

    Args:
        observation: [B, 2].
        delta: The wheel's radius.
        mu_inside: Mean reward of arm 0, the first of mu_base.
        mu_high: Mean reward of a quadrant's arm beyond the radius.
    """
    outside = _is_outside(np.asarray(observation), delta)
    return np.where(outside, np.float32(mu_high), np.float32(mu_inside))


def _best_arms(observation: npt.NDArray[Any], delta: float) -> npt.NDArray[np.int64]:
    arms: npt.NDArray[np.int64] = _ARMS.take((observation < 0).view(np.int8) @ _PLACES)
    arms *= _is_outside(observation, delta)
    return arms


def _is_outside(observation: npt.NDArray[Any], delta: float) -> npt.NDArray[np.bool_]:
    return np.asarray(np.hypot(observation[:, 0], observation[:, 1]) > delta)
