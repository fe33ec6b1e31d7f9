"""Replaying a log as an environment: what is kept, against one event at a time and against the truth."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import diskbuf
from diskbuf import specs, trajectories
from diskbuf.bandits import trainer
from diskbuf.bandits.agents import LinearUCBAgent
from diskbuf.bandits.log_reader import LogReader
from diskbuf.bandits.policies import BanditPolicy
from diskbuf.bandits.replay import ReplayEnvironment
from diskbuf.drivers import DynamicStepDriver
from diskbuf.errors import EndOfLogError, OptionError, SpecError
from diskbuf.trajectories import PolicyStep, from_transition, restart, termination

ARMS = 3


class Remembering(BanditPolicy):
    """Chooses by the context, and keeps what it was shown."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.shown: list[float] = []

    def _probabilities(self, context: Any, mask: Any) -> NDArray[np.float64]:
        index = context[:, 0].astype(int) * 7 % ARMS
        return np.eye(ARMS)[index]

    def _choose(self, context: Any, mask: Any) -> Any:
        self.shown += context[:, 0].tolist()
        return super()._choose(context, mask)

    def _tensor_probabilities(self, context: Any, mask: Any) -> Any:
        raise NotImplementedError


def log_of(
    arms: NDArray[Any],
    rewards: NDArray[Any],
    path: Path | None = None,
    *,
    propensity: NDArray[Any] | None = None,
    lanes: int = 1,
) -> diskbuf.UniformReplayBuffer:
    """A log whose contexts are numbers that count the events."""
    info = {} if propensity is None else {"propensity": specs.ArraySpec((), np.float32)}
    spec = trajectories.trajectory_spec(
        trajectories.time_step_spec(specs.ArraySpec((1,), np.float32)),
        PolicyStep(specs.BoundedArraySpec((), np.int32, 0, ARMS - 1), (), info or ()),
    )
    buffer = diskbuf.UniformReplayBuffer(spec, lanes, None, path=path)
    contexts = np.arange(len(arms), dtype=np.float32)[:, None]
    for start in range(0, len(arms), lanes):
        rows = slice(start, start + lanes)
        step = PolicyStep(
            arms[rows].astype(np.int32), (), {"propensity": propensity[rows].astype(np.float32)} if info else ()
        )
        time_step = restart(contexts[rows], batch_size=lanes)
        buffer.add_batch(from_transition(time_step, step, termination(contexts[rows], rewards[rows])))
    return buffer


def replayed(environment: ReplayEnvironment, policy: Any) -> list[Any]:
    """All rows until the log ends."""
    rows: list[Any] = []
    driver = DynamicStepDriver(environment, policy, [rows.append], num_steps=10**9)
    with pytest.raises(EndOfLogError):
        driver.run()
    return rows


@settings(max_examples=40, deadline=None)
@given(
    arms=st.lists(st.integers(0, ARMS - 1), min_size=1, max_size=60),
    lanes=st.integers(1, 3),
    batch_size=st.integers(1, 7),
)
def test_rows_are_those_of_one_event_after_the_other(arms: list[int], lanes: int, batch_size: int) -> None:
    arms = arms[: len(arms) - len(arms) % lanes] or arms[:1] * lanes
    rewards = np.arange(len(arms)) * 0.5
    expected = [number for number, arm in enumerate(arms) if number * 7 % ARMS == arm]
    with log_of(np.array(arms), rewards, lanes=lanes) as log:
        environment = ReplayEnvironment(log, batch_size, is_uniform=True)
        policy = Remembering(environment.time_step_spec(), environment.action_spec(), seed=0)
        rows = replayed(environment, policy)
    kept = [float(number) for row in rows for number in row.observation[:, 0]]
    assert kept == expected[: len(kept)]
    assert len(expected) - len(kept) < batch_size
    assert [reward for row in rows for reward in row.reward] == [number * 0.5 for number in kept]
    assert all((row.action == row.observation[:, 0].astype(int) * 7 % ARMS).all() for row in rows)
    assert all((row.policy_info["propensity"] == 1).all() for row in rows)
    assert environment.num_events == len(arms)
    assert environment.num_matches == len(expected)
    if expected:
        assert environment.estimate() == pytest.approx(np.mean(expected) * 0.5)
    else:
        assert environment.estimate() is None


