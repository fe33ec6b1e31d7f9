"""A training's folder: one process at a time, with settings that must be the same when it is gone on with."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diskbuf.errors import OptionError, StoreLockedError, StoreLockUnsupportedError
from diskbuf.store import files
from diskbuf.store.lock import WriterLock

_LOCK = ".training.lock"


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Holds a training's folder against other processes, and makes it; where files can't be locked it does nothing.

    Raises:
        StoreLockedError: If another training, in this process or elsewhere, has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = None
    try:
        lock = WriterLock(folder / _LOCK, store=str(folder))
    except StoreLockedError as error:
        raise StoreLockedError(
            f"{folder} must be one training's at a time, got process {error.pid} on host {error.host} training there. "
            "Wait for it, or use another root_dir.",
            path=str(folder),
            pid=error.pid,
            host=error.host,
        ) from error
    except StoreLockUnsupportedError:
        pass
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


def keep(path: Path, settings: dict[str, Any]) -> None:
    """Writes the settings down, or compares them with those that are there.

    Args:
        path: Of a JSON file in the training's folder.
        settings: JSON values by name; more may be in the file.

    Raises:
        OptionError: If one of them is another than in the file, or the file is none of this kind.
    """
    try:
        known = json.loads(path.read_text())
        known.items()
    except FileNotFoundError:
        files.replace_file(path, json.dumps(settings, indent=2).encode(), sync=True)
        return
    except (ValueError, AttributeError) as error:
        raise OptionError(f"{path} must hold the settings of a training as JSON, but doesn't. Remove it.") from error
    for name, value in json.loads(json.dumps(settings)).items():
        if known.get(name) != value:
            raise OptionError(
                f"{name} must be {known.get(name)!r} to go on with the training in {path.parent}, got {value!r}. "
                "Use that, or another root_dir."
            )
