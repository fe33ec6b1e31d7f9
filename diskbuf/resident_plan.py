"""Which blocks of ids are at hand while a store that is larger than its cache is sampled, and what is drawn from them.

Index arithmetic like `plan`'s, and pure like it: what batch k draws, and from which blocks, follows from the seed, k,
the request and the window.
"""

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import OptionError
from diskbuf.plan import RandomPlanner, Share, WindowStarts, derive_seed, permuted, uniforms

_FEW_BLOCKS = 8
_ORDER_STREAM = 0x626C6F636B  # an epoch's seed must not be that of other streams of the same seed
_ALL = Share()


class ResidentPlanner:
    """Plans random batches from a set of blocks that moves through the window.

    A block is `block_ids` consecutive ids, from a multiple of it on; only blocks in which a sequence can start count.
    They enter the set in a random order, another one each epoch, each once an epoch; a block leaves when
    `resident_blocks` others have come after it, and never returns before. A batch is drawn with replacement, uniformly
    from all sequences in the blocks of its moment. The set moves with the draws: for each draw by one
    `resident_blocks`-th of a row per row in the set. So each sequence is drawn once, on average, in each stay of its
    block, also where blocks differ in size, and an epoch takes as many draws as there are sequences.

    The set begins with `first_blocks` blocks and grows while it moves: a batch comes as soon as these are there, at the
    price that the first batches are from few blocks. At first a block enters for every
    ``rows of the set / resident_blocks`` draws, which are few, so b blocks are there after about
    ``b ** 2 / (2 * resident_blocks)`` blocks' rows were drawn, and all of them after half the set's rows. With
    `first_blocks` equal to `resident_blocks` it starts full.

    When no more blocks are in the window than may be resident, all are from the first batch on, and draws are uniform
    over all sequences.

    A sequence that spans two blocks is never drawn, as the other block may not be there: `num_steps` - 1 of
    `block_ids` starts, the last ones of each block, on top of those that span a restart. Such steps are drawn, only
    in fewer sequences, except in a piece of a block (cut by a restart, or by the window's ends) that is shorter than
    `num_steps`. Sequences longer than a block are never drawn.

    A window that grows or shrinks by a block has another order, and the set is another one at once: a caller who wants
    it to move block by block keeps a window for some time. A batch of more draws than the set has rows passes blocks
    by. Threads may share a planner.

    Args:
        seed: Any int; taken modulo 2**64.
        lanes: Number of lanes.
        block_ids: Ids of a block, at least 1.
        resident_blocks: Most blocks in the set, at least 1.
        first_blocks: Blocks in the set at first, from 1 to `resident_blocks`; None for 8, or all if they are fewer.
        share: Which batches are this planner's own; it counts them from 0. All shares move through the same sets.

    Raises:
        OptionError: When a number is outside its rule.
    """

    def __init__(
        self,
        seed: int,
        *,
        lanes: int,
        block_ids: int,
        resident_blocks: int,
        first_blocks: int | None = None,
        share: Share = _ALL,
    ) -> None:
        for name, value in (("block_ids", block_ids), ("resident_blocks", resident_blocks)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} must be an int of at least 1, got {value!r}.")
        if first_blocks is None:
            first_blocks = min(_FEW_BLOCKS, resident_blocks)
        if isinstance(first_blocks, bool) or not isinstance(first_blocks, int) or first_blocks < 1:
            raise OptionError(f"first_blocks must be an int of at least 1, got {first_blocks!r}.")
        if first_blocks > resident_blocks:
            raise OptionError(
                f"first_blocks must be at most the {resident_blocks} resident_blocks, got {first_blocks}. "
                "Leave it out, or raise resident_blocks."
            )
        self.lanes = lanes
        self.block_ids = block_ids
        self.resident_blocks = resident_blocks
        self.first_blocks = first_blocks
        self.random = RandomPlanner(seed, lanes=lanes, share=share)
        self._order_seed = derive_seed(seed, _ORDER_STREAM)
        # Each replaced as a whole, for threads.
        self._blocks: tuple[object, _Blocks] | None = None
        self._epochs: tuple[_Epoch, ...] = ()
        self._set: tuple[_Epoch | _Blocks, int, NDArray[np.int64], WindowStarts] | None = None

    def next_batch(self) -> int:
        """Returns the number of the next batch, each once."""
        return self.random.next_batch()

    def pairs(self, window: tuple[int, int], runs: Sequence[int] = (), *, num_steps: int | None) -> int:
        """Counts the (id, lane) at which sequences start that can be drawn, in the set or not.

        Args:
            window: First id, and end, exclusive.
            runs: Ascending first ids of the runs that wrote the window.
            num_steps: Steps of a sequence; None for single steps.
        """
        return self._blocks_of(window, runs, num_steps).total

    def blocks(
        self, batch: int, window: tuple[int, int], runs: Sequence[int] = (), *, count: int, num_steps: int | None
    ) -> NDArray[np.int64]:
        """Returns the numbers of the blocks that a batch is drawn from, ascending; block b begins at id b * block_ids.

        Args:
            batch: Number of the batch, of the planner's own ones.
            window: First id, and end, exclusive.
            runs: Ascending first ids of the runs that wrote the window.
            count: Sequences in a batch.
            num_steps: Steps of a sequence; None for single steps.

        Returns:
            [B] int64; none when no sequence can be drawn.
        """
        blocks = self._blocks_of(window, runs, num_steps)
        return blocks.numbers[self._resident(blocks, batch, count)[0]]

    def upcoming(
        self,
        batch: int,
        window: tuple[int, int],
        runs: Sequence[int] = (),
        *,
        count: int,
        num_steps: int | None,
        most: int,
    ) -> NDArray[np.int64]:
        """Returns the blocks that enter next after a batch's, in their order, to be fetched ahead.

        Args:
            batch: As for `blocks`.
            window: As for `blocks`.
            runs: As for `blocks`.
            count: As for `blocks`.
            num_steps: As for `blocks`.
            most: How many.

        Returns:
            [most] int64; none when all blocks are resident.
        """
        blocks = self._blocks_of(window, runs, num_steps)
        if len(blocks.numbers) <= self.resident_blocks:
            return np.empty(0, np.int64)
        epoch, step = self._step(blocks, batch, count)
        coming = [epoch.order[step + 1 :]]
        number = epoch.number
        while sum(map(len, coming)) < most:
            number += 1
            coming.append(self._order(len(blocks.numbers), number))
        return blocks.numbers[np.concatenate(coming)[:most]]

    def starts(
        self, batch: int, window: tuple[int, int], runs: Sequence[int] = (), *, count: int, num_steps: int | None
    ) -> WindowStarts:
        """Returns where the sequences of a batch may start: those in its blocks, for `RandomPlanner.plan`.

        Args:
            batch: As for `blocks`.
            window: As for `blocks`.
            runs: As for `blocks`.
            count: As for `blocks`.
            num_steps: As for `blocks`.
        """
        return self._resident(self._blocks_of(window, runs, num_steps), batch, count)[1]

    def plan(
        self, batch: int, window: tuple[int, int], runs: Sequence[int] = (), *, count: int, num_steps: int | None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Chooses the rows of a batch, uniform over the sequences of its blocks; there must be one.

        Args:
            batch: As for `blocks`.
            window: As for `blocks`.
            runs: As for `blocks`.
            count: Sequences K in the batch.
            num_steps: Steps T of a sequence; None for single steps without a time axis.

        Returns:
            Flat rows ``(id - first_id) * lanes + lane`` and ids less first_id, each [K] or [K, T]; read only.
        """
        starts = self.starts(batch, window, runs, count=count, num_steps=num_steps)
        return self.random.plan(batch, starts, count=count, num_steps=num_steps)

    def _blocks_of(self, window: tuple[int, int], runs: Sequence[int], num_steps: int | None) -> "_Blocks":
        key = (window, tuple(runs), num_steps)
        known = self._blocks
        if known is None or known[0] != key:
            known = (key, _cut(*window, runs=runs, lanes=self.lanes, block_ids=self.block_ids, steps=num_steps or 1))
            self._blocks = known
        return known[1]

    def _resident(self, blocks: "_Blocks", batch: int, count: int) -> tuple[NDArray[np.int64], WindowStarts]:
        """The indices of a batch's blocks, ascending, and the starts in them."""
        if len(blocks.numbers) > self.resident_blocks:
            epoch, step = self._step(blocks, batch, count)
        else:
            epoch, step = None, 0
        known, owner = self._set, epoch or blocks
        if known is None or known[0] is not owner or known[1] != step:
            chosen = np.arange(len(blocks.numbers)) if epoch is None else np.sort(epoch.resident(step))
            known = (owner, step, chosen, blocks.starts(chosen))
            self._set = known
        return known[2], known[3]

    def _step(self, blocks: "_Blocks", batch: int, count: int) -> tuple["_Epoch", int]:
        """The epoch of a batch, and which of its blocks entered last."""
        # The clock counts R = resident_blocks times draws: a step, the time from one block's entry to the next one's,
        # takes as long as there are pairs in the set.
        beginning = self._epoch(blocks, 0).ends
        clock = self.random.share.number(batch) * count * self.resident_blocks
        if self.first_blocks > 1:
            clock += int(beginning[self.first_blocks - 2])
        number = clock // (self.resident_blocks * blocks.total)
        epoch = self._epoch(blocks, number)
        if clock - epoch.start >= epoch.ends[-1]:
            epoch = self._epoch(blocks, number + 1)
        return epoch, int(epoch.ends.searchsorted(clock - epoch.start, side="right"))

    def _epoch(self, blocks: "_Blocks", number: int) -> "_Epoch":
        known = self._epochs
        for epoch in known:
            if epoch.blocks is blocks and epoch.number == number:
                return epoch
        size, most = len(blocks.numbers), self.resident_blocks
        before = self._order(size, number - 1)[size - most + 1 :] if number else np.empty(0, np.int64)
        # All stays that began before count in full, less what is still to come of the latest ones.
        to_come = int((blocks.pairs[before] * np.arange(1, most)).sum()) if number else 0
        made = _Epoch(
            blocks=blocks,
            number=number,
            most=most,
            start=most * number * blocks.total - to_come,
            before=before,
            order=self._order(size, number),
        )
        kept = [epoch for epoch in known if epoch.blocks is blocks]
        self._epochs = (*[epoch for epoch in kept if epoch.number == 0 or epoch.number >= number - 1][:3], made)
        return made

    def _order(self, size: int, number: int) -> NDArray[np.int64]:
        """The order in which blocks enter in an epoch, [size]; none enters that is in the set then."""
        if self.resident_blocks > size // 2:
            return self._order_in_groups(size, number)
        order = self._permutation(size, number)
        if number:
            order[: self.resident_blocks] = _held_back(
                order[: self.resident_blocks], self._permutation(size, number - 1)[-self.resident_blocks :]
            )
        return order

    def _permutation(self, size: int, number: int) -> NDArray[np.int64]:
        return permuted(np.arange(size), size, seed=derive_seed(self._order_seed, number + 1))

    def _order_in_groups(self, size: int, number: int) -> NDArray[np.int64]:
        """The order where the set is more than half of the blocks: one for all epochs, shuffled in groups in each.

        In a group of `size` - `resident_blocks` + 1 blocks, `resident_blocks` - 1 others come between two entries of a
        block wherever in it these are.
        """
        order = permuted(np.arange(size), size, seed=derive_seed(self._order_seed, 0))
        groups = np.arange(size) // (size - self.resident_blocks + 1)
        seed = derive_seed(self._order_seed, number + 1)
        keys = uniforms(seed, np.zeros(1, np.uint64), count=size)[0]
        return order[np.lexsort((keys, groups))]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Blocks:
    """The blocks of a window in which sequences start, and the pieces that restarts cut them into.

    Attributes:
        lanes: Number of lanes.
        numbers: [N] their numbers, ascending.
        pairs: [N] how many (id, lane) a sequence may start at.
        total: The same of all.
        first_pieces: [N + 1] the first piece of each, and the number of pieces.
        piece_starts: [pieces] first id of each, less the window's.
        piece_counts: [pieces] how many of its ids a sequence may start at.
    """

    lanes: int
    numbers: NDArray[np.int64]
    pairs: NDArray[np.int64]
    total: int
    first_pieces: NDArray[np.int64]
    piece_starts: NDArray[np.int64]
    piece_counts: NDArray[np.int64]

    def starts(self, chosen: NDArray[np.int64]) -> WindowStarts:
        """Where sequences may start in some blocks, given by ascending indices."""
        pieces = chosen
        if len(self.piece_starts) > len(self.numbers):
            first = self.first_pieces[chosen]
            lengths = self.first_pieces[chosen + 1] - first
            ends = np.cumsum(lengths)
            pieces = np.repeat(first - (ends - lengths), lengths) + np.arange(int(lengths.sum()))
        counts = self.piece_counts[pieces]
        ends = np.cumsum(counts)
        numbers = ends - counts
        total = int(ends[-1]) if len(ends) else 0
        return WindowStarts(total, self.lanes, (self.piece_starts[pieces] - numbers, numbers))


def _cut(first_id: int, next_id: int, *, runs: Sequence[int], lanes: int, block_ids: int, steps: int) -> _Blocks:
    """Cuts a window into blocks and these at restarts, leaving out what holds no sequence."""
    inside = [run for run in runs if first_id < run < next_id] if steps > 1 else []
    edges = np.arange(first_id // block_ids * block_ids + block_ids, next_id, block_ids)
    lows = np.unique(np.concatenate([[first_id], edges, inside]).astype(np.int64))
    counts = np.append(lows[1:], next_id) - lows - steps + 1
    lows, counts = lows[counts > 0], counts[counts > 0]
    numbers, first_pieces = np.unique(lows // block_ids, return_index=True)
    pairs = np.add.reduceat(counts, first_pieces) * lanes if len(numbers) else np.empty(0, np.int64)
    return _Blocks(
        lanes=lanes,
        numbers=numbers,
        pairs=pairs,
        total=int(pairs.sum()),
        first_pieces=np.append(first_pieces, len(lows)),
        piece_starts=lows - first_id,
        piece_counts=counts,
    )


class _Epoch:
    """One epoch: all blocks enter once.

    Args:
        blocks: The blocks.
        number: Of the epoch, from 0.
        most: Most blocks in the set.
        start: The clock at its beginning.
        before: [most - 1] the indices of the blocks that entered last before it, or [0] in the first epoch.
        order: [N] the indices of the blocks as they enter.

    Attributes:
        ends: [N] the clock at the end of each step, from the epoch's beginning.
    """

    def __init__(
        self,
        *,
        blocks: _Blocks,
        number: int,
        most: int,
        start: int,
        before: NDArray[np.int64],
        order: NDArray[np.int64],
    ) -> None:
        self.blocks = blocks
        self.number = number
        self.start = start
        self.order = order
        self._entered = np.concatenate([before, order])
        self._stops = len(before) + 1 + np.arange(len(order))
        self._begins = np.maximum(0, self._stops - most)
        pairs = np.concatenate([[0], np.cumsum(blocks.pairs[self._entered])])
        self.ends = np.cumsum(pairs[self._stops] - pairs[self._begins])

    def resident(self, step: int) -> NDArray[np.int64]:
        """The indices of the blocks in the set after the step-th entry."""
        return self._entered[self._begins[step] : self._stops[step]]


def _held_back(entering: NDArray[np.int64], leaving: NDArray[np.int64]) -> NDArray[np.int64]:
    """Orders the first blocks of an epoch so that none enters before it has left.

    Args:
        entering: [R] the blocks in the order in which they would enter; one leaves for each.
        leaving: [R] the set at that time, in the order in which its blocks leave.

    Returns:
        [R] the same blocks: at each place the first of those that may enter. There always is one, since no more than
        R - 1 - i blocks leave after the i-th.
    """
    leaves = {block: place for place, block in enumerate(leaving.tolist())}
    waiting: list[list[tuple[int, int]]] = [[] for _ in entering]
    for place, block in enumerate(entering.tolist()):
        waiting[max(0, leaves.get(block, 0))].append((place, block))
    able: list[tuple[int, int]] = []
    held: list[int] = []
    for newly in waiting:
        for item in newly:
            heapq.heappush(able, item)
        held.append(heapq.heappop(able)[1])
    return np.array(held, np.int64)
