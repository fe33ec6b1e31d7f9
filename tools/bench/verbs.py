"""What the command line takes: each verb as a whole command, beside the least that can be done."""

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import beside
import numpy as np
from beside import Measurement
from measure import GIGABYTES_PER_SECOND, MEGABYTES, SECONDS, Record, Target, against, interleave, single

import diskbuf

_SCRIPT = Path(sys.executable).with_name("diskbuf")
_FRAMES = {
    "observation": diskbuf.ArraySpec([84, 84], "uint8"),
    "action": diskbuf.ArraySpec([], "int64"),
    "reward": diskbuf.ArraySpec([], "float32"),
}
_NUMBERS = {f"x{number}": diskbuf.ArraySpec([], "float32") for number in range(4)}
_SCAN = "import sys, diskbuf; from diskbuf.scanning import scan; [None for _ in scan(diskbuf.open(sys.argv[1]))]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        chunks: Chunk files of the store that `info` looks at.
        frames: Frames of a store.
        numbers: Steps of a store of four scalars.
        rounds: Rounds.
    """

    chunks: int = 10_000
    frames: int = 400_000
    numbers: int = 50_000_000
    rounds: int = 3


QUICK = Size(chunks=40, frames=400, numbers=4_000, rounds=1)


def measure_verbs(folder: Path, size: Size) -> list[Record]:
    """Seconds of `info`; raw bytes per second of those that go through a store; the most memory that they took."""
    return [*_info(folder, size), *_passes(folder, size), *_stats(folder, size)]


def _info(folder: Path, size: Size) -> list[Record]:
    many = folder / "many"
    spec = {"x": diskbuf.ArraySpec([], "int64"), "y": diskbuf.ArraySpec([], "int64")}
    options = diskbuf.StoreOptions(chunk_bytes=64, fsync="never")
    with diskbuf.UniformReplayBuffer(spec, 1, None, path=many, options=options) as buffer:
        rows = np.arange(size.chunks * 4)[None]
        for part in np.array_split(rows, 50, axis=1):
            buffer.extend({"x": part, "y": part})
    seconds = [_timed(["info", many])[0] for _ in range(max(5, size.rounds))]
    what = f"diskbuf info, a store of {size.chunks:,} chunks"
    return [single("info", what, figures=seconds, unit=SECONDS, target=Target(at_most=0.6))]


def _passes(folder: Path, size: Size) -> list[Record]:
    """Verbs that read all of a store of frames, and those that also write it."""
    store = folder / "frames"
    rng = np.random.default_rng(0)
    with diskbuf.UniformReplayBuffer(
        _FRAMES, 1, None, path=store, options=diskbuf.StoreOptions(fsync="never")
    ) as buffer:
        for first in range(0, size.frames, 1000):
            ids = np.arange(first, min(first + 1000, size.frames))
            frames = rng.integers(0, 256, (1, len(ids), 84, 84), np.uint8)
            buffer.extend({"observation": frames, "action": ids[None] % 18, "reward": ids[None].astype("f4")})
    gigabytes = size.frames * (84 * 84 + 12) / 1e9
    out = folder / "out"
    peaks: dict[str, list[float]] = {}

    def rate(name: str, words: Sequence[object]) -> float:
        seconds, peak = _timed(words)
        peaks.setdefault(name, []).append(peak)
        _remove(out)
        return gigabytes / seconds

    contenders: dict[str, Callable[[], float]] = {
        "verify": lambda: rate("verify", ["verify", store]),
        "checksum": lambda: rate("checksum", ["checksum", store]),
        "copy": lambda: rate("copy", ["copy", store, out]),
        "export": lambda: rate("export", ["export", store, out.with_suffix(".parquet")]),
        "read": functools.partial(_read, store, gigabytes),
        "cp": functools.partial(_cp, store, out, gigabytes),
    }
    figures = interleave(contenders, rounds=size.rounds)
    records = []
    for name, peer, told in (
        ("verify", "read", "cat of its files"),
        ("checksum", "read", "cat of its files"),
        ("copy", "cp", "cp -r, each file synced"),
        ("export", "cp", "cp -r, each file synced"),
    ):
        what = f"diskbuf {name}, {gigabytes:.2g} GB of frames" + (", to Parquet" if name == "export" else "")
        records.append(
            against(name, what, ours=figures[name], peer=told, peer_figures=figures[peer], unit=GIGABYTES_PER_SECOND)
        )
        target = Target(at_most=500)
        records.append(
            single(f"{name}_memory", f"{what}, most memory", figures=peaks[name], unit=MEGABYTES, target=target)
        )
    return records


def _stats(folder: Path, size: Size) -> list[Record]:
    """`stats` beside a process that only reads the columns."""
    numbers = folder / "numbers"
    rng = np.random.default_rng(0)
    with diskbuf.UniformReplayBuffer(
        _NUMBERS, 1, None, path=numbers, options=diskbuf.StoreOptions(fsync="never")
    ) as buffer:
        for first in range(0, size.numbers, 2**20):
            count = min(2**20, size.numbers - first)
            buffer.extend({name: rng.normal(size=(1, count)).astype("f4") for name in _NUMBERS})
    records = []
    for name, store in (("numbers", numbers), ("frames", folder / "frames")):
        scanning = [sys.executable, "-c", _SCAN, str(store)]
        figures = interleave(
            {"stats": lambda store=store: _timed(["stats", store])[0], "scan": lambda run=scanning: _run(run)[0]},
            rounds=size.rounds,
        )
        records.append(
            against(
                f"stats_{name}",
                f"diskbuf stats, {name}",
                ours=figures["stats"],
                peer="a process that reads the columns",
                peer_figures=figures["scan"],
                unit=SECONDS,
                target=Target(at_most=2),
            )
        )
    return records


def _timed(words: Sequence[object]) -> tuple[float, float]:
    return _run([str(_SCRIPT), *map(str, words)])


def _run(command: Sequence[str]) -> tuple[float, float]:
    """Runs a command; returns its seconds, and the most megabytes that were resident."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - start, usage.ru_maxrss / 1e3


def _read(store: Path, gigabytes: float) -> float:
    start = time.perf_counter()
    files = [str(file) for file in store.rglob("c.*")]
    with open(os.devnull, "wb") as nothing:
        subprocess.run(["xargs", "cat"], input="\n".join(files).encode(), stdout=nothing, check=True)
    return gigabytes / (time.perf_counter() - start)


def _cp(source: Path, copied: Path, gigabytes: float) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", source, copied], check=True)
    for file in copied.rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - start
    _remove(copied)
    return gigabytes / seconds


def _remove(out: Path) -> None:
    shutil.rmtree(out, ignore_errors=True)
    out.with_suffix(".parquet").unlink(missing_ok=True)


if __name__ == "__main__":
    beside.main({"verbs": Measurement("verbs", "measure_verbs")}, what="the command line", name="verbs")
