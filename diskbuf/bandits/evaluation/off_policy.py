"""Reads a log once or twice, block by block, and estimates what a policy would have earned in it."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from diskbuf.bandits.evaluation.estimators import (
    IPS,
    SNIPS,
    DirectMethod,
    DoublyRobust,
    Estimator,
    Floats,
    Replay,
    WeighedRows,
)
from diskbuf.bandits.evaluation.evaluated_policy import EvaluatedPolicy, PolicyLike
from diskbuf.bandits.evaluation.group_sums import GroupSums, drawn_again, percentile_interval
from diskbuf.bandits.evaluation.results import Diagnostics, Estimate, Evaluation
from diskbuf.bandits.evaluation.reward_models import (
    Expectations,
    RewardModelLike,
    RidgeRewardModel,
    expectations,
)
from diskbuf.bandits.log_reader import Invalid, Log, LoggedRows, LogReader
from diskbuf.bandits.policies.context_features import ContextFeatures
from diskbuf.errors import OptionError, SpecError
from diskbuf.plan import derive_seed, uniforms
from diskbuf.readers.requests import count

# One such row would weigh as much as ten logs of ten million rows. It is more likely a mistake than a propensity.
_LEAST_PROPENSITY = 1e-8
# A propensity worked out in float32 can be above 1 by a rounding error or two.
_MOST_PROPENSITY = 1 + 1e-6
# A mean weight is called wrong when it is off by so many standard errors: chance alone does that once in 16,000 logs.
_DOUBTFUL_ERRORS = 4
_CACHED_ROWS = 16_384  # ten columns of 8 bytes are 1.3 MB
_DRAWS, _FOLDS, _BOOTSTRAP = range(3)  # streams of random numbers


def evaluate(
    store: Log,
    policy: PolicyLike,
    estimators: Sequence[Estimator] | None = None,
    *,
    first_id: int | None = None,
    next_id: int | None = None,
    reward_model: RewardModelLike | None = None,
    num_folds: int = 3,
    seed: int = 0,
    confidence: float = 0.95,
    num_bootstrap: int = 1000,
    invalid: Invalid = "reject",
    propensity_floor: float | None = None,
    block_rows: int = 65_536,
) -> Evaluation:
    """Estimates from a log what the policy's decisions would have earned on average.

    The log is read block by block and may be larger than memory: once, and once more before if a reward model is
    fitted. Contexts are read only if the policy or a reward model asks for them. Intervals come from a bootstrap over
    at most 1,000 groups of rows, see `group_sums`; they take the reward model as given. Equal arguments give equal
    results, to the last bit if block_rows is equal too.

        >>> import diskbuf
        >>> from diskbuf import trajectories
        >>> actions = diskbuf.BoundedArraySpec([], "int32", 0, 1)
        >>> spec = trajectories.trajectory_spec(
        ...     trajectories.time_step_spec(diskbuf.ArraySpec([], "float32")),
        ...     trajectories.PolicyStep(actions, (), {"propensity": diskbuf.ArraySpec([], "float32")}),
        ... )
        >>> arms, context = np.array([0, 1, 1, 0], np.int32), np.zeros(4, np.float32)
        >>> earned = trajectories.termination(context, [1.0, 4.0, 2.0, 0.0])
        >>> step = trajectories.PolicyStep(arms, (), {"propensity": np.full(4, 0.5, np.float32)})
        >>> rows = trajectories.from_transition(trajectories.restart(context, batch_size=4), step, earned)
        >>> with diskbuf.UniformReplayBuffer(spec, batch_size=4) as buffer:
        ...     buffer.add_batch(rows)
        ...     found = evaluate(buffer, [0.25, 0.75], [IPS(), SNIPS()])
        >>> found["IPS"].value, found.diagnostics.effective_sample_size
        (2.375, 3.2)

    Args:
        store: A buffer, or the path of a store.
        policy: A BanditPolicy, a function from observations (nest of [N, *shape]) to probabilities [N, K], [K]
            probabilities that are the same for all contexts, or a LoggedColumn of the log.
        estimators: What estimates. None is IPS, SNIPS, the direct method and doubly robust, as far as the log has what
            they need.
        first_id: First step id; None is the oldest.
        next_id: Where to stop, exclusive; None is after the newest.
        reward_model: For estimators that need one: what has fit and predict, fitted anew for each fold, or a function
            from contexts [N, d] to rewards [N, K], used as it is. Contexts are the leaves of the observation flattened,
            without what the policy's constraint splitter takes off. None is `RidgeRewardModel()`.
        num_folds: Rows are dealt to so many folds, by their ids and the seed; those of a fold are predicted by a model
            that was fitted on the others. 1 predicts rows by a model that has seen them.
        seed: Of Replay's draws, the folds and the bootstrap.
        confidence: Of the intervals, between 0 and 1.
        num_bootstrap: How often groups are drawn; 0 for no intervals.
        invalid: What becomes of rows whose reward, or context if it is read, isn't finite: an error, left out, or as
            they are, which makes estimates NaN.
        propensity_floor: None refuses propensities that are NaN, below 1e-8 or above 1. A number raises those below it
            to it, lowers those above 1 to 1, leaves rows out whose propensity is NaN, and counts all three.
        block_rows: About how many rows are in memory at once.

    Raises:
        SpecError: If the log has no propensities and an estimator weighs rows; if a row of the log, or what the policy
            or the reward model says, isn't what it must be.
        OptionError: If an argument is outside its rule.
        WindowError: If the range isn't in the log.
        StoreError: If there is no store at the path, or it can't be opened.
    """
    seed = count("seed", seed, least=0)
    num_folds = count("num_folds", num_folds)
    num_bootstrap = count("num_bootstrap", num_bootstrap, least=0)
    if not isinstance(confidence, int | float | np.floating) or not 0 < confidence < 1:
        raise OptionError(f"confidence must be between 0 and 1, got {confidence!r}.")
    if propensity_floor is not None and not 0 < propensity_floor <= 1:
        raise OptionError(f"propensity_floor must be above 0 and at most 1, or None, got {propensity_floor!r}.")
    with LogReader(store, first_id=first_id, next_id=next_id) as log:
        chosen, notes = _chosen(estimators, log)
        evaluated = EvaluatedPolicy(policy, num_actions=log.num_actions, minimum=log.minimum_action)
        needs_model = any(estimator.needs_reward_model for estimator in chosen)
        needs_context = needs_model or (evaluated.fixed is None and evaluated.column is None)
        info = [] if evaluated.column is None else [evaluated.column]
        weighs = any(estimator.needs_propensity for estimator in chosen)

        def blocks(propensities: "_Propensities") -> Iterator[LoggedRows]:
            found = log.blocks(with_observation=needs_context, info=info, invalid=invalid, block_rows=block_rows)
            return (part for rows in found for part in _parts(propensities.checked(rows, weighs=weighs)))

        with np.errstate(invalid="ignore" if invalid == "keep" else "warn"):
            folds = _Folds(log, seed=seed, num_folds=num_folds)
            model = None
            if needs_model:
                model = _Model(RidgeRewardModel() if reward_model is None else reward_model, log, evaluated, folds)
                model.fit(lambda: blocks(_Propensities(propensity_floor)))
            propensities = _Propensities(propensity_floor)
            totals = _Totals(chosen, log, evaluated, model=model, seed=seed)
            for rows in blocks(propensities):
                totals.add(rows)
            estimates = totals.estimates(seed=seed, confidence=confidence, num_bootstrap=num_bootstrap)
        diagnostics = totals.diagnostics(propensities)
        return Evaluation(
            estimates={estimate.name: estimate for estimate in estimates},
            diagnostics=diagnostics,
            notes=(*notes, *_doubts(diagnostics, chosen)),
            confidence=float(confidence),
            num_bootstrap=num_bootstrap,
            seed=seed,
        )


def _chosen(estimators: Sequence[Estimator] | None, log: LogReader) -> tuple[list[Estimator], list[str]]:
    """The estimators to use, and a note about those that were left out."""
    if estimators is None:
        usual = [IPS(), SNIPS(), DirectMethod(), DoublyRobust()]
        if log.has_propensity:
            return usual, []
        left_out = ", ".join(estimator.name for estimator in usual if estimator.needs_propensity)
        note = f"the log has no propensities, so {left_out} were left out; the direct method rests on its model alone."
        return [estimator for estimator in usual if not estimator.needs_propensity], [note]
    if isinstance(estimators, Estimator):
        raise OptionError(f"estimators must be a list, got {estimators!r}. Put it in a list.")
    chosen = list(estimators)
    for estimator in chosen:
        if not isinstance(estimator, Estimator):
            raise OptionError(f"estimators must be instances such as IPS(), got {estimator!r}.")
    names = [estimator.name for estimator in chosen]
    if not names or len(set(names)) < len(names):
        raise OptionError(f"estimators must be one or more, each with a name of its own, got {names}.")
    weighing = [estimator.name for estimator in chosen if estimator.needs_propensity]
    if weighing and not log.has_propensity:
        raise SpecError(
            f"the log must have a leaf 'policy_info/propensity' for {', '.join(weighing)}, which divide by it, got "
            "none. Log propensities, or use DirectMethod(), or Replay() if all arms were equally probable.",
            path="policy_info/propensity",
        )
    return chosen, []


def _parts(rows: LoggedRows) -> Iterator[LoggedRows]:
    """The rows in parts whose arithmetic stays in the cache."""
    for first in range(0, len(rows), _CACHED_ROWS):
        yield rows if len(rows) <= _CACHED_ROWS else rows.take(slice(first, first + _CACHED_ROWS))


def _numbers(rows: LoggedRows, lanes: int) -> npt.NDArray[np.uint64]:
    """[N], a number of its own for each row, wherever a read begins."""
    return (rows.ids * lanes + rows.lanes).astype(np.uint64)


@dataclasses.dataclass
class _Propensities:
    """Refuses propensities that can't be, or clips and counts them."""

    floor: float | None
    too_small: int = 0
    above_one: int = 0
    missing: int = 0
    smallest: float = math.inf
    largest: float = -math.inf

    def checked(self, rows: LoggedRows, *, weighs: bool) -> LoggedRows:
        """Returns the rows that can be weighed; if they needn't be, only looks how large propensities are."""
        found = rows.propensity
        if found is None or not len(found):
            return rows
        least = _LEAST_PROPENSITY if self.floor is None else self.floor
        low, high = float(found.min()), float(found.max())
        # NaN passes through min and max, and fails both comparisons.
        if weighs and not (low >= least and high <= _MOST_PROPENSITY):
            rows = self._clipped(rows, found, least)
            found = rows.propensity
            low, high = (float(found.min()), float(found.max())) if found is not None and len(found) else (1.0, 0.0)
        if low <= high:
            self.smallest, self.largest = min(self.smallest, low), max(self.largest, high)
        return rows

    def _clipped(self, rows: LoggedRows, found: npt.NDArray[np.float32], least: float) -> LoggedRows:
        if self.floor is None:
            at = int((~((found >= least) & (found <= _MOST_PROPENSITY))).argmax())
            raise SpecError(
                f"leaf 'policy_info/propensity' must be at least {least:g} and at most 1, got {found[at]:g} in row "
                f"{rows.ids[at]} of lane {rows.lanes[at]}. Clip such propensities with propensity_floor.",
                path="policy_info/propensity",
            )
        is_missing = np.isnan(found)
        self.missing += int(is_missing.sum())
        self.too_small += int((found < self.floor).sum())
        self.above_one += int((found > _MOST_PROPENSITY).sum())
        clipped = dataclasses.replace(rows, propensity=np.clip(found, np.float32(self.floor), np.float32(1)))
        return clipped.take(~is_missing) if is_missing.any() else clipped


