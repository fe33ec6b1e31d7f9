"""Trains bandit agents on the wheel and on a linear bandit, and draws what each of them has regretted.

    python examples/bandit_wheel.py runs/bandits

Each training has a folder of its own with its log (`log.zarr`), checkpoints, policies and summaries for TensorBoard;
`regret.png` shows them side by side. Killed and run again, it goes on.
"""

import argparse
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # for networks this small the CPU is faster

import keras
import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

import diskbuf
from diskbuf.bandits import agents, environments, trainer
from diskbuf.bandits.environments import LinearNormalReward
from diskbuf.networks import QNetwork

BATCH_SIZE = 8
STEPS_PER_LOOP = 10
ARMS, FEATURES = 5, 10  # of the linear bandit


def wheel(seed: int) -> environments.BanditEnvironment:
    """The wheel, of which a quarter lies inside delta and pays best for the safe arm."""
    return environments.WheelEnvironment(
        delta=0.5,
        mu_base=[1.2, 1.0, 1.0, 1.0, 1.0],
        std_base=[0.1] * 5,
        mu_high=3.0,
        std_high=0.1,
        batch_size=BATCH_SIZE,
        seed=seed,
    )


def linear(seed: int) -> environments.BanditEnvironment:
    """Rewards that are linear in the context, other weights for each arm."""
    weights = np.random.default_rng(seed).normal(size=(ARMS, FEATURES)) / np.sqrt(FEATURES)

    def contexts(rng: np.random.Generator) -> NDArray[np.float32]:
        return rng.normal(size=(BATCH_SIZE, FEATURES)).astype(np.float32)

    rewards = [LinearNormalReward(theta, 0.1) for theta in weights]
    return environments.StationaryStochasticEnvironment(contexts, rewards, BATCH_SIZE, seed=seed)


def agents_for(environment: environments.BanditEnvironment, seed: int) -> dict[str, Callable[[], Any]]:
    """What is compared, by name, made when its turn comes."""
    specs = environment.time_step_spec(), environment.action_spec()
    linear_options: Any = {"add_bias": True, "alpha": 0.3, "seed": seed}

    def neural(kind: Any, **arguments: Any) -> Any:
        network = QNetwork(specs[0].observation, specs[1], fc_layer_params=(64, 64), seed=seed)
        return kind(*specs, network, keras.optimizers.Adam(3e-3), seed=seed, **arguments)

    def dropout() -> Any:
        return agents.DropoutThompsonSamplingAgent(
            *specs, keras.optimizers.Adam(3e-3), dropout_rate=0.1, network_layers=(64, 64), seed=seed
        )

    def neural_linear() -> Any:
        encoder = keras.Sequential(
            [keras.Input(specs[0].observation.shape), keras.layers.Dense(64, "relu"), keras.layers.Dense(16, "relu")]
        )
        return agents.NeuralLinUCBAgent(
            *specs,
            encoder,
            encoding_network_num_train_steps=100,
            encoding_dim=16,
            optimizer=keras.optimizers.Adam(3e-3),
            alpha=0.3,
            epsilon_greedy=0.1,
            seed=seed,
        )

    return {
        "linear UCB": lambda: agents.LinearUCBAgent(*specs, **linear_options),
        "linear Thompson sampling": lambda: agents.LinearThompsonSamplingAgent(*specs, **linear_options),
        "epsilon-greedy": lambda: neural(agents.NeuralEpsilonGreedyAgent, epsilon=0.05),
        "greedy": lambda: neural(agents.GreedyRewardPredictionAgent),
        "Boltzmann": lambda: neural(agents.BoltzmannAgent, temperature=0.1),
        "dropout Thompson sampling": dropout,
        "neural linear UCB": neural_linear,
        "Exp3 mixture of UCB and Thompson": lambda: agents.Exp3MixtureAgent(
            *specs,
            [
                agents.LinearUCBAgent(*specs, **linear_options),
                agents.LinearThompsonSamplingAgent(*specs, **linear_options),
            ],
            seed=seed,
        ),
    }


def regret(folder: Path, environment: environments.BanditEnvironment) -> NDArray[np.float64]:
    """Returns [rounds] what had been regretted by each round, mean of the lanes, from the log of a training."""
    with diskbuf.open(folder / "log.zarr", history=True) as log:
        rows = log.gather_all()  # [lanes, rounds, ...]
    best = [environment.optimal_reward(observation) for observation in rows.observation]
    return np.cumsum((np.stack(best) - rows.reward).mean(axis=0), dtype=np.float64)


def plot(curves: dict[str, dict[str, NDArray[np.float64]]], file: Path) -> None:
    """Draws regret over rounds, one picture for each environment."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(1, len(curves), figsize=(12, 5), layout="constrained")
    for axes, (name, by_agent) in zip(places, curves.items(), strict=True):
        for agent, curve in by_agent.items():
            axes.plot(np.arange(1, len(curve) + 1), curve, label=f"{agent}: {curve[-1]:.0f}", linewidth=1.5)
        axes.set(title=name, xlabel=f"rounds, in each of {BATCH_SIZE} lanes", ylabel="cumulative regret of a lane")
        axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> None:
    """Reads the command line, trains every agent in both environments, and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where trainings and the picture go; it is made, or gone on with")
    parser.add_argument("--loops", type=int, default=100, help=f"of {STEPS_PER_LOOP} rounds (default %(default)s)")
    parser.add_argument("--async-steps", type=int, default=1, help="batches to a loop (default %(default)s)")
    parser.add_argument("--short", action="store_true", help="3 loops, to see it work")
    parser.add_argument("--seed", type=int, default=0, help="of everything (default 0)")
    options = parser.parse_args()
    loops = 3 if options.short else options.loops
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # it tells of every policy that is saved

    curves: dict[str, dict[str, NDArray[np.float64]]] = {}
    for make in (wheel, linear):
        curves[make.__name__] = {}
        for name, make_agent in tqdm(agents_for(make(options.seed), options.seed).items(), desc=make.__name__):
            environment = make(options.seed)  # each agent meets the same contexts
            folder = options.folder / make.__name__ / name.replace(" ", "_")
            trainer.train(
                folder,
                make_agent(),
                environment,
                loops,
                STEPS_PER_LOOP,
                options.async_steps,
                resume_training_loops=True,
            )
            curves[make.__name__][name] = regret(folder, environment)
    plot(curves, options.folder / "regret.png")
    for bandit, by_agent in curves.items():
        for name, curve in sorted(by_agent.items(), key=lambda item: item[1][-1]):
            print(f"{bandit}: {name} regretted {curve[-1]:.1f} in {len(curve)} rounds")
    print(f"drawn in {options.folder / 'regret.png'}")


if __name__ == "__main__":
    main()
