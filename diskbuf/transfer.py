"""Bringing the rows of a snapshot to a place where they become a store: what every copy, merge and split does.

It streams within a few chunks of memory, goes on where it was interrupted, and reads back what it wrote.
"""

import collections
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import OptionError, WindowError
from diskbuf.options import ReadOptions, StoreOptions
from diskbuf.replay_buffers.opening import item_format_of, laid_out, leaves_of, objects_at, place_of
from diskbuf.store.chunk_formats.codecs import inner_rows_of
from diskbuf.store.copy_target import CopyFolder, CopyTarget, lock_copy
from diskbuf.store.layout import ColumnLayout, Leaf, chunks_of
from diskbuf.store.manifest import Manifest, read_manifest
from diskbuf.store.objects import Objects
from diskbuf.store.reading import column_layouts
from diskbuf.store.remote import read_remote_manifest
from diskbuf.store.snapshot import EvictedError, Snapshot, take_local_snapshot, take_remote_snapshot
from diskbuf.version import __version__

KEEP: Final = "keep"
"""What stands for the layout or codec of the source."""

_WORKERS_HERE = 3
_WORKERS_REMOTE = 8
_MOST_BYTES = 96 * 2**20
"""What raw rows, or objects, that are on their way to the destination may take; one chunk always may."""

Progress = Callable[[int, int], object]


class Transferred(NamedTuple):
    """What a transfer did.

    Attributes:
        first_id: First id of the new store's window.
        next_id: End of the window.
        objects: Objects of chunks in it.
        bytes_written: Bytes of objects that were written.
        skipped: Objects among them that an earlier call had already written.
        seconds: How long it took.
    """

    first_id: int
    next_id: int
    objects: int
    bytes_written: int
    skipped: int
    seconds: float


def transfer(
    snapshot: Snapshot,
    place: Path | str,
    asked: "Asked",
    *,
    source: str,
    is_here: bool,
    is_new: bool = False,
    storage_options: Mapping[str, Any] | None,
    read_options: ReadOptions,
    verify: bool,
    progress: bool | Progress,
) -> Transferred:
    """Makes a store of the rows of a snapshot.

    Args:
        snapshot: The rows; the caller closes it.
        place: Where there is nothing yet, or the same transfer, interrupted.
        asked: How the store is laid out.
        source: What the rows are, in words that are the same when the same transfer is tried again.
        is_here: Whether all of the rows are on this machine.
        is_new: Whether it is another store than the one that the rows are from.
        storage_options: What fsspec's file system of the place's protocol takes.
        read_options: How requests are made.
        verify: Whether what was written is read back.
        progress: Whether a bar is shown on a terminal; or what is called with (bytes done, bytes in all).

    Raises:
        OptionError: When an argument is outside its rule.
        StoreExistsError: When something else is at the place.
        StoreLockedError: When another transfer to it goes on.
        WindowError: When the writer evicted every step before it was read.
        OSError: When it can't be written, or is full; what is there stays for the next call.
    """
    started = time.monotonic()
    if not isinstance(verify, bool):
        raise OptionError(f"verify must be True or False, got {verify!r}.")
    if not isinstance(progress, bool) and not callable(progress):
        raise OptionError(f"progress must be True, False or a function of (done, total) bytes, got {progress!r}.")
    leaves = leaves_of(item_format_of(snapshot.manifest))
    wanted = asked.manifest(snapshot.manifest, leaves, is_new=is_new)
    workers = _WORKERS_HERE if is_here and isinstance(place, Path) else _WORKERS_REMOTE
    with _destination(place, storage_options, read_options) as objects:
        target = CopyTarget(objects, wanted, leaves, source=source, verifies=verify, is_new=is_new)
        copying = _Copying(snapshot, target, workers=workers)
        with _shown(progress, copying.total) as tell:
            copying.run(tell)
    return Transferred(
        first_id=max(copying.manifest.first_id, copying.oldest_id),
        next_id=copying.manifest.next_id,
        objects=len(target.store.entries),
        bytes_written=target.bytes_written,
        skipped=target.skipped,
        seconds=time.monotonic() - started,
    )


