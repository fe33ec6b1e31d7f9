"""The rows of a store as of one moment, for those who read all of them once, in order of their ids.

What it keeps in memory doesn't grow with the store: files are read, not mapped, and no cache is filled. What is read is
checked against the store's checksums. A writer may go on meanwhile; rows that it evicts before they were read are gone.
"""

import abc
import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import StoreCorruptError, StoreNotFoundError
from diskbuf.options import IN_MEMORY, ReadOptions
from diskbuf.store.checksums import CHECKSUM_FILE, Checksum, ChecksumTable, entries_in
from diskbuf.store.chunk_format import ChunkFormat
from diskbuf.store.header import LiveHeader
from diskbuf.store.layout import HEADER_FILE, STATE_FOLDER, ColumnLayout, Leaf, chunks_of
from diskbuf.store.manifest import Manifest
from diskbuf.store.objects import FallbackObjects, LocalObjects, Objects
from diskbuf.store.reading import Store, column_layouts, stored_extent
from diskbuf.store.remote import read_remote_manifest

_PIECE_BYTES = 2**22
_MOST_AHEAD_BYTES = 2**26
"""What decoded chunks that are fetched ahead may take."""

_Entries = Mapping[tuple[str, int], Checksum]


class EvictedError(Exception):
    """Rows that were evicted before they were read.

    Attributes:
        first_id: No id below it can be read any more.
    """

    def __init__(self, first_id: int) -> None:
        super().__init__(f"ids below {first_id} were evicted")
        self.first_id = first_id


class Snapshot(abc.ABC):
    """The rows of a store from `oldest_id` to the manifest's `next_id`.

    Attributes:
        manifest: What the store was at that moment; its window is the window of then.
        oldest_id: First id that is there: of the window, or of the history where it is kept.
        gone_below: Rows with ids below it were evicted before they were read: what was read of them are zeros. 0 as
            long as none were, or those that were are an error.
        layouts: The columns.
        bytes_read: How many bytes were read of the store so far.
    """

    def __init__(self, manifest: Manifest, layouts: Sequence[ColumnLayout]) -> None:
        self.manifest = manifest
        self.oldest_id = min(manifest.oldest_id if manifest.keep_history else manifest.first_id, manifest.next_id)
        self.gone_below = 0
        self.layouts = tuple(layouts)
        self.bytes_read = 0
        self._counting = threading.Lock()

    @property
    @abc.abstractmethod
    def chunk_format(self) -> ChunkFormat | None:
        """How objects are stored that can be taken as they are, None where there are only rows."""

    @abc.abstractmethod
    def rows(self, number: int, first_id: int, next_id: int) -> NDArray[Any]:
        """Reads rows of a column; cheap when the calls for a column go up.

        Args:
            number: Which column.
            first_id: First id.
            next_id: Where to stop, exclusive, in the same chunk of the column.

        Returns:
            [n, lanes, *shape], not to be written to.

        Raises:
            EvictedError: When a writer has evicted them.
            StoreCorruptError: When a file is missing, short, or isn't what was written.
        """

    def object_as_it_is(self, group: int, chunk: int) -> bytes | None:  # noqa: ARG002
        """Reads an object that holds the rows of a chunk up to the end of the window, and no others.

        Safe to be called by several threads.

        Returns:
            Its bytes; None when there is no such object, so that the rows have to be taken.

        Raises:
            EvictedError: When a writer has evicted it.
            StoreCorruptError: When it is missing or isn't what was written.
        """
        return None

    def load(self, group: int, chunk: int) -> list[NDArray[Any]]:
        """Reads the rows of a chunk, up to the end of the window, of the columns that are in one object.

        Safe to be called by several threads. Only where there are objects; raises as `rows`.

        Returns:
            For each column [n, lanes, *shape].
        """
        raise NotImplementedError

    @abc.abstractmethod
    def close(self) -> None:
        """Closes what is open."""

    def rows_in(self, layout: ColumnLayout, chunk: int) -> int:
        """How many rows of a chunk there are, counted from the chunk's first."""
        return min(layout.chunk_rows, self.manifest.next_id - chunk * layout.chunk_rows)

    def _count(self, read: int) -> None:
        with self._counting:
            self.bytes_read += read

    def _certain(self, entries: _Entries) -> _Entries:
        """Those checksums that cover no row behind the window."""
        return {key: entry for key, entry in entries.items() if entry.first_id + entry.rows <= self.manifest.next_id}


