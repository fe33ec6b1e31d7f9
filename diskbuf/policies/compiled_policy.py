"""Policies written in TensorFlow, compiled once for any number of lanes; the ones that can be saved."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf import specs
from diskbuf.errors import OptionError, SpecError
from diskbuf.policies.policy import Policy
from diskbuf.specs import ArraySpec
from diskbuf.trajectories import PolicyStep, TimeStep
from diskbuf.tree import Structure


class CompiledPolicy(Policy):
    """A policy that is a function of tensors, traced when the policy is made. Arrays go in and come out.

    What the function is closed over (networks, variables) is read anew at each call, so a policy over a network that
    is being trained acts by its current weights. Make one with `policy_from(function, ..., compiled=True)`.

    Args:
        function: From a TimeStep and a policy state, with leaves [B, *shape] of unknown B, to a PolicyStep. Python
            control flow on tensors needs a `tf.function` of its own in there.
        time_step_spec: The environment's.
        action_spec: Nest of specs.
        policy_state_spec: Nest of specs, () if there is no state.
        info_spec: Nest of specs, () if there is no info.
        probabilities: From observations, leaves [B, *shape], to [B, K] floats, how probable each of K actions is; None
            for a policy that doesn't tell.

    Raises:
        SpecError: If what the function returns doesn't fit the specs.
    """

    def __init__(
        self,
        function: Callable[[TimeStep, Any], PolicyStep],
        time_step_spec: TimeStep,
        action_spec: Any,
        *,
        policy_state_spec: Any = (),
        info_spec: Any = (),
        probabilities: Callable[[Any], Any] | None = None,
    ) -> None:
        import tensorflow as tf

        time_step_spec = specs.as_spec(time_step_spec)
        action_spec, policy_state_spec, info_spec = specs.as_spec((action_spec, policy_state_spec, info_spec))
        super().__init__(time_step_spec, action_spec, policy_state_spec=policy_state_spec, info_spec=info_spec)
        takes, gives = (time_step_spec, policy_state_spec), self.policy_step_spec
        self._inputs, self._outputs = Structure(takes), Structure(gives)
        input_specs, output_specs = self._inputs.flatten(takes), self._outputs.flatten(gives)
        self._rules = [
            (path, spec.shape, spec.dtype) for path, spec in zip(self._input_paths(), input_specs, strict=True)
        ]
        self._has_state = bool(Structure(policy_state_spec).num_leaves)

        def on_leaves(*leaves: Any) -> list[Any]:
            step = function(*self._inputs.unflatten(leaves))
            return list(map(tf.convert_to_tensor, self._outputs.flatten(step)))

        signature = [
            tf.TensorSpec([None, *spec.shape], spec.dtype, _identifier(path))
            for path, spec in zip(self._input_paths(), input_specs, strict=True)
        ]
        # Without AutoGraph an error keeps its class, and its trace leads to the line it comes from.
        self._on_leaves = tf.function(on_leaves, input_signature=signature, autograph=False)
        self._traced = self._on_leaves.get_concrete_function()  # three times faster to call than what it is traced from
        for path, tensor, spec in zip(self._outputs.paths, self._traced.outputs, output_specs, strict=True):
            _check_output(path, tensor, spec)
        self._observation = Structure(time_step_spec.observation)
        self._chances: Any = None
        if probabilities is not None:
            leaf_specs = self._observation.flatten(time_step_spec.observation)
            self._chances = tf.function(
                lambda *leaves: tf.convert_to_tensor(probabilities(self._observation.unflatten(leaves))),
                input_signature=[tf.TensorSpec([None, *spec.shape], spec.dtype) for spec in leaf_specs],
                autograph=False,
            )

    @property
    def on_leaves(self) -> Any:
        """The `tf.function` from the leaves of (time step, policy state) to a list of the leaves of the policy step."""
        return self._on_leaves

    @property
    def on_observation_leaves(self) -> Any:
        """The `tf.function` from the leaves of observations to [B, K] probabilities; None if it doesn't tell."""
        return self._chances

    def probabilities(self, observation: Any) -> npt.NDArray[np.float64]:
        """Returns [B, K] how probable each action is.

        Args:
            observation: Nest of [B, *shape] arrays.

        Raises:
            OptionError: If this policy doesn't tell.
        """
        import tensorflow as tf

        if self._chances is None:
            raise OptionError(f"policy must be one that tells probabilities, got {self!r}. Those of bandits do.")
        found = self._chances(*map(tf.constant, self._observation.flatten(observation)))
        return np.asarray(found, np.float64)

    def action(self, time_step: TimeStep, policy_state: Any = ()) -> PolicyStep:
        """Chooses one action for each lane.

        Args:
            time_step: Leaves [B, *shape], arrays or eager tensors.
            policy_state: What the call before gave, or `get_initial_state`.

        Returns:
            The policy step, leaves [B, *shape], freshly allocated. A policy without state gives back what it got.

        Raises:
            SpecError: If the time step or the state don't fit their specs.
        """
        import tensorflow as tf

        arrays = list(map(np.asarray, self._inputs.flatten((time_step, policy_state if self._has_state else ()))))
        for array, rule in zip(arrays, self._rules, strict=True):
            if array.shape[1:] != rule[1] or array.dtype != rule[2] or not array.ndim:
                raise _unfit(*rule, got=array)
        step: PolicyStep = self._outputs.unflatten([leaf.numpy() for leaf in self._traced(*map(tf.constant, arrays))])
        return step if self._has_state else step._replace(state=policy_state)

    def _input_paths(self) -> list[str]:
        """`observation/camera` or `state/carry`, as a caller would write them."""
        parts = ("", "state/")
        return [
            (parts[int(which)] + rest).rstrip("/") for which, _, rest in (p.partition("/") for p in self._inputs.paths)
        ]


def _unfit(path: str, shape: tuple[int, ...], dtype: np.dtype[Any], *, got: Any) -> SpecError:
    wanted = ", ".join(map(str, ("B", *shape)))
    return SpecError(
        f"leaf {path!r} must be {dtype} [{wanted}], got {got.dtype} {list(got.shape)}. Cast it, or make the policy "
        "with the specs of this environment.",
        path=path,
    )


def _check_output(path: str, tensor: Any, spec: ArraySpec) -> None:
    rank = tensor.shape.rank
    fits = rank is None or (rank == len(spec.shape) + 1 and tensor.shape[1:].is_compatible_with(spec.shape))
    if tensor.dtype.as_numpy_dtype != spec.dtype.type or not fits:
        wanted = ", ".join(map(str, ("B", *spec.shape)))
        got = "of unknown shape" if rank is None else ["B" if size is None else size for size in tensor.shape]
        raise SpecError(
            f"leaf {path!r} of the policy step must be {spec.dtype} [{wanted}], got {tensor.dtype.name} "
            f"{str(got).replace(chr(39), '')} from the policy's function. Cast it, or give the policy that spec.",
            path=path,
        )


def _identifier(path: str) -> str:
    """A path as TensorFlow takes it for the name of an input."""
    return "".join(character if character.isalnum() else "_" for character in path)
