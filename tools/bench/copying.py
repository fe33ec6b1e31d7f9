"""Copying 5 GB of frames into each layout, beside `cp` and a sync of every file: the least that can be done."""

import dataclasses
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import beside
import numpy as np
from beside import Measurement
from measure import GIGABYTES_PER_SECOND, MEGABYTES, Record, Target, against, interleave, single

import diskbuf

_SPEC = {
    "observation": diskbuf.ArraySpec([84, 84], "uint8"),
    "action": diskbuf.ArraySpec([], "int64"),
    "reward": diskbuf.ArraySpec([], "float32"),
}
_COPIES: dict[str, tuple[str, dict[str, Any]]] = {
    "raw_raw": ("raw", {}),
    "raw_zstd": ("raw", {"codec": "zstd"}),
    "zstd_raw": ("zstd", {"codec": None}),
    "raw_arrow": ("raw", {"layout": "arrow"}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        frames: Of the store.
        rounds: Rounds.
    """

    frames: int = 700_000
    rounds: int = 2


QUICK = Size(frames=4_000, rounds=1)


def measure_copying(folder: Path, size: Size) -> list[Record]:
    """Raw bytes of rows per second, each copy in a process of its own, and the most memory that it took."""
    raw = folder / "raw"
    _make(raw, size.frames)
    diskbuf.copy(raw, folder / "zstd", codec="zstd")
    row_bytes = sum(spec.dtype.itemsize * int(np.prod(spec.shape)) for spec in _SPEC.values())
    gigabytes = size.frames * row_bytes / 1e9
    peaks: dict[str, list[float]] = {name: [] for name in _COPIES}
    contenders: dict[str, Callable[[], float]] = {
        name: functools.partial(_copy, folder / source, folder / "copied", wanted, gigabytes, peaks[name])
        for name, (source, wanted) in _COPIES.items()
    }
    contenders["cp"] = functools.partial(_cp, raw, folder / "copied", gigabytes)
    figures = interleave(contenders, rounds=size.rounds)
    records = []
    for name in _COPIES:
        what = f"copy {gigabytes:.2g} GB of frames, {name.replace('_', ' to ')}"
        records.append(
            against(
                f"copy_{name}",
                f"{what}, verified",
                ours=figures[name],
                peer="cp -r of the raw store, each file synced",
                peer_figures=figures["cp"],
                unit=GIGABYTES_PER_SECOND,
                target=Target(at_least=0.5) if name == "raw_raw" else None,
            )
        )
        records.append(
            single(
                f"copy_{name}_memory",
                f"{what}, most memory of the process",
                figures=peaks[name],
                unit=MEGABYTES,
                target=Target(at_most=500),
            )
        )
    return records


def _make(path: Path, frames: int) -> None:
    """A store of frames that compress as games do: a background, and a few things that move."""
    rng = np.random.default_rng(0)
    background = np.repeat(np.repeat(rng.integers(0, 256, (14, 14), np.uint8), 6, 0), 6, 1)
    with diskbuf.UniformReplayBuffer(_SPEC, 1, None, path=path, options=diskbuf.StoreOptions(fsync="never")) as buffer:
        for first in range(0, frames, 1000):
            count = min(1000, frames - first)
            rows = np.broadcast_to(background, (count, 84, 84)).copy()
            for thing in range(6):
                at = rng.integers(0, 76, (count, 2))
                for frame, (y, x) in enumerate(at):
                    rows[frame, y : y + 8, x : x + 8] = 40 * thing
            rows[:, 0] = rng.integers(0, 256, (count, 84), np.uint8)  # what no two frames share
            ids = np.arange(first, first + count)
            buffer.extend({"observation": rows[None], "action": ids[None] % 18, "reward": ids[None].astype("f4")})


def _copy(source: Path, copied: Path, wanted: dict[str, Any], gigabytes: float, peaks: list[float]) -> float:
    arguments = [sys.executable, __file__, str(source), str(copied), json.dumps(wanted)]
    run = subprocess.run(arguments, check=True, stdout=subprocess.PIPE)
    seconds, peak = json.loads(run.stdout)
    peaks.append(peak)
    shutil.rmtree(copied)
    return gigabytes / float(seconds)


def _copy_here(source: str, copied: str, wanted: str) -> list[float]:
    """What the process does: returns seconds and the most megabytes that were resident."""
    report = diskbuf.copy(source, copied, **json.loads(wanted))
    return [report.seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3]


def _cp(source: Path, copied: Path, gigabytes: float) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, copied], check=True)
    for file in copied.rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - start
    shutil.rmtree(copied)
    return gigabytes / seconds


if __name__ == "__main__":
    if len(sys.argv) == 4 and not sys.argv[1].startswith("-"):
        print(json.dumps(_copy_here(*sys.argv[1:])))
    else:
        beside.main({"copying": Measurement("copying", "measure_copying")}, what="copying stores", name="copying")
