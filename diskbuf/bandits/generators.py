"""The state of a NumPy generator as an array, which a checkpoint can hold."""

import json
from typing import Any

import numpy as np
import numpy.typing as npt


def state_of(rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Returns the state of a generator."""
    return np.frombuffer(json.dumps(rng.bit_generator.state).encode(), np.uint8).copy()


def go_on(rng: np.random.Generator, state: npt.NDArray[Any]) -> None:
    """Lets a generator go on from a state that `state_of` returned."""
    rng.bit_generator.state = json.loads(state.tobytes())
