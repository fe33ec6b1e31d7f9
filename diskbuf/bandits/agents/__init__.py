"""Bandit agents: what learns which arm to pull."""

from diskbuf.bandits.agents.bandit_agent import BanditAgent
from diskbuf.bandits.agents.bernoulli_thompson_sampling_agent import BernoulliThompsonSamplingAgent
from diskbuf.bandits.agents.exp3_agent import Exp3Agent
from diskbuf.bandits.agents.linear_agents import LinearThompsonSamplingAgent, LinearUCBAgent
from diskbuf.bandits.agents.mixture_agents import Exp3MixtureAgent, StaticMixtureAgent
from diskbuf.bandits.agents.neural_linucb_agent import NeuralLinUCBAgent
from diskbuf.bandits.agents.reward_prediction_agents import (
    BoltzmannAgent,
    DropoutThompsonSamplingAgent,
    GreedyRewardPredictionAgent,
    NeuralBoltzmannAgent,
    NeuralEpsilonGreedyAgent,
    RewardLossInfo,
)

__all__ = [
    "BanditAgent",
    "BernoulliThompsonSamplingAgent",
    "BoltzmannAgent",
    "DropoutThompsonSamplingAgent",
    "Exp3Agent",
    "Exp3MixtureAgent",
    "GreedyRewardPredictionAgent",
    "LinearThompsonSamplingAgent",
    "LinearUCBAgent",
    "NeuralBoltzmannAgent",
    "NeuralEpsilonGreedyAgent",
    "NeuralLinUCBAgent",
    "RewardLossInfo",
    "StaticMixtureAgent",
]
