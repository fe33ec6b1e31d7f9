"""What a store is, which files it has, and some of its steps: what a person who has a store wants to see first.

Facts and files are told from the manifest, the live header and the names of files alone: no chunk is opened, so it is
quick with any number of them, and works on a store that is damaged.
"""

import contextlib
import dataclasses
import math
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskbuf import plan, specs
from diskbuf.errors import EmptyBufferError, OptionError, SpecError, StoreCorruptError, WindowError
from diskbuf.scanning import scan
from diskbuf.store.checksums import CHECKSUM_FILE, Checksum, entries_in
from diskbuf.store.chunk_format import ChunkFormat
from diskbuf.store.header import LiveHeader
from diskbuf.store.layout import HEADER_FILE, LOCK_FILE, STATE_FOLDER, ColumnLayout, Leaf, chunks_of
from diskbuf.store.lock import Holder, holder_of
from diskbuf.store.manifest import Manifest, read_manifest
from diskbuf.store.objects import Objects
from diskbuf.store.reading import column_layouts, stored_extent
from diskbuf.store.sealing import SealedFiles
from diskbuf.tree import Structure

if TYPE_CHECKING:
    import pyarrow as pa

    from diskbuf.replay_buffers.uniform import UniformReplayBuffer

ChunkState = Literal["raw", "sealed", "published", "spare"]

_COUNTED_STEPS = 2**18
_COUNTED_CHUNKS = 500
_BLOCK_SIZE = 512  # of st_blocks, whatever the file system's own


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafFacts:
    """A leaf of the spec and where its rows are.

    Attributes:
        path: The leaf as the user writes it; '' for a spec that is one leaf.
        keys: The way to it, key by key.
        spec: Its spec.
        folder: Its array below the store's folder, in the zarr layout.
        chunk_rows: Ids in a chunk.
    """

    path: str
    keys: tuple[str | int, ...]
    spec: specs.ArraySpec
    folder: str
    chunk_rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """What a store is and holds at a moment.

    Attributes:
        path: Its folder or URL.
        is_remote: Whether it is behind a URL.
        batch_size: Number of lanes.
        max_length: Longest window, None for no limit.
        keep_history: Whether steps that leave the window stay on disk.
        oldest_id: First id on disk: of the window, or of the history where it is kept.
        first_id: Start of the window.
        next_id: End of the window, exclusive.
        generation: How many times the store was cleared.
        runs: First id of each run of a writer, ascending.
        layout: How chunks that are full are stored, "zarr" or "arrow".
        codec: How they are compressed, None for not at all.
        format: Version of the store's format.
        package_version: The diskbuf that wrote the manifest.
        created: When the store was made, ISO 8601 in UTC.
        metadata: The user's own JSON.
        data_spec: Nest of ArraySpec for one step of one lane.
        leaves: Its leaves, in order.
        raw_bytes: Bytes of the steps from `oldest_id` on, before they are compressed.
        disk_bytes: Bytes that the file system has set aside for all files, less than their sizes where they have holes;
            of a remote store those of its chunks, None where it doesn't tell.
        published_to: URL that has chunks which are no longer here; None where all are.
        writer: Who has it open for writing, or was killed while it had; None for nobody.
        episodes: Episodes in the window, as many as `diskbuf.episodes` lists; None where they weren't counted.
    """

    path: str
    is_remote: bool
    batch_size: int
    max_length: int | None
    keep_history: bool
    oldest_id: int
    first_id: int
    next_id: int
    generation: int
    runs: tuple[int, ...]
    layout: str
    codec: str | None
    format: int
    package_version: str
    created: str
    metadata: Any
    data_spec: Any
    leaves: tuple[LeafFacts, ...]
    raw_bytes: int
    disk_bytes: int | None
    published_to: str | None
    writer: Holder | None
    episodes: int | None

    @property
    def num_frames(self) -> int:
        """Steps of all lanes in the window."""
        return (self.next_id - self.first_id) * self.batch_size

    @property
    def capacity(self) -> int | None:
        """Most steps of all lanes in the window, None for no limit."""
        return None if self.max_length is None else self.max_length * self.batch_size

    @property
    def compression_ratio(self) -> float | None:
        """Raw bytes a byte on disk; None without either."""
        return self.raw_bytes / self.disk_bytes if self.disk_bytes and self.raw_bytes else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreFile:
    """A file of a store, or an object of a remote one.

    Attributes:
        name: Below the store's folder or URL.
        leaves: Paths of the leaves that it holds rows of; none for a file that is no chunk.
        chunk: Number of the chunk, None for a file that is no chunk.
        first_id: First id of its rows that count, None without any.
        next_id: End of them, exclusive.
        rows: Ids that count; lanes times as many steps.
        raw_bytes: Bytes of these rows before they are compressed.
        disk_bytes: Bytes that it takes; None for one that isn't here and whose size nothing tells.
        state: "raw" rows, "sealed" as the layout has it, "published" and no longer here, "spare" when its rows have
            left the window and it waits to be overwritten; None for a file that is no chunk.
    """

    name: str
    leaves: tuple[str, ...] = ()
    chunk: int | None = None
    first_id: int | None = None
    next_id: int | None = None
    rows: int | None = None
    raw_bytes: int | None = None
    disk_bytes: int | None = None
    state: ChunkState | None = None


