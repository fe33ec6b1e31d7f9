"""Bandit environments, agents and the trainer together: what is logged how often, and that agents learn."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import diskbuf
from diskbuf.bandits import trainer
from diskbuf.bandits.agents import (
    Exp3MixtureAgent,
    LinearThompsonSamplingAgent,
    LinearUCBAgent,
    NeuralEpsilonGreedyAgent,
    StaticMixtureAgent,
)
from diskbuf.bandits.environments import (
    BanditEnvironment,
    LinearNormalReward,
    StationaryStochasticEnvironment,
    WheelEnvironment,
)
from diskbuf.bandits.metrics import CumulativeRegretMetric, RegretMetric, SuboptimalArmsMetric
from diskbuf.networks import QNetwork


def wheel(seed: int = 0) -> WheelEnvironment:
    return WheelEnvironment(0.5, [1.2, 1.0, 1.0, 1.0, 1.0], [0.1] * 5, 3.0, 0.1, batch_size=8, seed=seed)


def stationary(seed: int = 0) -> StationaryStochasticEnvironment:
    weights = np.random.default_rng(seed).normal(size=(5, 10))

    def contexts(rng: np.random.Generator) -> NDArray[np.float32]:
        return rng.normal(size=(8, 10)).astype(np.float32)

    return StationaryStochasticEnvironment(contexts, [LinearNormalReward(w, 0.1) for w in weights], 8, seed=seed)


def linear_ucb(environment: BanditEnvironment, seed: int = 0) -> Any:
    return LinearUCBAgent(environment.time_step_spec(), environment.action_spec(), add_bias=True, seed=seed)


def linear_ts(environment: BanditEnvironment, seed: int = 0) -> Any:
    return LinearThompsonSamplingAgent(
        environment.time_step_spec(), environment.action_spec(), add_bias=True, seed=seed
    )


def epsilon_greedy(environment: BanditEnvironment, seed: int = 0, epsilon: float = 0.05) -> Any:
    import keras

    specs = environment.time_step_spec(), environment.action_spec()
    network = QNetwork(specs[0].observation, specs[1], fc_layer_params=(32, 32), seed=seed)
    return NeuralEpsilonGreedyAgent(*specs, network, keras.optimizers.Adam(1e-2), epsilon=epsilon, seed=seed)


def mixture(environment: BanditEnvironment, seed: int = 0) -> Any:
    specs = environment.time_step_spec(), environment.action_spec()
    parts = [linear_ucb(environment), linear_ts(environment), epsilon_greedy(environment)]
    return StaticMixtureAgent(*specs, parts, mixture_weights=[0.2, 0.3, 0.5], seed=seed)


def exp3_mixture(environment: BanditEnvironment, seed: int = 0) -> Any:
    specs = environment.time_step_spec(), environment.action_spec()
    return Exp3MixtureAgent(*specs, [linear_ucb(environment), linear_ts(environment)], seed=seed)


PAIRS = [
    (stationary, linear_ucb),
    (stationary, linear_ts),
    (stationary, epsilon_greedy),
    (wheel, linear_ucb),
    (wheel, linear_ts),
    (wheel, epsilon_greedy),
    (wheel, mixture),
    (wheel, exp3_mixture),
]


def regrets(root: Path, environment: BanditEnvironment) -> NDArray[np.float64]:
    """[lanes, rounds] of a training's log."""
    with diskbuf.open(root / "log.zarr", history=True) as log:
        rows = log.gather_all()
    best = np.stack([environment.optimal_reward(observation) for observation in rows.observation])
    return np.asarray(best - rows.reward, np.float64)


@pytest.mark.parametrize("runs", [None, 4])
@pytest.mark.parametrize(("make", "make_agent"), PAIRS, ids=lambda function: function.__name__)
def test_each_pair_logs_regret_suboptimal_arms_and_loss_as_often_as_promised(
    make: Callable[[], Any],
    make_agent: Callable[[Any], Any],
    runs: int | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "diskbuf.metrics")
    environment = make()
    metrics = [
        RegretMetric(environment.optimal_reward),
        SuboptimalArmsMetric(environment.optimal_action),
        CumulativeRegretMetric(environment.optimal_reward),
    ]
    agent = make_agent(environment)
    trainer.train(tmp_path, agent, environment, 3, 2, runs, metrics, save_policy=False)
    text = "\n".join(record.getMessage() for record in caplog.records if record.name == "diskbuf.metrics")
    for name in ("RegretMetric", "SuboptimalArmsMetric", "loss"):
        assert text.count(f"] {name} = ") == 3 * (runs or 1)
    found = regrets(tmp_path, environment)
    assert found.shape == (8, 6 * (runs or 1))
    assert metrics[2].result() == pytest.approx(found.sum(), rel=1e-4)
    assert metrics[0].result() == pytest.approx(found[:, -1].mean(), rel=1e-4)


@pytest.mark.parametrize(("make", "make_agent"), [(wheel, linear_ts), (wheel, mixture)], ids=lambda f: f.__name__)
def test_a_training_that_is_gone_on_with_comes_to_the_same_rows(
    make: Callable[[], Any], make_agent: Callable[[Any], Any], tmp_path: Path
) -> None:
    for loops in (2, 5):
        environment = make()
        trainer.train(tmp_path / "twice", make_agent(environment), environment, loops, 3, 2, resume_training_loops=True)
    environment = make()
    trainer.train(tmp_path / "once", make_agent(environment), environment, 5, 3, 2)
    logs = []
    for name in ("twice", "once"):
        with diskbuf.open(tmp_path / name / "log.zarr", history=True) as log:
            logs.append(log.gather_all())
    for name in ("observation", "action", "reward"):
        assert np.array_equal(getattr(logs[0], name), getattr(logs[1], name)), name


def test_linear_ucb_learns_a_linear_bandit(tmp_path: Path) -> None:
    environment = stationary()
    trainer.train(tmp_path, linear_ucb(environment), environment, 125, 5, save_policy=False)
    found = regrets(tmp_path, environment).mean(axis=0)
    assert found.size * 8 == 5_000
    tenth = found.size // 10
    assert found[-tenth:].mean() < found[:tenth].mean() / 10


def test_linear_thompson_sampling_and_epsilon_greedy_beat_the_uniform_policy_on_the_wheel(tmp_path: Path) -> None:
    last: dict[str, list[float]] = {"ts": [], "epsilon": [], "uniform": []}
    for seed in range(5):
        for name, make_agent, loops in (
            ("ts", linear_ts, 60),
            ("epsilon", epsilon_greedy, 120),
            ("uniform", lambda env, seed: epsilon_greedy(env, seed, epsilon=1.0), 10),
        ):
            environment = wheel(seed)
            root = tmp_path / f"{name}-{seed}"
            trainer.train(root, make_agent(environment, seed), environment, loops, 5, save_policy=False)
            found = regrets(root, environment).mean(axis=0)
            last[name].append(float(found[-len(found) // 4 :].mean()))
    uniform = np.mean(last["uniform"])
    assert uniform == pytest.approx(1.2, abs=0.1)
    assert max(last["ts"]) < 0.1 * uniform
    assert max(last["epsilon"]) < 0.2 * uniform
