"""Random histories of a buffer against a plain Python list: whatever is done, and in whichever order, both agree."""

import itertools
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from coded_rows import SPEC, assert_equal, assert_rows, lanes_of, span, step
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import diskbuf
from diskbuf import StoreOptions, UniformReplayBuffer

CHUNK_BYTES = [1, 64, 100, 250, 1024, 4096, 10_000, 2**20]


class BufferMachine(RuleBasedStateMachine):
    """Ids are their own model: row k must say k. What is left to model are the window and the runs.

    Every layout has the same histories.
    """

    layout: ClassVar[dict[str, Any]] = {}
    reading = diskbuf.ReadOptions(cache_dir=":memory:", cache_bytes=2**16)

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "steps.zarr"
        self.readers: list[UniformReplayBuffer] = []
        self.openings = itertools.count()
        self.next_id = 0
        self.floor = 0
        self.runs = [0]

    @initialize(
        lanes=st.integers(1, 3),
        max_length=st.none() | st.integers(1, 12),
        chunk_bytes=st.sampled_from(CHUNK_BYTES),
        keep_history=st.booleans(),
    )
    def create(self, lanes: int, max_length: int | None, chunk_bytes: int, keep_history: bool) -> None:
        self.lanes = lanes
        self.max_length = max_length
        self.chunk_bytes = chunk_bytes
        self.keep_history = keep_history
        self.open()

    def open(self, **arguments: Any) -> None:
        """Opens the buffer for writing; its samples depend only on how often that was done."""
        self.buffer = UniformReplayBuffer(
            SPEC,
            self.lanes,
            self.max_length,
            path=self.path,
            keep_history=self.keep_history,
            seed=next(self.openings),
            options=StoreOptions(chunk_bytes=self.chunk_bytes, fsync="never", **self.layout),
            read_options=self.reading,
            **arguments,
        )

    @property
    def first_id(self) -> int:
        return self.floor if self.max_length is None else max(self.floor, self.next_id - self.max_length)

    def run_of(self, step_id: int) -> int:
        return sum(run <= step_id for run in self.runs)

    def starts(self, num_steps: int) -> list[int]:
        return [
            start
            for start in range(self.first_id, self.next_id - num_steps + 1)
            if self.run_of(start) == self.run_of(start + num_steps - 1)
        ]

    @property
    def all_open(self) -> list[UniformReplayBuffer]:
        return [self.buffer, *self.readers]

    # ---- changes

    @rule()
    def add(self) -> None:
        self.buffer.add_batch(step(self.next_id, self.lanes))
        self.next_id += 1

    @rule(count=st.integers(0, 40))
    def extend(self, count: int) -> None:
        self.buffer.extend(span(self.next_id, self.next_id + count, self.lanes))
        self.next_id += count

    @rule()
    def fail_to_add(self) -> None:
        bad = step(self.next_id, self.lanes) | {"number": np.zeros(self.lanes, "int32")}
        with pytest.raises(diskbuf.SpecError, match="leaf 'number' must be int64"):
            self.buffer.add_batch(bad)

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.floor = self.next_id

    @rule()
    def flush(self) -> None:
        self.buffer.flush()

    @rule()
    def reopen(self) -> None:
        self.buffer.close()
        self.floor = self.first_id
        self.runs.append(self.next_id)
        self.open()

    @precondition(lambda self: self.max_length is not None)
    @rule(more=st.none() | st.integers(1, 9))
    def reopen_with_a_larger_max_length(self, more: int | None) -> None:
        self.buffer.close()
        self.floor = self.first_id
        self.runs.append(self.next_id)
        self.max_length = None if more is None else self.max_length + more
        self.open()

    @rule(length=st.integers(1, 8))
    def reopen_trimmed(self, length: int) -> None:
        self.buffer.close()
        self.floor = self.first_id
        self.runs.append(self.next_id)
        self.max_length = length if self.max_length is None else min(length, self.max_length)
        self.open(trim=True)

    # ---- readers that stay open meanwhile

    @precondition(lambda self: len(self.readers) < 2)
    @rule()
    def open_a_reader(self) -> None:
        self.readers.append(diskbuf.open(self.path, seed=next(self.openings), read_options=self.reading))

    @precondition(lambda self: self.readers)
    @rule()
    def close_a_reader(self) -> None:
        self.readers.pop(0).close()

    # ---- what all of them see

    @rule(size=st.integers(1, 30), num_steps=st.integers(1, 6))
    def sample(self, size: int, num_steps: int) -> None:
        starts = self.starts(num_steps)
        for buffer in self.all_open:
            if not starts:
                with pytest.raises(diskbuf.WindowError):
                    buffer.get_next(size, num_steps)
                continue
            items, info = buffer.get_next(size, num_steps)
            assert info.ids.shape == (size, num_steps)
            assert set(info.ids[:, 0].tolist()) <= set(starts)
            assert (np.diff(info.ids, axis=1) == 1).all()
            assert_rows(items, info.ids, lanes_of(items)[:, :1])
            assert (info.probabilities == np.float32(1 / (len(starts) * self.lanes))).all()

    @precondition(lambda self: self.first_id < self.next_id)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        pairs = st.tuples(st.integers(self.first_id, self.next_id - 1), st.integers(0, self.lanes - 1))
        ids, lanes = np.array(data.draw(st.lists(pairs, min_size=1, max_size=10))).T
        for buffer in self.all_open:
            assert_rows(buffer.read(ids, lanes), ids, lanes)
            assert_rows(buffer.read(ids[0], lanes[0]), ids[0], lanes[0])

    @rule(data=st.data())
    def read_outside(self, data: st.DataObject) -> None:
        step_id = data.draw(st.integers(-3, self.first_id - 1) | st.integers(self.next_id, self.next_id + 3))
        for buffer in self.all_open:
            with pytest.raises(diskbuf.WindowError, match="ids must be in the window"):
                buffer.read(step_id, 0)

    @rule(size=st.none() | st.integers(1, 4), num_steps=st.none() | st.integers(1, 5))
    def make_a_deterministic_pass(self, size: int | None, num_steps: int | None) -> None:
        for buffer in self.all_open:
            visited = []
            for items, info in buffer.as_numpy_iterator(size, num_steps, True) if self.first_id < self.next_id else ():
                lanes = lanes_of(items)
                assert_rows(items, info.ids, lanes)
                assert info.ids.ndim == (size is not None) + (num_steps is not None)
                if num_steps is not None:
                    assert (lanes == lanes[..., :1]).all()
                visited += zip(np.ravel(info.ids).tolist(), np.ravel(lanes).tolist(), strict=True)
            assert sorted(visited) == list(itertools.product(range(self.first_id, self.next_id), range(self.lanes)))

    @invariant()
    def every_window_is_the_models(self) -> None:
        if not hasattr(self, "buffer"):
            return
        for buffer in self.all_open:
            assert (buffer.first_id, buffer.next_id) == (self.first_id, self.next_id)
            assert buffer.num_frames() == (self.next_id - self.first_id) * self.lanes
            assert_equal(buffer.gather_all(), span(self.first_id, self.next_id, self.lanes))

    @precondition(lambda self: self.keep_history)
    @rule()
    def read_the_history(self) -> None:
        with diskbuf.open(self.path, history=True, read_options=self.reading) as buffer:
            assert_equal(buffer.gather_all(), span(0, self.next_id, self.lanes))

    @precondition(lambda self: self.layout)
    @rule()
    def seal_what_is_full(self) -> None:
        """As the background thread does, whenever it comes to it."""
        self.buffer._writer.tend(is_sync_due=False)

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            for buffer in self.all_open:
                buffer.close()
        self.folder.cleanup()


class ShardsMachine(BufferMachine):
    layout: ClassVar[dict[str, Any]] = {"codec": "zstd"}


class ArrowMachine(BufferMachine):
    layout: ClassVar[dict[str, Any]] = {"layout": "arrow"}


class SmallCacheMachine(BufferMachine):
    layout: ClassVar[dict[str, Any]] = {"layout": "arrow", "codec": "lz4"}
    reading = diskbuf.ReadOptions(cache_dir=":memory:", cache_bytes=1, prefetch_chunks=0)


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(max_examples=60, stateful_step_count=30)
TestShards = ShardsMachine.TestCase
TestArrow = ArrowMachine.TestCase
TestSmallCache = SmallCacheMachine.TestCase
TestShards.settings = TestArrow.settings = TestSmallCache.settings = settings(max_examples=20, stateful_step_count=25)
