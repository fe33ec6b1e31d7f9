"""What every bandit policy is: it gives each arm a probability, draws one, and tells the probability of that one."""

import abc
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diskbuf import specs
from diskbuf.errors import OptionError, SpecError
from diskbuf.networks.action_values import DiscreteActions
from diskbuf.policies.compiled_policy import CompiledPolicy
from diskbuf.policies.policy import Policy
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import PolicyStep, TimeStep

if TYPE_CHECKING:
    import tensorflow as tf

ConstraintSplitter = Callable[[Any], tuple[Any, Any]]
"""From a nest of observations [B, *shape] to (contexts, mask [B, K]), in which nonzero arms may be chosen."""

INFO_SPEC: dict[str, ArraySpec] = {"propensity": BoundedArraySpec((), np.float32, 0.0, 1.0, name="propensity")}
"""What a bandit policy's rows hold in `policy_info`: how probable the chosen arm was when it was chosen."""


class BanditPolicy(Policy):
    """Chooses among K arms, and gives the chosen arm's propensity as `policy_info`.

    A subclass writes `_probabilities` for arrays and `_tensor_probabilities` for tensors, which `compiled` needs. One
    whose choice is certain writes `_choose` as well, which is faster. The two must not change the state of the policy;
    an agent does that when it trains.

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        observation_and_action_constraint_splitter: Takes observations apart into contexts and a mask of the arms that
            may be chosen; None allows all. Must work on arrays, and on tensors for `compiled`.
        seed: Of its draws; None takes entropy from the system.
        extra_info_spec: Specs by name of what a subclass gives as info besides the propensity.

    Raises:
        SpecError: If the action_spec is something else.
        OptionError: If the splitter isn't callable, or the seed is none.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        *,
        observation_and_action_constraint_splitter: ConstraintSplitter | None = None,
        seed: int | None = None,
        extra_info_spec: Mapping[str, ArraySpec] | None = None,
    ) -> None:
        self._actions = DiscreteActions.of(action_spec)
        super().__init__(
            specs.as_spec(time_step_spec), specs.as_spec(action_spec), info_spec=INFO_SPEC | dict(extra_info_spec or {})
        )
        if observation_and_action_constraint_splitter is not None and not callable(
            observation_and_action_constraint_splitter
        ):
            raise OptionError(
                "observation_and_action_constraint_splitter must be None or a function from observations to "
                f"(contexts, mask), got {observation_and_action_constraint_splitter!r}."
            )
        self._splitter = observation_and_action_constraint_splitter
        try:
            self._rng = np.random.default_rng(seed)
        except (TypeError, ValueError) as error:
            raise OptionError(f"seed must be None or an integer of at least 0, got {seed!r}.") from error

    @property
    def num_actions(self) -> int:
        """K, the number of arms."""
        return self._actions.num_actions

    @property
    def observation_and_action_constraint_splitter(self) -> ConstraintSplitter | None:
        """What was given."""
        return self._splitter

    @property
    def rng(self) -> np.random.Generator:
        """What it draws with."""
        return self._rng

    def probabilities(self, observation: Any) -> npt.NDArray[np.float64]:
        """Returns [B, K] float64, how probable each arm is in each context; rows sum to 1, forbidden arms have 0.

        Args:
            observation: Nest of [B, *shape] arrays.

        Raises:
            SpecError: If a mask forbids every arm, or isn't [B, K].
        """
        return self._probabilities(*self._split(observation))

    def action(self, time_step: TimeStep, policy_state: Any = ()) -> PolicyStep:
        """Chooses one arm for each lane.

        Args:
            time_step: Leaves [B, *shape].
            policy_state: Given back as it came.

        Returns:
            The arms [B], and `{"propensity": [B] float32}` as info.

        Raises:
            SpecError: If a mask forbids every arm, or isn't [B, K].
        """
        index, propensity = self._choose(*self._split(time_step.observation))
        action = (index + self._actions.minimum).astype(self._actions.dtype)
        return PolicyStep(action, policy_state, {"propensity": propensity})

    def compiled(self) -> CompiledPolicy:
        """Returns this policy in TensorFlow, to save: it draws from the same probabilities, of this moment's state."""
        actions, probabilities, splitter = self._actions, self._tensor_probabilities, self._splitter

        def chances_of(observation: Any) -> Any:
            import tensorflow as tf

            context, mask = (observation, None) if splitter is None else splitter(observation)
            checks = []
            if mask is not None:
                allowed = tf.reduce_all(tf.reduce_any(tf.cast(mask, tf.bool), axis=1))
                checks = [tf.debugging.Assert(allowed, ["the mask must allow at least one arm in each lane"])]
            with tf.control_dependencies(checks):
                return tf.identity(probabilities(context, mask))  # [B, K]

        def act(time_step: TimeStep, policy_state: Any) -> PolicyStep:
            import tensorflow as tf

            chances = chances_of(time_step.observation)
            index = tf.random.categorical(tf.math.log(chances), 1, dtype=tf.int64)[:, 0]
            propensity = tf.cast(tf.gather(chances, index, batch_dims=1), tf.float32)
            return PolicyStep(tf.cast(index + actions.minimum, actions.dtype), policy_state, {"propensity": propensity})

        return CompiledPolicy(
            act, self.time_step_spec, self.action_spec, info_spec=self.info_spec, probabilities=chances_of
        )

    @abc.abstractmethod
    def _probabilities(self, context: Any, mask: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.float64]:
        """Returns [B, K].

        Args:
            context: Nest of [B, *shape] arrays, without the mask.
            mask: [B, K] True where an arm may be chosen, one at least in each lane; None where all may.
        """

    @abc.abstractmethod
    def _tensor_probabilities(self, context: Any, mask: "tf.Tensor | None") -> "tf.Tensor":
        """Returns [B, K] floats, the same for tensors, of an unknown B.

        Args:
            context: Nest of [B, *shape] tensors, without the mask.
            mask: [B, K], nonzero where an arm may be chosen; None where all may.
        """

    def _choose(
        self, context: Any, mask: npt.NDArray[np.bool_] | None
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Draws [B] arms from their probabilities; returns them from 0 on, and [B] how probable each was."""
        chances = self._probabilities(context, mask)
        upto = chances.cumsum(axis=1)
        drawn = self._rng.random(len(chances)) * upto[:, -1]  # below the last one, so an arm that can't be isn't drawn
        index = (upto > drawn[:, None]).argmax(axis=1)
        return index, chances[np.arange(len(index)), index].astype(np.float32)

    def _split(self, observation: Any) -> tuple[Any, npt.NDArray[np.bool_] | None]:
        if self._splitter is None:
            return observation, None
        context, given = self._splitter(observation)
        mask = np.asarray(given) != 0
        if mask.ndim != 2 or mask.shape[1] != self.num_actions:
            raise SpecError(
                f"the mask must be [B, {self.num_actions}], one number for each arm, got {list(mask.shape)} from "
                "observation_and_action_constraint_splitter."
            )
        if not mask.any(axis=1).all():
            lane = int((~mask.any(axis=1)).argmax())
            raise SpecError(f"the mask must allow at least one arm in each lane, got none in lane {lane}.")
        return context, mask


def as_certain(index: npt.NDArray[np.int64], num_actions: int) -> npt.NDArray[np.float64]:
    """Returns [B, K] float64, 1 for the arm index [B] names and 0 for the others."""
    chances = np.zeros((len(index), num_actions))
    chances[np.arange(len(index)), index] = 1
    return chances


def best_allowed(scores: npt.NDArray[Any], mask: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.int64]:
    """Returns [B] int64, the allowed arm with the highest of scores [B, K], of equal ones the first."""
    allowed = scores if mask is None else np.where(mask, scores, -np.inf)
    return np.asarray(allowed.argmax(axis=1), np.int64)
