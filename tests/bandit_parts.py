"""A small bandit for tests: an environment, and an agent whose every action depends on all that it learnt before."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.agents import LossInfo
from diskbuf.bandits import trainer
from diskbuf.bandits.agents import BanditAgent
from diskbuf.bandits.agents.array_state import array_state
from diskbuf.bandits.environments import BanditEnvironment
from diskbuf.bandits.policies import BanditPolicy
from diskbuf.specs import ArraySpec

LANES, ARMS = 4, 3


class NumberedEnvironment(BanditEnvironment):
    """Contexts that count the steps; the reward is that count, the arm, and noise."""

    _changing = ("count",)

    def __init__(self, *, batch_size: int = LANES, seed: int | None = 1) -> None:
        super().__init__(ArraySpec((2,), np.float32), ARMS, batch_size=batch_size, seed=seed)
        self.count = 0

    def _observe(self) -> npt.NDArray[Any]:
        self.count += 1
        lanes = np.arange(self.batch_size)
        return np.stack([np.full(self.batch_size, self.count), lanes], axis=1).astype(np.float32)

    def _apply_action(self, action: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return (action + self._rng.random(self.batch_size)).astype(np.float32)


class LearntPolicy(BanditPolicy):
    """Probabilities that follow the rewards seen so far."""

    sums: npt.NDArray[Any] = np.zeros(ARMS)

    def _probabilities(self, context: Any, mask: Any) -> npt.NDArray[np.float64]:
        chances = 1 + self.sums % 1
        return np.tile(chances / chances.sum(), (len(context), 1))

    def _tensor_probabilities(self, context: Any, mask: Any) -> Any:
        import tensorflow as tf

        chances = tf.constant(1 + self.sums % 1)
        return tf.tile((chances / tf.reduce_sum(chances))[None], [tf.shape(context)[0], 1])


class CountingAgent(BanditAgent):
    """Learns sums of rewards, in an order that matters, and how often it saw each context."""

    def __init__(self, time_step_spec: Any, action_spec: Any, *, seed: int = 5, most: int = 10_000) -> None:
        self._begin_module("counting")
        policy = LearntPolicy(time_step_spec, action_spec, seed=seed)
        self._begin(policy)
        self._state = array_state({"sums": np.zeros(ARMS), "seen": np.zeros(most, np.int64)}, self._follow)
        self._follow()

    @property
    def seen(self) -> npt.NDArray[np.int64]:
        return self._state.values["seen"]

    @property
    def sums(self) -> npt.NDArray[np.float64]:
        return self._state.values["sums"]

    def _train(self, observation: Any, index: Any, reward: Any, weights: Any, propensity: Any) -> LossInfo:
        self._state.values["sums"] = self.sums * 0.9 + np.bincount(index, reward, minlength=ARMS)
        np.add.at(self.seen, observation[:, 0].astype(int), 1)
        self._follow()
        return LossInfo(np.float32(reward.mean()), ())

    def _follow(self) -> None:
        self.policy.sums = self.sums  # type: ignore[attr-defined]


def train_counting(root: Path, loops: int, **arguments: Any) -> CountingAgent:
    """Trains one anew, or goes on."""
    environment = NumberedEnvironment()
    agent = CountingAgent(environment.time_step_spec(), environment.action_spec())
    trainer.train(root, agent, environment, loops, 5, save_policy=False, **arguments)
    return agent


def _die_at(name: str, call: int) -> None:
    """Kills this process when the agent or the trainer is about to do something for the `call`-th time."""
    owner: Any = {"train": CountingAgent, "_observe": NumberedEnvironment, "save": trainer._Saver}[name]
    plain, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **more)

    setattr(owner, name, counted)


if __name__ == "__main__":  # ROOT LOOPS [NAME CALL]: a process to be killed
    if len(sys.argv) > 3:
        _die_at(sys.argv[3], int(sys.argv[4]))
    train_counting(Path(sys.argv[1]), int(sys.argv[2]), async_steps_per_loop=2, resume_training_loops=True)
