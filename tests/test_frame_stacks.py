"""Stacks of frames: against Gymnasium's own wrapper, against a plain loop, and NumPy against TensorFlow."""

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from counter_environment import CounterEnvironment
from gymnasium.wrappers import FrameStackObservation
from hypothesis import given, settings
from hypothesis import strategies as st

import diskbuf
from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import suite_gym
from diskbuf.policies import RandomPolicy
from diskbuf.readers import frame_stacker, stack_frames
from diskbuf.trajectories import StepType, Trajectory

Maker = Callable[[], gymnasium.Env[Any, Any]]


def in_graph(rows: Any, num_frames: int, **options: Any) -> Any:
    """What a `tf.function` that knows no batch and no steps makes of the rows, as NumPy arrays."""
    specs = tf.nest.map_structure(lambda leaf: tf.TensorSpec([None, None, *leaf.shape[2:]], leaf.dtype), rows)
    stacked = tf.function(lambda tensors: stack_frames(tensors, num_frames, **options), input_signature=[specs])
    return tf.nest.map_structure(lambda leaf: leaf.numpy(), stacked(tf.nest.map_structure(tf.constant, rows)))


def collect(makers: list[Maker], path: Path, num_steps: int) -> diskbuf.UniformReplayBuffer:
    """A buffer of rows that a random policy collected; the same actions whatever the observations are."""
    with suite_gym.wrap(makers, seed=5) as env:
        policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=6)
        buffer = diskbuf.UniformReplayBuffer(policy.trajectory_spec, len(makers), None, path=path)
        DynamicStepDriver(env, policy, observers=[buffer.add_batch], num_steps=num_steps).run()
    return buffer


def wrapped(maker: Maker, num_frames: int) -> Maker:
    return lambda: FrameStackObservation(maker(), num_frames)


def counters(**options: Any) -> list[Maker]:
    def maker(lane: int) -> Maker:
        lengths = ((3, 1, 7), (2, 5), (1, 1, 4))[lane]
        return lambda: CounterEnvironment(lane, lengths=lengths, ends=("terminated", "truncated"), **options)

    return [maker(lane) for lane in range(3)]


def plain_stacks(frames: npt.NDArray[Any], step_type: npt.NDArray[Any], num_frames: int) -> npt.NDArray[Any]:
    """[T, num_frames, *shape] of one lane, as an environment's wrapper keeps them, from its first row on."""
    stacks, queue = [], [frames[0]] * num_frames
    for frame, kind in zip(frames, step_type, strict=True):
        queue = [frame] * num_frames if kind == StepType.FIRST else [*queue[1:], frame]
        stacks.append(np.stack(queue))
    return np.stack(stacks)


def cartpoles() -> list[Maker]:
    return [lambda: gymnasium.make("CartPole-v1")] * 2


@pytest.mark.parametrize("num_frames", [1, 2, 4])
@pytest.mark.parametrize("make", [counters, cartpoles])
def test_every_window_is_what_gymnasiums_wrapper_would_have_given(
    make: Callable[[], list[Maker]], num_frames: int, tmp_path: Path
) -> None:
    single = collect(make(), tmp_path / "single", 200)
    stacked = collect([wrapped(maker, num_frames) for maker in make()], tmp_path / "stacked", 200)
    with single, stacked:
        rows, expected = single.gather_all(), stacked.gather_all()
        assert (rows.step_type == StepType.FIRST).sum() > 4
        for first, steps in itertools.product(range(60), (num_frames, num_frames + 3)):
            window = tf.nest.map_structure(lambda leaf, at=first, to=first + steps: leaf[:, at:to], rows)
            at = slice(first + num_frames - 1, first + steps)
            for name, leaf in stack_frames(window, num_frames)._asdict().items():
                if name != "policy_info":
                    np.testing.assert_array_equal(leaf, getattr(expected, name)[:, at], err_msg=name)


def test_the_leaves_of_a_dict_are_stacked_as_gymnasium_stacks_them(tmp_path: Path) -> None:
    single = collect(counters(is_dict=True), tmp_path / "single", 90)
    stacked = collect([wrapped(maker, 3) for maker in counters(is_dict=True)], tmp_path / "stacked", 90)
    with single, stacked:
        rows, expected = single.gather_all(), stacked.gather_all().observation
    for leaves in ("observation", ("observation/where", "observation/action")):
        observation = stack_frames(rows, 3, leaves=leaves).observation
        assert observation["where"].shape[2:] == (3, 3)
        assert observation["action"].shape[2:] == (3,)
        for name, leaf in observation.items():
            np.testing.assert_array_equal(leaf, expected[name][:, 2:])
    only_one = stack_frames(rows, 3, leaves="observation/where").observation
    np.testing.assert_array_equal(only_one["where"], expected["where"][:, 2:])
    np.testing.assert_array_equal(only_one["action"], rows.observation["action"][:, 2:])


