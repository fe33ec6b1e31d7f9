"""The journal: rows that fsync="always" has brought to the disk, all columns by one sync, ahead of their chunk files.

The durable record says up to which id the chunk files are on the disk, and by a stamp which journal goes on from there.
The journal is a chain of frames, each with the rows of one append, the stamp and a checksum, and each begins where the
one before ends. After a power cut the frames behind the record count as far as the chain is whole. An append waits for
its frame before it returns, so only the last one can be torn, and that one was never acknowledged. A frame begins at a
page of its own: nothing that counts is written again. A record that counts all of it begins the journal anew, under
another stamp. Whoever next opens the store to write puts the rows where they belong, see `settle`; readers lay them
over the columns.
"""

import contextlib
import dataclasses
import json
import mmap
import os
import struct
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from diskbuf.errors import StoreCorruptError
from diskbuf.store import files
from diskbuf.store.header import Extent, LiveHeader
from diskbuf.store.layout import HEADER_FILE, STATE_FOLDER, ColumnLayout, chunk_file_name, page_multiple

JOURNAL_FILE = "journal"
JOURNAL_BYTES = 2**20
"""What frames have room for; every so many bytes the chunk files are synced."""

MOST_FRAME_BYTES = 2**18
"""Rows of more bytes don't go through the journal: from here on, writing them twice costs more than a sync."""

_MAGIC = b"diskbufj"
_HEAD = struct.Struct("<8sqI")  # magic, bytes of JSON, their checksum
_FRAME = struct.Struct("<qqqqqq")  # stamp, first id, count, generation, floor, bytes of rows
_CHECKSUM = struct.Struct("<I")
_ROWS = _FRAME.size + _CHECKSUM.size


@dataclasses.dataclass(frozen=True, kw_only=True)
class JournalColumn:
    """What has to be known of a column to find the place of a row in its chunk files.

    Attributes:
        file_path: The folder of the column's raw chunk files below the store's.
        axes: Axes of one lane's row.
        row_bytes: Bytes of one id, all lanes.
        chunk_rows: Ids in a chunk file.
    """

    file_path: str
    axes: int
    row_bytes: int
    chunk_rows: int

    @classmethod
    def of(cls, layout: ColumnLayout) -> "JournalColumn":
        """What of a layout has to be known."""
        return cls(
            file_path=layout.raw_folder,
            axes=len(layout.shape),
            row_bytes=layout.row_bytes,
            chunk_rows=layout.chunk_rows,
        )

    def chunk_path(self, store: Path, chunk: int) -> Path:
        """The file that holds a chunk."""
        return store / self.file_path / chunk_file_name(chunk, self.axes)


