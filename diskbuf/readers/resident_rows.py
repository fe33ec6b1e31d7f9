"""Random rows of a store larger than its cache: drawn from blocks that are at hand, while others are fetched."""

import numpy as np

from diskbuf import plan
from diskbuf.errors import WindowError
from diskbuf.readers.rows import Sample, Sampler, Source
from diskbuf.resident_plan import ResidentPlanner
from diskbuf.store.layout import ColumnLayout
from diskbuf.store.reading import Store

_FEW_RESIDENT = 16
"""Blocks to have at once, rather than larger ones."""

_LEAST_SEQUENCES = 16
"""A block holds so many sequences end to end: few are left out because they span two blocks."""

_BLOCKS_AHEAD = 4
_TRIES = 3


class ResidentSampler(Sampler):
    """Reads the random batches of a planner that has a set of blocks move through the window.

    The window is held for as long as none of it was evicted and it has grown by less than a tenth, because the blocks
    of another window come in another order.

    Args:
        source: The rows; without episodes.
        seed: Makes the batches repeatable.
        share: Which batches are this reader's own.
        cache_bytes: Most raw bytes to have at hand.
        num_steps: Steps of a sequence.
    """

    def __init__(self, source: Source, *, seed: int, share: plan.Share, cache_bytes: int, num_steps: int) -> None:
        store = source.opened()
        layouts = [column.layout for column in store.columns]
        first_id, next_id = store.window()
        block_ids, resident_blocks = blocks_of(
            layouts, ids=next_id - first_id, most_bytes=cache_bytes // 2, num_steps=num_steps
        )
        self.resident = ResidentPlanner(
            seed, lanes=store.manifest.batch_size, block_ids=block_ids, resident_blocks=resident_blocks, share=share
        )
        self._held: tuple[tuple[int, int], tuple[int, ...]] | None = None
        super().__init__(source, self.resident.random)

    def sample(self, batch: int, *, count: int, num_steps: int | None) -> Sample:
        """Reads a batch from the blocks of its moment.

        Args:
            batch: Its number, of the planner's own ones.
            count: Sequences K.
            num_steps: Steps T of each; None for single steps without a time axis.

        Returns:
            The batch, freshly allocated. The probability of a sequence is that over an epoch, the same for all that are
            ever drawn.

        Raises:
            EmptyBufferError: When the window is empty.
            WindowError: When no sequence of `num_steps` steps is inside a block.
            ClosedError: When the buffer was closed.
        """
        store = self.source.opened()
        window, runs = self._window(store)
        for _ in range(_TRIES):
            starts = self.resident.starts(batch, window, runs, count=count, num_steps=num_steps)
            if not starts.pairs:
                raise self._too_few(store, window, num_steps or 1)
            rows, ids = self.planner.plan(batch, starts, count=count, num_steps=num_steps)
            store.ask_for(window[0], rows)
            leaves = store.gather(window[0], rows)
            if leaves is not None:
                self._ask_ahead(store, batch, window, runs, count, num_steps)
                pairs = self.resident.pairs(window, runs, num_steps=num_steps)
                return Sample(leaves, ids + window[0], np.full(count, 1.0 / pairs, np.float32))
            self._held = None
            window, runs = self._window(store)
        raise WindowError(
            f"the blocks of the window [{window[0]}, {window[1]}) must stay in it while they are read, but the writer "
            "evicts them faster. Use shuffle='exact'."
        )

    def sample_block(self, batch: int, batches: int, *, count: int, num_steps: int | None) -> Sample:
        """Reads consecutive batches; returns what `sample` does for each, stacked."""
        singles = [self.sample(number, count=count, num_steps=num_steps) for number in range(batch, batch + batches)]
        leaves = [np.stack(parts) for parts in zip(*(single.leaves for single in singles), strict=True)]
        ids = np.stack([single.ids for single in singles])
        return Sample(leaves, ids, np.stack([single.probabilities for single in singles]))

    def _window(self, store: Store) -> tuple[tuple[int, int], tuple[int, ...]]:
        first_id, next_id = store.window()
        held = self._held
        if held is None or held[0][0] < first_id or next_id - held[0][1] > (next_id - first_id) // 10:
            held = self._held = ((first_id, next_id), store.runs)
        return held

    def _ask_ahead(
        self,
        store: Store,
        batch: int,
        window: tuple[int, int],
        runs: tuple[int, ...],
        count: int,
        num_steps: int | None,
    ) -> None:
        """Asks for the blocks that come next."""
        upcoming = self.resident.upcoming(batch, window, runs, count=count, num_steps=num_steps, most=_BLOCKS_AHEAD)
        if len(upcoming):
            ids = upcoming * self.resident.block_ids
            for low, high in zip(ids.tolist(), (ids + self.resident.block_ids).tolist(), strict=True):
                store.ask_for_range(max(low, window[0]), min(high, window[1]))

    def _too_few(self, store: Store, window: tuple[int, int], num_steps: int) -> WindowError:
        if window[0] == window[1] or num_steps == 1:
            return self.source.too_few(store, window, num_steps)
        return WindowError(
            f"num_steps must be at most the {self.resident.block_ids} steps of a block with shuffle='resident', and in "
            f"one without a restart, got {num_steps}. Use shuffle='exact'."
        )


def blocks_of(layouts: list[ColumnLayout], *, ids: int, most_bytes: int, num_steps: int) -> tuple[int, int]:
    """Chooses how long a block is, and how many are at hand.

    A block is as long as the chunks of one of the columns: the longest of which some sixteen are at hand, else the
    shortest. It holds some sixteen sequences in any case.

    Args:
        layouts: The columns.
        ids: How many ids there are.
        most_bytes: Raw bytes to have at hand.
        num_steps: Steps of a sequence.

    Returns:
        Ids in a block, a power of two, and how many blocks are at hand, at least 1.
    """
    least = 1 << (max(1, _LEAST_SEQUENCES * (num_steps - 1)) - 1).bit_length()
    lengths = sorted({max(layout.chunk_rows, least) for layout in layouts if layout.row_bytes} or {least}, reverse=True)
    found = [(length, _resident_blocks(layouts, length, ids=ids, most_bytes=most_bytes)) for length in lengths]
    return next((pair for pair in found if pair[1] >= _FEW_RESIDENT), found[-1])


def _resident_blocks(layouts: list[ColumnLayout], block_ids: int, *, ids: int, most_bytes: int) -> int:
    """How many blocks are within a number of bytes, wherever in the window they are."""
    low, high = 1, -(-ids // block_ids) + 1
    while low < high:
        middle = (low + high + 1) // 2
        size = 0
        for layout in layouts:
            chunks = middle * -(-block_ids // layout.chunk_rows)
            size += min(chunks, -(-ids // layout.chunk_rows) + 1) * layout.chunk_bytes
        low, high = (middle, high) if size <= most_bytes else (low, middle - 1)
    return low
