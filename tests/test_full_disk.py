"""A disk or a file that can't grow: the add that didn't fit is absent, and adding goes on when there is room."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_writer import Shape, WriterProcess, assert_whole, writer_argv

import diskbuf

SMALL_ROWS = Shape(kind="unbounded", chunk_bytes=2**18)
LARGE_ROWS = Shape(kind="unbounded", chunk_bytes=2**20, frame_bytes=5000)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a tmpfs needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a tmpfs can't be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def assert_all_there(store: Path, shape: Shape, next_id: int) -> None:
    with diskbuf.open(store) as reader:
        assert assert_whole(reader, shape) == (0, next_id)


@pytest.mark.parametrize("more", [(), ("--cannot-reserve",)], ids=["reserves", "can't reserve"])
@pytest.mark.parametrize("fsync", ["interval", "always"])
@pytest.mark.parametrize("shape", [SMALL_ROWS, LARGE_ROWS], ids=["small rows", "large rows"])
def test_a_full_disk_refuses_the_add_and_goes_on_when_there_is_room(
    tmp_path: Path, small_disk: Path, shape: Shape, fsync: str, more: tuple[str, ...]
) -> None:
    store, ballast = small_disk / "store", small_disk / "ballast"
    ballast.write_bytes(bytes(6 * 2**20))
    shape = Shape(**(vars(shape) | {"fsync": fsync}))
    with WriterProcess(writer_argv(store, tmp_path / "counters", shape, "--fill", *more)) as writer:
        said = writer.read_line()
        assert said["errno"] == errno.ENOSPC
        assert said["next_id"] > 20
        assert_all_there(store, shape, said["next_id"])
        ballast.unlink()
        writer.write_line()
        assert writer.wait() == 0
    assert_all_there(store, shape, said["next_id"] + 100)


@pytest.mark.parametrize("shape", [SMALL_ROWS, LARGE_ROWS], ids=["small rows", "large rows"])
def test_a_file_size_limit_refuses_the_add_and_goes_on_without_it(tmp_path: Path, shape: Shape) -> None:
    store = tmp_path / "store"
    more = ("--fill", "--limit-bytes", str(100_000))
    with WriterProcess(writer_argv(store, tmp_path / "counters", shape, *more)) as writer:
        said = writer.read_line()
        assert said["errno"] == errno.EFBIG
        assert said["next_id"] >= 10
        assert_all_there(store, shape, said["next_id"])
        writer.write_line()
        assert writer.wait() == 0
    assert_all_there(store, shape, said["next_id"] + 100)
