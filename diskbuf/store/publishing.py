"""Publishing: a store that is being written is copied to a URL as it grows, data first and the manifest last.

Only rows that are on the disk are published, so what is there was certain here. Whole chunks are put once and never
change; the newest chunks, which are not full yet, are put anew each time with more rows. Whoever reads a manifest finds
everything that it counts, until a later manifest has let go of it.

One history to a URL: what is there must have come from this very store, and this store must still have all of it. Rows
of other histories have the same ids, and a reader couldn't tell them apart.
"""

import collections
import contextlib
import dataclasses
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from diskbuf.errors import (
    BusyError,
    OptionError,
    StoreCorruptError,
    StoreError,
    StoreExistsError,
    StoreNotFoundError,
    StoreUnreachableError,
)
from diskbuf.options import IN_MEMORY, ReadOptions
from diskbuf.store import files
from diskbuf.store.checksums import CHECKSUM_FILE, Checksum, entries_in, table_of
from diskbuf.store.chunk_format import ChunkFormat
from diskbuf.store.keeper import Keeper
from diskbuf.store.layout import STATE_FOLDER, chunks_of
from diskbuf.store.manifest import ZARR_JSON, Manifest, manifest_in
from diskbuf.store.objects import Objects
from diskbuf.store.remote import RemoteStore
from diskbuf.store.store_objects import StoreObjects

if TYPE_CHECKING:
    from diskbuf.store.writing import WritableStore

_AT_ONCE = 4
_MOST_COMPARED_IDS = 64
_READ_ONLY_PROTOCOLS = ("http", "https")
_OTHER_URL = "Publish to another URL, or remove what is there."


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """Where a store is published, and how.

    Attributes:
        url: Where; None for nowhere.
        seconds: Seconds between two publications, above 0.
        keep_local: Whether chunks that are published stay here as well.
        storage_options: What fsspec's file system of the URL's protocol takes; holds secrets, so it is never shown.

    Raises:
        OptionError: When one is outside its rule.
    """

    url: str | None = None
    seconds: float = 60.0
    keep_local: bool = True
    storage_options: Mapping[str, Any] | None = dataclasses.field(default=None, repr=False)

    def __post_init__(self) -> None:
        url, seconds = self.url, self.seconds
        if url is not None and not (isinstance(url, str) and "://" in url):
            raise OptionError(f"publish_to must be a URL such as s3://bucket/run.zarr, got {url!r}.")
        if url is not None and url.partition("://")[0] in _READ_ONLY_PROTOCOLS:
            raise OptionError(
                f"publish_to must be a URL that can be written to, got one of {url.partition('://')[0]}://. "
                "Name the store behind it: s3://, gs://, az://."
            )
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise OptionError(f"publish_seconds must be a number of seconds above 0, got {seconds!r}.")
        if not isinstance(self.keep_local, bool):
            raise OptionError(f"keep_local must be True or False, got {self.keep_local!r}.")
        if url is None and not self.keep_local:
            raise OptionError("keep_local=False must come with publish_to, got none. Say where the chunks go.")
        if self.storage_options is not None and not isinstance(self.storage_options, Mapping):
            raise OptionError(f"storage_options must be a dict, got {type(self.storage_options).__name__}.")

    def check_is_elsewhere(self, path: Path) -> None:
        """Refuses a URL of this machine that is the store's own folder, inside it or around it.

        Raises:
            OptionError: When it is.
        """
        protocol, _, rest = (self.url or "").partition("://")
        if protocol not in ("file", "local"):
            return
        target = Path(os.path.realpath(rest))
        here = Path(os.path.realpath(path))
        if target.is_relative_to(here) or here.is_relative_to(target):
            raise OptionError(
                f"publish_to must be apart from the store, got {self.url} for {path}. Name another folder."
            )


class _StoppedError(Exception):
    """A turn of the background thread that ends because the store is closed, or gone."""


