"""Frames that are stored singly, stacked when they are read.

A stack of 4 frames holds each frame four times over; rows of single frames take a quarter of the space, and a reader
finds the frames of a stack in the rows before it.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import OptionError, SpecError
from diskbuf.readers.requests import count
from diskbuf.trajectories import StepType
from diskbuf.tree import Structure, describe

if TYPE_CHECKING:
    import tensorflow as tf

_STEP_TYPE = ("step_type",)


def stack_frames(rows: Any, num_frames: int, *, leaves: str | Sequence[str] = "observation", axis: int = 0) -> Any:
    """Returns rows whose observations are stacks of the last `num_frames` observations, oldest first.

    What Gymnasium's `FrameStackObservation` makes of an environment whose observations are these: frames from before
    the first row of an episode are that row's frame. A boundary row belongs to the episode that it ends.

    The first `num_frames - 1` steps are only looked back at, so read that many more; what is left is exact, whatever
    happened before the rows:

        >>> import numpy as np
        >>> step_type = np.array([[1, 2, 0, 1, 1]], np.int32)  # the second row is a boundary, the third begins anew
        >>> rows = {"step_type": step_type, "observation": np.array([[5, 6, 70, 71, 72]], np.uint8)}
        >>> stack_frames(rows, num_frames=3)["observation"].tolist()
        [[[70, 70, 70], [70, 70, 71], [70, 71, 72]]]

    So the first `num_frames - 1` steps of a lane, or of a run of the writer, are never given; with `within_episodes` it
    would be those of every episode, so leave that out. For a deterministic pass to give all others, its windows must
    overlap: `dataset_window_shift = num_steps - num_frames + 1`, and `dataset_drop_remainder`.

    Args:
        rows: A Trajectory, or another nest with a `step_type`, with leaves [B, T, *shape]: NumPy arrays, or tensors,
            also inside a `tf.function` or a dataset's `map`.
        num_frames: Frames n to a stack, at least 1 and at most T.
        leaves: Path of what is stacked, as `observation/camera`, or several; at a nest all leaves in it.
        axis: Where the frames stand in a step's shape: 0 gives [n, *shape] as Gymnasium does; -1 gives [*shape, n]
            as Keras' convolutions want it, and takes many times as long.

    Returns:
        The same nest with leaves [B, T - n + 1, *shape], those that are stacked [B, T - n + 1, n, *shape] and freshly
        allocated; the others, where they are NumPy arrays, are views.

    Raises:
        OptionError: When num_frames is not an int from 1 to T, or axis is outside the shape.
        SpecError: When rows lack a step_type or one of the leaves, or a leaf isn't an array or tensor [B, T, ...].
        tensorflow.errors.InvalidArgumentError: When T is only known as a graph runs, and is less than num_frames.
    """
    n = count("num_frames", num_frames)
    structure = Structure(rows)
    values = structure.flatten(rows)
    is_stacked = _chosen(structure, leaves)
    step_type = _step_type(structure, values)
    _check_steps(structure, values, step_type, n)
    axes = [
        _axis(axis, path, value) if chosen else 0
        for path, value, chosen in zip(structure.paths, values, is_stacked, strict=True)
    ]
    stack = _numpy_stacker(step_type, n) if all(map(_is_array, values)) else _tensor_stacker(step_type, n)
    return structure.unflatten(
        stack(value, at) if chosen else value[:, n - 1 :]
        for value, chosen, at in zip(values, is_stacked, axes, strict=True)
    )


def frame_stacker(
    num_frames: int, *, leaves: str | Sequence[str] = "observation", axis: int = 0
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Returns a function that stacks the frames of a reader's elements: `buffer.as_dataset(...).map(frame_stacker(4))`.

    Args:
        num_frames: As in `stack_frames`.
        leaves: As in `stack_frames`.
        axis: As in `stack_frames`.

    Returns:
        A function of (rows, info) that returns what `stack_frames` makes of the rows, and the info with the ids
        [B, T - num_frames + 1] of the steps that are left. It can be pickled.

    Raises:
        OptionError: When num_frames is not an int of at least 1.
    """
    return functools.partial(_stacked_element, num_frames=count("num_frames", num_frames), leaves=leaves, axis=axis)


def _stacked_element(rows: Any, info: Any, *, num_frames: int, leaves: Any, axis: int) -> tuple[Any, Any]:
    stacked = stack_frames(rows, num_frames, leaves=leaves, axis=axis)
    return stacked, info._replace(ids=info.ids[:, num_frames - 1 :])


def _chosen(structure: Structure, leaves: str | Sequence[str]) -> list[bool]:
    """For each leaf of the rows, whether it is one of `leaves` or inside one."""
    wanted = [leaves] if isinstance(leaves, str) else list(leaves)
    if not wanted:
        raise SpecError(f"leaves must be one path or several, got {leaves!r}. There are {list(structure.paths)}.")
    is_inside = [[path == one or path.startswith(f"{one}/") for path in structure.paths] for one in wanted]
    for one, inside in zip(wanted, is_inside, strict=True):
        if not any(inside):
            raise SpecError(
                f"leaves must be paths in the rows, got {one!r}. There are {list(structure.paths)}.", path=one
            )
    return [any(column) for column in zip(*is_inside, strict=True)]


