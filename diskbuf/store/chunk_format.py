"""The contract of a layout: how whole chunks are stored as objects. An object is a file, or what is behind a key.

Knows names and bytes, and reads and writes nothing. Rows are handed in and out as their raw arrays; whoever keeps those
is somebody else.
"""

import abc
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from diskbuf.store.layout import ColumnLayout


class ChunkFormat(abc.ABC):
    """How chunks are stored as objects. An object holds one chunk of all columns of a group.

    Columns of one group have the same `chunk_rows`. The name of an object tells its group and chunk, and nothing else
    does: rows have the same ids wherever they are stored.

    Args:
        layouts: The columns, in spec order.
    """

    has_fixed_size = False
    """Whether an object has the `chunk_bytes` of its column, whatever is in it."""

    def __init__(self, layouts: Sequence[ColumnLayout]) -> None:
        self.layouts = tuple(layouts)

    @property
    @abc.abstractmethod
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Which columns, by their place in `layouts`, are in one object; each is in one group."""

    @abc.abstractmethod
    def object_name(self, group: int, chunk: int) -> str:
        """Name of an object, with "/" between folders, below the store's folder or URL."""

    @abc.abstractmethod
    def chunk_of_name(self, name: str) -> tuple[int, int] | None:
        """(group, chunk) of an object's name, None when it isn't one's."""

    @abc.abstractmethod
    def encode(self, group: int, chunk: int, rows: Sequence[NDArray[Any]]) -> bytes | memoryview:
        """Returns the object of a chunk.

        Args:
            group: Which group.
            chunk: Number of the chunk.
            rows: For each column of the group [n, lanes, *shape], the chunk's first n rows, n from 1 to `chunk_rows`.

        Returns:
            Its bytes. Where a layout has only chunks of full length, the rows that aren't there yet are zeros.
        """

    @abc.abstractmethod
    def decode(self, group: int, chunk: int, data: bytes | memoryview, into: Sequence[NDArray[Any] | None]) -> None:
        """Reads an object back.

        Args:
            group: Which group.
            chunk: Number of the chunk.
            data: The object, all of its bytes.
            into: For each column of the group [n, lanes, *shape], C-contiguous, where the chunk's first n rows go; None
                for a column that isn't wanted, which then costs as little as the layout allows.

        Raises:
            ValueError: When the bytes aren't an object of that chunk with at least n rows, saying why; what is in
                `into` is then undefined.
        """

    @abc.abstractmethod
    def documents(self) -> dict[str, Any]:
        """The zarr v3 metadata of arrays by path, their length 0; none where rows are not in zarr arrays."""

    def raw_offsets(self, group: int, chunk: int, data: bytes | memoryview) -> list[int | None]:  # noqa: ARG002
        """Tells where an object holds chunks as they are, so that they can be mapped instead of decoded.

        Args:
            group: Which group.
            chunk: Number of the chunk.
            data: The object, all of its bytes, which `decode` takes.

        Returns:
            For each column of the group the offset, a multiple of the page size, from where `chunk_bytes` bytes of the
            object are the column's raw chunk, C-order and every row of it; None where there is no such place.

        Raises:
            ValueError: As `decode` does.
        """
        return [None] * len(self.groups[group])
