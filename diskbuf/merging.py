"""Several stores into one: rows are copied, sources stay as they are."""

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from diskbuf import specs
from diskbuf.arranging import arrange, named, window_of
from diskbuf.errors import OptionError, StoreMismatchError
from diskbuf.options import Layout, ReadOptions
from diskbuf.replay_buffers.opening import item_format_of, place_of
from diskbuf.store.arranged import Segment
from diskbuf.store.snapshot import Snapshot
from diskbuf.transfer import KEEP, Asked, Progress, check_apart, checked_read_options, new_place, snapshot_of, transfer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergedSource:
    """Where the rows of a source are in the merged store.

    Attributes:
        path: The source.
        first_id: First id that was taken of it.
        next_id: Where that ended, exclusive.
        lanes: Its lanes.
        begins_at: Id in the merged store of its first row.
        ends_at: Where its rows end there, exclusive.
    """

    path: str
    first_id: int
    next_id: int
    lanes: int
    begins_at: int
    ends_at: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeReport:
    """What `merge` did.

    Attributes:
        destination: Where the merged store is.
        sources: What came from where, in order.
        batch_size: Its lanes.
        next_id: End of its window, which begins at 0.
        bytes_read: Bytes that were read of the sources.
        bytes_written: Bytes of objects that were written.
        seconds: How long it took.
    """

    destination: str
    sources: tuple[MergedSource, ...]
    batch_size: int
    next_id: int
    bytes_read: int
    bytes_written: int
    seconds: float


def merge(
    sources: Sequence[str | os.PathLike[str]],
    destination: str | os.PathLike[str],
    *,
    lanes: Literal["keep", 1] = KEEP,
    history: bool = False,
    metadata: Any = None,
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
) -> MergeReport:
    """Makes one store of several with equal specs: their windows one after another, in the order given.

    Ids are new, from 0 on; the report says which became which, and so does the `metadata` of the store unless other is
    given. A run begins with each source and wherever one began in it, so that no sequence spans two sources or two
    runs. Merging merged stores is the same as merging what they were made of.

    It streams like `diskbuf.copy`, and like it goes on when it was interrupted. Sources may be written meanwhile: what
    is taken is their window of the beginning.

        diskbuf.merge(["runs/a.zarr", "runs/b.zarr"], "runs/all.zarr")

    Args:
        sources: Paths or URLs of stores.
        destination: A path or URL where there is nothing yet, or the same merge, interrupted.
        lanes: "keep" asks for sources with equally many lanes. 1 takes any and puts their lanes one after another, each
            a run of its own; it reads chunks once a lane.
        history: Whether to begin with the oldest step on disk, where a source keeps history.
        metadata: JSON value to keep with the merged store; None for {"merged": [...]} with each source's path, ids and
            metadata.
        codec: As in `diskbuf.copy`; "keep" is the first source's, as for `layout`.
        layout: As in `diskbuf.copy`.
        level: As in `diskbuf.copy`.
        chunk_bytes: As in `diskbuf.copy`.
        inner_rows: As in `diskbuf.copy`.
        storage_options: What fsspec's file system of the sources' protocol takes.
        destination_storage_options: The same for the destination.
        read_options: How requests are made.
        verify: Whether what was written is read back.
        progress: Whether a bar is shown on a terminal; or what is called with (bytes done, bytes in all).

    Returns:
        What was done.

    Raises:
        OptionError: When an argument is outside its rule, there is no source, or one lies in the destination.
        StoreMismatchError: When the stores differ in spec, kind or, with lanes "keep", in lanes.
        StoreNotFoundError: When there is no store at a source.
        StoreExistsError: When something else is at the destination.
        StoreCorruptError: When an object of a source isn't what was written.
        WindowError: When a writer evicted steps before they were read.
        OSError: When the destination can't be written or is full.
    """
    asked = Asked(codec=codec, layout=layout, level=level, chunk_bytes=chunk_bytes, inner_rows=inner_rows)
    if isinstance(sources, str | os.PathLike) or not sources:
        raise OptionError(f"sources must be a list of one or more stores, got {sources!r}.")
    if lanes not in (KEEP, 1):
        raise OptionError(f"lanes must be 'keep' or 1, got {lanes!r}.")
    places, to_place = [place_of(source) for source in sources], new_place(destination)
    for place in places:
        check_apart(place, to_place)
    options = checked_read_options(read_options)
    with contextlib.ExitStack() as opened:
        snapshots = [
            opened.enter_context(contextlib.closing(snapshot_of(place, storage_options, options))) for place in places
        ]
        _check_equal(places, snapshots, with_lanes=lanes == KEEP)
        windows = [window_of(snapshot, history=history) for snapshot in snapshots]
        segments, merged = _end_to_end(places, snapshots, windows, one_lane=lanes == 1)
        told = [
            dataclasses.asdict(source) | {"metadata": snapshot.manifest.metadata}
            for source, snapshot in zip(merged, snapshots, strict=True)
        ]
        arranged = arrange(
            segments,
            first_id=0,
            lanes=1 if lanes == 1 else snapshots[0].manifest.batch_size,
            metadata={"merged": told} if metadata is None else metadata,
        )
        done = transfer(
            arranged,
            to_place,
            asked,
            source=named("merge", places, segments),
            is_here=all(isinstance(place, Path) for place in places),
            is_new=True,
            storage_options=destination_storage_options,
            read_options=options,
            verify=verify,
            progress=progress,
        )
        return MergeReport(
            destination=str(to_place),
            sources=tuple(merged),
            batch_size=arranged.manifest.batch_size,
            next_id=done.next_id,
            bytes_read=arranged.bytes_read,
            bytes_written=done.bytes_written,
            seconds=done.seconds,
        )


