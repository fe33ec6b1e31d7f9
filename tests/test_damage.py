"""Stores with a damaged file: opening ends or says which file within a fixed time, and throws nothing good away."""

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_writer import Shape, assert_equal_steps, assert_whole, expected_files, files_of

import diskbuf

LONGEST_OPENING_SECONDS = 10.0
SHAPE = Shape(kind="unbounded", chunk_bytes=64)


def in_time(call: Callable[[], Any]) -> Any:
    """Calls on a thread, so that a call that hangs is a failure and not a hanging test."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised again on the calling thread
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LONGEST_OPENING_SECONDS)
    assert outcome, "it takes too long"
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("written") / "store"
    with SHAPE.open(store) as buffer:
        buffer.extend(SHAPE.sequence(0, 30))
    return store


@pytest.fixture
def store(written: Path, tmp_path: Path) -> Path:
    store = Path(shutil.copytree(written, tmp_path / "store"))
    status = (store / ".diskbuf" / "live").stat()
    edit_header(store, device=status.st_dev, inode=status.st_ino)  # no copy, as far as diskbuf knows
    return store


def edit_manifest(store: Path, **changes: Any) -> None:
    path = store / "zarr.json"
    document = json.loads(path.read_bytes())
    document["attributes"]["diskbuf"] |= changes
    document["attributes"].pop("diskbuf_crc32", None)
    path.write_text(json.dumps(document))


def edit_header(store: Path, **words: int) -> None:
    path = store / ".diskbuf" / "live"
    page = bytearray(path.read_bytes())
    page[80:88] = bytes(8)  # not closed, so that its words are not sealed
    for name, value in words.items():
        offset = 8 * {"generation": 5, "floor": 6, "next_id": 7, "device": 8, "inode": 9}[name]
        page[offset : offset + 8] = value.to_bytes(8, "little", signed=True)
    path.write_bytes(page)


def openings(store: Path) -> Iterator[Callable[[], diskbuf.UniformReplayBuffer]]:
    yield lambda: diskbuf.open(store)
    yield lambda: diskbuf.open(store, "r+")
    yield lambda: SHAPE.open(store)


def test_a_manifest_that_counts_more_than_the_header_is_not_trusted_and_said(store: Path) -> None:
    edit_manifest(store, next_id=45)
    for opening in (lambda: diskbuf.open(store), lambda: SHAPE.open(store)):
        with pytest.warns(RuntimeWarning, match="up to id 45 were added, but only those below 30"):
            buffer = opening()
        with buffer:
            assert assert_whole(buffer, SHAPE) == (0, 30)
    with diskbuf.open(store) as reader:  # the writer has put it right
        assert assert_whole(reader, SHAPE) == (0, 30)


def test_a_header_that_counts_more_than_the_chunks_hold_is_refused(store: Path) -> None:
    edit_header(store, next_id=30_000_000)
    for opening in openings(store):
        with pytest.raises(diskbuf.StoreCorruptError, match=r"c\.\d+\.0.* is missing"):
            in_time(opening)


def test_a_store_without_header_is_read_as_of_its_last_commit(store: Path) -> None:
    (store / ".diskbuf" / "live").unlink()
    with diskbuf.open(store) as reader:
        assert assert_whole(reader, SHAPE) == (0, 30)
    assert not (store / ".diskbuf" / "live").exists()
    with SHAPE.open(store) as buffer:
        buffer.add_batch(SHAPE.step(30))
        assert assert_whole(buffer, SHAPE) == (0, 31)


@pytest.mark.parametrize("column", ["id", "code/0", "code/1", "is_odd", "frame"])
@pytest.mark.parametrize("damage", ["half", "missing", "empty", "longer"])
def test_a_damaged_chunk_is_named_and_left_as_it_is(store: Path, column: str, damage: str) -> None:
    chunk = sorted((store / column).glob("c.*"), key=lambda path: int(path.name.split(".")[1]))[-1]
    data = chunk.read_bytes()
    if damage == "missing":
        chunk.unlink()
    else:
        chunk.write_bytes({"half": data[: len(data) // 2], "empty": b"", "longer": data + b"x"}[damage])
    before = {name: (store / name).read_bytes() for name in files_of(store) - {".diskbuf/lock"}}
    for opening in openings(store):
        with pytest.raises(diskbuf.StoreCorruptError, match=re.escape(str(chunk))) as raised:
            in_time(opening)
        assert raised.value.path == str(chunk)
    assert {name: (store / name).read_bytes() for name in files_of(store) - {".diskbuf/lock"}} == before

    chunk.write_bytes(data)  # what the message says to do
    with SHAPE.open(store) as buffer:
        assert assert_whole(buffer, SHAPE) == (0, 30)


NOT_A_DOCUMENT = {
    "empty": b"",
    "cut": None,
    "zeros": bytes(4096),
    "noise": np.random.default_rng(0).bytes(4096),
    "a number": b"7",
    "a list": b"[]",
    "text": b'"zarr.json"',
    "not UTF-8": b'{"attributes": "\xff"}',
    "deep": b"[" * 200_000,
}


@pytest.mark.parametrize("content", NOT_A_DOCUMENT)
@pytest.mark.parametrize("name", ["zarr.json", "frame/zarr.json", ".diskbuf/live"])
def test_a_damaged_metadata_file_raises_one_of_our_errors(store: Path, name: str, content: str) -> None:
    path = store / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content == "cut" else NOT_A_DOCUMENT[content])
    for opening in [*openings(store)][1 if name == "frame/zarr.json" else 0 :]:  # readers don't need that one
        with pytest.raises(diskbuf.StoreError, match=r"zarr\.json|live"):
            in_time(opening)
    path.write_bytes(whole)
    with SHAPE.open(store) as buffer:
        assert assert_whole(buffer, SHAPE) == (0, 30)


@pytest.mark.parametrize("name", ["zarr.json", "frame/zarr.json", ".diskbuf/live", "frame/c.0.0.0"])
def test_a_folder_in_place_of_a_file_raises_one_of_our_errors(store: Path, name: str) -> None:
    (store / name).unlink()
    (store / name).mkdir()
    for opening in [*openings(store)][1 if name == "frame/zarr.json" else 0 :]:
        with pytest.raises(diskbuf.StoreError):
            in_time(opening)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"format": None},
        {"spec": None},
        {"spec": {"x": []}},
        {"batch_size": 0},
        {"batch_size": 3},
        {"batch_size": 2**70},
        {"max_length": "5"},
        {"chunk_rows": {}},
        {"chunk_rows": {"frame": 4}},
        {"chunk_rows": 8},
        {"chunk_rows": dict.fromkeys(["id", "code/0", "code/1", "is_odd", "frame"], 2**60)},
        {"chunk_rows": dict.fromkeys(["id", "code/0", "code/1", "is_odd", "frame"], 2**200)},
        {"runs": None},
        {"runs": ["0"]},
        {"runs": {}},
        {"first_id": -1},
        {"first_id": 31},
        {"layout": "arrow"},
        {"codec": "zstd"},
        {"keep_history": 1},
        {"more": 1},
    ],
    ids=str,
)
def test_a_manifest_that_says_something_impossible_raises_one_of_our_errors(
    store: Path, changes: dict[str, Any]
) -> None:
    edit_manifest(store, **changes)
    for opening in openings(store):
        with pytest.raises(diskbuf.DiskbufError):
            in_time(opening)


@pytest.mark.parametrize(
    "words", [{"floor": -5}, {"next_id": -1}, {"next_id": 2**62}, {"floor": -(2**62), "next_id": 2**62}], ids=str
)
def test_a_header_that_says_something_impossible_raises_one_of_our_errors(store: Path, words: dict[str, int]) -> None:
    edit_header(store, **words)
    for opening in openings(store):
        with pytest.raises(diskbuf.StoreCorruptError):
            in_time(opening)


def test_ten_thousand_chunks_open_in_time_and_a_missing_one_is_named(tmp_path: Path) -> None:
    spec = {"x": diskbuf.ArraySpec([], "int64")}
    store, options = tmp_path / "store", diskbuf.StoreOptions(chunk_bytes=8, fsync="never")
    with diskbuf.UniformReplayBuffer(spec, 1, None, path=store, options=options) as buffer:
        buffer.extend({"x": np.arange(10_000)[None]})
    assert len(list((store / "x").glob("c.*"))) == 10_000
    with in_time(lambda: diskbuf.open(store)) as reader:
        np.testing.assert_array_equal(reader.gather_all()["x"], np.arange(10_000)[None])
    (store / "x" / "c.7777.0").unlink()
    with pytest.raises(diskbuf.StoreCorruptError, match=r"c\.7777\.0 .*is missing"):
        in_time(lambda: diskbuf.open(store))


def test_a_ring_that_runs_out_of_mappings_keeps_its_rows_and_deletes_what_it_evicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diskbuf.store.mapping import Reservation

    shape, room = Shape(max_length=12, chunk_bytes=32), [9]
    whole = Reservation.map_file

    def map_file(self: Reservation, *arguments: Any, **more: Any) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(12, "no more mappings")
        whole(self, *arguments, **more)

    monkeypatch.setattr(Reservation, "map_file", map_file)
    with shape.open(tmp_path / "store") as buffer, diskbuf.open(tmp_path / "store") as reader:
        for number in range(100):
            buffer.add_batch(shape.step(number))
            window = assert_whole(buffer, shape)
            assert assert_whole(reader, shape) == window
            shape_files = files_of(tmp_path / "store") - expected_files(tmp_path / "store", window, shape)
            assert len(shape_files) <= 2 * 5, "one being overwritten and one aside, for each column"
    assert_equal_steps(shape.sequence(88, 100), shape.sequence(*window))
