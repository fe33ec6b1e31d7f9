"""Where a copy of a store comes to be: its objects, a note of how far it is, and the store that it is in the end.

Chunks come first and the manifest last, so what is half done never opens as a store. The note says what of what is
being copied and which objects are there; it lies at the destination, and goes when the copy is done.
"""

import contextlib
import dataclasses
import errno
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diskbuf.errors import StoreCorruptError, StoreExistsError, StoreLockUnsupportedError, StoreNotFoundError
from diskbuf.store import files
from diskbuf.store.checksums import Checksum
from diskbuf.store.header import Extent, LiveHeader
from diskbuf.store.layout import COPYING_FILE, HEADER_FILE, LOCK_FILE, STATE_FOLDER, ColumnLayout, Leaf, chunks_of
from diskbuf.store.lock import WriterLock
from diskbuf.store.manifest import ZARR_JSON, Manifest
from diskbuf.store.objects import LocalObjects, Objects
from diskbuf.store.reading import column_layouts
from diskbuf.store.remote import read_remote_manifest
from diskbuf.store.store_objects import StoreObjects
from diskbuf.store.writing import lock_store

_NOTE = f"{STATE_FOLDER}/{COPYING_FILE}"
_NOTE_FORMAT = 1
_BLOCK_BYTES = 2**16
_SAVE_SECONDS = 1.0
_SAVE_RATIO = 20
"""How much longer than the last writing of the note the time to the next one is at least."""
_ADVICE = {
    errno.ENOSPC: "Make room and copy again; it goes on where it stopped",
    errno.EDQUOT: "Make room and copy again; it goes on where it stopped",
    errno.EACCES: "Choose another place, or change its permissions",
    errno.EPERM: "Choose another place, or change its permissions",
    errno.EROFS: "Choose another place",
}


@contextlib.contextmanager
def telling_what_to_do(place: str) -> Iterator[None]:
    """Says of a full disk, or of one that can't be written, where that is and what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0)
        if advice is None or str(error.strerror).startswith(place):
            raise
        raise OSError(
            error.errno, f"{place} must be writable and have room for the copy, but: {error.strerror}. {advice}"
        ) from error


def lock_copy(path: Path) -> WriterLock:
    """Takes the lock of the store in the making; where files can't be locked, that is left to the caller.

    Raises:
        StoreExistsError: When there is anything but a copy that was begun.
        StoreLockedError: When another copy goes on there.
        OSError: When the folder can't be made.
    """
    check_free(path)
    with telling_what_to_do(str(path)):
        try:
            return lock_store(path)
        except StoreLockUnsupportedError:
            return lock_store(path, is_taken=False)


def check_free(path: Path) -> None:
    """Refuses a folder that holds anything but a copy that was begun."""
    if path.is_dir():
        names = {entry.name for entry in os.scandir(path)}
        state = {entry.name for entry in os.scandir(path / STATE_FOLDER)} if STATE_FOLDER in names else set()
        is_begun = COPYING_FILE in state or state <= {LOCK_FILE, files.temporary_of(Path(COPYING_FILE)).name}
        if ZARR_JSON in names and COPYING_FILE not in state:
            raise _taken(str(path), "a store")
        if names and not (STATE_FOLDER in names and is_begun):
            raise _taken(str(path), "files that are not a copy's")
    elif os.path.lexists(path):
        raise _taken(str(path), "a file")


def _taken(place: str, what: str) -> StoreExistsError:
    return StoreExistsError(
        f"destination must be free, but {place} holds {what}. Choose another place, or remove it first.", path=place
    )


class CopyFolder(LocalObjects):
    """Files below a folder: their data is on the disk when `write` returns, their names after `sync_names`.

    Zeros at the end of a file take no space, as in the chunk that a writer goes on in.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync=True)
        self._folders: set[Path] = set()

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Writes a temporary file and renames it."""
        with telling_what_to_do(str(self.folder)):
            self._write(self.folder / name, data)

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        if path.parent not in self._folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._folders.add(path.parent)
        temporary = files.temporary_of(path)
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                files.write_at(descriptor, view[: _used(view)], 0)
                os.ftruncate(descriptor, len(view))
                files.sync_descriptor(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def sync_names(self, folders: Sequence[Path]) -> None:
        """Brings to the disk what lies in the store's folder, which folders there are, and the name of its own."""
        inner = {self.folder}
        for folder in (*self._folders, *folders):
            folder.mkdir(parents=True, exist_ok=True)
            inner |= {folder, *(parent for parent in folder.parents if self.folder in parent.parents)}
        for folder in sorted(inner, key=lambda folder: -len(folder.parts)):
            for entry in os.scandir(folder):
                if entry.name.startswith(".") and entry.name.endswith(".tmp"):  # what a kill left
                    Path(entry.path).unlink(missing_ok=True)
            files.sync_folder(folder)
        files.sync_folder(self.folder.parent)


