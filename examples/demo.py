"""The main job from end to end: collect to disk, be killed on the way, go on, train offline, evaluate.

    python examples/demo.py

Two programs do the work, each in a process of its own: cartpole_collect.py and cartpole_offline.py. Between them there
is nothing but the store. Exits with 1 when the greedy policy earns less than 3 times what the random one did.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from diskbuf_tools.demonstration import run_and_kill

import diskbuf
from diskbuf.trajectories import StepType, Trajectory

EXAMPLES = Path(__file__).resolve().parent
WANTED_RATIO = 3.0


def main() -> None:
    """Reads the command line and runs the demo."""
    parser = argparse.ArgumentParser(description="Collect, be killed, go on, train offline, evaluate.")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/demo"), help="for store, training and figure (runs/demo)"
    )
    parser.add_argument("--num-steps", type=int, default=50_000, help="steps to collect (50000)")
    parser.add_argument("--num-iterations", type=int, default=4000, help="batches to train on (4000)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    store, figure = arguments.folder / "cartpole.zarr", arguments.folder / "cartpole.png"
    training, report_file = arguments.folder / "training", arguments.folder / "report.json"
    seed = f"--seed={arguments.seed}"
    collector = command("cartpole_collect.py", store, f"--num-steps={arguments.num_steps}", seed)
    iterations = f"--num-iterations={arguments.num_iterations}"
    outputs = (f"--folder={training}", f"--plot={figure}", f"--report={report_file}")
    trainer = command("cartpole_offline.py", store, *outputs, iterations, seed)

    started = time.perf_counter()
    for left in (store, training):
        if left.exists():
            say(f"Removing {left}, which an earlier demo left")
            shutil.rmtree(left)

    say(f"Collecting {arguments.num_steps:,} steps into {store}, to be killed at about a third of them")
    seen = run_and_kill(collector, store, at_steps=arguments.num_steps // 3)
    print(file=sys.stderr)  # the collector can't end the line of its progress bar any more
    kept = count_whole_rows(store)
    say(f"Killed with SIGKILL. Seen in the store just before: {seen:,} steps. There now, and whole: {kept:,}")
    if kept < seen:
        sys.exit(f"{seen - kept:,} steps that had been added are gone.")

    say("Starting the same program again, on the same store")
    subprocess.run(collector, check=True)
    say(f"In the store now, and whole: {count_whole_rows(store):,} steps, of which {kept:,} from before the kill")

    say("Training offline, in a process that knows the path of the store and collects nothing")
    subprocess.run(trainer, check=True)
    ratio = json.loads(report_file.read_text())["ratio"]
    say(f"Done in {time.perf_counter() - started:.0f} s. The store is {store}, the figure {figure}")
    if ratio < WANTED_RATIO:
        sys.exit(
            f"The greedy policy must earn at least {WANTED_RATIO:g} times the random return, got {ratio:.2f} times."
        )


def command(program: str, *arguments: object) -> list[str]:
    """Returns the command that runs one of the examples."""
    return [sys.executable, str(EXAMPLES / program), *map(str, arguments)]


def count_whole_rows(store: Path) -> int:
    """Counts the rows of a store.

    Raises:
        AssertionError: When a row is not what a whole row of CartPole must be, as a torn or a lost one would not be.
    """
    with diskbuf.open(store) as buffer:
        rows: Trajectory = buffer.gather_all()  # [B, T]
        # Every action played earns 1, and each row ends where the next begins, unless that is the first of a new run.
        assert np.array_equal(rows.reward, np.where(rows.is_boundary(), 0, 1))
        follows = rows.next_step_type[:, :-1] == rows.step_type[:, 1:]
        starts_anew = (rows.step_type[:, 1:] == StepType.FIRST).all(axis=0)
        assert (follows | starts_anew).all()
        assert np.isfinite(rows.observation).all()
        assert rows.observation.any(axis=-1).all()
        return buffer.num_frames()


def say(text: str) -> None:
    """Prints at once, so that lines stay in order with those of the other processes."""
    print(f"\n=== {text}", flush=True)


if __name__ == "__main__":
    main()
