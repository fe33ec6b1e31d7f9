"""TF-Agents' own bandit trainer, told to make our BanditReplayBuffer.

    python bandit.py FOLDER

Keeps in FOLDER the store `bandit.zarr` and what the trainer was given of it, batch by batch, as bandit.npz.
"""

import os
import sys
from pathlib import Path

os.environ["TF_USE_LEGACY_KERAS"] = "1"

import numpy as np
import tensorflow as tf
from tf_agents.bandits.agents import lin_ucb_agent
from tf_agents.bandits.agents.examples.v2 import trainer
from tf_agents.bandits.environments import stationary_stochastic_py_environment
from tf_agents.environments import tf_py_environment

from diskbuf.replay_buffers import BanditReplayBuffer

FOLDER = Path(sys.argv[1])
BATCH_SIZE, STEPS_PER_LOOP, ASYNC_STEPS_PER_LOOP, LOOPS = 8, 3, 2, 4


def environment():
    random = np.random.default_rng(5)
    arms = [lambda context, arm=arm: context @ np.array([arm, 1 - arm], "float32") for arm in range(3)]
    return tf_py_environment.TFPyEnvironment(
        stationary_stochastic_py_environment.StationaryStochasticPyEnvironment(
            lambda: random.integers(-9, 10, [BATCH_SIZE, 2]).astype("float32"), arms, batch_size=BATCH_SIZE
        )
    )


if __name__ == "__main__":
    env = environment()
    agent = lin_ucb_agent.LinearUCBAgent(
        time_step_spec=env.time_step_spec(), action_spec=env.action_spec(), alpha=1.0, tikhonov_weight=1.0
    )
    buffers, trained_on = [], []

    def replay_buffer_fn(data_spec, batch_size, steps_per_loop, async_steps_per_loop):
        buffers.append(
            BanditReplayBuffer(
                data_spec=data_spec,
                batch_size=batch_size,
                max_length=steps_per_loop * async_steps_per_loop,
                path=FOLDER / "bandit.zarr",
                keep_history=True,  # The trainer clears the buffer after each loop.
            )
        )
        return buffers[0]

    train = agent.train

    def noting_train(experience):
        trained_on.append(tf.nest.map_structure(lambda leaf: leaf.numpy(), experience))
        return train(experience)

    agent.train = noting_train
    trainer.train(
        root_dir=str(FOLDER / "bandit"),
        agent=agent,
        environment=env,
        training_loops=LOOPS,
        steps_per_loop=STEPS_PER_LOOP,
        async_steps_per_loop=ASYNC_STEPS_PER_LOOP,
        get_replay_buffer_fn=replay_buffer_fn,
        save_policy=False,
    )

    (replay_buffer,) = buffers
    assert replay_buffer.num_frames() == 0
    assert len(trained_on) == LOOPS * ASYNC_STEPS_PER_LOOP
    assert all(batch.reward.shape == (BATCH_SIZE, STEPS_PER_LOOP) for batch in trained_on)
    # The right rows for the right arms: a reward is what its own context and action give.
    rows = tf.nest.map_structure(lambda *batches: np.concatenate(batches, axis=1), *trained_on)
    expected = rows.observation[..., 0] * rows.action + rows.observation[..., 1] * (1 - rows.action)
    np.testing.assert_allclose(rows.reward, expected)
    np.savez(FOLDER / "bandit.npz", **{f"leaf_{at}": leaf for at, leaf in enumerate(tf.nest.flatten(rows))})
    sys.stdout.write("done\n")
