"""A disk that remembers what was synced, and the folders of files that a power cut may leave of it.

The recorder stands under the calls that change names and that sync. For each file it knows the bytes that are on the
disk, for each folder the names, and what has been done to them since in order. A cut then draws what had reached the
disk by itself:

- each page not synced is as it was on the disk or as it is now, a page that never was on the disk may read as zeros;
  pages of the live header go to the disk by sectors of 512 bytes, those of other files sometimes;
- a file's length is as it was on the disk or as it is now;
- of the creations, renames and removals of a folder since its last sync any number are undone, as long as of those
  that touch the same name or the same file the earlier ones are done;
- a file or a folder without a name on the disk, or with one that was undone, isn't there.

From time to time some pages are written to the disk without being asked for, so that what is on it may also be older
than now and newer than the last sync.
"""

import dataclasses
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PAGE_BYTES = 4096
SECTOR_BYTES = 512
_BOOT_ID = slice(16, 32)  # of .diskbuf/live


class _File:
    """A file, whatever its names are.

    Attributes:
        durable: Its bytes on the disk.
    """

    def __init__(self, path: str) -> None:
        self._descriptor = _real_open(path, os.O_RDONLY | os.O_CLOEXEC)  # keeps the inode's number from being reused
        self.number = os.fstat(self._descriptor).st_ino
        self.durable = b""

    def current(self) -> bytes:
        return os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)

    def sync(self) -> None:
        self.durable = self.current()

    def write_back(self, rng: np.random.Generator, chance: float) -> None:
        """Some pages reach the disk by themselves."""
        self.durable = self.after_cut(rng, chance, PAGE_BYTES)

    def after_cut(self, rng: np.random.Generator, chance: float, unit: int) -> bytes:
        """What is left when each `unit` bytes that differ have reached the disk with a chance."""
        current, durable = self.current(), self.durable
        if current == durable:
            return current
        size = len(current if rng.random() < chance else durable)
        longest = max(len(current), len(durable))
        current, mixed = current.ljust(longest, b"\0"), bytearray(durable.ljust(longest, b"\0"))
        for start in range(0, longest, unit):
            part = slice(start, start + unit)
            if mixed[part] != current[part] and rng.random() < chance:
                mixed[part] = current[part]
        return bytes(mixed[:size])

    def close(self) -> None:
        os.close(self._descriptor)


@dataclasses.dataclass(frozen=True)
class _Change:
    """Something done to a folder's names since its last sync: what it takes away and what it gives a name."""

    gone: str | None
    name: str | None
    inode: "_File | _Folder"

    def touches(self) -> set[object]:
        return {self.gone, self.name, self.inode.number} - {None}

    def apply(self, names: "dict[str, _File | _Folder]") -> None:
        if self.gone is not None:
            del names[self.gone]
        if self.name is not None:
            names[self.name] = self.inode


