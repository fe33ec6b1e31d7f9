"""How rows are cut into chunk files: promises about size, and the argument that lets readers follow a full ring."""

import json
import mmap

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from diskbuf.store.layout import ColumnLayout, array_document, page_multiple, ring_slots, rows_per_chunk

MIB = 2**20
ROW_BYTES = st.integers(0, 2**20)
CHUNK_BYTES = st.integers(1, 2**25)
LENGTHS = st.integers(1, 10**7)


def layout_of(
    shape: tuple[int, ...] = (3,), *, dtype: str = "float32", lanes: int = 2, chunk_rows: int = 4, slots: int | None = 3
) -> ColumnLayout:
    return ColumnLayout(
        path="observation/camera",
        file_path="observation/camera",
        dtype=np.dtype(dtype),
        shape=shape,
        lanes=lanes,
        chunk_rows=chunk_rows,
        slots=slots,
    )


@given(ROW_BYTES, CHUNK_BYTES, st.none() | LENGTHS)
def test_a_chunk_holds_a_power_of_two_of_ids(row_bytes: int, chunk_bytes: int, ring_length: int | None) -> None:
    rows = rows_per_chunk(row_bytes, chunk_bytes=chunk_bytes, ring_length=ring_length)
    assert rows.bit_count() == 1


@given(ROW_BYTES, CHUNK_BYTES, st.none() | LENGTHS)
def test_a_chunk_is_at_most_chunk_bytes_unless_one_id_is_more(
    row_bytes: int, chunk_bytes: int, ring_length: int | None
) -> None:
    rows = rows_per_chunk(row_bytes, chunk_bytes=chunk_bytes, ring_length=ring_length)
    assert rows == 1 or rows * row_bytes <= chunk_bytes


@given(st.integers(1, 2**19), CHUNK_BYTES, LENGTHS)
def test_a_full_ring_stays_within_a_quarter_more_than_its_rows_and_a_mebibyte(
    row_bytes: int, chunk_bytes: int, ring_length: int
) -> None:
    """Rows above half a mebibyte need their two spare chunks all the same: see the next test."""
    rows = rows_per_chunk(row_bytes, chunk_bytes=chunk_bytes, ring_length=ring_length)
    disk = ring_slots(ring_length, rows) * rows * row_bytes
    assert disk <= 1.25 * ring_length * row_bytes + MIB


@given(st.integers(2**19 + 1, 2**24), CHUNK_BYTES, LENGTHS)
def test_a_ring_of_huge_rows_has_at_most_the_one_row_too_many_that_readers_need(
    row_bytes: int, chunk_bytes: int, ring_length: int
) -> None:
    rows = rows_per_chunk(row_bytes, chunk_bytes=chunk_bytes, ring_length=ring_length)
    disk = ring_slots(ring_length, rows) * rows * row_bytes
    assert disk <= max(1.25 * ring_length * row_bytes + MIB, (ring_length + 1) * row_bytes)


@given(st.integers(1, 2**20), CHUNK_BYTES, LENGTHS)
def test_no_longer_chunk_would_keep_the_promises(row_bytes: int, chunk_bytes: int, ring_length: int) -> None:
    longer = 2 * rows_per_chunk(row_bytes, chunk_bytes=chunk_bytes, ring_length=ring_length)
    disk = ring_slots(ring_length, longer) * longer * row_bytes
    assert longer * row_bytes > chunk_bytes or disk > 1.25 * ring_length * row_bytes + MIB


def test_a_chunk_of_a_page_or_more_is_whole_pages_when_its_rows_are_powers_of_two() -> None:
    for row_bytes in (1, 4, 64, 1024):
        rows = rows_per_chunk(row_bytes, chunk_bytes=16 * MIB, ring_length=None)
        assert rows * row_bytes % mmap.PAGESIZE == 0


@given(st.integers(1, 60), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 400))
def test_a_row_stays_unwritten_until_the_writer_is_a_whole_chunk_past_its_eviction(
    length: int, chunk_rows: int, next_id: int
) -> None:
    """The chunk kept aside: a gather of rows that were just evicted still finds them whole."""
    slots = ring_slots(length, chunk_rows)
    begun = next_id // chunk_rows  # the chunk that the next step goes to, maybe over an old one
    lowest_whole = (begun - slots + 1) * chunk_rows
    first_id = next_id - length
    assert lowest_whole <= first_id - (chunk_rows - 1) or lowest_whole <= 0
    # What readers check: rows from here on can't have been overwritten.
    assert next_id - (slots * chunk_rows - chunk_rows) >= lowest_whole


@given(st.integers(1, 60), st.sampled_from([1, 2, 4, 8, 16]), st.integers(0, 400))
def test_the_chunks_of_a_window_and_the_next_one_lie_in_different_slots(
    length: int, chunk_rows: int, next_id: int
) -> None:
    slots = ring_slots(length, chunk_rows)
    chunks = range(max(0, next_id - length) // chunk_rows, next_id // chunk_rows + 1)
    assert len({chunk % slots for chunk in chunks}) == len(chunks)


@given(st.integers(0, 10**6))
def test_a_page_multiple_is_the_next_one(size: int) -> None:
    pages = page_multiple(size)
    assert pages % mmap.PAGESIZE == 0
    assert 0 <= pages - size < mmap.PAGESIZE


def test_sizes_follow_from_shape_dtype_lanes_and_chunk() -> None:
    layout = layout_of((3, 2), dtype="float64", lanes=5, chunk_rows=8, slots=4)
    assert (layout.lane_bytes, layout.row_bytes, layout.chunk_bytes, layout.ring_rows) == (48, 240, 1920, 32)


def test_a_column_that_is_never_overwritten_has_no_ring() -> None:
    assert layout_of(slots=None).ring_rows is None


@given(st.integers(0, 2**62), st.integers(0, 4))
def test_a_chunk_number_comes_back_from_its_file_name(chunk: int, rank: int) -> None:
    layout = layout_of((2,) * rank)
    assert layout.chunk_of_name(layout.file_name(chunk)) == chunk


@pytest.mark.parametrize(
    "name", ["zarr.json", "c.1.0", "c.1.0.0.0", "c.01.0.0", "c.1.0.1", "d.1.0.0", "c.-1.0.0", "c.x.0.0", ".c.1.0.0", ""]
)
def test_a_file_that_is_no_chunk_has_no_chunk_number(name: str) -> None:
    assert layout_of((3,)).chunk_of_name(name) is None


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (4, 0, 2)])
@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "int16", "uint64", "float16", "float32", "float64", "complex64", "complex128"]
)
def test_zarr_reads_the_array_document_as_the_column_it_describes(
    tmp_path: str, shape: tuple[int, ...], dtype: str
) -> None:
    layout = layout_of(shape, dtype=dtype)
    document = array_document(layout)
    document["shape"][0] = 7
    with open(f"{tmp_path}/zarr.json", "w") as file:
        json.dump(document, file)
    array = zarr.open_array(tmp_path, mode="r")
    assert (array.shape, array.dtype, array.chunks[:2]) == ((7, 2, *shape), np.dtype(dtype), (4, 2))
    assert array.compressors == ()
    np.testing.assert_array_equal(array[:], np.zeros((7, 2, *shape), dtype))


def test_the_axes_of_a_column_are_named_for_xarray() -> None:
    names = array_document(layout_of((84, 84)))["dimension_names"]
    assert names == ["id", "lane", "observation_camera_0", "observation_camera_1"]
