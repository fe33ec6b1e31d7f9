"""A store as its one writer sees it: appending, evicting, syncing. What readers see is one word that moves.

Two orders carry every promise. Space is reserved, rows are written to all columns, and only then `next_id` is
published. And before rows that the durable record counts are destroyed, the record gives them up on the disk.
"""

import atexit
import contextlib
import dataclasses
import errno
import functools
import itertools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from diskbuf.errors import BusyError, OptionError, ReadOnlyError, StoreCorruptError
from diskbuf.options import ReadOptions, StoreOptions
from diskbuf.store import files
from diskbuf.store.checksums import CHECKSUM_FILE, Checksum, ChecksumTable, checksum_of
from diskbuf.store.chunk_format import ChunkFormat
from diskbuf.store.chunk_source import close_all
from diskbuf.store.column_writer import ColumnWriter
from diskbuf.store.columns import Column, Tail
from diskbuf.store.header import EPOCH, FLOOR, GENERATION, NEXT, STORES_IN_ORDER, Extent, LiveHeader
from diskbuf.store.journal import JOURNAL_FILE, MOST_FRAME_BYTES, Journal, new_stamp, settle
from diskbuf.store.keeper import COMMIT_SECONDS, Keeper
from diskbuf.store.layout import HEADER_FILE, LOCK_FILE, STATE_FOLDER, ColumnLayout, Leaf
from diskbuf.store.lock import WriterLock
from diskbuf.store.manifest import Manifest, ZarrMetadata, read_manifest
from diskbuf.store.objects import Objects
from diskbuf.store.quarantine import move_to_quarantine, quarantine_of, quarantined_bytes
from diskbuf.store.reading import EVERY_ID, Store, column_layouts, stored_extent
from diskbuf.store.sealing import SealedFiles, Sealer

if TYPE_CHECKING:
    from diskbuf.store.publishing import Publisher

_MOST_PACKED_BYTES = 2**13
_MOST_LOST_BYTES = 2**30  # what a quarantine may grow to by power cuts
_BACKGROUND_CHECKSUM_BYTES = 2**26  # at each background sync: a fortieth of a second

_tobytes = ndarray.tobytes


def lock_store(path: Path, *, is_taken: bool = True) -> WriterLock:
    """Takes the writer's lock of a store, making its folder when there is none, and settles its journal.

    Args:
        path: The store's folder.
        is_taken: Whether the lock is taken at all; if not, the caller makes sure that one process writes.

    Returns:
        The lock, held until closed.

    Raises:
        StoreLockedError: When another process, or this one, has it.
        StoreLockUnsupportedError: When the file system doesn't lock files.
        OSError: When the folder or the lock file can't be made, or what the journal has can't be written.
    """
    folder = path / STATE_FOLDER
    files.make_folders(folder, sync=True)
    lock = WriterLock(path / STATE_FOLDER / LOCK_FILE, store=str(path), is_taken=is_taken)
    try:
        settle(path)
    except BaseException:
        lock.close()
        raise
    return lock


