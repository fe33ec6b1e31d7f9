"""How a column becomes numbers of the context vector, and an action's label its arm; recorded with the store."""

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from diskbuf.errors import OptionError, StoreFormatError
from diskbuf.readers.requests import count

Label = str | int | bool
Bad = npt.NDArray[np.bool_] | None

MOST_CATEGORIES = 1000
_TYPES: dict[str, type] = {"text": str, "int": int, "bool": bool}


class Encoding(ABC):
    """How one column becomes `width` numbers of the context vector."""

    @property
    @abstractmethod
    def width(self) -> int:
        """How many numbers it takes."""

    @abstractmethod
    def encode(self, column: pa.Array, out: npt.NDArray[np.float32]) -> Bad:
        """Fills out [N, width] from a column [N].

        Returns:
            [N] bool, True in rows that have no code; None for none.
        """

    @abstractmethod
    def decode(self, numbers: npt.NDArray[np.float32]) -> pa.Array:
        """Returns the column [N] that numbers [N, width] stand for."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Returns it as a JSON value, for `encoding_from_json`."""


@dataclasses.dataclass(frozen=True)
class Numbers(Encoding):
    """Numbers as they are, rounded to float32; a missing one is NaN. True is 1."""

    @property
    def width(self) -> int:
        """1."""
        return 1

    def encode(self, column: pa.Array, out: npt.NDArray[np.float32]) -> Bad:
        """Fills out [N, 1]."""
        out[:, 0] = floats(column)
        return None

    def decode(self, numbers: npt.NDArray[np.float32]) -> pa.Array:
        """Returns float32 numbers."""
        return pa.array(np.ascontiguousarray(numbers[:, 0]))

    def to_json(self) -> dict[str, Any]:
        """Returns its kind."""
        return {"kind": "numbers"}


@dataclasses.dataclass(frozen=True)
class Vector(Encoding):
    """A column of lists of numbers, all of one length.

    Attributes:
        length: That length; None takes the first row's.
    """

    length: int | None = None

    def __post_init__(self) -> None:
        if self.length is not None:
            count("length", self.length)

    @property
    def width(self) -> int:
        """The length of each list."""
        if self.length is None:
            raise OptionError("the length of a Vector must be known, got None. Give it: Vector(8).")
        return self.length

    def encode(self, column: pa.Array, out: npt.NDArray[np.float32]) -> Bad:
        """Fills out [N, length]; lists of another length have no code."""
        lengths = pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False)
        fits = lengths == self.width
        if fits.all():
            out[:] = floats(column.flatten()).reshape(-1, self.width)
            return None
        out[:] = np.nan
        out[fits] = floats(column.filter(pa.array(fits)).flatten()).reshape(-1, self.width)
        return cast(Bad, ~fits)

    def decode(self, numbers: npt.NDArray[np.float32]) -> pa.Array:
        """Returns lists of float32."""
        flat = pa.array(np.ascontiguousarray(numbers).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(flat, self.width)

    def to_json(self) -> dict[str, Any]:
        """Returns its kind and length."""
        return {"kind": "vector", "length": self.width}


@dataclasses.dataclass(frozen=True)
class Categories(Encoding):
    """One number for each category, 1 where the row is of it and 0 elsewhere.

        >>> Categories(["de", "fr"], other=True).width
        3

    Attributes:
        values: The categories, all text, all ints or all bools; None takes those that are found, sorted.
        other: Whether any other value, a missing one too, has a number of its own, the last; otherwise it is refused.
    """

    values: Sequence[Label] | None = None
    other: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.other, bool):
            raise OptionError(f"other must be True or False, got {self.other!r}.")
        if self.values is not None:
            object.__setattr__(self, "values", checked_labels("values", self.values))
            object.__setattr__(self, "_coder", Coder(cast(tuple[Label, ...], self.values)))

    @property
    def width(self) -> int:
        """A number for each category, and one for others where they have it."""
        if self.values is None:
            raise OptionError("the values of Categories must be known, got None. Give them: Categories(['a', 'b']).")
        return len(self.values) + self.other

    def encode(self, column: pa.Array, out: npt.NDArray[np.float32]) -> Bad:
        """Fills out [N, width]; unknown categories have no code unless there is a number for others."""
        codes = cast(Coder, self.__dict__["_coder"]).codes(column)
        unknown = codes < 0
        if self.other:
            codes[unknown] = self.width - 1
            unknown = codes < 0
        out[:] = 0.0
        out[np.arange(len(out)), codes] = 1.0
        if not unknown.any():
            return None
        out[unknown] = np.nan
        return unknown

    def decode(self, numbers: npt.NDArray[np.float32]) -> pa.Array:
        """Returns the categories; null for others."""
        values = list(self.values or ())
        codes = np.where((numbers == 1.0).any(axis=1), numbers.argmax(axis=1), len(values))
        indices = pa.array(codes.astype(np.int32), mask=codes >= len(values))
        return pa.DictionaryArray.from_arrays(indices, pa.array(values)).dictionary_decode()

    def to_json(self) -> dict[str, Any]:
        """Returns its kind, the categories, and whether others have a number."""
        return {"kind": "categories", "values": list(self.values or ()), "other": self.other}


