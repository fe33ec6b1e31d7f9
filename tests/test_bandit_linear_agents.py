"""LinUCB and LinTS beside plain ridge regression, and the propensities of posterior sampling beside counting draws."""

import itertools
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diskbuf.bandits.agents import LinearThompsonSamplingAgent, LinearUCBAgent
from diskbuf.bandits.policies.largest_draw import chances_of_normals, tensor_chances_of_normals
from diskbuf.errors import OptionError, SpecError
from diskbuf.policies import load_policy, save_policy
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import StepType, TimeStep, Trajectory, restart, time_step_spec

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".venv-tf-agents" / "bin" / "python"
BOTH = pytest.mark.parametrize("agent_class", [LinearUCBAgent, LinearThompsonSamplingAgent])
K, D = 3, 4
ARMS = BoundedArraySpec((), np.int32, 0, K - 1)
SPECS = (time_step_spec(ArraySpec((D,), np.float32)), ARMS)
MASKED = (time_step_spec({"context": ArraySpec((D,), np.float32), "mask": ArraySpec((K,), np.int32)}), ARMS)


def split(observation: Any) -> tuple[Any, Any]:
    return observation["context"], observation["mask"]


def rows_of(observation: Any, action: Any, reward: Any) -> Trajectory:
    """Rows [B, T] of a policy that was certain."""
    lead = np.shape(action)
    step_type, ones = np.full(lead, StepType.FIRST), np.ones(lead, np.float32)
    info = {"propensity": ones}
    action, reward = np.asarray(action, np.int32), np.asarray(reward, np.float32)
    return Trajectory(step_type, observation, action, info, np.full(lead, StepType.LAST), reward, 0 * ones)


def drawn(number: int, *, arms: int = K, size: int = D, seed: int = 0) -> tuple[Any, Any, Any]:
    """Contexts [N, d], arms [N] and rewards [N]."""
    rng = np.random.default_rng(seed)
    context = rng.normal(size=(number, size)).astype(np.float32)
    arm = rng.integers(0, arms, number)
    truth = rng.normal(size=(arms, size))
    reward = (truth[arm] * context).sum(axis=1) + rng.normal(size=number)
    return context, arm, reward.astype(np.float32)


def train_on(agent: Any, context: Any, arm: Any, reward: Any, weights: Any = None) -> Any:
    weights = None if weights is None else weights[None]
    return agent.train(rows_of(context[None], arm[None], reward[None]), weights)


def widths(agent: Any, context: Any) -> Any:
    return agent.policy.model.estimates(np.asarray(context, np.float64))[1]


def ridge(context: Any, arm: Any, reward: Any, *, tikhonov_weight: float = 1.0, seen: Any = None) -> tuple[Any, Any]:
    """Plain ridge regression: theta [K, d], and widths [B, K] of the contexts `seen`, by default the same."""
    x, r = context.astype(np.float64), reward.astype(np.float64)
    seen = x if seen is None else seen.astype(np.float64)
    thetas, spreads = [], []
    for k in range(K):
        own = x[arm == k]
        matrix = own.T @ own + tikhonov_weight * np.eye(x.shape[1])
        thetas.append(np.linalg.solve(matrix, own.T @ r[arm == k]))
        spreads.append(np.sqrt(np.einsum("bd,db->b", seen, np.linalg.solve(matrix, seen.T))))
    return np.stack(thetas), np.stack(spreads, axis=1)


# ---- what is learnt


@settings(max_examples=20, deadline=None)
@given(st.sets(st.integers(1, 999), max_size=40), st.sampled_from([0.01, 1.0, 30.0]), st.integers(0, 5))
def test_estimates_and_widths_are_those_of_ridge_regression_whatever_the_batches(
    cuts: set[int], tikhonov_weight: float, seed: int
) -> None:
    rows = drawn(1000, seed=seed)
    agent = LinearUCBAgent(*SPECS, tikhonov_weight=tikhonov_weight)
    ends = [0, *sorted(cuts), 1000]
    for start, end in itertools.pairwise(ends):
        train_on(agent, *(leaf[start:end] for leaf in rows))
    theta, width = ridge(*rows, tikhonov_weight=tikhonov_weight)
    np.testing.assert_allclose(agent.theta, theta, atol=1e-9)
    np.testing.assert_allclose(widths(agent, rows[0]), width, atol=1e-9)
    assert agent.num_samples.tolist() == np.bincount(rows[1], minlength=K).tolist()
    assert agent.train_step_counter == len(cuts) + 1


