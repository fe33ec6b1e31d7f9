"""Stores that are published as they grow: what readers far away see, at every moment and after every kind of end."""

import gc
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import servers
from coded_rows import SPEC, assert_equal, rows, span, step

import diskbuf
from diskbuf import OptionError, ReadOptions, StoreOptions, UniformReplayBuffer
from diskbuf.store import files, publishing

LANES = 2
URL = "faulty://bucket/runs/x.zarr"
NEVER = 1000.0
"""Seconds between publications of tests that publish themselves."""

ONCE = ReadOptions(retries=0)
DEADLINE_SECONDS = 60.0

SMALL = StoreOptions(chunk_bytes=256)
KINDS: dict[str, dict[str, Any]] = {
    "ring": {"max_length": 20, "options": SMALL},
    "unbounded": {"max_length": None, "options": SMALL},
    "history": {"max_length": 20, "keep_history": True, "options": SMALL},
    "zstd": {"max_length": 20, "options": StoreOptions(chunk_bytes=256, codec="zstd")},
    "arrow": {"max_length": 20, "options": StoreOptions(chunk_bytes=1024, layout="arrow")},
    "elsewhere": {"max_length": 20, "options": SMALL, "keep_local": False},
    "elsewhere-zstd": {"max_length": None, "options": StoreOptions(chunk_bytes=256, codec="zstd"), "keep_local": False},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Remote:
    """A remote in this process's memory.

    Attributes:
        files: Its file system.
        done: What was put and removed, in order: ("put" or "rm", name below the store's URL).
        on_put: Called with each name before it is put; may raise.
    """

    def __init__(self, kind: type[servers.FaultyFiles]) -> None:
        self.files = kind
        self.done: list[tuple[str, str]] = []
        self.on_put: Callable[[str], object] = lambda name: None
        put, remove = kind.pipe_file, kind.rm_file

        def pipe_file(system: Any, path: str, value: bytes, **_: Any) -> None:
            name = path.removeprefix("bucket/runs/x.zarr/")
            self.on_put(name)
            put(system, path, value)
            self.done.append(("put", name))

        def rm_file(system: Any, path: str) -> None:
            remove(system, path)
            self.done.append(("rm", path.removeprefix("bucket/runs/x.zarr/")))

        kind.pipe_file, kind.rm_file = pipe_file, rm_file  # type: ignore[method-assign]

    @property
    def puts(self) -> Counter[str]:
        return Counter(name for what, name in self.done if what == "put")

    @property
    def names(self) -> set[str]:
        return {path.removeprefix("bucket/runs/x.zarr/") for path in self.files.objects}

    def fail(self, error: Exception) -> None:
        def refuse(name: str) -> None:
            raise error

        self.on_put = refuse

    def mend(self) -> None:
        self.on_put = lambda name: None


@pytest.fixture
def remote() -> Iterator[Remote]:
    with servers.faulty_files() as kind:
        yield Remote(kind)


def is_data(name: str) -> bool:
    return not name.endswith("zarr.json") and not name.startswith(".diskbuf/")


def new(path: Path, kind: str = "ring", **arguments: Any) -> UniformReplayBuffer:
    return UniformReplayBuffer(
        SPEC,
        LANES,
        path=path,
        **{"publish_to": URL, "publish_seconds": NEVER, "read_options": ONCE, **KINDS[kind], **arguments},
    )


def add(buffer: UniformReplayBuffer, count: int) -> None:
    for step_id in range(buffer.next_id, buffer.next_id + count):
        buffer.add_batch(step(step_id, LANES))


def read(url: Any = URL, **arguments: Any) -> UniformReplayBuffer:
    return diskbuf.open(url, **{"read_options": ReadOptions(retries=0, cache_dir=":memory:"), **arguments})


def assert_whole(reader: UniformReplayBuffer) -> tuple[int, int]:
    """What a reader's window holds are the rows of its ids; it may move while it is read."""
    while True:
        window = reader.first_id, reader.next_id
        items = reader.gather_all()
        if window == (reader.first_id, reader.next_id):
            assert_equal(items, span(*window, LANES))
            return window


def published(**arguments: Any) -> tuple[int, int]:
    """The window that is published now, all of its rows looked at."""
    with read(**arguments) as reader:
        return assert_whole(reader)


# ---- what is published


@every_kind
def test_what_is_published_is_what_the_buffer_holds(tmp_path: Path, remote: Remote, kind: str) -> None:
    with new(tmp_path / "x", kind) as buffer:
        for count in (1, 12, 0, 40, 3):
            add(buffer, count)
            buffer.publish_now()
            assert published() == (buffer.first_id, buffer.next_id)
            assert assert_whole(buffer)[1] == buffer.next_id
        add(buffer, 5)
        window = (buffer.first_id, buffer.next_id)
    assert published() == window
    if kind == "history":
        assert published(history=True) == (0, window[1])
    with new(tmp_path / "x", kind) as buffer:
        add(buffer, 30)
    assert published() == assert_whole(read(tmp_path / "x"))


def test_clears_runs_and_metadata_are_published(tmp_path: Path, remote: Remote) -> None:
    with new(tmp_path / "x", metadata={"a": 1}) as buffer:
        add(buffer, 7)
    with new(tmp_path / "x", metadata={"a": 2}) as buffer:
        add(buffer, 3)
        buffer.publish_now()
        with read() as reader:
            assert reader.metadata == {"a": 2}
            assert reader._opened().runs == (0, 7)
            buffer.clear()
            add(buffer, 2)
            buffer.publish_now()
            assert reader.refresh()
            assert assert_whole(reader) == (10, 12)
            assert not reader.refresh()


def test_it_is_published_every_so_often_and_a_reader_that_follows_sees_each_commit(
    tmp_path: Path, remote: Remote
) -> None:
    with new(tmp_path / "x", publish_seconds=0.01) as buffer:
        add(buffer, 1)
        wait_until(lambda: "zarr.json" in remote.names)
        with read(follow=True, read_options=ReadOptions(follow_seconds=1e-9)) as reader:
            for _ in range(5):
                add(buffer, 9)
                wait_until(lambda: reader.next_id == buffer.next_id)
                assert assert_whole(reader) == (buffer.first_id, buffer.next_id)


def test_a_published_store_is_a_zarr_group_and_a_store_where_it_is_copied_to(tmp_path: Path) -> None:
    import zarr

    url = f"file://{tmp_path / 'there'}"
    for kind in ("ring", "zstd", "elsewhere"):
        with new(tmp_path / kind, kind, publish_to=f"{url}/{kind}") as buffer:
            add(buffer, 30)
            window = (buffer.first_id, buffer.next_id)
        assert assert_whole(read(tmp_path / "there" / kind)) == window
        number = zarr.open_group(tmp_path / "there" / kind, mode="r")["number"]
        assert np.array_equal(number[10:30], rows(np.arange(10, 30)[:, None], np.arange(LANES))["number"])


# ---- when, and in which order


@every_kind
def test_data_is_put_before_what_tells_of_it_and_removed_after(tmp_path: Path, remote: Remote, kind: str) -> None:
    with new(tmp_path / "x", kind) as buffer:
        for _ in range(4):
            add(buffer, 25)
            remote.done.clear()
            buffer.publish_now()
            names = [name for what, name in remote.done if what == "put"]
            data = [name for name in names if is_data(name)]
            assert data == names[: len(data)]
            assert data
            assert names[-1] == "zarr.json"
            assert names.index(".diskbuf/checksums.arrow") < names.index(".diskbuf/manifest.json")
            assert max(Counter(names).values()) == 1
            whats = [what for what, _ in remote.done]
            assert whats == sorted(whats)  # "put" before "rm"
            assert ("rm" in whats) == (kind in ("ring", "zstd", "arrow", "elsewhere") and buffer.first_id > 20)


@every_kind
def test_only_the_windows_objects_stay(tmp_path: Path, remote: Remote, kind: str) -> None:
    with new(tmp_path / "x", kind) as buffer:
        for _ in range(7):
            add(buffer, 11)
            buffer.publish_now()
        layouts = buffer._opened().columns
        kept = 0 if buffer.max_length is None or kind == "history" else buffer.first_id
        per_group = 1 if kind == "arrow" else len(layouts)
        chunks = sum(len(column.layout.chunks(kept, buffer.next_id)) for column in layouts) * per_group // len(layouts)
        assert sum(map(is_data, remote.names)) == chunks


@every_kind
def test_nothing_is_put_when_nothing_changed(tmp_path: Path, remote: Remote, kind: str) -> None:
    with new(tmp_path / "x", kind) as buffer:
        add(buffer, 21)
        buffer.publish_now()
        remote.done.clear()
        buffer.publish_now()
        assert not remote.done
    assert not [name for name in remote.puts if name == "zarr.json"]


@every_kind
def test_whole_chunks_are_put_once_also_by_the_next_run(tmp_path: Path, remote: Remote, kind: str) -> None:
    for _ in range(3):
        with new(tmp_path / "x", kind) as buffer:
            for _ in range(3):
                add(buffer, 3)
                buffer.publish_now()
    per_chunk = 9 + 3  # as a tail, and at each close
    assert max(count for name, count in remote.puts.items() if is_data(name)) <= per_chunk
    first = next(name for name in remote.puts if re.match(r"image/c[./]0[./]|data/part-0+\.arrow", name))
    before = remote.puts[first]
    with new(tmp_path / "x", kind) as buffer:
        add(buffer, 1)
    assert remote.puts[first] == before


def test_an_object_is_put_at_most_once_in_each_period(tmp_path: Path, remote: Remote) -> None:
    seconds = 0.1
    begun = time.monotonic()

    def goes_on() -> bool:
        add(buffer, 1)
        return remote.puts["zarr.json"] >= 4

    with new(tmp_path / "x", publish_seconds=seconds) as buffer:
        wait_until(goes_on)
    elapsed = time.monotonic() - begun
    assert max(remote.puts.values()) <= 2 + elapsed / seconds  # the first look, and the last turn


# ---- readers meanwhile


@every_kind
def test_at_every_put_a_reader_finds_a_whole_commit(tmp_path: Path, remote: Remote, kind: str) -> None:
    with new(tmp_path / "x", kind) as buffer:
        add(buffer, 13)
        buffer.publish_now()
        seen: list[tuple[int, int]] = []
        with read() as early:

            def look(name: str) -> None:
                with warnings.catch_warnings():
                    seen.append(published())
                    assert_whole(early)

            for _ in range(3):
                before = (buffer.first_id, buffer.next_id)
                add(buffer, 7)
                seen.clear()
                remote.on_put = one_at_a_time(look)
                buffer.publish_now()
                remote.mend()
                assert set(seen) == {before}
                assert published() == (buffer.first_id, buffer.next_id)


def one_at_a_time(call: Callable[[str], None]) -> Callable[[str], None]:
    lock = threading.Lock()

    def locked(name: str) -> None:
        with lock:
            call(name)

    return locked


@pytest.mark.parametrize("kind", ["ring", "zstd", "arrow", "elsewhere"])
def test_a_reader_of_an_old_commit_goes_on_with_the_newest_when_objects_are_gone(
    tmp_path: Path, remote: Remote, kind: str
) -> None:
    with new(tmp_path / "x", kind) as buffer:
        add(buffer, 20)
        buffer.publish_now()
        with read() as reader, read() as other:
            add(buffer, 60)
            buffer.publish_now()
            ids = reader.get_next(16, 2)[1].ids
            assert (ids >= 60).all()
            assert assert_whole(reader) == (60, 80)
            assert assert_whole(other) == (60, 80)


def test_an_object_of_the_window_that_is_missing_is_an_error_with_its_name(tmp_path: Path, remote: Remote) -> None:
    with new(tmp_path / "x") as buffer:
        add(buffer, 20)
        buffer.publish_now()
        name = next(name for name in remote.names if name.startswith("number/c"))
        del remote.files.objects[f"bucket/runs/x.zarr/{name}"]
        with read() as reader, pytest.raises(diskbuf.StoreCorruptError, match=re.escape(name)):
            reader.gather_all()


@pytest.mark.parametrize("kind", ["ring", "zstd", "elsewhere"])
def test_rows_that_are_overwritten_while_they_are_published_are_left_out(
    tmp_path: Path, remote: Remote, kind: str
) -> None:
    with new(tmp_path / "x", kind, max_length=40) as buffer:
        add(buffer, 40)
        lock = threading.Lock()

        def overtake(name: str) -> None:
            with lock:
                add(buffer, 3)

        remote.on_put = overtake
        buffer.publish_now()
        remote.mend()
        first_id, next_id = published()
        assert 0 < first_id <= next_id == 40
        buffer.publish_now()
        assert published() == (buffer.first_id, buffer.next_id)


def test_a_chunk_file_that_a_ring_takes_for_other_rows_under_the_reading_is_left_out(
    tmp_path: Path, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_AT_ONCE", 1)  # the last chunk to be put is then the first of "image"
    with new(tmp_path / "x", max_length=200) as buffer:
        add(buffer, 200)
        read_at, names = files.read_at, []

        def overtaken(descriptor: int, size: int, offset: int, *, path: Path) -> bytes:
            if path.parent.name == "image" and path.name.startswith("c.0."):
                add(buffer, 50)  # the file is open, and gets another name and other rows
                names.append(path.exists())
            return read_at(descriptor, size, offset, path=path)

        monkeypatch.setattr(files, "read_at", overtaken)
        buffer.publish_now()
        monkeypatch.undo()
        assert names == [False]
        assert published() == (16, 200)
        buffer.publish_now()
        assert published() == (50, 250)


# ---- remotes that are slow, or fail


def test_a_slow_remote_holds_nothing_up(tmp_path: Path, remote: Remote) -> None:
    is_putting, may_go_on = threading.Event(), threading.Event()

    def wait(name: str) -> None:
        is_putting.set()
        assert may_go_on.wait(DEADLINE_SECONDS)

    with new(tmp_path / "x", publish_seconds=0.01) as buffer:
        remote.on_put = wait
        add(buffer, 20)
        assert is_putting.wait(DEADLINE_SECONDS)
        add(buffer, 30)
        buffer.flush()
        buffer.clear()
        add(buffer, 9)
        assert assert_whole(buffer) == (50, 59)
        assert "zarr.json" not in remote.names
        may_go_on.set()
        remote.mend()
    assert published() == (50, 59)


def test_a_failing_remote_is_told_of_once_and_publishing_goes_on_when_it_works_again(
    tmp_path: Path, remote: Remote
) -> None:
    tries = []

    def fail(name: str) -> None:
        tries.append(name)
        raise ConnectionError("down")

    options = {"secret": "hush-hush"}
    with new(tmp_path / "x", publish_seconds=0.01, storage_options=options) as buffer:
        remote.on_put = fail
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            add(buffer, 20)
            wait_until(lambda: len(tries) > 20)
            with pytest.raises(diskbuf.StoreUnreachableError, match="must answer"):
                buffer.publish_now()
            add(buffer, 20)
            remote.mend()
            wait_until(lambda: "zarr.json" in remote.names)
        assert len(told) == 1
        assert URL in str(told[0].message)
        assert "hush" not in str(told[0].message)
        assert assert_whole(buffer) == (20, 40)
        wait_until(lambda: published() == (20, 40))


def test_a_last_attempt_that_fails_says_where_the_steps_are_and_the_next_run_publishes_them(
    tmp_path: Path, remote: Remote
) -> None:
    buffer = new(tmp_path / "x")
    add(buffer, 8)
    buffer.publish_now()
    add(buffer, 8)
    remote.fail(ConnectionError("down"))
    with pytest.warns(RuntimeWarning, match=f"safe in {tmp_path / 'x'}.*with publish_to goes on"):
        buffer.close()
    remote.mend()
    assert published() == (0, 8)
    with new(tmp_path / "x") as buffer:
        assert assert_whole(buffer) == (0, 16)
        buffer.publish_now()
        assert published() == (0, 16)


def test_a_remote_that_does_not_answer_at_first_is_published_to_later(tmp_path: Path, remote: Remote) -> None:
    path = "bucket/runs/x.zarr/zarr.json"
    remote.files.faults[path] += [ConnectionError("down")] * 2
    with pytest.warns(RuntimeWarning, match="can't be published to"):
        buffer = new(tmp_path / "x")
    with buffer:
        add(buffer, 5)
        with pytest.raises(diskbuf.StoreUnreachableError):
            buffer.publish_now()
        buffer.publish_now()
        assert published() == (0, 5)


def test_a_remote_that_refuses_is_an_error_at_once(tmp_path: Path, remote: Remote) -> None:
    for error, ours, match in (
        (PermissionError("no"), diskbuf.StoreAccessError, "Check the credentials"),
        (FileNotFoundError("no such bucket"), diskbuf.StoreNotFoundError, "bucket or container that exists"),
    ):
        remote.fail(error)
        with pytest.raises(ours, match=match):
            new(tmp_path / "x")
        assert not (tmp_path / "x" / "zarr.json").exists()
    remote.mend()
    with new(tmp_path / "x", mode="w-") as buffer:
        add(buffer, 1)
        remote.fail(PermissionError("no"))
        with pytest.raises(diskbuf.StoreAccessError):
            buffer.publish_now()
        remote.mend()


# ---- one history to a URL


def test_what_is_not_its_own_is_not_published_over(tmp_path: Path, remote: Remote) -> None:
    with new(tmp_path / "x") as buffer:
        add(buffer, 5)
    for arguments in ({}, {"mode": "w-"}):
        with pytest.raises(diskbuf.StoreExistsError, match="it holds a store that was made"):
            new(tmp_path / "y", **arguments)
        assert not (tmp_path / "y" / "zarr.json").exists()
    with new(tmp_path / "y", publish_to=None) as buffer:
        add(buffer, 50)
    manifest = json.loads((tmp_path / "y" / "zarr.json").read_bytes())["attributes"]["diskbuf"]
    if (
        manifest["created"]
        != json.loads((tmp_path / "x" / "zarr.json").read_bytes())["attributes"]["diskbuf"]["created"]
    ):
        with pytest.raises(diskbuf.StoreExistsError, match="it holds another store"):
            new(tmp_path / "y")
    remote.files.objects["bucket/runs/x.zarr/zarr.json"] = b'{"zarr_format": 3}'
    with pytest.raises(diskbuf.StoreExistsError, match="not one of diskbuf's"):
        new(tmp_path / "x")
    with new(tmp_path / "x", publish_to=None) as buffer:  # its lock is free
        assert assert_whole(buffer) == (0, 5)


@pytest.mark.parametrize("kind", ["ring", "zstd"])
def test_a_copy_that_went_its_own_way_is_not_published_over_the_store(
    tmp_path: Path, remote: Remote, kind: str
) -> None:
    with new(tmp_path / "x", kind) as buffer:
        add(buffer, 6)
    for copy in ("older", "longer", "rerun"):
        shutil.copytree(tmp_path / "x", tmp_path / copy)
    with new(tmp_path / "x", kind) as buffer:
        add(buffer, 6)
    with pytest.raises(diskbuf.StoreExistsError, match=r"ids below 12 .* but .* only has those below 6"):
        new(tmp_path / "older", kind)

    with new(tmp_path / "longer", kind, publish_to=None) as buffer:
        for step_id in range(6, 15):
            buffer.add_batch(step(step_id + 1000, LANES))
    with pytest.raises(diskbuf.StoreExistsError, match="other rows of the ids below 12"):
        new(tmp_path / "longer", kind)

    with new(tmp_path / "rerun", kind, publish_to=None) as buffer:
        add(buffer, 4)
    with new(tmp_path / "rerun", kind, publish_to=None) as buffer:
        add(buffer, 4)
    with pytest.raises(diskbuf.StoreExistsError, match="runs that began at"):
        new(tmp_path / "rerun", kind)
    with new(tmp_path / "x", kind) as buffer:
        add(buffer, 1)
    assert published() == (0, 13)


def test_what_a_killed_turn_left_is_removed_when_it_no_longer_counts(tmp_path: Path, remote: Remote) -> None:
    """A turn that put chunks and then no manifest; the window has moved past them when it is published again."""
    with new(tmp_path / "x") as buffer:
        add(buffer, 20)
        buffer.publish_now()
        add(buffer, 20)

        def fail(name: str) -> None:
            if not is_data(name):
                raise ConnectionError("down")

        remote.on_put = fail
        with pytest.warns(RuntimeWarning, match="could not be published"):
            buffer.close()
    remote.mend()
    with new(tmp_path / "x", publish_to=None) as buffer:
        add(buffer, 50)
    with new(tmp_path / "x") as buffer:
        buffer.publish_now()
        columns = buffer._opened().columns
        chunks = sum(len(column.layout.chunks(70, 90)) for column in columns)
    assert published() == (70, 90)
    assert sum(map(is_data, remote.names)) == chunks


# ---- chunks that are only there


@pytest.mark.parametrize("kind", ["elsewhere", "elsewhere-zstd"])
def test_without_keep_local_only_what_is_not_published_is_here(tmp_path: Path, remote: Remote, kind: str) -> None:
    path = tmp_path / "x"

    def here() -> list[Path]:
        return [p for p in path.rglob("*") if p.is_file() and is_data(p.relative_to(path).as_posix())]

    with new(path, kind, max_length=None) as buffer:
        add(buffer, 100)
        with read(path) as reader:
            buffer.publish_now()
            assert not here()
            assert assert_whole(reader) == (0, 100)
        assert assert_whole(buffer) == (0, 100)
        add(buffer, 40)
    assert len(here()) <= len(buffer_columns(path))  # tails that the close sealed
    assert published() == (0, 140)
    assert assert_whole(read(path)) == (0, 140)
    with diskbuf.open(path, mode="r+") as buffer:
        add(buffer, 60)
        assert assert_whole(buffer) == (0, 200)
    assert assert_whole(read(path)) == (0, 200)
    assert published() == (0, 140)
    with diskbuf.open(path, mode="r+", publish_to=URL, keep_local=False) as buffer:
        buffer.publish_now()
        assert len(here()) <= len(buffer_columns(path))
        assert assert_whole(buffer) == (0, 200)
    assert published() == (0, 200)


def buffer_columns(path: Path) -> Any:
    with read(path) as reader:
        return reader._opened().columns


def test_where_chunks_are_is_fixed_when_a_store_is_made(tmp_path: Path, remote: Remote) -> None:
    with new(tmp_path / "x", publish_to=None) as buffer:
        add(buffer, 5)
    with pytest.raises(diskbuf.StoreMismatchError, match="keep_local"):
        new(tmp_path / "x", keep_local=False)
    with new(tmp_path / "y", "elsewhere") as buffer:
        add(buffer, 5)
    with pytest.raises(diskbuf.StoreMismatchError, match=f"publish_to: the store has {URL}"):
        new(tmp_path / "y", publish_to="faulty://bucket/other.zarr")
    with diskbuf.open(tmp_path / "y", mode="r+", publish_to=URL) as buffer:
        add(buffer, 5)
    assert published() == (0, 10)


# ---- processes


def test_a_forked_child_publishes_nothing(tmp_path: Path, remote: Remote) -> None:
    with new(tmp_path / "x", publish_seconds=0.01) as buffer:
        add(buffer, 5)
        buffer.publish_now()
        context = multiprocessing.get_context("fork")
        answers = context.SimpleQueue()

        def child() -> None:
            remote.done.clear()
            try:
                buffer.publish_now()
            except diskbuf.ReadOnlyError:
                buffer.close()
                names = {thread.name for thread in threading.enumerate()}
                answers.put((remote.done, "diskbuf-publisher" in names))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads, which this is about
            process = context.Process(target=child)
            process.start()
        process.join(DEADLINE_SECONDS)
        assert process.exitcode == 0
        assert answers.get() == ([], False)
        add(buffer, 5)
        buffer.publish_now()
        assert published() == (0, 10)


def test_a_buffer_that_is_forgotten_ends_its_thread(tmp_path: Path, remote: Remote) -> None:
    buffer = new(tmp_path / "x", publish_seconds=0.01)
    add(buffer, 5)
    wait_until(lambda: "zarr.json" in remote.names)
    thread = next(thread for thread in threading.enumerate() if thread.name == "diskbuf-publisher")
    del buffer
    gc.collect()
    thread.join(DEADLINE_SECONDS)
    assert not thread.is_alive()


FORGETFUL = """
import asyncio, json, sys, threading, time
import s3fs
import diskbuf
from coded_rows import SPEC, step

path, url, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
small = diskbuf.UniformReplayBuffer(
    SPEC, 2, path=path + "-small", publish_to=url + "-small", storage_options=options, keep_local=False,
    options=diskbuf.StoreOptions(chunk_bytes=16),
)
small.add_batch(step(0, 2))
small.publish_now()
reader = diskbuf.open(url + "-small", storage_options=options)
here = diskbuf.open(path + "-small", storage_options=options)
for opened in (small, reader, here):
    opened.gather_all()

put = s3fs.S3FileSystem._pipe_file

async def put_slowly(*arguments, **keywords):
    await asyncio.sleep(1)
    return await put(*arguments, **keywords)

s3fs.S3FileSystem._pipe_file = put_slowly
buffer = diskbuf.UniformReplayBuffer(
    SPEC, 2, None, path=path, options=diskbuf.StoreOptions(chunk_bytes=16),
    publish_to=url, publish_seconds=0.5, storage_options=options,
)
for step_id in range(200):
    buffer.add_batch(step(step_id, 2))
while not any(thread.name.startswith("diskbuf-publish-") for thread in threading.enumerate()):
    time.sleep(0.01)
print("ends", flush=True)
"""


@pytest.fixture(scope="module")
def s3() -> Iterator[servers.CloudServer]:
    with servers.s3_server() as server:
        yield server


def test_a_program_that_ends_without_closing_does_not_wait_for_the_remote(
    tmp_path: Path, s3: servers.CloudServer
) -> None:
    url, options = f"{s3.url}/forgotten.zarr", json.dumps(s3.storage_options)
    command = [sys.executable, "-c", FORGETFUL, str(tmp_path / "x"), url, options]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == b"ends\n"
            program.wait(DEADLINE_SECONDS)  # hundreds of chunks are left, at four a second
        finally:
            program.kill()
    assert program.returncode == 0
    with diskbuf.open(tmp_path / "x") as reader:
        assert assert_whole(reader) == (0, 200)


WRITER = """
import json, sys, time
import diskbuf
from coded_rows import SPEC, step

path, url, options, codec = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
buffer = diskbuf.UniformReplayBuffer(
    SPEC, 2, 200, path=path, publish_to=url, publish_seconds=0.02, storage_options=options,
    options=diskbuf.StoreOptions(chunk_bytes=2048, codec=codec),
)
for step_id in range(buffer.next_id, 10**9):
    buffer.add_batch(step(step_id, 2))
    time.sleep(0.003)
"""


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_a_writer_killed_while_it_publishes_to_s3_leaves_a_whole_commit_and_the_next_one_goes_on(
    tmp_path: Path, s3: servers.CloudServer, codec: str | None
) -> None:
    url = f"{s3.url}/killed-{codec}.zarr"
    path = tmp_path / "x"
    reader, kills = None, 0
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", WRITER, str(path), url, json.dumps(s3.storage_options), json.dumps(codec)]
    while kills < 2:
        writer = subprocess.Popen(command, env=environment)
        try:
            until = None
            while until is None or reader is None or reader.next_id < until:
                assert writer.poll() is None
                if reader is None:
                    reader = open_if_there(url, s3.storage_options)
                    continue
                reader.refresh()
                assert_whole_or_evicted(reader)
                until = reader.next_id + 100 if until is None else until
            writer.send_signal(signal.SIGKILL)
        finally:
            writer.kill()
            writer.wait()
        kills += 1
        reader.refresh()
        assert_whole_or_evicted(reader)
        with diskbuf.open(path) as local:
            assert local.next_id >= reader.next_id
    with diskbuf.open(path, mode="r+", publish_to=url, storage_options=s3.storage_options) as buffer:
        window = (buffer.first_id, buffer.next_id)
    assert reader is not None
    with reader:
        reader.refresh()
        assert assert_whole(reader) == window
        assert reader._opened().runs[-1] == window[1]


def open_if_there(url: str, options: Any) -> UniformReplayBuffer | None:
    try:
        return read(url, storage_options=options)
    except diskbuf.StoreNotFoundError:
        return None


def assert_whole_or_evicted(reader: UniformReplayBuffer) -> None:
    items, info = reader.get_next(64, 2)
    number = items["number"]
    assert np.array_equal(number // 100, info.ids)
    lanes = number[:, :1] % 100
    assert_equal(items, rows(info.ids, np.broadcast_to(lanes, info.ids.shape)))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"publish_to": "runs/x.zarr"}, "publish_to must be a URL"),
        ({"publish_to": Path("x")}, "publish_to must be a URL"),
        ({"publish_to": "https://example.org/x.zarr"}, "can be written to"),
        ({"publish_to": "http://example.org/x.zarr"}, "can be written to"),
        ({"publish_to": "nowhere://x"}, "protocol that fsspec knows"),
        ({"publish_to": "memory://x", "publish_seconds": 0}, "publish_seconds must be"),
        ({"publish_to": "memory://x", "publish_seconds": float("nan")}, "publish_seconds must be"),
        ({"publish_to": "memory://x", "publish_seconds": True}, "publish_seconds must be"),
        ({"publish_to": "memory://x", "keep_local": 1}, "keep_local must be True or False"),
        ({"keep_local": False}, "must come with publish_to"),
        ({"publish_to": "memory://x", "storage_options": "key"}, "storage_options must be a dict"),
    ],
)
def test_bad_arguments_are_refused_and_nothing_is_made(tmp_path: Path, arguments: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        UniformReplayBuffer(SPEC, LANES, path=tmp_path / "x", **arguments)
    assert not (tmp_path / "x" / "zarr.json").exists()


def test_a_store_is_not_published_into_itself(tmp_path: Path) -> None:
    for folder in ("x", "x/there", "."):
        with pytest.raises(OptionError, match="apart from the store"):
            new(tmp_path / "x", publish_to=f"file://{tmp_path / folder}")


def test_who_reads_does_not_publish(tmp_path: Path, remote: Remote) -> None:
    buffer = new(tmp_path / "x", publish_to=None)
    with buffer, pytest.raises(OptionError, match="publish_to must say where"):
        buffer.publish_now()
    with pytest.raises(diskbuf.ClosedError):
        buffer.publish_now()
    with pytest.raises(OptionError, match="publish_to must be left out with mode='r'"):
        diskbuf.open(tmp_path / "x", publish_to=URL)
    with diskbuf.open(tmp_path / "x") as reader, pytest.raises(diskbuf.ReadOnlyError):
        reader.publish_now()
    assert not fsspec.filesystem("faulty").objects
