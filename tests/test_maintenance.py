"""Verifying and repairing stores whose files were damaged from outside."""

import contextlib
import hashlib
import os
import re
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import diskbuf
from diskbuf.maintenance import longest_gap
from diskbuf.store.header import Extent, LiveHeader

LANES = 2
SPEC = {"big": diskbuf.ArraySpec([64], "uint8"), "small": diskbuf.ArraySpec([], "int64")}
CHUNK = 8  # ids in a chunk of "big", below; those of "small" hold 64


def step(number: int) -> dict[str, Any]:
    return {"big": np.full([LANES, 64], number % 251, "uint8"), "small": np.arange(LANES) + 10 * number}


def check(buffer: diskbuf.UniformReplayBuffer, first_id: int, next_id: int) -> None:
    assert (buffer.first_id, buffer.next_id) == (first_id, next_id)
    items = buffer.gather_all()
    ids = np.arange(first_id, next_id)
    assert (items["small"] == np.arange(LANES)[:, None] + 10 * ids).all()
    assert (items["big"] == (ids % 251)[None, :, None]).all()


def contents(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def make(path: Path, steps: int = 100, **kwargs: Any) -> Path:
    options = diskbuf.StoreOptions(chunk_bytes=CHUNK * LANES * 64)
    arguments = {"max_length": None, "options": options} | kwargs
    with diskbuf.UniformReplayBuffer(SPEC, LANES, path=path, **arguments) as buffer:
        for number in range(steps):
            buffer.add_batch(step(number))
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    return make(tmp_path / "store")


def test_a_clean_store_is_clean_and_repair_changes_no_byte(store: Path) -> None:
    before = contents(store)
    report = diskbuf.verify(store)
    assert (report.is_clean, report.first_id, report.next_id, report.chunks) == (True, 0, 100, 13 + 2)
    assert diskbuf.repair(store).actions == ()
    assert contents(store) == before


def test_a_killed_writers_store_is_clean(tmp_path: Path) -> None:
    path = tmp_path / "store"
    if not (child := os.fork()):
        buffer = diskbuf.UniformReplayBuffer(SPEC, LANES, max_length=None, path=path)
        for number in range(20):
            buffer.add_batch(step(number))
        os._exit(9)
    os.waitpid(child, 0)
    assert diskbuf.verify(path).is_clean
    assert diskbuf.repair(path).actions == ()
    with diskbuf.open(path) as buffer:
        check(buffer, 0, 20)


def test_the_newest_chunk_cut_in_half_loses_only_the_rows_that_were_in_it(store: Path) -> None:
    chunk = store / "big" / "c.12.0.0"
    whole = chunk.read_bytes()
    os.truncate(chunk, len(whole) // 4)  # ids 96 to 99 were in it; two of its eight rows are left
    with pytest.raises(diskbuf.StoreCorruptError, match=re.escape(str(chunk))) as caught:
        diskbuf.open(store)
    assert caught.value.path == str(chunk)

    with pytest.warns(RuntimeWarning, match=re.escape(str(chunk))), diskbuf.open(store, skip_damaged=True) as buffer:
        check(buffer, 0, 96)  # whole chunks only

    report = diskbuf.repair(store)
    assert (report.first_id, report.next_id, report.lost) == (0, 98, 2)
    kept = store / ".diskbuf" / "quarantine" / "big" / "c.12.0.0"
    assert kept.read_bytes() == whole[: len(whole) // 4]
    after = contents(store)
    assert diskbuf.repair(store).actions == ()
    assert contents(store) == after
    with diskbuf.open(store, "r+") as buffer:
        for number in range(98, 120):
            buffer.add_batch(step(number))
        check(buffer, 0, 120)


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    os.truncate(path, 0)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def lengthen(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 1)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [remove, empty, halve, lengthen, make_folder]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_chunk_in_the_middle_leaves_the_longest_run(store: Path, damage: Callable[[Path], None]) -> None:
    chunk = store / "big" / "c.3.0.0"  # ids 24 to 31
    damage(chunk)
    report = diskbuf.verify(store)
    assert [fault.path for fault in report.faults] == [str(chunk)]
    expected = (0, 100) if damage is lengthen else (32, 100)
    dry = diskbuf.repair(store, dry_run=True)
    assert (dry.first_id, dry.next_id) == expected
    assert diskbuf.verify(store) == report

    done = diskbuf.repair(store)
    assert (done.actions, done.first_id, done.next_id) == (dry.actions, dry.first_id, dry.next_id)
    assert diskbuf.verify(store).is_clean
    with diskbuf.open(store) as buffer:
        check(buffer, *expected)
    after = contents(store)
    diskbuf.repair(store)
    assert contents(store) == after


@pytest.mark.parametrize("damage", [*DAMAGES[:3], make_folder])
@pytest.mark.parametrize("name", [".diskbuf/live", "big/zarr.json", "small/zarr.json"])
def test_a_damaged_file_beside_the_chunks_is_named_and_made_anew(
    store: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(store / name)
    report = diskbuf.verify(store)
    assert [fault.path for fault in report.faults] == [str(store / name)]
    assert "\n" not in report.faults[0].message
    diskbuf.repair(store)
    assert diskbuf.verify(store).is_clean
    with diskbuf.open(store, "r+") as buffer:
        check(buffer, 0, 100)


def chunk_files(store: Path) -> list[Path]:
    return sorted(path for path in store.rglob("c.*") if path.is_file())


def test_a_flipped_byte_is_found_in_each_chunk_and_only_there(store: Path) -> None:
    for chunk in chunk_files(store):
        with flipped(chunk, offset=chunk.stat().st_size // 4):
            assert [fault.path for fault in diskbuf.verify(store).faults] == [str(chunk)]
            with diskbuf.open(store, verify=True) as buffer, pytest.raises(diskbuf.StoreCorruptError) as caught:
                buffer.gather_all()
            assert caught.value.path == str(chunk)
    assert diskbuf.verify(store).is_clean
    with diskbuf.open(store, verify=True) as buffer:
        check(buffer, 0, 100)


def test_with_verify_only_the_chunks_that_are_read_are_checked(store: Path) -> None:
    with flipped(store / "big" / "c.12.0.0", offset=0), diskbuf.open(store, verify=True) as buffer:
        assert buffer.read([95], [0])["small"].tolist() == [950]
        with pytest.raises(diskbuf.StoreCorruptError, match=r"c\.12\.0\.0"):
            buffer.read([96], [0])


def test_a_rotten_chunk_is_repaired_like_a_missing_one(store: Path) -> None:
    chunk = store / "big" / "c.3.0.0"
    content = bytearray(chunk.read_bytes())
    content[-1] ^= 0x80
    chunk.write_bytes(content)
    assert (diskbuf.repair(store).first_id, diskbuf.verify(store).is_clean) == (32, True)
    after = contents(store)
    diskbuf.repair(store)
    assert contents(store) == after
    with diskbuf.open(store) as buffer:
        check(buffer, 32, 100)


def test_checksums_follow_a_ring_that_wraps_and_goes_on(tmp_path: Path) -> None:
    store = make(tmp_path / "store", steps=300, max_length=50)
    for first in (300, 377, 600):
        assert diskbuf.verify(store).is_clean
        with flipped(store / "big" / f"c.{(first - 1) // CHUNK}.0.0", offset=0):
            assert not diskbuf.verify(store).is_clean
        with diskbuf.open(store, "r+") as buffer:
            for number in range(first, first + 77):
                buffer.add_batch(step(number))
            buffer.flush()
            assert diskbuf.verify(store).is_clean
            for number in range(first + 77, 600 if first == 377 else first + 77):
                buffer.add_batch(step(number))


def test_checksums_of_steps_that_a_power_cut_took_away_are_forgotten(store: Path) -> None:
    with contextlib.closing(LiveHeader(store / ".diskbuf" / "live", writable=True)) as header:
        header.begin(Extent(generation=0, floor=0, next_id=50))  # as if only 50 steps had been synced
    with pytest.warns(RuntimeWarning, match="certain"):
        buffer = diskbuf.open(store, "r+")
    with buffer:
        for number in range(50, 90):
            buffer.add_batch({name: leaf + 1 for name, leaf in step(number).items()})
    assert diskbuf.verify(store).is_clean


def test_a_cut_checksum_file_is_named_wherever_it_is_cut_and_made_anew(store: Path) -> None:
    path = store / ".diskbuf" / "checksums.arrow"
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        assert [fault.path for fault in diskbuf.verify(store).faults] == [str(path)]
    with pytest.raises(diskbuf.StoreCorruptError, match=r"checksums\.arrow"):
        diskbuf.open(store, verify=True)
    with diskbuf.open(store) as buffer:  # not needed to read without verify
        check(buffer, 0, 100)
    with pytest.warns(RuntimeWarning, match="made anew"), diskbuf.open(store, "r+"):
        pass
    assert diskbuf.verify(store).is_clean
    with flipped(chunk_files(store)[0], offset=3):
        assert not diskbuf.verify(store).is_clean


@contextlib.contextmanager
def flipped(path: Path, *, offset: int) -> Iterator[None]:
    content = path.read_bytes()
    path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
    try:
        yield
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("word", [6, 7])
def test_impossible_ids_in_the_live_header_are_told_within_a_moment(store: Path, word: int) -> None:
    path = store / ".diskbuf" / "live"
    page = bytearray(path.read_bytes())
    struct.pack_into("<q", page, 8 * word, 2**40)  # the floor, the next id
    path.write_bytes(page)
    began = time.monotonic()
    report = diskbuf.verify(store)
    assert 1 <= len(report.faults) <= 2
    for open_it in (diskbuf.open, lambda path: diskbuf.open(path, "r+")):
        with pytest.raises(diskbuf.StoreCorruptError):
            open_it(store)
    diskbuf.repair(store)
    assert time.monotonic() - began < 10
    with diskbuf.open(store) as buffer:
        check(buffer, 0, 100)


def test_history_is_kept_from_the_repaired_part_on(tmp_path: Path) -> None:
    store = make(tmp_path / "store", max_length=20, keep_history=True)
    (store / "small" / "c.0.0").unlink()  # ids 0 to 63
    with diskbuf.open(store) as buffer:
        check(buffer, 80, 100)  # the window isn't touched
    assert (diskbuf.repair(store).first_id, diskbuf.verify(store).first_id) == (64, 64)
    with diskbuf.open(store, history=True) as buffer:
        check(buffer, 64, 100)
    with diskbuf.open(store) as buffer:
        check(buffer, 80, 100)


def test_a_wrapped_ring_with_a_missing_chunk_is_repaired(tmp_path: Path) -> None:
    store = make(tmp_path / "store", steps=300, max_length=50)
    (store / "big" / f"c.{270 // CHUNK}.0.0").unlink()
    report = diskbuf.repair(store)
    assert report.next_id - report.first_id == max(270 // CHUNK * CHUNK - 250, 300 - (270 // CHUNK + 1) * CHUNK)
    with diskbuf.UniformReplayBuffer(SPEC, LANES, max_length=50, path=store) as buffer:
        check(buffer, report.first_id, report.next_id)
        for number in range(report.next_id, report.next_id + 200):
            buffer.add_batch(step(number))
        check(buffer, report.next_id + 150, report.next_id + 200)


def test_a_store_that_is_being_written_is_verified_but_not_repaired(store: Path) -> None:
    with diskbuf.open(store, "r+"):
        assert diskbuf.verify(store).is_clean
        with pytest.raises(diskbuf.StoreLockedError, match=str(os.getpid())):
            diskbuf.repair(store)


@pytest.mark.parametrize("act", [diskbuf.verify, diskbuf.repair])
def test_a_path_without_a_store_is_refused_and_left_alone(tmp_path: Path, act: Callable[[Path], Any]) -> None:
    (tmp_path / "file").write_text("not a store")
    (tmp_path / "folder").mkdir()
    for name in ("nothing", "file", "folder"):
        with pytest.raises(diskbuf.StoreNotFoundError, match=name):
            act(tmp_path / name)
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_damaged_store_cannot_be_opened_for_adding(store: Path) -> None:
    with pytest.raises(diskbuf.OptionError, match="repair"):
        diskbuf.open(store, "r+", skip_damaged=True)


@given(st.integers(0, 5), st.integers(0, 20), st.lists(st.tuples(st.integers(0, 25), st.integers(0, 25)), max_size=4))
def test_the_longest_gap_is_the_longest(first: int, length: int, pairs: list[tuple[int, int]]) -> None:
    bad = [(min(pair), max(pair)) for pair in pairs]
    ids = [number for number in range(first, first + length) if not any(low <= number < high for low, high in bad)]
    low, high = longest_gap(first, first + length, bad)
    found = list(range(low, high))
    assert set(found) <= set(ids)
    runs: list[list[int]] = []
    for number in ids:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    longest = max(map(len, runs), default=0)
    assert found == next((run for run in reversed(runs) if len(run) == longest), [])


def test_a_commit_between_two_looks_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diskbuf import maintenance

    spec = {"x": diskbuf.ArraySpec([], "int64")}
    look = maintenance._root_faults
    with diskbuf.UniformReplayBuffer(spec, 1, 10, path=tmp_path / "s") as buffer:
        buffer.add_batch({"x": np.zeros(1, "int64")})
        buffer.flush()

        def look_later(*given: object) -> object:
            for _ in range(30):
                buffer.add_batch({"x": np.zeros(1, "int64")})
            buffer.flush()
            return look(*given)

        monkeypatch.setattr(maintenance, "_root_faults", look_later)
        assert [fault.message for fault in diskbuf.verify(tmp_path / "s").faults if "zarr.json" in fault.message] == []
