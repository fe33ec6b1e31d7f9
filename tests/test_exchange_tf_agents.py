"""Record files of the real TF-Agents' TFRecordObserver, written in the environment of `make peers`, become its rows."""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counted_episodes import collect, rows_of

import diskbuf
from diskbuf.errors import OptionError, SpecError
from diskbuf.exchange.importing import import_store
from diskbuf.exchange.protobuf_wire import WireError
from diskbuf.exchange.tensor_specs import spec_of_structure
from diskbuf.exchange.tf_record import RecordWriter, read_records
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import TimeStep, Trajectory

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-tf-agents" / "bin" / "python"


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    return {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, given: dict[str, Any]) -> Path:
    """The record files, and in `given` the rows that were written."""
    if not (PYTHON.parents[1] / ".installed").exists():
        reason = "needs TF-Agents: make peers"
        pytest.fail(reason) if os.environ.get("DISKBUF_PEERS") == "required" else pytest.skip(reason)
    path = tmp_path_factory.mktemp("records")
    rows = collect(path / "driven.zarr", 38)
    steps = rows.step_type.shape[1]
    rng = np.random.default_rng(0)
    given |= {name: getattr(rows, name)[0] for name in ("step_type", "action", "next_step_type", "reward", "discount")}
    given |= {
        "observation/numbers": rows.observation[0],
        "observation/image": rng.integers(0, 256, (steps, 2, 3, 1), np.uint8),
        "policy_info/arm": rng.integers(-(2**31), 2**31, (steps, 2), np.int32),
        "policy_info/log_probability": rng.random(steps, np.float32),
        "policy_info/value": rng.random((steps, 3)),
    }
    np.savez(path / "rows.npz", **given)
    run = subprocess.run(
        [PYTHON, ROOT / "tests/peers/records.py", path / "rows.npz", path], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return path


@pytest.mark.parametrize("block_bytes", [100, 2**22])
def test_rows_and_spec_are_those_that_were_written(
    folder: Path, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr("diskbuf.exchange.tf_agents_records._BLOCK_BYTES", block_bytes)
    report = import_store(folder / "nested.tfrecord", tmp_path / "new.zarr", format="tf-agents")
    assert report.rows == len(given["reward"])
    rows = rows_of(tmp_path / "new.zarr")
    for name, expected in given.items():
        nest, _, leaf = name.partition("/")
        found = getattr(rows, nest)
        np.testing.assert_array_equal(found[leaf][0] if leaf else found[0], expected, strict=True)
    with diskbuf.open(tmp_path / "new.zarr") as buffer:
        spec = buffer.data_spec
    assert type(spec) is Trajectory
    assert spec.action == BoundedArraySpec((), "int64", 0, 9, name="action")
    assert spec.observation["numbers"].maximum.tolist() == [1000, 1000, 1000, 9]
    assert diskbuf.verify(tmp_path / "new.zarr", values=True).is_clean


def test_a_store_of_records_is_one_that_a_driver_collected(folder: Path, tmp_path: Path) -> None:
    import_store(folder / "bare.tfrecord", tmp_path / "new.zarr", format="tf-agents")
    with diskbuf.open(tmp_path / "new.zarr") as found, diskbuf.open(folder / "driven.zarr") as driven:
        for leaf, expected in zip(found.gather_all(), driven.gather_all(), strict=True):
            np.testing.assert_array_equal(leaf, expected, strict=True)
        columns = ["first_id", "length", "return", "end", "is_whole"]
        assert diskbuf.episodes(found).select(columns).equals(diskbuf.episodes(driven).select(columns))


def test_images_that_were_compressed_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"'observation/image' in record 0 of .*lossy\.tfrecord must be .* got a JPEG"):
        import_store(folder / "lossy.tfrecord", tmp_path / "new.zarr", format="tf-agents")
    assert not (tmp_path / "new.zarr").exists()


def test_a_flipped_byte_names_its_record(folder: Path, tmp_path: Path) -> None:
    data = bytearray((folder / "bare.tfrecord").read_bytes())
    data[-20] ^= 1
    (tmp_path / "bare.tfrecord").write_bytes(data)
    (tmp_path / "bare.tfrecord.spec").write_bytes((folder / "bare.tfrecord.spec").read_bytes())
    last = sum(1 for _ in read_records(folder / "bare.tfrecord")) - 1
    with pytest.raises(SpecError, match=rf"record {last} of .*bare\.tfrecord must match its checksum"):
        import_store(tmp_path / "bare.tfrecord", tmp_path / "new.zarr", format="tf-agents")
    assert not (tmp_path / "new.zarr").exists()


def test_records_without_their_spec_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bare.tfrecord").write_bytes((folder / "bare.tfrecord").read_bytes())
    with pytest.raises(OptionError, match=r"must have its spec beside it, in .*bare\.tfrecord\.spec"):
        import_store(tmp_path / "bare.tfrecord", tmp_path / "new.zarr", format="tf-agents")
    with RecordWriter(tmp_path / "bare.tfrecord.spec") as writer:
        writer.write(b"no spec")
    with pytest.raises(SpecError, match=r"bare\.tfrecord\.spec must be the spec of a record file"):
        import_store(tmp_path / "bare.tfrecord", tmp_path / "new.zarr", format="tf-agents")


def test_records_that_are_no_such_rows_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord.spec").write_bytes((folder / "bare.tfrecord.spec").read_bytes())
    with RecordWriter(tmp_path / "a.tfrecord") as writer:
        writer.write(b"")
    with pytest.raises(SpecError, match=r"record 0 of .*a\.tfrecord must have the feature '.*', got none"):
        import_store(tmp_path / "a.tfrecord", tmp_path / "new.zarr", format="tf-agents")
    with RecordWriter(tmp_path / "a.tfrecord") as writer:
        writer.write(b"\xff")
    with pytest.raises(SpecError, match=r"record 0 of .*a\.tfrecord must be a tf\.train\.Example"):
        import_store(tmp_path / "a.tfrecord", tmp_path / "new.zarr", format="tf-agents")


def test_specs_of_all_kinds_are_read(folder: Path) -> None:
    specs = [spec_of_structure(next(read_records(folder / f"{number}.spec"))) for number in range(22)]
    assert specs[0] == ArraySpec((), "float32")
    assert specs[1] == (ArraySpec((3, 2), "uint8", name="frame"), [ArraySpec((1,), "int16")], {})
    dtypes = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16")
    for at, dtype in enumerate(dtypes):
        low = 0 if dtype.startswith("u") else -3
        assert specs[2 + 2 * at] == BoundedArraySpec((2, 3), dtype, low, 7)
        assert specs[3 + 2 * at] == BoundedArraySpec((3,), dtype, [0, 1, 2], [3, 4, 6], name="three")
    assert specs[20] == BoundedArraySpec((), "float32", -np.inf, np.inf)
    assert type(specs[21]) is TimeStep


def test_bounds_that_are_a_shortened_list_are_repeated() -> None:
    from tensorflow.core.protobuf import struct_pb2

    message = struct_pb2.StructuredValue()
    spec = message.bounded_tensor_spec_value
    spec.dtype = 1
    spec.shape.dim.add(size=4)
    for bound, values in ((spec.minimum, [0.0, -1.0]), (spec.maximum, [2.0, 3.0, 4.0, 5.0])):
        bound.dtype = 1
        bound.tensor_shape.dim.add(size=4)
        bound.float_val.extend(values)
    found = spec_of_structure(message.SerializeToString())
    assert found == BoundedArraySpec((4,), "float32", [0, -1, -1, -1], [2, 3, 4, 5])


@pytest.mark.parametrize("message", [b"", b"\x08\x01", b"\x9a\x02\x02\x18\x07", b"\x0a\x00\x0a\x00"])
def test_what_is_no_spec_is_refused(message: bytes) -> None:
    with pytest.raises(WireError):
        spec_of_structure(message)
