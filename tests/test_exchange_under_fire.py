"""Exports and imports beside each other, of files that are damaged, doubled or cut, and of steps that are odd."""

import contextlib
import json
import random
import shutil
import subprocess
import sys
import textwrap
import threading
import warnings
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.dataset as pa_dataset
import pyarrow.parquet as pq
import pytest
from coded_rows import SPEC, assert_rows, span

import diskbuf
from diskbuf import ArraySpec, UniformReplayBuffer
from diskbuf.errors import DiskbufError, OptionError, SpecError, StoreFormatError, StoreLockedError
from diskbuf.exchange.contract import trajectories_of_episode
from diskbuf.exchange.exporting import export_store
from diskbuf.exchange.importing import import_store
from diskbuf.exchange.mapping import ColumnMap
from diskbuf.exchange.tf_record import RecordWriter, read_records
from diskbuf.trajectories import PolicyStep, Trajectory, time_step_spec, trajectory_spec
from diskbuf.tree import Structure

TRAJECTORY = trajectory_spec(time_step_spec(ArraySpec([1], "float32")), PolicyStep(ArraySpec([], "int64"), (), ()))


def filled(next_id: int = 300) -> UniformReplayBuffer:
    buffer = UniformReplayBuffer(SPEC, 2, None)
    buffer.extend(span(0, next_id, 2))
    return buffer


def driven(*lengths: int) -> UniformReplayBuffer:
    """Episodes of so many actions, boundaries included, every other one cut off."""
    buffer = UniformReplayBuffer(TRAJECTORY, 1, None)
    structure = Structure(TRAJECTORY)
    for number, steps in enumerate(lengths):
        times = np.arange(steps + 1.0, dtype="float32") + 100 * number
        rows = trajectories_of_episode(
            times[:, None],
            times[:steps].astype("int64"),
            times[:steps],
            terminated=number % 2 == 0,
            truncated=number % 2 == 1,
        )
        buffer.extend(structure.unflatten([np.asarray(leaf)[None] for leaf in structure.flatten(rows)]))
    return buffer


def rows_of(store: Path) -> Trajectory:
    with diskbuf.open(store) as buffer:
        rows: Trajectory = buffer.gather_all()
        return rows


# ---- beside each other


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".npz", ".h5"])
def test_an_export_under_way_is_not_disturbed_by_another_to_the_same_place(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"a{ending}"
    refused: list[Exception] = []

    def another(done: int, total: int) -> None:
        if not refused:
            with filled(5) as small, pytest.raises(StoreLockedError, match="one export at a time") as caught:
                export_store(small, file, force=True)
            refused.append(caught.value)

    with filled() as buffer:
        export_store(buffer, file, progress=another)
    assert refused
    import_store(file, tmp_path / "a.zarr")
    with diskbuf.open(tmp_path / "a.zarr") as copy:
        assert copy.next_id == 300
        assert_rows(copy.gather_all(), np.arange(300)[None], np.arange(2)[:, None])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"a{ending}", "a.zarr"]


def test_a_folder_under_way_is_not_disturbed_by_another_to_the_same_place(tmp_path: Path) -> None:
    with driven(3, 2) as buffer, driven(1) as other:

        def another(done: int, total: int) -> None:
            with pytest.raises(StoreLockedError):
                export_store(other, tmp_path / "a.rlds")

        export_store(buffer, tmp_path / "a.rlds", progress=another)
    import_store(tmp_path / "a.rlds", tmp_path / "a.zarr")
    assert rows_of(tmp_path / "a.zarr").reward.tolist() == [[0, 1, 2, 0, 100, 101, 0]]


@pytest.mark.parametrize("left", ["file", "folder", "link"])
@pytest.mark.parametrize("ending", [".parquet", ".rlds"])
def test_what_a_killed_export_left_is_cleared_away_whatever_it_is(tmp_path: Path, ending: str, left: str) -> None:
    temporary, precious = tmp_path / f".a{ending}.tmp", tmp_path / "precious"
    precious.write_text("kept")
    if left == "file":
        temporary.write_bytes(bytes(10**6))
    elif left == "folder":
        (temporary / "inside").mkdir(parents=True)
        (temporary / "inside" / "file").write_text("half")
    else:
        temporary.symlink_to(precious)
    with driven(3) as buffer:
        export_store(buffer, tmp_path / f"a{ending}")
    import_store(tmp_path / f"a{ending}", tmp_path / "a.zarr")
    assert rows_of(tmp_path / "a.zarr").reward.tolist() == [[0, 1, 2, 0]]
    assert precious.read_text() == "kept"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([f"a{ending}", "a.zarr", "precious"])