@dataclasses.dataclass(frozen=True)
class _Folds:
    """Deals rows to folds by chance: dealt in turns, logs whose arms take turns would have folds without an arm."""

    log: LogReader
    seed: int
    num_folds: int

    def of(self, rows: LoggedRows) -> npt.NDArray[np.int64]:
        numbers = _numbers(rows, self.log.buffer.batch_size)
        drawn = uniforms(derive_seed(self.seed, _FOLDS), numbers, count=1)[:, 0]
        return (drawn * self.num_folds).astype(np.int64)


class _Model:
    """Expected rewards for rows of the log."""

    def __init__(self, model: RewardModelLike, log: LogReader, policy: EvaluatedPolicy, folds: _Folds) -> None:
        # With the bias there is a feature even where the context is empty; the bias is taken off again.
        self._features = ContextFeatures(log.data_spec.observation, policy.splitter, add_bias=True)
        self._splitter = policy.splitter
        self._folds = folds
        self._expectations: Expectations = expectations(
            model,
            num_actions=log.num_actions,
            num_features=self._features.num_features - 1,
            num_folds=folds.num_folds,
        )

    def fit(self, blocks: Callable[[], Iterator[LoggedRows]]) -> None:
        if not self._expectations.needs_pass:
            return
        for rows in blocks():
            if len(rows):
                reward = rows.reward.astype(np.float64)
                self._expectations.take(self._context(rows), rows.index, reward, self._folds.of(rows))
        self._expectations.finish()

    def predict(self, rows: LoggedRows) -> Floats:
        """Returns [N, K]."""
        return self._expectations.predict(self._context(rows), self._folds.of(rows))

    def _context(self, rows: LoggedRows) -> Floats:
        """[N, d]."""
        if self._features.num_features == 1:
            return np.zeros((len(rows), 0))
        context = rows.observation if self._splitter is None else self._splitter(rows.observation)[0]
        return self._features.of(context)[:, :-1]


