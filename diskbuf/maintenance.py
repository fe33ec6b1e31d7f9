"""Checking stores and mending them: what is whole, what isn't, and the longest run of steps that is."""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import stat
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import StoreCorruptError, StoreFormatError
from diskbuf.options import IN_MEMORY, ReadOptions
from diskbuf.replay_buffers.opening import item_format_of, leaves_of, local_path
from diskbuf.row_rules import rules_of
from diskbuf.store import files
from diskbuf.store.checksums import CHECKSUM_FILE, Checksum, ChecksumTable, checksum_of, rot_in
from diskbuf.store.chunk_format import ChunkFormat
from diskbuf.store.header import EPOCH, SEAL_EPOCH, Extent, LiveHeader
from diskbuf.store.layout import HEADER_FILE, LOCK_FILE, STATE_FOLDER, ColumnLayout, chunks_of
from diskbuf.store.manifest import (
    COPY_FILE,
    ZARR_JSON,
    Manifest,
    ZarrMetadata,
    group_document,
    promises_copy,
    read_copy,
    read_manifest,
)
from diskbuf.store.quarantine import move_to_quarantine, quarantine_path
from diskbuf.store.reading import EVERY_ID, Store, column_layouts, stored_extent
from diskbuf.store.sealing import SealedFiles
from diskbuf.store.writing import lock_store

_PIECE_BYTES = 2**22
_IN_PASSING = ReadOptions(cache_dir=IN_MEMORY, cache_bytes=2**28)  # each chunk is looked at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """Something of a store that isn't as it must be.

    Attributes:
        path: The file.
        message: What is wrong with it, in one line.
        first_id: First id whose rows it takes away, None when no rows are lost by it.
        next_id: End of these ids, exclusive.
        leaf: Path of the leaf that holds wrong values; None, like the rest, when it isn't about values.
        step_id: The lowest id with a wrong value; the file is the one that holds it.
        lane: Its lane.
        count: Steps with wrong values, all lanes together.
    """

    path: str
    message: str
    first_id: int | None = None
    next_id: int | None = None
    leaf: str | None = None
    step_id: int | None = None
    lane: int | None = None
    count: int | None = None

    @property
    def ids(self) -> tuple[int, int] | None:
        """(first_id, next_id), None when no rows are lost by it."""
        return None if self.first_id is None or self.next_id is None else (self.first_id, self.next_id)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What `verify` found.

    Attributes:
        path: The store.
        first_id: First id that must be on disk: of the window, or of the history where it is kept.
        next_id: End of the window, exclusive.
        chunks: Chunk files that were looked at.
        faults: What is wrong, none when the store is clean.
        steps: Ids whose values were looked at.
    """

    path: str
    first_id: int
    next_id: int
    chunks: int
    faults: tuple[Fault, ...]
    steps: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults


@dataclasses.dataclass(frozen=True, kw_only=True)
class RepairReport:
    """What `repair` did, or would do.

    Attributes:
        path: The store.
        first_id: First id on disk afterwards.
        next_id: End of the window afterwards, exclusive.
        lost: How many ids could not be kept.
        actions: What was done, one line each; none when the store was clean.
        is_dry_run: Whether nothing was changed.
    """

    path: str
    first_id: int
    next_id: int
    lost: int
    actions: tuple[str, ...]
    is_dry_run: bool


def verify(path: str | os.PathLike[str], *, values: bool = False) -> VerifyReport:
    """Checks that every file of a store is there, whole and in agreement with the others. Changes nothing.

    A store that is being written may change between two looks; verify it again when it reports a chunk that was
    evicted meanwhile.

    With `values` it also reads every whole row of the window, a few MiB at a time. Values outside the bounds of their
    spec are faults, as is NaN in a bounded leaf. So are step types that contradict each other: other values than 0
    (FIRST), 1 (MID) and 2 (LAST), a LAST row that is not followed by a FIRST one or a FIRST one behind another row, and
    a row that is neither what the row before it said would come nor FIRST. FIRST may come at any time, because a driver
    begins new episodes after an exception; and nothing is asked of the first row of a run. `repair` leaves all that
    as it is: these rows are what was added.

    Args:
        path: The store's folder.
        values: Whether to look at the values too.

    Returns:
        What is wrong, file by file.

    Raises:
        StoreNotFoundError: When there is no store.
        StoreFormatError: When a newer version wrote it.
    """
    store = local_path(path)
    try:
        found = _examine(store)
    except (StoreCorruptError, StoreFormatError) as error:
        if isinstance(error, StoreFormatError) and error.is_newer:
            raise
        fault = Fault(path=error.path or str(store), message=_one_line(error))
        return VerifyReport(path=str(store), first_id=0, next_id=0, chunks=0, faults=(fault,))
    steps, value_faults = _look_at_values(store, found) if values else (0, [])
    return VerifyReport(
        path=str(store),
        first_id=found.first_id,
        next_id=found.next_id,
        chunks=found.chunks,
        faults=(*_lock_faults(store), *found.faults, *value_faults),
        steps=steps,
    )


