"""How chunks are stored as objects: one suite that every layout passes, then what each layout promises beyond it."""

import json
import math
import mmap
import re
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as pa_dataset
import pytest
import tensorstore
import zarr
import zarr.codecs
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from diskbuf import OptionError, StoreFormatError
from diskbuf.store.chunk_format import ChunkFormat
from diskbuf.store.chunk_formats import chunk_format_of
from diskbuf.store.chunk_formats.arrow_parts import column_names
from diskbuf.store.chunk_formats.codecs import codec_json
from diskbuf.store.chunk_formats.zarr_shards import unpacker
from diskbuf.store.layout import ColumnLayout, array_document

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
SHAPES = ((), (3,), (2, 3), (2, 1, 3), (0,), (2, 0, 3))
ROWS = 8
LANES = 3

COLUMN_OF_INTS = ColumnLayout(
    path="id", file_path="id", dtype=np.dtype(np.int64), shape=(), lanes=2, chunk_rows=64, slots=None
)


def column(
    path: str,
    dtype: str = "float32",
    shape: tuple[int, ...] = (),
    *,
    lanes: int = LANES,
    chunk_rows: int = ROWS,
    file_path: str | None = None,
) -> ColumnLayout:
    return ColumnLayout(
        path=path,
        file_path=path if file_path is None else file_path,
        dtype=np.dtype(dtype),
        shape=shape,
        lanes=lanes,
        chunk_rows=chunk_rows,
        slots=None,
    )


EVERY_KIND = tuple(column(f"{dtype}/{number}", dtype, shape) for dtype in DTYPES for number, shape in enumerate(SHAPES))
SOME_KINDS = EVERY_KIND[:: len(SHAPES) - 1]
"""Each dtype and each shape, not each pair of them."""

FEW = (column("observation/camera", "uint8", (4, 5)), column("reward"), column("discount", "float64", (2,)))


def values_of(layout: ColumnLayout, count: int, *, seed: int = 0) -> NDArray[Any]:
    """[count, lanes, *shape] rows of any bytes, NaNs with payloads among them."""
    rng = np.random.default_rng([seed, len(layout.path), count])
    shape = (count, layout.lanes, *layout.shape)
    if layout.dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    raw = rng.integers(0, 256, math.prod(shape) * layout.dtype.itemsize, np.uint8)
    return raw.view(layout.dtype).reshape(shape)


def rows_of(chunk_format: ChunkFormat, group: int, count: int, *, seed: int = 0) -> list[NDArray[Any]]:
    return [values_of(chunk_format.layouts[number], count, seed=seed) for number in chunk_format.groups[group]]


def room_for(chunk_format: ChunkFormat, group: int, count: int) -> list[NDArray[Any]]:
    """Where rows go, full of bytes that aren't zero."""
    layouts = [chunk_format.layouts[number] for number in chunk_format.groups[group]]
    return [~np.zeros((count, layout.lanes, *layout.shape, layout.dtype.itemsize), np.uint8) for layout in layouts]


def read(chunk_format: ChunkFormat, group: int, chunk: int, data: bytes | memoryview, count: int) -> list[NDArray[Any]]:
    layouts = [chunk_format.layouts[number] for number in chunk_format.groups[group]]
    into = [np.full((count, layout.lanes, *layout.shape), 1, layout.dtype) for layout in layouts]
    chunk_format.decode(group, chunk, data, into)
    return into


