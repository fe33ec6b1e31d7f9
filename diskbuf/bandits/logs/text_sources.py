"""Logs in text, CSV and JSON lines: read fast by Arrow, or line by line where something is wrong."""

import contextlib
import csv
import io
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json

from diskbuf.bandits.logs.sources import Block, Kind, Malformed, TextPart
from diskbuf.errors import SpecError

_TEXT_BYTES = 2**20  # of a block of text; what is open at once is a few of these
_HEAD_BYTES = 2**20
_CAREFUL_ROWS = 8_192
_LOOKED_AT = 1_000  # cells, to tell a number that is misspelt from text
_TYPES: dict[str, pa.DataType] = {
    "number": pa.float32(),  # rounded at once, which is half of what float64 would take
    "real": pa.float64(),
    "integer": pa.int64(),
    "text": pa.string(),
}
_SAID = {
    "number": "a number",
    "real": "a number",
    "integer": "an int",
    "text": "text",
    "time": "a moment",
    "any": "a list of numbers",
}
_NULLS = frozenset(pa_csv.ConvertOptions().null_values)


class CsvPart(TextPart):
    """A CSV file with a header line.

    Args:
        name: For messages.
        open_bytes: Opens it anew.
    """

    def __init__(self, name: str, open_bytes: Callable[[], Any]) -> None:
        self.name = name
        self._open = open_bytes
        self._types: dict[str, pa.DataType] | None = None

    def schema(self) -> dict[str, pa.DataType]:
        """Returns the types of the columns, as the first rows look."""
        if self._types is None:
            with self._open() as file:
                header = next(csv.reader(io.TextIOWrapper(file, "utf-8", errors="replace", newline="")), None)
            if not header:
                raise SpecError(f"{self.name} must have a header line that names its columns, got no line.")
            if len(set(header)) != len(header):
                raise SpecError(f"{self.name} must name each column once in its header line, got {header}.")
            types: dict[str, pa.DataType] = dict.fromkeys(header, pa.null())
            # A malformed line among the first ones is told of when its rows are read.
            with contextlib.suppress(pa.ArrowInvalid, StopIteration), self._open() as file:
                reader = pa_csv.open_csv(
                    file,
                    read_options=pa_csv.ReadOptions(block_size=_HEAD_BYTES, use_threads=False),
                    parse_options=pa_csv.ParseOptions(invalid_row_handler=lambda _: "skip"),
                )
                types.update((field.name, field.type) for field in reader.schema)
                first = reader.read_next_batch()
                types.update((name, _likely(first.column(name))) for name in types if name in first.schema.names)
            self._types = types
        return self._types

    def blocks(self, kinds: Mapping[str, Kind]) -> Iterator[Block]:
        """Yields the rows."""
        types = {name: self._type(name, kind) for name, kind in kinds.items()}
        first = 1
        with self._open() as file:
            reader = pa_csv.open_csv(
                file,
                read_options=pa_csv.ReadOptions(block_size=_TEXT_BYTES),
                convert_options=pa_csv.ConvertOptions(
                    include_columns=list(kinds),
                    column_types={name: kind for name, kind in types.items() if kind is not None},
                ),
            )
            for batch in reader:
                numbers = np.arange(first, first + batch.num_rows)
                yield Block(dict(zip(kinds, batch.columns, strict=True)), batch.num_rows, self.name, numbers, "row")
                first += batch.num_rows

    def _type(self, name: str, kind: Kind) -> pa.DataType | None:
        found = self.schema()[name]
        if kind == "number" and pa.types.is_boolean(found):
            return found
        if kind == "time":  # a timestamp with as many digits as later rows may have
            return pa.timestamp("ns", found.tz) if pa.types.is_timestamp(found) else pa.string()
        return _TYPES.get(kind)

    def careful_blocks(self, kinds: Mapping[str, Kind], malformed: Malformed) -> Iterator[Block]:
        """Yields the rows, and tells of lines that can't be read."""
        with self._open() as file:
            text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")  # a BOM is no text
            rows = csv.reader(text)
            header = next(rows)
            places = [header.index(name) for name in kinds]
            cells: list[list[str]] = [[] for _ in kinds]
            lines: list[int] = []
            start = rows.line_num + 1
            for row in rows:
                line, start = start, rows.line_num + 1
                if not row:
                    continue
                if len(row) != len(header):
                    shown = ",".join(row)
                    malformed.tell(
                        f"line {line} of {self.name} must have {len(header)} columns, got {len(row)}: {shown[:100]!r}"
                    )
                    continue
                for column, place in zip(cells, places, strict=True):
                    column.append(row[place])
                lines.append(line)
                if len(lines) == _CAREFUL_ROWS:
                    yield _from_cells(kinds, cells, lines, self.name, malformed, _csv_cell)
                    cells, lines = [[] for _ in kinds], []
            if lines:
                yield _from_cells(kinds, cells, lines, self.name, malformed, _csv_cell)


