"""Importing a file of another format into a new store."""

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import OptionError, SpecError
from diskbuf.exchange.bounds import bounded_nest, check_inside
from diskbuf.exchange.contract import Carried, Episode, EpisodeSource, Progress, RowSource, Source
from diskbuf.exchange.folding import fold
from diskbuf.exchange.formats import format_of
from diskbuf.exchange.grids import Grid, Grids
from diskbuf.exchange.mapping import ColumnMap, MappedColumns, MappedLeaf, cast_exactly, fit
from diskbuf.exchange.new_store import NewStore, NewStoreSettings, check_is_free
from diskbuf.exchange.transitions import Nests, Transitions, episodes_of, flags
from diskbuf.options import StoreOptions
from diskbuf.replay_buffers.opening import local_path
from diskbuf.specs import ArraySpec
from diskbuf.trajectories import Trajectory
from diskbuf.tree import Structure

_BOUNDED = ("observation", "action", "policy_info")
_TOGETHER_BYTES = 2**22
"""Rows of short episodes that are added at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What `import_store` did.

    Attributes:
        source: Where the rows are from.
        store: The new store.
        format: The source's, by name.
        rows: Rows in the store because of it, (id, lane) pairs; boundaries of episodes included.
        batch_size: Its lanes.
        first_id: First id of its window.
        next_id: End of its window.
        episodes: Episodes that were put together, None where rows were taken as they are.
        gaps: Places where ids were missing in the source; a run begins behind each, and ids go on without a gap.
        dropped: Columns of the source that were left out.
        seconds: How long it took.
    """

    source: str
    store: str
    format: str
    rows: int
    batch_size: int
    first_id: int
    next_id: int
    episodes: int | None
    gaps: int
    dropped: tuple[str, ...]
    seconds: float


