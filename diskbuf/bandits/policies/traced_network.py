"""Networks as bandit policies call them: contexts in NumPy go in, one array comes out, traced once for any B."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diskbuf import specs
from diskbuf.bandits.policies.bandit_policy import ConstraintSplitter
from diskbuf.errors import SpecError
from diskbuf.networks.action_values import some_values
from diskbuf.specs import ArraySpec
from diskbuf.tree import Structure, describe

if TYPE_CHECKING:
    import tensorflow as tf


class TracedNetwork:
    """A function of tensors, traced when this is made, that reads the current weights at each call.

    Args:
        function: From contexts, a nest of [B, *shape] tensors of unknown B, to one tensor.
        context_spec: Nest of specs, one context.
    """

    def __init__(self, function: "Callable[[Any], tf.Tensor]", context_spec: Any) -> None:
        import tensorflow as tf

        self._structure = Structure(context_spec)
        leaf_specs = self._structure.flatten(context_spec)
        self._rules = [
            (path, spec.shape, spec.dtype) for path, spec in zip(self._structure.paths, leaf_specs, strict=True)
        ]

        def on_leaves(*leaves: Any) -> Any:
            return function(self._structure.unflatten(leaves))

        signature = [tf.TensorSpec([None, *spec.shape], spec.dtype) for spec in leaf_specs]
        traced = tf.function(on_leaves, input_signature=signature, autograph=False)
        self._traced = traced.get_concrete_function()  # several times faster to call than what it is traced from
        self._as_tensor = tf.constant

    def __call__(self, context: Any) -> npt.NDArray[Any]:
        """Returns what the function gives for these contexts.

        Args:
            context: Nest of [B, *shape] arrays.

        Raises:
            SpecError: If they don't fit the context_spec.
        """
        arrays = list(map(np.asarray, self._structure.flatten(context)))
        for array, rule in zip(arrays, self._rules, strict=True):
            if array.shape[1:] != rule[1] or array.dtype != rule[2] or not array.ndim:
                raise _unfit(*rule, got=array)
        result: npt.NDArray[Any] = self._traced(*map(self._as_tensor, arrays)).numpy()
        return result


def context_spec_of(observation_spec: Any, splitter: ConstraintSplitter | None) -> Any:
    """Returns the nest of specs of one context: what a splitter leaves of an observation, without its mask.

    Args:
        observation_spec: Nest of specs, one observation.
        splitter: Takes a batch of observations apart; None takes nothing away.

    Raises:
        SpecError: If the splitter can't take such observations, or gives something else than contexts and a mask.
    """
    observation_spec = specs.as_spec(observation_spec)
    if splitter is None:
        return observation_spec
    structure = Structure(observation_spec)
    observation = structure.unflatten(map(some_values, structure.flatten(observation_spec)))
    try:
        context, _ = splitter(observation)
    except Exception as error:
        raise SpecError(
            "observation_and_action_constraint_splitter must take batches of observations "
            f"{describe(observation_spec)} and give (contexts, mask), got {type(error).__name__} from it: {error}"
        ) from error
    contexts = Structure(context)
    arrays = map(np.asarray, contexts.flatten(context))
    return contexts.unflatten([ArraySpec(array.shape[1:], array.dtype) for array in arrays])


def _unfit(path: str, shape: tuple[int, ...], dtype: np.dtype[Any], *, got: npt.NDArray[Any]) -> SpecError:
    full = f"observation/{path}" if path else "observation"
    wanted = ", ".join(map(str, ("B", *shape)))
    return SpecError(
        f"leaf {full!r} must be {dtype} [{wanted}], got {got.dtype} {list(got.shape)}. Cast it, or make the policy "
        "with the specs of this environment.",
        path=full,
    )
