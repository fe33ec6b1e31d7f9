"""Bandit logs: what is read becomes what is stored, what is wrong is named, and nothing is ever half there."""

import datetime as dt
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

import diskbuf
from diskbuf import trajectories
from diskbuf.bandits.log_reader import LogReader
from diskbuf.bandits.logs import (
    Categories,
    Hashed,
    LogColumns,
    LogEncoder,
    Numbers,
    Vector,
    export_log,
    import_log,
    join_rewards,
    text_sources,
    time_range,
)

COLUMNS = LogColumns(
    context=["age", "country"],
    action="item",
    reward="click",
    propensity="probability",
    timestamp="at",
    key="id",
    position="slot",
)
DAY = 86_400_000_000
START = 19_700 * DAY
COUNTRIES = ["de", "es", "fr"]


@pytest.fixture(autouse=True)
def nothing_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test here cuts the power, and syncing would take most of their time."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None, raising=False)


def some_log(rows: int = 100, *, seed: int = 0) -> pa.Table:
    """A log of three countries and four arms, a row a thousand seconds."""
    rng = np.random.default_rng(seed)
    at = START + np.arange(rows) * 1_000_000_000 + rng.integers(0, 1000, rows)
    return pa.table(
        {
            "id": np.arange(rows) * 7,
            "at": pa.array(at).cast(pa.timestamp("us", "UTC")),
            "age": rng.normal(40, 9, rows).astype(np.float32),
            "country": np.array(COUNTRIES)[np.concatenate(([0, 1, 2], rng.integers(0, 3, rows)))[:rows]],
            "item": np.concatenate(([0, 1, 2, 3], rng.integers(0, 4, rows)))[:rows],
            "slot": rng.integers(1, 4, rows),
            "click": rng.integers(0, 2, rows).astype(np.float32),
            "probability": rng.choice(np.array([0.25, 0.5, 1.0], np.float32), rows),
        }
    )


def written(table: pa.Table, path: Path) -> Path:
    """Writes a table by Arrow alone, or by json where Arrow can't."""
    if path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    elif path.suffix == ".parquet":
        pa.parquet.write_table(table, path, row_group_size=37)
    elif path.suffix == ".arrow":
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    else:
        rows = [
            {k: v.isoformat() if isinstance(v, dt.datetime) else v for k, v in row.items()} for row in table.to_pylist()
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: Any) -> Any:
    with diskbuf.open(path) as buffer:
        return trajectories.Trajectory(*buffer.gather_all())


def assert_holds(path: Any, table: pa.Table) -> None:
    """Checks a store against a table of `some_log`, by plain NumPy."""
    rows = rows_of(path)
    country = table["country"].to_numpy()
    context = np.stack([table["age"].to_numpy(), *(country == c for c in COUNTRIES)], axis=1).astype(np.float32)
    np.testing.assert_array_equal(rows.observation[0], context)
    np.testing.assert_array_equal(rows.action[0], table["item"].to_numpy())
    np.testing.assert_array_equal(rows.reward[0], table["click"].to_numpy())
    assert (rows.step_type == 0).all()
    assert (rows.next_step_type == 2).all()
    assert (rows.discount == 0).all()
    for leaf, column in (("propensity", "probability"), ("key", "id"), ("position", "slot")):
        np.testing.assert_array_equal(rows.policy_info[leaf][0], table[column].to_numpy())
    np.testing.assert_array_equal(rows.policy_info["timestamp"][0], table["at"].cast(pa.int64()).to_numpy())


def left_behind(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


# ---- sources


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "arrow"])
def test_a_file_of_each_format_becomes_the_same_store(tmp_path: Path, suffix: str) -> None:
    table = some_log()
    file = written(table, tmp_path / f"log.{suffix}")
    report = import_log(file, tmp_path / "log.zarr", COLUMNS)
    assert_holds(tmp_path / "log.zarr", table)
    assert (report.rows, report.first_id, report.next_id) == (100, 0, 100)
    assert report.context == {"age": (0, 1), "country": (1, 4)}
    assert report.support == np.bincount(table["item"].to_numpy()).tolist()
    assert left_behind(tmp_path) == sorted([file.name, "log.zarr"])


def test_tables_readers_and_frames_become_the_same_store(tmp_path: Path) -> None:
    table = some_log()
    batches = table.to_batches(max_chunksize=17)
    sources = {
        "table": table,
        "batch": table.combine_chunks().to_batches()[0],
        "reader": pa.RecordBatchReader.from_batches(table.schema, iter(batches)),
        "dict": {name: table[name].to_numpy() for name in table.column_names},
    }
    for name, source in sources.items():
        unit = {"time_unit": "us"} if name == "dict" and table["at"].to_numpy().dtype.kind == "i" else {}
        import_log(source, tmp_path / name, COLUMNS, **unit)
        assert_holds(tmp_path / name, table)


def test_a_pandas_frame_is_imported_by_its_labels_not_its_codes(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = some_log()
    frame = table.to_pandas()
    frame["country"] = pandas.Categorical(frame["country"], categories=["fr", "xx", "es", "de"])
    import_log(frame, tmp_path / "log.zarr", COLUMNS, encodings={"country": Categories(COUNTRIES)})
    assert_holds(tmp_path / "log.zarr", table)


def test_a_polars_frame_is_imported(tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    table = some_log()
    import_log(polars.from_arrow(table), tmp_path / "log.zarr", COLUMNS)
    assert_holds(tmp_path / "log.zarr", table)


def test_several_files_and_urls_are_read_one_after_the_other(tmp_path: Path) -> None:
    import fsspec

    table = some_log()
    urls = []
    for number, suffix in enumerate(["csv", "jsonl", "parquet", "arrow"]):
        file = written(table.slice(number * 25, 25), tmp_path / f"{number}.{suffix}")
        urls.append(f"memory://bandit-logs/{file.name}")
        with fsspec.open(urls[-1], "wb") as target:
            target.write(file.read_bytes())
    import_log(urls, tmp_path / "log.zarr", COLUMNS, storage_options={})
    assert_holds(tmp_path / "log.zarr", table)


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    import gzip

    table = some_log()
    plain = written(table, tmp_path / "log.csv")
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    import_log(tmp_path / "log.csv.gz", tmp_path / "log.zarr", COLUMNS)
    assert_holds(tmp_path / "log.zarr", table)


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(diskbuf.OptionError, match="source must be a path, a URL"):
        import_log(3, tmp_path / "log.zarr", COLUMNS)
    with pytest.raises(FileNotFoundError, match="a source must be a file"):
        import_log(tmp_path / "nothing.csv", tmp_path / "log.zarr", COLUMNS)
    with pytest.raises(diskbuf.OptionError, match="format must be given where the suffix doesn't tell it"):
        import_log(tmp_path / "log.txt", tmp_path / "log.zarr", COLUMNS)
    with pytest.raises(diskbuf.OptionError, match=r"columns must be those of the log, .* got \['clicks'\] besides"):
        import_log(some_log(), tmp_path / "log.zarr", LogColumns(action="item", reward="clicks"))
    assert left_behind(tmp_path) == []


def test_a_log_without_contexts_or_propensities_has_none(tmp_path: Path) -> None:
    report = import_log(some_log(), tmp_path / "log.zarr", LogColumns(action="item", reward="click"))
    rows = rows_of(tmp_path / "log.zarr")
    assert rows.observation.shape == (1, 100)
    assert rows.policy_info == ()
    assert report.propensity is None
    assert "weighting estimators can't be used" in str(report)
    with LogReader(tmp_path / "log.zarr") as log:
        assert not log.has_propensity
        assert sum(len(block) for block in log.blocks()) == 100


def test_a_log_in_a_file_trains_a_policy(tmp_path: Path) -> None:
    from diskbuf.bandits.agents import LinearUCBAgent

    rng = np.random.default_rng(3)
    age, arm = rng.normal(size=600).astype(np.float32), rng.integers(0, 2, 600)
    reward = np.where(arm == 1, age, -age)
    table = pa.table({"age": age, "item": arm, "reward": reward, "probability": np.full(600, 0.5)})
    columns = LogColumns(context=["age"], action="item", reward="reward", propensity="probability")
    import_log(written(table, tmp_path / "log.csv"), tmp_path / "log.zarr", columns)
    with diskbuf.open(tmp_path / "log.zarr") as log:
        spec = log.data_spec
        agent = LinearUCBAgent(trajectories.time_step_spec(spec.observation), spec.action, alpha=0.0)
        agent.train(log.gather_all())
    chosen = agent.policy.probabilities(np.array([[1.0], [-1.0]], np.float32)).argmax(axis=1)
    assert chosen.tolist() == [1, 0]


# ---- encodings and labels


def test_context_columns_are_encoded_in_the_order_given(tmp_path: Path) -> None:
    table = pa.table(
        {
            "age": [1.5, 2.5, 3.5],
            "country": ["fr", "de", "fr"],
            "user": ["u1", "u2", "u1"],
            "vector": pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float64())),
            "is_new": [True, False, True],
            "item": [1, 0, 1],
            "reward": [0.5, 1.0, 0.0],
        }
    )
    names = ["vector", "country", "user", "is_new", "age"]
    columns = LogColumns(context=names, action="item")
    report = import_log(table, tmp_path / "log.zarr", columns, encodings={"user": Hashed(4)})
    assert report.context == {"vector": (0, 2), "country": (2, 4), "user": (4, 8), "is_new": (8, 9), "age": (9, 10)}
    rows = rows_of(tmp_path / "log.zarr").observation[0]
    bucket = [Hashed(4).bucket(user) for user in ("u1", "u2", "u1")]
    want = [
        [*vector, *country, *np.eye(4)[place], is_new, age]
        for vector, country, place, is_new, age in zip(
            [[1, 2], [3, 4], [5, 6]], [[0, 1], [1, 0], [0, 1]], bucket, [1, 0, 1], [1.5, 2.5, 3.5], strict=True
        )
    ]
    np.testing.assert_array_equal(rows, np.array(want, np.float32))