def test_older_rows_are_forgotten_with_each_call_for_all_arms() -> None:
    gamma, tikhonov_weight = 0.7, 2.0
    agent = LinearUCBAgent(*SPECS, gamma=gamma, tikhonov_weight=tikhonov_weight)
    covariance, vector = np.zeros((K, D, D)), np.zeros((K, D))
    rows = drawn(1000)
    rows[1][500:600] = 1  # the other arms have no rows in that call
    for start, end in ((0, 100), (100, 101), (101, 500), (500, 600), (600, 1000)):
        context, arm, reward = (leaf[start:end] for leaf in rows)
        train_on(agent, context, arm, reward)
        for k in range(K):
            own = context[arm == k].astype(np.float64)
            covariance[k] = gamma * covariance[k] + own.T @ own
            vector[k] = gamma * vector[k] + own.T @ reward[arm == k]
    matrix = covariance + tikhonov_weight * np.eye(D)
    np.testing.assert_allclose(agent.theta, np.linalg.solve(matrix, vector[:, :, None])[:, :, 0], atol=1e-9)
    np.testing.assert_allclose(agent.cov_matrix, covariance, atol=1e-9)
    np.testing.assert_allclose(agent.data_vector, vector, atol=1e-9)
    seen = rows[0][:50].astype(np.float64)
    width = np.sqrt(np.einsum("bi,kij,bj->bk", seen, np.linalg.inv(matrix), seen))
    np.testing.assert_allclose(widths(agent, seen), width, atol=1e-9)


def test_with_gamma_0_only_the_latest_call_counts() -> None:
    agent = LinearUCBAgent(*SPECS, gamma=0.0)
    train_on(agent, *drawn(100, seed=1))
    rows = drawn(100, seed=2)
    train_on(agent, *rows)
    np.testing.assert_allclose(agent.theta, ridge(*rows)[0], atol=1e-9)


def test_features_that_are_nearly_the_same_cost_no_digits() -> None:
    rng = np.random.default_rng(0)
    one = rng.normal(size=300)
    context = np.stack([one, one + 1e-5 * rng.normal(size=300)], axis=1).astype(np.float32)
    arm, reward = np.zeros(300, np.int64), (context @ [1.0, 2.0]).astype(np.float32)
    agent = LinearUCBAgent(time_step_spec(ArraySpec((2,), np.float32)), ARMS, tikhonov_weight=1e-12)
    for start in range(0, 300, 10):
        train_on(agent, *(leaf[start : start + 10] for leaf in (context, arm, reward)))
    stacked = np.concatenate([context.astype(np.float64), 1e-6 * np.eye(2)])
    exact = np.linalg.lstsq(stacked, np.concatenate([reward.astype(np.float64), [0, 0]]), rcond=None)[0]
    np.testing.assert_allclose(agent.theta[0], exact, atol=1e-9)


def test_a_row_of_weight_3_counts_as_three_rows_and_one_of_0_as_none() -> None:
    context, arm, reward = drawn(60)
    weights = np.tile([0.0, 1.0, 3.0], 20)
    agent = LinearUCBAgent(*SPECS)
    train_on(agent, context, arm, reward, weights)
    repeated = [np.repeat(leaf, weights.astype(int), axis=0) for leaf in (context, arm, reward)]
    np.testing.assert_allclose(agent.theta, ridge(*repeated)[0], atol=1e-6)