class RawSnapshot(Snapshot):
    """Of a store on this machine whose chunks are raw files.

    Args:
        store: The store, open for reading and not mapped; closed with this.
        manifest: What it is at the moment.
    """

    chunk_format = None

    def __init__(self, store: Store, manifest: Manifest, *, folder: Path) -> None:
        super().__init__(manifest, [column.layout for column in store.columns])
        self._store = store
        self._entries = self._certain(ChecksumTable.load(folder / STATE_FOLDER / CHECKSUM_FILE).entries)
        self._checked: dict[int, _Checked] = {}

    def rows(self, number: int, first_id: int, next_id: int) -> NDArray[Any]:
        """Reads them from their chunk file; its checksum is taken piece by piece, from the chunk's beginning on."""
        layout = self.layouts[number]
        chunk = first_id // layout.chunk_rows
        stop = (chunk + 1) * layout.chunk_rows
        column = self._store.columns[number]
        try:
            found = column.read_span(first_id, next_id - first_id)
            self._count(found.nbytes)
            self._check_is_there(stop)
            entry = self._entries.get((layout.file_path, chunk))
            if entry is not None and layout.row_bytes:
                self._check(number, entry, first_id, found)
        except FileNotFoundError as error:
            self._check_is_there(stop)
            raise _missing(str(column.chunk_path(chunk)), first_id) from error
        return found

    def _check_is_there(self, stop: int) -> None:
        """Raises where a chunk up to an id may have been overwritten; until then its rows stay, evicted ones too."""
        first_id = self._first_id_now()
        if first_id >= stop:
            raise EvictedError(first_id)

    def _first_id_now(self) -> int:
        return self._store.window()[0]

    def _check(self, number: int, entry: Checksum, first_id: int, rows: NDArray[Any]) -> None:
        column, layout = self._store.columns[number], self.layouts[number]
        state = self._checked.get(number)
        if state is None or state.first_id != entry.first_id or state.next_id != first_id:
            state = self._checked[number] = _Checked(first_id=entry.first_id, next_id=entry.first_id)
            piece_rows = max(1, _PIECE_BYTES // layout.row_bytes)
            for start in range(entry.first_id, first_id, piece_rows):
                state.take(column.read_span(start, min(piece_rows, first_id - start)), entry)
            self._check_is_there(entry.first_id + layout.chunk_rows)
        state.take(rows, entry)
        if state.is_complete(entry) and state.crc != entry.crc32c:
            place = str(column.chunk_path(first_id // layout.chunk_rows))
            raise _rotten(place, entry, state.crc)

    def close(self) -> None:
        """Closes the store."""
        self._store.close()


@dataclasses.dataclass(kw_only=True)
class _Checked:
    """How far the checksum of a chunk was taken.

    Attributes:
        first_id: First id of the chunk.
        next_id: Behind the last row that went in.
        crc: The checksum, of no more rows than the one it is compared with.
        is_new: Whether the last piece completed it.
    """

    first_id: int
    next_id: int
    crc: int = 0
    is_new: bool = False

    def take(self, rows: NDArray[Any], entry: Checksum) -> None:
        end = entry.first_id + entry.rows
        counted = max(0, min(len(rows), end - self.next_id))
        if counted:
            self.crc = google_crc32c.extend(self.crc, rows[:counted].reshape(-1).view(np.uint8))
        self.is_new = self.next_id < end <= self.next_id + len(rows)
        self.next_id += len(rows)

    def is_complete(self, entry: Checksum) -> bool:
        return self.is_new and self.next_id >= entry.first_id + entry.rows


class ObjectSnapshot(Snapshot):
    """Of a store whose chunks are objects; those that a store on this machine hasn't sealed yet are read through it.

    Args:
        store: The store, for what is not sealed; None for a remote one. Closed with this, as the objects are.
        manifest: What it is at the moment.
        objects: Its objects.
        layouts: The columns.
        folder: Where it is; None for a remote one.
    """

    def __init__(
        self,
        store: Store | None,
        manifest: Manifest,
        *,
        objects: Objects,
        layouts: Sequence[ColumnLayout],
        folder: Path | None,
    ) -> None:
        super().__init__(manifest, layouts)
        self._store = store
        self._objects = objects
        self._folder = folder
        self._format = manifest.chunk_format(layouts)
        self._entries = self._load_entries()
        self._group_of = {number: group for group, numbers in enumerate(self._format.groups) for number in numbers}
        self._loading: dict[tuple[int, int], Future[list[NDArray[Any]]]] = {}
        self._loaded: dict[int, tuple[int, list[NDArray[Any]]]] = {}
        self._pool = ThreadPoolExecutor(3, "diskbuf-read")

    @property
    def chunk_format(self) -> ChunkFormat | None:
        """How its chunks are stored."""
        return self._format

    def _load_entries(self) -> _Entries:
        if self._folder is not None:
            return ChecksumTable.load(self._folder / STATE_FOLDER / CHECKSUM_FILE).entries
        name = f"{STATE_FOLDER}/{CHECKSUM_FILE}"
        try:
            return entries_in(self._objects.read(name), place=self._objects.place(name))
        except FileNotFoundError:
            return {}

    def _first_id_now(self) -> int:
        if self._store is not None:
            return self._store.window()[0]
        manifest = read_remote_manifest(self._objects)
        return manifest.oldest_id if manifest.keep_history else manifest.first_id

    # ---- objects

    def object_as_it_is(self, group: int, chunk: int) -> bytes | None:
        """Takes the object of a chunk, unless it isn't sealed, or holds more rows or fewer than there were."""
        layout = self.layouts[self._format.groups[group][0]]
        rows = self.rows_in(layout, chunk)
        if self._is_raw(group, chunk):
            return None
        data, entry = self._fetch(group, chunk, rows)
        if entry is None:
            if rows < layout.chunk_rows:
                return None
            with self._naming(group, chunk):
                self._format.decode(group, chunk, data, [None] * len(self._format.groups[group]))
        elif rows < layout.chunk_rows and entry.rows != rows:
            return None
        return data

    def _is_raw(self, group: int, chunk: int) -> bool:
        """Whether there is a raw file of a chunk, which then counts."""
        if self._folder is None or not self.manifest.is_sealed:
            return False
        layouts = [self.layouts[number] for number in self._format.groups[group]]
        return any((self._folder / layout.raw_folder / layout.file_name(chunk)).exists() for layout in layouts)

    def _fetch(self, group: int, chunk: int, rows: int) -> tuple[bytes, Checksum | None]:
        """Reads the object of a chunk, of at least so many rows, and its checksum, None where nothing tells."""
        name = self._format.object_name(group, chunk)
        try:
            try:
                return self._fetch_as_known(group, chunk, rows)
            except StoreCorruptError:
                # Whoever publishes a store replaces the object of a chunk that isn't full, and its checksum before.
                known, self._entries = self._entries, self._load_entries()
                if self._entries == known:
                    raise
                return self._fetch_as_known(group, chunk, rows)
        except FileNotFoundError as error:
            first_id, layout = self._first_id_now(), self.layouts[self._format.groups[group][0]]
            if first_id >= (chunk + 1) * layout.chunk_rows:
                raise EvictedError(first_id) from error
            raise _missing(self._objects.place(name), chunk * layout.chunk_rows) from error

    def _fetch_as_known(self, group: int, chunk: int, rows: int) -> tuple[bytes, Checksum | None]:
        name = self._format.object_name(group, chunk)
        entry = self._entries.get((name.rpartition("/")[0], chunk))
        if entry is not None and entry.rows < rows:
            entry = None  # of fewer rows, as they were before more came
        stop = None if entry is None else entry.bytes
        if self._format.has_fixed_size:
            stop = self.layouts[self._format.groups[group][0]].chunk_bytes
        data = self._objects.read(name, 0, stop)
        self._count(len(data))
        if entry is not None:
            crc = google_crc32c.value(data if len(data) == entry.bytes else data[: entry.bytes])
            if crc != entry.crc32c:
                raise _rotten(self._objects.place(name), entry, crc)
        return data, entry

    # ---- rows

    def rows(self, number: int, first_id: int, next_id: int) -> NDArray[Any]:
        """Takes them out of the decoded chunk that they are in; the next ones are fetched meanwhile."""
        group, layout = self._group_of[number], self.layouts[number]
        chunk, inside = divmod(first_id, layout.chunk_rows)
        known = self._loaded.get(group)
        if known is None or known[0] != chunk:
            self._loaded.pop(group, None)
            for passed in [key for key in self._loading if key[0] == group and key[1] < chunk]:
                del self._loading[passed]
            future = self._loading.pop((group, chunk), None) or self._pool.submit(self.load, group, chunk)
            self._ask_ahead(group, chunk)
            known = self._loaded[group] = (chunk, future.result())
        rows = known[1][self._format.groups[group].index(number)]
        return rows[inside : inside + next_id - first_id]

    def _ask_ahead(self, group: int, chunk: int) -> None:
        layouts = [self.layouts[number] for number in self._format.groups[group]]
        size = sum(layout.chunk_bytes for layout in layouts)
        last = chunks_of(0, self.manifest.next_id, layouts[0].chunk_rows).stop
        for following in range(chunk + 1, min(chunk + 3, last)):
            if (group, following) in self._loading:
                continue
            taken = sum(self._bytes_of(other) for other, _ in self._loading)
            if taken + size > _MOST_AHEAD_BYTES:
                return
            self._loading[group, following] = self._pool.submit(self.load, group, following)

    def _bytes_of(self, group: int) -> int:
        return sum(self.layouts[number].chunk_bytes for number in self._format.groups[group])

    def load(self, group: int, chunk: int) -> list[NDArray[Any]]:
        """Reads a chunk of all columns of a group."""
        numbers = self._format.groups[group]
        count = self.rows_in(self.layouts[numbers[0]], chunk)
        if self._is_raw(group, chunk):
            return self._load_raw(numbers, chunk, count)
        data, _ = self._fetch(group, chunk, count)
        layouts = [self.layouts[number] for number in numbers]
        into = [np.empty((count, layout.lanes, *layout.shape), layout.dtype) for layout in layouts]
        with self._naming(group, chunk):
            self._format.decode(group, chunk, data, into)
        return into

    def _load_raw(self, numbers: Sequence[int], chunk: int, count: int) -> list[NDArray[Any]]:
        """Reads rows that aren't sealed, through the store; those that have been evicted are zeros."""
        if self._store is None:
            raise StoreNotFoundError(f"{self._objects.place('')} must have sealed chunks only.")
        layouts = [self.layouts[number] for number in numbers]
        start = chunk * layouts[0].chunk_rows
        first_id = wanted = max(start, self.oldest_id)
        while True:
            first_id = max(first_id, self._first_id_now())
            if first_id >= start + count:
                raise EvictedError(first_id)
            found = self._store.read_columns(numbers, first_id, start + count)
            if found is not None and found[0].shape[1] == start + count - first_id:
                break
            first_id += 1  # evicted between the two looks
        if first_id > wanted:
            with self._counting:
                self.gone_below = max(self.gone_below, first_id)
        whole = []
        for layout, rows in zip(layouts, found, strict=True):
            self._count(rows.nbytes)
            into = np.zeros((count, layout.lanes, *layout.shape), layout.dtype)
            into[first_id - start :] = rows.swapaxes(0, 1)
            whole.append(into)
        return whole

    @contextlib.contextmanager
    def _naming(self, group: int, chunk: int) -> Iterator[None]:
        """Says of what can't be decoded which object it is."""
        try:
            yield
        except ValueError as error:
            place = self._objects.place(self._format.object_name(group, chunk))
            raise StoreCorruptError(
                f"chunk file {place} must hold chunk {chunk}, but can't be decoded: {str(error).rstrip('.')}. "
                "Restore that file, or run diskbuf.repair.",
                path=place,
            ) from error

    def close(self) -> None:
        """Ends the threads and closes store and connections."""
        self._pool.shutdown(cancel_futures=True)
        self._loading.clear()
        if self._store is not None:
            self._store.close()
        self._objects.close()


def take_local_snapshot(
    path: Path, leaves: Sequence[Leaf], *, remote: Objects | None, read_options: ReadOptions
) -> Snapshot:
    """Takes a snapshot of a store on this machine.

    Args:
        path: Its folder.
        leaves: The leaves of its spec.
        remote: Where chunks are that are no longer here; closed with the snapshot.
        read_options: How requests to there are made.

    Raises:
        StoreNotFoundError: When there is no store.
        StoreFormatError: When this version can't read it.
        StoreCorruptError: When one of its files is missing, short or unreadable.
    """
    options = dataclasses.replace(read_options, cache_dir=IN_MEMORY, cache_bytes=_MOST_AHEAD_BYTES, prefetch_chunks=0)
    store = Store(path, leaves, reads_history=True, is_mapped=False, read_options=options, remote=remote)
    try:
        manifest = _manifest_now(store, path)
        if not manifest.is_sealed:
            return RawSnapshot(store, manifest, folder=path)
        here = LocalObjects(path)
        return ObjectSnapshot(
            store,
            manifest,
            objects=here if remote is None else FallbackObjects(here, remote),
            layouts=column_layouts(leaves, manifest, path=path),
            folder=path,
        )
    except BaseException:
        store.close()
        raise


def take_remote_snapshot(objects: Objects, leaves: Sequence[Leaf], manifest: Manifest) -> Snapshot:
    """Takes a snapshot of a remote store, from its manifest; closes the objects with it."""
    layouts = column_layouts(leaves, manifest, path=Path())
    return ObjectSnapshot(None, manifest, objects=objects, layouts=layouts, folder=None)


def _manifest_now(store: Store, path: Path) -> Manifest:
    """The manifest with the window of this moment, which is in the live header."""
    while True:
        store.window()
        manifest = store.manifest
        try:
            with contextlib.closing(LiveHeader(path / STATE_FOLDER / HEADER_FILE, writable=False)) as header:
                extent, again = stored_extent(manifest, header), stored_extent(manifest, header)
        except FileNotFoundError:
            extent = again = stored_extent(manifest, None)
        store.window()
        if store.manifest is manifest and extent.generation == again.generation:  # no writer began or cleared it
            return dataclasses.replace(
                manifest, generation=extent.generation, first_id=extent.floor, next_id=extent.next_id
            )


def _missing(place: str, first_id: int) -> StoreCorruptError:
    return StoreCorruptError(
        f"chunk file {place} must be there for ids from {first_id}, but is missing. "
        "Restore that file, or run diskbuf.repair.",
        path=place,
    )


def _rotten(place: str, entry: Checksum, crc: int) -> StoreCorruptError:
    return StoreCorruptError(
        f"chunk file {place} must have checksum {entry.crc32c:08x} over its first {entry.bytes} bytes, has {crc:08x}. "
        "Restore that file, or run diskbuf.repair.",
        path=place,
    )
