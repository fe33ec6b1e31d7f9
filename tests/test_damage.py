"""Stores with a damaged file: opening ends or says which file within a fixed time, and throws nothing good away."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_writer import KINDS, Shape, assert_equal_steps, assert_whole, expected_files, files_of
from diskbuf_tools import cli

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
    if not {"device", "inode"}.issuperset(words):
        write_words(path, seal_epoch=0)  # not closed, so that its words are not sealed
    write_words(path, **words)


def write_words(path: Path, **words: int) -> None:
    page = bytearray(path.read_bytes())
    for name, value in words.items():
        offset = 8 * {"generation": 5, "floor": 6, "next_id": 7, "device": 8, "inode": 9, "seal_epoch": 10}[name]
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
            chunks = {name for name in shape_files if not name.startswith(".diskbuf") and not name.endswith(".tmp")}
            assert len(chunks) <= 2 * 5, "one being overwritten and one aside, for each column"
    assert_equal_steps(shape.sequence(88, 100), shape.sequence(*window))


# ---- every file in turn, and what the command line says of it


def make_missing(path: Path) -> None:
    path.unlink()


def make_empty(path: Path) -> None:
    os.truncate(path, 0)


def cut_in_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8 * 7 if path.name == "live" else len(content) // 3] ^= 0xFF  # most of the header is unused
    path.write_bytes(content)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_unreadable(path: Path) -> None:
    """In a way that stops root too."""
    path.unlink()
    path.symlink_to(path.name)


DAMAGES = [make_missing, make_empty, cut_in_half, flip_a_byte, make_folder, make_unreadable]
STATE_FILES = [".diskbuf/live", ".diskbuf/lock", ".diskbuf/checksums.arrow", ".diskbuf/manifest.json"]
COLUMNS = ["id", "code/0", "code/1", "is_odd", "frame"]
DOCUMENTS = ["zarr.json", "code/zarr.json", *(f"{column}/zarr.json" for column in COLUMNS)]
CHUNKS = ["id/c.0.0", "id/c.3.0", "code/0/c.0.0", "code/1/c.5.0.0", "code/1/c.29.0.0", "is_odd/c.0.0", "frame/c.9.0.0"]


@pytest.fixture
def closed(tmp_path: Path) -> Path:
    """A store as its last writer left it, on this boot."""
    with SHAPE.open(tmp_path / "closed") as buffer:
        buffer.extend(SHAPE.sequence(0, 30))
    return tmp_path / "closed"


def ids_of(store: Path, name: str) -> range:
    """The ids that a file holds rows of."""
    if not (match := re.search(r"/c\.(\d+)", name)):
        return range(0)
    document = json.loads((store / name).with_name("zarr.json").read_bytes())
    rows = document["chunk_grid"]["configuration"]["chunk_shape"][0]
    return range(int(match[1]) * rows, min(30, (int(match[1]) + 1) * rows))


def bytes_of(store: Path) -> dict[str, bytes]:
    return {name: (store / name).read_bytes() for name in files_of(store) if (store / name).is_file()}


def say(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, list[str], list[str]]:
    """Runs the command line; returns its exit code and the lines on stdout and on stderr."""
    code = in_time(lambda: cli.main([str(word) for word in words]))
    out, err = capsys.readouterr()
    return code, out.splitlines(), err.splitlines()


def test_the_files_that_are_damaged_below_are_all_kinds_of_files(closed: Path) -> None:
    assert set(STATE_FILES + DOCUMENTS + CHUNKS) <= files_of(closed)
    assert {name for name in files_of(closed) if "/c." not in name} == {*STATE_FILES, *DOCUMENTS}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", STATE_FILES + DOCUMENTS + CHUNKS)
def test_a_damaged_file_is_told_in_a_line_repaired_and_costs_no_row_but_its_own(
    closed: Path, name: str, damage: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    if name == ".diskbuf/lock":
        (closed / name).write_text("a process that died with its machine")
    ids, path = ids_of(closed, name), closed / name
    damage(path)
    before = bytes_of(closed)
    is_harmless = name == ".diskbuf/lock" and damage not in (make_folder, make_unreadable)

    code, out, err = say(capsys, "info", closed)
    needs = name == "zarr.json" or (name == ".diskbuf/live" and damage is not make_missing)  # it opens no chunk
    if code:
        assert needs
        assert (out, len(err)) == ([], 1)
        assert err[0].startswith("diskbuf: ")
        assert name in err[0]
    else:
        assert err == []
        assert not needs or damage is flip_a_byte, "what isn't read is not looked at"

    code, out, err = say(capsys, "verify", closed)
    assert (code, err) == (0 if is_harmless else 1, [])
    assert [name in line for line in out[:-1]] == [] if is_harmless else [True], out
    assert out[-1].startswith(f"{closed}: ")

    assert say(capsys, "repair", "--dry-run", closed)[0] == 0
    assert bytes_of(closed) | {".diskbuf/lock": b""} == before | {".diskbuf/lock": b""}
    code, out, err = say(capsys, "repair", closed)
    assert (code, err) == (0, [])
    with diskbuf.open(closed, verify=True) as reader:
        first_id, next_id = assert_whole(reader, SHAPE)
    assert next_id - first_id >= max(ids.start, 30 - ids.stop), "the longest run beside it"
    assert (first_id, next_id) == (0, 30) or ids

    after = bytes_of(closed)
    assert say(capsys, "repair", closed) == (0, [f"{closed}: clean, nothing to do"], [])
    assert bytes_of(closed) == after
    assert say(capsys, "verify", closed)[0] == 0
    with SHAPE.open(closed) as buffer:
        buffer.add_batch(SHAPE.step(next_id))
        assert assert_whole(buffer, SHAPE) == (first_id, next_id + 1)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [*STATE_FILES[:1], "zarr.json", "frame/zarr.json", "code/1/c.5.0.0"])
@pytest.mark.parametrize("way", ["r", "r+", "a", "w-"])
def test_opening_a_store_with_a_damaged_file_ends_in_one_of_our_errors_or_with_its_rows(
    closed: Path, name: str, damage: Callable[[Path], None], way: str
) -> None:
    damage(closed / name)
    whole = {file: data for file, data in bytes_of(closed).items() if "/c." in file}
    opening: Any = diskbuf.open if way in {"r", "r+"} else lambda path, way: SHAPE.open(path, mode=way)
    message = ""
    try:
        with in_time(lambda: opening(closed, way)) as buffer:
            assert (buffer.first_id, buffer.next_id) == (0, 30)
    except (diskbuf.StoreError, OSError) as error:
        message = str(error)
    assert "\n" not in message
    assert name in message or not message or way == "w-"
    assert {file: data for file, data in bytes_of(closed).items() if "/c." in file} == whole


@pytest.mark.parametrize(
    ("name", "damage"),
    [("zarr.json", make_missing), ("zarr.json", cut_in_half), (".diskbuf/live", make_folder)],
)
def test_the_commands_end_without_a_traceback(closed: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(closed / name)
    for words, codes in ((["info"], {0, 1}), (["verify"], {1}), (["repair"], {0}), (["verify", "--values"], {0})):
        run = subprocess.run(
            [Path(sys.executable).with_name("diskbuf"), *words, closed],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert run.returncode in codes
        assert "Traceback" not in run.stderr
        assert len(run.stderr.splitlines()) == (words == ["info"] and run.returncode)


@pytest.mark.parametrize("kind", KINDS)
def test_no_flipped_bit_of_the_header_of_a_closed_store_costs_a_row(tmp_path: Path, kind: str) -> None:
    shape = Shape(kind=kind, chunk_bytes=64, max_length=20)
    store = tmp_path / "store"
    for first_id in (0, 30):
        with shape.open(store) as buffer:
            buffer.extend(shape.sequence(first_id, first_id + 20))
            buffer.clear()
            buffer.extend(shape.sequence(first_id + 20, first_id + 30))
    with diskbuf.open(store) as reader:
        window = assert_whole(reader, shape)
    path = store / ".diskbuf" / "live"
    whole = bytes_of(store)
    for offset in [*range(96), *range(512, 560), *range(1024, 1072)]:
        page = bytearray(whole[".diskbuf/live"])
        page[offset] ^= 1 << offset % 8
        path.write_bytes(page)
        if offset < 64 or offset >= 80:  # repair may have made another file of it
            status = path.stat()
            write_words(path, device=status.st_dev, inode=status.st_ino)
        in_time(lambda: diskbuf.repair(store))
        assert diskbuf.verify(store).is_clean
        with diskbuf.open(store) as reader:
            assert assert_whole(reader, shape) == window, offset
        for name, content in whole.items():
            (store / name).write_bytes(content)


def test_a_repaired_store_is_closed_as_one_that_was_written(closed: Path) -> None:
    make_folder(closed / "id" / "zarr.json")
    diskbuf.repair(closed)
    write_words(closed / ".diskbuf" / "live", next_id=29)
    assert [fault.path for fault in diskbuf.verify(closed).faults] == [str(closed / ".diskbuf" / "live")]


def test_no_flipped_bit_of_the_checksums_puts_the_blame_on_a_chunk(closed: Path) -> None:
    path = closed / ".diskbuf" / "checksums.arrow"
    whole = path.read_bytes()
    named = 0
    for offset in range(0, len(whole), 5):
        content = bytearray(whole)
        content[offset] ^= 1 << offset % 8
        path.write_bytes(content)
        faults = in_time(lambda: diskbuf.verify(closed)).faults
        assert {fault.path for fault in faults} <= {str(path)}, offset
        named += bool(faults)
    assert named > len(whole) // 20


def test_no_flipped_bit_of_a_columns_metadata_stays(closed: Path) -> None:
    path = closed / "frame" / "zarr.json"
    whole = path.read_bytes()
    for offset in range(len(whole)):
        content = bytearray(whole)
        content[offset] ^= 1 << offset % 8
        path.write_bytes(content)
        is_clean = diskbuf.verify(closed).is_clean
        assert not is_clean or json.loads(content) == json.loads(whole) or b'"attributes"' not in content, offset
