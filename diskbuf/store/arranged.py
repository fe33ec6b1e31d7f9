"""A snapshot that is put together of parts of others: their rows one after another, as if one store held them."""

import bisect
import dataclasses
import datetime as dt
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import WindowError
from diskbuf.store.layout import ColumnLayout
from diskbuf.store.manifest import Manifest
from diskbuf.store.snapshot import EvictedError, Snapshot

_MOST_CACHED_BYTES = 2**26
"""What chunks that single lanes are taken of may take; one chunk of each column always may."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """Rows of a snapshot that stay together.

    Attributes:
        snapshot: Where they are.
        first_id: Their first id there.
        next_id: Where they end, exclusive.
        lane: Which lane; None for all.
        is_cut: Whether a run begins with them, since they don't follow from what comes before.
    """

    snapshot: Snapshot
    first_id: int
    next_id: int
    lane: int | None = None
    is_cut: bool = True

    @property
    def steps(self) -> int:
        """How many ids."""
        return self.next_id - self.first_id


class ArrangedSnapshot(Snapshot):
    """Segments one after another.

    All snapshots have columns of equal leaves, and as many lanes as there are in the arrangement where a segment has
    all of them. The snapshots are the caller's to close.

    Args:
        manifest: What the arrangement is, its window that of all rows.
        layouts: Its columns.
        segments: At least one.
    """

    chunk_format = None

    def __init__(self, manifest: Manifest, layouts: Sequence[ColumnLayout], segments: Sequence[Segment]) -> None:
        super().__init__(manifest, layouts)
        self._segments = tuple(segments)
        self._starts = starts_of(self._segments, manifest.first_id)
        self._snapshots = list({id(segment.snapshot): segment.snapshot for segment in self._segments}.values())
        self._cached: OrderedDict[tuple[int, int, int], tuple[int, NDArray[Any]]] = OrderedDict()
        self._cached_bytes = 0

    def rows(self, number: int, first_id: int, next_id: int) -> NDArray[Any]:
        """Reads them segment by segment.

        Raises:
            WindowError: When a writer has evicted them.
            StoreCorruptError: When a file is missing, short, or isn't what was written.
        """
        pieces = list(self._pieces(number, first_id, next_id))
        self.bytes_read = sum(snapshot.bytes_read for snapshot in self._snapshots)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _pieces(self, number: int, first_id: int, next_id: int) -> Iterator[NDArray[Any]]:
        place = bisect.bisect_right(self._starts, first_id) - 1
        while first_id < next_id:
            segment, start = self._segments[place], self._starts[place]
            there = first_id - start + segment.first_id
            chunk_rows = segment.snapshot.layouts[number].chunk_rows
            stop = min(there + next_id - first_id, segment.next_id, (there // chunk_rows + 1) * chunk_rows)
            try:
                yield self._read(segment, number, there, stop)
            except EvictedError as error:
                raise WindowError(
                    f"steps must stay in the window until they are read, but ids [{there}, {stop}) were to come and "
                    f"the writer has evicted those below {error.first_id}. Try again while fewer are added."
                ) from error
            first_id += stop - there
            place += stop == segment.next_id

    def _read(self, segment: Segment, number: int, first_id: int, next_id: int) -> NDArray[Any]:
        snapshot = segment.snapshot
        low, high = self._bounds(snapshot, number, first_id)
        if segment.lane is None and (first_id, next_id) == (low, high):
            return _rows_of(snapshot, number, first_id, next_id)
        begin, found = self._chunk(snapshot, number, first_id)  # other segments want of it too
        rows = found[first_id - begin : next_id - begin]
        return rows if segment.lane is None else rows[:, segment.lane : segment.lane + 1]

    def _bounds(self, snapshot: Snapshot, number: int, first_id: int) -> tuple[int, int]:
        """Ids [first, next) that there are in the chunk of an id."""
        chunk_rows = snapshot.layouts[number].chunk_rows
        low = first_id // chunk_rows * chunk_rows
        return max(low, snapshot.oldest_id), min(low + chunk_rows, snapshot.manifest.next_id)

    def _chunk(self, snapshot: Snapshot, number: int, first_id: int) -> tuple[int, NDArray[Any]]:
        """The rows of the chunk that an id is in, and the first id of them."""
        key = (id(snapshot), number, first_id // snapshot.layouts[number].chunk_rows)
        found = self._cached.pop(key, None)
        if found is not None and found[0] > first_id:  # the rows before it were gone when it was read
            self._cached_bytes -= found[1].nbytes
            found = None
        if found is None:
            begin, stop = self._bounds(snapshot, number, first_id)
            try:
                rows = _rows_of(snapshot, number, begin, stop)
            except EvictedError:  # those that are wanted may still be there
                begin = first_id
                rows = _rows_of(snapshot, number, begin, stop)
            found = (begin, rows)
            self._cached_bytes += rows.nbytes
        self._cached[key] = found
        while self._cached_bytes > _MOST_CACHED_BYTES and len(self._cached) > len(self.layouts):
            self._cached_bytes -= self._cached.popitem(last=False)[1][1].nbytes
        return found

    def close(self) -> None:
        """Forgets what was read; the snapshots stay open."""
        self._cached.clear()


def _rows_of(snapshot: Snapshot, number: int, first_id: int, next_id: int) -> NDArray[Any]:
    rows = snapshot.rows(number, first_id, next_id)
    if snapshot.gone_below > first_id:
        raise EvictedError(snapshot.gone_below)
    return rows


def starts_of(segments: Sequence[Segment], first_id: int) -> list[int]:
    """The id that each segment begins with where they are arranged from `first_id` on."""
    return list(itertools.accumulate((segment.steps for segment in segments[:-1]), initial=first_id))


def arranged_manifest(segments: Sequence[Segment], *, first_id: int, lanes: int, metadata: Any) -> Manifest:
    """What a store of segments is: a new one, laid out as the first segment's, whose window holds everything.

    A run begins where a segment is cut, and where one began in the store that it is from.

    Args:
        segments: At least one.
        first_id: The id of the first row.
        lanes: Number of lanes.
        metadata: The JSON value to keep with it.
    """
    starts = starts_of(segments, first_id)
    steps = sum(segment.steps for segment in segments)
    runs = {first_id} if steps else set()
    for segment, start in zip(segments, starts, strict=True):
        if segment.is_cut and segment.steps:
            runs.add(start)
        shift = start - segment.first_id
        known = segment.snapshot.manifest.runs
        inside = known[bisect.bisect_right(known, segment.first_id) : bisect.bisect_left(known, segment.next_id)]
        runs.update(run + shift for run in inside)
    return dataclasses.replace(
        segments[0].snapshot.manifest,
        batch_size=lanes,
        max_length=None,
        keep_history=False,
        generation=0,
        first_id=first_id,
        next_id=first_id + steps,
        oldest_id=first_id,
        runs=tuple(sorted(runs)),
        created=dt.datetime.now(dt.UTC).isoformat(timespec="microseconds"),
        metadata=metadata,
        published_to=None,
    )
