"""Rows as tf.data datasets. Two executors of one plan: TensorFlow's own gathers, and NumPy on the host.

Knows no buffer, only the readers that it is handed.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import SpecError
from diskbuf.readers import in_graph, on_host
from diskbuf.readers.elements import Elements, as_it_is, numpy_call, telling_tensorflow, unbatched
from diskbuf.readers.rows import Pass, PassReader, Sampler

if TYPE_CHECKING:
    import tensorflow as tf

Executor = Literal["graph", "host"]

_MOST_AHEAD = 16
_MOST_AHEAD_BYTES = 2**20
_MOST_PASS_ELEMENTS = 256


def usual_read_ahead(elements: Elements) -> int:
    """How many elements to draw from one window, where that need not be the window of their moment.

    Enough to share the cost of a call, few enough to stay in the cache.
    """
    return max(1, min(_MOST_AHEAD, _MOST_AHEAD_BYTES // max(1, elements.nbytes)))


def random_dataset(
    elements: Elements,
    sampler: Sampler,
    *,
    read_ahead: int,
    num_parallel_calls: int | None,
    sequence_preprocess_fn: Callable[[Any], Any] | None,
    executor: Executor | None = None,
) -> "tf.data.Dataset":
    """Returns an endless dataset of (items, info).

    Args:
        elements: What an element looks like.
        sampler: Reads them.
        read_ahead: Elements to draw from one window; with 1 each is drawn from the window of its moment.
        num_parallel_calls: Elements to read in parallel; None for one at a time.
        sequence_preprocess_fn: Applied to the items of each sequence.
        executor: Who gathers the rows; None chooses.

    Returns:
        The dataset.

    Raises:
        SpecError: When data_spec holds lists, or sequence_preprocess_fn changes the structure, a dtype or a rank.
    """
    view = None if executor == "host" else in_graph.view_of(sampler)
    if view is None:
        dataset = on_host.elements_of(elements, sampler, read_ahead=read_ahead, num_parallel_calls=num_parallel_calls)
    else:
        dataset = in_graph.elements_of(
            elements, sampler, view, read_ahead=read_ahead, num_parallel_calls=num_parallel_calls
        )
    dataset = _with_options(dataset)
    return dataset if sequence_preprocess_fn is None else _preprocessed(dataset, sequence_preprocess_fn, elements)


def _preprocessed(dataset: "tf.data.Dataset", function: Callable[[Any], Any], elements: Elements) -> "tf.data.Dataset":
    import tensorflow as tf

    before = dataset.element_spec
    singles = dataset if elements.batch_size is None else unbatched(dataset, elements)
    mapped = singles.map(lambda items, info: (function(items), info))
    after = mapped if elements.batch_size is None else mapped.batch(elements.batch_size, drop_remainder=True)
    try:
        tf.nest.assert_same_structure(before, after.element_spec)
        pairs = list(zip(tf.nest.flatten(before), tf.nest.flatten(after.element_spec), strict=True))
    except (ValueError, TypeError) as error:
        raise SpecError(
            f"sequence_preprocess_fn must keep the structure of the items, got {mapped.element_spec[0]}."
        ) from error
    for was, now in pairs:
        if was.dtype != now.dtype or was.shape.rank != now.shape.rank:
            raise SpecError(f"sequence_preprocess_fn must keep dtypes and ranks, but makes {now} of {was}.")
    return after


def pass_dataset(elements: Elements, reader: PassReader, *, is_exact: bool) -> "tf.data.Dataset":
    """Returns a finite dataset of (items, info), info without probabilities, as TF-Agents has it.

    Args:
        elements: What an element looks like.
        reader: Reads them.
        is_exact: Whether all elements have the full batch and time axes.

    Returns:
        The dataset; each iterator makes a pass of its own, through the window of its first element's moment.

    Raises:
        SpecError: When data_spec holds lists.
    """
    import tensorflow as tf

    specs = elements.tensor_specs(is_exact=is_exact, has_probabilities=False)
    most = max(1, min(_MOST_PASS_ELEMENTS, _MOST_AHEAD_BYTES // max(1, elements.nbytes)))
    nothing = [np.empty((0, *(length or 0 for length in spec.shape)), spec.dtype.as_numpy_dtype) for spec in specs]

    def begin(_: Any) -> NDArray[np.int64]:
        with telling_tensorflow():
            return np.array(reader.begin(), np.int64)

    def read(window: NDArray[np.int64], element: NDArray[np.int64]) -> list[NDArray[Any]]:
        with telling_tensorflow():
            found = reader.read(Pass(*window.tolist()), int(element), most)
        if found is None:
            return [np.array(0), *nothing]
        leaves, ids = found
        return [np.array(len(ids)), *leaves, ids]

    @as_it_is
    def elements_of(window: Any) -> "tf.data.Dataset":
        @as_it_is
        def block(element: Any, _: Any) -> Any:
            count, *tensors = numpy_call(
                read,
                [window, element],
                [tf.int64, *(spec.dtype for spec in specs)],
            )
            count.set_shape([])
            for tensor, spec in zip(tensors, specs, strict=True):
                tensor.set_shape([None, *spec.shape])
            return element + count, (count, tuple(tensors))

        blocks = tf.data.Dataset.range(np.iinfo(np.int64).max).scan(tf.constant(0, tf.int64), block)
        found = blocks.take_while(lambda count, _: count > 0)
        return unbatched(found.map(lambda _, tensors: elements.nest(*tensors, ())), elements)

    @as_it_is
    def window_of(number: Any) -> Any:
        return tf.ensure_shape(numpy_call(begin, [number], tf.int64), [2])

    passes = tf.data.Dataset.from_tensors(tf.constant(0, tf.int64)).map(window_of)
    return _with_options(passes.flat_map(elements_of))


def _with_options(dataset: "tf.data.Dataset") -> "tf.data.Dataset":
    """Keeps TensorFlow from writing the dataset's graph out, with the whole store as a constant in it.

    Its optimizers and its automatic sharding both do; and its iterators count as stateful, as if they could not be
    saved, though all their state is a number.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
    return dataset.with_options(options)