@dataclasses.dataclass(frozen=True)
class Hashed(Encoding):
    """One number for each of some buckets; a value's bucket is its hash, so that new values need no list.

    The hash is BLAKE2b (RFC 7693) of the text in UTF-8, of 8 bytes, little-endian, modulo the buckets: the same on
    every machine and in every process.

    Attributes:
        buckets: How many.
    """

    buckets: int

    def __post_init__(self) -> None:
        count("buckets", self.buckets)

    @property
    def width(self) -> int:
        """The buckets."""
        return self.buckets

    def encode(self, column: pa.Array, out: npt.NDArray[np.float32]) -> Bad:
        """Fills out [N, buckets]; a missing value has no code."""
        indices, values = _dictionary(column)
        table = np.array([self.bucket(value) for value in values] or [0], np.int64)
        out[:] = 0.0
        out[np.arange(len(out)), table[np.maximum(indices, 0)]] = 1.0
        missing = indices < 0
        if not missing.any():
            return None
        out[missing] = np.nan
        return missing

    def bucket(self, text: str) -> int:
        """Returns the bucket of a text."""
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % self.buckets

    def decode(self, numbers: npt.NDArray[np.float32]) -> pa.Array:
        """Returns the number of the bucket: the value itself isn't known any more."""
        return pa.array(numbers.argmax(axis=1))

    def to_json(self) -> dict[str, Any]:
        """Returns its kind, the buckets, and the hash."""
        return {"kind": "hashed", "buckets": self.buckets, "hash": "blake2b-8"}


def encoding_from_json(value: Any) -> Encoding:
    """Returns the encoding that `to_json` wrote.

    Raises:
        StoreFormatError: When it is of a kind that this version doesn't know.
    """
    match value:
        case {"kind": "numbers"}:
            return Numbers()
        case {"kind": "vector", "length": length}:
            return Vector(length)
        case {"kind": "categories", "values": values, "other": other}:
            return Categories(values, other)
        case {"kind": "hashed", "buckets": buckets, "hash": "blake2b-8"}:
            return Hashed(buckets)
    raise StoreFormatError(f"an encoding must be one that this version knows, got {value!r:.200}.")


