"""The episodes of a buffer as a table: where they are, how long, what they earned and how they ended."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskbuf.episode_ends import Cuts, EndRule, Rows, begins_of_block, cut_block, end_rule
from diskbuf.episode_index import BLOCK_VALUES
from diskbuf.errors import SpecError
from diskbuf.store.layout import ColumnLayout
from diskbuf.store.reading import Store

if TYPE_CHECKING:
    import pyarrow as pa

    from diskbuf.replay_buffers.uniform import UniformReplayBuffer

_ENDS = ("terminated", "truncated", "open", "broken")
_TERMINATED, _TRUNCATED, _OPEN, _BROKEN, _UNKNOWN = range(5)


def episodes(buffer: "UniformReplayBuffer", *, ends: str | None = None, reward: str | None = None) -> "pa.Table":
    """Lists the episodes in a buffer's window, or as much of each as is there.

    Only the columns for step types, reward and discount are read, a block at a time; memory grows with the number of
    episodes and not with the length of the store. While another process adds, it's the window of the beginning, less
    what was overwritten before it was read.

        >>> import diskbuf
        >>> from diskbuf import trajectories
        >>> spec = trajectories.trajectory_spec(
        ...     trajectories.time_step_spec(diskbuf.ArraySpec([], "int64")),
        ...     trajectories.PolicyStep(diskbuf.ArraySpec([], "int64")),
        ... )
        >>> observation = np.array([0])
        >>> step = trajectories.restart(observation, batch_size=1)
        >>> with diskbuf.UniformReplayBuffer(spec) as buffer:
        ...     for reward in (0.5, 2.0):
        ...         end = trajectories.termination(observation, [reward])
        ...         buffer.add_batch(trajectories.from_transition(step, trajectories.PolicyStep(observation), end))
        ...     table = diskbuf.episodes(buffer)
        >>> table.select(["first_id", "length", "return", "end"]).to_pylist()
        [{'first_id': 0, 'length': 1, 'return': 0.5, 'end': 'terminated'},
         {'first_id': 1, 'length': 1, 'return': 2.0, 'end': 'terminated'}]

    Args:
        buffer: A buffer, open for reading or writing.
        ends: Path of the bool leaf that is True at the last step of an episode, such as `done`; None goes by the step
            types. `diskbuf.episode_ends` has the rule.
        reward: Path of the reward; None takes the scalar `reward` next to the step types, if there is one.

    Returns:
        A row for each piece with a step in it, by first id and lane. The boundary of a `Trajectory`, which only holds
        the final observation, counts as no step.

        - lane: int32.
        - first_id, last_id: int64, of its first and last step.
        - length: int64, its steps, `last_id - first_id + 1`.
        - return: float64, the undiscounted sum of its rewards; null without a scalar reward.
        - end: string. "terminated" when the `discount` of its last step is 0, "truncated" when it isn't, null when the
          episode ended and there is no discount to tell which; "open" when it goes on at the window's end; "broken"
          when a restart or an exception broke it off.
        - is_whole: bool, whether the first step of the episode is in it. False where that has left the window, or was
          before a restart.

    Raises:
        SpecError: When nothing says where episodes end, or a named leaf isn't there or of no use.
        StoreCorruptError: When a chunk file is missing, short or has rotten.
        ClosedError: After the buffer's `close`.
    """
    store = buffer._opened()
    columns = _columns(store, ends, reward)
    pieces = None
    for pieces in _summaries(store, columns):  # noqa: B007  # the last one has them all
        pass
    return (pieces or _nothing(store, columns)).table()


def episode_blocks(
    buffer: "UniformReplayBuffer", *, ends: str | None = None, reward: str | None = None
) -> Iterator["pa.Table"]:
    """As `episodes`, a table after the other as episodes end, so that memory doesn't grow with their number.

    Args:
        buffer: A buffer, open for reading or writing.
        ends: As for `episodes`.
        reward: As for `episodes`.

    Yields:
        Tables as `episodes` returns them, some of them without a row. Each is by first id and lane, but may hold
        episodes that begin before those of the one before it. What is overwritten after it was given isn't taken back.

    Raises:
        SpecError: When nothing says where episodes end, or a named leaf isn't there or of no use.
        StoreCorruptError: When a chunk file is missing, short or has rotten.
        ClosedError: After the buffer's `close`.
    """
    store = buffer._opened()
    return _blocks(store, _columns(store, ends, reward))


class NewEpisodes:
    """The episodes of a buffer that is being written, as they end; each row is read once.

    Args:
        buffer: A buffer, open for reading or writing.
        ends: As for `episodes`.
        reward: As for `episodes`.
        most_steps: How many steps, all lanes together, are looked back at the beginning; None for the whole window.

    Raises:
        SpecError: When nothing says where episodes end, or a named leaf isn't there or of no use.
        ClosedError: After the buffer's `close`.
    """

    def __init__(
        self,
        buffer: "UniformReplayBuffer",
        *,
        ends: str | None = None,
        reward: str | None = None,
        most_steps: int | None = None,
    ) -> None:
        self._buffer = buffer
        store = buffer._opened()
        self._columns = _columns(store, ends, reward)
        first_id, next_id = store.window()
        if most_steps is not None:
            first_id = max(first_id, next_id - most_steps // store.manifest.batch_size)
        self._next_id = first_id
        self._pieces = self._from(first_id, store)

    def _from(self, first_id: int, store: Store) -> "_Summary":
        return _Summary(self._columns, first_id, lanes=store.manifest.batch_size, runs=store.runs)

    def take(self) -> "pa.Table":
        """Returns those that have ended since the last call, as `episodes` does, by first id and lane.

        An episode has ended when the row behind its last one is there. Those of which rows were evicted, or cleared,
        before they were read are left out.

        Raises:
            StoreCorruptError: When a chunk file is missing, short or has rotten.
            ClosedError: After the buffer's `close`.
        """
        import pyarrow as pa

        store = self._buffer._opened()
        numbers = [*self._columns.rule.columns, *(number for number in self._columns[1:] if number is not None)]
        block = max(1, BLOCK_VALUES // store.manifest.batch_size)
        first_id, next_id = store.window()
        found = []
        if next_id < self._next_id:  # another store is there now, or its last steps were lost
            self._next_id, self._pieces = first_id, self._from(first_id, store)
        while self._next_id < next_id:
            start = max(self._next_id, store.window()[0])
            stop = min(next_id, start + block)
            rows = store.read_columns(numbers, start, stop) if start < stop else None
            begin = max(start, store.window()[0]) if rows is None else stop - rows[0].shape[1]
            if begin > self._next_id:  # what came before is gone
                found.append(self._pieces.take_ended())
                self._pieces = self._from(begin, store)
            self._next_id = begin
            if rows is not None:
                self._pieces.add(rows, store.runs)
                self._next_id = stop
        return pa.concat_tables([*found, self._pieces.take_ended()])


def _blocks(store: Store, columns: "_Columns") -> Iterator["pa.Table"]:
    pieces = None
    for pieces in _summaries(store, columns):
        yield pieces.take_ended()
    yield (pieces or _nothing(store, columns)).table()


def _columns(store: Store, ends: str | None, reward: str | None) -> "_Columns":
    layouts = [column.layout for column in store.columns]
    rule = end_rule(layouts, ends)
    return _Columns(
        rule=rule,
        reward=_reward(layouts, rule, reward),
        discount=_scalar(layouts, f"{rule.folder}discount"),
    )


class _Columns(NamedTuple):
    """What is read: the rule's columns, and the numbers of two more, None where there are none."""

    rule: EndRule
    reward: int | None
    discount: int | None


