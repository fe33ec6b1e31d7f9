"""The live header: one page, mapped by every process that has the store open, that says which ids exist.

    word  0  magic               word  4  epoch: openings for writing; readers look at everything anew when it changes
    word  1  layout of the page  word  5  generation: how many times the store was cleared
    word  8-9 the file's device and inode: in a copy of it the live words say nothing of the copied chunks
    word 2-3 boot id             word  6  floor: no id below it is in the window
                                 word  7  next id: the commit. A step is there for every process once this has passed it
    word 10-11 the seal of the last close: its epoch, and the crc of generation, floor and next id then
    512, 1024                    the durable record, twice, written in turn: sequence, generation, floor, next id, crc;
                                 behind it the stamp of the journal that goes on from it, 0 for none, and a crc of both

The window follows from two words that only grow, so no moment shows half of a change: it is
``[max(floor, next_id - max_length), next_id)``. The live words are true while the machine runs (they survive any
process); after another start of the machine only the durable record is. A word is written by one aligned 8-byte store.
"""

import dataclasses
import mmap
import os
import platform
import stat
import struct
import threading
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import StoreCorruptError
from diskbuf.store import files
from diskbuf.store.mapping import Reservation

HEADER_BYTES = 4096
EPOCH, GENERATION, FLOOR, NEXT, DEVICE, INODE, SEAL_EPOCH, SEAL = 4, 5, 6, 7, 8, 9, 10, 11
_INT64 = 2**63 - 1
_MAGIC = int.from_bytes(b"diskbuf1", "little")
_PAGE_LAYOUT = 1
_SLOTS = (512, 1024)
_RECORD = struct.Struct("<qqqq")
_CHECKSUM = struct.Struct("<I")
_STAMP = struct.Struct("<4xqI")
STORES_IN_ORDER = platform.machine().lower() in {"x86_64", "amd64", "i386", "i686"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extent:
    """Which ids a store holds: those from `floor` (no lower bound by length applied) up to `next_id`, exclusive."""

    generation: int
    floor: int
    next_id: int


class LiveHeader:
    """The mapped header page of a store.

    Args:
        path: The header file.
        writable: Whether this process may change it.

    Attributes:
        words: The page as 8-byte ints; read and written in place.
        fence: Keeps what is read or written before it apart from what comes behind it, for other processors.

    Raises:
        FileNotFoundError: When there is none.
        StoreCorruptError: When it isn't a whole header.
    """

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
        except IsADirectoryError as error:
            raise _corrupt(path, "isn't a file") from error
        try:
            status = os.fstat(self._descriptor)
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                raise _corrupt(path, "isn't a file")
            if size != HEADER_BYTES:
                raise _corrupt(path, f"must hold {HEADER_BYTES} bytes, has {size}")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._page = mmap.mmap(self._descriptor, HEADER_BYTES, access=access)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.words = memoryview(self._page).cast("q")
        self.fence = _no_fence if STORES_IN_ORDER else _fence
        if (self.words[0], self.words[1]) != (_MAGIC, _PAGE_LAYOUT):
            self.close()
            raise _corrupt(path, "doesn't begin as a header of this version")

    @staticmethod
    def create(path: Path, extent: Extent, *, sync: bool) -> None:
        """Writes a header file whose live words and durable record hold `extent`."""
        page = bytearray(HEADER_BYTES)
        struct.pack_into("<qq", page, 0, _MAGIC, _PAGE_LAYOUT)
        page[16:32] = files.boot_id()
        struct.pack_into("<qqqq", page, 32, 0, extent.generation, extent.floor, extent.next_id)
        _pack_record(page, 0, extent, 0)
        files.replace_file(path, bytes(page), sync=sync)

    @property
    def is_live(self) -> bool:
        """Whether the live words were written to this very file since this machine started."""
        boot = files.boot_id()
        is_this_file = (self.words[DEVICE], self.words[INODE]) == self._identity()
        return boot != bytes(16) and bytes(self._page[16:32]) == boot and is_this_file

    def _identity(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_dev & _INT64, status.st_ino & _INT64

    @property
    def live(self) -> Extent:
        """The live words."""
        return Extent(generation=self.words[GENERATION], floor=self.words[FLOOR], next_id=self.words[NEXT])

    @property
    def durable(self) -> Extent | None:
        """The newest whole durable record, None when neither copy is whole."""
        newest = self._newest_record()
        return None if newest is None else newest[1]

    @property
    def journal_stamp(self) -> int:
        """Which journal goes on from the durable record, 0 for none."""
        newest = self._newest_record()
        return 0 if newest is None else newest[2]

    def begin(self, extent: Extent) -> None:
        """Makes `extent` the live one and this boot its boot; readers look at everything anew.

        The epoch goes last: a reader of the new epoch sees the new words.
        """
        self.unseal()
        for word, value in ((GENERATION, extent.generation), (FLOOR, extent.floor), (NEXT, extent.next_id)):
            self.words[word] = value
        self.words[DEVICE], self.words[INODE] = self._identity()
        self._page[16:32] = files.boot_id()
        self.fence()
        self.words[EPOCH] += 1

    def seal(self) -> None:
        """Says that the live words stay as they are until the next opening for writing."""
        self.words[SEAL] = _seal_of(self.live)
        self.fence()
        self.words[SEAL_EPOCH] = self.words[EPOCH]

    def unseal(self) -> None:
        """Says that the live words are about to change."""
        self.words[SEAL_EPOCH] = 0
        self.fence()

    def is_broken(self) -> bool:
        """Whether the live words are sealed and are not those that were; a writer that comes or goes breaks nothing."""
        before = self._read_seal()
        self.fence()
        live = self.live
        self.fence()
        epoch, seal = before
        is_sealed = 0 != epoch == self.words[EPOCH]
        return is_sealed and seal != _seal_of(live) and before == self._read_seal()

    def _read_seal(self) -> tuple[int, int]:
        return self.words[SEAL_EPOCH], self.words[SEAL]

    def write_durable(self, extent: Extent, *, sync: bool, journal_stamp: int = 0) -> None:
        """Records which ids are on the disk, over the older of the two copies, and syncs the page.

        Args:
            extent: These ids.
            sync: Whether the page is synced.
            journal_stamp: Which journal goes on from there, 0 for none.

        Raises:
            OSError: When the sync fails.
        """
        newest = self._newest_record()
        with memoryview(self._page) as page:
            _pack_record(page, 0 if newest is None else newest[0] + 1, extent, journal_stamp)
        if sync:
            files.sync_descriptor(self._descriptor)

    def map_words(self) -> NDArray[np.int64]:
        """Maps the page once more, to be read for as long as the array lives, also after `close`; [512] int64."""
        page = Reservation(HEADER_BYTES)
        page.map_file(0, self._descriptor, size=HEADER_BYTES, writable=False)
        return page.bytes().view(np.int64)

    def close(self) -> None:
        """Unmaps the page; the words stay on disk."""
        self.words.release()
        self._page.close()
        os.close(self._descriptor)

    def _newest_record(self) -> tuple[int, Extent, int] | None:
        """Sequence, extent and journal stamp."""
        found = []
        for offset in _SLOTS:
            raw = bytes(self._page[offset : offset + _RECORD.size])
            behind = offset + _RECORD.size
            (checksum,) = _CHECKSUM.unpack_from(self._page, behind)
            if zlib.crc32(raw) == checksum:
                sequence, generation, floor, next_id = _RECORD.unpack(raw)
                stamp, checksum = _STAMP.unpack_from(self._page, behind + _CHECKSUM.size)
                if checksum != _stamp_checksum(raw, stamp):
                    stamp = 0  # written by a version that had no journal
                found.append((sequence, Extent(generation=generation, floor=floor, next_id=next_id), stamp))
        return max(found, key=lambda record: record[0], default=None)


_fence_lock = threading.Lock()


def _no_fence() -> None:
    """X86 reorders neither stores nor loads among themselves."""


def _fence() -> None:
    """Taking and leaving a lock is the one barrier that Python offers."""
    with _fence_lock:
        pass


def _seal_of(extent: Extent) -> int:
    return zlib.crc32(struct.pack("<qqq", extent.generation, extent.floor, extent.next_id))


def _pack_record(page: bytearray | memoryview, sequence: int, extent: Extent, journal_stamp: int) -> None:
    raw = _RECORD.pack(sequence, extent.generation, extent.floor, extent.next_id)
    stamp = _STAMP.pack(journal_stamp, _stamp_checksum(raw, journal_stamp))
    whole = raw + _CHECKSUM.pack(zlib.crc32(raw)) + stamp
    offset = _SLOTS[sequence % 2]
    page[offset : offset + len(whole)] = whole


def _stamp_checksum(record: bytes, stamp: int) -> int:
    return zlib.crc32(record + stamp.to_bytes(8, "little", signed=True))


def _corrupt(path: Path, what: str) -> StoreCorruptError:
    return StoreCorruptError(
        f"live header {path} {what}. Delete that file to go on from the last commit in zarr.json.", path=str(path)
    )
