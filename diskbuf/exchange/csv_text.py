"""CSV: a line for each row, a column for each number."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import OptionError, SpecError
from diskbuf.exchange.contract import ID, LANE, Format, RowBlock, RowSource, SourceColumn, Target
from diskbuf.exchange.folding import ELEMENT, shape_of
from diskbuf.exchange.places import opened_for_reading
from diskbuf.exchange.store_rows import StoreRows
from diskbuf.exchange.tables import naming_what_is_wrong
from diskbuf.specs import ArraySpec

if TYPE_CHECKING:
    import pyarrow as pa

_BLOCK_BYTES = 2**22
_DIGITS = re.compile(r"\+?[0-9]+")
_NO_TEXT = ("", "nan", "NaN", "inf", "-inf")
_BOOLS = {"true": True, "false": False, "True": True, "False": False, "1": True, "0": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CsvFormat(Format):
    """A CSV file with a header line.

    Floats are written with as many digits as tell them from all others of their dtype, NaN as nan and infinity as inf,
    so that all of them but the bits of a NaN come back. What a column was isn't in the file: to import it, say which
    spec it is for.

    Columns `leaf[0]`, `leaf[1]`, … or `leaf[0,0]`, … are read as one array, when all of its elements are there.

    Attributes:
        flatten: Whether the elements of arrays are columns each. Without it arrays are refused.

    Raises:
        OptionError: When an option is outside its rule.
    """

    flatten: bool = False

    name: ClassVar[str] = "csv"
    endings: ClassVar[tuple[str, ...]] = (".csv",)
    takes_urls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.flatten, bool):
            raise OptionError(f"flatten must be True or False, got {self.flatten!r}.")

    def export(self, rows: StoreRows, target: Target) -> None:
        """Writes a file; arrays are refused unless they are flattened, and complex numbers are refused."""
        import pyarrow as pa
        import pyarrow.csv as pa_csv

        arrays = [path for path, spec in rows.columns.items() if spec.shape]
        if pairs := [path for path, spec in rows.columns.items() if spec.dtype.kind == "c"]:
            raise OptionError(f"columns must be real numbers to be written as CSV, got {pairs}. Use Parquet.")
        if arrays and not self.flatten:
            raise OptionError(
                f"columns must be single numbers to be written as CSV, got arrays in "
                f"{', '.join(repr(path or '(array)') for path in arrays[:8])}. Choose the others, flatten the arrays, "
                "or use Parquet."
            )
        schema = _schema(rows)
        options = pa_csv.WriteOptions(quoting_style="needed")
        with (
            target.open() as file,
            pa_csv.CSVWriter(pa.PythonFile(file, "w"), schema, write_options=options) as writer,
        ):
            for block in rows.row_blocks(block_bytes=_BLOCK_BYTES):
                writer.write_batch(pa.record_batch(_columns(rows, block), schema=schema))

    def open_source(self, place: str, storage_options: Mapping[str, Any] | None) -> RowSource:
        """Opens a file."""
        return _CsvSource(place, storage_options)


def _schema(rows: StoreRows) -> "pa.Schema":
    import pyarrow as pa

    fields = [pa.field(ID, pa.int64()), pa.field(LANE, pa.int32())]
    for path, spec in rows.columns.items():
        kind = pa.from_numpy_dtype(np.dtype(np.float32) if spec.dtype == np.float16 else spec.dtype)
        fields += [pa.field(name, kind) for name in element_names(rows.names[path], spec.shape)]
    return pa.schema(fields)


def element_names(name: str, shape: tuple[int, ...]) -> list[str]:
    """Names of the columns of an array's elements, in C order.

    >>> element_names("v", (2, 2)), element_names("v", ())
    (['v[0,0]', 'v[0,1]', 'v[1,0]', 'v[1,1]'], ['v'])
    """
    if not shape:
        return [name]
    return [f"{name}[{','.join(map(str, place))}]" for place in itertools.product(*map(range, shape))]


def _columns(rows: StoreRows, block: RowBlock) -> "list[pa.Array]":
    import pyarrow as pa

    found = [pa.array(block.ids), pa.array(block.lanes)]
    for path, spec in rows.columns.items():
        flat = block.columns[path].reshape(len(block.ids), math.prod(spec.shape))
        if spec.dtype == np.float16:  # each is a float32 too, of which the digits are known
            flat = flat.astype(np.float32)
        found += [pa.array(np.ascontiguousarray(flat[:, place])) for place in range(flat.shape[1])]
    return found


class _CsvSource(RowSource):
    def __init__(self, place: str, storage_options: Mapping[str, Any] | None) -> None:
        self.name = place
        self._options = storage_options
        with opened_for_reading(place, storage_options) as file, naming_what_is_wrong(place, "CSV"):
            reader = self._reader(file, {}, None, nulls=_NO_TEXT)  # so that a column of floats looks like one
            kinds = {field.name: field.type for field in reader.schema}
            if len(kinds) < len(reader.schema):
                raise SpecError(f"the columns of {place} must have different names, got {reader.schema.names}.")
            first = next(iter(reader), None)
            kinds |= _empty_kinds(kinds) if first is None else self._unsigned_kinds(first)
        self.columns, self._elements = _grouped(kinds)

    def blocks(self, wanted: Mapping[str, np.dtype[Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        import pyarrow as pa

        types: dict[str, Any] = {}
        for name, dtype in wanted.items():
            if dtype.kind == "c":
                raise SpecError(
                    f"column {name!r} of {self.name} must be read as real numbers, got {dtype}. Cast it to a float.",
                    path=name,
                )
            kind = pa.from_numpy_dtype(dtype)
            # Of a float16 the file has the digits of a float32; bools are read as they are written.
            kind = pa.float32() if pa.types.is_float16(kind) else pa.string() if pa.types.is_boolean(kind) else kind
            types |= dict.fromkeys(self._elements[name], kind)
        row = 0
        with opened_for_reading(self.name, self._options) as file, naming_what_is_wrong(self.name, "CSV"):
            for batch in self._reader(file, types, list(types)):
                found = {name: self._array(batch, name, dtype, row) for name, dtype in wanted.items()}
                row += batch.num_rows
                yield found

    def _unsigned_kinds(self, first: "pa.RecordBatch") -> "dict[str, pa.DataType]":
        """Kinds of columns of ints beyond int64, which Arrow takes for floats, and so would round."""
        import pyarrow as pa

        large = [
            name for name, column in zip(first.schema.names, first.columns, strict=True) if _are_large_ints(column)
        ]
        if not large:
            return {}
        with opened_for_reading(self.name, self._options) as file:
            batch = next(iter(self._reader(file, dict.fromkeys(large, pa.string()), large)))
        words = {name: batch.column(name).drop_null().unique().to_pylist() for name in large}
        return {
            name: pa.uint64()
            for name, found in words.items()
            if all(_DIGITS.fullmatch(word) and int(word) < 2**64 for word in found)
        }

    def _array(self, batch: "pa.RecordBatch", name: str, dtype: np.dtype[Any], row: int) -> NDArray[Any]:
        spec = self.columns[name].spec
        shape = () if spec is None else spec.shape
        parts = [self._numbers(batch.column(element), element, dtype, row) for element in self._elements[name]]
        return parts[0] if not shape else np.stack(parts, axis=-1).reshape(batch.num_rows, *shape)

    def _numbers(self, column: "pa.Array", name: str, dtype: np.dtype[Any], row: int) -> NDArray[Any]:
        import pyarrow as pa

        if column.null_count:
            at = int(np.asarray(column.is_null()).argmax())
            raise SpecError(
                f"column {name!r} of {self.name} must have a value in every row, but row {row + at} has none.",
                path=name,
            )
        if pa.types.is_string(column.type):
            coded = column.dictionary_encode()
            words = coded.dictionary.to_pylist()
            wrong = [word for word in words if word not in _BOOLS]
            if wrong:
                raise SpecError(f"column {name!r} of {self.name} must be true or false, got {wrong[0]!r}.", path=name)
            bools: NDArray[Any] = np.array([_BOOLS[word] for word in words], np.bool)
            return np.asarray(bools[coded.indices.to_numpy()])
        numbers: NDArray[Any] = column.to_numpy(zero_copy_only=False)
        if dtype == np.float16:
            found = numbers.astype(np.float16)
            if not ((found.astype(np.float32) == numbers) | np.isnan(numbers)).all():
                raise SpecError(f"column {name!r} of {self.name} must hold float16 exactly.", path=name)
            return found
        return numbers

    def _reader(
        self, file: Any, types: Mapping[str, Any], names: list[str] | None, *, nulls: Sequence[str] = ("",)
    ) -> Any:
        import pyarrow as pa
        import pyarrow.csv as pa_csv

        return pa_csv.open_csv(
            pa.PythonFile(file, "r"),
            read_options=pa_csv.ReadOptions(block_size=_BLOCK_BYTES),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict(types),
                include_columns=names,
                null_values=list(nulls),
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )


def _are_large_ints(column: "pa.Array") -> bool:
    import pyarrow as pa

    if not pa.types.is_floating(column.type):
        return False
    values = column.to_numpy(zero_copy_only=False)
    finite = values[np.isfinite(values)]
    return bool((np.abs(finite) >= 2.0**63).any() and (finite == np.floor(finite)).all())


def _empty_kinds(kinds: "Mapping[str, pa.DataType]") -> "dict[str, pa.DataType]":
    """Kinds of columns without a row, which can be keys, too."""
    import pyarrow as pa

    return {name: pa.int64() for name, kind in kinds.items() if pa.types.is_null(kind)}


def _grouped(kinds: Mapping[str, Any]) -> tuple[dict[str, SourceColumn], dict[str, list[str]]]:
    """Puts the elements of arrays together.

    Returns:
        The columns, and for each the columns of the file in the order of its elements.
    """
    places: dict[str, dict[tuple[int, ...], str]] = {}
    for name in kinds:
        match = ELEMENT.fullmatch(name)
        if match:
            places.setdefault(match[1], {})[tuple(map(int, match[2].split(",")))] = name
    shapes = {}
    for name, found in places.items():
        shape = shape_of(found)
        if shape is not None and name not in kinds:
            shapes[name] = shape
    columns: dict[str, SourceColumn] = {}
    elements: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        match = ELEMENT.fullmatch(name)
        if match and match[1] in shapes:
            array = match[1]
            if array not in columns:
                shape = shapes[array]
                elements[array] = [places[array][place] for place in itertools.product(*map(range, shape))]
                dtypes = [_dtype_of(kinds[element]) for element in elements[array]]
                known = [found for found in dtypes if found is not None]
                dtype = _common(known) if len(known) == len(dtypes) else None
                columns[array] = _column(dtype, shape, f"text like {kind}")
        else:
            columns[name] = _column(_dtype_of(kind), (), f"text like {kind}")
            elements[name] = [name]
    return columns, elements


def _common(dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """The dtype of an array whose elements look like these; ints stay ints, or are refused when they are read."""
    found = np.result_type(*dtypes)
    return np.dtype(np.uint64) if found.kind == "f" and all(dtype.kind in "iu" for dtype in dtypes) else found


def _column(dtype: np.dtype[Any] | None, shape: tuple[int, ...], kind: str) -> SourceColumn:
    return SourceColumn(spec=None if dtype is None else ArraySpec(shape, dtype), kind=kind, is_text=True)


def _dtype_of(kind: Any) -> np.dtype[Any] | None:
    """What a column looks like in its first block, None for text."""
    import pyarrow as pa

    if pa.types.is_null(kind):
        return np.dtype(np.float64)
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind):
        found: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
        return found
    return None
