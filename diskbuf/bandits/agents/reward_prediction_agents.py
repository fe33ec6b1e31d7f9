"""Agents that train a network to predict the reward of every arm, and differ in how they explore by it."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from diskbuf.agents.dqn_agent import LossInfo
from diskbuf.agents.keras_training import (
    check_keras,
    checked_counter,
    checked_loss,
    checked_optimizer,
    finite_number,
    optimize,
)
from diskbuf.agents.losses import element_wise_squared_loss
from diskbuf.bandits.agents.bandit_agent import BanditAgent
from diskbuf.bandits.policies.bandit_policy import BanditPolicy, ConstraintSplitter
from diskbuf.bandits.policies.reward_prediction_policies import (
    BoltzmannRewardPredictionPolicy,
    DropoutThompsonSamplingPolicy,
    EpsilonGreedyRewardPredictionPolicy,
    GreedyRewardPredictionPolicy,
    RewardPredictionPolicy,
)
from diskbuf.bandits.policies.traced_network import context_spec_of
from diskbuf.errors import OptionError
from diskbuf.networks.q_network import QNetwork
from diskbuf.trajectories import TimeStep
from diskbuf.tree import Structure

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class RewardLossInfo(NamedTuple):
    """What an agent that predicts rewards tells of each row.

    Attributes:
        reward_loss: [N] float32, before weights; N = B * T.
        predicted_reward: [N] float32, of the arm that was pulled.
    """

    reward_loss: Any
    predicted_reward: Any


class Options(TypedDict, total=False):
    """What all agents here take besides; their docstring is GreedyRewardPredictionAgent's."""

    observation_and_action_constraint_splitter: ConstraintSplitter | None
    error_loss_fn: "Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None"
    gradient_clipping: float | None
    debug_summaries: bool
    summarize_grads_and_vars: bool
    train_step_counter: "tf.Variable | None"
    seed: int | None
    name: str | None


