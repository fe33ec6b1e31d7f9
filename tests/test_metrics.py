"""Metrics next to a plain count over the same rows; what they write to TensorBoard, to checkpoints and to the log."""

import collections
import logging
import subprocess
import sys
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from counter_environment import makers, reward_of
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from hypothesis import given
from hypothesis import strategies as st

from diskbuf.drivers import DynamicEpisodeDriver, DynamicStepDriver
from diskbuf.environments import GymEnvironment, suite_gym
from diskbuf.errors import OptionError, SpecError
from diskbuf.metrics import (
    AverageEpisodeLengthMetric,
    AverageReturnMetric,
    AverageReturnMultiMetric,
    EnvironmentSteps,
    MaxReturnMetric,
    Metric,
    MinReturnMetric,
    NumberOfEpisodes,
    export_metrics,
)
from diskbuf.policies import RandomPolicy
from diskbuf.specs import ArraySpec
from diskbuf.trajectories import Trajectory

SCALAR = ArraySpec((), np.float32, "score")
EPISODE_METRICS: dict[type[Metric], Callable[..., Metric]] = {
    AverageEpisodeLengthMetric: AverageEpisodeLengthMetric,
    AverageReturnMetric: AverageReturnMetric,
    MinReturnMetric: MinReturnMetric,
    MaxReturnMetric: MaxReturnMetric,
    AverageReturnMultiMetric: lambda *args, **kwargs: AverageReturnMultiMetric(SCALAR, *args, **kwargs),
}
METRICS: dict[type[Metric], Callable[..., Metric]] = {
    EnvironmentSteps: EnvironmentSteps,
    NumberOfEpisodes: NumberOfEpisodes,
    **EPISODE_METRICS,
}
every_metric = pytest.mark.parametrize("make", METRICS.values(), ids=[cls.__name__ for cls in METRICS])
every_episode_metric = pytest.mark.parametrize(
    "make", EPISODE_METRICS.values(), ids=[cls.__name__ for cls in EPISODE_METRICS]
)


def all_metrics(**kwargs: Any) -> list[Metric]:
    return [EnvironmentSteps(), NumberOfEpisodes(), *(make(**kwargs) for make in EPISODE_METRICS.values())]


def expected(rows: Sequence[Trajectory], buffer_size: int = 10) -> list[Any]:
    """What all_metrics() must come to, from whole episodes found one lane and one step at a time."""
    steps = episodes = 0
    running: dict[int, list[float]] = {}
    lengths: collections.deque[int] = collections.deque(maxlen=buffer_size)
    returns: collections.deque[float] = collections.deque(maxlen=buffer_size)
    for row in rows:
        for lane in range(len(row.step_type)):
            if row.step_type[lane] == 2:
                continue
            steps += 1
            if row.step_type[lane] == 0:
                running[lane] = []
            if lane in running:
                running[lane].append(float(row.reward[lane]))
            if row.next_step_type[lane] == 2:
                episodes += 1
                if lane in running:
                    rewards = running.pop(lane)
                    lengths.append(len(rewards))
                    returns.append(sum(rewards))
    limits = np.finfo(np.float32)
    average = np.mean(returns) if returns else 0
    lowest, highest = (min(returns), max(returns)) if returns else (limits.max, limits.min)
    return [steps, episodes, np.mean(lengths) if lengths else 0, average, lowest, highest, average]


def check(metrics: Sequence[Metric], rows: Sequence[Trajectory], buffer_size: int = 10) -> None:
    wanted = expected(rows, buffer_size)
    for metric, value in zip(metrics, wanted, strict=True):
        assert metric.result() == (value if isinstance(value, int) else np.float32(value)), metric


def row(step_type: Any, next_step_type: Any, reward: Any = None) -> Trajectory:
    step_types, next_step_types = np.array(step_type, np.int32), np.array(next_step_type, np.int32)
    rewards = np.ones(step_types.shape, np.float32) if reward is None else reward
    return Trajectory(step_types, (), (), (), next_step_types, rewards, np.ones(step_types.shape, np.float32))


