"""Deep Q-learning: targets worked out by hand, and what is promised of training."""

import itertools
import os
import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import diskbuf
from diskbuf.agents import (
    DdqnAgent,
    DqnAgent,
    LossInfo,
    element_wise_huber_loss,
    element_wise_squared_loss,
)
from diskbuf.agents.n_step import n_step
from diskbuf.drivers import DynamicStepDriver
from diskbuf.environments import suite_gym
from diskbuf.errors import OptionError, SpecError
from diskbuf.networks import QNetwork
from diskbuf.policies import EpsilonGreedyPolicy, GreedyPolicy, LinearSchedule, RandomPolicy
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import StepType, Trajectory, time_step_spec

ROOT = Path(__file__).resolve().parents[1]
FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST
STATES, ACTIONS = 4, 2
SPECS = time_step_spec(ArraySpec((STATES,), np.float32)), BoundedArraySpec((), np.int64, 0, ACTIONS - 1)

# A table of values as a network: observations are one-hot, and row s of the kernel holds the values in state s.
VALUES = [[1.0, 2.0], [10.0, 20.0], [50.0, 40.0], [0.5, 0.25]]
TARGET_VALUES = [[3.0, 4.0], [70.0, 60.0], [5.0, 6.0], [7.0, 9.0]]


def table(values: Any) -> keras.Model:
    network = keras.Sequential([keras.Input((STATES,)), keras.layers.Dense(ACTIONS, use_bias=False)])
    network.set_weights([np.array(values, np.float32)])
    return network


def values_of(network: keras.Model) -> Any:
    return network.weights[0].numpy()


def make(kind: Any = DqnAgent, **arguments: Any) -> Any:
    defaults: dict[str, Any] = {
        "q_network": table(VALUES),
        "target_q_network": table(TARGET_VALUES),
        "optimizer": keras.optimizers.SGD(1.0),
        "gamma": 0.5,
        "td_errors_loss_fn": element_wise_squared_loss,
    }
    return kind(*SPECS, **(defaults | arguments))


class Row(NamedTuple):
    """One row, its observation by the number of the state."""

    step_type: Any
    state: int
    action: int
    next_step_type: Any
    reward: float
    discount: float = 1.0


def experience(*windows: list[Row]) -> Trajectory:
    """[B, T] of B windows."""
    step_type, state, action, next_step_type, reward, discount = (
        np.array([[row[field] for row in window] for window in windows]) for field in range(6)
    )
    return Trajectory(
        step_type=step_type.astype(np.int32),
        observation=np.eye(STATES, dtype=np.float32)[state],
        action=action.astype(np.int64),
        policy_info=(),
        next_step_type=next_step_type.astype(np.int32),
        reward=reward.astype(np.float32),
        discount=discount.astype(np.float32),
    )


def td_errors(agent: Any, *windows: list[Row]) -> Any:
    return agent.loss(experience(*windows)).extra.td_error.numpy().tolist()


ORDINARY = [Row(MID, 0, 1, MID, 8.0), Row(MID, 1, 0, MID, -1.0)]
TERMINATION = [Row(MID, 0, 1, LAST, 8.0, 0.0), Row(LAST, 1, 0, FIRST, 0.0)]
TRUNCATION = [Row(MID, 0, 1, LAST, 8.0, 1.0), Row(LAST, 1, 0, FIRST, 0.0)]
BOUNDARY = [Row(LAST, 1, 0, FIRST, 0.0), Row(FIRST, 0, 1, MID, 8.0)]
GAP = [Row(MID, 0, 1, MID, 8.0), Row(FIRST, 1, 0, MID, -1.0)]


def test_an_ordinary_transition_is_bootstrapped_from_the_target_network() -> None:
    assert td_errors(make(), ORDINARY) == [8 + 0.5 * 70 - 2]


def test_a_terminated_episode_is_not_bootstrapped() -> None:
    assert td_errors(make(), TERMINATION) == [8 - 2]


def test_a_truncated_episode_is_bootstrapped_from_the_observation_of_the_boundary_row() -> None:
    assert td_errors(make(), TRUNCATION) == [8 + 0.5 * 70 - 2]


def test_a_boundary_row_is_no_transition() -> None:
    assert td_errors(make(), BOUNDARY, ORDINARY) == [0, 41]
    loss, extra = make().loss(experience(BOUNDARY, ORDINARY))
    assert extra.td_loss.numpy().tolist() == [0, 41**2]
    assert float(loss) == 41**2 / 2  # divided by all windows, as TF-Agents does


def test_a_row_is_no_transition_where_the_next_row_is_not_what_came_of_it() -> None:
    assert td_errors(make(), GAP) == [0]


