"""Datasets: their elements' specs, the whole table of a deterministic pass, and what they refuse."""

import contextlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coded_rows import SPEC, Pair, assert_rows, lanes_of, span, step

import diskbuf
from diskbuf import ArraySpec, StoreOptions, UniformReplayBuffer

tf = pytest.importorskip("tensorflow")

TINY = StoreOptions(chunk_bytes=64, fsync="never")


def filled(added: int, lanes: int = 2, max_length: int | None = 5, **arguments: Any) -> UniformReplayBuffer:
    buffer = UniformReplayBuffer(SPEC, lanes, max_length, **{"options": TINY, **arguments})
    for step_id in range(added):
        buffer.add_batch(step(step_id, lanes))
    return buffer


def elements(dataset: Any) -> Iterator[tuple[Any, Any]]:
    for items, info in dataset:
        yield tf.nest.map_structure(lambda tensor: tensor.numpy(), (items, info))


def assert_pass(dataset: Any, expected: list[Any]) -> None:
    """The dataset's elements are these, as nested lists of (id, lane), or one such pair."""
    found = []
    for items, info in elements(dataset):
        lanes = lanes_of(items)
        assert_rows(items, info.ids, lanes)
        found.append(np.stack([info.ids, lanes], -1).tolist())
    assert found == [np.array(element).tolist() for element in expected]


# ---- random


@pytest.mark.parametrize("num_parallel_calls", [None, 2])
@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("num_steps", [None, 3])
def test_elements_have_the_shapes_that_get_next_gives(
    size: int | None, num_steps: int | None, num_parallel_calls: int | None
) -> None:
    with filled(8) as buffer:
        dataset = buffer.as_dataset(size, num_steps, num_parallel_calls)
        leading = tuple(length for length in (size, num_steps) if length is not None)
        items_spec, info_spec = dataset.element_spec
        assert items_spec["pair"] == Pair(
            tf.TensorSpec((*leading, 3), tf.float64), tf.TensorSpec((*leading, 1), tf.float32)
        )
        assert items_spec["nothing"] == ()
        assert info_spec.ids == tf.TensorSpec(leading, tf.int64)
        assert info_spec.probabilities == tf.TensorSpec(leading[: size is not None], tf.float32)
        for items, info in elements(dataset.take(20)):
            lanes = lanes_of(items)
            assert_rows(items, info.ids, lanes if num_steps is None else lanes[..., :1])
            assert info.ids.shape == leading
            np.testing.assert_allclose(info.probabilities, 1 / (2 * (5 if num_steps is None else 3)))


def test_a_random_dataset_never_ends_and_is_uniform() -> None:
    with filled(8, seed=1) as buffer:
        ids = np.concatenate([info.ids for _, info in elements(buffer.as_dataset(500).take(40))])
    _, counts = np.unique(ids, return_counts=True)
    assert len(counts) == 5
    assert abs(counts - 4000).max() < 5 * 4000**0.5


def test_datasets_of_a_seed_are_repeatable_and_differ_from_each_other() -> None:
    def ids_of(seed: int) -> list[list[int]]:
        with filled(8, seed=seed) as buffer:
            return [
                np.concatenate([info.ids for _, info in elements(buffer.as_dataset(10).take(3))]).tolist()
                for _ in range(2)
            ]

    first, second = ids_of(1)
    assert ids_of(1) == [first, second]
    assert first != second
    assert ids_of(2)[0] != first


def test_each_element_is_sampled_from_the_window_of_its_moment() -> None:
    with filled(3) as buffer:
        iterator = elements(buffer.as_dataset(50))
        assert next(iterator)[1].ids.max() <= 2
        buffer.extend(span(3, 30, 2))
        newer = [next(iterator)[1].ids.min() for _ in range(50)]  # TensorFlow may have read a few ahead
        assert newer[-1] >= 25


def test_a_dataset_can_be_made_before_anything_is_added() -> None:
    with filled(0) as buffer:
        dataset = buffer.as_dataset(4, num_steps=2)
        buffer.extend(span(0, 3, 2))
        assert next(elements(dataset))[1].ids.shape == (4, 2)


