"""Steps in the form of RLDS: written by us and read with tf.data, written with tf.train.Example and read by us."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import optree
import pytest
from counted_episodes import assert_same_rows, collect, lane_of, part, rows_of, see

import diskbuf
from diskbuf.errors import OptionError, SpecError, StoreFormatError
from diskbuf.exchange.exporting import export_store
from diskbuf.exchange.importing import import_store
from diskbuf.exchange.mapping import ColumnMap
from diskbuf.exchange.tf_record import read_records
from diskbuf.trajectories import StepType, Trajectory

FEATURES = {
    "observation": {"dtype": "float32", "shape": [4]},
    "action": {"dtype": "int64", "shape": []},
    "reward": {"dtype": "float32", "shape": []},
    "is_first": {"dtype": "bool", "shape": []},
    "is_last": {"dtype": "bool", "shape": []},
    "is_terminal": {"dtype": "bool", "shape": []},
}


def exported(tmp_path: Path, store: str = "driven.zarr") -> Path:
    with diskbuf.open(tmp_path / store) as buffer:
        export_store(buffer, tmp_path / "steps.rlds")
    return tmp_path / "steps.rlds"


def again(tmp_path: Path, **arguments: Any) -> Any:
    import_store(tmp_path / "steps.rlds", tmp_path / "new.zarr", **arguments)
    return rows_of(tmp_path / "new.zarr")


def write(folder: Path, steps: list[dict[str, Any]], features: dict[str, Any] = FEATURES) -> Path:
    """Writes steps as somebody else would, with TensorFlow."""
    import tensorflow as tf

    folder.mkdir()
    with tf.io.TFRecordWriter(str(folder / "steps.tfrecord")) as writer:
        for step in steps:
            found = {}
            for name, value in step.items():
                array = np.asarray(value).reshape(-1)
                found[name] = (
                    tf.train.Feature(float_list=tf.train.FloatList(value=array))
                    if array.dtype.kind == "f"
                    else tf.train.Feature(int64_list=tf.train.Int64List(value=array.astype(np.int64)))
                )
            writer.write(tf.train.Example(features=tf.train.Features(feature=found)).SerializeToString())
    (folder / "features.json").write_text(json.dumps({"features": features}))
    return folder


def steps_of(rows: Trajectory) -> list[dict[str, Any]]:
    """What RLDS has of the first lane: a step more for each episode that has ended."""
    steps = []
    for episode in see(rows):
        ended = episode.terminated[-1] or episode.truncated[-1]
        for t in range(len(episode.actions) + ended):
            is_last = t == len(episode.actions)
            steps.append(
                {
                    "observation": episode.observations[t],
                    "action": 0 if is_last else episode.actions[t],
                    "reward": np.float32(0 if is_last else episode.rewards[t]),
                    "is_first": t == 0,
                    "is_last": is_last,
                    "is_terminal": is_last and episode.terminated[-1],
                }
            )
    return steps


@pytest.mark.parametrize("is_dict", [False, True])
def test_a_store_comes_back(tmp_path: Path, is_dict: bool) -> None:
    rows = collect(tmp_path / "driven.zarr", 38, is_dict=is_dict)
    exported(tmp_path)
    assert_same_rows(again(tmp_path), rows)
    with diskbuf.open(tmp_path / "new.zarr") as found, diskbuf.open(tmp_path / "driven.zarr") as driven:
        assert found.data_spec == driven.data_spec
        assert diskbuf.episodes(found).equals(diskbuf.episodes(driven))


def test_tf_data_reads_an_export(tmp_path: Path) -> None:
    import tensorflow as tf

    rows = collect(tmp_path / "driven.zarr", 38, is_dict=True)
    folder = exported(tmp_path)
    features = {
        name: tf.io.FixedLenFeature(feature["shape"], tf.int64 if feature["dtype"] in ("int64", "bool") else tf.float32)
        for name, feature in json.loads((folder / "features.json").read_text())["features"].items()
    }
    dataset = tf.data.TFRecordDataset(str(folder / "steps.tfrecord"))
    parsed = next(iter(dataset.map(lambda record: tf.io.parse_single_example(record, features)).batch(1000)))
    found = {name: tensor.numpy() for name, tensor in parsed.items()}
    assert set(found) == {
        "observation/action", "observation/where", "action", "reward", "discount", "is_first", "is_last", "is_terminal",
    }  # fmt: skip
    np.testing.assert_array_equal(found["observation/where"], rows.observation["where"][0], strict=True)
    np.testing.assert_array_equal(found["reward"], rows.reward[0], strict=True)
    np.testing.assert_array_equal(found["discount"], rows.discount[0], strict=True)
    np.testing.assert_array_equal(found["is_first"], rows.step_type[0] == StepType.FIRST)
    np.testing.assert_array_equal(found["is_last"], rows.step_type[0] == StepType.LAST)
    terminal = np.flatnonzero(rows.discount[0] == 0) + 1
    np.testing.assert_array_equal(np.flatnonzero(found["is_terminal"]), terminal)
    is_step = found["is_last"] == 0
    np.testing.assert_array_equal(found["action"][is_step], rows.action[0][is_step], strict=True)


def test_steps_that_tensorflow_wrote_are_the_rows_of_a_driver(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 38)
    write(tmp_path / "steps.rlds", steps_of(rows))
    assert_same_rows(again(tmp_path), rows)
    assert diskbuf.verify(tmp_path / "new.zarr", values=True).is_clean


def test_the_discount_of_an_end_is_what_is_terminal_says(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 38)
    steps = [step | {"discount": np.float32(1)} for step in steps_of(rows)]  # as many data sets have it
    write(tmp_path / "steps.rlds", steps, FEATURES | {"discount": {"dtype": "float32", "shape": []}})
    assert_same_rows(again(tmp_path), rows)


def test_lanes_come_one_episode_after_the_other(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 60, environments=2)
    exported(tmp_path)
    found = again(tmp_path)
    with diskbuf.open(tmp_path / "driven.zarr") as buffer:
        table = diskbuf.episodes(buffer).to_pylist()
    begin = 0
    for number, piece in enumerate(table):
        steps = piece["length"]
        is_cut = piece["end"] == "open" and number < len(table) - 1  # its last row's action leads nowhere
        if is_cut and steps == 1:
            continue
        length = steps + (piece["end"] != "open")
        expected = part(lane_of(rows, piece["lane"]), slice(piece["first_id"], piece["first_id"] + length))
        got = part(found, slice(begin, begin + length))
        np.testing.assert_array_equal(got.observation, expected.observation)
        kept = slice(steps - is_cut)
        np.testing.assert_array_equal(part(got, kept).reward, part(expected, kept).reward)
        np.testing.assert_array_equal(part(got, kept).action, part(expected, kept).action)
        assert not is_cut or (got.step_type[0, -1], got.discount[0, -2]) == (StepType.LAST, 1)
        begin += length
    assert begin == found.reward.shape[1]
    assert diskbuf.verify(tmp_path / "new.zarr", values=True).is_clean


def test_all_dtypes_and_nests_come_back_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    observation = (
        {"frame": diskbuf.BoundedArraySpec([5, 4, 3], "uint8", 0, 255), "wide": diskbuf.ArraySpec([2], "float64")},
        [diskbuf.ArraySpec([], "bool"), diskbuf.ArraySpec([3], "bool"), diskbuf.ArraySpec([0, 2], "float32")],
        diskbuf.ArraySpec([2], "float16"),
    )
    action = {"a": diskbuf.BoundedArraySpec([], "int32", -5, 5), "b": diskbuf.ArraySpec([2], "uint64")}
    info = {"p": diskbuf.ArraySpec([], "float32")}
    steps = diskbuf.trajectories.time_step_spec(observation)
    steps = steps._replace(reward=diskbuf.ArraySpec((), "float64", name="reward"))
    spec = diskbuf.trajectories.trajectory_spec(steps, diskbuf.trajectories.PolicyStep(action, (), info))

    def drawn(leaf: Any) -> Any:
        raw = rng.integers(0, 256, (1, 7, *leaf.shape, leaf.dtype.itemsize), np.uint8)
        return raw[..., 0] > 99 if leaf.dtype == bool else raw.view(leaf.dtype)[..., 0]

    rows: Any = optree.tree_map(drawn, spec)
    rows = rows._replace(
        step_type=np.array([[0, 1, 2, 0, 2, 0, 1]], np.int32),
        next_step_type=np.array([[1, 2, 0, 2, 0, 1, 1]], np.int32),
        discount=np.array([[0.5, 0.9, 1, 0, 1, 1, 1]], np.float32),
        reward=np.array([[0.1, 1 / 3, 0, -1e300, 0, 5, 6]]),
    )
    with diskbuf.UniformReplayBuffer(spec, 1, None, path=tmp_path / "driven.zarr") as buffer:
        buffer.extend(rows)
    exported(tmp_path)
    found = again(tmp_path)
    assert_same_bits(found.observation, rows.observation)
    is_step = rows.step_type[0] != StepType.LAST
    assert_same_bits(part(found, is_step), part(rows, is_step))
    with diskbuf.open(tmp_path / "new.zarr") as buffer:
        assert buffer.data_spec == spec


def assert_same_bits(found: Any, expected: Any) -> None:
    leaves = zip(optree.tree_leaves(found), optree.tree_leaves(expected), strict=True)
    for leaf, other in leaves:
        assert (leaf.dtype, leaf.shape, leaf.tobytes()) == (other.dtype, other.shape, other.tobytes())


def test_the_end_without_its_boundary_is_kept_as_far_as_it_is_known(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 35)
    stops = np.flatnonzero(rows.next_step_type[0] == StepType.LAST) + 1  # right behind an episode's last action
    for number, stop in enumerate(stops.tolist()):
        cut = part(rows, slice(stop))
        with diskbuf.open(tmp_path / "driven.zarr") as buffer:
            export_store(buffer, tmp_path / f"{number}.rlds", next_id=stop)
        import_store(tmp_path / f"{number}.rlds", tmp_path / f"{number}.zarr")
        found = rows_of(tmp_path / f"{number}.zarr")
        if cut.discount[0, -1] == 0:  # the boundary repeats the last observation
            assert_same_rows(part(found, slice(stop)), cut)
            np.testing.assert_array_equal(found.observation[0, -1], cut.observation[0, -1])
        elif cut.step_type[0, -1] == StepType.FIRST:  # no action is left
            assert_same_rows(found, part(cut, slice(-1)))
        else:  # the last observation is that of the boundary
            np.testing.assert_array_equal(found.observation, cut.observation)
            assert found.next_step_type[0, -2:].tolist() == [StepType.LAST, StepType.FIRST]


def test_an_empty_store_comes_back_empty(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 1)
    with diskbuf.open(tmp_path / "driven.zarr") as buffer:
        export_store(buffer, tmp_path / "steps.rlds", first_id=1)
    assert again(tmp_path).reward.shape == (1, 0)
    assert rows.reward.shape == (1, 1)


def test_a_flipped_byte_names_its_record_and_nothing_is_imported(tmp_path: Path) -> None:
    collect(tmp_path / "driven.zarr", 38)
    file = exported(tmp_path) / "steps.tfrecord"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 64
    file.write_bytes(data)
    with pytest.raises(SpecError, match=r"record \d\d of .*steps\.tfrecord must match its checksum"):
        again(tmp_path)
    assert not (tmp_path / "new.zarr").exists()


def test_steps_that_do_not_follow_each_other_are_refused(tmp_path: Path) -> None:
    steps = steps_of(collect(tmp_path / "driven.zarr", 38))
    write(tmp_path / "steps.rlds", steps[:3] + steps[4:])
    (tmp_path / "steps.rlds" / "features.json").write_text(json.dumps({"features": FEATURES}))
    problems = [
        (steps[1:], r"is_first in record 0 of .* must be 1, because no episode has begun"),
        (steps[:1] + steps[2:], r"is_first in record 1 of .* must be 0, because its episode has not ended"),
        ([steps[0] | {"is_terminal": True}], r"is_terminal in record 0 of .* must be 0 where is_last is"),
        ([steps[0] | {"is_first": 3}], r"'is_first' in record 0 of .* must be bool"),
        (
            [steps[0] | {"observation": np.zeros(5, np.float32)}],
            r"'observation' in record 0 .* got 5 numbers of float32",
        ),
    ]
    for number, (found, message) in enumerate(problems):
        folder = write(tmp_path / f"{number}.rlds", found)
        with pytest.raises(SpecError, match=message):
            import_store(folder, tmp_path / "new.zarr")
        assert not (tmp_path / "new.zarr").exists()


def test_features_must_be_described(tmp_path: Path) -> None:
    steps = steps_of(collect(tmp_path / "driven.zarr", 5))
    folder = write(tmp_path / "steps.rlds", steps)
    file = folder / "features.json"
    for name in ("is_terminal", "observation", "reward"):
        file.write_text(json.dumps({"features": {key: value for key, value in FEATURES.items() if key != name}}))
        with pytest.raises(SpecError, match=rf"must have (the|a) feature '{name}'"):
            again(tmp_path)
    file.write_text(json.dumps({"features": FEATURES | {"reward": {"dtype": "float32", "shape": [1]}}}))
    with pytest.raises(SpecError, match=r"feature 'reward' in .* must be a float \[\]"):
        again(tmp_path)
    file.write_text(json.dumps({"features": FEATURES, "format": 2}))
    with pytest.raises(StoreFormatError, match="Update diskbuf"):
        again(tmp_path)
    file.write_text("{")
    with pytest.raises(SpecError, match="must be JSON"):
        again(tmp_path)
    file.unlink()
    with pytest.raises(OptionError, match=r"must have a file features\.json beside it"):
        again(tmp_path)


def test_other_features_are_refused_or_dropped_by_name(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 38)
    steps = [step | {"language": np.float32(1)} for step in steps_of(rows)]
    write(tmp_path / "steps.rlds", steps, FEATURES | {"language": {"dtype": "float32", "shape": []}})
    with pytest.raises(OptionError, match=r"language \(float32 \[\]\)"):
        again(tmp_path)
    assert_same_rows(again(tmp_path, mapping=ColumnMap(drop=["language"])), rows)


def test_only_trajectories_are_exported(tmp_path: Path) -> None:
    with (
        diskbuf.UniformReplayBuffer({"a": diskbuf.ArraySpec([], "float32")}) as buffer,
        pytest.raises(SpecError, match="data_spec must be a Trajectory"),
    ):
        export_store(buffer, tmp_path / "steps.rlds")
    assert not (tmp_path / "steps.rlds").exists()


def test_records_of_an_export_are_one_for_each_row(tmp_path: Path) -> None:
    rows = collect(tmp_path / "driven.zarr", 38)
    assert sum(1 for _ in read_records(exported(tmp_path) / "steps.tfrecord")) == rows.reward.shape[1]