def test_an_environments_discount_is_on_top_of_the_agents() -> None:
    assert td_errors(make(), [ORDINARY[0]._replace(discount=0.25), ORDINARY[1]]) == [8 + 0.5 * 0.25 * 70 - 2]


def test_double_dqn_lets_the_network_choose_and_the_target_network_value() -> None:
    assert td_errors(make(DdqnAgent), ORDINARY) == [8 + 0.5 * 60 - 2]
    assert td_errors(make(DdqnAgent), TERMINATION, BOUNDARY) == [8 - 2, 0]


def three(*rows: Row) -> Any:
    return td_errors(make(n_step_update=3), list(rows))


def test_n_steps_add_up_their_discounted_rewards() -> None:
    rows = Row(FIRST, 0, 0, MID, 8.0), Row(MID, 3, 0, MID, 4.0, 0.5), Row(MID, 2, 0, MID, 2.0), Row(MID, 1, 0, MID, 9.0)
    assert three(*rows) == [8 + 0.5 * 4 + 0.5 * 0.25 * 2 + 0.5 * 0.25 * 0.5 * 70 - 1]


def test_n_steps_end_with_a_termination_among_them() -> None:
    rows = (
        Row(MID, 0, 0, MID, 8.0),
        Row(MID, 3, 0, LAST, 4.0, 0.0),
        Row(LAST, 2, 0, FIRST, 0.0),
        Row(FIRST, 1, 0, MID, 9.0),
    )
    assert three(*rows) == [8 + 0.5 * 4 - 1]


def test_n_steps_end_with_a_truncation_among_them_and_bootstrap_from_the_boundary_row() -> None:
    rows = Row(MID, 0, 0, MID, 8.0), Row(MID, 3, 0, LAST, 4.0), Row(LAST, 2, 0, FIRST, 0.0), Row(FIRST, 1, 0, MID, 9.0)
    assert three(*rows) == [8 + 0.5 * 4 + 0.25 * 6 - 1]


def test_n_steps_end_before_a_gap() -> None:
    rows = Row(MID, 0, 0, MID, 8.0), Row(MID, 3, 0, MID, 4.0), Row(FIRST, 2, 0, MID, 5.0), Row(MID, 1, 0, MID, 9.0)
    assert three(*rows) == [8 + 0.5 * 9 - 1]


def test_n_steps_from_a_boundary_row_count_for_nothing() -> None:
    rows = Row(LAST, 0, 0, FIRST, 0.0), Row(FIRST, 3, 0, MID, 4.0), Row(MID, 2, 0, MID, 5.0), Row(MID, 1, 0, MID, 9.0)
    assert three(*rows) == [0]


def test_rows_that_do_not_count_may_hold_anything() -> None:
    nan = float("nan")
    rows = (
        Row(MID, 0, 0, LAST, 8.0),
        Row(LAST, 2, 0, FIRST, nan, nan),
        Row(FIRST, 3, 0, MID, nan, nan),
        Row(MID, 1, 0, MID, nan),
    )
    assert three(*rows) == [8 + 0.5 * 6 - 1]
    agent = make()
    loss, _ = agent.train(experience([Row(LAST, 1, 0, FIRST, nan, nan), ORDINARY[0]], ORDINARY))
    assert float(loss) == 41**2 / 2
    assert np.isfinite(values_of(agent.q_network)).all()


def naive(rows: list[Row], gamma: float) -> tuple[float, float, int]:
    """The return of a window, row by row."""
    total, factor, length = 0.0, 1.0, 0
    for row, next_row in itertools.pairwise(rows):
        if row.step_type == LAST or row.next_step_type != next_row.step_type:
            break
        total += factor * row.reward
        factor *= gamma * row.discount
        length += 1
    return total, factor, length


step_types = st.sampled_from([FIRST, MID, LAST])
rows_of = st.builds(
    Row,
    step_types,
    st.integers(0, STATES - 1),
    st.just(0),
    step_types,
    st.integers(-8, 8).map(float),
    st.sampled_from([0.0, 0.5, 1.0]),
)


