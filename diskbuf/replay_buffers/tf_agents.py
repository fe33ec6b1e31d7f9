"""TF-Agents' buffer classes over a disk buffer: the same names, arguments and results, with the rows in a store.

A program written for TF-Agents changes its import lines, and gives a path where its rows are to stay. Knows nothing of
TF-Agents itself; TensorFlow is imported when a buffer is made.
"""

import contextlib
import functools
import json
import operator
import os
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import NDArray

from diskbuf import specs
from diskbuf.errors import DiskbufError, OptionError, SpecError
from diskbuf.options import StoreOptions
from diskbuf.replay_buffers.items import ItemFormat
from diskbuf.replay_buffers.uniform import BufferInfo, UniformReplayBuffer

if TYPE_CHECKING:
    import tensorflow as tf


class StoreArguments(TypedDict, total=False):
    """What these classes take beyond TF-Agents' arguments; each as in `UniformReplayBuffer`."""

    mode: Literal["a", "w-"]
    keep_history: bool
    metadata: Any
    seed: int | None
    options: StoreOptions | None
    trim: bool


class _DropIn:
    """What the classes have in common: a disk buffer, a spec as it was given, and being a `tf.Module`.

    A `tf.Module` is what `tf.train.Checkpoint` takes, and what TF-Agents' buffers are. Deriving from it would import
    TensorFlow together with this module, so the class that is instantiated is made on the way, from this one and it.
    """

    buffer: UniformReplayBuffer
    _format: ItemFormat
    _given_spec: Callable[[], Any]

    def __new__(cls, *_args: Any, **_arguments: Any) -> Self:
        bare: Any = cls
        made: Self = object.__new__(_as_module(bare))
        return made

    def _open(
        self, data_spec: Any, batch_size: int, max_length: int | None, *, stateful_dataset: bool, **arguments: Any
    ) -> None:
        super().__init__()  # tf.Module's
        plain_spec = specs.as_spec(_without_wrappers(data_spec))
        self.buffer = UniformReplayBuffer(plain_spec, batch_size, max_length, **arguments)
        self._format = ItemFormat(plain_spec, self.buffer.batch_size)
        self._given_spec = lambda: data_spec  # a tf.Module would wrap the nest itself
        self._stateful_dataset = stateful_dataset
        self._position = _position(self.buffer)

    @property
    def data_spec(self) -> Any:
        """The spec of one item, as it was given."""
        return self._given_spec()

    @property
    def stateful_dataset(self) -> bool:
        """What was given. Datasets read a store, whatever this says."""
        return self._stateful_dataset

    @property
    def path(self) -> Path:
        """The store's folder."""
        return Path(self.buffer.path)

    def flush(self) -> None:
        """Brings everything added so far to the disk, so that it survives a power cut.

        Raises:
            ClosedError: After `close`.
            OSError: When something can't be written; what was on the disk before still is.
        """
        self.buffer.flush()

    def close(self) -> None:
        """Flushes and closes; without a path the rows are removed. Closing twice is fine.

        Raises:
            OSError: When the flush fails; the buffer is closed all the same.
        """
        self.buffer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self.buffer!r}>"

    def _leaves(self, items: Any) -> list[Any]:
        try:
            return self._format.structure.flatten(items)
        except SpecError:
            plain = _without_wrappers(items)  # what a tf.Module made of its nests
            return self._format.structure.flatten(plain)


