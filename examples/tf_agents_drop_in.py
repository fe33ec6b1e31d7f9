"""A TF-Agents program that keeps its experience: one import line changed, and a path given.

    make peers
    .venv-tf-agents/bin/python examples/tf_agents_drop_in.py runs/drop_in.zarr

A DQN agent collects from cart-pole through TF-Agents' driver and is trained from the buffer. Run again, it goes on with
the rows it has.
"""

import argparse
import os

os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # TF-Agents 0.19 needs Keras 2
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from tf_agents.agents.dqn.dqn_agent import DqnAgent
from tf_agents.drivers.dynamic_step_driver import DynamicStepDriver
from tf_agents.environments import suite_gym
from tf_agents.environments.tf_py_environment import TFPyEnvironment
from tf_agents.networks.q_network import QNetwork
from tf_agents.utils import common

import diskbuf
from diskbuf.replay_buffers import TFUniformReplayBuffer  # was: from tf_agents.replay_buffers...


def main() -> None:
    """Collects, trains, and looks at what is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", help="folder of the store; it is made, or gone on with")
    parser.add_argument("--num-iterations", type=int, default=200, help="train steps (default 200)")
    options = parser.parse_args()

    environment = TFPyEnvironment(suite_gym.load("CartPole-v0"))
    agent = DqnAgent(
        environment.time_step_spec(),
        environment.action_spec(),
        q_network=QNetwork(environment.observation_spec(), environment.action_spec(), fc_layer_params=(100,)),
        optimizer=tf.compat.v1.train.AdamOptimizer(1e-3),
    )
    agent.initialize()
    agent.train = common.function(agent.train)

    with TFUniformReplayBuffer(
        agent.collect_data_spec, batch_size=environment.batch_size, max_length=100_000, path=options.path
    ) as replay_buffer:
        print(f"Found {int(replay_buffer.num_frames())} rows in {options.path}")
        driver = DynamicStepDriver(environment, agent.collect_policy, observers=[replay_buffer.add_batch], num_steps=10)
        driver.run = common.function(driver.run)
        driver.run()
        dataset = replay_buffer.as_dataset(sample_batch_size=64, num_steps=2, num_parallel_calls=2).prefetch(2)
        for iteration, (experience, _) in enumerate(dataset.take(options.num_iterations), start=1):
            driver.run()
            loss = agent.train(experience).loss
            if iteration % 50 == 0:
                print(f"Iteration {iteration}: loss {loss:.3f}, {int(replay_buffer.num_frames())} rows")

    with diskbuf.open(options.path) as kept:  # any program can, also one without TensorFlow
        rows = kept.gather_all()
    print(f"Kept {rows.reward.shape[1]} rows with {int((rows.next_step_type == 2).sum())} ends of episodes")


if __name__ == "__main__":
    main()
