"""Where chunks go that can't be read where they are stored: files of their raw rows, which can be mapped."""

import abc


class NewChunk(abc.ABC):
    """Room for the raw rows of a chunk that is being fetched. Nobody else sees it before `keep`."""

    memory: memoryview
    """Writable bytes, zeros at first."""

    @abc.abstractmethod
    def keep(self, key: str) -> int:
        """Keeps what is in `memory` under a key, all of it or, after a kill at any moment, nothing.

        Returns:
            A descriptor of it, open for reading; the caller closes it.
        """

    @abc.abstractmethod
    def drop(self) -> None:
        """Gives the room back; does nothing after `keep`."""


class ChunkCache(abc.ABC):
    """Raw chunks by key. A key names one content for ever, so what is found under it is right."""

    @abc.abstractmethod
    def find(self, key: str, *, size: int) -> int | None:
        """Returns a descriptor of a chunk of `size` bytes, open for reading, which the caller closes; None without."""

    @abc.abstractmethod
    def new(self, size: int) -> NewChunk:
        """Makes room for a chunk of `size` bytes, at least 1, removing others that were not used for longest.

        Raises:
            OSError: When there is no room, or the folder can't be written, saying which and what to do.
        """
