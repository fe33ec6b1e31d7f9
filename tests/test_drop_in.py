"""The stand-ins for TF-Agents' buffers, without TF-Agents: tensors, graphs, errors, checkpoints, what they refuse."""

import gc
import json
import re
import subprocess
import sys
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from coded_rows import SPEC, Pair, assert_equal, assert_rows, lanes_of, span, step

import diskbuf
from diskbuf import ArraySpec, StoreOptions
from diskbuf.replay_buffers import BanditReplayBuffer, PyUniformReplayBuffer, TFUniformReplayBuffer
from diskbuf.specs import to_tensor_spec

tf = pytest.importorskip("tensorflow")

NEVER = StoreOptions(fsync="never")
TENSOR_SPEC = to_tensor_spec(SPEC)


def filled(added: int, lanes: int = 2, max_length: int = 5, **arguments: Any) -> TFUniformReplayBuffer:
    buffer = TFUniformReplayBuffer(TENSOR_SPEC, lanes, max_length, **{"options": NEVER, **arguments})
    for step_id in range(added):
        buffer.add_batch(tensors(step(step_id, lanes)))
    return buffer


def tensors(nest: Any) -> Any:
    return tf.nest.map_structure(tf.constant, nest)


def arrays(nest: Any) -> Any:
    """The same nest with arrays, after a look that it holds tensors only."""
    assert all(isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(nest))
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), nest)


def adding(buffer: TFUniformReplayBuffer, **arguments: Any) -> Any:
    """A graph that adds what it is given."""

    @tf.function(**arguments)
    def add(items: Any) -> None:
        buffer.add_batch(items)

    return add


