"""Reads a bandit log block by block, in the order in which it was logged. All that learns from logs reads through here.

A log is any store of Trajectories with one action out of K and one number as reward: what the bandit trainer keeps, and
what an import makes. Each row is a decision of its own; boundary rows are left out.
"""

import contextlib
import dataclasses
import operator
import os
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from diskbuf.errors import OptionError, SpecError, WindowError
from diskbuf.networks.action_values import DiscreteActions
from diskbuf.readers.requests import count
from diskbuf.replay_buffers.uniform import UniformReplayBuffer
from diskbuf.replay_buffers.uniform import open as open_buffer
from diskbuf.trajectories import StepType, Trajectory
from diskbuf.tree import Structure, describe

Log = UniformReplayBuffer | str | os.PathLike[str]
Invalid = Literal["reject", "drop", "keep"]

_BLOCK_ROWS = 65_536


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggedRows:
    """N rows of a log, oldest first; lanes of one step one after the other.

    Attributes:
        ids: [N] int64, step ids.
        lanes: [N] int64.
        observation: Nest of [N, *shape] arrays, or None when it wasn't asked for.
        index: [N] int64, arms from 0 on: action minus the spec's minimum.
        reward: [N] of the store's float dtype.
        propensity: [N] float32, or None where the log has none.
        info: Other leaves of policy_info that were asked for, [N, *shape] by their path in there.
    """

    ids: npt.NDArray[np.int64]
    lanes: npt.NDArray[np.int64]
    observation: Any
    index: npt.NDArray[np.int64]
    reward: npt.NDArray[Any]
    propensity: npt.NDArray[np.float32] | None
    info: dict[str, npt.NDArray[Any]]

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: npt.NDArray[Any] | slice) -> "LoggedRows":
        """Returns the rows of a mask [N], of positions [M], or of a slice, which copies nothing."""
        structure = None if self.observation is None else Structure(self.observation)
        return LoggedRows(
            ids=self.ids[rows],
            lanes=self.lanes[rows],
            observation=None
            if structure is None
            else structure.unflatten([leaf[rows] for leaf in structure.flatten(self.observation)]),
            index=self.index[rows],
            reward=self.reward[rows],
            propensity=None if self.propensity is None else self.propensity[rows],
            info={name: leaf[rows] for name, leaf in self.info.items()},
        )