def test_a_log_without_a_match_gives_no_estimate() -> None:
    with log_of(np.array([1, 2, 0]), np.ones(3)) as log:  # never 0, 1, 2
        environment = ReplayEnvironment(log, 2, is_uniform=True)
        policy = Remembering(environment.time_step_spec(), environment.action_spec())
        assert environment.estimate() is None
        with pytest.raises(EndOfLogError, match="0 of 3 events matched"):
            DynamicStepDriver(environment, policy, num_steps=1).run()
        assert environment.estimate() is None


def draws(seed: int, *, chances: NDArray[Any], size: int = 20_000) -> tuple[Any, Any, Any]:
    """Arms by chances [3] that depend on whether the event's number is odd, and rewards that depend on both."""
    rng = np.random.default_rng(seed)
    number = np.arange(size)
    by_event = chances[number % 2]
    arms = (by_event.cumsum(axis=1) > rng.random(size)[:, None]).argmax(axis=1)
    means = np.where(number % 2, 0.2, 0.6) + 0.2 * arms
    return arms, (rng.random(size) < means).astype(np.float32), by_event[number, arms]


def truth(size: int = 20_000) -> float:
    number = np.arange(size)
    return float((np.where(number % 2, 0.2, 0.6) + 0.2 * (number * 7 % ARMS)).mean())


def test_a_uniform_log_estimates_a_policy_within_its_interval() -> None:
    arms, rewards, _ = draws(0, chances=np.full((2, ARMS), 1 / 3))
    with log_of(arms, rewards, lanes=4) as log:
        environment = ReplayEnvironment(log, 16, is_uniform=True)
        rows = replayed(environment, Remembering(environment.time_step_spec(), environment.action_spec()))
    earned = np.concatenate([row.reward for row in rows])
    assert abs(earned.mean() - truth()) < 2.6 * earned.std() / np.sqrt(len(earned))  # 99 %
    assert environment.num_matches == pytest.approx(20_000 / 3, rel=0.05)


def test_a_log_that_is_not_uniform_needs_its_propensities_and_repeats_by_seed() -> None:
    chances = np.array([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1]])
    arms, rewards, propensity = draws(1, chances=chances)
    found = []
    with log_of(arms, rewards, propensity=propensity, lanes=4) as log:
        for seed in (5, 5, 6):
            environment = ReplayEnvironment(log, 16, seed=seed)
            rows = replayed(environment, Remembering(environment.time_step_spec(), environment.action_spec()))
            found.append(np.concatenate([row.reward for row in rows]))
        naive = ReplayEnvironment(log, 16, is_uniform=True)
        replayed(naive, Remembering(naive.time_step_spec(), naive.action_spec()))
    for earned in found:
        assert abs(earned.mean() - truth()) < 2.6 * earned.std() / np.sqrt(len(earned))
        assert len(earned) == pytest.approx(2_000, rel=0.1)  # one event in ten is kept, whatever is chosen
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])
    estimate = naive.estimate()
    assert estimate is not None
    assert abs(estimate - truth()) > 0.02  # what happens without them


def test_events_that_are_not_finite_are_refused_or_left_out() -> None:
    rewards = np.array([0.0, np.nan, 2.0])
    with log_of(np.array([0, 1, 2]), rewards) as log:
        environment = ReplayEnvironment(log, is_uniform=True)
        with pytest.raises(SpecError, match="'reward' must be finite, got nan in row 1 of lane 0"):
            environment.reset()
        environment = ReplayEnvironment(log, is_uniform=True, invalid="drop")
        rows = replayed(environment, Remembering(environment.time_step_spec(), environment.action_spec()))
    assert [float(row.observation[0, 0]) for row in rows] == [0, 2]


