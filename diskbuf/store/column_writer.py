"""The growing end of one column: its newest chunk, the space reserved in it, and what of it is not synced yet."""

import errno
import os
import weakref
from typing import TYPE_CHECKING

from diskbuf.store.columns import Column, PwriteTail, Tail

if TYPE_CHECKING:
    from diskbuf.store.writing import WritableStore

_LEAST_RESERVED_BYTES = 2**16
_MOST_RESERVED_BYTES = 2**21
_CANNOT_RESERVE = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS})


class ColumnWriter:
    """The growing end of one column: rolls to the next chunk, reserves space in it, knows what is not synced.

    Args:
        store: The store.
        number: Which of its columns.
        unsynced_from: Ids from here on may not have been synced by the run before.
        next_id: End of the window at the opening.
    """

    def __init__(self, store: "WritableStore", number: int, *, unsynced_from: int, next_id: int) -> None:
        self._store = weakref.proxy(store)
        self._number = number
        self._chunk = -1
        self._descriptor = -1
        self._reserved = 0
        self._is_hot = False
        self._can_reserve = True
        self._has_space = False
        self.dirty = set(self._column.layout.chunks(min(unsynced_from, next_id), next_id))
        self._has_new_names = bool(self.dirty)  # as the run before may have been killed before it synced the folder

    @property
    def _column(self) -> Column:
        return self._store.columns[self._number]  # type: ignore[no-any-return]

    def make_ready(self, next_id: int) -> int:
        """Makes an id writable; returns up to which id, exclusive, the ones behind it are too.

        Raises:
            OSError: When there is no room; what is in the window is untouched.
        """
        rows = self._column.layout.chunk_rows
        chunk, inside = divmod(next_id, rows)
        if chunk != self._chunk:
            self._roll(chunk)
        if inside >= self._reserved:
            self._reserve(chunk, inside)
        return chunk * rows + self._reserved

    def tail(self, first_id: int, count: int) -> Tail:
        """Returns where to write ids that are ready."""
        self.dirty.add(self._chunk)
        layout = self._column.layout
        if not self._can_reserve:
            return PwriteTail(
                self._descriptor, offset=first_id % layout.chunk_rows * layout.row_bytes, row_bytes=layout.row_bytes
            )
        return self._column.tail(first_id, count, descriptor=self._descriptor, is_hot=self._is_hot)

    @property
    def has_new_names(self) -> bool:
        """Whether the folder has names that may not be on the disk."""
        return self._has_new_names

    @property
    def chunk_start(self) -> int:
        """First id of the chunk being written."""
        return self._chunk * self._column.layout.chunk_rows

    def _roll(self, chunk: int) -> None:
        column, layout = self._column, self._column.layout
        left = self._chunk
        self.close()
        self._store.leave_chunk(self._number, left)
        path = column.chunk_path(chunk)
        old = column.attached.get(column.slot(chunk), chunk)
        is_hot = False
        if old != chunk:
            self._store.before_overwrite((old + 1) * layout.chunk_rows)
            del column.attached[column.slot(chunk)]  # interrupted here or behind, the next roll attaches it anew
            os.rename(column.chunk_path(old), path)
            column.attached[column.slot(chunk)] = chunk
            is_hot = old in self.dirty
            self.dirty.discard(old)
        self._has_new_names = True
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            status = os.fstat(descriptor)
            if status.st_size != layout.chunk_bytes:
                os.ftruncate(descriptor, layout.chunk_bytes)
            self._store.enter_chunk(self._number, chunk)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        self._chunk = chunk
        self._is_hot = is_hot
        self._has_space = status.st_blocks * 512 >= layout.chunk_bytes
        self._reserved = 0

    def _reserve(self, chunk: int, inside: int) -> None:
        """Reserves space ahead: a quarter of what the column holds, between 64 KiB and 2 MiB, at least a row."""
        layout = self._column.layout
        if not self._can_reserve or not self._column.needs_space(is_hot=self._is_hot):
            self._reserved = layout.chunk_rows
            return
        stored = (chunk * layout.chunk_rows + inside) * layout.row_bytes
        ahead = min(max(stored // 4, _LEAST_RESERVED_BYTES), _MOST_RESERVED_BYTES)
        stop = min(layout.chunk_rows, inside + max(1, ahead // layout.row_bytes))
        try:
            if not self._has_space:
                os.posix_fallocate(self._descriptor, inside * layout.row_bytes, (stop - inside) * layout.row_bytes)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
                raise
            self._can_reserve = False
            stop = layout.chunk_rows
        self._reserved = stop

    def remove_below(self, first_id: int) -> None:
        """Removes the chunk files that lie wholly below an id."""
        column = self._column
        for chunk in list(column.attached.values()):  # other threads attach and detach meanwhile
            if (chunk + 1) * column.layout.chunk_rows > first_id:
                continue
            if chunk == self._chunk:
                self.close()
                self._store.leave_chunk(self._number, chunk)
            if not column.layout.is_sealed:  # else its rows may be being read, and it is let go of afterwards
                column.detach(chunk)
            column.chunk_path(chunk).unlink(missing_ok=column.layout.is_sealed)
            self.dirty.discard(chunk)

    def take_unsynced(self) -> tuple[set[int], bool]:
        """Returns the chunks written since they were last synced and whether the folder has new names.

        Both count as synced from then on. The tail stays unsynced, because rows go on being written to it.
        """
        chunks, self.dirty = self.dirty, {self._chunk} & self.dirty
        has_new_names, self._has_new_names = self._has_new_names, False
        return chunks, has_new_names

    def give_back(self, chunks: set[int]) -> None:
        """Takes back what `take_unsynced` gave, when the sync failed."""
        self.dirty |= chunks
        self._has_new_names = True

    def close(self) -> None:
        """Closes the tail's file; the next `make_ready` opens it again."""
        descriptor, self._descriptor, self._chunk = self._descriptor, -1, -1
        if descriptor >= 0:
            os.close(descriptor)