@st.composite
def some_rows(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    batch, steps = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    kinds = st.lists(st.integers(0, 2), min_size=batch * steps, max_size=batch * steps)
    step_type = np.array(draw(kinds), np.int32).reshape(batch, steps)
    shape = draw(st.sampled_from([(), (2,), (2, 3)]))
    frames = np.arange(batch * steps * np.prod(shape, dtype=int), dtype=np.uint8).reshape(batch, steps, *shape)
    rows = {"step_type": step_type, "observation": frames, "reward": frames.reshape(batch, steps, -1)[..., 0] * 0.5}
    return rows, draw(st.integers(1, steps))


@settings(max_examples=150, deadline=None)
@given(some_rows(), st.data())
def test_stacks_are_those_of_a_plain_loop(case: tuple[dict[str, Any], int], data: st.DataObject) -> None:
    rows, num_frames = case
    axis = data.draw(st.integers(1 - rows["observation"].ndim, rows["observation"].ndim - 2))
    stacked = stack_frames(rows, num_frames, axis=axis)
    lanes = [
        plain_stacks(frames, kinds, num_frames)
        for frames, kinds in zip(rows["observation"], rows["step_type"], strict=True)
    ]
    at = 2 + axis % (rows["observation"].ndim - 1)
    expected = np.moveaxis(np.stack(lanes), 2, at)
    np.testing.assert_array_equal(stacked["observation"], expected[:, num_frames - 1 :])
    assert stacked["observation"].dtype == np.uint8
    assert stacked["observation"].flags.c_contiguous
    assert not np.shares_memory(stacked["observation"], rows["observation"])
    for name in ("step_type", "reward"):
        np.testing.assert_array_equal(stacked[name], rows[name][:, num_frames - 1 :])


@settings(max_examples=15, deadline=None)
@given(some_rows(), st.data())
def test_tensors_give_what_arrays_give(case: tuple[dict[str, Any], int], data: st.DataObject) -> None:
    rows, num_frames = case
    axis = data.draw(st.sampled_from([0, -1, rows["observation"].ndim - 2]))
    expected = stack_frames(rows, num_frames, axis=axis)
    eager = stack_frames(tf.nest.map_structure(tf.constant, rows), num_frames, axis=axis)
    mixed = stack_frames(rows | {"observation": tf.constant(rows["observation"])}, num_frames, axis=axis)
    for stacked in (eager, mixed, in_graph(rows, num_frames, axis=axis)):
        for name, leaf in expected.items():
            np.testing.assert_array_equal(np.asarray(stacked[name]), leaf, err_msg=name)
            assert stacked[name].dtype == leaf.dtype


@pytest.fixture
def buffer(tmp_path: Path) -> Any:
    with collect(counters(), tmp_path / "store", 300) as writer:
        yield writer


def test_the_elements_of_a_dataset_are_stacked_with_their_ids(buffer: diskbuf.UniformReplayBuffer) -> None:
    everything = stack_frames(buffer.gather_all(), 4).observation
    dataset = buffer.as_dataset(16, num_steps=5, seed=3).map(frame_stacker(4))
    rows_spec, info_spec = dataset.element_spec
    assert isinstance(rows_spec, Trajectory)
    assert rows_spec.observation.shape.as_list() == [16, 2, 4, 4]
    assert info_spec.ids.shape.as_list() == [16, 2]
    elements = map(frame_stacker(4), *zip(*itertools.islice(buffer.as_numpy_iterator(16, 5, seed=3), 8), strict=True))
    for (rows, info), (same_rows, same_info) in zip(dataset.take(8), elements, strict=True):
        np.testing.assert_array_equal(rows.observation, same_rows.observation)
        np.testing.assert_array_equal(rows.reward, same_rows.reward)
        np.testing.assert_array_equal(info.ids, same_info.ids)
        np.testing.assert_array_equal(info.probabilities, same_info.probabilities)
        lane = same_rows.observation[:, 0, 3, 0].astype(int)
        np.testing.assert_array_equal(same_rows.observation, everything[lane[:, None], same_info.ids - 3])


def test_a_pass_whose_windows_overlap_gives_each_stack_once(buffer: diskbuf.UniformReplayBuffer) -> None:
    everything = stack_frames(buffer.gather_all(), 4).observation  # [3, T - 3, 4, 4]
    buffer.close()
    with diskbuf.open(buffer.path, dataset_window_shift=2, dataset_drop_remainder=True) as reader:
        dataset = reader.as_dataset(3, 5, single_deterministic_pass=True).map(frame_stacker(4))
        observation = np.concatenate([rows.observation for rows, _ in dataset], axis=1)
        ids = np.concatenate([info.ids for _, info in dataset], axis=1)
    assert (ids == np.arange(3, 3 + ids.shape[1])).all()
    assert ids.shape[1] >= everything.shape[1] - 1
    np.testing.assert_array_equal(observation, everything[:, : ids.shape[1]])


def test_short_windows_in_a_graph_are_refused_as_it_runs(buffer: diskbuf.UniformReplayBuffer) -> None:
    dataset = buffer.as_dataset(3, 5, single_deterministic_pass=True).map(frame_stacker(5))
    with pytest.raises(tf.errors.InvalidArgumentError, match="num_frames must be at most the steps of the rows"):
        for _ in dataset:
            pass


def test_a_stacker_can_be_sent_to_another_process(buffer: diskbuf.UniformReplayBuffer) -> None:
    element = next(buffer.as_numpy_iterator(2, num_steps=5, seed=1))
    rows, info = pickle.loads(pickle.dumps(frame_stacker(3, axis=-1)))(*element)
    np.testing.assert_array_equal(rows.observation, stack_frames(element[0], 3, axis=-1).observation)
    np.testing.assert_array_equal(info.ids, element[1].ids[:, 2:])


ROWS = {"step_type": np.zeros((2, 5), np.int32), "observation": {"camera": np.zeros((2, 5, 3), np.uint8)}}


@pytest.mark.parametrize("num_frames", [0, -1, 1.5, True, None])
def test_a_number_of_frames_that_is_none_is_refused(num_frames: Any) -> None:
    for call in (lambda: stack_frames(ROWS, num_frames), lambda: frame_stacker(num_frames)):
        with pytest.raises(diskbuf.OptionError, match="num_frames must be an int of at least 1, got"):
            call()


@pytest.mark.parametrize("convert", [lambda rows: rows, lambda rows: tf.nest.map_structure(tf.constant, rows)])
def test_what_cannot_be_stacked_is_refused(convert: Callable[[Any], Any]) -> None:
    rows = convert(ROWS)
    with pytest.raises(diskbuf.OptionError, match="num_frames must be at most the 5 steps of the rows, got 6"):
        stack_frames(rows, 6)
    for leaves in ("observation/lidar", "obs", "observation/cam", ("observation", "camera"), ()):
        with pytest.raises(
            diskbuf.SpecError, match=r"leaves must be .*There are \['observation/camera', 'step_type'\]"
        ):
            stack_frames(rows, 2, leaves=leaves)
    for axis in (2, -3, 0.5, None):
        with pytest.raises(diskbuf.OptionError, match="axis must be an int from -2 to 1 for leaf 'observation/camera'"):
            stack_frames(rows, 2, axis=axis)
    with pytest.raises(diskbuf.SpecError, match="rows must have a step_type"):
        stack_frames({"observation": rows["observation"]}, 2)
    one_lane = tf.nest.map_structure(lambda leaf: leaf[0], rows)
    with pytest.raises(diskbuf.SpecError, match=r"leaf 'step_type' must be \[B, T, ...\], got int32 \[5\]. Read with"):
        stack_frames(one_lane, 2)
    with pytest.raises(diskbuf.SpecError, match=r"leaf 'step_type' must be \[B, T\], got int32 \[2, 5, 1\]"):
        stack_frames(rows | {"step_type": rows["step_type"][..., None]}, 2)
    with pytest.raises(diskbuf.SpecError, match=r"leaf 'reward' must be \[2, 5, ...\] .*, got int32 \[2, 4\]"):
        stack_frames(rows | {"reward": rows["step_type"][:, 1:]}, 2)
    with pytest.raises(diskbuf.SpecError, match=r"leaf 'reward' must be a NumPy array or a tensor .*, got float"):
        stack_frames(rows | {"reward": 1.0}, 2)
