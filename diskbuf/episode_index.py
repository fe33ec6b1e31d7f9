"""Where sequences may start that stay inside an episode, kept up to date while rows come and go.

Reads the step types, or the bool leaf that was named, and no other column.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskbuf.episode_ends import Rows, begins_of_block, cut_block, end_rule
from diskbuf.store.reading import Store

BLOCK_VALUES = 2**15
"""Values of a column that are read at once."""

_OPEN = 2**62  # the number of a piece that goes on: above every piece that has ended
_LEAST_CAPACITY = 1024
_FIRST_BITS = 5
_MOST_ROUNDS = 4
_MOST_GUIDED = 4

Ints = NDArray[np.int64]


class EpisodeStarts:
    """Where sequences may start: a snapshot that later rows don't change.

    The starts are numbered: pieces that have ended by last id and lane, then those that go on by lane; inside a piece
    by id. Pieces that have ended keep their numbers while rows come and go; numbers of starts that left the window with
    the head of their piece are skipped.

    Attributes:
        total: How many (id, lane) pairs a sequence may start at.
    """

    __slots__ = (
        "_closed",
        "_counts",
        "_first_id",
        "_gone",
        "_heads",
        "_high",
        "_lanes",
        "_low",
        "_open_counts",
        "_open_low",
        "_skipped",
        "total",
    )

    def __init__(
        self,
        counts: "_Counts",
        low: int,
        high: int,
        *,
        first_id: int,
        heads: Ints,
        gone: Ints,
        open_low: Ints,
        open_counts: Ints,
    ) -> None:
        # Pieces [low, high) have ended, of which `heads` lack their `gone` first starts; the others are [lanes].
        self._counts = counts
        self._low, self._high = low, high
        self._first_id = first_id
        self._lanes = len(open_low)
        self._heads, self._gone = heads, gone
        self._open_low, self._open_counts = open_low, open_counts
        self._skipped = int(np.add.reduce(gone))
        self._closed = int(counts.numbers[high] - counts.numbers[low]) - self._skipped
        self.total = self._closed + int(np.add.reduce(open_counts))

    @property
    def pairs(self) -> int:
        """The same as `total`."""
        return self.total

    @property
    def key(self) -> None:
        """None: plans for other starts are no plans for these."""

    def draw(self, draws: NDArray[np.float64]) -> Ints:
        """Turns draws into flat rows of starts, uniform over all of them.

        Args:
            draws: [*K] in [0, 1). `total` must be at least 1.

        Returns:
            [*K] flat rows ``(id - first_id) * lanes + lane``.
        """
        chosen = (draws * self.total).astype(np.int64).reshape(-1)
        numbers, addends = self._counts.numbers, self._counts.addends
        # Nearly all are in pieces that have ended, behind the last one without its head: there one addition will do.
        begin = int(numbers[self._heads[-1]] - numbers[self._low]) if len(self._heads) else 0
        begin = min(begin, self._closed)
        special = ((chosen - begin).view(np.uint64) >= self._closed - begin).nonzero()[0]
        if len(special) == len(chosen):
            return self._plainly(chosen).reshape(draws.shape)
        found = chosen + int(numbers[self._low] + self._skipped)
        if len(special):
            found[special] = numbers[self._high] - 1
        rows = addends.take(self._counts.find(found, self._high), mode="clip")
        found -= self._first_id
        found *= self._lanes
        rows += found
        if len(special):
            rows[special] = self._plainly(chosen[special])
        return rows.reshape(draws.shape)

    def _plainly(self, chosen: Ints) -> Ints:
        """Rows of any starts [K]."""
        is_open = chosen >= self._closed
        rows = np.empty(len(chosen), np.int64)
        rows[is_open] = self._open_rows(chosen[is_open])
        chosen = chosen[~is_open]
        if not len(chosen):
            return rows
        # From the place of a head on, as starts are counted without those before it that are gone, its own are skipped.
        numbers, base = self._counts.numbers, self._counts.numbers[self._low]
        skipped = np.zeros(len(self._heads) + 1, np.int64)
        self._gone.cumsum(out=skipped[1:])
        places = numbers[self._heads] - skipped[:-1]
        chosen += base
        chosen += skipped[places.searchsorted(chosen, "right")]
        piece = numbers[: self._high + 1].searchsorted(chosen, "right") - 1
        rows[~is_open] = (chosen - self._first_id) * self._lanes + self._counts.addends[piece]
        return rows

    def _open_rows(self, chosen: Ints) -> Ints:
        if not len(chosen):
            return chosen
        ends = self._open_counts.cumsum()
        ends += self._closed
        lane = ends.searchsorted(chosen, "right")
        step_id = self._open_low[lane] + chosen - (ends - self._open_counts)[lane]
        rows: Ints = (step_id - self._first_id) * self._lanes + lane
        return rows


class _Pieces:
    """Pieces that have ended, by last id and lane, in arrays with room for more.

    Threads may append to the same ones: what is written at a place depends on the rows alone, so all write the same.
    That needs each place to be written with its value and with nothing else on the way.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.first: Ints = np.zeros(capacity, np.int64)
        self.last: Ints = np.zeros(capacity, np.int64)
        self.lane: Ints = np.zeros(capacity, np.int64)
        self.boundaries: Ints = np.zeros(capacity, np.int64)  # 1 where the last row is one
        self.following: Ints = np.full(capacity, _OPEN, np.int64)  # number of the next piece in the same lane
        self.counts: dict[int, _Counts] = {}

    def counts_of(self, low: int, high: int, num_steps: int) -> Ints:
        """Returns how many sequences of num_steps may start in each of the pieces from `low` to `high`."""
        return _counts(self.first[low:high], self.last[low:high], self.boundaries[low:high], num_steps)

    def moved(self, low: int, high: int, capacity: int) -> "_Pieces":
        """Returns a copy of the pieces from `low` to `high` that has other room."""
        moved = _Pieces(capacity)
        for name in ("first", "last", "lane", "boundaries", "following"):
            getattr(moved, name)[: high - low] = getattr(self, name)[low:high]
        known = moved.following[: high - low]
        known[known < _OPEN] -= low
        return moved