@pytest.mark.parametrize("is_pass", [False, True])
def test_an_empty_buffer_is_told_at_the_first_element(is_pass: bool) -> None:
    with filled(0) as buffer:
        dataset = buffer.as_dataset(4, single_deterministic_pass=is_pass)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"to be sampled, but is empty\. Add some first"):
            next(iter(dataset))


def test_a_dataset_of_a_closed_buffer_says_so() -> None:
    buffer = filled(8)
    iterator = iter(buffer.as_dataset(4))
    next(iterator)
    buffer.close()
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be open, but was closed"):
        list(itertools.islice(iterator, 50))  # TensorFlow may have read a few ahead


def test_sequence_preprocess_fn_sees_each_sequence_alone() -> None:
    def doubled(items: Any) -> Any:
        assert items["number"].shape == (3,)
        return items | {"number": items["number"] * 2}

    with filled(8, seed=1) as buffer:
        dataset = buffer.as_dataset(4, num_steps=3, sequence_preprocess_fn=doubled)
        assert dataset.element_spec == buffer.as_dataset(4, num_steps=3).element_spec
        for items, info in elements(dataset.take(5)):
            np.testing.assert_array_equal(items["number"] // 200, info.ids)
            assert items["number"].shape == (4, 3)


def test_sequence_preprocess_fn_may_change_the_length_of_a_sequence() -> None:
    with filled(8) as buffer:
        dataset = buffer.as_dataset(
            4, num_steps=3, sequence_preprocess_fn=lambda items: tf.nest.map_structure(lambda leaf: leaf[1:], items)
        )
        assert next(elements(dataset))[0]["number"].shape == (4, 2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda items: items["number"], "must keep the structure of the items"),
        (lambda items: items | {"number": tf.cast(items["number"], tf.float32)}, "must keep dtypes and ranks"),
        (lambda items: items | {"number": items["number"][:, None]}, "must keep dtypes and ranks"),
    ],
)
def test_sequence_preprocess_fn_that_changes_the_spec_is_refused(function: Any, message: str) -> None:
    with filled(8) as buffer, pytest.raises(diskbuf.SpecError, match=f"sequence_preprocess_fn {message}"):
        buffer.as_dataset(4, num_steps=3, sequence_preprocess_fn=function)


def test_a_training_loop_inside_a_tf_function_consumes_a_dataset() -> None:
    with filled(8) as buffer:
        dataset = buffer.as_dataset(16, num_steps=2, num_parallel_calls=2).prefetch(2)
        weight = tf.Variable(0.0)

        @tf.function
        def train(iterator: Any) -> Any:
            for _ in tf.range(10):
                items, _ = next(iterator)
                assert items["image"].shape == (16, 2, 2, 3)
                weight.assign_add(tf.reduce_mean(tf.cast(items["is_odd"][0], tf.float32)))
            return weight

        assert 0 < float(train(iter(dataset))) < 10


def test_keras_fits_on_a_dataset() -> None:
    with filled(8) as buffer:
        dataset = buffer.as_dataset(16).map(lambda items, _: (items["pair"].coarse, items["pair"].coarse))
        model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
        model.compile(loss="mse")
        assert np.isfinite(
            model.fit(dataset, steps_per_epoch=3, epochs=2, shuffle=False, verbose=0).history["loss"]
        ).all()


# ---- a single deterministic pass

