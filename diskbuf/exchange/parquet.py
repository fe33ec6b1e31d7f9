"""Parquet: a table of rows, in row groups."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import OptionError
from diskbuf.exchange.contract import Format, RowSource, Target
from diskbuf.exchange.places import opened_for_reading
from diskbuf.exchange.store_rows import StoreRows
from diskbuf.exchange.tables import (
    arrays_of,
    batch_of,
    carried_of,
    list_columns,
    naming_what_is_wrong,
    schema_of,
    source_columns,
)

if TYPE_CHECKING:
    import pyarrow as pa

_NUMBERS = re.compile("([0-9]+)")
_COMPRESSIONS = ("none", "snappy", "zstd", "lz4", "gzip", "brotli")
_READ_BYTES = 2**23
_BINARY_ELEMENTS = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParquetFormat(Format):
    """A Parquet file, or to import from a folder of such files too.

    Of a foreign file, columns of lists that are all as long as that of the first row are arrays, as pandas writes them.

    Small arrays are lists, which Arrow's readers see as tensors of their shape. Parquet encodes lists number by number,
    which for frames is some thirty times slower than the disk, so arrays of 256 numbers and more are binary:
    ``np.frombuffer(value, dtype).reshape(shape)``, as the column's metadata (``diskbuf.array``) says. Floats aren't
    dictionary-encoded: they hardly ever repeat, and looking for it takes longer. Pages have checksums, which an import
    compares.

    Attributes:
        compression: Of the pages: none, snappy, zstd, lz4, gzip or brotli.
        level: How hard it tries; None for its usual level.
        arrays: "list" or "binary" for all arrays, "auto" as above.
        row_group_bytes: Most bytes of the rows in a row group, before they are encoded. Parquet's writer takes some ten
            times as much memory for arrays of bytes.

    Raises:
        OptionError: When an option is outside its rule.
    """

    compression: str = "zstd"
    level: int | None = None
    arrays: str = "auto"
    row_group_bytes: int = 2**24

    name: ClassVar[str] = "parquet"
    endings: ClassVar[tuple[str, ...]] = (".parquet", ".pq")
    carries: ClassVar[bool] = True
    takes_urls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.compression not in _COMPRESSIONS:
            raise OptionError(f"compression must be one of {', '.join(_COMPRESSIONS)}, got {self.compression!r}.")
        if self.level is not None and (isinstance(self.level, bool) or not isinstance(self.level, int)):
            raise OptionError(f"level must be an int, got {self.level!r}.")
        if self.arrays not in ("auto", "list", "binary"):
            raise OptionError(f"arrays must be auto, list or binary, got {self.arrays!r}.")
        if type(self.row_group_bytes) is not int or self.row_group_bytes < 1:
            raise OptionError(f"row_group_bytes must be an int of at least 1, got {self.row_group_bytes!r}.")

    def export(self, rows: StoreRows, target: Target) -> None:
        """Writes a file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._check_level()
        binary = self._binary_columns(rows)
        schema = schema_of(rows, binary=binary)
        with (
            target.open() as file,
            pq.ParquetWriter(
                pa.PythonFile(file, "w") if target.path is None else file,
                schema,
                compression=self.compression,
                compression_level=self.level,
                use_dictionary=_dictionary_columns(rows, binary),
                write_page_checksum=True,
            ) as writer,
            ThreadPoolExecutor(1, thread_name_prefix="diskbuf-export") as pool,
        ):
            writing: Future[None] | None = None
            for batches in self._row_groups(rows, schema):  # the next one is read while one is written
                if writing is not None:
                    writing.result()
                writing = pool.submit(_write, writer, batches)
            if writing is not None:
                writing.result()

    def _check_level(self) -> None:
        if self.level is None:
            return
        import pyarrow as pa

        try:
            low = pa.Codec.minimum_compression_level(self.compression)
            high = pa.Codec.maximum_compression_level(self.compression)
        except ValueError as error:
            raise OptionError(f"level must be left out for {self.compression}, got {self.level}.") from error
        if not low <= self.level <= high:
            raise OptionError(f"level must be from {low} to {high} for {self.compression}, got {self.level}.")

    def _binary_columns(self, rows: StoreRows) -> set[str]:
        least = {"auto": _BINARY_ELEMENTS, "list": None, "binary": 1}[self.arrays]
        if least is None:
            return set()
        return {path for path, spec in rows.columns.items() if spec.shape and math.prod(spec.shape) >= least}

    def _row_groups(self, rows: StoreRows, schema: "pa.Schema") -> "Iterator[list[pa.RecordBatch]]":
        waiting: list[pa.RecordBatch] = []
        size = 0
        for block in rows.row_blocks(block_bytes=self.row_group_bytes):
            batch = batch_of(rows, block, schema)
            if waiting and size + batch.nbytes > self.row_group_bytes:
                yield waiting
                waiting, size = [], 0
            waiting.append(batch)
            size += batch.nbytes
        if waiting:
            yield waiting

    def open_source(self, place: str, storage_options: Mapping[str, Any] | None) -> RowSource:
        """Opens a file, or the files of a folder."""
        return _ParquetSource(place, storage_options)


