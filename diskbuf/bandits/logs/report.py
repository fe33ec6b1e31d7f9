"""What an import found: rows, arms, propensities, and what was wrong."""

import dataclasses
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.bandits.logs.times import text_of_moment

_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PropensityReport:
    """What the propensities of an import are like.

    Attributes:
        minimum: The smallest; None where there are no rows.
        maximum: The largest.
        quantiles: Rounded up by at most one part in 128, by their share of the rows.
        out_of_range: Rows with one that is NaN, 0, negative or above 1, whatever became of them.
    """

    minimum: float | None
    maximum: float | None
    quantiles: dict[str, float]
    out_of_range: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportReport:
    """What an import found and did. Print it, or keep `to_json()`.

    Attributes:
        store: Its path.
        rows: Rows that are in the store now because of it.
        first_id: Id of the first of them.
        next_id: Where they stop, exclusive.
        types: The Arrow type that each column was read as, by name.
        context: Where each context column is in the vector: `[start, stop]`.
        num_actions: K, the number of arms.
        labels: [K] labels of the arms; None where actions are their numbers.
        support: [K] rows of each arm.
        propensity: What they are like; None without a column of them.
        pending: Rows without a reward yet.
        not_a_number: Rows that hold NaN, by leaf; pending rows aside.
        dropped: Rows that were left out for their values, by reason.
        kept: Rows that were kept in spite of their values, by reason.
        malformed: Lines or rows that couldn't be read.
        malformed_examples: The first few of them, and what was wrong.
        start_time: ISO text of the first timestamp; None without.
        end_time: ISO text of the last.
        is_sorted: Whether timestamps never go back, those that were there before with them.
    """

    store: str
    rows: int
    first_id: int
    next_id: int
    types: dict[str, str]
    context: dict[str, tuple[int, int]]
    num_actions: int
    labels: list[Any] | None
    support: list[int]
    propensity: PropensityReport | None
    pending: int
    not_a_number: dict[str, int]
    dropped: dict[str, int]
    kept: dict[str, int]
    malformed: int
    malformed_examples: list[str]
    start_time: str | None
    end_time: str | None
    is_sorted: bool | None

    def to_json(self) -> str:
        """Returns it as JSON text."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, indent=2)

    def __str__(self) -> str:
        width = max((stop for _, stop in self.context.values()), default=0)
        chosen = sum(rows > 0 for rows in self.support)
        lines = [
            f"{self.rows:,} rows in {self.store}, ids {self.first_id} to {self.next_id}",
            f"  context   {width} numbers from {len(self.context)} columns",
            f"  arms      {self.num_actions}, {chosen} of them chosen; {_spread(self.support)}",
        ]
        if self.propensity is None:
            lines.append("  propensity  none: weighting estimators can't be used")
        elif self.propensity.minimum is not None:
            shares = ", ".join(f"{share} {value:.3g}" for share, value in self.propensity.quantiles.items())
            lines.append(f"  propensity  {self.propensity.minimum:.3g} to {self.propensity.maximum:.3g}; {shares}")
        if self.propensity is not None and self.propensity.out_of_range:
            lines.append(f"  propensity outside of (0, 1] in {self.propensity.out_of_range:,} rows")
        if self.start_time is not None:
            lines.append(
                f"  time      {self.start_time} to {self.end_time}{'' if self.is_sorted else ', not in order'}"
            )
        if self.pending:
            lines.append(f"  pending   {self.pending:,} rows without a reward yet")
        for name, found in (("NaN", self.not_a_number), ("dropped", self.dropped), ("kept", self.kept)):
            lines += [f"  {name:<9} {rows:,} rows: {reason}" for reason, rows in found.items()]
        if self.malformed:
            lines.append(f"  malformed {self.malformed:,} rows left out, the first of them:")
            lines += [f"    {example}" for example in self.malformed_examples]
        return "\n".join(lines)


class Tally:
    """Counts of what is imported, block by block.

    Args:
        num_actions: K, where it is known.
    """

    def __init__(self, num_actions: int | None) -> None:
        self.support = np.zeros(num_actions or 0, np.int64)
        self.pending = 0
        self.not_a_number: dict[str, int] = {}
        self.dropped: dict[str, int] = {}
        self.kept: dict[str, int] = {}
        self.out_of_range = 0
        self.times: tuple[int, int] | None = None
        self._by_top_bits = np.zeros(2**15, np.int64)  # of a float32 of at least 0: exponent, and 7 bits behind it
        self._propensities: tuple[float, float] | None = None

    def add_actions(self, index: npt.NDArray[np.int64]) -> None:
        """Counts arms [N], all at least 0."""
        counts = np.bincount(index, minlength=len(self.support))
        counts[: len(self.support)] += self.support
        self.support = counts

    def add_propensities(self, propensity: npt.NDArray[np.float32]) -> None:
        """Counts propensities [N]; those that are kept outside of their range don't count."""
        known = propensity if propensity.size == 0 or propensity.min() > 0 else propensity[propensity > 0]
        if not known.size:
            return
        self._by_top_bits += np.bincount(known.view(np.uint32) >> 16, minlength=2**15)
        low, high = float(known.min()), float(known.max())
        if self._propensities is not None:
            low, high = min(low, self._propensities[0]), max(high, self._propensities[1])
        self._propensities = low, high

    def add_times(self, times: npt.NDArray[np.int64]) -> None:
        """Counts moments [N]."""
        if len(times):
            low, high = int(times.min()), int(times.max())
            self.times = (low, high) if self.times is None else (min(low, self.times[0]), max(high, self.times[1]))

    def propensity_report(self) -> PropensityReport:
        """Returns what the propensities are like."""
        if self._propensities is None:
            return PropensityReport(minimum=None, maximum=None, quantiles={}, out_of_range=self.out_of_range)
        low, high = self._propensities
        rows = self._by_top_bits.cumsum()
        quantiles = {}
        for share in _QUANTILES:
            bucket = int(np.searchsorted(rows, np.ceil(share * rows[-1])))
            upper = float(np.array([(bucket + 1) << 16], np.uint32).view(np.float32)[0])
            quantiles[f"{share:.0%}"] = min(max(upper, low), high)
        return PropensityReport(minimum=low, maximum=high, quantiles=quantiles, out_of_range=self.out_of_range)

    def time_texts(self) -> tuple[str | None, str | None]:
        """Returns the first and the last moment as ISO text."""
        return (None, None) if self.times is None else (text_of_moment(self.times[0]), text_of_moment(self.times[1]))


def _spread(support: list[int]) -> str:
    if not support:
        return "no rows"
    least, most = min(support), max(support)
    return f"{least:,} to {most:,} rows each" if least < most else f"{most:,} rows each"
