"""The bandit trainer: how often it does what, and that every row is trained on once, whatever happens."""

import functools
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bandit_parts import ARMS, LANES, CountingAgent, NumberedEnvironment, train_counting

import diskbuf
from diskbuf.bandits import keeping, trainer
from diskbuf.bandits.metrics import CumulativeRegretMetric, RegretMetric
from diskbuf.errors import OptionError, SpecError, StoreCorruptError
from diskbuf.metrics import EnvironmentSteps
from diskbuf.replay_buffers import BanditReplayBuffer
from diskbuf.tree import Structure

PARTS = Path(__file__).parent / "bandit_parts.py"


class Stop(BaseException):
    """Ends a run from inside, as a kill would."""


def log_of(root: Path) -> Any:
    with diskbuf.open(root / "log.zarr", history=True) as log:
        return log.gather_all()


def same(one: Any, other: Any) -> bool:
    structure = Structure(one)
    return all(map(np.array_equal, structure.flatten(one), structure.flatten(other)))


def check_whole(root: Path, agent: CountingAgent, loops: int, runs: int) -> None:
    """Every row in the log, once each, and the agent trained on each once."""
    rows = log_of(root)
    assert rows.reward.shape == (LANES, loops * runs * 5)
    seen = agent.seen[: rows.reward.shape[1] + 2]
    assert (seen[1:-1] == LANES).all()
    assert agent.seen.sum() == rows.reward.size
    assert (rows.observation[0, :, 0] == np.arange(1, rows.reward.shape[1] + 1)).all()


@pytest.mark.parametrize("runs", [None, 1, 4])
def test_metrics_and_losses_are_logged_as_often_as_promised(
    runs: int | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "diskbuf.metrics")
    regret = [RegretMetric(lambda observation: np.full(len(observation), 3.0))]
    agent = train_counting(tmp_path, 3, async_steps_per_loop=runs, additional_metrics=regret)
    count = runs or 1
    check_whole(tmp_path, agent, 3, count)
    lines = [record.getMessage() for record in caplog.records if record.name == "diskbuf.metrics"]
    for name in ("RegretMetric", "loss", "NumberOfEpisodes", "AverageEpisodeLength", "AverageReturn"):
        steps = [int(found[1]) for line in lines if (found := re.match(rf"\[step=(\d+)\] {name} = .*\.$", line))]
        assert steps == list(range(3 * count)), name
    assert lines[-1].startswith(f"[step={3 * count - 1}] loss = ")
    assert f"[step={3 * count - 1}] NumberOfEpisodes = {3 * count * 5 * LANES}." in lines


def test_losses_follow_the_runs_of_their_loop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "diskbuf.metrics")
    train_counting(tmp_path, 2, async_steps_per_loop=2)
    names = [re.match(r"\[step=(\d)\] (AverageReturn|loss) ", record.getMessage()) for record in caplog.records]
    order = [(found[2], int(found[1])) for found in names if found]
    one = [("AverageReturn", 0), ("AverageReturn", 1), ("loss", 0), ("loss", 1)]
    assert order == one + [(name, step + 2) for name, step in one]


def test_asynchronous_with_one_run_is_synchronous_to_the_bit(tmp_path: Path) -> None:
    plain = train_counting(tmp_path / "sync", 4)
    single = train_counting(tmp_path / "async", 4, async_steps_per_loop=1)
    assert np.array_equal(plain.sums, single.sums)
    assert same(log_of(tmp_path / "sync"), log_of(tmp_path / "async"))


def test_batches_are_those_of_a_deterministic_pass_in_the_order_collected(tmp_path: Path) -> None:
    trained: list[Any] = []

    class Keeping(CountingAgent):
        def train(self, experience: Any, weights: Any = None) -> Any:
            trained.append(experience)
            return super().train(experience, weights)

    environment = NumberedEnvironment()
    agent = Keeping(environment.time_step_spec(), environment.action_spec())
    trainer.train(tmp_path, agent, environment, 2, 5, 3, save_policy=False)
    with diskbuf.open(tmp_path / "log.zarr", history=True) as log:
        passed = [rows for rows, _ in log.as_numpy_iterator(LANES, 5, single_deterministic_pass=True)]
    assert len(trained) == len(passed) == 6
    assert all(map(same, trained, passed))


