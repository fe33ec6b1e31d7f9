"""What is on disk: exact bytes, awkward specs, and stores that zarr, xarray and TensorStore read without diskbuf."""

import collections
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optree
import pytest
import zarr

import diskbuf
from diskbuf import ArraySpec, BoundedArraySpec, StoreOptions, UniformReplayBuffer

TINY = StoreOptions(chunk_bytes=64, fsync="never")

DTYPES = {
    "bool": 1,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of an element, in a store as in memory."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.zarr"


def awkward_values(dtype: str) -> np.ndarray:
    """The values of a dtype most easily damaged: ends of its range, negative zero, NaN with a payload."""
    kind = np.dtype(dtype).kind
    if kind == "b":
        return np.array([True, False, True, True])
    if kind in "iu":
        info = np.iinfo(dtype)
        return np.array([info.min, info.max, info.max - 1, info.min + 1], dtype)
    if kind == "f":
        info = np.finfo(dtype)
        return np.array([info.max, -0.0, np.nan, info.smallest_subnormal], dtype)
    return np.array([complex(np.inf, -0.0), complex(np.nan, 1), 1j, -1 - 1e-7j], dtype)


def chunk_bytes_of(folder: Path) -> bytes:
    """All chunk files of a column one after the other."""
    chunks = sorted(folder.glob("c.*"), key=lambda file: int(file.name.split(".")[1]))
    return b"".join(file.read_bytes() for file in chunks)


# ---- dtypes


@pytest.mark.parametrize("options", [StoreOptions(), TINY])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_exact_on_disk_and_when_sampled(path: Path, dtype: str, options: StoreOptions) -> None:
    values = awkward_values(dtype)
    with UniformReplayBuffer(ArraySpec([4], dtype), 2, 10, path=path, options=options, seed=0) as buffer:
        for shift in range(6):
            buffer.add_batch(np.stack([np.roll(values, shift), np.roll(values, shift)[::-1]]))
        sample, _ = buffer.get_next(20)
        assert sample.dtype == np.dtype(dtype)
        assert {row.tobytes() for row in sample} <= {
            np.roll(order, n).tobytes() for order in (values, values[::-1]) for n in range(4)
        }
        everything = buffer.gather_all()
    assert everything.dtype == np.dtype(dtype)
    rows = np.stack([np.stack([np.roll(values, n), np.roll(values, n)[::-1]]) for n in range(6)])
    assert everything.swapaxes(0, 1).tobytes() == rows.tobytes()
    on_disk = chunk_bytes_of(path / "data")
    assert on_disk[: rows.nbytes] == rows.tobytes()
    assert rows.nbytes == 6 * 2 * 4 * DTYPES[dtype]
    assert zarr.open_group(path, mode="r")["data"].dtype == np.dtype(dtype)


@pytest.mark.parametrize("rank", range(6))
def test_uint8_arrays_of_every_rank_come_back_byte_for_byte(path: Path, rank: int) -> None:
    """Images too: nothing is lossy unless asked."""
    shape = (3, 2, 4, 2, 3)[:rank]
    rng = np.random.default_rng(rank)
    frames = rng.integers(0, 256, (2, 9, *shape), dtype="uint8")
    with UniformReplayBuffer(ArraySpec(shape, "uint8"), 2, 20, path=path, options=TINY) as buffer:
        buffer.extend(frames)
    with diskbuf.open(path) as buffer:
        assert buffer.gather_all().tobytes() == frames.tobytes()
    assert chunk_bytes_of(path / "data")[: frames.nbytes] == frames.swapaxes(0, 1).tobytes()


def test_a_float64_is_never_cast_to_the_specs_float32(path: Path) -> None:
    with UniformReplayBuffer({"reward": ArraySpec([], "float32")}, path=path) as buffer:
        for add, shape in ((buffer.add_batch, [1]), (buffer.extend, [1, 1])):
            with pytest.raises(diskbuf.SpecError, match=r"leaf 'reward' must be float32 .*, got float64"):
                add({"reward": np.zeros(shape)})
        assert buffer.num_frames() == 0


# ---- specs


class Policy(NamedTuple):
    info: Any
    state: Any


NUMBER = ArraySpec([], "int32")

SPECS = {
    "a bare leaf": NUMBER,
    "an empty tuple": {"action": NUMBER, "policy_info": ()},
    "an empty dict": {"action": NUMBER, "policy_info": {}},
    "an empty list and None": ([], NUMBER, None),
    "dicts of tuples of dicts": {"a": ({"b": (NUMBER, {"c": NUMBER})}, NUMBER)},
    "keys with / . space and umlauts": {
        "a/b": NUMBER,
        "a": {"b": NUMBER},
        "c.0": NUMBER,
        "zarr.json": NUMBER,
        "ä ö": NUMBER,
    },
    "keys of other scripts": {"観測": NUMBER, "действие": NUMBER, "🎲": NUMBER},
    "keys that files can't have": {
        "": NUMBER,
        ".": NUMBER,
        "..": NUMBER,
        "c": NUMBER,
        ".diskbuf": NUMBER,
        "con": NUMBER,
    },
    "keys that differ by case": {"a": NUMBER, "A": NUMBER},
    "int keys": {1: NUMBER, 0: NUMBER},
    "a long key": {"k" * 200: NUMBER},
    "lists": [NUMBER, [NUMBER, (NUMBER,)]],
    "a namedtuple": Policy(NUMBER, (NUMBER, Policy((), NUMBER))),
    "an ordered dict": collections.OrderedDict([("z", NUMBER), ("a", NUMBER)]),
    "bounds": {"action": BoundedArraySpec([2], "float32", [-1, -2], 1.5, "action")},
}


def numbered(spec: Any, first: int) -> Any:
    """One step of 2 lanes whose leaves all differ."""
    leaves, structure = optree.tree_flatten(spec)
    return structure.unflatten(
        [np.full((2, *leaf.shape), first * 100 + number, leaf.dtype) for number, leaf in enumerate(leaves)]
    )


@pytest.mark.parametrize("kind", SPECS)
def test_an_awkward_spec_and_its_rows_are_equal_after_reopening(path: Path, kind: str) -> None:
    spec = SPECS[kind]
    with UniformReplayBuffer(spec, 2, 10, path=path) as buffer:
        for step in range(3):
            buffer.add_batch(numbered(spec, step))
        before = buffer.gather_all()
    for buffer in (diskbuf.open(path), UniformReplayBuffer(spec, 2, 10, path=path)):
        with buffer:
            assert buffer.data_spec == spec
            assert optree.tree_structure(buffer.data_spec) == optree.tree_structure(spec)
            after = buffer.gather_all()
            assert optree.tree_structure(after) == optree.tree_structure(spec)
            for number, (left, right) in enumerate(
                zip(optree.tree_leaves(before), optree.tree_leaves(after), strict=True)
            ):
                assert left.tobytes() == right.tobytes()
                assert (right.reshape(2, 3, -1)[0, :, 0] == [number, 100 + number, 200 + number]).all()


@pytest.mark.parametrize("kind", SPECS)
def test_zarr_lists_every_leaf_of_an_awkward_spec(path: Path, kind: str) -> None:
    with UniformReplayBuffer(SPECS[kind], 2, 10, path=path) as buffer:
        buffer.add_batch(numbered(SPECS[kind], 0))
    arrays = [
        array for _, array in zarr.open_group(path, mode="r").members(max_depth=None) if isinstance(array, zarr.Array)
    ]
    assert sorted(int(array[:].flat[0]) for array in arrays) == list(range(len(optree.tree_leaves(SPECS[kind]))))


def test_specs_keep_names_and_bounds(path: Path) -> None:
    spec = BoundedArraySpec([2], "float32", [-1, -2], 1.5, "steer")
    UniformReplayBuffer(spec, path=path).close()
    with diskbuf.open(path) as buffer:
        assert buffer.data_spec.name == "steer"
        assert buffer.data_spec.minimum.tolist() == [-1, -2]
        assert buffer.data_spec.maximum.tolist() == 1.5


def test_a_namedtuple_whose_class_is_gone_comes_back_as_an_equal_one(path: Path) -> None:
    class Gone(NamedTuple):
        left: Any
        right: Any

    spec = Gone(NUMBER, NUMBER)
    with UniformReplayBuffer(spec, 2, path=path) as buffer:
        buffer.add_batch(numbered(spec, 1))
    with diskbuf.open(path, "r+") as buffer:
        assert type(buffer.data_spec).__name__.endswith("Gone")
        assert buffer.data_spec._fields == ("left", "right")
        buffer.add_batch(numbered(spec, 2))
        assert buffer.gather_all().right[0].tolist() == [101, 201]


# ---- what a store is made of


def test_a_store_holds_zarr_files_raw_chunks_and_its_own_state_and_nothing_else(path: Path) -> None:
    with UniformReplayBuffer(
        {"a": NUMBER, "b": (ArraySpec([2], "bool"),)}, 2, 5, path=path, metadata={"x": 1}
    ) as buffer:
        buffer.extend(optree.tree_map(lambda spec: np.zeros((2, 8, *spec.shape), spec.dtype), buffer.data_spec))
    names = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert names - {".diskbuf/checksums.arrow"} == {
        *("zarr.json", "a/zarr.json", "b/zarr.json", "b/0/zarr.json"),
        *("a/c.0.0", "b/0/c.0.0.0"),
        *(".diskbuf/live", ".diskbuf/lock", ".diskbuf/manifest.json"),
    }


def test_a_store_holds_no_pickle_and_no_object_dtype(path: Path) -> None:
    spec = {"a": NUMBER, "b": Policy(ArraySpec([2], "float16"), ()), "c": BoundedArraySpec([], "int8", 0, 1)}
    with UniformReplayBuffer(spec, 2, 5, path=path, metadata={"x": [1, "y"]}) as buffer:
        buffer.add_batch(numbered(spec, 0))
    for file in path.rglob("zarr.json"):
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["node_type"] == "array":
            assert document["data_type"] in DTYPES
            assert [codec["name"] for codec in document["codecs"]] == ["bytes"]
        assert "pickle" not in file.read_text()
    for file in path.rglob("*"):
        if file.is_file():
            assert not re.match(rb"\x80[\x02-\x05]", file.read_bytes()[:2]), f"{file} begins as a pickle does"


def test_opening_a_store_imports_no_pickle_of_its_own(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data from others must not run code."""
    import pickle

    UniformReplayBuffer(SPECS["a namedtuple"], path=path).close()

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(pickle, "loads", refused)
    monkeypatch.setattr(pickle, "load", refused)
    diskbuf.open(path).close()


def test_the_manifest_is_plain_json_that_says_what_the_store_is(path: Path) -> None:
    with UniformReplayBuffer({"a": NUMBER}, 2, 5, path=path, metadata={"task": "x"}) as buffer:
        buffer.extend({"a": np.zeros((2, 8), "int32")})
    manifest = json.loads((path / "zarr.json").read_text())["attributes"]["diskbuf"]
    expected = {
        "format": 1,
        "kind": "uniform",
        "layout": "zarr",
        "codec": None,
        "batch_size": 2,
        "max_length": 5,
        "keep_history": False,
        "generation": 0,
        "oldest_id": 0,
        "first_id": 3,
        "next_id": 8,
        "runs": [0],
        "metadata": {"task": "x"},
        "package_version": diskbuf.__version__,
    }
    assert manifest | expected == manifest
    assert set(manifest) - set(expected) == {"spec", "chunk_rows", "created"}


def test_a_store_with_room_for_ten_million_rows_is_small(path: Path) -> None:
    spec = {"image": ArraySpec([84, 84, 4], "uint8"), "reward": ArraySpec([], "float32")}
    with UniformReplayBuffer(spec, 8, 10_000_000, path=path) as buffer:
        assert sum(file.stat().st_blocks * 512 for file in path.rglob("*")) < 2**20
        assert buffer.num_frames() == 0


# ---- mismatches and versions

OLD = {
    "camera": ArraySpec([4, 4], "uint8"),
    "action": BoundedArraySpec([], "int64", 0, 3),
    "reward": ArraySpec([], "float32"),
}


@pytest.mark.parametrize(
    ("changes", "differences"),
    [
        ({"camera": ArraySpec([4, 5], "uint8")}, [r"leaf 'camera'.*\[4, 4\].*\[4, 5\]"]),
        ({"reward": ArraySpec([], "float64")}, [r"leaf 'reward'.*float32.*float64"]),
        ({"action": BoundedArraySpec([], "int64", 0, 4)}, [r"leaf 'action'.*3.*4"]),
        ({"action": ArraySpec([], "int64")}, [r"leaf 'action'"]),
        ({"info": NUMBER}, [r"info"]),
        (
            {"camera": ArraySpec([4], "uint8"), "reward": ArraySpec([], "int8")},
            [r"leaf 'camera'", r"leaf 'reward'"],
        ),
    ],
)
def test_reopening_with_another_spec_lists_the_differences_leaf_by_leaf(
    path: Path, changes: dict[str, Any], differences: list[str]
) -> None:
    UniformReplayBuffer(OLD, path=path).close()
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(diskbuf.StoreMismatchError, match="made otherwise") as caught:
        UniformReplayBuffer(OLD | changes, path=path)
    assert len(caught.value.differences) == len(differences)
    for line, pattern in zip(sorted(caught.value.differences), differences, strict=True):
        assert re.search(pattern, line)
        assert line in str(caught.value)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_every_kind_of_difference_is_listed_at_once(path: Path) -> None:
    UniformReplayBuffer(OLD, 2, 10, path=path).close()
    with pytest.raises(diskbuf.StoreMismatchError) as caught:
        UniformReplayBuffer({"camera": OLD["camera"]}, 3, 5, path=path, keep_history=True)
    text = "\n".join(caught.value.differences)
    for part in ("action", "reward", "batch_size: the store has 2, the buffer 3", "keep_history", "max_length"):
        assert part in text


def test_a_store_of_another_kind_of_buffer_is_refused(path: Path) -> None:
    UniformReplayBuffer(OLD, path=path).close()
    edit_manifest(path, kind="prioritized")
    with pytest.raises(diskbuf.StoreMismatchError, match="must be of kind 'uniform', got 'prioritized'"):
        diskbuf.open(path)
    with pytest.raises(diskbuf.StoreMismatchError, match="kind: the store has 'prioritized', the buffer 'uniform'"):
        UniformReplayBuffer(OLD, path=path)


def edit_manifest(store: Path, **changes: Any) -> None:
    document = json.loads((store / "zarr.json").read_text())
    document["attributes"]["diskbuf"] |= changes
    document["attributes"].pop("diskbuf_crc32", None)
    (store / "zarr.json").write_text(json.dumps(document))


def openings(store: Path) -> list[Any]:
    return [
        lambda: diskbuf.open(store),
        lambda: diskbuf.open(store, "r+"),
        lambda: UniformReplayBuffer(OLD, path=store),
    ]


def test_a_newer_format_is_refused_with_both_versions_named(path: Path) -> None:
    UniformReplayBuffer(OLD, path=path).close()
    edit_manifest(path, format=7, package_version="9.2.0", something_new=True)
    before = (path / "zarr.json").read_bytes()
    for opening in openings(path):
        with pytest.raises(diskbuf.StoreFormatError, match=r"must be at most 2, .*got 7 .*diskbuf 9\.2\.0\. Update"):
            opening()
    assert (path / "zarr.json").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": -1}, "has a count that isn't a whole number of at least 0"),
        ({"batch_size": 0}, "has counts that contradict each other"),
        ({"next_id": 1.5}, "has a count that isn't a whole number"),
        ({"first_id": 9}, "has counts that contradict each other"),
        ({"chunk_rows": {"camera": 3, "action": 4, "reward": 4}}, "has counts that contradict each other"),
        ({"chunk_rows": {"camera": 4}}, "columns in the manifest of"),
        ({"max_length": "many"}, "has max_length 'many'"),
        ({"layout": "arrow"}, "has no layout 'arrow'"),
        ({"runs": None}, "has a count that isn't"),
        ({"format": "one"}, "must be a whole one of format 2"),
        ({"format": 0}, "must be a whole one of format 2"),
        ({"format": True}, "must be a whole one of format 2"),
        ({"surprise": 1}, "must be a whole one of format 2"),
    ],
)
def test_a_damaged_manifest_is_a_format_error_that_names_the_file(
    path: Path, changes: dict[str, Any], message: str
) -> None:
    UniformReplayBuffer(OLD, path=path).close()
    edit_manifest(path, **changes)
    for opening in openings(path)[:2]:
        with pytest.raises(diskbuf.StoreFormatError, match=re.escape(message)):
            opening()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"zarr_format": 3, "node_type": "group"}']
)
def test_a_zarr_json_that_is_not_diskbufs_is_one_clear_error(path: Path, content: bytes) -> None:
    UniformReplayBuffer(OLD, path=path).close()
    (path / "zarr.json").write_bytes(content)
    for opening in openings(path):
        with pytest.raises(diskbuf.StoreError, match=r"zarr\.json"):
            opening()
    assert (path / "zarr.json").read_bytes() == content


def test_a_missing_chunk_is_named_and_never_read_as_zeros(path: Path) -> None:
    with UniformReplayBuffer(OLD, 1, 100, path=path, options=TINY) as buffer:
        for step in range(20):
            buffer.add_batch(numbered_of_one(step))
    (path / "camera" / "c.1.0.0.0").unlink()
    for opening in openings(path)[:2]:
        with pytest.raises(diskbuf.StoreCorruptError, match=r"camera/c\.1\.0\.0\.0 of leaf 'camera' .* but is missing"):
            opening()


def numbered_of_one(step: int) -> Any:
    return {name: np.full((1, *leaf.shape), step % 4, leaf.dtype) for name, leaf in OLD.items()}


# ---- other readers

SPEC = {
    "observation": ArraySpec([3], "float32"),
    "info": {"step": ArraySpec([], "int64"), "done": ArraySpec([], "bool")},
}


def add(buffer: UniformReplayBuffer, first: int, stop: int) -> None:
    for step in range(first, stop):
        numbers = np.array([step * 10, step * 10 + 1])
        observation = (numbers[:, None] + [0, 0.25, 0.5]).astype("float32")
        buffer.add_batch({"observation": observation, "info": {"step": numbers, "done": numbers % 3 == 0}})


def assert_window_of(observation: Any, steps: Any, done: Any, first: int, stop: int) -> None:
    numbers = np.arange(first, stop)[:, None] * 10 + np.arange(2)
    np.testing.assert_array_equal(steps, numbers)
    np.testing.assert_array_equal(done, numbers % 3 == 0)
    np.testing.assert_array_equal(observation, (numbers[..., None] + [0, 0.25, 0.5]).astype("float32"))


@pytest.fixture(params=[("live", 5), ("live", None), ("closed", 5), ("closed", None)], ids=str)
def store(request: pytest.FixtureRequest, path: Path) -> Any:
    """(path, first_id, next_id) of a store, wrapped if it is a ring, live and just flushed or closed."""
    state, max_length = request.param
    with UniformReplayBuffer(SPEC, 2, max_length, path=path, options=TINY) as buffer:
        add(buffer, 0, 23)
        buffer.flush()
        window = (buffer.first_id, buffer.next_id)
        if state == "live":
            yield path, *window
            return
    yield path, *window


def test_zarr_python_reads_the_window_of_a_live_or_closed_store(store: Any) -> None:
    path, first, stop = store
    group = zarr.open_group(path, mode="r")
    assert group["observation"].shape == (23, 2, 3)
    assert_window_of(
        group["observation"][first:stop], group["info/step"][first:stop], group["info/done"][first:stop], first, stop
    )


def test_zarr_python_lists_the_members_and_takes_the_consolidated_metadata(store: Any) -> None:
    path, _, _ = store
    group = zarr.open_consolidated(path)
    assert {name for name, _ in group.members(max_depth=None)} == {"observation", "info", "info/step", "info/done"}
    assert group.metadata.consolidated_metadata is not None
    assert group["info/step"].shape == zarr.open_group(path, mode="r", use_consolidated=False)["info/step"].shape
    assert group["observation"].metadata.dimension_names == ("id", "lane", "observation_0")


def test_xarray_opens_a_live_or_closed_store(store: Any) -> None:
    xarray = pytest.importorskip("xarray")
    path, first, stop = store
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with xarray.open_zarr(path, chunks=None) as top, xarray.open_zarr(path, group="info", chunks=None) as info:
            assert top["observation"].dims == ("id", "lane", "observation_0")
            window = slice(first, stop)
            assert_window_of(
                top["observation"].isel(id=window).values,
                info["step"].isel(id=window).values,
                info["done"].isel(id=window).values,
                first,
                stop,
            )


def test_tensorstore_reads_the_window_of_a_live_or_closed_store(store: Any) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    path, first, stop = store

    def read(name: str) -> Any:
        driver = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{name}/"}}
        return tensorstore.open(driver, read=True).result()[first:stop].read().result()

    assert_window_of(read("observation"), read("info/step"), read("info/done"), first, stop)


def test_a_live_store_is_brought_up_to_date_for_other_readers_by_flush_and_close(path: Path) -> None:
    with UniformReplayBuffer(SPEC, 2, 5, path=path, options=TINY) as buffer:
        for stop in (3, 9, 40):
            add(buffer, buffer.next_id, stop)
            buffer.flush()
            group = zarr.open_group(path, mode="r")
            assert group["observation"].shape[0] == stop
            assert group.attrs["diskbuf"]["first_id"] == buffer.first_id
        add(buffer, 40, 43)
    assert zarr.open_group(path, mode="r")["observation"].shape[0] == 43


def test_other_readers_do_not_need_diskbuf(path: Path) -> None:
    import subprocess

    with UniformReplayBuffer(SPEC, 2, 5, path=path) as buffer:
        add(buffer, 0, 8)
    code = (
        "import sys, zarr; sys.modules['diskbuf'] = None; print(zarr.open_group(sys.argv[1])['info/step'][3:].tolist())"
    )
    found = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    assert json.loads(found.stdout) == [[step * 10, step * 10 + 1] for step in range(3, 8)]
