"""Hundreds of datasets made and partly read in one process: what each takes, and what stays behind of them.

Ours and TF-Agents' in a process each, which is this file run as a program, so that memory is told apart.
"""

import dataclasses
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import small_steps
from measure import MEGABYTES, MILLISECONDS, Record, against, single

import diskbuf

_RING = 1_000
_ELEMENTS = 3
_RANDOM: dict[str, Any] = {"sample_batch_size": small_steps.SEQUENCES, "num_steps": small_steps.NUM_STEPS}
_PASS: dict[str, Any] = {"sample_batch_size": 32, "num_steps": 10, "single_deterministic_pass": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        datasets: Datasets that are made.
        skipped: After how many of them memory is looked at first.
    """

    datasets: int = 500
    skipped: int = 50


QUICK = Size(datasets=8, skipped=4)


def measure_many(folder: Path, size: Size) -> list[Record]:
    """Random datasets and passes in turn, of a live and a closed buffer, beside TF-Agents' own."""
    ours = _in_own_process("ours", folder, size)
    peer = _in_own_process("peer", folder, size)
    records = [
        against(
            f"many_{kind.replace(' ', '_')}",
            f"make a dataset and read one element: {kind}",
            ours=ours["milliseconds"][kind],
            peer=f"TF-Agents: {kind.split()[0]}",
            peer_figures=_repeated(peer["milliseconds"][kind.split()[0]], len(ours["milliseconds"][kind])),
            unit=MILLISECONDS,
        )
        for kind in ours["milliseconds"]
    ]
    what = f"growth of memory by {size.datasets - size.skipped} datasets after the first {size.skipped}"
    for name, found in (("diskbuf", ours), ("TF-Agents", peer)):
        records.append(single(f"many_growth_{name}", f"{what}: {name}", figures=[found["megabytes"]], unit=MEGABYTES))
    return records


def _repeated(figures: list[float], count: int) -> list[float]:
    """The first figures, again where there are too few."""
    return [figures[at % len(figures)] for at in range(count)]


def _in_own_process(side: str, folder: Path, size: Size) -> Any:
    arguments = {"side": side, "path": str(folder / "steps.zarr"), **dataclasses.asdict(size)}
    run = subprocess.run([sys.executable, __file__, json.dumps(arguments)], check=True, stdout=subprocess.PIPE)
    return json.loads(run.stdout)


def _make_and_read(side: str, path: str, datasets: int, skipped: int) -> dict[str, Any]:
    """What the process does."""
    import tensorflow as tf

    step = {
        name: np.ones((small_steps.LANES, _RING, *spec.shape), spec.dtype) for name, spec in small_steps.SPEC.items()
    }
    makers = _makers_of_ours(Path(path), step) if side == "ours" else _makers_of_peer(step)
    tf.constant(0)  # starts TensorFlow
    milliseconds: dict[str, list[float]] = {kind: [] for kind in makers}
    before = 0.0
    for number in range(datasets):
        if number == skipped:
            before = _resident()
        kind = list(makers)[number % len(makers)]
        start = time.perf_counter()
        iterator = iter(makers[kind]())
        next(iterator)
        milliseconds[kind].append((time.perf_counter() - start) * 1e3)
        for _ in range(_ELEMENTS - 1):
            next(iterator)
        del iterator
    return {"milliseconds": milliseconds, "megabytes": _resident() - before}


def _makers_of_ours(path: Path, rows: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    live = diskbuf.UniformReplayBuffer(small_steps.SPEC, small_steps.LANES, _RING, path=path, seed=0)
    live.extend(rows)
    closed = diskbuf.open(path)
    return {
        "random live": lambda: live.as_dataset(**_RANDOM),
        "random closed": lambda: closed.as_dataset(**_RANDOM),
        "pass live": lambda: live.as_dataset(**_PASS),
        "pass closed": lambda: closed.as_dataset(**_PASS),
    }


def _makers_of_peer(rows: dict[str, Any]) -> dict[str, Callable[[], Any]]:
    import beside_tf_agents

    buffer = beside_tf_agents.tf_agents_buffer(small_steps.SPEC, rows)
    return {"random": lambda: buffer.as_dataset(**_RANDOM), "pass": lambda: buffer.as_dataset(**_PASS)}


def _resident() -> float:
    """Megabytes of memory that this process has."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 1e6


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    print(json.dumps(_make_and_read(**json.loads(sys.argv[1]))))
