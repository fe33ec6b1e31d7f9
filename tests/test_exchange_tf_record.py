"""TFRecord files and Examples, against TensorFlow's own writer, reader and messages."""

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskbuf.errors import SpecError
from diskbuf.exchange.protobuf_wire import WireError, fields, packed_varints, unpacked_varints
from diskbuf.exchange.tf_example import example_of, feature_of, parse_example
from diskbuf.exchange.tf_record import RecordWriter, read_records

RECORDS = [b"", b"one", bytes(range(256)) * 40, b"\0" * 7]
INT64 = st.integers(-(2**63), 2**63 - 1)


def tensorflow() -> Any:
    import tensorflow as tf

    return tf


def written(path: Path) -> Path:
    with RecordWriter(path) as writer:
        for record in RECORDS:
            writer.write(record)
    return path


def test_tensorflow_reads_what_we_write(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tfrecord")
    dataset = tensorflow().data.TFRecordDataset(str(path))
    assert [record.numpy() for record in dataset] == RECORDS


def test_we_read_what_tensorflow_writes(tmp_path: Path) -> None:
    with tensorflow().io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        for record in RECORDS:
            writer.write(record)
    assert list(read_records(tmp_path / "a.tfrecord")) == RECORDS
    assert (tmp_path / "a.tfrecord").read_bytes() == written(tmp_path / "b.tfrecord").read_bytes()


@pytest.mark.parametrize("at", [0, 9, 12, 13, 40, -1])
def test_a_flipped_bit_is_found_and_its_record_named(tmp_path: Path, at: int) -> None:
    path = written(tmp_path / "a.tfrecord")
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)
    number = {0: 0, 9: 0, 12: 0, 13: 0, 40: 2, -1: 3}[at]
    found = []
    with pytest.raises(SpecError, match=rf"record {number} of .*a\.tfrecord must match its checksum"):
        found.extend(read_records(path))
    assert found == RECORDS[:number]


@pytest.mark.parametrize("size", [1, 11, 12, 15, 20, 30])
def test_a_file_that_is_cut_short_is_an_error(tmp_path: Path, size: int) -> None:
    path = written(tmp_path / "a.tfrecord")
    os.truncate(path, size)
    with pytest.raises(SpecError, match=r"record [01] of .* is cut short"):
        list(read_records(path))


def test_a_length_longer_than_the_file_asks_for_no_memory(tmp_path: Path) -> None:
    from diskbuf.exchange.tf_record import masked_checksum

    head = (2**60).to_bytes(8, "little")
    (tmp_path / "a.tfrecord").write_bytes(head + masked_checksum(head).to_bytes(4, "little") + b"abc")
    with pytest.raises(SpecError, match=r"record 0 of .* is cut short"):
        list(read_records(tmp_path / "a.tfrecord"))


@given(st.lists(INT64, max_size=40))
def test_packed_ints_come_back(values: list[int]) -> None:
    array = np.array(values, np.int64)
    packed = packed_varints(array)
    assert unpacked_varints(packed).tolist() == values
    assert packed == tensorflow_list(values)


def tensorflow_list(values: list[int]) -> bytes:
    message = tensorflow().train.Int64List(value=values).SerializeToString()
    return b"".join(value for _, _, value in fields(message))


@given(st.binary(max_size=60))
def test_bytes_that_are_no_message_are_refused_or_read_but_never_crash(data: bytes) -> None:
    for read in (parse_example, unpacked_varints):
        with contextlib.suppress(WireError):
            read(data)


@given(st.binary(max_size=40))
def test_ints_in_a_long_list_are_those_that_a_loop_finds(data: bytes) -> None:
    def plainly() -> list[int] | str:
        found, value, shift = [], 0, 0
        for byte in data:
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                if value >= 2**64 or shift > 70:
                    return "refused"
                found.append(value - 2**64 if value >= 2**63 else value)
                value = shift = 0
        return "refused" if shift else found

    try:
        assert unpacked_varints(data).tolist() == plainly()
    except WireError:
        assert plainly() == "refused"


def test_tensorflow_reads_our_examples() -> None:
    tf = tensorflow()
    message = example_of(
        [
            feature_of("é", [b"x", b""]),
            feature_of("f", np.array([1.5, -0.0, np.inf], np.float32)),
            feature_of("i", np.array([0, -1, 2**62], np.int64)),
            feature_of("none", np.empty(0, np.float32)),
        ]
    )
    features = tf.train.Example.FromString(message).features.feature
    assert list(features["é"].bytes_list.value) == [b"x", b""]
    assert list(features["f"].float_list.value) == [1.5, 0.0, np.inf]
    assert list(features["i"].int64_list.value) == [0, -1, 2**62]
    assert features["none"].WhichOneof("kind") == "float_list"
    assert set(features) == {"é", "f", "i", "none"}


def test_we_read_tensorflows_examples() -> None:
    train = tensorflow().train
    big = np.arange(-50, 5000, dtype=np.int64) ** 3
    example = train.Example(
        features=train.Features(
            feature={
                "b": train.Feature(bytes_list=train.BytesList(value=[b"x" * 300, b""])),
                "f": train.Feature(float_list=train.FloatList(value=np.arange(500, dtype=np.float32))),
                "i": train.Feature(int64_list=train.Int64List(value=big)),
                "empty": train.Feature(int64_list=train.Int64List(value=[])),
                "no kind": train.Feature(),
            }
        )
    )
    found = parse_example(example.SerializeToString())
    assert found["b"] == [b"x" * 300, b""]
    np.testing.assert_array_equal(found["f"], np.arange(500, dtype=np.float32), strict=True)
    np.testing.assert_array_equal(found["i"], big, strict=True)
    np.testing.assert_array_equal(found["empty"], np.empty(0, np.int64), strict=True)
    assert found["no kind"] == []


def test_lists_that_are_not_packed_are_read_too() -> None:
    floats = b"".join(b"\x0d" + np.float32(value).tobytes() for value in (1.0, 2.0))
    ints = b"\x08\x05\x08\x06"
    message = b"".join(
        b"\x0a" + bytes([len(entry)]) + entry
        for entry in (
            b"\x0a\x01f\x12" + bytes([len(floats) + 2]) + b"\x12" + bytes([len(floats)]) + floats,
            b"\x0a\x01i\x12" + bytes([len(ints) + 2]) + b"\x1a" + bytes([len(ints)]) + ints,
        )
    )
    found = parse_example(b"\x0a" + bytes([len(message)]) + message)
    assert {name: np.asarray(values).tolist() for name, values in found.items()} == {"f": [1.0, 2.0], "i": [5, 6]}
