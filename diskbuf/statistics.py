"""What the values of a buffer's columns are like: counts, moments, quantiles and histograms, in bounded memory.

A buffer is gone through block by block. What is counted value by value (columns of few or of small values) is exact in
every respect. Of others the moments, extremes and counts are of all values too, each block's merged into those before
it by the updating formulas of Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance" (1983); quantiles
and histograms are those of a uniform sample, or of all values when that is asked for. Of large arrays of bytes, which
are pictures, the moments are the sample's too. Then a few more passes follow
the digits of the wanted order statistics, 16 bits at a time, through integer keys that order as the values do.
"""

import concurrent.futures
import dataclasses
import json
import math
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskbuf.episode_ends import TrajectoryRule, end_rule
from diskbuf.errors import OptionError, SpecError, WindowError
from diskbuf.scanning import Block, scan
from diskbuf.store import files
from diskbuf.store.layout import STATE_FOLDER, ColumnLayout

if TYPE_CHECKING:
    from diskbuf.replay_buffers.uniform import UniformReplayBuffer

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
STATISTICS_FILE = "statistics.json"

SAMPLE_SIZE = 100_000
_BINS = 20
_MOST_DISTINCT = 20
_PIECE = 2**16
_DIGIT_BITS = 16
_DIGITS = 2**_DIGIT_BITS
_COUNTED_BYTES = 2**22
_COLLECTED = 2**22
_BLAS_ROW = 4096
_WORKERS = 2
_TRIES = 3
_FORMAT = 1
_MEANINGLESS = ("action", "policy_info", "reward", "discount", "next_step_type")
"""What a boundary of a trajectory holds no values of."""

