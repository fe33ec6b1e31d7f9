"""`verify(values=True)`: values outside their bounds, and step types that contradict each other."""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counter_environment import makers
from diskbuf_tools import cli
from gymnasium.vector import SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import diskbuf
from diskbuf import maintenance
from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import suite_gym
from diskbuf.policies import RandomPolicy
from diskbuf.row_rules import BoundaryRule, Rule, StepTypeRule, SuccessionRule, rules_of
from diskbuf.store.reading import Store

FIRST, MID, LAST = 0, 1, 2
STEP = diskbuf.ArraySpec([], "int32")
STEPS = {"now": {"step_type": STEP, "next_step_type": STEP}, "frame": diskbuf.ArraySpec([3], "uint8")}
EPISODE = [(FIRST, MID), (MID, MID), (MID, LAST), (LAST, FIRST)]


def write_steps(path: Path, *lanes: list[tuple[int, int]], **kwargs: Any) -> Path:
    """A store with a lane for each list of (step_type, next_step_type), many rows to a chunk or few."""
    now, then = np.array(lanes, "int32").transpose(2, 0, 1)
    arguments = {"max_length": None, "options": diskbuf.StoreOptions(chunk_bytes=64)} | kwargs
    with diskbuf.UniformReplayBuffer(STEPS, len(lanes), path=path, **arguments) as buffer:
        buffer.extend({"now": {"step_type": now, "next_step_type": then}, "frame": np.zeros([*now.shape, 3], "uint8")})
    return path


