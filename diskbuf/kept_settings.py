"""A training's folder: one process at a time, with settings that must be the same when it is gone on with."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diskbuf import specs
from diskbuf.errors import OptionError, StoreLockedError, StoreLockUnsupportedError
from diskbuf.store import files
from diskbuf.store.lock import WriterLock

if TYPE_CHECKING:
    from diskbuf.replay_buffers.uniform import UniformReplayBuffer

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


def check_origin(path: Path, buffer: "UniformReplayBuffer") -> None:
    """Compares the rows of a buffer with those that a training began with, by what `origin` noted of them.

    Args:
        path: Of the JSON file that the note is in; one that isn't there, or has none, says nothing.
        buffer: The rows to go on with.

    Raises:
        OptionError: If they are of another spec, or of another store, wherever that is now.
    """
    try:
        known = json.loads(path.read_text())
        spec, store = known.get("spec"), known.get("store")
    except (OSError, ValueError, AttributeError):
        return  # `keep` says it
    found = origin(buffer)
    if spec is not None and (unlike := specs.differences(specs.from_json(spec), buffer.data_spec)):
        raise OptionError(
            f"the store must have the spec that the training in {path.parent} began with, got {buffer.path}, which "
            f"hasn't: {'; '.join(unlike)}. Use another root_dir."
        )
    if store is not None and store["created"] != found["store"]["created"]:
        raise OptionError(
            f"the store must be the one that the training in {path.parent} began with, {store['path']} of "
            f"{store['created']}, got {buffer.path} of {found['store']['created']}. Use that, or another root_dir."
        )


def origin(buffer: "UniformReplayBuffer") -> dict[str, Any]:
    """Returns JSON values by which `check_origin` knows a store again, also where it was moved to."""
    created = buffer._opened().manifest.created
    return {"spec": specs.to_json(buffer.data_spec), "store": {"created": created, "path": str(buffer.path)}}


def keep(path: Path, settings: dict[str, Any], notes: dict[str, Any] | None = None) -> None:
    """Writes the settings down, or compares them with those that are there.

    Args:
        path: Of a JSON file in the training's folder.
        settings: JSON values by name; more may be in the file.
        notes: More of them, which are written down with the settings, but not compared.

    Raises:
        OptionError: If one of them is another than in the file, or the file is none of this kind.
    """
    try:
        known = json.loads(path.read_text())
        known.items()
    except FileNotFoundError:
        files.replace_file(path, json.dumps(settings | (notes or {}), indent=2).encode(), sync=True)
        return
    except (ValueError, AttributeError) as error:
        raise OptionError(f"{path} must hold the settings of a training as JSON, but doesn't. Remove it.") from error
    for name, value in json.loads(json.dumps(settings)).items():
        if known.get(name) != value:
            raise OptionError(
                f"{name} must be {known.get(name)!r} to go on with the training in {path.parent}, got {value!r}. "
                "Use that, or another root_dir."
            )