def import_store(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - zarr's and pandas' name for it
    mapping: ColumnMap | None = None,
    options: Mapping[str, Any] | None = None,
    max_length: int | None = None,
    metadata: Any = None,
    store_options: StoreOptions | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ImportReport:
    """Makes a store of a file of another format.

    A file that `export_store` wrote becomes the store it came from: spec, lanes, ids, runs, metadata. Of any other
    table or arrays `mapping` says which column is which leaf; nothing is guessed, and nothing is left out in silence.
    Data sets of episodes become rows of a `Trajectory` in one lane, boundaries included, as a driver collects them.

    All of it is imported or nothing: the store is made in the folder `.NAME.staging` beside its place, and renamed.
    Memory is bounded, whatever the size; of a data set of episodes by its longest one.

        >>> import tempfile
        >>> import pyarrow as pa
        >>> import pyarrow.parquet
        >>> import diskbuf
        >>> table = pa.table({"v": [0.5, 1.5], "note": ["a", "b"]})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pyarrow.parquet.write_table(table, f"{folder}/log.parquet")
        ...     mapping = ColumnMap(leaves={"speed": "v"}, casts={"speed": "float32"}, drop=["note"])
        ...     report = import_store(f"{folder}/log.parquet", f"{folder}/log.zarr", mapping=mapping)
        ...     with diskbuf.open(f"{folder}/log.zarr") as buffer:
        ...         print(buffer.data_spec, buffer.gather_all()["speed"].tolist())
        {'speed': ArraySpec((), 'float32')} [[0.5, 1.5]]

    Args:
        source: A path, or a URL of fsspec where the format takes one.
        destination: The new store's folder.
        format: One of `formats.format_names`; None goes by the ending, else by what is in it (`formats.format_in`).
        mapping: Which column is which leaf. None restores what an export carries. Of a data set of episodes only
            `drop`, `only_mapped`, `bounds` and a cast of `reward` count: rewards, which are rounded, keep their dtype
            without it.
        options: Fields of the format.
        max_length: Longest window of the store; None for what the export carries, else no limit.
        metadata: JSON to keep with the store; None for what the source has.
        store_options: How the store is laid out.
        storage_options: For fsspec.
        progress: Called with steps done and steps in all, where that is known.

    Returns:
        What was done.

    Raises:
        OptionError: When an argument is outside its rule, a column is missing, or one is neither mapped nor dropped.
        SpecError: When a column doesn't fit its leaf, a value is missing or would be changed by a cast, or rows are out
            of order.
        StoreExistsError: When something is at the destination.
        StoreLockedError: When another process imports to it.
        StoreFormatError: When a newer version wrote the export.
        MissingExtraError: When the format's package isn't installed.
        FileNotFoundError: When there is no source.
        OSError: When something can't be read or written.
        In every case nothing is left at the destination.
    """
    started = time.monotonic()
    where = local_path(destination)
    check_is_free(where)
    if mapping is not None and not isinstance(mapping, ColumnMap):
        raise OptionError(f"mapping must be a ColumnMap, got {mapping!r:.100}.")
    kind = format_of(source, format, options=options)
    with kind.open_source(os.fspath(source), storage_options) as opened:
        plan = _plan(opened, mapping, max_length, metadata, store_options or StoreOptions())
        with NewStore(where, plan.settings, first_id=plan.first_id) as store:
            window = plan.fill(store, progress or _nothing)
    return ImportReport(
        source=os.fspath(source),
        store=str(where),
        format=kind.name,
        rows=plan.rows,
        batch_size=plan.settings.batch_size,
        first_id=window[0],
        next_id=window[1],
        episodes=plan.episodes,
        gaps=plan.gaps,
        dropped=plan.dropped,
        seconds=time.monotonic() - started,
    )


class _Plan:
    """How a source becomes a store: what it is, and how its rows are brought there.

    Attributes:
        settings: What the store is.
        first_id: Id of its first row.
        dropped: Columns that are left out.
        rows: Rows that were added.
        episodes: Episodes among them.
        gaps: Where ids were missing.
    """

    settings: NewStoreSettings
    first_id: int = 0
    dropped: tuple[str, ...] = ()
    rows: int = 0
    episodes: int | None = None
    gaps: int = 0

    def fill(self, store: NewStore, progress: Progress) -> tuple[int, int]:
        """Adds all rows and finishes the store; returns its window."""
        raise NotImplementedError


def _plan(
    source: Source, mapping: ColumnMap | None, max_length: int | None, metadata: Any, options: StoreOptions
) -> _Plan:
    kept = source.metadata if metadata is None else metadata
    if isinstance(source, EpisodeSource):
        dropped = _dropped(source, mapping or ColumnMap())
        spec = _episode_spec(source, mapping or ColumnMap())
        settings = NewStoreSettings(spec=spec, batch_size=1, max_length=max_length, metadata=kept, options=options)
        episodes = _within_bounds(source, spec) if mapping is not None and mapping.bounds else source.episodes()
        return _OfEpisodes(settings, episodes, source.num_steps, dropped)
    if not isinstance(source, RowSource):
        raise OptionError(f"a source must be one of rows or episodes, got {source!r}.")
    if mapping is None:
        if source.carried is None:
            like = f"It looks like the format {source.looks_like} (--format {source.looks_like}); else say"
            raise OptionError(
                f"mapping must be given for {source.name}, which doesn't carry what store it was. Its columns are "
                f"{', '.join(map(repr, list(source.columns)[:12]))}. {like if source.looks_like else 'Say'} which leaf "
                "each is (--map LEAF=COLUMN, a mapping file, a ColumnMap); give the spec of the store that a CSV was "
                "exported from (--like STORE, ColumnMap.spec); or import a bandit log as one (--format log, "
                "diskbuf.bandits.logs)."
            )
        return _Restored(source, source.carried, max_length, metadata, options)
    mapping, source = fold(mapping, source)
    fitted = fit(mapping, source)
    num_lanes = source.num_lanes_of(fitted.wanted)
    if fitted.is_trajectory:
        if num_lanes > 1:
            raise OptionError(f"a trajectory must be made of rows, got {num_lanes} lanes in {source.name}.")
        settings = NewStoreSettings(
            spec=fitted.spec, batch_size=1, max_length=max_length, metadata=kept, options=options
        )
        return _OfEpisodes(settings, _episodes_of_rows(source, fitted), source.num_rows, fitted.dropped)
    return _Mapped(
        source,
        fitted,
        num_lanes,
        NewStoreSettings(spec=fitted.spec, batch_size=num_lanes, max_length=max_length, metadata=kept, options=options),
    )


def _episode_spec(source: EpisodeSource, mapping: ColumnMap) -> Trajectory:
    bounds = mapping.bounds
    found: Trajectory = source.data_spec._replace(reward=_reward_spec(source, mapping))
    paths = [path for path in Structure(found).paths if path.partition("/")[0] in _BOUNDED]
    if unused := [path for path in bounds if path not in paths]:
        raise OptionError(
            f"bounds of {source.name} must be of one of its leaves {', '.join(map(repr, paths))}, got {unused[0]!r}."
        )
    return found._replace(**{role: bounded_nest(getattr(found, role), role, bounds) for role in _BOUNDED})


def _within_bounds(source: EpisodeSource, spec: Trajectory) -> Iterator[Episode]:
    """The episodes, of which every step is checked."""
    structure = Structure((spec.observation, spec.action, spec.policy_info))
    leaves = structure.flatten((spec.observation, spec.action, spec.policy_info))
    paths = [path for path in Structure(spec).paths if path.partition("/")[0] in _BOUNDED]
    for number, episode in enumerate(source.episodes()):
        found = structure.flatten((episode.observations, episode.actions, episode.policy_info))
        for path, leaf, array in zip(paths, leaves, found, strict=True):
            where = f"episode {number} of {source.name}"
            check_inside(np.asarray(array), leaf, path=path, where=where, first_row=0, row="step")
        yield episode


def _reward_spec(source: EpisodeSource, mapping: ColumnMap) -> ArraySpec:
    others = [path for path in mapping.casts if path != "reward"]
    if others:
        raise OptionError(
            f"casts of a data set of episodes must be of its 'reward', got {', '.join(map(repr, others))}."
        )
    return ArraySpec((), mapping.casts["reward"], name="reward") if mapping.casts else source.reward_spec


def _dropped(source: EpisodeSource, mapping: ColumnMap) -> tuple[str, ...]:
    for name in mapping.drop:
        if name not in source.unmapped:
            raise OptionError(
                f"drop must name what {source.name} has besides its episodes, "
                f"{', '.join(map(repr, source.unmapped)) or 'nothing'}, got {name!r}."
            )
    left = [name for name in source.unmapped if name not in mapping.drop]
    if left and not mapping.only_mapped:
        raise OptionError(
            f"everything in {source.name} must be mapped or dropped, got "
            f"{', '.join(f'{name} ({source.unmapped[name]})' for name in left[:8])} besides. "
            "Drop it by name, or take only what is mapped."
        )
    return tuple(source.unmapped)


# ---- episodes


class _OfEpisodes(_Plan):
    """Episodes one after the other in one lane."""

    def __init__(
        self, settings: NewStoreSettings, episodes: Iterator[Episode], total: int | None, dropped: tuple[str, ...]
    ) -> None:
        self.settings = settings
        self.dropped = dropped
        self._source = episodes
        self._total = total

    def fill(self, store: NewStore, progress: Progress) -> tuple[int, int]:
        structure, reward_dtype = Structure(self.settings.spec), self.settings.spec.reward.dtype
        waiting: list[list[NDArray[Any]]] = []
        size = done = self.episodes = 0
        open_row: int | None = None

        def add() -> None:
            if waiting:
                store.extend_leaves([np.concatenate(leaves)[None] for leaves in zip(*waiting, strict=True)])
                self.rows += sum(len(leaves[0]) for leaves in waiting)
                waiting.clear()

        for episode in self._source:
            if open_row is not None:
                raise SpecError(
                    f"only the last episode may go on, but the one that begins with step {open_row} ends in nothing. "
                    "Map or mark its end."
                )
            if episode.is_open:
                open_row = done
            leaves = [np.asarray(leaf) for leaf in structure.flatten(episode.rows(reward_dtype))]
            waiting.append(leaves)
            size += sum(leaf.nbytes for leaf in leaves)
            self.episodes += 1
            done += len(episode.rewards)
            if size >= _TOGETHER_BYTES:
                add()
                size = 0
            progress(done, self._total or done)
        add()
        return store.finish()


def _episodes_of_rows(source: RowSource, fitted: MappedColumns) -> Iterator[Episode]:
    """The episodes in rows of transitions."""
    spec: Trajectory = fitted.spec
    nests = Nests(
        observation=Structure(spec.observation),
        action=Structure(spec.action),
        policy_info=Structure(spec.policy_info),
    )
    return episodes_of(_transitions(source, fitted, nests), nests, name=source.name)


def _transitions(source: RowSource, fitted: MappedColumns, nests: Nests) -> Iterator[Transitions]:
    """The rows as transitions; the last one waits for the next block, which says whether its episode goes on."""
    has_final = fitted.final_observation == "required"
    held: dict[str, NDArray[Any]] | None = None
    for _, leaves in _mapped_blocks(source, fitted):
        found = leaves if held is None else {path: np.concatenate([held[path], leaves[path]]) for path in leaves}
        if not len(found["reward"]):
            continue
        held = {path: leaf[-1:] for path, leaf in found.items()}
        if len(found["reward"]) > 1:
            following = found["episode"][1:] if "episode" in found else None
            yield _as_transitions(
                {path: leaf[:-1] for path, leaf in found.items()}, following, nests, has_final=has_final
            )
    if held is not None:
        yield _as_transitions(held, None, nests, has_final=has_final)


def _as_transitions(
    leaves: Mapping[str, NDArray[Any]], following: NDArray[Any] | None, nests: Nests, *, has_final: bool
) -> Transitions:
    terminated = flags(leaves["terminated"], "terminated")
    truncated = flags(leaves["truncated"], "truncated") if "truncated" in leaves else np.zeros_like(terminated)
    if following is not None:
        changes = leaves["episode"] != following
        inside = (terminated | truncated) & ~changes
        if inside.any():
            raise SpecError(
                f"rows must end an episode only where `episode` changes, but one of episode "
                f"{leaves['episode'][inside][0]} ends it and the next row is of the same. Map another column.",
                path="episode",
            )
        truncated |= changes & ~terminated

    def below(role: str, structure: Structure) -> list[NDArray[Any]]:
        return [leaves[f"{role}/{path}" if path else role] for path in structure.paths]

    return Transitions(
        observations=below("observation", nests.observation),
        actions=below("action", nests.action),
        rewards=leaves["reward"],
        terminated=terminated,
        truncated=truncated,
        next_observations=below("next_observation", nests.observation) if has_final else None,
        policy_info=below("policy_info", nests.policy_info),
    )


def _mapped_blocks(
    source: RowSource, fitted: MappedColumns
) -> Iterator[tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]]:
    """Blocks of rows: the columns by their own names, and the leaves [N, *shape] by their paths."""
    row = 0
    for block in source.blocks(fitted.wanted):
        found = {leaf.path: _leaf(block, leaf, source) for leaf in fitted.leaves}
        for leaf in fitted.leaves if fitted.is_bounded else ():
            where = f"{source.name} in column {leaf.column!r}"
            check_inside(found[leaf.path], leaf.spec, path=leaf.path, where=where, first_row=row, row="row")
        row += len(next(iter(found.values()))) if found else 0
        yield block, found


