"""Rows of a log that wait beside the store, in plain files."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt


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