@pytest.fixture(autouse=True, params=[1, 100, 2**22], ids="{} bytes at once".format)
def piece_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much is read at once makes no difference."""
    monkeypatch.setattr(maintenance, "_PIECE_BYTES", request.param)


def faults(path: Path) -> list[tuple[str | None, int | None, int | None, int | None]]:
    """(leaf, id, lane, count) of each, after a look at what all of them must be like."""
    assert diskbuf.verify(path).is_clean, "the files are whole"
    report = diskbuf.verify(path, values=True)
    with diskbuf.open(path) as buffer:
        assert report.steps == buffer.next_id - buffer.first_id
    for fault in report.faults:
        assert "\n" not in fault.message
        assert f"first in id {fault.step_id} of lane {fault.lane}" in fault.message
        assert Path(fault.path).is_file()
    return [(fault.leaf, fault.step_id, fault.lane, fault.count) for fault in report.faults]


# ---- step types


def collect(path: Path, *, num_steps: int = 60, **kwargs: Any) -> diskbuf.UniformReplayBuffer:
    """Runs a driver over environments whose episodes differ in length; returns the buffer, open."""
    env = suite_gym.wrap(SyncVectorEnv(makers([(3, 1), (5,), (2, 7)], **kwargs)))
    policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=0)
    buffer = diskbuf.UniformReplayBuffer(
        policy.trajectory_spec, 3, max_length=50, path=path, options=diskbuf.StoreOptions(chunk_bytes=64)
    )
    driver = DynamicStepDriver(env, policy, [buffer.add_batch], num_steps)
    for _ in range(4):  # each environment may fail once
        with contextlib.suppress(RuntimeError):
            driver.run()
            break
    env.close()
    return buffer


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_what_a_driver_writes_is_clean(tmp_path: Path, ends: str) -> None:
    collect(tmp_path / "store", ends=(ends,)).close()
    assert faults(tmp_path / "store") == []


def test_an_exception_of_the_environment_leaves_a_clean_store(tmp_path: Path) -> None:
    with collect(tmp_path / "store", fails_at=(1, 0)) as buffer:
        rows = buffer.gather_all()
    assert (rows.next_step_type[:, :-1] != rows.step_type[:, 1:]).any(), "an episode was broken off"
    assert faults(tmp_path / "store") == []


def test_two_runs_of_the_writer_leave_a_clean_store(tmp_path: Path) -> None:
    store = write_steps(tmp_path / "store", EPISODE[:2])
    write_steps(store, EPISODE[3:])
    assert faults(store) == []


def test_mixed_lanes_are_a_fault(tmp_path: Path) -> None:
    with collect(tmp_path / "store") as buffer:
        rows, spec = buffer.gather_all(), buffer.data_spec
    lanes = np.arange(rows.reward.shape[1]) % 3
    with diskbuf.UniformReplayBuffer(spec, 1, path=tmp_path / "mixed") as mixed:
        for step_id, lane in enumerate(lanes):
            mixed.add_batch(
                type(rows)(*(() if isinstance(leaf, tuple) else leaf[lane, step_id][None] for leaf in rows))
            )
    ((leaf, step_id, lane, count),) = faults(tmp_path / "mixed")
    assert (leaf, lane) == ("step_type", 0)
    assert step_id is not None
    assert count is not None
    assert count > 3


@pytest.mark.parametrize(
    ("rows", "leaf", "step_id"),
    [
        ([*EPISODE[:2], (MID, 3)], "now/next_step_type", 2),
        ([(-1, MID), *EPISODE[1:]], "now/step_type", 0),
        ([*EPISODE[:3], (LAST, MID), (MID, MID)], "now/next_step_type", 3),
        ([*EPISODE[:3], (LAST, LAST), (LAST, FIRST)], "now/next_step_type", 3),
        ([*EPISODE[:1], (MID, FIRST), *EPISODE], "now/next_step_type", 1),
        ([*EPISODE, (MID, MID)], "now/step_type", 4),
        ([*EPISODE[:2], (LAST, FIRST)], "now/step_type", 2),
        ([*EPISODE[:3], (MID, MID)], "now/step_type", 3),
    ],
    ids=str,
)
def test_each_contradiction_is_found_once_with_its_leaf_id_and_lane(
    tmp_path: Path, rows: list[tuple[int, int]], leaf: str, step_id: int
) -> None:
    clean = (EPISODE * 2)[: len(rows)]
    store = write_steps(tmp_path / "store", clean, rows, clean)
    assert faults(store) == [(leaf, step_id, 1, 1)]


@pytest.mark.parametrize(
    "rows",
    [
        [*EPISODE[:2], *EPISODE],
        [*EPISODE[:3], *EPISODE],
        EPISODE[2:] + EPISODE,
        [(FIRST, LAST), (LAST, FIRST)] * 3,
    ],
    ids=str,
)
def test_new_episodes_at_any_time_and_the_end_of_an_old_one_are_clean(
    tmp_path: Path, rows: list[tuple[int, int]]
) -> None:
    assert faults(write_steps(tmp_path / "store", rows)) == []


def test_only_the_window_is_looked_at(tmp_path: Path) -> None:
    store = write_steps(tmp_path / "store", [(7, 7), *EPISODE], max_length=4, keep_history=True)
    assert faults(store) == []


def test_leaves_of_these_names_that_are_no_step_types_are_let_be(tmp_path: Path) -> None:
    spec = {
        "alone": {"step_type": STEP},
        "float": {"step_type": diskbuf.ArraySpec([], "float32"), "next_step_type": STEP},
        "wide": {"step_type": diskbuf.ArraySpec([2], "int32"), "next_step_type": STEP},
        "my_step_type": STEP,
    }
    with diskbuf.UniformReplayBuffer(spec, path=tmp_path / "store") as buffer:
        nine = np.array([9], "int32")
        buffer.add_batch(
            {
                "alone": {"step_type": nine},
                "float": {"step_type": nine.astype("float32"), "next_step_type": nine},
                "wide": {"step_type": nine[:, None].repeat(2, axis=1), "next_step_type": nine},
                "my_step_type": nine,
            }
        )
    assert diskbuf.verify(tmp_path / "store", values=True).faults == ()


def test_a_step_type_outside_the_bounds_of_its_spec_is_told_once(tmp_path: Path) -> None:
    spec = dict.fromkeys(["step_type", "next_step_type"], diskbuf.BoundedArraySpec([], "int32", 0, 2))
    with diskbuf.UniformReplayBuffer(spec, path=tmp_path / "store") as buffer:
        buffer.add_batch({"step_type": np.array([7], "int32"), "next_step_type": np.array([1], "int32")})
    assert faults(tmp_path / "store") == [("step_type", 0, 0, 1)]


def by_hand(rows: NDArray[np.int32], runs: set[int]) -> dict[type[Rule], set[tuple[int, int]]]:
    """Which (id, lane) break which rule, row by row; rows [B, T, 2]."""
    found: dict[type[Rule], set[tuple[int, int]]] = {StepTypeRule: set(), BoundaryRule: set(), SuccessionRule: set()}
    for lane, pairs in enumerate(rows.tolist()):
        for step_id, (now, then) in enumerate(pairs):
            if now not in (0, 1, 2):
                found[StepTypeRule].add((step_id, lane))
            elif then in (0, 1, 2) and (now == LAST) != (then == FIRST):
                found[BoundaryRule].add((step_id, lane))
            if step_id and step_id not in runs:
                said = pairs[step_id - 1][1]
                if now in (0, 1, 2) and said in (0, 1, 2) and now not in (FIRST, said):
                    found[SuccessionRule].add((step_id, lane))
    return found


@given(
    rows=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=12),
    runs=st.sets(st.integers(0, 12)),
    size=st.integers(1, 12),
)
@settings(max_examples=300)
def test_the_rules_find_what_a_look_at_each_row_finds(rows: list[list[int]], runs: set[int], size: int) -> None:
    array = np.array(rows, "int32").reshape(len(rows), 2, 2).transpose(1, 0, 2)
    now_rule, _, boundary, succession = rules_of(["step_type", "next_step_type"], [STEP, STEP])
    for start in range(0, len(rows), size):
        piece = array[:, start : start + size]
        follows = np.array([start + row > 0 and start + row not in runs for row in range(piece.shape[1])])
        for rule in (now_rule, boundary, succession):
            rule.look(start, {0: piece[..., 0], 1: piece[..., 1]}, follows=follows)
    for rule in (now_rule, boundary, succession):
        expected = by_hand(array, runs)[type(rule)]
        breach = rule.breach
        assert (breach is None) == (not expected)
        if breach is not None:
            assert (breach.step_id, breach.lane) == min(expected)
            assert breach.count == len(expected)


# ---- bounds

BOUNDED = {
    "each": diskbuf.BoundedArraySpec([2], "float32", minimum=[-1, 0], maximum=[1, 10]),
    "plain": diskbuf.BoundedArraySpec([], "int64", -5, 5),
    "any": diskbuf.BoundedArraySpec([2], "uint8", 0, 255),
    "none": diskbuf.BoundedArraySpec([0], "float64", 0, 1),
    "free": diskbuf.ArraySpec([], "float64"),
}


def write_bounded(path: Path, **changes: tuple[int, int, Any]) -> Path:
    """Two lanes of 20 steps at the edges of their bounds, except that (lane, id, value) of a leaf."""
    rows = {
        "each": np.tile(np.array([-1, 10], "float32"), [2, 20, 1]),
        "plain": np.tile(np.array([-5, 5]), [2, 10]),
        "any": np.full([2, 20, 2], 255, "uint8"),
        "none": np.zeros([2, 20, 0]),
        "free": np.full([2, 20], np.nan),
    }
    for name, (lane, step_id, value) in changes.items():
        rows[name][lane, step_id] = value
    options = diskbuf.StoreOptions(chunk_bytes=64)
    with diskbuf.UniformReplayBuffer(BOUNDED, 2, max_length=None, path=path, options=options) as buffer:
        buffer.extend(rows)
    return path


def test_values_at_their_bounds_and_any_value_without_bounds_are_clean(tmp_path: Path) -> None:
    assert faults(write_bounded(tmp_path / "store")) == []


@pytest.mark.parametrize("value", [[-1.5, 0], [0, np.nan], [np.inf, 5], [1, 10.001]], ids=str)
def test_a_value_outside_its_own_bounds_is_a_fault(tmp_path: Path, value: list[float]) -> None:
    store = write_bounded(tmp_path / "store", each=(1, 13, value))
    assert faults(store) == [("each", 13, 1, 1)]


def test_faults_of_several_leaves_are_all_told_with_what_was_found(tmp_path: Path) -> None:
    store = write_bounded(tmp_path / "store", plain=(0, slice(3, 9), 6), each=(slice(None), 19, np.nan))
    assert sorted(faults(store)) == [("each", 19, 0, 2), ("plain", 3, 0, 6)]
    messages = {fault.leaf: fault.message for fault in diskbuf.verify(store, values=True).faults}
    assert messages == {
        "each": "leaf 'each' must be inside the bounds of its spec, but is not in 2 steps, "
        "first in id 19 of lane 0: got nan.",
        "plain": "leaf 'plain' must be from -5 to 5, but is not in 6 steps, first in id 3 of lane 0: got 6.",
    }


def test_repair_leaves_wrong_values_as_they_are(tmp_path: Path) -> None:
    store = write_bounded(tmp_path / "store", plain=(0, 3, 6))
    assert diskbuf.repair(store).actions == ()
    assert faults(store) == [("plain", 3, 0, 1)]


# ---- around it


def test_the_rows_beside_a_damaged_chunk_are_still_looked_at(tmp_path: Path) -> None:
    store = write_bounded(tmp_path / "store", plain=(0, slice(2, 18, 3), 6))
    chunk = store / "each" / "c.2.0.0"  # ids 8 to 11
    chunk.write_bytes(chunk.read_bytes()[:20])
    report = diskbuf.verify(store, values=True)
    assert report.steps == 16
    assert [(fault.leaf, fault.count) for fault in report.faults] == [(None, None), ("plain", 4)]


def test_a_store_that_lost_zarr_json_is_looked_at_after_repair(tmp_path: Path) -> None:
    store = write_bounded(tmp_path / "store", plain=(0, 3, 6))
    (store / "zarr.json").unlink()
    report = diskbuf.verify(store, values=True)
    assert (report.steps, len(report.faults)) == (0, 1)
    diskbuf.repair(store)
    assert faults(store) == [("plain", 3, 0, 1)]


def test_a_store_that_is_being_written_is_looked_at_too(tmp_path: Path) -> None:
    with collect(tmp_path / "store") as buffer:
        report = diskbuf.verify(tmp_path / "store", values=True)
        assert report.is_clean
        assert (report.first_id, report.next_id) == (buffer.first_id, buffer.next_id)


def test_columns_without_rules_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    whole = Store.read_columns

    def read_columns(self: Store, numbers: Sequence[int], first_id: int, next_id: int) -> Any:
        read.extend(numbers)
        return whole(self, numbers, first_id, next_id)

    monkeypatch.setattr(Store, "read_columns", read_columns)
    diskbuf.verify(write_bounded(tmp_path / "store"), values=True)
    assert {sorted(BOUNDED)[number] for number in read} == {"each", "plain"}


def test_a_second_writer_that_goes_on_meanwhile_hides_no_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = write_bounded(tmp_path / "store", plain=(0, 4, 6))
    whole = Store.read_columns
    calls = []

    def read_columns(self: Store, numbers: Sequence[int], first_id: int, next_id: int) -> Any:
        calls.append(first_id)
        if len(calls) == 2:
            diskbuf.open(store, "r+").close()
        return whole(self, numbers, first_id, next_id)

    monkeypatch.setattr(Store, "read_columns", read_columns)
    monkeypatch.setattr(maintenance, "_PIECE_BYTES", 100)
    report = diskbuf.verify(store, values=True)
    assert report.steps == 20
    assert [(fault.leaf, fault.step_id) for fault in report.faults] == [("plain", 4)]


def test_the_command_line_tells_of_values_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = write_bounded(tmp_path / "store", plain=(0, 3, 6))
    assert cli.main(["verify", str(store)]) == 0
    assert "values" not in capsys.readouterr().out
    assert cli.main(["verify", "--values", str(store)]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first == "leaf 'plain' must be from -5 to 5, but is not in 1 step, first in id 3 of lane 0: got 6."
    assert last.endswith(", values of 20 ids")
    assert cli.main(["verify", "--values", "--json", str(store)]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["faults"] == [dataclasses.asdict(fault) for fault in diskbuf.verify(store, values=True).faults]
    assert (said["steps"], said["faults"][0]["leaf"], said["is_clean"]) == (20, "plain", False)
