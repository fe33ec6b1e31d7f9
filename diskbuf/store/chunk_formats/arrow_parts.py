"""Chunks as Arrow IPC files that hold all columns, which pandas, Polars, DuckDB and pyarrow.dataset read as they are.

A file is one record batch, a row for each id and lane, by id and then lane. Its columns:

- "id", int64, and "lane", int32.
- One for each leaf, named by its path; `column_names` says what about paths that clash.
- Numbers and bools of shape () are plain columns; leaves with axes are ``arrow.fixed_shape_tensor``.
- Tensors of bools are tensors of uint8, 0 or 1. A complex number is a pair of floats, real part first: a fixed-size
  list, or one more axis of a tensor, of size 2.
- Leaves with an axis of size 0 hold nothing; each row is an empty list.

DuckDB knows no half floats, and refuses a dataset that has any: give it a scanner of the other columns. Polars shows
tensors as an extension type; ``series.ext.storage()`` is the array in it.

Bools of shape () are bits; the buffers of all others hold the same bytes as a raw chunk.
"""

import functools
import mmap
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.store.chunk_format import ChunkFormat
from diskbuf.store.chunk_formats.codecs import check_compression
from diskbuf.store.layout import ColumnLayout

if TYPE_CHECKING:
    import pyarrow as pa

PADDING_KEY = b"padding"
"""Schema metadata that is there only to be long: it moves what is behind it to the next page."""

_FOLDER = "data"
_NAME = re.compile(r"data/part-([0-9]{8,})\.arrow", re.ASCII)
_CLASHES = re.compile(r"_*(id|lane)", re.ASCII)
_KEYS = 2  # columns before those of the leaves: id and lane


