"""Data sets of the real Minari: made by it and read by us, written by us and loaded by it, and back."""

import json
import shutil
from pathlib import Path
from typing import Any

import gymnasium
import minari
import numpy as np
import optree
import pytest
from counted_episodes import Seen, assert_same_rows, collect, part, rows_of, see
from gymnasium import spaces
from minari.data_collector.episode_buffer import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage

import diskbuf
from diskbuf.errors import MissingExtraError, OptionError, SpecError, StoreExistsError
from diskbuf.exchange.exporting import export_store
from diskbuf.exchange.importing import import_store
from diskbuf.exchange.mapping import ColumnMap
from diskbuf.trajectories import PolicyStep, StepType, time_step_spec, trajectory_spec

FLOAT32 = ColumnMap(casts={"reward": "float32"})
NUMBERS = spaces.Box(-1, 1000, (4,), np.float32)
PARTS = spaces.Dict(where=spaces.Box(-1, 1000, (3,), np.float32), action=spaces.Box(-1, 1000, (), np.float32))


@pytest.fixture(autouse=True)
def _datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def made(
    tmp_path: Path,
    episodes: list[Any],
    *,
    observation: Any = NUMBERS,
    action: Any = None,
    data_format: str = "hdf5",
    **arguments: Any,
) -> Path:
    """A data set that Minari wrote; returns its folder."""
    folder = tmp_path / "minari" / "counter-v0"
    folder.mkdir(parents=True)
    storage = MinariStorage.new(
        folder / "data", observation, action or spaces.Discrete(10), data_format=data_format, **arguments
    )
    storage.update_metadata({"dataset_id": "counter-v0", "minari_version": minari.__version__})
    storage.update_episodes(episodes)
    return folder


def buffers(seen: list[Seen]) -> list[Any]:
    """Episodes as Minari's collector has them: Python's numbers, and the infos of each step."""
    return [
        EpisodeBuffer(
            seed=number,
            observations=optree.tree_map(lambda *leaves: list(leaves), *episode.observations),
            actions=episode.actions,
            rewards=episode.rewards,
            terminations=episode.terminated,
            truncations=episode.truncated,
            infos={"t": list(range(len(episode.observations)))},
        )
        for number, episode in enumerate(seen)
    ]


def imported(tmp_path: Path, folder: Path, **arguments: Any) -> Any:
    import_store(folder, tmp_path / "new.zarr", format="minari", **arguments)
    return rows_of(tmp_path / "new.zarr")


def exported(tmp_path: Path, name: str = "kept-v3", **options: Any) -> Path:
    folder = tmp_path / "minari" / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with diskbuf.open(tmp_path / "driven.zarr") as buffer:
        export_store(buffer, folder, format="minari", options=options)
    return folder