class TFUniformReplayBuffer(_DropIn):
    """TF-Agents' TFUniformReplayBuffer with its rows on disk: tensors in, tensors out, eagerly and in a `tf.function`.

    Whatever TF-Agents does with such a buffer it does with this one: drivers call `add_batch`, agents train from
    `as_dataset`, and `tf.train.Checkpoint` takes it. Without a `path` the rows go when the buffer does, as TF-Agents'
    do. With one they survive restarts and kill -9, the same script run again goes on with them, and `diskbuf.open`
    reads them meanwhile in another process. `buffer` is the disk buffer underneath.

        >>> import tensorflow as tf
        >>> spec = {"observation": tf.TensorSpec([3], tf.float32), "reward": tf.TensorSpec([], tf.float32)}
        >>> with TFUniformReplayBuffer(spec, batch_size=2, max_length=100) as replay_buffer:
        ...     for t in range(5):
        ...         replay_buffer.add_batch({"observation": tf.zeros([2, 3]), "reward": tf.fill([2], float(t))})
        ...     items, info = replay_buffer.get_next(sample_batch_size=4, num_steps=2)
        >>> items["observation"].shape
        TensorShape([4, 2, 3])

    Stateful operations of a `tf.function` run in the order of the program, and so do these. What a graph runs into
    arrives as `tf.errors.InvalidArgumentError` with the message; what is wrong eagerly is an error of `diskbuf.errors`
    that is a `tf.errors.InvalidArgumentError` too.

    A checkpoint holds no rows, because the store does: it holds how many steps had been added, and brings them to the
    disk. Restoring leaves the store as it is, and warns when it has fewer steps than the checkpoint counted.

    Other than TF-Agents', it checks every item before it writes one, keeps lanes apart in a deterministic pass after
    the ring has wrapped, gives step ids in all of `BufferInfo.ids`, and takes no sequence across a restart.

    Args:
        data_spec: Nest of tf.TensorSpec, or whatever else `UniformReplayBuffer` takes, for one step of one lane.
        batch_size: Number of lanes B.
        max_length: Most steps of a lane in the window; None keeps everything in it.
        scope: Only reported.
        device: Only reported; rows come from the host.
        table_fn: None. Tables hold rows in variables, and these rows are in files.
        dataset_drop_remainder: Whether a deterministic pass leaves out the batches and windows that come out short.
        dataset_window_shift: Steps between the starts of a deterministic pass's windows; None is `num_steps`.
        stateful_dataset: Only reported.
        path: The store's folder; None makes a private temporary store that is removed at close.
        **store: `mode`, `keep_history`, `metadata`, `seed`, `options` and `trim` of `UniformReplayBuffer`.

    Raises:
        OptionError: When table_fn is given, or an argument is outside its rule.
        SpecError: When data_spec is not a nest of specs.
        StoreError: As `UniformReplayBuffer`, when the store at the path can't be continued.
        OSError: When a file can't be made.
    """

    def __init__(
        self,
        data_spec: Any,
        batch_size: int,
        max_length: int | None = 1000,
        scope: str = "TFUniformReplayBuffer",
        device: str = "cpu:*",
        table_fn: None = None,
        dataset_drop_remainder: bool = False,
        dataset_window_shift: int | None = None,
        stateful_dataset: bool = False,
        *,
        path: str | os.PathLike[str] | None = None,
        **store: Unpack[StoreArguments],
    ) -> None:
        if table_fn is not None:
            raise OptionError(
                f"table_fn must be None, got {table_fn!r}: a table keeps rows in variables, and these rows are in the "
                "store's files. Leave it out."
            )
        self._open(
            data_spec,
            batch_size,
            max_length,
            stateful_dataset=stateful_dataset,
            path=path,
            dataset_drop_remainder=dataset_drop_remainder,
            dataset_window_shift=dataset_window_shift,
            **store,
        )
        self._scope = scope
        self._device = device
        self._drops_remainder = dataset_drop_remainder

    @property
    def capacity(self) -> "tf.Tensor | None":
        """int64 [], most steps of all lanes in the window; None for no limit."""
        import tensorflow as tf

        return None if self.buffer.capacity is None else tf.constant(self.buffer.capacity, tf.int64)

    @property
    def batch_size(self) -> int:
        """Number of lanes B."""
        return self.buffer.batch_size

    @property
    def max_length(self) -> int | None:
        """Most steps of a lane in the window, None for no limit."""
        return self.buffer.max_length

    @property
    def scope(self) -> str:
        """What was given."""
        return self._scope

    @property
    def device(self) -> str:
        """What was given."""
        return self._device

    @property
    def table_fn(self) -> None:
        """None: there are no tables."""
        return

    def variables(self) -> list[Any]:
        """Returns an empty list: rows are in files, not in variables."""
        return []

    def num_frames(self) -> "tf.Tensor":
        """Returns int64 [], how many steps of all lanes are in the window.

        Raises:
            ClosedError: After `close`.
        """
        import tensorflow as tf

        (frames,) = _run(lambda: [np.int64(self.buffer.num_frames())], [tf.TensorSpec([], tf.int64)])
        return frames

    def add_batch(self, items: Any) -> "tf.Operation | None":
        """Adds one step of every lane. When this has run, the step survives the process.

        Args:
            items: Nest like `data_spec` with leaves [B, *shape] of the spec's dtypes, tensors or arrays; copied.

        Returns:
            The operation that adds them, None when executing eagerly.

        Raises:
            SpecError: When structure, dtype, rank, lanes or shape don't fit; nothing was added.
            ValueError: The same in a graph, while it is traced, as far as its static shapes tell.
            ClosedError: After `close`.
            OSError: When the disk is full; nothing was added, and adding goes on when there is room.
        """
        import tensorflow as tf

        if tf.executing_eagerly():
            with _also_of_tensorflow():
                self.buffer.add_batch(self._format.structure.unflatten(map(_numpy, self._leaves(items))))
            return None
        structure = self._format.structure
        with _telling_the_graph():
            tensors = [tf.convert_to_tensor(leaf) for leaf in self._leaves(items)]
            stand_ins = [
                _stand_in(tensor, spec, self.batch_size)
                for tensor, spec in zip(tensors, self._format.specs, strict=True)
            ]
            self._format.rows(structure.unflatten(stand_ins))
        return _operation(lambda *leaves: self.buffer.add_batch(structure.unflatten(leaves)), tensors)

    def clear(self) -> "tf.Operation | None":
        """Empties the window. Ids go on counting.

        Returns:
            The operation that does it, None when executing eagerly.

        Raises:
            ClosedError: After `close`.
        """
        import tensorflow as tf

        if tf.executing_eagerly():
            with _also_of_tensorflow():
                self.buffer.clear()
            return None
        return _operation(self.buffer.clear)

    def get_next(
        self, sample_batch_size: int | None = None, num_steps: int | None = None, time_stacked: bool = True
    ) -> tuple[Any, BufferInfo]:
        """Samples steps or sequences, uniform over all lanes and all ids at which a sequence may start.

        Args:
            sample_batch_size: Sequences S to a sample; None for one without a batch axis.
            num_steps: Steps T of a sequence; None for single steps without a time axis.
            time_stacked: Whether a sequence is one tensor with a time axis, or a tuple of T items.

        Returns:
            (items, info): items like `data_spec` with leaves [*shape], [S, *shape], [T, *shape] or [S, T, *shape], or
            a tuple of T of the first two; info.ids of the same leading shape or a tuple, info.probabilities [] or [S].
            All shapes are static.

        Raises:
            EmptyBufferError: When the window is empty.
            WindowError: When no run has num_steps steps in the window.
            OptionError: When an argument is outside its rule.
            ClosedError: After `close`.
            ValueError: When an argument is outside its rule in a graph, while it is traced.
        """
        import tensorflow as tf

        with contextlib.nullcontext() if tf.executing_eagerly() else _telling_the_graph():
            size = _static_count("sample_batch_size", sample_batch_size)
            steps = _static_count("num_steps", num_steps)
        structure = self._format.structure

        def sample() -> list[Any]:
            items, info = self.buffer.get_next(size, steps)
            return [*structure.flatten(items), info.ids, info.probabilities]

        leading = [length for length in (size, steps) if length is not None]
        outputs = [
            *self._tensor_specs(leading),
            tf.TensorSpec(leading, tf.int64),
            tf.TensorSpec(leading[: size is not None], tf.float32),
        ]
        *leaves, ids, probabilities = _run(sample, outputs)
        if steps is None or time_stacked:
            return structure.unflatten(leaves), BufferInfo(ids, probabilities)
        axis = 0 if size is None else 1
        items = map(structure.unflatten, zip(*(tf.unstack(leaf, steps, axis) for leaf in leaves), strict=True))
        return tuple(items), BufferInfo(tuple(tf.unstack(ids, steps, axis)), probabilities)

    def gather_all(self) -> Any:
        """Returns everything in the window, oldest first.

        Returns:
            Nest like `data_spec` with leaves [B, T, *shape], T the steps in the window (0 when it is empty).

        Raises:
            ClosedError: After `close`.
        """
        structure = self._format.structure
        return structure.unflatten(
            _run(lambda: structure.flatten(self.buffer.gather_all()), self._tensor_specs([self.batch_size, None]))
        )

    def as_dataset(
        self,
        sample_batch_size: int | None = None,
        num_steps: int | None = None,
        num_parallel_calls: int | None = None,
        sequence_preprocess_fn: Callable[[Any], Any] | None = None,
        single_deterministic_pass: bool = False,
        **reading: Any,
    ) -> "tf.data.Dataset":
        """Returns a `tf.data.Dataset` of (items, BufferInfo), as `UniformReplayBuffer.as_dataset` does.

        One thing is as in TF-Agents instead: a deterministic pass that is given both `sample_batch_size` and
        `num_steps` leaves out the windows that come out short, so that the time axis is static, and only the batches
        are kept or left out as `dataset_drop_remainder` says. Without `sample_batch_size` short windows come too.

        Args:
            sample_batch_size: Sequences to an element, in a pass lanes to an element; None for no batch axis.
            num_steps: Steps of a sequence; None for single steps without a time axis.
            num_parallel_calls: Elements to read in parallel; None for one at a time.
            sequence_preprocess_fn: Applied to the items of each sequence before they are batched.
            single_deterministic_pass: Whether to visit every step once, in order.
            **reading: Whatever else `UniformReplayBuffer.as_dataset` takes.

        Returns:
            The dataset. A failure while it is read (an empty buffer) is a `tf.errors.OpError` with the message.

        Raises:
            SpecError: When data_spec contains lists, which TensorFlow takes for tensors, or sequence_preprocess_fn
                returns another structure.
            WindowError: When num_steps can't be had.
            OptionError: When an argument is outside its rule, or all data would be dropped.
            NotImplementedError: For sequence_preprocess_fn with a deterministic pass.
            ClosedError: After `close`.
        """
        if isinstance(sequence_preprocess_fn, bool):
            raise OptionError(
                f"sequence_preprocess_fn must be a function, got {sequence_preprocess_fn!r}. "
                "Give single_deterministic_pass by its name."
            )
        size = _static_count("sample_batch_size", sample_batch_size)
        steps = _static_count("num_steps", num_steps)
        dataset = self.buffer.as_dataset(
            size, steps, num_parallel_calls, sequence_preprocess_fn, single_deterministic_pass, **reading
        )
        if not single_deterministic_pass or size is None or steps is None or self._drops_remainder:
            return dataset
        return self._of_whole_windows(dataset, steps)

    def _of_whole_windows(self, dataset: "tf.data.Dataset", steps: int) -> "tf.data.Dataset":
        import tensorflow as tf

        structure = self._format.structure

        def with_static_time(items: Any, info: Any) -> Any:
            leaves = [
                tf.ensure_shape(leaf, [None, steps, *spec.shape])
                for leaf, spec in zip(structure.flatten(items), self._format.specs, strict=True)
            ]
            return structure.unflatten(leaves), info._replace(ids=tf.ensure_shape(info.ids, [None, steps]))

        return dataset.filter(lambda _, info: tf.shape(info.ids)[1] == steps).map(with_static_time)

    def _tensor_specs(self, leading: Sequence[int | None]) -> "list[tf.TensorSpec]":
        import tensorflow as tf

        return [tf.TensorSpec([*leading, *spec.shape], tf.as_dtype(spec.dtype)) for spec in self._format.specs]