def repair(path: str | os.PathLike[str], dry_run: bool = False, *, lock: bool = True) -> RepairReport:
    """Brings a damaged store to its longest consistent state: the longest run of ids that are whole in every column.

    What is taken out is moved to the folder `.diskbuf/quarantine` of the store, not deleted. A second repair finds
    nothing to do and changes no byte. A zarr.json that is lost or damaged is made anew from the copy of the manifest
    in `.diskbuf`; where both are good and differ, zarr.json counts.

    Args:
        path: The store's folder; no process may have it open for writing.
        dry_run: Only say what would be done.
        lock: Whether to take the store's lock; False where the file system doesn't lock files.

    Returns:
        What was done.

    Raises:
        StoreNotFoundError: When there is no store.
        StoreLockedError: When a process writes it.
        StoreLockUnsupportedError: When its file system doesn't lock files.
        StoreFormatError: When a newer version wrote it.
        StoreCorruptError: When neither the manifest nor its copy can be read, without which nothing can be told.
        OSError: When a file can't be moved or written.
    """
    store = local_path(path)
    _read_manifests(store)  # makes no lock file where there is no store
    quarantine = _Quarantine(store, is_dry_run=dry_run)
    actions = [action for fault in _lock_faults(store) for action in quarantine.take(Path(fault.path))]
    held = lock_store(store, is_taken=lock and not (dry_run and actions))  # what is in its place can't be locked
    try:
        found = _examine(store)
        if found.faults:
            actions += _mend(store, found, is_dry_run=dry_run)
        first_id, next_id = found.whole
        return RepairReport(
            path=str(store),
            first_id=first_id,
            next_id=next_id,
            lost=(found.next_id - found.first_id) - (next_id - first_id),
            actions=tuple(actions),
            is_dry_run=dry_run,
        )
    finally:
        held.close()


def longest_whole_run(path: Path) -> tuple[int, int, tuple[Fault, ...]]:
    """Returns the longest run of ids whose chunk files are whole, and what is wrong with the others.

    Args:
        path: The store's folder.

    Returns:
        (first_id, next_id, faults).

    Raises:
        StoreCorruptError: When the manifest can't be read.
    """
    read_manifest(path)  # the copy is for repair; nobody reads rows by it
    found = _examine(path, takes_parts=False)
    return *found.whole, found.faults


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Findings:
    manifest: Manifest
    layouts: list[ColumnLayout]
    extent: Extent
    first_id: int
    next_id: int
    chunks: int
    faults: tuple[Fault, ...]
    whole: tuple[int, int]
    damaged: list[tuple[int, int]]
    """Ids of chunks that are missing or not as they must be, also where some of their rows are whole."""
    remade: tuple[Path, ...]
    """Files beside the chunks that are to be made anew."""
    is_manifest_lost: bool
    """Whether the manifest is the copy's, because zarr.json doesn't hold it."""


