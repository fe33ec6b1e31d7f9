"""The window that the workers of a pass agree on, so that they share its elements while a writer goes on adding.

Knows no framework: workers are processes that were given the same file, and a name that is the same in all of them.
"""

import fcntl
import json
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diskbuf.readers.rows import Pass

_MOST_ENTRIES = 64


class AgreedWindow:
    """A small file in the folder for temporary files; the first worker to begin a pass writes its window there.

    Args:
        path: The file, made by another process; None makes one, which is removed with this object.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path if path is not None else _new_file()
        if path is None:
            weakref.finalize(self, _remove, self.path, os.getpid())

    def take(self, name: str, worker: int, begin: Callable[[], Pass]) -> Pass:
        """Returns the window of a pass, the same one to each of its workers.

        Args:
            name: Of the pass. One that was used before, by this worker too, is taken for another pass.
            worker: Number of this worker.
            begin: Takes the window of this moment.

        Returns:
            What `begin` returned to the first worker.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX)  # freed when the file is closed, and when this process is killed
            entries = _entries(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
            found = [entry for entry in entries if entry["name"] == name and worker not in entry["workers"]]
            if found:
                entry = found[-1]
            else:
                entry = {"name": name, "window": [*map(int, begin())], "workers": []}
                entries.append(entry)
            entry["workers"].append(worker)
            text = json.dumps(entries[-_MOST_ENTRIES:]).encode()
            os.ftruncate(descriptor, os.pwrite(descriptor, text, 0))
        finally:
            os.close(descriptor)
        return Pass(*entry["window"])


def _entries(text: bytes) -> list[Any]:
    """What was agreed on lately; nothing when a worker was killed while it wrote."""
    try:
        entries: list[Any] = json.loads(text)
    except ValueError:
        return []
    return entries


def _new_file() -> Path:
    descriptor, path = tempfile.mkstemp(prefix="diskbuf-pass-", suffix=".json")
    os.close(descriptor)
    return Path(path)


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # not from a forked child
        path.unlink(missing_ok=True)
