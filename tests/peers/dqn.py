"""Trains TF-Agents' DqnAgent and DdqnAgent on experience from a file, and writes what came of it to another.

    dqn.py GIVEN.npz RESULT.npz

Started by tests/test_dqn_agent.py, which trains diskbuf's agents on the same.
"""

import os
import sys

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
from tf_agents.agents.dqn import dqn_agent
from tf_agents.networks import sequential
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import time_step, trajectory


def main() -> None:
    given, results = dict(np.load(sys.argv[1])), {}
    num_actions = given["kernel_1"].shape[1]
    for kind in (dqn_agent.DqnAgent, dqn_agent.DdqnAgent):
        for n in (1, 3):
            results |= {f"{kind.__name__}_{n}_{name}": value for name, value in trained(kind, n, given, num_actions)}
    np.savez(sys.argv[2], **results)


def trained(kind, n, given, num_actions):
    observation_spec = tf.TensorSpec(given["observation_1"].shape[2:], tf.float32)
    q_network, target = (
        sequential.Sequential([tf.keras.layers.Dense(len(given["bias_0"]), "relu"), tf.keras.layers.Dense(num_actions)])
        for _ in range(2)
    )
    agent = kind(
        time_step.time_step_spec(observation_spec),
        tensor_spec.BoundedTensorSpec([], tf.int64, 0, num_actions - 1),
        q_network=q_network,
        target_q_network=target,
        optimizer=tf.keras.optimizers.SGD(0.5),
        n_step_update=n,
        target_update_tau=0.3,
        target_update_period=2,
        gamma=0.9,
        reward_scale_factor=0.5,
        gradient_clipping=0.05,
        train_step_counter=tf.Variable(0, dtype=tf.int64),
    )
    q_network.set_weights([given[f"{name}_{layer}"] for layer in (0, 1) for name in ("kernel", "bias")])
    target.set_weights([given[f"target_{name}_{layer}"] for layer in (0, 1) for name in ("kernel", "bias")])
    rows = {name: tf.constant(given[f"{name}_{n}"]) for name in trajectory.Trajectory._fields if name != "policy_info"}
    experience = trajectory.Trajectory(policy_info=(), **rows)
    for step in range(4):
        loss, extra = agent.train(experience, weights=tf.constant(given["weights"]))
        yield f"loss_{step}", loss
        yield f"td_error_{step}", extra.td_error
        yield f"td_loss_{step}", extra.td_loss
    for at, (weight, target_weight) in enumerate(zip(q_network.get_weights(), target.get_weights(), strict=True)):
        yield f"weight_{at}", weight
        yield f"target_{at}", target_weight


if __name__ == "__main__":
    main()
