"""Differences between stores, and checksums of what they hold."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskbuf
from diskbuf.comparing import checksum, diff

SPEC = {"x": diskbuf.ArraySpec([], "float32"), "frame": diskbuf.ArraySpec([2, 3], "uint8")}


def rows(steps: int = 40) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=[2, steps]).astype("float32")
    x[0, 3] = np.nan
    return {"x": x, "frame": rng.integers(0, 255, [2, steps, 2, 3], "uint8")}


def make(path: Path, items: dict[str, np.ndarray] | None = None, **given: Any) -> Path:
    given.setdefault("options", diskbuf.StoreOptions(chunk_bytes=128))
    with diskbuf.UniformReplayBuffer(SPEC, 2, None, path=path, **given) as buffer:
        buffer.extend(rows() if items is None else items)
    return path


@pytest.mark.parametrize(
    "layout", [{"codec": "zstd"}, {"layout": "arrow", "codec": None}, {"chunk_bytes": 4096}], ids=str
)
def test_copies_in_any_layout_have_no_difference_and_the_same_checksum(tmp_path: Path, layout: dict[str, Any]) -> None:
    make(tmp_path / "a")
    diskbuf.copy(tmp_path / "a", tmp_path / "b", **layout)
    report = diff(tmp_path / "a", tmp_path / "b")
    assert report.is_equal
    assert report.compared == (0, 40)
    assert checksum(tmp_path / "a") == checksum(tmp_path / "b")
    url = f"memory://comparing/{tmp_path.name}"
    diskbuf.copy(tmp_path / "a", url, **layout)
    assert diff(tmp_path / "a", url).is_equal


@pytest.mark.parametrize(
    ("leaf", "place"), [("x", (1, 17)), ("frame", (0, 39, 1, 2)), ("frame", (1, 0, 0, 0))], ids=str
)
def test_one_value_that_differs_is_named(tmp_path: Path, leaf: str, place: tuple[int, ...]) -> None:
    make(tmp_path / "a")
    other = rows()
    other[leaf][place] += 1
    make(tmp_path / "b", other)
    report = diff(tmp_path / "a", tmp_path / "b")
    (found,) = report.rows
    assert (found.column, found.lane, found.step_id, found.index, found.rows) == (leaf, *place[:2], place[2:], 1)
    assert (found.first, found.second) == (rows()[leaf][place].item(), other[leaf][place].item())
    assert not report.settings
    first, second = checksum(tmp_path / "a"), checksum(tmp_path / "b")
    assert first.digest != second.digest
    assert {path for path in SPEC if first.columns[path] != second.columns[path]} == {leaf}
    assert diff(tmp_path / "a", tmp_path / "b", columns=[path for path in SPEC if path != leaf]).is_equal


def test_the_first_of_many_differences_is_the_one_of_the_lowest_id(tmp_path: Path) -> None:
    make(tmp_path / "a")
    other = rows()
    other["x"][0, 20:] += 1
    other["x"][1, 19:30] -= 1
    make(tmp_path / "b", other)
    (found,) = diff(tmp_path / "a", tmp_path / "b").rows
    assert (found.step_id, found.lane, found.rows) == (19, 1, 20 + 11)


def test_bytes_decide_nan_equals_itself_and_zero_has_a_sign(tmp_path: Path) -> None:
    zero, minus = rows(), rows()
    zero["x"][:] = 0.0
    minus["x"][:] = -0.0
    make(tmp_path / "a", zero)
    make(tmp_path / "b", minus)
    (found,) = diff(tmp_path / "a", tmp_path / "b").rows
    assert (found.column, found.rows) == ("x", 80)


def test_settings_that_differ_are_lines(tmp_path: Path) -> None:
    make(tmp_path / "a", metadata={"seed": 1})
    make(tmp_path / "b", rows(30), metadata={"seed": 2})
    make(tmp_path / "b", rows(5))
    report = diff(tmp_path / "a", tmp_path / "b")
    assert report.settings == (
        "window: ids [0, 40), not ids [0, 35)",
        "runs begin at: one, not 30",
        'metadata: {"seed": 1}, not {"seed": 2}',
    )
    assert report.compared == (0, 35)


def test_specs_and_lanes_that_differ_are_told_and_what_can_be_compared_is(tmp_path: Path) -> None:
    make(tmp_path / "a")
    other = SPEC | {"x": diskbuf.ArraySpec([], "float64")}
    with diskbuf.UniformReplayBuffer(other, 2, None, path=tmp_path / "b") as buffer:
        buffer.extend(rows() | {"x": rows()["x"].astype("float64")})
    report = diff(tmp_path / "a", tmp_path / "b")
    assert len(report.spec) == 1
    assert "float64" in report.spec[0]
    assert not report.rows
    with diskbuf.UniformReplayBuffer(SPEC, 3, None, path=tmp_path / "c"):
        pass
    report = diff(tmp_path / "a", tmp_path / "c")
    assert report.settings[0] == "lanes: 2, not 3"
    assert report.compared == (0, 0)


def test_windows_without_a_common_id_are_compared_by_nothing(tmp_path: Path) -> None:
    make(tmp_path / "a")
    with diskbuf.UniformReplayBuffer(SPEC, 2, None, path=tmp_path / "b") as buffer:
        buffer.extend(rows(100))
        buffer.clear()
        buffer.extend(rows(4))
    assert diff(tmp_path / "a", tmp_path / "b").compared == (100, 100)


def test_an_unknown_column_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "a")
    for function in (
        lambda: diff(tmp_path / "a", tmp_path / "a", columns=["y"]),
        lambda: checksum(tmp_path / "a", columns=["y"]),
    ):
        with pytest.raises(diskbuf.OptionError, match=r"must be leaves of the store .*got \['y'\]"):
            function()


def test_checksums_follow_rows_not_ids(tmp_path: Path) -> None:
    make(tmp_path / "a")
    diskbuf.merge([tmp_path / "a"], tmp_path / "b")
    with diskbuf.UniformReplayBuffer(SPEC, 2, 40, path=tmp_path / "c") as buffer:
        buffer.extend(rows(7))
        buffer.extend(rows())
    assert checksum(tmp_path / "a").digest == checksum(tmp_path / "b").digest == checksum(tmp_path / "c").digest
    assert checksum(tmp_path / "c").first_id == 7
    with diskbuf.UniformReplayBuffer(SPEC, 2, None, path=tmp_path / "d") as buffer:
        buffer.extend({name: leaf[::-1] for name, leaf in rows().items()})
    assert checksum(tmp_path / "d").digest != checksum(tmp_path / "a").digest


def test_the_checksum_is_the_one_that_its_docstring_describes(tmp_path: Path) -> None:
    import hashlib
    import json

    make(tmp_path / "a")
    with diskbuf.open(tmp_path / "a") as buffer:
        items = buffer.gather_all()
    text = json.dumps([2, 40]) + "\n"
    for path in ("frame", "x"):
        leaf = items[path]
        found = hashlib.sha256(leaf.swapaxes(0, 1).tobytes()).hexdigest()
        text += json.dumps([path, leaf.dtype.name, list(SPEC[path].shape), found]) + "\n"
    order = list(checksum(tmp_path / "a").columns)
    if order == ["x", "frame"]:
        text = "\n".join([text.splitlines()[0], *reversed(text.splitlines()[1:])]) + "\n"
    assert checksum(tmp_path / "a").digest == hashlib.sha256(text.encode()).hexdigest()


def test_rows_that_are_evicted_meanwhile_are_an_error_not_another_checksum(tmp_path: Path) -> None:
    with diskbuf.UniformReplayBuffer(
        SPEC, 2, 40, path=tmp_path / "a", options=diskbuf.StoreOptions(chunk_bytes=64)
    ) as buffer:
        buffer.extend(rows())

        def overwrite(done: int, total: int) -> None:
            buffer.extend(rows())

        with pytest.raises(diskbuf.WindowError, match="writer evicted"):
            checksum(tmp_path / "a", progress=overwrite)
