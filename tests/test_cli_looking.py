"""The verbs that look at a store, as a user runs them."""

import contextlib
import csv
import fcntl
import io
import json
import math
import os
import pty
import re
import resource
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diskbuf_tools import cli, counting, looking, watching

import diskbuf
from diskbuf import trajectories

SCRIPT = Path(sys.executable).with_name("diskbuf")
VERBS = [verb.__name__ for module in (looking, counting, watching) for verb in module.VERBS]
LANES = 2


def trajectory(count: int, *, length: int = 4) -> trajectories.Trajectory:
    """[LANES, count] rows of whole episodes of `length` steps and a boundary each."""
    ids = np.arange(count)
    place = np.broadcast_to(ids % (length + 1), (LANES, count))
    first, mid, last = trajectories.StepType.FIRST, trajectories.StepType.MID, trajectories.StepType.LAST
    observation = ids[:, None] + np.array([0.0, 0.25, 0.5]) + 1000 * np.arange(LANES)[:, None, None]
    return trajectories.Trajectory(
        step_type=np.where(place == 0, first, np.where(place == length, last, mid)),
        observation={"position": observation.astype("float32")},
        action=np.broadcast_to(ids % 3, (LANES, count)).astype("int64"),
        policy_info=(),
        next_step_type=np.where(place == length - 1, last, np.where(place == length, first, mid)),
        reward=np.where(place == length, 0, 1 + ids // (length + 1)).astype("float32"),
        discount=np.where(place == length - 1, 0, 1).astype("float32"),
    )


SPEC = trajectories.trajectory_spec(
    trajectories.time_step_spec({"position": diskbuf.ArraySpec([3], "float32")}),
    trajectories.PolicyStep(diskbuf.BoundedArraySpec([], "int64", 0, 2)),
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two lanes of 40 ids, of which the last 30 are in the window and the others history."""
    path = tmp_path / "steps.zarr"
    with diskbuf.UniformReplayBuffer(SPEC, LANES, 30, path=path, keep_history=True) as buffer:
        buffer.extend(trajectory(40))
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    spec = {"picture": diskbuf.ArraySpec([9, 8], "uint8"), "small": diskbuf.ArraySpec([2, 2], "int16"), "id": _SCALAR}
    path = tmp_path / "pictures.zarr"
    with diskbuf.UniformReplayBuffer(spec, path=path) as buffer:
        picture = np.arange(72, dtype="uint8").reshape(1, 9, 8)
        for step in range(3):
            small = np.full((1, 2, 2), step, "int16")
            buffer.add_batch({"picture": picture, "small": small, "id": np.full(1, math.nan, "float32")})
    return path


_SCALAR = diskbuf.ArraySpec([], "float32")


class Run:
    """Calls the command line and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: object, code: int = 0) -> str:
        found = cli.main([str(word) for word in words])
        out, err = self._capsys.readouterr()
        assert (found, err) == (code, "")
        return out

    def json(self, *words: object) -> Any:
        return json.loads(self(*words, "--json"))

    def csv(self, *words: object) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(self(*words, "--csv"))))

    def refused(self, *words: object, code: int) -> str:
        """The one line that says what is wrong."""
        found = cli.main([str(word) for word in words])
        out, err = self._capsys.readouterr()
        assert (found, out, err.count("\n")) == (code, "", 1)
        assert err.startswith("diskbuf: ")
        return err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@pytest.mark.parametrize("verb", VERBS)
def test_help_says_what_a_verb_does_and_gives_an_example(verb: str, run: Run) -> None:
    assert "Example: diskbuf " in run(verb, "--help")


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_store_is_one_line(verb: str, run: Run, tmp_path: Path) -> None:
    words = ["--id", "1"] if verb == "show" else []
    assert "nothing.zarr" in run.refused(verb, tmp_path / "nothing.zarr", *words, code=1)
    (tmp_path / "folder").mkdir()
    assert "folder" in run.refused(verb, tmp_path / "folder", *words, code=1)