@given(
    st.integers(1, 5).flatmap(
        lambda n: st.lists(st.lists(rows_of, min_size=n + 1, max_size=n + 1), min_size=1, max_size=4)
    ),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.booleans(),
)
@settings(max_examples=150)
def test_n_step_is_the_naive_loop(windows: list[list[Row]], gamma: float, is_joined: bool) -> None:
    if is_joined:  # otherwise most windows end at once
        windows = [
            [
                row._replace(next_step_type=after.step_type)
                for row, after in zip(rows, [*rows[1:], rows[0]], strict=True)
            ]
            for rows in windows
        ]
    rows = experience(*windows)
    steps = n_step(
        *(tf.constant(leaf) for leaf in (rows.step_type, rows.next_step_type, rows.reward, rows.discount)), gamma=gamma
    )
    for lane, window in enumerate(windows):
        total, factor, length = naive(window, gamma)
        assert int(steps.length[lane]) == length
        assert bool(steps.is_valid[lane]) == (length > 0)
        assert float(steps.reward[lane]) == total
        assert float(steps.discount[lane]) == factor


# ---- training


def test_a_training_step_moves_the_value_of_the_action_taken_and_no_other() -> None:
    agent = make(optimizer=keras.optimizers.SGD(0.25), target_update_period=100)
    before = values_of(agent.q_network)
    loss_info = agent.train(experience(ORDINARY))
    assert isinstance(loss_info, LossInfo)
    assert float(loss_info.loss) == 41**2
    moved = values_of(agent.q_network) - before
    assert moved[0, 1] == 0.25 * 2 * 41  # the target has no gradient: row 1 stays
    moved[0, 1] = 0
    assert not moved.any()
    assert values_of(agent.target_q_network).tolist() == TARGET_VALUES
    assert int(agent.train_step_counter) == 1


def test_losses_are_huber_unless_another_is_given() -> None:
    agent = make(td_errors_loss_fn=None)
    assert agent.loss(experience(ORDINARY)).extra.td_loss.numpy().tolist() == [40.5]
    errors = tf.constant([-3.0, -1.0, -0.5, 0.0, 0.5, 1.0, 3.0])
    assert element_wise_huber_loss(errors, tf.zeros(7)).numpy().tolist() == [2.5, 0.5, 0.125, 0, 0.125, 0.5, 2.5]
    assert element_wise_squared_loss(errors, tf.ones(7)).numpy().tolist() == [16, 4, 2.25, 1, 0.25, 0, 4]


def test_rewards_are_scaled() -> None:
    assert td_errors(make(reward_scale_factor=0.25), ORDINARY, TERMINATION) == [2 + 35 - 2, 2 - 2]


def test_weights_scale_the_loss_of_each_window_but_not_what_is_told() -> None:
    agent = make()
    rows = experience(ORDINARY, TERMINATION)
    for weights in ([0.5, 2.0], np.array([0.5, 2.0]), tf.constant([0.5, 2.0])):
        loss, extra = agent.loss(rows, weights)
        assert float(loss) == (0.5 * 41**2 + 2 * 6**2) / 2
        assert extra.td_loss.numpy().tolist() == [41**2, 6**2]
        assert extra.td_error.numpy().tolist() == [41, 6]
    assert float(agent.loss(rows, 3.0).loss) == 3 * float(agent.loss(rows).loss)
    before = values_of(agent.q_network)
    agent.train(rows, [0.0, 0.0])
    assert values_of(agent.q_network).tolist() == before.tolist()


def test_losses_of_the_network_itself_are_added() -> None:
    network = keras.Sequential(
        [
            keras.Input((STATES,)),
            keras.layers.Dense(ACTIONS, use_bias=False, kernel_regularizer=keras.regularizers.L2(0.5)),
        ]
    )
    network.set_weights([np.array(VALUES, np.float32)])
    loss, extra = make(q_network=network).loss(experience(ORDINARY))
    assert float(loss) == pytest.approx(41**2 + 0.5 * np.square(VALUES).sum())
    assert extra.td_loss.numpy().tolist() == [41**2]


def test_the_gradient_of_each_variable_is_clipped_to_a_norm() -> None:
    agent = make(gradient_clipping=2.0)
    before = values_of(agent.q_network)
    agent.train(experience(ORDINARY, [ORDINARY[0]._replace(action=0), ORDINARY[1]]))
    moved = values_of(agent.q_network) - before
    assert np.linalg.norm(moved) == pytest.approx(2)
    assert moved[0, 0] / moved[0, 1] == pytest.approx(42 / 41)
    unclipped = make(gradient_clipping=1e6)
    unclipped.train(experience(ORDINARY))
    assert values_of(unclipped.q_network)[0, 1] == 2 + 2 * 41


def test_the_target_network_follows_every_period() -> None:
    agent = make(target_update_period=3, optimizer=keras.optimizers.SGD(0.01))
    for step in range(1, 8):
        before = values_of(agent.target_q_network).tolist()
        agent.train(experience(ORDINARY))
        target, network = values_of(agent.target_q_network).tolist(), values_of(agent.q_network).tolist()
        assert target == (network if step % 3 == 0 else before)
        assert network != before