def test_the_loss_is_that_of_the_estimates_before_the_step() -> None:
    agent = LinearUCBAgent(*SPECS)
    first, second = drawn(30, seed=1), drawn(40, seed=2)
    assert train_on(agent, *first).loss == pytest.approx(np.square(first[2]).mean(), rel=1e-5)
    errors = second[2] - (agent.theta[second[1]] * second[0]).sum(axis=1)
    weights = np.linspace(0, 2, 40)
    loss = train_on(agent, *second, weights).loss
    assert loss == pytest.approx((weights * errors**2).mean(), rel=1e-5)
    assert loss.dtype == np.float32


def test_batches_of_several_steps_are_rows_too() -> None:
    context, arm, reward = drawn(60)
    agent = LinearUCBAgent(*SPECS)
    agent.train(rows_of(context.reshape(5, 12, D), arm.reshape(5, 12), reward.reshape(5, 12)))
    np.testing.assert_allclose(agent.theta, ridge(context, arm, reward)[0], atol=1e-9)


def test_a_context_is_all_its_leaves_in_order_as_numbers_and_the_bias_comes_last() -> None:
    spec = {"b": ArraySpec((2, 2), np.float64), "a": ArraySpec((), np.int8), "c": ArraySpec((1,), np.bool_)}
    agent = LinearUCBAgent(time_step_spec(spec), ARMS, add_bias=True)
    rng = np.random.default_rng(0)
    observation = {
        "b": rng.normal(size=(50, 2, 2)),
        "a": rng.integers(-9, 9, 50).astype(np.int8),
        "c": rng.random((50, 1)) < 0.5,
    }
    columns = [observation["a"][:, None], observation["b"].reshape(50, 4), observation["c"], np.ones((50, 1))]
    features = np.concatenate(columns, axis=1).astype(np.float64)
    np.testing.assert_array_equal(agent.policy.features(observation), features)
    arm, reward = rng.integers(0, K, 50), rng.normal(size=50).astype(np.float32)
    agent.train(rows_of({name: leaf[None] for name, leaf in observation.items()}, arm[None], reward[None]))
    theta, _ = ridge(features, arm, reward)
    np.testing.assert_allclose(agent.policy.predicted_rewards(observation), features @ theta.T, atol=1e-9)
    actions = agent.policy.action(restart(observation, batch_size=50)).action
    np.testing.assert_array_equal(agent.policy.compiled().action(restart(observation, batch_size=50)).action, actions)


@BOTH
def test_what_is_no_context_is_refused_and_nothing_is_learnt(agent_class: Any) -> None:
    agent = agent_class(*SPECS)
    train_on(agent, *drawn(30))
    before, counted = agent.theta, agent.train_step_counter
    context, arm, reward = drawn(30, seed=1)
    context[7, 2] = np.nan
    with pytest.raises(SpecError, match=r"leaf 'observation' must be finite, got nan at \[0, 7, 2\]"):
        train_on(agent, context, arm, reward)
    np.testing.assert_array_equal(agent.theta, before)
    assert agent.train_step_counter == counted
    with pytest.raises(SpecError, match=r"a context must be finite, got .* in lane 7"):
        agent.policy.action(restart(context, batch_size=30))
    with pytest.raises(SpecError, match=r"leaf 'observation' must be \[B, 4\], got \[30, 3\]"):
        agent.policy.action(restart(context[:, :3], batch_size=30))
    with pytest.raises(SpecError, match=r"leaf 'observation/wave' must be numbers, got complex64"):
        agent_class(time_step_spec({"wave": ArraySpec((), np.complex64)}), ARMS)


@BOTH
def test_arguments_outside_their_rules_are_refused(agent_class: Any) -> None:
    for arguments, message in (
        ({"alpha": -1}, "alpha must be a finite number, at least 0, got -1"),
        ({"alpha": math.nan}, "alpha must be a finite number"),
        ({"gamma": 1.1}, "gamma must be a finite number, at least 0, at most 1, got 1.1"),
        ({"tikhonov_weight": 0}, "tikhonov_weight must be a finite number, above 0, got 0"),
        ({"add_bias": 1}, "add_bias must be True or False, got 1"),
        ({"seed": -1}, "seed must be None or an integer"),
    ):
        with pytest.raises(OptionError, match=message):
            agent_class(*SPECS, **arguments)


