"""Models of the reward that each arm would give, and cross-fitting: no row is predicted by a model that has seen it.

Cross-fitting is that of Chernozhukov et al., "Double/Debiased Machine Learning for Treatment and Structural Parameters"
(2018): rows are dealt to folds, and those of a fold are predicted by a model fitted on the other folds.
"""

import abc
import copy
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from diskbuf.bandits.policies.linear_model import LinearModel
from diskbuf.errors import MissingExtraError, OptionError, SpecError
from diskbuf.readers.requests import count

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@runtime_checkable
class RewardModel(Protocol):
    """What a model of rewards must have. It is copied with `copy.deepcopy` for each fold, before it is fitted."""

    def fit(self, context: Floats, index: Ints, reward: Floats, weights: Floats | None) -> Any:
        """Learns from rows; what is returned is ignored.

        Args:
            context: [N, d], the leaves of the observation flattened, side by side.
            index: [N], arms from 0 on.
            reward: [N].
            weights: [N] at least 0, what each row counts; None for 1.
        """

    def predict(self, context: Floats) -> npt.ArrayLike:
        """Returns [N, K], the expected reward of each arm."""


RewardModelLike = RewardModel | Callable[[Floats], npt.ArrayLike]
"""A model that is fitted, or a function from contexts [N, d] to rewards [N, K] that is asked as it is."""


class RidgeRewardModel:
    """A ridge regression for each arm, with an intercept, which `evaluate` fits block by block.

    Its memory doesn't grow with the log: for each fold and arm it keeps a triangular factor, d + 1 by d + 2, see
    `LinearModel`. What it expects of an arm without rows is 0.

    Args:
        tikhonov_weight: Above 0, what is added to the diagonal; the intercept is shrunk too.

    Raises:
        OptionError: If tikhonov_weight isn't above 0.
    """

    def __init__(self, *, tikhonov_weight: float = 1.0) -> None:
        if not tikhonov_weight > 0 or not np.isfinite(tikhonov_weight):
            raise OptionError(f"tikhonov_weight must be a finite number above 0, got {tikhonov_weight!r}.")
        self.tikhonov_weight = tikhonov_weight
        self._model: LinearModel | None = None

    def fit(self, context: Floats, index: Ints, reward: Floats, weights: Floats | None) -> None:
        """Learns from rows anew; arms after the last one seen aren't predicted."""
        arms = int(index.max()) + 1 if len(index) else 1
        self._model = LinearModel(arms, context.shape[1] + 1, tikhonov_weight=self.tikhonov_weight)
        self._model.update(_with_bias(context), index, reward, weights)  # type: ignore[arg-type]  # float64 is as good

    def predict(self, context: Floats) -> Floats:
        """Returns [N, K], see `RewardModel`.

        Raises:
            OptionError: If it wasn't fitted.
        """
        if self._model is None:
            raise OptionError("fit must be called before predict.")
        return self._model.expected(_with_bias(context))


class SklearnRewardModel:
    """A scikit-learn regressor or classifier for each arm, cloned from one.

    A classifier's reward is the sum of its classes, which are rewards, times their probabilities. An arm whose rewards
    in a fit are all the same is predicted to give that one, an arm without rows the mean reward of all rows.

    All rows of a fit are in memory at once: d + 3 numbers each.

    Args:
        estimator: What is cloned and fitted for each arm; isn't changed.
        num_actions: K.

    Raises:
        MissingExtraError: When scikit-learn isn't installed.
        OptionError: If the estimator has no fit, or num_actions is no count.
    """

    def __init__(self, estimator: Any, num_actions: int) -> None:
        try:
            from sklearn.base import clone, is_classifier
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "sklearn":
                raise
            raise MissingExtraError(
                "SklearnRewardModel needs scikit-learn, which isn't installed. Install it with: "
                "pip install 'diskbuf[bandits]'."
            ) from error
        if not callable(getattr(estimator, "fit", None)):
            raise OptionError(f"estimator must be a scikit-learn regressor or classifier, got {estimator!r}.")
        self._num_actions = count("num_actions", num_actions)
        self._clone = clone
        self._is_classifier = bool(is_classifier(estimator))
        self._estimator = estimator
        self._arms: list[Any] | None = None

    def fit(self, context: Floats, index: Ints, reward: Floats, weights: Floats | None) -> None:
        """Learns from rows anew, see `RewardModel`."""
        arms: list[Any] = []
        for arm in range(self._num_actions):
            own = index == arm
            rewards = reward[own]
            if not len(rewards):
                arms.append(float(np.average(reward, weights=weights)))
            elif (rewards == rewards[0]).all():
                arms.append(float(rewards[0]))
            else:
                more = {} if weights is None else {"sample_weight": weights[own]}
                arms.append(self._clone(self._estimator).fit(context[own], rewards, **more))
        self._arms = arms

    def predict(self, context: Floats) -> Floats:
        """Returns [N, K], see `RewardModel`.

        Raises:
            OptionError: If it wasn't fitted.
        """
        if self._arms is None:
            raise OptionError("fit must be called before predict.")
        found = np.empty((len(context), self._num_actions))
        for arm, model in enumerate(self._arms):
            if isinstance(model, float):
                found[:, arm] = model
            elif self._is_classifier:
                found[:, arm] = model.predict_proba(context) @ model.classes_
            else:
                found[:, arm] = model.predict(context)
        return found