@pytest.mark.parametrize("verb", VERBS)
def test_a_newer_format_is_one_line(verb: str, run: Run, store: Path) -> None:
    document = json.loads((store / "zarr.json").read_text())
    document["attributes"]["diskbuf"]["format"] = 99
    document["attributes"].pop("diskbuf_crc32")
    (store / "zarr.json").write_text(json.dumps(document))
    assert "Update diskbuf" in run.refused(verb, store, *(["--id", "1"] if verb == "show" else []), code=1)


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_writes_into_the_store(verb: str, run: Run, store: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    run(verb, store, *{"show": ["--id", 30], "watch": ["--count", 1]}.get(verb, []))
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before


def test_no_verb_imports_tensorflow(store: Path) -> None:
    code = (
        "import sys; from diskbuf_tools import cli\n"
        f"for verb in {VERBS!r}:\n"
        "    more = {'show': ['--id', '30'], 'watch': ['--count', '1']}.get(verb, [])\n"
        "    assert cli.main([verb, sys.argv[1], *more]) == 0, verb\n"
        "print({'tensorflow', 'keras', 'zarr'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, store], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_info_counts_episodes_where_that_is_quick(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.json("info", store)["episodes"] == 12
    assert "  episodes  12\n" in run("info", store)
    monkeypatch.setattr("diskbuf.inspection._COUNTED_STEPS", 10)
    assert run.json("info", store)["episodes"] is None
    assert f"not counted; diskbuf episodes --summary {store}" in run("info", store)


def test_info_names_a_writer(run: Run, store: Path) -> None:
    assert "  writer    nobody\n" in run("info", store)
    with diskbuf.open(store, mode="r+"):
        assert f"  writer    process {os.getpid()} on host " in run("info", store)
        assert run.json("info", store)["writer"]["is_alive"] is True


def cpu_seconds(*words: object) -> float:
    """What the installed command takes, without what other processes take meanwhile; the least of a few runs."""
    found = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([SCRIPT, *words], capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)


def test_info_on_ten_thousand_chunks_is_quick() -> None:
    spec = {name: diskbuf.ArraySpec([], "int64") for name in "abcd"}
    options = diskbuf.StoreOptions(chunk_bytes=32)
    with diskbuf.UniformReplayBuffer(spec, 1, None, options=options) as buffer:  # a temporary one, which syncs nothing
        buffer.extend({name: np.zeros((1, 10_000), "int64") for name in "abcd"})
        assert sum(1 for _ in Path(buffer.path).rglob("c.*")) == 10_000
        assert cpu_seconds("info", buffer.path) < 1.0


def test_ls_lists_chunks_and_other_files(run: Run, store: Path) -> None:
    files = run.json("ls", store)
    rewards = [file for file in files if file["leaves"] == ["reward"]]
    assert [(file["first_id"], file["next_id"], file["raw_bytes"]) for file in rewards] == [(0, 40, 40 * LANES * 4)]
    assert {"zarr.json", ".diskbuf/live"} <= {file["name"] for file in files if file["state"] is None}
    assert len(run.json("ls", "-n", 2, store)) == 2
    lines = run.csv("ls", store)
    assert [row["name"] for row in lines] == [file["name"] for file in files]
    assert next(iter(lines[0])) == "leaf"
    assert [row["leaf"] for row in lines] == [" ".join(file["leaves"]) for file in files]
    assert "[0, 40)" in run("ls", store)


def test_schema_shows_bounds_and_arrow_types(run: Run, store: Path) -> None:
    lines = run("schema", store).splitlines()
    assert any("action" in line and "int64" in line and line.endswith("from 0 to 2") for line in lines)
    leaves = {leaf["path"]: leaf for leaf in run.json("schema", store)}
    assert (leaves["action"]["minimum"], leaves["action"]["maximum"]) == (0, 2)
    assert leaves["observation/position"]["shape"] == [3]
    assert "reward: float" in run("schema", "--arrow", store)
    assert "must not be given together" in run.refused("schema", "--arrow", "--json", store, code=2)


def test_head_and_tail_give_rows_with_id_and_lane(run: Run, store: Path) -> None:
    head = run.json("head", "-n", 3, "-c", "action", "-c", "observation", store)
    assert [(row["id"], row["lane"], row["action"]) for row in head] == [(10, 0, 1), (10, 1, 1), (11, 0, 2)]
    assert head[1]["observation/position"] == [1010.0, 1010.25, 1010.5]
    assert list(head[0]) == ["id", "lane", "action", "observation/position"]
    tail = run.json("tail", "-n", 2, "--lane", 1, "-c", "reward", store)
    assert tail == [{"id": 38, "lane": 1, "reward": 8.0}, {"id": 39, "lane": 1, "reward": 0.0}]
    assert run.json("head", "-n", 1, "--history", "-c", "action", store) == [{"id": 0, "lane": 0, "action": 0}]


def test_csv_spreads_small_arrays_over_columns(run: Run, store: Path, pictures: Path) -> None:
    (row,) = run.csv("head", "-n", 1, "-c", "observation/position", "-c", "reward", store)
    assert row == {
        "id": "10",
        "lane": "0",
        **{f"observation/position[{k}]": f"{10 + 0.25 * k}" for k in range(3)},
        "reward": "3.0",
    }
    (row,) = run.csv("tail", "-n", 1, "-c", "small", "-c", "id", pictures)
    assert row == {"id": "2", "lane": "0", **{f"small[{i},{j}]": "2" for i in (0, 1) for j in (0, 1)}, "_id": "nan"}
    message = run.refused("head", "--csv", pictures, code=2)
    assert "at most 64 values a row, got 72 in 'picture'" in message
    assert "-c" in message


def test_a_row_of_a_table_is_one_line_with_arrays_summed_up(run: Run, pictures: Path) -> None:
    lines = run("head", pictures).splitlines()
    assert len(lines) == 4
    assert "uint8[9,8] 0…71 mean 35.5" in lines[1]
    assert run.json("head", "-n", 1, "-c", "id", pictures) == [{"id": 0, "lane": 0, "_id": "NaN"}]


def on_a_terminal(*words: object, columns: int = 80) -> list[str]:
    """The lines that the installed command shows on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm", "LC_ALL": "C.UTF-8"}  # a dumb one always has 80
    shown = b""
    command = [SCRIPT, *map(str, words)]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment) as process:
        os.close(theirs)
        with contextlib.suppress(OSError):  # EIO: the other side is closed
            while part := os.read(ours, 2**16):
                shown += part
        os.close(ours)
    assert process.returncode == 0
    return [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", shown.decode()).splitlines()]


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A store whose rows don't fit into 80 columns."""
    leaves = {f"measurement_{k}": diskbuf.ArraySpec([], "float64") for k in range(8)}
    spec = {"angles": diskbuf.ArraySpec([4], "float32"), **leaves}
    path = tmp_path / "wide.zarr"
    with diskbuf.UniformReplayBuffer(spec, LANES, path=path) as buffer:
        rows = {name: np.arange(20.0).reshape(LANES, 10) * 12345.678 for name in leaves}
        buffer.extend({"angles": np.full((LANES, 10, 4), -0.123456, "float32"), **rows})
    return path


@pytest.mark.parametrize("words", [["head"], ["tail"], ["sample", "--seed", 1], ["sample", "--num-steps", 2]], ids=str)
def test_steps_are_readable_on_a_narrow_terminal(words: list[Any], wide: Path) -> None:
    head, *rows, last = on_a_terminal(*words, "-n", 3, wide)
    names = head.split()
    own = ["sequence", "id", "lane"] if "--num-steps" in words else ["id", "lane"]
    assert names[: len(own) + 2] == [*own, "angles", "measurement_0"]
    assert len(rows) == 3 * (2 if "--num-steps" in words else 1)
    for row in rows:
        assert len(row) <= 80
        assert row.split()[: len(own)] == [entry for entry in row.split()[: len(own)] if entry.isdecimal()]
        assert "[-0.123456" in row
        assert "…" not in row.rpartition("  ")[2]  # numbers keep their digits
    left_out = [f"measurement_{k}" for k in range(8) if f"measurement_{k}" not in names]
    assert left_out
    assert last == f"not shown: {', '.join(left_out)}; -c chooses, --json has all"


def test_text_gives_way_before_columns_do(wide: Path) -> None:
    words = ("head", "-n", 1, "-c", "angles", "-c", "measurement_[0-2]", wide)
    head, row = on_a_terminal(*words)
    assert head.split() == ["id", "lane", "angles", "measurement_0", "measurement_1", "measurement_2"]
    assert "[-0.123456 -0.123456 -0.…" in row
    head, row = on_a_terminal(*words, columns=200)
    assert "…" not in row


def test_stats_are_readable_on_a_narrow_terminal(wide: Path) -> None:
    _, head, *rows, last = on_a_terminal("stats", wide)
    assert head.split()[:6] == ["column", "count", "min", "max", "mean", "std"]
    assert [row.split()[0] for row in rows[:9]] == ["angles", *(f"measurement_{k}" for k in range(8))]
    assert all(len(row.split()) == len(head.split()) for row in rows[:9])
    assert max(map(len, [head, *rows[:9]])) <= 80
    assert any(line.startswith("not shown: ") and "histogram" in line for line in [*rows, last])


@pytest.mark.parametrize("verb", ["episodes", "ls"])
def test_other_tables_keep_numbers_whole_on_a_narrow_terminal(verb: str, store: Path) -> None:
    lines = on_a_terminal(verb, store)
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[0] == {"episodes": "episode", "ls": "leaf"}[verb]


def test_a_spec_of_one_leaf_has_a_name_too(run: Run, tmp_path: Path) -> None:
    with diskbuf.UniformReplayBuffer(diskbuf.ArraySpec([], "int8"), path=tmp_path / "s") as buffer:
        buffer.add_batch(np.ones(1, "int8"))
    assert run.json("head", "-c", "(array)", tmp_path / "s") == [{"id": 0, "lane": 0, "(array)": 1}]
    assert "(array)" in run("stats", tmp_path / "s")
    assert "(array)" in run("info", tmp_path / "s")
    assert "(array)" in run("ls", tmp_path / "s")


def test_show_prints_one_step(run: Run, store: Path, pictures: Path) -> None:
    lines = run("show", "--id", 12, "--lane", 1, store).splitlines()
    assert lines[0] == "id 12, lane 1"
    assert any("float32 [3] 1,012…1,012.5 mean 1,012.25: 1,012 1,012.25 1,012.5" in line for line in lines)
    assert run.json("show", "--id", 2, "-c", "picture", pictures)["picture"]["shape"] == [9, 8]
    full = run("show", "--id", 2, "--full", "-c", "picture", pictures)
    assert all(f"{number}" in full for number in range(72))
    assert run.json("show", "--id", 2, "--full", "-c", "picture", pictures)["picture"][8][7] == 71


def test_ids_outside_of_the_window_are_one_line(run: Run, store: Path) -> None:
    for step_id in (9, 40):
        assert "must be in the window [10, 40)" in run.refused("show", "--id", step_id, store, code=1)
    assert run("show", "--id", 9, "--history", store)
    for words in (["head"], ["tail"], ["show", "--id", 12], ["episodes"], ["episodes", "--summary"]):
        assert "lane must be from 0 to 1, got 2" in run.refused(*words, "--lane", 2, store, code=1)


@pytest.mark.parametrize("verb", ["ls", "head", "tail", "sample", "episodes"])
def test_a_count_of_0_gives_an_empty_table_everywhere(verb: str, run: Run, store: Path) -> None:
    assert run.json(verb, "-n", 0, store) == []
    assert run.csv(verb, "-n", 0, store) == []
    assert run(verb, "-n", 0, store)
    assert "greater than or equal to 0" in run.refused(verb, "-n", -1, store, code=2)


def test_an_unknown_column_is_one_line_with_the_nearest(run: Run, store: Path) -> None:
    for words in (["head"], ["tail"], ["show", "--id", "12"], ["sample"], ["stats"]):
        assert "Nearest: 'reward'." in run.refused(*words, "-c", "rewards", store, code=2)


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("obs", "Nearest: 'observation/position'."),
        ("step", "Nearest: 'step_type', 'next_step_type'."),
        ("Positio", "Nearest: 'observation/position'."),
        ("postiion", "Nearest: 'observation/position'."),
        ("zzz", "There are 'step_type', 'observation/position', 'action' and 3 more."),
    ],
)
def test_names_that_hold_the_word_are_nearest(word: str, told: str, run: Run, store: Path) -> None:
    assert told in run.refused("head", "-c", word, store, code=2)


