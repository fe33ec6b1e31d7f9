"""Gymnasium environments as batched time steps: loading them by name, wrapping one's own.

    >>> with load("CartPole-v1", num_envs=2, seed=0) as env:
    ...     time_step = env.reset()
    ...     next_time_step = env.step(np.array([0, 1]))
    >>> next_time_step.step_type, next_time_step.reward, next_time_step.observation.shape
    (array([1, 1], dtype=int32), array([1., 1.], dtype=float32), (2, 4))

Every lane goes FIRST, MID, ..., LAST, FIRST, ... whatever Gymnasium's autoreset mode is: a LAST time step holds the
episode's true final observation, and the action taken there is not played.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from diskbuf import specs
from diskbuf.environments._autoreset import lanes_of
from diskbuf.environments._leaf_rules import leaf_rules
from diskbuf.errors import ClosedError, OptionError, SpecError
from diskbuf.trajectories import StepType, TimeStep, restart, time_step_spec
from diskbuf.tree import Structure

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.vector import VectorEnv

_AUTORESET_MODES = ("next_step", "same_step", "disabled")
_VECTORIZATIONS = ("sync", "async", "vector_entry_point")


def load(
    environment_name: str,
    num_envs: int = 1,
    *,
    seed: int | None = None,
    max_episode_steps: int | None = None,
    gym_kwargs: Mapping[str, Any] | None = None,
    gym_env_wrappers: Sequence[Callable[["gymnasium.Env[Any, Any]"], "gymnasium.Env[Any, Any]"]] = (),
    vectorization: str = "sync",
    autoreset_mode: str = "next_step",
    check_finite: bool = False,
) -> "GymEnvironment":
    """Makes a registered Gymnasium environment, `num_envs` of them side by side.

    Args:
        environment_name: As Gymnasium knows it, `CartPole-v1` or `module:Name-v0`.
        num_envs: Lanes, which is the batch size.
        seed: Lane i is seeded with seed + i at the first reset; None takes entropy from the system.
        max_episode_steps: Truncates episodes after so many steps; None keeps the environment's own limit.
        gym_kwargs: Keyword arguments for the environment's constructor.
        gym_env_wrappers: Applied to each lane's environment, the first one innermost.
        vectorization: "sync" steps the lanes one after the other, "async" each in its own process, and
            "vector_entry_point" takes the vectorized version that a few environments bring.
        autoreset_mode: "next_step", "same_step" or "disabled", as in Gymnasium. The time steps are of the same kind in
            all three; "async" with the last two wastes a step and a reset per episode.
        check_finite: Refuse NaN and infinity in observations and rewards, at some cost per step.

    Raises:
        OptionError: If Gymnasium knows no such environment, or an option is outside its rule.
    """
    import gymnasium
    from gymnasium.vector import AutoresetMode

    _positive("num_envs", num_envs)
    if max_episode_steps is not None:
        _positive("max_episode_steps", max_episode_steps)
    _one_of("vectorization", vectorization, _VECTORIZATIONS)
    _one_of("autoreset_mode", autoreset_mode, _AUTORESET_MODES)
    _check_seed(seed)
    kwargs = dict(gym_kwargs or {})
    if max_episode_steps is not None:
        kwargs["max_episode_steps"] = int(max_episode_steps)
    vector_kwargs = {"autoreset_mode": AutoresetMode[autoreset_mode.upper()]}
    if vectorization == "vector_entry_point":
        if autoreset_mode != "next_step" or gym_env_wrappers:
            raise OptionError(
                "autoreset_mode and gym_env_wrappers must be left alone with vectorization='vector_entry_point', "
                f"got {autoreset_mode!r} and {len(gym_env_wrappers)} wrappers. Use vectorization='sync'."
            )
        vector_kwargs = {}
    try:
        vector_env = gymnasium.make_vec(
            environment_name,
            num_envs=int(num_envs),
            vectorization_mode=vectorization,
            vector_kwargs=vector_kwargs,
            wrappers=list(gym_env_wrappers),  # type: ignore[arg-type]  # any callable will do, not only classes
            **kwargs,
        )
    except gymnasium.error.DependencyNotInstalled:
        raise  # says itself what to install
    except gymnasium.error.Error as error:
        raise OptionError(
            f"environment_name must be one that Gymnasium knows, got {environment_name!r} ({error}). "
            "gymnasium.pprint_registry() lists them; for one of your own use wrap([make] * num_envs)."
        ) from error
    return GymEnvironment(vector_env, seed=seed, check_finite=check_finite)


def wrap(
    env: "gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any] | Sequence[Callable[[], gymnasium.Env[Any, Any]]]",
    *,
    seed: int | None = None,
    max_episode_steps: int | None = None,
    check_finite: bool = False,
) -> "GymEnvironment":
    """Wraps environments of your own.

    Args:
        env: Callables that each make an environment, one a lane (`[make] * 4`; a class is such a callable); or a
            single environment, or a `gymnasium.vector.VectorEnv`, either closed with the result.
        seed: Lane i is seeded with seed + i at the first reset.
        max_episode_steps: Truncates episodes after so many steps; not for a `VectorEnv`, which has made its lanes.
        check_finite: Refuse NaN and infinity in observations and rewards, at some cost per step.

    Raises:
        OptionError: If env is none of these, its autoreset mode is unknown, or another option is outside its rule.
        SpecError: If a space has no spec.
    """
    import gymnasium
    from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

    if max_episode_steps is not None:
        _positive("max_episode_steps", max_episode_steps)
    if isinstance(env, VectorEnv):
        if max_episode_steps is not None:
            raise OptionError(
                f"max_episode_steps must be None with a gymnasium.vector.VectorEnv, got {max_episode_steps}. "
                "Give its environments the limit, with gymnasium.wrappers.TimeLimit."
            )
        return GymEnvironment(env, seed=seed, check_finite=check_finite)
    factories: list[Any] = list(env) if isinstance(env, Sequence) else []
    if isinstance(env, gymnasium.Env):
        factories = [lambda: env]
    if not factories or not all(map(callable, factories)):
        raise OptionError(
            "env must be a gymnasium.Env, a gymnasium.vector.VectorEnv or a list of functions that make environments, "
            f"got {env!r}. For several lanes of a class of your own: wrap([make] * num_envs)."
        )
    if max_episode_steps is not None:
        factories = [_time_limited(make, int(max_episode_steps)) for make in factories]
    vector_env = SyncVectorEnv(factories, autoreset_mode=AutoresetMode.NEXT_STEP)
    return GymEnvironment(vector_env, seed=seed, check_finite=check_finite)


class GymEnvironment:
    """A Gymnasium vector environment that answers in batched time steps.

    Always batched: leaves are [B, *shape] also where B is 1. Rewards are float32, rounded from what the environment
    gives (usually float64); discounts are float32; observations have the dtype of their space, and an environment that
    gives another is refused. (Gymnasium's own sync and async vector environments cast before that.) Actions must lie
    within their bounds; observations need not, since many environments stray from the bounds they name. Time steps
    never change after they were returned.

    In the three autoreset modes:

    - The environments of a plain `SyncVectorEnv` are stepped one by one, whatever its mode, not through its `step`.
    - NEXT_STEP, the default everywhere, is what diskbuf's boundary rows are made for.
    - In SAME_STEP and DISABLED a lane between two episodes takes one step that reaches no row, and is reset once more
      with `options={"reset_mask": ...}`.
    - In SAME_STEP Gymnasium resets an environment before it hands out the final observation. One that reuses one array
      for all its observations has overwritten it by then.

    An exception from the vector environment passes through as it is; the next step or `current_time_step` then resets.
    (Gymnasium ends the process in which an `AsyncVectorEnv` failed, so that one has to be made again.)

    Args:
        vector_env: Closed by `close`. Don't step or reset it yourself.
        seed: Lane i is seeded with seed + i at the first reset; later resets go on from there.
        check_finite: Refuse NaN and infinity in observations and rewards (as float32), at some cost per step.

    Raises:
        OptionError: If vector_env is no vector environment, doesn't tell its autoreset mode, or the seed is negative.
        SpecError: If a space has no spec.
    """

    def __init__(
        self, vector_env: "VectorEnv[Any, Any, Any]", *, seed: int | None = None, check_finite: bool = False
    ) -> None:
        from gymnasium.vector import VectorEnv

        if not isinstance(vector_env, VectorEnv):
            raise OptionError(
                f"vector_env must be a gymnasium.vector.VectorEnv, got {vector_env!r}. "
                "For a single environment pass a function that makes it: wrap([make])."
            )
        _check_seed(seed)
        self._vector_env = vector_env
        self._seed = seed
        self._check_finite = check_finite
        self._batch_size = vector_env.num_envs
        self._observation_spec = specs.from_space(vector_env.single_observation_space)
        self._action_spec = specs.from_space(vector_env.single_action_space)
        self._observations = Structure(self._observation_spec)
        self._observation_rules = leaf_rules(
            "observation", self._observation_spec, self._observations, self._batch_size, is_finite=check_finite
        )
        self._actions = Structure(self._action_spec)
        self._action_rules = leaf_rules("action", self._action_spec, self._actions, self._batch_size)
        self._lanes = lanes_of(vector_env, self._observations)
        self._mid = np.full(self._batch_size, StepType.MID)  # copied at each step, which is faster than filling
        self._ones = np.ones(self._batch_size, np.float32)
        self._current: TimeStep | None = None
        self._ended: npt.NDArray[np.bool_] | None = None  # [B] lanes whose current time step is LAST, None if none
        self._is_open = True

    @property
    def batch_size(self) -> int:
        """B, the number of lanes."""
        return self._batch_size

    @property
    def batched(self) -> bool:
        """True: leaves have a batch axis."""
        return True

    @property
    def vector_env(self) -> "VectorEnv[Any, Any, Any]":
        """The Gymnasium environment underneath, for rendering and the like. Stepping or resetting it mixes episodes."""
        return self._vector_env

    def observation_spec(self) -> Any:
        """Nest of specs of one observation, without the batch axis."""
        return self._observation_spec

    def action_spec(self) -> Any:
        """Nest of specs of one action, without the batch axis."""
        return self._action_spec

    def time_step_spec(self) -> TimeStep:
        """The specs of one lane's time step."""
        return time_step_spec(self._observation_spec)

    def current_time_step(self) -> TimeStep:
        """Returns the last time step that was returned; resets first if there is none.

        Raises:
            ClosedError: After `close`.
            SpecError: If a reset gives observations that don't fit their spec.
        """
        self._check_open()
        return self.reset() if self._current is None else self._current

    def reset(self) -> TimeStep:
        """Begins a new episode in every lane, also in those that are inside one.

        Raises:
            ClosedError: After `close`.
            SpecError: If the observations don't fit their spec, or aren't finite with `check_finite`.
        """
        self._check_open()
        self._current = None
        observation = self._checked(self._lanes.reset(self._seed))
        self._seed = None  # seeding again would play the same episodes again
        self._ended = None
        self._current = restart(observation, batch_size=self._batch_size)
        return self._current

    def step(self, action: Any) -> TimeStep:
        """Plays one action in every lane.

        In a lane whose time step was LAST the action is not played, and the lane's next time step is the FIRST of a
        new episode, with reward 0 and discount 1. Called before any `reset`, this resets.

        Args:
            action: Nest of [B, *shape] arrays, as in `action_spec`.

        Raises:
            ClosedError: After `close`.
            SpecError: If the action doesn't fit its spec (the environment was not stepped), or what the environment
                returned doesn't fit its own, or isn't finite with `check_finite` (the next call resets all lanes).
        """
        self._check_open()
        if self._current is None:
            return self.reset()
        action = self._checked_action(action)
        before = self._ended
        self._current = None  # stays so if the environment fails: nobody knows which lanes have moved
        observation, reward, terminated, truncated = self._lanes.step(action, before)
        observation = self._checked(observation)
        reward = np.asarray(reward)
        ended = np.logical_or(terminated, truncated)
        if reward.dtype.kind not in "biuf" or reward.shape != (self._batch_size,) or ended.shape != reward.shape:
            raise SpecError(
                f"rewards and flags must be numbers [{self._batch_size}], got {reward.dtype} {list(reward.shape)} and "
                f"{list(ended.shape)} from {self._vector_env}.",
                path="reward",
            )
        rounded = reward.astype(np.float32) if not self._check_finite else _finite(reward, before)
        step_type, discount = self._mid.copy(), self._ones.copy()
        if before is not None:
            ended &= ~before
            step_type[before] = StepType.FIRST
            rounded[before] = 0
        self._ended = None
        if np.count_nonzero(ended):
            step_type[ended] = StepType.LAST
            discount[np.logical_and(ended, terminated)] = 0
            self._ended = ended
        self._current = TimeStep(step_type, rounded, discount, observation)
        return self._current

    def close(self) -> None:
        """Closes the environments. Closing twice is fine."""
        if self._is_open:
            self._is_open = False
            self._vector_env.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GymEnvironment({self._vector_env})"

    def _check_open(self) -> None:
        if not self._is_open or self._vector_env.closed:  # by close(), or behind our back
            raise ClosedError(f"{self} must be open, but it was closed. Make it again, or use it inside its `with`.")

    def _checked(self, observation: Any) -> Any:
        """The observation, fresh arrays that fit the spec."""
        if self._observations.num_leaves == 1 and type(observation) is np.ndarray and not self._observations.keys[0]:
            self._observation_rules[0].check(observation)
            return observation if self._lanes.copies else observation.copy()
        try:
            leaves = self._observations.flatten(observation)
        except SpecError as error:
            raise SpecError(f"the observation doesn't fit its spec: {error}", path=error.path) from error
        arrays = [np.asarray(leaf) for leaf in leaves]
        for rule, array in zip(self._observation_rules, arrays, strict=True):
            rule.check(array)
        if not self._lanes.copies:
            arrays = [array.copy() for array in arrays]
        return self._observations.unflatten(arrays)

    def _checked_action(self, action: Any) -> Any:
        if self._actions.num_leaves == 1 and type(action) is np.ndarray and not self._actions.keys[0]:
            self._action_rules[0].check(action)
            self._action_rules[0].check_bounds(action)
            return action
        try:
            leaves = self._actions.flatten(action)
        except SpecError as error:
            raise SpecError(f"the action doesn't fit the action_spec: {error}", path=error.path) from error
        arrays = [np.asarray(leaf) for leaf in leaves]
        for rule, array in zip(self._action_rules, arrays, strict=True):
            rule.check(array)
            rule.check_bounds(array)
        return self._actions.unflatten(arrays)


def _time_limited(make: Callable[[], Any], max_episode_steps: int) -> Callable[[], Any]:
    from gymnasium.wrappers import TimeLimit

    return lambda: TimeLimit(make(), max_episode_steps)


def _finite(reward: npt.NDArray[Any], is_ignored: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.float32]:
    """The rewards as float32, refused if one isn't finite in a lane where it means something."""
    with np.errstate(over="ignore"):  # becomes infinite, and is found
        rounded = reward.astype(np.float32)
    is_wrong = ~np.isfinite(rounded)
    if is_ignored is not None:
        is_wrong &= ~is_ignored
    if np.count_nonzero(is_wrong):
        lane = int(is_wrong.argmax())
        raise SpecError(
            f"leaf 'reward' must be finite in float32, got {reward[lane]} in lane {lane}. "
            "Mend the environment, or use check_finite=False to let such numbers through.",
            path="reward",
        )
    return rounded


def _positive(name: str, value: int) -> None:
    try:
        fits = operator.index(value) >= 1
    except TypeError:
        fits = False
    if not fits:
        raise OptionError(f"{name} must be an integer of at least 1, got {value!r}.")


def _check_seed(seed: int | None) -> None:
    if seed is None:
        return
    try:
        fits = operator.index(seed) >= 0
    except TypeError:
        fits = False
    if not fits:
        raise OptionError(f"seed must be None or an integer of at least 0, got {seed!r}.")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise OptionError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
