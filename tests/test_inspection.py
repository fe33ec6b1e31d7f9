"""What a store is, its files and some of its steps, as told from the outside."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import diskbuf
from diskbuf import inspection
from diskbuf.store import lock

SPEC = {"observation": diskbuf.ArraySpec([3], "float32"), "action": diskbuf.ArraySpec([], "int64")}
LANES = 2


def steps(first_id: int, count: int) -> dict[str, Any]:
    """[2, count] steps whose values tell id and lane."""
    ids = np.arange(first_id, first_id + count)
    action = ids * 10 + np.arange(LANES)[:, None]
    return {"observation": np.repeat(action[..., None], 3, -1).astype("float32"), "action": action}


def make(path: Path, count: int, *, max_length: int | None = None, **options: Any) -> Path:
    names = {"keep_history"} & options.keys()
    more = {name: options.pop(name) for name in names}
    with diskbuf.UniformReplayBuffer(
        SPEC, LANES, max_length, path=path, options=diskbuf.StoreOptions(**options), **more
    ) as buffer:
        buffer.extend(steps(0, count))
    return path


def test_facts_are_those_of_the_buffer(tmp_path: Path) -> None:
    path = make(tmp_path / "s", 100, max_length=40, chunk_bytes=256)
    facts = inspection.inspect(path)
    with diskbuf.open(path) as buffer:
        assert (facts.first_id, facts.next_id) == (buffer.first_id, buffer.next_id) == (60, 100)
        assert (facts.num_frames, facts.capacity) == (buffer.num_frames(), buffer.capacity)
        assert facts.data_spec == buffer.data_spec
    assert facts.raw_bytes == 40 * LANES * (12 + 8)
    assert facts.disk_bytes == sum(file.lstat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
    assert facts.oldest_id == 60
    assert facts.episodes is None


def test_facts_of_a_store_that_is_being_written_are_those_of_the_moment(tmp_path: Path) -> None:
    with diskbuf.UniformReplayBuffer(SPEC, LANES, None, path=tmp_path / "s") as buffer:
        buffer.extend(steps(0, 5))
        assert inspection.inspect(tmp_path / "s").next_id == 5
        buffer.extend(steps(5, 5))
        assert inspection.inspect(tmp_path / "s").next_id == 10


def test_history_counts_from_the_oldest_step_on_disk(tmp_path: Path) -> None:
    facts = inspection.inspect(make(tmp_path / "s", 100, max_length=40, keep_history=True))
    assert (facts.oldest_id, facts.first_id) == (0, 60)
    assert facts.raw_bytes == 100 * LANES * 20


def test_the_writer_is_named_while_it_writes_and_nobody_after_it_closed(tmp_path: Path) -> None:
    path = make(tmp_path / "s", 5)
    assert inspection.inspect(path).writer is None
    with diskbuf.open(path, mode="r+"):
        writer = inspection.inspect(path).writer
        assert writer is not None
        assert (writer.pid, writer.is_alive) == (os.getpid(), True)
    assert inspection.inspect(path).writer is None


def test_a_writer_that_was_killed_is_told_from_one_that_writes(tmp_path: Path) -> None:
    path = make(tmp_path / "s", 5)
    code = "import diskbuf, os, sys; buffer = diskbuf.open(sys.argv[1], mode='r+'); os.kill(os.getpid(), 9)"
    run = subprocess.Popen([sys.executable, "-c", code, path])
    run.wait()
    writer = inspection.inspect(path).writer
    assert writer is not None
    assert (writer.pid, writer.is_alive) == (run.pid, False)


def test_looking_at_the_lock_lets_a_writer_in(tmp_path: Path) -> None:
    path = make(tmp_path / "s", 5)
    taken = []
    for _ in range(50):
        taken.append(lock.holder_of(path / ".diskbuf" / "lock"))
        with diskbuf.open(path, mode="r+"):
            taken.append(lock.holder_of(path / ".diskbuf" / "lock"))
    assert [holder is None for holder in taken] == [True, False] * 50


def test_a_holder_on_another_machine_cannot_be_told(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    assert lock.holder_of(tmp_path / "lock") == (1, "elsewhere", None)


def test_without_a_list_of_locks_the_process_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_LOCKS", tmp_path / "nothing")
    path = make(tmp_path / "s", 5)
    with diskbuf.open(path, mode="r+"):
        assert inspection.inspect(path).writer == (os.getpid(), os.uname().nodename, True)
    assert inspection.inspect(path).writer is None


def test_a_damaged_store_still_says_what_it_is(tmp_path: Path) -> None:
    path = make(tmp_path / "s", 50, chunk_bytes=256)
    next(path.glob("action/c.*")).unlink()
    assert inspection.inspect(path).next_id == 50


def test_facts_of_a_remote_store_come_from_what_is_published(tmp_path: Path) -> None:
    path = make(tmp_path / "s", 50, chunk_bytes=512, codec="zstd")
    url = f"memory://inspection/{tmp_path.name}"
    diskbuf.copy(path, url)
    here, there = inspection.inspect(path), inspection.inspect(url)
    assert (there.next_id, there.codec, there.raw_bytes) == (here.next_id, "zstd", here.raw_bytes)
    assert (there.is_remote, there.writer) == (True, None)
    far = list(inspection.store_files(url))
    assert there.disk_bytes == sum(file.disk_bytes or 0 for file in far)
    assert [(file.name, file.rows) for file in far] == [
        (file.name, file.rows) for file in inspection.store_files(path) if file.rows
    ]


@pytest.mark.parametrize("options", [{}, {"codec": "zstd"}, {"layout": "arrow"}], ids=str)
def test_the_chunks_hold_every_id_of_every_leaf_once(tmp_path: Path, options: dict[str, Any]) -> None:
    path = make(tmp_path / "s", 100, max_length=64, chunk_bytes=256, **options)
    files = list(inspection.store_files(path))
    assert len({file.name for file in files}) == len(files)
    assert {file.name for file in files} == {
        file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()
    }
    for leaf in ("observation", "action"):
        ids = [i for file in files if leaf in file.leaves and file.rows for i in range(file.first_id, file.next_id)]
        assert ids == list(range(36, 100))
    assert sum(file.raw_bytes or 0 for file in files) == 64 * LANES * 20
    expected = "raw" if not options else "sealed"
    assert {file.state for file in files if file.rows} == {expected}


def test_a_chunk_that_waits_to_be_overwritten_is_spare(tmp_path: Path) -> None:
    path = make(tmp_path / "s", 1000, max_length=16, chunk_bytes=256)
    assert {"raw", "spare"} == {file.state for file in inspection.store_files(path) if file.chunk is not None}


def test_chunks_that_are_only_published_are_listed_too(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/far"
    with diskbuf.UniformReplayBuffer(
        SPEC,
        2,
        None,
        path=tmp_path / "s",
        publish_to=url,
        keep_local=False,
        options=diskbuf.StoreOptions(chunk_bytes=256),
    ) as buffer:
        for start in range(0, 100, 10):
            buffer.extend(steps(start, 10))
        buffer.publish_now()
    files = list(inspection.store_files(tmp_path / "s"))
    ids = [i for file in files if "action" in file.leaves and file.rows for i in range(file.first_id, file.next_id)]
    assert sorted(ids) == list(range(100))
    assert any(file.state == "published" and file.disk_bytes is None for file in files)


def test_the_arrow_schema_is_that_of_an_arrow_store(tmp_path: Path) -> None:
    arrow = make(tmp_path / "a", 10, layout="arrow")
    part = next((arrow / "data").glob("*.arrow"))
    with pa.memory_map(str(part)) as source:
        expected = pa.ipc.open_file(source).schema
    assert inspection.arrow_schema(make(tmp_path / "z", 10)).equals(expected)


@pytest.mark.parametrize("lane", [None, 1])
@pytest.mark.parametrize("count", [1, 3, 7, 1000])
def test_the_oldest_and_newest_steps_are_in_order(tmp_path: Path, count: int, lane: int | None) -> None:
    path = make(tmp_path / "s", 100, max_length=20, chunk_bytes=64)
    lanes = range(LANES) if lane is None else [lane]
    pairs = [(i, of) for i in range(80, 100) for of in lanes]
    with diskbuf.open(path) as buffer:
        for found, expected in (
            (inspection.oldest_steps(buffer, ["action"], count=count, lane=lane), pairs[:count]),
            (inspection.newest_steps(buffer, ["action"], count=count, lane=lane), pairs[-count:]),
        ):
            assert list(zip(found.ids.tolist(), found.lanes.tolist(), strict=True)) == expected
            assert found.columns["action"].tolist() == [i * 10 + of for i, of in expected]
            assert list(found.columns) == ["action"]


def test_an_empty_window_has_no_steps(tmp_path: Path) -> None:
    with diskbuf.UniformReplayBuffer(SPEC, LANES, path=tmp_path / "s") as buffer:
        found = inspection.oldest_steps(buffer, ["observation"], count=5)
        assert found.columns["observation"].shape == (0, 3)
        with pytest.raises(diskbuf.EmptyBufferError):
            inspection.sampled_steps(buffer, ["action"], count=1, num_steps=None, seed=1)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_steps_of_arrays_without_elements_are_as_many_as_of_others(shape: tuple[int, ...]) -> None:
    with diskbuf.UniformReplayBuffer({"none": diskbuf.ArraySpec(shape, "float32")}, 2) as buffer:
        buffer.extend({"none": np.zeros((2, 5, *shape), "float32")})
        for steps in (
            inspection.oldest_steps(buffer, ["none"], count=6, lane=None),
            inspection.newest_steps(buffer, ["none"], count=6, lane=None),
            inspection.sampled_steps(buffer, ["none"], count=3, num_steps=2, seed=1),
        ):
            assert steps.columns["none"].shape == (6, *shape)
        assert inspection.step_at(buffer, ["none"], step_id=4, lane=1).columns["none"].shape == (1, *shape)


def test_a_sample_is_what_get_next_draws(tmp_path: Path) -> None:
    path = make(tmp_path / "s", 100)
    with diskbuf.open(path, mode="r+") as buffer:
        buffer.extend(steps(100, 30))
    for num_steps in (None, 4):
        with diskbuf.open(path, seed=7) as buffer:
            items, info = buffer.get_next(20, num_steps)
        with diskbuf.open(path) as buffer:
            found = inspection.sampled_steps(buffer, ["action"], count=20, num_steps=num_steps, seed=7)
        assert found.ids.tolist() == info.ids.reshape(-1).tolist()
        assert found.columns["action"].tolist() == items["action"].reshape(-1).tolist()
        assert found.columns["action"].tolist() == (found.ids * 10 + found.lanes).tolist()


def test_steps_outside_of_the_window_are_refused(tmp_path: Path) -> None:
    with diskbuf.open(make(tmp_path / "s", 30, max_length=10)) as buffer:
        assert inspection.step_at(buffer, ["action"], step_id=25, lane=1).columns["action"].tolist() == [251]
        for step_id in (19, 30, -1):
            with pytest.raises(diskbuf.WindowError, match=rf"must be in the window \[20, 30\), got {step_id}"):
                inspection.step_at(buffer, ["action"], step_id=step_id, lane=0)
        with pytest.raises(diskbuf.WindowError, match="lane must be from 0 to 1, got 2"):
            inspection.step_at(buffer, ["action"], step_id=25, lane=2)
        with pytest.raises(diskbuf.WindowError, match="num_steps must be at most 10"):
            inspection.sampled_steps(buffer, ["action"], count=1, num_steps=11, seed=0)
        with pytest.raises(diskbuf.OptionError, match="at least 0, got -1"):
            inspection.oldest_steps(buffer, ["action"], count=-1)
        with pytest.raises(diskbuf.OptionError, match="at least 0, got -1"):
            inspection.sampled_steps(buffer, ["action"], count=-1, num_steps=None, seed=0)


def test_no_steps_at_all_may_be_asked_for(tmp_path: Path) -> None:
    with diskbuf.open(make(tmp_path / "s", 30, max_length=10)) as buffer:
        for found in (
            inspection.oldest_steps(buffer, ["observation"], count=0),
            inspection.newest_steps(buffer, ["observation"], count=0, lane=1),
            inspection.sampled_steps(buffer, ["observation"], count=0, num_steps=None, seed=0),
        ):
            assert found.columns["observation"].shape == (0, 3)
            assert (len(found.ids), found.sequences) == (0, None)
        sequences = inspection.sampled_steps(buffer, ["action"], count=0, num_steps=4, seed=0).sequences
        assert sequences is not None
        assert len(sequences) == 0


EPISODES = pa.table(
    {
        "lane": pa.array([0, 1, 0, 1], pa.int32()),
        "first_id": [0, 0, 5, 9],
        "last_id": [4, 8, 9, 9],
        "length": [5, 9, 5, 1],
        "return": [1.0, 4.0, None, 2.0],
        "end": ["terminated", "truncated", None, "open"],
        "is_whole": [False, True, True, True],
    }
)


@pytest.mark.parametrize(
    ("conditions", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"lane": 1}, [1, 3]),
        ({"end": "terminated"}, [0]),
        ({"min_return": 2.0}, [1, 3]),
        ({"max_return": 1.5}, [0]),
        ({"min_length": 5, "only_whole": True}, [1, 2]),
        ({"lane": 1, "min_return": 3.0, "end": "truncated"}, [1]),
    ],
)
def test_episodes_are_chosen_by_every_condition(conditions: dict[str, Any], kept: list[int]) -> None:
    assert inspection.chosen_episodes(EPISODES, **conditions).equals(EPISODES.take(kept))


def test_an_end_that_there_is_not_is_refused() -> None:
    with pytest.raises(diskbuf.OptionError, match="end must be one of 'terminated'"):
        inspection.chosen_episodes(EPISODES, end="finished")


def test_episodes_are_summed_up() -> None:
    found = inspection.summarize_episodes(EPISODES)
    assert (found.count, found.whole, found.complete, found.steps) == (4, 3, 2, 20)
    assert found.ends == {"terminated": 1, "truncated": 1, "open": 1, "unknown": 1}
    # The first one lacks its beginning, and the last one goes on.
    assert found.length == inspection.Spread(mean=7.0, std=np.std([9, 5]), minimum=5, maximum=9)
    assert found.returns == inspection.Spread(mean=4.0, std=0.0, minimum=4.0, maximum=4.0)


def test_episodes_that_go_on_or_were_broken_off_have_no_mean_return() -> None:
    for end in ("open", "broken"):
        table = EPISODES.set_column(5, "end", pa.array([end] * 4))
        found = inspection.summarize_episodes(table)
        assert (found.count, found.complete, found.ends) == (4, 0, {end: 4})
        assert found.returns is not None
        assert found.returns.minimum is None


def test_episodes_keep_their_numbers_when_some_are_chosen() -> None:
    table = inspection.numbered_episodes(EPISODES)
    assert inspection.chosen_episodes(table, lane=1)["episode"].to_pylist() == [1, 3]


def test_no_episodes_sum_up_to_nothing() -> None:
    found = inspection.summarize_episodes(EPISODES.slice(0, 0))
    assert (found.count, found.ends, found.length.minimum) == (0, {}, None)
