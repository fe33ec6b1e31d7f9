"""Random rows gathered by TensorFlow itself from the mappings of a store, without a copy and without Python.

A live store is read as any reader of it reads: the window from the header, the rows, then the header once more, and
what a writer overwrote in between is thrown away. The header is handed to TensorFlow twice, so that it can't merge the
two looks into one. Python is asked once for a block of elements: it attaches new chunks, raises what there is to
raise, and makes the draws.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.readers import on_host
from diskbuf.readers.elements import Elements, as_it_is, numpy_call, telling_tensorflow, unbatched
from diskbuf.readers.rows import Sampler
from diskbuf.store.header import EPOCH, FLOOR, NEXT
from diskbuf.store.mapped_view import ATTACHED_TO, DETACH_AT, DETACHED_TO, VIEW, MappedRows, MappedView
from diskbuf.store.reading import EVERY_ID

if TYPE_CHECKING:
    import tensorflow as tf

_MOST_DRAWS = 2**16
_MOST_BLOCK = 256
_MOST_BLOCK_BYTES = 2**26
_WORDS = NEXT + 1
_LIMITS = VIEW + 1


def view_of(sampler: Sampler) -> MappedView | None:
    """The view of the sampler's store that TensorFlow can gather from, None when it can't."""
    if sampler.source.episodes is not None:
        return None
    view = sampler.source.opened().mapped_view()
    if view is None or not all(_is_known(column.layout.dtype) for column in view.columns):
        return None
    return view


def _is_known(dtype: np.dtype[Any]) -> bool:
    """Whether an array of this dtype can be handed over: DLPack knows plain numbers of the machine's byte order."""
    return dtype.kind in "biufc" and dtype.isnative and dtype.itemsize <= 16 and dtype != np.dtype(np.longdouble)