# ---- what is chosen


def test_ucb_chooses_the_highest_estimate_plus_width_for_certain() -> None:
    rows = drawn(200)
    agent = LinearUCBAgent(*SPECS, alpha=2.5)
    train_on(agent, *rows)
    seen = drawn(100, seed=9)[0]
    theta, width = ridge(*rows, seen=seen)
    scores = seen @ theta.T + 2.5 * width
    step = agent.policy.action(restart(seen, batch_size=100))
    np.testing.assert_array_equal(step.action, scores.argmax(axis=1))
    assert (step.action != (seen @ theta.T).argmax(axis=1)).any()  # or alpha wouldn't matter here
    assert step.action.dtype == np.int32
    assert step.info["propensity"].tolist() == [1] * 100
    np.testing.assert_array_equal(agent.policy.probabilities(seen), np.eye(K)[scores.argmax(axis=1)])


@BOTH
def test_arms_are_numbered_from_the_minimum_of_their_spec(agent_class: Any) -> None:
    spec = BoundedArraySpec((), np.int64, 5, 7)
    agent = agent_class(SPECS[0], spec, alpha=0.0)
    context, arm, _ = drawn(60)
    agent.train(
        rows_of(context[None], arm[None] + 5, (arm == 2).astype(np.float32)[None] + context[None, :, 0])._replace(
            action=arm[None] + 5
        )
    )
    actions = agent.policy.action(restart(context, batch_size=60)).action
    np.testing.assert_array_equal(actions, agent.policy.predicted_rewards(context).argmax(axis=1) + 5)
    assert actions.dtype == np.int64


@BOTH
def test_masks_are_honoured(agent_class: Any) -> None:
    agent = agent_class(*MASKED, observation_and_action_constraint_splitter=split, seed=0)
    context, arm, reward = drawn(300)
    agent.train(rows_of({"context": context[None], "mask": np.ones((1, 300, K), np.int32)}, arm[None], reward[None]))
    mask = np.array([[0, 1, 0], [1, 0, 1], [1, 1, 1]] * 100, np.int32)
    observation = {"context": context, "mask": mask}
    chances = agent.policy.probabilities(observation)
    assert (chances[mask == 0] == 0).all()
    np.testing.assert_allclose(chances.sum(axis=1), 1)
    lanes = np.arange(300)
    for policy in (agent.policy, agent.policy.compiled()):
        step = policy.action(restart(observation, batch_size=300))
        assert mask[lanes, step.action].all()
        np.testing.assert_allclose(step.info["propensity"], chances[lanes, step.action], atol=1e-6)
    np.testing.assert_allclose(agent.theta, ridge(context, arm, reward)[0], atol=1e-9)
    with pytest.raises(SpecError, match="the mask must allow at least one arm in each lane, got none in lane 1"):
        agent.policy.action(restart({"context": context[:2], "mask": mask[:2] * [[1], [0]]}, batch_size=2))


def test_thompson_sampling_draws_arms_as_often_as_its_propensities_say() -> None:
    agent = LinearThompsonSamplingAgent(*SPECS, alpha=1.5, seed=3)
    train_on(agent, *drawn(40))
    context = np.tile(drawn(1, seed=5)[0], (40_000, 1))
    chances = agent.policy.probabilities(context[:1])[0]
    assert chances.min() > 0.02
    step = agent.policy.action(restart(context, batch_size=len(context)))
    np.testing.assert_allclose(step.info["propensity"], chances[step.action], rtol=1e-6)
    np.testing.assert_allclose(np.bincount(step.action) / len(context), chances, atol=0.01)  # 4 standard errors
    # And these are those of the weights being drawn.
    rng = np.random.default_rng(0)
    matrix = agent.cov_matrix + np.eye(D)
    values = [
        rng.multivariate_normal(agent.theta[k], 1.5**2 * np.linalg.inv(matrix[k]), 100_000) @ context[0]
        for k in range(K)
    ]
    counted = np.bincount(np.argmax(values, axis=0), minlength=K) / 100_000
    np.testing.assert_allclose(counted, chances, atol=0.007)


