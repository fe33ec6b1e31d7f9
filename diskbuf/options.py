"""How a store lays out and syncs its files."""

import dataclasses
import math
import os
from typing import Any, Literal, get_args

from diskbuf.errors import OptionError

Fsync = Literal["interval", "always", "never"]
Layout = Literal["zarr", "arrow"]

IN_MEMORY = ":memory:"
"""The `cache_dir` that keeps chunks in memory, and nothing on the disk."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreOptions:
    """How a store lays out and syncs its files.

    Layout, codec and sizes are fixed when the store is created.

    Attributes:
        chunk_bytes: Largest size of a chunk in bytes, before it is compressed, at least 1. A chunk holds at least one
            step, however large that is.
        fsync: When appended steps are synced to the disk, so that they survive a power cut. "interval" syncs every
            `fsync_seconds` on a background thread, "always" before each `add_batch` returns, "never" only at
            `flush()` and `close()`. A killed process loses nothing in any of them.
        fsync_seconds: Seconds between two background syncs, above 0.
        lock: Whether a writer takes the store's lock. False is for file systems that don't lock files (some network
            ones): the caller then makes sure that one process writes. Two that do overwrite each other's steps.
        layout: How chunks that are full are stored: "zarr" for a zarr array a leaf, "arrow" for Arrow IPC files of all
            leaves, which pandas, Polars, DuckDB and pyarrow.dataset read as they are.
        codec: How chunks that are full are compressed; None for not at all. With "zarr" one of "zstd", "blosc" and
            "lz4", or a zarr codec object or several; each chunk is then a shard of inner chunks. With "arrow" "zstd" or
            "lz4". The newest chunk stays uncompressed until it is full, or the buffer is closed.
        level: How hard the codec tries; None for its usual level.
        shard_bytes: Another name for `chunk_bytes`, where there is a codec; None takes that one.
        inner_rows: Ids in an inner chunk of a shard, a power of two; None for about 256 KiB. What reads a few steps
            straight from a shard decodes that many.

    Raises:
        OptionError: When a value is outside its rule.
    """

    chunk_bytes: int = 16 * 2**20
    fsync: Fsync = "interval"
    fsync_seconds: float = 1.0
    lock: bool = True
    layout: Layout = "zarr"
    codec: Any = None
    level: int | None = None
    shard_bytes: int | None = None
    inner_rows: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.chunk_bytes, bool) or not isinstance(self.chunk_bytes, int) or self.chunk_bytes < 1:
            raise OptionError(
                f"chunk_bytes must be an int of at least 1, got {self.chunk_bytes!r}. Leave it out for 16 MiB."
            )
        if self.fsync not in get_args(Fsync):
            raise OptionError(f"fsync must be one of {', '.join(map(repr, get_args(Fsync)))}, got {self.fsync!r}.")
        _check_seconds("fsync_seconds", self.fsync_seconds)
        if not isinstance(self.lock, bool):
            raise OptionError(f"lock must be True or False, got {self.lock!r}.")
        if self.layout not in get_args(Layout):
            raise OptionError(f"layout must be one of {', '.join(map(repr, get_args(Layout)))}, got {self.layout!r}.")
        for name in ("shard_bytes", "inner_rows"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} must be an int of at least 1, got {value!r}. Leave it out.")
            if self.codec is None or self.layout != "zarr":
                raise OptionError(f"{name} must be left out where there is no shard, got {value!r}. Name a codec.")
        if self.level is not None and self.codec is None:
            raise OptionError(f"level must be left out without a codec, got {self.level!r}. Name a codec.")

    @property
    def most_chunk_bytes(self) -> int:
        """Largest size of a chunk before it is compressed."""
        return self.chunk_bytes if self.shard_bytes is None else self.shard_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How chunks are read that are not files of raw rows here: compressed ones, and those of a remote store.

    They are fetched and decoded once, kept as files of raw rows, and read from there. What isn't used for longest goes.

    Attributes:
        cache_bytes: Most bytes of raw chunks that are kept, at least 1. All processes that use one folder share them.
        cache_dir: Folder for them; None for ``diskbuf`` in the user's cache folder (``$XDG_CACHE_HOME`` or
            ``~/.cache``), ":memory:" to keep them in memory, for this buffer alone.
        prefetch_chunks: Chunks of each leaf that are fetched ahead of a reader that goes through them in order, at
            least 0.
        concurrency: Requests to a remote store that are under way at once, at least 1.
        retries: How often a request that failed is made again, at least 0; each time after a longer wait, of a tenth of
            a second at first and of five seconds at most. 8 sit out some ten seconds, 20 more than a minute.
        follow_seconds: Seconds, above 0, after which a remote store that is followed is asked for what is new.

    Raises:
        OptionError: When a value is outside its rule.
    """

    cache_bytes: int = 8 * 2**30
    cache_dir: str | os.PathLike[str] | None = None
    prefetch_chunks: int = 4
    concurrency: int = 16
    retries: int = 8
    follow_seconds: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("cache_bytes", 1), ("prefetch_chunks", 0), ("concurrency", 1), ("retries", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise OptionError(f"{name} must be an int of at least {least}, got {value!r}.")
        _check_seconds("follow_seconds", self.follow_seconds)
        if isinstance(self.cache_dir, str) and self.cache_dir.startswith(":") and self.cache_dir != IN_MEMORY:
            raise OptionError(f"cache_dir must be a folder, ':memory:' or None, got {self.cache_dir!r}.")
        if self.cache_dir is not None and not (
            isinstance(self.cache_dir, str | os.PathLike) and os.fspath(self.cache_dir)
        ):
            raise OptionError(f"cache_dir must be a folder, ':memory:' or None, got {self.cache_dir!r}.")


def _check_seconds(name: str, seconds: Any) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not (0 < seconds < math.inf):
        raise OptionError(f"{name} must be a number of seconds above 0, got {seconds!r}.")