def test_the_target_network_follows_by_tau() -> None:
    agent = make(target_update_tau=0.25, optimizer=keras.optimizers.SGD(0.01))
    agent.train(experience(ORDINARY))
    expected = 0.75 * np.array(TARGET_VALUES) + 0.25 * values_of(agent.q_network)
    np.testing.assert_allclose(values_of(agent.target_q_network), expected, rtol=1e-6)


def test_statistics_are_copied_and_dropout_is_of_training_only() -> None:
    layers = [
        keras.Input((STATES,)),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(ACTIONS),
    ]
    agent = make(q_network=keras.Sequential(layers), target_q_network=None, target_update_tau=0.5)
    rows = experience(ORDINARY, [row._replace(state=3) for row in TERMINATION])
    before = agent.q_network.layers[0].moving_mean.numpy()
    assert len({float(agent.loss(rows).loss) for _ in range(8)}) == 1
    np.testing.assert_array_equal(agent.q_network.layers[0].moving_mean, before)
    assert len({float(agent.train(rows, 0.0).extra.td_loss[0]) for _ in range(8)}) > 1
    agent.train(rows)
    after = agent.q_network.layers[0].moving_mean.numpy()
    assert not np.array_equal(before, after)
    np.testing.assert_array_equal(agent.target_q_network.layers[0].moving_mean, after)


def test_a_target_network_is_a_copy_with_weights_of_its_own() -> None:
    agent = make(target_q_network=None)
    assert values_of(agent.target_q_network).tolist() == VALUES
    assert agent.target_q_network.weights[0] is not agent.q_network.weights[0]
    given = make()
    assert values_of(given.target_q_network).tolist() == TARGET_VALUES
    given.initialize()
    assert values_of(given.target_q_network).tolist() == VALUES


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_trains_nothing(broken: float) -> None:
    agent = make()
    with pytest.raises(tf.errors.InvalidArgumentError, match="the loss must be finite"):
        agent.train(experience([ORDINARY[0]._replace(reward=broken), ORDINARY[1]]))
    assert values_of(agent.q_network).tolist() == VALUES
    assert values_of(agent.target_q_network).tolist() == TARGET_VALUES
    assert int(agent.train_step_counter) == 0


def test_training_is_compiled_once_for_each_shape() -> None:
    agent = make()
    for _ in range(3):
        agent.train(experience(ORDINARY))
        agent.train(experience(ORDINARY, BOUNDARY))
        agent.train(tf.nest.map_structure(tf.constant, experience(ORDINARY, BOUNDARY)))
    assert agent._compiled_train.experimental_get_tracing_count() == 2


def test_training_may_be_part_of_a_graph_of_ones_own(tmp_path: Path) -> None:
    agent, plain = make(), make()
    dataset = tf.data.Dataset.from_tensors(experience(ORDINARY, BOUNDARY)).repeat(5)

    @tf.function
    def train(rows: Any) -> Any:
        loss = 0.0
        for element in rows:
            loss = agent.train(element).loss
        return loss

    loss = train(dataset)
    for _ in range(5):
        expected = plain.train(experience(ORDINARY, BOUNDARY)).loss
    assert float(loss) == float(expected)
    assert int(agent.train_step_counter) == 5
    assert values_of(agent.q_network).tolist() == values_of(plain.q_network).tolist()


def test_actions_may_begin_above_zero_and_observations_be_nests() -> None:
    specs = time_step_spec({"a": ArraySpec((2,), np.float32), "b": ArraySpec((), np.uint8)})
    action_spec = BoundedArraySpec((), np.int32, 5, 6)
    network = QNetwork(specs.observation, action_spec, seed=0)
    agent = DqnAgent(specs, action_spec, network, keras.optimizers.SGD(0.1), gamma=0.0)
    observation = {"a": np.ones((1, 2, 2), np.float32), "b": np.array([[3, 4]], np.uint8)}
    rows = experience(ORDINARY)._replace(observation=observation, action=np.array([[6, 5]], np.int32))
    value = network({"a": np.ones((1, 2), np.float32), "b": np.array([3], np.uint8)})[0, 1]
    assert float(agent.loss(rows).extra.td_error[0]) == pytest.approx(8 - float(value))


def test_the_policys_info_does_not_matter() -> None:
    rows = experience(ORDINARY)._replace(policy_info={"probability": np.ones((1, 2))})
    assert float(make().train(rows).loss) == 41**2


# ---- what an agent is


