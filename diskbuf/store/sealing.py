"""Sealing: raw chunks that are full become the objects they are stored as, and a tail comes back when a run goes on.

A chunk is there raw, or as an object, or as both for a moment. Where both are, the raw file counts: the object takes
its place before the raw file goes, so a crash in between leaves a chunk twice but never lost, and reads it once.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import StoreCorruptError
from diskbuf.store import files
from diskbuf.store.checksums import Checksum
from diskbuf.store.chunk_format import ChunkFormat
from diskbuf.store.layout import ColumnLayout, chunks_of


class SealedFiles:
    """The files of a store that seals its chunks: which there are, and where.

    Args:
        path: The store's folder.
        chunk_format: How its chunks are stored.
    """

    def __init__(self, path: Path, chunk_format: ChunkFormat) -> None:
        self._path = path
        self._format = chunk_format

    @property
    def groups(self) -> range:
        """The groups of columns that are in one object."""
        return range(len(self._format.groups))

    def layouts_of(self, group: int) -> list[ColumnLayout]:
        """The columns of a group."""
        return [self._format.layouts[number] for number in self._format.groups[group]]

    def rows_of(self, group: int) -> int:
        """Ids in a chunk of a group."""
        return self.layouts_of(group)[0].chunk_rows

    def folder_of(self, group: int) -> str:
        """Where the objects of a group are, below the store."""
        return self._format.object_name(group, 0).rpartition("/")[0]

    @property
    def folders(self) -> Mapping[str, int]:
        """The rows of a chunk in each folder of objects."""
        return {self.folder_of(group): self.rows_of(group) for group in self.groups}

    def object_path(self, group: int, chunk: int) -> Path:
        """The file of an object."""
        return self._path / self._format.object_name(group, chunk)

    def raw_path(self, layout: ColumnLayout, chunk: int) -> Path:
        """The raw file of a chunk of a column."""
        return self._path / layout.raw_folder / layout.file_name(chunk)

    def raw_chunks(self, layout: ColumnLayout) -> set[int]:
        """The chunks of a column that have a raw file."""
        names = _names_in(self._path / layout.raw_folder)
        return {chunk for name in names if (chunk := layout.chunk_of_name(name)) is not None}

    def object_chunks(self, group: int) -> set[int]:
        """The chunks of a group that have an object here."""
        folder = self.folder_of(group)
        found = (self._format.chunk_of_name(f"{folder}/{name}") for name in _names_in(self._path / folder))
        return {place[1] for place in found if place is not None and place[0] == group}

    def objects_outside(self, first_id: int, next_id: int) -> Iterator[Path]:
        """The objects that hold no id of [first_id, next_id)."""
        for group in self.groups:
            kept = chunks_of(first_id, next_id, self.rows_of(group))
            for chunk in sorted(self.object_chunks(group)):
                if chunk not in kept:
                    yield self.object_path(group, chunk)


class Sealer(SealedFiles):
    """Knows which chunks of a store are sealed, and seals those that are full, oldest first.

    Args:
        path: The store's folder.
        chunk_format: How its chunks are stored.
        first_id: First id that must be on disk.
        next_id: End of the window.
        sync: Whether objects are on the disk before their raw files go.
        may_be_elsewhere: Whether objects that are not here are somewhere else.

    Raises:
        StoreCorruptError: When a chunk is neither raw nor an object.
    """

    def __init__(
        self,
        path: Path,
        chunk_format: ChunkFormat,
        *,
        first_id: int,
        next_id: int,
        sync: bool,
        may_be_elsewhere: bool = False,
    ) -> None:
        super().__init__(path, chunk_format)
        self._sync = sync
        self._sealed = [0] * len(chunk_format.groups)  # end of what was sealed here, chunks that aren't full too
        self._next = []
        for group in range(len(chunk_format.groups)):
            self._next.append(self._first_unsealed(group, first_id, next_id, may_be_elsewhere=may_be_elsewhere))

    def _first_unsealed(self, group: int, first_id: int, next_id: int, *, may_be_elsewhere: bool) -> int:
        """The chunk of a group that is to be sealed next."""
        raw = set.intersection(*(self.raw_chunks(layout) for layout in self.layouts_of(group)))
        objects = self.object_chunks(group)
        rows = self.rows_of(group)
        for chunk in chunks_of(first_id, next_id, rows):
            if chunk not in raw and chunk not in objects and not may_be_elsewhere:
                place = self.object_path(group, chunk)
                raise StoreCorruptError(
                    f"chunk file {place} must be there for ids from {chunk * rows}, but is missing. "
                    "Restore that file, or run diskbuf.repair.",
                    path=str(place),
                )
        # One whose object is there too is sealed again: that may be of fewer rows, from when the store was closed.
        return min((chunk for chunk in raw if first_id < (chunk + 1) * rows <= next_id), default=next_id // rows)

    # ---- sealing

    def sealed_to(self, next_id: int) -> int:
        """Every id below it is in an object, as far as it is in the window."""
        return min(
            next_id, *(max(self._sealed[group], chunk * self.rows_of(group)) for group, chunk in enumerate(self._next))
        )

    def waiting(self, certain_id: int) -> tuple[int, int] | None:
        """The full chunk (group, chunk) that is to be sealed next, of those below an id; None when there is none."""
        full = [
            (chunk * self.rows_of(group), group)
            for group, chunk in enumerate(self._next)
            if (chunk + 1) * self.rows_of(group) <= certain_id
        ]
        if not full:
            return None
        _, group = min(full)
        return group, self._next[group]

    def seal(self, group: int, chunk: int, rows: int) -> Checksum | None:
        """Writes the object of a chunk; the raw files stay.

        Args:
            group: Which group.
            chunk: Which chunk.
            rows: How many rows of it there are.

        Returns:
            The object's checksum; None when the raw files were evicted meanwhile.

        Raises:
            OSError: When the object can't be written; the raw files stand.
        """
        import google_crc32c

        try:
            raw = [self._read_raw(layout, chunk, rows) for layout in self.layouts_of(group)]
        except FileNotFoundError:
            self._pass_by(group, chunk, rows)
            return None
        data = self._format.encode(group, chunk, raw)
        path = self.object_path(group, chunk)
        files.make_folders(path.parent, sync=self._sync)
        files.replace_file(path, data, sync=self._sync)
        first_id = chunk * self.rows_of(group)
        self._pass_by(group, chunk, rows)
        self._sealed[group] = max(self._sealed[group], first_id + rows)
        return Checksum(first_id=first_id, rows=rows, bytes=len(data), crc32c=google_crc32c.value(bytes(data)))

    def _pass_by(self, group: int, chunk: int, rows: int) -> None:
        if rows == self.rows_of(group):
            self._next[group] = max(self._next[group], chunk + 1)

    def _read_raw(self, layout: ColumnLayout, chunk: int, rows: int) -> NDArray[Any]:
        shape = (rows, layout.lanes, *layout.shape)
        if not layout.row_bytes:
            return np.empty(shape, layout.dtype)
        return np.memmap(self.raw_path(layout, chunk), layout.dtype, mode="r", shape=shape)

    def remove_raw(self, group: int, chunk: int, keep: Callable[[int, Path], bool]) -> None:
        """Removes the raw files of a chunk that is sealed.

        Args:
            group: Which group.
            chunk: Which chunk.
            keep: Called with column and file; returns whether it has taken the file away.
        """
        for number in self._format.groups[group]:
            path = self.raw_path(self._format.layouts[number], chunk)
            if path.exists() and not keep(number, path):
                path.unlink(missing_ok=True)

    def remove_partly_raw(self, next_id: int) -> None:
        """Removes the raw files that a crash left of chunks whose other columns are sealed already."""
        for group in self.groups:
            raw = [self.raw_chunks(layout) for layout in self.layouts_of(group)]
            for layout, chunks in zip(self.layouts_of(group), raw, strict=True):
                for chunk in chunks - raw[0].intersection(*raw):
                    if (chunk + 1) * layout.chunk_rows <= next_id:
                        self.raw_path(layout, chunk).unlink(missing_ok=True)

    def remove_temporaries(self) -> None:
        """Removes what a process killed while it wrote an object or a raw file may have left."""
        folders = {self._path / folder for folder in self.folders}
        folders |= {self._path / layout.raw_folder for layout in self._format.layouts}
        for folder in folders:
            for name in _names_in(folder):
                if files.is_temporary(name):
                    (folder / name).unlink(missing_ok=True)

    def remove_below(self, first_id: int) -> None:
        """Removes objects that lie wholly below an id."""
        for path in self.objects_outside(first_id, 2**62):
            path.unlink(missing_ok=True)

    # ---- going on

    def tails_missing(self, next_id: int) -> Iterator[tuple[int, list[int], int]]:
        """Yields (group, columns, chunk) of chunks that go on at `next_id` but have no raw file."""
        for group, numbers in enumerate(self._format.groups):
            chunk, inside = divmod(next_id, self.rows_of(group))
            missing = [n for n in numbers if not self.raw_path(self._format.layouts[n], chunk).exists()]
            if inside and missing:
                yield group, missing, chunk

    def put_raw(self, number: int, chunk: int, descriptor: int, offset: int) -> None:
        """Makes the raw file of a chunk of a column from an open one."""
        layout = self._format.layouts[number]
        path = self.raw_path(layout, chunk)
        files.make_folders(path.parent, sync=self._sync)
        data = files.read_at(descriptor, layout.chunk_bytes, offset, path=path)
        files.replace_file(path, data, sync=self._sync)


def _names_in(folder: Path) -> Sequence[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        return [entry.name for entry in entries]
    return []
