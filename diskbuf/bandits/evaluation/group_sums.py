"""Sums over groups of rows, and intervals from drawing the groups again: a bootstrap that no log is too long for.

Rows that follow each other in the log form groups of the same size, at most 1,000 of them, and of each group only the
sums are kept. A bootstrap draws as many groups, with replacement, as there are, adds up their sums and works out the
estimate of these; an interval holds the middle of the estimates. A log of no more than 1,000 rows has groups of one
row, which is the ordinary bootstrap of Efron, "Bootstrap Methods: Another Look at the Jackknife" (1979), with the
percentile interval of Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), chapter 13. With longer groups
it is that of Carlstein, "The Use of Subseries Values for Estimating the Variance of a General Statistic from a
Stationary Sequence" (1986), which holds also where neighbouring rows depend on each other. Whole estimates are worked
out anew from each draw, so ratios of sums, such as SNIPS, are as well served as means.
"""

import itertools
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MOST_GROUPS = 1000
_DRAWN_AT_ONCE = 1 << 16  # numbers, 512 KB, which stay in the cache


class GroupSums:
    """Adds up terms of rows that come block by block.

    Args:
        most_rows: How many rows may come.
        most_groups: How many groups there may be.
    """

    def __init__(self, most_rows: int, *, most_groups: int = MOST_GROUPS) -> None:
        self._group_rows = max(1, -(-most_rows // most_groups))
        self._rows = 0
        self._sums: dict[str, list[Floats]] = {}

    def add(self, terms: Mapping[str, Floats], rows: int) -> None:
        """Takes the terms of the next rows, [N] arrays by name, the same names each time."""
        if not rows:
            return
        left = -self._rows % self._group_rows  # rows that still belong to the latest group
        starts = list(range(left, rows, self._group_rows))
        if left:
            starts.insert(0, 0)
        counts = np.array([end - start for start, end in itertools.pairwise([*starts, rows])], np.float64)
        sums = {name: np.add.reduceat(term, starts) for name, term in terms.items()}
        for name, each in [("rows", counts), *sums.items()]:
            parts = self._sums.setdefault(name, [])
            if left:
                parts[-1][-1] += each[0]
                each = each[1:]
            if len(each):
                parts.append(each)
        self._rows += rows

    def groups(self) -> dict[str, Floats]:
        """Returns the sums of each group, [G] by name, among them the number of "rows"."""
        return {name: np.concatenate(parts) for name, parts in self._sums.items()}


def drawn_again(groups: Mapping[str, Floats], rng: np.random.Generator, *, count: int) -> dict[str, Floats]:
    """Returns sums over groups drawn with replacement, [count] by name.

    Args:
        groups: Sums [G] by name.
        rng: What it draws with.
        count: How many draws of G groups.
    """
    names = list(groups)
    table = np.stack([groups[name] for name in names], axis=1)  # [G, S]
    number = len(table)
    at_once = max(1, _DRAWN_AT_ONCE // number)
    parts = []
    for first in range(0, count, at_once):
        draws = min(at_once, count - first)
        drawn = rng.integers(0, number, size=(draws, number), dtype=np.int32) + np.arange(draws)[:, None] * number
        times = np.bincount(drawn.ravel(), minlength=draws * number).reshape(draws, number)
        parts.append(times.astype(np.float64) @ table)
    sums = np.concatenate(parts)
    return {name: sums[:, column] for column, name in enumerate(names)}


def percentile_interval(values: Floats, confidence: float) -> tuple[float, float] | None:
    """Returns the ends of the middle part of [R] values, without those that are NaN; None if all are."""
    known = values[~np.isnan(values)]
    if not len(known):
        return None
    low, high = np.quantile(known, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
