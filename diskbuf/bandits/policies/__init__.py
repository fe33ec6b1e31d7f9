"""Policies over arms, which tell how probable the arm was that they chose."""

from diskbuf.bandits.policies.bandit_policy import BanditPolicy
from diskbuf.bandits.policies.bernoulli_thompson_sampling_policy import BernoulliThompsonSamplingPolicy
from diskbuf.bandits.policies.categorical_policy import CategoricalPolicy
from diskbuf.bandits.policies.linear_policies import LinearThompsonSamplingPolicy, LinearUCBPolicy
from diskbuf.bandits.policies.mixture_policy import MixturePolicy
from diskbuf.bandits.policies.neural_linucb_policy import NeuralLinUCBPolicy
from diskbuf.bandits.policies.reward_prediction_policies import (
    BoltzmannRewardPredictionPolicy,
    DropoutThompsonSamplingPolicy,
    EpsilonGreedyRewardPredictionPolicy,
    GreedyRewardPredictionPolicy,
)

__all__ = [
    "BanditPolicy",
    "BernoulliThompsonSamplingPolicy",
    "BoltzmannRewardPredictionPolicy",
    "CategoricalPolicy",
    "DropoutThompsonSamplingPolicy",
    "EpsilonGreedyRewardPredictionPolicy",
    "GreedyRewardPredictionPolicy",
    "LinearThompsonSamplingPolicy",
    "LinearUCBPolicy",
    "MixturePolicy",
    "NeuralLinUCBPolicy",
]
