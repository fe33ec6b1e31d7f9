"""Exponential weights for rewards that someone else may choose."""

from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.agents.dqn_agent import LossInfo
from diskbuf.agents.keras_training import finite_number
from diskbuf.bandits.agents.array_agent import ArrayAgent
from diskbuf.bandits.agents.array_state import Arrays
from diskbuf.bandits.policies.bandit_policy import ConstraintSplitter
from diskbuf.bandits.policies.categorical_policy import CategoricalPolicy
from diskbuf.errors import SpecError
from diskbuf.trajectories import TimeStep


class Exp3Agent(ArrayAgent):
    """Pulls arm a as often as exp(learning_rate * weights[a]) says; weights are estimates of the rewards missed so far.

    Auer, Cesa-Bianchi, Freund and Schapire, "The Nonstochastic Multiarmed Bandit Problem" (2002), in the form of
    Lattimore and Szepesvári, "Bandit Algorithms" (2020), algorithm 9: a row subtracts (1 - reward) / propensity from
    the weight of its arm, where the propensity is that of the row, so that rows of older weights count right. Rewards
    are meant to lie within [0, 1].

    TF-Agents' Exp3Agent adds 1 besides to the weight of the pulled arm, and of no other; that favours the arms that it
    pulls most, whatever they give, and is left out here. Its counter counts rows, this one calls of `train`.

    Args:
        time_step_spec: The environment's. Nothing is read of an observation but its mask.
        action_spec: A scalar BoundedArraySpec of integers.
        learning_rate: Above 0. A higher one settles on an arm sooner, a lower one explores more.
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
        learning_rate: float,
        observation_and_action_constraint_splitter: ConstraintSplitter | None = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        self._begin_module(name)
        self._learning_rate = finite_number("learning_rate", learning_rate, above=0)
        self._categorical = CategoricalPolicy(
            time_step_spec,
            action_spec,
            observation_and_action_constraint_splitter=observation_and_action_constraint_splitter,
            seed=seed,
        )
        self._begin_arrays(self._categorical, {"weights": np.zeros(self._categorical.num_actions)})

    @property
    def learning_rate(self) -> float:
        """What was given."""
        return self._learning_rate

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """[K], minus the estimated sum of what each arm's rewards lacked to 1."""
        weights: npt.NDArray[np.float64] = self._learning.values["weights"]
        return weights.copy()

    def train(self, experience: Any, weights: Any = None) -> LossInfo:
        """Learns from a batch of rows, each of which is to be given once.

        Args:
            experience: A Trajectory with leaves [B, T, *shape], arrays or tensors; its policy_info holds `propensity`.
            weights: [B, T] or one for all, as many rows as a row counts for; None for 1.

        Returns:
            Minus the weighted sum of the rewards as loss, [] float32, as in TF-Agents.

        Raises:
            SpecError: If the experience or the weights don't fit, a reward isn't finite, or a propensity is missing or
                outside (0, 1]; nothing was learnt.
        """
        return super().train(experience, weights)

    def _check(
        self,
        observation: Any,  # noqa: ARG002
        index: npt.NDArray[np.int64],  # noqa: ARG002
        reward: npt.NDArray[np.float32],  # noqa: ARG002
        weights: npt.NDArray[np.float32] | None,  # noqa: ARG002
        propensity: npt.NDArray[np.float32] | None,
    ) -> None:
        check_propensity("propensity", propensity)

    def _train(
        self,
        observation: Any,  # noqa: ARG002  rewards don't depend on it
        index: npt.NDArray[np.int64],
        reward: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
        propensity: npt.NDArray[np.float32] | None,
    ) -> LossInfo:
        missed = missed_rewards(reward, weights, check_propensity("propensity", propensity))
        learnt = self.weights - np.bincount(index, missed, self.num_actions)
        self._learnt({"weights": learnt})
        self._use({"weights": learnt})
        return LossInfo(np.float32(-(reward if weights is None else weights * reward).sum(dtype=np.float64)), ())

    def _use(self, arrays: Arrays) -> None:
        self._categorical.set_weights(self._learning_rate * arrays["weights"])


def missed_rewards(
    reward: npt.NDArray[np.float32], weights: npt.NDArray[np.float32] | None, propensity: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """Returns [N] float64, what each reward lacks to 1, so weighted that sums over chosen rows are right on average.

    Args:
        reward: [N].
        weights: [N], or None for 1.
        propensity: [N] above 0, how probable it was that a row is there.
    """
    missed = (1 - reward.astype(np.float64)) / propensity
    return missed if weights is None else missed * weights


def check_propensity(name: str, propensity: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32]:
    """Returns propensities [N] of rows that are there.

    Args:
        name: Of the leaf of policy_info.
        propensity: What the rows hold, or None.

    Raises:
        SpecError: If there are none, or one is outside (0, 1].
    """
    if propensity is None:
        raise SpecError(
            f"policy_info must hold {name!r}, got rows without. Train on rows that the agent's policy collected.",
            path=f"policy_info/{name}",
        )
    wrong = ~((propensity > 0) & (propensity <= 1))
    if wrong.any():
        raise SpecError(
            f"leaf 'policy_info/{name}' must lie within (0, 1], got {propensity[wrong][0]}. Leave such rows out.",
            path=f"policy_info/{name}",
        )
    return propensity