def counter(lengths: Sequence[Sequence[int]], mode: AutoresetMode, *, is_wrapped: bool = False) -> GymEnvironment:
    vector_env = SyncVectorEnv(makers(lengths), autoreset_mode=mode)
    return suite_gym.wrap(VectorWrapper(vector_env) if is_wrapped else vector_env)


@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
@pytest.mark.parametrize("is_wrapped", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize(("driver_class", "count"), [(DynamicStepDriver, 32), (DynamicEpisodeDriver, 8)])
def test_counts_lengths_and_returns_are_those_of_the_real_steps_in_every_mode(
    mode: AutoresetMode, is_wrapped: bool, driver_class: Any, count: int
) -> None:
    rows: list[Trajectory] = []
    metrics = all_metrics()
    with counter([(3,), (5,)], mode, is_wrapped=is_wrapped) as env:
        policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=0)
        driver_class(env, policy, [rows.append, *metrics], count).run()
    assert len(rows) == 20  # both counts end there
    steps, episodes, length, *_ = (metric.result() for metric in metrics)
    assert (steps, episodes) == (32, 8)
    assert length == np.float32((5 * 3 + 3 * 5) / 8)
    check(metrics, rows)
    # and once more from what the environment says of itself, episode by episode
    last = [r for r in rows if r.is_last()[1]][-1]
    episode = int(last.observation[1, 1])
    actions = [int(r.action[1]) for r in rows if r.observation[1, 1] == episode and not r.is_boundary()[1]]
    of_that_episode = sum(reward_of(1, episode, t, action) for t, action in enumerate(actions))
    assert metrics[5].result() == np.float32(of_that_episode)  # the largest: the last one of lane 1


@given(
    lengths=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4),
    counts=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    mode=st.sampled_from(AutoresetMode),
    buffer_size=st.integers(1, 5),
)
def test_metrics_equal_a_plain_count_over_any_runs(
    lengths: list[list[int]], counts: list[int], mode: AutoresetMode, buffer_size: int
) -> None:
    rows: list[Trajectory] = []
    metrics = all_metrics(buffer_size=buffer_size)
    with counter(lengths, mode) as env:
        policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=0)
        steps = DynamicStepDriver(env, policy, [rows.append, *metrics], num_steps=7)
        episodes = DynamicEpisodeDriver(env, policy, [rows.append, *metrics])
        for count in counts:
            episodes.run(num_episodes=count)  # begins anew, so the step driver's last episodes are cut off
            steps.run()
    check(metrics, rows, buffer_size)


@given(
    types=st.lists(st.lists(st.sampled_from(["0-1", "0-2", "1-1", "1-2", "2-0"]), min_size=3, max_size=3), max_size=12)
)
def test_metrics_equal_a_plain_count_over_rows_that_begin_and_end_anywhere(types: list[list[str]]) -> None:
    rows: list[Trajectory] = []
    has_ended = [False] * 3
    for t, lanes in enumerate(types):
        # Rows as a driver makes them from somewhere on: after an end comes a boundary.
        lanes = ["2-0" if ended else lane for lane, ended in zip(lanes, has_ended, strict=True)]
        previous = [r.next_step_type for r in rows[-1:]] or [[1, 1, 1]]
        lanes = [f"0-{lane[2]}" if before == 0 else lane for lane, before in zip(lanes, previous[0], strict=True)]
        lanes = [lane if ended or lane[0] != "2" else "1-1" for lane, ended in zip(lanes, has_ended, strict=True)]
        lanes = [f"{lane[0]}-1" if lane in {"0-0"} else lane for lane in lanes]
        has_ended = [lane[2] == "2" for lane in lanes]
        rows.append(
            row([int(lane[0]) for lane in lanes], [int(lane[2]) for lane in lanes], np.arange(3, dtype=np.float32) + t)
        )
    metrics = all_metrics()
    for one in rows:
        for metric in metrics:
            assert metric(one) is one
    check(metrics, rows)


