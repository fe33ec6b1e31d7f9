"""The driver that takes a given number of steps."""

from collections.abc import Iterable
from typing import Any, ClassVar

from diskbuf.drivers.driver import ActingPolicy, Driver, Environment, Observer, TransitionObserver, at_least_one
from diskbuf.trajectories import TimeStep


class DynamicStepDriver(Driver):
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

    What observers see, and what holds after an exception, is said at `diskbuf.drivers.driver.Driver`.

    Args:
        env: An environment, batched.
        policy: What chooses the actions.
        observers: Callables that take a `Trajectory` with leaves [B, *shape], such as `buffer.add_batch` and metrics.
            The arrays belong to the rows before and after too; an observer that wants to change them copies them.
        num_steps: Steps of one `run`, all lanes together.
        transition_observers: Callables that take `(time_step, policy_step, next_time_step)`, one tuple.
        progress: Whether `run` shows a progress bar on standard error.

    Raises:
        OptionError: If num_steps is below 1, an observer isn't callable, or env or policy isn't one.
    """

    _unit: ClassVar[str] = "steps"

    def __init__(
        self,
        env: Environment,
        policy: ActingPolicy,
        observers: Iterable[Observer] = (),
        num_steps: int = 1,
        *,
        transition_observers: Iterable[TransitionObserver] = (),
        progress: bool = False,
    ) -> None:
        super().__init__(env, policy, observers, transition_observers=transition_observers, progress=progress)
        self._num_steps = at_least_one("num_steps", num_steps)

    def run(
        self, time_step: TimeStep | None = None, policy_state: Any = (), *, maximum_iterations: int | None = None
    ) -> tuple[TimeStep, Any]:
        """Takes steps.

        Args:
            time_step: Where to go on, as `run` or the environment returned it last; None asks the environment.
            policy_state: As `run` returned it; () or None asks the policy for its initial state.
            maximum_iterations: Rows after which the run ends even when the count isn't reached; None sets no limit.

        Returns:
            The time step and the policy state to go on with.

        Raises:
            OptionError: If maximum_iterations is below 1; nothing was stepped.
            SpecError: If time_step is no `TimeStep` of this environment's batch size; nothing was stepped.
        """
        return self._drive(time_step, policy_state, goal=self._num_steps, maximum_iterations=maximum_iterations)

    def _counted(self, *, steps: int, episodes: int) -> int:  # noqa: ARG002  the other drivers count those
        return steps

    def _start(self) -> TimeStep:
        return self._env.current_time_step()
