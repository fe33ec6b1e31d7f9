"""What is done to a store where it is: letting old steps go, freeing space, bringing it up to date, deleting it."""

import contextlib
import dataclasses
import errno
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diskbuf.errors import OptionError, StoreExistsError, WindowError
from diskbuf.inspection import StoreFile, disk_bytes_of, inspect, store_files
from diskbuf.options import StoreOptions
from diskbuf.replay_buffers.opening import item_format_of, leaves_of, local_path, objects_at, open_existing, place_of
from diskbuf.statistics import STATISTICS_FILE
from diskbuf.store import files
from diskbuf.store.checksums import CHECKSUM_FILE
from diskbuf.store.journal import JOURNAL_FILE
from diskbuf.store.layout import COPYING_FILE, HEADER_FILE, LOCK_FILE, STATE_FOLDER
from diskbuf.store.lock import WriterLock
from diskbuf.store.manifest import COPY_FILE, FORMAT, ZARR_JSON, Manifest, read_manifest
from diskbuf.store.quarantine import QUARANTINE_FOLDER, quarantine_of
from diskbuf.store.reading import column_layouts
from diskbuf.store.remote import read_remote_manifest
from diskbuf.store.writing import Trim, lock_store

_QUARANTINE = f"{STATE_FOLDER}/{QUARANTINE_FOLDER}/"
_STATE_FILES = (
    *(HEADER_FILE, LOCK_FILE, JOURNAL_FILE, COPYING_FILE),
    *(CHECKSUM_FILE, COPY_FILE, STATISTICS_FILE),
)
_HALF_MADE = re.compile(r"\.(?P<name>.+?)(\.\d+-\d+)?\.tmp")
_MOST_NAME_BYTES = 200  # of a name that something is put behind; file systems take 255


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrimReport:
    """What `trim` did, or would do.

    Attributes:
        path: The store.
        first_id: First id of the window afterwards.
        next_id: End of the window.
        removed: Steps of each lane that left the window.
        freed_bytes: Bytes that the disk got back; None in a dry run.
        is_dry_run: Whether nothing was done.
    """

    path: str
    first_id: int
    next_id: int
    removed: int
    freed_bytes: int | None
    is_dry_run: bool