# ---- what is asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """How the new store is to be laid out, as the caller has it; each as in `diskbuf.copy`."""

    codec: Any = KEEP
    layout: Any = KEEP
    level: int | None = None
    chunk_bytes: int | None = None
    inner_rows: int | None = None

    def __post_init__(self) -> None:
        if self.keeps_codec:
            for name in ("level", "inner_rows"):
                if getattr(self, name) is not None:
                    raise OptionError(
                        f"{name} must be left out where the codec is kept, got {getattr(self, name)!r}. Name a codec."
                    )
        self._options("zarr" if self.layout == KEEP else self.layout)

    @property
    def keeps_codec(self) -> bool:
        """Whether the codec is the source's."""
        return isinstance(self.codec, str) and self.codec == KEEP

    def _options(self, layout: Any) -> StoreOptions:
        options = StoreOptions(
            layout=layout,
            codec=None if self.keeps_codec else self.codec,
            level=self.level,
            inner_rows=self.inner_rows if layout == "zarr" else None,
        )
        return options if self.chunk_bytes is None else dataclasses.replace(options, chunk_bytes=self.chunk_bytes)

    def manifest(self, source: Manifest, leaves: Sequence[Leaf], *, is_new: bool) -> Manifest:
        """The manifest of the store that is made of what `source` tells; a new one gets chunks of its own lengths."""
        layout = source.layout if self.layout == KEEP else self.layout
        if self.inner_rows is not None and layout != "zarr":
            raise OptionError(f"inner_rows must be left out with layout {layout!r}, got {self.inner_rows!r}.")
        copied = dataclasses.replace(source, published_to=None, package_version=__version__)
        if self.keeps_codec and source.codec is not None and layout != source.layout:
            raise OptionError(
                f"codec must be given where the layout changes from {source.layout!r} to {layout!r} and the source is "
                f"compressed, got {KEEP!r}. Name one, or give None for no compression."
            )
        made = laid_out(copied, leaves, self._options(layout))
        if self.keeps_codec and source.codec is not None:
            layouts = column_layouts(leaves, made, path=Path())
            made = dataclasses.replace(made, codec=_refitted(source.codec, source, layouts))
        is_same = layout == source.layout and _without_inner_rows(made.codec) == _without_inner_rows(source.codec)
        if is_same and not is_new and self.chunk_bytes is None and self.inner_rows is None:
            return copied
        return made


def checked_read_options(options: ReadOptions | None) -> ReadOptions:
    """The read options that were given, or the usual ones.

    Raises:
        OptionError: When they are something else.
    """
    found = ReadOptions() if options is None else options
    if not isinstance(found, ReadOptions):
        raise OptionError(f"read_options must be a diskbuf.ReadOptions, got {found!r}.")
    return found