def test_a_sample_is_repeatable_and_says_where_it_is_from(run: Run, store: Path) -> None:
    words = ("sample", "-n", 5, "--num-steps", 2, "--seed", 3, "-c", "observation", store)
    rows = run.json(*words)
    assert rows == run.json(*words)
    assert [row["sequence"] for row in rows] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    assert all(row["observation/position"][0] == row["id"] + 1000 * row["lane"] for row in rows)
    assert all(after["id"] == before["id"] + 1 for before, after in zip(rows[::2], rows[1::2], strict=True))
    assert run.json(*words[:5], "--seed", 4, store) != rows
    assert "num_steps must be at most 30" in run.refused("sample", "--num-steps", 31, store, code=1)


def test_both_json_and_csv_are_too_much(run: Run, store: Path) -> None:
    for words in (["ls"], ["head"], ["sample"], ["stats"], ["episodes"]):
        assert "must not be given together" in run.refused(*words, "--json", "--csv", store, code=2)


def test_stats_say_what_columns_are_like(run: Run, store: Path) -> None:
    found = run.json("stats", store)
    columns = {column["column"]: column for column in found["columns"]}
    assert (found["first_id"], found["next_id"], found["is_saved"]) == (10, 40, False)
    assert columns["action"]["distinct"] == [[0, 20], [1, 20], [2, 20]]
    assert columns["observation/position"]["max"] == 1039.5
    assert columns["reward"]["quantiles"]["q50"] == 5.0
    assert run.json("stats", "--history", store)["first_id"] == 0
    (row,) = run.csv("stats", "-c", "action", store)
    assert (row["column"], row["mean"], row["q05"], row["distinct"]) == ("action", "1.0", "0", "3")
    lines = run("stats", "-c", "action", store).splitlines()
    assert lines[0] == "ids [10, 40), 2 lanes"
    assert lines[2].endswith("███")
    assert lines[3] == "action: 0 33.3 %, 1 33.3 %, 2 33.3 %"


