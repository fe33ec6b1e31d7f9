"""Stores opened again: after an exception, at every fill level, after a broken episode, and at a wrong path."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from crash_writer import Shape, assert_equal_steps, assert_whole

import diskbuf

RAISES = """
import sys
import numpy as np, diskbuf
buffer = diskbuf.UniformReplayBuffer({"x": diskbuf.ArraySpec([], "int64")}, 1, None, path=sys.argv[1],
    options=diskbuf.StoreOptions(chunk_bytes=16 * 8))
for t in range(3 * 16 + 7):
    buffer.add_batch({"x": np.array([t])})
raise RuntimeError("the environment broke")
"""


def test_after_an_exception_and_no_close_all_rows_are_there(tmp_path: Path) -> None:
    store = tmp_path / "store"
    ended = subprocess.run([sys.executable, "-c", RAISES, store], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr.rstrip().endswith("RuntimeError: the environment broke")
    assert len(list((store / "x").glob("c.*"))) == 4
    with diskbuf.open(store) as reader:
        np.testing.assert_array_equal(reader.gather_all()["x"], np.arange(55)[None])


def test_a_wrapped_ring_samples_every_row_and_evicts_the_oldest_after_a_restart(tmp_path: Path) -> None:
    shape = Shape(lanes=1, max_length=10, chunk_bytes=32)
    with shape.open(tmp_path / "store") as buffer:
        for number in range(15):
            buffer.add_batch(shape.step(number))
    with shape.open(tmp_path / "store", seed=1) as buffer:
        assert assert_whole(buffer, shape) == (5, 15)
        items, info = buffer.get_next(20_000)
        assert set(info.ids.tolist()) == set(range(5, 15))
        np.testing.assert_array_equal(items["id"], info.ids)
        buffer.add_batch(shape.step(15))
        assert assert_whole(buffer, shape) == (6, 16)


@pytest.mark.parametrize("chunk_bytes", [1, 16, 4096])
@pytest.mark.parametrize("adds", [5, 10])
def test_an_exactly_full_ring_has_its_capacity_of_rows_after_a_restart(
    tmp_path: Path, adds: int, chunk_bytes: int
) -> None:
    shape = Shape(max_length=5, chunk_bytes=chunk_bytes)
    with shape.open(tmp_path / "store") as buffer:
        for number in range(adds):
            buffer.add_batch(shape.step(number))
        buffer.flush()
        assert assert_whole(buffer, shape) == (adds - 5, adds)
    with diskbuf.open(tmp_path / "store") as reader:
        assert assert_whole(reader, shape) == (adds - 5, adds)


def test_a_store_without_rows_opens_again_empty_and_takes_rows(tmp_path: Path) -> None:
    shape = Shape()
    shape.open(tmp_path / "store").close()
    with diskbuf.open(tmp_path / "store") as reader, shape.open(tmp_path / "store") as buffer:
        assert_equal_steps(reader.gather_all(), shape.sequence(0, 0))
        buffer.add_batch(shape.step(0))
        assert assert_whole(buffer, shape) == assert_whole(reader, shape) == (0, 1)


def test_no_sequence_spans_a_restart(tmp_path: Path) -> None:
    shape = Shape(lanes=1)
    for first_id in (0, 3, 8):
        with shape.open(tmp_path / "store", seed=3) as buffer:
            for number in range(first_id, first_id + {0: 3, 3: 5, 8: 4}[first_id]):
                buffer.add_batch(shape.step(number))
    shape.open(tmp_path / "store").close()  # a run without rows
    allowed = {(0, 1), (1, 2), (3, 4), (4, 5), (5, 6), (6, 7), (8, 9), (9, 10), (10, 11)}
    with diskbuf.open(tmp_path / "store", seed=5) as reader, shape.open(tmp_path / "store", seed=5) as writer:
        for buffer in (reader, writer):
            _, info = buffer.get_next(2000, num_steps=2)
            assert set(map(tuple, info.ids.tolist())) == allowed
            with pytest.raises(diskbuf.WindowError, match="num_steps must be at most 5, got"):
                buffer.get_next(num_steps=6)


def test_a_deterministic_pass_visits_every_row_once_and_spans_no_restart(tmp_path: Path) -> None:
    shape = Shape(lanes=1)
    with shape.open(tmp_path / "store") as buffer:
        buffer.extend(shape.sequence(0, 3))
    with shape.open(tmp_path / "store") as buffer:
        buffer.extend(shape.sequence(3, 8))
    with diskbuf.open(tmp_path / "store") as reader:
        dataset = reader.as_dataset(num_steps=2, single_deterministic_pass=True)
        assert [info.ids.tolist() for _, info in dataset.as_numpy_iterator()] == [[0, 1], [2], [3, 4], [5, 6], [7]]


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("there", ["nothing", "a folder", "a file", "another zarr group"])
def test_opening_a_wrong_path_raises_and_makes_nothing(tmp_path: Path, mode: str, there: str) -> None:
    path = tmp_path / "wrong"
    if there == "a file":
        path.write_bytes(b"something")
    elif there != "nothing":
        path.mkdir()
    if there == "another zarr group":
        (path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(diskbuf.StoreNotFoundError, match="cannot open"):
        diskbuf.open(path, mode)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_buffer_is_not_made_in_another_programs_zarr_group(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.mkdir()
    (path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    with pytest.raises(diskbuf.StoreError):
        Shape().open(path)
    assert [entry.name for entry in path.iterdir()] == ["zarr.json"]
