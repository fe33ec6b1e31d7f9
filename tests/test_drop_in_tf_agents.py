"""The stand-ins for TF-Agents' buffers beside the real TF-Agents, which runs in an environment of its own.

`make peers` makes it; each test starts a program in it, and reads the stores that it leaves in this other process.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest

import diskbuf

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-tf-agents" / "bin" / "python"


@pytest.fixture(autouse=True)
def _tf_agents() -> None:
    """Skips where TF-Agents isn't installed, which continuous integration doesn't let pass."""
    if not (PYTHON.parents[1] / ".installed").exists():
        reason = "needs TF-Agents: make peers"
        pytest.fail(reason) if os.environ.get("DISKBUF_PEERS") == "required" else pytest.skip(reason)


def run(program: Path, *arguments: object) -> str:
    result = subprocess.run(
        [PYTHON, program, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr[-6000:]
    return result.stdout


def leaves_of(store: Path, **arguments: Any) -> list[Any]:
    with diskbuf.open(store, **arguments) as buffer:
        return optree.tree_leaves(buffer.gather_all())


def assert_noted(store: Path, leaves: list[Any]) -> None:
    """The leaves are those that the program said it has seen."""
    with np.load(store.with_suffix(".npz")) as noted:
        assert len(noted) == len(leaves)
        for at, leaf in enumerate(leaves):
            expected = noted[f"leaf_{at}"]
            assert expected.dtype == leaf.dtype
            np.testing.assert_array_equal(expected, leaf)


def test_the_tutorial_runs_and_a_dqn_agent_is_trained_over_a_restart(tmp_path: Path) -> None:
    assert run(ROOT / "tests/peers/tutorial.py", tmp_path) == "done\n"
    for name in ("tutorial", "items", "cartpole"):
        assert_noted(tmp_path / f"{name}.zarr", leaves_of(tmp_path / f"{name}.zarr"))
    with diskbuf.open(tmp_path / "cartpole.zarr") as buffer:
        assert type(buffer.data_spec).__name__ == "Trajectory"
        assert buffer.data_spec.observation.minimum[2] == np.float32(-0.41887903)
        assert buffer.num_frames() > 160


def test_the_bandit_trainer_makes_our_buffer_and_trains_on_each_row_once(tmp_path: Path) -> None:
    assert run(ROOT / "tests/peers/bandit.py", tmp_path) == "done\n"
    with diskbuf.open(tmp_path / "bandit.zarr") as buffer:
        assert buffer.num_frames() == 0  # cleared after each loop
        assert buffer.next_id == 24
    assert_noted(tmp_path / "bandit.zarr", leaves_of(tmp_path / "bandit.zarr", history=True))


def test_tf_agents_buffers_and_ours_answer_alike() -> None:
    compared = run(ROOT / "tests/peers/differential.py")
    assert int(compared.split()[0]) == 150


def test_the_example_says_how_many_rows_it_keeps(tmp_path: Path) -> None:
    store = tmp_path / "steps.zarr"
    found, iteration, kept = run(ROOT / "examples/tf_agents_drop_in.py", store, "--num-iterations=50").splitlines()
    rows = {leaf.shape[1] for leaf in leaves_of(store)}
    (number,) = rows
    assert number >= 510
    assert found == f"Found 0 rows in {store}"
    assert iteration.startswith("Iteration 50: loss ")
    assert kept.startswith(f"Kept {number} rows with ")
