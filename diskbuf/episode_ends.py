"""Where episodes end: which row of a lane may be followed by which. Looks at arrays of a few columns; opens nothing.

A *piece* is a longest stretch of consecutive ids of one lane in which each row goes on where the row before it stopped:
an episode, or as much of one as there is. What says so is in the rows themselves, by the first of these that holds:

- The user names a bool leaf that is True at the last step of an episode: no row goes on after one with True.
- Leaves `step_type` and `next_step_type` (a `Trajectory`): a row goes on after another when its `step_type` is what the
  other's `next_step_type` said, and not FIRST, and the other one is no boundary (`step_type` LAST).
- A leaf `step_type` alone (a `TimeStep`): a row goes on after another unless it is FIRST or the other one is LAST.

Nothing goes on across the start of a run of the writer. So a row that is FIRST begins a piece whatever comes before it:
a driver that goes on after an exception of the environment stores MID and then FIRST.

The boundary of a `Trajectory` belongs to the episode whose final observation it holds and is the last row of its piece,
because it's the successor that the last transition is learned from. It is no transition itself, so no sequence starts
at it: single steps are never boundaries, and in a longer sequence only the last row can be one.
"""

import abc
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import SpecError
from diskbuf.store.layout import Leaf
from diskbuf.trajectories import StepType

_FIRST, _LAST = int(StepType.FIRST), int(StepType.LAST)

Bools = NDArray[np.bool]
Rows = Sequence[NDArray[Any]]
"""The columns that a rule needs, each [lanes, T], in the order of `EndRule.columns`."""


class EndRule(abc.ABC):
    """Says of rows whether one goes on where another stopped.

    Args:
        columns: Which columns it looks at, by their place in the spec.
        folder: Where in the spec its leaves are, `''` or a path that ends in `/`.
    """

    def __init__(self, columns: Sequence[int], *, folder: str = "") -> None:
        self.columns = tuple(columns)
        self.folder = folder

    @abc.abstractmethod
    def begins(self, before: Rows, rows: Rows) -> Bools:
        """Tells which rows begin a piece.

        Args:
            before: [lanes, T] each, the rows right before `rows`.
            rows: [lanes, T] each.

        Returns:
            [lanes, T].
        """

    @abc.abstractmethod
    def has_ended(self, rows: Rows) -> Bools:
        """Returns [lanes, T] whether a row that isn't a boundary is the last step of its episode."""

    @abc.abstractmethod
    def opens(self, rows: Rows) -> Bools | None:
        """Returns [lanes, T] whether a row is the first of its episode, None when rows don't tell."""

    def is_boundary(self, rows: Rows) -> Bools:
        """Returns [lanes, T] whether a row is no transition."""
        return np.zeros(rows[0].shape, np.bool)


class TrajectoryRule(EndRule):
    """Rows with `step_type` and `next_step_type`."""

    def begins(self, before: Rows, rows: Rows) -> Bools:
        """A row goes on when it is what was said would come, and neither FIRST nor after a boundary."""
        step_type = rows[0]
        begins: Bools = np.not_equal(step_type, before[1])
        begins |= step_type == _FIRST
        begins |= before[0] == _LAST
        return begins

    def has_ended(self, rows: Rows) -> Bools:
        """The step after it is LAST."""
        return np.equal(rows[1], _LAST)

    def opens(self, rows: Rows) -> Bools:
        """The step is FIRST."""
        return np.equal(rows[0], _FIRST)

    def is_boundary(self, rows: Rows) -> Bools:
        """The step is LAST."""
        return np.equal(rows[0], _LAST)


class TimeStepRule(EndRule):
    """Rows with `step_type` alone."""

    def begins(self, before: Rows, rows: Rows) -> Bools:
        """A row goes on when it isn't FIRST, nor after LAST."""
        begins: Bools = np.equal(rows[0], _FIRST)
        begins |= before[0] == _LAST
        return begins

    def has_ended(self, rows: Rows) -> Bools:
        """The step is LAST."""
        return np.equal(rows[0], _LAST)

    def opens(self, rows: Rows) -> Bools:
        """The step is FIRST."""
        return np.equal(rows[0], _FIRST)


class FlagRule(EndRule):
    """Rows with a bool that is True at the last step of an episode."""

    def begins(self, before: Rows, rows: Rows) -> Bools:
        """A row goes on unless the one before it was the last."""
        del rows
        return before[0].astype(np.bool)  # a copy: the caller marks runs in it

    def has_ended(self, rows: Rows) -> Bools:
        """The bool itself."""
        return rows[0]

    def opens(self, rows: Rows) -> None:
        """Nothing says so."""
        del rows


