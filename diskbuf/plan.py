"""Index arithmetic: which ids and lanes a request reads. Pure functions; knows no files and no TensorFlow.

Rows are addressed by one flat number, ``(id - first_id) * lanes + lane``, because that is how a column lies in memory.
Random draws are counter-based: batch k of seed s is a function of (s, k), so that a number is enough to resume a read.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_WORD = 0xFFFFFFFFFFFFFFFF
_GAMMA = 0x9E3779B97F4A7C15
_FEW_STEPS = 6


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators")."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def derive_seed(seed: int, stream: int) -> int:
    """Returns the 64-bit seed of an independent stream of `seed`."""
    return int(_mix(_mix(np.array([seed & _WORD], np.uint64)) ^ np.array([stream & _WORD], np.uint64))[0])


def uniforms(seed: int, first_batch: int, *, batches: int, count: int) -> NDArray[np.float64]:
    """Draws `count` numbers for each of `batches` consecutive batches; a pure function of its arguments.

    Args:
        seed: Any int; taken modulo 2**64.
        first_batch: Number of the first batch, counted from 0.
        batches: How many batches.
        count: Numbers in a batch.

    Returns:
        [batches, count] float64 in [0, 1), multiples of 2**-53.
    """
    numbers = np.arange(first_batch, first_batch + batches, dtype=np.uint64)
    keys = _mix(_mix(np.array([seed & _WORD], np.uint64)) + numbers * np.uint64(_GAMMA))
    counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    bits = _mix(keys[:, None] + counters) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


class Starts(NamedTuple):
    """Where a sequence may start: ids of a window from which it neither runs out nor spans a restart.

    Attributes:
        total: How many ids a sequence may start at.
        pieces: None when these are the first `total` ids of the window; else what to add to the n-th start's number,
            [S], to get its distance from the window's first id, and the number from which on each addend counts, [S].
    """

    total: int
    pieces: tuple[NDArray[np.int64], NDArray[np.int64]] | None


def sequence_starts(first_id: int, next_id: int, *, num_steps: int, runs: Sequence[int] = ()) -> Starts:
    """Lists the ids at which a sequence may start.

    Args:
        first_id: Start of the window.
        next_id: End of the window, exclusive.
        num_steps: Steps of a sequence, at least 1.
        runs: Ascending first ids of the runs that wrote the window.

    Returns:
        The starts; none when no run has `num_steps` ids in the window.
    """
    if num_steps == 1 or not runs or runs[-1] <= first_id:
        return Starts(max(0, next_id - first_id - num_steps + 1), None)
    kept = [
        (low, high - low - num_steps + 1)
        for low, high in segments(first_id, next_id, runs=runs)
        if high - low >= num_steps
    ]
    counts = np.array([count for _, count in kept], np.int64)
    numbers = np.cumsum(counts) - counts
    return Starts(int(counts.sum()), (np.array([low - first_id for low, _ in kept], np.int64) - numbers, numbers))


def segments(first_id: int, next_id: int, *, runs: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Cuts the window at the starts of runs, so that no piece spans a restart; returns [low, high), none empty."""
    cuts = [first_id, *(run for run in runs if first_id < run < next_id), next_id]
    return [(low, high) for low, high in itertools.pairwise(cuts) if low < high]


