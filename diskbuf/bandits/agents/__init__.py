"""Bandit agents: what learns which arm to pull."""

from diskbuf.bandits.agents.bandit_agent import BanditAgent
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
    "BoltzmannAgent",
    "DropoutThompsonSamplingAgent",
    "GreedyRewardPredictionAgent",
    "NeuralBoltzmannAgent",
    "NeuralEpsilonGreedyAgent",
    "RewardLossInfo",
]
