"""Environments that speak in batched time steps, over Gymnasium."""

from diskbuf.environments import suite_gym
from diskbuf.environments.suite_gym import GymEnvironment

__all__ = ["GymEnvironment", "suite_gym"]