class Coder:
    """Codes from 0 on for labels; those of a list, or more and more as they are found.

    Args:
        labels: The labels; None finds them.
        most: Most labels to find.
        column: Which column, for messages.
    """

    def __init__(self, labels: Sequence[Label] | None = None, *, most: int = MOST_CATEGORIES, column: str = "") -> None:
        self.is_finding = labels is None
        self.type = type_name((labels or ("",))[0])
        self._column, self._most = column, most
        self._codes = {text_of(label): code for code, label in enumerate(labels or ())}

    def codes(self, column: pa.Array) -> npt.NDArray[np.int64]:
        """Returns codes [N] of a column, -1 for what has none.

        Raises:
            OptionError: When more labels than `most` are found.
        """
        if self.is_finding and not self._codes:
            self.type = _type_of(column.type)
        indices, values = _dictionary(column)
        if self.is_finding:
            is_used = np.bincount(indices[indices >= 0], minlength=len(values))  # dictionaries may have more
            for value, uses in zip(values, is_used, strict=True):
                if uses:
                    self._codes.setdefault(value, len(self._codes))
            if len(self._codes) > self._most:
                raise OptionError(
                    f"column {self._column!r} must have at most {self._most} categories to be found by itself, "
                    f"got more. Give encodings={{{self._column!r}: Hashed(64)}}, or list the categories."
                )
        table = np.array([self._codes.get(value, -1) for value in values] + [-1], np.int64)
        return table[indices]  # -1, a missing value, is the last

    def found(self) -> tuple[list[Label], npt.NDArray[np.int64]]:
        """Returns the labels that were found, sorted, and the place [K] among them of each code."""
        labels = [label_of(text, self.type) for text in self._codes]
        order = sorted(range(len(labels)), key=labels.__getitem__)
        places = np.empty(len(labels), np.int64)
        places[order] = np.arange(len(labels))
        return [labels[code] for code in order], places

    def copy(self) -> Self:
        """Returns one that finds on by itself."""
        other = type(self)(column=self._column, most=self._most)
        other.is_finding, other.type, other._codes = self.is_finding, self.type, dict(self._codes)
        return other


def floats(column: pa.Array) -> npt.NDArray[np.float32]:
    """Returns numbers [N] as float32; NaN for what is missing."""
    if column.type == pa.float32() and not column.null_count:
        return cast(npt.NDArray[np.float32], column.to_numpy())
    if not column.null_count and (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        numbers = column.to_numpy()
    else:
        numbers = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is told as such
        return cast(npt.NDArray[np.float32], numbers.astype(np.float32))


def is_there(column: pa.Array) -> npt.NDArray[np.bool_]:
    """Returns [N] bool, False where a value is missing."""
    return cast(npt.NDArray[np.bool_], column.is_valid().to_numpy(zero_copy_only=False))


def is_text(kind: pa.DataType) -> bool:
    """Whether a column is of text, coded as a dictionary or not."""
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value))


def checked_labels(name: str, labels: Any) -> tuple[Label, ...]:
    """Returns labels of one kind, each there once.

    Raises:
        OptionError: When they aren't.
    """
    if isinstance(labels, str) or not isinstance(labels, Sequence) or not len(labels):
        raise OptionError(f"{name} must be a list of labels, got {labels!r}.")
    kind = type(labels[0])
    if kind not in _TYPES.values() or any(type(label) is not kind for label in labels):
        raise OptionError(f"{name} must be all text, all ints or all bools, got {labels!r:.200}.")
    if len(set(labels)) != len(labels):
        raise OptionError(f"{name} must have each label once, got {labels!r:.200}.")
    return tuple(labels)


def type_name(label: Label) -> str:
    """Returns "text", "int" or "bool"."""
    return next(name for name, kind in _TYPES.items() if type(label) is kind)


def text_of(label: Label) -> str:
    """Returns a label as Arrow casts it to text."""
    return str(label).lower() if isinstance(label, bool) else str(label)


def label_of(text: str, kind: str) -> Label:
    """Returns the label of a kind that a text stands for."""
    return text == "true" if kind == "bool" else int(text) if kind == "int" else text


def _type_of(kind: pa.DataType) -> str:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return "bool" if pa.types.is_boolean(value) else "int" if pa.types.is_integer(value) else "text"


def _dictionary(column: pa.Array) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Indices [N] into the distinct values, as text; -1 where a value is missing."""
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    indices = pc.fill_null(column.indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False)
    values = column.dictionary.cast(pa.string()).to_pylist()
    if None in values:  # a dictionary may hold a null of its own
        missing = [value is None for value in values]
        indices = np.where((indices >= 0) & np.array([*missing, False])[indices], -1, indices)
        values = ["" if value is None else value for value in values]
    return indices, values
