"""The command line of the benchmarks that run beside TF-Agents on the same TensorFlow. Needs Linux.

As bench.py does it: everything in one run, in rounds that take turns, judged by the median of the per-round ratios.
Runs in the environment that `make peers` makes.
"""

import argparse
import dataclasses
import importlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench
from measure import Record, table

_RESULTS = Path("bench-results")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One thing to measure, as the command line names it.

    Attributes:
        module: Where its function is, next to the sizes `Size` and `QUICK`; imported when it is measured.
        function: Gets an empty folder for its stores and a size; returns its rows of the table.
    """

    module: str
    function: str

    def run(self, folder: Path, *, is_quick: bool) -> list[Record]:
        """Measures it."""
        module = importlib.import_module(self.module)
        measure: Callable[[Path, Any], list[Record]] = getattr(module, self.function)
        return measure(folder, module.QUICK if is_quick else module.Size())


def main(measurements: Mapping[str, Measurement], *, what: str, name: str) -> None:
    """Measures what the command line asks for, prints the table and writes the JSON.

    Args:
        measurements: What can be measured, by the names that the command line knows.
        what: What is measured, for people.
        name: Of the JSON file.
    """
    options = _parser(measurements, what, name).parse_args()
    os.environ["TF_USE_LEGACY_KERAS"] = "1"  # TF-Agents needs it, before TensorFlow is imported
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # it warns of the functions made for each contender
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    facts = bench.machine(options.folder)
    print("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in facts.items()), flush=True)
    records = run(measurements, options.only or list(measurements), folder=options.folder, is_quick=options.quick)
    facts["load_average_end"] = os.getloadavg()
    facts["seconds"] = round(time.perf_counter() - start, 1)
    print(f"\n{table(records)}\n")
    print(f"load average at the end: {facts['load_average_end']}, {facts['seconds']} s")
    document = {"is_quick": options.quick, "machine": facts, "rows": [record.to_json() for record in records]}
    options.json.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written to {options.json}")


def run(measurements: Mapping[str, Measurement], names: Sequence[str], *, folder: Path, is_quick: bool) -> list[Record]:
    """Measures one thing after the other, each in a folder of its own that is removed afterwards."""
    records = []
    for name in names:
        print(f"measuring {name} (load {os.getloadavg()[0]:.1f}) ...", flush=True)
        with tempfile.TemporaryDirectory(prefix=f"bench-{name}-", dir=folder) as own:
            records += measurements[name].run(Path(own), is_quick=is_quick)
    return records


def _parser(measurements: Mapping[str, Measurement], what: str, name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"Measure {what} beside TF-Agents.")
    parser.add_argument("--quick", action="store_true", help="take a minute; shows that it works, not how fast it is")
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        choices=measurements,
        help="measure only this: %(choices)s; may be repeated",
    )
    parser.add_argument(
        "--json", metavar="FILE", type=Path, default=_RESULTS / f"{name}.json", help="default: %(default)s"
    )
    parser.add_argument(
        "--folder",
        metavar="FOLDER",
        type=Path,
        default=Path("runs"),
        help="where stores are made, and removed afterwards; needs 5 GB on a real disk; default: %(default)s",
    )
    return parser
