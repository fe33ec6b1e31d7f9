"""Bandit environments: contexts, arms and rewards, with the best arm of each context for regret."""

from diskbuf.bandits.environments import environment_utilities, wheel_environment
from diskbuf.bandits.environments.bandit_environment import BanditEnvironment
from diskbuf.bandits.environments.bernoulli_environment import BernoulliEnvironment
from diskbuf.bandits.environments.classification_environment import ClassificationEnvironment
from diskbuf.bandits.environments.drifting_linear_environment import DriftingLinearEnvironment
from diskbuf.bandits.environments.environment_utilities import (
    LinearNormalMultipleRewards,
    LinearNormalReward,
    RewardFunction,
)
from diskbuf.bandits.environments.piecewise_stochastic_environment import PiecewiseStochasticEnvironment
from diskbuf.bandits.environments.random_bandit_environment import RandomBanditEnvironment
from diskbuf.bandits.environments.stationary_stochastic_environment import StationaryStochasticEnvironment
from diskbuf.bandits.environments.stationary_stochastic_structured_environment import (
    LinearNormalStructuredReward,
    StationaryStochasticStructuredEnvironment,
    StructuredRewardFunction,
)
from diskbuf.bandits.environments.wheel_environment import WheelEnvironment

__all__ = [
    "BanditEnvironment",
    "BernoulliEnvironment",
    "ClassificationEnvironment",
    "DriftingLinearEnvironment",
    "LinearNormalMultipleRewards",
    "LinearNormalReward",
    "LinearNormalStructuredReward",
    "PiecewiseStochasticEnvironment",
    "RandomBanditEnvironment",
    "RewardFunction",
    "StationaryStochasticEnvironment",
    "StationaryStochasticStructuredEnvironment",
    "StructuredRewardFunction",
    "WheelEnvironment",
    "environment_utilities",
    "wheel_environment",
]
