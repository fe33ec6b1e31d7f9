"""Rows as tf.data datasets, read by numpy on the host, one call an element. Knows no buffer, only what it hands in."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import DiskbufError, SpecError
from diskbuf.tree import Structure

if TYPE_CHECKING:
    import tensorflow as tf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Elements:
    """What the elements of a dataset look like, and how they are told of their ids.

    Attributes:
        data_spec: Nest of ArraySpec for one step of one lane.
        batch_size: Length of the batch axis; None for none.
        num_steps: Length of the time axis; None for none.
        info: Puts ids and probabilities together.
    """

    data_spec: Any
    batch_size: int | None
    num_steps: int | None
    info: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        path = _list_in(self.data_spec, "")
        if path is not None:
            raise SpecError(
                f"data_spec must hold no lists, which TensorFlow takes for tensors, got one at {path!r}. "
                "Convert lists to tuples: (a, b, c) for [a, b, c].",
                path=path,
            )

    def leading_shape(self, *, is_exact: bool) -> tuple[int | None, ...]:
        """The batch and time axes; of unknown length when the last elements may be shorter."""
        return tuple(
            (length if is_exact else None) for length in (self.batch_size, self.num_steps) if length is not None
        )


def random_dataset(
    elements: Elements,
    sample: Callable[[int], list[NDArray[Any]]],
    *,
    num_parallel_calls: int | None,
    sequence_preprocess_fn: Callable[[Any], Any] | None,
) -> "tf.data.Dataset":
    """Returns an endless dataset of (items, info).

    Args:
        elements: What an element looks like.
        sample: Reads element k: the leaves, the ids and the probabilities, all with a batch axis in front, which is
            of length 1 when `elements.batch_size` is None.
        num_parallel_calls: Elements to read in parallel; None for one at a time.
        sequence_preprocess_fn: Applied to the items of each sequence.

    Returns:
        The dataset.

    Raises:
        SpecError: When data_spec holds lists, or sequence_preprocess_fn changes the structure, a dtype or a rank.
    """
    import tensorflow as tf

    structure = Structure(elements.data_spec)
    leaves = structure.flatten(elements.data_spec)
    leading = elements.leading_shape(is_exact=True)
    ids_shape, probabilities_shape = leading, leading[: elements.batch_size is not None]
    shapes = [(*leading, *spec.shape) for spec in leaves] + [ids_shape, probabilities_shape]
    dtypes = [spec.dtype for spec in leaves] + [np.dtype(np.int64), np.dtype(np.float32)]

    def read(number: NDArray[np.int64]) -> list[NDArray[Any]]:
        with _telling_tensorflow():
            found = sample(int(number))
        return found if elements.batch_size is not None else [leaf.reshape(leaf.shape[1:]) for leaf in found]

    def element(number: Any) -> Any:
        tensors = tf.numpy_function(read, [number], [tf.as_dtype(dtype) for dtype in dtypes], stateful=True)
        for tensor, shape in zip(tensors, shapes, strict=True):
            tensor.set_shape(shape)
        *rows, ids, probabilities = tensors
        items = structure.unflatten(rows)
        return items, elements.info(ids, probabilities)

    dataset = tf.data.Dataset.counter().map(element, num_parallel_calls=num_parallel_calls)
    return dataset if sequence_preprocess_fn is None else _preprocessed(dataset, sequence_preprocess_fn, elements)


def _preprocessed(dataset: "tf.data.Dataset", function: Callable[[Any], Any], elements: Elements) -> "tf.data.Dataset":
    import tensorflow as tf

    before = dataset.element_spec
    singles = dataset if elements.batch_size is None else dataset.unbatch()
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


def pass_dataset(
    elements: Elements,
    read_pass: Callable[[], Iterator[list[NDArray[Any]]]],
    *,
    is_exact: bool,
) -> "tf.data.Dataset":
    """Returns a finite dataset of (items, info), info without probabilities, as TF-Agents has it.

    Args:
        elements: What an element looks like.
        read_pass: Begins a pass; yields the leaves and the ids of each element.
        is_exact: Whether all elements have the full batch and time axes.

    Returns:
        The dataset; each iterator begins a pass of its own.

    Raises:
        SpecError: When data_spec holds lists.
    """
    import tensorflow as tf

    structure = Structure(elements.data_spec)
    leading = elements.leading_shape(is_exact=is_exact)
    flat_specs = [
        *(
            tf.TensorSpec((*leading, *spec.shape), tf.as_dtype(spec.dtype))
            for spec in structure.flatten(elements.data_spec)
        ),
        tf.TensorSpec(leading, tf.int64),
    ]

    def elements_of_pass() -> Iterator[tuple[NDArray[Any], ...]]:
        with _telling_tensorflow():
            yield from (tuple(element) for element in read_pass())

    def nest(*flat: Any) -> Any:
        *rows, ids = flat
        return structure.unflatten(rows), elements.info(ids, ())

    return tf.data.Dataset.from_generator(elements_of_pass, output_signature=tuple(flat_specs)).map(nest)


@contextlib.contextmanager
def _telling_tensorflow() -> Iterator[None]:
    """Lets our errors arrive as `tf.errors.InvalidArgumentError`, which TensorFlow makes of a ValueError."""
    try:
        yield
    except DiskbufError as error:
        raise ValueError(str(error)) from error


def _list_in(nest: Any, path: str) -> str | None:
    """Path of the first list in a nest, None when there is none."""
    if isinstance(nest, list):
        return path
    if isinstance(nest, dict):
        parts = list(nest.items())
    elif isinstance(nest, tuple):
        parts = list(enumerate(nest))
    else:
        return None
    found = (_list_in(part, f"{path}/{name}" if path else str(name)) for name, part in parts)
    return next((hit for hit in found if hit is not None), None)
