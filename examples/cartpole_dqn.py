"""Learns CartPole-v1 online with a DQN agent, from a buffer on disk. Killed and run again, it goes on.

    python examples/cartpole_dqn.py runs/cartpole_dqn

The folder holds the store, checkpoints, and summaries for TensorBoard.

Measured, one run of each seed: seeds 0 to 3, by which the settings were chosen: 476 to 500 on average over 20 episodes
after 85,000 environment steps; seeds 4 and 5, which had no part in that: 500. It took 1 to 2.5 minutes on two cores
that other programs used too. Runs of one seed differ: which rows are there when a batch is drawn is a matter of timing.
"""

import argparse
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
    parser.add_argument("--num-iterations", type=int, default=10_000, help="each of one train step (default 10,000)")
    parser.add_argument("--short", action="store_true", help="300 train steps, to see it work")
    parser.add_argument("--seed", type=int, default=0, help="of everything (default 0)")
    options = parser.parse_args()
    num_iterations = 300 if options.short else options.num_iterations

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
                # Position, velocity, angle, angular velocity: to about the same size, and mostly less than 1, for the
                # network to be smooth where there is little experience.
                preprocessing_layers=keras.layers.Normalization(mean=[0.0] * 4, variance=[1.0, 20.0, 1.0, 40.0]),
                seed=options.seed,
            ),
            # Smaller and smaller steps, so that the policy at the end is no accident of the last few.
            keras.optimizers.Adam(keras.optimizers.schedules.PolynomialDecay(5e-4, options.num_iterations, 2.5e-5)),
            epsilon_greedy=LinearSchedule(initial_value=1.0, final_value=0.05, num_steps=4_000),
            # Rewards of several steps and a small discount: what one action is worth more than the other shows.
            n_step_update=5,
            target_update_tau=0.005,
            gamma=0.9,
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
                sample_batch_size=256,
                seed=options.seed,
                eval_environment=eval_environment,
                num_eval_episodes=EPISODES,
                eval_interval=1_000,
                summary_interval=1_000,
                progress=True,
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
