"""Copies of stores: into every layout and place, the same ids and rows; interrupted, damaged and full ones too."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.dataset
import pytest
import tqdm
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from test_full_disk import small_disk  # noqa: F401 - a fixture

import diskbuf
from diskbuf.store import copy_target
from diskbuf.store.chunk_formats.arrow_parts import ArrowParts
from diskbuf.store.chunk_formats.zarr_shards import ZarrShards
from diskbuf.store.copy_target import CopyFolder
from diskbuf.store.journal import journal_of_store
from diskbuf.store.objects import LocalObjects
from diskbuf.store.remote_objects import RemoteObjects
from diskbuf.store.snapshot import ObjectSnapshot, RawSnapshot
from diskbuf.store.writing import WritableStore

BENCH = Path(__file__).parents[1] / "tools" / "bench" / "copying.py"
LANES = 3
SPEC = {
    "observation": diskbuf.ArraySpec([5, 2], "float32"),
    "deep": {"done": diskbuf.ArraySpec([], "bool"), "reward": diskbuf.ArraySpec([], "float64")},
    "action": diskbuf.ArraySpec([], "uint8"),
}
CHUNK_BYTES = 4096  # 34 ids of observations fill one

LAYOUTS: dict[str, dict[str, Any]] = {
    "raw": {},
    "zstd": {"codec": "zstd"},
    "blosc": {"codec": "blosc", "inner_rows": 2},
    "arrow": {"layout": "arrow"},
    "arrow-zstd": {"layout": "arrow", "codec": "zstd"},
}
# What `copy` takes for each.
WANTED: dict[str, dict[str, Any]] = {
    "raw": {"layout": "zarr", "codec": None},
    "zstd": {"layout": "zarr", "codec": "zstd"},
    "blosc": {"layout": "zarr", "codec": "blosc"},
    "arrow": {"layout": "arrow", "codec": None},
    "arrow-zstd": {"layout": "arrow", "codec": "zstd"},
}


def steps(first_id: int, next_id: int) -> dict[str, Any]:
    """[LANES, T, ...] steps whose values tell their ids."""
    ids = np.arange(first_id, next_id)[None, :] * LANES + np.arange(LANES)[:, None]
    return {
        "observation": (ids[..., None, None] + np.arange(10).reshape(5, 2) / 16).astype("float32"),
        "deep": {"done": ids % 7 == 0, "reward": np.sqrt(ids)},
        "action": (ids % 251).astype("uint8"),
    }


def make(path: Path, layout: str = "raw", shape: str = "ring", *, chunk_bytes: int = CHUNK_BYTES) -> Path:
    """Makes a store of several runs, closed with partial tails."""
    lengths: dict[str, Any] = {
        "ring": {"max_length": 150},
        "history": {"max_length": 40, "keep_history": True},
        "unbounded": {"max_length": None},
        "cleared": {"max_length": None},
        "emptied": {"max_length": 150},
        "new": {"max_length": 150},
    }
    options = diskbuf.StoreOptions(chunk_bytes=chunk_bytes, fsync="never", **LAYOUTS[layout])
    for first_id, next_id in [(0, 0)] if shape == "new" else [(0, 90), (90, 301)]:
        with diskbuf.UniformReplayBuffer(
            SPEC, LANES, path=path, metadata={"a": [1, None]}, options=options, **lengths[shape]
        ) as buffer:
            buffer.extend(steps(first_id, next_id))
            if shape == "cleared" and first_id:
                buffer.clear()
                buffer.extend(steps(next_id, next_id + 21))
            elif shape == "emptied" and first_id:
                buffer.clear()
    return path


def assert_rows(buffer: diskbuf.UniformReplayBuffer, first_id: int, next_id: int) -> None:
    assert (buffer.first_id, buffer.next_id) == (first_id, next_id)
    if first_id == next_id:
        return
    found, expected = buffer.gather_all(), steps(first_id, next_id)
    for leaf in ("observation", "action"):
        np.testing.assert_array_equal(found[leaf], expected[leaf], strict=True)
    for leaf in ("done", "reward"):
        np.testing.assert_array_equal(found["deep"][leaf], expected["deep"][leaf], strict=True)


def assert_same(source: Path | str, copied: Path | str, **options: Any) -> None:
    """The copy is what the source is, for readers of the window and of the history."""
    for history in (False, True):
        with (
            diskbuf.open(source, seed=3, history=history) as one,
            diskbuf.open(copied, seed=3, history=history, **options) as other,
        ):
            assert_rows(other, one.first_id, one.next_id)
            assert other._opened().runs == one._opened().runs
            assert (other.metadata, other.max_length, other.data_spec) == (one.metadata, one.max_length, one.data_spec)
            mine, theirs = one._opened().manifest, other._opened().manifest
            assert (mine.created, mine.generation, mine.keep_history) == (
                theirs.created,
                theirs.generation,
                theirs.keep_history,
            )
            if one.num_frames() >= 2 * LANES:
                for num_steps in (None, 2):
                    drawn, again = one.get_next(16, num_steps), other.get_next(16, num_steps)
                    np.testing.assert_array_equal(drawn[1].ids, again[1].ids)
                    np.testing.assert_array_equal(drawn[0]["observation"], again[0]["observation"])


def assert_goes_on(path: Path) -> None:
    """The copy can be opened for adding, twice, and keeps what it has."""
    with diskbuf.open(path) as buffer:
        first_id, next_id, length = buffer.first_id, buffer.next_id, buffer.max_length
    for count in (1, 200):
        with diskbuf.open(path, mode="r+") as buffer:
            buffer.extend(steps(next_id, next_id + count))
            next_id += count
            assert_rows(buffer, max(first_id, next_id - (length or next_id)), next_id)
        with diskbuf.open(path) as buffer:
            assert_rows(buffer, max(first_id, next_id - (length or next_id)), next_id)


@pytest.fixture
def memory() -> Iterator[str]:
    """A URL of nothing yet."""
    yield "memory://copies"
    fsspec.filesystem("memory").store.clear()


SHAPES = ["ring", "history", "unbounded", "cleared", "emptied", "new"]
# Every layout into every other, and every shape out of every layout, into the same or another one in turn.
_NEXT = dict(zip(LAYOUTS, [*list(LAYOUTS)[1:], "raw"], strict=True))
CASES = [(layout, wanted, "ring") for layout in LAYOUTS for wanted in LAYOUTS]
CASES += [
    (layout, layout if (number + row) % 2 else _NEXT[layout], shape)
    for row, layout in enumerate(LAYOUTS)
    for number, shape in enumerate(SHAPES[1:])
]


@pytest.mark.parametrize(("layout", "wanted", "shape"), CASES)
def test_a_copy_has_the_same_ids_and_rows_and_goes_on(tmp_path: Path, layout: str, wanted: str, shape: str) -> None:
    source, copied = make(tmp_path / "source", layout, shape), tmp_path / "copied"
    report = diskbuf.copy(source, copied, **WANTED[wanted])
    assert_same(source, copied)
    with diskbuf.open(copied, verify=True) as buffer:
        assert (report.first_id, report.next_id) == (buffer.first_id, buffer.next_id)
    assert not (copied / ".diskbuf" / "copying.json").exists()
    assert report.skipped == 0
    assert_goes_on(copied)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_far_away_has_the_same_ids_and_rows_and_comes_back(
    tmp_path: Path, memory: str, layout: str, shape: str
) -> None:
    source, there, back = make(tmp_path / "source", layout, shape), f"{memory}/there", tmp_path / "back"
    cache = diskbuf.ReadOptions(cache_dir=":memory:", retries=0)
    diskbuf.copy(source, there, read_options=cache)
    assert_same(source, there, read_options=cache)
    diskbuf.copy(there, back, read_options=cache, **WANTED["zstd" if layout == "arrow" else layout])
    assert_same(source, back)
    assert_goes_on(back)


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    report = diskbuf.copy(f"file://{source}", f"file://{tmp_path}/copied")
    assert report.destination == str(tmp_path / "copied")
    assert_same(source, tmp_path / "copied")
    assert_goes_on(tmp_path / "copied")


# ---- what is copied, and how


def chunks(path: Path) -> dict[str, bytes]:
    """The objects of a local store by name."""
    found = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path).as_posix()
        if file.is_file() and not name.startswith(".diskbuf") and file.name != "zarr.json":
            found[name] = file.read_bytes()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_objects_are_copied_byte_for_byte_where_the_layout_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    source = make(tmp_path / "source", layout, "unbounded")
    for kind in (ZarrShards, ArrowParts):
        for name in ("encode", "decode"):
            monkeypatch.setattr(kind, name, lambda *_, **__: pytest.fail("nothing is to be decoded"))
    report = diskbuf.copy(source, tmp_path / "copied", **(WANTED[layout] if layout != "blosc" else {}))
    assert chunks(tmp_path / "copied") == chunks(source)
    assert report.objects == len(chunks(source)) > 10
    monkeypatch.undo()
    assert_same(source, tmp_path / "copied")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_is_clean(tmp_path: Path, layout: str) -> None:
    diskbuf.copy(make(tmp_path / "source"), tmp_path / "copied", **WANTED[layout])
    assert diskbuf.verify(tmp_path / "copied", values=True).faults == ()


def test_chunks_are_those_of_a_new_store_or_of_the_length_asked_for(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "zstd")
    lengths = {}
    for name, wanted in {
        "kept": {},
        "named": {"codec": "zstd"},
        "new": {"codec": "lz4"},
        "smaller": {"chunk_bytes": 1024},
        "inner": {"codec": "zstd", "chunk_bytes": CHUNK_BYTES, "inner_rows": 4},
    }.items():
        diskbuf.copy(source, tmp_path / name, **wanted)
        assert_same(source, tmp_path / name)
        manifest = json.loads((tmp_path / name / "zarr.json").read_bytes())["attributes"]["diskbuf"]
        lengths[name] = (manifest["chunk_rows"]["observation"], manifest["codec"]["inner_rows"]["observation"])
    assert lengths == {"kept": (32, 32), "named": (32, 32), "new": (2048, 2048), "smaller": (8, 8), "inner": (32, 4)}


@settings(max_examples=25)
@given(data=st.data())
def test_any_chunk_lengths_go_into_any_others(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    folder = tmp_path_factory.mktemp("copy")
    sizes = st.integers(1, 4000)
    length, layout = data.draw(st.none() | st.integers(1, 90)), data.draw(st.sampled_from(["raw", "zstd", "arrow"]))
    options = diskbuf.StoreOptions(chunk_bytes=data.draw(sizes), fsync="never", **LAYOUTS[layout])
    history = data.draw(st.booleans())
    with diskbuf.UniformReplayBuffer(
        SPEC, LANES, path=folder / "source", max_length=length, keep_history=history, options=options
    ) as buffer:
        next_id = 0
        for count, clears in data.draw(st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=3)):
            buffer.extend(steps(next_id, next_id + count))
            next_id += count
            if clears:
                buffer.clear()
        wanted = data.draw(st.sampled_from(["raw", "zstd", "arrow", "arrow-zstd"]))
        diskbuf.copy(folder / "source", folder / "live", chunk_bytes=data.draw(sizes), **WANTED[wanted])
    diskbuf.copy(folder / "source", folder / "closed", chunk_bytes=data.draw(sizes), **WANTED[wanted])
    assert_same(folder / "source", folder / "live")
    assert_same(folder / "source", folder / "closed")
    shutil.rmtree(folder)


def test_rows_that_only_the_journal_has_are_copied(tmp_path: Path) -> None:
    options = diskbuf.StoreOptions(chunk_bytes=CHUNK_BYTES, fsync="always")
    with diskbuf.UniformReplayBuffer(SPEC, LANES, 150, path=tmp_path / "first", options=options) as buffer:
        for step in range(40):
            buffer.extend(steps(step, step + 1))
        shutil.copytree(tmp_path / "first", tmp_path / "source")  # what another machine would find
    journaled = journal_of_store(tmp_path / "source")
    assert journaled is not None
    assert 32 < journaled.first_id < 40
    tail = tmp_path / "source" / "observation" / "c.1.0.0.0"
    at = (journaled.first_id - 32) * LANES * 40
    data = tail.read_bytes()
    tail.write_bytes(data[:at] + bytes(len(data) - at))  # pages that never came to the disk
    diskbuf.copy(tmp_path / "source", tmp_path / "copied")
    with diskbuf.open(tmp_path / "copied") as buffer:
        assert_rows(buffer, 0, 40)


def test_chunks_that_are_only_where_they_were_published_are_copied(tmp_path: Path, memory: str) -> None:
    with diskbuf.UniformReplayBuffer(
        SPEC,
        LANES,
        None,
        path=tmp_path / "source",
        options=diskbuf.StoreOptions(chunk_bytes=CHUNK_BYTES, codec="zstd"),
        publish_to=f"{memory}/store",
        keep_local=False,
    ) as buffer:
        buffer.extend(steps(0, 300))
        buffer.publish_now()
    assert len(chunks(tmp_path / "source")) < 10
    diskbuf.copy(tmp_path / "source", tmp_path / "copied")
    fsspec.filesystem("memory").store.clear()
    with diskbuf.open(tmp_path / "copied") as buffer:
        assert_rows(buffer, 0, 300)
    assert_goes_on(tmp_path / "copied")


def test_others_read_the_copies(tmp_path: Path) -> None:
    source = make(tmp_path / "source", "raw", "unbounded")
    diskbuf.copy(source, tmp_path / "zarr", codec="zstd")
    diskbuf.copy(source, tmp_path / "arrow", layout="arrow")
    expected = steps(0, 301)["observation"].swapaxes(0, 1)
    np.testing.assert_array_equal(zarr.open_group(tmp_path / "zarr", mode="r")["observation"][:], expected)
    table = pyarrow.dataset.dataset(tmp_path / "arrow" / "data", format="arrow").to_table()
    assert table["id"].to_pylist() == np.repeat(np.arange(301), LANES).tolist()
    tensors = np.concatenate([chunk.to_numpy_ndarray() for chunk in table["observation"].chunks])
    np.testing.assert_array_equal(tensors.reshape(expected.shape), expected)


def test_the_tail_of_a_raw_copy_takes_no_more_room_than_its_rows(tmp_path: Path) -> None:
    make(tmp_path / "source", chunk_bytes=2**22)
    diskbuf.copy(tmp_path / "source", tmp_path / "copied")
    used = sum(512 * file.stat().st_blocks for file in (tmp_path / "copied").rglob("*"))
    assert used < 400_000  # of 16 MiB
    assert_goes_on(tmp_path / "copied")


def test_progress_is_told_in_raw_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "source", shape="unbounded")
    told: list[tuple[int, int]] = []
    diskbuf.copy(source, tmp_path / "copied", progress=lambda done, total: told.append((done, total)))
    total = 301 * LANES * (40 + 1 + 8 + 1)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    bars: list[Any] = []

    class Kept(tqdm.tqdm):  # type: ignore[misc]
        def __init__(self, **settings: Any) -> None:
            super().__init__(file=io.StringIO(), **settings)
            bars.append(self)

    monkeypatch.setattr("tqdm.auto.tqdm", Kept)
    diskbuf.copy(source, tmp_path / "quiet", progress=True)  # stderr is no terminal here
    assert bars == []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    diskbuf.copy(source, tmp_path / "shown", progress=True)
    assert [(bar.n, bar.total) for bar in bars] == [(total, total)]


# ---- a source that is being written


def test_a_copy_has_the_window_that_was_there_at_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout in LAYOUTS:
        options = diskbuf.StoreOptions(chunk_bytes=CHUNK_BYTES, **LAYOUTS[layout])
        with diskbuf.UniformReplayBuffer(SPEC, LANES, None, path=tmp_path / layout, options=options) as buffer:
            buffer.extend(steps(0, 101))
            kind = RawSnapshot if layout == "raw" else ObjectSnapshot
            opened = kind.__init__

            def adding(snapshot: Any, *given: Any, **named: Any) -> None:
                opened(snapshot, *given, **named)  # noqa: B023
                buffer.extend(steps(101, 200))

            monkeypatch.setattr(kind, "__init__", adding)
            for wanted in LAYOUTS:
                before = buffer.next_id
                if before > 101:
                    break
                diskbuf.copy(tmp_path / layout, tmp_path / f"{layout}-{wanted}", **WANTED[wanted])
                with diskbuf.open(tmp_path / f"{layout}-{wanted}") as copied:
                    assert_rows(copied, 0, 101)
                assert_goes_on(tmp_path / f"{layout}-{wanted}")
            monkeypatch.undo()


@pytest.mark.parametrize("wanted", LAYOUTS)
@pytest.mark.parametrize("layout", ["zstd", "arrow"])
def test_raw_chunks_count_where_an_object_of_fewer_rows_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, wanted: str
) -> None:
    source = make(tmp_path / "source", layout, "unbounded")
    monkeypatch.setattr(WritableStore, "_seal_next", lambda _: False)  # a thread that isn't there in time
    with diskbuf.open(source, mode="r+") as buffer:
        buffer.extend(steps(301, 390))
        diskbuf.copy(source, tmp_path / "copied", **WANTED[wanted])
        with diskbuf.open(tmp_path / "copied") as copied:
            assert_rows(copied, 0, 390)


@pytest.mark.parametrize("wanted", ["raw", "zstd", "arrow"])
@pytest.mark.parametrize("layout", ["raw", "zstd", "arrow"])
def test_steps_that_are_evicted_before_they_were_read_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, wanted: str
) -> None:
    options = diskbuf.StoreOptions(chunk_bytes=CHUNK_BYTES, fsync_seconds=0.01, **LAYOUTS[layout])
    with diskbuf.UniformReplayBuffer(SPEC, LANES, 300, path=tmp_path / "source", options=options) as buffer:
        buffer.extend(steps(0, 300))
        buffer.flush()
        writes = CopyFolder.write
        is_first = [True]

        def after_more(folder: CopyFolder, name: str, data: Any) -> None:
            if is_first.pop() if is_first else False:
                for first_id in range(300, 500, 50):
                    buffer.extend(steps(first_id, first_id + 50))
                    buffer.flush()
                wait_until_evicted(tmp_path / "source", layout)
            writes(folder, name, data)

        monkeypatch.setattr(CopyFolder, "write", after_more)
        report = diskbuf.copy(tmp_path / "source", tmp_path / "copied", **WANTED[wanted])
    assert 0 < report.first_id <= 256
    assert report.next_id == 300
    with diskbuf.open(tmp_path / "copied", verify=True) as copied:
        assert_rows(copied, report.first_id, 300)
    assert diskbuf.verify(tmp_path / "copied").faults == ()
    assert_goes_on(tmp_path / "copied")


def test_what_was_copied_before_evicted_steps_is_removed_far_away(
    tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = diskbuf.StoreOptions(chunk_bytes=CHUNK_BYTES)
    with diskbuf.UniformReplayBuffer(SPEC, LANES, 300, path=tmp_path / "source", options=options) as buffer:
        buffer.extend(steps(0, 300))
        reads = RawSnapshot.rows

        def after_more(snapshot: RawSnapshot, number: int, first_id: int, next_id: int) -> Any:
            if first_id == 64 and buffer.next_id == 300:
                for start in range(300, 500, 50):
                    buffer.extend(steps(start, start + 50))
            return reads(snapshot, number, first_id, next_id)

        monkeypatch.setattr(RawSnapshot, "rows", after_more)
        report = diskbuf.copy(tmp_path / "source", f"{memory}/copied")
    assert report.first_id == 200
    names = [name for name in fsspec.filesystem("memory").store if "/observation/c." in name]
    assert sorted(int(name.split("c.")[-1].split(".")[0]) for name in names) == [6, 7, 8, 9]
    with diskbuf.open(f"{memory}/copied") as copied:
        assert_rows(copied, 200, 300)


def wait_until_evicted(path: Path, layout: str) -> None:
    """Waits for the writer's thread, which removes sealed chunks."""
    if layout == "raw":
        return
    first = path / ("data/part-00000000.arrow" if layout.startswith("arrow") else "observation/c.0.0.0.0")
    for _ in range(2000):
        if not first.exists():
            return
        time.sleep(0.005)
    pytest.fail("nothing was evicted")


