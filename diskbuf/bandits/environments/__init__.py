"""Bandit environments: contexts, arms and rewards, with the best arm of each context for regret."""

from diskbuf.bandits.environments.bandit_environment import BanditEnvironment

__all__ = ["BanditEnvironment"]
