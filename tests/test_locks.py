"""One writer at a time, in this process, in another, in a forked one."""

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from crash_writer import Shape, WriterProcess, assert_whole, writer_argv

import diskbuf

SHAPE = Shape()

FORKS = """
import multiprocessing, os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from crash_writer import Shape, assert_whole
import diskbuf

shape = Shape(fsync_seconds=0.001)

def child(buffer, ending):
    refused = 0
    for write in (
        lambda: buffer.add_batch(shape.step(10)),
        lambda: buffer.extend(shape.sequence(10, 12)),
        buffer.clear,
        buffer.flush,
    ):
        try:
            write()
        except diskbuf.ReadOnlyError:
            refused += 1
    assert refused == 4, refused
    assert assert_whole(buffer, shape) == (0, 10)
    if ending == "close":
        buffer.close()

def main():
    path = None if sys.argv[1] == "private" else Path(sys.argv[1])
    buffer = shape.open(path)
    buffer.extend(shape.sequence(0, 10))
    for ending in ("close", "exit"):
        process = multiprocessing.get_context("fork").Process(target=child, args=(buffer, ending))
        process.start()
        process.join()
        assert process.exitcode == 0, process.exitcode
        assert assert_whole(buffer, shape) == (0, 10)
        try:
            shape.open(buffer.path)
        except diskbuf.StoreLockedError as error:
            assert error.pid == os.getpid()
        else:
            raise AssertionError("the child's exit freed the parent's lock")
    buffer.add_batch(shape.step(10))
    buffer.flush()
    assert assert_whole(buffer, shape) == (0, 11)
    folder = buffer.path
    buffer.close()
    assert folder.exists() == (sys.argv[1] != "private")

main()
"""

FORKS_UNDER_A_LOCK = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from crash_writer import Shape
import diskbuf

shape = Shape()
buffer = shape.open(Path(sys.argv[1]))
buffer.add_batch(shape.step(0))
store = buffer._writer
with store._appending.lock, store._flushing.lock, store._recording:  # as a thread that adds or syncs may at a fork
    pid = os.fork()
if pid == 0:
    signal.alarm(10)
    for write in (lambda: buffer.add_batch(shape.step(1)), buffer.clear, buffer.flush):
        try:
            write()
        except diskbuf.ReadOnlyError:
            pass
        else:
            os._exit(3)
    del buffer, store
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
buffer.close()
"""

OUTLIVES = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from crash_writer import Shape

buffer = Shape().open(Path(sys.argv[1]))
buffer.add_batch(Shape().step(0))
if os.fork() == 0:
    print("forked", flush=True)  # only now is the child's copy of the lock sure to be gone
    sys.stdin.read()
    os._exit(0)
os._exit(1)
"""


def run(script: str, argument: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", script, argument, Path(__file__).parent],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_a_second_writer_in_this_process_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with SHAPE.open(tmp_path / "store") as buffer:
        for opening in (lambda: SHAPE.open(tmp_path / "store"), lambda: diskbuf.open(tmp_path / "store", "r+")):
            with pytest.raises(diskbuf.StoreLockedError, match=f"process {os.getpid()} on host") as raised:
                opening()
            assert raised.value.pid == os.getpid()
        buffer.add_batch(SHAPE.step(0))
        assert assert_whole(buffer, SHAPE) == (0, 1)
    with diskbuf.open(tmp_path / "store", "r+") as buffer:
        assert assert_whole(buffer, SHAPE) == (0, 1)


def test_a_live_writer_elsewhere_is_named_and_a_killed_ones_lock_taken_over(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with WriterProcess(writer_argv(store, tmp_path / "counters", SHAPE, "--does", "add")) as writer:
        writer.wait_for(lambda: writer.counters.acknowledged > 0)
        for opening in (lambda: SHAPE.open(store), lambda: diskbuf.open(store, "r+")):
            with pytest.raises(diskbuf.StoreLockedError, match=r"cannot open .* for writing") as raised:
                opening()
            assert (raised.value.pid, raised.value.host) == (writer.pid, socket.gethostname())
        reach = writer.counters.acknowledged + 100
        writer.wait_for(lambda: writer.counters.acknowledged >= reach)  # it hasn't noticed
        writer.kill()
    with SHAPE.open(store) as buffer:
        writer.counters.assert_agree(assert_whole(buffer, SHAPE), SHAPE.length)


@pytest.mark.parametrize("where", ["private", "store"])
def test_a_forked_child_cannot_write_and_its_end_leaves_the_parents_store_alone(tmp_path: Path, where: str) -> None:
    run(FORKS, where if where == "private" else str(tmp_path / "store"))


def test_a_child_forked_while_a_thread_writes_is_refused_too(tmp_path: Path) -> None:
    run(FORKS_UNDER_A_LOCK, str(tmp_path / "store"))


def test_a_child_that_outlives_its_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OUTLIVES, tmp_path / "store", Path(__file__).parent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "forked\n"
        assert parent.wait(30) == 1
        with SHAPE.open(tmp_path / "store") as buffer:
            assert assert_whole(buffer, SHAPE) == (0, 1)


@pytest.fixture
def cannot_lock(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """A file system that doesn't lock files; returns the error that it gives."""
    number: int = getattr(request, "param", errno.ENOLCK)

    def refuse(_: int, operation: int) -> None:
        assert operation & fcntl.LOCK_NB
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", refuse)
    return number


@pytest.mark.parametrize("cannot_lock", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], indirect=True)
def test_a_file_system_that_does_not_lock_is_explained_with_the_way_round(tmp_path: Path, cannot_lock: int) -> None:
    store = tmp_path / "store"
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    unlocked = diskbuf.StoreOptions(lock=False)
    with SHAPE.open(store, options=unlocked) as buffer:
        buffer.add_batch(SHAPE.step(0))
    assert not (store / ".diskbuf" / "lock").exists()
    for opening in (lambda: SHAPE.open(store), lambda: diskbuf.open(store, "r+"), lambda: diskbuf.repair(store)):
        with pytest.raises(diskbuf.StoreLockUnsupportedError, match=r"doesn't lock files .*lock=False") as raised:
            opening()
        assert raised.value.path == str(store)
        assert raised.value.__cause__.errno == cannot_lock
        assert not isinstance(raised.value, diskbuf.StoreLockedError), "waiting wouldn't help"
    assert len(list(Path("/proc/self/fd").iterdir())) <= descriptors
    with diskbuf.open(store, "r+", options=unlocked) as buffer:
        buffer.add_batch(SHAPE.step(1))
        assert assert_whole(buffer, SHAPE) == (0, 2)
    assert not diskbuf.repair(store, lock=False).actions
    with diskbuf.open(store) as reader:
        assert assert_whole(reader, SHAPE) == (0, 2)


@pytest.mark.parametrize("cannot_lock", [errno.EIO], indirect=True)
def test_a_lock_that_fails_for_another_reason_is_that_error(tmp_path: Path, cannot_lock: int) -> None:
    with pytest.raises(OSError, match=r"Input/output error") as raised:
        SHAPE.open(tmp_path / "store")
    assert not isinstance(raised.value, diskbuf.DiskbufError)


def test_a_private_buffer_needs_no_lock_when_told(cannot_lock: int) -> None:
    with SHAPE.open(None, options=diskbuf.StoreOptions(lock=False)) as buffer:
        buffer.add_batch(SHAPE.step(0))
        assert assert_whole(buffer, SHAPE) == (0, 1)


def test_lock_is_true_or_false() -> None:
    with pytest.raises(diskbuf.OptionError, match=r"lock must be True or False, got 0\."):
        diskbuf.StoreOptions(lock=0)
