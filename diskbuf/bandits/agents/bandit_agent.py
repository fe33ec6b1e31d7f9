"""What every bandit agent is: a policy, and a way to learn from the rows it collected."""

import abc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.agents.dqn_agent import LossInfo
from diskbuf.agents.late_module import LateModule
from diskbuf.bandits.agents.array_state import saved_generator
from diskbuf.bandits.policies.bandit_policy import BanditPolicy
from diskbuf.errors import SpecError
from diskbuf.networks.action_values import DiscreteActions
from diskbuf.trajectories import TimeStep, Trajectory
from diskbuf.tree import Structure, describe


class BanditAgent(LateModule, abc.ABC):
    """Learns from rows [B, T], whose order says nothing; a `tf.Module`, so `tf.train.Checkpoint(agent=agent)` holds it.

    A subclass makes its policy, calls `_begin`, and writes `_train`. A bandit has to explore as long as it learns, so
    `policy` and `collect_policy` are the same one, as in TF-Agents. A checkpoint holds the generator that it draws with
    too, so that an agent that was restored goes on as the saved one would have.

    Attributes:
        train_step_counter: How often it was trained, an int or a tf.Variable.
    """

    train_step_counter: Any

    def _begin(self, policy: BanditPolicy) -> None:
        """Takes the policy; called by a subclass when it is made, after `_begin_module`."""
        rows = policy.trajectory_spec
        reward = rows.reward
        if getattr(reward, "shape", None) != () or reward.dtype != np.float32:
            raise SpecError(
                f"leaf 'reward' of the time_step_spec must be one float32, got {describe(reward)}. Bandit agents learn "
                "from one number.",
                path="reward",
            )
        # A tf.Module would wrap the nests of its attributes in classes of its own.
        self._policy_fn: Callable[[], BanditPolicy] = lambda: policy
        self._rows_fn: Callable[[], Trajectory] = lambda: rows
        self._actions = DiscreteActions.of(policy.action_spec)
        self._drawing = saved_generator(policy.rng)

    @property
    def time_step_spec(self) -> TimeStep:
        """The specs of the time steps its policy takes."""
        return self._policy_fn().time_step_spec

    @property
    def action_spec(self) -> Any:
        """The spec of its arms."""
        return self._policy_fn().action_spec

    @property
    def policy(self) -> BanditPolicy:
        """The policy, by what it has learnt so far."""
        return self._policy_fn()

    @property
    def collect_policy(self) -> BanditPolicy:
        """The same policy."""
        return self._policy_fn()

    @property
    def collect_data_spec(self) -> Trajectory:
        """The spec of the rows that its policy collects: the `data_spec` of a buffer for them."""
        return self._rows_fn()

    @property
    def training_data_spec(self) -> Trajectory:
        """The spec of the rows that `train` takes, the same."""
        return self._rows_fn()

    @property
    def num_actions(self) -> int:
        """K, the number of arms."""
        return self._actions.num_actions

    def retrace(self) -> None:
        """Forgets compiled steps, which write summaries to the writer that was the default when they were compiled."""

    def train(self, experience: Any, weights: Any = None) -> LossInfo:
        """Learns from a batch of rows.

        Args:
            experience: A Trajectory with leaves [B, T, *shape], arrays or tensors. Only observation, action and reward
                are read, and of `policy_info` the propensity by agents that say so.
            weights: [B, T] or one for all, what each row counts; None for 1.

        Returns:
            The loss, [] float32, before the step.

        Raises:
            SpecError: If the experience or the weights don't fit, or a reward isn't finite; nothing was learnt.
        """
        rows = self._flat(experience, weights)
        self._check(*rows)
        return self._train(*rows)

    def _check(
        self,
        observation: Any,
        index: npt.NDArray[np.int64],
        reward: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
        propensity: npt.NDArray[np.float32] | None,
    ) -> None:
        """Raises a SpecError for rows of its spec that it still can't learn from; they come as to `_train`."""

    @abc.abstractmethod
    def _train(
        self,
        observation: Any,
        index: npt.NDArray[np.int64],
        reward: npt.NDArray[np.float32],
        weights: npt.NDArray[np.float32] | None,
        propensity: npt.NDArray[np.float32] | None,
    ) -> LossInfo:
        """Learns from N = B * T rows.

        Args:
            observation: Nest of [N, *shape] arrays, masks and all.
            index: [N], arms from 0 on.
            reward: [N], finite.
            weights: [N], or None for 1.
            propensity: [N], or None if the rows don't tell.
        """

    def _flat(self, experience: Any, weights: Any) -> tuple[Any, ...]:
        spec = self._rows_fn()
        structure = Structure(spec.observation)
        try:
            leaves = [np.asarray(leaf) for leaf in structure.flatten(experience.observation)]
            action, reward = np.asarray(experience.action), np.asarray(experience.reward)
        except (AttributeError, SpecError) as error:
            raise SpecError(
                f"experience must be a Trajectory like the agent's training_data_spec, got {describe(experience)}: "
                f"{error}. Give train() the first of what as_dataset() gives."
            ) from error
        lead = action.shape
        if len(lead) != 2 or 0 in lead:
            raise SpecError(
                f"leaf 'action' must be [B, T], got {list(lead)}. Read with sample_batch_size and num_steps.",
                path="action",
            )
        if action.dtype.kind not in "iu":
            raise SpecError(f"leaf 'action' must be integers, got {action.dtype}.", path="action")
        for path, leaf, leaf_spec in zip(structure.paths, leaves, structure.flatten(spec.observation), strict=True):
            name = f"observation/{path}" if path else "observation"
            _check_leaf(name, leaf, (*lead, *leaf_spec.shape), leaf_spec.dtype)
            _check_finite(name, leaf)
        _check_leaf("reward", reward, lead, np.dtype(np.float32))
        index = action.reshape(-1).astype(np.int64) - self._actions.minimum
        if index.min() < 0 or index.max() >= self.num_actions:
            low, high = self._actions.minimum, self._actions.minimum + self.num_actions - 1
            wrong = index[(index < 0) | (index >= self.num_actions)][0] + low
            raise SpecError(f"leaf 'action' must lie within [{low}, {high}], got {wrong}.", path="action")
        _check_finite("reward", reward)
        flat = structure.unflatten([leaf.reshape(-1, *leaf.shape[2:]) for leaf in leaves])
        return flat, index, reward.reshape(-1), _flat_weights(weights, lead), _propensity_of(experience, lead)


