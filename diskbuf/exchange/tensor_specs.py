"""Nests of TensorFlow's tensor specs as they lie in files, read into diskbuf's without TensorFlow.

TF-Agents writes them beside its records as a `StructuredValue` message; the fields are those of TensorFlow's
struct.proto, tensor.proto, tensor_shape.proto and types.proto.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.exchange.protobuf_wire import BYTES, VARINT, WireError, fields, unpacked_varints
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import PolicyStep, TimeStep, Trajectory

_DTYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    9: "int64",
    10: "bool",
    17: "uint16",
    19: "float16",
    22: "uint32",
    23: "uint64",
}
_NONE, _TENSOR, _BOUNDED, _LIST, _TUPLE, _DICT, _NAMED = 1, 33, 35, 51, 52, 53, 54
_TUPLES: dict[str, Any] = {kind.__name__: kind for kind in (Trajectory, TimeStep, PolicyStep)}
_CONTENT = 4
# Of a TensorProto: the field in which numbers of a dtype lie, and how they lie in it.
_NUMBERS = {
    "float32": (5, "<f4"),
    "float64": (6, "<f8"),
    "int64": (10, None),
    "bool": (11, None),
    "uint32": (16, None),
    "uint64": (17, None),
    "float16": (13, "half"),
}
_INTS = (7, None)


def spec_of_structure(message: bytes) -> Any:
    """Returns the nest of specs that a `StructuredValue` describes.

    A namedtuple of the name and fields of `Trajectory`, `TimeStep` or `PolicyStep` becomes that one; another becomes a
    dict, as the message doesn't say what class it was.

    Args:
        message: The serialized StructuredValue.

    Raises:
        WireError: When it is none, or holds something that is no spec of numbers.
    """
    values = [(number, value) for number, kind, value in fields(message) if kind == BYTES]
    if len(values) != 1 or values[0][0] not in _READERS:
        raise WireError("it holds something that is no spec")
    number, value = values[0]
    return _READERS[number](value)


def _list(message: bytes) -> list[Any]:
    return [spec_of_structure(value) for number, kind, value in fields(message) if (number, kind) == (1, BYTES)]


def _dict(message: bytes) -> dict[str, Any]:
    return dict(_pair(value) for number, kind, value in fields(message) if (number, kind) == (1, BYTES))


def _named(message: bytes) -> Any:
    name = ""
    pairs: dict[str, Any] = {}
    for number, kind, value in fields(message):
        if (number, kind) == (1, BYTES):
            name = _text(value)
        elif (number, kind) == (2, BYTES):
            pairs |= dict([_pair(value)])
    known = _TUPLES.get(name)
    return known(**pairs) if known is not None and known._fields == tuple(pairs) else pairs


def _pair(message: bytes) -> tuple[str, Any]:
    key = ""
    found: Any = ()
    for number, kind, value in fields(message):
        if (number, kind) == (1, BYTES):
            key = _text(value)
        elif (number, kind) == (2, BYTES):
            found = spec_of_structure(value)
    return key, found


def _tensor(message: bytes) -> ArraySpec:
    name, dtype = None, ""
    shape: tuple[int, ...] = ()
    bounds: dict[int, NDArray[Any]] = {}
    for number, kind, value in fields(message):
        if (number, kind) == (1, BYTES):
            name = _text(value) or None
        elif (number, kind) == (2, BYTES):
            shape = _shape(value)
        elif (number, kind) == (3, VARINT):
            dtype = _dtype(value)
        elif kind == BYTES:
            bounds[number] = _array(value)
    if not dtype:
        raise WireError("a spec has no dtype")
    if not bounds:
        return ArraySpec(shape, dtype, name=name)
    if set(bounds) != {4, 5}:
        raise WireError("a bounded spec has one bound")
    return BoundedArraySpec(shape, dtype, bounds[4], bounds[5], name=name)


def _shape(message: bytes) -> tuple[int, ...]:
    sizes = []
    for number, kind, value in fields(message):
        if (number, kind) == (2, BYTES):
            found = [size for at, size_kind, size in fields(value) if (at, size_kind) == (1, VARINT)]
            sizes.append(found[0] if found else 0)
        elif (number, kind) == (3, VARINT) and value:
            raise WireError("a spec has no rank")
    if any(size >= 2**63 for size in sizes):
        raise WireError("a spec has an axis of unknown length")
    return tuple(sizes)


def _dtype(number: int) -> str:
    if number not in _DTYPES:
        raise WireError(f"a spec has TensorFlow's dtype {number}, which is none of numbers")
    return _DTYPES[number]


def _array(message: bytes) -> NDArray[Any]:
    """Reads a TensorProto: its numbers lie in one block, or as a list that is repeated with its last one."""
    dtype, content = "", b""
    shape: tuple[int, ...] = ()
    lists: dict[int, list[Any]] = {}
    for number, kind, value in fields(message):
        if (number, kind) == (1, VARINT):
            dtype = _dtype(value)
        elif (number, kind) == (2, BYTES):
            shape = _shape(value)
        elif (number, kind) == (_CONTENT, BYTES):
            content = value
        elif number not in (1, 3):
            lists.setdefault(number, []).append(value)
    size = int(np.prod(shape, dtype=np.int64))
    if content:
        return _of_size(np.frombuffer(content, np.dtype(dtype).newbyteorder("<")), size).reshape(shape)
    field, form = _NUMBERS.get(dtype, _INTS)
    found = np.concatenate([np.empty(0, dtype), *(_numbers(value, form, dtype) for value in lists.get(field, []))])
    last = found[-1] if len(found) else np.zeros((), dtype)
    padded = np.full(size, last, dtype)
    padded[: len(found)] = _of_size(found, len(found) if len(found) <= size else size)
    return padded.reshape(shape)


def _of_size(array: NDArray[Any], size: int) -> NDArray[Any]:
    if array.size != size:
        raise WireError("bounds don't fit their shape")
    return array


def _numbers(value: Any, form: str | None, dtype: str) -> NDArray[Any]:
    if form == "half":
        bits = np.array([value]) if isinstance(value, int) else unpacked_varints(value)
        return bits.astype(np.uint16).view(np.float16)
    if form is not None:
        return np.frombuffer(value, form)
    ints = np.array([value], np.uint64).view(np.int64) if isinstance(value, int) else unpacked_varints(value)
    return ints.view(np.uint64) if dtype == "uint64" else ints.astype(dtype)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise WireError("a name is no UTF-8") from error


_READERS: dict[int, Callable[[bytes], Any]] = {
    _NONE: lambda _: None,
    _TENSOR: _tensor,
    _BOUNDED: _tensor,
    _LIST: _list,
    _TUPLE: lambda message: tuple(_list(message)),
    _DICT: _dict,
    _NAMED: _named,
}
