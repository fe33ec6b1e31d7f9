"""What the rows of a store must hold: values inside the bounds of their spec, and step types that follow each other.

Looks at arrays in the order of their ids, a piece at a time, and counts; opens nothing.

A spec that has scalar integer leaves `step_type` and `next_step_type` in the same nest, as a `Trajectory` does, says of
each row where it stands in its episode. Then, in each lane:

- both are 0 (FIRST), 1 (MID) or 2 (LAST);
- a LAST row is a boundary: the step after it is FIRST, and after no other row is it FIRST;
- a row is what the row before it in the same run said would come, or FIRST.

FIRST may come at any time because a driver that goes on after an exception of the environment begins new episodes: then
a FIRST row stands behind one that had said MID or LAST. Between two runs of the writer, and across ids that were not
looked at, anything may follow anything.
"""

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import StepType

_Judgement = tuple[NDArray[np.bool], tuple[NDArray[Any], ...]]
_FIRST, _LAST = int(StepType.FIRST), int(StepType.LAST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breach:
    """How often a rule was broken, and where first.

    Attributes:
        leaf: Path of the leaf.
        message: The rule and the breach, in one line.
        step_id: The lowest id at which it is broken.
        lane: The lowest lane in which it is broken there.
        count: Steps in which it is broken, all lanes together.
    """

    leaf: str
    message: str
    step_id: int
    lane: int
    count: int


class Rule(abc.ABC):
    """Something that must be true of rows.

    Args:
        leaf: Path of the leaf it is about.
        text: What must be, as in "must be ...".
        columns: Numbers of the columns it looks at.
    """

    def __init__(self, leaf: str, text: str, *columns: int) -> None:
        self.columns = columns
        self._leaf = leaf
        self._text = text
        self._count = 0
        self._first: tuple[int, int, str] | None = None

    def look(self, first_id: int, leaves: Mapping[int, NDArray[Any]], *, follows: NDArray[np.bool]) -> None:
        """Looks at rows.

        Args:
            first_id: Id of the first one; above those of the calls before.
            leaves: Its columns by number, [B, T, *shape]; others don't matter.
            follows: [T] whether each row follows the one that was looked at right before it.
        """
        is_wrong, got = self._judge(leaves, follows)
        count = int(np.count_nonzero(is_wrong))
        self._count += count
        if count and self._first is None:
            row = int(is_wrong.any(axis=0).argmax())
            lane = int(is_wrong[:, row].argmax())
            self._first = first_id + row, lane, " after ".join(str(values[lane, row]) for values in got)

    @abc.abstractmethod
    def _judge(self, leaves: Mapping[int, NDArray[Any]], follows: NDArray[np.bool]) -> _Judgement:
        """Returns [B, T] where rows are wrong, and the [B, T] values to show of such a row."""

    @property
    def breach(self) -> Breach | None:
        """What was found, None when nothing is wrong."""
        if self._first is None:
            return None
        step_id, lane, got = self._first
        times = "1 step" if self._count == 1 else f"{self._count:,} steps"
        message = (
            f"leaf {self._leaf!r} must be {self._text}, but is not in {times}, first in id {step_id} of lane {lane}: "
            f"got {got}."
        )
        return Breach(leaf=self._leaf, message=message, step_id=step_id, lane=lane, count=self._count)


class BoundsRule(Rule):
    """Values lie between the minimum and the maximum of their spec, both included; NaN doesn't."""

    def __init__(self, leaf: str, spec: BoundedArraySpec, column: int) -> None:
        is_same = all(np.all(bound == bound.flat[0]) for bound in (spec.minimum, spec.maximum))
        text = f"from {spec.minimum.flat[0]} to {spec.maximum.flat[0]}" if is_same else "inside the bounds of its spec"
        super().__init__(leaf, text, column)
        self._spec = spec
        self._column = column

    def _judge(self, leaves: Mapping[int, NDArray[Any]], follows: NDArray[np.bool]) -> _Judgement:
        del follows
        values = leaves[self._column]
        is_inside = np.logical_and(values >= self._spec.minimum, values <= self._spec.maximum)
        if is_inside.all():
            return np.zeros(values.shape[:2], np.bool), ()
        is_outside = ~np.reshape(is_inside, (*values.shape[:2], -1))
        first = is_outside.argmax(axis=-1)[..., None]
        found = np.take_along_axis(values.reshape(is_outside.shape), first, axis=-1)[..., 0]
        return np.asarray(is_outside.any(axis=-1)), (found,)


class StepTypeRule(Rule):
    """Values are those of `StepType`."""

    def __init__(self, leaf: str, column: int) -> None:
        super().__init__(leaf, "0 (FIRST), 1 (MID) or 2 (LAST)", column)
        self._column = column

    def _judge(self, leaves: Mapping[int, NDArray[Any]], follows: NDArray[np.bool]) -> _Judgement:
        del follows
        values = leaves[self._column]
        return ~_is_step_type(values), (values,)


class BoundaryRule(Rule):
    """After a LAST row, and only there, comes a FIRST one."""

    def __init__(self, leaf: str, *, step_type: int, next_step_type: int) -> None:
        text = "0 (FIRST) where step_type is 2 (LAST) and only there"
        super().__init__(leaf, text, step_type, next_step_type)
        self._step_type, self._next_step_type = step_type, next_step_type

    def _judge(self, leaves: Mapping[int, NDArray[Any]], follows: NDArray[np.bool]) -> _Judgement:
        del follows
        now, then = leaves[self._step_type], leaves[self._next_step_type]
        is_wrong = ((now == _LAST) != (then == _FIRST)) & _is_step_type(now) & _is_step_type(then)
        return is_wrong, (then, now)


class SuccessionRule(Rule):
    """A row is what the row before it said would come, or FIRST."""

    def __init__(self, leaf: str, *, step_type: int, next_step_type: int) -> None:
        text = "what next_step_type of the step before is, or 0 (FIRST)"
        super().__init__(leaf, text, step_type, next_step_type)
        self._step_type, self._next_step_type = step_type, next_step_type
        self._last: NDArray[Any] | None = None  # [B, 1] next_step_type of the row looked at last

    def _judge(self, leaves: Mapping[int, NDArray[Any]], follows: NDArray[np.bool]) -> _Judgement:
        now, then = leaves[self._step_type], leaves[self._next_step_type]
        said = np.concatenate([then[:, :1] if self._last is None else self._last, then[:, :-1]], axis=1)
        self._last = then[:, -1:].copy()
        is_wrong = (now != said) & (now != _FIRST) & follows & _is_step_type(now) & _is_step_type(said)
        return is_wrong, (now, said)


def rules_of(paths: Sequence[str], specs: Sequence[ArraySpec]) -> list[Rule]:
    """Returns the rules for the rows of a spec.

    Args:
        paths: Paths of its leaves.
        specs: The leaves, in the same order.
    """
    columns = {path: (column, spec) for column, (path, spec) in enumerate(zip(paths, specs, strict=True))}
    rules: list[Rule] = []
    have_rules = set()
    for path, (column, spec) in columns.items():
        following = f"{path[: path.rfind('/') + 1]}next_step_type"
        if path[path.rfind("/") + 1 :] == "step_type" and following in columns:
            next_column, next_spec = columns[following]
            if _is_whole_number(spec) and _is_whole_number(next_spec):
                have_rules |= {path, following}
                rules += [
                    StepTypeRule(path, column),
                    StepTypeRule(following, next_column),
                    BoundaryRule(following, step_type=column, next_step_type=next_column),
                    SuccessionRule(path, step_type=column, next_step_type=next_column),
                ]
    rules += [
        BoundsRule(path, spec, column)
        for path, (column, spec) in columns.items()
        if isinstance(spec, BoundedArraySpec)
        and path not in have_rules
        and 0 not in spec.shape
        and not _is_unlimited(spec)
    ]
    return rules


def _is_whole_number(spec: ArraySpec) -> bool:
    return spec.shape == () and spec.dtype.kind in "iu"


def _is_step_type(values: NDArray[Any]) -> NDArray[np.bool]:
    return (values >= _FIRST) & (values <= _LAST)


def _is_unlimited(spec: BoundedArraySpec) -> bool:
    """Whether no value of the dtype is outside."""
    if spec.dtype.kind == "b":
        return not spec.minimum.any() and bool(spec.maximum.all())
    if spec.dtype.kind not in "iu":
        return False  # there is NaN
    limits = np.iinfo(spec.dtype)
    return bool(np.all(spec.minimum == limits.min) and np.all(spec.maximum == limits.max))
