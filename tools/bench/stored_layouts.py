"""Measures buffers whose chunks are sealed beside those of raw files: passes, random batches, what sealing costs."""

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from decoding import frames_like_games
from measure import GIGABYTES_PER_SECOND, MICROSECONDS, STEPS_PER_SECOND, Record, Target, against, interleave

import diskbuf
from diskbuf import ReadOptions, StoreOptions, UniformReplayBuffer

_FRAMES = {"frame": diskbuf.ArraySpec([84, 84], "uint8")}
_STEPS = {
    "action": diskbuf.ArraySpec([3], "float32"),
    "lidar": diskbuf.ArraySpec([5], "float32"),
    "camera": diskbuf.ArraySpec([3, 2], "float32"),
}
_LANES = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        frames: Frames in a store.
        steps: Steps of 32 lanes in a store.
        rounds: Rounds.
    """

    frames: int = 2**15
    steps: int = 40_000
    rounds: int = 9


QUICK = Size(frames=2**9, steps=2000, rounds=2)


def measure_compressed_pass(folder: Path, size: Size) -> list[Record]:
    """Reading all frames of a compressed store once, with nothing cached, beside TensorStore on the same array."""
    import tensorstore

    frames = frames_like_games(size.frames)
    records = []
    for codec in ("zstd", "blosc"):
        path = folder / codec
        _write(path, _FRAMES, {"frame": frames[None]}, StoreOptions(codec=codec, inner_rows=64))
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{(path / 'frame').resolve()}/"}}
        array = tensorstore.open(spec, read=True).result()
        figures = interleave(
            {
                "ours": functools.partial(_rate, functools.partial(_gather_all, path), frames.nbytes),
                "peer": functools.partial(_rate, lambda array=array: array.read().result(), frames.nbytes),
            },
            rounds=size.rounds,
        )
        records.append(
            against(
                f"pass_{codec}",
                f"all frames of a store, codec={codec!r}, nothing cached",
                ours=figures["ours"],
                peer="TensorStore",
                peer_figures=figures["peer"],
                unit=GIGABYTES_PER_SECOND,
                target=Target(at_least=0.8),
            )
        )
    return records


def measure_warm_batches(folder: Path, size: Size) -> list[Record]:
    """Random batches from a warm cache, beside those from raw files."""
    frames = frames_like_games(size.frames)
    read = ReadOptions(cache_dir=folder / "cache")
    calls: dict[str, Callable[[], float]] = {}
    buffers = []
    for name, options in {"raw": StoreOptions(), "zstd": StoreOptions(codec="zstd")}.items():
        _write(folder / name, _FRAMES, {"frame": frames[None]}, options)
        buffer = diskbuf.open(folder / name, seed=1, read_options=read)
        buffers.append(buffer)
        buffer.gather_all()
        for batch, steps in ((256, 2), (32, 1)):
            calls[f"{name}_{batch}x{steps}"] = functools.partial(_seconds, buffer, batch, steps)
    for call in calls.values():
        call()
    figures = interleave(calls, rounds=4 * size.rounds)
    for buffer in buffers:
        buffer.close()
    return [
        against(
            f"warm_{shape}",
            f"get_next of frames, {shape}, compressed and in the cache",
            ours=figures[f"zstd_{shape}"],
            peer="raw files",
            peer_figures=figures[f"raw_{shape}"],
            unit=MICROSECONDS,
            target=Target(at_most=1.2),
        )
        for shape in ("256x2", "32x1")
    ]


def measure_arrow_pass(folder: Path, size: Size) -> list[Record]:
    """A deterministic pass over small steps and over frames, Arrow files beside raw zarr."""
    rng = np.random.default_rng(0)
    steps = {
        name: rng.random((_LANES, size.steps, *spec.shape), np.float32).astype(spec.dtype)
        for name, spec in _STEPS.items()
    }
    frames = {"frame": frames_like_games(size.frames)[None]}
    calls: dict[str, Callable[[], float]] = {}
    for what, spec, rows, lanes in (("steps", _STEPS, steps, _LANES), ("frames", _FRAMES, frames, 1)):
        for layout in ("zarr", "arrow"):
            path = folder / f"{what}-{layout}"
            _write(path, spec, rows, StoreOptions(layout=layout))
            calls[f"{what}_{layout}"] = functools.partial(_pass_rate, path, lanes)
    for call in calls.values():
        call()
    figures = interleave(calls, rounds=size.rounds)
    return [
        against(
            f"arrow_pass_{what}",
            f"deterministic pass over {what}, Arrow files",
            ours=figures[f"{what}_arrow"],
            peer="raw zarr",
            peer_figures=figures[f"{what}_zarr"],
            unit=STEPS_PER_SECOND,
            target=Target(at_least=1 / 1.3),
        )
        for what in ("steps", "frames")
    ]


def measure_sealing(folder: Path, size: Size) -> list[Record]:
    """The median add_batch while chunks are sealed behind it, beside a store of raw files."""
    rng = np.random.default_rng(0)
    rows = [{name: rng.random((_LANES, *spec.shape), np.float32) for name, spec in _STEPS.items()} for _ in range(64)]
    numbers = iter(range(10_000))
    layouts: dict[str, dict[str, Any]] = {"raw": {}, "arrow": {"layout": "arrow"}, "zstd": {"codec": "zstd"}}
    figures = interleave(
        {
            name: lambda layout=layout: _median_add(folder / str(next(numbers)), rows, size.steps, layout)
            for name, layout in layouts.items()
        },
        rounds=size.rounds,
    )
    return [
        against(
            f"sealing_{name}",
            f"median add_batch of 32 lanes, chunks of 256 KiB sealed behind it, {name}",
            ours=figures[name],
            peer="raw files",
            peer_figures=figures["raw"],
            unit=MICROSECONDS,
            target=Target(at_most=1.1),
        )
        for name in ("arrow", "zstd")
    ]


def _median_add(path: Path, rows: list[dict[str, Any]], steps: int, layout: dict[str, Any]) -> float:
    options = StoreOptions(chunk_bytes=2**18, **layout)
    taken = []
    with UniformReplayBuffer(_STEPS, _LANES, None, path=path, options=options) as buffer:
        for step in range(steps):
            start = time.perf_counter()
            buffer.add_batch(rows[step % len(rows)])
            taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6


def _write(path: Path, spec: dict[str, Any], rows: dict[str, Any], options: StoreOptions) -> None:
    lanes, steps = next(iter(rows.values())).shape[:2]
    with UniformReplayBuffer(spec, lanes, None, path=path, options=options) as buffer:
        for start in range(0, steps, 4096):
            buffer.extend({name: leaf[:, start : start + 4096] for name, leaf in rows.items()})


def write_frames(path: Path, frames: Any, options: StoreOptions) -> None:
    """Makes a store of frames [n, 84, 84], in one lane."""
    _write(path, _FRAMES, {"frame": frames[None]}, options)


def _gather_all(path: Path) -> Any:
    with diskbuf.open(path, read_options=ReadOptions(cache_dir=":memory:", cache_bytes=2**27)) as buffer:
        return buffer.gather_all()


def _rate(read: Callable[[], object], nbytes: int) -> float:
    start = time.perf_counter()
    read()
    return nbytes / (time.perf_counter() - start) / 1e9


def _seconds(buffer: UniformReplayBuffer, batch: int, steps: int) -> float:
    calls = 20
    start = time.perf_counter()
    for _ in range(calls):
        buffer.get_next(batch, steps)
    return (time.perf_counter() - start) / calls * 1e6


def _pass_rate(path: Path, lanes: int) -> float:
    steps = 0
    with diskbuf.open(path, read_options=ReadOptions(cache_dir=":memory:")) as buffer:
        start = time.perf_counter()
        for _, info in buffer.as_numpy_iterator(lanes, 10, True):
            steps += info.ids.size
        return steps / (time.perf_counter() - start)
