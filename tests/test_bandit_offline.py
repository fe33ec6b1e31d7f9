"""Offline training of bandits: which rows come in which batch, and that a kill changes nothing."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bandit_parts import LANES, CountingAgent, NumberedEnvironment, train_counting
from hypothesis import given
from hypothesis import strategies as st

import diskbuf
from diskbuf import plan
from diskbuf.bandits import keeping, trainer
from diskbuf.errors import OptionError, SpecError, StoreNotFoundError, WindowError
from diskbuf.policies import load_policy


def agent_for_counting() -> CountingAgent:
    environment = NumberedEnvironment()
    return CountingAgent(environment.time_step_spec(), environment.action_spec())


class Keeping(CountingAgent):
    """Keeps the batches that it was trained on."""

    def __init__(self) -> None:
        environment = NumberedEnvironment()
        super().__init__(environment.time_step_spec(), environment.action_spec())
        self._kept = lambda kept=[]: kept

    def train(self, experience: Any, weights: Any = None) -> Any:
        self._kept().append(experience)
        return super().train(experience, weights)

    @property
    def order(self) -> list[tuple[int, int]]:
        """(step, lane) of all rows trained on."""
        return [(int(step), int(lane)) for batch in self._kept() for step, lane in batch.observation[0]]

    @property
    def sizes(self) -> list[int]:
        return [batch.reward.shape[1] for batch in self._kept()]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("collected")
    train_counting(root, 3)
    return root / "log.zarr"


def test_the_log_of_the_trainer_is_learnt_from_in_its_order(log: Path, tmp_path: Path) -> None:
    agent = Keeping()
    result = trainer.train_offline(tmp_path, agent, log, batch_size=7, save_policy=False)
    assert result.train_steps == 9
    assert agent.sizes == [7] * 8 + [4]
    assert agent.order == [(step, lane) for step in range(1, 16) for lane in range(LANES)]


def test_a_shuffled_training_sees_every_row_once_in_each_pass_and_each_pass_in_another_order(
    log: Path, tmp_path: Path
) -> None:
    agent, again = Keeping(), Keeping()
    for number, one in enumerate((agent, again)):
        trainer.train_offline(
            tmp_path / str(number), one, log, num_epochs=3, batch_size=16, shuffle=True, seed=4, save_policy=False
        )
    passes = [agent.order[start : start + 60] for start in range(0, 180, 60)]
    everything = {(step, lane) for step in range(1, 16) for lane in range(LANES)}
    assert all(set(rows) == everything and rows != sorted(rows) for rows in passes)
    assert passes[0] != passes[1] != passes[2]
    assert agent.order == again.order


def test_a_range_of_the_log_is_learnt_from_alone(log: Path, tmp_path: Path) -> None:
    agent = Keeping()
    trainer.train_offline(tmp_path, agent, log, first_id=4, next_id=6, save_policy=False)
    assert agent.order == [(step, lane) for step in (5, 6) for lane in range(LANES)]
    with pytest.raises(WindowError, match="must be a range of the ids from 0 to 15, got 4 and 16"):
        trainer.train_offline(tmp_path, agent, log, first_id=4, next_id=16)


@pytest.mark.parametrize("patience", [0, 10**9])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_training_that_stops_anywhere_goes_on_to_the_same_end(
    shuffle: bool, patience: int, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(BaseException):
        pass

    monkeypatch.setattr(keeping, "_PATIENCE", patience)
    arguments: dict[str, Any] = {
        "num_epochs": 2,
        "batch_size": 8,
        "shuffle": shuffle,
        "save_policy": False,
        "async_steps_per_loop": 3,
    }
    whole = agent_for_counting()
    trainer.train_offline(tmp_path / "whole", whole, log, **arguments)
    plain = CountingAgent._train
    for at in (1, 5, 16):
        calls = 0

        def stopping(self: CountingAgent, *rest: Any, last: int = at) -> Any:
            nonlocal calls
            calls += 1
            if calls == last:
                raise Stop
            return plain(self, *rest)

        root = tmp_path / str(at)
        with monkeypatch.context() as patch:
            patch.setattr(CountingAgent, "_train", stopping)
            with pytest.raises(Stop):
                trainer.train_offline(root, agent_for_counting(), log, **arguments)
        agent = agent_for_counting()
        result = trainer.train_offline(root, agent, log, **arguments)
        assert result.train_steps == 16
        assert np.array_equal(agent.sums, whole.sums)
        assert np.array_equal(agent.seen, whole.seen)
    assert trainer.train_offline(tmp_path / "whole", agent_for_counting(), log, **arguments).train_steps == 16


def test_a_training_interrupted_before_it_first_saves_starts_again_with_the_same_agent(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = agent_for_counting()
    with monkeypatch.context() as patch:
        patch.setattr(agent, "_train", lambda *_: agent.seen.fill(7) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.train_offline(tmp_path, agent, log, save_policy=False)
    trainer.train_offline(tmp_path, agent, log, save_policy=False)
    assert agent.seen.sum() == 15 * LANES


def test_losses_are_logged_and_the_policy_is_saved(log: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "diskbuf.metrics")
    trainer.train_offline(tmp_path, agent_for_counting(), log, batch_size=30)
    lines = [record.getMessage() for record in caplog.records if record.name == "diskbuf.metrics"]
    assert [line.partition(" = ")[0] for line in lines] == ["[step=0] loss", "[step=1] loss"]
    policy = load_policy(tmp_path / "policy_2")
    assert policy.action(NumberedEnvironment().reset()).action.shape == (LANES,)


def test_rows_without_a_reward_are_refused_or_left_out(tmp_path: Path) -> None:
    environment = NumberedEnvironment()
    agent = Keeping()
    with diskbuf.UniformReplayBuffer(agent.collect_data_spec, LANES, None) as buffer:
        time_step = environment.reset()
        for number in range(4):
            step = agent.policy.action(time_step)
            next_time_step = environment.step(step.action)
            row = diskbuf.trajectories.from_transition(restarted(time_step), step, next_time_step)
            row.reward[1] = np.nan if number == 2 else row.reward[1]
            buffer.add_batch(row)
            time_step = next_time_step
        with pytest.raises(SpecError, match="'reward' must be finite, got nan in row 2 of lane 1"):
            trainer.train_offline(tmp_path / "refused", agent, buffer, batch_size=100)
        assert agent.order == []
        trainer.train_offline(tmp_path / "dropped", agent, buffer, batch_size=100, invalid="drop", save_policy=False)
    assert agent.sizes == [4 * LANES - 1]
    assert (3, 1) not in agent.order


def test_rows_with_a_context_that_is_not_finite_are_refused_or_left_out(log: Path, tmp_path: Path) -> None:
    agent = Keeping()
    with (
        diskbuf.open(log, history=True) as reader,
        diskbuf.UniformReplayBuffer(reader.data_spec, LANES, None) as buffer,
    ):
        rows = reader.gather_all()
        rows.observation[2, 4, 1] = np.inf
        buffer.extend(rows)
        with pytest.raises(SpecError, match=r"leaf 'observation' must be finite, got .* in row 4 of lane 2"):
            trainer.train_offline(tmp_path / "refused", agent, buffer, batch_size=np.int64(100), seed=np.int64(3))
        trainer.train_offline(tmp_path / "dropped", agent, buffer, batch_size=100, invalid="drop", save_policy=False)
    assert agent.sizes == [15 * LANES - 1]


def restarted(time_step: Any) -> Any:
    return time_step._replace(step_type=np.zeros_like(time_step.step_type))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_epochs": 0}, "num_epochs must be an int of at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be an int of at least 1, got 0"),
        ({"async_steps_per_loop": 0}, "async_steps_per_loop must be an int of at least 1, got 0"),
        ({"invalid": "keep"}, "invalid must be 'reject' or 'drop', got 'keep'"),
    ],
)
def test_arguments_outside_their_rules_are_refused(
    arguments: dict[str, Any], message: str, log: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        trainer.train_offline(tmp_path / "run", agent_for_counting(), log, **arguments)
    assert not (tmp_path / "run").exists()


def test_other_settings_in_the_same_folder_are_refused(log: Path, tmp_path: Path) -> None:
    trainer.train_offline(tmp_path, agent_for_counting(), log, batch_size=30, save_policy=False)
    with pytest.raises(OptionError, match="batch_size must be 30 to go on with the training in"):
        trainer.train_offline(tmp_path, agent_for_counting(), log, batch_size=31)
    with pytest.raises(OptionError, match="agent must be 'CountingAgent'"):
        trainer.train_offline(tmp_path, Keeping(), log, batch_size=30)
    with pytest.raises(StoreNotFoundError):
        trainer.train_offline(tmp_path, agent_for_counting(), tmp_path / "nothing.zarr")


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1))
def test_a_permutation_sends_every_number_to_one_of_its_own(size: int, seed: int) -> None:
    sent = plan.permuted(np.arange(size), size, seed=seed)
    assert np.array_equal(np.sort(sent), np.arange(size))
    some = np.arange(size)[::-3]
    assert np.array_equal(plan.permuted(some, size, seed=seed), sent[some])


def test_permutations_are_even() -> None:
    size, seeds = 10, 4000
    places = np.zeros((size, size))
    for seed in range(seeds):
        places[np.arange(size), plan.permuted(np.arange(size), size, seed=seed)] += 1
    chi_squared = ((places - seeds / size) ** 2 / (seeds / size)).sum()
    assert chi_squared < 125  # 99.9 % of a chi-squared distribution with 81 degrees of freedom
