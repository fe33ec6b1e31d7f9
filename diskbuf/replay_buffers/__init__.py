"""Replay buffers: the API over the store.

Importing this imports nothing else: each name below is fetched from its module when it is first used. Those that stand
in for TF-Agents' classes import TensorFlow when one is made.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diskbuf.replay_buffers.tf_agents import BanditReplayBuffer, PyUniformReplayBuffer, TFUniformReplayBuffer
    from diskbuf.replay_buffers.uniform import UniformReplayBuffer

_MODULES = {
    "BanditReplayBuffer": "diskbuf.replay_buffers.tf_agents",
    "PyUniformReplayBuffer": "diskbuf.replay_buffers.tf_agents",
    "TFUniformReplayBuffer": "diskbuf.replay_buffers.tf_agents",
    "UniformReplayBuffer": "diskbuf.replay_buffers.uniform",
}

__all__ = ["BanditReplayBuffer", "PyUniformReplayBuffer", "TFUniformReplayBuffer", "UniformReplayBuffer"]


if not TYPE_CHECKING:  # a type checker that saw __getattr__ would let every misspelt name pass

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value  # the next use doesn't come here
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
