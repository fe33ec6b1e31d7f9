"""Arrow IPC: a file, or a stream, of record batches in the types of a store's own Arrow layout."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import OptionError
from diskbuf.exchange.contract import Format, RowSource, SourceColumn, Target
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

_MAGIC = b"ARROW1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrowFormat(Format):
    """An Arrow file; Feather's version 2 is one.

    Of a foreign file, columns of lists that are all as long as that of the first row are arrays.

    Attributes:
        compression: none, zstd or lz4. What isn't compressed can be mapped.
        container: "file", which can be read from anywhere, or "stream", which is read from the beginning.
        batch_bytes: Of a record batch, about.

    Raises:
        OptionError: When an option is outside its rule.
    """

    compression: Literal["none", "zstd", "lz4"] = "none"
    container: Literal["file", "stream"] = "file"
    batch_bytes: int = 2**24

    name: ClassVar[str] = "arrow"
    endings: ClassVar[tuple[str, ...]] = (".arrow", ".feather", ".ipc")
    carries: ClassVar[bool] = True
    takes_urls: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, known in (("compression", ("none", "zstd", "lz4")), ("container", ("file", "stream"))):
            if getattr(self, name) not in known:
                raise OptionError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}.")
        if type(self.batch_bytes) is not int or self.batch_bytes < 1:
            raise OptionError(f"batch_bytes must be an int of at least 1, got {self.batch_bytes!r}.")

    def export(self, rows: StoreRows, target: Target) -> None:
        """Writes a file."""
        import pyarrow as pa

        schema = schema_of(rows)
        options = pa.ipc.IpcWriteOptions(compression=None if self.compression == "none" else self.compression)
        begin = pa.ipc.new_file if self.container == "file" else pa.ipc.new_stream
        with target.open() as file, begin(pa.PythonFile(file, "w"), schema, options=options) as writer:
            for block in rows.row_blocks(block_bytes=self.batch_bytes):
                writer.write_batch(batch_of(rows, block, schema))

    def open_source(self, place: str, storage_options: Mapping[str, Any] | None) -> RowSource:
        """Opens a file or a stream, whichever it is."""
        return _ArrowSource(place, storage_options)


class _ArrowSource(RowSource):
    def __init__(self, place: str, storage_options: Mapping[str, Any] | None) -> None:
        import pyarrow as pa

        self.name = place
        self._options = storage_options
        with opened_for_reading(place, storage_options) as file, naming_what_is_wrong(place, "Arrow"):
            self._is_file = file.read(len(_MAGIC)) == _MAGIC
            file.seek(0)
            schema = (pa.ipc.open_file if self._is_file else pa.ipc.open_stream)(file).schema
        self.columns = {field.name: SourceColumn(spec=None, kind=str(field.type)) for field in schema}
        lists = list_columns(schema)
        row = next((batch.select(lists) for batch in self._batches(lists) if len(batch)), None) if lists else None
        self.carried = carried_of(schema.metadata, name=place)
        self.columns = source_columns(schema, self.carried, first=row)

    def blocks(self, wanted: Mapping[str, np.dtype[Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        names = list(wanted)
        row = 0
        for batch in self._batches(names):
            found = arrays_of(batch.select(names), self.columns, first_row=row, name=self.name)
            row += batch.num_rows
            yield found

    def _batches(self, names: list[str]) -> Iterator[Any]:
        import pyarrow as pa

        with opened_for_reading(self.name, self._options) as file, naming_what_is_wrong(self.name, "Arrow"):
            if not self._is_file:
                yield from pa.ipc.open_stream(file)
                return
            places = sorted(list(self.columns).index(name) for name in names)
            reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=places))
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)
