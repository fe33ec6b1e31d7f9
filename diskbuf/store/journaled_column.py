"""A column some of whose last rows are only in the journal: a power cut came before they were in its chunk files."""
# ruff: noqa: D102 - Column documents the contract

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.store.columns import Column, OpenedChunk, Tail


class JournaledColumn(Column):
    """Another column, for reading, with rows laid over its last ones.

    Args:
        column: The column; its chunks hold every id, but not what they must say for those laid over.
        first_id: Id of the first row laid over.
        rows: [T, lanes, *shape] what they say.
    """

    def __init__(self, column: Column, first_id: int, rows: NDArray[Any]) -> None:
        super().__init__(column.layout, column.folder, writable=False)
        self._column = column
        self._first_id = first_id
        self._rows = rows
        self.attached = column.attached

    def attach(self, chunk: int, opened: OpenedChunk | None = None) -> None:
        self._column.attach(chunk, opened)

    def detach(self, chunk: int) -> None:
        self._column.detach(chunk)

    def offset(self, first_id: int) -> int:
        return first_id * self.layout.lanes

    def take(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        ids, lanes = np.divmod(rows, self.layout.lanes)
        offset: Any = self._column.offset  # plain arithmetic, of arrays too
        taken = np.asarray(self._column.take(np.asarray(offset(ids) + lanes)))
        over = np.asarray(ids - self._first_id)
        is_over = over >= 0
        taken[is_over] = self._rows[over[is_over], np.asarray(lanes)[is_over]]
        return taken

    def read_span(self, first_id: int, count: int) -> NDArray[Any]:
        span = self._column.read_span(first_id, count)
        begin = max(0, self._first_id - first_id)
        if begin >= count:
            return span
        span = span.copy()
        low = first_id + begin - self._first_id
        span[begin:] = self._rows[low : low + count - begin]
        return span

    def needs_space(self, *, is_hot: bool) -> bool:
        return self._column.needs_space(is_hot=is_hot)

    def tail(self, first_id: int, count: int, *, descriptor: int, is_hot: bool) -> Tail:
        raise NotImplementedError("a writer settles the journal first")
