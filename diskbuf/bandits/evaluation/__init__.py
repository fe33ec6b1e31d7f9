"""What a policy would have earned, estimated from a log that another policy collected: off-policy evaluation."""

from diskbuf.bandits.evaluation.estimators import (
    IPS,
    SNIPS,
    ClippedIPS,
    DirectMethod,
    DoublyRobust,
    DRos,
    Estimator,
    Replay,
    SelfNormalizedDR,
    SwitchDR,
)
from diskbuf.bandits.evaluation.evaluated_policy import LoggedColumn
from diskbuf.bandits.evaluation.off_policy import evaluate
from diskbuf.bandits.evaluation.results import Diagnostics, Estimate, Evaluation
from diskbuf.bandits.evaluation.reward_models import RewardModel, RidgeRewardModel, SklearnRewardModel

__all__ = [
    "IPS",
    "SNIPS",
    "ClippedIPS",
    "DRos",
    "Diagnostics",
    "DirectMethod",
    "DoublyRobust",
    "Estimate",
    "Estimator",
    "Evaluation",
    "LoggedColumn",
    "Replay",
    "RewardModel",
    "RidgeRewardModel",
    "SelfNormalizedDR",
    "SklearnRewardModel",
    "SwitchDR",
    "evaluate",
]