def bits_of(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


# ---- what goes in comes out


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("added", [0, 1, 4, 5, 8, 10])
def test_gather_all_gives_the_window_as_tensors_at_every_fill_level(added: int, is_graph: bool) -> None:
    with filled(added) as buffer:
        gather_all = tf.function(buffer.gather_all) if is_graph else buffer.gather_all
        assert_equal(arrays(gather_all()), span(max(0, added - 5), added, 2))
        frames = (tf.function(buffer.num_frames) if is_graph else buffer.num_frames)()
        assert (frames.dtype, frames.shape, int(frames)) == (tf.int64, (), 2 * min(added, 5))


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("time_stacked", [True, False])
@pytest.mark.parametrize("size", [None, 7])
@pytest.mark.parametrize("num_steps", [None, 1, 3])
def test_samples_are_rows_of_static_shapes(
    size: int | None, num_steps: int | None, time_stacked: bool, is_graph: bool
) -> None:
    leading = tuple(length for length in (size, num_steps) if length is not None)
    parts = num_steps if num_steps is not None and not time_stacked else None
    each = leading if parts is None else leading[:-1]

    def sample() -> Any:
        items, info = buffer.get_next(size, num_steps, time_stacked)
        ids = info.ids if parts else (info.ids,)
        for part, part_ids in zip(items if parts else (items,), ids, strict=True):
            assert part["image"].shape == (*each, 2, 3)
            assert part_ids.shape == each
        assert info.probabilities.shape == leading[: size is not None]
        return items, info

    with filled(8) as buffer:
        for _ in range(5):
            items, info = arrays((tf.function(sample) if is_graph else sample)())
            for part, ids in zip(items if parts else (items,), info.ids if parts else (info.ids,), strict=True):
                lanes = lanes_of(part)
                assert_rows(part, ids, lanes)
                assert ids.min() >= 3
            stacked = np.stack(info.ids, -1) if parts else info.ids
            if num_steps is not None:
                assert (np.diff(stacked, axis=-1) == 1).all()
            np.testing.assert_allclose(info.probabilities, 1 / (2 * (5 - (num_steps or 1) + 1)), rtol=1e-6)


def test_operations_of_a_graph_run_in_the_order_of_the_program() -> None:
    @tf.function
    def run(at: Any) -> Any:
        frames = [buffer.num_frames()]
        for offset in range(2):
            buffer.add_batch({"id": tf.fill([2], at + offset)})
            frames.append(buffer.num_frames())
        rows = buffer.gather_all()
        buffer.clear()
        frames.append(buffer.num_frames())
        buffer.add_batch({"id": tf.fill([2], at + 2)})
        return frames, rows, buffer.get_next(3)

    spec = {"id": tf.TensorSpec([], tf.int64)}
    with TFUniformReplayBuffer(spec, 2, 100, options=NEVER) as buffer:
        for at in range(0, 300, 3):
            frames, rows, (sample, info) = arrays(run(tf.constant(at, tf.int64)))
            assert frames == ([0, 2, 4, 0] if at == 0 else [2, 4, 6, 0])
            assert rows["id"].tolist() == [list(range(max(0, at - 1), at + 2))] * 2
            assert sample["id"].tolist() == info.ids.tolist() == [at + 2] * 3


def test_a_graph_that_adds_in_a_while_loop_adds_at_every_turn() -> None:
    @tf.function(input_signature=[tf.TensorSpec([], tf.int64)])
    def run(turns: Any) -> None:
        tf.while_loop(lambda turn: turn < turns, body, [tf.constant(0, tf.int64)], parallel_iterations=10)

    def body(turn: Any) -> Any:
        assert isinstance(buffer.add_batch({"id": tf.fill([1], turn)}), tf.Operation)
        return [turn + 1]

    with TFUniformReplayBuffer({"id": tf.TensorSpec([], tf.int64)}, 1, options=NEVER) as buffer:
        run(200)
        run(3)
        assert buffer.gather_all()["id"].numpy().tolist() == [[*range(200), 0, 1, 2]]
        assert buffer.add_batch({"id": tf.zeros([1], tf.int64)}) is None


def test_a_graph_of_version_1_runs_many_times() -> None:
    with (
        TFUniformReplayBuffer({"id": tf.TensorSpec([], tf.int64)}, 1, options=NEVER) as buffer,
        tf.Graph().as_default(),
    ):
        value = tf.compat.v1.placeholder(tf.int64, [1])
        add, rows = buffer.add_batch({"id": value}), buffer.gather_all()
        with tf.compat.v1.Session() as session:
            for number in range(3):
                session.run(add, {value: [number]})
            assert session.run(rows)["id"].tolist() == [[0, 1, 2]]


class Step(NamedTuple):
    """A namedtuple of the user's."""

    seen: Any
    extra: Any


def test_items_have_the_containers_of_the_spec_also_when_a_module_has_wrapped_them(tmp_path: Path) -> None:
    """A tf.Module puts wrappers of its own around the dicts, lists and tuples that it is given to hold."""
    scalar = tf.TensorSpec([], tf.float32, "scalar")
    module = tf.Module()
    module.spec = Step({"b": scalar, "a": (scalar, ())}, OrderedDict(z={}, y=scalar))
    assert type(module.spec) is not Step
    module.items = tensors(
        Step({"b": np.ones(1, "f4"), "a": (np.zeros(1, "f4"), ())}, OrderedDict(z={}, y=np.ones(1, "f4")))
    )
    with TFUniformReplayBuffer(module.spec, 1, path=tmp_path / "a") as buffer:
        buffer.add_batch(module.items)
        adding(buffer)(module.items)
        assert buffer.data_spec is module.spec
        items = [buffer.gather_all(), buffer.get_next()[0], next(iter(buffer.as_dataset()))[0]]
    for item in items:
        assert type(item) is Step
        assert type(item.seen) is dict
        assert type(item.seen["a"]) is tuple
        assert type(item.extra) is OrderedDict
    with diskbuf.open(tmp_path / "a") as reader:
        assert reader.gather_all().seen["b"].tolist() == [[1, 1]]


def test_bounds_of_the_spec_are_kept_in_the_store(tmp_path: Path) -> None:
    class Bounded(tf.TensorSpec):  # type: ignore[misc]
        minimum, maximum = np.float32(0), np.float32(1)

    with TFUniformReplayBuffer((Bounded([2], tf.float32, "p"),), 1, path=tmp_path / "a"):
        pass
    with diskbuf.open(tmp_path / "a") as reader:
        assert reader.data_spec == (diskbuf.BoundedArraySpec([2], "float32", 0, 1),)


# ---- datasets


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("num_steps", [None, 2])
def test_a_pass_leaves_out_short_windows_where_its_time_axis_is_static(
    size: int | None, num_steps: int | None, drop_remainder: bool
) -> None:
    with filled(5, lanes=3, dataset_drop_remainder=drop_remainder) as buffer:
        dataset = buffer.as_dataset(size, num_steps, single_deterministic_pass=True)
        found = []
        for element, info in dataset:
            items = arrays(element)
            lanes = lanes_of(items)
            assert_rows(items, info.ids.numpy(), lanes)
            assert dataset.element_spec[0]["image"].is_compatible_with(element["image"])
            found.append(np.unique(lanes).tolist() + np.unique(info.ids).tolist())
        ids_shape = dataset.element_spec[1].ids.shape.as_list()
    windows: list[Any] = [[0], [1], [2], [3], [4]] if num_steps is None else [[0, 1], [2, 3], [4]]
    if num_steps and (size or drop_remainder):
        windows = windows[:2]
    groups = [[0], [1], [2]] if size is None else [[0, 1]] if drop_remainder else [[0, 1], [2]]
    assert found == [group + window for group in groups for window in windows]
    batch_axis = [] if size is None else [size if drop_remainder else None]
    time_axis = [] if num_steps is None else [num_steps if size or drop_remainder else None]
    assert ids_shape == batch_axis + time_axis


def test_a_dataset_takes_what_the_disk_buffers_takes() -> None:
    with filled(8) as buffer:
        for items, info in buffer.as_dataset(4, 3, 2, lambda items: items).take(3):
            assert_rows(arrays(items), info.ids.numpy(), lanes_of(arrays(items))[:, :1])
        with pytest.raises(TypeError, match="sample_size"):
            buffer.as_dataset(sample_size=4)
        with pytest.raises(diskbuf.OptionError, match="Give single_deterministic_pass by its name"):
            buffer.as_dataset(4, 3, None, True)  # type: ignore[arg-type]
        with (
            pytest.raises(ValueError, match="must hold no lists"),
            TFUniformReplayBuffer([ArraySpec([], "int8")], 1, options=NEVER) as with_list,
        ):
            with_list.as_dataset(1)


# ---- errors


def test_errors_are_ours_and_tensorflows_too() -> None:
    with filled(0) as buffer:
        with pytest.raises(diskbuf.EmptyBufferError, match=r"is empty\. Add some first") as caught:
            buffer.get_next(2)
        assert isinstance(caught.value, tf.errors.InvalidArgumentError)
        assert caught.value.error_code == tf.errors.INVALID_ARGUMENT
        assert caught.value.message == str(caught.value)
        assert type(caught.value).__name__ == "EmptyBufferError"
        with pytest.raises(diskbuf.SpecError, match=r"leaf 'number' must be int64 \[2\], got int32 \[2\]") as refused:
            buffer.add_batch(step(0, 2) | {"number": np.zeros(2, "int32")})
        assert refused.value.path == "number"
        assert isinstance(refused.value, tf.errors.InvalidArgumentError)
        buffer.close()
        with pytest.raises(diskbuf.ClosedError, match="must be open, but was closed"):
            buffer.num_frames()


def test_a_graph_tells_of_errors_when_it_runs() -> None:
    number = tf.TensorSpec([None], tf.int64)
    with TFUniformReplayBuffer({"id": tf.TensorSpec([], tf.int64)}, 2, options=NEVER) as buffer:
        add = adding(buffer, input_signature=[{"id": number}])
        add({"id": tf.constant([1, 2], tf.int64)})
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"leaf 'id' must be int64 \[2\], got int64 \[3\]"):
            add({"id": tf.constant([1, 2, 3], tf.int64)})
        with pytest.raises(tf.errors.InvalidArgumentError, match="num_steps must be at most 1, got 2"):
            tf.function(lambda: buffer.get_next(2, 2))()
        assert buffer.num_frames() == 2


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"id": tf.TensorSpec([3], tf.int64)}, r"leaf 'id' must be int64 \[2\], got int64 \[3\]"),
        ({"id": tf.TensorSpec([None, 4], tf.int64)}, r"leaf 'id' must be int64 \[2\], got int64 \[2, 4\]"),
        ({"id": tf.TensorSpec([2], tf.int32)}, r"leaf 'id' must be int64 \[2\], got int32"),
        ({"ids": tf.TensorSpec([2], tf.int64)}, "Add the key 'id'"),
    ],
)
def test_a_graph_that_can_only_fail_is_a_value_error_while_it_is_traced(items: Any, message: str) -> None:
    """As in TF-Agents. TensorFlow passes no class on that it doesn't know."""
    with TFUniformReplayBuffer({"id": tf.TensorSpec([], tf.int64)}, 2, options=NEVER) as buffer:
        with pytest.raises(ValueError, match=message):
            adding(buffer).get_concrete_function(items)
        with pytest.raises(ValueError, match="num_steps must be an int of at least 1, got 0"):
            tf.function(lambda: buffer.get_next(2, 0)).get_concrete_function()
        with pytest.raises(ValueError, match="sample_batch_size must be known when the graph is made"):
            tf.function(lambda size: buffer.get_next(size)).get_concrete_function(tf.TensorSpec([], tf.int32))
        assert tf.function(lambda: buffer.get_next(tf.constant(2))).get_concrete_function().output_shapes[0] == {
            "id": (2,)
        }


