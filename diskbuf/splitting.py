"""One store into several: by ids, runs, episodes or fractions. Rows are copied, the source stays as it is."""

import contextlib
import dataclasses
import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from diskbuf.arranging import arrange, named, window_of
from diskbuf.episode_ends import TrajectoryRule, end_rule
from diskbuf.episode_table import episodes
from diskbuf.errors import OptionError, StoreError, StoreExistsError, StoreNotFoundError, WindowError
from diskbuf.options import Layout, ReadOptions
from diskbuf.replay_buffers.opening import objects_at, place_of
from diskbuf.replay_buffers.uniform import open as open_buffer
from diskbuf.store.arranged import ArrangedSnapshot, Segment
from diskbuf.store.copy_target import check_free
from diskbuf.store.layout import COPYING_FILE, STATE_FOLDER
from diskbuf.store.snapshot import Snapshot
from diskbuf.transfer import (
    KEEP,
    Asked,
    Progress,
    Transferred,
    check_apart,
    checked_read_options,
    new_place,
    snapshot_of,
    transfer,
)

By = Literal["episodes", "steps"]


@dataclasses.dataclass(frozen=True)
class Ids:
    """The steps of all lanes with ids from `first_id` to `next_id`, exclusive; None for where the store's end.

    They keep their ids.
    """

    first_id: int | None = None
    next_id: int | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """The steps of one run of those in the window, counted from 0, or from the last with -1. They keep their ids."""

    number: int


@dataclasses.dataclass(frozen=True)
class Episodes:
    """Episodes from `first` to `stop`, exclusive, as `diskbuf.episodes` counts them; None for where they end."""

    first: int | None = None
    stop: int | None = None


@dataclasses.dataclass(frozen=True)
class Fraction:
    """A share of the episodes, or of the steps, above 0; the fractions of a call don't overlap."""

    share: float

    def __post_init__(self) -> None:
        if not (isinstance(self.share, int | float) and math.isfinite(self.share) and 0 < self.share <= 1):
            raise OptionError(f"share must be above 0 and at most 1, got {self.share!r}.")


Part = Ids | Run | Episodes | Fraction


