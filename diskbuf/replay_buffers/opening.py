"""Making, continuing and opening the stores behind buffers: what must agree, and what to say when it doesn't."""

import dataclasses
import datetime as dt
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from diskbuf import specs
from diskbuf.errors import OptionError, StoreCorruptError, StoreExistsError, StoreMismatchError
from diskbuf.options import ReadOptions, StoreOptions
from diskbuf.replay_buffers.items import ItemFormat
from diskbuf.store.chunk_formats.codecs import codec_json, codec_name
from diskbuf.store.header import LiveHeader
from diskbuf.store.layout import COPYING_FILE, HEADER_FILE, STATE_FOLDER, Leaf, rows_per_chunk
from diskbuf.store.manifest import ZARR_JSON, Manifest, has_copy, read_manifest
from diskbuf.store.objects import Objects
from diskbuf.store.publishing import Publisher, PublishOptions
from diskbuf.store.reading import Store, column_layouts
from diskbuf.store.remote import RemoteStore, read_remote_manifest
from diskbuf.store.writing import Trim, WritableStore, create_store, lock_store
from diskbuf.version import __version__

_ARROW_ROW_BYTES = 8 + 4  # id and lane
_MOST_TIMES_SHORTEST = 16  # chunks of compressed leaves differ in length by that, though those of small ones are small


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreRequest:
    """What a buffer wants its store to be.

    Attributes:
        kind: Which buffer asks.
        format: Its items.
        max_length: Longest window, None for no limit.
        keep_history: Whether rows that leave the window stay on disk.
        metadata: JSON to keep with the store; None keeps what is there.
        options: How it is laid out and synced.
        read_options: How chunks are read that are sealed.
        is_private: Whether the store goes with its buffer, so that nothing needs to be synced.
        publish: Where it is published.
    """

    kind: str
    format: ItemFormat
    max_length: int | None
    keep_history: bool
    metadata: Any
    options: StoreOptions
    is_private: bool
    read_options: ReadOptions = dataclasses.field(default_factory=ReadOptions)
    publish: PublishOptions = dataclasses.field(default_factory=PublishOptions)

    def __post_init__(self) -> None:
        try:
            copy = json.loads(json.dumps(self.metadata, allow_nan=False, ensure_ascii=False).encode())
        except (TypeError, ValueError, RecursionError) as error:
            raise OptionError(f"metadata must be a JSON value, got {self.metadata!r:.200} ({error}).") from error
        if copy != self.metadata:
            raise OptionError(f"metadata must be as JSON gives it back, {copy!r:.200}, got {self.metadata!r:.200}.")
        object.__setattr__(self, "metadata", copy)


def local_path(path: str | os.PathLike[str]) -> Path:
    """Returns a path to a store.

    Raises:
        OptionError: When it isn't one on a local file system.
    """
    if not isinstance(path, str | os.PathLike):
        raise OptionError(f"path must be a str or a path, got {path!r}.")
    text = os.fspath(path)
    if "://" in text:
        raise OptionError(
            f"path must be on a local file system, got {text!r}. Write a store here and publish it "
            "with publish_to, or copy one here with diskbuf.copy."
        )
    if text.startswith("~"):
        raise OptionError(f"path must be written out, got {text!r}. Use os.path.expanduser.")
    if not text:
        raise OptionError("path must name a folder, got ''. Leave it out for a temporary store.")
    return Path(os.path.abspath(text))  # noqa: PTH100 - a later chdir must not lead into another store; links stay


