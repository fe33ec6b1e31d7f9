"""One writer and readers in other processes; children that are forked or spawned; buffers that are sent to another."""

import dataclasses
import json
import multiprocessing
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coded_rows import SPEC, assert_rows, lanes_of, span
from crash_writer import (
    DEADLINE_SECONDS,
    IS_LONG,
    Counters,
    Shape,
    WriterProcess,
    assert_equal_steps,
    assert_whole,
    writer_argv,
)

import diskbuf

SECONDS = 30.0 if IS_LONG else 1.5
READERS = 4
TINY = diskbuf.StoreOptions(chunk_bytes=64, fsync="never")


def run_beside(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts Python code that may import these tests and has the arguments in sys.argv."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    """Waits for the end of a process that must end well."""
    output, errors = process.communicate(timeout=SECONDS + 2 * DEADLINE_SECONDS)
    assert process.returncode == 0, errors
    return output


# ---- readers beside a writer


def follow(store: Path, counters: Counters, shape: Shape, seconds: float) -> dict[str, int]:
    """Reads beside a writer and fails at a row that isn't whole or a step that comes late; says what it saw."""
    seen = {"looks": 0, "samples": 0, "steps": 0, "clears": 0}
    with diskbuf.open(store) as reader:
        end = time.monotonic() + seconds
        first_looked, cleared = reader.next_id, counters.cleared
        while time.monotonic() < end:
            acknowledged = counters.acknowledged
            next_id = reader.next_id
            assert acknowledged <= next_id <= counters.begun

            acknowledged = counters.acknowledged
            steps = reader.gather_all()
            ids = steps["id"][0]
            if ids.size:
                assert acknowledged <= ids[-1] + 1 <= counters.begun
                assert shape.length is None or ids.size <= shape.length
                assert_equal_steps(steps, shape.sequence(ids[0], ids[-1] + 1))
            try:
                rows, info = reader.get_next(16, num_steps=2)
            except diskbuf.WindowError:
                pass  # just cleared
            else:
                lanes = rows["code"][1][..., 1].astype(np.int64)
                assert_equal_steps(rows, shape.steps(info.ids, lanes))
                seen["samples"] += 1
            seen["looks"] += 1
            seen["clears"] += counters.cleared != cleared
            cleared = counters.cleared
        seen["steps"] = reader.next_id - first_looked
    return seen


FOLLOWS = """
import json, sys
from pathlib import Path
from crash_writer import Counters, Shape
from test_processes import follow
store, counters, shape, seconds = sys.argv[1:]
print(json.dumps(follow(Path(store), Counters(Path(counters)), Shape(**json.loads(shape)), float(seconds))))
"""


@pytest.mark.parametrize("kind", ["ring", "unbounded", "history"] if IS_LONG else ["ring", "unbounded"])
def test_four_processes_read_whole_steps_without_delay_beside_a_writer(tmp_path: Path, kind: str) -> None:
    shape = Shape(kind=kind, max_length=7, chunk_bytes=32)
    store, counters = tmp_path / "store", tmp_path / "counters"
    shape.open(store).close()
    does = "add,add,extend,clear,flush,reopen"
    with WriterProcess(writer_argv(store, counters, shape, "--no-sync", "--does", does)) as writer:
        writer.wait_for(lambda: writer.counters.acknowledged > 0)
        facts = json.dumps(dataclasses.asdict(shape))
        readers = [run_beside(FOLLOWS, store, counters, facts, SECONDS) for _ in range(READERS)]
        seen = [json.loads(output_of(reader)) for reader in readers]
        writer.kill()
    # A busy machine may give a reader little time; together they must have seen the store move.
    assert all(facts_seen["looks"] > 0 for facts_seen in seen), seen
    for fact in ("samples", "clears", "steps"):
        assert sum(facts_seen[fact] for facts_seen in seen) > 0, seen
    with diskbuf.open(store) as reader:
        writer.counters.assert_agree(assert_whole(reader, shape), shape.length)


def filled(path: Path, steps: int, *, max_length: int | None = 8, **arguments: Any) -> diskbuf.UniformReplayBuffer:
    buffer = diskbuf.UniformReplayBuffer(SPEC, 2, max_length, path=path, options=TINY, **arguments)
    buffer.extend(span(0, steps, 2))
    return buffer


def test_a_batch_keeps_its_values_while_its_rows_are_overwritten(tmp_path: Path) -> None:
    with filled(tmp_path / "store", 8) as buffer, diskbuf.open(tmp_path / "store") as reader:
        everything = reader.gather_all()
        sample, info = reader.get_next(16, num_steps=2)
        single, of_single = reader.get_next()
        read = reader.read([0, 7], 1)
        buffer.extend(span(8, 100, 2))
        buffer.clear()
        assert reader.num_frames() == 0
        assert_rows(everything, np.arange(8)[None], np.arange(2)[:, None])
        assert_rows(sample, info.ids, lanes_of(sample)[:, :1])
        assert_rows(single, of_single.ids, lanes_of(single))
        assert_rows(read, [0, 7], 1)


def test_elements_that_tensorflow_has_prefetched_keep_their_values(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with filled(path, 8, max_length=8) as buffer, diskbuf.open(path) as reader:
        store = reader._store
        assert store is not None
        gathers = []
        gather = store.gather
        store.gather = lambda *arguments: gathers.append(1) or gather(*arguments)  # type: ignore[method-assign]
        iterator = reader.as_dataset(16, num_steps=2, read_ahead=1).prefetch(4).as_numpy_iterator()
        elements = [next(iterator)]
        give_up = time.monotonic() + DEADLINE_SECONDS
        while len(gathers) < 4:  # so that at least one that isn't handed out yet has been read
            assert time.monotonic() < give_up
            time.sleep(0.001)
        buffer.extend(span(8, 100, 2))
        elements += [next(iterator) for _ in range(40)]
        for items, info in elements:
            assert_rows(items, info.ids, lanes_of(items)[:, :1])
        assert (elements[1][1].ids < 8).all(), "the second element was read before the rows were overwritten"
        assert (elements[-1][1].ids >= 8).all()


# ---- children


def read_as_a_child(reader: diskbuf.UniformReplayBuffer, shape: Shape, next_id: int) -> None:
    """What a child of a process that has a reader does with it."""
    assert assert_whole(reader, shape) == (next_id - shape.max_length, next_id)
    rows, info = reader.get_next(8, num_steps=2)
    assert_equal_steps(rows, shape.steps(info.ids, rows["code"][1][..., 1].astype(np.int64)))


def read_in_children(path: Path) -> None:
    """Has children read that were made by a process which reads itself, with TensorFlow too, and writes."""
    shape = Shape(max_length=20)
    with shape.open(path) as buffer, diskbuf.open(path) as reader:
        buffer.extend(shape.sequence(0, 50))
        assert_whole(reader, shape)
        next(iter(reader.as_dataset(4, num_steps=2).prefetch(2)))
        for number, method in enumerate(("fork", "spawn", "forkserver"), start=1):
            next_id = 50 + 40 * number
            buffer.extend(shape.sequence(next_id - 40, next_id))  # the child is the first to look at these
            child = multiprocessing.get_context(method).Process(target=read_as_a_child, args=(reader, shape, next_id))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
                child.start()
            child.join(20)
            is_late = child.is_alive()
            child.kill()
            assert not is_late, f"the {method} child must read within 20 s"
            assert child.exitcode == 0, method
            assert assert_whole(reader, shape) == (next_id - 20, next_id)


CHILDREN = """
import sys
from pathlib import Path
from test_processes import read_in_children
read_in_children(Path(sys.argv[1]))
"""


def test_forked_and_spawned_children_read_what_their_parent_reads(tmp_path: Path) -> None:
    output_of(run_beside(CHILDREN, tmp_path / "store"))


FORKS_UNDER_A_LOCK = """
import os, signal, sys, threading
from pathlib import Path
from crash_writer import Shape, assert_whole
import diskbuf
shape = Shape(kind="unbounded")
path = Path(sys.argv[1])
with shape.open(path) as buffer, diskbuf.open(path) as reader:
    buffer.extend(shape.sequence(0, 5))
    assert assert_whole(reader, shape) == (0, 5)
    buffer.extend(shape.sequence(5, 90))
    is_held, is_over = threading.Event(), threading.Event()
    def hold():
        with reader._store._attaching:  # as a thread that follows the writer may at a fork
            is_held.set()
            is_over.wait()
    thread = threading.Thread(target=hold)
    thread.start()
    is_held.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        os._exit(assert_whole(reader, shape) != (0, 90))
    is_over.set()
    thread.join()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, code
"""


def test_a_child_forked_while_a_thread_attaches_chunks_reads(tmp_path: Path) -> None:
    output_of(run_beside(FORKS_UNDER_A_LOCK, tmp_path / "store"))


# ---- buffers that are sent


def sent(buffer: diskbuf.UniformReplayBuffer) -> diskbuf.UniformReplayBuffer:
    found = pickle.loads(pickle.dumps(buffer))
    assert isinstance(found, diskbuf.UniformReplayBuffer)
    return found


def test_a_pickled_reader_is_its_path_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "store", 20, keep_history=True).close()
    monkeypatch.chdir(tmp_path)
    reader = diskbuf.open("store", history=True, seed=3, dataset_drop_remainder=True, dataset_window_shift=1)
    with reader:
        assert len(pickle.dumps(reader)) < 1000, "no rows are sent"
        assert (reader.first_id, reader.next_id) == (0, 20)
        monkeypatch.chdir("/")
        message = pickle.dumps(diskbuf.open(tmp_path / "store", history=True, seed=3))
    with pickle.loads(message) as other, diskbuf.open(tmp_path / "store", history=True, seed=3) as fresh:
        assert (other.first_id, other.next_id) == (0, 20)
        for _ in range(3):
            np.testing.assert_array_equal(other.get_next(9)[1].ids, fresh.get_next(9)[1].ids)
        with pytest.raises(diskbuf.ReadOnlyError):
            other.add_batch(span(20, 21, 2))


def test_a_pickled_reader_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "store", 5).close()
    monkeypatch.chdir(tmp_path)
    with diskbuf.open("store") as reader:
        message = pickle.dumps(reader)
    monkeypatch.chdir("/")
    with pickle.loads(message) as other:
        assert (other.first_id, other.next_id) == (0, 5)