class Steps(NamedTuple):
    """Some steps, one a row.

    Attributes:
        ids: [N] int64.
        lanes: [N] int64.
        columns: [N, *shape] of each chosen leaf, by its path.
        sequences: [N] number of the sequence that a step is of; None for single steps.
    """

    ids: NDArray[np.int64]
    lanes: NDArray[np.int64]
    columns: dict[str, NDArray[Any]]
    sequences: NDArray[np.int64] | None = None


# ---- what it is


def inspect(
    path: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    counts_episodes: bool = True,
) -> StoreFacts:
    """Tells what a store is and holds.

    Nothing is written, and nobody who writes the store is disturbed. Chunks are not opened, but for episodes: these are
    counted where that is a matter of milliseconds, of raw stores with step types and few chunks.

        >>> import tempfile
        >>> import diskbuf
        >>> spec = {"x": specs.ArraySpec([3], "float32")}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with diskbuf.UniformReplayBuffer(spec, 2, path=f"{folder}/a") as buffer:
        ...         buffer.add_batch({"x": np.zeros([2, 3], "float32")})
        ...         facts = inspect(f"{folder}/a")
        >>> facts.num_frames, facts.raw_bytes, facts.writer.is_alive
        (2, 24, True)

    Args:
        path: The store's folder, or a URL.
        storage_options: What fsspec's file system of the URL's protocol takes.
        counts_episodes: Whether episodes may be counted.

    Raises:
        StoreNotFoundError: When there is no store.
        StoreFormatError: When a newer version wrote it.
        StoreCorruptError: When its manifest or live header can't be read.
        StoreAccessError: When a remote store refuses the credentials.
        StoreUnreachableError: When requests to it failed, and failed again.
        MissingExtraError: When the package for the URL's protocol isn't installed.
        OptionError: When an argument is outside its rule.
    """
    with contextlib.closing(_found(path, storage_options)) as found:
        manifest = found.manifest
        raw_bytes = (manifest.next_id - manifest.oldest_id) * sum(layout.row_bytes for layout in found.layouts)
        structure = Structure(found.spec)
        return StoreFacts(
            path=found.place,
            is_remote=found.folder is None,
            **{
                name: getattr(manifest, name)
                for name in (
                    *("batch_size", "max_length", "keep_history", "oldest_id", "first_id", "next_id", "generation"),
                    *("runs", "layout", "format", "package_version", "created", "metadata", "published_to"),
                )
            },
            codec=_codec_name(manifest),
            data_spec=found.spec,
            leaves=tuple(
                LeafFacts(path=path, keys=keys, spec=spec, folder=layout.file_path, chunk_rows=layout.chunk_rows)
                for path, keys, spec, layout in zip(
                    structure.paths, structure.keys, structure.flatten(found.spec), found.layouts, strict=True
                )
            ),
            raw_bytes=raw_bytes,
            disk_bytes=found.disk_bytes(),
            writer=None if found.folder is None else holder_of(found.folder / STATE_FOLDER / LOCK_FILE),
            episodes=_count_episodes(found) if counts_episodes else None,
        )


