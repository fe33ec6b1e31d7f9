"""Foreign files: each column is mapped by name, cast exactly or refused; transitions become what a driver collects."""

import json
from pathlib import Path
from typing import Any

import h5py
import hypothesis
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from counter_environment import makers
from hypothesis import strategies as st

import diskbuf
from diskbuf import ArraySpec, UniformReplayBuffer, specs
from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import suite_gym
from diskbuf.exchange.contract import trajectories_of_episode
from diskbuf.exchange.exporting import export_store
from diskbuf.exchange.importing import import_store
from diskbuf.exchange.mapping import ColumnMap, cast_exactly
from diskbuf.exchange.store_rows import Selection, StoreRows
from diskbuf.policies import RandomPolicy
from diskbuf.trajectories import StepType, Trajectory
from diskbuf.tree import Structure

TABLE = pa.table(
    {
        "x": pa.array([0.5, 1.5, 2.5]),
        "y": pa.array([1, 2, 3], pa.int16()),
        "note": ["a", "b", "c"],
        "v": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6, dtype="float32")), 2),
    }
)


def parquet(folder: Path, table: pa.Table = TABLE) -> Path:
    pq.write_table(table, folder / "in.parquet")
    return folder / "in.parquet"


def imported(folder: Path, mapping: ColumnMap, table: pa.Table = TABLE) -> Any:
    import_store(parquet(folder, table), folder / "out.zarr", mapping=mapping)
    with diskbuf.open(folder / "out.zarr") as buffer:
        return buffer.gather_all()


def refused(folder: Path, match: str, table: pa.Table = TABLE, **mapping: Any) -> None:
    path = parquet(folder, table)
    with pytest.raises((diskbuf.OptionError, diskbuf.SpecError), match=match):
        import_store(path, folder / "out.zarr", mapping=ColumnMap(**mapping))
    assert not [entry for entry in folder.iterdir() if "out.zarr" in entry.name]


# ---- which column is which leaf


def test_leaves_are_named_by_the_map_and_keep_their_dtypes(tmp_path: Path) -> None:
    found = imported(tmp_path, ColumnMap(leaves={"a/b": "x", "a/c": "v", "d": "y"}, drop=["note"]))
    assert found["a"]["b"].tolist() == [[0.5, 1.5, 2.5]]
    assert found["a"]["c"].tolist() == [[[0, 1], [2, 3], [4, 5]]]
    assert found["d"].dtype == np.int16


def test_one_column_can_be_all_of_the_store(tmp_path: Path) -> None:
    assert imported(tmp_path, ColumnMap(leaves={"": "v"}, only_mapped=True)).shape == (1, 3, 2)


def test_a_spec_takes_columns_of_its_own_names(tmp_path: Path) -> None:
    spec = {"x": specs.BoundedArraySpec([], "float64", 0, 9), "speed": ArraySpec([2], "float32")}
    found = imported(tmp_path, ColumnMap(spec=spec, leaves={"speed": "v"}, drop=["note", "y"]))
    assert found["x"].tolist() == [[0.5, 1.5, 2.5]]
    with diskbuf.open(tmp_path / "out.zarr") as buffer:
        assert buffer.data_spec == spec


def test_a_file_without_a_mapping_says_how_to_choose(tmp_path: Path) -> None:
    path = parquet(tmp_path)
    with pytest.raises(diskbuf.OptionError, match=r"Its columns are 'x', 'y', 'note', 'v'\. .*--map.*--format log"):
        import_store(path, tmp_path / "out.zarr")


def test_what_is_neither_mapped_nor_dropped_is_refused(tmp_path: Path) -> None:
    refused(
        tmp_path, "every column of .* must be mapped or dropped, got 'note', 'v' besides", leaves={"a": "x", "b": "y"}
    )


def test_a_column_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    refused(tmp_path, "got 'noted'. Nearest: 'note'", leaves={"a": "x"}, drop=["noted"])
    refused(tmp_path, "got 'z'", leaves={"a": "z"}, only_mapped=True)


def test_text_is_refused_by_name(tmp_path: Path) -> None:
    refused(tmp_path, "column 'note' of .* must be numbers or bools of one shape.*got string", leaves={"a": "note"})


def test_a_leaf_without_a_column_is_refused(tmp_path: Path) -> None:
    spec = {"x": ArraySpec([], "float64"), "z": ArraySpec([], "float64")}
    refused(tmp_path, "every leaf must have a column of .*, but 'z' has none", spec=spec, only_mapped=True)


def test_another_dtype_is_refused_until_it_is_cast(tmp_path: Path) -> None:
    spec = {"x": ArraySpec([], "float32")}
    refused(tmp_path, r"leaf 'x' must be float32 \[\], got float64 .*Cast it: x=float32", spec=spec, only_mapped=True)
    found = imported(tmp_path, ColumnMap(spec=spec, casts={"x": "float32"}, only_mapped=True))
    assert found["x"].dtype == np.float32


def test_another_shape_is_refused(tmp_path: Path) -> None:
    spec = {"v": ArraySpec([3], "float32")}
    refused(tmp_path, r"leaf 'v' must be float32 \[3\], got float32 \[2\]", spec=spec, only_mapped=True)


def test_a_cast_that_would_change_a_value_is_refused(tmp_path: Path) -> None:
    refused(
        tmp_path,
        "but 0.5 of column 'x' of .* is none of int64",
        leaves={"a": "x"},
        casts={"a": "int64"},
        only_mapped=True,
    )


