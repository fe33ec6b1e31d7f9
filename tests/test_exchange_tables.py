"""Stores to files and back: every format and dtype, read by the packages that the files are for too."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import hypothesis
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from coded_rows import SPEC, Pair, assert_equal, assert_rows, rows, span
from hypothesis import strategies as st

import diskbuf
from diskbuf import ArraySpec, BoundedArraySpec, StoreOptions, UniformReplayBuffer
from diskbuf.exchange.exporting import export_store
from diskbuf.exchange.formats import endings_of, format_class, format_names, format_of
from diskbuf.exchange.importing import import_store
from diskbuf.exchange.mapping import ColumnMap
from diskbuf.tree import Structure

LOSSLESS = ("parquet", "arrow", "npz", "hdf5")
ENDINGS = {"parquet": ".parquet", "arrow": ".arrow", "npz": ".npz", "hdf5": ".h5", "csv": ".csv"}
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


def odd_values(dtype: str, count: int) -> np.ndarray:
    """Every kind of value of a dtype: ends of its range, infinities, -0.0, NaN with a payload; random ones behind."""
    kind = np.dtype(dtype)
    rng = np.random.default_rng(7)
    found = np.frombuffer(rng.bytes(count * kind.itemsize), kind).copy()
    if kind.kind == "b":
        return (np.frombuffer(rng.bytes(count), np.uint8) > 127).astype(bool)
    if kind.kind in "iu":
        found[:3] = np.iinfo(kind).min, np.iinfo(kind).max, 0
        return found
    floats = found.view(f"f{kind.itemsize // (2 if kind.kind == 'c' else 1)}")
    info = np.finfo(floats.dtype)
    floats[:8] = info.max, info.tiny, info.smallest_subnormal, -0.0, 0.0, np.inf, -np.inf, np.nan
    bits = floats.view(f"u{floats.itemsize}")
    bits[8] = bits[7] | 5  # a NaN that carries something
    bits[9] = bits[7] | (1 << (8 * floats.itemsize - 1))
    bits[10] = bits[5] | 3  # one that signals
    return found


def same_bits(left: Any, right: Any) -> None:
    structure = Structure(left)
    for path, one, other in zip(structure.paths, structure.flatten(left), structure.flatten(right), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        assert np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes(), path


def assert_same_store(path: Path, buffer: UniformReplayBuffer) -> None:
    with diskbuf.open(path) as copy:
        assert copy.data_spec == buffer.data_spec
        assert Structure(copy.data_spec).to_json() == Structure(buffer.data_spec).to_json()
        assert (copy.batch_size, copy.first_id, copy.next_id) == (buffer.batch_size, buffer.first_id, buffer.next_id)
        assert (copy.metadata, copy.max_length) == (buffer.metadata, buffer.max_length)
        same_bits(copy.gather_all(), buffer.gather_all())
    assert not diskbuf.verify(path).faults


def round_trip(buffer: UniformReplayBuffer, folder: Path, name: str, **options: Any) -> Path:
    file, store = folder / f"file{ENDINGS[name]}", folder / f"{name}.zarr"
    report = export_store(buffer, file, options=options)
    assert report.format == name
    assert report.rows == buffer.num_frames()
    assert report.bytes_written == file.stat().st_size
    import_store(file, store)
    return store


def test_the_endings_known_beforehand_are_those_of_the_formats() -> None:
    assert {name: format_class(name).endings for name in format_names()} == {
        name: endings_of(name) for name in format_names()
    }
    assert {name: format_class(name).name for name in format_names()} == {name: name for name in format_names()}


def test_a_format_is_found_by_the_ending_or_named(tmp_path: Path) -> None:
    assert format_of("a.PQ").name == "parquet"
    assert format_of("s3://bucket/a.feather").name == "arrow"
    assert format_of("whatever", "npz").name == "npz"
    with pytest.raises(diskbuf.OptionError, match=r"must be named where the ending doesn't tell it"):
        format_of("a.txt")
    with pytest.raises(diskbuf.OptionError, match=r"format must be one of .*got 'xls'"):
        format_of("a.parquet", "xls")
    with pytest.raises(diskbuf.OptionError, match=r"options of the format parquet must be of compression, .*got speed"):
        format_of("a.parquet", options={"speed": 3})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSLESS)
def test_every_bit_of_every_dtype_comes_back(tmp_path: Path, name: str, dtype: str) -> None:
    values = odd_values(dtype, 60)
    spec = {"one": ArraySpec([], dtype), "many": ArraySpec([2, 3], dtype), "none": ArraySpec([0, 2], dtype)}
    with UniformReplayBuffer(spec, 2, None) as buffer:
        one = values[:20].reshape(2, 10)
        many = np.resize(values, 120).reshape(2, 10, 2, 3)
        buffer.extend({"one": one, "many": many, "none": np.zeros([2, 10, 0, 2], dtype)})
        assert_same_store(round_trip(buffer, tmp_path, name), buffer)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if not dtype.startswith("complex")])
def test_every_number_comes_back_from_csv(tmp_path: Path, dtype: str) -> None:
    values = odd_values(dtype, 60)
    if np.dtype(dtype).kind == "f":
        values[np.isnan(values)] = np.nan  # text has no bits of a NaN
    with UniformReplayBuffer({"one": ArraySpec([], dtype), "many": ArraySpec([2, 2], dtype)}, 2, None) as buffer:
        buffer.extend({"one": values[:20].reshape(2, 10), "many": np.resize(values, 80).reshape(2, 10, 2, 2)})
        export_store(buffer, tmp_path / "a.csv", options={"flatten": True})
        import_store(tmp_path / "a.csv", tmp_path / "a.zarr", mapping=ColumnMap(spec=buffer.data_spec))
        with diskbuf.open(tmp_path / "a.zarr") as copy:
            assert_equal(copy.gather_all(), buffer.gather_all())
            same_bits(copy.gather_all(), buffer.gather_all())


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_nest_comes_back_with_bounds_names_ids_runs_and_metadata(tmp_path: Path, name: str) -> None:
    spec = {**SPEC, "bounded": BoundedArraySpec([2], "float32", [-1, -2], math.inf, name="a bound")}
    metadata = {"made by": ["a", None, 1.5]}

    def some(first_id: int, next_id: int) -> Any:
        return {**span(first_id, next_id, 3), "bounded": np.zeros([3, next_id - first_id, 2], "float32")}

    with UniformReplayBuffer(spec, 3, 40, path=tmp_path / "a.zarr", metadata=metadata) as buffer:
        buffer.extend(some(0, 30))
    with UniformReplayBuffer(spec, 3, 40, path=tmp_path / "a.zarr") as buffer:
        buffer.extend(some(30, 57))
        assert buffer._opened().runs == (0, 30)
        path = round_trip(buffer, tmp_path, name)
        assert_same_store(path, buffer)
        with diskbuf.open(path) as copy:
            assert copy._opened().runs == (0, 30)
            assert isinstance(copy.data_spec["pair"], Pair)
            assert copy.data_spec["bounded"].name == "a bound"


leaf_specs = st.builds(ArraySpec, st.lists(st.integers(0, 3), max_size=3), st.sampled_from(DTYPES))
keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)
nests = st.recursive(
    leaf_specs,
    lambda inner: st.one_of(
        st.dictionaries(keys, inner, min_size=1, max_size=3),
        st.lists(inner, min_size=1, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
    ),
    max_leaves=5,
)


@pytest.mark.parametrize("name", LOSSLESS)
@hypothesis.settings(max_examples=25, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(spec=nests, lanes=st.integers(1, 3), steps=st.integers(0, 7), data=st.data())
def test_any_nest_comes_back(
    tmp_path_factory: pytest.TempPathFactory, name: str, spec: Any, lanes: int, steps: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("nest")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    structure = Structure(spec)
    with UniformReplayBuffer(spec, lanes, None) as buffer:
        leaves = []
        for leaf in structure.flatten(spec):
            size = lanes * steps * math.prod(leaf.shape)
            bits = np.frombuffer(rng.bytes(size * leaf.dtype.itemsize), leaf.dtype)
            bits = bits if leaf.dtype.kind != "b" else bits.view(np.uint8) % 2 == 1
            leaves.append(bits.reshape(lanes, steps, *leaf.shape))
        if steps:
            buffer.extend(structure.unflatten(leaves))
        assert_same_store(round_trip(buffer, folder, name), buffer)


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("options", [{"layout": "arrow"}, {"codec": "zstd"}])
def test_a_sealed_store_comes_out_and_goes_in(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    sealed = StoreOptions(chunk_bytes=2**10, **options)
    with UniformReplayBuffer(SPEC, 2, 100, path=tmp_path / "a.zarr", options=sealed) as buffer:
        buffer.extend(span(0, 130, 2))
    with diskbuf.open(tmp_path / "a.zarr") as buffer:
        export_store(buffer, tmp_path / f"a{ENDINGS[name]}")
        import_store(tmp_path / f"a{ENDINGS[name]}", tmp_path / "b.zarr", store_options=sealed)
        assert_same_store(tmp_path / "b.zarr", buffer)
        with diskbuf.open(tmp_path / "b.zarr") as copy:
            assert (copy.layout, copy.codec) == (buffer.layout, buffer.codec)


@pytest.mark.parametrize("name", LOSSLESS)
def test_an_imported_store_goes_on_where_it_stopped(tmp_path: Path, name: str) -> None:
    with UniformReplayBuffer(SPEC, 2, 50) as buffer:
        buffer.extend(span(0, 77, 2))
        path = round_trip(buffer, tmp_path, name)
    with diskbuf.open(path, mode="r+") as copy:
        copy.extend(span(77, 140, 2))
        assert (copy.first_id, copy.next_id) == (90, 140)
        assert_rows(copy.gather_all(), np.arange(90, 140)[None], np.arange(2)[:, None])
    assert not diskbuf.verify(path).faults


@pytest.mark.parametrize("name", LOSSLESS)
def test_history_comes_back_with_the_window_in_it(tmp_path: Path, name: str) -> None:
    options = StoreOptions(chunk_bytes=2**9)
    with UniformReplayBuffer(SPEC, 2, 30, path=tmp_path / "a.zarr", keep_history=True, options=options) as buffer:
        buffer.extend(span(0, 40, 2))
        buffer.clear()
        buffer.extend(span(40, 52, 2))
    with diskbuf.open(tmp_path / "a.zarr", history=True) as buffer:
        assert (buffer.first_id, buffer.next_id) == (0, 52)
        round_trip(buffer, tmp_path, name)
    with diskbuf.open(tmp_path / f"{name}.zarr") as copy, diskbuf.open(tmp_path / "a.zarr") as buffer:
        assert (copy.first_id, copy.next_id) == (buffer.first_id, buffer.next_id) == (40, 52)
    with diskbuf.open(tmp_path / f"{name}.zarr", history=True) as copy:
        assert_rows(copy.gather_all(), np.arange(52)[None], np.arange(2)[:, None])


@pytest.mark.parametrize("name", LOSSLESS)
def test_ids_and_lanes_can_be_chosen(tmp_path: Path, name: str) -> None:
    file = tmp_path / f"a{ENDINGS[name]}"
    with UniformReplayBuffer(SPEC, 3, None) as buffer:
        buffer.extend(span(0, 20, 3))
        report = export_store(buffer, file, first_id=5, next_id=9, lanes=[0, 2])
    assert (report.rows, report.first_id, report.next_id, report.lanes) == (8, 5, 9, (0, 2))
    import_store(file, tmp_path / "b.zarr")
    with diskbuf.open(tmp_path / "b.zarr") as copy:
        assert (copy.first_id, copy.next_id, copy.batch_size) == (5, 9, 2)
        assert_rows(copy.gather_all(), np.arange(5, 9)[None], np.array([[0], [2]]))


@pytest.mark.parametrize("name", LOSSLESS)
def test_an_empty_window_comes_back(tmp_path: Path, name: str) -> None:
    with UniformReplayBuffer(SPEC, 2, 10) as buffer:
        assert_same_store(round_trip(buffer, tmp_path, name), buffer)


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_file_without_some_leaves_needs_a_mapping(tmp_path: Path, name: str) -> None:
    file = tmp_path / f"a{ENDINGS[name]}"
    with UniformReplayBuffer(SPEC, 2, None) as buffer:
        buffer.extend(span(0, 6, 2))
        export_store(buffer, file, columns=["number", "image"])
    with pytest.raises(diskbuf.OptionError, match="exported without 'is_odd/0', 'pair/exact', 'pair/coarse'"):
        import_store(file, tmp_path / "b.zarr")
    assert not (tmp_path / "b.zarr").exists()
    mapping = ColumnMap(leaves={"count": "number", "camera/front": "image"}, id="id", lane="lane")
    import_store(file, tmp_path / "b.zarr", mapping=mapping)
    with diskbuf.open(tmp_path / "b.zarr") as copy:
        assert copy.data_spec == {"count": ArraySpec([], "int64"), "camera": {"front": ArraySpec([2, 3], "uint8")}}
        assert_equal(copy.gather_all()["count"], span(0, 6, 2)["number"])


# ---- what other programs see


@pytest.fixture
def filled() -> Any:
    spec = {
        "observation": {"camera": ArraySpec([2, 3], "uint8"), "speed": ArraySpec([], "float32")},
        "is_done": ArraySpec([], "bool"),
    }
    with UniformReplayBuffer(spec, 2, None) as buffer:
        for t in range(4):
            buffer.add_batch(
                {
                    "observation": {
                        "camera": np.full([2, 2, 3], t, "uint8"),
                        "speed": np.array([t, t + 0.1], "float32"),
                    },
                    "is_done": np.array([False, t == 3]),
                }
            )
        yield buffer


def test_other_programs_read_the_parquet_file(tmp_path: Path, filled: UniformReplayBuffer) -> None:
    export_store(filled, tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    assert table.column_names == ["id", "lane", "is_done", "observation/camera", "observation/speed"]
    assert table["id"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert table["lane"].to_pylist() == [0, 1] * 4
    assert table.schema.field("observation/camera").type == pa.fixed_shape_tensor(pa.uint8(), [2, 3])
    frame = pd.read_parquet(tmp_path / "a.parquet")
    assert frame["is_done"].sum() == 1
    np.testing.assert_array_equal(
        np.stack(frame["observation/camera"].to_list()), np.repeat(np.arange(4), 2)[:, None] * np.ones(6)
    )
    polars = pl.read_parquet(tmp_path / "a.parquet", columns=["observation/speed"])
    assert polars["observation/speed"].to_numpy().tolist() == pytest.approx([0, 0.1, 1, 1.1, 2, 2.1, 3, 3.1])


def test_other_programs_read_the_arrow_file(tmp_path: Path, filled: UniformReplayBuffer) -> None:
    export_store(filled, tmp_path / "a.feather", options={"compression": "lz4"})
    table = pyarrow.feather.read_table(tmp_path / "a.feather")
    assert table["observation/camera"].combine_chunks().to_numpy_ndarray().shape == (8, 2, 3)
    assert pd.read_feather(tmp_path / "a.feather")["id"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    export_store(filled, tmp_path / "stream.arrow", options={"container": "stream"})
    with pa.ipc.open_stream(tmp_path / "stream.arrow") as reader:
        assert reader.read_all().num_rows == 8
    import_store(tmp_path / "stream.arrow", tmp_path / "b.zarr")
    assert_same_store(tmp_path / "b.zarr", filled)


def test_other_programs_read_the_csv_file(tmp_path: Path, filled: UniformReplayBuffer) -> None:
    with pytest.raises(diskbuf.OptionError, match=r"got arrays in 'observation/camera'. Choose the others, flatten"):
        export_store(filled, tmp_path / "a.csv")
    assert not list(tmp_path.iterdir())
    export_store(filled, tmp_path / "a.csv", columns=["observation/speed", "is_done"])
    frame = pd.read_csv(tmp_path / "a.csv")
    assert frame.columns.tolist() == ["id", "lane", "observation/speed", "is_done"]
    np.testing.assert_array_equal(frame["observation/speed"].to_numpy("float32")[1::2], np.float32(np.arange(4) + 0.1))
    export_store(filled, tmp_path / "b.csv", options={"flatten": True}, columns=["observation/camera"])
    assert (tmp_path / "b.csv").read_text().splitlines()[0].count("observation/camera[") == 6
    assert pa_csv.read_csv(tmp_path / "b.csv")["observation/camera[1,2]"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("compressed", [False, True])
def test_numpy_reads_the_npz_file(tmp_path: Path, filled: UniformReplayBuffer, compressed: bool) -> None:
    export_store(filled, tmp_path / "a.npz", options={"compressed": compressed})
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["observation/camera"].shape == (4, 2, 2, 3)
        np.testing.assert_array_equal(arrays["id"], np.arange(4))
        np.testing.assert_array_equal(arrays["lane"], [0, 1])
        speeds = filled.gather_all()["observation"]["speed"]
        np.testing.assert_array_equal(arrays["observation/speed"], speeds.swapaxes(0, 1))


@pytest.mark.parametrize("compression", ["none", "gzip", "lzf"])
def test_h5py_reads_the_hdf5_file(tmp_path: Path, filled: UniformReplayBuffer, compression: str) -> None:
    export_store(filled, tmp_path / "a.h5", options={"compression": compression})
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["observation/camera"].shape == (4, 2, 2, 3)
        assert file["is_done"].dtype == bool
        assert file["observation"]["speed"][3, 1] == np.float32(3.1)
        assert file["observation/camera"].compression == (None if compression == "none" else compression)
    assert (tmp_path / "a.h5").stat().st_size < 100_000


def test_a_folder_of_parquet_files_is_one_table(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    with UniformReplayBuffer(SPEC, 2, None) as buffer:
        buffer.extend(span(0, 50, 2))
        export_store(buffer, folder / "a.parquet", next_id=20)
        export_store(buffer, folder / "b.parquet", first_id=20)
        table = pq.read_table(folder / "a.parquet")
        pq.write_table(
            table.replace_schema_metadata(pq.read_schema(folder / "b.parquet").metadata), folder / "a.parquet"
        )
        import_store(folder, tmp_path / "b.zarr", format="parquet")
        with diskbuf.open(tmp_path / "b.zarr") as copy:
            same_bits(copy.gather_all(), buffer.gather_all())


# ---- what came from elsewhere


def test_leaves_that_are_called_as_the_keys_come_back(tmp_path: Path) -> None:
    spec = {"id": ArraySpec([], "float32"), "lane": ArraySpec([2], "int8"), "diskbuf_export": ArraySpec([], "int16")}
    with UniformReplayBuffer(spec, 2, None) as buffer:
        buffer.extend(
            {
                "id": np.arange(6, dtype="float32").reshape(2, 3),
                "lane": np.ones([2, 3, 2], "int8"),
                "diskbuf_export": np.zeros([2, 3], "int16"),
            }
        )
        for name in LOSSLESS:
            assert_same_store(round_trip(buffer, tmp_path, name), buffer)


def test_an_export_of_a_newer_version_says_so(tmp_path: Path, filled: UniformReplayBuffer) -> None:
    export_store(filled, tmp_path / "a.parquet")
    table = pq.read_table(tmp_path / "a.parquet")
    carried = json.loads(table.schema.metadata[b"diskbuf_export"]) | {"format": 2}
    pq.write_table(table.replace_schema_metadata({"diskbuf_export": json.dumps(carried)}), tmp_path / "b.parquet")
    with pytest.raises(diskbuf.StoreFormatError, match=r"must be of format 1 at most, got 2. Update diskbuf"):
        import_store(tmp_path / "b.parquet", tmp_path / "b.zarr")
    pq.write_table(table.replace_schema_metadata({"diskbuf_export": "no"}), tmp_path / "b.parquet")
    with pytest.raises(diskbuf.StoreFormatError, match="must be what an export writes"):
        import_store(tmp_path / "b.parquet", tmp_path / "b.zarr")


def edited(path: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    table = pq.read_table(path)
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), path)
    return path


def test_rows_that_are_missing_in_an_export_begin_a_run(tmp_path: Path) -> None:
    with UniformReplayBuffer(SPEC, 2, None) as buffer:
        buffer.extend(span(0, 10, 2))
        export_store(buffer, tmp_path / "a.parquet", first_id=1)
    edited(tmp_path / "a.parquet", lambda table: pa.concat_tables([table.slice(0, 6), table.slice(10)]))
    report = import_store(tmp_path / "a.parquet", tmp_path / "b.zarr")
    assert report.gaps == 1
    with diskbuf.open(tmp_path / "b.zarr") as copy:
        assert (copy.first_id, copy.next_id) == (1, 8)
        assert copy._opened().runs == (0, 4)
        ids = np.array([1, 2, 3, 6, 7, 8, 9])
        assert_equal(copy.gather_all(), rows(ids[None], np.arange(2)[:, None]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.slice(0, 7), "must be 2 for each id, one a lane, but the last id has 1"),
        (lambda table: pa.concat_tables([table.slice(0, 1), table.slice(2)]), "the lanes of .* in row 1"),
        (lambda table: pa.concat_tables([table.slice(4), table.slice(0, 4)]), "must ascend, got 0 in row"),
        (lambda table: table.drop_columns("id"), "must have the columns 'id' and 'lane'"),
        (lambda table: table.drop_columns("number"), "column must be one of those of .*, got 'number'"),
    ],
)
def test_an_export_that_was_changed_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    with UniformReplayBuffer(SPEC, 2, None) as buffer:
        buffer.extend(span(0, 8, 2))
        export_store(buffer, tmp_path / "a.parquet")
    edited(tmp_path / "a.parquet", change)
    with pytest.raises((diskbuf.SpecError, diskbuf.OptionError), match=message):
        import_store(tmp_path / "a.parquet", tmp_path / "b.zarr")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("arrays", ["auto", "list", "binary"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_of_arrays_comes_back_from_parquet_however_they_are_stored(
    tmp_path: Path, dtype: str, arrays: str
) -> None:
    spec = {"large": diskbuf.ArraySpec([16, 17], dtype), "small": diskbuf.ArraySpec([3], dtype)}
    values = odd_values(dtype, 2 * 5 * 275)
    items = {
        "large": values[: 2 * 5 * 272].reshape(2, 5, 16, 17),
        "small": values[2 * 5 * 272 :].reshape(2, 5, 3),
    }
    with UniformReplayBuffer(spec, 2, None) as buffer:
        buffer.extend(items)
        store = round_trip(buffer, tmp_path, "parquet", arrays=arrays, row_group_bytes=2000)
        assert_same_store(store, buffer)
    schema = pq.read_schema(tmp_path / "file.parquet")
    found = {name: pa.types.is_fixed_size_binary(schema.field(name).type) for name in spec}
    assert found == {
        "large": arrays != "list",
        "small": arrays == "binary",
    }


def test_other_programs_read_the_frames_of_a_parquet_file(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 255, [2, 5, 16, 16], np.uint8)
    with UniformReplayBuffer({"frame": diskbuf.ArraySpec([16, 16], "uint8")}, 2, None) as buffer:
        buffer.extend({"frame": frames})
        export_store(buffer, tmp_path / "a.parquet")
    told = json.loads(pq.read_schema(tmp_path / "a.parquet").field("frame").metadata[b"diskbuf.array"])
    frame = pd.read_parquet(tmp_path / "a.parquet")
    found = [np.frombuffer(raw, told["dtype"]).reshape(told["shape"]) for raw in frame["frame"]]
    np.testing.assert_array_equal(found, frames.swapaxes(0, 1).reshape(10, 16, 16))


def test_bytes_that_nothing_describes_are_no_numbers(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([b"abcd"], pa.binary(4))}), tmp_path / "a.parquet")
    with pytest.raises(diskbuf.DiskbufError, match="'x'"):
        import_store(tmp_path / "a.parquet", tmp_path / "b.zarr", mapping=ColumnMap(leaves={"x": "x"}))
    for told in ('{"dtype": "<f8", "shape": [1]}', '{"dtype": "O", "shape": []}', "[]", "no"):
        field = pa.field("x", pa.binary(4), metadata={"diskbuf.array": told})
        table = pa.table({"x": pa.array([b"abcd"], pa.binary(4))}).cast(pa.schema([field]))
        pq.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(diskbuf.DiskbufError, match="'x'"):
            import_store(tmp_path / "a.parquet", tmp_path / "b.zarr", mapping=ColumnMap(leaves={"x": "x"}))
    assert not (tmp_path / "b.zarr").exists()
