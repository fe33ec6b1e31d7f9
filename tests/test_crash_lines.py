"""Writers killed after each line of the store's code that changes a file, and the same files found by another boot."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash_writer import (
    IS_LONG,
    KINDS,
    Counters,
    Nursery,
    Shape,
    after_another_boot,
    assert_no_leftovers,
    assert_whole,
    writer_argv,
)

import diskbuf
from diskbuf.store.manifest import read_manifest

SMALL = Shape(lanes=1, max_length=6, chunk_bytes=32, fsync_seconds=3600.0)
FSYNCS = ("interval", "always", "never")
WORK = "add*3,flush,extend*9,clear,add*5,flush,add*2,clear"


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(autouse=True)
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a killed process wrote survives it without a sync, and hundreds of syncs take long."""
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setattr("os.fdatasync", lambda _: None)


@dataclasses.dataclass
class Killed:
    """What a killed writer left."""

    store: Path
    counters: Counters


def killed_at_each_line(
    tmp_path: Path, nursery: Nursery, shape: Shape, *more: str, third: int | None = None
) -> Iterator[Killed]:
    """Runs the same writer on copies of what is at tmp_path, killed each time after another line that changes a file.

    With `third`, only at every third of them, from that one on, unless in the long form.
    """
    base, count = tmp_path / "base", tmp_path / "base-counters"
    base.mkdir(exist_ok=True)
    Counters(count)

    def run(name: str, *last: str) -> tuple[int, Killed]:
        store, counters = tmp_path / name, tmp_path / f"{name}-counters"
        shutil.copytree(base, store)
        shutil.copy(count, counters)
        with nursery.start(writer_argv(store, counters, shape, "--no-sync", *more, *last)) as writer:
            return writer.wait(), Killed(store, writer.counters)

    moments = tmp_path / "moments"
    assert run("whole", "--moments", str(moments))[0] == 0
    numbers = json.loads(moments.read_text())
    assert len(numbers) > 15, numbers
    for number in numbers if third is None or IS_LONG else numbers[third::3]:
        code, killed = run("killed", "--dies-at", str(number))
        assert code in {-9, 0}, "it must not fail by itself; the background thread may have run some lines instead"
        yield killed
        shutil.rmtree(killed.store)
        (tmp_path / "killed-counters").unlink()


def write_base(tmp_path: Path, shape: Shape, adds: int, *, flushed: int = 0) -> None:
    with shape.open(tmp_path / "base") as buffer:
        for number in range(adds):
            buffer.add_batch(shape.step(number))
            if number + 1 == flushed:
                buffer.flush()
        first_id = buffer.first_id
    Counters(tmp_path / "base-counters").set(begun=adds, acknowledged=adds, clearing=first_id, cleared=first_id)


def assert_goes_on(store: Path, shape: Shape, **changes: object) -> None:
    with shape.open(store, **changes) as buffer:
        window = assert_whole(buffer, shape)
        assert_no_leftovers(store, window, shape)
        buffer.add_batch(shape.step(window[1]))
        buffer.extend(shape.sequence(window[1] + 1, window[1] + 12))
        assert assert_whole(buffer, shape)[1] == window[1] + 12


def test_a_store_whose_creation_was_killed_is_created_anew(tmp_path: Path, nursery: Nursery) -> None:
    for killed in killed_at_each_line(tmp_path, nursery, SMALL):
        try:
            with diskbuf.open(killed.store) as reader:
                assert reader.num_frames() == 0
        except diskbuf.StoreNotFoundError:
            pass
        assert_goes_on(killed.store, SMALL)


@pytest.mark.parametrize("kind", KINDS)
def test_a_writer_killed_at_any_line_leaves_every_acknowledged_step(
    tmp_path: Path, nursery: Nursery, kind: str
) -> None:
    shape = dataclasses.replace(SMALL, kind=kind)
    write_base(tmp_path, shape, 10)
    for killed in killed_at_each_line(tmp_path, nursery, shape, "--script", WORK, third=KINDS.index(kind)):
        with diskbuf.open(killed.store) as reader:
            killed.counters.assert_agree(assert_whole(reader, shape), shape.length)
        assert_goes_on(killed.store, shape)


def test_a_killed_writers_store_that_loses_zarr_json_is_repaired_with_every_run_known(
    tmp_path: Path, nursery: Nursery
) -> None:
    write_base(tmp_path, SMALL, 10)
    for killed in killed_at_each_line(tmp_path, nursery, SMALL, "--script", "add*3,flush,extend*9", third=0):
        runs = read_manifest(killed.store).runs
        (killed.store / "zarr.json").unlink()
        next_id = diskbuf.repair(killed.store).next_id
        known = read_manifest(killed.store).runs
        assert {run for run in runs if run < next_id} <= set(known), "else a sequence could span a restart"
        with diskbuf.open(killed.store) as reader:
            killed.counters.assert_agree(assert_whole(reader, SMALL), SMALL.length)
        assert_goes_on(killed.store, SMALL)


@pytest.mark.parametrize("fsync", FSYNCS)
def test_another_boot_finds_no_torn_row_and_every_flushed_one_that_was_not_evicted(
    tmp_path: Path, nursery: Nursery, fsync: str
) -> None:
    shape = dataclasses.replace(SMALL, fsync=fsync)
    write_base(tmp_path, shape, 10)
    for killed in killed_at_each_line(
        tmp_path, nursery, shape, "--script", "add*9,extend*7", third=FSYNCS.index(fsync)
    ):
        with after_another_boot(killed.store) as store:
            with diskbuf.open(store) as reader:
                first_id, next_id = assert_whole(reader, shape)
            assert next_id >= (killed.counters.acknowledged if fsync == "always" else 10)
            assert first_id <= max(4, killed.counters.begun - shape.max_length)
            assert_goes_on(store, shape)


def test_a_longer_window_never_brings_back_rows_that_left_it(tmp_path: Path, nursery: Nursery) -> None:
    write_base(tmp_path, SMALL, 30)
    longer = dataclasses.replace(SMALL, max_length=25)
    for killed in killed_at_each_line(tmp_path, nursery, longer, "--script", "add*2"):
        with diskbuf.open(killed.store) as reader:
            first_id, next_id = assert_whole(reader, longer)
        assert first_id in {24, next_id - SMALL.max_length}
        with after_another_boot(killed.store) as store, diskbuf.open(store) as reader:
            assert assert_whole(reader, longer)[0] >= 24
        with longer.open(killed.store) as buffer:
            assert assert_whole(buffer, longer) == (first_id, next_id)


def test_a_trimmed_window_is_the_old_or_the_new_one_and_stays_trimmed(tmp_path: Path, nursery: Nursery) -> None:
    longer = dataclasses.replace(SMALL, max_length=25)
    write_base(tmp_path, longer, 30)
    for killed in killed_at_each_line(tmp_path, nursery, SMALL, "--trim"):
        with diskbuf.open(killed.store) as reader:
            assert assert_whole(reader, SMALL) in {(5, 30), (24, 30)}
        with SMALL.open(killed.store, trim=True) as buffer:
            assert assert_whole(buffer, SMALL) == (24, 30)
        with longer.open(killed.store) as buffer:
            assert assert_whole(buffer, longer) == (24, 30)