def test_of_many_exports_at_once_each_is_whole_or_refused(tmp_path: Path) -> None:
    refused: list[Exception] = []

    def export() -> None:
        try:
            with filled() as buffer:
                export_store(buffer, tmp_path / "a.arrow", force=True)
        except StoreLockedError as error:
            refused.append(error)

    threads = [threading.Thread(target=export) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) < len(threads)
    import_store(tmp_path / "a.arrow", tmp_path / "a.zarr")
    with diskbuf.open(tmp_path / "a.zarr") as copy:
        assert_rows(copy.gather_all(), np.arange(300)[None], np.arange(2)[:, None])
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


# ---- odd steps


@pytest.mark.parametrize(("first_id", "rewards"), [(3, [100, 101, 102, 0]), (7, [])])
def test_a_boundary_whose_episode_is_not_among_the_rows_is_no_transition(
    tmp_path: Path, first_id: int, rewards: list[float]
) -> None:
    with driven(3, 3) as buffer:  # the rows 3 and 7 are boundaries
        report = export_store(buffer, tmp_path / "a.rlds", first_id=first_id)
    import_store(tmp_path / "a.rlds", tmp_path / "a.zarr")
    assert rows_of(tmp_path / "a.zarr").reward.ravel().tolist() == rewards
    assert report.rows == len(rewards)


# ---- damage


def exported(tmp_path: Path, name: str, **options: Any) -> bytes:
    with filled(40) as buffer:
        export_store(buffer, tmp_path / name, options=options)
    return (tmp_path / name).read_bytes()


@pytest.mark.parametrize(
    ("ending", "options"),
    [
        (".parquet", {}),
        (".parquet", {"compression": "none", "arrays": "binary"}),
        (".arrow", {}),
        (".arrow", {"container": "stream"}),
        (".arrow", {"compression": "zstd"}),
        (".npz", {}),
        (".npz", {"compressed": True}),
        (".h5", {}),
        (".h5", {"compression": "gzip"}),
    ],
)
def test_a_flipped_bit_is_refused_in_one_error_or_is_in_nothing_that_counts(
    tmp_path: Path, ending: str, options: dict[str, Any]
) -> None:
    data = exported(tmp_path, f"a{ending}", **options)
    file, store = tmp_path / f"b{ending}", tmp_path / "b.zarr"
    draw = random.Random(3)
    refused = 0
    for place in sorted(draw.sample(range(len(data)), 60)):
        changed = bytearray(data)
        changed[place] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        try:
            import_store(file, store)
        except (DiskbufError, OSError):
            refused += 1
            assert not store.exists()
        else:
            with diskbuf.open(store) as copy:
                if copy.data_spec == Structure(SPEC).unflatten(Structure(SPEC).flatten(SPEC)):
                    rows = copy.gather_all()
                    assert (rows["number"] % 100 == np.arange(copy.batch_size)[:, None]).all()
                    assert_rows(rows, rows["number"][:1] // 100, np.arange(copy.batch_size)[:, None])
            shutil.rmtree(store)
        assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]
    assert refused


