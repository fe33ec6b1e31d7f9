"""A store's rows for executors that gather them by themselves: its mappings, and the words that say what is in them.

Such an executor reads the window from `words`, gathers, and then looks at both arrays once more: what it gathered
counts when nothing moved in between. It sees no file and calls no Python.
"""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.store.layout import ColumnLayout

ATTACHED_TO, DETACH_AT, DETACHED_TO, VIEW, LIMITS = 0, 1, 2, 3, 8
"""Words of `MappedView.limits`: ids below the first are attached; from a window that begins at the second on, chunks
have to be let go of; below the third they were; the number of this view, which changes when a new one is needed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MappedRows:
    """One column as one array.

    Attributes:
        flat: [rows, *shape], row ``offset(id) + lane``; None for rows of no bytes.
        layout: How the column is cut into chunks.
        ring_rows: Ids after which a ring begins again; ``offset(id)`` is ``id % ring_rows * lanes``. None for a column
            that is never overwritten, where it is ``id * lanes - first_row``.
        first_row: See `ring_rows`.
    """

    flat: NDArray[Any] | None
    layout: ColumnLayout
    ring_rows: int | None
    first_row: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class MappedView:
    """All columns, and what says which rows of them count.

    The window is ``[max(floor, next_id - max_length), next_id)``, floor and next id being `header.FLOOR` and
    `header.NEXT` of `words`. It may be gathered while ``words[EPOCH] == epoch``, ``limits[VIEW] == view``,
    ``next_id <= limits[ATTACHED_TO]`` and ``first_id < limits[DETACH_AT]``. Rows were valid from
    ``max(floor, next_id - keeps, limits[DETACHED_TO])`` on, as found afterwards.

    Attributes:
        columns: The columns, in spec order.
        words: The live header; changes under the reader.
        limits: What is attached; changes under the reader.
        epoch: The epoch that the columns belong to.
        view: The number of this view.
        max_length: Most ids in the window.
        lowest: The floor to use instead of the header's, where history is read.
        keeps: How many ids behind the next one are still whole.
        lanes: Number of lanes.
        runs: First id of each run, ascending.
    """

    columns: list[MappedRows]
    words: NDArray[np.int64]
    limits: NDArray[np.int64]
    epoch: int
    view: int
    max_length: int
    lowest: int | None
    keeps: int
    lanes: int
    runs: tuple[int, ...]
