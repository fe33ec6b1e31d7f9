"""The executors behind one plan: which rows they read is the same, whoever reads them and wherever they begin."""

import gc
import itertools
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coded_rows import SPEC, assert_equal, assert_rows, lanes_of, span, step

import diskbuf
from diskbuf import ArraySpec, BufferInfo, StoreOptions, UniformReplayBuffer
from diskbuf.readers import in_graph, tf_data
from diskbuf.readers.elements import Elements
from diskbuf.readers.requests import share_of

tf = pytest.importorskip("tensorflow")

NEVER = StoreOptions(fsync="never")
ODD = StoreOptions(fsync="never", chunk_bytes=64)
"""Chunks that are no whole pages, which TensorFlow can't be handed."""


def filled(added: int, lanes: int = 2, max_length: int | None = 5, **arguments: Any) -> UniformReplayBuffer:
    buffer = UniformReplayBuffer(SPEC, lanes, max_length, **{"options": NEVER, **arguments})
    for step_id in range(added):
        buffer.add_batch(step(step_id, lanes))
    return buffer


def read_by(
    executor: str,
    buffer: UniformReplayBuffer,
    size: int | None,
    num_steps: int | None,
    *,
    seed: int,
    start: int = 0,
    shard: Any = None,
    read_ahead: int = 1,
    num_parallel_calls: int | None = None,
    within_episodes: bool | str = False,
) -> Iterator[Any]:
    """The elements as nests of arrays, gathered by one executor."""
    if executor == "numpy":
        yield from buffer.as_numpy_iterator(
            size, num_steps, seed=seed, start=start, shard=shard, within_episodes=within_episodes
        )
        return
    elements = Elements(data_spec=buffer.data_spec, batch_size=size, num_steps=num_steps, info=BufferInfo)
    sampler = buffer._random_reader(num_steps, share_of(start, shard), seed=seed, within_episodes=within_episodes)
    assert executor != "graph" or in_graph.view_of(sampler) is not None
    dataset = tf_data.random_dataset(
        elements,
        sampler,
        read_ahead=read_ahead,
        num_parallel_calls=num_parallel_calls,
        sequence_preprocess_fn=None,
        executor=executor,  # type: ignore[arg-type]  # a str of the parametrization
    )
    for element in dataset:
        yield tf.nest.map_structure(lambda tensor: tensor.numpy(), element)


def taken(elements: Iterator[Any], number: int) -> list[Any]:
    return list(itertools.islice(elements, number))


def assert_same_elements(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right)
    for (items, info), (other_items, other_info) in zip(left, right, strict=True):
        assert_equal(items, other_items)
        assert_equal(info, other_info)


# ---- one plan


@pytest.fixture(params=["part", "full", "wrapped", "several runs", "unbounded", "history", "cleared"])
def kind_of_store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "a"
    if request.param == "several runs":
        filled(7, 3, 20, path=path).close()
        for first_id, next_id in ((7, 8), (8, 13), (13, 23)):
            with UniformReplayBuffer(SPEC, 3, 20, path=path, options=NEVER) as buffer:
                buffer.extend(span(first_id, next_id, 3))
        return path
    max_length = {"unbounded": None}.get(request.param, 20)
    added = {"part": 9, "full": 20, "wrapped": 3000}.get(request.param, 33)
    with UniformReplayBuffer(
        SPEC, 3, max_length, path=path, options=NEVER, keep_history=request.param == "history"
    ) as buffer:
        if request.param == "cleared":
            buffer.extend(span(0, 100, 3))
            buffer.clear()
            buffer.extend(span(100, 109, 3))
        else:
            buffer.extend(span(0, added, 3))
    return path


@pytest.mark.parametrize(
    ("size", "num_steps", "mode"), [(None, None, "r"), (5, 4, "r"), (5, 1, "r+"), (None, 4, "all")]
)
def test_all_executors_read_the_same_elements(
    kind_of_store: Path, size: int | None, num_steps: int | None, mode: Any
) -> None:
    with diskbuf.open(kind_of_store, "r+" if mode == "r+" else "r", history=mode == "all", options=NEVER) as buffer:
        expected = taken(read_by("numpy", buffer, size, num_steps, seed=3), 30)
        for items, info in expected:
            lanes = lanes_of(items)
            assert_rows(items, info.ids, lanes)
            assert ((info.ids >= buffer.first_id) & (info.ids < buffer.next_id)).all()
            if num_steps is not None:
                assert (lanes == lanes[..., :1]).all()
        for executor, read_ahead in (("graph", 1), ("graph", 7), ("host", 7)):
            found = read_by(executor, buffer, size, num_steps, seed=3, read_ahead=read_ahead)
            assert_same_elements(taken(found, 30), expected)