def _step_type(structure: Structure, values: Sequence[Any]) -> Any:
    if _STEP_TYPE not in structure.keys:
        raise SpecError(
            f"rows must have a step_type, which tells where episodes begin, got {list(structure.paths)}. "
            "Store a Trajectory, or a dict with one.",
            path="step_type",
        )
    return values[structure.keys.index(_STEP_TYPE)]


def _check_steps(structure: Structure, values: Sequence[Any], step_type: Any, num_frames: int) -> None:
    """Refuses leaves that aren't arrays [B, T, ...] all alike, or a T that is too small, as far as shapes are known."""
    for path, value in zip(structure.paths, values, strict=True):
        if not _is_array(value) and not _is_tensor(value):
            raise SpecError(
                f"leaf {path!r} must be a NumPy array or a tensor of TensorFlow, got {type(value).__name__}. "
                "Make an array of it first, with numpy.asarray.",
                path=path,
            )
    batch, steps = _leading(step_type, "step_type")
    if len(step_type.shape) != 2:
        raise SpecError(f"leaf 'step_type' must be [B, T], got {describe(step_type)}.", path="step_type")
    for path, value in zip(structure.paths, values, strict=True):
        pairs = zip(_leading(value, path), (batch, steps), strict=True)
        if any(None not in pair and pair[0] != pair[1] for pair in pairs):
            raise SpecError(
                f"leaf {path!r} must be [{batch}, {steps}, ...] as the step_type is, got {describe(value)}.", path=path
            )
    if steps is not None and num_frames > steps:
        raise OptionError(
            f"num_frames must be at most the {steps} steps of the rows, got {num_frames}. Read with a larger num_steps."
        )


def _leading(value: Any, path: str) -> tuple[int | None, int | None]:
    """B and T, None where a graph doesn't know them yet."""
    shape = value.shape
    if getattr(shape, "rank", 2) is None:
        raise SpecError(f"leaf {path!r} must have a known rank, got one of any rank. Set its shape.", path=path)
    if len(shape) < 2:
        raise SpecError(
            f"leaf {path!r} must be [B, T, ...], got {describe(value)}. Read with a sample_batch_size and num_steps.",
            path=path,
        )
    return shape[0], shape[1]


def _axis(axis: Any, path: str, value: Any) -> int:
    """The axis counted from 0."""
    rank = len(value.shape) - 1  # of a stack
    try:
        at = operator.index(axis)
    except TypeError:
        at = rank
    if not -rank <= at < rank:
        raise OptionError(f"axis must be an int from {-rank} to {rank - 1} for leaf {path!r}, got {axis!r}.")
    return at % rank


def _is_array(value: Any) -> TypeGuard[NDArray[Any]]:
    return isinstance(value, np.ndarray)


def _is_tensor(value: Any) -> bool:
    if not type(value).__module__.startswith("tensorflow"):
        return False  # TensorFlow is not loaded to look at what it didn't make
    import tensorflow as tf

    return isinstance(value, tf.Tensor)


def _numpy_stacker(step_type: NDArray[Any], n: int) -> Callable[[NDArray[Any], int], NDArray[Any]]:
    batch, steps = step_type.shape
    positions = np.arange(steps)
    begun = np.maximum.accumulate(np.where(step_type == StepType.FIRST, positions, 0), axis=1)
    window = positions[: steps - n + 1, None] + np.arange(n)  # [T', n]
    sources = np.maximum(window, begun[:, n - 1 :, None])  # [B, T', n]
    rows = sources + np.arange(batch)[:, None, None] * steps

    def stack(frames: NDArray[Any], axis: int) -> NDArray[Any]:
        flat = frames.reshape(batch * steps, *frames.shape[2:])
        if axis == 0:
            stacks: NDArray[Any] = flat.take(rows, axis=0)
            return stacks
        shape = list(frames.shape[2:])
        shape.insert(axis, n)
        stacks = np.empty((*rows.shape[:2], *shape), frames.dtype)
        for frame, target in enumerate(np.moveaxis(stacks, 2 + axis, 0)):  # three times faster than to transpose
            target[:] = flat.take(rows[:, :, frame], axis=0)
        return stacks

    return stack


def _tensor_stacker(step_type: Any, n: int) -> "Callable[[Any, int], tf.Tensor]":
    import tensorflow as tf

    step_type = tf.convert_to_tensor(step_type)
    steps = step_type.shape[1]
    if steps is None:
        steps = tf.shape(step_type)[1]
        advice = "Read with a larger num_steps; in a pass, open the buffer with dataset_drop_remainder=True."
        message = f"num_frames must be at most the steps of the rows, got {n}. {advice} The steps are"
        with tf.control_dependencies([tf.debugging.Assert(steps >= n, [message, steps])]):
            step_type = tf.identity(step_type)
    kept = steps - n + 1
    positions = tf.range(steps)
    begun = tf.where(step_type == StepType.FIRST, positions, 0)  # [B, T]
    window = positions[:kept, None] + tf.range(n)  # [T', n]
    # A beginning further back than the window changes nothing, so the latest of n steps will do.
    latest = functools.reduce(tf.maximum, [begun[:, back : back + kept] for back in range(n)])
    sources = tf.maximum(window, latest[..., None])  # [B, T', n]

    def stack(frames: Any, axis: int) -> tf.Tensor:
        stacks = tf.gather(frames, sources, axis=1, batch_dims=1)
        if axis == 0:
            return stacks
        rank = len(stacks.shape)
        order = [0, 1, *range(3, rank)]
        order.insert(2 + axis, 2)
        return tf.transpose(stacks, order)

    return stack