def test_leaves_below_each_other_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "must not lie below each other", leaves={"a": "x", "a/b": "y"}, only_mapped=True)
    refused(tmp_path, "must not lie below each other", leaves={"a/b": "x", "a": "y"}, only_mapped=True)


def test_a_missing_value_is_refused_with_its_row(tmp_path: Path) -> None:
    table = pa.table({"x": pa.array([1.0, None, 2.0])})
    refused(tmp_path, "column 'x' of .* must have a value in every row, but row 1 has none", table, leaves={"a": "x"})
    lists = pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, None]], pa.list_(pa.float64(), 2))
    refused(tmp_path, "row 2 has none", pa.table({"x": lists}), leaves={"a": "x"})


def test_ids_and_lanes_make_a_grid(tmp_path: Path) -> None:
    table = pa.table({"t": [4, 4, 5, 5, 8, 8], "env": [3, 1, 3, 1, 3, 1], "x": np.arange(6.0)})
    found = imported(tmp_path, ColumnMap(leaves={"x": "x"}, id="t", lane="env"), table)
    assert found["x"].tolist() == [[0, 2, 4], [1, 3, 5]]
    with diskbuf.open(tmp_path / "out.zarr") as buffer:
        assert (buffer.first_id, buffer.next_id, buffer._opened().runs) == (4, 7, (4, 6))


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"t": [0, 0, 1], "env": [0, 1, 0]}, "the last id has 1"),
        ({"t": [0, 0, 1, 1], "env": [0, 1, 1, 0]}, r"lanes of .* must be \[0, 1\] for each id, got 1 in row 2"),
        ({"t": [0, 0, 1, 2], "env": [0, 1, 0, 1]}, "ids of .* must be the same in all lanes, got 2 in row 3"),
        ({"t": [1, 1, 0, 0], "env": [0, 1, 0, 1]}, "ids of .* must ascend, got 0 in row 2"),
        ({"t": [0, 0, 1, 1], "env": [3, 3, 3, 3]}, "lanes of .* must differ for each id"),
        ({"t": [-1, -1, 0, 0], "env": [0, 1, 0, 1]}, "must be at least 0, got -1"),
    ],
)
def test_rows_that_make_no_grid_are_refused(tmp_path: Path, columns: dict[str, list[int]], match: str) -> None:
    table = pa.table({**columns, "x": np.zeros(len(columns["t"]))})
    refused(tmp_path, match, table, leaves={"x": "x"}, id="t", lane="env")


@pytest.mark.parametrize("ending", [".toml", ".json"])
def test_a_mapping_file_says_it_all(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"map{ending}"
    spec = {"x": ArraySpec([], "float32"), "w": ArraySpec([2], "float32")}
    if ending == ".json":
        value = {"leaves": {"w": "v"}, "casts": {"x": "float32"}, "drop": ["note", "y"], "spec": specs.to_json(spec)}
        file.write_text(json.dumps(value))
    else:
        file.write_text('drop = ["note", "y"]\n[leaves]\nx = "x"\nw = "v"\n[casts]\nx = "float32"\n')
    mapping = ColumnMap.from_file(file)
    found = imported(tmp_path, mapping)
    assert (found["x"].dtype, found["w"].shape) == (np.float32, (1, 3, 2))
    file.write_text("leafs = 3" if ending == ".toml" else '{"leafs": 3}')
    with pytest.raises(diskbuf.OptionError, match=r"must have the keys leaves, casts.*got \['leafs'\] besides"):
        ColumnMap.from_file(file)
    file.write_text("{")
    with pytest.raises(diskbuf.OptionError, match="must be TOML, or JSON"):
        ColumnMap.from_file(file)


# ---- casts


@pytest.mark.parametrize("values", [[2**63 - 1], [2**53 + 1], [-(2**63)], [2**31]])
def test_an_int_becomes_a_float_only_where_there_is_one(values: list[int]) -> None:
    array = np.array(values, np.int64)
    is_exact = all(int(float(value)) == value for value in values)
    if is_exact:
        assert cast_exactly(array, np.dtype("float64"), path="a", where="b").astype(object).tolist() == values
    else:
        with pytest.raises(diskbuf.SpecError, match="must hold its values exactly"):
            cast_exactly(array, np.dtype("float64"), path="a", where="b")


DTYPES = [np.dtype(name) for name in specs._DTYPE_NAMES]


@hypothesis.given(
    st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.binary(min_size=16, max_size=16), st.integers(-200, 300)
)
def test_a_cast_is_exact_or_refused(source: np.dtype[Any], target: np.dtype[Any], raw: bytes, small: int) -> None:
    values = np.frombuffer(raw, source).copy() if source.kind != "b" else np.array([raw[0] % 2, 0, 1], bool)
    with np.errstate(all="ignore"):
        values[0] = np.array(small).astype(source)
    for value in values:
        one = np.array([value])
        exact = value.item()
        try:
            found = cast_exactly(one, target, path="a", where="b")[0]
        except diskbuf.SpecError:
            with np.errstate(all="ignore"):
                real = one.real if source.kind == "c" and target.kind != "c" else one
                attempt = real.astype(target)[0].item()
            # Python compares ints, floats and complex numbers exactly.
            assert attempt != exact or not fits(exact, target)
        else:
            assert found.dtype == target
            assert found.item() == exact or (np.isnan(exact) and np.isnan(found))


def fits(value: Any, dtype: np.dtype[Any]) -> bool:
    """Whether a dtype has an int, whose cast may wrap around to what compares equal by luck."""
    if dtype.kind in "iu" and not isinstance(value, complex) and np.isfinite(value):
        return bool(np.iinfo(dtype).min <= value <= np.iinfo(dtype).max)
    return True


# ---- arrays


def test_foreign_arrays_come_in_by_their_axes(tmp_path: Path) -> None:
    x = np.arange(24, dtype="float32").reshape(2, 4, 3)  # lanes, steps, 3
    y = np.arange(8, dtype=">i4").reshape(2, 4)
    np.savez(tmp_path / "lanes.npz", x=x, y=y)
    np.savez_compressed(tmp_path / "steps.npz", x=x.swapaxes(0, 1).copy(), y=y.T.copy())
    with h5py.File(tmp_path / "lanes.h5", "w") as file:
        file["data/x"], file["y"] = x, y
    leaves = {"x": "x", "y": "y"}
    for name, axes, map_ in (
        ("lanes.npz", "lanes,steps", leaves),
        ("steps.npz", "steps,lanes", leaves),
        ("lanes.h5", "lanes,steps", leaves | {"x": "data/x"}),
    ):
        store = tmp_path / f"{name}.zarr"
        import_store(tmp_path / name, store, mapping=ColumnMap(leaves=map_), options={"axes": axes})
        with diskbuf.open(store) as buffer:
            assert buffer.batch_size == 2
            np.testing.assert_array_equal(buffer.gather_all()["x"], x)
            np.testing.assert_array_equal(buffer.gather_all()["y"], y)
    import_store(tmp_path / "lanes.npz", tmp_path / "rows.zarr", mapping=ColumnMap(leaves=leaves))
    with diskbuf.open(tmp_path / "rows.zarr") as buffer:
        np.testing.assert_array_equal(buffer.gather_all()["x"], x[None])


def test_arrays_of_different_length_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros(3), y=np.zeros(4))
    with pytest.raises(diskbuf.SpecError, match=r"must have equal first axes, got x \[3\], y \[4\]"):
        import_store(tmp_path / "a.npz", tmp_path / "b.zarr", mapping=ColumnMap(leaves={"x": "x", "y": "y"}))


