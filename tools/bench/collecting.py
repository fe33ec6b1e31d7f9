"""Drivers that collect CartPole: into a store on disk, into nothing, and TF-Agents' into its buffer in memory.

Runs where TF-Agents is installed: in the environment that `make peers` makes.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf
from measure import STEPS_PER_SECOND, Record, Target, against, interleave
from tf_agents.drivers import dynamic_step_driver
from tf_agents.environments import batched_py_environment, py_environment, suite_gym, tf_py_environment
from tf_agents.policies import random_tf_policy
from tf_agents.replay_buffers import tf_uniform_replay_buffer
from tf_agents.specs import array_spec
from tf_agents.trajectories import time_step as ts

import diskbuf
from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import suite_gym as gymnasium_suite
from diskbuf.policies import RandomPolicy

_ENVIRONMENT = "CartPole-v1"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        num_envs: Lanes.
        steps: Steps of a round, all lanes together.
        peer_steps: The same for TF-Agents.
        rounds: Rounds.
        max_length: Ids in the ring.
    """

    num_envs: int = 64
    steps: int = 64_000
    peer_steps: int = 12_800
    rounds: int = 9
    max_length: int = 10_000


QUICK = Size(steps=640, peer_steps=64, rounds=2, max_length=100)


def measure_collect(folder: Path, size: Size) -> list[Record]:
    """Our driver into a store, beside the same without a buffer and TF-Agents' into its own buffer.

    Twice: with Gymnasium's lanes one after the other, where stepping them takes most of the time, and with CartPole's
    own vectorized version, where drivers and buffers do.
    """
    return _measured(folder / "sync", size, "sync") + _measured(folder / "vector", size, "vector_entry_point")


def _measured(folder: Path, size: Size, vectorization: str) -> list[Record]:
    environments = [
        gymnasium_suite.load(_ENVIRONMENT, size.num_envs, seed=0, vectorization=vectorization) for _ in range(3)
    ]
    policy = RandomPolicy(environments[0].time_step_spec(), environments[0].action_spec(), seed=0)
    with (
        diskbuf.UniformReplayBuffer(policy.trajectory_spec, size.num_envs, size.max_length, path=folder) as buffer,
        environments[0] as stored,
        environments[1] as seen_by_nobody,
        environments[2] as shared,
    ):
        contenders: dict[str, Callable[[], float]] = {
            "ours": _ours(stored, policy, [buffer.add_batch], size.steps),
            "no buffer": _ours(seen_by_nobody, policy, [], size.steps),
            "their driver": _theirs(_AsPyEnvironment(shared), size),
        }
        if vectorization == "sync":
            lanes = [suite_gym.load(_ENVIRONMENT) for _ in range(size.num_envs)]
            contenders["their environments"] = _theirs(
                batched_py_environment.BatchedPyEnvironment(lanes, multithreading=False), size
            )
        for contender in contenders.values():
            contender()  # compiles what there is to compile, and fills pages
        figures = interleave(contenders, rounds=size.rounds)
    what = f"collect {_ENVIRONMENT}, {size.num_envs} lanes ({vectorization}), into a store on disk"
    peers = {
        "no buffer": ("no_buffer", "the same without a buffer", Target(at_least=0.8)),
        "their driver": ("driver", "TF-Agents' driver and buffer, our environment", Target(at_least=5)),
        "their environments": ("peer", "TF-Agents' driver, buffer and environments", Target(at_least=5)),
    }
    return [
        against(
            f"collect_{vectorization}_vs_{name}",
            what,
            ours=figures["ours"],
            peer=peer,
            peer_figures=figures[contender],
            unit=STEPS_PER_SECOND,
            target=target,
        )
        for contender, (name, peer, target) in peers.items()
        if contender in figures
    ]


def _ours(environment: Any, policy: RandomPolicy, observers: list[Any], steps: int) -> Callable[[], float]:
    driver = DynamicStepDriver(environment, policy, observers, num_steps=steps)

    def collect() -> float:
        start = time.perf_counter()
        driver.run(environment.current_time_step())
        return steps / (time.perf_counter() - start)

    return collect


def _theirs(environment: Any, size: Size) -> Callable[[], float]:
    tf_environment = tf_py_environment.TFPyEnvironment(environment)
    policy = random_tf_policy.RandomTFPolicy(tf_environment.time_step_spec(), tf_environment.action_spec())
    buffer = tf_uniform_replay_buffer.TFUniformReplayBuffer(
        policy.trajectory_spec, batch_size=size.num_envs, max_length=size.max_length
    )
    driver = dynamic_step_driver.DynamicStepDriver(
        tf_environment, policy, observers=[buffer.add_batch], num_steps=size.peer_steps
    )
    run = tf.function(driver.run)

    def collect() -> float:
        start = time.perf_counter()
        run(tf_environment.current_time_step())
        return size.peer_steps / (time.perf_counter() - start)

    return collect


class _AsPyEnvironment(py_environment.PyEnvironment):  # type: ignore[misc]  # ships no types
    """Our environment as one of TF-Agents', batched as it is, so that both drivers step the very same thing."""

    def __init__(self, environment: Any) -> None:
        super().__init__(handle_auto_reset=False)
        self._environment = environment

    @property
    def batched(self) -> bool:
        return True

    @property
    def batch_size(self) -> int:
        return int(self._environment.batch_size)

    def observation_spec(self) -> Any:
        spec = self._environment.observation_spec()
        return array_spec.BoundedArraySpec(spec.shape, spec.dtype, spec.minimum, spec.maximum, "observation")

    def action_spec(self) -> Any:
        spec = self._environment.action_spec()
        return array_spec.BoundedArraySpec(spec.shape, spec.dtype, spec.minimum, spec.maximum, "action")

    def _reset(self) -> Any:
        return ts.TimeStep(*self._environment.reset())

    def _step(self, action: Any) -> Any:
        return ts.TimeStep(*self._environment.step(action))