def test_the_compiled_policy_draws_as_often_too() -> None:
    import tensorflow as tf

    agent = LinearThompsonSamplingAgent(*SPECS, seed=3)
    train_on(agent, *drawn(40))
    context = np.tile(drawn(1, seed=5)[0], (20_000, 1))
    tf.random.set_seed(0)
    step = agent.policy.compiled().action(restart(context, batch_size=len(context)))
    chances = agent.policy.probabilities(context[:1])[0]
    np.testing.assert_allclose(np.bincount(step.action, minlength=K) / len(context), chances, atol=0.015)
    np.testing.assert_allclose(step.info["propensity"], chances[step.action], atol=1e-6)


def test_without_exploration_or_context_the_best_estimate_is_certain() -> None:
    agent = LinearThompsonSamplingAgent(*SPECS, alpha=0.0)
    train_on(agent, *drawn(40))
    context = drawn(30, seed=1)[0]
    context[0] = 0
    best = agent.policy.predicted_rewards(context).argmax(axis=1)
    for policy in (agent.policy, agent.policy.compiled()):
        step = policy.action(restart(context, batch_size=30))
        np.testing.assert_array_equal(step.action, best)
        assert step.info["propensity"].tolist() == [1] * 30


# ---- the probability of the largest draw


def normal_below(z: float) -> float:
    return math.erfc(-z / math.sqrt(2)) / 2


def by_adding_up(mean: Any, scale: Any) -> Any:
    """The same integrals as sums over a grid that is fine around every arm."""
    grid = np.sort(np.concatenate([m + s * np.linspace(-8, 8, 4001) for m, s in zip(mean, scale, strict=True)]))
    below = np.vectorize(normal_below)((grid[:, None] - mean) / scale)
    chances = []
    for arm in range(len(mean)):
        others = np.delete(below, arm, axis=1).prod(axis=1)
        chances.append((np.diff(below[:, arm]) * (others[1:] + others[:-1]) / 2).sum())
    return np.array(chances)


@settings(max_examples=60, deadline=None)
@given(st.floats(-6, 6), st.floats(1e-3, 1e3))
def test_of_two_arms_the_chance_is_in_closed_form(difference: float, scale: float) -> None:
    exact = normal_below(difference / math.hypot(1, scale))
    mean, scales = np.array([[difference, 0.0]]), np.array([[scale, 1.0]])
    np.testing.assert_allclose(chances_of_normals(mean, scales, None), [[exact, 1 - exact]], atol=1e-7)


@pytest.mark.parametrize("arms", [3, 8, 20])
def test_chances_are_right_to_a_millionth_though_scales_differ_a_thousandfold(arms: int) -> None:
    rng = np.random.default_rng(arms)
    for reach in (0.01, 1.0, 100.0):
        scale = 10 ** rng.uniform(-3, 0, arms)
        mean = reach * scale.min() * rng.normal(size=arms)
        scale[:2] = 1e-3, 1
        chances = chances_of_normals(mean[None], scale[None], None)[0]
        np.testing.assert_allclose(chances, by_adding_up(mean, scale), atol=1e-6)


def test_chances_of_300_arms_are_right_to_a_ten_thousandth() -> None:
    rng = np.random.default_rng(0)
    mean, scale = rng.normal(size=300), 10 ** rng.uniform(-2, 0, 300)
    draws = 0 * mean
    np.add.at(draws, (mean + scale * rng.normal(size=(20_000, 300))).argmax(axis=1), 1 / 20_000)
    chances = chances_of_normals(mean[None], scale[None], None)[0]
    np.testing.assert_allclose(chances, draws, atol=0.014)
    equal = chances_of_normals(np.zeros((1, 300)), np.ones((1, 300)), None)[0]
    np.testing.assert_allclose(equal, 1 / 300, atol=1e-12)


