"""How the lanes of a vector environment are stepped, so that each of them goes FIRST, MID, ..., LAST, FIRST, ...

Between the step that ends an episode and the first step of the next one a lane has a boundary row, in which it must
stand still while the other lanes take a real step. Three ways to get there:

- A `SyncVectorEnv` lets us at its environments, so they are stepped one by one, and those between episodes are reset
  instead. Its autoreset mode doesn't matter, and it is faster than its own `step`, which also gathers infos.
- NEXT_STEP does just what we want.
- SAME_STEP and DISABLED step all lanes or none. A lane between episodes takes a step like the others and is then reset
  again with `reset_mask`; nothing of that step reaches a row. It costs the lane a step and a reset per episode.

This module knows neither time steps nor specs' dtypes; `suite_gym` makes the one and checks the other.
"""

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diskbuf.errors import OptionError, SpecError
from diskbuf.tree import Structure, describe

if TYPE_CHECKING:
    from gymnasium.vector import SyncVectorEnv, VectorEnv

Flags = npt.NDArray[np.bool_]
Outcome = tuple[Any, Any, Any, Any]  # observation, reward, terminated, truncated, all [B, ...]


class Lanes(abc.ABC):
    """The lanes of one vector environment.

    Attributes:
        copies: Whether every observation handed out is a fresh array that nothing else will write to.
    """

    copies: bool

    @abc.abstractmethod
    def reset(self, seed: int | None) -> Any:
        """Resets all lanes and returns their first observations; lane i is seeded with seed + i."""

    @abc.abstractmethod
    def step(self, action: Any, ended: Flags | None) -> Outcome:
        """Takes one step.

        Args:
            action: Nest of [B, *shape] arrays.
            ended: [B] True in lanes whose episode ended in the step before; None if there are none.

        Returns:
            The final observation where an episode ends, the next episode's first one where `ended`; there the
            reward and the flags mean nothing.
        """


def lanes_of(vector_env: "VectorEnv[Any, Any, Any]", structure: Structure) -> Lanes:
    """Returns the way of stepping that fits the vector environment's autoreset mode.

    Args:
        vector_env: What is to be stepped, wrappers and all.
        structure: Of its observations.

    Raises:
        OptionError: If its metadata doesn't say how it resets.
    """
    from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

    mode = vector_env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise OptionError(
            f"metadata['autoreset_mode'] of {vector_env} must be a gymnasium.vector.AutoresetMode, got {mode!r}. "
            "Set it to what the environment's step() does when an episode ends."
        )
    # A subclass or a wrapper may do more in step() than its environments do, so only the class itself is taken apart.
    if type(vector_env) is SyncVectorEnv:
        return SeparateLanes(vector_env, structure)
    if mode is AutoresetMode.NEXT_STEP:
        return NextStepLanes(vector_env, copies=type(vector_env) is AsyncVectorEnv and vector_env.copy)
    return MaskedLanes(vector_env, structure, same_step=mode is AutoresetMode.SAME_STEP)


class NextStepLanes(Lanes):
    """Lanes that Gymnasium itself resets in the step after the last one."""

    def __init__(self, vector_env: "VectorEnv[Any, Any, Any]", *, copies: bool) -> None:
        self._vector_env = vector_env
        self.copies = copies

    def reset(self, seed: int | None) -> Any:
        return self._vector_env.reset(seed=seed)[0]

    def step(self, action: Any, ended: Flags | None) -> Outcome:  # noqa: ARG002  Gymnasium keeps count itself
        return self._vector_env.step(action)[:4]


class SeparateLanes(Lanes):
    """Lanes of a `SyncVectorEnv` in whatever mode, its environments stepped or reset one by one."""

    copies = True

    def __init__(self, vector_env: "SyncVectorEnv[Any, Any]", structure: Structure) -> None:
        from gymnasium.vector.utils import concatenate, create_empty_array, iterate

        self._vector_env = vector_env
        self._structure = structure
        self._iterate: Callable[[Any, Any], Any] = iterate
        self._concatenate: Callable[[Any, Any, Any], Any] = concatenate
        self._empty: Callable[..., Any] = create_empty_array

    def reset(self, seed: int | None) -> Any:
        observations = [
            _first_observation(env.reset(seed=None if seed is None else seed + lane), lane)
            for lane, env in enumerate(self._vector_env.envs)
        ]
        return self._batch(observations)

    def step(self, action: Any, ended: Flags | None) -> Outcome:
        lanes = self._vector_env.num_envs
        observations: list[Any] = []
        reward = np.zeros(lanes, np.float64)
        terminated = np.zeros(lanes, np.bool_)
        truncated = np.zeros(lanes, np.bool_)
        actions = self._iterate(self._vector_env.action_space, action)
        for lane, (env, lane_action) in enumerate(zip(self._vector_env.envs, actions, strict=True)):
            if ended is not None and ended[lane]:
                observations.append(_first_observation(env.reset(), lane))
                continue
            outcome = env.step(lane_action)
            if type(outcome) is not tuple or len(outcome) != 5:
                raise SpecError(
                    "step() must return (observation, reward, terminated, truncated, info), got "
                    f"{describe(outcome)} from {env} in lane {lane}. {_OLDER_GYM}"
                )
            observation, lane_reward, terminated[lane], truncated[lane], _ = outcome
            reward[lane] = lane_reward if type(lane_reward) is float else _number(lane_reward, lane)
            observations.append(observation)
        return self._batch(observations), reward, terminated, truncated

    def _batch(self, observations: list[Any]) -> Any:
        space = self._vector_env.single_observation_space
        batch = self._empty(space, n=len(observations), fn=np.zeros)
        try:
            return self._concatenate(space, observations, batch)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise self._misfit(observations, batch, error) from error

    def _misfit(self, observations: list[Any], batch: Any, error: Exception) -> Exception:
        """The error to raise about the first observation that can't be put into the batch."""
        expected = self._structure.flatten(batch)
        for lane, observation in enumerate(observations):
            try:
                given = self._structure.flatten(observation)
            except SpecError as mismatch:
                return SpecError(f"the observation of lane {lane} doesn't fit its spec: {mismatch}", path=mismatch.path)
            for path, slot, leaf in zip(self._structure.paths, expected, given, strict=True):
                if not _fits(leaf, slot):
                    name = f"observation/{path}" if path else "observation"
                    return SpecError(
                        f"leaf {name!r} must be {slot.dtype} {list(slot.shape[1:])}, got {describe(leaf)} in lane "
                        f"{lane}. Mend what {self._vector_env.envs[lane]} returns, or its observation_space.",
                        path=name,
                    )
        return error


