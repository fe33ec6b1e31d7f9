"""Checksums of chunks: what their bytes were when they were written, so that rot is found. Kept in one Arrow file."""

import dataclasses
import io
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diskbuf.errors import StoreCorruptError
from diskbuf.store import files
from diskbuf.store.layout import ColumnLayout

if TYPE_CHECKING:
    import pyarrow as pa

CHECKSUM_FILE = "checksums.arrow"
_PIECE_BYTES = 2**20
_OWN_CHECKSUM = b"crc32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checksum:
    """The checksum of the rows at the beginning of a chunk.

    Rows are only ever appended to a chunk, so it stays right when more come.

    Attributes:
        first_id: Id of the chunk's first row.
        rows: How many rows it covers.
        bytes: How many bytes that is.
        crc32c: CRC-32C (Castagnoli) of these bytes, as in RFC 3720.
    """

    first_id: int
    rows: int
    bytes: int
    crc32c: int


class ChecksumTable:
    """The checksums of a store, by column and chunk.

    Args:
        path: The Arrow file.
        entries: What is in it.
    """

    def __init__(self, path: Path, entries: dict[tuple[str, int], Checksum] | None = None) -> None:
        self.path = path
        self.entries = {} if entries is None else entries
        self._is_changed = False

    @classmethod
    def load(cls, path: Path) -> "ChecksumTable":
        """Reads the table; a store without the file has none.

        Raises:
            StoreCorruptError: When the file isn't a whole one.
        """
        if not os.path.lexists(path):
            return cls(path)
        import pyarrow as pa

        try:
            with pa.OSFile(os.fspath(path), "rb") as source:
                table = pa.ipc.open_file(source).read_all()
            table.validate(full=True)
            columns = table.to_pydict()
            expected = (table.schema.metadata or {}).get(_OWN_CHECKSUM)  # None in a table written before there was one
            if expected is not None and expected != _checksum_of_table(columns):
                raise ValueError("it was changed after it was written")
            rows = zip(*(columns[name] for name in _schema().names), strict=True)
            entries = {
                (column, chunk): Checksum(first_id=first_id, rows=count, bytes=size, crc32c=crc)
                for column, chunk, first_id, count, size, crc in rows
            }
        except (pa.ArrowException, OSError, LookupError, ValueError, TypeError, MemoryError) as error:
            raise StoreCorruptError(
                f"{path} must be a whole Arrow file of checksums, but can't be read: {' '.join(str(error).split())}. "
                "Delete that file to go on without the checksums, or run diskbuf.repair.",
                path=str(path),
            ) from error
        return cls(path, entries)

    def set(self, layout: ColumnLayout, chunk: int, checksum: Checksum) -> None:
        """Takes over the checksum of a chunk."""
        self.entries[layout.file_path, chunk] = checksum
        self._is_changed = True

    def keep(self, layouts: Iterable[ColumnLayout], first_id: int, next_id: int) -> None:
        """Forgets what covers rows that are not in [first_id, next_id): evicted chunks, and rows that were lost.

        A chunk of which only the first rows are below `first_id` stays.
        """
        kept = {
            (layout.file_path, chunk)
            for layout in layouts
            for chunk in layout.chunks(first_id, next_id)
            if (entry := self.entries.get((layout.file_path, chunk))) and entry.first_id + entry.rows <= next_id
        }
        if len(kept) < len(self.entries):
            self.entries = {key: self.entries[key] for key in kept}
            self._is_changed = True

    def save(self, *, sync: bool) -> None:
        """Writes the table when it has changed.

        Raises:
            OSError: When it can't be written; the old file stands.
        """
        if not self._is_changed:
            return
        import pyarrow as pa

        keys = sorted(self.entries)
        entries = [self.entries[key] for key in keys]
        columns = {
            "column": [column for column, _ in keys],
            "chunk": [chunk for _, chunk in keys],
            **{field.name: [getattr(entry, field.name) for entry in entries] for field in dataclasses.fields(Checksum)},
        }
        schema = _schema().with_metadata({_OWN_CHECKSUM: _checksum_of_table(columns)})
        table = pa.table(columns, schema=schema)
        sink = io.BytesIO()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        files.replace_file(self.path, sink.getvalue(), sync=sync)
        self._is_changed = False


def checksum_of(path: Path, layout: ColumnLayout, chunk: int, *, rows: int) -> Checksum:
    """Reads the first rows of a chunk file and returns their checksum.

    Args:
        path: The chunk file.
        layout: Its column.
        chunk: Its number.
        rows: How many rows to read.

    Returns:
        The checksum.

    Raises:
        OSError: When the file can't be read.
        EOFError: When it ends before these rows.
    """
    import google_crc32c

    size = rows * layout.row_bytes
    crc = 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = 0
        while done < size:  # in pieces, so that other threads get their turn
            piece = os.pread(descriptor, min(_PIECE_BYTES, size - done), done)
            if not piece:
                raise EOFError(f"{path} ends after {done} of {size} bytes")
            crc = google_crc32c.extend(crc, piece)
            done += len(piece)
    finally:
        os.close(descriptor)
    return Checksum(first_id=chunk * layout.chunk_rows, rows=rows, bytes=size, crc32c=crc)


def rot_in(path: Path, layout: ColumnLayout, chunk: int, expected: Checksum) -> str | None:
    """Says how a chunk file's bytes differ from what they were, None when they don't.

    Raises:
        OSError: When the file can't be read.
    """
    try:
        found = checksum_of(path, layout, chunk, rows=expected.rows)
    except EOFError:
        return f"must hold {layout.chunk_bytes} bytes, but ends before the {expected.bytes} that were written"
    if found == expected:
        return None
    return f"must have checksum {expected.crc32c:08x} over its first {expected.bytes} bytes, has {found.crc32c:08x}"


def _checksum_of_table(columns: Mapping[str, Any]) -> bytes:
    """CRC-32 (as in zlib) of the values: a wrong one would put the blame on a chunk that is whole."""
    return b"%08x" % zlib.crc32(repr([columns[name] for name in _schema().names]).encode())


def _schema() -> "pa.Schema":
    import pyarrow as pa

    return pa.schema(
        {
            "column": pa.string(),
            "chunk": pa.int64(),
            "first_id": pa.int64(),
            "rows": pa.int64(),
            "bytes": pa.int64(),
            "crc32c": pa.uint32(),
        }
    )
