"""The policy that plays what is written."""

from typing import Any

import numpy as np

from diskbuf import specs
from diskbuf.errors import SpecError, WindowError
from diskbuf.policies.policy import Policy
from diskbuf.specs import ArraySpec
from diskbuf.trajectories import PolicyStep, TimeStep
from diskbuf.tree import Structure


class ScriptedPolicy(Policy):
    """Gives the actions of a script, one after the other, each lane its own.

    Each call takes the next action of every lane, in a LAST lane too, where the environment doesn't play it. So row t
    of what is collected holds action t of the script, and `buffer.gather_all().action` is the script that plays the
    actions of a store again. The place in the script is the policy state: a driver that is given no state begins anew.

        >>> from diskbuf.specs import BoundedArraySpec
        >>> from diskbuf.trajectories import restart, time_step_spec
        >>> specs = time_step_spec(ArraySpec((4,), np.float32)), BoundedArraySpec((), np.int64, 0, 9)
        >>> policy = ScriptedPolicy(*specs, np.array([[1, 2, 3], [7, 8, 9]]))
        >>> time_step, state = restart(np.zeros((2, 4), np.float32), batch_size=2), policy.get_initial_state(2)
        >>> for _ in range(3):
        ...     action, state, _ = policy.action(time_step, state)
        >>> action
        array([3, 9])

    Args:
        time_step_spec: The environment's.
        action_spec: Nest of specs.
        script: Nest like action_spec with leaves [B, T, *shape] of its dtypes; kept, not copied. For one script in all
            lanes, `np.broadcast_to` makes the axis B.

    Raises:
        SpecError: If the script doesn't fit the action_spec, or its leaves differ in B or T.
    """

    def __init__(self, time_step_spec: TimeStep, action_spec: Any, script: Any) -> None:
        action_spec = specs.as_spec(action_spec)
        place = ArraySpec((), np.int64, name="place")
        super().__init__(time_step_spec, action_spec, policy_state_spec=place)
        self._structure = Structure(action_spec)
        self._script = list(map(np.asarray, self._structure.flatten(script)))
        self._batch_shape = self._script[0].shape[:2]
        for path, leaf, spec in zip(
            self._structure.paths, self._script, self._structure.flatten(action_spec), strict=True
        ):
            if leaf.ndim < 2 or leaf.shape != (*self._batch_shape, *spec.shape) or leaf.dtype != spec.dtype:
                where = f"leaf {path!r} of the script" if path else "script"
                wanted = ", ".join(map(str, ("B", "T", *spec.shape)))
                raise SpecError(
                    f"{where} must be {spec.dtype} [{wanted}], with one B and T in every leaf, got {leaf.dtype} "
                    f"{list(leaf.shape)}. Cast it, or give it the axis B with np.broadcast_to.",
                    path=path or None,
                )

    def action(self, time_step: TimeStep, policy_state: Any = ()) -> PolicyStep:
        """Gives each lane its next action.

        Args:
            time_step: Only its batch shape matters.
            policy_state: [B] int64, where each lane is in the script; () for its beginning.

        Returns:
            The actions, leaves [B, *shape], freshly allocated, and the place after them as state.

        Raises:
            SpecError: If there are other lanes than in the script.
            WindowError: If a lane has come to the end of its script.
        """
        lanes, length = self._batch_shape
        if np.shape(time_step.step_type) != (lanes,):
            raise SpecError(
                f"leaf 'step_type' must have the script's batch shape [{lanes}], got "
                f"{list(np.shape(time_step.step_type))}. Write a script for as many lanes as the environment has.",
                path="step_type",
            )
        if isinstance(policy_state, tuple):
            policy_state = self.get_initial_state(lanes)
        place = np.asarray(policy_state)
        if (place >= length).any():
            raise WindowError(f"a script of {length} actions must not be asked for more, got call {length + 1}.")
        actions = [leaf[np.arange(lanes), place] for leaf in self._script]
        return PolicyStep(self._structure.unflatten(actions), place + 1)
