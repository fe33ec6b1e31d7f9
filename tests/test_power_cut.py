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


def lost_files(store: Path) -> set[str]:
    folder = store / ".diskbuf" / "quarantine"
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def flushed_and_more(buffer: diskbuf.UniformReplayBuffer, shape: Shape) -> None:
    buffer.extend(shape.sequence(0, 20))
    buffer.flush()
    buffer.extend(shape.sequence(20, 60))


def test_chunks_of_steps_that_were_added_but_not_synced_are_moved_aside_and_named(tmp_path: Path) -> None:
    shape = Shape(kind="unbounded", lanes=1, chunk_bytes=64, fsync="never")
    with shape.open(tmp_path / "store") as buffer:
        flushed_and_more(buffer, shape)
        with after_another_boot(tmp_path / "store") as store:
            kept = {path.name: path.read_bytes() for path in (store / "id").glob("c.*") if path.stat().st_size}
            with diskbuf.open(store) as reader:
                assert reader.next_id == 20
            assert not lost_files(store), "a reader changes nothing"
            with pytest.warns(RuntimeWarning, match=r"steps behind them were moved to .*quarantine\.$"):
                shape.open(store).close()
            assert {"id/c.3.0", "id/c.7.0", "frame/c.5.0.0"} <= lost_files(store)
            assert "id/c.2.0" not in lost_files(store)
            for name in ("c.3.0", "c.7.0"):
                assert (store / ".diskbuf" / "quarantine" / "id" / name).read_bytes() == kept[name]
            lost = lost_files(store)
            with shape.open(store) as other:
                other.extend(shape.sequence(20, 60))
            assert lost_files(store) == lost
            with diskbuf.open(store) as reader:
                assert assert_whole(reader, shape) == (0, 60)


def test_an_opening_that_is_killed_on_the_way_loses_no_chunk_that_was_to_be_moved_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    shape = Shape(kind="unbounded", lanes=1, chunk_bytes=64, fsync="never")
    with shape.open(tmp_path / "store") as buffer:
        flushed_and_more(buffer, shape)
        with after_another_boot(tmp_path / "store") as store:
            chunks = {path.name for path in (store / "id").glob("c.*")}
            for call in ("move_to_quarantine", "ColumnWriter"):
                with monkeypatch.context() as broken:
                    broken.setattr(f"diskbuf.store.writing.{call}", die)
                    with pytest.raises(KeyboardInterrupt):
                        shape.open(store)
            shape.open(store).close()
            there = {path.name for path in (store / "id").glob("c.*")}
            assert there | {Path(name).name for name in lost_files(store) if name.startswith("id/")} == chunks


def test_what_was_only_begun_ahead_is_removed_after_a_power_cut(tmp_path: Path) -> None:
    shape = Shape(kind="unbounded", lanes=1, chunk_bytes=64, fsync="never")
    with shape.open(tmp_path / "store") as buffer:
        buffer.extend(shape.sequence(0, 20))
        buffer.flush()
        with after_another_boot(tmp_path / "store") as store:
            for name in ("c.3.0", "c.4.0"):
                (store / "id" / name).write_bytes(bytes(64))
            (store / "id" / ".zarr.json.tmp").write_bytes(b"half")
            shape.open(store).close()
            assert not lost_files(store)
            assert {path.name for path in (store / "id").iterdir()} == {"zarr.json", "c.0.0", "c.1.0", "c.2.0"}


def test_a_killed_writers_leftovers_on_the_same_boot_are_removed(tmp_path: Path) -> None:
    shape = Shape(kind="unbounded", lanes=1, chunk_bytes=64, fsync="never")
    buffer = shape.open(tmp_path / "store")
    buffer.extend(shape.sequence(0, 20))
    buffer._store._let_go()
    (tmp_path / "store" / "id" / "c.3.0").write_bytes(bytes(range(64)))
    shape.open(tmp_path / "store").close()
    assert not lost_files(tmp_path / "store")
    assert not (tmp_path / "store" / "id" / "c.3.0").exists()


def test_a_store_that_was_not_closed_does_not_look_as_if_it_had_been(tmp_path: Path) -> None:
    shape = Shape(kind="unbounded", lanes=1, fsync="never")
    buffer = shape.open(tmp_path / "store")
    buffer.add_batch(shape.step(0))
    buffer.flush()
    buffer._store._let_go()
    assert not (tmp_path / "store" / ".diskbuf" / "checksums.arrow").exists()
    assert diskbuf.verify(tmp_path / "store").is_clean


def test_the_quarantine_of_lost_steps_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskbuf.store.writing._MOST_LOST_BYTES", 3 * 4096)
    shape = Shape(kind="unbounded", lanes=1, chunk_bytes=64, fsync="never")
    with shape.open(tmp_path / "store") as buffer:
        flushed_and_more(buffer, shape)
        with after_another_boot(tmp_path / "store") as store:
            with pytest.warns(RuntimeWarning, match=r"3 chunk files .* \d+ more were removed"):
                shape.open(store).close()
            assert len(lost_files(store)) == 3


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
