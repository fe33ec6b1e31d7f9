"""The files of a store by name, wherever they are: the contract, and files in a folder."""

import abc
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from diskbuf.errors import OptionError
from diskbuf.store import files


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteRange:
    """Some bytes of an object.

    Attributes:
        name: The object.
        start: First byte.
        stop: Where to stop, exclusive; None for the object's end.

    Raises:
        OptionError: When it begins before the object, or ends before it begins.
    """

    name: str
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or (self.stop is not None and self.stop < self.start):
            raise OptionError(f"a range must run forward from 0 on, got start {self.start} and stop {self.stop}.")


class Objects(abc.ABC):
    """Objects by name, "/" between folders, below one root. Safe to be used by several threads."""

    has_versions = False
    """Whether `version` tells something, at little cost."""

    def local_path(self, name: str) -> Path | None:
        """The file of an object, where it is one of this machine; there need not be one."""
        del name
        return None

    @abc.abstractmethod
    def place(self, name: str) -> str:
        """What to call an object in messages: its path or URL; of "" the root's."""

    @abc.abstractmethod
    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Reads ranges, all at once where that is faster.

        Returns:
            For each range all of its bytes, never fewer.

        Raises:
            FileNotFoundError: When an object isn't there.
            StoreCorruptError: When an object ends before its range.
            StoreAccessError: When reading is refused.
            StoreUnreachableError: When it failed, and failed again after waiting.
        """

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Reads some bytes of an object; raises as `read_many`."""
        return self.read_many([ByteRange(name=name, start=start, stop=stop)])[0]

    def read_into(self, name: str, into: memoryview) -> None:
        """Reads an object's first bytes, as many as there is room for, to where they are wanted.

        Args:
            name: The object.
            into: [n] writable bytes; undefined when this raises.

        Raises:
            FileNotFoundError: As `read_many`, like the others that it raises.
        """
        into[:] = self.read(name, 0, len(into))

    @abc.abstractmethod
    def size(self, name: str) -> int:
        """Bytes of an object; raises as `read_many`."""

    @abc.abstractmethod
    def version(self, name: str) -> str | None:
        """Changes whenever another object takes the name; letters, digits and "-" only. None where nothing tells."""

    @abc.abstractmethod
    def write(self, name: str, data: bytes | memoryview) -> None:
        """Puts an object in its place, whole or not at all, over what is there.

        Raises:
            OSError: When it can't be written.
            StoreAccessError: When writing is refused.
            StoreUnreachableError: When it failed, and failed again after waiting.
        """

    @abc.abstractmethod
    def delete(self, name: str) -> None:
        """Removes an object; one that isn't there is fine. Raises as `write`."""

    def close(self) -> None:
        """Lets go of connections; closing twice is fine."""
        return


class LocalObjects(Objects):
    """Files below a folder.

    Args:
        folder: The folder.
        sync: Whether what is written is on the disk, name and all, when `write` returns.
    """

    def __init__(self, folder: Path, *, sync: bool = True) -> None:
        self.folder = folder
        self._sync = sync

    has_versions = True

    def local_path(self, name: str) -> Path | None:
        """Its path."""
        return self.folder / name

    def place(self, name: str) -> str:
        """Its path."""
        return os.fspath(self.folder / name) if name else os.fspath(self.folder)

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Reads one after the other."""
        return [self._read(wanted) for wanted in ranges]

    def _read(self, wanted: ByteRange) -> bytes:
        descriptor = os.open(self.folder / wanted.name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(descriptor).st_size
            # What begins after the end is refused by reading it, also where nothing is to be read.
            start = min(wanted.start, size)
            stop = max(size, wanted.start) if wanted.stop is None else wanted.stop
            return files.read_at(descriptor, stop - start, start, path=self.folder / wanted.name)
        finally:
            os.close(descriptor)

    def size(self, name: str) -> int:
        """Its bytes."""
        return os.stat(self.folder / name).st_size

    def version(self, name: str) -> str | None:
        """Inode, times and size: a file that is replaced, or written over, has another of these."""
        status = os.stat(self.folder / name)
        return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_size}"

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Writes a temporary file and renames it."""
        path = self.folder / name
        files.make_folders(path.parent, sync=self._sync)
        files.replace_file(path, data, sync=self._sync)

    def delete(self, name: str) -> None:
        """Unlinks it."""
        (self.folder / name).unlink(missing_ok=True)


class FallbackObjects(Objects):
    """Objects of one place, and those that aren't there from another one, for reading.

    Args:
        first: Where to look first, usually here.
        second: Where to look next.
    """

    def __init__(self, first: Objects, second: Objects) -> None:
        self._first = first
        self._second = second

    def place(self, name: str) -> str:
        """The second one's: there it should have been."""
        return self._second.place(name)

    def local_path(self, name: str) -> Path | None:
        """The first one's, where there is a file."""
        path = self._first.local_path(name)
        return path if path is not None and path.exists() else None

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Reads from the first one what is there, and then the rest at once."""
        found: list[bytes | None] = []
        for wanted in ranges:
            try:
                found.append(self._first.read_many([wanted])[0])
            except FileNotFoundError:
                found.append(None)
        rest = iter(self._second.read_many([w for w, data in zip(ranges, found, strict=True) if data is None]))
        return [next(rest) if data is None else data for data in found]

    def size(self, name: str) -> int:
        """Of the first one that has it."""
        try:
            return self._first.size(name)
        except FileNotFoundError:
            return self._second.size(name)

    def version(self, name: str) -> str | None:
        """None: what is here now is there later."""
        del name
        return None

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Not for writing."""
        raise NotImplementedError("writers know where they write to")

    def delete(self, name: str) -> None:
        """Not for writing."""
        raise NotImplementedError("writers know where they write to")

    def close(self) -> None:
        """Closes both."""
        self._first.close()
        self._second.close()