class _Folder:
    """A folder: its names on the disk, its names now, and the way from the ones to the others."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.number = Path(path).stat().st_ino
        self.durable: dict[str, _File | _Folder] = {}
        self.current: dict[str, _File | _Folder] = {}
        self.changes: list[_Change] = []

    def look(self, disk: "Disk") -> None:
        """Takes down what has changed since the last look."""
        with os.scandir(self.path) as entries:
            found = {entry.name: entry.inode() for entry in entries}
        known = {inode.number: name for name, inode in self.current.items()}
        for name, number in sorted(found.items()):
            if name in self.current and self.current[name].number == number:
                continue
            earlier = known.get(number)
            if earlier is None or found.get(earlier) == number:
                change = _Change(None, name, disk.meet(f"{self.path}/{name}"))
            else:
                change = _Change(earlier, name, self.current[earlier])
            change.apply(self.current)
            self.changes.append(change)
        for name in sorted(self.current.keys() - found.keys()):
            change = _Change(name, None, self.current[name])
            change.apply(self.current)
            self.changes.append(change)

    def sync(self) -> None:
        self.durable, self.changes = dict(self.current), []

    def after_cut(self, rng: np.random.Generator, chance: float) -> "dict[str, _File | _Folder]":
        names = dict(self.durable)
        undone: set[object] = set()
        for change in self.changes:
            if undone & change.touches() or rng.random() >= chance:
                undone |= change.touches()
            else:
                change.apply(names)
        return names

    def inodes(self) -> "set[_File | _Folder]":
        return {*self.durable.values(), *self.current.values(), *(change.inode for change in self.changes)}


class Disk:
    """What is on the disk of everything below a folder, in which one thread works.

    Syncs of these files cost no time, and none that are elsewhere are made either.

    Args:
        root: The folder; what is in it counts as synced.
        rng: Draws what reaches the disk by itself.
        at_moment: Called before and after each call that syncs or changes names, with what it is.
    """

    def __init__(self, root: Path, rng: np.random.Generator, at_moment: Callable[[str], None]) -> None:
        self._rng = rng
        self._at_moment = at_moment
        self._inodes: dict[int, _File | _Folder] = {}
        self._folders: dict[str, _Folder] = {}
        self._is_busy = False
        self._next_sync_fails = -1
        self.root = _Folder(str(root))
        self._folders[self.root.path] = self._inodes[self.root.number] = self.root
        self.root.look(self)
        for inode in self._inodes.values():
            inode.sync()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Puts itself under the calls."""
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self._sync)
        for name in ("rename", "replace", "unlink", "mkdir"):
            patch.setattr(os, name, self._changing(name, getattr(os, name)))
        patch.setattr(os, "open", self._open)

    def fail_a_sync(self, after: int) -> None:
        """Makes one of the next syncs fail."""
        self._next_sync_fails = after

    def close(self) -> None:
        """Closes the files."""
        self._is_busy = True  # whatever still works on them no longer counts
        for inode in self._inodes.values():
            if isinstance(inode, _File):
                inode.close()
        self._inodes.clear()

    def cut(self, target: Path) -> None:
        """Builds what a power cut at this moment may leave, as another start of the machine finds it."""
        self._look_everywhere()
        names, pages = self._rng.choice([0.0, 0.1, 0.5, 0.9, 1.0], size=2)
        unit = int(self._rng.choice([PAGE_BYTES, SECTOR_BYTES]))
        self._build(self.root, target, names, pages, unit)

    def meet(self, path: str) -> _File | _Folder:
        """Takes up something new."""
        inode: _File | _Folder
        if Path(path).is_dir():
            inode = self._folders[path] = _Folder(path)
            inode.look(self)
        else:
            inode = _File(path)
        self._inodes[inode.number] = inode
        return inode

    def moment(self, what: str) -> None:
        """Something may reach the disk, and something may be done by whoever asked for it."""
        if self._is_busy:
            return
        self._is_busy = True
        try:
            if self._rng.random() < 0.1:
                self._look_everywhere()
                chance = self._rng.random()
                for inode in self._inodes.values():
                    if isinstance(inode, _File) and self._rng.random() < 0.3:
                        inode.write_back(self._rng, chance)
            self._at_moment(what)
        finally:
            self._is_busy = False

    def _look_everywhere(self) -> None:
        for folder in list(self._folders.values()):
            folder.look(self)

    def _build(self, folder: _Folder, target: Path, names: float, pages: float, unit: int) -> None:
        target.mkdir()
        for name, inode in folder.after_cut(self._rng, names).items():
            if isinstance(inode, _Folder):
                self._build(inode, target / name, names, pages, unit)
                continue
            is_header = name in {"live", ".live.tmp"}
            content = bytearray(inode.after_cut(self._rng, pages, SECTOR_BYTES if is_header else unit))
            if is_header and len(content) >= _BOOT_ID.stop:
                content[_BOOT_ID] = self._rng.bytes(16)
            (target / name).write_bytes(content)

    def _sync(self, descriptor: int) -> None:
        if self._is_busy:
            return
        number = os.fstat(descriptor).st_ino
        if number not in self._inodes:
            self._look_everywhere()
        inode = self._inodes.get(number)
        if inode is None:
            return
        if isinstance(inode, _Folder):
            inode.look(self)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        self.moment(f"before sync of {path}")
        self._next_sync_fails -= 1
        if self._next_sync_fails == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        inode.sync()
        if isinstance(inode, _Folder):
            self._forget()
        self.moment(f"after sync of {path}")

    def _forget(self) -> None:
        """Closes the files that no cut can bring back."""
        reachable = {inode for folder in self._folders.values() for inode in folder.inodes()} | {self.root}
        for number, inode in list(self._inodes.items()):
            if inode not in reachable:
                assert isinstance(inode, _File), "stores remove no folders"
                inode.close()
                del self._inodes[number]

    def _open(self, path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        descriptor: int = _real_open(path, flags, *arguments, **options)
        if flags & os.O_CREAT and not self._is_busy and (folder := self._folder_of(path)):
            folder.look(self)
            self.moment(f"after opening {path}")
        return descriptor

    def _changing(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        def change(path: Any, *arguments: Any, **options: Any) -> None:
            folder = None if self._is_busy else self._folder_of(path)
            if folder is None:
                call(path, *arguments, **options)
                return
            folder.look(self)
            self.moment(f"before {name} of {path}")
            call(path, *arguments, **options)
            folder.look(self)
            self.moment(f"after {name} of {path}")

        return change

    def _folder_of(self, path: Any) -> _Folder | None:
        return self._folders.get(str(Path(path).parent)) if isinstance(path, str | os.PathLike) else None


_real_open = os.open