class Bomb:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("was_run"),)


def test_an_array_of_objects_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "a.npz", x=np.zeros(1), bad=np.array([Bomb()], object))
    with pytest.raises(diskbuf.SpecError, match=r"column 'bad' of .* got objects, which are never loaded"):
        import_store(tmp_path / "a.npz", tmp_path / "b.zarr", mapping=ColumnMap(leaves={"x": "x", "bad": "bad"}))
    import_store(tmp_path / "a.npz", tmp_path / "b.zarr", mapping=ColumnMap(leaves={"x": "x"}, drop=["bad"]))
    assert not (tmp_path / "was_run").exists()


def test_text_and_ragged_arrays_of_hdf5_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["text"] = ["a", "b"]
        ragged = file.create_dataset("ragged", (2,), h5py.vlen_dtype(np.float32))
        ragged[0] = [1, 2]
        file["x"] = np.zeros(2)
        file["scalar"] = 3
    for name in ("text", "ragged"):
        with pytest.raises(diskbuf.SpecError, match=f"column '{name}' of .* which are never loaded"):
            import_store(
                tmp_path / "a.h5", tmp_path / "b.zarr", mapping=ColumnMap(leaves={name: name}, only_mapped=True)
            )
    report = import_store(
        tmp_path / "a.h5", tmp_path / "b.zarr", mapping=ColumnMap(leaves={"x": "x"}, only_mapped=True)
    )
    assert sorted(report.dropped) == ["ragged", "scalar", "text"]


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    mapping = ColumnMap(leaves={"x": "x"})
    for ending in (".parquet", ".arrow", ".npz", ".h5", ".csv"):
        file = tmp_path / f"a{ending}"
        file.write_bytes(b"\0\xff nothing of the kind" if ending != ".csv" else b"x\n1\n2,3\n")
        with pytest.raises((diskbuf.SpecError, diskbuf.OptionError), match="must be"):
            import_store(file, tmp_path / "b.zarr", mapping=mapping)
    with pytest.raises(FileNotFoundError, match="a source must be a file"):
        import_store(tmp_path / "none.parquet", tmp_path / "b.zarr", mapping=mapping)
    np.savez(tmp_path / "cut.npz", x=np.zeros(1000))
    whole = (tmp_path / "cut.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[:200] + bytes(8) + b"\x01" * 100 + whole[308:])
    with pytest.raises(diskbuf.SpecError, match="must be whole"):
        import_store(tmp_path / "cut.npz", tmp_path / "b.zarr", mapping=mapping)
    assert not (tmp_path / "b.zarr").exists()


def test_csv_is_read_as_what_it_is_mapped_to(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        'x,n,ok,"v[1]","v[0]",name\n0.1,3,true,1,2,a\nnan,18446744073709551615,false,3,4,b\n'
    )
    spec = {
        "x": ArraySpec([], "float32"),
        "n": ArraySpec([], "uint64"),
        "ok": ArraySpec([], "bool"),
        "v": ArraySpec([2], "int8"),
    }
    import_store(tmp_path / "a.csv", tmp_path / "b.zarr", mapping=ColumnMap(spec=spec, drop=["name"]))
    with diskbuf.open(tmp_path / "b.zarr") as buffer:
        found = buffer.gather_all()
    assert found["x"][0, 0] == np.float32(0.1)
    assert np.isnan(found["x"][0, 1])
    assert found["n"].tolist() == [[3, 2**64 - 1]]
    assert found["ok"].tolist() == [[True, False]]
    assert found["v"].tolist() == [[[2, 1], [4, 3]]]
    for text, match in (
        ("x\n1\n\n300\n", "CSV conversion error to int8: invalid value '300'"),
        ("x,y\n1,2\n,3\n", "column 'x' of .* must have a value in every row, but row 1 has none"),
    ):
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(diskbuf.SpecError, match=match):
            import_store(
                tmp_path / "a.csv",
                tmp_path / "c.zarr",
                mapping=ColumnMap(leaves={"x": "x"}, casts={"x": "int8"}, only_mapped=True),
            )


# ---- episodes


def collected(path: Path, lengths: list[int], ends: list[Any], steps: int) -> None:
    """One lane of the counter environment, as a driver collects it in so many steps."""
    with suite_gym.wrap(makers([lengths], ends=ends)) as env:
        policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=3)
        with UniformReplayBuffer(policy.trajectory_spec, 1, None, path=path) as buffer:
            # One more, so that the final observation of an episode that ends with the last step is there too.
            DynamicStepDriver(env, policy, observers=[buffer.add_batch], num_steps=steps + 1).run()