def place_of(path: str | os.PathLike[str]) -> Path | str:
    """Returns where a store is: a folder, or the URL of a remote store.

    Raises:
        OptionError: When it is neither.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else path
    if isinstance(text, str) and "://" in text:
        folder = text.removeprefix("file://")
        # A store that was published to a folder has no live header, and is followed as any other URL is.
        is_here = text.startswith("file://") and (Path(folder) / STATE_FOLDER / HEADER_FILE).exists()
        return local_path(folder) if is_here else text
    return local_path(path)


def objects_at(
    url: str,
    *,
    storage_options: Mapping[str, Any] | None,
    read_options: ReadOptions | None = None,
    is_ours: bool = False,
) -> Objects:
    """Returns the objects below a URL.

    Args:
        url: The URL.
        storage_options: What fsspec's file system of that protocol takes.
        read_options: How many requests, and how often.
        is_ours: Whether nobody else writes there: what isn't there is then not looked for again.

    Raises:
        OptionError: When the URL, or storage_options, can't be used.
        MissingExtraError: When the package of that protocol isn't installed.
    """
    from diskbuf.store.remote_objects import RemoteObjects, Retries  # only with this call

    if storage_options is not None and not isinstance(storage_options, Mapping):
        raise OptionError(f"storage_options must be a dict, got {type(storage_options).__name__}.")
    options = ReadOptions() if read_options is None else read_options
    return RemoteObjects(
        url,
        storage_options=storage_options,
        concurrency=options.concurrency,
        retries=Retries(times=options.retries, missing_times=0 if is_ours else min(3, options.retries)),
    )


def open_remote(
    url: str,
    *,
    kind: str,
    reads_history: bool,
    storage_options: Mapping[str, Any] | None,
    read_options: ReadOptions,
    is_followed: bool,
) -> tuple[RemoteStore, ItemFormat]:
    """Opens a remote store for reading.

    Args:
        url: Where it is.
        kind: Which buffer asks.
        reads_history: Whether rows that have left the window count.
        storage_options: What fsspec's file system of that protocol takes.
        read_options: How chunks are fetched and kept.
        is_followed: Whether the window follows what is published.

    Returns:
        The store and the format of its items.

    Raises:
        StoreNotFoundError: When there is no store.
        StoreMismatchError: When another kind of buffer made it.
        StoreFormatError: When this version can't read it.
        StoreCorruptError: When one of its objects is missing, short or unreadable.
        StoreAccessError: When reading is refused.
        StoreUnreachableError: When requests failed, and failed again.
        MissingExtraError: When the package of that protocol isn't installed.
    """
    objects = objects_at(url, storage_options=storage_options, read_options=read_options)
    try:
        manifest = read_remote_manifest(objects)
        _check_kind(url, manifest, kind)
        item_format = item_format_of(manifest)
        store = RemoteStore(
            objects,
            leaves_of(item_format),
            manifest,
            reads_history=reads_history,
            read_options=read_options,
            follow_seconds=read_options.follow_seconds if is_followed else None,
        )
    except BaseException:
        objects.close()
        raise
    return store, item_format


def _check_kind(place: Path | str, manifest: Manifest, kind: str) -> None:
    if manifest.kind != kind:
        raise StoreMismatchError(f"store {place} must be of kind {kind!r}, got {manifest.kind!r}.", path=str(place))


def leaves_of(item_format: ItemFormat) -> list[Leaf]:
    """The leaves of a spec as the store knows them."""
    structure = item_format.structure
    return [
        Leaf(path=path, file_path=file_path, dtype=spec.dtype, shape=spec.shape)
        for path, file_path, spec in zip(structure.paths, structure.file_paths, item_format.specs, strict=True)
    ]


def item_format_of(manifest: Manifest) -> ItemFormat:
    """The format of the items of a store.

    Raises:
        StoreFormatError: When the manifest's spec can't be read.
    """
    return ItemFormat(specs.from_json(manifest.spec), manifest.batch_size)


def open_for_writing(path: Path, request: StoreRequest, *, mode: Literal["a", "w-"], trim: bool) -> WritableStore:
    """Creates a store, or continues the one that is there, and publishes it where that was asked for.

    Args:
        path: The store's folder.
        request: What the store must be.
        mode: "a" creates or continues, "w-" only creates.
        trim: Whether a smaller max_length may let the oldest rows go.

    Returns:
        The store, locked for writing.

    Raises:
        StoreExistsError: When the path is taken by something else, or mode is "w-"; when something else is at the URL.
        StoreNotFoundError: When there is no bucket for the URL.
        StoreAccessError: When access to the URL is refused.
        StoreLockedError: When another process writes it.
        StoreLockUnsupportedError: When its file system doesn't lock files.
        StoreMismatchError: When it was made with another spec, lanes or kind.
        StoreFormatError: When this version can't read it.
        StoreCorruptError: When one of its files is missing, short or unreadable.
        OSError: When a file can't be made.
    """
    is_store = (path / ZARR_JSON).exists()
    if not is_store or mode == "w-":
        _check_free(path, mode)
    else:
        read_manifest(path)  # before a lock file is made: another program's zarr group is left as it is
    publisher = None
    lock = lock_store(path, is_taken=request.options.lock)
    try:
        if (path / ZARR_JSON).exists():
            if mode == "w-":
                raise _taken(path, "a store", advice="Choose another path, or mode='a' to continue the store.")
            manifest = read_manifest(path)
            _check_agrees(path, manifest, request, trim=trim)
            publisher = _publisher(path, manifest, request.publish, request.read_options, is_new=False)
        else:
            _check_unused(path)
            manifest = _new_manifest(request)
            publisher = _publisher(path, manifest, request.publish, request.read_options, is_new=True)
            create_store(path, leaves_of(request.format), manifest, sync=not request.is_private)
        store = WritableStore(
            path,
            leaves_of(request.format),
            lock=lock,
            options=request.options,
            max_length=request.max_length,
            metadata=request.metadata,
            package_version=__version__,
            is_durable=not request.is_private,
            read_options=request.read_options,
            remote=_elsewhere(manifest, request.publish, request.read_options),
        )
    except BaseException:
        if publisher is not None:
            publisher.close()
        lock.close()
        raise
    return _publishing(store, publisher)


def _elsewhere(manifest: Manifest, publish: PublishOptions, read_options: ReadOptions | None) -> Objects | None:
    """Where chunks are that are no longer in a store's folder."""
    url = manifest.published_to
    if url is None:
        return None
    return objects_at(url, storage_options=publish.storage_options, read_options=read_options)