def parse_part(text: str) -> Part:
    """Reads a part as the command line has it: `0.8`, `ids:100:200`, `run:-1`, `episodes:0:50`.

    Raises:
        OptionError: When it is none.
    """
    kind, _, rest = text.partition(":")
    words = rest.split(":")
    with contextlib.suppress(ValueError):
        if kind in ("ids", "episodes") and len(words) == 2:
            low, high = (int(word) if word else None for word in words)
            return Ids(low, high) if kind == "ids" else Episodes(low, high)
        if kind == "run" and len(words) == 1:
            return Run(int(rest))
        if not rest:
            return Fraction(float(kind))
    raise OptionError(
        f"a part must be like 0.8, ids:100:200, run:-1 or episodes:0:50, got {text!r}. Say which steps it has."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartReport:
    """A store that `split` made.

    Attributes:
        destination: Where it is.
        first_id: First id of its window.
        next_id: End of its window.
        batch_size: Its lanes.
        episodes: How many episodes went into it, None where it isn't made of episodes.
        bytes_written: Bytes of objects that were written; 0 when the store was there from an interrupted call.
    """

    destination: str
    first_id: int
    next_id: int
    batch_size: int
    episodes: int | None
    bytes_written: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SplitReport:
    """What `split` did.

    Attributes:
        source: The store.
        parts: What became of each part, in order.
        bytes_read: Bytes that were read.
        seconds: How long it took.
    """

    source: str
    parts: tuple[PartReport, ...]
    bytes_read: int
    seconds: float


def split(
    source: str | os.PathLike[str],
    parts: Mapping[Any, Part | float],
    *,
    by: By = "episodes",
    seed: int | None = None,
    ends: str | None = None,
    history: bool = False,
    codec: Any = KEEP,
    layout: Layout | Literal["keep"] = KEEP,
    level: int | None = None,
    chunk_bytes: int | None = None,
    inner_rows: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    destination_storage_options: Mapping[str, Any] | None = None,
    read_options: ReadOptions | None = None,
    verify: bool = True,
    progress: bool | Progress = False,
) -> SplitReport:
    """Makes stores of parts of one; the source stays as it is.

    Parts of ids and of runs have the lanes and the ids that they had. Parts of episodes have one lane, in which whole
    episodes follow each other in the order of their first ids, the rows that hold final observations included; a run
    begins where an episode doesn't follow from an ended one. An episode is what `diskbuf.episodes` lists, so those
    that were broken off or go on count too, as far as they are in the window.

        diskbuf.split("runs/all.zarr", {"runs/train.zarr": 0.8, "runs/test.zarr": 0.2}, seed=1)

    Nothing is written before every part is known to hold steps and to have a free place. Each store is there whole or
    not at all; the same call after an interruption goes on.

    Args:
        source: Path or URL of a store.
        parts: For each new store's path or URL what it gets; a number is a `Fraction`.
        by: What fractions are of: "episodes" (whole ones, by their number), or "steps" (ranges of ids of all lanes).
        seed: Deals episodes out at random, the same for the same seed; None in the order of their ids.
        ends: Path of the bool leaf that ends episodes, as in `diskbuf.episodes`; None goes by step types.
        history: Whether to begin with the oldest step on disk, where the store keeps history.
        codec: As in `diskbuf.copy`.
        layout: As in `diskbuf.copy`.
        level: As in `diskbuf.copy`.
        chunk_bytes: As in `diskbuf.copy`.
        inner_rows: As in `diskbuf.copy`.
        storage_options: What fsspec's file system of the source's protocol takes.
        destination_storage_options: The same for the destinations.
        read_options: How requests are made.
        verify: Whether what was written is read back.
        progress: Whether a bar is shown on a terminal; or what is called with (bytes done, bytes in all).

    Returns:
        What was done.

    Raises:
        OptionError: When an argument is outside its rule, fractions are more than the whole, or a part is empty.
        SpecError: When episodes are asked for and nothing says where they end.
        WindowError: When ids, a run or episodes aren't in the window; when a writer evicted steps meanwhile.
        StoreNotFoundError: When there is no store.
        StoreExistsError: When something else is at a destination.
        StoreCorruptError: When an object of the source isn't what was written.
        OSError: When a destination can't be written or is full.
    """
    started = time.monotonic()
    asked = Asked(codec=codec, layout=layout, level=level, chunk_bytes=chunk_bytes, inner_rows=inner_rows)
    if by not in ("episodes", "steps"):
        raise OptionError(f"by must be 'episodes' or 'steps', got {by!r}.")
    wanted = {new_place(path): part if isinstance(part, Part) else Fraction(part) for path, part in parts.items()}
    if len(wanted) != len(parts) or not wanted:
        raise OptionError(f"parts must name one or more places, each once, got {list(map(str, parts))}.")
    from_place = place_of(source)
    for number, place in enumerate(wanted):
        for other in (from_place, *list(wanted)[:number]):
            check_apart(other, place)
    options = checked_read_options(read_options)
    with contextlib.closing(snapshot_of(from_place, storage_options, options)) as snapshot:
        choosing = _Choosing(snapshot, window_of(snapshot, history=history))
        if any(
            isinstance(part, Episodes) or (isinstance(part, Fraction) and by == "episodes") for part in wanted.values()
        ):
            with open_buffer(
                from_place, history=history, storage_options=storage_options, read_options=options
            ) as buffer:
                has_boundaries = isinstance(end_rule(snapshot.layouts, ends), TrajectoryRule)
                choosing.take_episodes(episodes(buffer, ends=ends), has_boundaries=has_boundaries)
        chosen = choosing.choose(list(wanted.values()), by=by, seed=seed)
        arranged = [
            arrange(
                one.segments,
                first_id=one.segments[0].first_id if len(one.segments) == 1 and one.episodes is None else 0,
                lanes=snapshot.manifest.batch_size if one.episodes is None else 1,
                metadata=snapshot.manifest.metadata,
            )
            for one in chosen
        ]
        is_there = [
            _is_there(place, one, storage_options=destination_storage_options, read_options=options)
            for place, one in zip(wanted, arranged, strict=True)
        ]
        tell = _Shares(progress, [_raw_bytes(one) for one in arranged])
        reports = []
        for number, (place, one, rows) in enumerate(zip(wanted, chosen, arranged, strict=True)):
            done = Transferred(rows.manifest.first_id, rows.manifest.next_id, 0, 0, 0, 0.0)
            if not is_there[number]:
                done = transfer(
                    rows,
                    place,
                    asked,
                    source=named("split", [from_place], one.segments),
                    is_here=isinstance(from_place, Path),
                    is_new=True,
                    storage_options=destination_storage_options,
                    read_options=options,
                    verify=verify,
                    progress=tell.of(number),
                )
            rows.close()
            reports.append(
                PartReport(
                    destination=str(place),
                    first_id=done.first_id,
                    next_id=done.next_id,
                    batch_size=rows.manifest.batch_size,
                    episodes=one.episodes,
                    bytes_written=done.bytes_written,
                )
            )
        return SplitReport(
            source=str(from_place),
            parts=tuple(reports),
            bytes_read=snapshot.bytes_read,
            seconds=time.monotonic() - started,
        )


class _Chosen(NamedTuple):
    """What a part gets: segments, and how many episodes they are, None where they aren't."""

    segments: list[Segment]
    episodes: int | None


class _Choosing:
    """Says which rows of a store each part gets.

    Args:
        snapshot: The store.
        window: Ids [first, next) that count.
    """

    def __init__(self, snapshot: Snapshot, window: tuple[int, int]) -> None:
        self._snapshot = snapshot
        self._first_id, self._next_id = window
        self._episodes: list[tuple[int, Segment]] = []  # (lane, rows), is_cut telling whether the episode isn't whole
        self._ended: list[bool] = []

    def take_episodes(self, table: Any, *, has_boundaries: bool) -> None:
        """Takes the table of `diskbuf.episodes` over; rows of a boundary go with the episode before them.

        The table may be of a later moment than the snapshot: an episode may since have ended, or got its boundary.
        """
        lanes, firsts, lasts = (table[name].to_numpy() for name in ("lane", "first_id", "last_id"))
        ends, whole = table["end"].to_pylist(), table["is_whole"].to_pylist()
        stops = np.full(len(lanes), self._next_id, np.int64)
        known_runs = {*self._snapshot.manifest.runs, self._next_id}
        runs = np.array([*self._snapshot.manifest.runs, self._next_id], np.int64)
        for lane in np.unique(lanes):
            mine = np.flatnonzero(lanes == lane)
            stops[mine[:-1]] = firsts[mine[1:]]
        # an episode doesn't go on in the next run
        stops = np.minimum(stops, runs[np.minimum(np.searchsorted(runs, firsts, side="right"), len(runs) - 1)])
        for lane, first, last, stop, end, is_whole in zip(
            lanes.tolist(), firsts.tolist(), lasts.tolist(), stops.tolist(), ends, whole, strict=True
        ):
            first_id = max(first, self._first_id)
            if first_id < stop:
                rows = Segment(
                    snapshot=self._snapshot,
                    first_id=first_id,
                    next_id=stop,
                    lane=None if self._snapshot.manifest.batch_size == 1 else lane,
                    is_cut=not is_whole or first_id != first,
                )
                self._episodes.append((lane, rows))
                # without the row of its final observation it ends in a step that the next row must not follow
                is_cut_off = last >= stop or (has_boundaries and last + 1 == stop and stop in known_runs)
                self._ended.append(end not in ("open", "broken") and not is_cut_off)

    def choose(self, parts: Sequence[Part], *, by: By, seed: int | None) -> list[_Chosen]:
        """Returns what each part gets, in their order."""
        shares = [part.share for part in parts if isinstance(part, Fraction)]
        if sum(shares) > 1 + 1e-9:
            raise OptionError(f"fractions must not be more than the whole together, got {shares}.")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or seed < 0):
            raise OptionError(f"seed must be an int of at least 0, or None, got {seed!r}.")
        count = len(self._episodes) if by == "episodes" else self._next_id - self._first_id
        bounds = iter(itertools.pairwise(round(min(1.0, end) * count) for end in (0.0, *itertools.accumulate(shares))))
        dealt = np.arange(len(self._episodes))
        if seed is not None:
            dealt = np.random.default_rng(seed).permutation(dealt)
        found = []
        for part in parts:
            if isinstance(part, Fraction):
                low, high = next(bounds)
                one = (
                    self._of_episodes(np.sort(dealt[low:high]).tolist())
                    if by == "episodes"
                    else self._of_ids(self._first_id + low, self._first_id + high)
                )
            elif isinstance(part, Episodes):
                one = self._of_episodes(self._listed(part))
            elif isinstance(part, Run):
                one = self._of_ids(*self._run(part.number))
            else:
                one = self._of_ids(*self._inside(part))
            if not any(segment.steps for segment in one.segments):
                raise OptionError(f"part {part!r} must hold steps, but there are none for it. Leave it out.")
            found.append(one)
        return found

    def _of_ids(self, first_id: int, next_id: int) -> _Chosen:
        return _Chosen([Segment(snapshot=self._snapshot, first_id=first_id, next_id=next_id)], None)

    def _inside(self, part: Ids) -> tuple[int, int]:
        first_id = self._first_id if part.first_id is None else part.first_id
        next_id = self._next_id if part.next_id is None else part.next_id
        if not self._first_id <= first_id < next_id <= self._next_id:
            raise WindowError(
                f"ids must be one or more of the window [{self._first_id}, {self._next_id}), got [{first_id}, "
                f"{next_id}). Take them from diskbuf info."
            )
        return first_id, next_id

    def _run(self, number: int) -> tuple[int, int]:
        inside = [run for run in self._snapshot.manifest.runs if self._first_id < run < self._next_id]
        runs = list(itertools.pairwise([self._first_id, *inside, self._next_id]))
        if not -len(runs) <= number < len(runs):
            raise WindowError(
                f"run must be one of the {len(runs)} in the window, counted from 0, or from -1 on, got {number}."
            )
        return runs[number]

    def _listed(self, part: Episodes) -> list[int]:
        count = len(self._episodes)
        first = 0 if part.first is None else part.first
        stop = count if part.stop is None else part.stop
        if not 0 <= first < stop <= count:
            raise WindowError(f"episodes must be one or more of the {count} in the window, got [{first}, {stop}).")
        return list(range(first, stop))

    def _of_episodes(self, numbers: Sequence[int]) -> _Chosen:
        segments: list[Segment] = []
        has_ended, latest = True, -1
        for number in numbers:
            lane, rows = self._episodes[number]
            previous = segments[-1] if segments else None
            if previous is not None and latest == lane and previous.next_id == rows.first_id:
                segments[-1] = dataclasses.replace(previous, next_id=rows.next_id)  # runs inside are the store's own
            else:
                segments.append(dataclasses.replace(rows, is_cut=rows.is_cut or not has_ended))
            has_ended, latest = self._ended[number], lane
        return _Chosen(segments or [Segment(snapshot=self._snapshot, first_id=0, next_id=0)], len(numbers))