class _Found:
    """A store's manifest, as of this moment, its columns and where it is. Opens no chunk."""

    def __init__(self, place: Path | str, manifest: Manifest, objects: Objects | None) -> None:
        self.place = str(place)
        self.folder = place if isinstance(place, Path) else None
        self.objects = objects
        self.manifest = manifest
        self.spec = specs.from_json(manifest.spec)
        structure = Structure(self.spec)
        leaves = [
            Leaf(path=path, file_path=file_path, dtype=spec.dtype, shape=spec.shape)
            for path, file_path, spec in zip(
                structure.paths, structure.file_paths, structure.flatten(self.spec), strict=True
            )
        ]
        self.layouts = column_layouts(leaves, manifest, path=self.folder or Path())

    def chunk_format(self) -> ChunkFormat:
        return self.manifest.chunk_format(self.layouts)

    def checksums(self) -> dict[tuple[str, int], Checksum]:
        """The checksums of its objects, none where there is no table."""
        name = f"{STATE_FOLDER}/{CHECKSUM_FILE}"
        try:
            data = (self.folder / name).read_bytes() if self.objects is None else self.objects.read(name)  # type: ignore[operator]  # one of the two is there
        except FileNotFoundError:
            return {}
        return entries_in(data, place=f"{self.place}/{name}")

    def disk_bytes(self) -> int | None:
        if self.folder is not None:
            return disk_bytes_of(self.folder)
        entries = self.checksums()
        return sum(entry.bytes for entry in entries.values()) if entries or not self.manifest.next_id else None

    def close(self) -> None:
        if self.objects is not None:
            self.objects.close()


def _found(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None) -> _Found:
    text = os.fspath(path)
    if "://" not in text and text and not text.startswith("~"):
        folder = Path(os.path.abspath(text))  # noqa: PTH100 - as opening it does; links stay
        return _Found(folder, _manifest_now(folder), None)
    # What it takes to reach a URL, or to say what is wrong with a path, isn't imported for the others.
    from diskbuf.replay_buffers.opening import objects_at, place_of
    from diskbuf.store.remote import read_remote_manifest

    place = place_of(path)
    if isinstance(place, Path):
        return _Found(place, _manifest_now(place), None)
    objects = objects_at(place, storage_options=storage_options)
    try:
        manifest = read_remote_manifest(objects)
        oldest = manifest.oldest_id if manifest.keep_history else manifest.first_id
        return _Found(place, dataclasses.replace(manifest, oldest_id=oldest), objects)
    except BaseException:
        objects.close()
        raise


def _manifest_now(folder: Path) -> Manifest:
    """The manifest with the window of this moment, which is in the live header."""
    manifest = read_manifest(folder)
    header = None
    with contextlib.suppress(FileNotFoundError):
        header = LiveHeader(folder / STATE_FOLDER / HEADER_FILE, writable=False)
    try:
        extent = stored_extent(manifest, header)
    finally:
        if header is not None:
            header.close()
    if manifest.next_id > extent.next_id:
        warnings.warn(
            f"{folder}: steps up to id {manifest.next_id} were added, but only those below {extent.next_id} are "
            "certain to be whole. The others are left out.",
            RuntimeWarning,
            stacklevel=5,
        )
    return dataclasses.replace(
        manifest,
        generation=extent.generation,
        first_id=extent.floor,
        next_id=extent.next_id,
        oldest_id=min(manifest.oldest_id, extent.floor) if manifest.keep_history else extent.floor,
    )


def _codec_name(manifest: Manifest) -> str | None:
    if manifest.codec is None:
        return None
    from diskbuf.store.chunk_formats.codecs import codec_name

    return codec_name(manifest.codec)


def _count_episodes(found: _Found) -> int | None:
    """Episodes in the window, where the spec tells of them and counting them is quick."""
    manifest, layouts = found.manifest, found.layouts
    steps = (manifest.next_id - manifest.first_id) * manifest.batch_size
    chunks = sum(len(layout.chunks(manifest.first_id, manifest.next_id)) for layout in layouts)
    if found.folder is None or manifest.is_sealed or steps > _COUNTED_STEPS or chunks > _COUNTED_CHUNKS:
        return None
    if not any(layout.path.rpartition("/")[2] == "step_type" for layout in layouts):
        return None
    from diskbuf.episode_table import episodes
    from diskbuf.replay_buffers import uniform

    with (
        contextlib.suppress(SpecError, StoreCorruptError),
        warnings.catch_warnings(action="ignore"),
        uniform.open(found.folder) as buffer,
    ):
        return len(episodes(buffer))
    return None  # step types that don't tell, or chunks that are damaged: not what was asked