def _publisher(
    path: Path, manifest: Manifest, publish: PublishOptions, read_options: ReadOptions | None, *, is_new: bool
) -> Publisher | None:
    """What publishes a store, after a first look at where it does.

    Raises:
        StoreMismatchError: When chunks of the store are at another URL, or have to stay here.
        StoreExistsError: As `Publisher.look`, like the others that it raises.
    """
    if publish.url is None:
        return None
    publish.check_is_elsewhere(path)
    objects = objects_at(publish.url, storage_options=publish.storage_options, read_options=read_options, is_ours=True)
    if manifest.published_to is not None and manifest.published_to != objects.place(""):
        raise _made_otherwise(
            path,
            f"publish_to: the store has {manifest.published_to}, the buffer {objects.place('')}",
            "Chunks that are only there can't be published elsewhere. Give that URL, or copy the store.",
        )
    if manifest.published_to is None and not publish.keep_local:
        raise _made_otherwise(
            path,
            "keep_local: the store has True, the buffer False",
            "Whether chunks stay is fixed when a store is made. Leave it out, or make a new store.",
        )
    publisher = Publisher(objects, seconds=publish.seconds, keep_local=publish.keep_local)
    try:
        publisher.look(must_be_free=is_new)
    except BaseException:
        publisher.close()
        raise
    return publisher


def _made_otherwise(path: Path, difference: str, advice: str) -> StoreMismatchError:
    return StoreMismatchError(
        f"cannot continue {path}: it was made otherwise than it is asked for now.\n  {difference}\n{advice}",
        path=str(path),
        differences=[difference],
    )


def _publishing(store: WritableStore, publisher: Publisher | None) -> WritableStore:
    """The store, which is closed when it can't be published."""
    if publisher is not None:
        try:
            store.publish_with(publisher)
        except BaseException:
            publisher.close()
            store.close()
            raise
    return store


