"""Power cuts at random moments of random work: what the disk may hold then opens, and every flushed step is there."""

import contextlib
import dataclasses
import errno
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_writer import IS_LONG, KINDS, Shape, assert_equal_steps
from power_cut import Disk

import diskbuf
from diskbuf.store import journal, writing

LONGER = 10 if IS_LONG else 1
CUTS = 8  # of each seed
FSYNCS = ("interval", "always", "never")
CALLS = [*4 * ["add"], *2 * ["extend"], "flush", "tend", "sync", "clear", "reopen", "longer", "trim", "fail"]
# A cut is checked in the middle of a call, maybe of one that has locked the cache folder.
IN_MEMORY = diskbuf.ReadOptions(cache_dir=":memory:")
RUN_STRIDE = 1_000_003  # rows of different runs differ in every column, even where they have the same id


class NoKeeper:
    """Stands where the background thread does; the test calls `tend` itself."""

    def __init__(self, *_: object, sync_seconds: float | None) -> None:
        pass

    def wake(self) -> None:
        pass

    def stop(self) -> None:
        pass


class Gone(BaseException):
    """Ends the writer in the middle of a call."""


@dataclasses.dataclass
class Truth:
    """What was written, and what must be there after a power cut.

    Attributes:
        codes: What each id's rows say, as far as ids are there or may be.
        refused: What the rows of ids say whose append failed, until another append makes good for it.
        acknowledged: Ids below it must be there while the machine runs.
        flushed: Ids below it are on the disk, unless evicted or cleared.
        floor: The window on the disk begins no earlier.
        cleared: The window may begin here, if a `clear` took place.
        lengths: Longest windows, of before and after a change of it.
        is_created: Whether the store is known to be on the disk.
    """

    codes: list[int] = dataclasses.field(default_factory=list)
    refused: dict[int, set[int]] = dataclasses.field(default_factory=dict)
    acknowledged: int = 0
    flushed: int = 0
    floor: int = 0
    cleared: int = 0
    lengths: tuple[int | None, ...] = ()
    is_created: bool = False

    @property
    def lowest(self) -> int:
        """The window may begin here, but no later, with all that was evicted or is being."""
        return max(self.cleared, *(0 if n is None else len(self.codes) - n for n in self.lengths))

    def assert_rows(self, shape: Shape, steps: Any, first_id: int, next_id: int) -> list[int]:
        """Fails unless each step is one that was written under its id, whole; returns what they say."""
        codes = np.asarray(steps["id"])[0].tolist()
        assert len(codes) == next_id - first_id
        for number, code in enumerate(codes, first_id):
            allowed = self.refused.get(number, set()) | {*self.codes[number : number + 1]}
            assert code in allowed, f"id {number} must hold one of {allowed}, holds {code}"
        assert_equal_steps(steps, shape.steps(np.asarray(codes, np.int64), np.arange(shape.lanes)[:, None]))
        return codes


