"""Time steps, rows and their specs."""

import numpy as np
import pytest

from diskbuf import trajectories
from diskbuf.errors import SpecError
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import PolicyStep, StepType, TimeStep, Trajectory, from_transition

OBSERVATION = np.zeros((2, 3), np.float32)


def test_step_types_make_int32_arrays_and_equal_their_numbers() -> None:
    assert [int(kind) for kind in (StepType.FIRST, StepType.MID, StepType.LAST)] == [0, 1, 2]
    assert np.full(3, StepType.LAST).dtype == np.int32
    assert np.asarray([StepType.FIRST, StepType.MID]).dtype == np.int32
    assert (np.array([0, 1, 2], np.int32) == StepType.MID).tolist() == [False, True, False]


def test_the_fields_stand_in_tf_agents_order() -> None:
    assert TimeStep._fields == ("step_type", "reward", "discount", "observation")
    assert PolicyStep._fields == ("action", "state", "info")
    assert Trajectory._fields == (
        "step_type",
        "observation",
        "action",
        "policy_info",
        "next_step_type",
        "reward",
        "discount",
    )


@pytest.mark.parametrize(
    ("time_step", "step_type", "reward", "discount"),
    [
        (trajectories.restart(OBSERVATION, batch_size=2), 0, [0, 0], [1, 1]),
        (trajectories.transition(OBSERVATION, [1.5, 2]), 1, [1.5, 2], [1, 1]),
        (trajectories.transition(OBSERVATION, [1, 2], discount=[0.5, 0.25]), 1, [1, 2], [0.5, 0.25]),
        (trajectories.termination(OBSERVATION, np.array([1, 2])), 2, [1, 2], [0, 0]),
        (trajectories.truncation(OBSERVATION, [1, 2]), 2, [1, 2], [1, 1]),
    ],
    ids=["restart", "transition", "discounted", "termination", "truncation"],
)
def test_each_constructor_gives_whole_lanes_of_the_specs_dtypes(
    time_step: TimeStep, step_type: int, reward: list[float], discount: list[float]
) -> None:
    assert time_step.step_type.tolist() == [step_type] * 2
    assert time_step.reward.tolist() == reward
    assert time_step.discount.tolist() == discount
    assert (time_step.step_type.dtype, time_step.reward.dtype, time_step.discount.dtype) == (
        np.int32,
        np.float32,
        np.float32,
    )
    assert time_step.observation is OBSERVATION


def test_without_a_batch_axis_leaves_are_scalars() -> None:
    for time_step in (trajectories.restart(OBSERVATION[0]), trajectories.termination(OBSERVATION[0], 1.0)):
        assert time_step.step_type.shape == time_step.reward.shape == time_step.discount.shape == ()


def test_a_time_steps_reward_is_a_copy() -> None:
    reward = np.ones(2, np.float32)
    time_step = trajectories.transition(OBSERVATION, reward)
    reward += 1
    assert time_step.reward.tolist() == [1, 1]


def test_rewards_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(SpecError, match=r"reward must be real numbers, got object \[2\]\. Is a value None"):
        trajectories.transition(OBSERVATION, [1.0, None])


def test_a_discount_of_another_length_is_refused() -> None:
    with pytest.raises(SpecError, match=r"discount must be one number or have the reward's shape \[2\], got \[3\]"):
        trajectories.transition(OBSERVATION, [1.0, 2.0], discount=[1.0, 1.0, 1.0])


def test_time_steps_know_their_kind_lane_by_lane() -> None:
    time_step = TimeStep(np.array([0, 1, 2], np.int32), np.zeros(3), np.ones(3), ())
    assert time_step.is_first().tolist() == [True, False, False]
    assert time_step.is_mid().tolist() == [False, True, False]
    assert time_step.is_last().tolist() == [False, False, True]


def test_rows_know_their_kind_by_both_of_their_step_types() -> None:
    # first, mid, last, an episode of one step, boundary
    step_type, next_step_type = np.array([[0, 1, 1, 0, 2], [1, 1, 2, 2, 0]], np.int32)
    row = Trajectory(step_type, (), (), (), next_step_type, np.zeros(5), np.ones(5))
    assert row.is_first().tolist() == [True, False, False, True, False]
    assert row.is_mid().tolist() == [False, True, False, False, False]
    assert row.is_last().tolist() == [False, False, True, True, False]
    assert row.is_boundary().tolist() == [False, False, False, False, True]


def test_a_row_takes_reward_and_discount_from_the_step_after_the_action() -> None:
    time_step = trajectories.transition(OBSERVATION, [1, 2])
    next_time_step = trajectories.termination(OBSERVATION + 1, [3, 4])
    action_step = PolicyStep(np.array([5, 6]), state="not stored", info={"log_probability": np.zeros(2)})
    row = from_transition(time_step, action_step, next_time_step)
    assert row.step_type is time_step.step_type
    assert row.observation is time_step.observation
    assert row.action is action_step.action
    assert row.policy_info is action_step.info
    assert row.next_step_type is next_time_step.step_type
    assert row.reward is next_time_step.reward
    assert row.discount is next_time_step.discount


def test_a_policy_step_needs_neither_state_nor_info() -> None:
    assert PolicyStep(3) == (3, (), ())


def test_the_trajectory_spec_describes_rows_without_their_batch_axis() -> None:
    observation = {"camera": ArraySpec((8, 8), np.uint8)}
    action = BoundedArraySpec((), np.int64, 0, 3)
    spec = trajectories.trajectory_spec(trajectories.time_step_spec(observation), PolicyStep(action))
    assert spec == Trajectory(
        step_type=ArraySpec((), np.int32),
        observation=observation,
        action=action,
        policy_info=(),
        next_step_type=ArraySpec((), np.int32),
        reward=ArraySpec((), np.float32),
        discount=BoundedArraySpec((), np.float32, 0, 1),
    )


def test_rows_of_tensors_know_their_kind_inside_a_tf_function() -> None:
    tf = pytest.importorskip("tensorflow")

    @tf.function
    def kinds(step_type: object, next_step_type: object) -> tuple[object, ...]:
        row = Trajectory(step_type, (), (), (), next_step_type, (), ())
        return row.is_first(), row.is_mid(), row.is_last(), row.is_boundary()

    first, mid, last, boundary = kinds(tf.constant([0, 1, 1, 2]), tf.constant([1, 1, 2, 0]))
    assert first.numpy().tolist() == [True, False, False, False]
    assert mid.numpy().tolist() == [False, True, False, False]
    assert last.numpy().tolist() == [False, False, True, False]
    assert boundary.numpy().tolist() == [False, False, False, True]


def test_rows_of_lists_know_their_kind() -> None:
    row = Trajectory([0, 1, 2], (), (), (), [1, 2, 0], (), ())
    assert row.is_boundary().tolist() == [False, False, True]
