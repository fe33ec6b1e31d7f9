"""Looking at a store again and again while somebody writes it: how fast it grows, and what its episodes earn."""

import collections
import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diskbuf.episode_table import NewEpisodes
from diskbuf.errors import ClosedError, SpecError, StoreCorruptError, StoreError, StoreNotFoundError, WindowError
from diskbuf.store.header import HEADER_BYTES
from diskbuf.store.layout import HEADER_FILE, LOCK_FILE, STATE_FOLDER
from diskbuf.store.lock import Holder, holder_of

if TYPE_CHECKING:
    from diskbuf.replay_buffers.uniform import UniformReplayBuffer

_RATE_SECONDS = 10.0
_STEPS_BACK = 2**16
_KEPT_RETURNS = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sight:
    """A store at one moment.

    Attributes:
        seconds: Since the watching began.
        is_there: Whether there is a store; without one the rest says nothing.
        first_id: Start of the window.
        next_id: End of the window, exclusive.
        lanes: Number of lanes.
        steps_per_second: Steps of all lanes, over the last ten seconds; None at the first look.
        overall_steps_per_second: The same since this store was first seen.
        disk_bytes: Bytes that the file system has set aside for its files; None of a remote one.
        writer: Who has it open for writing, or was killed while it had; None for nobody, and of a remote one.
        episodes: How many episodes have ended since it was first seen; None where nothing says where they end.
        new_returns: Returns of those that have ended since the last look, oldest first, at most the newest 100; at the
            first look of those that ended not long before.
    """

    seconds: float
    is_there: bool
    first_id: int = 0
    next_id: int = 0
    lanes: int = 0
    steps_per_second: float | None = None
    overall_steps_per_second: float | None = None
    disk_bytes: int | None = None
    writer: Holder | None = None
    episodes: int | None = None
    new_returns: tuple[float, ...] = ()

    @property
    def num_frames(self) -> int:
        """Steps of all lanes in the window."""
        return (self.next_id - self.first_id) * self.lanes


class Watcher:
    """Looks at a store as often as it is asked to, and reads only what is new.

    It goes on when the writer ends or is killed, when the window is cleared or moves on faster than it is looked at,
    and when another store takes the place.

    Args:
        path: The store's folder, or a URL.
        storage_options: What fsspec's file system of the URL's protocol takes.
        waits: Whether there need be no store yet.
        ends: Path of the bool leaf that ends an episode, as for `diskbuf.episodes`.
        reward: Path of the reward, as there.
        clock: Returns seconds; a test has one of its own.

    Raises:
        StoreNotFoundError: When there is no store, and it needn't be waited for.
        StoreError: When it can't be opened, like the others that `diskbuf.open` raises.
        SpecError: When `ends` or `reward` name a leaf that isn't there or of no use.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        waits: bool = False,
        ends: str | None = None,
        reward: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = path
        self._options = storage_options
        self._ends, self._reward = ends, reward
        self._clock = clock
        self._began = clock()
        self._buffer: UniformReplayBuffer | None = None
        self._file: tuple[int, int] | None = None
        self._episodes: NewEpisodes | None = None
        self._ended = 0
        self._seen: collections.deque[tuple[float, int]] = collections.deque()
        self._first_seen: tuple[float, int] | None = None
        try:
            self._open()
        except StoreNotFoundError:
            if not waits:
                raise

    def _open(self) -> None:
        from diskbuf.replay_buffers.uniform import open as open_buffer

        buffer = open_buffer(self._place, storage_options=self._options)
        try:
            self._episodes = NewEpisodes(buffer, ends=self._ends, reward=self._reward, most_steps=_STEPS_BACK)
        except SpecError:
            self._episodes = None
            if self._ends is not None or self._reward is not None:
                buffer.close()
                raise
        except BaseException:
            buffer.close()
            raise
        self._buffer, self._file = buffer, self._header_file(buffer.path)
        self._ended = 0
        self._seen.clear()
        self._first_seen = None

    def _header_file(self, path: Path | str) -> tuple[int, int] | None:
        """Which file the live header is: another store's is another one."""
        if isinstance(path, str):
            return None
        try:
            status = (path / STATE_FOLDER / HEADER_FILE).stat()
        except OSError:
            return None
        return (status.st_dev, status.st_ino) if status.st_size == HEADER_BYTES else None

    def look(self) -> Sight:
        """Looks at the store.

        Returns:
            What there is to see; without a store, when it has gone or hasn't come yet, only that.

        Raises:
            StoreCorruptError: When a chunk file is missing, short or has rotten.
            StoreError: When it can't be opened, like the others that `diskbuf.open` raises.
        """
        if self._buffer is not None and self._file != self._header_file(self._buffer.path):
            self.close()  # gone, or another one
        if self._buffer is None:
            try:
                self._open()
            except (StoreNotFoundError, StoreCorruptError):  # or half made
                return Sight(seconds=self._clock() - self._began, is_there=False)
        if self._buffer is None:
            raise RuntimeError("unreachable")
        try:
            return self._look(self._buffer)
        except (WindowError, ClosedError, StoreError, OSError):
            if self._file == self._header_file(self._buffer.path):
                raise
            self.close()  # it went while it was looked at
            return Sight(seconds=self._clock() - self._began, is_there=False)

    def _look(self, buffer: "UniformReplayBuffer") -> Sight:
        from diskbuf.inspection import disk_bytes_of

        buffer.refresh()
        first_id, next_id = buffer._opened().window()
        now = self._clock()
        returns = self._new_returns()
        recent, overall = self._rates(now, next_id, buffer.batch_size)
        folder = buffer.path if isinstance(buffer.path, Path) else None
        return Sight(
            seconds=now - self._began,
            is_there=True,
            first_id=first_id,
            next_id=next_id,
            lanes=buffer.batch_size,
            steps_per_second=recent,
            overall_steps_per_second=overall,
            disk_bytes=None if folder is None else disk_bytes_of(folder),
            writer=None if folder is None else holder_of(folder / STATE_FOLDER / LOCK_FILE),
            episodes=None if self._episodes is None else self._ended,
            new_returns=returns,
        )

    def _new_returns(self) -> tuple[float, ...]:
        if self._episodes is None:
            return ()
        ended = self._episodes.take()
        if self._first_seen is not None:
            self._ended += len(ended)
        returns: list[float] = ended["return"].drop_null().to_pylist()
        return tuple(returns[-_KEPT_RETURNS:])

    def _rates(self, now: float, next_id: int, lanes: int) -> tuple[float | None, float | None]:
        if self._first_seen is None:
            self._first_seen = (now, next_id)
        while len(self._seen) > 1 and self._seen[1][0] <= now - _RATE_SECONDS:
            self._seen.popleft()
        self._seen.append((now, next_id))
        return tuple(  # type: ignore[return-value]  # two of them
            None if now <= since else max(0, next_id - then) * lanes / (now - since)
            for since, then in (self._seen[0], self._first_seen)
        )

    def close(self) -> None:
        """Closes the store; closing twice is fine."""
        buffer, self._buffer, self._episodes = self._buffer, None, None
        if buffer is not None:
            buffer.close()