@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
@pytest.mark.parametrize("is_dict", [False, True])
def test_a_data_set_of_minari_is_the_rows_of_a_driver(tmp_path: Path, data_format: str, is_dict: bool) -> None:
    rows = collect(tmp_path / "driven.zarr", 38, is_dict=is_dict)
    observation = PARTS if is_dict else NUMBERS
    folder = made(tmp_path, buffers(see(rows, is_dict=is_dict)), observation=observation, data_format=data_format)
    found = imported(tmp_path, folder)
    assert_same_rows(found, rows, reward_dtype=np.float64)
    with diskbuf.open(tmp_path / "new.zarr") as new, diskbuf.open(tmp_path / "driven.zarr") as driven:
        assert new.data_spec.observation == driven.data_spec.observation
        assert new.data_spec.action == driven.data_spec.action
        assert new.data_spec.reward.dtype == np.float64
        assert diskbuf.episodes(new).drop(["return"]).equals(diskbuf.episodes(driven).drop(["return"]))
    import_store(folder / "data", tmp_path / "cast.zarr", format="minari", mapping=FLOAT32)
    assert_same_rows(rows_of(tmp_path / "cast.zarr"), rows)
    assert diskbuf.verify(tmp_path / "cast.zarr", values=True).is_clean


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
def test_minari_loads_an_export(tmp_path: Path, data_format: str) -> None:
    rows = collect(tmp_path / "driven.zarr", 38, is_dict=True)
    seen = see(rows, is_dict=True)[:-1]  # the last one goes on
    exported(tmp_path, data_format=data_format)
    dataset = minari.load_dataset("kept-v3")
    assert dataset.observation_space == PARTS
    assert dataset.action_space == spaces.Discrete(10)
    assert dataset.env_spec is None
    episodes = list(dataset.iterate_episodes())
    with diskbuf.open(tmp_path / "driven.zarr") as buffer:
        open_steps = diskbuf.episodes(buffer)["length"][-1].as_py()
    assert len(episodes) == dataset.total_episodes == len(seen) + (open_steps > 1)
    assert dataset.total_steps == sum(map(len, episodes))
    for episode, expected in zip(episodes, seen, strict=False):
        for key, leaf in expected.stacked().items():
            np.testing.assert_array_equal(episode.observations[key], leaf, strict=True)
        np.testing.assert_array_equal(episode.actions, np.array(expected.actions), strict=True)
        np.testing.assert_array_equal(episode.rewards, np.array(expected.rewards, np.float32), strict=True)
        assert episode.terminations.tolist() == expected.terminated
        assert episode.truncations.tolist() == expected.truncated
    assert all("seed" not in metadata for metadata in dataset.storage.get_episode_metadata(range(len(episodes))))
    assert list(minari.list_local_datasets()) == ["kept-v3"]


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
def test_a_store_comes_back(tmp_path: Path, data_format: str) -> None:
    rows = collect(tmp_path / "driven.zarr", 42, is_dict=True)
    found = imported(tmp_path, exported(tmp_path, data_format=data_format))
    whole = int(np.flatnonzero(rows.step_type[0] == StepType.LAST)[-1]) + 1
    assert_same_rows(part(found, slice(whole)), part(rows, slice(whole)))
    rest = part(found, slice(whole, None))  # cut off one step earlier, with the last observation as the final one
    np.testing.assert_array_equal(rest.observation["where"], rows.observation["where"][:, whole:])
    assert rest.next_step_type[0, -2:].tolist() == [StepType.LAST, StepType.FIRST]
    assert (rest.discount == 1).all()
    with diskbuf.open(tmp_path / "new.zarr") as new, diskbuf.open(tmp_path / "driven.zarr") as driven:
        assert new.data_spec == driven.data_spec


def test_nests_dtypes_images_and_policy_info_come_back_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    observation = (
        {
            "frame": diskbuf.BoundedArraySpec([40, 50, 3], "uint8", 0, 255),
            "wide": diskbuf.BoundedArraySpec([2], "float64", -np.inf, 1),
        },
        (diskbuf.BoundedArraySpec([3], "int8", [0, -1, -2], [5, 6, 7]), diskbuf.BoundedArraySpec([], "int16", 0, 9)),
    )
    action = {"a": diskbuf.BoundedArraySpec([], "int64", -5, 5), "b": diskbuf.BoundedArraySpec([2], "float32", -1, 1)}
    info = {"p": diskbuf.ArraySpec([], "float32"), "q": {"r": diskbuf.ArraySpec([2], "int32")}}
    steps = time_step_spec(observation)._replace(reward=diskbuf.ArraySpec((), "float64", name="reward"))
    spec = trajectory_spec(steps, PolicyStep(action, (), info))
    rows: Any = optree.tree_map(
        lambda leaf: rng.integers(0, 5 if leaf.dtype != np.uint8 else 256, (1, 5, *leaf.shape)).astype(leaf.dtype), spec
    )
    rows = rows._replace(
        step_type=np.array([[0, 1, 2, 0, 2]], np.int32),
        next_step_type=np.array([[1, 2, 0, 2, 0]], np.int32),
        discount=np.array([[1, 1, 1, 0, 1]], np.float32),
        reward=np.array([[0.1, 1 / 3, 0, -1e300, 0]]),
    )
    with diskbuf.UniformReplayBuffer(spec, 1, None, path=tmp_path / "driven.zarr") as buffer:
        buffer.extend(rows)
    for data_format in ("hdf5", "arrow"):
        folder = exported(tmp_path, f"{data_format}-v0", data_format=data_format)
        new = tmp_path / f"{data_format}.zarr"
        import_store(folder, new, format="minari", options={"policy_info": "policy_info"})
        found = rows_of(new)
        for leaf, other in zip(
            optree.tree_leaves(found.observation), optree.tree_leaves(rows.observation), strict=True
        ):
            np.testing.assert_array_equal(leaf, other, strict=True)
        is_step = rows.step_type[0] != StepType.LAST
        for leaf, other in zip(
            optree.tree_leaves(part(found, is_step)), optree.tree_leaves(part(rows, is_step)), strict=True
        ):
            np.testing.assert_array_equal(leaf, other, strict=True)
        with diskbuf.open(new) as buffer:
            assert buffer.data_spec == spec


