"""Every error diskbuf raises, in one tree.

    DiskbufError
    ├── SpecError (ValueError)              items or a spec that don't fit the data_spec
    ├── OptionError (ValueError)            an argument or option outside its rule
    ├── WindowError (IndexError)            ids or steps that the window doesn't hold
    │   └── EmptyBufferError                nothing to read yet
    ├── EndOfLogError (EOFError)            a bandit log that was replayed to its end
    ├── ReadOnlyError (UnsupportedOperation)  a write through a buffer opened for reading
    ├── ClosedError (ValueError)            any use after close()
    ├── BusyError (RuntimeError)            a signal handler that comes back into a call it interrupts
    ├── MissingExtraError (ImportError)     an optional package that isn't installed
    └── StoreError
        ├── StoreNotFoundError (FileNotFoundError)  no store at that path
        ├── StoreExistsError (FileExistsError)      mode "w-" on a path that is taken
        ├── StoreLockedError (BlockingIOError)      another process writes this store
        ├── StoreLockUnsupportedError (OSError)     a file system without locks
        ├── StoreMismatchError (ValueError)         the store was made with another spec, lanes or kind
        ├── StoreFormatError (ValueError)           a format this version can't read
        ├── StoreAccessError (PermissionError)      a remote store that refuses our credentials
        ├── StoreUnreachableError (ConnectionError) requests that failed, and failed again
        └── StoreCorruptError (OSError)             a file that is missing, short or unreadable

Errors of the file system (a full disk is ``OSError`` with ``ENOSPC``) pass through as they are.
A message says what must hold, what came instead, where, and one thing to do.
"""

import io
from collections.abc import Sequence


class DiskbufError(Exception):
    """Root of everything that diskbuf raises on purpose."""


class SpecError(DiskbufError, ValueError):
    """Items or a spec that don't fit the data_spec.

    Attributes:
        path: The leaf as the user would write it (``observation/camera``), or None for the whole nest.
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class OptionError(DiskbufError, ValueError):
    """An argument or option outside its rule."""


class WindowError(DiskbufError, IndexError):
    """Ids or steps that the window doesn't hold."""


class EmptyBufferError(WindowError):
    """Nothing to read yet."""


class EndOfLogError(DiskbufError, EOFError):
    """A bandit log that was replayed to its end."""


class ReadOnlyError(DiskbufError, io.UnsupportedOperation):
    """A write through a buffer that was opened for reading."""


class ClosedError(DiskbufError, ValueError):
    """Any use of a buffer after close()."""


class BusyError(DiskbufError, RuntimeError):
    """A signal handler that comes back into a call it interrupts."""


class MissingExtraError(DiskbufError, ImportError):
    """An optional package that isn't installed; the message names the extra that brings it."""


class StoreError(DiskbufError):
    """Root of what can be wrong with the files of a store.

    Attributes:
        path: The store, or the file inside it.
    """

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class StoreNotFoundError(StoreError, FileNotFoundError):
    """No store at that path."""


class StoreExistsError(StoreError, FileExistsError):
    """The path is taken, and mode "w-" only creates."""


class StoreLockedError(StoreError, BlockingIOError):
    """Another process has the store open for writing.

    Attributes:
        pid: Its process id, None when it couldn't be read.
        host: Its host name, None when it couldn't be read.
    """

    def __init__(
        self, message: str, *, path: str | None = None, pid: int | None = None, host: str | None = None
    ) -> None:
        super().__init__(message, path=path)
        self.pid = pid
        self.host = host


class StoreLockUnsupportedError(StoreError, OSError):
    """The file system doesn't lock files, so nobody can tell whether another process writes the store.

    Not a StoreLockedError: waiting doesn't help.
    """


class StoreMismatchError(StoreError, ValueError):
    """The store was made with another spec, lanes or kind.

    Attributes:
        differences: One line each, the store's value first.
    """

    def __init__(self, message: str, *, path: str | None = None, differences: Sequence[str] = ()) -> None:
        super().__init__(message, path=path)
        self.differences = tuple(differences)


class StoreFormatError(StoreError, ValueError):
    """A format that this version can't read.

    Attributes:
        is_newer: Whether a newer version of diskbuf wrote it, which then reads it.
    """

    def __init__(self, message: str, *, path: str | None = None, is_newer: bool = False) -> None:
        super().__init__(message, path=path)
        self.is_newer = is_newer


class StoreAccessError(StoreError, PermissionError):
    """A remote store that refuses our credentials, or has been given none."""


class StoreUnreachableError(StoreError, ConnectionError):
    """A remote store whose requests failed, and failed again after waiting; `path` names the object."""


class StoreCorruptError(StoreError, OSError):
    """A file of the store that is missing, short or unreadable; `path` names it."""
