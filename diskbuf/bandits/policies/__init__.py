"""Policies over arms, which tell how probable the arm was that they chose."""

from diskbuf.bandits.policies.bandit_policy import BanditPolicy

__all__ = ["BanditPolicy"]
