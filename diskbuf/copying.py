"""Copying stores: any store, wherever it is, to another place, and into another layout or codec on the way."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from diskbuf.options import Layout, ReadOptions
from diskbuf.replay_buffers.opening import place_of
from diskbuf.transfer import (
    KEEP,
    Asked,
    Progress,
    check_apart,
    checked_read_options,
    new_place,
    snapshot_of,
    transfer,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyReport:
    """What `copy` did.

    Attributes:
        source: The store.
        destination: Where the copy is.
        first_id: First id of the copy's window; behind the source's where rows were evicted meanwhile.
        next_id: End of the window, exclusive.
        objects: Objects of chunks in the copy.
        bytes_read: Bytes of rows or objects that were read of the source.
        bytes_written: Bytes of objects that were written.
        seconds: How long it took.
        skipped: Objects among them that an earlier call had already written.
    """

    source: str
    destination: str
    first_id: int
    next_id: int
    objects: int
    bytes_read: int
    bytes_written: int
    seconds: float
    skipped: int


def copy(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    codec: Any = KEEP,
    layout: Layout | Literal["keep"] = KEEP,
    level: int | None = None,
    chunk_bytes: int | None = None,
    inner_rows: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    destination_storage_options: Mapping[str, Any] | None = None,
    read_options: ReadOptions | None = None,
    verify: bool = True,
    progress: bool | Progress = False,
) -> CopyReport:
    """Copies a store to another place, in its own layout or another one.

    Ids, lanes, runs, history, metadata and everything else that a store is stay as they are, so ids mean the same in
    the copy; only how chunks are stored changes, when asked for. A copy on this machine is a store like any other:
    `diskbuf.open(destination, mode="r+")` goes on in it. Where layout, codec and chunk lengths stay, objects are copied
    byte for byte.

        diskbuf.copy("runs/a.zarr", "s3://bucket/a.zarr", codec="zstd", progress=True)

    The source may be written meanwhile: what is copied is the window of the beginning. Steps that the writer evicts
    before they were read are left out; the copy's window then begins behind them. A copy that was interrupted, by a
    kill or a full disk, doesn't open as a store; the same call goes on with it, and what is there and whole isn't
    written again. It then takes the source as it is now.

    Memory: what is on its way (about 100 MB) and at most two chunks a leaf, however large the store is.

    Args:
        source: The store's folder, or a URL.
        destination: A path or URL where there is nothing yet, or the same copy, interrupted.
        codec: As in `StoreOptions`, None for no compression; "keep" for the source's.
        layout: "zarr" or "arrow"; "keep" for the source's. Where it changes, a source that is compressed needs a
            `codec`.
        level: How hard the codec tries; only with a codec that is named.
        chunk_bytes: Largest size of a chunk; None keeps the source's chunks where the layout stays, else 16 MiB.
        inner_rows: As in `StoreOptions`; only with a codec that is named.
        storage_options: What fsspec's file system of the source's protocol takes.
        destination_storage_options: The same for the destination.
        read_options: How requests are made (`concurrency`, `retries`). No cache is used.
        verify: Whether each object that was written is read back, and compared, before the copy becomes a store. On
            this machine that reads the page cache, a small part of the time; of a remote place everything is fetched
            again. The source is checked against its checksums in any case.
        progress: Whether a bar is shown on a terminal; or what is called with (bytes done, bytes in all) of raw rows.

    Returns:
        What was done.

    Raises:
        OptionError: When an argument is outside its rule, or one of the two places lies in the other.
        StoreNotFoundError: When there is no store at the source.
        StoreExistsError: When something else is at the destination.
        StoreLockedError: When another copy to the same path goes on.
        StoreCorruptError: When an object of the source isn't what was written, or one of the destination's isn't what
            was sent there; it is named, and the destination doesn't open.
        StoreFormatError: When this version can't read the source.
        WindowError: When the writer evicted every step before it was read.
        ReadOnlyError: When the destination is a web server.
        StoreAccessError: When a remote place refuses the credentials.
        StoreUnreachableError: When requests failed, and failed again.
        MissingExtraError: When the package for a URL's protocol isn't installed.
        OSError: When the destination can't be written or is full; what is there stays for the next call.
    """
    asked = Asked(codec=codec, layout=layout, level=level, chunk_bytes=chunk_bytes, inner_rows=inner_rows)
    from_place, to_place = place_of(source), new_place(destination)
    check_apart(from_place, to_place)
    options = checked_read_options(read_options)
    with contextlib.closing(snapshot_of(from_place, storage_options, options)) as snapshot:
        done = transfer(
            snapshot,
            to_place,
            asked,
            source=str(from_place),
            is_here=isinstance(from_place, Path),
            storage_options=destination_storage_options,
            read_options=options,
            verify=verify,
            progress=progress,
        )
    return CopyReport(
        source=str(from_place),
        destination=str(to_place),
        first_id=done.first_id,
        next_id=done.next_id,
        objects=done.objects,
        bytes_read=snapshot.bytes_read,
        bytes_written=done.bytes_written,
        seconds=done.seconds,
        skipped=done.skipped,
    )