@every_metric
def test_a_boundary_row_counts_for_nothing(make: Callable[..., Metric]) -> None:
    metric, same = make(), make()
    for one in (row([0], [1]), row([1], [2]), row([0], [1]), row([1], [2])):
        metric(one)
        same(one)
        if one.is_last().any():
            for next_step_type in (2, 0):
                same(row([2], [next_step_type], np.array([np.nan], np.float32)))
    assert metric.result() == same.result()


@every_episode_metric
def test_an_episode_that_was_not_seen_from_its_start_gives_nothing(make: Callable[..., Metric]) -> None:
    metric = make()
    nothing = metric.result()
    for one in (row([1], [1]), row([1], [2]), row([2], [0])):
        metric(one)
    assert metric.result() == nothing
    for one in (row([0], [1]), row([1], [2])):
        metric(one)
    assert metric.result() == 2  # rewards of 1, so the length is the return


@every_episode_metric
def test_an_episode_that_was_cut_off_gives_nothing(make: Callable[..., Metric]) -> None:
    metric = make()
    for one in (row([0], [1]), row([1], [1]), row([0], [1]), row([1], [2])):
        metric(one)
    assert metric.result() == 2


@every_metric
def test_reset_forgets_everything_running_episodes_too(make: Callable[..., Metric]) -> None:
    metric = make()
    nothing = metric.result()
    for one in (row([0], [2]), row([2], [0]), row([0], [1])):
        metric(one)
    assert metric.result() != nothing
    metric.reset()
    assert metric.result() == nothing
    if not isinstance(metric, EnvironmentSteps | NumberOfEpisodes):
        metric(row([1], [2]))
        assert metric.result() == nothing


def test_before_any_episode_results_are_those_of_tf_agents() -> None:
    limits = np.finfo(np.float32)
    assert [metric.result() for metric in all_metrics()] == [0, 0, 0, 0, limits.max, limits.min, 0]


@every_metric
def test_results_are_numpy_scalars_of_tf_agents_dtypes(make: Callable[..., Metric]) -> None:
    metric = make()
    for one in (row([0], [2]), row([2], [0])):
        counts = isinstance(metric, EnvironmentSteps | NumberOfEpisodes)
        assert type(metric.result()) is (np.int64 if counts else np.float32)
        metric(one)


def test_the_last_buffer_size_episodes_count() -> None:
    metrics = [make(buffer_size=3) for make in (AverageReturnMetric, MinReturnMetric, MaxReturnMetric)]
    for reward in (-9.0, 9.0, 1.0, 2.0, 6.0):
        for metric in metrics:
            metric(row([0], [2], np.array([reward], np.float32)))
    assert [metric.result() for metric in metrics] == [3, 1, 6]
    lanes = [make(buffer_size=2) for make in (AverageReturnMetric, MinReturnMetric, MaxReturnMetric)]
    for metric in lanes:
        metric(row([0] * 4, [2] * 4, np.array([1, 2, 3, 5], np.float32)))
    assert [metric.result() for metric in lanes] == [4, 3, 5]


def test_returns_are_summed_in_double_precision() -> None:
    metric = AverageReturnMetric()
    metric(row([0], [1], np.array([2.0**24], np.float32)))
    for _ in range(7):
        metric(row([1], [1]))  # float32 would lose each of these
    metric(row([1], [2]))
    assert metric.result() == 2**24 + 8


def test_a_vector_of_rewards_counts_with_its_sum() -> None:
    for make in (AverageReturnMetric, MinReturnMetric, MaxReturnMetric):
        metric = make()
        metric(row([0, 0], [2, 1], np.array([[1, 2, 3], [0, 0, 0]], np.float32)))
        assert metric.result() == 6


NEST = {"speed": ArraySpec((), np.float64, "speed"), "costs": (ArraySpec((2,), np.float32), ArraySpec((), np.int32))}


def nest_row(step_type: int, next_step_type: int, number: int) -> Trajectory:
    costs = np.array([[number, -number], [1, 1]], np.float32), np.array([number, 7], np.int32)
    return row([step_type, 1], [next_step_type, 1], {"speed": np.array([10.0 * number, 0]), "costs": costs})