def open_existing(
    path: Path,
    *,
    kind: str,
    is_writable: bool,
    reads_history: bool,
    options: StoreOptions,
    only: tuple[int, int] | None = None,
    verifies: bool = False,
    read_options: ReadOptions | None = None,
    publish: PublishOptions | None = None,
    trim: Trim | None = None,
) -> tuple[Store, ItemFormat]:
    """Opens a store from its path alone.

    Args:
        path: The store's folder.
        kind: Which buffer asks.
        is_writable: Whether to open it for writing.
        reads_history: Whether rows that have left the window count.
        options: How it is synced when written to.
        only: Ids to read, when the others can't be; None follows the window.
        verifies: Whether chunks are checked against their checksums as they are read; only to read.
        read_options: How chunks are read that are sealed.
        publish: Where it is published when it is written to, and how to reach the URL that has chunks which are no
            longer here.
        trim: What leaves it first when it is opened for writing.

    Returns:
        The store and the format of its items.

    Raises:
        StoreNotFoundError: When there is no store, and nothing is made; when there is no bucket for the URL.
        StoreExistsError: When something else is at the URL.
        StoreAccessError: When access to the URL is refused.
        StoreMismatchError: When another kind of buffer made it.
        StoreLockedError: When it is to be written and another process does.
        StoreLockUnsupportedError: When it is to be written and its file system doesn't lock files.
        StoreFormatError: When this version can't read it.
        StoreCorruptError: When one of its files is missing, short or unreadable.
    """
    manifest = read_manifest(path)
    _check_kind(path, manifest, kind)
    item_format = item_format_of(manifest)
    leaves = leaves_of(item_format)
    publish = publish or PublishOptions()
    remote = _elsewhere(manifest, publish, read_options)
    if not is_writable:
        store = Store(
            path,
            leaves,
            reads_history=reads_history,
            only=only,
            verifies=verifies,
            read_options=read_options,
            remote=remote,
        )
        return store, item_format
    publisher = None
    if found := _layout_differences(path, manifest, options):
        raise StoreMismatchError(
            f"cannot continue {path}: it was made otherwise than it is asked for now.\n  "
            + "\n  ".join(found)
            + "\nLeave layout and codec out, or copy the store into others with diskbuf.copy.",
            path=str(path),
            differences=found,
        )
    lock = lock_store(path, is_taken=options.lock)
    try:
        publisher = _publisher(path, manifest, publish, read_options, is_new=False)
        writable = WritableStore(
            path,
            leaves,
            lock=lock,
            options=options,
            max_length=read_manifest(path).max_length,
            package_version=__version__,
            reads_history=reads_history,
            read_options=read_options,
            remote=remote,
            trim=trim,
        )
    except BaseException:
        if publisher is not None:
            publisher.close()
        lock.close()
        raise
    return _publishing(writable, publisher), item_format


def _new_manifest(request: StoreRequest) -> Manifest:
    manifest = Manifest(
        kind=request.kind,
        spec=specs.to_json(request.format.data_spec),
        batch_size=request.format.batch_size,
        max_length=request.max_length,
        keep_history=request.keep_history,
        chunk_rows={},
        generation=0,
        first_id=0,
        next_id=0,
        oldest_id=0,
        runs=(),
        created=dt.datetime.now(dt.UTC).isoformat(timespec="microseconds"),
        metadata=request.metadata,
        package_version=__version__,
        published_to=None if request.publish.keep_local else _place_of(request.publish),
    )
    return laid_out(manifest, leaves_of(request.format), request.options)


def _place_of(publish: PublishOptions) -> str | None:
    if publish.url is None:
        return None
    return objects_at(publish.url, storage_options=publish.storage_options).place("")


def laid_out(manifest: Manifest, leaves: Sequence[Leaf], options: StoreOptions) -> Manifest:
    """Returns a manifest with the layout, codec and chunk lengths that a new store gets.

    Args:
        manifest: What the store is otherwise.
        leaves: The leaves of its spec.
        options: How it is laid out.

    Raises:
        OptionError: When the codec doesn't fit.
    """
    manifest = dataclasses.replace(
        manifest, chunk_rows=_chunk_rows(manifest, leaves, options), layout=options.layout, codec=None
    )
    if options.codec is None:
        return manifest
    layouts = column_layouts(leaves, manifest, path=Path())
    codec = codec_json(
        options.layout, options.codec, level=options.level, inner_rows=options.inner_rows, layouts=layouts
    )
    return dataclasses.replace(manifest, codec=codec)


def _chunk_rows(manifest: Manifest, leaves: Sequence[Leaf], options: StoreOptions) -> dict[str, int]:
    """Ids in a chunk of each column; the same for all where a chunk has all columns."""
    ring_length = None if manifest.keep_history else manifest.max_length
    lanes = manifest.batch_size
    # A shard has an element where an axis has none, and an Arrow file an id and a lane a row.
    least = 0 if options.codec is None else 1
    row_bytes = {
        leaf.file_path: lanes * leaf.dtype.itemsize * math.prod(max(least, length) for length in leaf.shape)
        for leaf in leaves
    }
    if options.layout == "arrow":
        row_bytes = dict.fromkeys(row_bytes, sum(row_bytes.values()) + lanes * _ARROW_ROW_BYTES)
    found = {
        file_path: rows_per_chunk(size, chunk_bytes=options.most_chunk_bytes, ring_length=ring_length)
        for file_path, size in row_bytes.items()
    }
    # Steps count for readers of zarr, and for a publication, when all of their leaves are sealed.
    longest = max(found.values()) if options.codec is None else _MOST_TIMES_SHORTEST * min(found.values())
    return {file_path: min(rows, longest) for file_path, rows in found.items()}


