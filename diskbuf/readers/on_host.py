"""Random rows read by NumPy on the host, as a dataset: what every store can do."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.readers.elements import Elements, numpy_call, telling_tensorflow, unbatched
from diskbuf.readers.rows import Sampler

if TYPE_CHECKING:
    import tensorflow as tf


def elements_of(
    elements: Elements, sampler: Sampler, *, read_ahead: int, num_parallel_calls: int | None
) -> "tf.data.Dataset":
    """Returns the endless dataset of (items, info) that NumPy reads, `read_ahead` elements a call."""
    import tensorflow as tf

    read = read_block_of(elements, sampler, read_ahead=read_ahead)
    blocks = tf.data.Dataset.counter().map(
        lambda number: elements.nest(*read(number)), num_parallel_calls=num_parallel_calls
    )
    return blocks if read_ahead == 1 else unbatched(blocks, elements)


def read_block_of(elements: Elements, sampler: Sampler, *, read_ahead: int) -> Callable[[Any], Any]:
    """Returns the function of a block's number to its leaves, which have a block axis when it holds several."""
    specs = elements.tensor_specs(is_exact=True, has_probabilities=True)
    count, num_steps = elements.batch_size or 1, elements.num_steps
    axis = int(read_ahead > 1)

    def read(number: NDArray[np.int64]) -> list[NDArray[Any]]:
        with telling_tensorflow():
            if read_ahead == 1:
                sample = sampler.sample(int(number), count=count, num_steps=num_steps)
            else:
                sample = sampler.sample_block(int(number) * read_ahead, read_ahead, count=count, num_steps=num_steps)
        leaves = [*sample.leaves, sample.ids, sample.probabilities]
        return leaves if elements.batch_size is not None else [leaf.squeeze(axis) for leaf in leaves]

    def block(number: Any) -> Any:
        tensors = numpy_call(read, [number], [spec.dtype for spec in specs])
        for tensor, spec in zip(tensors, specs, strict=True):
            tensor.set_shape([read_ahead, *spec.shape] if read_ahead > 1 else spec.shape)
        return tuple(tensors)

    return block