class LogReader:
    """A bandit log, and a range of it.

        >>> import diskbuf
        >>> from diskbuf import trajectories
        >>> spec = trajectories.trajectory_spec(
        ...     trajectories.time_step_spec(diskbuf.ArraySpec([], "float32")),
        ...     trajectories.PolicyStep(diskbuf.BoundedArraySpec([], "int32", 0, 2)),
        ... )
        >>> context = np.zeros(2, np.float32)
        >>> with diskbuf.UniformReplayBuffer(spec, batch_size=2) as buffer:
        ...     step = trajectories.PolicyStep(np.array([0, 2], np.int32))
        ...     row = trajectories.from_transition(
        ...         trajectories.restart(context, batch_size=2), step, trajectories.termination(context, [0.5, 1.0])
        ...     )
        ...     buffer.add_batch(row)
        ...     with LogReader(buffer) as log:
        ...         [(rows.index.tolist(), rows.reward.tolist()) for rows in log.blocks()]
        [([0, 2], [0.5, 1.0])]

    Args:
        store: A buffer, which stays open; or the path of a store, which is opened with its history.
        first_id: First step id; None is the oldest there is.
        next_id: Where to stop, exclusive; None is after the newest there is now.

    Raises:
        SpecError: If its rows aren't those of a bandit.
        WindowError: If the range isn't in the log.
        StoreError: If there is no store at the path, or it can't be opened.
    """

    def __init__(self, store: Log, *, first_id: int | None = None, next_id: int | None = None) -> None:
        self._closing = contextlib.ExitStack()
        if isinstance(store, UniformReplayBuffer):
            self._buffer = store
        else:
            self._buffer = self._closing.enter_context(open_buffer(store, history=True))
        try:
            spec = self._buffer.data_spec
            self._spec = _checked_spec(spec)
            self._actions = DiscreteActions.of(spec.action)
            paths = Structure(spec).paths
            self._numbers = {path: number for number, path in enumerate(paths)}
            oldest, newest = self._buffer.first_id, self._buffer.next_id
            self._first = oldest if first_id is None else operator.index(first_id)
            self._next = newest if next_id is None else operator.index(next_id)
            if not oldest <= self._first <= self._next <= newest:
                raise WindowError(
                    f"first_id and next_id must be a range of the ids from {oldest} to {newest}, got {self._first} and "
                    f"{self._next}."
                )
        except BaseException:
            self.close()
            raise

    @property
    def buffer(self) -> UniformReplayBuffer:
        """What it reads."""
        return self._buffer

    @property
    def data_spec(self) -> Trajectory:
        """The spec of a row."""
        return self._spec

    @property
    def num_actions(self) -> int:
        """K, the number of arms."""
        return self._actions.num_actions

    @property
    def minimum_action(self) -> int:
        """The action of arm 0."""
        return self._actions.minimum

    @property
    def num_rows(self) -> int:
        """Rows in the range, all lanes together, boundary rows with them."""
        return (self._next - self._first) * self._buffer.batch_size

    @property
    def first_id(self) -> int:
        """First step id of the range."""
        return self._first

    @property
    def next_id(self) -> int:
        """Where the range stops, exclusive."""
        return self._next

    @property
    def has_propensity(self) -> bool:
        """Whether rows tell how probable their arm was."""
        return "policy_info/propensity" in self._numbers

    def blocks(
        self,
        *,
        with_observation: bool = True,
        info: Sequence[str] = (),
        invalid: Invalid = "reject",
        block_rows: int = _BLOCK_ROWS,
    ) -> Iterator[LoggedRows]:
        """Yields the rows of the range, a block at a time, and reads only the columns that were asked for.

        Args:
            with_observation: Whether contexts are read.
            info: Other leaves of policy_info to read, by their path in there, such as "timestamp".
            invalid: What becomes of rows whose reward or context isn't finite: an error, left out, or as they are.
            block_rows: About how many rows to a block.

        Raises:
            SpecError: If a row isn't finite and invalid is "reject", or an action lies outside its spec.
            OptionError: If there is no such leaf, or an argument is outside its rule.
            StoreCorruptError: If a chunk file is missing, short or has rotten.
        """
        if invalid not in ("reject", "drop", "keep"):
            raise OptionError(f"invalid must be 'reject', 'drop' or 'keep', got {invalid!r}.")
        for name in info:
            if f"policy_info/{name}" not in self._numbers:
                known = [path.removeprefix("policy_info/") for path in self._numbers if path.startswith("policy_info/")]
                raise OptionError(f"info must name leaves of policy_info, {known}, got {name!r}.")
        wanted = ["step_type", "action", "reward", *(f"policy_info/{name}" for name in info)]
        if self.has_propensity:
            wanted.append("policy_info/propensity")
        contexts = [path for path in self._numbers if path.partition("/")[0] == "observation"]
        if with_observation:
            wanted += contexts
        return self._blocks(
            wanted, contexts if with_observation else [], info, invalid, count("block_rows", block_rows)
        )

    def _blocks(
        self, wanted: list[str], contexts: list[str], info: Sequence[str], invalid: Invalid, block_rows: int
    ) -> Iterator[LoggedRows]:
        numbers = [self._numbers[path] for path in wanted]
        structure = Structure(self._spec.observation)
        lanes = self._buffer.batch_size
        steps = max(1, block_rows // lanes)
        for first in range(self._first, self._next, steps):
            stop = min(self._next, first + steps)
            leaves = self._buffer._opened().read_columns(numbers, first, stop)
            if leaves is None or leaves[0].shape[1] != stop - first:
                raise WindowError(
                    f"rows {first} to {stop} must stay in the window while they are read, but were overwritten."
                )
            found = {path: _flat(leaf) for path, leaf in zip(wanted, leaves, strict=True)}
            rows = LoggedRows(
                # Of one lane, which most logs are, nothing is copied.
                ids=np.arange(first, stop) if lanes == 1 else np.repeat(np.arange(first, stop), lanes),
                lanes=np.zeros(stop - first, np.int64) if lanes == 1 else np.tile(np.arange(lanes), stop - first),
                observation=structure.unflatten([found[path] for path in contexts]) if contexts else None,
                index=self._index(found["action"], first),
                reward=found["reward"],
                propensity=found.get("policy_info/propensity"),
                info={name: found[f"policy_info/{name}"] for name in info},
            )
            is_step = found["step_type"] != StepType.LAST
            if not is_step.all():
                rows = rows.take(is_step)
            yield rows if invalid == "keep" else _valid(rows, contexts, invalid)

    def _index(self, action: npt.NDArray[Any], first: int) -> npt.NDArray[np.int64]:
        index = action.astype(np.int64) - self._actions.minimum
        if len(index) and (index.min() < 0 or index.max() >= self.num_actions):
            at = int(((index < 0) | (index >= self.num_actions)).argmax())
            low, high = self._actions.minimum, self._actions.minimum + self.num_actions - 1
            raise SpecError(
                f"leaf 'action' must lie within [{low}, {high}], got {action[at]} in row "
                f"{first + at // self._buffer.batch_size} of lane {at % self._buffer.batch_size}.",
                path="action",
            )
        return index

    def close(self) -> None:
        """Closes the store, unless a buffer was given. Closing twice is fine."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"LogReader({self._buffer!r}, first_id={self._first}, next_id={self._next})"


def _checked_spec(spec: Any) -> Trajectory:
    if not isinstance(spec, Trajectory):
        raise SpecError(
            f"a log must hold Trajectory rows, got {describe(spec)}. Import it, or collect it with a driver."
        )
    reward = spec.reward
    if getattr(reward, "shape", None) != () or reward.dtype.kind != "f":
        raise SpecError(f"leaf 'reward' of a log must be one float, got {describe(reward)}.", path="reward")
    return spec


def _flat(leaf: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[lanes, T, *shape] to [T * lanes, *shape], time first."""
    return leaf.swapaxes(0, 1).reshape(leaf.shape[0] * leaf.shape[1], *leaf.shape[2:])


def _valid(rows: LoggedRows, contexts: list[str], invalid: Invalid) -> LoggedRows:
    """The rows with finite numbers, or an error about the first without."""
    leaves = {"reward": rows.reward}
    if contexts:
        leaves.update(zip(contexts, Structure(rows.observation).flatten(rows.observation), strict=True))
    is_finite = np.ones(len(rows), np.bool_)
    for path, leaf in leaves.items():
        if leaf.dtype.kind != "f" or np.isfinite(leaf).all():
            continue
        fits = np.isfinite(leaf).reshape(len(rows), -1).all(axis=1)
        if invalid == "reject":
            at = int((~fits).argmax())
            raise SpecError(
                f"leaf {path!r} must be finite, got {leaf[at]} in row {rows.ids[at]} of lane {rows.lanes[at]}. "
                "Leave such rows out with invalid='drop'.",
                path=path,
            )
        is_finite &= fits
    return rows if is_finite.all() else rows.take(is_finite)