def test_lanes_and_masks_dont_disturb_each_other_and_tensors_give_the_same() -> None:
    rng = np.random.default_rng(1)
    mean, scale = rng.normal(size=(40, 5)), 10 ** rng.uniform(-3, 0, (40, 5))
    mask = rng.random((40, 5)) < 0.6
    mask[:, 2] = True
    scale[7] = 0
    together = chances_of_normals(mean, scale, mask)
    for lane in range(40):
        allowed = mask[lane]
        alone = chances_of_normals(mean[lane : lane + 1, allowed], scale[lane : lane + 1, allowed], None)[0]
        np.testing.assert_allclose(together[lane, allowed], alone, atol=1e-12)
        assert (together[lane, ~allowed] == 0).all()
    np.testing.assert_allclose(tensor_chances_of_normals(mean, scale, mask).numpy(), together, atol=1e-7)
    everywhere = chances_of_normals(mean, scale, None)
    np.testing.assert_allclose(tensor_chances_of_normals(mean, scale, None).numpy(), everywhere, atol=1e-7)


# ---- kept


def acted(agent: Any, steps: list[TimeStep]) -> list[list[int]]:
    return [agent.policy.action(step).action.tolist() for step in steps]


@BOTH
def test_an_agent_restored_from_a_checkpoint_goes_on_as_the_saved_one(agent_class: Any, tmp_path: Path) -> None:
    import tensorflow as tf

    made = [agent_class(*SPECS, gamma=0.9, add_bias=True, seed=seed) for seed in (0, 1)]
    train_on(made[0], *drawn(50))
    steps = [restart(drawn(100, seed=seed)[0], batch_size=100) for seed in range(3)]
    made[0].policy.action(steps[0])
    path = tf.train.Checkpoint(agent=made[0]).save(str(tmp_path / "agent"))
    tf.train.Checkpoint(agent=made[1]).restore(path).assert_consumed()
    assert made[1].train_step_counter == 1
    assert made[1].num_samples.sum() == 50
    assert acted(made[0], steps) == acted(made[1], steps)
    for agent in made:
        train_on(agent, *drawn(50, seed=8))
    np.testing.assert_array_equal(made[0].theta, made[1].theta)
    assert acted(made[0], steps) == acted(made[1], steps)


def test_a_checkpoint_of_other_contexts_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    import tensorflow as tf

    path = tf.train.Checkpoint(agent=LinearUCBAgent(*SPECS, add_bias=True)).save(str(tmp_path / "agent"))
    agent = LinearUCBAgent(*SPECS)
    train_on(agent, *drawn(50))
    theta = agent.theta
    with pytest.raises(
        SpecError, match=r"must hold information float64 \[3, 4, 5\].*, got information float64 \[3, 5, 6\]"
    ):
        tf.train.Checkpoint(agent=agent).restore(path)
    np.testing.assert_array_equal(agent.theta, theta)


@BOTH
def test_a_saved_policy_acts_by_what_was_learnt_until_then(agent_class: Any, tmp_path: Path) -> None:
    agent = agent_class(*SPECS, alpha=3.0, seed=0)
    train_on(agent, *drawn(50))
    save_policy(agent.policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    context = drawn(200, seed=4)[0]
    chances = agent.policy.probabilities(context)
    train_on(agent, *drawn(50, seed=1))
    assert abs(agent.policy.probabilities(context) - chances).max() > 0.1  # it went on learning
    step = loaded.action(restart(context, batch_size=200))
    np.testing.assert_allclose(step.info["propensity"], chances[np.arange(200), step.action], atol=1e-6)
    assert loaded.trajectory_spec == agent.collect_data_spec


# ---- beside TF-Agents


def test_tf_agents_estimates_widths_and_choices_are_the_same() -> None:
    if not (PEERS.parents[1] / ".installed").exists():
        reason = "needs TF-Agents: make peers"
        pytest.fail(reason) if os.environ.get("DISKBUF_PEERS") == "required" else pytest.skip(reason)
    program = [PEERS, ROOT / "tests/peers/linear_bandits.py"]
    result = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr[-6000:]
    assert result.stdout == "3 agents, 600 choices\n"