class ArrowParts(ChunkFormat):
    """The layout of Arrow files, one a chunk, for all columns together.

    Files that aren't compressed are laid out so that as many bytes of raw chunks as possible begin at a page of the
    file, where `raw_offsets` finds them.

    Args:
        layouts: The columns, in spec order, with equal `lanes` and `chunk_rows`.
        codec: What `codecs.codec_json` made.
        metadata: What stands in the schema of each file besides.

    Raises:
        StoreFormatError: When the codec is one that isn't known here.
        ValueError: When the columns differ in lanes or chunk length, or the metadata has the key "padding".
    """

    def __init__(
        self, layouts: Sequence[ColumnLayout], codec: Mapping[str, Any] | None, metadata: Mapping[bytes, bytes]
    ) -> None:
        super().__init__(layouts)
        lengths = {(column.lanes, column.chunk_rows) for column in layouts}
        if len(lengths) != 1:
            raise ValueError(f"columns of one file must have equal lanes and ids in a chunk, got {sorted(lengths)}.")
        if PADDING_KEY in metadata:
            raise ValueError(f"the metadata of a file must not have the key {PADDING_KEY!r}, got {sorted(metadata)}.")
        ((self._lanes, self._chunk_rows),) = lengths
        self._compression, self._level = check_compression(codec)
        self._metadata = dict(metadata)
        self._names = column_names(layouts)
        self._padding = 0

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """All columns together."""
        return (tuple(range(len(self.layouts))),)

    def object_name(self, group: int, chunk: int) -> str:  # noqa: ARG002
        """``data/part-<chunk>.arrow``, of at least eight digits."""
        return f"{_FOLDER}/part-{chunk:08d}.arrow"

    def chunk_of_name(self, name: str) -> tuple[int, int] | None:
        """Reads the number."""
        match = _NAME.fullmatch(name)
        chunk = int(match[1]) if match else None
        return None if chunk is None or self.object_name(0, chunk) != name else (0, chunk)

    def encode(self, group: int, chunk: int, rows: Sequence[NDArray[Any]]) -> bytes | memoryview:  # noqa: ARG002
        """Writes a file of one record batch, of as many ids as there are rows."""
        import pyarrow as pa

        count = self._check_rows(chunk, rows)
        ids = np.repeat(np.arange(count, dtype=np.int64) + chunk * self._chunk_rows, self._lanes)
        lanes = np.tile(np.arange(self._lanes, dtype=np.int32), count)
        arrays = [pa.array(ids), pa.array(lanes)]
        arrays += [arrow_array(column, leaf) for column, leaf in zip(self.layouts, rows, strict=True)]
        padding = self._padding
        data = self._write(arrays, padding)
        if self._compression is None and count == self._chunk_rows:
            # Done again for the first chunk only: the next is as long, and so are the messages before its rows. The
            # first padding moves rows by itself and its key, the second by itself.
            for _ in range(2):
                missing = -self._best_residue(chunk, data) % mmap.PAGESIZE
                if not missing:
                    break
                padding = padding % mmap.PAGESIZE + missing
                data = self._write(arrays, padding)
            self._padding = padding
        return data

    def decode(self, group: int, chunk: int, data: bytes | memoryview, into: Sequence[NDArray[Any] | None]) -> None:  # noqa: ARG002
        """Copies out of the file the columns that are wanted; the others are not even decompressed."""
        wanted = [number for number, rows in enumerate(into) if rows is not None]
        needed = self._check_rows(chunk, [rows for rows in into if rows is not None], wanted) if wanted else 1
        batch = self._open(chunk, data, wanted)
        count = batch.num_rows // self._lanes
        if count < needed:
            raise ValueError(f"the Arrow file of chunk {chunk} must have at least {needed} ids, got {count}.")
        for place, number in enumerate(wanted):
            rows = into[number]
            if rows is not None and rows.nbytes:
                _copy_rows(self.layouts[number], batch.column(_KEYS + place), rows)

    def documents(self) -> dict[str, Any]:
        """None: there are no zarr arrays."""
        return {}

    def raw_offsets(self, group: int, chunk: int, data: bytes | memoryview) -> list[int | None]:
        """Finds the columns whose data begins at a page, in a file that is full and not compressed."""
        if self._compression is not None:
            return super().raw_offsets(group, chunk, data)
        return [
            offset if offset is not None and offset % mmap.PAGESIZE == 0 else None
            for offset in self._places(chunk, data)
        ]

    def _check_rows(self, chunk: int, rows: Sequence[NDArray[Any]], numbers: Sequence[int] | None = None) -> int:
        """Returns how many ids the rows have, which must be as many for each column."""
        numbers = range(len(self.layouts)) if numbers is None else numbers
        count = len(rows[0])
        for number, leaf in zip(numbers, rows, strict=True):
            column = self.layouts[number]
            wanted = (count, self._lanes, *column.shape)
            if leaf.shape != wanted or not 1 <= count <= self._chunk_rows:
                raise ValueError(
                    f"rows of {column.path!r}, chunk {chunk}, must be {list(wanted)} with 1 to {self._chunk_rows} ids, "
                    f"got {list(leaf.shape)}."
                )
        return count

    @functools.cached_property
    def schema(self) -> "pa.Schema":
        """The columns of a file: id, lane and the leaves."""
        import pyarrow as pa

        fields = [pa.field("id", pa.int64()), pa.field("lane", pa.int32())]
        fields += [pa.field(name, arrow_type(column)) for name, column in zip(self._names, self.layouts, strict=True)]
        return pa.schema(fields)

    def _write(self, arrays: "Sequence[pa.Array]", padding: int) -> memoryview:
        import pyarrow as pa

        compression = None
        if self._compression is not None:
            compression = pa.Codec(self._compression, compression_level=self._level)
        metadata = dict(self._metadata)
        if padding:
            metadata[PADDING_KEY] = b" " * padding
        schema = self.schema.with_metadata(metadata or None)
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression=compression)
        with pa.ipc.new_file(sink, schema, options=options) as writer:
            writer.write_batch(pa.record_batch(list(arrays), schema=schema))
        return memoryview(sink.getvalue())

    def _open(self, chunk: int, data: bytes | memoryview, wanted: Sequence[int]) -> "pa.RecordBatch":
        """Opens the file of a chunk, without a copy where it isn't compressed.

        Returns:
            Its record batch, with id, lane and the wanted columns.
        """
        import pyarrow as pa

        expected = self.schema
        fields = [0, 1, *(_KEYS + number for number in wanted)]
        try:
            # Of a file that isn't compressed Arrow copies the fields it is asked for; all of them it leaves in place.
            chosen = fields if self._compression is not None else None
            options = pa.ipc.IpcReadOptions(included_fields=chosen)
            with pa.ipc.open_file(pa.py_buffer(data), options=options) as reader:
                if reader.num_record_batches != 1:
                    raise ValueError(f"it must have 1 record batch, got {reader.num_record_batches}")
                batch = reader.get_batch(0)
            if chosen is not None:
                expected = pa.schema([expected.field(number) for number in fields])
            if not batch.schema.equals(expected):
                raise ValueError(f"it must have the columns {_listed(expected)}, got {_listed(batch.schema)}")
            batch.validate()
        except (pa.ArrowException, ValueError, OSError) as error:
            raise ValueError(f"the Arrow file of chunk {chunk} must be whole: {error}.") from error
        if chosen is None:
            batch = batch.select(fields)
        for number, column in enumerate(batch.columns):
            if column.null_count or column.offset:
                raise ValueError(f"column {batch.schema.field(number).name!r} of chunk {chunk} must have no nulls.")
        self._check_keys(chunk, batch)
        return batch

    def _check_keys(self, chunk: int, batch: "pa.RecordBatch") -> None:
        count, rest = divmod(batch.num_rows, self._lanes)
        if rest or not 1 <= count <= self._chunk_rows:
            raise ValueError(
                f"the Arrow file of chunk {chunk} must have 1 to {self._chunk_rows} ids of {self._lanes} lanes, "
                f"got {batch.num_rows} rows."
            )
        first_id = chunk * self._chunk_rows
        for number, name, ends in ((0, "ids", (first_id, first_id + count - 1)), (1, "lanes", (0, self._lanes - 1))):
            column = batch.column(number)
            found = (column[0].as_py(), column[batch.num_rows - 1].as_py())
            if found != ends:
                raise ValueError(
                    f"the {name} of chunk {chunk} must be {ends[0]} to {ends[1]}, got {found[0]} to {found[1]}."
                )

    def _places(self, chunk: int, data: bytes | memoryview) -> list[int | None]:
        """Where in a file the bytes of whole raw chunks begin, for each column; None where there are none."""
        import pyarrow as pa

        batch = self._open(chunk, data, range(len(self.layouts)))
        if batch.num_rows != self._chunk_rows * self._lanes:
            return [None] * len(self.layouts)
        base = pa.py_buffer(data).address
        places: list[int | None] = []
        for column, array in zip(self.layouts, batch.columns[_KEYS:], strict=True):
            buffer = None if _is_bits(column) or not column.chunk_bytes else _data(array)
            place = None if buffer is None else buffer.address - base
            # Of bytes that lie at an odd address Arrow makes a copy, which is somewhere else.
            is_inside = buffer is not None and place is not None and 0 <= place <= len(data) - buffer.size
            places.append(place if buffer is not None and is_inside and buffer.size >= column.chunk_bytes else None)
        return places

    def _best_residue(self, chunk: int, data: memoryview) -> int:
        """How far behind the beginning of a page most of the bytes lie that could begin at one."""
        weights: Counter[int] = Counter()
        for column, place in zip(self.layouts, self._places(chunk, data), strict=True):
            if place is not None and column.chunk_bytes >= mmap.PAGESIZE:
                weights[place % mmap.PAGESIZE] += column.chunk_bytes
        return weights.most_common(1)[0][0] if weights else 0


