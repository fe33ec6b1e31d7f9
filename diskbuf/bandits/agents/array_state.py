"""Arrays that a TensorFlow checkpoint holds, for agents that learn in NumPy."""

import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.errors import SpecError


def array_state(values: dict[str, npt.NDArray[Any]], on_restore: Callable[[], object] | None = None) -> Any:
    """Returns an object for an attribute of a `tf.Module`, whose `values` a checkpoint of the module holds.

    Args:
        values: Arrays by name. Change or replace them at will; their names, dtypes and shapes stay.
        on_restore: Called after a checkpoint has brought back its values, to work out anew what follows from them.
    """
    return _state_class()(values, on_restore)


@functools.cache
def _state_class() -> type[Any]:
    import tensorflow as tf

    class ArrayState(tf.train.experimental.PythonState):  # type: ignore[misc]  # ships no types
        """What `array_state` returns."""

        def __init__(self, values: dict[str, npt.NDArray[Any]], on_restore: Callable[[], object] | None) -> None:
            self.values = values
            self._on_restore = on_restore

        def serialize(self) -> bytes:
            """Returns the arrays in NumPy's NPZ format; TensorFlow calls this."""
            file = io.BytesIO()
            np.savez(file, **self.values)  # type: ignore[arg-type]  # mypy takes them for allow_pickle
            return file.getvalue()

        def deserialize(self, string_value: bytes) -> None:
            """Takes arrays back; TensorFlow calls this.

            Raises:
                SpecError: If they have other names, dtypes or shapes; these are as they were.
            """
            with np.load(io.BytesIO(string_value), allow_pickle=False) as file:
                found = {name: file[name] for name in file.files}
            wanted, got = _described(self.values), _described(found)
            if wanted != got:
                raise SpecError(f"a checkpoint must hold {wanted} for this agent, got {got}. Make it as the one saved.")
            self.values = found
            if self._on_restore is not None:
                self._on_restore()

    return ArrayState


def _described(values: dict[str, npt.NDArray[Any]]) -> str:
    return ", ".join(f"{name} {array.dtype} {list(array.shape)}" for name, array in sorted(values.items()))