def test_the_bucket_of_a_text_is_the_same_in_every_process() -> None:
    # BLAKE2b of 8 bytes, from b2sum -l 64; little-endian modulo 1000.
    assert Hashed(1000).bucket("abc") == int.from_bytes(bytes.fromhex("d8bb14d833d59559"), "little") % 1000


def test_labels_become_arms_and_are_recorded(tmp_path: Path) -> None:
    table = pa.table({"item": ["red", "blue", "red", "green"], "reward": [1.0, 2.0, 3.0, 4.0]})
    found = import_log(table, tmp_path / "found.zarr", LogColumns(action="item"))
    assert found.labels == ["blue", "green", "red"]
    assert found.support == [1, 1, 2]
    assert rows_of(tmp_path / "found.zarr").action[0].tolist() == [2, 0, 2, 1]
    given = import_log(
        table, tmp_path / "given.zarr", LogColumns(action="item"), actions=["red", "green", "blue", "pink"]
    )
    assert given.support == [2, 1, 1, 0]
    assert rows_of(tmp_path / "given.zarr").action[0].tolist() == [0, 2, 0, 1]


def test_ints_can_be_labels(tmp_path: Path) -> None:
    table = pa.table({"item": [900, 17, 900], "reward": [1.0, 2.0, 3.0]})
    report = import_log(table, tmp_path / "log.zarr", LogColumns(action="item"), actions=[17, 900])
    assert (report.labels, report.support) == ([17, 900], [1, 2])


def test_too_many_categories_ask_for_a_hash(tmp_path: Path) -> None:
    table = pa.table({"user": [f"u{n}" for n in range(1001)], "item": [0] * 1001, "reward": [0.0] * 1001})
    with pytest.raises(diskbuf.OptionError, match=r"column 'user' must have at most 1000 categories .*Hashed"):
        import_log(table, tmp_path / "log.zarr", LogColumns(context=["user"], action="item"))
    assert left_behind(tmp_path) == []


def test_a_later_import_applies_the_recorded_encodings(tmp_path: Path) -> None:
    table = some_log()
    import_log(table.slice(0, 60), tmp_path / "log.zarr", COLUMNS)
    later = table.slice(60, 40)
    only_french = later.filter(pa.compute.equal(later["country"], "fr"))
    report = import_log(only_french, tmp_path / "log.zarr", COLUMNS, append=True)
    assert (report.first_id, report.rows) == (60, len(only_french))
    assert_holds(tmp_path / "log.zarr", pa.concat_tables([table.slice(0, 60), only_french]))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_an_unknown_category_is_refused_unless_there_is_a_number_for_others(tmp_path: Path, suffix: str) -> None:
    table = some_log()
    import_log(table, tmp_path / "log.zarr", COLUMNS)
    strange = table.slice(99).set_column(3, "country", pa.array(["it"]))
    file = written(strange, tmp_path / f"later.{suffix}")
    with pytest.raises(
        diskbuf.SpecError, match=r"one of its 3 recorded categories, got 'it' in (line 2|row 1) of later"
    ):
        import_log(file, tmp_path / "log.zarr", COLUMNS, append=True, order="as_is")
    assert_holds(tmp_path / "log.zarr", table)

    import_log(
        [written(table, tmp_path / "a.csv"), file],
        tmp_path / "others.zarr",
        COLUMNS,
        order="as_is",
        encodings={"country": Categories(["de", "es"], other=True)},
    )
    assert rows_of(tmp_path / "others.zarr").observation[0, -1, 1:].tolist() == [0, 0, 1]


def test_two_logs_with_other_codes_for_the_same_items_are_refused_unless_a_mapping_is_given(tmp_path: Path) -> None:
    columns = LogColumns(context=["color"], action="item")
    first = pa.table({"color": ["red", "blue"], "item": ["shirt", "shoe"], "reward": [1.0, 0.0]})
    import_log(first, tmp_path / "log.zarr", columns)
    coded = pa.table({"color": ["R", "B", "B"], "item": ["0", "1", "0"], "reward": [1.0, 0.0, 1.0]})
    with pytest.raises(diskbuf.SpecError, match=r"got '?R'?.* in row 1 .*mappings={'color'"):
        import_log(coded, tmp_path / "log.zarr", columns, append=True)
    colors = {"R": "red", "B": "blue"}
    with pytest.raises(
        diskbuf.SpecError, match=r"one of the 2 labels of the arms, got '0' in row 1 .*mappings={'item'"
    ):
        import_log(coded, tmp_path / "log.zarr", columns, append=True, mappings={"color": colors})
    as_ints = coded.set_column(1, "item", pa.array([0, 1, 0]))
    with pytest.raises(diskbuf.SpecError, match="one of the 2 labels of the arms, got 0 in row 1"):
        import_log(as_ints, tmp_path / "log.zarr", columns, append=True, mappings={"color": colors})
    assert rows_of(tmp_path / "log.zarr").action[0].tolist() == [0, 1]

    # The other log counts shoes as 0.
    mappings = {"color": colors, "item": {0: "shoe", 1: "shirt"}}
    import_log(as_ints, tmp_path / "log.zarr", columns, append=True, mappings=mappings)
    rows = rows_of(tmp_path / "log.zarr")
    assert rows.action[0].tolist() == [0, 1, 1, 0, 1]
    assert rows.observation[0].tolist() == [[0, 1], [1, 0], [0, 1], [1, 0], [1, 0]]


def test_other_encodings_labels_or_columns_than_the_recorded_are_refused(tmp_path: Path) -> None:
    table = some_log()
    import_log(table, tmp_path / "log.zarr", COLUMNS, num_actions=4)
    for wrong, said in (
        ({"encodings": {"country": Categories(["fr", "es", "de"])}}, "encoding of 'country'"),
        ({"encodings": {"country": Hashed(3)}}, "encoding of 'country'"),
        ({"num_actions": 5}, "num_actions: the store has 4, asked for is 5"),
        ({"actions": [0, 1, 2, 3]}, "actions: the store has None"),
        ({"columns": LogColumns(context=["country", "age"], action="item", reward="click")}, "context: the store has"),
    ):
        with pytest.raises(diskbuf.StoreMismatchError, match=said):
            import_log(table, tmp_path / "log.zarr", **({"columns": COLUMNS} | wrong), append=True)
    with pytest.raises(diskbuf.StoreExistsError, match="append=True to add to it"):
        import_log(table, tmp_path / "log.zarr", COLUMNS)
    assert_holds(tmp_path / "log.zarr", table)


