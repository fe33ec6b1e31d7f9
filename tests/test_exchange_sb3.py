"""Arrays of Stable-Baselines3's replay buffers, filled as its `add` fills them, become a driver's rows."""

import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counted_episodes import assert_same_rows, collect, lane_of, part, rows_of, see

import diskbuf
from diskbuf import BoundedArraySpec
from diskbuf.errors import OptionError, SpecError
from diskbuf.exchange.importing import import_store
from diskbuf.exchange.mapping import ColumnMap
from diskbuf.trajectories import StepType, Trajectory

OPTIONS = {"scalar_actions": True}


def arrays(rows: Trajectory, size: int, *, environments: int = 1, is_dict: bool = False) -> dict[str, Any]:
    """A ring of `size` steps, filled step by step from what loops saw, and written over when it is full."""
    streams = [transitions(rows, lane, is_dict=is_dict) for lane in range(environments)]
    steps = min(map(len, streams))
    shape = (size, environments)
    leaves = {"observations": np.zeros((*shape, 4), np.float32)}
    if is_dict:
        leaves = {
            "observations/where": np.zeros((*shape, 3), np.float32),
            "observations/action": np.zeros(shape, np.float32),
        }
    found: dict[str, Any] = {
        **leaves,
        **{f"next_{name}": leaf.copy() for name, leaf in leaves.items()},
        "actions": np.zeros((*shape, 1), np.int64),
        "rewards": np.zeros(shape, np.float32),
        "dones": np.zeros(shape, np.float32),
        "timeouts": np.zeros(shape, np.float32),
    }
    for t in range(steps):
        for lane, stream in enumerate(streams):
            place = t % size, lane
            observation, following, action, reward, terminated, truncated = stream[t]
            for name in leaves:
                key = name.partition("/")[2]
                found[name][place] = observation[key] if key else observation
                found[f"next_{name}"][place] = following[key] if key else following
            found["actions"][place] = action
            found["rewards"][place] = reward
            found["dones"][place] = terminated or truncated
            found["timeouts"][place] = truncated
    return found | {"pos": np.array(steps % size), "full": np.array(steps >= size)}


def transitions(rows: Trajectory, lane: int, *, is_dict: bool) -> list[Any]:
    return [
        (
            episode.observations[t],
            episode.observations[t + 1],
            episode.actions[t],
            episode.rewards[t],
            episode.terminated[t],
            episode.truncated[t],
        )
        for episode in see(rows, lane, is_dict=is_dict)
        for t in range(len(episode.actions))
    ]


def imported(tmp_path: Path, members: dict[str, Any], *, compressed: bool = False, **options: Any) -> Any:
    path = tmp_path / "buffer.npz"
    (np.savez_compressed if compressed else np.savez)(path, **members)
    import_store(path, tmp_path / "new.zarr", format="sb3", options=OPTIONS | options)
    return rows_of(tmp_path / "new.zarr")


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("is_dict", [False, True])
def test_rows_are_those_of_a_driver(tmp_path: Path, compressed: bool, is_dict: bool) -> None:
    rows = collect(tmp_path / "driven.zarr", 38, is_dict=is_dict)
    assert rows.next_step_type[0, -1] == StepType.MID  # it goes on
    members = arrays(rows, 50, is_dict=is_dict)
    assert not members["full"]
    assert_same_rows(imported(tmp_path, members, compressed=compressed), rows)
    assert diskbuf.verify(tmp_path / "new.zarr", values=True).is_clean


@pytest.mark.parametrize("size", [10, 13, 38])
def test_a_full_ring_is_unrolled(tmp_path: Path, size: int) -> None:
    rows = collect(tmp_path / "driven.zarr", 38)
    found = imported(tmp_path, arrays(rows, size))
    assert (found.step_type != StepType.LAST).sum() == size
    assert found.step_type[0, 0] == StepType.FIRST
    expected = part(rows, slice(rows.step_type.shape[1] - found.step_type.shape[1], None))
    expected.step_type[0, 0] = StepType.FIRST
    assert_same_rows(found, expected)


@pytest.mark.parametrize("block_bytes", [1, 2**22])
def test_environments_come_one_after_the_other(
    tmp_path: Path, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskbuf.exchange.stable_baselines._BLOCK_BYTES", block_bytes)
    rows = collect(tmp_path / "driven.zarr", 70, environments=2)
    members = arrays(rows, 50, environments=2)
    steps = int(members["pos"])
    found = imported(tmp_path, members)
    environments = found.observation[0, :, 0]
    assert environments.tolist() == sorted(environments)
    for lane in range(2):
        mine = part(found, environments == lane)
        assert (mine.step_type != StepType.LAST).sum() == steps
        if lane == 0:  # cut off behind its last action, whose observation follows
            assert (mine.step_type[0, -1], mine.discount[0, -2]) == (StepType.LAST, 1)
        length = mine.step_type.shape[1] - (lane == 0)
        expected = part(lane_of(rows, lane), slice(length))
        if lane == 0:
            assert expected.next_step_type[0, -1] == StepType.MID
            expected.next_step_type[0, -1] = StepType.LAST
        assert_same_rows(part(mine, slice(length)), expected)
    assert diskbuf.verify(tmp_path / "new.zarr", values=True).is_clean


def test_an_action_that_is_no_scalar_keeps_its_axis(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 5)
    assert imported(tmp_path, arrays(rows, 9), scalar_actions=False).action.shape[2:] == (1,)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("next_observations", "optimize_memory_usage=True doesn't keep them"),
        ("timeouts", "say truncated=none"),
        ("dones", ""),
        ("pos", ""),
        ("full", ""),
        ("rewards", ""),
    ],
)
def test_an_array_that_is_missing_is_named(tmp_path: Path, name: str, advice: str) -> None:
    members = arrays(collect(tmp_path / "driven.zarr", 5), 9)
    del members[name]
    with pytest.raises(OptionError, match=rf"must have an array '{name}' .*{advice}"):
        imported(tmp_path, members)
    assert not (tmp_path / "new.zarr").exists()