BanditReplayBuffer = TFUniformReplayBuffer
"""TF-Agents has the same class twice."""


class PyUniformReplayBuffer(_DropIn):
    """TF-Agents' PyUniformReplayBuffer with its rows on disk: arrays in, arrays out, no batch axis to keep.

    Each item of a batch is a row of its own, one after the other, in a single lane. `get_next` and `as_dataset` give
    items alone, as TF-Agents' do. `buffer` is the disk buffer underneath, which tells the ids too.

    Other than TF-Agents', it takes batches of any size, counts its frames, reads only rows that were written, and
    refuses to sample from an empty buffer. What is said of checkpoints at `TFUniformReplayBuffer` holds here too.

        >>> spec = {"reward": specs.ArraySpec([], "float32")}
        >>> with PyUniformReplayBuffer(spec, capacity=100) as replay_buffer:
        ...     replay_buffer.add_batch({"reward": np.arange(6, dtype="float32")})
        ...     replay_buffer.size, replay_buffer.get_next(sample_batch_size=4)["reward"].shape
        (6, (4,))

    Args:
        data_spec: Nest of TF-Agents' ArraySpec, or whatever else `UniformReplayBuffer` takes, for one item.
        capacity: Most items in the buffer; None keeps all.
        path: The store's folder; None makes a private temporary store that is removed at close.
        **store: `mode`, `keep_history`, `metadata`, `seed`, `options` and `trim` of `UniformReplayBuffer`.

    Raises:
        SpecError: When data_spec is not a nest of specs.
        OptionError: When an argument is outside its rule.
        StoreError: As `UniformReplayBuffer`, when the store at the path can't be continued.
        OSError: When a file can't be made.
    """

    def __init__(
        self,
        data_spec: Any,
        capacity: int | None,
        *,
        path: str | os.PathLike[str] | None = None,
        **store: Unpack[StoreArguments],
    ) -> None:
        self._open(data_spec, 1, _static_count("capacity", capacity), stateful_dataset=False, path=path, **store)

    @property
    def capacity(self) -> int | None:
        """Most items in the buffer, None for no limit."""
        return self.buffer.capacity

    @property
    def size(self) -> int:
        """How many items are in the buffer."""
        return self.buffer.num_frames()

    def num_frames(self) -> int:
        """Returns how many items are in the buffer.

        Raises:
            ClosedError: After `close`.
        """
        return self.buffer.num_frames()

    def add_batch(self, items: Any) -> None:
        """Adds items one after the other, all or none. When this returns, they survive the process.

        Args:
            items: Nest like `data_spec` with leaves [B, *shape] of the spec's dtypes, any B; copied.

        Raises:
            SpecError: When structure, dtype, rank or shape don't fit, or leaves differ in B; nothing was added.
            ClosedError: After `close`.
            OSError: When the disk is full; nothing was added, and adding goes on when there is room.
        """
        given = self._leaves(items)
        if not all(hasattr(leaf, "__array__") for leaf in given):
            self._format.rows(items)  # explains
        leaves = list(map(_numpy, given))
        number = len(leaves[0]) if leaves[0].ndim else 0
        for leaf, spec, path in zip(leaves, self._format.specs, self._format.structure.paths, strict=True):
            if leaf.dtype != spec.dtype or leaf.shape != (number, *spec.shape):
                wanted = ", ".join(map(str, ("B", *spec.shape)))
                raise SpecError(
                    f"leaf {path!r} must be {spec.dtype} [{wanted}], with as many items B in every leaf, "
                    f"got {leaf.dtype} {list(leaf.shape)}. Cast it, or give it the axis B with x[None].",
                    path=path,
                )
        self.buffer.extend(self._format.structure.unflatten(leaf[None] for leaf in leaves))

    def clear(self) -> None:
        """Empties the buffer. Ids go on counting.

        Raises:
            ClosedError: After `close`.
        """
        self.buffer.clear()

    def get_next(
        self, sample_batch_size: int | None = None, num_steps: int | None = None, time_stacked: bool = True
    ) -> Any:
        """Samples items or sequences of consecutive items, uniformly.

        Args:
            sample_batch_size: Sequences S to a sample; None for one without a batch axis.
            num_steps: Items T of a sequence; None for single items without a time axis.
            time_stacked: Whether a sequence is one array with a time axis, or a tuple of T items.

        Returns:
            Nest like `data_spec` with leaves [*shape], [S, *shape], [T, *shape] or [S, T, *shape], freshly allocated,
            or a tuple of T of the first two.

        Raises:
            EmptyBufferError: When the buffer is empty.
            WindowError: When no run has num_steps items in it.
            OptionError: When an argument is outside its rule.
            ClosedError: After `close`.
        """
        return self.buffer.get_next(sample_batch_size, num_steps, time_stacked)[0]

    def gather_all(self) -> Any:
        """Returns all items, oldest first.

        Returns:
            Nest like `data_spec` with leaves [1, T, *shape], T the items in the buffer (0 when it is empty), freshly
            allocated.

        Raises:
            ClosedError: After `close`.
        """
        return self.buffer.gather_all()

    def as_dataset(
        self,
        sample_batch_size: int | None = None,
        num_steps: int | None = None,
        num_parallel_calls: int | None = None,
        sequence_preprocess_fn: Callable[[Any], Any] | None = None,
        single_deterministic_pass: bool = False,
        **reading: Any,
    ) -> "tf.data.Dataset":
        """Returns an endless `tf.data.Dataset` of items, sampled as `get_next` does.

        Args:
            sample_batch_size: Sequences to an element; None for no batch axis.
            num_steps: Items of a sequence; None for single items without a time axis.
            num_parallel_calls: Elements to read in parallel; None for one at a time.
            sequence_preprocess_fn: Applied to each sequence before they are batched.
            single_deterministic_pass: False.
            **reading: Whatever else `UniformReplayBuffer.as_dataset` takes.

        Returns:
            The dataset. A failure while it is read (an empty buffer) is a `tf.errors.OpError` with the message.

        Raises:
            NotImplementedError: For a deterministic pass, as in TF-Agents: its batches are of lanes, and here is one.
            SpecError: When data_spec contains lists, which TensorFlow takes for tensors, or sequence_preprocess_fn
                returns another structure.
            WindowError: When num_steps can't be had.
            OptionError: When an argument is outside its rule.
            ClosedError: After `close`.
        """
        if single_deterministic_pass:
            raise NotImplementedError(
                "single_deterministic_pass is not supported: it batches lanes, and there is one. "
                "Batch windows yourself: replay_buffer.buffer.as_dataset(single_deterministic_pass=True).batch(...)."
            )
        dataset = self.buffer.as_dataset(
            sample_batch_size, num_steps, num_parallel_calls, sequence_preprocess_fn, **reading
        )
        return dataset.map(lambda items, _: items)


