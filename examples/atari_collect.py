"""Collects an Atari game as single frames and reads them as stacks of 4. Killed and run again, it goes on.

    pip install '.[atari,plot]'
    python examples/atari_collect.py runs/pong.zarr --plot runs/pong.png

The preprocessing is the usual one (Mnih et al., "Human-level control through deep reinforcement learning", 2015):
4 frames to an action, the larger of the last two screens, grey, 84x84. ALE's own vector environment does it.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when TensorFlow is imported
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import ale_py
import gymnasium
import numpy as np
from gymnasium.wrappers.vector import ReshapeObservation
from tqdm import tqdm

import diskbuf
from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import suite_gym
from diskbuf.environments.suite_gym import GymEnvironment
from diskbuf.policies import RandomPolicy
from diskbuf.readers import frame_stacker, stack_frames

NUM_FRAMES = 4
BATCH_SIZE = 32
NUM_STEPS = 2  # of stacks: an observation and the next one


def make_environment(game: str, num_envs: int, seed: int | None) -> GymEnvironment:
    """Returns `num_envs` games side by side that show one frame [84, 84] a step.

    Args:
        game: As ALE names it, `Pong` or `SpaceInvaders`.
        num_envs: How many.
        seed: Lane i is seeded with seed + i; None takes entropy from the system.
    """
    gymnasium.register_envs(ale_py)
    vector_env = gymnasium.make_vec(
        f"ALE/{game}-v5", num_envs=num_envs, vectorization_mode="vector_entry_point", stack_num=1
    )
    return suite_gym.wrap(ReshapeObservation(vector_env, (84, 84)), seed=seed)  # without the axis of a stack of one


def collect(store: Path, *, game: str, num_steps: int, num_envs: int, seed: int | None) -> None:
    """Adds rows of single frames until the store holds `num_steps`, all environments together.

    Args:
        store: Path of the store, made if it isn't there.
        game: As in `make_environment`.
        num_steps: Rows to reach; the boundary rows between episodes count too.
        num_envs: Environments side by side, the lanes of the store.
        seed: Makes the run repeatable; None takes entropy from the system.
    """
    first_id = next_id(store, game)
    env_seed, policy_seed = (None, None) if seed is None else seeds(seed, first_id)
    with make_environment(game, num_envs, env_seed) as env:
        policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=policy_seed)
        with (
            diskbuf.UniformReplayBuffer(
                policy.trajectory_spec,
                batch_size=num_envs,
                max_length=None,  # nothing is evicted
                path=store,
                metadata={"environment": f"ALE/{game}-v5", "policy": "random"},
            ) as buffer,
            tqdm(desc="collect", total=num_steps, initial=buffer.num_frames(), unit=" steps", mininterval=0.2) as bar,
        ):
            driver = DynamicStepDriver(env, policy, [buffer.add_batch, lambda _: bar.update(num_envs)], num_steps=1)
            before, started = buffer.num_frames(), time.perf_counter()
            time_step, policy_state = env.reset(), ()
            while buffer.num_frames() < num_steps:
                time_step, policy_state = driver.run(time_step, policy_state)
            added, seconds = buffer.num_frames() - before, time.perf_counter() - started
    print(f"added {added:,} steps to {before:,} in {seconds:.1f} s: {added / seconds:,.0f} steps a second")


def seeds(seed: int, first_id: int) -> tuple[int, int]:
    """Returns a seed for the environments and one for the policy, of a run whose first row gets `first_id`.

    Where it starts is part of the seed, so that a run doesn't repeat the one it continues.
    """
    env_seed, policy_seed = np.random.SeedSequence([seed, first_id]).generate_state(2)
    return int(env_seed) // 4, int(policy_seed)  # ALE takes seeds below 2**31


def next_id(store: Path, game: str) -> int:
    """Returns the id that the next row of a store will get, 0 where there is no store yet; exits at another game."""
    try:
        with diskbuf.open(store) as buffer:
            environment = buffer.metadata["environment"]
            if environment != f"ALE/{game}-v5":
                sys.exit(f"{store} must hold rows of ALE/{game}-v5 to go on with it, got {environment}. Name another.")
            return buffer.next_id
    except diskbuf.StoreNotFoundError:
        return 0


def store_stacks(store: Path, path: Path, num_windows: int) -> None:
    """Makes a second store whose rows hold whole stacks, as it would be without `stack_frames`.

    Args:
        store: The store of single frames.
        path: Of the new store.
        num_windows: How many windows of 16 steps to copy, at most.
    """
    steps = 16
    shift = steps - NUM_FRAMES + 1  # what one window gives; the next looks back into it
    with diskbuf.open(store, dataset_window_shift=shift, dataset_drop_remainder=True) as buffer:
        spec = buffer.data_spec._replace(observation=diskbuf.ArraySpec((NUM_FRAMES, 84, 84), "uint8"))
        with diskbuf.UniformReplayBuffer(spec, buffer.batch_size, max_length=None, path=path) as copy:
            windows = buffer.as_numpy_iterator(buffer.batch_size, steps, single_deterministic_pass=True)
            for _, (rows, _) in zip(range(num_windows), windows, strict=False):
                copy.extend(stack_frames(rows, NUM_FRAMES))


def bytes_per_step(store: Path) -> float:
    """Returns what the files of a store take on the disk, for each of its rows."""
    with diskbuf.open(store) as buffer:
        rows = buffer.num_frames()
    return sum(file.stat().st_blocks * 512 for file in store.rglob("*")) / rows


def batches_per_second(dataset: Any, num_batches: int) -> float:
    """Returns how fast a loop in Python is given the elements of a dataset, after the first few."""
    started = 0.0
    for number, _ in enumerate(dataset.take(num_batches + 10), start=-10):
        if number == 0:
            started = time.perf_counter()
    return (num_batches - 1) / (time.perf_counter() - started)


def report(store: Path, *, num_batches: int) -> None:
    """Measures the store, and beside it one of stored stacks of a part of its rows.

    Args:
        store: The store of single frames.
        num_batches: To read from either.
    """
    with tempfile.TemporaryDirectory(dir=store.parent) as folder:
        stacked = Path(folder) / "stacked.zarr"
        store_stacks(store, stacked, num_windows=40)
        single_bytes, stacked_bytes = bytes_per_step(store), bytes_per_step(stacked)
        print(
            f"on disk: {single_bytes:,.0f} bytes a step; as stored stacks {stacked_bytes:,.0f}, "
            f"{stacked_bytes / single_bytes:.2f} times as much"
        )
        with diskbuf.open(store, seed=0) as buffer, diskbuf.open(stacked, seed=0) as stacked_buffer:
            dataset = buffer.as_dataset(BATCH_SIZE, num_steps=NUM_STEPS + NUM_FRAMES - 1).map(frame_stacker(NUM_FRAMES))
            rate = batches_per_second(dataset.prefetch(4), num_batches)
            stored_rate = batches_per_second(
                stacked_buffer.as_dataset(BATCH_SIZE, num_steps=NUM_STEPS).prefetch(4), num_batches
            )
            shape = list(dataset.element_spec[0].observation.shape)
    print(f"stacks of single frames: {rate:,.0f} batches {shape} a second; stored stacks: {stored_rate:,.0f}")


def plot(store: Path, figure: Path) -> None:
    """Draws the stack, of a few at random, in which most moves.

    Args:
        store: The store of single frames.
        figure: Of the PNG; its folder is made.
    """
    from matplotlib.figure import Figure

    with diskbuf.open(store, seed=0) as buffer:
        rows, info = frame_stacker(NUM_FRAMES)(*buffer.get_next(256, num_steps=NUM_FRAMES))
    stacks = rows.observation[:, 0]  # [256, 4, 84, 84]
    moved = (np.diff(stacks.astype(np.int16), axis=1) != 0).sum(axis=(1, 2, 3))
    chosen = int(moved.argmax())
    canvas = Figure(figsize=(10, 2.9), layout="constrained")
    for frame, axes in enumerate(canvas.subplots(1, NUM_FRAMES)):
        axes.imshow(stacks[chosen, frame], cmap="gray", vmin=0, vmax=255)
        axes.set_title(f"{NUM_FRAMES - 1 - frame} before" if frame < NUM_FRAMES - 1 else "the step itself", fontsize=9)
        axes.set_axis_off()
    canvas.suptitle(f"{store.name}, the stack of step {info.ids[chosen, 0]}", fontsize=10)
    figure.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(figure, dpi=120)
    print(f"drew a stack: {figure}")


def main() -> None:
    """Reads the command line, collects and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", metavar="STORE", type=Path, help="path of the store, made if it isn't there")
    parser.add_argument("--game", default="Pong", help="as ALE names it: Pong, Breakout, SpaceInvaders ... (Pong)")
    parser.add_argument("--num-steps", type=int, default=40_000, help="steps to reach in the store (40000)")
    parser.add_argument("--num-envs", type=int, default=8, help="environments side by side (8)")
    parser.add_argument("--short", action="store_true", help="3,000 steps and few batches, to see it work")
    parser.add_argument("--seed", type=int, help="makes the run repeatable")
    parser.add_argument("--plot", metavar="PNG", type=Path, help="draws one stack into this file")
    options = parser.parse_args()
    num_steps = 3_000 if options.short else options.num_steps
    if num_steps < 100 * options.num_envs:
        parser.error(f"--num-steps must be at least 100 for each of the {options.num_envs} environments")
    collect(options.store, game=options.game, num_steps=num_steps, num_envs=options.num_envs, seed=options.seed)
    report(options.store, num_batches=50 if options.short else 500)
    if options.plot is not None:
        plot(options.store, options.plot)


if __name__ == "__main__":
    main()
