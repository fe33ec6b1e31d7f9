"""Networks: what maps observations to the values of actions. Keras builds them, and any Keras model will do."""

from diskbuf.networks.q_network import QNetwork

__all__ = ["QNetwork"]