def create_store(path: Path, leaves: Sequence[Leaf], manifest: Manifest, *, sync: bool) -> None:
    """Makes an empty store in a locked folder that holds none; a crash on the way leaves nothing that opens.

    Args:
        path: The store's folder.
        leaves: The leaves of its spec.
        manifest: What the store is.
        sync: Whether it is on the disk when this returns.

    Raises:
        OSError: When a file can't be made.
    """
    extent = Extent(generation=manifest.generation, floor=manifest.first_id, next_id=manifest.next_id)
    LiveHeader.create(path / STATE_FOLDER / HEADER_FILE, extent, sync=sync)
    layouts = column_layouts(leaves, manifest, path=path)
    chunk_format = manifest.chunk_format(layouts)
    metadata = ZarrMetadata(path, chunk_format.documents())
    metadata.create(sync=sync)
    for layout in layouts:
        files.make_folders(path / layout.raw_folder, sync=sync)
    for folder in SealedFiles(path, chunk_format).folders:
        files.make_folders(path / folder, sync=sync)
    if sync:  # all names before the manifest's, with which it is a store that others go on with
        files.sync_folder(path)
        files.sync_folder(path.parent)
    metadata.commit(manifest, sync=sync, with_copy=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trim:
    """What leaves a store when it is opened for writing.

    Attributes:
        first_id: The window begins there at the earliest.
        drops_history: Whether what isn't in the window leaves the disk too, where the store keeps history.
    """

    first_id: int = 0
    drops_history: bool = False


class WritableStore(Store):
    """A store open for reading and writing.

    Args:
        path: The store's folder, which holds a store.
        leaves: The leaves of its spec, in spec order.
        lock: The writer's lock, held; the store closes it.
        options: How it is synced.
        max_length: The longest window from now on, None for no limit.
        metadata: The user's JSON from now on, None for what the store has.
        package_version: Goes into the manifest.
        is_durable: Whether anything is ever synced; False for a store that goes with its buffer.
        reads_history: Whether rows that have left the window count, where the store keeps them.
        is_mapped: Whether chunk files are mapped.
        read_options: How chunks are read that are sealed.
        remote: Where chunks are that are no longer here; None where all are.
        trim: What leaves it before the run begins; None for nothing.

    Raises:
        StoreFormatError: When this version can't read it.
        StoreCorruptError: When one of its files is missing, short or unreadable.
        OSError: When a file can't be written.
    """

    _writable = True

    def __init__(
        self,
        path: Path,
        leaves: Sequence[Leaf],
        *,
        lock: WriterLock,
        options: StoreOptions,
        max_length: int | None,
        metadata: Any = None,
        package_version: str,
        is_durable: bool = True,
        reads_history: bool = False,
        is_mapped: bool = True,
        read_options: ReadOptions | None = None,
        remote: Objects | None = None,
        trim: Trim | None = None,
    ) -> None:
        self._lock_file = lock
        self._trim = trim or Trim()
        self._options = options
        self._max_length = max_length
        self._metadata = metadata
        self._package_version = package_version
        self._is_durable = is_durable
        self._syncs_always = is_durable and options.fsync == "always"
        self._publishes_plainly = not self._syncs_always and STORES_IN_ORDER
        self._appending = _Turn()  # rows, next_id, chunk files
        self._flushing = _Turn()  # one flush or commit at a time
        self._recording = threading.RLock()  # the durable record and the journal
        self._ahead = _NOTHING_AHEAD
        self._is_ours = True
        self._writers: list[ColumnWriter] = []
        self._keeper: Keeper | None = None
        self._failure: Exception | None = None
        self._has_rolled = False
        self._is_complete = False  # set by a close that brought everything to the disk, checksums too
        self._committed_seconds = 0.0
        self._flushed: Extent | None = None
        self._journal: Journal | None = None
        self._is_record_sure = True  # False when its sync failed: the one on the disk is either that or `_durable`
        self._sealed_to: dict[str, int] = {}
        self._sealer: Sealer | None = None
        self._publisher: Publisher | None = None
        self._evict_at = 0  # when the window begins there, a chunk may have left it
        super().__init__(
            path, leaves, reads_history=reads_history, is_mapped=is_mapped, read_options=read_options, remote=remote
        )
        if is_durable:
            _writable_stores.add(self)

    # ---- opening

    def _open_header(self) -> LiveHeader:
        path = self._folder / STATE_FOLDER / HEADER_FILE
        if not path.exists():
            LiveHeader.create(path, stored_extent(read_manifest(self._folder), None), sync=self._is_durable)
        return LiveHeader(path, writable=True)

    def _load(self) -> None:
        """Begins a run. Nothing is changed before every chunk of the window is known to be there."""
        if not self._is_ours:
            super()._load()
            return
        header = self._writers_header
        stored = read_manifest(self._folder)
        extent = stored_extent(stored, header)
        self._warn_of_lost_steps(stored, extent)
        durable = header.durable or extent
        floor = extent.floor if self._max_length is None else max(extent.floor, extent.next_id - self._max_length)
        floor = max(floor, min(self._trim.first_id, extent.next_id))
        if self._trim.drops_history:
            stored = dataclasses.replace(stored, oldest_id=max(stored.oldest_id, floor))
        manifest = dataclasses.replace(
            stored,
            max_length=self._max_length,
            metadata=stored.metadata if self._metadata is None else self._metadata,
            runs=_runs_since(stored.oldest_id if stored.keep_history else floor, (*stored.runs, extent.next_id)),
            package_version=self._package_version,
        )
        self._take(manifest, dataclasses.replace(extent, floor=floor))
        self._layouts = [column.layout for column in self.columns]
        self._make_sealer(extent, floor)
        self._documents = (
            ZarrMetadata.read(self._folder, self._layouts)
            if self._residents is None
            else ZarrMetadata(self._folder, self._residents.source.chunk_format.documents())
        )
        self._checksums = self._load_checksums(extent.next_id)

        header.unseal()
        # The floor of the old length goes first: a longer length must never bring back rows that are gone.
        # And no id counts that the live words don't have: its append failed or never returned, others will come for it.
        self._record(
            Extent(generation=extent.generation, floor=extent.floor, next_id=min(durable.next_id, extent.next_id))
        )
        if header.is_live:
            header.words[FLOOR] = extent.floor
        else:  # before this boot counts as the one that wrote everything
            self._set_lost_chunks_aside(extent.next_id)
        if self._oldest_id(floor) < extent.next_id:
            self._make_tails(extent.next_id)
        self._commit(dataclasses.replace(extent, floor=floor))
        header.begin(dataclasses.replace(extent, floor=floor))
        self._words = self._live = header.words
        self._row_formats = [(leaf.dtype, (manifest.batch_size, *leaf.shape)) for leaf in self._leaves]
        self._epoch = header.words[EPOCH]
        self._attached_to = self._detach_at = EVERY_ID  # chunks are attached as they are begun
        self._writers = [
            ColumnWriter(self, number, unsynced_from=durable.next_id, next_id=extent.next_id)
            for number in range(len(self.columns))
        ]
        self._remove_leftovers(floor, extent.next_id)

    def _make_sealer(self, extent: Extent, floor: int) -> None:
        if self._residents is None:
            return
        for column in self.columns:  # of a closed store they are empty, and a copy may have left them out
            files.make_folders(column.folder, sync=self._is_durable)
        self._sealer = Sealer(
            self._folder,
            self._residents.source.chunk_format,
            first_id=self._oldest_id(floor),
            next_id=extent.next_id,
            sync=self._is_durable,
            may_be_elsewhere=self.manifest.published_to is not None,
        )

    def _load_checksums(self, next_id: int) -> ChecksumTable:
        """Takes the checksums over that are still right; those of rows that were lost must not outlive this."""
        path = self._folder / STATE_FOLDER / CHECKSUM_FILE
        try:
            table = ChecksumTable.load(path)
        except StoreCorruptError as error:
            warnings.warn(f"{error} The checksums are made anew.", RuntimeWarning, stacklevel=6)
            table = ChecksumTable(path)
        table.keep(self._folders, self._oldest_id(self._static[0]), next_id)
        if self._sealer is not None:  # the objects of tails will be replaced by those of more rows
            table.forget_tails(self._folders)
        table.save(sync=self._is_durable)
        return table

    @property
    def _folders(self) -> Mapping[str, int]:
        """The rows of a chunk in each folder that has checksums."""
        if self._sealer is not None:
            return self._sealer.folders
        return {layout.file_path: layout.chunk_rows for layout in self._layouts}

    def _oldest_id(self, first_id: int) -> int:
        """The first id that must be on disk, when the window begins at `first_id`."""
        return self.manifest.oldest_id if self.manifest.keep_history else first_id

    @property
    def _writers_words(self) -> "memoryview[int]":
        return self._writers_header.words

    @property
    def _writers_header(self) -> LiveHeader:
        if self._header is None:
            raise ReadOnlyError(f"store {self.path} must be open to be written to. Open it again.")
        return self._header

    def _remove_leftovers(self, floor: int, next_id: int) -> None:
        """Removes chunk files outside the window and half-made metadata, which a killed writer may leave.

        Those behind it never held a row that counted: they were begun ahead, or `_set_lost_chunks_aside` has been here.
        """
        lowest = self._oldest_id(floor)
        for column in self.columns:
            kept = column.layout.chunks(lowest, next_id)
            with os.scandir(column.folder) as entries:
                names = [entry.name for entry in entries]
            for name in names:
                chunk = column.layout.chunk_of_name(name)
                if chunk is not None and chunk not in kept:
                    (column.folder / name).unlink()
        if self._sealer is not None:
            for path in self._sealer.objects_outside(lowest, next_id):
                path.unlink(missing_ok=True)
            self._sealer.remove_partly_raw(next_id)
            self._sealer.remove_temporaries()
        self._documents.remove_temporaries()
        (self._folder / STATE_FOLDER / JOURNAL_FILE).unlink(missing_ok=True)
        for name in (HEADER_FILE, CHECKSUM_FILE, JOURNAL_FILE):
            files.temporary_of(self._folder / STATE_FOLDER / name).unlink(missing_ok=True)

    def _make_tails(self, next_id: int) -> None:
        """Makes raw files of the chunks that this run goes on in, where they are sealed."""
        if self._sealer is None or self._residents is None:
            return
        for group, columns, chunk in self._sealer.tails_missing(next_id):
            rows = next_id % self._sealer.rows_of(group)
            opened = self._residents.source.open(group, chunk, rows=rows, columns=columns)
            try:
                for number, found in opened.items():
                    self._sealer.put_raw(number, chunk, found.descriptor, found.offset)
            finally:
                close_all(opened)

    def _set_lost_chunks_aside(self, next_id: int) -> None:
        """Moves chunk files that lie wholly behind the certain ids to the quarantine, after another start or a copy.

        Their steps may have been there for every process, but nothing tells which of them are whole. Files of zeros
        only were begun ahead; they are left to be removed, as are those for which the quarantine has no room.
        """
        room = _MOST_LOST_BYTES - quarantined_bytes(self._folder)
        moved, left = 0, 0
        paths = [] if self._sealer is None else list(self._sealer.objects_outside(0, next_id))
        for column in self.columns:
            layout = column.layout
            with os.scandir(column.folder) as entries:
                chunks = sorted({chunk for entry in entries if (chunk := layout.chunk_of_name(entry.name)) is not None})
            lost = [chunk for chunk in chunks if chunk * layout.chunk_rows >= next_id]
            paths += [path for path in map(column.chunk_path, lost) if files.has_data(path)]
        for path in paths:
            room -= 512 * path.stat().st_blocks
            if room < 0:
                left += 1
                continue
            target = move_to_quarantine(self._folder, path)
            moved += 1
            if self._is_durable:
                files.sync_folder(target.parent)
                files.sync_folder(path.parent)
        if moved or left:
            removed = f" {left} more were removed: that folder has no room for them." if left else ""
            warnings.warn(
                f"{self.path}: only steps below id {next_id} are certain to be whole. {moved} chunk files of steps "
                f"behind them were moved to {quarantine_of(self._folder)}.{removed}",
                RuntimeWarning,
                stacklevel=6,
            )

    # ---- appending

    def append(self, rows: Sequence[Any]) -> bool:
        """Appends one id.

        Args:
            rows: For each column an array, [lanes, *shape] if it is to be taken.

        Returns:
            Whether all have exactly their column's dtype and shape; if not, nothing was appended.

        Raises:
            OSError: When the disk is full, or an earlier background sync failed; nothing was appended.
        """
        turn = self._appending
        with turn.lock:
            if turn.is_taken:
                raise self._busy()
            for leaf, (dtype, shape) in zip(rows, self._row_formats):  # noqa: B905 - strict= costs a tenth of an add
                if (
                    type(leaf) is not ndarray
                    or (leaf.dtype is not dtype and leaf.dtype != dtype)
                    or leaf.shape != shape
                ):
                    return False
            words = self._live
            turn.is_taken = True
            try:
                next_id = words[NEXT]
                start, ready, tails, _ = self._ahead
                if next_id >= ready:
                    start, ready, tails, _ = self._prepare(next_id)
                row = next_id - start
                for (tail, is_packed), leaf in zip(tails, rows):  # noqa: B905 - as above
                    tail[row] = _tobytes(leaf) if is_packed else leaf
                if self._publishes_plainly:
                    words[NEXT] = next_id + 1
                else:
                    self._publish(next_id, 1, rows)
            except ValueError:  # of words that were let go of
                self._check_is_ours()
                raise
            finally:
                turn.is_taken = False
            return True

    def extend(self, rows: Sequence[NDArray[Any]], count: int) -> None:
        """Appends `count` ids; readers see them all at once, unless a full ring is being overwritten.

        Args:
            rows: For each column [lanes, count, *shape], of the column's dtype and shape.
            count: How many ids.

        Raises:
            OSError: As `append`; nothing was appended, unless a full ring was being overwritten: then the first of
                the ids may be there, whole.
        """
        with self._alone(self._appending):
            first_id = self._writers_words[NEXT]
            try:
                self._write_ahead(rows, first_id, count)
                self._publish(first_id, count, [leaf.swapaxes(0, 1) for leaf in rows])
            except BaseException:
                self._ahead = _NOTHING_AHEAD  # the tails may have moved past what is published
                raise

    def _busy(self) -> BusyError:
        return BusyError(
            f"store {self.path} must not be added to, cleared, flushed or closed by a signal handler that interrupts "
            "one of these. Set a flag in the handler, and do it afterwards."
        )

    @contextlib.contextmanager
    def _alone(self, turn: "_Turn") -> Iterator[None]:
        """Takes a turn, and refuses a signal handler that comes back in."""
        with turn.lock:
            if turn.is_taken:
                raise self._busy()
            turn.is_taken = True
            try:
                yield
            finally:
                turn.is_taken = False

    def _write_ahead(self, rows: Sequence[NDArray[Any]], first_id: int, count: int) -> None:
        done = 0
        while done < count:
            start, ready, _, spans = self._ahead
            if first_id + done >= ready:
                start, ready, _, spans = self._prepare(first_id + done)
            row = first_id + done - start
            size = min(count - done, ready - first_id - done)
            for tail, leaf in zip(spans, rows, strict=True):
                tail[row : row + size] = leaf[:, done : done + size].swapaxes(0, 1)
            done += size

    def _publish(self, first_id: int, count: int, rows: Sequence[NDArray[Any]]) -> None:
        """Makes rows be there; with fsync="always" they are on the disk before."""
        try:
            if self._syncs_always:
                self._secure(first_id, count, rows)
            self._set_next(first_id + count)
        except BaseException:
            self._ahead = _NOTHING_AHEAD  # the next append looks first at what the record may count
            raise

    def _secure(self, first_id: int, count: int, rows: Sequence[NDArray[Any]]) -> None:
        """Brings rows to the disk: all of them by one sync of the journal, or else their files and then the record.

        The journal has none of a chunk file whose name isn't on the disk, so whoever finds its rows finds their place.
        """
        size = count * sum(column.layout.row_bytes for column in self.columns)
        is_journaled = size <= MOST_FRAME_BYTES
        has_new_names = any(writer.has_new_names for writer in self._writers)
        if is_journaled and not has_new_names and self._journal is not None:
            with self._recording:
                journal = self._journal
                goes_on = first_id == journal.next_id and self._is_record_sure
                if goes_on and journal.has_room(size):
                    journal.append(self._extent(first_id + count), first_id, [leaf.tobytes() for leaf in rows])
                    return
        self._sync_chunks([writer.take_unsynced() for writer in self._writers])
        with self._recording:
            if is_journaled and self._journal is None:
                with contextlib.suppress(OSError):  # no room for it: this append does without
                    self._journal = Journal(self._folder / STATE_FOLDER, self._layouts)
            self._record(self._extent(first_id + count))

    def _set_next(self, next_id: int) -> None:
        self._fence()
        self._writers_words[NEXT] = next_id

    def _prepare(self, next_id: int) -> "_Ahead":
        """Makes ids from `next_id` on writable: chunks rolled, space reserved."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise OSError(
                getattr(failure, "errno", None) or errno.EIO,
                f"the background sync of {self.path} failed: {getattr(failure, 'strerror', None) or failure}. "
                "Nothing was added; try again.",
            ) from failure
        self._check_is_ours()
        if not self._is_record_sure or self._durable.next_id > next_id:  # it may count the rows that are now written
            with self._recording:
                self._record(dataclasses.replace(self._durable, next_id=min(next_id, self._durable.next_id)))
        self._pending = next_id
        ready = min(writer.make_ready(next_id) for writer in self._writers)
        spans = [writer.tail(next_id, ready - next_id) for writer in self._writers]
        tails = [_row_tail(span, column.layout) for span, column in zip(spans, self.columns, strict=True)]
        self._ahead = _Ahead(next_id, ready, tails, spans)
        if self._keeper is None:
            seconds = self._options.fsync_seconds if self._options.fsync == "interval" and self._is_durable else None
            self._keeper = Keeper(self, sync_seconds=seconds)
        if next_id in {writer.chunk_start for writer in self._writers}:
            self._has_rolled = True
            self._keeper.wake()
            self._let_go_of_history()
        return self._ahead

    def _let_go_of_history(self) -> None:
        """Unmaps chunks that have left the window, so that mappings don't grow with the history on disk."""
        if self._residents is not None:
            self._residents.let_go_below(self._bounds()[0])
        elif self._lowest is None and self.manifest.keep_history:
            with self._attaching:
                first_id = self._bounds_of_window()[0]
                self._detached_to = max(self._detached_to, first_id)  # before any row goes, as in _attach
                for column in self.columns:
                    kept_from = first_id // column.layout.chunk_rows
                    for chunk in list(itertools.takewhile(kept_from.__gt__, column.attached)):
                        column.detach(chunk)

    def before_overwrite(self, below: int) -> None:
        """Called before rows below an id are destroyed: no reader and no power cut may count on them any more."""
        if self._pending > self._writers_words[NEXT]:
            self._set_next(self._pending)  # a long extend: readers must see how far it has come before it laps them
        with self._recording:
            is_counted = below > self._durable.floor and self._durable.floor < self._secured
            if is_counted or not self._is_record_sure:
                self._give_up(self._bounds_of_window()[0])

    def _give_up(self, first_id: int) -> None:
        """Takes ids below `first_id` out of the durable record, and of what the journal has behind it."""
        floor = min(first_id, self._secured)
        next_id = max(self._durable.next_id, floor)
        self._record(Extent(generation=self._writers_words[GENERATION], floor=floor, next_id=next_id))

    def _bounds_of_window(self) -> tuple[int, int]:
        next_id = self._writers_words[NEXT]
        length = self.manifest.max_length
        return (
            self._writers_words[FLOOR] if length is None else max(self._writers_words[FLOOR], next_id - length)
        ), next_id

    def _check_is_ours(self) -> None:
        if not self._is_ours:
            raise ReadOnlyError(
                f"store {self.path} must be written to by the process that opened it, and before it is closed. "
                "Open it in this process."
            )

    def clear(self) -> None:
        """Empties the window. Ids go on; rows stay on disk where the store keeps history.

        Raises:
            ReadOnlyError: In a forked child, or when closed.
        """
        self._check_is_ours()
        with self._alone(self._appending):
            words = self._writers_words
            next_id = words[NEXT]
            words[FLOOR] = next_id
            words[GENERATION] += 1
            if self.manifest.max_length is None and not self.manifest.keep_history:
                self._pending = next_id
                self.before_overwrite(next_id)
                self._remove_below(next_id)

    def _remove_below(self, first_id: int) -> None:
        """Removes chunks that lie wholly below an id, which the durable record has given up."""
        for writer in self._writers:
            writer.remove_below(first_id)
        if self._residents is not None:
            self._residents.let_go_below(first_id)
        if self._sealer is not None:
            self._sealer.remove_below(first_id)

    # ---- sealing

    def enter_chunk(self, number: int, chunk: int) -> None:
        """Attaches a chunk that a column's writer writes to from now on; nobody else lets go of it until it is left."""
        with self._attaching:
            column = self.columns[number]
            if column.attached.get(column.slot(chunk)) != chunk:
                self.attach_chunk(number, chunk)
            if self._residents is not None:
                self._residents.give_up(number, chunk)

    def leave_chunk(self, number: int, chunk: int) -> None:
        """Called when a column's writer has gone on to the next chunk."""
        if self._residents is not None and chunk >= 0:
            self._residents.adopt(number, chunk)

    def _seal_next(self) -> bool:
        """Seals one chunk, if there is a full one that is certain to be on the disk; returns whether there was one."""
        sealer = self._sealer
        waiting = None if sealer is None else sealer.waiting(self._writers_words[NEXT])
        if sealer is None or waiting is None:
            return False
        group, chunk = waiting
        rows = sealer.rows_of(group)
        if self._durable.next_id < (chunk + 1) * rows:  # or a power cut would leave an object of rows that don't count
            self._flush_rows()
        self._seal_chunk(sealer, group, chunk, rows)
        return True

    def _seal_chunk(self, sealer: Sealer, group: int, chunk: int, rows: int) -> None:
        checksum = sealer.seal(group, chunk, rows)
        if checksum is not None:
            self._checksums.set(sealer.folder_of(group), chunk, checksum)
            sealer.remove_raw(group, chunk, functools.partial(self._keep_raw, group, chunk))

    def _keep_raw(self, group: int, chunk: int, number: int, path: Path) -> bool:
        """Keeps the raw rows of a chunk that is now sealed, where they are likely to be read soon."""
        residents = self._residents
        if residents is None or not residents.was_asked:
            if residents is not None:
                residents.let_go(number, chunk)
            return False
        with contextlib.suppress(OptionError, OSError):  # without a cache it is decoded when it is read
            return residents.keep_raw(group, number, chunk, path)
        return False

    def _seal_all(self) -> None:
        """Seals everything, also chunks that are not full, for a store that is being closed."""
        sealer = self._sealer
        if sealer is None:
            return
        while self._seal_next():
            pass
        next_id = self._writers_words[NEXT]
        first_id = self._bounds_of_window()[0]
        for group in range(len(sealer.folders)):
            chunk, rows = divmod(next_id, sealer.rows_of(group))
            if rows and first_id < next_id:
                self._seal_chunk(sealer, group, chunk, rows)
        self._commit(self._extent(next_id))

    def _evict(self) -> None:
        """Removes sealed chunks that have left the window, but for the newest of them."""
        sealer = self._sealer
        if sealer is None or self.manifest.keep_history or self.manifest.max_length is None:
            return
        first_id, _ = self._bounds_of_window()
        with self._recording:
            if self._durable.floor < min(first_id, self._secured):
                self._give_up(first_id)
            given_up = self._durable.floor
        if given_up >= self._evict_at:
            self._evict_at = given_up + min(sealer.folders.values())
            self._remove_below(given_up)

    # ---- publishing

    def publish_with(self, publisher: "Publisher") -> None:
        """Publishes from now on; raises as `Publisher.begin`."""
        publisher.begin(self)
        self._publisher = publisher

    def publish(self) -> None:
        """Publishes what was added so far; raises as `Publisher.publish`.

        Raises:
            OptionError: When nothing says where to.
        """
        self._check_is_ours()
        if self._publisher is None:
            raise OptionError(f"publish_to must say where, got none. Open {self.path} again with publish_to.")
        self._publisher.publish()

    def make_certain(self) -> Manifest:
        """Flushes, seals what is full, and returns what the store is and certainly holds."""
        self._check_is_ours()
        with self._alone(self._flushing):
            self._flush_rows()
            extent = self._flushed or self._durable
            manifest = dataclasses.replace(  # the store's own may have been committed since, ahead of the disk
                self.manifest,
                first_id=min(extent.floor, extent.next_id),
                next_id=extent.next_id,
                generation=extent.generation,
            )
        while self._sealer is not None and self._sealer.waiting(manifest.next_id) is not None:
            with self._alone(self._flushing):
                self._seal_next()
        if self._sealer is not None:
            with self._alone(self._flushing):
                self._take_checksums(most_bytes=None, with_tail=False)
        return manifest

    @property
    def leaves(self) -> Sequence[Leaf]:
        """The leaves of its spec, in spec order."""
        return self._leaves

    @property
    def chunk_format(self) -> ChunkFormat:
        """How chunks are stored."""
        if self._residents is not None:
            return self._residents.source.chunk_format
        return self.manifest.chunk_format(self._layouts)

    def sealed_checksum(self, folder: str, chunk: int) -> Checksum | None:
        """The checksum of a sealed chunk's object, None when there is none."""
        return None if self._sealer is None else self._checksums.entries.get((folder, chunk))

    def object_chunks(self, group: int) -> set[int]:
        """The chunks of a group that have an object here."""
        return set() if self._sealer is None else self._sealer.object_chunks(group)

    def lets_go_below(self) -> int:
        """The chunks that lie wholly below this id may be gone or overwritten at any time."""
        return self._oldest_id(self._bounds_of_window()[0])

    # ---- syncing

    def flush(self) -> None:
        """Brings everything appended so far to the disk, then the metadata, then the durable record.

        Raises:
            OSError: When something can't be written or synced; what was durable before still is.
            ReadOnlyError: In a forked child, or when closed.
        """
        self._check_is_ours()
        with self._alone(self._flushing):
            self._flush_rows()
            self._take_checksums(most_bytes=None, with_tail=False)

    def _flush_rows(self) -> None:
        with self._alone(self._appending):
            extent = self._extent(self._writers_words[NEXT])
            is_journal_sure = self._journal is None or self._journal.is_sure
            if extent == self._flushed and self._is_record_sure and is_journal_sure:
                return
            unsynced = [writer.take_unsynced() for writer in self._writers]
        self._sync_chunks(unsynced)
        try:
            self._commit(extent)
        finally:  # the record needs no room: a full disk can't keep it back
            with self._recording:  # an append with fsync="always" may have recorded more meanwhile
                self._record(self._extent(max(extent.next_id, self._durable.next_id)))
        self._flushed = extent

    def _take_checksums(self, *, most_bytes: int | None, with_tail: bool) -> None:
        """Takes the checksums of chunks that were sealed since, all or about as many bytes of them as asked."""
        if self._sealer is not None:  # each object's was taken when it was written
            self._checksums.keep(self._folders, self._oldest_id(self._bounds_of_window()[0]), self._writers_words[NEXT])
            self._checksums.save(sync=True)
            return
        first_id, next_id = self._bounds_of_window()
        oldest_id = self._oldest_id(first_id)
        left = EVERY_ID if most_bytes is None else most_bytes
        for column in self.columns:
            layout = column.layout
            for chunk in layout.chunks(max(oldest_id, self._sealed_to.get(layout.file_path, 0)), next_id):
                rows = min(layout.chunk_rows, next_id - chunk * layout.chunk_rows)
                is_sealed = rows == layout.chunk_rows
                if left <= 0 or not (is_sealed or with_tail):
                    break
                known = self._checksums.entries.get((layout.file_path, chunk))
                if known is None or known.rows < rows:
                    left -= rows * layout.row_bytes
                    self._take_checksum(column, chunk, rows)
                if is_sealed:
                    self._sealed_to[layout.file_path] = (chunk + 1) * layout.chunk_rows
        self._checksums.keep(self._folders, oldest_id, next_id)
        self._checksums.save(sync=True)

    def _take_checksum(self, column: Column, chunk: int, rows: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
            checksum = checksum_of(column.chunk_path(chunk), column.layout, chunk, rows=rows)
            if column.attached.get(column.slot(chunk), chunk) == chunk:  # or it was recycled under the reading
                self._checksums.set(column.layout.file_path, chunk, checksum)

    def _extent(self, next_id: int) -> Extent:
        """What may be recorded when ids up to `next_id` are on disk: by now some of them may be overwritten."""
        return Extent(generation=self._writers_words[GENERATION], floor=self._bounds_of_window()[0], next_id=next_id)

    def _sync_chunks(self, unsynced: list[tuple[set[int], bool]]) -> None:
        try:
            for column, (chunks, has_new_names) in zip(self.columns, unsynced, strict=True):
                for chunk in sorted(chunks):
                    files.sync_file(column.chunk_path(chunk))
                if has_new_names:
                    files.sync_folder(column.folder)
        except BaseException:
            for writer, (chunks, _) in zip(self._writers, unsynced, strict=True):
                writer.give_back(chunks)
            raise

    def _commit(self, extent: Extent) -> None:
        """Brings the zarr metadata and the manifest up to date."""
        floor = min(extent.floor, extent.next_id)
        self.manifest = dataclasses.replace(
            self.manifest, first_id=floor, next_id=extent.next_id, generation=extent.generation
        )
        length = extent.next_id if self._sealer is None else self._sealer.sealed_to(extent.next_id)
        self._documents.commit(self.manifest, sync=self._is_durable, length=length)
        self._committed_seconds = time.monotonic()
        self._has_rolled = False

    @property
    def _secured(self) -> int:
        """Ids below it are on the disk: the record counts them, or the journal has them."""
        return self._durable.next_id if self._journal is None else max(self._durable.next_id, self._journal.next_id)

    def _record(self, extent: Extent) -> None:
        """Writes the durable record. The journal goes on from it, or begins anew when the record counts all it has."""
        if extent.floor > extent.next_id:  # it would say that ids up to the floor are on the disk: history is read
            extent = dataclasses.replace(extent, floor=extent.next_id)
        journal = self._journal
        begins_anew = journal is not None and extent.next_id >= self._secured
        stamp = 0 if journal is None else new_stamp() if begins_anew else journal.stamp
        try:
            self._writers_header.write_durable(extent, sync=self._is_durable, journal_stamp=stamp)
        except BaseException:
            self._is_record_sure = False
            raise
        self._is_record_sure = True
        self._durable = extent
        if journal is not None and begins_anew:
            journal.begin(stamp, extent.next_id)

    def _remove_journal(self) -> None:
        """Removes the journal of a store that was flushed; an older version would not know of it."""
        with self._recording:
            journal, self._journal = self._journal, None
            if journal is not None:
                journal.close()
                self._record(self._durable)
                (self._folder / STATE_FOLDER / JOURNAL_FILE).unlink()

    def tend(self, *, is_sync_due: bool) -> None:
        """Does what waits in the background; what fails is raised by the next append.

        Args:
            is_sync_due: Whether everything is to be synced.
        """
        try:
            if is_sync_due:
                with self._alone(self._flushing):
                    self._flush_rows()
                    self._take_checksums(most_bytes=_BACKGROUND_CHECKSUM_BYTES, with_tail=False)
                    self._evict()
                if self._keeper is not None:
                    self._keeper.wake()
                return
            self._declare()
            if self._sealer is not None:
                with self._alone(self._flushing):
                    self._evict()
                    if self._seal_next() and self._keeper is not None:
                        self._keeper.wake()
            if self._has_rolled and time.monotonic() - self._committed_seconds >= COMMIT_SECONDS:
                with self._alone(self._flushing):
                    self._commit(self._extent(self._writers_words[NEXT]))
        except Exception as error:  # noqa: BLE001 - a thread has nobody else to tell
            with self._alone(self._appending):
                self._failure = error
                self._ahead = _NOTHING_AHEAD  # so that the next append looks

    def _declare(self) -> None:
        """Gives evicted rows up ahead of their being overwritten, so that the writer needn't wait for that."""
        if any(column.layout.slots is not None for column in self.columns):
            first_id, _ = self._bounds_of_window()
            with self._recording:
                if self._durable.floor < min(first_id, self._secured):
                    self._give_up(first_id)

    # ---- closing

    def close(self) -> None:
        """Flushes and closes; closing twice is fine.

        Raises:
            OSError: When the flush fails; the store is closed all the same, and nothing appended is lost with it.
        """
        if self._header is None:
            return
        try:
            if self._keeper is not None:
                self._keeper.stop()
            if self._is_ours and self._is_durable and self._writers:
                with self._alone(self._flushing):
                    self._flush_rows()
                    self._remove_journal()
                    self._evict()
                    self._seal_all()
                    self._take_checksums(most_bytes=None, with_tail=True)
                    self._is_complete = True
            if self._is_ours and self._publisher is not None:  # while nobody else can write, nor publish
                self._publisher.finish()
        finally:
            if self._is_ours and self._publisher is not None:
                self._publisher.stop()
            self._let_go()

    def _let_go(self) -> None:
        with self._alone(self._appending), contextlib.ExitStack() as stack:  # the lock is freed whatever else fails
            if self._is_ours and self._is_complete and self._header is not None:
                self._header.seal()
            self._is_ours = False
            self._ahead = _NOTHING_AHEAD
            self._journal = None
            stack.callback(self._lock_file.close)
            stack.callback(super().close)
            publisher, self._publisher = self._publisher, None
            if publisher is not None:
                stack.callback(publisher.close)
            for writer in self._writers:
                stack.callback(writer.close)

    def abandon(self) -> None:
        """Becomes a reader that refuses all writing."""
        super().abandon()
        self._is_ours = self._writable = False
        self._ahead = _NOTHING_AHEAD
        self._keeper = None
        self._publisher = None
        self._journal = None
        self._appending, self._flushing, self._recording = _Turn(), _Turn(), threading.RLock()
        self._attached_to = 0  # the parent attaches what it begins, for itself
        for column in self.columns:
            column.writable = False

    def __del__(self) -> None:
        if hasattr(self, "_header"):
            self._remote = None  # so that no connection is closed, as in Store
            if (publisher := getattr(self, "_publisher", None)) is not None:
                publisher.end()
                self._publisher = None
            self._let_go()
        else:
            self._lock_file.close()


class _Turn:
    """Whose turn it is to append, or to flush.

    Re-entrant, so that a signal handler that comes back into a call it interrupts is told rather than hangs.
    """

    __slots__ = ("is_taken", "lock")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.is_taken = False


class _Ahead(NamedTuple):
    """The ids that are ready to be written: where they begin and end, and where the rows of each column go."""

    start: int
    ready: int
    tails: list[tuple[Tail, bool]]
    spans: list[Tail]


_NOTHING_AHEAD = _Ahead(0, 0, [], [])


def _row_tail(span: Tail, layout: ColumnLayout) -> tuple[Tail, bool]:
    """Where single rows go, and whether they go as bytes.

    To numpy a row as one void element is half the work of a row as an array, as long as it is small.
    """
    if not isinstance(span, np.ndarray) or layout.row_bytes > _MOST_PACKED_BYTES:
        return span, False
    void = np.dtype((np.void, layout.row_bytes))
    return span.reshape(len(span), -1).view(void).reshape(len(span)), True


def _runs_since(first_id: int, runs: Sequence[int]) -> tuple[int, ...]:
    """The runs that have ids from `first_id` on, ascending; the last of `runs` is the new one."""
    known = sorted({run for run in runs if run <= runs[-1]})
    before = [run for run in known if run <= first_id]
    return tuple(before[-1:] + [run for run in known if run > first_id])


def _flush_at_exit() -> None:
    """Brings what a program that ends without closing has added to the disk."""
    for store in list(_writable_stores):
        with contextlib.suppress(Exception):  # closed, or a forked child's
            store.flush()


_writable_stores: "weakref.WeakSet[WritableStore]" = weakref.WeakSet()
atexit.register(_flush_at_exit)
