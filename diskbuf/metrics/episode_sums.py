"""Sums over whole episodes, lane by lane, and those of the last few episodes."""

import collections
from typing import Any

import numpy as np
import numpy.typing as npt

_Flags = npt.NDArray[np.bool_]


class EpisodeSums:
    """Adds up one amount per row and lane, and keeps the sums of the last episodes that were seen from their start.

    An episode that was running when the first row came, or that never ends because FIRST comes again, gives no sum.
    Sums are float64.

    Args:
        lanes: B.
        shape: Of the amount in one lane.
        buffer_size: Episodes whose sums are kept.
    """

    def __init__(self, lanes: int, shape: tuple[int, ...], buffer_size: int) -> None:
        self.running = np.zeros((lanes, *shape))
        self.has_begun = np.zeros(lanes, np.bool_)  # whether a lane's episode was seen from its start
        self._all_have = False  # the same of all lanes, from then on for ever
        self.buffer_size = buffer_size
        self._ones = (1,) * len(shape)
        self.finished: collections.deque[Any] = collections.deque(maxlen=buffer_size)  # newest last

    def add(self, is_first: _Flags | None, has_ended: _Flags | None, amount: Any) -> None:
        """Takes one row.

        Args:
            is_first: [B] where an episode begins, None if nowhere.
            has_ended: [B] where the row ends the episode, None if nowhere.
            amount: [B, *shape] or one number for all. What a boundary row adds is gone with the next FIRST.
        """
        if is_first is not None:
            np.copyto(self.running, 0, where=is_first.reshape(-1, *self._ones) if self._ones else is_first)
            if not self._all_have:
                self.has_begun |= is_first
                self._all_have = bool(self.has_begun.all())
        self.running += amount
        if has_ended is not None:
            whole = self.running[has_ended if self._all_have else has_ended & self.has_begun]
            self.finished.extend(whole[-self.buffer_size :].tolist())

    def array(self) -> npt.NDArray[np.float64]:
        """Returns [episodes, *shape] the sums kept, oldest first."""
        return np.array(self.finished, np.float64).reshape(len(self.finished), *self.running.shape[1:])

    def state(self) -> dict[str, Any]:
        """Returns everything as a JSON value."""
        return {
            "running": self.running.tolist(),
            "has_begun": self.has_begun.tolist(),
            "finished": self.array().tolist(),
        }

    def restored(self, state: dict[str, Any]) -> "EpisodeSums":
        """Returns sums of the same size with what `state` told, the newest episodes where there are too many.

        Raises:
            ValueError: If the state is of another size.
        """
        lanes, *shape = self.running.shape
        other = EpisodeSums(lanes, tuple(shape), self.buffer_size)
        running = np.array(state["running"], np.float64)
        if running.shape != self.running.shape:
            raise ValueError(f"sums {list(running.shape)} for {list(self.running.shape)}")
        other.running[:] = running
        other.has_begun[:] = state["has_begun"]
        other.finished.extend(np.array(state["finished"], np.float64).reshape(-1, *shape))
        return other