def _check_free(path: Path, mode: str) -> None:
    """A new store goes into a folder that is missing, empty, or left by a creation that was killed."""
    if path.is_dir():
        names = {entry.name for entry in os.scandir(path)}
        if (path / STATE_FOLDER / COPYING_FILE).exists() and ZARR_JSON not in names:
            raise _taken(
                path, "a copy that isn't finished", advice="Run diskbuf.copy again to finish it, or remove the folder."
            )
        if ZARR_JSON in names and mode == "w-":
            raise _taken(path, "a store", advice="Choose another path, or mode='a' to continue the store.")
        if names and STATE_FOLDER not in names:
            raise _taken(path, "files that are not a store's")
    elif path.exists() or path.is_symlink():
        raise _taken(path, "a file")


def _taken(path: Path, what: str, *, advice: str = "Choose another path.") -> StoreExistsError:
    return StoreExistsError(f"cannot create a store at {path}: the path holds {what}. {advice}", path=str(path))


def _check_unused(path: Path) -> None:
    """Refuses to make a store over one that has rows but lost its manifest."""
    if has_copy(path):
        read_manifest(path)  # says what to do
    header_path = path / STATE_FOLDER / HEADER_FILE
    if not header_path.exists():
        return
    header = LiveHeader(header_path, writable=False)
    try:
        durable = header.durable
        has_rows = header.live.next_id > 0 or (durable is not None and durable.next_id > 0)
    finally:
        header.close()
    if has_rows:
        raise StoreCorruptError(
            f"{path / ZARR_JSON} must hold the store's manifest, but is missing while the store has rows. "
            "Restore that file.",
            path=str(path / ZARR_JSON),
        )


def _check_agrees(path: Path, manifest: Manifest, request: StoreRequest, *, trim: bool) -> None:
    found = []
    if manifest.kind != request.kind:
        found.append(f"kind: the store has {manifest.kind!r}, the buffer {request.kind!r}")
    found += specs.differences(specs.from_json(manifest.spec), request.format.data_spec)
    if manifest.batch_size != request.format.batch_size:
        found.append(f"batch_size: the store has {manifest.batch_size}, the buffer {request.format.batch_size}")
    if manifest.keep_history != request.keep_history:
        found.append(f"keep_history: the store has {manifest.keep_history}, the buffer {request.keep_history}")
    found += _layout_differences(path, manifest, request.options)
    advice = "Use the store's own, or another path."
    length, wanted = manifest.max_length, request.max_length
    if wanted is not None and (length is None or wanted < length) and not trim:
        found.append(f"max_length: the store has {length}, the buffer {wanted}, which would let rows go")
        if len(found) == 1:
            advice = "Use the store's own or a larger one, or trim=True to let the oldest rows go."
    if found:
        raise StoreMismatchError(
            f"cannot continue {path}: it was made otherwise than it is asked for now.\n  "
            + "\n  ".join(found)
            + f"\n{advice}",
            path=str(path),
            differences=found,
        )


def _layout_differences(path: Path, manifest: Manifest, options: StoreOptions) -> list[str]:
    """How the layout that is asked for by name differs from the store's; none when no name is given."""
    if options.layout == "zarr" and options.codec is None:
        return []
    if options.layout != manifest.layout:
        return [f"layout: the store has {manifest.layout!r}, the buffer {options.layout!r}"]
    layouts = column_layouts(leaves_of(item_format_of(manifest)), manifest, path=path)
    wanted = None
    if options.codec is not None:
        wanted = codec_json(
            options.layout, options.codec, level=options.level, inner_rows=options.inner_rows, layouts=layouts
        )
    if _without_inner_rows(manifest.codec) == _without_inner_rows(wanted):
        return []
    has, asked = codec_name(manifest.codec), codec_name(wanted)
    level = ", at another level" if has == asked else ""
    return [f"codec: the store has {has}, the buffer {asked}{level}"]


def _without_inner_rows(codec: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if codec is None else {name: value for name, value in codec.items() if name != "inner_rows"}
