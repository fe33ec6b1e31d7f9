"""Readers: a buffer's rows as the datasets of a training framework, and what is made of rows as they are read.

Importing this imports nothing else: each name below is fetched from its module when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diskbuf.readers.frame_stacks import frame_stacker, stack_frames
    from diskbuf.readers.pytorch import torch_dataset

_MODULES = {
    "frame_stacker": "diskbuf.readers.frame_stacks",
    "stack_frames": "diskbuf.readers.frame_stacks",
    "torch_dataset": "diskbuf.readers.pytorch",
}

__all__ = ["frame_stacker", "stack_frames", "torch_dataset"]


if not TYPE_CHECKING:  # a type checker that saw __getattr__ would let every misspelt name pass

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value  # the next use doesn't come here
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
