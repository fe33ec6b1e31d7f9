"""`diskbuf export` and `diskbuf import` as they are typed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from coded_rows import SPEC, assert_equal, span
from counter_environment import makers
from diskbuf_tools import exchanging
from diskbuf_tools.cli import main

import diskbuf
from diskbuf import BoundedArraySpec, UniformReplayBuffer
from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import suite_gym
from diskbuf.exchange.formats import format_names
from diskbuf.policies import RandomPolicy

SCRIPT = Path(sys.executable).with_name("diskbuf")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "a.zarr"
    with UniformReplayBuffer(SPEC, 2, 40, path=path) as buffer:
        buffer.extend(span(0, 60, 2))
    return path


def succeed(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    assert main([str(word) for word in words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def fail(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 2) -> str:
    assert main([str(word) for word in words]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".npz", ".h5"])
def test_a_store_goes_out_and_comes_back(
    tmp_path: Path, store: Path, ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"a{ending}"
    out = succeed(capsys, "export", store, file)
    assert out.startswith(f"{file}: 80 rows, ids [20, 60), ")
    out = succeed(capsys, "import", file, tmp_path / "b.zarr")
    assert out.startswith(f"{tmp_path / 'b.zarr'}: 80 rows, ids [20, 60) in ")
    with diskbuf.open(tmp_path / "b.zarr") as copy, diskbuf.open(store) as buffer:
        assert_equal(copy.gather_all(), buffer.gather_all())


def test_the_installed_command_does_it_too(tmp_path: Path, store: Path) -> None:
    for words in (["export", store, tmp_path / "a.parquet"], ["import", tmp_path / "a.parquet", tmp_path / "b.zarr"]):
        run = subprocess.run([SCRIPT, *words], capture_output=True, text=True, check=False)
        assert (run.returncode, run.stderr) == (0, "")
    assert "export" in subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True).stdout


def test_reports_are_json_when_asked_for(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(succeed(capsys, "export", store, tmp_path / "a.parquet", "--json"))
    assert (report["rows"], report["first_id"], report["next_id"], report["evicted"]) == (80, 20, 60, 0)
    report = json.loads(succeed(capsys, "import", tmp_path / "a.parquet", tmp_path / "b.zarr", "--json"))
    assert (report["rows"], report["batch_size"], report["dropped"]) == (80, 2, [])


def test_rows_and_columns_are_chosen(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.csv"
    words = ["-c", "number", "-c", "is_odd/*", "--first-id", 30, "--next-id", 33, "--lane", 1]
    succeed(capsys, "export", store, file, *words)
    table = pa_csv.read_csv(file).to_pydict()
    assert table == {
        "id": [30, 31, 32],
        "lane": [1, 1, 1],
        "number": [3001, 3101, 3201],
        "is_odd/0": [False, True, False],
    }
    assert "got 'numbre'. Nearest: 'number'" in fail(capsys, "export", store, tmp_path / "b.csv", "-c", "numbre")
    assert "first_id must be an id in the window, [20, 60], got 3" in fail(
        capsys, "export", store, tmp_path / "b.csv", "--first-id", 3
    )


def test_options_of_the_format_are_passed_on(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    succeed(
        capsys,
        "export",
        store,
        tmp_path / "a",
        "--format",
        "parquet",
        "--option",
        "compression=gzip",
        "--option",
        "level=3",
    )
    assert pq.ParquetFile(tmp_path / "a").metadata.row_group(0).column(0).compression == "GZIP"
    assert "arrays in 'image'" in fail(capsys, "export", store, tmp_path / "a.csv")
    succeed(capsys, "export", store, tmp_path / "a.csv", "--flatten")
    assert "got speed" in fail(capsys, "export", store, tmp_path / "b.parquet", "--option", "speed=3")
    assert "--option must be NAME=TEXT, got 'speed'" in fail(
        capsys, "export", store, tmp_path / "b.csv", "--option", "speed"
    )


def test_what_is_there_stays(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.parquet"
    file.write_text("precious")
    assert "holds a file" in fail(capsys, "export", store, file, code=1)
    assert file.read_text() == "precious"
    succeed(capsys, "export", store, file, "--force")
    assert "holds a store" in fail(capsys, "import", file, store, code=1)


def test_bad_words_are_one_line(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no store" in fail(capsys, "export", tmp_path, tmp_path / "a.parquet", code=1)
    assert "format must be named" in fail(capsys, "export", store, tmp_path / "a")
    assert "a source must be a file" in fail(capsys, "import", tmp_path / "no.csv", tmp_path / "b.zarr", code=1)
    missing = fail(capsys, "export", store, tmp_path / "missing" / "a.parquet", code=1)
    assert f"folder {tmp_path / 'missing'} must exist to hold a.parquet" in missing
    assert "path must be on a local file system" in fail(capsys, "import", store, "s3://bucket/a.zarr")


def test_csv_is_imported_like_a_store(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    succeed(capsys, "export", store, tmp_path / "a.csv", "--flatten")
    message = fail(capsys, "import", tmp_path / "a.csv", tmp_path / "b.zarr")
    assert "--map LEAF=COLUMN" in message
    assert "--format log" in message
    succeed(capsys, "import", tmp_path / "a.csv", tmp_path / "b.zarr", "--like", store)
    with diskbuf.open(tmp_path / "b.zarr") as copy, diskbuf.open(store) as buffer:
        assert_equal(copy.gather_all(), buffer.gather_all())
        assert (copy.first_id, copy.next_id) == (20, 60)


def test_columns_are_mapped_cast_and_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"v": [0.5, 1.5], "a": [1, 0], "note": ["x", "y"]}), tmp_path / "a.parquet")
    words = ["import", tmp_path / "a.parquet", tmp_path / "b.zarr", "--map", "observation/speed=v", "--map", "action=a"]
    assert "got 'note' besides" in fail(capsys, *words)
    out = succeed(capsys, *words, "--drop", "note", "--cast", "observation/speed=float32", "--codec", "zstd")
    assert "left out note" in out
    with diskbuf.open(tmp_path / "b.zarr") as buffer:
        assert buffer.gather_all()["observation"]["speed"].dtype == np.float32
        assert buffer.codec == "zstd"
    (tmp_path / "map.toml").write_text('only_mapped = true\n[leaves]\naction = "a"\n')
    words = ["import", tmp_path / "a.parquet", tmp_path / "c.zarr", "--mapping", tmp_path / "map.toml", "--map", "v=v"]
    succeed(capsys, *words)
    with diskbuf.open(tmp_path / "c.zarr") as buffer:
        assert sorted(buffer.data_spec) == ["action", "v"]
    assert "--map must be NAME=TEXT, got 'v'" in fail(capsys, *words[:3], "--map", "v")
    assert "must give each name once, got 'v' again" in fail(capsys, *words[:3], "--map", "v=v", "--map", "v=a")


def test_transitions_become_a_trajectory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with suite_gym.wrap(makers([[3]], ends=["truncated"])) as env:
        policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=0)
        with UniformReplayBuffer(policy.trajectory_spec, 1, None, path=tmp_path / "a.zarr") as buffer:
            DynamicStepDriver(env, policy, observers=[buffer.add_batch], num_steps=7).run()
            rows = buffer.gather_all()
    steps = np.array([0, 1, 2, 4, 5, 6])
    table = {
        "action": rows.action[0, steps],
        "reward": rows.reward[0, steps],
        "terminated": np.zeros(6, bool),
        "timeout": rows.next_step_type[0, steps] == 2,
    }
    for name, ids in (("observation", steps), ("next_observation", steps + 1)):
        for element in range(4):
            table[f"{name}[{element}]"] = rows.observation[0, ids, element]
    pa_csv.write_csv(pa.table(table), tmp_path / "a.csv")
    words = ["--trajectory", "--map", "truncated=timeout", "--cast", "reward=float32"]
    casts = [f"{name}=float32" for name in ("observation", "next_observation")]
    out = succeed(
        capsys, "import", tmp_path / "a.csv", tmp_path / "b.zarr", *words, *(w for c in casts for w in ("--cast", c))
    )
    assert "8 rows, 2 episodes" in out
    with diskbuf.open(tmp_path / "b.zarr") as copy:
        found = copy.gather_all()
        for name in ("observation", "reward", "discount", "step_type", "next_step_type"):
            np.testing.assert_array_equal(getattr(found, name), getattr(rows, name)[:, :8])


def test_a_log_goes_in_and_out_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "age,item,click,p\n31,a,0,0.5\n54,b,1,0.5\n22,b,0,0.25\n"
    (tmp_path / "log.csv").write_text(text)
    words = ["--context", "age", "--action", "item", "--reward", "click", "--propensity", "p"]
    out = succeed(capsys, "import", tmp_path / "log.csv", tmp_path / "log.zarr", "--format", "log", *words)
    assert "3 rows in" in out
    report = json.loads(
        succeed(capsys, "import", tmp_path / "log.csv", tmp_path / "2.zarr", "--format", "log", *words, "--json")
    )
    assert report["labels"] == ["a", "b"]
    out = succeed(capsys, "export", tmp_path / "log.zarr", tmp_path / "out.csv", "--format", "log")
    assert out == f"{tmp_path / 'out.csv'}: 3 rows\n"
    assert pa_csv.read_csv(tmp_path / "out.csv")["item"].to_pylist() == ["a", "b", "b"]
    assert "must be without --context" in fail(capsys, "import", tmp_path / "log.csv", tmp_path / "3.zarr", *words[:2])
    assert "import --format log must be without --map" in fail(
        capsys, "import", tmp_path / "log.csv", tmp_path / "3.zarr", "--format", "log", "--map", "a=b"
    )
    assert "export --format log must be without --lane" in fail(
        capsys, "export", tmp_path / "log.zarr", tmp_path / "b.csv", "--format", "log", "--lane", 0
    )


def test_a_store_that_is_being_written_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with UniformReplayBuffer(SPEC, 2, 40, path=tmp_path / "a.zarr") as buffer:
        buffer.extend(span(0, 10, 2))
        assert "20 rows" in succeed(capsys, "export", tmp_path / "a.zarr", tmp_path / "a.parquet")
        buffer.extend(span(10, 20, 2))
        assert "40 rows" in succeed(capsys, "export", tmp_path / "a.zarr", tmp_path / "a.parquet", "--force")


def test_neither_verb_imports_tensorflow(tmp_path: Path, store: Path) -> None:
    code = """