def trim(
    path: str | os.PathLike[str],
    *,
    first_id: int | None = None,
    keep: int | None = None,
    drop_history: bool = False,
    dry_run: bool = False,
) -> TrimReport:
    """Lets the oldest steps of a store go, for good, and gives the space of whole chunks back.

    Ids stay what they are, and the limit of the window too. Where the store keeps history, steps that leave the window
    become history; `drop_history` removes that as well, and may be all that is asked for.

    Args:
        path: The store's folder; no process may have it open for writing.
        first_id: The window begins there afterwards.
        keep: The newest so many steps of each lane stay, at least 0; all where there are no more.
        drop_history: Whether everything that isn't in the window leaves the disk.
        dry_run: Only say what would be done.

    Returns:
        What was done.

    Raises:
        OptionError: When not one of `first_id`, `keep` and `drop_history` is given, or both of the first two; when keep
            is negative; when the store keeps no history to drop.
        WindowError: When `first_id` is not in the window, nor its end.
        StoreNotFoundError: When there is no store.
        StoreLockedError: When a process writes it.
        StoreCorruptError: When one of its files is missing, short or unreadable.
    """
    store = local_path(path)
    if (first_id is not None) + (keep is not None) > 1 or (first_id is None and keep is None and not drop_history):
        raise OptionError(
            f"one of first_id and keep must be given, or drop_history, got {first_id!r}, {keep!r} and {drop_history!r}."
        )
    facts = inspect(store, counts_episodes=False)
    if drop_history and not facts.keep_history:
        raise OptionError(f"drop_history must be left out of a store that keeps no history, and {store} doesn't.")
    low, high = facts.first_id, facts.next_id
    wanted = low if first_id is None else first_id
    if keep is not None:
        if keep < 0:
            raise OptionError(f"keep must be at least 0, got {keep!r}.")
        wanted = max(low, high - keep)
    if not low <= wanted <= high:
        raise WindowError(
            f"the window [{low}, {high}) must begin in itself or be empty afterwards, got {wanted}. Take an id from "
            "diskbuf info."
        )
    freed = None
    if not dry_run:
        before = _disk_bytes(store)
        _reopen(store, Trim(first_id=wanted, drops_history=drop_history))
        freed = before - _disk_bytes(store)
    return TrimReport(
        path=str(store), first_id=wanted, next_id=high, removed=wanted - low, freed_bytes=freed, is_dry_run=dry_run
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompactReport:
    """What `compact` did, or would do.

    Attributes:
        path: The store.
        files: Names of the files below it that went.
        freed_bytes: Bytes that they took.
        is_dry_run: Whether nothing was done.
    """

    path: str
    files: tuple[str, ...]
    freed_bytes: int
    is_dry_run: bool


def compact(path: str | os.PathLike[str], *, dry_run: bool = False) -> CompactReport:
    """Frees the space of files that hold no step of the store.

    These are chunks that have left the window and wait to be overwritten, what killed writers left half made, and the
    quarantine: what `diskbuf.repair` and openings after a power cut took out. No step changes.

    Args:
        path: The store's folder; no process may have it open for writing.
        dry_run: Only say what would be done.

    Returns:
        What was done.

    Raises:
        StoreNotFoundError: When there is no store.
        StoreLockedError: When a process writes it.
        StoreCorruptError: When one of its files is missing, short or unreadable.
    """
    store = local_path(path)
    idle = [file for file in store_files(store) if _is_idle(file.name, file.state)]
    if not dry_run:
        _reopen(store)
        there = {file.name for file in store_files(store)}
        shutil.rmtree(quarantine_of(store), ignore_errors=True)
        idle = [file for file in idle if file.name not in there or file.name.startswith(_QUARANTINE)]
    return CompactReport(
        path=str(store),
        files=tuple(file.name for file in idle),
        freed_bytes=sum(file.disk_bytes or 0 for file in idle),
        is_dry_run=dry_run,
    )


def _is_idle(name: str, state: str | None) -> bool:
    base = name.rpartition("/")[2]
    is_half_made = base.startswith(".") and base.endswith(".tmp")
    return state == "spare" or name.startswith(_QUARANTINE) or is_half_made


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpgradeReport:
    """What `upgrade` did.

    Attributes:
        path: The store.
        format: Its format, before and afterwards; the newest that this version writes is `newest_format`.
        newest_format: The newest format.
        package_version: The version that had written it.
        is_changed: Whether another version had written it, so that there was something to bring up to date.
    """

    path: str
    format: int
    newest_format: int
    package_version: str
    is_changed: bool


def upgrade(path: str | os.PathLike[str]) -> UpgradeReport:
    """Brings what an older version wrote beside the rows to what this one writes; rows and format stay.

    A store is written in the oldest format that can say what it is, so that older versions go on reading it. What
    comes with newer versions are the files that guard it: checksums, the copy of the manifest, the seal of the header.

    Args:
        path: The store's folder; no process may have it open for writing.

    Returns:
        What was done.

    Raises:
        StoreNotFoundError: When there is no store.
        StoreFormatError: When a newer version wrote it.
        StoreLockedError: When a process writes it.
        StoreCorruptError: When one of its files is missing, short or unreadable.
    """
    store = local_path(path)
    before = read_manifest(store)
    names = _names(store)
    _reopen(store)
    after = read_manifest(store)
    return UpgradeReport(
        path=str(store),
        format=after.format,
        newest_format=FORMAT,
        package_version=before.package_version,
        is_changed=before.package_version != after.package_version or names != _names(store),
    )


def _names(store: Path) -> set[str]:
    return {file.name for file in store_files(store)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeleteReport:
    """What `delete` did, or would do.

    Attributes:
        path: The store, or its URL.
        steps: Steps of each lane that were in its window.
        files: How many files or objects it had.
        bytes: Bytes that they took, as far as it can be told.
        is_dry_run: Whether nothing was done.
    """

    path: str
    steps: int
    files: int
    bytes: int
    is_dry_run: bool


def delete(
    path: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, dry_run: bool = False
) -> DeleteReport:
    """Deletes a store, and nothing else.

    Once this has begun there is no store at that place any more, also when it is interrupted: a folder is renamed
    first, to a hidden name beside it, and of a remote store the manifest goes first. The same call again then removes
    what is left of the folder.

    Args:
        path: The store's folder, which no process may have open for writing, or a URL.
        storage_options: What fsspec's file system of the URL's protocol takes.
        dry_run: Only say what would be done.

    Returns:
        What was done.

    Raises:
        OptionError: When the path is a link.
        StoreNotFoundError: When there is no store.
        StoreExistsError: When the folder, or one in it, holds files that are not the store's; names one.
        StoreLockedError: When a process writes it.
        StoreFormatError: When a newer version wrote it.
        StoreCorruptError: When its manifest can't be read: nothing then tells that it is a store.
        ReadOnlyError: When it is on a web server.
        OSError: When it can't be deleted.
    """
    place = place_of(path)
    if isinstance(place, str):
        return _delete_remote(place, storage_options, dry_run=dry_run)
    if place.is_symlink():
        raise OptionError(f"path must be the store itself, got {place}, a link to {place.resolve()}. Give that one.")
    if not os.path.lexists(place) and (left := _leftovers(place)):
        return _delete_leftovers(place, left, dry_run=dry_run)
    facts = inspect(place, counts_episodes=False)
    manifest = read_manifest(place)
    known = list(store_files(place))
    _refuse_strangers(place, manifest, known)
    report = DeleteReport(
        path=str(place),
        steps=facts.next_id - facts.first_id,
        files=len(known),
        bytes=sum(file.disk_bytes or 0 for file in known),
        is_dry_run=dry_run,
    )
    if not dry_run:
        going = place.with_name(f"{_going_name(place)}{secrets.token_hex(4)}")
        with contextlib.closing(_lock_there(place, manifest)):
            place.rename(going)
            files.sync_folder(place.parent)
        _remove(going)
    return report


def _lock_there(store: Path, manifest: Manifest) -> WriterLock:
    """Takes the lock of a store that is there and, once it is locked, still the one that was looked at.

    Raises:
        StoreNotFoundError: When it has gone meanwhile; nothing is made in its place.
        StoreExistsError: When another one has come there.
        StoreLockedError: When a process writes it.
    """
    try:
        lock = WriterLock(store / STATE_FOLDER / LOCK_FILE, store=str(store))
    except FileNotFoundError:
        read_manifest(store)
        lock = lock_store(store)  # the store is there, only its folder for the lock isn't
    try:
        if read_manifest(store).created != manifest.created:
            raise StoreExistsError(
                f"store {store} must stay what it was, but another one has come in its place. Look again.",
                path=str(store),
            )
    except BaseException:
        lock.close()
        raise
    return lock


def _going_name(store: Path) -> str:
    """How the names begin that a store goes by while it is being deleted."""
    return f".{os.fsdecode(os.fsencode(store.name)[:_MOST_NAME_BYTES])}.deleted-"


def _leftovers(store: Path) -> list[Path]:
    """What is left of a store whose deletion was interrupted."""
    begin = _going_name(store)
    try:
        names = sorted(entry.name for entry in store.parent.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [
        store.parent / name
        for name in names
        if name.startswith(begin) and re.fullmatch(r"[0-9a-f]{8}", name.removeprefix(begin))
    ]


def _delete_leftovers(store: Path, left: Sequence[Path], *, dry_run: bool) -> DeleteReport:
    report = DeleteReport(
        path=str(store),
        steps=0,
        files=sum(len(names) for folder in left for _, _, names in os.walk(folder)),
        bytes=sum(disk_bytes_of(folder) for folder in left),
        is_dry_run=dry_run,
    )
    for folder in () if dry_run else left:
        _remove(folder)
    return report


def _remove(folder: Path) -> None:
    """Removes a folder that another process may be removing too."""
    while os.path.lexists(folder):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)


def _refuse_strangers(store: Path, manifest: Manifest, known: Sequence[StoreFile]) -> None:
    """Refuses a folder in which somebody keeps other things too, at whatever depth."""
    own = {ZARR_JSON, *_metadata_names(manifest), *(f"{STATE_FOLDER}/{name}" for name in _STATE_FILES)}
    top = {name.split("/")[0] for name in own} | ({"data"} if manifest.layout == "arrow" else set())
    strangers = sorted({entry.name for entry in store.iterdir()} - top)
    layouts = column_layouts(leaves_of(item_format_of(manifest)), manifest, path=store)
    chunk_format = manifest.chunk_format(layouts)
    of_folder = {layout.raw_folder: layout for layout in layouts}

    def is_own(name: str) -> bool:
        folder, _, base = name.rpartition("/")
        raw = of_folder.get(folder)
        is_chunk = raw is not None and raw.chunk_of_name(base) is not None
        return name in own or is_chunk or chunk_format.chunk_of_name(name) is not None

    for file in known:
        folder, slash, base = file.name.rpartition("/")
        half = _HALF_MADE.fullmatch(base)
        names = [file.name, *([f"{folder}{slash}{half['name']}"] if half else [])]
        if file.state is None and not file.name.startswith(_QUARANTINE) and not any(map(is_own, names)):
            strangers.append(file.name)
    if strangers:
        raise StoreExistsError(
            f"a store that is deleted must hold nothing else, but {store / strangers[0]} is not of it. Move that away.",
            path=str(store / strangers[0]),
        )


def _delete_remote(url: str, storage_options: Mapping[str, Any] | None, *, dry_run: bool) -> DeleteReport:
    with contextlib.closing(objects_at(url, storage_options=storage_options, is_ours=True)) as objects:
        manifest = read_remote_manifest(objects)
        known = list(store_files(url, storage_options=storage_options))
        if not dry_run:
            objects.delete("zarr.json")
            for file in known:
                objects.delete(file.name)
            for name in _metadata_names(manifest):
                objects.delete(name)
    return DeleteReport(
        path=url,
        steps=manifest.next_id - manifest.first_id,
        files=len(known) + 1,
        bytes=sum(file.disk_bytes or 0 for file in known),
        is_dry_run=dry_run,
    )


def _metadata_names(manifest: Manifest) -> set[str]:
    folders = {name.rsplit("/", depth)[0] for name in manifest.chunk_rows for depth in range(name.count("/") + 1)}
    return {f"{folder}/zarr.json" for folder in folders} | {
        f"{STATE_FOLDER}/checksums.arrow",
        f"{STATE_FOLDER}/manifest.json",
    }


def _reopen(store: Path, trim: Trim | None = None) -> None:
    """Opens a store for writing and closes it again, which leaves it as a writer of this version would."""
    kind = read_manifest(store).kind
    try:
        writable, _ = open_existing(
            store, kind=kind, is_writable=True, reads_history=False, options=StoreOptions(), trim=trim
        )
        writable.close()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            f"{store} must have room for the small files that say what is in it, but: {error.strerror}. Make a little "
            "room, and do it again",
        ) from error


def _disk_bytes(store: Path) -> int:
    return sum(file.disk_bytes or 0 for file in store_files(store))
