"""Files mapped side by side into one stretch of address space, so that many chunk files are one numpy array.

Python's mmap can't place a mapping (MAP_FIXED), hence ctypes. Nothing else in diskbuf calls into C.
"""

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000 if sys.platform == "linux" else 0x40
_MADV_POPULATE_WRITE: Final = 23
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

MOST_BYTES: Final = 2**47
"""The address space of a process on x86-64 and most others; ctypes would cut a larger size off in silence."""


def is_supported() -> bool:
    """Whether this platform can place mappings."""
    return os.name == "posix" and sys.maxsize > 2**32


class Reservation:
    """Address space for files to be mapped into; what isn't mapped reads as zeros and can't be written.

    Arrays made from it keep it alive; the last one to go unmaps everything. Reserving costs no memory.

    Args:
        size: Bytes, a page multiple above 0.

    Attributes:
        size: Its bytes.
        is_read_randomly: Whether a fault reads no more than its page.

    Raises:
        OSError: When the address space can't be had (ENOMEM under a limit).
    """

    def __init__(self, size: int) -> None:
        if size > MOST_BYTES:
            raise OSError(errno.ENOMEM, f"mmap of {size} bytes: {os.strerror(errno.ENOMEM)}")
        self.size = size
        self.is_read_randomly = False
        self._mmap, self._munmap, self._madvise = _functions()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._address = self._checked(self._mmap(None, size, mmap.PROT_READ, flags, -1, 0))

    def map_file(self, offset: int, descriptor: int, *, size: int, writable: bool, file_offset: int = 0) -> None:
        """Maps `size` bytes of a file at `offset`, over whatever is mapped there.

        Args:
            offset: Where in the reservation, a page multiple.
            descriptor: The open file; may be closed afterwards.
            size: Bytes to map. The file must be that long: reading past its end kills the process.
            writable: Whether writes go to the file; the descriptor must be open for writing then.
            file_offset: Where in the file, a page multiple.

        Raises:
            OSError: When the mapping can't be made (ENOMEM when there are too many).
        """
        if offset % mmap.PAGESIZE or not 0 <= offset <= self.size - size:
            raise ValueError(
                f"offset must be a page multiple inside the {self.size} bytes reserved, got {offset} for {size} bytes."
            )
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = self._address + offset
        self._checked(self._mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, file_offset))
        if self.is_read_randomly:
            self._madvise(address, size, mmap.MADV_RANDOM)

    def populate(self, offset: int, *, size: int) -> None:
        """Makes a mapped range ready to be written to, at a fraction of what a fault on each of its pages costs.

        Only a hint: where the kernel doesn't know it (Linux before 5.14) nothing happens.

        Args:
            offset: Where in the reservation; whole pages around it are meant.
            size: Bytes.
        """
        start = offset - offset % mmap.PAGESIZE
        self._madvise(self._address + start, offset + size - start, _MADV_POPULATE_WRITE)

    def expect_random_reads(self) -> None:
        """Lets a fault on a mapped page read that page and none around it; only a hint."""
        if not self.is_read_randomly:
            self.is_read_randomly = True
            self._madvise(self._address, self.size, mmap.MADV_RANDOM)

    def ask_for(self, offsets: NDArray[np.int64], *, size: int) -> None:
        """Asks the kernel to read ranges from the disk, without waiting for it; only a hint.

        Args:
            offsets: [K] where each begins in the reservation; whole pages around it are meant.
            size: Bytes of each.
        """
        first, at = np.unique(offsets // mmap.PAGESIZE, return_index=True)
        if not len(first):
            return
        last = (offsets[at] + size - 1) // mmap.PAGESIZE
        is_apart = first[1:] > last[:-1] + 1  # ranges of one size that touch are asked for at once
        starts = first[np.concatenate([[True], is_apart])]
        sizes = last[np.concatenate([is_apart, [True]])] + 1 - starts
        for start, length in zip(starts.tolist(), sizes.tolist(), strict=True):
            self._madvise(self._address + start * mmap.PAGESIZE, length * mmap.PAGESIZE, mmap.MADV_WILLNEED)

    def let_pages_go(self, offset: int, *, size: int) -> None:
        """Takes pages of a mapped file out of this process's memory; they stay in the system's cache. Only a hint.

        Args:
            offset: Where in the reservation; only whole pages inside are meant.
            size: Bytes.
        """
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            self._madvise(self._address + start, stop - start, mmap.MADV_DONTNEED)

    def unmap(self, offset: int, *, size: int) -> None:
        """Gives a range back to the reservation: it reads as zeros and no longer holds a file's space.

        Args:
            offset: Where in the reservation, a page multiple.
            size: Bytes.

        Raises:
            OSError: When the range can't be replaced.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        self._checked(self._mmap(self._address + offset, size, mmap.PROT_READ, flags, -1, 0))

    def bytes(self) -> NDArray[np.uint8]:
        """Returns the whole reservation as [size] uint8, sharing memory with the files."""
        return np.asarray(self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "data": (self._address, False), "shape": (self.size,), "typestr": "|u1"}

    def _checked(self, address: int | None) -> int:
        if address is None or address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"mmap: {os.strerror(number)}")
        return address

    def __del__(self) -> None:
        address = getattr(self, "_address", None)
        if address is not None:
            self._munmap(address, self.size)


_loaded: list[Callable[..., Any]] = []


def _functions() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    if not _loaded:
        library = ctypes.CDLL(None, use_errno=True)
        library.mmap.restype = ctypes.c_void_p
        library.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        ]
        library.munmap.restype = ctypes.c_int
        library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        library.madvise.restype = ctypes.c_int
        library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        _loaded.extend((library.mmap, library.munmap, library.madvise))
    return _loaded[0], _loaded[1], _loaded[2]