class Expectations(abc.ABC):
    """Expected rewards of every arm for rows of folds, after one pass over the rows if `needs_pass`."""

    needs_pass = True

    @abc.abstractmethod
    def take(self, context: Floats, index: Ints, reward: Floats, fold: Ints) -> None:
        """Takes the next rows [N] to fit on."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Fits, when all rows have been taken."""

    @abc.abstractmethod
    def predict(self, context: Floats, fold: Ints) -> Floats:
        """Returns [N, K]."""


def expectations(model: RewardModelLike, *, num_actions: int, num_features: int, num_folds: int) -> Expectations:
    """Returns the cross-fitted expectations of a model, still to be fitted.

    Args:
        model: What is fitted for each fold, or a function.
        num_actions: K.
        num_features: d.
        num_folds: Over how many folds rows are dealt; with 1, rows are predicted by a model that has seen them.

    Raises:
        OptionError: If the model is neither.
    """
    if isinstance(model, RidgeRewardModel):
        return _Streamed(model.tikhonov_weight, num_actions, num_features, num_folds)
    if isinstance(model, RewardModel):
        return _Collected(model, num_actions, num_folds)
    if callable(model):
        return _Given(model, num_actions)
    raise OptionError(
        "reward_model must have fit(context, index, reward, weights) and predict(context), or be a function from "
        f"contexts [N, d] to rewards [N, {num_actions}], got {model!r}."
    )


class _Given(Expectations):
    """What a function says."""

    needs_pass = False

    def __init__(self, function: Callable[[Floats], npt.ArrayLike], num_actions: int) -> None:
        self._function = function
        self._num_actions = num_actions

    def take(self, context: Floats, index: Ints, reward: Floats, fold: Ints) -> None:
        """Learns nothing."""

    def finish(self) -> None:
        """Fits nothing."""

    def predict(self, context: Floats, fold: Ints) -> Floats:
        return _checked(self._function(context), len(fold), self._num_actions)


class _Streamed(Expectations):
    """Ridge regressions: those of a fold are made of what the other folds have kept."""

    def __init__(self, tikhonov_weight: float, num_actions: int, num_features: int, num_folds: int) -> None:
        self._num_actions, self._num_folds, self._size = num_actions, num_folds, num_features + 1
        # A fold's model is made of so many others that their weights add up to the one that was asked for.
        own_weight = tikhonov_weight / max(1, num_folds - 1)
        self._kept = LinearModel(num_folds * num_actions, self._size, tikhonov_weight=own_weight)
        self._theta = np.zeros((num_folds, num_actions, self._size))

    def take(self, context: Floats, index: Ints, reward: Floats, fold: Ints) -> None:
        rows = _with_bias(context)
        self._kept.update(rows, fold * self._num_actions + index, reward, None)  # type: ignore[arg-type]  # as above

    def finish(self) -> None:
        kept = self._kept.information.reshape(self._num_folds, self._num_actions, self._size, self._size + 1)
        for fold in range(self._num_folds):
            others = kept if self._num_folds == 1 else np.delete(kept, fold, axis=0)
            stacked = others.swapaxes(0, 1).reshape(self._num_actions, -1, self._size + 1)
            factor = np.asarray(np.linalg.qr(stacked, mode="r"))[:, : self._size]
            self._theta[fold] = np.linalg.solve(factor[:, :, :-1], factor[:, :, -1:])[:, :, 0]

    def predict(self, context: Floats, fold: Ints) -> Floats:
        rows = _with_bias(context)
        found = np.empty((len(rows), self._num_actions))
        for number, theta in enumerate(self._theta):
            own = fold == number
            found[own] = rows[own] @ theta.T
        return found


class _Collected(Expectations):
    """Models that want all their rows at once."""

    def __init__(self, model: RewardModel, num_actions: int, num_folds: int) -> None:
        self._num_actions = num_actions
        self._models = [copy.deepcopy(model) for _ in range(num_folds)]
        self._taken: list[tuple[Floats, Ints, Floats, Ints]] = []

    def take(self, context: Floats, index: Ints, reward: Floats, fold: Ints) -> None:
        self._taken.append((context, index, reward, fold))

    def finish(self) -> None:
        if not self._taken:
            return
        context, index, reward, fold = (np.concatenate(parts) for parts in zip(*self._taken, strict=True))
        self._taken.clear()
        for number, model in enumerate(self._models):
            others = np.ones(len(fold), np.bool_) if len(self._models) == 1 else fold != number
            if not others.any():
                raise OptionError(
                    f"num_folds must leave rows to fit on, got {len(self._models)} for {len(fold)} rows. Use fewer."
                )
            model.fit(context[others], index[others], reward[others], None)

    def predict(self, context: Floats, fold: Ints) -> Floats:
        found = np.empty((len(fold), self._num_actions))
        for number, model in enumerate(self._models):
            own = fold == number
            if own.any():
                found[own] = _checked(model.predict(context[own]), int(own.sum()), self._num_actions)
        return found


def _with_bias(context: Floats) -> Floats:
    return np.concatenate([context, np.ones((len(context), 1))], axis=1)


def _checked(found: npt.ArrayLike, rows: int, num_actions: int) -> Floats:
    rewards = np.asarray(found, np.float64)
    if rewards.shape != (rows, num_actions):
        raise SpecError(
            f"the reward model must predict [{rows}, {num_actions}], a reward for each arm, got {list(rewards.shape)}."
        )
    if not np.isfinite(rewards).all():
        raise SpecError("the reward model must predict finite rewards, got others. Look at what it was fitted on.")
    return rewards
