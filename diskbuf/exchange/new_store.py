"""A store that an import makes: beside its place until it is whole."""

import dataclasses
import datetime as dt
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from numpy.typing import NDArray

from diskbuf import specs
from diskbuf.errors import OptionError, StoreExistsError
from diskbuf.options import StoreOptions
from diskbuf.replay_buffers.items import ItemFormat
from diskbuf.replay_buffers.opening import StoreRequest, laid_out, leaves_of, local_path
from diskbuf.store.manifest import Manifest
from diskbuf.store.staging import Staging
from diskbuf.store.writing import WritableStore, create_store, lock_store
from diskbuf.version import __version__


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewStoreSettings:
    """What a new store is, besides its rows.

    Attributes:
        spec: Nest of ArraySpec.
        batch_size: Number of lanes.
        max_length: Longest window, None for no limit.
        keep_history: Whether rows that leave the window stay on disk.
        metadata: The user's own JSON.
        options: How it is laid out.
    """

    spec: Any
    batch_size: int
    max_length: int | None = None
    keep_history: bool = False
    metadata: Any = None
    options: StoreOptions = dataclasses.field(default_factory=StoreOptions)


class NewStore:
    """A store in the making, a context manager: left without `finish`, nothing of it stays.

    Args:
        path: Where it is to be.
        settings: What it is.
        first_id: Id of its first row.

    Raises:
        OptionError: When a setting is outside its rule.
        StoreExistsError: When something is at the path.
        StoreLockedError: When another process imports to it.
    """

    def __init__(self, path: str | os.PathLike[str], settings: NewStoreSettings, *, first_id: int = 0) -> None:
        self.path = local_path(path)
        self._settings = settings
        self._first_id = first_id
        self._format = ItemFormat(specs.as_spec(settings.spec), settings.batch_size)
        self._runs = {first_id}
        check_is_free(self.path)
        self._staging = Staging(self.path)
        self._store: WritableStore | None = None

    def __enter__(self) -> Self:
        self._staging.__enter__()
        try:
            self._store = self._create()
        except BaseException as error:
            self._staging.__exit__(type(error), error, None)
            raise
        return self

    def _create(self) -> WritableStore:
        settings, first_id = self._settings, self._first_id
        # Checks what the caller gave, as a buffer does.
        request = StoreRequest(
            kind="uniform",
            format=self._format,
            max_length=settings.max_length,
            keep_history=settings.keep_history,
            metadata=settings.metadata,
            options=settings.options,
            is_private=False,
        )
        leaves = leaves_of(self._format)
        manifest = Manifest(
            kind=request.kind,
            spec=specs.to_json(self._format.data_spec),
            batch_size=settings.batch_size,
            max_length=settings.max_length,
            keep_history=settings.keep_history,
            chunk_rows={},
            generation=0,
            first_id=first_id,
            next_id=first_id,
            oldest_id=first_id,
            runs=(),
            created=dt.datetime.now(dt.UTC).isoformat(timespec="microseconds"),
            metadata=request.metadata,
            package_version=__version__,
        )
        manifest = laid_out(manifest, leaves, settings.options)
        lock = lock_store(self._staging.store, is_taken=settings.options.lock)
        try:
            create_store(self._staging.store, leaves, manifest, sync=False)
            return WritableStore(
                self._staging.store,
                leaves,
                lock=lock,
                options=dataclasses.replace(settings.options, fsync="never"),  # closing it syncs all of it
                max_length=settings.max_length,
                metadata=request.metadata,
                package_version=__version__,
            )
        except BaseException:
            lock.close()
            raise

    @property
    def _opened(self) -> WritableStore:
        if self._store is None:
            raise OptionError("a store in the making must be entered before rows are added.")
        return self._store

    @property
    def next_id(self) -> int:
        """Id that the next row gets."""
        return self._opened.window()[1]

    def extend(self, items: Any) -> None:
        """Adds rows.

        Args:
            items: Nest like the spec with leaves [B, T, *shape].

        Raises:
            SpecError: When they don't fit the spec; names the leaf.
            OSError: When the disk is full.
        """
        leaves, steps = self._format.sequences(items)
        if steps:
            store = self._opened
            store.extend(leaves, steps)
            next_id = store.window()[1]
            store.let_pages_go(range(len(leaves)), max(store.window()[0], next_id - steps), next_id)

    def extend_leaves(self, leaves: Sequence[NDArray[Any]]) -> None:
        """Adds rows given as leaves [B, T, *shape] in the order of the spec."""
        self.extend(self._format.structure.unflatten(leaves))

    def begin_run(self) -> None:
        """Says that the next row doesn't go on where the last one stopped."""
        self._runs.add(self.next_id)

    def clear(self) -> None:
        """Empties the window; a store that keeps history keeps the rows."""
        self._opened.clear()

    def finish(self, *, runs: Sequence[int] | None = None) -> tuple[int, int]:
        """Brings the store to the disk and into its place.

        Args:
            runs: First ids of runs; None for those that were begun.

        Returns:
            The window: its first id, and its end.

        Raises:
            StoreExistsError: When something has come to be there.
            OSError: When it can't be written.
        """
        store = self._opened
        window = store.window()
        known = sorted(self._runs if runs is None else set(runs))
        store.manifest = dataclasses.replace(store.manifest, runs=tuple(known))
        store.close()
        self._staging.move_into_place()
        return window

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._store is not None:
                self._store.close()
        finally:
            self._staging.__exit__(kind, error, trace)


def check_is_free(path: Path) -> None:
    """Refuses a place where there is something already.

    Raises:
        StoreExistsError: When there is.
    """
    if path.is_dir():
        if not any(path.iterdir()):
            return
        what = "a store" if (path / "zarr.json").exists() else "a folder with files"
    elif os.path.lexists(path):
        what = "a file"
    else:
        return
    raise StoreExistsError(
        f"destination must be free, but {path} holds {what}. Choose another place, or remove it first.", path=str(path)
    )
