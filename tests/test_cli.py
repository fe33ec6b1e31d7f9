"""The command line: what it prints, its exit codes, and how little it takes to start."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from diskbuf_tools import cli

import diskbuf

SCRIPT = Path(sys.executable).with_name("diskbuf")


class Arm(NamedTuple):
    """A namedtuple inside the spec, as trajectories are."""

    index: object
    propensity: object


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two lanes, seven steps added to a window of five."""
    spec = {
        "observation": {"camera": diskbuf.ArraySpec([4, 4, 3], "uint8")},
        "arm": Arm(diskbuf.ArraySpec([], "int64"), diskbuf.ArraySpec([1], "float32")),
    }
    step = {
        "observation": {"camera": np.zeros([2, 4, 4, 3], "uint8")},
        "arm": Arm(np.zeros([2], "int64"), np.ones([2, 1], "float32")),
    }
    path = tmp_path / "steps.zarr"
    with diskbuf.UniformReplayBuffer(spec, 2, 5, path=path, metadata={"policy": "random"}) as buffer:
        for _ in range(7):
            buffer.add_batch(step)
    return path


def test_info_says_what_a_store_holds(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", str(store)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert lines[0] == str(store)
    facts = dict(line.split(maxsplit=1) for line in lines[1 : lines.index("  spec")] if not line.startswith("  on"))
    created = facts.pop("created")
    assert created.endswith(f" UTC; format 1, written by diskbuf {diskbuf.__version__}")
    assert facts == {
        "lanes": "2",
        "window": "ids [2, 7): 5 steps a lane, at most 5",
        "frames": "10",
        "layout": "zarr, not compressed",
        "runs": "1",
        "writer": "nobody",
        "metadata": '{"policy": "random"}',
    }
    assert sum(line.startswith("  on disk   ") for line in lines) == 1
    assert lines[lines.index("  spec") + 1 :] == [
        "    ├─ arm",
        "    │  ├─ index       int64    []",
        "    │  └─ propensity  float32  [1]",
        "    └─ observation",
        "       └─ camera      uint8    [4, 4, 3]",
    ]


def test_info_as_json_has_the_same_facts(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json", str(store)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"path": "observation/camera", "dtype": "uint8", "shape": [4, 4, 3]} in facts.pop("data_spec")
    assert facts.pop("disk_bytes") > 7 * 2 * 4 * 4 * 3
    assert 0 < facts.pop("compression_ratio") < 1
    assert facts.pop("created").startswith("20")
    assert facts == {
        "path": str(store),
        "is_remote": False,
        "batch_size": 2,
        "max_length": 5,
        "keep_history": False,
        "capacity": 10,
        "oldest_id": 2,
        "first_id": 2,
        "next_id": 7,
        "generation": 0,
        "num_frames": 10,
        "raw_bytes": 5 * 2 * (48 + 8 + 4),
        "layout": "zarr",
        "codec": None,
        "runs": [0],
        "format": 1,
        "package_version": diskbuf.__version__,
        "published_to": None,
        "writer": None,
        "episodes": None,
        "metadata": {"policy": "random"},
    }


def test_info_tells_of_a_compressed_store_at_a_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = {"reward": diskbuf.ArraySpec([], "float32")}
    options = diskbuf.StoreOptions(codec="lz4")
    url = f"file://{tmp_path}/published"
    with diskbuf.UniformReplayBuffer(spec, path=tmp_path / "s", options=options, publish_to=url) as buffer:
        buffer.add_batch({"reward": np.ones(1, np.float32)})
        buffer.publish_now()
        assert cli.main(["info", url]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == url
        assert "  layout   zarr, lz4" in lines
        assert not any("writer" in line for line in lines)
        with diskbuf.open(url) as reader:  # what is published to a folder is followed like any other URL
            buffer.add_batch({"reward": np.ones(1, np.float32)})
            buffer.publish_now()
            assert reader.refresh()
            assert reader.next_id == 2


def test_info_tells_of_history_that_the_window_has_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.zarr"
    spec = {"x": diskbuf.ArraySpec([], "float32")}
    with diskbuf.UniformReplayBuffer(spec, 2, None, path=path, keep_history=True) as buffer:
        for _ in range(5):
            buffer.add_batch({"x": np.zeros(2, "float32")})
        buffer.clear()
    assert cli.main(["info", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].strip() == "window   ids [5, 5): 0 steps a lane, no limit"
    assert lines[3].strip() == "history  ids [0, 5): 5 steps a lane, read with --history"


def test_info_leaves_the_store_as_it_was(store: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    assert cli.main(["info", str(store)]) == 0
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before


def test_a_missing_store_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", str(tmp_path / "nothing.zarr")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("diskbuf: ")
    assert err.count("\n") == 1
    assert "nothing.zarr" in err


def test_an_error_of_the_file_system_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: str, **_: object) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(diskbuf, "open", refuse, raising=False)
    assert cli.main(["head", "steps.zarr"]) == 1
    assert capsys.readouterr().err == "diskbuf: [Errno 13] Permission denied: 'steps.zarr'\n"


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, **_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(diskbuf, "open", fail, raising=False)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main(["head", "steps.zarr"])


@pytest.mark.parametrize("words", [["info"], ["inform", "steps.zarr"], ["info", "steps.zarr", "--xml"]])
def test_misuse_is_one_line_and_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("diskbuf: ")
    assert err.endswith("--help.\n")


def test_no_word_at_all_shows_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "verify" in capsys.readouterr().out


def test_a_reader_that_stops_early_is_no_error(store: Path) -> None:
    with subprocess.Popen([SCRIPT, "info", store], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        run.stdout.close()
        assert run.stderr.read() == b""
    assert run.returncode == 0


def test_the_console_script_tells_its_version() -> None:
    run = subprocess.run([SCRIPT, "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == f"diskbuf {diskbuf.__version__}\n"


def test_the_command_line_starts_quickly() -> None:
    def seconds() -> float:
        start = time.perf_counter()
        subprocess.run([SCRIPT, "--version"], capture_output=True, check=True)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.6


def test_info_does_without_tensorflow(store: Path) -> None:
    code = "import sys; from diskbuf_tools import cli; print(cli.main(sys.argv[1:]), 'tensorflow' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, "info", store], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "0 False"


def test_verify_and_repair_tell_what_they_find_and_do(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(store)]) == 0
    assert capsys.readouterr().out == f"{store}: clean, ids [2, 7) in 3 chunk files\n"
    assert cli.main(["repair", str(store)]) == 0
    assert capsys.readouterr().out == f"{store}: clean, nothing to do\n"

    chunk = store / "observation" / "camera" / "c.0.0.0.0.0"
    chunk.unlink()
    assert cli.main(["verify", str(store)]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first == f"chunk file {chunk} of leaf 'observation/camera' is missing."
    assert last == f"{store}: faults: 1, ids [2, 7) in 2 chunk files"
    assert cli.main(["verify", str(store), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"][0]["path"] == str(chunk)

    assert cli.main(["repair", "--dry-run", str(store)]) == 0
    assert all(line.startswith("would ") for line in capsys.readouterr().out.splitlines()[:-1])
    assert cli.main(["verify", str(store)]) == 1
    capsys.readouterr()
    assert cli.main(["repair", "--json", str(store)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["first_id"], report["next_id"], report["lost"]) == (7, 7, 5)
    assert cli.main(["verify", str(store)]) == 0