def test_a_store_that_no_import_made_is_not_added_to(tmp_path: Path) -> None:
    with diskbuf.UniformReplayBuffer({"x": diskbuf.ArraySpec([], "float32")}, path=tmp_path / "log.zarr"):
        pass
    with pytest.raises(diskbuf.StoreMismatchError, match="it records no log"):
        import_log(some_log(), tmp_path / "log.zarr", COLUMNS, append=True)


# ---- lines that can't be read

BROKEN_CSV = {
    "1,2024-01-01,40,de,0,1,1": (4, "must have 8 columns, got 7"),
    "1,2024-01-01,forty,de,0,1,1,0.5": (4, "column 'age' must hold a number in line 4 of log.csv, got 'forty'"),
    "1,2024-01-01,40,de,one,1,1,0.5": (4, "column 'item' must hold an int in line 4 of log.csv, got 'one'"),
    "1,2024-13-01,40,de,0,1,1,0.5": (4, "column 'at' must hold a moment, got '2024-13-01' in line 4"),
    "1,2024-01-01,40,de,-1,1,1,0.5": (4, "column 'item' must hold actions from 0 to 3, got -1 in line 4"),
    "1,2024-01-01,40,de,4,1,1,0.5": (4, "column 'item' must hold actions from 0 to 3, got 4 in line 4"),
    "1,2024-01-01,40,de,,1,1,0.5": (4, "column 'item' must hold an int, got None in line 4"),
    "x,2024-01-01,40,de,0,1,1,0.5": (4, "column 'id' must hold an int in line 4 of log.csv, got 'x'"),
}
HEADER = "id,at,age,country,item,slot,click,probability"
GOOD = ["0,2024-01-01,40,de,0,1,1,0.5", "1,2024-01-02,41,es,1,1,0,0.5", "2,2024-01-03,42,fr,3,1,1,1"]


@pytest.mark.parametrize("line", BROKEN_CSV)
def test_a_line_that_cannot_be_read_is_named_and_nothing_is_imported(tmp_path: Path, line: str) -> None:
    # A blank line counts as a line, though not as a row.
    file = tmp_path / "log.csv"
    file.write_text("\n".join([HEADER, GOOD[0], "", line, GOOD[1]]) + "\n")
    number, said = BROKEN_CSV[line]
    with pytest.raises(diskbuf.SpecError, match=re.escape(said)) as caught:
        import_log(file, tmp_path / "log.zarr", COLUMNS, num_actions=4)
    assert f"line {number}" in str(caught.value)
    assert "strict=False" in str(caught.value)
    assert left_behind(tmp_path) == ["log.csv"]


