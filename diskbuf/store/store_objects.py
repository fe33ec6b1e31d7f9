"""A store as objects, for those who write one somewhere else: chunks first, then what tells of them, the manifest last.

Whoever reads the manifest finds everything that it counts. Until then there is no store, or the one that was.
"""

from collections.abc import Mapping
from pathlib import Path

from diskbuf.store.checksums import CHECKSUM_FILE, Checksum, table_of
from diskbuf.store.chunk_format import ChunkFormat
from diskbuf.store.layout import STATE_FOLDER
from diskbuf.store.manifest import Manifest, ZarrMetadata
from diskbuf.store.objects import Objects


class StoreObjects:
    """Writes the objects of one store.

    Args:
        objects: Where to.
        chunk_format: How chunks are stored there.
        entries: Checksums of the objects that are there already.
    """

    def __init__(
        self,
        objects: Objects,
        chunk_format: ChunkFormat,
        *,
        entries: Mapping[tuple[str, int], Checksum] | None = None,
    ) -> None:
        self.objects = objects
        self.chunk_format = chunk_format
        self.entries = dict(entries or {})
        self._has_groups = False

    def put_chunk(self, group: int, chunk: int, data: bytes | memoryview, *, rows: int) -> Checksum:
        """Writes the object of a chunk.

        Args:
            group: Which group.
            chunk: Which chunk.
            data: What `ChunkFormat.encode` returned.
            rows: How many rows of it count.

        Returns:
            Its checksum: over all of its bytes, or over those of the rows that count where it always has as many.

        Raises:
            OSError: When it can't be written.
        """
        import google_crc32c

        layout = self.chunk_format.layouts[self.chunk_format.groups[group][0]]
        size = rows * layout.row_bytes if self.chunk_format.has_fixed_size else len(data)
        name = self.chunk_format.object_name(group, chunk)
        self.objects.write(name, data)
        crc = google_crc32c.value(bytes(memoryview(data)[:size]))
        checksum = Checksum(first_id=chunk * layout.chunk_rows, rows=rows, bytes=size, crc32c=crc)
        self.entries[name.rpartition("/")[0], chunk] = checksum
        return checksum

    def commit(self, manifest: Manifest, *, length: int | None = None) -> None:
        """Writes the checksums, the arrays' metadata and then the manifest.

        Args:
            manifest: What the store is and holds.
            length: Length of the arrays; None for all that the manifest counts.

        Raises:
            OSError: When an object can't be written; the manifest is then the one that was.
        """
        metadata = ZarrMetadata(Path(), self.chunk_format.documents())
        if not self._has_groups:
            for name, data in metadata.group_files():
                self.objects.write(name, data)
            self._has_groups = True
        self.objects.write(f"{STATE_FOLDER}/{CHECKSUM_FILE}", table_of(self.entries))
        for name, data in metadata.files(manifest, length=length):
            self.objects.write(name, data)

    def remove(self, group: int, chunk: int) -> None:
        """Removes the object of a chunk that the manifest no longer counts.

        Raises:
            OSError: When it can't be removed.
        """
        name = self.chunk_format.object_name(group, chunk)
        self.objects.delete(name)
        self.entries.pop((name.rpartition("/")[0], chunk), None)