def _leaf(block: Mapping[str, NDArray[Any]], leaf: MappedLeaf, source: RowSource) -> NDArray[Any]:
    where = f"column {leaf.column!r} of {source.name}"
    if leaf.is_rounded:
        return block[leaf.column].astype(leaf.spec.dtype)
    return cast_exactly(block[leaf.column], leaf.spec.dtype, path=leaf.path, where=where)


# ---- rows


class _OfRows(_Plan):
    """Rows as they are: grids of ids and lanes."""

    def __init__(self, source: RowSource, grids: Grids) -> None:
        self._source = source
        self._grids = grids
        self._all = grids.blocks()
        self._first: Grid | None = next(self._all, None)
        self.first_id = grids.first_id

    def fill(self, store: NewStore, progress: Progress) -> tuple[int, int]:
        grid, lanes = self._first, len(self._grids.lanes)
        self._first = None
        while grid is not None:
            if grid.begins_run:
                store.begin_run()
            self._add(store, grid)
            self.rows += lanes * grid.leaves[0].shape[1]
            progress(self.rows, self._source.num_rows or self.rows)
            grid = next(self._all, None)
        self.gaps = self._grids.gaps
        return store.finish(runs=self._runs(store))

    def _add(self, store: NewStore, grid: Grid) -> None:
        store.extend_leaves(grid.leaves)

    def _runs(self, store: NewStore) -> list[int] | None:
        del store
        return None