class MaskedLanes(Lanes):
    """Lanes that can only be stepped all together, but reset one by one with `reset_mask`."""

    copies = True

    def __init__(self, vector_env: "VectorEnv[Any, Any, Any]", structure: Structure, *, same_step: bool) -> None:
        self._vector_env = vector_env
        self._structure = structure
        self._same_step = same_step
        self._restarted: Any = None  # first observations of all lanes, when all ended in the step before

    def reset(self, seed: int | None) -> Any:
        return self._copy(self._vector_env.reset(seed=seed)[0])

    def step(self, action: Any, ended: Flags | None) -> Outcome:
        if ended is not None and ended.all():  # nobody has a step to take
            first = self._restarted if self._same_step else self._copy(self._vector_env.reset()[0])
            return first, np.zeros(len(ended)), np.zeros_like(ended), np.zeros_like(ended)
        if ended is not None and not self._same_step:
            self._reset(ended)  # an ended environment must not be stepped
        observation, reward, terminated, truncated, infos = self._vector_env.step(action)
        observation = self._copy(observation)
        done = np.logical_or(terminated, truncated)
        if ended is not None:
            self._begin_again(observation, ended)
            done &= ~ended
        if self._same_step and done.any():
            if done.all():
                self._restarted = self._copy(observation)
            self._put_final(observation, infos, done)
        return observation, reward, terminated, truncated

    def _reset(self, ended: Flags) -> Any:
        return self._vector_env.reset(options={"reset_mask": ended.copy()})[0]

    def _begin_again(self, observation: Any, ended: Flags) -> None:
        """Resets the ended lanes, which have taken a step that isn't theirs, and writes their first observations."""
        leaves = self._structure.flatten(observation)
        for leaf, first in zip(leaves, self._structure.flatten(self._reset(ended)), strict=True):
            if not np.array_equal(leaf[~ended], first[~ended], equal_nan=leaf.dtype.kind in "fc"):
                raise OptionError(
                    f"{self._vector_env} must reset only the lanes in options['reset_mask'], got others changed too. "
                    "Make it with autoreset_mode=gymnasium.vector.AutoresetMode.NEXT_STEP, which needs no mask."
                )
            leaf[ended] = first[ended]

    def _put_final(self, observation: Any, infos: dict[str, Any], done: Flags) -> None:
        """Puts the final observations where the vector environment already shows the next episodes' first ones."""
        if "final_obs" not in infos:
            raise SpecError(
                f"infos must hold 'final_obs' when an episode ends in SAME_STEP mode, got {sorted(infos)} from "
                f"{self._vector_env}."
            )
        leaves = self._structure.flatten(observation)
        for lane in np.flatnonzero(done):
            final = self._structure.flatten(infos["final_obs"][lane])
            for path, leaf, value in zip(self._structure.paths, leaves, final, strict=True):
                array = np.asarray(value)
                if not _fits(array, leaf):
                    raise SpecError(
                        f"final_obs leaf {path!r} must be {leaf.dtype} {list(leaf.shape[1:])}, "
                        f"got {array.dtype} {list(array.shape)}.",
                        path=path,
                    )
                leaf[lane] = array

    def _copy(self, observation: Any) -> Any:
        return self._structure.unflatten([np.array(leaf) for leaf in self._structure.flatten(observation)])


_OLDER_GYM = "One that is written for the older Gym goes through the package shimmy."


def _first_observation(outcome: Any, lane: int) -> Any:
    if type(outcome) is not tuple or len(outcome) != 2:
        raise SpecError(
            f"reset() must return (observation, info), got {describe(outcome)} in lane {lane}. {_OLDER_GYM}"
        )
    return outcome[0]


def _number(reward: Any, lane: int) -> Any:
    array = np.asarray(reward)
    if array.dtype.kind not in "biuf" or array.shape != ():  # NumPy would make NaN of None, and 1 of ["1"]
        raise SpecError(
            f"leaf 'reward' must be one number, got {describe(reward)} in lane {lane}. Return a float from step().",
            path="reward",
        )
    return array


def _fits(leaf: Any, batch: npt.NDArray[Any]) -> bool:
    """Whether Gymnasium can put one lane's leaf, an array or a list of numbers, into the batch [B, *shape]."""
    try:
        array = np.asarray(leaf)
    except ValueError:  # an uneven list
        return False
    return array.shape == batch.shape[1:] and np.can_cast(array.dtype, batch.dtype, casting="same_kind")