class Publisher:
    """Publishes one store, whenever it is asked to and every `seconds` in a thread of its own.

    Holds no store alive: one that is forgotten ends the thread.

    Args:
        objects: Where to.
        seconds: Seconds between two publications.
        keep_local: Whether sealed chunks stay here when they are published.
    """

    def __init__(self, objects: Objects, *, seconds: float, keep_local: bool) -> None:
        self._objects = objects
        self._url = objects.place("")
        self._seconds = seconds
        self._keep_local = keep_local
        self._turn = threading.RLock()
        self._is_taken = False
        self._is_stopping = False
        self._was_told = False
        self._has_met = False  # whether it is known what is there
        self._published: Manifest | None = None  # what is there
        self._keeper: Keeper | None = None
        self._tails: dict[int, tuple[int, int]] = {}  # (chunk, rows) of a group's object without a checksum
        self._strays: list[tuple[int, int]] = []  # (group, chunk) of objects that may be there and don't count

    # ---- beginning

    def look(self, *, must_be_free: bool) -> None:
        """Looks at what is there for the first time, before the store is made or opened.

        A URL that doesn't answer is no reason not to collect: a warning tells of it, and it is tried again later.

        Args:
            must_be_free: Whether nothing may be there, because the store is a new one.

        Raises:
            StoreExistsError: When something must not be there, or is no store.
            StoreNotFoundError: When the bucket or container doesn't exist.
            StoreAccessError: When reading or writing is refused.
            StoreCorruptError: When what is there can't be read, like the others that `manifest_in` raises.
        """
        try:
            found = self._read_manifest()
            if found is not None and must_be_free:
                raise self._taken(f"a store that was made {found.created}", "Open that one's folder to go on with it.")
            if found is None:
                # A small write tells of a bucket that isn't there, and of credentials that only read. Until there is a
                # manifest nobody looks at it.
                self._probe()
        except StoreUnreachableError as error:
            self._tell(error, stacklevel=6)

    def _read_manifest(self) -> Manifest | None:
        try:
            text = self._objects.read(ZARR_JSON)
        except FileNotFoundError:
            return None
        try:
            return manifest_in(text, place=self._objects.place(ZARR_JSON))
        except StoreNotFoundError as error:
            raise self._taken("a zarr.json that is not one of diskbuf's", "Publish to another URL.") from error

    def _probe(self) -> None:
        try:
            self._objects.write(f"{STATE_FOLDER}/{CHECKSUM_FILE}", table_of({}))
        except FileNotFoundError as error:
            raise StoreNotFoundError(
                f"publish_to must be in a bucket or container that exists, got {self._url}. Make it, or check the URL.",
                path=self._url,
            ) from error

    def _taken(self, what: str, advice: str) -> StoreExistsError:
        return StoreExistsError(f"cannot publish to {self._url}: it holds {what}. {advice}", path=self._url)

    def begin(self, store: "WritableStore") -> None:
        """Takes a store on, checks that what is there is its own, and starts the thread.

        Raises:
            StoreExistsError: When another store is there, or this one no longer has all that was published.
            StoreAccessError: When reading is refused.
        """
        self._format: ChunkFormat = store.chunk_format
        self._remote = StoreObjects(self._objects, self._format)
        self._path = store.path
        self._store = weakref.ref(store)
        if not self._was_told:
            try:
                self._meet(store, store.manifest)
            except StoreUnreachableError as error:
                self._tell(error, stacklevel=6)
        self._keeper = Keeper(self, sync_seconds=self._seconds, name="diskbuf-publisher")

    def _meet(self, store: "WritableStore", ours: Manifest) -> None:
        """Learns what is there, once."""
        if self._has_met:
            return
        theirs = self._read_manifest()
        if theirs is not None:
            entries = self._read_entries()
            self._check_is_ours(store, ours, theirs, entries)
            self._remote = StoreObjects(self._objects, self._format, entries=entries)
            self._note_objects(ours, theirs)
        self._published = theirs
        self._has_met = True

    def _read_entries(self) -> dict[tuple[str, int], Checksum]:
        name = f"{STATE_FOLDER}/{CHECKSUM_FILE}"
        return entries_in(self._objects.read(name), place=self._objects.place(name))

    def _check_is_ours(
        self, store: "WritableStore", ours: Manifest, theirs: Manifest, entries: Mapping[tuple[str, int], Checksum]
    ) -> None:
        """Refuses to publish over what didn't come from this store, or what this store has lost since.

        Rows are flushed before they are published, so neither kill -9 nor a power cut loses any that are there. A copy
        of the store that went its own way, an older state of it or a repair may lack some, or have others.
        """
        if (theirs.created, theirs.spec, theirs.chunk_rows) != (ours.created, ours.spec, ours.chunk_rows):
            raise self._taken(f"another store, made {theirs.created}; this one was made {ours.created}", _OTHER_URL)
        if (theirs.layout, theirs.codec) != (ours.layout, ours.codec):
            raise self._taken(f"it with layout {theirs.layout!r} and codec {theirs.codec}", _OTHER_URL)
        reached = max([theirs.next_id, *(entry.first_id + entry.rows for entry in entries.values())])
        if ours.next_id < reached or ours.generation < theirs.generation:
            raise self._taken(
                f"ids below {reached} of generation {theirs.generation}, but {store.path} only has those below "
                f"{ours.next_id} of generation {ours.generation}",
                _OTHER_URL,
            )
        known_from = max([*ours.runs[:1], *theirs.runs[:1]], default=0)
        begun_here, begun_there = (
            {run for run in manifest.runs if known_from < run < theirs.next_id} for manifest in (ours, theirs)
        )
        if begun_here != begun_there:
            raise self._taken(
                f"runs that began at the ids {sorted(begun_there)}, but those of {store.path} began at "
                f"{sorted(begun_here)}: one is a copy of the other, or was repaired",
                _OTHER_URL,
            )
        if not self._has_same_rows(store, theirs):
            raise self._taken(
                f"other rows of the ids below {theirs.next_id} than {store.path}: one is a copy of the other",
                _OTHER_URL,
            )

    def _has_same_rows(self, store: "WritableStore", theirs: Manifest) -> bool:
        """Whether the newest rows there are the rows here, as far as they are still in both windows."""
        first_id = max(theirs.first_id, store.window()[0], theirs.next_id - _MOST_COMPARED_IDS)
        if first_id >= theirs.next_id:
            return True
        remote = RemoteStore(
            self._objects, store.leaves, theirs, read_options=ReadOptions(cache_dir=IN_MEMORY, prefetch_chunks=0)
        )
        try:
            there = remote.read_range(first_id, theirs.next_id)
        finally:
            remote.close()
        here = store.read_range(first_id, theirs.next_id)
        if here is None or there is None:
            return True
        return all(
            # Bytes, because a NaN is the same as itself; from the end, because rows may have been evicted meanwhile.
            a[:, a.shape[1] - n :].tobytes() == b[:, b.shape[1] - n :].tobytes()
            for a, b in zip(here, there, strict=True)
            for n in [min(a.shape[1], b.shape[1])]
        )

    def _note_objects(self, ours: Manifest, theirs: Manifest) -> None:
        """Notes which objects are there that the table of checksums doesn't tell of."""
        lowest = _lowest(ours)
        for group in range(len(self._format.groups)):
            rows = self._rows_of(group)
            chunk, inside = divmod(theirs.next_id, rows)
            if inside and theirs.first_id < theirs.next_id:
                self._tails[group] = (chunk, inside)
            # A turn that was killed may have put chunks that no manifest ever counted, of at most a window.
            most = math.inf if ours.max_length is None else ours.max_length // rows + 2
            stop = min(lowest // rows, chunk + most)
            self._strays += [(group, stray) for stray in range(chunk, int(stop))]

    def _rows_of(self, group: int) -> int:
        return self._format.layouts[self._format.groups[group][0]].chunk_rows

    def _folder_of(self, group: int) -> str:
        return self._format.object_name(group, 0).rpartition("/")[0]

    # ---- a turn

    def publish(self) -> None:
        """Publishes everything added so far; puts nothing when it is there already.

        Raises:
            StoreExistsError: When another store is there.
            StoreUnreachableError: When requests failed, and failed again; like all that follow it changes nothing for
                readers, and the next turn goes on from there.
            StoreAccessError: When writing is refused.
            OSError: When something can't be written, here or there.
        """
        with self._alone():
            store = self._opened()
            manifest = store.make_certain()
            self._meet(store, manifest)
            del store
            has_put, lowest = self._put_chunks(manifest)
            manifest = dataclasses.replace(manifest, first_id=max(manifest.first_id, lowest), published_to=None)
            if has_put or manifest != self._published:
                self._check_goes_on()
                self._remote.commit(manifest)
                self._published = manifest
            self._remove_old(manifest)
            if not self._keep_local:
                self._remove_local(manifest)
            self._was_told = False

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One turn at a time; a signal handler that comes back in is told."""
        with self._turn:
            if self._is_taken:
                raise BusyError(
                    f"store {self._path} must not be published by a signal handler that interrupts its publishing. "
                    "Set a flag in the handler, and do it afterwards."
                )
            self._is_taken = True
            try:
                yield
            finally:
                self._is_taken = False

    def _opened(self) -> "WritableStore":
        self._check_goes_on()
        store = self._store()
        if store is None:
            raise _StoppedError
        return store

    def _check_goes_on(self) -> None:
        if self._is_stopping:
            raise _StoppedError

    def _put_chunks(self, manifest: Manifest) -> tuple[bool, int]:
        """Puts what isn't there yet.

        Returns:
            Whether anything was put, and the id below which chunks were evicted here before they could be.
        """
        wanted = [
            (chunk * self._rows_of(group), group, chunk)
            for group in range(len(self._format.groups))
            for chunk in chunks_of(_lowest(manifest), manifest.next_id, self._rows_of(group))
        ]
        missing = [
            (group, chunk, rows)
            # The newest first: what a ring overwrites meanwhile is then what the window can do without.
            for first_id, group, chunk in sorted(wanted, reverse=True)
            for rows in [min(self._rows_of(group), manifest.next_id - first_id)]
            if not self._has(group, chunk, rows)
        ]
        if not missing:
            return False, 0
        put = _in_threads(self._put, missing)
        gone = [
            min(manifest.next_id, (chunk + 1) * self._rows_of(group))
            for (group, chunk, _), is_there in zip(missing, put, strict=True)
            if not is_there
        ]
        return any(put), max(gone, default=0)

    def _has(self, group: int, chunk: int, rows: int) -> bool:
        entry = self._remote.entries.get((self._folder_of(group), chunk))
        return (entry is not None and entry.rows >= rows) or self._tails.get(group) == (chunk, rows)

    def _put(self, group: int, chunk: int, rows: int) -> bool:
        """Puts a chunk; returns whether it was still here."""
        data = self._data_of(group, chunk, rows)
        if data is None:
            return False
        self._check_goes_on()
        self._remote.put_chunk(group, chunk, data, rows=rows)
        if not self._format.has_fixed_size and rows < self._rows_of(group):
            # The object is replaced before the table is, so its checksum would be wrong for those who read in between.
            # Raw rows are only ever appended to: the checksum of the first of them stays right.
            del self._remote.entries[self._folder_of(group), chunk]
            self._tails[group] = (chunk, rows)
        elif self._tails.get(group, (-1, 0))[0] == chunk:
            del self._tails[group]
        return True

    def _data_of(self, group: int, chunk: int, rows: int) -> bytes | memoryview | None:
        """The object of a chunk, None when the chunk was evicted."""
        store = self._opened()
        sealed = store.sealed_checksum(self._folder_of(group), chunk)
        data: bytes | memoryview
        try:
            if sealed is not None and sealed.rows >= rows:
                data = self._read_object(group, chunk, sealed)
            else:
                data = self._encode_raw(group, chunk, rows, has_objects=store.manifest.is_sealed)
        except FileNotFoundError as error:
            if store.lets_go_below() >= (chunk + 1) * self._rows_of(group):
                return None
            raise StoreCorruptError(
                f"chunk file {error.filename} must be there to be published, but is missing. "
                "Restore that file, or run diskbuf.repair.",
                path=str(error.filename),
            ) from error
        # A ring may have begun to overwrite the file under the reading.
        return None if store.lets_go_below() >= (chunk + 1) * self._rows_of(group) else data

    def _read_object(self, group: int, chunk: int, expected: Checksum) -> bytes:
        import google_crc32c

        path = Path(self._path) / self._format.object_name(group, chunk)
        data = path.read_bytes()
        if (len(data), google_crc32c.value(data)) != (expected.bytes, expected.crc32c):
            raise StoreCorruptError(
                f"chunk file {path} must be what was written to be published, but its checksum is another one. "
                "Restore that file, or run diskbuf.repair.",
                path=str(path),
            )
        return data

    def _encode_raw(self, group: int, chunk: int, rows: int, *, has_objects: bool) -> bytes | memoryview:
        raw = []
        try:
            for number in self._format.groups[group]:
                layout = self._format.layouts[number]
                path = Path(self._path) / layout.raw_folder / layout.file_name(chunk)
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    data = files.read_at(descriptor, rows * layout.row_bytes, 0, path=path) if layout.row_bytes else b""
                finally:
                    os.close(descriptor)
                raw.append(np.frombuffer(data, layout.dtype).reshape(rows, layout.lanes, *layout.shape))
        except FileNotFoundError:
            if not has_objects:
                raise
            # Sealed a moment ago, or by the close.
            return (Path(self._path) / self._format.object_name(group, chunk)).read_bytes()
        return self._format.encode(group, chunk, raw)

    def _remove_old(self, manifest: Manifest) -> None:
        """Removes objects there that the manifest no longer counts."""
        lowest = _lowest(manifest)
        groups = {self._folder_of(group): group for group in range(len(self._format.groups))}
        known = [(groups[folder], chunk) for folder, chunk in self._remote.entries]
        known += [(group, chunk) for group, (chunk, _) in self._tails.items()]
        for group, chunk in known + self._strays:
            if (chunk + 1) * self._rows_of(group) <= lowest:
                self._check_goes_on()
                self._remote.remove(group, chunk)
                if self._tails.get(group, (-1, 0))[0] == chunk:
                    del self._tails[group]
        self._strays.clear()

    def _remove_local(self, manifest: Manifest) -> None:
        """Removes sealed objects here that are there, but those of chunks that still grow."""
        store = self._opened()
        for group in range(len(self._format.groups)):
            folder, rows = self._folder_of(group), self._rows_of(group)
            for chunk in store.object_chunks(group):
                is_whole = (chunk + 1) * rows <= manifest.next_id
                entry = self._remote.entries.get((folder, chunk))
                # The checksum that stays here must be right for the object there.
                if is_whole and entry is not None and entry == store.sealed_checksum(folder, chunk):
                    (Path(self._path) / self._format.object_name(group, chunk)).unlink(missing_ok=True)

    # ---- the thread

    def tend(self, *, is_sync_due: bool) -> None:
        """Publishes when it is time; a failure is told once, until it works again."""
        if not is_sync_due:
            return
        try:
            self.publish()
        except _StoppedError:
            return
        except Exception as error:  # noqa: BLE001 - a thread has nobody else to tell
            if not self._is_stopping:
                with contextlib.suppress(RuntimeWarning):  # where warnings are errors, the thread must go on
                    self._tell(error, stacklevel=2)

    def _tell(self, error: Exception, *, stacklevel: int) -> None:
        if self._was_told:
            return
        self._was_told = True
        warnings.warn(
            f"{self._url} can't be published to, which is tried again every {self._seconds:g} seconds; what is added "
            f"is kept here meanwhile. {_text(error)}",
            RuntimeWarning,
            stacklevel=stacklevel,
        )

    def stop(self) -> None:
        """Ends the thread, after the object that it is putting."""
        self._is_stopping = True
        if self._keeper is not None:
            self._keeper.stop()

    def finish(self) -> None:
        """Ends the thread and publishes a last time; a warning tells when that fails."""
        self.stop()
        self._is_stopping = False
        try:
            self.publish()
        except Exception as error:  # noqa: BLE001 - the close went well
            warnings.warn(
                f"the last steps could not be published to {self._url}. They are safe in {self._path}: opening it "
                f"again with publish_to goes on from there. {_text(error)}",
                RuntimeWarning,
                stacklevel=4,
            )
        finally:
            self._is_stopping = True

    def end(self) -> None:
        """Lets the thread end by itself, without waiting for it."""
        self._is_stopping = True
        if self._keeper is not None:
            self._keeper.wake()

    def close(self) -> None:
        """Lets go of the connections, and of a thread that still runs."""
        self.end()
        self._objects.close()


def _in_threads(call: Callable[..., bool], items: Sequence[tuple[int, ...]]) -> list[bool]:
    """Calls with the items, a few at once and in order; after a failure no further ones.

    Not by an executor: at the end of a program that didn't close its buffer, Python would wait for all it was given.
    """
    waiting = collections.deque(enumerate(items))
    results = [False] * len(items)
    failures: list[BaseException] = []

    def work() -> None:
        with contextlib.suppress(IndexError):
            while not failures:
                number, item = waiting.popleft()
                try:
                    results[number] = call(*item)
                except BaseException as error:  # noqa: BLE001 - raised below
                    failures.append(error)

    names = [f"diskbuf-publish-{number}" for number in range(min(_AT_ONCE, len(items)))]
    threads = [threading.Thread(target=work, name=name, daemon=True) for name in names]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # interrupted; the turn ends when they have
        waiting.clear()
        for thread in threads:
            thread.join()
        raise
    if failures:
        raise failures[0]
    return results


def _lowest(manifest: Manifest) -> int:
    """The first id that has to be there."""
    return manifest.oldest_id if manifest.keep_history else manifest.first_id


def _text(error: Exception) -> str:
    """What an error says; our own say it all."""
    return str(error) if isinstance(error, StoreError | OptionError) else f"{type(error).__name__}: {error}"
