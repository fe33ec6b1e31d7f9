"""Bandit environments against their definitions, brute force over all arms, and themselves after a restore."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from diskbuf.bandits.environments import (
    BanditEnvironment,
    BernoulliEnvironment,
    ClassificationEnvironment,
    DriftingLinearEnvironment,
    LinearNormalMultipleRewards,
    LinearNormalReward,
    LinearNormalStructuredReward,
    PiecewiseStochasticEnvironment,
    RandomBanditEnvironment,
    RewardFunction,
    StationaryStochasticEnvironment,
    StationaryStochasticStructuredEnvironment,
    WheelEnvironment,
    environment_utilities,
    wheel_environment,
)
from diskbuf.errors import OptionError, SpecError
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import StepType
from diskbuf.tree import Structure

MU_BASE = [1.2, 1.0, 0.9, 0.8, 0.7]
CONTEXTS = np.array([[1.0, 2.0], [3.0, 4.0], [-5.0, 6.0]], np.float32)


def wheel(seed: int | None = 0, *, batch_size: int = 4, **changes: Any) -> WheelEnvironment:
    arguments = {"delta": 0.5, "mu_base": MU_BASE, "std_base": [0.1] * 5, "mu_high": 50.0, "std_high": 0.2}
    return WheelEnvironment(**{**arguments, "batch_size": batch_size, "seed": seed, **changes})


def stationary(seed: int | None = 0, *, sigma: float = 0.1, **changes: Any) -> StationaryStochasticEnvironment:
    arguments = {
        "context_sampling_fn": functools.partial(environment_utilities.context_sampling_fn, 4, 3),
        "reward_fns": environment_utilities.structured_linear_reward_fn_generator(3, 5, sigma, seed=7),
        "batch_size": 4,
    }
    return StationaryStochasticEnvironment(**{**arguments, "seed": seed, **changes})


def plain_stationary(seed: int) -> StationaryStochasticEnvironment:
    fns = [lambda x, rng, arm=arm: x[0] * arm + rng.normal() for arm in range(3)]
    return stationary(seed, reward_fns=fns)


def mixed_stationary(seed: int) -> StationaryStochasticEnvironment:
    return stationary(seed, reward_fns=[LinearNormalReward([1, 2, 3], 0.5), lambda x, rng: x[1] + rng.normal()])


def structured(seed: int, *, sigma: float = 0.1, **changes: Any) -> StationaryStochasticStructuredEnvironment:
    arguments = {
        "global_context_sampling_fn": lambda rng, shape: rng.normal(size=(*shape, 2)),
        "arm_context_sampling_fn": lambda rng, shape: rng.normal(size=(*shape, 3)),
        "num_actions": 6,
        "reward_fn": LinearNormalStructuredReward([1.0, -1.0], [0.5, 1.0, 2.0], sigma),
        "batch_size": 4,
    }
    return StationaryStochasticStructuredEnvironment(**{**arguments, "seed": seed, **changes})


def plain_structured(seed: int, **changes: Any) -> StationaryStochasticStructuredEnvironment:
    return structured(
        seed,
        global_context_sampling_fn=lambda rng: rng.integers(0, 10, [2]),
        arm_context_sampling_fn=lambda rng: {"a": rng.normal(size=3), "b": rng.normal(size=(4, 5))},
        reward_fn=lambda lane, arm, rng: sum(lane) + arm["a"][0] + arm["b"][3, 3] + rng.normal(),
        **changes,
    )


def linear(kind: Any, seed: int, **changes: Any) -> Any:
    arguments = {
        "observation_distribution": lambda rng: rng.normal(size=(4, 3)).astype(np.float32),
        "observation_to_reward_distribution": lambda rng: rng.normal(size=(3, 5)),
        "additive_reward_distribution": lambda rng: rng.normal(size=5),
    }
    return kind(**{**arguments, "seed": seed, **changes})


def piecewise(seed: int, **changes: Any) -> PiecewiseStochasticEnvironment:
    changes = {"interval_distribution": lambda rng: rng.integers(8, 20), **changes}
    return linear(PiecewiseStochasticEnvironment, seed, **changes)


def drifting(seed: int, **changes: Any) -> DriftingLinearEnvironment:
    changes = {"drift_distribution": lambda rng: rng.normal(scale=0.1), **changes}
    return linear(DriftingLinearEnvironment, seed, **changes)


def random_bandit(seed: int) -> RandomBanditEnvironment:
    return RandomBanditEnvironment(
        lambda rng: {"a": rng.normal(size=(4, 3)), "b": rng.integers(0, 9, 4)},
        lambda rng: rng.normal(size=4),
        num_actions=3,
        seed=seed,
    )


def classification(seed: int, **changes: Any) -> ClassificationEnvironment:
    features = np.arange(20, dtype=np.float32).reshape(10, 2)
    labels = np.arange(10) % 3
    return ClassificationEnvironment(features, labels, **{"batch_size": 4, "reward_std": 0.1, "seed": seed, **changes})


MAKERS: dict[str, Callable[[int], BanditEnvironment]] = {
    "wheel": wheel,
    "stationary": stationary,
    "plain stationary": plain_stationary,
    "mixed stationary": mixed_stationary,
    "structured": structured,
    "plain structured": plain_structured,
    "piecewise": piecewise,
    "piecewise of one long piece": lambda seed: piecewise(seed, interval_distribution=1000),
    "drifting": drifting,
    "noisy drifting": lambda seed: drifting(seed, reward_std=0.3),
    "random": random_bandit,
    "classification": classification,
    "bernoulli": lambda seed: BernoulliEnvironment([0.3, 0.5, 0.7], 4, seed=seed),
}
every_environment = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def run(env: BanditEnvironment, steps: int, *, start: int = 0) -> list[Any]:
    """Pulls arms in turn; returns the leaves of all time steps."""
    structure = Structure(env.time_step_spec())
    lanes = np.arange(env.batch_size)
    return [
        leaf
        for step in range(start, start + steps)
        for leaf in structure.flatten(env.step(((step + lanes) % env.num_actions).astype(np.int32)))
    ]


def equal(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(map(np.array_equal, first, second))


@every_environment
def test_time_steps_are_as_the_specs_say(make: Callable[[int], BanditEnvironment]) -> None:
    env = make(0)
    first = env.reset()
    assert (first.step_type == StepType.FIRST).all()
    after = env.step(np.zeros(env.batch_size, np.int32))
    assert (after.step_type == StepType.LAST).all()
    assert (after.discount == 0).all()
    structure = Structure(env.time_step_spec())
    for time_step in (first, after):
        for leaf, spec in zip(structure.flatten(time_step), structure.flatten(env.time_step_spec()), strict=True):
            assert leaf.dtype == spec.dtype
            assert leaf.shape == (env.batch_size, *spec.shape)


@every_environment
def test_a_seed_repeats_everything_and_another_does_not(make: Callable[[int], BanditEnvironment]) -> None:
    runs = []
    for seed in (3, 3, 4):
        env = make(seed)
        env.reset()
        runs.append(run(env, 12))
    assert equal(runs[0], runs[1])
    assert not equal(runs[0], runs[2])


@every_environment
def test_a_restored_environment_goes_on_with_the_same_contexts_and_rewards(
    make: Callable[[int], BanditEnvironment],
) -> None:
    env = make(3)
    env.reset()
    run(env, 7)
    state = env.state()
    wanted = run(env, 12, start=7)
    assert equal(run_restored(make(99), state), wanted)
    assert equal(run_restored(env, state), wanted)  # the state is as it was, and can be used again


def run_restored(env: BanditEnvironment, state: dict[str, Any]) -> list[Any]:
    env.restore(state)
    return run(env, 12, start=7)


def test_the_state_of_another_kind_is_refused() -> None:
    env = wheel()
    env.reset()
    before = run(env, 1)
    state = env.state()
    with pytest.raises(OptionError, match=r"state must be what state\(\) returned, with .*got .*_weights"):
        env.restore(drifting(0).state())
    after = run(env, 1)
    env.restore(state)
    assert equal(after, run(env, 1))
    assert not equal(before, after)


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (np.zeros(3, np.int32), r"leaf 'action' must be integers \[4\], got int32 \[3\]"),
        (np.zeros((4, 1), np.int32), r"got int32 \[4, 1\]"),
        (np.zeros(4), r"must be integers \[4\], got float64 \[4\]"),
        (np.zeros(4, bool), r"got bool"),
        (np.array([0, 1, 5, 0]), r"must lie within \[0, 4\], got 5 in lane 2"),
        (np.array([0, -1, 0, 0], np.int8), r"must lie within \[0, 4\], got -1 in lane 1"),
    ],
)
def test_an_action_that_does_not_fit_is_refused_and_nothing_is_pulled(action: Any, message: str) -> None:
    env = wheel()
    env.reset()
    state = env.state()
    with pytest.raises(SpecError, match=message):
        env.step(action)
    after = run(env, 1)
    env.restore(state)
    assert equal(after, run(env, 1))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", ">i4", "int64", "uint64"])
def test_actions_of_any_integer_dtype_pull_the_same_arms(dtype: str) -> None:
    rewards = []
    for kind in (dtype, "int64"):
        env = wheel(1)
        env.reset()
        rewards.append(env.step(np.array([0, 1, 3, 4], kind)).reward)
    np.testing.assert_array_equal(*rewards)


# The wheel


def wheel_mean(x: float, y: float, arm: int, delta: float = 0.5) -> float:
    """The definition, for one context and arm."""
    best = {(True, True): 1, (True, False): 2, (False, True): 3, (False, False): 4}[x >= 0, y >= 0]
    return 50.0 if np.hypot(np.float32(x), np.float32(y)) > delta and arm == best else MU_BASE[arm]


def test_a_wheel_without_noise_pays_the_means_of_the_definition() -> None:
    env = wheel(batch_size=64, std_base=[0] * 5, std_high=0)
    env.reset()
    for step in range(20):
        observation = env.current_time_step().observation
        action = (np.arange(64) + step) % 5
        reward = env.step(action).reward
        wanted = [wheel_mean(*context, arm) for context, arm in zip(observation, action, strict=True)]
        np.testing.assert_array_equal(reward, np.array(wanted, np.float32))


def test_the_noise_of_a_wheel_is_as_wide_as_was_asked() -> None:
    env = wheel(batch_size=20_000, std_base=[1.0, 2.0, 3.0, 4.0, 5.0], std_high=6.0)
    observation = env.reset().observation
    best = env.optimal_action(observation)
    for arm in range(5):
        reward = env.step(np.full(20_000, arm)).reward
        is_high = (best == arm) & (arm > 0)
        for lanes, mean, spread in ((is_high, 50.0, 6.0), (~is_high, MU_BASE[arm], arm + 1.0)):
            count = lanes.sum()
            if count:  # five standard errors of mean and of standard deviation
                assert abs(reward[lanes].mean() - mean) < 5 * spread / np.sqrt(count)
                assert abs(reward[lanes].std() - spread) < 5 * spread / np.sqrt(2 * count)
        best = env.optimal_action(env.current_time_step().observation)


def test_contexts_of_a_wheel_are_uniform_in_the_disc() -> None:
    observation = wheel(batch_size=40_000).reset().observation
    radius = np.hypot(*observation.T)
    assert radius.max() <= 1 + 1e-6
    for limit in (0.25, 0.5, 0.75, 0.95):  # the share of the area; 5 standard errors are below 0.0125
        assert abs((radius <= limit).mean() - limit**2) < 0.0125
    quadrant = 2 * (observation[:, 0] < 0) + (observation[:, 1] < 0)
    assert np.abs(np.bincount(quadrant) / 40_000 - 0.25).max() < 0.0125


def test_the_best_arm_of_a_wheel_is_the_best_of_all() -> None:
    env = wheel(batch_size=500)
    observation = env.reset().observation
    means = np.array([[wheel_mean(*context, arm) for arm in range(5)] for context in observation], np.float32)
    action, reward = env.optimal_action(observation), env.optimal_reward(observation)
    assert action.dtype == np.int32
    assert set(action) == {0, 1, 2, 3, 4}
    np.testing.assert_array_equal(action, means.argmax(axis=1))
    np.testing.assert_array_equal(reward, means.max(axis=1))
    np.testing.assert_array_equal(wheel_environment.compute_optimal_action(observation, delta=0.5), action)
    np.testing.assert_array_equal(
        wheel_environment.compute_optimal_reward(observation, delta=0.5, mu_inside=1.2, mu_high=50.0), reward
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta": 0.0}, r"delta must lie inside \(0, 1\), got 0.0"),
        ({"delta": 1.0}, r"delta must lie inside"),
        ({"delta": float("nan")}, "delta must be finite"),
        ({"delta": "wide"}, "delta must be a number, got 'wide'"),
        ({"mu_base": [1.0] * 6}, r"mu_base must be numbers \[5\], got float64 \[6\]"),
        ({"mu_base": [1.0, 1.1, 0, 0, 0]}, "the first of mu_base must be the highest"),
        ({"mu_base": [np.nan, 1.1, 0, 0, 0]}, "mu_base must be finite"),
        ({"std_base": [0.1] * 4}, r"std_base must be numbers \[5\]"),
        ({"std_base": 0.1}, r"std_base must be numbers \[5\]"),
        ({"std_base": [0.1, 0.1, -0.1, 0.1, 0.1]}, "std_base must be at least 0"),
        ({"mu_high": 1.0}, "mu_high must be at least the 1.2 of mu_base"),
        ({"std_high": -1.0}, "std_high must be at least 0"),
        ({"batch_size": 0}, "batch_size must be an int of at least 1"),
        ({"seed": -1}, "seed must be None or an integer"),
    ],
)
def test_a_wheel_outside_its_rules_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        wheel(**changes)


# Bernoulli and random


def test_bernoulli_arms_pay_one_as_often_as_they_should() -> None:
    means = [0.0, 0.2, 0.9, 1.0]
    env = BernoulliEnvironment(means, batch_size=40_000, seed=0)
    assert (env.reset().observation == 1).all()
    for arm, mean in enumerate(means):
        reward = env.step(np.full(40_000, arm)).reward
        assert set(reward.tolist()) <= {0.0, 1.0}
        assert abs(reward.mean() - mean) <= 5 * np.sqrt(mean * (1 - mean) / 40_000)
    assert env.optimal_action(np.ones(2)).tolist() == [3, 3]
    assert env.optimal_reward(np.ones(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("means", [[], [0.5, 1.5], [-0.1], [np.nan], 0.5, [[0.5]], ["a"]])
def test_bernoulli_means_that_are_no_probabilities_are_refused(means: Any) -> None:
    with pytest.raises(OptionError, match="means must"):
        BernoulliEnvironment(means)


def test_a_random_bandit_pays_the_same_whichever_arm_is_pulled() -> None:
    rewards = []
    for arm in (0, 2):
        env = random_bandit(5)
        env.reset()
        rewards.append(env.step(np.full(4, arm)).reward)
    np.testing.assert_array_equal(*rewards)
    with pytest.raises(NotImplementedError, match="Give reward_mean"):
        random_bandit(5).optimal_reward(random_bandit(5).reset().observation)
    with pytest.raises(SpecError, match=r"reward_distribution must draw numbers \[4\]"):
        RandomBanditEnvironment(lambda: np.ones((4, 1)), lambda: np.ones(3), num_actions=2)


# Stationary


def test_plain_functions_are_called_with_one_context_in_the_order_of_lanes() -> None:
    called = []

    def arm(number: int) -> Callable[[Any], float]:
        def reward_fn(context: Any) -> float:
            called.append((number, context.tolist()))
            return 10 * number + context[0]

        return reward_fn

    env = StationaryStochasticEnvironment(lambda: CONTEXTS, [arm(0), arm(1), arm(2)], batch_size=3)
    env.reset()
    assert env.step(np.array([2, 0, 1])).reward.tolist() == [21.0, 3.0, 5.0]
    assert called == [(2, [1.0, 2.0]), (0, [3.0, 4.0]), (1, [-5.0, 6.0])]


def test_functions_that_fill_the_same_array_again_leave_older_contexts_alone() -> None:
    buffer = np.zeros((1, 2))

    def sample() -> Any:
        buffer[:] += 1
        return buffer

    env = StationaryStochasticEnvironment(sample, [lambda x: x[0]])
    first = env.reset().observation
    before = first.copy()
    env.step(np.array([0]))
    np.testing.assert_array_equal(first, before)


class Doubled(RewardFunction):
    """One that isn't linear, so that arms are asked one by one."""

    def mean(self, context: Any) -> Any:
        return 2 * context[..., 0]

    def sample(self, context: Any, rng: Any) -> Any:
        return self.mean(context)