Progress = Callable[[int, int], object]
_Kind = Literal["counts", "int", "float"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnStatistics:
    """What the values of a leaf are like, all steps and lanes and all elements of its arrays together.

    What is said of finite values leaves NaN and the infinities out, and is None where there are no others.

    Attributes:
        path: The leaf; of complex numbers there are two, with ``.real`` and ``.imag`` behind the path.
        dtype: Its dtype.
        count: Values.
        nan_count: How many of them are NaN.
        infinity_count: How many are infinite.
        minimum: Least finite value.
        maximum: Greatest finite value.
        mean: Their arithmetic mean.
        std: Their standard deviation, of the population.
        quantiles: (q, value) for each of `QUANTILES`, with linear interpolation between order statistics.
        edges: Of the bins of the histogram, one more than bins.
        bins: How many of the values that it was made of are in each bin; the upper edge belongs to the last one.
        distinct_count: How many different finite values there are; None where they weren't counted.
        distinct: (value, how often) of each, ascending, where there are at most 20; else None.
        is_exact: Whether quantiles and histogram, and of large arrays of bytes mean and standard deviation, are of all
            finite values and not of a sample.
    """

    path: str
    dtype: str
    count: int
    nan_count: int
    infinity_count: int
    minimum: int | float | None
    maximum: int | float | None
    mean: float | None
    std: float | None
    quantiles: tuple[tuple[float, float], ...] | None
    edges: tuple[float, ...] | None
    bins: tuple[int, ...] | None
    distinct_count: int | None
    distinct: tuple[tuple[int | float, int], ...] | None
    is_exact: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Statistics:
    """What the values of some columns of a buffer are like.

    Attributes:
        first_id: First id that was read.
        next_id: End of what was read, exclusive; ids between them that were evicted meanwhile are missing.
        lanes: Number of lanes.
        columns: One for each leaf, in the order asked for.
        is_saved: Whether they come from an earlier call, and were kept beside the store.
    """

    first_id: int
    next_id: int
    lanes: int
    columns: tuple[ColumnStatistics, ...]
    is_saved: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatisticsOptions:
    """How quantiles and histograms are found where values aren't counted.

    Attributes:
        exact: Whether from all values, by more passes.
        sample_size: How many values of a column are drawn otherwise, at least 1.
        seed: Makes the draw repeatable.

    Raises:
        OptionError: When one is outside its rule.
    """

    exact: bool = False
    sample_size: int = SAMPLE_SIZE
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.exact, bool):
            raise OptionError(f"exact must be True or False, got {self.exact!r}.")
        for name, least in (("sample_size", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"{name} must be an int of at least {least}, got {value!r}.")


def column_statistics(
    buffer: "UniformReplayBuffer",
    columns: Sequence[str] | None = None,
    *,
    exact: bool = False,
    sample_size: int = SAMPLE_SIZE,
    seed: int = 0,
    progress: Progress | None = None,
) -> Statistics:
    """Goes through chosen columns of a buffer's window once and says what their values are like.

    Memory stays below some 200 MB whatever the store is. Numbers of at most 16 bits, and ints whose values span less
    than 65,536, are counted, except for large arrays of bytes; of these `exact` adds nothing. Steps that a writer
    evicts before they were read are left out.

        >>> from diskbuf import UniformReplayBuffer, specs
        >>> with UniformReplayBuffer({"action": specs.ArraySpec([], "int64")}, 2) as buffer:
        ...     for t in range(5):
        ...         buffer.add_batch({"action": np.array([t, 0])})
        ...     (action,) = column_statistics(buffer).columns
        >>> action.mean, action.distinct
        (1.0, ((0, 6), (1, 1), (2, 1), (3, 1), (4, 1)))

    Args:
        buffer: A buffer, open for reading or writing.
        columns: Paths of leaves; None for all.
        exact: Whether quantiles and histograms are those of all values; takes two to four passes where they aren't
            counted.
        sample_size: How many values of a column they are made of otherwise; all where there are fewer.
        seed: Makes the sample repeatable.
        progress: Called with (bytes done, bytes in all).

    Returns:
        The statistics.

    Raises:
        OptionError: When there is no such leaf, or an argument is outside its rule.
        WindowError: With `exact`, when a writer evicts steps faster than they can be read several times.
        StoreCorruptError: When a chunk file is missing, short or has rotten.
        ClosedError: After the buffer's `close`.
    """
    options = StatisticsOptions(exact=exact, sample_size=sample_size, seed=seed)
    store = buffer._opened()
    layouts = {column.layout.path: column.layout for column in store.columns}
    chosen = list(layouts) if columns is None else list(dict.fromkeys(columns))
    for _ in range(_TRIES):
        window = store.window()
        scan(buffer, chosen, first_id=window[0], next_id=window[1])  # refuses what isn't there
        gathering = _Gathering(buffer, [layouts[path] for path in chosen], window, options, progress)
        if gathering.run():
            return gathering.result()
    raise WindowError(
        "the window must stay while exact quantiles are found in it, but a writer evicts its steps. Leave exact out."
    )


def count_boundaries(
    buffer: "UniformReplayBuffer", columns: Sequence[str] | None = None, *, first_id: int, next_id: int
) -> int | None:
    """Counts steps between episodes that only hold a final observation: statistics of rewards have theirs too.

    Args:
        buffer: A buffer, open for reading or writing, of which only the step types are read.
        columns: The leaves that it matters for; None for all.
        first_id: Where to begin.
        next_id: Where to stop, exclusive.

    Returns:
        How many, all lanes together; None where the step types don't tell, or these leaves mean something there too.

    Raises:
        StoreCorruptError: When a chunk file is missing, short or has rotten.
        ClosedError: After the buffer's `close`.
    """
    layouts = [column.layout for column in buffer._opened().columns]
    try:
        rule = end_rule(layouts)
    except SpecError:
        return None
    chosen = [layout.path for layout in layouts] if columns is None else columns
    inside = [path.removeprefix(rule.folder) for path in chosen if path.startswith(rule.folder)]
    if not isinstance(rule, TrajectoryRule) or not any(path.split("/")[0] in _MEANINGLESS for path in inside):
        return None
    paths = [layouts[number].path for number in rule.columns]
    blocks = scan(buffer, paths, first_id=first_id, next_id=next_id)
    return sum(int(rule.is_boundary([block.columns[path] for path in paths]).sum()) for block in blocks)


class _Gathering:
    """One go through a window, and the passes that follow it."""

    def __init__(
        self,
        buffer: "UniformReplayBuffer",
        layouts: Sequence[ColumnLayout],
        window: tuple[int, int],
        options: StatisticsOptions,
        progress: Progress | None,
    ) -> None:
        self._buffer = buffer
        self._window = window
        self._lanes = buffer.batch_size
        self._progress = progress
        self._paths = [layout.path for layout in layouts]
        self._done = 0
        ids = window[1] - window[0]
        self._columns = [
            column
            for layout in layouts
            for column in _columns_of(layout, ids * self._lanes * math.prod(layout.shape), options)
        ]
        self._row_bytes = {layout.path: layout.row_bytes for layout in layouts}
        passes = max((column.most_passes for column in self._columns), default=1)
        self._total = passes * ids * sum(self._row_bytes.values())
        self._read = (*window, 0)  # first id, next id and number of ids of the last pass

    def run(self) -> bool:
        """Reads; returns whether every pass saw the same steps."""
        self._pass(self._columns, _Column.measure, _Column.merge)
        for column in self._columns:
            column.begin_selecting()
        while waiting := [column for column in self._columns if column.is_waiting]:
            expected = self._read
            self._pass(waiting, _Column.look, _Column.narrow)
            if self._read != expected:
                return False
            for column in waiting:
                column.decide()
        if self._progress is not None:
            self._progress(self._total, self._total)
        return True

    def _pass(
        self,
        columns: "Sequence[_Column]",
        look: "Callable[[_Column, _Values], Any]",
        take: "Callable[[_Column, Any], None]",
    ) -> None:
        """Looks at blocks on threads while the next ones are read, and takes what was found in their order."""
        paths = [path for path in self._paths if any(column.path == path for column in columns)]
        first_id, next_id, ids = None, self._window[1], 0
        waiting: deque[concurrent.futures.Future[list[Any]]] = deque()

        def look_at(block: Block) -> list[Any]:
            return [look(column, column.values_of(block, self._window[0])) for column in columns]

        def take_one() -> None:
            for column, found in zip(columns, waiting.popleft().result(), strict=True):
                take(column, found)

        pool = concurrent.futures.ThreadPoolExecutor(_WORKERS, "diskbuf-statistics")
        try:
            for block in scan(self._buffer, paths, first_id=self._window[0], next_id=self._window[1]):
                first_id = block.first_id if first_id is None else first_id
                next_id = block.next_id
                ids += block.next_id - block.first_id
                waiting.append(pool.submit(look_at, block))
                if len(waiting) > _WORKERS:
                    take_one()
                self._tell(sum(rows.nbytes for rows in block.columns.values()))
            while waiting:
                take_one()
        finally:
            pool.shutdown(cancel_futures=True)
        self._read = (self._window[1] if first_id is None else first_id, next_id, ids)

    def _tell(self, size: int) -> None:
        self._done += size
        if self._progress is not None:
            self._progress(min(self._done, self._total), self._total)

    def result(self) -> Statistics:
        return Statistics(
            first_id=self._read[0],
            next_id=self._read[1],
            lanes=self._lanes,
            columns=tuple(column.result() for column in self._columns),
        )


class _Values(NamedTuple):
    """A column's part of a block.

    Attributes:
        flat: [N] its values.
        sampled: [S] where those are that are in the sample.
    """

    flat: NDArray[Any]
    sampled: NDArray[np.int64]


class _Part(NamedTuple):
    """What there is to say of some values; from `finite` on it is about the finite ones."""

    seen: int
    nans: int = 0
    infinities: int = 0
    finite: int = 0
    mean: Any = 0.0
    squares: Any = 0.0  # sum of squared differences from the mean
    total: int | None = None  # sum of ints, from which their mean comes: far from zero its digits would not do
    minimum: Any = None
    maximum: Any = None
    lowest: int = 0  # of the values that are counted
    counts: NDArray[np.int64] | None = None
    digits: NDArray[np.int64] | None = None
    sample: NDArray[Any] | None = None


def _columns_of(layout: ColumnLayout, values: int, options: StatisticsOptions) -> "Iterator[_Column]":
    if layout.dtype.kind != "c":
        yield _Column(layout, values, options)
        return
    for part in ("real", "imag"):
        yield _Column(layout, values, options, part=part)


class _Column:
    """Gathers what is said of one column.

    Args:
        layout: The column.
        values: How many values are expected.
        options: How it is gone about.
        part: "real" or "imag" of complex numbers.
    """

    def __init__(
        self, layout: ColumnLayout, values: int, options: StatisticsOptions, *, part: str | None = None
    ) -> None:
        self.path = layout.path
        self._part_of = part
        self._dtype = np.dtype(f"f{layout.dtype.itemsize // 2}") if part else layout.dtype
        self._name = f"{layout.path}.{part}" if part else layout.path
        self._said_dtype = layout.dtype
        self._exact = options.exact
        self._lanes = layout.lanes
        self._elements = math.prod(layout.shape)
        self._is_array = bool(layout.shape)
        self._kind: _Kind = "counts" if self._dtype.itemsize <= 2 else "float" if self._dtype.kind == "f" else "int"
        self._counts_on = self._kind in ("counts", "int")
        rng = np.random.default_rng([options.seed, zlib.crc32(self._name.encode())])
        self._has_all = values <= options.sample_size
        self._places = np.arange(values) if self._has_all else np.sort(rng.integers(0, values, options.sample_size))
        self._bits = self._dtype.itemsize * 8
        # Of everything so far:
        self._all = _Part(0)
        self._sample: list[NDArray[Any]] = []
        # Of the order statistics that are looked for:
        self.is_waiting = False
        self._ranks: dict[int, Any] = {}
        self._targets: list[tuple[int, int, list[int]]] = []  # (prefix, values before it, ranks)
        self._shift = 0
        self._digit_counts: NDArray[np.int64] | None = None
        self._collected: list[NDArray[Any]] | None = None
        self._bins: NDArray[np.int64] | None = None

    @property
    def most_passes(self) -> int:
        """Times the column is read at most."""
        return self._bits // _DIGIT_BITS if self._exact and self._kind != "counts" else 1

    def values_of(self, block: Block, origin: int) -> _Values:
        """Takes the column's values of a block, and where those of the sample are.

        Args:
            block: Steps.
            origin: The id that places of the sample are counted from.
        """
        rows = block.columns[self.path]
        steps = rows.shape[1]
        if self._part_of is not None:
            rows = getattr(rows, self._part_of)
        flat = np.ascontiguousarray(rows).reshape(-1)
        size = self._lanes * self._elements
        start = (block.first_id - origin) * size
        low, high = np.searchsorted(self._places, [start, start + steps * size])
        step, inside = np.divmod(self._places[low:high] - start, max(1, size))
        lane, element = np.divmod(inside, max(1, self._elements))
        return _Values(flat, (lane * steps + step) * self._elements + element)  # [B, T, *shape]

    # ---- the first pass

    def measure(self, values: _Values) -> _Part:
        """Says what there is to say of a block; called by any thread."""
        flat, sample = values.flat, values.flat[values.sampled]
        if self._kind == "counts":
            if not self._counts_on:
                return _byte_limits(flat)._replace(sample=sample)
            bits = _count_bits(flat)
            return _Part(len(flat), counts=bits, sample=sample)
        if self._kind == "float":
            part = _float_moments(flat)
        else:
            part = _int_moments(flat, counts=self._counts_on)
        digits = None
        if self._exact:
            finite = flat if part.finite == len(flat) else flat[np.isfinite(flat)]
            digits = np.bincount(_keys(finite) >> np.uint64(self._bits - _DIGIT_BITS), minlength=_DIGITS)
        return part._replace(digits=digits, sample=sample)

    def merge(self, part: _Part) -> None:
        """Takes what was said of a block; blocks come in order."""
        if part.sample is not None and len(part.sample):
            self._sample.append(part.sample)
        if self._kind == "counts":
            self._merge_bits(part)
        else:
            self._merge_numbers(part)

    def _merge_bits(self, part: _Part) -> None:
        known = self._all
        if part.counts is not None and self._counts_on:
            counts = part.counts if known.counts is None else known.counts + part.counts
            self._all = known._replace(seen=known.seen + part.seen, counts=counts)
            is_varied = np.count_nonzero(counts) > _MOST_DISTINCT
            if self._bits == 8 and self._is_array and not self._exact and self._all.seen > _COUNTED_BYTES and is_varied:
                # Bytes of pictures: counting them, or adding them up, takes several times as long as reading.
                self._counts_on = False
                self._all = self._counted_moments()
            return
        if part.counts is not None:  # was under way as that was decided
            values, counts = self._counted(part)
            part = _moments_of_counts(part, values, counts)
        self._all = _merged(known, part)

    def _counted_moments(self) -> _Part:
        values, counts = self._counted(self._all)
        return _moments_of_counts(self._all, values, counts)

    def _merge_numbers(self, part: _Part) -> None:
        known = self._all
        digits = part.digits if known.digits is None else known.digits
        if known.digits is not None and part.digits is not None:
            digits = known.digits + part.digits
        counts, lowest = None, 0
        if self._counts_on:
            counts, lowest = _joined_counts(known, part)
            self._counts_on = counts is not None or (not known.finite and not part.finite)
        self._all = _merged(known, part)._replace(digits=digits, counts=counts, lowest=lowest)

    def _counted(self, part: _Part) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The finite values that were counted, ascending, and how often each was."""
        counts = np.zeros(0, np.int64) if part.counts is None else part.counts
        if self._kind == "int":
            there = counts.nonzero()[0]
            dtype = np.uint64 if self._dtype.kind == "u" else np.int64
            # Of uint64 the lowest may be above what int64 holds, and the sum wraps around to where it belongs.
            values = there.astype(np.uint64) + np.uint64(part.lowest & (2**64 - 1))
            return values.view(dtype), counts[there]
        every = np.arange(len(counts), dtype=f"u{self._dtype.itemsize}").view(self._dtype)
        there = (counts > 0) & (np.isfinite(every) if self._dtype.kind == "f" else np.True_)
        values, found = every[there], counts[there]
        if self._dtype.kind == "f":
            values = values.astype(np.float64)
        order = np.argsort(values, kind="stable")
        return values[order], found[order]

    # ---- exact order statistics

    def begin_selecting(self) -> None:
        """Settles the first pass, and says whether more have to follow."""
        if self._kind == "counts" and self._all.counts is not None:
            values, counts = self._counted(self._all)
            self._all = _moments_of_counts(self._all, values, counts)._replace(
                counts=self._all.counts, nans=self._lost(np.isnan), infinities=self._lost(np.isinf)
            )
        if not self._exact or self._all.digits is None or self._all.counts is not None or not self._all.finite:
            return
        if self._has_all:
            return
        wanted = {rank for q in QUANTILES for rank in _ranks(q, self._all.finite)}
        self._targets = [(0, 0, sorted(wanted))]
        self._shift = self._bits
        self._digit_counts = self._all.digits[None]
        self._bins = np.zeros(_BINS, np.int64)
        self.decide()

    def _lost(self, is_lost: Callable[[NDArray[Any]], NDArray[np.bool]]) -> int:
        """How many of the counted bits are no finite number."""
        if self._dtype.kind != "f" or self._all.counts is None:
            return 0
        every = np.arange(len(self._all.counts), dtype=np.uint16).view(np.float16)
        return int(self._all.counts[is_lost(every)].sum())

    def decide(self) -> None:
        """Follows the digits that were counted, or what was collected, to the order statistics."""
        if self._collected is not None:
            keys = np.sort(np.concatenate(self._collected)) if self._collected else np.empty(0, np.uint64)
            for prefix, before, ranks in self._targets:
                low = int(np.searchsorted(keys, np.uint64(prefix << self._shift)))
                for rank in ranks:
                    self._ranks[rank] = _value_of(int(keys[low + rank - before]), self._dtype)
            self._collected, self._targets, self.is_waiting = None, [], False
            return
        if self._digit_counts is None:
            return
        following: dict[tuple[int, int], list[int]] = {}
        candidates = 0
        for (prefix, before, ranks), counts in zip(self._targets, self._digit_counts, strict=True):
            ends = before + np.cumsum(counts)
            for rank in ranks:
                digit = int(np.searchsorted(ends, rank, side="right"))
                begin = int(ends[digit] - counts[digit])
                key = ((prefix << _DIGIT_BITS) | digit, begin)
                if key not in following:
                    candidates += int(counts[digit])
                following.setdefault(key, []).append(rank)
        self._targets = [(prefix, before, ranks) for (prefix, before), ranks in sorted(following.items())]
        self._shift -= _DIGIT_BITS
        if self._shift == 0:
            for prefix, _, ranks in self._targets:
                self._ranks |= dict.fromkeys(ranks, _value_of(prefix, self._dtype))
            self._digit_counts, self._targets, self.is_waiting = None, [], False
            return
        self.is_waiting = True
        if candidates <= _COLLECTED:
            self._collected, self._digit_counts = [], None
        else:
            self._digit_counts = np.zeros((len(self._targets), _DIGITS), np.int64)

    def look(self, values: _Values) -> tuple[NDArray[np.int64] | None, NDArray[Any]]:
        """Finds the values among a block's that may be order statistics; called by any thread.

        Returns:
            The block's bins, in the second pass, and the counts of the next digits or the keys themselves.
        """
        flat = values.flat
        if self._kind == "float" and self._all.nans + self._all.infinities:
            flat = flat[np.isfinite(flat)]
        bins = None
        if self._shift == self._bits - _DIGIT_BITS:
            bins = _bin_counts(flat, self._all.minimum, self._all.maximum)
        prefixes = np.array([prefix for prefix, _, _ in self._targets], np.uint64)
        keys = _keys(flat)
        table = np.zeros(_DIGITS, np.bool)
        table[prefixes >> np.uint64(self._bits - _DIGIT_BITS - self._shift)] = True
        keys = keys[table[keys >> np.uint64(self._bits - _DIGIT_BITS)]]
        head = keys >> np.uint64(self._shift)
        place = np.minimum(np.searchsorted(prefixes, head), len(prefixes) - 1)
        is_hit = prefixes[place] == head
        keys, place = keys[is_hit], place[is_hit]
        if self._collected is not None:
            return bins, keys
        digit = (keys >> np.uint64(self._shift - _DIGIT_BITS)).astype(np.int64) & (_DIGITS - 1)
        counts = np.bincount(place * _DIGITS + digit, minlength=len(prefixes) * _DIGITS)
        return bins, counts.reshape(len(prefixes), _DIGITS)

    def narrow(self, found: tuple[NDArray[np.int64] | None, NDArray[Any]]) -> None:
        """Takes what was found in a block."""
        bins, narrowed = found
        if bins is not None and self._bins is not None:
            self._bins += bins
        if self._collected is not None:
            self._collected.append(narrowed)
        elif self._digit_counts is not None:
            self._digit_counts += narrowed

    # ---- what comes of it

    def result(self) -> ColumnStatistics:
        known = self._all
        facts = ColumnStatistics(
            path=self._name,
            dtype=str(self._said_dtype),
            count=known.seen,
            nan_count=known.nans,
            infinity_count=known.infinities,
            minimum=_plain(known.minimum),
            maximum=_plain(known.maximum),
            mean=float(known.mean) if known.finite else None,
            std=float(np.sqrt(np.longdouble(known.squares) / known.finite)) if known.finite else None,
            quantiles=None,
            edges=None,
            bins=None,
            distinct_count=None,
            distinct=None,
            is_exact=True,
        )
        if not known.finite:
            return facts
        if known.counts is not None:
            values, counts = self._counted(known)
            return self._with_counts(facts, values, counts)
        if known.minimum == known.maximum:
            return self._with_counts(facts, np.array([known.minimum], self._dtype), np.array([known.finite]))
        edges = _edges(known.minimum, known.maximum)
        if self._ranks and self._bins is not None:
            quantiles = _quantiles(known.finite, lambda rank: self._ranks[rank])
            return dataclasses.replace(facts, quantiles=quantiles, edges=edges, bins=tuple(self._bins.tolist()))
        sample = np.concatenate(self._sample) if self._sample else np.empty(0, self._dtype)
        sample = np.sort(sample[np.isfinite(sample)] if self._dtype.kind == "f" else sample)
        if self._has_all and len(sample):
            return self._with_counts(facts, *np.unique(sample, return_counts=True))
        if not len(sample):
            return dataclasses.replace(facts, is_exact=False)
        if self._kind == "counts":
            wide = sample.astype(np.float64)
            facts = dataclasses.replace(facts, mean=float(wide.mean()), std=float(wide.std()))
        return dataclasses.replace(
            facts,
            quantiles=_quantiles(len(sample), lambda rank: sample[rank]),
            edges=edges,
            bins=tuple(_bin_counts(sample, known.minimum, known.maximum).tolist()),
            is_exact=False,
        )

    def _with_counts(
        self, facts: ColumnStatistics, values: NDArray[Any], counts: NDArray[np.int64]
    ) -> ColumnStatistics:
        """What values say that were counted one by one."""
        ends = np.cumsum(counts)
        quantiles = _quantiles(int(ends[-1]), lambda rank: values[np.searchsorted(ends, rank, side="right")])
        low, high = values[0], values[-1]
        is_narrow = self._dtype.kind in "biu" and int(high) - int(low) < _BINS
        if is_narrow:  # a bin for each value
            lowest, highest = int(low), int(high)
            edges = tuple(lowest - 0.5 + step for step in range(highest - lowest + 2))
            bins = np.zeros(highest - lowest + 1, np.int64)
            bins[[int(value) - lowest for value in values]] = counts
        else:
            edges, bins = _edges(low, high), _bin_counts(values, low, high, weights=counts)
        distinct = None
        if len(values) <= _MOST_DISTINCT:
            distinct = tuple((_plain(value), int(count)) for value, count in zip(values, counts, strict=True))
        return dataclasses.replace(
            facts,
            quantiles=quantiles,
            edges=edges,
            bins=tuple(bins.tolist()),
            distinct_count=len(values),
            distinct=distinct,
        )


# ---- moments


def _merged(one: _Part, other: _Part) -> _Part:
    """The moments of two sets of values together (Chan, Golub and LeVeque 1983, formula 1.5)."""
    seen, nans, infinities = one.seen + other.seen, one.nans + other.nans, one.infinities + other.infinities
    if not one.finite or not other.finite:
        rest = one if one.finite else other
        return rest._replace(seen=seen, nans=nans, infinities=infinities, counts=None, digits=None, sample=None)
    count = one.finite + other.finite
    # Longdouble has the room that sums of squares need of numbers that float64 has just room for.
    shift = np.longdouble(other.mean) - np.longdouble(one.mean)
    total = None
    if one.total is not None and other.total is not None:
        total = one.total + other.total
        shift = np.longdouble((other.total * one.finite - one.total * other.finite) / (one.finite * other.finite))
    return _Part(
        seen,
        nans,
        infinities,
        count,
        one.mean + shift * other.finite / count if total is None else total / count,
        np.longdouble(one.squares) + other.squares + shift * shift * one.finite * other.finite / count,
        total,
        min(one.minimum, other.minimum),
        max(one.maximum, other.maximum),
    )


def _float_moments(flat: NDArray[Any]) -> _Part:
    part = _Part(0)
    room = np.empty(min(_PIECE, len(flat)))
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE]
        wide = room[: len(piece)]
        wide[:] = piece
        with np.errstate(over="ignore", invalid="ignore"):
            total = wide.sum()
            mean = total / len(piece)
            wide -= mean
            squares = _sum_of_squares(wide)
        if np.isfinite(squares):  # and so is each of them
            found = _Part(len(piece), 0, 0, len(piece), mean, squares, None, float(piece.min()), float(piece.max()))
        else:
            found = _careful_moments(piece)
        part = _merged(part, found)
    return part


def _sum_of_squares(values: NDArray[np.float64]) -> Any:
    """By short rows: of long ones BLAS would make threads of its own, which get into each other's way."""
    whole = len(values) // _BLAS_ROW * _BLAS_ROW
    rows = values[:whole].reshape(-1, _BLAS_ROW)
    return np.vecdot(rows, rows).sum() + np.dot(values[whole:], values[whole:])


def _careful_moments(piece: NDArray[Any]) -> _Part:
    """Of values some of which aren't finite, or are so large that sums of squares aren't."""
    nans = int(np.isnan(piece).sum())
    finite = piece[np.isfinite(piece)].astype(np.longdouble)
    infinities = len(piece) - nans - len(finite)
    if not len(finite):
        return _Part(len(piece), nans, infinities)
    mean = finite.mean()
    squares = np.square(finite - mean).sum()
    return _Part(
        len(piece), nans, infinities, len(finite), mean, squares, None, float(finite.min()), float(finite.max())
    )


def _int_moments(flat: NDArray[Any], *, counts: bool) -> _Part:
    """Of ints of 32 or 64 bits: their differences from the least one, so that nothing overflows or is rounded away."""
    if not len(flat):
        return _Part(0)
    least, most = int(flat.min()), int(flat.max())
    part = _Part(0)
    span = most - least
    counted = np.zeros(span + 1, np.int64) if counts and span < _DIGITS else None
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE]
        if flat.dtype.itemsize == 8:
            # Subtracting in uint64 wraps around to the right difference, also of int64.
            raised = piece.view(np.uint64) - np.uint64(least & (2**64 - 1))
        else:
            raised = piece.astype(np.int64)
            raised -= least
        if counted is not None:
            counted += np.bincount(raised.view(np.int64), minlength=span + 1)
            continue
        total, wide = _int_sum(raised, span), raised.astype(np.float64)
        wide -= total / len(piece)
        found = _Part(len(piece), 0, 0, len(piece), 0.0, _sum_of_squares(wide), total, 0, span)
        part = _merged(part, found)
    if counted is not None:
        there = counted.nonzero()[0]
        part = _moments_of_counts(_Part(len(flat)), there, counted[there])._replace(counts=counted, lowest=least)
    total = (part.total or 0) + least * len(flat)
    return part._replace(total=total, mean=total / len(flat), minimum=least, maximum=most)