def _check_leaf(name: str, leaf: npt.NDArray[Any], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if leaf.shape != shape or leaf.dtype != dtype:
        raise SpecError(
            f"leaf {name!r} must be {dtype} {list(shape)}, got {leaf.dtype} {list(leaf.shape)}. "
            "Train on rows of the agent's training_data_spec.",
            path=name,
        )


def _check_finite(name: str, leaf: npt.NDArray[Any]) -> None:
    if leaf.dtype.kind == "f" and not np.isfinite(leaf).all():
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(leaf))[0])
        raise SpecError(
            f"leaf {name!r} must be finite, got {leaf[where]} at {list(where)}. Leave such rows out.", path=name
        )


def _flat_weights(weights: Any, lead: tuple[int, ...]) -> npt.NDArray[np.float32] | None:
    if weights is None:
        return None
    array = np.asarray(weights)
    if array.dtype.kind not in "biuf" or array.shape not in ((), lead):
        raise SpecError(
            f"weights must be numbers {list(lead)} or one for all, got {array.dtype} {list(array.shape)}.",
            path="weights",
        )
    if not (np.isfinite(array) & (array >= 0)).all():
        raise SpecError("weights must be finite and at least 0, got others.", path="weights")
    return np.broadcast_to(array.astype(np.float32), lead).reshape(-1)


def _propensity_of(experience: Any, lead: tuple[int, ...]) -> npt.NDArray[np.float32] | None:
    info = getattr(experience, "policy_info", ())
    if not isinstance(info, Mapping) or "propensity" not in info:
        return None
    propensity = np.asarray(info["propensity"])
    _check_leaf("policy_info/propensity", propensity, lead, np.dtype(np.float32))
    return propensity.reshape(-1)