@pytest.mark.parametrize("sigma", [0.0, 1.5])
def test_linear_rewards_are_normal_around_the_product(sigma: float) -> None:
    context = np.array([2.0, -1.0, 0.5], np.float32)
    fns = environment_utilities.sliding_linear_reward_fn_generator(3, 4, sigma)
    for extra in ([], [Doubled()]):  # all at once, and arm by arm
        env = stationary(
            context_sampling_fn=lambda: np.tile(context, (8_000, 1)), reward_fns=[*fns, *extra], batch_size=8_000
        )
        env.reset()
        action = np.arange(8_000) % (4 + len(extra))
        reward = env.step(action).reward
        for arm in range(4):
            mean = context @ np.arange(arm, arm + 3)
            paid = reward[action == arm]
            assert abs(paid.mean() - mean) <= 5 * sigma / np.sqrt(len(paid))
            assert abs(paid.std() - sigma) <= 5 * sigma / np.sqrt(2 * len(paid))
        assert (reward[action == 4] == 4.0).all()


@pytest.mark.parametrize("with_other", [False, True])
def test_the_best_arm_of_a_stationary_environment_is_the_best_of_all(with_other: bool) -> None:
    def told(x: Any, enable_noise: bool = True) -> float:
        return 3 * x[1] + (100 if enable_noise else 0)

    fns = list(environment_utilities.structured_linear_reward_fn_generator(3, 5, 0.1, seed=1))
    fns += [Doubled(), told] if with_other else []
    observation = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    env = stationary(reward_fns=fns)
    means = np.array([[fn(x, enable_noise=False) for fn in fns] for x in observation])
    np.testing.assert_array_equal(env.optimal_action(observation), means.argmax(axis=1))
    np.testing.assert_allclose(env.optimal_reward(observation), means.max(axis=1), rtol=1e-6)
    if not with_other:
        utilities = environment_utilities
        np.testing.assert_array_equal(utilities.compute_optimal_action(observation, fns), means.argmax(axis=1))
        np.testing.assert_allclose(utilities.compute_optimal_reward(observation, fns), means.max(axis=1))