def _int_sum(raised: NDArray[Any], span: int) -> int:
    """The sum of at most 65,536 ints from 0 to `span`, which may be more than 64 bits hold."""
    if span < 2**47:
        return int(raised.sum())
    halves = raised.view(np.uint64)
    high, low = halves >> np.uint64(32), halves & np.uint64(2**32 - 1)
    return (int(high.sum()) << 32) + int(low.sum())


def _count_bits(flat: NDArray[Any]) -> NDArray[np.int64]:
    """[256] or [65536] how often each value of 8 or 16 bits is there, by its bits."""
    if flat.dtype == np.bool:
        there = int(np.count_nonzero(flat))
        counts: NDArray[np.int64] = np.zeros(256, np.int64)
        counts[:2] = len(flat) - there, there
        return counts
    raw = flat.view(f"u{flat.dtype.itemsize}")
    if len(raw) < _PIECE:
        return np.bincount(raw, minlength=2 ** (8 * flat.dtype.itemsize))
    if flat.dtype.itemsize == 2:
        return _tally(raw)
    even = len(raw) // 2 * 2
    pairs = _tally(raw[:even].view(np.uint16)).reshape(256, 256)  # half as long as one by one
    counts = pairs.sum(axis=0) + pairs.sum(axis=1)
    if even < len(raw):
        counts[raw[-1]] += 1
    return counts


