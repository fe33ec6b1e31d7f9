"""Episodes of the counter environment, twice: as a driver stores them, and as a plain loop sees them.

The plain loop plays the actions that the driver's policy chose. From what it sees, tests make files of other programs.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optree
from counter_environment import CounterEnvironment, End, makers

import diskbuf
from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import suite_gym
from diskbuf.policies import RandomPolicy
from diskbuf.trajectories import StepType, Trajectory

LENGTHS = (1, 3, 2, 1, 4)
ENDS: tuple[End, ...] = ("terminated", "truncated", "truncated", "truncated", "terminated")


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a loop saw of an episode of T actions: T + 1 observations; flags and rewards of each action."""

    observations: list[Any]
    actions: list[Any]
    rewards: list[float]
    terminated: list[bool]
    truncated: list[bool]

    def stacked(self) -> Any:
        """The observations as a nest of arrays [T + 1, ...]."""
        return optree.tree_map(lambda *leaves: np.stack(leaves), *self.observations)


def collect(
    path: Path,
    num_steps: int,
    *,
    lengths: Sequence[int] = LENGTHS,
    ends: Sequence[End] = ENDS,
    is_dict: bool = False,
    environments: int = 1,
) -> Trajectory:
    """Collects steps with the driver; returns the rows [B, T, ...]."""
    with suite_gym.wrap(makers([lengths] * environments, ends=ends, is_dict=is_dict)) as env:
        policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=1)
        with diskbuf.UniformReplayBuffer(policy.trajectory_spec, environments, None, path=path) as buffer:
            DynamicStepDriver(env, policy, observers=[buffer.add_batch], num_steps=num_steps).run()
            rows: Trajectory = buffer.gather_all()
            return rows


def see(
    rows: Trajectory,
    lane: int = 0,
    *,
    lengths: Sequence[int] = LENGTHS,
    ends: Sequence[End] = ENDS,
    is_dict: bool = False,
) -> list[Seen]:
    """Plays the actions of a lane in an environment of its own; the last episode may go on."""
    environment = CounterEnvironment(lane, lengths=lengths, ends=ends, is_dict=is_dict)
    seen: list[Seen] = []
    is_running = False
    for step_type, action in zip(rows.step_type[lane], rows.action[lane], strict=True):
        if step_type == StepType.LAST:
            continue
        if not is_running:
            seen.append(Seen([environment.reset()[0]], [], [], [], []))
        observation, reward, terminated, truncated, _ = environment.step(action)
        is_running = not (terminated or truncated)
        episode = seen[-1]
        episode.observations.append(observation)
        for values, value in (
            (episode.actions, action),
            (episode.rewards, reward),
            (episode.terminated, terminated),
            (episode.truncated, truncated),
        ):
            values.append(value)
    return seen


def rows_of(path: Path) -> Any:
    """All rows of a store [B, T, ...]."""
    with diskbuf.open(path) as buffer:
        return buffer.gather_all()


def assert_same_rows(found: Any, expected: Trajectory, *, reward_dtype: Any = np.float32) -> None:
    """The rows of one lane are the same in everything that means something: of boundaries, not the action."""
    assert type(found).__name__ == "Trajectory"
    np.testing.assert_array_equal(found.step_type, expected.step_type, strict=True)
    np.testing.assert_array_equal(found.next_step_type, expected.next_step_type, strict=True)
    np.testing.assert_array_equal(found.discount, expected.discount, strict=True)
    np.testing.assert_array_equal(found.reward, expected.reward.astype(reward_dtype), strict=True)
    is_step = expected.step_type != StepType.LAST
    assert optree.tree_structure(found.observation) == optree.tree_structure(expected.observation)
    for leaf, other in zip(
        optree.tree_leaves(found.observation), optree.tree_leaves(expected.observation), strict=True
    ):
        np.testing.assert_array_equal(leaf, other, strict=True)
    np.testing.assert_array_equal(found.action[is_step], expected.action[is_step], strict=True)


def part(rows: Any, steps: Any) -> Any:
    """Some of the steps of rows [B, T, ...]."""
    return optree.tree_map(lambda leaf: leaf[:, steps], rows)


def lane_of(rows: Trajectory, lane: int) -> Trajectory:
    """The rows of one lane [1, T, ...]."""
    one: Trajectory = optree.tree_map(lambda leaf: leaf[lane : lane + 1], rows)
    return one
