"""Merging and splitting stores, against plain lists of what each step is."""

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import diskbuf
from diskbuf import trajectories
from diskbuf.splitting import Episodes, Fraction, Ids, Run, parse_part
from diskbuf.store.arranged import ArrangedSnapshot

SPEC = {"x": diskbuf.ArraySpec([], "int64"), "frame": diskbuf.ArraySpec([3], "uint8")}
RAW = diskbuf.StoreOptions()
SMALL = diskbuf.StoreOptions(chunk_bytes=64)
LAYOUTS = {
    "raw": SMALL,
    "zstd": diskbuf.StoreOptions(codec="zstd", chunk_bytes=256),
    "arrow": diskbuf.StoreOptions(layout="arrow", chunk_bytes=512),
}


def step(value: int, lanes: int) -> dict[str, Any]:
    x = np.arange(lanes) * 1_000_000 + value
    return {"x": x, "frame": (x[:, None] + np.arange(3)).astype("uint8")}


def make(
    path: Path,
    runs: list[int],
    *,
    lanes: int = 2,
    base: int = 0,
    options: diskbuf.StoreOptions = RAW,
    max_length: int | None = None,
    **given: Any,
) -> Path:
    """A store of runs of so many steps, whose values count up from `base`."""
    value = base
    for steps in runs:
        with diskbuf.UniformReplayBuffer(SPEC, lanes, max_length, path=path, options=options, **given) as buffer:
            for _ in range(steps):
                buffer.add_batch(step(value, lanes))
                value += 1
    return path


def rows_of(path: Path | str, **given: Any) -> np.ndarray:
    with diskbuf.open(path, **given) as buffer:
        found = buffer.gather_all()
    assert (found["frame"] == (found["x"][..., None] + np.arange(3)).astype("uint8")).all()
    return found["x"]


def runs_of(path: Path | str) -> list[int]:
    with diskbuf.open(path) as buffer:
        return list(buffer._opened().runs)


# ---- merging


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=LAYOUTS)
def test_a_merge_holds_every_row_of_every_source_in_order_and_keeps_runs_apart(
    tmp_path: Path, options: diskbuf.StoreOptions
) -> None:
    make(tmp_path / "a", [5, 4], options=options)
    make(tmp_path / "b", [7], base=100, options=SMALL)
    make(tmp_path / "c", [3, 30, 2], base=200, options=options)
    report = diskbuf.merge([tmp_path / name for name in "abc"], tmp_path / "all")
    expected = np.concatenate([rows_of(tmp_path / name) for name in "abc"], axis=1)
    np.testing.assert_array_equal(rows_of(tmp_path / "all"), expected)
    assert runs_of(tmp_path / "all") == [0, 5, 9, 16, 19, 49]
    assert [(one.begins_at, one.ends_at) for one in report.sources] == [(0, 9), (9, 16), (16, 51)]
    assert report.next_id == 51
    assert diskbuf.verify(tmp_path / "all", values=True).is_clean
    with diskbuf.open(tmp_path / "all") as buffer:
        assert buffer.max_length is None
        told = buffer.metadata["merged"]
        assert [one["path"] for one in told] == [str(tmp_path / name) for name in "abc"]