def test_policies_act_by_the_network_and_explore_by_the_training_steps() -> None:
    epsilon = LinearSchedule(initial_value=1.0, final_value=0.0, num_steps=4)
    agent = make(epsilon_greedy=epsilon, seed=1)
    assert isinstance(agent.policy, GreedyPolicy)
    assert isinstance(agent.collect_policy, EpsilonGreedyPolicy)
    assert agent.collect_policy.wrapped_policy is agent.policy
    agent.train(experience(ORDINARY))
    assert agent.collect_policy.epsilon == 0.75
    from diskbuf.trajectories import restart

    step = restart(np.eye(STATES, dtype=np.float32), batch_size=STATES)
    assert agent.policy.action(step).action.tolist() == values_of(agent.q_network).argmax(axis=1).tolist()
    same = make(epsilon_greedy=0.5, seed=1), make(epsilon_greedy=0.5, seed=1)
    assert len({str([a.collect_policy.action(step).action.tolist() for _ in range(20)]) for a in same}) == 1


def test_an_agent_tells_its_specs() -> None:
    agent = make(n_step_update=4)
    assert agent.collect_data_spec == RandomPolicy(*SPECS).trajectory_spec
    assert agent.time_step_spec == SPECS[0]
    assert agent.action_spec == SPECS[1]
    assert agent.train_sequence_length == 5
    assert isinstance(agent, tf.Module)
    assert isinstance(agent, DqnAgent)
    assert type(agent).__name__ == "DqnAgent"
    assert isinstance(make(DdqnAgent), DqnAgent)


def test_a_checkpoint_brings_back_everything_that_training_goes_on_from(tmp_path: Path) -> None:
    def agent() -> Any:
        return make(optimizer=keras.optimizers.Adam(0.1), target_update_period=2, target_update_tau=0.5)

    rows = experience(ORDINARY, TERMINATION)
    straight, interrupted, resumed = agent(), agent(), agent()
    for _ in range(3):
        interrupted.train(rows)
    path = tf.train.Checkpoint(agent=interrupted).save(str(tmp_path / "checkpoint"))
    for before_restoring in (False, True):
        resumed = agent()
        if before_restoring:
            resumed.train(rows)
        tf.train.Checkpoint(agent=resumed).restore(path).assert_consumed()
        assert int(resumed.train_step_counter) == 3
        for _ in range(3):
            resumed.train(rows)
        if not before_restoring:
            for _ in range(6):
                straight.train(rows)
        np.testing.assert_array_equal(values_of(resumed.q_network), values_of(straight.q_network))
        np.testing.assert_array_equal(values_of(resumed.target_q_network), values_of(straight.target_q_network))
        assert int(resumed.train_step_counter) == 6


def test_a_counter_of_ones_own_counts() -> None:
    counter = tf.Variable(10, dtype=tf.int32)
    agent = make(train_step_counter=counter)
    agent.train(experience(ORDINARY))
    assert int(counter) == 11
    assert agent.train_step_counter is counter


# ---- what is refused


def test_experience_of_another_number_of_steps_is_refused() -> None:
    with pytest.raises(
        SpecError,
        match=r"leaf '\w+' of experience must be .*, for n_step_update \+ 1 = 2 steps, got \w+ \[1, 4.*\]\. "
        r"Read with as_dataset\(sample_batch_size, num_steps=2\)",
    ):
        make().train(experience(ORDINARY * 2))
    with pytest.raises(SpecError, match=r"for n_step_update \+ 1 = 4 steps"):
        make(n_step_update=3).train(experience(ORDINARY))


def test_experience_of_another_kind_is_refused() -> None:
    agent, rows = make(), experience(ORDINARY)
    with pytest.raises(SpecError, match=r"experience must be a Trajectory, got .*pass the first"):
        agent.train((rows, ()))
    with pytest.raises(
        SpecError, match=r"leaf 'observation' of experience must be float32 \[B, 2, 4\], .* float32 \[1, 2, 3\]"
    ):
        agent.train(rows._replace(observation=rows.observation[..., :3]))
    with pytest.raises(SpecError, match=r"leaf 'action' of experience must be int64 \[B, 2\], .* got int32 \[1, 2\]"):
        agent.train(rows._replace(action=rows.action.astype(np.int32)))
    with pytest.raises(SpecError, match=r"experience must be like collect_data_spec: items at 'observation'"):
        agent.train(rows._replace(observation={"a": rows.observation}))
    with pytest.raises(SpecError, match=r"weights must be one number or float32 \[1\], one for each window, got \[3\]"):
        agent.train(rows, [1.0, 2.0, 3.0])
    assert values_of(agent.q_network).tolist() == VALUES