def test_a_nest_of_rewards_gives_a_nest_of_average_returns() -> None:
    metric = AverageReturnMultiMetric(NEST, batch_size=2)
    np.testing.assert_equal(metric.result(), {"speed": 0.0, "costs": (np.zeros(2, np.float32), np.float32(0))})
    for number, (step_type, next_step_type) in enumerate([(0, 1), (1, 2), (2, 0), (0, 2)], start=1):
        metric(nest_row(step_type, next_step_type, number))
    # Of returns 1 + 2 and 4, and nothing from the other lane.
    result = metric.result()
    np.testing.assert_equal(result, {"speed": 35.0, "costs": (np.array([3.5, -3.5], np.float32), np.float32(3.5))})
    assert (result["speed"].dtype, result["costs"][0].dtype, result["costs"][1].dtype) == (
        np.float64,
        np.float32,
        np.float32,  # of an int leaf
    )


def test_a_vector_of_rewards_has_an_average_for_each_element() -> None:
    metric = AverageReturnMultiMetric(ArraySpec((2,), np.float32))
    metric(row([0], [2], np.array([[1, 2]], np.float32)))
    assert metric.result().tolist() == [1, 2]


BAD_ROWS = [
    (row(0, 1), r"leaves 'step_type' and 'next_step_type' must be \[B\], got \[\] and \[\] in .* x\[None\]"),
    (row([[0]], [[1]]), r"leaves 'step_type' and 'next_step_type' must be \[B\], got \[1, 1\]"),
    (row([0], [1, 1]), r"must be \[B\], got \[1\] and \[2\] in"),
]