class _Counts(NamedTuple):
    """Starts of pieces for one num_steps.

    Attributes:
        size: For how many pieces they have been counted.
        numbers: Number of a piece's first start; one more than there are pieces.
        addends: What ``n * lanes`` lacks to the flat row, counted from id 0, of a piece's start number n.
        guide: The piece of start number ``n << bits``, at n.
        guided: For how many n that is known: all those of the pieces that were counted.
        bits: Chosen so that there are about as many n as pieces, and not many times as many.
    """

    size: int
    numbers: Ints
    addends: Ints
    guide: Ints
    guided: int
    bits: int

    @classmethod
    def blank(cls, pieces: _Pieces, size: int, num_steps: int) -> "_Counts":
        """Counts for none of the pieces yet, of which there are `size`."""
        total = int(pieces.counts_of(0, size, num_steps).sum())
        return cls(
            size=0,
            numbers=np.zeros(pieces.capacity + 1, np.int64),
            addends=np.zeros(pieces.capacity, np.int64),
            guide=np.zeros(1, np.int64),
            guided=0,
            bits=max(1, total // size).bit_length() - 1 if size else _FIRST_BITS,
        )

    def grown(self, pieces: _Pieces, high: int, num_steps: int, *, lanes: int) -> "_Counts":
        """Counts on to piece number `high`, exclusive."""
        low = self.size
        numbers = np.empty(high - low + 1, np.int64)
        numbers[0] = self.numbers[low]
        pieces.counts_of(low, high, num_steps).cumsum(out=numbers[1:])
        numbers[1:] += numbers[0]
        self.numbers[low : high + 1] = numbers
        addends = pieces.first[low:high] - numbers[:-1]
        addends *= lanes
        addends += pieces.lane[low:high]
        self.addends[low:high] = addends
        total = int(numbers[-1])
        guide, known, bits = self.guide, self.guided, self.bits
        if total >> bits > _MOST_GUIDED * pieces.capacity:  # pieces much longer than those before: a coarser guide
            known, bits = 0, (total // pieces.capacity).bit_length()
        guided = -(-total >> bits)
        if guided > known:
            if guided > len(guide) or not known:
                guide = np.zeros(2 * guided, np.int64)
                guide[:known] = self.guide[:known]
            begins = np.arange(known, guided) << bits
            guide[known:guided] = self.numbers[: high + 1].searchsorted(begins, "right") - 1
        return _Counts(high, self.numbers, self.addends, guide, guided, bits)

    def find(self, found: Ints, high: int) -> Ints:
        """Returns the pieces, all below `high`, of starts by their numbers; faster than a binary search for each."""
        piece = self.guide.take(found >> self.bits, mode="clip")
        for _ in range(_MOST_ROUNDS):
            is_behind = self.numbers.take(piece + 1, mode="clip") <= found
            if not np.count_nonzero(is_behind):  # a fifth of what any() takes
                return piece
            piece += is_behind
        return self.numbers[: high + 1].searchsorted(found, "right") - 1


class _State(NamedTuple):
    """What is known of rows up to an id. Replaced as a whole, so that threads and signal handlers see no half of it.

    Attributes:
        pieces: Pieces that have ended, maybe with more than belong to this state.
        size: How many belong to it.
        origin: Id from which on all is known.
        next_id: Id up to which, exclusive.
        open_first: [lanes] first id of the piece that goes on.
        newest: [lanes] number of the newest piece that has ended, -1 for none.
        latest: The last rows, [lanes, 1] each, None when there are none.
        runs: The runs that were known of.
    """

    pieces: _Pieces
    size: int
    origin: int
    next_id: int
    open_first: Ints
    newest: Ints
    latest: Rows | None
    runs: Sequence[int]


class _Cursor(NamedTuple):
    """Which pieces the old end of a window goes through.

    Attributes:
        pieces: The pieces that are numbered.
        size: How many of them were looked at.
        low: Number of the first one that isn't before the window.
        held: [lanes] number of the piece that holds the window's first id, or of the first one after it; `_OPEN`, or
            some number that isn't below `size`, when it has not ended.
        heads: [H] the numbers in `held` that are below `size`, ascending.
    """

    pieces: _Pieces
    size: int
    low: int
    held: Ints
    heads: Ints


class EpisodeIndex:
    """Knows where the episodes of a store end.

    Of rows that it has seen before nothing is read again; rows come from this process or from a writer in another one.
    Memory grows with the number of episodes in the window, about 50 bytes each. Threads may share an index. See
    `diskbuf.episode_ends` for what ends an episode.

    Args:
        store: A store open for reading or writing.
        ends: Path of the bool leaf that is True at the last step of an episode; None goes by the step types.

    Raises:
        SpecError: When there is no such leaf, or nothing says where episodes end.
    """

    _MOST_COUNTS = 4

    def __init__(self, store: Store, *, ends: str | None = None) -> None:
        self._store = store
        self._rule = end_rule([column.layout for column in store.columns], ends)
        self._lanes = store.manifest.batch_size
        self._state: _State | None = None
        self._cursor: _Cursor | None = None
        self._answered: tuple[Any, EpisodeStarts | None] = (None, None)

    def starts(self, first_id: int, next_id: int, *, num_steps: int) -> EpisodeStarts | None:
        """Finds where a sequence may start that stays inside the window and inside one episode.

        The answer depends on the rows of the window alone, not on what was asked before. It takes a few array
        operations, plus reading the rows that are new.

        Args:
            first_id: Start of the window, as the store gave it.
            next_id: End of it, exclusive.
            num_steps: Steps of a sequence, at least 1.

        Returns:
            The starts; None when the writer overwrote rows of the window before they were read, so that the window has
            to be read again.

        Raises:
            StoreCorruptError: When a chunk file is missing, short or has rotten.
        """
        asked = (first_id, next_id, num_steps, self._store.runs)
        answered, starts = self._answered
        if answered == asked:
            return starts
        if first_id >= next_id:
            return self._starts(self._blank(first_id), first_id, first_id, num_steps)
        state = self._refreshed(first_id, next_id)
        if state.origin > first_id:
            return None
        starts = self._starts(state, first_id, next_id, num_steps)
        self._answered = (asked, starts)
        return starts

    def _starts(self, state: _State, first_id: int, next_id: int, num_steps: int) -> EpisodeStarts:
        pieces, high = state.pieces, state.size
        low, heads = self._heads(state, first_id)
        counts = self._counted(state, num_steps)
        open_low = np.maximum(state.open_first, first_id)
        boundaries: Any = 0
        if next_id < state.next_id:  # of the pieces that went on at an older window's end some have ended since
            high = int(pieces.last[:high].searchsorted(next_id - 1))
            heads = heads[heads < high]
            holder = np.full(self._lanes, _OPEN, np.int64)
            np.minimum.at(holder, pieces.lane[high : state.size], np.arange(high, state.size))
            has_ended = holder < _OPEN
            held = holder[has_ended]
            open_low[has_ended] = np.maximum(pieces.first[held], first_id)
            boundaries = np.zeros(self._lanes, np.int64)
            boundaries[has_ended] = pieces.boundaries[held] * (pieces.last[held] == next_id - 1)
        elif num_steps == 1 and state.latest is not None:
            boundaries = self._rule.is_boundary(state.latest)[:, 0]
        gone = first_id - pieces.first[heads]
        np.minimum(gone, counts.numbers[heads + 1] - counts.numbers[heads], out=gone)
        np.maximum(gone, 0, out=gone)
        return EpisodeStarts(
            counts,
            low,
            high,
            first_id=first_id,
            heads=heads,
            gone=gone,
            open_low=open_low,
            open_counts=_counts(open_low, next_id - 1, boundaries, num_steps),
        )

    def _counted(self, state: _State, num_steps: int) -> _Counts:
        """The starts of the state's pieces, counted on from where they were."""
        pieces = state.pieces
        known = pieces.counts.get(num_steps)
        if known is not None and known.size >= state.size:
            return known
        if known is None:
            known = _Counts.blank(pieces, state.size, num_steps)
        known = known.grown(pieces, state.size, num_steps, lanes=self._lanes)
        counts = {**pieces.counts, num_steps: known}
        while len(counts) > self._MOST_COUNTS:
            del counts[next(iter(counts))]
        pieces.counts = counts
        return known

    def _heads(self, state: _State, first_id: int) -> tuple[int, Ints]:
        """The number of the first piece that isn't before the window, and those of each lane's first one that isn't.

        Of the latter only those that have ended, in ascending order.
        """
        pieces, size, cursor = state.pieces, state.size, self._cursor
        if cursor is None or cursor.pieces is not pieces:
            low = int(pieces.last[:size].searchsorted(first_id))
            cursor = _Cursor(pieces, low, low, np.full(self._lanes, _OPEN, np.int64), np.empty(0, np.int64))
        low = cursor.low
        if (low and pieces.last[low - 1] >= first_id) or low > size or (low < size and pieces.last[low] < first_id):
            low = int(pieces.last[:size].searchsorted(first_id))
        if cursor.low != low or cursor.size < size:
            held = cursor.held.copy()
            if cursor.size < size:
                np.minimum.at(held, pieces.lane[cursor.size : size], np.arange(cursor.size, size))
            if low > cursor.low:
                np.maximum.at(held, pieces.lane[cursor.low : low], pieces.following[cursor.low : low])
            elif low < cursor.low:
                np.minimum.at(held, pieces.lane[low : cursor.low], np.arange(low, cursor.low))
            known = max(size, cursor.size)
            heads = held[held < known]
            heads.sort()
            cursor = _Cursor(pieces, known, low, held, heads)
            self._cursor = cursor
        heads = cursor.heads
        return low, heads if cursor.size == size else heads[heads < size]

    def _refreshed(self, first_id: int, next_id: int) -> _State:
        """Reads what is new up to next_id, and returns what is known then."""
        state, runs = self._state, self._store.runs
        if (
            state is None
            or first_id < state.origin
            or first_id > state.next_id
            or (runs is not state.runs and not _is_continued(state, runs))
        ):
            state = self._blank(first_id)
        if next_id <= state.next_id:
            return state
        block = max(1, BLOCK_VALUES // self._lanes)
        while state.next_id < next_id:
            stop = min(next_id, state.next_id + block)
            rows = self._store.read_columns(self._rule.columns, state.next_id, stop)
            if rows is None:
                state = self._blank(max(state.next_id + 1, self._store.window()[0]))
                continue
            begin = stop - rows[0].shape[1]
            if begin > state.next_id:
                state = self._blank(begin)  # what came before has been overwritten
            state = self._grown(state, rows, first_id=first_id, runs=runs)
        self._state = state
        return state

    def _blank(self, origin: int) -> _State:
        lanes = self._lanes
        return _State(
            pieces=_Pieces(_LEAST_CAPACITY),
            size=0,
            origin=origin,
            next_id=origin,
            open_first=np.full(lanes, origin, np.int64),
            newest=np.full(lanes, -1, np.int64),
            latest=None,
            runs=self._store.runs,
        )

    def _grown(self, state: _State, rows: list[NDArray[Any]], *, first_id: int, runs: Sequence[int]) -> _State:
        """Takes in the rows that follow; those of the state stay as they are."""
        rule = self._rule
        begin = state.next_id
        steps = rows[0].shape[1]
        begins, before = begins_of_block(rule, rows, first_id=begin, latest=state.latest, runs=runs)
        state = state._replace(
            next_id=begin + steps,
            latest=rows if steps == 1 else [column[:, -1:].copy() for column in rows],
            runs=runs,
        )
        if not np.count_nonzero(begins):
            return state
        cuts = cut_block(begins, begin, state.open_first)
        new = len(cuts.lane)
        state = self._with_room(state, new, first_id=first_id)
        pieces, low, high = state.pieces, state.size, state.size + new
        next_first = cuts.step + begin
        if steps == 1:
            number = np.arange(low, high)
            order: Any = slice(None)
        else:
            order = cuts.step.argsort(kind="stable")
            number = np.empty(new, np.int64)
            number[order] = np.arange(low, high)
        pieces.first[low:high] = cuts.first[order]
        pieces.last[low:high] = next_first[order] - 1
        pieces.lane[low:high] = cuts.lane[order]
        pieces.boundaries[low:high] = rule.is_boundary(before)[cuts.lane, cuts.step][order]

        of_lane = cuts.lane[cuts.is_first]
        newest = state.newest.copy()
        previous = newest[of_lane]
        is_there = previous >= 0
        pieces.following[previous[is_there]] = number[cuts.is_first][is_there]
        pieces.following[number[:-1][~cuts.is_last[:-1]]] = number[1:][~cuts.is_first[1:]]
        newest[of_lane] = number[cuts.is_last]
        open_first = state.open_first.copy()
        open_first[of_lane] = next_first[cuts.is_last]
        return state._replace(size=high, newest=newest, open_first=open_first)

    def _with_room(self, state: _State, new: int, *, first_id: int) -> _State:
        """Makes room for more pieces, and lets go of those that are before the window."""
        pieces, count = state.pieces, state.size
        if count + new < pieces.capacity:
            return state
        gone = int(pieces.last[:count].searchsorted(first_id))
        capacity = max(_LEAST_CAPACITY, 2 * (count - gone + new))
        return state._replace(
            pieces=pieces.moved(gone, count, capacity),
            size=count - gone,
            origin=max(state.origin, first_id) if gone else state.origin,
            newest=np.maximum(state.newest - gone, -1),
        )


def _counts(first: Ints, last: Ints | int, boundaries: NDArray[Any] | int, num_steps: int) -> Ints:
    """How many sequences of num_steps may start in pieces; at a boundary none does."""
    counts = last - first
    counts += 2 - num_steps
    if num_steps == 1:
        counts -= boundaries
        return counts
    return np.maximum(counts, 0, out=counts)


def _is_continued(state: _State, runs: Sequence[int]) -> bool:
    """Whether the runs before the state's next id are those that it knew of, but for those that are forgotten since."""
    return all(run in state.runs or not state.origin < run < state.next_id for run in runs)
