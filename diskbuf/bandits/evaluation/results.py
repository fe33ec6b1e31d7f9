"""What an evaluation found: estimates with intervals, and what the log says about how far to trust them."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diskbuf.errors import MissingExtraError, OptionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """One estimator's answer.

    Attributes:
        name: The estimator's.
        value: Of the policy; None if there is no estimate. NaN if a reward that was kept is NaN.
        lower: Lower end of the interval; None if there is no estimate.
        upper: Upper end.
    """

    name: str
    value: float | None
    lower: float | None = None
    upper: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnostics:
    """What to know of the log and the weights before the estimates are believed.

    Weights are None where the log has no propensities.

    Attributes:
        rows: Rows that were used.
        mean_reward: Of these rows, what the log's own policy earned; None without rows.
        matches: Rows whose arm was drawn from the policy too; None unless Replay was asked for.
        expected_matches: The sum of the logged arms' probabilities under the policy.
        effective_sample_size: (sum of w)^2 / (sum of w^2), Kish, "Survey Sampling" (1965): how many rows of equal
            weight would say as much.
        largest_weight: Of a row.
        mean_weight: About 1 if propensities are right and the policy keeps to arms that could be logged.
        mean_weight_error: Its standard error.
        share_with_support: Share of rows whose arm the policy may choose: those that weigh anything.
        arms_never_shown: Actions that no row has.
        probability_never_shown: How probable these are under the policy, on average.
        smallest_propensity: After clipping.
        largest_propensity: After clipping.
        propensities_too_small: How many were below the floor, and were raised to it.
        propensities_above_one: How many were above 1, and were lowered to it.
        propensities_missing: How many were NaN; their rows were left out.
    """

    rows: int
    mean_reward: float | None
    matches: int | None
    expected_matches: float
    effective_sample_size: float | None
    largest_weight: float | None
    mean_weight: float | None
    mean_weight_error: float | None
    share_with_support: float | None
    arms_never_shown: tuple[int, ...]
    probability_never_shown: float | None
    smallest_propensity: float | None
    largest_propensity: float | None
    propensities_too_small: int
    propensities_above_one: int
    propensities_missing: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Estimates by the names of their estimators: `evaluation["SNIPS"].value`. Printed, it is a table.

    Attributes:
        estimates: By name, in the order asked for.
        diagnostics: About the log.
        notes: Sentences about what should be doubted.
        confidence: Of the intervals.
        num_bootstrap: How many draws they come from.
        seed: Of all draws.
    """

    estimates: Mapping[str, Estimate]
    diagnostics: Diagnostics
    notes: tuple[str, ...]
    confidence: float
    num_bootstrap: int
    seed: int

    def __getitem__(self, name: str) -> Estimate:
        """Returns the estimate of that name."""
        try:
            return self.estimates[name]
        except KeyError:
            raise OptionError(f"name must be one of {list(self.estimates)}, got {name!r}.") from None

    def to_json(self) -> str:
        """Returns all of it as a JSON object; what there is no number for is null."""
        return json.dumps(_plain(dataclasses.asdict(self)), indent=2, allow_nan=False)

    def __str__(self) -> str:
        rows = [("estimator", "value", f"{100 * self.confidence:.4g} % from", "to")]
        for estimate in self.estimates.values():
            if estimate.value is None:
                rows.append((estimate.name, "no estimate", _NOTHING, _NOTHING))
                continue
            numbers = _aligned(estimate.value), _aligned(estimate.lower), _aligned(estimate.upper)
            rows.append((estimate.name, *numbers))
        facts = self.diagnostics
        arms = ", ".join(map(str, facts.arms_never_shown[:10])) + (", ..." if len(facts.arms_never_shown) > 10 else "")
        about: list[tuple[str, Any]] = [
            ("rows", facts.rows),
            ("mean reward in the log", facts.mean_reward),
            ("matches", facts.matches),
            ("expected matches", facts.expected_matches),
            ("effective sample size", facts.effective_sample_size),
            ("largest weight", facts.largest_weight),
            ("mean weight", facts.mean_weight),
            ("share of rows with support", facts.share_with_support),
            ("arms never shown", arms or "none"),
            ("their probability", facts.probability_never_shown if facts.arms_never_shown else None),
            ("smallest propensity", facts.smallest_propensity),
            ("propensities raised to the floor", facts.propensities_too_small or None),
            ("propensities lowered to 1", facts.propensities_above_one or None),
            ("rows left out without propensity", facts.propensities_missing or None),
        ]
        told = [(what, value if isinstance(value, str) else _number(value)) for what, value in about]
        tables = [_table(rows), _table([(what, value) for what, value in told if value != _NOTHING])]
        return "\n\n".join([*tables, *(["\n".join(f"Note: {note}" for note in self.notes)] if self.notes else [])])

    def plot(self, file: str | os.PathLike[str]) -> None:
        """Draws the estimates with their intervals, and the log's mean reward, into a file; its suffix is the format.

        Raises:
            MissingExtraError: When matplotlib isn't installed.
            OptionError: If matplotlib knows no such format.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            raise MissingExtraError(
                "plot needs matplotlib, which isn't installed. Install it with: pip install 'diskbuf[plot]'."
            ) from error
        estimates = list(self.estimates.values())
        figure = Figure(figsize=(7, 1.6 + 0.42 * len(estimates)), dpi=150, layout="constrained")
        axes = figure.subplots()
        logged = self.diagnostics.mean_reward
        if logged is not None and math.isfinite(logged):
            axes.axvline(logged, color="0.45", linestyle="--", linewidth=1, label="mean reward in the log")
        is_labelled = False
        for place, estimate in enumerate(estimates):
            if estimate.value is None or not math.isfinite(estimate.value):
                axes.text(0.5, place, "no estimate", transform=axes.get_yaxis_transform(), ha="center", va="center")
                continue
            if estimate.lower is not None and estimate.upper is not None:
                axes.hlines(place, estimate.lower, estimate.upper, color="tab:blue", linewidth=2)
                axes.plot([estimate.lower, estimate.upper], [place, place], "|", color="tab:blue", markersize=9)
            label = None if is_labelled else f"estimate, {100 * self.confidence:g} % interval"
            axes.plot([estimate.value], [place], "o", color="tab:blue", markersize=6, label=label)
            is_labelled = True
        axes.set_yticks(range(len(estimates)), [estimate.name for estimate in estimates])
        axes.set_ylim(len(estimates) - 0.4, -0.6)
        axes.set_xlabel("expected reward of a decision")
        axes.set_title(f"Off-policy estimates from {self.diagnostics.rows:,} logged decisions", fontsize="medium")
        axes.grid(axis="x", color="0.9")
        axes.set_axisbelow(True)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
        try:
            figure.savefig(Path(file))
        except ValueError as error:
            raise OptionError(f"file must end in a format that matplotlib knows, got {file!r}. Use .png.") from error


_NOTHING = ""


def _number(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _aligned(value: float | None) -> str:
    """With zeros at the end, so that numbers of the same size have their points below each other."""
    return _NOTHING if value is None else f"{value:#,.6g}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _plain(value: Any) -> Any:
    """The same without numbers that JSON has no way to write."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