def column_names(layouts: Sequence[ColumnLayout]) -> list[str]:
    """Names the columns of a file: by the leaves' paths.

    "id" and "lane" are taken, so leaves that are called so get "_" before it, and so does what would then be equal:
    "id" is "_id", "_id" is "__id". Where two paths are equal, or a nest is one leaf without a path, all columns are
    named by their arrays' file paths instead, which are distinct.

    Returns:
        For each column its name; all distinct, and none is "id" or "lane".
    """
    paths = [column.path for column in layouts]
    if len(set(paths)) < len(paths) or "" in paths:
        paths = [column.file_path for column in layouts]
    return [f"_{path}" if _CLASHES.fullmatch(path) else path for path in paths]


def _is_bits(column: ColumnLayout) -> bool:
    return column.dtype.kind == "b" and not column.shape


def _number_type(dtype: np.dtype[Any]) -> "pa.DataType":
    """Type of the numbers in a column's buffer, where they aren't bits."""
    import pyarrow as pa

    if dtype.kind == "b":
        return pa.uint8()
    if dtype.kind == "c":
        return pa.from_numpy_dtype(np.dtype(f"f{dtype.itemsize // 2}"))
    return pa.from_numpy_dtype(dtype)


def arrow_type(column: ColumnLayout) -> "pa.DataType":
    """The type of a leaf's column, as this module's docstring has it."""
    import pyarrow as pa

    number = _number_type(column.dtype)
    if 0 in column.shape:
        return pa.list_(number)
    if column.shape:
        return pa.fixed_shape_tensor(number, (*column.shape, 2) if column.dtype.kind == "c" else column.shape)
    if column.dtype.kind == "c":
        return pa.list_(number, 2)
    return pa.bool_() if column.dtype.kind == "b" else number


def arrow_array(column: ColumnLayout, rows: NDArray[Any]) -> "pa.Array":
    """Makes an Arrow array on the memory of rows [T, lanes, *shape], where they are contiguous."""
    import pyarrow as pa

    kind, number = arrow_type(column), _number_type(column.dtype)
    count = rows.shape[0] * rows.shape[1]
    if 0 in column.shape:
        return pa.Array.from_buffers(
            kind, count, [None, pa.py_buffer(bytes(4 * (count + 1)))], children=[pa.array([], number)]
        )
    if _is_bits(column):
        return pa.array(rows.reshape(-1))
    raw = pa.py_buffer(np.ascontiguousarray(rows).reshape(-1).view(np.uint8))
    if not column.shape and column.dtype.kind != "c":
        return pa.Array.from_buffers(kind, count, [None, raw])
    storage = kind.storage_type if isinstance(kind, pa.ExtensionType | pa.FixedShapeTensorType) else kind
    numbers = pa.Array.from_buffers(number, count * storage.list_size, [None, raw])
    listed = pa.Array.from_buffers(storage, count, [None], children=[numbers])
    return listed if storage is kind else pa.ExtensionArray.from_storage(kind, listed)


def _data(array: "pa.Array") -> "pa.Buffer":
    """The buffer of an array's numbers: the last one, whatever is around them."""
    return array.buffers()[-1]


def _copy_rows(column: ColumnLayout, array: "pa.Array", rows: NDArray[Any]) -> None:
    buffer = _data(array)
    if _is_bits(column):
        bits = np.frombuffer(buffer, np.uint8)
        rows.reshape(-1)[:] = np.unpackbits(bits, count=rows.size, bitorder="little").view(bool)
    else:
        rows.reshape(-1).view(np.uint8)[:] = np.frombuffer(buffer, np.uint8, rows.nbytes)


def _listed(schema: "pa.Schema") -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
