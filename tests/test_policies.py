"""Random actions: their bounds, their shapes, their seeds."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskbuf.errors import OptionError, SpecError
from diskbuf.policies import Policy, RandomPolicy
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import PolicyStep, TimeStep, Trajectory, restart, time_step_spec

TIME_STEP_SPEC = time_step_spec(ArraySpec((2,), np.float32))


def time_step(batch_size: int | None) -> TimeStep:
    shape = (2,) if batch_size is None else (batch_size, 2)
    return restart(np.zeros(shape, np.float32), batch_size=batch_size)


def draw(spec: Any, batch_size: int | None = 2000, seed: int = 0) -> Any:
    return RandomPolicy(TIME_STEP_SPEC, spec, seed=seed).action(time_step(batch_size)).action


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64", "uint64"])
def test_integers_hit_every_value_between_their_bounds_and_no_other(dtype: str) -> None:
    actions = draw(BoundedArraySpec((), dtype, 3, 7))
    assert actions.dtype == dtype
    assert sorted(set(actions.tolist())) == [3, 4, 5, 6, 7]
    assert np.bincount(actions.astype(int))[3:].min() > 300  # about 400 each


def test_an_integer_may_be_anything_its_dtype_holds() -> None:
    assert set(draw(ArraySpec((), np.int8), 20_000).tolist()) == set(range(-128, 128))
    everything = BoundedArraySpec((), np.uint64, 0, 2**64 - 1)
    assert draw(everything).max() > 2**63


def test_booleans_are_both() -> None:
    assert set(draw(ArraySpec((), np.bool_)).tolist()) == {False, True}


def test_floats_are_uniform_between_bounds_of_their_own() -> None:
    actions = draw(BoundedArraySpec((2,), np.float32, [-1, 10], [1, 20]))
    assert actions.dtype == np.float32
    assert actions.shape == (2000, 2)
    assert (actions >= [-1, 10]).all()
    assert (actions <= [1, 20]).all()
    np.testing.assert_allclose(actions.mean(axis=0), [0, 15], atol=0.3)
    np.testing.assert_allclose(actions.std(axis=0), [2 / 12**0.5, 10 / 12**0.5], rtol=0.05)


def test_the_widest_bounds_do_not_overflow() -> None:
    widest = np.finfo(np.float64).max
    actions = draw(BoundedArraySpec((), np.float64, -widest, widest))
    assert np.isfinite(actions).all()
    assert actions.min() < 0 < actions.max()


def test_a_missing_bound_makes_floats_normal_or_exponential() -> None:
    infinity = np.inf
    spec = BoundedArraySpec((4,), np.float32, [0, 2, -infinity, -infinity], [1, infinity, -3, infinity])
    actions = draw(spec, 20_000)
    assert actions.dtype == np.float32
    assert (actions >= spec.minimum).all()
    assert (actions <= spec.maximum).all()
    np.testing.assert_allclose(actions.mean(axis=0), [0.5, 3, -4, 0], atol=0.05)
    unbounded = draw(ArraySpec((), np.float64), 20_000)
    np.testing.assert_allclose([unbounded.mean(), unbounded.std()], [0, 1], atol=0.05)


@given(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from(["float32", "float64"]),
    st.integers(0, 1000),
)
def test_rounding_never_leaves_the_bounds(one: float, other: float, dtype: str, seed: int) -> None:
    low, high = min(one, other), max(one, other)
    spec = BoundedArraySpec((), dtype, low, high)
    actions = draw(spec, 50, seed)
    assert (actions >= spec.minimum).all()
    assert (actions <= spec.maximum).all()


def test_between_equal_bounds_there_is_one_value() -> None:
    assert set(draw(BoundedArraySpec((), np.float64, 1 / 3, 1 / 3)).tolist()) == {1 / 3}


def test_the_batch_may_change_its_size_from_call_to_call() -> None:
    policy = RandomPolicy(TIME_STEP_SPEC, BoundedArraySpec((3,), np.int64, 0, 9), seed=0)
    sizes = [5, 5, 2, None, 5, 100_000]
    shapes = [policy.action(time_step(size)).action.shape for size in sizes]
    assert shapes == [(5, 3), (5, 3), (2, 3), (3,), (5, 3), (100_000, 3)]


def test_writing_to_an_action_changes_no_other() -> None:
    policies = [RandomPolicy(TIME_STEP_SPEC, BoundedArraySpec((), np.int64, 0, 9), seed=0) for _ in range(2)]
    for _ in range(300):  # more than are drawn at a time
        written, kept = (policy.action(time_step(8)).action for policy in policies)
        np.testing.assert_array_equal(written, kept)
        written[:] = -1


def test_nests_are_drawn_leaf_by_leaf() -> None:
    spec = {"turn": BoundedArraySpec((), np.int64, 0, 1), "arms": (ArraySpec((3,), np.float32), ())}
    actions = draw(spec, 5)
    assert actions["turn"].shape == (5,)
    assert actions["arms"][0].shape == (5, 3)
    assert actions["arms"][1] == ()


def test_a_time_step_without_a_batch_axis_gets_an_action_without_one() -> None:
    assert draw(BoundedArraySpec((3,), np.int64, 0, 1), None).shape == (3,)
    assert draw(BoundedArraySpec((), np.int64, 0, 1), None).shape == ()
    assert isinstance(draw(BoundedArraySpec((), np.int64, 0, 1), None), np.ndarray)


def test_lanes_and_calls_differ_and_equal_seeds_do_not() -> None:
    spec = BoundedArraySpec((), np.float64, 0, 1)
    policies = [RandomPolicy(TIME_STEP_SPEC, spec, seed=seed) for seed in (7, 7, 8)]
    first, same, other = ([policy.action(time_step(4)).action for _ in range(3)] for policy in policies)
    assert np.array_equal(first, same)
    assert len(np.unique([first, other])) == 24


def test_the_state_comes_back_as_it_went_in() -> None:
    policy = RandomPolicy(TIME_STEP_SPEC, BoundedArraySpec((), np.int64, 0, 1))
    state = object()
    assert policy.action(time_step(1), state).state is state
    assert policy.action(time_step(1)).state == ()
    assert policy.get_initial_state(5) == ()


def test_a_policy_tells_the_spec_of_the_rows_it_collects() -> None:
    action_spec = BoundedArraySpec((), np.int64, 0, 1)
    policy = RandomPolicy(TIME_STEP_SPEC, action_spec)
    assert policy.trajectory_spec == policy.collect_data_spec
    assert policy.trajectory_spec == Trajectory(
        *TIME_STEP_SPEC._replace(reward=TIME_STEP_SPEC.observation)[:2],
        action_spec,
        (),
        *TIME_STEP_SPEC[:3],
    )
    assert policy.policy_step_spec == PolicyStep(action_spec, (), ())
    assert policy.time_step_spec is TIME_STEP_SPEC
    assert policy.action_spec is action_spec
    assert policy.policy_state_spec == policy.info_spec == ()


def test_a_policy_with_a_state_begins_with_zeros() -> None:
    class Recurrent(Policy):
        def action(self, time_step: TimeStep, policy_state: Any = ()) -> PolicyStep:
            raise NotImplementedError

    state_spec = {"carry": ArraySpec((3,), np.float32), "count": ArraySpec((), np.int64)}
    policy = Recurrent(TIME_STEP_SPEC, ArraySpec((), np.int64), policy_state_spec=state_spec)
    state = policy.get_initial_state(2)
    assert state["carry"].tolist() == [[0.0] * 3] * 2
    assert state["carry"].dtype == np.float32
    assert state["count"].dtype == np.int64


def test_complex_actions_are_refused() -> None:
    with pytest.raises(SpecError, match=r"leaf 'action/left' must be boolean, integer .* got complex64"):
        RandomPolicy(TIME_STEP_SPEC, {"left": ArraySpec((), np.complex64)})


@pytest.mark.parametrize("seed", [-1, "seven", 1.5])
def test_a_seed_that_is_none_is_refused(seed: Any) -> None:
    with pytest.raises(OptionError, match="seed must be None or an integer of at least 0, got"):
        RandomPolicy(TIME_STEP_SPEC, ArraySpec((), np.int64), seed=seed)


def test_a_misspelt_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="sede"):
        RandomPolicy(TIME_STEP_SPEC, ArraySpec((), np.int64), sede=1)
