"""Measures what a store does on a disk, each figure beside what the machine itself does in the same seconds.

Stores of some hundred megabytes are made in a scratch folder and removed. Whatever is compared takes turns, and what is
told is the median of the turns. Rates count the bytes of steps, before they are compressed.
"""

import contextlib
import ctypes
import dataclasses
import errno
import itertools
import math
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import diskbuf
from diskbuf.errors import OptionError
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.tree import Structure

_MIB = 2**20
_BLOCK_BYTES = _MIB  # of plain reads and writes
_FILE_BYTES = 16 * _MIB  # of plain files, as of chunks
_MOST_BYTES = 256 * _MIB  # of a scratch store in 15 seconds
_USUAL_SECONDS = 15.0
_LEAST_BYTES = 8 * _MIB
_ROOM = 3  # scratch stores' worth of free space: a store, a plain file and what the file system wants
_ROUNDS = 3
_SEQUENCES = 256
_SAMPLE_BYTES = 64 * _MIB  # a batch has fewer sequences where they are larger
_PASS_BYTES = 2 * _MIB
_DIFFERENT_STEPS = 64  # that are appended again and again
_BATCHES = 3  # of a turn that reads from the disk
_APART = 16
_RESIDENT = 0.05  # share of pages that may stay in memory for a read to be called cold

