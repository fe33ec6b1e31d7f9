"""Training that is killed and started again: the same batches, the same weights, no row lost."""

import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bandit_parts import CountingAgent, NumberedEnvironment

import diskbuf
from diskbuf import kept_settings
from diskbuf.bandits import trainer as bandit_trainer
from diskbuf.environments import suite_gym
from diskbuf.errors import StoreLockedError
from diskbuf.policies import RandomPolicy
from diskbuf.training.run import Intervals, TrainingRun

tf = pytest.importorskip("tensorflow")

# Trains on a store in sys.argv; tells each train step and the ids of its batch in a file that survives a kill.
TRAINER = """
import json, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy as np
import diskbuf
from diskbuf import training
from diskbuf.agents import DqnAgent
from diskbuf.environments import suite_gym
from diskbuf.networks import QNetwork

kind, root, store, iterations = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])

log = os.open(root + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

class TellingAgent(DqnAgent):
    def train(self, experience, weights=None):
        code = float(np.asarray(experience.observation, np.float64).sum())
        os.write(log, (json.dumps([int(self.train_step_counter), code]) + "\\n").encode())
        return super().train(experience, weights)

with suite_gym.load("CartPole-v1", num_envs=4, seed=1) as env:
    network = QNetwork(env.time_step_spec().observation, env.action_spec(), fc_layer_params=(8,), seed=0)
    agent = TellingAgent(env.time_step_spec(), env.action_spec(), network, keras.optimizers.Adam(1e-3), seed=3)
    common = dict(sample_batch_size=16, seed=5, checkpoint_interval=20, summary_interval=10)
    if kind == "offline":
        result = training.train_offline(root, agent, store, iterations, **common)
    else:
        with diskbuf.UniformReplayBuffer(agent.collect_data_spec, 4, 100_000, path=store) as buffer:
            result = training.train_off_policy(
                root, agent, env, buffer, num_iterations=iterations, initial_collect_steps=50,
                eval_environment=env if kind == "evaluated" else None, num_eval_episodes=4, eval_interval=30, **common)
weights = [weight.tolist() for weight in network.get_weights()]
print(json.dumps({"train_step": result.train_step, "returns": result.returns, "weights": weights}))
"""


def start(kind: str, root: Path, store: Path, iterations: int) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", TRAINER, kind, str(root), str(store), str(iterations)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: "subprocess.Popen[str]") -> dict[str, Any]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err[-3000:]
    found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    return found


def told(root: Path) -> list[tuple[int, float]]:
    """(train step, code of its batch), in the order they were taken."""
    path = Path(f"{root}.log")
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def kill_at(process: "subprocess.Popen[str]", root: Path, step: int) -> None:
    give_up = time.monotonic() + 120
    while not any(number >= step for number, _ in told(root)):
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < give_up
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.fixture
def random_store(tmp_path: Path) -> Path:
    from diskbuf.drivers import DynamicStepDriver

    path = tmp_path / "random.zarr"
    with suite_gym.load("CartPole-v1", num_envs=4, seed=1) as env:
        policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=2)
        with diskbuf.UniformReplayBuffer(policy.trajectory_spec, 4, None, path=path) as buffer:
            DynamicStepDriver(env, policy, [buffer.add_batch], num_steps=800).run()
    return path


def test_offline_training_that_is_killed_ends_with_the_weights_of_one_that_is_not(
    random_store: Path, tmp_path: Path
) -> None:
    unbroken = finished(start("offline", tmp_path / "unbroken", random_store, 90))
    root = tmp_path / "broken"
    kill_at(start("offline", root, random_store, 90), root, 47)
    before = told(root)
    assert before[-1][0] >= 47
    resumed = finished(start("offline", root, random_store, 90))
    after = told(root)[len(before) :]
    assert after[0][0] in (20, 40)  # the last checkpoint
    assert [step for step, _ in after] == list(range(after[0][0], 90))
    batches = dict(told(tmp_path / "unbroken"))
    assert dict(before) | dict(after) == batches
    assert len(set(batches.values())) == 90
    assert resumed["train_step"] == unbroken["train_step"] == 90
    for mine, other in zip(resumed["weights"], unbroken["weights"], strict=True):
        np.testing.assert_array_equal(np.array(mine), np.array(other))