def _tally(raw: NDArray[np.uint16]) -> NDArray[np.int64]:
    """[65536] how often each value is there. A fifth faster than bincount, and other threads go on meanwhile."""
    counts = np.zeros(_DIGITS, np.int64)
    room = np.empty(min(_PIECE, len(raw)), np.intp)
    for start in range(0, len(raw), _PIECE):
        piece = raw[start : start + _PIECE]
        index = room[: len(piece)]
        index[:] = piece
        np.add.at(counts, index, 1)
    return counts


def _byte_limits(flat: NDArray[Any]) -> _Part:
    """Of bytes whose moments come from the sample: how many there are, the least and the greatest."""
    import pyarrow as pa
    import pyarrow.compute as pc

    raw = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [None, pa.py_buffer(flat)])
    limits = pc.min_max(raw)  # several times as fast as NumPy's two
    return _Part(len(flat), finite=len(flat), minimum=limits["min"].as_py(), maximum=limits["max"].as_py())


def _moments_of_counts(part: _Part, values: NDArray[Any], counts: NDArray[np.int64]) -> _Part:
    """The moments of values that were counted, ascending."""
    count = int(counts.sum())
    if not count:
        return part._replace(counts=None)
    low, high = _plain(values[0]), _plain(values[-1])
    total = None
    if values.dtype.kind in "iu":  # they span less than 65,536, so that nothing overflows
        wide_ints = values if values.dtype.itemsize == 8 else values.astype(np.int64)
        raised = (wide_ints - wide_ints[0]).astype(np.int64)
        sum_of_raised = int((raised * counts).sum())
        total, wide, mean = sum_of_raised + low * count, raised.astype(np.longdouble), sum_of_raised / count
        squares = (np.square(wide - mean) * counts).sum()
        mean = total / count
    else:
        wide = values.astype(np.longdouble)
        mean = (wide * counts).sum() / count
        squares = (np.square(wide - mean) * counts).sum()
    return part._replace(finite=count, mean=mean, squares=squares, total=total, minimum=low, maximum=high, counts=None)