# ---- its files


def store_files(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
) -> Iterator[StoreFile]:
    """Lists the chunks of a store, leaf by leaf and oldest first, and then its other files.

    Sizes are looked up as the files are asked for. Of a remote store there are the chunks that its table of checksums
    names, and no other files: not every place can be listed.

    Args:
        path: The store's folder, or a URL.
        storage_options: What fsspec's file system of the URL's protocol takes.

    Yields:
        The files.

    Raises:
        StoreNotFoundError: As `inspect`, like the others that it raises.
    """
    with contextlib.closing(_found(path, storage_options)) as found:
        if found.folder is None:
            yield from _remote_files(found)
        else:
            yield from _local_files(found, found.folder)


def _local_files(found: _Found, folder: Path) -> Iterator[StoreFile]:
    manifest = found.manifest
    there = SealedFiles(folder, found.chunk_format())
    names: set[str] = set()
    for group in there.groups:
        layouts = there.layouts_of(group)
        objects = there.object_chunks(group) if manifest.is_sealed else set()
        for layout in layouts:
            for chunk in sorted(there.raw_chunks(layout)):
                name = f"{layout.raw_folder}/{layout.file_name(chunk)}"
                names.add(name)
                if (size := _size_of(folder / name)) is not None:
                    yield _chunk_file(found, [layout], chunk, name=name, disk_bytes=size, state="raw")
        for chunk in sorted(objects):
            name = there.object_path(group, chunk).relative_to(folder).as_posix()
            names.add(name)
            if (size := _size_of(folder / name)) is not None:
                yield _chunk_file(found, layouts, chunk, name=name, disk_bytes=size, state="sealed")
        if manifest.published_to is not None:
            gone = set(chunks_of(manifest.oldest_id, manifest.next_id, there.rows_of(group))) - objects
            for layout in layouts:
                gone -= there.raw_chunks(layout)
            for chunk in sorted(gone):
                name = there.object_path(group, chunk).relative_to(folder).as_posix()
                yield _chunk_file(found, layouts, chunk, name=name, disk_bytes=None, state="published")
    others = sorted((os.path.relpath(entry.path, folder), entry) for entry in _files(folder))
    for name, entry in others:
        if name not in names:
            yield StoreFile(name=name, disk_bytes=_size(entry))


def _remote_files(found: _Found) -> Iterator[StoreFile]:
    chunk_format = found.chunk_format()
    groups = {chunk_format.object_name(group, 0).rpartition("/")[0]: group for group in range(len(chunk_format.groups))}
    order = sorted(
        ((groups[folder], chunk, entry) for (folder, chunk), entry in found.checksums().items() if folder in groups),
        key=lambda item: item[:2],
    )
    for group, chunk, entry in order:
        layouts = [found.layouts[number] for number in chunk_format.groups[group]]
        name = chunk_format.object_name(group, chunk)
        yield _chunk_file(found, layouts, chunk, name=name, disk_bytes=entry.bytes, state="published")


def _chunk_file(
    found: _Found,
    layouts: Sequence[ColumnLayout],
    chunk: int,
    *,
    name: str,
    disk_bytes: int | None,
    state: ChunkState,
) -> StoreFile:
    manifest, length = found.manifest, layouts[0].chunk_rows
    first_id = max(chunk * length, manifest.oldest_id)
    next_id = min((chunk + 1) * length, manifest.next_id)
    rows = max(0, next_id - first_id)
    return StoreFile(
        name=name,
        leaves=tuple(layout.path for layout in layouts),
        chunk=chunk,
        first_id=first_id if rows else None,
        next_id=next_id if rows else None,
        rows=rows,
        raw_bytes=rows * sum(layout.row_bytes for layout in layouts),
        disk_bytes=disk_bytes,
        state=state if rows or state != "raw" else "spare",
    )


