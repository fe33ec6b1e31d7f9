"""Columns: the rows of one leaf, read and written through its chunk files. Two executors of one contract.

`MappedColumn` maps the chunk files side by side and reads with one `numpy.take`. `FileColumn` reads and writes them
one call a row, needs no address space, and is the plain one that the other is tested against.
"""

import abc
import collections
import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import StoreCorruptError
from diskbuf.store.layout import ColumnLayout, page_multiple
from diskbuf.store.mapping import Reservation

PWRITE_ROW_BYTES = 4096
"""From this row size on, pwrite fills fresh pages faster: it makes them in large folios, without a fault each."""

GROWING_RESERVATION_BYTES = 2**36
"""Address space that a column which is never overwritten reserves at first; it doubles when that is used up."""

SEALED_RESERVATION_BYTES = 2**40
"""The same of a column whose chunks are sealed, for good: they can't all be mapped again somewhere else."""

_ALIGNED_BYTES = 2**16
_ALIGNMENT = 64


class OpenedChunk(NamedTuple):
    """A file that holds the raw rows of a chunk.

    Attributes:
        descriptor: The file, open; whoever takes this closes it.
        offset: Where in it the rows begin, a page multiple.
        is_writable: Whether rows may be written to it.
    """

    descriptor: int
    offset: int = 0
    is_writable: bool = False


class Tail(Protocol):
    """Where the writer puts rows: an array, or something that is assigned to like one."""

    def __setitem__(self, row: int | slice, rows: Any) -> None:
        """Writes [lanes, *shape] at a row, or [n, lanes, *shape] at a slice of rows."""


class PwriteTail:
    """Assignments that become pwrite calls."""

    def __init__(self, descriptor: int, *, offset: int, row_bytes: int) -> None:
        self._descriptor = descriptor
        self._offset = offset
        self._row_bytes = row_bytes

    def __setitem__(self, row: int | slice, rows: NDArray[Any]) -> None:
        start = row.start if isinstance(row, slice) else row
        data = _bytes_of(np.ascontiguousarray(rows))
        offset = self._offset + start * self._row_bytes
        while data:  # a full disk or a signal can cut a write short
            written = os.pwrite(self._descriptor, data, offset)
            data = data[written:]
            offset += written


