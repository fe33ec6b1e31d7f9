"""Columns: the mapped executor gives what the plain one gives, however the chunks lie; and stores fall back on it."""

import contextlib
import errno
import itertools
import math
import mmap
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import diskbuf
from diskbuf.errors import StoreCorruptError
from diskbuf.options import StoreOptions
from diskbuf.replay_buffers.uniform import UniformReplayBuffer
from diskbuf.store import columns, reading
from diskbuf.store.columns import Column, FileColumn, MappedColumn, PwriteTail, aligned_empty
from diskbuf.store.layout import ColumnLayout
from diskbuf.store.mapping import Reservation
from diskbuf.store.reading import Store

SHAPES = [(), (3,), (2, 2), (0,), (2, 0, 3), (1100,), (5, 257)]
PITCHED = StoreOptions(chunk_bytes=48)
"""Chunks far below a page."""


@st.composite
def layouts(draw: st.DrawFn) -> ColumnLayout:
    return ColumnLayout(
        path="x",
        file_path="x",
        dtype=np.dtype(draw(st.sampled_from(["uint8", "bool", "float16", "int64", "complex128"]))),
        shape=draw(st.sampled_from(SHAPES)),
        lanes=draw(st.integers(1, 3)),
        chunk_rows=draw(st.sampled_from([1, 2, 4, 16, 4096])),
        slots=draw(st.none() | st.integers(2, 4)),
    )


def rows_of(layout: ColumnLayout, first_id: int, count: int) -> np.ndarray:
    """[count, lanes, *shape] whose bytes differ from id to id and from lane to lane."""
    shape = (count, layout.lanes, *layout.shape)
    numbers = (first_id + np.arange(count)).reshape(count, *(1,) * (len(shape) - 1)) * 7
    lanes = np.arange(layout.lanes).reshape(1, layout.lanes, *(1,) * len(layout.shape)) * 3
    inner = np.arange(math.prod(layout.shape)).reshape(layout.shape)
    return ((numbers + lanes + inner) % 251).astype(layout.dtype)


