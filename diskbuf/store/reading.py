"""A store as a reader sees it: which ids are there, and their rows. Knows no specs, no nests and no TensorFlow."""

import contextlib
import errno
import functools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import ClosedError, StoreCorruptError, StoreFormatError, WindowError
from diskbuf.options import ReadOptions
from diskbuf.store import mapping
from diskbuf.store.checksums import CHECKSUM_FILE, Checksum, ChecksumTable, ObjectChecksums, rot_in
from diskbuf.store.chunk_source import ChunkSource
from diskbuf.store.cold_reads import AlwaysAsks, ColdReads
from diskbuf.store.columns import Column, FileColumn, MappedColumn, OpenedChunk, aligned_empty
from diskbuf.store.header import EPOCH, FLOOR, NEXT, STORES_IN_ORDER, Extent, LiveHeader
from diskbuf.store.journal import JournalColumn, journal_of_store, read_journal
from diskbuf.store.journaled_column import JournaledColumn
from diskbuf.store.layout import HEADER_FILE, STATE_FOLDER, ColumnLayout, Leaf, chunks_with, ring_slots
from diskbuf.store.manifest import Manifest, read_manifest
from diskbuf.store.mapped_view import ATTACHED_TO, DETACH_AT, DETACHED_TO, LIMITS, VIEW, MappedRows, MappedView
from diskbuf.store.objects import FallbackObjects, LocalObjects, Objects
from diskbuf.store.residents import Residents

EVERY_ID = sys.maxsize
"""Above every id."""


class _Limit:
    """An int attribute of a store that lies in its `_limits`, where executors that don't ask Python see it too."""

    def __init__(self, word: int) -> None:
        self._word = word

    def __get__(self, store: "Store", owner: type["Store"]) -> int:
        return store._limits[self._word]

    def __set__(self, store: "Store", value: int) -> None:
        store._limits[self._word] = value