def test_a_window_that_is_evicted_whole_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = diskbuf.StoreOptions(chunk_bytes=CHUNK_BYTES)
    with diskbuf.UniformReplayBuffer(SPEC, LANES, 100, path=tmp_path / "source", options=options) as buffer:
        buffer.extend(steps(0, 100))
        opened = RawSnapshot.__init__

        def late(snapshot: Any, *given: Any, **named: Any) -> None:
            opened(snapshot, *given, **named)
            for first_id in range(100, 1100, 100):
                buffer.extend(steps(first_id, first_id + 100))

        monkeypatch.setattr(RawSnapshot, "__init__", late)
        with pytest.raises(diskbuf.WindowError, match=r"steps must stay in the window.* 0 to 100"):
            diskbuf.copy(tmp_path / "source", tmp_path / "copied")
        with pytest.raises(diskbuf.StoreNotFoundError, match="a copy that isn't finished"):
            diskbuf.open(tmp_path / "copied")
        monkeypatch.undo()
        diskbuf.copy(tmp_path / "source", tmp_path / "copied")  # later, as it is then
        assert_same(tmp_path / "source", tmp_path / "copied")


# ---- interrupted

KILLED = """
    import sys, threading
    import diskbuf
    from diskbuf.store.copy_target import CopyFolder

    writes, written, lock = CopyFolder.write, [], threading.Lock()

    def write(folder, name, data):
        with lock:  # nobody goes on behind the last one
            writes(folder, name, data)
            written.extend([name] * (not name.startswith(".diskbuf")))
            if len(written) == int(sys.argv[3]):
                print("half", flush=True)
                sys.stdin.read()

    CopyFolder.write = write
    diskbuf.copy(sys.argv[1], sys.argv[2], **eval(sys.argv[4]))
"""


