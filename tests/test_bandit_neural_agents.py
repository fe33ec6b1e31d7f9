"""Bandit agents over networks: losses and steps worked out by hand, exact propensities, and what they learn."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from diskbuf.bandits.agents import (
    BoltzmannAgent,
    DropoutThompsonSamplingAgent,
    GreedyRewardPredictionAgent,
    NeuralBoltzmannAgent,
    NeuralEpsilonGreedyAgent,
    NeuralLinUCBAgent,
)
from diskbuf.bandits.policies import (
    BoltzmannRewardPredictionPolicy,
    DropoutThompsonSamplingPolicy,
    EpsilonGreedyRewardPredictionPolicy,
    GreedyRewardPredictionPolicy,
)
from diskbuf.errors import OptionError, SpecError
from diskbuf.networks import QNetwork
from diskbuf.policies import LinearSchedule, load_policy, save_policy
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import StepType, Trajectory, restart, time_step_spec

DIM, ARMS = 2, 3
CONTEXT = ArraySpec((DIM,), np.float32)
ACTION = BoundedArraySpec((), np.int32, 0, ARMS - 1)
SPECS = time_step_spec(CONTEXT), ACTION
KERNEL = [[1.0, 2.0, 3.0], [10.0, 20.0, -30.0]]
SPLIT_SPEC = {"context": CONTEXT, "mask": BoundedArraySpec((ARMS,), np.int32, 0, 1)}


def split(observation: Any) -> tuple[Any, Any]:
    return observation["context"], observation["mask"]


def linear(kernel: Any = KERNEL) -> keras.Model:
    """Context times a kernel [DIM, ARMS]."""
    network = keras.Sequential([keras.Input((DIM,)), keras.layers.Dense(len(kernel[0]), use_bias=False)])
    network.set_weights([np.array(kernel, np.float32)])
    return network


def make(kind: Any = GreedyRewardPredictionAgent, **arguments: Any) -> Any:
    defaults: dict[str, Any] = {"reward_network": linear(), "optimizer": keras.optimizers.SGD(1.0)}
    if kind is NeuralEpsilonGreedyAgent:
        defaults["epsilon"] = 0.3
    return kind(*SPECS, **(defaults | arguments))


def dropout_agent(specs: Any = SPECS, **arguments: Any) -> Any:
    defaults = {
        "optimizer": keras.optimizers.Adam(1e-2),
        "dropout_rate": 0.5,
        "network_layers": (16,),
        "seed": 0,
    }
    return DropoutThompsonSamplingAgent(*specs, **(defaults | arguments))


def linucb(specs: Any = SPECS, **arguments: Any) -> Any:
    defaults: dict[str, Any] = {
        "encoding_network": encoder(),
        "encoding_network_num_train_steps": 60,
        "encoding_dim": 6,
        "optimizer": keras.optimizers.Adam(0.02),
        "epsilon_greedy": 0.3,
        "alpha": 0.5,
        "seed": 0,
    }
    return NeuralLinUCBAgent(*specs, **(defaults | arguments))


def encoder() -> keras.Model:
    initializer = keras.initializers.GlorotUniform(seed=1)
    layers = [keras.layers.Dense(size, "tanh", kernel_initializer=initializer) for size in (16, 6)]
    return keras.Sequential([keras.Input((DIM,)), *layers])


def identity(**arguments: Any) -> Any:
    """LinUCB on the contexts themselves, past the stage of the encoder."""
    network = keras.Sequential([keras.Input((DIM,)), keras.layers.Dense(DIM, use_bias=False)])
    network.set_weights([np.eye(DIM, dtype=np.float32)])
    return linucb(encoding_network=network, encoding_dim=DIM, encoding_network_num_train_steps=0, **arguments)


def rows(observation: Any, action: Any, reward: Any) -> Trajectory:
    """[B, 1] of B rows."""
    action = np.asarray(action, np.int32)[:, None]
    return Trajectory(
        step_type=np.full_like(action, StepType.FIRST),
        observation=tf.nest.map_structure(lambda leaf: np.asarray(leaf)[:, None], observation),
        action=action,
        policy_info=(),
        next_step_type=np.full_like(action, StepType.LAST),
        reward=np.asarray(reward, np.float32)[:, None],
        discount=np.zeros(action.shape, np.float32),
    )


def contexts(*values: Any) -> Any:
    return np.array(values, np.float32)


def kernel_of(agent: Any) -> Any:
    return agent.reward_network.weights[0].numpy()


def actions_of(policy: Any, observation: Any, times: int = 1) -> Any:
    size = len(tf.nest.flatten(observation)[0])
    return np.array([policy.action(restart(observation, batch_size=size)).action for _ in range(times)])


ROWS = rows(contexts([1, 0], [0, 1]), [1, 2], [5.0, -20.0])  # predicted 2 and -30: errors 3 and 10


def test_the_loss_is_the_mean_squared_error_of_the_arms_pulled() -> None:
    loss, extra = make().loss(ROWS)
    assert float(loss) == (3**2 + 10**2) / 2
    assert extra.reward_loss.numpy().tolist() == [9, 100]
    assert extra.predicted_reward.numpy().tolist() == [2, -30]


def test_a_step_moves_the_prediction_of_the_arm_pulled_and_no_other() -> None:
    agent = make(optimizer=keras.optimizers.SGD(0.25))
    assert float(agent.train(ROWS).loss) == (3**2 + 10**2) / 2  # the loss before the step
    # The gradient of (w - r)^2 / 2 is w - r: -3 for arm 1 of the first context, -10 for arm 2 of the second.
    assert kernel_of(agent).tolist() == [[1, 2 + 0.25 * 3, 3], [10, 20, -30 + 0.25 * 10]]
    assert int(agent.train_step_counter) == 1


def test_time_and_batch_are_one_axis() -> None:
    folded = tf.nest.map_structure(lambda leaf: np.swapaxes(leaf, 0, 1), ROWS)  # [1, 2] instead of [2, 1]
    assert float(make().loss(folded).loss) == (3**2 + 10**2) / 2


def test_weights_multiply_the_loss_of_each_row() -> None:
    loss, extra = make().loss(ROWS, np.array([[2.0], [0.5]]))
    assert float(loss) == (2 * 3**2 + 0.5 * 10**2) / 2
    assert extra.reward_loss.numpy().tolist() == [9, 100]
    agent = make(optimizer=keras.optimizers.SGD(0.25))
    agent.train(ROWS, np.array([[2.0], [0.0]]))
    assert kernel_of(agent).tolist() == [[1, 2 + 2 * 0.25 * 3, 3], [10, 20, -30]]


def test_another_loss_may_be_given() -> None:
    loss = make(error_loss_fn=lambda reward, predicted: tf.abs(reward - predicted)).loss(ROWS).loss
    assert float(loss) == (3 + 10) / 2


def test_losses_of_the_network_itself_are_added() -> None:
    network = keras.Sequential(
        [keras.Input((DIM,)), keras.layers.Dense(ARMS, kernel_regularizer=keras.regularizers.L1(1.0), use_bias=False)]
    )
    network.set_weights([np.array(KERNEL, np.float32)])
    assert float(make(reward_network=network).loss(ROWS).loss) == 54.5 + 66


def test_the_gradient_of_each_variable_is_clipped_to_a_norm() -> None:
    agent = make(gradient_clipping=1.0)
    agent.train(ROWS)
    np.testing.assert_allclose(np.linalg.norm(kernel_of(agent) - KERNEL), 1, rtol=1e-5)


def test_a_loss_that_is_not_finite_trains_nothing() -> None:
    agent = make()
    with pytest.raises(tf.errors.InvalidArgumentError, match="the loss must be finite"):
        agent.train(rows(contexts([1, 0]), [0], [3e38]))
    with pytest.raises(SpecError, match="leaf 'observation' must be finite, got nan at"):
        agent.train(rows(contexts([np.nan, 0]), [0], [1.0]))
    with pytest.raises(SpecError, match="leaf 'reward' must be finite, got nan at"):
        agent.train(rows(contexts([1, 0]), [0], [np.nan]))
    assert kernel_of(agent).tolist() == KERNEL
    assert int(agent.train_step_counter) == 0


def test_training_is_traced_once_for_any_number_of_rows() -> None:
    traces = []

    def loss_fn(reward: Any, predicted: Any) -> Any:
        traces.append(reward.shape)
        return tf.square(reward - predicted)

    agent = make(error_loss_fn=loss_fn, optimizer=keras.optimizers.SGD(1e-6))
    traces.clear()
    for size in (1, 2, 5):
        agent.train(rows(np.ones((size, DIM), np.float32), np.zeros(size), np.zeros(size)), weights=1.0)
        agent.train(rows(np.ones((size, DIM), np.float32), np.zeros(size), np.zeros(size)))
    assert len(traces) == 1
    assert int(agent.train_step_counter) == 6


def test_a_greedy_agent_is_certain_of_the_best_prediction() -> None:
    agent = make()
    observation = contexts([1, 0], [0, 1], [0, -1])
    step = agent.policy.action(restart(observation, batch_size=3))
    assert step.action.tolist() == [2, 1, 2]
    assert step.action.dtype == np.int32
    assert step.info["propensity"].tolist() == [1, 1, 1]
    assert agent.policy.probabilities(observation).tolist() == np.eye(3)[[2, 1, 2]].tolist()
    predicted = agent.policy.predicted_rewards(observation)
    assert predicted.tolist() == (observation @ np.array(KERNEL)).tolist()
    assert predicted.dtype == np.float32


def test_policies_act_by_the_current_weights() -> None:
    agent = make()
    agent.reward_network.set_weights([-np.array(KERNEL, np.float32)])
    assert actions_of(agent.policy, contexts([1, 0])).tolist() == [[0]]


def test_epsilon_is_shared_among_the_allowed_arms() -> None:
    policy = make(NeuralEpsilonGreedyAgent, epsilon=0.3).policy
    np.testing.assert_allclose(policy.probabilities(contexts([1, 0])), [[0.1, 0.1, 0.8]])
    specs = time_step_spec(SPLIT_SPEC), ACTION
    masked = EpsilonGreedyRewardPredictionPolicy(
        *specs, linear(), epsilon=0.3, observation_and_action_constraint_splitter=split
    )
    observation = {"context": contexts([1, 0], [1, 0]), "mask": np.array([[1, 1, 0], [1, 0, 0]], np.int32)}
    np.testing.assert_allclose(masked.probabilities(observation), [[0.15, 0.85, 0], [1, 0, 0]])


def test_boltzmann_probabilities_are_a_softmax_of_the_allowed_arms() -> None:
    policy = make(NeuralBoltzmannAgent, temperature=2.0).policy
    expected = np.exp(np.array([1, 2, 3]) / 2)
    np.testing.assert_allclose(policy.probabilities(contexts([1, 0])), [expected / expected.sum()])
    specs = time_step_spec(SPLIT_SPEC), ACTION
    masked = BoltzmannRewardPredictionPolicy(
        *specs, linear(), temperature=2.0, observation_and_action_constraint_splitter=split
    )
    observation = {"context": contexts([1, 0]), "mask": np.array([[1, 1, 0]], np.int32)}
    np.testing.assert_allclose(masked.probabilities(observation), [[*(expected[:2] / expected[:2].sum()), 0]])
    assert BoltzmannAgent is NeuralBoltzmannAgent


def test_no_temperature_is_too_low() -> None:
    policy = make(NeuralBoltzmannAgent, temperature=1e-300).policy
    assert policy.probabilities(contexts([1, 0], [0, 0])).tolist() == [[0, 0, 1], [1 / 3, 1 / 3, 1 / 3]]


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [(NeuralEpsilonGreedyAgent, {"epsilon": 0.6}), (NeuralBoltzmannAgent, {"temperature": 1.5})],
)
def test_propensities_are_how_often_arms_are_pulled(kind: Any, arguments: Any) -> None:
    policy = make(kind, seed=5, **arguments).policy
    observation = np.repeat(contexts([1, 0]), 1000, axis=0)
    chances = policy.probabilities(observation[:1])[0]
    pulls = np.zeros(ARMS)
    for _ in range(20):
        step = policy.action(restart(observation, batch_size=1000))
        assert step.info["propensity"].tolist() == chances.astype(np.float32)[step.action].tolist()
        pulls += np.bincount(step.action, minlength=ARMS)
    # Five standard deviations of a share among 20000 draws.
    assert (np.abs(pulls / 20000 - chances) < 5 * np.sqrt(chances * (1 - chances) / 20000)).all()


def test_dropout_propensities_are_shares_of_the_passes() -> None:
    policy = dropout_agent(num_samples=8, seed=3).policy
    observation = np.random.default_rng(0).normal(size=(50, DIM)).astype(np.float32)
    step = policy.action(restart(observation, batch_size=50))
    shares = step.info["propensity"] * 8
    assert set(shares.tolist()) <= set(range(1, 9))
    assert len(set(shares.tolist())) > 3
    samples = policy.sampled_rewards(observation)
    assert samples.shape == (50, 8, ARMS)
    assert (samples[:, 1:] != samples[:, :1]).any()  # units are dropped anew in each pass


def test_dropout_pulls_arms_as_often_as_they_are_the_best_of_a_pass() -> None:
    # One unit: kept it gives 2 and arm 1 is best, dropped all arms give their biases and arm 0 is.
    unit = [keras.layers.Dense(1, kernel_initializer="ones"), keras.layers.Dropout(0.5, seed=1)]
    network = keras.Sequential([keras.Input((DIM,)), *unit, keras.layers.Dense(ARMS)])
    network.layers[-1].set_weights([np.array([[0, 1, -1]], np.float32), np.array([0.5, 0, 0], np.float32)])
    policy = DropoutThompsonSamplingPolicy(*SPECS, network, num_samples=4, seed=0)
    observation = np.ones((5000, DIM), np.float32)
    chances = policy.probabilities(observation)
    assert set(np.unique(chances)) <= {0, 0.25, 0.5, 0.75, 1}
    assert (chances[:, 2] == 0).all()
    # Five standard deviations of a share among 20000 passes of probability one half.
    assert abs(chances[:, 1].mean() - 0.5) < 5 * 0.5 / np.sqrt(20000)
    step = policy.action(restart(observation, batch_size=5000))
    assert abs((step.action == 1).mean() - 0.5) < 5 * 0.5 / np.sqrt(5000)
    # Where an arm's share is s it is pulled with probability s, and s is told: the mean is E[sum of s^2], which is
    # 2 * (0.5^2 + 0.5^2 / 4) for two arms that each win half of 4 passes.
    assert abs(step.info["propensity"].mean() - 0.625) < 0.02
    assert policy.predicted_rewards(observation[:1]).tolist() == [[0.5, 2, -2]]  # nothing is dropped there


def test_only_the_top_layer_drops_unless_told_otherwise() -> None:
    def dropouts(agent: Any) -> list[bool]:
        hidden = [layer for layer in agent.reward_network.layers if "dense" in layer.name or "dropout" in layer.name]
        return ["dropout" in layer.name for layer in hidden]

    dense, dropout = False, True
    assert dropouts(dropout_agent(network_layers=(8, 4))) == [dense, dense, dropout, dense]
    everywhere = dropout_agent(network_layers=(8, 4), dropout_only_top_layer=False)
    assert dropouts(everywhere) == [dense, dropout, dense, dropout, dense]


def test_a_schedule_follows_the_training_steps() -> None:
    schedule = LinearSchedule(initial_value=0.9, final_value=0.3, num_steps=4)
    agent = make(NeuralEpsilonGreedyAgent, epsilon=schedule, optimizer=keras.optimizers.SGD(1e-6))
    hot = make(NeuralBoltzmannAgent, temperature=schedule, optimizer=keras.optimizers.SGD(1e-6))
    seen = []
    for _ in range(6):
        actions_of(agent.policy, contexts([1, 0]))  # acting doesn't count
        seen.append(agent.policy.epsilon)
        assert hot.policy.temperature == agent.policy.epsilon
        np.testing.assert_allclose(agent.policy.probabilities(contexts([1, 0]))[0, 0], seen[-1] / 3)
        agent.train(ROWS)
        hot.train(ROWS)
    np.testing.assert_allclose(seen, [0.9, 0.75, 0.6, 0.45, 0.3, 0.3])


MASKED: dict[str, Callable[..., Any]] = {
    "greedy": lambda *specs, **kw: GreedyRewardPredictionPolicy(*specs, linear(), **kw),
    "epsilon": lambda *specs, **kw: EpsilonGreedyRewardPredictionPolicy(*specs, linear(), epsilon=0.9, **kw),
    "boltzmann": lambda *specs, **kw: BoltzmannRewardPredictionPolicy(*specs, linear(), temperature=50.0, **kw),
    "dropout": lambda *specs, **kw: dropout_agent(specs, **kw).policy,
    "linucb, first": lambda *specs, **kw: linucb(specs, **kw).policy,
    "linucb, then": lambda *specs, **kw: linucb(specs, **kw, encoding_network_num_train_steps=0, alpha=9.0).policy,
}


@pytest.mark.parametrize("name", MASKED)
def test_a_forbidden_arm_is_never_pulled(name: str, tmp_path: Path) -> None:
    policy = MASKED[name](time_step_spec(SPLIT_SPEC), ACTION, observation_and_action_constraint_splitter=split, seed=0)
    rng = np.random.default_rng(1)
    mask = rng.integers(0, 2, (500, ARMS)).astype(np.int32)
    mask[np.arange(500), rng.integers(0, ARMS, 500)] = 1
    observation = {"context": rng.normal(size=(500, DIM)).astype(np.float32), "mask": mask}
    chances = policy.probabilities(observation)
    np.testing.assert_allclose(chances.sum(axis=1), 1)
    assert (chances[mask == 0] == 0).all()
    save_policy(policy.compiled(), tmp_path / "policy")
    for acting in (policy, policy.compiled(), load_policy(tmp_path / "policy")):
        step = acting.action(restart(observation, batch_size=500))
        assert mask[np.arange(500), step.action].all()
        assert (step.info["propensity"] > 0).all()
        if name != "dropout":
            np.testing.assert_allclose(step.info["propensity"], chances[np.arange(500), step.action], rtol=1e-5)


def test_the_network_is_trained_on_contexts_without_the_mask() -> None:
    specs = time_step_spec(SPLIT_SPEC), ACTION
    observation = {"context": contexts([1, 0], [0, 1]), "mask": np.ones((2, ARMS), np.int32)}
    masked = GreedyRewardPredictionAgent(
        *specs, linear(), keras.optimizers.SGD(0.25), observation_and_action_constraint_splitter=split
    )
    plain = make(optimizer=keras.optimizers.SGD(0.25))
    experience = rows(observation, [1, 2], [5.0, -20.0])
    assert float(masked.train(experience).loss) == float(plain.train(ROWS).loss)
    assert kernel_of(masked).tolist() == kernel_of(plain).tolist()
    then = linucb(specs, encoding_network_num_train_steps=0, observation_and_action_constraint_splitter=split)
    then.train(experience)
    assert then.linear_model.data_vector[1].any()


def test_a_mask_may_be_part_of_an_array() -> None:
    wide = time_step_spec(ArraySpec((DIM + ARMS,), np.float32)), ACTION
    agent = GreedyRewardPredictionAgent(
        *wide,
        linear(),
        keras.optimizers.SGD(),
        observation_and_action_constraint_splitter=lambda given: (given[:, :DIM], given[:, DIM:]),
    )
    observation = contexts([1, 0, 1, 1, 0], [1, 0, 1, 1, 1])
    assert actions_of(agent.policy, observation).tolist() == [[1, 2]]
    assert actions_of(agent.policy.compiled(), observation).tolist() == [[1, 2]]
    agent.train(rows(observation, [0, 0], [1.0, 1.0]))


def test_a_compiled_policy_draws_from_the_same_probabilities() -> None:
    tf.random.set_seed(0)
    for policy in (make(NeuralEpsilonGreedyAgent).policy, make(NeuralBoltzmannAgent).policy):
        chances = policy.probabilities(contexts([1, 0]))[0]
        step = policy.compiled().action(restart(np.repeat(contexts([1, 0]), 20000, axis=0), batch_size=20000))
        share = np.bincount(step.action, minlength=ARMS) / 20000
        assert (np.abs(share - chances) < 5 * np.sqrt(chances * (1 - chances) / 20000)).all()


def test_a_compiled_policy_keeps_what_a_schedule_says_at_the_moment() -> None:
    schedule = LinearSchedule(initial_value=0.9, final_value=0.3, num_steps=1)
    agent = make(NeuralEpsilonGreedyAgent, epsilon=schedule, optimizer=keras.optimizers.SGD(1e-6))
    agent.train(ROWS)
    policy = agent.policy.compiled()
    steps = [policy.action(restart(contexts([1, 0]), batch_size=1)) for _ in range(100)]
    told = {(int(step.action[0]), round(float(step.info["propensity"][0]), 5)) for step in steps}
    assert told == {(0, 0.1), (1, 0.1), (2, 0.8)}


def test_observations_may_be_nests_and_actions_begin_above_zero() -> None:
    spec = {"user": ArraySpec((2,), np.float32), "day": ArraySpec((), np.float32)}
    action_spec = BoundedArraySpec((), np.int64, 5, 7)
    network = QNetwork(spec, action_spec, fc_layer_params=(8,), seed=0)
    agent = NeuralEpsilonGreedyAgent(
        time_step_spec(spec), action_spec, network, keras.optimizers.Adam(0.05), epsilon=0.1, seed=0
    )
    observation = {"user": np.zeros((4, 2), np.float32), "day": np.zeros(4, np.float32)}
    assert agent.policy.predicted_rewards(observation).shape == (4, 3)
    for _ in range(30):
        agent.train(
            rows(observation, [5, 6, 7, 6], [0.0, 1.0, 0.0, 1.0])._replace(action=np.array([[5], [6], [7], [6]]))
        )
    step = agent.policy.action(restart(observation, batch_size=4))
    assert step.action.dtype == np.int64
    assert agent.policy.probabilities(observation).argmax(axis=1).tolist() == [1, 1, 1, 1]


def problem(rng: np.random.Generator, size: int) -> tuple[Any, Any]:
    """Contexts [size, DIM] and expected rewards [size, ARMS] of a linear problem, each arm best somewhere."""
    observation = rng.normal(size=(size, DIM)).astype(np.float32)
    return observation, observation @ np.array([[1.0, -1.0, 0.0], [0.0, 0.0, 1.0]], np.float32)


def learn(agent: Any, steps: int, size: int = 32) -> float:
    """The share of contexts whose best arm the agent predicts best, after it learnt from its own pulls."""
    rng = np.random.default_rng(7)
    for _ in range(steps):
        observation, expected = problem(rng, size)
        action = agent.policy.action(restart(observation, batch_size=size)).action
        reward = expected[np.arange(size), action] + rng.normal(0, 0.1, size)
        agent.train(rows(observation, action, reward))
    observation, expected = problem(np.random.default_rng(8), 2000)
    predicted = agent.policy.predicted_rewards(observation)
    return float((predicted.argmax(axis=1) == expected.argmax(axis=1)).mean())


LEARNERS: dict[str, Callable[[], Any]] = {
    "greedy": lambda: make(reward_network=small(), optimizer=keras.optimizers.Adam(0.02), seed=0),
    "epsilon": lambda: make(
        NeuralEpsilonGreedyAgent, reward_network=small(), optimizer=keras.optimizers.Adam(0.02), epsilon=0.2, seed=0
    ),
    "boltzmann": lambda: make(
        NeuralBoltzmannAgent, reward_network=small(), optimizer=keras.optimizers.Adam(0.02), temperature=0.3, seed=0
    ),
    "dropout": lambda: dropout_agent(dropout_rate=0.1, network_layers=(32,), optimizer=keras.optimizers.Adam(0.02)),
    "linucb": lambda: linucb(encoding_network_num_train_steps=100),
}


def small() -> keras.Model:
    return QNetwork(CONTEXT, ACTION, fc_layer_params=(16,), seed=0)


@pytest.mark.parametrize("name", LEARNERS)
def test_agents_learn_which_arm_is_best(name: str) -> None:
    accuracy = learn(LEARNERS[name](), steps=150)
    assert accuracy > 0.9, accuracy  # the most frequent best arm alone would give about 0.4


@pytest.mark.parametrize("name", ["epsilon", "boltzmann", "dropout", "linucb"])
def test_equal_seeds_pull_equal_arms(name: str) -> None:
    observation = np.random.default_rng(0).normal(size=(20, DIM)).astype(np.float32)
    first, second = LEARNERS[name](), LEARNERS[name]()
    for _ in range(3):
        assert actions_of(first.policy, observation, 3).tolist() == actions_of(second.policy, observation, 3).tolist()
        experience = rows(observation, np.zeros(20), np.ones(20))
        assert float(first.train(experience).loss) == float(second.train(experience).loss)


@pytest.mark.parametrize(("name", "steps"), [*((name, 5) for name in LEARNERS), ("linucb", 99), ("linucb", 110)])
def test_from_a_checkpoint_everything_goes_on_as_it_would_have(name: str, steps: int, tmp_path: Path) -> None:
    agent = LEARNERS[name]()
    learn(agent, steps=steps)
    path = tf.train.Checkpoint(agent=agent).write(str(tmp_path / "checkpoint"))
    observation = np.random.default_rng(3).normal(size=(30, DIM)).astype(np.float32)

    def future(agent: Any) -> list[Any]:
        seen = []
        for _ in range(3):
            step = agent.policy.action(restart(observation, batch_size=30))
            loss = agent.train(rows(observation, step.action, observation[:, 0])).loss
            seen += [step.action.tolist(), step.info["propensity"].tolist(), float(loss)]
        return [*seen, agent.policy.predicted_rewards(observation).tolist(), int(agent.train_step_counter)]

    expected = future(agent)
    restored = LEARNERS[name]()
    actions_of(restored.policy, observation)  # it may have drawn before
    tf.train.Checkpoint(agent=restored).read(path).assert_consumed()
    assert future(restored) == expected


def test_linucb_trains_the_encoder_first_and_leaves_it_alone_afterwards() -> None:
    agent = linucb(encoding_network_num_train_steps=3)
    observation, expected = problem(np.random.default_rng(0), 8)
    experience = rows(observation, np.zeros(8), expected[:, 0])
    weights = [agent.encoding_network.get_weights()]
    stages = []
    for _ in range(6):
        stages.append(agent.actions_from_reward_layer)
        assert agent.policy.actions_from_reward_layer == stages[-1]
        agent.train(experience)
        weights.append(agent.encoding_network.get_weights())
    assert stages == [True, True, True, False, False, False]
    moved = [any((new != old).any() for new, old in zip(*pair, strict=True)) for pair in pairwise(weights)]
    assert moved == stages
    assert int(agent.train_step_counter) == 6


def test_linucb_is_a_ridge_regression_on_the_encoding_plus_widths() -> None:
    agent = identity(alpha=0.7, tikhonov_weight=2.0)
    rng = np.random.default_rng(0)
    gram, target = np.tile(2 * np.eye(DIM), (ARMS, 1, 1)), np.zeros((ARMS, DIM))
    for _ in range(4):
        observation, expected = problem(rng, 5)
        action = rng.integers(0, ARMS, 5)
        reward, weights = expected[np.arange(5), action] + rng.normal(size=5), rng.random(5)
        theta = np.linalg.solve(gram, target[:, :, None])[:, :, 0]
        errors = (observation * theta[action]).sum(axis=1) - reward
        loss = agent.loss(rows(observation, action, reward), weights[:, None]).loss
        assert float(agent.train(rows(observation, action, reward), weights[:, None]).loss) == float(loss)
        np.testing.assert_allclose(float(loss), np.mean(weights * errors**2), rtol=1e-4)  # before the step
        for x, arm, r, w in zip(observation.astype(float), action, reward, weights, strict=True):
            gram[arm] += w * np.outer(x, x)
            target[arm] += w * r * x
    observation, _ = problem(rng, 200)
    inverse = np.linalg.inv(gram)
    mean = np.einsum("bd,kde,ke->bk", observation, inverse, target)
    bounds = mean + 0.7 * np.sqrt(np.einsum("bd,kde,be->bk", observation, inverse, observation))
    np.testing.assert_allclose(agent.policy.predicted_rewards(observation), mean, rtol=1e-3, atol=1e-5)
    step = agent.policy.action(restart(observation, batch_size=200))
    assert step.action.tolist() == bounds.argmax(axis=1).tolist()
    assert step.action.tolist() != mean.argmax(axis=1).tolist()
    assert step.info["propensity"].tolist() == [1] * 200
    assert agent.policy.probabilities(observation).argmax(axis=1).tolist() == step.action.tolist()


def test_linucb_is_the_same_compiled() -> None:
    agent = identity(alpha=0.7)
    observation, expected = problem(np.random.default_rng(0), 300)
    agent.train(rows(observation, np.arange(300) % ARMS, expected[:, 0]))
    time_step = restart(observation, batch_size=300)
    step = agent.policy.compiled().action(time_step)
    assert step.action.tolist() == agent.policy.action(time_step).action.tolist()
    assert len(set(step.action.tolist())) > 1
    assert (step.info["propensity"] == 1).all()


def test_linucb_forgets_by_gamma() -> None:
    agent = identity(gamma=0.0)
    first, second = contexts([1, 0], [0, 1]), contexts([1, 1])
    agent.train(rows(first, [0, 0], [5.0, 7.0]))
    agent.train(rows(second, [0], [3.0]))
    # Only the last row is left: x = (1, 1), r = 3 and a Tikhonov weight of 1 give theta = (1, 1).
    np.testing.assert_allclose(agent.policy.predicted_rewards(first)[:, 0], [1, 1], rtol=1e-5)


def test_linucb_learns_nothing_from_an_encoding_that_is_not_finite() -> None:
    agent = identity()
    before = agent.linear_model.information.copy()
    agent.encoding_network.weights[0].assign(np.full(agent.encoding_network.weights[0].shape, np.float32(3e38)))
    with pytest.raises(SpecError, match="encodings must be finite, got"):
        agent.train(rows(contexts([1, 1], [2, 2]), [0, 1], [1.0, 1.0]))
    assert (agent.linear_model.information == before).all()
    assert int(agent.train_step_counter) == 0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"encoding_dim": 5}, SpecError, r"encoding_network must give floats \[B, 5\], got float32 \[2, 6\]"),
        (
            {"encoding_network": keras.Sequential([keras.Input((9,)), keras.layers.Dense(6)])},
            SpecError,
            "encoding_network must take batches of observations",
        ),
        ({"encoding_network": abs}, OptionError, "encoding_network must be a keras.Model"),
        ({"encoding_network_num_train_steps": -1}, OptionError, "must be an integer of at least 0, got -1. Pass 0"),
        ({"alpha": -1}, OptionError, "alpha must be a finite number, at least 0, got -1"),
        ({"gamma": 1.1}, OptionError, "gamma must be a finite number, at least 0, at most 1, got 1.1"),
        ({"epsilon_greedy": 2}, OptionError, "epsilon_greedy must be a finite number"),
        ({"tikhonov_weight": 0}, OptionError, "tikhonov_weight must be a finite number, above 0, got 0"),
        ({"seed": -1}, OptionError, "seed must be None or an integer"),
    ],
)
def test_linucb_outside_its_rule_is_refused(arguments: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        linucb(**arguments)


def test_a_counter_of_ones_own_counts() -> None:
    counter = tf.Variable(10, dtype=tf.int64)
    agent = make(train_step_counter=counter)
    agent.train(ROWS)
    assert int(counter) == 11
    assert agent.train_step_counter is counter


def test_summaries_are_written_when_asked_for(tmp_path: Path) -> None:
    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        make(debug_summaries=True, summarize_grads_and_vars=True).train(ROWS)
    written = next(tmp_path.iterdir()).read_bytes()
    for tag in (b"bandit/loss", b"bandit/reward_loss", b"bandit/predictions", b"bandit/weights", b"bandit/gradients"):
        assert tag in written


def test_a_diverged_network_chooses_nothing() -> None:
    policies = [make().policy, make(NeuralBoltzmannAgent).policy]
    for policy in policies:
        policy.reward_network.set_weights([np.full((DIM, ARMS), 3e38, np.float32)])
        with pytest.raises(SpecError, match=r"predicted rewards must be finite, got \[inf, inf, inf\] in lane 1"):
            policy.action(restart(contexts([0, 0], [1, 1]), batch_size=2))


def test_observations_that_do_not_fit_are_refused() -> None:
    policy = make().policy
    with pytest.raises(SpecError, match=r"leaf 'observation' must be float32 \[B, 2\], got float64 \[4, 2\]"):
        policy.predicted_rewards(np.zeros((4, 2)))
    with pytest.raises(SpecError, match=r"leaf 'observation' must be float32 \[B, 2\], got float32 \[4, 3\]"):
        policy.predicted_rewards(np.zeros((4, 3), np.float32))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda: linear([[1.0], [2.0]]), r"reward_network must give a float for each of the 3 actions, \[B, 3\], got "),
        (
            lambda: keras.Sequential([keras.Input((5,)), keras.layers.Dense(ARMS)]),
            "(?s)reward_network must take batches of observations .* Make it for these observations",
        ),
    ],
)
def test_a_network_that_does_not_fit_is_refused_when_the_agent_is_made(network: Any, message: str) -> None:
    for kind in (GreedyRewardPredictionAgent, NeuralEpsilonGreedyAgent, NeuralBoltzmannAgent):
        with pytest.raises(SpecError, match=message):
            make(kind, reward_network=network())


def test_a_network_that_takes_the_mask_too_is_refused() -> None:
    network = QNetwork(SPLIT_SPEC, ACTION)
    with pytest.raises(SpecError, match="reward_network must take batches of observations"):
        GreedyRewardPredictionAgent(
            time_step_spec(SPLIT_SPEC),
            ACTION,
            network,
            keras.optimizers.SGD(),
            observation_and_action_constraint_splitter=split,
        )


def test_a_splitter_that_fails_is_named() -> None:
    with pytest.raises(SpecError, match="observation_and_action_constraint_splitter must take batches of observations"):
        make(observation_and_action_constraint_splitter=split)


USED = keras.optimizers.SGD()
USED.build([keras.Variable(0.0)])


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (GreedyRewardPredictionAgent, {"reward_network": abs}, "reward_network must be a keras.Model"),
        (GreedyRewardPredictionAgent, {"optimizer": "adam"}, "optimizer must be a keras.Optimizer"),
        (GreedyRewardPredictionAgent, {"optimizer": USED}, "optimizer must be one that trains nothing else"),
        (GreedyRewardPredictionAgent, {"gradient_clipping": 0}, "gradient_clipping must be a finite number, above 0"),
        (
            GreedyRewardPredictionAgent,
            {"error_loss_fn": keras.losses.MeanSquaredError()},
            "error_loss_fn must give a loss for each element",
        ),
        (GreedyRewardPredictionAgent, {"train_step_counter": 3}, "train_step_counter must be a scalar integer"),
        (GreedyRewardPredictionAgent, {"seed": -1}, "seed must be None or an integer of at least 0"),
        (NeuralEpsilonGreedyAgent, {"epsilon": 1.5}, "epsilon must be a finite number, at least 0, at most 1, got 1.5"),
        (NeuralEpsilonGreedyAgent, {"epsilon": lambda step: 2}, "epsilon must be a finite number"),
        (NeuralEpsilonGreedyAgent, {"epsilon": lambda: 0.5}, "epsilon must be .* Let it take the step"),
        (NeuralBoltzmannAgent, {"temperature": 0.0}, "temperature must be a finite number, above 0, got 0.0"),
    ],
)
def test_an_argument_outside_its_rule_is_refused(kind: Any, arguments: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make(kind, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dropout_rate": 0.0}, "dropout_rate must be a finite number, above 0, below 1, got 0.0"),
        ({"dropout_rate": 1.0}, "dropout_rate must be a finite number, above 0, below 1, got 1.0"),
        ({"network_layers": ()}, "network_layers must have at least one layer, got none"),
        ({"num_samples": 0}, "num_samples must be an integer of at least 1, got 0"),
    ],
)
def test_dropout_outside_its_rule_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        dropout_agent(**arguments)


def test_a_schedule_needs_to_be_told_the_step() -> None:
    with pytest.raises(OptionError, match="step must be a function that tells the step where epsilon is a function"):
        EpsilonGreedyRewardPredictionPolicy(*SPECS, linear(), epsilon=lambda step: 0.5)


@pytest.mark.parametrize("rates", [(0.5,), (None, 1.0), (None, -0.1)])
def test_a_q_network_refuses_dropout_that_does_not_fit(rates: Any) -> None:
    with pytest.raises(OptionError, match="dropout_layer_params must"):
        QNetwork(CONTEXT, ACTION, fc_layer_params=(4, 4), dropout_layer_params=rates)
