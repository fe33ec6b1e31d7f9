"""The rows of a store that are exported, block by block: which columns, ids, lanes and episodes, and how far it is."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from diskbuf.episode_table import episodes as episode_table
from diskbuf.errors import OptionError, SpecError, WindowError
from diskbuf.exchange.contract import Carried, Episode, Progress, RowBlock
from diskbuf.scanning import Block, scan
from diskbuf.specs import ArraySpec
from diskbuf.store.chunk_formats.arrow_parts import column_names
from diskbuf.store.layout import ColumnLayout
from diskbuf.trajectories import StepType, Trajectory
from diskbuf.tree import Structure

if TYPE_CHECKING:
    from diskbuf.replay_buffers.uniform import UniformReplayBuffer

_BLOCK_BYTES = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """Which rows of a store are meant.

    Attributes:
        columns: Paths of leaves; None for all.
        first_id: First id; None for the start of the window.
        next_id: End, exclusive; None for the end of the window.
        lanes: Numbers of lanes, ascending; None for all.
        episodes: Numbers of rows in the table of `diskbuf.episodes`; None for all rows, whatever episode they are of.
    """

    columns: Sequence[str] | None = None
    first_id: int | None = None
    next_id: int | None = None
    lanes: Sequence[int] | None = None
    episodes: Sequence[int] | None = None


class StoreRows:
    """The rows of a store that are exported.

    Args:
        buffer: Open for reading or writing.
        selection: Which rows.
        progress: Called with steps done and steps in all.

    Attributes:
        buffer: The buffer.
        columns: What a row of each chosen leaf is, by its path, in the order asked for.
        names: For each chosen leaf a name that is distinct and neither `id` nor `lane`.
        lanes: [B] the chosen lanes.
        first_id: First id that is meant.
        next_id: End, exclusive.
        carried: What a file should carry of the store.
        written: Rows, (id, lane) pairs, that were handed out and so are in the file.
        seen_first_id: Id of the first row handed out, None before there is one.
        evicted: Ids that a writer evicted before they were read.
        notes: What a format couldn't keep, a sentence each, without a full stop; the format adds to it.

    Raises:
        OptionError: When the selection isn't of this store.
        WindowError: When a lane isn't in the store.
        SpecError: When episodes are chosen and nothing in the spec says where they end.
    """

    def __init__(
        self, buffer: "UniformReplayBuffer", selection: Selection, *, progress: Progress | None = None
    ) -> None:
        store = buffer._opened()
        layouts = [column.layout for column in store.columns]
        self.buffer = buffer
        begin, end = store.window()
        self.first_id = _within("first_id", selection.first_id, begin, end, default=begin)
        self.next_id = _within("next_id", selection.next_id, begin, end, default=end)
        if self.first_id > self.next_id:
            raise OptionError(f"first_id must be at most next_id, {self.next_id}, got {self.first_id}.")
        chosen = _chosen(layouts, selection.columns)
        names = dict(zip((layout.path for layout in layouts), column_names(layouts), strict=True))
        specs: list[ArraySpec] = Structure(buffer.data_spec).flatten(buffer.data_spec)
        by_path = {layout.path: spec for layout, spec in zip(layouts, specs, strict=True)}
        self.layouts = {layout.path: layout for layout in layouts if layout.path in chosen}
        self.columns = {path: by_path[path] for path in chosen}
        self.names = {path: names[path] for path in chosen}
        self._meant_first_id = self.first_id
        self.lanes = _chosen_lanes(selection.lanes, buffer.batch_size)
        self._all_lanes = len(self.lanes) == buffer.batch_size
        self._progress = progress
        self._pieces = None if selection.episodes is None else self._chosen_pieces(selection.episodes)
        self.written = 0
        self.evicted = 0
        self.notes: list[str] = []
        self.seen_first_id: int | None = None
        manifest = store.manifest
        self.carried = Carried(
            spec=buffer.data_spec,
            names=self.names,
            lanes=tuple(self.lanes.tolist()),
            batch_size=buffer.batch_size,
            first_id=self.first_id,
            window_first_id=max(self.first_id, min(manifest.first_id, self.next_id)),
            runs=tuple(store.runs),
            max_length=manifest.max_length,
            keep_history=manifest.keep_history,
            metadata=buffer.metadata,
            is_grid=self.is_grid,
        )

    @property
    def is_grid(self) -> bool:
        """Whether there is a row for every id and lane, which arrays [T, B, …] need."""
        return self._pieces is None

    @property
    def num_steps(self) -> int:
        """Rows that are meant, those that may be evicted meanwhile included."""
        if self._pieces is not None:
            return int((self._pieces[2] - self._pieces[1]).sum())
        return (self.next_id - self.first_id) * len(self.lanes)

    def row_blocks(self, paths: Sequence[str] | None = None, *, block_bytes: int = _BLOCK_BYTES) -> Iterator[RowBlock]:
        """Yields rows, by id and then lane; memory is bounded by a few blocks.

        Args:
            paths: Leaves to read, of those that are chosen; None for all of them.
            block_bytes: Largest size of a block.

        Raises:
            StoreCorruptError: When a chunk file is missing, short or has rotten.
        """
        for block in self._scan(paths, block_bytes):
            steps = block.next_id - block.first_id
            ids = np.repeat(np.arange(block.first_id, block.next_id), len(self.lanes))
            lanes = np.tile(self.lanes, steps)
            columns = {
                path: leaf.swapaxes(0, 1).reshape(steps * len(self.lanes), *leaf.shape[2:])
                for path, leaf in block.columns.items()
            }
            if self._pieces is not None:
                mask = self._mask(block).swapaxes(0, 1).reshape(-1)
                ids, lanes = ids[mask], lanes[mask]
                columns = {path: leaf[mask] for path, leaf in columns.items()}
            if len(ids):
                self._count(ids)
                yield RowBlock(ids, lanes, columns)

    def grid_blocks(
        self, paths: Sequence[str] | None = None, *, block_bytes: int = _BLOCK_BYTES, is_counted: bool = True
    ) -> Iterator[Block]:
        """Yields rows as arrays [B, T, *shape] of the chosen lanes.

        Args:
            paths: Leaves to read, of those that are chosen; None for all of them.
            block_bytes: Largest size of a block.
            is_counted: Whether these rows are complete with them; not where other leaves of the same rows follow.

        Raises:
            OptionError: When episodes are chosen, whose rows are no grid.
            StoreCorruptError: When a chunk file is missing, short or has rotten.
        """
        self.check_is_grid()
        for block in self._scan(paths, block_bytes, is_counted=is_counted):
            if is_counted:
                self._count(np.repeat(np.arange(block.first_id, block.next_id), len(self.lanes)))
            yield block

    def check_is_grid(self) -> None:
        """Refuses chosen episodes, for formats of arrays [T, B, …].

        Raises:
            OptionError: When episodes are chosen.
        """
        if not self.is_grid:
            raise OptionError(
                "episodes must be left out for a format of arrays, whose rows are one for each id and lane. "
                "Use Parquet or Arrow, or choose first_id, next_id and lanes."
            )

    def begin_again(self, first_id: int) -> None:
        """Forgets what was handed out, for a format that has to start anew behind rows that were evicted."""
        self.evicted = first_id - self._meant_first_id
        self.first_id = first_id
        self.written, self.seen_first_id = 0, None

    def episodes(self) -> Iterator[Episode]:
        """Yields the episodes, or as much of each as is there, by first id and lane; one in memory at a time.

        Rows that only are a boundary are left out. One whose beginning has left the window begins later.

        Raises:
            SpecError: When the spec is no `Trajectory`.
            OptionError: When columns are chosen.
            WindowError: When a writer evicts an episode while it is read.
        """
        if not isinstance(self.buffer.data_spec, tuple) or set(getattr(self.buffer.data_spec, "_fields", ())) != set(
            Trajectory._fields
        ):
            raise SpecError(
                "data_spec must be a Trajectory to be exported as episodes. Export to Parquet, or another table."
            )
        if len(self.columns) != len(Structure(self.buffer.data_spec).paths):
            raise OptionError("columns must be left out where episodes are exported, whose parts are given.")
        pieces = self._pieces if self._pieces is not None else self._chosen_pieces(None)
        total = int((pieces[2] - pieces[1]).sum())
        for lane, first, stop in zip(*(column.tolist() for column in pieces), strict=True):
            found = self._episode(lane, first, stop)
            if found is None:
                continue
            self._count(np.arange(first, stop), total=total)
            yield found

    def _episode(self, lane: int, first_id: int, next_id: int) -> Episode | None:
        try:
            rows = self.buffer.read(np.arange(first_id, next_id), lane)
        except WindowError:
            if first_id >= self.buffer.first_id:
                raise
            self.evicted += 1
            return None
        steps = next_id - first_id
        has_boundary = rows.step_type[-1] == StepType.LAST
        if has_boundary and steps == 1:  # what it ends isn't among the chosen rows
            return None
        has_ended = rows.next_step_type[steps - 1 - has_boundary] == StepType.LAST
        transitions = steps - has_boundary
        terminated = bool(has_ended and rows.discount[transitions - 1] == 0)
        cut = Structure((rows.action, rows.policy_info))
        actions, info = cut.unflatten([leaf[:transitions] for leaf in cut.flatten((rows.action, rows.policy_info))])
        return Episode(
            observations=rows.observation,
            actions=actions,
            rewards=rows.reward[:transitions],
            terminated=terminated,
            truncated=bool(has_ended and not terminated),
            discounts=rows.discount[:transitions],
            policy_info=info,
            lane=lane,
            first_id=first_id,
        )

    def _chosen_pieces(
        self, wanted: Sequence[int] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Lane, first id and end of episodes, boundaries included, as far as they are among the chosen rows."""
        table = episode_table(self.buffer)
        lane = table["lane"].to_numpy().astype(np.int64)
        first = table["first_id"].to_numpy()
        stop = table["last_id"].to_numpy() + 1
        ended = np.array([end in ("terminated", "truncated") for end in table["end"].to_pylist()], np.bool)
        stop = stop + (ended & self._boundary_at(lane, stop))
        if wanted is not None:
            numbers = np.asarray(wanted)
            if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or not len(numbers):
                raise OptionError(f"episodes must be one or more ints, got {wanted!r}.")
            if numbers.min() < 0 or numbers.max() >= len(lane):
                raise OptionError(
                    f"episodes must be from 0 to {len(lane) - 1}, as diskbuf.episodes lists them, got "
                    f"{numbers.min()} to {numbers.max()}."
                )
            numbers = np.unique(numbers)
            lane, first, stop = lane[numbers], first[numbers], stop[numbers]
        first, stop = np.maximum(first, self.first_id), np.minimum(stop, self.next_id)
        kept = (first < stop) & np.isin(lane, self.lanes)
        return lane[kept], first[kept], stop[kept]

    def _boundary_at(self, lane: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.bool]:
        """Whether the row at each (id, lane) is there and a boundary."""
        path = next((path for path in self._all_paths if path.rpartition("/")[2] == "next_step_type"), None)
        found = np.zeros(len(ids), np.bool)
        if path is None:
            return found
        step_type = path.removesuffix("next_step_type") + "step_type"
        for block in scan(self.buffer, [step_type]):
            here = np.flatnonzero((ids >= block.first_id) & (ids < block.next_id))
            found[here] = block.columns[step_type][lane[here], ids[here] - block.first_id] == StepType.LAST
        return found

    @property
    def _all_paths(self) -> list[str]:
        return [column.layout.path for column in self.buffer._opened().columns]

    def _scan(self, paths: Sequence[str] | None, block_bytes: int, *, is_counted: bool = True) -> Iterator[Block]:
        chosen = list(self.columns) if paths is None else list(paths)
        expected = self.first_id
        for block in scan(self.buffer, chosen, first_id=self.first_id, next_id=self.next_id, block_bytes=block_bytes):
            self.evicted += (block.first_id - expected) if is_counted else 0
            expected = block.next_id
            yield (
                block
                if self._all_lanes
                else Block(block.first_id, {path: leaf[self.lanes] for path, leaf in block.columns.items()})
            )
        self.evicted += (self.next_id - expected) if is_counted else 0

    def _mask(self, block: Block) -> NDArray[np.bool]:
        """Which rows of a block [B, T] are of a chosen episode."""
        lane, first, stop = self._pieces if self._pieces is not None else self._chosen_pieces(None)
        steps = block.next_id - block.first_id
        edges = np.zeros((len(self.lanes), steps + 1), np.int32)
        here = np.flatnonzero((first < block.next_id) & (stop > block.first_id))
        place = np.searchsorted(self.lanes, lane[here])
        np.add.at(edges, (place, np.maximum(first[here] - block.first_id, 0)), 1)
        np.add.at(edges, (place, np.minimum(stop[here] - block.first_id, steps)), -1)
        return edges.cumsum(axis=1)[:, :steps] > 0

    def _count(self, ids: NDArray[np.int64], *, total: int | None = None) -> None:
        if self.seen_first_id is None:
            self.seen_first_id = int(ids[0])
        self.written += len(ids)
        if self._progress is not None:
            self._progress(self.written, self.num_steps if total is None else total)