def killed_copy(source: Path, destination: Path, wanted: dict[str, Any], *, writes: int) -> None:
    """Copies in a process of its own, which is killed behind so many writes."""
    arguments = [str(source), str(destination), str(writes), repr(wanted)]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"half\n"
        process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(("layout", "wanted"), [("raw", "raw"), ("raw", "zstd"), ("zstd", "zstd"), ("arrow", "raw")])
def test_a_copy_that_was_killed_goes_on_and_writes_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, wanted: str
) -> None:
    source, copied = make(tmp_path / "source", layout, "unbounded"), tmp_path / "copied"
    changes = {"chunk_bytes": 2048, **WANTED[wanted]} if layout != wanted else {}
    diskbuf.copy(source, tmp_path / "whole", **changes)
    whole = chunks(tmp_path / "whole")
    killed_copy(source, copied, changes, writes=len(whole) // 2)
    for opens in (diskbuf.open, lambda path: diskbuf.UniformReplayBuffer(SPEC, LANES, None, path=path)):
        with pytest.raises(diskbuf.StoreError, match="copy that isn't finished"):
            opens(copied)
    there = {name for name, data in chunks(copied).items() if whole.get(name) == data}
    assert len(there) > len(whole) // 3
    again = written_names(monkeypatch, CopyFolder)
    report = diskbuf.copy(source, copied, **changes)
    assert not there.intersection(again)
    assert len(there) + len(whole.keys() & set(again)) == len(whole) == report.objects
    assert report.skipped == len(there)
    assert chunks(copied) == whole
    monkeypatch.undo()
    assert_same(source, copied)
    assert_goes_on(copied)


def written_names(monkeypatch: pytest.MonkeyPatch, kind: Any) -> list[str]:
    """The names that are written from now on."""
    names, writes = [], kind.write

    def write(objects: Any, name: str, data: Any) -> None:
        names.append(name)
        writes(objects, name, data)

    monkeypatch.setattr(kind, "write", write)
    return names


def test_the_note_is_written_while_a_copy_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "source", shape="unbounded")
    monkeypatch.setattr(copy_target, "_SAVE_RATIO", 0)
    told = []
    for seconds in (0.0, 1000.0):
        monkeypatch.setattr(copy_target, "_SAVE_SECONDS", seconds)
        with monkeypatch.context() as patch:
            names = written_names(patch, CopyFolder)
            diskbuf.copy(source, tmp_path / f"copied-{seconds}")
        told.append(names.count(".diskbuf/copying.json"))
    assert told == [17, 2]  # behind each object, or at the beginning and the end


