"""Rows by id and then lane, put together to arrays [B, T, …]; what is missing or out of order is found."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import SpecError

_END = 2**62
"""Ids are below, so that those behind them are ints of 64 bits, too."""

Rows = tuple[NDArray[Any] | None, NDArray[Any] | None, list[NDArray[Any]]]
"""Ids [N], lanes [N], and leaves [N, *shape]."""


class Grid(NamedTuple):
    """Consecutive ids of all lanes.

    Attributes:
        leaves: [B, T, *shape] each.
        begins_run: Whether ids are missing before them.
    """

    leaves: list[NDArray[Any]]
    begins_run: bool


class Grids:
    """Grids of a table's rows.

    Args:
        blocks: The rows, in order.
        name: Of the source, for messages.
        lanes: The lanes, in order; None takes those of the first id, one where there is no column of them.
        first_id: The first id, where it is known.

    Attributes:
        lanes: The lanes; known behind the first grid.
        first_id: Id of the first row; known behind the first grid.
        run_starts: Stored ids behind missing ones.
    """

    def __init__(
        self, blocks: Iterable[Rows], *, name: str, lanes: Sequence[int] | None = None, first_id: int | None = None
    ) -> None:
        self._blocks = blocks
        self._name = name
        self._known_lanes = None if lanes is None else np.asarray(lanes)
        self.lanes: NDArray[Any] = np.zeros(1, np.int64) if lanes is None else np.asarray(lanes)
        self.first_id = first_id or 0
        self._is_begun = False
        self._rows = 0
        self._steps = 0
        self._segments: list[tuple[int, int]] = []  # an id in the source, and the id it is stored as
        self._expected = 0  # the id in the source that goes on from the last
        self.run_starts: list[int] = []

    @property
    def gaps(self) -> int:
        """How often ids were missing."""
        return len(self.run_starts)

    def stored(self, source_id: int) -> int:
        """Returns the id that one of the source is stored as, or would be."""
        place = self.first_id
        for begin, stored in self._segments:
            if source_id < begin:
                break
            place = stored + source_id - begin
        return min(place, self.first_id + self._steps)

    def blocks(self) -> Iterator[Grid]:
        """Yields the grids.

        Raises:
            SpecError: When a row is missing or out of order; names it.
        """
        rest: Rows | None = None
        for found in self._blocks:
            ids, lanes, leaves = found if rest is None else _joined(rest, found)
            count = len(leaves[0])
            if not count:
                continue
            if not self._is_begun:
                self._begin(ids, lanes)
            width = len(self.lanes)
            whole = count - count % width
            rest = None
            if whole < count:
                rest = _part(ids, lanes, leaves, whole, count)
            if whole:
                yield from self._grids(*_part(ids, lanes, leaves, 0, whole))
        if rest is not None:
            raise SpecError(
                f"the rows of {self._name} must be {len(self.lanes)} for each id, one a lane, but the last id has "
                f"{len(rest[2][0])}. Fill them in, or leave them out."
            )

    def _begin(self, ids: NDArray[Any] | None, lanes: NDArray[Any] | None) -> None:
        self._is_begun = True
        if self._known_lanes is None and lanes is not None:
            ends = np.flatnonzero(lanes[1:] == lanes[0] if ids is None else ids[1:] != ids[0])
            self.lanes = lanes[: int(ends[0]) + 1 if len(ends) else len(lanes)].astype(np.int64)
            if len(np.unique(self.lanes)) < len(self.lanes):
                raise SpecError(
                    f"the lanes of {self._name} must differ for each id, got {self.lanes.tolist()} for the first."
                )
        if ids is not None:
            if int(ids[0]) < 0:
                raise SpecError(f"ids of {self._name} must be at least 0, got {ids[0]} in row 0.")
            self.first_id = min(int(ids[0]), _END)

    def _grids(
        self, ids: NDArray[Any] | None, lanes: NDArray[Any] | None, leaves: list[NDArray[Any]]
    ) -> Iterator[Grid]:
        width = len(self.lanes)
        steps = len(leaves[0]) // width
        if lanes is not None:
            self._check(lanes.reshape(steps, width) == self.lanes, lanes, "lanes", f"{self.lanes.tolist()} for each id")
        cuts = [0]
        known = len(self.run_starts)
        if ids is not None:
            by_step = ids.reshape(steps, width)
            self._check(by_step < _END, ids, "ids", f"below 2**62, {_END}", advice="Number the rows anew.")
            self._check(by_step == by_step[:, :1], ids, "ids", "the same in all lanes")
            cuts += self._cuts(by_step[:, 0].astype(np.int64))
        starts = set(self.run_starts[known:])
        self._rows += steps * width
        for begin, end in zip(cuts, [*cuts[1:], steps], strict=True):
            if begin == end:
                continue
            at = self.first_id + self._steps
            begins_run = at in starts
            self._steps += end - begin
            yield Grid(
                [
                    leaf[begin * width : end * width].reshape(end - begin, width, *leaf.shape[1:]).swapaxes(0, 1)
                    for leaf in leaves
                ],
                begins_run,
            )

    def _cuts(self, ids: NDArray[np.int64]) -> list[int]:
        """Places in a block behind missing ids; notes which ids are stored as which."""
        expected = ids[0] if not self._segments else self._expected
        jumps = np.diff(ids, prepend=expected - 1)
        if (jumps < 1).any():
            at = int((jumps < 1).argmax())
            raise SpecError(
                f"the ids of {self._name} must ascend, got {ids[at]} in row {self._rows + at * len(self.lanes)}. "
                "Sort the rows by id and lane."
            )
        cuts = np.flatnonzero(jumps > 1).tolist()
        for cut in cuts:
            stored = self.first_id + self._steps + cut
            self.run_starts.append(stored)
            self._segments.append((int(ids[cut]), stored))
        if not self._segments:
            self._segments.append((int(ids[0]), self.first_id))
        self._expected = int(ids[-1]) + 1
        return cuts

    def _check(
        self,
        fits: NDArray[np.bool],
        values: NDArray[Any],
        what: str,
        rule: str,
        *,
        advice: str = "Sort the rows by id and lane, and fill in what is missing.",
    ) -> None:
        if not fits.all():
            at = int(fits.reshape(-1).argmin())
            raise SpecError(
                f"the {what} of {self._name} must be {rule}, got {values[at]} in row {self._rows + at}. {advice}"
            )


def _part(
    ids: NDArray[Any] | None, lanes: NDArray[Any] | None, leaves: list[NDArray[Any]], begin: int, end: int
) -> Rows:
    return (
        None if ids is None else ids[begin:end],
        None if lanes is None else lanes[begin:end],
        [leaf[begin:end] for leaf in leaves],
    )


def _joined(before: Rows, after: Rows) -> Rows:
    ids, lanes = (
        None if one is None or other is None else np.concatenate([one, other])
        for one, other in zip(before[:2], after[:2], strict=True)
    )
    return ids, lanes, [np.concatenate(pair) for pair in zip(before[2], after[2], strict=True)]