def test_functions_that_tell_no_mean_leave_the_best_arm_to_arguments() -> None:
    def make(**given: Any) -> StationaryStochasticEnvironment:
        return StationaryStochasticEnvironment(
            lambda: CONTEXTS, [lambda x: x[0], lambda x: x[1]], batch_size=3, **given
        )

    with pytest.raises(NotImplementedError, match="Give optimal_reward_fn"):
        make().optimal_reward(CONTEXTS)
    with pytest.raises(NotImplementedError, match="Give optimal_action_fn"):
        make().optimal_action(CONTEXTS)
    env = make(optimal_reward_fn=lambda x: x.max(axis=1), optimal_action_fn=lambda x: x.argmax(axis=1))
    assert env.optimal_reward(CONTEXTS).tolist() == [2.0, 4.0, 6.0]
    assert env.optimal_action(CONTEXTS).tolist() == [1, 1, 1]


@pytest.mark.parametrize("given", [None, LinearNormalMultipleRewards([[1.0, 0.0], [0.0, 2.0]])])
def test_rewards_of_several_elements_are_given_as_their_spec_says(given: Any) -> None:
    fn = given or (lambda x: [x[0], 2 * x[1]])
    env = StationaryStochasticEnvironment(
        lambda: CONTEXTS, [fn, fn], batch_size=3, reward_spec=ArraySpec((2,), np.float32)
    )
    assert env.reset().reward.shape == (3, 2)
    assert env.step(np.array([0, 1, 0])).reward.tolist() == [[1.0, 4.0], [3.0, 8.0], [-5.0, 12.0]]
    with pytest.raises(NotImplementedError):
        env.optimal_reward(CONTEXTS)


