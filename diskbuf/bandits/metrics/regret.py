"""What the chosen arms cost, row by row, under TF-Agents' names.

All but the cumulative one tell of the last row that they saw, the mean over its lanes, as in TF-Agents.
"""

import abc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.errors import OptionError, SpecError
from diskbuf.metrics.metric import Metric, as_array


class _LastMean(Metric):
    """The mean over the lanes of a number that a row gives."""

    def __init__(self, name: str, prefix: str, function: Callable[[Any], Any], label: str) -> None:
        super().__init__(name, prefix)
        if not callable(function):
            raise OptionError(f"{label} must be a function of a batch of observations, got {function!r}.")
        self._function = function
        self._label = label
        self._mean = 0.0

    def result(self) -> Any:
        """Returns the float32 mean of the last row, 0 before the first."""
        return np.float32(self._mean)

    def reset(self) -> None:
        """Forgets the last row."""
        self._mean = 0.0

    def _observe(self, trajectory: Any, step_type: npt.NDArray[Any], next_step_type: npt.NDArray[Any]) -> None:  # noqa: ARG002
        self._mean = float(self._numbers(trajectory, len(step_type)).mean())

    @abc.abstractmethod
    def _numbers(self, trajectory: Any, lanes: int) -> npt.NDArray[Any]:
        """Returns [B], what each lane of the row gives."""

    def _of_observation(self, trajectory: Any, lanes: int, *, is_per_arm: bool) -> npt.NDArray[Any]:
        """What the function gives for the row's observations, [B] or [B, K]."""
        found = np.asarray(self._function(trajectory.observation))
        if found.dtype.kind not in "biuf" or found.ndim != 1 + is_per_arm or len(found) != lanes:
            wanted = f"[{lanes}, K]" if is_per_arm else f"[{lanes}]"
            raise SpecError(
                f"{self._label} must return numbers {wanted}, got {found.dtype} {list(found.shape)} in {self}."
            )
        return found

    def _state(self) -> dict[str, Any]:
        return {"mean": self._mean}

    def _restore(self, state: dict[str, Any]) -> None:
        self._mean = float(state["mean"])


class RegretMetric(_LastMean):
    """How much more the baseline would have earned, in the last row.

        >>> from diskbuf.trajectories import PolicyStep, from_transition, restart, termination
        >>> contexts = np.zeros((2, 3), np.float32)
        >>> action = PolicyStep(np.array([0, 1]))
        >>> row = from_transition(restart(contexts, batch_size=2), action, termination(contexts, reward=[1.0, 0.5]))
        >>> metric = RegretMetric(lambda observation: np.ones(len(observation)))
        >>> _ = metric(row)
        >>> print(metric.name, metric.result())
        RegretMetric 0.25

    Args:
        baseline_reward_fn: From observations [B, *shape] to rewards [B]; `environment.optimal_reward`, say, for what is
            called regret. Of a nest of rewards, the leaf `reward` is what is held against it.
        name: What summaries and logs call it.
        prefix: What TensorBoard groups it under.

    Raises:
        OptionError: If baseline_reward_fn isn't callable.
    """

    def __init__(
        self, baseline_reward_fn: Callable[[Any], Any], name: str = "RegretMetric", prefix: str = "Metrics"
    ) -> None:
        super().__init__(name, prefix, baseline_reward_fn, "baseline_reward_fn")

    def _numbers(self, trajectory: Any, lanes: int) -> npt.NDArray[Any]:
        baseline = self._of_observation(trajectory, lanes, is_per_arm=False)
        return np.asarray(baseline - _reward_of(trajectory, lanes, self), np.float64)


class CumulativeRegretMetric(RegretMetric):
    """How much more the baseline would have earned, in all rows and lanes together: what regret plots show.

    Args:
        baseline_reward_fn: As in `RegretMetric`.
        name: What summaries and logs call it.
        prefix: What TensorBoard groups it under.

    Raises:
        OptionError: If baseline_reward_fn isn't callable.
    """

    def __init__(
        self, baseline_reward_fn: Callable[[Any], Any], name: str = "CumulativeRegretMetric", prefix: str = "Metrics"
    ) -> None:
        super().__init__(baseline_reward_fn, name, prefix)

    def _observe(self, trajectory: Any, step_type: npt.NDArray[Any], next_step_type: npt.NDArray[Any]) -> None:  # noqa: ARG002
        self._mean += float(self._numbers(trajectory, len(step_type)).sum())

    def result(self) -> Any:
        """Returns the sum so far, a float64."""
        return np.float64(self._mean)


