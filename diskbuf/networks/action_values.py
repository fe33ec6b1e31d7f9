"""What a Q-network must give: one value for each action of a scalar bounded integer spec.

Policies and agents ask here when they are made, so that a network of another size is found before anything is trained.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from diskbuf import specs
from diskbuf.errors import SpecError
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.tree import Structure, describe


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiscreteActions:
    """Actions that are numbers from `minimum` on, so that value i is the value of action `minimum + i`.

        >>> DiscreteActions.of(BoundedArraySpec((), np.int64, 1, 4))
        DiscreteActions(num_actions=4, minimum=1, dtype='int64')

    Attributes:
        num_actions: How many there are.
        minimum: The first one.
        dtype: The name of their integer dtype.
    """

    num_actions: int
    minimum: int
    dtype: str

    @classmethod
    def of(cls, action_spec: Any) -> Self:
        """Returns the actions of a spec.

        Args:
            action_spec: A scalar BoundedArraySpec of integers, or what `specs.as_spec` makes one of.

        Raises:
            SpecError: If it is something else, such as a nest, a vector or a float.
        """
        spec = specs.as_spec(action_spec)
        if not isinstance(spec, BoundedArraySpec) or spec.shape or spec.dtype.kind not in "iu":
            got = spec if isinstance(spec, ArraySpec) else describe(spec)
            raise SpecError(
                f"action_spec must be one scalar BoundedArraySpec of integers, got {got}. A Q-network has a value for "
                "each action, so actions must be countable; discretize the environment's."
            )
        minimum, maximum = int(spec.minimum), int(spec.maximum)
        return cls(num_actions=maximum - minimum + 1, minimum=minimum, dtype=spec.dtype.name)


def check_q_network(
    q_network: Callable[..., Any], observation_spec: Any, *, actions: DiscreteActions, label: str
) -> None:
    """Calls a network with a batch of two observations; a Keras model that wasn't built yet is built by this.

    Args:
        q_network: A Keras model, or another callable of a nest of [B, *shape] tensors and `training`.
        observation_spec: Nest of specs, one observation.
        actions: What it must have values for.
        label: Its name in messages.

    Raises:
        SpecError: If the network can't take such observations, or gives something else than floats [2, num_actions].
    """
    values = called_with_two(
        q_network, observation_spec, label=label, advice=", as QNetwork(observation_spec, action_spec) does"
    )
    if not _is_float(values) or tuple(values.shape) != (2, actions.num_actions):
        raise SpecError(
            f"{label} must give a float for each of the {actions.num_actions} actions, [B, {actions.num_actions}], "
            f"got {_described(values)} for B = 2. Make its last layer keras.layers.Dense({actions.num_actions})."
        )


def called_with_two(network: Callable[..., Any], observation_spec: Any, *, label: str, advice: str = "") -> Any:
    """Returns what a network gives for a batch of two observations; a Keras model that wasn't built yet is built.

    Args:
        network: A Keras model, or another callable of a nest of [B, *shape] tensors and `training`.
        observation_spec: Nest of specs, one observation.
        label: Its name in messages.
        advice: How to make it, after "Make it for these observations".

    Raises:
        SpecError: If the network can't take such observations.
    """
    import tensorflow as tf

    structure = Structure(observation_spec)
    leaves = [tf.constant(some_values(spec)) for spec in structure.flatten(observation_spec)]
    try:
        return network(structure.unflatten(leaves), training=False)
    except Exception as error:
        raise SpecError(
            f"{label} must take batches of observations {describe(observation_spec)}, got {type(error).__name__} from "
            f"it: {error} Make it for these observations{advice}."
        ) from error


def some_values(spec: ArraySpec) -> npt.NDArray[Any]:
    """Returns [2, *shape], two values that the spec allows, as near to zero as it does."""
    values = np.zeros((2, *spec.shape), spec.dtype)
    return np.clip(values, spec.minimum, spec.maximum) if isinstance(spec, BoundedArraySpec) else values


def _is_float(values: Any) -> bool:
    dtype = getattr(values, "dtype", None)
    return bool(getattr(dtype, "is_floating", False)) and hasattr(values, "shape")


def _described(values: Any) -> str:
    if hasattr(values, "shape") and hasattr(values, "dtype"):
        return f"{getattr(values.dtype, 'name', values.dtype)} {list(values.shape)}"
    return describe(values)
