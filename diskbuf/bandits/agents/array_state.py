"""Arrays that a TensorFlow checkpoint holds, for what keeps its state in NumPy."""

import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.bandits import generators
from diskbuf.errors import SpecError

Arrays = dict[str, npt.NDArray[Any]]


def array_state(values: Arrays, on_restore: Callable[[], object] | None = None) -> Any:
    """Returns an object for an attribute of a `tf.Module`, whose `values` a checkpoint of the module holds.

    Args:
        values: Arrays by name. Change or replace them at will; their names, dtypes and shapes stay.
        on_restore: Called after a checkpoint has brought back its values, to work out anew what follows from them.

    Returns:
        The object. Restoring raises SpecError, and leaves the values as they are, where a checkpoint holds others.
    """

    def restore(found: Arrays) -> None:
        wanted, got = _described(state.values), _described(found)
        if wanted != got:
            raise SpecError(f"a checkpoint must hold {wanted} for this agent, got {got}. Make it as the one saved.")
        state.values = found
        if on_restore is not None:
            on_restore()

    state = saved_arrays(lambda: state.values, restore)
    state.values = values
    return state


def saved_arrays(save: Callable[[], Arrays], restore: Callable[[Arrays], object]) -> Any:
    """Returns an object that a `tf.train.Checkpoint` can hold, made of two functions.

    Args:
        save: Returns the arrays to save, by name.
        restore: Takes the saved ones.
    """
    return _state_class()(save, restore)


def saved_generator(rng: np.random.Generator) -> Any:
    """Returns an object that a `tf.train.Checkpoint` can hold, with which a generator goes on where it was.

    Args:
        rng: The generator.
    """
    return saved_arrays(
        lambda: {"generator": generators.state_of(rng)}, lambda found: generators.go_on(rng, found["generator"])
    )


@functools.cache
def _state_class() -> type[Any]:
    import tensorflow as tf

    class SavedArrays(tf.train.experimental.PythonState):  # type: ignore[misc]  # ships no types
        """What `saved_arrays` returns."""

        def __init__(self, save: Callable[[], Arrays], restore: Callable[[Arrays], object]) -> None:
            self._save = save
            self._restore = restore

        def serialize(self) -> bytes:
            """Returns the arrays in NumPy's NPZ format; TensorFlow calls this."""
            file = io.BytesIO()
            arrays = self._save()
            for name, array in arrays.items():
                if np.asarray(array).dtype.hasobject:
                    raise SpecError(f"{name} must be an array of numbers for a checkpoint to hold it, got {array!r}.")
            np.savez(file, **arrays)  # type: ignore[arg-type]  # mypy takes them for allow_pickle
            return file.getvalue()

        def deserialize(self, string_value: bytes) -> None:
            """Hands arrays back; TensorFlow calls this."""
            with np.load(io.BytesIO(string_value)) as file:
                found = {name: file[name] for name in file.files}
            self._restore(found)

    return SavedArrays


def _described(values: Arrays) -> str:
    return ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in sorted(values.items()))
