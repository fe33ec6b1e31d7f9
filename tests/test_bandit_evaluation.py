"""Off-policy estimates: by hand on six rows, beside Open Bandit Pipeline, and beside values that are known."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bandit_parts import train_counting
from hypothesis import given
from hypothesis import strategies as st

import diskbuf
from diskbuf import trajectories
from diskbuf.bandits.evaluation import (
    IPS,
    SNIPS,
    ClippedIPS,
    DirectMethod,
    DoublyRobust,
    DRos,
    Estimator,
    Evaluation,
    Replay,
    RidgeRewardModel,
    SelfNormalizedDR,
    SklearnRewardModel,
    SwitchDR,
    evaluate,
)
from diskbuf.bandits.evaluation.group_sums import GroupSums, drawn_again
from diskbuf.bandits.policies import BanditPolicy
from diskbuf.bandits.policies.linear_model import triangular_factor
from diskbuf.errors import MissingExtraError, OptionError, SpecError, StoreNotFoundError, WindowError
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import StepType, Trajectory

COMPARE = Path(__file__).resolve().parents[1] / "tools" / "compare"
BENCH = Path(__file__).resolve().parents[1] / "tools" / "bench" / "off_policy.py"
Logs = Callable[..., diskbuf.UniformReplayBuffer]

WEIGHING: list[Estimator] = [IPS(), ClippedIPS(2.0), SNIPS()]
MODELLED: list[Estimator] = [DoublyRobust(), SelfNormalizedDR(), SwitchDR(2.0), DRos(2.0)]
ALL = [Replay(), *WEIGHING, DirectMethod(), *MODELLED]


def data_spec(context: Any, num_actions: int, *, minimum: int = 0, has_propensity: bool = True) -> Trajectory:
    """The spec of rows whose observations look like the context, a nest of [N, *shape] arrays."""
    observation = diskbuf.tree.Structure(context)
    specs = [ArraySpec(leaf.shape[1:], leaf.dtype) for leaf in observation.flatten(context)]
    info = {"propensity": ArraySpec((), np.float32)} if has_propensity else ()
    action = BoundedArraySpec((), np.int32, minimum, minimum + num_actions - 1)
    step = trajectories.PolicyStep(action, (), info)
    return trajectories.trajectory_spec(trajectories.time_step_spec(observation.unflatten(specs)), step)


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    """Makes logs of contexts, actions, rewards and propensities [N], dealt to lanes in turns."""
    made: list[diskbuf.UniformReplayBuffer] = []

    def make(
        context: Any,
        action: Any,
        reward: Any,
        propensity: Any = None,
        *,
        num_actions: int,
        minimum: int = 0,
        lanes: int = 1,
    ) -> diskbuf.UniformReplayBuffer:
        def dealt(leaf: Any) -> Any:
            leaf = np.asarray(leaf)
            return leaf.reshape(len(leaf) // lanes, lanes, *leaf.shape[1:]).swapaxes(0, 1)

        structure = diskbuf.tree.Structure(context)
        leaves = [dealt(leaf) for leaf in structure.flatten(context)]
        action = dealt(np.asarray(action, np.int32))
        spec = data_spec(context, num_actions, minimum=minimum, has_propensity=propensity is not None)
        info = () if propensity is None else {"propensity": dealt(np.asarray(propensity, np.float32))}
        first, last = np.full_like(action, StepType.FIRST), np.full_like(action, StepType.LAST)
        rewards = dealt(np.asarray(reward, np.float32))
        path = tmp_path / f"{len(made)}.zarr"
        buffer = diskbuf.UniformReplayBuffer(spec, batch_size=lanes, max_length=None, path=path)
        made.append(buffer)
        rows = Trajectory(first, structure.unflatten(leaves), action, info, last, rewards, np.zeros_like(rewards))
        if action.shape[1]:
            buffer.extend(rows)
        buffer.flush()
        return buffer

    yield make
    for buffer in made:
        buffer.close()


# ---- six rows, by hand. The policy chooses arm 1 with probability x, the model expects 1 of arm 0 and 4x of arm 1.

SIX = {
    "context": np.array([0.5, 0.5, 0.75, 0.75, 0, 0], np.float32),
    "action": [0, 1, 1, 0, 1, 0],
    "reward": [1, 3, 4, 0, 8, 3],
    "propensity": [0.5, 0.25, 0.25, 0.5, 0.5, 0.25],
}
# pi(a|x)        0.5   0.5   0.75  0.25  0    1
# w              1     2     3     0.5   0    4       sum 10.5, of squares 1 + 4 + 9 + 0.25 + 0 + 16 = 30.25
# w r            1     6     12    0     0    12      sum 31
# min(w, 2) r    1     6     8     0     0    6       sum 21
# q(x, a)        1     2     3     1     0    1
# sum of pi q    1.5   1.5   2.5   2.5   1    1       sum 10
# r - q(x, a)    0     1     1    -1     8    2
# w (r - q)      0     2     3    -0.5   0    8       sum 12.5, without w > 2: 1.5
# 2w / (w^2 + 2) 2/3   2/3   6/11  4/9   0    4/9     times r - q: 0 + 2/3 + 6/11 - 4/9 + 0 + 8/9
BY_HAND = {
    "IPS": 31 / 6,
    "ClippedIPS(2)": 21 / 6,
    "SNIPS": 31 / 10.5,
    "DirectMethod": 10 / 6,
    "DoublyRobust": (10 + 12.5) / 6,
    "SelfNormalizedDR": 10 / 6 + 12.5 / 10.5,
    "SwitchDR(2)": (10 + 1.5) / 6,
    "DRos(2)": (10 + 2 / 3 + 6 / 11 - 4 / 9 + 8 / 9) / 6,
}


def x_policy(context: Any) -> Any:
    return np.stack([1 - context, context], axis=1)


def x_model(context: Any) -> Any:
    return np.concatenate([np.ones_like(context), 4 * context], axis=1)


def test_six_rows_give_what_they_give_by_hand(logs: Logs) -> None:
    found = evaluate(logs(**SIX, num_actions=2), x_policy, [*WEIGHING, DirectMethod(), *MODELLED], reward_model=x_model)
    assert {name: estimate.value for name, estimate in found.estimates.items()} == pytest.approx(BY_HAND, abs=1e-12)
    facts = found.diagnostics
    assert facts.rows == 6
    assert facts.mean_reward == pytest.approx(19 / 6)
    assert facts.matches is None
    assert facts.expected_matches == pytest.approx(3)
    assert facts.effective_sample_size == pytest.approx(10.5**2 / 30.25)
    assert facts.largest_weight == pytest.approx(4)
    assert facts.mean_weight == pytest.approx(10.5 / 6)
    assert facts.share_with_support == pytest.approx(5 / 6)
    assert (facts.smallest_propensity, facts.largest_propensity) == (0.25, 0.5)
    assert facts.arms_never_shown == ()


def test_replay_takes_the_rows_whose_arm_a_certain_policy_chooses(logs: Logs) -> None:
    def certain(context: Any) -> Any:
        return np.eye(2)[(context >= 0.5).astype(int)]

    found = evaluate(logs(**SIX, num_actions=2), certain, [Replay()])
    assert found["Replay"].value == pytest.approx((3 + 4 + 3) / 3)  # rows 2, 3 and 6
    assert found.diagnostics.matches == 3


def test_limits_of_switching_and_shrinking_are_the_direct_method_and_doubly_robust(logs: Logs) -> None:
    several = [DirectMethod(), DoublyRobust(), SwitchDR(0), SwitchDR(np.inf), DRos(0), DRos(np.inf), DRos(1e12)]
    found = evaluate(logs(**SIX, num_actions=2), x_policy, several, reward_model=x_model)
    direct, robust = BY_HAND["DirectMethod"], BY_HAND["DoublyRobust"]
    values = [estimate.value for estimate in found.estimates.values()]
    assert values == pytest.approx([direct, robust, direct, robust, direct, robust, robust], abs=1e-9)


@pytest.mark.parametrize("minimum", [0, 7])
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_lanes_and_the_first_action_change_nothing(logs: Logs, minimum: int, lanes: int) -> None:
    rows = SIX | {"action": np.array(SIX["action"]) + minimum}
    log = logs(**rows, num_actions=2, minimum=minimum, lanes=lanes)
    found = evaluate(log, x_policy, [*WEIGHING, DirectMethod(), *MODELLED], reward_model=x_model)
    assert {name: estimate.value for name, estimate in found.estimates.items()} == pytest.approx(BY_HAND, abs=1e-12)


def test_a_range_of_ids_is_all_that_is_estimated_from(logs: Logs) -> None:
    log = logs(**SIX, num_actions=2)
    found = evaluate(log, x_policy, [IPS()], first_id=1, next_id=4)
    assert found["IPS"].value == pytest.approx((6 + 12 + 0) / 3)
    with pytest.raises(WindowError, match="first_id and next_id must be a range of the ids from 0 to 6"):
        evaluate(log, x_policy, [IPS()], next_id=7)


# ---- beside Open Bandit Pipeline

# Printed by tools/compare/open_bandit_pipeline.py: Open Bandit Pipeline 0.5.7 with NumPy 1.23.5.
OPEN_BANDIT_PIPELINE = {
    "Replay": 1.227179640150198,
    "IPS": 0.9803707689771131,
    "ClippedIPS(3)": 0.7407952208172855,
    "SNIPS": 0.9622822772194363,
    "DirectMethod": 0.792267872229149,
    "DoublyRobust": 1.0291482729001638,
    "SelfNormalizedDR": 1.0247776721941027,
    "SwitchDR(2)": 0.8730546376518851,
    "DRos(5)": 0.891757904260968,
}


def test_every_estimator_equals_open_bandit_pipelines(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(COMPARE)
    import open_bandit_pipeline as theirs

    log = theirs.synthetic_log()
    assert log.action.sum() == 4335, "another log than the figures are from"
    store = logs(**vars(log), num_actions=theirs.ARMS)
    replayed = evaluate(store, theirs.certain_policy, [Replay()])
    several = [IPS(), ClippedIPS(3.0), SNIPS(), DirectMethod(), DoublyRobust(), SelfNormalizedDR()]
    several += [SwitchDR(2.0), DRos(5.0)]
    found = evaluate(store, theirs.evaluated_policy, several, reward_model=theirs.expected_rewards, block_rows=300)
    values = {name: estimate.value for name, estimate in {**replayed.estimates, **found.estimates}.items()}
    assert values == pytest.approx(OPEN_BANDIT_PIPELINE, abs=1e-6)


# ---- beside values that are known: four contexts, equally probable, three arms.

MEANS = np.array([[0.2, 0.5, 0.9], [0.4, 0.1, 0.6], [0.8, 0.3, 0.2], [0.5, 0.9, 0.1]])  # [4, K]
LOGGED = np.array([[0.5, 0.3, 0.2], [0.2, 0.4, 0.4], [0.3, 0.3, 0.4], [0.2, 0.3, 0.5]])
EVALUATED = np.array([[0.1, 0.3, 0.6], [0.3, 0.1, 0.6], [0.6, 0.2, 0.2], [0.2, 0.7, 0.1]])
VALUE = float((MEANS * EVALUATED).sum(axis=1).mean())
SEEDS = 100


def four_policy(context: Any) -> Any:
    return EVALUATED[context.argmax(axis=1)]


def right_model(context: Any) -> Any:
    return MEANS[context.argmax(axis=1)]


def biased_model(context: Any) -> Any:
    return MEANS[context.argmax(axis=1)] + [0.3, 0.2, 0.4]


def four_contexts(number: int, *, logged: Any = LOGGED, seed: int = 0) -> dict[str, Any]:
    """A log of rewards that are 0 or 1."""
    rng = np.random.default_rng(seed)
    which = rng.integers(0, 4, number)
    action = (logged[which].cumsum(axis=1) > rng.random(number)[:, None]).argmax(axis=1)
    reward = rng.random(number) < MEANS[which, action]
    context = np.eye(4, dtype=np.float32)[which]
    return {"context": context, "action": action, "reward": reward, "propensity": logged[which, action]}


def of_each_seed(log: diskbuf.UniformReplayBuffer, estimators: list[Estimator], **more: Any) -> dict[str, Any]:
    """What 100 logs of the same length, laid end to end, give: [100, 3] values and ends of intervals by name."""
    rows, more = log.next_id // SEEDS, {"num_bootstrap": 400} | more
    runs = [
        evaluate(log, four_policy, estimators, first_id=seed * rows, next_id=(seed + 1) * rows, seed=seed, **more)
        for seed in range(SEEDS)
    ]
    names = [estimator.name for estimator in estimators]
    return {name: np.array([(run[name].value, run[name].lower, run[name].upper) for run in runs]) for name in names}


def covering(found: dict[str, Any]) -> dict[str, int]:
    return {name: int(((ends[:, 1] <= VALUE) & (ends[:, 2] >= VALUE)).sum()) for name, ends in found.items()}


def test_intervals_cover_the_value_in_90_to_99_of_100_logs(logs: Logs) -> None:
    log = logs(**four_contexts(300 * SEEDS, seed=1), num_actions=3)
    # No weight is above 3, so clipping there clips nothing.
    several = [IPS(), ClippedIPS(3.5), SNIPS(), DirectMethod(), *MODELLED]
    for name, times in covering(of_each_seed(log, several, reward_model=right_model)).items():
        assert 90 <= times <= 99, name


def test_intervals_with_a_model_fitted_to_other_folds_cover_it_too(logs: Logs) -> None:
    log = logs(**four_contexts(300 * SEEDS, seed=2), num_actions=3)
    for name, times in covering(of_each_seed(log, [DoublyRobust(), SelfNormalizedDR()])).items():
        assert 90 <= times <= 99, name


def test_intervals_of_replay_cover_it_where_arms_were_equally_probable(logs: Logs) -> None:
    log = logs(**four_contexts(300 * SEEDS, logged=np.full((4, 3), 1 / 3), seed=3), num_actions=3)
    assert 90 <= covering(of_each_seed(log, [Replay()]))["Replay"] <= 99


def test_intervals_of_groups_are_as_wide_as_those_of_the_normal_distribution(logs: Logs) -> None:
    rows = four_contexts(30_000, seed=4)  # groups of 30
    found = evaluate(logs(**rows, num_actions=3), four_policy, [IPS(), SNIPS()], num_bootstrap=4000)
    weight = four_policy(rows["context"])[np.arange(30_000), rows["action"]] / rows["propensity"]
    assert found["IPS"].value == pytest.approx((weight * rows["reward"]).mean(), abs=1e-6)  # propensities were float64
    for name, errors in {
        "IPS": weight * rows["reward"] - found["IPS"].value,
        # The ratio's linear part: Owen, "Monte Carlo Theory, Methods and Examples" (2013), equation 9.9.
        "SNIPS": weight * (rows["reward"] - found["SNIPS"].value) / weight.mean(),
    }.items():
        half = 1.959964 * errors.std() / np.sqrt(30_000)
        ends = found[name]
        assert ends.lower == pytest.approx(ends.value - half, abs=0.1 * half)
        assert ends.upper == pytest.approx(ends.value + half, abs=0.1 * half)


def root_mean_square(found: dict[str, Any]) -> dict[str, float]:
    return {name: float(np.sqrt(np.square(ends[:, 0] - VALUE).mean())) for name, ends in found.items()}


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_doubly_robust_errs_less_than_its_parts_when_the_model_is_biased_or_propensities_are_noisy(
    logs: Logs, noise: float
) -> None:
    rows = four_contexts(300 * SEEDS, seed=5)
    rows["reward"] = rows["reward"] + 2.0  # rewards far from 0, where the weights' noise hurts
    rows["propensity"] = np.minimum(
        1, rows["propensity"] * np.exp(np.random.default_rng(6).normal(0, noise, 300 * 100))
    )
    log = logs(**rows, num_actions=3)
    several = [IPS(), DirectMethod(), DoublyRobust()]
    found = of_each_seed(log, several, reward_model=lambda context: 2 + biased_model(context), num_bootstrap=1)
    errors = root_mean_square({name: ends - 2 for name, ends in found.items()})
    assert errors["DoublyRobust"] < 0.5 * errors["IPS"]
    assert errors["DoublyRobust"] < 0.5 * errors["DirectMethod"]


def test_a_cross_fitted_ridge_brings_doubly_robust_nearer_to_the_value_than_ips(logs: Logs) -> None:
    rows = four_contexts(300 * SEEDS, seed=7)
    found = root_mean_square(of_each_seed(logs(**rows, num_actions=3), [IPS(), DoublyRobust()], num_bootstrap=1))
    assert found["DoublyRobust"] < 0.8 * found["IPS"]


# ---- reading


def facts_of(found: Evaluation) -> dict[str, Any]:
    """The diagnostics that are numbers."""
    facts = dataclasses.asdict(found.diagnostics)
    return {name: value for name, value in facts.items() if name != "arms_never_shown"}


def test_blocks_of_any_size_give_the_same_estimates_and_intervals(logs: Logs) -> None:
    log = logs(**four_contexts(2500, seed=8), num_actions=3, lanes=5)
    whole = evaluate(log, four_policy, ALL)
    for block_rows in (5, 35, 999):
        found = evaluate(log, four_policy, ALL, block_rows=block_rows)
        assert found.notes == whole.notes
        for name, estimate in whole.estimates.items():
            for field in ("value", "lower", "upper"):
                assert getattr(found[name], field) == pytest.approx(getattr(estimate, field), abs=1e-9), (name, field)
        assert facts_of(found) == pytest.approx(facts_of(whole), abs=1e-9)


def test_fixed_probabilities_equal_a_function_that_says_them_and_read_no_contexts(logs: Logs) -> None:
    rows = four_contexts(500, seed=9)
    fixed = [0.2, 0.5, 0.3]
    seen = evaluate(logs(**rows, num_actions=3), lambda context: np.tile(fixed, (len(context), 1)), ALL)
    found = evaluate(logs(**rows, num_actions=3), fixed, ALL)
    assert facts_of(found) == pytest.approx(facts_of(seen))
    for name, estimate in seen.estimates.items():
        assert dataclasses.astuple(found[name])[1:] == pytest.approx(dataclasses.astuple(estimate)[1:])
    rows["context"][3] = np.inf  # would be refused if it were read
    unread = evaluate(logs(**rows, num_actions=3), np.array(fixed), [Replay(), *WEIGHING])
    assert unread["SNIPS"] == seen["SNIPS"]
    assert unread["Replay"] == seen["Replay"]


def test_a_path_is_opened_and_closed_again(logs: Logs, tmp_path: Path) -> None:
    log = logs(**SIX, num_actions=2)
    log.close()
    assert evaluate(tmp_path / "0.zarr", x_policy, [IPS()])["IPS"].value == pytest.approx(31 / 6)
    with pytest.raises(StoreNotFoundError):
        evaluate(tmp_path / "none.zarr", x_policy, [IPS()])


def test_the_log_of_the_trainer_is_one(tmp_path: Path) -> None:
    agent = train_counting(tmp_path, 4)
    found = evaluate(tmp_path / "log.zarr", agent.policy)
    assert found.diagnostics.rows == 4 * 5 * 4
    assert found["SNIPS"].lower < found["SNIPS"].value < found["SNIPS"].upper
    assert found.diagnostics.mean_weight == pytest.approx(1, abs=0.3)


# ---- draws


def test_replay_of_a_policy_that_draws_is_repeated_by_its_seed(logs: Logs) -> None:
    log = logs(**four_contexts(3000, seed=10), num_actions=3)
    first, again, other = (evaluate(log, four_policy, [Replay()], seed=seed) for seed in (4, 4, 5))
    assert first.to_json() == again.to_json()
    assert first["Replay"].value != other["Replay"].value
    assert first.diagnostics.matches == pytest.approx(first.diagnostics.expected_matches, rel=0.1)


def test_replay_without_a_match_has_no_estimate(logs: Logs) -> None:
    rows = SIX | {"action": [0] * 6}
    found = evaluate(logs(**rows, num_actions=2), [0.0, 1.0], [Replay(), SNIPS(), IPS()])
    assert found.diagnostics.matches == 0
    for name in ("Replay", "SNIPS"):
        assert (found[name].value, found[name].lower, found[name].upper) == (None, None, None)
    assert found["IPS"].value == 0
    assert re.search(r"^Replay +no estimate$", str(found), re.MULTILINE)
    assert json.loads(found.to_json())["estimates"]["Replay"]["value"] is None


def test_a_log_without_rows_has_no_estimates(logs: Logs) -> None:
    empty = {name: np.asarray(leaf)[:0] for name, leaf in SIX.items()}
    found = evaluate(logs(**empty, num_actions=2), x_policy, ALL)
    assert all(estimate.value is None for estimate in found.estimates.values())
    assert found.diagnostics.rows == 0
    assert found.notes == ("there are no rows to estimate from.",)
    assert "no estimate" in str(found)
    assert json.loads(found.to_json())["diagnostics"]["mean_reward"] is None


# ---- models of the reward


class Remembering:
    """Refuses to predict a context that it was fitted on."""

    fits: list[int]

    def __init__(self) -> None:
        self.fits = []

    def fit(self, context: Any, index: Any, reward: Any, weights: Any) -> None:
        self.seen = set(context[:, 0].tolist())
        self.fits.append(len(context))

    def predict(self, context: Any) -> Any:
        assert not self.seen.intersection(context[:, 0].tolist())
        assert self.fits == [len(self.seen)]
        return np.zeros((len(context), 2))


@pytest.mark.parametrize("num_folds", [2, 5])
def test_no_row_is_predicted_by_a_model_that_was_fitted_on_it(logs: Logs, num_folds: int) -> None:
    number = 600
    rows = {"context": np.arange(number, dtype=np.float32), "action": np.arange(number) % 2, "reward": np.ones(number)}
    model = Remembering()
    found = evaluate(
        logs(**rows, num_actions=2),
        [0.5, 0.5],
        [DirectMethod()],
        reward_model=model,
        num_folds=num_folds,
        block_rows=64,
    )
    assert found["DirectMethod"].value == 0
    assert model.fits == []  # copies were fitted


def test_arms_that_take_turns_are_in_every_fold(logs: Logs) -> None:
    number = 600
    arms = np.arange(number) % 3
    rows = {"context": np.ones(number, np.float32), "action": arms, "reward": arms}
    found = evaluate(logs(**rows, num_actions=3), [0.0, 0.0, 1.0], [DirectMethod()], num_folds=3)
    assert found["DirectMethod"].value == pytest.approx(2, abs=0.05)


class Plain:
    """Ridge regression in one piece, from the normal equations."""

    def fit(self, context: Any, index: Any, reward: Any, weights: Any) -> None:
        rows = np.concatenate([context, np.ones((len(context), 1))], axis=1)
        self.theta = []
        for arm in range(3):
            own = rows[index == arm]
            matrix = own.T @ own + 0.7 * np.eye(rows.shape[1])
            self.theta.append(np.linalg.solve(matrix, own.T @ reward[index == arm]))

    def predict(self, context: Any) -> Any:
        return np.concatenate([context, np.ones((len(context), 1))], axis=1) @ np.array(self.theta).T


@pytest.mark.parametrize("num_folds", [1, 2, 4])
def test_the_ridge_that_streams_equals_plain_ridge_regression_on_the_other_folds(logs: Logs, num_folds: int) -> None:
    log = logs(**four_contexts(900, seed=11), num_actions=3)
    streamed, plain = (
        evaluate(log, four_policy, MODELLED, reward_model=model, num_folds=num_folds, block_rows=100)
        for model in (RidgeRewardModel(tikhonov_weight=0.7), Plain())
    )
    for name, estimate in plain.estimates.items():
        assert streamed[name].value == pytest.approx(estimate.value, abs=1e-10)


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (2, 3), (2730, 3), (2731, 3), (40_001, 4), (700, 90)])
def test_a_triangular_factor_in_pieces_is_that_of_all_rows(rows: int, columns: int) -> None:
    whole = np.random.default_rng(17).normal(size=(rows, columns))
    found = triangular_factor(whole)
    assert found.shape == (min(rows, columns), columns)
    assert (np.tril(found, -1) == 0).all()
    np.testing.assert_allclose(found.T @ found, whole.T @ whole, atol=1e-9 * max(rows, 1))


def test_the_ridge_alone_fits_and_predicts(logs: Logs) -> None:
    rng = np.random.default_rng(12)
    context, index = rng.normal(size=(200, 2)), rng.integers(0, 3, 200)
    reward = context @ [1.0, -1.0] + index
    ridge, plain = RidgeRewardModel(tikhonov_weight=0.7), Plain()
    with pytest.raises(OptionError, match="fit must be called before predict"):
        ridge.predict(context)
    ridge.fit(context, index, reward, None)
    plain.fit(context, index, reward, None)
    np.testing.assert_allclose(ridge.predict(context), plain.predict(context), atol=1e-10)


def test_a_context_without_numbers_leaves_the_mean_of_each_arm(logs: Logs) -> None:
    number = 200
    arms = np.arange(number) % 2
    rows = {"context": np.zeros((number, 0), np.float32), "action": arms, "reward": 1 + 2 * arms}
    model = RidgeRewardModel(tikhonov_weight=1e-9)
    found = evaluate(logs(**rows, num_actions=2), [0.25, 0.75], [DirectMethod()], reward_model=model)
    assert found["DirectMethod"].value == pytest.approx(0.25 * 1 + 0.75 * 3)


@pytest.mark.parametrize("kind", ["regressor", "classifier"])
def test_scikit_learn_models_are_fitted_for_each_arm(logs: Logs, kind: str) -> None:
    from sklearn.linear_model import LinearRegression, LogisticRegression

    base = LinearRegression() if kind == "regressor" else LogisticRegression(C=1e6)
    log = logs(**four_contexts(20_000, seed=13), num_actions=3)
    model = SklearnRewardModel(base, 3)
    found = evaluate(log, four_policy, [DirectMethod(), DoublyRobust()], reward_model=model)
    assert found["DirectMethod"].value == pytest.approx(VALUE, abs=0.02)
    assert found["DoublyRobust"].value == pytest.approx(VALUE, abs=0.02)
    assert not hasattr(base, "coef_")


def test_scikit_learn_models_know_arms_with_one_reward_or_none_and_other_classes_than_0_and_1() -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.tree import DecisionTreeClassifier

    context = np.array([[0.0], [0.0], [1.0], [1.0], [0.0]])
    index, reward = np.array([0, 0, 0, 0, 1]), np.array([2.0, 2.0, 5.0, 5.0, 7.0])
    model = SklearnRewardModel(DecisionTreeClassifier(), 3)
    model.fit(context, index, reward, None)
    np.testing.assert_allclose(model.predict(context[1:3]), [[2, 7, 4.2], [5, 7, 4.2]])  # 4.2 is the mean of all
    weighed = SklearnRewardModel(LogisticRegression(), 1)
    weights = np.array([1.0, 1.0, 0.0, 0.0, 0.0])
    weighed.fit(context * 0, np.zeros(5, np.int64), reward, weights)
    np.testing.assert_allclose(weighed.predict(context[:1]), [[2]], atol=0.05)


def test_without_scikit_learn_or_matplotlib_the_extra_is_named(logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    found = evaluate(logs(**SIX, num_actions=2), x_policy, [IPS()])
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'diskbuf[bandits]'")):
        SklearnRewardModel(object(), 2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'diskbuf[plot]'")):
        found.plot("never.png")


def test_models_that_predict_something_else_are_refused(logs: Logs) -> None:
    log = logs(**SIX, num_actions=2)
    with pytest.raises(SpecError, match=re.escape("must predict [6, 2], a reward for each arm, got [6]")):
        evaluate(log, x_policy, [DirectMethod()], reward_model=lambda context: context[:, 0])
    with pytest.raises(SpecError, match="must predict finite rewards"):
        evaluate(log, x_policy, [DirectMethod()], reward_model=lambda context: np.full((len(context), 2), np.nan))
    bad: Any = 3
    with pytest.raises(OptionError, match="reward_model must have fit"):
        evaluate(log, x_policy, [DirectMethod()], reward_model=bad)
    with pytest.raises(OptionError, match="num_folds must leave rows to fit on, got 2 for 1 rows"):
        evaluate(log, x_policy, [DirectMethod()], reward_model=Plain(), num_folds=2, next_id=1)


# ---- policies


class Sloping(BanditPolicy):
    """Chooses arm 1 with probability x, as far as a mask allows."""

    def _probabilities(self, context: Any, mask: Any) -> Any:
        chances = x_policy(context) * (1 if mask is None else mask)
        return chances / chances.sum(axis=1, keepdims=True)

    def _tensor_probabilities(self, context: Any, mask: Any) -> Any:
        raise NotImplementedError


def sloping(observation: Any, num_actions: int = 2, **more: Any) -> Sloping:
    return Sloping(trajectories.time_step_spec(observation), BoundedArraySpec((), np.int32, 0, num_actions - 1), **more)


def test_a_bandit_policy_is_asked_for_its_probabilities(logs: Logs) -> None:
    found = evaluate(logs(**SIX, num_actions=2), sloping(ArraySpec((), np.float32)), [IPS()])
    assert found["IPS"].value == pytest.approx(31 / 6)


def test_what_the_constraint_splitter_takes_off_is_no_context_for_the_model(logs: Logs) -> None:
    mask = np.array([[1, 1], [1, 1], [1, 1], [1, 0], [1, 1], [1, 1]], np.int32)
    observation = {"x": SIX["context"], "mask": mask}
    policy = sloping(
        {"x": ArraySpec((), np.float32), "mask": ArraySpec((2,), np.int32)},
        observation_and_action_constraint_splitter=lambda nest: (nest["x"], nest["mask"]),
    )
    shapes = []

    def model(context: Any) -> Any:
        shapes.append(context.shape)
        return x_model(context)

    log = logs(**(SIX | {"context": observation}), num_actions=2)
    found = evaluate(log, policy, [DirectMethod()], reward_model=model)
    assert shapes == [(6, 1)]
    assert found["DirectMethod"].value == pytest.approx((1.5 + 1.5 + 2.5 + 1 + 1 + 1) / 6)  # row 4 allows arm 0 alone


def test_a_policy_of_other_arms_is_refused(logs: Logs) -> None:
    log = logs(**SIX, num_actions=2)
    with pytest.raises(
        OptionError, match="policy must choose among the log's 2 arms from 0 on, got one that chooses a"
    ):
        evaluate(log, sloping(ArraySpec((), np.float32), num_actions=3), [IPS()])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ([0.5, 0.25, 0.25], "probabilities must be [2], one for each of the log's arms, got [3]"),
        ([1.5, -0.5], "probabilities must be at least 0 and sum to 1, got [ 1.5 -0.5], which sum to 1."),
        ([0.5, 0.4], "must be at least 0 and sum to 1, got [0.5 0.4], which sum to 0.9."),
        ([0.5, np.nan], "must be at least 0 and sum to 1, got [0.5 nan]"),
        (lambda context: x_policy(context)[:, :1], "must be [6, 2], one for each of the log's arms, got [6, 1]"),
        (lambda context: x_policy(context)[:-1], "must be [6, 2], one for each of the log's arms, got [5, 2]"),
        (lambda context: np.full(6, 0.5), "must be [6, 2], one for each of the log's arms, got [6]"),
        (
            lambda context: x_policy(context) * np.array([1, 1, 2, 1, 1, 1])[:, None],
            "got [0.5 1.5], which sum to 2 for row 2 of lane 0. Divide them by their sum.",
        ),
        (lambda context: x_policy(context - (context == 0)), "got [ 2. -1.], which sum to 1 for row 4 of lane 0."),
    ],
)
def test_probabilities_that_are_none_are_refused(logs: Logs, policy: Any, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        evaluate(logs(**SIX, num_actions=2), policy, [IPS()])


@pytest.mark.parametrize("policy", ["greedy", None, object()])
def test_what_is_no_policy_is_refused(logs: Logs, policy: Any) -> None:
    with pytest.raises(OptionError, match="policy must be a BanditPolicy, a function"):
        evaluate(logs(**SIX, num_actions=2), policy, [IPS()])


# ---- logs with something wrong


def test_without_propensities_the_direct_method_runs_and_weighing_is_refused(logs: Logs) -> None:
    log = logs(**(SIX | {"propensity": None}), num_actions=2)
    with pytest.raises(SpecError, match="'policy_info/propensity' for IPS, DoublyRobust, which divide by it, got none"):
        evaluate(log, x_policy, [IPS(), DirectMethod(), DoublyRobust()])
    found = evaluate(log, x_policy, [DirectMethod()], reward_model=x_model)
    assert found["DirectMethod"].value == pytest.approx(10 / 6)
    assert found.diagnostics.effective_sample_size is None
    usual = evaluate(log, x_policy, reward_model=x_model)
    assert list(usual.estimates) == ["DirectMethod"]
    assert "the log has no propensities, so IPS, SNIPS, DoublyRobust were left out" in usual.notes[0]
    assert evaluate(log, x_policy, [Replay()]).diagnostics.rows == 6


@pytest.mark.parametrize("bad", [0.0, -0.25, 1.5, np.nan, 1e-12, np.inf])
def test_propensities_that_cannot_be_are_refused_and_the_row_is_named(logs: Logs, bad: float) -> None:
    log = logs(**(SIX | {"propensity": [0.5, 0.25, 0.25, 0.5, bad, bad]}), num_actions=2, lanes=2)
    message = f"'policy_info/propensity' must be at least 1e-08 and at most 1, got {bad:g} in row 2 of lane 0"
    with pytest.raises(SpecError, match=re.escape(message)) as caught:
        evaluate(log, x_policy, [IPS()])
    assert caught.value.path == "policy_info/propensity"
    # What doesn't weigh rows doesn't care.
    assert evaluate(log, x_policy, [DirectMethod()], reward_model=x_model)["DirectMethod"].value == pytest.approx(
        10 / 6
    )


def test_propensities_are_clipped_and_counted_when_a_floor_is_given(logs: Logs) -> None:
    # Rows 1 to 4 become 0.125, row 5 becomes 1, row 6 is left out.
    log = logs(**(SIX | {"propensity": [0, -1, 1e-12, 0.1, 1.5, np.nan]}), num_actions=2)
    found = evaluate(log, [0.5, 0.5], [IPS(), DoublyRobust()], propensity_floor=0.125, reward_model=x_model)
    facts = found.diagnostics
    assert found["IPS"].value == pytest.approx((4 * (1 + 3 + 4 + 0) + 0.5 * 8) / 5)
    assert (facts.rows, facts.propensities_too_small, facts.propensities_above_one) == (5, 4, 1)
    assert facts.propensities_missing == 1
    assert (facts.smallest_propensity, facts.largest_propensity) == (0.125, 1)
    assert facts.largest_weight == pytest.approx(4)
    for told in (r"raised to the floor +4", r"lowered to 1 +1", r"left out without propensity +1"):
        assert re.search(told, str(found))


def test_a_floor_that_nothing_is_below_changes_nothing(logs: Logs) -> None:
    log = logs(**SIX, num_actions=2)
    found = evaluate(log, x_policy, [IPS()], propensity_floor=0.1)
    assert found.to_json() == evaluate(log, x_policy, [IPS()]).to_json()


def test_rows_whose_reward_or_context_is_not_finite_are_refused_left_out_or_kept(logs: Logs) -> None:
    rows = SIX | {"reward": [1, 3, 4, 0, 8, np.nan], "context": SIX["context"].copy()}
    rows["context"][0] = np.inf
    log = logs(**rows, num_actions=2)
    fixed = [0.5, 0.5]
    with pytest.raises(SpecError, match="leaf 'reward' must be finite, got nan in row 5 of lane 0"):
        evaluate(log, fixed, [IPS()])
    with pytest.raises(SpecError, match="leaf 'observation' must be finite, got inf in row 0 of lane 0"):
        evaluate(log, fixed, [DirectMethod()], next_id=5)
    # The context isn't read, so its row stays: w is 1, 2, 2, 1, 1.
    assert evaluate(log, fixed, [IPS()], invalid="drop")["IPS"].value == pytest.approx((1 + 6 + 8 + 0 + 8) / 5)
    read = evaluate(log, fixed, [IPS(), DirectMethod()], invalid="drop", reward_model=x_model)
    assert read["IPS"].value == pytest.approx((6 + 8 + 0 + 8) / 4)
    assert read.diagnostics.rows == 4
    kept = evaluate(log, fixed, [IPS(), Replay()], invalid="keep")
    assert np.isnan(kept["IPS"].value)
    assert kept.diagnostics.rows == 6
    assert json.loads(kept.to_json())["estimates"]["IPS"]["value"] is None
    assert re.search(r"^IPS +nan", str(kept), re.MULTILINE)


def test_arms_that_the_log_never_shows_are_reported(logs: Logs) -> None:
    log = logs(**(SIX | {"action": np.array(SIX["action"]) + 4}), num_actions=4, minimum=3)
    found = evaluate(log, [0.1, 0.3, 0.4, 0.2], [SNIPS()])
    assert found.diagnostics.arms_never_shown == (3, 6)
    assert found.diagnostics.probability_never_shown == pytest.approx(0.3)
    assert "gives 30 % of its decisions to arms that the log never shows" in found.notes[0]
    assert re.search(r"^arms never shown +3, 6$", str(found), re.MULTILINE)


def test_propensities_that_are_wrong_show_in_the_mean_weight(logs: Logs) -> None:
    rows = four_contexts(5000, seed=14)
    assert evaluate(logs(**rows, num_actions=3), four_policy, [IPS()]).notes == ()
    rows["propensity"] = rows["propensity"] * 0.8
    (note,) = evaluate(logs(**rows, num_actions=3), four_policy, [IPS()]).notes
    assert re.match(r"the mean weight is 1\.2\d+ and should be 1: the propensities are wrong", note)


def test_replay_of_a_log_whose_arms_were_not_equally_probable_is_doubted(logs: Logs) -> None:
    (note,) = evaluate(logs(**SIX, num_actions=2), x_policy, [Replay()]).notes
    assert note == "Replay is biased unless all arms were equally probable, but propensities are 0.25 to 0.5."
    even = logs(**(SIX | {"propensity": [0.5] * 6}), num_actions=2)
    assert evaluate(even, x_policy, [Replay()]).notes == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"estimators": []}, "estimators must be one or more"),
        ({"estimators": [IPS]}, "estimators must be instances such as IPS()"),
        ({"estimators": [DRos(1), DRos(1.0)]}, "each with a name of its own, got ['DRos(1)', 'DRos(1)']"),
        ({"confidence": 1}, "confidence must be between 0 and 1, got 1"),
        ({"confidence": np.nan}, "confidence must be between 0 and 1, got nan"),
        ({"num_bootstrap": -1}, "num_bootstrap must be an int of at least 0"),
        ({"num_folds": 0}, "num_folds must be an int of at least 1"),
        ({"seed": -1}, "seed must be an int of at least 0"),
        ({"block_rows": 0}, "block_rows must be an int of at least 1"),
        ({"propensity_floor": 0}, "propensity_floor must be above 0 and at most 1, or None, got 0"),
        ({"propensity_floor": np.nan}, "propensity_floor must be above 0 and at most 1, or None, got nan"),
        ({"invalid": "ignore"}, "invalid must be 'reject', 'drop' or 'keep', got 'ignore'"),
    ],
)
def test_arguments_outside_their_rule_are_refused(logs: Logs, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        evaluate(logs(**SIX, num_actions=2), x_policy, **arguments)


@pytest.mark.parametrize(
    "make",
    [lambda: ClippedIPS(0), lambda: ClippedIPS(np.nan), lambda: SwitchDR(-1), lambda: DRos("1")],  # type: ignore[arg-type]
)
def test_estimators_refuse_numbers_outside_their_rule(make: Any) -> None:
    with pytest.raises(OptionError, match=r"must be a number (of at least|above) 0, got"):
        make()


# ---- sums of groups


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 30))
def test_groups_are_the_same_whatever_the_blocks(blocks: list[int], most_groups: int) -> None:
    number = sum(blocks)
    term = np.arange(number) ** 2.0
    sums = GroupSums(number, most_groups=most_groups)
    ends = np.cumsum(blocks).tolist()
    for rows, end in zip(blocks, ends, strict=True):
        sums.add({"t": term[end - rows : end]}, rows)
    if not number:
        assert sums.groups() == {}
        return
    groups, size = sums.groups(), -(-number // most_groups)
    naive = [term[first : first + size] for first in range(0, number, size)]
    assert len(naive) <= most_groups
    assert groups["rows"].tolist() == [len(group) for group in naive]
    np.testing.assert_allclose(groups["t"], [group.sum() for group in naive])


def test_groups_are_drawn_again_as_a_plain_bootstrap_does() -> None:
    term, rows = np.random.default_rng(15).normal(size=7), np.arange(1.0, 8)
    found = drawn_again({"rows": rows, "t": term}, np.random.default_rng(16), count=50)
    drawn = np.random.default_rng(16).integers(0, 7, size=(50, 7), dtype=np.int32)
    np.testing.assert_allclose(found["t"], term[drawn].sum(axis=1))
    np.testing.assert_allclose(found["rows"], rows[drawn].sum(axis=1))


# ---- results


@pytest.fixture
def found(logs: Logs) -> Evaluation:
    return evaluate(logs(**SIX, num_actions=2), x_policy, [Replay(), IPS(), DRos(2.0)], reward_model=x_model, seed=3)


def test_an_evaluation_reads_as_a_table(found: Evaluation) -> None:
    lines = str(found).splitlines()
    assert lines[0].split() == ["estimator", "value", "95", "%", "from", "to"]
    estimate = found["IPS"]
    assert lines[2].split() == ["IPS", "5.16667", f"{estimate.lower:#.6g}", f"{estimate.upper:#.6g}"]
    assert len({line.index(".") for line in lines[2:4]}) == 1
    assert len({len(line) for line in lines[:4]}) == 1
    assert re.search(r"^effective sample size +3\.64463$", str(found), re.MULTILINE)


def test_an_evaluation_is_written_as_json(found: Evaluation) -> None:
    told = json.loads(found.to_json())
    assert told["estimates"]["IPS"]["value"] == pytest.approx(31 / 6)
    assert told["estimates"]["IPS"]["lower"] < told["estimates"]["IPS"]["value"] < told["estimates"]["IPS"]["upper"]
    assert told["diagnostics"]["largest_weight"] == 4
    assert (told["confidence"], told["seed"]) == (0.95, 3)


def test_an_unknown_name_is_told_the_known_ones(found: Evaluation) -> None:
    with pytest.raises(OptionError, match=re.escape("name must be one of ['Replay', 'IPS', 'DRos(2)'], got 'DM'")):
        _ = found["DM"]


def test_without_bootstrap_there_are_no_intervals(logs: Logs, tmp_path: Path) -> None:
    bare = evaluate(logs(**SIX, num_actions=2), x_policy, [IPS()], num_bootstrap=0)
    assert (bare["IPS"].lower, bare["IPS"].upper) == (None, None)
    assert re.search(r"^IPS +5\.16667$", str(bare), re.MULTILINE)
    bare.plot(tmp_path / "bare.png")


def test_an_evaluation_is_drawn(found: Evaluation, logs: Logs, tmp_path: Path) -> None:
    found.plot(tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    nothing = evaluate(logs(**(SIX | {"action": [0] * 6}), num_actions=2), [0.0, 1.0], [Replay(), IPS()])
    nothing.plot(str(tmp_path / "nothing.svg"))
    assert "no estimate" in (tmp_path / "nothing.svg").read_text()  # in a comment beside the glyphs
    with pytest.raises(OptionError, match="file must end in a format that matplotlib knows"):
        found.plot(tmp_path / "found.nonsense")


@pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads /proc")
def test_a_quick_run_of_the_benchmark_measures_everything(tmp_path: Path) -> None:
    command = [sys.executable, BENCH, "--quick", "--folder", "stores", "--json", "figures.json"]
    result = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr[-6000:]
    assert list((tmp_path / "stores").iterdir()) == []
    rows = json.loads((tmp_path / "figures.json").read_text(encoding="utf-8"))["rows"]
    parts = [f"{name}_{what}" for name in ("estimates", "intervals") for what in ("seconds", "beside_reading")]
    assert [row["name"] for row in rows] == [*parts, "memory", "doubly_robust", "doubly_robust_memory"]


def test_a_policy_that_was_saved_is_evaluated_as_the_one_it_was(tmp_path: Path) -> None:
    from diskbuf.bandits.agents import LinearThompsonSamplingAgent
    from diskbuf.bandits.environments import WheelEnvironment
    from diskbuf.bandits.trainer import train
    from diskbuf.policies import load_policy, policy_from

    wheel = WheelEnvironment(0.5, [1.2, 1.0, 1.0, 1.0, 1.0], [0.1] * 5, 3.0, 0.1, batch_size=8, seed=0)
    agent = LinearThompsonSamplingAgent(wheel.time_step_spec(), wheel.action_spec(), seed=0)
    train(tmp_path, agent, wheel, 3, 5)
    loaded = load_policy(tmp_path / f"policy_{3 * 5 * 8}")
    estimators = [SNIPS(), DirectMethod()]
    live = evaluate(tmp_path / "log.zarr", agent.policy, estimators)
    saved = evaluate(tmp_path / "log.zarr", loaded, estimators)
    for name in ("SNIPS", "DirectMethod"):
        assert saved[name].value == pytest.approx(live[name].value, rel=1e-4)
    mute = policy_from(lambda step, state: loaded.action(step, state), wheel.time_step_spec(), wheel.action_spec())
    assert not hasattr(mute, "probabilities")