def test_a_merge_of_merges_is_the_merge_of_what_they_were_made_of(tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        make(tmp_path / name, [3, 2 + number], base=100 * number)
    diskbuf.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
    diskbuf.merge([tmp_path / "ab", tmp_path / "c"], tmp_path / "nested")
    diskbuf.merge([tmp_path / name for name in "abc"], tmp_path / "flat")
    np.testing.assert_array_equal(rows_of(tmp_path / "nested"), rows_of(tmp_path / "flat"))
    assert runs_of(tmp_path / "nested") == runs_of(tmp_path / "flat")


def test_a_store_is_merged_with_itself(tmp_path: Path) -> None:
    make(tmp_path / "a", [4])
    diskbuf.merge([tmp_path / "a", tmp_path / "a"], tmp_path / "twice")
    assert rows_of(tmp_path / "twice")[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_a_merge_goes_on_as_a_store(tmp_path: Path) -> None:
    make(tmp_path / "a", [4])
    diskbuf.merge([tmp_path / "a"], tmp_path / "all")
    with diskbuf.open(tmp_path / "all", mode="r+") as buffer:
        buffer.add_batch(step(9, 2))
    assert rows_of(tmp_path / "all")[0].tolist() == [0, 1, 2, 3, 9]
    assert runs_of(tmp_path / "all") == [0, 4]


def test_windows_that_have_evicted_and_histories_are_merged_as_asked(tmp_path: Path) -> None:
    make(tmp_path / "ring", [40], max_length=10, options=SMALL)
    make(tmp_path / "log", [9], base=100, max_length=4, keep_history=True)
    diskbuf.merge([tmp_path / "ring", tmp_path / "log"], tmp_path / "windows")
    assert rows_of(tmp_path / "windows")[0].tolist() == [*range(30, 40), *range(105, 109)]
    diskbuf.merge([tmp_path / "ring", tmp_path / "log"], tmp_path / "histories", history=True)
    assert rows_of(tmp_path / "histories")[0].tolist() == [*range(30, 40), *range(100, 109)]


def test_stores_of_other_lanes_are_merged_into_one_lane_when_asked(tmp_path: Path) -> None:
    make(tmp_path / "a", [2, 3], lanes=3, options=SMALL)
    make(tmp_path / "b", [4], lanes=1, base=100)
    with pytest.raises(diskbuf.StoreMismatchError, match=r"lanes: 3, not 1\nGive lanes=1"):
        diskbuf.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert not (tmp_path / "all").exists()
    diskbuf.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all", lanes=1)
    a = rows_of(tmp_path / "a")
    assert rows_of(tmp_path / "all").tolist() == [[*a[0], *a[1], *a[2], *range(100, 104)]]
    assert runs_of(tmp_path / "all") == [0, 2, 5, 7, 10, 12, 15]


def test_stores_that_differ_are_not_merged_and_the_message_says_in_what(tmp_path: Path) -> None:
    make(tmp_path / "a", [1])
    other = {"x": diskbuf.ArraySpec([], "int32"), "frame": diskbuf.ArraySpec([3], "uint8")}
    with diskbuf.UniformReplayBuffer(other, 2, path=tmp_path / "b"):
        pass
    with pytest.raises(diskbuf.StoreMismatchError, match=r"b differs from .*a\.\n.*int64.*int32"):
        diskbuf.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    with pytest.raises(diskbuf.StoreNotFoundError):
        diskbuf.merge([tmp_path / "a", tmp_path / "nothing"], tmp_path / "all")
    with pytest.raises(diskbuf.OptionError, match="sources must be a list"):
        diskbuf.merge([], tmp_path / "all")
    with pytest.raises(diskbuf.OptionError, match="sources must be a list"):
        diskbuf.merge(str(tmp_path / "a"), tmp_path / "all")  # type: ignore[arg-type]
    with pytest.raises(diskbuf.OptionError, match="must lie outside"):
        diskbuf.merge([tmp_path / "a"], tmp_path / "a" / "inside")
    with pytest.raises(diskbuf.OptionError, match="metadata must be a JSON value"):
        diskbuf.merge([tmp_path / "a"], tmp_path / "all", metadata={"x": float("nan")})
    assert not (tmp_path / "all").exists()


def test_a_merge_to_a_place_that_is_taken_is_refused_and_leaves_it(tmp_path: Path) -> None:
    make(tmp_path / "a", [3])
    make(tmp_path / "b", [2])
    with pytest.raises(diskbuf.StoreExistsError, match="holds a store"):
        diskbuf.merge([tmp_path / "a"], tmp_path / "b")
    assert rows_of(tmp_path / "b")[0].tolist() == [0, 1]


def test_empty_stores_add_nothing(tmp_path: Path) -> None:
    make(tmp_path / "empty", [0])
    make(tmp_path / "a", [3])
    diskbuf.merge([tmp_path / "empty", tmp_path / "a", tmp_path / "empty"], tmp_path / "all")
    assert rows_of(tmp_path / "all")[0].tolist() == [0, 1, 2]
    assert runs_of(tmp_path / "all") == [0]
    diskbuf.merge([tmp_path / "empty", tmp_path / "empty"], tmp_path / "none")
    assert rows_of(tmp_path / "none").shape == (2, 0)


def test_a_merge_takes_another_layout_and_goes_to_a_url(tmp_path: Path) -> None:
    make(tmp_path / "a", [20], options=SMALL)
    make(tmp_path / "b", [20], base=50, options=LAYOUTS["zstd"])
    url = "memory://merges/all"
    diskbuf.merge([tmp_path / "a", tmp_path / "b"], url, layout="arrow", codec="zstd")
    with diskbuf.open(url) as buffer:
        assert (buffer.layout, buffer.codec) == ("arrow", "zstd")
    assert rows_of(url)[0].tolist() == [*range(20), *range(50, 70)]
    diskbuf.merge([url, url], tmp_path / "back", layout="zarr", codec=None)
    assert rows_of(tmp_path / "back").shape == (2, 80)


def test_a_merge_that_is_killed_goes_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    spec = {"frame": diskbuf.ArraySpec([1000], "uint8")}
    for name in "ab":
        with diskbuf.UniformReplayBuffer(
            spec, 2, None, path=tmp_path / name, options=diskbuf.StoreOptions(chunk_bytes=2**16)
        ) as buffer:
            buffer.extend({"frame": rng.integers(0, 255, [2, 2000, 1000], np.uint8)})
    code = f"""
import os, signal, diskbuf
def tell(done, total):
    if done > total / 2:
        os.kill(os.getpid(), signal.SIGKILL)
diskbuf.merge([{str(tmp_path / "a")!r}, {str(tmp_path / "b")!r}], {str(tmp_path / "all")!r}, progress=tell)
"""
    run = subprocess.run([sys.executable, "-c", code], check=False)
    assert run.returncode == -signal.SIGKILL
    with pytest.raises(diskbuf.StoreNotFoundError):
        diskbuf.open(tmp_path / "all")
    report = diskbuf.merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert report.bytes_written < 8_000_000 * 0.8
    with diskbuf.open(tmp_path / "all") as merged:
        found = merged.gather_all()["frame"]
    for number, name in enumerate("ab"):
        with diskbuf.open(tmp_path / name) as buffer:
            np.testing.assert_array_equal(found[:, number * 2000 : (number + 1) * 2000], buffer.gather_all()["frame"])


def test_another_merge_to_the_place_of_an_unfinished_one_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "a", [2000], options=SMALL)
    make(tmp_path / "b", [5])

    class StopError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise StopError

    with pytest.raises(StopError):
        diskbuf.merge([tmp_path / "a"], tmp_path / "all", progress=stop)
    with pytest.raises(diskbuf.StoreExistsError, match="a copy that isn't finished"):
        diskbuf.merge([tmp_path / "b", tmp_path / "a"], tmp_path / "all")
    diskbuf.merge([tmp_path / "a"], tmp_path / "all")
    assert rows_of(tmp_path / "all").shape == (2, 2000)


def test_a_source_that_evicts_what_was_to_come_is_an_error_not_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ring"
    with diskbuf.UniformReplayBuffer(SPEC, 2, 64, path=path, options=SMALL) as writer:
        for value in range(64):
            writer.add_batch(step(value, 2))

        read = ArrangedSnapshot.rows

        def read_late(self: ArrangedSnapshot, number: int, first_id: int, next_id: int) -> Any:
            if first_id == 64:
                writer.extend({name: leaf[:, None].repeat(200, axis=1) for name, leaf in step(0, 2).items()})
            return read(self, number, first_id, next_id)

        monkeypatch.setattr(ArrangedSnapshot, "rows", read_late)
        with pytest.raises(diskbuf.WindowError, match="has evicted those below"):
            diskbuf.merge([path, path], tmp_path / "all", chunk_bytes=64)
    with pytest.raises(diskbuf.StoreNotFoundError):
        diskbuf.open(tmp_path / "all")


# ---- splitting


def trajectory_spec() -> Any:
    return trajectories.Trajectory(
        step_type=diskbuf.ArraySpec([], "int32"),
        observation=diskbuf.ArraySpec([], "int64"),
        action=diskbuf.ArraySpec([], "int64"),
        policy_info=(),
        next_step_type=diskbuf.ArraySpec([], "int32"),
        reward=diskbuf.ArraySpec([], "float32"),
        discount=diskbuf.ArraySpec([], "float32"),
    )


def make_episodes(path: Path, lengths: list[list[int]], *, runs: int = 1, options: diskbuf.StoreOptions = RAW) -> Path:
    """A store with a lane for each list, whose episodes have so many steps and a boundary row; run after run alike.

    Observations count up in a lane; a lane that has no more episodes goes on with one that doesn't end.
    """
    lanes = len(lengths)
    total = max(sum(length + 1 for length in lane) for lane in lengths) + 2
    for run in range(runs):
        with diskbuf.UniformReplayBuffer(trajectory_spec(), lanes, None, path=path, options=options) as buffer:
            rows = []
            for number, lane in enumerate(lengths):
                types = [t for length in lane for t in [0, *[1] * (length - 1), 2]]
                types = (types + [0] + [1] * total)[: total + 1]
                rows.append((types, [run * 10_000 + number * 1000 + t for t in range(total)]))
            for t in range(total):
                buffer.add_batch(
                    trajectories.Trajectory(
                        step_type=np.array([types[t] for types, _ in rows], "int32"),
                        observation=np.array([values[t] for _, values in rows]),
                        action=np.zeros(lanes, "int64"),
                        policy_info=(),
                        next_step_type=np.array([types[t + 1] for types, _ in rows], "int32"),
                        reward=np.ones(lanes, "float32"),
                        discount=np.array([0.0 if types[t + 1] == 2 else 1.0 for types, _ in rows], "float32"),
                    )
                )
    return path


def episode_rows(path: Path) -> list[tuple[list[int], str, bool]]:
    """For each episode the observations of its steps, how it ended, and whether it is whole."""
    with diskbuf.open(path) as buffer:
        observation = buffer.gather_all().observation
        return [
            (
                observation[
                    one["lane"], one["first_id"] - buffer.first_id : one["last_id"] + 1 - buffer.first_id
                ].tolist(),
                one["end"],
                one["is_whole"],
            )
            for one in diskbuf.episodes(buffer).to_pylist()
        ]


def comparable(found: list[tuple[list[int], str, bool]]) -> list[tuple[list[int], bool]]:
    """An episode that went on at the end of its store is broken off where others follow it."""
    return sorted((values, end in ("open", "broken")) for values, end, _ in found)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=1, max_size=3),
    runs=st.integers(1, 2),
    seed=st.one_of(st.none(), st.integers(0, 5)),
    share=st.sampled_from([0.3, 0.5, 0.8]),
    layout=st.sampled_from(sorted(LAYOUTS)),
)
def test_parts_of_episodes_hold_each_episode_once_whole_and_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    runs: int,
    seed: int | None,
    share: float,
    layout: str,
) -> None:
    folder = tmp_path_factory.mktemp("split")
    options = dataclasses.replace(LAYOUTS[layout], chunk_bytes=512, fsync="never")
    make_episodes(folder / "all", lengths, runs=runs, options=options)
    before = episode_rows(folder / "all")
    count = len(before)
    if round(share * count) in (0, count):
        return
    report = diskbuf.split(folder / "all", {folder / "train": share, folder / "test": round(1 - share, 6)}, seed=seed)
    train, test = episode_rows(folder / "train"), episode_rows(folder / "test")
    assert (len(train), len(test)) == (round(share * count), count - round(share * count))
    assert [part.episodes for part in report.parts] == [len(train), len(test)]
    assert comparable([*train, *test]) == comparable(before)
    order = [values for values, _, _ in before]
    for part in (train, test):
        assert [values for values, _, _ in part] == sorted((v for v, _, _ in part), key=order.index)
        assert all(is_whole for _, _, is_whole in part)
    if seed is None:
        assert [values for values, _, _ in train] == order[: len(train)]
    for name in ("train", "test"):
        assert diskbuf.verify(folder / name, values=True).is_clean
        with diskbuf.open(folder / name) as buffer:
            assert buffer.batch_size == 1
            steps = 3
            try:
                sample = buffer.as_numpy_iterator(64, num_steps=steps, within_episodes=True, seed=1)
                found = next(sample)[0].observation
            except diskbuf.WindowError:
                continue
            assert (np.diff(found, axis=1) == 1).all()