def new_place(path: str | os.PathLike[str]) -> Path | str:
    """Where a copy goes; a URL of this machine is a folder, though there is no store yet that would tell."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    return place_of(text.removeprefix("file://") if isinstance(text, str) else text)


def _refitted(codec: dict[str, Any], source: Manifest, layouts: Sequence[ColumnLayout]) -> dict[str, Any]:
    """A codec for chunks of other lengths, whose inner chunks are then as long as those of a new store."""
    if "inner_rows" not in codec:
        return codec
    inner = {
        layout.file_path: codec["inner_rows"][layout.file_path]
        if layout.chunk_rows == source.chunk_rows[layout.file_path]
        else inner_rows_of(layout)
        for layout in layouts
    }
    return codec | {"inner_rows": inner}


def _without_inner_rows(codec: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if codec is None else {name: value for name, value in codec.items() if name != "inner_rows"}


# ---- the two places


def check_apart(source: Path | str, destination: Path | str) -> None:
    """Refuses two places of which one lies in the other.

    Raises:
        OptionError: When it does.
    """
    one, other = _on_this_machine(source), _on_this_machine(destination)
    if isinstance(one, Path) and isinstance(other, Path):
        first, second = Path(os.path.realpath(one)), Path(os.path.realpath(other))
        is_apart = first != second and first not in second.parents and second not in first.parents
    elif isinstance(one, str) and isinstance(other, str):
        begin, end = (f"{url.rstrip('/')}/" for url in (one, other))
        is_apart = not (begin.startswith(end) or end.startswith(begin))
    else:
        is_apart = True
    if not is_apart:
        raise OptionError(
            f"destination must lie outside the source, and the source outside it, got {str(destination)!r} for "
            f"{str(source)!r}. Choose another place."
        )


def _on_this_machine(place: Path | str) -> Path | str:
    """The folder that a URL names, where it names one: what was published to a folder has no path of a store."""
    if isinstance(place, str) and place.startswith(("file://", "local://")):
        return Path(place.partition("://")[2])
    return place


def snapshot_of(place: Path | str, storage_options: Mapping[str, Any] | None, options: ReadOptions) -> Snapshot:
    """Takes a snapshot of the store at a place; whoever asked closes it.

    Raises:
        StoreError: When it can't be opened.
    """
    if isinstance(place, str):
        objects = objects_at(place, storage_options=storage_options, read_options=options)
        try:
            manifest = read_remote_manifest(objects)
            return take_remote_snapshot(objects, leaves_of(item_format_of(manifest)), manifest)
        except BaseException:
            objects.close()
            raise
    manifest = read_manifest(place)
    remote = None
    if manifest.published_to is not None:
        remote = objects_at(manifest.published_to, storage_options=storage_options, read_options=options)
    leaves = leaves_of(item_format_of(manifest))
    return take_local_snapshot(place, leaves, remote=remote, read_options=options)


@contextlib.contextmanager
def _destination(
    place: Path | str, storage_options: Mapping[str, Any] | None, options: ReadOptions
) -> Iterator[Objects]:
    """Opens the destination, a path locked."""
    if isinstance(place, str):
        objects = objects_at(place, storage_options=storage_options, read_options=options, is_ours=True)
        with contextlib.closing(objects):
            yield objects
    else:
        with contextlib.closing(lock_copy(place)):
            yield CopyFolder(place)


# ---- the work


class _Pending(NamedTuple):
    """An object on its way: what tells how many bytes were written and whether it was there."""

    future: Future[tuple[int, bool]]
    group: int
    chunk: int
    size: int


class _Copying:
    """Brings the rows of a snapshot to a target.

    Attributes:
        manifest: What the copy is.
        oldest_id: First id that is in the copy; goes up when rows are evicted before they were read.
        total: Bytes of raw rows in all.
    """

    def __init__(self, snapshot: Snapshot, target: CopyTarget, *, workers: int) -> None:
        self._snapshot = snapshot
        self._target = target
        self._format = target.chunk_format
        self._workers = workers
        self.manifest = target.manifest
        self.oldest_id = snapshot.oldest_id
        self.total = sum(self._raw_bytes(group, chunk) for group, chunk in self._chunks())
        self._done_bytes = 0
        self._tell: Progress = _nothing
        self._pending: collections.deque[_Pending] = collections.deque()
        self._pending_bytes = 0

    def _chunks(self) -> list[tuple[int, int]]:
        """The chunks (group, chunk) of the copy, those of the first ids first."""
        found = [
            (chunk * rows, group, chunk)
            for group, rows in enumerate(self._group_rows())
            for chunk in chunks_of(self.oldest_id, self.manifest.next_id, rows)
        ]
        return [(group, chunk) for _, group, chunk in sorted(found)]

    def _group_rows(self) -> list[int]:
        return [self._target.layouts[numbers[0]].chunk_rows for numbers in self._format.groups]

    def _layouts(self, group: int) -> list[ColumnLayout]:
        return [self._target.layouts[number] for number in self._format.groups[group]]

    def _rows_in(self, group: int, chunk: int) -> int:
        return self._snapshot.rows_in(self._layouts(group)[0], chunk)

    def _raw_bytes(self, group: int, chunk: int) -> int:
        return self._rows_in(group, chunk) * sum(layout.row_bytes for layout in self._layouts(group))

    def run(self, tell: Progress) -> None:
        """Copies everything that isn't there, then makes a store of it."""
        target = self._target
        self._tell = tell
        if target.is_done:
            target.store.entries.update(target.kept)
            target.skipped = len(target.kept)
            target.remove_note()
            return
        if target.earlier is None:
            target.save_note(now=True)
        try:
            with ThreadPoolExecutor(self._workers, "diskbuf-copy") as pool:
                try:
                    self._copy_all(pool)
                finally:
                    for pending in self._pending:
                        pending.future.cancel()
        except BaseException:
            with contextlib.suppress(Exception):  # a full disk has no room for the note either
                target.save_note(now=True)
            raise
        next_id = self.manifest.next_id
        self._left_out(self._snapshot.gone_below)
        if self._snapshot.oldest_id < next_id and self.oldest_id >= next_id:
            raise WindowError(
                f"steps must stay in the window until they are copied, but the writer evicted all those from "
                f"{self._snapshot.oldest_id} to {next_id}. Copy {target.objects.place('')} while fewer are added, or "
                "make the window longer."
            )
        self._remove_evicted()
        target.finish(
            dataclasses.replace(self.manifest, first_id=max(self.manifest.first_id, self.oldest_id)), self.oldest_id
        )

    def _copy_all(self, pool: ThreadPoolExecutor) -> None:
        there = self._find_whole(pool)
        missing = [key for key in self._chunks() if key not in there]
        if self._takes_objects():
            for group, chunk in missing:
                self._submit(pool, group, chunk, self._copy_object, group, chunk)
        else:
            for group, chunk, rows in self._built(set(missing)):
                self._submit(pool, group, chunk, self._write_rows, group, chunk, rows)
        self._settle(0)

    def _takes_objects(self) -> bool:
        theirs, mine = self._snapshot.manifest, self.manifest
        same = all(getattr(theirs, name) == getattr(mine, name) for name in ("layout", "codec", "chunk_rows"))
        return same and self._snapshot.chunk_format is not None

    # ---- what is there

    def _find_whole(self, pool: ThreadPoolExecutor) -> set[tuple[int, int]]:
        """The chunks that an interrupted copy has written, and that are there and right."""
        target = self._target
        if target.earlier is None:
            return set()
        until = self._same_until(target.earlier)
        keys = {}
        for group, chunk in self._chunks():
            entry = target.kept.get((self._format.object_name(group, chunk).rpartition("/")[0], chunk))
            if entry is not None and entry.rows == self._rows_in(group, chunk) and entry.first_id + entry.rows <= until:
                keys[group, chunk] = entry
        whole = pool.map(lambda key: target.is_whole(key[0], key[1], keys[key]), keys)
        there = set()
        for (group, chunk), is_whole in zip(keys, whole, strict=True):
            if is_whole:
                there.add((group, chunk))
                key = (self._format.object_name(group, chunk).rpartition("/")[0], chunk)
                target.store.entries[key] = target.kept[key]
                target.skipped += 1
                self._advance(group, chunk)
        return there

    def _same_until(self, earlier: Manifest) -> int:
        """The id below which steps are the ones that they were; those of a run that a power cut shortened aren't."""
        now = self.manifest
        new_runs = [run for run in now.runs if run not in earlier.runs]
        return min(earlier.next_id, now.next_id, *new_runs)

    # ---- objects as they are

    def _copy_object(self, group: int, chunk: int) -> tuple[int, bool]:
        data: bytes | memoryview | None = self._snapshot.object_as_it_is(group, chunk)
        rows = self._rows_in(group, chunk)
        if data is None:
            data = self._format.encode(group, chunk, self._snapshot.load(group, chunk))
        return self._target.put(group, chunk, data, rows=rows)

    # ---- rows

    def _write_rows(self, group: int, chunk: int, rows: Sequence[NDArray[Any]]) -> tuple[int, bool]:
        return self._target.put(group, chunk, self._format.encode(group, chunk, rows), rows=len(rows[0]))

    def _built(self, missing: set[tuple[int, int]]) -> Iterator[tuple[int, int, list[NDArray[Any]]]]:
        """Reads rows in order of their ids, all columns side by side; yields (group, chunk, its rows) once whole."""
        group_rows = self._group_rows()
        next_id = self.manifest.next_id
        step = min(*group_rows, *(layout.chunk_rows for layout in self._snapshot.layouts))
        building: dict[int, tuple[int, list[NDArray[Any]]]] = {}
        first_id = self.oldest_id
        while first_id < next_id:
            stop = min(next_id, (first_id // step + 1) * step)
            for group, rows in enumerate(group_rows):
                chunk, inside = divmod(first_id, rows)
                if (group, chunk) not in missing:
                    continue
                try:
                    found = [self._snapshot.rows(number, first_id, stop) for number in self._format.groups[group]]
                except EvictedError as error:
                    self._left_out(max(error.first_id, stop))
                    break
                count = self._rows_in(group, chunk)
                if len(found[0]) == count:
                    yield group, chunk, found
                    continue
                if group not in building or building[group][0] != chunk:
                    building[group] = (chunk, [_zeros(count, layout) for layout in self._layouts(group)])
                for into, piece in zip(building[group][1], found, strict=True):
                    into[inside : inside + len(piece)] = piece
                if inside + len(found[0]) == count:
                    yield group, chunk, building.pop(group)[1]
            first_id = max(stop, self.oldest_id)

    def _left_out(self, next_id: int) -> None:
        """The copy begins at an id, or behind it: steps before it were evicted, or are in a chunk that has gone."""
        self.oldest_id = max(self.oldest_id, min(next_id, self.manifest.next_id))

    def _remove_evicted(self) -> None:
        """Removes what was copied of steps before some that were evicted."""
        for group, rows in enumerate(self._group_rows()):
            folder = self._format.object_name(group, 0).rpartition("/")[0]
            for key in [key for key in (*self._target.store.entries, *self._target.kept) if key[0] == folder]:
                if (key[1] + 1) * rows <= self.oldest_id:
                    self._target.store.remove(group, key[1])

    # ---- threads

    def _submit(
        self, pool: ThreadPoolExecutor, group: int, chunk: int, task: Callable[..., tuple[int, bool]], *given: Any
    ) -> None:
        size = self._raw_bytes(group, chunk)
        self._settle(max(0, _MOST_BYTES - size))
        self._pending.append(_Pending(pool.submit(task, *given), group, chunk, size))
        self._pending_bytes += size

    def _settle(self, most_bytes: int) -> None:
        """Waits until no more than so many bytes are on their way."""
        while self._pending and (self._pending_bytes > most_bytes or not most_bytes or self._pending[0].future.done()):
            pending = self._pending.popleft()
            self._pending_bytes -= pending.size
            try:
                written, was_there = pending.future.result()
            except EvictedError as error:
                chunk_end = (pending.chunk + 1) * self._group_rows()[pending.group]
                self._left_out(max(error.first_id, chunk_end))
                continue
            self._target.bytes_written += written
            self._target.skipped += was_there
            self._advance(pending.group, pending.chunk)
            self._target.save_note()

    def _advance(self, group: int, chunk: int) -> None:
        self._done_bytes += self._raw_bytes(group, chunk)
        self._tell(self._done_bytes, self.total)


def _zeros(count: int, layout: ColumnLayout) -> NDArray[Any]:
    return np.zeros((count, layout.lanes, *layout.shape), layout.dtype)


@contextlib.contextmanager
def _shown(progress: bool | Progress, total: int) -> Iterator[Progress]:
    """What is told how far the copy is."""
    if callable(progress):
        yield progress
    elif not progress or not sys.stderr.isatty():
        yield _nothing
    else:
        from tqdm.auto import tqdm

        with tqdm(total=total, unit="B", unit_scale=True) as bar:
            yield lambda done, _: bar.update(done - bar.n)


def _nothing(done: int, total: int) -> None:
    del done, total
