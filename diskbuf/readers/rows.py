"""Rows by NumPy: the plain executor. What samples and passes are read with wherever nothing faster is at hand."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskbuf import plan
from diskbuf.errors import EmptyBufferError, WindowError
from diskbuf.store.reading import Store

if TYPE_CHECKING:
    from diskbuf.episode_index import EpisodeIndex

_TRIES_OF_MANY, _TRIES_OF_ONE = 3, 1000
_BATCHES_A_LOOK = 16
_LARGE_ROW_BYTES = 4096


class Sample(NamedTuple):
    """Sequences of rows, with a batch axis in front.

    Attributes:
        leaves: For each column [K, *shape] or [K, T, *shape].
        ids: [K] or [K, T] int64.
        probabilities: [K] float32.
    """

    leaves: list[NDArray[Any]]
    ids: NDArray[np.int64]
    probabilities: NDArray[np.float32]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """The rows of a buffer.

    Attributes:
        opened: Returns its store; raises ClosedError when it was closed.
        episodes: Where its episodes end, for sequences that stay inside one; None for all sequences.
    """

    opened: Callable[[], Store]
    episodes: "EpisodeIndex | None" = None

    def starts(self, store: Store, window: tuple[int, int], num_steps: int) -> plan.SequenceStarts | None:
        """Where a sequence may start in a window; None when rows of it were overwritten before it could be told.

        Raises:
            EmptyBufferError: When the window is empty.
            WindowError: When no sequence of that length is in it.
        """
        starts: plan.SequenceStarts | None
        if self.episodes is None:
            lanes = store.manifest.batch_size
            starts = plan.sequence_starts(*window, lanes=lanes, num_steps=num_steps, runs=store.runs)
        else:
            starts = self.episodes.starts(*window, num_steps=num_steps)
        if starts is not None and not starts.pairs:
            raise self.too_few(store, window, num_steps)
        return starts

    def too_few(self, store: Store, window: tuple[int, int], num_steps: int) -> WindowError:
        """The error that says why there is no sequence of `num_steps` steps."""
        first_id, next_id = window
        if first_id == next_id:
            return EmptyBufferError(f"buffer {store.path} must hold steps to be sampled, but is empty. Add some first.")
        if self.episodes is not None:
            return WindowError(
                f"num_steps must be at most the length of an episode, got {num_steps}: no episode in the window "
                f"[{first_id}, {next_id}) has that many steps. Ask for fewer, or add more steps."
            )
        longest = longest_run(store, window)
        return WindowError(
            f"num_steps must be at most {longest}, got {num_steps}: no more consecutive ids are in the window "
            f"[{first_id}, {next_id}) without a restart of the writer between them. Add more steps."
        )


def longest_run(store: Store, window: tuple[int, int]) -> int:
    """Most consecutive ids in a window that one run wrote."""
    return max((high - low for low, high in plan.segments(*window, runs=store.runs)), default=0)


class Sampler:
    """Reads the random batches of a planner.

    Args:
        source: The rows.
        planner: Says which.
    """

    def __init__(self, source: Source, planner: plan.RandomPlanner) -> None:
        self.source = source
        self.planner = planner
        self._asked_for: tuple[int, int, int] | None = None

    def sample(self, batch: int, *, count: int, num_steps: int | None) -> Sample:
        """Reads a batch from the window of this moment.

        Args:
            batch: Its number, of the planner's own ones.
            count: Sequences K.
            num_steps: Steps T of each; None for single steps without a time axis.

        Returns:
            The batch, freshly allocated.

        Raises:
            EmptyBufferError: When the window is empty.
            WindowError: When there is no sequence of `num_steps` steps.
            ClosedError: When the buffer was closed.
        """
        store = self.source.opened()
        window = store.window()
        for _ in range(_TRIES_OF_MANY if count > 1 else _TRIES_OF_ONE):
            starts = self.source.starts(store, window, num_steps or 1)
            if starts is not None:
                rows, ids = self.planner.plan(batch, starts, count=count, num_steps=num_steps)
                # A look at the kernel's counters takes as long as some small rows.
                if store.cold_reads.asks or store.lane_bytes >= _LARGE_ROW_BYTES or not batch % _BATCHES_A_LOOK:
                    self._ask(store, window[0], batch, rows, starts, num_steps)
                leaves = store.gather(window[0], rows)
                if leaves is not None:
                    probabilities = np.empty(count, np.float32)
                    probabilities.fill(1.0 / starts.pairs)
                    return Sample(leaves, ids + window[0], probabilities)
            window = store.window()
        if count == 1:
            raise WindowError(
                f"{num_steps or 1} steps must stay in the window [{window[0]}, {window[1]}) while they are read, but "
                "the writer evicts them faster. Use a larger max_length."
            )
        return self._sample_in_halves(batch, count=count, num_steps=num_steps)

    def _ask(
        self,
        store: Store,
        first_id: int,
        batch: int,
        rows: NDArray[np.int64],
        starts: plan.SequenceStarts,
        num_steps: int | None,
    ) -> None:
        """Asks for rows that are on the disk, and for the next batch's, to come while this one is in use."""
        if not store.cold_reads.look():
            self._asked_for = None
            return
        if self._asked_for != (first_id, batch, starts.pairs):
            store.ask_for(first_id, rows)
        if not store.is_writable:  # else the next batch is drawn from another window
            following, _ = self.planner.plan(batch + 1, starts, count=len(rows), num_steps=num_steps)
            store.ask_for(first_id, following)
            self._asked_for = (first_id, batch + 1, starts.pairs)

    def _sample_in_halves(self, batch: int, *, count: int, num_steps: int | None) -> Sample:
        """Reads a batch in halves, each from the window of its moment: the writer is too fast to read it at once."""
        other = batch | 1 << (40 + (count - 1).bit_length())  # that nobody else has, for draws of its own
        first = self.sample(batch, count=count // 2, num_steps=num_steps)
        second = self.sample(other, count=count - count // 2, num_steps=num_steps)
        leaves = [np.concatenate(pair) for pair in zip(first.leaves, second.leaves, strict=True)]
        ids = np.concatenate([first.ids, second.ids])
        return Sample(leaves, ids, np.concatenate([first.probabilities, second.probabilities]))

    def sample_block(self, batch: int, batches: int, *, count: int, num_steps: int | None) -> Sample:
        """Reads consecutive batches at once, from one window, with an axis [batches] in front of each array.

        Args:
            batch: Number of the first one.
            batches: How many.
            count: As in `sample`.
            num_steps: As in `sample`.

        Returns:
            What `sample` returns for each, stacked.

        Raises:
            EmptyBufferError: As `sample`.
            WindowError: As `sample`.
            ClosedError: As `sample`.
        """
        store = self.source.opened()
        window = store.window()
        starts = self.source.starts(store, window, num_steps or 1)
        if starts is not None:
            draws = self.planner.draws(batch, batches, count=count)
            rows, ids = self.planner.plan_of(draws, starts, num_steps=num_steps)
            if store.cold_reads.look():
                store.ask_for(window[0], rows)
            leaves = store.gather(window[0], rows)
            if leaves is not None:
                return Sample(leaves, ids + window[0], np.full(draws.shape, 1.0 / starts.pairs, np.float32))
        # The writer is too fast for the whole block.
        singles = [self.sample(number, count=count, num_steps=num_steps) for number in range(batch, batch + batches)]
        leaves = [np.stack(parts) for parts in zip(*(single.leaves for single in singles), strict=True)]
        ids = np.stack([single.ids for single in singles])
        return Sample(leaves, ids, np.stack([single.probabilities for single in singles]))


class Pass(NamedTuple):
    """The window that a deterministic pass goes through."""

    first_id: int
    next_id: int


class PassReader:
    """Reads the elements of a deterministic pass.

    Args:
        source: The rows.
        request: What an element is.
        share: Which elements are this reader's own.
    """

    def __init__(self, source: Source, request: plan.PassRequest, share: plan.Share) -> None:
        self.source = source
        self.request = request
        self.share = share
        self._planned: tuple[Pass, plan.PassPlan] | None = None

    def begin(self) -> Pass:
        """Takes the window of this moment.

        Raises:
            EmptyBufferError: When it is empty.
            ClosedError: When the buffer was closed.
        """
        store = self.source.opened()
        window = Pass(*store.window())
        if window.first_id == window.next_id:
            raise self.source.too_few(store, window, 1)
        return window

    def read(self, window: Pass, element: int, most: int) -> tuple[list[NDArray[Any]], NDArray[np.int64]] | None:
        """Reads elements of one shape from `element` on, at most `most` of them.

        Args:
            window: What `begin` returned.
            element: Number of the first, of the reader's own ones.
            most: Most elements to read.

        Returns:
            For each column [n, *element, *shape], and the ids, [n, *element]; None behind the last element.

        Raises:
            WindowError: When steps were evicted since `begin`.
            ClosedError: When the buffer was closed.
        """
        store = self.source.opened()
        elements = self._plan(store, window)
        numbers = self.share.numbers(element, most).astype(np.int64)
        numbers = numbers[numbers < elements.total]
        if not len(numbers):
            return None
        ids, lanes = elements.block(numbers)
        first_id = int(ids.min())
        leaves = None
        if first_id >= store.window()[0]:
            rows = (ids - first_id) * store.manifest.batch_size + lanes
            if store.cold_reads.look():
                store.ask_for(first_id, rows)
            leaves = store.gather(first_id, rows)
        if leaves is None:
            raise WindowError(
                f"ids from {first_id} must stay in the window while a deterministic pass reads them, "
                "but were evicted. Stop adding meanwhile, or use a larger max_length."
            )
        return leaves, np.ascontiguousarray(ids)

    def _plan(self, store: Store, window: Pass) -> plan.PassPlan:
        planned = self._planned
        if planned is None or planned[0] != window:
            lanes = store.manifest.batch_size
            planned = (window, plan.PassPlan(*window, lanes=lanes, request=self.request, runs=store.runs))
            self._planned = planned
        return planned[1]
