"""Datasets of ours beside those of TF-Agents' TFUniformReplayBuffer, on the same TensorFlow and with the same rows.

Runs where TF-Agents is installed: in the environment that `make peers` makes.
"""

import concurrent.futures
import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import small_steps
import tensorflow as tf
from measure import MICROSECONDS, MILLISECONDS, STEPS_PER_SECOND, Record, Target, against, interleave
from tf_agents.replay_buffers import tf_uniform_replay_buffer

import diskbuf
from diskbuf.readers import in_graph

SEQUENCES, NUM_STEPS = small_steps.SEQUENCES, small_steps.NUM_STEPS
_PARALLEL = 2
_FRAME_LANES = 8
_FRAMES = {"observation": diskbuf.ArraySpec([84, 84, 4], "uint8")}
_PASS_LANES, _PASS_STEPS = 32, 10
_WARM_UP = 20
Figures = Mapping[str, list[float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        rings: Ids in the rings of small steps.
        batches: Elements read in a round.
        eager_batches: The same where Python asks for each.
        rounds: Rounds of these.
        frame_ring: Ids in the ring of frames.
        frame_batches: Elements read in a round.
        frame_rounds: Rounds of these.
        passed: Ids that a deterministic pass goes through.
        passes: Rounds of these.
    """

    rings: tuple[int, ...] = (1_000, 100_000)
    batches: int = 1_000
    eager_batches: int = 400
    rounds: int = 15
    frame_ring: int = 1_000
    frame_batches: int = 150
    frame_rounds: int = 9
    passed: int = 10_000
    passes: int = 3


QUICK = Size(
    rings=(60,),
    batches=5,
    eager_batches=5,
    rounds=2,
    frame_ring=40,
    frame_batches=1,
    frame_rounds=2,
    passed=40,
    passes=1,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffers:
    """The same rows three times.

    Attributes:
        live: Ours, open for writing.
        closed: The same store, only read.
        peer: TF-Agents' buffer.
    """

    live: diskbuf.UniformReplayBuffer
    closed: diskbuf.UniformReplayBuffer
    peer: Any


def measure_graph(folder: Path, size: Size) -> list[Record]:
    """Small steps, consumed in a tf.function."""
    records = []
    for ring in size.rings:
        with _buffers(folder / f"ring-{ring}.zarr", small_steps.SPEC, small_steps.LANES, ring) as buffers:
            records += _records_of_ring(
                _in_turn(_datasets(buffers), _in_graph, batches=size.batches, rounds=size.rounds), ring
            )
    return records


def _records_of_ring(figures: Figures, ring: int) -> list[Record]:
    peer, peer_figures = _better_peer(figures)
    what = f"as_dataset({SEQUENCES}, {NUM_STEPS}) in a tf.function, ring of {ring:,}"
    compared = {
        "live": ("live", Target(at_most=0.75)),
        "live_parallel": (f"live, {_PARALLEL} parallel calls", Target(at_most=0.75)),
        "closed": ("closed", Target(at_most=0.45)),
        "host": ("closed, by NumPy on the host", None),
        "empty": ("an empty dataset of those shapes", None),
    }
    records = [
        against(
            f"graph_{name}_{ring}",
            f"{what}: {how}",
            ours=figures[name],
            peer=peer,
            peer_figures=peer_figures,
            unit=MICROSECONDS,
            target=target,
        )
        for name, (how, target) in compared.items()
    ]
    for name in ("live", "closed"):
        over = [ours - empty for ours, empty in zip(figures[name], figures["empty"], strict=True)]
        peer_over = [theirs - empty for theirs, empty in zip(peer_figures, figures["empty"], strict=True)]
        records.append(
            against(
                f"graph_{name}_above_empty_{ring}",
                f"{what}: {name}, above the empty dataset",
                ours=over,
                peer=f"{peer}, above it",
                peer_figures=peer_over,
                unit=MICROSECONDS,
            )
        )
    return records


def measure_eager(folder: Path, size: Size) -> list[Record]:
    """Small steps, consumed by a Python loop."""
    ring = size.rings[0]
    with _buffers(folder / "ring.zarr", small_steps.SPEC, small_steps.LANES, ring) as buffers:
        figures = _in_turn(_datasets(buffers), _eagerly, batches=size.eager_batches, rounds=size.rounds)
    peer, peer_figures = _better_peer(figures)
    return [
        against(
            f"eager_{name}",
            f"as_dataset({SEQUENCES}, {NUM_STEPS}) in a Python loop, ring of {ring:,}: {name.replace('_', ' ')}",
            ours=figures[name],
            peer=peer,
            peer_figures=peer_figures,
            unit=MICROSECONDS,
            target=Target(at_most=1) if name in ("live", "closed") else None,
        )
        for name in ("live", "live_parallel", "closed", "empty")
    ]


def measure_frames(folder: Path, size: Size) -> list[Record]:
    """Frames, consumed in a tf.function, beside TF-Agents and beside memcpy."""
    with _buffers(folder / "frames.zarr", _FRAMES, _FRAME_LANES, size.frame_ring) as buffers:
        datasets = _datasets(buffers)
        del datasets["host"], datasets["empty"]
        datasets["closed_parallel"] = buffers.closed.as_dataset(SEQUENCES, NUM_STEPS, num_parallel_calls=_PARALLEL)
        contenders = {name: _in_graph(dataset, size.frame_batches) for name, dataset in datasets.items()}
        copies = {f"memcpy_{threads}": _memcpy(threads, calls=size.frame_batches) for threads in (1, _PARALLEL)}
        figures = interleave({**contenders, **copies}, rounds=size.frame_rounds)
    milliseconds = {name: [value / 1e3 for value in values] for name, values in figures.items()}
    peer, peer_figures = _better_peer(milliseconds)
    what = f"as_dataset({SEQUENCES}, {NUM_STEPS}) of frames, {_batch_bytes() / 1e6:.1f} MB"
    records = []
    for name in ("live", "live_parallel", "closed", "closed_parallel"):
        # TensorFlow copies the rows of one gather in as many threads as there are processors, whoever asks for it.
        threads = _PARALLEL
        how = name.replace("_parallel", f", {_PARALLEL} parallel calls")
        for against_name, against_what, against_figures, target in (
            ("peer", peer, peer_figures, Target(at_most=0.6)),
            ("memcpy", f"memcpy in {threads} threads", milliseconds[f"memcpy_{threads}"], Target(at_most=1.5)),
            ("memcpy_1", "memcpy in 1 thread", milliseconds["memcpy_1"], None),
        ):
            records.append(
                against(
                    f"frames_{name}_vs_{against_name}",
                    f"{what}: {how}",
                    ours=milliseconds[name],
                    peer=against_what,
                    peer_figures=against_figures,
                    unit=MILLISECONDS,
                    target=target,
                )
            )
    return records


def measure_pass(folder: Path, size: Size) -> list[Record]:
    """A deterministic pass through all steps."""
    with _buffers(folder / "passed.zarr", small_steps.SPEC, _PASS_LANES, size.passed) as buffers:
        steps = _PASS_LANES * size.passed
        contenders = {
            name: _passing(
                buffer.as_dataset(_PASS_LANES, _PASS_STEPS, single_deterministic_pass=True), steps=steps, loop=loop
            )
            for name, buffer, loop in (
                ("live", buffers.live, _loop_in_graph),
                ("closed", buffers.closed, _loop_in_graph),
                ("peer", buffers.peer, _loop_in_graph),
                ("live_eager", buffers.live, _loop),
                ("peer_eager", buffers.peer, _loop),
            )
        }
        figures = interleave(contenders, rounds=size.passes)
    what = f"pass of {_PASS_LANES} lanes, {_PASS_STEPS} steps a window, {steps:,} steps"
    return [
        against(
            f"pass_{name}",
            f"{what}, {where}: {name.partition('_')[0]}",
            ours=figures[name],
            peer=f"TF-Agents, {where}",
            peer_figures=figures[peer],
            unit=STEPS_PER_SECOND,
            target=Target(at_least=50),
        )
        for name, peer, where in (
            ("live", "peer", "in a tf.function"),
            ("closed", "peer", "in a tf.function"),
            ("live_eager", "peer_eager", "in a Python loop"),
        )
    ]


@contextlib.contextmanager
def _buffers(path: Path, spec: Mapping[str, diskbuf.ArraySpec], lanes: int, length: int) -> Iterator[Buffers]:
    """Buffers that are full with the same random rows; our ring has turned."""
    rng = np.random.default_rng(0)
    rows = {
        name: rng.integers(0, 256, (lanes, length, *leaf.shape), np.uint8).astype(leaf.dtype)
        for name, leaf in spec.items()
    }
    with diskbuf.UniformReplayBuffer(dict(spec), lanes, length, path=path, seed=0) as live:
        live.extend({name: leaf[:, : length // 2] for name, leaf in rows.items()})
        live.extend(rows)
        with diskbuf.open(path) as closed:
            yield Buffers(live=live, closed=closed, peer=tf_agents_buffer(spec, rows))


def tf_agents_buffer(spec: Mapping[str, diskbuf.ArraySpec], rows: Mapping[str, Any]) -> Any:
    """Returns TF-Agents' buffer of rows [lanes, length, *shape], put where its `add_batch` would in minutes."""
    lanes, length = next(iter(rows.values())).shape[:2]
    buffer = tf_uniform_replay_buffer.TFUniformReplayBuffer(
        {name: tf.TensorSpec(leaf.shape, leaf.dtype, name) for name, leaf in spec.items()}, lanes, max_length=length
    )
    buffer.add_batch({name: leaf[:, 0] for name, leaf in rows.items()})  # makes sure that all variables are there
    flat = [leaf.reshape(lanes * length, *leaf.shape[2:]) for leaf in tf.nest.flatten(dict(rows))]
    for variable, leaf in zip(buffer._data_table.variables(), flat, strict=True):
        variable.assign(leaf)
    (ids,) = buffer._id_table.variables()
    ids.assign(np.tile(np.arange(length), lanes).reshape(ids.shape))
    buffer._last_id.assign(length - 1)
    return buffer


def _datasets(buffers: Buffers) -> dict[str, tf.data.Dataset]:
    closed = buffers.closed
    with mock.patch.object(in_graph, "view_of", return_value=None):
        host = closed.as_dataset(SEQUENCES, NUM_STEPS)
    return {
        "live": buffers.live.as_dataset(SEQUENCES, NUM_STEPS),
        "live_parallel": buffers.live.as_dataset(SEQUENCES, NUM_STEPS, num_parallel_calls=_PARALLEL),
        "closed": closed.as_dataset(SEQUENCES, NUM_STEPS),
        "host": host,
        "empty": _empty(buffers.live),
        "peer": buffers.peer.as_dataset(SEQUENCES, NUM_STEPS),
        "peer_parallel": buffers.peer.as_dataset(SEQUENCES, NUM_STEPS, num_parallel_calls=_PARALLEL),
    }


def _empty(buffer: diskbuf.UniformReplayBuffer) -> tf.data.Dataset:
    """A dataset of the same shapes that reads nothing: what iterating costs by itself, with tf.data's usual options.

    They put a buffer behind it that a thread fills, which TF-Agents' datasets have too and ours do without.
    """
    element = tf.nest.map_structure(tf.convert_to_tensor, buffer.get_next(SEQUENCES, num_steps=NUM_STEPS))
    return tf.data.Dataset.counter().map(lambda _: element)


def _better_peer(figures: Figures) -> tuple[str, list[float]]:
    """TF-Agents with or without parallel calls, whichever was faster, and its name for people."""
    name = min(("peer", "peer_parallel"), key=lambda name: float(np.median(figures[name])))
    return "TF-Agents" if name == "peer" else f"TF-Agents, {_PARALLEL} parallel calls", figures[name]


def _in_turn(
    datasets: Mapping[str, tf.data.Dataset],
    consumer: Callable[[tf.data.Dataset, int], Callable[[], float]],
    *,
    batches: int,
    rounds: int,
) -> Figures:
    return interleave({name: consumer(dataset, batches) for name, dataset in datasets.items()}, rounds=rounds)


def _in_graph(dataset: tf.data.Dataset, batches: int) -> Callable[[], float]:
    """A contender that reads elements in a tf.function; microseconds per element."""

    @tf.function
    def read(iterator: Any, count: tf.Tensor) -> tf.Tensor:
        total = 0.0
        for _ in tf.range(count):
            items, _ = next(iterator)
            first = tf.nest.flatten(items)[0]
            total += tf.cast(first[(0,) * first.shape.rank], tf.float32)
        return total

    def read_some(iterator: Any, count: int) -> None:
        read(iterator, tf.constant(count)).numpy()

    return _reading(dataset, batches, read_some)


def _eagerly(dataset: tf.data.Dataset, batches: int) -> Callable[[], float]:
    """A contender that reads elements in a Python loop; microseconds per element."""

    def read_some(iterator: Any, count: int) -> None:
        for _ in range(count):
            next(iterator)

    return _reading(dataset, batches, read_some)


def _reading(dataset: tf.data.Dataset, batches: int, read_some: Callable[[Any, int], None]) -> Callable[[], float]:
    """A contender with a new iterator for each turn.

    TensorFlow may put a buffer behind a dataset that it fills while others have their turn: it would take time from
    them, and answer from what it has read before.
    """

    def consume() -> float:
        iterator = iter(dataset)
        read_some(iterator, min(batches, _WARM_UP))
        start = time.perf_counter()
        read_some(iterator, batches)
        return (time.perf_counter() - start) / batches * 1e6

    consume()
    return consume


def _passing(dataset: tf.data.Dataset, *, steps: int, loop: Callable[[Any], Callable[[], int]]) -> Callable[[], float]:
    """A contender that makes a pass; steps per second."""
    run = loop(dataset)
    run()

    def consume() -> float:
        start = time.perf_counter()
        seen = run()
        seconds = time.perf_counter() - start
        if seen != steps:
            raise RuntimeError(f"a pass must visit {steps} steps, visited {seen}.")
        return steps / seconds

    return consume


def _loop_in_graph(dataset: tf.data.Dataset) -> Callable[[], int]:
    @tf.function
    def count() -> tf.Tensor:
        return dataset.reduce(tf.constant(0), lambda seen, element: seen + tf.size(tf.nest.flatten(element[1])[0]))

    return lambda: int(count())


def _loop(dataset: Iterable[Any]) -> Callable[[], int]:
    return lambda: sum(math.prod(info.ids.shape) for _, info in dataset)


def _batch_bytes() -> int:
    return SEQUENCES * NUM_STEPS * math.prod(_FRAMES["observation"].shape)


def _memcpy(threads: int, *, calls: int) -> Callable[[], float]:
    """A contender that copies as many bytes as a batch of frames has; microseconds per copy."""
    sources = [np.ones(part, np.uint8) for part in [_batch_bytes() // threads] * threads]
    targets = [source.copy() for source in sources]
    pool = concurrent.futures.ThreadPoolExecutor(threads)

    def copy() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            if threads == 1:
                np.copyto(targets[0], sources[0])
            else:
                list(pool.map(np.copyto, targets, sources))
        return (time.perf_counter() - start) / calls * 1e6

    return copy
