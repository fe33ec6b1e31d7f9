"""Agents that let one of several agents act in each lane: in fixed shares, or in shares that follow their rewards."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from diskbuf.agents.dqn_agent import LossInfo
from diskbuf.agents.keras_training import finite_number
from diskbuf.bandits.agents.array_agent import ArrayAgent
from diskbuf.bandits.agents.array_state import Arrays
from diskbuf.bandits.agents.bandit_agent import BanditAgent
from diskbuf.bandits.agents.exp3_agent import check_propensity, missed_rewards
from diskbuf.bandits.policies.categorical_policy import softmax
from diskbuf.bandits.policies.mixture_policy import MixturePolicy
from diskbuf.errors import OptionError, SpecError
from diskbuf.trajectories import TimeStep
from diskbuf.tree import Structure


class MixtureChoices(NamedTuple):
    """What rows tell of the agents that acted.

    Attributes:
        choice: [N], the number of the agent.
        propensity: [N], how probable it was that this agent acted.
        of_arm: [N], how probable it was then that it pulled the arm.
    """

    choice: npt.NDArray[np.int64]
    propensity: npt.NDArray[np.float32]
    of_arm: npt.NDArray[np.float32]


class MixtureAgent(ArrayAgent):
    """What mixtures have in common: each row trains the agent that acted in it, as in TF-Agents.

    That agent gets the propensity that the arm had by its own policy. One that acted in none of the rows isn't trained.
    The mask of an observation is honoured by all of them: they have to be made with the same splitter, which is the
    mixture's as well. A subclass writes `_reweigh`.
    """

    def _begin_mixture(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        agents: Sequence[BanditAgent],
        *,
        arrays: Arrays,
        mixture_weights: npt.ArrayLike | None,
        seed: int | None,
    ) -> None:
        given = list(agents)
        if not given or not all(isinstance(agent, BanditAgent) for agent in given):
            raise OptionError(f"agents must be bandit agents, one at least, got {given!r}.")
        if len(set(map(id, given))) < len(given):
            raise OptionError("agents must be different objects, got one twice. Make another one of its kind.")
        self._agents = given
        self._mixture = MixturePolicy(
            time_step_spec,
            action_spec,
            policies=[agent.policy for agent in given],
            mixture_weights=mixture_weights,
            seed=seed,
        )
        self._begin_arrays(self._mixture, arrays)

    def retrace(self) -> None:
        """Has the agents forget their compiled steps."""
        for agent in self._agents:
            agent.retrace()

    @property
    def agents(self) -> tuple[BanditAgent, ...]:
        """The agents that are mixed."""
        return tuple(self._agents)

    @property
    def mixture_weights(self) -> npt.NDArray[np.float64]:
        """[M], how probable each agent is to act; they sum to 1."""
        return self._mixture.mixture_weights

    def train(self, experience: Any, weights: Any = None) -> LossInfo:
        """Learns from a batch of rows, each of which is to be given once.

        Args:
            experience: A Trajectory with leaves [B, T, *shape], arrays or tensors, whose policy_info tells which agent
                acted, as the policy's does.
            weights: [B, T] or one for all, what each row counts; None for 1.

        Returns:
            The sum of the agents' losses, [] float32, and a tuple of what each told besides, None of those that
            weren't trained.

        Raises:
            SpecError: If the experience or the weights don't fit the mixture or one of the agents; nothing was learnt.
        """
        rows = self._flat(experience, weights)
        choices = self._choices_of(experience)
        self._check(*rows, choices=choices)
        return self._train(*rows, choices=choices)

    def _check(
        self,
        observation: Any,
        index: npt.NDArray[np.int64],
        reward: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
        propensity: npt.NDArray[np.float32] | None,  # noqa: ARG002  the agents take their own
        *,
        choices: MixtureChoices | None = None,
    ) -> None:
        for agent, rows in zip(self._agents, self._parts(observation, index, reward, weights, choices), strict=True):
            if rows is not None:
                agent._check(*rows)

    def _train(
        self,
        observation: Any,
        index: npt.NDArray[np.int64],
        reward: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
        propensity: npt.NDArray[np.float32] | None,  # noqa: ARG002  the agents take their own
        *,
        choices: MixtureChoices | None = None,
    ) -> LossInfo:
        choices = _there(choices)
        parts = self._parts(observation, index, reward, weights, choices)
        infos = [None if rows is None else agent._train(*rows) for agent, rows in zip(self._agents, parts, strict=True)]
        loss = sum(float(info.loss) for info in infos if info is not None)
        self._learnt(self._reweigh(choices, reward, weights))
        return LossInfo(np.float32(loss), tuple(None if info is None else info.extra for info in infos))

    def _reweigh(
        self,
        choices: MixtureChoices,
        reward: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
    ) -> Arrays:
        """Gives the policy other shares, perhaps, and returns what is to be kept."""
        raise NotImplementedError

    def _parts(
        self,
        observation: Any,
        index: npt.NDArray[np.int64],
        reward: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
        choices: MixtureChoices | None,
    ) -> list[tuple[Any, ...] | None]:
        """Returns the rows that each agent is to learn from, as its `_train` takes them; None if there are none."""
        choices = _there(choices)
        structure = Structure(observation)
        leaves = structure.flatten(observation)
        parts: list[tuple[Any, ...] | None] = []
        for number in range(len(self._agents)):
            rows = np.flatnonzero(choices.choice == number)
            context = structure.unflatten([leaf[rows] for leaf in leaves])
            counted = None if weights is None else weights[rows]
            part = context, index[rows], reward[rows], counted, choices.of_arm[rows]
            parts.append(part if len(rows) else None)
        return parts

    def _choices_of(self, experience: Any) -> MixtureChoices:
        lead = np.asarray(experience.action).shape
        info = experience.policy_info if isinstance(experience.policy_info, Mapping) else {}
        spec = self.policy.info_spec
        leaves = {}
        for name in ("mixture_choice", "mixture_propensity", "subpolicy_propensity"):
            if name not in info:
                raise SpecError(
                    f"policy_info must hold {name!r}, got rows without. Train a mixture on rows that its policy "
                    "collected.",
                    path=f"policy_info/{name}",
                )
            leaf = np.asarray(info[name])
            if leaf.shape != lead or leaf.dtype != spec[name].dtype:
                raise SpecError(
                    f"leaf 'policy_info/{name}' must be {spec[name].dtype} {list(lead)}, got {leaf.dtype} "
                    f"{list(leaf.shape)}. Train on rows of the agent's training_data_spec.",
                    path=f"policy_info/{name}",
                )
            leaves[name] = leaf.reshape(-1)
        choice = leaves["mixture_choice"].astype(np.int64)
        wrong = (choice < 0) | (choice >= len(self._agents))
        if wrong.any():
            raise SpecError(
                f"leaf 'policy_info/mixture_choice' must lie within [0, {len(self._agents) - 1}], got "
                f"{choice[wrong][0]}. Train on rows of a mixture of the same agents.",
                path="policy_info/mixture_choice",
            )
        return MixtureChoices(
            choice,
            check_propensity("mixture_propensity", leaves["mixture_propensity"]),
            check_propensity("subpolicy_propensity", leaves["subpolicy_propensity"]),
        )


class StaticMixtureAgent(MixtureAgent):
    """Lets one of M agents act in each lane, drawn in fixed shares.

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        agents: M different ones, made for the same specs and with the same splitter, no mixtures among them.
        mixture_weights: [M], how often each acts, in proportion; at least 0, one of them above.
        seed: Of the policy's draws; None takes entropy from the system.
        name: Of the module.

    Raises:
        SpecError: If an agent is made for other specs, or the action_spec is something else.
        OptionError: If another argument is outside its rule.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        agents: Sequence[BanditAgent],
        *,
        mixture_weights: npt.ArrayLike,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        self._begin_module(name)
        self._begin_mixture(time_step_spec, action_spec, agents, arrays={}, mixture_weights=mixture_weights, seed=seed)

    def _reweigh(
        self,
        choices: MixtureChoices,  # noqa: ARG002  the shares are fixed
        reward: npt.NDArray[np.float32],  # noqa: ARG002
        weights: npt.NDArray[np.float32] | None,  # noqa: ARG002
    ) -> Arrays:
        return {}

    def _use(self, arrays: Arrays) -> None:
        """Does nothing; the shares are fixed."""


