"""Readers: a buffer's rows as the datasets of a training framework.

Importing this imports nothing else: each name below is fetched from its module when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diskbuf.readers.pytorch import torch_dataset

_MODULES = {"torch_dataset": "diskbuf.readers.pytorch"}

__all__ = ["torch_dataset"]


if not TYPE_CHECKING:  # a type checker that saw __getattr__ would let every misspelt name pass

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value  # the next use doesn't come here
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
