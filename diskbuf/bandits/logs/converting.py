"""From the columns of a block to the leaves of rows, and which rows are at fault; nothing is decided about them."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from diskbuf.bandits.logs.columns import LogColumns
from diskbuf.bandits.logs.encodings import (
    Categories,
    Coder,
    Encoding,
    Hashed,
    Label,
    Numbers,
    Vector,
    floats,
    is_text,
    is_there,
    text_of,
)
from diskbuf.bandits.logs.record import KeyKind
from diskbuf.bandits.logs.sources import Kind
from diskbuf.bandits.logs.times import TimeUnit, times_of
from diskbuf.errors import OptionError, SpecError

MOST_ARMS = 2**20
_DIGEST_BYTES = 16


class Fault(NamedTuple):
    """Rows of a block that something is wrong with.

    Attributes:
        rows: [N] bool.
        must: What they must, for messages: "column 'a' must ...".
        values: What they have, [N].
        reason: The same in general, for counts; None where the row can't be read at all.
        leaf: Which leaf, None for a row that can't be read.
        advice: One thing to do, or nothing.
    """

    rows: npt.NDArray[np.bool_]
    must: str
    values: Any
    reason: str | None = None
    leaf: str | None = None
    advice: str = ""

    def value(self, row: int) -> Any:
        """Returns what a row has."""
        value = self.values[row]
        return value.as_py() if isinstance(value, pa.Scalar) else value.tolist()


@dataclasses.dataclass(kw_only=True)
class Conversion:
    """How the columns of a log become leaves; what has to be found is found as blocks go through.

    Attributes:
        columns: Which column is what.
        encodings: Of each context column; Categories without values find them.
        labels: Of the arms; None where actions are the arms' numbers.
        finds_labels: Whether labels are found.
        num_actions: K; None where it is found.
        key: What keys are; None where there is none.
        mappings: Values to replace before anything else, by column.
        time_unit: Of moments that are numbers.
    """

    columns: LogColumns
    encodings: list[Encoding]
    labels: Sequence[Label] | None
    finds_labels: bool
    num_actions: int | None
    key: KeyKind | None
    mappings: Mapping[str, Mapping[Label, Label]]
    time_unit: TimeUnit | None

    def __post_init__(self) -> None:
        self._arms = (
            Coder(column=self.columns.action, most=MOST_ARMS)
            if self.finds_labels
            else None
            if self.labels is None
            else Coder(self.labels)
        )
        self._finders = {
            name: Coder(column=name)
            for name, encoding in zip(self.columns.context, self.encodings, strict=True)
            if isinstance(encoding, Categories) and encoding.values is None
        }
        self._most_arm = 0
        self._texts = {
            column: {text_of(old): text_of(new) for old, new in mapping.items()}
            for column, mapping in self.mappings.items()
        }

    @property
    def is_coding_arms(self) -> bool:
        """Whether actions are labels."""
        return self._arms is not None

    def kinds(self, schema: Mapping[str, pa.DataType]) -> dict[str, Kind]:
        """Returns what each column is read as.

        Raises:
            OptionError: When a column is missing.
        """
        missing = [name for name in self.columns.names() if name not in schema]
        if missing:
            raise OptionError(
                f"columns must be those of the log, {list(schema)[:30]}, got {missing} besides. Correct LogColumns."
            )
        wanted: dict[str, set[Kind]] = {}
        for name, encoding in zip(self.columns.context, self.encodings, strict=True):
            kind: Kind = (
                "number" if isinstance(encoding, Numbers) else "any" if isinstance(encoding, Vector) else "text"
            )
            wanted.setdefault(name, set()).add(kind)
        for role, name in self.columns.of_roles().items():
            wanted.setdefault(name, set()).add(self._kind_of_role(role, schema[name]))
        return {name: _widest(name, kinds) for name, kinds in wanted.items()}

    def _kind_of_role(self, role: str, found: pa.DataType) -> Kind:
        if role in ("reward", "propensity"):
            return "number"
        if role == "timestamp":
            return "integer" if pa.types.is_integer(found) else "real" if pa.types.is_floating(found) else "time"
        if role == "key":
            return "text" if self.key == "blake2b-16" else "integer"
        if role == "action" and (self._arms is not None or self.columns.action in self.mappings):
            return "text"
        return "real" if pa.types.is_floating(found) else "integer"

    def settle(self, columns: Mapping[str, pa.Array]) -> None:
        """Takes the lengths of vectors that aren't known yet from the first rows."""
        for place, (name, encoding) in enumerate(zip(self.columns.context, self.encodings, strict=True)):
            if isinstance(encoding, Vector) and encoding.length is None:
                lengths = pc.list_value_length(columns[name]).drop_null()
                if not len(lengths) or not lengths[0].as_py():
                    raise SpecError(f"column {name!r} must have numbers in its first row, got none.", path=name)
                self.encodings[place] = Vector(lengths[0].as_py())

    def staged(self) -> dict[str, tuple[npt.DTypeLike, tuple[int, ...]]]:
        """Returns the dtype and the shape of each leaf that `arrays` makes."""
        width = sum(
            e.width for n, e in zip(self.columns.context, self.encodings, strict=True) if n not in self._finders
        )
        leaves: dict[str, tuple[npt.DTypeLike, tuple[int, ...]]] = {
            "context": (np.float32, (width,)),
            "codes": (np.int32, (len(self._finders),)),
            "action": (np.int32, ()),
            "reward": (np.float32, ()),
        }
        optional: dict[str, tuple[npt.DTypeLike, tuple[int, ...]]] = {
            "propensity": (np.float32, ()),
            "timestamp": (np.int64, ()),
            "key": (np.int64, (2,) if self.key == "blake2b-16" else ()),
            "position": (np.int32, ()),
        }
        return leaves | {role: leaf for role, leaf in optional.items() if getattr(self.columns, role) is not None}

    def arrays(self, columns: Mapping[str, pa.Array], rows: int) -> tuple[dict[str, npt.NDArray[Any]], list[Fault]]:
        """Makes the leaves of a block.

        Returns:
            Arrays [N, *shape] by leaf as in `staged`, and what is wrong with rows; where a row is at fault its leaf
            holds something of no meaning.
        """
        columns = {name: self._mapped(name, column) for name, column in columns.items()}
        faults: list[Fault] = []
        found = self._context(columns, rows, faults)
        found["action"] = self._actions(columns[self.columns.action], faults)
        if self.columns.reward is None:
            found["reward"] = np.full(rows, np.nan, np.float32)
        else:
            found["reward"] = numbers_of(self.columns.reward, columns[self.columns.reward])
        if self.columns.propensity is not None:
            found["propensity"] = numbers_of(self.columns.propensity, columns[self.columns.propensity])
        if self.columns.timestamp is not None:
            name = self.columns.timestamp
            found["timestamp"], bad = times_of(columns[name], unit=self.time_unit, name=name)
            if bad is not None:
                faults.append(Fault(bad, f"column {name!r} must hold a moment", columns[name]))
        if self.columns.key is not None:
            found["key"] = keys_of(self.columns.key, columns[self.columns.key], self.key, faults)
        if self.columns.position is not None:
            slots = _integers(self.columns.position, columns[self.columns.position], faults, most=2**31)
            found["position"] = slots.astype(np.int32)
        return found, faults

    def _mapped(self, name: str, column: pa.Array) -> pa.Array:
        texts = self._texts.get(name)
        if texts is None:
            return _empty_as_missing(column)
        coded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
        values = [
            text if text is None else texts.get(text, text) for text in coded.dictionary.cast(pa.string()).to_pylist()
        ]
        mapped = pa.array(values, pa.string()).take(coded.indices)
        return _empty_as_missing(mapped.fill_null(texts[""]) if "" in texts else mapped)

    def _context(self, columns: Mapping[str, pa.Array], rows: int, faults: list[Fault]) -> dict[str, npt.NDArray[Any]]:
        leaves = self.staged()
        context = np.empty((rows, *leaves["context"][1]), np.float32)
        codes = np.empty((rows, *leaves["codes"][1]), np.int32)
        start = finder = 0
        for name, encoding in zip(self.columns.context, self.encodings, strict=True):
            column = columns[name]
            if name in self._finders:
                codes[:, finder] = self._finders[name].codes(_categorical(name, column))
                if column.null_count:
                    faults.append(_missing(name, column))
                finder += 1
                continue
            out = context[:, start : start + encoding.width]
            start += encoding.width
            if isinstance(encoding, Numbers):
                out[:, 0] = numbers_of(name, column)
                continue
            if isinstance(encoding, Vector) and not _is_list_of_numbers(column.type):
                raise SpecError(f"column {name!r} must hold lists of numbers, got {column.type}.", path=name)
            bad = encoding.encode(column if isinstance(encoding, Vector) else _categorical(name, column), out)
            if bad is not None:
                must, advice = _rule(name, encoding)
                faults.append(Fault(bad, must, column, advice=advice))
        return {"context": context, "codes": codes}

    def _actions(self, column: pa.Array, faults: list[Fault]) -> npt.NDArray[np.int32]:
        name = self.columns.action
        if self._arms is None:
            index = _integers(name, column, faults, most=2**31)
            most = MOST_ARMS if self.num_actions is None else self.num_actions
            bad = (index < 0) | (index >= most)
            if bad.any():
                advice = "Give labels as actions=[...]" if self.num_actions is None else ""
                faults.append(
                    Fault(bad, f"column {name!r} must hold actions from 0 to {most - 1}", column, advice=advice)
                )
                index = np.where(bad, 0, index)
            return index.astype(np.int32)
        codes = self._arms.codes(_categorical(name, column))
        bad = codes < 0
        if bad.any():
            known = "a label" if self._arms.is_finding else f"one of the {self.num_actions} labels of the arms"
            advice = (
                f"Give mappings={{{name!r}: {{...}}}} where it means one of them" if not self._arms.is_finding else ""
            )
            faults.append(Fault(bad, f"column {name!r} must hold {known}", column, advice=advice))
            codes[bad] = 0
        return codes.astype(np.int32)

    # ---- what is found

    @property
    def to_find(self) -> list[str]:
        """Columns in which something is to be found before the leaves are known."""
        is_open = self.num_actions is None and self.labels is None
        return list(dict.fromkeys([*self._finders, *([self.columns.action] if is_open else [])]))

    def look_at(self, columns: Mapping[str, pa.Array]) -> None:
        """Finds categories, labels and arms in columns `to_find`."""
        for name, coder in self._finders.items():
            coder.codes(_categorical(name, self._mapped(name, columns[name])))
        if self.columns.action in columns and self.num_actions is None:
            index = self._actions(self._mapped(self.columns.action, columns[self.columns.action]), [])
            self._most_arm = max(self._most_arm, int(index.max(initial=0)))

    def with_found(self) -> "Conversion":
        """Returns one that has nothing left to find."""
        labels, _ = self.found_arms()
        return dataclasses.replace(
            self,
            encodings=[encoding for encoding, _ in self.found_categories()],
            labels=labels,
            finds_labels=False,
            num_actions=self.num_actions or (self._most_arm + 1 if labels is None else len(labels)),
        )

    def found_arms(self) -> tuple[list[Label] | None, npt.NDArray[np.int64] | None]:
        """Returns the labels of the arms, and where each code is among them when they were found."""
        if self._arms is None or not self._arms.is_finding:
            return None if self.labels is None else list(self.labels), None
        return self._arms.found()

    def found_categories(self) -> list[tuple[Encoding, npt.NDArray[np.int64] | None]]:
        """Returns the encoding of each context column, and where each code is among categories that were found."""
        found: list[tuple[Encoding, npt.NDArray[np.int64] | None]] = []
        for name, encoding in zip(self.columns.context, self.encodings, strict=True):
            if name in self._finders:
                values, places = self._finders[name].found()
                found.append((Categories(values, cast(Categories, encoding).other), places))
            else:
                found.append((encoding, None))
        return found

    def mark(self) -> Any:
        """Returns what has been found so far, for `go_back`."""
        arms = self._arms.copy() if self._arms is not None and self._arms.is_finding else self._arms
        return arms, {name: finder.copy() for name, finder in self._finders.items()}

    def go_back(self, mark: Any) -> None:
        """Forgets what was found since a mark."""
        self._arms, self._finders = mark


