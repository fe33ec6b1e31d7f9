"""Learns CartPole-v1 online with a DQN agent, from a buffer on disk. Killed and run again, it goes on.

    python examples/cartpole_dqn.py runs/cartpole_dqn

The folder holds the store, checkpoints, and summaries for TensorBoard.
"""

import argparse
import logging
import os
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")  # for networks this small the CPU is faster

import keras

import diskbuf
from diskbuf.agents import DdqnAgent
from diskbuf.environments import suite_gym
from diskbuf.networks import QNetwork
from diskbuf.policies import LinearSchedule
from diskbuf.training import evaluate, train_off_policy

NUM_ENVS = 8
EPISODES = 20


def main() -> None:
    """Reads the command line, trains, and lets the policy play."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folder", type=Path, help="where store, checkpoints and summaries go; it is made, or gone on with"
    )
    parser.add_argument("--num-iterations", type=int, default=6_000, help="each of 4 train steps (default 6,000)")
    parser.add_argument("--short", action="store_true", help="300 train steps, to see it work")
    parser.add_argument("--seed", type=int, default=0, help="of everything (default 0)")
    options = parser.parse_args()
    num_iterations = 75 if options.short else options.num_iterations
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    with (
        suite_gym.load("CartPole-v1", num_envs=NUM_ENVS, seed=options.seed) as environment,
        suite_gym.load("CartPole-v1", num_envs=EPISODES, seed=options.seed + 1) as eval_environment,
    ):
        agent = DdqnAgent(
            environment.time_step_spec(),
            environment.action_spec(),
            QNetwork(
                environment.time_step_spec().observation,
                environment.action_spec(),
                fc_layer_params=(128, 128),
                # Position, velocity, angle, angular velocity: to about the same size, or values grow without end.
                preprocessing_layers=keras.layers.Normalization(mean=[0.0] * 4, variance=[0.5, 0.5, 0.01, 0.5]),
                seed=options.seed,
            ),
            keras.optimizers.Adam(5e-4),
            epsilon_greedy=LinearSchedule(initial_value=1.0, final_value=0.04, num_steps=4_000),
            target_update_tau=0.01,
            gamma=0.99,
            seed=options.seed,
        )
        started = time.perf_counter()
        with diskbuf.UniformReplayBuffer(
            agent.collect_data_spec, NUM_ENVS, max_length=10_000, path=options.folder / "store.zarr"
        ) as buffer:
            result = train_off_policy(
                options.folder,
                agent,
                environment,
                buffer,
                num_iterations=num_iterations,
                collect_steps_per_iteration=NUM_ENVS,
                train_steps_per_iteration=4,
                sample_batch_size=128,
                seed=options.seed,
                eval_environment=eval_environment,
                num_eval_episodes=EPISODES,
                eval_interval=2_000,
                summary_interval=2_000,
            )
            num_steps = buffer.next_id * NUM_ENVS
        seconds = time.perf_counter() - started
        returns = evaluate(agent.policy, eval_environment, num_episodes=EPISODES)
    for step, earned in result.returns:
        print(f"after {step:,} train steps: average return {earned:.1f}")
    print(f"{num_steps:,} environment steps, {result.train_step:,} train steps in {seconds:.0f} s")
    print(f"average return {returns.mean():.1f} over {EPISODES} episodes")


if __name__ == "__main__":
    main()