def _check_equal(places: Sequence[Path | str], snapshots: Sequence[Snapshot], *, with_lanes: bool) -> None:
    first = snapshots[0].manifest
    spec = item_format_of(first).data_spec
    for place, snapshot in zip(places[1:], snapshots[1:], strict=True):
        manifest = snapshot.manifest
        found = [f"kind: {first.kind!r}, not {manifest.kind!r}"] if manifest.kind != first.kind else []
        found += specs.differences(spec, item_format_of(manifest).data_spec)
        advice = "Merge stores of one spec."
        if not found and with_lanes and manifest.batch_size != first.batch_size:
            found = [f"lanes: {first.batch_size}, not {manifest.batch_size}"]
            advice = "Give lanes=1 to put lanes one after another."
        if found:
            raise StoreMismatchError(
                f"stores must be alike to be merged, but {place} differs from {places[0]}.\n  "
                + "\n  ".join(found)
                + f"\n{advice}",
                path=str(place),
                differences=found,
            )


def _end_to_end(
    places: Sequence[Path | str],
    snapshots: Sequence[Snapshot],
    windows: Sequence[tuple[int, int]],
    *,
    one_lane: bool,
) -> tuple[list[Segment], list[MergedSource]]:
    segments: list[Segment] = []
    merged: list[MergedSource] = []
    begins_at = 0
    for place, snapshot, (first_id, next_id) in zip(places, snapshots, windows, strict=True):
        lanes = snapshot.manifest.batch_size
        of_lanes: Iterable[int | None] = range(lanes) if one_lane and lanes > 1 else [None]
        new = [Segment(snapshot=snapshot, first_id=first_id, next_id=next_id, lane=lane) for lane in of_lanes]
        ends_at = begins_at + sum(segment.steps for segment in new)
        merged.append(
            MergedSource(
                path=str(place), first_id=first_id, next_id=next_id, lanes=lanes, begins_at=begins_at, ends_at=ends_at
            )
        )
        segments += new
        begins_at = ends_at
    return segments, merged
