"""A table of features and labels as a bandit: the context is a row's features, and arms pay by its label."""

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from diskbuf.bandits.environments._draws import as_numbers, as_spreads
from diskbuf.bandits.environments.bandit_environment import BanditEnvironment
from diskbuf.errors import OptionError, SpecError
from diskbuf.specs import ArraySpec
from diskbuf.tree import describe


class ClassificationEnvironment(BanditEnvironment):
    """Shows rows of a table, and pays 1 for the arm that is the row's label, else 0; or what a table of means says.

    Rows come in random order, each once before any comes again, then in a new order. A batch may hold the last rows of
    one order and the first of the next. Beygelzimer and Langford, "The Offset Tree for Learning with Partial Labels",
    KDD 2009, turn classification into bandits in this way.

    The best arm is the best for a context, not for a label: where rows of equal features have different labels, it is
    the one with the highest mean over those rows. TF-Agents' environment takes a tf.data.Dataset, and its best arm
    that of the label.

        >>> env = ClassificationEnvironment(np.array([[0.0], [1.0], [2.0]]), [0, 1, 0], batch_size=2, seed=0)
        >>> env.optimal_action(np.array([[1.0], [2.0]]))
        array([1, 0], dtype=int32)

    Args:
        features: [N, *shape] numbers; copied.
        labels: [N] integers, of classes from 0 on.
        batch_size: B.
        reward_means: [C, K] the mean reward of each arm for each class; None is the identity, so K = C, the highest
            label plus 1.
        reward_std: Standard deviation of normal noise, one or [C, K].
        seed: Of the order and of noise; None takes entropy from the system.

    Raises:
        OptionError: If an argument is outside its rule.
        SpecError: If the features are of a dtype that no spec has.
    """

    _changing = ("_order", "_place", "_rows")

    def __init__(
        self,
        features: Any,
        labels: Any,
        *,
        batch_size: int = 1,
        reward_means: Any = None,
        reward_std: Any = 0.0,
        seed: int | None = None,
    ) -> None:
        try:
            self._features, self._labels = np.array(features, order="C"), np.array(labels)
        except ValueError as error:
            raise OptionError(f"features and labels must be arrays, got an uneven list: {error}.") from error
        rows = self._features.shape[:1]
        if self._features.ndim == 0 or self._features.size == 0 or self._features.dtype.kind not in "biuf":
            raise OptionError(f"features must be numbers [N, ...] of at least one row, got {describe(features)}.")
        if self._features.dtype.kind == "f" and not np.isfinite(self._features).all():
            raise OptionError("features must be finite, got NaN or infinity. Fill or drop such rows.")
        if self._labels.shape != rows or self._labels.dtype.kind not in "iu" or self._labels.min() < 0:
            raise OptionError(
                f"labels must be integers of at least 0 [{rows[0]}], one for each row of features, got "
                f"{describe(self._labels)}. Use what np.unique(labels, return_inverse=True) gives second."
            )
        classes = int(self._labels.max()) + 1
        means = np.eye(classes) if reward_means is None else reward_means
        if np.ndim(means) != 2:
            raise OptionError(f"reward_means must be numbers [classes, actions], got {describe(means)}.")
        self._means = as_numbers("reward_means", means, np.shape(means))
        if len(self._means) < classes:
            raise OptionError(
                f"reward_means must have a row for each of the {classes} classes, got {len(self._means)}."
            )
        self._spreads = np.broadcast_to(as_spreads("reward_std", reward_std, self._means.shape), self._means.shape)
        self._has_noise = bool(self._spreads.any())
        spec = ArraySpec(self._features.shape[1:], self._features.dtype, "observation")
        super().__init__(spec, self._means.shape[1], batch_size=batch_size, seed=seed)
        self._order = self._rng.permutation(len(self._features))
        self._place = 0
        self._rows = self._order[:0]  # of the current contexts

    def _observe(self) -> npt.NDArray[Any]:
        parts, missing = [], self._batch_size
        while missing:
            if self._place == len(self._order):
                self._order, self._place = self._rng.permutation(len(self._order)), 0
            part = self._order[self._place : self._place + missing]
            self._place += len(part)
            missing -= len(part)
            parts.append(part)
        self._rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return np.asarray(self._features.take(self._rows, axis=0))

    def _apply_action(self, action: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        cell = self._labels[self._rows], action
        reward: npt.NDArray[np.float64] = self._means[cell]
        if self._has_noise:
            reward += self._spreads[cell] * self._rng.standard_normal(self._batch_size)
        return reward.astype(np.float32)

    def optimal_reward(self, observation: Any) -> npt.NDArray[np.float32]:
        """Returns [B] float32 the expected reward of the best arm in each context.

        The first call makes an index of the table.

        Args:
            observation: [B, *shape], rows of the features.

        Raises:
            SpecError: If a context is no row of the features.
        """
        return self._index.rewards.take(self._contexts_of(observation))

    def optimal_action(self, observation: Any) -> npt.NDArray[np.int32]:
        """Returns [B] int32 the arm of the highest expected reward in each context, of equal ones the first.

        The first call makes an index of the table.

        Args:
            observation: [B, *shape], rows of the features.

        Raises:
            SpecError: If a context is no row of the features.
        """
        return self._index.actions.take(self._contexts_of(observation))

    @functools.cached_property
    def _index(self) -> "_Index":
        keys = _as_keys(self._features)
        _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        total = np.zeros((len(first), self._num_actions))
        np.add.at(total, inverse, self._means[self._labels])
        means = total / np.bincount(inverse)[:, None]
        actions = means.argmax(axis=1).astype(np.int32)
        return _Index(keys[first], actions, means.max(axis=1).astype(np.float32))

    def _contexts_of(self, observation: Any) -> npt.NDArray[np.intp]:
        observation = np.asarray(observation)
        if observation.shape[1:] != self._features.shape[1:] or observation.dtype != self._features.dtype:
            raise SpecError(
                f"observation must be {self._features.dtype} {['B', *self._features.shape[1:]]}, as the features are, "
                f"got {describe(observation)}.",
                path="observation",
            )
        wanted = _as_keys(observation)
        keys = self._index.keys
        found = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
        unknown = keys.take(found) != wanted
        if unknown.any():
            raise SpecError(
                f"observation must be rows of the features, got another one in lane {int(unknown.argmax())}. "
                "Give the contexts of this environment's own time steps.",
                path="observation",
            )
        return np.asarray(found)


class _Index(NamedTuple):
    """Of each different context: its key, sorted, its best arm and what that is expected to pay."""

    keys: npt.NDArray[Any]
    actions: npt.NDArray[np.int32]
    rewards: npt.NDArray[np.float32]


def _as_keys(rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns [N] the bytes of each row as one value that can be sorted; -0.0 is 0.0."""
    flat = np.ascontiguousarray(rows.reshape(len(rows), -1) + rows.dtype.type(0) if rows.dtype.kind == "f" else rows)
    flat = flat.reshape(len(rows), -1)
    return flat.view(np.dtype((np.void, flat.shape[1] * flat.itemsize)))[:, 0]