def test_without_timeouts_ends_are_terminations_where_that_is_said(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 5)
    members = arrays(rows, 9)
    del members["timeouts"]
    found = imported(tmp_path, members, truncated="none")
    assert (found.discount[0] == 0).sum() == (rows.next_step_type[0] == StepType.LAST).sum()


def test_python_objects_are_never_loaded(tmp_path: Path) -> None:
    members = arrays(collect(tmp_path / "driven.zarr", 5), 9)
    members["infos"] = np.array([{"a": 1}, None], object)
    with pytest.raises(
        OptionError, match=r"array 'infos' of .* must hold numbers, got Python objects, which are pickles"
    ):
        imported(tmp_path, members)


def test_a_timeout_that_is_no_end_is_refused(tmp_path: Path) -> None:
    members = arrays(collect(tmp_path / "driven.zarr", 5), 9)
    members["dones"][3], members["timeouts"][3] = 0, 1
    with pytest.raises(
        SpecError, match=r"'timeouts' of .* must be 0 where 'dones' is, got 1 in step 3 of environment 0"
    ):
        imported(tmp_path, members)


def test_an_end_that_was_lost_is_found(tmp_path: Path) -> None:
    members = arrays(collect(tmp_path / "driven.zarr", 5), 9)
    members["dones"][:], members["timeouts"][:] = 0, 0
    with pytest.raises(
        SpecError, match=r"next observation of step 0 must be the observation of step 1.* environment 0 of"
    ):
        imported(tmp_path, members)


def test_other_arrays_are_refused_or_dropped_by_name(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 5)
    np.savez(tmp_path / "buffer.npz", **arrays(rows, 9), seeds=np.arange(3))
    arguments: dict[str, Any] = {"format": "sb3", "options": OPTIONS}
    with pytest.raises(OptionError, match=r"seeds \(int64 \[3\]\)"):
        import_store(tmp_path / "buffer.npz", tmp_path / "new.zarr", **arguments)
    import_store(tmp_path / "buffer.npz", tmp_path / "new.zarr", mapping=ColumnMap(drop=["seeds"]), **arguments)
    assert rows_of(tmp_path / "new.zarr").step_type.shape == rows.step_type.shape


@pytest.mark.parametrize("compressed", [False, True])
def test_a_flipped_bit_is_found(tmp_path: Path, compressed: bool) -> None:
    members = arrays(collect(tmp_path / "driven.zarr", 200), 300)
    path = tmp_path / "buffer.npz"
    (np.savez_compressed if compressed else np.savez)(path, **members)
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("rewards.npy")
    data = bytearray(path.read_bytes())
    data[info.header_offset + 30 + len(info.filename) + info.compress_size // 2 + 20] ^= 16
    path.write_bytes(data)
    with pytest.raises(SpecError, match=r"array 'rewards' of .*buffer\.npz must be as it was written"):
        import_store(path, tmp_path / "new.zarr", format="sb3", options=OPTIONS)
    assert not (tmp_path / "new.zarr").exists()


@pytest.mark.parametrize("options", [{"terminated": None}, {"scalar_actions": "yes"}])
def test_options_outside_their_rule_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(options))} must be"):
        import_store(tmp_path / "a.npz", tmp_path / "new.zarr", format="sb3", options=options)


def test_a_file_that_is_no_npz_is_refused(tmp_path: Path) -> None:
    (tmp_path / "buffer.npz").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(OptionError, match="must be an NPZ file"):
        import_store(tmp_path / "buffer.npz", tmp_path / "new.zarr", format="sb3")


def test_discrete_actions_are_scalars_with_bounds(tmp_path: Path) -> None:
    members = arrays(collect(tmp_path / "driven.zarr", 20), 30)
    count = int(members["actions"].max()) + 1
    imported(tmp_path, members, scalar_actions=False, discrete=count)
    with diskbuf.open(tmp_path / "new.zarr") as buffer:
        assert buffer.data_spec.action == BoundedArraySpec([], "int64", 0, count - 1)
    members["actions"][3, 0] = count
    shutil.rmtree(tmp_path / "new.zarr")
    with pytest.raises(SpecError, match=f"must be from 0 to {count - 1}, got {count} in step 3 of environment 0"):
        imported(tmp_path, members, discrete=count)
    with pytest.raises(SpecError, match=r"'actions' of .* must be ints"):
        imported(tmp_path, members | {"actions": members["actions"].astype("float32")}, discrete=count)
    with pytest.raises(OptionError, match="discrete must be an int of at least 1, got 0"):
        imported(tmp_path, members, discrete=0)
