"""A programmable environment whose every number says where it comes from, so that any mixing of rows shows.

Observation, action and reward of a step encode (environment, episode, t): the observation is
[environment, episode, t, the action that led here], and the reward is `reward_of(environment, episode, t, action)`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

End = Literal["terminated", "truncated"]

NUM_ACTIONS = 10


def reward_of(environment: int, episode: int, t: int, action: int) -> float:
    """The reward for an action in step t: exact in float32 for up to 16 environments, 100 episodes and 100 steps."""
    return float(environment * 1_000_000 + episode * 10_000 + t * 100 + action)


class CounterEnvironment(gymnasium.Env[Any, Any]):
    """Counts its episodes and steps, and is strict: stepping it before a reset or after the end raises.

    Args:
        environment: Its own number.
        lengths: Actions in each episode, from the beginning again after the last one.
        ends: How each episode ends, from the beginning again after the last one.
        is_dict: Observations {"where": [environment, episode, t], "action": the action that led here}.
        reuses_array: Hands out the same array each time.
        raw_dtype: Of what it returns, if other than its space says.
        fails_at: (episode, t) in which `step` raises RuntimeError, once.
    """

    def __init__(
        self,
        environment: int = 0,
        *,
        lengths: Sequence[int] = (3,),
        ends: Sequence[End] = ("terminated",),
        is_dict: bool = False,
        reuses_array: bool = False,
        raw_dtype: npt.DTypeLike = np.float32,
        fails_at: tuple[int, int] | None = None,
    ) -> None:
        self.environment = environment
        self.lengths = tuple(lengths)
        self.ends = tuple(ends)
        self.is_dict = is_dict
        self.reuses_array = reuses_array
        self.raw_dtype = raw_dtype
        self.fails_at = fails_at
        self.action_space = spaces.Discrete(NUM_ACTIONS)
        numbers = spaces.Box(-1, 1000, (4,), np.float32)
        parts = {"where": spaces.Box(-1, 1000, (3,), np.float32), "action": spaces.Box(-1, 1000, (), np.float32)}
        self.observation_space = spaces.Dict(parts) if is_dict else numbers
        self.episode = -1
        self.t = 0
        self.is_running = False
        self.num_steps = 0  # over all episodes
        self.array = np.zeros(4, raw_dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.t = 0
        self.is_running = True
        return self.observation(-1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.is_running:
            raise RuntimeError(f"environment {self.environment} was stepped outside an episode")
        if self.fails_at == (self.episode, self.t):
            self.fails_at = None
            raise RuntimeError(f"environment {self.environment} fails in episode {self.episode} at {self.t}")
        reward = reward_of(self.environment, self.episode, self.t, int(action))
        self.t += 1
        self.num_steps += 1
        has_ended = self.t == self.lengths[self.episode % len(self.lengths)]
        end = self.ends[self.episode % len(self.ends)]
        self.is_running = not has_ended
        info = {f"key {self.num_steps}": self.t}  # other keys each time
        terminated, truncated = has_ended and end == "terminated", has_ended and end == "truncated"
        return self.observation(int(action)), reward, terminated, truncated, info

    def observation(self, action: int) -> Any:
        array = self.array if self.reuses_array else np.zeros(4, self.raw_dtype)
        array[:] = self.environment, self.episode, self.t, action
        # A view of a reused array, even for the scalar, so that the dict shows what the array shows.
        return {"where": array[:3], "action": array[3:].reshape(())} if self.is_dict else array


def makers(lengths: Sequence[Sequence[int]], **kwargs: Any) -> list[Callable[[], CounterEnvironment]]:
    """Functions that make one environment each: number i with the i-th lengths."""

    def maker(environment: int, own_lengths: Sequence[int]) -> Callable[[], CounterEnvironment]:
        return lambda: CounterEnvironment(environment, lengths=own_lengths, **kwargs)

    return [maker(environment, own_lengths) for environment, own_lengths in enumerate(lengths)]


def numbers(observation: Any) -> npt.NDArray[Any]:
    """A batch of observations as [B, 4], whether dict or not."""
    if isinstance(observation, dict):
        return np.concatenate([observation["where"], observation["action"][..., None]], axis=-1)
    return np.asarray(observation)


def check_lanes(
    rows: Sequence[Any],
    lengths: Sequence[Sequence[int]],
    ends: Sequence[End] = ("terminated",),
    *,
    skips_episodes: bool = False,
) -> list[int]:
    """Walks the rows of each lane next to a plain simulation of its environment; the first row begins an episode.

    Args:
        rows: Trajectories with leaves [B, *shape], in the order they were observed.
        lengths: Of each environment's episodes.
        ends: Of all environments' episodes.
        skips_episodes: Whether episodes may be missing between two that are there.

    Returns:
        [B] how many of a lane's rows are steps of the agent, no boundaries.
    """
    counts = []
    for lane, own_lengths in enumerate(lengths):
        episode, t, last_action, ended, count = -1, 0, -1, True, 0
        for row in rows:
            environment, seen_episode, seen_t, seen_action = (int(n) for n in numbers(row.observation)[lane])
            if ended:
                assert row.step_type[lane] == 0
                assert seen_episode >= episode + 1 if skips_episodes else seen_episode == episode + 1
                episode, t, last_action, ended = seen_episode, 0, -1, False
            assert (environment, seen_episode, seen_t, seen_action) == (lane, episode, t, last_action)
            length = own_lengths[episode % len(own_lengths)]
            end = ends[episode % len(ends)]
            if t == length:
                assert (row.step_type[lane], row.next_step_type[lane]) == (2, 0)
                assert (row.reward[lane], row.discount[lane]) == (0, 1)
                ended = True
                continue
            assert row.step_type[lane] == (0 if t == 0 else 1)
            assert row.next_step_type[lane] == (2 if t + 1 == length else 1)
            last_action = int(row.action[lane])
            assert row.reward[lane] == reward_of(lane, episode, t, last_action)
            assert row.discount[lane] == (0 if t + 1 == length and end == "terminated" else 1)
            t += 1
            count += 1
        counts.append(count)
    return counts
