"""Policies: what chooses actions, and the spec of the rows it collects."""

from diskbuf.policies.policy import Policy
from diskbuf.policies.random_policy import RandomPolicy

__all__ = ["Policy", "RandomPolicy"]
