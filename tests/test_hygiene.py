"""What is left behind by using a store often: no threads, descriptors, mappings, memory, files or disk space."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coded_rows import SPEC, assert_rows, span
from crash_writer import IS_LONG

import diskbuf

MOST_MEMORY_BYTES = 3 * 2**20  # that the allocator may take and keep; a leak of 8 kB a cycle is more

FACTS = """
import gc, os, sys, threading
from pathlib import Path
import numpy as np
import diskbuf
from coded_rows import SPEC, assert_rows, lanes_of, span, step

os.fsync = os.fdatasync = lambda descriptor: None  # nothing here is about power cuts
path = Path(sys.argv[1])
options = diskbuf.StoreOptions(chunk_bytes=256, fsync_seconds=0.05)

def open_writer(max_length=20):
    return diskbuf.UniformReplayBuffer(SPEC, 2, max_length, path=path, options=options)

def facts():
    gc.collect()
    private = [name for name in os.listdir(os.environ["TMPDIR"]) if name.startswith("diskbuf")]  # not TensorFlow's
    maps = Path("/proc/self/maps").read_text().splitlines()
    counts = {
        "threads": threading.active_count(),
        "kernel threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings of the store": sum(str(path) in line for line in maps),
        "mappings": len(maps),
        "files": sum(len(names) for _, _, names in os.walk(path)),
        "files in the temporary folder": len(private),
    }
    return counts, int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

def assert_no_growth(before, after, most_bytes, most_mappings=0):
    for name, count in before[0].items():
        spare = most_mappings if name == "mappings" else 0  # the allocators' own
        assert after[0][name] <= count + spare, (name, before, after)
    assert after[1] - before[1] <= most_bytes, (before, after)
    print(*after[0].items(), "bytes:", after[1] - before[1])
"""

CYCLES = """
small = {"x": diskbuf.ArraySpec([], "int64")}  # fewer files, to be quick

def cycle(number):
    with (
        diskbuf.UniformReplayBuffer(small, 2, 40, path=path, options=options) as buffer,
        diskbuf.open(path) as reader,
    ):
        buffer.add_batch({"x": np.array([number, number])})
        reader.get_next(4)
        assert reader.gather_all()["x"][0].tolist() == list(range(max(0, number - 39), number + 1))
    if number % 10 == 0:
        forgotten = diskbuf.UniformReplayBuffer(SPEC, 2, options=options)  # and not closed
        forgotten.add_batch(step(0, 2))

for number in range(48):
    cycle(number)
before = facts()
for number in range(48, 560):  # ends as it began, in the middle of a chunk
    cycle(number)
assert_no_growth(before, facts(), int(sys.argv[2]), most_mappings=4)
"""

DATASETS = """
def use(dataset, elements):
    iterator = iter(dataset)
    for _ in range(elements):
        next(iterator)

def make(reader, number):
    return reader.as_dataset(4, 2, single_deterministic_pass=number % 4 == 3).prefetch(2)

with open_writer() as buffer:
    buffer.extend(span(0, 50, 2))
with diskbuf.open(path) as reader:
    datasets = [make(reader, number) for number in range(4)]
    for number in range(4):
        use(datasets[number], 3)
        use(make(reader, number), 3)
    before = facts()
    for number in range(int(sys.argv[3])):
        use(datasets[number % 4], number % 5)
    assert_no_growth(before, facts(), int(sys.argv[2]), most_mappings=8)
    new = int(sys.argv[3]) // 4  # each is traced, which takes long
    for number in range(new):
        use(make(reader, number), number % 5)
    # TensorFlow 2.21 itself keeps 70 kB for each function that is traced, with or without diskbuf
    assert_no_growth(before, facts(), int(sys.argv[2]) + new * 100_000, most_mappings=16)
"""

FEW_DESCRIPTORS = """
import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
small = {"x": diskbuf.ArraySpec([], "int64")}
options = diskbuf.StoreOptions(chunk_bytes=8, fsync_seconds=0.05)
if sys.argv[2] == "unmapped":
    from diskbuf.store import mapping
    mapping.is_supported = lambda: False
with diskbuf.UniformReplayBuffer(small, 1, None, path=path, options=options) as buffer:
    buffer.extend({"x": np.arange(5000)[None]})
    assert len(list((path / "x").glob("c.*"))) == 5000
    buffer.flush()
with diskbuf.UniformReplayBuffer(small, 1, None, path=path, options=options) as buffer, diskbuf.open(path) as reader:
    for step_id in range(5000, 5100):
        buffer.add_batch({"x": np.array([step_id])})
        items, info = reader.get_next(300)
        assert (items["x"] == info.ids).all()
    for one in (buffer, reader):
        assert (one.gather_all()["x"] == np.arange(5100)).all()
    buffer.clear()
    assert reader.num_frames() == 0
    buffer.add_batch({"x": np.array([5100])})
    assert reader.gather_all()["x"].tolist() == [[5100]]
assert len(list((path / "x").glob("c.*"))) == 1
with diskbuf.open(path, verify=True) as reader:
    assert reader.gather_all()["x"].tolist() == [[5100]]