def test_lenient_imports_count_what_cannot_be_read_and_list_the_first_few(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("\n".join([HEADER, GOOD[0], *BROKEN_CSV, GOOD[1], GOOD[2]]) + "\n")
    report = import_log(file, tmp_path / "log.zarr", COLUMNS, num_actions=4, strict=False)
    assert (report.rows, report.malformed) == (3, len(BROKEN_CSV))
    assert len(report.malformed_examples) == 5
    assert "line 3" in "".join(report.malformed_examples)
    assert rows_of(tmp_path / "log.zarr").observation[0, :, 0].tolist() == [40, 41, 42]
    assert str(report).count("must") == 5


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_what_came_before_a_line_that_cannot_be_read_is_there_once(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_sources, "_TEXT_BYTES", 2**12)
    table = some_log(500)
    first = written(table.slice(0, 200), tmp_path / f"first.{suffix}")
    second = written(table.slice(200), tmp_path / f"second.{suffix}")
    with second.open("a") as file:
        file.write("broken\n")
    report = import_log([first, second], tmp_path / "log.zarr", COLUMNS, strict=False)
    assert (report.rows, report.malformed, sum(report.support)) == (500, 1, 500)
    assert_holds(tmp_path / "log.zarr", table)


def test_a_value_with_a_line_break_does_not_shift_the_lines(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text('note,item,reward\n"two\nlines",0,1\nplain,1,?\n')
    with pytest.raises(diskbuf.SpecError, match=r"column 'reward' must hold a number in line 4 of log.csv, got '\?'"):
        import_log(file, tmp_path / "log.zarr", LogColumns(context=["note"], action="item"))


def test_a_line_of_json_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    good = '{"item": 0, "reward": 1.5, "x": [1, 2]}'
    columns = LogColumns(context=["x"], action="item")
    for line, said in (
        ("{broken", "line 3 of log.jsonl must be a JSON object"),
        ("[1]", "line 3 of log.jsonl must be a JSON object"),
        ('{"item": "a", "reward": 1, "x": [1, 2]}', "column 'item' must hold an int in line 3 of log.jsonl, got 'a'"),
        (
            '{"item": 0, "reward": "1", "x": [1, 2]}',
            "column 'reward' must hold a number in line 3 of log.jsonl, got '1'",
        ),
        ('{"item": 0, "reward": 1, "x": [1]}', "column 'x' must hold lists of 2 numbers, got [1.0] in line 3"),
        ('{"reward": 1, "x": [1, 2]}', "column 'item' must hold an int, got None in line 3"),
    ):
        file.write_text(f"{good}\n\n{line}\n{good}" + "\n")
        with pytest.raises(diskbuf.SpecError, match=re.escape(said)):
            import_log(file, tmp_path / "log.zarr", columns)
        report = import_log(file, tmp_path / f"{abs(hash(line))}.zarr", columns, strict=False)
        assert (report.rows, report.malformed) == (2, 1)


def test_a_file_that_is_not_of_its_format_is_refused(tmp_path: Path) -> None:
    for suffix in ("parquet", "arrow"):
        file = tmp_path / f"log.{suffix}"
        file.write_text("nothing of the kind" * 10)
        with pytest.raises(diskbuf.SpecError, match=f"log.{suffix} must be a file of"):
            import_log(file, tmp_path / "log.zarr", COLUMNS)


def test_a_log_without_rows_is_refused(tmp_path: Path) -> None:
    columns = LogColumns(action="item")
    for text, said in (
        ("", "must have a header line"),
        ("item,reward\n", "a log must have at least one row, got none"),
    ):
        (tmp_path / "log.csv").write_text(text)
        with pytest.raises(diskbuf.SpecError, match=said):
            import_log(tmp_path / "log.csv", tmp_path / "log.zarr", columns)
    with pytest.raises(diskbuf.SpecError, match="a log must have at least one row, got none"):
        import_log(some_log().slice(0, 0), tmp_path / "log.zarr", LogColumns(action="item", reward="click"))
    assert left_behind(tmp_path) == ["log.csv"]


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_bytes(b"c,item,reward\nde,0,1\n\xff\xfe,1,0\n")
    with pytest.raises(diskbuf.SpecError, match="column 'c' must hold text in line 3"):
        import_log(file, tmp_path / "log.zarr", LogColumns(context=["c"], action="item"))


# ---- values


@pytest.mark.parametrize("value", [0.0, -0.25, 1.5, np.nan, None])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_propensity_outside_of_its_range_is_rejected_dropped_or_kept(
    tmp_path: Path, value: float | None, suffix: str
) -> None:
    table = some_log(20)
    propensity = table["probability"].to_pylist()
    propensity[5] = value
    table = table.set_column(7, "probability", pa.array(propensity, pa.float32()))
    file = written(table, tmp_path / f"log.{suffix}")
    with pytest.raises(
        diskbuf.SpecError, match=r"'policy_info/propensity' must be above 0 .* in (line 7|row 6) of log"
    ):
        import_log(file, tmp_path / "log.zarr", COLUMNS)
    dropped = import_log(file, tmp_path / "dropped.zarr", COLUMNS, invalid="drop")
    assert (dropped.rows, sum(dropped.dropped.values()), dropped.propensity.out_of_range) == (19, 1, 1)
    kept = import_log(file, tmp_path / "kept.zarr", COLUMNS, invalid="keep")
    assert (kept.rows, sum(kept.kept.values()), kept.propensity.out_of_range) == (20, 1, 1)
    stored = rows_of(tmp_path / "kept.zarr").policy_info["propensity"][0, 5]
    np.testing.assert_equal(stored, np.float32(np.nan if value is None else value))


def test_a_small_propensity_is_kept_as_it_is(tmp_path: Path) -> None:
    table = pa.table({"item": [0, 0], "reward": [1.0, 1.0], "p": [1e-12, 1.0]})
    report = import_log(table, tmp_path / "log.zarr", LogColumns(action="item", propensity="p"))
    assert report.propensity.minimum == pytest.approx(1e-12)
    assert report.propensity.out_of_range == 0


@pytest.mark.parametrize("column", ["click", "age"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_reward_or_context_that_is_not_finite_is_rejected_dropped_or_kept(
    tmp_path: Path, column: str, value: float
) -> None:
    table = some_log(20)
    numbers = table[column].to_numpy().copy()
    numbers[3] = value
    table = table.set_column(table.column_names.index(column), column, pa.array(numbers))
    leaf = {"click": "reward", "age": "observation"}[column]
    with pytest.raises(
        diskbuf.SpecError, match=rf"leaf '{leaf}' must be finite, got .* in row 4 of the table"
    ) as caught:
        import_log(table, tmp_path / "log.zarr", COLUMNS)
    assert caught.value.path == leaf
    dropped = import_log(table, tmp_path / "dropped.zarr", COLUMNS, invalid="drop")
    assert (dropped.rows, dropped.dropped) == (19, {f"{leaf} isn't finite": 1})
    kept = import_log(table, tmp_path / "kept.zarr", COLUMNS, invalid="keep")
    assert (kept.rows, kept.kept) == (20, {f"{leaf} isn't finite": 1})
    assert kept.not_a_number == ({leaf: 1} if np.isnan(value) else {})


def test_a_missing_reward_is_pending_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("item,reward\n0,1.5\n1,\n0,2\n")
    with pytest.raises(diskbuf.SpecError, match=r"leaf 'reward' must be finite, got nan in line 3 of log\.csv"):
        import_log(file, tmp_path / "log.zarr", LogColumns(action="item"))
    report = import_log(file, tmp_path / "log.zarr", LogColumns(action="item"), pending=True)
    assert report.pending == 1
    np.testing.assert_array_equal(rows_of(tmp_path / "log.zarr").reward[0], [1.5, np.nan, 2])


# ---- time


def test_moments_of_every_kind_become_microseconds(tmp_path: Path) -> None:
    moment = dt.datetime(2024, 3, 1, 12, 30, 15, 250_000, tzinfo=dt.UTC)
    want = int(moment.timestamp()) * 1_000_000 + 250_000
    east = moment.astimezone(dt.timezone(dt.timedelta(hours=2)))
    seconds = moment.timestamp()
    for number, (column, unit) in enumerate(
        [
            (pa.array([moment]), None),
            (pa.array([moment.replace(tzinfo=None)], pa.timestamp("ns")), None),
            (pa.array([moment.isoformat()]), None),
            (pa.array([moment.replace(tzinfo=None).isoformat(" ")]), None),
            (pa.array([east.isoformat()]), None),
            (pa.array([seconds]), "s"),
            (pa.array([round(seconds * 1000)]), "ms"),
            (pa.array([want]), "us"),
            (pa.array([want * 1000 + 999]), "ns"),
        ]
    ):
        table = pa.table({"at": column, "item": [0], "reward": [1.0]})
        path = tmp_path / f"{number}.zarr"
        import_log(table, path, LogColumns(action="item", timestamp="at"), time_unit=unit)
        assert rows_of(path).policy_info["timestamp"].tolist() == [[want]], number
        if number:
            file = written(table, tmp_path / f"{number}.csv")
            import_log(file, tmp_path / f"{number}-csv.zarr", LogColumns(action="item", timestamp="at"), time_unit=unit)
            assert rows_of(tmp_path / f"{number}-csv.zarr").policy_info["timestamp"].tolist() == [[want]], number


def test_numbers_as_moments_need_a_unit(tmp_path: Path) -> None:
    table = pa.table({"at": [5], "item": [0], "reward": [1.0]})
    with pytest.raises(diskbuf.OptionError, match=r"time_unit must be .* got None"):
        import_log(table, tmp_path / "log.zarr", LogColumns(action="item", timestamp="at"))


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_timestamps_that_go_back_are_named_sorted_or_kept(tmp_path: Path, suffix: str) -> None:
    table = some_log()
    shuffled = table.take(pa.array([*range(1, 50), 0, *range(50, 100)]))
    file = written(shuffled, tmp_path / f"log.{suffix}")
    with pytest.raises(diskbuf.SpecError, match=r"timestamps must not go back, got .* in (line 51|row 50) of log"):
        import_log(file, tmp_path / "log.zarr", COLUMNS)
    assert not (tmp_path / "log.zarr").exists()
    import_log(file, tmp_path / "sorted.zarr", COLUMNS, order="sort")
    assert_holds(tmp_path / "sorted.zarr", table)
    report = import_log(file, tmp_path / "kept.zarr", COLUMNS, order="as_is")
    assert_holds(tmp_path / "kept.zarr", shuffled)
    assert report.is_sorted is False
    with pytest.raises(diskbuf.SpecError, match="imported with order='as_is'"):
        time_range(tmp_path / "kept.zarr", None, None)


def test_rows_from_before_the_last_of_the_store_are_refused(tmp_path: Path) -> None:
    table = some_log()
    import_log(table.slice(50), tmp_path / "log.zarr", COLUMNS)
    for order in ("check", "sort"):
        with pytest.raises(diskbuf.SpecError, match="the last of the store"):
            import_log(table.slice(0, 50), tmp_path / "log.zarr", COLUMNS, append=True, order=order)
    import_log(table.slice(0, 50), tmp_path / "log.zarr", COLUMNS, append=True, order="as_is")
    with pytest.raises(diskbuf.SpecError, match="order='as_is'"):
        time_range(tmp_path / "log.zarr", None, None)


def test_one_day_is_readable_alone(tmp_path: Path) -> None:
    table = some_log(300)
    import_log(table, tmp_path / "log.zarr", COLUMNS)
    times = table["at"].cast(pa.int64()).to_numpy()
    day = dt.date(1970, 1, 1) + dt.timedelta(days=19_701)
    first_id, next_id = time_range(tmp_path / "log.zarr", day, day + dt.timedelta(days=1))
    inside = np.flatnonzero((times >= START + DAY) & (times < START + 2 * DAY))
    assert (first_id, next_id) == (inside[0], inside[-1] + 1)
    with LogReader(tmp_path / "log.zarr", first_id=first_id, next_id=next_id) as log:
        found = np.concatenate([rows.info["timestamp"] for rows in log.blocks(info=["timestamp"])])
    np.testing.assert_array_equal(found, times[inside])
    assert time_range(tmp_path / "log.zarr", None, None) == (0, 300)
    assert time_range(tmp_path / "log.zarr", int(times[7]), int(times[8])) == (7, 8)
    assert time_range(tmp_path / "log.zarr", "1999-01-01", "1999-01-02") == (0, 0)
    with pytest.raises(diskbuf.OptionError, match="end must not be before start"):
        time_range(tmp_path / "log.zarr", 2, 1)


# ---- all or nothing


def test_the_same_rows_are_not_added_twice_unless_asked(tmp_path: Path) -> None:
    table = some_log()
    import_log(table.slice(0, 50), tmp_path / "log.zarr", COLUMNS)
    for _ in range(2):  # also once they were added
        with pytest.raises(diskbuf.OptionError, match="got those of ids 0 to 50 again"):
            import_log(
                written(table.slice(0, 50), tmp_path / "log.csv"),
                tmp_path / "log.zarr",
                COLUMNS,
                append=True,
                order="as_is",
            )
    import_log(table.slice(50), tmp_path / "log.zarr", COLUMNS, append=True)
    with pytest.raises(diskbuf.OptionError, match="got those of ids 50 to 100 again"):
        import_log(table.slice(50), tmp_path / "log.zarr", COLUMNS, append=True, order="as_is")
    assert_holds(tmp_path / "log.zarr", table)
    import_log(table.slice(50), tmp_path / "log.zarr", COLUMNS, append=True, order="as_is", repeat=True)
    assert rows_of(tmp_path / "log.zarr").reward.shape == (1, 150)


KILLED = """
    import os, signal, sys
    import pyarrow as pa, pyarrow.parquet
    from diskbuf.bandits.logs import importing, import_log, join_rewards
    from diskbuf.store import staging
    from test_bandit_logs import COLUMNS
    where, path, source = sys.argv[1:]
    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)
    if where == "reading":
        count = [0]
        take = importing._Import._take_block
        def dying(self, block, **options):
            take(self, block, **options)
            die()
        importing._Import._take_block = dying
    elif where == "before":
        staging.Staging.move_into_place = die
        importing._Import._record = die
    elif where == "after":
        importing._Import._report = die
    import_log(source, path, COLUMNS, append=True)
"""


@pytest.mark.parametrize("where", ["reading", "before", "after"])
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("is_new", [True, False])
def test_an_import_that_is_killed_leaves_all_or_nothing_and_can_be_repeated(
    tmp_path: Path, where: str, suffix: str, is_new: bool
) -> None:
    table = some_log()
    path = tmp_path / "log.zarr"
    if not is_new:
        import_log(table.slice(0, 40), path, COLUMNS)
    rest = table if is_new else table.slice(40)
    source = written(rest, tmp_path / f"rest.{suffix}")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    code = textwrap.dedent(KILLED)
    run = subprocess.run(
        [sys.executable, "-c", code, where, str(path), str(source)], env=environment, check=False, capture_output=True
    )
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    if where == "after":
        assert_holds(path, table)
        with pytest.raises(diskbuf.OptionError, match="an import had come to its end"):
            import_log(source, path, COLUMNS, append=True, order="as_is")
    else:
        assert is_new != path.exists()
        if not is_new:
            assert_holds(path, table.slice(0, 40))
        import_log(source, path, COLUMNS, append=True)
    assert_holds(path, table)
    assert left_behind(tmp_path) == ["log.zarr", f"rest.{suffix}"]


def test_one_process_imports_at_a_time(tmp_path: Path) -> None:
    table = some_log()
    import_log(table, tmp_path / "log.zarr", COLUMNS)
    before = rows_of(tmp_path / "log.zarr")

    def batches() -> Any:
        with pytest.raises(diskbuf.StoreLockedError, match="has it open"):
            import_log(table, tmp_path / "log.zarr", COLUMNS, append=True, order="as_is")
        yield from some_log(30, seed=5).to_batches()

    reader = pa.RecordBatchReader.from_batches(table.schema, batches())
    import_log(reader, tmp_path / "log.zarr", COLUMNS, append=True, order="as_is")
    after = rows_of(tmp_path / "log.zarr")
    assert after.reward.shape == (1, 130)
    np.testing.assert_array_equal(after.reward[:, :100], before.reward)


def test_readers_of_the_store_see_all_rows_of_an_import_at_once(tmp_path: Path) -> None:
    table = some_log()
    import_log(table.slice(0, 40), tmp_path / "log.zarr", COLUMNS)
    with diskbuf.open(tmp_path / "log.zarr") as reader:
        seen = []

        def batches() -> Any:
            for batch in table.slice(40).to_batches(max_chunksize=10):
                seen.append(reader.next_id)
                yield batch

        source = pa.RecordBatchReader.from_batches(table.schema, batches())
        import_log(source, tmp_path / "log.zarr", COLUMNS, append=True)
        assert set(seen) == {40}
        assert reader.next_id == 100


BOUNDED = """
    import resource, sys
    import numpy as np, pyarrow as pa, pyarrow.csv, pyarrow.parquet
    from diskbuf.bandits.logs import LogColumns, import_log, export_log
    from diskbuf.bandits.logs import importing, opening, sources, text_sources
    opening.BATCH_ROWS = sources.BATCH_ROWS = importing._BLOCK_ROWS = 2_000  # the test is about blocks, not their size
    text_sources._TEXT_BYTES = 2**17
    folder, kind, rounds, megabytes = sys.argv[1:]
    rounds = int(rounds)
    columns = LogColumns(context=[f"x{n}" for n in range(24)] + ["c"], action="item", timestamp="at", propensity="p")
    rows = 20_000
    rng = np.random.default_rng(0)
    data = {f"x{n}": rng.normal(size=rows).astype(np.float32).round(3) for n in range(24)}
    data |= {"c": np.array(["a", "b"])[rng.integers(0, 2, rows)], "item": rng.integers(0, 5, rows)}
    data |= {"reward": np.ones(rows), "at": np.arange(rows), "p": np.full(rows, 0.2)}
    table = pa.table(data)
    file = f"{folder}/log.{kind}"
    with (pa.csv.CSVWriter if kind == "csv" else pa.parquet.ParquetWriter)(file, table.schema) as writer:
        for _ in range(rounds):
            writer.write_table(table)
    import_log(table, f"{folder}/warm.zarr", columns, time_unit="us")  # what is imported late
    text = open("/proc/self/status").read()
    limit = int(text.split("VmData:")[1].split()[0]) * 1024 + int(megabytes) * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    report = import_log(file, f"{folder}/log.zarr", columns, time_unit="us", order="as_is")
    assert report.rows == rounds * rows, report.rows
    try:
        whole = np.ones((rounds * rows, 26), np.float32)
    except MemoryError:
        print("bounded")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts data apart from mapped files")
@pytest.mark.parametrize(("kind", "rounds", "megabytes"), [("csv", 48, 64), ("parquet", 32, 32)])
def test_a_log_larger_than_memory_is_imported(tmp_path: Path, kind: str, rounds: int, megabytes: int) -> None:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BOUNDED), str(tmp_path), kind, str(rounds), str(megabytes)],
        check=False,
        capture_output=True,
        env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"},
    )
    assert run.stdout == b"bounded\n", run.stderr.decode()


# ---- reports


def test_the_report_tells_of_arms_propensities_and_time(tmp_path: Path) -> None:
    table = some_log(1000)
    report = import_log(table, tmp_path / "log.zarr", COLUMNS, num_actions=6)
    propensity = table["probability"].to_numpy()
    assert (report.propensity.minimum, report.propensity.maximum) == (0.25, 1.0)
    for share, found in report.propensity.quantiles.items():
        exact = np.quantile(propensity, float(share[:-1]) / 100, method="inverted_cdf")
        assert exact <= found <= exact * (1 + 1 / 64)
    assert report.num_actions == 6
    assert report.support[4:] == [0, 0]
    assert report.start_time == table["at"][0].as_py().isoformat()
    assert report.end_time == table["at"][-1].as_py().isoformat()
    assert report.types["country"] == "string"
    text = str(report)
    assert "1,000 rows in " in text
    assert "6, 4 of them chosen" in text
    again = json.loads(report.to_json())
    assert again["support"] == report.support
    assert again["propensity"]["minimum"] == 0.25
    assert again["context"] == {"age": [0, 1], "country": [1, 4]}


def test_what_became_what_is_recorded_with_the_store(tmp_path: Path) -> None:
    import_log(some_log(), tmp_path / "log.zarr", COLUMNS)
    with diskbuf.open(tmp_path / "log.zarr") as buffer:
        record = buffer.metadata["bandit_log"]
    assert record["context"] == [
        {"column": "age", "start": 0, "stop": 1, "encoding": {"kind": "numbers"}},
        {
            "column": "country",
            "start": 1,
            "stop": 4,
            "encoding": {"kind": "categories", "values": COUNTRIES, "other": False},
        },
    ]
    assert record["columns"]["action"] == "item"


# ---- export


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "arrow"])
def test_a_log_comes_out_as_it_went_in(tmp_path: Path, suffix: str) -> None:
    table = some_log().set_column(4, "item", pa.array(np.array(["a", 'b "quoted", too', "ü", "d"])[some_log()["item"]]))
    click = table["click"].to_pylist()
    click[4] = None
    table = table.set_column(6, "click", pa.array(click, pa.float32()))
    import_log(table, tmp_path / "log.zarr", COLUMNS, pending=True)
    file = tmp_path / f"out.{suffix}"
    assert export_log(tmp_path / "log.zarr", file) == 100
    if suffix == "parquet":
        back = pa.parquet.read_table(file)
        for name in ("age", "country", "item", "probability", "id", "at"):
            assert back[name].to_pylist() == table[name].to_pylist(), name
    again = import_log(file, tmp_path / "again.zarr", COLUMNS, pending=True)
    assert again.labels == sorted(set(table["item"].to_pylist()))
    first, second = rows_of(tmp_path / "log.zarr"), rows_of(tmp_path / "again.zarr")
    for one, other in zip(first._replace(policy_info=0), second._replace(policy_info=0), strict=True):
        np.testing.assert_array_equal(one, other)
    for leaf in first.policy_info:
        np.testing.assert_array_equal(first.policy_info[leaf], second.policy_info[leaf])
    assert not [name for name in left_behind(tmp_path) if name.endswith(".part")]


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "arrow"])
def test_part_of_a_log_is_exported_to_a_url(tmp_path: Path, suffix: str) -> None:
    table = some_log()
    import_log(table, tmp_path / "log.zarr", COLUMNS)
    url = f"memory://bandit-logs/part.{suffix}"
    assert export_log(tmp_path / "log.zarr", url, first_id=0, next_id=60) == 60
    import_log(url, tmp_path / "part.zarr", COLUMNS)
    assert_holds(tmp_path / "part.zarr", table.slice(0, 60))


def test_a_log_that_was_collected_is_exported_by_its_leaves(tmp_path: Path) -> None:
    spec = trajectories.trajectory_spec(
        trajectories.time_step_spec(
            {"user": diskbuf.ArraySpec([2], "float32"), "hour": diskbuf.ArraySpec([], "int32")}
        ),
        trajectories.PolicyStep(
            diskbuf.BoundedArraySpec([], "int32", 1, 3), info={"propensity": diskbuf.ArraySpec([], "float32")}
        ),
    )
    context = {"user": np.array([[1, 2], [3, 4]], np.float32), "hour": np.array([5, 6], np.int32)}
    with diskbuf.UniformReplayBuffer(spec, 2, path=tmp_path / "log.zarr") as buffer:
        step = trajectories.PolicyStep(
            np.array([1, 3], np.int32), info={"propensity": np.array([0.5, 0.25], np.float32)}
        )
        next_step = trajectories.termination(context, [1.0, 2.0])
        buffer.add_batch(trajectories.from_transition(trajectories.restart(context, 2), step, next_step))
    assert export_log(tmp_path / "log.zarr", tmp_path / "out.parquet") == 2
    assert pa.parquet.read_table(tmp_path / "out.parquet").to_pydict() == {
        "observation_hour": [5, 6],
        "observation_user_0": [1, 3],
        "observation_user_1": [2, 4],
        "action": [0, 2],
        "reward": [1, 2],
        "propensity": [0.5, 0.25],
    }


def test_what_was_hashed_comes_out_as_its_hash(tmp_path: Path) -> None:
    table = pa.table({"user": ["u1", "u2"], "id": ["k1", "k2"], "item": [0, 1], "reward": [1.0, 2.0]})
    columns = LogColumns(context=["user"], action="item", key="id")
    import_log(table, tmp_path / "log.zarr", columns, encodings={"user": Hashed(8)})
    export_log(tmp_path / "log.zarr", tmp_path / "out.parquet")
    back = pa.parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert back["user"] == [Hashed(8).bucket("u1"), Hashed(8).bucket("u2")]
    assert back["id"] == [hashlib.blake2b(key, digest_size=16).hexdigest() for key in (b"k1", b"k2")]


@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads /proc")
def test_the_benchmark_runs_in_its_smallest_form(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "tools" / "bench" / "log_import.py"
    command = [sys.executable, str(script), "--quick", "--json", "figures.json", "--folder", "stores"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    rows = {row["name"] for row in json.loads((tmp_path / "figures.json").read_text())["rows"]}
    assert rows == {
        f"import_{kind}_{ours}_vs_{peer}"
        for kind in ("csv", "parquet")
        for ours in ("found", "given")
        for peer in ("read", "copied")
    }


# ---- Vowpal Wabbit

WABBIT = """\
1:2:0.4 | a c:0.5
3:0.5:0.2 4 |user age:3 |item:2 red

4:-1:0.25 1 | a b
"""


def test_vowpal_wabbits_lines_are_decisions_with_the_cost_turned_into_a_reward(tmp_path: Path) -> None:
    file = tmp_path / "log.vw"
    file.write_text(WABBIT)
    report = import_log(file, tmp_path / "log.zarr", num_actions=4)
    rows = rows_of(tmp_path / "log.zarr")
    assert list(report.context) == ["a", "b", "c", "item^red", "user^age"]
    assert rows.observation[0].tolist() == [[1, 0, 0.5, 0, 0], [0, 0, 0, 2, 3], [1, 1, 0, 0, 0]]
    assert rows.action[0].tolist() == [0, 2, 3]
    assert report.labels == [1, 2, 3, 4]
    assert rows.reward[0].tolist() == [-2, -0.5, 1]
    np.testing.assert_array_equal(rows.policy_info["propensity"][0], np.array([0.4, 0.2, 0.25], np.float32))


def test_chosen_features_of_vowpal_wabbits_lines_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "log.vw"
    file.write_text(WABBIT)
    report = import_log(file, tmp_path / "log.zarr", LogColumns(context=["c", "a"], propensity="propensity"))
    assert report.labels == [1, 3, 4]
    assert rows_of(tmp_path / "log.zarr").observation[0].tolist() == [[0.5, 1], [0, 0], [0, 1]]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1:2:0.4 a c", "have a bar before its features"),
        ("1:2 | a", "have words like action:cost:probability"),
        ("1:x:0.4 | a", "have numbers in action:cost:probability"),
        ("1 2 | a", "have one action with a cost, not 0,"),
        ("1:1:0.5 2:1:0.5 | a", "have one action with a cost, not 2,"),
        ("0:1:0.5 | a", "have actions from 1 on"),
        ("shared | a", "be a decision of its own"),
        ("1:1:0.5 | a:x", "have finite numbers as values of features"),
    ],
)
def test_a_line_that_is_not_vowpal_wabbits_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = tmp_path / "log.vw"
    file.write_text(WABBIT + line + "\n")
    with pytest.raises(diskbuf.SpecError, match=re.escape(f"line 5 of log.vw must {said}")):
        import_log(file, tmp_path / "log.zarr", num_actions=4)
    report = import_log(file, tmp_path / "log.zarr", num_actions=4, strict=False)
    assert (report.rows, report.malformed) == (3, 1)


# ---- rewards that arrive later


def decisions(tmp_path: Path, keys: Any, **columns: Any) -> Path:
    table = pa.table(
        {"key": keys, "item": np.arange(len(keys)) % 3, "x": np.arange(len(keys), dtype=np.float32), **columns}
    )
    names = LogColumns(
        context=["x"], action="item", reward=None, key="key", timestamp="at" if "at" in columns else None
    )
    import_log(table, tmp_path / "log.zarr", names)
    return tmp_path / "log.zarr"


@pytest.mark.parametrize("has_text_keys", [False, True])
@pytest.mark.parametrize("kind", ["table", "csv", "jsonl", "dict"])
def test_of_a_hundred_decisions_sixty_get_a_reward(tmp_path: Path, has_text_keys: bool, kind: str) -> None:
    rng = np.random.default_rng(1)
    names = np.arange(100) * 10
    keys = [f"user-{name}" for name in names] if has_text_keys else names.tolist()
    path = decisions(tmp_path, keys)
    chosen = rng.permutation(100)[:60]
    lines = [(keys[row], float(row)) for row in chosen]
    unknown = [(f"user-x{n}" if has_text_keys else 5 + 10 * n, 1.0) for n in range(5)]
    repeated = [(keys[row], -7.0) for row in chosen[:5]]
    mixed = lines + unknown
    mixed = [mixed[place] for place in rng.permutation(len(mixed))] + repeated  # the first of each key counts
    if kind == "dict":
        source: Any = {"key": [key for key, _ in mixed], "reward": [value for _, value in mixed]}
    else:
        source = pa.table({"key": [key for key, _ in mixed], "reward": [value for _, value in mixed]})
        if kind != "table":
            source = written(source, tmp_path / f"rewards.{kind}")
    report = join_rewards(path, source)
    assert (report.decisions, report.complete, report.joined, report.pending) == (100, 60, 60, 40)
    assert (report.unknown, report.repeated) == (5, 5)
    assert sorted(report.unknown_keys) == sorted(key for key, _ in unknown)
    assert set(report.repeated_keys) == {key for key, _ in repeated}
    assert report.pending_ids.tolist() == sorted(set(range(100)) - set(chosen.tolist()))
    rows = rows_of(path)
    want = np.full(100, np.nan, np.float32)
    want[chosen] = chosen
    np.testing.assert_array_equal(rows.reward[0], want)
    np.testing.assert_array_equal(rows.observation[0, :, 0], np.arange(100))
    assert "60 complete, 40 pending" in str(report)
    assert json.loads(report.to_json())["pending_ids"] == report.pending_ids.tolist()
    assert not [name for name in left_behind(tmp_path) if "staging" in name]


@pytest.mark.parametrize(("repeated", "want"), [("first", [1, np.nan]), ("last", [4, np.nan]), ("sum", [7, np.nan])])
def test_repeated_rewards_count_as_asked(tmp_path: Path, repeated: str, want: list[float]) -> None:
    path = decisions(tmp_path, [3, 4])
    source = {"key": np.array([3, 3, 3]), "reward": np.array([1.0, 2.0, 4.0])}
    report = join_rewards(path, source, repeated=repeated)
    np.testing.assert_array_equal(rows_of(path).reward[0], want)
    assert report.repeated == 2


@pytest.mark.parametrize(("repeated", "want"), [("first", 1), ("last", 2), ("sum", 3)])
def test_a_reward_for_a_decision_that_has_one_is_a_repeated_one(tmp_path: Path, repeated: str, want: float) -> None:
    path = decisions(tmp_path, [3, 4])
    join_rewards(path, {3: 1.0})
    report = join_rewards(path, {3: 2.0, 4: 5.0}, repeated=repeated)
    assert rows_of(path).reward[0].tolist() == [want, 5]
    assert (report.repeated, report.repeated_keys, report.complete) == (1, [3], 2)


def test_decisions_past_the_horizon_get_the_default(tmp_path: Path) -> None:
    at = START + np.arange(5) * DAY
    path = decisions(tmp_path, np.arange(5), at=pa.array(at).cast(pa.timestamp("us", "UTC")))
    report = join_rewards(
        path, {0: 1.0}, default=0.0, horizon=dt.timedelta(days=2), destination=tmp_path / "joined.zarr"
    )
    np.testing.assert_array_equal(rows_of(tmp_path / "joined.zarr").reward[0], [1, 0, np.nan, np.nan, np.nan])
    assert (report.defaulted, report.pending, report.complete) == (1, 3, 2)
    later = join_rewards(path, {0: 1.0}, default=0.0, horizon=dt.timedelta(days=2), now=int(at[4]) + DAY)
    assert later.pending_ids.tolist() == [3, 4]
    everything = join_rewards(path, {}, default=-1.0)
    assert (everything.pending, everything.defaulted) == (0, 2)
    assert rows_of(path).reward[0].tolist() == [1, 0, 0, -1, -1]


def test_the_old_store_is_untouched_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = decisions(tmp_path, [3, 4])
    with pytest.raises(diskbuf.SpecError, match="column 'reward' must hold a finite number, got nan"):
        join_rewards(path, {3: np.nan})
    with pytest.raises(diskbuf.StoreExistsError):
        join_rewards(path, {3: 1.0}, destination=path.parent)
    assert np.isnan(rows_of(path).reward).all()
    join_rewards(path, {3: 1.0}, destination=tmp_path / "new.zarr")
    assert np.isnan(rows_of(path).reward).all()
    np.testing.assert_array_equal(rows_of(tmp_path / "new.zarr").reward[0], [1, np.nan])
    assert left_behind(tmp_path) == ["log.zarr", "new.zarr"]
    with diskbuf.open(path, "r+"), pytest.raises(diskbuf.StoreLockedError):
        join_rewards(path, {3: 1.0})


def test_a_join_that_is_killed_leaves_the_old_store_and_can_be_repeated(tmp_path: Path) -> None:
    path = decisions(tmp_path, [3, 4])
    code = """
        import os, signal, sys
        from diskbuf.bandits.logs import join_rewards
        from diskbuf.store import staging
        staging.Staging.swap_into_place = lambda self: os.kill(os.getpid(), signal.SIGKILL)
        join_rewards(sys.argv[1], {3: 1.0})
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], check=False, capture_output=True)
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    assert np.isnan(rows_of(path).reward).all()
    join_rewards(path, {3: 1.0})
    np.testing.assert_array_equal(rows_of(path).reward[0], [1, np.nan])
    assert left_behind(tmp_path) == ["log.zarr"]


def test_a_joined_store_is_added_to_and_joined_again(tmp_path: Path) -> None:
    path = decisions(tmp_path, ["a", "b"])
    join_rewards(path, {"b": 1.0})
    more = pa.table({"key": ["c"], "item": [1], "x": np.array([9], np.float32)})
    import_log(more, path, LogColumns(context=["x"], action="item", reward=None, key="key"), append=True)
    report = join_rewards(path, {"c": 2.0, "a": 3.0})
    assert rows_of(path).reward[0].tolist() == [3, 1, 2]
    assert report.pending == 0
    assert not diskbuf.verify(path).faults


def test_a_key_of_two_decisions_is_refused_when_a_reward_has_it(tmp_path: Path) -> None:
    path = decisions(tmp_path, [3, 4, 3])
    join_rewards(path, {4: 1.0})
    with pytest.raises(diskbuf.SpecError, match=r"a key must be of one decision to be joined by, got \[3\] in row 2"):
        join_rewards(path, {3: 1.0})


def test_a_reward_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = decisions(tmp_path, [3, 4])
    file = tmp_path / "rewards.csv"
    file.write_text("key,reward\n3,1\n4,high\n")
    with pytest.raises(
        diskbuf.SpecError, match=r"column 'reward' must hold a number in line 3 of rewards\.csv, got 'high'"
    ):
        join_rewards(path, file)
    report = join_rewards(path, file, strict=False)
    assert (report.malformed, report.joined) == (1, 1)


def test_a_log_without_keys_cannot_be_joined(tmp_path: Path) -> None:
    import_log(some_log(), tmp_path / "log.zarr", LogColumns(action="item", reward="click"))
    with pytest.raises(diskbuf.SpecError, match="a log must have keys"):
        join_rewards(tmp_path / "log.zarr", {3: 1.0})
    path = decisions(tmp_path / "b", [3])
    with pytest.raises(diskbuf.OptionError, match="horizon must be left out for a log without timestamps"):
        join_rewards(path, {3: 1.0}, default=0.0, horizon=dt.timedelta(days=1))
    for wrong in ({"horizon": dt.timedelta(days=1)}, {"repeated": "mean"}, {"default": np.nan}):
        with pytest.raises(diskbuf.OptionError):
            join_rewards(path, {3: 1.0}, **wrong)


def test_encodings_check_themselves() -> None:
    for wrong in (
        lambda: Hashed(0),
        lambda: Categories([]),
        lambda: Categories(["a", "a"]),
        lambda: Categories(["a", 1]),
        lambda: Vector(0),
        lambda: LogColumns(context="age"),
        lambda: LogColumns(context=["age", "age"]),
        lambda: LogColumns(context=["reward"]),
        lambda: LogColumns(action=""),
    ):
        with pytest.raises(diskbuf.OptionError, match="must"):
            wrong()
    assert Numbers().width == 1


CSV_WITH_HOLES = "country,item,click\nde,news,1\nfr,film,0\n,film,0\nfr,,1\n"


def test_empty_cells_are_missing_values_and_no_category_or_arm(tmp_path: Path) -> None:
    (tmp_path / "holes.csv").write_text(CSV_WITH_HOLES)
    columns = LogColumns(context=["country"], action="item", reward="click")
    with pytest.raises(diskbuf.SpecError, match=r"column 'country' must hold a value, got None in line 4"):
        import_log(tmp_path / "holes.csv", tmp_path / "strict.zarr", columns)
    report = import_log(tmp_path / "holes.csv", tmp_path / "lenient.zarr", columns, strict=False)
    assert (report.rows, report.labels) == (2, ["film", "news"])
    mappings = {"country": {"": "unknown"}}
    report = import_log(tmp_path / "holes.csv", tmp_path / "mapped.zarr", columns, mappings=mappings, strict=False)
    assert (report.rows, report.labels, report.context) == (3, ["film", "news"], {"country": (0, 3)})


def test_a_missing_value_can_be_one_of_the_others(tmp_path: Path) -> None:
    rows = {"country": ["de", None, "it"], "action": [0, 1, 0], "reward": [0, 1, 1]}
    columns = LogColumns(context=["country"])
    with pytest.raises(diskbuf.SpecError, match="with '' for a missing value"):
        import_log(rows, tmp_path / "none.zarr", columns, encodings={"country": Categories(["de", "it"])})
    encodings = {"country": Categories(["de"], other=True)}
    import_log(rows, tmp_path / "other.zarr", columns, encodings=encodings)
    with diskbuf.open(tmp_path / "other.zarr") as log:
        assert log.gather_all().observation[0].tolist() == [[1, 0], [0, 1], [0, 1]]


def test_new_rows_are_encoded_and_arms_named_as_the_import_did(tmp_path: Path) -> None:
    rows = {"age": [31, 54, 20], "country": ["fr", "de", "fr"], "item": ["b", "a", "b"], "click": [0, 1, 1]}
    import_log(rows, tmp_path / "log.zarr", LogColumns(context=["age", "country"], action="item", reward="click"))
    encoder = LogEncoder(tmp_path / "log.zarr")
    with diskbuf.open(tmp_path / "log.zarr") as log:
        everything = log.gather_all()
    assert np.array_equal(encoder.context(rows), everything.observation[0])
    assert np.array_equal(encoder.actions_of(rows["item"]), everything.action[0])
    assert encoder.labels_of(everything.action[0]) == rows["item"]
    assert (encoder.columns, encoder.slices) == (("age", "country"), {"age": (0, 1), "country": (1, 3)})
    with pytest.raises(
        diskbuf.SpecError, match=r"column 'country' must hold what Categories.* knows, got 'it' in row 1"
    ):
        encoder.context({"age": [1, 2], "country": ["fr", "it"]})
    with pytest.raises(diskbuf.OptionError, match=r"got none for \['country'\]"):
        encoder.context({"age": [1, 2]})
    with pytest.raises(diskbuf.OptionError, match="labels must be those of the arms"):
        encoder.actions_of(["c"])
    with pytest.raises(diskbuf.OptionError, match="actions must be arms"):
        encoder.labels_of([2])
    spec = diskbuf.trajectories.trajectory_spec(
        diskbuf.trajectories.time_step_spec(diskbuf.ArraySpec([1], "float32")),
        diskbuf.trajectories.PolicyStep(diskbuf.BoundedArraySpec([], "int32", 0, 1)),
    )
    with (
        diskbuf.UniformReplayBuffer(spec) as plain,
        pytest.raises(diskbuf.OptionError, match="store must be one that import_log made"),
    ):
        LogEncoder(plain)


def test_a_reward_that_has_not_arrived_is_told_how_to_wait(tmp_path: Path) -> None:
    rows = {"action": [0, 1], "reward": [1.0, None]}
    with pytest.raises(diskbuf.SpecError, match="hasn't arrived yet, say pending=True"):
        import_log(rows, tmp_path / "log.zarr", LogColumns())


def test_a_column_twice_is_refused_wherever_it_comes_from(tmp_path: Path) -> None:
    table = pa.table([[0], [1], [2]], names=["action", "reward", "reward"])
    pa.parquet.write_table(table, tmp_path / "twice.parquet")
    for source in (table, tmp_path / "twice.parquet"):
        with pytest.raises(diskbuf.SpecError, match="must name each column once, got 'reward' more often"):
            import_log(source, tmp_path / "log.zarr", LogColumns())


def test_what_is_masked_is_missing(tmp_path: Path) -> None:
    rows = {"action": np.array([1, 0]), "reward": np.ma.array([1.0, 2.0], mask=[True, False])}
    report = import_log(rows, tmp_path / "log.zarr", LogColumns(), pending=True)
    assert report.rows == 2
    with diskbuf.open(tmp_path / "log.zarr") as log:
        assert np.isnan(log.gather_all().reward[0]).tolist() == [True, False]


def test_a_sum_of_rewards_that_is_too_large_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.zarr"
    import_log({"key": [7, 8], "action": [0, 1]}, path, LogColumns(key="key", reward=None))
    with pytest.raises(diskbuf.SpecError, match="must be finite in float32"):
        join_rewards(path, {"key": [7, 7], "reward": [3e38, 3e38]}, repeated="sum")
    with diskbuf.open(path) as log:
        assert np.isnan(log.gather_all().reward).all()


def test_a_mark_at_the_beginning_of_a_file_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "marked.csv").write_bytes("\ufeffaction,reward\n0,1\n1,2,3\n1,0\n".encode())
    report = import_log(tmp_path / "marked.csv", tmp_path / "log.zarr", LogColumns(), strict=False)
    assert (report.rows, report.malformed) == (2, 1)


def test_text_in_views_is_text(tmp_path: Path) -> None:
    table = pa.table({"action": pa.array(["a", "b"], pa.string_view()), "reward": [0, 1]})
    assert import_log(table, tmp_path / "log.zarr", LogColumns()).labels == ["a", "b"]


def test_an_encoder_refuses_what_is_no_row(tmp_path: Path) -> None:
    rows = {"x": [1.0, 2.0], "c": ["a", "b"], "action": ["u", "v"], "reward": [0, 1]}
    import_log(rows, tmp_path / "log.zarr", LogColumns(context=["x", "c"]))
    encoder = LogEncoder(tmp_path / "log.zarr")
    for wrong in ({"x": ["q"], "c": ["a"]}, {"x": [2**70], "c": ["a"]}, {"x": 1, "c": "a"}, None):
        with pytest.raises(diskbuf.DiskbufError, match="must"):
            encoder.context(wrong)  # type: ignore[arg-type]
    for labels in ("u", [["u"]]):
        with pytest.raises(diskbuf.OptionError, match="labels must be"):
            encoder.actions_of(labels)  # type: ignore[arg-type]
    assert encoder.labels_of([]) == []


def test_values_of_a_dictionary_that_no_row_has_are_no_arms(tmp_path: Path) -> None:
    coded = pa.array(["a", "b", "c"]).dictionary_encode().take(pa.array([0, 2]))
    report = import_log(pa.table({"action": coded, "reward": [0, 1]}), tmp_path / "log.zarr", LogColumns())
    assert (report.labels, report.support) == (["a", "c"], [1, 1])