@every_metric
@pytest.mark.parametrize(("one", "message"), BAD_ROWS)
def test_what_is_no_row_of_lanes_is_refused(make: Callable[..., Metric], one: Trajectory, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()(one)


@every_episode_metric
def test_another_number_of_lanes_is_refused_and_changes_nothing(make: Callable[..., Metric]) -> None:
    for metric in (make(), make(batch_size=2)):
        metric(row([0, 0], [1, 1]))
        with pytest.raises(SpecError, match=r"leaf 'step_type' must be \[2\], the batch size of .*, got \[3\]\. Make"):
            metric(row([0] * 3, [2] * 3))
        metric(row([1, 1], [2, 2]))
        assert metric.result() == 2
    with pytest.raises(SpecError, match=r"must be \[1\], the batch size of .*, with batch_size=3"):
        make(batch_size=1)(row([0] * 3, [2] * 3))


BAD_REWARDS = [
    (np.zeros(3, np.float32), r"leaf 'reward' must be numbers \[2, \.\.\.\], got float32 \[3\]"),
    (np.float32(1), r"leaf 'reward' must be numbers \[2, \.\.\.\], got float32 \[\]"),
    (np.array([None, 1]), r"leaf 'reward' must be numbers \[2, \.\.\.\], got object \[2\]"),
    ({"a": np.zeros(2)}, r"leaf 'reward' must be .* A nest of rewards goes to AverageReturnMultiMetric"),
]


@pytest.mark.parametrize(("reward", "message"), BAD_REWARDS)
@pytest.mark.parametrize("make", [AverageReturnMetric, MinReturnMetric, MaxReturnMetric])
def test_a_reward_that_is_no_number_a_lane_is_refused(make: Callable[..., Metric], reward: Any, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        make()(row([0, 0], [2, 2], reward))


def test_a_reward_that_does_not_fit_its_spec_is_refused_by_leaf() -> None:
    metric = AverageReturnMultiMetric(NEST)
    good = nest_row(0, 1, 1)
    with pytest.raises(SpecError, match=r"the reward doesn't fit the reward_spec: .*Add the key 'costs'"):
        metric(good._replace(reward={"speed": np.zeros(2)}))
    with pytest.raises(SpecError, match=r"leaf 'reward/costs/0' must be numbers \[2, 2\], got float64 \[2\]"):
        metric(good._replace(reward={"speed": np.zeros(2), "costs": (np.zeros(2), np.zeros(2))}))
    with pytest.raises(SpecError, match=r"leaf 'reward' must be real numbers, got complex64"):
        AverageReturnMultiMetric(ArraySpec((), np.complex64))


@every_metric
def test_arguments_outside_their_rule_are_refused(make: Callable[..., Metric]) -> None:
    with pytest.raises(OptionError, match="name must be a str of at least one character, got ''"):
        make(name="")
    with pytest.raises(OptionError, match=r'prefix must be a str, got None\. Use "" for no prefix'):
        make(prefix=None)
    with pytest.raises(TypeError, match="prefx"):
        make(prefx="a")


@every_episode_metric
@pytest.mark.parametrize("number", [0, 2.5, "3"])
def test_sizes_below_one_are_refused(make: Callable[..., Metric], number: Any) -> None:
    with pytest.raises(OptionError, match=f"batch_size must be an integer of at least 1, got {number!r}"):
        make(batch_size=number)
    with pytest.raises(OptionError, match=f"buffer_size must be an integer of at least 1, got {number!r}"):
        make(buffer_size=number)


def test_names_are_those_of_tf_agents() -> None:
    assert [metric.name for metric in all_metrics()] == [
        "EnvironmentSteps",
        "NumberOfEpisodes",
        "AverageEpisodeLength",
        "AverageReturn",
        "MinReturn",
        "MaxReturn",
        "AverageReturnMultiMetric",
    ]
    assert {metric.prefix for metric in all_metrics()} == {"Metrics"}
    metric = AverageReturnMetric("Score", "Evaluation")
    assert (metric.name, metric.prefix, repr(metric)) == ("Score", "Evaluation", "AverageReturnMetric('Score')")


@every_metric
def test_a_row_of_64_lanes_takes_microseconds(make: Callable[..., Metric]) -> None:
    metric, rng = make(), np.random.default_rng(0)
    one = row(np.where(rng.random(64) < 0.05, 0, 1), np.where(rng.random(64) < 0.05, 2, 1))
    metric(row([0] * 64, [1] * 64))
    seconds = min(timeit.repeat(lambda: metric(one), number=20, repeat=200)) / 20
    assert seconds < 50e-6  # 2 to 10 on an idle core of 2020


# ---- Beside TensorFlow


class OtherTrajectory(NamedTuple):
    """A Trajectory of another package, fields in another order."""

    reward: Any
    next_step_type: Any
    step_type: Any


@every_metric
def test_tensors_and_other_trajectories_will_do(make: Callable[..., Metric]) -> None:
    import tensorflow as tf

    plain, tensors = make(), make()
    for one in (row([0, 0], [1, 2]), row([1, 2], [2, 0])):
        plain(one)
        tensors(OtherTrajectory(*map(tf.constant, (one.reward, one.next_step_type, one.step_type))))
    assert plain.result() == tensors.result()


def test_symbolic_tensors_are_refused_with_advice() -> None:
    import tensorflow as tf

    metric = EnvironmentSteps()

    @tf.function  # type: ignore[untyped-decorator]
    def traced(step_type: Any) -> None:
        with pytest.raises(SpecError, match=r"a metric must be given arrays or eager tensors, got a symbolic one"):
            metric(OtherTrajectory(step_type, step_type, step_type))

    traced(tf.constant([0, 1]))
    assert metric.result() == 0


def scalars_in(folder: Path) -> dict[tuple[str, int], float]:
    import tensorflow as tf
    from tensorflow.core.util import event_pb2

    (file,) = folder.iterdir()
    events = [event_pb2.Event.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(file))]
    return {
        (value.tag, event.step): tf.make_ndarray(value.tensor).item()
        for event in events
        for value in event.summary.value
    }


def test_summaries_have_tf_agents_tags(tmp_path: Path) -> None:
    import tensorflow as tf

    steps, average, bare = EnvironmentSteps(), AverageReturnMetric(), MaxReturnMetric("Best", "")
    multi = AverageReturnMultiMetric(NEST)
    vector = AverageReturnMultiMetric(ArraySpec((2,), np.float32, "Reward"), "Vector")
    single = AverageReturnMultiMetric(ArraySpec((), np.float32), "Single")
    for metric in (steps, average, bare, single):
        metric(row([0, 0], [2, 1]))
    multi(nest_row(0, 2, 4))
    vector(row([0], [2], np.array([[1, 2]], np.float32)))
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        for metric in (steps, average, bare, multi, vector, single):
            metric.tf_summaries(train_step=7)
        average.tf_summaries(tf.Variable(8, dtype=tf.int64), step_metrics=[steps, average])
        bare.tf_summaries(step_metrics=(steps,))
    assert scalars_in(tmp_path) == {
        ("Metrics/EnvironmentSteps", 7): 2,
        ("Metrics/AverageReturn", 7): 1,
        ("Best", 7): 1,
        ("Metrics/AverageReturnMultiMetric/speed", 7): 40,
        ("Metrics/AverageReturnMultiMetric/Metric0/0", 7): 4,  # costs come first: leaves are in the order of their keys
        ("Metrics/AverageReturnMultiMetric/Metric0/1", 7): -4,
        ("Metrics/AverageReturnMultiMetric/Metric1", 7): 4,
        ("Metrics/Vector/Reward0", 7): 1,
        ("Metrics/Vector/Reward1", 7): 2,
        ("Metrics/Single/Metric", 7): 1,
        ("Metrics/AverageReturn", 8): 1,
        ("Metrics_vs_EnvironmentSteps/AverageReturn", 2): 1,
        ("vs_EnvironmentSteps/Best", 2): 1,
    }


def test_without_a_writer_nothing_is_written() -> None:
    assert [bool(written) for written in AverageReturnMetric().tf_summaries(1)] == [False]


@every_metric
def test_a_checkpoint_holds_everything_the_middle_of_episodes_too(make: Callable[..., Metric], tmp_path: Path) -> None:
    import tensorflow as tf

    # Returns of 1 and 2 before, of 0.25 + 9 and of -4 - 5.5 after.
    rewards = np.array([[1, 1], [1, 7], [7, 0.25], [-4, 9], [-5.5, 7]], np.float32)
    first = [row([0, 0], [1, 2], rewards[0]), row([1, 2], [2, 0], rewards[1]), row([2, 0], [0, 1], rewards[2])]
    then = [row([0, 1], [1, 2], rewards[3]), row([1, 2], [2, 0], rewards[4])]
    metric = make()
    for one in first:
        metric(one)
    prefix = tf.train.Checkpoint(metric=metric).save(str(tmp_path / "checkpoint"))
    saved = metric.result()
    for one in then:
        metric(one)
    gone_on = metric.result()
    assert gone_on != saved
    other = make()
    tf.train.Checkpoint(metric=other).restore(prefix).assert_consumed()
    assert other.result() == saved
    for one in then:
        other(one)
    assert other.result() == gone_on
    tf.train.Checkpoint(metric=metric).restore(prefix).assert_consumed()  # back in time
    assert metric.result() == saved


def test_a_checkpoint_holds_a_nest_and_a_list_of_metrics(tmp_path: Path) -> None:
    import tensorflow as tf

    def made() -> list[Metric]:
        return [AverageReturnMultiMetric(NEST, batch_size=2), AverageReturnMetric(), NumberOfEpisodes()]

    metrics = made()
    for number, (step_type, next_step_type) in enumerate([(0, 1), (1, 2), (2, 0), (0, 2)], start=1):
        metrics[0](nest_row(step_type, next_step_type, number))
    metrics[2](row([0], [2]))
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(metrics=metrics), str(tmp_path), max_to_keep=1)
    manager.save()
    others = made()
    tf.train.Checkpoint(metrics=others).restore(manager.latest_checkpoint).assert_consumed()
    for metric, other in zip(metrics, others, strict=True):
        np.testing.assert_equal(metric.result(), other.result())


