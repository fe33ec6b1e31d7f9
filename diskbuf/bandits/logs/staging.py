"""What is made beside a store until it is whole: a folder with a lock, swept clean of what a killed process left."""

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import google_crc32c
import numpy as np
import numpy.typing as npt

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
            os.rename(self.store, self.path)  # noqa: PTH104 - the level at which it is one step
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


class StagedRows:
    """Columns of rows in plain files, appended block by block and read back as mapped arrays.

    Args:
        folder: Where the files go.
        columns: The dtype and the shape of a row of each column, by name.
    """

    def __init__(self, folder: Path, columns: Mapping[str, tuple[npt.DTypeLike, tuple[int, ...]]]) -> None:
        self._columns = {name: (np.dtype(dtype), shape) for name, (dtype, shape) in columns.items()}
        self._paths = {name: folder / f"{name}.rows" for name in columns}
        self._files = {name: path.open("wb", buffering=0) for name, path in self._paths.items()}
        self._checksums = dict.fromkeys(columns, 0)
        self.rows = 0

    def append(self, rows: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Appends rows [N, *shape] of every column."""
        for name, (dtype, _) in self._columns.items():
            array = np.ascontiguousarray(arrays[name], dtype)
            if not array.nbytes:
                continue
            view = array.reshape(-1).view(np.uint8).data
            while view:
                view = view[self._files[name].write(view) or 0 :]
            self._checksums[name] = checksum_on(self._checksums[name], array)
        self.rows += rows

    @property
    def nothing(self) -> tuple[int, dict[str, int]]:
        """The mark before the first row."""
        return 0, dict.fromkeys(self._columns, 0)

    def leaves(self) -> dict[str, tuple[npt.DTypeLike, tuple[int, ...]]]:
        """Returns the dtype and the shape of each column."""
        return {**self._columns}

    def mark(self) -> tuple[int, dict[str, int]]:
        """Returns where it is, for `go_back`."""
        return self.rows, dict(self._checksums)

    def go_back(self, mark: tuple[int, dict[str, int]]) -> None:
        """Forgets the rows that were appended since a mark."""
        self.rows, self._checksums = mark[0], dict(mark[1])
        for name, (dtype, shape) in self._columns.items():
            self._files[name].truncate(self.rows * _row_bytes(dtype, shape))
            self._files[name].seek(0, os.SEEK_END)

    def digest(self) -> str:
        """Returns what tells these rows from others: CRC-32C of each column."""
        return digest_of(self._checksums)

    def array(self, name: str) -> npt.NDArray[Any]:
        """Returns a column [N, *shape], mapped from its file."""
        dtype, shape = self._columns[name]
        if not self.rows or not _row_bytes(dtype, shape):
            return np.zeros((self.rows, *shape), dtype)
        return np.memmap(self._paths[name], dtype, "r", shape=(self.rows, *shape))

    def close(self) -> None:
        """Closes the files; closing twice is fine."""
        for file in self._files.values():
            file.close()


def checksum_on(checksum: int, array: npt.NDArray[Any]) -> int:
    """Returns the CRC-32C of what had one, and of an array in C order behind it."""
    return int(google_crc32c.extend(checksum, array.reshape(-1).view(np.uint8)))


def digest_of(checksums: Mapping[str, int]) -> str:
    """Returns what tells rows from others: CRC-32C of each column; codes stand in the columns they become."""
    return "-".join(f"{name}:{checksum:08x}" for name, checksum in sorted(checksums.items()) if name != "codes")


def _row_bytes(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
