"""Where chunks go that can't be read where they are stored: files of their raw rows, which can be mapped."""

import abc
import contextlib
import errno
import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import Final

import numpy as np

from diskbuf.errors import ClosedError
from diskbuf.store import files
from diskbuf.store.cache_folder import CacheFolder, NewFile

_MOST_SPARE_BUFFERS: Final = 2
_MOST_SPARE_BYTES: Final = 32 * 2**20
_CANNOT_RESERVE: Final = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENODEV})


class NewChunk(abc.ABC):
    """Room for the raw rows of a chunk that is being fetched. Nobody else sees it before `keep`."""

    memory: memoryview
    """Writable bytes, zeros at first."""

    @abc.abstractmethod
    def keep(self, key: str) -> int:
        """Keeps what is in `memory` under a key, all of it or, after a kill at any moment, nothing.

        Returns:
            A descriptor of it, open for reading; the caller closes it.
        """

    @abc.abstractmethod
    def drop(self) -> None:
        """Gives the room back; does nothing after `keep`."""


class ChunkCache(abc.ABC):
    """Raw chunks by key. A key names one content for ever, so what is found under it is right."""

    @abc.abstractmethod
    def find(self, key: str, *, size: int) -> int | None:
        """Returns a descriptor of a chunk of `size` bytes, open for reading, which the caller closes; None without."""

    @abc.abstractmethod
    def new(self, size: int) -> NewChunk:
        """Makes room for a chunk of `size` bytes, at least 1, removing others that were not used for longest.

        Raises:
            OSError: When there is no room, or the folder can't be written, saying which and what to do.
        """


class DiskCache(ChunkCache):
    """Chunks as files in a folder, which several processes may share, within a number of bytes.

    A chunk lies at its key. Those that were not found for longest are removed first; that another process has one of
    them mapped doesn't matter, it keeps its rows (and their disk space) until it lets go. A chunk that is larger than
    all the room, or finds it taken by chunks that are being fetched, is readable by whoever fetched it and not kept.

    Args:
        folder: The folder; created, for its owner alone, when missing.
        most_bytes: Most bytes of all chunks in it, those that are being fetched included.

    Attributes:
        folder: The folder.
        most_bytes: Most bytes of all chunks in it.

    Raises:
        OptionError: When the folder can't be written, belongs to another user, is writable by all, or holds files that
            aren't a cache's; or `most_bytes` is below 1.
        OSError: When it can't be used for another reason, such as a full disk.
    """

    def __init__(self, folder: Path, *, most_bytes: int) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self._files = CacheFolder(folder, most_bytes=most_bytes)
        self._buffers = _Buffers()

    def find(self, key: str, *, size: int) -> int | None:
        """As in `ChunkCache`; a file of another size is removed, one of another user is none."""
        return self._files.find(key, size=size)

    def new(self, size: int) -> NewChunk:
        """As in `ChunkCache`."""
        new = self._files.make(size)
        chunk = _NewFile(self._files, new, self._buffers)
        try:
            self._files.with_room(size, lambda: _reserve(new.descriptor, size))
            chunk.memory = self._buffers.take(size)
        except BaseException:
            chunk.drop()
            raise
        return chunk

    def take_over(self, path: Path, key: str) -> bool:
        """Moves a file of raw rows into the cache, without copying it.

        Args:
            path: A file of our own.
            key: What it holds from now on.

        Returns:
            Whether it was moved. False when it lies on another file system, is larger than all the room, or can't be
            moved for another reason; it is then where it was.
        """
        return self._files.adopt(os.fspath(path), key)


class MemoryCache(ChunkCache):
    """Memory only: nothing is kept for a second reader, and a chunk lives as long as it is open or mapped somewhere."""

    def __init__(self) -> None:
        self._buffers = _Buffers()

    def find(self, key: str, *, size: int) -> int | None:  # noqa: ARG002 (the contract's)
        """Finds nothing."""
        return None

    def new(self, size: int) -> NewChunk:
        """Makes room in memory, or in an unlinked temporary file where memory can't be a file."""
        descriptor = _memory_file()
        try:
            _reserve(descriptor, size)
            return _NewMemory(descriptor, self._buffers.take(size))
        except OSError as error:
            os.close(descriptor)
            if error.errno not in {errno.ENOSPC, errno.ENOMEM}:
                raise
            raise OSError(
                error.errno,
                f"memory must have room for a chunk of {size} bytes, but is full. Name a folder as cache_dir",
            ) from error
        except BaseException:
            os.close(descriptor)
            raise


