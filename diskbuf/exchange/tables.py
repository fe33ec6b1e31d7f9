"""Rows as Arrow tables, in the types that a store's own Arrow layout has, and columns of Arrow tables as arrays."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import DiskbufError, SpecError
from diskbuf.exchange.contract import CARRIED_KEY, ID, LANE, Carried, RowBlock, SourceColumn
from diskbuf.exchange.store_rows import StoreRows
from diskbuf.specs import ArraySpec
from diskbuf.store.chunk_formats.arrow_parts import arrow_array, arrow_type
from diskbuf.store.layout import ColumnLayout
from diskbuf.tree import Structure

if TYPE_CHECKING:
    import pyarrow as pa

_ARRAY_KEY = "diskbuf.array"
_KEYS = {ID: ArraySpec((), np.int64), LANE: ArraySpec((), np.int32)}


def schema_of(rows: StoreRows, *, binary: Collection[str] = ()) -> "pa.Schema":
    """Returns the columns of a table of rows, with what a file carries in its metadata.

    Args:
        rows: The rows.
        binary: Paths of leaves whose arrays are the bytes that they are, little-endian in C order; the metadata of the
            column says of what dtype and shape.
    """
    import pyarrow as pa

    fields = [pa.field(ID, pa.int64(), nullable=False), pa.field(LANE, pa.int32(), nullable=False)]
    for path in rows.columns:
        layout = _one_lane(rows.layouts[path])
        if path in binary:
            told = json.dumps({"dtype": layout.dtype.newbyteorder("<").str, "shape": list(layout.shape)})
            kind, metadata = pa.binary(layout.lane_bytes), {_ARRAY_KEY: told}
        else:
            kind, metadata = arrow_type(layout), None
        fields.append(pa.field(rows.names[path], kind, nullable=False, metadata=metadata))
    carried = json.dumps(rows.carried.to_json(), ensure_ascii=False)
    return pa.schema(fields, metadata={CARRIED_KEY: carried})


def batch_of(rows: StoreRows, block: RowBlock, schema: "pa.Schema") -> "pa.RecordBatch":
    """Returns a block as a record batch, without copying its arrays."""
    import pyarrow as pa

    arrays = [pa.array(block.ids), pa.array(block.lanes)]
    for path in rows.columns:
        values = block.columns[path]
        if pa.types.is_fixed_size_binary(kind := schema.field(rows.names[path]).type):
            little = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<"), copy=False))
            raw = pa.py_buffer(little.reshape(-1).view(np.uint8))
            arrays.append(pa.FixedSizeBinaryArray.from_buffers(kind, len(values), [None, raw]))
        else:
            arrays.append(arrow_array(_one_lane(rows.layouts[path]), values[:, None]))
    return pa.record_batch(arrays, schema=schema)


def checksum_of(values: NDArray[Any]) -> int:
    """Returns the CRC-32C of an array's bytes, little-endian in C order."""
    import google_crc32c

    little = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("<"), copy=False))
    return int(google_crc32c.value(little.reshape(-1).view(np.uint8)))


def _one_lane(layout: ColumnLayout) -> ColumnLayout:
    return dataclasses.replace(layout, lanes=1)


def carried_of(metadata: Mapping[bytes, bytes] | None, *, name: str) -> Carried | None:
    """Returns what a file carries in its schema's metadata.

    Raises:
        StoreFormatError: When that can't be read.
    """
    text = (metadata or {}).get(CARRIED_KEY.encode())
    if text is None:
        return None
    value: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(text)
    return Carried.from_json(value, name=name)


def list_columns(schema: "pa.Schema") -> list[str]:
    """Returns the columns whose lists are of any length as far as the schema knows: their first row says which."""
    return [field.name for field in schema if _has_lists(field.type)]


