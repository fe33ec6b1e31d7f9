"""fsync="always" costs one sync an add; what only the journal has is there after a power cut, read or written."""

import dataclasses
import errno
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_writer import KINDS, Shape, after_another_boot, assert_whole

import diskbuf
from diskbuf.store import journal, writing
from diskbuf.store.header import LiveHeader

SHAPE = Shape(kind="unbounded", lanes=2, chunk_bytes=2**16, fsync="always")
COLUMNS = ("id", "code/0", "code/1", "is_odd", "frame")


def fill(buffer: diskbuf.UniformReplayBuffer, shape: Shape, first_id: int, next_id: int) -> None:
    for number in range(first_id, next_id):
        buffer.add_batch(shape.step(number))


def forget_chunks(store: Path, shape: Shape) -> int:
    """Makes zeros of all rows behind the durable record, as a power cut may; returns how many there are."""
    header = LiveHeader(store / ".diskbuf" / "live", writable=False)
    recorded = header.durable.next_id
    header.close()
    journaled = journal.journal_of_store(store)
    if journaled is None:
        return 0
    for column in journaled.columns:
        for chunk in range(recorded // column.chunk_rows, -(-journaled.extent.next_id // column.chunk_rows)):
            path = column.chunk_path(store, chunk)
            data = bytearray(path.read_bytes())
            low = max(0, recorded - chunk * column.chunk_rows) * column.row_bytes
            data[low:] = bytes(len(data) - low)
            path.write_bytes(data)
    return journaled.extent.next_id - recorded


@pytest.fixture
def after_a_cut(tmp_path: Path) -> Iterator[Path]:
    """A store with 30 steps of which the chunk files have only the first one."""
    with SHAPE.open(tmp_path / "store") as buffer:
        fill(buffer, SHAPE, 0, 30)
        with after_another_boot(tmp_path / "store") as store:
            assert forget_chunks(store, SHAPE) == 29
            yield store


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are synced."""
    found: list[str] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda fd: found.append(str(Path(f"/proc/self/fd/{fd}").readlink())))
    return found


@pytest.mark.parametrize("columns", [1, 3, 8])
def test_an_add_is_one_sync_however_many_columns_there_are(tmp_path: Path, syncs: list[str], columns: int) -> None:
    spec = {f"column_{number}": diskbuf.ArraySpec([4], "float32") for number in range(columns)}
    options = diskbuf.StoreOptions(fsync="always")
    with diskbuf.UniformReplayBuffer(spec, 1, 10_000, path=tmp_path / "store", options=options) as buffer:
        step = {name: np.ones((1, 4), np.float32) for name in spec}
        buffer.add_batch(step)
        syncs.clear()
        for _ in range(200):
            buffer.add_batch(step)
        assert syncs == [str(tmp_path / "store" / ".diskbuf" / "journal")] * 200
        syncs.clear()
        buffer.extend({name: np.ones((1, 50, 4), np.float32) for name in spec})
        assert len(syncs) == 1


def test_a_full_journal_syncs_the_chunks_and_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, syncs: list[str]
) -> None:
    monkeypatch.setattr(journal, "JOURNAL_BYTES", 5 * 4096)
    with SHAPE.open(tmp_path / "store") as buffer:
        buffer.add_batch(SHAPE.step(0))
        for lap in range(3):
            syncs.clear()
            fill(buffer, SHAPE, 6 * lap + 1, 6 * lap + 7)
            assert len(syncs) == 5 + len(COLUMNS) + 1
            with after_another_boot(tmp_path / "store") as store, diskbuf.open(store) as reader:
                assert assert_whole(reader, SHAPE) == (0, 6 * lap + 7)


def test_rows_of_many_bytes_are_not_written_twice(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, frame_bytes=journal.MOST_FRAME_BYTES, chunk_bytes=2**24)
    with shape.open(tmp_path / "store") as buffer:
        fill(buffer, shape, 0, 3)
        assert not (tmp_path / "store" / ".diskbuf" / "journal").exists()
        with after_another_boot(tmp_path / "store") as store, diskbuf.open(store) as reader:
            assert assert_whole(reader, shape) == (0, 3)


@pytest.mark.parametrize("fsync", ["interval", "never"])
def test_only_fsync_always_makes_a_journal(tmp_path: Path, fsync: str) -> None:
    with dataclasses.replace(SHAPE, fsync=fsync).open(tmp_path / "store") as buffer:
        fill(buffer, SHAPE, 0, 3)
        buffer.flush()
        assert not (tmp_path / "store" / ".diskbuf" / "journal").exists()


def test_a_store_without_room_for_a_journal_does_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "Journal", refuse)
    with SHAPE.open(tmp_path / "store") as buffer:
        fill(buffer, SHAPE, 0, 3)
        with after_another_boot(tmp_path / "store") as store, diskbuf.open(store) as reader:
            assert assert_whole(reader, SHAPE) == (0, 3)


def test_a_reader_takes_from_the_journal_what_the_chunk_files_lost(after_a_cut: Path) -> None:
    before = {path: path.read_bytes() for path in after_a_cut.rglob("*") if path.is_file()}
    with diskbuf.open(after_a_cut) as reader:
        assert assert_whole(reader, SHAPE) == (0, 30)
        assert reader.read(7, 1)["code"][1].tolist() == [7, 1, 4.5]
        np.testing.assert_array_equal(reader.read([[0, 29]], [[1, 0]])["id"], [[0, 29]])
        sample, _ = reader.get_next(50, num_steps=3)
        np.testing.assert_array_equal(np.diff(sample["id"]), 1)
    assert diskbuf.verify(after_a_cut).is_clean
    assert before == {path: path.read_bytes() for path in after_a_cut.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_mapped", [True, False])
def test_every_kind_of_store_is_whole_when_its_chunks_forget_what_the_journal_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_mapped: bool
) -> None:
    monkeypatch.setattr("diskbuf.store.mapping.is_supported", lambda: is_mapped)
    shape = dataclasses.replace(SHAPE, kind=kind, max_length=20, chunk_bytes=128)
    forgotten = 0
    with shape.open(tmp_path / "store") as buffer:
        for number in range(60):
            buffer.add_batch(shape.step(number))
            with after_another_boot(tmp_path / "store") as store:
                forgotten += forget_chunks(store, shape)
                first_id = 0 if kind == "unbounded" else max(0, number - 19)
                with diskbuf.open(store) as reader:
                    assert assert_whole(reader, shape) == (first_id, number + 1)
                if kind == "history":
                    with diskbuf.open(store, history=True) as reader:
                        assert assert_whole(reader, shape) == (0, number + 1)
                with shape.open(store) as other:
                    assert assert_whole(other, shape) == (first_id, number + 1)
    assert forgotten > 20


@pytest.mark.parametrize("fsync", ["always", "interval"])
def test_the_next_writer_brings_it_to_the_chunk_files(after_a_cut: Path, fsync: str) -> None:
    with dataclasses.replace(SHAPE, fsync=fsync).open(after_a_cut) as buffer:
        assert not (after_a_cut / ".diskbuf" / "journal").exists()
        assert assert_whole(buffer, SHAPE) == (0, 30)
        fill(buffer, SHAPE, 30, 40)
    with diskbuf.open(after_a_cut, verify=True) as reader:
        assert assert_whole(reader, SHAPE) == (0, 40)


def test_repair_keeps_it_and_what_it_takes_away_stays_away(after_a_cut: Path) -> None:
    (after_a_cut / "id" / "zarr.json").unlink()
    assert diskbuf.repair(after_a_cut).lost == 0
    with diskbuf.open(after_a_cut) as reader:
        assert assert_whole(reader, SHAPE) == (0, 30)


def test_a_chunk_file_that_is_short_keeps_the_journal_until_it_is_mended(after_a_cut: Path) -> None:
    chunk = after_a_cut / "id" / "c.0.0"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[: 20 * 16])
    with pytest.raises(diskbuf.StoreCorruptError, match="must hold"):
        SHAPE.open(after_a_cut)
    copy = after_a_cut.with_name("copy")
    shutil.copytree(after_a_cut, copy)
    assert diskbuf.repair(copy).lost == 10
    with diskbuf.open(copy) as reader:
        assert assert_whole(reader, SHAPE) == (0, 20)
    chunk.write_bytes(whole)
    with SHAPE.open(after_a_cut) as buffer:
        assert assert_whole(buffer, SHAPE) == (0, 30)


def test_damage_is_read_around_with_what_the_journal_has(after_a_cut: Path) -> None:
    (after_a_cut / "frame" / "zarr.json").write_text("not JSON")
    with pytest.warns(RuntimeWarning), diskbuf.open(after_a_cut, skip_damaged=True) as reader:
        assert assert_whole(reader, SHAPE) == (0, 30)


def test_a_damaged_frame_ends_the_store_before_it_and_says_so(after_a_cut: Path) -> None:
    path = after_a_cut / ".diskbuf" / "journal"
    page = bytearray(path.read_bytes())
    for number in (0, 13, 28):
        for byte in (0, 8, 50, 52, 100):
            damaged = page.copy()
            damaged[4096 * (1 + number) + byte] ^= 4
            path.write_bytes(damaged)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with diskbuf.open(after_a_cut) as reader:
                    assert assert_whole(reader, SHAPE) == (0, 1 + number)
            said = any(f"is damaged, so steps from id {1 + number} on" in str(one.message) for one in caught)
            assert said == (number < 28), "the last frame may be one that was never acknowledged"


@pytest.mark.parametrize("damage", ["missing", "empty", "another head"])
def test_a_journal_that_can_not_be_read_is_told_of(after_a_cut: Path, damage: str) -> None:
    path = after_a_cut / ".diskbuf" / "journal"
    data = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(b"" if damage == "empty" else b"x" + data[1:])
    with pytest.warns(RuntimeWarning, match="journal .* can't be read .* from id 1 on"), diskbuf.open(after_a_cut) as r:
        assert assert_whole(r, SHAPE) == (0, 1)


def test_a_record_in_between_goes_on_with_the_same_journal(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, kind="ring", max_length=8, chunk_bytes=128)
    with shape.open(tmp_path / "store") as buffer:
        fill(buffer, shape, 0, 22)
        store = buffer._store
        with store._recording:
            before = store._secured
            store._give_up(store._bounds_of_window()[0])
            assert store._secured == before
        with after_another_boot(tmp_path / "store") as copy:
            forget_chunks(copy, shape)
            with diskbuf.open(copy) as reader:
                assert assert_whole(reader, shape) == (14, 22)


def test_a_flush_beside_an_append_takes_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SHAPE.open(tmp_path / "store") as buffer:
        fill(buffer, SHAPE, 0, 5)
        commit = buffer._store._commit

        def commit_slowly(extent: Any) -> None:
            commit(extent)
            monkeypatch.setattr(writing, "MOST_FRAME_BYTES", 0)  # so that these begin no frame but a record
            fill(buffer, SHAPE, 5, 9)
            monkeypatch.undo()
            fill(buffer, SHAPE, 9, 12)

        monkeypatch.setattr(buffer._store, "_commit", commit_slowly)
        buffer.flush()
        with after_another_boot(tmp_path / "store") as store:
            forget_chunks(store, SHAPE)
            with diskbuf.open(store) as reader:
                assert assert_whole(reader, SHAPE) == (0, 12)


def fail(_: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_flush_after_a_refused_add_counts_no_row_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SHAPE.open(tmp_path / "store") as buffer:
        fill(buffer, SHAPE, 0, 5)
        buffer.flush()
        with monkeypatch.context() as broken:
            broken.setattr(os, "fdatasync", fail)
            with pytest.raises(OSError, match="Input/output error"):
                buffer.add_batch(SHAPE.step(77))
        buffer.flush()
        with after_another_boot(tmp_path / "store") as store, diskbuf.open(store) as reader:
            assert assert_whole(reader, SHAPE) == (0, 5)


def test_an_add_after_a_flush_whose_record_may_not_be_on_the_disk_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SHAPE.open(tmp_path / "store") as buffer:
        fill(buffer, SHAPE, 0, 5)
        with monkeypatch.context() as broken:
            broken.setattr("diskbuf.store.header.files.sync_descriptor", fail)  # the page is changed all the same
            broken.setattr("diskbuf.store.writing.files.sync_file", lambda _: None)
            with pytest.raises(OSError, match="Input/output error"):
                buffer.flush()
        fill(buffer, SHAPE, 5, 8)
        with after_another_boot(tmp_path / "store") as store, diskbuf.open(store) as reader:
            assert assert_whole(reader, SHAPE) == (0, 8)


def test_clearing_up_to_the_end_of_a_chunk_needs_no_chunk_file(tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, chunk_bytes=128)
    with shape.open(tmp_path / "store") as buffer:
        fill(buffer, shape, 0, 16)
        buffer.clear()
        assert not list((tmp_path / "store" / "id").glob("c.*"))
        with after_another_boot(tmp_path / "store") as store, diskbuf.open(store) as reader:
            assert (reader.first_id, reader.next_id) == (16, 16)
        fill(buffer, shape, 16, 20)
        with after_another_boot(tmp_path / "store") as store, diskbuf.open(store) as reader:
            assert assert_whole(reader, shape) == (16, 20)


def test_an_extend_that_laps_the_ring_gives_up_what_the_journal_has_before_it_is_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = dataclasses.replace(SHAPE, kind="ring", max_length=8, chunk_bytes=256)
    rename, seen = os.rename, []

    def look_after_renaming(*paths: Path) -> None:
        rename(*paths)
        with after_another_boot(tmp_path / "store") as store, diskbuf.open(store) as reader:
            seen.append(assert_whole(reader, shape))

    with shape.open(tmp_path / "store") as buffer:
        fill(buffer, shape, 0, 50)
        buffer.clear()
        buffer.flush()
        fill(buffer, shape, 50, 52)
        monkeypatch.setattr(buffer._store, "_declare", lambda: None)  # the background thread is not fast enough
        monkeypatch.setattr(os, "rename", look_after_renaming)
        buffer.extend(shape.sequence(52, 130))
    assert (50, 52) in seen
    assert seen[-1][0] >= 52


def test_closing_removes_it_and_a_killed_writers_is_settled(tmp_path: Path) -> None:
    path = tmp_path / "store" / ".diskbuf" / "journal"
    buffer = SHAPE.open(tmp_path / "store")
    fill(buffer, SHAPE, 0, 5)
    assert path.exists()
    buffer._store._let_go()
    assert path.exists()
    with dataclasses.replace(SHAPE, fsync="never").open(tmp_path / "store") as buffer:
        assert not path.exists()
        with after_another_boot(tmp_path / "store") as store, diskbuf.open(store) as reader:
            assert assert_whole(reader, SHAPE) == (0, 5)
    with SHAPE.open(tmp_path / "store") as buffer:
        fill(buffer, SHAPE, 5, 9)
        assert path.exists()
    assert not path.exists()


def test_an_interrupt_between_the_sync_and_the_commit_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    for most in (journal.MOST_FRAME_BYTES, 0):
        store = tmp_path / f"store-{most}"
        with SHAPE.open(store) as buffer:
            fill(buffer, SHAPE, 0, 5)
            with monkeypatch.context() as broken:
                broken.setattr(writing, "MOST_FRAME_BYTES", most)
                broken.setattr(buffer._store, "_set_next", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    buffer.add_batch(SHAPE.step(77))
            for number in range(5, 12):
                buffer.add_batch(SHAPE.step(number))
                with after_another_boot(store) as copy:
                    forget_chunks(copy, SHAPE)
                    with diskbuf.open(copy) as reader:
                        assert assert_whole(reader, SHAPE) == (0, number + 1)


def test_a_record_of_a_version_without_journals_has_none(tmp_path: Path) -> None:
    with SHAPE.open(tmp_path / "store") as buffer:
        fill(buffer, SHAPE, 0, 5)
    path = tmp_path / "store" / ".diskbuf" / "live"
    page = bytearray(path.read_bytes())
    for slot in (512, 1024):
        page[slot + 36 : slot + 64] = bytes(28)
    path.write_bytes(page)
    with after_another_boot(tmp_path / "store") as store, diskbuf.open(store) as reader:
        assert assert_whole(reader, SHAPE) == (0, 5)