class StoppedError(Exception):
    """Stands for whatever ends a copy."""


def stop_after(monkeypatch: pytest.MonkeyPatch, kind: Any, writes: int) -> None:
    """Lets the write behind so many fail."""
    original, count = kind.write, [0]

    def write(objects: Any, name: str, data: Any) -> None:
        count[0] += not name.startswith(".diskbuf")
        if count[0] > writes and not name.startswith(".diskbuf"):
            raise StoppedError
        original(objects, name, data)

    monkeypatch.setattr(kind, "write", write)


@pytest.mark.parametrize("verify", [True, False])
def test_an_interrupted_copy_far_away_goes_on(
    tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    source, there = make(tmp_path / "source", shape="unbounded"), f"{memory}/copied"
    with monkeypatch.context() as patch:
        stop_after(patch, RemoteObjects, 12)
        with pytest.raises(StoppedError):
            diskbuf.copy(source, there, codec="zstd", chunk_bytes=CHUNK_BYTES, verify=verify)
    with pytest.raises(diskbuf.StoreNotFoundError):
        diskbuf.open(there, read_options=diskbuf.ReadOptions(retries=0))
    before = {name for name in fsspec.filesystem("memory").store if ".diskbuf" not in name}
    assert len(before) >= 12
    again = written_names(monkeypatch, RemoteObjects)
    report = diskbuf.copy(source, there, codec="zstd", chunk_bytes=CHUNK_BYTES, verify=verify)
    assert report.skipped == len(before)
    assert report.bytes_read < 0.7 * 301 * LANES * (40 + 1 + 8 + 1)  # nor is the source of these read again
    assert not {f"/copies/copied/{name}" for name in again} & before
    assert_same(source, there, read_options=diskbuf.ReadOptions(retries=0))


@pytest.mark.parametrize("forgets", [False, True])
def test_a_source_that_went_on_is_copied_as_it_is_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    for shape in ("ring", "unbounded", "history"):
        source, copied = make(tmp_path / shape, shape=shape), tmp_path / f"{shape}-copied"
        with monkeypatch.context() as patch:
            stop_after(patch, CopyFolder, 5)
            with pytest.raises(StoppedError):
                diskbuf.copy(source, copied)
        note = copied / ".diskbuf" / "copying.json"
        if forgets:  # as a kill does with what was written just before
            note.write_text(json.dumps(json.loads(note.read_bytes()) | {"objects": []}))
        with diskbuf.open(source, mode="r+") as buffer:
            buffer.extend(steps(301, 390))
        report = diskbuf.copy(source, copied)
        assert report.skipped > 0 or (forgets and shape == "ring")  # what it had been is evicted
        assert_same(source, copied)
        assert diskbuf.verify(copied).faults == ()
        diskbuf.copy(source, tmp_path / f"{shape}-anew")
        assert chunks(copied).keys() == chunks(tmp_path / f"{shape}-anew").keys()
        assert_goes_on(copied)


def test_ids_that_stand_for_other_steps_now_are_copied_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, copied = make(tmp_path / "source", shape="unbounded"), tmp_path / "copied"
    with monkeypatch.context() as patch:
        stop_after(patch, CopyFolder, 9)
        with pytest.raises(StoppedError):
            diskbuf.copy(source, copied)
    with diskbuf.open(source) as buffer:
        manifest = buffer._opened().manifest
    assert manifest.runs == (0, 90)
    shutil.rmtree(source)
    options = diskbuf.StoreOptions(chunk_bytes=CHUNK_BYTES)
    for first_id, next_id, value in ((0, 60, 0), (60, 301, 1)):  # as after a power cut: a run from id 60 on
        with diskbuf.UniformReplayBuffer(SPEC, LANES, None, path=source, options=options) as buffer:
            found = steps(first_id, next_id)
            buffer.extend({**found, "observation": found["observation"] + np.float32(value)})
    document = json.loads((source / "zarr.json").read_bytes())
    document["attributes"]["diskbuf"]["created"] = manifest.created
    document["attributes"]["diskbuf"]["metadata"] = manifest.metadata
    del document["attributes"]["diskbuf_crc32"]
    (source / "zarr.json").write_text(json.dumps(document))
    diskbuf.copy(source, copied)
    with diskbuf.open(source) as one, diskbuf.open(copied) as other:
        np.testing.assert_array_equal(one.gather_all()["observation"], other.gather_all()["observation"])


def test_a_copy_that_only_has_its_note_left_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, copied = make(tmp_path / "source"), tmp_path / "copied"
    with monkeypatch.context() as patch:
        patch.setattr(LocalObjects, "delete", lambda *_: (_ for _ in ()).throw(StoppedError))
        with pytest.raises(StoppedError):
            diskbuf.copy(source, copied)
    assert (copied / ".diskbuf" / "copying.json").exists()
    assert_same(source, copied)
    names = written_names(monkeypatch, CopyFolder)
    report = diskbuf.copy(source, copied)
    assert names == []
    assert report.skipped == report.objects > 5
    assert not (copied / ".diskbuf" / "copying.json").exists()


def test_a_full_disk_stops_a_copy_which_goes_on_when_there_is_room(tmp_path: Path, small_disk: Path) -> None:  # noqa: F811
    options = diskbuf.StoreOptions(chunk_bytes=2**18)
    spec = {"x": diskbuf.ArraySpec([1024], "uint8")}
    rows = np.random.default_rng(0).integers(0, 256, (1, 4000, 1024), np.uint8)
    with diskbuf.UniformReplayBuffer(spec, 1, None, path=tmp_path / "source", options=options) as buffer:
        buffer.extend({"x": rows})
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(6 * 2**20))
    with pytest.raises(OSError, match=r"must be writable and have room for the copy.* it goes on where it") as error:
        diskbuf.copy(tmp_path / "source", small_disk / "copied")
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(diskbuf.StoreNotFoundError, match="isn't finished"):
        diskbuf.open(small_disk / "copied")
    ballast.unlink()
    assert diskbuf.copy(tmp_path / "source", small_disk / "copied").skipped > 3
    with diskbuf.open(small_disk / "copied") as buffer:
        np.testing.assert_array_equal(buffer.gather_all()["x"], rows)


