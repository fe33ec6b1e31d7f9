"""Where episodes end, where sequences inside them start, and the table of episodes, each next to plain loops."""

import dataclasses
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from counter_environment import CounterEnvironment, check_lanes, makers, reward_of
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

import diskbuf
from diskbuf import ArraySpec, SpecError, UniformReplayBuffer, episode_index, episode_table, trajectories
from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import suite_gym
from diskbuf.episode_ends import end_rule
from diskbuf.episode_index import EpisodeIndex
from diskbuf.policies import RandomPolicy
from diskbuf.store.layout import ColumnLayout
from diskbuf.trajectories import PolicyStep

FIRST, MID, LAST = 0, 1, 2
LARGEST_DRAW = 1 - 2.0**-53

modes = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)

RULES = {
    "trajectory": {"step_type": "int32", "next_step_type": "int32", "reward": "float32", "discount": "float32"},
    "time step": {"step_type": "int32", "reward": "float32", "discount": "float32"},
    "flag": {"done": "bool", "reward": "float32", "discount": "float32"},
}


# ---- a store in memory


@dataclasses.dataclass
class PlainColumn:
    layout: ColumnLayout


@dataclasses.dataclass
class PlainManifest:
    batch_size: int


class PlainStore:
    """What an index needs of a store, from arrays [lanes, T]; notes what is read."""

    def __init__(self, columns: dict[str, np.ndarray], runs: Sequence[int] = ()) -> None:
        self.arrays = columns
        self.lanes = next(iter(columns.values())).shape[0]
        self.columns = [
            PlainColumn(
                ColumnLayout(
                    path=name, file_path=name, dtype=array.dtype, shape=(), lanes=self.lanes, chunk_rows=4, slots=None
                )
            )
            for name, array in columns.items()
        ]
        self.manifest = PlainManifest(self.lanes)
        self.runs = tuple(runs)
        self.intact_from = 0
        self.reads: list[tuple[str, int, int]] = []
        self.first_id, self.next_id = 0, next(iter(columns.values())).shape[1]

    def window(self) -> tuple[int, int]:
        return self.first_id, self.next_id

    def read_columns(self, numbers: Sequence[int], first_id: int, next_id: int) -> list[np.ndarray] | None:
        names = [list(self.arrays)[number] for number in numbers]
        self.reads += [(name, first_id, next_id) for name in names]
        low = max(first_id, self.intact_from)
        return [self.arrays[name][:, low:next_id].copy() for name in names] if low < next_id else None


def plain_index(store: PlainStore, ends: str | None = None) -> EpisodeIndex:
    return EpisodeIndex(store, ends=ends)  # type: ignore[arg-type]  # as much of one as it needs


# ---- the naive way


def goes_on(columns: dict[str, np.ndarray], lane: int, step_id: int, runs: Sequence[int]) -> bool:
    """Whether the row of an id goes on where the one before it stopped, said once more, a row at a time."""
    if step_id in runs:
        return False
    if "done" in columns:
        return not columns["done"][lane, step_id - 1]
    step_type = columns["step_type"][lane]
    if step_type[step_id] == FIRST or step_type[step_id - 1] == LAST:
        return False
    return "next_step_type" not in columns or columns["next_step_type"][lane, step_id - 1] == step_type[step_id]


def naive_starts(
    columns: dict[str, np.ndarray], runs: Sequence[int], window: tuple[int, int], num_steps: int
) -> list[tuple[int, int]]:
    """Each (id, lane) from which num_steps rows are in the window, go on one after the other, and begin in a step."""
    first_id, next_id = window
    lanes = next(iter(columns.values())).shape[0]
    return [
        (start, lane)
        for start in range(first_id, next_id - num_steps + 1)
        for lane in range(lanes)
        if all(goes_on(columns, lane, step_id, runs) for step_id in range(start + 1, start + num_steps))
        and not ("next_step_type" in columns and columns["step_type"][lane, start] == LAST)
    ]


def naive_episodes(
    columns: dict[str, np.ndarray], runs: Sequence[int], window: tuple[int, int]
) -> list[dict[str, Any]]:
    first_id, next_id = window
    has_boundaries = "next_step_type" in columns
    found = []
    for lane in range(next(iter(columns.values())).shape[0]):
        pieces: list[list[int]] = []
        for step_id in range(first_id, next_id):
            if step_id > first_id and goes_on(columns, lane, step_id, runs):
                pieces[-1].append(step_id)
            else:
                pieces.append([step_id])
        for piece in pieces:
            steps = [i for i in piece if not (has_boundaries and columns["step_type"][lane, i] == LAST)]
            if not steps:
                continue
            last = steps[-1]
            if "done" in columns:
                is_end, is_whole = columns["done"][lane, last], piece[0] > first_id or first_id in (0, *runs)
            else:
                name = "next_step_type" if has_boundaries else "step_type"
                is_end = columns[name][lane, last] == LAST
                is_whole = columns["step_type"][lane, piece[0]] == FIRST
            if is_end:
                end: str | None = None
                if "discount" in columns:
                    end = "terminated" if columns["discount"][lane, last] == 0 else "truncated"
            else:
                end = "open" if piece[-1] == next_id - 1 and next_id not in runs else "broken"
            found.append(
                {
                    "lane": lane,
                    "first_id": steps[0],
                    "last_id": last,
                    "length": len(steps),
                    "return": float(sum(columns["reward"][lane, i] for i in steps)) if "reward" in columns else None,
                    "end": end,
                    "is_whole": bool(is_whole),
                }
            )
    return sorted(found, key=lambda row: (row["first_id"], row["lane"]))