def test_what_is_wrong_inside_a_graph_is_told_too() -> None:
    agent = make()
    with pytest.raises(Exception, match="experience must be int32"):
        tf.function(agent.train)(experience(ORDINARY * 2))


@pytest.mark.parametrize("label", ["q_network", "target_q_network"])
def test_a_network_that_does_not_match_the_actions_is_refused(label: str) -> None:
    with pytest.raises(
        SpecError, match=rf"{label} must give a float for each of the 2 actions, .* got float32 \[2, 3\]"
    ):
        make(**{label: keras.Sequential([keras.layers.Dense(3)])})


@pytest.mark.parametrize(
    "spec", [ArraySpec((), np.int64), BoundedArraySpec((2,), np.int64, 0, 1), BoundedArraySpec((), np.float32, 0, 1)]
)
def test_actions_that_cannot_be_counted_are_refused(spec: ArraySpec) -> None:
    with pytest.raises(SpecError, match="action_spec must be one scalar BoundedArraySpec of integers"):
        DqnAgent(SPECS[0], spec, table(VALUES), keras.optimizers.SGD(1.0))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"n_step_update": 0}, "n_step_update must be an integer of at least 1, got 0"),
        ({"target_update_period": 1.5}, "target_update_period must be an integer of at least 1, got 1.5"),
        ({"target_update_tau": 0.0}, "target_update_tau must be a finite number, above 0, at most 1, got 0.0"),
        ({"target_update_tau": 1.1}, "target_update_tau must be a finite number, above 0, at most 1, got 1.1"),
        ({"gamma": -0.1}, "gamma must be a finite number, at least 0, at most 1, got -0.1"),
        ({"gamma": 1.01}, "gamma must be a finite number, at least 0, at most 1, got 1.01"),
        ({"reward_scale_factor": float("nan")}, "reward_scale_factor must be a finite number, got nan"),
        ({"gradient_clipping": 0}, "gradient_clipping must be a finite number, above 0, got 0"),
        ({"epsilon_greedy": 2}, "epsilon must be a number from 0 to 1"),
        ({"seed": -1}, "seed must be None or an integer"),
        ({"optimizer": "sgd"}, "optimizer must be a keras.Optimizer, got str"),
        ({"q_network": len}, "q_network must be a keras.Model, got builtin_function"),
        ({"train_step_counter": 3}, "train_step_counter must be a scalar integer tf.Variable, got int"),
        ({"td_errors_loss_fn": keras.losses.Huber()}, r"a loss for each element, .* got float32 \[\] for B = 3"),
    ],
)
def test_an_argument_outside_its_rule_is_refused(wrong: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(**wrong)


def test_an_optimizer_in_use_is_refused() -> None:
    optimizer = keras.optimizers.Adam()
    make(optimizer=optimizer)
    with pytest.raises(OptionError, match="optimizer must be one that trains nothing else, got one in use"):
        make(optimizer=optimizer)


def test_networks_that_share_or_lack_weights_are_refused() -> None:
    network = table(VALUES)
    with pytest.raises(OptionError, match="target_q_network must have weights of its own, got 1 that are"):
        make(q_network=network, target_q_network=network)
    with pytest.raises(OptionError, match="target_q_network must have weights of the same shapes as q_network"):
        make(target_q_network=keras.Sequential([keras.layers.Dense(ACTIONS)]))
    network.trainable = False
    with pytest.raises(OptionError, match="q_network must have trainable weights"):
        make(q_network=network)


def test_a_network_that_keras_cannot_copy_needs_a_target_network() -> None:
    class Own(keras.Model):  # type: ignore[misc]
        def __init__(self, units: int) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(units)

        def call(self, observation: Any) -> Any:
            return self.dense(observation)

        def get_config(self) -> Any:
            raise NotImplementedError

    with pytest.raises(OptionError, match="q_network must be a model that Keras can copy, got NotImplementedError"):
        make(q_network=Own(ACTIONS), target_q_network=None)
    agent = make(q_network=Own(ACTIONS), target_q_network=Own(ACTIONS))
    agent.train(experience(ORDINARY))


def tags_in(folder: Path) -> set[str]:
    """What was written for TensorBoard."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    events = (event for file in folder.iterdir() for event in EventFileLoader(str(file)).Load())
    return {value.tag for event in events for value in event.summary.value}


def test_summaries_are_written_when_asked_for(tmp_path: Path) -> None:
    for name, flags in {"both": ("debug_summaries", "summarize_grads_and_vars"), "none": ()}.items():
        writer = tf.summary.create_file_writer(str(tmp_path / name))
        with writer.as_default():
            make(**dict.fromkeys(flags, True)).train(experience(ORDINARY))
        writer.close()
    assert tags_in(tmp_path / "none") == {"dqn/loss"}
    tags = {re.sub(r"dense(_\d+)?|sequential(_\d+)?/", "", tag) for tag in tags_in(tmp_path / "both")}
    assert tags == {
        "dqn/loss",
        "dqn/td_error",
        "dqn/td_loss",
        "dqn/values",
        "dqn/next_values",
        "dqn/weights//kernel",
        "dqn/gradients//kernel",
    }


# ---- learning


class Chain(gymnasium.Env[Any, Any]):
    """Five places in a row. Right of the last is 1 and the end; left of the first is 0.05 and the first again."""

    observation_space = gymnasium.spaces.Box(0, 1, (5,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(5))
        return np.eye(5, dtype=np.float32)[self.place], {}

    def step(self, action: Any) -> Any:
        place = self.place + (1 if action else -1)
        reward = {-1: 0.05, 5: 1.0}.get(place, 0.0)
        self.place = min(max(place, 0), 4)
        return np.eye(5, dtype=np.float32)[self.place], reward, place == 5, False, {}


def optimal_values(gamma: float) -> Any:
    """The values of the chain, [5, 2], by value iteration."""
    values = np.zeros((5, 2))
    for _ in range(500):
        best = values.max(axis=1)
        values[:, 0] = [0.05 + gamma * best[0], *(gamma * best[:4])]
        values[:, 1] = [*(gamma * best[1:]), 1.0]
    return values


@pytest.mark.parametrize(("kind", "n"), [(DqnAgent, 1), (DdqnAgent, 1), (DdqnAgent, 3)])
def test_the_chain_is_solved_from_a_store_on_disk(kind: Any, n: int, tmp_path: Path) -> None:
    gamma, path = 0.9, tmp_path / "chain.zarr"

    def make_chain() -> Any:
        return gymnasium.wrappers.TimeLimit(Chain(), 6)  # many truncations, which must not lower the values

    with suite_gym.wrap([make_chain] * 8, seed=0) as env:
        specs = env.time_step_spec(), env.action_spec()
        wanted = optimal_values(gamma)
        behavior = RandomPolicy(*specs, seed=0)
        if n > 1:  # several steps on the way of another policy would be the values of that one
            greedy = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, use_bias=False)])
            greedy.set_weights([wanted.astype(np.float32)])
            behavior = EpsilonGreedyPolicy(GreedyPolicy(*specs, greedy), 0.02, seed=0)
        with diskbuf.UniformReplayBuffer(
            behavior.collect_data_spec, batch_size=8, max_length=None, path=path
        ) as buffer:
            DynamicStepDriver(env, behavior, [buffer.add_batch], num_steps=4000).run()
    network = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros")])
    agent = kind(
        *specs,
        network,
        keras.optimizers.Adam(0.02),
        gamma=gamma,
        n_step_update=n,
        target_update_period=5,
        td_errors_loss_fn=element_wise_squared_loss,
    )
    with diskbuf.open(path, seed=0) as buffer:
        for rows, _ in buffer.as_dataset(sample_batch_size=128, num_steps=n + 1).take(600):
            agent.train(rows)
    learnt = values_of(network)
    assert learnt.argmax(axis=1).tolist() == wanted.argmax(axis=1).tolist() == [1] * 5
    np.testing.assert_allclose(learnt[:, 1], wanted[:, 1], atol=0.03)
    if n == 1:
        np.testing.assert_allclose(learnt, wanted, atol=0.01)


# ---- beside TF-Agents


def test_losses_gradients_and_target_updates_are_tf_agents(tmp_path: Path) -> None:
    """Where both mean the same: TF-Agents sums n steps across a truncation, so there is none in windows of several."""
    python = ROOT / ".venv-tf-agents" / "bin" / "python"
    if not (python.parents[1] / ".installed").exists():
        reason = "needs TF-Agents: make peers"
        pytest.fail(reason) if os.environ.get("DISKBUF_PEERS") == "required" else pytest.skip(reason)
    rng = np.random.default_rng(0)
    shapes = {"kernel_0": (STATES, 8), "bias_0": (8,), "kernel_1": (8, 3), "bias_1": (3,)}
    given_arrays = {
        prefix + name: rng.normal(size=shape).astype(np.float32)
        for prefix in ("", "target_")
        for name, shape in shapes.items()
    }
    given_arrays["weights"] = rng.uniform(0, 2, 64).astype(np.float32)
    rows = {n: some_experience(rng, n) for n in (1, 3)}
    for n, window in rows.items():
        given_arrays |= {f"{name}_{n}": leaf for name, leaf in window._asdict().items() if name != "policy_info"}
    np.savez(tmp_path / "given.npz", **given_arrays)
    run = subprocess.run(
        [python, ROOT / "tests/peers/dqn.py", tmp_path / "given.npz", tmp_path / "result.npz"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr[-6000:]
    theirs = dict(np.load(tmp_path / "result.npz"))

    def network(prefix: str) -> keras.Model:
        model = keras.Sequential([keras.Input((STATES,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
        model.set_weights([given_arrays[f"{prefix}{name}_{layer}"] for layer in (0, 1) for name in ("kernel", "bias")])
        return model

    def close(name: str, ours: Any) -> None:
        np.testing.assert_allclose(ours, theirs.pop(name), rtol=1e-4, atol=1e-5, err_msg=name)

    for kind in (DqnAgent, DdqnAgent):
        for n, window in rows.items():
            agent = kind(
                SPECS[0],
                BoundedArraySpec((), np.int64, 0, 2),
                network(""),
                keras.optimizers.SGD(0.5),
                target_q_network=network("target_"),
                n_step_update=n,
                target_update_tau=0.3,
                target_update_period=2,
                gamma=0.9,
                reward_scale_factor=0.5,
                gradient_clipping=0.05,
            )
            key = f"{kind.__name__}_{n}"
            for step in range(4):
                loss, extra = agent.train(window, given_arrays["weights"])
                close(f"{key}_loss_{step}", loss)
                close(f"{key}_td_error_{step}", extra.td_error)
                close(f"{key}_td_loss_{step}", extra.td_loss)
            for at in range(4):
                close(f"{key}_weight_{at}", agent.q_network.weights[at].numpy())
                close(f"{key}_target_{at}", agent.target_q_network.weights[at].numpy())
    assert not theirs


def some_experience(rng: np.random.Generator, n: int) -> Trajectory:
    """64 windows of n + 1 rows with terminations and boundaries, and, where n is 1, truncations."""
    windows = []
    for _ in range(64):
        rows = []
        step_type = rng.choice([FIRST, MID, LAST])
        for _ in range(n + 1):
            next_step_type = FIRST if step_type == LAST else rng.choice([MID, MID, LAST])
            discount = 1.0
            if next_step_type == LAST:
                discount = float(rng.choice([0.0, 1.0])) if n == 1 else 0.0
            rows.append(Row(step_type, 0, int(rng.integers(3)), next_step_type, float(rng.normal()), discount))
            step_type = next_step_type
        windows.append(rows)
    observation = rng.normal(size=(64, n + 1, STATES)).astype(np.float32)
    return experience(*windows)._replace(observation=observation)


def test_a_nan_in_an_observation_trains_nothing_even_where_the_loss_is_finite() -> None:
    observation_spec, action_spec = ArraySpec((4,), np.float32), BoundedArraySpec((), np.int64, 0, 1)
    network = QNetwork(observation_spec, action_spec, fc_layer_params=(8,), seed=0)
    agent = DqnAgent(time_step_spec(observation_spec), action_spec, network, keras.optimizers.Adam(1e-3))
    observation = np.random.default_rng(0).normal(size=(8, 2, 4)).astype(np.float32)
    mid, ones = np.ones((8, 2), np.int32), np.ones((8, 2), np.float32)
    rows = Trajectory(mid, observation, np.zeros((8, 2), np.int64), (), mid, ones, ones)
    agent.train(rows)
    before = [weight.numpy() for weight in network.weights]
    observation[3, 0, 1] = np.nan
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be finite"):
        agent.train(rows)
    assert all(np.array_equal(weight.numpy(), old) for weight, old in zip(network.weights, before, strict=True))
    assert int(agent.train_step_counter) == 1


@pytest.mark.parametrize("action", [-1, 2])
def test_an_action_outside_its_spec_is_refused_and_trains_nothing(action: int) -> None:
    observation_spec, action_spec = ArraySpec((4,), np.float32), BoundedArraySpec((), np.int64, 0, 1)
    network = QNetwork(observation_spec, action_spec, fc_layer_params=(8,), seed=0)
    agent = DqnAgent(time_step_spec(observation_spec), action_spec, network, keras.optimizers.Adam(1e-3))
    mid, ones = np.ones((8, 2), np.int32), np.ones((8, 2), np.float32)
    actions = np.zeros((8, 2), np.int64)
    actions[5, 0] = action
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"actions must lie within \[0, 1\], got others"):
        agent.train(Trajectory(mid, np.ones((8, 2, 4), np.float32), actions, (), mid, ones, ones))
    assert int(agent.train_step_counter) == 0
