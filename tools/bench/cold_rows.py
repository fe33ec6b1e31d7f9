"""Random rows of a store that is larger than memory, against plain `numpy.memmap` indexing.

Each figure is of a process of its own, which is this file run as a program; where control groups allow it, in one with
little memory.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from measure import MILLISECONDS, Record, Target, against, interleave

import diskbuf

_SPEC = {"frame": diskbuf.ArraySpec([84, 84, 4], "uint8")}
_ROW_BYTES = 84 * 84 * 4
_ROWS_AT_ONCE = 200
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_WAYS = {"iterator": "as_numpy_iterator", "dataset": "as_dataset", "memmap": "numpy.memmap"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        memory_bytes: What the reading process may use, page cache and all.
        store_bytes: Bytes of rows in the store.
        rows: Rows to a batch.
        skipped: Batches of each process that don't count, in which it starts and memory fills.
        batches: Those that do.
        rounds: Processes of each kind.
    """

    memory_bytes: int = 2**30
    store_bytes: int = 3 * 2**30
    rows: int = 512
    skipped: int = 4
    batches: int = 12
    rounds: int = 3


QUICK = Size(memory_bytes=2**30, store_bytes=2**24, rows=32, skipped=1, batches=2, rounds=1)


def measure_cold(folder: Path, size: Size) -> list[Record]:
    """Random rows by NumPy and by TensorFlow."""
    path = folder / "cold.zarr"
    _make(path, size.store_bytes // _ROW_BYTES)
    with _little_memory(size.memory_bytes) as group:
        contenders = {way: functools.partial(_in_own_process, path, way, group, size) for way in _WAYS}
        figures = interleave(contenders, rounds=size.rounds)
    gibibytes = size.store_bytes / 2**30
    where = f"{size.memory_bytes / 2**30:.3g} GiB of memory" if group else "evicted before each batch"
    return [
        against(
            f"cold_{way}",
            f"{size.rows} random rows of 28 kB, store of {gibibytes:.3g} GiB, {where}: {_WAYS[way]}",
            ours=figures[way],
            peer=_WAYS["memmap"],
            peer_figures=figures["memmap"],
            unit=MILLISECONDS,
            target=Target(at_most=0.1),
        )
        for way in ("iterator", "dataset")
    ]


def _make(path: Path, rows: int) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (1, _ROWS_AT_ONCE, 84, 84, 4), np.uint8)
    with diskbuf.UniformReplayBuffer(_SPEC, max_length=None, path=path) as buffer:
        for _ in range(-(-rows // _ROWS_AT_ONCE)):
            buffer.extend({"frame": frames})


def _chunks(path: Path) -> list[Path]:
    return sorted((path / "frame").glob("c.*"), key=lambda file: int(file.name.split(".")[1]))


def _evict(path: Path) -> None:
    for file in _chunks(path):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def _little_memory(memory_bytes: int) -> Iterator[Path | None]:
    """Yields a control group with so much memory; None where none can be made, which needs root."""
    v1 = _CONTROL_GROUPS / "memory"
    parent, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (_CONTROL_GROUPS, "memory.max")
    group = parent / f"diskbuf-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        try:
            (group / limit).write_text(str(memory_bytes))
        except OSError:
            yield None
        else:
            yield group
    finally:
        group.rmdir()


def _in_own_process(path: Path, way: str, group: Path | None, size: Size) -> float:
    """Milliseconds to a batch."""
    _evict(path)
    arguments = {
        "path": str(path),
        "way": way,
        "group": str(group) if group else None,
        "rows": size.rows,
        "skipped": size.skipped,
        "batches": size.batches,
    }
    run = subprocess.run([sys.executable, __file__, json.dumps(arguments)], check=True, stdout=subprocess.PIPE)
    milliseconds: float = json.loads(run.stdout)
    return milliseconds


def _read(path: str, way: str, group: str | None, rows: int, skipped: int, batches: int) -> float:
    """What the process does: reads batches, and tells the mean of those that count."""
    if group is not None:
        Path(group, "cgroup.procs").write_text(str(os.getpid()))
    seed = int.from_bytes(os.urandom(4), "little")
    with diskbuf.open(path) as buffer:
        if way == "memmap":
            read = _reader_of_memmaps(Path(path), rows, seed)
        elif way == "dataset":
            read = functools.partial(next, iter(buffer.as_dataset(rows, seed=seed)))
        else:
            read = functools.partial(next, buffer.as_numpy_iterator(rows, seed=seed))
        seconds = 0.0
        for batch in range(skipped + batches):
            if group is None:
                _evict(Path(path))
            start = time.perf_counter()
            read()
            if batch >= skipped:
                seconds += time.perf_counter() - start
    return seconds / batches * 1e3


def _reader_of_memmaps(path: Path, rows: int, seed: int) -> Callable[[], object]:
    files = _chunks(path)
    maps = [np.memmap(file, np.uint8, "r").reshape(-1, 84, 84, 4) for file in files]
    ends = list(itertools.accumulate(len(rows_of_file) for rows_of_file in maps))
    rng = np.random.default_rng(seed)

    def read() -> object:
        batch = np.empty((rows, 84, 84, 4), np.uint8)
        drawn = rng.integers(0, ends[-1], rows)
        for at, (chunk, row) in enumerate(zip(np.searchsorted(ends, drawn, side="right"), drawn, strict=True)):
            batch[at] = maps[chunk][row - ends[chunk]]  # negative: counted from the end of the chunk
        return batch

    return read


if __name__ == "__main__":
    print(json.dumps(_read(**json.loads(sys.argv[1]))))
