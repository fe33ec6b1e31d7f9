"""Metrics that count: steps of the environment, and episodes."""

from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.metrics.metric import LAST, Metric, where_ended


class _Counter(Metric):
    def __init__(self, name: str, prefix: str) -> None:
        super().__init__(name, prefix)
        self._count = 0

    def result(self) -> np.int64:
        """Returns the count so far."""
        return np.int64(self._count)

    def reset(self) -> None:
        """Counts from 0 again."""
        self._count = 0

    def _state(self) -> dict[str, Any]:
        return {"count": self._count}

    def _restore(self, state: dict[str, Any]) -> None:
        self._count = int(state["count"])


class EnvironmentSteps(_Counter):
    """Counts the steps of all lanes; boundary rows are none.

        >>> from diskbuf.trajectories import PolicyStep, from_transition, restart, transition
        >>> zeros = np.zeros(8)
        >>> row = from_transition(restart(zeros, batch_size=8), PolicyStep(zeros), transition(zeros, reward=zeros))
        >>> metric = EnvironmentSteps()
        >>> for _ in range(3):
        ...     _ = metric(row)
        >>> print(metric.name, metric.result())
        EnvironmentSteps 24

    Args:
        name: What summaries and logs call it.
        prefix: What TensorBoard groups it under.
    """

    def __init__(self, name: str = "EnvironmentSteps", prefix: str = "Metrics") -> None:
        super().__init__(name, prefix)

    def _observe(self, trajectory: Any, step_type: npt.NDArray[Any], next_step_type: npt.NDArray[Any]) -> None:  # noqa: ARG002
        self._count += len(step_type) - int(np.count_nonzero(step_type == LAST))


class NumberOfEpisodes(_Counter):
    """Counts the episodes of all lanes that have ended, terminated or truncated.

    An episode counts with the row whose action ended it. (`DynamicEpisodeDriver` counts one row later, with the
    boundary.)

    Args:
        name: What summaries and logs call it.
        prefix: What TensorBoard groups it under.
    """

    def __init__(self, name: str = "NumberOfEpisodes", prefix: str = "Metrics") -> None:
        super().__init__(name, prefix)

    def _observe(self, trajectory: Any, step_type: npt.NDArray[Any], next_step_type: npt.NDArray[Any]) -> None:  # noqa: ARG002
        has_ended = where_ended(step_type, next_step_type)
        if has_ended is not None:
            self._count += int(np.count_nonzero(has_ended))
