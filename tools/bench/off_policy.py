"""Measures off-policy evaluation of a log on disk beside reading its columns alone: what `make bench-logs` runs.

The log has one lane, and is in the page cache when it is read.
"""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import beside
import numpy as np
from beside import Measurement
from measure import MEGABYTES, SECONDS, Record, Target, against, interleave, single

import diskbuf
from diskbuf import trajectories
from diskbuf.bandits.evaluation import IPS, SNIPS, DoublyRobust, evaluate
from diskbuf.bandits.log_reader import LogReader

_ARMS, _FEATURES = 10, 8
_POLICY = np.arange(1, _ARMS + 1) / np.arange(1, _ARMS + 1).sum()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        rows: Of the log.
        rounds: Rounds.
    """

    rows: int = 10_000_000
    rounds: int = 7


QUICK = Size(rows=20_000, rounds=1)


def measure_off_policy(folder: Path, size: Size) -> list[Record]:
    """Seconds for all rows, from opening the store to the intervals."""
    store = folder / "log.zarr"
    _write(store, size.rows)
    _forget_peak()
    before = _memory("VmRSS")
    figures = interleave(
        {
            "reading": _timed(lambda: _read(store)),
            "estimates": _timed(lambda: evaluate(store, _POLICY, [IPS(), SNIPS()], num_bootstrap=0)),
            "intervals": _timed(lambda: evaluate(store, _POLICY, [IPS(), SNIPS()])),
        },
        rounds=size.rounds,
    )
    records = []
    for name, what in (("estimates", "without intervals"), ("intervals", "with intervals")):
        what = f"IPS and SNIPS of {size.rows:,} rows, fixed probabilities, {what}"
        records.append(single(f"{name}_seconds", what, figures=figures[name], unit=SECONDS, target=Target(at_most=3)))
        records.append(
            against(
                f"{name}_beside_reading",
                what,
                ours=figures[name],
                peer="reading the columns",
                peer_figures=figures["reading"],
                unit=SECONDS,
                target=Target(at_most=2),
            )
        )
    records.append(single("memory", "memory that these took", figures=[_memory("VmHWM") - before], unit=MEGABYTES))
    robust = _timed(lambda: evaluate(store, _POLICY, [DoublyRobust()]))
    what = f"doubly robust, two passes with contexts of {_FEATURES} numbers, a ridge for each of {_ARMS} arms"
    records.append(single("doubly_robust", what, figures=[robust()], unit=SECONDS))
    records.append(
        single("doubly_robust_memory", "memory that all took", figures=[_memory("VmHWM") - before], unit=MEGABYTES)
    )
    return records


def _write(path: Path, rows: int) -> None:
    """Writes a log whose arms were equally probable."""
    action = diskbuf.BoundedArraySpec((), np.int32, 0, _ARMS - 1)
    step = trajectories.PolicyStep(action, (), {"propensity": diskbuf.ArraySpec((), np.float32)})
    time_steps = trajectories.time_step_spec(diskbuf.ArraySpec((_FEATURES,), np.float32))
    spec = trajectories.trajectory_spec(time_steps, step)
    rng = np.random.default_rng(0)
    with diskbuf.UniformReplayBuffer(spec, batch_size=1, max_length=None, path=path) as buffer:
        for first in range(0, rows, 1_000_000):
            shape = (1, min(1_000_000, rows - first))
            first_steps = np.full(shape, trajectories.StepType.FIRST, np.int32)
            last_steps = np.full(shape, trajectories.StepType.LAST, np.int32)
            buffer.extend(
                trajectories.Trajectory(
                    first_steps,
                    rng.random((*shape, _FEATURES), np.float32),
                    rng.integers(0, _ARMS, shape, np.int32),
                    {"propensity": np.full(shape, 1 / _ARMS, np.float32)},
                    last_steps,
                    rng.random(shape, np.float32),
                    np.zeros(shape, np.float32),
                )
            )


def _read(path: Path) -> None:
    with LogReader(path) as log:
        for _ in log.blocks(with_observation=False):
            pass


def _timed(call: Callable[[], Any]) -> Callable[[], float]:
    def seconds() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return seconds


def _forget_peak() -> None:
    """Has the kernel count the most memory anew; see proc(5), clear_refs."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _memory(field: str) -> float:
    """VmRSS, what this process has in memory, or VmHWM, the most it had; in MB, mapped files with it."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) / 1000 for line in status.splitlines() if line.startswith(field))


if __name__ == "__main__":
    beside.main(
        {"off-policy": Measurement("off_policy", "measure_off_policy")}, what="learning from bandit logs", name="logs"
    )