@pytest.mark.parametrize(
    ("reward_fn", "reward_spec", "message"),
    [
        (lambda x: np.nan, None, "leaf 'reward' must be finite, got nan in lane 0"),
        (lambda x: 1e300, None, "leaf 'reward' must be finite, got inf in lane 0"),
        (lambda x: x[0] / 2, BoundedArraySpec((), np.float32, 0, 1), r"must lie within \[0.0, 1.0\], got 1.5 in lane"),
        (lambda x: [x[0]], None, r"leaf 'reward' must be float32 \[3\], got float32 \[3, 1\]"),
        (lambda x: "much", None, "leaf 'reward' must be float32"),
        (lambda x: None, None, "leaf 'reward' must be float32"),
        (lambda x: [1.0] * (2 if x[0] > 2 else 1), None, "leaf 'reward' must be float32"),
    ],
)
def test_rewards_that_do_not_fit_are_refused(reward_fn: Any, reward_spec: Any, message: str) -> None:
    env = StationaryStochasticEnvironment(lambda: CONTEXTS, [reward_fn], batch_size=3, reward_spec=reward_spec)
    env.reset()
    with pytest.raises(SpecError, match=message):
        env.step(np.zeros(3, np.int32))


def test_a_reward_function_of_another_batch_shape_is_refused() -> None:
    class Wrong(Doubled):
        def sample(self, context: Any, rng: Any) -> Any:
            return np.float64(1.0)

    env = StationaryStochasticEnvironment(lambda: CONTEXTS, [Wrong(), Doubled()], batch_size=3)
    env.reset()
    with pytest.raises(SpecError, match=r"leaf 'reward' must be \[2\], got \[\] from a reward function"):
        env.step(np.array([0, 0, 1]))


