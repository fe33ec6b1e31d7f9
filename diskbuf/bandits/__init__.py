"""Contextual bandits: environments, policies that tell their propensities, agents, metrics, and the trainer."""