def _chosen(layouts: Sequence[ColumnLayout], wanted: Sequence[str] | None) -> list[str]:
    paths = [layout.path for layout in layouts]
    chosen = paths if wanted is None else list(dict.fromkeys(wanted))
    unknown = [path for path in chosen if path not in paths]
    if unknown or not chosen:
        raise OptionError(f"columns must be one or more of {', '.join(map(repr, paths))}, got {unknown or chosen!r}.")
    return chosen


def _chosen_lanes(wanted: Sequence[int] | None, batch_size: int) -> NDArray[np.int32]:
    lanes = np.arange(batch_size) if wanted is None else np.asarray(wanted)
    if lanes.ndim != 1 or not len(lanes) or lanes.dtype.kind not in "iu" or (np.diff(lanes) <= 0).any():
        raise OptionError(f"lanes must be one or more different ints, ascending, got {wanted!r}.")
    if lanes[0] < 0 or lanes[-1] >= batch_size:
        raise WindowError(f"lanes must be from 0 to {batch_size - 1}, got {wanted!r}.")
    return lanes.astype(np.int32)


def _within(name: str, value: int | None, begin: int, end: int, *, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not begin <= value <= end:
        raise OptionError(f"{name} must be an id in the window, [{begin}, {end}], got {value!r}.")
    return int(value)