@pytest.mark.parametrize(("ending", "options"), [(".npz", {}), (".npz", {"compressed": True}), (".h5", {})])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, ending: str, options: dict[str, Any]) -> None:
    data = exported(tmp_path, f"a{ending}", **options)
    file = tmp_path / f"b{ending}"
    for size in range(0, len(data) - 1, len(data) // 40):
        file.write_bytes(data[:size])
        with pytest.raises((DiskbufError, OSError)):
            import_store(file, tmp_path / "b.zarr")


def test_a_stream_that_is_cut_between_its_batches_is_refused(tmp_path: Path) -> None:
    data = exported(tmp_path, "a.arrow", container="stream", batch_bytes=500)
    file = tmp_path / "b.arrow"
    whole = 0
    for size in range(len(data) - 2000, len(data), 8):
        file.write_bytes(data[:size])
        with pytest.raises(SpecError):
            import_store(file, tmp_path / "b.zarr")
        with contextlib.suppress(pa.ArrowInvalid, OSError):
            whole += pa.ipc.open_stream(file).read_all().num_rows < 80  # Arrow takes it for all there is
    assert whole


def test_steps_that_are_cut_between_two_are_refused(tmp_path: Path) -> None:
    with driven(3, 2) as buffer:
        export_store(buffer, tmp_path / "a.rlds")
    file = tmp_path / "a.rlds" / "steps.tfrecord"
    records = list(read_records(file))
    assert len(records) == 7
    for count in range(7):
        with RecordWriter(file) as writer:
            for record in records[:count]:
                writer.write(record)
        with pytest.raises(SpecError, match=f"must have the 7 steps that were exported, got {count}"):
            import_store(tmp_path / "a.rlds", tmp_path / "a.zarr")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.rlds"]


def test_changed_rows_of_an_arrow_file_are_named(tmp_path: Path) -> None:
    data = bytearray(exported(tmp_path, "a.arrow"))
    numbers = np.array([0, 1, 100, 101], "<i8").tobytes()  # of the first two ids
    data[data.index(numbers) + 8] ^= 2
    (tmp_path / "b.arrow").write_bytes(data)
    with pytest.raises(
        SpecError, match=r"column 'number' of .* must match its checksum, but rows 0 to 79 have changed"
    ):
        import_store(tmp_path / "b.arrow", tmp_path / "b.zarr")


@pytest.mark.parametrize("name", ["npz", "sb3"])
def test_an_array_that_is_in_a_file_twice_is_refused(tmp_path: Path, name: str) -> None:
    file, other = tmp_path / "a.npz", tmp_path / "b.npz"
    np.savez(file, rewards=np.zeros(3))
    np.savez(other, rewards=np.ones(3))
    with zipfile.ZipFile(other) as archive, zipfile.ZipFile(file, "a") as doubled, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        doubled.writestr("rewards.npy", archive.read("rewards.npy"))
    with pytest.raises(SpecError, match=r"must hold each array once, got 'rewards\.npy' more often"):
        import_store(
            file,
            tmp_path / "a.zarr",
            format=name,
            mapping=ColumnMap(leaves={"r": "rewards"}) if name == "npz" else None,
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"id": np.array(5)},
        {"id": np.zeros((3, 1), np.int64)},
        {"id": np.array([None] * 3, object)},
        {"id": np.array([2**63, 2**63 + 1, 2**63 + 2], np.uint64)},
        {"id": np.array([0, 1, 2**63 - 1])},
        {"lane": np.array(0)},
        {"lane": np.arange(1)},
        {"lane": np.zeros(0, np.int64)},
        {"lane": np.array(["a", "b"])},
        {"diskbuf_export": np.array(5)},
        {"diskbuf_export": np.array([None], object)},
        {"carried": {"lanes": []}},
        {"carried": {"lanes": [True, False]}},
        {"carried": {"first_id": None}},
        {"carried": {"first_id": -1}},
        {"carried": {"window_first_id": "0"}},
        {"carried": {"max_length": []}},
        {"carried": {"max_length": 0}},
        {"carried": {"runs": [2**70]}},
        {"carried": {"is_grid": 1}},
        {"carried": {"names": {"b": "a"}}},
        {"carried": {"names": [1]}},
    ],
    ids=str,
)
def test_an_export_that_somebody_has_edited_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with UniformReplayBuffer({"a": ArraySpec([2], "float32")}, 2) as buffer:
        buffer.extend({"a": np.zeros([2, 3, 2], "float32")})
        export_store(buffer, tmp_path / "a.npz")
    arrays = dict(np.load(tmp_path / "a.npz"))
    carried = json.loads(arrays["diskbuf_export"].tobytes()) | changes.get("carried", {})
    arrays["diskbuf_export"] = np.frombuffer(json.dumps(carried).encode(), np.uint8)
    np.savez(tmp_path / "b.npz", **(arrays | {key: value for key, value in changes.items() if key != "carried"}))
    with pytest.raises((SpecError, OptionError, StoreFormatError)):
        import_store(tmp_path / "b.npz", tmp_path / "b.zarr")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.npz", "b.npz"]