def test_a_pickled_reader_keeps_how_its_datasets_are_cut(tmp_path: Path) -> None:
    filled(tmp_path / "store", 5).close()
    with (
        diskbuf.open(tmp_path / "store", dataset_drop_remainder=True, dataset_window_shift=1) as reader,
        sent(reader) as other,
    ):
        dataset = other.as_dataset(2, num_steps=2, single_deterministic_pass=True)
        ids = [info.ids[0].tolist() for _, info in dataset.as_numpy_iterator()]
        assert ids == [[0, 1], [1, 2], [2, 3], [3, 4]]


def test_a_pickled_reader_goes_on_verifying(tmp_path: Path) -> None:
    filled(tmp_path / "store", 64, max_length=None).close()
    with diskbuf.open(tmp_path / "store", verify=True) as reader:
        message = pickle.dumps(reader)
    chunk = min((tmp_path / "store" / "number").glob("c.*"))
    chunk.write_bytes(bytes(chunk.stat().st_size))
    with pickle.loads(message) as other, pytest.raises(diskbuf.StoreCorruptError, match=chunk.name):
        other.gather_all()


def test_a_pickled_reader_goes_on_skipping_what_is_damaged(tmp_path: Path) -> None:
    filled(tmp_path / "store", 64, max_length=None).close()
    min((tmp_path / "store" / "number").glob("c.*")).unlink()
    with pytest.warns(RuntimeWarning, match="is damaged"):
        reader = diskbuf.open(tmp_path / "store", skip_damaged=True)
    with pytest.warns(RuntimeWarning, match="is damaged"):
        other = sent(reader)
    assert (other.first_id, other.next_id) == (reader.first_id, reader.next_id)
    reader.close()
    other.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda path: filled(path.with_name("new"), 5),
        lambda path: diskbuf.open(path, "r+"),
        lambda _: diskbuf.UniformReplayBuffer(SPEC, 2),
    ],
    ids=["created", "opened", "private"],
)
def test_a_buffer_that_can_be_written_to_is_not_pickled(
    tmp_path: Path, make: Callable[[Path], diskbuf.UniformReplayBuffer]
) -> None:
    filled(tmp_path / "store", 5).close()
    with make(tmp_path / "store") as buffer:
        with pytest.raises(TypeError, match=r"open for reading only .*\(writable\).* diskbuf\.open\('/") as raised:
            pickle.dumps(buffer)
        assert str(buffer.path) in str(raised.value)


def test_a_closed_reader_is_not_pickled(tmp_path: Path) -> None:
    filled(tmp_path / "store", 5).close()
    reader = diskbuf.open(tmp_path / "store")
    reader.close()
    with pytest.raises(diskbuf.ClosedError):
        pickle.dumps(reader)