def _files(folder: Path) -> Iterator["os.DirEntry[str]"]:
    """Everything in a folder and those below it that isn't a folder."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):  # gone since it was listed
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        else:
            yield entry


def disk_bytes_of(folder: Path) -> int:
    """Bytes that the file system has set aside for all files in a folder and below."""
    return sum(_size(entry) for entry in _files(folder))


def _size(entry: "os.DirEntry[str]") -> int:
    with contextlib.suppress(FileNotFoundError):  # the writer may have evicted it since it was listed
        return entry.stat(follow_symlinks=False).st_blocks * _BLOCK_SIZE
    return 0


def _size_of(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return path.lstat().st_blocks * _BLOCK_SIZE
    return None


# ---- its schema


def arrow_schema(path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> "pa.Schema":
    """Returns the schema of the Arrow table that a store's steps make: a row a step, with columns `id` and `lane`.

    It is that of the files of the Arrow layout, whatever the store's own.

    Args:
        path: The store's folder, or a URL.
        storage_options: What fsspec's file system of the URL's protocol takes.

    Raises:
        StoreNotFoundError: As `inspect`, like the others that it raises.
    """
    from diskbuf.store.chunk_formats.arrow_parts import ArrowParts

    with contextlib.closing(_found(path, storage_options)) as found:
        alike = [dataclasses.replace(layout, chunk_rows=1) for layout in found.layouts]
        return ArrowParts(alike, None, {}).schema


# ---- its steps


def oldest_steps(
    buffer: "UniformReplayBuffer", columns: Sequence[str], *, count: int, lane: int | None = None
) -> Steps:
    """Reads the first steps of a buffer's window, by id and then by lane.

    Args:
        buffer: A buffer, open for reading or writing.
        columns: Paths of leaves; no file of another is touched.
        count: How many steps, all lanes together; fewer come where there are fewer.
        lane: The only lane to read; None for all.

    Raises:
        OptionError: When count is negative, or there is no such leaf.
        WindowError: When there is no such lane.
        StoreCorruptError: When a chunk file is missing, short or has rotten.
        ClosedError: After the buffer's `close`.
    """
    ids = _ids_of(buffer, count, lane)
    first_id = buffer.first_id
    steps = _read(buffer, columns, first_id, first_id + ids, lane)
    return _part(steps, slice(0, count))


def newest_steps(
    buffer: "UniformReplayBuffer", columns: Sequence[str], *, count: int, lane: int | None = None
) -> Steps:
    """As `oldest_steps`, the last steps of the window; by id and then by lane too."""
    ids = _ids_of(buffer, count, lane)
    next_id = buffer.next_id
    steps = _read(buffer, columns, next_id - ids, next_id, lane)
    return _part(steps, slice(max(0, len(steps.ids) - count), None))


def step_at(buffer: "UniformReplayBuffer", columns: Sequence[str], *, step_id: int, lane: int) -> Steps:
    """Reads one step.

    Args:
        buffer: A buffer, open for reading or writing.
        columns: Paths of leaves; no file of another is touched.
        step_id: Its id.
        lane: Its lane.

    Raises:
        WindowError: When the id is not in the window, or the lane not one of the buffer's.
        OptionError: When there is no such leaf.
        StoreCorruptError: When a chunk file is missing, short or has rotten.
        ClosedError: After the buffer's `close`.
    """
    check_lane(buffer, lane)
    first_id, next_id = buffer.first_id, buffer.next_id
    if first_id <= step_id < next_id:
        steps = _read(buffer, columns, step_id, step_id + 1, lane)
        if len(steps.ids):
            return steps
        first_id, next_id = buffer.first_id, buffer.next_id  # evicted meanwhile
    raise WindowError(
        f"id must be in the window [{first_id}, {next_id}), got {step_id}. Take it from there, or read the history "
        "where the store keeps it."
    )


def sampled_steps(
    buffer: "UniformReplayBuffer", columns: Sequence[str], *, count: int, num_steps: int | None, seed: int | None
) -> Steps:
    """Draws steps or sequences as `get_next` does, and says of which lanes they are.

    With a seed they are what ``diskbuf.open(path, seed=seed).get_next(count, num_steps)`` gives of the same window.

    Args:
        buffer: A buffer, open for reading or writing.
        columns: Paths of leaves; no file of another is touched.
        count: How many steps or sequences.
        num_steps: Steps of a sequence; None for single steps.
        seed: Makes the draw repeatable; None draws one.

    Raises:
        EmptyBufferError: When the window is empty and count isn't 0.
        WindowError: When no run has num_steps steps in the window, or what was drawn was evicted before it was read.
        OptionError: When an argument is outside its rule.
        StoreCorruptError: When a chunk file is missing, short or has rotten.
        ClosedError: After the buffer's `close`.
    """
    _check_count(count)
    if num_steps is not None and num_steps < 1:
        raise OptionError(f"num_steps must be at least 1, got {num_steps}.")
    store, lanes, length = buffer._opened(), buffer.batch_size, num_steps or 1
    if not count:
        none = _read(buffer, columns, 0, 0, None)
        return none if num_steps is None else none._replace(sequences=np.empty(0, np.int64))
    first_id, next_id = store.window()
    starts = plan.sequence_starts(first_id, next_id, lanes=lanes, num_steps=length, runs=store.runs)
    if first_id == next_id:
        raise EmptyBufferError(f"buffer {buffer.path} must hold steps to be sampled, but is empty. Add some first.")
    if not starts.pairs:
        longest = max(high - low for low, high in plan.segments(first_id, next_id, runs=store.runs))
        raise WindowError(
            f"num_steps must be at most {longest}, got {num_steps}: no more consecutive ids are in the window "
            f"[{first_id}, {next_id}) without a restart of the writer between them."
        )
    drawn = secrets.randbits(63) if seed is None else seed
    planner = plan.RandomPlanner(plan.derive_seed(drawn, 0), lanes=lanes)
    rows, _ = planner.plan(0, starts, count=count, num_steps=length)
    found = [
        _read(buffer, columns, first_id + start // lanes, first_id + start // lanes + length, start % lanes)
        for start in rows[:, 0].tolist()
    ]
    if any(len(steps.ids) < length for steps in found):
        raise WindowError(
            f"{length} steps must stay in the window while they are read, but the writer evicts them faster. Try again."
        )
    sequences = None if num_steps is None else np.repeat(np.arange(count), length)
    return _joined(found, columns, buffer)._replace(sequences=sequences)


def _ids_of(buffer: "UniformReplayBuffer", count: int, lane: int | None) -> int:
    """How many ids have so many steps."""
    _check_count(count)
    if lane is None:
        return -(-count // buffer.batch_size)
    check_lane(buffer, lane)
    return count


def _check_count(count: int) -> None:
    if count < 0:
        raise OptionError(f"the number of steps must be at least 0, got {count}.")


def check_lane(buffer: "UniformReplayBuffer", lane: int) -> None:
    """Refuses a lane that a buffer doesn't have.

    Args:
        buffer: A buffer.
        lane: Number of the lane.

    Raises:
        WindowError: When there is no such lane.
    """
    if not 0 <= lane < buffer.batch_size:
        raise WindowError(f"lane must be from 0 to {buffer.batch_size - 1}, got {lane}.")


def _read(
    buffer: "UniformReplayBuffer", columns: Sequence[str], first_id: int, next_id: int, lane: int | None
) -> Steps:
    """The steps of ids that are in the window, less those that are evicted before they were read."""
    lanes = np.arange(buffer.batch_size) if lane is None else np.array([lane])
    parts = []
    for block in scan(buffer, columns, first_id=first_id, next_id=next_id):
        ids = np.arange(block.first_id, block.next_id)
        found = {
            path: rows[lanes].swapaxes(0, 1).reshape(len(ids) * len(lanes), *rows.shape[2:])
            for path, rows in block.columns.items()
        }
        parts.append(Steps(np.repeat(ids, len(lanes)), np.tile(lanes, len(ids)), found))
    return _joined(parts, columns, buffer)


def _joined(parts: Sequence[Steps], columns: Sequence[str], buffer: "UniformReplayBuffer") -> Steps:
    if not parts:
        layouts = {column.layout.path: column.layout for column in buffer._opened().columns}
        none = {path: np.empty((0, *layouts[path].shape), layouts[path].dtype) for path in columns}
        return Steps(np.empty(0, np.int64), np.empty(0, np.int64), none)
    return Steps(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.lanes for part in parts]),
        {path: np.concatenate([part.columns[path] for part in parts]) for path in columns},
    )


def _part(steps: Steps, part: slice) -> Steps:
    return Steps(steps.ids[part], steps.lanes[part], {path: rows[part] for path, rows in steps.columns.items()})


# ---- its episodes


def numbered_episodes(table: "pa.Table") -> "pa.Table":
    """Puts a column `episode` before a table of episodes: the number of each row, as exports and splits count them.

    Args:
        table: What `diskbuf.episodes` returned, all of it and in its order.
    """
    import pyarrow as pa

    numbers = pa.py_buffer(np.arange(len(table), dtype=np.int64))  # pa.array() would import pandas
    return table.add_column(0, "episode", pa.Array.from_buffers(pa.int64(), len(table), [None, numbers]))


def chosen_episodes(
    table: "pa.Table",
    *,
    lane: int | None = None,
    end: str | None = None,
    min_return: float | None = None,
    max_return: float | None = None,
    min_length: int | None = None,
    only_whole: bool = False,
) -> "pa.Table":
    """Keeps the rows of a table of episodes that fit every condition; None asks for nothing.

    Args:
        table: What `diskbuf.episodes` returned.
        lane: The lane.
        end: How it ended: "terminated", "truncated", "open" or "broken".
        min_return: Least return; an episode without one doesn't fit.
        max_return: Greatest return.
        min_length: Least length.
        only_whole: Whether its first step must be in the window.

    Raises:
        OptionError: When there is no such end.
    """
    import pyarrow.compute as pc

    ends = ("terminated", "truncated", "open", "broken")
    if end is not None and end not in ends:
        raise OptionError(f"end must be one of {', '.join(map(repr, ends))}, got {end!r}.")
    conditions = [
        None if lane is None else pc.equal(table["lane"], lane),
        None if end is None else pc.equal(table["end"], end),
        None if min_return is None else pc.greater_equal(table["return"], min_return),
        None if max_return is None else pc.less_equal(table["return"], max_return),
        None if min_length is None else pc.greater_equal(table["length"], min_length),
        table["is_whole"] if only_whole else None,
    ]
    mask = None
    for condition in conditions:
        if condition is not None:
            mask = condition if mask is None else pc.and_kleene(mask, condition)
    return table if mask is None else table.filter(mask)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and spread of a number of each episode; NaN and None without any.

    Attributes:
        mean: Arithmetic mean.
        std: Standard deviation of the population.
        minimum: Least.
        maximum: Greatest.
    """

    mean: float
    std: float
    minimum: float | None
    maximum: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeSummary:
    """A table of episodes in a few numbers.

    Attributes:
        count: Episodes.
        whole: How many of them have their first step in the window.
        complete: How many of these have ended too, and neither go on nor were broken off.
        steps: Of all episodes.
        ends: How many ended in which way, by the names of `diskbuf.episodes`; "unknown" where nothing tells.
        length: Of the lengths of those that are complete: of others nobody knows how long they are.
        returns: Likewise of their returns; None without a reward.
    """

    count: int
    whole: int
    complete: int
    steps: int
    ends: dict[str, int]
    length: Spread
    returns: Spread | None