class RewardPredictionAgent(BanditAgent):
    """What these agents share: a loss of the pulled arm's predicted reward, and a compiled step that lowers it.

    A subclass calls `_begin_module` and `_begin_training` when it is made.
    """

    def _begin_training(
        self,
        policy_fn: Callable[..., BanditPolicy],
        optimizer: Any,
        *,
        observation_and_action_constraint_splitter: ConstraintSplitter | None = None,
        error_loss_fn: "Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None" = None,
        gradient_clipping: float | None = None,
        debug_summaries: bool = False,
        summarize_grads_and_vars: bool = False,
        train_step_counter: "tf.Variable | None" = None,
        seed: int | None = None,
    ) -> None:
        """Takes what training needs; the arguments are GreedyRewardPredictionAgent's, but for the first.

        Args:
            policy_fn: Makes the policy, which checks and builds the networks, from the splitter and the seed.
            optimizer: A Keras optimizer.
            observation_and_action_constraint_splitter: For the policy.
            error_loss_fn: Of rewards and predictions.
            gradient_clipping: Of each variable.
            debug_summaries: Of losses and predictions.
            summarize_grads_and_vars: Of gradients and weights.
            train_step_counter: Is there when policy_fn is called.
            seed: For the policy.
        """
        self.train_step_counter = checked_counter(train_step_counter)
        self._gradient_clipping = (
            None if gradient_clipping is None else finite_number("gradient_clipping", gradient_clipping, above=0)
        )
        self._error_loss_fn = checked_loss(error_loss_fn or element_wise_squared_loss, label="error_loss_fn")
        self._debug_summaries = debug_summaries
        self._summarize_grads_and_vars = summarize_grads_and_vars
        policy = policy_fn(
            observation_and_action_constraint_splitter=observation_and_action_constraint_splitter, seed=seed
        )
        self._begin(policy)
        networks = self._networks()
        variables = [variable for network in networks.values() for variable in network.trainable_variables]
        self._optimizer = checked_optimizer(optimizer, variables, network=next(iter(networks)))
        # Keras doesn't give a checkpoint the seeds of dropout; without them what is drawn after a restart would be
        # other than without one.
        self._layer_seeds = [seed for network in networks.values() for seed in _seeds_of(network)]
        self._compiled = _Compiled(self, policy)

    def retrace(self) -> None:
        """Forgets compiled steps, which write summaries to the writer that was the default when they were compiled."""
        self._compiled.forget()

    def _networks(self) -> "dict[str, keras.Model]":
        """The networks that are trained, by the names of arguments."""
        raise NotImplementedError

    def _predictions(self, context: Any, *, training: bool) -> "tf.Tensor":
        """[N, K] the predicted rewards."""
        raise NotImplementedError

    def loss(self, experience: Any, weights: Any = None) -> LossInfo:
        """Returns the loss that `train` would minimize, and changes nothing.

        Args:
            experience: As in `train`.
            weights: As in `train`.

        Returns:
            The loss, [] float32, and a RewardLossInfo.

        Raises:
            SpecError: If the experience or the weights don't fit.
        """
        observation, index, reward, flat_weights, _ = self._flat(experience, weights)
        return self._compiled.loss(self._context(observation), index, reward, flat_weights)

    def _train(
        self,
        observation: Any,
        index: npt.NDArray[np.int64],
        reward: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
        propensity: npt.NDArray[np.float32] | None,  # noqa: ARG002 - the reward of the arm is learnt, however it came
    ) -> LossInfo:
        return self._compiled.train(self._context(observation), index, reward, weights)

    def _context(self, observation: Any) -> Any:
        splitter = self.policy.observation_and_action_constraint_splitter
        return observation if splitter is None else splitter(observation)[0]

    def _loss(
        self, context: Any, index: "tf.Tensor", reward: "tf.Tensor", weights: "tf.Tensor", *, training: bool
    ) -> LossInfo:
        import tensorflow as tf

        predictions = tf.cast(self._predictions(context, training=training), tf.float32)
        predicted = tf.gather(predictions, index, batch_dims=1)  # [N, K] to [N]
        reward_loss = self._error_loss_fn(reward, predicted)
        loss = tf.reduce_mean(weights * reward_loss)
        own = [term for network in self._networks().values() for term in network.losses]
        if own:
            loss += tf.add_n(own)
        if self._debug_summaries:
            tf.summary.histogram("bandit/predictions", predictions, tf.cast(self.train_step_counter, tf.int64))
        return LossInfo(loss, RewardLossInfo(reward_loss, predicted))

    def _train_step(self, context: Any, index: "tf.Tensor", reward: "tf.Tensor", weights: "tf.Tensor") -> LossInfo:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss_info = self._loss(context, index, reward, weights, training=True)
        variables = [variable for network in self._networks().values() for variable in network.trainable_variables]
        gradients, step = optimize(
            tape,
            loss_info.loss,
            variables=variables,
            optimizer=self._optimizer,
            gradient_clipping=self._gradient_clipping,
            train_step_counter=self.train_step_counter,
        )
        step = tf.cast(step, tf.int64)  # the only dtype that summaries take
        tf.summary.scalar("bandit/loss", loss_info.loss, step)
        if self._debug_summaries:
            tf.summary.histogram("bandit/reward_loss", loss_info.extra.reward_loss, step)
        if self._summarize_grads_and_vars:
            for variable, gradient in zip(variables, gradients, strict=True):
                tf.summary.histogram(f"bandit/weights/{variable.path}", variable, step)
                if gradient is not None:
                    tf.summary.histogram(f"bandit/gradients/{variable.path}", gradient, step)
        return loss_info


