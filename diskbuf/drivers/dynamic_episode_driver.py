"""The driver that takes a given number of episodes."""

from collections.abc import Iterable
from typing import Any, ClassVar

from diskbuf.drivers.driver import ActingPolicy, Driver, Environment, Observer, TransitionObserver, at_least_one
from diskbuf.trajectories import TimeStep


class DynamicEpisodeDriver(Driver):
    """Lets a policy act until all lanes together have completed `num_episodes` episodes; observers see every row.

        >>> from diskbuf.environments import suite_gym
        >>> from diskbuf.policies import RandomPolicy
        >>> rows = []
        >>> with suite_gym.load("CartPole-v1", seed=0, max_episode_steps=6) as env:
        ...     policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=0)
        ...     driver = DynamicEpisodeDriver(env, policy, observers=[rows.append], num_episodes=3)
        ...     time_step, policy_state = driver.run()
        >>> len(rows), sum(int(row.is_boundary().sum()) for row in rows), time_step.is_first()
        (21, 3, array([ True]))

    Counts as in TF-Agents: an episode is complete with its boundary row, which holds its final observation; what is
    stored of it then is whole, and its lane goes on with a FIRST time step. A run ends with the row that reaches the
    count, so it completes at least `num_episodes` episodes and at most `batch_size - 1` more. Other lanes may be inside
    an episode then: give `run` the time step that it returned, and they go on. With several lanes and an end after so
    many episodes, short episodes are seen more often than long ones.

    What observers see, and what holds after an exception, is said at `diskbuf.drivers.driver.Driver`.

    Args:
        env: An environment, batched.
        policy: What chooses the actions.
        observers: Callables that take a `Trajectory` with leaves [B, *shape], such as `buffer.add_batch` and metrics.
            The arrays belong to the rows before and after too; an observer that wants to change them copies them.
        num_episodes: Episodes of one `run`, all lanes together.
        transition_observers: Callables that take `(time_step, policy_step, next_time_step)`, one tuple.
        progress: Whether `run` shows a progress bar on standard error.

    Raises:
        OptionError: If num_episodes is below 1, an observer isn't callable, or env or policy isn't one.
    """

    _unit: ClassVar[str] = "episodes"

    def __init__(
        self,
        env: Environment,
        policy: ActingPolicy,
        observers: Iterable[Observer] = (),
        num_episodes: int = 1,
        *,
        transition_observers: Iterable[TransitionObserver] = (),
        progress: bool = False,
    ) -> None:
        super().__init__(env, policy, observers, transition_observers=transition_observers, progress=progress)
        self._num_episodes = at_least_one("num_episodes", num_episodes)

    def run(
        self,
        time_step: TimeStep | None = None,
        policy_state: Any = (),
        num_episodes: int | None = None,
        *,
        maximum_iterations: int | None = None,
    ) -> tuple[TimeStep, Any]:
        """Takes episodes.

        Args:
            time_step: Where to go on, as `run` or the environment returned it last; None begins new episodes in all
                lanes, as in TF-Agents. A lane that is LAST in it completes that episode with its first row.
            policy_state: As `run` returned it; () or None asks the policy for its initial state.
            num_episodes: Episodes of this run; None takes the driver's number.
            maximum_iterations: Rows after which the run ends even when the count isn't reached; None sets no limit.

        Returns:
            The time step and the policy state to go on with.

        Raises:
            OptionError: If num_episodes or maximum_iterations is below 1; nothing was stepped.
            SpecError: If time_step is no `TimeStep` of this environment's batch size; nothing was stepped.
        """
        goal = self._num_episodes if num_episodes is None else at_least_one("num_episodes", num_episodes)
        return self._drive(time_step, policy_state, goal=goal, maximum_iterations=maximum_iterations)

    def _counted(self, *, steps: int, episodes: int) -> int:  # noqa: ARG002  the other drivers count those
        return episodes

    def _start(self) -> TimeStep:
        return self._env.reset()
