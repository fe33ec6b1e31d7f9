"""Metrics of bandits: regret, how often the arm wasn't the best, how far from greedy, and violated constraints."""

from diskbuf.bandits.metrics.regret import (
    ConstraintViolationsMetric,
    CumulativeRegretMetric,
    DistanceFromGreedyMetric,
    RegretMetric,
    SuboptimalArmsMetric,
)

__all__ = [
    "ConstraintViolationsMetric",
    "CumulativeRegretMetric",
    "DistanceFromGreedyMetric",
    "RegretMetric",
    "SuboptimalArmsMetric",
]
