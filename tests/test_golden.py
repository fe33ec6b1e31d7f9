"""Stores of every format there was, as golden/make.py made them, open in this version and hold what they held."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zarr

import diskbuf
from diskbuf import specs
from diskbuf.tree import Structure

FORMATS = sorted(path for path in (Path(__file__).parent / "golden").iterdir() if path.name.startswith("format-"))
STORES = [path for folder in FORMATS for path in sorted(folder.iterdir())]


def load_make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_make", Path(__file__).parent / "golden" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_make()
FIRST_ID, NEXT_ID = make.NEXT_ID - make.RING_LENGTH, make.NEXT_ID


@pytest.fixture(params=STORES, ids=lambda path: f"{path.parent.name}-{path.name}")
def golden(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def copy(golden: Path, tmp_path: Path) -> Path:
    return shutil.copytree(golden, tmp_path / golden.name)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_steps(buffer: diskbuf.UniformReplayBuffer, first_id: int, next_id: int) -> None:
    """The window is that, and holds the values that were written, in the same nest and dtypes."""
    assert (buffer.first_id, buffer.next_id) == (first_id, next_id)
    items, expected = buffer.gather_all(), make.steps(first_id, next_id)
    assert Structure(items).paths == Structure(expected).paths
    for leaf, value in zip(
        Structure(buffer.data_spec).flatten(items), Structure(make.SPEC).flatten(expected), strict=True
    ):
        np.testing.assert_array_equal(leaf, value, strict=True)


def test_there_is_a_golden_store_of_the_format_that_is_written_now(tmp_path: Path) -> None:
    from diskbuf.store.manifest import FORMAT

    assert [path.name for path in FORMATS] == [f"format-{number}" for number in range(1, FORMAT + 1)]
    assert [path.name for path in STORES] == [name for stores in make.FORMATS.values() for name in sorted(stores)]


def test_a_golden_store_has_all_its_files(golden: Path) -> None:
    inside = "data/part-00000013.arrow" if golden.suffix == ".arrow" else "nested/a%2Fb/zarr.json"
    for name in ("zarr.json", ".diskbuf/live", ".diskbuf/checksums.arrow", inside):
        assert (golden / name).is_file(), "is it kept out by an ignore file?"


def test_a_golden_store_reads_as_it_was_written(golden: Path) -> None:
    before = contents(golden)
    with diskbuf.open(golden, verify=True, seed=1) as reader:
        assert_steps(reader, FIRST_ID, NEXT_ID)
        assert not specs.differences(reader.data_spec, make.SPEC)
        assert reader.data_spec["camera"] == make.SPEC["camera"]
        assert (reader.batch_size, reader.max_length, reader.metadata) == (make.LANES, make.RING_LENGTH, make.METADATA)
        items, info = reader.get_next(200, num_steps=2)
        pair: Any = items["pair"]
        assert (type(pair).__name__, pair._fields) == ("Pair", ("exact", "coarse"))
        assert [type(part) for part in (items["nested"], *items["nested"][".."])] == [dict, np.ndarray, list]
        begins = set(info.ids[:, 0].tolist())
        assert begins == set(range(FIRST_ID, NEXT_ID - 1)) - {make.RUN_STARTS[1] - 1}, "no sequence joins two runs"
    assert contents(golden) == before


def test_a_golden_history_reads_from_its_first_step(golden: Path) -> None:
    with diskbuf.open(golden, history=True) as reader:
        assert_steps(reader, 0 if golden.stem == "history" else FIRST_ID, NEXT_ID)


def test_a_golden_store_is_clean_and_repair_leaves_it_alone(copy: Path) -> None:
    report = diskbuf.verify(copy)
    assert report.is_clean, report.faults
    assert (report.first_id, report.next_id) == (0 if copy.stem == "history" else FIRST_ID, NEXT_ID)
    before = contents(copy)
    assert not diskbuf.repair(copy).actions
    assert contents(copy) == before


def test_writing_goes_on_in_a_golden_store(copy: Path) -> None:
    with diskbuf.open(copy, "r+") as buffer:
        assert_steps(buffer, FIRST_ID, NEXT_ID)
        buffer.extend(make.steps(NEXT_ID, NEXT_ID + 1))
        assert_steps(buffer, FIRST_ID + 1, NEXT_ID + 1)
    with diskbuf.UniformReplayBuffer(
        make.SPEC, make.LANES, make.RING_LENGTH, path=copy, keep_history=copy.stem == "history"
    ) as buffer:
        assert_steps(buffer, FIRST_ID + 1, NEXT_ID + 1)
        buffer.extend(make.steps(NEXT_ID + 1, 25))
        assert_steps(buffer, 25 - make.RING_LENGTH, 25)
        assert buffer.metadata == make.METADATA
    assert diskbuf.verify(copy).is_clean
    with diskbuf.open(copy, history=True, verify=True) as reader:
        assert_steps(reader, 0 if copy.stem == "history" else 25 - make.RING_LENGTH, 25)


def test_zarr_reads_a_golden_store(golden: Path) -> None:
    expected = make.steps(FIRST_ID, NEXT_ID)["nested"]
    group = zarr.open_group(golden, mode="r")
    if golden.suffix == ".arrow":
        assert not list(group.members())
        return
    for name, value in {"a%2Fb": expected["a/b"], "%7Aarr.json/%": expected["zarr.json"][""]}.items():
        np.testing.assert_array_equal(group[f"nested/{name}"][FIRST_ID:NEXT_ID].swapaxes(0, 1), value, strict=True)
