"""Metrics of bandits against the definition, and drivers in bandit environments."""

from typing import Any

import numpy as np
import pytest
from bandit_parts import LANES, CountingAgent, NumberedEnvironment

from diskbuf.bandits.metrics import (
    ConstraintViolationsMetric,
    CumulativeRegretMetric,
    DistanceFromGreedyMetric,
    RegretMetric,
    SuboptimalArmsMetric,
)
from diskbuf.drivers import DynamicEpisodeDriver, DynamicStepDriver
from diskbuf.errors import OptionError, SpecError
from diskbuf.metrics import AverageEpisodeLengthMetric, AverageReturnMetric, EnvironmentSteps, NumberOfEpisodes
from diskbuf.trajectories import StepType, Trajectory


def row(observation: Any, action: Any, reward: Any) -> Trajectory:
    lanes = len(action)
    return Trajectory(
        np.full(lanes, StepType.FIRST),
        np.asarray(observation, np.float32),
        np.asarray(action, np.int32),
        (),
        np.full(lanes, StepType.LAST),
        reward if isinstance(reward, dict) else np.asarray(reward, np.float32),
        np.zeros(lanes, np.float32),
    )


FIRST = row([[1.0], [2.0]], [0, 2], [0.5, 1.0])
SECOND = row([[3.0], [0.0]], [1, 1], [1.0, 1.0])
ESTIMATES = np.array([[3.0, 1.0, 0.0], [0.0, 5.0, 1.0]])


def test_regret_is_the_mean_of_the_last_row_and_cumulative_regret_the_sum_of_all() -> None:
    last, total = RegretMetric(lambda o: o[:, 0]), CumulativeRegretMetric(lambda o: o[:, 0])
    assert (last.result(), total.result()) == (0, 0)
    for metric in (last, total):
        metric(FIRST)
    assert last.result() == np.float32((0.5 + 1.0) / 2)
    assert total.result() == 1.5
    for metric in (last, total):
        metric(SECOND)
    assert last.result() == np.float32((2.0 - 1.0) / 2)
    assert total.result() == 2.5
    for metric in (last, total):
        metric.reset()
        assert metric.result() == 0


def test_regret_of_a_nest_of_rewards_is_that_of_its_reward() -> None:
    metric = RegretMetric(lambda o: np.full(len(o), 2.0))
    metric(row([[0.0], [0.0]], [0, 0], {"reward": np.float32([1, 2]), "constraint": np.float32([9, 9])}))
    assert metric.result() == 0.5


def test_suboptimal_arms_are_counted_as_a_share() -> None:
    metric = SuboptimalArmsMetric(lambda o: np.array([0, 1]))
    metric(FIRST)
    assert metric.result() == 0.5
    metric(row([[0.0], [0.0]], [0, 1], [0, 0]))
    assert metric.result() == 0


def test_distance_from_greedy_is_what_the_estimates_say_was_given_up() -> None:
    metric = DistanceFromGreedyMetric(lambda o: ESTIMATES)
    metric(FIRST)  # arms 0 and 2: 3 - 3 and 5 - 1
    assert metric.result() == 2
    metric(SECOND)  # arms 1 and 1: 3 - 1 and 5 - 5
    assert metric.result() == 1


def test_constraint_violations_are_the_chance_that_the_chosen_arms_dont_keep_it() -> None:
    metric = ConstraintViolationsMetric(lambda o: np.array([[1.0, 0.0, 0.5], [1.0, 0.0, 0.25]]))
    metric(FIRST)
    assert metric.result() == np.float32((0 + 0.75) / 2)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (RegretMetric(lambda o: 1.0), r"baseline_reward_fn must return numbers \[2\], got float64 \[\]"),
        (RegretMetric(lambda o: o), r"baseline_reward_fn must return numbers \[2\], got float32 \[2, 1\]"),
        (SuboptimalArmsMetric(lambda o: ["a", "b"]), r"baseline_action_fn must return numbers \[2\], got <U1"),
        (DistanceFromGreedyMetric(lambda o: o[:, 0]), r"estimated_reward_fn must return numbers \[2, K\]"),
        (DistanceFromGreedyMetric(lambda o: ESTIMATES[:, :2]), r"'action' must lie within \[0, 1\], got 0 to 2"),
        (
            ConstraintViolationsMetric(lambda o: ESTIMATES[:1]),
            r"constraint must return numbers \[2, K\], got .* \[1, 3\]",
        ),
    ],
)
def test_functions_that_give_something_else_are_refused(metric: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        metric(FIRST)
    assert metric.result() == 0


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(OptionError, match=r"baseline_reward_fn must be a function of a batch of observations, got 1.0"):
        RegretMetric(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [RegretMetric, CumulativeRegretMetric, SuboptimalArmsMetric])
def test_a_checkpoint_brings_the_number_back(kind: Any) -> None:
    metric, again = kind(lambda o: o[:, 0]), kind(lambda o: o[:, 0])
    metric(FIRST)
    again.deserialize(metric.serialize())
    assert again.result() == metric.result() != 0


@pytest.mark.parametrize("driver_class", [DynamicStepDriver, DynamicEpisodeDriver])
def test_a_driver_takes_each_step_of_a_bandit_as_an_episode_of_its_own(driver_class: Any) -> None:
    environment = NumberedEnvironment()
    agent = CountingAgent(environment.time_step_spec(), environment.action_spec())
    rows: list[Any] = []
    metrics = [EnvironmentSteps(), NumberOfEpisodes(), AverageEpisodeLengthMetric(), AverageReturnMetric()]
    driver = driver_class(environment, agent.collect_policy, [rows.append, *metrics], 3 * LANES)
    time_step, _ = driver.run()
    driver.run(time_step)
    assert [r.observation[0, 0] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert all((r.step_type == StepType.FIRST).all() and (r.next_step_type == StepType.LAST).all() for r in rows)
    assert all((r.discount == 0).all() for r in rows)
    steps, episodes, length, average = (metric.result() for metric in metrics)
    assert (steps, episodes, length) == (6 * LANES, 6 * LANES, 1)
    # The last 10 episodes: all of the last two rows, and the last two lanes of the one before.
    assert average == pytest.approx(np.concatenate([rows[-3].reward[-2:], rows[-2].reward, rows[-1].reward]).mean())