import sys
from diskbuf_tools.cli import main
store, file, copy = sys.argv[1:]
assert main(["export", store, file]) == 0
assert main(["import", file, copy]) == 0
print(sorted({"tensorflow", "keras", "torch"} & set(sys.modules)))
"""
    words = [store, tmp_path / "a.parquet", tmp_path / "b.zarr"]
    run = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"


# ---- in the words of the command line


def test_help_and_errors_list_the_formats_that_there_are(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert format_names() == exchanging.READ
    assert format_names(is_written=True) == exchanging.WRITTEN
    for verb, known in (("export", exchanging.WRITTEN), ("import", exchanging.READ)):
        words = " ".join(succeed(capsys, verb, "--help").replace("│", " ").split())
        assert f"{', '.join(known)}, or log for a bandit's log" in words
    message = fail(capsys, "export", store, tmp_path / "a.sb3", "--format", "sb3")
    assert (
        "--format must be one of parquet, arrow, csv, npz, hdf5, minari, rlds, log, got 'sb3'. That one is" in message
    )
    message = fail(capsys, "export", store, tmp_path / "a")
    assert "sb3" not in message
    assert "--format must be named" in message


def test_short_options_mean_what_they_mean_elsewhere(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    succeed(capsys, "export", store, tmp_path / "a.parquet")
    succeed(capsys, "export", store, tmp_path / "a.parquet", "-f")
    assert "No such option: -o" in fail(capsys, "export", store, tmp_path / "b.parquet", "-o", "compression=gzip")


def test_what_to_do_is_said_in_options(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--flatten the arrays" in fail(capsys, "export", store, tmp_path / "a.csv")
    succeed(capsys, "export", store, tmp_path / "a.csv", "--flatten")
    assert "or --force replaces it" in fail(capsys, "export", store, tmp_path / "a.csv", "--flatten", code=1)
    message = fail(capsys, "import", tmp_path / "a.csv", tmp_path / "b.zarr")
    assert "no export of diskbuf wrote" not in message
    assert "(--like STORE)" in message
    assert "ColumnMap" not in message
    words = ["import", tmp_path / "a.csv", tmp_path / "b.zarr"]
    assert "Add --format log, or leave it out" in fail(capsys, *words, "--context", "age")
    message = fail(capsys, *words, "--mapping", tmp_path / "no.toml", code=1)
    assert "a mapping must be a TOML or JSON file, got" in message
    table = pa.table({"observation": [1.0], "action": [1], "reward": [1.0], "terminated": [True]})
    pq.write_table(table, tmp_path / "t.parquet")
    words = ["import", tmp_path / "t.parquet", tmp_path / "t.zarr", "--trajectory"]
    assert "--final-observation last does without" in fail(capsys, *words)
    succeed(capsys, *words, "--final-observation", "last")
    words = ["import", tmp_path / "t.parquet", tmp_path / "u.zarr", "--map", "a=action"]
    assert "Add --map LEAF=COLUMN, --drop COLUMN or --only-mapped" in fail(capsys, *words)


def test_a_lane_that_is_not_there_is_a_fault_as_for_head(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fail(capsys, "head", store, "--lane", 7, code=1)
    assert "lanes must be from 0 to 1" in fail(capsys, "export", store, tmp_path / "a.csv", "--lane", 7, code=1)


def test_bounds_are_given_by_leaf(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.table({"x": [0.5, 1.5], "y": [1.0, 2.0], "a": [0, 2**60]}), tmp_path / "a.parquet")
    words = ["import", tmp_path / "a.parquet", tmp_path / "b.zarr", "--map", "observation=x,y", "--map", "action=a"]
    message = fail(capsys, *words, "--bounds", f"action=0:{2**60 - 1}", code=1)
    assert f"row 1 of {tmp_path / 'a.parquet'} in column 'a' has {2**60}" in message
    assert "--bounds must be LEAF=LOW:HIGH, got action=0" in fail(capsys, *words, "--bounds", "action=0")
    succeed(capsys, *words, "--bounds", f"action=0:{2**60}", "--bounds", "observation=-1.5:inf")
    with diskbuf.open(tmp_path / "b.zarr") as buffer:
        assert buffer.data_spec == {
            "observation": BoundedArraySpec([2], "float64", -1.5, np.inf),
            "action": BoundedArraySpec([], "int64", 0, 2**60),
        }


def test_what_an_export_loses_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with suite_gym.wrap(makers([[5], [5]], ends=["terminated"])) as env:
        policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=0)
        where = tmp_path / "a.zarr"
        with UniformReplayBuffer(policy.trajectory_spec, 2, None, path=where, metadata={"run": 1}) as buffer:
            DynamicStepDriver(env, policy, observers=[buffer.add_batch], num_steps=18).run()
    lost = ["note: 2 lanes became one, episode by episode.", "note: the store's metadata was left out."]
    out = succeed(capsys, "export", where, tmp_path / "deep" / "er" / "a-v0", "--format", "minari")
    assert out.splitlines()[1:] == ["note: 2 open episodes were cut by a step, and count as truncated.", *lost]
    report = json.loads(succeed(capsys, "export", where, tmp_path / "a.rlds", "--json"))
    assert report["notes"][-2:] == [note.removeprefix("note: ").removesuffix(".") for note in lost]
    out = succeed(capsys, "export", where, tmp_path / "a.parquet", "--episode", 0, "--episode", 1)
    assert "note: the chosen episodes are of a store of 2 lanes, so import can't restore it" in out
    out = succeed(capsys, "export", where, tmp_path / "a.csv", "--flatten")
    assert "note: it doesn't say what the leaves were, so import it with --like STORE." in out
    assert "note" not in succeed(capsys, "export", where, tmp_path / "b.parquet")
    out = succeed(capsys, "export", where, tmp_path / "c.parquet", "-c", "reward", "-c", "action")
    assert "'next_step_type', 'discount' are not in it, so import must --map its columns." in out


def test_folders_are_known_by_what_is_in_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with suite_gym.wrap(makers([[3]], ends=["terminated"])) as env:
        policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=0)
        with UniformReplayBuffer(policy.trajectory_spec, 1, None, path=tmp_path / "a.zarr") as buffer:
            DynamicStepDriver(env, policy, observers=[buffer.add_batch], num_steps=6).run()
    for format_, name in (("rlds", "steps"), ("minari", "a-v0")):
        succeed(capsys, "export", tmp_path / "a.zarr", tmp_path / name, "--format", format_)
        report = json.loads(succeed(capsys, "import", tmp_path / name, tmp_path / f"{format_}.zarr", "--json"))
        assert (report["format"], report["episodes"]) == (format_, 2)
    succeed(capsys, "import", tmp_path / "steps" / "steps.tfrecord", tmp_path / "c.zarr")


@pytest.mark.parametrize(
    ("name", "arrays", "format_"),
    [
        ("a.hdf5", ("observations", "actions", "rewards", "terminals", "timeouts"), "d4rl"),
        ("a.npz", ("observations", "actions", "rewards", "dones", "pos", "full"), "sb3"),
    ],
)
def test_files_of_other_programs_are_known_by_their_arrays(
    tmp_path: Path, name: str, arrays: tuple[str, ...], format_: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name.endswith(".npz"):
        np.savez(tmp_path / name, **{array: np.zeros(3) for array in arrays})
    else:
        with h5py.File(tmp_path / name, "w") as file:
            for array in arrays:
                file[array] = np.zeros(3)
    message = fail(capsys, "import", tmp_path / name, tmp_path / "a.zarr")
    assert f"It looks like the format {format_} (--format {format_})" in message
