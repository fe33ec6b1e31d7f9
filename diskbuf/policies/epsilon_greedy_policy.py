"""The policy that mostly does what another one does, and otherwise anything."""

from collections.abc import Callable
from typing import Any

import numpy as np

from diskbuf.errors import OptionError
from diskbuf.policies.policy import Policy
from diskbuf.policies.random_policy import RandomPolicy
from diskbuf.trajectories import PolicyStep, StepType, TimeStep
from diskbuf.tree import Structure


class EpsilonGreedyPolicy(Policy):
    """Draws a random action with probability epsilon, each lane for itself; otherwise asks the policy it wraps.

        >>> from diskbuf.policies import LinearSchedule
        >>> from diskbuf.specs import ArraySpec, BoundedArraySpec
        >>> from diskbuf.trajectories import restart, time_step_spec
        >>> specs = time_step_spec(ArraySpec((4,), np.float32)), BoundedArraySpec((), np.int64, 0, 1)
        >>> epsilon = LinearSchedule(initial_value=1.0, final_value=0.1, num_steps=600)
        >>> policy = EpsilonGreedyPolicy(RandomPolicy(*specs), epsilon, seed=0)
        >>> for _ in range(100):
        ...     step = policy.action(restart(np.zeros((3, 4), np.float32), batch_size=3))
        >>> round(policy.epsilon, 3)
        0.55

    State and info are those of the wrapped policy, whose state goes on while lanes explore. A random action is drawn as
    by `RandomPolicy`, so it may well be the one that the wrapped policy would have taken.

    Args:
        policy: The policy to wrap.
        epsilon: From 0 to 1, or a function of the step that returns such a number, for instance a `LinearSchedule`.
        step: A function that tells the step, such as `lambda: agent.train_step_counter`. None counts the steps this
            policy was asked for since it was made, lanes apart and boundary lanes left out, as drivers count.
        seed: Equal seeds give equal choices, as in `RandomPolicy`; None takes entropy from the system.

    Raises:
        OptionError: If epsilon, step or seed are outside their rules; where epsilon is a function it is called once.
        SpecError: If an action's dtype can't be drawn at random.
    """

    def __init__(
        self,
        policy: Policy,
        epsilon: float | Callable[[int], float],
        *,
        step: Callable[[], Any] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            policy.time_step_spec,
            policy.action_spec,
            policy_state_spec=policy.policy_state_spec,
            info_spec=policy.info_spec,
        )
        if step is not None and not callable(step):
            raise OptionError(
                f"step must be None or a function that tells the step, got {step!r}. For a counter: lambda: counter."
            )
        try:
            # Two streams: when to explore must not be told by what was explored.
            of_lanes, of_actions = np.random.SeedSequence(seed).generate_state(2, np.uint64)
        except (TypeError, ValueError) as error:
            raise OptionError(f"seed must be None or an integer of at least 0, got {seed!r}.") from error
        self._rng = np.random.default_rng(of_lanes)
        self._random = RandomPolicy(policy.time_step_spec, policy.action_spec, seed=int(of_actions))
        self._policy = policy
        self._structure = Structure(policy.action_spec)
        self._epsilon = epsilon
        self._step = step
        self._count = 0
        _ = self.epsilon  # refused now rather than in the middle of a run

    @property
    def wrapped_policy(self) -> Policy:
        """The policy it wraps."""
        return self._policy

    @property
    def epsilon(self) -> float:
        """How probable a random action is now.

        Raises:
            OptionError: If the function that epsilon is returns something else than a number from 0 to 1.
        """
        epsilon: Any = self._epsilon
        if callable(epsilon):
            step = int(self._count if self._step is None else self._step())
            epsilon = _called(epsilon, step)
        try:
            value = float(epsilon)
        except (TypeError, ValueError):
            value = -1.0
        if not 0 <= value <= 1:
            given = f"{epsilon!r} from {self._epsilon!r}" if callable(self._epsilon) else repr(epsilon)
            raise OptionError(f"epsilon must be a number from 0 to 1, or a function of the step to one, got {given}.")
        return value

    def get_initial_state(self, batch_size: int) -> Any:
        """Returns the wrapped policy's initial state."""
        return self._policy.get_initial_state(batch_size)

    def action(self, time_step: TimeStep, policy_state: Any = ()) -> PolicyStep:
        """Chooses one action for each lane.

        Args:
            time_step: Leaves [B, *shape].
            policy_state: The wrapped policy's.

        Returns:
            The wrapped policy's step, with random actions where a lane explores.

        Raises:
            OptionError: If the function that epsilon is returns something else than a number from 0 to 1.
        """
        step = self._policy.action(time_step, policy_state)
        step_type = np.asarray(time_step.step_type)
        explores = self._rng.random(step_type.shape) < self.epsilon  # [B]
        self._count += step_type.size - int(np.count_nonzero(step_type == StepType.LAST))
        if not explores.any():
            return step
        drawn = self._structure.flatten(self._random.action(time_step).action)
        taken = self._structure.flatten(step.action)
        leaves = [_where(explores, new, old) for new, old in zip(drawn, taken, strict=True)]
        return step._replace(action=self._structure.unflatten(leaves))


def _called(epsilon: Callable[[int], Any], step: int) -> Any:
    try:
        return epsilon(step)
    except TypeError as error:
        raise OptionError(
            f"epsilon must be a number from 0 to 1, or a function of the step to one, got {epsilon!r}: {error}. "
            "Let it take the step."
        ) from error


def _where(explores: Any, new: Any, old: Any) -> Any:
    """Picks whole actions: [B] against [B, *shape]."""
    return np.where(explores.reshape(explores.shape + (1,) * (np.ndim(new) - explores.ndim)), new, old)