def _joined_counts(one: _Part, other: _Part) -> tuple[NDArray[np.int64] | None, int]:
    """The counts of ints of two blocks together and the int that they begin at; None where they span too much."""
    known = [part for part in (one, other) if part.finite]
    if not known or any(part.counts is None for part in known):
        return None, 0
    lowest, highest = min(part.minimum for part in known), max(part.maximum for part in known)
    if highest - lowest >= _DIGITS:
        return None, 0
    counts = np.zeros(highest - lowest + 1, np.int64)
    for part in known:
        begin = part.lowest - lowest
        counts[begin : begin + len(part.counts)] += part.counts  # type: ignore[arg-type]  # looked at above
    return counts, lowest


# ---- order statistics and bins


def _keys(values: NDArray[Any]) -> NDArray[np.uint64]:
    """Unsigned ints that order as the values do, which are finite (Herf, "Radix Tricks", 2001)."""
    bits = values.dtype.itemsize * 8
    unsigned: NDArray[Any] = values.view(f"u{values.dtype.itemsize}")
    sign = unsigned.dtype.type(1 << (bits - 1))
    if values.dtype.kind == "i":
        unsigned = unsigned ^ sign
    elif values.dtype.kind == "f":
        negative = (values.view(f"i{values.dtype.itemsize}") >> (bits - 1)).view(unsigned.dtype)  # all ones
        unsigned = unsigned ^ (negative | sign)
    return unsigned.astype(np.uint64)


