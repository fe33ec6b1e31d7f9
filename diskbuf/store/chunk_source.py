"""Where the rows of sealed chunks are found: as they are in their objects, in the cache, or by decoding."""

import contextlib
import hashlib
import mmap
import os
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import StoreCorruptError
from diskbuf.options import IN_MEMORY, ReadOptions
from diskbuf.store.checksums import Checksum, ObjectChecksums
from diskbuf.store.chunk_cache import ChunkCache, DiskCache, MemoryCache, NewChunk
from diskbuf.store.chunk_format import ChunkFormat
from diskbuf.store.columns import OpenedChunk, aligned_empty
from diskbuf.store.objects import Objects

_PIECE_BYTES = 2**18
_Data = TypeVar("_Data", bytes, memoryview)


class ChunkSource:
    """Opens sealed chunks as files of their raw rows.

    Safe to be used by several threads.

    Args:
        chunk_format: How chunks are stored.
        objects: Where.
        options: Where raw rows are kept.
        name: Tells this store from others in a cache that they share.
        checksums: Those of the objects; None for none.
        verifies: Whether objects are checked against their checksums also where that takes reading all of them.
    """

    def __init__(
        self,
        chunk_format: ChunkFormat,
        objects: Objects,
        options: ReadOptions,
        *,
        name: str,
        checksums: ObjectChecksums | None,
        verifies: bool = False,
    ) -> None:
        self.chunk_format = chunk_format
        self.objects = objects
        self._options = options
        self._name = hashlib.sha256(name.encode()).hexdigest()[:24]
        self._checksums = checksums
        self._verifies = verifies
        self._cache: ChunkCache | None = None

    @property
    def cache(self) -> ChunkCache:
        """Where raw rows are kept; its folder is made when it is first needed."""
        if self._cache is None:
            self._cache = cache_of(self._options)
        return self._cache

    def open(self, group: int, chunk: int, *, rows: int, columns: Sequence[int]) -> dict[int, OpenedChunk]:
        """Opens a chunk of some columns of a group.

        Args:
            group: Which group.
            chunk: Which chunk.
            rows: How many rows of it are asked for; those behind them may be zeros.
            columns: Which columns, by their place among all of the store's.

        Returns:
            For each column its raw rows, as long as a whole chunk; the caller closes them.

        Raises:
            FileNotFoundError: When there is no such object.
            StoreCorruptError: When the object is cut short, or isn't what was written.
            StoreAccessError: As `Objects.read_many`.
            StoreUnreachableError: As `Objects.read_many`.
            OSError: When there is no room for the raw rows.
        """
        name = self.chunk_format.object_name(group, chunk)
        checksum = self._checksum(name, chunk, rows)
        found = {} if self._verifies else self._as_they_are(name, group, chunk, columns)
        try:
            keys = self._keys(name, group, chunk, checksum, rows)
            for number in columns:
                if number in keys and number not in found:
                    size = self.chunk_format.layouts[number].chunk_bytes
                    descriptor = self.cache.find(keys[number], size=size)
                    if descriptor is not None:
                        found[number] = OpenedChunk(descriptor)
            missing = [number for number in columns if number not in found]
            if missing:
                found |= self._decode(name, group, chunk, rows=rows, columns=missing, keys=keys)
        except BaseException:
            close_all(found)
            raise
        return found

    def abandon(self) -> None:
        """Goes on in a forked child."""
        if self._checksums is not None:
            self._checksums.abandon()

    def decode(self, group: int, chunk: int, *, rows: int, column: int) -> NDArray[Any]:
        """Reads a chunk of one column into memory, past the cache.

        Args:
            group: Which group.
            chunk: Which chunk.
            rows: How many rows of it are asked for.
            column: Which column.

        Returns:
            [rows, lanes, *shape].

        Raises:
            FileNotFoundError: As `open`, like the others that it raises.
        """
        name = self.chunk_format.object_name(group, chunk)
        layout = self.chunk_format.layouts[column]
        if self.chunk_format.has_fixed_size:
            whole = aligned_empty((layout.chunk_rows, layout.lanes, *layout.shape), layout.dtype)
            self._fetch_raw(name, chunk, rows, memoryview(whole.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]  # numpy's Buffer
            return whole[:rows]
        data = self._fetch(name, chunk, rows)
        out = aligned_empty((rows, layout.lanes, *layout.shape), layout.dtype)
        self._decode_into(
            name, group, chunk, data, [out if number == column else None for number in self.chunk_format.groups[group]]
        )
        return out

    def _checksum(self, name: str, chunk: int, rows: int) -> Checksum | None:
        checksum = None if self._checksums is None else self._checksums.of(name.rpartition("/")[0], chunk)
        # One of fewer rows is of the object as it was before more came.
        return None if checksum is None or checksum.rows < rows else checksum

    def _as_they_are(self, name: str, group: int, chunk: int, columns: Sequence[int]) -> dict[int, OpenedChunk]:
        """Those columns whose raw rows lie in a local object as they are."""
        path = self.objects.local_path(name)
        if path is None:
            return {}
        found: dict[int, OpenedChunk] = {}
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open(path, "rb", buffering=0))
            except FileNotFoundError:  # gone since, to where it is published
                return {}
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                return {}
            # Not closed: what failed in there may still hold it.
            data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            try:
                offsets = self.chunk_format.raw_offsets(group, chunk, memoryview(data))
            except ValueError:  # decoding it says what is wrong
                return {}
            for number, offset in zip(self.chunk_format.groups[group], offsets, strict=True):
                if number in columns and offset is not None:
                    found[number] = OpenedChunk(os.dup(file.fileno()), offset)
        return found

    def _keys(self, name: str, group: int, chunk: int, checksum: Checksum | None, rows: int) -> Mapping[int, str]:
        """What a chunk of each column of a group is called in the cache; none where nothing tells its version.

        The rows belong to it: no others are decoded. And shards that end with their own CRC-32C, as their inner chunks
        do, have the same one as all others of their size.
        """
        version = self.objects.version(name) if self.objects.has_versions else None
        if version is None:
            if checksum is None:
                return {}
            version = f"{checksum.crc32c:08x}-{checksum.bytes}"
        return {
            number: f"{self._name}/{_quoted(self.chunk_format.layouts[number].file_path)}/{chunk}-{version}-{rows}"
            for number in self.chunk_format.groups[group]
        }

    def keys(self, group: int, chunk: int) -> Mapping[int, str]:
        """What a whole chunk, whose object is there, is called in the cache, for each column of a group."""
        name = self.chunk_format.object_name(group, chunk)
        rows = self.chunk_format.layouts[self.chunk_format.groups[group][0]].chunk_rows
        return self._keys(name, group, chunk, self._checksum(name, chunk, rows), rows)

    def _fetch(self, name: str, chunk: int, rows: int) -> bytes:
        """Reads an object, in several parts at once where its size is known."""
        return self._checked(name, chunk, rows, self._read)

    def _fetch_raw(self, name: str, chunk: int, rows: int, into: memoryview) -> None:
        """Reads an object that is the raw rows of its chunk to where they are wanted."""

        def read(name: str, _: int | None) -> memoryview:
            self.objects.read_into(name, into)
            return into

        self._checked(name, chunk, rows, read)

    def _read(self, name: str, size: int | None) -> bytes:
        return self.objects.read(name, 0, size)

    def _checked(self, name: str, chunk: int, rows: int, read: Callable[[str, int | None], _Data]) -> _Data:
        """What is read, when it has the checksum that it must have."""
        for is_last in (False, True):
            checksum = self._checksum(name, chunk, rows)
            size = None if checksum is None else checksum.bytes
            try:
                data = read(name, size)
                if checksum is None or (found := _crc_of(data, checksum.bytes)) == checksum.crc32c:
                    return data
                place = self.objects.place(name)
                raise StoreCorruptError(
                    f"chunk file {place} must have checksum {checksum.crc32c:08x} over its first {checksum.bytes} "
                    f"bytes, has {found:08x}. Restore that file, or run diskbuf.repair.",
                    path=place,
                )
            except StoreCorruptError:
                if is_last or self._checksums is None:
                    raise
                # Rows may have been added to it since the checksums were read, which come after it.
                self._checksums.forget()
        raise RuntimeError("unreachable")

    def _decode(
        self,
        name: str,
        group: int,
        chunk: int,
        *,
        rows: int,
        columns: Sequence[int],
        keys: Mapping[int, str],
    ) -> dict[int, OpenedChunk]:
        memory_only = MemoryCache()
        new: dict[int, NewChunk] = {}
        found: dict[int, OpenedChunk] = {}
        into: list[NDArray[Any] | None] = []
        try:
            for number in self.chunk_format.groups[group]:
                if number not in columns:
                    into.append(None)
                    continue
                layout = self.chunk_format.layouts[number]
                new[number] = (self.cache if number in keys else memory_only).new(layout.chunk_bytes)
                shape = (layout.chunk_rows, layout.lanes, *layout.shape)
                into.append(np.frombuffer(new[number].memory, layout.dtype).reshape(shape)[:rows])
            if self.chunk_format.has_fixed_size:
                for room in new.values():
                    self._fetch_raw(name, chunk, rows, room.memory)
            else:
                self._decode_into(name, group, chunk, self._fetch(name, chunk, rows), into)
            into.clear()  # arrays of the memory that is handed over
            for number, room in new.items():
                found[number] = OpenedChunk(room.keep(keys.get(number, "")))
        except BaseException:
            close_all(found)
            into.clear()
            for room in new.values():
                room.drop()
            raise
        return found

    def _decode_into(self, name: str, group: int, chunk: int, data: bytes, into: Sequence[NDArray[Any] | None]) -> None:
        try:
            self.chunk_format.decode(group, chunk, data, into)
        except ValueError as error:
            place, reason = self.objects.place(name), str(error).rstrip(".")
            rows = next(len(rows) for rows in into if rows is not None)
            raise StoreCorruptError(
                f"chunk file {place} must hold {rows} rows of chunk {chunk}, but can't be decoded: {reason}. "
                "Restore that file, or run diskbuf.repair.",
                path=place,
            ) from error


