"""How a store lays out and syncs its files."""

import dataclasses
import math
from typing import Literal, get_args

from diskbuf.errors import OptionError

Fsync = Literal["interval", "always", "never"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How a store lays out and syncs its files.

    Attributes:
        chunk_bytes: Largest size of a chunk file in bytes, at least 1; fixed when the store is created. A chunk holds
            at least one step, however large that is.
        fsync: When appended steps are synced to the disk, so that they survive a power cut. "interval" syncs every
            `fsync_seconds` on a background thread, "always" before each `add_batch` returns, "never" only at
            `flush()` and `close()`. A killed process loses nothing in any of them.
        fsync_seconds: Seconds between two background syncs, above 0.
        lock: Whether a writer takes the store's lock. False is for file systems that don't lock files (some network
            ones): the caller then makes sure that one process writes. Two that do overwrite each other's steps.

    Raises:
        OptionError: When a value is outside its rule.
    """

    chunk_bytes: int = 16 * 2**20
    fsync: Fsync = "interval"
    fsync_seconds: float = 1.0
    lock: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.chunk_bytes, bool) or not isinstance(self.chunk_bytes, int) or self.chunk_bytes < 1:
            raise OptionError(
                f"chunk_bytes must be an int of at least 1, got {self.chunk_bytes!r}. Leave it out for 16 MiB."
            )
        if self.fsync not in get_args(Fsync):
            raise OptionError(f"fsync must be one of {', '.join(map(repr, get_args(Fsync)))}, got {self.fsync!r}.")
        seconds = self.fsync_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not (0 < seconds < math.inf):
            raise OptionError(f"fsync_seconds must be a number of seconds above 0, got {seconds!r}.")
        if not isinstance(self.lock, bool):
            raise OptionError(f"lock must be True or False, got {self.lock!r}.")
