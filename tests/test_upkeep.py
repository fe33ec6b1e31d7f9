"""Trimming, compacting, upgrading and deleting stores where they are."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskbuf
from diskbuf import upkeep

SPEC = {"x": diskbuf.ArraySpec([], "int64"), "frame": diskbuf.ArraySpec([8], "uint8")}
OPTIONS = {
    "raw": diskbuf.StoreOptions(chunk_bytes=256),
    "zstd": diskbuf.StoreOptions(codec="zstd", chunk_bytes=256),
    "arrow": diskbuf.StoreOptions(layout="arrow", chunk_bytes=512),
}
VERBS = [lambda path: upkeep.trim(path, keep=1), upkeep.compact, upkeep.upgrade, upkeep.delete]
GOLDEN = sorted((Path(__file__).parent / "golden").glob("format-*/*"))


def make(path: Path, steps: int, *, max_length: int | None = None, **given: Any) -> Path:
    with diskbuf.UniformReplayBuffer(SPEC, 2, max_length, path=path, **given) as buffer:
        add(buffer, steps)
    return path


def add(buffer: diskbuf.UniformReplayBuffer, steps: int) -> None:
    for _ in range(steps):
        x = np.array([0, 1_000_000]) + buffer.next_id
        buffer.add_batch({"x": x, "frame": np.repeat(x[:, None], 8, 1).astype("uint8")})


def first_lane(path: Path | str, **given: Any) -> list[int]:
    with diskbuf.open(path, **given) as buffer:
        rows = buffer.gather_all()
    assert (rows["frame"] == rows["x"][..., None].astype("uint8")).all()
    found: list[int] = rows["x"][0].tolist()
    return found


def names(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("max_length", [None, 200])
def test_trimmed_steps_are_gone_and_the_others_stay_with_their_ids(
    tmp_path: Path, options: diskbuf.StoreOptions, max_length: int | None
) -> None:
    store = make(tmp_path / "s", 150, max_length=max_length, options=options)
    files = len(names(store))
    report = upkeep.trim(store, first_id=100)
    assert (report.first_id, report.next_id, report.removed, report.is_dry_run) == (100, 150, 100, False)
    assert report.freed_bytes is not None
    assert report.freed_bytes > 0
    assert len(names(store)) < files
    assert first_lane(store) == list(range(100, 150))
    assert diskbuf.verify(store, values=True).is_clean
    with diskbuf.open(store, mode="r+") as buffer:
        add(buffer, 3)
    assert first_lane(store) == list(range(100, 153))
    assert upkeep.trim(store, keep=5).removed == 48
    assert first_lane(store) == list(range(148, 153))
    assert upkeep.trim(store, keep=0).first_id == 153
    assert first_lane(store) == []


def test_history_outlives_a_trim_unless_it_is_dropped(tmp_path: Path) -> None:
    store = make(tmp_path / "s", 150, max_length=100, keep_history=True, options=OPTIONS["raw"])
    upkeep.trim(store, keep=20)
    assert first_lane(store) == list(range(130, 150))
    assert first_lane(store, history=True) == list(range(150))
    files = len(names(store))
    upkeep.trim(store, drop_history=True)
    assert len(names(store)) < files
    assert first_lane(store) == list(range(130, 150))
    assert first_lane(store, history=True) == list(range(130, 150))
    assert diskbuf.verify(store).is_clean
    with diskbuf.UniformReplayBuffer(SPEC, 2, 100, path=store, keep_history=True) as buffer:
        add(buffer, 120)
    assert first_lane(store, history=True) == list(range(130, 270))
    assert first_lane(store) == list(range(170, 270))


def test_a_trim_that_keeps_more_than_there_is_keeps_all(tmp_path: Path) -> None:
    store = make(tmp_path / "s", 5)
    assert upkeep.trim(store, keep=99_999).removed == 0
    assert first_lane(store) == list(range(5))


def test_a_dry_trim_says_the_same_and_changes_nothing(tmp_path: Path) -> None:
    store = make(tmp_path / "s", 50, options=OPTIONS["raw"])
    before = {name: (store / name).read_bytes() for name in names(store)}
    report = upkeep.trim(store, keep=10, dry_run=True)
    assert (report.first_id, report.removed, report.freed_bytes, report.is_dry_run) == (40, 40, None, True)
    assert {name: (store / name).read_bytes() for name in names(store)} == before


def test_a_reader_that_is_open_sees_the_trimmed_window(tmp_path: Path) -> None:
    store = make(tmp_path / "s", 50, options=OPTIONS["raw"])
    with diskbuf.open(store) as reader:
        assert reader.gather_all()["x"].shape == (2, 50)
        upkeep.trim(store, keep=10)
        assert reader.gather_all()["x"][0].tolist() == list(range(40, 50))


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({}, diskbuf.OptionError, "one of first_id and keep"),
        ({"first_id": 3, "keep": 3}, diskbuf.OptionError, "one of first_id and keep"),
        ({"first_id": 51}, diskbuf.WindowError, r"window \[0, 50\)"),
        ({"first_id": -1}, diskbuf.WindowError, "got -1"),
        ({"keep": -1}, diskbuf.OptionError, "keep must be at least 0"),
        ({"drop_history": True}, diskbuf.OptionError, "keeps no history"),
    ],
)
def test_a_trim_outside_the_window_is_refused(
    tmp_path: Path, given: dict[str, Any], error: type[Exception], match: str
) -> None:
    store = make(tmp_path / "s", 50)
    with pytest.raises(error, match=match):
        upkeep.trim(store, **given)
    assert first_lane(store) == list(range(50))


@pytest.mark.parametrize(
    "verb", [lambda path: upkeep.trim(path, keep=1), upkeep.compact, upkeep.upgrade, upkeep.delete]
)
def test_a_store_that_is_being_written_is_left_alone(tmp_path: Path, verb: Any) -> None:
    with diskbuf.UniformReplayBuffer(SPEC, 2, None, path=tmp_path / "s") as buffer:
        add(buffer, 5)
        with pytest.raises(diskbuf.StoreLockedError):
            verb(tmp_path / "s")
        add(buffer, 1)
    assert first_lane(tmp_path / "s") == list(range(6))


@pytest.mark.parametrize(
    "verb", [lambda path: upkeep.trim(path, keep=1), upkeep.compact, upkeep.upgrade, upkeep.delete]
)
def test_what_is_no_store_is_left_as_it_is(tmp_path: Path, verb: Any) -> None:
    with pytest.raises(diskbuf.StoreNotFoundError):
        verb(tmp_path / "nothing")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "diary.txt").write_text("dear")
    with pytest.raises(diskbuf.StoreNotFoundError):
        verb(tmp_path / "folder")
    assert names(tmp_path) == {"folder/diary.txt"}


def test_compacting_frees_quarantine_and_chunks_that_wait_and_no_step(tmp_path: Path) -> None:
    store = make(tmp_path / "s", 150, max_length=100, options=OPTIONS["raw"])
    (store / "x" / "c.0.0").write_bytes(b"\0" * 256)  # as a killed writer may leave it
    (store / ".diskbuf" / "quarantine" / "x").mkdir(parents=True)
    (store / ".diskbuf" / "quarantine" / "x" / "c.9.0").write_bytes(b"\1" * 10_000)
    dry = upkeep.compact(store, dry_run=True)
    assert {"x/c.0.0", ".diskbuf/quarantine/x/c.9.0"} <= set(dry.files)
    assert (store / "x" / "c.0.0").exists()
    report = upkeep.compact(store)
    assert {"x/c.0.0", ".diskbuf/quarantine/x/c.9.0"} <= set(report.files)
    assert report.freed_bytes >= 8192
    assert not (store / "x" / "c.0.0").exists()
    assert not (store / ".diskbuf" / "quarantine").exists()
    assert first_lane(store) == list(range(50, 150))
    assert diskbuf.verify(store).is_clean
    assert upkeep.compact(store).files == ()


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_upgrading_keeps_rows_and_format_and_brings_what_guards_them(golden: Path, tmp_path: Path) -> None:
    store = shutil.copytree(golden, tmp_path / "s")
    with diskbuf.open(store) as buffer:
        before = buffer.gather_all()
    report = upkeep.upgrade(store)
    assert (report.format, report.newest_format) == (int(golden.parent.name.removeprefix("format-")), 2)
    with diskbuf.open(store) as buffer:
        after = buffer.gather_all()
    from diskbuf.tree import Structure

    structure = Structure(before)
    for one, other in zip(structure.flatten(before), structure.flatten(after), strict=True):
        np.testing.assert_array_equal(one, other)
    assert {".diskbuf/manifest.json", ".diskbuf/checksums.arrow"} <= names(store)
    assert not upkeep.upgrade(store).is_changed


def test_a_deleted_store_is_gone_and_nothing_else(tmp_path: Path) -> None:
    store = make(tmp_path / "s", 50, options=OPTIONS["arrow"])
    make(tmp_path / "t", 3)
    dry = upkeep.delete(store, dry_run=True)
    assert (dry.steps, dry.is_dry_run) == (50, True)
    assert first_lane(store) == list(range(50))
    report = upkeep.delete(store)
    assert (report.steps, report.files) == (50, dry.files)
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_folder_with_somebody_elses_files_is_not_deleted(tmp_path: Path) -> None:
    store = make(tmp_path / "s", 5)
    (store / "notes.txt").write_text("keep me")
    with pytest.raises(diskbuf.StoreExistsError, match=r"notes\.txt is not of it"):
        upkeep.delete(store)
    (tmp_path / "link").symlink_to(store)
    with pytest.raises(diskbuf.OptionError, match="a link to"):
        upkeep.delete(tmp_path / "link")
    assert first_lane(store) == list(range(5))


def test_a_store_that_was_being_deleted_is_no_store_any_more(tmp_path: Path) -> None:
    store = make(tmp_path / "s", 5)
    code = f"""
import os, shutil, signal
shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
from diskbuf import upkeep
upkeep.delete({str(store)!r})
"""
    run = subprocess.run([sys.executable, "-c", code], check=False)
    assert run.returncode < 0
    with pytest.raises(diskbuf.StoreNotFoundError):
        diskbuf.open(store)
    make(store, 2)
    assert first_lane(store) == [0, 1]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_remote_store_is_deleted_manifest_first(tmp_path: Path, options: diskbuf.StoreOptions) -> None:
    import fsspec

    url = f"memory://deleting/{options.layout}-{options.codec}"
    diskbuf.copy(make(tmp_path / "s", 50, options=options), url)
    assert upkeep.delete(url, dry_run=True).steps == 50
    assert first_lane(url) == list(range(50))
    report = upkeep.delete(url)
    assert report.steps == 50
    with pytest.raises(diskbuf.StoreNotFoundError):
        diskbuf.open(url)
    file_system = fsspec.filesystem("memory")
    assert file_system.find(url.removeprefix("memory:/")) == []
