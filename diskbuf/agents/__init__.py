"""Agents: what learns from the rows of a buffer."""

from diskbuf.agents.dqn_agent import DdqnAgent, DqnAgent, DqnLossInfo, LossInfo
from diskbuf.agents.losses import element_wise_huber_loss, element_wise_squared_loss

__all__ = [
    "DdqnAgent",
    "DqnAgent",
    "DqnLossInfo",
    "LossInfo",
    "element_wise_huber_loss",
    "element_wise_squared_loss",
]
