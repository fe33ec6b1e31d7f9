"""Protocol buffers on the wire, as far as a few fixed messages need it: fields, varints, and packed lists of them.

The encoding is that of "Protocol Buffers: Encoding" (protobuf.dev). Messages are taken apart by field number, so that
no package with their definitions is imported.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_SIZES = {FIXED64: 8, FIXED32: 4}
_LONG = 16  # bytes of a packed list from which NumPy is quicker than a loop


class WireError(ValueError):
    """Bytes that are no message; whoever reads a file says which record of it."""


def fields(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """Takes a message apart.

        >>> list(fields(bytes([8, 172, 2, 18, 2, 104, 105])))
        [(1, 0, 300), (2, 2, b'hi')]

    Args:
        message: Its bytes.

    Yields:
        (number, wire type, value) of each field in order; the value is an int, not negative, for VARINT, and else
        the bytes.

    Raises:
        WireError: When they are no message.
    """
    for number, kind, begin, end in spans(message, 0, len(message)):
        yield number, kind, varint_at(message, begin)[0] if kind == VARINT else message[begin:end]


def spans(data: bytes, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Finds the fields of a message that lies in others' bytes, so that nothing is copied.

        >>> list(spans(bytes([8, 172, 2, 18, 2, 104, 105]), 0, 7))
        [(1, 0, 1, 3), (2, 2, 5, 7)]

    Args:
        data: The bytes.
        begin: Where in them the message begins.
        end: Where it ends.

    Yields:
        (number, wire type, begin, end) of each field's value, in order.

    Raises:
        WireError: When it is no message.
    """
    at = begin
    while at < end:
        tag, at = varint_at(data, at)
        kind = tag & 7
        first = at
        if kind == BYTES:
            length, first = varint_at(data, at)
            at = first + length
        elif kind == VARINT:
            _, at = varint_at(data, at)
        elif kind in _SIZES:
            at += _SIZES[kind]
        else:
            raise WireError(f"wire type {kind} is none")
        if at > end:
            raise WireError("a field is longer than its message")
        yield tag >> 3, kind, first, at


def varint_at(data: bytes, at: int) -> tuple[int, int]:
    """Returns the varint that begins at a place, and the place behind it.

    Raises:
        WireError: When it doesn't end, or is longer than 64 bits.
    """
    try:
        byte = data[at]
        if byte < 0x80:
            return byte, at + 1
        value, shift = byte & 0x7F, 7
        while shift < 64 + 7:
            at += 1
            byte = data[at]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
    except IndexError:
        raise WireError("a varint doesn't end") from None
    if value >= 2**64 or byte >= 0x80:
        raise WireError("a varint is longer than 64 bits")
    return value, at + 1


def varint(value: int) -> bytes:
    """Returns a varint's bytes.

        >>> list(varint(300))
        [172, 2]

    Args:
        value: At least 0.
    """
    if value < 0x80:
        return bytes((value,))
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def field(number: int, value: bytes) -> bytes:
    """Returns a field of bytes: text, a packed list, or a message."""
    return varint(number << 3 | BYTES) + varint(len(value)) + value


def packed_varints(values: NDArray[np.int64]) -> bytes:
    """Returns [N] ints as a packed list; negative ones take ten bytes each, as int64 fields have it."""
    if len(values) and values.min() >= 0 and values.max() < 0x80:
        return values.astype(np.uint8).tobytes()
    if len(values) < _LONG:
        return b"".join(varint(value & 0xFFFFFFFFFFFFFFFF) for value in values.tolist())
    left = values.astype(np.int64).view(np.uint64)
    shifts = np.arange(0, 70, 7, dtype=np.uint64)
    groups = left[:, None] >> shifts  # [N, 10], what is left from each group of 7 bits on
    has_more = np.concatenate([groups[:, 1:] != 0, np.zeros((len(values), 1), np.bool)], axis=1)
    encoded = (groups & np.uint64(0x7F)).astype(np.uint8) | has_more.astype(np.uint8) << 7
    is_used = np.concatenate([np.ones((len(values), 1), np.bool), groups[:, 1:] != 0], axis=1)
    packed: bytes = encoded[is_used].tobytes()
    return packed


def unpacked_varints(packed: bytes) -> NDArray[np.int64]:
    """Returns the ints of a packed list, [N] int64.

    Raises:
        WireError: When the last one doesn't end, or one is longer than 64 bits.
    """
    if len(packed) < _LONG:
        values, at = [], 0
        while at < len(packed):
            value, at = varint_at(packed, at)
            values.append(value)
        return np.array(values, np.uint64).view(np.int64)
    data = np.frombuffer(packed, np.uint8)
    is_last = data < 0x80
    if is_last.all():
        return data.astype(np.int64)
    if not is_last[-1]:
        raise WireError("a varint doesn't end")
    ends = np.flatnonzero(is_last) + 1
    lengths = np.diff(ends, prepend=0)
    places = np.arange(len(data)) - np.repeat(ends - lengths, lengths)
    if lengths.max() > 10 or (data[places == 9] > 1).any():
        raise WireError("a varint is longer than 64 bits")
    groups = (data & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    found: NDArray[np.uint64] = np.add.reduceat(groups, ends - lengths)
    return found.view(np.int64)
