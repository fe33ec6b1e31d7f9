"""The manifest is there twice: what repair does when zarr.json, its copy or both are lost, damaged or of two minds."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import diskbuf
from diskbuf.store.manifest import ZarrMetadata, read_manifest

LANES = 2
SPEC = {
    "camera": diskbuf.BoundedArraySpec([8], "uint8", 0, 250, "the camera"),
    "nested": (diskbuf.ArraySpec([], "int64"),),
}
METADATA = {"task": "ä", "rates": [1.5, None]}
COPY = ".diskbuf/manifest.json"


def steps(first_id: int, next_id: int) -> dict[str, Any]:
    """[B, T] steps that say which they are."""
    ids = np.arange(first_id, next_id)[None].repeat(LANES, axis=0)
    return {"camera": (ids % 251).astype("uint8")[..., None].repeat(8, axis=-1), "nested": (ids,)}


def check(store: Path, first_id: int, next_id: int) -> None:
    with diskbuf.open(store, verify=True) as buffer:
        assert (buffer.first_id, buffer.next_id) == (first_id, next_id)
        items, expected = buffer.gather_all(), steps(first_id, next_id)
        np.testing.assert_array_equal(items["camera"], expected["camera"], strict=True)
        np.testing.assert_array_equal(items["nested"][0], expected["nested"][0], strict=True)
        assert (buffer.data_spec, buffer.metadata) == (SPEC, METADATA)


def contents(store: Path) -> dict[str, bytes]:
    return {str(file.relative_to(store)): file.read_bytes() for file in store.rglob("*") if file.is_file()}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three runs, and a window that has moved on."""
    path = tmp_path / "store"
    options = diskbuf.StoreOptions(chunk_bytes=64)
    for first_id in (0, 30, 60):
        with diskbuf.UniformReplayBuffer(
            SPEC, LANES, max_length=50, path=path, metadata=METADATA, options=options
        ) as buffer:
            buffer.extend(steps(first_id, first_id + 30))
    check(path, 40, 90)
    return path


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    os.truncate(path, 0)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_unreadable(path: Path) -> None:
    """In a way that stops root too."""
    path.unlink()
    path.symlink_to(path.name)


def flip(path: Path) -> None:
    """Leaves valid JSON that says something else."""
    text = path.read_text()
    path.write_text(text.replace('"batch_size": 2', '"batch_size": 3'))
    assert path.read_text() != text


def forget_what_it_is(path: Path) -> None:
    path.write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')


DAMAGES = [remove, empty, halve, make_folder, make_unreadable, flip]


