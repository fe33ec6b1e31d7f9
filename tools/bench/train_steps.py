"""A DQN train step fed from a store on disk, beside the same step fed from one constant batch."""

import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from measure import MICROSECONDS, Record, Target, against, interleave

import diskbuf
from diskbuf.agents import DqnAgent
from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import suite_gym
from diskbuf.networks import QNetwork
from diskbuf.training.run import compiled_train_steps

_ENVIRONMENT = "CartPole-v1"
_LANES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        collected: Steps in the store, all lanes together.
        batches: Transitions of a train step.
        steps: Train steps of a round.
        rounds: Rounds.
    """

    collected: int = 100_000
    batches: tuple[int, ...] = (64, 512)
    steps: int = 500
    rounds: int = 11


QUICK = Size(collected=800, batches=(64,), steps=5, rounds=2)


def measure_train(folder: Path, size: Size) -> list[Record]:
    """One train step, by where its batch comes from."""
    import keras

    path = folder / "store.zarr"
    with suite_gym.load(_ENVIRONMENT, _LANES, seed=0) as environment:
        agent = DqnAgent(
            environment.time_step_spec(),
            environment.action_spec(),
            QNetwork(environment.time_step_spec().observation, environment.action_spec(), fc_layer_params=(128, 128)),
            keras.optimizers.Adam(1e-3),
            gamma=0.99,
            seed=0,
        )
        with diskbuf.UniformReplayBuffer(agent.collect_data_spec, _LANES, size.collected, path=path) as buffer:
            DynamicStepDriver(environment, agent.collect_policy, [buffer.add_batch], num_steps=size.collected).run()
            records = []
            for batch in size.batches:
                records += _measured(agent, buffer, batch, size)
    return records


def _measured(agent: DqnAgent, buffer: diskbuf.UniformReplayBuffer, batch: int, size: Size) -> list[Record]:
    stored = buffer.as_dataset(batch, num_steps=2, seed=0).prefetch(8)
    held = next(iter(stored))
    constant = tf.data.Dataset.from_tensors(held).repeat()
    many = compiled_train_steps(agent)

    def loop(batches: Any) -> Callable[[], float]:
        return lambda: float(many(batches, np.int64(size.steps)).loss)

    def one_by_one(batches: Any) -> Callable[[], float]:
        def train() -> float:
            for _ in range(size.steps):
                loss = agent.train(next(batches)[0]).loss
            return float(loss)

        return train

    @tf.function(autograph=False)
    def repeat(experience: Any, count: Any) -> Any:
        return tf.while_loop(
            lambda step, _: step < count,
            lambda step, _: (step + 1, agent.train(experience).loss),
            (tf.constant(0, tf.int64), tf.constant(0.0)),
        )[1]

    calls: dict[str, Callable[[], float]] = {
        "loop disk": loop(iter(stored)),
        "loop dataset": loop(iter(constant)),
        "loop batch": lambda: float(repeat(held[0], np.int64(size.steps))),
        "single disk": one_by_one(iter(stored)),
        "single dataset": one_by_one(iter(constant)),
        "single batch": one_by_one(itertools.repeat(held)),
    }
    for call in calls.values():
        call()  # compiles
    figures = interleave({name: _timed(call, size.steps) for name, call in calls.items()}, rounds=size.rounds)
    peers = {"batch": "from one constant batch", "dataset": "from a dataset of one constant batch"}
    hows = {"loop": "many to a call", "single": "one to a call"}
    return [
        against(
            f"train_{batch}_{how}_vs_{peer}",
            f"DQN train step, {batch} transitions, {text}, from a store being written",
            ours=figures[f"{how} disk"],
            peer=label,
            peer_figures=figures[f"{how} {peer}"],
            unit=MICROSECONDS,
            target=Target(at_most=1.1) if peer == "batch" else None,
        )
        for how, text in hows.items()
        for peer, label in peers.items()
    ]


def _timed(call: Callable[[], float], steps: int) -> Callable[[], float]:
    def microseconds() -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) / steps * 1e6

    return microseconds