def summarize_episodes(table: "pa.Table") -> EpisodeSummary:
    """Sums up a table of episodes.

    Args:
        table: What `diskbuf.episodes` or `chosen_episodes` returned.
    """
    import pyarrow.compute as pc

    # Comparing with a scalar would import pandas where that is installed: 0.2 s.
    has_ended = pc.invert(pc.match_substring_regex(table["end"], "^(open|broken)$"))
    complete = table.filter(pc.and_(table["is_whole"], pc.or_kleene(pc.is_null(table["end"]), has_ended)))
    has_return = table["return"].null_count < len(table) or not len(table)
    counts = {entry["values"] or "unknown": entry["counts"] for entry in pc.value_counts(table["end"]).to_pylist()}
    order = ("terminated", "truncated", "open", "broken", "unknown")
    return EpisodeSummary(
        count=len(table),
        whole=pc.sum(table["is_whole"]).as_py() or 0,
        complete=len(complete),
        steps=pc.sum(table["length"]).as_py() or 0,
        ends={end: counts[end] for end in order if end in counts},
        length=_spread(complete["length"]),
        returns=_spread(complete["return"]) if has_return else None,
    )


def _spread(values: "pa.ChunkedArray") -> Spread:
    import pyarrow.compute as pc

    limits = pc.min_max(values).as_py()
    mean, std = pc.mean(values).as_py(), pc.stddev(values).as_py()
    return Spread(
        mean=math.nan if mean is None else mean,
        std=math.nan if std is None else std,
        minimum=limits["min"],
        maximum=limits["max"],
    )