def logged(path: Path, *, keep_open: bool = False) -> dict[str, np.ndarray]:
    """The transitions in a store as a log that Gymnasium's users write: no boundaries, next observations instead."""
    with diskbuf.open(path) as buffer:
        rows: Trajectory = buffer.gather_all()
    step = np.flatnonzero(rows.step_type[0] != StepType.LAST)
    step = step[step + 1 < rows.reward.shape[1]]  # of the last row the next observation isn't there
    is_last = rows.next_step_type[0, step] == StepType.LAST
    if not keep_open:
        step, is_last = step[: is_last.nonzero()[0][-1] + 1], is_last[: is_last.nonzero()[0][-1] + 1]
    return {
        "obs": rows.observation[0, step],
        "next_obs": rows.observation[0, step + 1],
        "action": rows.action[0, step],
        "reward": rows.reward[0, step],
        "terminals": is_last & (rows.discount[0, step] == 0),
        "timeouts": is_last & (rows.discount[0, step] == 1),
    }


def as_table(columns: dict[str, np.ndarray]) -> pa.Table:
    return pa.table(
        {
            name: pa.array(values)
            if values.ndim == 1
            else pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
            for name, values in columns.items()
        }
    )


LOG = {
    "observation": "obs",
    "next_observation": "next_obs",
    "terminated": "terminals",
    "truncated": "timeouts",
}


def assert_same_rows(found: Trajectory, expected: Trajectory) -> None:
    """Equal, but for the actions at boundaries, which mean nothing."""
    is_step = expected.step_type != StepType.LAST
    for name in Trajectory._fields:
        one, other = getattr(found, name), getattr(expected, name)
        if name == "policy_info":
            assert one == other == ()
            continue
        assert one.dtype == other.dtype, name
        np.testing.assert_array_equal(
            one[is_step] if name == "action" else one, other[is_step] if name == "action" else other
        )


