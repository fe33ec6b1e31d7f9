"""What diskbuf takes before any step is added or read: importing it, opening and creating a store."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from measure import MEGABYTES, SECONDS, Record, Target, single

import diskbuf

_ROW_BYTES = 512
_ROWS_PER_CHUNK = 8

_IMPORT = """
import json, time
start = time.perf_counter()
import diskbuf
imported = time.perf_counter() - start
diskbuf.UniformReplayBuffer
print(json.dumps({"import": imported, "use": time.perf_counter() - start}))
"""

_OPEN = """
import json, resource, sys, time
import diskbuf

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6

def opened():
    memory, start = resident(), time.perf_counter()
    buffer = diskbuf.open(sys.argv[1])
    return buffer, {"seconds": time.perf_counter() - start, "megabytes": resident() - memory}

first, figures = opened()
first.close()
_, again = opened()
print(json.dumps({"first": figures, "again": again}))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        chunks: Chunk files of the store that is opened.
        frames: Frames that the created store has room for.
        rounds: Fresh interpreters for each figure.
    """

    chunks: int = 5_000
    frames: int = 10_000_000
    rounds: int = 7


QUICK = Size(chunks=100, rounds=1)


def measure_import(folder: Path, size: Size) -> list[Record]:
    """`import diskbuf` in a fresh interpreter, and the same with the buffer's own modules, NumPy and optree loaded."""
    del folder
    found = [_in_fresh_interpreter(_IMPORT) for _ in range(size.rounds)]
    return [
        single(
            "import",
            "import diskbuf",
            figures=[each["import"] for each in found],
            unit=SECONDS,
            target=Target(at_most=0.5),
        ),
        single(
            "import_and_use",
            "import diskbuf and fetch UniformReplayBuffer",
            figures=[each["use"] for each in found],
            unit=SECONDS,
            target=Target(at_most=0.5),
        ),
    ]


def measure_open(folder: Path, size: Size) -> list[Record]:
    """Opening a store of many chunk files for reading, in a process that has only imported diskbuf."""
    path = folder / "many.zarr"
    _make_chunks(path, size.chunks)
    found = [_in_fresh_interpreter(_OPEN, str(path)) for _ in range(size.rounds)]
    first = [each["first"] for each in found]
    again = [each["again"] for each in found]
    store = f"a store of {size.chunks:,} chunks"
    return [
        single(
            "open_seconds",
            f"open {store}, first use of diskbuf",
            figures=[each["seconds"] for each in first],
            unit=SECONDS,
            target=Target(at_most=0.3),
        ),
        single("open_again_seconds", f"open {store}, again", figures=[each["seconds"] for each in again], unit=SECONDS),
        single(
            "open_memory",
            f"memory to open {store}, first use",
            figures=[each["megabytes"] for each in first],
            unit=MEGABYTES,
            target=Target(at_most=50),
        ),
    ]


def measure_create(folder: Path, size: Size) -> list[Record]:
    """Creating a store with room for millions of frames: nothing is to be laid out before it is needed."""
    path = folder / "room.zarr"
    spec = {"observation": diskbuf.ArraySpec([84, 84], "uint8")}
    start = time.perf_counter()
    with diskbuf.UniformReplayBuffer(spec, max_length=size.frames, path=path):
        seconds = time.perf_counter() - start
        blocks = sum(file.lstat().st_blocks for file in (path, *path.rglob("*")))
    what = f"create a store with room for {size.frames:,} frames"
    return [
        single(
            "create_disk", f"{what}, on disk", figures=[blocks * 512 / 1e6], unit=MEGABYTES, target=Target(at_most=1)
        ),
        single("create_seconds", what, figures=[seconds], unit=SECONDS),
    ]


def _make_chunks(path: Path, count: int) -> None:
    spec = diskbuf.ArraySpec([_ROW_BYTES], "uint8")
    options = diskbuf.StoreOptions(chunk_bytes=_ROWS_PER_CHUNK * _ROW_BYTES, fsync="never")
    steps = count * _ROWS_PER_CHUNK
    with diskbuf.UniformReplayBuffer(spec, max_length=None, path=path, options=options) as buffer:
        buffer.extend(np.zeros((1, steps, _ROW_BYTES), np.uint8))
    found = sum(1 for _ in path.rglob("c.*"))
    if found != count:
        raise RuntimeError(f"{path} must have {count} chunk files to be measured, has {found}.")


def _in_fresh_interpreter(program: str, *arguments: str) -> Any:
    run = subprocess.run([sys.executable, "-c", program, *arguments], check=True, stdout=subprocess.PIPE)
    return json.loads(run.stdout)