def test_contexts_of_another_batch_size_or_dtype_are_refused() -> None:
    with pytest.raises(SpecError, match=r"must return batch_size = 4 contexts, got float32 \[3, 2\]"):
        StationaryStochasticEnvironment(lambda: CONTEXTS, [lambda x: x[0]], batch_size=4)
    given = [CONTEXTS]
    env = StationaryStochasticEnvironment(lambda: given[0], [lambda x: x[0]], batch_size=3)
    env.reset()
    for wrong, message in (
        (CONTEXTS[:2], r"leaf 'observation' must be float32 \[3, 2\], got float32 \[2, 2\]"),
        (CONTEXTS.astype(float), r"got float64 \[3, 2\]"),
        (CONTEXTS * np.float32(np.inf), "leaf 'observation' must be finite, got"),
    ):
        given[0] = wrong
        with pytest.raises(SpecError, match=message):
            env.step(np.zeros(3, np.int32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_sampling_fn": CONTEXTS}, "context_sampling_fn must be a function that draws"),
        ({"reward_fns": []}, "reward_fns must be a list of functions"),
        ({"reward_fns": [1.0]}, "reward_fns must be a list of functions"),
        ({"reward_fns": [LinearNormalReward([1.0, 2.0], 0.1)]}, r"theta of arm 0 must be \[3\].*got \[2\]"),
        ({"optimal_reward_fn": 3}, "optimal_reward_fn must be None or a function"),
    ],
)
def test_a_stationary_environment_outside_its_rules_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        stationary(**changes)