# ---- TensorFlow's side of it


@functools.cache
def _as_module(cls: type[Any]) -> type[Any]:
    """The class as a tf.Module, under its own name."""
    import tensorflow as tf

    if issubclass(cls, tf.Module):
        return cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (cls, tf.Module), exec_body=lambda body: body.update(names))


def _position(buffer: UniformReplayBuffer) -> Any:
    """What of a buffer goes into a tf.train.Checkpoint."""
    import tensorflow as tf

    class Position(tf.train.experimental.PythonState):  # type: ignore[misc]
        def serialize(self) -> str:
            buffer.flush()
            return json.dumps({"path": str(buffer.path), "next_id": buffer.next_id})

        def deserialize(self, string_value: str | bytes) -> None:
            saved = json.loads(string_value)
            if buffer.next_id < saved["next_id"]:
                warnings.warn(
                    f"{buffer.path} has had {buffer.next_id} steps added, and {saved['path']} had {saved['next_id']} "
                    "when the checkpoint was written. A checkpoint holds no rows: give the buffer the path of the "
                    "store it had.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    return Position()


def _run(function: Callable[[], list[Any]], outputs: "Sequence[tf.TensorSpec]") -> list[Any]:
    """Calls a function for arrays of these specs, now or whenever the graph runs, and returns them as tensors."""
    import tensorflow as tf

    if tf.executing_eagerly():
        with _also_of_tensorflow():
            arrays = function()
        return [tf.convert_to_tensor(array) for array in arrays]

    def call() -> list[Any]:
        with _telling_the_graph():
            return function()

    tensors = tf.numpy_function(call, [], [spec.dtype for spec in outputs], stateful=True)
    for tensor, spec in zip(tensors, outputs, strict=True):
        tensor.set_shape(spec.shape)
    return list(tensors)


def _operation(function: Callable[..., None], inputs: "Sequence[tf.Tensor]" = ()) -> "tf.Operation":
    """Returns the operation that calls a function with the inputs as arrays."""
    import tensorflow as tf

    def call(*arrays: NDArray[Any]) -> np.bool:
        with _telling_the_graph():
            function(*arrays)
        return np.True_

    return tf.group(tf.numpy_function(call, inputs, tf.bool, stateful=True))


@contextlib.contextmanager
def _telling_the_graph() -> Iterator[None]:
    """Makes ValueErrors of our errors: TensorFlow passes those on while it traces, and no class it doesn't know.

    What a ValueError becomes while a graph runs is a tf.errors.InvalidArgumentError.
    """
    try:
        yield
    except DiskbufError as error:
        raise ValueError(str(error)) from error


@contextlib.contextmanager
def _also_of_tensorflow() -> Iterator[None]:
    """Lets our errors be caught as tf.errors.InvalidArgumentError too, which is what TF-Agents' buffers raise."""
    try:
        yield
    except DiskbufError as error:
        kind: Any = type(error)
        error.__class__ = _with_tensorflows(kind)
        raise


@functools.cache
def _with_tensorflows(kind: type[DiskbufError]) -> type[DiskbufError]:
    import tensorflow as tf

    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "_error_code": tf.errors.INVALID_ARGUMENT,
        **dict.fromkeys(("_node_def", "_op"), None),
        "_message": property(lambda error: str(error.args[0])),
    }
    return type(kind.__name__, (kind, tf.errors.InvalidArgumentError), names)