class RewardNetworkAgent(RewardPredictionAgent):
    """What the agents share that have one network for it."""

    def _begin_network(
        self,
        policy_fn: Callable[..., RewardPredictionPolicy],
        time_step_spec: TimeStep,
        action_spec: Any,
        reward_network: "keras.Model",
        optimizer: Any,
        **options: Unpack[Options],
    ) -> None:
        self._begin_module(options.pop("name", None))
        check_keras("reward_network", reward_network, "Model")
        self._reward_network = reward_network
        make = functools.partial(policy_fn, time_step_spec, action_spec, reward_network)
        self._begin_training(make, optimizer, **options)  # type: ignore[misc]  # the name was taken out

    @property
    def reward_network(self) -> "keras.Model":
        """The network that is trained."""
        return self._reward_network

    def _networks(self) -> "dict[str, keras.Model]":
        return {"reward_network": self._reward_network}

    def _predictions(self, context: Any, *, training: bool) -> "tf.Tensor":
        return self._reward_network(context, training=training)


class GreedyRewardPredictionAgent(RewardNetworkAgent):
    """Trains a network to predict rewards, and pulls the arm of the highest prediction.

    It never explores on purpose: for rows that another policy collected, and to deploy. Only the reward of the arm that
    was pulled is learnt from, so rows need no rewards of others.

        >>> import keras
        >>> from diskbuf.networks import QNetwork
        >>> from diskbuf.specs import ArraySpec, BoundedArraySpec
        >>> from diskbuf.trajectories import time_step_spec
        >>> context_spec, action_spec = ArraySpec((4,), "float32"), BoundedArraySpec((), "int32", 0, 2)
        >>> network = QNetwork(context_spec, action_spec, fc_layer_params=(32,), seed=0)
        >>> optimizer = keras.optimizers.Adam(1e-3)
        >>> agent = GreedyRewardPredictionAgent(time_step_spec(context_spec), action_spec, network, optimizer)
        >>> agent.policy.predicted_rewards(np.zeros((5, 4), np.float32)).shape
        (5, 3)

    `tf.train.Checkpoint(agent=agent)` holds the network, the optimizer, the counter and what is drawn with, so that
    from a restored checkpoint actions and training go on as they would have.

    Other than TF-Agents', it takes Keras models, and neither constraints, features of arms, Laplacian smoothing nor
    networks that predict variances.

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        reward_network: A Keras model from a batch of contexts to the rewards of all arms [B, K], such as a QNetwork. It
            is built if it wasn't.
        optimizer: A Keras optimizer, for this agent alone.
        observation_and_action_constraint_splitter: Takes observations apart into contexts for the network and a mask
            [B, K] of the arms that may be pulled; None allows all. Must work on arrays, and on tensors for
            `policy.compiled`.
        error_loss_fn: From rewards and predictions [B] to losses [B]; None is `element_wise_squared_loss`.
        gradient_clipping: Largest norm of each variable's gradient; None doesn't clip.
        debug_summaries: Whether to write histograms of losses and predictions for TensorBoard, besides the loss, which
            goes always: to the `tf.summary` writer that is the default when `train` is first called, without one
            nowhere.
        summarize_grads_and_vars: Whether to write histograms of gradients and weights, likewise.
        train_step_counter: A scalar integer tf.Variable that counts training steps; None makes one.
        seed: Of the policy's draws; None takes entropy from the system.
        name: Of the module.

    Raises:
        SpecError: If the action_spec is something else, or the network doesn't fit it or the contexts.
        OptionError: If another argument is outside its rule.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        reward_network: "keras.Model",
        optimizer: "keras.Optimizer",
        *,
        observation_and_action_constraint_splitter: ConstraintSplitter | None = None,
        error_loss_fn: "Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None" = None,
        gradient_clipping: float | None = None,
        debug_summaries: bool = False,
        summarize_grads_and_vars: bool = False,
        train_step_counter: "tf.Variable | None" = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        self._begin_network(
            GreedyRewardPredictionPolicy,
            time_step_spec,
            action_spec,
            reward_network,
            optimizer,
            observation_and_action_constraint_splitter=observation_and_action_constraint_splitter,
            error_loss_fn=error_loss_fn,
            gradient_clipping=gradient_clipping,
            debug_summaries=debug_summaries,
            summarize_grads_and_vars=summarize_grads_and_vars,
            train_step_counter=train_step_counter,
            seed=seed,
            name=name,
        )


class NeuralEpsilonGreedyAgent(RewardNetworkAgent):
    """Trains a network to predict rewards, and mostly pulls the arm of the highest prediction, otherwise any.

        >>> import keras
        >>> from diskbuf.networks import QNetwork
        >>> from diskbuf.policies import LinearSchedule
        >>> from diskbuf.specs import ArraySpec, BoundedArraySpec
        >>> from diskbuf.trajectories import time_step_spec
        >>> context_spec, action_spec = ArraySpec((4,), "float32"), BoundedArraySpec((), "int32", 0, 2)
        >>> agent = NeuralEpsilonGreedyAgent(
        ...     time_step_spec(context_spec),
        ...     action_spec,
        ...     QNetwork(context_spec, action_spec, fc_layer_params=(32,), seed=0),
        ...     keras.optimizers.Adam(1e-3),
        ...     epsilon=LinearSchedule(initial_value=0.3, final_value=0.03, num_steps=1000),
        ...     seed=0,
        ... )
        >>> np.sort(agent.policy.probabilities(np.zeros((1, 4), np.float32))).round(2).tolist()
        [[0.1, 0.1, 0.8]]

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        reward_network: A Keras model from a batch of contexts to [B, K].
        optimizer: A Keras optimizer, for this agent alone.
        epsilon: How probable an arm at random is, from 0 to 1, or a function to that from the number of training steps,
            such as a `diskbuf.policies.LinearSchedule`.
        options: The other arguments are those of GreedyRewardPredictionAgent.

    Raises:
        SpecError: As GreedyRewardPredictionAgent.
        OptionError: If epsilon or another argument is outside its rule.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        reward_network: "keras.Model",
        optimizer: "keras.Optimizer",
        *,
        epsilon: float | Callable[[int], float],
        **options: Unpack[Options],
    ) -> None:
        policy = functools.partial(
            EpsilonGreedyRewardPredictionPolicy, epsilon=epsilon, step=lambda: self.train_step_counter
        )
        self._begin_network(policy, time_step_spec, action_spec, reward_network, optimizer, **options)


