"""Trains a Q-network offline on a CartPole-v1 store, then lets it play greedily. Nothing is collected here.

    python examples/cartpole_offline.py runs/cartpole.zarr --plot runs/cartpole.png

Double Q-learning (van Hasselt et al., "Deep Reinforcement Learning with Double Q-learning", 2016) with a target network
that is a running average of the trained one; it is the steadier of the two, so it is also the one that plays.
Environments are made to evaluate only. What they return is shown; it is neither stored nor used to choose anything.
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

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

import diskbuf
from diskbuf.environments import suite_gym
from diskbuf.trajectories import Trajectory


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
    import tensorflow as tf

BATCH_SIZE = 512
GAMMA = 0.98
LEARNING_RATE = 3e-4
TARGET_STEP = 0.01  # how far the target network moves towards the trained one after each batch
BATCHES_PER_CALL = 100  # trained on before Python sees the loss
EPISODES = 20
EVALUATIONS = 10


class QLearner:
    """A Q-network, the target network that follows it, and the step that trains them.

    Args:
        rows: What they will be trained on, for its sizes and to bring observations to zero mean and unit variance.
        num_actions: Number of actions.
    """

    def __init__(self, rows: Trajectory, num_actions: int) -> None:
        self._network = _network(rows.observation, num_actions)
        self._target = _network(rows.observation, num_actions)
        self._target.set_weights(self._network.get_weights())
        self._optimizer = keras.optimizers.Adam(LEARNING_RATE)
        self._optimizer.build(self._network.trainable_variables)

    @tf.function
    def train(self, batches: Iterator[Any], count: tf.Tensor) -> tf.Tensor:
        """Trains on the next `count` batches and returns their mean loss."""
        total = 0.0
        for _ in tf.range(count):
            rows, _info = next(batches)
            total += self._train_batch(rows)
        return total / tf.cast(count, tf.float32)

    def _train_batch(self, rows: Trajectory) -> tf.Tensor:
        row = tf.nest.map_structure(lambda leaf: leaf[:, 0], rows)  # [B, 2] to [B]
        next_observation = rows.observation[:, 1]
        # The trained network chooses the next action, the target network says what it is worth.
        next_action = tf.argmax(self._network(next_observation), axis=-1)
        next_value = tf.gather(self._target(next_observation), next_action, batch_dims=1)
        wanted = row.reward + GAMMA * row.discount * next_value  # discount is 0 where the episode terminated
        # The action of a boundary row, between two episodes, was never played.
        weight = tf.where(row.is_boundary(), 0.0, 1.0)
        with tf.GradientTape() as tape:
            value = tf.gather(self._network(row.observation), row.action, batch_dims=1)
            error = tf.abs(wanted - value)
            huber = tf.where(error < 1.0, 0.5 * error**2, error - 0.5)
            loss = tf.reduce_sum(weight * huber) / tf.reduce_sum(weight)
        variables = self._network.trainable_variables
        self._optimizer.apply(tape.gradient(loss, variables), variables)
        for trained, target in zip(variables, self._target.trainable_variables, strict=True):
            target.assign_add(TARGET_STEP * (trained - target))
        return loss

    @tf.function
    def greedy(self, observation: tf.Tensor) -> tf.Tensor:
        """Returns the actions of the highest value, [B], for observations [B, N]."""
        return tf.argmax(self._target(observation), axis=-1)


def _network(observations: NDArray[Any], num_actions: int) -> keras.Model:
    flat = observations.reshape(-1, observations.shape[-1])
    return keras.Sequential(
        [
            keras.Input(flat.shape[1:]),
            keras.layers.Normalization(mean=flat.mean(axis=0), variance=flat.var(axis=0)),
            keras.layers.Dense(128, "relu"),
            keras.layers.Dense(128, "relu"),
            keras.layers.Dense(num_actions),
        ]
    )


def evaluate(learner: QLearner, *, seed: int) -> NDArray[np.float64]:
    """Plays `EPISODES` episodes side by side and returns what each earned."""
    with suite_gym.load("CartPole-v1", num_envs=EPISODES, seed=seed) as env:
        time_step = env.reset()
        returns, is_playing = np.zeros(EPISODES), np.ones(EPISODES, bool)
        while is_playing.any():
            time_step = env.step(learner.greedy(time_step.observation).numpy())
            returns += time_step.reward * is_playing
            is_playing &= ~time_step.is_last()
    return returns


def stored_returns(rows: Trajectory) -> NDArray[np.float64]:
    """Returns what each whole episode among [B, T] rows earned, [episodes]."""
    returns: list[float] = []
    for is_first, is_last, reward in zip(rows.is_first(), rows.is_last(), rows.reward, strict=True):
        before = np.concatenate([[0.0], np.cumsum(reward, dtype=np.float64)])  # earned in the lane before each row
        starts, ends = np.flatnonzero(is_first), np.flatnonzero(is_last)
        # Each end belongs to the last start before it; an episode that a kill cut off has a start and no end.
        start = np.searchsorted(starts, ends, side="right") - 1
        is_whole = start >= 0
        returns += list(before[ends[is_whole] + 1] - before[starts[start[is_whole]]])
    return np.array(returns)


def train(store: Path, *, num_iterations: int, seed: int) -> dict[str, Any]:
    """Trains on a store and evaluates on the way and at the end.

    Args:
        store: Path of the store.
        num_iterations: Batches to train on.
        seed: Of the network, the batches and the evaluation.

    Returns:
        What there is to report, in JSON's types.
    """
    keras.utils.set_random_seed(seed)
    losses: list[tuple[int, float]] = []
    returns: list[tuple[int, list[float]]] = []
    with diskbuf.open(store, seed=seed) as buffer:
        rows = buffer.gather_all()
        random_return = float(stored_returns(rows).mean())
        learner = QLearner(rows, num_actions=int(buffer.data_spec.action.maximum) + 1)
        dataset = buffer.as_dataset(sample_batch_size=BATCH_SIZE, num_steps=2, num_parallel_calls=2).prefetch(8)
        rows_per_second = reading_speed(dataset)

        batches = iter(dataset)
        started = time.perf_counter()
        with tqdm(desc="train", total=num_iterations, unit=" batches", mininterval=0.2) as bar:
            while bar.n < num_iterations:
                count = min(BATCHES_PER_CALL, num_iterations - bar.n)
                loss = float(learner.train(batches, tf.constant(count)))
                bar.update(count)
                losses.append((bar.n, loss))
                if bar.n * EVALUATIONS // num_iterations > len(returns):
                    returns.append((bar.n, evaluate(learner, seed=seed + len(returns)).tolist()))
                    bar.set_postfix({"loss": f"{loss:.2f}", "return": f"{np.mean(returns[-1][1]):.0f}"})
        training_seconds = time.perf_counter() - started
    greedy_return = float(np.mean(returns[-1][1]))  # the last evaluation, whichever was best
    return {
        "random_return": random_return,
        "greedy_return": greedy_return,
        "ratio": greedy_return / random_return,
        "read_rows_per_second": rows_per_second,
        "training_seconds": training_seconds,
        "losses": losses,
        "returns": returns,
    }


def reading_speed(dataset: tf.data.Dataset, num_batches: int = 200) -> float:
    """Reads some batches and does nothing with them; returns rows per second."""
    batches = iter(dataset)
    next(batches)  # the first one waits for the pipeline to start
    started = time.perf_counter()
    num_rows = sum(int(tf.size(next(batches)[1].ids)) for _ in range(num_batches))
    return num_rows / (time.perf_counter() - started)


def plot(report: dict[str, Any], file: Path) -> None:
    """Draws training loss and evaluation return over the batches trained on."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(8, 6.5), height_ratios=[2, 3], layout="constrained")
    figure.suptitle("CartPole-v1, trained offline on random experience", fontsize=13)
    blue, grey = "#2166ac", "#555555"

    top.plot(*zip(*report["losses"], strict=True), color=blue, linewidth=1.5)
    top.set(ylabel="Huber loss", ylim=(0, None))

    batches = [at for at, _ in report["returns"]]
    means = [np.mean(earned) for _, earned in report["returns"]]
    for at, earned in report["returns"]:
        label = "one episode" if at == batches[0] else None
        bottom.scatter([at] * len(earned), earned, s=16, color=blue, alpha=0.25, linewidths=0, label=label)
    bottom.plot(batches, means, "o-", color=blue, label=f"greedy policy, mean of {EPISODES} episodes")
    bottom.axhline(report["random_return"], color=grey, linestyle="--")
    text = f"random policy, as stored: {report['random_return']:.1f}"
    bottom.annotate(
        text,
        (1, report["random_return"]),
        (-4, 4),
        color=grey,
        ha="right",
        xycoords=bottom.get_yaxis_transform(),
        textcoords="offset points",
    )
    bottom.annotate(f"{means[-1]:.0f}", (batches[-1], means[-1]), (7, -4), color=blue, textcoords="offset points")
    bottom.set(xlabel=f"batches of {BATCH_SIZE} transitions", ylabel="return of an episode", ylim=(0, 525))
    bottom.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2, frameon=False)
    for axes in (top, bottom):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120)
    plt.close(figure)


def main() -> None:
    """Reads the command line, trains and reports."""
    parser = argparse.ArgumentParser(description="Train a Q-network offline on a CartPole-v1 store.")
    parser.add_argument("store", metavar="STORE", type=Path, help="path of the store")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw loss and return into this PNG")
    parser.add_argument("--report", metavar="FILE", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--num-iterations", type=int, default=4000, help="batches to train on (4000)")
    parser.add_argument("--seed", type=int, default=0, help="of network, batches and evaluation (0)")
    arguments = parser.parse_args()
    report = train(arguments.store, num_iterations=arguments.num_iterations, seed=arguments.seed)
    print(f"read           {report['read_rows_per_second']:,.0f} steps a second, in batches of {BATCH_SIZE} x 2")
    print(
        f"trained        {arguments.num_iterations:,} batches in {report['training_seconds']:.0f} s, with evaluations"
    )
    print(f"random return  {report['random_return']:.1f}, mean of the stored episodes")
    print(
        f"greedy return  {report['greedy_return']:.1f}, mean of {EPISODES} episodes: {report['ratio']:.1f} times random"
    )
    if arguments.plot is not None:
        plot(report, arguments.plot)
        print(f"figure         {arguments.plot}")
    if arguments.report is not None:
        arguments.report.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
