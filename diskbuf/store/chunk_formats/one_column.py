"""What layouts share that store each column by itself, as a zarr array: the names of its objects."""

import functools

from diskbuf.store.chunk_format import ChunkFormat
from diskbuf.store.layout import ColumnLayout


class OneColumnAnObject(ChunkFormat):
    """A layout whose objects each hold a chunk of one column, under the keys of a zarr array."""

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Each column by itself."""
        return tuple((number,) for number in range(len(self.layouts)))

    def object_name(self, group: int, chunk: int) -> str:
        """``<file path>/c.<chunk>.0.0``, as for a raw chunk."""
        column = self.layouts[group]
        return f"{column.file_path}/{column.file_name(chunk)}"

    def chunk_of_name(self, name: str) -> tuple[int, int] | None:
        """Looks for the column, then reads the number."""
        folder, _, file = name.rpartition("/")
        group = self._group_of_folder.get(folder)
        if group is None:
            return None
        chunk = self.layouts[group].chunk_of_name(file)
        return None if chunk is None else (group, chunk)

    @functools.cached_property
    def _group_of_folder(self) -> dict[str, int]:
        return {column.file_path: number for number, column in enumerate(self.layouts)}


def check_rows(column: ColumnLayout, chunk: int, shape: tuple[int, ...]) -> int:
    """Checks the shape of a chunk's first rows.

    Returns:
        How many rows that is.

    Raises:
        ValueError: When it isn't [n, lanes, *shape] with n from 1 to `chunk_rows`.
    """
    if shape[1:] != (column.lanes, *column.shape) or not 1 <= shape[0] <= column.chunk_rows:
        raise ValueError(
            f"rows of {column.path!r}, chunk {chunk}, must be [1 to {column.chunk_rows}, {column.lanes}, "
            f"{', '.join(map(str, column.shape))}], got {list(shape)}."
        )
    return shape[0]