def test_a_checkpoint_of_a_metric_that_has_seen_nothing_restores_to_nothing(tmp_path: Path) -> None:
    import tensorflow as tf

    prefix = tf.train.Checkpoint(metric=AverageReturnMetric()).save(str(tmp_path / "checkpoint"))
    metric = AverageReturnMetric()
    metric(row([0], [2]))
    tf.train.Checkpoint(metric=metric).restore(prefix)
    assert metric.result() == 0


def test_a_smaller_buffer_keeps_the_newest_episodes_of_a_checkpoint() -> None:
    metric, smaller = AverageReturnMetric(), AverageReturnMetric(buffer_size=2)
    for reward in (9.0, 1.0, 2.0):
        metric(row([0], [2], np.array([reward], np.float32)))
    smaller.deserialize(metric.serialize())
    assert smaller.result() == 1.5


def test_a_checkpoint_of_another_metric_or_size_is_refused_and_changes_nothing() -> None:
    metric = AverageReturnMetric(batch_size=2)
    metric(row([0, 0], [2, 2]))
    wider = AverageReturnMetric()
    wider(row([0] * 3, [1] * 3))
    with pytest.raises(
        SpecError, match=r"a checkpoint for AverageReturn.* must hold 2 lanes and rewards .*, got 3 lanes"
    ):
        metric.deserialize(wider.serialize())
    with pytest.raises(SpecError, match="must hold a AverageReturnMetric, got 'MinReturnMetric'"):
        metric.deserialize(MinReturnMetric().serialize())
    with pytest.raises(SpecError, match="must hold a AverageReturnMetric, got 3"):
        metric.deserialize("3")
    multi = AverageReturnMultiMetric(NEST, batch_size=2)
    other = AverageReturnMultiMetric({"speed": SCALAR}, batch_size=2)
    with pytest.raises(SpecError, match="Give the metric the batch_size and reward_spec"):
        other.deserialize(multi.serialize())
    assert metric.result() == 1


