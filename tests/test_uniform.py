"""The uniform buffer's API: what it gives, what it keeps, what it refuses, and that it never mixes rows."""

import contextlib
import functools
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
from coded_rows import SPEC, assert_equal, assert_rows, lanes_of, span, step

import diskbuf
from diskbuf import ArraySpec, StoreOptions, UniformReplayBuffer

NEVER = StoreOptions(fsync="never")
TINY = StoreOptions(chunk_bytes=64, fsync="never")
"""Chunks far smaller than a page, of one to a few steps."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.zarr"


def filled(
    added: int, lanes: int = 2, max_length: int | None = 5, *, options: StoreOptions = TINY, **arguments: Any
) -> UniformReplayBuffer:
    buffer = UniformReplayBuffer(SPEC, lanes, max_length, options=options, **arguments)
    for step_id in range(added):
        buffer.add_batch(step(step_id, lanes))
    return buffer


def assert_window(buffer: UniformReplayBuffer, first_id: int, next_id: int) -> None:
    """The buffer holds exactly these ids, whichever way it is asked."""
    lanes = buffer.batch_size
    assert (buffer.first_id, buffer.next_id) == (first_id, next_id)
    assert buffer.num_frames() == (next_id - first_id) * lanes
    assert_equal(buffer.gather_all(), span(first_id, next_id, lanes))


def files_of(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Every file but the lock with its size, time of change and content."""
    return {
        str(file.relative_to(folder)): (file.stat().st_size, file.stat().st_mtime_ns, file.read_bytes())
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != "lock"
    }


def run_python(code: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
    )


# ---- windows


@pytest.mark.parametrize("options", [NEVER, TINY, StoreOptions(chunk_bytes=1, fsync="never")])
@pytest.mark.parametrize("max_length", [1, 2, 5, None])
def test_the_window_is_the_newest_max_length_steps_at_every_fill_level(
    max_length: int | None, options: StoreOptions
) -> None:
    with UniformReplayBuffer(SPEC, 2, max_length, options=options) as buffer:
        assert_window(buffer, 0, 0)
        for added in range(1, 18):
            buffer.add_batch(step(added - 1, 2))
            assert_window(buffer, 0 if max_length is None else max(0, added - max_length), added)


def test_three_rows_in_a_buffer_of_five_are_gathered_as_those_three() -> None:
    """TF-Agents' PyUniformReplayBuffer hands out the two slots that were never written."""
    with filled(3) as buffer:
        assert_equal(buffer.gather_all(), span(0, 3, 2))


def test_after_seven_adds_to_a_buffer_of_five_the_newest_five_come_in_order() -> None:
    with filled(7) as buffer:
        assert_equal(buffer.gather_all(), span(2, 7, 2))


def test_two_lanes_of_length_five_keep_sequences_in_their_lane_after_eight_adds() -> None:
    """TF-Agents 0.19 takes row ids modulo the total capacity in its deterministic pass, and mixes lanes here."""
    with filled(8, seed=1) as buffer:
        assert_equal(buffer.gather_all(), span(3, 8, 2))
        items, info = buffer.get_next(500, num_steps=3)
        lanes = lanes_of(items)
        assert (lanes == lanes[:, :1]).all()
        assert_rows(items, info.ids, lanes)
        assert set(info.ids[:, 0].tolist()) == {3, 4, 5}


@pytest.mark.parametrize("capacity", range(2, 13))
def test_every_sequence_of_every_length_is_sampled_and_no_other(capacity: int) -> None:
    options = StoreOptions(chunk_bytes=64 * (capacity % 3 + 1), fsync="never")
    for added in (capacity - 1, capacity, 2 * capacity + 1):
        with filled(added, max_length=capacity, options=options, seed=capacity) as buffer:
            first_id = max(0, added - capacity)
            for num_steps in range(1, min(6, added - first_id) + 1):
                items, info = buffer.get_next(400, num_steps=num_steps)
                lanes = lanes_of(items)
                assert (np.diff(info.ids, axis=1) == 1).all()
                assert (lanes == lanes[:, :1]).all()
                assert_rows(items, info.ids, lanes)
                found = set(zip(info.ids[:, 0].tolist(), lanes[:, 0].tolist(), strict=True))
                assert found == set(itertools.product(range(first_id, added - num_steps + 1), range(2)))


def test_the_whole_window_is_sampled_after_a_restart_and_the_next_add_evicts_the_oldest(path: Path) -> None:
    filled(15, lanes=1, max_length=10, path=path).close()
    with UniformReplayBuffer(SPEC, 1, 10, path=path, seed=0) as buffer:
        assert_window(buffer, 5, 15)
        assert set(buffer.get_next(20_000)[1].ids.tolist()) == set(range(5, 15))
        buffer.add_batch(step(15, 1))
        assert_window(buffer, 6, 16)


@pytest.mark.parametrize("added", [0, 5, 10])
def test_reopening_a_buffer_of_five_finds_what_it_held(path: Path, added: int) -> None:
    filled(added, path=path).close()
    for _ in range(2):
        with UniformReplayBuffer(SPEC, 2, 5, path=path) as buffer:
            assert_window(buffer, max(0, added - 5), added)


def test_a_store_without_rows_reopens_empty_and_takes_rows(path: Path) -> None:
    filled(0, path=path).close()
    with diskbuf.open(path) as reader:
        assert_window(reader, 0, 0)
    with diskbuf.open(path, "r+") as buffer:
        buffer.add_batch(step(0, 2))
        assert_window(buffer, 0, 1)


def test_insertion_order_and_ids_are_the_same_each_time_and_in_another_process(path: Path) -> None:
    filled(13, path=path).close()
    with diskbuf.open(path) as first, diskbuf.open(path) as second:
        assert_equal(first.gather_all(), second.gather_all())
        assert_rows(first.read([12, 8, 9], [1, 0, 1]), [12, 8, 9], [1, 0, 1])
    code = """
        import sys, json, diskbuf
        with diskbuf.open(sys.argv[1]) as buffer:
            print(json.dumps([buffer.first_id, buffer.gather_all()["number"].tolist()]))
    """
    assert json.loads(run_python(code, path).stdout) == [8, span(8, 13, 2)["number"].tolist()]


# ---- clear


def test_clear_empties_the_window_and_ids_go_on() -> None:
    with filled(8) as buffer:
        buffer.clear()
        assert_window(buffer, 8, 8)
        buffer.add_batch(step(8, 2))
        assert_window(buffer, 8, 9)


@pytest.mark.parametrize("max_length", [5, None])
def test_a_cleared_buffer_reopens_cleared(path: Path, max_length: int | None) -> None:
    with filled(7, max_length=max_length, path=path) as buffer:
        buffer.clear()
        buffer.add_batch(step(7, 2))
    with UniformReplayBuffer(SPEC, 2, max_length, path=path) as buffer:
        assert_window(buffer, 7, 8)


def test_clearing_an_unlimited_buffer_gives_its_space_back(path: Path) -> None:
    with filled(50, max_length=None, path=path) as buffer:
        before = len(list(path.rglob("c.*")))
        buffer.clear()
        assert len(list(path.rglob("c.*"))) < before / 5
        buffer.extend(span(50, 60, 2))
        assert_window(buffer, 50, 60)


def test_clear_keeps_history_where_it_is_kept(path: Path) -> None:
    with filled(7, max_length=None, keep_history=True, path=path) as buffer:
        buffer.clear()
        assert_window(buffer, 7, 7)
    with diskbuf.open(path, history=True) as buffer:
        assert_window(buffer, 0, 7)


# ---- reopening with another length