def test_a_refused_add_changes_nothing(tmp_path: Path) -> None:
    with filled(1, path=tmp_path / "a") as buffer:
        before = bits_of(tmp_path / "a")
        good = tensors(step(1, 2))
        for bad in (good | {"number": tf.zeros([3], tf.int64)}, good | {"extra": ()}, {}, good | {"image": [[1.0]]}):
            with pytest.raises(diskbuf.SpecError):
                buffer.add_batch(bad)
            with pytest.raises(ValueError, match="must be"):
                adding(buffer)(bad)
        assert bits_of(tmp_path / "a") == before
        buffer.add_batch(good)
        assert_equal(arrays(buffer.gather_all()), span(0, 2, 2))


# ---- arguments and the store


def test_what_was_given_is_reported() -> None:
    buffer = TFUniformReplayBuffer(TENSOR_SPEC, 3, 7, "a_scope", "gpu:0", None, False, None, True)
    with buffer:
        assert buffer.data_spec is TENSOR_SPEC
        assert (buffer.scope, buffer.device, buffer.table_fn, buffer.stateful_dataset) == (
            "a_scope",
            "gpu:0",
            None,
            True,
        )
        assert (buffer.batch_size, buffer.max_length, buffer.variables()) == (3, 7, [])
        assert (buffer.capacity.dtype, int(buffer.capacity)) == (tf.int64, 21)
        assert isinstance(buffer, tf.Module)
        assert (buffer.name, buffer.trainable_variables) == ("tf_uniform_replay_buffer", ())
        assert repr(buffer).startswith("<TFUniformReplayBuffer over <UniformReplayBuffer /")
        assert buffer.path == buffer.buffer.path
    assert BanditReplayBuffer is TFUniformReplayBuffer
    assert not buffer.path.exists()