def test_stats_show_nan_only_where_there_are_any(run: Run, store: Path, pictures: Path) -> None:
    assert " nan " in run("stats", pictures).splitlines()[1]
    assert " nan " not in run("stats", store).splitlines()[1]


def test_stats_say_how_many_steps_are_boundaries(run: Run, store: Path, pictures: Path) -> None:
    # 30 ids of each lane, a fifth of them boundaries.
    assert run.json("stats", store)["boundaries"] == 12
    assert "12 of the 60 steps are boundaries" in run("stats", "-c", "reward", store)
    for words in (["-c", "observation", store], [pictures]):
        assert run.json("stats", *words)["boundaries"] is None
        assert "boundar" not in run("stats", *words)


def test_saved_stats_are_used_until_the_window_moves(run: Run, store: Path) -> None:
    first = run.json("stats", "--save", store)
    again = run.json("stats", store)
    assert again == first | {"is_saved": True}
    assert run.json("stats", "-c", "reward", store)["is_saved"]
    assert "as saved" in run("stats", store)
    assert not run.json("stats", "--exact", store)["is_saved"]
    assert not run.json("stats", "--history", store)["is_saved"]
    with diskbuf.open(store, mode="r+") as buffer:
        buffer.extend(trajectory(5))
    assert not run.json("stats", store)["is_saved"]


