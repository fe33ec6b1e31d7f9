"""Policies over arms whose rewards are linear in the context: the most optimistic arm, and posterior sampling."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diskbuf.agents.keras_training import finite_number
from diskbuf.bandits.policies.bandit_policy import BanditPolicy, ConstraintSplitter, as_certain, best_allowed
from diskbuf.bandits.policies.context_features import ContextFeatures
from diskbuf.bandits.policies.largest_draw import chances_of_normals, tensor_chances_of_normals
from diskbuf.bandits.policies.linear_model import LinearModel
from diskbuf.errors import OptionError
from diskbuf.trajectories import TimeStep

if TYPE_CHECKING:
    import tensorflow as tf

Floats = npt.NDArray[np.float64]


class LinearPolicy(BanditPolicy):
    """What the policies over linear models have in common. A subclass writes `_chances` and `_tensor_chances`.

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        tikhonov_weight: Of the model, above 0: what it takes for granted before it has seen a row.
        gamma: Of the model, from 0 to 1: what older rows count for after each update.
        alpha: What widths are multiplied by, at least 0; 0 doesn't explore.
        add_bias: Whether the model has a feature that is always 1.
        observation_and_action_constraint_splitter: Takes observations apart into contexts and a mask of the arms that
            may be chosen; None allows all.
        seed: Of its draws; None takes entropy from the system.

    Raises:
        SpecError: If the action_spec is something else, or a context can't be made numbers.
        OptionError: If another argument is outside its rule.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        *,
        tikhonov_weight: float = 1.0,
        gamma: float = 1.0,
        alpha: float = 1.0,
        add_bias: bool = False,
        observation_and_action_constraint_splitter: ConstraintSplitter | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            time_step_spec,
            action_spec,
            observation_and_action_constraint_splitter=observation_and_action_constraint_splitter,
            seed=seed,
        )
        # Without a Tikhonov weight, an arm that has no rows has no estimate.
        tikhonov_weight = finite_number("tikhonov_weight", tikhonov_weight, above=0)
        gamma = finite_number("gamma", gamma, at_least=0, at_most=1)
        self._alpha = finite_number("alpha", alpha, at_least=0)
        if not isinstance(add_bias, bool):
            raise OptionError(f"add_bias must be True or False, got {add_bias!r}.")
        self._features = ContextFeatures(self.time_step_spec.observation, self._splitter, add_bias=add_bias)
        self._model = LinearModel(
            self.num_actions, self._features.num_features, tikhonov_weight=tikhonov_weight, gamma=gamma
        )

    @property
    def alpha(self) -> float:
        """What was given."""
        return self._alpha

    @property
    def model(self) -> LinearModel:
        """The model, which an agent updates."""
        return self._model

    def features(self, observation: Any) -> Floats:
        """Returns [B, d] float64, what the model sees of observations: no mask, and the bias.

        Args:
            observation: Nest of [B, *shape] arrays.

        Raises:
            SpecError: If a context has another shape, or isn't finite.
        """
        return self._features.of(observation if self._splitter is None else self._splitter(observation)[0])

    def predicted_rewards(self, observation: Any) -> Floats:
        """Returns [B, K] float64, what reward the model expects of each arm, allowed or not.

        Args:
            observation: Nest of [B, *shape] arrays.

        Raises:
            SpecError: If a context has another shape, or isn't finite.
        """
        return self._model.expected(self.features(observation))

    def _tensor_estimates(self, context: Any) -> "tuple[tf.Tensor, tf.Tensor]":
        """Returns expected rewards [B, K] and alpha times their widths [B, K], by the model of this moment."""
        import tensorflow as tf

        # A copy, because the model goes on learning; SavedModels hold it as a constant.
        product = tf.matmul(self._features.of_tensors(context), self._model.solved.copy())
        product = tf.reshape(product, [-1, self.num_actions, self._features.num_features + 1])
        return product[:, :, 0], self._alpha * tf.norm(product[:, :, 1:], axis=2)


class LinearUCBPolicy(LinearPolicy):
    """Chooses the arm with the highest estimate plus alpha times its width; its propensity is 1.

    Li, Chu, Langford and Schapire, "A Contextual-Bandit Approach to Personalized News Article Recommendation" (2010),
    algorithm 1. Of equal arms it chooses the first.

    Args: Those of a LinearPolicy.
    """

    def _scores(self, context: Any) -> Floats:
        expected, width = self._model.estimates(self._features.of(context))
        width *= self._alpha
        width += expected
        return width

    def _choose(
        self, context: Any, mask: npt.NDArray[np.bool_] | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        index = best_allowed(self._scores(context), mask)
        return index, np.ones(len(index), np.float32)

    def _probabilities(self, context: Any, mask: npt.NDArray[np.bool_] | None) -> Floats:
        return as_certain(best_allowed(self._scores(context), mask), self.num_actions)

    def _tensor_probabilities(self, context: Any, mask: "tf.Tensor | None") -> "tf.Tensor":
        import tensorflow as tf

        expected, width = self._tensor_estimates(context)
        scores = expected + width
        if mask is not None:
            scores = tf.where(tf.cast(mask, tf.bool), scores, -math.inf)
        return tf.one_hot(tf.argmax(scores, axis=1), self.num_actions, dtype=tf.float64)


class LinearThompsonSamplingPolicy(LinearPolicy):
    """Chooses each arm as often as it would have the largest reward, if the arms' weights were drawn anew each time.

    An arm's weights are drawn from a normal distribution around their estimate, whose covariance is alpha^2 * A^-1,
    independently for each arm and lane: Agrawal and Goyal, "Thompson Sampling for Contextual Bandits with Linear
    Payoffs" (2013), with a posterior for each arm. So the reward that a draw expects is normal too, with alpha times
    the width as standard deviation, and how probable it is that an arm has the largest one is an integral over one
    number. The policy works these probabilities out, to 1e-6 with up to twenty arms and to 1e-4 with hundreds, for
    widths that differ a thousandfold too, and draws an arm from them. The propensity is thus that of the draw, to the
    precision of a float32.

    Args: Those of a LinearPolicy.
    """

    def _probabilities(self, context: Any, mask: npt.NDArray[np.bool_] | None) -> Floats:
        expected, width = self._model.estimates(self._features.of(context))
        return chances_of_normals(expected, self._alpha * width, mask)

    def _tensor_probabilities(self, context: Any, mask: "tf.Tensor | None") -> "tf.Tensor":
        return tensor_chances_of_normals(*self._tensor_estimates(context), mask)