def test_metrics_need_no_tensorflow_and_may_be_older_than_its_import(tmp_path: Path) -> None:
    code = f"""
import sys
import numpy as np
from diskbuf.metrics import AverageReturnMetric, export_metrics
from diskbuf.trajectories import PolicyStep, from_transition, restart, termination
metric = AverageReturnMetric()
zeros = np.zeros((1, 1))
metric(from_transition(restart(zeros, batch_size=1), PolicyStep(zeros), termination(zeros, [3.0])))
assert isinstance(metric, AverageReturnMetric)
export_metrics(1, [metric])
assert metric.result() == 3
assert not any(name.split(".")[0] in ("tensorflow", "keras") for name in sys.modules)
import tensorflow as tf
checkpoint = tf.train.Checkpoint(metric=metric)
prefix = checkpoint.save({str(tmp_path / "checkpoint")!r})
metric.reset()
checkpoint.restore(prefix)
assert metric.result() == 3
assert isinstance(metric, AverageReturnMetric)
assert type(metric).__name__ == "AverageReturnMetric"
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


# ---- The log


class LossInfo(NamedTuple):
    loss: Any
    extra: Any = ()


def test_export_logs_a_line_for_each_metric_and_for_the_loss(caplog: pytest.LogCaptureFixture) -> None:
    import tensorflow as tf

    steps, average, multi = EnvironmentSteps(), AverageReturnMetric(), AverageReturnMultiMetric(NEST)
    steps(row([0, 0], [1, 2]))
    average(row([0, 0], [1, 2], np.array([0.1, 0.1], np.float32)))
    multi(nest_row(0, 2, 4))
    with caplog.at_level(logging.INFO, logger="diskbuf.metrics"):
        export_metrics(12, [steps, average, multi], LossInfo(tf.constant(0.25)))
        export_metrics(13, [steps])
    assert {(record.name, record.levelname) for record in caplog.records} == {("diskbuf.metrics", "INFO")}
    assert caplog.messages == [
        "[step=12] EnvironmentSteps = 2.",
        "[step=12] AverageReturn = 0.1.",
        "[step=12] AverageReturnMultiMetric = {costs/0: [ 4. -4.], costs/1: 4.0, speed: 40.0}.",
        "[step=12] loss = 0.25.",
        "[step=13] EnvironmentSteps = 2.",
    ]


def test_a_loss_info_without_a_loss_is_refused_before_any_line(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, logger="diskbuf.metrics"),
        pytest.raises(OptionError, match=r"loss_info must have an attribute loss, got 0\.5\. Pass what train"),
    ):
        export_metrics(1, [EnvironmentSteps()], 0.5)
    assert caplog.messages == []