def draw_rows(draws: NDArray[np.float64], starts: Starts, *, lanes: int) -> NDArray[np.int64]:
    """Turns draws into flat rows of sequence starts, uniform over starts and lanes.

    Args:
        draws: [K] in [0, 1).
        starts: Where a sequence may start; `total` at least 1.
        lanes: Number of lanes.

    Returns:
        [K] flat rows ``(id - first_id) * lanes + lane``.
    """
    rows: NDArray[np.int64] = (draws * (starts.total * lanes)).astype(np.int64)
    if starts.pieces is not None:
        addends, numbers = starts.pieces
        rows += addends[np.searchsorted(numbers, rows // lanes, side="right") - 1] * lanes
    return rows


def sequence_rows(starts: NDArray[np.int64], *, num_steps: int, lanes: int) -> NDArray[np.int64]:
    """Returns the flat rows [K, num_steps] of sequences that start at the flat rows [K]."""
    if num_steps > _FEW_STEPS:
        return starts[:, None] + np.arange(0, num_steps * lanes, lanes)
    rows = np.empty((len(starts), num_steps), np.int64)
    for step in range(num_steps):  # numpy's inner loop would be as short as the sequence
        np.add(starts, step * lanes, out=rows[:, step])
    return rows


class RandomPlanner:
    """Plans the random batches of a seed. A plan depends on seed, batch number, request and window, on nothing else.

    numpy's cost is per call, so draws, and plans while neither window nor request changes, are made a block at a time.
    Threads may share a planner.

    Args:
        seed: Any int; taken modulo 2**64.
        lanes: Number of lanes.
    """

    def __init__(self, seed: int, *, lanes: int) -> None:
        self.seed = seed
        self.lanes = lanes
        self._numbers = itertools.count()
        # Each replaced as a whole: (count, first batch, draws) and (key, first batch, rows, ids).
        self._drawn: tuple[int, int, NDArray[np.float64]] = (0, 0, np.empty((0, 0)))
        self._planned: tuple[Any, int, Any, Any] = (None, 0, (), ())
        self._latest: tuple[int, int, int | None] | None = None

    def next_batch(self) -> int:
        """Returns the number of the next batch, each once."""
        return next(self._numbers)

    def plan(
        self, batch: int, starts: Starts, *, count: int, num_steps: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Chooses the rows of a batch, uniform over starts and lanes.

        Args:
            batch: Its number.
            starts: Where a sequence may start; `total` at least 1.
            count: Sequences K in the batch.
            num_steps: Steps T of a sequence; None for single steps without a time axis.

        Returns:
            Flat rows ``(id - first_id) * lanes + lane`` and ids less first_id, each [K] or [K, T]; read only.
        """
        key = (starts.total, count, num_steps)
        planned, first, rows, ids = self._planned
        if planned == key and starts.pieces is None and 0 <= batch - first < len(rows):
            return rows[batch - first], ids[batch - first]
        if self._latest != key or starts.pieces is not None:
            self._latest = key
            return self._rows(self._draws(batch, count), starts, num_steps)
        draws = uniforms(self.seed, batch, batches=_block_batches(count * (num_steps or 1)), count=count)
        rows, ids = self._rows(draws.reshape(-1), starts, num_steps)
        shape = (len(draws), count, *rows.shape[1:])
        rows, ids = rows.reshape(shape), ids.reshape(shape)
        self._planned = (key, batch, rows, ids)
        return rows[0], ids[0]

    def _draws(self, batch: int, count: int) -> NDArray[np.float64]:
        drawn_count, first, draws = self._drawn
        if drawn_count != count or not 0 <= batch - first < len(draws):
            draws = uniforms(self.seed, batch, batches=_block_batches(count), count=count)
            first = batch
            self._drawn = (count, first, draws)
        chosen: NDArray[np.float64] = draws[batch - first]
        return chosen

    def _rows(
        self, draws: NDArray[np.float64], starts: Starts, num_steps: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows = draw_rows(draws, starts, lanes=self.lanes)
        if num_steps is not None:
            rows = sequence_rows(rows, num_steps=num_steps, lanes=self.lanes)
        return rows, rows // self.lanes


def _block_batches(size: int) -> int:
    """How many batches of a size to make at a time: enough to share numpy's cost per call, few enough for the cache."""
    return max(1, min(32, 2**14 // size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassRequest:
    """A single deterministic pass over a window.

    Attributes:
        sample_batch_size: Lanes to a batch, None for no batch axis.
        num_steps: Steps to a window, None for single steps without a time axis.
        window_shift: Steps from one window's start to the next one's, None for `num_steps`.
        drop_remainder: Leave out batches of fewer lanes and windows of fewer steps.
    """

    sample_batch_size: int | None
    num_steps: int | None
    window_shift: int | None
    drop_remainder: bool


def pass_batches(
    first_id: int, next_id: int, *, lanes: int, request: PassRequest, runs: Sequence[int] = ()
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yields the ids and lanes of each element of a deterministic pass.

    Groups of `sample_batch_size` lanes come one after the other (lanes 0 to b-1 first); within a group, time goes
    forward. Windows start every `window_shift` steps and stay inside one run; the last ones hold fewer steps, and the
    last group fewer lanes, unless `drop_remainder`.

    Args:
        first_id: Start of the window.
        next_id: End of the window, exclusive.
        lanes: Number of lanes.
        request: What to read.
        runs: Ascending first ids of the runs that wrote the window.

    Yields:
        ids and lanes, both of the element's shape: [], [T], [b] or [b, T].
    """
    spans = list(_pass_spans(first_id, next_id, request=request, runs=runs))
    group = request.sample_batch_size or 1
    for low in range(0, lanes, group):
        chosen = np.arange(low, min(low + group, lanes), dtype=np.int64)
        if request.drop_remainder and len(chosen) < group:
            return
        for start, stop in spans:
            ids = np.broadcast_to(np.arange(start, stop, dtype=np.int64), (len(chosen), stop - start))
            shape_of = (
                0 if request.sample_batch_size is None else slice(None),
                0 if request.num_steps is None else slice(None),
            )
            yield ids[shape_of], np.broadcast_to(chosen[:, None], ids.shape)[shape_of]


def _pass_spans(first_id: int, next_id: int, *, request: PassRequest, runs: Sequence[int]) -> Iterator[tuple[int, int]]:
    size = request.num_steps or 1
    shift = size if request.window_shift is None or request.num_steps is None else request.window_shift
    for low, high in segments(first_id, next_id, runs=runs):
        for start in range(low, high, shift):
            stop = min(start + size, high)
            if stop - start == size or not request.drop_remainder:
                yield start, stop