@pytest.mark.parametrize("block", [1, 3, 1000])
@pytest.mark.parametrize("ends", [["terminated"], ["truncated"], ["terminated", "truncated"]])
def test_logged_transitions_become_what_the_driver_collected(
    tmp_path: Path, ends: list[Any], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskbuf.exchange.parquet._READ_BYTES", block * 50)
    collected(tmp_path / "driven.zarr", [3, 1, 4], ends, 16)  # episodes of 3, 1, 4, 3, 1, 4
    log = logged(tmp_path / "driven.zarr")
    assert len(log["reward"]) == 16
    path = parquet(tmp_path, as_table(log))
    report = import_store(path, tmp_path / "out.zarr", mapping=ColumnMap(leaves=LOG, trajectory=True))
    assert (report.episodes, report.rows) == (6, 22)
    with diskbuf.open(tmp_path / "driven.zarr") as driven, diskbuf.open(tmp_path / "out.zarr") as out:
        assert_same_rows(out.gather_all(), first_rows(driven.gather_all(), 22))
        assert diskbuf.episodes(out) == diskbuf.episodes(driven).slice(0, 6)


def first_rows(rows: Trajectory, count: int) -> Trajectory:
    structure = Structure(rows)
    return structure.unflatten([leaf[:, :count] for leaf in structure.flatten(rows)])


def test_a_log_that_stops_inside_an_episode_goes_on_there(tmp_path: Path) -> None:
    collected(tmp_path / "driven.zarr", [5], ["terminated"], 8)
    log = logged(tmp_path / "driven.zarr", keep_open=True)
    found = imported(tmp_path, ColumnMap(leaves=LOG, trajectory=True), as_table(log))
    with diskbuf.open(tmp_path / "driven.zarr") as driven:
        assert found.reward.shape[1] == 9
        assert_same_rows(found, first_rows(driven.gather_all(), 9))
    with diskbuf.open(tmp_path / "out.zarr") as out:
        assert diskbuf.episodes(out)["end"].to_pylist() == ["terminated", "open"]


def test_without_next_observations_nothing_is_made_up(tmp_path: Path) -> None:
    collected(tmp_path / "driven.zarr", [3, 2], ["terminated", "truncated"], 10)
    log = logged(tmp_path / "driven.zarr")
    del log["next_obs"]
    leaves = {key: value for key, value in LOG.items() if key != "next_observation"}
    refused(tmp_path, "next_observation must be mapped", as_table(log), leaves=leaves, trajectory=True)
    found = imported(tmp_path, ColumnMap(leaves=leaves, trajectory=True, final_observation="last"), as_table(log))
    # Of the truncated episode of 2 the second step is its boundary; that of 3 repeats its last observation.
    assert found.step_type[0].tolist() == [0, 1, 1, 2, 0, 2] * 2
    assert found.discount[0].tolist() == [1, 1, 0, 1, 1, 1] * 2
    np.testing.assert_array_equal(found.observation[0, 3], found.observation[0, 2])
    np.testing.assert_array_equal(found.observation[0, 5], log["obs"][4])


def test_ends_are_mapped_by_name_or_refused(tmp_path: Path) -> None:
    collected(tmp_path / "driven.zarr", [3], ["terminated"], 6)
    log = logged(tmp_path / "driven.zarr")
    done = log.pop("terminals") | log.pop("timeouts")
    leaves = {key: value for key, value in LOG.items() if key in ("observation", "next_observation")}
    neither = as_table(log)
    refused(tmp_path, "must have a column of .* as terminated, got none", neither, leaves=leaves, trajectory=True)
    with_done = as_table(log | {"done": done})
    refused(tmp_path, "must have a column of .* as terminated", with_done, leaves=leaves, trajectory=True)
    found = imported(tmp_path, ColumnMap(leaves=leaves | {"terminated": "done"}, trajectory=True), with_done)
    assert (found.discount[0] == 0).sum() == 2


def test_episode_numbers_end_episodes_too(tmp_path: Path) -> None:
    collected(tmp_path / "driven.zarr", [3, 2], ["terminated", "truncated"], 10)
    log = logged(tmp_path / "driven.zarr")
    ends = log["terminals"] | log["timeouts"]
    log["number"] = np.cumsum(np.concatenate([[0], ends[:-1]]))
    log["timeouts"] = np.zeros_like(ends)
    mapping = ColumnMap(leaves={**LOG, "episode": "number"}, trajectory=True)
    found = imported(tmp_path, mapping, as_table(log | {"timeouts": np.zeros_like(ends)}))
    # But for the last, behind which no row says that it ended.
    assert found.step_type[0].tolist() == [0, 1, 1, 2, 0, 1, 2, 0, 1, 1, 2, 0, 1]
    assert found.discount[0].tolist() == [1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1]
    log["number"][:] = 7
    with pytest.raises(diskbuf.SpecError, match="must end an episode only where `episode` changes"):
        import_store(parquet(tmp_path, as_table(log)), tmp_path / "b.zarr", mapping=mapping)


def test_shuffled_transitions_are_refused(tmp_path: Path) -> None:
    collected(tmp_path / "driven.zarr", [4], ["terminated"], 8)
    log = logged(tmp_path / "driven.zarr")
    order = np.array([1, 0, 2, 3, 4, 5, 6, 7])
    table = as_table({name: values[order] for name, values in log.items()})
    path = parquet(tmp_path, table)
    with pytest.raises(diskbuf.SpecError, match="next observation of step 0 must be the observation of step 1"):
        import_store(path, tmp_path / "out.zarr", mapping=ColumnMap(leaves=LOG, trajectory=True))


def test_a_reward_keeps_its_dtype_or_is_rounded_when_it_is_cast(tmp_path: Path) -> None:
    collected(tmp_path / "driven.zarr", [4], ["terminated"], 8)
    log = logged(tmp_path / "driven.zarr")
    log["reward"] = log["reward"].astype("float64") + 0.1
    table = as_table(log)
    found = imported(tmp_path, ColumnMap(leaves=LOG, trajectory=True), table)
    assert found.reward.dtype == np.float64
    assert found.reward[0, 0] == log["reward"][0]
    mapping = ColumnMap(leaves=LOG, trajectory=True, casts={"reward": "float32"})
    import_store(parquet(tmp_path, table), tmp_path / "b.zarr", mapping=mapping)
    with diskbuf.open(tmp_path / "b.zarr") as buffer:
        assert buffer.gather_all().reward[0, 0] == np.float32(log["reward"][0])


@hypothesis.given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    ends=st.data(),
    block=st.integers(1, 7),
)
@hypothesis.settings(max_examples=30, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_rows_of_a_table_are_those_of_its_episodes(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], ends: st.DataObject, block: int
) -> None:
    folder = tmp_path_factory.mktemp("episodes")
    parts: dict[str, list[np.ndarray]] = {}
    rows: list[Trajectory] = []
    start = 0.0
    for length in lengths:
        terminated = ends.draw(st.booleans())
        observations = start + np.arange(length + 1.0)
        start += 100
        actions, rewards = np.arange(length), np.arange(length, dtype="float32")
        rows.append(
            trajectories_of_episode(observations, actions, rewards, terminated=terminated, truncated=not terminated)
        )
        last = np.arange(length) == length - 1
        for name, values in (
            ("observation", observations[:-1]),
            ("next_observation", observations[1:]),
            ("action", actions),
            ("reward", rewards),
            ("terminated", last & terminated),
            ("truncated", last & (not terminated)),
        ):
            parts.setdefault(name, []).append(values)
    table = pa.table({name: np.concatenate(values) for name, values in parts.items()})
    pq.write_table(table, folder / "a.parquet", row_group_size=block)
    import_store(folder / "a.parquet", folder / "b.zarr", mapping=ColumnMap(trajectory=True))
    with diskbuf.open(folder / "b.zarr") as buffer:
        found = buffer.gather_all()
    for name in Trajectory._fields:
        if name != "policy_info":
            expected = np.concatenate([getattr(episode, name) for episode in rows])
            np.testing.assert_array_equal(getattr(found, name)[0], expected)