class Column(abc.ABC):
    """The rows of one leaf, ``[T, lanes, *shape]``.

    Reading needs the chunk attached. Nothing here knows which ids are in the window: a caller who reads rows that are
    being overwritten gets mixed bytes, and has to check afterwards.

    Args:
        layout: How the column is cut into chunks.
        folder: Where its chunk files are.
        writable: Whether rows are written through it.

    Attributes:
        attached: The chunk in each slot.
        open_sealed: Opens a chunk that has no raw file in the folder, where there are such.
    """

    def __init__(self, layout: ColumnLayout, folder: Path, *, writable: bool) -> None:
        self.layout = layout
        self.folder = folder
        self.writable = writable
        self._folder_text = os.fspath(folder)
        self.attached: dict[int, int] = {}  # slot: chunk
        self.open_sealed: Callable[[int], OpenedChunk] | None = None

    def chunk_path(self, chunk: int) -> Path:
        """The file that holds a chunk."""
        return self.folder / self.layout.file_name(chunk)

    def open_chunk(self, chunk: int) -> OpenedChunk:
        """Opens the raw file of a chunk, for writing too where the column is writable.

        Raises:
            FileNotFoundError: When the chunk has no file.
            StoreCorruptError: When the file isn't a whole chunk.
            OSError: When it can't be opened.
        """
        flags = (os.O_RDWR if self.writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(f"{self._folder_text}/{self.layout.file_name(chunk)}", flags)
        try:
            self.check_size(descriptor, chunk)
        except BaseException:
            os.close(descriptor)
            raise
        return OpenedChunk(descriptor, is_writable=self.writable)

    def slot(self, chunk: int) -> int:
        """Where a chunk lies in a ring; chunks that are never overwritten lie at their own number."""
        return chunk if self.layout.slots is None else chunk % self.layout.slots

    @abc.abstractmethod
    def attach(self, chunk: int, opened: OpenedChunk | None = None) -> None:
        """Makes a chunk's rows readable, and writable when the column is.

        Args:
            chunk: Its number.
            opened: The file that holds them, where that isn't the raw one in the column's folder. It is closed.

        Raises:
            FileNotFoundError: When the chunk has no file.
            StoreCorruptError: When the file isn't a whole chunk.
            OSError: When it can't be opened or mapped.
        """

    @abc.abstractmethod
    def detach(self, chunk: int) -> None:
        """Lets go of a chunk whose file is going away; its rows read as zeros or not at all from then on."""

    @abc.abstractmethod
    def offset(self, first_id: int) -> int:
        """Returns the flat row, as `take` counts them, of an id's first lane."""

    @abc.abstractmethod
    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Copies rows in any order.

        Args:
            rows: [*K] flat rows ``offset(first_id) + (id - first_id) * lanes + lane``; their chunks are attached.

        Returns:
            [*K, *shape], freshly allocated.
        """

    @property
    def flat(self) -> NDArray[Any] | None:
        """The column as one array [rows, *shape] that `take` indexes, None where it isn't one."""
        return None

    def expect_random_reads(self) -> None:
        """Lets a fault read the page that it needs and none around it; only a hint."""
        return

    def ask_for(self, rows: NDArray[np.int64]) -> None:
        """Asks the kernel to read rows that will be taken soon, without waiting for them; only a hint.

        Args:
            rows: As `take` counts them.
        """
        del rows

    @abc.abstractmethod
    def read_span(self, first_id: int, count: int) -> NDArray[Any]:
        """Returns `count` ids inside one chunk as [count, lanes, *shape]; may share memory with the file."""

    def let_pages_go(self, first_id: int, count: int) -> None:
        """Takes pages of `count` ids inside one chunk out of this process's memory, when it has been past them.

        Only a hint: they stay in the system's cache, and are there again when they are read.
        """
        del first_id, count

    @abc.abstractmethod
    def needs_space(self, *, is_hot: bool) -> bool:
        """Whether space has to be reserved before `tail` is written to: where rows go to a mapping.

        A write that finds no space raises; a store to a mapping that finds none kills the process.

        Args:
            is_hot: As in `tail`.
        """

    @abc.abstractmethod
    def tail(self, first_id: int, count: int, *, descriptor: int, is_hot: bool) -> Tail:
        """Returns where to write `count` ids from `first_id` on, all in one chunk that is attached and reserved.

        Args:
            first_id: Id of the tail's row 0.
            count: Its length.
            descriptor: The chunk's file, open for writing.
            is_hot: Whether the chunk's pages are in memory and were written since they were last synced, so that
                writing to the mapping faults on none of them.
        """

    def check_size(self, descriptor: int, chunk: int) -> None:
        """Raises StoreCorruptError when what was opened for a chunk isn't a file as long as a chunk."""
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != self.layout.chunk_bytes:
            path = self.chunk_path(chunk)
            found = f"has {status.st_size}" if stat.S_ISREG(status.st_mode) else "isn't a file"
            raise StoreCorruptError(
                f"chunk file {path} of leaf {self.layout.path!r} must hold {self.layout.chunk_bytes} bytes, {found}. "
                "Restore that file, or run diskbuf.repair.",
                path=str(path),
            )


class MappedColumn(Column):
    """A column whose chunk files are mapped side by side, so that a gather is one `numpy.take`.

    A ring is mapped twice, end to end, so that no window wraps: a take that need not wrap lets the processor wait for
    many rows at once, a fifth less time on a large ring. Where a chunk isn't whole pages, each starts at a page of its
    own and rows are gathered by chunk and row.

    Args:
        first_chunk: Of a column that is never overwritten: no chunk below it is ever attached.

    Raises:
        OSError: When the address space can't be had.
    """

    def __init__(self, layout: ColumnLayout, folder: Path, *, writable: bool, first_chunk: int = 0) -> None:
        super().__init__(layout, folder, writable=writable)
        self._pitch = page_multiple(max(1, layout.chunk_bytes))
        self._is_flat = self._pitch == layout.chunk_bytes
        self._lane_bytes = layout.lane_bytes
        self._ring_rows = layout.ring_rows
        self._first_chunk = first_chunk if layout.slots is None else 0
        growth = SEALED_RESERVATION_BYTES if layout.is_sealed else GROWING_RESERVATION_BYTES
        chunks = 2 * layout.slots if layout.slots else max(1, growth // self._pitch)
        self._take_over(Reservation(chunks * self._pitch))

    def _take_over(self, reservation: Reservation) -> None:
        layout = self.layout
        chunks = reservation.size // self._pitch
        shape = (chunks, layout.chunk_rows, layout.lanes, *layout.shape)
        strides = (self._pitch, *_c_strides(shape[1:], layout.dtype.itemsize))
        view: NDArray[Any] = np.ndarray(shape, layout.dtype, buffer=reservation.bytes(), strides=strides)
        self._reservation = reservation
        self._chunks = chunks
        self._view = view
        self._flat = view.reshape(chunks * layout.chunk_rows * layout.lanes, *layout.shape) if self._is_flat else view

    def attach(self, chunk: int, opened: OpenedChunk | None = None) -> None:
        opened = opened or self.open_chunk(chunk)
        try:
            if self.layout.slots is None:
                self._make_room(chunk)
            self._map(chunk, opened, self._reservation)
            self.attached[self.slot(chunk)] = chunk
        finally:
            os.close(opened.descriptor)

    def _map(self, chunk: int, opened: OpenedChunk, reservation: Reservation) -> None:
        if not (size := self.layout.chunk_bytes):
            return
        position = self._position(chunk)
        positions = [position] if self.layout.slots is None else [position, position + self.layout.slots * self._pitch]
        for place in positions:
            reservation.map_file(
                place, opened.descriptor, size=size, writable=opened.is_writable, file_offset=opened.offset
            )

    def detach(self, chunk: int) -> None:
        if self.attached.get(self.slot(chunk)) == chunk:
            del self.attached[self.slot(chunk)]  # first: a child that is forked in between must not take zeros for rows
            self._reservation.unmap(self._position(chunk), size=self._pitch)

    def _position(self, chunk: int) -> int:
        """Where a chunk begins in the reservation, in bytes."""
        return (self.slot(chunk) - self._first_chunk) * self._pitch

    def _make_room(self, chunk: int) -> None:
        """Moves to a larger reservation when a chunk lies behind the one there is. Arrays keep the old one alive.

        Other threads read meanwhile, so the new one is taken over when every chunk is in it.
        """
        if chunk - self._first_chunk < self._chunks:
            return
        if self.layout.is_sealed:  # what is attached may have no file of its own any more
            raise OSError(errno.ENOMEM, f"{self.folder}: {os.strerror(errno.ENOMEM)}")
        larger = Reservation(2 * (chunk + 1 - self._first_chunk) * self._pitch)
        if self._reservation.is_read_randomly:
            larger.expect_random_reads()
        for known in sorted(self.attached.values()):
            with contextlib.suppress(FileNotFoundError):  # cleared since
                opened = self.open_chunk(known)
                try:
                    self._map(known, opened, larger)
                finally:
                    os.close(opened.descriptor)
        self._take_over(larger)

    def offset(self, first_id: int) -> int:
        ring_rows = self._ring_rows
        row = first_id - self._first_chunk * self.layout.chunk_rows if ring_rows is None else first_id % ring_rows
        return row * self.layout.lanes

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        if self._is_flat:
            if rows.size * self._lane_bytes < _ALIGNED_BYTES:
                return self._flat.take(rows, 0, None, "clip")  # "clip" because it is faster: nothing is outside
            out = aligned_empty((*rows.shape, *self.layout.shape), self.layout.dtype)
            return self._flat.take(rows, 0, out, "clip")
        ids, lanes = np.divmod(rows, self.layout.lanes)
        chunk, row = np.divmod(ids, self.layout.chunk_rows)
        found: NDArray[Any] = self._view[chunk, row, lanes]
        return found if rows.ndim else found.copy()  # one row alone is a view of the file

    @property
    def flat(self) -> NDArray[Any] | None:
        return self._flat if self._is_flat else None

    def expect_random_reads(self) -> None:
        self._reservation.expect_random_reads()

    def ask_for(self, rows: NDArray[np.int64]) -> None:
        row_of_chunk = self.layout.chunk_rows * self.layout.lanes
        chunk, row = np.divmod(rows.reshape(-1), row_of_chunk)
        starts = chunk * self._pitch + row * self._lane_bytes
        self._reservation.ask_for(starts, size=self._lane_bytes)

    def read_span(self, first_id: int, count: int) -> NDArray[Any]:
        chunk, row = divmod(self.offset(first_id) // self.layout.lanes, self.layout.chunk_rows)
        return self._view[chunk, row : row + count]

    def let_pages_go(self, first_id: int, count: int) -> None:
        chunk, row = divmod(self.offset(first_id) // self.layout.lanes, self.layout.chunk_rows)
        row_bytes = self.layout.row_bytes
        self._reservation.let_pages_go(chunk * self._pitch + row * row_bytes, size=count * row_bytes)

    def needs_space(self, *, is_hot: bool) -> bool:
        return is_hot or self.layout.row_bytes < PWRITE_ROW_BYTES

    def tail(self, first_id: int, count: int, *, descriptor: int, is_hot: bool) -> Tail:
        layout = self.layout
        if self.needs_space(is_hot=is_hot):
            chunk, row = divmod(first_id, layout.chunk_rows)
            offset = self._position(chunk) + row * layout.row_bytes
            self._reservation.populate(offset, size=count * layout.row_bytes)
        else:
            return PwriteTail(
                descriptor, offset=first_id % layout.chunk_rows * layout.row_bytes, row_bytes=layout.row_bytes
            )
        return self.read_span(first_id, count)


class FileColumn(Column):
    """A column that opens its chunk files as it needs them: no address space, one system call a row.

    Descriptors are kept by slot, so that one that stays open through recycling shows what the mapping would show.
    """

    _MOST_OPEN = 16

    def __init__(self, layout: ColumnLayout, folder: Path, *, writable: bool) -> None:
        super().__init__(layout, folder, writable=writable)
        self._open: collections.OrderedDict[int, _Descriptor] = collections.OrderedDict()

    def attach(self, chunk: int, opened: OpenedChunk | None = None) -> None:
        slot = self.slot(chunk)
        self._open.pop(slot, None)
        if opened is not None:
            self._open[slot] = _Descriptor(opened)
        self._descriptor(chunk)
        self.attached[slot] = chunk

    def detach(self, chunk: int) -> None:
        self._open.pop(self.slot(chunk), None)
        self.attached.pop(self.slot(chunk), None)

    def _descriptor(self, chunk: int) -> "_Descriptor":
        slot = self.slot(chunk)
        found = self._open.get(slot)
        if found is None:
            found = _Descriptor(self._open_anywhere(chunk))
            self._open[slot] = found
            while len(self._open) > self._MOST_OPEN:
                self._open.popitem(last=False)
        return found

    def _open_anywhere(self, chunk: int) -> OpenedChunk:
        try:
            return self.open_chunk(chunk)
        except FileNotFoundError:
            if self.open_sealed is None:
                raise
            return self.open_sealed(chunk)

    def offset(self, first_id: int) -> int:
        return first_id * self.layout.lanes

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        layout = self.layout
        out = aligned_empty((rows.size, *layout.shape), layout.dtype)
        lane_bytes = layout.lane_bytes
        if not lane_bytes:
            return out.reshape(*rows.shape, *layout.shape)
        raw = _bytes_of(out)
        for position, row in enumerate(rows.reshape(-1).tolist()):
            step, lane = divmod(row, layout.lanes)
            chunk, inside = divmod(step, layout.chunk_rows)
            target = raw[position * lane_bytes : (position + 1) * lane_bytes]
            self._read(chunk, (inside * layout.lanes + lane) * lane_bytes, target)
        return out.reshape(*rows.shape, *layout.shape)

    def _read(self, chunk: int, offset: int, target: memoryview) -> None:
        if not target.nbytes:
            return
        descriptor = self._descriptor(chunk)
        if os.preadv(descriptor.number, [target], descriptor.offset + offset) != target.nbytes:
            self.check_size(descriptor.number, chunk)

    def read_span(self, first_id: int, count: int) -> NDArray[Any]:
        layout = self.layout
        out = aligned_empty((count, layout.lanes, *layout.shape), layout.dtype)
        chunk, inside = divmod(first_id, layout.chunk_rows)
        self._read(chunk, inside * layout.row_bytes, _bytes_of(out))
        return out

    def needs_space(self, *, is_hot: bool) -> bool:
        del is_hot
        return False

    def tail(self, first_id: int, count: int, *, descriptor: int, is_hot: bool) -> Tail:
        del count, is_hot
        layout = self.layout
        return PwriteTail(
            descriptor, offset=first_id % layout.chunk_rows * layout.row_bytes, row_bytes=layout.row_bytes
        )


class _Descriptor:
    """An open file that closes itself when nobody reads it any more."""

    def __init__(self, opened: OpenedChunk) -> None:
        self.number = opened.descriptor
        self.offset = opened.offset

    def __del__(self) -> None:
        os.close(self.number)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Returns an uninitialised array on a 64-byte boundary, which TensorFlow takes without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    """The memory of a C-contiguous array."""
    return memoryview(array.reshape(-1).view(np.uint8) if array.size else b"")  # type: ignore[arg-type]  # numpy's Buffer


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * length)
    return tuple(reversed(strides))
