"""What pictures of a store are drawn from: its episodes, samples of its columns and the pace of its runs, each bounded.

A store of any size is summed up in some MiB: episodes in bins of ids, columns in a sample of their values.
"""

import collections
import dataclasses
import datetime as dt
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from diskbuf.episode_ends import EndRule, end_rule
from diskbuf.episode_table import episode_blocks
from diskbuf.errors import OptionError, SpecError, WindowError
from diskbuf.inspection import store_files
from diskbuf.scanning import Block, scan
from diskbuf.specs import ArraySpec
from diskbuf.store.layout import Leaf
from diskbuf_tools.pictures import spec_leaves
from diskbuf_tools.stores import unknown

if TYPE_CHECKING:
    import pyarrow as pa

    from diskbuf import UniformReplayBuffer

Kind = Literal["returns", "lengths", "actions", "rewards", "columns", "throughput"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BINS = 240
EXACT_EPISODES = 1000
"""Of so many episodes each is drawn; of more, bins of them."""

_THINNED = 2**16
_READ_VALUES = 2**24
_READ_VALUES_AFAR = 2**20
_SPREAD = 64
_SPREAD_AFAR = 8
_KEPT_VALUES = 2**18
_MOST_ELEMENTS = 6
_MOST_DISTINCT = 24
_COUNTED_RANGE = 2**12
_MEANINGLESS = ("action", "policy_info", "reward", "discount")
"""What the boundary row of a trajectory holds no values of."""


# ---- what the leaves are


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roles:
    """Which leaves of a spec are what.

    Attributes:
        leaves: All specs by path.
        rule: Where episodes end; None when nothing says so.
        why_no_episodes: What is missing then.
        step_types: Paths of the leaves that the rule looks at.
        reward: The scalar that returns are sums of; None without.
        actions: The leaves of the action.
    """

    leaves: Mapping[str, ArraySpec]
    rule: EndRule | None
    why_no_episodes: str | None
    step_types: tuple[str, ...]
    reward: str | None
    actions: tuple[str, ...]

    @property
    def boundaries(self) -> tuple[str, str] | None:
        """Paths of `step_type` and `next_step_type`, where episodes have boundary rows; else None."""
        return (self.step_types[0], self.step_types[1]) if len(self.step_types) == 2 else None


def roles_of(buffer: "UniformReplayBuffer", *, ends: str | None = None, reward: str | None = None) -> Roles:
    """Finds out which leaves are what.

    Args:
        buffer: A buffer, open for reading.
        ends: The bool leaf that is True at the last step of an episode; None goes by the step types.
        reward: The reward; None takes the leaf of that name.

    Raises:
        OptionError: When a named leaf isn't there or of no use.
    """
    leaves = spec_leaves(buffer)
    for option, path in (("--ends", ends), ("--reward", reward)):
        if path is not None and path not in leaves:
            raise OptionError(unknown(option, path, list(leaves)))
    if ends is not None and (leaves[ends].shape or leaves[ends].dtype != np.bool):
        raise OptionError(f"--ends must be a bool [] leaf, got {_kind(leaves[ends])}. Name another one.")
    if reward is not None and not _is_real_scalar(leaves[reward]):
        raise OptionError(f"--reward must be one real number a step, got {_kind(leaves[reward])}. Name another one.")
    rule, why = None, None
    try:
        rule = end_rule(
            [Leaf(path=path, file_path=path, dtype=spec.dtype, shape=spec.shape) for path, spec in leaves.items()],
            ends,
        )
    except SpecError:
        flags = [path for path, spec in leaves.items() if spec.dtype == np.bool and not spec.shape]
        why = "no leaf 'step_type' says where episodes end"
        why += f"; --ends {flags[0]} may" if flags else ""
    paths = list(leaves)
    folder = "" if rule is None else rule.folder
    if reward is None:
        found = (path for path in (f"{folder}reward", "reward") if path in leaves and _is_real_scalar(leaves[path]))
        reward = next(found, None)
    actions = [path for path in paths if _is_below(path, f"{folder}action")]
    return Roles(
        leaves=leaves,
        rule=rule,
        why_no_episodes=why,
        step_types=() if rule is None else tuple(paths[number] for number in rule.columns),
        reward=reward,
        actions=tuple(actions or [path for path in paths if _is_below(path, "action")]),
    )


def _kind(spec: ArraySpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def _is_real_scalar(spec: ArraySpec) -> bool:
    return not spec.shape and spec.dtype.kind in "biuf"


def _is_below(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}/")


# ---- episodes


class Episode(NamedTuple):
    """One episode, or as much of it as is there."""

    lane: int
    first_id: int
    last_id: int
    value: float
    """Its return; NaN without a reward."""
    end: str | None
    is_whole: bool

    @property
    def length(self) -> int:
        """Its steps."""
        return self.last_id - self.first_id + 1


class Course:
    """A number of each episode over the ids at which they begin: some hundred bins, and each one while there are few.

    Args:
        first_id: Where ids begin.
        next_id: Where they end.
    """

    def __init__(self, first_id: int, next_id: int) -> None:
        self.first_id, self.next_id = first_id, max(next_id, first_id + 1)
        self.counts = np.zeros(BINS, np.int64)
        self.sums = np.zeros(BINS)
        self.lowest = np.full(BINS, np.inf)
        self.highest = np.full(BINS, -np.inf)
        self._ids: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float64]] = []
        self.count = 0
        self.total = 0.0

    def add(self, ids: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Takes in [N] first ids and [N] numbers; those that aren't finite are left out."""
        finite = np.isfinite(values)
        ids, values = ids[finite], values[finite]
        place = np.clip((ids - self.first_id) * BINS // (self.next_id - self.first_id), 0, BINS - 1)
        self.counts += np.bincount(place, minlength=BINS)
        self.sums += np.bincount(place, values, minlength=BINS)
        np.minimum.at(self.lowest, place, values)
        np.maximum.at(self.highest, place, values)
        self.count += len(values)
        self.total += float(values.sum())
        self._ids.append(ids)
        self._values.append(values)
        if self.count > EXACT_EPISODES:
            self._ids.clear()
            self._values.clear()

    def each(self) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """First ids, ascending, and numbers; None when there are too many."""
        if self.count > EXACT_EPISODES or not self.count:
            return None
        ids, values = np.concatenate(self._ids), np.concatenate(self._values)
        order = np.argsort(ids, kind="stable")
        return ids[order], values[order]

    @property
    def mean(self) -> float:
        """NaN without any."""
        return self.total / self.count if self.count else math.nan

    @property
    def minimum(self) -> float:
        """The least."""
        return float(self.lowest.min())

    @property
    def maximum(self) -> float:
        """The greatest."""
        return float(self.highest.max())


class _Tally:
    """Sums up episodes."""

    def __init__(self, first_id: int, next_id: int) -> None:
        self.returns = Course(first_id, next_id)
        self.lengths = Course(first_id, next_id)
        self.best: Episode | None = None
        self.worst: Episode | None = None
        self.last: Episode | None = None
        self._thinned: list[pa.Table] = []
        self._kept = 0
        self._every = 1
        self._seen = 0

    def add(self, table: "pa.Table") -> None:
        if not len(table):
            return
        returns = table["return"].to_numpy().astype(np.float64)  # null is NaN
        first_ids = table["first_id"].to_numpy()
        self.returns.add(first_ids, returns)
        self.lengths.add(first_ids, table["length"].to_numpy().astype(np.float64))
        newest = _episode(table, int(np.argmax(table["last_id"].to_numpy())))
        if self.last is None or newest.last_id > self.last.last_id:
            self.last = newest
        if np.isfinite(returns).any():
            best = _episode(table, int(np.nanargmax(np.where(np.isfinite(returns), returns, np.nan))))
            worst = _episode(table, int(np.nanargmin(np.where(np.isfinite(returns), returns, np.nan))))
            if self.best is None or best.value > self.best.value:
                self.best = best
            if self.worst is None or worst.value < self.worst.value:
                self.worst = worst
        self._thin(table)

    def _thin(self, table: "pa.Table") -> None:
        """Keeps every so many-th, so that the median is one of them: the true one while none was left out."""
        start = -self._seen % self._every
        self._seen += len(table)
        self._thinned.append(table.take(np.arange(start, len(table), self._every)))
        self._kept += len(self._thinned[-1])
        while self._kept > _THINNED:
            self._every *= 2
            thinned = _joined(self._thinned)
            self._thinned = [thinned.take(np.arange(0, len(thinned), 2))]
            self._kept = len(self._thinned[0])

    @property
    def median(self) -> Episode | None:
        """The episode in the middle by return, the lower one of two."""
        if not self._thinned:
            return None
        thinned = _joined(self._thinned)
        returns = thinned["return"].to_numpy()
        returns = np.where(np.isfinite(returns), returns, np.nan)
        order = np.argsort(returns, kind="stable")[: np.isfinite(returns).sum()]  # NaN comes last
        return _episode(thinned, int(order[(len(order) - 1) // 2])) if len(order) else None


def _joined(tables: Sequence["pa.Table"]) -> "pa.Table":
    import pyarrow as pa

    return pa.concat_tables(tables)


def _episode(table: "pa.Table", row: int) -> Episode:
    entry = {name: table[name][row].as_py() for name in ("lane", "first_id", "last_id", "end", "is_whole", "return")}
    value = math.nan if entry.pop("return") is None else table["return"][row].as_py()
    return Episode(value=value, **entry)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episodes:
    """The episodes of a store, summed up.

    Attributes:
        returns: Of those that are complete, or of all pieces when none is.
        lengths: Likewise.
        pieces: All pieces: those that go on, were broken off or lack their beginning too.
        complete: How many are complete.
        ends: How many pieces ended in which way; "unknown" where nothing tells.
        best: Greatest return.
        median: The middle one.
        worst: Least return.
        last: The one that ends last.
    """

    returns: Course
    lengths: Course
    pieces: int
    complete: int
    ends: Mapping[str, int]
    best: Episode | None
    median: Episode | None
    worst: Episode | None
    last: Episode | None

    @property
    def count(self) -> int:
        """How many are in `lengths`."""
        return self.lengths.count

    @property
    def note(self) -> str:
        """What was left out, or '' for nothing."""
        if self.pieces and not self.complete:
            return "no episode is complete: all pieces are shown as far as they go"
        left = self.pieces - self.complete
        noun = "piece is" if left == 1 else "pieces are"
        return f"{left:,} incomplete {noun} left out" if left else ""


def gather_episodes(
    buffer: "UniformReplayBuffer", roles: Roles, *, ends: str | None = None, tell: Callable[[int], object] | None = None
) -> Episodes:
    """Goes through the episodes once.

    Args:
        buffer: A buffer, open for reading.
        roles: What its leaves are.
        ends: As for `roles_of`.
        tell: Called with how many ids have been read.

    Raises:
        SpecError: When nothing says where episodes end.
    """
    window = buffer.first_id, buffer.next_id
    complete, every = _Tally(*window), _Tally(*window)
    counted: collections.Counter[str] = collections.Counter()
    pieces = 0
    for table in _tables(buffer, roles, ends):
        pieces += len(table)
        if tell is not None and len(table):
            tell(table["last_id"][-1].as_py() + 1 - window[0])
        for entry in table["end"].value_counts().to_pylist():
            counted[entry["values"] or "unknown"] += entry["counts"]
        whole = table.filter(_is_complete(table))
        complete.add(whole)
        if not complete.lengths.count:
            every.add(table)
    shown = complete if complete.lengths.count else every
    return Episodes(
        returns=shown.returns,
        lengths=shown.lengths,
        pieces=pieces,
        complete=complete.lengths.count,
        ends=dict(counted),
        best=shown.best,
        median=shown.median,
        worst=shown.worst,
        last=shown.last,
    )


def episode_with(
    buffer: "UniformReplayBuffer", roles: Roles, *, lane: int, step_id: int, ends: str | None = None
) -> Episode | None:
    """Finds the episode that a step is of; None when no episode holds it.

    Args:
        buffer: A buffer, open for reading.
        roles: What its leaves are.
        lane: The step's lane.
        step_id: Its id.
        ends: As for `roles_of`.
    """
    import pyarrow.compute as pc

    for table in _tables(buffer, roles, ends):
        holds = pc.and_(pc.less_equal(table["first_id"], step_id), pc.greater_equal(table["last_id"], step_id))
        found = table.filter(pc.and_(holds, pc.equal(table["lane"], lane)))
        if len(found):
            return _episode(found, 0)
    return None


def chosen_episode(
    buffer: "UniformReplayBuffer", roles: Roles, words: str, *, lane: int | None = None, ends: str | None = None
) -> Episode:
    """Finds the episode that a user names.

    Args:
        buffer: A buffer, open for reading.
        roles: What its leaves are.
        words: "best", "median" or "worst" by return; "last"; LANE:ID; or an id alone.
        lane: Of an id alone.
        ends: As for `roles_of`.

    Raises:
        OptionError: When the words name no episode, or nothing says where episodes end.
        WindowError: When the step is not in the window, or of no episode.
    """
    if roles.rule is None:
        raise OptionError(f"episodes must be told apart, but {roles.why_no_episodes}. Name a bool leaf with --ends.")
    if words in ("best", "median", "worst", "last"):
        if lane is not None:
            raise OptionError(f"--lane must be given with an id alone, got {words!r}. Leave it out.")
        if words != "last" and roles.reward is None:
            raise OptionError(f"{words!r} must be told by a reward, but there is none. Name one with --reward.")
        found: Episode | None = getattr(gather_episodes(buffer, roles, ends=ends), words)
        if found is None:
            raise WindowError(f"the window [{buffer.first_id}, {buffer.next_id}) must hold an episode, but has none.")
        return found
    before, colon, after = words.rpartition(":")
    if not after.isdecimal() or (colon and not before.isdecimal()):
        raise OptionError(f"EPISODE must be LANE:ID, an id with --lane, best, median, worst or last, got {words!r}.")
    if bool(colon) == (lane is not None):
        how = "not be given with LANE:ID" if colon else "say of which lane an id alone is"
        raise OptionError(f"--lane must {how}, got {words!r}. Write LANE:ID.")
    of_lane, step_id = int(before) if lane is None else lane, int(after)
    if not 0 <= of_lane < buffer.batch_size:
        raise WindowError(f"lanes must be from 0 to {buffer.batch_size - 1}, got {of_lane}.")
    if not buffer.first_id <= step_id < buffer.next_id:
        raise WindowError(f"ids must be in the window [{buffer.first_id}, {buffer.next_id}), got {step_id}.")
    found = episode_with(buffer, roles, lane=of_lane, step_id=step_id, ends=ends)
    if found is None:
        raise WindowError(
            f"ids must be of steps of an episode, got {step_id} in lane {of_lane}, which holds a final observation. "
            "Choose the one before it."
        )
    return found


def _tables(buffer: "UniformReplayBuffer", roles: Roles, ends: str | None) -> Iterator["pa.Table"]:
    return episode_blocks(buffer, ends=ends, reward=roles.reward)


def _is_complete(table: "pa.Table") -> NDArray[np.bool]:
    import pyarrow.compute as pc

    goes_on = pc.fill_null(pc.is_in(table["end"], value_set=_incomplete_ends()), False)
    complete: NDArray[np.bool] = pc.and_not(table["is_whole"], goes_on).to_numpy(zero_copy_only=False)
    return complete


def _incomplete_ends() -> "pa.Array":
    import pyarrow as pa

    return pa.array(["open", "broken"])


# ---- columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """A leaf in numbers, and some of its values.

    Attributes:
        path: The leaf.
        spec: Its spec.
        steps_read: Steps, all lanes together, that were read; boundary rows where the leaf means nothing don't count.
        is_all: Whether that was all there are.
        values: [N, E] float64, finite or NaN: of each step that was kept its elements, or of many elements all in one
            column. Complex numbers are there as their absolute values.
        counts: How often each value came, where the leaf is of few whole numbers and one element; else None.
        size: How many values were read.
        not_finite: How many of them were NaN or infinite; the numbers below are of the others, NaN without any.
        zeros: How many were 0.
        mean: Arithmetic mean.
        std: Standard deviation of the population.
        minimum: Least.
        maximum: Greatest.
    """

    path: str
    spec: ArraySpec
    steps_read: int
    is_all: bool
    values: NDArray[np.float64]
    counts: Mapping[float, int] | None
    size: int
    not_finite: int
    zeros: int
    mean: float
    std: float
    minimum: float
    maximum: float


class _Moments:
    """Mean and spread of values that come in parts, by the formulas of Chan, Golub and LeVeque, 1979."""

    def __init__(self) -> None:
        self.size = self.not_finite = self.zeros = self.count = 0
        self.mean = self.squares = 0.0
        self.minimum, self.maximum = math.inf, -math.inf
        self.counts: collections.Counter[float] | None = collections.Counter()

    def add(self, values: NDArray[Any]) -> None:
        """Takes in values, [N] of real numbers."""
        self.size += values.size
        if values.dtype.kind in "biu" and self._add_counted(values):
            return
        self.counts = None if values.size else self.counts
        numbers = values.astype(np.float64)
        if values.dtype.kind == "f":
            numbers = numbers[np.isfinite(numbers)]
            self.not_finite += values.size - numbers.size
        if not numbers.size:
            return
        self.zeros += numbers.size - int(np.count_nonzero(numbers))
        with np.errstate(over="ignore", invalid="ignore"):  # of numbers near the largest there are, it is infinite
            mean = float(numbers.mean())
            squares = float(np.square(numbers - mean).sum())
        self._join(numbers.size, mean, squares, numbers.min(), numbers.max())

    def _add_counted(self, values: NDArray[Any]) -> bool:
        """Takes in whole numbers by counting each, where they are close together."""
        if not values.size:
            return True
        low, high = int(values.min()), int(values.max())
        if high - low >= _COUNTED_RANGE or max(-low, high) >= 2**53:
            return False
        counts = np.bincount((values.astype(np.int64) if values.dtype.kind != "b" else values) - np.int64(low))
        numbers = np.arange(low, high + 1, dtype=np.float64)
        mean = float(counts @ numbers) / values.size
        self.zeros += int(counts[-low]) if low <= 0 <= high else 0
        self._join(values.size, mean, float(counts @ np.square(numbers - mean)), low, high)
        if self.counts is not None:
            there = counts.nonzero()[0]
            self.counts.update({float(numbers[at]): int(counts[at]) for at in there})
        return True

    def _join(self, count: int, mean: float, squares: float, low: float, high: float) -> None:
        together = self.count + count
        apart = mean - self.mean
        self.squares += squares + apart * apart * self.count * count / together
        self.mean += apart * count / together
        self.count = together
        self.minimum, self.maximum = min(self.minimum, float(low)), max(self.maximum, float(high))


def sample_column(buffer: "UniformReplayBuffer", roles: Roles, path: str) -> Sample:
    """Reads a leaf, or of a long one pieces that are spread evenly over the window.

    Args:
        buffer: A buffer, open for reading.
        roles: What its leaves are.
        path: The leaf.
    """
    spec = roles.leaves[path]
    elements = math.prod(spec.shape)
    is_afar = isinstance(buffer.path, str)
    row = buffer.batch_size * max(1, elements)
    first_id, next_id = buffer.first_id, buffer.next_id
    pieces = spread(
        first_id,
        next_id,
        most=max(1, (_READ_VALUES_AFAR if is_afar else _READ_VALUES) // row),
        pieces=_SPREAD_AFAR if is_afar else _SPREAD,
    )
    columns = max(1, elements) if elements <= _MOST_ELEMENTS else 1
    planned = sum(stop - start for start, stop in pieces) * row // columns
    every = -(-planned // (_KEPT_VALUES // columns)) if planned else 1
    moments, kept, steps, seen = _Moments(), [], 0, 0
    for rows in _rows(buffer, roles, path, pieces):
        steps += len(rows)
        flat = rows.reshape(-1)
        moments.add(np.abs(flat) if flat.dtype.kind == "c" else flat)
        table = flat.reshape(-1, columns) if flat.size else np.empty((0, columns))
        chosen = table[-seen % every :: every]
        seen += len(table)
        kept.append((np.abs(chosen) if chosen.dtype.kind == "c" else chosen).astype(np.float64))
    values = np.concatenate(kept) if kept else np.empty((0, columns))
    values[~np.isfinite(values)] = math.nan
    some = moments.count > 0
    counts = moments.counts
    return Sample(
        path=path,
        spec=spec,
        steps_read=steps,
        is_all=pieces == [(first_id, next_id)] or first_id == next_id,
        values=values,
        counts=dict(counts) if counts is not None and columns == 1 and 0 < len(counts) <= _MOST_DISTINCT else None,
        size=moments.size,
        not_finite=moments.not_finite,
        zeros=moments.zeros,
        mean=moments.mean if some else math.nan,
        std=math.sqrt(moments.squares / moments.count) if some else math.nan,
        minimum=moments.minimum if some else math.nan,
        maximum=moments.maximum if some else math.nan,
    )


def _rows(
    buffer: "UniformReplayBuffer", roles: Roles, path: str, pieces: Sequence[tuple[int, int]]
) -> Iterator[NDArray[Any]]:
    """Yields [N, *shape], without boundary rows where these mean nothing."""
    step_types: tuple[str, ...] = ()
    if roles.rule is not None and roles.boundaries is not None and path not in roles.step_types:
        inside = path.removeprefix(roles.rule.folder)
        if path.startswith(roles.rule.folder) and inside.split("/")[0] in _MEANINGLESS:
            step_types = roles.step_types
    for start, stop in pieces:
        block: Block
        for block in scan(buffer, [path, *step_types], first_id=start, next_id=stop):
            rows = block.columns[path]
            if step_types and roles.rule is not None:
                yield rows[~roles.rule.is_boundary([block.columns[name] for name in step_types])]
            else:
                yield rows.reshape(rows.shape[0] * rows.shape[1], *rows.shape[2:])


def spread(first_id: int, next_id: int, *, most: int, pieces: int) -> list[tuple[int, int]]:
    """Chooses ids that are spread evenly over a window.

    Args:
        first_id: Its start.
        next_id: Its end, exclusive.
        most: How many ids at most.
        pieces: In how many stretches at most.

    Returns:
        (first, next) of each stretch, ascending and apart; the whole window where it has no more ids than that.
    """
    steps = next_id - first_id
    if steps <= most:
        return [(first_id, next_id)] if steps else []
    length = -(-most // pieces)
    pieces = most // length
    room = steps - length  # the first begins with the window, and the last one ends with it
    starts = [first_id + (room * piece // (pieces - 1) if pieces > 1 else room // 2) for piece in range(pieces)]
    return [(start, start + length) for start in starts]


# ---- the pace of runs


class RunPace(NamedTuple):
    """How fast a run of the writer was.

    Attributes:
        first_id: Its first id.
        next_id: Behind its last one.
        rows_per_second: All lanes together; None when that can't be told.
        began: When the first of the files that tell of it was written last.
    """

    first_id: int
    next_id: int
    rows_per_second: float | None
    began: dt.datetime | None


def run_paces(path: str, runs: Sequence[int], *, first_id: int, next_id: int, lanes: int) -> list[RunPace]:
    """Works out the pace of runs from when chunk files were written last.

    A chunk file is written last as its last row is, so two of them that end in a run tell how many rows came in between
    and how long they took. Files that were copied without their times tell of the copying.

    Args:
        path: The store's folder.
        runs: First id of each run, ascending.
        first_id: Where ids begin.
        next_id: Where they end.
        lanes: Rows of an id.

    Returns:
        The runs with ids between those, ascending.
    """
    written: dict[int, float] = {}
    for file in store_files(path):
        if file.next_id is None or file.state not in ("raw", "sealed"):
            continue
        try:
            moment = (Path(path) / file.name).stat().st_mtime
        except FileNotFoundError:  # evicted since it was listed
            continue
        written[file.next_id] = max(moment, written.get(file.next_id, moment))
    stops = [*runs[1:], next_id]
    paces = []
    for start, stop in zip(runs, stops, strict=True):
        begin = max(start, first_id)
        if begin >= stop:
            continue
        # A chunk whose end lies in the run; the file with the run's own end is the next run's unless it ends there too.
        told = sorted((place, moment) for place, moment in written.items() if start < place <= stop)
        (low, early), (high, late) = (told[0], told[-1]) if told else ((0, 0.0), (0, 0.0))
        in_order = all(one[1] <= other[1] for one, other in itertools.pairwise(told))
        pace = (high - low) * lanes / (late - early) if in_order and high > low and late > early else None
        began = dt.datetime.fromtimestamp(early, dt.UTC) if told else None
        paces.append(RunPace(begin, stop, pace, began))
    return paces


# ---- all of it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gathered:
    """What pictures of a store are drawn from.

    Attributes:
        roles: What its leaves are.
        first_id: Start of the window.
        next_id: Its end, exclusive.
        lanes: Rows of an id.
        kinds: What there is to draw, in the order of `KINDS`.
        episodes: None where it wasn't asked for, or nothing says where episodes end.
        actions: A sample each of the leaves of the action.
        reward: None where it wasn't asked for, or there is none.
        columns: Samples of leaves that were asked for, or of all that nothing else shows.
        paces: Of the runs; empty where it wasn't asked for or can't be told.
        notes: What was left out, and why: a line each.
    """

    roles: Roles
    first_id: int
    next_id: int
    lanes: int
    kinds: tuple[Kind, ...]
    episodes: Episodes | None
    actions: tuple[Sample, ...]
    reward: Sample | None
    columns: tuple[Sample, ...]
    paces: tuple[RunPace, ...]
    notes: tuple[str, ...]


def checked_kinds(words: Sequence[str] | None) -> list[Kind] | None:
    """The kinds that were asked for, None for none.

    Raises:
        OptionError: When a word is no kind.
    """
    for word in words or ():
        if word not in KINDS:
            raise OptionError(unknown("--kind", word, KINDS))
    return [kind for kind in KINDS if kind in words] if words else None


_MOST_COLUMNS = 24
_MOST_ACTIONS = 6


def gather(
    buffer: "UniformReplayBuffer",
    roles: Roles,
    kinds: Sequence[Kind] | None = None,
    *,
    columns: Sequence[str] | None = None,
    ends: str | None = None,
    runs: Sequence[int] = (),
    tell: Callable[[int, int], object] | None = None,
) -> Gathered:
    """Reads what pictures of some kinds are drawn from.

    Args:
        buffer: A buffer, open for reading.
        roles: What its leaves are.
        kinds: What is wanted; None for all that the spec allows.
        columns: Leaves for the kind "columns"; None for all that no other kind shows.
        ends: As for `roles_of`.
        runs: First ids of the store's runs.
        tell: Called with how many ids have been read, counted anew for each leaf, and how many will be.

    Raises:
        OptionError: When a kind is wanted that the spec doesn't allow.
    """
    missing: dict[Kind, str] = {}
    if roles.rule is None:
        missing["returns"] = missing["lengths"] = roles.why_no_episodes or ""
    elif roles.reward is None:
        missing["returns"] = "no leaf 'reward' of one number a step is there to be summed; --reward names another"
    if roles.reward is None:
        missing["rewards"] = "there is no leaf 'reward' of one number a step; --reward names another"
    if not roles.actions:
        missing["actions"] = "there is no leaf 'action'"
    for kind in kinds or ():
        if kind in missing:
            raise OptionError(f"kind {kind!r} must be one that the store allows, but {missing[kind]}.")
    chosen = [kind for kind in KINDS if kind not in missing and (kinds is None or kind in kinds)]
    notes = [f"{kind}: {why}" for kind, why in missing.items() if kinds is None]

    actions = list(roles.actions if "actions" in chosen else ())
    shown = {*roles.step_types, *actions, *([roles.reward] if "rewards" in chosen else [])}
    rest = list(columns) if columns else [path for path in roles.leaves if kinds is not None or path not in shown]
    rest = rest if "columns" in chosen else []
    for what, paths, most in (("actions", actions, _MOST_ACTIONS), ("columns", rest, _MOST_COLUMNS)):
        if len(paths) > most and not (what == "columns" and columns):
            notes.append(f"{what}: the first {most} of {len(paths)} leaves; -c chooses others")
            del paths[most:]

    window = buffer.first_id, buffer.next_id
    count = len(actions) + len(rest) + ("rewards" in chosen)
    has_episodes = bool({"returns", "lengths"} & set(chosen))
    total = (window[1] - window[0]) * (count + has_episodes)
    done = 0

    def sample(path: str) -> Sample:
        nonlocal done
        found = sample_column(buffer, roles, path)
        done += window[1] - window[0]
        if tell is not None:
            tell(done, total)
        return found

    episodes = None
    if has_episodes:
        episodes = gather_episodes(
            buffer, roles, ends=ends, tell=None if tell is None else lambda ids: tell(ids, total)
        )
        done = window[1] - window[0]
    paces: list[RunPace] = []
    if "throughput" in chosen:
        why = "rows carry no times, and a remote store none of its files"
        if not isinstance(buffer.path, str):
            paces = run_paces(str(buffer.path), runs, first_id=window[0], next_id=window[1], lanes=buffer.batch_size)
            why = "rows carry no times, and too few chunk files were filled to tell by theirs"
        if all(pace.rows_per_second is None for pace in paces):
            paces = []
            notes.append(f"throughput: it can't be told; {why}")
            if kinds is None:
                chosen.remove("throughput")
    reward = sample(roles.reward) if "rewards" in chosen and roles.reward is not None else None
    if "columns" in chosen and not rest:
        chosen.remove("columns")
    return Gathered(
        roles=roles,
        first_id=window[0],
        next_id=window[1],
        lanes=buffer.batch_size,
        kinds=tuple(chosen),
        episodes=episodes,
        actions=tuple(sample(path) for path in actions),
        reward=reward,
        columns=tuple(sample(path) for path in rest),
        paces=tuple(paces),
        notes=tuple(notes),
    )
