"""Where files go that are taken out of a store rather than thrown away; nothing in it is ever read again."""

import itertools
import os
from pathlib import Path

from diskbuf.store.layout import STATE_FOLDER

QUARANTINE_FOLDER = "quarantine"


def quarantine_of(store: Path) -> Path:
    """The folder of what was taken out of a store."""
    return store / STATE_FOLDER / QUARANTINE_FOLDER


def quarantine_path(store: Path, path: Path) -> Path:
    """Returns where a file of a store goes: the same place below the quarantine, numbered when that is taken."""
    target = quarantine_of(store) / path.relative_to(store)
    names = (target.with_name(f"{target.name}.{number}") for number in itertools.count(1))
    return target if not os.path.lexists(target) else next(name for name in names if not os.path.lexists(name))


def quarantined_bytes(store: Path) -> int:
    """Bytes on the disk of everything in a store's quarantine."""
    return sum(
        512 * os.lstat(f"{folder}/{name}").st_blocks
        for folder, _, names in os.walk(quarantine_of(store))
        for name in names
    )


def move_to_quarantine(store: Path, path: Path) -> Path:
    """Moves a file, or whatever is in its place, out of a store; returns where it went.

    The caller syncs the folders.

    Raises:
        OSError: When it can't be moved.
    """
    target = quarantine_path(store, path)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.rename(path, target)
    return target