assert len(os.listdir("/proc/self/fd")) < 20
"""


def run(script: str, tmp_path: Path, *arguments: object) -> None:
    (tmp_path / "tmp").mkdir()
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", FACTS + script, tmp_path / "store", *map(str, arguments)],
        cwd=Path(__file__).parent,
        env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    print(ended.stdout)  # noqa: T201 - the figures, for pytest -s
    assert not list((tmp_path / "tmp").glob("diskbuf*"))


def test_five_hundred_openings_leave_nothing_behind(tmp_path: Path) -> None:
    run(CYCLES, tmp_path, MOST_MEMORY_BYTES)


def test_datasets_given_up_on_the_way_leave_nothing_behind(tmp_path: Path) -> None:
    run(DATASETS, tmp_path, MOST_MEMORY_BYTES, 160 if IS_LONG else 60)


@pytest.mark.parametrize("how", ["mapped", "unmapped"])
def test_a_process_that_may_open_256_files_uses_a_store_of_5000(tmp_path: Path, how: str) -> None:
    run(FEW_DESCRIPTORS, tmp_path, how)


# ---- disk space


def used_bytes(folder: Path) -> int:
    """What the file system has set aside for a column's chunks, and those that readers still hold."""
    return sum(file.stat().st_blocks for file in folder.glob("c.*")) * 512


@pytest.mark.parametrize(
    ("shape", "dtype", "lanes", "max_length"),
    [
        ([], "bool", 1, 1),
        ([], "int64", 1, 1000),
        ([3], "float32", 7, 333),
        ([5], "float64", 32, 10_000),
        ([84, 84], "uint8", 1, 700),
        ([84, 84], "uint8", 8, 65),
        ([84, 84, 4], "uint8", 3, 129),
        ([1000], "float64", 1, 513),
        ([300, 1000], "uint8", 2, 9),
        ([2**20], "uint8", 1, 5),
        ([0], "float32", 4, 100),
    ],
)
def test_a_full_ring_uses_a_quarter_more_disk_than_its_rows_and_a_mebibyte(
    tmp_path: Path, shape: list[int], dtype: str, lanes: int, max_length: int
) -> None:
    spec = {"column": diskbuf.ArraySpec(shape, dtype), "reward": diskbuf.ArraySpec([], "float32")}
    row_bytes = {"column": int(np.prod(shape)) * np.dtype(dtype).itemsize * lanes, "reward": 4 * lanes}
    options = diskbuf.StoreOptions(fsync="never")
    step = {"column": np.ones([lanes, *shape], dtype), "reward": np.ones([lanes], "float32")}
    most = dict.fromkeys(spec, 0)
    with diskbuf.UniformReplayBuffer(spec, lanes, max_length, path=tmp_path / "store", options=options) as buffer:
        for number in range(3 * max_length):
            buffer.add_batch(step)
            if number >= max_length and (number % max(1, max_length // 10) == 0 or number == 3 * max_length - 1):
                most = {name: max(most[name], used_bytes(tmp_path / "store" / name)) for name in spec}
        buffer.flush()
        for name, used in most.items():
            assert max(used, used_bytes(tmp_path / "store" / name)) <= 1.25 * max_length * row_bytes[name] + 2**20
            assert used >= max_length * row_bytes[name] // 2, "the ring must be full to be measured"


def deleted_mappings(store: Path) -> list[str]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if str(store) in line and line.endswith("(deleted)")]


def deleted_descriptors(store: Path) -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:
            continue  # the listing's own
        if str(store) in target and target.endswith("(deleted)"):
            found.append(target)
    return found


@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_reader_keeps_no_space_of_files_that_a_clear_has_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mapped: bool
) -> None:
    if not is_mapped:
        monkeypatch.setattr("diskbuf.store.mapping.is_supported", lambda: False)
    store = tmp_path / "store"
    options = diskbuf.StoreOptions(chunk_bytes=256, fsync="never")
    with (
        diskbuf.UniformReplayBuffer(SPEC, 2, None, path=store, options=options) as buffer,
        diskbuf.open(store) as reader,
    ):
        first_id = 0
        for next_id in (101, 250, 333):
            buffer.extend(span(first_id, next_id, 2))
            assert reader.next_id == next_id
            batch = reader.gather_all()
            buffer.clear()
            assert deleted_mappings(store) or deleted_descriptors(store), "or nothing is tested"
            assert reader.num_frames() == 0
            assert not deleted_mappings(store)
            assert not deleted_descriptors(store)
            assert_rows(batch, np.arange(first_id, next_id)[None], np.arange(2)[:, None])
            first_id = next_id


def test_a_reader_keeps_no_space_of_files_that_a_shorter_window_has_removed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    arguments: dict[str, Any] = {"path": store, "options": diskbuf.StoreOptions(chunk_bytes=256, fsync="never")}
    with diskbuf.UniformReplayBuffer(SPEC, 2, 100, **arguments) as buffer:
        buffer.extend(span(0, 150, 2))
    with diskbuf.open(store) as reader:
        reader.gather_all()
        with diskbuf.UniformReplayBuffer(SPEC, 2, 10, trim=True, **arguments):
            assert (reader.first_id, reader.next_id) == (140, 150)
            assert_rows(reader.gather_all(), np.arange(140, 150)[None], np.arange(2)[:, None])
            assert not deleted_mappings(store)
