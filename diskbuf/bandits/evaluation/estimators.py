"""Estimators of a policy's value, each as sums over the rows of a log and what is made of the sums.

They know nothing of stores. Sums can be taken block by block, and sums of groups of rows are all that a bootstrap
needs. In the formulas below the log has n rows with context x, arm a, reward r and propensity p; pi is the policy that
is evaluated, w = pi(a|x) / p is a row's weight, and q(x, a) is a model's expected reward.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from diskbuf.errors import OptionError

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeighedRows:
    """N rows of a log, seen from the policy that is evaluated.

    Attributes:
        reward: [N].
        probability: [N], of the logged arm under the policy.
        propensity: [N], of the logged arm when it was chosen; None where the log has none.
        expected: [N], the reward that the model expects of the policy: the sum over arms of pi(a|x) q(x, a). None
            without a model.
        predicted: [N], the reward that the model expects of the logged arm. None without a model.
        uniform: [N] random numbers in [0, 1); None when no estimator draws.
    """

    reward: Floats
    probability: Floats
    propensity: Floats | None = None
    expected: Floats | None = None
    predicted: Floats | None = None
    uniform: Floats | None = None

    @functools.cached_property
    def weight(self) -> Floats:
        """[N], w."""
        return self.probability / _there(self.propensity, "propensities")

    @functools.cached_property
    def weighted_reward(self) -> Floats:
        """[N], w r."""
        return self.weight * self.reward

    @functools.cached_property
    def residual(self) -> Floats:
        """[N], r - q(x, a)."""
        return self.reward - _there(self.predicted, "a reward model")

    @functools.cached_property
    def match(self) -> Floats:
        """[N], 1 where an arm drawn from the policy is the logged one, else 0."""
        return (_there(self.uniform, "random numbers") < self.probability).astype(np.float64)


class Estimator(abc.ABC):
    """A function of sums over rows.

    A subclass that is a frozen dataclass has its name and its equality from its fields.

    Attributes:
        needs_propensity: Whether it weighs rows.
        needs_reward_model: Whether it needs q.
        needs_draws: Whether it draws from the policy.
    """

    needs_propensity: ClassVar[bool] = True
    needs_reward_model: ClassVar[bool] = False
    needs_draws: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """What it is called in results: the class, and its numbers."""
        values = [f"{value:g}" for value in vars(self).values()]
        return type(self).__name__ + (f"({', '.join(values)})" if values else "")

    @abc.abstractmethod
    def terms(self, rows: WeighedRows) -> dict[str, Floats]:
        """Returns what is to be summed, [N] arrays by name; the same name stands for the same numbers everywhere."""

    @abc.abstractmethod
    def value(self, sums: Mapping[str, Floats]) -> Floats:
        """Returns the estimates [...] from sums [...] by name, among them the number of "rows".

        Where a sum that is divided by is 0 there is no estimate: NaN.
        """


@dataclasses.dataclass(frozen=True)
class Replay(Estimator):
    """The mean reward of the rows whose arm the policy draws too.

        sum of r over matches / number of matches

    Li, Chu, Langford and Wang, "Unbiased Offline Evaluation of Contextual-bandit-based News Article Recommendation
    Algorithms" (2011). It is unbiased if all arms were equally probable when they were logged, and asks for no
    propensities. Without a match there is no estimate.
    """

    needs_propensity: ClassVar[bool] = False
    needs_draws: ClassVar[bool] = True

    def terms(self, rows: WeighedRows) -> dict[str, Floats]:
        """See `Estimator.terms`."""
        return {"match": rows.match, "match * r": rows.match * rows.reward}

    def value(self, sums: Mapping[str, Floats]) -> Floats:
        """See `Estimator.value`."""
        return _ratio(sums["match * r"], sums["match"])


@dataclasses.dataclass(frozen=True)
class IPS(Estimator):
    """Inverse propensity score.

        1/n sum of w r

    Horvitz and Thompson, "A Generalization of Sampling Without Replacement from a Finite Universe" (1952); Precup,
    Sutton and Singh, "Eligibility Traces for Off-Policy Policy Evaluation" (2000). Unbiased where every arm that the
    policy may choose could be logged; its error grows with the weights.
    """

    def terms(self, rows: WeighedRows) -> dict[str, Floats]:
        """See `Estimator.terms`."""
        return {"w r": rows.weighted_reward}

    def value(self, sums: Mapping[str, Floats]) -> Floats:
        """See `Estimator.value`."""
        return _ratio(sums["w r"], sums["rows"])


@dataclasses.dataclass(frozen=True)
class ClippedIPS(Estimator):
    """IPS whose weights are cut off at lambda: some bias for less variance.

        1/n sum of min(w, lambda) r

    Strehl, Langford, Li and Kakade, "Learning from Logged Implicit Exploration Data" (2010); Bottou et al.,
    "Counterfactual Reasoning and Learning Systems" (2013).

    Args:
        lambda_: The largest weight, above 0.

    Raises:
        OptionError: If lambda_ isn't above 0.
    """

    lambda_: float

    def __post_init__(self) -> None:
        _check_number("lambda_", self.lambda_, is_zero_fine=False)

    def terms(self, rows: WeighedRows) -> dict[str, Floats]:
        """See `Estimator.terms`."""
        return {f"min(w, {self.lambda_!r}) r": np.minimum(rows.weight, self.lambda_) * rows.reward}

    def value(self, sums: Mapping[str, Floats]) -> Floats:
        """See `Estimator.value`."""
        return _ratio(sums[f"min(w, {self.lambda_!r}) r"], sums["rows"])


@dataclasses.dataclass(frozen=True)
class SNIPS(Estimator):
    """Self-normalized inverse propensity score.

        sum of w r / sum of w

    Swaminathan and Joachims, "The Self-Normalized Estimator for Counterfactual Learning" (2015). It stays within the
    rewards seen and gives c more when every reward is c more; its bias vanishes as rows grow. Without any weight there
    is no estimate.
    """

    def terms(self, rows: WeighedRows) -> dict[str, Floats]:
        """See `Estimator.terms`."""
        return {"w r": rows.weighted_reward, "w": rows.weight}

    def value(self, sums: Mapping[str, Floats]) -> Floats:
        """See `Estimator.value`."""
        return _ratio(sums["w r"], sums["w"])


@dataclasses.dataclass(frozen=True)
class DirectMethod(Estimator):
    """What a model of the rewards expects of the policy.

        1/n sum over rows of the sum over arms b of pi(b|x) q(x, b)

    As in Dudik, Langford and Li, "Doubly Robust Policy Evaluation and Learning" (2011). It needs no propensities, has
    little variance, and all the errors of the model. Its interval knows nothing of these, only of which contexts came.
    """

    needs_propensity: ClassVar[bool] = False
    needs_reward_model: ClassVar[bool] = True

    def terms(self, rows: WeighedRows) -> dict[str, Floats]:
        """See `Estimator.terms`."""
        return {"E q": _there(rows.expected, "a reward model")}

    def value(self, sums: Mapping[str, Floats]) -> Floats:
        """See `Estimator.value`."""
        return _ratio(sums["E q"], sums["rows"])


class _Corrected(Estimator):
    """A direct method, corrected by what the model misses in the logged rows, each with a weight made of w."""

    needs_reward_model: ClassVar[bool] = True

    def terms(self, rows: WeighedRows) -> dict[str, Floats]:
        """See `Estimator.terms`."""
        weight = self._weight(rows.weight)
        return {"E q": _there(rows.expected, "a reward model"), self._residuals: weight * rows.residual}

    def value(self, sums: Mapping[str, Floats]) -> Floats:
        """See `Estimator.value`."""
        return _ratio(sums["E q"] + sums[self._residuals], sums["rows"])

    @property
    def _residuals(self) -> str:
        return f"{self!r} (r - q)"

    @abc.abstractmethod
    def _weight(self, weight: Floats) -> Floats:
        """Returns [N], what stands for w."""


@dataclasses.dataclass(frozen=True)
class DoublyRobust(_Corrected):
    """The direct method, corrected by the weighted errors of its model.

        1/n sum of (sum over b of pi(b|x) q(x, b)) + w (r - q(x, a))

    Dudik, Langford and Li, "Doubly Robust Policy Evaluation and Learning" (2011), and with Erhan, "Doubly Robust Policy
    Evaluation and Optimization" (2014). Unbiased if either the propensities or the model are right.
    """

    def _weight(self, weight: Floats) -> Floats:
        return weight


@dataclasses.dataclass(frozen=True)
class SelfNormalizedDR(Estimator):
    """Doubly robust, with weights that are divided by their mean.

        1/n sum of (sum over b of pi(b|x) q(x, b)) + (sum of w (r - q(x, a))) / (sum of w)

    SNIPS (Swaminathan and Joachims, 2015) of what the model misses; as the weighted doubly robust estimator of Thomas
    and Brunskill, "Data-Efficient Off-Policy Policy Evaluation for Reinforcement Learning" (2016), is for one step.
    Without any weight there is no estimate.
    """

    needs_reward_model: ClassVar[bool] = True

    def terms(self, rows: WeighedRows) -> dict[str, Floats]:
        """See `Estimator.terms`."""
        expected = _there(rows.expected, "a reward model")
        return {"E q": expected, "DoublyRobust() (r - q)": rows.weight * rows.residual, "w": rows.weight}

    def value(self, sums: Mapping[str, Floats]) -> Floats:
        """See `Estimator.value`."""
        return _ratio(sums["E q"], sums["rows"]) + _ratio(sums["DoublyRobust() (r - q)"], sums["w"])


@dataclasses.dataclass(frozen=True)
class SwitchDR(_Corrected):
    """Doubly robust where weights are at most tau, the direct method elsewhere.

        1/n sum of (sum over b of pi(b|x) q(x, b)) + [w <= tau] w (r - q(x, a))

    Wang, Agarwal and Dudik, "Optimal and Adaptive Off-policy Evaluation in Contextual Bandits" (2017).

    Args:
        tau: At least 0, which is the direct method; infinity is doubly robust.

    Raises:
        OptionError: If tau is below 0.
    """

    tau: float

    def __post_init__(self) -> None:
        _check_number("tau", self.tau)

    def _weight(self, weight: Floats) -> Floats:
        return np.where(weight <= self.tau, weight, 0.0)


@dataclasses.dataclass(frozen=True)
class DRos(_Corrected):
    """Doubly robust with optimistic shrinkage: large weights count less, by how large they are.

        1/n sum of (sum over b of pi(b|x) q(x, b)) + lambda w / (w^2 + lambda) (r - q(x, a))

    Su, Dimakopoulou, Krishnamurthy and Dudik, "Doubly Robust Off-Policy Evaluation with Shrinkage" (2020).

    Args:
        lambda_: At least 0, which is the direct method; infinity is doubly robust.

    Raises:
        OptionError: If lambda_ is below 0.
    """

    lambda_: float

    def __post_init__(self) -> None:
        _check_number("lambda_", self.lambda_)

    def _weight(self, weight: Floats) -> Floats:
        if math.isinf(self.lambda_):
            return weight
        if self.lambda_ == 0:
            return np.zeros_like(weight)  # the formula has 0 / 0 for weights of 0
        return self.lambda_ * weight / (weight**2 + self.lambda_)


def _check_number(name: str, value: object, *, is_zero_fine: bool = True) -> None:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not (value >= 0 if is_zero_fine else value > 0):  # type: ignore[operator]  # a number by now
        raise OptionError(f"{name} must be a number {'of at least' if is_zero_fine else 'above'} 0, got {value!r}.")


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    """The quotient, NaN where there is nothing to divide by."""
    nothing = np.asarray(denominator) == 0
    return np.asarray(np.where(nothing, np.nan, numerator / np.where(nothing, 1.0, denominator)), np.float64)


def _there(values: Floats | None, what: str) -> Floats:
    if values is None:
        raise OptionError(f"rows must have {what} for this estimator, got none.")
    return values