# ---- damage


def flip(path: Path, at: int = 100) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("wanted", ["raw", "zstd", "arrow"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_object_of_the_source_is_named_and_nothing_opens(tmp_path: Path, layout: str, wanted: str) -> None:
    source = make(tmp_path / "source", layout, "unbounded")
    name = "data/part-00000003.arrow" if layout.startswith("arrow") else "observation/c.3.0.0.0"
    flip(source / name)
    with pytest.raises(diskbuf.StoreCorruptError, match=name) as error:
        diskbuf.copy(source, tmp_path / "copied", chunk_bytes=1500, **WANTED[wanted])
    assert error.value.path == str(source / name)
    with pytest.raises(diskbuf.StoreNotFoundError):
        diskbuf.open(tmp_path / "copied")


def test_a_damaged_or_missing_object_far_away_is_named(tmp_path: Path, memory: str) -> None:
    once = diskbuf.ReadOptions(retries=0)
    for layout in LAYOUTS:
        url, name = f"{memory}/{layout}", "data/part-00000003.arrow"
        name = name if layout.startswith("arrow") else "observation/c.3.0.0.0"
        diskbuf.copy(make(tmp_path / layout, layout, "unbounded"), url, read_options=once)
        memory_files = fsspec.filesystem("memory")
        whole = memory_files.cat_file(f"{url}/{name}")
        for damage in (whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], whole[:-1], None):
            memory_files.rm_file(f"{url}/{name}")
            if damage is not None:
                memory_files.pipe_file(f"{url}/{name}", damage)
            with pytest.raises(diskbuf.StoreCorruptError, match=f"{url}/{name}"):
                diskbuf.copy(url, tmp_path / f"{layout}-copied", codec=None, read_options=once)
            if damage is None:
                memory_files.pipe_file(f"{url}/{name}", whole)
        diskbuf.copy(url, tmp_path / f"{layout}-copied", codec=None, read_options=once)
        assert_same(tmp_path / layout, tmp_path / f"{layout}-copied")


def damaging(kind: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Lets a bit of one object change on its way."""
    writes = kind.write

    def write(objects: Any, written: str, data: Any) -> None:
        if written == name:
            changed = bytearray(data)
            changed[10] ^= 1
            data = bytes(changed)
        writes(objects, written, data)

    monkeypatch.setattr(kind, "write", write)


@pytest.mark.parametrize("is_remote", [False, True])
def test_what_arrives_damaged_is_named_and_nothing_opens(
    tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    source, name = make(tmp_path / "source"), "observation/c.7.0.0.0"
    copied = f"{memory}/copied" if is_remote else str(tmp_path / "copied")
    once = diskbuf.ReadOptions(retries=0)
    with monkeypatch.context() as patch:
        damaging(RemoteObjects if is_remote else CopyFolder, patch, name)
        with pytest.raises(diskbuf.StoreCorruptError, match=r"must hold the .* bytes that were written") as error:
            diskbuf.copy(source, copied, read_options=once)
    assert error.value.path == f"{copied}/{name}"
    with pytest.raises(diskbuf.StoreNotFoundError):
        diskbuf.open(copied, read_options=once)
    diskbuf.copy(source, copied, read_options=once)
    assert_same(source, copied, read_options=once)


def test_without_verify_nothing_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    monkeypatch.setattr(CopyFolder, "read_many", lambda folder, ranges: reads.extend(ranges) or missing())
    diskbuf.copy(make(tmp_path / "source"), tmp_path / "copied", verify=False)
    assert {wanted.name for wanted in reads} == {".diskbuf/copying.json", "zarr.json"}
    assert_same(tmp_path / "source", tmp_path / "copied")


def missing() -> None:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def test_what_rotted_while_a_copy_was_interrupted_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, copied = make(tmp_path / "source", shape="unbounded"), tmp_path / "copied"
    with monkeypatch.context() as patch:
        stop_after(patch, CopyFolder, 5)
        with pytest.raises(StoppedError):
            diskbuf.copy(source, copied, verify=False)
    rotten, short = sorted(copied.glob("observation/c.*"))[:2]
    flip(rotten)
    short.write_bytes(b"")
    diskbuf.copy(source, copied, verify=False)
    assert chunks(copied) == chunks(source)
    assert_same(source, copied)


# ---- what is refused


def test_options_outside_their_rule_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    raw, packed = make(tmp_path / "raw"), make(tmp_path / "packed", "zstd")
    for source, given_options, message in [
        (raw, {"codec": "snappy"}, "codec must be one of 'zstd', 'blosc', 'lz4'"),
        (raw, {"layout": "parquet"}, "layout must be one of 'zarr', 'arrow', got 'parquet'"),
        (raw, {"layout": "arrow", "codec": "blosc"}, "codec must be one of 'zstd', 'lz4'"),
        (raw, {"level": 3}, "level must be left out where the codec is kept, got 3"),
        (packed, {"inner_rows": 2}, "inner_rows must be left out where the codec is kept"),
        (packed, {"layout": "arrow", "codec": "zstd", "inner_rows": 2}, "inner_rows must be left out"),
        (packed, {"layout": "arrow"}, "codec must be given where the layout changes from 'zarr' to 'arrow'"),
        (raw, {"codec": None, "level": 2}, "level must be left out without a codec"),
        (raw, {"chunk_bytes": 0}, "chunk_bytes must be an int of at least 1"),
        (raw, {"verify": 1}, "verify must be True or False"),
        (raw, {"progress": "yes"}, "progress must be True, False or a function"),
        (raw, {"read_options": {}}, "read_options must be a diskbuf.ReadOptions"),
    ]:
        with pytest.raises(diskbuf.OptionError, match=message):
            diskbuf.copy(source, tmp_path / "copied", **given_options)
    assert not (tmp_path / "copied").exists()


def test_places_within_each_other_are_refused(tmp_path: Path) -> None:
    source = make(tmp_path / "outer" / "source")
    (tmp_path / "link").symlink_to(source)
    for destination in (source, source / "copied", tmp_path / "link", tmp_path / "link" / "copied", tmp_path / "outer"):
        with pytest.raises(diskbuf.OptionError, match="destination must lie outside the source"):
            diskbuf.copy(source, destination)
    for destination in ("memory://a/b", "memory://a/b/c", "memory://a/"):
        with pytest.raises(diskbuf.OptionError, match="destination must lie outside the source"):
            diskbuf.copy("memory://a/b", destination)
    assert not (source / "copied").exists()


def test_a_source_that_is_no_store_is_refused_and_nothing_is_made(tmp_path: Path, memory: str) -> None:
    (tmp_path / "empty").mkdir()
    for source in (tmp_path / "nowhere", tmp_path / "empty", f"{memory}/nowhere"):
        with pytest.raises(diskbuf.StoreNotFoundError, match="cannot open"):
            diskbuf.copy(source, tmp_path / "copied", read_options=diskbuf.ReadOptions(retries=0))
    assert not (tmp_path / "copied").exists()


def test_a_destination_that_holds_something_is_refused_and_left_as_it_is(tmp_path: Path, memory: str) -> None:
    source = make(tmp_path / "source")
    store = make(tmp_path / "store")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    begun = tmp_path / "begun"
    (begun / ".diskbuf").mkdir(parents=True)
    (begun / ".diskbuf" / "live").write_bytes(b"")
    for name, what in {"store": "a store", "file": "a file", "folder": "files that are not", "begun": "files"}.items():
        with pytest.raises(diskbuf.StoreExistsError, match=f"destination must be free, but .*{name} holds {what}"):
            diskbuf.copy(source, tmp_path / name)
    assert chunks(store) == chunks(source)
    assert (tmp_path / "folder" / "file").read_text() == "mine"
    diskbuf.copy(source, f"{memory}/store")
    with pytest.raises(diskbuf.StoreExistsError, match="memory://copies/store holds a store"):
        diskbuf.copy(source, f"{memory}/store")
    fsspec.filesystem("memory").pipe_file(f"{memory}/other/zarr.json", b"{}")
    with pytest.raises(diskbuf.StoreExistsError, match="holds a zarr group"):
        diskbuf.copy(source, f"{memory}/other")


def test_a_folder_of_a_copy_that_was_killed_at_once_is_free(tmp_path: Path) -> None:
    (tmp_path / "copied" / ".diskbuf").mkdir(parents=True)
    (tmp_path / "copied" / ".diskbuf" / "lock").write_bytes(b"")
    (tmp_path / "copied" / ".diskbuf" / ".copying.json.tmp").write_bytes(b"{")
    diskbuf.copy(make(tmp_path / "source"), tmp_path / "copied")
    assert_same(tmp_path / "source", tmp_path / "copied")
    assert not list((tmp_path / "copied").rglob("*.tmp"))


def test_another_copy_than_the_one_that_was_interrupted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, other, copied = make(tmp_path / "source"), make(tmp_path / "other"), tmp_path / "copied"
    with monkeypatch.context() as patch:
        stop_after(patch, CopyFolder, 5)
        with pytest.raises(StoppedError):
            diskbuf.copy(source, copied)
    for given_source, given_options, what in [(source, {"codec": "zstd"}, "codec"), (other, {}, "source")]:
        with pytest.raises(diskbuf.StoreExistsError, match=f"a copy that isn't finished, of .*{what}"):
            diskbuf.copy(given_source, copied, **given_options)
    (copied / ".diskbuf" / "copying.json").write_text("[")
    with pytest.raises(diskbuf.StoreCorruptError, match="must be the note of a copy"):
        diskbuf.copy(source, copied)


def test_two_copies_to_one_path_at_once_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, copied = make(tmp_path / "source"), tmp_path / "copied"
    writes, refused = CopyFolder.write, []

    def write(folder: CopyFolder, name: str, data: Any) -> None:
        if name.startswith("observation") and not refused:
            refused.append(name)
            with pytest.raises(diskbuf.StoreLockedError):
                diskbuf.copy(source, copied)
        writes(folder, name, data)

    monkeypatch.setattr(CopyFolder, "write", write)
    diskbuf.copy(source, copied)
    assert refused
    assert_same(source, copied)


def test_refused_credentials_and_web_servers_are_told(
    tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make(tmp_path / "source")
    from fsspec.implementations.memory import MemoryFileSystem

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Access Denied")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", refuse)
    with pytest.raises(diskbuf.StoreAccessError, match="must be open to us"):
        diskbuf.copy(source, f"{memory}/copied")


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "source")

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", refuse)  # root may write everywhere
    with pytest.raises(PermissionError, match=r"copied must be writable .*Choose another place"):
        diskbuf.copy(source, tmp_path / "copied")


# ---- memory

BOUNDED = """
    import resource, sys
    import numpy as np
    import diskbuf
    import pyarrow, zarr, tqdm, numcodecs  # what is imported late

    source, copied, megabytes, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3]), eval(sys.argv[4])
    diskbuf.copy(source + "-small", copied + "-small", **wanted)
    text = open("/proc/self/status").read()
    data = int(text.split("VmData:")[1].split()[0]) * 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    resource.setrlimit(resource.RLIMIT_DATA, (data + megabytes * 2**20,) * 2)
    diskbuf.copy(source, copied, **wanted)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    assert grown < megabytes, grown
    try:
        whole = np.ones(2**20 * 400, np.uint8)
    except MemoryError:
        print("bounded")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts data apart from mapped files")