class _Mapped(_OfRows):
    """Rows of a foreign file."""

    def __init__(self, source: RowSource, fitted: MappedColumns, num_lanes: int, settings: NewStoreSettings) -> None:
        blocks = (
            (
                None if fitted.id is None else block[fitted.id],
                None if fitted.lane is None else block[fitted.lane],
                [leaves[leaf.path] for leaf in fitted.leaves],
            )
            for block, leaves in _mapped_blocks(source, fitted)
        )
        grids = Grids(blocks, name=source.name, lanes=range(num_lanes) if fitted.lane is None else None)
        super().__init__(source, grids)
        self.dropped = fitted.dropped
        self.settings = dataclasses.replace(settings, batch_size=len(grids.lanes))


class _Restored(_OfRows):
    """Rows of an export, which become the store that they are from."""

    def __init__(
        self, source: RowSource, carried: Carried, max_length: int | None, metadata: Any, options: StoreOptions
    ) -> None:
        if not carried.is_whole:
            missing = [path for path in Structure(carried.spec).paths if path not in carried.names]
            raise OptionError(
                f"{source.name} must have every leaf of its store to be restored, but was exported without "
                f"{', '.join(map(repr, missing[:8]))}. Map its columns to leaves of a new store."
            )
        if not carried.is_grid and len(carried.lanes) > 1:
            raise OptionError(
                f"{source.name} must have a row for each id and lane to be restored, but was exported with episodes "
                "chosen. Export one lane at a time, or map its columns."
            )
        self._carried = carried
        mapping = ColumnMap(leaves=carried.names, spec=carried.spec)
        fitted = fit(mapping, source)
        ids, lanes = fitted.id, fitted.lane
        if ids is None or lanes is None:
            raise SpecError(f"{source.name} must have the columns 'id' and 'lane', as an export has.")
        blocks = (
            (block[ids], block[lanes], [leaves[leaf.path] for leaf in fitted.leaves])
            for block, leaves in _mapped_blocks(source, fitted)
        )
        grids = Grids(blocks, name=source.name, lanes=carried.lanes, first_id=carried.first_id)
        super().__init__(source, grids)
        self.settings = NewStoreSettings(
            spec=carried.spec,
            batch_size=len(carried.lanes),
            max_length=carried.max_length if max_length is None else max_length,
            keep_history=carried.keep_history,
            metadata=carried.metadata if metadata is None else metadata,
            options=options,
        )

    def _add(self, store: NewStore, grid: Grid) -> None:
        # What had left the window by a `clear` leaves it again.
        window_first_id = self._grids.stored(self._carried.window_first_id)
        ahead = window_first_id - store.next_id
        if not 0 < ahead <= grid.leaves[0].shape[1] or not self._carried.keep_history:
            store.extend_leaves(grid.leaves)
            return
        store.extend_leaves([leaf[:, :ahead] for leaf in grid.leaves])
        store.clear()
        store.extend_leaves([leaf[:, ahead:] for leaf in grid.leaves])

    def _runs(self, store: NewStore) -> list[int]:
        first_id, next_id = self.first_id, store.next_id
        known = [run for run in self._carried.runs if run <= self._carried.first_id]
        later = [self._grids.stored(run) for run in self._carried.runs if run > self._carried.first_id]
        begun = known[-1:] or [first_id]
        return [*begun, *(run for run in later if first_id < run <= next_id), *self._grids.run_starts]


def _nothing(done: int, total: int) -> None:
    del done, total