def test_what_cannot_be_honoured_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        diskbuf.OptionError, match=r"table_fn must be None, got .*dict.*: a table keeps rows in variables"
    ):
        TFUniformReplayBuffer(TENSOR_SPEC, 1, table_fn=dict, path=tmp_path / "a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="maximum_length"):
        TFUniformReplayBuffer(TENSOR_SPEC, 1, maximum_length=3, path=tmp_path / "a")  # type: ignore[call-arg]
    assert not (tmp_path / "a").exists()


def test_a_private_store_goes_with_its_buffer() -> None:
    folder = filled(3).path
    gc.collect()
    assert not folder.exists()


def test_the_store_is_continued_and_read_by_others(tmp_path: Path) -> None:
    with filled(3, path=tmp_path / "a", metadata={"run": 1}) as buffer:
        buffer.flush()
        with diskbuf.open(tmp_path / "a") as reader:
            assert_equal(reader.gather_all(), span(0, 3, 2))
            assert reader.metadata == {"run": 1}
    with TFUniformReplayBuffer(TENSOR_SPEC, 2, 5, path=tmp_path / "a") as buffer:
        buffer.add_batch(tensors(step(3, 2)))
        assert_equal(arrays(buffer.gather_all()), span(0, 4, 2))
        with pytest.raises(diskbuf.StoreLockedError):
            TFUniformReplayBuffer(TENSOR_SPEC, 2, 5, path=tmp_path / "a")
    with pytest.raises(diskbuf.StoreMismatchError, match="number"):
        TFUniformReplayBuffer(TENSOR_SPEC | {"number": tf.TensorSpec([], tf.int8)}, 2, 5, path=tmp_path / "a")


def test_a_seed_makes_samples_repeatable_in_and_out_of_a_graph() -> None:
    def ids(*, is_graph: bool) -> list[Any]:
        with filled(5, seed=3) as buffer:
            sample = tf.function(lambda: buffer.get_next(9)[1].ids) if is_graph else lambda: buffer.get_next(9)[1].ids
            return [sample().numpy().tolist() for _ in range(3)]

    assert ids(is_graph=False) == ids(is_graph=True) == ids(is_graph=False)


def test_getting_the_names_does_not_import_tensorflow() -> None:
    code = (
        "import sys, diskbuf; from diskbuf.replay_buffers import PyUniformReplayBuffer, TFUniformReplayBuffer; "
        "assert diskbuf.replay_buffers.UniformReplayBuffer is diskbuf.UniformReplayBuffer; "
        "assert 'TFUniformReplayBuffer' in dir(diskbuf.replay_buffers); print('tensorflow' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("False\n", "")
    with pytest.raises(AttributeError, match="has no attribute 'TFReplayBuffer'"):
        _ = diskbuf.replay_buffers.TFReplayBuffer


# ---- checkpoints


def test_a_trainer_restored_next_to_its_store_keeps_the_row_count(tmp_path: Path) -> None:
    """Restored three times over: each step is there once. [dreamerv3#103]"""
    for run in range(4):
        with TFUniformReplayBuffer(TENSOR_SPEC, 2, 100, path=tmp_path / "a", options=NEVER) as buffer:
            weight = tf.Variable(0.0)
            checkpoint = tf.train.Checkpoint(weight=weight, replay_buffer=buffer)
            manager = tf.train.CheckpointManager(checkpoint, str(tmp_path / "checkpoints"), max_to_keep=2)
            with warnings.catch_warnings(action="error"):
                checkpoint.restore(manager.latest_checkpoint).expect_partial()
            assert float(weight) == run
            assert_equal(arrays(buffer.gather_all()), span(0, 10 * run, 2))
            for step_id in range(10 * run, 10 * run + 10):
                buffer.add_batch(step(step_id, 2))
                if step_id % 10 == 4:
                    weight.assign_add(1.0)
                    manager.save()
    files = [file for file in (tmp_path / "checkpoints").iterdir() if ".data-" in file.name]
    assert len(files) == 2
    assert all(file.stat().st_size < 10_000 for file in files)


def test_what_a_checkpoint_counts_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = []
    with filled(3, path=tmp_path / "a") as buffer:
        monkeypatch.setattr(buffer.buffer, "flush", lambda: flushed.append(buffer.buffer.next_id))
        tf.train.Checkpoint(replay_buffer=buffer).write(str(tmp_path / "checkpoint"))
        assert flushed == [3]


def test_restoring_beside_another_store_warns(tmp_path: Path) -> None:
    with filled(3, path=tmp_path / "a") as buffer:
        written = tf.train.Checkpoint(replay_buffer=buffer).write(str(tmp_path / "checkpoint"))
    with filled(2) as other, pytest.warns(RuntimeWarning, match=r"2 steps added, and .*a had 3 .*holds no rows"):
        tf.train.Checkpoint(replay_buffer=other).read(written).assert_consumed()


# ---- the buffer of arrays

ITEM = {"number": ArraySpec([], "int64"), "pair": Pair(ArraySpec([2], "float32"), ())}


def numbers(*values: int) -> Any:
    column = np.array(values, "int64")
    return {"number": column, "pair": Pair(np.stack([column, column], -1).astype("float32"), ())}


def test_each_item_of_a_batch_is_a_row_of_the_array_buffer(tmp_path: Path) -> None:
    with PyUniformReplayBuffer(ITEM, 5, path=tmp_path / "a", options=NEVER) as buffer:
        assert (buffer.capacity, buffer.size, buffer.data_spec is ITEM) == (5, 0, True)
        assert_equal(
            buffer.gather_all(), {"number": np.zeros([1, 0], "int64"), "pair": Pair(np.zeros([1, 0, 2], "f4"), ())}
        )
        buffer.add_batch(numbers(0))
        buffer.add_batch(numbers(1, 2))
        assert (buffer.size, buffer.num_frames()) == (3, 3)
        assert buffer.gather_all()["number"].tolist() == [[0, 1, 2]]  # no slot that wasn't written
        buffer.add_batch(tensors(numbers(3, 4, 5, 6)))
        assert (buffer.size, buffer.num_frames()) == (5, 5)
        assert buffer.gather_all()["number"].tolist() == [[2, 3, 4, 5, 6]]
        assert buffer.gather_all()["pair"].exact.shape == (1, 5, 2)
        buffer.add_batch(numbers(*range(7, 30)))
        assert buffer.gather_all()["number"].tolist() == [[25, 26, 27, 28, 29]]
        buffer.clear()
        assert buffer.size == 0
        buffer.add_batch(numbers(30))
    with diskbuf.open(tmp_path / "a") as reader:
        assert reader.gather_all()["number"].tolist() == [[30]]


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("num_steps", [None, 2])
def test_samples_of_the_array_buffer_are_items_alone(size: int | None, num_steps: int | None) -> None:
    leading = tuple(length for length in (size, num_steps) if length is not None)
    with PyUniformReplayBuffer(ITEM, 5, options=NEVER) as buffer:
        buffer.add_batch(numbers(*range(8)))
        dataset = buffer.as_dataset(size, num_steps)
        assert dataset.element_spec["pair"] == Pair(tf.TensorSpec((*leading, 2), tf.float32), ())
        for items in (buffer.get_next(size, num_steps), arrays(next(iter(dataset)))):
            assert items["number"].shape == leading
            assert items["number"].min() >= 3
            if num_steps:
                assert (np.diff(items["number"], axis=-1) == 1).all()
        if num_steps:
            first, second = buffer.get_next(size, num_steps, time_stacked=False)
            assert first["number"].shape == leading[:-1]
            assert (second["number"] == first["number"] + 1).all()


def test_the_array_buffer_refuses_what_it_cannot_do() -> None:
    with PyUniformReplayBuffer(ITEM, 5, options=NEVER) as buffer:
        with pytest.raises(diskbuf.EmptyBufferError):
            buffer.get_next()
        buffer.add_batch(numbers(1))
        with pytest.raises(diskbuf.WindowError, match="num_steps must be at most 1, got 2"):
            buffer.get_next(num_steps=2)
        for items, message in [
            (numbers(1) | {"number": np.zeros(2, "int64")}, r"leaf 'pair/exact' must be float32 [B, 2], with as many"),
            (
                numbers(1) | {"number": np.int64(1)},
                r"leaf 'number' must be int64 [B], with as many items B in every leaf",
            ),
            (numbers(1, 2) | {"number": np.zeros(2)}, "got float64 [2]. Cast it, or give it the axis B with x[None]."),
            (numbers(1) | {"number": [1]}, "Remove the extra list around it."),
            (numbers(1) | {"number": 1}, "must be a numpy array or a tensor, got int"),
            ({}, "Add the key 'number'"),
        ]:
            with pytest.raises(diskbuf.SpecError, match=re.escape(message)):
                buffer.add_batch(items)
        assert buffer.size == 1
        with pytest.raises(NotImplementedError, match="it batches lanes, and there is one"):
            buffer.as_dataset(single_deterministic_pass=True)
        with pytest.raises(diskbuf.OptionError, match="capacity must be an int of at least 1, got 0"):
            PyUniformReplayBuffer(ITEM, 0)


def test_the_array_buffer_goes_into_a_checkpoint_too(tmp_path: Path) -> None:
    with PyUniformReplayBuffer(ITEM, 5, path=tmp_path / "a") as buffer:
        buffer.add_batch(numbers(1, 2))
        written = tf.train.Checkpoint(replay_buffer=buffer).write(str(tmp_path / "checkpoint"))
        buffer.add_batch(numbers(3))
        tf.train.Checkpoint(replay_buffer=buffer).read(written).assert_consumed()
        assert buffer.size == 3
    state = tf.train.load_checkpoint(written).get_tensor("replay_buffer/_position/.ATTRIBUTES/py_state")
    assert json.loads(state) == {"path": str(tmp_path / "a"), "next_id": 2}