@pytest.mark.parametrize(
    ("layout", "wanted"),
    [("raw", "raw"), ("raw", "arrow"), ("arrow", "arrow"), ("arrow", "raw"), ("zstd", "zstd"), ("zstd", "raw")],
)
def test_a_store_larger_than_memory_is_copied(tmp_path: Path, layout: str, wanted: str) -> None:
    spec = {"x": diskbuf.ArraySpec([2**16], "uint8"), "y": diskbuf.ArraySpec([], "int64")}
    for name, count in (("source-small", 100), ("source", 6400)):
        options = diskbuf.StoreOptions(chunk_bytes=2**22, fsync="never", **LAYOUTS[layout])
        with diskbuf.UniformReplayBuffer(spec, 1, None, path=tmp_path / name, options=options) as buffer:
            for first in range(0, count, 100):
                rows = np.zeros((1, 100, 2**16), np.uint8)
                rows[..., 0] = first % 251
                buffer.extend({"x": rows, "y": np.arange(first, first + 100)[None]})
    arguments = [
        str(tmp_path / "source"),
        str(tmp_path / "copied"),
        "200",
        repr(WANTED[wanted] | {"chunk_bytes": 2**22}),
    ]
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BOUNDED), *arguments],
        check=False,
        capture_output=True,
        env=os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"},
    )
    assert run.stdout == b"bounded\n", run.stderr.decode()
    shutil.rmtree(tmp_path / "source")
    with diskbuf.open(tmp_path / "copied", verify=False) as buffer:
        assert (buffer.first_id, buffer.next_id) == (0, 6400)
    shutil.rmtree(tmp_path / "copied")


