"""Policies made of functions."""

from collections.abc import Callable
from typing import Any

import numpy as np

from diskbuf import specs
from diskbuf.errors import OptionError, SpecError
from diskbuf.policies.compiled_policy import CompiledPolicy
from diskbuf.policies.policy import Policy
from diskbuf.trajectories import PolicyStep, TimeStep
from diskbuf.tree import Structure, describe


def policy_from(
    function: Callable[..., Any],
    time_step_spec: TimeStep,
    action_spec: Any,
    *,
    policy_state_spec: Any = (),
    info_spec: Any = (),
    compiled: bool = False,
) -> Policy:
    """Returns the policy that a function is.

        >>> from diskbuf.specs import ArraySpec, BoundedArraySpec
        >>> from diskbuf.trajectories import restart, time_step_spec
        >>> specs = time_step_spec(ArraySpec((4,), np.float32)), BoundedArraySpec((), np.int64, 0, 1)
        >>> policy = policy_from(lambda time_step: (time_step.observation[:, 2] > 0).astype(np.int64), *specs)
        >>> observation = np.array([[0, 0, -1, 0], [0, 0, 1, 0]], np.float32)
        >>> policy.action(restart(observation, batch_size=2)).action
        array([0, 1])

    Args:
        function: From a TimeStep with leaves [B, *shape] to actions [B, *shape], or to a whole PolicyStep. With a
            policy_state_spec it is given the state as well, and must return a PolicyStep.
        time_step_spec: The environment's.
        action_spec: Nest of specs.
        policy_state_spec: Nest of specs, () if there is no state.
        info_spec: Nest of specs; other than () the function must return a PolicyStep.
        compiled: Whether the function is one of tensors, written in TensorFlow: then it is traced once, whatever B, and
            the policy can be saved. Otherwise it is one of arrays.

    Raises:
        OptionError: If the function isn't callable.
        SpecError: If the specs are none; of a compiled function also if what it returns doesn't fit them.
    """
    if not callable(function):
        raise OptionError(f"function must be callable with a time step, got {function!r}.")
    has_state = bool(Structure(policy_state_spec).num_leaves)

    def called(time_step: TimeStep, policy_state: Any) -> PolicyStep:
        result = function(time_step, policy_state) if has_state else function(time_step)
        if isinstance(result, PolicyStep):
            return result if has_state else result._replace(state=())
        if has_state:
            raise SpecError(
                f"a function with a policy_state_spec must return a PolicyStep, got {describe(result)}. "
                "Return PolicyStep(action, state)."
            )
        return PolicyStep(result, ())

    kind: Any = CompiledPolicy if compiled else _FunctionPolicy
    policy: Policy = kind(called, time_step_spec, action_spec, policy_state_spec=policy_state_spec, info_spec=info_spec)
    return policy


class _FunctionPolicy(Policy):
    """A policy that is a function of arrays; what it returns is checked at each call."""

    def __init__(
        self,
        function: Callable[[TimeStep, Any], PolicyStep],
        time_step_spec: TimeStep,
        action_spec: Any,
        *,
        policy_state_spec: Any,
        info_spec: Any,
    ) -> None:
        action_spec, policy_state_spec, info_spec = specs.as_spec((action_spec, policy_state_spec, info_spec))
        super().__init__(time_step_spec, action_spec, policy_state_spec=policy_state_spec, info_spec=info_spec)
        self._function = function
        self._structure = Structure(self.policy_step_spec)
        leaves = self._structure.flatten(self.policy_step_spec)
        self._rules = [(path, spec.shape, spec.dtype) for path, spec in zip(self._structure.paths, leaves, strict=True)]
        self._has_state = bool(Structure(policy_state_spec).num_leaves)

    def action(self, time_step: TimeStep, policy_state: Any = ()) -> PolicyStep:
        """Calls the function.

        Args:
            time_step: Leaves [B, *shape].
            policy_state: What the call before gave, or `get_initial_state`.

        Returns:
            What the function returned, as arrays. A policy without state gives back the one it got.

        Raises:
            SpecError: If the function returned something that doesn't fit the specs.
        """
        step = self._function(time_step, policy_state)
        batch_shape = np.shape(time_step.step_type)
        arrays = list(map(np.asarray, self._structure.flatten(step)))
        for array, (path, shape, dtype) in zip(arrays, self._rules, strict=True):
            if array.shape != batch_shape + shape or array.dtype != dtype:
                raise SpecError(
                    f"leaf {path!r} of the policy step must be {dtype} {[*batch_shape, *shape]}, got {array.dtype} "
                    f"{list(array.shape)} from the policy's function. Cast it there with astype, or mend its shape.",
                    path=path,
                )
        result: PolicyStep = self._structure.unflatten(arrays)
        return result if self._has_state else result._replace(state=policy_state)
