"""A policy that lets another policy act in each lane, drawn from several."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diskbuf.bandits.policies.bandit_policy import INFO_SPEC, BanditPolicy
from diskbuf.errors import OptionError, SpecError
from diskbuf.policies.compiled_policy import CompiledPolicy
from diskbuf.specs import BoundedArraySpec
from diskbuf.trajectories import PolicyStep, TimeStep

if TYPE_CHECKING:
    import tensorflow as tf

Floats = npt.NDArray[np.float64]


class MixturePolicy(BanditPolicy):
    """Draws one of M policies for each lane, and lets it choose the arm.

    Its `policy_info` holds, besides the `propensity` of the arm over all that may happen, `mixture_choice`, the number
    of the policy that was drawn, `mixture_propensity`, how probable it was to be drawn, and `subpolicy_propensity`, how
    probable it was then to choose the arm: what it takes to train each of them, and the mixture, on old rows too.

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        policies: M of them, for the same specs and with the same splitter.
        mixture_weights: [M], how often each is drawn, in proportion; at least 0, one of them above. None for equally
            often.
        seed: Of its draws; None takes entropy from the system.

    Raises:
        SpecError: If a policy is made for other specs, or its info is more than its propensity, as a mixture's is.
        OptionError: If another argument is outside its rule.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        *,
        policies: Sequence[BanditPolicy],
        mixture_weights: npt.ArrayLike | None = None,
        seed: int | None = None,
    ) -> None:
        policies = list(policies)
        if not policies or not all(isinstance(policy, BanditPolicy) for policy in policies):
            raise OptionError(f"policies must be BanditPolicy objects, one at least, got {policies!r}.")
        splitter = policies[0].observation_and_action_constraint_splitter
        share = BoundedArraySpec((), np.float32, 0.0, 1.0)
        super().__init__(
            time_step_spec,
            action_spec,
            observation_and_action_constraint_splitter=splitter,
            seed=seed,
            extra_info_spec={
                "mixture_choice": BoundedArraySpec((), np.int32, 0, len(policies) - 1),
                "mixture_propensity": share,
                "subpolicy_propensity": share,
            },
        )
        for number, policy in enumerate(policies):
            for name, wanted, got in (
                ("time_step_spec", self.time_step_spec, policy.time_step_spec),
                ("action_spec", self.action_spec, policy.action_spec),
                ("info_spec", INFO_SPEC, policy.info_spec),
            ):
                if got != wanted:
                    raise SpecError(
                        f"the {name} of policy {number} must be that of the mixture, {wanted}, got {got}. Make it for "
                        "the same environment; a mixture can't be part of one."
                    )
            if policy.observation_and_action_constraint_splitter is not splitter:
                raise OptionError(
                    "the policies of a mixture must have one observation_and_action_constraint_splitter, got another "
                    f"in policy {number}. Give all of them the same function."
                )
        self._policies = policies
        self.set_mixture_weights(np.ones(len(policies)) if mixture_weights is None else mixture_weights)

    @property
    def mixture_weights(self) -> Floats:
        """[M], how probable each policy is to be drawn; they sum to 1."""
        return self._shares.copy()

    def set_mixture_weights(self, mixture_weights: npt.ArrayLike) -> None:
        """Takes other weights; an agent does this when it trains.

        Args:
            mixture_weights: [M], how often each policy is drawn, in proportion; at least 0, one of them above.

        Raises:
            OptionError: If they are something else; the policy is as it was.
        """
        number = len(self._policies)
        try:
            weights = np.array(mixture_weights, np.float64)
        except (TypeError, ValueError):
            weights = np.array(None, np.float64)
        if weights.shape != (number,) or not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
            raise OptionError(
                f"mixture_weights must be {number} numbers of at least 0, one above, got {mixture_weights!r}. Give one "
                "for each agent."
            )
        self._shares: Floats = weights / weights.sum()

    def action(self, time_step: TimeStep, policy_state: Any = ()) -> PolicyStep:
        """Chooses one arm for each lane.

        Args:
            time_step: Leaves [B, *shape].
            policy_state: Given back as it came.

        Returns:
            The arms [B], and as info what the class says, leaves [B].

        Raises:
            SpecError: If a mask forbids every arm, or isn't [B, K].
        """
        chances = self._all_probabilities(*self._split(time_step.observation))
        lanes = np.arange(chances.shape[1])
        choice = _drawn(self._rng, np.broadcast_to(self._shares, (len(lanes), len(self._shares))))
        chosen = chances[choice, lanes]  # [B, K]
        index = _drawn(self._rng, chosen)
        info = {
            "propensity": (self._shares @ chances[:, lanes, index]).astype(np.float32),
            "mixture_choice": choice.astype(np.int32),
            "mixture_propensity": self._shares[choice].astype(np.float32),
            "subpolicy_propensity": chosen[lanes, index].astype(np.float32),
        }
        return PolicyStep((index + self._actions.minimum).astype(self._actions.dtype), policy_state, info)

    def compiled(self) -> CompiledPolicy:
        """Returns this policy in TensorFlow, to save: it draws from the same probabilities, of this moment's state."""
        actions, splitter, shares = self._actions, self._splitter, self._shares.copy()

        def act(time_step: TimeStep, policy_state: Any) -> PolicyStep:
            import tensorflow as tf

            context, mask = (time_step.observation, None) if splitter is None else splitter(time_step.observation)
            chances = self._all_tensor_probabilities(context, mask)  # [B, M, K]
            choice = tf.random.categorical(tf.math.log(shares[None]), tf.shape(chances)[0], dtype=tf.int64)[0]
            chosen = tf.gather(chances, choice, batch_dims=1)  # [B, K]
            index = tf.random.categorical(tf.math.log(chosen), 1, dtype=tf.int64)[:, 0]
            together = tf.einsum("m,bmk->bk", shares, chances)
            info = {
                "propensity": tf.cast(tf.gather(together, index, batch_dims=1), tf.float32),
                "mixture_choice": tf.cast(choice, tf.int32),
                "mixture_propensity": tf.cast(tf.gather(shares, choice), tf.float32),
                "subpolicy_propensity": tf.cast(tf.gather(chosen, index, batch_dims=1), tf.float32),
            }
            return PolicyStep(tf.cast(index + actions.minimum, actions.dtype), policy_state, info)

        return CompiledPolicy(act, self.time_step_spec, self.action_spec, info_spec=self.info_spec)

    def _all_probabilities(self, context: Any, mask: npt.NDArray[np.bool_] | None) -> Floats:
        """Returns [M, B, K]."""
        return np.stack([policy._probabilities(context, mask) for policy in self._policies])

    def _all_tensor_probabilities(self, context: Any, mask: "tf.Tensor | None") -> "tf.Tensor":
        """Returns [B, M, K] float64."""
        import tensorflow as tf

        of_each = [tf.cast(policy._tensor_probabilities(context, mask), tf.float64) for policy in self._policies]
        return tf.stack(of_each, axis=1)

    def _probabilities(self, context: Any, mask: npt.NDArray[np.bool_] | None) -> Floats:
        return np.asarray(np.einsum("m,mbk->bk", self._shares, self._all_probabilities(context, mask)))

    def _tensor_probabilities(self, context: Any, mask: "tf.Tensor | None") -> "tf.Tensor":
        import tensorflow as tf

        return tf.einsum("m,bmk->bk", self._shares.copy(), self._all_tensor_probabilities(context, mask))


def _drawn(rng: np.random.Generator, chances: Floats) -> npt.NDArray[np.int64]:
    """Returns [B] int64, a column for each row of chances [B, K], which sum to about 1."""
    upto = chances.cumsum(axis=1)
    drawn = rng.random(len(chances)) * upto[:, -1]  # below the last one, so what can't be isn't drawn
    return np.asarray((upto > drawn[:, None]).argmax(axis=1), np.int64)