class _Buffers:
    """Private memory for chunks on their way into a file.

    Writing a chunk into memory that was used before and from there into the file with pwrite takes half the time
    of writing it into a new mapping of the file and reading it there: fresh pages cost more than a copy, and pwrite
    makes the file's pages in large folios. At most two such pieces of memory are kept.
    """

    def __init__(self) -> None:
        self._spare: list[mmap.mmap] = []  # its appends and pops are atomic; a lock could be held in a fork

    def take(self, size: int) -> memoryview:
        """Returns `size` zeros that nobody else sees; used again once no view of them is left.

        Raises:
            OSError: When there is no memory.
        """
        buffer = None
        with contextlib.suppress(IndexError):
            buffer = self._spare.pop()
        is_used = buffer is not None and len(buffer) >= size
        if buffer is None or not is_used:
            buffer = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        rows = np.frombuffer(buffer, np.uint8, size)
        if is_used:
            rows.fill(0)
        weakref.finalize(rows, self._give_back, buffer).atexit = False
        return rows.data

    def _give_back(self, buffer: mmap.mmap) -> None:
        if len(self._spare) < _MOST_SPARE_BUFFERS and len(buffer) <= _MOST_SPARE_BYTES:
            self._spare.append(buffer)


class _NewFile(NewChunk):
    """A chunk on its way into a folder."""

    def __init__(self, folder: CacheFolder, new: NewFile, buffers: _Buffers) -> None:
        self.memory = memoryview(b"")
        self._folder = folder
        self._new: NewFile | None = new
        self._buffers = buffers
        self._pid = os.getpid()

    def keep(self, key: str) -> int:
        new, memory = self._new, self.memory
        if new is None:
            raise _used_up(key)
        try:
            self._folder.with_room(new.size, lambda: files.write_at(new.descriptor, memory, 0))
            self._folder.put(new, key)
        except BaseException:
            self.drop()
            raise
        self._new, self.memory = None, memoryview(b"")
        os.close(new.descriptor)
        return new.reading

    def drop(self) -> None:
        new, self._new, self.memory = self._new, None, memoryview(b"")
        if new is not None:
            os.close(new.descriptor)
            os.close(new.reading)
            if self._pid == os.getpid():  # a forked child has a copy of this, not the file
                self._folder.discard(new)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.drop()


class _NewMemory(NewChunk):
    """A chunk on its way into a file without a name."""

    def __init__(self, descriptor: int, memory: memoryview) -> None:
        self.memory = memory
        self._descriptor = descriptor

    def keep(self, key: str) -> int:
        if self._descriptor < 0:
            raise _used_up(key)
        try:
            files.write_at(self._descriptor, self.memory, 0)
            try:
                reading = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # no /proc: nothing but the right not to write is lost
                reading = os.dup(self._descriptor)
        finally:
            self.drop()
        return reading

    def drop(self) -> None:
        descriptor, self._descriptor, self.memory = self._descriptor, -1, memoryview(b"")
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.drop()


def _used_up(key: str) -> ClosedError:
    return ClosedError(f"chunk {key!r} must be kept once, before it is dropped, but was kept or dropped already.")


def _memory_file() -> int:
    """Opens a file without a name, in memory where that is possible; the caller closes it."""
    if hasattr(os, "memfd_create"):
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            return os.memfd_create("diskbuf-chunk", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(prefix="diskbuf-chunk-", buffering=0) as file:
        return os.dup(file.fileno())


def _reserve(descriptor: int, size: int) -> None:
    """Takes the space of a file's first bytes, so that writing them can't find the disk full."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:  # else writing finds out
                raise