def test_final_observations_go_with_their_episodes(tmp_path: Path) -> None:
    make_episodes(tmp_path / "all", [[2, 3]])
    diskbuf.split(tmp_path / "all", {tmp_path / "second": Episodes(1, 2)})
    with diskbuf.open(tmp_path / "second") as buffer:
        assert buffer.gather_all().observation.tolist() == [[3, 4, 5, 6]]
        assert buffer.gather_all().step_type.tolist() == [[0, 1, 1, 2]]


def test_parts_of_ids_and_runs_keep_lanes_and_ids(tmp_path: Path) -> None:
    make(tmp_path / "all", [5, 4, 6], options=SMALL)
    diskbuf.split(
        tmp_path / "all",
        {
            tmp_path / "ids": Ids(3, 11),
            tmp_path / "run": Run(1),
            tmp_path / "last": Run(-1),
            tmp_path / "rest": Ids(12),
        },
    )
    for name, first_id, next_id, runs in (
        ("ids", 3, 11, [3, 5, 9]),
        ("run", 5, 9, [5]),
        ("last", 9, 15, [9]),
        ("rest", 12, 15, [12]),
    ):
        with diskbuf.open(tmp_path / name) as buffer:
            assert (buffer.first_id, buffer.next_id, buffer.batch_size) == (first_id, next_id, 2)
        assert rows_of(tmp_path / name)[0].tolist() == list(range(first_id, next_id))
        assert runs_of(tmp_path / name) == runs
        with diskbuf.open(tmp_path / name, mode="r+") as buffer:
            buffer.add_batch(step(next_id, 2))
        assert rows_of(tmp_path / name)[0].tolist() == list(range(first_id, next_id + 1))
        assert diskbuf.verify(tmp_path / name).is_clean