def _nothing(store: Store, columns: _Columns) -> "_Summary":
    return _Summary(columns, 0, lanes=store.manifest.batch_size, runs=store.runs)


def _summaries(store: Store, columns: _Columns) -> Iterator["_Summary"]:
    """Yields the summary after each block of rows; another one where what came before has been overwritten."""
    first_id, next_id = store.window()
    runs = store.runs
    lanes = store.manifest.batch_size
    numbers = [*columns.rule.columns, *(number for number in columns[1:] if number is not None)]
    block = max(1, BLOCK_VALUES // lanes)
    pieces = _Summary(columns, first_id, lanes=lanes, runs=runs)
    while first_id < next_id:
        stop = min(next_id, first_id + block)
        rows = store.read_columns(numbers, first_id, stop)
        begin = max(first_id + 1, store.window()[0]) if rows is None else stop - rows[0].shape[1]
        if begin > first_id:  # what came before has been overwritten
            pieces = _Summary(columns, begin, lanes=lanes, runs=runs)
        if rows is not None:
            pieces.add(rows)
            yield pieces
        first_id = begin if rows is None else stop


class _Summary:
    """Sums up pieces from blocks of rows.

    Args:
        columns: What the rows hold.
        origin: Id of the first row.
        lanes: Number of lanes.
        runs: Ascending first ids of runs.
    """

    def __init__(self, columns: _Columns, origin: int, *, lanes: int, runs: Sequence[int]) -> None:
        self._columns = columns
        self._lanes = lanes
        self._runs = runs
        self._next_id = origin
        self._origin = origin
        self._latest: Rows | None = None  # [lanes, 1] each
        self._step: Rows | None = None  # the rule's columns and the discount, [lanes, 1] each, of each lane's last step
        # Of the piece that goes on in each lane:
        self._first = np.full(lanes, origin, np.int64)
        self._return = np.zeros(lanes)
        self._is_whole = np.zeros(lanes, np.bool)
        self._found: list[tuple[NDArray[Any], ...]] = []

    def add(self, rows: list[NDArray[Any]], runs: Sequence[int] | None = None) -> None:
        """Takes in [lanes, T] each: the rule's columns, then the reward and the discount, where there are any.

        Args:
            rows: The rows.
            runs: First ids of runs, where one may have begun since; None for those that are known.
        """
        self._runs = self._runs if runs is None else runs
        rule = self._columns.rule
        ruled = rows[: len(rule.columns)]
        others = iter(rows[len(rule.columns) :])
        reward = None if self._columns.reward is None else next(others)
        telling = [*ruled, *others]  # what says how a piece ended
        begins, _ = begins_of_block(rule, ruled, first_id=self._next_id, latest=self._latest, runs=self._runs)
        cuts = cut_block(begins, self._next_id, self._first)
        opens = rule.opens(ruled)
        if self._latest is None:
            known = self._origin == 0 or self._origin in self._runs
            self._is_whole[:] = known if opens is None else opens[:, 0]

        is_boundary = rule.is_boundary(ruled)
        returns = self._returns(begins, reward, is_boundary)
        # The last row of each lane up to a step that is no boundary, counted from the row before the block.
        steps = begins.shape[1]
        latest_step = np.where(is_boundary, 0, np.arange(1, steps + 1))
        np.maximum.accumulate(latest_step, axis=1, out=latest_step)
        before = self._step or [column[:, :1] for column in telling]
        extended = [np.concatenate(pair, axis=1) for pair in zip(before, telling, strict=True)]

        cut = np.arange(len(cuts.lane)) + cuts.lane  # numbers of the pieces that end, as `_returns` counts them
        boundary_at_end = self._boundary_before(is_boundary, cuts)
        at = np.where(cuts.step > 0, latest_step[cuts.lane, cuts.step - 1], 0)
        is_whole_after = np.ones(len(cuts.lane), np.bool) if opens is None else opens[cuts.lane, cuts.step]
        is_whole = np.empty(len(cuts.lane), np.bool)
        is_whole[1:] = is_whole_after[:-1]
        is_whole[cuts.is_first] = self._is_whole[cuts.lane[cuts.is_first]]
        self._take(
            cuts.lane,
            cuts.first,
            cuts.step + (self._next_id - 1) - boundary_at_end,
            returns[cut],
            is_whole,
            [column[cuts.lane, at] for column in extended],
            otherwise=_BROKEN,
        )

        of_lane = cuts.lane[cuts.is_last]
        self._first[of_lane] = self._next_id + cuts.step[cuts.is_last]
        self._is_whole[of_lane] = is_whole_after[cuts.is_last]
        cuts_up_to = np.bincount(cuts.lane, minlength=self._lanes).cumsum()
        self._return = returns[cuts_up_to + np.arange(self._lanes)]
        self._latest = [column[:, -1:].copy() for column in ruled]
        lane = np.arange(self._lanes)
        self._step = [column[lane, latest_step[:, -1]][:, None] for column in extended]
        self._next_id += steps

    def _returns(
        self, begins: NDArray[np.bool], reward: NDArray[Any] | None, is_boundary: NDArray[np.bool]
    ) -> NDArray[np.float64]:
        """Sums of the pieces in a block, lane by lane, each lane's first one with what it had before."""
        lane = np.arange(self._lanes)
        piece = begins.reshape(-1).cumsum().reshape(begins.shape) + lane[:, None]
        found: NDArray[Any] = np.zeros(int(piece[-1, -1]) + 1)
        if reward is not None:
            counted = np.where(is_boundary, 0.0, reward)  # float64, and no rest of a sum that another piece was part of
            found = np.bincount(piece.reshape(-1), counted.reshape(-1), minlength=len(found))
        begins_before = begins.sum(axis=1).cumsum() - begins.sum(axis=1)
        found[begins_before + lane] += self._return
        return found

    def _boundary_before(self, is_boundary: NDArray[np.bool], cuts: Cuts) -> NDArray[np.int64]:
        """1 where the row before a cut is a boundary."""
        latest = is_boundary[:, :1] if self._latest is None else self._columns.rule.is_boundary(self._latest)
        inside = is_boundary[cuts.lane, cuts.step - 1]
        return np.where(cuts.step > 0, inside, latest[cuts.lane, 0]).astype(np.int64)

    def _take(
        self,
        lane: NDArray[np.int64],
        first: NDArray[np.int64],
        last: NDArray[np.int64],
        returns: NDArray[np.float64],
        is_whole: NDArray[np.bool],
        telling: Sequence[NDArray[Any]],
        *,
        otherwise: int,
    ) -> None:
        """Keeps pieces, but those that are only a boundary; `otherwise` is the end of those that didn't end."""
        width = len(self._columns.rule.columns)
        ended = np.full(len(lane), _UNKNOWN)
        if self._columns.discount is not None:
            ended = np.where(telling[width] == 0, _TERMINATED, _TRUNCATED)
        has_ended = self._columns.rule.has_ended(telling[:width])
        end = np.where(has_ended, ended, otherwise).astype(np.int8)
        kept = last >= first
        self._found.append(tuple(column[kept] for column in (lane, first, last, returns, end, is_whole)))

    def take_ended(self) -> "pa.Table":
        """Returns the pieces that have ended, and forgets them."""
        found, self._found = self._found, []
        return self._as_table(found)

    def table(self) -> "pa.Table":
        """Returns what was found, the pieces that go on included."""
        if self._latest is not None and self._step is not None:
            last = self._next_id - 1 - self._columns.rule.is_boundary(self._latest)[:, 0]
            self._take(
                np.arange(self._lanes),
                self._first,
                last,
                self._return,
                self._is_whole,
                [column[:, 0] for column in self._step],
                otherwise=_BROKEN if self._next_id in self._runs else _OPEN,
            )
        return self._as_table(self._found)

    def _as_table(self, found: Sequence[tuple[NDArray[Any], ...]]) -> "pa.Table":
        import pyarrow as pa

        types = (np.int64, np.int64, np.int64, np.float64, np.int8, np.bool)
        none = tuple(np.empty(0, dtype) for dtype in types)
        lane, first, last, returns, end, is_whole = map(np.concatenate, zip(none, *found, strict=True))
        order = np.lexsort((lane, first))
        has_return = self._columns.reward is not None
        return pa.table(
            {
                "lane": _arrow(lane[order].astype(np.int32)),
                "first_id": _arrow(first[order]),
                "last_id": _arrow(last[order]),
                "length": _arrow((last - first + 1)[order]),
                "return": _arrow(returns[order]) if has_return else pa.nulls(len(order), pa.float64()),
                "end": _names_of_ends(end[order]),
                "is_whole": _arrow(is_whole[order]),
            }
        )


def _arrow(values: NDArray[Any]) -> "pa.Array":
    """Numbers or bools as an Arrow array. `pyarrow.array` would import pandas where that is installed: 0.2 s."""
    import pyarrow as pa

    buffer = pa.py_buffer(np.packbits(values, bitorder="little") if values.dtype == np.bool else values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def _names_of_ends(end: NDArray[np.int8]) -> "pa.Array":
    """Their names, null where nothing tells."""
    import pyarrow as pa

    offsets = np.cumsum([0, *map(len, _ENDS)], dtype=np.int32)
    names = pa.StringArray.from_buffers(len(_ENDS), pa.py_buffer(offsets), pa.py_buffer("".join(_ENDS).encode()))
    known = pa.py_buffer(np.packbits(end != _UNKNOWN, bitorder="little"))
    numbers = pa.Array.from_buffers(pa.int8(), len(end), [known, pa.py_buffer(end % _UNKNOWN)])
    return pa.DictionaryArray.from_arrays(numbers, names).cast(pa.string())


def _scalar(layouts: Sequence[ColumnLayout], path: str) -> int | None:
    """The number of a column of one real number a step, None when there is none of that path."""
    for number, layout in enumerate(layouts):
        if layout.path == path and not layout.shape and layout.dtype.kind in "biuf":
            return number
    return None


def _reward(layouts: Sequence[ColumnLayout], rule: EndRule, path: str | None) -> int | None:
    if path is None:
        return _scalar(layouts, f"{rule.folder}reward")
    number = _scalar(layouts, path)
    if number is None:
        of_path = [layout for layout in layouts if layout.path == path]
        got = f"{of_path[0].dtype} {list(of_path[0].shape)}" if of_path else "no such leaf"
        raise SpecError(
            f"leaf {path!r} must be one real number a step to be summed, got {got}. "
            f"Name another one of {', '.join(repr(layout.path) for layout in layouts)}.",
            path=path,
        )
    return number
