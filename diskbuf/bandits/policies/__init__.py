"""Policies over arms, which tell how probable the arm was that they chose."""

from diskbuf.bandits.policies.bandit_policy import BanditPolicy
from diskbuf.bandits.policies.reward_prediction_policies import (
    BoltzmannRewardPredictionPolicy,
    DropoutThompsonSamplingPolicy,
    EpsilonGreedyRewardPredictionPolicy,
    GreedyRewardPredictionPolicy,
)

__all__ = [
    "BanditPolicy",
    "BoltzmannRewardPredictionPolicy",
    "DropoutThompsonSamplingPolicy",
    "EpsilonGreedyRewardPredictionPolicy",
    "GreedyRewardPredictionPolicy",
]