def _examine(store: Path, *, takes_parts: bool = True) -> _Findings:
    """Looks at every file. Rows of short chunk files count as whole when `takes_parts`, as far as they are there."""
    manifest, manifest_faults = _read_manifests(store)
    layouts = column_layouts(leaves_of(item_format_of(manifest)), manifest, path=store)
    root = store / ZARR_JSON
    is_manifest_lost = any(fault.path == str(root) for fault in manifest_faults)
    extent, header_faults = _read_extent(store, manifest, layouts)
    first_id = manifest.oldest_id if manifest.keep_history else extent.floor
    table, table_faults = _read_checksums(store, extent)
    beside = [
        *manifest_faults,
        *header_faults,
        *table_faults,
        # What of a store that seals its chunks is sealed is not counted anywhere, so any length is right.
        *_document_faults(
            store,
            documents_of(manifest, layouts),
            certain_id=0 if manifest.is_sealed else min(manifest.next_id, extent.next_id),
        ),
    ]
    if not is_manifest_lost:
        beside += _root_faults(store, ZarrMetadata(store, documents_of(manifest, layouts)), manifest)
    faults = [*beside, *_count_faults(store, manifest, extent)]
    chunks, damaged = 0, []
    if manifest.is_sealed:
        sealed = list(_sealed_faults(store, manifest, layouts, (first_id, extent.next_id), table=table))
        faults += sealed
        damaged += [ids for fault in sealed if (ids := fault.ids)]
        chunks = _sealed_chunks(store, manifest, layouts, (first_id, extent.next_id))
    for layout in () if manifest.is_sealed else layouts:
        expected = layout.chunks(first_id, extent.next_id)
        present = _present_chunks(store, layout, expected)
        missing = list(_missing_faults(store, layout, expected, present, extent.next_id))
        faults += missing
        damaged += [ids for fault in missing if (ids := fault.ids)]
        chunks += len(present)
        for chunk in present:
            found = list(_chunk_faults(store, layout, chunk, extent.next_id, table=table, takes_parts=takes_parts))
            faults += found
            damaged += [(chunk * layout.chunk_rows, (chunk + 1) * layout.chunk_rows) for _ in found]
    bad = [ids for fault in faults if (ids := fault.ids)]
    return _Findings(
        manifest=manifest,
        layouts=layouts,
        extent=extent,
        first_id=first_id,
        next_id=extent.next_id,
        chunks=chunks,
        faults=tuple(faults),
        whole=longest_gap(first_id, extent.next_id, bad),
        damaged=damaged,
        remade=tuple(dict.fromkeys(Path(fault.path) for fault in beside)),
        is_manifest_lost=is_manifest_lost,
    )