class JsonLinesPart(TextPart):
    """A file with one JSON object to a line.

    Args:
        name: For messages.
        open_bytes: Opens it anew.
    """

    def __init__(self, name: str, open_bytes: Callable[[], Any]) -> None:
        self.name = name
        self._open = open_bytes
        self._types: dict[str, pa.DataType] | None = None

    def schema(self) -> dict[str, pa.DataType]:
        """Returns the types of the columns, as the first rows look."""
        if self._types is None:
            with self._open() as file:
                head = file.read(_HEAD_BYTES)
            whole = head[: head.rfind(b"\n") + 1] or head
            try:
                self._types = {field.name: field.type for field in pa_json.read_json(pa.BufferReader(whole)).schema}
            except pa.ArrowInvalid:
                self._types = _types_of_lines(whole)
        return self._types

    def blocks(self, kinds: Mapping[str, Kind]) -> Iterator[Block]:
        """Yields the rows."""
        wanted = pa.schema([(name, self._type(name, kind)) for name, kind in kinds.items()])
        options = pa_json.ParseOptions(explicit_schema=wanted, unexpected_field_behavior="ignore")
        first = 1
        with self._open() as file:
            for chunk in _whole_lines(file):
                table = pa_json.read_json(pa.BufferReader(chunk), parse_options=options)
                for batch in table.select(list(kinds)).to_batches():
                    numbers = np.arange(first, first + batch.num_rows)
                    columns = dict(zip(kinds, batch.columns, strict=True))
                    yield Block(columns, batch.num_rows, self.name, numbers, "row")
                    first += batch.num_rows

    def _type(self, name: str, kind: Kind) -> pa.DataType:
        found = self.schema()[name]
        if kind == "number" and pa.types.is_boolean(found):
            return found
        if kind == "time":
            return pa.string()
        if kind == "text" and (pa.types.is_integer(found) or pa.types.is_boolean(found)):
            return found
        return _TYPES.get(kind, found)

    def careful_blocks(self, kinds: Mapping[str, Kind], malformed: Malformed) -> Iterator[Block]:
        """Yields the rows, and tells of lines that can't be read."""
        with self._open() as file:
            text_of_file = io.TextIOWrapper(file, "utf-8", errors="surrogateescape", newline="\n")
            cells: list[list[Any]] = [[] for _ in kinds]
            lines: list[int] = []
            for line, text in enumerate(text_of_file, start=1):
                if not text.strip():
                    continue
                try:
                    row = json.loads(text)
                    if not isinstance(row, dict):
                        raise TypeError("it is no object")
                except (ValueError, TypeError, RecursionError) as error:
                    malformed.tell(f"line {line} of {self.name} must be a JSON object, got {text[:100]!r} ({error})")
                    continue
                for column, name in zip(cells, kinds, strict=True):
                    column.append(row.get(name))
                lines.append(line)
                if len(lines) == _CAREFUL_ROWS:
                    yield _from_cells(kinds, cells, lines, self.name, malformed, _json_cell)
                    cells, lines = [[] for _ in kinds], []
            if lines:
                yield _from_cells(kinds, cells, lines, self.name, malformed, _json_cell)


