"""A store as a reader far away sees it: a published manifest, and objects behind URLs. Nothing of it is here.

The manifest is read at the opening and at each `refresh`; what it counts is there, because data is always published
before it. Rows never change, so nothing has to be looked at again after they were read.
"""
# ruff: noqa: D102 - Store documents what is done otherwise here

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path

from diskbuf.errors import ClosedError, StoreCorruptError, StoreNotFoundError
from diskbuf.options import ReadOptions
from diskbuf.store.checksums import CHECKSUM_FILE, Checksum, ObjectChecksums, entries_in
from diskbuf.store.chunk_source import ChunkSource
from diskbuf.store.header import Extent, LiveHeader
from diskbuf.store.layout import STATE_FOLDER, ColumnLayout, Leaf
from diskbuf.store.manifest import ZARR_JSON, Manifest, manifest_in
from diskbuf.store.objects import Objects
from diskbuf.store.reading import Store


class RemoteStore(Store):
    """A store open for reading from its URL.

    Args:
        objects: Its objects.
        leaves: The leaves of its spec, in spec order.
        manifest: Its manifest.
        reads_history: Whether rows that have left the window count, where the store keeps them.
        read_options: How chunks are fetched and kept.
        follow_seconds: After how long a look at the window also looks for a newer manifest; None for never.

    Raises:
        StoreFormatError: When this version can't read it.
        StoreCorruptError: When one of its objects is missing, short or unreadable.
        StoreAccessError: When reading is refused.
        StoreUnreachableError: When requests failed, and failed again.
    """

    def __init__(
        self,
        objects: Objects,
        leaves: Sequence[Leaf],
        manifest: Manifest,
        *,
        reads_history: bool = False,
        read_options: ReadOptions | None = None,
        follow_seconds: float | None = None,
    ) -> None:
        self.objects = objects
        self._latest = manifest
        self._follow_seconds = follow_seconds
        self._read_at = time.monotonic()
        self._checksums = ObjectChecksums(self._load_checksums, lambda: self._latest.next_id)
        self._is_open = True
        super().__init__(
            Path(os.devnull),  # no folder, and no file below it
            leaves,
            reads_history=reads_history,
            read_options=read_options,
        )

    def refresh(self) -> bool:
        """Looks for what was published since; returns whether there is something new.

        Raises:
            StoreCorruptError: When another store, or an older state of this one, is there now.
            StoreUnreachableError: As for every read, like the other errors.
        """
        self._check_is_open()
        manifest = read_remote_manifest(self.objects)
        with self._attaching:
            self._read_at = time.monotonic()
            known = self.manifest
            if manifest == known:
                return False
            if (manifest.created, manifest.spec, manifest.chunk_rows) != (known.created, known.spec, known.chunk_rows):
                raise StoreCorruptError(
                    f"{self.path} must be the store that was opened, but another one is there now. Open it again.",
                    path=str(self.path),
                )
            self._latest = manifest
            if manifest.generation != known.generation or manifest.next_id < known.next_id:
                self._load()  # ids may stand for other rows than they did
                self._epoch += 1
            else:
                self.manifest = manifest
                self._set_extent(_extent_of(manifest))
                self._attach(self._static)
        return True

    def _window(self) -> tuple[int, int]:
        self._check_is_open()
        if self._follow_seconds is not None and time.monotonic() - self._read_at >= self._follow_seconds:
            self.refresh()
        return self._static

    def _check_is_open(self) -> None:
        if not self._is_open:
            super()._check_is_open()

    def _open_header(self) -> LiveHeader | None:
        self.path = self.objects.place("")
        return None

    def _read_manifest(self) -> Manifest:
        return self._latest

    def _epoch_on_disk(self) -> int:
        return getattr(self, "_epoch", 0)

    @property
    def _is_fetched(self) -> bool:
        return True

    _has_raw_files = False

    def _make_layouts(self, manifest: Manifest) -> list[ColumnLayout]:
        # Nothing is overwritten in place here: in a ring the rows of a newer window would take the places of those that
        # another thread reads. And there are no files to map again somewhere else, as with sealed chunks.
        return [dataclasses.replace(layout, slots=None, is_sealed=True) for layout in super()._make_layouts(manifest)]

    def _make_source(self, layouts: Sequence[ColumnLayout]) -> ChunkSource:
        manifest = self.manifest
        return ChunkSource(
            manifest.chunk_format(layouts),
            self.objects,
            self._read_options,
            name=f"{self.path}\n{manifest.created}\n{manifest.generation}",
            checksums=self._checksums,
        )

    def _check_was_evicted(self, first_id: int, error: FileNotFoundError | ClosedError) -> None:
        """Raises when an object that must be there isn't; it may be gone because the window has moved since."""
        if first_id >= self._bounds()[0] and isinstance(error, FileNotFoundError):
            self.refresh()
        super()._check_was_evicted(first_id, error)

    _advice_for_chunks = "Restore that object, or publish the store again."

    def _load_checksums(self) -> dict[tuple[str, int], Checksum]:
        name = f"{STATE_FOLDER}/{CHECKSUM_FILE}"
        try:
            return entries_in(self.objects.read(name), place=self.objects.place(name))
        except FileNotFoundError:
            return {}

    def _lay_over(self) -> None:
        return

    def close(self) -> None:
        super().close()
        was_open, self._is_open = self._is_open, False
        if was_open:
            self.objects.close()

    def __del__(self) -> None:
        self._is_open = False  # so that no connection is closed, as in Store
        super().__del__()


def read_remote_manifest(objects: Objects) -> Manifest:
    """Reads the manifest of a remote store.

    Raises:
        StoreNotFoundError: When there is none.
        StoreCorruptError: As `manifest_in`, like the others that it raises.
        StoreAccessError: As `Objects.read_many`.
        StoreUnreachableError: As `Objects.read_many`.
    """
    place = objects.place(ZARR_JSON)
    try:
        text = objects.read(ZARR_JSON)
    except FileNotFoundError as error:
        raise StoreNotFoundError(
            f"cannot open {objects.place('')}: it is no store, {place} is missing. Check the URL; a store that is "
            "being published for the first time has no manifest yet.",
            path=objects.place(""),
        ) from error
    return manifest_in(text, place=place)


def _extent_of(manifest: Manifest) -> Extent:
    return Extent(generation=manifest.generation, floor=manifest.first_id, next_id=manifest.next_id)