class _Totals:
    """What is added up over the rows."""

    def __init__(
        self,
        estimators: Sequence[Estimator],
        log: LogReader,
        policy: EvaluatedPolicy,
        *,
        model: _Model | None,
        seed: int,
    ) -> None:
        self._estimators = estimators
        self._log = log
        self._policy = policy
        self._model = model
        self._draws_seed = derive_seed(seed, _DRAWS) if any(one.needs_draws for one in estimators) else None
        self._weighs = any(one.needs_propensity for one in estimators)
        self._groups = GroupSums(log.num_rows)
        self._rows = self._matches = 0
        self._largest_weight = -math.inf
        self._probabilities = 0.0
        self._supported = 0
        self._is_shown: npt.NDArray[np.bool_] = np.zeros(log.num_actions, np.bool_)
        self._chances: Floats = np.zeros(log.num_actions)

    def add(self, logged: LoggedRows) -> None:
        """Takes the next rows."""
        number = len(logged)
        if not number:
            return
        if not self._is_shown.all():
            self._is_shown[logged.index] = True
        rows = self._weighed(logged)
        terms: dict[str, Floats] = {"r": rows.reward}
        if self._weighs:
            terms |= {"w": rows.weight, "w^2": np.square(rows.weight)}
            self._largest_weight = max(self._largest_weight, float(rows.weight.max()))
        for estimator in self._estimators:
            terms.update(estimator.terms(rows))
        self._groups.add(terms, number)
        self._rows += number
        if self._draws_seed is not None:
            self._matches += int(rows.match.sum())
        self._probabilities += float(rows.probability.sum())
        is_everywhere = self._policy.fixed is not None and bool(self._policy.fixed.all())
        self._supported += number if is_everywhere else int(np.count_nonzero(rows.probability))

    def _weighed(self, logged: LoggedRows) -> WeighedRows:
        number, fixed = len(logged), self._policy.fixed
        each = np.arange(number) if fixed is None or self._model is not None else None
        if fixed is None:
            chances = self._policy.probabilities(logged)  # [N, K]
            probability = chances[each, logged.index]
            self._chances += chances.sum(axis=0)
        else:
            chances = fixed
            probability = np.take(fixed, logged.index)
            self._chances += number * fixed
        expected = predicted = uniform = None
        if self._model is not None:
            rewards = self._model.predict(logged)  # [N, K]
            predicted = rewards[each, logged.index]
            expected = np.einsum("nk,k->n" if fixed is not None else "nk,nk->n", rewards, chances)
        if self._draws_seed is not None:
            uniform = uniforms(self._draws_seed, _numbers(logged, self._log.buffer.batch_size), count=1)[:, 0]
        return WeighedRows(
            reward=logged.reward.astype(np.float64),
            probability=probability,
            propensity=None if logged.propensity is None else logged.propensity.astype(np.float64),
            expected=expected,
            predicted=predicted,
            uniform=uniform,
        )

    def estimates(self, *, seed: int, confidence: float, num_bootstrap: int) -> list[Estimate]:
        """Returns the estimates of all rows that were taken."""
        if not self._rows:
            return [Estimate(name=estimator.name, value=None) for estimator in self._estimators]
        groups = self._groups.groups()
        totals = {name: np.asarray(sums.sum()) for name, sums in groups.items()}
        again = None
        if num_bootstrap:
            again = drawn_again(groups, np.random.default_rng(derive_seed(seed, _BOOTSTRAP)), count=num_bootstrap)
        found = []
        for estimator in self._estimators:
            value = float(estimator.value(totals))
            # Of finite rewards only a division by nothing gives NaN.
            if math.isnan(value) and np.isfinite(totals["r"]):
                found.append(Estimate(name=estimator.name, value=None))
                continue
            interval = None if again is None else percentile_interval(estimator.value(again), confidence)
            lower, upper = (None, None) if interval is None else interval
            found.append(Estimate(name=estimator.name, value=value, lower=lower, upper=upper))
        return found

    def diagnostics(self, propensities: _Propensities) -> Diagnostics:
        """Returns what the rows tell about themselves."""
        rows = self._rows
        sums = {name: float(parts.sum()) for name, parts in self._groups.groups().items()}
        never = np.flatnonzero(~self._is_shown) if rows else np.zeros(0, np.int64)
        weighs = self._weighs and rows > 0
        has_range = propensities.smallest <= propensities.largest
        mean_weight = error = size = None
        if weighs:
            mean_weight = sums["w"] / rows
            error = math.sqrt(max(0.0, sums["w^2"] / rows - mean_weight**2) / rows)
            size = sums["w"] ** 2 / sums["w^2"] if sums["w^2"] else 0.0
        return Diagnostics(
            rows=rows,
            mean_reward=sums["r"] / rows if rows else None,
            matches=None if self._draws_seed is None else self._matches,
            expected_matches=self._probabilities,
            effective_sample_size=size,
            largest_weight=self._largest_weight if weighs else None,
            mean_weight=mean_weight,
            mean_weight_error=error,
            share_with_support=self._supported / rows if rows else None,
            arms_never_shown=tuple(int(arm) + self._log.minimum_action for arm in never),
            probability_never_shown=float(self._chances[never].sum() / rows) if rows else None,
            smallest_propensity=propensities.smallest if has_range else None,
            largest_propensity=propensities.largest if has_range else None,
            propensities_too_small=propensities.too_small,
            propensities_above_one=propensities.above_one,
            propensities_missing=propensities.missing,
        )