def test_a_sample_that_is_read_in_halves_draws_each_sequence_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a writer does that is too fast for any batch: none of more than one sequence is ever whole."""
    with filled(0, 1, 10**6) as buffer:
        buffer.extend(span(0, 10**5, 1))
        sampler = buffer._random_reader(None, share_of(0, (3, 16)), seed=1, within_episodes=False)
        gather = type(buffer._opened()).gather
        monkeypatch.setattr(
            type(buffer._opened()),
            "gather",
            lambda store, first_id, rows: gather(store, first_id, rows) if len(rows) == 1 else None,
        )
        for count in (3, 7, 64, 127):
            ids = sampler.sample(5, count=count, num_steps=None).ids
            assert len(set(ids.tolist())) > 0.95 * count
        sampler.planner.draws(5 | 1 << (40 + 21), 1, count=1)  # as a batch of two million would


@pytest.mark.parametrize("executor", ["graph", "host", "numpy"])
def test_a_read_goes_on_from_any_element_and_shards_share_the_elements(executor: str) -> None:
    with filled(8) as buffer:
        alone = taken(read_by("numpy", buffer, 4, 2, seed=9), 700)
        for start in (0, 1, 5, 300):
            assert_same_elements(taken(read_by(executor, buffer, 4, 2, seed=9, start=start), 300), alone[start:][:300])
        for index in range(3):
            found = taken(read_by(executor, buffer, 4, 2, seed=9, start=2, shard=(index, 3)), 20)
            assert_same_elements(found, alone[6 + index :: 3][:20])


def test_parallel_calls_keep_the_order() -> None:
    with filled(8) as buffer:
        alone = taken(read_by("numpy", buffer, 4, 2, seed=9), 600)
        for executor in ("graph", "host"):
            found = taken(read_by(executor, buffer, 4, 2, seed=9, num_parallel_calls=2), 600)
            assert_same_elements(found, alone)


def test_an_input_context_is_a_shard() -> None:
    context = tf.distribute.InputContext(num_input_pipelines=3, input_pipeline_id=1, num_replicas_in_sync=3)
    with filled(8) as buffer:
        by_context = [info.ids.numpy().tolist() for _, info in buffer.as_dataset(4, seed=1, shard=context).take(5)]
        by_pair = [info.ids.numpy().tolist() for _, info in buffer.as_dataset(4, seed=1, shard=(1, 3)).take(5)]
    assert by_context == by_pair


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_of_a_pass_share_its_elements(shards: int) -> None:
    with filled(11, 3, 8) as buffer:
        arguments: dict[str, Any] = {"sample_batch_size": 2, "num_steps": 3, "single_deterministic_pass": True}
        alone = list(buffer.as_numpy_iterator(**arguments))
        assert len(alone) == 6
        for index, start in itertools.product(range(shards), (0, 1)):
            expected = alone[start * shards + index :: shards]
            share: dict[str, Any] = {"shard": (index, shards), "start": start}
            assert_same_elements(list(buffer.as_numpy_iterator(**arguments, **share)), expected)
            found = [
                tf.nest.map_structure(lambda tensor: tensor.numpy(), element)
                for element in buffer.as_dataset(**arguments, **share)
            ]
            assert_same_elements(found, expected)


def test_a_long_pass_reads_every_step_once_whatever_the_block() -> None:
    """More elements than are read at a time, and a row count that nothing divides."""
    with filled(0, 3, 300) as buffer:
        buffer.extend(span(0, 1011, 3))
        for size, num_steps in ((None, None), (2, None), (2, 7), (3, 250)):
            pairs = []
            for items, info in buffer.as_dataset(size, num_steps, single_deterministic_pass=True):
                lanes = lanes_of({"number": items["number"].numpy()})
                pairs += zip(np.ravel(info.ids.numpy()).tolist(), np.ravel(lanes).tolist(), strict=True)
            assert len(pairs) == 900
            assert set(pairs) == set(itertools.product(range(711, 1011), range(3)))


def test_an_interrupted_read_goes_on_in_another_process(tmp_path: Path) -> None:
    """pytorch/rl#4089: five batches with read-ahead, the rest in a new process, as in an unbroken read."""
    path = tmp_path / "a"
    filled(8, path=path).close()
    with diskbuf.open(path) as buffer:
        unbroken = [info.ids.numpy().tolist() for _, info in buffer.as_dataset(4, 2, seed=6, read_ahead=3).take(10)]
    code = (
        "import sys, diskbuf\n"
        "with diskbuf.open(sys.argv[1]) as buffer:\n"
        "    dataset = buffer.as_dataset(4, 2, seed=6, start=5, read_ahead=3).take(5)\n"
        "    print([info.ids.numpy().tolist() for _, info in dataset])\n"
    )
    run = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(unbroken[5:])