def _write(writer: Any, batches: "list[pa.RecordBatch]") -> None:
    """Writes batches as one row group."""
    import pyarrow as pa

    table = pa.Table.from_batches(batches)
    writer.write_table(table, row_group_size=len(table))


def _dictionary_columns(rows: StoreRows, binary: Collection[str]) -> list[str]:
    """Columns whose values are worth a dictionary: Parquet has no ints of fewer than 32 bits otherwise."""
    return ["lane"] + [
        _leaf_path(rows.names[path], bool(spec.shape))
        for path, spec in rows.columns.items()
        if spec.dtype.kind in "iu" and path not in binary
    ]


def _leaf_path(name: str, is_list: bool) -> str:
    return f"{name}.list.element" if is_list else name


class _ParquetSource(RowSource):
    def __init__(self, place: str, storage_options: Mapping[str, Any] | None) -> None:
        self.name = place
        self._options = storage_options
        self._places = _files_of(place)
        import pyarrow.parquet as pq

        self.num_rows = 0
        first: Any = None
        row: pa.RecordBatch | None = None
        for part in self._places:
            with opened_for_reading(part, storage_options) as file, naming_what_is_wrong(part, "Parquet"):
                opened = pq.ParquetFile(file)
                schema, rows = opened.schema_arrow, opened.metadata.num_rows
                if row is None and rows and (lists := list_columns(schema)):
                    row = next(opened.iter_batches(batch_size=1, columns=lists), None)
            if first is None:
                first = schema
            elif not schema.equals(first):
                raise OptionError(f"the files of {place} must have the same columns, got others in {part}.")
            self.num_rows += rows
        self.carried = carried_of(first.metadata, name=place)
        self.columns = source_columns(first, self.carried, first=row)

    def blocks(self, wanted: Mapping[str, np.dtype[Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        import pyarrow.parquet as pq

        names = list(wanted)
        specs = [self.columns[name].spec for name in names]
        row_bytes = sum(
            spec.dtype.itemsize * int(np.prod(spec.shape, dtype=np.int64)) for spec in specs if spec is not None
        )
        size = max(1, min(2**20, _READ_BYTES // max(1, row_bytes)))
        row = 0
        for part in self._places:
            with opened_for_reading(part, self._options) as file, naming_what_is_wrong(part, "Parquet"):
                opened = pq.ParquetFile(file, pre_buffer=False, page_checksum_verification=True)
                for batch in opened.iter_batches(batch_size=size, columns=names):
                    found = arrays_of(batch, self.columns, first_row=row, name=self.name)
                    row += batch.num_rows
                    yield {name: found[name] for name in names}


def _files_of(place: str) -> Sequence[str]:
    """The files of a folder in the order of their names, in which part-2 is before part-10; a file or a URL by itself.

    Raises:
        OptionError: When there are none, or names of folders are values of a column.
    """
    if "://" in place or not Path(place).is_dir():
        return [place]
    found = [path.relative_to(place) for path in Path(place).rglob("*.parquet")]
    if not found:
        raise OptionError(f"source must be a Parquet file or a folder of them, got the folder {place} without any.")
    if named := sorted({part for path in found for part in path.parts[:-1] if "=" in part}):
        raise OptionError(
            f"the files of {place} must hold all columns, got folders that stand for values of one, {named[0]!r} say. "
            "Write the table without partitions, or import one folder."
        )
    return [str(Path(place) / path) for path in sorted(found, key=_in_order)]


def _in_order(path: Path) -> list[list[tuple[bool, int, str]]]:
    """A key that sorts names by the numbers in them."""
    return [
        [(word.isdecimal(), int(word) if word.isdecimal() else 0, word) for word in _NUMBERS.split(part)]
        for part in path.parts
    ]