def numbers_of(name: str, column: pa.Array) -> npt.NDArray[np.float32]:
    """Returns the numbers [N] of a column, NaN for what is missing.

    Raises:
        SpecError: When it holds something else.
    """
    return floats(_numeric(name, column))


def keys_of(name: str, column: pa.Array, kind: KeyKind | None, faults: list[Fault]) -> npt.NDArray[np.int64]:
    """Returns the keys of a column, [N] ints or [N, 2] digests; adds a fault for those that are none.

    Raises:
        SpecError: When it holds something else.
    """
    if kind != "blake2b-16":
        return _integers(name, column, faults, most=2**63)
    if column.null_count:
        faults.append(_missing(name, column))
    return digests(_categorical(name, column).cast(pa.string()))


def digests(column: pa.Array) -> npt.NDArray[np.int64]:
    """Returns [N, 2] digests of text keys: BLAKE2b (RFC 7693) of 16 bytes, in which no two texts are found to agree."""
    joined = b"".join(
        hashlib.blake2b((text or "").encode(), digest_size=_DIGEST_BYTES).digest() for text in column.to_pylist()
    )
    return np.frombuffer(joined, "<i8").reshape(-1, 2).astype(np.int64)


def default_encoding(name: str, kind: pa.DataType) -> Encoding:
    """Returns the encoding of a column that none was given for.

    Raises:
        SpecError: When there is none for its type.
    """
    if is_text(kind) or pa.types.is_dictionary(kind):
        return Categories()
    if _is_number(kind):
        return Numbers()
    if _is_list_of_numbers(kind):
        return Vector(kind.list_size if pa.types.is_fixed_size_list(kind) else None)
    raise SpecError(
        f"column {name!r} must hold numbers, text or lists of numbers to be a context, got {kind}. Convert it, or "
        "leave it out.",
        path=name,
    )


