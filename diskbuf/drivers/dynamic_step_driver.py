"""The driver that takes a given number of steps."""

import operator
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from diskbuf.errors import OptionError, SpecError
from diskbuf.trajectories import PolicyStep, StepType, TimeStep, Trajectory, from_transition


class Environment(Protocol):
    """What a driver needs of an environment; `diskbuf.environments.GymEnvironment` is one."""

    @property
    def batch_size(self) -> int:
        """B, the number of lanes."""
        ...

    def reset(self) -> TimeStep:
        """Begins a new episode in every lane."""
        ...

    def step(self, action: Any) -> TimeStep:
        """Plays one action in every lane, except where the current time step is LAST: there a new episode begins."""
        ...

    def current_time_step(self) -> TimeStep:
        """The last time step returned, or the first one of all."""
        ...


class ActingPolicy(Protocol):
    """What a driver needs of a policy; every `diskbuf.policies.Policy` is one."""

    def get_initial_state(self, batch_size: int) -> Any:
        """The state to begin with."""
        ...

    def action(self, time_step: TimeStep, policy_state: Any = ()) -> PolicyStep:
        """One action for each lane."""
        ...


class DynamicStepDriver:
    """Lets a policy act until all lanes together have taken `num_steps` steps, and shows every row to the observers.

        >>> from diskbuf.environments import suite_gym
        >>> from diskbuf.policies import RandomPolicy
        >>> rows = []  # buffer.add_batch takes the place of rows.append
        >>> with suite_gym.load("CartPole-v1", num_envs=10, seed=0) as env:
        ...     policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=0)
        ...     driver = DynamicStepDriver(env, policy, observers=[rows.append], num_steps=50)
        ...     time_step, policy_state = driver.run()
        >>> len(rows), rows[0].observation.shape
        (5, (10, 4))

    `num_steps` counts as in TF-Agents: each lane of each row is one step, except that boundary lanes, between the end
    of an episode and the start of the next, don't count. A run ends with the row that reaches the count, so it takes at
    least `num_steps` steps and at most `batch_size - 1` more. 10 lanes and 50 steps make 5 rows of 10 lanes, unless
    episodes end on the way: what an observer sees is the steps counted and the boundary lanes on top.

    An exception from the environment, the policy or an observer passes through. Rows are shown to one observer after
    the other, so those before the failing one have seen the row in question and those after it haven't; no row is ever
    shown in parts. Because the environment may have moved past a row that nobody stored, the next `run` begins new
    episodes, whatever time step it is given: no two rows are stored one after the other that don't belong together
    without the second one being a FIRST.

    Args:
        env: An environment, batched.
        policy: What chooses the actions.
        observers: Callables that take a `Trajectory` with leaves [B, *shape], such as `buffer.add_batch`. The arrays
            belong to the rows before and after too; an observer that wants to change them copies them.
        num_steps: Steps of one `run`, all lanes together.

    Raises:
        OptionError: If num_steps is below 1, an observer isn't callable, or env or policy isn't one.
    """

    def __init__(
        self,
        env: Environment,
        policy: ActingPolicy,
        observers: Iterable[Callable[[Trajectory], Any]] = (),
        num_steps: int = 1,
    ) -> None:
        if not hasattr(env, "current_time_step"):
            raise OptionError(
                f"env must be an environment of diskbuf, got {env!r}. "
                "Gymnasium's go through diskbuf.environments.suite_gym.wrap()."
            )
        if not callable(getattr(policy, "action", None)):
            raise OptionError(f"policy must have a method action(time_step, policy_state), got {policy!r}.")
        self._env = env
        self._policy = policy
        self._observers = _observers(observers)
        self._num_steps = _at_least_one(num_steps)
        self._has_gap = False  # whether the environment may have moved past a row that wasn't observed

    @property
    def env(self) -> Environment:
        """The environment it drives."""
        return self._env

    @property
    def policy(self) -> ActingPolicy:
        """The policy that acts."""
        return self._policy

    @property
    def observers(self) -> tuple[Callable[[Trajectory], Any], ...]:
        """What it shows rows to, in order."""
        return self._observers

    def run(self, time_step: TimeStep | None = None, policy_state: Any = ()) -> tuple[TimeStep, Any]:
        """Takes steps.

        Args:
            time_step: Where to go on, as `run` or the environment returned it last; None asks the environment.
            policy_state: As `run` returned it; () or None asks the policy for its initial state.

        Returns:
            The time step and the policy state to go on with.

        Raises:
            SpecError: If time_step is no `TimeStep` of this environment's batch size; nothing was stepped.
        """
        env, policy, observers, num_steps = self._env, self._policy, self._observers, self._num_steps
        batch_size = env.batch_size
        if time_step is not None:
            _check_time_step(time_step, batch_size)
        if self._has_gap:
            time_step, policy_state = env.reset(), ()
        elif time_step is None:
            time_step = env.current_time_step()
        if policy_state is None or (isinstance(policy_state, tuple) and not policy_state):
            policy_state = policy.get_initial_state(batch_size)
        self._has_gap = True
        last = int(StepType.LAST)  # compares faster than the NumPy scalar
        steps = 0
        while steps < num_steps:
            action_step = policy.action(time_step, policy_state)
            next_time_step = env.step(action_step.action)
            row = from_transition(time_step, action_step, next_time_step)
            for observer in observers:
                observer(row)
            steps += batch_size - int(np.count_nonzero(time_step.step_type == last))
            time_step, policy_state = next_time_step, action_step.state
        self._has_gap = False
        return time_step, policy_state


def _observers(observers: Iterable[Callable[[Trajectory], Any]]) -> tuple[Callable[[Trajectory], Any], ...]:
    if callable(observers) or not isinstance(observers, Iterable):
        raise OptionError(f"observers must be a list of callables, got {observers!r}. Put it in a list: [observer].")
    found = tuple(observers)
    for position, observer in enumerate(found):
        if not callable(observer):
            raise OptionError(
                f"observers[{position}] must be callable with a Trajectory, got {observer!r}. "
                "Pass a buffer's method: buffer.add_batch."
            )
    return found


def _at_least_one(num_steps: int) -> int:
    try:
        number = operator.index(num_steps)
    except TypeError:
        number = 0
    if number < 1:
        raise OptionError(f"num_steps must be an integer of at least 1, got {num_steps!r}.")
    return number


def _check_time_step(time_step: TimeStep, batch_size: int) -> None:
    if not isinstance(time_step, TimeStep):
        raise SpecError(
            f"time_step must be a TimeStep or None, got {type(time_step).__name__}. Pass what run() returned."
        )
    if np.shape(time_step.step_type) != (batch_size,):
        raise SpecError(
            f"leaf 'step_type' of time_step must have the environment's batch shape [{batch_size}], "
            f"got {list(np.shape(time_step.step_type))}.",
            path="step_type",
        )
