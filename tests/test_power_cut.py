"""What counts after another start of the machine, and the order in which it is brought to the disk."""

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from crash_writer import Shape, after_another_boot, assert_whole

import diskbuf

NEVER_IN_THE_BACKGROUND = 3600.0


def test_every_flushed_step_is_there_and_ids_go_on(tmp_path: Path) -> None:
    shape = Shape(kind="unbounded", fsync_seconds=NEVER_IN_THE_BACKGROUND)
    with shape.open(tmp_path / "store") as buffer:
        buffer.extend(shape.sequence(0, 20))
        buffer.flush()
        buffer.extend(shape.sequence(20, 40))
        with after_another_boot(tmp_path / "store") as store:
            with diskbuf.open(store) as reader:
                assert assert_whole(reader, shape) == (0, 20)
            with shape.open(store) as other:
                other.extend(shape.sequence(20, 25))
            with diskbuf.open(store) as reader:
                assert assert_whole(reader, shape) == (0, 25)


@pytest.mark.parametrize("more", [1, 12, 50, 500])
@pytest.mark.parametrize("fsync", ["interval", "never"])
def test_a_ring_overwritten_after_its_last_flush_shows_nothing_torn(tmp_path: Path, fsync: str, more: int) -> None:
    shape = Shape(max_length=20, chunk_bytes=64, fsync=fsync, fsync_seconds=NEVER_IN_THE_BACKGROUND)
    with shape.open(tmp_path / "store") as buffer:
        buffer.extend(shape.sequence(0, 40))
        buffer.flush()
        for number in range(40, 40 + more):
            buffer.add_batch(shape.step(number))
        with after_another_boot(tmp_path / "store") as store, diskbuf.open(store) as reader:
            first_id, next_id = assert_whole(reader, shape)
    assert next_id >= 40
    assert first_id <= 20 + more  # no more is given up than was evicted


def test_with_fsync_always_another_boot_finds_every_add(tmp_path: Path) -> None:
    shape = Shape(max_length=20, chunk_bytes=64, fsync="always")
    with shape.open(tmp_path / "store") as buffer:
        for number in range(45):
            buffer.add_batch(shape.step(number))
            if number % 9 == 0:
                with after_another_boot(tmp_path / "store") as store, diskbuf.open(store) as reader:
                    assert assert_whole(reader, shape) == (max(0, number - 19), number + 1)


def test_a_header_that_lost_one_copy_of_its_record_uses_the_other(tmp_path: Path) -> None:
    shape = Shape(kind="unbounded", fsync_seconds=NEVER_IN_THE_BACKGROUND)
    with shape.open(tmp_path / "store") as buffer:
        for first_id in range(0, 40, 10):
            buffer.extend(shape.sequence(first_id, first_id + 10))
            buffer.flush()
        found = set()
        for offset in (512, 1024):
            with after_another_boot(tmp_path / "store") as store:
                page = bytearray((store / ".diskbuf" / "live").read_bytes())
                page[offset + 20] ^= 1
                (store / ".diskbuf" / "live").write_bytes(page)
                with diskbuf.open(store) as reader:
                    found.add(assert_whole(reader, shape)[1])
    assert found == {30, 40}


@pytest.mark.parametrize("call", ["os.fdatasync", "os.fsync"])
def test_a_sync_that_fails_fails_the_add_or_flush_and_the_next_one_makes_it_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    is_add = call == "os.fdatasync"
    shape = Shape(max_length=20, chunk_bytes=64, fsync="always" if is_add else "never")
    with shape.open(tmp_path / "store") as buffer:
        buffer.extend(shape.sequence(0, 30))
        buffer.flush()
        if not is_add:
            buffer.add_batch(shape.step(30))
        with monkeypatch.context() as broken:
            broken.setattr(call, fail)
            with pytest.raises(OSError, match="Input/output error"):
                buffer.add_batch(shape.step(30)) if is_add else buffer.flush()
        assert assert_whole(buffer, shape) == ((10, 30) if is_add else (11, 31))
        if is_add:
            buffer.add_batch(shape.step(30))
        buffer.flush()
        with after_another_boot(tmp_path / "store") as store, diskbuf.open(store) as reader:
            assert assert_whole(reader, shape) == (11, 31)


FLUSHES = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from crash_writer import Shape

shape = Shape(kind="unbounded", fsync="never")
buffer = shape.open(Path(sys.argv[1]))
buffer.extend(shape.sequence(0, 60))
os.access("/flush begins", os.F_OK)
buffer.flush()
os.access("/flush ends", os.F_OK)
os._exit(0)
"""

CALL = re.compile(r"(?:\[pid +\d+\] |\d+ +)?(\w+)\((.*)\) += (-?\d+)")


@pytest.fixture(scope="module")
def strace() -> str:
    found = shutil.which("strace")
    if found is None:
        pytest.skip("strace is not installed")
    if subprocess.run([found, "-o", "/dev/null", "true"], capture_output=True, check=False).returncode:
        pytest.skip("strace may not trace here")
    return found


def test_a_flush_syncs_data_then_replaces_metadata_file_rename_folder_then_the_record(
    tmp_path: Path, strace: str
) -> None:
    store, log = tmp_path / "store", tmp_path / "log"
    command = [strace, "-f", "-y", "-o", log, "-e", "trace=fsync,fdatasync,rename,renameat,renameat2,access,faccessat"]
    subprocess.run(
        [*command, sys.executable, "-c", FLUSHES, store, Path(__file__).parent], check=True, capture_output=True
    )
    calls = [(match[1], match[2]) for line in log.read_text().splitlines() if (match := CALL.match(line))]
    begin = next(number for number, call in enumerate(calls) if "/flush begins" in call[1])
    end = next(number for number, call in enumerate(calls) if "/flush ends" in call[1])
    during = [
        ("rename" if name.startswith("rename") else name, re.findall(r'[<"](/[^>"]*)[>"]', arguments))
        for name, arguments in calls[begin + 1 : end]
    ]
    record = [str(store / ".diskbuf" / "live")]
    assert record in [paths for _, paths in during], "the durable record is synced"
    during = during[: max(number for number, (_, paths) in enumerate(during) if paths == record) + 1]
    renames = [number for number, (name, _) in enumerate(during) if name == "rename"]
    assert renames, "a flush replaces the metadata"
    synced = {Path(paths[0]) for name, paths in during[: renames[0]] if name in {"fsync", "fdatasync"}}
    for column in ("id", "code/0", "code/1", "is_odd", "frame"):
        assert synced >= set((store / column).glob("c.*"))
        assert store / column in synced
    for number in renames:
        temporary, target = during[number][1]
        assert during[number - 1] == ("fsync", [temporary])
        assert during[number + 1] == ("fsync", [str(Path(target).parent)])
    assert Path(during[renames[-1]][1][1]) == store / "zarr.json", "the manifest is replaced last"
    assert Path(during[renames[-2]][1][1]) == store / ".diskbuf" / "manifest.json", "its copy right before"
    assert during[-1][0] in {"fsync", "fdatasync"}, "the record counts what is on the disk by then"
