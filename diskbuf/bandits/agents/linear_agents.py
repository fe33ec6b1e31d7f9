"""Agents for rewards that are linear in the context, with weights of its own for each arm: LinUCB and LinTS."""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from diskbuf.agents.dqn_agent import LossInfo
from diskbuf.bandits.agents.array_agent import ArrayAgent
from diskbuf.bandits.agents.array_state import Arrays
from diskbuf.bandits.policies.bandit_policy import ConstraintSplitter
from diskbuf.bandits.policies.linear_policies import LinearPolicy, LinearThompsonSamplingPolicy, LinearUCBPolicy
from diskbuf.trajectories import TimeStep


class LinearAgent(ArrayAgent):
    """What LinearUCBAgent and LinearThompsonSamplingAgent have in common: how they learn.

    With each call of `train`, an arm's covariance becomes gamma times what it was plus the sum of x x^T over the arm's
    rows, and its data vector likewise with the sum of reward * x; the estimate is the data vector, divided by the
    covariance plus tikhonov_weight * I. As in TF-Agents, an arm forgets whether it has rows or not, and a context is
    all leaves of the observation side by side, cast to floating point. See LinearModel for how this is computed.

    Other than TF-Agents', it has no dtype: everything is float64. Its counter counts calls of `train`, not rows.

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        alpha: What widths are multiplied by, at least 0; 0 doesn't explore.
        gamma: Forgetting factor, from 0 to 1; 1 doesn't forget.
        tikhonov_weight: Above 0.
        add_bias: Whether to learn a constant for each arm too, by a last feature that is always 1.
        observation_and_action_constraint_splitter: Takes observations apart into contexts and a mask of the arms that
            may be chosen; None allows all.
        seed: Of the policy's draws; None takes entropy from the system.
        name: Of the module.

    Raises:
        SpecError: If the action_spec is something else, or a context can't be made numbers.
        OptionError: If another argument is outside its rule.
    """

    _policy_class: ClassVar[type[LinearPolicy]]

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        *,
        alpha: float = 1.0,
        gamma: float = 1.0,
        tikhonov_weight: float = 1.0,
        add_bias: bool = False,
        observation_and_action_constraint_splitter: ConstraintSplitter | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        self._begin_module(name)
        self._linear = self._policy_class(
            time_step_spec,
            action_spec,
            tikhonov_weight=tikhonov_weight,
            gamma=gamma,
            alpha=alpha,
            add_bias=add_bias,
            observation_and_action_constraint_splitter=observation_and_action_constraint_splitter,
            seed=seed,
        )
        model = self._linear.model
        self._begin_arrays(
            self._linear,
            {"information": model.information, "num_samples": np.zeros(self._linear.num_actions, np.int64)},
        )

    @property
    def alpha(self) -> float:
        """What was given."""
        return self._linear.alpha

    @property
    def theta(self) -> npt.NDArray[np.float64]:
        """[K, d], the estimated weights of the features of a context, the bias last."""
        return self._linear.model.theta

    @property
    def cov_matrix(self) -> npt.NDArray[np.float64]:
        """[K, d, d], the covariance of each arm's contexts, without the Tikhonov weight."""
        return self._linear.model.covariance

    @property
    def data_vector(self) -> npt.NDArray[np.float64]:
        """[K, d], the sum of reward times context of each arm."""
        return self._linear.model.data_vector

    @property
    def num_samples(self) -> npt.NDArray[np.int64]:
        """[K], how many rows each arm was trained on."""
        samples: npt.NDArray[np.int64] = self._learning.values["num_samples"]
        return samples.copy()

    def train(self, experience: Any, weights: Any = None) -> LossInfo:
        """Learns from a batch of rows, each of which is to be given once.

        Args:
            experience: A Trajectory with leaves [B, T, *shape], arrays or tensors. Its policy_info doesn't matter.
            weights: [B, T] or one for all, as many rows as a row counts for; None for 1.

        Returns:
            The loss before the step, [] float32: the mean over B * T of the weight times the squared difference of the
            reward and what was expected of the arm, as in TF-Agents.

        Raises:
            SpecError: If the experience or the weights don't fit, or a reward or a context isn't finite; nothing was
                learnt.
        """
        return super().train(experience, weights)

    def _check(
        self,
        observation: Any,
        index: npt.NDArray[np.int64],  # noqa: ARG002
        reward: npt.NDArray[np.float32],  # noqa: ARG002
        weights: npt.NDArray[np.float32] | None,  # noqa: ARG002
        propensity: npt.NDArray[np.float32] | None,  # noqa: ARG002
    ) -> None:
        self._linear.features(observation)

    def _train(
        self,
        observation: Any,
        index: npt.NDArray[np.int64],
        reward: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
        propensity: npt.NDArray[np.float32] | None,  # noqa: ARG002  the estimates don't need it
    ) -> LossInfo:
        features, model = self._linear.features(observation), self._linear.model
        error = reward - model.expected(features)[np.arange(len(index)), index]
        loss = np.square(error).mean() if weights is None else (weights * np.square(error)).mean()
        model.update(features, index, reward, weights)
        samples = self.num_samples + np.bincount(index, minlength=self.num_actions)
        self._learnt({"information": model.information, "num_samples": samples})
        return LossInfo(np.float32(loss), ())

    def _use(self, arrays: Arrays) -> None:
        self._linear.model.information = arrays["information"]


class LinearUCBAgent(LinearAgent):
    """LinUCB with disjoint arms: pulls the arm whose estimate plus alpha times its width is the highest.

    Li, Chu, Langford and Schapire, "A Contextual-Bandit Approach to Personalized News Article Recommendation" (2010).
    What it pulls is certain, so its propensities are 1; logs of it can't be replayed for other policies.

        >>> from diskbuf.specs import ArraySpec, BoundedArraySpec
        >>> from diskbuf.trajectories import time_step_spec
        >>> specs = time_step_spec(ArraySpec((2,), "float32")), BoundedArraySpec((), "int32", 0, 4)
        >>> agent = LinearUCBAgent(*specs, alpha=0.5, add_bias=True)
        >>> agent.theta.shape
        (5, 3)

    Arguments, and how it learns, are those of LinearAgent.
    """

    _policy_class = LinearUCBPolicy


class LinearThompsonSamplingAgent(LinearAgent):
    """Thompson sampling with disjoint linear arms: pulls an arm as often as it is the best of weights that are drawn.

    Agrawal and Goyal, "Thompson Sampling for Contextual Bandits with Linear Payoffs" (2013). Its propensities are
    those of its draws; see LinearThompsonSamplingPolicy.

    Arguments, and how it learns, are those of LinearAgent.
    """

    _policy_class = LinearThompsonSamplingPolicy
