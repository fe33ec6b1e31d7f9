"""Bandit agents: what learns which arm to pull."""

from diskbuf.bandits.agents.bandit_agent import BanditAgent

__all__ = ["BanditAgent"]
