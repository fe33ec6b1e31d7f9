"""The writer's lock: one process at a time writes a store; the kernel frees it when that process dies."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import weakref
from pathlib import Path
from typing import NamedTuple

from diskbuf.errors import StoreLockedError, StoreLockUnsupportedError

_LOCKS = Path("/proc/locks")
_CANNOT_LOCK = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})


class WriterLock:
    """Holds a store's lock file until closed.

    An flock, because it is freed when its process ends, however that happens. A forked child drops its copy of the
    descriptor, so that it can't keep the lock of a dead parent.

    Args:
        path: The lock file, created when missing.
        store: The store's path, for messages.
        is_taken: Whether the lock is taken at all; if not, the caller makes sure that one process writes.

    Raises:
        StoreLockedError: When another process, or this one, has the store open for writing.
        StoreLockUnsupportedError: When the file system doesn't lock files.
    """

    def __init__(self, path: Path, *, store: str, is_taken: bool = True) -> None:
        self._descriptor = -1
        if not is_taken:
            return
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _holder(self._descriptor)
            os.close(self._descriptor)
            pid, host = holder
            is_own = pid == os.getpid() and host == socket.gethostname()
            who = "another process" if pid is None else f"process {pid} on host {host}"
            if is_own:
                who += ", which is this one,"
            raise StoreLockedError(
                f"cannot open {store} for writing: {who} has it open. Close that {'buffer' if is_own else 'one'}, "
                "or read the store with diskbuf.open(path).",
                path=store,
                pid=pid,
                host=host,
            ) from error
        except OSError as error:
            os.close(self._descriptor)
            if error.errno not in _CANNOT_LOCK:
                raise
            raise StoreLockUnsupportedError(
                f"cannot lock {store} for writing: its file system doesn't lock files ({error.strerror}). Make sure "
                "that no other process writes it and give lock=False, in diskbuf.StoreOptions or to diskbuf.repair.",
                path=store,
            ) from error
        except BaseException:
            os.close(self._descriptor)
            raise
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        os.ftruncate(self._descriptor, 0)
        with contextlib.suppress(OSError):  # on a full disk it is held without a name; it may be what makes room
            os.pwrite(self._descriptor, text, 0)
        self._pid = os.getpid()
        _held.add(self)

    def close(self) -> None:
        """Frees the lock; closing twice is fine."""
        _held.discard(self)
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            if self._pid == os.getpid():
                os.ftruncate(descriptor, 0)  # nobody holds it any more
            os.close(descriptor)


class Holder(NamedTuple):
    """Who holds a lock, or held it last and never let go of it.

    Attributes:
        pid: Its process id, None where it can't be read.
        host: Its host name, None where it can't be read.
        is_alive: Whether it holds the lock now; None where that can't be told from here.
    """

    pid: int | None
    host: str | None
    is_alive: bool | None


def holder_of(path: Path) -> Holder | None:
    """Tells who holds a lock file, without trying to take it: whoever did would be refused in that moment.

    Linux lists the locks of its processes in ``/proc/locks`` (man 5 proc). Elsewhere it is known by its process alone.

    Args:
        path: The lock file.

    Returns:
        The holder; None when the last one let go of it, or there has never been one.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        pid, host = _holder(descriptor)
    finally:
        os.close(descriptor)
    here = socket.gethostname()
    try:
        listed = _listed_holder(_LOCKS.read_text(encoding="ascii"), status, pid)
    except (OSError, ValueError):
        is_known = pid is not None and host == here
        return None if pid is None else Holder(pid, host, _is_running(pid) if is_known else None)
    if listed is not None:
        return Holder(listed or pid, here, is_alive=True)
    if pid is None:
        return None
    return Holder(pid, host, is_alive=False if host == here else None)


def _listed_holder(locks: str, status: os.stat_result, pid: int | None) -> int | None:
    """The process that holds an flock of a file as the kernel lists it; 0 for one that can't be named from here."""
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for line in locks.splitlines():
        words = line.split()
        if len(words) < 6 or words[1] != "FLOCK" or words[3] != "WRITE":
            continue
        place, _, inode = words[5].rpartition(":")
        # Some file systems are listed by another device than stat tells; then the process must be the one it names.
        if inode == str(status.st_ino) and (place == device or words[4] == str(pid)):
            return max(0, int(words[4]))
    return None


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # somebody else's
        return True
    return True


def _holder(descriptor: int) -> tuple[int | None, str | None]:
    with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
        said = json.loads(os.pread(descriptor, 4096, 0))
        return int(said["pid"]), str(said["host"])
    return None, None


_held: "weakref.WeakSet[WriterLock]" = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_drop_in_child)