def _has_lists(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    while pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return _is_list(kind)


def _depth(kind: "pa.DataType") -> int:
    import pyarrow as pa

    depth = 0
    while pa.types.is_fixed_size_list(kind) or _is_list(kind):
        kind, depth = kind.value_type, depth + 1
    return depth


def _is_list(kind: "pa.DataType") -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def source_columns(
    schema: "pa.Schema", carried: Carried | None, *, first: "pa.RecordBatch | None" = None
) -> dict[str, SourceColumn]:
    """Returns the columns of a table.

    Args:
        schema: The table's.
        carried: What its file carries: bools and complex numbers are stored otherwise.
        first: Some rows of its `list_columns`, of which the first says how long lists are; None where there is no row.
    """
    known = dict(_KEYS) if carried is not None else {}
    if carried is not None:
        structure = Structure(carried.spec)
        specs = dict(zip(structure.paths, structure.flatten(carried.spec), strict=True))
        known |= {column: ArraySpec(specs[path].shape, specs[path].dtype) for path, column in carried.names.items()}
    found = {}
    for field in schema:
        if (described := _described_spec(field)) is not None:
            found[field.name] = SourceColumn(spec=described, kind=str(field.type))
            continue
        is_seen = first is not None and len(first) > 0 and field.name in first.schema.names
        row = first.column(first.schema.names.index(field.name))[:1] if first is not None and is_seen else None
        stored = _stored_spec(field.type, row)
        spec = known.get(field.name, stored)
        if spec is not stored and (stored is None or _stored_as(spec) != (stored.dtype, stored.shape)):
            spec = stored if 0 not in (() if spec is None else spec.shape) else spec
        found[field.name] = SourceColumn(spec=spec, kind=str(field.type))
    return found


def _described_spec(field: "pa.Field") -> ArraySpec | None:
    """What the bytes of a column are, as its metadata says; None where it says nothing, or what can't be."""
    import pyarrow as pa

    told = (field.metadata or {}).get(_ARRAY_KEY.encode())
    if told is None or not pa.types.is_fixed_size_binary(field.type):
        return None
    with contextlib.suppress(ValueError, TypeError, LookupError, SpecError):
        value = json.loads(told)
        spec = ArraySpec(value["shape"], np.dtype(value["dtype"]).newbyteorder("="))
        if spec.dtype.itemsize * math.prod(spec.shape) == field.type.byte_width:
            return spec
    return None


def _stored_spec(kind: "pa.DataType", row: "pa.Array | None") -> ArraySpec | None:
    """What a row of an Arrow type is; None for what is no array of one shape. The row is one of it, if there is one."""
    import pyarrow as pa

    shape: tuple[int, ...] = ()
    if isinstance(kind, pa.FixedShapeTensorType):
        if kind.permutation not in (None, list(range(len(kind.shape)))):
            return None
        shape, kind = tuple(kind.shape), kind.value_type
    while pa.types.is_fixed_size_list(kind) or (_is_list(kind) and row is not None):
        length = kind.list_size if pa.types.is_fixed_size_list(kind) else _length(row)
        shape, kind = (*shape, length), kind.value_type
        row = None if row is None or isinstance(row, pa.ExtensionArray) else row.flatten()
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        return None
    return ArraySpec(shape, kind.to_pandas_dtype())


def _length(lists: "pa.Array | None") -> int:
    """Length of the first list; 0 where there is none, or it is missing, which is told when it is read."""
    return 0 if lists is None or not len(lists) or not lists[0].is_valid else len(lists[0])


def _stored_as(spec: ArraySpec | None) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """The dtype and shape of the numbers that a leaf is stored as."""
    if spec is None or 0 in spec.shape:
        return None
    if spec.dtype.kind == "c":
        return np.dtype(f"f{spec.dtype.itemsize // 2}"), (*spec.shape, 2)
    if spec.dtype.kind == "b" and spec.shape:
        return np.dtype(np.uint8), spec.shape
    return spec.dtype, spec.shape


def arrays_of(
    batch: "pa.RecordBatch", columns: Mapping[str, SourceColumn], *, first_row: int, name: str
) -> dict[str, NDArray[Any]]:
    """Returns the columns of a record batch as arrays [N, *shape].

    Args:
        batch: Some rows.
        columns: What its columns are.
        first_row: Number of its first row, for messages.
        name: Of the file, for messages.

    Raises:
        SpecError: When a value is missing, or a list has another length than that of the first row.
    """
    return {
        column: _array_of(batch.column(place), columns[column].spec, column=column, first_row=first_row, name=name)
        for place, column in enumerate(batch.schema.names)
    }


def _array_of(array: "pa.Array", spec: ArraySpec | None, *, column: str, first_row: int, name: str) -> NDArray[Any]:
    import pyarrow as pa

    if spec is None:
        raise SpecError(f"column {column!r} of {name} must be numbers or bools of one shape.", path=column)
    count = len(array)
    if 0 in spec.shape and _depth(array.type) != len(spec.shape):  # of an export, for which one empty list is enough
        return np.zeros((count, *spec.shape), spec.dtype)
    _check_no_nulls(array, count, column=column, first_row=first_row, name=name)
    if pa.types.is_fixed_size_binary(array.type):
        width = array.type.byte_width
        raw = np.frombuffer(array.buffers()[1], np.uint8)[array.offset * width : (array.offset + count) * width]
        little = raw.view(spec.dtype.newbyteorder("<")).astype(spec.dtype, copy=False)
        return little.reshape(count, *spec.shape)
    axis = 0
    while isinstance(array, pa.ExtensionArray) or pa.types.is_fixed_size_list(array.type) or _is_list(array.type):
        if _is_list(array.type):
            _check_lengths(array, spec.shape[axis], count, column=column, first_row=first_row, name=name)
        axis += not isinstance(array, pa.ExtensionArray)
        array = array.storage if isinstance(array, pa.ExtensionArray) else array.flatten()
        _check_no_nulls(array, count, column=column, first_row=first_row, name=name)
    numbers: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    if spec.dtype.kind == "c":
        numbers = numbers.view(spec.dtype)
    elif spec.dtype.kind == "b" and numbers.dtype != np.bool:
        numbers = numbers.view(np.bool)
    return numbers.reshape(count, *spec.shape)


def _check_no_nulls(array: "pa.Array", rows: int, *, column: str, first_row: int, name: str) -> None:
    if array.null_count:
        at = int(np.asarray(array.is_null()).argmax()) // max(1, len(array) // max(1, rows))
        raise SpecError(
            f"column {column!r} of {name} must have a value in every row, but row {first_row + at} has none. "
            "Fill them in, or leave such rows out.",
            path=column,
        )


def _check_lengths(array: "pa.Array", length: int, rows: int, *, column: str, first_row: int, name: str) -> None:
    lengths = np.asarray(array.value_lengths())
    is_wrong = lengths != length
    if is_wrong.any():
        at = int(is_wrong.argmax())
        raise SpecError(
            f"column {column!r} of {name} must have lists of one length, {length} as in row 0, but row "
            f"{first_row + at // max(1, len(array) // rows)} has one of {lengths[at]}. Make them equally long, or "
            "leave the column out.",
            path=column,
        )


@contextlib.contextmanager
def naming_what_is_wrong(name: str, kind: str) -> Iterator[None]:
    """Says which file can't be read, and how.

    Raises:
        SpecError: When Arrow can't read it.
    """
    import pyarrow as pa

    try:
        yield
    except (DiskbufError, MemoryError):
        raise
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # the system's
            raise
        raise SpecError(f"{name} must be a file of {kind} that can be read: {error}.") from error
