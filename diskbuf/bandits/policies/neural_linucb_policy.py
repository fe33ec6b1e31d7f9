"""The policy of LinUCB on what a network makes of contexts."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diskbuf.agents.keras_training import finite_number
from diskbuf.bandits.policies.bandit_policy import BanditPolicy, ConstraintSplitter, as_certain, best_allowed
from diskbuf.bandits.policies.linear_model import LinearModel
from diskbuf.bandits.policies.reward_prediction_policies import (
    allowed,
    at_this_moment,
    epsilon_greedy,
    finite_rewards,
    tensor_epsilon_greedy,
)
from diskbuf.bandits.policies.traced_network import TracedNetwork, context_spec_of
from diskbuf.errors import SpecError
from diskbuf.networks.action_values import called_with_two
from diskbuf.trajectories import TimeStep

if TYPE_CHECKING:
    import tensorflow as tf

Floats = npt.NDArray[np.float64]


class NeuralLinUCBPolicy(BanditPolicy):
    """While the encoder is in training, epsilon-greedy by a reward layer on it; afterwards LinUCB on the encoding.

    LinUCB pulls the arm with the largest expected reward plus alpha widths, of equal ones the first: it is certain, and
    its propensity 1. A NeuralLinUCBAgent makes this policy. What `compiled` returns keeps the stage and the linear
    model of the moment.

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        encoding_network: A Keras model from a batch of contexts to [B, encoding_dim].
        reward_layer: From [B, encoding_dim] to the rewards of all arms [B, K].
        linear_model: Of K arms and encoding_dim features.
        encoding_dim: d.
        is_encoder_trained: Tells the stage.
        alpha: How many widths to add, at least 0.
        epsilon_greedy: How probable an arm at random is in the first stage, from 0 to 1.
        observation_and_action_constraint_splitter: Takes observations apart into contexts for the network and a mask
            of the arms that may be chosen; None allows all. Must work on arrays, and on tensors for `compiled`.
        seed: Of its draws; None takes entropy from the system.

    Raises:
        SpecError: If the action_spec is something else, or the network takes other contexts or gives other encodings.
        OptionError: If another argument is outside its rule.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        *,
        encoding_network: Callable[..., Any],
        reward_layer: Callable[..., Any],
        linear_model: LinearModel,
        encoding_dim: int,
        is_encoder_trained: Callable[[], bool],
        alpha: float = 1.0,
        epsilon_greedy: float = 0.0,
        observation_and_action_constraint_splitter: ConstraintSplitter | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            time_step_spec,
            action_spec,
            observation_and_action_constraint_splitter=observation_and_action_constraint_splitter,
            seed=seed,
        )
        self._alpha = finite_number("alpha", alpha, at_least=0)
        self._epsilon = finite_number("epsilon_greedy", epsilon_greedy, at_least=0, at_most=1)
        self._context_spec = context_spec_of(self.time_step_spec.observation, self._splitter)
        encoding = called_with_two(encoding_network, self._context_spec, label="encoding_network")
        if tuple(getattr(encoding, "shape", ())) != (2, encoding_dim) or not encoding.dtype.is_floating:
            got = f"{encoding.dtype.name} {list(encoding.shape)}" if hasattr(encoding, "shape") else repr(encoding)
            raise SpecError(
                f"encoding_network must give floats [B, {encoding_dim}], got {got} for B = 2. "
                f"Make its last layer keras.layers.Dense({encoding_dim}), or encoding_dim what it gives."
            )
        self._encoding_network = encoding_network
        self._reward_layer = reward_layer
        self._linear_model = linear_model
        self._is_encoder_trained = is_encoder_trained
        self._traced_rewards = TracedNetwork(self._tensor_rewards, self._context_spec)
        self._traced_encoding = TracedNetwork(self._tensor_encoding, self._context_spec)

    @property
    def context_spec(self) -> Any:
        """Nest of specs of what the network takes, one context without its mask."""
        return self._context_spec

    @property
    def actions_from_reward_layer(self) -> bool:
        """Whether it is in the first stage."""
        return not self._is_encoder_trained()

    def encode(self, context: Any) -> Floats:
        """Returns [B, encoding_dim] float64, what LinUCB takes for contexts.

        Args:
            context: Nest of [B, *shape] arrays, without the mask.

        Raises:
            SpecError: If the context doesn't fit, or its encoding isn't finite.
        """
        encoding: Floats = finite_rewards(self._traced_encoding(context), what="encodings")
        return encoding

    def predicted_rewards(self, observation: Any) -> npt.NDArray[np.float32]:
        """Returns [B, K] float32, the reward that is expected of each arm, without the widths, forbidden ones too.

        Args:
            observation: Nest of [B, *shape] arrays, masks and all.

        Raises:
            SpecError: If the observation doesn't fit, or a prediction isn't finite.
        """
        context, _ = self._split(observation)
        if self.actions_from_reward_layer:
            return self._rewards(context)
        return self._linear_model.expected(self.encode(context)).astype(np.float32)

    def _rewards(self, context: Any) -> npt.NDArray[np.float32]:
        rewards: npt.NDArray[np.float32] = finite_rewards(self._traced_rewards(context))
        return rewards

    def _probabilities(self, context: Any, mask: npt.NDArray[np.bool_] | None) -> Floats:
        if self.actions_from_reward_layer:
            return epsilon_greedy(self._rewards(context), mask, self._epsilon)
        return as_certain(best_allowed(self._bounds(context), mask), self.num_actions)

    def _choose(
        self, context: Any, mask: npt.NDArray[np.bool_] | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        if self.actions_from_reward_layer:
            return super()._choose(context, mask)
        best = best_allowed(self._bounds(context), mask)
        return best, np.ones(len(best), np.float32)

    def _bounds(self, context: Any) -> Floats:
        mean, width = self._linear_model.estimates(self.encode(context))
        return mean + self._alpha * width

    def _tensor_encoding(self, context: Any) -> "tf.Tensor":
        import tensorflow as tf

        return tf.cast(self._encoding_network(context, training=False), tf.float64)

    def _tensor_rewards(self, context: Any) -> "tf.Tensor":
        import tensorflow as tf

        encoding = self._encoding_network(context, training=False)
        return tf.cast(self._reward_layer(encoding, training=False), tf.float32)

    def _tensor_probabilities(self, context: Any, mask: "tf.Tensor | None") -> "tf.Tensor":
        import tensorflow as tf

        if not at_this_moment(self._is_encoder_trained):
            return tensor_epsilon_greedy(self._tensor_rewards(context), mask, self._epsilon)
        solved = tf.constant(self._linear_model.solved)
        product = tf.reshape(self._tensor_encoding(context) @ solved, [-1, self.num_actions, solved.shape[0] + 1])
        bounds = product[:, :, 0] + self._alpha * tf.norm(product[:, :, 1:], axis=2)
        return tf.one_hot(tf.argmax(allowed(bounds, mask), axis=1), self.num_actions, dtype=tf.float64)
