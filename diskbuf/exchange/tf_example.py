"""`tf.train.Example` messages, taken apart and put together without TensorFlow.

An Example is a dict of features by name; each is a list of bytes, of float32 or of int64 numbers, without a shape.
The fields are those of TensorFlow's example.proto and feature.proto. Leaves of other dtypes lie in it as their bytes,
little-endian and in C order, which `tf.io.decode_raw` reads; so TF-Agents has it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import SpecError
from diskbuf.exchange.protobuf_wire import (
    BYTES,
    FIXED32,
    VARINT,
    WireError,
    field,
    fields,
    packed_varints,
    unpacked_varints,
    varint,
)
from diskbuf.specs import ArraySpec

Feature = list[bytes] | NDArray[np.float32] | NDArray[np.int64]
"""A list of bytes, or numbers [N]; an empty list for a feature of no kind."""

_JPEG = b"\xff\xd8\xff"
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3


def parse_example(message: bytes) -> dict[str, Feature]:
    """Takes an Example apart.

        >>> parse_example(example_of([feature_of("reward", np.array([0.5], np.float32))]))
        {'reward': array([0.5], dtype=float32)}

    Args:
        message: A serialized Example.

    Returns:
        The features by name; numbers may be views of the message.

    Raises:
        WireError: When it is none.
    """
    found: dict[str, Feature] = {}
    for number, kind, features in fields(message):
        if (number, kind) != (1, BYTES):
            continue
        for entry_number, entry_kind, entry in fields(features):
            if (entry_number, entry_kind) == (1, BYTES):
                name, feature = _entry(entry)
                found[name] = feature
    return found


def feature_of(name: str, values: Sequence[bytes] | NDArray[np.float32] | NDArray[np.int64]) -> bytes:
    """Returns a feature, to be put together with others by `example_of`.

    Args:
        name: Its name.
        values: A list of bytes, or [N] float32 or int64 numbers.
    """
    return FeatureEncoder(name).encode(values)


def example_of(features: Sequence[bytes]) -> bytes:
    """Returns the serialized Example of features."""
    return field(1, b"".join(features))


class FeatureEncoder:
    """Serializes one feature again and again.

    Args:
        name: Its name.
    """

    def __init__(self, name: str) -> None:
        self._name = field(1, name.encode())

    def encode(self, values: Sequence[bytes] | NDArray[np.float32] | NDArray[np.int64]) -> bytes:
        """Returns the feature with these values: bytes, or [N] float32 or int64 numbers."""
        if not isinstance(values, np.ndarray):
            feature = field(_BYTES_LIST, b"".join(field(1, value) for value in values))
        elif values.dtype == np.float32:
            feature = field(_FLOAT_LIST, field(1, values.astype("<f4", copy=False).tobytes()))
        else:
            feature = field(_INT64_LIST, field(1, packed_varints(values.astype(np.int64, copy=False))))
        entry = self._name + field(2, feature)
        return b"\x0a" + varint(len(entry)) + entry


def stored_form(leaf: NDArray[Any]) -> list[bytes] | NDArray[Any]:
    """Returns a leaf [*shape] as a feature holds it: float32 and int64 as numbers, bool as 0 and 1, others as bytes."""
    if leaf.dtype == np.float32 or leaf.dtype == np.int64:
        return leaf.reshape(-1)
    if leaf.dtype == np.bool:
        return leaf.reshape(-1).astype(np.int64)
    return [leaf.astype(leaf.dtype.newbyteorder("<"), copy=False).tobytes()]


def read_leaves(message: bytes, leaves: Mapping[str, ArraySpec], *, where: str) -> dict[str, NDArray[Any]]:
    """Reads leaves out of an Example.

    Args:
        message: The serialized Example.
        leaves: What each feature is, by its name; others aren't looked at.
        where: The record, for messages.

    Returns:
        [*shape] of each leaf's dtype; may be views of the message.

    Raises:
        SpecError: When it is no Example, or a feature isn't there or something else.
    """
    try:
        features = parse_example(message)
    except WireError as error:
        raise SpecError(f"{where} must be a tf.train.Example, but {error}.") from error
    found = {}
    for name, spec in leaves.items():
        if name not in features:
            raise SpecError(
                f"{where} must have the feature {name!r}, got {', '.join(map(repr, features)) or 'none'}.", path=name
            )
        found[name] = _leaf_of(features[name], spec, name=name, where=where)
    return found


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


def spec_size(spec: ArraySpec) -> int:
    """How many numbers a leaf has."""
    return int(np.prod(spec.shape, dtype=np.int64))


def _entry(entry: bytes) -> tuple[str, Feature]:
    name, value = "", b""
    for number, kind, part in fields(entry):
        if (number, kind) == (1, BYTES):
            name = _text(part)
        elif (number, kind) == (2, BYTES):
            value = part
    return name, _feature(value)


def _feature(message: bytes) -> Feature:
    found: Feature = []
    for number, kind, values in fields(message):
        if kind != BYTES:
            continue
        if number == _BYTES_LIST:
            found = [part for at, part_kind, part in fields(values) if (at, part_kind) == (1, BYTES)]
        elif number == _FLOAT_LIST:
            found = _floats(values)
        elif number == _INT64_LIST:
            found = _ints(values)
    return found


def _floats(message: bytes) -> NDArray[np.float32]:
    parts: list[NDArray[np.float32]] = []
    for number, kind, values in fields(message):
        if number == 1 and kind in (BYTES, FIXED32):  # packed, or one by one
            if len(values) % 4:
                raise WireError("a list of floats has a part of one")
            parts.append(np.frombuffer(values, "<f4"))
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.float32), *parts])


def _ints(message: bytes) -> NDArray[np.int64]:
    parts: list[NDArray[np.int64]] = []
    for number, kind, values in fields(message):
        if (number, kind) == (1, BYTES):
            parts.append(unpacked_varints(values))
        elif (number, kind) == (1, VARINT):
            parts.append(np.array([values], np.uint64).view(np.int64))
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise WireError("a name is no UTF-8") from error
