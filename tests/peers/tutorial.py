"""What TF-Agents' tutorial on replay buffers does, with only the import lines changed, then a run that is restarted.

    python tutorial.py FOLDER

Keeps in FOLDER the stores `tutorial.zarr` (the tutorial's hand-made rows), `items.zarr` (its buffer of arrays) and
`cartpole.zarr` (a DQN agent's steps), and beside each what was in it by its own account, as .npz.
"""

import os
import sys
import warnings
from pathlib import Path

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
from tf_agents.agents.dqn import dqn_agent
from tf_agents.drivers import dynamic_step_driver
from tf_agents.environments import suite_gym, tf_py_environment
from tf_agents.networks import q_network
from tf_agents.replay_buffers import tf_uniform_replay_buffer as tf_agents_buffer
from tf_agents.specs import tensor_spec
from tf_agents.trajectories import trajectory
from tf_agents.utils import common

from diskbuf.replay_buffers import PyUniformReplayBuffer, TFUniformReplayBuffer

FOLDER = Path(sys.argv[1])


def note(name, items):
    leaves = {f"leaf_{at}": np.asarray(leaf) for at, leaf in enumerate(tf.nest.flatten(items))}
    np.savez(FOLDER / f"{name}.npz", **leaves)


def write_and_read():
    data_spec = (
        tf.TensorSpec([3], tf.float32, "action"),
        (tf.TensorSpec([5], tf.float32, "lidar"), tf.TensorSpec([3, 2], tf.float32, "camera")),
    )
    batch_size = 32
    replay_buffer = TFUniformReplayBuffer(
        data_spec, batch_size=batch_size, max_length=1000, path=FOLDER / "tutorial.zarr"
    )
    ones = tf.nest.map_structure(lambda spec: tf.ones(spec.shape), data_spec)
    values = (ones[0], (2 * ones[1][0], 3 * ones[1][1]))
    values_batched = tf.nest.map_structure(lambda t: tf.stack([t] * batch_size), values)
    for _ in range(6):
        replay_buffer.add_batch(values_batched)

    sample, _ = replay_buffer.get_next(sample_batch_size=10, num_steps=1)
    assert [leaf.shape.as_list() for leaf in tf.nest.flatten(sample)] == [[10, 1, 3], [10, 1, 5], [10, 1, 3, 2]]
    iterator = iter(replay_buffer.as_dataset(sample_batch_size=4, num_steps=2))
    for _ in range(3):
        items, _ = next(iterator)
        tf.nest.assert_same_structure(items, data_spec)
        assert [leaf.shape.as_list() for leaf in tf.nest.flatten(items)] == [[4, 2, 3], [4, 2, 5], [4, 2, 3, 2]]
        assert [float(tf.reduce_mean(leaf)) for leaf in tf.nest.flatten(items)] == [1, 2, 3]
    everything = replay_buffer.gather_all()
    assert everything[1][1].shape == (32, 6, 3, 2)
    assert replay_buffer.num_frames() == 192
    note("tutorial", everything)

    py_replay_buffer = PyUniformReplayBuffer(
        capacity=1000 * 32, data_spec=tensor_spec.to_nest_array_spec(data_spec), path=FOLDER / "items.zarr"
    )
    py_replay_buffer.add_batch(tf.nest.map_structure(lambda t: t.numpy(), values_batched))
    assert py_replay_buffer.size == 32
    assert next(iter(py_replay_buffer.as_dataset(4, 2)))[1][0].shape == (4, 2, 5)
    note("items", py_replay_buffer.gather_all())


def collect_and_train(steps_before, rows_before):
    """A program that is started again, with a checkpoint beside its store. Returns what the next start finds."""
    tf_env = tf_py_environment.TFPyEnvironment(suite_gym.load("CartPole-v0"))
    q_net = q_network.QNetwork(tf_env.time_step_spec().observation, tf_env.action_spec(), fc_layer_params=(20,))
    global_step = tf.Variable(0, dtype=tf.int64)
    agent = dqn_agent.DqnAgent(
        tf_env.time_step_spec(),
        tf_env.action_spec(),
        q_network=q_net,
        optimizer=tf.compat.v1.train.AdamOptimizer(0.001),
        td_errors_loss_fn=common.element_wise_squared_loss,
        train_step_counter=global_step,
    )
    agent.initialize()
    arguments = {"data_spec": agent.collect_data_spec, "batch_size": tf_env.batch_size, "max_length": 1000}
    replay_buffer = TFUniformReplayBuffer(**arguments, path=FOLDER / "cartpole.zarr")
    checkpointer = common.Checkpointer(
        ckpt_dir=str(FOLDER / "checkpoints"),
        max_to_keep=1,
        agent=agent,
        policy=agent.policy,
        replay_buffer=replay_buffer,
        global_step=global_step,
    )
    checkpointer.initialize_or_restore()
    assert (int(global_step), int(replay_buffer.num_frames())) == (steps_before, rows_before)

    in_memory = tf_agents_buffer.TFUniformReplayBuffer(**arguments)
    driver = dynamic_step_driver.DynamicStepDriver(
        tf_env,
        agent.collect_policy,
        observers=[replay_buffer.add_batch, in_memory.add_batch],
        num_steps=20,
    )
    agent.train = common.function(agent.train)
    driver.run()
    dataset = replay_buffer.as_dataset(num_parallel_calls=3, sample_batch_size=4, num_steps=2).prefetch(3)
    iterator = iter(dataset)
    for _ in range(3):
        driver.run()
        experience, _ = next(iterator)
        assert type(experience) is trajectory.Trajectory
        assert np.isfinite(agent.train(experience).loss)
    collected = tf.nest.map_structure(lambda leaf: leaf[:, rows_before:], replay_buffer.gather_all())
    tf.nest.map_structure(np.testing.assert_array_equal, collected, in_memory.gather_all())
    assert collected.is_boundary().numpy().any()  # more than one episode

    with warnings.catch_warnings(action="error"):
        checkpointer.save(global_step)
    note("cartpole", replay_buffer.gather_all())
    found_next = int(global_step), int(replay_buffer.num_frames())
    replay_buffer.close()
    return found_next


if __name__ == "__main__":
    write_and_read()
    found = 0, 0
    for _ in range(2):
        found = collect_and_train(*found)
    assert found[0] == 6
    sys.stdout.write("done\n")
