"""A folder of files that together stay within a number of bytes, whoever uses it: those unused for longest go first.

Knows names, sizes and times, not what is in the files. Several processes, and threads, may use one folder at a time.
The count of bytes is kept in the lock file, so that the folder is listed only when it seems to be full.
"""

import contextlib
import dataclasses
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from diskbuf.errors import OptionError
from diskbuf.store import files

_LOCK_FILE: Final = ".lock"
_BOOTS_FILE: Final = ".diskbuf-cache"  # and the sign that this is a cache's folder
_NEW_PREFIX: Final = ".new-"
_FOREIGN_FINE: Final = frozenset({"lost+found"})  # of a disk that is mounted for the cache
_MAGIC: Final = b"dbcache1"
_COUNT_BYTES: Final = 8

_KEPT_SHARE: Final = 0.9
"""What eviction leaves of the most bytes, so that the folder isn't listed for each new chunk."""

_WRITTEN_BACK_SECONDS: Final = 600
"""By then a kernel that writes pages back after 30 seconds (Linux's vm.dirty_expire_centisecs) surely has."""

_LEFTOVER_SECONDS: Final = 3600
_MOST_BOOTS: Final = 16
_TRIES: Final = 100
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_CANNOT_LOCK: Final = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
_CANNOT_WRITE: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewFile:
    """A file that is being written.

    Attributes:
        size: Its bytes.
        path: Where it is until it gets its name; None when there is no room to keep it: it has no name then.
        descriptor: Open for reading and writing.
        reading: Open for reading.
    """

    size: int
    path: str | None
    descriptor: int
    reading: int


class _Entry(NamedTuple):
    used_ns: int
    size: int
    path: str
    written_ns: int