def _is_there(
    place: Path | str,
    wanted: ArrangedSnapshot,
    *,
    storage_options: Mapping[str, Any] | None,
    read_options: ReadOptions,
) -> bool:
    """Whether an interrupted call has made this store already, with these very rows.

    Raises:
        StoreExistsError: When something else is there.
        StoreCorruptError: When it has rotten since.
    """
    try:
        if _is_unfinished(place, storage_options, read_options):
            return False  # the rows may all be there, but the note of the copy isn't gone yet
        there = snapshot_of(place, storage_options, read_options)
    except StoreError as error:
        if isinstance(place, str):
            if isinstance(error, StoreNotFoundError):
                return False
            raise
        check_free(place)
        return False
    with contextlib.closing(there):
        names = ("kind", "spec", "batch_size", "max_length", "first_id", "next_id", "runs", "metadata")
        is_same = all(getattr(there.manifest, name) == getattr(wanted.manifest, name) for name in names)
        if not is_same or not _holds_rows(there, wanted):
            raise StoreExistsError(
                f"destination must be free, but {place} holds a store. Choose another place, or remove it first.",
                path=str(place),
            )
    return True


def _is_unfinished(place: Path | str, storage_options: Mapping[str, Any] | None, options: ReadOptions) -> bool:
    note = f"{STATE_FOLDER}/{COPYING_FILE}"
    if isinstance(place, Path):
        return (place / note).exists()
    objects = objects_at(place, storage_options=storage_options, read_options=options, is_ours=True)
    with contextlib.closing(objects), contextlib.suppress(FileNotFoundError):
        objects.size(note)
        return True
    return False