def test_a_type_that_numpy_has_not_is_no_leaf_and_no_obstacle(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["v"] = np.arange(3.0)
        h5py.h5d.create(file.id, b"times", h5py.h5t.UNIX_D32LE, h5py.h5s.create_simple((3,)))
    import_store(tmp_path / "a.h5", tmp_path / "a.zarr", mapping=ColumnMap(leaves={"v": "v"}, drop=["times"]))
    with pytest.raises(SpecError, match=r"column 'times' .* got a type that NumPy has not"):
        import_store(tmp_path / "a.h5", tmp_path / "b.zarr", mapping=ColumnMap(leaves={"v": "times"}, drop=["v"]))


@pytest.mark.parametrize("changes", [{"total_steps": None}, {"observation_space": '{"type": "Box"}'}], ids=str)
def test_a_minari_data_set_with_damaged_metadata_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with driven(3, 2) as buffer:
        export_store(buffer, tmp_path / "a-v0", format="minari")
    file = tmp_path / "a-v0" / "data" / "metadata.json"
    described = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in described.items() if value is not None}))
    with pytest.raises((SpecError, OptionError), match=r"a-v0.* must "):
        import_store(tmp_path / "a-v0", tmp_path / "a.zarr", format="minari")


# ---- a full disk


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
def test_a_minari_export_that_has_no_room_leaves_nothing_and_ends_well(tmp_path: Path, data_format: str) -> None:
    with UniformReplayBuffer(TRAJECTORY, 1, None, path=tmp_path / "a.zarr") as buffer, driven(*[50] * 60) as driver:
        buffer.extend(driver.gather_all())
    code = f"""
        import resource, signal
        import diskbuf
        from diskbuf.exchange.exporting import export_store
        with diskbuf.open({str(tmp_path / "a.zarr")!r}) as buffer:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))
            try:
                export_store(
                    buffer, {str(tmp_path / "a-v0")!r}, format="minari", options={{"data_format": {data_format!r}}}
                )
            except OSError as error:
                print(error)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "File too large" in run.stdout
    assert "Traceback" not in run.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.zarr"]


# ---- foreign files


def imported(tmp_path: Path, text: str, **mapping: Any) -> dict[str, Any]:
    (tmp_path / "a.csv").write_text(text)
    import_store(tmp_path / "a.csv", tmp_path / "a.zarr", mapping=ColumnMap(**mapping))
    with diskbuf.open(tmp_path / "a.zarr") as buffer:
        rows: dict[str, Any] = buffer.gather_all()
        return rows


@pytest.mark.parametrize("most", [2**63, 2**63 + 1, 2**64 - 1])
def test_ints_of_64_bits_without_a_sign_are_not_rounded_by_the_way(tmp_path: Path, most: int) -> None:
    rows = imported(tmp_path, f"v\n{most}\n{2**53 + 1}\n0\n", leaves={"v": "v"})
    assert rows["v"].dtype == np.uint64
    assert rows["v"].tolist() == [[most, 2**53 + 1, 0]]


def test_ints_of_one_array_are_not_rounded_where_some_are_large(tmp_path: Path) -> None:
    rows = imported(tmp_path, f"v[0],v[1]\n{2**64 - 1},{2**53 + 1}\n", leaves={"v": "v"})
    assert rows["v"].tolist() == [[[2**64 - 1, 2**53 + 1]]]


def test_large_floats_stay_floats(tmp_path: Path) -> None:
    rows = imported(tmp_path, "v,w\n1e20,18446744073709551616\n5,-1\n", leaves={"v": "v", "w": "w"})
    assert rows["v"].tolist() == [[1e20, 5]]
    assert rows["w"].tolist() == [[2.0**64, -1]]


def test_a_table_of_text_without_a_row_has_ids_too(tmp_path: Path) -> None:
    with UniformReplayBuffer({"a": ArraySpec([], "float32")}, 2) as buffer:
        export_store(buffer, tmp_path / "b.csv")
        rows = imported(tmp_path, (tmp_path / "b.csv").read_text(), spec=buffer.data_spec)
    assert rows["a"].shape == (1, 0)


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_text_that_is_no_utf_8_is_refused(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.csv").write_bytes("é\n1\n".encode(encoding))
    with pytest.raises(SpecError, match="must be a file of CSV that can be read"):
        import_store(tmp_path / "a.csv", tmp_path / "a.zarr", mapping=ColumnMap(leaves={"a": "é"}))


def test_text_is_not_read_as_complex_numbers(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="must be read as real numbers, got complex64"):
        imported(tmp_path, "a\n1\n", leaves={"a": "a"}, casts={"a": "complex64"})


def test_the_parts_of_a_table_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    pa_dataset.write_dataset(
        pa.table({"v": np.arange(36)}),
        tmp_path / "parts",
        format="parquet",
        max_rows_per_file=3,
        max_rows_per_group=3,
    )
    assert (tmp_path / "parts" / "part-10.parquet").exists()
    import_store(tmp_path / "parts", tmp_path / "a.zarr", format="parquet", mapping=ColumnMap(leaves={"v": "v"}))
    with diskbuf.open(tmp_path / "a.zarr") as buffer:
        assert buffer.gather_all()["v"].tolist() == [list(range(36))]


def test_a_table_in_partitions_is_refused_because_a_column_is_in_the_folders_names(tmp_path: Path) -> None:
    pq.write_to_dataset(
        pa.table({"v": np.arange(4), "lane": np.array([0, 1, 0, 1])}), tmp_path / "parts", partition_cols=["lane"]
    )
    with pytest.raises(OptionError, match=r"must hold all columns, got folders .*'lane=0'"):
        import_store(tmp_path / "parts", tmp_path / "a.zarr", format="parquet", mapping=ColumnMap(leaves={"v": "v"}))
    import_store(
        tmp_path / "parts" / "lane=1", tmp_path / "a.zarr", format="parquet", mapping=ColumnMap(leaves={"v": "v"})
    )
    with diskbuf.open(tmp_path / "a.zarr") as buffer:
        assert buffer.gather_all()["v"].tolist() == [[1, 3]]


def test_ids_that_leave_no_room_behind_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"the ids of .* must be below 2\*\*62, .* in row 1"):
        imported(tmp_path, f"id,a\n0,1\n{2**63 - 1},1\n", leaves={"a": "a"}, id="id")


def test_arrays_without_a_lane_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.zeros((0, 3)))
    with pytest.raises(SpecError, match="must have at least one lane, got none in 'a'"):
        import_store(
            tmp_path / "a.npz",
            tmp_path / "a.zarr",
            mapping=ColumnMap(leaves={"a": "a"}),
            options={"axes": "lanes,steps"},
        )


def test_timeouts_that_are_fewer_than_dones_are_refused(tmp_path: Path) -> None:
    steps = np.arange(5.0)[:, None]
    np.savez(
        tmp_path / "a.npz",
        observations=steps[..., None],
        next_observations=steps[..., None] + 1,
        actions=steps[..., None],
        rewards=steps,
        dones=np.zeros((5, 1)),
        timeouts=np.zeros((4, 1)),
        pos=3,
        full=False,
    )
    with pytest.raises(SpecError, match=r"'timeouts' of .* must be \[5, 1\], got \[4, 1\]"):
        import_store(tmp_path / "a.npz", tmp_path / "a.zarr", format="sb3")


@pytest.mark.parametrize("value", [5, True, 1.5, ["a"], {"a": 1}], ids=str)
@pytest.mark.parametrize("key", ["id", "lane", "drop"])
def test_a_mapping_of_the_wrong_kind_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"leaves": {"a": "a"}, key: value}))
    if (key, value) == ("drop", ["a"]):
        assert ColumnMap.from_file(tmp_path / "a.json").drop == ["a"]
        return
    with pytest.raises(OptionError, match=f"{key} must be"):
        ColumnMap.from_file(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("compression", "level"), [("none", 1), ("snappy", 3), ("zstd", 23), ("zstd", 10**12), ("gzip", 10), ("lz4", 0)]
)
def test_a_level_that_the_compression_has_not_is_refused(tmp_path: Path, compression: str, level: int) -> None:
    with filled(3) as buffer, pytest.raises(OptionError, match="level must be "):
        export_store(buffer, tmp_path / "a.parquet", options={"compression": compression, "level": level})
    assert not list(tmp_path.iterdir())
