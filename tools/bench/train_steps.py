"""A DQN train step fed from a store on disk, beside the same step fed from one constant batch."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf
from measure import MICROSECONDS, Record, Target, against, interleave

import diskbuf
from diskbuf.agents import DqnAgent
from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import suite_gym
from diskbuf.networks import QNetwork

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
    constant = tf.data.Dataset.from_tensors(next(iter(stored))).repeat()
    held = next(iter(stored))
    contenders = {
        "disk": _steps(agent, iter(stored), size.steps),
        "constant dataset": _steps(agent, iter(constant), size.steps),
        "constant batch": _steps(agent, _always(held), size.steps),
    }
    for contender in contenders.values():
        contender()
    figures = interleave(contenders, rounds=size.rounds)
    what = f"DQN train step, {batch} transitions, from a store being written"
    peers = {
        "constant batch": (f"train_{batch}_vs_batch", "from one constant batch", Target(at_most=1.1)),
        "constant dataset": (f"train_{batch}_vs_dataset", "from a dataset of one constant batch", None),
    }
    return [
        against(
            name,
            what,
            ours=figures["disk"],
            peer=peer,
            peer_figures=figures[contender],
            unit=MICROSECONDS,
            target=target,
        )
        for contender, (name, peer, target) in peers.items()
    ]


def _always(element: Any) -> Any:
    while True:
        yield element


def _steps(agent: DqnAgent, batches: Any, steps: int) -> Callable[[], float]:
    def train() -> float:
        start = time.perf_counter()
        for _ in range(steps):
            experience, _ = next(batches)
            loss = agent.train(experience).loss
        float(loss)
        return (time.perf_counter() - start) / steps * 1e6

    return train