def _doubts(facts: Diagnostics, estimators: Sequence[Estimator]) -> Iterator[str]:
    """Sentences about what should be doubted."""
    if not facts.rows:
        yield "there are no rows to estimate from."
        return
    lost = facts.probability_never_shown or 0.0
    if lost:
        yield (
            f"the policy gives {100 * lost:.3g} % of its decisions to arms that the log never shows; what these earn "
            "is unknown, or what a reward model makes up."
        )
    if any(isinstance(estimator, DirectMethod) for estimator in estimators):
        yield "the interval of DirectMethod leaves out how wrong its reward model may be, so it is too narrow."
    draws = any(isinstance(estimator, Replay) for estimator in estimators)
    low, high = facts.smallest_propensity, facts.largest_propensity
    if draws and low is not None and high is not None and high - low > 1e-6 * high:
        yield f"Replay is biased unless all arms were equally probable, but propensities are {low:g} to {high:g}."
    if facts.mean_weight is not None and facts.mean_weight_error is not None:
        off = facts.mean_weight - (1 - lost)
        if abs(off) > max(_DOUBTFUL_ERRORS * facts.mean_weight_error, 1e-5):
            yield (
                f"the mean weight is {facts.mean_weight:.6g} and should be {1 - lost:.6g}: the propensities are wrong, "
                "or there are contexts in which arms of the policy were never possible."
            )