class Exp3MixtureAgent(MixtureAgent):
    """Lets one of M agents act in each lane, the more often the more reward it brought.

    The shares are those of Exp3 over the agents; Auer, Cesa-Bianchi, Freund and Schapire, "The Nonstochastic Multiarmed
    Bandit Problem" (2002), and Lattimore and Szepesvári, "Bandit Algorithms" (2020), chapter 11. Agent m acts with a
    share of exp(aggregates[m] / temperature), where a row subtracts (1 - reward) / propensity from the aggregate of the
    agent that acted in it, the propensity being how probable it was to act. Rewards are meant to lie within [0, 1].

    Two things smooth this, as in TF-Agents: after each call of `train` the aggregates are multiplied by `forgetting`,
    and the temperature, the root of the number of rows, stays at `max_inverse_temperature` once it is there. (That
    name is TF-Agents'. Its own agent, in version 0.19, takes the larger of the two, and the propensity that the
    weights give when it is trained instead of when the row was made.) 1 - 1 / max_inverse_temperature is a good
    `forgetting`.

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        agents: M different ones, made for the same specs and with the same splitter, no mixtures among them.
        forgetting: Above 0 and up to 1, which doesn't forget.
        max_inverse_temperature: Above 0.
        seed: Of the policy's draws; None takes entropy from the system.
        name: Of the module.

    Raises:
        SpecError: If an agent is made for other specs, or the action_spec is something else.
        OptionError: If another argument is outside its rule.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        agents: Sequence[BanditAgent],
        *,
        forgetting: float = 0.999,
        max_inverse_temperature: float = 1000.0,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        self._begin_module(name)
        self._forgetting = finite_number("forgetting", forgetting, above=0, at_most=1)
        self._max_inverse_temperature = finite_number("max_inverse_temperature", max_inverse_temperature, above=0)
        agents = list(agents)
        arrays: Arrays = {"reward_aggregates": np.zeros(len(agents)), "inverse_temperature": np.array(0.0)}
        self._begin_mixture(time_step_spec, action_spec, agents, arrays=arrays, mixture_weights=None, seed=seed)

    @property
    def reward_aggregates(self) -> npt.NDArray[np.float64]:
        """[M], minus the estimated sum of what each agent's rewards lacked to 1, as far as it isn't forgotten."""
        aggregates: npt.NDArray[np.float64] = self._learning.values["reward_aggregates"]
        return aggregates.copy()

    def _reweigh(
        self,
        choices: MixtureChoices,
        reward: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
    ) -> Arrays:
        missed = missed_rewards(reward, weights, choices.propensity)
        aggregates = self.reward_aggregates - np.bincount(choices.choice, missed, len(self._agents))
        before = float(self._learning.values["inverse_temperature"])
        temperature = min(self._max_inverse_temperature, math.hypot(before, math.sqrt(len(reward))))
        arrays: Arrays = {
            "reward_aggregates": self._forgetting * aggregates,
            "inverse_temperature": np.array(temperature),
        }
        self._use(arrays)
        return arrays

    def _use(self, arrays: Arrays) -> None:
        temperature = float(arrays["inverse_temperature"]) or 1.0
        self._mixture.set_mixture_weights(softmax(arrays["reward_aggregates"] / temperature))


def _there(choices: MixtureChoices | None) -> MixtureChoices:
    if choices is None:
        raise SpecError("rows of a mixture must tell which agent acted, got rows without.", path="policy_info")
    return choices