def end_rule(layouts: Sequence[Leaf], ends: str | None = None) -> EndRule:
    """Chooses the rule for a store.

    Args:
        layouts: Its columns, in spec order.
        ends: Path of the bool leaf that is True at the last step of an episode, such as `done`; None goes by the step
            types.

    Raises:
        SpecError: When there is no such leaf, or nothing says where episodes end.
    """
    places = {layout.path: number for number, layout in enumerate(layouts)}
    if ends is not None:
        number = places.get(ends) if isinstance(ends, str) else None
        if number is None:
            raise SpecError(f"ends must be the path of a bool [] leaf, one of {_names(layouts)}, got {ends!r}.")
        if layouts[number].dtype != np.bool or layouts[number].shape:
            raise SpecError(
                f"leaf {ends!r} must be bool [] to say where episodes end, "
                f"got {layouts[number].dtype} {list(layouts[number].shape)}. Store it as one bool a step.",
                path=ends,
            )
        return FlagRule([number])
    found = [path for path in places if path[path.rfind("/") + 1 :] == "step_type" and _is_int(layouts[places[path]])]
    if "step_type" in found or len(found) == 1:
        path = "step_type" if "step_type" in found else found[0]
        folder = path[: path.rfind("/") + 1]
        following = places.get(f"{folder}next_step_type")
        if following is None or not _is_int(layouts[following]):
            return TimeStepRule([places[path]], folder=folder)
        return TrajectoryRule([places[path], following], folder=folder)
    flags = [layout for layout in layouts if layout.dtype == np.bool and not layout.shape]
    advice = (
        f"Name the one that is True at the last step of an episode: ends={flags[0].path!r}."
        if flags
        else "Store a bool [] leaf that is True at the last step of an episode, and name it with ends=."
    )
    raise SpecError(
        "where episodes end must be said by a leaf 'step_type' or by a bool [] leaf that is named, "
        f"got leaves {_names(layouts)}. {advice}"
    )


class Cuts(NamedTuple):
    """Pieces that end inside a block of rows, lane by lane, in a lane by id.

    Attributes:
        lane: [E] their lanes.
        step: [E] the block's step that begins the next piece.
        first: [E] first ids.
        is_first: [E] whether a cut is its lane's first in the block.
        is_last: [E] whether it is its lane's last.
    """

    lane: NDArray[np.int64]
    step: NDArray[np.int64]
    first: NDArray[np.int64]
    is_first: Bools
    is_last: Bools


def cut_block(begins: Bools, first_id: int, open_first: NDArray[np.int64]) -> Cuts:
    """Finds the pieces that end in a block.

    Args:
        begins: [lanes, T] whether a row begins a piece, C-contiguous.
        first_id: Id of the block's first row.
        open_first: [lanes] first id of the piece that was going on before it.
    """
    flat = begins.reshape(-1).nonzero()[0]
    steps = begins.shape[1]
    if steps == 1:  # the block of a buffer that is sampled after each step: as few calls as possible
        alone = np.ones(len(flat), np.bool)
        return Cuts(flat, np.zeros(len(flat), np.int64), open_first[flat], alone, alone)
    lane, step = np.divmod(flat, steps)
    is_first = np.ones(len(flat), np.bool)
    np.not_equal(lane[1:], lane[:-1], out=is_first[1:])
    is_last = np.ones(len(flat), np.bool)
    is_last[:-1] = is_first[1:]
    first = np.empty(len(flat), np.int64)
    first[1:] = first_id + step[:-1]
    first[is_first] = open_first[lane[is_first]]
    return Cuts(lane, step, first, is_first, is_last)


def begins_of_block(
    rule: EndRule, rows: Rows, *, first_id: int, latest: Rows | None, runs: Sequence[int]
) -> tuple[Bools, Rows]:
    """Tells which rows of a block begin a piece.

    Args:
        rule: The store's.
        rows: [lanes, T] each, T at least 1.
        first_id: Id of the first one.
        latest: [lanes, 1] each, the rows right before them; None when those are unknown, and the first rows of the
            block then count as going on.
        runs: Ascending first ids of the runs that wrote them.

    Returns:
        [lanes, T] and the rows right before each of them.
    """
    known = [column[:, :1] for column in rows] if latest is None else latest
    before = known if rows[0].shape[1] == 1 else _shifted(known, rows)
    begins = rule.begins(before, rows)
    for run in reversed(runs):
        if run < first_id:
            break
        if run < first_id + begins.shape[1]:
            begins[:, run - first_id] = True
    if latest is None:
        begins[:, 0] = False
    return begins, before


def _shifted(latest: Rows, rows: Rows) -> Rows:
    return [np.concatenate([one, column[:, :-1]], axis=1) for one, column in zip(latest, rows, strict=True)]


def _is_int(layout: Leaf) -> bool:
    return layout.shape == () and layout.dtype.kind in "iu"


def _names(layouts: Sequence[Leaf]) -> str:
    return ", ".join(repr(layout.path) for layout in layouts)