@pytest.mark.parametrize("options", [NEVER, ODD], ids=["graph", "host"])
@pytest.mark.parametrize("is_pass", [False, True])
@pytest.mark.parametrize("read_ahead", [1, 3])
def test_a_checkpointed_iterator_goes_on_where_it_was(
    options: StoreOptions, is_pass: bool, read_ahead: int, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    filled(8, 2, 50, path=path, options=options).close()

    def iterator(buffer: UniformReplayBuffer) -> Any:
        return iter(buffer.as_dataset(1, 2, seed=4, single_deterministic_pass=is_pass, read_ahead=read_ahead))

    with diskbuf.open(path) as buffer:
        unbroken = [info.ids.numpy().tolist() for _, info in itertools.islice(iterator(buffer), 8)]
        begun = iterator(buffer)
        for _ in range(3):
            next(begun)
        saved = tf.train.Checkpoint(iterator=begun).save(str(tmp_path / "checkpoint"))
        after = [info.ids.numpy().tolist() for _, info in itertools.islice(begun, 5)]
    assert after == unbroken[3:]
    with diskbuf.open(path) as buffer:
        restored = iterator(buffer)
        tf.train.Checkpoint(iterator=restored).restore(saved)
        assert [info.ids.numpy().tolist() for _, info in itertools.islice(restored, 5)] == unbroken[3:]


@pytest.mark.parametrize("is_pass", [False, True])
def test_an_iterator_that_has_failed_does_not_seem_to_have_ended(is_pass: bool) -> None:
    with filled(0) as buffer:
        iterator = buffer.as_numpy_iterator(2, single_deterministic_pass=is_pass)
        for _ in range(2):
            with pytest.raises(diskbuf.EmptyBufferError):
                next(iterator)
        buffer.extend(span(0, 3, 2))
        assert next(iterator)[1].ids.shape == (2,)


# ---- beside a writer


@pytest.mark.parametrize("num_parallel_calls", [None, 2])
@pytest.mark.parametrize("max_length", [20, 3000, None])
def test_elements_beside_a_fast_writer_are_whole_and_of_their_window(
    max_length: int | None, num_parallel_calls: int | None
) -> None:
    """Rows are overwritten while TensorFlow gathers them, without Python's lock between the two."""
    lanes, extended = 4, 64
    with filled(0, lanes, max_length) as buffer:
        buffer.extend(span(0, 30, lanes))
        is_done = threading.Event()

        def write() -> None:
            first_id = 30
            while not is_done.is_set() and first_id < 500_000:
                buffer.extend(span(first_id, first_id + extended, lanes))
                first_id += extended

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for items, info in buffer.as_dataset(32, 3, num_parallel_calls).take(400):
                before = buffer.next_id
                ids = info.ids.numpy()
                nest = tf.nest.map_structure(lambda tensor: tensor.numpy(), items)
                assert_rows(nest, ids, lanes_of(nest)[:, :1])
                assert (ids < before).all()
        finally:
            is_done.set()
            writer.join()


FRAMES = {"frame": ArraySpec([16384], "uint8"), "id": ArraySpec([], "int64")}


def frames_of(first_id: int, next_id: int) -> Any:
    """Rows so large that their ring is small, and that gathering them takes milliseconds."""
    ids = np.arange(first_id, next_id)
    return {"frame": np.repeat((ids % 251 + 1).astype("uint8")[None, :, None], 16384, 2), "id": ids[None]}


@pytest.mark.parametrize("max_length", [32, None])
def test_frames_that_are_overwritten_or_cleared_under_a_gather_are_never_handed_out(max_length: int | None) -> None:
    """In bursts, so that most gathers are TensorFlow's: without its second look a tenth of the elements are mixed."""
    options = StoreOptions(fsync="never", chunk_bytes=2**19)
    with UniformReplayBuffer(FRAMES, 1, max_length, options=options) as buffer:
        buffer.extend(frames_of(0, 32))
        is_done = threading.Event()

        def write() -> None:
            first_id = 32
            while not is_done.wait(0.003):
                for _ in range(4):
                    buffer.extend(frames_of(first_id, first_id + 32))
                    first_id += 32
                if max_length is None:
                    buffer.clear()
                    buffer.extend(frames_of(first_id, first_id + 32))
                    first_id += 32

        assert in_graph.view_of(buffer._random_reader(1, share_of(0, None), seed=None, within_episodes=False))
        writer = threading.Thread(target=write)
        writer.start()
        try:
            read = 0
            iterator = iter(buffer.as_dataset(128, 2))
            while read < 300:
                try:
                    items, info = next(iterator)
                except tf.errors.InvalidArgumentError:  # just cleared
                    continue
                read += 1
                ids, frames = info.ids.numpy(), items["frame"].numpy()
                np.testing.assert_array_equal(items["id"].numpy(), ids)
                np.testing.assert_array_equal(frames.min(-1), ids % 251 + 1)
                np.testing.assert_array_equal(frames.max(-1), ids % 251 + 1)
        finally:
            is_done.set()
            writer.join()


def test_an_element_is_drawn_from_the_window_of_its_moment() -> None:
    with filled(3, 2, 2000) as buffer:
        iterator = iter(buffer.as_dataset(50, 2))
        assert int(tf.reduce_max(next(iterator)[1].ids)) == 2
        for next_id in range(4, 300):
            buffer.add_batch(step(next_id - 1, 2))
            ids = next(iterator)[1].ids
            assert int(tf.reduce_max(ids)) < next_id
        assert int(tf.reduce_max(ids)) > 250
        buffer.clear()
        buffer.extend(span(299, 310, 2))
        assert int(tf.reduce_min(next(iterator)[1].ids)) >= 299
        buffer.clear()
        with pytest.raises(tf.errors.InvalidArgumentError, match="but is empty"):
            next(iterator)


def test_a_dataset_outlives_the_writer_it_was_made_beside(tmp_path: Path) -> None:
    """Another writer begins: the mappings that TensorFlow was handed are no longer the store's."""
    path = tmp_path / "a"
    with filled(8, 2, 20, path=path), diskbuf.open(path) as reader:
        iterator = iter(reader.as_dataset(50, 2, seed=1, read_ahead=1))
        next(iterator)
    with diskbuf.open(path) as reader:
        iterator = iter(reader.as_dataset(50, 2, seed=1, read_ahead=1))
        next(iterator)
        with UniformReplayBuffer(SPEC, 2, 20, path=path, options=NEVER) as buffer:
            buffer.extend(span(8, 40, 2))
            for items, info in itertools.islice(iterator, 300):  # noqa: B007 - the last ones are looked at
                assert int(tf.reduce_min(info.ids)) >= 20
            nest = tf.nest.map_structure(lambda tensor: tensor.numpy(), items)
            assert_rows(nest, info.ids.numpy(), lanes_of(nest)[:, :1])


@pytest.mark.parametrize("executor", ["graph", "host", "numpy"])
def test_a_copied_store_is_read_right_when_a_writer_begins_in_it(tmp_path: Path, executor: str) -> None:
    """What the live words of a copy say doesn't count, as after another start of the machine, until somebody writes."""
    spec = {"id": ArraySpec([], "int64")}
    small = StoreOptions(chunk_bytes=4096, fsync="never")
    with UniformReplayBuffer(spec, 1, 2048, path=tmp_path / "a", options=small) as buffer:
        buffer.extend({"id": np.arange(2048)[None]})
    path = Path(shutil.copytree(tmp_path / "a", tmp_path / "b"))
    with diskbuf.open(path) as reader:
        found = read_by(executor, reader, 64, None, seed=1)
        next(found)  # of a block of more than a hundred
        with UniformReplayBuffer(spec, 1, 2048, path=path, options=small) as buffer:
            buffer.extend({"id": np.arange(2048, 8192)[None]})
            for items, info in taken(found, 600):
                np.testing.assert_array_equal(items["id"], info.ids)


def test_rows_that_a_new_writer_overwrites_in_the_middle_of_a_read_are_not_handed_out(tmp_path: Path) -> None:
    spec = {"id": ArraySpec([], "int64")}
    small = StoreOptions(chunk_bytes=4096, fsync="never")
    with UniformReplayBuffer(spec, 1, 2048, path=tmp_path / "a", options=small) as buffer:
        buffer.extend({"id": np.arange(2048)[None]})
    path = Path(shutil.copytree(tmp_path / "a", tmp_path / "b"))
    with diskbuf.open(path) as reader:
        store = reader._opened()
        first_id, next_id = store.window()
        with UniformReplayBuffer(spec, 1, 2048, path=path, options=small) as buffer:
            buffer.extend({"id": np.arange(2048, 8192)[None]})
            assert store.gather(first_id, np.arange(next_id - first_id)) is None
            assert store.read_range(first_id, next_id) is None
            assert reader.gather_all()["id"].tolist() == [[*range(8192 - 2048, 8192)]]


@pytest.mark.parametrize("executor", ["graph", "host", "numpy"])
def test_sequences_of_history_join_no_two_runs(tmp_path: Path, executor: str) -> None:
    """Runs count though they began before the window: what is read begins long before it."""
    for _ in range(4):
        with UniformReplayBuffer(SPEC, 1, 2, keep_history=True, path=tmp_path / "a", options=NEVER) as buffer:
            buffer.extend(span(buffer.next_id, buffer.next_id + 3, 1))
    with diskbuf.open(tmp_path / "a", history=True) as reader:
        found = taken(read_by(executor, reader, 50, 2, seed=1), 4)
        assert {row[0] for _, info in found for row in info.ids.tolist()} == {0, 1, 3, 4, 6, 7, 9, 10}
        np.testing.assert_allclose(found[0][1].probabilities, 1 / 8)


@pytest.mark.parametrize("kind", ["random", "host", "pass", "preprocessed"])
def test_a_forgotten_dataset_lets_go_of_its_buffer(tmp_path: Path, kind: str) -> None:
    """TensorFlow keeps every function of a tf.numpy_function for as long as the process."""
    filled(8, path=tmp_path / "a").close()
    for _ in range(2):  # the lock is free again
        buffer = UniformReplayBuffer(SPEC, 2, 5, path=tmp_path / "a", options=ODD if kind == "host" else NEVER)
        function = (lambda items: items) if kind == "preprocessed" else None
        dataset = buffer.as_dataset(2, None, None, function, kind == "pass").prefetch(2)
        iterator = iter(dataset)
        del buffer, dataset
        assert next(iterator)[1].ids.shape == (2,)
        del iterator
        gc.collect()


@pytest.mark.parametrize("read_ahead", [1, 4])
def test_leaves_without_elements_are_read_in_every_way(read_ahead: int) -> None:
    """Dataset.unbatch of a tensor without elements kills the process."""
    with UniformReplayBuffer({"none": ArraySpec([2, 0], "float32"), "id": ArraySpec([], "int64")}, 2, 5) as buffer:
        buffer.extend({"none": np.zeros((2, 5, 2, 0), "float32"), "id": np.tile(np.arange(5), (2, 1))})
        for dataset in (
            buffer.as_dataset(3, 2, read_ahead=read_ahead),
            buffer.as_dataset(3, 2, None, lambda items: items, read_ahead=read_ahead),
            buffer.as_dataset(2, 2, single_deterministic_pass=True),
            buffer.as_dataset(3, 2, within_episodes=False, num_parallel_calls=2, read_ahead=read_ahead),
        ):
            for items, info in dataset.take(3):
                assert items["none"].shape == (*info.ids.shape, 2, 0)
                np.testing.assert_array_equal(items["id"], info.ids)


def test_sequences_of_history_may_be_longer_than_the_window(tmp_path: Path) -> None:
    filled(30, 1, 5, keep_history=True, path=tmp_path / "a").close()
    with diskbuf.open(tmp_path / "a", history=True, dataset_drop_remainder=True) as reader:
        for _, info in [next(iter(reader.as_dataset(2, 30))), next(reader.as_numpy_iterator(2, 30))]:
            assert np.array(info.ids).tolist() == [[*range(30)]] * 2
        assert [info.ids.tolist() for _, info in reader.as_numpy_iterator(1, 20, True)] == [[[*range(20)]]]
        with pytest.raises(diskbuf.WindowError, match="num_steps must be at most 30, got 31"):
            reader.as_dataset(2, 31)


@pytest.mark.parametrize("damage", ["x/c.1.0", ".diskbuf/live"])
def test_a_reader_that_cannot_follow_a_writer_says_so_when_one_begins(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a"
    spec = {"x": ArraySpec([], "int64")}
    small = StoreOptions(chunk_bytes=4096, fsync="never")
    with UniformReplayBuffer(spec, 1, 2048, path=path, options=small) as buffer:
        buffer.extend({"x": np.arange(2048)[None]})
    (path / damage).unlink()
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        reader = diskbuf.open(path, skip_damaged=damage.startswith("x"))
    with reader:
        found = iter(reader.as_dataset(8))
        samples = reader.as_numpy_iterator(8)
        for items, info in [next(found), *taken(samples, 3)]:
            np.testing.assert_array_equal(items["x"], info.ids)
        diskbuf.repair(path)
        with UniformReplayBuffer(spec, 1, 2048, path=path, options=small) as buffer:
            buffer.extend({"x": np.arange(8192)[None]})
            for refused in (reader.gather_all, reader.num_frames, lambda: next(samples)):
                with pytest.raises(diskbuf.WindowError, match=r"but a writer has begun\. Open it again"):
                    refused()
            with pytest.raises(tf.errors.InvalidArgumentError, match="but a writer has begun"):
                taken(found, 100)  # TensorFlow may have read a few ahead


def test_a_dataset_reads_on_when_the_ring_is_laid_out_anew_under_it(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with UniformReplayBuffer(FRAMES, 1, 32, path=path, options=NEVER) as buffer:
        buffer.extend(frames_of(0, 40))
    with diskbuf.open(path) as reader:
        iterator = iter(reader.as_dataset(2, 2, seed=1, read_ahead=1))
        next(iterator)  # of a block of more than a hundred
        with UniformReplayBuffer(FRAMES, 1, 300, path=path, options=NEVER) as buffer:
            buffer.extend(frames_of(40, 340))
            for items, info in itertools.islice(iterator, 200):
                ids = info.ids.numpy()
                np.testing.assert_array_equal(items["id"].numpy(), ids)
                np.testing.assert_array_equal(items["frame"].numpy().max(-1), ids % 251 + 1)


def test_what_numpy_reads_in_the_place_of_tensorflow_is_of_the_same_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with UniformReplayBuffer(FRAMES, 1, 32, path=path, options=NEVER) as buffer:
        buffer.extend(frames_of(0, 40))
    with diskbuf.open(path) as reader:
        iterator = iter(reader.as_dataset(2, 2, seed=1, read_ahead=1))
        first = next(iterator)[1].ids.numpy().tolist()
        with UniformReplayBuffer(FRAMES, 1, 300, path=path, options=NEVER):
            found = [info.ids.numpy().tolist() for _, info in itertools.islice(iterator, 300)]
        expected = [info.ids.tolist() for _, info in taken(reader.as_numpy_iterator(2, 2, seed=1), 1000)]
        assert first == expected[0]
        assert any(found == expected[at : at + 300] for at in range(1, 700))  # the rest of two blocks is left out


def test_a_reader_follows_a_writer_into_chunks_that_were_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a"
    options = StoreOptions(fsync="never", chunk_bytes=2**14)
    with filled(4, 2, None, path=path, options=options) as buffer, diskbuf.open(path) as reader:
        iterator = iter(reader.as_dataset(64, 2, seed=1, read_ahead=1))
        newest = 0
        for first_id in range(4, 20_000, 400):
            buffer.extend(span(first_id, first_id + 400, 2))
            items, info = next(iterator)
            nest = tf.nest.map_structure(lambda tensor: tensor.numpy(), items)
            assert_rows(nest, info.ids.numpy(), lanes_of(nest)[:, :1])
            newest = max(newest, int(tf.reduce_max(info.ids)))
    assert newest > 15_000


# ---- closing, and what TensorFlow does with a dataset


@pytest.mark.parametrize("read_ahead", [1, 5])
def test_a_dataset_of_a_closed_buffer_says_so_and_tensors_stay_valid(read_ahead: int) -> None:
    buffer = filled(8)
    iterator = iter(buffer.as_dataset(4, 2, read_ahead=read_ahead))
    items, info = next(iterator)
    buffer.close()
    del buffer
    gc.collect()
    nest = tf.nest.map_structure(lambda tensor: tensor.numpy(), items)
    assert_rows(nest, info.ids.numpy(), lanes_of(nest)[:, :1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be open, but was closed"):
        taken(iterator, 1000)


def test_a_process_that_ends_with_a_dataset_half_read_ends_well(tmp_path: Path) -> None:
    code = (
        "import sys, diskbuf, numpy as np\n"
        "spec = {'x': diskbuf.ArraySpec([3], 'float32')}\n"
        "buffer = diskbuf.UniformReplayBuffer(spec, 2, 100, path=sys.argv[1])\n"
        "buffer.extend({'x': np.zeros([2, 50, 3], 'f4')})\n"
        "iterators = [iter(buffer.as_dataset(4, 2, calls).prefetch(3)) for calls in (None, 2)]\n"
        "print([next(iterator)[1].ids.shape for iterator in iterators])\n"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "a"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    with diskbuf.open(tmp_path / "a") as buffer:
        assert buffer.next_id == 50


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "uint32", "int64", "float16", "float64", "complex64"])
def test_every_dtype_is_gathered_as_it_is(dtype: str) -> None:
    spec = ArraySpec([2], dtype)
    values = (np.arange(60).reshape(1, 30, 2) % 5).astype(dtype)
    with UniformReplayBuffer(spec, 1, 30, options=NEVER) as buffer:
        buffer.extend(values)
        items, info = next(iter(buffer.as_dataset(20, seed=1)))
        assert items.dtype == tf.as_dtype(dtype)
        np.testing.assert_array_equal(items.numpy(), values[0, info.ids.numpy()])
        expected = next(buffer.as_numpy_iterator(20, seed=1))[0]
        np.testing.assert_array_equal(items.numpy(), expected)


def test_rows_of_no_bytes_are_read_too() -> None:
    spec = {"none": ArraySpec([0, 3], "float32"), "some": ArraySpec([], "int64")}
    with UniformReplayBuffer(spec, 2, 9, options=NEVER) as buffer:
        buffer.extend({"none": np.zeros([2, 5, 0, 3], "f4"), "some": np.zeros([2, 5], "i8")})
        items, _ = next(iter(buffer.as_dataset(4, 2)))
        assert items["none"].shape == (4, 2, 0, 3)


def test_a_store_whose_files_cannot_be_handed_over_is_read_by_numpy() -> None:
    with filled(8, options=ODD) as buffer:
        sampler = buffer._random_reader(2, share_of(0, None), seed=None, within_episodes=False)
        assert in_graph.view_of(sampler) is None
        items, info = next(iter(buffer.as_dataset(4, 2)))
        nest = tf.nest.map_structure(lambda tensor: tensor.numpy(), items)
        assert_rows(nest, info.ids.numpy(), lanes_of(nest)[:, :1])


def test_tf_data_may_change_the_dataset_in_every_usual_way() -> None:
    with filled(8) as buffer:
        plain = [info.ids.numpy().tolist() for _, info in buffer.as_dataset(4, 2, seed=2).take(6)]
        dataset = buffer.as_dataset(4, 2, seed=2)
        ids = dataset.map(lambda _, info: info.ids, num_parallel_calls=2).prefetch(3)
        assert [element.numpy().tolist() for element in ids.take(6)] == plain
        assert [element.numpy().tolist() for element in ids.skip(2).take(4)] == plain[2:]
        assert ids.batch(3).take(1).get_single_element().numpy().tolist() == plain[:3]
        assert len(list(ids.take(3).repeat(2))) == 6
        flattened = dataset.unbatch().take(5).map(lambda _, info: info.ids)
        assert [element.numpy().tolist() for element in flattened] == (plain[0] + plain[1])[:5]
        mixed = tf.data.Dataset.sample_from_datasets([ids, ids], seed=1).take(4)
        assert len(list(mixed)) == 4


def test_datasets_are_read_inside_a_tf_function_and_by_a_mirrored_strategy() -> None:
    with filled(8) as buffer:

        @tf.function
        def total(dataset: Any) -> Any:
            count = tf.constant(0, tf.int64)
            for _, info in dataset:
                count += tf.reduce_sum(info.ids)
            return count

        dataset = buffer.as_dataset(4, 2, seed=2).take(10)
        expected = sum(int(info.ids.numpy().sum()) for _, info in dataset)
        assert int(total(dataset)) == expected

        strategy = tf.distribute.MirroredStrategy(["/cpu:0"])

        def replica(element: Any) -> Any:
            return tf.reduce_sum(element[1].ids)

        distributed = strategy.experimental_distribute_dataset(buffer.as_dataset(4, 2, seed=2).take(10))
        found = sum(int(strategy.run(replica, args=(element,))) for element in distributed)
        assert found == expected

        def dataset_of(context: Any) -> Any:
            return buffer.as_dataset(4, 2, seed=2, shard=context).take(10)

        distributed = strategy.distribute_datasets_from_function(dataset_of)
        assert sum(int(strategy.run(replica, args=(element,))) for element in distributed) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": 1.5}, r"seed must be an int or None, got 1\.5"),
        ({"seed": True}, "seed must be an int or None, got True"),
        ({"start": -1}, "start must be an int of at least 0, got -1"),
        ({"start": 1.0}, r"start must be an int of at least 0, got 1\.0"),
        ({"shard": (2, 2)}, "shard must be an index from 0 and a count above it, got index 2 and count 2"),
        ({"shard": (-1, 2)}, "shard must be an index from 0 and a count above it, got index -1 and count 2"),
        ({"shard": (0, 0)}, "shard must be an index from 0"),
        ({"shard": 3}, "shard must be None, a pair"),
        ({"shard": (0.0, 2)}, "shard must be None, a pair"),
        ({"read_ahead": 0}, "read_ahead must be an int of at least 1, got 0"),
        ({"num_parallel_calls": 0}, "num_parallel_calls must be an int of at least 1"),
    ],
)
@pytest.mark.parametrize("is_pass", [False, True])
def test_an_argument_outside_its_rule_is_refused_at_the_call(
    arguments: dict[str, Any], message: str, is_pass: bool
) -> None:
    with filled(8) as buffer:
        with pytest.raises(diskbuf.OptionError, match=message):
            buffer.as_dataset(4, 2, single_deterministic_pass=is_pass, **arguments)
        if not {"read_ahead", "num_parallel_calls"} & set(arguments):
            with pytest.raises(diskbuf.OptionError, match=message):
                buffer.as_numpy_iterator(4, 2, single_deterministic_pass=is_pass, **arguments)


def test_a_misspelt_argument_is_a_type_error() -> None:
    with filled(8) as buffer, pytest.raises(TypeError, match="read_ahed"):
        buffer.as_dataset(4, read_ahed=3)


def test_a_buffer_that_nobody_holds_closes_at_once_and_one_that_a_dataset_reads_does_not(tmp_path: Path) -> None:
    gc.disable()
    try:
        buffer = filled(8, path=tmp_path / "a")
        buffer.get_next(2)
        next(buffer.as_numpy_iterator(2))
        del buffer
        buffer = UniformReplayBuffer(SPEC, 2, 5, path=tmp_path / "a", options=NEVER)  # the lock is free again
        dataset = buffer.as_dataset(2)
        del buffer
        assert next(iter(dataset))[1].ids.shape == (2,)
        with pytest.raises(diskbuf.StoreLockedError):
            UniformReplayBuffer(SPEC, 2, 5, path=tmp_path / "a", options=NEVER)
    finally:
        gc.enable()


# ---- episodes

EPISODES = {"number": ArraySpec([], "int64"), "done": ArraySpec([], "bool")}


def in_episodes(lengths: tuple[int, ...], steps: int, **arguments: Any) -> UniformReplayBuffer:
    """Each lane has episodes of one length; a row's number says its lane, episode and step."""
    buffer = UniformReplayBuffer(EPISODES, len(lengths), options=NEVER, **arguments)
    ids = np.arange(steps)[None, :]
    length = np.array(lengths)[:, None]
    buffer.extend(
        {
            "number": np.arange(len(lengths))[:, None] * 10**6 + ids // length * 1000 + ids % length,
            "done": ids % length == length - 1,
        }
    )
    return buffer


@pytest.mark.parametrize("max_length", [31, 1000])
def test_sequences_within_episodes_cross_no_end_in_any_executor(max_length: int, tmp_path: Path) -> None:
    """agents#390: episodes of 3 steps, and pairs that join the last step of one to the first of the next."""
    path = tmp_path / "a"
    in_episodes((3, 5), 67, max_length=max_length, path=path).close()
    arguments: dict[str, Any] = {"seed": 2, "within_episodes": "done"}
    with diskbuf.open(path) as buffer:
        assert not all(  # the raw view still does
            (np.diff(items["number"], axis=-1) == 1).all()
            for items, _ in taken(buffer.as_numpy_iterator(50, 3, seed=2), 5)
        )
        expected = taken(buffer.as_numpy_iterator(50, 3, **arguments), 20)
        starts = set()
        for items, info in expected:
            assert (np.diff(items["number"], axis=-1) == 1).all()
            assert (np.diff(info.ids, axis=-1) == 1).all()
            starts |= set(items["number"][:, 0].tolist())
        pairs = round(1 / float(expected[0][1].probabilities[0]))
        assert len(starts) == pairs
        assert {number % 1000 for number in starts} == {0, 1, 2}
        for read_ahead in (1, 3):
            assert_same_elements(
                taken(read_by("host", buffer, 50, 3, read_ahead=read_ahead, **arguments), 20), expected
            )
        items, _ = buffer.get_next(100, 3, within_episodes="done")
        assert (np.diff(items["number"], axis=-1) == 1).all()
        dataset = buffer.as_dataset(50, 3, **arguments).take(20)
        found = [tf.nest.map_structure(lambda tensor: tensor.numpy(), element) for element in dataset]
        assert_same_elements(found, expected)


def test_episodes_that_are_too_short_or_not_told_of_are_refused() -> None:
    with in_episodes((3, 5), 20) as buffer:
        with pytest.raises(diskbuf.WindowError, match="no episode in the window"):
            buffer.get_next(1, 6, within_episodes="done")
        with pytest.raises(diskbuf.SpecError):
            buffer.as_dataset(1, 2, within_episodes=True)
        with pytest.raises(diskbuf.SpecError):
            buffer.as_dataset(1, 2, within_episodes="number")
        with pytest.raises(diskbuf.OptionError, match="within_episodes must be True or False, got 1"):
            buffer.as_dataset(1, 2, within_episodes=1)
        with pytest.raises(diskbuf.OptionError, match="within_episodes must be False with single_deterministic_pass"):
            buffer.as_dataset(1, 2, single_deterministic_pass=True, within_episodes="done")