class NeuralBoltzmannAgent(RewardNetworkAgent):
    """Trains a network to predict rewards, and pulls arms with probabilities that grow with exp(reward / temperature).

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        reward_network: A Keras model from a batch of contexts to [B, K].
        optimizer: A Keras optimizer, for this agent alone.
        temperature: Above 0, the lower the greedier, or a function to that from the number of training steps, such as a
            `diskbuf.policies.LinearSchedule`; TF-Agents' takes a function of nothing.
        options: The other arguments are those of GreedyRewardPredictionAgent.

    Raises:
        SpecError: As GreedyRewardPredictionAgent.
        OptionError: If the temperature or another argument is outside its rule.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        reward_network: "keras.Model",
        optimizer: "keras.Optimizer",
        *,
        temperature: float | Callable[[int], float] = 1.0,
        **options: Unpack[Options],
    ) -> None:
        policy = functools.partial(
            BoltzmannRewardPredictionPolicy, temperature=temperature, step=lambda: self.train_step_counter
        )
        self._begin_network(policy, time_step_spec, action_spec, reward_network, optimizer, **options)


BoltzmannAgent = NeuralBoltzmannAgent
"""The same, under a shorter name."""


class DropoutThompsonSamplingAgent(RewardNetworkAgent):
    """Trains a network with dropout to predict rewards, and explores by dropout when it acts as well.

    See DropoutThompsonSamplingPolicy for the propensities: they are shares of num_samples passes. TF-Agents' makes one
    pass, and tells no propensity.

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        optimizer: A Keras optimizer, for this agent alone.
        dropout_rate: The share of units that are dropped, above 0 and below 1.
        network_layers: Units of each hidden layer of the network, at least one layer. For another kind of network make
            it yourself, and train it in a GreedyRewardPredictionAgent under a DropoutThompsonSamplingPolicy.
        dropout_only_top_layer: Whether only units of the last hidden layer are dropped.
        num_samples: Passes for each context.
        options: The other arguments are those of GreedyRewardPredictionAgent; the seed is that of the network's weights
            and of dropout too.

    Raises:
        SpecError: As GreedyRewardPredictionAgent.
        OptionError: If the dropout_rate, the network_layers or another argument is outside its rule.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        optimizer: "keras.Optimizer",
        *,
        dropout_rate: float,
        network_layers: Sequence[int],
        dropout_only_top_layer: bool = True,
        num_samples: int = 32,
        **options: Unpack[Options],
    ) -> None:
        rate = finite_number("dropout_rate", dropout_rate, above=0, below=1)
        if not len(network_layers):
            raise OptionError("network_layers must have at least one layer, got none. Dropout drops units of it.")
        undropped = len(network_layers) - 1 if dropout_only_top_layer else 0
        network = QNetwork(
            context_spec_of(time_step_spec.observation, options.get("observation_and_action_constraint_splitter")),
            action_spec,
            fc_layer_params=network_layers,
            dropout_layer_params=[None] * undropped + [rate] * (len(network_layers) - undropped),
            seed=options.get("seed"),
            name="RewardNetwork",
        )
        policy = functools.partial(DropoutThompsonSamplingPolicy, num_samples=num_samples)
        self._begin_network(policy, time_step_spec, action_spec, network, optimizer, **options)