PAIRS = {
    # 1 lane, ids 0 to 4, num_steps 2: (window_shift, drop_remainder) -> ids of the windows, one lane after the other
    (None, False): [[0, 1], [2, 3], [4]],
    (None, True): [[0, 1], [2, 3]],
    (1, False): [[0, 1], [1, 2], [2, 3], [3, 4], [4]],
    (1, True): [[0, 1], [1, 2], [2, 3], [3, 4]],
    (2, False): [[0, 1], [2, 3], [4]],
    (2, True): [[0, 1], [2, 3]],
}
GROUPS = {
    # 3 lanes: (sample_batch_size, drop_remainder) -> lanes of each batch; all windows of one before those of the next
    (None, False): [0, 1, 2],
    (None, True): [0, 1, 2],
    (1, False): [[0], [1], [2]],
    (1, True): [[0], [1], [2]],
    (2, False): [[0, 1], [2]],
    (2, True): [[0, 1]],
    (3, False): [[0, 1, 2]],
    (3, True): [[0, 1, 2]],
}


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("size", [None, 1, 2, 3])
@pytest.mark.parametrize("window_shift", [None, 1, 2])
def test_five_rows_in_windows_of_two_come_as_the_tables_say(
    window_shift: int | None, size: int | None, drop_remainder: bool
) -> None:
    """The question of agents#489: which windows, and what of the odd one."""
    with filled(5, 3, 5, dataset_window_shift=window_shift, dataset_drop_remainder=drop_remainder) as buffer:
        dataset = buffer.as_dataset(size, num_steps=2, single_deterministic_pass=True)
        expected = [
            [(step_id, group) for step_id in window]
            if size is None
            else [[(step_id, lane) for step_id in window] for lane in group]
            for group in GROUPS[size, drop_remainder]
            for window in PAIRS[window_shift, drop_remainder]
        ]
        assert_pass(dataset, expected)
        assert_pass(dataset, expected)  # each iterator begins a pass of its own


@pytest.mark.parametrize("drop_remainder", [False, True])
@pytest.mark.parametrize("size", [None, 1, 2])
def test_a_pass_without_num_steps_gives_single_steps(size: int | None, drop_remainder: bool) -> None:
    with filled(8, dataset_drop_remainder=drop_remainder) as buffer:
        dataset = buffer.as_dataset(size, single_deterministic_pass=True)
        groups = {None: [0, 1], 1: [[0], [1]], 2: [[0, 1]]}[size]
        assert_pass(
            dataset,
            [
                (step_id, group) if size is None else [(step_id, lane) for lane in group]
                for group in groups
                for step_id in range(3, 8)
            ],
        )


def test_a_pass_over_a_wrapped_ring_keeps_lanes_and_time_apart() -> None:
    """2 lanes of length 5 after 8 adds: TF-Agents 0.19 takes row ids modulo 10 here, and mixes lanes."""
    with filled(8) as buffer:
        dataset = buffer.as_dataset(2, num_steps=5, single_deterministic_pass=True)
        assert_pass(dataset, [[[(step_id, lane) for step_id in range(3, 8)] for lane in range(2)]])


@pytest.mark.parametrize("added", [1, 4, 5, 6, 10, 23])
def test_a_pass_at_every_fill_level_visits_every_step_once(added: int) -> None:
    with filled(added) as buffer:
        ids = [info.ids.ravel() for _, info in elements(buffer.as_dataset(1, 3, single_deterministic_pass=True))]
    assert sorted(np.concatenate(ids).tolist()) == sorted([*range(max(0, added - 5), added)] * 2)


def test_windows_of_a_pass_never_span_a_restart(tmp_path: Path) -> None:
    filled(3, 1, 20, path=tmp_path / "a").close()
    with UniformReplayBuffer(SPEC, 1, 20, path=tmp_path / "a") as buffer:
        buffer.extend(span(3, 7, 1))
        dataset = buffer.as_dataset(num_steps=2, single_deterministic_pass=True)
        assert_pass(dataset, [[(step_id, 0) for step_id in window] for window in ([0, 1], [2], [3, 4], [5, 6])])


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_shapes_of_a_pass_are_fixed_exactly_when_remainders_are_dropped(drop_remainder: bool) -> None:
    with filled(5, dataset_drop_remainder=drop_remainder) as buffer:
        items, info = buffer.as_dataset(2, num_steps=2, single_deterministic_pass=True).element_spec
    leading = (2, 2) if drop_remainder else (None, None)
    assert items["pair"].exact == tf.TensorSpec((*leading, 3), tf.float64)
    assert info.ids == tf.TensorSpec(leading, tf.int64)
    assert info.probabilities == ()


