"""The log of a bandit, and the driver that begins with the rows in it that no checkpoint has seen."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.drivers import DynamicStepDriver
from diskbuf.drivers.driver import ActingPolicy, Observer
from diskbuf.replay_buffers.uniform import UniformReplayBuffer
from diskbuf.trajectories import StepType, TimeStep, Trajectory, from_transition
from diskbuf.tree import Structure

_LOGGER = logging.getLogger("diskbuf.bandits")
_BLOCK = 256  # rows that are read at once


class BanditLog:
    """The rows of a bandit by their number, which counts from the first that was ever logged.

    Args:
        buffer: What they are added to. Its window is what no `clear` has emptied.
        history: The same store opened with `history=True`, or None where it keeps none.
    """

    def __init__(self, buffer: UniformReplayBuffer, history: UniformReplayBuffer | None = None) -> None:
        self._buffer = buffer
        self._history = history
        self._lanes: npt.NDArray[np.int64] = np.arange(buffer.batch_size)[:, None]

    def __len__(self) -> int:
        return self._buffer.next_id

    @property
    def first(self) -> int:
        """The number of the oldest row that can be read."""
        return self._buffer.first_id if self._history is None else self._history.first_id

    def read(self, first: int, count: int) -> Any:
        """Returns the rows from number `first` on, leaves [B, count, *shape]."""
        is_left = self._history is not None and first < self._buffer.first_id
        source = self._history if is_left and self._history is not None else self._buffer
        return source.read(np.arange(first, first + count)[None], self._lanes)

    def rows(self, first: int) -> Iterator[Any]:
        """Yields the rows from number `first` to the last one there is now, leaves [B, *shape]."""
        last = len(self)
        structure = Structure(self._buffer.data_spec)
        for start in range(first, last, _BLOCK):
            leaves = structure.flatten(self.read(start, min(_BLOCK, last - start)))
            for t in range(leaves[0].shape[1]):
                yield structure.unflatten([leaf[:, t] for leaf in leaves])

    def clear(self) -> None:
        """Empties the window; what keeps history keeps the rows."""
        self._buffer.clear()

    def flush(self) -> None:
        """Brings the rows to the disk."""
        self._buffer.flush()


class LoggedDriver(DynamicStepDriver):
    """Takes `steps` rows a run, of which those come first that the log has and the agent was not trained on.

    They are not played, but played along with: environment and policy go through them again, so that they and their
    generators end where they would be, as long as the environment says what the log says. An environment that doesn't
    repeat itself is left alone from the first difference on, and the metrics see what was logged.

    Args:
        environment: A bandit environment.
        policy: What chooses arms.
        log: Where rows are, or None for a buffer that only the observer `add` knows.
        add: Takes each new row into the buffer.
        transform: What `add` makes of a row before the buffer gets it; None for nothing.
        metrics: What sees each row; the first of them counts steps, also of rows that the others can't be shown.
        steps: Rows of a run.
    """

    def __init__(
        self,
        environment: Any,
        policy: ActingPolicy,
        *,
        log: BanditLog | None,
        add: Observer,
        transform: Callable[[Any], Any] | None,
        metrics: Iterable[Observer],
        steps: int,
    ) -> None:
        self._metrics = tuple(metrics)
        super().__init__(environment, policy, [add, *self._metrics], num_steps=steps * environment.batch_size)
        self._log = log
        self._transform = transform
        self._steps = steps
        self._position = 0
        self._waiting: Iterator[Any] = iter(())
        self._is_followed = False

    @property
    def log(self) -> BanditLog | None:
        """The rows by their number, if they have any."""
        return self._log

    @property
    def position(self) -> int:
        """The number of the row that comes next."""
        return self._position

    @property
    def num_waiting(self) -> int:
        """Rows in the log that come before new ones."""
        return 0 if self._log is None else len(self._log) - self._position

    def go_on_from(self, position: int, *, is_followed: bool) -> None:
        """Sets where runs begin.

        Args:
            position: The number of a row in the log, or of the next one.
            is_followed: Whether environment and policy are where they were before that row.
        """
        self._position = position
        self._is_followed = is_followed
        self._waiting = iter(()) if self._log is None else self._log.rows(position)

    def run(
        self, time_step: TimeStep | None = None, policy_state: Any = (), *, maximum_iterations: int | None = None
    ) -> tuple[TimeStep, Any]:
        """Takes `steps` rows, see `DynamicStepDriver.run`; those from the log aren't counted by maximum_iterations."""
        left = self._steps
        for row in self._waiting:
            self._show(row)
            self._position += 1
            left -= 1
            if not left:
                return self.env.current_time_step(), policy_state
        before = 0 if self._log is None else len(self._log)
        try:
            return self._drive(
                time_step, policy_state, goal=left * self.env.batch_size, maximum_iterations=maximum_iterations
            )
        finally:
            self._position += left if self._log is None else len(self._log) - before

    def _show(self, logged: Any) -> None:
        played = self._played(logged) if self._is_followed else None
        if played is None and self._transform is not None:
            _LOGGER.warning(
                "The metrics miss a row of the log: it was transformed, and the environment doesn't repeat it."
            )
            self._metrics[0](logged)
            return
        for metric in self._metrics:
            metric(logged if played is None else played)

    def _played(self, logged: Any) -> Trajectory | None:
        """Plays a row again, with the arms in the log; None once it comes out otherwise."""
        env = self.env
        make_row: Callable[..., Trajectory | None] | None = getattr(env, "make_row", None)
        row = None
        while row is None:
            time_step = env.current_time_step()._replace(step_type=np.full(env.batch_size, StepType.FIRST))
            chosen = self.policy.action(time_step, ())
            if make_row is None and hasattr(logged, "action"):
                chosen = chosen._replace(action=logged.action)
            row = (make_row or from_transition)(time_step, chosen, env.step(chosen.action))
        self._is_followed = _says_the_same(row if self._transform is None else self._transform(row), logged)
        return row if self._is_followed else None


def _says_the_same(row: Any, logged: Any) -> bool:
    """Whether observations and rewards of two rows are equal."""
    for name in ("observation", "reward"):
        mine, theirs = getattr(row, name, ()), getattr(logged, name, ())
        structure = Structure(theirs)
        for one, other in zip(structure.flatten(mine), structure.flatten(theirs), strict=True):
            if not np.array_equal(one, other):
                return False
    return True