def test_linear_rewards_outside_their_rules_are_refused() -> None:
    with pytest.raises(OptionError, match="sigma must be at least 0"):
        LinearNormalReward([1.0], -1.0)
    with pytest.raises(OptionError, match=r"theta must be numbers \[d\]"):
        LinearNormalReward(1.0, 1.0)
    with pytest.raises(OptionError, match="theta must be finite"):
        LinearNormalReward([np.inf], 1.0)


def test_generators_of_reward_functions_make_the_thetas_they_say() -> None:
    utilities = environment_utilities
    sliding = utilities.normalized_sliding_linear_reward_fn_generator(3, 2, 0.1)
    np.testing.assert_allclose([fn.theta for fn in sliding], [[0.0, 0.2, 0.4], [0.2, 0.4, 0.6]])
    alike = utilities.structured_linear_reward_fn_generator(3, 4, 0.1, drift_coefficient=0.01, seed=0)
    steps = np.diff([fn.theta for fn in alike], axis=0)
    assert ((steps >= 0) & (steps < 0.01)).all()
    several = utilities.random_linear_multiple_reward_fn_generator(3, 2, num_rewards=4, seed=0)
    assert [fn.thetas.shape for fn in several] == [(3, 4)] * 2
    one = utilities.random_linear_multiple_reward_fn_generator(3, 2, num_rewards=1, seed=0)
    assert one[0](np.ones((5, 3))).shape == (5,)


# Structured


def test_structured_rewards_are_those_of_the_pulled_arms_own_context() -> None:
    def reward_fn(lane: Any, arm: Any, enable_noise: bool = True) -> float:
        return float(lane.sum() + arm[0][0])

    env = structured(
        0,
        global_context_sampling_fn=lambda rng: rng.normal(size=2),
        arm_context_sampling_fn=lambda rng: (rng.normal(size=3), rng.integers(0, 5, 2)),
        reward_fn=reward_fn,
    )
    observation = env.reset().observation
    means = observation["global"].sum(axis=1)[:, None] + observation["per_arm"][0][:, :, 0]  # [B, K]
    action = np.array([5, 0, 3, 3])
    np.testing.assert_allclose(env.step(action).reward, means[np.arange(4), action], rtol=1e-6)
    np.testing.assert_array_equal(env.optimal_action(observation), means.argmax(axis=1))
    np.testing.assert_allclose(env.optimal_reward(observation), means.max(axis=1), rtol=1e-6)


def test_the_linear_structured_reward_is_its_definition_and_knows_the_best_arm() -> None:
    env = structured(0, sigma=0.0)
    observation = env.reset().observation
    means = (observation["global"] @ [1.0, -1.0])[:, None] + observation["per_arm"] @ [0.5, 1.0, 2.0]
    action = np.array([1, 5, 0, 2])
    np.testing.assert_allclose(env.step(action).reward, means[np.arange(4), action], rtol=1e-5)
    np.testing.assert_array_equal(env.optimal_action(observation), means.argmax(axis=1))
    np.testing.assert_allclose(env.optimal_reward(observation), means.max(axis=1), rtol=1e-6)


def test_structured_functions_outside_their_rules_are_refused() -> None:
    with pytest.raises(SpecError, match=r"must return arrays that begin with shape = \[1\]"):
        structured(0, global_context_sampling_fn=lambda shape: np.zeros((7, 2)))
    with pytest.raises(OptionError, match="reward_fn must be a function"):
        structured(0, reward_fn=3)
    with pytest.raises(OptionError, match="num_actions must be an int of at least 1"):
        structured(0, num_actions=0)
    with pytest.raises(NotImplementedError, match="Give optimal_action_fn"):
        plain_structured(0).optimal_action(plain_structured(0).reset().observation)
    sizes = iter(range(1, 100))
    env = structured(0, global_context_sampling_fn=lambda: np.zeros(next(sizes)))
    with pytest.raises(SpecError, match="must return the same shapes in every call"):
        env.reset()


