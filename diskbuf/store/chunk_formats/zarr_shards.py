"""Chunks as zarr shards: compressed inner chunks one behind the other, then an index of where each one is.

zarr-python writes them. Reading the usual chains of codecs needs no zarr-python, and is several times as fast as it.
"""

import concurrent.futures
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.store.chunk_formats.codecs import (
    BLOSC,
    BYTES,
    CRC32C,
    INDEX_CODECS,
    ZSTD,
    array_codecs,
    check_codec,
    split_codecs,
    zarr_codecs,
)
from diskbuf.store.chunk_formats.one_column import OneColumnAnObject, check_rows
from diskbuf.store.layout import ColumnLayout, array_document

_MISSING = 2**64 - 1
"""What the index says, twice, of an inner chunk that isn't there: its values are the array's fill value."""

_CHECKSUM_BYTES = 4
_TASK_BYTES = 2**18
"""Least raw bytes that are worth a task of their own."""

_MOST_THREADS = 8

Unpack = Callable[[NDArray[np.uint8], NDArray[np.uint8]], None]
"""Decodes the bytes of an inner chunk into the bytes of its rows; ValueError when they don't fill these."""


class ZarrShards(OneColumnAnObject):
    """The layout of zarr arrays with codecs, each chunk a shard ("sharding_indexed").

    Every inner chunk is written, those of zeros too, so that no part of an object can be gone unnoticed. Inner chunks
    that another writer left out are read as zeros, as zarr does.

    Args:
        layouts: The columns, in spec order.
        codec: What `codecs.codec_json` made.

    Raises:
        StoreFormatError: When the codec is one that isn't known here.
    """

    def __init__(self, layouts: Sequence[ColumnLayout], codec: Mapping[str, Any]) -> None:
        super().__init__(layouts)
        check_codec(codec, layouts)
        self._inner_rows = [int(codec["inner_rows"][column.file_path]) for column in layouts]
        self._chains = [array_codecs(column, codec) for column in layouts]

    def encode(self, group: int, chunk: int, rows: Sequence[NDArray[Any]]) -> bytes | memoryview:
        """Lets zarr-python write the chunk."""
        column = self.layouts[group]
        count = check_rows(column, chunk, rows[0].shape)
        whole = rows[0]
        if count < column.chunk_rows or 0 in column.shape:
            whole = np.zeros(_shard_shape(column), column.dtype)
            whole[tuple(map(slice, rows[0].shape))] = rows[0]
        objects: dict[str, Any] = {}
        self._array(group, objects)[...] = whole
        encoded: bytes = objects[column.file_name(0)].to_bytes()
        return encoded

    def decode(self, group: int, chunk: int, data: bytes | memoryview, into: Sequence[NDArray[Any] | None]) -> None:
        """Decodes the inner chunks that have wanted rows, on several threads where that is worth it."""
        column, inner_rows = self.layouts[group], self._inner_rows[group]
        index = _index(data, column.chunk_rows // inner_rows)
        rows = into[0]
        if rows is None:
            return
        count = check_rows(column, chunk, rows.shape)
        if rows.nbytes == 0:
            return
        unpack = unpacker(self._chains[group])
        if unpack is None:
            self._decode_by_zarr(group, data, rows)
            return
        packed = np.frombuffer(data, np.uint8)
        raw = rows.reshape(-1).view(np.uint8)
        inner_bytes = inner_rows * column.row_bytes

        def decode_inner(number: int) -> None:
            start, length = index[number]
            target = raw[number * inner_bytes : (number + 1) * inner_bytes]
            if start == _MISSING:
                target[:] = 0
                return
            try:
                if len(target) == inner_bytes:
                    unpack(packed[start : start + length], target)
                else:
                    whole = np.empty(inner_bytes, np.uint8)
                    unpack(packed[start : start + length], whole)
                    target[:] = whole[: len(target)]
            except (ValueError, RuntimeError) as error:  # numcodecs raises both
                raise ValueError(f"inner chunk {number} of {len(index)} must be whole: {error}") from error

        _on_threads(decode_inner, -(-count // inner_rows), nbytes=inner_bytes)

    def documents(self) -> dict[str, Any]:
        """Those of raw arrays, with the codecs of shards."""
        return {column.file_path: self._document(number) for number, column in enumerate(self.layouts)}

    def _document(self, group: int) -> dict[str, Any]:
        column = self.layouts[group]
        sharding = {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": list(self._inner_shape(group)),
                "codecs": self._chains[group],
                "index_codecs": list(INDEX_CODECS),
                "index_location": "end",
            },
        }
        return {**array_document(column), "codecs": [sharding]}

    def _inner_shape(self, group: int) -> tuple[int, ...]:
        return (self._inner_rows[group], *_shard_shape(self.layouts[group])[1:])

    def _array(self, group: int, objects: dict[str, Any]) -> Any:
        """Makes an array of one shard, whose objects come into a dict."""
        import zarr
        from zarr.storage import MemoryStore

        column = self.layouts[group]
        return zarr.create_array(
            MemoryStore(objects),
            shape=_shard_shape(column),
            shards=_shard_shape(column),
            chunks=self._inner_shape(group),
            dtype=column.dtype,
            chunk_key_encoding={"name": "default", "separator": "."},
            config={"write_empty_chunks": True},
            **split_codecs(zarr_codecs(self._chains[group])),
        )

    def _decode_by_zarr(self, group: int, data: bytes | memoryview, rows: NDArray[Any]) -> None:
        """Decodes any chain of codecs, slowly."""
        objects: dict[str, Any] = {}
        array = self._array(group, objects)
        buffer = type(objects["zarr.json"])
        objects[self.layouts[group].file_name(0)] = buffer.from_bytes(bytes(data))
        try:
            rows[...] = array[tuple(map(slice, rows.shape))]
        except Exception as error:  # zarr's codecs may fail in any way
            raise ValueError(f"a shard must be whole: {error}") from error


def unpacker(chain: Sequence[Mapping[str, Any]]) -> Unpack | None:
    """Returns what decodes an inner chunk of a complete chain, None when only zarr-python can."""
    names = [item["name"] for item in chain]
    has_checksum = names[-1:] == [CRC32C]
    if has_checksum:
        del names[-1]
    if names[:1] != [BYTES] or not _is_native(chain[0]):
        return None
    unpack = {(): _copy, (ZSTD,): _unpack_zstd, (BLOSC,): _unpack_blosc}.get(tuple(names[1:]))
    if unpack is None:
        return None
    return _Checked(unpack) if has_checksum else unpack


def _is_native(item: Mapping[str, Any]) -> bool:
    endian = item.get("configuration", {}).get("endian")
    return endian is None or endian == ("little" if np.little_endian else "big")


def _shard_shape(column: ColumnLayout) -> tuple[int, ...]:
    """Shape of a shard. zarr wants chunks to have no axis of size 0, also where the array has one."""
    return (column.chunk_rows, column.lanes, *(max(1, size) for size in column.shape))


def _index(data: bytes | memoryview, count: int) -> list[tuple[int, int]]:
    """Reads the index of a shard.

    Returns:
        For each inner chunk where it begins and how many bytes it has.

    Raises:
        ValueError: When the shard has no whole index, or the index points outside.
    """
    import google_crc32c

    size = 16 * count
    body = len(data) - size - _CHECKSUM_BYTES
    if body < 0:
        raise ValueError(
            f"a shard must have at least the {size + _CHECKSUM_BYTES} bytes of its index, got {len(data)}."
        )
    raw = bytes(data[body : body + size])
    (expected,) = struct.unpack("<I", data[body + size :])
    found = google_crc32c.value(raw)
    if found != expected:
        raise ValueError(f"the index of a shard must have the checksum {expected:#010x} behind it, got {found:#010x}.")
    entries = np.frombuffer(raw, "<u8").reshape(count, 2)
    starts, lengths = entries[:, 0], entries[:, 1]
    is_there = ~((starts == _MISSING) & (lengths == _MISSING))
    limit = np.uint64(body)
    is_outside = is_there & ((starts > limit) | (lengths > limit - np.minimum(starts, limit)))
    if is_outside.any():
        number = int(is_outside.argmax())
        raise ValueError(
            f"inner chunk {number} must lie within the {body} bytes before the index, got {int(lengths[number])} bytes "
            f"from {int(starts[number])}."
        )
    return [(start, length) for start, length in entries.tolist()]


class _Checked:
    """Decodes what has a checksum behind it."""

    def __init__(self, unpack: Unpack) -> None:
        self._unpack = unpack

    def __call__(self, packed: NDArray[np.uint8], into: NDArray[np.uint8]) -> None:
        import google_crc32c

        if len(packed) < _CHECKSUM_BYTES:
            raise ValueError(f"it must have a checksum, got {len(packed)} bytes.")
        body = packed[:-_CHECKSUM_BYTES]
        (expected,) = struct.unpack("<I", packed[-_CHECKSUM_BYTES:].tobytes())
        found = google_crc32c.value(body)
        if found != expected:
            raise ValueError(f"it must have the checksum {expected:#010x}, got {found:#010x}.")
        self._unpack(body, into)


def _copy(packed: NDArray[np.uint8], into: NDArray[np.uint8]) -> None:
    _check_size(len(packed), into)
    into[:] = packed


def _unpack_zstd(packed: NDArray[np.uint8], into: NDArray[np.uint8]) -> None:
    from numcodecs.zstd import Zstd

    size = _zstd_size(packed[:18].tobytes())
    if size is None:  # a frame that doesn't say
        whole = np.frombuffer(Zstd().decode(packed), np.uint8)
        _copy(whole, into)
        return
    _check_size(size, into)
    Zstd().decode(packed, into)


def _unpack_blosc(packed: NDArray[np.uint8], into: NDArray[np.uint8]) -> None:
    from numcodecs import blosc

    # The header's sizes: blosc isn't told how many bytes there are, and leaves a destination that is too large.
    if len(packed) < 16:
        raise ValueError(f"blosc's header must have 16 bytes, got {len(packed)}.")
    size, _, packed_size = struct.unpack("<III", packed[4:16].tobytes())
    if packed_size != len(packed):
        raise ValueError(f"it must have the {packed_size} bytes that blosc's header tells, got {len(packed)}.")
    _check_size(size, into)
    blosc.decompress(packed, into)


def _check_size(size: int, into: NDArray[np.uint8]) -> None:
    if size != len(into):
        raise ValueError(f"its rows must be {len(into)} bytes, got {size}.")


def _zstd_size(header: bytes) -> int | None:
    """The size a zstd frame says it has when it is decoded, None when it doesn't (RFC 8878, section 3.1.1.1)."""
    if len(header) < 5 or header[:4] != b"\x28\xb5\x2f\xfd":
        raise ValueError("it must be a zstd frame, got other bytes.")
    descriptor = header[4]
    is_single_segment = bool(descriptor & 0x20)
    size_bytes = (1 if is_single_segment else 0, 2, 4, 8)[descriptor >> 6]
    start = 5 + (0 if is_single_segment else 1) + (0, 1, 2, 4)[descriptor & 3]
    field = header[start : start + size_bytes]
    if not size_bytes:
        return None
    if len(field) < size_bytes:
        raise ValueError(f"a zstd frame must have its whole header, got {len(header)} bytes.")
    return int.from_bytes(field, "little") + (256 if size_bytes == 2 else 0)


def _on_threads(task: Callable[[int], None], count: int, *, nbytes: int) -> None:
    """Does a task for each number below `count`, each of so many bytes; the first that fails raises.

    The threads live no longer than the call: a pool that stays would be missing in a forked process.
    """
    together = max(1, math.ceil(_TASK_BYTES / nbytes))
    pieces = [range(start, min(start + together, count)) for start in range(0, count, together)]
    threads = min(len(pieces), _cpus(), _MOST_THREADS)

    def do(piece: range) -> None:
        for number in piece:
            task(number)

    if threads < 2:
        do(range(count))
        return
    with concurrent.futures.ThreadPoolExecutor(threads, "diskbuf-decode") as pool:
        for _ in pool.map(do, pieces):
            pass


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
