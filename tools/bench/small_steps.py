"""Steps of a few hundred bytes, where every call of Python counts: adding, sampling, and how long one add can take."""

import array
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measure import MICROSECONDS, Record, Target, against, interleave, single
from numpy.typing import NDArray

import diskbuf

LANES = 32
SPEC = {
    "action": diskbuf.ArraySpec([3], "float32"),
    "lidar": diskbuf.ArraySpec([5], "float32"),
    "camera": diskbuf.ArraySpec([3, 2], "float32"),
}
"""The replay-buffer tutorial of TF-Agents."""

SEQUENCES = 256
_COLUMNS = (1, 8)  # of a store whose adds wait for the disk
NUM_STEPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        max_length: Ids in the long ring.
        short_length: Ids in the short one.
        adds: `add_batch` calls in a round: a few milliseconds, so that most rounds are left alone by other processes.
        samples: `get_next` calls in a round, for the same reason.
        sample_rounds: Rounds of these.
        latency_seconds: How long single adds are watched: a minute has some sixty background syncs.
        synced_adds: Adds in a round of those that wait for the disk.
        synced_rounds: Rounds of these.
    """

    max_length: int = 100_000
    short_length: int = 1_000
    adds: int = 500
    samples: int = 20
    sample_rounds: int = 300
    latency_seconds: float = 60.0
    synced_adds: int = 50
    synced_rounds: int = 40


QUICK = Size(
    max_length=2_000,
    short_length=500,
    adds=500,
    samples=20,
    sample_rounds=5,
    latency_seconds=0.2,
    synced_adds=5,
    synced_rounds=3,
)


def measure_add(folder: Path, size: Size) -> list[Record]:
    """`add_batch` into a filling and into a full ring, against bare assignments into mapped files of the same size."""
    step = _random_step()
    arrays = [_mapped(folder / f"{name}.bin", size.max_length, step[name]) for name in SPEC]
    records = []
    with _store(folder / "steps.zarr", size.max_length) as buffer:
        contenders = {
            "ours": _adder(buffer, step, calls=size.adds),
            "bare": _bare_adder(arrays, step, calls=size.adds),
        }
        for state in ("filling", "full"):  # one lap each
            figures = interleave(contenders, rounds=size.max_length // size.adds)
            records.append(
                against(
                    f"add_batch_{state}",
                    f"add_batch, {LANES} lanes, ring of {size.max_length:,} {state}",
                    ours=figures["ours"],
                    peer=f"3 assignments into mapped files, {state}",
                    peer_figures=figures["bare"],
                    unit=MICROSECONDS,
                    target=Target(at_most=3),
                )
            )
    return records


def _adder(buffer: diskbuf.UniformReplayBuffer, step: dict[str, NDArray[Any]], *, calls: int) -> Callable[[], float]:
    """A contender that adds a step `calls` times; microseconds per call."""

    def add() -> float:
        add_batch = buffer.add_batch
        start = time.perf_counter()
        for _ in range(calls):
            add_batch(step)
        return (time.perf_counter() - start) / calls * 1e6

    return add


def _bare_adder(arrays: list[NDArray[Any]], step: dict[str, NDArray[Any]], *, calls: int) -> Callable[[], float]:
    """A contender that assigns a step `calls` times, each time to the next place; microseconds per step."""
    a, b, c = arrays
    x, y, z = step.values()
    position = 0

    def add() -> float:
        nonlocal position
        start = time.perf_counter()
        for i in range(position, position + calls):
            a[i] = x
            b[i] = y
            c[i] = z
        taken = time.perf_counter() - start
        position = (position + calls) % len(a)
        return taken / calls * 1e6

    return add


def measure_get(folder: Path, size: Size) -> list[Record]:
    """`get_next` from a short and a long ring, against bare `numpy.take` calls on arrays in memory."""
    return [
        _measure_get(folder / f"{name}.zarr", size, name=name, max_length=max_length)
        for name, max_length in (("short", size.short_length), ("long", size.max_length))
    ]


def _measure_get(path: Path, size: Size, *, name: str, max_length: int) -> Record:
    step = _random_step()
    with _store(path, max_length) as buffer:
        for _ in range(max_length):
            buffer.add_batch(step)
        contenders = {
            "ours": _sampler(buffer, calls=size.samples),
            "bare": _bare_sampler(step, max_length, calls=size.samples),
        }
        figures = interleave(contenders, rounds=size.sample_rounds)
    return against(
        f"get_next_{name}",
        f"get_next({SEQUENCES}, num_steps={NUM_STEPS}), ring of {max_length:,}",
        ours=figures["ours"],
        peer="3 numpy.take from memory",
        peer_figures=figures["bare"],
        unit=MICROSECONDS,
        target=Target(at_most=1.6),
    )


def _sampler(buffer: diskbuf.UniformReplayBuffer, *, calls: int) -> Callable[[], float]:
    """A contender that samples `calls` batches; microseconds per batch."""

    def sample() -> float:
        get_next = buffer.get_next
        start = time.perf_counter()
        for _ in range(calls):
            get_next(SEQUENCES, num_steps=NUM_STEPS)
        return (time.perf_counter() - start) / calls * 1e6

    return sample


def _bare_sampler(step: dict[str, NDArray[Any]], max_length: int, *, calls: int) -> Callable[[], float]:
    """A contender that takes `calls` batches at rows drawn before the clock starts; microseconds per batch."""
    a, b, c = (np.resize(leaf, (max_length * LANES, *leaf.shape[1:])) for leaf in step.values())
    rng = np.random.default_rng(0)

    def sample() -> float:
        indices = [_sequence_rows(rng, max_length) for _ in range(calls)]
        take = np.take
        start = time.perf_counter()
        for index in indices:
            take(a, index, axis=0)
            take(b, index, axis=0)
            take(c, index, axis=0)
        return (time.perf_counter() - start) / calls * 1e6

    return sample


def measure_latency(folder: Path, size: Size) -> list[Record]:
    """How long single `add_batch` calls take while everything is synced once a second."""
    step = _random_step()
    nanoseconds = array.array("q")
    with _store(folder / "steps.zarr", size.max_length) as buffer:
        stop = time.perf_counter() + size.latency_seconds
        while time.perf_counter() < stop:
            start = time.perf_counter_ns()
            buffer.add_batch(step)
            nanoseconds.append(time.perf_counter_ns() - start)
    taken = np.frombuffer(nanoseconds, np.int64) / 1e3
    return [
        single(
            f"add_batch_{name}",
            f"add_batch, {name} of {len(taken):,} calls in {size.latency_seconds:g} s, fsync='interval'",
            figures=[float(np.quantile(taken, quantile))],
            unit=MICROSECONDS,
        )
        for name, quantile in (("p50", 0.5), ("p99", 0.99), ("worst", 1.0))
    ]


def measure_always(folder: Path, size: Size) -> list[Record]:
    """`add_batch` with fsync="always" into few and many columns, against writing and syncing one file."""
    options = diskbuf.StoreOptions(fsync="always")
    contenders: dict[str, Callable[[], float]] = {"bare": _bare_syncer(folder / "bare.bin", calls=size.synced_adds)}
    with contextlib.ExitStack() as stack:
        for columns in _COLUMNS:
            spec = {f"column_{number}": diskbuf.ArraySpec([16], "float32") for number in range(columns)}
            path = folder / f"columns-{columns}.zarr"
            buffer = stack.enter_context(
                diskbuf.UniformReplayBuffer(spec, 1, size.max_length, path=path, seed=0, options=options)
            )
            step = {name: np.ones((1, 16), np.float32) for name in spec}
            buffer.add_batch(step)
            contenders[f"ours_{columns}"] = _adder(buffer, step, calls=size.synced_adds)
        figures = interleave(contenders, rounds=size.synced_rounds)
    return [
        against(
            f"add_batch_always_{columns}",
            f"add_batch, {columns} column{'s' if columns > 1 else ''} of 64 bytes, fsync='always'",
            ours=figures[f"ours_{columns}"],
            peer="pwrite of 64 bytes and os.fdatasync, one file",
            peer_figures=figures["bare"],
            unit=MICROSECONDS,
        )
        for columns in _COLUMNS
    ]


def _bare_syncer(path: Path, *, calls: int) -> Callable[[], float]:
    """A contender that writes to a file that has its space and syncs it, `calls` times; microseconds per call."""
    path.write_bytes(bytes(2**20))
    position = 0

    def write_and_sync() -> float:
        nonlocal position
        data = bytes(64)
        descriptor = os.open(path, os.O_RDWR)
        try:
            start = time.perf_counter()
            for _ in range(calls):
                os.pwrite(descriptor, data, position % 2**20)
                os.fdatasync(descriptor)
                position += 64
            return (time.perf_counter() - start) / calls * 1e6
        finally:
            os.close(descriptor)

    return write_and_sync


@contextlib.contextmanager
def _store(path: Path, max_length: int) -> Iterator[diskbuf.UniformReplayBuffer]:
    with diskbuf.UniformReplayBuffer(SPEC, LANES, max_length, path=path, seed=0) as buffer:
        yield buffer


def _random_step() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    return {name: rng.random((LANES, *spec.shape), np.float32) for name, spec in SPEC.items()}


def _mapped(path: Path, length: int, leaf: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(np.memmap(path, leaf.dtype, "w+", shape=(length, *leaf.shape)))


def _sequence_rows(rng: np.random.Generator, max_length: int) -> NDArray[np.int64]:
    """[SEQUENCES, NUM_STEPS] rows of random sequences of one lane each, as `get_next` reads them."""
    starts = rng.integers(0, (max_length - NUM_STEPS + 1) * LANES, SEQUENCES)
    return starts[:, None] + np.arange(NUM_STEPS) * LANES
