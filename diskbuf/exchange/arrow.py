"""Arrow IPC: a file, or a stream, of record batches in the types of a store's own Arrow layout."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import OptionError, SpecError
from diskbuf.exchange.contract import ID, LANE, Format, RowSource, SourceColumn, Target
from diskbuf.exchange.places import opened_for_reading
from diskbuf.exchange.store_rows import StoreRows
from diskbuf.exchange.tables import (
    arrays_of,
    batch_of,
    carried_of,
    checksum_of,
    list_columns,
    naming_what_is_wrong,
    schema_of,
    source_columns,
)

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_CHECKSUMS = "diskbuf.crc32c"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrowFormat(Format):
    """An Arrow file; Feather's version 2 is one.

    Each record batch has a checksum of each column in its metadata (`diskbuf.crc32c`), which an import compares.

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
                found = {rows.names[path]: checksum_of(values) for path, values in block.columns.items()}
                checksums = {ID: checksum_of(block.ids), LANE: checksum_of(block.lanes)} | found
                writer.write_batch(batch_of(rows, block, schema), custom_metadata={_CHECKSUMS: json.dumps(checksums)})

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
        self.carried = carried_of(schema.metadata, name=place)
        lists = list_columns(schema)
        row = next((batch.select(lists) for batch, _ in self._batches(lists) if len(batch)), None) if lists else None
        self.columns = source_columns(schema, self.carried, first=row)

    def blocks(self, wanted: Mapping[str, np.dtype[Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        names = list(wanted)
        row = 0
        for batch, checksums in self._batches(names):
            found = arrays_of(batch.select(names), self.columns, first_row=row, name=self.name)
            for name in names:
                if name in checksums and checksums[name] != checksum_of(found[name]):
                    raise SpecError(
                        f"column {name!r} of {self.name} must match its checksum, but rows {row} to "
                        f"{row + batch.num_rows - 1} have changed since they were exported. Copy the file again.",
                        path=name,
                    )
            row += batch.num_rows
            yield found

    def _batches(self, names: list[str]) -> "Iterator[tuple[pa.RecordBatch, dict[str, int]]]":
        """Record batches, and the checksums of their columns that an export brings."""
        import pyarrow as pa

        with opened_for_reading(self.name, self._options) as file, naming_what_is_wrong(self.name, "Arrow"):
            if not self._is_file:
                stream = pa.ipc.open_stream(file)
                with contextlib.suppress(StopIteration):
                    while True:
                        batch, told = stream.read_next_batch_with_custom_metadata()
                        yield batch, self._checksums(told)
                self._check_end(file)
                return
            places = sorted(list(self.columns).index(name) for name in names)
            reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=places))
            for number in range(reader.num_record_batches):
                batch, told = reader.get_batch_with_custom_metadata(number)
                yield batch, self._checksums(told)

    def _checksums(self, told: Mapping[bytes, bytes] | None) -> dict[str, int]:
        text = (told or {}).get(_CHECKSUMS.encode())
        value: Any = None
        if self.carried is not None and text is not None:
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(text)
            if not isinstance(value, dict):
                raise SpecError(f"{self.name} must have the checksums of its rows as they were written. Copy it again.")
        return value or {}

    def _check_end(self, file: BinaryIO) -> None:
        """Refuses an export that was cut between two record batches, which Arrow takes for its end."""
        if self.carried is None:
            return
        file.seek(-len(_STREAM_END), os.SEEK_END)
        if file.read() != _STREAM_END:
            raise SpecError(f"{self.name} must end as an export does, but is cut short. Copy the file again.")
