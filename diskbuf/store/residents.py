"""Chunks that are attached when their rows are asked for, and let go of when they are too many.

For stores whose chunks aren't all files that can be mapped: sealed ones, and those of a remote store.
"""

import collections
import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import ClosedError
from diskbuf.store.chunk_cache import DiskCache
from diskbuf.store.chunk_source import ChunkSource, close_all
from diskbuf.store.columns import Column, OpenedChunk, aligned_empty
from diskbuf.store.layout import chunks_with

_WORKERS = 8
_Loaded = dict[int, OpenedChunk]


class Residents:
    """The sealed chunks of a store that are attached at the moment, and those that are on their way.

    Threads may share it. What one of them holds stays attached meanwhile.

    Args:
        columns: The store's columns; the list may change under us.
        source: Opens sealed chunks.
        attach_chunk: Attaches a chunk of a column, from a file or, when that is None, from the raw one in its folder;
            called with `columns` last.
        rows_in: Returns how many rows of a column's chunk are in the window, by column and chunk.
        most_bytes: Most raw bytes that stay attached.
        prefetch_chunks: How many chunks of a column to fetch ahead where they are read in order.
        has_raw_files: Whether chunks may be raw files in their columns' folders.
        lock: Taken whenever chunks are attached or detached.
    """

    def __init__(
        self,
        columns: list[Column],
        source: ChunkSource,
        *,
        attach_chunk: Callable[[int, int, OpenedChunk | None, list[Column]], None],
        rows_in: Callable[[int, int], int],
        most_bytes: int,
        prefetch_chunks: int,
        has_raw_files: bool,
        lock: "threading.RLock",
    ) -> None:
        self.source = source
        self._columns = columns
        self._attach_chunk = attach_chunk
        self._rows_in = rows_in
        self._most_bytes = most_bytes
        self._prefetch_chunks = prefetch_chunks
        self._has_raw_files = has_raw_files
        self._lock = lock
        self._pool: ThreadPoolExecutor | None = None
        self._is_closed = False
        self._held: collections.OrderedDict[tuple[int, int], int] = collections.OrderedDict()  # rows, oldest use first
        self._bytes = 0
        self._pins: collections.Counter[tuple[int, int]] = collections.Counter()
        self._loading: collections.OrderedDict[tuple[int, int], Future[_Loaded]] = collections.OrderedDict()
        self._passing: dict[tuple[int, int], tuple[int, Future[NDArray[Any]]]] = {}  # how many rows, and they
        self._latest: dict[int, int] = {}
        self._group_of = {
            number: group for group, numbers in enumerate(source.chunk_format.groups) for number in numbers
        }
        self.was_asked = False
        """Whether rows were ever asked for."""
        self.detached = 0
        """Grows with each chunk that was let go of."""

    # ---- reading

    def take(
        self, number: int, ids: NDArray[np.int64], rows: NDArray[np.int64], *, is_passing_by: bool
    ) -> NDArray[Any]:
        """Copies rows of a column, whose chunks are fetched as far as they aren't there.

        Args:
            number: Which column.
            ids: [*K] their ids.
            rows: [*K] the same as `Column.take` counts them.
            is_passing_by: As in `span`, where chunks are read in order.

        Returns:
            [*K, *shape], freshly allocated.

        Raises:
            FileNotFoundError: When a chunk isn't there.
            StoreCorruptError: As `ChunkSource.open`, like the others that it raises.
        """
        layout = self._columns[number].layout
        if not layout.row_bytes:
            return aligned_empty((*rows.shape, *layout.shape), layout.dtype)
        chunks = chunks_with(ids, layout.chunk_rows)
        if is_passing_by and len(chunks) == 1 and self._goes_on(number, chunks[0]):
            (chunk,) = chunks
            first_id = chunk * layout.chunk_rows
            with self.span(number, first_id, int(ids.max()) + 1 - first_id, is_passing_by=True) as span:
                inside = (ids - first_id) * layout.lanes + rows % layout.lanes  # offsets are those of whole ids
                self._latest[number] = chunk
                found: NDArray[Any] = span.reshape(-1, *layout.shape).take(inside, 0)
                return found
        waves = list(self._waves(layout.chunk_bytes, chunks))
        if len(waves) == 1:
            with self.hold(number, waves[0]):
                return self._columns[number].take(rows)
        out = aligned_empty((*rows.shape, *layout.shape), layout.dtype)
        of_row = ids // layout.chunk_rows
        for wave in waves:
            is_in = (of_row >= wave[0]) & (of_row <= wave[-1])
            with self.hold(number, wave):
                out[is_in] = self._columns[number].take(rows[is_in])
        return out

    def _waves(self, chunk_bytes: int, chunks: list[int]) -> Iterator[list[int]]:
        """Cuts chunks into as many at a time as may be attached together."""
        size = max(1, self._most_bytes // 2 // max(1, chunk_bytes))
        yield from (chunks[start : start + size] for start in range(0, len(chunks), size))

    @contextlib.contextmanager
    def hold(self, number: int, chunks: Sequence[int]) -> Iterator[None]:
        """Attaches chunks of a column, and keeps them attached meanwhile.

        Raises:
            FileNotFoundError: When a chunk isn't there.
        """
        keys = [(number, chunk) for chunk in chunks]
        self.was_asked = True
        with self._lock:
            self._pins.update(keys)
        try:
            self._ask_ahead(number, chunks)
            for key in keys:
                self._attach(key)
            yield
        finally:
            with self._lock:
                self._pins.subtract(keys)
                for key in keys:
                    if self._pins[key] <= 0:
                        del self._pins[key]
                self._make_room()

    @contextlib.contextmanager
    def span(self, number: int, first_id: int, count: int, *, is_passing_by: bool) -> Iterator[NDArray[Any]]:
        """Gives consecutive rows of a column, all in one chunk, while it is entered.

        Args:
            number: Which column.
            first_id: Id of the first row.
            count: How many.
            is_passing_by: Whether a chunk that isn't attached is decoded only for this, and for those that come to the
                same chunk next, and left out of the cache.

        Yields:
            [count, lanes, *shape].

        Raises:
            FileNotFoundError: When the chunk isn't there.
            StoreCorruptError: As `ChunkSource.open`, like the others that it raises.
        """
        chunk, inside = divmod(first_id, self._columns[number].layout.chunk_rows)
        # An object of many columns is not decoded once for each.
        if is_passing_by and len(self.source.chunk_format.groups[self._group_of[number]]) == 1:
            with self._lock:
                is_here = self._is_attached((number, chunk)) or self._attach_raw((number, chunk))
            if not is_here:
                yield self._pass_by(number, chunk, least=inside + count)[inside : inside + count]
                return
        with self.hold(number, [chunk]):
            yield self._columns[number].read_span(first_id, count)

    def _pass_by(self, number: int, chunk: int, *, least: int) -> NDArray[Any]:
        """The first rows of a chunk, decoded into memory of our own; those that come next are on their way then."""
        with self._lock:
            wanted = {chunk: max(least, self._rows_in(number, chunk))}
            for other in range(chunk + 1, chunk + self._prefetch_chunks + 1):
                rows = self._rows_in(number, other)
                if rows > 0 and not self._is_raw(number, other):
                    wanted[other] = rows
            for key in [key for key in self._passing if key[0] == number and key[1] not in wanted]:
                del self._passing[key]
            for other, rows in wanted.items():
                known = self._passing.get((number, other))
                # More may have been added since, or what failed then may be there now.
                if known is None or known[0] < rows or _has_failed(known[1]):
                    self._passing[number, other] = (rows, self._submit(self._decode, number, other, rows))
            _, future = self._passing[number, chunk]
        try:
            return future.result()
        except CancelledError:
            raise self._closed() from None
        except BaseException:
            with self._lock:
                self._passing.pop((number, chunk), None)
            raise

    def _is_raw(self, number: int, chunk: int) -> bool:
        """Whether a chunk has a raw file, which counts when there is an object too."""
        return self._has_raw_files and self._columns[number].chunk_path(chunk).exists()

    def _decode(self, number: int, chunk: int, rows: int) -> NDArray[Any]:
        return self.source.decode(self._group_of[number], chunk, rows=rows, column=number)

    def ask(self, wanted: Sequence[tuple[int, int]], *, is_passing_by: bool = False) -> None:
        """Begins to fetch chunks without waiting for them; as many as may be attached.

        Args:
            wanted: (column, chunk) of each.
            is_passing_by: Whether those are left out that come next where chunks are read in order.
        """
        with self._lock:
            if self._is_closed:
                return
            self._take_over_all()
            if is_passing_by:
                wanted = [key for key in wanted if not self._goes_on(*key)]
            room = self._most_bytes // 2 - sum(self._bytes_of(key) for key in self._loading)
            for key in wanted:
                if self._is_attached(key) or key in self._loading or not self._columns[key[0]].layout.row_bytes:
                    continue
                if self._is_below(key):
                    continue
                room -= self._bytes_of(key)
                if room < 0 and self._loading:
                    break
                if not self._attach_raw(key):
                    self._load(key)

    def _goes_on(self, number: int, chunk: int) -> bool:
        """Whether a column's chunks are read in order, and this one is next."""
        latest = self._latest.get(number, -1)
        return latest <= chunk <= latest + 1 if latest >= 0 else self._rows_in(number, chunk - 1) == 0

    def _ask_ahead(self, number: int, chunks: Sequence[int]) -> None:
        """Where chunks are read in order, asks for those that come next."""
        is_new = chunks[-1] != self._latest.get(number)
        goes_on = is_new and self._goes_on(number, chunks[-1])
        self._latest[number] = chunks[-1]
        if self._prefetch_chunks and goes_on:
            ahead = range(chunks[-1] + 1, chunks[-1] + 1 + self._prefetch_chunks)
            self.ask([(number, chunk) for chunk in (*chunks, *ahead) if self._rows_in(number, chunk) > 0])

    # ---- attaching

    def _is_attached(self, key: tuple[int, int]) -> bool:
        number, chunk = key
        column = self._columns[number]
        if column.attached.get(column.slot(chunk)) != chunk:
            return False
        rows = self._held.get(key)
        return rows is None or rows >= self._rows_in(number, chunk)  # None for those that others attached

    def _is_below(self, key: tuple[int, int]) -> bool:
        """Whether a chunk had left the window when the columns were made, which have no place for it."""
        column = self._columns[key[0]]
        return column.offset(key[1] * column.layout.chunk_rows) < 0

    def _attach(self, key: tuple[int, int]) -> None:
        if self._is_below(key):
            place = os.fspath(self._columns[key[0]].chunk_path(key[1]))
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
        while True:
            with self._lock:
                if self._is_attached(key):
                    if key in self._held:
                        self._held.move_to_end(key)
                    return
                if key not in self._loading and self._attach_raw(key):
                    return
                self._forget_failure(key)
                future = self._loading.get(key) or self._load(key)
            try:
                future.result()
            except CancelledError:
                raise self._closed() from None
            except BaseException:
                with self._lock:
                    self._drop(future)
                raise
            self._take_over(future)

    def _forget_failure(self, key: tuple[int, int]) -> None:
        """Lets a chunk be fetched again that couldn't be before anybody waited for it."""
        future = self._loading.get(key)
        if future is not None and _has_failed(future):
            self._drop(future)

    def _attach_raw(self, key: tuple[int, int]) -> bool:
        """Attaches the raw file of a chunk that isn't sealed; returns whether there is one."""
        number, chunk = key
        column = self._columns[number]
        if not self._has_raw_files:
            return False
        try:
            self._attach_chunk(number, chunk, None, self._columns)
        except FileNotFoundError:
            return False
        self._add(key, column.layout.chunk_rows)
        return True

    def _load(self, key: tuple[int, int]) -> "Future[_Loaded]":
        number, chunk = key
        group = self._group_of[number]
        columns = [
            other
            for other in self.source.chunk_format.groups[group]
            if other == number or (self._columns[other].layout.row_bytes and not self._is_attached((other, chunk)))
        ]
        # Of a chunk that has left the window meanwhile all rows are wanted: it was full.
        rows = self._rows_in(number, chunk) or self._columns[number].layout.chunk_rows
        future = self._submit(self._open, group, chunk, rows, columns)
        future.rows = rows  # type: ignore[attr-defined]
        for other in columns:
            self._loading.setdefault((other, chunk), future)
        return future

    def _submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        if self._is_closed:
            raise self._closed()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="diskbuf-fetch")
        return self._pool.submit(function, *arguments)

    def _closed(self) -> ClosedError:
        place = self.source.objects.place("")
        return ClosedError(f"store {place} must be open while it is read, but was closed. Open it with diskbuf.open.")

    def _open(self, group: int, chunk: int, rows: int, columns: Sequence[int]) -> _Loaded:
        return self.source.open(group, chunk, rows=rows, columns=columns)

    def _take_over(self, future: "Future[_Loaded]") -> None:
        """Attaches what was fetched; the first one who waits for it does."""
        with self._lock:
            keys = self._drop(future)
            if not keys:
                return
            chunk = keys[0][1]
            loaded = dict(future.result())
            try:
                for number in list(loaded):
                    opened = loaded.pop(number)
                    self._attach_chunk(number, chunk, opened, self._columns)
                    self._add((number, chunk), future.rows)  # type: ignore[attr-defined]
            finally:
                close_all(loaded)
            self._make_room()

    def _take_over_all(self) -> None:
        """Attaches what is here by now; what failed is fetched again when it is read."""
        for future in {future for future in self._loading.values() if future.done()}:
            if _has_failed(future):
                self._drop(future)
            else:
                self._take_over(future)

    def _drop(self, future: "Future[_Loaded]") -> list[tuple[int, int]]:
        keys = [key for key, other in self._loading.items() if other is future]
        for key in keys:
            del self._loading[key]
        return keys

    def _add(self, key: tuple[int, int], rows: int) -> None:
        if key not in self._held:
            self._bytes += self._bytes_of(key)
        self._held[key] = rows
        self._held.move_to_end(key)

    def adopt(self, number: int, chunk: int) -> None:
        """Takes over a chunk that a writer attached, now that it is sealed."""
        with self._lock:
            column = self._columns[number]
            if column.attached.get(column.slot(chunk)) == chunk and (number, chunk) not in self._held:
                self._add((number, chunk), column.layout.chunk_rows)
                self._make_room()

    def give_up(self, number: int, chunk: int) -> None:
        """Leaves a chunk that is attached to a writer, who writes to it from now on, until it is adopted."""
        with self._lock:
            if self._held.pop((number, chunk), None) is not None:
                self._bytes -= self._bytes_of((number, chunk))

    def let_go(self, number: int, chunk: int) -> None:
        """Lets go of a chunk, unless somebody holds it."""
        with self._lock:
            if (number, chunk) in self._held and (number, chunk) not in self._pins:
                self._let_go((number, chunk))

    def keep_raw(self, group: int, number: int, chunk: int, path: Path) -> bool:
        """Moves the raw file of a chunk that was sealed into the cache; returns whether it is there."""
        key = self.source.keys(group, chunk).get(number)
        cache = self.source.cache
        return key is not None and isinstance(cache, DiskCache) and cache.take_over(path, key)

    def _make_room(self) -> None:
        for key in list(self._held):
            if self._bytes <= self._most_bytes:
                return
            if key not in self._pins:
                self._let_go(key)

    def _let_go(self, key: tuple[int, int]) -> None:
        number, chunk = key
        del self._held[key]
        self._bytes -= self._bytes_of(key)
        self.detached += 1
        self._columns[number].detach(chunk)

    def let_go_below(self, first_id: int) -> None:
        """Lets go of chunks that lie wholly below an id."""
        with self._lock:
            for key in list(self._held):
                layout = self._columns[key[0]].layout
                if (key[1] + 1) * layout.chunk_rows <= first_id and key not in self._pins:
                    self._let_go(key)

    def has_all(self, window: tuple[int, int]) -> bool:
        """Whether every chunk of a window is attached."""
        with self._lock:
            return all(
                not column.layout.row_bytes
                or all(self._is_attached((number, chunk)) for chunk in column.layout.chunks(*window))
                for number, column in enumerate(self._columns)
            )

    def _bytes_of(self, key: tuple[int, int]) -> int:
        return self._columns[key[0]].layout.chunk_bytes

    def close(self) -> None:
        """Ends the threads and forgets what is on its way; what is attached stays."""
        with self._lock:
            self._is_closed = True
            pool, self._pool = self._pool, None
            loading, self._loading = set(self._loading.values()), collections.OrderedDict()
            self._passing = {}
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)
        for future in loading:
            future.add_done_callback(_close_loaded)

    def abandon(self, lock: "threading.RLock") -> None:
        """Goes on without its threads, in a forked child."""
        self.source.abandon()
        self._lock = lock
        self._pool = None
        self._loading = collections.OrderedDict()
        self._passing = {}
        self._pins = collections.Counter()


def _has_failed(future: "Future[Any]") -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def _close_loaded(future: "Future[_Loaded]") -> None:
    if not future.cancelled() and future.exception() is None:
        close_all(future.result())
