"""The writer's lock: one process at a time writes a store; the kernel frees it when that process dies."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import weakref
from pathlib import Path

from diskbuf.errors import StoreLockedError, StoreLockUnsupportedError

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


def _holder(descriptor: int) -> tuple[int | None, str | None]:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        said = json.loads(os.pread(descriptor, 4096, 0))
        return int(said["pid"]), str(said["host"])
    return None, None


_held: "weakref.WeakSet[WriterLock]" = weakref.WeakSet()


def _drop_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_drop_in_child)
