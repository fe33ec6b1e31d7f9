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
from diskbuf.exchange.tf_example import ExampleReader, ExampleWriter, example_of, parse_example
from diskbuf.exchange.tf_record import RecordWriter, read_records
from diskbuf.specs import ArraySpec

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
        {
            "é": [b"x", b""],
            "f": np.array([1.5, -0.0, np.inf], np.float32),
            "i": np.array([0, -1, 2**62], np.int64),
            "none": np.empty(0, np.float32),
        }
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


LEAVES = {
    "f": ArraySpec([2], "float32"),
    "i": ArraySpec([], "int64"),
    "j": ArraySpec([3], "int64"),
    "b": ArraySpec([2], "bool"),
    "u": ArraySpec([2, 2], "uint8"),
    "d": ArraySpec([], "float64"),
    "none": ArraySpec([0], "float32"),
    "no bytes": ArraySpec([0], "int16"),
}


def drawn(rows: int, *, most: int, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    found = [rng.integers(0, 256, (rows, *spec.shape)).astype(spec.dtype) for spec in LEAVES.values()]
    for at in (1, 2):
        found[at] = rng.integers(-most if most > 128 else 0, most, found[at].shape)
    return found


@pytest.mark.parametrize("most", [2, 128, 300, 2**62])
def test_many_examples_are_written_and_read_as_one_by_one(most: int) -> None:
    tf = tensorflow()
    columns = drawn(50, most=most)
    messages = ExampleWriter(LEAVES).encode(columns)
    features = [tf.train.Example.FromString(message).features.feature for message in messages]
    assert [list(feature["j"].int64_list.value) for feature in features] == columns[2].tolist()
    assert [list(feature["b"].int64_list.value) for feature in features] == columns[3].astype(int).tolist()
    assert [feature["u"].bytes_list.value[0] for feature in features] == [row.tobytes() for row in columns[4]]
    found = ExampleReader(LEAVES).read(messages, first=0, name="a")
    alone = [ExampleReader(LEAVES).read([message], first=0, name="a") for message in messages]
    for name, column in zip(LEAVES, columns, strict=True):
        np.testing.assert_array_equal(found[name], column, strict=True)
        np.testing.assert_array_equal(np.concatenate([one[name] for one in alone]), column, strict=True)


def test_examples_of_one_length_that_are_not_alike_are_told_apart() -> None:
    leaves = {name: LEAVES[name] for name in ("f", "i")}
    columns = [column for name, column in zip(LEAVES, drawn(20, most=100), strict=True) if name in leaves]
    straight = ExampleWriter(leaves).encode(columns)
    turned = ExampleWriter({name: leaves[name] for name in ("i", "f")}).encode(columns[::-1])
    mixed = [straight[at] if at % 3 else turned[at] for at in range(20)]
    assert {len(message) for message in mixed} == {len(straight[0])}
    for messages in (mixed, mixed[1:]):
        found = ExampleReader(leaves).read(messages, first=0, name="a")
        for name, column in zip(leaves, columns, strict=True):
            np.testing.assert_array_equal(found[name], column[-len(messages) :], strict=True)


def test_the_one_example_that_is_wrong_is_named() -> None:
    leaves = {name: LEAVES[name] for name in ("i", "b")}
    messages = ExampleWriter(leaves).encode([np.zeros(20, np.int64), np.zeros((20, 2), np.bool)])
    reader = ExampleReader(leaves)
    reader.read(messages, first=0, name="a")
    wrong = messages[7][:-1] + b"\x02"
    with pytest.raises(SpecError, match=r"'b' in record 107 of a must be bool \[2\], got 2 numbers of int64"):
        reader.read([*messages[:7], wrong, *messages[8:]], first=100, name="a")
    fewer = messages[7][:-2] + b"\x80\x01"  # one number of two bytes
    with pytest.raises(SpecError, match=r"'b' in record 7 of a must be bool \[2\], got 1 numbers of int64"):
        reader.read([*messages[:7], fewer, *messages[8:]], first=0, name="a")
    ints = ExampleWriter({"i": LEAVES["i"]}).encode([np.full(9, -1)])
    long = ints[4][:-1] + b"\x02"  # of 65 bits
    with pytest.raises(SpecError, match=r"record 4 of a must be a tf\.train\.Example, but a varint is longer"):
        ExampleReader({"i": LEAVES["i"]}).read([*ints[:4], long, *ints[5:]], first=0, name="a")
