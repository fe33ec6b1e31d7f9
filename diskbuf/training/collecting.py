"""Collects rows of a Gymnasium environment into a store until it has had so many; goes on after any end."""

import contextlib
import dataclasses
import difflib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from diskbuf import specs
from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import GymEnvironment, suite_gym
from diskbuf.errors import MissingExtraError, OptionError, StoreNotFoundError
from diskbuf.metrics import AverageReturnMetric, NumberOfEpisodes
from diskbuf.options import StoreOptions
from diskbuf.policies import EpsilonGreedyPolicy, Policy, RandomPolicy
from diskbuf.readers.requests import count
from diskbuf.replay_buffers.uniform import UniformReplayBuffer
from diskbuf.replay_buffers.uniform import open as open_buffer
from diskbuf.tree import Structure, describe

_LANES = 8
_SECONDS_TO_TELL = 0.1
_NEAREST = 3

Tell = Callable[[int, int, float], object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectReport:
    """What was collected.

    Attributes:
        path: Of the store.
        rows: Rows that the store has had, those before this call included, all lanes together.
        added: Rows of this call.
        seconds: That it took, without opening.
        episodes: Episodes that ended in it.
        mean_return: Of the last 100 of them; None when none ended.
    """

    path: str
    rows: int
    added: int
    seconds: float
    episodes: int
    mean_return: float | None


def load_environment(
    environment_name: str,
    num_envs: int,
    *,
    seed: int | None = None,
    gym_kwargs: Mapping[str, Any] | None = None,
    vectorization: str = "sync",
) -> GymEnvironment:
    """Makes an environment as `suite_gym.load` does; whatever keeps it from being made is an error of diskbuf.

    Raises:
        OptionError: If there is no such environment, it doesn't take gym_kwargs, or another argument is outside its
            rule. For a misspelt name, the nearest ones are named.
        MissingExtraError: When a package that it needs isn't installed.
        SpecError: If a space has no spec.
    """
    import gymnasium

    try:
        with _interrupts_held() if vectorization == "async" else contextlib.nullcontext():
            return suite_gym.load(
                environment_name, num_envs, seed=seed, gym_kwargs=gym_kwargs, vectorization=vectorization
            )
    except OptionError as error:
        if not isinstance(error.__cause__, gymnasium.error.UnregisteredEnv):
            raise
        raise OptionError(
            f"environment must be one that Gymnasium knows, got {environment_name!r}. Nearest: "
            f"{', '.join(_nearest(environment_name, list(gymnasium.registry)))}. "
            "One of your own package is MODULE:NAME, where importing the module registers it."
        ) from error
    except gymnasium.error.DependencyNotInstalled as error:
        raise MissingExtraError(f"{environment_name} needs a package that isn't installed: {error}") from error
    except ModuleNotFoundError as error:
        module, colon, _ = environment_name.partition(":")
        # Gymnasium raises it anew, without the name.
        if not colon or not str(error).startswith(f"No module named '{module.partition('.')[0]}"):
            raise MissingExtraError(f"{environment_name} needs a package that isn't installed: {error}") from error
        raise OptionError(
            f"environment must name a module that can be imported, got {environment_name!r} ({error}). Install it, or "
            "name the folder it is in with PYTHONPATH."
        ) from error
    except TypeError as error:
        if not gym_kwargs:
            raise
        raise OptionError(
            f"the environment's arguments must be ones that {environment_name} takes, got {dict(gym_kwargs)}: {error}."
        ) from error


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Lets Ctrl-C wait, and be none of the business of processes that are started meanwhile.

    A terminal sends it to all of them. Those of environments would end at once, and closing them would fail.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _nearest(name: str, known: list[str]) -> list[str]:
    """The names that look most like one, whatever its case and version."""
    wanted = name.lower()
    by_lower = {registered.lower(): registered for registered in known}
    near = difflib.get_close_matches(wanted, by_lower, n=_NEAREST, cutoff=0.5)
    same = [lower for lower in by_lower if lower.rpartition("-v")[0] == wanted.rpartition("-v")[0] != ""]
    return [by_lower[lower] for lower in dict.fromkeys([*sorted(same, reverse=True), *near])][:_NEAREST] or known[:3]


def collect(
    path: str | os.PathLike[str],
    environment_name: str,
    *,
    num_steps: int,
    lanes: int | None = None,
    policy: Policy | None = None,
    policy_name: str = "random",
    epsilon: float = 0.0,
    seed: int | None = None,
    max_length: int | None = None,
    options: StoreOptions | None = None,
    gym_kwargs: Mapping[str, Any] | None = None,
    vectorization: str = "sync",
    progress: Tell | None = None,
) -> CollectReport:
    """Adds rows until the store has had `num_steps`, all lanes together: killed anywhere, the same call goes on.

    A row is one step of one environment; the boundary rows between episodes are counted too. So 10 lanes and 50 steps
    are 50 rows, 5 of each lane. Each call adds to all lanes, so the count may be passed by up to lanes - 1.

    Environment and policies are noted in the store's metadata: "environment", "environment_kwargs" where there are
    any, and "policies", a list of {"first_id", "policy", "epsilon"} for each change of the policy.

    Args:
        path: Of the store, made if it isn't there.
        environment_name: As Gymnasium knows it.
        num_steps: Rows to reach.
        lanes: Environments side by side; None is the store's, 8 for a new one.
        policy: What acts; None is a random one.
        policy_name: What the metadata calls it.
        epsilon: Share of random actions with a policy, from 0 to 1.
        seed: Makes a run repeatable, together with the row where it begins; None takes entropy from the system.
        max_length: Steps of each lane that are kept; None is the store's, and all of a new one.
        options: How a new store is laid out and synced.
        gym_kwargs: Arguments for the environment's constructor; None is what the store's were.
        vectorization: As in `suite_gym.load`.
        progress: Called with the rows there are, the rows to reach, and the mean return so far (NaN before an episode
            has ended), at most ten times a second.

    Returns:
        What was collected.

    Raises:
        OptionError: If an argument is outside its rule, the store is of another environment, or the policy doesn't fit
            the environment; nothing was added, and no store was made.
        SpecError: If a space has no spec, or the environment gives what doesn't fit.
        MissingExtraError: When a package that the environment needs isn't installed.
        StoreError: If the store can't be gone on with.
    """
    goal = count("num_steps", num_steps)
    before = _Before.of(path)
    arguments = before.kwargs if gym_kwargs is None else dict(gym_kwargs)
    before.check_environment(environment_name, arguments, path=path)
    num_lanes = (before.lanes or _LANES) if lanes is None else count("lanes", lanes)
    env_seed, policy_seed = None, None
    if seed is not None:  # where it begins is part of the seed, so that a run doesn't repeat the one it continues
        entropy = [count("seed", seed, least=0), before.next_id]
        env_seed, policy_seed = map(int, np.random.SeedSequence(entropy).generate_state(2))
    with load_environment(
        environment_name, num_lanes, seed=env_seed, gym_kwargs=arguments, vectorization=vectorization
    ) as env:
        acting = _acting(policy, env, epsilon=epsilon, seed=policy_seed)
        with UniformReplayBuffer(
            acting.trajectory_spec,
            num_lanes,
            before.max_length if max_length is None else max_length,
            path=path,
            metadata=before.noted(environment_name, arguments, policy_name, epsilon),
            options=options,
        ) as buffer:
            return _collect(env, acting, buffer, goal=goal, progress=progress)


def _collect(
    env: GymEnvironment, policy: Policy, buffer: UniformReplayBuffer, *, goal: int, progress: Tell | None
) -> CollectReport:
    lanes = buffer.batch_size
    first = buffer.next_id * lanes
    episodes, returns = NumberOfEpisodes(), AverageReturnMetric(batch_size=lanes, buffer_size=100)
    told = started = time.perf_counter()

    def tell(_: object) -> None:
        nonlocal told
        now = time.perf_counter()
        if progress is not None and now - told >= _SECONDS_TO_TELL:
            told = now
            progress(buffer.next_id * lanes, goal, float(returns.result()) if episodes.result() else float("nan"))

    rows = -(-(goal - first) // lanes)
    if rows > 0:
        # Counted by rows and not by steps, which leave the boundaries out.
        driver = DynamicStepDriver(env, policy, [buffer.add_batch, episodes, returns, tell], num_steps=rows * lanes)
        driver.run(maximum_iterations=rows)
    ended = int(episodes.result())
    return CollectReport(
        path=str(buffer.path),
        rows=buffer.next_id * lanes,
        added=buffer.next_id * lanes - first,
        seconds=time.perf_counter() - started,
        episodes=ended,
        mean_return=float(returns.result()) if ended else None,
    )


def _acting(policy: Policy | None, env: GymEnvironment, *, epsilon: float, seed: int | None) -> Policy:
    if policy is None:
        if epsilon:
            raise OptionError(f"epsilon must be 0 with a random policy, got {epsilon!r}. It explores all the time.")
        return RandomPolicy(env.time_step_spec(), env.action_spec(), seed=seed)
    check_fits(policy, env)
    if not epsilon:
        return policy
    if Structure(policy.info_spec).num_leaves:
        raise OptionError(
            f"epsilon must be 0 with a policy that tells {describe(policy.info_spec)} of its actions, got {epsilon!r}: "
            "what it tells would be wrong of random ones."
        )
    return EpsilonGreedyPolicy(policy, epsilon, seed=seed)


def check_fits(policy: Policy, env: GymEnvironment) -> None:
    """Refuses a policy that was made for other observations or actions than an environment's.

    Raises:
        OptionError: If it was.
    """
    for name, mine, theirs in (
        ("observations", policy.time_step_spec.observation, env.observation_spec()),
        ("actions", policy.action_spec, env.action_spec()),
    ):
        # Bounds of observations bind nobody; those of actions are what the environment takes.
        found = specs.differences(mine, theirs) if name == "actions" else _unlike(mine, theirs)
        if found:
            raise OptionError(
                f"policy must be made for the {name} of the environment, {describe(theirs)}, got one for "
                f"{describe(mine)}. Name the environment that it was trained for."
            )


def _unlike(mine: Any, theirs: Any) -> bool:
    one, other = Structure(mine), Structure(theirs)
    if one.paths != other.paths:
        return True
    pairs = zip(one.flatten(mine), other.flatten(theirs), strict=True)
    return any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Before:
    """What a store is before it is gone on with; of one that isn't there, nothing."""

    next_id: int = 0
    lanes: int | None = None
    max_length: int | None = None
    metadata: Any = None

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> "_Before":
        try:
            with open_buffer(path) as buffer:
                return cls(
                    next_id=buffer.next_id,
                    lanes=buffer.batch_size,
                    max_length=buffer.max_length,
                    metadata=buffer.metadata,
                )
        except StoreNotFoundError:
            return cls()

    @property
    def kwargs(self) -> dict[str, Any]:
        found = self.metadata.get("environment_kwargs", {}) if isinstance(self.metadata, dict) else {}
        return dict(found)

    def check_environment(self, name: str, arguments: dict[str, Any], *, path: str | os.PathLike[str]) -> None:
        if self.metadata is None:
            return
        if not isinstance(self.metadata, dict):
            raise OptionError(
                f"{path} must have an object for its metadata, to note the environment in, got {self.metadata!r:.80}. "
                "Collect into another store."
            )
        known = self.metadata.get("environment", name)
        if known != name:
            raise OptionError(
                f"environment must be {known!r} to go on with {path}, got {name!r}. Collect into another store."
            )
        if self.lanes is not None and json.loads(json.dumps(arguments)) != self.kwargs:
            raise OptionError(
                f"the environment's arguments must be {self.kwargs} to go on with {path}, got {arguments}. Collect "
                "into another store."
            )

    def noted(self, name: str, arguments: dict[str, Any], policy: str, epsilon: float) -> dict[str, Any]:
        """The metadata from now on."""
        found = dict(self.metadata or {}) | {"environment": name}
        if arguments:
            found["environment_kwargs"] = arguments
        entry: dict[str, Any] = {"policy": policy} | ({"epsilon": epsilon} if epsilon else {})
        past = list(found.get("policies", []))
        latest = past[-1] if past else {"policy": found["policy"]} if "policy" in found else {}
        if {key: value for key, value in latest.items() if key != "first_id"} != entry:
            past.append({"first_id": self.next_id, **entry})
        return found | ({"policies": past} if past else {})
