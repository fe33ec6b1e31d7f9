"""Sealed and remote stores read while something happens to them: rows are right, never zeros, and nothing hangs."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_sealed_damage import LAYOUTS, SPEC, assert_rows, make, rows

import diskbuf
from diskbuf import ReadOptions, StoreOptions, UniformReplayBuffer

LANES = 2
CHUNK_BYTES = 1024


@pytest.fixture(params=LAYOUTS)
def options(request: pytest.FixtureRequest) -> StoreOptions:
    return StoreOptions(chunk_bytes=CHUNK_BYTES, fsync_seconds=0.01, **LAYOUTS[request.param])


def read_options(tmp_path: Path, cache_bytes: int = 2**26) -> ReadOptions:
    return ReadOptions(cache_dir=tmp_path / "cache", cache_bytes=cache_bytes)


def assert_gathered(store: Any, ids: list[int]) -> None:
    """Reads these ids as a sampler does whose window is as old as they are."""
    found = store.gather(min(ids), np.array([(id_ - min(ids)) * LANES for id_ in ids]))
    assert found is not None
    by_name = dict(zip(sorted(SPEC), found, strict=True))
    np.testing.assert_array_equal(by_name["id"], ids)
    np.testing.assert_array_equal(by_name["frame"][:, 0], np.array(ids) % 251)


@pytest.mark.parametrize("cache_bytes", [2**26, 1])
@pytest.mark.parametrize("layout", [*LAYOUTS, "raw"])
def test_a_tail_that_was_read_by_an_old_manifest_is_whole_after_a_refresh(
    tmp_path: Path, layout: str, cache_bytes: int
) -> None:
    options = StoreOptions(chunk_bytes=CHUNK_BYTES, **LAYOUTS.get(layout, {}))
    url = f"memory://fire/{tmp_path.name}"
    with UniformReplayBuffer(
        SPEC, LANES, None, path=tmp_path / "s", options=options, publish_to=url, publish_seconds=3600
    ) as writer:
        writer.extend(rows(0, 100))
        writer.publish_now()
        with diskbuf.open(url, read_options=read_options(tmp_path, cache_bytes)) as reader:
            for reached, more in ((100, 303), (303, 310), (310, 700)):
                writer.extend(rows(reached, more))
                writer.publish_now()
                assert_rows(reader, 0, reached)
                reader.refresh()
                assert_rows(reader, 0, more)


def test_a_tail_whose_old_object_lies_beside_its_raw_file_is_read_whole_in_a_pass(
    tmp_path: Path, options: StoreOptions
) -> None:
    make(tmp_path / "s", options, 300)
    with UniformReplayBuffer(
        SPEC, LANES, None, path=tmp_path / "s", options=options, read_options=read_options(tmp_path, 1)
    ) as buffer:
        assert_rows(buffer, 0, 300)
        for first_id in range(300, 400, 20):
            buffer.extend(rows(first_id, first_id + 20))
            buffer.flush()
            assert_rows(buffer, 0, first_id + 20)


def test_the_chunk_that_is_written_to_is_not_let_go_of(tmp_path: Path, options: StoreOptions) -> None:
    make(tmp_path / "s", options, 300)
    few = read_options(tmp_path, 3 * CHUNK_BYTES)
    with UniformReplayBuffer(SPEC, LANES, None, path=tmp_path / "s", options=options, read_options=few) as buffer:
        store: Any = buffer._store
        assert_gathered(store, [299])
        buffer.extend(rows(300, 301))
        for first_id in range(0, 250, 10):
            assert_gathered(store, [first_id])
        for column in store.columns:
            assert column.attached.get(300 // column.layout.chunk_rows) is not None  # or the next add is a SIGSEGV
        buffer.extend(rows(301, 310))
        assert_rows(buffer, 0, 310)


def test_rows_that_have_just_left_the_window_are_decoded_all(tmp_path: Path, options: StoreOptions) -> None:
    with UniformReplayBuffer(
        SPEC, LANES, 200, path=tmp_path / "s", options=options, keep_history=True, read_options=read_options(tmp_path)
    ) as writer:
        writer.extend(rows(0, 200))
        with diskbuf.open(tmp_path / "s", read_options=read_options(tmp_path)) as reader:
            reader.first_id  # noqa: B018 - takes the window
            writer.extend(rows(200, 400))
            writer.flush()
            writer._store.make_certain()  # seals what is full
            assert_gathered(reader._store, [0, 5, 13, 30, 90])


def test_a_chunk_that_is_being_read_stays_when_the_writer_evicts_it(tmp_path: Path, options: StoreOptions) -> None:
    make(tmp_path / "s", options, 300)
    with UniformReplayBuffer(
        SPEC, LANES, None, path=tmp_path / "s", options=options, read_options=read_options(tmp_path)
    ) as buffer:
        store: Any = buffer._store
        number = sorted(SPEC).index("id")
        with store._residents.hold(number, [0]):
            buffer.clear()
            found = store._residents._columns[number].read_span(0, 8)
            np.testing.assert_array_equal(found, np.arange(8)[:, None].repeat(LANES, 1))
        buffer.extend(rows(300, 310))
        assert_rows(buffer, 300, 310)


def restart(path: Path, options: StoreOptions, reader: Any) -> None:
    """Another run of the writer, of which a thread of the reader learns."""
    with UniformReplayBuffer(SPEC, LANES, None, path=path, options=options) as writer:
        writer.extend(rows(writer.next_id, writer.next_id + 50))
    reader._store.window()


@pytest.mark.parametrize("moment", ["ask", "hold", "_attach"])
def test_a_writer_that_begins_while_a_thread_fetches_makes_it_read_again(
    tmp_path: Path, options: StoreOptions, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    make(tmp_path / "s", options, 300)
    with diskbuf.open(tmp_path / "s", read_options=read_options(tmp_path)) as reader:
        residents: Any = reader._store._residents
        call: Callable[..., Any] = getattr(residents, moment)
        was_called = []

        def restarted(*arguments: Any, **keywords: Any) -> Any:
            if not was_called:
                was_called.append(moment)
                restart(tmp_path / "s", options, reader)
            return call(*arguments, **keywords)

        monkeypatch.setattr(residents, moment, restarted)
        done: list[Any] = []

        def read() -> None:
            done.append(reader.get_next(64))

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(30)
        assert was_called
        assert done, "the read must end"
        found, info = done[0]
        np.testing.assert_array_equal(found["id"], info.ids)
        np.testing.assert_array_equal(found["frame"][:, 0], info.ids % 251)


def test_rows_that_are_let_go_of_while_they_are_copied_and_come_back_are_read_again(
    tmp_path: Path, options: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "s", options, 300)
    with diskbuf.open(tmp_path / "s", read_options=read_options(tmp_path)) as reader:
        store: Any = reader._store
        reader.gather_all()
        reader.get_next(64)
        column = store.columns[0]
        take = column.take
        was_called = []

        def torn(taken: Any) -> Any:
            if was_called:
                return take(taken)
            was_called.append(True)
            store._residents.let_go(0, 1)
            found = take(taken)
            every = np.arange(300 * LANES)
            store.gather(0, every)  # another thread has them all attached again
            return found

        monkeypatch.setattr(column, "take", torn)
        assert_gathered(store, [0, 10, 40, 60, 120])
        assert was_called


def test_a_buffer_that_is_closed_while_a_thread_fetches_says_so(tmp_path: Path, options: StoreOptions) -> None:
    make(tmp_path / "s", options, 300)
    with diskbuf.open(tmp_path / "s", read_options=read_options(tmp_path)) as reader:
        store: Any = reader._store
        residents = store._residents
        residents.close()
        with pytest.raises(diskbuf.ClosedError, match="must be open"):
            store.gather(0, np.arange(4))
        with pytest.raises(diskbuf.ClosedError, match="must be open"):
            store.read_range(0, 10)


def test_a_chunk_that_is_being_let_go_of_as_a_process_forks_is_not_taken_for_attached(
    tmp_path: Path, options: StoreOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "s", options, 300)
    with diskbuf.open(tmp_path / "s", read_options=read_options(tmp_path)) as reader:
        store: Any = reader._store
        reader.gather_all()
        seen = []
        for column in store.columns:
            unmap = column._reservation.unmap

            def looked(*arguments: Any, unmap: Any = unmap, column: Any = column, **keywords: Any) -> None:
                seen.append(0 in column.attached)  # as a child would find it
                unmap(*arguments, **keywords)

            monkeypatch.setattr(column._reservation, "unmap", looked)
        for number in range(len(store.columns)):
            store._residents.let_go(number, 0)
        assert seen == [False] * len(store.columns)


@pytest.mark.parametrize("cache_bytes", [2**26, 5 * CHUNK_BYTES])
def test_a_ring_of_raw_chunks_far_away_gives_the_rows_of_an_old_window_as_a_newer_one_is_read(
    tmp_path: Path, cache_bytes: int
) -> None:
    url = f"memory://fire/{tmp_path.name}"
    options = StoreOptions(chunk_bytes=CHUNK_BYTES)
    with UniformReplayBuffer(
        SPEC, LANES, 200, path=tmp_path / "s", options=options, publish_to=url, publish_seconds=3600
    ) as writer:
        writer.extend(rows(0, 400))
        writer.publish_now()
        with diskbuf.open(url, read_options=read_options(tmp_path, cache_bytes)) as reader:
            store: Any = reader._store
            for id_ in range(200, 400, 7):
                assert_gathered(store, [id_])
            number = sorted(SPEC).index("id")
            chunk = 200 // store.columns[number].layout.chunk_rows
            with store._residents.hold(number, [chunk]):
                writer.extend(rows(400, 600))
                writer.publish_now()
                reader.refresh()
                assert_rows(reader, 400, 600)
                for id_ in range(400, 600, 7):
                    assert_gathered(store, [id_])
                held = store._residents._columns[number].read_span(255, 1)
                np.testing.assert_array_equal(held, [[255, 255]])