def test_bars_show_what_is_there_however_little() -> None:
    assert counting.bars([0, 1, 400, 800]) == " ▁▄█"
    assert counting.bars([0, 0]) == "  "
    assert counting.bars([]) == ""


def test_episodes_are_listed_sorted_and_chosen(run: Run, store: Path) -> None:
    rows = run.json("episodes", store)
    assert len(rows) == 12
    assert rows[0] == {
        "episode": 0,
        "lane": 0,
        "first_id": 10,
        "last_id": 13,
        "length": 4,
        "return": 12.0,
        "end": "terminated",
        "is_whole": True,
    }
    best = run.json("episodes", "--sort", "return", "--reverse", "-n", 2, store)
    assert [row["return"] for row in best] == [32.0, 32.0]
    kept = run.json("episodes", "--lane", 1, "--min-return", 20, "--max-return", 28, "--end", "terminated", store)
    assert [row["return"] for row in kept] == [20.0, 24.0, 28.0]
    assert all(row == rows[row["episode"]] for row in best + kept)
    assert "no episodes" not in run("episodes", store)
    assert run("episodes", "--min-length", 5, store).splitlines()[1:] == ["no episodes"]
    assert run("episodes", "--min-length", 5, "--csv", store).count("\n") == 1
    assert run.json("episodes", "--min-length", 5, store) == []
    assert len(run.json("episodes", "--whole", "--history", store)) == 16
    assert [row["return"] for row in run.csv("episodes", "-n", 1, store)] == ["12.0"]
    assert "Nearest: 'return'" in run.refused("episodes", "--sort", "returns", store, code=2)
    assert "end must be one of" in run.refused("episodes", "--end", "won", store, code=2)


