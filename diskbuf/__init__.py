"""A persistent uniform replay buffer: reinforcement-learning experience kept on disk and fed to training.

A buffer is a store on disk. Steps added to it survive the process that added them, another process reads them while
they are written, and the same script run again goes on where it stopped:

    >>> import tempfile
    >>> import numpy as np
    >>> import diskbuf
    >>> spec = {"observation": diskbuf.ArraySpec([4], "float32"), "action": diskbuf.ArraySpec([], "int64")}
    >>> step = {"observation": np.zeros([8, 4], "float32"), "action": np.arange(8)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/steps.zarr"
    ...     with diskbuf.UniformReplayBuffer(spec, batch_size=8, max_length=1000, path=path) as buffer:
    ...         for _ in range(10):
    ...             buffer.add_batch(step)
    ...     with diskbuf.open(path) as buffer:
    ...         steps, info = buffer.get_next(sample_batch_size=32, num_steps=2)
    >>> steps["observation"].shape
    (32, 2, 4)

Importing diskbuf imports nothing else: each name below is fetched from its module when it is first used.
"""

import importlib
from typing import TYPE_CHECKING

from diskbuf.version import __version__

if TYPE_CHECKING:
    from diskbuf import (
        agents,
        drivers,
        environments,
        errors,
        metrics,
        networks,
        policies,
        specs,
        training,
        trajectories,
    )
    from diskbuf.copying import CopyReport, copy
    from diskbuf.episode_table import episodes
    from diskbuf.errors import (
        BusyError,
        ClosedError,
        DiskbufError,
        EmptyBufferError,
        EndOfLogError,
        MissingExtraError,
        OptionError,
        ReadOnlyError,
        SpecError,
        StoreAccessError,
        StoreCorruptError,
        StoreError,
        StoreExistsError,
        StoreFormatError,
        StoreLockedError,
        StoreLockUnsupportedError,
        StoreMismatchError,
        StoreNotFoundError,
        StoreUnreachableError,
        WindowError,
    )
    from diskbuf.maintenance import Fault, RepairReport, VerifyReport, repair, verify
    from diskbuf.merging import MergeReport, merge
    from diskbuf.options import ReadOptions, StoreOptions
    from diskbuf.replay_buffers.uniform import BufferInfo, UniformReplayBuffer, open
    from diskbuf.specs import ArraySpec, BoundedArraySpec
    from diskbuf.splitting import SplitReport, split

# Where each name lives; a module stands for itself. The import block above and __all__ say the same to type checkers.
_MODULES = {
    "ArraySpec": "diskbuf.specs",
    "BoundedArraySpec": "diskbuf.specs",
    "BufferInfo": "diskbuf.replay_buffers.uniform",
    "BusyError": "diskbuf.errors",
    "ClosedError": "diskbuf.errors",
    "CopyReport": "diskbuf.copying",
    "DiskbufError": "diskbuf.errors",
    "EmptyBufferError": "diskbuf.errors",
    "EndOfLogError": "diskbuf.errors",
    "Fault": "diskbuf.maintenance",
    "MergeReport": "diskbuf.merging",
    "MissingExtraError": "diskbuf.errors",
    "OptionError": "diskbuf.errors",
    "ReadOnlyError": "diskbuf.errors",
    "ReadOptions": "diskbuf.options",
    "RepairReport": "diskbuf.maintenance",
    "SpecError": "diskbuf.errors",
    "SplitReport": "diskbuf.splitting",
    "StoreAccessError": "diskbuf.errors",
    "StoreCorruptError": "diskbuf.errors",
    "StoreError": "diskbuf.errors",
    "StoreExistsError": "diskbuf.errors",
    "StoreFormatError": "diskbuf.errors",
    "StoreLockUnsupportedError": "diskbuf.errors",
    "StoreLockedError": "diskbuf.errors",
    "StoreMismatchError": "diskbuf.errors",
    "StoreNotFoundError": "diskbuf.errors",
    "StoreOptions": "diskbuf.options",
    "StoreUnreachableError": "diskbuf.errors",
    "UniformReplayBuffer": "diskbuf.replay_buffers.uniform",
    "VerifyReport": "diskbuf.maintenance",
    "WindowError": "diskbuf.errors",
    "agents": "diskbuf.agents",
    "copy": "diskbuf.copying",
    "drivers": "diskbuf.drivers",
    "environments": "diskbuf.environments",
    "episodes": "diskbuf.episode_table",
    "errors": "diskbuf.errors",
    "merge": "diskbuf.merging",
    "metrics": "diskbuf.metrics",
    "networks": "diskbuf.networks",
    "open": "diskbuf.replay_buffers.uniform",
    "policies": "diskbuf.policies",
    "repair": "diskbuf.maintenance",
    "specs": "diskbuf.specs",
    "split": "diskbuf.splitting",
    "training": "diskbuf.training",
    "trajectories": "diskbuf.trajectories",
    "verify": "diskbuf.maintenance",
}

__all__ = [
    "ArraySpec",
    "BoundedArraySpec",
    "BufferInfo",
    "BusyError",
    "ClosedError",
    "CopyReport",
    "DiskbufError",
    "EmptyBufferError",
    "EndOfLogError",
    "Fault",
    "MergeReport",
    "MissingExtraError",
    "OptionError",
    "ReadOnlyError",
    "ReadOptions",
    "RepairReport",
    "SpecError",
    "SplitReport",
    "StoreAccessError",
    "StoreCorruptError",
    "StoreError",
    "StoreExistsError",
    "StoreFormatError",
    "StoreLockUnsupportedError",
    "StoreLockedError",
    "StoreMismatchError",
    "StoreNotFoundError",
    "StoreOptions",
    "StoreUnreachableError",
    "UniformReplayBuffer",
    "VerifyReport",
    "WindowError",
    "__version__",
    "agents",
    "copy",
    "drivers",
    "environments",
    "episodes",
    "errors",
    "merge",
    "metrics",
    "networks",
    "open",
    "policies",
    "repair",
    "specs",
    "split",
    "training",
    "trajectories",
    "verify",
]


if not TYPE_CHECKING:  # a type checker that saw __getattr__ would let every misspelt name pass

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(_MODULES[name])
        value = module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)
        globals()[name] = value  # the next use doesn't come here
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
