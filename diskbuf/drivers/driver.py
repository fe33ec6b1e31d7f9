"""The loop in which a policy acts in an environment and observers see what comes of it; how it ends is a subclass's.

Knows environments and policies only by the two protocols below.
"""

import abc
import contextlib
import operator
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

import numpy as np

from diskbuf.errors import OptionError, SpecError
from diskbuf.trajectories import PolicyStep, StepType, TimeStep, Trajectory, from_transition

Observer = Callable[[Trajectory], Any]
Transition = tuple[TimeStep, PolicyStep, TimeStep]
TransitionObserver = Callable[[Transition], Any]


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


class Driver(abc.ABC):
    """Lets a policy act in an environment and shows every row to observers; a subclass says what is counted.

    After each step of the environment every observer gets the row, then every transition observer the transition that
    the row was made of, both in the order given. All lanes are in it, those between two episodes too.

    An exception from the environment, the policy or an observer passes through. Rows are shown to one observer after
    the other, so those before the failing one have seen the row in question and those after it haven't; no row is ever
    shown in parts. Because the environment may have moved past a row that nobody stored, the next `run` begins new
    episodes, whatever time step it is given: no two rows are stored one after the other that don't belong together
    without the second one being a FIRST.

    Of a bandit environment (`is_bandit`) each row is an episode of one step, FIRST to LAST, and none is a boundary. One
    that replays a log makes its rows itself (`make_row`), and not after every step.

    Args:
        env: An environment, batched.
        policy: What chooses the actions.
        observers: Callables that take a `Trajectory` with leaves [B, *shape], such as `buffer.add_batch` and metrics.
            The arrays belong to the rows before and after too; an observer that wants to change them copies them.
        transition_observers: Callables that take `(time_step, policy_step, next_time_step)`, one tuple.
        progress: Whether `run` shows a progress bar on standard error.

    Raises:
        OptionError: If an observer isn't callable, or env or policy isn't one.
    """

    _unit: ClassVar[str]  # what is counted, for the progress bar

    def __init__(
        self,
        env: Environment,
        policy: ActingPolicy,
        observers: Iterable[Observer],
        *,
        transition_observers: Iterable[TransitionObserver],
        progress: bool,
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
        self._observers = _callables(
            "observers", observers, "a Trajectory", "Pass a buffer's method: buffer.add_batch."
        )
        self._transition_observers = _callables(
            "transition_observers",
            transition_observers,
            "a tuple (time_step, policy_step, next_time_step)",
            "Pass a function of one argument.",
        )
        self._progress = progress
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
    def observers(self) -> tuple[Observer, ...]:
        """What it shows rows to, in order."""
        return self._observers

    @property
    def transition_observers(self) -> tuple[TransitionObserver, ...]:
        """What it shows transitions to, in order."""
        return self._transition_observers

    @abc.abstractmethod
    def _counted(self, *, steps: int, episodes: int) -> int:
        """Returns what a row adds to the count that ends a run.

        Args:
            steps: Lanes in which it is a step, not a boundary.
            episodes: Lanes in which it completes an episode.
        """

    @abc.abstractmethod
    def _start(self) -> TimeStep:
        """Returns the time step of a run that is given none."""

    def _drive(
        self, time_step: TimeStep | None, policy_state: Any, *, goal: int, maximum_iterations: int | None
    ) -> tuple[TimeStep, Any]:
        """Steps until the count reaches the goal, or for so many rows; returns what to go on with."""
        env, policy, batch_size = self._env, self._policy, self._env.batch_size
        observers, transition_observers = self._observers, self._transition_observers
        if maximum_iterations is not None:
            maximum_iterations = at_least_one("maximum_iterations", maximum_iterations)
        if time_step is not None:
            _check_time_step(time_step, batch_size)
        had_gap, self._has_gap = self._has_gap, True
        if had_gap:
            time_step, policy_state = env.reset(), ()
        elif time_step is None:
            time_step = self._start()
        if policy_state is None or (isinstance(policy_state, tuple) and not policy_state):
            policy_state = policy.get_initial_state(batch_size)
        is_bandit = bool(getattr(env, "is_bandit", False))
        make_row: Callable[..., Trajectory | None] = getattr(env, "make_row", from_transition)
        if make_row is not from_transition and transition_observers:
            raise OptionError(
                f"transition_observers must be empty for {env!r}, whose rows are no transitions of its own."
            )
        first, last = np.full(batch_size, StepType.FIRST), int(StepType.LAST)  # an int compares faster than its scalar
        count = iterations = 0
        with self._bar(goal) as bar:
            while count < goal and iterations != maximum_iterations:
                if is_bandit:  # it ends an episode at each step, and has begun the next one already
                    time_step = time_step._replace(step_type=first)
                action_step = policy.action(time_step, policy_state)
                next_time_step = env.step(action_step.action)
                row = make_row(time_step, action_step, next_time_step)
                iterations += 1
                if row is not None:
                    for observer in observers:
                        observer(row)
                    for transition_observer in transition_observers:
                        transition_observer((time_step, action_step, next_time_step))
                    boundaries = int(np.count_nonzero(time_step.step_type == last))
                    episodes = batch_size if is_bandit else boundaries
                    count += self._counted(steps=batch_size - boundaries, episodes=episodes)
                time_step, policy_state = next_time_step, action_step.state
                if bar is not None:
                    bar.update(min(count, goal) - bar.n)  # past its total it would no longer be a bar
        self._has_gap = False
        return time_step, policy_state

    def _bar(self, goal: int) -> Any:
        if not self._progress:
            return contextlib.nullcontext()
        from tqdm.auto import tqdm

        return tqdm(total=goal, unit=f" {self._unit}")


def at_least_one(name: str, value: int) -> int:
    """Returns a count as an int.

    Raises:
        OptionError: If it is no integer of at least 1.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise OptionError(f"{name} must be an integer of at least 1, got {value!r}.")
    return number


def _callables(name: str, observers: Iterable[Callable[[Any], Any]], what: str, advice: str) -> tuple[Any, ...]:
    if callable(observers) or not isinstance(observers, Iterable):
        raise OptionError(f"{name} must be a list of callables, got {observers!r}. Put it in a list: [observer].")
    found = tuple(observers)
    for position, observer in enumerate(found):
        if not callable(observer):
            raise OptionError(f"{name}[{position}] must be callable with {what}, got {observer!r}. {advice}")
    return found


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