def test_the_policy_stays_while_rows_are_collected_for_later_batches(tmp_path: Path) -> None:
    train_counting(tmp_path, 3, async_steps_per_loop=4)
    chances = log_of(tmp_path).policy_info["propensity"]
    of_arms = np.where(np.arange(ARMS)[:, None, None] == log_of(tmp_path).action, chances, np.nan)
    for loop in np.split(of_arms, 3, axis=2):  # the same for an arm all through a loop
        assert all(len(np.unique(arm[~np.isnan(arm)])) <= 1 for arm in loop)
    assert len(np.unique(chances)) > 4


@pytest.mark.parametrize("patience", [0, 10**9], ids=["saves_always", "saves_seldom"])
@pytest.mark.parametrize("runs", [1, 2])
def test_a_run_that_ends_anywhere_is_gone_on_with_as_if_it_had_not(
    patience: int, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "_PATIENCE", patience)
    events = 0
    last = 10**9

    def counted(plain: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        nonlocal events
        events += 1
        if events == last:
            raise Stop
        return plain(*arguments, **more)

    for owner, name in (
        (CountingAgent, "train"),
        (NumberedEnvironment, "_apply_action"),
        (diskbuf.UniformReplayBuffer, "add_batch"),
        (diskbuf.UniformReplayBuffer, "clear"),
        (diskbuf.UniformReplayBuffer, "flush"),
        (trainer._Saver, "save"),
    ):
        monkeypatch.setattr(owner, name, functools.partialmethod(_through(counted, getattr(owner, name))))
    whole = train_counting(tmp_path / "whole", 3, async_steps_per_loop=runs)
    check_whole(tmp_path / "whole", whole, 3, runs)
    rng = np.random.default_rng(0)
    for at in sorted(rng.choice(np.arange(1, events + 1), 6, replace=False)):
        root = tmp_path / str(at)
        events, last = 0, int(at)
        with pytest.raises(Stop):
            train_counting(root, 3, async_steps_per_loop=runs)
        events, last = 0, int(rng.integers(1, 20))  # and the next one too, early on
        try:
            train_counting(root, 3, async_steps_per_loop=runs, resume_training_loops=True)
        except Stop:
            last = 10**9
        agent = train_counting(root, 3, async_steps_per_loop=runs, resume_training_loops=True)
        check_whole(root, agent, 3, runs)
        assert same(log_of(root), log_of(tmp_path / "whole"))
        assert np.array_equal(agent.sums, whole.sums)


def _through(counted: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **more: counted(plain, *arguments, **more)


def test_a_process_killed_again_and_again_trains_on_every_row_once(tmp_path: Path) -> None:
    def run(*death: str) -> int:
        command = [sys.executable, str(PARTS), str(tmp_path / "killed"), "8", *death]
        result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
        assert result.returncode in (0, -9), result.stderr
        return result.returncode

    assert run("_observe", "34") == -9  # in the fourth loop, collecting
    assert run("train", "8") == -9  # between two train steps of a loop
    assert run() == 0
    environment = NumberedEnvironment()
    agent = CountingAgent(environment.time_step_spec(), environment.action_spec())
    trainer.train(
        tmp_path / "killed", agent, environment, 8, 5, 2, save_policy=False, resume_training_loops=True
    )  # has nothing left to do
    check_whole(tmp_path / "killed", agent, 8, 2)
    whole = train_counting(tmp_path / "whole", 8, async_steps_per_loop=2)
    assert np.array_equal(agent.sums, whole.sums)
    assert same(log_of(tmp_path / "killed"), log_of(tmp_path / "whole"))


def test_a_row_that_was_transformed_is_trained_on_once_and_seen_by_the_metrics_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_info(row: Any) -> Any:
        return row._replace(policy_info=())

    steps = EnvironmentSteps(name="Seen")
    plain = NumberedEnvironment._apply_action
    calls = 0

    def stopping(self: NumberedEnvironment, action: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 13:
            raise Stop
        return plain(self, action)

    monkeypatch.setattr(NumberedEnvironment, "_apply_action", stopping)
    arguments: dict[str, Any] = {"training_data_spec_transformation_fn": without_info, "additional_metrics": [steps]}
    with pytest.raises(Stop):
        train_counting(tmp_path, 3, **arguments)
    assert log_of(tmp_path).policy_info == ()
    calls = 100
    steps.reset()
    agent = train_counting(tmp_path, 3, resume_training_loops=True, **arguments)
    check_whole(tmp_path, agent, 3, 1)
    assert steps.result() == 3 * 5 * LANES


def test_an_environment_that_does_not_repeat_itself_is_left_alone_and_its_log_learnt_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(last: int) -> CountingAgent:
        environment = NumberedEnvironment(seed=None)
        calls = 0
        plain = environment._apply_action

        def stopping(action: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == last:
                raise Stop
            return plain(action)

        monkeypatch.setattr(environment, "_apply_action", stopping)
        agent = CountingAgent(environment.time_step_spec(), environment.action_spec())
        metric = CumulativeRegretMetric(lambda observation: np.zeros(len(observation)))
        with monkeypatch.context() as patch:
            patch.setattr(keeping, "_PATIENCE", 10**9)
            trainer.train(
                tmp_path,
                agent,
                environment,
                4,
                5,
                additional_metrics=[metric],
                save_policy=False,
                resume_training_loops=True,
            )
        assert metric.result() == pytest.approx(-log_of(tmp_path).reward.sum(dtype=np.float64), rel=1e-5)
        return agent

    with pytest.raises(Stop):
        train(18)  # in the fourth loop; the checkpoint is of the first
    before = log_of(tmp_path)
    agent = train(0)
    rows = log_of(tmp_path)
    assert rows.reward.shape == (LANES, 20)
    assert np.array_equal(rows.reward[:, : before.reward.shape[1]], before.reward)
    assert agent.seen.sum() == rows.reward.size


@pytest.mark.parametrize("has_path", [True, False])
def test_a_buffer_of_ones_own_holds_one_loop(has_path: bool, tmp_path: Path) -> None:
    made: list[Any] = []

    def make(data_spec: Any, batch_size: int, steps_per_loop: int, async_steps_per_loop: int) -> Any:
        assert (batch_size, steps_per_loop, async_steps_per_loop) == (LANES, 5, 2)
        path = tmp_path / "own.zarr" if has_path else None
        made.append(diskbuf.UniformReplayBuffer(data_spec, batch_size, 10, path=path))
        return made[-1]

    agent = train_counting(tmp_path / "run", 3, async_steps_per_loop=2, get_replay_buffer_fn=make)
    assert agent.seen.sum() == 30 * LANES
    assert made[0].num_frames() == 0
    assert made[0].next_id == 30
    assert not (tmp_path / "run" / "log.zarr").exists()
    made[0].close()


def test_without_history_the_store_keeps_no_more_than_a_loop_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = trainer.DiskLog(root_dir=tmp_path, keep_history=False)
    whole = train_counting(tmp_path / "whole", 3)
    calls = 0

    def stopping(self: CountingAgent, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Stop
        return plain(self, *arguments)

    plain = CountingAgent._train
    monkeypatch.setattr(CountingAgent, "_train", stopping)
    with pytest.raises(Stop):
        train_counting(tmp_path, 3, get_replay_buffer_fn=make)
    agent = train_counting(tmp_path, 3, get_replay_buffer_fn=make, resume_training_loops=True)
    assert np.array_equal(agent.sums, whole.sums)
    with diskbuf.open(tmp_path / "log.zarr", history=True) as log:
        assert log.next_id - log.first_id == 0


def test_a_training_loop_of_ones_own_gets_driver_buffer_agent_and_numbers(tmp_path: Path) -> None:
    asked: list[Any] = []

    def make(driver: Any, replay_buffer: Any, agent: Any, steps_per_loop: int, async_steps_per_loop: int) -> Any:
        assert isinstance(replay_buffer, BanditReplayBuffer)
        assert (steps_per_loop, async_steps_per_loop) == (5, 2)

        def loop(train_step: int, metrics: Any) -> None:
            asked.append((train_step, len(metrics)))
            for _ in range(async_steps_per_loop):
                driver.run()
            for experience, _ in replay_buffer.as_dataset(LANES, 5, single_deterministic_pass=True):
                agent.train(experience)
            replay_buffer.clear()

        return loop

    agent = train_counting(tmp_path, 2, async_steps_per_loop=2, get_training_loop_fn=make)
    check_whole(tmp_path, agent, 2, 2)
    assert asked == [(0, 3), (1, 3)]


def test_the_last_five_checkpoints_and_policies_are_kept_and_the_last_one_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "_PATIENCE", 0)
    environment = NumberedEnvironment()
    agent = CountingAgent(environment.time_step_spec(), environment.action_spec())
    trainer.train(tmp_path, agent, environment, 7, 1)
    assert sorted(int(path.stem.rpartition("-")[2]) for path in tmp_path.glob("ckpt-*.index")) == [3, 4, 5, 6, 7]
    assert {path.name for path in tmp_path.glob("policy_*")} == {f"policy_{loop * LANES}" for loop in range(3, 8)}
    loaded = diskbuf.policies.load_policy(tmp_path / f"policy_{7 * LANES}")
    step = loaded.action(environment.current_time_step())
    wanted = agent.policy.probabilities(environment.current_time_step().observation)
    assert step.info["propensity"] == pytest.approx(wanted[np.arange(LANES), step.action], abs=1e-6)


def test_loops_count_from_now_or_from_the_first_start(tmp_path: Path) -> None:
    train_counting(tmp_path, 3)
    train_counting(tmp_path, 5, resume_training_loops=True)
    assert log_of(tmp_path).reward.shape == (LANES, 25)
    train_counting(tmp_path, 2)
    assert log_of(tmp_path).reward.shape == (LANES, 35)
    assert (tmp_path / "ckpt-7.index").exists()


def test_a_step_count_that_does_not_divide_is_refused_with_the_numbers(tmp_path: Path) -> None:
    train_counting(tmp_path, 1)
    with pytest.raises(OptionError, match=r"got 5 \* 4 \* 2 = 40 and 20 steps"):
        train_counting(tmp_path, 3, async_steps_per_loop=2, resume_training_loops=True)
    assert log_of(tmp_path).reward.shape == (LANES, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"training_loops": 0}, "training_loops must be an int of at least 1, got 0"),
        ({"steps_per_loop": 0}, "steps_per_loop must be an int of at least 1, got 0"),
        ({"async_steps_per_loop": 0}, "async_steps_per_loop must be an int of at least 1, got 0"),
        ({"additional_metrics": [len]}, r"additional_metrics\[0\] must be a diskbuf.metrics.Metric"),
        (
            {"additional_metrics": [EnvironmentSteps("loss"), EnvironmentSteps("loss")]},
            "names of their own, got 'loss'",
        ),
        ({"environment": object()}, "environment must be a bandit environment"),
        ({"agent": object()}, "agent must have collect_policy"),
        (
            {"environment": NumberedEnvironment(batch_size=3)},
            "batch_size of the replay buffer must be the environment's 3",
        ),
    ],
)
def test_arguments_outside_their_rules_are_refused_before_anything_is_made(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    environment = NumberedEnvironment()
    agent = CountingAgent(environment.time_step_spec(), environment.action_spec())
    usual: dict[str, Any] = {"agent": agent, "environment": environment, "training_loops": 1, "steps_per_loop": 5}
    if "batch_size" in message:
        make = trainer.DiskLog(root_dir=tmp_path)
        arguments = {**arguments, "get_replay_buffer_fn": lambda spec, lanes, *rest: make(spec, lanes + 1, *rest)}
    with pytest.raises(OptionError, match=message):
        trainer.train(tmp_path / "run", **{**usual, **arguments})
    assert not agent.seen.any()
    assert not (tmp_path / "run" / "log.zarr").exists()


def test_the_folder_of_another_agent_is_refused(tmp_path: Path) -> None:
    train_counting(tmp_path, 1)

    class Other(CountingAgent):
        pass

    environment = NumberedEnvironment()
    other = Other(environment.time_step_spec(), environment.action_spec())
    with pytest.raises(OptionError, match=r"agent must be 'CountingAgent' to go on .* got 'Other'"):
        trainer.train(tmp_path, other, environment, 1, 5)
    wide = NumberedEnvironment(batch_size=8)
    agent = CountingAgent(wide.time_step_spec(), wide.action_spec())
    with pytest.raises(OptionError, match="batch_size must be 4 to go on"):
        trainer.train(tmp_path, agent, wide, 1, 5)
    larger = CountingAgent(environment.time_step_spec(), environment.action_spec(), most=20_000)
    with pytest.raises(OptionError, match="agent and metrics must be made as those whose checkpoint"):
        trainer.train(tmp_path, larger, environment, 1, 5)
    assert log_of(tmp_path).reward.shape == (LANES, 5)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_reward_that_is_no_number_is_refused_and_not_logged(wrong: float, tmp_path: Path) -> None:
    class Failing(NumberedEnvironment):
        def _apply_action(self, action: Any) -> Any:
            reward = super()._apply_action(action)
            if self.count == 8:
                reward[2] = wrong
            return reward

    environment = Failing()
    agent = CountingAgent(environment.time_step_spec(), environment.action_spec())
    with pytest.raises(SpecError, match=r"'reward' must be finite, got (nan|inf) in lane 2"):
        trainer.train(tmp_path, agent, environment, 3, 5)
    assert log_of(tmp_path).reward.shape == (LANES, 7)
    assert np.isfinite(log_of(tmp_path).reward).all()


def test_a_log_that_lacks_what_the_checkpoint_has_seen_is_refused(tmp_path: Path) -> None:
    train_counting(tmp_path, 2)
    (tmp_path / "log.zarr").rename(tmp_path / "elsewhere.zarr")
    with pytest.raises(StoreCorruptError, match="must have the rows from 10 on"):
        train_counting(tmp_path, 1)


def test_summaries_are_written_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_counting(tmp_path, 2, async_steps_per_loop=2)
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = events.Tags()["tensors"]
    assert {"Metrics/AverageReturn", "Metrics/NumberOfEpisodes", "Losses/loss"} <= set(tags)
    assert [event.step for event in events.Tensors("Losses/loss")] == [0, 1, 2, 3]


def test_what_a_kill_left_while_saving_is_swept_away_and_stops_nothing(tmp_path: Path) -> None:
    for name in ("policy_80.unfinished-1234", "ckpt-163_temp", "policy_best_v2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("")
    environment = NumberedEnvironment()
    agent = CountingAgent(environment.time_step_spec(), environment.action_spec())
    trainer.train(tmp_path, agent, environment, 2, 5)
    found = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert found == {"log.zarr", "policy_best_v2", "policy_20", "policy_40"} - ({"policy_20"} - found)


def test_a_checkpoint_always_has_its_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(loops: int) -> None:
        environment = NumberedEnvironment()
        agent = CountingAgent(environment.time_step_spec(), environment.action_spec())
        trainer.train(tmp_path, agent, environment, loops, 5, resume_training_loops=True)

    def stop(*_: Any) -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(keeping.Keeper, "_save_policy", stop)
        with pytest.raises(Stop):
            train(1)
    train(1)
    assert (tmp_path / "policy_20").is_dir()


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_training_interrupted_in_its_first_loop_goes_on_with_the_same_objects(last: int, tmp_path: Path) -> None:
    environment = NumberedEnvironment()
    agent = CountingAgent(environment.time_step_spec(), environment.action_spec())
    regret = CumulativeRegretMetric(lambda observation: np.zeros(len(observation)))
    calls, plain = 0, agent._train

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == last:
            raise KeyboardInterrupt
        return plain(*arguments)

    agent._train = interrupted  # type: ignore[method-assign]
    arguments: Any = (tmp_path, agent, environment, 2, 5, 3, [regret])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(*arguments, save_policy=False, resume_training_loops=True)
    trainer.train(*arguments, save_policy=False, resume_training_loops=True)
    check_whole(tmp_path, agent, 2, 3)
    assert regret.result() == pytest.approx(-log_of(tmp_path).reward.sum(dtype=np.float64), rel=1e-5)


def test_a_loop_of_ones_own_that_drives_something_else_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = NumberedEnvironment._apply_action, 0

    def stopping(self: NumberedEnvironment, action: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 13:
            raise Stop
        return plain(self, action)

    with monkeypatch.context() as patch:
        patch.setattr(NumberedEnvironment, "_apply_action", stopping)
        patch.setattr(keeping, "_PATIENCE", 10**9)
        with pytest.raises(Stop):
            train_counting(tmp_path, 3)
    with pytest.raises(OptionError, match="must make a loop that runs the driver it is given"):
        train_counting(tmp_path, 3, get_training_loop_fn=lambda *_: lambda **_: None)


def test_steps_count_where_metrics_can_not_see_a_transformed_row(tmp_path: Path) -> None:
    def train(seed: int, last: int) -> None:
        environment = NumberedEnvironment(seed=seed)
        plain, calls = environment._apply_action, 0

        def stopping(action: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == last:
                raise Stop
            return plain(action)

        environment._apply_action = stopping  # type: ignore[method-assign]
        agent = CountingAgent(environment.time_step_spec(), environment.action_spec())
        trainer.train(
            tmp_path,
            agent,
            environment,
            2,
            5,
            training_data_spec_transformation_fn=lambda row: row._replace(policy_info=()),
            save_policy=False,
            resume_training_loops=True,
        )

    with pytest.raises(Stop):
        train(1, 4)
    for path in tmp_path.glob("ckpt-0*"):
        path.unlink()
    (tmp_path / "checkpoint").unlink()
    train(2, 0)
    assert log_of(tmp_path).reward.shape == (LANES, 10)
    train(3, 0)  # refused if steps were missing


def test_what_trainings_are_given_is_taken_as_it_is_or_refused(tmp_path: Path) -> None:
    metric = CumulativeRegretMetric(lambda observation: np.ones(len(observation)))
    train_counting(tmp_path / "generator", 1, additional_metrics=(one for one in [metric]))
    assert metric.result() != 0
    for name, value, message in (
        ("save_policy", "x", "save_policy must be"),
        ("additional_metrics", 5, "additional_metrics must be a list, got 5"),
        ("get_training_loop_fn", 5, "get_training_loop_fn must be None or a function, got 5"),
        ("get_replay_buffer_fn", lambda *_: None, "get_replay_buffer_fn must return a replay buffer, got None"),
    ):
        environment = NumberedEnvironment()
        agent = CountingAgent(environment.time_step_spec(), environment.action_spec())
        with pytest.raises(OptionError, match=message):
            trainer.train(tmp_path / name, agent, environment, 1, 5, **{name: value})


def test_an_agent_that_no_checkpoint_can_hold_is_refused(tmp_path: Path) -> None:
    class Plain:
        def __init__(self, agent: CountingAgent) -> None:
            self.policy = self.collect_policy = agent.policy
            self.train = agent.train

    environment = NumberedEnvironment()
    agent = CountingAgent(environment.time_step_spec(), environment.action_spec())
    with pytest.raises(OptionError, match=r"agent must be a tf\.Module, which a checkpoint can hold, got Plain"):
        trainer.train(tmp_path, Plain(agent), environment, 1, 5)


def test_what_changes_in_an_environment_and_is_no_array_is_refused(tmp_path: Path) -> None:
    class Other(NumberedEnvironment):
        _changing = ("count", "extra")
        extra = {"a": 1}  # noqa: RUF012  what the test is about

    environment = Other()
    agent = CountingAgent(environment.time_step_spec(), environment.action_spec())
    with pytest.raises(OptionError, match="attribute 'extra' in _changing must be an array of numbers"):
        trainer.train(tmp_path, agent, environment, 1, 5)


def test_contexts_of_an_environment_that_reuses_one_array_are_logged_as_they_were(tmp_path: Path) -> None:
    class Reusing(NumberedEnvironment):
        kept = np.zeros((LANES, 2), np.float32)

        def _observe(self) -> Any:
            self.kept[:] = super()._observe()
            return self.kept

    environment = Reusing()
    agent = CountingAgent(environment.time_step_spec(), environment.action_spec())
    trainer.train(tmp_path, agent, environment, 1, 5, save_policy=False)
    assert log_of(tmp_path).observation[0, :, 0].tolist() == [1, 2, 3, 4, 5]


def test_a_neural_agent_can_be_trained_again_in_the_same_process(tmp_path: Path) -> None:
    import keras

    from diskbuf.bandits.agents import NeuralEpsilonGreedyAgent
    from diskbuf.networks import QNetwork

    environment = NumberedEnvironment()
    specs = environment.time_step_spec(), environment.action_spec()
    network = QNetwork(specs[0].observation, specs[1], fc_layer_params=(4,), seed=0)
    agent = NeuralEpsilonGreedyAgent(*specs, network, keras.optimizers.Adam(1e-3), epsilon=0.1, seed=0)
    for _ in range(2):
        trainer.train(tmp_path / "online", agent, environment, 1, 5, save_policy=False)
    trainer.train_offline(tmp_path / "offline", agent, tmp_path / "online" / "log.zarr", save_policy=False)
    assert agent.train(log_of(tmp_path / "online")).loss > 0
    rows = log_of(tmp_path / "online")
    rows.observation[1, 2, 0] = np.nan
    before = [weight.numpy() for weight in network.weights]
    with pytest.raises(SpecError, match=r"leaf 'observation' must be finite, got nan at \[1, 2, 0\]"):
        agent.train(rows)
    assert all(np.array_equal(weight.numpy(), old) for weight, old in zip(network.weights, before, strict=True))


def test_agents_that_learn_from_one_number_refuse_another_reward_before_anything_is_collected() -> None:
    from diskbuf.specs import ArraySpec

    environment = NumberedEnvironment()
    spec = environment.time_step_spec()._replace(reward={"reward": ArraySpec((), np.float32)})
    with pytest.raises(SpecError, match="leaf 'reward' of the time_step_spec must be one float32"):
        CountingAgent(spec, environment.action_spec())