# Piecewise and drifting


@pytest.mark.parametrize("make", [piecewise, drifting])
def test_linear_environments_pay_by_the_weights_of_the_step_and_regret_is_never_negative(make: Any) -> None:
    env = make(0)
    observation = env.reset().observation
    for step in range(30):
        action = (np.arange(4) + step) % 5
        time_step = env.step(action)
        means = observation @ env.observation_to_reward + env.additive_reward
        np.testing.assert_allclose(time_step.reward, means[np.arange(4), action], rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(env.optimal_action(observation), means.argmax(axis=1))
        np.testing.assert_allclose(env.optimal_reward(observation), means.max(axis=1), rtol=1e-5)
        assert (env.optimal_reward(observation) - time_step.reward > -1e-5).all()
        observation = time_step.observation


def test_pieces_last_as_many_pulls_as_their_interval() -> None:
    env = piecewise(0, interval_distribution=10)
    env.reset()
    weights = []
    for _ in range(8):  # 4 pulls each; the ends at 10 and 20 pulls are met at 12 and 20
        env.step(np.zeros(4, np.int32))
        weights.append(env.observation_to_reward)
    is_new = [not np.array_equal(one, other) for one, other in itertools.pairwise(weights)]
    assert is_new == [False, False, True, False, True, False, False]


def test_drift_turns_two_neighbouring_coordinates_by_the_angle() -> None:
    env = drifting(0, drift_distribution=0.3)
    env.reset()
    rows = set()
    for _ in range(20):
        before = env.observation_to_reward
        env.step(np.zeros(4, np.int32))
        after = env.observation_to_reward
        np.testing.assert_allclose(np.linalg.norm(after, axis=0), np.linalg.norm(before, axis=0))
        changed = np.flatnonzero((before != after).any(axis=1))
        assert changed.tolist() in ([0, 1], [1, 2])
        rows.add(int(changed[0]))
        was, now = (weights[changed[0]] + 1j * weights[changed[1]] for weights in (before, after))
        np.testing.assert_allclose(now, was * np.exp(0.3j))
    assert rows == {0, 1}


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (piecewise, {"interval_distribution": 0}, "interval_distribution must be at least 1, got 0"),
        (piecewise, {"interval_distribution": lambda: np.nan}, "interval_distribution must be finite"),
        (piecewise, {"interval_distribution": [3, 4]}, r"interval_distribution must be a number, got int64 \[2\]"),
        (piecewise, {"additive_reward_distribution": 3.0}, r"must draw numbers \[K\]"),
        (drifting, {"observation_to_reward_distribution": np.zeros((2, 5))}, r"must be numbers \[3, 5\], got float64"),
        (drifting, {"drift_distribution": lambda: "far"}, "drift_distribution must be a number, got 'far'"),
        (drifting, {"reward_std": -1}, "reward_std must be at least 0"),
        (
            drifting,
            {
                "observation_distribution": lambda: np.ones((4, 1)),
                "observation_to_reward_distribution": np.zeros((1, 5)),
            },
            "contexts must have at least 2 coordinates",
        ),
    ],
)
def test_linear_environments_outside_their_rules_are_refused(make: Any, changes: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        run(make(0, **changes), 2)


def test_contexts_of_linear_environments_must_be_rows() -> None:
    with pytest.raises(SpecError, match=r"observation_distribution must draw numbers \[B, d\]"):
        drifting(0, observation_distribution=lambda: np.ones(4))


# Classification


@pytest.mark.parametrize("name", ["iris", "digits"])
def test_a_real_table_is_shown_once_per_epoch_and_pays_for_the_right_label(name: str) -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    features, labels = getattr(datasets, f"load_{name}")(return_X_y=True)
    env = ClassificationEnvironment(features, labels, batch_size=1, seed=0)
    assert env.num_actions == len(set(labels))
    batched = ClassificationEnvironment(features, labels, batch_size=len(features), seed=0)
    epochs = [batched.reset().observation, batched.step(np.zeros(len(features), np.int32)).observation]
    for epoch in epochs:  # every row once
        np.testing.assert_array_equal(np.sort(epoch, axis=0), np.sort(features, axis=0))
        assert sorted(map(bytes, epoch)) == sorted(map(bytes, features))
    assert not np.array_equal(*epochs)
    # Neither table has equal rows of different labels, so the best arm is the label and always pays 1.
    for _ in range(3):
        observation = batched.current_time_step().observation
        best = batched.optimal_action(observation)
        assert (batched.optimal_reward(observation) == 1).all()
        assert (batched.step(best).reward == 1).all()
        observation = batched.current_time_step().observation
        wrong = (batched.optimal_action(observation) + 1) % env.num_actions
        assert (batched.step(wrong).reward == 0).all()
    by_row = {bytes(row): label for row, label in zip(features, labels, strict=True)}
    assert env.optimal_action(features).tolist() == [by_row[bytes(row)] for row in features]


@pytest.mark.parametrize("batch_size", [1, 3, 7, 10, 23])
def test_batches_of_any_size_show_every_row_before_one_comes_again(batch_size: int) -> None:
    env = classification(0, batch_size=batch_size)
    shown = [env.reset().observation]
    while sum(map(len, shown)) < 40:
        shown.append(env.step(np.zeros(batch_size, np.int32)).observation)
    rows = np.concatenate(shown)[:40, 0].reshape(4, 10)
    for epoch in rows:
        assert sorted(epoch) == list(range(0, 20, 2))
    assert not np.array_equal(rows[0], rows[1])


def test_a_table_of_means_pays_by_class_and_arm() -> None:
    means = np.array([[1.0, 5.0], [2.0, 0.0], [7.0, 8.0]])
    env = classification(0, reward_means=means, reward_std=0.0)
    assert env.num_actions == 2
    env.reset()
    for _ in range(10):
        observation = env.current_time_step().observation
        label = (observation[:, 0].astype(int) // 2) % 3
        np.testing.assert_array_equal(env.optimal_action(observation), means[label].argmax(axis=1))
        np.testing.assert_array_equal(env.optimal_reward(observation), means[label].max(axis=1))
        action = np.array([0, 1, 1, 0])
        np.testing.assert_array_equal(env.step(action).reward, means[label, action])


def test_the_noise_of_a_table_is_that_of_its_class_and_arm() -> None:
    spreads = np.array([[0.0, 1.0], [2.0, 3.0]])
    env = ClassificationEnvironment(
        [[0], [1]], [0, 1], batch_size=20_000, reward_means=np.zeros((2, 2)), reward_std=spreads, seed=0
    )
    for arm in range(2):
        label = env.current_time_step().observation[:, 0]
        reward = env.step(np.full(20_000, arm)).reward
        for one in range(2):
            wanted = spreads[one, arm]
            assert abs(reward[label == one].std() - wanted) <= 5 * wanted / np.sqrt(20_000)


def test_equal_rows_of_different_labels_have_the_arm_that_is_best_on_the_average() -> None:
    env = ClassificationEnvironment([[0.0], [0.0], [-0.0], [1.0]], [1, 1, 0, 0], batch_size=4, seed=0)
    assert env.optimal_action(np.array([[0.0], [-0.0], [1.0]])).tolist() == [1, 1, 0]
    np.testing.assert_allclose(env.optimal_reward(np.array([[0.0], [1.0]])), [2 / 3, 1.0])


def test_the_best_arm_of_a_context_that_is_no_row_is_refused() -> None:
    env = classification(0)
    with pytest.raises(SpecError, match="must be rows of the features, got another one in lane 1"):
        env.optimal_action(np.array([[0, 1], [0, 2]], np.float32))
    with pytest.raises(SpecError, match=r"observation must be float32 \['B', 2\].*got float64"):
        env.optimal_reward(np.array([[0.0, 1.0]]))


@pytest.mark.parametrize(
    ("features", "labels", "changes", "message"),
    [
        ([[1.0], [np.nan]], [0, 1], {}, "features must be finite"),
        ([], [], {}, "features must be numbers"),
        ([["a"]], [0], {}, "features must be numbers"),
        ([[1.0], [1.0, 2.0]], [0, 1], {}, "uneven list"),
        ([[1.0]], [0, 1], {}, r"labels must be integers of at least 0 \[1\]"),
        ([[1.0]], [-1], {}, "labels must be integers of at least 0"),
        ([[1.0]], [0.5], {}, "labels must be integers.*np.unique"),
        ([[1.0]], ["cat"], {}, "labels must be integers"),
        ([[1.0]], [2], {"reward_means": np.eye(2)}, "reward_means must have a row for each of the 3 classes, got 2"),
        ([[1.0]], [0], {"reward_means": [1.0]}, r"reward_means must be numbers \[classes, actions\]"),
        ([[1.0]], [0], {"reward_std": -1.0}, "reward_std must be at least 0"),
    ],
)
def test_a_table_outside_its_rules_is_refused(features: Any, labels: Any, changes: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ClassificationEnvironment(features, labels, **changes)