# ---- random rows


@st.composite
def lane_rows(draw: st.DrawFn, rows: int) -> list[tuple[int, int]]:
    """(step_type, next_step_type) as a driver makes them, with a restart here and there, or as nobody would."""
    if draw(st.integers(0, 4)) == 0:
        return draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=rows, max_size=rows))
    made: list[tuple[int, int]] = []
    while len(made) < rows:
        length = draw(st.integers(1, 9))
        types = [FIRST, *[MID] * (length - 1), LAST]
        pairs = list(zip(types, [*types[1:], FIRST], strict=True))
        made += pairs[draw(st.integers(0, 1)) * draw(st.integers(0, length)) :][: draw(st.integers(1, length + 1))]
        if draw(st.booleans()):
            made += pairs
    return made[:rows]


@st.composite
def stores(draw: st.DrawFn) -> tuple[dict[str, np.ndarray], tuple[int, ...]]:
    lanes, rows = draw(st.integers(1, 3)), draw(st.integers(1, 30))
    table = np.array([draw(lane_rows(rows)) for _ in range(lanes)], np.int32)
    columns = {"step_type": table[..., 0], "next_step_type": table[..., 1]}
    kind = draw(st.sampled_from(list(RULES)))
    if kind == "time step":
        del columns["next_step_type"]
    if kind == "flag":
        columns = {"done": table[..., 1] == LAST}
    numbers = st.lists(st.integers(-3, 3), min_size=lanes * rows, max_size=lanes * rows)
    if draw(st.booleans()):
        columns["reward"] = np.array(draw(numbers), np.float32).reshape(lanes, rows)
    if draw(st.booleans()):
        columns["discount"] = np.clip(np.array(draw(numbers), np.float32), 0, 1).reshape(lanes, rows)
    runs = tuple(sorted(draw(st.sets(st.integers(0, rows), max_size=3))))
    return columns, runs


def ends_of(columns: dict[str, np.ndarray]) -> str | None:
    return "done" if "done" in columns else None


@st.composite
def windows(draw: st.DrawFn, rows: int) -> tuple[int, int]:
    first_id = draw(st.integers(0, rows))
    return first_id, draw(st.integers(first_id, rows))


