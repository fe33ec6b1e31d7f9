"""Agents whose arms have no contexts, Bernoulli sampling and Exp3, and mixtures of agents."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diskbuf.bandits.agents import (
    BernoulliThompsonSamplingAgent,
    Exp3Agent,
    Exp3MixtureAgent,
    LinearThompsonSamplingAgent,
    LinearUCBAgent,
    StaticMixtureAgent,
)
from diskbuf.bandits.policies import CategoricalPolicy, MixturePolicy
from diskbuf.bandits.policies.largest_draw import BetaDraws
from diskbuf.errors import OptionError, SpecError
from diskbuf.policies import load_policy, save_policy
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import PolicyStep, StepType, Trajectory, restart, time_step_spec

K, D = 3, 2
ARMS = BoundedArraySpec((), np.int32, 0, K - 1)
SPECS = (time_step_spec(ArraySpec((D,), np.float32)), ARMS)
MASKED = (time_step_spec({"context": ArraySpec((D,), np.float32), "mask": ArraySpec((K,), np.int32)}), ARMS)


def split(observation: Any) -> tuple[Any, Any]:
    return observation["context"], observation["mask"]


def lanes(number: int, value: float = 0.0) -> Any:
    return restart(np.full((number, D), value, np.float32), batch_size=number)


def masked(*masks: list[int], times: int = 1) -> Any:
    mask = np.tile(np.array(masks, np.int32), (times, 1))
    observation = {"context": np.ones((len(mask), D), np.float32), "mask": mask}
    return restart(observation, batch_size=len(mask))


def rows_of(time_step: Any, step: PolicyStep, reward: Any) -> Trajectory:
    """Rows [1, N], as a driver makes them of one batch."""
    number = len(step.action)
    reward = np.asarray(reward, np.float32)[None]
    leaves = {"mask": time_step.observation["mask"][None]} if isinstance(time_step.observation, dict) else {}
    if leaves:
        leaves["context"] = time_step.observation["context"][None]
    return Trajectory(
        np.full((1, number), StepType.FIRST),
        leaves or time_step.observation[None],
        step.action[None],
        {name: leaf[None] for name, leaf in step.info.items()},
        np.full((1, number), StepType.LAST),
        reward,
        np.zeros((1, number), np.float32),
    )


def pulled(arms: list[int], reward: list[float], propensity: list[float] | None = None) -> Trajectory:
    """Rows [1, N] of arms that were pulled."""
    info = {"propensity": np.asarray(propensity or [1.0] * len(arms), np.float32)}
    return rows_of(lanes(len(arms)), PolicyStep(np.asarray(arms, np.int32), (), info), reward)


def assert_drawn_as_told(agent: Any, time_step: Any) -> None:
    """One context in all lanes: arms come as often as `probabilities` says, and their propensities are those."""
    for policy in (agent.policy, agent.policy.compiled()):
        step = policy.action(time_step)
        chances = agent.policy.probabilities(time_step.observation)
        number = len(step.action)
        np.testing.assert_allclose(step.info["propensity"], chances[np.arange(number), step.action], rtol=1e-6)
        counted = np.bincount(step.action, minlength=K) / number
        np.testing.assert_allclose(counted, chances[0], atol=5 * math.sqrt(0.25 / number))


# ---- Bernoulli


def test_posteriors_count_what_was_gained_and_missed() -> None:
    agent = BernoulliThompsonSamplingAgent(*SPECS)
    loss = agent.train(pulled([0, 0, 2, 0], [1, 0, 0.25, 1])).loss
    assert agent.alpha.tolist() == [3, 1, 1.25]
    assert agent.beta.tolist() == [2, 1, 1.75]
    assert loss == -2.25
    agent.train(pulled([1, 2], [1, 0]), np.array([[2.0, 0.5]]))
    assert agent.alpha.tolist() == [3, 3, 1.25]
    assert agent.beta.tolist() == [2, 1, 2.25]
    np.testing.assert_allclose(agent.policy.predicted_rewards(np.zeros((4, D))), [[0.6, 0.75, 1.25 / 3.5]] * 4)
    assert agent.train_step_counter == 2


def test_rewards_outside_0_and_1_are_refused_and_nothing_is_learnt() -> None:
    agent = BernoulliThompsonSamplingAgent(*SPECS)
    with pytest.raises(SpecError, match=r"leaf 'reward' must lie within \[0, 1\], got 1.5"):
        agent.train(pulled([0, 1], [1, 1.5]))
    assert agent.alpha.tolist() == [1, 1, 1]
    assert agent.train_step_counter == 0


def test_bernoulli_sampling_draws_arms_as_often_as_their_draws_are_the_largest() -> None:
    agent = BernoulliThompsonSamplingAgent(*SPECS, seed=0)
    assert_drawn_as_told(agent, lanes(20_000))
    before = agent.policy.probabilities(lanes(1).observation)[0]
    agent.train(pulled([0, 0, 0, 1, 1, 2] * 3, [1, 0, 0, 1, 1, 0] * 3))
    assert_drawn_as_told(agent, lanes(20_000))
    after = agent.policy.probabilities(lanes(1).observation)[0]
    draws = np.random.default_rng(0).beta(agent.alpha, agent.beta, (200_000, K))
    np.testing.assert_allclose(after, np.bincount(draws.argmax(axis=1), minlength=K) / 200_000, atol=0.005)
    np.testing.assert_allclose(before, 1 / 3, atol=1e-9)


def test_bernoulli_sampling_honours_masks() -> None:
    splitter = {"observation_and_action_constraint_splitter": split}
    agent = BernoulliThompsonSamplingAgent(*MASKED, **splitter, seed=0)
    agent.train(rows_of(masked([1, 1, 1], times=4), PolicyStep(np.array([0, 1, 2, 2], np.int32), (), {}), [1, 0, 0, 1]))
    step = masked([0, 1, 1], [1, 1, 1], [0, 0, 1], [0, 1, 1])
    chances = agent.policy.probabilities(step.observation)
    draws = np.random.default_rng(0).beta(agent.alpha, agent.beta, (200_000, K))
    two = (draws[:, 1] > draws[:, 2]).mean()
    np.testing.assert_allclose(chances[[0, 3]], [[0, two, 1 - two]] * 2, atol=0.005)
    np.testing.assert_allclose(chances[2], [0, 0, 1])
    assert chances[0, 0] == 0
    assert_drawn_as_told(agent, masked([0, 1, 1], times=20_000))


@settings(max_examples=40)
@given(st.integers(1, 200), st.integers(1, 200), st.integers(1, 200), st.integers(1, 200))
def test_of_two_beta_draws_the_chance_is_that_of_the_closed_sum(a: int, b: int, c: int, d: int) -> None:
    # P(X > Y) for X ~ Beta(c, d) and Y ~ Beta(a, b): Evan Miller, "Formulas for Bayesian A/B Testing" (2015).
    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    terms = [math.exp(log_beta(a + i, b + d) - math.log(d + i) - log_beta(1 + i, d) - log_beta(a, b)) for i in range(c)]
    alpha, beta = np.array([a, c], np.float64), np.array([b, d], np.float64)
    chances = BetaDraws(alpha, beta).chances(np.ones((1, 2), np.bool_))[0]
    np.testing.assert_allclose(chances, [1 - sum(terms), sum(terms)], atol=1e-7)


def test_beta_draws_are_compared_right_whatever_their_sizes() -> None:
    alpha = np.array([1.0, 3e5, 1.3, 400.25, 2e4])
    beta = np.array([1.0, 1e5, 8e4, 100.5, 6e3])
    draws = np.random.default_rng(0).beta(alpha, beta, (400_000, 5))
    counted = np.bincount(draws.argmax(axis=1), minlength=5) / 400_000
    chances = BetaDraws(alpha, beta).chances(np.ones((1, 5), np.bool_))[0]
    np.testing.assert_allclose(chances, counted, atol=0.004)
    assert (chances > 0.0).sum() >= 4
    # What is below the nodes of an arm is its distribution function.
    draws_of_one = BetaDraws(np.array([2.0, 1.0]), np.array([1.0, 1.0]))
    two, one = np.exp(draws_of_one.log_below).T  # x^2 and x
    np.testing.assert_allclose(two, one**2, atol=1e-9)


# ---- Exp3


def test_exp3_takes_off_what_was_missed_divided_by_the_propensity_in_the_row() -> None:
    agent = Exp3Agent(*SPECS, learning_rate=0.5)
    loss = agent.train(pulled([0, 0, 2], [1, 0.5, 0], [0.5, 0.25, 0.1])).loss
    np.testing.assert_allclose(agent.weights, [-2, 0, -10], rtol=1e-6)
    assert loss == -1.5
    expected = np.exp([-1, 0, -5]) / np.exp([-1, 0, -5]).sum()
    np.testing.assert_allclose(agent.policy.probabilities(lanes(2).observation), [expected] * 2, rtol=1e-5)
    agent.train(pulled([1], [0], [0.5]), np.array([[3.0]]))
    np.testing.assert_allclose(agent.weights, [-2, -6, -10], rtol=1e-6)


def test_exp3_draws_arms_as_told_and_honours_masks() -> None:
    agent = Exp3Agent(*MASKED, learning_rate=1.0, observation_and_action_constraint_splitter=split, seed=0)
    agent.train(
        rows_of(
            masked([1, 1, 1], times=2), PolicyStep(np.array([0, 1]), (), {"propensity": np.float32([1, 1])}), [0.5, 0]
        )
    )
    assert_drawn_as_told(agent, masked([1, 1, 1], times=20_000))
    assert_drawn_as_told(agent, masked([1, 1, 0], times=20_000))
    chances = agent.policy.probabilities(masked([1, 1, 0], [0, 0, 1]).observation)
    ratio = math.exp(-0.5) / (math.exp(-0.5) + math.exp(-1))
    np.testing.assert_allclose(chances, [[ratio, 1 - ratio, 0], [0, 0, 1]], rtol=1e-6)


def test_exp3_finds_the_best_arm() -> None:
    agent = Exp3Agent(*SPECS, learning_rate=0.02, seed=0)
    rng = np.random.default_rng(1)  # another seed than the policy's, which draws alike
    for _ in range(100):
        step = agent.policy.action(lanes(8))
        agent.train(rows_of(lanes(8), step, rng.random(8) < np.array([0.3, 0.8, 0.5])[step.action]))
    assert agent.policy.probabilities(lanes(1).observation)[0, 1] > 0.9


def test_rows_without_propensities_are_refused_by_exp3() -> None:
    agent = Exp3Agent(*SPECS, learning_rate=0.5)
    with pytest.raises(SpecError, match="policy_info must hold 'propensity', got rows without"):
        agent.train(pulled([0], [1])._replace(policy_info=()))
    with pytest.raises(SpecError, match=r"leaf 'policy_info/propensity' must lie within \(0, 1\], got 0.0"):
        agent.train(pulled([0, 1], [1, 1], [1, 0]))
    assert agent.weights.tolist() == [0, 0, 0]
    for wrong in (0, -1, math.inf, None):
        with pytest.raises(OptionError, match="learning_rate must be a finite number, above 0, got"):
            Exp3Agent(*SPECS, learning_rate=wrong)


def test_weights_of_other_arms_are_refused() -> None:
    with pytest.raises(SpecError, match="weights must be 3 finite numbers, one for each arm"):
        CategoricalPolicy(*SPECS, weights=[1, 2])


# ---- mixtures


def three(specs: Any = SPECS, **arguments: Any) -> list[Any]:
    """Three agents that pull differently: one for certain, two by chance."""
    agents: list[Any] = [
        LinearUCBAgent(*specs, **arguments),
        Exp3Agent(*specs, learning_rate=0.5, **arguments),
        LinearThompsonSamplingAgent(*specs, **arguments),
    ]
    return agents


def taught(agent: Any, time_step: Any, *, calls: int = 3, seed: int = 99) -> Any:
    rng = np.random.default_rng(seed)
    for _ in range(calls):
        step = agent.policy.action(time_step)
        agent.train(rows_of(time_step, step, rng.random(len(step.action)) * (0.2 + 0.4 * (step.action == 1))))
    return agent


def test_a_mixture_draws_an_agent_and_then_its_arm_and_tells_all_propensities() -> None:
    agents = three()
    for agent in agents:
        agent.train(pulled([0, 1, 2, 0], [0.2, 0.9, 0.6, 0.1]))
    mixture = StaticMixtureAgent(*SPECS, agents, mixture_weights=[1, 2, 5], seed=0)
    np.testing.assert_allclose(mixture.mixture_weights, [0.125, 0.25, 0.625])
    time_step = lanes(20_000, 1.0)
    of_each = np.stack([agent.policy.probabilities(time_step.observation[:1])[0] for agent in agents])
    assert len({tuple(row) for row in of_each.round(3).tolist()}) == 3
    np.testing.assert_allclose(
        mixture.policy.probabilities(time_step.observation[:1])[0], [0.125, 0.25, 0.625] @ of_each, rtol=1e-12
    )
    assert_drawn_as_told(mixture, time_step)
    for policy in (mixture.policy, mixture.policy.compiled()):
        step = policy.action(time_step)
        choice = step.info["mixture_choice"]
        np.testing.assert_allclose(np.bincount(choice) / 20_000, [0.125, 0.25, 0.625], atol=0.018)
        np.testing.assert_allclose(step.info["mixture_propensity"], mixture.mixture_weights[choice], rtol=1e-6)
        np.testing.assert_allclose(step.info["subpolicy_propensity"], of_each[choice, step.action], rtol=1e-6)
        for number in range(3):
            own = step.action[choice == number]
            np.testing.assert_allclose(np.bincount(own, minlength=K) / len(own), of_each[number], atol=0.05)


def test_the_rows_of_a_mixture_fit_its_spec() -> None:
    mixture = StaticMixtureAgent(*SPECS, three(), mixture_weights=[1, 1, 1])
    info, spec = mixture.policy.action(lanes(5)).info, mixture.collect_data_spec.policy_info
    assert sorted(info) == sorted(spec)
    for name, leaf in info.items():
        assert (leaf.dtype, leaf.shape) == (spec[name].dtype, (5, *spec[name].shape))
        assert (leaf >= spec[name].minimum).all()
        assert (leaf <= spec[name].maximum).all()


@pytest.mark.parametrize("mixture_class", [StaticMixtureAgent, Exp3MixtureAgent])
def test_each_row_trains_the_agent_that_acted_by_the_propensity_it_gave(mixture_class: Any) -> None:
    arguments = {"mixture_weights": [1, 1, 1]} if mixture_class is StaticMixtureAgent else {}
    agents, alone = three(), three()
    for agent in agents + alone:  # or an arm of Exp3's were as probable as an agent
        agent.train(pulled([0, 1, 2], [0.9, 0.2, 0.5]))
    mixture = mixture_class(*SPECS, agents, **arguments, seed=0)
    time_step = lanes(200, 1.0)
    step = mixture.policy.action(time_step)
    reward = np.random.default_rng(0).random(200)
    weights = np.random.default_rng(1).random(200)
    losses = []
    for number, agent in enumerate(alone):
        own = step.info["mixture_choice"] == number
        info = {"propensity": step.info["subpolicy_propensity"][own]}
        rows = rows_of(lanes(own.sum(), 1.0), PolicyStep(step.action[own], (), info), reward[own])
        losses.append(agent.train(rows, weights[own][None]).loss)
    loss_info = mixture.train(rows_of(time_step, step, reward), weights[None])
    assert loss_info.loss == pytest.approx(sum(losses), rel=1e-5)
    assert mixture.train_step_counter == 1
    for agent, expected in zip(mixture.agents, alone, strict=True):
        assert agent.train_step_counter == 2
        np.testing.assert_array_equal(
            agent.policy.probabilities(time_step.observation), expected.policy.probabilities(time_step.observation)
        )
    np.testing.assert_array_equal(agents[0].theta, alone[0].theta)
    np.testing.assert_array_equal(agents[1].weights, alone[1].weights)


def test_an_agent_that_didnt_act_isnt_trained_and_one_that_refuses_stops_all() -> None:
    agents = [LinearUCBAgent(*SPECS), BernoulliThompsonSamplingAgent(*SPECS)]
    mixture = StaticMixtureAgent(*SPECS, agents, mixture_weights=[1, 0])
    step = mixture.policy.action(lanes(6, 1.0))
    extra = mixture.train(rows_of(lanes(6, 1.0), step, [2.0] * 6)).extra
    assert extra == ((), None)
    assert [agent.train_step_counter for agent in agents] == [1, 0]
    step.info["mixture_choice"][3] = 1
    with pytest.raises(SpecError, match=r"leaf 'reward' must lie within \[0, 1\], got 2.0"):
        mixture.train(rows_of(lanes(6, 1.0), step, [2.0] * 6))
    assert [agent.train_step_counter for agent in (mixture, *agents)] == [1, 1, 0]


def test_mixtures_honour_the_masks_of_their_agents() -> None:
    agents = three(MASKED, observation_and_action_constraint_splitter=split)
    mixture = taught(Exp3MixtureAgent(*MASKED, agents, seed=0), masked([1, 1, 1], [0, 1, 1], times=20))
    assert_drawn_as_told(mixture, masked([1, 0, 1], times=20_000))
    chances = mixture.policy.probabilities(masked([1, 0, 1], [0, 0, 1]).observation)
    assert chances[0, 1] == 0
    np.testing.assert_allclose(chances[1], [0, 0, 1])


def test_exp3_shares_follow_the_rewards_of_each_agent() -> None:
    agents = three()[:2]
    mixture = Exp3MixtureAgent(*SPECS, agents, forgetting=0.5, max_inverse_temperature=2.5, seed=0)
    assert mixture.mixture_weights.tolist() == [0.5, 0.5]
    step = PolicyStep(
        np.array([0, 0, 1, 1], np.int32),
        (),
        {
            "propensity": np.full(4, 0.3, np.float32),
            "mixture_choice": np.array([0, 0, 1, 1], np.int32),
            "mixture_propensity": np.array([0.5, 0.25, 0.5, 0.75], np.float32),
            "subpolicy_propensity": np.full(4, 0.4, np.float32),
        },
    )
    mixture.train(rows_of(lanes(4), step, [1, 0.5, 0, 0.25]))
    aggregates = 0.5 * np.array([-2.0, -3.0])
    np.testing.assert_allclose(mixture.reward_aggregates, aggregates, rtol=1e-6)
    shares = np.exp(aggregates / 2)  # the root of 4 rows
    np.testing.assert_allclose(mixture.mixture_weights, shares / shares.sum(), rtol=1e-6)
    mixture.train(rows_of(lanes(4), step, [1, 0.5, 0, 0.25]), np.array([[2.0, 2, 2, 2]]))
    aggregates = 0.5 * (aggregates - [4.0, 6.0])
    shares = np.exp(aggregates / 2.5)  # not the root of 8
    np.testing.assert_allclose(mixture.mixture_weights, shares / shares.sum(), rtol=1e-6)


def test_an_exp3_mixture_finds_the_agent_that_earns_more() -> None:
    good, bad = (Exp3Agent(*SPECS, learning_rate=0.01) for _ in range(2))
    good.train(pulled([0, 2], [-20, -20], [0.05, 0.05]))  # prefers arm 1 from now on
    bad.train(pulled([1, 2], [-20, -20], [0.05, 0.05]))
    mixture = Exp3MixtureAgent(*SPECS, [bad, good], seed=0, max_inverse_temperature=20)
    taught(mixture, lanes(10), calls=100)
    assert mixture.mixture_weights[1] > 0.9


def test_mixtures_refuse_agents_that_dont_go_together() -> None:
    agents = three()
    other = LinearUCBAgent(SPECS[0], BoundedArraySpec((), np.int32, 0, K))
    more = LinearUCBAgent(*MASKED)
    one, another = (
        LinearUCBAgent(*MASKED, observation_and_action_constraint_splitter=lambda seen: (seen["context"], seen["mask"]))
        for _ in range(2)
    )
    mixture = StaticMixtureAgent(*SPECS, agents, mixture_weights=[1, 1, 1])
    for wrong, error, message in (
        ([agents[0], other], SpecError, "the action_spec of policy 1 must be that of the mixture"),
        ([more], SpecError, "the time_step_spec of policy 0 must be that of the mixture"),
        ([agents[0], mixture], SpecError, "the info_spec of policy 1 must be that of the mixture"),
        ([agents[0], agents[0]], OptionError, "agents must be different objects, got one twice"),
        ([], OptionError, "agents must be bandit agents, one at least, got"),
        ([agents[0].policy], OptionError, "agents must be bandit agents, one at least, got"),
    ):
        with pytest.raises(error, match=message):
            Exp3MixtureAgent(*SPECS, wrong)
    with pytest.raises(OptionError, match="one observation_and_action_constraint_splitter, got another in policy 1"):
        Exp3MixtureAgent(*MASKED, [one, another])
    for weights in ([1, 1], [0, 0, 0], [1, -1, 1], [1, math.nan, 1], "abc", None.__class__):
        with pytest.raises(OptionError, match="mixture_weights must be 3 numbers of at least 0, one above, got"):
            StaticMixtureAgent(*SPECS, agents, mixture_weights=weights)
    with pytest.raises(OptionError, match="forgetting must be a finite number, above 0, at most 1, got 0"):
        Exp3MixtureAgent(*SPECS, agents, forgetting=0)
    with pytest.raises(OptionError, match="policies must be BanditPolicy objects, one at least, got"):
        MixturePolicy(*SPECS, policies=[])


def test_rows_that_dont_tell_who_acted_are_refused_by_mixtures() -> None:
    mixture = Exp3MixtureAgent(*SPECS, three(), seed=0)
    step = mixture.policy.action(lanes(4))
    rows = rows_of(lanes(4), step, [1, 1, 1, 1])
    choice = rows.policy_info["mixture_choice"]
    for info, message in (
        ({"propensity": rows.policy_info["propensity"]}, "policy_info must hold 'mixture_choice', got rows without"),
        (rows.policy_info | {"mixture_choice": choice + 3}, r"mixture_choice' must lie within \[0, 2\], got"),
        (rows.policy_info | {"mixture_choice": choice.astype(np.int64)}, r"must be int32 \[1, 4\], got int64 \[1, 4\]"),
        (
            rows.policy_info | {"mixture_propensity": np.zeros((1, 4), np.float32)},
            r"leaf 'policy_info/mixture_propensity' must lie within \(0, 1\], got 0.0",
        ),
    ):
        with pytest.raises(SpecError, match=message):
            mixture.train(rows._replace(policy_info=info))
    assert [agent.train_step_counter for agent in (mixture, *mixture.agents)] == [0, 0, 0, 0]


# ---- kept

MAKERS = {
    "bernoulli": lambda seed: BernoulliThompsonSamplingAgent(*SPECS, seed=seed),
    "exp3": lambda seed: Exp3Agent(*SPECS, learning_rate=0.3, seed=seed),
    "static": lambda seed: StaticMixtureAgent(*SPECS, three(), mixture_weights=[1, 2, 3], seed=seed),
    "exp3_mixture": lambda seed: Exp3MixtureAgent(*SPECS, three(), seed=seed),
}


@pytest.mark.parametrize("name", MAKERS)
def test_an_agent_restored_from_a_checkpoint_goes_on_as_the_saved_one(name: str, tmp_path: Path) -> None:
    import tensorflow as tf

    made = [MAKERS[name](seed) for seed in (0, 1)]
    taught(made[0], lanes(40, 1.0))
    path = tf.train.Checkpoint(agent=made[0]).save(str(tmp_path / "agent"))
    made[1].policy.probabilities(lanes(1).observation)  # which may be remembered
    tf.train.Checkpoint(agent=made[1]).restore(path).assert_consumed()
    assert made[1].train_step_counter == 3
    for _ in range(3):
        saved, restored = (agent.policy.action(lanes(50, 1.0)) for agent in made)
        np.testing.assert_array_equal(saved.action, restored.action)
        for key, leaf in saved.info.items():
            np.testing.assert_array_equal(leaf, restored.info[key])
        for agent in made:
            agent.train(rows_of(lanes(50, 1.0), saved, np.linspace(0, 1, 50)))


@pytest.mark.parametrize("name", MAKERS)
def test_a_saved_policy_acts_by_what_was_learnt_until_then(name: str, tmp_path: Path) -> None:
    agent = taught(MAKERS[name](0), lanes(40, 1.0))
    observation = lanes(100, 1.0).observation
    chances = agent.policy.probabilities(observation)
    save_policy(agent.policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    taught(agent, lanes(40, 1.0))
    assert abs(agent.policy.probabilities(observation) - chances).max() > 1e-3
    step = loaded.action(lanes(100, 1.0))
    np.testing.assert_allclose(step.info["propensity"], chances[np.arange(100), step.action], atol=1e-6)
    assert loaded.info_spec == agent.policy.info_spec
