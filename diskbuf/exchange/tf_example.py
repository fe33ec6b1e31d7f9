"""`tf.train.Example` messages, taken apart and put together without TensorFlow.

An Example is a dict of features by name; each is a list of bytes, of float32 or of int64 numbers, without a shape.
The fields are those of TensorFlow's example.proto and feature.proto. A leaf of float32 or int64 lies in it as numbers,
bool as 0 and 1, one of another dtype as its bytes, little-endian and in C order, which `tf.io.decode_raw` reads; so
TF-Agents has it.

Examples of the same leaves are alike but for the numbers in them, so that many of them are read, and written, as the
rows of one array of bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import SpecError
from diskbuf.exchange.protobuf_wire import (
    BYTES,
    FIXED32,
    VARINT,
    WireError,
    field,
    packed_varints,
    spans,
    unpacked_varints,
    varint_at,
)
from diskbuf.specs import ArraySpec

Feature = list[bytes] | NDArray[np.float32] | NDArray[np.int64]
"""A list of bytes, or numbers [N]; an empty list for a feature of no kind."""

_JPEG = b"\xff\xd8\xff"
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_ALIKE = 4  # Examples of one length from which they are worth reading together


class _Stored(NamedTuple):
    """Where the values of a feature lie in a message.

    Attributes:
        kind: Number of its list's field, 0 for a feature of no kind.
        parts: (wire type, begin, end) of each value, or packed list of them.
    """

    kind: int
    parts: list[tuple[int, int, int]]


def parse_example(message: bytes) -> dict[str, Feature]:
    """Takes an Example apart.

        >>> parse_example(example_of({"reward": np.array([0.5], np.float32)}))
        {'reward': array([0.5], dtype=float32)}

    Args:
        message: A serialized Example.

    Returns:
        The features by name; numbers may be views of the message.

    Raises:
        WireError: When it is none.
    """
    return {name: _values(message, stored) for name, stored in _stored(message).items()}


def example_of(features: Mapping[str, Sequence[bytes] | NDArray[np.float32] | NDArray[np.int64]]) -> bytes:
    """Returns a serialized Example.

    Args:
        features: By name a list of bytes, or [N] float32 or int64 numbers.
    """
    return field(1, b"".join(_feature(name, values) for name, values in features.items()))


class ExampleWriter:
    """Serializes leaves as Examples.

        >>> writer = ExampleWriter({"reward": ArraySpec([], "float32")})
        >>> [parse_example(message) for message in writer.encode([np.array([0.5, 2.0], np.float32)])]
        [{'reward': array([0.5], dtype=float32)}, {'reward': array([2.], dtype=float32)}]

    Args:
        leaves: What each feature is, by its name.
    """

    def __init__(self, leaves: Mapping[str, ArraySpec]) -> None:
        self._leaves = dict(leaves)

    def encode(self, columns: Sequence[NDArray[Any]]) -> list[bytes]:
        """Returns an Example for each row.

        Args:
            columns: [N, *shape] of each leaf, in their order.
        """
        payloads = [_payload(column) for column in columns]
        rows = len(columns[0])
        parts: list[NDArray[np.uint8]] = []
        for (name, spec), payload in zip(self._leaves.items(), payloads, strict=True):
            if payload is None:  # ints that take more or fewer bytes
                return [self._one([column[row, ...] for column in columns]) for row in range(rows)]
            parts += [_repeated(_head(name, spec, payload.shape[1]), rows), payload]
        size = sum(part.shape[1] for part in parts)
        joined = np.concatenate([_repeated(field(1, bytes(size))[:-size], rows), *parts], axis=1)
        data, size = joined.tobytes(), joined.shape[1]
        return [data[at : at + size] for at in range(0, rows * size, size)]

    def _one(self, leaves: Sequence[NDArray[Any]]) -> bytes:
        return example_of({name: _stored_form(leaf) for name, leaf in zip(self._leaves, leaves, strict=True)})


class ExampleReader:
    """Reads leaves out of Examples.

    Args:
        leaves: What each feature is, by its name; others aren't looked at.
    """

    def __init__(self, leaves: Mapping[str, ArraySpec]) -> None:
        self._leaves = dict(leaves)
        self._forms: dict[int, _Form | None] = {}  # by their length

    def read(self, messages: Sequence[bytes], *, first: int, name: str) -> dict[str, NDArray[Any]]:
        """Reads leaves.

        Args:
            messages: Serialized Examples.
            first: Number of the first one, for messages.
            name: The file they are of, for messages.

        Returns:
            [N, *shape] of each leaf.

        Raises:
            SpecError: When one is no Example, or a feature isn't there or something else; its number is named.
        """
        found = {leaf: np.empty((len(messages), *spec.shape), spec.dtype) for leaf, spec in self._leaves.items()}
        by_length: dict[int, list[int]] = {}
        for place, message in enumerate(messages):
            by_length.setdefault(len(message), []).append(place)
        others: list[int] = []
        for length, places in by_length.items():
            form = self._form(length, messages[places[0]]) if len(places) >= _ALIKE else None
            others += places if form is None else self._read_alike(form, messages, places, found)
        for place in sorted(others):
            leaves = self._read_one(messages[place], where=f"record {first + place} of {name}")
            for leaf, value in leaves.items():
                found[leaf][place] = value
        return found

    def _form(self, length: int, message: bytes) -> "_Form | None":
        if length not in self._forms:
            self._forms[length] = _form_of(message, self._leaves)
        return self._forms[length]

    def _read_alike(
        self, form: "_Form", messages: Sequence[bytes], places: list[int], found: dict[str, NDArray[Any]]
    ) -> list[int]:
        """Reads the messages that are of a form; returns the places of the others."""
        rows = np.frombuffer(b"".join([messages[place] for place in places]), np.uint8).reshape(len(places), -1)
        is_alike: NDArray[np.bool] = (rows[:, form.fixed] == form.bytes).all(axis=1)
        for leaf, (begin, end) in form.payloads.items():
            is_alike &= _fits(rows[:, begin:end], self._leaves[leaf])
        chosen: Any = np.array(places)[is_alike]
        if not is_alike.all():
            rows = rows[is_alike]
        try:
            decoded = {
                leaf: _decoded(rows[:, begin:end], self._leaves[leaf]) for leaf, (begin, end) in form.payloads.items()
            }
        except WireError:  # an int of too many bytes: read one by one, its record is named
            return places
        for leaf, values in decoded.items():
            found[leaf][chosen] = values
        return [place for place, alike in zip(places, is_alike.tolist(), strict=True) if not alike]

    def _read_one(self, message: bytes, *, where: str) -> dict[str, NDArray[Any]]:
        try:
            features = parse_example(message)
        except WireError as error:
            raise SpecError(f"{where} must be a tf.train.Example, but {error}.") from error
        found = {}
        for name, spec in self._leaves.items():
            if name not in features:
                raise SpecError(
                    f"{where} must have the feature {name!r}, got {', '.join(map(repr, features)) or 'none'}.",
                    path=name,
                )
            found[name] = _leaf_of(features[name], spec, name=name, where=where)
        return found


def spec_size(spec: ArraySpec) -> int:
    """How many numbers a leaf has."""
    return int(np.prod(spec.shape, dtype=np.int64))


# ---- one Example


def _stored(message: bytes) -> dict[str, _Stored]:
    """Finds where the features lie."""
    found: dict[str, _Stored] = {}
    for number, kind, begin, end in spans(message, 0, len(message)):
        if (number, kind) != (1, BYTES):
            continue
        for entry_number, entry_kind, entry_begin, entry_end in spans(message, begin, end):
            if (entry_number, entry_kind) == (1, BYTES):
                name, stored = _entry(message, entry_begin, entry_end)
                found[name] = stored
    return found


def _entry(message: bytes, begin: int, end: int) -> tuple[str, _Stored]:
    name, stored = "", _Stored(0, [])
    for number, kind, at, stop in spans(message, begin, end):
        if (number, kind) == (1, BYTES):
            name = _text(message[at:stop])
        elif (number, kind) == (2, BYTES):
            for list_number, list_kind, list_at, list_stop in spans(message, at, stop):
                if list_kind == BYTES and list_number in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST):
                    parts = [part[1:] for part in spans(message, list_at, list_stop) if part[0] == 1]
                    stored = _Stored(list_number, parts)
    return name, stored


def _values(message: bytes, stored: _Stored) -> Feature:
    if stored.kind == _FLOAT_LIST:
        return _floats(message, stored)
    if stored.kind == _INT64_LIST:
        return _ints(message, stored)
    return [message[begin:end] for kind, begin, end in stored.parts if kind == BYTES]


def _floats(message: bytes, stored: _Stored) -> NDArray[np.float32]:
    parts: list[NDArray[np.float32]] = []
    for kind, begin, end in stored.parts:
        if kind in (BYTES, FIXED32):  # packed, or one by one
            if (end - begin) % 4:
                raise WireError("a list of floats has a part of one")
            parts.append(np.frombuffer(message, "<f4", (end - begin) // 4, begin))
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.float32), *parts])


def _ints(message: bytes, stored: _Stored) -> NDArray[np.int64]:
    parts: list[NDArray[np.int64]] = []
    for kind, begin, end in stored.parts:
        if kind == BYTES:
            parts.append(unpacked_varints(message[begin:end]))
        elif kind == VARINT:
            parts.append(np.array([varint_at(message, begin)[0]], np.uint64).view(np.int64))
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])


def _leaf_of(feature: Feature, spec: ArraySpec, *, name: str, where: str) -> NDArray[Any]:
    size = spec_size(spec)
    if isinstance(feature, np.ndarray):
        if feature.size == size:
            if feature.dtype == spec.dtype:
                return feature.reshape(spec.shape)
            if spec.dtype == np.bool and feature.dtype == np.int64 and ((feature == 0) | (feature == 1)).all():
                flags: NDArray[np.bool] = feature.reshape(spec.shape) == 1
                return flags
        got = f"{feature.size} numbers of {feature.dtype}"
    elif len(feature) == 1 and len(feature[0]) == size * spec.dtype.itemsize and spec.dtype != np.bool:
        array = np.frombuffer(feature[0], spec.dtype.newbyteorder("<")).reshape(spec.shape)
        return array.astype(spec.dtype, copy=False)
    elif len(feature) == 1 and feature[0][:3] == _JPEG:
        raise SpecError(
            f"{name!r} in {where} must be {spec.dtype} {list(spec.shape)}, got a JPEG image, which doesn't say exactly "
            "what was seen. Write the file without compressing images.",
            path=name,
        )
    else:
        got = f"{len(feature)} byte strings of {sum(map(len, feature))} bytes"
    raise SpecError(f"{name!r} in {where} must be {spec.dtype} {list(spec.shape)}, got {got}.", path=name)


def _stored_form(leaf: NDArray[Any]) -> list[bytes] | NDArray[Any]:
    """A leaf [*shape] as a feature holds it."""
    if leaf.dtype == np.float32 or leaf.dtype == np.int64:
        return leaf.reshape(-1)
    if leaf.dtype == np.bool:
        return leaf.reshape(-1).astype(np.int64)
    return [leaf.astype(leaf.dtype.newbyteorder("<"), copy=False).tobytes()]


def _feature(name: str, values: Sequence[bytes] | NDArray[np.float32] | NDArray[np.int64]) -> bytes:
    if not isinstance(values, np.ndarray):
        feature = field(_BYTES_LIST, b"".join(field(1, value) for value in values))
    elif values.dtype == np.float32:
        feature = field(_FLOAT_LIST, field(1, values.astype("<f4", copy=False).tobytes()))
    else:
        feature = field(_INT64_LIST, field(1, packed_varints(values.astype(np.int64, copy=False))))
    return field(1, field(1, name.encode()) + field(2, feature))


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise WireError("a name is no UTF-8") from error


# ---- many that are alike


class _Form(NamedTuple):
    """What Examples that are alike have in common.

    Attributes:
        fixed: [F] places of the bytes that are the same in all of them.
        bytes: [F] uint8, these bytes.
        payloads: By leaf where its numbers begin and end.
    """

    fixed: NDArray[np.int64]
    bytes: NDArray[np.uint8]
    payloads: dict[str, tuple[int, int]]


def _form_of(message: bytes, leaves: Mapping[str, ArraySpec]) -> _Form | None:
    """The form of a message; None where its leaves aren't as they should be, or not in one piece each."""
    try:
        stored = _stored(message)
    except WireError:
        return None
    is_fixed = np.ones(len(message), np.bool)
    payloads = {}
    for name, spec in leaves.items():
        found = stored.get(name, _Stored(0, []))
        if found.kind != _kind(spec) or len(found.parts) != 1 or found.parts[0][0] != BYTES:
            return None
        _, begin, end = found.parts[0]
        if found.kind != _INT64_LIST and end - begin != spec_size(spec) * spec.dtype.itemsize:
            return None
        payloads[name] = begin, end
        is_fixed[begin:end] = False
    fixed = np.flatnonzero(is_fixed)
    return _Form(fixed, np.frombuffer(message, np.uint8)[fixed], payloads)