class Store:
    """A store open for reading: columns, and the window of ids that is in them.

    Any number of them, in any process, follow a writer without stopping it: the window is read from the live header,
    and rows that are overwritten while they are read are not handed out.

    Args:
        path: The store's folder.
        leaves: The leaves of its spec, in spec order.
        reads_history: Whether rows that have left the window count, where the store keeps them.
        is_mapped: Whether chunk files are mapped; reading them call by call is slower and gives the same answers.
        only: Ids to read, whatever the window is; for a store of which the others are damaged.
        verifies: Whether chunks are checked against their checksums when rows of them are first read.
        read_options: How chunks are read that can't be mapped where they are.
        remote: Where chunks are that are no longer here; None where all are.

    Raises:
        StoreNotFoundError: When there is no store.
        StoreFormatError: When this version can't read it.
        StoreCorruptError: When one of its files is missing, short or unreadable.
    """

    _writable = False
    _attached_to = _Limit(ATTACHED_TO)
    _detach_at = _Limit(DETACH_AT)
    _detached_to = _Limit(DETACHED_TO)
    _view = _Limit(VIEW)

    def __init__(
        self,
        path: Path,
        leaves: Sequence[Leaf],
        *,
        reads_history: bool = False,
        is_mapped: bool = True,
        only: tuple[int, int] | None = None,
        verifies: bool = False,
        read_options: ReadOptions | None = None,
        remote: Objects | None = None,
    ) -> None:
        self.path: Path | str = path
        self._folder = path
        self._read_options = ReadOptions() if read_options is None else read_options
        self._remote = remote
        self._residents: Residents | None = None
        self._whole: tuple[int, int, int] | None = None  # ids that are attached all, as of so many let go of
        self._leaves = tuple(leaves)
        self._reads_history = reads_history
        self._is_mapped = is_mapped and mapping.is_supported()
        self._only = only
        self._verifies = verifies
        self._attaching = threading.RLock()
        self.cold_reads = ColdReads()
        self._shared_limits = aligned_empty((LIMITS,), np.dtype(np.int64))
        self._shared_limits.fill(0)
        self._limits = memoryview(self._shared_limits)  # type: ignore[arg-type]  # numpy's Buffer
        self._header = None if only is not None else self._open_header()
        try:
            self._load()
        except BaseException:
            self.close()
            raise
        _open_stores.add(self)

    def _open_header(self) -> LiveHeader | None:
        try:
            return LiveHeader(self._folder / STATE_FOLDER / HEADER_FILE, writable=self._writable)
        except FileNotFoundError:
            return None

    def _load(self) -> None:
        """Looks at everything anew: at the opening, and when the epoch says that another writer has begun."""
        with self._attaching:
            epoch = self._epoch_on_disk() if self._header is None else self._header.words[EPOCH]
            manifest = self._read_manifest()
            if self._only is None:
                extent = stored_extent(manifest, self._header)
            else:
                extent = Extent(generation=manifest.generation, floor=self._only[0], next_id=self._only[1])
            self._warn_of_lost_steps(manifest, extent)
            self._take(manifest, extent)
            self._epoch = epoch

    def _read_manifest(self) -> Manifest:
        return read_manifest(self._folder)

    def _warn_of_lost_steps(self, manifest: Manifest, extent: Extent) -> None:
        """Tells of steps that were added but not synced when the machine stopped, or before the store was copied."""
        counted = manifest.next_id
        if self._header is not None and not self._header.is_live:
            counted = max(counted, self._header.live.next_id)
        if self._only is None and counted > extent.next_id:
            warnings.warn(
                f"{self.path}: steps up to id {counted} were added, but only those below {extent.next_id} "
                "are certain to be whole. The others are left out.",
                RuntimeWarning,
                stacklevel=5,
            )

    def _take(self, manifest: Manifest, extent: Extent) -> None:
        """Takes over what the files say and attaches the chunks of the window."""
        self._view += 1
        self._whole = None  # before there are columns that nothing is attached to
        self.manifest = manifest
        self._unverified = self._checksums_of(extent) if self._verifies and not manifest.is_sealed else {}
        header = self._header
        self._words = header.words if header is not None and header.is_live else None
        self._fence = _nothing if header is None else header.fence
        self._set_extent(extent)
        layouts = self._make_layouts(manifest)
        rings = [layout.ring_rows - layout.chunk_rows for layout in layouts if layout.ring_rows is not None]
        self._keeps = min(rings, default=EVERY_ID)
        self.lane_bytes = sum(layout.lane_bytes for layout in layouts)
        self.columns = [
            self._make_column(layout, first_chunk=self._static[0] // layout.chunk_rows) for layout in layouts
        ]
        self._seal(layouts)
        self._attach(self._static)
        if not self._writable:
            self._lay_over()

    def _make_layouts(self, manifest: Manifest) -> list[ColumnLayout]:
        return column_layouts(self._leaves, manifest, path=self._folder)

    def _seal(self, layouts: Sequence[ColumnLayout]) -> None:
        """Makes chunks come when their rows are asked for, where they aren't raw files."""
        if self._residents is not None:
            self._residents.close()
        self._whole = None
        self._residents = None
        if not self._is_fetched:
            return
        source = self._make_source(layouts)
        self._residents = Residents(
            self.columns,
            source,
            attach_chunk=_weakly(self.attach_chunk),
            rows_in=_weakly(self._rows_in),
            most_bytes=self._read_options.cache_bytes,
            prefetch_chunks=self._read_options.prefetch_chunks,
            has_raw_files=self._has_raw_files,
            lock=self._attaching,
        )
        groups = {number: group for group, numbers in enumerate(source.chunk_format.groups) for number in numbers}
        for number, column in enumerate(self.columns):
            column.open_sealed = functools.partial(
                _open_sealed, source, groups[number], number, rows_in=_weakly(self._rows_in)
            )
        self.cold_reads = AlwaysAsks()

    @property
    def _is_fetched(self) -> bool:
        """Whether chunks come when their rows are asked for."""
        return self.manifest.is_sealed

    _has_raw_files = True

    def _make_source(self, layouts: Sequence[ColumnLayout]) -> ChunkSource:
        manifest = self.manifest
        here = LocalObjects(self._folder)
        return ChunkSource(
            manifest.chunk_format(layouts),
            here if self._remote is None else FallbackObjects(here, self._remote),
            self._read_options,
            name=f"{self.path}\n{manifest.created}",
            # What is fetched from afar is kept by its checksum.
            checksums=ObjectChecksums.of_store(self._folder) if self._verifies or self._remote is not None else None,
            verifies=self._verifies,
        )

    def _rows_in(self, number: int, chunk: int) -> int:
        """How many rows of a chunk are in the window, counted from the chunk's first."""
        first_id, next_id = self._bounds()
        rows = self.columns[number].layout.chunk_rows
        if chunk < 0 or (chunk + 1) * rows <= first_id:
            return 0
        return max(0, min(rows, next_id - chunk * rows))

    def _lay_over(self) -> None:
        """Takes rows that only the journal has from there."""
        journaled = journal_of_store(self._folder)
        if journaled is None:
            return
        for number, column in enumerate(self.columns):
            layout = column.layout
            raw = journaled.rows_of(JournalColumn.of(layout))
            rows = np.frombuffer(raw, np.uint8).view(layout.dtype) if raw else np.empty(0, layout.dtype)
            shape = (journaled.extent.next_id - journaled.first_id, layout.lanes, *layout.shape)
            self.columns[number] = JournaledColumn(column, journaled.first_id, rows.reshape(shape))

    def _checksums_of(self, extent: Extent) -> dict[tuple[str, int], Checksum]:
        """The checksums of rows that are certain; a power cut may have left some of rows that were never synced."""
        entries = ChecksumTable.load(self._folder / STATE_FOLDER / CHECKSUM_FILE).entries
        return {key: entry for key, entry in entries.items() if entry.first_id + entry.rows <= extent.next_id}

    def _set_extent(self, extent: Extent) -> None:
        """Takes over the length limit of the manifest, and the window for stores that no live writer moves."""
        max_length = self.manifest.max_length
        sees_all = self._reads_history and self.manifest.keep_history
        self._length = EVERY_ID if max_length is None or sees_all else max_length
        self._lowest = self.manifest.oldest_id if sees_all else None
        self._static = self._only or (extent.floor if self._lowest is None else self._lowest, extent.next_id)
        self._attached_to = 0
        self._detached_to = self._static[0]
        self._detach_at = EVERY_ID

    def _make_column(self, layout: ColumnLayout, *, first_chunk: int) -> Column:
        folder = self._folder / layout.raw_folder
        if self._is_mapped and layout.row_bytes:
            try:
                return MappedColumn(layout, folder, writable=self._writable, first_chunk=first_chunk)
            except OSError as error:
                if error.errno != errno.ENOMEM:  # no address space: rows are read call by call instead
                    raise
        return FileColumn(layout, folder, writable=self._writable)

    def attach_chunk(
        self, number: int, chunk: int, opened: OpenedChunk | None = None, columns: list[Column] | None = None
    ) -> None:
        """Attaches a chunk of a column; a column that can't be mapped any further is read call by call from then on.

        Args:
            number: Which column.
            chunk: Which chunk.
            opened: The file that holds it, where that isn't the raw one in the column's folder. It is closed.
            columns: The columns that are meant; None for those of this moment.
        """
        columns = self.columns if columns is None else columns
        mapped = columns[number]
        place = mapped.flat
        try:
            mapped.attach(chunk, opened)
            if mapped.flat is not place:  # it has moved to more address space
                self._view += 1
            return
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
        plain = FileColumn(mapped.layout, mapped.folder, writable=self._writable)
        plain.open_sealed = mapped.open_sealed
        plain.attached.update(mapped.attached)
        plain.attach(chunk)
        self._view += 1
        columns[number] = plain

    def _attach(self, window: tuple[int, int]) -> None:
        """Attaches every chunk of the window that isn't yet, and lets go of those that lie wholly before it."""
        with self._attaching:
            first_id, next_id = window
            if self._residents is not None:
                self._residents.let_go_below(first_id)
                self._attached_to = EVERY_ID
                smallest = min(column.layout.chunk_rows for column in self.columns)
                self._detach_at = (first_id // smallest + 1) * smallest
                return
            reached = detach_at = EVERY_ID
            detached_to = self._detached_to
            self._detached_to = max(detached_to, first_id)  # before any row goes: readers look at it after they read
            for number, column in enumerate(self.columns):
                layout = column.layout
                if layout.slots is None:
                    for chunk in range(detached_to // layout.chunk_rows, first_id // layout.chunk_rows):
                        column.detach(chunk)
                # Of an empty window not even the tail chunk need be there: a power cut may have undone its recycling.
                stop = next_id // layout.chunk_rows if first_id == next_id else -(-next_id // layout.chunk_rows)
                low = max(first_id, min(self._attached_to, next_id)) // layout.chunk_rows
                for chunk in range(low, stop):
                    self._attach_if_there(number, chunk)
                if layout.slots is None:
                    reached = min(reached, stop * layout.chunk_rows)
                    detach_at = min(detach_at, (first_id // layout.chunk_rows + 1) * layout.chunk_rows)
                elif len(column.attached) < layout.slots:
                    reached = min(reached, stop * layout.chunk_rows)
            self._attached_to = reached
            self._detach_at = detach_at

    def _attach_if_there(self, number: int, chunk: int) -> None:
        try:
            self.attach_chunk(number, chunk)
        except IsADirectoryError as error:
            path = self.columns[number].chunk_path(chunk)
            raise StoreCorruptError(
                f"chunk file {path} must be a file, got a folder. Restore that file, or run diskbuf.repair.",
                path=str(path),
            ) from error
        except FileNotFoundError as error:
            layout = self.columns[number].layout
            if (chunk + 1) * layout.chunk_rows <= self._bounds()[0]:
                return  # evicted since the window was read
            path = self.columns[number].chunk_path(chunk)
            raise StoreCorruptError(
                f"chunk file {path} of leaf {layout.path!r} must be there for ids "
                f"from {chunk * layout.chunk_rows}, but is missing. Restore that file, or run diskbuf.repair.",
                path=str(path),
            ) from error

    def _bounds(self) -> tuple[int, int]:
        """The window as the header, or the last opening, has it; attaches nothing."""
        words = self._words
        if words is None:
            return self._static
        next_id = words[NEXT]
        floor = words[FLOOR] if self._lowest is None else self._lowest
        first_id = next_id - self._length
        if first_id < floor:
            first_id = floor
        # A clear between the two looks leaves the floor above the older end: the window of the clear, empty.
        return first_id, (next_id if next_id > first_id else first_id)

    def window(self) -> tuple[int, int]:
        """Returns (first_id, next_id) of this moment; the rows between them can be gathered.

        Raises:
            StoreCorruptError: When a chunk file is missing or short.
            WindowError: When a writer has begun since, and the store was opened without the words that tell of it.
            ClosedError: When another thread closes the store meanwhile.
        """
        try:
            return self._window()
        except ValueError:  # of words that were let go of
            self._check_is_open()
            raise

    def _window(self) -> tuple[int, int]:
        header = self._header
        if header is None:
            if self._epoch_on_disk() != self._epoch:
                raise WindowError(
                    f"{self.path} must not be written to while it is read without its live header, or with "
                    "skip_damaged=True, but a writer has begun. Open it again."
                )
        elif header.words[EPOCH] != self._epoch:
            with self._attaching:
                if header.words[EPOCH] != self._epoch:  # no other thread was faster
                    self._load()
        window = self._bounds()
        self._fence()
        if window[1] > self._limits[ATTACHED_TO] or window[0] >= self._limits[DETACH_AT]:
            self._attach(window)
        return window

    def _intact_from(self, epoch: int) -> int:
        """The id from which on rows read since `epoch` was were not overwritten or let go of meanwhile.

        Raises:
            ClosedError: When another thread closes the store meanwhile.
        """
        try:
            return self._whole_from(epoch)
        except ValueError:  # of words that were let go of
            self._check_is_open()
            raise

    def _whole_from(self, epoch: int) -> int:
        if epoch != self._epoch:
            return EVERY_ID  # another thread has looked at everything anew
        words = self._words
        if words is None:
            header = self._header
            current = self._epoch_on_disk() if header is None else header.words[EPOCH]
            return self._detached_to if current == epoch else EVERY_ID
        self._fence()
        if words[EPOCH] != epoch:
            return EVERY_ID
        floor = 0 if self._lowest is not None else words[FLOOR]
        return max(floor, words[NEXT] - self._keeps, self._limits[DETACHED_TO])

    def _is_of(self, epoch: int) -> bool:
        """Whether no other writer has begun since an epoch, and no thread has looked at everything anew.

        A window that was read as one began may hold rows behind those of a tail that was attached before.
        """
        words = self._words
        try:
            return epoch == self._epoch and (words is None or words[EPOCH] == epoch)
        except ValueError:  # of words that were let go of
            self._check_is_open()
            raise

    def _epoch_on_disk(self) -> int:
        """The epoch in the header file, where it isn't mapped; 0 without a file."""
        try:
            with open(self._folder / STATE_FOLDER / HEADER_FILE, "rb", buffering=0) as file:
                words = os.pread(file.fileno(), 8, 8 * EPOCH)
        except OSError:
            return 0
        return int.from_bytes(words, sys.byteorder, signed=True)

    def _check_is_open(self) -> None:
        if self._header is None and self._only is None:
            raise ClosedError(f"store {self.path} must be open, but was closed. Open it again with diskbuf.open.")

    @property
    def is_writable(self) -> bool:
        """Whether rows can be added through this store."""
        return self._writable

    @property
    def cache_bytes(self) -> int:
        """Most raw bytes of chunks that are kept at hand, where they are fetched."""
        return self._read_options.cache_bytes

    @property
    def most_ids(self) -> int:
        """Most ids that the window can hold, `EVERY_ID` where nothing limits it; history counts where it is read."""
        return self._length

    @property
    def runs(self) -> tuple[int, ...]:
        """First id of each run that wrote rows, ascending."""
        return self.manifest.runs

    def gather(self, first_id: int, rows: NDArray[np.int64]) -> list[NDArray[Any]] | None:
        """Copies rows of all columns, in any order.

        Args:
            first_id: The id that `rows` counts from.
            rows: [*K] flat rows ``(id - first_id) * lanes + lane``, inside the window.

        Returns:
            For each column [*K, *shape], freshly allocated; None when the writer overwrote some of them meanwhile, so
            that the window has to be read again.
        """
        residents, columns, epoch = self._residents, self.columns, self._epoch
        detached = 0 if residents is None else residents.detached
        if residents is not None and not self._is_whole(first_id, rows):
            return self._fetch(first_id, rows)
        shifted: dict[int, NDArray[np.int64]] = {}  # columns that begin at the same row share the index
        found = []
        try:
            if self._unverified:
                self._verify(first_id + np.unique(rows // self.manifest.batch_size))
            for column in columns:
                offset = column.offset(first_id)
                index = shifted.get(offset)
                if index is None:
                    index = shifted[offset] = rows + offset
                found.append(column.take(index))
        except FileNotFoundError:  # the chunk was evicted since the window was read, or else it is missing
            if first_id >= self._intact_from(epoch):
                raise
            return None
        if residents is not None:  # rows never change there, but chunks may have been let go of
            if not self._is_of(epoch):
                return None
            return found if residents.detached == detached else self._fetch(first_id, rows)
        intact_from = self._intact_from(epoch)
        if first_id >= intact_from:
            return found
        lowest = first_id + int(rows.min(initial=EVERY_ID)) // self.manifest.batch_size
        return found if lowest >= intact_from else None

    def _is_whole(self, first_id: int, rows: NDArray[np.int64]) -> bool:
        """Whether rows are of ids that are attached all, and were since they were found to be."""
        whole, residents = self._whole, self._residents
        if whole is None or residents is None or whole[2] != residents.detached or first_id < whole[0]:
            return False
        return first_id + int(rows.max(initial=0)) // self.manifest.batch_size < whole[1]

    def _fetch(self, first_id: int, rows: NDArray[np.int64]) -> list[NDArray[Any]] | None:
        """As `gather`, where chunks have to be fetched first."""
        with self._attaching:
            epoch, residents, columns = self._epoch, self._residents, list(self.columns)
        if residents is None:
            return None  # another thread has looked at everything anew
        ids = first_id + rows // self.manifest.batch_size
        try:
            residents.ask(self._chunks_of(ids), is_passing_by=self._is_passing_by)
            found = [
                residents.take(number, ids, rows + column.offset(first_id), is_passing_by=self._is_passing_by)
                for number, column in enumerate(columns)
            ]
        except (FileNotFoundError, ClosedError) as error:
            if residents is self._residents:
                self._check_was_evicted(int(ids.min(initial=EVERY_ID)), error)
            return None
        with self._attaching:
            if not self._is_of(epoch):
                return None
            if ids.size:
                self._look_whether_whole(int(ids.min()), int(ids.max()))
        return found

    def _chunks_of(self, ids: NDArray[np.int64]) -> list[tuple[int, int]]:
        """The chunks, (column, chunk) each, that hold ids; those of the first ids first."""
        by_rows = {rows: chunks_with(ids, rows) for rows in {c.layout.chunk_rows for c in self.columns}}
        pairs = [
            (chunk * column.layout.chunk_rows, number, chunk)
            for number, column in enumerate(self.columns)
            for chunk in by_rows[column.layout.chunk_rows]
        ]
        return [(number, chunk) for _, number, chunk in sorted(pairs)]

    def _check_was_evicted(self, first_id: int, error: FileNotFoundError | ClosedError) -> None:
        """Raises when a chunk that must be there isn't."""
        if isinstance(error, ClosedError):
            raise error
        if first_id < self._bounds()[0]:
            return
        place = error.filename or str(error)
        raise StoreCorruptError(
            f"chunk file {place} must be there, because its ids are in the window, but is missing. "
            f"{self._advice_for_chunks}",
            path=str(place),
        ) from error

    _advice_for_chunks = "Restore that file, or run diskbuf.repair."

    def _look_whether_whole(self, low: int, high: int) -> None:
        """Notes which ids are attached all: their rows are then read without a look at each chunk.

        Args:
            low: Lowest id that was just read.
            high: Highest.
        """
        residents = self._residents
        if residents is None:
            return
        detached, window = residents.detached, self._bounds()
        columns = [column for column in self.columns if column.layout.row_bytes]
        # Of chunks that are being written the rows behind the window are attached with it.
        end = EVERY_ID if self._has_raw_files and self._words is not None else window[1]
        if residents.has_all(window):
            last = max(window[1] - 1, 0)
            low, high = window[0], last
        elif any(
            low // column.layout.chunk_rows != high // column.layout.chunk_rows for column in columns
        ) or not residents.has_all((low, high + 1)):  # what one column's needed room for may be gone again
            self._whole = None
            self.cold_reads.asks = True
            return
        else:
            low = max((low // column.layout.chunk_rows * column.layout.chunk_rows for column in columns), default=0)
        chunk_ends = ((high // column.layout.chunk_rows + 1) * column.layout.chunk_rows for column in columns)
        self._whole = (low, min(end, *chunk_ends, EVERY_ID), detached)
        self.cold_reads.asks = False

    def read_range(self, first_id: int, next_id: int) -> list[NDArray[Any]] | None:
        """Copies all lanes of consecutive ids, less those at the beginning that the writer overwrites meanwhile.

        Args:
            first_id: First id, inside the window.
            next_id: Where to stop, exclusive.

        Returns:
            For each column [lanes, T, *shape], freshly allocated; None when none of the ids was left.
        """
        return self.read_columns(range(len(self.columns)), first_id, next_id)

    def mapped_view(self) -> MappedView | None:
        """Returns what it takes to gather rows without asking Python each time, None where that can't be.

        It can't where a column isn't one array, where chunks are checked as they are read, where this processor may see
        what somebody writes in another order, without a header, or where its words, out of date, say another window.
        """
        self.window()
        header = self._header
        epoch = self._epoch
        columns = [(column.flat, column.layout) for column in self.columns]
        if self._verifies or any(flat is None and layout.row_bytes for flat, layout in columns):
            return None
        if self._residents is not None:
            return None
        if header is None or not STORES_IN_ORDER or not (self._words is not None or self._says_the_same(header)):
            return None
        return MappedView(
            columns=[
                MappedRows(flat=flat, layout=layout, ring_rows=layout.ring_rows, first_row=-column.offset(0))
                for (flat, layout), column in zip(columns, self.columns, strict=True)
            ],
            words=header.map_words(),
            limits=self._shared_limits,
            epoch=epoch,
            view=self._view,
            max_length=self._length,
            lowest=self._lowest,
            keeps=self._keeps,
            lanes=self.manifest.batch_size,
            runs=self.runs,
        )

    def _says_the_same(self, header: LiveHeader) -> bool:
        """Whether live words that don't count say the window that does; a writer that begins moves them from there."""
        floor = header.words[FLOOR] if self._lowest is None else self._lowest
        return (max(floor, header.words[NEXT] - self._length), header.words[NEXT]) == self._static

    def ask_for(self, first_id: int, rows: NDArray[np.int64]) -> None:
        """Asks the kernel to read rows that will be gathered soon, all at once and without waiting for them.

        Args:
            first_id: The id that `rows` counts from.
            rows: [*K] flat rows ``(id - first_id) * lanes + lane``, inside the window.
        """
        residents = self._residents  # another thread may look at everything anew
        if residents is not None:
            ids = first_id + rows // self.manifest.batch_size
            residents.ask(self._chunks_of(ids), is_passing_by=self._is_passing_by)
            return
        for column in self.columns:
            if self.cold_reads.is_crowded:
                column.expect_random_reads()
            column.ask_for(rows + column.offset(first_id))

    def ask_for_range(self, first_id: int, next_id: int) -> None:
        """As `ask_for`, for all lanes of consecutive ids, where chunks are fetched; other stores do nothing."""
        residents = self._residents
        if residents is not None and first_id < next_id:
            residents.ask(
                [
                    (number, chunk)
                    for number, column in enumerate(self.columns)
                    for chunk in column.layout.chunks(first_id, next_id)
                ]
            )

    def _verify(self, ids: NDArray[np.int64], columns: Sequence[Column] | None = None) -> None:
        """Checks the chunks that hold ids, of all columns or of chosen ones, each the first time only.

        Raises:
            StoreCorruptError: When a chunk's bytes are not what they were.
            FileNotFoundError: When a chunk has no file.
        """
        for column in self.columns if columns is None else columns:
            layout = column.layout
            for chunk in np.unique(ids // layout.chunk_rows).tolist():
                expected = self._unverified.get((layout.file_path, chunk))
                if expected is None:
                    continue  # checked before, or not sealed when the store was opened
                path = column.chunk_path(chunk)
                problem = rot_in(path, layout, chunk, expected)
                if problem is not None:
                    raise StoreCorruptError(
                        f"chunk file {path} of leaf {layout.path!r} {problem}. "
                        "Restore that file, or run diskbuf.repair.",
                        path=str(path),
                    )
                self._unverified.pop((layout.file_path, chunk), None)

    def _read_range(self, number: int, first_id: int, next_id: int) -> NDArray[Any]:
        column, residents = self.columns[number], self._residents
        layout = column.layout
        out = np.empty((layout.lanes, next_id - first_id, *layout.shape), layout.dtype)
        for start, count in _pieces(first_id, next_id, layout.chunk_rows):
            at = start - first_id
            if residents is None or not layout.row_bytes:
                out[:, at : at + count] = column.read_span(start, count).swapaxes(0, 1)
                continue
            with residents.span(number, start, count, is_passing_by=self._is_passing_by) as span:
                out[:, at : at + count] = span.swapaxes(0, 1)
        return out

    @property
    def _is_passing_by(self) -> bool:
        """Whether all of the window would not fit into the cache, so that going through it would only empty that."""
        first_id, next_id = self._bounds()
        return (next_id - first_id) * self.manifest.batch_size * self.lane_bytes > self._read_options.cache_bytes

    def abandon(self) -> None:
        """Goes on without its threads: for the copy of this store in a forked child.

        The parent's threads don't exist there, nor will the lock that one of them held ever be freed.
        """
        self._attaching = threading.RLock()
        if self._residents is not None:
            self._residents.abandon(self._attaching)

    def close(self) -> None:
        """Closes the files; closing twice is fine. Arrays handed out stay valid."""
        self._view += 1
        if self._residents is not None:
            self._residents.close()
        if self._remote is not None:
            self._remote.close()
        header, self._header = self._header, None
        if header is not None:
            header.close()

    def __del__(self) -> None:
        if hasattr(self, "_header"):
            # Closing connections is waiting for their thread, which may be this one, or gone at the end of a program.
            self._remote = None
            self.close()

    def read_columns(self, numbers: Sequence[int], first_id: int, next_id: int) -> list[NDArray[Any]] | None:
        """Copies all lanes of consecutive ids of chosen columns, and touches no other column's files.

        Args:
            numbers: Which columns, by their place in `columns`.
            first_id: First id, inside the window.
            next_id: Where to stop, exclusive.

        Returns:
            For each chosen column [lanes, T, *shape], freshly allocated; without the first ids where the writer
            overwrote those meanwhile, and None when the window has to be read again.

        Raises:
            StoreCorruptError: When a chunk file is missing, short or has rotten.
        """
        epoch = self._epoch
        try:
            if self._unverified:
                self._verify(np.arange(first_id, next_id), [self.columns[number] for number in numbers])
            found = [self._read_range(number, first_id, next_id) for number in numbers]
        except (FileNotFoundError, ClosedError) as error:
            # the chunk was evicted since the window was read, or else it is missing
            if epoch != self._epoch:
                return None
            if self._residents is not None:
                self._check_was_evicted(first_id, error)
            elif first_id >= self._intact_from(epoch):
                raise
            return None
        lost = self._intact_from(epoch) - first_id
        if lost <= 0:
            return found
        return [leaf[:, lost:].copy() for leaf in found] if lost < next_id - first_id else None

    def let_pages_go(self, numbers: Sequence[int], first_id: int, next_id: int) -> None:
        """Takes the pages of rows that a pass is behind out of this process's memory; only a hint.

        Without it a pass through a store that is larger than memory would seem to need all of it.

        Args:
            numbers: Which columns, by their place in `columns`.
            first_id: First id.
            next_id: End, exclusive.
        """
        for number in numbers:
            column = self.columns[number]
            for start, count in _pieces(first_id, next_id, column.layout.chunk_rows):
                column.let_pages_go(start, count)


_open_stores: "weakref.WeakSet[Store]" = weakref.WeakSet()


def _abandon_in_child() -> None:
    with contextlib.suppress(RuntimeError):
        for store in list(_open_stores):
            store.abandon()


os.register_at_fork(after_in_child=_abandon_in_child)


def _nothing() -> None:
    pass


def _open_sealed(
    source: ChunkSource, group: int, number: int, chunk: int, *, rows_in: Callable[[int, int], int]
) -> OpenedChunk:
    return source.open(group, chunk, rows=rows_in(number, chunk), columns=[number])[number]


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a method without keeping its object alive: a forgotten store closes at once."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = reference()
        if found is None:
            raise ReferenceError("the store is gone")
        return found(*arguments)

    return call


def _pieces(first_id: int, next_id: int, chunk_rows: int) -> Iterator[tuple[int, int]]:
    """Cuts [first_id, next_id) at chunk ends; yields (start, count)."""
    while first_id < next_id:
        stop = min(next_id, (first_id // chunk_rows + 1) * chunk_rows)
        yield first_id, stop - first_id
        first_id = stop


def column_layouts(leaves: Sequence[Leaf], manifest: Manifest, *, path: Path) -> list[ColumnLayout]:
    """Returns the columns that a manifest describes.

    Args:
        leaves: The leaves of the store's spec.
        manifest: Its manifest.
        path: The store's folder, for messages.

    Returns:
        One layout a leaf, in the same order.

    Raises:
        StoreFormatError: When the manifest's columns are not the leaves.
    """
    if set(manifest.chunk_rows) != {leaf.file_path for leaf in leaves}:
        raise StoreFormatError(
            f"columns in the manifest of {path} must be {sorted(leaf.file_path for leaf in leaves)}, "
            f"got {sorted(manifest.chunk_rows)}. Restore its zarr.json.",
            path=str(path),
        )
    ring_length = None if manifest.keep_history else manifest.max_length
    layouts = []
    for leaf in leaves:
        rows = manifest.chunk_rows[leaf.file_path]
        layouts.append(
            ColumnLayout(
                **vars(leaf),
                lanes=manifest.batch_size,
                chunk_rows=rows,
                slots=None if ring_length is None or manifest.is_sealed else ring_slots(ring_length, rows),
                is_sealed=manifest.is_sealed,
            )
        )
    return layouts


def stored_extent(manifest: Manifest, header: LiveHeader | None) -> Extent:
    """Which ids are certain to be whole: the live words on the boot that wrote them, else the durable record.

    To the durable record belongs what the journal has behind it.

    Args:
        manifest: The store's manifest, which counts when there is no header.
        header: Its header, None when the store has none (a copy without it).

    Returns:
        The ids, the manifest's length limit applied.

    Raises:
        StoreCorruptError: When the header holds neither, or impossible ids.
    """
    extent: Extent | None
    if header is None:
        extent = Extent(generation=manifest.generation, floor=manifest.first_id, next_id=manifest.next_id)
    else:
        extent = header.live if header.is_live else header.durable
        if not header.is_live and (journaled := read_journal(header)) is not None:
            extent = journaled.extent
        if extent is None:
            raise StoreCorruptError(
                f"live header {header.path} must hold a whole durable record, but neither copy is one. "
                "Delete that file to go on from the last commit in zarr.json.",
                path=str(header.path),
            )
        if min(extent.floor, extent.next_id) < 0 or (header.is_live and extent.floor > extent.next_id):
            raise StoreCorruptError(
                f"live header {header.path} must hold ids from 0 on, the floor not above the next one, "
                f"got {extent.floor} and {extent.next_id}. "
                "Delete that file to go on from the last commit in zarr.json.",
                path=str(header.path),
            )
        if header.is_live and header.is_broken():
            raise StoreCorruptError(
                f"live header {header.path} must hold the ids that it held when the store was closed, "
                f"got {extent.floor} and {extent.next_id}. Run diskbuf.repair.",
                path=str(header.path),
            )
    next_id = max(extent.next_id, extent.floor)
    floor = extent.floor if manifest.max_length is None else max(extent.floor, next_id - manifest.max_length)
    return Extent(generation=extent.generation, floor=floor, next_id=next_id)