def _value_of(key: int, dtype: np.dtype[Any]) -> Any:
    bits = dtype.itemsize * 8
    sign = 1 << (bits - 1)
    if dtype.kind == "i":
        key ^= sign
    elif dtype.kind == "f":
        key ^= sign if key & sign else (1 << bits) - 1
    return np.array([key], f"u{dtype.itemsize}").view(dtype)[0]


def _ranks(q: float, count: int) -> tuple[int, int]:
    """The places, from 0, of the order statistics on both sides of a quantile."""
    place = q * (count - 1)
    return math.floor(place), math.ceil(place)


def _quantiles(count: int, order_statistic: Callable[[int], Any]) -> tuple[tuple[float, float], ...]:
    found = []
    for q in QUANTILES:
        low, high = _ranks(q, count)
        below, above = _plain(order_statistic(low)), _plain(order_statistic(high))
        weight = q * (count - 1) - low
        # Both products stay finite where the difference would not.
        value = below if below == above else below * (1 - weight) + above * weight
        found.append((q, value))
    return tuple(found)


def _edges(low: Any, high: Any) -> tuple[float, ...]:
    """[_BINS + 1] from the least value to the greatest."""
    low, high = float(low), float(high)
    if low == high:
        return (low, high)
    return tuple(low * (1 - step / _BINS) + high * (step / _BINS) for step in range(_BINS + 1))