def test_what_a_replay_needs_is_asked_for() -> None:
    arms, rewards = np.array([0, 1, 2]), np.ones(3)
    with log_of(arms, rewards) as log:
        with pytest.raises(OptionError, match=r"the log must have propensities .* say so: is_uniform=True"):
            ReplayEnvironment(log)
        with pytest.raises(OptionError, match="batch_size must be an int of at least 1, got 0"):
            ReplayEnvironment(log, 0, is_uniform=True)
        environment = ReplayEnvironment(log, 2, is_uniform=True)
        environment.reset()
        with pytest.raises(SpecError, match=r"'action' must lie within \[0, 2\], got 3 in lane 1"):
            environment.step(np.array([0, 3]))
        with pytest.raises(SpecError, match=r"'action' must be integers \[2\], got int64 \[1\]"):
            environment.step(np.array([0]))
        assert environment.num_events == 0
    for wrong in (0.0, -0.5, 1.5, np.nan):
        with (
            log_of(arms, rewards, propensity=np.array([0.5, wrong, 0.5])) as log,
            pytest.raises(SpecError, match=r"'policy_info/propensity' must be above 0 and at most 1, got .* in row 1"),
        ):
            ReplayEnvironment(log)
    with (
        log_of(arms, rewards, propensity=np.array([0.5, 0.25, 0.5])) as log,
        pytest.raises(OptionError, match=r"lowest_propensity must be above 0 and at most the log's 0.25, got 0.4"),
    ):
        ReplayEnvironment(log, lowest_propensity=0.4)


def test_the_bandit_trainer_learns_from_a_replay_and_goes_on_with_it(tmp_path: Path) -> None:
    arms, rewards, propensity = draws(2, chances=np.full((2, ARMS), 1 / 3), size=4_000)
    log_of(arms, rewards, tmp_path / "events.zarr", propensity=propensity, lanes=4).close()

    def train(root: Path, loops: int) -> ReplayEnvironment:
        with ReplayEnvironment(tmp_path / "events.zarr", 8, seed=3) as environment:
            agent = LinearUCBAgent(environment.time_step_spec(), environment.action_spec(), add_bias=True)
            trainer.train(root, agent, environment, loops, 3, 2, save_policy=False, resume_training_loops=True)
        return environment

    train(tmp_path / "twice", 4)
    again, once = train(tmp_path / "twice", 9), train(tmp_path / "once", 9)
    assert again.num_events == once.num_events
    assert again.num_matches == once.num_matches == 9 * 3 * 2 * 8
    numbers = []
    for name in ("twice", "once"):
        with LogReader(tmp_path / name / "log.zarr") as log:
            numbers.append(np.concatenate([rows.observation[:, 0] for rows in log.blocks()]))
    assert np.array_equal(numbers[0], numbers[1])
    assert len(np.unique(numbers[0])) == 9 * 3 * 2 * 8  # no event twice


def test_a_training_ends_with_the_log_that_it_replays_and_learns_from_every_match(tmp_path: Path) -> None:
    arms, rewards, _ = draws(3, chances=np.full((2, ARMS), 1 / 3), size=300)
    with log_of(arms, rewards) as log:
        environment = ReplayEnvironment(log, 4, is_uniform=True)
        agent = LinearUCBAgent(environment.time_step_spec(), environment.action_spec(), add_bias=True)
        trainer.train(tmp_path, agent, environment, 1000, 7, 2, save_policy=False)
    assert environment.num_events == 300
    with LogReader(tmp_path / "log.zarr") as log_reader:
        assert environment.num_matches - 4 < log_reader.num_rows <= environment.num_matches
        assert agent.num_samples.sum() == log_reader.num_rows
        assert log_reader.num_rows % (4 * 7) != 0  # the last batch had fewer rows


def test_a_step_by_hand_needs_its_row_to_be_made(tmp_path: Path) -> None:
    with log_of(np.array([0, 1, 2]), np.ones(3)) as log:
        environment = ReplayEnvironment(log, is_uniform=True)
        environment.reset()
        environment.step(np.array([0]))
        with pytest.raises(OptionError, match="make_row must be called after each step"):
            environment.step(np.array([0]))
        with pytest.raises(OptionError, match="is_uniform must be"):
            ReplayEnvironment(log, is_uniform="no")  # type: ignore[arg-type]