class _Compiled:
    """The steps of an agent, each traced once for any number of rows; not an attribute that a checkpoint looks into.

    Args:
        agent: Whose steps.
        policy: What its contexts are like.
    """

    def __init__(self, agent: RewardPredictionAgent, policy: Any) -> None:
        self._agent = agent
        self._structure = Structure(policy.context_spec)
        self._specs = self._structure.flatten(policy.context_spec)

    def forget(self) -> None:
        """Traces anew when a step is taken next."""
        self.__dict__.pop("_train", None)
        self.__dict__.pop("_loss", None)

    def train(self, context: Any, index: Any, reward: Any, weights: Any) -> LossInfo:
        """Takes a training step on N rows."""
        return self._on(self._train, context, index, reward, weights)

    def loss(self, context: Any, index: Any, reward: Any, weights: Any) -> LossInfo:
        """Returns the loss of N rows."""
        return self._on(self._loss, context, index, reward, weights)

    @functools.cached_property
    def _train(self) -> Any:
        # When first called, because a summary writer that wasn't there when this was traced is never written to.
        return self._traced(self._agent._train_step)

    @functools.cached_property
    def _loss(self) -> Any:
        return self._traced(functools.partial(self._agent._loss, training=False))

    def _traced(self, step: Callable[..., LossInfo]) -> Any:
        import tensorflow as tf

        def on_tensors(index: Any, reward: Any, weights: Any, *leaves: Any) -> LossInfo:
            return step(self._structure.unflatten(leaves), index, reward, weights)

        rows = [tf.TensorSpec([None], dtype) for dtype in (tf.int64, tf.float32, tf.float32)]
        leaves = [tf.TensorSpec([None, *spec.shape], spec.dtype) for spec in self._specs]
        # Without AutoGraph, as Keras compiles its own training: errors keep their class.
        return tf.function(on_tensors, input_signature=[*rows, *leaves], autograph=False).get_concrete_function()

    def _on(self, traced: Any, context: Any, index: Any, reward: Any, weights: Any) -> LossInfo:
        import tensorflow as tf

        weights = np.ones(len(reward), np.float32) if weights is None else weights
        leaves = self._structure.flatten(context)
        loss_info: LossInfo = traced(*map(tf.constant, (index, reward, weights, *leaves)))
        return loss_info


def _seeds_of(network: "keras.Model") -> list[Any]:
    """Variables that a Keras model's layers draw by."""
    weights = set(map(id, network.weights))
    return [variable for variable in network.variables if id(variable) not in weights]
