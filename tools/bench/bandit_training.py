"""The bandit trainer with its rows on disk, beside TF-Agents' with its rows in memory: linear UCB on the wheel.

Runs where TF-Agents is installed: in the environment that `make peers` makes.
"""

import dataclasses
import itertools
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf
from measure import STEPS_PER_SECOND, Record, Target, against, interleave
from tf_agents.bandits.agents import lin_ucb_agent
from tf_agents.bandits.agents.examples.v2 import trainer as their_trainer
from tf_agents.bandits.environments import wheel_py_environment
from tf_agents.environments import tf_py_environment

from diskbuf.bandits import trainer
from diskbuf.bandits.agents import LinearUCBAgent
from diskbuf.bandits.environments import WheelEnvironment

_WHEEL = {
    "delta": 0.5,
    "mu_base": [0.05, 0.01, 0.011, 0.009, 0.012],
    "std_base": [0.001] * 5,
    "mu_high": 0.5,
    "std_high": 0.001,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        lanes: Batch sizes.
        steps: Steps of a loop.
        few: Loops that don't count, in which everything is compiled.
        loops: Loops that count, for us.
        peer_loops: The same for TF-Agents.
        rounds: Rounds.
    """

    lanes: tuple[int, ...] = (8, 512)
    steps: int = 100
    few: int = 2
    loops: int = 100
    peer_loops: int = 8
    rounds: int = 3


QUICK = Size(lanes=(8,), steps=2, few=1, loops=2, peer_loops=2, rounds=1)


def measure_bandits(folder: Path, size: Size) -> list[Record]:
    """Rows of all lanes per second while a training goes on, with its checkpoints, policies and summaries."""
    records = []
    for lanes in size.lanes:
        figures = interleave(
            {
                "ours": _rate(_ours, folder, lanes, size, size.loops),
                "theirs": _rate(_theirs, folder, lanes, size, size.peer_loops),
            },
            rounds=size.rounds,
        )
        records.append(
            against(
                f"bandits_{lanes}",
                f"linear UCB on the wheel, {lanes} lanes, {size.steps} steps a loop, rows on disk",
                ours=figures["ours"],
                peer="TF-Agents' trainer, rows in memory",
                peer_figures=figures["theirs"],
                unit=STEPS_PER_SECOND,
                target=Target(at_least=3 if lanes < 100 else 2),
            )
        )
    return records


def _rate(
    train: Callable[[Path, int, int, int], list[float]], folder: Path, lanes: int, size: Size, loops: int
) -> Callable[[], float]:
    names = itertools.count()

    def measure() -> float:
        root = folder / f"{train.__name__}-{next(names)}"
        times = train(root, lanes, size.steps, size.few + loops)
        shutil.rmtree(root)
        skipped = size.few * size.steps
        return lanes * (len(times) - skipped - 1) / (times[-1] - times[skipped])

    return measure


class _OurWheel(WheelEnvironment):
    """Notes when each context was drawn."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(**_WHEEL, batch_size=batch_size, seed=0)
        self.times: list[float] = []

    def _observe(self) -> Any:
        self.times.append(time.perf_counter())
        return super()._observe()


class _TheirWheel(wheel_py_environment.WheelPyEnvironment):  # type: ignore[misc]  # ships no types
    """The same."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(**_WHEEL, batch_size=batch_size)
        self.times: list[float] = []

    def _observe(self) -> Any:
        self.times.append(time.perf_counter())
        return super()._observe()


def _ours(root: Path, lanes: int, steps: int, loops: int) -> list[float]:
    environment = _OurWheel(lanes)
    agent = LinearUCBAgent(environment.time_step_spec(), environment.action_spec())
    trainer.train(root, agent, environment, loops, steps)
    return environment.times


def _theirs(root: Path, lanes: int, steps: int, loops: int) -> list[float]:
    wheel = _TheirWheel(lanes)
    environment = tf_py_environment.TFPyEnvironment(wheel)
    agent = lin_ucb_agent.LinearUCBAgent(environment.time_step_spec(), environment.action_spec(), dtype=tf.float32)
    their_trainer.train(str(root), agent, environment, loops, steps)
    return wheel.times