@pytest.mark.parametrize(("size", "num_steps"), [(3, None), (1, 6)])
def test_a_pass_that_would_drop_everything_is_refused(size: int, num_steps: int | None) -> None:
    with (
        filled(5, dataset_drop_remainder=True) as buffer,
        pytest.raises(diskbuf.OptionError, match="ALL data will be dropped by the deterministic dataset"),
    ):
        buffer.as_dataset(size, num_steps, single_deterministic_pass=True)


def test_a_pass_with_sequence_preprocess_fn_is_not_implemented() -> None:
    with filled(5) as buffer, pytest.raises(NotImplementedError, match=r"Use Dataset\.map"):
        buffer.as_dataset(1, sequence_preprocess_fn=lambda items: items, single_deterministic_pass=True)


def test_a_pass_whose_rows_are_overwritten_says_so() -> None:
    with filled(0, max_length=600) as buffer:
        buffer.extend(span(0, 600, 2))
        iterator = iter(buffer.as_dataset(1, num_steps=1, single_deterministic_pass=True))
        next(iterator)
        buffer.extend(span(600, 900, 2))
        with pytest.raises(tf.errors.InvalidArgumentError, match="while a deterministic pass reads them"):
            for _ in iterator:
                pass


# ---- what is refused at the call


def test_lists_in_the_spec_are_refused_with_the_fix() -> None:
    """TensorFlow takes a list for a tensor."""
    spec = {"a": (ArraySpec([], "int8"), [ArraySpec([], "int8")])}
    with UniformReplayBuffer(spec) as buffer:
        buffer.add_batch({"a": (np.zeros(1, "int8"), [np.zeros(1, "int8")])})
        with pytest.raises(
            diskbuf.SpecError,
            match=re.escape("must hold no lists, which TensorFlow takes for tensors, got one at 'a/1'"),
        ):
            buffer.as_dataset(1)
        assert buffer.get_next(1)[0]["a"][1][0].shape == (1,)


def test_more_steps_than_can_ever_be_there_are_refused_at_the_call(tmp_path: Path) -> None:
    with filled(3, path=tmp_path / "a") as buffer:
        with pytest.raises(diskbuf.WindowError, match=r"num_steps must be at most max_length, 5, got 6"):
            buffer.as_dataset(1, num_steps=6)
        buffer.as_dataset(1, num_steps=4)  # may be there by then
    with diskbuf.open(tmp_path / "a") as reader, pytest.raises(diskbuf.WindowError, match=r"at most 3, got"):
        reader.as_dataset(1, num_steps=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sample_batch_size": 0}, "sample_batch_size must be an int of at least 1, got 0"),
        ({"num_steps": -1}, "num_steps must be an int of at least 1, got -1"),
        ({"single_deterministic_pass": 1}, "single_deterministic_pass must be True or False, got 1"),
    ],
)
def test_an_argument_outside_its_rule_is_refused(arguments: dict[str, Any], message: str) -> None:
    with filled(5) as buffer, pytest.raises(diskbuf.OptionError, match=message):
        buffer.as_dataset(**arguments)


# ---- several readers


def test_datasets_of_a_reader_follow_the_writer(tmp_path: Path) -> None:
    with filled(5, path=tmp_path / "a") as buffer, diskbuf.open(tmp_path / "a") as reader:
        iterator = elements(reader.as_dataset(50, num_steps=2, num_parallel_calls=2))
        for first_id in range(5, 200, 5):
            buffer.extend(span(first_id, first_id + 5, 2))
            items, info = next(iterator)
            assert_rows(items, info.ids, lanes_of(items)[:, :1])


def test_many_datasets_given_up_half_way_leave_no_file_and_no_thread_open(tmp_path: Path) -> None:
    """The autouse look for threads does the rest."""
    with filled(8, path=tmp_path / "a") as buffer:
        next(iter(buffer.as_dataset(4)))
        before = len(list(Path("/proc/self/fd").iterdir()))
        for number in range(20):
            with contextlib.suppress(StopIteration):
                iterator = iter(buffer.as_dataset(4, 2, single_deterministic_pass=bool(number % 2)))
                next(iterator)
                next(iterator)
        del iterator
        assert len(list(Path("/proc/self/fd").iterdir())) <= before + 2
