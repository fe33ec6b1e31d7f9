"""TF-Agents' replay-buffer tutorial, section by section, with a buffer on disk.

    python examples/replay_buffer_tutorial.py

The sections are those of https://www.tensorflow.org/agents/tutorials/5_replay_buffers_tutorial.
"""

import os
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
import tensorflow as tf

import diskbuf
from diskbuf.agents import DqnAgent
from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import suite_gym
from diskbuf.networks import QNetwork


def buffers_of_tensors(folder: Path) -> None:
    """Creating a buffer, writing to it, reading from it."""
    data_spec = {
        "action": diskbuf.ArraySpec([3], "float32"),
        "observation": {
            "lidar": diskbuf.ArraySpec([5], "float32"),
            "camera": diskbuf.ArraySpec([3, 2], "float32"),
        },
    }
    batch_size, max_length = 32, 1000
    with diskbuf.UniformReplayBuffer(data_spec, batch_size, max_length, path=folder / "tutorial.zarr") as replay_buffer:
        for time in range(10):
            values = {
                "action": np.full([batch_size, 3], time, "float32"),
                "observation": {
                    "lidar": np.full([batch_size, 5], time, "float32"),
                    "camera": np.full([batch_size, 3, 2], time, "float32"),
                },
            }
            replay_buffer.add_batch(values)
        print("frames:", replay_buffer.num_frames())

        items, info = replay_buffer.get_next(sample_batch_size=4, num_steps=2)
        print("one sample:", items["action"].shape, "with ids", info.ids.tolist())

        dataset = replay_buffer.as_dataset(sample_batch_size=4, num_steps=2)
        for items, _ in dataset.take(3):
            print("from a dataset:", items["observation"]["camera"].shape)

        print("everything:", replay_buffer.gather_all()["action"].shape)

    with diskbuf.open(folder / "tutorial.zarr") as replay_buffer:
        print("still there when it is opened again:", replay_buffer.num_frames())


def training_with_a_buffer(folder: Path) -> None:
    """Collecting through a driver, and training an agent from what it collected."""
    with suite_gym.load("CartPole-v1", num_envs=4, seed=0) as environment:
        q_network = QNetwork(
            environment.time_step_spec().observation, environment.action_spec(), fc_layer_params=(100,)
        )
        agent = DqnAgent(
            environment.time_step_spec(), environment.action_spec(), q_network, keras.optimizers.Adam(1e-3), seed=0
        )
        with diskbuf.UniformReplayBuffer(
            agent.collect_data_spec, batch_size=environment.batch_size, max_length=1000, path=folder / "cartpole.zarr"
        ) as replay_buffer:
            driver = DynamicStepDriver(
                environment, agent.collect_policy, observers=[replay_buffer.add_batch], num_steps=100
            )
            driver.run()
            dataset = replay_buffer.as_dataset(sample_batch_size=32, num_steps=2).prefetch(3)
            iterator = iter(dataset)
            for _ in range(50):
                experience, _ = next(iterator)
                loss = agent.train(experience).loss
            print(f"loss after {int(agent.train_step_counter)} train steps: {float(loss):.3f}")


def main() -> None:
    """Goes through the sections in a folder of its own."""
    tf.random.set_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        buffers_of_tensors(Path(folder))
        training_with_a_buffer(Path(folder))


if __name__ == "__main__":
    main()