def assert_same(found: Sequence[NDArray[Any]], wanted: Sequence[NDArray[Any]]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()


class ChunkFormatTests:
    """What every layout keeps to. A subclass says how one is made."""

    pads = True

    def make(self, layouts: Sequence[ColumnLayout]) -> ChunkFormat:
        raise NotImplementedError

    def test_every_column_is_in_one_group_of_columns_of_one_length(self) -> None:
        chunk_format = self.make(EVERY_KIND)
        assert sorted(number for group in chunk_format.groups for number in group) == list(range(len(EVERY_KIND)))
        for group in chunk_format.groups:
            assert len({EVERY_KIND[number].chunk_rows for number in group}) == 1

    def test_the_name_of_an_object_tells_its_group_and_chunk(self) -> None:
        chunk_format = self.make(EVERY_KIND)
        names = {
            chunk_format.object_name(group, chunk): (group, chunk)
            for group in range(len(chunk_format.groups))
            for chunk in (0, 1, 17, 123456789, 2**40)
        }
        assert len(names) == 5 * len(chunk_format.groups)
        for name, place in names.items():
            assert chunk_format.chunk_of_name(name) == place

    def test_other_names_are_no_object(self) -> None:
        chunk_format = self.make(FEW)
        name = chunk_format.object_name(0, 3)
        others = ["", "zarr.json", f"{name}.tmp", f"x/{name}", name.replace("3", "x"), name.rpartition("/")[2]]
        others += [name.replace("3", "03"), name.replace("3", "-3"), name.replace("3", "³"), f"/{name}", f"{name}/"]
        for other in others:
            assert chunk_format.chunk_of_name(other) is None

    def test_every_dtype_and_shape_comes_back_to_the_bit(self) -> None:
        chunk_format = self.make(EVERY_KIND)
        for group in range(len(chunk_format.groups)):
            rows = rows_of(chunk_format, group, ROWS)
            assert_same(read(chunk_format, group, 5, chunk_format.encode(group, 5, rows), ROWS), rows)

    @pytest.mark.parametrize("count", [1, 3, 4, 7])
    def test_a_chunk_that_is_not_full_comes_back(self, count: int) -> None:
        chunk_format = self.make(EVERY_KIND)
        for group in range(len(chunk_format.groups)):
            rows = rows_of(chunk_format, group, count)
            assert_same(read(chunk_format, group, 1, chunk_format.encode(group, 1, rows), count), rows)

    @pytest.mark.parametrize("count", [1, 4, 5])
    def test_fewer_rows_can_be_read_than_there_are(self, count: int) -> None:
        chunk_format = self.make(FEW)
        for group in range(len(chunk_format.groups)):
            rows = rows_of(chunk_format, group, 6)
            found = read(chunk_format, group, 0, chunk_format.encode(group, 0, rows), count)
            assert_same(found, [leaf[:count] for leaf in rows])

    def test_rows_that_are_not_there_are_zeros_or_an_error(self) -> None:
        chunk_format = self.make(FEW)
        for group in range(len(chunk_format.groups)):
            rows = rows_of(chunk_format, group, 5)
            data = chunk_format.encode(group, 0, rows)
            if not self.pads:
                with pytest.raises(ValueError, match="at least 6 ids, got 5"):
                    read(chunk_format, group, 0, data, 6)
                continue
            found = read(chunk_format, group, 0, data, ROWS)
            assert_same([leaf[:5] for leaf in found], rows)
            assert not any(leaf[5:].any() for leaf in found)

    def test_a_chunk_of_zeros_is_an_object_too(self) -> None:
        chunk_format = self.make(FEW)
        for group in range(len(chunk_format.groups)):
            zeros = [np.zeros_like(leaf) for leaf in rows_of(chunk_format, group, ROWS)]
            data = chunk_format.encode(group, 0, zeros)
            assert len(data) > 0
            assert_same(read(chunk_format, group, 0, data, ROWS), zeros)

    def test_rows_need_not_be_contiguous(self) -> None:
        chunk_format = self.make(FEW)
        for group in range(len(chunk_format.groups)):
            rows = rows_of(chunk_format, group, ROWS)
            strided = [np.repeat(leaf, 2, axis=0)[::2] for leaf in rows]
            assert not any(leaf.flags.c_contiguous for leaf in strided)
            assert bytes(chunk_format.encode(group, 0, strided)) == bytes(chunk_format.encode(group, 0, rows))

    def test_an_object_can_be_read_from_any_memory(self) -> None:
        chunk_format = self.make(FEW)
        for group in range(len(chunk_format.groups)):
            rows = rows_of(chunk_format, group, ROWS)
            data = bytes(chunk_format.encode(group, 0, rows))
            for offset in (0, 1, 7):
                memory = memoryview(bytearray(b"x" * offset + data))[offset:]
                assert_same(read(chunk_format, group, 0, memory, ROWS), rows)
                assert_same(read(chunk_format, group, 0, memory.toreadonly(), ROWS), rows)

    def test_columns_that_are_not_wanted_are_left_out(self) -> None:
        chunk_format = self.make(FEW)
        for group, numbers in enumerate(chunk_format.groups):
            rows = rows_of(chunk_format, group, ROWS)
            data = chunk_format.encode(group, 0, rows)
            chunk_format.decode(group, 0, data, [None] * len(numbers))
            for place in range(len(numbers)):
                into: list[NDArray[Any] | None] = [None] * len(numbers)
                into[place] = wanted = np.empty_like(rows[place])
                chunk_format.decode(group, 0, data, into)
                assert_same([wanted], [rows[place]])

    def test_several_threads_can_use_it(self) -> None:
        chunk_format = self.make(FEW)
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                for group in range(len(chunk_format.groups)):
                    rows = rows_of(chunk_format, group, ROWS, seed=seed)
                    assert_same(read(chunk_format, group, seed, chunk_format.encode(group, seed, rows), ROWS), rows)
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

    @pytest.mark.parametrize("count", [0, ROWS + 1])
    def test_a_number_of_rows_outside_the_chunk_is_refused(self, count: int) -> None:
        chunk_format = self.make(FEW)
        for group in range(len(chunk_format.groups)):
            data = chunk_format.encode(group, 0, rows_of(chunk_format, group, ROWS))
            with pytest.raises(ValueError, match="must"):
                chunk_format.encode(group, 0, rows_of(chunk_format, group, count))
            with pytest.raises(ValueError, match="must"):
                read(chunk_format, group, 0, data, count)

    def test_an_object_cut_anywhere_is_an_error(self) -> None:
        chunk_format = self.make(FEW)
        for group in range(len(chunk_format.groups)):
            data = bytes(chunk_format.encode(group, 0, rows_of(chunk_format, group, ROWS)))
            step = max(1, len(data) // 500)
            for stop in {*range(0, len(data), step), *range(max(0, len(data) - 200), len(data))}:
                with pytest.raises(ValueError, match="must"):
                    read(chunk_format, group, 0, data[:stop], 1)

    def test_bytes_of_something_else_are_an_error(self) -> None:
        chunk_format = self.make(FEW)
        for group in range(len(chunk_format.groups)):
            for data in (b"", b"\0", bytes(1000), b"<html>not found</html>", np.random.default_rng(0).bytes(5000)):
                with pytest.raises(ValueError, match="must"):
                    read(chunk_format, group, 0, data, ROWS)

    def test_offsets_tell_where_raw_chunks_lie(self) -> None:
        chunk_format = self.make(FEW)
        for group, numbers in enumerate(chunk_format.groups):
            rows = rows_of(chunk_format, group, ROWS)
            data = chunk_format.encode(group, 0, rows)
            offsets = chunk_format.raw_offsets(group, 0, data)
            assert len(offsets) == len(numbers)
            for offset, leaf in zip(offsets, rows, strict=True):
                if offset is not None:
                    assert offset % mmap.PAGESIZE == 0
                    assert bytes(data[offset : offset + leaf.nbytes]) == leaf.tobytes()


class TestRawChunks(ChunkFormatTests):
    def make(self, layouts: Sequence[ColumnLayout]) -> ChunkFormat:
        return chunk_format_of(layouts, layout="zarr", codec=None)

    def test_an_object_is_the_bytes_of_the_rows(self) -> None:
        rows = values_of(FEW[0], ROWS)
        chunk_format = self.make(FEW)
        assert bytes(chunk_format.encode(0, 0, [rows])) == rows.tobytes()
        assert bytes(chunk_format.encode(0, 0, [rows[:3]])) == rows[:3].tobytes() + bytes(5 * FEW[0].row_bytes)
        assert chunk_format.raw_offsets(0, 0, rows.tobytes()) == [0]

    def test_documents_are_those_of_raw_arrays(self) -> None:
        assert self.make(FEW).documents() == {layout.file_path: array_document(layout) for layout in FEW}

    def test_one_byte_too_many_is_an_error(self) -> None:
        chunk_format = self.make(FEW)
        with pytest.raises(ValueError, match=r"must have 480 bytes, got 481"):
            read(chunk_format, 0, 0, bytes(481), ROWS)


class ZarrShardsTests(ChunkFormatTests):
    """What shards keep to, whatever their codec."""

    codec: Any = "zstd"
    inner_rows: int | None = 2

    def make(self, layouts: Sequence[ColumnLayout]) -> ChunkFormat:
        return self.make_with(self.codec, layouts)

    def make_with(self, codec: Any, layouts: Sequence[ColumnLayout], **options: Any) -> ChunkFormat:
        given = {"level": None, "inner_rows": self.inner_rows, **options}
        made = codec_json("zarr", codec, layouts=layouts, **given)
        return chunk_format_of(layouts, layout="zarr", codec=json.loads(json.dumps(made)))

    def put_in_folder(self, folder: Path, chunk_format: ChunkFormat, count: int) -> list[NDArray[Any]]:
        """Writes real arrays of so many rows, and returns the rows of each."""
        arrays = []
        documents = chunk_format.documents()
        for group, layout in enumerate(chunk_format.layouts):
            rows = values_of(layout, count)
            for chunk in layout.chunks(0, count):
                name = folder / chunk_format.object_name(group, chunk)
                name.parent.mkdir(parents=True, exist_ok=True)
                start = chunk * layout.chunk_rows
                name.write_bytes(chunk_format.encode(group, chunk, [rows[start : start + layout.chunk_rows]]))
            document = json.loads(json.dumps(documents[layout.file_path]))
            document["shape"][0] = count
            (folder / layout.file_path / "zarr.json").write_text(json.dumps(document))
            arrays.append(rows)
        return arrays

    def test_zarr_and_tensorstore_read_the_objects_as_arrays(self, tmp_path: Path) -> None:
        chunk_format = self.make(SOME_KINDS)
        arrays = self.put_in_folder(tmp_path, chunk_format, 2 * ROWS + 3)
        for layout, rows in zip(chunk_format.layouts, arrays, strict=True):
            path = tmp_path / layout.file_path
            array = zarr.open_array(path, mode="r")
            assert array.metadata.dimension_names[:2] == ("id", "lane")
            assert_same([np.asarray(array[:])], [rows])
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
            if not self.tensorstore_reads(layout):
                continue
            found = tensorstore.open(spec, read=True).result().read().result()
            assert_same([found], [rows])

    def tensorstore_reads(self, layout: ColumnLayout) -> bool:
        return True

    def test_zarr_python_makes_the_same_metadata(self) -> None:
        chunk_format = self.make(SOME_KINDS)
        for layout in chunk_format.layouts:
            document = json.loads(json.dumps(chunk_format.documents()[layout.file_path]))
            parsed = zarr.open_array({"zarr.json": _buffer(json.dumps(document))}, mode="r").metadata.to_dict()
            assert json.loads(json.dumps(parsed["codecs"], default=list)) == document["codecs"]
            raw = array_document(layout)
            assert {**document, "codecs": None} == {**json.loads(json.dumps(raw)), "codecs": None}

    def test_the_fast_way_reads_what_zarr_python_reads(self) -> None:
        @settings(max_examples=25, deadline=None)
        @given(st.data())
        def check(data: st.DataObject) -> None:
            dtype, shape = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(SHAPES))
            chunk_rows = 2 ** data.draw(st.integers(1, 5))
            layout = column("x", dtype, shape, lanes=data.draw(st.integers(1, 3)), chunk_rows=chunk_rows)
            inner_rows = 2 ** data.draw(st.integers(0, chunk_rows.bit_length() - 1))
            chunk_format: Any = self.make_with(self.codec, [layout], inner_rows=inner_rows)
            count = data.draw(st.integers(1, chunk_rows))
            rows = values_of(layout, count)
            rows[data.draw(st.integers(0, count)) :] = 0
            encoded = chunk_format.encode(0, 0, [rows])
            wanted = data.draw(st.integers(1, chunk_rows))
            slow = np.ones((wanted, layout.lanes, *shape), dtype)
            chunk_format._decode_by_zarr(0, encoded, slow)
            assert_same(read(chunk_format, 0, 0, encoded, wanted), [slow])

        check()


class ShardsOfFourTests(ZarrShardsTests):
    """What can be told of shards of four inner chunks."""

    def test_inner_chunks_that_are_missing_are_zeros(self) -> None:
        chunk_format = self.make(FEW)
        rows = values_of(FEW[0], ROWS)
        rows[2:4] = 0
        objects: dict[str, Any] = {}
        document = chunk_format.documents()[FEW[0].file_path]
        document["shape"][0] = ROWS
        objects["zarr.json"] = _buffer(json.dumps(document))
        zarr.open_array(objects, mode="r+")[:] = rows  # leaves out what is zeros
        data = objects[FEW[0].file_name(0)].to_bytes()
        assert b"\xff" * 16 in data
        assert len(data) < len(chunk_format.encode(0, 0, [rows]))
        assert_same(read(chunk_format, 0, 0, data, ROWS), [rows])

    def test_a_flipped_bit_in_the_index_is_an_error(self) -> None:
        chunk_format = self.make(FEW)
        data = bytearray(chunk_format.encode(0, 0, [values_of(FEW[0], ROWS)]))
        for place in range(len(data) - 16 * 4 - 4, len(data)):
            data[place] ^= 0x10
            with pytest.raises(ValueError, match="index of a shard must have the checksum"):
                read(chunk_format, 0, 0, bytes(data), ROWS)
            data[place] ^= 0x10

    @pytest.mark.parametrize(
        "entry", [(2**64 - 1, 5), (5, 2**64 - 1), (0, 10**6), (10**6, 1), (2**63, 2**63), (10**6, 0)]
    )
    def test_an_index_that_points_outside_is_an_error(self, entry: tuple[int, int]) -> None:
        chunk_format = self.make(FEW)
        data = bytes(chunk_format.encode(0, 0, [values_of(FEW[0], ROWS)]))
        with pytest.raises(ValueError, match="inner chunk 1 must lie within"):
            read(chunk_format, 0, 0, with_entry(data, 4, 1, entry), ROWS)

    @pytest.mark.parametrize("inner_rows", [1, 4])
    def test_an_inner_chunk_of_more_or_fewer_rows_is_an_error(self, inner_rows: int) -> None:
        rows = values_of(FEW[0], ROWS)
        data = bytes(self.make(FEW).encode(0, 0, [rows]))
        other = bytes(self.make_with(self.codec, FEW, inner_rows=inner_rows).encode(0, 0, [rows]))
        start, length = entry_of(other, ROWS // inner_rows, 1)
        body = len(data) - 4 * 16 - 4
        longer = data[:body] + other[start : start + length] + data[body:]
        with pytest.raises(ValueError, match=r"inner chunk 1 of 4 must be whole|a shard must be whole"):
            read(self.make(FEW), 0, 0, with_entry(longer, 4, 1, (body, length)), ROWS)

    def test_an_inner_chunk_that_is_cut_is_an_error(self) -> None:
        chunk_format = self.make(FEW)
        data = bytes(chunk_format.encode(0, 0, [values_of(FEW[0], ROWS)]))
        start, length = entry_of(data, 4, 1)
        for shorter in range(length):
            with pytest.raises(ValueError, match="must"):
                read(chunk_format, 0, 0, with_entry(data, 4, 1, (start, shorter)), ROWS)


class TestZstdShards(ShardsOfFourTests):
    codec = "zstd"

    def test_a_flipped_bit_anywhere_is_an_error(self) -> None:
        chunk_format = self.make(FEW)
        data = bytearray(chunk_format.encode(0, 0, [values_of(FEW[0], ROWS)]))
        for place in range(0, len(data), 3):
            data[place] ^= 1
            with pytest.raises(ValueError, match="must"):
                read(chunk_format, 0, 0, bytes(data), ROWS)
            data[place] ^= 1

    def test_the_level_is_zarrs(self) -> None:
        made = self.make_with("zstd", FEW, level=-5).documents()["reward"]["codecs"][0]["configuration"]["codecs"]
        assert made[1] == {"name": "zstd", "configuration": {"level": -5, "checksum": True}}

    def test_large_inner_chunks_are_read_on_several_threads(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layout = column("frame", "uint8", (256, 256), lanes=1, chunk_rows=32)
        chunk_format = self.make_with("zstd", [layout], inner_rows=4)
        rows = np.broadcast_to(np.arange(32, dtype=np.uint8)[:, None, None, None], (32, 1, 256, 256))
        data = chunk_format.encode(0, 0, [rows])
        monkeypatch.setattr("diskbuf.store.chunk_formats.zarr_shards._cpus", lambda: 4)
        names: set[str] = set()
        unpack: Callable[..., None] = unpacker([{"name": "bytes"}])  # type: ignore[assignment]

        def spy(chain: Any) -> Callable[..., None]:
            whole = unpacker(chain)

            def call(packed: Any, into: Any) -> None:
                names.add(threading.current_thread().name)
                whole(packed, into)  # type: ignore[misc]

            return call

        assert unpack is not None
        monkeypatch.setattr("diskbuf.store.chunk_formats.zarr_shards.unpacker", spy)
        assert_same(read(chunk_format, 0, 0, data, 32), [np.ascontiguousarray(rows)])
        assert_same(read(chunk_format, 0, 0, data, 30), [np.ascontiguousarray(rows[:30])])
        assert names
        assert all(name.startswith("diskbuf-decode") for name in names)
        assert not any(thread.name.startswith("diskbuf-decode") for thread in threading.enumerate())


class TestBloscShards(ShardsOfFourTests):
    codec = "blosc"

    def test_blosc_is_fitted_to_each_dtype(self) -> None:
        documents = self.make(FEW).documents()
        found = {
            path: documents[path]["codecs"][0]["configuration"]["codecs"][1]["configuration"] for path in documents
        }
        usual = {"cname": "zstd", "clevel": 5, "blocksize": 0}
        assert found["observation/camera"] == {**usual, "typesize": 1, "shuffle": "noshuffle"}
        assert found["discount"] == {**usual, "typesize": 8, "shuffle": "shuffle"}

    def test_a_blosc_object_is_fitted_where_it_leaves_that_open(self) -> None:
        def found(codec: Any) -> list[tuple[int, str]]:
            documents = self.make_with(codec, FEW).documents()
            chains = [documents[layout.file_path]["codecs"][0]["configuration"]["codecs"] for layout in FEW]
            return [(chain[1]["configuration"]["typesize"], chain[1]["configuration"]["shuffle"]) for chain in chains]

        assert found(zarr.codecs.BloscCodec()) == [(1, "noshuffle"), (4, "shuffle"), (8, "shuffle")]
        assert found(zarr.codecs.BloscCodec(typesize=2, shuffle="bitshuffle")) == [(2, "bitshuffle")] * 3


class TestLz4Shards(ShardsOfFourTests):
    codec = "lz4"


class TestShardsOfOneInnerChunk(ZarrShardsTests):
    inner_rows = None


class TestShardsOfBloscWithoutChecksum(ShardsOfFourTests):
    codec = zarr.codecs.BloscCodec(cname="lz4", clevel=1)


class TestShardsOfZstdWithoutChecksum(ShardsOfFourTests):
    codec = zarr.codecs.ZstdCodec(level=1)


class TestShardsOfBytes(ShardsOfFourTests):
    codec = zarr.codecs.BytesCodec(endian="little")


class TestShardsThatOnlyZarrReads(ShardsOfFourTests):
    codec = (zarr.codecs.BytesCodec(endian="big"), zarr.codecs.GzipCodec(level=1), zarr.codecs.Crc32cCodec())


class ArrowPartsTests(ChunkFormatTests):
    """What Arrow files keep to, compressed or not."""

    pads = False
    codec: str | None = None

    def make(self, layouts: Sequence[ColumnLayout]) -> ChunkFormat:
        made = codec_json("arrow", self.codec, level=None, inner_rows=None, layouts=layouts)
        codec = json.loads(json.dumps(made))
        return chunk_format_of(layouts, layout="arrow", codec=codec, metadata={b"diskbuf": b'{"a": 1}'})

    def put_in_folder(
        self, folder: Path, layouts: Sequence[ColumnLayout], count: int
    ) -> tuple[str, list[NDArray[Any]]]:
        """Writes parts of so many ids; returns their names, and each leaf's rows [ids x lanes, *shape]."""
        chunk_format = self.make(layouts)
        leaves = [values_of(layout, count) for layout in layouts]
        (folder / "data").mkdir()
        for chunk in layouts[0].chunks(0, count):
            rows = [leaf[chunk * ROWS : (chunk + 1) * ROWS] for leaf in leaves]
            (folder / chunk_format.object_name(0, chunk)).write_bytes(chunk_format.encode(0, chunk, rows))
        return f"{folder}/data/*.arrow", [leaf.reshape(count * LANES, *leaf.shape[2:]) for leaf in leaves]

    def test_pyarrow_dataset_reads_a_folder_of_parts(self, tmp_path: Path) -> None:
        _, leaves = self.put_in_folder(tmp_path, EVERY_KIND, 2 * ROWS + 3)
        table = pa_dataset.dataset(tmp_path / "data", format="ipc").to_table().combine_chunks()
        assert table.schema.metadata[b"diskbuf"] == b'{"a": 1}'
        assert table.column_names == ["id", "lane", *(layout.path for layout in EVERY_KIND)]
        assert table["id"].to_pylist() == [number // LANES for number in range((2 * ROWS + 3) * LANES)]
        assert table["lane"].to_pylist() == [number % LANES for number in range((2 * ROWS + 3) * LANES)]
        assert table.schema.field("lane").type == pa.int32()
        for layout, rows in zip(EVERY_KIND, leaves, strict=True):
            column_ = table[layout.path].combine_chunks()
            if 0 in layout.shape:
                assert column_.to_pylist() == [[]] * len(rows)
            elif not layout.shape and layout.dtype.kind == "c":
                found = np.stack(column_.to_numpy(zero_copy_only=False)).view(layout.dtype)[:, 0]
                assert_same([found], [rows])
            elif not layout.shape:
                assert_same([column_.to_numpy(zero_copy_only=False)], [rows])
            else:
                assert isinstance(column_.type, pa.FixedShapeTensorType)
                found = column_.to_numpy_ndarray()
                assert_same([np.ascontiguousarray(found).view(layout.dtype).reshape(rows.shape)], [rows])

    def test_pandas_reads_a_part(self, tmp_path: Path) -> None:
        _, leaves = self.put_in_folder(tmp_path, EVERY_KIND, ROWS)
        frame = pd.read_feather(tmp_path / "data" / "part-00000000.arrow")
        assert frame["id"].tolist() == [number // LANES for number in range(ROWS * LANES)]
        for layout, rows in zip(EVERY_KIND, leaves, strict=True):
            if layout.shape or layout.dtype.kind == "c":
                flat = [np.asarray(value) for value in frame[layout.path]]
                assert np.concatenate(flat).tobytes() == rows.tobytes()
            else:
                assert_same([frame[layout.path].to_numpy()], [rows])

    def test_polars_reads_all_parts(self, tmp_path: Path) -> None:
        files, leaves = self.put_in_folder(tmp_path, EVERY_KIND, 2 * ROWS + 3)
        for frame in (pl.read_ipc(files), pl.scan_ipc(files).collect()):
            assert frame["lane"].to_list() == [number % LANES for number in range((2 * ROWS + 3) * LANES)]
            for layout, rows in zip(EVERY_KIND, leaves, strict=True):
                series = frame[layout.path]
                if hasattr(series, "ext") and layout.shape and 0 not in layout.shape:
                    series = series.ext.storage()
                if 0 in layout.shape:
                    assert series.list.len().to_list() == [0] * len(rows)
                elif layout.dtype.kind == "b" and not layout.shape:
                    assert series.to_list() == rows.tolist()
                else:
                    assert series.to_numpy().tobytes() == rows.tobytes()

    def test_duckdb_reads_all_parts_of_what_it_has_numbers_for(self, tmp_path: Path) -> None:
        layouts = [layout for layout in EVERY_KIND if layout.dtype != np.float16]  # DuckDB knows no half floats
        _, leaves = self.put_in_folder(tmp_path, layouts, 2 * ROWS + 3)
        parts = pa_dataset.dataset(tmp_path / "data", format="ipc")
        with duckdb.connect() as connection:
            connection.register("parts", parts)
            for layout, rows in zip(layouts, leaves, strict=True):
                found = connection.sql(f'select "{layout.path}" from parts order by id, lane').fetchall()
                kind = layout.dtype
                if kind.kind in "bc":
                    kind = np.dtype(np.uint8 if kind.kind == "b" else f"f{kind.itemsize // 2}")
                flat = np.array([value for (value,) in found], kind)
                if rows.size:
                    np.testing.assert_array_equal(flat.ravel(), np.ascontiguousarray(rows).view(kind).ravel())
                else:
                    assert found == [([],)] * len(rows)
            (total,) = connection.sql("select count(*) from parts where lane = 1 and id >= 8").fetchall()
            assert total == (ROWS + 3,)

    def test_duckdb_reads_what_is_beside_half_floats(self, tmp_path: Path) -> None:
        layouts = [column("half", "float16"), column("reward", "float64")]
        _, leaves = self.put_in_folder(tmp_path, layouts, ROWS + 1)
        parts = pa_dataset.dataset(tmp_path / "data", format="ipc")
        with duckdb.connect() as connection:
            connection.register("parts", parts.scanner(columns=["id", "lane", "reward"]))
            found = connection.sql("select reward from parts").fetchall()
        np.testing.assert_array_equal(np.sort(np.ravel(found)), np.sort(leaves[1]))

    def test_paths_that_clash_have_names_all_the_same(self, tmp_path: Path) -> None:
        layouts = [column(path) for path in ("id", "_id", "lane", "__lane", "idle", "a/id")]
        _, leaves = self.put_in_folder(tmp_path, layouts, ROWS)
        table = pa_dataset.dataset(tmp_path / "data", format="ipc").to_table()
        names = ["_id", "__id", "_lane", "___lane", "idle", "a/id"]
        assert table.column_names == ["id", "lane", *names]
        for name, rows in zip(names, leaves, strict=True):
            assert_same([table[name].to_numpy()], [rows])

    def test_a_file_cut_at_or_beside_any_byte_is_an_error(self) -> None:
        layouts = [column("x", "uint8", lanes=1), column("done", "bool", lanes=1)]
        chunk_format = self.make(layouts)
        rows = [values_of(layout, 2) for layout in layouts]
        data = bytes(chunk_format.encode(0, 0, rows))
        for stop in range(len(data)):
            with pytest.raises(ValueError, match="Arrow file of chunk 0 must be whole"):
                read(chunk_format, 0, 0, data[:stop], 1)
        assert_same(read(chunk_format, 0, 0, data, 2), rows)

    def test_the_file_of_another_chunk_is_an_error(self) -> None:
        chunk_format = self.make(FEW)
        data = chunk_format.encode(0, 3, rows_of(chunk_format, 0, ROWS))
        with pytest.raises(ValueError, match="ids of chunk 2 must be 16 to 23, got 24 to 31"):
            read(chunk_format, 0, 2, data, ROWS)
        with pytest.raises(ValueError, match="ids of chunk 2"):
            chunk_format.decode(0, 2, data, [None] * 3)

    def test_a_file_of_other_lanes_is_an_error(self) -> None:
        other = [column(layout.path, str(layout.dtype), layout.shape, lanes=1) for layout in FEW]
        data = self.make(other).encode(0, 0, rows_of(self.make(other), 0, 6))
        with pytest.raises(ValueError, match="ids of chunk 0 must be 0 to 1, got 0 to 5"):
            read(self.make(FEW), 0, 0, data, 1)

    @pytest.mark.parametrize(
        "other",
        [
            [column("observation/camera", "uint8", (4, 5)), column("reward", "int32"), FEW[2]],
            [column("observation/camera", "uint8", (5, 4)), column("reward"), FEW[2]],
            [column("observation/camera", "uint8", (4, 5)), column("rewards"), FEW[2]],
            [column("observation/camera", "uint8", (4, 5)), FEW[2], column("reward")],
            FEW[:2],
        ],
    )
    def test_a_file_of_other_columns_is_an_error(self, other: list[ColumnLayout]) -> None:
        data = self.make(other).encode(0, 0, rows_of(self.make(other), 0, ROWS))
        with pytest.raises(ValueError, match="Arrow file of chunk 0 must be whole"):
            read(self.make(FEW), 0, 0, data, 1)

    def test_files_of_two_batches_or_with_nulls_are_errors(self) -> None:
        chunk_format = self.make([column("reward", lanes=1)])
        data = chunk_format.encode(0, 0, [np.ones((4, 1), np.float32)])
        table = pa.ipc.open_file(data).read_all()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
        with pytest.raises(ValueError, match="must have 1 record batch, got 2"):
            read(chunk_format, 0, 0, sink.getvalue().to_pybytes(), 2)
        table = table.set_column(2, "reward", pa.array([1, 2, None, 4], pa.float32()))
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        with pytest.raises(ValueError, match="column 'reward' of chunk 0 must have no nulls"):
            read(chunk_format, 0, 0, sink.getvalue().to_pybytes(), 2)

    def test_columns_of_unlike_length_are_no_file(self) -> None:
        with pytest.raises(ValueError, match="must have equal lanes and ids in a chunk"):
            self.make([column("a"), column("b", chunk_rows=4)])

    def test_an_unknown_compression_of_a_manifest_is_named(self) -> None:
        with pytest.raises(StoreFormatError, match="must be one of 'zstd', 'lz4', got 'brotli'"):
            chunk_format_of(FEW, layout="arrow", codec={"compression": "brotli", "level": None})


class TestArrowParts(ArrowPartsTests):
    def test_most_bytes_begin_at_a_page_of_the_file(self) -> None:
        page = mmap.PAGESIZE
        layouts = [
            column("reward", lanes=2, chunk_rows=128),
            column("frame", "uint8", (8, page), lanes=2, chunk_rows=128),
            column("next_frame", "uint8", (2, page), lanes=2, chunk_rows=128),
            column("done", "bool", lanes=2, chunk_rows=128),
            column("vector", "int64", (3,), lanes=2, chunk_rows=128),
        ]
        chunk_format = self.make(layouts)
        for chunk in range(3):
            rows = rows_of(chunk_format, 0, 128, seed=chunk)
            data = chunk_format.encode(0, chunk, rows)
            offsets = chunk_format.raw_offsets(0, chunk, data)
            assert [offset is not None for offset in offsets] == [False, True, True, False, False]
            for offset, leaf in zip(offsets, rows, strict=True):
                if offset is not None:
                    assert offset % page == 0
                    assert bytes(data[offset : offset + leaf.nbytes]) == leaf.tobytes()
            assert_same(read(chunk_format, 0, chunk, data, 128), rows)
            assert pa.ipc.open_file(data).schema.metadata[b"diskbuf"] == b'{"a": 1}'
        part = chunk_format.encode(0, 3, [leaf[:127] for leaf in rows_of(chunk_format, 0, 128)])
        assert chunk_format.raw_offsets(0, 3, part) == [None] * 5

    def test_small_files_are_not_padded(self) -> None:
        chunk_format = self.make(FEW)
        assert len(chunk_format.encode(0, 0, rows_of(chunk_format, 0, ROWS))) < mmap.PAGESIZE

    def test_the_key_of_the_padding_is_taken(self) -> None:
        with pytest.raises(ValueError, match="must not have the key b'padding'"):
            chunk_format_of(FEW, layout="arrow", codec=None, metadata={b"padding": b""})


class TestZstdArrowParts(ArrowPartsTests):
    codec = "zstd"

    def test_files_are_smaller_and_have_no_raw_chunks(self) -> None:
        layouts = [column("frame", "uint8", (64, 64), chunk_rows=ROWS)]
        zeros = [np.zeros((ROWS, LANES, 64, 64), np.uint8)]
        data = self.make(layouts).encode(0, 0, zeros)
        assert len(data) < zeros[0].nbytes / 10
        assert self.make(layouts).raw_offsets(0, 0, data) == [None]

    def test_columns_that_are_not_wanted_are_not_decompressed(self) -> None:
        layouts = [column("frame", "uint8", (64, 64)), column("reward")]
        chunk_format = self.make(layouts)
        rows = rows_of(chunk_format, 0, ROWS)
        data = bytearray(chunk_format.encode(0, 0, rows))
        frame = bytes(data).find(rows[0].tobytes()[:64])  # random bytes are stored as they are, in a frame of zstd
        start = bytes(data).rfind(b"\x28\xb5\x2f\xfd", 0, frame)
        data[start : start + 4] = b"rot!"
        with pytest.raises(ValueError, match="must be whole"):
            read(chunk_format, 0, 0, bytes(data), ROWS)
        reward = np.empty_like(rows[1])
        chunk_format.decode(0, 0, bytes(data), [None, reward])
        assert_same([reward], [rows[1]])


class TestLz4ArrowParts(ArrowPartsTests):
    codec = "lz4"


def _buffer(text: str) -> Any:
    return zarr.core.buffer.default_buffer_prototype().buffer.from_bytes(text.encode())


def entry_of(shard: bytes, count: int, number: int) -> tuple[int, int]:
    start = len(shard) - 4 - 16 * (count - number)
    return struct.unpack("<QQ", shard[start : start + 16])  # type: ignore[return-value]


def with_entry(shard: bytes, count: int, number: int, entry: tuple[int, int]) -> bytes:
    """The shard with another entry in its index, the index's checksum made right."""
    import google_crc32c

    body, index = shard[: len(shard) - 4 - 16 * count], bytearray(shard[len(shard) - 4 - 16 * count : -4])
    index[16 * number : 16 * (number + 1)] = struct.pack("<QQ", *entry)
    return body + bytes(index) + struct.pack("<I", google_crc32c.value(bytes(index)))


# ---- names of columns in Arrow files


def test_leaves_of_equal_or_no_path_are_named_by_their_arrays() -> None:
    layouts = [column("a/b", file_path="a%2Fb"), column("a/b"), column("", file_path="data"), column("id")]
    assert column_names(layouts) == ["a%2Fb", "a/b", "data", "_id"]


@given(st.lists(st.text("_idlane/", max_size=6), min_size=1, max_size=6, unique=True))
def test_names_are_distinct_and_lead_back_to_the_leaves(paths: list[str]) -> None:
    layouts = [column(path, file_path=path or "data") for path in paths]
    if len({layout.file_path for layout in layouts}) < len(layouts):
        return
    names = column_names(layouts)
    assert len({*names, "id", "lane"}) == len(paths) + 2
    wanted = [layout.file_path if "" in paths else layout.path for layout in layouts]
    assert [re.sub(r"^_(?=_*(id|lane)$)", "", name) for name in names] == wanted


# ---- codecs as the user names them


def made(codec: Any, *, layout: str = "zarr", level: int | None = None, inner_rows: int | None = None) -> Any:
    return codec_json(layout, codec, level=level, inner_rows=inner_rows, layouts=FEW)


def test_no_codec_is_no_json() -> None:
    assert made(None) is None
    assert made(None, layout="arrow") is None


@pytest.mark.parametrize("codec", ["gzp", "ZSTD", "", 7, {}, object(), [zarr.codecs.ZstdCodec(), "zstd"]])
def test_an_unknown_codec_is_refused(codec: Any) -> None:
    with pytest.raises(OptionError, match=r"codec must .*'zstd', 'blosc', 'lz4' or zarr codec objects, got"):
        made(codec)


@pytest.mark.parametrize("codec", ["blosc", "gzip", zarr.codecs.ZstdCodec()])
def test_an_arrow_file_takes_two_codecs(codec: Any) -> None:
    with pytest.raises(OptionError, match="codec must be one of 'zstd', 'lz4' with layout 'arrow', got"):
        made(codec, layout="arrow")
    assert made("zstd", layout="arrow") == {"compression": "zstd", "level": None}
    assert made("lz4", layout="arrow", level=3) == {"compression": "lz4", "level": 3}


@pytest.mark.parametrize(
    ("layout", "codec", "level"),
    [
        ("zarr", "zstd", 23),
        ("zarr", "blosc", 10),
        ("zarr", "lz4", -1),
        ("zarr", "zstd", True),
        ("zarr", "zstd", 1.5),
        ("arrow", "lz4", 13),
        ("arrow", "zstd", 23),
    ],
)
def test_a_level_outside_the_codecs_is_refused(layout: str, codec: str, level: Any) -> None:
    with pytest.raises(OptionError, match=rf"level must be an int from .* for '{codec}', got {level}"):
        made(codec, layout=layout, level=level)


def test_a_codec_object_has_its_own_level() -> None:
    with pytest.raises(OptionError, match="level must be left out with codec objects, got 3"):
        made(zarr.codecs.ZstdCodec(), level=3)


def test_codec_objects_come_in_the_order_in_which_zarr_runs_them() -> None:
    with pytest.raises(OptionError, match="codec must have array codecs first"):
        made([zarr.codecs.ZstdCodec(), zarr.codecs.BytesCodec()])
    with pytest.raises(OptionError, match="codec must have array codecs first"):
        made([])


def test_a_codec_that_rounds_is_refused() -> None:
    from zarr.codecs import numcodecs as other_codecs

    layouts = [column("x", "float32", (4,))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zarr says of each of these that other readers may not have it
        rounding = other_codecs.BitRound(keepbits=3)
        with pytest.raises(OptionError, match="codec must give back every value as it was, but doesn't for leaf 'x'"):
            codec_json("zarr", [rounding], level=None, inner_rows=None, layouts=layouts)


@pytest.mark.parametrize("inner_rows", [0, 3, -2, True, 2.0, "4"])
def test_inner_rows_that_are_no_power_of_two_are_refused(inner_rows: Any) -> None:
    with pytest.raises(OptionError, match="inner_rows must be a power of two, got"):
        made("zstd", inner_rows=inner_rows)


def test_inner_rows_beyond_the_shard_are_refused() -> None:
    with pytest.raises(
        OptionError, match="inner_rows must be at most the 8 ids in a shard of leaf 'observation/camera'"
    ):
        made("zstd", inner_rows=16)


@given(st.integers(0, 2**20), st.integers(0, 20))
def test_inner_chunks_are_a_quarter_of_a_mebibyte_or_the_most_below_it(row_bytes: int, log_rows: int) -> None:
    layout = column("x", "uint8", (row_bytes,), lanes=1, chunk_rows=2**log_rows)
    json_ = codec_json("zarr", "zstd", level=None, inner_rows=None, layouts=[layout])
    assert json_ is not None
    rows = json_["inner_rows"]["x"]
    assert rows.bit_count() == 1
    assert rows <= layout.chunk_rows
    assert rows == 1 or rows * row_bytes <= 2**18
    assert rows == layout.chunk_rows or 2 * rows * row_bytes > 2**18


@pytest.mark.parametrize(
    "codec",
    [
        {"codecs": [{"name": "bytes"}, {"name": "zstd2"}], "inner_rows": {"reward": 2}},
        {"codecs": [{"name": "bytes"}, "zstd"], "inner_rows": {"reward": 2}},
        {"codecs": [{"name": "bytes"}], "inner_rows": {"reward": 3}},
        {"codecs": [{"name": "bytes"}], "inner_rows": {}},
        {"codecs": "zstd", "inner_rows": {"reward": 2}},
        {},
    ],
)
def test_a_codec_of_a_manifest_that_is_not_known_is_a_format_error(codec: Mapping[str, Any]) -> None:
    with pytest.raises(StoreFormatError, match="must"):
        chunk_format_of([FEW[1]], layout="zarr", codec=codec)


def test_an_unknown_codec_of_a_manifest_is_named() -> None:
    codec = {"codecs": [{"name": "bytes"}, {"name": "zstd2"}], "inner_rows": {"reward": 2}}
    with pytest.raises(StoreFormatError, match="got 'zstd2'"):
        chunk_format_of([FEW[1]], layout="zarr", codec=codec)


def test_an_unknown_layout_is_a_format_error() -> None:
    with pytest.raises(StoreFormatError, match="layout must be 'zarr' or 'arrow', got 'parquet'"):
        chunk_format_of(FEW, layout="parquet", codec=None)


# ---- the benchmark


@pytest.mark.parametrize("codec", ["zstd", "blosc", "lz4"])
def test_the_store_checksum_of_a_shard_depends_on_its_rows(codec: str) -> None:
    """Bytes with their own CRC-32C behind them have the same CRC-32C whatever they are."""
    import google_crc32c

    column = COLUMN_OF_INTS
    made = codec_json("zarr", codec, level=None, inner_rows=8, layouts=[column])
    chunk_format = chunk_format_of([column], layout="zarr", codec=made)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 2**62, (64, column.lanes), np.int64) for _ in range(8)]  # incompressible, so of one size
    shards = [bytes(chunk_format.encode(0, 0, [one])) for one in rows]
    assert len({google_crc32c.value(shard) for shard in shards}) == len(rows)


@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads /proc")
def test_a_quick_run_of_the_benchmark_measures_every_layout(tmp_path: Path) -> None:
    bench = Path(__file__).parents[1] / "tools" / "bench" / "layouts.py"
    command = [sys.executable, str(bench), "--quick", "--folder", "stores", "--json", "figures.json"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=200)
    assert list((tmp_path / "stores").iterdir()) == []
    rows = {row["name"] for row in json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["rows"]}
    assert rows > {
        *(f"decode_{codec}_vs_{peer}" for codec in ("zstd", "blosc", "lz4") for peer in ("tensorstore", "zarr")),
        *(f"decode_{layout}_vs_copy" for layout in ("zarr", "arrow")),
        *("pass_zstd", "warm_256x2", "arrow_pass_frames", "sealing_zstd", "streaming_pass", "streaming_first"),
    }