def test_a_larger_max_length_keeps_everything_and_has_more_room(path: Path) -> None:
    filled(8, path=path).close()
    with UniformReplayBuffer(SPEC, 2, 9, path=path, options=TINY) as buffer:
        assert_window(buffer, 3, 8)
        for step_id in range(8, 30):
            buffer.add_batch(step(step_id, 2))
            assert_window(buffer, max(3, step_id - 8), step_id + 1)
    with diskbuf.open(path) as buffer:
        assert (buffer.max_length, buffer.capacity) == (9, 18)


def test_no_limit_counts_as_a_larger_max_length(path: Path) -> None:
    filled(8, path=path).close()
    with UniformReplayBuffer(SPEC, 2, None, path=path) as buffer:
        buffer.extend(span(8, 40, 2))
        assert_window(buffer, 3, 40)
        assert (buffer.max_length, buffer.capacity) == (None, None)


@pytest.mark.parametrize(("stored", "wanted"), [(5, 3), (None, 3)])
def test_a_smaller_max_length_is_refused_with_advice_and_changes_nothing(
    path: Path, stored: int | None, wanted: int
) -> None:
    filled(8, max_length=stored, path=path).close()
    before = files_of(path)
    with pytest.raises(
        diskbuf.StoreMismatchError, match=rf"(?s)max_length: the store has {stored}, .*trim=True"
    ) as caught:
        UniformReplayBuffer(SPEC, 2, wanted, path=path)
    assert len(caught.value.differences) == 1
    assert files_of(path) == before


@pytest.mark.parametrize("stored", [5, None])
def test_a_smaller_max_length_trims_when_asked(path: Path, stored: int | None) -> None:
    filled(8, max_length=stored, path=path).close()
    with UniformReplayBuffer(SPEC, 2, 3, path=path, trim=True, options=TINY) as buffer:
        assert_window(buffer, 5, 8)
        buffer.extend(span(8, 31, 2))
        assert_window(buffer, 28, 31)
    with UniformReplayBuffer(SPEC, 2, 5, path=path) as buffer:
        assert_window(buffer, 28, 31)


# ---- modes


def test_the_same_script_run_again_goes_on_where_it_stopped(path: Path) -> None:
    for run in range(4):
        with UniformReplayBuffer(SPEC, 2, 100, path=path) as buffer:
            assert buffer.next_id == 3 * run
            for _ in range(3):
                buffer.add_batch(step(buffer.next_id, 2))
    with diskbuf.open(path) as buffer:
        assert_window(buffer, 0, 12)


def test_mode_w_only_creates(path: Path) -> None:
    UniformReplayBuffer(SPEC, path=path, mode="w-").close()
    before = files_of(path)
    with pytest.raises(
        diskbuf.StoreExistsError, match=r"cannot create a store at .*: the path holds a store\..*mode='a'"
    ):
        UniformReplayBuffer(SPEC, path=path, mode="w-")
    assert files_of(path) == before


