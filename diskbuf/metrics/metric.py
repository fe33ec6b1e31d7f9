"""What every metric is: an observer with a name and a result that TensorBoard can plot and a checkpoint can hold.

TensorFlow is imported to write summaries, and by nothing else here.
"""

import abc
import functools
import json
import sys
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.errors import OptionError, SpecError
from diskbuf.trajectories import StepType

FIRST, LAST = int(StepType.FIRST), int(StepType.LAST)  # compare faster than NumPy's scalars


class Metric(abc.ABC):
    """Watches the rows of a driver; calling it with a batched `Trajectory` takes one row of every lane into account.

    A subclass writes `_observe`, `result`, `reset`, `_state` and `_restore`.

    A metric can be an attribute of a `tf.train.Checkpoint`, which then saves and restores its numbers:
    `tf.train.Checkpoint(average_return=metric)`.

    Args:
        name: What summaries and logs call it.
        prefix: What TensorBoard groups it under; "" for nothing.

    Raises:
        OptionError: If name is empty, or one of the two is no str.
    """

    def __init__(self, name: str, prefix: str) -> None:
        if not isinstance(name, str) or not name:
            raise OptionError(f"name must be a str of at least one character, got {name!r}.")
        if not isinstance(prefix, str):
            raise OptionError(f'prefix must be a str, got {prefix!r}. Use "" for no prefix.')
        self._name = name
        self._prefix = prefix

    @property
    def name(self) -> str:
        """What summaries and logs call it."""
        return self._name

    @property
    def prefix(self) -> str:
        """What TensorBoard groups it under."""
        return self._prefix

    def __call__(self, trajectory: Any) -> Any:
        """Takes one row into account.

        Args:
            trajectory: A `Trajectory`, diskbuf's or TF-Agents', with leaves [B, *shape]: arrays or eager tensors.

        Returns:
            The trajectory, as it was given.

        Raises:
            SpecError: If a leaf that the metric reads has another shape or kind; the metric is as it was.
        """
        step_type, next_step_type = as_array(trajectory.step_type), as_array(trajectory.next_step_type)
        if step_type.ndim != 1 or next_step_type.shape != step_type.shape:
            raise SpecError(
                f"leaves 'step_type' and 'next_step_type' must be [B], got {list(step_type.shape)} and "
                f"{list(next_step_type.shape)} in {self}. Give one row of every lane, with a batch axis: x[None].",
                path="step_type",
            )
        self._observe(trajectory, step_type, next_step_type)
        return trajectory

    def call(self, trajectory: Any) -> Any:
        """The same as calling the metric."""
        return self(trajectory)

    @abc.abstractmethod
    def _observe(self, trajectory: Any, step_type: npt.NDArray[Any], next_step_type: npt.NDArray[Any]) -> None:
        """Takes a row into account.

        Args:
            trajectory: As it was given.
            step_type: [B], checked.
            next_step_type: [B], checked.
        """

    @abc.abstractmethod
    def result(self) -> Any:
        """Returns the number that it stands for, or a nest of numbers."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Forgets everything it has seen."""

    @abc.abstractmethod
    def _state(self) -> dict[str, Any]:
        """Returns what a checkpoint holds, as a JSON value."""

    @abc.abstractmethod
    def _restore(self, state: dict[str, Any]) -> None:
        """Becomes what `_state` told."""

    def tf_summaries(self, train_step: Any = None, step_metrics: "Iterable[Metric]" = ()) -> list[Any]:
        """Writes the result to TensorFlow's default summary writer, under TF-Agents' tags.

        The tag against `train_step` is `prefix/name`, and that against a step metric `prefix_vs_STEP/name`. Nothing is
        written where no writer is the default one: `with tf.summary.create_file_writer(folder).as_default():`.

        Args:
            train_step: The training step, an int or a tf.Variable; None writes nothing against it.
            step_metrics: Metrics whose results are steps too, such as `EnvironmentSteps`.

        Returns:
            TensorFlow's answer to each scalar written.
        """
        import tensorflow as tf

        steps = [] if train_step is None else [(self._prefix, train_step)]
        versus = f"{self._prefix}_vs_" if self._prefix else "vs_"
        steps += [(versus + other.name, int(other.result())) for other in step_metrics if other.name != self.name]
        return [
            tf.summary.scalar("/".join(part for part in (scope, self._name, label) if part), value, step=step)
            for label, value in self._scalars()
            for scope, step in steps
        ]

    def _scalars(self) -> list[tuple[str, Any]]:
        """The numbers of the result, each with what is put behind the metric's name."""
        return [("", self.result())]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"

    # ---- TensorFlow's side: a checkpoint takes what isinstance calls a Trackable

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class; it gains TensorFlow's base when TensorFlow is there, which is when a checkpoint could ask.

        Deriving from it at once would import TensorFlow, 6 s, for people who only count episodes.
        """
        cls: Any = type(self)
        if "tensorflow" in sys.modules and hasattr(sys.modules["tensorflow"], "train"):
            cls = _trackable(cls)
            if type(self) is not cls:
                object.__dict__["__class__"].__set__(self, cls)  # what self.__class__ = cls is without us
        return cls

    def serialize(self) -> str:
        """Returns what a checkpoint holds; TensorFlow calls this."""
        return json.dumps({"metric": type(self).__name__, **self._state()})

    def deserialize(self, string_value: str | bytes) -> None:
        """Becomes the metric that was saved; TensorFlow calls this.

        Raises:
            SpecError: If that was a metric of another kind, batch size or reward; this one is as it was.
        """
        saved = json.loads(string_value)
        if not isinstance(saved, dict) or saved.get("metric") != type(self).__name__:
            kind = saved.get("metric") if isinstance(saved, dict) else saved
            raise SpecError(f"a checkpoint for {self} must hold a {type(self).__name__}, got {kind!r}.")
        self._restore(saved)


def as_array(leaf: Any) -> npt.NDArray[Any]:
    """Returns an array or an eager tensor as an array.

    Raises:
        SpecError: If it is a tensor that has no value yet.
    """
    if type(leaf) is np.ndarray:
        return leaf
    try:
        return np.asarray(leaf)
    except NotImplementedError as error:  # TensorFlow's
        raise SpecError(
            "a metric must be given arrays or eager tensors, got a symbolic one of a tf.function. Call it outside.",
        ) from error


def where_ended(step_type: npt.NDArray[Any], next_step_type: npt.NDArray[Any]) -> npt.NDArray[np.bool_] | None:
    """Returns [B] True where the row's action ended the episode; None if nowhere, which is most of the time."""
    has_ended: npt.NDArray[np.bool_] = next_step_type == LAST
    if not np.count_nonzero(has_ended):
        return None
    has_ended &= step_type != LAST
    return has_ended


@functools.cache
def _trackable(cls: type[Any]) -> type[Any]:
    """The class as a tf.train.experimental.PythonState, under its own name."""
    import tensorflow as tf

    state = tf.train.experimental.PythonState
    if issubclass(cls, state):
        return cls
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return types.new_class(cls.__name__, (cls, state), exec_body=lambda body: body.update(names))
