"""The benchmark runs in its smallest form, and its JSON has every row. No time is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BENCH = ROOT / "tools" / "bench" / "bench.py"
ROWS = {
    "add": {"add_batch_filling", "add_batch_full"},
    "get": {"get_next_short", "get_next_long"},
    "frames-append": {
        f"frames_{ours}_{fsync}_vs_{peer}"
        for ours, peer in [
            ("new", "pwrite_new"),
            ("full", "new"),
            ("full", "pwrite_cached"),
            ("full", "memcpy"),
            ("new", "memcpy"),
        ]
        for fsync in ("interval", "never")
    },
    "frames-get": {"frames_get_next"},
    "open": {"open_seconds", "open_again_seconds", "open_memory"},
    "create": {"create_disk", "create_seconds"},
    "import": {"import", "import_and_use"},
    "latency": {"add_batch_p50", "add_batch_p99", "add_batch_worst"},
    "always": {"add_batch_always_1", "add_batch_always_8"},
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads /proc")


def run(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH), "--quick", *options]
    return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)


def test_a_quick_run_measures_everything_and_leaves_only_its_json(tmp_path: Path) -> None:
    output = run(tmp_path).stdout
    folder = tmp_path / "bench-results"
    assert [file.name for file in folder.iterdir()] == ["bench.json"]
    document = json.loads((folder / "bench.json").read_text(encoding="utf-8"))
    assert {row["name"] for row in document["rows"]} == set.union(*ROWS.values())
    assert document["is_quick"]
    assert {"cpu", "kernel", "python", "numpy", "file_system", "load_average_start"} <= set(document["machine"])
    for row in document["rows"]:
        assert row["what"] in output
        assert row["ours"] > 0
        assert (row["ratio"] is None) == (row["peer"] is None)
        assert (row["is_met"] is None) == (row["target"] is None)
        if row["ratio"] is not None:
            assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]


def test_one_measurement_can_be_chosen_and_put_elsewhere(tmp_path: Path) -> None:
    stores = tmp_path / "stores"
    run(tmp_path, "--only", "add", "--json", "add.json", "--dir", str(stores))
    document = json.loads((tmp_path / "add.json").read_text(encoding="utf-8"))
    assert {row["name"] for row in document["rows"]} == ROWS["add"]
    assert list(stores.iterdir()) == []


def test_a_quick_run_measures_the_command_line(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "tools/bench/verbs.py", "--quick", "--folder", "stores", "--json", "figures.json"]
    result = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-6000:]
    assert list((tmp_path / "stores").iterdir()) == []
    rows = {row["name"] for row in json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["rows"]}
    passes = ("verify", "checksum", "copy", "export")
    assert rows == {"info", "stats_numbers", "stats_frames", *passes, *(f"{name}_memory" for name in passes)}