def _used(data: memoryview) -> int:
    """Bytes of `data` that have to be written: behind them there are only zeros."""
    end = len(data)
    while end and not np.frombuffer(data[max(0, end - _BLOCK_BYTES) : end], np.uint8).any():
        end = max(0, end - _BLOCK_BYTES)
    return end


class CopyTarget:
    """The objects of the copy, and the note of what is being copied and which objects are there.

    Args:
        objects: Where they go.
        manifest: What the copy is to be.
        leaves: The leaves of its spec.
        source: The place of the source.
        verifies: Whether what was written is read back.
        is_new: Whether it is a store of its own, whose time of making is that of the interrupted copy's beginning.

    Attributes:
        is_done: Whether an earlier call had done everything but to remove the note.
        earlier: The manifest of the interrupted copy, None without one.
        kept: Checksums of the objects that it had written, as the note has them.
        skipped: How many objects that were there didn't have to be written again.

    Raises:
        StoreExistsError: When something else is there.
    """

    def __init__(
        self,
        objects: Objects,
        manifest: Manifest,
        leaves: Sequence[Leaf],
        *,
        source: str,
        verifies: bool,
        is_new: bool = False,
    ) -> None:
        self.objects = objects
        self.layouts = column_layouts(leaves, manifest, path=Path())
        self.chunk_format = manifest.chunk_format(self.layouts)
        self.store = StoreObjects(objects, self.chunk_format)
        self.manifest = manifest
        self.verifies = verifies
        self.skipped = self.bytes_written = 0
        self._source = source
        self._is_new = is_new
        self._saved_at, self._save_seconds = -math.inf, 0.0
        self.earlier, self.kept = self._read_note()
        self.is_done = self._look()

    @property
    def folder(self) -> Path | None:
        """Its folder, None where it is remote."""
        return self.objects.local_path("")

    def _read_note(self) -> tuple[Manifest | None, dict[tuple[str, int], Checksum]]:
        place = self.objects.place(_NOTE)
        try:
            note = json.loads(self.objects.read(_NOTE))
            if note["format"] != _NOTE_FORMAT:
                raise _taken(self.objects.place(""), "a copy that another version of diskbuf began")
            manifest = Manifest.from_json(note["manifest"], path=place)
            kept = {
                (folder, chunk): Checksum(first_id=first_id, rows=rows, bytes=size, crc32c=crc)
                for folder, chunk, first_id, rows, size, crc in note["objects"]
            }
        except FileNotFoundError:
            return None, {}
        except (ValueError, LookupError, TypeError) as error:
            if isinstance(error, StoreExistsError):
                raise
            raise StoreCorruptError(
                f"{place} must be the note of a copy, but can't be read: {error}. Remove what is there.", path=place
            ) from error
        if self._is_new:
            self.manifest = dataclasses.replace(self.manifest, created=manifest.created)
        found = {
            name: (mine, note.get("source") if name == "source" else getattr(manifest, name))
            for name, mine in self._settings().items()
        }
        different = [f"{name} {theirs!r:.80}" for name, (mine, theirs) in found.items() if mine != theirs]
        if different:
            raise _taken(self.objects.place(""), f"a copy that isn't finished, of {'; '.join(different)}")
        return manifest, kept

    def _settings(self) -> dict[str, Any]:
        """What must agree with the note for a copy to be the same one."""
        names = ("kind", "spec", "batch_size", "keep_history", "created", "layout", "codec", "chunk_rows")
        return {"source": self._source} | {name: getattr(self.manifest, name) for name in names}

    def _look(self) -> bool:
        """Whether the copy is a store already."""
        try:
            there = read_remote_manifest(self.objects)
        except StoreNotFoundError:
            if self._exists(ZARR_JSON):
                raise _taken(self.objects.place(""), "a zarr group") from None
            return False
        earlier = self.earlier
        if earlier is None or (there.created, there.next_id, there.runs) != (
            earlier.created,
            earlier.next_id,
            earlier.runs,
        ):
            raise _taken(self.objects.place(""), "a store")
        return True

    def _exists(self, name: str) -> bool:
        try:
            self.objects.size(name)
        except FileNotFoundError:
            return False
        return True

    def save_note(self, *, now: bool = False) -> None:
        """Writes the note, when it is time to; for a large store that takes a twentieth of the time at most."""
        started = time.monotonic()
        if not now and started - self._saved_at < max(_SAVE_SECONDS, _SAVE_RATIO * self._save_seconds):
            return
        entries = [[*key, *dataclasses.astuple(entry)] for key, entry in list(self.store.entries.items())]
        note = {
            "format": _NOTE_FORMAT,
            "source": self._source,
            "manifest": self.manifest.to_json(),
            "objects": entries,
        }
        self.objects.write(_NOTE, json.dumps(note, allow_nan=False).encode())
        self._saved_at = time.monotonic()
        self._save_seconds = self._saved_at - started

    def is_whole(self, group: int, chunk: int, entry: Checksum) -> bool:
        """Whether an object that the note tells of is there; of a remote place, unless it is verified, by its size."""
        name = self.chunk_format.object_name(group, chunk)
        size = self._layout(group).chunk_bytes if self.chunk_format.has_fixed_size else entry.bytes
        try:
            if self.objects.size(name) != size:
                return False
            return (self.folder is None and not self.verifies) or _crc(
                self.objects.read(name, 0, entry.bytes)
            ) == entry.crc32c
        except FileNotFoundError:
            return False

    def _layout(self, group: int) -> ColumnLayout:
        return self.layouts[self.chunk_format.groups[group][0]]

    def put(self, group: int, chunk: int, data: bytes | memoryview, *, rows: int) -> tuple[int, bool]:
        """Writes an object, unless it is there already, and looks whether it arrived.

        Returns:
            How many bytes were written, and whether it was there.

        Raises:
            StoreCorruptError: When what is read back isn't what was written.
        """
        name = self.chunk_format.object_name(group, chunk)
        layout = self._layout(group)
        crc = _crc(data)
        size = rows * layout.row_bytes if self.chunk_format.has_fixed_size else len(data)
        entry = Checksum(
            first_id=chunk * layout.chunk_rows,
            rows=rows,
            bytes=size,
            crc32c=crc if size == len(data) else _crc(memoryview(data)[:size]),
        )
        is_there = self.earlier is not None and self._holds(name, len(data), crc)
        if not is_there:
            self.objects.write(name, data)
            if self.verifies and not self._holds(name, len(data), crc):
                place = self.objects.place(name)
                raise StoreCorruptError(
                    f"object {place} must hold the {len(data)} bytes that were written, with checksum {crc:08x}, but "
                    "doesn't. Check the disk or the service, then copy again; it goes on where it stopped.",
                    path=place,
                )
        self.store.entries[name.rpartition("/")[0], chunk] = entry
        written = len(data) if self.folder is None else size  # here the zeros behind the rows take no space
        return (0 if is_there else written), is_there

    def _holds(self, name: str, size: int, crc: int) -> bool:
        try:
            return self.objects.size(name) == size and _crc(self.objects.read(name, 0, size)) == crc
        except FileNotFoundError:
            return False

    def finish(self, manifest: Manifest, oldest_id: int) -> None:
        """Makes a store of the objects."""
        self.manifest = manifest
        self.save_note(now=True)
        if self.folder is None:
            self.store.commit(manifest)
        else:
            with telling_what_to_do(str(self.folder)):
                self._finish_here(self.folder, manifest, oldest_id)
        self.remove_note()

    def _finish_here(self, folder: Path, manifest: Manifest, oldest_id: int) -> None:
        if isinstance(self.objects, CopyFolder):
            self._remove_strays(folder, oldest_id, manifest.next_id)
            self.objects.sync_names([folder / layout.raw_folder for layout in self.layouts])
        extent = Extent(generation=manifest.generation, floor=manifest.first_id, next_id=manifest.next_id)
        LiveHeader.create(folder / STATE_FOLDER / HEADER_FILE, extent, sync=True)
        store = StoreObjects(LocalObjects(folder), self.chunk_format, entries=self.store.entries)
        store.commit(manifest)

    def _remove_strays(self, folder: Path, oldest_id: int, next_id: int) -> None:
        """Removes objects that an interrupted copy of an earlier window left."""
        for group in range(len(self.chunk_format.groups)):
            kept = chunks_of(oldest_id, next_id, self._layout(group).chunk_rows)
            name = self.chunk_format.object_name(group, 0).rpartition("/")[0]
            with contextlib.suppress(FileNotFoundError):
                for entry in list(os.scandir(folder / name)):
                    found = self.chunk_format.chunk_of_name(f"{name}/{entry.name}")
                    if found is not None and found[0] == group and found[1] not in kept:
                        Path(entry.path).unlink()

    def remove_note(self) -> None:
        """Removes the note: the copy is a store."""
        self.objects.delete(_NOTE)
        if self.folder is not None:
            files.sync_folder(self.folder / STATE_FOLDER)


def _crc(data: bytes | memoryview) -> int:
    import google_crc32c

    whole = data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)
    crc: int = google_crc32c.value(whole) if len(data) else 0
    return crc