@pytest.fixture(params=["small blocks", "real blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks and little room make examples of 30 rows go through what 100,000 rows do."""
    if request.param == "small blocks":
        monkeypatch.setattr(episode_index, "BLOCK_VALUES", 7)
        monkeypatch.setattr(episode_table, "BLOCK_VALUES", 7)
        monkeypatch.setattr(episode_index, "_LEAST_CAPACITY", 2)
        monkeypatch.setattr(episode_index, "_MOST_ROUNDS", 1)


def evenly_spread(count: int) -> np.ndarray:
    """One draw for each of `count` equal parts of [0, 1)."""
    return (np.arange(count) + 0.5) / count


def pairs_of(rows: np.ndarray, first_id: int, lanes: int) -> list[tuple[int, int]]:
    return [(first_id + row // lanes, row % lanes) for row in rows.tolist()]


@pytest.mark.usefixtures("blocks")
@settings(max_examples=300)
@given(st.data(), stores())
def test_starts_are_those_of_plain_loops_whatever_was_asked_before(
    data: st.DataObject, made: tuple[dict[str, np.ndarray], tuple[int, ...]]
) -> None:
    columns, runs = made
    lanes, rows = next(iter(columns.values())).shape
    index = plain_index(PlainStore(columns, runs), ends_of(columns))
    for _ in range(data.draw(st.integers(1, 8))):
        window = data.draw(windows(rows))
        num_steps = data.draw(st.integers(1, 7))
        expected = naive_starts(columns, runs, window, num_steps)
        starts = index.starts(*window, num_steps=num_steps)
        assert starts is not None
        assert starts.total == len(expected)
        if expected:
            drawn = starts.draw(evenly_spread(len(expected)))
            assert sorted(pairs_of(drawn, window[0], lanes)) == expected
            fresh = plain_index(PlainStore(columns, runs), ends_of(columns)).starts(*window, num_steps=num_steps)
            assert fresh is not None
            assert fresh.draw(evenly_spread(len(expected))).tolist() == drawn.tolist()


@pytest.mark.usefixtures("blocks")
@settings(max_examples=200)
@given(st.data(), stores(), st.integers(1, 12), st.integers(1, 4))
def test_starts_of_a_window_that_moves_row_by_row_are_those_of_plain_loops(
    data: st.DataObject, made: tuple[dict[str, np.ndarray], tuple[int, ...]], length: int, num_steps: int
) -> None:
    columns, runs = made
    lanes, rows = next(iter(columns.values())).shape
    clears = data.draw(st.sets(st.integers(1, rows), max_size=2))
    store = PlainStore(columns)
    index = plain_index(store, ends_of(columns))
    floor = 0
    for next_id in range(1, rows + 1):
        floor = next_id if next_id in clears else floor
        window = max(floor, next_id - length), next_id
        store.runs = tuple(run for run in runs if run <= next_id)  # as a reader learns of them
        expected = naive_starts(columns, runs, window, num_steps)
        starts = index.starts(*window, num_steps=num_steps)
        assert starts is not None
        assert starts.total == len(expected)
        if expected:
            assert sorted(pairs_of(starts.draw(evenly_spread(len(expected))), window[0], lanes)) == expected
    assert len(store.reads) == len(set(store.reads))
    assert {name for name, _, _ in store.reads} <= {"step_type", "next_step_type", "done"}


def steps_of(lengths: Sequence[int], rows: int) -> dict[str, np.ndarray]:
    """Step types [lanes, rows] of episodes of one length a lane, boundaries included."""
    t = np.arange(rows)[None, :] % (np.array(lengths)[:, None] + 1)
    ends = np.array(lengths)[:, None]
    step_type = np.where(t == ends, LAST, np.where(t == 0, FIRST, MID)).astype(np.int32)
    next_step_type = np.where(t == ends, FIRST, np.where(t == ends - 1, LAST, MID)).astype(np.int32)
    return {"step_type": step_type, "next_step_type": next_step_type}


@pytest.mark.parametrize("num_steps", [1, 2, 9])
@pytest.mark.parametrize("lengths", [(3, 5), (20,) * 8, (1, 400, 5000, 37)])
def test_the_fast_way_to_a_row_is_the_plain_one(lengths: tuple[int, ...], num_steps: int) -> None:
    columns = steps_of(lengths, 5000)
    index = plain_index(PlainStore(columns))
    draws = np.random.default_rng(0).random(500)
    for next_id in (5, 900, 2500, 2501, 2502, 4999, 5000):
        window = max(0, next_id - 2000), next_id
        starts = index.starts(*window, num_steps=num_steps)
        assert starts is not None
        if starts.total:
            chosen = (draws * starts.total).astype(np.int64)
            assert starts.draw(draws).tolist() == starts._plainly(chosen).tolist()
            assert starts.draw(draws.reshape(50, 10)).tolist() == starts.draw(draws).reshape(50, 10).tolist()


def test_the_largest_draw_is_the_last_start() -> None:
    starts = plain_index(PlainStore(steps_of((3, 5), 1000))).starts(0, 1000, num_steps=2)
    assert starts is not None
    rows = starts.draw(np.array([0.0, LARGEST_DRAW])).tolist()
    assert len(set(rows)) == 2
    assert all(0 <= row < 2000 for row in rows)


def test_draws_are_spread_evenly_over_the_starts() -> None:
    starts = plain_index(PlainStore(steps_of((3, 5), 40))).starts(6, 39, num_steps=2)
    assert starts is not None
    draws = np.random.default_rng(0).random(100 * starts.total)
    counts = np.unique(starts.draw(draws), return_counts=True)[1]
    assert len(counts) == starts.total == starts.pairs
    assert abs(counts - 100).max() < 5 * 100**0.5


def test_long_episodes_after_short_ones_cost_no_memory() -> None:
    index = plain_index(PlainStore(steps_of((200_000,), 1_000_100)))
    draws = np.random.default_rng(0).random(100)
    for next_id in (10, 450_000, 1_000_100):
        starts = index.starts(0, next_id, num_steps=3)
        assert starts is not None
        assert starts.draw(draws).tolist() == starts._plainly((draws * starts.total).astype(np.int64)).tolist()
        assert len(starts._counts.guide) <= 10 * len(starts._counts.addends)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_starts_of_windows_that_ended_earlier_are_those_of_plain_loops(num_steps: int) -> None:
    columns = steps_of((3, 5), 40)
    for next_id in range(1, 40):
        index = plain_index(PlainStore(columns))
        assert index.starts(0, 40, num_steps=2) is not None
        starts = index.starts(3, next_id, num_steps=num_steps)
        assert starts is not None
        expected = naive_starts(columns, (), (3, next_id), num_steps)
        assert starts.total == len(expected)
        if expected:
            assert sorted(pairs_of(starts.draw(evenly_spread(len(expected))), 3, 2)) == expected


def test_starts_that_were_handed_out_stay_as_they_were() -> None:
    columns = steps_of((3, 5, 2), 4000)
    index = plain_index(PlainStore(columns))
    draws = evenly_spread(1000)
    starts = index.starts(0, 100, num_steps=2)
    assert starts is not None
    before = starts.draw(draws).tolist()
    for next_id in range(101, 4000, 13):
        assert index.starts(max(0, next_id - 100), next_id, num_steps=2) is not None
    assert starts.draw(draws).tolist() == before


# ---- the rule, case by case

TRAJECTORY_CASES = {
    # (step_type, next_step_type) of rows one after the other: which pairs of rows may be a sequence of two
    "inside an episode": ([(0, 1), (1, 1), (1, 2)], [0, 1]),
    "the last transition and its boundary": ([(1, 2), (2, 0)], [0]),
    "a boundary and the next episode": ([(2, 0), (0, 1)], []),
    "episodes of one step": ([(0, 2), (2, 0), (0, 2), (2, 0)], [0, 2]),
    "an exception of the environment": ([(0, 1), (1, 1), (0, 1), (1, 1)], [0, 2]),
    "an exception at the end, the boundary not stored": ([(1, 2), (0, 1)], []),
    "no boundaries at all": ([(0, 1), (1, 2), (0, 1), (1, 2)], [0, 2]),
    "a row in between is missing": ([(1, 1), (2, 0)], []),
    "a boundary that says MID": ([(2, 1), (1, 1)], []),
    "a boundary after a boundary": ([(2, 2), (2, 0)], []),
}


@pytest.mark.parametrize("case", TRAJECTORY_CASES)
def test_pairs_of_trajectory_rows(case: str) -> None:
    rows, pairs = TRAJECTORY_CASES[case]
    columns = dict(zip(("step_type", "next_step_type"), np.array(rows, np.int32).T[:, None], strict=True))
    assert drawn(columns, num_steps=2) == pairs


def test_single_steps_are_never_boundaries() -> None:
    assert drawn(steps_of((3,), 8), num_steps=1) == [0, 1, 2, 4, 5, 6]
    assert drawn(steps_of((3,), 4), num_steps=1) == [0, 1, 2]


@pytest.mark.parametrize(
    ("step_types", "pairs"),
    [([0, 1, 2, 0, 1, 2], [0, 1, 3, 4]), ([0, 1, 0, 1], [0, 2]), ([2, 2, 1], []), ([1, 1], [0])],
)
def test_pairs_of_time_steps(step_types: list[int], pairs: list[int]) -> None:
    columns = {"step_type": np.array([step_types], np.int32)}
    assert drawn(columns, num_steps=2) == pairs
    assert drawn(columns, num_steps=1) == list(range(len(step_types)))


def test_pairs_of_rows_with_a_flag() -> None:
    columns = {"done": np.array([[False, True, False, False, True, True]])}
    assert drawn(columns, num_steps=2, ends="done") == [0, 2, 3]
    assert drawn(columns, num_steps=3, ends="done") == [2]


def test_nothing_goes_on_across_the_start_of_a_run() -> None:
    columns = {"done": np.zeros((1, 6), np.bool)}
    assert drawn(columns, num_steps=2, ends="done", runs=(0, 3)) == [0, 1, 3, 4]


def drawn(
    columns: dict[str, np.ndarray], *, num_steps: int, ends: str | None = None, runs: Sequence[int] = ()
) -> list[int]:
    """The ids that sequences of lane 0 start at."""
    starts = plain_index(PlainStore(columns, runs), ends).starts(0, PlainStore(columns).next_id, num_steps=num_steps)
    assert starts is not None
    return sorted(starts.draw(evenly_spread(starts.total)).tolist()) if starts.total else []


def layouts(**leaves: tuple[str, tuple[int, ...]]) -> list[ColumnLayout]:
    return [
        ColumnLayout(
            path=name.replace("__", "/"),
            file_path=name,
            dtype=np.dtype(dtype),
            shape=shape,
            lanes=1,
            chunk_rows=1,
            slots=None,
        )
        for name, (dtype, shape) in leaves.items()
    ]


@pytest.mark.parametrize(
    ("leaves", "ends", "message"),
    [
        ({"reward": ("f4", ())}, None, r"must be said by a leaf 'step_type' .* got leaves 'reward'. Store a bool"),
        ({"over": ("?", ()), "reward": ("f4", ())}, None, r"got leaves 'over', 'reward'. Name the one .* ends='over'"),
        ({"step_type": ("f4", ())}, None, "where episodes end must be said by"),
        ({"step_type": ("i4", (2,))}, None, "where episodes end must be said by"),
        ({"a__step_type": ("i4", ()), "b__step_type": ("i4", ())}, None, "where episodes end must be said by"),
        ({"done": ("f4", ())}, "done", r"leaf 'done' must be bool \[\] to say where episodes end, got float32 \[\]"),
        ({"done": ("?", (1,))}, "done", r"leaf 'done' must be bool \[\] to say where episodes end, got bool \[1\]"),
        ({"done": ("?", ())}, "dones", r"ends must be the path of a bool \[\] leaf, one of 'done', got 'dones'"),
        ({"done": ("?", ())}, True, r"ends must be the path of a bool \[\] leaf, one of 'done', got True"),
    ],
)
def test_a_spec_that_does_not_say_where_episodes_end_is_refused(
    leaves: dict[str, tuple[str, tuple[int, ...]]], ends: Any, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        end_rule(layouts(**leaves), ends)


def test_leaves_below_a_folder_are_found() -> None:
    leaves = {"a": ("?", ()), "b__c__next_step_type": ("i4", ()), "b__c__step_type": ("i4", ()), "d__done": ("?", ())}
    rule = end_rule(layouts(**leaves))
    assert (rule.columns, rule.folder) == ((2, 1), "b/c/")
    assert end_rule(layouts(**leaves), "d/done").columns == (3,)


# ---- stores that are written meanwhile


def test_rows_that_were_overwritten_before_they_were_read_ask_for_another_window() -> None:
    store = PlainStore(steps_of((3, 5), 100))
    index = plain_index(store)
    store.intact_from = 30
    assert index.starts(20, 60, num_steps=2) is None
    store.reads.clear()
    starts = index.starts(31, 61, num_steps=2)
    assert starts is not None
    assert starts.total == len(naive_starts(store.arrays, (), (31, 61), 2))
    assert store.reads == [("step_type", 60, 61), ("next_step_type", 60, 61)]


def test_a_reader_that_fell_behind_a_whole_window_begins_anew() -> None:
    store = PlainStore(steps_of((3, 5), 100))
    index = plain_index(store)
    assert index.starts(0, 10, num_steps=2) is not None
    starts = index.starts(60, 80, num_steps=2)
    assert starts is not None
    assert starts.total == len(naive_starts(store.arrays, (), (60, 80), 2))
    assert store.reads[-1] == ("next_step_type", 60, 80)


def test_memory_stays_what_a_window_needs() -> None:
    columns = steps_of((2, 3, 1, 4), 60_000)
    store = PlainStore(columns)
    index = plain_index(store)
    index.starts(0, 1000, num_steps=2)
    tracemalloc.start()
    try:
        for next_id in range(1000, 60_000, 41):
            index.starts(next_id - 1000, next_id, num_steps=2)
            store.reads.clear()
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()


TRAJECTORY_SPEC = trajectories.trajectory_spec(
    trajectories.time_step_spec(ArraySpec([], "int64")), PolicyStep(ArraySpec([], "int64"))
)


def as_rows(columns: dict[str, np.ndarray], low: int, high: int) -> trajectories.Trajectory:
    """Rows [lanes, T] whose observation is their id."""
    step_type, next_step_type = (columns[name][:, low:high] for name in ("step_type", "next_step_type"))
    ids = np.broadcast_to(np.arange(low, high), step_type.shape)
    ones = np.ones(step_type.shape, np.float32)
    return trajectories.Trajectory(step_type, ids, ids, (), next_step_type, ones, ones)


def counted(buffer: UniformReplayBuffer, index: EpisodeIndex, num_steps: int = 2) -> int:
    starts = index.starts(*buffer._opened().window(), num_steps=num_steps)
    assert starts is not None
    return starts.total


@pytest.mark.usefixtures("blocks")
def test_starts_follow_a_real_store_through_eviction_clear_and_restart(tmp_path: Path) -> None:
    columns = steps_of((3, 5, 2), 200)
    path, runs, floor, next_id = tmp_path / "a.zarr", [0], 0, 0
    with UniformReplayBuffer(TRAJECTORY_SPEC, batch_size=3, max_length=17, path=path) as buffer:
        buffer.extend(as_rows(columns, 0, 2))
    next_id = 2
    with diskbuf.open(path) as reader:
        index = EpisodeIndex(reader._opened())
        for run in range(4):
            with diskbuf.open(path, "r+") as writer:
                runs.append(next_id)
                own = EpisodeIndex(writer._opened())
                for step in range(23):
                    if (run, step) in ((1, 5), (2, 22), (3, 0)):
                        writer.clear()
                        floor = next_id
                    writer.extend(as_rows(columns, next_id, next_id + 1 + step % 3))
                    next_id += 1 + step % 3
                    window = max(floor, next_id - 17), next_id
                    for num_steps in (1, 2, 4):
                        expected = len(naive_starts(columns, runs, window, num_steps))
                        assert counted(reader, index, num_steps) == counted(writer, own, num_steps) == expected


def test_only_the_columns_that_are_needed_are_read(tmp_path: Path) -> None:
    """The files of the others are gone, and so would be whoever touched them."""
    columns = steps_of((3, 5), 5000)
    path = tmp_path / "a.zarr"
    with UniformReplayBuffer(TRAJECTORY_SPEC, batch_size=2, max_length=None, path=path) as buffer:
        buffer.extend(as_rows(columns, 0, 5000))
    with diskbuf.open(path, verify=True) as buffer:
        for leaf in ("observation", "action"):
            for file in (path / leaf).glob("c.*"):
                file.write_bytes(bytes(file.stat().st_size // 2))
                file.unlink()
        assert counted(buffer, EpisodeIndex(buffer._opened())) == len(naive_starts(columns, (), (0, 5000), 2))
        assert len(diskbuf.episodes(buffer)) == len(naive_episodes(columns, (), (0, 5000)))


WRITER = """
import sys
import numpy as np
sys.path.insert(0, {tests!r})
from test_episodes import as_rows, steps_of
import diskbuf
columns = steps_of((3, 5), 400_000)
with diskbuf.open({path!r}, "r+") as buffer:
    for _ in sys.stdin:
        next_id = buffer.next_id
        for step_id in range(next_id, next_id + 40):
            buffer.add_batch(type(rows := as_rows(columns, step_id, step_id + 1))(
                *[leaf[:, 0] if isinstance(leaf, np.ndarray) else leaf for leaf in rows]))
        print(buffer.next_id, flush=True)
"""


def test_rows_of_a_writer_in_another_process_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    columns = steps_of((3, 5), 1000)
    with UniformReplayBuffer(TRAJECTORY_SPEC, batch_size=2, max_length=100, path=path) as buffer:
        buffer.extend(as_rows(columns, 0, 10))
    code = WRITER.format(tests=str(Path(__file__).parent), path=str(path))
    command = [sys.executable, "-c", code]
    with (
        diskbuf.open(path) as reader,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer,
    ):
        assert writer.stdin is not None
        assert writer.stdout is not None
        index = EpisodeIndex(reader._opened())
        for _ in range(6):
            writer.stdin.write("\n")
            writer.stdin.flush()
            next_id = int(writer.stdout.readline())
            window = max(0, next_id - 100), next_id
            assert counted(reader, index) == len(naive_starts(columns, (0, 10), window, 2))
        writer.stdin.close()
    assert writer.returncode == 0


def test_threads_that_share_an_index_all_get_the_starts_of_their_window() -> None:
    columns = steps_of((3, 5, 2), 3000)
    index = plain_index(PlainStore(columns))
    failures: list[Any] = []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for step in range(400):
            next_id = min(3000, max(1, step * 7 + int(rng.integers(-30, 30))))
            window = max(0, next_id - 40), next_id
            starts = index.starts(*window, num_steps=2)
            expected = naive_starts(columns, (), window, 2)
            if starts is None or starts.total != len(expected):
                failures.append((window, starts))
            elif expected and sorted(pairs_of(starts.draw(evenly_spread(len(expected))), window[0], 3)) != expected:
                failures.append(window)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []


# ---- the table


class PlainBuffer:
    """As much of a buffer as `episodes` needs."""

    def __init__(self, store: PlainStore) -> None:
        self.store = store

    def _opened(self) -> PlainStore:
        return self.store


def table_of(store: PlainStore, **options: Any) -> pa.Table:
    return diskbuf.episodes(PlainBuffer(store), **options)  # type: ignore[arg-type]


@pytest.mark.usefixtures("blocks")
@settings(max_examples=300)
@given(st.data(), stores())
def test_the_table_is_that_of_plain_loops(
    data: st.DataObject, made: tuple[dict[str, np.ndarray], tuple[int, ...]]
) -> None:
    columns, runs = made
    store = PlainStore(columns, runs)
    store.first_id, store.next_id = window = data.draw(windows(store.next_id))
    assert table_of(store, ends=ends_of(columns)).to_pylist() == naive_episodes(columns, runs, window)


@pytest.mark.usefixtures("blocks")
@given(st.data(), stores())
def test_the_tables_as_episodes_end_are_together_the_whole_table(
    data: st.DataObject, made: tuple[dict[str, np.ndarray], tuple[int, ...]]
) -> None:
    columns, runs = made
    store = PlainStore(columns, runs)
    store.first_id, store.next_id = data.draw(windows(store.next_id))
    buffer: Any = PlainBuffer(store)
    tables = list(episode_table.episode_blocks(buffer, ends=ends_of(columns)))
    whole = table_of(store, ends=ends_of(columns))
    assert pa.concat_tables(tables).sort_by([("first_id", "ascending"), ("lane", "ascending")]) == whole


@pytest.mark.usefixtures("blocks")
def test_the_table_is_that_of_what_was_left_when_it_was_read() -> None:
    store = PlainStore(steps_of((3, 5), 100))
    store.intact_from = 33
    assert table_of(store).to_pylist() == naive_episodes(store.arrays, (), (33, 100))


def test_an_empty_window_has_a_table_with_the_same_columns() -> None:
    with UniformReplayBuffer(TRAJECTORY_SPEC) as buffer:
        table = diskbuf.episodes(buffer)
    assert len(table) == 0
    assert table.schema == pa.schema(
        {
            "lane": pa.int32(),
            "first_id": pa.int64(),
            "last_id": pa.int64(),
            "length": pa.int64(),
            "return": pa.float64(),
            "end": pa.string(),
            "is_whole": pa.bool_(),
        }.items()
    )


def test_a_reward_that_is_not_a_number_spoils_no_other_return() -> None:
    columns = steps_of((2,), 9)
    reward = np.array([[1, np.nan, 0, np.inf, 1, 0, 1e30, 1, 0]], np.float32)
    returns = table_of(PlainStore({**columns, "reward": reward}))["return"].to_pylist()
    assert np.isnan(returns[0])
    assert returns[1:] == [np.inf, float(np.float32(1e30)) + 1]


def test_another_reward_is_summed_when_it_is_named() -> None:
    columns = {**steps_of((2,), 6), "reward": np.ones((1, 6), np.float32), "cost": np.full((1, 6), 3, np.int16)}
    assert table_of(PlainStore(columns), reward="cost")["return"].to_pylist() == [6.0, 6.0]
    with pytest.raises(SpecError, match="leaf 'coast' must be one real number a step to be summed, got no such leaf"):
        table_of(PlainStore(columns), reward="coast")


def test_a_reward_that_is_a_vector_is_no_return() -> None:
    spec = {"done": ArraySpec([], "bool"), "reward": ArraySpec([2], "float32")}
    with UniformReplayBuffer(spec) as buffer:
        buffer.add_batch({"done": np.array([True]), "reward": np.zeros([1, 2], np.float32)})
        assert diskbuf.episodes(buffer, ends="done")["return"].to_pylist() == [None]
        with pytest.raises(SpecError, match=r"leaf 'reward' must be one real number a step .* got float32 \[2\]"):
            diskbuf.episodes(buffer, ends="done", reward="reward")


def test_a_large_store_is_read_in_little_memory_and_its_frames_not_at_all(tmp_path: Path) -> None:
    lanes, steps = 2, 200_000
    spec = {"frame": ArraySpec([2048], "uint8"), "done": ArraySpec([], "bool"), "reward": ArraySpec([], "float32")}
    with UniformReplayBuffer(spec, batch_size=lanes, max_length=None, path=tmp_path / "a.zarr") as buffer:
        for _ in range(20):
            done = np.broadcast_to(np.arange(steps // 20) % 500 == 499, (lanes, steps // 20))
            frames = np.broadcast_to(np.zeros(2048, np.uint8), (*done.shape, 2048))
            buffer.extend({"frame": frames, "done": done, "reward": np.ones(done.shape, np.float32)})

        def refuse(*_: Any) -> None:
            raise AssertionError("the frames were read")

        for column in buffer._opened().columns:
            if column.layout.path == "frame":
                column.read_span = column.take = refuse  # type: ignore[method-assign,assignment]
        tracemalloc.start()
        try:
            table = diskbuf.episodes(buffer, ends="done")
            assert counted_flag(buffer) == 2 * 400 * 499
            assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
        finally:
            tracemalloc.stop()
    assert set(table["return"].to_pylist()) == {500.0}
    assert len(table) == 800


def counted_flag(buffer: UniformReplayBuffer) -> int:
    return counted(buffer, EpisodeIndex(buffer._opened(), ends="done"))


# ---- with environments


def collected(env: Any, path: Path, num_steps: int) -> list[trajectories.Trajectory]:
    """Drives an environment into a store; returns what was added."""
    policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=0)
    spec = trajectories.trajectory_spec(env.time_step_spec(), policy.policy_step_spec)
    rows: list[trajectories.Trajectory] = []
    with UniformReplayBuffer(spec, batch_size=env.batch_size, max_length=None, path=path) as buffer:
        DynamicStepDriver(env, policy, [rows.append, buffer.add_batch], num_steps=num_steps).run()
    return rows


@modes
def test_episodes_of_3_and_5_steps_are_counted_right_in_each_autoreset_mode(
    mode: AutoresetMode, tmp_path: Path
) -> None:
    lengths = [(3,), (5,)]
    ends = ("terminated", "truncated")
    with suite_gym.wrap(SyncVectorEnv(makers(lengths, ends=ends), autoreset_mode=mode)) as env:
        rows = collected(env, tmp_path / "a.zarr", num_steps=32)
    assert len(rows) == 20
    check_lanes(rows, lengths, ends)
    expected = []
    for lane, (length,) in enumerate(lengths):
        for episode, first in enumerate(range(0, 20, length + 1)):
            steps = range(first, min(first + length, 20))
            actions = [int(rows[step_id].action[lane]) for step_id in steps]
            expected.append(
                {
                    "lane": lane,
                    "first_id": first,
                    "last_id": steps[-1],
                    "length": len(steps),
                    "return": sum(reward_of(lane, episode, t, action) for t, action in enumerate(actions)),
                    "end": ends[episode % 2] if len(steps) == length else "open",
                    "is_whole": True,
                }
            )
    with diskbuf.open(tmp_path / "a.zarr") as buffer:
        table = diskbuf.episodes(buffer).to_pylist()
    assert table == sorted(expected, key=lambda row: (row["first_id"], row["lane"]))
    assert [sum(row["length"] for row in table if row["lane"] == lane) for lane in (0, 1)] == [15, 17]


@modes
def test_no_sequence_of_an_environment_leaves_its_episode_and_each_transition_has_its_successor(
    mode: AutoresetMode, tmp_path: Path
) -> None:
    lengths = [(3,), (5, 1)]
    with suite_gym.wrap(SyncVectorEnv(makers(lengths), autoreset_mode=mode)) as env:
        collected(env, tmp_path / "a.zarr", num_steps=60)
    with diskbuf.open(tmp_path / "a.zarr") as buffer:
        store = buffer._opened()
        first_id, next_id = store.window()
        starts = EpisodeIndex(store).starts(first_id, next_id, num_steps=2)
        assert starts is not None
        rows = starts.draw(evenly_spread(starts.total))
        pairs = buffer.read(first_id + rows[:, None] // 2 + np.arange(2), rows[:, None] % 2)
        everything = buffer.gather_all()
    assert (pairs.observation[:, 0, :2] == pairs.observation[:, 1, :2]).all()  # environment and episode
    assert (pairs.observation[:, 0, 2] + 1 == pairs.observation[:, 1, 2]).all()
    assert not pairs.is_boundary()[:, 0].any()
    assert pairs.is_last()[:, 0].sum() == everything.is_last()[:, :-1].sum() > 0
    assert len(pairs.reward) == (~everything.is_boundary()[:, :-1]).sum()


def test_an_exception_of_the_environment_leaves_a_broken_episode(tmp_path: Path) -> None:
    make = [lambda: CounterEnvironment(0, lengths=(4,), fails_at=(1, 2))]
    with suite_gym.wrap(SyncVectorEnv(make)) as env:
        policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=0)
        spec = trajectories.trajectory_spec(env.time_step_spec(), policy.policy_step_spec)
        with UniformReplayBuffer(spec, max_length=None, path=tmp_path / "a.zarr") as buffer:
            driver = DynamicStepDriver(env, policy, [buffer.add_batch], num_steps=12)
            with pytest.raises(RuntimeError, match="fails in episode 1 at 2"):
                driver.run()
            driver.run()
            table = diskbuf.episodes(buffer)
            assert drawn_pairs_cross_nothing(buffer)
    assert table["end"].to_pylist()[:3] == ["terminated", "broken", "terminated"]
    assert table["length"].to_pylist()[:3] == [4, 2, 4]


def drawn_pairs_cross_nothing(buffer: UniformReplayBuffer) -> bool:
    store = buffer._opened()
    starts = EpisodeIndex(store).starts(*store.window(), num_steps=2)
    assert starts is not None
    ids = starts.draw(evenly_spread(starts.total))[:, None] + np.arange(2) + buffer.first_id
    where = buffer.read(ids, 0).observation
    return bool((where[:, 0, 1] == where[:, 1, 1]).all())


def test_an_episode_that_a_restart_broke_off_or_eviction_cut_says_so(tmp_path: Path) -> None:
    columns = steps_of((6,), 100)
    path = tmp_path / "a.zarr"
    with UniformReplayBuffer(TRAJECTORY_SPEC, max_length=12, path=path) as buffer:
        buffer.extend(as_rows(columns, 0, 10))
        assert diskbuf.episodes(buffer).select(["first_id", "end", "is_whole"]).to_pylist() == [
            {"first_id": 0, "end": "truncated", "is_whole": True},
            {"first_id": 7, "end": "open", "is_whole": True},
        ]
    with diskbuf.open(path, "r+") as buffer:
        assert diskbuf.episodes(buffer)["end"].to_pylist() == ["truncated", "broken"]
        buffer.extend(as_rows(columns, 14, 20))
        assert diskbuf.episodes(buffer).select(["first_id", "last_id", "end", "is_whole"]).to_pylist() == [
            {"first_id": 4, "last_id": 5, "end": "truncated", "is_whole": False},
            {"first_id": 7, "last_id": 9, "end": "broken", "is_whole": True},
            {"first_id": 10, "last_id": 15, "end": "truncated", "is_whole": True},
        ]


def test_episodes_of_a_closed_buffer_are_refused() -> None:
    buffer = UniformReplayBuffer(TRAJECTORY_SPEC)
    buffer.close()
    with pytest.raises(diskbuf.ClosedError, match="must be open, but was closed"):
        diskbuf.episodes(buffer)