@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads /proc")
def test_a_quick_run_of_the_benchmark_measures_everything(tmp_path: Path) -> None:
    command = [BENCH, "--quick", "--folder", "stores", "--json", "figures.json"]
    subprocess.run([sys.executable, *command], cwd=tmp_path, check=True, capture_output=True, timeout=100)
    assert list((tmp_path / "stores").iterdir()) == []
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    copies = {"raw_raw", "raw_zstd", "zstd_raw", "raw_arrow"}
    assert {row["name"] for row in rows} == {f"copy_{name}{what}" for name in copies for what in ("", "_memory")}


@pytest.mark.parametrize("options", [diskbuf.StoreOptions(layout="arrow"), diskbuf.StoreOptions(codec="zstd")])
def test_the_values_of_a_copy_whose_newest_chunk_isnt_full_are_verified(
    tmp_path: Path, options: diskbuf.StoreOptions
) -> None:
    leaves = {f"leaf{number}": diskbuf.BoundedArraySpec([], "int32", 0, 1) for number in range(6)}
    with diskbuf.UniformReplayBuffer(leaves, 1, None, path=tmp_path / "a", options=options) as buffer:
        for _ in range(2):
            buffer.add_batch({name: np.ones(1, "int32") for name in leaves})
    diskbuf.copy(tmp_path / "a", tmp_path / "b")
    report = diskbuf.verify(tmp_path / "b", values=True)
    assert (report.is_clean, report.steps) == (True, 2)
