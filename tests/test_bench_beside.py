"""The benchmarks beside TF-Agents run in their smallest form. No time is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-tf-agents" / "bin" / "python"
GRAPH = {"live", "live_parallel", "closed", "host", "empty", "live_above_empty", "closed_above_empty"}
FRAMES = {"live", "live_parallel", "closed", "closed_parallel"}
NUMPY = {"get_next", "get_next_within_episodes"} | {
    f"as_numpy_iterator_{how}" for how in ("live", "closed", "within_episodes")
}
READERS = {
    *(f"graph_{name}_60" for name in GRAPH),
    *(f"eager_{name}" for name in ("live", "live_parallel", "closed", "empty")),
    *(f"frames_{name}_vs_{peer}" for name in FRAMES for peer in ("peer", "memcpy", "memcpy_1")),
    *(f"pass_{name}" for name in ("live", "closed", "live_eager")),
    *(f"numpy_{name}" for name in NUMPY),
    *(f"cold_{name}" for name in ("iterator", "dataset")),
    *(f"many_{kind}_{how}" for kind in ("random", "pass") for how in ("live", "closed")),
    *(f"many_growth_{name}" for name in ("diskbuf", "TF-Agents")),
}

LEARNING = {
    *(f"collect_sync_vs_{peer}" for peer in ("no_buffer", "driver", "peer")),
    *(f"collect_vector_entry_point_vs_{peer}" for peer in ("no_buffer", "driver")),
    *(f"train_64_{how}_vs_{peer}" for how in ("loop", "single") for peer in ("batch", "dataset")),
    "bandits_8",
}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads /proc")


@pytest.mark.parametrize(("name", "rows"), [("readers", READERS), ("learning", LEARNING)])
def test_a_quick_run_measures_everything_and_leaves_only_its_json(name: str, rows: set[str], tmp_path: Path) -> None:
    if not (PYTHON.parents[1] / ".installed").exists():
        reason = "needs TF-Agents: make peers"
        pytest.fail(reason) if os.environ.get("DISKBUF_PEERS") == "required" else pytest.skip(reason)
    command = [PYTHON, ROOT / f"tools/bench/{name}.py", "--quick", "--folder", "stores", "--json", "figures.json"]
    result = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-6000:]
    assert list((tmp_path / "stores").iterdir()) == []
    document = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))
    assert document["is_quick"]
    assert {row["name"] for row in document["rows"]} == rows
    for row in document["rows"]:
        assert row["what"] in result.stdout
        assert (row["ratio"] is None) == (row["peer"] is None)
