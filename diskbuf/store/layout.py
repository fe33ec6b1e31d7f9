"""How rows are cut into chunk files, and what zarr is told about them. Pure arithmetic and JSON; opens nothing."""

import dataclasses
import functools
import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

STATE_FOLDER = ".diskbuf"
"""Folder inside a store for what the processes that have it open share."""

TAIL_FOLDER = "tail"
"""Folder inside that one for the raw chunks of a store that seals them."""

HEADER_FILE = "live"
LOCK_FILE = "lock"

COPYING_FILE = "copying.json"
"""There while a store is being copied to this place; it isn't one before that is done."""

RING_SLACK_BYTES = 2**20
"""What a full ring may use per column beyond 1.25 times its live rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """What the store has to know of a leaf of the spec.

    Attributes:
        path: The leaf as the user writes it, for messages.
        file_path: Its zarr array's path below the store's folder.
        dtype: Type of an element.
        shape: Shape of one lane's row.
    """

    path: str
    file_path: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnLayout(Leaf):
    """One column, ``[T, lanes, *shape]``, cut into chunks of `chunk_rows` ids.

    Attributes:
        lanes: Number of lanes.
        chunk_rows: Ids in a chunk file, a power of two.
        slots: Chunk files of a ring; chunk k lies in slot ``k % slots``. None when chunks are never overwritten.
        is_sealed: Whether chunks that are full are stored otherwise than as their raw files, which then are elsewhere.
    """

    lanes: int
    chunk_rows: int
    slots: int | None
    is_sealed: bool = False

    @property
    def raw_folder(self) -> str:
        """Folder of the raw chunk files below the store's."""
        return f"{STATE_FOLDER}/{TAIL_FOLDER}/{self.file_path}" if self.is_sealed else self.file_path

    @functools.cached_property
    def lane_bytes(self) -> int:
        """Bytes of one lane's row."""
        return math.prod(self.shape) * self.dtype.itemsize

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of one id, all lanes."""
        return self.lanes * self.lane_bytes

    @functools.cached_property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk file."""
        return self.chunk_rows * self.row_bytes

    @functools.cached_property
    def ring_rows(self) -> int | None:
        """Ids after which a ring overwrites, None when chunks are never overwritten."""
        return None if self.slots is None else self.slots * self.chunk_rows

    def chunks(self, first_id: int, next_id: int) -> range:
        """The chunks that hold ids of [first_id, next_id); none when there are no ids, wherever that is."""
        return chunks_of(first_id, next_id, self.chunk_rows)

    def file_name(self, chunk: int) -> str:
        """Name of a chunk file inside the column's folder: zarr's default keys with "." as separator.

        "." keeps a column one flat folder; zarr's "/" would cost a folder per chunk and axis.
        """
        return chunk_file_name(chunk, len(self.shape))

    def chunk_of_name(self, name: str) -> int | None:
        """The chunk number in a file name, None when it isn't a chunk's."""
        parts = name.split(".")
        if len(parts) == 3 + len(self.shape) and parts[0] == "c" and parts[1].isdecimal():
            return int(parts[1]) if name == self.file_name(int(parts[1])) else None
        return None


def chunks_of(first_id: int, next_id: int, chunk_rows: int) -> range:
    """The chunks of `chunk_rows` ids that hold ids of [first_id, next_id); none when there are no ids."""
    stop = -(-next_id // chunk_rows)
    return range(first_id // chunk_rows if first_id < next_id else stop, stop)


def chunks_with(ids: NDArray[np.int64], chunk_rows: int) -> list[int]:
    """The chunks of `chunk_rows` ids that hold some ids, [*K] in any order; ascending."""
    if not ids.size:
        return []
    first, last = int(ids.min()) // chunk_rows, int(ids.max()) // chunk_rows
    if last - first <= 1:  # as it is where rows are read in order, and sorting takes long
        return list(range(first, last + 1))
    found: list[int] = np.unique(ids // chunk_rows).tolist()
    return found


def chunk_file_name(chunk: int, axes: int) -> str:
    """Name of a chunk file of a column whose lanes' rows have so many axes."""
    return f"c.{chunk}" + ".0" * (1 + axes)


def rows_per_chunk(row_bytes: int, *, chunk_bytes: int, ring_length: int | None) -> int:
    """Chooses a chunk's length in ids: the largest power of two that keeps every promise about size.

    A chunk is at most `chunk_bytes` (but holds at least one id), and a full ring of `ring_length` ids stays within
    1.25 times its live rows plus `RING_SLACK_BYTES`, the spare chunks of `ring_slots` included.

    Args:
        row_bytes: Bytes of one id, all lanes.
        chunk_bytes: Largest size of a chunk file.
        ring_length: Longest window of a ring, None when chunks are never overwritten.

    Returns:
        Ids in a chunk, a power of two. Tiny chunks come out as a page multiple wherever the limits leave the choice,
        because a power of two beyond the page size is one.
    """
    rows = 1
    while rows * 2 * row_bytes <= chunk_bytes and rows < 2**40:
        if ring_length is not None:
            disk = ring_slots(ring_length, rows * 2) * rows * 2 * row_bytes
            if disk > 1.25 * ring_length * row_bytes + RING_SLACK_BYTES:
                break
        rows *= 2
    return rows


def ring_slots(ring_length: int, chunk_rows: int) -> int:
    """Number of chunk files of a ring: those its window can touch, the one being overwritten, and one kept aside.

    The one kept aside is what lets a reader finish a gather of rows that were just evicted.
    """
    return -(-(ring_length - 1) // chunk_rows) + 2


def page_multiple(size: int) -> int:
    """Rounds bytes up to whole pages."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def array_document(column: ColumnLayout) -> dict[str, Any]:
    """The zarr v3 metadata of a column of no rows; a commit only changes ``shape[0]``."""
    from zarr.dtype import parse_dtype  # 0.3 s to import, and only creating a store needs it

    zarr_dtype: Any = parse_dtype(column.dtype, zarr_format=3)
    codec: dict[str, Any] = {"name": "bytes"}
    if column.dtype.itemsize > 1:
        codec["configuration"] = {"endian": "little" if np.little_endian else "big"}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [0, column.lanes, *column.shape],
        "data_type": zarr_dtype.to_json(zarr_format=3),
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [column.chunk_rows, column.lanes, *(max(1, n) for n in column.shape)]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": zarr_dtype.to_json_scalar(zarr_dtype.default_scalar(), zarr_format=3),
        "codecs": [codec],
        "dimension_names": [
            "id",
            "lane",
            *(f"{column.file_path.replace('/', '_')}_{axis}" for axis in range(len(column.shape))),
        ],
        "attributes": {},
        "storage_transformers": [],
    }