class CacheFolder:
    """A folder of files within a number of bytes.

    A file is new until it is put under its key, by a rename; a process that is killed meanwhile leaves a file that the
    next one removes, since nobody holds its lock any more. Files in the making count like the others. Where files
    can't be locked, leftovers go after an hour, and the folder is listed for every new file.

    When a file was last used is its access time, set on every `find`; when it was written is its modification time.
    Files aren't synced. After a start of the machine those of the last ten minutes before are dropped: a power cut may
    have left zeros in them.

    Args:
        path: The folder; created, for its owner alone, when missing.
        most_bytes: Most bytes of all files in it, at least 1.

    Attributes:
        path: The folder.
        most_bytes: Most bytes of all files in it.

    Raises:
        OptionError: When the folder can't be written, belongs to another user, is writable by all, or holds files that
            aren't a cache's. Files would be removed from it, and others could slip some in.
        OSError: When it can't be used for another reason, such as a full disk.
    """

    def __init__(self, path: Path, *, most_bytes: int) -> None:
        if isinstance(most_bytes, bool) or not isinstance(most_bytes, int) or most_bytes < 1:
            raise OptionError(f"most_bytes must be an int of at least 1, got {most_bytes!r}.")
        self.path = path
        self.most_bytes = most_bytes
        self._text = os.fspath(path)
        self._owner = self._prepare()
        with self._locked():
            self._drop_what_a_power_cut_may_have_torn()
        self._remove_leftovers()

    def find(self, key: str, *, size: int) -> int | None:
        """Opens the file of a key for reading and marks it as used; None without one of that size that is ours.

        Raises:
            OSError: When a file that is there can't be opened for want of something else, such as descriptors.
        """
        path = f"{self._text}/{key}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.ENXIO}:
                return None
            raise
        try:
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_uid == self._owner:
                if status.st_size == size:
                    with contextlib.suppress(OSError):
                        os.utime(descriptor, ns=(time.time_ns(), status.st_mtime_ns))
                    found, descriptor = descriptor, -1
                    return found
                with contextlib.suppress(OSError):
                    os.unlink(path)
            return None
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def make(self, size: int) -> NewFile:
        """Makes a file of `size` bytes, removing others where needed; it takes no space on the disk yet.

        Raises:
            OSError: When it can't be made.
        """
        with self._locked() as lock:
            new = self._create(size=size, is_kept=self._take(lock, size))
            try:
                os.ftruncate(new.descriptor, size)  # under the lock, so that whoever lists the folder sees its size
            except BaseException:
                os.close(new.descriptor)
                os.close(new.reading)
                if new.path is not None:
                    os.unlink(new.path)
                raise
            return new

    def put(self, new: NewFile, key: str) -> None:
        """Gives a new file its name, in place of what has it.

        A file that is gone, because somebody emptied the folder, counts as put and removed again.

        Raises:
            OSError: When it can't be named so.
        """
        if new.path is None:
            return
        now = time.time_ns()
        os.utime(new.descriptor, ns=(now, now))
        self._rename(new.path, key)

    def discard(self, new: NewFile) -> None:
        """Removes a new file."""
        if new.path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new.path)
                with self._locked() as lock:
                    self._note(lock, -new.size)

    def adopt(self, path: str, key: str) -> bool:
        """Moves a file of ours that is elsewhere into the folder by a rename; False, and nothing moved, if it can't."""
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != self._owner or not status.st_size:
                return False
            with self._locked() as lock:
                if not self._take(lock, status.st_size):
                    return False
                is_moved = False
                try:
                    is_moved = self._rename(path, key)
                    if is_moved:
                        now = time.time_ns()
                        with contextlib.suppress(OSError):
                            os.utime(f"{self._text}/{key}", ns=(now, now), follow_symlinks=False)
                finally:
                    if not is_moved:
                        self._note(lock, -status.st_size)
                return is_moved
        return False

    def with_room(self, size: int, write: Callable[[], None]) -> None:
        """Calls `write`, and again after removing files when the disk is full.

        Raises:
            OSError: ENOSPC when it is full and nothing more can be removed; whatever else `write` raises.
        """
        while True:
            try:
                write()
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                if not self._free(size):
                    raise OSError(
                        errno.ENOSPC,
                        f"{self._text} must have room for a chunk of {size} bytes, but its disk (or a quota) is full. "
                        "Free some space there, name another cache_dir, or ':memory:' to keep chunks in memory",
                    ) from error
            else:
                return

    def _prepare(self) -> int:
        """Makes sure that the folder is a cache's, and returns who owns what we write there.

        That need not be our user number: a network file system may map it.
        """
        other = "Name another, or ':memory:' to keep chunks in memory."
        try:
            os.makedirs(self._text, mode=0o700, exist_ok=True)
            new = self._create(size=0, is_kept=False)
        except OSError as error:
            if error.errno not in _CANNOT_WRITE:
                raise
            raise OptionError(
                f"cache_dir must be a folder that can be written, got {self._text!r} ({error.strerror}). {other}"
            ) from error
        owner = os.fstat(new.descriptor).st_uid
        os.close(new.descriptor)
        os.close(new.reading)
        status = os.stat(self._text)
        if status.st_uid != owner:
            raise OptionError(
                f"cache_dir must be a folder of the user {owner}, who reads, got {self._text!r}, which belongs to the "
                f"user {status.st_uid}. {other}"
            )
        if status.st_mode & stat.S_IWOTH:
            raise OptionError(
                f"cache_dir must be a folder that others can't write to, got {self._text!r} with mode "
                f"{stat.S_IMODE(status.st_mode):o}. Take that right away (chmod o-w). {other}"
            )
        foreign = [name for name in os.listdir(self._text) if not name.startswith(".") and name not in _FOREIGN_FINE]
        if foreign and not self._is_marked():
            raise OptionError(
                f"cache_dir must be a folder of its own, since files are removed from it, got {self._text!r}, which "
                f"holds {min(foreign)!r}. {other}"
            )
        return owner

    def _is_marked(self) -> bool:
        if os.path.lexists(f"{self._text}/{_BOOTS_FILE}"):
            return True
        try:  # a cache that was removed while it was in use has only this
            with open(f"{self._text}/{_LOCK_FILE}", "rb") as file:
                return file.read(len(_MAGIC)) == _MAGIC
        except OSError:
            return False

    def _create(self, *, size: int, is_kept: bool) -> NewFile:
        """Makes an empty file and locks it, so that nobody takes it for a leftover."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return self._create_once(size=size, is_kept=is_kept)
            os.makedirs(self._text, mode=0o700, exist_ok=True)  # the folder may have been removed
        return self._create_once(size=size, is_kept=is_kept)

    def _create_once(self, *, size: int, is_kept: bool) -> NewFile:
        path = f"{self._text}/{_NEW_PREFIX}{os.getpid()}-{os.urandom(8).hex()}"
        descriptor = reading = -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            _lock_file(descriptor, wait=True)
            reading = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            if not is_kept:
                os.unlink(path)
            elif not os.fstat(descriptor).st_nlink:  # it was taken for a leftover before it was locked
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return NewFile(size=size, path=path if is_kept else None, descriptor=descriptor, reading=reading)
        except BaseException:
            for opened in (descriptor, reading):
                if opened >= 0:
                    os.close(opened)
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise

    def _rename(self, path: str, key: str) -> bool:
        """Renames a file to the place of its key, whose folders others may be removing; False when it is gone."""
        target = f"{self._text}/{key}"
        for _ in range(_TRIES):
            try:
                os.rename(path, target)
                return True
            except FileNotFoundError:
                if not os.path.lexists(path):
                    return False
                with contextlib.suppress(FileNotFoundError):
                    os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        os.rename(path, target)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Keeps other processes and threads out; yields the lock file's descriptor."""
        path = f"{self._text}/{_LOCK_FILE}"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(path, flags, 0o600)
        except FileNotFoundError:  # the folder was removed
            os.makedirs(self._text, mode=0o700, exist_ok=True)
            descriptor = os.open(path, flags, 0o600)
        try:
            is_locked = _lock_file(descriptor, wait=True)
            try:
                if not is_locked:
                    os.ftruncate(descriptor, 0)  # a count that others change meanwhile is worth nothing
                yield descriptor
            finally:
                if is_locked:
                    # Closing isn't enough: a process that was forked meanwhile has the descriptor too.
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    def _take(self, lock: int, size: int) -> bool:
        """Counts the bytes of a new file and removes others to stay within the most; False when it can't fit."""
        if size > self.most_bytes:
            return False
        used = _count(lock)
        if used is None or used + size > self.most_bytes:
            entries, used = self._list()
            if used + size > self.most_bytes:
                used = self._remove(entries, used, at_most=min(self.most_bytes - size, _share(self.most_bytes)))
        fits = used + size <= self.most_bytes
        _set_count(lock, used + size if fits else used)
        return fits

    def _note(self, lock: int, change: int) -> None:
        used = _count(lock)
        if used is not None:
            _set_count(lock, max(0, used + change))

    def _free(self, size: int) -> bool:
        """Removes at least `size` bytes of files, as far as there are any; whether one was removed."""
        with self._locked() as lock:
            entries, used = self._list()
            left = self._remove(entries, used, at_most=max(0, used - size))
            _set_count(lock, left)
        return left < used

    def _list(self) -> tuple[list[_Entry], int]:
        """Lists the files that may be removed, and counts the bytes of all. Leftovers go."""
        self._remove_leftovers()
        found: dict[int, _Entry] = {}
        making: dict[int, int] = {}
        # The folder itself comes first: a file in the making that gets its name meanwhile is seen there or below.
        folders = [self._text]
        while folders:
            for entry in _entries(folders.pop(0)):
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                        continue
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.startswith(_NEW_PREFIX):
                        making[status.st_ino] = status.st_size
                    elif not entry.name.startswith("."):
                        found[status.st_ino] = _Entry(
                            status.st_atime_ns, status.st_size, entry.path, status.st_mtime_ns
                        )
        used = sum(entry.size for entry in found.values())
        used += sum(size for inode, size in making.items() if inode not in found)
        return list(found.values()), used

    def _remove(self, entries: list[_Entry], used: int, *, at_most: int) -> int:
        """Removes the files that were not used for longest; returns the bytes that are left."""
        for entry in sorted(entries):
            if used <= at_most:
                break
            if self._remove_file(entry.path):
                used -= entry.size
        return used

    def _remove_file(self, path: str) -> bool:
        """Removes a file and the folders that it leaves empty; whether it is gone."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        folder = os.path.dirname(path)
        with contextlib.suppress(OSError):
            while folder != self._text:
                os.rmdir(folder)
                folder = os.path.dirname(folder)
        return True

    def _remove_leftovers(self) -> None:
        """Removes files in the making whose process is gone."""
        for entry in _entries(self._text):
            if entry.name.startswith(_NEW_PREFIX):
                with contextlib.suppress(OSError):
                    descriptor = os.open(entry.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                    try:
                        is_locked = _lock_file(descriptor, wait=False)
                        if is_locked or time.time() - os.fstat(descriptor).st_mtime > _LEFTOVER_SECONDS:
                            os.unlink(entry.path)
                    except BlockingIOError:
                        pass  # its process is alive
                    finally:
                        os.close(descriptor)

    def _drop_what_a_power_cut_may_have_torn(self) -> None:
        """Once after each start of the machine, removes the files that were written last before it."""
        boot = files.boot_id().hex()
        path = Path(self._text, _BOOTS_FILE)
        try:
            boots = path.read_text(encoding="ascii").split()
        except (OSError, ValueError):
            boots = []
        if boot in boots:
            return
        entries, _ = self._list()
        latest = max((entry.written_ns for entry in entries), default=0)
        for entry in entries:
            if entry.written_ns >= latest - _WRITTEN_BACK_SECONDS * 10**9:
                self._remove_file(entry.path)
        files.replace_file(path, "\n".join([*boots[1 - _MOST_BOOTS :], boot]).encode(), sync=True)


def _share(most_bytes: int) -> int:
    return int(most_bytes * _KEPT_SHARE)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as listing:
            return [entry for entry in listing if entry.name not in _FOREIGN_FINE]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _lock_file(descriptor: int, *, wait: bool) -> bool:
    """Locks a file; False where the file system can't.

    Raises:
        BlockingIOError: When another has it and we don't wait.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return True
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        return False


def _count(lock: int) -> int | None:
    """The bytes of all files as the lock file has them, never too few; None when it has none."""
    text = os.pread(lock, len(_MAGIC) + _COUNT_BYTES + 1, 0)
    if len(text) != len(_MAGIC) + _COUNT_BYTES or not text.startswith(_MAGIC):
        return None
    return int.from_bytes(text[len(_MAGIC) :], "little")


def _set_count(lock: int, used: int) -> None:
    text = _MAGIC + used.to_bytes(_COUNT_BYTES, "little")
    if os.pwrite(lock, text, 0) != len(text):
        os.ftruncate(lock, 0)