class Journal:
    """The journal as the writer sees it.

    Args:
        folder: The store's folder for shared state.
        layouts: Its columns.

    Attributes:
        stamp: Names this journal in its frames and in the record.
        next_id: End of the last frame that was acknowledged; the next one begins there.
        is_sure: Whether every frame written was acknowledged; one that failed may be on the disk all the same.

    Raises:
        OSError: When the file can't be made; nothing is left of it then.
    """

    def __init__(self, folder: Path, layouts: Sequence[ColumnLayout]) -> None:
        path = folder / JOURNAL_FILE
        head = _pack_head([JournalColumn.of(layout) for layout in layouts])
        self._start = len(head)
        files.replace_file(path, head + bytes(JOURNAL_BYTES), sync=True)  # written, so that a sync is only of data
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.begin(new_stamp(), 0)

    def begin(self, stamp: int, next_id: int) -> None:
        """Goes on with no frames, under another stamp, behind a record that counts ids below `next_id`."""
        self.stamp = stamp
        self.next_id = next_id
        self.is_sure = True
        self._position = self._start

    def has_room(self, row_bytes: int) -> bool:
        """Whether a frame with so many bytes of rows fits."""
        return self._position + _ROWS + row_bytes <= self._start + JOURNAL_BYTES

    def append(self, extent: Extent, first_id: int, rows: Sequence[bytes]) -> None:
        """Writes one frame and syncs it.

        Args:
            extent: What the store holds with these rows.
            first_id: Id of the first of them; the last one is the extent's last.
            rows: For each column its rows' bytes.

        Raises:
            OSError: When it can't be written or synced.
        """
        size = sum(map(len, rows))
        head = _FRAME.pack(self.stamp, first_id, extent.next_id - first_id, extent.generation, extent.floor, size)
        self.is_sure = False
        data = b"".join((head, _CHECKSUM.pack(_crc([head, *rows])), *rows))
        files.write_at(self._descriptor, data, self._position)
        files.sync_descriptor(self._descriptor)
        self._position += page_multiple(len(data))
        self.next_id = extent.next_id
        self.is_sure = True

    def close(self) -> None:
        """Closes the file; closing twice is fine."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self.close()


def new_stamp() -> int:
    """A stamp that no journal had before."""
    return int.from_bytes(os.urandom(7), "little") + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Frame:
    """One frame.

    Attributes:
        extent: What the store held with its rows.
        first_id: Id of the first of them.
        rows: By the path of their column, bytes of their ids in order.
    """

    extent: Extent
    first_id: int
    rows: dict[str, memoryview]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Journaled:
    """The rows that only the journal has for certain.

    Attributes:
        extent: What the store holds with them.
        first_id: Id of the first of them.
        columns: The columns.
        frames: Where they are, ascending; the first frame may begin before them.
    """

    extent: Extent
    first_id: int
    columns: list[JournalColumn]
    frames: list[Frame]

    def rows_of(self, column: JournalColumn) -> bytes:
        """The rows of a column from `first_id` on."""
        rows = b"".join(frame.rows[column.file_path] for frame in self.frames)
        return rows[(self.first_id - self.frames[0].first_id) * column.row_bytes :]


def read_journal(header: LiveHeader) -> Journaled | None:
    """Reads the rows behind the durable record of a store.

    Args:
        header: The store's header.

    Returns:
        What the journal has, None when the record counts all of it.

    Warns:
        RuntimeWarning: When the journal is missing or damaged, so that steps are lost.
    """
    record, stamp = header.durable, header.journal_stamp
    if record is None or not stamp:
        return None
    path = header.path.with_name(JOURNAL_FILE)
    try:
        data = memoryview(path.read_bytes())
        columns, start = _unpack_head(data)
    except (OSError, ValueError, TypeError, struct.error) as error:
        if header.durable == record and header.journal_stamp == stamp:  # no writer has begun meanwhile
            _warn(path, f"can't be read ({error}), so steps from id {record.next_id} on are left out")
        return None
    base = max(record.next_id, record.floor)
    frames = list(_chain(data, start, columns, stamp))
    end = frames[-1].extent.next_id if frames else base
    if any(frame.first_id > end for frame in _every_frame(data, start, columns, stamp)):
        _warn(path, f"is damaged, so steps from id {end} on are left out")
    frames = [frame for frame in frames if frame.extent.next_id > base]
    if not frames or frames[0].first_id > base:
        return None
    last = frames[-1].extent
    extent = Extent(
        generation=max(record.generation, last.generation), floor=max(record.floor, last.floor), next_id=last.next_id
    )
    return Journaled(extent=extent, first_id=base, columns=columns, frames=frames)


def journal_of_store(store: Path) -> Journaled | None:
    """The rows that only the journal of a store has; None while the live words count, or without a whole header."""
    try:
        with contextlib.closing(LiveHeader(store / STATE_FOLDER / HEADER_FILE, writable=False)) as header:
            return None if header.is_live else read_journal(header)
    except (OSError, StoreCorruptError):
        return None


def settle(store: Path) -> None:
    """Brings what only the journal has to the disk where it belongs, and into the durable record.

    A chunk file that is missing or short is left so: the record and the journal then stay as they are.

    Args:
        store: The store's folder, locked.

    Raises:
        OSError: When a file can't be written or synced.
    """
    try:
        header = LiveHeader(store / STATE_FOLDER / HEADER_FILE, writable=True)
    except (OSError, StoreCorruptError):
        return  # whoever opens the store says so
    with contextlib.closing(header):
        found = read_journal(header)
        if found is None:
            return
        next_id = found.extent.next_id
        if header.is_live:  # the rows are in their files, though not for certain on the disk
            next_id = min(next_id, max(header.live.next_id, found.first_id))
        else:
            is_whole = [_write_rows(store, column, found) for column in found.columns]
            if not all(is_whole):
                return
        for column in found.columns:
            for chunk in range(found.first_id // column.chunk_rows, -(-next_id // column.chunk_rows)):
                files.sync_file(column.chunk_path(store, chunk))
        floor = min(found.extent.floor, next_id)
        header.write_durable(dataclasses.replace(found.extent, floor=floor, next_id=next_id), sync=True)


def _write_rows(store: Path, column: JournalColumn, found: Journaled) -> bool:
    """Writes journaled rows to their chunk files as far as these reach; returns whether all are there."""
    rows = memoryview(found.rows_of(column))
    is_whole = True
    for chunk in range(found.first_id // column.chunk_rows, -(-found.extent.next_id // column.chunk_rows)):
        low = max(found.first_id, chunk * column.chunk_rows)
        high = min(found.extent.next_id, (chunk + 1) * column.chunk_rows)
        if high <= found.extent.floor:
            continue
        part = rows[(low - found.first_id) * column.row_bytes : (high - found.first_id) * column.row_bytes]
        offset = (low - chunk * column.chunk_rows) * column.row_bytes
        try:
            descriptor = os.open(column.chunk_path(store, chunk), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, IsADirectoryError):
            is_whole = False
            continue
        try:
            fitting = max(0, os.fstat(descriptor).st_size - offset)
            files.write_at(descriptor, part[:fitting], offset)
            is_whole = is_whole and fitting >= len(part)
        finally:
            os.close(descriptor)
    return is_whole


def _pack_head(columns: Sequence[JournalColumn]) -> bytes:
    text = json.dumps([dataclasses.asdict(column) for column in columns]).encode()
    head = _HEAD.pack(_MAGIC, len(text), zlib.crc32(text)) + text
    return head.ljust(page_multiple(len(head)), b"\0")


def _unpack_head(data: memoryview) -> tuple[list[JournalColumn], int]:
    magic, size, checksum = _HEAD.unpack_from(data)
    text = bytes(data[_HEAD.size : _HEAD.size + size])
    if magic != _MAGIC or zlib.crc32(text) != checksum:
        raise ValueError("it doesn't begin as a journal")
    return [JournalColumn(**column) for column in json.loads(text)], page_multiple(_HEAD.size + size)


def _chain(data: memoryview, start: int, columns: list[JournalColumn], stamp: int) -> Iterator[Frame]:
    """The frames from the first on, up to one that isn't whole or doesn't go on where the one before ends."""
    expected = None
    while (frame := _unpack_frame(data, start, columns, stamp)) and expected in {None, frame.first_id}:
        yield frame
        expected = frame.extent.next_id
        start += page_multiple(_ROWS + sum(map(len, frame.rows.values())))


def _every_frame(data: memoryview, start: int, columns: list[JournalColumn], stamp: int) -> Iterator[Frame]:
    for position in range(start, len(data), mmap.PAGESIZE):
        if frame := _unpack_frame(data, position, columns, stamp):
            yield frame


def _unpack_frame(data: memoryview, position: int, columns: list[JournalColumn], stamp: int) -> Frame | None:
    head, behind = data[position : position + _FRAME.size], position + _ROWS
    if len(data) < behind:
        return None
    found_stamp, first_id, count, generation, floor, size = _FRAME.unpack(head)
    if found_stamp != stamp or count < 1 or size != count * sum(column.row_bytes for column in columns):
        return None
    rows = data[behind : behind + size]
    if len(rows) < size or _CHECKSUM.unpack_from(data, position + _FRAME.size) != (_crc([head, rows]),):
        return None
    parts, at = {}, 0
    for column in columns:
        parts[column.file_path] = rows[at : at + count * column.row_bytes]
        at += count * column.row_bytes
    return Frame(
        extent=Extent(generation=generation, floor=floor, next_id=first_id + count), first_id=first_id, rows=parts
    )


def _crc(parts: Sequence[bytes | memoryview]) -> int:
    found = 0
    for part in parts:
        found = zlib.crc32(part, found)
    return found


def _warn(path: Path, what: str) -> None:
    warnings.warn(f"journal {path} {what}.", RuntimeWarning, stacklevel=6)