def _likely(column: pa.Array) -> pa.DataType:
    """The type of a column of text: that of numbers where most of its first cells are, so that the others are named."""
    if pa.types.is_binary(column.type):
        return pa.string()  # some of it isn't UTF-8, which is told of when it is read
    if not pa.types.is_string(column.type):
        return column.type
    cells = [cell for cell in column.slice(0, _LOOKED_AT).to_pylist() if cell not in _NULLS]
    for convert, kind in ((_checked_int, pa.int64()), (_checked_float, pa.float64())):
        found = 0
        for cell in cells:
            with contextlib.suppress(ValueError, OverflowError):
                convert(cell)
                found += 1
        if 2 * found > len(cells):
            return kind
    return column.type


def _whole_lines(file: Any) -> Iterator[bytes]:
    """Chunks of a file that end with a line."""
    rest = b""
    while chunk := file.read(_TEXT_BYTES):
        end = chunk.rfind(b"\n") + 1
        if end:
            yield rest + chunk[:end]
            rest = chunk[end:]
        else:
            rest += chunk
    if rest.strip():
        yield rest


def _types_of_lines(text: bytes) -> dict[str, pa.DataType]:
    """The types of JSON lines some of which can't be read."""
    rows = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict):
                rows.append(row)
    types: dict[str, pa.DataType] = {}
    for row in rows:
        for name, value in row.items():
            if types.get(name, pa.null()) == pa.null():
                with contextlib.suppress(pa.ArrowInvalid, pa.ArrowTypeError):
                    types[name] = pa.array([value]).type
    return types


# ---- cells, one by one


def _from_cells(
    kinds: Mapping[str, Kind],
    cells: list[list[Any]],
    lines: list[int],
    name: str,
    malformed: Malformed,
    convert: Callable[[Any, Kind], Any],
) -> Block:
    """Rows of cells, without those that have one that isn't what its column is taken for."""
    good = np.ones(len(lines), np.bool_)
    problems: dict[int, tuple[str, Kind, Any]] = {}
    columns: dict[str, list[Any]] = {}
    for (column, kind), values in zip(kinds.items(), cells, strict=True):
        converted = columns[column] = []
        for row, value in enumerate(values):
            try:
                converted.append(convert(value, kind))
            except (ValueError, TypeError, OverflowError):
                converted.append(None)
                problems.setdefault(row, (column, kind, value))
                good[row] = False
    for row, (column, kind, value) in sorted(problems.items()):
        malformed.tell(f"column {column!r} must hold {_SAID[kind]} in line {lines[row]} of {name}, got {value!r:.100}")
    kept = list(itertools.compress(range(len(lines)), good))
    arrays = {column: _array([values[row] for row in kept], kinds[column]) for column, values in columns.items()}
    return Block(arrays, len(kept), name, np.array(lines, np.int64)[good], "line")


def _array(values: list[Any], kind: Kind) -> pa.Array:
    if kind in _TYPES:
        return pa.array(values, _TYPES[kind])
    if kind == "time":
        return pa.array(values, pa.string())
    array = pa.array(values)
    return array.cast(pa.list_(pa.float64())) if array.type == pa.null() else array


def _csv_cell(cell: str, kind: Kind) -> Any:
    if not cell.isascii():
        cell.encode()  # what wasn't UTF-8 can't be encoded again
    if kind == "text":
        return cell
    if cell in _NULLS:
        return None
    if kind == "integer":
        return _checked_int(cell)
    if kind in ("number", "real"):
        return 1.0 if cell in ("true", "True") else 0.0 if cell in ("false", "False") else _checked_float(cell)
    return cell


def _json_cell(value: Any, kind: Kind) -> Any:
    if value is None:
        return None
    if kind == "text":
        if isinstance(value, str):
            value.encode()
            return value
        if isinstance(value, bool | int):
            return json.dumps(value)
        raise TypeError
    if kind in ("number", "real"):
        if isinstance(value, bool | int | float):
            return float(value)
        raise TypeError
    if kind == "integer":
        if isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63:
            return value
        raise TypeError
    if kind == "time":
        if isinstance(value, str):
            return value
        raise TypeError
    return [float(number) for number in value]


def _checked_int(cell: str) -> int:
    if "_" in cell:
        raise ValueError
    number = int(cell)
    if not -(2**63) <= number < 2**63:
        raise OverflowError
    return number


def _checked_float(cell: str) -> float:
    if "_" in cell:
        raise ValueError
    return float(cell)