@pytest.mark.parametrize("mode", ["a", "w-"])
def test_a_path_that_holds_something_else_is_refused_and_left_alone(path: Path, mode: Any) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("years of work")
    with pytest.raises(diskbuf.StoreExistsError, match="the path holds files that are not a store's"):
        UniformReplayBuffer(SPEC, path=path, mode=mode)
    with pytest.raises(diskbuf.StoreExistsError, match="the path holds a file"):
        UniformReplayBuffer(SPEC, path=path / "thesis.txt", mode=mode)
    assert [file.name for file in path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_opening_a_wrong_path_raises_and_makes_nothing(tmp_path: Path, path: Path, mode: Any) -> None:
    with pytest.raises(diskbuf.StoreNotFoundError, match="there is nothing at that path"):
        diskbuf.open(path, mode)
    assert not path.exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(diskbuf.StoreNotFoundError, match=r"zarr\.json is missing"):
        diskbuf.open(tmp_path / "empty", mode)
    assert not list((tmp_path / "empty").iterdir())


def test_a_buffer_opened_to_read_refuses_to_write(path: Path) -> None:
    filled(3, path=path).close()
    with diskbuf.open(path) as reader:
        for write in (lambda: reader.add_batch(step(3, 2)), lambda: reader.extend(span(3, 4, 2)), reader.clear):
            with pytest.raises(diskbuf.ReadOnlyError, match=r"was opened with mode='r'\. Open it with mode='r\+'"):
                write()
        with pytest.raises(diskbuf.ReadOnlyError, match="must be open for writing"):
            reader.flush()
        assert_window(reader, 0, 3)


def test_a_buffer_opened_to_add_goes_on_with_the_stores_own_settings(path: Path) -> None:
    filled(8, path=path, metadata={"task": 3}).close()
    with diskbuf.open(path, "r+") as buffer:
        assert (buffer.max_length, buffer.batch_size, buffer.metadata) == (5, 2, {"task": 3})
        buffer.add_batch(step(8, 2))
        assert_window(buffer, 4, 9)


def test_a_second_writer_is_refused_with_the_pid_of_the_first(path: Path) -> None:
    with filled(1, path=path):
        for again in (lambda: UniformReplayBuffer(SPEC, 2, 5, path=path), lambda: diskbuf.open(path, "r+")):
            with pytest.raises(
                diskbuf.StoreLockedError, match=rf"process {os.getpid()} on host .* has it open"
            ) as caught:
                again()
            assert caught.value.pid == os.getpid()
    UniformReplayBuffer(SPEC, 2, 5, path=path).close()


def test_history_is_every_row_since_the_store_was_made(path: Path) -> None:
    with filled(23, keep_history=True, path=path) as buffer:
        assert_window(buffer, 18, 23)
        with diskbuf.open(path, history=True) as reader, diskbuf.open(path) as newest:
            assert_window(newest, 18, 23)
            assert_window(reader, 0, 23)
            buffer.add_batch(step(23, 2))
            assert_window(reader, 0, 24)
            assert_window(newest, 19, 24)
    with diskbuf.open(path, "r+", history=True) as buffer:
        buffer.add_batch(step(24, 2))
        assert_window(buffer, 0, 25)


def test_history_of_a_store_that_keeps_none_is_its_window(path: Path) -> None:
    filled(8, path=path).close()
    with diskbuf.open(path, history=True) as buffer:
        assert_window(buffer, 3, 8)


def test_another_keep_history_is_refused(path: Path) -> None:
    filled(3, path=path).close()
    with pytest.raises(diskbuf.StoreMismatchError, match="keep_history: the store has False, the buffer True"):
        UniformReplayBuffer(SPEC, 2, 5, path=path, keep_history=True)


# ---- what get_next returns


@pytest.mark.parametrize("size", [None, 1, 4])
def test_single_steps_have_the_batch_axis_that_was_asked_for(size: int | None) -> None:
    with filled(8, seed=2) as buffer:
        items, info = buffer.get_next(size)
    shape = () if size is None else (size,)
    assert info.ids.shape == info.probabilities.shape == shape
    assert (info.ids.dtype, info.probabilities.dtype) == (np.int64, np.float32)
    assert_rows(items, info.ids, lanes_of(items))
    np.testing.assert_array_equal(info.probabilities, np.full(shape, 1 / 10, "float32"))


@pytest.mark.parametrize("size", [None, 1, 4])
@pytest.mark.parametrize("num_steps", [1, 3])
def test_sequences_have_a_time_axis_behind_the_batch_axis(size: int | None, num_steps: int) -> None:
    with filled(8, seed=2) as buffer:
        items, info = buffer.get_next(size, num_steps)
    batch = () if size is None else (size,)
    assert info.ids.shape == (*batch, num_steps)
    assert info.probabilities.shape == batch
    assert_rows(items, info.ids, lanes_of(items))
    np.testing.assert_array_equal(info.probabilities, np.full(batch, 1 / (2 * (6 - num_steps)), "float32"))


@pytest.mark.parametrize("size", [None, 4])
def test_sequences_that_are_not_stacked_are_a_tuple_of_steps(size: int | None) -> None:
    with filled(8, seed=2) as buffer:
        items, info = buffer.get_next(size, num_steps=3, time_stacked=False)
    batch = () if size is None else (size,)
    assert isinstance(items, tuple)
    assert len(items) == len(info.ids) == 3
    assert info.probabilities.shape == batch
    for number, (item, ids) in enumerate(zip(items, info.ids, strict=True)):
        assert np.shape(ids) == batch
        np.testing.assert_array_equal(ids, info.ids[0] + number)
        assert_rows(item, ids, lanes_of(items[0]))


def test_steps_stacked_and_not_stacked_are_the_same_samples() -> None:
    with filled(8, seed=2, max_length=8) as one, filled(8, seed=2, max_length=8) as other:
        stacked, info = one.get_next(4, num_steps=2)
        apart, ids = other.get_next(4, num_steps=2, time_stacked=False)
        assert_equal(optree.tree_map(lambda *leaves: np.stack(leaves, 1), *apart), stacked)
        np.testing.assert_array_equal(np.stack(ids.ids, 1), info.ids)


def test_samples_of_a_seed_are_repeatable_and_of_another_seed_are_not(path: Path) -> None:
    filled(40, max_length=None, path=path).close()
    with diskbuf.open(path, seed=5) as one, diskbuf.open(path, seed=5) as two, diskbuf.open(path, seed=6) as three:
        samples = [[buffer.get_next(50)[1].ids.tolist() for _ in range(40)] for buffer in (one, two, three)]
    assert samples[0] == samples[1]
    assert samples[0] != samples[2]
    assert len({tuple(ids) for ids in samples[0]}) == 40


def test_samples_without_a_seed_differ_each_time(path: Path) -> None:
    filled(40, max_length=None, path=path).close()
    with diskbuf.open(path) as one, diskbuf.open(path) as two:
        assert one.get_next(50)[1].ids.tolist() != two.get_next(50)[1].ids.tolist()


def test_samples_are_uniform_over_ids_and_lanes() -> None:
    with filled(8, seed=3) as buffer:
        items, info = buffer.get_next(20_000)
    _, counts = np.unique(info.ids * 2 + lanes_of(items), return_counts=True)
    assert len(counts) == 10
    assert abs(counts - 2000).max() < 5 * 2000**0.5


def test_no_sequence_spans_a_restart(path: Path) -> None:
    """Killed or closed at step 3 of an episode and started again with a reset: ids go on, the episode doesn't."""
    filled(3, max_length=20, path=path).close()
    with UniformReplayBuffer(SPEC, 2, 20, path=path, seed=1, options=TINY) as buffer:
        buffer.extend(span(3, 8, 2))
        ids = buffer.get_next(500, num_steps=2)[1]
        assert set(ids.ids[:, 0].tolist()) == {0, 1, 3, 4, 5, 6}
        assert ids.probabilities[0] == np.float32(1 / 12)
        with pytest.raises(diskbuf.WindowError, match=r"num_steps must be at most 5, got 6: .* without a restart"):
            buffer.get_next(1, num_steps=6)
    with diskbuf.open(path, seed=1) as reader:
        assert set(reader.get_next(500, num_steps=2)[1].ids[:, 0].tolist()) == {0, 1, 3, 4, 5, 6}


@pytest.mark.parametrize("options", [NEVER, TINY])
def test_changing_a_sample_never_changes_the_file(path: Path, options: StoreOptions) -> None:
    with filled(8, path=path, options=options) as buffer, diskbuf.open(path) as reader:
        for source in (buffer, reader):
            samples = [
                source.get_next()[0],
                source.get_next(3)[0],
                source.get_next(3, 2)[0],
                source.get_next(3, 2, time_stacked=False)[0],
                source.gather_all(),
                source.read(3, 0),
                source.read([3, 4], 1),
            ]
            for leaf in optree.tree_leaves(samples):
                if isinstance(leaf, np.ndarray):
                    leaf[...] = 1 - leaf.astype("int64")
        assert_window(reader, 3, 8)


# ---- read


def test_read_gives_the_steps_asked_for_in_their_order() -> None:
    with filled(8, lanes=3) as buffer:
        ids, lanes = np.array([[7, 3, 3], [5, 6, 4]]), np.array([2, 0, 1])
        assert_rows(buffer.read(ids, lanes), ids, lanes)
        assert_rows(buffer.read(7, [0, 1, 2]), 7, [0, 1, 2])
        assert_rows(buffer.read(7, 2), 7, 2)
        assert_rows(buffer.read([], []), np.empty(0, int), np.empty(0, int))


@pytest.mark.parametrize("ids", [[2], [8], [-1], [5, 2], 8, np.array([2**63 + 5], "uint64")])
def test_an_id_outside_the_window_is_refused(ids: Any) -> None:
    with filled(8) as buffer, pytest.raises(diskbuf.WindowError, match=r"ids must be in the window \[3, 8\), got"):
        buffer.read(ids, 0)


@pytest.mark.parametrize("lanes", [[2], [-1], [0, 2]])
def test_a_lane_that_the_buffer_lacks_is_refused(lanes: Any) -> None:
    with filled(8) as buffer, pytest.raises(diskbuf.WindowError, match="lanes must be from 0 to 1, got"):
        buffer.read([5], lanes)


def test_ids_that_are_no_ints_or_do_not_fit_the_lanes_are_refused() -> None:
    with filled(8) as buffer:
        with pytest.raises(diskbuf.OptionError, match="ids must be ints, got float64"):
            buffer.read([5.0], [0])
        with pytest.raises(diskbuf.OptionError, match="lanes must be ints, got bool"):
            buffer.read([5], [True])
        with pytest.raises(diskbuf.OptionError, match=r"must have shapes that fit each other, got \(3,\) and \(2,\)"):
            buffer.read([5, 6, 7], [0, 1])


# ---- extend


@pytest.mark.parametrize("max_length", [7, 100, None])
def test_a_hundred_single_adds_and_one_bulk_add_are_the_same(max_length: int | None) -> None:
    with (
        filled(100, max_length=max_length, seed=4) as singles,
        UniformReplayBuffer(SPEC, 2, max_length, seed=4, options=NEVER) as bulk,
    ):
        bulk.extend(span(0, 100, 2))
        assert_equal(bulk.gather_all(), singles.gather_all())
        for _ in range(3):
            left, right = singles.get_next(20, num_steps=3), bulk.get_next(20, num_steps=3)
            assert_equal(left[0], right[0])
            assert_equal(tuple(left[1]), tuple(right[1]))


def test_extending_by_no_steps_changes_nothing() -> None:
    with filled(3) as buffer:
        buffer.extend(span(3, 3, 2))
        assert_window(buffer, 0, 3)


# ---- what may be added


def test_tensors_are_accepted_and_float64_stays_float64() -> None:
    import tensorflow as tf

    with UniformReplayBuffer(SPEC, 2, 5, options=TINY) as buffer:
        buffer.add_batch(optree.tree_map(tf.constant, step(0, 2)))
        buffer.extend(optree.tree_map(tf.constant, span(1, 4, 2)))
        assert_window(buffer, 0, 4)


class Tensorlike:
    """As much of a torch tensor as matters: dtype and shape of its own kind, and `__array__`."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = f"torch.{array.dtype}"
        self.shape = list(array.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype, copy=copy)


def test_what_turns_into_an_array_is_accepted() -> None:
    with UniformReplayBuffer(SPEC, 2, 5, options=TINY) as buffer:
        buffer.add_batch(optree.tree_map(Tensorlike, step(0, 2)))
        buffer.extend(optree.tree_map(Tensorlike, span(1, 4, 2)))
        assert_window(buffer, 0, 4)


def test_an_array_that_is_used_again_is_copied() -> None:
    """An environment that hands out one array for every observation."""
    with UniformReplayBuffer(ArraySpec([2], "float32"), 1, 5) as buffer:
        observation = np.zeros([1, 2], "float32")
        for number in range(5):
            observation[:] = number
            buffer.add_batch(observation)
        assert buffer.gather_all()[0, :, 0].tolist() == [0, 1, 2, 3, 4]


def test_arrays_of_any_memory_order_are_taken() -> None:
    with UniformReplayBuffer(ArraySpec([3, 5], "int16"), 4, 5, options=TINY) as buffer:
        plain = np.arange(60, dtype="int16").reshape(4, 3, 5)
        buffer.add_batch(np.asfortranarray(plain))
        buffer.add_batch(plain[::-1][::-1])
        np.testing.assert_array_equal(buffer.gather_all(), np.stack([plain, plain], 1))


DICT_SPEC = {"observation": {"camera": ArraySpec([4, 4, 3], "uint8")}, "reward": ArraySpec([], "float32")}


def camera_step(**changes: Any) -> Any:
    leaves = {"camera": np.zeros([2, 4, 4, 3], "uint8"), "reward": np.zeros([2], "float32")} | changes
    return {"observation": {"camera": leaves["camera"]}, "reward": leaves["reward"]}


BAD_STEPS = {
    "a float64": (
        camera_step(reward=np.zeros([2])),
        r"leaf 'reward' must be float32 \[2\], got float64 \[2\]\. Cast it with \.astype\('float32'\)",
    ),
    "an int8 image": (
        camera_step(camera=np.zeros([2, 4, 4, 3], "int8")),
        r"leaf 'observation/camera' must be uint8 \[2, 4, 4, 3\], got int8 \[2, 4, 4, 3\]",
    ),
    "no batch axis": (
        camera_step(camera=np.zeros([4, 4, 3], "uint8")),
        r"leaf 'observation/camera' must be uint8 \[2, 4, 4, 3\], got uint8 \[4, 4, 3\]\. An axis is missing: stack",
    ),
    "too many lanes": (
        camera_step(reward=np.zeros([3], "float32")),
        r"leaf 'reward' must be float32 \[2\], got float32 \[3\]\. The buffer has 2 lanes \(batch_size\)",
    ),
    "an extra axis": (
        camera_step(reward=np.zeros([2, 1], "float32")),
        r"leaf 'reward' must be float32 \[2\], got float32 \[2, 1\]\. To add many steps at once use extend",
    ),
    "a wrong size": (
        camera_step(camera=np.zeros([2, 4, 5, 3], "uint8")),
        r"leaf 'observation/camera' must be uint8 \[2, 4, 4, 3\], got uint8 \[2, 4, 5, 3\]\. Reshape it",
    ),
    "a plain number": (
        camera_step(reward=1.0),
        r"leaf 'reward' must be a numpy array or a tensor, got float\. Use numpy\.asarray",
    ),
    "a plain list": (camera_step(reward=[1.0, 2.0]), r"(?s)reward.*list"),
    "an extra tuple": ((camera_step(),), r"items must be .*\. Remove the extra tuple around it"),
    "a missing leaf": ({"observation": camera_step()["observation"]}, r"reward"),
    "an extra leaf": (camera_step() | {"info": np.zeros(2)}, r"info"),
    "nothing": (None, r"items must be .*, got None\. Fill it in"),
}


@pytest.mark.parametrize("kind", BAD_STEPS)
def test_a_bad_step_is_refused_with_the_leaf_and_the_fix_and_changes_nothing(path: Path, kind: str) -> None:
    """TF-Agents advances its cursor before it looks, and keeps a row of zeros."""
    items, message = BAD_STEPS[kind]
    with UniformReplayBuffer(DICT_SPEC, 2, 5, path=path, options=NEVER) as buffer:
        good = camera_step(reward=np.array([1, 2], "float32"))
        buffer.add_batch(good)
        buffer.flush()
        before = files_of(path)
        with pytest.raises(diskbuf.SpecError, match=message):
            buffer.add_batch(items)
        assert files_of(path) == before
        assert buffer.next_id == 1
        buffer.add_batch(good)
        assert buffer.gather_all()["reward"].tolist() == [[1, 1], [2, 2]]


def test_a_missing_batch_axis_of_the_only_lane_is_named_with_its_fix() -> None:
    with (
        UniformReplayBuffer(ArraySpec([3], "float32")) as buffer,
        pytest.raises(diskbuf.SpecError, match=r"\[1, 3\], got float32 \[3\]\. The batch axis is missing.* x\[None\]"),
    ):
        buffer.add_batch(np.zeros(3, "float32"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"reward": np.zeros([2, 4], "float32")},
            r"'reward' must be float32 \[2, 3\], got float32 \[2, 4\]\. Every leaf",
        ),
        (
            {"reward": np.zeros([1, 3], "float32")},
            r"'reward' must be float32 \[2, 3\], got float32 \[1, 3\]\. The buffer",
        ),
        (
            {"reward": np.zeros([2], "float32")},
            r"'reward' must be float32 \[2, 3\], got float32 \[2\]\. An axis is missing",
        ),
        ({"reward": np.zeros([2, 3])}, r"'reward' must be float32 \[2, 3\], got float64 \[2, 3\]\. Cast it"),
        ({"camera": np.zeros([4, 4, 3], "uint8")}, r"'observation/camera' must be uint8 \[2, 4, 4, 4, 3\], got uint8"),
    ],
)
def test_a_bad_sequence_is_refused_and_changes_nothing(changes: dict[str, Any], message: str) -> None:
    good = {"camera": np.zeros([2, 3, 4, 4, 3], "uint8"), "reward": np.ones([2, 3], "float32")}
    with UniformReplayBuffer(DICT_SPEC, 2, 5, options=NEVER) as buffer:
        buffer.extend(camera_step(**good))
        with pytest.raises(diskbuf.SpecError, match=message):
            buffer.extend(camera_step(**good | changes))
        assert (buffer.first_id, buffer.next_id) == (0, 3)


# ---- other bad input


def test_an_empty_buffer_is_sampled_with_a_clear_error() -> None:
    with filled(0) as buffer:
        for ask in (buffer.get_next, lambda: buffer.get_next(3), lambda: buffer.get_next(3, 2)):
            with pytest.raises(
                diskbuf.EmptyBufferError, match=r"must hold steps to be sampled, but is empty\. Add some"
            ):
                ask()
        assert_window(buffer, 0, 0)


def test_more_steps_than_there_are_is_a_clear_error() -> None:
    with filled(3) as buffer:
        with pytest.raises(diskbuf.WindowError, match=r"at most 3, got 4: .* \[0, 3\)"):
            buffer.get_next(2, num_steps=4)
        assert buffer.get_next(2, num_steps=3)[1].ids.tolist() == [[0, 1, 2]] * 2


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("sample_batch_size", lambda buffer, value: buffer.get_next(value)),
        ("num_steps", lambda buffer, value: buffer.get_next(2, value)),
        ("batch_size", lambda _, value: UniformReplayBuffer(SPEC, value)),
        ("max_length", lambda _, value: UniformReplayBuffer(SPEC, 1, value)),
        ("dataset_window_shift", lambda _, value: UniformReplayBuffer(SPEC, dataset_window_shift=value)),
    ],
)
def test_a_count_that_is_no_int_of_at_least_1_is_refused(
    name: str, call: Callable[[UniformReplayBuffer, Any], Any], value: Any
) -> None:
    with (
        filled(5) as buffer,
        pytest.raises(diskbuf.OptionError, match=rf"{name} must be an int of at least 1, got {value!r}"),
    ):
        call(buffer, value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "r"}, r"mode must be 'a' .* or 'w-' .*, got 'r'\. To read, use diskbuf\.open"),
        ({"keep_history": 1}, "keep_history must be True or False, got 1"),
        ({"trim": "yes"}, "trim must be True or False, got 'yes'"),
        ({"dataset_drop_remainder": None}, "dataset_drop_remainder must be True or False, got None"),
        ({"seed": 1.5}, r"seed must be an int or None, got 1\.5"),
        ({"seed": True}, "seed must be an int or None, got True"),
        ({"options": {"chunk_bytes": 1}}, r"options must be a diskbuf\.StoreOptions, got \{'chunk_bytes': 1\}"),
        ({"metadata": {"rate": float("nan")}}, "metadata must be a JSON value, got .*nan"),
        ({"metadata": {"when": object()}}, "metadata must be a JSON value"),
        ({"metadata": "\ud800"}, "metadata must be a JSON value, got .*surrogates not allowed"),
        ({"path": "s3://bucket/a"}, r"path must be on a local file system, got 's3://bucket/a'"),
        ({"path": ""}, r"path must name a folder, got ''"),
        ({"path": 5}, r"path must be a str or a path, got 5"),
    ],
)
def test_an_argument_outside_its_rule_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(diskbuf.OptionError, match=message):
        UniformReplayBuffer(SPEC, **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_bytes": 0}, "chunk_bytes must be an int of at least 1, got 0"),
        ({"chunk_bytes": 1.5}, r"chunk_bytes must be an int of at least 1, got 1\.5"),
        ({"fsync": "sometimes"}, "fsync must be one of 'interval', 'always', 'never', got 'sometimes'"),
        ({"fsync_seconds": 0}, "fsync_seconds must be a number of seconds above 0, got 0"),
        ({"fsync_seconds": float("inf")}, "fsync_seconds must be a number of seconds above 0, got inf"),
    ],
)
def test_a_store_option_outside_its_rule_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(diskbuf.OptionError, match=message):
        StoreOptions(**arguments)


def test_a_mode_that_open_does_not_know_is_refused(path: Path) -> None:
    filled(1, path=path).close()
    with pytest.raises(diskbuf.OptionError, match=r"mode must be 'r' \(read\) or 'r\+' .*, got 'w'"):
        diskbuf.open(path, "w")  # type: ignore[arg-type]
    with pytest.raises(diskbuf.OptionError, match="history must be True or False, got 1"):
        diskbuf.open(path, history=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "call",
    [
        lambda buffer: UniformReplayBuffer(SPEC, maxlength=5),
        lambda buffer: UniformReplayBuffer(data_spec=SPEC, capacity=5),
        lambda buffer: diskbuf.open(buffer.path, hist=True),
        lambda buffer: StoreOptions(chunk_byte=5),
        lambda buffer: buffer.get_next(batch_size=5),
        lambda buffer: buffer.as_dataset(sample_batchsize=5),
        lambda buffer: buffer.add_batch(item=5),
        lambda buffer: buffer.read(id=5, lanes=0),
        lambda buffer: ArraySpec([], dtypes="int8"),
    ],
)
def test_a_misspelt_keyword_is_a_type_error(call: Callable[[UniformReplayBuffer], Any]) -> None:
    with filled(1) as buffer, pytest.raises(TypeError, match="unexpected keyword argument"):
        call(buffer)


def test_a_closed_buffer_says_so_whatever_is_asked(path: Path) -> None:
    buffer = filled(3, path=path)
    buffer.close()
    buffer.close()
    asks: list[Callable[[], Any]] = [
        lambda: buffer.add_batch(step(3, 2)),
        lambda: buffer.extend(span(3, 4, 2)),
        buffer.clear,
        buffer.flush,
        buffer.get_next,
        buffer.gather_all,
        buffer.num_frames,
        lambda: buffer.read(0, 0),
        lambda: buffer.first_id,
        lambda: buffer.next_id,
        buffer.as_dataset,
    ]
    for ask in asks:
        with pytest.raises(diskbuf.ClosedError, match=r"must be open, but was closed\. Open it again"):
            ask()
    assert "closed" in repr(buffer)
    assert (buffer.batch_size, buffer.max_length, buffer.capacity, buffer.path) == (2, 5, 10, path)
    with diskbuf.open(path) as reader:
        assert_window(reader, 0, 3)


def test_a_buffer_of_a_forked_child_cannot_be_changed_there(path: Path) -> None:
    code = """
        import os, sys
        import diskbuf
        from coded_rows import SPEC, span, step
        buffer = diskbuf.UniformReplayBuffer(SPEC, 2, 5, path=sys.argv[1])
        buffer.extend(span(0, 3, 2))
        child = os.fork()
        if not child:
            refused = 0
            changes = [lambda: buffer.add_batch(step(3, 2)), lambda: buffer.extend(span(3, 9, 2))]
            for change in (*changes, buffer.clear, buffer.flush):
                try:
                    change()
                except diskbuf.ReadOnlyError as error:
                    refused += "must be written to by the process that opened it" in str(error)
            ids = buffer.get_next(20)[1].ids
            buffer.close()
            os._exit(0 if refused == 4 and ids.max() < 3 else 1)
        assert os.waitpid(child, 0)[1] == 0
        buffer.add_batch(step(3, 2))
        buffer.close()
    """
    run_python(code, path)
    with diskbuf.open(path) as reader:
        assert_window(reader, 0, 4)


# ---- metadata and properties


def test_metadata_is_kept_until_other_metadata_is_given(path: Path) -> None:
    metadata = {"task": "Käfer", "rates": [1, 2.5, None, True]}
    filled(1, path=path, metadata=metadata).close()
    with diskbuf.open(path) as reader:
        assert reader.metadata == metadata
    with filled(0, path=path) as buffer:
        assert buffer.metadata == metadata
    with filled(0, path=path, metadata=["other"]) as buffer:
        assert buffer.metadata == ["other"]
    with diskbuf.open(path) as reader:
        assert reader.metadata == ["other"]


def test_a_buffer_tells_what_it_is(path: Path) -> None:
    with filled(8, path=path) as buffer:
        assert (buffer.batch_size, buffer.max_length, buffer.capacity, buffer.path) == (2, 5, 10, path)
        assert buffer.data_spec == SPEC
        assert repr(buffer) == f"<UniformReplayBuffer {path} (writable), batch_size=2, max_length=5>"
    with diskbuf.open(path) as reader:
        assert reader.data_spec == SPEC
        assert "(read-only)" in repr(reader)


# ---- private stores


def test_a_buffer_without_a_path_removes_its_store_when_it_is_closed() -> None:
    buffer = filled(8)
    assert buffer.path.is_dir()
    buffer.close()
    assert not buffer.path.exists()


def test_a_buffer_without_a_path_removes_its_store_when_it_is_forgotten() -> None:
    buffer = filled(8)
    path, ref = buffer.path, weakref.ref(buffer)
    del buffer
    gc.collect()
    assert ref() is None
    assert not path.exists()


def test_a_forgotten_buffer_keeps_its_steps_and_frees_its_lock(path: Path) -> None:
    filled(8, path=path)
    gc.collect()
    with UniformReplayBuffer(SPEC, 2, 5, path=path) as buffer:
        assert_window(buffer, 3, 8)


def test_a_process_that_ends_without_closing_leaves_no_private_store(tmp_path: Path) -> None:
    code = """
        import sys, tempfile
        import diskbuf
        from coded_rows import SPEC, span
        tempfile.tempdir = sys.argv[1]
        buffer = diskbuf.UniformReplayBuffer(SPEC, 2, 5)
        buffer.extend(span(0, 3, 2))
    """
    run_python(code, tmp_path)
    assert not list(tmp_path.iterdir())


def test_samples_outlive_a_private_store() -> None:
    buffer = filled(8)
    items = buffer.gather_all()
    buffer.close()
    assert_equal(items, span(3, 8, 2))


# ---- readers beside a writer


@pytest.mark.parametrize("options", [NEVER, TINY])
@pytest.mark.parametrize("max_length", [5, None])
def test_a_reader_sees_every_step_at_once(path: Path, max_length: int | None, options: StoreOptions) -> None:
    with filled(0, max_length=max_length, path=path, options=options) as buffer, diskbuf.open(path) as reader:
        for added in range(1, 40):
            buffer.add_batch(step(added - 1, 2))
            assert_window(reader, buffer.first_id, added)
        buffer.clear()
        assert_window(reader, 39, 39)
        buffer.extend(span(39, 50, 2))
        assert_window(reader, buffer.first_id, 50)


def test_a_reader_in_another_process_sees_every_step_at_once(path: Path) -> None:
    code = """
        import sys, diskbuf
        from coded_rows import assert_equal, span
        reader = diskbuf.open(sys.argv[1])
        for line in sys.stdin:
            first_id, next_id = map(int, line.split())
            assert (reader.first_id, reader.next_id) == (first_id, next_id)
            assert_equal(reader.gather_all(), span(first_id, next_id, 2))
            print("seen", flush=True)
    """
    with filled(0, path=path) as buffer:
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )
        with child:
            assert child.stdin is not None
            assert child.stdout is not None
            for added in range(1, 20):
                buffer.add_batch(step(added - 1, 2))
                child.stdin.write(f"{max(0, added - 5)} {added}\n")
                child.stdin.flush()
                assert child.stdout.readline() == "seen\n"
            child.stdin.close()
        assert child.returncode == 0


def test_a_reader_follows_one_writer_after_the_other(path: Path) -> None:
    filled(3, path=path).close()
    with diskbuf.open(path) as reader:
        next_id = 3
        for max_length in (5, 5, 9, None):
            with UniformReplayBuffer(SPEC, 2, max_length, path=path, options=TINY) as buffer:
                for _ in range(14):
                    buffer.add_batch(step(next_id, 2))
                    next_id += 1
                    assert_window(reader, buffer.first_id, next_id)
                    assert_window(buffer, buffer.first_id, next_id)
        assert next_id not in reader.get_next(100, num_steps=2)[1].ids[:, 1]


@pytest.mark.parametrize("max_length", [5, None])
def test_reading_changes_no_file_and_leaves_none_behind(path: Path, max_length: int | None) -> None:
    filled(8, max_length=max_length, path=path).close()
    before = files_of(path)
    folders = {folder: folder.stat().st_mtime_ns for folder in path.rglob("*") if folder.is_dir()}
    with diskbuf.open(path) as reader:
        reader.get_next(5, num_steps=2)
        reader.gather_all()
        reader.read(5, 0)
    assert files_of(path) == before
    assert {folder: folder.stat().st_mtime_ns for folder in path.rglob("*") if folder.is_dir()} == folders


def test_reading_opens_no_file_for_writing(path: Path) -> None:
    """What a missing write permission would forbid; permissions don't bind the user root."""
    filled(8, path=path).close()
    code = """
        import os, sys
        import diskbuf, diskbuf.replay_buffers.uniform
        writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
        changes = {"os." + name for name in "mkdir rename remove rmdir truncate utime chmod link symlink".split()}
        found = []
        def hook(event, arguments):
            if event == "open" and arguments[2] & writing or event in changes:
                found.append((event, arguments))
        sys.addaudithook(hook)
        with diskbuf.open(sys.argv[1]) as reader:
            reader.get_next(5, num_steps=2)
            reader.gather_all()
        assert not found, found
    """
    run_python(code, path)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions don't bind the user root")
def test_a_folder_without_write_permission_can_be_read(path: Path) -> None:
    filled(8, path=path).close()
    everything = [path, *path.rglob("*")]
    for entry in everything:
        entry.chmod(0o555 if entry.is_dir() else 0o444)
    try:
        with diskbuf.open(path) as reader:
            assert_window(reader, 3, 8)
    finally:
        for entry in everything:
            entry.chmod(0o755)


def test_a_copy_without_its_state_folder_still_reads(path: Path) -> None:
    """The manifest alone says what was committed."""
    filled(8, path=path).close()
    for file in (path / ".diskbuf").iterdir():
        file.unlink()
    (path / ".diskbuf").rmdir()
    with diskbuf.open(path) as reader:
        assert_window(reader, 3, 8)
    with diskbuf.open(path, "r+") as buffer:
        buffer.add_batch(step(8, 2))
        assert_window(buffer, 4, 9)


# ---- several threads


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def in_threads(*works: Callable[[], None], until: Callable[[], bool]) -> None:
    """Runs each work again and again in a thread of its own; the first error in any of them is raised."""
    is_over = threading.Event()
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            while not is_over.is_set():
                work()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            is_over.set()

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    with quick_switches():
        for thread in threads:
            thread.start()
        while not is_over.is_set() and not until():
            is_over.wait(0.01)
        is_over.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def assert_whole_samples(buffer: UniformReplayBuffer) -> None:
    items, info = buffer.get_next(16, num_steps=2)
    lanes = lanes_of(items)[:, :1]
    assert_rows(items, info.ids, lanes)
    items = buffer.gather_all()
    ids = items["number"] // 100
    assert (np.diff(ids, axis=1) == 1).all()
    assert_rows(items, ids, np.arange(buffer.batch_size)[:, None])


@pytest.mark.parametrize("is_mapped", [True, False])
def test_no_thread_ever_gets_a_mixed_row_of_a_ring_that_is_overwritten(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_mapped: bool
) -> None:
    if not is_mapped:
        monkeypatch.setattr("diskbuf.store.mapping.is_supported", lambda: False)
    lanes, length = 3, 8
    with filled(2, lanes, length, path=path, options=TINY) as buffer, diskbuf.open(path) as reader:
        ids = itertools.count(2)
        in_threads(
            lambda: buffer.add_batch(step(next(ids), lanes)),
            lambda: assert_whole_samples(buffer),
            lambda: assert_whole_samples(reader),
            lambda: assert_whole_samples(reader),
            until=after(2.0),
        )
        assert buffer.next_id > 20 * length


def test_threads_that_use_a_buffer_while_it_is_closed_are_told_so(path: Path) -> None:
    """The words that say what is in the window are let go of between two looks at them."""
    filled(5, path=path).close()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(40):
            buffer = diskbuf.open(path, "r+" if number % 2 else "r", options=NEVER)
            seen: list[BaseException] = []

            def until_closed(work: Callable[[], Any], seen: list[BaseException] = seen) -> None:
                try:
                    while True:
                        work()
                except Exception as raised:  # noqa: BLE001 - looked at below
                    seen.append(raised)

            works: list[Callable[[], Any]] = [
                buffer.num_frames,
                buffer.gather_all,
                functools.partial(buffer.get_next, 4),
                functools.partial(list, buffer.as_numpy_iterator(4)),
            ]
            if number % 2:
                works.append(functools.partial(buffer.add_batch, step(0, 2)))
            threads = [threading.Thread(target=until_closed, args=(work,)) for work in works]
            for thread in threads:
                thread.start()
            time.sleep(0.005)
            buffer.close()
            for thread in threads:
                thread.join()
            assert [
                type(error) for error in seen if not isinstance(error, diskbuf.ClosedError | diskbuf.ReadOnlyError)
            ] == []
            assert len(seen) == len(works)
    finally:
        sys.setswitchinterval(interval)


def test_threads_of_one_reader_never_get_a_mixed_row_while_writers_come_and_go(path: Path) -> None:
    """Each new writer makes the reader look at everything anew, in whichever thread comes first."""
    filled(4, max_length=None, path=path).close()
    next_id, runs = itertools.count(4), []
    is_late = after(2.0)

    def write() -> None:
        with UniformReplayBuffer(SPEC, 2, None, path=path, options=TINY) as buffer:
            for _ in range(3):
                buffer.add_batch(step(next(next_id), 2))
        runs.append(buffer)

    with diskbuf.open(path) as reader:
        readers = [lambda: assert_whole_samples(reader)] * 3
        in_threads(write, *readers, until=lambda: is_late() and len(runs) > 2)


def test_threads_of_one_reader_never_get_zeros_of_rows_that_left_the_window(path: Path) -> None:
    """A store that keeps history never overwrites them, but one thread may let go of what another still reads."""
    with (
        filled(4, max_length=4, keep_history=True, path=path) as buffer,
        diskbuf.open(path) as reader,
    ):
        ids = itertools.count(4)
        in_threads(
            lambda: buffer.add_batch(step(next(ids), 2)), *[lambda: assert_whole_samples(reader)] * 3, until=after(1.5)
        )


def test_rows_that_another_thread_let_go_of_are_read_again_not_handed_out(path: Path) -> None:
    with filled(4, max_length=4, keep_history=True, path=path) as buffer, diskbuf.open(path) as reader:
        store = reader._store
        first_id, next_id = store.window()
        buffer.extend(span(4, 100, 2))
        assert_window(reader, 96, 100)
        assert store.gather(first_id, np.arange(8)) is None
        assert store.read_range(first_id, next_id) is None


def test_rows_read_while_another_thread_looks_at_everything_anew_are_not_handed_out(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(4, path=path).close()
    with diskbuf.open(path) as reader:
        store = reader._store
        attach = store._attach
        gathered = []

        def watched(window: tuple[int, int]) -> None:
            gathered.append(store.gather(0, np.arange(8)))
            attach(window)

        first_id, next_id = store.window()
        monkeypatch.setattr(store, "_attach", watched)
        # A gather that begins before the look and ends after it.
        column = store.columns[0]
        take = column.take

        def slow(rows: np.ndarray) -> np.ndarray:
            UniformReplayBuffer(SPEC, 2, 5, path=path).close()
            store.window()
            return take(rows)

        monkeypatch.setattr(column, "take", slow)
        assert store.gather(first_id, np.arange(8)) is None
        assert gathered
        assert_window(reader, 0, next_id)


def test_a_clear_in_another_thread_never_makes_the_window_negative(path: Path) -> None:
    with filled(1, path=path) as buffer, diskbuf.open(path) as reader:
        ids = itertools.count(1)

        def write() -> None:
            buffer.add_batch(step(next(ids), 2))
            buffer.clear()

        def look() -> None:
            assert reader.num_frames() >= 0
            assert (
                reader.gather_all()["number"].shape[1] <= 2
            )  # that of the beginning, and one more before the first clear
            with contextlib.suppress(diskbuf.EmptyBufferError):
                reader.get_next(2)

        in_threads(write, look, look, until=after(1.0))


def test_a_window_is_whole_even_when_a_clear_comes_between_its_two_words(path: Path) -> None:
    from diskbuf.store.header import FLOOR, NEXT

    class Words:
        """The header's words, with a writer that adds and clears just after the end was read."""

        def __init__(self, words: Any) -> None:
            self.words = words

        def __getitem__(self, number: int) -> int:
            value = self.words[number]
            if number == NEXT:
                self.words[NEXT] += 1
                self.words[FLOOR] = self.words[NEXT]
            return value

    with filled(3, path=path) as buffer:
        store = buffer._store
        words = store._words
        store._words = Words(words)
        try:
            first_id, next_id = store._bounds()
        finally:
            store._words = words
        assert first_id == next_id == 4


def test_samplers_of_different_sizes_each_get_their_own(path: Path) -> None:
    with filled(8, path=path) as buffer:

        def sample(size: int) -> Callable[[], None]:
            def get() -> None:
                items, info = buffer.get_next(size)
                assert info.ids.shape == items["number"].shape == (size,)

            return get

        in_threads(sample(1), sample(3), sample(17), until=after(1.0))


def test_one_writer_process_and_one_reader_process_share_a_tiny_ring_without_a_mixed_row(path: Path) -> None:
    code = """
        import sys, time
        import numpy as np
        import diskbuf
        from coded_rows import SPEC, step
        options = diskbuf.StoreOptions(chunk_bytes=64, fsync_seconds=0.2)
        buffer = diskbuf.UniformReplayBuffer(SPEC, 3, 8, path=sys.argv[1], options=options)
        buffer.add_batch(step(0, 3)), buffer.add_batch(step(1, 3))
        print("ready", flush=True)
        end = time.monotonic() + 3
        step_id = 2
        while time.monotonic() < end:
            buffer.add_batch(step(step_id, 3))
            step_id += 1
        buffer.close()
        print(step_id, flush=True)
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with diskbuf.open(path) as reader:
            samples = 0
            while child.poll() is None:
                assert_whole_samples(reader)
                samples += 1
            added = int(child.stdout.readline())
            assert_window(reader, added - 8, added)
    assert child.returncode == 0
    assert samples > 20
    assert added > 1000


def test_a_path_with_a_tilde_that_no_shell_expanded_is_refused() -> None:
    with pytest.raises(diskbuf.OptionError, match=r"got '~/x'\. Use os\.path\.expanduser"):
        UniformReplayBuffer(ArraySpec([], "int64"), path="~/x")


def test_the_holder_of_a_store_is_told_that_it_is_itself(path: Path) -> None:
    with (
        UniformReplayBuffer(ArraySpec([], "int64"), path=path),
        pytest.raises(diskbuf.StoreLockedError, match=r"which is this one, .* Close that buffer"),
    ):
        UniformReplayBuffer(ArraySpec([], "int64"), path=path)


def test_forked_children_draw_samples_of_their_own_unless_a_seed_was_given() -> None:
    for seed in (None, 3):
        with UniformReplayBuffer(ArraySpec([], "int64"), max_length=1000, seed=seed) as buffer:
            buffer.extend(np.arange(1000)[None])
            drawn = []
            for _ in range(3):
                receive, send = os.pipe()
                if not (child := os.fork()):
                    os.write(send, buffer.get_next(10)[1].ids.tobytes())
                    os._exit(0)
                os.waitpid(child, 0)
                drawn.append(tuple(np.frombuffer(os.read(receive, 80), np.int64)))
                os.close(receive)
                os.close(send)
            assert len({*drawn, tuple(buffer.get_next(10)[1].ids)}) == (4 if seed is None else 1)


def test_symbolic_tensors_are_refused_with_the_way_round() -> None:
    import tensorflow as tf

    with UniformReplayBuffer(ArraySpec([], "float32")) as buffer:

        @tf.function(autograph=False)  # which would wrap the error in one of its own
        def add(x: Any) -> None:
            buffer.add_batch(x)

        with pytest.raises(diskbuf.SpecError, match=r"symbolic one of a tf\.function\. Add outside"):
            add(tf.zeros([1]))
        buffer.add_batch(tf.zeros([1]))
        assert buffer.num_frames() == 1


# ---- what is easy to do wrong around a buffer


def test_a_forked_child_reads_what_its_parent_adds_later() -> None:
    for max_length in (None, 5000):
        options = StoreOptions(chunk_bytes=4096)
        with UniformReplayBuffer(ArraySpec([], "int64"), 1, max_length, options=options) as buffer:
            buffer.extend(np.arange(1, 101)[None])
            receive, send = os.pipe()
            if not (child := os.fork()):
                os.read(receive, 1)
                found = buffer.gather_all()[0]
                os._exit(0 if found.tolist() == list(range(1, 5001)) else 1)
            buffer.extend(np.arange(101, 5001)[None])
            os.write(send, b"x")
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            os.close(receive)
            os.close(send)


def test_a_change_of_folder_leads_into_no_other_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, options = ArraySpec([], "int64"), StoreOptions(chunk_bytes=4096)
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "y")
    with UniformReplayBuffer(spec, 1, None, path="store", options=options) as other:
        other.extend(np.full([1, 2000], 7))
    monkeypatch.chdir(tmp_path / "x")
    with UniformReplayBuffer(spec, 1, None, path="store", options=options) as buffer:
        monkeypatch.chdir(tmp_path / "y")
        buffer.extend(np.arange(1500)[None])
    for name, expected in (("x", np.arange(1500)), ("y", np.full(2000, 7))):
        with diskbuf.open(tmp_path / name / "store") as reader:
            np.testing.assert_array_equal(reader.gather_all()[0], expected)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside a callback
def test_adding_goes_on_after_interrupts_at_any_moment(path: Path) -> None:
    spec = {"a": ArraySpec([32], "int64"), "b": ArraySpec([512], "int64")}
    options = StoreOptions(chunk_bytes=4096, fsync="never")
    rng = np.random.default_rng(0)
    with handler_of_alarms(signal.default_int_handler):
        with UniformReplayBuffer(spec, 1, 10, path=path, options=options) as buffer:
            for _ in range(60):
                try:
                    # Again and again: Python swallows an exception that happens to be raised in a callback.
                    signal.setitimer(signal.ITIMER_REAL, 1e-5 + rng.random() * 0.003, 0.5)
                    while True:
                        number = buffer.next_id
                        buffer.add_batch({"a": np.full([1, 32], number), "b": np.full([1, 512], number)})
                except KeyboardInterrupt:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                items = buffer.gather_all()
                ids = np.arange(buffer.first_id, buffer.next_id)
                assert (items["a"][0] == ids[:, None]).all()
                assert (items["b"][0] == ids[:, None]).all()
        diskbuf.open(path, "r+").close()  # the lock is free


def test_a_signal_handler_that_comes_back_in_is_told_and_nothing_hangs(path: Path) -> None:
    told: list[str] = []

    def flush(*_: object) -> None:
        try:
            buffer.flush()
        except diskbuf.BusyError as error:
            told.append(str(error))

    spec = {"a": ArraySpec([], "int64"), "b": ArraySpec([64, 64], "uint8")}
    with (
        handler_of_alarms(flush),
        UniformReplayBuffer(spec, 1, 1000, path=path, options=StoreOptions(chunk_bytes=65536)) as buffer,
    ):
        end, number = time.monotonic() + 30, 0
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.003)
        while not told and time.monotonic() < end:
            buffer.add_batch({"a": np.full([1], number), "b": np.zeros([1, 64, 64], "u1")})
            number += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert "Set a flag in the handler" in told[0]
        assert buffer.next_id == number
        assert (np.diff(buffer.gather_all()["a"][0]) == 1).all()


@contextlib.contextmanager
def handler_of_alarms(handler: Any) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_metadata_is_a_copy(path: Path) -> None:
    metadata: dict[str, Any] = {"a": [1]}
    with UniformReplayBuffer(ArraySpec([], "int64"), path=path, metadata=metadata) as buffer:
        metadata["b"] = object()
        buffer.metadata["a"].append(2)
        buffer.add_batch(np.zeros(1, int))
        assert buffer.metadata == {"a": [1]}
    with pytest.raises(diskbuf.OptionError, match="as JSON gives it back"):
        UniformReplayBuffer(ArraySpec([], "int64"), metadata={1: (2, 3)})


@pytest.mark.parametrize("size", [3, 10000])
def test_what_only_looks_like_an_array_is_refused(size: int) -> None:
    options = StoreOptions(chunk_bytes=20000)
    with UniformReplayBuffer(ArraySpec([size], "bool"), 1, 10, options=options) as buffer:
        for _ in range(40):
            buffer.add_batch(np.zeros([1, size], bool))
        for leaf in (ArraySpec([1, size], "bool"), np.ma.masked_array(np.zeros([1, size], bool), mask=True)):
            with pytest.raises(diskbuf.SpecError, match=r"must be an? (numpy )?array"):
                buffer.add_batch(leaf)
        assert buffer.next_id == 40


def test_a_wrong_argument_leaves_the_store_unlocked(path: Path) -> None:
    filled(3, path=path).close()
    with pytest.raises(diskbuf.OptionError, match="seed must be") as caught:
        diskbuf.open(path, "r+", seed="x")  # type: ignore[arg-type]
    diskbuf.open(path, "r+").close()  # while the error, and all that its traceback holds, lives
    assert caught.value


def test_a_copy_made_while_the_store_was_written_trusts_only_what_was_synced(path: Path) -> None:
    import shutil

    with UniformReplayBuffer(ArraySpec([], "int64"), 1, None, path=path, options=NEVER) as buffer:
        buffer.extend(np.arange(10)[None])
        buffer.flush()
        shutil.copytree(path, path.with_name("copy"))
        buffer.extend(np.arange(10, 50)[None])
        shutil.copy(path / ".diskbuf" / "live", path.with_name("copy") / ".diskbuf" / "live")
    with pytest.warns(RuntimeWarning, match="are certain to be whole"):
        reader = diskbuf.open(path.with_name("copy"))
    with reader:
        assert reader.gather_all()[0].tolist() == list(range(10))


def test_a_store_opened_again_and_again_does_not_grow(path: Path) -> None:
    for _ in range(30):
        with filled(2, path=path):
            pass
    runs = json.loads((path / "zarr.json").read_text())["attributes"]["diskbuf"]["runs"]
    assert len(runs) <= 6


def test_a_program_that_ends_without_closing_has_its_steps_flushed(path: Path) -> None:
    code = """
        import sys, numpy as np, diskbuf
        options = diskbuf.StoreOptions(fsync="never")
        buffer = diskbuf.UniformReplayBuffer(diskbuf.ArraySpec([], "int64"), path=sys.argv[1], options=options)
        buffer.extend(np.arange(30)[None])
    """
    run_python(code, path)
    manifest = json.loads((path / "zarr.json").read_text())["attributes"]["diskbuf"]
    assert manifest["next_id"] == 30


@pytest.mark.parametrize("call", ["get_next", "gather_all"])
def test_a_reader_beside_a_writer_at_full_speed_still_gets_its_rows(path: Path, call: str) -> None:
    """The window moves on by more than the spare chunks while a large read goes on."""
    write = """
        import sys, numpy as np, diskbuf
        options = diskbuf.StoreOptions(chunk_bytes=65536)
        spec = diskbuf.ArraySpec([64, 64], "uint8")
        with diskbuf.UniformReplayBuffer(spec, 1, 2000, path=sys.argv[1], options=options) as buffer:
            steps = np.arange(2000, dtype="uint8")[None, :, None, None].repeat(64, 2).repeat(64, 3)
            buffer.extend(steps)
            print("full", flush=True)
            while True:
                for number in range(2000):
                    buffer.add_batch(steps[:, number])
    """
    command = [sys.executable, "-c", textwrap.dedent(write), str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"full\n"
        try:
            with diskbuf.open(path) as reader:
                for _ in range(5):
                    if call == "get_next":
                        frames, info = reader.get_next(3000)
                        assert (frames[:, 0, 0] == info.ids % 2000 % 256).all()
                    else:
                        frames = reader.gather_all()[0]
                    assert len(frames) > 0
                    assert (frames == frames[:, :1, :1]).all()
        finally:
            writer.kill()
