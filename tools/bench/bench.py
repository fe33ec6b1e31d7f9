"""Measures diskbuf's speed against plain NumPy and plain files: what `make bench` runs. Needs Linux.

Everything is measured in one run, in rounds that take turns with the peer, and judged by the median of the per-round
ratios: seconds depend on the machine and on what else it does, ratios much less. Nothing fails when a target is missed.
"""

import argparse
import dataclasses
import datetime as dt
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import footprint
import frames
import numpy as np
import small_steps
from measure import Record, table

import diskbuf

_RESULTS = Path("bench-results")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One thing to measure, as the command line names it.

    Attributes:
        measure: Gets an empty folder for its stores and a size; returns its rows of the table.
        size: How much is measured.
        quick: The same for a run of seconds, which shows that it works and not how fast it is.
    """

    measure: Callable[[Path, Any], list[Record]]
    size: Any
    quick: Any


MEASUREMENTS = {
    "add": Measurement(small_steps.measure_add, small_steps.Size(), small_steps.QUICK),
    "get": Measurement(small_steps.measure_get, small_steps.Size(), small_steps.QUICK),
    "frames-append": Measurement(frames.measure_append, frames.Size(), frames.QUICK),
    "frames-get": Measurement(frames.measure_get, frames.Size(), frames.QUICK),
    "open": Measurement(footprint.measure_open, footprint.Size(), footprint.QUICK),
    "create": Measurement(footprint.measure_create, footprint.Size(), footprint.QUICK),
    "import": Measurement(footprint.measure_import, footprint.Size(), footprint.QUICK),
    "latency": Measurement(small_steps.measure_latency, small_steps.Size(), small_steps.QUICK),
    "always": Measurement(small_steps.measure_always, small_steps.Size(), small_steps.QUICK),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures what the command line asks for, prints the table and writes the JSON."""
    options = _parser().parse_args(arguments)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.dir.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    facts = machine(options.dir)
    print("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in facts.items()), flush=True)
    records = run(options.only or list(MEASUREMENTS), options.dir, is_quick=options.quick)
    facts["load_average_end"] = os.getloadavg()
    facts["seconds"] = round(time.perf_counter() - start, 1)
    print(f"\n{table(records)}\n")
    print(f"load average at the end: {facts['load_average_end']}, {facts['seconds']} s")
    document = {
        "is_quick": options.quick,
        "machine": facts,
        "rows": [record.to_json() for record in records],
    }
    options.json.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {options.json}")


def run(names: Sequence[str], folder: Path, *, is_quick: bool) -> list[Record]:
    """Measures one thing after the other, each in a folder of its own that is removed afterwards."""
    records = []
    for name in names:
        measurement = MEASUREMENTS[name]
        print(f"measuring {name} ...", flush=True)
        with tempfile.TemporaryDirectory(prefix=f"bench-{name}-", dir=folder) as own:
            records += measurement.measure(Path(own), measurement.quick if is_quick else measurement.size)
    return records


def machine(folder: Path) -> dict[str, Any]:
    """Returns what the figures depend on."""
    return {
        "time": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "diskbuf": diskbuf.__version__,
        "file_system": _file_system(folder),
        "load_average_start": os.getloadavg(),
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    """The type of the file system that holds a folder: of the deepest mount above it."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    places = {place: kind for _, place, kind, *_ in mounts}
    return next(places[str(parent)] for parent in (folder.resolve() / "x").parents if str(parent) in places)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure diskbuf's speed against plain NumPy and plain files.")
    parser.add_argument("--quick", action="store_true", help="take seconds; shows that it works, not how fast it is")
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        choices=MEASUREMENTS,
        help="measure only this: %(choices)s; may be repeated",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, default=_RESULTS / "bench.json", help="default: %(default)s"
    )
    parser.add_argument(
        "--dir",
        metavar="FOLDER",
        type=Path,
        default=_RESULTS,
        help="where stores are made, and removed afterwards; needs 5 GB; default: %(default)s",
    )
    return parser


if __name__ == "__main__":
    main()
