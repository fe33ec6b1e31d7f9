"""The verbs that copy, merge, split, compare and tidy stores, as they are typed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diskbuf_tools import cli, tidying

import diskbuf

SCRIPT = Path(sys.executable).with_name("diskbuf")
SPEC = {"x": diskbuf.ArraySpec([], "int64"), "done": diskbuf.ArraySpec([], "bool")}


def make(path: Path, steps: int = 20, *, base: int = 0, lanes: int = 2, **given: Any) -> Path:
    with diskbuf.UniformReplayBuffer(SPEC, lanes, None, path=path, **given) as buffer:
        for t in range(steps):
            buffer.add_batch({"x": np.arange(lanes) * 100 + base + t, "done": np.full(lanes, t % 5 == 4)})
    return path


def first_lane(path: Path | str) -> list[int]:
    with diskbuf.open(path) as buffer:
        found: list[int] = buffer.gather_all()["x"][0].tolist()
    return found


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: object, code: int = 0) -> str:
        found = cli.main([str(word) for word in words])
        out, err = capsys.readouterr()
        assert found == code, err
        if code:
            assert err.count("\n") == (0 if code == 1 and out else 1), err
        return out + err

    return call


def test_copy_and_convert_say_what_they_did(tmp_path: Path, run: Any) -> None:
    make(tmp_path / "a")
    assert re.fullmatch(
        r".*b: ids \[0, 20\), chunks: 2, .* written in .* s\n", run("copy", tmp_path / "a", tmp_path / "b")
    )
    report = json.loads(
        run("convert", tmp_path / "a", tmp_path / "c", "--layout", "arrow", "--codec", "zstd", "--json")
    )
    assert (report["next_id"], report["objects"]) == (20, 1)
    with diskbuf.open(tmp_path / "c") as buffer:
        assert (buffer.layout, buffer.codec) == ("arrow", "zstd")
    run("convert", tmp_path / "c", tmp_path / "d", "--layout", "zarr", "--codec", "none", "--no-verify")
    for name in "bcd":
        assert first_lane(tmp_path / name) == list(range(20))
        assert run("diff", tmp_path / "a", tmp_path / name) == "equal, ids [0, 20) compared\n"


def test_copy_and_convert_refuse_in_one_line(tmp_path: Path, run: Any) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b")
    assert "holds a store" in run("copy", tmp_path / "a", tmp_path / "b", code=1)
    assert "there is nothing at that path" in run("copy", tmp_path / "none", tmp_path / "c", code=1)
    assert "must be told --codec" in run("convert", tmp_path / "a", tmp_path / "c", code=2)
    assert "--codec must be one of zstd, blosc, lz4, none" in run(
        "convert", tmp_path / "a", tmp_path / "c", "--codec", "rar", code=2
    )
    assert "KEY=VALUE" in run("copy", tmp_path / "a", tmp_path / "c", "--storage-option", "x", code=2)
    assert "Invalid value for '--layout'" in run("convert", tmp_path / "a", tmp_path / "c", "--layout", "x", code=2)


def test_merge_says_which_ids_became_which(tmp_path: Path, run: Any) -> None:
    make(tmp_path / "a", 5)
    make(tmp_path / "b", 7, base=50)
    out = run("merge", tmp_path / "a", tmp_path / "b", "--into", tmp_path / "all")
    assert out.splitlines()[:2] == [
        f"{tmp_path}/a: ids [0, 5) are [0, 5)",
        f"{tmp_path}/b: ids [0, 7) are [5, 12)",
    ]
    assert "12 steps a lane, lanes: 2" in out
    make(tmp_path / "c", 2, lanes=3)
    assert "Give --one-lane" in run("merge", tmp_path / "a", tmp_path / "c", "--into", tmp_path / "x", code=1)
    report = json.loads(run("merge", tmp_path / "a", tmp_path / "c", "--into", tmp_path / "x", "--one-lane", "--json"))
    assert (report["batch_size"], report["next_id"]) == (1, 16)
    assert "Missing option '--into'" in run("merge", tmp_path / "a", code=2)


def test_split_takes_parts_as_words(tmp_path: Path, run: Any) -> None:
    make(tmp_path / "all", 20)
    words = ["--into", f"{tmp_path}/train=0.5", "--into", f"{tmp_path}/test=0.5", "--ends", "done", "--seed", "3"]
    out = run("split", tmp_path / "all", *words)
    assert out.count("4 episodes") == 2
    assert len(first_lane(tmp_path / "train")) == 20
    report = json.loads(
        run("split", tmp_path / "all", "--into", f"{tmp_path}/ids=ids:3:9", "--json", "--codec", "zstd")
    )
    assert (report["parts"][0]["first_id"], report["parts"][0]["next_id"]) == (3, 9)
    for part, code in (("x=", 2), ("0.5", 2), ("x=1.5", 2), ("x=ids:9:99", 1), ("x=run:4", 1)):
        message = run("split", tmp_path / "all", "--into", f"{tmp_path}/{part}" if "=" in part else part, code=code)
        assert message.startswith("diskbuf: ")
    assert not (tmp_path / "x").exists()


def test_diff_and_checksum_tell_stores_apart(tmp_path: Path, run: Any) -> None:
    make(tmp_path / "a", 20)
    make(tmp_path / "b", 20, base=1)
    out = run("diff", tmp_path / "a", tmp_path / "b", code=1)
    assert out.splitlines() == [
        "x: 0, not 1, at id 0, lane 0; rows that differ: 40",
        "different, ids [0, 20) compared",
    ]
    assert run("diff", tmp_path / "a", tmp_path / "b", "-c", "d*") == "equal, ids [0, 20) compared\n"
    report = json.loads(run("diff", tmp_path / "a", tmp_path / "b", "--json", code=1))
    assert (report["is_equal"], report["rows"][0]["column"]) == (False, "x")
    assert "Nearest: 'done'" in run("diff", tmp_path / "a", tmp_path / "b", "-c", "dome", code=2)
    digest, name = run("checksum", tmp_path / "a").split()
    assert (len(digest), name) == (64, str(tmp_path / "a"))
    assert json.loads(run("checksum", tmp_path / "b", "--json"))["digest"] != digest
    assert (
        run("checksum", tmp_path / "a", "-c", "done").split()[0]
        == run("checksum", tmp_path / "b", "-c", "done").split()[0]
    )


def test_nothing_is_destroyed_unless_somebody_says_yes(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "a", 20)
    for words in (["trim", tmp_path / "a", "--keep", "5"], ["delete", tmp_path / "a"]):
        assert "Add --yes" in run(*words, code=2)
    assert first_lane(tmp_path / "a") == list(range(20))
    assert "15 steps of each lane would go, ids [15, 20) would stay" in run(
        "trim", tmp_path / "a", "-n", 5, "--dry-run"
    )
    assert "would be deleted" in run("delete", tmp_path / "a", "--dry-run")
    assert first_lane(tmp_path / "a") == list(range(20))
    assert "15 steps of each lane went, ids [15, 20) stay" in run("trim", tmp_path / "a", "--keep", 5, "--yes")
    assert first_lane(tmp_path / "a") == list(range(15, 20))
    assert json.loads(run("trim", tmp_path / "a", "--before", 17, "-y", "--json"))["removed"] == 2
    assert "up to date" in run("upgrade", tmp_path / "a")
    assert "0 files" in run("compact", tmp_path / "a")
    assert "one of --before ID and --keep COUNT" in run("trim", tmp_path / "a", code=2)
    assert "0 steps of each lane went" in run("trim", tmp_path / "a", "--keep", 99_999)
    assert "got 99" in run("trim", tmp_path / "a", "--before", 99, "-y", code=1)
    assert "deleted" in run("delete", tmp_path / "a", "--yes")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("answer", "code", "is_there"), [("n\n", 1, True), ("y\n", 0, False)])
def test_delete_asks_on_a_terminal(tmp_path: Path, answer: str, code: int, is_there: bool) -> None:
    import pty

    make(tmp_path / "a", 3)
    master, slave = pty.openpty()
    with subprocess.Popen(
        [SCRIPT, "delete", tmp_path / "a"], stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        os.write(master, answer.encode())
        _, err = process.communicate(timeout=60)
    os.close(master)
    os.close(slave)
    assert b"with 3 steps of each lane" in err
    assert process.returncode == code
    assert (tmp_path / "a").exists() == is_there


def test_a_store_that_is_written_is_not_trimmed_or_deleted_and_can_be_copied(tmp_path: Path, run: Any) -> None:
    with diskbuf.UniformReplayBuffer(SPEC, 2, None, path=tmp_path / "a") as buffer:
        buffer.add_batch({"x": np.zeros(2, "int64"), "done": np.zeros(2, bool)})
        for words in (["trim", "--keep", 0, "-y"], ["delete", "-y"], ["upgrade"], ["compact"]):
            message = run(words[0], tmp_path / "a", *words[1:], code=1)
            assert f"process {os.getpid()}" in message
        run("copy", tmp_path / "a", tmp_path / "b")
        run("merge", tmp_path / "a", tmp_path / "a", "--into", tmp_path / "c")
        run("checksum", tmp_path / "a")
    assert first_lane(tmp_path / "c") == [0, 0]


@pytest.mark.parametrize("verb", tidying.VERBS, ids=lambda verb: verb.__name__)
def test_what_is_no_store_is_one_line(tmp_path: Path, run: Any, verb: Any) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("text")
    extra = ["--keep", "1", "-y"] if verb.__name__ == "trim" else ["-y"] if verb.__name__ != "upgrade" else []
    for name in ("nothing", "folder", "file"):
        assert "cannot open" in run(verb.__name__, tmp_path / name, *extra, code=1)


def test_ctrl_c_in_a_copy_leaves_no_store_and_the_same_call_goes_on(tmp_path: Path) -> None:
    import signal
    import time

    spec = {"frame": diskbuf.ArraySpec([1000, 1000], "uint8")}
    with diskbuf.UniformReplayBuffer(spec, 1, None, path=tmp_path / "a") as buffer:
        for number in range(300):
            buffer.add_batch({"frame": np.full([1, 1000, 1000], number % 251, "uint8")})
    with subprocess.Popen([SCRIPT, "copy", tmp_path / "a", tmp_path / "b"], stderr=subprocess.PIPE) as process:
        while not list((tmp_path / "b").glob("frame/c.*")):
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("the copy was done before the signal came")
    assert process.returncode == 130
    assert err.decode().splitlines()[-1].startswith("diskbuf: interrupted")
    with pytest.raises(diskbuf.StoreNotFoundError, match="isn't finished"):
        diskbuf.open(tmp_path / "b")
    report = json.loads(subprocess.check_output([SCRIPT, "copy", tmp_path / "a", tmp_path / "b", "--json"]))
    assert report["skipped"] > 0
    assert subprocess.run([SCRIPT, "diff", tmp_path / "a", tmp_path / "b"], check=False).returncode == 0
