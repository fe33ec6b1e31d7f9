"""Checksums of chunks: what their bytes were when they were written, so that rot is found. Kept in one Arrow file."""

import dataclasses
import io
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diskbuf.errors import StoreCorruptError
from diskbuf.store import files
from diskbuf.store.layout import STATE_FOLDER, ColumnLayout, chunks_of

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
    """The checksums of a store by column and chunk; of objects that hold several columns, by their folder and chunk.

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
        try:
            data = path.read_bytes()
        except OSError as error:
            raise _unreadable(str(path), error) from error
        return cls(path, entries_in(data, place=str(path)))

    def set(self, folder: str, chunk: int, checksum: Checksum) -> None:
        """Takes over the checksum of a chunk."""
        self.entries[folder, chunk] = checksum
        self._is_changed = True

    def keep(self, folders: Mapping[str, int], first_id: int, next_id: int) -> None:
        """Forgets what covers rows that are not in [first_id, next_id): evicted chunks, and rows that were lost.

        A chunk of which only the first rows are below `first_id` stays.

        Args:
            folders: The rows of a chunk in each folder.
            first_id: First id that is kept.
            next_id: End of what is kept.
        """
        kept = {
            (folder, chunk)
            for folder, rows in folders.items()
            for chunk in chunks_of(first_id, next_id, rows)
            if (entry := self.entries.get((folder, chunk))) and entry.first_id + entry.rows <= next_id
        }
        if len(kept) < len(self.entries):
            self.entries = {key: self.entries[key] for key in kept}
            self._is_changed = True

    def forget_tails(self, folders: Mapping[str, int]) -> None:
        """Forgets what covers fewer rows than a chunk has.

        Args:
            folders: The rows of a chunk in each folder.
        """
        tails = [key for key, entry in self.entries.items() if entry.rows < folders.get(key[0], 0)]
        for key in tails:
            del self.entries[key]
            self._is_changed = True

    def save(self, *, sync: bool) -> None:
        """Writes the table when it has changed.

        Raises:
            OSError: When it can't be written; the old file stands.
        """
        if not self._is_changed:
            return
        files.replace_file(self.path, table_of(self.entries), sync=sync)
        self._is_changed = False


class ObjectChecksums:
    """The checksums of a store for those who read its objects, looked up again when one isn't known yet.

    Args:
        load: Returns the entries as they are now.
        version: Returns something that changes when they do.
    """

    def __init__(self, load: Callable[[], dict[tuple[str, int], Checksum]], version: Callable[[], object]) -> None:
        self._load = load
        self._version = version
        self._known: dict[tuple[str, int], Checksum] | None = None
        self._as_of: object = None
        self._loading = threading.Lock()

    def of(self, folder: str, chunk: int) -> Checksum | None:
        """The checksum of the object of a chunk, None when there is none."""
        known = self._known
        found = None if known is None else known.get((folder, chunk))
        if found is not None:
            return found
        with self._loading:  # many ask at first, for one table
            if self._known is None or self._as_of != self._version():
                self._as_of = self._version()
                self._known = self._load()
            return self._known.get((folder, chunk))

    def abandon(self) -> None:
        """Goes on in a forked child, where nobody frees what another thread had taken."""
        self._loading = threading.Lock()

    def forget(self) -> None:
        """Lets the next look load them again."""
        self._known = None

    @classmethod
    def of_store(cls, path: Path) -> "ObjectChecksums":
        """Those of a store here."""
        table = path / STATE_FOLDER / CHECKSUM_FILE
        return cls(lambda: ChecksumTable.load(table).entries, lambda: _stamp(table))


def _stamp(path: Path) -> object:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def entries_in(data: bytes, *, place: str) -> dict[tuple[str, int], Checksum]:
    """Reads a table of checksums.

    Args:
        data: The Arrow file.
        place: Where it came from, for messages.

    Returns:
        The checksums by column, or folder of objects, and chunk.

    Raises:
        StoreCorruptError: When it isn't a whole one.
    """
    import pyarrow as pa

    try:
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        table.validate(full=True)
        columns = table.to_pydict()
        expected = (table.schema.metadata or {}).get(_OWN_CHECKSUM)  # None in a table written before there was one
        if expected is not None and expected != _checksum_of_table(columns):
            raise ValueError("it was changed after it was written")
        rows = zip(*(columns[name] for name in _schema().names), strict=True)
        return {
            (column, chunk): Checksum(first_id=first_id, rows=count, bytes=size, crc32c=crc)
            for column, chunk, first_id, count, size, crc in rows
        }
    except (pa.ArrowException, OSError, LookupError, ValueError, TypeError, MemoryError) as error:
        raise _unreadable(place, error) from error


def _unreadable(place: str, error: Exception) -> StoreCorruptError:
    return StoreCorruptError(
        f"{place} must be a whole Arrow file of checksums, but can't be read: {' '.join(str(error).split())}. "
        "Delete that file to go on without the checksums, or run diskbuf.repair.",
        path=place,
    )


def table_of(entries: Mapping[tuple[str, int], Checksum]) -> bytes:
    """The Arrow file of a table of checksums."""
    import pyarrow as pa

    keys = sorted(entries)
    chosen = [entries[key] for key in keys]
    columns = {
        "column": [column for column, _ in keys],
        "chunk": [chunk for _, chunk in keys],
        **{field.name: [getattr(entry, field.name) for entry in chosen] for field in dataclasses.fields(Checksum)},
    }
    schema = _schema().with_metadata({_OWN_CHECKSUM: _checksum_of_table(columns)})
    table = pa.table(columns, schema=schema)
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


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
