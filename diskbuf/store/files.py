"""File system calls that the store's durability rests on, one place for each: sync, replace, remove."""

import contextlib
import itertools
import os
from pathlib import Path

from diskbuf.errors import StoreCorruptError

_PIECE_BYTES = 2**20


def sync_file(path: Path) -> None:
    """Writes a file's data to the disk, whoever dirtied it. A file that is gone has nothing to sync."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def sync_descriptor(descriptor: int) -> None:
    """Writes an open file's data, and the size and extents needed to read it back, to the disk."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(descriptor)
    else:
        os.fsync(descriptor)


def write_at(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data`; a full disk or a signal can cut one call short."""
    data = memoryview(data)
    while data:
        written = os.pwrite(descriptor, data, offset)
        data = data[written:]
        offset += written


def read_at(descriptor: int, size: int, offset: int, *, path: Path) -> bytes:
    """Reads exactly `size` bytes of a file.

    Raises:
        StoreCorruptError: When the file ends before them.
    """
    parts, done = [], 0
    while done < size:  # a signal can cut one call short
        part = os.pread(descriptor, size - done, offset + done)
        if not part:
            raise StoreCorruptError(
                f"{path} must hold {offset + size} bytes, but ends after {offset + done}. Restore that file.",
                path=str(path),
            )
        parts.append(part)
        done += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def has_data(path: Path) -> bool:
    """Whether a file holds anything but zeros; what isn't a file counts as data."""
    if not path.is_file():
        return True
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            if piece.count(0) < len(piece):
                return True
    return False


def make_folders(path: Path, *, sync: bool) -> None:
    """Makes a folder and those around it that are missing.

    Args:
        path: The folder.
        sync: Whether their names are on the disk when this returns.
    """
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for made in missing if sync else ():
        sync_folder(made.parent)


def sync_folder(path: Path) -> None:
    """Writes a folder's entries (creations, renames, removals) to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes | memoryview, *, sync: bool) -> None:
    """Replaces a small file as a whole: after a crash at any moment it is the old one or the new one.

    Args:
        path: The file; its folder must exist.
        data: Its new content.
        sync: Whether it is on the disk, name and all, when this returns.

    Raises:
        OSError: When it can't be written; the old file stands.
    """
    temporary = temporary_of(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if sync:
        sync_folder(path.parent)


def temporary_of(path: Path) -> Path:
    """Where `replace_file` prepares a file; a leftover of a killed process may be removed."""
    return path.with_name(f".{path.name}.tmp")


def is_temporary(name: str) -> bool:
    """Whether a file name is one that `temporary_of` gives."""
    return name.startswith(".") and name.endswith(".tmp")


def boot_id() -> bytes:
    """16 bytes that change whenever the machine starts, zeros where the system doesn't tell."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)
