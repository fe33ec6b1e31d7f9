"""What every policy is: a function from time steps to actions that tells the specs of what it takes and gives."""

import abc
from typing import Any

import numpy as np

from diskbuf.trajectories import PolicyStep, TimeStep, Trajectory, trajectory_spec
from diskbuf.tree import Structure


class Policy(abc.ABC):
    """Chooses actions for a batch of time steps.

    A subclass writes `action`. All specs are of one lane, without a batch axis.

    Args:
        time_step_spec: The environment's.
        action_spec: Nest of specs.
        policy_state_spec: Nest of specs of what `action` takes and gives back as state; () if nothing.
        info_spec: Nest of specs of what `action` gives as info; () if nothing.
    """

    def __init__(
        self, time_step_spec: TimeStep, action_spec: Any, *, policy_state_spec: Any = (), info_spec: Any = ()
    ) -> None:
        self._time_step_spec = time_step_spec
        self._policy_step_spec = PolicyStep(action_spec, policy_state_spec, info_spec)

    @property
    def time_step_spec(self) -> TimeStep:
        """The specs of the time steps it takes."""
        return self._time_step_spec

    @property
    def action_spec(self) -> Any:
        """Nest of specs of its actions."""
        return self._policy_step_spec.action

    @property
    def policy_state_spec(self) -> Any:
        """Nest of specs of its state, () if it has none."""
        return self._policy_step_spec.state

    @property
    def info_spec(self) -> Any:
        """Nest of specs of its info, () if it gives none."""
        return self._policy_step_spec.info

    @property
    def policy_step_spec(self) -> PolicyStep:
        """The three specs above in one `PolicyStep`."""
        return self._policy_step_spec

    @property
    def trajectory_spec(self) -> Trajectory:
        """The spec of the rows that a driver makes with this policy: the `data_spec` of a buffer for them."""
        return trajectory_spec(self._time_step_spec, self._policy_step_spec)

    @property
    def collect_data_spec(self) -> Trajectory:
        """The same, under the name that agents have for it."""
        return self.trajectory_spec

    def get_initial_state(self, batch_size: int) -> Any:
        """Returns the state to begin with: zeros [batch_size, *shape], () for a policy without state."""
        structure = Structure(self.policy_state_spec)
        leaves = structure.flatten(self.policy_state_spec)
        return structure.unflatten([np.zeros((batch_size, *spec.shape), spec.dtype) for spec in leaves])

    @abc.abstractmethod
    def action(self, time_step: TimeStep, policy_state: Any = ()) -> PolicyStep:
        """Chooses one action for each lane.

        Args:
            time_step: Leaves [B, *shape]. A LAST lane needs an action too; the environment doesn't play it.
            policy_state: What the call before gave, or `get_initial_state`.
        """
