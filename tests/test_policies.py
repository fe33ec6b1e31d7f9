"""Policies: random, greedy, scripted and made of functions, and how they are saved."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskbuf.errors import (
    OptionError,
    SpecError,
    StoreExistsError,
    StoreFormatError,
    StoreNotFoundError,
    WindowError,
)
from diskbuf.policies import (
    EpsilonGreedyPolicy,
    GreedyPolicy,
    LinearSchedule,
    Policy,
    RandomPolicy,
    ScriptedPolicy,
    load_policy,
    policy_from,
    save_policy,
)
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


# ---- greedy


OBSERVATIONS = ArraySpec((2,), np.float32)
THREE = BoundedArraySpec((), np.int64, 0, 2)


def q_network(kernel: Any) -> Any:
    """The network whose values are observation @ kernel."""
    import keras

    network = keras.Sequential([keras.layers.Dense(len(kernel[0]), use_bias=False)])
    network.build((None, len(kernel)))
    network.set_weights([np.array(kernel, np.float32)])
    return network


def observed(*observations: Any) -> TimeStep:
    array = np.array(observations, np.float32)
    return restart(array, batch_size=len(array))


def test_the_greedy_policy_takes_the_highest_value_and_the_first_of_equal_ones() -> None:
    policy = GreedyPolicy(TIME_STEP_SPEC, THREE, q_network([[0, 1, 0], [0, 0, 1]]))
    step = policy.action(observed([1, 0], [0, 1], [-1, -1], [0, 0], [2, 2]))
    assert step.action.tolist() == [1, 2, 0, 0, 1]
    assert step.action.dtype == np.int64
    assert step.state == step.info == ()


def test_actions_begin_at_the_minimum_and_have_the_dtype_of_their_spec() -> None:
    policy = GreedyPolicy(TIME_STEP_SPEC, BoundedArraySpec((), np.uint8, 5, 7), q_network([[0, 1, 0], [0, 0, 1]]))
    action = policy.action(observed([1, 0], [0, 1], [-1, -1])).action
    assert action.tolist() == [6, 7, 5]
    assert action.dtype == np.uint8


def test_the_greedy_policy_acts_by_the_weights_that_the_network_has_now() -> None:
    network = q_network([[0, 1, 0], [0, 0, 1]])
    policy = GreedyPolicy(TIME_STEP_SPEC, THREE, network)
    assert policy.action(observed([1, 0])).action.tolist() == [1]
    network.set_weights([np.array([[0, 0, 1], [0, 0, 0]], np.float32)])
    assert policy.action(observed([1, 0])).action.tolist() == [2]
    assert policy.q_network is network


def test_a_greedy_policy_is_compiled_once_whatever_the_number_of_lanes() -> None:
    policy = GreedyPolicy(TIME_STEP_SPEC, THREE, q_network([[0, 1, 0], [0, 0, 1]]))
    for lanes in (1, 64, 3):
        assert policy.action(time_step(lanes)).action.shape == (lanes,)
    assert policy.on_leaves.experimental_get_tracing_count() == 1


def test_a_time_step_that_does_not_fit_is_refused() -> None:
    policy = GreedyPolicy(TIME_STEP_SPEC, THREE, q_network([[0, 1, 0], [0, 0, 1]]))
    with pytest.raises(SpecError, match=r"leaf 'observation' must be float32 \[B, 2\], got float32 \[1, 3\]"):
        policy.action(observed([1, 2, 3]))
    with pytest.raises(SpecError, match=r"leaf 'observation' must be float32 \[B, 2\], got float64 \[1, 2\]"):
        policy.action(restart(np.zeros((1, 2)), batch_size=1))
    with pytest.raises(SpecError, match=r"leaf 'step_type' must be int32 \[B\], got int32 \[\]"):
        policy.action(time_step(None))


def test_a_network_that_does_not_match_the_actions_is_refused() -> None:
    with pytest.raises(
        SpecError, match=r"q_network must give a float for each of the 3 actions, .* got float32 \[2, 2\]"
    ):
        GreedyPolicy(TIME_STEP_SPEC, THREE, q_network([[0, 1], [0, 0]]))
    with pytest.raises(SpecError, match="action_spec must be one scalar BoundedArraySpec of integers"):
        GreedyPolicy(TIME_STEP_SPEC, ArraySpec((), np.int64), q_network([[0, 1], [0, 0]]))


def test_sixty_four_lanes_get_their_actions_fast() -> None:
    import time

    from diskbuf.networks import QNetwork

    policy = GreedyPolicy(TIME_STEP_SPEC, THREE, QNetwork(OBSERVATIONS, THREE))
    step = time_step(64)
    seconds = []
    for _ in range(300):
        started = time.perf_counter()
        policy.action(step)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 2e-3  # about 0.3 ms; tracing anew, or layer by layer, takes several


# ---- epsilon-greedy


def always(action: int) -> Policy:
    return policy_from(lambda step: np.full(np.shape(step.step_type), action), TIME_STEP_SPEC, THREE)


def test_epsilon_is_how_often_lanes_act_at_random() -> None:
    policy = EpsilonGreedyPolicy(always(1), 0.3, seed=0)
    actions = np.array([policy.action(time_step(100)).action for _ in range(200)])
    assert actions.dtype == np.int64
    np.testing.assert_allclose(np.bincount(actions.ravel()) / actions.size, [0.1, 0.8, 0.1], atol=0.01)
    share = (actions != 1).mean(axis=1)  # of lanes, in each call: lanes explore each for itself
    assert 0.1 < share.min() < share.max() < 0.35


def test_epsilon_zero_never_and_one_always_explores() -> None:
    assert set(EpsilonGreedyPolicy(always(1), 0.0).action(time_step(1000)).action.tolist()) == {1}
    assert set(EpsilonGreedyPolicy(always(1), 1, seed=0).action(time_step(1000)).action.tolist()) == {0, 1, 2}


def test_equal_seeds_explore_alike_and_exploring_is_not_told_by_what_is_explored() -> None:
    first, same, other = (EpsilonGreedyPolicy(always(1), 0.5, seed=seed) for seed in (3, 3, 4))
    actions = [[policy.action(time_step(50)).action.tolist() for _ in range(20)] for policy in (first, same, other)]
    assert actions[0] == actions[1] != actions[2]
    explored = np.bincount(np.ravel(actions[0]), minlength=3)
    assert 100 < explored[0] < 240
    assert 100 < explored[2] < 240


def test_whole_actions_are_picked_from_nests_and_vectors() -> None:
    spec = {"arm": BoundedArraySpec((3,), np.float32, 1, 2), "turn": BoundedArraySpec((), np.int64, 1, 2)}
    zeros = policy_from(
        lambda step: {
            "arm": np.zeros((len(step.step_type), 3), np.float32),
            "turn": np.zeros(len(step.step_type), int),
        },
        TIME_STEP_SPEC,
        spec,
    )
    action = EpsilonGreedyPolicy(zeros, 0.5, seed=0).action(time_step(200)).action
    explored = action["turn"] > 0
    assert 50 < explored.sum() < 150
    np.testing.assert_array_equal((action["arm"] > 0).all(axis=1), explored)
    np.testing.assert_array_equal((action["arm"] > 0).any(axis=1), explored)


def test_epsilon_may_follow_the_steps_asked_for_without_boundaries() -> None:
    policy = EpsilonGreedyPolicy(always(1), LinearSchedule(initial_value=1, final_value=0, num_steps=100), seed=0)
    assert policy.epsilon == 1
    policy.action(time_step(10))
    assert policy.epsilon == pytest.approx(0.9)
    last = time_step(10)._replace(step_type=np.array([2] * 4 + [1] * 6, np.int32))
    policy.action(last)
    assert policy.epsilon == pytest.approx(0.84)
    for _ in range(20):
        policy.action(time_step(10))
    assert policy.epsilon == 0
    assert set(policy.action(time_step(1000)).action.tolist()) == {1}


def test_epsilon_may_follow_a_counter_of_ones_own() -> None:
    steps = iter([0, 0, 5, 10])
    policy = EpsilonGreedyPolicy(always(1), lambda step: step / 10, step=lambda: next(steps))
    assert [policy.epsilon for _ in range(3)] == [0, 0.5, 1]


def test_state_and_info_of_the_wrapped_policy_pass_through() -> None:
    specs = {"policy_state_spec": ArraySpec((), np.int64), "info_spec": {"p": ArraySpec((), np.float32)}}

    def act(step: TimeStep, state: Any) -> PolicyStep:
        return PolicyStep(np.zeros(len(state), np.int64), state + 1, {"p": np.ones(len(state), np.float32)})

    policy = EpsilonGreedyPolicy(policy_from(act, TIME_STEP_SPEC, THREE, **specs), 1.0)
    state = policy.get_initial_state(4)
    step = policy.action(time_step(4), policy.action(time_step(4), state).state)
    assert step.state.tolist() == [2] * 4
    assert step.info["p"].tolist() == [1] * 4
    assert policy.info_spec == specs["info_spec"]
    assert policy.policy_state_spec == specs["policy_state_spec"]


@pytest.mark.parametrize("epsilon", [-0.1, 1.5, float("nan"), "much", None, lambda step: 2, lambda: 0.1])
def test_an_epsilon_that_is_no_probability_is_refused(epsilon: Any) -> None:
    with pytest.raises(
        OptionError, match="epsilon must be a number from 0 to 1, or a function of the step to one, got"
    ):
        EpsilonGreedyPolicy(always(1), epsilon)


def test_a_step_that_tells_nothing_is_refused() -> None:
    with pytest.raises(
        OptionError, match=r"step must be None or a function that tells the step, got 5\. For a counter"
    ):
        EpsilonGreedyPolicy(always(1), lambda step: 0.1, step=5)  # type: ignore[arg-type]


def test_a_wrong_seed_of_an_epsilon_greedy_policy_is_refused() -> None:
    with pytest.raises(OptionError, match="seed must be None or an integer of at least 0, got -1"):
        EpsilonGreedyPolicy(always(1), 0.1, seed=-1)


# ---- schedules


def test_a_linear_schedule_goes_along_a_line_and_stays() -> None:
    schedule = LinearSchedule(initial_value=0.9, final_value=0.1, num_steps=8)
    assert [round(schedule(step), 6) for step in (-5, 0, 2, 4, 8, 9, 10**9)] == [0.9, 0.9, 0.7, 0.5, 0.1, 0.1, 0.1]
    assert LinearSchedule(initial_value=0, final_value=1, num_steps=2)(1) == 0.5


@pytest.mark.parametrize("wrong", [{"num_steps": 0}, {"final_value": float("inf")}, {"initial_value": "1"}])
def test_a_schedule_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(wrong))} must be"):
        LinearSchedule(**({"initial_value": 1.0, "final_value": 0.0, "num_steps": 5} | wrong))


# ---- scripted


def test_each_lane_plays_its_own_script() -> None:
    script = np.array([[0, 1, 2], [2, 1, 0]])
    policy = ScriptedPolicy(TIME_STEP_SPEC, THREE, script)
    state = policy.get_initial_state(2)
    for column in script.T:
        action, state, _ = policy.action(time_step(2), state)
        np.testing.assert_array_equal(action, column)
    with pytest.raises(WindowError, match="a script of 3 actions must not be asked for more, got call 4"):
        policy.action(time_step(2), state)
    assert policy.action(time_step(2)).action.tolist() == [0, 2]  # without a state from the beginning


def test_a_script_is_a_nest_of_whole_actions_that_nobody_can_write_to() -> None:
    spec = {"arm": ArraySpec((2,), np.float32), "turn": THREE}
    script = {"arm": np.arange(12, dtype=np.float32).reshape(2, 3, 2), "turn": np.zeros((2, 3), np.int64)}
    action = ScriptedPolicy(TIME_STEP_SPEC, spec, script).action(time_step(2)).action
    assert action["arm"].tolist() == [[0, 1], [6, 7]]
    action["arm"][:] = -1
    assert script["arm"].min() == 0


def test_the_actions_of_a_store_are_played_again(tmp_path: Any) -> None:
    import diskbuf
    from diskbuf.drivers import DynamicStepDriver
    from diskbuf.environments import suite_gym

    def collect(policy_of: Any) -> Any:
        with suite_gym.load("CartPole-v1", num_envs=3, seed=1) as env:
            policy = policy_of(env.time_step_spec(), env.action_spec())
            with diskbuf.UniformReplayBuffer(policy.collect_data_spec, batch_size=3, max_length=None) as buffer:
                DynamicStepDriver(env, policy, [buffer.add_batch], num_steps=150).run()
                return buffer.gather_all()

    rows = collect(lambda *specs: RandomPolicy(*specs, seed=5))
    assert rows.is_boundary().sum() > 3
    again = collect(lambda *specs: ScriptedPolicy(*specs, rows.action))
    for one, other in zip(rows, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_script_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        SpecError, match=r"script must be int64 \[B, T\], .* got int64 \[3\]\. Cast it, or give it the axis"
    ):
        ScriptedPolicy(TIME_STEP_SPEC, THREE, np.arange(3))
    with pytest.raises(SpecError, match=r"script must be int64 \[B, T\], .* got int32"):
        ScriptedPolicy(TIME_STEP_SPEC, THREE, np.zeros((2, 3), np.int32))
    with pytest.raises(SpecError, match=r"leaf '1' of the script must be .* with one B and T .* got int64 \[2, 4\]"):
        ScriptedPolicy(TIME_STEP_SPEC, (THREE, THREE), (np.zeros((2, 3), np.int64), np.zeros((2, 4), np.int64)))
    with pytest.raises(SpecError, match=r"leaf 'step_type' must have the script's batch shape \[2\], got \[3\]"):
        ScriptedPolicy(TIME_STEP_SPEC, THREE, np.zeros((2, 3), np.int64)).action(time_step(3))


# ---- functions


def test_a_function_of_the_time_step_is_a_policy() -> None:
    policy = policy_from(lambda step: (step.observation[:, 0] > 0).astype(np.int64), TIME_STEP_SPEC, THREE)
    step = policy.action(observed([1, 0], [-1, 0]), "kept")
    assert step.action.tolist() == [1, 0]
    assert step.state == "kept"
    assert policy.trajectory_spec == RandomPolicy(TIME_STEP_SPEC, THREE).trajectory_spec


@pytest.mark.parametrize("compiled", [False, True])
def test_a_function_may_have_state_and_info(compiled: bool) -> None:
    def act(step: TimeStep, state: Any) -> PolicyStep:
        return PolicyStep(action=state["count"], state={"count": state["count"] + 1}, info=step.observation)

    specs = {"policy_state_spec": {"count": ArraySpec((), np.int64)}, "info_spec": OBSERVATIONS}
    policy = policy_from(act, TIME_STEP_SPEC, THREE, compiled=compiled, **specs)
    step = policy.action(observed([1, 2], [3, 4]), policy.get_initial_state(2))
    step = policy.action(observed([5, 6], [7, 8]), step.state)
    assert step.action.tolist() == [1, 1]
    assert step.state["count"].tolist() == [2, 2]
    assert step.info.tolist() == [[5, 6], [7, 8]]


def test_what_a_function_returns_is_checked() -> None:
    def acting(action: Any, **specs: Any) -> Any:
        return policy_from(lambda *_: action, TIME_STEP_SPEC, THREE, **specs).action(time_step(2))

    with pytest.raises(SpecError, match=r"leaf 'action' of the policy step must be int64 \[2\], got int32 \[2\]"):
        acting(np.zeros(2, np.int32))
    with pytest.raises(SpecError, match=r"leaf 'action' of the policy step must be int64 \[2\], got int64 \[\]"):
        acting(np.int64(0))
    with pytest.raises(SpecError, match=r"items at 'info'"):
        acting(np.zeros(2, np.int64), info_spec=THREE)
    with pytest.raises(SpecError, match="with a policy_state_spec must return a PolicyStep, got int64"):
        acting(np.zeros(2, np.int64), policy_state_spec=THREE)
    with pytest.raises(OptionError, match="function must be callable with a time step, got 3"):
        policy_from(3, TIME_STEP_SPEC, THREE)  # type: ignore[arg-type]


def test_what_a_compiled_function_returns_is_checked_when_the_policy_is_made() -> None:
    import tensorflow as tf

    def made(function: Any) -> Policy:
        return policy_from(function, TIME_STEP_SPEC, THREE, compiled=True)

    with pytest.raises(SpecError, match=r"leaf 'action' of the policy step must be int64 \[B\], got float32 \[B, 2\]"):
        made(lambda step: step.observation)
    with pytest.raises(SpecError, match=r"leaf 'action' of the policy step must be int64 \[B\], got int64 \[\]"):
        made(lambda step: tf.constant(0, tf.int64))
    with pytest.raises(SpecError, match="items at 'action'"):
        made(lambda step: {"turn": step.step_type})


# ---- saved


def saved_and_loaded(policy: Policy, path: Any) -> Any:
    save_policy(policy, path)
    return load_policy(path)


def test_a_saved_policy_acts_as_it_did_and_keeps_its_specs(tmp_path: Any) -> None:
    network = q_network([[0, 1, 0], [0, 0, 1]])
    policy = GreedyPolicy(TIME_STEP_SPEC, THREE, network)
    loaded = saved_and_loaded(policy, tmp_path / "runs" / "greedy")
    network.set_weights([np.zeros((2, 3), np.float32)])  # the saved one has weights of its own
    assert loaded.action(observed([1, 0], [0, 1], [-1, -1])).action.tolist() == [1, 2, 0]
    assert loaded.trajectory_spec == policy.trajectory_spec
    assert loaded.time_step_spec == policy.time_step_spec
    assert loaded.action_spec == THREE
    assert type(loaded.time_step_spec) is TimeStep
    assert loaded.policy_state_spec == loaded.info_spec == ()


def test_state_info_and_nests_survive_saving_and_saving_again(tmp_path: Any) -> None:
    observation_spec = {"camera": ArraySpec((2, 2), np.uint8), "a_b": OBSERVATIONS, "a": {"b": OBSERVATIONS}}
    specs = {"policy_state_spec": (ArraySpec((2,), np.float32),), "info_spec": {"seen": ArraySpec((2, 2), np.uint8)}}
    action_spec = {"turn": THREE, "arm": ArraySpec((2,), np.float32)}

    def act(step: TimeStep, state: Any) -> PolicyStep:
        action = {"turn": THREE.maximum - 2 + 0 * step.observation["camera"][:, 0, 0], "arm": state[0]}
        action["turn"] = tf.cast(action["turn"], tf.int64)
        return PolicyStep(action, (state[0] + step.observation["a_b"] * scale,), {"seen": step.observation["camera"]})

    import tensorflow as tf

    scale = tf.Variable(2.0)
    policy = policy_from(act, time_step_spec(observation_spec), action_spec, compiled=True, **specs)
    once = saved_and_loaded(policy, tmp_path / "once")
    twice = saved_and_loaded(once, tmp_path / "twice")
    camera, vector = np.full((3, 2, 2), 7, np.uint8), np.ones((3, 2), np.float32)
    step = restart({"camera": camera, "a_b": vector, "a": {"b": vector}}, batch_size=3)
    for acting in (policy, once, twice):
        state = acting.action(step, acting.get_initial_state(3)).state
        result = acting.action(step, state)
        assert result.action["arm"].tolist() == [[2, 2]] * 3
        assert result.state[0].tolist() == [[4, 4]] * 3
        np.testing.assert_array_equal(result.info["seen"], camera)
        assert acting.policy_step_spec == policy.policy_step_spec


def test_a_loaded_policy_drives(tmp_path: Any) -> None:
    from diskbuf.drivers import DynamicStepDriver
    from diskbuf.environments import suite_gym
    from diskbuf.networks import QNetwork

    rows: dict[str, list[Any]] = {"made": [], "loaded": []}
    for name, seen in rows.items():
        with suite_gym.load("CartPole-v1", num_envs=4, seed=0) as env:
            specs = env.time_step_spec(), env.action_spec()
            network = QNetwork(specs[0].observation, specs[1], seed=0)
            policy: Any = GreedyPolicy(*specs, network)
            if name == "loaded":
                policy = saved_and_loaded(policy, tmp_path / "policy")
            DynamicStepDriver(env, policy, [seen.append], num_steps=100).run()
    assert len(rows["made"]) > 20
    for one, other in zip(*rows.values(), strict=True):
        np.testing.assert_array_equal(one.action, other.action)
        np.testing.assert_array_equal(one.observation, other.observation)


def test_tensorflow_alone_reads_a_saved_policy(tmp_path: Any) -> None:
    import tensorflow as tf

    save_policy(GreedyPolicy(TIME_STEP_SPEC, THREE, q_network([[0, 1, 0], [0, 0, 1]])), tmp_path / "policy")
    action = tf.saved_model.load(str(tmp_path / "policy")).signatures["action"]
    step = observed([1, 0], [0, 1])
    result = action(**{name: tf.constant(value) for name, value in step._asdict().items()})
    assert [tensor.numpy().tolist() for tensor in result.values()] == [[1, 2]]


def test_saving_replaces_nothing_and_leaves_nothing_half(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    policy = GreedyPolicy(TIME_STEP_SPEC, THREE, q_network([[0, 1, 0], [0, 0, 1]]))
    (tmp_path / "taken").mkdir()
    with pytest.raises(StoreExistsError, match=r"path must be free, got .*taken, which is there"):
        save_policy(policy, tmp_path / "taken")

    def fail(module: Any, path: str, **_: Any) -> None:
        (tmp_path / path).mkdir()
        raise OSError("No space left on device")

    monkeypatch.setattr(tf.saved_model, "save", fail)
    with pytest.raises(OSError, match="No space"):
        save_policy(policy, tmp_path / "full")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_policies_that_are_no_graph_are_not_saved(tmp_path: Any) -> None:
    for policy in (RandomPolicy(TIME_STEP_SPEC, THREE), EpsilonGreedyPolicy(always(1), 0.1), always(1)):
        with pytest.raises(OptionError, match=r"policy must be compiled to be saved, got .* Save a GreedyPolicy"):
            save_policy(policy, tmp_path / "policy")


def test_a_policy_that_can_compile_itself_is_saved_as_it_is_then(tmp_path: Any) -> None:
    class Changing(RandomPolicy):
        choice = 1

        def compiled(self) -> Policy:
            def act(step: TimeStep) -> Any:
                return tf.cast(0 * step.step_type + self.choice, tf.int64)

            return policy_from(act, TIME_STEP_SPEC, THREE, compiled=True)

    import tensorflow as tf

    policy = Changing(TIME_STEP_SPEC, THREE)
    policy.choice = 2
    loaded = saved_and_loaded(policy, tmp_path / "policy")
    policy.choice = 0
    assert loaded.action(observed([1, 0])).action.tolist() == [2]


def test_only_saved_policies_are_loaded(tmp_path: Any) -> None:
    import tensorflow as tf

    with pytest.raises(StoreNotFoundError, match=r"got .*nowhere: nothing is there"):
        load_policy(tmp_path / "nowhere")
    tf.saved_model.save(tf.Module(), str(tmp_path / "other"))
    with pytest.raises(StoreFormatError, match="must be a folder that save_policy wrote, got FileNotFoundError"):
        load_policy(tmp_path / "other")
    (tmp_path / "other" / "policy_specs.json").write_text('{"format": "diskbuf policy 2"}')
    with pytest.raises(StoreFormatError, match="must be of format 'diskbuf policy 1', got 'diskbuf policy 2'"):
        load_policy(tmp_path / "other")