class Growing:
    """Columns over the same files, with the least of a writer that rolls and recycles chunks."""

    def __init__(self, layout: ColumnLayout, folder: Path) -> None:
        self.layout = layout
        self.folder = folder
        self.writers: list[Column] = [
            MappedColumn(layout, folder, writable=True),
            FileColumn(layout, folder, writable=True),
        ]
        self.next_id = 0

    def append(self, count: int, *, by: int, is_hot: bool) -> None:
        rows = self.layout.chunk_rows
        while count:
            chunk, inside = divmod(self.next_id, rows)
            self._begin(chunk)
            size = min(count, rows - inside)
            path = self.writers[by].chunk_path(chunk)
            with open(path, "r+b") as file:
                tail = self.writers[by].tail(self.next_id, size, descriptor=file.fileno(), is_hot=is_hot)
                tail[0:size] = rows_of(self.layout, self.next_id, size)
            self.next_id += size
            count -= size

    def _begin(self, chunk: int) -> None:
        slots = self.layout.slots
        path = self.writers[0].chunk_path(chunk)
        if slots is not None and chunk >= slots and not path.exists():
            self.writers[0].chunk_path(chunk - slots).rename(path)
        if not path.exists():
            with open(path, "wb") as file:
                file.truncate(self.layout.chunk_bytes)
        for column in self.writers:
            if column.attached.get(column.slot(chunk)) != chunk:
                column.attach(chunk)

    @property
    def first_id(self) -> int:
        """The oldest id whose chunk isn't overwritten."""
        slots = self.layout.slots
        begun = -(-self.next_id // self.layout.chunk_rows)
        return 0 if slots is None else max(0, begun - slots) * self.layout.chunk_rows


@settings(max_examples=80)
@given(layouts(), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 1), st.booleans()), max_size=12), st.data())
def test_a_mapped_column_reads_what_a_plain_one_reads(
    layout: ColumnLayout, appends: list[tuple[int, int, bool]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        growing = Growing(layout, Path(folder))
        for count, by, is_hot in appends:
            growing.append(count, by=by, is_hot=is_hot)
        first, stop = growing.first_id, growing.next_id
        reader = MappedColumn(layout, Path(folder), writable=False, first_chunk=first // layout.chunk_rows)
        for chunk in range(first // layout.chunk_rows, -(-stop // layout.chunk_rows)):
            reader.attach(chunk)
        if first == stop:
            return
        flat = np.array(data.draw(st.lists(st.integers(0, (stop - first) * layout.lanes - 1), max_size=20)), np.int64)
        expected = rows_of(layout, first, stop - first).reshape((stop - first) * layout.lanes, *layout.shape)[flat]
        for column in (*growing.writers, reader):
            found = column.take(flat + column.offset(first))
            assert found.dtype == layout.dtype
            assert not np.shares_memory(found, column.read_span(first, 1))
            np.testing.assert_array_equal(found, expected)
            start = max(first, (stop - 1) // layout.chunk_rows * layout.chunk_rows)
            np.testing.assert_array_equal(column.read_span(start, stop - start), rows_of(layout, start, stop - start))


@pytest.mark.parametrize("kind", [MappedColumn, FileColumn])
@pytest.mark.parametrize("chunk_rows", [2, 4096])
def test_one_row_alone_is_a_copy_too(tmp_path: Path, kind: type[Column], chunk_rows: int) -> None:
    layout = ColumnLayout(
        path="x", file_path="x", dtype=np.dtype("int32"), shape=(2,), lanes=1, chunk_rows=chunk_rows, slots=2
    )
    growing = Growing(layout, tmp_path)
    growing.append(2, by=0, is_hot=False)
    column = kind(layout, tmp_path, writable=True)
    column.attach(0)
    row = column.take(np.int64(1) + np.zeros((), np.int64))
    row += 1
    np.testing.assert_array_equal(column.take(np.array([1])), rows_of(layout, 1, 1)[0])


@pytest.mark.parametrize("size", [10, 2**17])
def test_large_gathers_lie_on_a_64_byte_boundary(tmp_path: Path, size: int) -> None:
    layout = ColumnLayout(path="x", file_path="x", dtype=np.dtype("uint8"), shape=(), lanes=1, chunk_rows=4096, slots=2)
    Growing(layout, tmp_path).append(8, by=0, is_hot=False)
    column = MappedColumn(layout, tmp_path, writable=False)
    column.attach(0)
    found = column.take(np.zeros(size, np.int64))
    assert found.shape == (size,)
    assert size < 2**16 or found.ctypes.data % 64 == 0


@given(st.sampled_from([(), (3,), (5, 257)]), st.sampled_from(["uint8", "float16", "complex128"]))
def test_an_aligned_array_is_one(shape: tuple[int, ...], dtype: str) -> None:
    array = aligned_empty(shape, np.dtype(dtype))
    assert (array.shape, array.dtype, array.ctypes.data % 64) == (shape, np.dtype(dtype), 0)


def test_a_pwrite_tail_goes_on_after_a_write_that_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chunk"
    pwrite = columns.os.pwrite
    monkeypatch.setattr(columns.os, "pwrite", lambda number, data, offset: pwrite(number, data[:3], offset))
    with open(path, "wb") as file:
        PwriteTail(file.fileno(), offset=8, row_bytes=8)[1] = np.arange(4, dtype="uint16")
    assert path.read_bytes() == bytes(16) + np.arange(4, dtype="uint16").tobytes()


@pytest.mark.parametrize("kind", [MappedColumn, FileColumn])
@pytest.mark.parametrize("size", [0, 23, 25])
def test_a_chunk_file_of_another_length_is_refused_by_name(tmp_path: Path, kind: type[Column], size: int) -> None:
    """Mapping a short file and reading behind its end would kill the process."""
    layout = ColumnLayout(
        path="a/b", file_path="x", dtype=np.dtype("uint8"), shape=(3,), lanes=2, chunk_rows=4, slots=2
    )
    (tmp_path / "c.0.0.0").write_bytes(bytes(size))
    with pytest.raises(StoreCorruptError, match=rf"c\.0\.0\.0 of leaf 'a/b' must hold 24 bytes, has {size}"):
        kind(layout, tmp_path, writable=False).attach(0)


def test_a_mapped_column_moves_when_its_reservation_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "GROWING_RESERVATION_BYTES", 2 * mmap.PAGESIZE)
    layout = ColumnLayout(
        path="x", file_path="x", dtype=np.dtype("int16"), shape=(5,), lanes=2, chunk_rows=4, slots=None
    )
    growing = Growing(layout, tmp_path)
    early = []
    for _ in range(15):
        growing.append(3, by=0, is_hot=True)
        early.append(growing.writers[0].read_span(0, 3))
    for column in growing.writers:
        rows = np.arange(growing.next_id * 2) + column.offset(0)
        np.testing.assert_array_equal(column.take(rows), rows_of(layout, 0, 45).reshape(90, 5))
    for array in early:  # the old mappings live as long as arrays on them
        np.testing.assert_array_equal(array, rows_of(layout, 0, 3))


def test_no_row_reads_as_zeros_while_a_column_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may gather at any moment of the move."""
    monkeypatch.setattr(columns, "GROWING_RESERVATION_BYTES", mmap.PAGESIZE)
    layout = ColumnLayout(
        path="x", file_path="x", dtype=np.dtype("int16"), shape=(5,), lanes=1, chunk_rows=4, slots=None
    )
    growing = Growing(layout, tmp_path)
    growing.append(4, by=0, is_hot=True)
    mapped = growing.writers[0]
    seen = []
    map_file = Reservation.map_file

    def watched(self: Reservation, *args: Any, **kwargs: Any) -> None:
        seen.append(mapped.take(np.arange(4)))
        map_file(self, *args, **kwargs)

    monkeypatch.setattr(Reservation, "map_file", watched)
    growing.append(12, by=0, is_hot=True)
    assert len(seen) >= 4
    for rows in seen:
        np.testing.assert_array_equal(rows, rows_of(layout, 0, 4)[:, 0])


@pytest.mark.parametrize("max_length", [None, 3])
def test_a_column_whose_rows_hold_nothing_takes_any_number_of_them(tmp_path: Path, max_length: int | None) -> None:
    spec = {"nothing": diskbuf.ArraySpec([0, 3], "float32"), "id": diskbuf.ArraySpec([], "int64")}
    with UniformReplayBuffer(spec, 2, max_length, path=tmp_path / "a") as buffer:
        for step in range(9):
            buffer.add_batch({"nothing": np.zeros([2, 0, 3], "float32"), "id": np.full(2, step)})
        items, info = buffer.get_next(5, num_steps=2)
        assert items["nothing"].shape == (5, 2, 0, 3)
        np.testing.assert_array_equal(items["id"], info.ids)


# ---- the same through stores

SPEC = {
    "id": diskbuf.ArraySpec([], "int64"),
    "pair": diskbuf.ArraySpec([2], "float32"),
    "bytes": diskbuf.ArraySpec([1031], "uint8"),
    "nothing": diskbuf.ArraySpec([0], "int8"),
}


def steps(first_id: int, count: int, lanes: int) -> dict[str, np.ndarray]:
    """[B, T, *shape] in which every number says id and lane."""
    ids = np.arange(first_id, first_id + count)[None, :] + np.zeros((lanes, 1), int)
    lane = np.arange(lanes)[:, None] + np.zeros((1, count), int)
    return {
        "id": ids * 10 + lane,
        "pair": np.stack([ids, lane], -1).astype("float32"),
        "bytes": np.broadcast_to((ids * 5 + lane)[..., None] % 256, (*ids.shape, 1031)).astype("uint8"),
        "nothing": np.zeros((*ids.shape, 0), "int8"),
    }


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name in SPEC:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def plain_store(buffer: UniformReplayBuffer) -> Store:
    return Store(buffer.path, buffer._store._leaves, is_mapped=False)


@contextlib.contextmanager
def no_address_space(after: int) -> Iterator[list[int]]:
    """Lets the first `after` reservations through, and refuses the rest as a system under a limit would."""
    made: list[int] = []

    class Refusing(Reservation):
        def __init__(self, size: int) -> None:
            made.append(size)
            if len(made) > after:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            super().__init__(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "Reservation", Refusing)
        yield made


@settings(max_examples=25)
@given(
    st.none() | st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([1, 40, 1031 * 4, 2**20]),
    st.lists(st.integers(1, 7), max_size=8),
)
def test_an_unmapped_store_reads_what_a_mapped_one_reads(
    max_length: int | None, lanes: int, chunk_bytes: int, extends: list[int]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        buffer = UniformReplayBuffer(
            SPEC, lanes, max_length, path=f"{folder}/a", options=StoreOptions(chunk_bytes=chunk_bytes, fsync="never")
        )
        with buffer, contextlib.closing(plain_store(buffer)) as plain, diskbuf.open(buffer.path) as mapped:
            added = 0
            for count in extends:
                buffer.extend(steps(added, count, lanes))
                added += count
                first_id, next_id = plain.window()
                assert (first_id, next_id) == (buffer.first_id, buffer.next_id) == (mapped.first_id, added)
                rows = np.arange((next_id - first_id) * lanes)[::-1]
                expected = buffer._store.gather(first_id, rows)
                for left, right in zip(plain.gather(first_id, rows), expected, strict=True):
                    np.testing.assert_array_equal(left, right)
                for left, right in zip(plain.read_range(first_id, next_id), expected, strict=True):
                    np.testing.assert_array_equal(left.swapaxes(0, 1).reshape(right.shape), right[::-1])
            assert_equal(mapped.gather_all(), steps(mapped.first_id, added - mapped.first_id, lanes))


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(("max_length", "keep_history"), [(5, False), (5, True), (None, False)])
def test_a_buffer_without_address_space_does_all_it_does_with_it(
    tmp_path: Path, after: int, max_length: int | None, keep_history: bool
) -> None:
    with no_address_space(after) as made:
        buffer = UniformReplayBuffer(
            SPEC, 2, max_length, path=tmp_path / "a", keep_history=keep_history, options=PITCHED
        )
        assert len(made) == len(SPEC) - 1  # the one without bytes needs none
        with buffer, diskbuf.open(buffer.path, seed=3) as reader:
            for step in range(17):
                buffer.add_batch({name: leaf[:, 0] for name, leaf in steps(step, 1, 2).items()})
                window = buffer.next_id - buffer.first_id
                assert_equal(reader.gather_all(), steps(buffer.first_id, window, 2))
            buffer.extend(steps(17, 12, 2))
            items, info = reader.get_next(50, num_steps=3)
            np.testing.assert_array_equal(items["id"] // 10, info.ids)
            assert_equal(buffer.gather_all(), steps(buffer.first_id, buffer.next_id - buffer.first_id, 2))


def test_a_ring_that_runs_out_of_mappings_goes_on_and_leaves_no_chunk_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's limit on mappings is met by one chunk, long after the column was mapped."""
    map_file = Reservation.map_file
    calls = itertools.count()

    def limited(self: Reservation, *args: Any, **kwargs: Any) -> None:
        if next(calls) >= 6:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        map_file(self, *args, **kwargs)

    monkeypatch.setattr(Reservation, "map_file", limited)
    with UniformReplayBuffer(SPEC, 2, 5, path=tmp_path / "a", options=PITCHED) as buffer:
        for step in range(60):
            buffer.add_batch({name: leaf[:, 0] for name, leaf in steps(step, 1, 2).items()})
            assert_equal(buffer.gather_all(), steps(buffer.first_id, buffer.next_id - buffer.first_id, 2))
        for column in buffer._store.columns:
            chunks = [entry for entry in column.folder.iterdir() if entry.name.startswith("c.")]
            assert len(chunks) <= column.layout.slots
    assert next(calls) > 6


def test_a_limit_on_address_space_makes_reading_slower_and_nothing_else(tmp_path: Path) -> None:
    code = f"""
        import resource, sys
        import numpy as np
        import diskbuf
        from diskbuf.store.columns import FileColumn
        import diskbuf.replay_buffers.uniform, zarr.dtype
        resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
        spec = {{"id": diskbuf.ArraySpec([], "int64"), "x": diskbuf.ArraySpec([3], "float32")}}
        with diskbuf.UniformReplayBuffer(spec, 2, None, path={str(tmp_path / "a")!r}) as buffer:
            assert all(isinstance(column, FileColumn) for column in buffer._store.columns)
            for step in range(100):
                buffer.add_batch({{"id": np.full(2, step), "x": np.full((2, 3), step, "float32")}})
            with diskbuf.open(buffer.path) as reader:
                items, info = reader.get_next(64, num_steps=2)
            assert (items["id"] == info.ids).all() and (items["x"] == info.ids[..., None]).all()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
    with diskbuf.open(tmp_path / "a") as buffer:
        np.testing.assert_array_equal(buffer.gather_all()["id"], [range(100)] * 2)


def test_another_error_than_too_little_address_space_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(size: int) -> Reservation:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(columns, "Reservation", refused)
    with pytest.raises(PermissionError):
        UniformReplayBuffer(SPEC, path=tmp_path / "a")


def test_an_array_outlives_the_store_it_came_from(tmp_path: Path) -> None:
    with UniformReplayBuffer(SPEC, 2, 5, path=tmp_path / "a") as buffer:
        buffer.extend(steps(0, 5, 2))
        span = buffer._store.columns[0].read_span(0, 5)
    del buffer
    assert span.shape[0] == 5
    assert span.tobytes() == steps(0, 5, 2)["bytes"].swapaxes(0, 1).tobytes()


def test_a_store_that_cannot_be_mapped_by_this_platform_is_read_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading.mapping, "is_supported", lambda: False)
    with UniformReplayBuffer(SPEC, 2, 5, path=tmp_path / "a") as buffer:
        buffer.extend(steps(0, 9, 2))
        assert all(isinstance(column, FileColumn) for column in buffer._store.columns)
        assert_equal(buffer.gather_all(), steps(4, 5, 2))


def test_a_reservation_refuses_to_map_outside_itself(tmp_path: Path) -> None:
    reservation = Reservation(2 * mmap.PAGESIZE)
    with open(tmp_path / "file", "w+b") as file:
        file.truncate(3 * mmap.PAGESIZE)
        for offset, size in ((2 * mmap.PAGESIZE, 1), (-mmap.PAGESIZE, 1), (7, 1), (0, 3 * mmap.PAGESIZE)):
            with pytest.raises(ValueError, match="offset must be a page multiple inside the 8192 bytes reserved"):
                reservation.map_file(offset, file.fileno(), size=size, writable=False)
    assert not reservation.bytes().any()


def test_what_is_unmapped_reads_as_zeros(tmp_path: Path) -> None:
    reservation = Reservation(2 * mmap.PAGESIZE)
    with open(tmp_path / "file", "w+b") as file:
        file.write(b"x" * mmap.PAGESIZE)
        file.flush()
        reservation.map_file(mmap.PAGESIZE, file.fileno(), size=mmap.PAGESIZE, writable=False)
    assert bytes(reservation.bytes()[[0, mmap.PAGESIZE]]) == b"\0x"
    reservation.unmap(mmap.PAGESIZE, size=mmap.PAGESIZE)
    assert not reservation.bytes().any()
