"""Stores that seal their chunks, damaged: what verify finds, what reading says, what repair keeps."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskbuf
from diskbuf import ReadOptions, StoreOptions, UniformReplayBuffer

LAYOUTS: dict[str, dict[str, Any]] = {
    "zstd": {"codec": "zstd"},
    "arrow": {"layout": "arrow"},
    "arrow-lz4": {"layout": "arrow", "codec": "lz4"},
}
SPEC = {"frame": diskbuf.ArraySpec([16], "uint8"), "id": diskbuf.ArraySpec([], "int64")}
LANES = 2
CHUNK_BYTES = 1024
IN_MEMORY = ReadOptions(cache_dir=":memory:")


@pytest.fixture(params=LAYOUTS)
def options(request: pytest.FixtureRequest) -> StoreOptions:
    return StoreOptions(chunk_bytes=CHUNK_BYTES, fsync_seconds=0.01, **LAYOUTS[request.param])


def rows(first_id: int, next_id: int) -> dict[str, Any]:
    ids = np.broadcast_to(np.arange(first_id, next_id), (LANES, next_id - first_id))
    return {"frame": np.repeat((ids % 251).astype(np.uint8)[..., None], 16, -1), "id": ids.astype(np.int64)}


def make(path: Path, options: StoreOptions, steps: int = 300, **arguments: Any) -> None:
    with UniformReplayBuffer(SPEC, LANES, None, path=path, options=options, **arguments) as buffer:
        buffer.extend(rows(0, steps))


def objects_of(path: Path) -> list[Path]:
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name.startswith(("c.", "part-")))


def assert_rows(buffer: UniformReplayBuffer, first_id: int, next_id: int) -> None:
    assert (buffer.first_id, buffer.next_id) == (first_id, next_id)
    found, wanted = buffer.gather_all(), rows(first_id, next_id)
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(found[name], leaf, strict=True)


def test_a_closed_store_is_clean_and_all_objects(tmp_path: Path, options: StoreOptions) -> None:
    make(tmp_path / "s", options)
    report = diskbuf.verify(tmp_path / "s", values=True)
    assert report.is_clean, report.faults
    assert report.chunks == len(objects_of(tmp_path / "s")) > 5
    assert not list((tmp_path / "s/.diskbuf/tail").rglob("c.*"))
    assert diskbuf.repair(tmp_path / "s").actions == ()


def test_a_store_that_is_being_written_is_clean(tmp_path: Path, options: StoreOptions) -> None:
    with UniformReplayBuffer(SPEC, LANES, None, path=tmp_path / "s", options=options) as buffer:
        for first_id in range(0, 300, 30):
            buffer.extend(rows(first_id, first_id + 30))
            report = diskbuf.verify(tmp_path / "s", values=True)
            assert report.is_clean, report.faults


def test_one_byte_flipped_in_each_object_in_turn_is_found_there_and_raises_when_read(
    tmp_path: Path, options: StoreOptions
) -> None:
    make(tmp_path / "s", options)
    for path in objects_of(tmp_path / "s"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        whole = path.read_bytes()
        path.write_bytes(data)
        assert [fault.path for fault in diskbuf.verify(tmp_path / "s").faults] == [str(path)]
        with (
            diskbuf.open(tmp_path / "s", verify=True, read_options=IN_MEMORY) as buffer,
            pytest.raises(diskbuf.StoreCorruptError, match=path.name),
        ):
            buffer.gather_all()
        path.write_bytes(whole)
    assert diskbuf.verify(tmp_path / "s").is_clean


@pytest.mark.parametrize("size", [0, 1, 100])
def test_an_object_cut_short_raises_and_is_never_rows(tmp_path: Path, options: StoreOptions, size: int) -> None:
    make(tmp_path / "s", options)
    path = objects_of(tmp_path / "s")[1]
    path.write_bytes(path.read_bytes()[:size])
    with (
        diskbuf.open(tmp_path / "s", read_options=IN_MEMORY) as buffer,
        pytest.raises(diskbuf.StoreCorruptError, match=path.name),
    ):
        buffer.gather_all()


def test_a_missing_object_is_named_and_never_zeros(tmp_path: Path, options: StoreOptions) -> None:
    make(tmp_path / "s", options)
    path = objects_of(tmp_path / "s")[0]
    path.unlink()
    assert [fault.path for fault in diskbuf.verify(tmp_path / "s").faults] == [str(path)]
    with diskbuf.open(tmp_path / "s", read_options=IN_MEMORY) as buffer:
        with pytest.raises(diskbuf.StoreCorruptError, match=rf"{path.name} must be there, .* but is missing"):
            buffer.gather_all()
        with pytest.raises(diskbuf.StoreCorruptError, match=path.name):
            buffer.get_next(512)
    with pytest.raises(diskbuf.StoreCorruptError, match=path.name):
        diskbuf.open(tmp_path / "s", mode="r+")


@pytest.mark.parametrize("how", ["missing", "flipped"])
def test_repair_keeps_the_longest_run_of_whole_chunks_and_goes_on(
    tmp_path: Path, options: StoreOptions, how: str
) -> None:
    make(tmp_path / "s", options)
    path = objects_of(tmp_path / "s")[1]  # near the beginning
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3] + b"abc")
    (fault,) = diskbuf.verify(tmp_path / "s").faults
    report = diskbuf.repair(tmp_path / "s")
    assert (report.first_id, report.next_id) == (fault.next_id, 300)
    assert diskbuf.verify(tmp_path / "s", values=True).is_clean
    assert diskbuf.repair(tmp_path / "s").actions == ()
    with diskbuf.open(tmp_path / "s", mode="r+", read_options=IN_MEMORY) as buffer:
        assert_rows(buffer, report.first_id, 300)
        buffer.extend(rows(300, 400))
        assert_rows(buffer, report.first_id, 400)
    assert diskbuf.verify(tmp_path / "s").is_clean


def test_repair_of_a_damaged_end_lets_the_next_writer_go_on_before_it(tmp_path: Path, options: StoreOptions) -> None:
    make(tmp_path / "s", options)
    newest = objects_of(tmp_path / "s")[-1]
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    report = diskbuf.repair(tmp_path / "s")
    assert report.first_id == 0
    assert 200 < report.next_id < 300
    with UniformReplayBuffer(SPEC, LANES, None, path=tmp_path / "s", options=options, read_options=IN_MEMORY) as buffer:
        assert_rows(buffer, 0, report.next_id)
        buffer.extend(rows(report.next_id, 350))
    with diskbuf.open(tmp_path / "s", verify=True, read_options=IN_MEMORY) as buffer:
        assert_rows(buffer, 0, 350)


def test_a_damaged_store_can_be_read_without_what_is_damaged(tmp_path: Path, options: StoreOptions) -> None:
    make(tmp_path / "s", options)
    objects_of(tmp_path / "s")[0].unlink()
    with pytest.warns(RuntimeWarning, match="is damaged; only ids"):
        buffer = diskbuf.open(tmp_path / "s", skip_damaged=True, read_options=IN_MEMORY)
    with buffer:
        assert_rows(buffer, buffer.first_id, 300)
        assert buffer.first_id > 0


def test_a_lost_manifest_is_made_anew_from_its_copy(tmp_path: Path, options: StoreOptions) -> None:
    make(tmp_path / "s", options)
    (tmp_path / "s/zarr.json").unlink()
    diskbuf.repair(tmp_path / "s")
    with diskbuf.open(tmp_path / "s", read_options=IN_MEMORY) as buffer:
        assert_rows(buffer, 0, 300)


def test_a_newer_format_is_refused_with_both_versions(tmp_path: Path, options: StoreOptions) -> None:
    make(tmp_path / "s", options)
    path = tmp_path / "s/zarr.json"
    document = json.loads(path.read_bytes())
    document["attributes"]["diskbuf"]["format"] = 3
    del document["attributes"]["diskbuf_crc32"]
    path.write_text(json.dumps(document))
    with pytest.raises(diskbuf.StoreFormatError, match=r"at most 2, .* got 3 in .* Update diskbuf"):
        diskbuf.open(tmp_path / "s")


def test_a_store_continues_with_its_layout_and_refuses_another(tmp_path: Path, options: StoreOptions) -> None:
    make(tmp_path / "s", options)
    with UniformReplayBuffer(SPEC, LANES, None, path=tmp_path / "s", read_options=IN_MEMORY) as buffer:
        buffer.extend(rows(300, 310))
        assert_rows(buffer, 0, 310)
    other = StoreOptions(codec="blosc")
    with pytest.raises(diskbuf.StoreMismatchError, match=r"(codec|layout): the store has"):
        UniformReplayBuffer(SPEC, LANES, None, path=tmp_path / "s", options=other)


def test_leaves_of_no_elements_are_sealed_too(tmp_path: Path, options: StoreOptions) -> None:
    spec = {"empty": diskbuf.ArraySpec([0, 3], "uint8"), "id": diskbuf.ArraySpec([], "int64")}
    with UniformReplayBuffer(spec, LANES, None, path=tmp_path / "s", options=options) as buffer:
        for step in range(100):
            buffer.add_batch({"empty": np.zeros([LANES, 0, 3], np.uint8), "id": np.full(LANES, step)})
    with diskbuf.open(tmp_path / "s", read_options=IN_MEMORY) as buffer:
        items, info = buffer.get_next(32, 2)
        assert items["empty"].shape == (32, 2, 0, 3)
        np.testing.assert_array_equal(items["id"], info.ids)
        assert buffer.gather_all()["empty"].shape == (LANES, 100, 0, 3)
    assert diskbuf.verify(tmp_path / "s", values=True).is_clean
    only_empty = {"empty": spec["empty"]}
    with UniformReplayBuffer(only_empty, LANES, None, path=tmp_path / "e", options=options) as buffer:
        buffer.extend({"empty": np.zeros([LANES, 100, 0, 3], np.uint8)})
    with diskbuf.open(tmp_path / "e", read_options=IN_MEMORY) as buffer:
        assert buffer.gather_all()["empty"].shape == (LANES, 100, 0, 3)