def test_off_policy_training_that_is_killed_goes_on_with_its_rows_and_its_checkpoint(tmp_path: Path) -> None:
    root, store = tmp_path / "run", tmp_path / "store.zarr"
    kill_at(start("off_policy", root, store, 90), root, 47)
    with diskbuf.open(store) as buffer:
        rows, kept = buffer.gather_all(), buffer.next_id
    assert kept >= 47 + 50 // 4
    before = told(root)
    result = finished(start("off_policy", root, store, 90))
    after = told(root)[len(before) :]
    assert result["train_step"] == 90
    assert [step for step, _ in after] == list(range(after[0][0], 90))
    assert after[0][0] in (20, 40)
    with diskbuf.open(store) as buffer:
        assert buffer.next_id >= kept + 90 - after[0][0]
        np.testing.assert_array_equal(buffer.gather_all().observation[:, :kept], rows.observation)
    finished(start("off_policy", root, store, 90))  # nothing is left to do
    assert told(root)[len(before) + len(after) :] == []


def test_off_policy_training_evaluates_and_tells_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    root = tmp_path / "run"
    result = finished(start("evaluated", root, tmp_path / "store.zarr", 60))
    assert [step for step, _ in result["returns"]] == [30, 60]
    assert all(8 <= earned <= 500 for _, earned in result["returns"])
    for name, tags in (("train", {"Losses/loss", "Metrics/AverageReturn"}), ("eval", {"Metrics/AverageReturn"})):
        events = EventAccumulator(str(root / name))
        events.Reload()
        assert tags <= set(events.Tags()["tensors"])
    assert len(list((root / "checkpoints").glob("ckpt-*.index"))) == 3


class _Counting(tf.Module):
    """An agent that only counts."""

    train_sequence_length = 2

    def __init__(self) -> None:
        super().__init__()
        self.train_step_counter = tf.Variable(0, dtype=tf.int64)

    def train(self, experience: Any) -> Any:
        from diskbuf.agents import LossInfo

        assert experience.reward.shape[1] == 2
        self.train_step_counter.assign_add(1)
        return LossInfo(tf.constant(0.5), ())


class _Averaging(tf.Module):
    """An agent whose weight comes from every batch and its order, and whose policy earns nothing."""

    train_sequence_length = 2

    def __init__(self) -> None:
        super().__init__()
        self.train_step_counter = tf.Variable(0, dtype=tf.int64)
        self.weight = tf.Variable(0.0, dtype=tf.float64)
        self.traced = 0

    def train(self, experience: Any) -> Any:
        from diskbuf.agents import LossInfo

        self.traced += 1  # Python's, so once for each call of `train` or for each time that it is compiled
        self.weight.assign(0.9 * self.weight + tf.reduce_sum(tf.cast(experience.observation, tf.float64)))
        self.train_step_counter.assign_add(1)
        return LossInfo(self.weight.read_value(), ())


def test_train_steps_compiled_into_one_call_are_those_of_one_at_a_time(random_store: Path, tmp_path: Path) -> None:
    from diskbuf import training

    results, agents = [], []
    for train_steps_per_call in (1, 7, 1000):
        agent = _Averaging()
        agents.append(agent)
        results.append(
            training.train_offline(
                tmp_path / str(train_steps_per_call),
                agent,
                random_store,
                50,
                sample_batch_size=4,
                summary_interval=9,
                checkpoint_interval=20,
                train_steps_per_call=train_steps_per_call,
            )
        )
        checkpoints = (tmp_path / str(train_steps_per_call) / "checkpoints").glob("*.index")
        assert sorted(path.stem for path in checkpoints) == ["ckpt-20", "ckpt-40", "ckpt-50"]
    assert [step for step, _ in results[0].losses] == [9, 18, 27, 36, 45]
    for result, agent in zip(results[1:], agents[1:], strict=True):
        assert agent.traced < 10
        np.testing.assert_allclose(agent.weight, agents[0].weight, rtol=1e-9)
        np.testing.assert_allclose(result.losses, results[0].losses, rtol=1e-9)


