"""Files in the form of D4RL, made with h5py from what a loop saw, become the rows that a driver would have stored."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from counted_episodes import assert_same_rows, collect, part, rows_of, see
from diskbuf_tools.cli import main

import diskbuf
from diskbuf.errors import OptionError, SpecError
from diskbuf.exchange.importing import import_store
from diskbuf.exchange.mapping import ColumnMap
from diskbuf.trajectories import StepType, Trajectory

NUM_STEPS = 40


def arrays(rows: Trajectory, *, is_dict: bool = False) -> dict[str, Any]:
    """What D4RL keeps of the first lane."""
    seen = see(rows, is_dict=is_dict)

    def observations(skip: int) -> Any:
        stacked = [episode.stacked() for episode in seen]
        if not is_dict:
            return np.concatenate([leaf[skip : len(leaf) - 1 + skip] for leaf in stacked])
        return {
            f"/{key}": np.concatenate([nest[key][skip : len(nest[key]) - 1 + skip] for nest in stacked])
            for key in ("where", "action")
        }

    found = {
        "actions": np.concatenate([episode.actions for episode in seen]),
        "rewards": np.concatenate([episode.rewards for episode in seen]).astype(np.float32),
        "terminals": np.concatenate([episode.terminated for episode in seen]),
        "timeouts": np.concatenate([episode.truncated for episode in seen]),
    }
    for name, skip in (("observations", 0), ("next_observations", 1)):
        leaves = observations(skip)
        found |= {f"{name}{key}": leaf for key, leaf in leaves.items()} if is_dict else {name: leaves}
    return found


def file_of(path: Path, datasets: dict[str, Any], **arguments: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in datasets.items():
            file.create_dataset(name, data=array, **arguments)
        file["metadata/algorithm"] = "SAC"
    return path


def imported(tmp_path: Path, datasets: dict[str, Any], *, mapping: ColumnMap | None = None, **options: Any) -> Any:
    path = file_of(tmp_path / "a.hdf5", datasets)
    import_store(path, tmp_path / "new.zarr", format="d4rl", mapping=mapping, options=options)
    return rows_of(tmp_path / "new.zarr")


@pytest.mark.parametrize("num_steps", [1, 2, 11, NUM_STEPS])
@pytest.mark.parametrize("is_dict", [False, True])
def test_rows_are_those_of_a_driver(tmp_path: Path, num_steps: int, is_dict: bool) -> None:
    rows = collect(tmp_path / "driven.zarr", num_steps, is_dict=is_dict)
    has_boundary_to_come = rows.next_step_type[0, -1] == StepType.LAST
    found = imported(tmp_path, arrays(rows, is_dict=is_dict))
    if has_boundary_to_come:  # the file has its observation already
        assert found.step_type[0, -1] == StepType.LAST
        found = part(found, slice(None, -1))
    assert_same_rows(found, rows)
    with diskbuf.open(tmp_path / "new.zarr") as buffer:
        assert diskbuf.verify(buffer.path, values=True).is_clean


def test_blocks_of_one_row_make_the_same_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = collect(tmp_path / "driven.zarr", NUM_STEPS)
    whole = imported(tmp_path, arrays(rows))
    monkeypatch.setattr("diskbuf.exchange.d4rl._BLOCK_BYTES", 1)
    import_store(tmp_path / "a.hdf5", tmp_path / "again.zarr", format="d4rl")
    assert_same_rows(rows_of(tmp_path / "again.zarr"), whole)


def test_without_next_observations_a_timeout_is_cut_one_step_earlier(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 11)  # terminated 1; truncated 3, 2, 1; terminated 4
    datasets = arrays(rows)
    del datasets["next_observations"]
    found = imported(tmp_path, datasets)
    observations = datasets["observations"]
    expected = np.concatenate(
        [observations[[0, 0]], observations[1:4], observations[4:6], observations[7:], observations[-1:]]
    )
    np.testing.assert_array_equal(found.observation[0], expected)
    assert found.step_type[0].tolist() == [0, 2, 0, 1, 2, 0, 2, 0, 1, 1, 1, 2]
    assert found.discount[0].tolist() == [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1]
    rewards = datasets["rewards"]
    assert found.reward[0].tolist() == [rewards[0], 0, *rewards[1:3], 0, rewards[4], 0, *rewards[7:], 0]


def test_float64_rewards_stay_float64(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 10)
    datasets = arrays(rows)
    datasets["rewards"] = datasets["rewards"].astype(np.float64) + 1e-9
    found = imported(tmp_path, datasets)
    assert found.reward.dtype == np.float64
    np.testing.assert_array_equal(found.reward[0][found.step_type[0] != StepType.LAST], datasets["rewards"])
    cast = ColumnMap(casts={"reward": "float32"})
    import_store(tmp_path / "a.hdf5", tmp_path / "cast.zarr", format="d4rl", mapping=cast)
    assert_same_rows(rows_of(tmp_path / "cast.zarr"), rows)


@pytest.mark.parametrize("missing", ["terminals", "timeouts"])
def test_an_end_that_no_dataset_tells_is_refused(tmp_path: Path, missing: str) -> None:
    datasets = arrays(collect(tmp_path / "driven.zarr", 10))
    datasets["done"] = datasets.pop(missing)
    with pytest.raises(OptionError, match=rf"no '{missing}'; it has .*'done'.* Name one, or say .*=none"):
        imported(tmp_path, datasets)
    assert not (tmp_path / "new.zarr").exists()


def test_another_dataset_tells_the_end_when_it_is_named(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 14, ends=("terminated",))
    seen = see(rows, ends=("terminated",))
    observations = [episode.stacked() for episode in seen]
    datasets = {
        "observations": np.concatenate([leaf[:-1] for leaf in observations]),
        "next_observations": np.concatenate([leaf[1:] for leaf in observations]),
        "actions": np.concatenate([episode.actions for episode in seen]),
        "rewards": np.concatenate([episode.rewards for episode in seen]).astype(np.float32),
        "done": np.concatenate([episode.terminated for episode in seen]).astype(np.float32),
    }
    assert_same_rows(imported(tmp_path, datasets, terminated="done", truncated="none"), rows)


def test_flags_that_are_no_flags_are_refused(tmp_path: Path) -> None:
    datasets = arrays(collect(tmp_path / "driven.zarr", 10))
    datasets["terminals"] = datasets["terminals"].astype(np.float32) / 2
    with pytest.raises(SpecError, match=r"'terminals' of .* must be 0 or 1, got 0\.5 as value 0"):
        imported(tmp_path, datasets)


def test_transitions_that_do_not_follow_each_other_are_refused(tmp_path: Path) -> None:
    datasets = arrays(collect(tmp_path / "driven.zarr", NUM_STEPS))
    datasets["timeouts"][6] = False
    with pytest.raises(SpecError, match="next observation of step 6 must be the observation of step 7"):
        imported(tmp_path, datasets)
    assert not (tmp_path / "new.zarr").exists()


def test_infos_are_refused_dropped_by_name_or_kept_as_policy_info(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 10)
    datasets = arrays(rows)
    steps = len(datasets["rewards"])
    datasets["infos/action_log_probs"] = np.arange(steps, dtype=np.float32)
    datasets["infos/qpos"] = np.zeros((steps, 2))
    with pytest.raises(OptionError, match=r"infos/action_log_probs \(float32 \[10\]\), infos/qpos"):
        imported(tmp_path, datasets)
    found = imported(
        tmp_path, datasets, mapping=ColumnMap(drop=["infos/qpos"]), policy_info=("infos/action_log_probs",)
    )
    kept = found.policy_info["action_log_probs"][found.step_type != StepType.LAST]
    assert kept.tolist() == list(range(steps))


def test_images_come_byte_for_byte_from_compressed_files(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (6, 40, 40, 3), np.uint8)
    datasets = {
        "observations": frames[:5],
        "next_observations": frames[1:],
        "actions": np.zeros((5, 2), ">f4"),
        "rewards": np.zeros(5, np.float32),
        "terminals": [False] * 4 + [True],
        "timeouts": [False] * 5,
    }
    path = file_of(tmp_path / "a.hdf5", datasets, compression="gzip", chunks=True)
    import_store(path, tmp_path / "new.zarr", format="d4rl")
    found = rows_of(tmp_path / "new.zarr")
    np.testing.assert_array_equal(found.observation[0], frames, strict=True)
    assert found.action.dtype == np.float32


@pytest.mark.parametrize("name", ["observations", "actions", "rewards"])
def test_a_dataset_that_is_missing_or_no_numbers_is_named(tmp_path: Path, name: str) -> None:
    datasets = arrays(collect(tmp_path / "driven.zarr", 10))
    text = datasets | {name: np.array([b"x"] * 10)}
    with pytest.raises(SpecError, match=rf"'{name}' of .* must be 10 rows of numbers, got \|S1 \[10\]"):
        imported(tmp_path, text)
    del datasets[name]
    with pytest.raises(OptionError, match=rf"must have a dataset '{name}'"):
        imported(tmp_path, datasets)


def test_files_that_are_no_hdf5_or_are_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.hdf5").write_bytes(b"something else")
    with pytest.raises(OptionError, match=r"must be an HDF5 file"):
        import_store(tmp_path / "a.hdf5", tmp_path / "new.zarr", format="d4rl")
    for place in (tmp_path, tmp_path / "b.hdf5"):
        with pytest.raises(FileNotFoundError, match="a source must be a file"):
            import_store(place, tmp_path / "new.zarr", format="d4rl")
    with pytest.raises(OptionError, match="Download it first"):
        import_store("s3://bucket/a.hdf5", tmp_path / "new.zarr", format="d4rl")


@pytest.mark.parametrize("options", [{"terminated": None}, {"truncated": ""}, {"policy_info": 3}, {"policy_info": [1]}])
def test_options_that_are_no_names_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(options))} must be a"):
        import_store(tmp_path / "a.hdf5", tmp_path / "new.zarr", format="d4rl", options=options)


def test_the_command_line_names_datasets_and_drops_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    datasets = arrays(collect(tmp_path / "driven.zarr", 10))
    datasets["done"] = datasets.pop("terminals")
    steps = len(datasets["rewards"])
    datasets |= {"infos/p": np.arange(steps, dtype=np.float32), "infos/qpos": np.zeros((steps, 2))}
    file = str(file_of(tmp_path / "a.hdf5", datasets))
    words = ["import", file, str(tmp_path / "new.zarr"), "--format", "d4rl"]
    assert main(words) == 2
    assert "Name one, or say --option terminated=none." in capsys.readouterr().err
    words += ["--option", "terminated=done", "--option", "policy_info=infos/p"]
    assert main(words) == 2
    assert "infos/qpos" in capsys.readouterr().err
    assert main([*words, "--drop", "infos/qpos"]) == 0
    found = rows_of(tmp_path / "new.zarr")
    assert found.policy_info["p"][found.step_type != StepType.LAST].tolist() == list(range(steps))