def _crc_of(data: bytes | memoryview, size: int) -> int:
    """CRC-32C of the first bytes; the function for it takes nothing but bytes, so others are copied piece by piece."""
    import google_crc32c

    if isinstance(data, bytes):
        return int(google_crc32c.value(data[:size]))
    crc = 0
    for start in range(0, size, _PIECE_BYTES):
        crc = google_crc32c.extend(crc, bytes(data[start : min(start + _PIECE_BYTES, size)]))
    return crc


def close_all(opened: Mapping[int, OpenedChunk]) -> None:
    """Closes chunks that nobody attached."""
    for chunk in opened.values():
        with contextlib.suppress(OSError):
            os.close(chunk.descriptor)


def cache_of(options: ReadOptions) -> ChunkCache:
    """Returns the cache that options name.

    Raises:
        OptionError: When its folder can't be used.
    """
    if options.cache_dir == IN_MEMORY:
        return MemoryCache()
    return DiskCache(cache_folder(options), most_bytes=options.cache_bytes)


def cache_folder(options: ReadOptions) -> Path:
    """The folder of the cache that options name; without a name as the XDG Base Directory Specification has it."""
    if options.cache_dir is not None:
        return Path(os.path.abspath(options.cache_dir))
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "diskbuf"


def _quoted(file_path: str) -> str:
    """A column's path as one file name."""
    return urllib.parse.quote(file_path, safe="")
