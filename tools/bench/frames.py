"""Frames of 84x84x4 uint8, where every byte counts: appending and sampling against the file system and memcpy."""

import contextlib
import dataclasses
import functools
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from measure import GIGABYTES_PER_SECOND, MILLISECONDS, Record, Target, against, interleave, seconds_per_call
from numpy.typing import NDArray

import diskbuf

LANES = 8
SPEC = {"observation": diskbuf.ArraySpec([84, 84, 4], "uint8")}
FRAMES_PER_CHUNK = 64
"""Ids in a chunk of 16 MiB at most; the peer's files are as long."""

SEQUENCES = 256
NUM_STEPS = 2
Fsync = Literal["interval", "never"]
FSYNCS: tuple[Fsync, ...] = ("interval", "never")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        appends: Ids appended to new files in a round, enough for the sync of each second to be in it.
        ring: Ids in the full ring.
        laps: Times round the full ring in a round.
        append_rounds: Rounds of these.
        samples: `get_next` calls in a round.
        sample_rounds: Rounds of these.
    """

    appends: int = 6_000
    ring: int = 1_000
    laps: int = 8
    append_rounds: int = 4
    samples: int = 8
    sample_rounds: int = 20


QUICK = Size(appends=192, ring=128, laps=2, append_rounds=2, samples=1, sample_rounds=2)


def measure_append(folder: Path, size: Size) -> list[Record]:
    """Appending to new chunks and to a full ring, against pwrite to new and to cached files and against memcpy."""
    batch = _random_batch()
    with contextlib.ExitStack() as stack:
        contenders: dict[str, Callable[[], float]] = {}
        for fsync in FSYNCS:
            ring = stack.enter_context(_full_ring(folder / f"ring-{fsync}.zarr", batch, fsync=fsync, ids=size.ring))
            contenders[f"new_{fsync}"] = functools.partial(_append_new, folder, batch, fsync=fsync, ids=size.appends)
            contenders[f"full_{fsync}"] = functools.partial(_append_full, ring, batch, laps=size.laps)
        contenders["pwrite_new"] = functools.partial(_pwrite_new, folder, batch, ids=size.appends)
        contenders["pwrite_cached"] = stack.enter_context(_cached_files(folder, batch, ids=size.ring, laps=size.laps))
        contenders["memcpy"] = _memcpy(batch, ids=size.ring, laps=size.laps)
        figures = interleave(contenders, rounds=size.append_rounds)
    peers = {
        "pwrite_new": "pwrite to new files",
        "new": "appending to new chunks",
        "pwrite_cached": "pwrite over cached files",
        "memcpy": "memcpy",
    }
    rows: list[tuple[str, str, Target | None]] = [
        ("new", "pwrite_new", Target(at_least=0.8)),
        ("full", "new", Target(at_least=3)),
        ("full", "pwrite_cached", None),
        ("full", "memcpy", None),
        ("new", "memcpy", None),
    ]
    return [
        against(
            f"frames_{ours}_{fsync}_vs_{peer}",
            f"append frames to {'new chunks' if ours == 'new' else 'a full ring'}, fsync={fsync!r}",
            ours=figures[f"{ours}_{fsync}"],
            peer=peers[peer],
            peer_figures=figures[f"{peer}_{fsync}" if peer == "new" else peer],
            unit=GIGABYTES_PER_SECOND,
            target=target,
        )
        for ours, peer, target in rows
        for fsync in FSYNCS
    ]


def measure_get(folder: Path, size: Size) -> list[Record]:
    """`get_next` of frames that are in memory, against `numpy.copy` of the same bytes; a fresh array both times."""
    with _full_ring(folder / "ring.zarr", _random_batch(), fsync="interval", ids=size.ring) as buffer:
        drawn = buffer.get_next(SEQUENCES, num_steps=NUM_STEPS)[0]["observation"]
        figures = interleave(
            {
                "ours": functools.partial(_milliseconds, _sampler(buffer), calls=size.samples),
                "copy": functools.partial(_milliseconds, drawn.copy, calls=size.samples),
            },
            rounds=size.sample_rounds,
        )
    return [
        against(
            "frames_get_next",
            f"get_next({SEQUENCES}, num_steps={NUM_STEPS}) of frames, {drawn.nbytes / 1e6:.1f} MB",
            ours=figures["ours"],
            peer="numpy.copy of as much",
            peer_figures=figures["copy"],
            unit=MILLISECONDS,
            target=Target(at_most=1.5),
        )
    ]


def _sampler(buffer: diskbuf.UniformReplayBuffer) -> Callable[[], object]:
    return functools.partial(buffer.get_next, SEQUENCES, num_steps=NUM_STEPS)


def _milliseconds(call: Callable[[], object], *, calls: int) -> float:
    return seconds_per_call(call, calls=calls) * 1e3


def _random_batch() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (LANES, 84, 84, 4), np.uint8)


def _open(path: Path, *, fsync: Fsync, max_length: int | None) -> diskbuf.UniformReplayBuffer:
    options = diskbuf.StoreOptions(fsync=fsync)
    return diskbuf.UniformReplayBuffer(SPEC, LANES, max_length, path=path, options=options, seed=0)


def _add(buffer: diskbuf.UniformReplayBuffer, batch: NDArray[np.uint8], *, ids: int) -> float:
    """Appends one batch of frames `ids` times; returns GB/s."""
    items = {"observation": batch}
    return _rate(lambda: buffer.add_batch(items), batch, ids=ids)


def _rate(write: Callable[[], Any], batch: NDArray[np.uint8], *, ids: int) -> float:
    return batch.nbytes / seconds_per_call(write, calls=ids) / 1e9


def _append_new(folder: Path, batch: NDArray[np.uint8], *, fsync: Fsync, ids: int) -> float:
    path = folder / "new.zarr"
    with _open(path, fsync=fsync, max_length=None) as buffer:
        rate = _add(buffer, batch, ids=ids)
    _drop(path)
    return rate


@contextlib.contextmanager
def _full_ring(
    path: Path, batch: NDArray[np.uint8], *, fsync: Fsync, ids: int
) -> Iterator[diskbuf.UniformReplayBuffer]:
    with _open(path, fsync=fsync, max_length=ids) as buffer:
        _add(buffer, batch, ids=2 * ids + 2 * FRAMES_PER_CHUNK)
        yield buffer
    _drop(path)


def _append_full(buffer: diskbuf.UniformReplayBuffer, batch: NDArray[np.uint8], *, laps: int) -> float:
    ids = buffer.max_length or 0
    _add(buffer, batch, ids=ids)  # the sync between rounds made every page clean, as no training run would
    return _add(buffer, batch, ids=laps * ids)


def _pwrite_new(folder: Path, batch: NDArray[np.uint8], *, ids: int) -> float:
    files = folder / "files"
    files.mkdir()
    seconds = 0.0
    for number in range(-(-ids // FRAMES_PER_CHUNK)):
        start = time.perf_counter()
        descriptor = os.open(files / str(number), os.O_RDWR | os.O_CREAT)
        for row in range(min(FRAMES_PER_CHUNK, ids - number * FRAMES_PER_CHUNK)):
            os.pwrite(descriptor, batch.data, row * batch.nbytes)
        os.close(descriptor)
        seconds += time.perf_counter() - start
    _drop(files)
    return ids * batch.nbytes / seconds / 1e9


@contextlib.contextmanager
def _cached_files(folder: Path, batch: NDArray[np.uint8], *, ids: int, laps: int) -> Iterator[Callable[[], float]]:
    """Makes files as long as the ring's; gives a contender that overwrites them `laps` times."""
    files = folder / "cached"
    files.mkdir()
    count = -(-ids // FRAMES_PER_CHUNK)
    descriptors = [os.open(files / str(number), os.O_RDWR | os.O_CREAT) for number in range(count)]
    rows = [(number, row * batch.nbytes) for number in descriptors for row in range(FRAMES_PER_CHUNK)]

    def overwrite() -> float:
        for number, offset in rows:
            os.pwrite(number, batch.data, offset)  # as for the ring, the first lap is not timed
        places = itertools.cycle(rows)

        def write() -> None:
            number, offset = next(places)
            os.pwrite(number, batch.data, offset)

        return _rate(write, batch, ids=laps * len(rows))

    yield overwrite
    for number in descriptors:
        os.close(number)
    _drop(files)


def _memcpy(batch: NDArray[np.uint8], *, ids: int, laps: int) -> Callable[[], float]:
    """A contender that copies the batch to each place of an array as large as the ring."""
    array = np.ones((ids, *batch.shape), np.uint8)

    def copy() -> float:
        places = itertools.cycle(array)
        return _rate(lambda: np.copyto(next(places), batch), batch, ids=laps * ids)

    return copy


def _drop(path: Path) -> None:
    """Removes files and lets the disk come to rest, so that they cost the next contender nothing."""
    shutil.rmtree(path)
    os.sync()