def test_spaces_are_those_of_the_specs(tmp_path: Path) -> None:
    observation = {
        "box": diskbuf.BoundedArraySpec([2], "float32", [-1, 0], [1, np.inf]),
        "free": diskbuf.ArraySpec([2, 2], "float64"),
        "small": diskbuf.ArraySpec([3], "int16"),
        "which": diskbuf.BoundedArraySpec([], "int64", 2, 4),
        "flag": diskbuf.ArraySpec([1], "bool"),
    }
    spec = trajectory_spec(
        time_step_spec(observation), PolicyStep(diskbuf.BoundedArraySpec([2], "int32", 0, 1), (), ())
    )
    with diskbuf.UniformReplayBuffer(spec, 1, None, path=tmp_path / "driven.zarr") as buffer:
        row: Any = optree.tree_map(lambda leaf: np.full((1, 3, *leaf.shape), 0, leaf.dtype), spec)
        row = row._replace(
            step_type=np.array([[0, 1, 2]], np.int32),
            next_step_type=np.array([[1, 2, 0]], np.int32),
            discount=np.ones((1, 3), np.float32),
        )
        row.observation["which"][:] = 2
        buffer.extend(row)
    exported(tmp_path)
    dataset = minari.load_dataset("kept-v3")
    assert dataset.observation_space == spaces.Dict(
        box=spaces.Box(np.array([-1, 0], np.float32), np.array([1, np.inf], np.float32)),
        free=spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
        small=spaces.Box(-(2**15), 2**15 - 1, (3,), np.int16),
        which=spaces.Discrete(3, start=2),
        flag=spaces.Box(0, 1, (1,), np.bool_),
    )
    assert dataset.action_space == spaces.Box(0, 1, (2,), np.int32)
    assert len(dataset[0]) == 2


def test_an_episode_that_no_flag_ends_goes_on_only_as_the_last(tmp_path: Path) -> None:
    def episode(value: int) -> Any:
        nothing = np.zeros(2, np.bool)
        observations = np.full((3, 4), value, np.float32)
        return EpisodeBuffer(
            observations=observations, actions=np.zeros(2, np.int64), rewards=np.zeros(2), terminations=nothing,
            truncations=nothing,
        )  # fmt: skip

    found = imported(tmp_path, made(tmp_path, [episode(1), episode(2)]))
    assert found.step_type[0].tolist() == [0, 1, 2, 0, 1]
    assert found.next_step_type[0].tolist() == [1, 2, 0, 1, 1]
    assert (found.discount == 1).all()


def test_infos_are_kept_where_they_are_named(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 38)
    folder = made(tmp_path, buffers(see(rows)))
    assert imported(tmp_path, folder).policy_info == ()
    import_store(folder, tmp_path / "kept.zarr", format="minari", options={"policy_info": "t"})
    found = rows_of(tmp_path / "kept.zarr")
    is_step = found.step_type[0] != StepType.LAST
    np.testing.assert_array_equal(found.policy_info[0][is_step], rows.observation[0, is_step, 2])
    with pytest.raises(OptionError, match=r"policy_info must be an info of .*, got 'u'. There are 't'"):
        import_store(folder, tmp_path / "other.zarr", format="minari", options={"policy_info": "u"})


def test_an_episode_that_minaris_arrow_storage_reads_in_parts_is_refused(tmp_path: Path) -> None:
    steps = 2**17 + 5
    ends = np.zeros(steps, np.bool)
    ends[-1] = True
    long = EpisodeBuffer(
        observations=np.zeros((steps + 1, 4), np.float32), actions=np.zeros(steps, np.int64), rewards=np.zeros(steps),
        terminations=ends, truncations=ends,
    )  # fmt: skip
    folder = made(tmp_path, [long], data_format="arrow")
    with pytest.raises(SpecError, match=r"episode 0 of .* must have 131077 steps, got \d+. Minari's Arrow storage"):
        imported(tmp_path, folder)
    assert not (tmp_path / "new.zarr").exists()


