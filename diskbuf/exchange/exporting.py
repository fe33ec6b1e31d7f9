"""Exporting a store, or some of it, to a file of another format."""

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diskbuf.errors import OptionError
from diskbuf.exchange.contract import Format, Progress
from diskbuf.exchange.formats import format_of
from diskbuf.exchange.store_rows import Selection, StoreRows
from diskbuf.exchange.targets import bytes_at, target_of
from diskbuf.tree import Structure

if TYPE_CHECKING:
    from diskbuf.replay_buffers.uniform import UniformReplayBuffer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What `export_store` did.

    Attributes:
        source: The store.
        destination: Where the file or folder is.
        format: Its format, by name.
        rows: Rows in it, (id, lane) pairs.
        first_id: Id of the first; that of the selection where there is none.
        next_id: End of the ids that were meant, exclusive.
        lanes: The lanes in it.
        columns: The leaves in it.
        evicted: Ids that were meant, but that a writer evicted before they were read.
        bytes_written: Its size, None where that isn't known.
        seconds: How long it took.
        notes: What of the store isn't in the file, or an import won't restore, a sentence each without a full stop.
    """

    source: str
    destination: str
    format: str
    rows: int
    first_id: int
    next_id: int
    lanes: tuple[int, ...]
    columns: tuple[str, ...]
    evicted: int
    bytes_written: int | None
    seconds: float
    notes: tuple[str, ...] = ()


def export_store(
    buffer: "UniformReplayBuffer",
    destination: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002 - zarr's and pandas' name for it
    columns: Sequence[str] | None = None,
    first_id: int | None = None,
    next_id: int | None = None,
    lanes: Sequence[int] | None = None,
    episodes: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
    force: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Writes what is in a buffer's window, or some of it, to a file of another format.

    Tables have a row for each id and lane, by id and then lane, with columns `id` and `lane` and one for each leaf,
    named by its path. Formats that can carry it also say what the store was, and `import_store` makes the same store of
    the file: spec, lanes, ids, runs, metadata.

    It is written under another name and then renamed, so that it is whole or not there. Memory is bounded, whatever
    the size. The store may be written meanwhile: what is meant is the window of the call, and steps that the writer
    evicts before they were read are left out and counted.

        >>> import tempfile
        >>> import numpy as np
        >>> import pyarrow.parquet
        >>> from diskbuf import ArraySpec, UniformReplayBuffer
        >>> with UniformReplayBuffer({"speed": ArraySpec([], "float32")}) as buffer:
        ...     buffer.extend({"speed": np.array([[0.5, 1.5]], "float32")})
        ...     with tempfile.TemporaryDirectory() as folder:
        ...         report = export_store(buffer, f"{folder}/speeds.parquet")
        ...         table = pyarrow.parquet.read_table(f"{folder}/speeds.parquet")
        >>> report.rows, table.to_pylist()
        (2, [{'id': 0, 'lane': 0, 'speed': 0.5}, {'id': 1, 'lane': 0, 'speed': 1.5}])

    Args:
        buffer: A buffer, open for reading or writing; opened with `history` for all that is on the disk.
        destination: A path, or a URL of fsspec where the format takes one.
        format: One of `formats.format_names(is_written=True)`; None goes by the ending.
        columns: Paths of leaves; None for all.
        first_id: First id; None for the start of the window.
        next_id: End, exclusive; None for the end of the window.
        lanes: Numbers of lanes, ascending; None for all.
        episodes: Numbers of rows in the table of `diskbuf.episodes`: only the rows of these episodes.
        options: Fields of the format, such as `compression` of Parquet.
        force: Whether a file that is there is replaced.
        storage_options: For fsspec.
        progress: Called with steps done and steps in all.

    Returns:
        What was done.

    Raises:
        OptionError: When an argument is outside its rule, or the format can't hold a leaf.
        WindowError: When a lane isn't in the store.
        SpecError: When episodes are asked for and nothing in the spec says where they end.
        StoreExistsError: When something is at the destination.
        StoreCorruptError: When a chunk file is missing, short or has rotten.
        MissingExtraError: When the format's package isn't installed.
        OSError: When it can't be written; nothing is left at the destination.
    """
    started = time.monotonic()
    kind = format_of(destination, format, options=options, is_written=True)
    selection = Selection(columns=columns, first_id=first_id, next_id=next_id, lanes=lanes, episodes=episodes)
    rows = StoreRows(buffer, selection, progress=progress)
    if not isinstance(force, bool):
        raise OptionError(f"force must be True or False, got {force!r}.")
    with target_of(destination, kind, force=force, storage_options=storage_options) as target:
        kind.export(rows, target)
    return ExportReport(
        source=str(buffer.path),
        destination=os.fspath(destination),
        format=kind.name,
        rows=rows.written,
        first_id=rows.first_id if rows.seen_first_id is None else rows.seen_first_id,
        next_id=rows.next_id,
        lanes=tuple(rows.lanes.tolist()),
        columns=tuple(rows.columns),
        evicted=rows.evicted,
        bytes_written=bytes_at(destination, storage_options=storage_options),
        seconds=time.monotonic() - started,
        notes=(*rows.notes, *_losses(rows, kind)),
    )


def _losses(rows: StoreRows, kind: Format) -> list[str]:
    """What the format, or the choice of rows, leaves out."""
    found = []
    left_out = [path for path in Structure(rows.carried.spec).paths if path not in rows.columns]
    if kind.carries:
        if left_out:
            names = ", ".join(map(repr, left_out[:8])) + ", …" * (len(left_out) > 8)
            found.append(
                f"{names} {'is' if len(left_out) == 1 else 'are'} not in it, so an import must map its columns"
            )
        if not rows.is_grid and len(rows.lanes) > 1:
            found.append(
                f"the chosen episodes are of a store of {len(rows.lanes)} lanes, so an import can't restore it, and "
                "must map its columns; one lane at a time it can"
            )
        return found
    if kind.is_folder and len(rows.lanes) > 1:
        found.append(f"{len(rows.lanes)} lanes became one, episode by episode")
    if not kind.is_folder:
        found.append("it doesn't say what the leaves were, so an import must be given the store's spec")
    if rows.carried.metadata is not None:
        found.append("the store's metadata was left out")
    return found