def test_a_table_of_episodes_says_what_it_leaves_out(run: Run, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "_SHOWN_EPISODES", 5)
    assert len(run("episodes", store).splitlines()) == 1 + 5 + 1
    assert "5 of 12 episodes" in run("episodes", store)
    assert len(run("episodes", "-n", 12, store).splitlines()) == 1 + 12


def test_episodes_are_summed_up(run: Run, store: Path) -> None:
    found = run.json("episodes", "--summary", store)
    assert (found["count"], found["steps"], found["ends"]) == (12, 48, {"terminated": 12})
    assert (found["returns"]["minimum"], found["returns"]["maximum"]) == (12.0, 32.0)
    assert "mean 22" in run("episodes", "--summary", store)
    (row,) = run.csv("episodes", "--summary", store)
    assert (row["count"], row["complete"], row["terminated"], row["open"]) == ("12", "12", "12", "0")
    assert (row["return_mean"], row["return_min"], row["length_max"]) == ("22.0", "12.0", "4")


def test_episodes_that_are_not_complete_are_counted_but_not_averaged(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "open.zarr"
    with diskbuf.UniformReplayBuffer(SPEC, LANES, path=path) as buffer:
        buffer.extend(trajectory(12))  # two episodes of returns 4 and 8, and two steps of a third
    found = run.json("episodes", "--summary", path)
    assert (found["count"], found["complete"], found["ends"]) == (6, 4, {"terminated": 4, "open": 2})
    assert (found["returns"]["mean"], found["length"]["minimum"]) == (6.0, 4)
    shown = run("episodes", "--summary", path)
    assert "of the 4 that are whole and have ended" in shown
    assert "open 2" in shown
    assert "no episode is whole and has ended" in run("episodes", "--summary", "--end", "open", path)


def test_episodes_of_a_store_without_step_types_go_by_a_named_leaf(run: Run, tmp_path: Path) -> None:
    spec = {"gain": diskbuf.ArraySpec([], "float32"), "over": diskbuf.ArraySpec([], "bool")}
    with diskbuf.UniformReplayBuffer(spec, path=tmp_path / "s") as buffer:
        buffer.extend({"gain": np.ones((1, 5), "float32"), "over": np.array([[0, 1, 0, 0, 1]], "bool")})
    assert "--ends over may" in run.refused("episodes", tmp_path / "s", code=1)
    assert "--ends must be a bool" in run.refused("episodes", "--ends", "gain", tmp_path / "s", code=2)
    rows = run.json("episodes", "--ends", "over", "--reward", "gain", tmp_path / "s")
    assert [row["return"] for row in rows] == [2.0, 3.0]


def test_watch_prints_a_line_an_update_when_piped(run: Run, store: Path) -> None:
    lines = run("watch", "--count", 2, "--interval", 0.01, store).splitlines()
    assert len(lines) == 2
    assert "ids [10, 40)" in lines[0]
    assert "writer none" in lines[0]
    looks = [json.loads(line) for line in run("watch", "--count", 2, "--interval", 0.01, "--json", store).splitlines()]
    assert [look["next_id"] for look in looks] == [40, 40]
    assert looks[0]["new_returns"][-1] == 28.0
    assert "latest returns" in lines[0]
    assert "no store yet" in run("watch", "--count", 1, "--wait", store.with_name("later.zarr"))
    assert "--wait" in run.refused("watch", store.with_name("later.zarr"), code=1)
    assert "JSON lines" in run("watch", "--help")


def test_ctrl_c_ends_watch_with_code_0(store: Path) -> None:
    with subprocess.Popen([SCRIPT, "watch", "--interval", "60", store], stdout=subprocess.PIPE) as watching_it:
        assert watching_it.stdout is not None
        assert b"ids [10, 40)" in watching_it.stdout.readline()
        watching_it.send_signal(signal.SIGINT)
        assert watching_it.wait(30) == 0


def test_verbs_work_beside_a_live_writer(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "live.zarr"
    with diskbuf.UniformReplayBuffer(SPEC, LANES, None, path=path) as buffer:
        buffer.extend(trajectory(20))
        for verb in VERBS:
            run(verb, path, *{"show": ["--id", 3], "watch": ["--count", 1]}.get(verb, []))
        buffer.extend(trajectory(5))
        assert run.json("info", path)["next_id"] == 25


@pytest.mark.parametrize(
    "options", [{"codec": "zstd"}, {"layout": "arrow"}, {"layout": "arrow", "codec": "lz4"}], ids=str
)
def test_compressed_and_remote_stores_look_the_same(
    run: Run, store: Path, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"memory://looking/{tmp_path.name}"
    diskbuf.copy(store, tmp_path / "packed", **options)
    diskbuf.copy(store, url, **options)
    for words in (["head"], ["tail", "--lane", "1"], ["sample", "--seed", "1"], ["stats"], ["episodes"], ["schema"]):
        expected = run.json(*words, store)
        for place in (tmp_path / "packed", url):
            found = run.json(*words, place)
            if words == ["schema"]:
                found, expected = ([{**leaf, "chunk_rows": 0} for leaf in leaves] for leaves in (found, expected))
            assert found == expected
    assert run.json("info", url)["is_remote"]


def test_the_shell_completes_verbs_and_options(tmp_path: Path) -> None:
    def complete(words: str) -> str:
        environment = os.environ | {"_DISKBUF_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "1"}
        done = subprocess.run([SCRIPT], capture_output=True, text=True, env=environment, check=True)
        return done.stdout

    assert {"head", "help"} & set(complete("diskbuf he").split()) == {"head"}
    environment = os.environ | {
        "_DISKBUF_COMPLETE": "complete_bash",
        "COMP_WORDS": "diskbuf head --la",
        "COMP_CWORD": "2",
    }
    done = subprocess.run([SCRIPT], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["--lane"]
    environment = os.environ | {"_DISKBUF_COMPLETE": "source_bash"}
    done = subprocess.run([SCRIPT], capture_output=True, text=True, env=environment, check=True)
    assert "complete" in done.stdout


@pytest.mark.parametrize("verb", ["info", "head", "episodes"])
def test_verbs_start_quickly(verb: str, store: Path) -> None:
    assert cpu_seconds(verb, store) < 1.0  # half of it on a quiet machine
