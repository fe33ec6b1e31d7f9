"""Chunks as they are in memory: C-order rows, nothing before, between or behind them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.store.chunk_formats.one_column import OneColumnAnObject, check_rows
from diskbuf.store.layout import array_document


class RawChunks(OneColumnAnObject):
    """The layout of a zarr array without compression: an object is the raw chunk file itself."""

    has_fixed_size = True

    def encode(self, group: int, chunk: int, rows: Sequence[NDArray[Any]]) -> bytes | memoryview:
        """Returns the rows' own memory where it is a whole chunk, so it lives and changes with them."""
        column = self.layouts[group]
        count = check_rows(column, chunk, rows[0].shape)
        if count == column.chunk_rows and rows[0].flags.c_contiguous:
            raw = rows[0]
        else:
            raw = np.zeros((column.chunk_rows, column.lanes, *column.shape), column.dtype)
            raw[:count] = rows[0]
        return raw.reshape(-1).view(np.uint8).data if column.chunk_bytes else b""

    def decode(self, group: int, chunk: int, data: bytes | memoryview, into: Sequence[NDArray[Any] | None]) -> None:
        """Copies the rows."""
        column = self.layouts[group]
        if len(data) != column.chunk_bytes:
            raise ValueError(f"a raw chunk must have {column.chunk_bytes} bytes, got {len(data)}.")
        rows = into[0]
        if rows is None:
            return
        count = check_rows(column, chunk, rows.shape)
        if column.chunk_bytes:
            source = np.frombuffer(data, column.dtype, count * column.row_bytes // column.dtype.itemsize)
            np.copyto(rows, source.reshape(rows.shape))

    def documents(self) -> dict[str, Any]:
        """Those of arrays with the one codec "bytes"."""
        return {column.file_path: array_document(column) for column in self.layouts}

    def raw_offsets(self, group: int, chunk: int, data: bytes | memoryview) -> list[int | None]:  # noqa: ARG002
        """The whole object is the chunk, where it is whole."""
        return [0 if len(data) == self.layouts[group].chunk_bytes else None]