def _look_at_values(store: Path, found: _Findings) -> tuple[int, list[Fault]]:
    """How many ids of the window were looked at, and which rules their rows break."""
    item_format = item_format_of(found.manifest)
    rules = rules_of(item_format.structure.paths, item_format.specs)
    steps, next_id = 0, -1
    numbers = sorted({column for rule in rules for column in rule.columns})
    for first_id, leaves, runs in _rows(store, found, numbers) if rules else ():
        count = leaves[0].shape[1]
        follows = np.ones(count, np.bool)
        follows[[run - first_id for run in runs if first_id <= run < first_id + count]] = False
        follows[0] &= first_id == next_id
        next_id = first_id + count
        steps += count
        for rule in rules:
            rule.look(first_id, dict(zip(numbers, leaves, strict=True)), follows=follows)
    columns = {layout.path: layout for layout in found.layouts}
    faults = []
    for breach in filter(None, (rule.breach for rule in rules)):
        layout = columns[breach.leaf]
        path = _chunk_path(store, layout, breach.step_id // layout.chunk_rows)
        faults.append(Fault(path=str(path), **dataclasses.asdict(breach)))
    return steps, faults


def _rows(
    store: Path, found: _Findings, numbers: list[int]
) -> Iterator[tuple[int, list[NDArray[Any]], tuple[int, ...]]]:
    """Yields (first id, chosen columns [B, T, *shape], runs) over the window, oldest first, but for damaged chunks."""
    if found.is_manifest_lost:
        return  # nobody reads rows by the copy
    leaves = leaves_of(item_format_of(found.manifest))
    size = max(1, _PIECE_BYTES // max(1, sum(found.layouts[number].row_bytes for number in numbers)))
    # A whole store is read as readers do, who notice what a writer overwrites meanwhile.
    parts = list(_gaps(found.extent.floor, found.next_id, found.damaged)) if found.faults else [None]
    for part in parts:
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # steps that were lost are a fault
            reader = Store(store, leaves, is_mapped=False, only=part, read_options=_IN_PASSING)
        with contextlib.closing(reader):
            start, next_id = reader.window()
            while (start := max(start, reader.window()[0])) < next_id:
                stop = min(start + size, next_id)
                piece = reader.read_columns(numbers, start, stop)
                if piece is None:  # overwritten, or another writer has begun: the window has to be read again
                    continue
                yield stop - piece[0].shape[1], piece, reader.runs
                start = stop


def _read_manifests(store: Path) -> tuple[Manifest, list[Fault]]:
    """The manifest, from its copy when zarr.json doesn't hold it, and what is wrong with either of them."""
    path, copy_path = store / ZARR_JSON, store / STATE_FOLDER / COPY_FILE
    try:
        manifest = read_manifest(store)
    except (StoreCorruptError, StoreFormatError) as error:
        return _lost_manifest(store, error), [Fault(path=str(path), message=_one_line(error))]
    try:
        copy = read_copy(store)
    except (StoreCorruptError, StoreFormatError) as error:
        return manifest, [Fault(path=str(copy_path), message=_one_line(error))]
    message = None
    if copy is None and promises_copy(store):
        message = f"{copy_path} must hold a copy of the manifest, but is missing."
    elif copy is not None and _identity(copy) != _identity(manifest):
        message = f"{copy_path} must hold a copy of the manifest in {path}, but is that of another store."
    return manifest, [] if message is None else [Fault(path=str(copy_path), message=message)]


def _lost_manifest(store: Path, problem: StoreCorruptError | StoreFormatError) -> Manifest:
    """The manifest as its copy has it, when there is a problem with zarr.json."""
    if isinstance(problem, StoreFormatError) and problem.is_newer:
        raise problem
    try:
        copy = read_copy(store)
    except StoreCorruptError as error:
        raise StoreCorruptError(
            f"{store / ZARR_JSON} must hold the store's manifest and {error.path} a copy, but both are damaged. "
            "Restore one of them.",
            path=str(store / ZARR_JSON),
        ) from problem
    if copy is None:
        raise problem
    return copy


def _identity(manifest: Manifest) -> tuple[object, ...]:
    """What never changes in the life of a store; the rest of a copy may be one commit ahead, or behind old versions."""
    return (
        *(manifest.kind, manifest.spec, manifest.batch_size, manifest.keep_history, manifest.chunk_rows),
        *(manifest.created, manifest.format, manifest.layout, manifest.codec),
    )


def longest_gap(first_id: int, next_id: int, bad: list[tuple[int, int]]) -> tuple[int, int]:
    """Returns the longest run of ids in [first_id, next_id) outside all of `bad`, the newest of equally long ones.

    Args:
        first_id: First id.
        next_id: End, exclusive.
        bad: [low, high) pairs in any order, overlapping or not.

    Returns:
        (low, high); empty at `next_id` when nothing is left.
    """
    best = (next_id, next_id)
    for low, high in _gaps(first_id, next_id, bad):
        if high - low >= best[1] - best[0]:
            best = low, high
    return best


def _gaps(first_id: int, next_id: int, bad: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yields the runs of ids in [first_id, next_id) outside all of `bad`, ascending."""
    low = first_id
    for start, stop in [*sorted(pair for pair in bad if pair[0] < pair[1]), (next_id, next_id)]:
        if low < min(start, next_id):
            yield low, min(start, next_id)
        low = max(low, stop)


def _read_extent(store: Path, manifest: Manifest, layouts: list[ColumnLayout]) -> tuple[Extent, list[Fault]]:
    header_path = store / STATE_FOLDER / HEADER_FILE
    try:
        header = LiveHeader(header_path, writable=False)
    except FileNotFoundError:
        return stored_extent(manifest, None), [
            Fault(path=str(header_path), message=f"live header {header_path} is missing.")
        ]
    except (StoreCorruptError, OSError) as error:
        return stored_extent(manifest, None), [Fault(path=str(header_path), message=_one_line(error))]
    try:
        most = _most_held(store, layouts)
        try:
            extent = stored_extent(manifest, header)
        except StoreCorruptError as error:
            problem = _one_line(error)
        else:
            if extent.next_id <= most:
                return extent, []
            problem = f"live header {header_path} counts ids up to {extent.next_id}, far behind the last chunk file."
        # Whichever counts more is newer; on another boot the record is the lower one, and counts alone.
        known = [stored_extent(manifest, None)]
        if (durable := header.durable) is not None and 0 <= durable.floor <= durable.next_id <= most:
            known.append(durable)
        found = max(known, key=lambda extent: (extent.next_id, extent.floor)) if header.is_live else known[-1]
    finally:
        header.close()
    length = manifest.max_length
    floor = found.floor if length is None else max(found.floor, found.next_id - length)
    return dataclasses.replace(found, floor=floor), [Fault(path=str(header_path), message=problem)]


def _count_faults(store: Path, manifest: Manifest, extent: Extent) -> Iterator[Fault]:
    if manifest.next_id > extent.next_id:
        message = (
            f"{store / ZARR_JSON} counts steps up to id {manifest.next_id}, "
            f"but only those below {extent.next_id} are certain to be whole."
        )
        yield Fault(path=str(store / ZARR_JSON), message=message)


def _most_held(store: Path, layouts: list[ColumnLayout]) -> int:
    """The id up to which chunk files can reach, with one missing at the end of each column."""
    if any(layout.is_sealed for layout in layouts):
        return EVERY_ID  # what is sealed is looked at one by one
    return max(
        (max(_present_chunks(store, layout, range(2**62)), default=0) + 2) * layout.chunk_rows for layout in layouts
    )


def _lock_faults(store: Path) -> Iterator[Fault]:
    """What is in the place of the lock file and can't be locked; what is in the file never matters."""
    path = store / STATE_FOLDER / LOCK_FILE
    if os.path.lexists(path) and not path.is_file():
        yield Fault(path=str(path), message=f"lock {path} must be a file, but is something else.")


def _read_checksums(store: Path, extent: Extent) -> tuple[ChecksumTable, list[Fault]]:
    path = store / STATE_FOLDER / CHECKSUM_FILE
    try:
        table = ChecksumTable.load(path)
    except StoreCorruptError as error:
        return ChecksumTable(path), [Fault(path=str(path), message=_one_line(error))]
    if not table.entries and extent.floor < extent.next_id and _is_closed(store):
        message = f"{path} must hold the checksums of a store that was closed, but doesn't: rot would not be found."
        return table, [Fault(path=str(path), message=message)]
    return table, []


def _is_closed(store: Path) -> bool:
    """Whether the last writer closed the store; False where the header can't tell."""
    with (
        contextlib.suppress(StoreCorruptError, OSError),
        contextlib.closing(LiveHeader(store / STATE_FOLDER / HEADER_FILE, writable=False)) as header,
    ):
        return 0 != header.words[SEAL_EPOCH] == header.words[EPOCH]
    return False


def _document_faults(store: Path, arrays: Mapping[str, Any], *, certain_id: int) -> Iterator[Fault]:
    expected = dict(arrays)
    parents = {parent.as_posix() for file_path in arrays for parent in Path(file_path).parents} - {"."}
    expected |= {parent: group_document() for parent in parents}
    found = {}
    for file_path in sorted(expected):
        path = store / file_path / ZARR_JSON
        try:
            found[file_path] = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            yield Fault(path=str(path), message=f"{path} must be zarr metadata, but can't be read: {_one_line(error)}")
    # A column's length is written before the manifest, so it may be ahead, but not of what there is.
    lengths = range(certain_id, _next_id_now(store) + 1)
    for file_path, document in found.items():
        path, wanted = store / file_path / ZARR_JSON, json.loads(json.dumps(expected[file_path]))
        is_right_length = "shape" not in wanted or _length(document) in lengths
        if not is_right_length or _without_length(_bare(document)) != _without_length(_bare(wanted)):
            yield Fault(
                path=str(path), message=f"{path} must describe {file_path!r} as the manifest does, but doesn't."
            )


def _next_id_now(store: Path) -> int:
    """No commit has counted ids from this one on; very large where the header can't tell."""
    with (
        contextlib.suppress(StoreCorruptError, OSError),
        contextlib.closing(LiveHeader(store / STATE_FOLDER / HEADER_FILE, writable=False)) as header,
    ):
        if header.is_live and not header.is_broken():
            return header.live.next_id
    return EVERY_ID - 1


def _root_faults(store: Path, metadata: ZarrMetadata, manifest: Manifest) -> Iterator[Fault]:
    """What is wrong with the group's own metadata. A program that rewrote it may have left the list of arrays out."""
    path = store / ZARR_JSON
    found = json.loads(path.read_bytes())
    with contextlib.suppress(StoreFormatError, LookupError, TypeError):
        now = Manifest.from_json(found["attributes"]["diskbuf"], path=path)
        if now.created == manifest.created and now.next_id >= manifest.next_id:
            manifest = now  # a writer has committed since
    length = _listed_length(found) if manifest.is_sealed else None
    expected = json.loads(json.dumps(metadata.root_document(manifest, length=length)))
    if found.get("consolidated_metadata") is None:
        found["consolidated_metadata"] = expected["consolidated_metadata"]
    if _bare(found) != _bare(expected):
        yield Fault(path=str(path), message=f"{path} must list the arrays as the manifest does, but doesn't.")


def _listed_length(document: Any) -> int | None:
    """The length of the first array that a group's metadata lists, None when it lists none."""
    with contextlib.suppress(TypeError, LookupError):
        for member in document["consolidated_metadata"]["metadata"].values():
            if member["node_type"] == "array":
                return _length(member)
    return None


def _bare(document: Any) -> Any:
    """Zarr metadata without what is others': attributes, and the empty lists that zarr-python gives inner groups."""
    if not isinstance(document, dict):
        return document
    bare = {key: value for key, value in document.items() if key != "attributes"}
    listed = bare.get("consolidated_metadata")
    if isinstance(listed, dict) and isinstance(listed.get("metadata"), dict):
        members = {name: _bare(member) for name, member in listed["metadata"].items()}
        bare["consolidated_metadata"] = listed | {"metadata": members}
        if not members:
            del bare["consolidated_metadata"]
    return bare


def _length(document: Any) -> int:
    """The length in an array's metadata, -1 where there is none."""
    with contextlib.suppress(TypeError, LookupError):
        length = document["shape"][0]
        return length if type(length) is int else -1
    return -1


def _without_length(document: Any) -> Any:
    if isinstance(document, dict) and isinstance(document.get("shape"), list):
        return document | {"shape": document["shape"][1:]}
    return document


def _present_chunks(store: Path, layout: ColumnLayout, expected: range) -> list[int]:
    """The chunks among those expected that there is something at the place of, ascending."""
    try:
        names = [entry.name for entry in (store / layout.file_path).iterdir()]
    except OSError:
        return []
    return sorted(chunk for name in names if (chunk := layout.chunk_of_name(name)) is not None and chunk in expected)


def _missing_faults(
    store: Path, layout: ColumnLayout, expected: range, present: list[int], next_id: int
) -> Iterator[Fault]:
    """One fault for each run of missing chunks: there may be billions when a header is wrong."""
    for before, after in itertools.pairwise([expected.start - 1, *present, expected.stop]):
        if after - before > 1:
            first, last = (_chunk_path(store, layout, chunk) for chunk in (before + 1, after - 1))
            what = (
                f"chunk file {first} of leaf {layout.path!r} is"
                if first == last
                else f"chunk files {first} to {last} of leaf {layout.path!r} are"
            )
            yield Fault(
                path=str(first),
                message=f"{what} missing.",
                first_id=(before + 1) * layout.chunk_rows,
                next_id=min(after * layout.chunk_rows, next_id),
            )


def _chunk_faults(
    store: Path, layout: ColumnLayout, chunk: int, next_id: int, *, table: ChecksumTable, takes_parts: bool
) -> Iterator[Fault]:
    path = _chunk_path(store, layout, chunk)
    problem, whole = _look_at(path, layout)
    expected = table.entries.get((layout.file_path, chunk))
    if problem is None and expected is not None and expected.first_id + expected.rows <= next_id:
        try:
            problem, whole = rot_in(path, layout, chunk, expected), 0
        except OSError as error:
            problem, whole = f"can't be read: {error.strerror}", 0
    if problem is not None:
        low = chunk * layout.chunk_rows + (whole if takes_parts else 0)
        high = min((chunk + 1) * layout.chunk_rows, next_id)
        message = f"chunk file {path} of leaf {layout.path!r} {problem}."
        if low < high:
            yield Fault(path=str(path), message=message, first_id=low, next_id=high)
        else:
            yield Fault(path=str(path), message=message)


def _look_at(path: Path, layout: ColumnLayout) -> tuple[str | None, int]:
    """What is wrong with a chunk file, None for nothing, and how many of its rows are whole."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return "is missing", 0
    except OSError as error:
        return f"can't be read: {error.strerror}", 0
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        return "is not a file", 0
    if status.st_size == layout.chunk_bytes:
        return None, layout.chunk_rows
    rows = status.st_size // layout.row_bytes if layout.row_bytes else layout.chunk_rows
    return f"must hold {layout.chunk_bytes} bytes, has {status.st_size}", min(rows, layout.chunk_rows)


def _mend(store: Path, found: _Findings, *, is_dry_run: bool) -> Iterator[str]:
    """Yields what is done, and does it unless `is_dry_run`; the manifest goes last."""
    first_id, next_id = found.whole
    quarantine = _Quarantine(store, is_dry_run=is_dry_run)
    if found.manifest.is_sealed:
        yield from _mend_sealed(store, found, quarantine)
    for layout in () if found.manifest.is_sealed else found.layouts:
        yield from _mend_chunks(store, layout, found, quarantine)
    for path in found.remade:
        # The only file that tells what the store is stays where it is until it is replaced.
        is_needed = path == store / ZARR_JSON and not found.is_manifest_lost
        yield from quarantine.copy(path) if is_needed else quarantine.take(path)
    yield f"write metadata for ids {first_id} to {next_id}"
    if not is_dry_run:
        _write_state(store, found)


def _mend_chunks(store: Path, layout: ColumnLayout, found: _Findings, quarantine: "_Quarantine") -> Iterator[str]:
    first_id, next_id = found.whole
    kept = layout.chunks(first_id, next_id)
    for chunk in _present_chunks(store, layout, layout.chunks(found.first_id, found.next_id)):
        path = _chunk_path(store, layout, chunk)
        problem, _ = _look_at(path, layout)  # a chunk that has rotten is not kept
        if chunk not in kept:
            yield from quarantine.take(path)
        elif problem is not None:
            yield from quarantine.copy(path)
            yield f"make {path} {layout.chunk_bytes} bytes long"
            if not quarantine.is_dry_run:
                os.truncate(path, layout.chunk_bytes)
                files.sync_file(path)


def _write_state(store: Path, found: _Findings) -> None:
    first_id, next_id = found.whole
    manifest = found.manifest
    is_shorter = found.whole != (found.first_id, found.next_id)
    extent = Extent(
        generation=found.extent.generation + is_shorter,
        floor=max(first_id, min(found.extent.floor, next_id)),
        next_id=next_id,
    )
    path = store / STATE_FOLDER / CHECKSUM_FILE
    table = ChecksumTable.load(path)
    there = SealedFiles(store, _format_of(manifest, found.layouts))
    table.keep(there.folders, first_id, next_id)
    if path in found.remade and manifest.is_sealed:
        _take_object_checksums(there, table, found.whole)
    elif path in found.remade:  # what the chunks hold now is the best that is known
        for layout in found.layouts:
            for chunk in layout.chunks(first_id, next_id):
                rows = min(layout.chunk_rows, next_id - chunk * layout.chunk_rows)
                checksum = checksum_of(_chunk_path(store, layout, chunk), layout, chunk, rows=rows)
                table.set(layout.file_path, chunk, checksum)
    table.save(sync=True)
    metadata = ZarrMetadata(store, documents_of(manifest, found.layouts))
    metadata.create(sync=True)
    header_path = store / STATE_FOLDER / HEADER_FILE
    if not header_path.exists():
        LiveHeader.create(header_path, extent, sync=True)
    header = LiveHeader(header_path, writable=True)
    try:
        header.write_durable(extent, sync=True)
        header.begin(extent)
        header.seal()
    finally:
        header.close()
    metadata.commit(
        dataclasses.replace(
            manifest,
            generation=extent.generation,
            first_id=extent.floor,
            next_id=next_id,
            oldest_id=first_id if manifest.keep_history else 0,
            runs=tuple(run for run in manifest.runs if run < next_id) or (0,),
        ),
        sync=True,
    )


def _take_object_checksums(there: SealedFiles, table: ChecksumTable, ids: tuple[int, int]) -> None:
    """Takes the checksums of objects as they are now, the best that is known."""
    import google_crc32c

    for group in there.groups:
        rows = there.rows_of(group)
        for chunk in sorted(there.object_chunks(group) & set(chunks_of(*ids, rows))):
            data = there.object_path(group, chunk).read_bytes()
            crc = google_crc32c.value(data)
            first_id = chunk * rows
            counted = min(rows, ids[1] - first_id)
            checksum = Checksum(first_id=first_id, rows=counted, bytes=len(data), crc32c=crc)
            table.set(there.folder_of(group), chunk, checksum)


class _Quarantine:
    """Where files go that are taken out of a store."""

    def __init__(self, store: Path, *, is_dry_run: bool) -> None:
        self.store = store
        self.is_dry_run = is_dry_run

    def take(self, path: Path) -> Iterator[str]:
        """Moves a file, or whatever is in its place, out of the store."""
        if os.path.lexists(path):
            yield f"move {path} to {quarantine_path(self.store, path)}"
            if not self.is_dry_run:
                move_to_quarantine(self.store, path)
                files.sync_folder(path.parent)

    def copy(self, path: Path) -> Iterator[str]:
        """Keeps a copy of a file that is going to be changed."""
        target = quarantine_path(self.store, path)
        yield f"copy {path} to {target}"
        if not self.is_dry_run:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            files.sync_file(target)
            files.sync_folder(target.parent)


def documents_of(manifest: Manifest, layouts: list[ColumnLayout]) -> dict[str, Any]:
    """The zarr documents of a store's arrays."""
    return _format_of(manifest, layouts).documents()


def _format_of(manifest: Manifest, layouts: list[ColumnLayout]) -> ChunkFormat:
    return manifest.chunk_format(layouts)


def _sealed_chunks(store: Path, manifest: Manifest, layouts: list[ColumnLayout], ids: tuple[int, int]) -> int:
    """How many files a store that seals its chunks has for ids, raw ones and objects."""
    there = SealedFiles(store, _format_of(manifest, layouts))
    found = 0
    for group in there.groups:
        expected = set(chunks_of(*ids, there.rows_of(group)))
        found += len(there.object_chunks(group) & expected)
        found += sum(len(there.raw_chunks(layout) & expected) for layout in there.layouts_of(group))
    return found


def _sealed_faults(
    store: Path, manifest: Manifest, layouts: list[ColumnLayout], ids: tuple[int, int], *, table: ChecksumTable
) -> Iterator[Fault]:
    """What is wrong with the chunks of a store that seals them: each must be raw, or an object."""
    there = SealedFiles(store, _format_of(manifest, layouts))
    for group in there.groups:
        rows = there.rows_of(group)
        raw = [there.raw_chunks(layout) for layout in there.layouts_of(group)]
        objects = there.object_chunks(group)
        for chunk in chunks_of(*ids, rows):
            low, high = chunk * rows, min((chunk + 1) * rows, ids[1])
            is_raw = all(chunk in chunks for chunks in raw)
            for layout, chunks in zip(there.layouts_of(group), raw, strict=True):
                path = there.raw_path(layout, chunk)
                problem = _look_at(path, layout)[0] if chunk in chunks else None
                was_sealed = not path.exists() and there.object_path(group, chunk).exists()  # since it was listed
                if problem is not None and not was_sealed:
                    message = f"chunk file {path} of leaf {layout.path!r} {problem}."
                    yield Fault(path=str(path), message=message, first_id=low, next_id=high)
            path = there.object_path(group, chunk)
            if chunk in objects:
                problem = _look_at_object(path, table.entries.get((there.folder_of(group), chunk)))
                if problem is not None:
                    # A raw file beside it has the rows all the same.
                    first_id, next_id = (None, None) if is_raw else (low, high)
                    message = f"chunk file {path} {problem}."
                    yield Fault(path=str(path), message=message, first_id=first_id, next_id=next_id)
            elif not is_raw and (manifest.published_to is None or (chunk + 1) * rows > ids[1]):
                yield Fault(path=str(path), message=f"chunk file {path} is missing.", first_id=low, next_id=high)


def _look_at_object(path: Path, expected: Checksum | None) -> str | None:
    """What is wrong with the file of a sealed chunk, None for nothing."""
    import google_crc32c

    try:
        data = path.read_bytes()
    except OSError as error:
        return f"can't be read: {error.strerror}"
    if not data:
        return "must hold a chunk, but is empty"
    if expected is None:
        return None
    if len(data) != expected.bytes:
        return f"must hold {expected.bytes} bytes, has {len(data)}"
    found = google_crc32c.value(data)
    return None if found == expected.crc32c else f"must have checksum {expected.crc32c:08x}, has {found:08x}"


def _mend_sealed(store: Path, found: _Findings, quarantine: "_Quarantine") -> Iterator[str]:
    """Takes out what isn't kept, and objects that are damaged beside raw files that aren't."""
    there = SealedFiles(store, _format_of(found.manifest, found.layouts))
    damaged = {fault.path for fault in found.faults}
    for group in there.groups:
        kept = chunks_of(*found.whole, there.rows_of(group))
        for chunk in sorted(there.object_chunks(group)):
            path = there.object_path(group, chunk)
            if chunk not in kept or str(path) in damaged:
                yield from quarantine.take(path)
        for layout in there.layouts_of(group):
            for chunk in sorted(there.raw_chunks(layout) - set(kept)):
                yield from quarantine.take(there.raw_path(layout, chunk))


def _chunk_path(store: Path, layout: ColumnLayout, chunk: int) -> Path:
    return store / layout.file_path / layout.file_name(chunk)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