@pytest.mark.parametrize("also", [[], ["live"], ["documents"], ["live", "documents"]], ids="+".join)
@pytest.mark.parametrize("damage", [*DAMAGES, forget_what_it_is])
def test_a_lost_zarr_json_is_made_anew_from_the_copy(
    store: Path, damage: Callable[[Path], None], also: list[str]
) -> None:
    path, before = store / "zarr.json", contents(store)
    damage(path)
    damaged = path.read_bytes() if path.is_file() else None
    if "live" in also:
        (store / ".diskbuf" / "live").unlink()
    if "documents" in also:
        for name in ("camera", "nested", "nested/0"):
            (store / name / "zarr.json").unlink()

    report = diskbuf.verify(store)
    assert str(path) in {fault.path for fault in report.faults}
    assert all(fault.message.count("\n") == 0 for fault in report.faults)
    for opening in (
        diskbuf.open,
        lambda path: diskbuf.open(path, "r+"),
        lambda path: diskbuf.open(path, skip_damaged=True),
        lambda path: diskbuf.UniformReplayBuffer(SPEC, LANES, 50, path=path),
    ):
        with pytest.raises(diskbuf.StoreCorruptError, match=r"zarr\.json.*repair"):
            opening(store)

    dry = diskbuf.repair(store, dry_run=True)
    assert (dry.first_id, dry.next_id, dry.lost) == (40, 90, 0)
    assert diskbuf.verify(store) == report
    assert diskbuf.repair(store).actions == dry.actions
    assert diskbuf.verify(store).is_clean
    check(store, 40, 90)
    assert json.loads(path.read_bytes()) == json.loads(before["zarr.json"])
    assert zarr.open_group(store, mode="r")["nested/0"][89].tolist() == [89, 89]
    quarantined = store / ".diskbuf" / "quarantine" / "zarr.json"
    assert os.path.lexists(quarantined) == (damage is not remove)
    if damaged is not None:
        assert quarantined.read_bytes() == damaged

    after = contents(store)
    assert diskbuf.repair(store).actions == ()
    assert contents(store) == after
    with diskbuf.UniformReplayBuffer(SPEC, LANES, 50, path=store) as buffer:
        buffer.extend(steps(90, 100))
        _, info = buffer.get_next(500, num_steps=2)
        assert not {59, 89}.intersection(info.ids[:, 0].tolist()), "the runs are still known"
    check(store, 50, 100)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_is_named_and_made_anew(store: Path, damage: Callable[[Path], None]) -> None:
    before = contents(store)
    damage(store / COPY)
    assert [fault.path for fault in diskbuf.verify(store).faults] == [str(store / COPY)]
    check(store, 40, 90)  # reading needs no copy
    diskbuf.repair(store)
    assert diskbuf.verify(store).is_clean
    after = contents(store)
    for name in ("zarr.json", COPY):
        assert after[name] == before[name]
    diskbuf.repair(store)
    assert contents(store) == after
    check(store, 40, 90)


def test_opening_for_writing_makes_a_damaged_copy_anew(store: Path) -> None:
    empty(store / COPY)
    diskbuf.open(store, "r+").close()
    assert diskbuf.verify(store).is_clean


@pytest.mark.parametrize("damage", DAMAGES[1:])
def test_when_both_are_damaged_repair_says_so_and_changes_nothing(store: Path, damage: Callable[[Path], None]) -> None:
    damage(store / "zarr.json")
    damage(store / COPY)
    before = contents(store)
    assert [fault.path for fault in diskbuf.verify(store).faults] == [str(store / "zarr.json")]
    with pytest.raises(diskbuf.StoreCorruptError, match="both are damaged"):
        diskbuf.repair(store)
    assert contents(store) == before


def test_where_both_are_good_and_differ_zarr_json_counts(store: Path, tmp_path: Path) -> None:
    with diskbuf.UniformReplayBuffer(SPEC, LANES + 1, 20, path=tmp_path / "other"):
        pass
    shutil.copyfile(tmp_path / "other" / COPY, store / COPY)
    assert [fault.path for fault in diskbuf.verify(store).faults] == [str(store / COPY)]
    diskbuf.repair(store)
    check(store, 40, 90)
    assert json.loads((store / COPY).read_bytes()) == json.loads((store / "zarr.json").read_bytes())["attributes"]


def test_a_copy_that_is_a_commit_ahead_or_behind_is_no_fault(store: Path) -> None:
    older = (store / COPY).read_bytes()
    with diskbuf.open(store, "r+") as buffer:
        buffer.extend(steps(90, 95))
    newer, root = (store / COPY).read_bytes(), (store / "zarr.json").read_bytes()
    (store / COPY).write_bytes(older)
    assert diskbuf.repair(store).actions == ()
    assert (store / COPY).read_bytes() == older

    with diskbuf.open(store, "r+") as buffer:
        buffer.extend(steps(95, 97))
    (store / COPY).write_bytes(newer)
    (store / "zarr.json").write_bytes(root)  # a kill between the two leaves the copy ahead of this one
    assert diskbuf.verify(store).is_clean
    check(store, 47, 97)


