"""Trains a DQN agent offline on a CartPole-v1 store, then lets it play greedily. Nothing is collected here.

    python examples/cartpole_offline.py runs/cartpole.zarr --plot runs/cartpole.png

Killed and run again, it goes on: its checkpoints are beside the store. Environments are made to evaluate only. What
they return is shown; it is neither stored nor used to choose anything.
"""

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # does nothing for networks this small, and logs that it is on
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # for networks this small the CPU is faster

import pyarrow.compute as pc

import diskbuf
from diskbuf.agents import DdqnAgent
from diskbuf.environments import suite_gym
from diskbuf.networks import QNetwork
from diskbuf.training import evaluate, train_offline


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    """Hides what TensorFlow's libraries write while they load, before they heed any setting. Exceptions still show."""
    stderr = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


with _no_stderr():
    import keras

BATCH_SIZE = 512
EPISODES = 20
EVALUATIONS = 10
LOSSES = 40  # points of the curve


def train(store: Path, folder: Path, *, num_iterations: int, seed: int) -> dict[str, Any]:
    """Trains on a store, evaluates on the way, and lets the policy play at the end.

    Args:
        store: Path of the store.
        folder: Where checkpoints and summaries go; it is made, or gone on with.
        num_iterations: Batches to train on, those before a restart included.
        seed: Of the network, the batches and the evaluation.

    Returns:
        What there is to report, in JSON's types.
    """
    with diskbuf.open(store) as buffer, suite_gym.load("CartPole-v1", num_envs=EPISODES, seed=seed) as environment:
        agent = DdqnAgent(
            environment.time_step_spec(),
            environment.action_spec(),
            QNetwork(
                environment.time_step_spec().observation,
                environment.action_spec(),
                fc_layer_params=(128, 128),
                # Position, velocity, angle, angular velocity: to about the same size, and less than 1 in the store, for
                # the network to be smooth where the random policy hasn't been.
                preprocessing_layers=keras.layers.Normalization(mean=[0.0] * 4, variance=[0.2, 5.0, 0.2, 10.0]),
                seed=seed,
            ),
            keras.optimizers.Adam(3e-4),
            target_update_tau=0.01,
            gamma=0.98,
            seed=seed,
        )
        started = time.perf_counter()
        result = train_offline(
            folder,
            agent,
            buffer,
            num_iterations,
            sample_batch_size=BATCH_SIZE,
            seed=seed,
            eval_environment=environment,
            num_eval_episodes=EPISODES,
            eval_interval=max(1, num_iterations // EVALUATIONS),
            summary_interval=max(1, num_iterations // LOSSES),
            train_steps_per_call=100,
            progress=True,
        )
        seconds = time.perf_counter() - started
        random_return = stored_return(buffer)
        returns = evaluate(agent.policy, environment, num_episodes=EPISODES)
    return {
        "random_return": random_return,
        "greedy_return": float(returns.mean()),
        "greedy_returns": returns.tolist(),
        "ratio": float(returns.mean()) / random_return,
        "train_step": result.train_step,
        "seconds": seconds,
        "losses": result.losses,
        "returns": result.returns,
    }


def stored_return(buffer: diskbuf.UniformReplayBuffer) -> float:
    """Returns what the whole episodes of a store earned on average; one that a kill cut off isn't whole."""
    episodes = diskbuf.episodes(buffer)
    is_whole = pc.field("is_whole") & pc.field("end").isin(["terminated", "truncated"])
    return float(pc.mean(episodes.filter(is_whole)["return"]).as_py())


def plot(report: dict[str, Any], file: Path) -> None:
    """Draws training loss and evaluation return over the train steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(8, 6.5), height_ratios=[2, 3], layout="constrained")
    figure.suptitle("CartPole-v1, trained offline on random experience", fontsize=13)
    blue, grey = "#2166ac", "#555555"

    top.plot(*zip(*report["losses"], strict=True), color=blue, linewidth=1.5)
    top.set(ylabel="Huber loss", ylim=(0, None))

    steps, means = zip(*report["returns"], strict=True)
    bottom.plot(steps, means, "o-", color=blue, label=f"greedy policy, mean of {EPISODES} episodes")
    earned = report["greedy_returns"]
    label = "an episode of the trained policy"
    bottom.scatter(
        [report["train_step"]] * len(earned), earned, s=16, color=blue, alpha=0.25, linewidths=0, label=label
    )
    bottom.axhline(report["random_return"], color=grey, linestyle="--")
    bottom.annotate(
        f"random policy, as stored: {report['random_return']:.1f}",
        (1, report["random_return"]),
        (-4, 4),
        color=grey,
        ha="right",
        xycoords=bottom.get_yaxis_transform(),
        textcoords="offset points",
    )
    bottom.annotate(f"{means[-1]:.0f}", (steps[-1], means[-1]), (7, -4), color=blue, textcoords="offset points")
    bottom.set(xlabel=f"train steps, each on {BATCH_SIZE} transitions", ylabel="return of an episode", ylim=(0, 525))
    bottom.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> None:
    """Reads the command line, trains and reports."""
    parser = argparse.ArgumentParser(description="Train a DQN agent offline on a CartPole-v1 store.")
    parser.add_argument("store", metavar="STORE", type=Path, help="path of the store")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where checkpoints and summaries go; it is made, or gone on with (beside the store, NAME_offline)",
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw loss and return into this PNG")
    parser.add_argument("--report", metavar="FILE", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--num-iterations", type=int, default=4000, help="batches to train on in all (4000)")
    parser.add_argument("--seed", type=int, default=0, help="of network, batches and evaluation (0)")
    options = parser.parse_args()
    folder = options.folder or options.store.with_name(f"{options.store.stem}_offline")
    report = train(options.store, folder, num_iterations=options.num_iterations, seed=options.seed)
    print(f"trained        {report['train_step']:,} batches, this time {report['seconds']:.0f} s with evaluations")
    print(f"random return  {report['random_return']:.1f}, mean of the stored episodes")
    print(
        f"greedy return  {report['greedy_return']:.1f}, mean of {EPISODES} episodes: {report['ratio']:.1f} times random"
    )
    print(f"checkpoints    {folder}")
    if options.plot is not None:
        plot(report, options.plot)
        print(f"figure         {options.plot}")
    if options.report is not None:
        options.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