def _numpy(leaf: Any) -> Any:
    return leaf if isinstance(leaf, np.ndarray) or not hasattr(leaf, "__array__") else np.asarray(leaf)


def _stand_in(tensor: "tf.Tensor", spec: specs.ArraySpec, lanes: int) -> NDArray[Any]:
    """An array that takes no room, of the dtype and shape of a symbolic tensor, where they are unknown of the right."""
    wanted = (lanes, *spec.shape)
    shape = wanted if tensor.shape.rank is None else tensor.shape.as_list()
    known = [
        length if length is not None else wanted[axis] if axis < len(wanted) else 1 for axis, length in enumerate(shape)
    ]
    return np.broadcast_to(np.zeros((), tensor.dtype.as_numpy_dtype), known)


def _static_count(name: str, value: Any) -> int | None:
    """A number that may be a tensor, as long as it is known before the graph runs.

    Raises:
        OptionError: When it isn't known, or isn't an int of at least 1.
    """
    import tensorflow as tf

    if value is None:
        return None
    if isinstance(value, tf.Tensor):
        value = tf.get_static_value(value)
        if value is None:
            raise OptionError(f"{name} must be known when the graph is made, got a symbolic tensor. Give an int.")
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if isinstance(value, bool) or number < 1:
        raise OptionError(f"{name} must be an int of at least 1, got {value!r}.")
    return number


def _without_wrappers(nest: Any) -> Any:
    """Returns a nest with plain containers for those that a tf.Module puts around the dicts, lists and tuples it holds.

    Leaves stay as they are.
    """
    if isinstance(nest, dict):
        kind = OrderedDict if isinstance(nest, OrderedDict) else dict
        return kind((key, _without_wrappers(child)) for key, child in nest.items())
    if isinstance(nest, list):
        return [_without_wrappers(child) for child in nest]
    if isinstance(nest, tuple):
        plain = getattr(nest, "__wrapped__", nest)
        children = map(_without_wrappers, plain)
        return type(plain)(*children) if hasattr(plain, "_fields") else tuple(children)
    return nest
