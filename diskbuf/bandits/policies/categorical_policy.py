"""Arms by weights that don't depend on the context."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diskbuf.bandits.policies.bandit_policy import BanditPolicy, ConstraintSplitter
from diskbuf.errors import SpecError
from diskbuf.trajectories import TimeStep
from diskbuf.tree import Structure

if TYPE_CHECKING:
    import tensorflow as tf

Floats = npt.NDArray[np.float64]


class CategoricalPolicy(BanditPolicy):
    """Chooses arm a as often as exp(weights[a]) says among the allowed ones. Of an observation it reads the mask only.

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        weights: [K] finite; None for zeros.
        observation_and_action_constraint_splitter: Takes observations apart into contexts and a mask of the arms that
            may be chosen; None allows all.
        seed: Of its draws; None takes entropy from the system.

    Raises:
        SpecError: If the action_spec is something else, or the weights don't fit.
        OptionError: If the splitter isn't callable, or the seed is none.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        *,
        weights: npt.ArrayLike | None = None,
        observation_and_action_constraint_splitter: ConstraintSplitter | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            time_step_spec,
            action_spec,
            observation_and_action_constraint_splitter=observation_and_action_constraint_splitter,
            seed=seed,
        )
        self.set_weights(np.zeros(self.num_actions) if weights is None else weights)

    def set_weights(self, weights: npt.ArrayLike) -> None:
        """Takes other weights; an agent does this when it trains.

        Args:
            weights: [K] finite.

        Raises:
            SpecError: If they are something else; the policy is as it was.
        """
        array = np.array(weights, np.float64)
        if array.shape != (self.num_actions,) or not np.isfinite(array).all():
            raise SpecError(f"weights must be {self.num_actions} finite numbers, one for each arm, got {weights!r}.")
        self._weights = array

    def _probabilities(self, context: Any, mask: npt.NDArray[np.bool_] | None) -> Floats:
        if mask is None:
            leaf = context if isinstance(context, np.ndarray) else Structure(context).flatten(context)[0]
            return np.tile(softmax(self._weights), (len(leaf), 1))
        return softmax(np.where(mask, self._weights, -np.inf))

    def _tensor_probabilities(self, context: Any, mask: "tf.Tensor | None") -> "tf.Tensor":
        import tensorflow as tf

        if mask is not None:
            return tf.nn.softmax(tf.where(tf.cast(mask, tf.bool), self._weights, -np.inf))
        lanes = tf.shape(Structure(context).flatten(context)[0])[0]
        return tf.tile(tf.constant(softmax(self._weights)[None]), [lanes, 1])


def softmax(weights: Floats) -> Floats:
    """Returns exp(weights) divided by its sum over the last axis.

    Args:
        weights: [..., K], finite in one place at least of each row, elsewhere perhaps -inf.
    """
    chances = np.exp(weights - weights.max(axis=-1, keepdims=True))
    return np.asarray(chances / chances.sum(axis=-1, keepdims=True))
