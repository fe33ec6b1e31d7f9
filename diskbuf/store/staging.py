"""What is made beside its place until it is whole: a folder with a lock, swept clean of what a killed process left."""

import ctypes
import errno
import os
import shutil
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from diskbuf.errors import OptionError, StoreExistsError
from diskbuf.store import files
from diskbuf.store.lock import WriterLock

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # linux/fs.h


class Staging:
    """The folder `.NAME.staging` beside a store, for one process at a time.

    Entering it removes what a killed process left in it; leaving it removes the folder.

    Args:
        path: The store.

    Attributes:
        folder: The folder.
        store: Where a store is made in it.

    Raises:
        StoreLockedError: When another process makes something there.
        OSError: When it can't be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path.parent / f".{path.name}.staging"
        self.store = self.folder / "store.zarr"

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = WriterLock(self.folder / "lock", store=str(self.path))
        try:
            self._sweep()
        except BaseException:
            self._lock.close()
            raise
        return self

    def _sweep(self) -> None:
        for entry in self.folder.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()

    def move_into_place(self) -> None:
        """Renames the store made here to where it belongs, in one step.

        Raises:
            StoreExistsError: When something has come to be there.
        """
        files.sync_folder(self.folder)
        try:
            os.rename(self.store, self.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise StoreExistsError(
                f"cannot create a store at {self.path}: the path is taken.", path=str(self.path)
            ) from error
        files.sync_folder(self.path.parent)

    def swap_into_place(self) -> None:
        """Swaps the store made here with the one at the path, in one step; the old one goes with this folder.

        Raises:
            OptionError: When the system can't; nothing was changed.
        """
        files.sync_folder(self.folder)
        number = _exchange(self.store, self.path)
        if number:
            raise OptionError(
                "destination must be given here, as another path: this system or file system can't swap two folders "
                f"in one step ({os.strerror(number)})."
            )
        files.sync_folder(self.path.parent)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._sweep()
            (self.folder / "lock").unlink()
            self.folder.rmdir()
        finally:
            self._lock.close()


def _exchange(one: Path, other: Path) -> int:
    """Swaps two names by renameat2(2); the errno of a failure, 0 for none."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return errno.ENOSYS
    done = rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_RENAME_EXCHANGE))
    return 0 if done == 0 else ctypes.get_errno()
