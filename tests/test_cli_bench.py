"""What the bench of the command line measures, and what it leaves behind: nothing."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diskbuf_tools import cli, store_bench

import diskbuf

SCRIPT = Path(sys.executable).with_name("diskbuf")
NAMES = [
    "append, until add_batch returns",
    "append, until it is on the disk",
    "sample 256 x 2 from memory",
    "deterministic pass from memory",
    r"sample \d+ x 2 from the disk",  # so few that the batches of a turn hardly meet
    "deterministic pass from the disk",
]


def make_store(path: Path, *, steps: int = 40, **options: Any) -> Path:
    spec = {"x": diskbuf.ArraySpec([100], "int32"), "arm": diskbuf.BoundedArraySpec([], "int8", -2, 2)}
    with diskbuf.UniformReplayBuffer(spec, 4, None, path=path, options=diskbuf.StoreOptions(**options)) as buffer:
        for step in range(steps):
            buffer.add_batch({"x": np.full((4, 100), step, np.int32), "arm": np.zeros(4, np.int8)})
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert cli.main(["bench", *map(str, words), "--seconds=0.4", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


def test_every_figure_stands_beside_its_peer_and_nothing_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(capsys, "--path", tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert report["folder"] == str(tmp_path)
    assert [measured["name"] for measured in report["workloads"]] == ["frames of 84x84", "small steps"]
    for measured, row_bytes in zip(report["workloads"], (84 * 84 + 12, 44), strict=True):
        assert measured["row_bytes"] == row_bytes
        assert measured["store_bytes"] % (row_bytes * measured["lanes"]) == 0
        assert all(re.fullmatch(name, f["what"]) for name, f in zip(NAMES, measured["figures"], strict=True))
        for figure in measured["figures"][:4]:
            assert figure["rounds"] >= 3
            assert figure["ratio"] > 0
            assert figure["bytes_per_second"] == pytest.approx(figure["steps_per_second"] * row_bytes)
        for figure, steps in zip(measured["figures"], (measured["lanes"],) * 2 + (512,), strict=False):
            assert figure["seconds_per_call"] == pytest.approx(steps / figure["steps_per_second"])
        returned, synced = measured["figures"][:2]
        assert synced["bytes_per_second"] < returned["bytes_per_second"]


def test_a_store_lends_its_spec_and_is_only_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(tmp_path / "s.zarr", codec="zstd")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path, *tmp_path.rglob("*")) if file != tmp_path}
    with diskbuf.open(store) as buffer:
        store_bench.workload_of(buffer, name="steps")  # reads the store by the user's cache
    cached = set(Path(os.environ["XDG_CACHE_HOME"]).rglob("*"))
    report = run(capsys, store)
    measured = report["workloads"][0]
    assert (measured["row_bytes"], measured["lanes"]) == (401, 4)
    assert (measured["layout"], measured["codec"]) == ("zarr", "zstd")
    assert report["folder"] == str(tmp_path)  # the disk of the store
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before
    assert set(Path(os.environ["XDG_CACHE_HOME"]).rglob("*")) == cached  # what the bench decodes stays out of it


def test_the_steps_of_a_store_are_appended_again(tmp_path: Path) -> None:
    with diskbuf.open(make_store(tmp_path / "s.zarr", steps=100)) as buffer:
        workload = store_bench.workload_of(buffer, name="steps")
    assert [int(step["x"][0, 0]) for step in workload.steps] == list(range(36, 100))  # the newest
    assert workload.steps[0]["x"].shape == (4, 100)
    with diskbuf.open(make_store(tmp_path / "empty.zarr", steps=0)) as buffer:
        workload = store_bench.workload_of(buffer, name="steps")
    assert len(workload.steps) > 1
    assert all(step["arm"].min() >= -2 and step["arm"].max() <= 2 for step in workload.steps)


def test_where_pages_stay_in_memory_no_read_is_called_cold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_bench, "resident_pages", lambda _: (1, 1))
    report = run(capsys, "--path", tmp_path)
    assert [figure["ratio"] for figure in report["workloads"][0]["figures"][4:]] == [None, None]
    assert len(report["notes"]) == 1
    assert cli.main(["bench", "--path", str(tmp_path), "--seconds=0.4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("Note: pages stay in memory")
    assert lines[3].split()[:3] == ["steps/s", "µs/call", "MB/s"]
    assert "Small steps are bound by calls and not by bytes" in " ".join(lines)
    assert re.fullmatch(r"sample \d+ x 2 from the disk +pread of as much, at random, one by one", lines[8])


def test_pages_are_counted_while_they_are_in_memory(tmp_path: Path) -> None:
    file = tmp_path / "pages"
    pages = 64
    with file.open("wb") as opened:
        opened.write(bytes(pages * os.sysconf("SC_PAGESIZE") - 1))
        opened.flush()
        os.fsync(opened.fileno())
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.read(descriptor, 2**20)
        assert store_bench.resident_pages(descriptor) == (pages, pages)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        assert store_bench.resident_pages(descriptor) in ((0, pages), (pages, pages))  # tmpfs keeps them
        os.ftruncate(descriptor, 0)
        assert store_bench.resident_pages(descriptor) == (0, 0)
    finally:
        os.close(descriptor)


def test_too_little_room_is_told_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=700 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert cli.main(["bench", "--path", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "bench needs 768 MiB of free space, got 700 MiB" in err
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["bench", "--path", str(tmp_path), "--seconds=0.4"]) == 0  # which needs less


def test_an_interrupted_bench_leaves_nothing(tmp_path: Path) -> None:
    words = [SCRIPT, "bench", "--path", tmp_path, "--seconds=60"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not list(tmp_path.glob(".diskbuf-bench-*/store.zarr/zarr.json")):
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err.count("\n")) == (130, "", 1)
    assert list(tmp_path.iterdir()) == []


def test_misuse_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make_store(tmp_path / "s.zarr")
    for words in (
        ["--path", store],
        ["--path", store / "x"],
        ["--path", tmp_path / "no"],
        ["--seconds=0", "--path", tmp_path],
    ):
        assert cli.main(["bench", *map(str, words)]) == 2
        err = capsys.readouterr().err
        assert err.startswith("diskbuf: --")
        assert err.count("\n") == 1
    assert cli.main(["bench", str(tmp_path / "no.zarr")]) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["s.zarr"]


def test_bench_and_collect_do_without_tensorflow(tmp_path: Path) -> None:
    code = """
import sys
from diskbuf_tools import cli
codes = [cli.main(["bench", "--path", sys.argv[1], "--seconds=0.1"]),
         cli.main(["collect", "CartPole-v1", sys.argv[1] + "/s.zarr", "--steps=80"]),
         cli.main(["evaluate", "random", "--env=CartPole-v1", "--episodes=2"])]
print(codes, "tensorflow" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[0, 0, 0] False"