def _bin_counts(
    values: NDArray[Any], low: Any, high: Any, *, weights: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Counts values, which are not outside of [low, high], by bin."""
    if low == high:
        return np.array([len(values) if weights is None else int(weights.sum())])
    if values.dtype.kind in "iu" and values.dtype.itemsize == 8:
        raised = values.view(np.uint64) - np.uint64(int(low) & (2**64 - 1))
        share = raised.astype(np.float64) / float(int(high) - int(low))
    else:
        # By halves, because the difference of two floats may be more than a float.
        half, width = float(low) / 2, float(high) / 2 - float(low) / 2
        share = (values.astype(np.float64) / 2 - half) / width
    place = np.clip((share * _BINS).astype(np.int64), 0, _BINS - 1)
    if weights is None:
        return np.bincount(place, minlength=_BINS)
    return np.bincount(place, weights.astype(np.float64), minlength=_BINS).astype(np.int64)


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return int(value) if isinstance(value, bool) else value


# ---- kept beside the store


def save_statistics(
    buffer: "UniformReplayBuffer",
    statistics: Statistics,
    *,
    exact: bool = False,
    sample_size: int = SAMPLE_SIZE,
    seed: int = 0,
) -> bool:
    """Keeps statistics in the store's folder `.diskbuf`, until its window moves. One file, replaced as a whole.

    Args:
        buffer: The buffer that they are of.
        statistics: What `column_statistics` returned.
        exact: As they were made.
        sample_size: As they were made.
        seed: As they were made.

    Returns:
        Whether they were kept; they aren't where the window has moved already.

    Raises:
        OptionError: When the store isn't one on this machine.
        OSError: When the file can't be written.
        ClosedError: After the buffer's `close`.
    """
    options = StatisticsOptions(exact=exact, sample_size=sample_size, seed=seed)
    if not isinstance(buffer.path, Path):
        raise OptionError(f"statistics must be saved beside a store on this machine, got {buffer.path!r}.")
    state = _state_of(buffer)
    if (statistics.first_id, statistics.next_id) != (state["first_id"], state["next_id"]):
        return False
    document = {
        "format": _FORMAT,
        "store": state,
        "options": dataclasses.asdict(options),
        "statistics": dataclasses.asdict(statistics),
    }
    data = json.dumps(document, allow_nan=False, ensure_ascii=False).encode()
    files.replace_file(buffer.path / STATE_FOLDER / STATISTICS_FILE, data, sync=False)
    return True


def saved_statistics(
    buffer: "UniformReplayBuffer",
    columns: Sequence[str] | None = None,
    *,
    exact: bool = False,
    sample_size: int = SAMPLE_SIZE,
    seed: int = 0,
) -> Statistics | None:
    """Returns statistics that were saved, when they are still what `column_statistics` would find.

    Args:
        buffer: A buffer, open for reading or writing.
        columns: As in `column_statistics`.
        exact: As in `column_statistics`.
        sample_size: As in `column_statistics`.
        seed: As in `column_statistics`.

    Returns:
        The statistics of these columns; None where none are saved, not of all of them, made otherwise, or of another
        window.

    Raises:
        OptionError: When an argument is outside its rule.
        ClosedError: After the buffer's `close`.
    """
    options = StatisticsOptions(exact=exact, sample_size=sample_size, seed=seed)
    state = _state_of(buffer)
    if not isinstance(buffer.path, Path):
        return None
    try:
        document = json.loads((buffer.path / STATE_FOLDER / STATISTICS_FILE).read_bytes())
        if (document["format"], document["store"], document["options"]) != (
            _FORMAT,
            state,
            dataclasses.asdict(options),
        ):
            return None
        found = _statistics_from(document["statistics"])
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None  # there are none, or nobody can read them: they are made anew
    by_leaf: dict[str, list[ColumnStatistics]] = {}
    layouts = {column.layout.path: column.layout for column in buffer._opened().columns}
    for column in found.columns:
        is_part = column.dtype.startswith("complex")
        by_leaf.setdefault(column.path.rpartition(".")[0] if is_part else column.path, []).append(column)
    wanted = list(layouts) if columns is None else list(dict.fromkeys(columns))
    if any(path not in by_leaf for path in wanted):
        return None
    return dataclasses.replace(found, columns=tuple(entry for path in wanted for entry in by_leaf[path]), is_saved=True)


def _statistics_from(value: Mapping[str, Any]) -> Statistics:
    columns = tuple(
        ColumnStatistics(**{name: _as_tuples(entry) for name, entry in column.items()}) for column in value["columns"]
    )
    return Statistics(**{**value, "columns": columns})


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _state_of(buffer: "UniformReplayBuffer") -> dict[str, Any]:
    """What tells which steps are in the window; rows never change, and no id comes twice in a generation and run."""
    store = buffer._opened()
    first_id, next_id = store.window()
    manifest = store.manifest
    return {
        "created": manifest.created,
        "generation": manifest.generation,
        "runs": list(manifest.runs),
        "first_id": first_id,
        "next_id": next_id,
    }