def test_the_episodes_of_a_store_come_out_as_they_went_in(tmp_path: Path) -> None:
    collected(tmp_path / "driven.zarr", [3, 1, 4], ["terminated", "truncated"], 20)
    with diskbuf.open(tmp_path / "driven.zarr") as buffer:
        everything = buffer.gather_all()
        found = list(StoreRows(buffer, Selection()).episodes())
        table = diskbuf.episodes(buffer).to_pylist()
    assert [len(episode.rewards) for episode in found] == [row["length"] for row in table]
    ended = {"terminated": (True, False), "truncated": (False, True), "open": (False, False)}
    assert [(episode.terminated, episode.truncated) for episode in found] == [ended[row["end"]] for row in table]
    rows = [episode.rows() for episode in found if len(episode.observations) == len(episode.rewards) + 1]
    joined = np.concatenate([episode.observation for episode in rows])
    np.testing.assert_array_equal(joined, everything.observation[0, : len(joined)])
    assert all(np.array_equal(one.step_type, np.r_[0, np.ones(len(one.reward) - 2), 2]) for one in rows)


def test_episodes_can_be_chosen(tmp_path: Path) -> None:
    collected(tmp_path / "driven.zarr", [3, 1, 4], ["terminated"], 20)
    with diskbuf.open(tmp_path / "driven.zarr") as buffer:
        everything = buffer.gather_all()
        report = export_store(buffer, tmp_path / "a.parquet", episodes=[0, 2])
        assert report.rows == 4 + 5
        with pytest.raises(diskbuf.OptionError, match="episodes must be from 0 to"):
            export_store(buffer, tmp_path / "b.parquet", episodes=[99])
        with pytest.raises(diskbuf.OptionError, match="episodes must be left out for a format of arrays"):
            export_store(buffer, tmp_path / "b.npz", episodes=[0])
    ids = pq.read_table(tmp_path / "a.parquet")["id"].to_pylist()
    assert ids == [0, 1, 2, 3, 6, 7, 8, 9, 10]
    report = import_store(tmp_path / "a.parquet", tmp_path / "b.zarr")
    assert report.gaps == 1
    with diskbuf.open(tmp_path / "b.zarr") as copy:
        np.testing.assert_array_equal(copy.gather_all().observation, everything.observation[:, ids])
        assert diskbuf.episodes(copy)["end"].to_pylist() == ["terminated"] * 2


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"observations": np.zeros(3)}, "leaf 'observation' of an episode must have 4 rows, as many as the 3 actions"),
        ({"actions": np.zeros(4)}, r"leaf 'action' of an episode must have 3 rows.*got \[4\]"),
        ({"rewards": np.zeros((3, 1))}, "rewards of an episode must be one number for each"),
        ({"rewards": np.zeros(0)}, "rewards of an episode must be one number for each"),
        ({"discounts": np.ones(3)}, "the last discount of an episode must be 0 where it terminated"),
        ({"discounts": np.ones(2)}, r"discounts must be \[3\] numbers"),
    ],
)
def test_an_episode_whose_parts_do_not_fit_is_refused(changes: dict[str, Any], match: str) -> None:
    parts = {"observations": np.zeros(4), "actions": np.zeros(3), "rewards": np.zeros(3)} | changes
    with pytest.raises(diskbuf.SpecError, match=match):
        trajectories_of_episode(**parts, terminated=True, truncated=False)


# ---- lists, as pandas writes arrays


def write_lists(folder: Path, name: str, values: Any, kind: pa.DataType | None = None) -> Path:
    path = folder / name
    table = pa.table({"v": pa.array(values, kind)})
    if name.endswith(".parquet"):
        pq.write_table(table, path, row_group_size=2)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("name", ["in.parquet", "in.arrow"])
@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([[0.5, 1.0], [2.0, 3.0], [4.0, 5.0]], None),
        ([[0.5, 1.0], [2.0, 3.0], [4.0, 5.0]], pa.large_list(pa.float32())),
        ([[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [0, 1, 2]], [[1, 1, 1], [2, 2, 2]]], None),
        ([[[1, 2], [4, 5]], [[7, 8], [0, 1]], [[1, 1], [2, 2]]], pa.list_(pa.list_(pa.int64()), 2)),
        ([[True, False], [False, False], [True, True]], None),
        ([[], [], []], pa.list_(pa.float64())),
    ],
)
def test_lists_of_one_length_are_arrays(tmp_path: Path, name: str, values: Any, kind: pa.DataType | None) -> None:
    import_store(write_lists(tmp_path, name, values, kind), tmp_path / "a.zarr", mapping=ColumnMap(leaves={"v": "v"}))
    with diskbuf.open(tmp_path / "a.zarr") as buffer:
        assert buffer.gather_all()["v"].tolist() == [values]


