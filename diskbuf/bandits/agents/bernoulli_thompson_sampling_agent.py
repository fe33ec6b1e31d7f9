"""Thompson sampling for rewards that are 0 or 1 and don't depend on a context."""

from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.agents.dqn_agent import LossInfo
from diskbuf.bandits.agents.array_agent import ArrayAgent
from diskbuf.bandits.agents.array_state import Arrays
from diskbuf.bandits.policies.bandit_policy import ConstraintSplitter
from diskbuf.bandits.policies.bernoulli_thompson_sampling_policy import BernoulliThompsonSamplingPolicy
from diskbuf.errors import SpecError
from diskbuf.trajectories import TimeStep


class BernoulliThompsonSamplingAgent(ArrayAgent):
    """Pulls an arm as often as it is the best by what its rewards leave open.

    What is known of an arm's probability to give 1 is a Beta distribution, uniform at first. Thompson, "On the
    Likelihood that One Unknown Probability Exceeds Another in View of the Evidence of Two Samples" (1933); Chapelle and
    Li, "An Empirical Evaluation of Thompson Sampling" (2011). A reward between 0 and 1 counts in part as a 1 and in
    part as a 0, as in TF-Agents; other than there, one outside is refused instead of clipped, and the counter counts
    calls of `train`.

        >>> from diskbuf.specs import ArraySpec, BoundedArraySpec
        >>> from diskbuf.trajectories import restart, time_step_spec
        >>> specs = time_step_spec(ArraySpec((), "float32")), BoundedArraySpec((), "int32", 0, 1)
        >>> agent = BernoulliThompsonSamplingAgent(*specs, seed=0)
        >>> agent.policy.probabilities(np.zeros(1, np.float32)).round(6).tolist()
        [[0.5, 0.5]]

    Args:
        time_step_spec: The environment's. Nothing is read of an observation but its mask.
        action_spec: A scalar BoundedArraySpec of integers.
        observation_and_action_constraint_splitter: Takes observations apart into contexts and a mask of the arms that
            may be chosen; None allows all.
        seed: Of the policy's draws; None takes entropy from the system.
        name: Of the module.

    Raises:
        SpecError: If the action_spec is something else.
        OptionError: If another argument is outside its rule.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        *,
        observation_and_action_constraint_splitter: ConstraintSplitter | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        self._begin_module(name)
        self._sampling = BernoulliThompsonSamplingPolicy(
            time_step_spec,
            action_spec,
            observation_and_action_constraint_splitter=observation_and_action_constraint_splitter,
            seed=seed,
        )
        arms = self._sampling.num_actions
        self._begin_arrays(self._sampling, {"alpha": np.ones(arms), "beta": np.ones(arms)})

    @property
    def alpha(self) -> npt.NDArray[np.float64]:
        """[K], 1 plus the sum of each arm's rewards."""
        alpha: npt.NDArray[np.float64] = self._learning.values["alpha"]
        return alpha.copy()

    @property
    def beta(self) -> npt.NDArray[np.float64]:
        """[K], 1 plus the sum of what each arm's rewards lacked to 1."""
        beta: npt.NDArray[np.float64] = self._learning.values["beta"]
        return beta.copy()

    def train(self, experience: Any, weights: Any = None) -> LossInfo:
        """Learns from a batch of rows, each of which is to be given once.

        Args:
            experience: A Trajectory with leaves [B, T, *shape], arrays or tensors. Its policy_info doesn't matter.
            weights: [B, T] or one for all, as many rows as a row counts for; None for 1.

        Returns:
            Minus the weighted sum of the rewards as loss, [] float32, as in TF-Agents.

        Raises:
            SpecError: If the experience or the weights don't fit, or a reward is outside [0, 1]; nothing was learnt.
        """
        return super().train(experience, weights)

    def _check(
        self,
        observation: Any,  # noqa: ARG002
        index: npt.NDArray[np.int64],  # noqa: ARG002
        reward: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,  # noqa: ARG002
        propensity: npt.NDArray[np.float32] | None,  # noqa: ARG002
    ) -> None:
        outside = (reward < 0) | (reward > 1)
        if outside.any():
            raise SpecError(
                f"leaf 'reward' must lie within [0, 1], got {reward[outside][0]}. Scale rewards.",
                path="reward",
            )

    def _train(
        self,
        observation: Any,  # noqa: ARG002  rewards don't depend on it
        index: npt.NDArray[np.int64],
        reward: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
        propensity: npt.NDArray[np.float32] | None,  # noqa: ARG002  the posterior doesn't need it
    ) -> LossInfo:
        counted = np.ones(len(reward)) if weights is None else weights.astype(np.float64)
        gained = counted * reward
        alpha = self.alpha + np.bincount(index, gained, self.num_actions)
        beta = self.beta + np.bincount(index, counted - gained, self.num_actions)
        self._learnt({"alpha": alpha, "beta": beta})
        self._sampling.set_distributions(alpha, beta)
        return LossInfo(np.float32(-gained.sum()), ())

    def _use(self, arrays: Arrays) -> None:
        self._sampling.set_distributions(arrays["alpha"], arrays["beta"])
