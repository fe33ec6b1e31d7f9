"""What the elements of a dataset look like to TensorFlow, and how our errors reach its users."""

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from diskbuf.errors import DiskbufError, SpecError
from diskbuf.specs import ArraySpec
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

    @property
    def structure(self) -> Structure:
        """The structure of the items."""
        return Structure(self.data_spec)

    @property
    def nbytes(self) -> int:
        """Bytes of the items of one element."""
        steps = (self.batch_size or 1) * (self.num_steps or 1)
        specs: list[ArraySpec] = self.structure.flatten(self.data_spec)
        return steps * sum(math.prod(spec.shape) * int(spec.dtype.itemsize) for spec in specs)

    def leading_shape(self, *, is_exact: bool) -> tuple[int | None, ...]:
        """The batch and time axes; of unknown length when the last elements may be shorter."""
        return tuple(
            (length if is_exact else None) for length in (self.batch_size, self.num_steps) if length is not None
        )

    def tensor_specs(self, *, is_exact: bool, has_probabilities: bool) -> "list[tf.TensorSpec]":
        """The leaves of an element: the columns, the ids, and the probabilities where it has them."""
        import tensorflow as tf

        leading = self.leading_shape(is_exact=is_exact)
        specs = [
            tf.TensorSpec((*leading, *spec.shape), tf.as_dtype(spec.dtype))
            for spec in self.structure.flatten(self.data_spec)
        ]
        specs.append(tf.TensorSpec(leading, tf.int64))
        if has_probabilities:
            specs.append(tf.TensorSpec(leading[: self.batch_size is not None], tf.float32))
        return specs

    def nest(self, *flat: Any) -> Any:
        """Returns (items, info) of an element's leaves with probabilities."""
        *rows, ids, probabilities = flat
        return self.structure.unflatten(rows), self.info(ids, probabilities)


@contextlib.contextmanager
def telling_tensorflow() -> Iterator[None]:
    """Lets our errors arrive as `tf.errors.InvalidArgumentError`, which TensorFlow makes of a ValueError."""
    try:
        yield
    except DiskbufError as error:
        raise ValueError(str(error)) from error


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps AutoGraph from rewriting a function, and those it calls, when TensorFlow traces it.

    It takes time whenever a dataset is made, and ours have no loops or branches on tensors that it is there for.
    """
    import tensorflow as tf

    wrapped: Callable[..., Any] = tf.autograph.experimental.do_not_convert(function)
    return wrapped


def numpy_call(function: Callable[..., Any], inputs: Any, dtypes: Any) -> Any:
    """`tf.numpy_function`, for a function that goes with the dataset that calls it.

    TensorFlow keeps every such function for as long as the process, with all that it holds: a buffer that was forgotten
    would never be closed.
    """
    import tensorflow as tf

    if tf.executing_eagerly():  # nothing is kept then
        return tf.numpy_function(function, inputs, dtypes, stateful=True)
    graph: Any = tf.compat.v1.get_default_graph()
    outer = getattr(graph, "outer_graph", None)
    while outer is not None and hasattr(outer, "outer_graph"):
        graph, outer = outer, outer.outer_graph  # a function inside a function goes when that one has been traced
    if not hasattr(graph, "diskbuf_functions"):
        graph.diskbuf_functions = []
    held = _Held(function)
    graph.diskbuf_functions.append(held)
    reference = weakref.ref(held)

    def call(*arrays: Any) -> Any:
        held = reference()
        if held is None:
            raise RuntimeError("a dataset must be held for as long as it is read, but is gone. Keep it in a variable.")
        return held.function(*arrays)

    return tf.numpy_function(call, inputs, dtypes, stateful=True)


class _Held:
    """Something to refer to weakly."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


def unbatched(dataset: "tf.data.Dataset", elements: Elements) -> "tf.data.Dataset":
    """`Dataset.unbatch`, which kills the process where a tensor has no elements."""
    import tensorflow as tf

    if all(math.prod(spec.shape) for spec in elements.structure.flatten(elements.data_spec)):
        return dataset.unbatch()
    return dataset.flat_map(lambda *batch: tf.data.Dataset.from_tensor_slices(batch))


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
