"""Records of what was measured, and how two things are timed against each other on a noisy machine."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """What a figure counts.

    Attributes:
        label: How it is written behind the figure.
        more_is_better: Whether it is a rate; else it is a cost.
    """

    label: str
    more_is_better: bool = False

    def total(self, values: Sequence[float]) -> float:
        """The figure of all rounds, of the same work each, taken together."""
        return statistics.harmonic_mean(values) if self.more_is_better else statistics.fmean(values)

    def best(self, values: Sequence[float]) -> float:
        """The figure that was disturbed least."""
        return max(values) if self.more_is_better else min(values)


MICROSECONDS = Unit(label="µs")
MILLISECONDS = Unit(label="ms")
SECONDS = Unit(label="s")
MEGABYTES = Unit(label="MB")
STEPS_PER_SECOND = Unit(label="steps/s", more_is_better=True)
GIGABYTES_PER_SECOND = Unit(label="GB/s", more_is_better=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """What a ratio, or a figure that has no peer, is to keep to."""

    at_most: float | None = None
    at_least: float | None = None

    def is_met(self, value: float) -> bool:
        """Whether a value keeps to it."""
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    def __str__(self) -> str:
        return f"≤ {self.at_most:g}" if self.at_most is not None else f"≥ {self.at_least:g}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One row of the table.

    Attributes:
        name: Names the row in the JSON.
        what: The same for people.
        unit: Unit of `ours` and `peer`.
        ours: Median over the rounds.
        ours_best: Best of the rounds: that which was disturbed least.
        rounds: How many rounds.
        peer: What it is measured against, for people.
        peer_figure: Median over the rounds.
        peer_best: Best of the rounds.
        ratio: Median over the rounds of ours / peer, both from the same round.
        ratio_min: Smallest of them.
        ratio_max: Largest of them.
        ratio_of_best: Best of ours / best of the peer: what is left when the machine disturbs neither.
        ratio_of_totals: Ours / peer over all rounds together (of rates: over all the time): rare costs count in full.
        target: What `ratio` is to keep to, or `ours` when there is no peer; None for figures that only inform.
    """

    name: str
    what: str
    unit: Unit
    ours: float
    ours_best: float
    rounds: int
    peer: str | None = None
    peer_figure: float | None = None
    peer_best: float | None = None
    ratio: float | None = None
    ratio_min: float | None = None
    ratio_max: float | None = None
    ratio_of_best: float | None = None
    ratio_of_totals: float | None = None
    target: Target | None = None

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met, None without one."""
        return None if self.target is None else self.target.is_met(self.ours if self.ratio is None else self.ratio)

    def to_json(self) -> dict[str, Any]:
        """The row as a JSON object."""
        row = dataclasses.asdict(self)
        row["unit"] = self.unit.label
        row["target"] = None if self.target is None else str(self.target)
        row["is_met"] = self.is_met
        return row


def single(name: str, what: str, *, figures: Sequence[float], unit: Unit, target: Target | None = None) -> Record:
    """Returns the record of something that has no peer, from one figure a round."""
    return Record(
        name=name,
        what=what,
        unit=unit,
        ours=statistics.median(figures),
        ours_best=unit.best(figures),
        rounds=len(figures),
        target=target,
    )


def against(
    name: str,
    what: str,
    *,
    ours: Sequence[float],
    peer: str,
    peer_figures: Sequence[float],
    unit: Unit,
    target: Target | None = None,
) -> Record:
    """Returns the record of something and its peer, from one figure of each a round."""
    ratios = [mine / theirs for mine, theirs in zip(ours, peer_figures, strict=True)]
    return Record(
        name=name,
        what=what,
        unit=unit,
        ours=statistics.median(ours),
        ours_best=unit.best(ours),
        rounds=len(ratios),
        peer=peer,
        peer_figure=statistics.median(peer_figures),
        peer_best=unit.best(peer_figures),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        ratio_of_best=unit.best(ours) / unit.best(peer_figures),
        ratio_of_totals=unit.total(ours) / unit.total(peer_figures),
        target=target,
    )


def interleave(contenders: Mapping[str, Callable[[], float]], *, rounds: int) -> dict[str, list[float]]:
    """Lets contenders take turns, every other round in reverse, so that what drifts hits them alike.

    Args:
        contenders: Each does its work once, times it itself and returns a figure.
        rounds: How often each has its turn.

    Returns:
        For each contender its [rounds] figures.
    """
    figures: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        turns = list(contenders.items())
        for name, contender in turns if number % 2 == 0 else reversed(turns):
            figures[name].append(contender())
    return figures


def seconds_per_call(call: Callable[[], object], *, calls: int) -> float:
    """Times `calls` calls and returns the mean of one."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def table(records: Sequence[Record]) -> str:
    """Lays the records out for a terminal."""
    rows = [("what", "ours (best)", "peer", "ratio (min to max; best, total)", "target", "met")]
    for record in records:
        ratio = peer = ""
        if record.ratio is not None and record.peer_figure is not None and record.peer_best is not None:
            spread = f"{record.ratio_min:.2f} to {record.ratio_max:.2f}"
            ratio = f"{record.ratio:.2f} ({spread}; {record.ratio_of_best:.2f}, {record.ratio_of_totals:.2f})"
            peer = f"{_figure(record.peer_figure, record.peer_best, record.unit)}, {record.peer}"
        target = "" if record.target is None else str(record.target)
        met = {None: "", True: "yes", False: "NO"}[record.is_met]
        rows.append((record.what, _figure(record.ours, record.ours_best, record.unit), peer, ratio, target, met))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def _figure(median: float, best: float, unit: Unit) -> str:
    return f"{_digits(median)} ({_digits(best)}) {unit.label}"


def _digits(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
