"""LinUCB on the encoding of a network that is trained first."""

import functools
import operator
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import numpy.typing as npt

from diskbuf.agents.dqn_agent import LossInfo
from diskbuf.agents.keras_training import check_keras, finite_number, positive
from diskbuf.bandits.agents.array_state import array_state
from diskbuf.bandits.agents.reward_prediction_agents import Options, RewardLossInfo, RewardPredictionAgent
from diskbuf.bandits.policies.linear_model import LinearModel
from diskbuf.bandits.policies.neural_linucb_policy import NeuralLinUCBPolicy
from diskbuf.errors import OptionError
from diskbuf.networks.action_values import DiscreteActions
from diskbuf.trajectories import TimeStep

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class NeuralLinUCBAgent(RewardPredictionAgent):
    """Trains a network that encodes contexts for some steps, and then learns by LinUCB on the encoding alone.

    In the first stage a layer on the encoder predicts the reward of each arm, both are trained as in a
    NeuralEpsilonGreedyAgent, and arms are pulled epsilon-greedily. After encoding_network_num_train_steps calls of
    `train` the encoder stays as it is; from then on each arm has a ridge regression on the encoding, begun anew, and
    the arm with the largest expected reward plus alpha widths is pulled. A row should then be trained on once, because
    each time it counts as one more observation.

    That exploring by the last layer alone goes far: Riquelme, Tucker and Snoek, "Deep Bayesian Bandits Showdown"
    (2018); with LinUCB: Xu, Wen, Zhao and Gu, "Neural Contextual Bandits with Deep Representation and Shallow
    Exploration" (2020). There the network goes on learning; here, as in TF-Agents, it doesn't.

        >>> import keras
        >>> from diskbuf.specs import ArraySpec, BoundedArraySpec
        >>> from diskbuf.trajectories import time_step_spec
        >>> context_spec, action_spec = ArraySpec((4,), "float32"), BoundedArraySpec((), "int32", 0, 2)
        >>> encoder = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(8)])
        >>> agent = NeuralLinUCBAgent(
        ...     time_step_spec(context_spec),
        ...     action_spec,
        ...     encoder,
        ...     encoding_network_num_train_steps=500,
        ...     encoding_dim=8,
        ...     optimizer=keras.optimizers.Adam(1e-3),
        ...     epsilon_greedy=0.1,
        ... )
        >>> agent.actions_from_reward_layer
        True

    Other than TF-Agents', its policy changes to LinUCB right after the last step of the encoder rather than at the next
    one, weights count in LinUCB too, the loss there is that of the predictions rather than the negative sum of rewards,
    and of features of arms and distributed training it knows nothing.

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        encoding_network: A Keras model from a batch of contexts to [B, encoding_dim]. It is built if it wasn't.
        encoding_network_num_train_steps: How often `train` trains the encoder, at least 0, which is for one that was
            trained before.
        encoding_dim: What the encoder gives.
        optimizer: A Keras optimizer, for this agent alone.
        alpha: How many widths LinUCB adds, at least 0.
        gamma: What older rows count for after each step of LinUCB, from 0 to 1.
        epsilon_greedy: How probable an arm at random is while the encoder is trained, from 0 to 1.
        tikhonov_weight: Of the squared weights of each arm's regression, above 0.
        options: The other arguments are those of GreedyRewardPredictionAgent; the seed is that of the reward layer's
            weights too.

    Raises:
        SpecError: If the action_spec is something else, or the network takes other contexts or gives other encodings.
        OptionError: If another argument is outside its rule.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        encoding_network: "keras.Model",
        *,
        encoding_network_num_train_steps: int,
        encoding_dim: int,
        optimizer: "keras.Optimizer",
        alpha: float = 1.0,
        gamma: float = 1.0,
        epsilon_greedy: float = 0.0,
        tikhonov_weight: float = 1.0,
        **options: Unpack[Options],
    ) -> None:
        import keras

        self._begin_module(options.pop("name", None))
        check_keras("encoding_network", encoding_network, "Model")
        self._num_train_steps = _checked_steps(encoding_network_num_train_steps)
        self._encoding_network = encoding_network
        dim, num_actions = positive("encoding_dim", encoding_dim), DiscreteActions.of(action_spec).num_actions
        model = LinearModel(
            num_actions,
            dim,
            tikhonov_weight=finite_number("tikhonov_weight", tikhonov_weight, above=0),
            gamma=finite_number("gamma", gamma, at_least=0, at_most=1),
        )
        self._linear_model = model
        self._linear_state = array_state({"information": model.information}, self._take_linear_state)

        self._reward_layer = keras.layers.Dense(
            num_actions,
            use_bias=False,
            kernel_initializer=keras.initializers.RandomUniform(-0.03, 0.03, seed=options.get("seed")),
            name="reward_layer",
        )
        self._reward_layer.build((None, dim))
        policy = functools.partial(
            NeuralLinUCBPolicy,
            time_step_spec,
            action_spec,
            encoding_network=encoding_network,
            reward_layer=self._reward_layer,
            linear_model=model,
            encoding_dim=dim,
            is_encoder_trained=lambda: not self.actions_from_reward_layer,
            alpha=alpha,
            epsilon_greedy=epsilon_greedy,
        )
        self._begin_training(policy, optimizer, **options)  # type: ignore[misc]  # the name was taken out

    @property
    def encoding_network(self) -> "keras.Model":
        """The encoder."""
        return self._encoding_network

    @property
    def linear_model(self) -> LinearModel:
        """Each arm's regression on the encoding."""
        return self._linear_model

    @property
    def actions_from_reward_layer(self) -> bool:
        """Whether the encoder is still in training."""
        return int(self.train_step_counter) < self._num_train_steps

    def loss(self, experience: Any, weights: Any = None) -> LossInfo:
        """Returns the loss of the stage it is in, and changes nothing.

        Args:
            experience: As in `train`.
            weights: As in `train`.

        Returns:
            The loss, [] float32, and a RewardLossInfo.

        Raises:
            SpecError: If the experience or the weights don't fit.
        """
        if self.actions_from_reward_layer:
            return super().loss(experience, weights)
        observation, index, reward, flat_weights, _ = self._flat(experience, weights)
        return self._linear_loss(self._encode(observation), index, reward, flat_weights)

    def _train(
        self,
        observation: Any,
        index: npt.NDArray[np.int64],
        reward: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
        propensity: npt.NDArray[np.float32] | None,
    ) -> LossInfo:
        if self.actions_from_reward_layer:
            return super()._train(observation, index, reward, weights, propensity)
        encoding = self._encode(observation)
        loss_info = self._linear_loss(encoding, index, reward, weights)
        self._linear_model.update(encoding, index, reward, weights)
        self._linear_state.values["information"] = self._linear_model.information
        self.train_step_counter.assign_add(1)
        return loss_info

    def _encode(self, observation: Any) -> npt.NDArray[np.float64]:
        policy: Any = self.policy
        encoding: npt.NDArray[np.float64] = policy.encode(self._context(observation))
        return encoding

    def _linear_loss(
        self,
        encoding: npt.NDArray[np.float64],
        index: npt.NDArray[np.int64],
        reward: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
    ) -> LossInfo:
        import tensorflow as tf

        expected = self._linear_model.expected(encoding).astype(np.float32)
        predicted = tf.constant(expected[np.arange(len(index)), index])
        reward_loss = self._error_loss_fn(tf.constant(reward), predicted)
        loss = tf.reduce_mean(reward_loss if weights is None else weights * reward_loss)
        return LossInfo(loss, RewardLossInfo(reward_loss, predicted))

    def _networks(self) -> "dict[str, Any]":
        return {"encoding_network": self._encoding_network, "reward_layer": self._reward_layer}

    def _predictions(self, context: Any, *, training: bool) -> "tf.Tensor":
        return self._reward_layer(self._encoding_network(context, training=training), training=training)

    def _take_linear_state(self) -> None:
        self._linear_model.information = self._linear_state.values["information"]


def _checked_steps(value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise OptionError(
            f"encoding_network_num_train_steps must be an integer of at least 0, got {value!r}. "
            "Pass 0 for an encoder that was trained before."
        )
    return number