def test_off_policy_training_takes_all_train_steps_of_an_iteration_in_one_call(tmp_path: Path) -> None:
    from diskbuf import training

    agents = []
    for train_steps_per_call in (1, 100):
        with suite_gym.load("CartPole-v1", num_envs=4, seed=1) as env:
            policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=2)
            agent = _Averaging()
            agent.collect_policy = policy
            agents.append(agent)
            with diskbuf.UniformReplayBuffer(policy.trajectory_spec, 4, 1000) as buffer:
                result = training.train_off_policy(
                    tmp_path / str(train_steps_per_call),
                    agent,
                    env,
                    buffer,
                    num_iterations=12,
                    initial_collect_steps=40,
                    initial_collect_policy=policy,
                    train_steps_per_iteration=3,
                    sample_batch_size=4,
                    train_steps_per_call=train_steps_per_call,
                )
                assert result.train_step == 36
                assert buffer.next_id == 10 + 12
    assert agents[0].traced == 36
    assert agents[1].traced < 10


class _KilledError(Exception):
    """Ends a training as a kill would."""


def test_what_was_told_before_a_restart_is_in_the_result_once(
    random_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diskbuf import training
    from diskbuf.training import offline

    earned, fails_at = iter(range(100)), 2

    def average_return(agent: Any, *_: Any) -> float:
        if next(earned) == fails_at:
            raise _KilledError
        return float(agent.train_step_counter)

    monkeypatch.setattr(offline, "average_return", average_return)

    def train(agent: Any) -> training.TrainResult:
        return training.train_offline(
            tmp_path / "run",
            agent,
            random_store,
            50,
            sample_batch_size=4,
            summary_interval=5,
            eval_environment=object(),
            eval_interval=10,
            checkpoint_interval=15,
        )

    with pytest.raises(_KilledError):
        train(_Averaging())  # at train step 30, of which there is a checkpoint but no evaluation
    history = tmp_path / "run" / "history.jsonl"
    with open(history, "a") as file:
        file.write('{"train_step": 35, "loss": 1.0}\n{"train_step": 35, "avera')  # later than the checkpoint; torn
    agent = _Averaging()
    result = train(agent)
    assert result.returns == [(10, 10.0), (20, 20.0), (30, 30.0), (40, 40.0), (50, 50.0)]
    assert [step for step, _ in result.losses] == list(range(5, 51, 5))
    assert result.losses[-1][1] == result.loss == float(agent.weight)
    unbroken = training.train_offline(
        tmp_path / "unbroken", _Averaging(), random_store, 50, sample_batch_size=4, summary_interval=5
    )
    assert result.losses == unbroken.losses
    again = train(_Averaging())  # nothing is left to do
    assert again[2:] == result[2:]
    assert len(history.read_text().splitlines()) == 15


def test_training_shows_a_progress_bar_only_when_asked(
    random_store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from diskbuf import training

    def shown(num_iterations: int, **options: Any) -> str:
        training.train_offline(
            tmp_path / "a",
            _Counting(),
            random_store,
            num_iterations,
            sample_batch_size=4,
            summary_interval=2,
            **options,
        )
        return capfd.readouterr().err

    assert "train steps" not in shown(4)
    bar = shown(10, progress=True)
    assert "4/10" in bar  # where the one before ended
    assert "10/10" in bar
    assert "train steps/s, loss=0.5" in bar


def test_settings_that_decide_the_batches_cannot_be_changed_by_a_restart(random_store: Path, tmp_path: Path) -> None:
    from diskbuf import training

    result = training.train_offline(tmp_path / "a", _Counting(), random_store, 5, sample_batch_size=4, seed=1)
    assert result == (5, 0.5, [], [])
    with pytest.raises(diskbuf.OptionError, match="seed must be 1 to go on with the training in"):
        training.train_offline(tmp_path / "a", _Counting(), random_store, 9, sample_batch_size=4, seed=2)
    with pytest.raises(diskbuf.OptionError, match="sample_batch_size must be 4 to go on"):
        training.train_offline(tmp_path / "a", _Counting(), random_store, 9, sample_batch_size=5, seed=1)
    again = training.train_offline(tmp_path / "a", _Counting(), random_store, 9, sample_batch_size=4, seed=1)
    assert again.train_step == 9


def test_another_agent_cannot_go_on_with_a_training(random_store: Path, tmp_path: Path) -> None:
    from diskbuf import training

    agents = [_Counting(), _Counting()]
    for width, agent in zip((3, 4), agents, strict=True):
        agent.weight = tf.Variable(np.zeros(width, "float32"))
    training.train_offline(tmp_path / "a", agents[0], random_store, 3, sample_batch_size=4)
    with pytest.raises(diskbuf.OptionError, match=r"agent must be made as the one whose checkpoint is .*/a/ch"):
        training.train_offline(tmp_path / "a", agents[1], random_store, 5, sample_batch_size=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": None}, "seed must be an int, so that a restart goes on with the same batches, got None"),
        ({"checkpoint_interval": 0}, "checkpoint_interval must be an int of at least 1, got 0"),
        ({"num_iterations": 0}, "num_iterations must be an int of at least 1, got 0"),
        ({"sample_batch_size": 0}, "sample_batch_size must be an int of at least 1, got 0"),
        ({"train_steps_per_call": 0}, "train_steps_per_call must be an int of at least 1, got 0"),
    ],
)
def test_an_argument_outside_its_rule_is_refused(
    random_store: Path, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    from diskbuf import training

    with pytest.raises(diskbuf.OptionError, match=message):
        training.train_offline(tmp_path / "a", _Counting(), random_store, **{"num_iterations": 3, **arguments})


def test_training_logs_a_line_for_the_loss(
    random_store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from diskbuf import training

    with caplog.at_level(logging.INFO, "diskbuf.metrics"):
        training.train_offline(tmp_path / "a", _Counting(), random_store, 5, sample_batch_size=4, summary_interval=2)
    assert caplog.messages == ["[step=2] loss = 0.5.", "[step=4] loss = 0.5."]


def test_an_evaluation_counts_as_many_episodes_of_each_lane() -> None:
    from diskbuf import training

    with suite_gym.load("CartPole-v1", num_envs=3, seed=1) as env:
        policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=2)
        returns = training.evaluate(policy, env, num_episodes=7)
    assert returns.shape == (9,)
    assert returns.min() >= 8
    assert 10 < returns.mean() < 60


def test_a_folder_is_one_trainings_at_a_time(tmp_path: Path) -> None:
    environment = NumberedEnvironment()
    bandit = CountingAgent(environment.time_step_spec(), environment.action_spec())
    with (
        kept_settings.one_at_a_time(tmp_path),
        pytest.raises(
            StoreLockedError, match=r"must be one training's at a time, got process \d+ on host .* Wait for it"
        ),
    ):
        bandit_trainer.train(tmp_path, bandit, environment, 1, 1)
    bandit_trainer.train(tmp_path, bandit, environment, 1, 1, save_policy=False)
    with (
        kept_settings.one_at_a_time(tmp_path / "run"),
        pytest.raises(StoreLockedError, match="must be one training's at a time"),
    ):
        TrainingRun(
            tmp_path / "run",
            bandit,
            metrics=(),
            settings={},
            intervals=Intervals(checkpoint=None, summary=None, evaluation=None),
            before_checkpoint=lambda: None,
            evaluation=None,
            train_steps_per_call=1,
            last_step=1,
            progress=False,
        )