def _holds_rows(there: Snapshot, wanted: ArrangedSnapshot) -> bool:
    """Whether all rows of two snapshots of equal specs and windows are the same, byte for byte."""
    first_id, next_id = wanted.manifest.first_id, wanted.manifest.next_id
    for number, layout in enumerate(there.layouts):
        for chunk in layout.chunks(first_id, next_id):
            low, high = max(first_id, chunk * layout.chunk_rows), min(next_id, (chunk + 1) * layout.chunk_rows)
            found, expected = (one.rows(number, low, high) for one in (there, wanted))
            if found.tobytes() != expected.tobytes():
                return False
    return True


def _raw_bytes(arranged: ArrangedSnapshot) -> int:
    steps = arranged.manifest.next_id - arranged.manifest.first_id
    return steps * sum(layout.row_bytes for layout in arranged.layouts)


class _Shares:
    """Tells of several transfers as if they were one."""

    def __init__(self, progress: bool | Progress, sizes: Sequence[int]) -> None:
        self._progress = progress
        self._before = [0, *itertools.accumulate(sizes)]

    def of(self, number: int) -> bool | Progress:
        """What the transfer of that number tells."""
        progress = self._progress
        if isinstance(progress, bool) or not callable(progress):
            return progress
        before, total = self._before[number], self._before[-1]
        return lambda done, _: progress(before + done, total)