def _kind(spec: ArraySpec) -> int:
    if spec.dtype == np.float32:
        return _FLOAT_LIST
    return _INT64_LIST if spec.dtype in (np.int64, np.bool) else _BYTES_LIST


def _fits(payload: NDArray[np.uint8], spec: ArraySpec) -> NDArray[np.bool]:
    """Which rows [N, bytes] are the numbers of a leaf."""
    if _kind(spec) != _INT64_LIST:
        return np.ones(len(payload), np.bool)
    is_last = payload < 0x80
    fits: NDArray[np.bool] = is_last.sum(axis=1) == spec_size(spec)
    if payload.shape[1]:
        fits &= is_last[:, -1]
    if spec.dtype == np.bool:
        fits &= (payload <= 1).all(axis=1)
    return fits


def _decoded(payload: NDArray[np.uint8], spec: ArraySpec) -> NDArray[Any]:
    """The leaf [N, *shape] of rows [N, bytes]."""
    shape = (len(payload), *spec.shape)
    if _kind(spec) == _INT64_LIST:
        return unpacked_varints(payload.tobytes()).reshape(shape).astype(spec.dtype, copy=False)
    if not payload.shape[1]:
        return np.empty(shape, spec.dtype)
    return np.ascontiguousarray(payload).view(spec.dtype.newbyteorder("<")).reshape(shape)


def _payload(column: NDArray[Any]) -> NDArray[np.uint8] | None:
    """The bytes [N, bytes] of a leaf [N, *shape]; None where rows take different numbers of bytes."""
    rows = column.reshape(len(column), -1)
    if column.dtype == np.int64:
        is_short = not rows.size or (rows.min() >= 0 and rows.max() < 0x80)
        return rows.astype(np.uint8) if is_short else None
    if column.dtype == np.bool:
        return rows.astype(np.uint8)
    if not rows.size:
        return np.empty((len(rows), 0), np.uint8)
    return np.ascontiguousarray(rows, rows.dtype.newbyteorder("<")).view(np.uint8)


def _head(name: str, spec: ArraySpec, size: int) -> bytes:
    """What stands before the numbers of a leaf that take so many bytes."""
    feature = field(_kind(spec), field(1, bytes(size)))
    whole = field(1, field(1, name.encode()) + field(2, feature))
    return whole[: len(whole) - size]


def _repeated(data: bytes, rows: int) -> NDArray[np.uint8]:
    return np.broadcast_to(np.frombuffer(data, np.uint8), (rows, len(data)))