def test_arrays_in_a_frame_of_pandas_are_imported(tmp_path: Path) -> None:
    frame = pd.DataFrame({"v": [np.arange(3, dtype="float32") + row for row in range(4)], "a": np.arange(4)})
    frame.to_parquet(tmp_path / "in.parquet")
    mapping = ColumnMap(leaves={"v": "v", "a": "a"})
    import_store(tmp_path / "in.parquet", tmp_path / "a.zarr", mapping=mapping)
    with diskbuf.open(tmp_path / "a.zarr") as buffer:
        assert buffer.data_spec["v"] == ArraySpec([3], "float32")
        assert buffer.gather_all()["v"][0, :, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["in.parquet", "in.arrow"])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1, 2], [3, 4], [5, 6, 7]], "lists of one length, 2 as in row 0, but row 2 has one of 3"),
        ([[1, 2], [3, 4], [5, 6], [7]], "but row 3 has one of 1"),
        ([[[1], [2]], [[3], [4]], [[5], [6, 7]]], "1 as in row 0, but row 2 has one of 2"),
        ([[], [1], [2]], "0 as in row 0, but row 1 has one of 1"),
        ([[1, 2], None, [3, 4]], "must have a value in every row, but row 1 has none"),
        ([None, [1, 2], [3, 4]], "must have a value in every row, but row 0 has none"),
        ([[1, 2], [3, 4], [5, None]], "must have a value in every row, but row 2 has none"),
        ([["a"], ["b"], ["c"]], "must be numbers or bools of one shape"),
    ],
)
def test_lists_of_other_lengths_are_refused_by_row(tmp_path: Path, name: str, values: Any, message: str) -> None:
    path = write_lists(tmp_path, name, values)
    with pytest.raises(diskbuf.SpecError, match=message):
        import_store(path, tmp_path / "a.zarr", mapping=ColumnMap(leaves={"v": "v"}))
    assert not (tmp_path / "a.zarr").exists()


# ---- several columns, one array


@pytest.mark.parametrize("leaves", [{"v[0]": "x", "v[1]": "y"}, {"v[1]": "y", "v[0]": "x"}, {"v": "x,y"}])
def test_columns_become_the_elements_of_one_array(tmp_path: Path, leaves: dict[str, str]) -> None:
    found = imported(tmp_path, ColumnMap(leaves=leaves, drop=["note", "v"]))
    assert list(found) == ["v"]
    assert found["v"].tolist() == [[[0.5, 1], [1.5, 2], [2.5, 3]]]


def test_elements_of_several_axes_become_one_array(tmp_path: Path) -> None:
    leaves = {"a/m[0,0]": "x", "a/m[0,1]": "y", "a/m[1,0]": "y", "a/m[1,1]": "x", "a/x": "x", "one[0]": "y"}
    found = imported(tmp_path, ColumnMap(leaves=leaves, casts={"a/m": "float32"}, drop=["note", "v"]))
    assert found["a"]["m"].dtype == np.float32
    assert found["a"]["m"][0, 1].tolist() == [[1.5, 2], [2, 1.5]]
    assert found["a"]["x"].tolist() == [[0.5, 1.5, 2.5]]
    assert found["one"].tolist() == [[[1], [2], [3]]]


def test_elements_of_text_become_one_array(tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("x,y\n1,0.5\n2,1.5\n")
    mapping = ColumnMap(leaves={"v": "x,y"}, casts={"v": "float32"})
    import_store(tmp_path / "in.csv", tmp_path / "out.zarr", mapping=mapping)
    with diskbuf.open(tmp_path / "out.zarr") as buffer:
        assert buffer.data_spec == {"v": ArraySpec([2], "float32")}
        assert buffer.gather_all()["v"].tolist() == [[[1, 0.5], [2, 1.5]]]


def test_elements_can_be_a_part_of_a_trajectory_or_of_a_spec(tmp_path: Path) -> None:
    flags = pa.array([False, False, True])
    table = pa.table({"x": [0.5, 1.5, 2.5], "y": [1.0, 2.0, 3.0], "a": [0, 1, 0], "r": [1.0] * 3, "done": flags})
    leaves = {"observation": "x,y", "action": "a", "reward": "r", "terminated": "done"}
    found = imported(tmp_path, ColumnMap(leaves=leaves, trajectory=True, final_observation="last"), table)
    assert found.observation[0, :3].tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]
    spec = {"v": ArraySpec([2], "float64"), "w[0]": ArraySpec([], "int64")}
    mapping = ColumnMap(leaves={"v": "x,y", "w[0]": "a"}, spec=spec, only_mapped=True)
    import_store(tmp_path / "in.parquet", tmp_path / "b.zarr", mapping=mapping)
    with diskbuf.open(tmp_path / "b.zarr") as buffer:
        assert buffer.data_spec == spec


def test_a_column_with_a_comma_in_its_name_is_taken_by_it(tmp_path: Path) -> None:
    table = pa.table({"x,y": [7.0], "x": [1.0], "y": [2.0]})
    assert imported(tmp_path, ColumnMap(leaves={"v": "x,y"}, only_mapped=True), table)["v"].tolist() == [[7]]


@pytest.mark.parametrize(
    ("leaves", "message"),
    [
        ({"v[0]": "x", "v[2]": "y"}, r"'v' must be one array without gaps, got \[0\], \[2\]"),
        ({"v[1]": "x"}, r"without gaps, got \[1\]"),
        ({"v[0]": "x", "v[0,1]": "y"}, r"without gaps, got \[0\], \[0,1\]"),
        ({"v[0]": "x", "v": "y"}, "besides the leaf itself"),
        ({"v[0]": "x", "v[1]": "z"}, "must be columns of .* got 'z'. There are 'x', 'y'"),
        ({"v": "x,z"}, "got 'z'"),
        ({"v": "x,note"}, "column 'note' of .* must be single numbers to be an element of leaf 'v', got string"),
        ({"v": "x,v"}, "column 'v' of .* must be single numbers"),
    ],
)
def test_elements_that_make_no_array_are_refused(tmp_path: Path, leaves: dict[str, str], message: str) -> None:
    refused(tmp_path, message, leaves=leaves, only_mapped=True)


def test_elements_are_not_rounded_to_the_dtype_of_the_others(tmp_path: Path) -> None:
    table = pa.table({"x": [0.5], "y": [2**53 + 1]})
    refused(tmp_path, "must hold its values exactly, but 9007199254740993", table, leaves={"v": "x,y"})


