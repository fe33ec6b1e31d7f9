"""Copies of stores: into every layout and place, the same ids and rows; interrupted, damaged and full ones too."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from test_full_disk import small_disk  # noqa: F401 - a fixture

import diskbuf

LANES = 3
SPEC = {
    "observation": diskbuf.ArraySpec([5, 2], "float32"),
    "deep": {"done": diskbuf.ArraySpec([], "bool"), "reward": diskbuf.ArraySpec([], "float64")},
    "action": diskbuf.ArraySpec([], "uint8"),
}
CHUNK_BYTES = 4096  # 34 ids of observations fill one

LAYOUTS: dict[str, dict[str, Any]] = {
    "raw": {},
    "zstd": {"codec": "zstd"},
    "blosc": {"codec": "blosc", "inner_rows": 2},
    "arrow": {"layout": "arrow"},
    "arrow-zstd": {"layout": "arrow", "codec": "zstd"},
}
# What `copy` takes for each.
WANTED: dict[str, dict[str, Any]] = {
    "raw": {"layout": "zarr", "codec": None},
    "zstd": {"layout": "zarr", "codec": "zstd"},
    "blosc": {"layout": "zarr", "codec": "blosc"},
    "arrow": {"layout": "arrow", "codec": None},
    "arrow-zstd": {"layout": "arrow", "codec": "zstd"},
}


def steps(first_id: int, next_id: int) -> dict[str, Any]:
    """[LANES, T, ...] steps whose values tell their ids."""
    ids = np.arange(first_id, next_id)[None, :] * LANES + np.arange(LANES)[:, None]
    return {
        "observation": (ids[..., None, None] + np.arange(10).reshape(5, 2) / 16).astype("float32"),
        "deep": {"done": ids % 7 == 0, "reward": np.sqrt(ids)},
        "action": (ids % 251).astype("uint8"),
    }


def make(path: Path, layout: str = "raw", shape: str = "ring", *, chunk_bytes: int = CHUNK_BYTES) -> Path:
    """Makes a store of several runs, closed with partial tails."""
    lengths: dict[str, Any] = {
        "ring": {"max_length": 150},
        "history": {"max_length": 40, "keep_history": True},
        "unbounded": {"max_length": None},
        "cleared": {"max_length": None},
        "emptied": {"max_length": 150},
        "new": {"max_length": 150},
    }
    options = diskbuf.StoreOptions(chunk_bytes=chunk_bytes, fsync="never", **LAYOUTS[layout])
    for first_id, next_id in [(0, 0)] if shape == "new" else [(0, 90), (90, 301)]:
        with diskbuf.UniformReplayBuffer(
            SPEC, LANES, path=path, metadata={"a": [1, None]}, options=options, **lengths[shape]
        ) as buffer:
            buffer.extend(steps(first_id, next_id))
            if shape == "cleared" and first_id:
                buffer.clear()
                buffer.extend(steps(next_id, next_id + 21))
            elif shape == "emptied" and first_id:
                buffer.clear()
    return path


def assert_rows(buffer: diskbuf.UniformReplayBuffer, first_id: int, next_id: int) -> None:
    assert (buffer.first_id, buffer.next_id) == (first_id, next_id)
    if first_id == next_id:
        return
    found, expected = buffer.gather_all(), steps(first_id, next_id)
    for leaf in ("observation", "action"):
        np.testing.assert_array_equal(found[leaf], expected[leaf], strict=True)
    for leaf in ("done", "reward"):
        np.testing.assert_array_equal(found["deep"][leaf], expected["deep"][leaf], strict=True)


def assert_same(source: Path | str, copied: Path | str, **options: Any) -> None:
    """The copy is what the source is, for readers of the window and of the history."""
    for history in (False, True):
        with (
            diskbuf.open(source, seed=3, history=history) as one,
            diskbuf.open(copied, seed=3, history=history, **options) as other,
        ):
            assert_rows(other, one.first_id, one.next_id)
            assert other._opened().runs == one._opened().runs
            assert (other.metadata, other.max_length, other.data_spec) == (one.metadata, one.max_length, one.data_spec)
            mine, theirs = one._opened().manifest, other._opened().manifest
            assert (mine.created, mine.generation, mine.keep_history) == (
                theirs.created,
                theirs.generation,
                theirs.keep_history,
            )
            if one.num_frames() >= 2 * LANES:
                for num_steps in (None, 2):
                    drawn, again = one.get_next(16, num_steps), other.get_next(16, num_steps)
                    np.testing.assert_array_equal(drawn[1].ids, again[1].ids)
                    np.testing.assert_array_equal(drawn[0]["observation"], again[0]["observation"])


def assert_goes_on(path: Path) -> None:
    """The copy can be opened for adding, twice, and keeps what it has."""
    with diskbuf.open(path) as buffer:
        first_id, next_id, length = buffer.first_id, buffer.next_id, buffer.max_length
    for count in (1, 200):
        with diskbuf.open(path, mode="r+") as buffer:
            buffer.extend(steps(next_id, next_id + count))
            next_id += count
            assert_rows(buffer, max(first_id, next_id - (length or next_id)), next_id)
        with diskbuf.open(path) as buffer:
            assert_rows(buffer, max(first_id, next_id - (length or next_id)), next_id)


@pytest.fixture
def memory() -> Iterator[str]:
    """A URL of nothing yet."""
    yield "memory://copies"
    fsspec.filesystem("memory").store.clear()


SHAPES = ["ring", "history", "unbounded", "cleared", "emptied", "new"]
# Every layout into every other, and every shape out of every layout, into the same and into another one.
_NEXT = dict(zip(LAYOUTS, [*list(LAYOUTS)[1:], "raw"], strict=True))
CASES = [(layout, wanted, "ring") for layout in LAYOUTS for wanted in LAYOUTS]
CASES += [(layout, wanted, shape) for layout in LAYOUTS for wanted in (layout, _NEXT[layout]) for shape in SHAPES[1:]]


@pytest.mark.parametrize(("layout", "wanted", "shape"), CASES)
def test_a_copy_has_the_same_ids_and_rows_and_goes_on(tmp_path: Path, layout: str, wanted: str, shape: str) -> None:
    source, copied = make(tmp_path / "source", layout, shape), tmp_path / "copied"
    report = diskbuf.copy(source, copied, **WANTED[wanted])
    assert_same(source, copied)
    with diskbuf.open(copied, verify=True) as buffer:
        assert (report.first_id, report.next_id) == (buffer.first_id, buffer.next_id)
    assert not (copied / ".diskbuf" / "copying.json").exists()
    assert report.skipped == 0
    assert_goes_on(copied)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_far_away_has_the_same_ids_and_rows_and_comes_back(
    tmp_path: Path, memory: str, layout: str, shape: str
) -> None:
    source, there, back = make(tmp_path / "source", layout, shape), f"{memory}/there", tmp_path / "back"
    cache = diskbuf.ReadOptions(cache_dir=":memory:", retries=0)
    diskbuf.copy(source, there, read_options=cache)
    assert_same(source, there, read_options=cache)
    diskbuf.copy(there, back, read_options=cache, **WANTED["zstd" if layout == "arrow" else layout])
    assert_same(source, back)
    assert_goes_on(back)


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    report = diskbuf.copy(f"file://{source}", f"file://{tmp_path}/copied")
    assert report.destination == str(tmp_path / "copied")
    assert_same(source, tmp_path / "copied")
    assert_goes_on(tmp_path / "copied")
