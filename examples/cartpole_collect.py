"""Collects CartPole-v1 with a random policy into a store on disk. Run again, it goes on where it stopped.

    python examples/cartpole_collect.py runs/cartpole.zarr

Kill it whenever you like: every row that was added is in the store at the next start.
"""

import argparse
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

import diskbuf
from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import suite_gym
from diskbuf.policies import RandomPolicy


def collect(store: Path, *, num_steps: int, num_envs: int, seed: int | None) -> None:
    """Adds rows until the store holds `num_steps`, all environments together.

    Args:
        store: Path of the store, made if it isn't there.
        num_steps: Rows to reach, each one step of one environment; the boundary rows between episodes count too.
        num_envs: Environments side by side, the lanes of the store.
        seed: Makes the run repeatable; None takes entropy from the system.
    """
    env_seed, policy_seed = None, None
    if seed is not None:  # where it starts is part of the seed, so that a run doesn't repeat the one it continues
        env_seed, policy_seed = map(int, np.random.SeedSequence([seed, next_id(store)]).generate_state(2))
    with suite_gym.load("CartPole-v1", num_envs=num_envs, seed=env_seed) as env:
        policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=policy_seed)
        with (
            diskbuf.UniformReplayBuffer(
                policy.trajectory_spec,
                batch_size=num_envs,
                max_length=None,  # nothing is evicted
                path=store,
                metadata={"environment": "CartPole-v1", "policy": "random"},
            ) as buffer,
            tqdm(desc="collect", total=num_steps, initial=buffer.num_frames(), unit=" steps", mininterval=0.2) as bar,
        ):
            observers = [buffer.add_batch, lambda _: bar.update(num_envs)]
            driver = DynamicStepDriver(env, policy, observers, num_steps=1)  # one row a run
            before, started = buffer.num_frames(), time.perf_counter()
            time_step, policy_state = env.reset(), ()
            while buffer.num_frames() < num_steps:
                time_step, policy_state = driver.run(time_step, policy_state)
            added, seconds = buffer.num_frames() - before, time.perf_counter() - started
    rate = f"{added / seconds:,.0f} steps a second, the environments included"
    print(f"added {added:,} steps to {before:,} in {seconds:.1f} s: {rate}")


def next_id(store: Path) -> int:
    """Returns the id that the next row of a store will get, 0 where there is no store yet."""
    try:
        with diskbuf.open(store) as buffer:
            return buffer.next_id
    except diskbuf.StoreNotFoundError:
        return 0


def main() -> None:
    """Reads the command line and collects."""
    parser = argparse.ArgumentParser(description="Collect CartPole-v1 with a random policy; run again to go on.")
    parser.add_argument("store", metavar="STORE", type=Path, help="path of the store, made if it isn't there")
    parser.add_argument("--num-steps", type=int, default=50_000, help="steps to reach in the store (50000)")
    parser.add_argument("--num-envs", type=int, default=8, help="environments side by side (8)")
    parser.add_argument("--seed", type=int, help="makes the run repeatable")
    arguments = parser.parse_args()
    collect(arguments.store, num_steps=arguments.num_steps, num_envs=arguments.num_envs, seed=arguments.seed)


if __name__ == "__main__":
    main()