# ---- bounds


def test_bounds_become_those_of_the_spec(tmp_path: Path) -> None:
    bounds = {"a/y": [1, 3], "v": (0, 5.5)}
    imported(tmp_path, ColumnMap(leaves={"a/y": "y", "v": "v", "x": "x"}, bounds=bounds, only_mapped=True))
    with diskbuf.open(tmp_path / "out.zarr") as buffer:
        assert buffer.data_spec == {
            "a": {"y": specs.BoundedArraySpec([], "int16", 1, 3)},
            "v": specs.BoundedArraySpec([2], "float32", 0, 5.5),
            "x": ArraySpec([], "float64"),
        }


def test_ints_are_bounded_exactly(tmp_path: Path) -> None:
    top = 2**63 - 1
    table = pa.table({"a": pa.array([top - 1, top], pa.int64())})
    imported(tmp_path, ColumnMap(leaves={"a": "a"}, bounds={"a": [0, top]}), table)
    (tmp_path / "more").mkdir()
    refused(tmp_path / "more", f"row 1 of .* has {top}", table, leaves={"a": "a"}, bounds={"a": [0, top - 1]})


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"bounds": {"y": [1, 2]}}, r"leaf 'y' must lie within its bounds, 1 to 2, but row 2 of .*'y' has 3\. Widen"),
        ({"bounds": {"v": [1, 9]}}, "but row 0 of .* has 0.0"),
        ({"bounds": {"y": [2, 1]}}, "bounds of leaf 'y' must be two numbers, low and high"),
        ({"bounds": {"y": [1]}}, "must be two numbers"),
        ({"bounds": {"y": ["0", "9"]}}, "must be two numbers"),
        ({"bounds": {"x": [0.5, float("nan")]}}, "must be two numbers"),
        ({"bounds": {"y": [0.5, 9]}}, "bounds of leaf 'y' must fit it, but"),
        ({"bounds": {"y": [0, 2**40]}}, "bounds of leaf 'y' must fit it, but"),
        ({"bounds": {"z": [0, 2]}}, "got 'z'. Nearest"),
        ({"bounds": [0, 2]}, "by the paths of leaves"),
    ],
)
def test_bounds_that_do_not_hold_are_refused(tmp_path: Path, mapping: dict[str, Any], message: str) -> None:
    leaves = {"y": "y", "v": "v", "x": "x"}
    refused(tmp_path, message, leaves=leaves, only_mapped=True, **mapping)


def test_nan_lies_within_no_bounds(tmp_path: Path) -> None:
    table = pa.table({"x": [0.5, float("nan")]})
    refused(tmp_path, "row 1 of .* has nan", table, leaves={"x": "x"}, bounds={"x": [0, 1]})


TRANSITIONS = pa.table(
    {
        "observation": [0.0, 1.0, 2.0, 3.0],
        "next_observation": [1.0, 2.0, 9.0, 4.0],
        "action": [0, 1, 0, 1],
        "reward": [7.0] * 4,
        "terminated": [False, False, True, True],
    }
)


def test_a_trajectory_is_bounded_for_agents(tmp_path: Path) -> None:
    bounds = {"action": [0, 1], "observation": [0, 9]}
    imported(tmp_path, ColumnMap(trajectory=True, bounds=bounds), TRANSITIONS)
    with diskbuf.open(tmp_path / "out.zarr") as buffer:
        assert buffer.data_spec.action == specs.BoundedArraySpec([], "int64", 0, 1)
        assert buffer.data_spec.observation == specs.BoundedArraySpec([], "float64", 0, 9)


def test_rows_of_a_trajectory_outside_of_the_bounds_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, "but row 1 of .* has 1", TRANSITIONS, trajectory=True, bounds={"action": [0, 0]})
    refused(
        tmp_path,
        "'next_observation' must .*row 2 of .* has 9",
        TRANSITIONS,
        trajectory=True,
        bounds={"observation": [0, 5]},
    )
    refused(tmp_path, "got 'reward'. Nearest", TRANSITIONS, trajectory=True, bounds={"reward": [0, 9]})


def test_a_data_set_of_episodes_is_bounded_too(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "in.hdf5", "w") as file:
        for name, column in (("observations", "observation"), ("actions", "action"), ("rewards", "reward")):
            file[name] = TRANSITIONS[column].to_numpy()
        file["terminals"] = np.array([False, False, True, True])
    names = {"format": "d4rl", "options": {"truncated": "none"}}
    mapping = ColumnMap(bounds={"action": [0, 1]})
    import_store(tmp_path / "in.hdf5", tmp_path / "a.zarr", mapping=mapping, **names)
    with diskbuf.open(tmp_path / "a.zarr") as buffer:
        assert buffer.data_spec.action == specs.BoundedArraySpec([], "int64", 0, 1)
    for bounds, message in (
        ({"observation": [0, 2]}, "'observation' must .* but step 0 of episode 1 of .* has 3"),
        ({"reward": [0, 2]}, "got 'reward'"),
    ):
        with pytest.raises((diskbuf.SpecError, diskbuf.OptionError), match=message):
            import_store(tmp_path / "in.hdf5", tmp_path / "b.zarr", mapping=ColumnMap(bounds=bounds), **names)


def test_a_mapping_file_has_bounds(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text('leaves = { a = "x" }\nbounds = { a = [0, 2.5] }\n')
    assert ColumnMap.from_file(tmp_path / "map.toml").bounds == {"a": [0, 2.5]}