def test_fractions_of_steps_cut_the_window_into_ranges(tmp_path: Path) -> None:
    make(tmp_path / "all", [30], max_length=10)
    report = diskbuf.split(
        tmp_path / "all", {tmp_path / "a": 0.5, tmp_path / "b": Fraction(0.3), tmp_path / "c": 0.2}, by="steps"
    )
    assert [(part.first_id, part.next_id) for part in report.parts] == [(20, 25), (25, 28), (28, 30)]
    assert [rows_of(tmp_path / name)[1, 0] for name in "abc"] == [1_000_020, 1_000_025, 1_000_028]


def test_every_part_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    make(tmp_path / "all", [10])
    bad: list[tuple[Any, type[Exception], str]] = [
        ({tmp_path / "a": Ids(0, 5), tmp_path / "b": Ids(5, 20)}, diskbuf.WindowError, r"got \[5, 20\)"),
        ({tmp_path / "a": Ids(0, 5), tmp_path / "b": Run(3)}, diskbuf.WindowError, "run must be one of the 1"),
        ({tmp_path / "a": 0.7, tmp_path / "b": 0.7}, diskbuf.OptionError, "more than the whole"),
        ({tmp_path / "a": 0.9, tmp_path / "b": 0.01}, diskbuf.OptionError, "must hold steps"),
        ({tmp_path / "a": 0.5, tmp_path / "all": 0.5}, diskbuf.OptionError, "must lie outside"),
        ({tmp_path / "a": 0.5, tmp_path / "a" / "b": 0.5}, diskbuf.OptionError, "must lie outside"),
        ({}, diskbuf.OptionError, "one or more places"),
        ({tmp_path / "a": 0.0}, diskbuf.OptionError, "share must be above 0"),
    ]
    for parts, error, match in bad:
        with pytest.raises(error, match=match):
            diskbuf.split(tmp_path / "all", parts, by="steps")
    with pytest.raises(diskbuf.SpecError, match="episode"):
        diskbuf.split(tmp_path / "all", {tmp_path / "a": 0.5})
    make(tmp_path / "taken", [1])
    with pytest.raises(diskbuf.StoreExistsError):
        diskbuf.split(tmp_path / "all", {tmp_path / "a": 0.5, tmp_path / "taken": 0.5}, by="steps")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all", "taken"]