class SuboptimalArmsMetric(_LastMean):
    """In what share of the lanes another arm than the baseline's was pulled, in the last row.

    Args:
        baseline_action_fn: From observations [B, *shape] to arms [B], such as `environment.optimal_action`.
        name: What summaries and logs call it.
        prefix: What TensorBoard groups it under.

    Raises:
        OptionError: If baseline_action_fn isn't callable.
    """

    def __init__(
        self, baseline_action_fn: Callable[[Any], Any], name: str = "SuboptimalArmsMetric", prefix: str = "Metrics"
    ) -> None:
        super().__init__(name, prefix, baseline_action_fn, "baseline_action_fn")

    def _numbers(self, trajectory: Any, lanes: int) -> npt.NDArray[Any]:
        best = self._of_observation(trajectory, lanes, is_per_arm=False)
        return np.asarray(best != _arms_of(trajectory, lanes, self))


class DistanceFromGreedyMetric(_LastMean):
    """How much less the chosen arms were estimated to earn than the arms estimated best, in the last row.

    It tells how much the policy explores by its own estimates; regret is about the truth.

    Args:
        estimated_reward_fn: From observations [B, *shape] to estimates [B, K], such as `policy.predicted_rewards`. Arms
            are its columns, from 0 on.
        name: What summaries and logs call it.
        prefix: What TensorBoard groups it under.

    Raises:
        OptionError: If estimated_reward_fn isn't callable.
    """

    def __init__(
        self,
        estimated_reward_fn: Callable[[Any], Any],
        name: str = "DistanceFromGreedyMetric",
        prefix: str = "Metrics",
    ) -> None:
        super().__init__(name, prefix, estimated_reward_fn, "estimated_reward_fn")

    def _numbers(self, trajectory: Any, lanes: int) -> npt.NDArray[Any]:
        estimates = self._of_observation(trajectory, lanes, is_per_arm=True)
        return np.asarray(estimates.max(axis=1) - _chosen(estimates, _arms_of(trajectory, lanes, self), self))


class ConstraintViolationsMetric(_LastMean):
    """How probable it is that the chosen arms violate a constraint, in the last row.

    Args:
        constraint: From observations [B, *shape] to [B, K], how probable it is, from 0 to 1, that each arm keeps to it.
        name: What summaries and logs call it.
        prefix: What TensorBoard groups it under.

    Raises:
        OptionError: If constraint isn't callable.
    """

    def __init__(
        self, constraint: Callable[[Any], Any], name: str = "ConstraintViolationMetric", prefix: str = "Metrics"
    ) -> None:
        super().__init__(name, prefix, constraint, "constraint")

    def _numbers(self, trajectory: Any, lanes: int) -> npt.NDArray[Any]:
        feasible = self._of_observation(trajectory, lanes, is_per_arm=True)
        return np.asarray(1.0 - _chosen(feasible, _arms_of(trajectory, lanes, self), self))


def _reward_of(trajectory: Any, lanes: int, metric: Metric) -> npt.NDArray[Any]:
    reward = trajectory.reward
    if isinstance(reward, Mapping) and "reward" in reward:
        reward = reward["reward"]
    array = as_array(reward)
    if array.dtype.kind not in "biuf" or array.shape != (lanes,):
        raise SpecError(
            f"leaf 'reward' must be numbers [{lanes}], got {array.dtype} {list(array.shape)} in {metric}.",
            path="reward",
        )
    return array


def _arms_of(trajectory: Any, lanes: int, metric: Metric) -> npt.NDArray[Any]:
    action = as_array(trajectory.action)
    if action.dtype.kind not in "iu" or action.shape != (lanes,):
        raise SpecError(
            f"leaf 'action' must be integers [{lanes}], got {action.dtype} {list(action.shape)} in {metric}.",
            path="action",
        )
    return action


def _chosen(per_arm: npt.NDArray[Any], action: npt.NDArray[Any], metric: Metric) -> npt.NDArray[Any]:
    """[B] of [B, K], what stands in the columns of the actions."""
    if len(action) and not 0 <= action.min() <= action.max() < per_arm.shape[1]:
        raise SpecError(
            f"leaf 'action' must lie within [0, {per_arm.shape[1] - 1}], got {action.min()} to {action.max()} "
            f"in {metric}.",
            path="action",
        )
    return np.asarray(per_arm[np.arange(len(action)), action])
