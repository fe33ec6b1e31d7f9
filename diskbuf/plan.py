"""Index arithmetic: which ids and lanes a request reads. Pure functions; knows no files and no TensorFlow.

Rows are addressed by one flat number, ``(id - first_id) * lanes + lane``, because that is how a column lies in memory.
Random draws are counter-based: batch k of seed s is a function of (s, k), so that a number is enough to resume a read.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import OptionError

_WORD = 0xFFFFFFFFFFFFFFFF
_GAMMA = 0x9E3779B97F4A7C15
_FEW_STEPS = 6
_FEISTEL_ROUNDS = 6
_MOST_BATCHES = 2**62


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finalizer (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators")."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def derive_seed(seed: int, stream: int) -> int:
    """Returns the 64-bit seed of an independent stream of `seed`."""
    return int(_mix(_mix(np.array([seed & _WORD], np.uint64)) ^ np.array([stream & _WORD], np.uint64))[0])


def uniforms(seed: int, numbers: NDArray[np.uint64], *, count: int) -> NDArray[np.float64]:
    """Draws `count` numbers for each of some batches; a pure function of its arguments.

    Args:
        seed: Any int; taken modulo 2**64.
        numbers: [batches] uint64 numbers of the batches.
        count: Draws in a batch.

    Returns:
        [batches, count] float64 in [0, 1), multiples of 2**-53.
    """
    keys = _mix(_mix(np.array([seed & _WORD], np.uint64)) + numbers * np.uint64(_GAMMA))
    counters = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)
    bits = _mix(keys[:, None] + counters) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def permuted(positions: NDArray[np.int64], size: int, *, seed: int) -> NDArray[np.int64]:
    """Returns where a permutation of `size` numbers sends some of them, without making the others.

    A Feistel network over at most 4 times as many numbers, walked until it lands inside: Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains" (2002). With 6 rounds it is even enough to shuffle by, not to keep secrets.

    Args:
        positions: [N] from 0 to size - 1.
        size: How many numbers are permuted, at most 2**62.
        seed: Which permutation; taken modulo 2**64.

    Returns:
        [N] from 0 to size - 1, different ones for different positions.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = [np.uint64(derive_seed(seed, number)) for number in range(_FEISTEL_ROUNDS)]
    found = positions.astype(np.uint64)
    outside = np.arange(len(found))
    while len(outside):
        left, right = found[outside] >> half, found[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        found[outside] = (left << half) | right
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """Which of the batches of a read are one reader's own: of every `shards`, the one at `index`, from `start` on.

    Attributes:
        start: How many of its own batches the reader leaves out, to go on where another stopped.
        index: Number of this reader, from 0.
        shards: How many readers share the batches.
    """

    start: int = 0
    index: int = 0
    shards: int = 1

    def __post_init__(self) -> None:
        if self.start < 0:
            raise OptionError(f"start must be an int of at least 0, got {self.start}.")
        if self.shards < 1 or not 0 <= self.index < self.shards:
            raise OptionError(
                f"shard must be an index from 0 and a count above it, got index {self.index} and count {self.shards}."
            )
        if (self.start + 1) * self.shards > _MOST_BATCHES:
            raise OptionError(
                f"start times the count of shards must be at most 2**62, got {self.start} times {self.shards}."
            )

    def number(self, batch: int) -> int:
        """The number among all batches of the reader's own batch `batch`, counted from its start."""
        return (self.start + batch) * self.shards + self.index

    def numbers(self, batch: int, batches: int) -> NDArray[np.uint64]:
        """The numbers of `batches` own batches from `batch` on, modulo 2**64, [batches]."""
        return np.uint64(self.number(batch) & _WORD) + np.arange(batches, dtype=np.uint64) * np.uint64(self.shards)


class SequenceStarts(Protocol):
    """Where a sequence may start: pairs of an id and a lane, to be drawn from uniformly."""

    @property
    def pairs(self) -> int:
        """How many there are."""

    @property
    def key(self) -> int | None:
        """Equal keys of starts mean equal plans; None when nothing is known."""

    def draw(self, draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """Turns draws into flat rows of sequence starts, uniform over the pairs.

        Args:
            draws: [*K] in [0, 1).

        Returns:
            [*K] flat rows ``(id - first_id) * lanes + lane``.
        """


class WindowStarts(NamedTuple):
    """The ids of a window from which a sequence neither runs out nor spans a restart, in each lane.

    Attributes:
        total: How many ids a sequence may start at.
        lanes: Number of lanes.
        pieces: None when these are the first `total` ids of the window; else what to add to the n-th start's number,
            [S], to get its distance from the window's first id, and the number from which on each addend counts, [S].
    """

    total: int
    lanes: int
    pieces: tuple[NDArray[np.int64], NDArray[np.int64]] | None

    @property
    def pairs(self) -> int:
        """How many (id, lane) a sequence may start at."""
        return self.total * self.lanes

    @property
    def key(self) -> int | None:
        """The number of ids, where they are the window's first ones."""
        return self.total if self.pieces is None else None

    def draw(self, draws: NDArray[np.float64]) -> NDArray[np.int64]:
        """As in `SequenceStarts`."""
        rows: NDArray[np.int64] = (draws * self.pairs).astype(np.int64)
        if self.pieces is not None:
            addends, numbers = self.pieces
            rows += addends[np.searchsorted(numbers, rows // self.lanes, side="right") - 1] * self.lanes
        return rows


def sequence_starts(
    first_id: int, next_id: int, *, lanes: int, num_steps: int, runs: Sequence[int] = ()
) -> WindowStarts:
    """Lists where a sequence may start.

    Args:
        first_id: Start of the window.
        next_id: End of the window, exclusive.
        lanes: Number of lanes.
        num_steps: Steps of a sequence, at least 1.
        runs: Ascending first ids of the runs that wrote the window.

    Returns:
        The starts; none when no run has `num_steps` ids in the window.
    """
    if num_steps == 1 or not runs or runs[-1] <= first_id:
        return WindowStarts(max(0, next_id - first_id - num_steps + 1), lanes, None)
    kept = [
        (low, high - low - num_steps + 1)
        for low, high in segments(first_id, next_id, runs=runs)
        if high - low >= num_steps
    ]
    counts = np.array([count for _, count in kept], np.int64)
    numbers = np.cumsum(counts) - counts
    addends = np.array([low - first_id for low, _ in kept], np.int64) - numbers
    return WindowStarts(int(counts.sum()), lanes, (addends, numbers))


def segments(first_id: int, next_id: int, *, runs: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Cuts the window at the starts of runs, so that no piece spans a restart; returns [low, high), none empty."""
    cuts = [first_id, *(run for run in runs if first_id < run < next_id), next_id]
    return [(low, high) for low, high in itertools.pairwise(cuts) if low < high]


def sequence_rows(starts: NDArray[np.int64], *, num_steps: int, lanes: int) -> NDArray[np.int64]:
    """Returns the flat rows [K, num_steps] of sequences that start at the flat rows [K]."""
    if num_steps > _FEW_STEPS:
        return starts[:, None] + np.arange(0, num_steps * lanes, lanes)
    rows = np.empty((len(starts), num_steps), np.int64)
    for step in range(num_steps):  # numpy's inner loop would be as short as the sequence
        np.add(starts, step * lanes, out=rows[:, step])
    return rows


_ALL = Share()


class RandomPlanner:
    """Plans the random batches of a seed. A plan depends on seed, batch number, request and window, on nothing else.

    numpy's cost is per call, so draws, and plans while neither window nor request changes, are made a block at a time.
    Threads may share a planner.

    Args:
        seed: Any int; taken modulo 2**64.
        lanes: Number of lanes.
        share: Which batches are this planner's own; it counts them from 0.
    """

    def __init__(self, seed: int, *, lanes: int, share: Share = _ALL) -> None:
        self.seed = seed
        self.lanes = lanes
        self.share = share
        self._batches = itertools.count()
        # Each replaced as a whole: (count, first batch, draws) and (key, first batch, rows, ids).
        self._drawn: tuple[int, int, NDArray[np.float64]] = (0, 0, np.empty((0, 0)))
        self._planned: tuple[Any, int, Any, Any] = (None, 0, (), ())
        self._latest: tuple[int | None, int, int | None] | None = None

    def next_batch(self) -> int:
        """Returns the number of the next batch, each once."""
        return next(self._batches)

    def draws(self, batch: int, batches: int, *, count: int) -> NDArray[np.float64]:
        """Returns the draws of `batches` batches from `batch` on, [batches, count] in [0, 1)."""
        return uniforms(self.seed, self.share.numbers(batch, batches), count=count)

    def plan(
        self, batch: int, starts: SequenceStarts, *, count: int, num_steps: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Chooses the rows of a batch, uniform over starts and lanes.

        Args:
            batch: Its number.
            starts: Where a sequence may start; at least one pair.
            count: Sequences K in the batch.
            num_steps: Steps T of a sequence; None for single steps without a time axis.

        Returns:
            Flat rows ``(id - first_id) * lanes + lane`` and ids less first_id, each [K] or [K, T]; read only.
        """
        known = starts.key
        key = (known, count, num_steps)
        planned, first, rows, ids = self._planned
        if planned == key and known is not None and 0 <= batch - first < len(rows):
            return rows[batch - first], ids[batch - first]
        if self._latest != key or known is None:
            self._latest = key
            return self.plan_of(self._next_draws(batch, count), starts, num_steps=num_steps)
        draws = self.draws(batch, _block_batches(count * (num_steps or 1)), count=count)
        rows, ids = self.plan_of(draws, starts, num_steps=num_steps)
        self._planned = (key, batch, rows, ids)
        return rows[0], ids[0]

    def plan_of(
        self, draws: NDArray[np.float64], starts: SequenceStarts, *, num_steps: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As `plan`, for draws [*K]: rows and ids, each [*K] or [*K, T]."""
        rows = starts.draw(draws.reshape(-1))  # numpy's loops are fastest over one axis
        if num_steps is not None:
            rows = sequence_rows(rows, num_steps=num_steps, lanes=self.lanes)
        shape = draws.shape + rows.shape[1:]
        return rows.reshape(shape), (rows // self.lanes).reshape(shape)

    def _next_draws(self, batch: int, count: int) -> NDArray[np.float64]:
        drawn_count, first, draws = self._drawn
        if drawn_count != count or not 0 <= batch - first < len(draws):
            draws = self.draws(batch, _block_batches(count), count=count)
            first = batch
            self._drawn = (count, first, draws)
        chosen: NDArray[np.float64] = draws[batch - first]
        return chosen


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


class PassPlan:
    """The elements of a deterministic pass over a window, numbered from 0.

    Groups of `sample_batch_size` lanes come one after the other (lanes 0 to b-1 first); within a group, time goes
    forward. Windows start every `window_shift` steps and stay inside one run; the last ones hold fewer steps, and the
    last group fewer lanes, unless `drop_remainder`.

    Args:
        first_id: Start of the window.
        next_id: End of the window, exclusive.
        lanes: Number of lanes.
        request: What to read.
        runs: Ascending first ids of the runs that wrote the window.

    Attributes:
        total: How many elements there are.
    """

    def __init__(
        self, first_id: int, next_id: int, *, lanes: int, request: PassRequest, runs: Sequence[int] = ()
    ) -> None:
        self._request = request
        self._lanes = lanes
        self._size = request.num_steps or 1
        self._group = request.sample_batch_size or 1
        has_shift = request.window_shift is not None and request.num_steps is not None
        self._shift = request.window_shift if has_shift and request.window_shift is not None else self._size
        pieces = segments(first_id, next_id, runs=runs)
        self._lows = np.array([low for low, _ in pieces], np.int64)
        self._highs = np.array([high for _, high in pieces], np.int64)
        lengths = self._highs - self._lows
        if request.drop_remainder:
            counts = np.where(lengths >= self._size, (lengths - self._size) // self._shift + 1, 0)
            groups = lanes // self._group
        else:
            counts = -(-lengths // self._shift)
            groups = -(-lanes // self._group)
        self._ends = np.cumsum(counts)
        self._windows = int(counts.sum())
        self.total = groups * self._windows

    def block(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the ids and lanes of elements, as many of them as have the first one's shape.

        Args:
            numbers: [N] ascending numbers of elements, at least one, all below `total`.

        Returns:
            ids and lanes, both [n, *element], n at most N, an element being [], [T], [b] or [b, T].
        """
        group, window = np.divmod(numbers, self._windows)
        piece = np.searchsorted(self._ends, window, side="right")
        before = np.where(piece > 0, self._ends[piece - 1], 0)
        starts = self._lows[piece] + (window - before) * self._shift
        steps = np.minimum(self._size, self._highs[piece] - starts)
        width = np.minimum(self._group, self._lanes - group * self._group)
        differs = (steps != steps[0]) | (width != width[0])
        like_first = int(differs.argmax()) if differs.any() else len(numbers)
        shape = (like_first, int(width[0]), int(steps[0]))
        ids = np.broadcast_to(starts[:like_first, None, None] + np.arange(shape[2]), shape)
        lanes = np.broadcast_to((group[:like_first] * self._group)[:, None, None] + np.arange(shape[1])[:, None], shape)
        chosen = (
            slice(None),
            0 if self._request.sample_batch_size is None else slice(None),
            0 if self._request.num_steps is None else slice(None),
        )
        return ids[chosen], lanes[chosen]