def test_a_store_of_before_the_copy_is_clean_and_gets_one_when_it_is_written(store: Path) -> None:
    (store / COPY).unlink()
    path = store / "zarr.json"
    document = json.loads(path.read_bytes())
    del document["attributes"]["diskbuf_crc32"]
    path.write_text(json.dumps(document))
    assert diskbuf.verify(store).is_clean
    assert diskbuf.repair(store).actions == ()
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(diskbuf.StoreCorruptError, match=r"zarr\.json.*missing. Restore that file"):
        diskbuf.repair(store)
    path.write_bytes(whole)
    diskbuf.open(store, "r+").close()
    path.unlink()
    diskbuf.repair(store)
    check(store, 40, 90)


def test_a_creation_that_was_killed_leaves_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class KilledError(BaseException):
        pass

    whole = ZarrMetadata.commit
    calls = []

    def commit(self: ZarrMetadata, *arguments: Any, **more: Any) -> None:
        calls.append(more)
        if len(calls) > 1:
            raise KilledError
        whole(self, *arguments, **more)

    monkeypatch.setattr(ZarrMetadata, "commit", commit)
    with pytest.raises(KilledError):
        diskbuf.UniformReplayBuffer(SPEC, LANES, path=tmp_path / "store")
    monkeypatch.undo()
    assert not (tmp_path / "store" / COPY).exists()
    assert diskbuf.verify(tmp_path / "store").is_clean
    diskbuf.UniformReplayBuffer(SPEC, LANES, path=tmp_path / "store").close()
    assert (tmp_path / "store" / COPY).exists()


def test_a_newer_version_that_wrote_zarr_json_is_not_overruled_by_the_copy(store: Path) -> None:
    path = store / "zarr.json"
    document = json.loads(path.read_bytes())
    del document["attributes"]["diskbuf_crc32"]
    document["attributes"]["diskbuf"] |= {"format": 9}
    path.write_text(json.dumps(document))
    before = contents(store)
    for act in (diskbuf.verify, diskbuf.repair):
        with pytest.raises(diskbuf.StoreFormatError, match="Update diskbuf") as caught:
            act(store)
        assert caught.value.is_newer
    assert contents(store) == before


def test_attributes_of_others_and_another_spacing_are_no_fault(store: Path) -> None:
    zarr.open_group(store, mode="r+").attrs["mine"] = [1, 2]
    assert diskbuf.verify(store).is_clean
    document = json.loads((store / "zarr.json").read_bytes())
    (store / "zarr.json").write_text(json.dumps(document, indent=7, sort_keys=True))
    assert diskbuf.verify(store).is_clean
    assert diskbuf.repair(store).actions == ()


def test_a_wrong_list_of_arrays_in_zarr_json_is_put_right(store: Path) -> None:
    path, whole = store / "zarr.json", (store / "zarr.json").read_bytes()
    path.write_bytes(whole.replace(b'"uint8"', b'"uint9"', 1))
    damaged = path.read_bytes()
    assert damaged != whole
    assert [fault.path for fault in diskbuf.verify(store).faults] == [str(path)]
    diskbuf.repair(store)
    assert path.read_bytes() == whole
    assert (store / ".diskbuf" / "quarantine" / "zarr.json").read_bytes() == damaged
    check(store, 40, 90)


def test_no_flipped_bit_of_either_file_costs_a_row_or_a_run(store: Path) -> None:
    runs = read_manifest(store).runs
    for name in ("zarr.json", COPY):
        whole = (store / name).read_bytes()
        for number, offset in enumerate(range(0, len(whole), 19)):
            content = bytearray(whole)
            content[offset] ^= 1 << number % 8
            (store / name).write_bytes(content)
            diskbuf.repair(store)
            assert diskbuf.verify(store).is_clean
            manifest = read_manifest(store)
            assert (manifest.batch_size, manifest.max_length, manifest.runs) == (LANES, 50, runs)
            check(store, 40, 90)
            shutil.rmtree(store / ".diskbuf" / "quarantine", ignore_errors=True)
            (store / name).write_bytes(whole)