Stage = Callable[[str], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """What is appended and read.

    Attributes:
        name: For people.
        spec: Of a step.
        lanes: Of the store.
        steps: Some steps, nests of [lanes, *shape], appended in turn.
        options: How the scratch store is laid out.
    """

    name: str
    spec: Any
    lanes: int
    steps: Sequence[Any]
    options: diskbuf.StoreOptions

    @property
    def row_bytes(self) -> int:
        """Bytes of a step of one lane."""
        leaves = Structure(self.spec).flatten(self.spec)
        return max(1, sum(map(_leaf_bytes, leaves)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """One thing that was measured, beside its peer; None where the machine doesn't let it be measured.

    Attributes:
        what: For people.
        steps_per_second: Steps of all lanes.
        seconds_per_call: Of one add_batch, get_next or element of a pass.
        bytes_per_second: Of these steps.
        peer: What it is held against.
        peer_bytes_per_second: How fast that is.
        ratio: Median of the turns of ours / peer, of the speeds.
        rounds: Turns.
    """

    what: str
    steps_per_second: float | None
    seconds_per_call: float | None
    bytes_per_second: float | None
    peer: str
    peer_bytes_per_second: float | None
    ratio: float | None
    rounds: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The figures of one workload.

    Attributes:
        name: Of the workload.
        row_bytes: Bytes of a step of one lane.
        lanes: Of the store.
        layout: Of the store.
        codec: Of the store.
        store_bytes: Bytes of steps that it had.
        figures: In order.
    """

    name: str
    row_bytes: int
    lanes: int
    layout: str
    codec: str | None
    store_bytes: int
    figures: tuple[Figure, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchReport:
    """What `bench` found.

    Attributes:
        folder: Where scratch stores were.
        cpus: That this process may use.
        version: Of diskbuf.
        seconds: That it took.
        notes: What to know of the figures.
        workloads: One by one.
    """

    folder: str
    cpus: int
    version: str
    seconds: float
    notes: tuple[str, ...]
    workloads: tuple[Measured, ...]


def usual_workloads() -> list[Workload]:
    """Frames of 84x84 bytes in 8 lanes, and small steps in 32."""
    frames = {
        "observation": ArraySpec([84, 84], "uint8"),
        "action": ArraySpec([], "int64"),
        "reward": ArraySpec([], "float32"),
    }
    small = {
        "observation": ArraySpec([8], "float32"),
        "action": ArraySpec([2], "float32"),
        "reward": ArraySpec([], "float32"),
    }
    options = diskbuf.StoreOptions()
    return [
        Workload(name=name, spec=spec, lanes=lanes, steps=_random_steps(spec, lanes), options=options)
        for name, spec, lanes in (("frames of 84x84", frames, 8), ("small steps", small, 32))
    ]


def workload_of(buffer: diskbuf.UniformReplayBuffer, *, name: str) -> Workload:
    """The spec, lanes, layout and codec of a store, with some of its newest steps; made-up ones where it has none."""
    lanes, next_id = buffer.batch_size, buffer.next_id
    codec = buffer.codec if buffer.codec in ("zstd", "blosc", "lz4") else None
    layout: Any = buffer.layout
    options = diskbuf.StoreOptions(codec=codec, layout=layout)
    found = Workload(name=name, spec=buffer.data_spec, lanes=lanes, steps=(), options=options)
    count = min(next_id - buffer.first_id, _DIFFERENT_STEPS, max(1, _FILE_BYTES // (found.row_bytes * lanes)))
    if count < 1:
        return dataclasses.replace(found, steps=_random_steps(found.spec, lanes))
    ids = np.arange(next_id - count, next_id)
    rows = buffer.read(ids[:, None], np.arange(lanes)[None])  # [count, lanes, *shape]
    structure = Structure(rows)
    leaves = structure.flatten(rows)
    steps = [structure.unflatten([np.ascontiguousarray(leaf[step]) for leaf in leaves]) for step in range(count)]
    return dataclasses.replace(found, steps=steps)


def bench(
    folder: str | os.PathLike[str],
    workloads: Sequence[Workload],
    *,
    seconds: float = _USUAL_SECONDS,
    stage: Stage | None = None,
) -> BenchReport:
    """Measures appending, sampling, passes and cold reads on the disk of a folder.

    Args:
        folder: A folder that is there; a scratch folder is made in it, and removed however this ends.
        workloads: What to measure.
        seconds: About how long it may take in all.
        stage: Called with the name of what is measured next.

    Raises:
        OptionError: When the folder isn't one, or is a store; when seconds is not above 0.
        OSError: When there isn't room for the scratch stores, or they can't be written.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise OptionError(f"--path must be a folder that is there, got {folder}.")
    if any((above / "zarr.json").exists() for above in (folder.absolute(), *folder.absolute().parents)):
        raise OptionError(f"--path must be a folder outside of stores, got {folder}. Name another one.")
    if not 0 < seconds < math.inf:
        raise OptionError(f"--seconds must be above 0, got {seconds!r}.")
    most = max(_LEAST_BYTES, int(_MOST_BYTES * min(8.0, seconds / _USUAL_SECONDS)))
    free = shutil.disk_usage(folder).free
    if free < _ROOM * most:
        raise OSError(
            errno.ENOSPC,
            f"bench needs {_ROOM * most / _MIB:,.0f} MiB of free space, got {free / _MIB:,.0f} MiB. Name a folder of "
            "another disk with --path, or fewer --seconds",
            str(folder),
        )
    started = time.perf_counter()
    notes: list[str] = []
    with tempfile.TemporaryDirectory(prefix=".diskbuf-bench-", dir=folder) as scratch:
        measured = [
            _Bench(workload, Path(scratch), seconds / len(workloads), most, stage or _nothing, notes).run()
            for workload in workloads
        ]
    return BenchReport(
        folder=str(folder.absolute()),
        cpus=len(os.sched_getaffinity(0)),
        version=diskbuf.__version__,
        seconds=time.perf_counter() - started,
        notes=tuple(dict.fromkeys(notes)),
        workloads=tuple(measured),
    )


class _Bench:
    """One workload in a scratch folder."""

    def __init__(
        self, workload: Workload, scratch: Path, seconds: float, most_bytes: int, stage: Stage, notes: list[str]
    ) -> None:
        self._workload = workload
        self._scratch = scratch
        self._seconds = seconds
        self._most_bytes = most_bytes
        self._stage = stage
        self._notes = notes
        self._step_bytes = workload.row_bytes * workload.lanes
        self._store = scratch / "store.zarr"
        self._plain = scratch / "plain"
        self._block = np.random.default_rng(0).integers(0, 256, _BLOCK_BYTES, np.uint8)
        self._caches = itertools.count()

    def run(self) -> Measured:
        """Measures everything."""
        self._say("appending")
        figures = self._append()
        with self._open() as buffer:
            store_bytes = buffer.num_frames() * self._workload.row_bytes
            layout, codec = buffer.layout, buffer.codec
            self._say("sampling")
            figures.append(self._sample(buffer))
            self._say("passes")
            figures.append(self._pass(buffer))
        self._say("cold reads")
        figures += self._cold()
        shutil.rmtree(self._store)
        shutil.rmtree(self._plain)
        return Measured(
            name=self._workload.name,
            row_bytes=self._workload.row_bytes,
            lanes=self._workload.lanes,
            layout=layout,
            codec=codec,
            store_bytes=store_bytes,
            figures=tuple(figures),
        )

    def _say(self, what: str) -> None:
        self._stage(f"{self._workload.name}: {what}")

    # Appending ---------------------------------------------------------------------------------------------------

    def _append(self) -> list[Figure]:
        """Appends as much in each turn as the first one finds time for; the last turn's store and file stay."""
        turn = 0.35 * self._seconds / (_ROUNDS + 1) / 2
        synced = self._write_plain(_LEAST_BYTES)[1]  # how much a turn may write for its sync to be in time
        most = min(self._most_bytes, max(_LEAST_BYTES, int(_LEAST_BYTES / synced * turn)))
        steps = self._add(turn / 2, max(1, most // self._step_bytes))[0]
        ours: list[tuple[float, float]] = []
        peers: list[tuple[float, float]] = []
        for number in range(_ROUNDS):
            if number % 2:
                peers.append(self._write_plain(steps * self._step_bytes))
            ours.append(self._add(math.inf, steps)[1:])
            if not number % 2:
                peers.append(self._write_plain(steps * self._step_bytes))
        size = steps * self._step_bytes
        names = (
            ("append, until add_batch returns", "plain writes to new files"),
            ("append, until it is on the disk", "plain writes and fsync"),
        )
        return [
            self._figure(
                what, [(size, s[at]) for s in ours], peer, [(size, s[at]) for s in peers], call_bytes=self._step_bytes
            )
            for at, (what, peer) in enumerate(names)
        ]

    def _add(self, seconds: float, most_steps: int) -> tuple[int, float, float]:
        """Appends to a new store; returns how many steps, and the seconds without and with the sync."""
        shutil.rmtree(self._store, ignore_errors=True)
        batches = itertools.cycle(self._workload.steps)
        with (
            self._cache() as read_options,
            diskbuf.UniformReplayBuffer(
                self._workload.spec,
                self._workload.lanes,
                None,
                path=self._store,
                options=self._workload.options,
                read_options=read_options,
            ) as buffer,
        ):
            done = 0
            started = time.perf_counter()
            while done < most_steps and time.perf_counter() - started < seconds:
                for batch in itertools.islice(batches, min(64, most_steps - done)):
                    buffer.add_batch(batch)
                    done += 1
            added = time.perf_counter()
            buffer.flush()
            return done, added - started, time.perf_counter() - started

    def _write_plain(self, size: int) -> tuple[float, float]:
        """Writes plain files of so many bytes; returns the seconds without and with the sync."""
        shutil.rmtree(self._plain, ignore_errors=True)
        self._plain.mkdir()
        descriptors = []
        started = time.perf_counter()
        try:
            for number, first in enumerate(range(0, size, _FILE_BYTES)):
                descriptors.append(os.open(self._plain / str(number), os.O_RDWR | os.O_CREAT))
                for offset in range(0, min(_FILE_BYTES, size - first), _BLOCK_BYTES):
                    os.pwrite(descriptors[-1], self._block[: size - first - offset].data, offset)
            written = time.perf_counter()
            for descriptor in descriptors:
                os.fsync(descriptor)
            return written - started, time.perf_counter() - started
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    # Reading from memory -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _open(self) -> Iterator[diskbuf.UniformReplayBuffer]:
        with self._cache() as read_options, diskbuf.open(self._store, read_options=read_options) as buffer:
            yield buffer

    @contextlib.contextmanager
    def _cache(self) -> Iterator[diskbuf.ReadOptions]:
        """An empty cache for decoded chunks, so that the user's is left alone."""
        folder = self._scratch / f"cache-{next(self._caches)}"
        try:
            yield diskbuf.ReadOptions(cache_dir=folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _request(self, buffer: diskbuf.UniformReplayBuffer) -> tuple[int, int]:
        """Sequences and steps of a batch."""
        num_steps = min(2, buffer.next_id - buffer.first_id)
        most = max(1, _SAMPLE_BYTES // (num_steps * self._workload.row_bytes))
        return min(_SEQUENCES, most), num_steps

    def _sample(self, buffer: diskbuf.UniformReplayBuffer) -> Figure:
        sequences, num_steps = self._request(buffer)
        size = sequences * num_steps * self._workload.row_bytes
        buffer.get_next(sequences, num_steps=num_steps)
        for _ in buffer.as_numpy_iterator(*self._pass_request(buffer), single_deterministic_pass=True):
            pass  # all of it is in memory from here on
        ours, peers = self._turns(
            0.15 * self._seconds,
            lambda: _seconds(lambda: buffer.get_next(sequences, num_steps=num_steps)),
            lambda: _seconds(self._copy_of(size)),
        )
        return self._figure(
            f"sample {sequences} x {num_steps} from memory",
            [(size, s) for s in ours],
            "memcpy of as much",
            [(size, s) for s in peers],
            call_bytes=size,
        )

    def _pass_request(self, buffer: diskbuf.UniformReplayBuffer) -> tuple[int, int]:
        """Lanes and steps of an element of a pass."""
        steps = max(1, min(_PASS_BYTES // self._step_bytes, buffer.next_id - buffer.first_id))
        return self._workload.lanes, steps

    def _pass(self, buffer: diskbuf.UniformReplayBuffer) -> Figure:
        size = self._step_bytes * self._pass_request(buffer)[1]
        budget = 0.15 * self._seconds

        def go_through() -> float:
            taken, rows = self._read_pass(buffer, budget / 4)
            return taken / (rows * self._workload.row_bytes) * size

        ours, peers = self._turns(budget, go_through, lambda: _seconds(self._copy_of(size)))
        return self._figure(
            "deterministic pass from memory",
            [(size, s) for s in ours],
            "memcpy",
            [(size, s) for s in peers],
            call_bytes=size,
        )

    def _read_pass(self, buffer: diskbuf.UniformReplayBuffer, seconds: float) -> tuple[float, int]:
        """Goes through the store for so long; returns the seconds and the rows."""
        rows = 0
        started = time.perf_counter()
        for _, info in buffer.as_numpy_iterator(*self._pass_request(buffer), single_deterministic_pass=True):
            rows += info.ids.size
            if time.perf_counter() - started >= seconds:
                break
        return time.perf_counter() - started, rows

    def _copy_of(self, size: int) -> Callable[[], object]:
        """What copies so many bytes into fresh memory, as a batch is made."""
        source = np.resize(self._block, size)
        return source.copy

    def _turns(
        self, seconds: float, ours: Callable[[], float], peer: Callable[[], float]
    ) -> tuple[list[float], list[float]]:
        """Lets both take turns for so long, three times at least, every other time in reverse."""
        found: tuple[list[float], list[float]] = ([], [])
        stop = time.perf_counter() + seconds
        while len(found[0]) < _ROUNDS or time.perf_counter() < stop:
            contenders = [(found[0], ours), (found[1], peer)]
            for figures, contender in contenders if len(found[0]) % 2 == 0 else reversed(contenders):
                figures.append(contender())
        return found

    # Reading from the disk ---------------------------------------------------------------------------------------

    def _cold(self) -> list[Figure]:
        rng = np.random.default_rng(0)
        plain = sorted(self._plain.iterdir(), key=lambda file: int(file.name))
        with self._open() as buffer:
            sequences, num_steps = self._request(buffer)
            piece = num_steps * self._workload.row_bytes
            # So few that the batches of a turn hardly meet.
            store_bytes = buffer.num_frames() * self._workload.row_bytes
            sequences = max(1, min(sequences, store_bytes // (piece * _APART)))
            pass_bytes = self._step_bytes * self._pass_request(buffer)[1]
        size = sequences * piece
        budget = 0.35 * self._seconds / 2
        names = (
            (f"sample {sequences} x {num_steps} from the disk", "pread of as much, at random, one by one"),
            ("deterministic pass from the disk", "plain reads of whole files"),
        )
        if not self._evict():
            self._notes.append(
                "pages stay in memory when they are given back, as on tmpfs, so reads from the disk weren't measured."
            )
            return [self._figure(what, [], peer, [], call_bytes=0) for what, peer in names]

        def sample() -> float:
            self._evict()
            with self._open() as buffer:
                batches = buffer.as_numpy_iterator(sequences, num_steps, seed=int(rng.integers(2**31)))
                next(batches)  # opens the files
                return _seconds(lambda: [next(batches) for _ in range(_BATCHES)]) / _BATCHES

        def pread() -> float:
            self._evict()
            total = sum(file.stat().st_size for file in plain)
            places = rng.integers(0, max(1, total - piece), sequences * _BATCHES) // piece * piece
            with contextlib.ExitStack() as stack:
                files = [stack.enter_context(file.open("rb", buffering=0)).fileno() for file in plain]
                for descriptor in files:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # or megabytes around come with it
                seconds = _seconds(
                    lambda: [os.pread(files[at // _FILE_BYTES], piece, at % _FILE_BYTES) for at in places.tolist()]
                )
                return seconds / _BATCHES

        def go_through() -> tuple[int, float]:
            self._evict()
            with self._open() as buffer:
                taken, rows = self._read_pass(buffer, budget / _ROUNDS / 2)
            return rows * self._workload.row_bytes, taken

        def read_plain() -> tuple[int, float]:
            self._evict()
            return _read_whole(plain, budget / _ROUNDS / 2)

        ours, peers = self._turns(budget, sample, pread)
        passes: tuple[list[tuple[int, float]], list[tuple[int, float]]] = ([], [])
        for _ in range(_ROUNDS):
            passes[0].append(go_through())
            passes[1].append(read_plain())
        return [
            self._figure(
                names[0][0], [(size, s) for s in ours], names[0][1], [(size, s) for s in peers], call_bytes=size
            ),
            self._figure(names[1][0], passes[0], names[1][1], passes[1], call_bytes=pass_bytes),
        ]

    def _evict(self) -> bool:
        """Syncs all files and gives their pages back; returns whether they left memory."""
        files = [file for file in self._scratch.rglob("*") if file.is_file() and file.stat().st_size]
        resident = total = 0
        for file in files:
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)  # what isn't on the disk yet stays in memory
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                found = resident_pages(descriptor)
            finally:
                os.close(descriptor)
            if found is not None:
                resident, total = resident + found[0], total + found[1]
        return total > 0 and resident <= _RESIDENT * total

    def _figure(
        self,
        what: str,
        ours: Sequence[tuple[int, float]],
        peer: str,
        peers: Sequence[tuple[int, float]],
        *,
        call_bytes: int,
    ) -> Figure:
        """The medians of turns of (bytes, seconds); a call of ours moves so many bytes."""
        mine, theirs = ([size / seconds for size, seconds in turns] for turns in (ours, peers))
        ratios = [one / other for one, other in zip(mine, theirs, strict=True)]
        rate = statistics.median(mine) if mine else None
        return Figure(
            what=what,
            steps_per_second=None if rate is None else rate / self._workload.row_bytes,
            seconds_per_call=None if rate is None else call_bytes / rate,
            bytes_per_second=rate,
            peer=peer,
            peer_bytes_per_second=statistics.median(theirs) if theirs else None,
            ratio=statistics.median(ratios) if ratios else None,
            rounds=len(ratios),
        )


def resident_pages(descriptor: int) -> tuple[int, int] | None:
    """How many pages of a file are in memory, and how many it has; None where the system doesn't tell."""
    size = os.fstat(descriptor).st_size
    pages = -(-size // mmap.PAGESIZE)
    if not pages:
        return 0, 0
    libc = ctypes.CDLL(None, use_errno=True)
    found = np.zeros(pages, np.uint8)
    with mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY) as mapped:  # of a read-only one there is no address
        start = ctypes.c_char.from_buffer(mapped)
        try:
            code = libc.mincore(
                ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)
            )
        finally:
            del start  # or the mapping couldn't be closed
    return None if code else (int((found & 1).sum()), pages)


def _read_whole(files: Sequence[Path], seconds: float) -> tuple[int, float]:
    """Reads files one after the other for so long; returns the bytes and the seconds."""
    into = memoryview(bytearray(_BLOCK_BYTES))
    done = 0
    started = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(into):
                done += count
        if time.perf_counter() - started >= seconds:
            break
    return done, time.perf_counter() - started


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _random_steps(spec: Any, lanes: int) -> list[Any]:
    rng = np.random.default_rng(0)
    structure = Structure(spec)
    leaves = structure.flatten(spec)
    count = max(1, min(_DIFFERENT_STEPS, _FILE_BYTES // max(1, sum(_leaf_bytes(leaf) for leaf in leaves) * lanes)))
    return [structure.unflatten([_random(leaf, lanes, rng) for leaf in leaves]) for _ in range(count)]


def _leaf_bytes(leaf: ArraySpec) -> int:
    return int(leaf.dtype.itemsize * math.prod(leaf.shape))


def _random(leaf: ArraySpec, lanes: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    """[lanes, *shape] values that a spec allows."""
    shape = (lanes, *leaf.shape)
    if leaf.dtype.kind == "f":
        values = rng.random(shape).astype(leaf.dtype)
    elif leaf.dtype.kind in "iu":
        most = min(256, np.iinfo(leaf.dtype).max + 1)
        values = rng.integers(0, most, shape).astype(leaf.dtype)
    else:
        values = np.zeros(shape, leaf.dtype)
    return np.clip(values, leaf.minimum, leaf.maximum) if isinstance(leaf, BoundedArraySpec) else values


def _nothing(_: str) -> None:
    pass