class World:
    """A writer at random work, on a disk whose power is cut from time to time.

    Args:
        folder: Where to work.
        seed: Decides everything.
        calls: What the writer does, at random.
        cut_chance: Of a cut at each sync and each change of a name; ten times that between a failure or a kill and
            the next append that succeeds, a fifth while a store is opened, which has many such moments.
        kill_chance: Of the writer's end there.
        changes: What the store is like; the seed decides the rest.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        calls: list[str] = CALLS,
        cut_chance: float = 0.015,
        kill_chance: float = 0.002,
        **changes: Any,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.folder = folder
        self._calls, self._cut_chance, self._kill_chance = calls, cut_chance, kill_chance
        frame_bytes = int(self.rng.choice([9, 700, 5000]))
        shape = Shape(
            kind=str(self.rng.choice(KINDS)),
            lanes=int(self.rng.integers(1, 3)),
            max_length=int(self.rng.integers(1, 40)),
            frame_bytes=frame_bytes,
            chunk_bytes=int(self.rng.choice([64, 512, 4096] if frame_bytes == 9 else [512, 16384, 40000])),
            fsync=str(self.rng.choice(FSYNCS)),
            fsync_seconds=3600.0,
        )
        self.shape = dataclasses.replace(shape, **changes)
        self.truth = Truth(lengths=(self.shape.length,))
        self.cuts = 0
        self.is_delicate = False
        self.run = 0
        self.number = 0
        self.buffer: diskbuf.UniformReplayBuffer | None = None
        self.successor: Path | None = None
        self.root = self._new_folder()
        self.root.mkdir()
        self._plug_in()

    def _new_folder(self) -> Path:
        self.number += 1
        return self.folder / f"disk-{self.number}"

    def _plug_in(self) -> None:
        """Starts the machine on what is in the root folder."""
        self.undo = pytest.MonkeyPatch()
        self.disk = Disk(self.root, self.rng, self._at_moment)
        self.disk.install(self.undo)
        self.store = self.root / "store"

    def close(self) -> None:
        self._let_go()
        self.disk.close()
        self.undo.undo()

    # ---- what the writer does

    def work(self, cuts: int) -> None:
        while self.cuts < cuts:
            try:
                if self.buffer is None:
                    self._open()
                else:
                    getattr(self, f"_{self.rng.choice(self._calls)}")()
                self.disk.moment("between two calls")
            except Gone:
                self._be_gone()

    def _open(self, length: int | None = None) -> None:
        truth = self.truth
        if length is not None:
            self.shape = dataclasses.replace(self.shape, max_length=length)
            truth.lengths = (*truth.lengths, self.shape.length)
        try:
            self.buffer = self._open_buffer(self.store, self.shape, trim=True)
        except OSError as error:
            _assert_made_to_fail(error)
            return
        first_id, next_id = self.buffer.first_id, self.buffer.next_id
        assert truth.acknowledged <= next_id <= len(truth.codes)
        assert first_id <= truth.lowest
        truth.lengths = (self.shape.length,)
        truth.codes = truth.codes[:next_id]
        truth.codes[first_id:] = truth.assert_rows(self.shape, self.buffer.gather_all(), first_id, next_id)
        truth.refused = {}
        truth.acknowledged = next_id
        truth.cleared = first_id
        truth.is_created = True
        self.run += 1

    def _new_codes(self, count: int) -> Any:
        next_id = self.truth.acknowledged
        assert len(self.truth.codes) == next_id
        self.run += 1
        return np.arange(next_id, next_id + count) + self.run * RUN_STRIDE

    def _append(self, count: int, append: Any) -> None:
        truth = self.truth
        self.truth.codes += self._codes.tolist()
        try:
            append()
        except OSError as error:
            _assert_made_to_fail(error)
            next_id = self.buffer.next_id
            assert next_id == truth.acknowledged or count > 1
            for number in range(next_id, truth.acknowledged + count):
                truth.refused.setdefault(number, set()).add(truth.codes[number])
            truth.codes = truth.codes[:next_id]
            truth.acknowledged = next_id
            self.is_delicate = True
            return
        truth.refused = {}
        self.is_delicate = False
        truth.acknowledged += count
        if self.shape.fsync == "always":
            self._is_flushed()

    def _add(self) -> None:
        for _ in range(int(self.rng.integers(1, 12))):
            self._codes = self._new_codes(1)
            step = self.shape.steps(self._codes[0], np.arange(self.shape.lanes))
            self._append(1, lambda step=step: self.buffer.add_batch(step))

    def _extend(self) -> None:
        count = int(self.rng.integers(1, 60))
        self._codes = self._new_codes(count)
        steps = self.shape.steps(self._codes, np.arange(self.shape.lanes)[:, None])
        self._append(count, lambda: self.buffer.extend(steps))

    def _clear(self) -> None:
        self.truth.cleared = self.truth.acknowledged
        with self._failing():
            self.buffer.clear()

    def _flush(self) -> None:
        with self._failing():
            self.buffer.flush()
            self._is_flushed()

    def _sync(self) -> None:
        store = self.buffer._store
        store.tend(is_sync_due=True)
        if store._failure is None:
            self._is_flushed()

    def _tend(self) -> None:
        self.buffer._store.tend(is_sync_due=False)

    def _reopen(self) -> None:
        buffer, self.buffer = self.buffer, None
        first_id = buffer.first_id
        with self._failing():
            buffer.close()
            self._is_flushed(first_id)

    def _longer(self) -> None:
        self._reopen()
        self._open(self.shape.max_length + int(self.rng.integers(1, 20)))

    def _trim(self) -> None:
        self._reopen()
        self._open(max(1, self.shape.max_length - int(self.rng.integers(1, 20))))

    def _fail(self) -> None:
        self.disk.fail_a_sync(int(self.rng.integers(1, 25)))

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _assert_made_to_fail(error)

    def _is_flushed(self, first_id: int | None = None) -> None:
        self.truth.flushed = self.truth.acknowledged
        self.truth.refused = {}
        self.truth.floor = self.buffer.first_id if first_id is None else first_id

    # ---- what comes between

    def _at_moment(self, what: str) -> None:
        chance = self._cut_chance * (0.2 if self.buffer is None else 10 if self.is_delicate else 1)
        if self.rng.random() < (0.2 if what.startswith("between") else chance):
            self.cuts += 1
            left = self._new_folder()
            self.disk.cut(left)
            copy = self._new_folder()
            shutil.copytree(left, copy)
            try:
                self._check(copy)
            except Exception as error:
                error.add_note(f"the power was cut {what}; {self.truth}; {self.shape}")
                raise
            shutil.rmtree(copy)
            if self.rng.random() < 0.3:
                self.successor = left
                raise Gone
            shutil.rmtree(left)
        if self.rng.random() < self._kill_chance:
            raise Gone

    def _be_gone(self) -> None:
        """The process, or the machine, has ended; in the second case another one starts."""
        self._let_go()
        self.is_delicate = self.successor is None
        if self.successor is None:
            return
        self.disk.close()
        self.undo.undo()
        shutil.rmtree(self.root)
        self.root, self.successor = self.successor, None
        self._plug_in()
        truth = self.truth
        truth.acknowledged = truth.flushed

    def _let_go(self) -> None:
        buffer, self.buffer = self.buffer, None
        if buffer is not None and buffer._store is not None:
            buffer._store._let_go()

    def _open_buffer(self, path: Path, shape: Shape, **changes: Any) -> diskbuf.UniformReplayBuffer:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* are certain to be whole", category=RuntimeWarning)
            return shape.open(path, read_options=IN_MEMORY, **changes)

    def _check(self, root: Path) -> None:
        """Fails unless another start of the machine finds what it must."""
        store, truth = root / "store", self.truth
        try:
            window = self._check_reading(store)
        except (diskbuf.StoreNotFoundError, diskbuf.StoreCorruptError):
            if truth.is_created or (store / "zarr.json").exists():
                raise
            with self.shape.open(store, read_options=IN_MEMORY) as buffer:
                assert buffer.num_frames() == 0
            return

        rows = _chunk_rows(store)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* are certain to be whole", category=RuntimeWarning)
            buffer = diskbuf.open(
                store, "r+", options=diskbuf.StoreOptions(fsync_seconds=3600.0), read_options=IN_MEMORY
            )
        with buffer:
            assert (buffer.first_id, buffer.next_id) == window
            first_id, next_id = window
            codes = truth.assert_rows(self.shape, buffer.gather_all(), first_id, next_id)
            codes += [n - 5 * RUN_STRIDE for n in range(next_id, next_id + 2 * rows + 1)]
            steps = self.shape.steps(np.asarray(codes[next_id - first_id :]), np.arange(self.shape.lanes)[:, None])
            buffer.add_batch({name: _first(leaf) for name, leaf in steps.items()})
            assert buffer.next_id == next_id + 1
            buffer.extend({name: _rest(leaf) for name, leaf in steps.items()})
            whole = Truth(codes=[*truth.codes[:first_id].copy(), *codes])
            whole.assert_rows(self.shape, buffer.gather_all(), buffer.first_id, buffer.next_id)
        with diskbuf.open(store, verify=True) as reader:
            whole.assert_rows(self.shape, reader.gather_all(), reader.first_id, reader.next_id)
            assert reader.next_id == next_id + 2 * rows + 1
        report = diskbuf.verify(store)
        assert report.is_clean, report.faults

    def _check_reading(self, store: Path) -> tuple[int, int]:
        truth = self.truth
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* are certain to be whole", category=RuntimeWarning)
            with diskbuf.open(store, verify=bool(self.rng.integers(2))) as reader:
                first_id, next_id = reader.first_id, reader.next_id
                truth.assert_rows(self.shape, reader.gather_all(), first_id, next_id)
            if self.shape.kind == "history":
                with diskbuf.open(store, history=True) as reader:
                    assert reader.first_id == 0
                    truth.assert_rows(self.shape, reader.gather_all(), 0, next_id)
        assert truth.flushed <= next_id <= max([len(truth.codes), *(n + 1 for n in truth.refused)])
        assert truth.floor <= first_id or first_id == next_id
        if truth.lowest < truth.flushed:
            assert first_id <= truth.lowest, "a flushed step is missing"
        faults = [fault for fault in diskbuf.verify(store).faults if "are certain to be whole" not in fault.message]
        assert not faults
        return first_id, next_id


def _assert_made_to_fail(error: OSError) -> None:
    if error.errno != errno.EIO:
        raise error


def _be_interrupted(_: int) -> None:
    raise Gone


def _first(leaf: Any) -> Any:
    return tuple(map(_first, leaf)) if isinstance(leaf, tuple) else leaf[:, 0]


def _rest(leaf: Any) -> Any:
    return tuple(map(_rest, leaf)) if isinstance(leaf, tuple) else leaf[:, 1:]


def _chunk_rows(store: Path) -> int:
    manifest = json.loads((store / "zarr.json").read_bytes())["attributes"]["diskbuf"]
    return min(max(manifest["chunk_rows"].values()), 40)


@pytest.fixture(autouse=True)
def no_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "Keeper", NoKeeper)
    monkeypatch.setattr(writing, "COMMIT_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def short_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "JOURNAL_BYTES", 7 * 4096)
    monkeypatch.setattr(writing, "MOST_FRAME_BYTES", 10_000)


@pytest.mark.parametrize("seed", range(20 * LONGER))
def test_a_power_cut_at_any_moment_leaves_every_flushed_step_whole(tmp_path: Path, seed: int) -> None:
    with contextlib.closing(World(tmp_path, seed)) as world:
        world.work(CUTS)


@pytest.mark.parametrize("layout", ["zstd", "arrow"])
@pytest.mark.parametrize("seed", range(6 * LONGER))
def test_a_power_cut_at_any_moment_leaves_every_flushed_step_of_a_store_that_seals_its_chunks(
    tmp_path: Path, seed: int, layout: str
) -> None:
    with contextlib.closing(World(tmp_path, 1000 + seed, layout=layout)) as world:
        world.work(CUTS)


@pytest.mark.parametrize("seed", range(6 * LONGER))
def test_no_step_of_a_ring_is_mixed_with_the_one_that_overwrites_it(tmp_path: Path, seed: int) -> None:
    shape = {"kind": "ring", "max_length": 7, "frame_bytes": 700, "chunk_bytes": 2800, "fsync": FSYNCS[seed % 3]}
    with contextlib.closing(World(tmp_path, seed, calls=["add", "add", "add", "flush"], **shape)) as world:
        world.work(2 * CUTS)


@pytest.mark.parametrize("seed", range(6 * LONGER))
def test_a_step_that_was_refused_or_never_acknowledged_is_never_mixed_with_its_successor(
    tmp_path: Path, seed: int
) -> None:
    calls = ["add", "fail"]
    with contextlib.closing(World(tmp_path, seed, calls=calls, kill_chance=0.01, fsync="always")) as world:
        world.work(2 * CUTS)


@pytest.mark.parametrize("seed", range(12 * LONGER))
def test_with_fsync_always_a_power_cut_leaves_every_step_of_several_columns_that_fills_few_chunks(
    tmp_path: Path, seed: int
) -> None:
    shape = {"kind": KINDS[seed % 3], "max_length": 40, "frame_bytes": 9, "chunk_bytes": 4096, "fsync": "always"}
    calls = [*8 * ["add"], "extend", "flush", "clear", "tend", "reopen", "fail", "longer"]
    with contextlib.closing(World(tmp_path, seed, calls=calls, **shape)) as world:
        world.work(2 * CUTS)


@pytest.mark.parametrize("seed", range(6 * LONGER))
def test_a_power_cut_while_a_store_is_created_leaves_none_or_an_empty_one(tmp_path: Path, seed: int) -> None:
    with contextlib.closing(World(tmp_path, seed, calls=["reopen"], cut_chance=0.25, kill_chance=0.05)) as world:
        world.work(CUTS)


@pytest.mark.parametrize("synced", ["journal", "live"])
@pytest.mark.parametrize("end", ["refused", "killed", "interrupted"])
def test_what_was_counted_too_early_is_never_seen_half_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, synced: str
) -> None:
    if synced == "live":
        monkeypatch.setattr(writing, "MOST_FRAME_BYTES", 0)
    shape = Shape(kind="unbounded", lanes=1, fsync="always", frame_bytes=5000, chunk_bytes=2**16)
    truth = Truth(codes=[0, 1, 2, 3 + RUN_STRIDE], refused={} if end == "killed" else {3: {3}})
    (tmp_path / "disk").mkdir()
    state = "writing"

    def at_moment(what: str) -> None:
        if state == "ending" and what.startswith("after sync") and what.endswith(f"/{synced}"):
            raise Gone if end == "killed" else OSError(errno.EIO, "made to fail")
        for _ in range(10 if state == "again" else 0):
            disk.cut(tmp_path / "copy")
            with diskbuf.open(tmp_path / "copy" / "store") as reader:
                assert reader.next_id in {3, 4}
                truth.assert_rows(shape, reader.gather_all(), 0, reader.next_id)
            shutil.rmtree(tmp_path / "copy")

    disk = Disk(tmp_path / "disk", np.random.default_rng(0), at_moment)
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        buffer = shape.open(tmp_path / "disk" / "store")
        for number in range(3):
            buffer.add_batch(shape.step(number))
        state = "writing" if end == "interrupted" else "ending"
        with pytest.MonkeyPatch.context() as broken:
            if end == "interrupted":
                broken.setattr(buffer._store, "_set_next", _be_interrupted)
            with pytest.raises((OSError, Gone)):
                buffer.add_batch(shape.step(3))
        if end == "killed":
            buffer._store._let_go()
            state = "writing"
            buffer = shape.open(tmp_path / "disk" / "store")
        assert buffer.next_id == 3
        state = "again"
        buffer.add_batch(shape.step(3 + RUN_STRIDE))
        state = "writing"
        buffer.close()
    disk.close()


def test_history_that_a_killed_writer_left_unsynced_is_not_read(tmp_path: Path) -> None:
    shape = Shape(kind="history", lanes=1, max_length=3, chunk_bytes=64, fsync="never")
    (tmp_path / "disk").mkdir()
    is_cutting = False

    def at_moment(what: str) -> None:
        for _ in range(3 if is_cutting else 0):
            disk.cut(tmp_path / "copy")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".* are certain to be whole", category=RuntimeWarning)
                with diskbuf.open(tmp_path / "copy" / "store", history=True) as reader:
                    Truth(codes=[*range(20)]).assert_rows(shape, reader.gather_all(), 0, reader.next_id)
            shutil.rmtree(tmp_path / "copy")

    disk = Disk(tmp_path / "disk", np.random.default_rng(0), at_moment)
    with pytest.MonkeyPatch.context() as patch:
        disk.install(patch)
        buffer = shape.open(tmp_path / "disk" / "store")
        buffer.extend(shape.sequence(0, 20))
        buffer._store._let_go()
        is_cutting = True
        shape.open(tmp_path / "disk" / "store").close()
        is_cutting = False
    disk.close()