def test_a_split_that_was_interrupted_goes_on_with_the_parts_that_are_missing(tmp_path: Path) -> None:
    make(tmp_path / "all", [40], options=SMALL)
    parts = {tmp_path / "a": 0.5, tmp_path / "b": 0.5}

    class StopError(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > total * 0.7:
            raise StopError

    with pytest.raises(StopError):
        diskbuf.split(tmp_path / "all", parts, by="steps", progress=stop)
    assert (tmp_path / "a" / "zarr.json").exists()
    assert not (tmp_path / "b" / "zarr.json").exists()
    report = diskbuf.split(tmp_path / "all", parts, by="steps")
    assert report.parts[0].bytes_written == 0
    assert [rows_of(tmp_path / name)[0].tolist() for name in "ab"] == [list(range(20)), list(range(20, 40))]


def test_splitting_and_merging_gives_the_rows_back(tmp_path: Path) -> None:
    make(tmp_path / "all", [17], options=LAYOUTS["zstd"])
    diskbuf.split(
        tmp_path / "all",
        {tmp_path / name: share for name, share in zip("abc", (0.2, 0.5, 0.3), strict=True)},
        by="steps",
    )
    diskbuf.merge([tmp_path / name for name in "abc"], tmp_path / "again")
    np.testing.assert_array_equal(rows_of(tmp_path / "again"), rows_of(tmp_path / "all"))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("0.8", Fraction(0.8)),
        ("1", Fraction(1.0)),
        ("ids:100:200", Ids(100, 200)),
        ("ids::200", Ids(None, 200)),
        ("ids:5:", Ids(5, None)),
        ("run:-1", Run(-1)),
        ("episodes:0:50", Episodes(0, 50)),
    ],
)
def test_parts_are_read_from_words(text: str, part: Any) -> None:
    assert parse_part(text) == part


@pytest.mark.parametrize(
    "text", ["", "x", "ids", "ids:1", "ids:a:b", "run:", "run:1:2", "episodes:1", "0", "1.5", "nan", "0.5:1"]
)
def test_words_that_are_no_part_are_refused(text: str) -> None:
    with pytest.raises(diskbuf.OptionError):
        parse_part(text)


def test_a_store_that_is_being_written_is_split_and_merged(tmp_path: Path) -> None:
    with diskbuf.UniformReplayBuffer(SPEC, 2, None, path=tmp_path / "live", options=SMALL) as writer:
        for value in range(50):
            writer.add_batch(step(value, 2))

        def go_on(done: int, total: int) -> None:
            writer.add_batch(step(writer.next_id, 2))

        diskbuf.merge([tmp_path / "live", tmp_path / "live"], tmp_path / "all", progress=go_on)
        diskbuf.split(tmp_path / "live", {tmp_path / "half": 0.5}, by="steps", progress=go_on)
        merged = rows_of(tmp_path / "all")[0].tolist()
        assert merged == [*range(50), *range(50)]
        half = rows_of(tmp_path / "half")[0].tolist()
        assert half == list(range(len(half)))
        assert len(half) >= 25