def elements_of(
    elements: Elements, sampler: Sampler, view: MappedView, *, read_ahead: int, num_parallel_calls: int | None
) -> "tf.data.Dataset":
    """Returns the endless dataset of (items, info).

    Args:
        elements: What an element looks like.
        sampler: Plans them, and reads those that TensorFlow can't: after a new writer has begun, and behind a writer
            that is faster than a gather.
        view: What to gather from.
        read_ahead: Elements to draw from one window.
        num_parallel_calls: Gathers to make in parallel, each of `read_ahead` elements; None for one at a time.

    Returns:
        The dataset.
    """
    import tensorflow as tf

    gathers = max(1, _block_size(elements) // read_ahead)
    gather = _Gather(view, num_steps=elements.num_steps)
    block = _Block(
        elements=elements, sampler=sampler, view=view, read_ahead=read_ahead, gathers=gathers, end_id=gather.end_id
    )
    host = on_host.read_block_of(elements, sampler, read_ahead=read_ahead)
    draws_shape = [gathers] if read_ahead == 1 else [gathers, read_ahead]
    if elements.batch_size is not None:
        draws_shape.append(elements.batch_size)

    @as_it_is
    def begin(number: Any) -> Any:
        draws, fast, slow = numpy_call(block.begin, [number], [tf.float64, tf.int64, tf.int64])
        return number, tf.ensure_shape(draws, draws_shape), tf.ensure_shape(fast, []), tf.ensure_shape(slow, [])

    @as_it_is
    def elements_of_block(number: Any, draws: Any, fast: Any, slow: Any) -> "tf.data.Dataset":
        gathered = _map_inline(
            tf.data.Dataset.range(fast), lambda n: gather(tf.gather(draws, n)), num_parallel_calls=num_parallel_calls
        )
        whole = gathered.filter(lambda is_whole, *_: is_whole)
        found = _map_inline(whole, lambda _, *leaves: elements.nest(*leaves), num_parallel_calls=None)
        read = tf.data.Dataset.range(slow).map(lambda n: elements.nest(*host(number * gathers + n)))
        return found.concatenate(read)

    # As good as endless; tf.data's own counter is made of a function, which has to be traced.
    blocks = tf.data.Dataset.range(np.iinfo(np.int64).max).map(begin)
    if not sampler.source.opened().is_writable:
        blocks = blocks.prefetch(1)  # so that rows are asked for while others are in use
    dataset = blocks.flat_map(elements_of_block)
    return dataset if read_ahead == 1 else unbatched(dataset, elements)


def _block_size(elements: Elements) -> int:
    """How many elements to a block: the cost of a call is shared, and the draws stay in the processor's cache."""
    by_draws = _MOST_DRAWS // (elements.batch_size or 1)
    return max(1, min(_MOST_BLOCK, by_draws, _MOST_BLOCK_BYTES // max(1, elements.nbytes)))


@dataclasses.dataclass(kw_only=True)
class _Block:
    """What Python does for a block of elements, before TensorFlow gathers them."""

    elements: Elements
    sampler: Sampler
    view: MappedView
    read_ahead: int
    gathers: int
    end_id: int
    """Behind it the columns have no room for a sequence."""

    def __post_init__(self) -> None:
        self._last_id: int | None = None
        rings = [column.layout.chunk_rows for column in self.view.columns if column.ring_rows is not None]
        self._slack = max(1, self.view.keeps - self.view.max_length) if rings else None

    def begin(self, number: NDArray[np.int64]) -> tuple[NDArray[np.float64], np.int64, np.int64]:
        """Returns the draws of a block, and how many gathers of it TensorFlow and how many NumPy makes.

        Its number is the first argument; draws are [gathers, (read_ahead,) (batch_size)].
        """
        elements, sampler = self.elements, self.sampler
        size, batches = elements.batch_size or 1, self.gathers * self.read_ahead
        with telling_tensorflow():
            store = sampler.source.opened()
            window = store.window()
            starts = sampler.source.starts(store, window, elements.num_steps or 1)
        if starts is None:
            raise RuntimeError("a view is only gathered from without an index of episodes")
        draws = sampler.planner.draws(int(number) * batches, batches, count=size)
        is_fast = self._is_fast(window[1])
        if is_fast and store.cold_reads.look():
            rows, _ = sampler.planner.plan_of(draws, starts, num_steps=elements.num_steps)
            store.ask_for(window[0], rows)
        shape = [self.gathers, self.read_ahead, size]
        if elements.batch_size is None:
            shape.pop()
        if self.read_ahead == 1:
            shape.pop(1)
        fast = self.gathers if is_fast else 0
        return draws.reshape(shape), np.int64(fast), np.int64(self.gathers - fast)

    def _is_fast(self, next_id: int) -> bool:
        """Whether the view still shows the store, and the writer is slow enough for most gathers to be whole."""
        view, last_id = self.view, self._last_id
        self._last_id = next_id
        if view.limits[VIEW] != view.view or view.words[EPOCH] != view.epoch or next_id > self.end_id:
            return False
        if self._slack is None or last_id is None:
            return True
        return (next_id - last_id) // self.gathers <= self._slack // 2


class _Gather:
    """Builds the graph that turns draws into rows.

    The arithmetic is that of `plan.WindowStarts` and `plan.sequence_rows`, to the bit.

    Args:
        view: What to gather from.
        num_steps: Steps of a sequence; None for single steps.
    """

    def __init__(self, view: MappedView, *, num_steps: int | None) -> None:
        self._view = view
        self._num_steps = num_steps
        self._flats = [None if column.flat is None else _tensor(column.flat) for column in view.columns]
        self._looks = [(_tensor(view.words[:_WORDS]), _tensor(view.limits[:_LIMITS])) for _ in range(2)]
        ends = [
            (len(column.flat) + column.first_row) // view.lanes - (num_steps or 1)
            for column in view.columns
            if column.flat is not None and column.ring_rows is None
        ]
        self.end_id = min(ends, default=EVERY_ID)
        # Runs that ended before the window count no more, and others don't begin while the epoch is the same.
        floor = int(view.words[FLOOR]) if view.lowest is None else view.lowest
        first_id = max(floor, int(view.words[NEXT]) - view.max_length)
        self._runs = [run for run in view.runs if run > first_id] if (num_steps or 1) > 1 else []

    def __call__(self, draws: Any) -> tuple[Any, ...]:
        """Returns whether the rows are whole, and the leaves of the element that the draws [*K] choose."""
        import tensorflow as tf

        view = self._view
        words, limits = self._look(0)
        first_id, next_id = self._window(words)
        ids, pairs, rows = self._draw(draws, first_id, next_id)
        found = [
            tf.zeros(tf.concat([tf.shape(rows), column.layout.shape], 0), column.layout.dtype)
            if flat is None
            else tf.raw_ops.GatherV2(params=flat, indices=index, axis=0)
            for flat, column, index in zip(self._flats, view.columns, self._indices(rows, first_id), strict=True)
        ]
        probabilities = tf.fill(tf.shape(draws), tf.cast(1.0 / tf.cast(pairs, tf.float64), tf.float32))
        with tf.control_dependencies(found):
            words_after, limits_after = self._look(1)
        is_whole = tf.reduce_all(
            tf.greater_equal(
                tf.stack(
                    [pairs, limits[ATTACHED_TO], limits[DETACH_AT], first_id, first_id, first_id, next_id],
                ),
                tf.stack(
                    [
                        tf.constant(1, tf.int64),
                        words[NEXT],
                        first_id + 1,
                        words_after[NEXT] - view.keeps,
                        words_after[FLOOR] if view.lowest is None else tf.constant(0, tf.int64),
                        limits_after[DETACHED_TO],
                        words[NEXT],
                    ]
                ),
            )
        )
        is_same = tf.reduce_all(
            tf.equal(
                tf.stack([words[EPOCH], words_after[EPOCH], limits[VIEW], limits_after[VIEW]]),
                tf.constant([view.epoch, view.epoch, view.view, view.view], tf.int64),
            )
        )
        return (tf.logical_and(is_whole, is_same), *found, ids, probabilities)

    def _look(self, number: int) -> tuple[list[Any], list[Any]]:
        import tensorflow as tf

        words, limits = self._looks[number]
        # Unstacking copies the words out of memory that goes on changing.
        return tf.unstack(words), tf.unstack(limits)

    def _window(self, words: list[Any]) -> tuple[Any, Any]:
        """The window, cut off where the columns end, so that no index is outside them; the second look tells."""
        import tensorflow as tf

        view, next_id = self._view, words[NEXT]
        first_id = words[FLOOR] if view.lowest is None else tf.constant(view.lowest, tf.int64)
        if view.max_length < self.end_id:
            first_id = tf.maximum(first_id, next_id - view.max_length)
        if self.end_id < EVERY_ID:
            first_id, next_id = tf.minimum(first_id, self.end_id), tf.minimum(next_id, self.end_id)
        return first_id, next_id

    def _draw(self, draws: Any, first_id: Any, next_id: Any) -> tuple[Any, Any, Any]:
        """Returns the ids, the number of pairs, and the flat rows ``(id - first_id) * lanes + lane``."""
        import tensorflow as tf

        lanes, steps = self._view.lanes, self._num_steps or 1
        if not self._runs:
            pairs = tf.maximum(next_id - first_id - (steps - 1), 0) * lanes
            rows = tf.cast(draws * tf.cast(pairs, tf.float64), tf.int64)
        else:
            lows = tf.maximum(tf.constant([0, *self._runs], tf.int64), first_id)
            highs = tf.minimum(tf.constant([*self._runs, np.iinfo(np.int64).max], tf.int64), next_id)
            counts = tf.maximum(highs - lows - (steps - 1), 0)
            ends = tf.cumsum(counts)
            pairs = ends[-1] * lanes
            rows = tf.cast(draws * tf.cast(pairs, tf.float64), tf.int64)
            piece = tf.searchsorted(ends, tf.reshape(rows // lanes, [-1]), side="right", out_type=tf.int64)
            piece = tf.minimum(piece, len(self._runs))  # of an empty window, which is thrown away
            addends = tf.gather(lows - first_id - (ends - counts), piece) * lanes
            rows += tf.reshape(addends, tf.shape(rows))
        if self._num_steps is not None:
            rows = tf.expand_dims(rows, -1) + tf.constant(np.arange(self._num_steps) * lanes, tf.int64)
        return tf.math.floordiv(rows, tf.constant(lanes, tf.int64)) + first_id, pairs, rows

    def _indices(self, rows: Any, first_id: Any) -> list[Any]:
        """The rows as each column counts them. Columns that begin at the same row share the tensor."""
        import tensorflow as tf

        lanes = self._view.lanes
        columns = self._view.columns
        rings = sorted({column.ring_rows for column in columns if column.ring_rows is not None})
        found: dict[tuple[int | None, int], Any] = {}
        if rings:
            offsets = tf.unstack(tf.math.floormod(first_id, tf.constant(rings, tf.int64)) * lanes)
            found = {(ring, 0): rows + offset for ring, offset in zip(rings, offsets, strict=True)}

        def index(column: MappedRows) -> Any:
            key = (column.ring_rows, column.first_row)
            if key not in found:
                found[key] = rows + (first_id * lanes - column.first_row)
            return found[key]

        return [index(column) for column in columns]


def _tensor(array: NDArray[Any]) -> Any:
    """The array as a tensor of the same memory, which lives as long as the tensor does."""
    import tensorflow as tf

    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())


def _map_inline(
    dataset: "tf.data.Dataset", function: Callable[[Any], Any], *, num_parallel_calls: int | None
) -> "tf.data.Dataset":
    """`Dataset.map` that runs the many small operations of its function one after the other in one thread.

    Handing each to a thread pool takes longer than the operation: 85 against 180 µs a batch, measured on 2 cores. This
    isn't in tf.data's public face; where it isn't there at all, the plain `map` does the same.
    """
    try:
        from tensorflow.python.data.ops import map_op

        if num_parallel_calls is None:
            return map_op._MapDataset(dataset, function, use_inter_op_parallelism=False)
        return map_op._ParallelMapDataset(
            dataset, function, num_parallel_calls, deterministic=None, use_inter_op_parallelism=False
        )
    except (ImportError, AttributeError, TypeError):
        return dataset.map(function, num_parallel_calls=num_parallel_calls)