def test_a_space_that_holds_no_numbers_is_named(tmp_path: Path) -> None:
    text = spaces.Dict(x=NUMBERS, text=spaces.Text(5))
    ends = np.ones(1, np.bool)
    episode = EpisodeBuffer(
        observations={"x": np.zeros((2, 4), np.float32), "text": ["a", "b"]}, actions=np.zeros(1, np.int64),
        rewards=np.zeros(1), terminations=ends, truncations=ends,
    )  # fmt: skip
    with pytest.raises(OptionError, match=r"leaf 'observation/text' must be numbers"):
        imported(tmp_path, made(tmp_path, [episode], observation=text))


def test_an_environment_is_never_made_to_ask_it_for_its_spaces(tmp_path: Path) -> None:
    folder = made(tmp_path, buffers(see(collect(tmp_path / "driven.zarr", 38))))
    file = folder / "data" / "metadata.json"
    described = json.loads(file.read_text())
    del described["action_space"]
    file.write_text(json.dumps(described | {"env_spec": gymnasium.spec("CartPole-v1").to_json()}))
    with pytest.raises(OptionError, match=r"metadata\.json must have action_space"):
        imported(tmp_path, folder)


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match="must be a data set of Minari"):
        imported(tmp_path, tmp_path / "empty")
    folder = made(tmp_path, buffers(see(collect(tmp_path / "driven.zarr", 38))))
    (folder / "data" / "main_data.hdf5").write_bytes(b"x" * 100)
    with pytest.raises((SpecError, OSError)):
        imported(tmp_path, folder)
    assert not (tmp_path / "new.zarr").exists()


def test_an_id_that_minari_would_not_take_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    collect(tmp_path / "driven.zarr", 38)
    for name in ("kept", "kept v0"):
        with pytest.raises(OptionError, match=r"dataset_id must be NAME-vNUMBER"):
            exported(tmp_path, name)
        assert not (tmp_path / "minari" / name).exists()
    exported(tmp_path, "elsewhere", dataset_id="named-v1")
    shutil.move(tmp_path / "minari" / "elsewhere", tmp_path / "minari" / "named-v1")
    assert minari.load_dataset("named-v1").spec.dataset_id == "named-v1"


def test_an_existing_data_set_is_left_as_it_is(tmp_path: Path) -> None:
    collect(tmp_path / "driven.zarr", 38)
    exported(tmp_path)
    with pytest.raises(StoreExistsError):
        exported(tmp_path)
    assert minari.load_dataset("kept-v3").total_episodes > 1


def test_discounts_that_minari_has_not_are_refused(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 38)
    rows.discount[0, 3] = 0.5
    with diskbuf.open(tmp_path / "driven.zarr") as buffer:
        spec = buffer.data_spec
    with diskbuf.UniformReplayBuffer(spec, 1, None, path=tmp_path / "other.zarr") as buffer:
        buffer.extend(rows)
        with pytest.raises(OptionError, match=r"discounts must be 1, .* got 0\.5 in id 3 of lane 0. Export to rlds"):
            export_store(buffer, tmp_path / "a-v0", format="minari")
    assert not (tmp_path / "a-v0").exists()


def test_without_minari_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "minari", None)
    with pytest.raises(MissingExtraError, match=r"diskbuf\[minari\]"):
        imported(tmp_path, tmp_path)


def test_images_that_minari_compressed_come_as_minari_shows_them(tmp_path: Path) -> None:
    image = spaces.Box(0, 255, (32, 40, 3), np.uint8)
    frames = np.random.default_rng(0).integers(0, 256, (3, 32, 40, 3), np.uint8)
    ends = np.array([False, True])
    episode = EpisodeBuffer(
        observations=frames, actions=np.zeros(2, np.int64), rewards=np.zeros(2), terminations=ends, truncations=ends
    )
    folder = made(tmp_path, [episode], observation=image, jpeg_encoding=True)
    found = imported(tmp_path, folder)
    np.testing.assert_array_equal(found.observation[0], minari.load_dataset("counter-v0")[0].observations, strict=True)
    assert (found.observation[0] != frames).any()