def _is_number(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_decimal(kind)
        or types.is_null(kind)
    )


def _is_list_of_numbers(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))
        and _is_number(kind.value_type)
    )


def _numeric(name: str, column: pa.Array) -> pa.Array:
    if _is_number(column.type):
        return column
    if is_text(column.type):
        try:
            return column.cast(pa.string()).cast(pa.float64())
        except pa.ArrowInvalid as error:
            raise SpecError(f"column {name!r} must hold numbers, got text ({error}).", path=name) from error
    raise SpecError(f"column {name!r} must hold numbers, got {column.type}. Correct LogColumns.", path=name)


def _categorical(name: str, column: pa.Array) -> pa.Array:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if is_text(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return column
    raise SpecError(f"column {name!r} must hold text, ints or bools to be labels, got {kind}. Convert it.", path=name)


def _empty_as_missing(column: pa.Array) -> pa.Array:
    """A column of text in which empty ones are missing, as CSV can't tell the two apart."""
    if not is_text(column.type):
        return column
    if pa.types.is_dictionary(column.type):
        if "" not in column.dictionary.to_pylist():
            return column
        column = column.dictionary_decode()
    if pa.types.is_string_view(column.type):  # Arrow compares none of these
        column = column.cast(pa.string())
    is_empty = pc.equal(column, "")
    return pc.if_else(is_empty, None, column) if pc.any(is_empty).as_py() else column


def _missing(name: str, column: pa.Array) -> Fault:
    return Fault(~is_there(column), f"column {name!r} must hold a value", column)


def _integers(name: str, column: pa.Array, faults: list[Fault], *, most: int) -> npt.NDArray[np.int64]:
    """Whole numbers [N] below `most`; what isn't one becomes a fault and 0."""
    kind = column.type
    if pa.types.is_integer(kind) and kind != pa.uint64() and not column.null_count:
        numbers = column.to_numpy()
        if most < 2**63 and len(numbers) and (numbers.min() < -most or numbers.max() >= most):
            bad = (numbers < -most) | (numbers >= most)
        else:
            return cast(npt.NDArray[np.int64], numbers.astype(np.int64))
    elif _is_number(kind) or is_text(kind):
        found = [_integer(value, most) for value in column.to_pylist()]
        bad = np.array([number is None for number in found], np.bool_)
        numbers = np.array([number or 0 for number in found], np.int64)
    else:
        raise SpecError(f"column {name!r} must hold ints, got {kind}. Correct LogColumns.", path=name)
    if bad.any():
        faults.append(Fault(bad, f"column {name!r} must hold an int", column))
        numbers = np.where(bad, 0, numbers)
    return cast(npt.NDArray[np.int64], numbers.astype(np.int64))


def _integer(value: Any, most: int) -> int | None:
    try:
        number = int(value)
        is_same = isinstance(value, str) or number == value
    except (ValueError, TypeError, OverflowError):
        return None
    return number if is_same and -most <= number < most else None


def _rule(name: str, encoding: Encoding) -> tuple[str, str]:
    if isinstance(encoding, Vector):
        return f"column {name!r} must hold lists of {encoding.width} numbers", ""
    if isinstance(encoding, Hashed):
        return f"column {name!r} must hold a value", ""
    count = len(cast(Categories, encoding).values or ())
    advice = (
        f"Give mappings={{{name!r}: {{...}}}} where it means one of them, with '' for a missing value; or a new store "
        "Categories with other=True"
    )
    return f"column {name!r} must hold one of its {count} recorded categories", advice


_WIDTH: dict[Kind, int] = {"number": 0, "real": 1, "integer": 2, "text": 3}


def _widest(name: str, kinds: set[Kind]) -> Kind:
    """What a column of several uses is read as."""
    if len(kinds) == 1:
        return next(iter(kinds))
    if not kinds <= _WIDTH.keys():
        raise OptionError(f"column {name!r} must be of one use, got {sorted(kinds)}. Correct LogColumns.")
    return max(kinds, key=_WIDTH.__getitem__)


Invalid = Literal["reject", "drop", "keep"]


def value_faults(leaves: Mapping[str, npt.NDArray[Any]], *, pending: bool) -> list[Fault]:
    """Returns what is wrong with the values of rows: numbers that aren't finite, propensities that are none.

    Args:
        leaves: As `Conversion.arrays` makes them.
        pending: Whether a reward may be NaN.
    """
    faults = []
    context, reward = leaves["context"], leaves["reward"]
    if not np.isfinite(context).all():
        bad = ~np.isfinite(context).all(axis=1)
        faults.append(
            Fault(bad, "leaf 'observation' must be finite", context, "observation isn't finite", "observation")
        )
    if not np.isfinite(reward).all():
        bad = np.isinf(reward) if pending else ~np.isfinite(reward)
        if bad.any():
            faults.append(Fault(bad, "leaf 'reward' must be finite", reward, "reward isn't finite", "reward"))
    propensity = leaves.get("propensity")
    if propensity is not None and len(propensity) and not (propensity.min() > 0 and propensity.max() <= 1):
        path = "policy_info/propensity"
        for bad, reason in (
            (np.isnan(propensity), "propensity is NaN"),
            (propensity == 0, "propensity is 0"),
            (propensity < 0, "propensity is negative"),
            (propensity > 1, "propensity is above 1"),
        ):
            if bad.any():
                faults.append(Fault(bad, f"leaf {path!r} must be above 0 and at most 1", propensity, reason, path))
    return faults
