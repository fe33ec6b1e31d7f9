"""Metrics: observers that count steps and episodes and average what comes of them, under TF-Agents' names."""

from diskbuf.metrics.counters import EnvironmentSteps, NumberOfEpisodes
from diskbuf.metrics.episodes import (
    AverageEpisodeLengthMetric,
    AverageReturnMetric,
    AverageReturnMultiMetric,
    MaxReturnMetric,
    MinReturnMetric,
)
from diskbuf.metrics.export import export_metrics
from diskbuf.metrics.metric import Metric

__all__ = [
    "AverageEpisodeLengthMetric",
    "AverageReturnMetric",
    "AverageReturnMultiMetric",
    "EnvironmentSteps",
    "MaxReturnMetric",
    "Metric",
    "MinReturnMetric",
    "NumberOfEpisodes",
    "export_metrics",
]
