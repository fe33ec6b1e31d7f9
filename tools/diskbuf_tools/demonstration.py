"""The main job from end to end, by the verbs themselves, each a process; between them there is only the store."""

import dataclasses
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import diskbuf

_VERB = (sys.executable, "-c", "import sys; from diskbuf_tools.cli import main; sys.exit(main())")
_STEPS = 50_000
_ITERATIONS = 3000
_WANTED_RATIO = 3.0
_LOOK_SECONDS = 0.002


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoReport:
    """What came out.

    Attributes:
        store: Path of the store.
        training: Folder of the training.
        killed_at: Rows that were seen in the store just before the collector was killed.
        kept: Rows that were there afterwards.
        rows: Rows in the end.
        random_return: Mean return of a random policy.
        greedy_return: Mean return of the trained one.
        seconds: In all.
    """

    store: str
    training: str
    killed_at: int
    kept: int
    rows: int
    random_return: float
    greedy_return: float
    seconds: float

    @property
    def faults(self) -> list[str]:
        """What didn't come out as it should."""
        found = []
        if self.kept < self.killed_at:
            found.append(f"rows that were added must stay, got {self.kept:,} of {self.killed_at:,} after the kill.")
        if self.greedy_return < _WANTED_RATIO * self.random_return:
            found.append(
                f"the trained policy must earn at least {_WANTED_RATIO:g} times what a random one does, got "
                f"{self.greedy_return:.1f} and {self.random_return:.1f}. Let it train for more steps."
            )
        return found


def demo(
    folder: Path,
    *,
    num_steps: int = _STEPS,
    num_iterations: int = _ITERATIONS,
    seed: int = 0,
    say: Callable[[str], object],
) -> DemoReport:
    """Collects, is killed on the way, goes on, trains offline, and lets the policy play.

    Args:
        folder: For the store and the training, neither of which may be there.
        num_steps: Rows to collect.
        num_iterations: Train steps.
        seed: Of everything.
        say: Called with a line about what happens next.

    Returns:
        What came out; `faults` says whether it is as it should be.

    Raises:
        ChildProcessError: When one of the verbs fails.
        StoreExistsError: When store or training are there.
    """
    started = time.perf_counter()
    store, training = folder / "cartpole.zarr", folder / "dqn"
    for path in (store, training):
        if path.exists():
            raise diskbuf.StoreExistsError(
                f"demo needs a folder without a demo, got {folder}, where {path.name} is. Name another one, or remove "
                "those.",
                path=str(path),
            )
    collect = ["collect", "CartPole-v1", str(store), f"--steps={num_steps}", f"--seed={seed}"]

    say("Collecting with a random policy; to be killed with SIGKILL at a third of it")
    say(_shown(collect))
    killed_at = run_and_kill([*_VERB, *collect], store, at_steps=num_steps // 3)
    with diskbuf.open(store) as buffer:
        kept = buffer.num_frames()
    say(f"Killed. Rows seen in the store just before: {killed_at:,}. There now: {kept:,}\n")

    say("Every row is whole, and the same command goes on")
    _run(["verify", "--values", str(store)], say)
    _run(collect, say)
    _run(["info", str(store)], say)

    say("Training from the store alone, where nothing is collected")
    train = ["train-offline", str(store), f"--steps={num_iterations}", "-o", str(training)]
    _run([*train, "--env=CartPole-v1", f"--seed={seed}"], say)
    say("What a random policy earns, and what the trained one does")
    returns = []
    for policy in ("random", str(training)):
        words = ["evaluate", policy, "--env=CartPole-v1", "--episodes=20", f"--seed={seed + 1}"]
        returns.append(_mean_return(_run(words, say)))
    with diskbuf.open(store) as buffer:
        rows = buffer.num_frames()
    return DemoReport(
        store=str(store),
        training=str(training),
        killed_at=killed_at,
        kept=kept,
        rows=rows,
        random_return=returns[0],
        greedy_return=returns[1],
        seconds=time.perf_counter() - started,
    )


def run_and_kill(collector: Sequence[str], store: Path, *, at_steps: int) -> int:
    """Starts a collector, watches its store from here, and kills it with SIGKILL once that holds `at_steps`.

    Returns:
        How many rows were seen in the store before the kill.

    Raises:
        ChildProcessError: When the collector ends before.
    """
    process = subprocess.Popen(collector, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            try:
                buffer = diskbuf.open(store)
            except diskbuf.StoreNotFoundError:
                time.sleep(_LOOK_SECONDS)
                continue
            with buffer:  # a reader sees what another process adds at once
                while process.poll() is None:
                    seen = buffer.num_frames()
                    if seen >= at_steps:
                        process.kill()
                        process.wait()
                        return seen
                    time.sleep(_LOOK_SECONDS)
        raise ChildProcessError(f"the collector must run until it is killed, but it ended with {process.returncode}.")
    finally:
        process.kill()
        process.wait()


def _mean_return(told: str) -> float:
    """The mean return in what evaluate prints for people."""
    (line,) = [line for line in told.splitlines() if line.strip().startswith("mean return")]
    return float(line.split()[-1].replace(",", ""))


def _run(words: Sequence[str], say: Callable[[str], object]) -> str:
    """Runs a verb, and shows the command and what it prints."""
    say(_shown(words))
    run = subprocess.run([*_VERB, *words], stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        raise ChildProcessError(f"{_shown(words)} must end with 0, but it ended with {run.returncode}.")
    say(run.stdout)
    return run.stdout


def _shown(words: Sequence[str]) -> str:
    return "$ " + shlex.join(["diskbuf", *words])
