"""What formats of arrays share: sources whose columns are arrays, with ids, lanes or rows on their first axes."""

import abc
import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import OptionError, SpecError
from diskbuf.exchange.contract import CARRIED_KEY, ID, LANE, Carried, RowSource, SourceColumn
from diskbuf.exchange.store_rows import StoreRows
from diskbuf.specs import ArraySpec

Axes = Literal["rows", "lanes,steps", "steps,lanes"]

_BLOCK_BYTES = 2**22
_DTYPES = "biufc"
_LOOKS = {
    "d4rl": {"observations", "actions", "rewards", "terminals"},
    "sb3": {"actions", "rewards", "dones", "pos", "full"},
}
"""Arrays by which other formats of the same files are known."""


def check_axes(axes: str) -> None:
    """Refuses what aren't names of axes.

    Raises:
        OptionError: When they aren't.
    """
    if axes not in get_args(Axes):
        raise OptionError(f"axes must be one of {', '.join(map(repr, get_args(Axes)))}, got {axes!r}.")


def array_names(rows: StoreRows) -> dict[str, str]:
    """Returns a name for each leaf, by its path, that stands beside what else is in the file.

    They are the leaves' own, unless a part of one is empty or dots, or one is the folder of another, which HDF5 doesn't
    take: all are then as in the store's folder.
    """
    names = set(rows.names.values())
    folders = {name[:place] for name in names for place in range(len(name)) if name[place] == "/"}
    is_odd = any(part in ("", ".", "..") or "\0" in part for name in names for part in name.split("/"))
    if not is_odd and not folders & (names | {ID, LANE}) and not {CARRIED_KEY} & (names | folders):
        return rows.names
    return {path: f"leaves/{layout.file_path}" for path, layout in rows.layouts.items()}


class StoredArray(abc.ABC):
    """An array in a file.

    Attributes:
        shape: All of its axes.
        dtype: Of its elements.
        kind: What it is, for messages.
        problem: Why it can't be read, None when it can.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    kind: str
    problem: str | None = None

    @abc.abstractmethod
    def steps(self, axes: Axes, count: int) -> Iterator[NDArray[Any]]:
        """Yields it from its beginning, so many steps at a time.

        Args:
            axes: What its first axes are.
            count: Steps; rows where there are no lanes.

        Yields:
            [T, *shape] rows, or [T, B, *shape].
        """

    def whole(self) -> NDArray[Any]:
        """Reads all of a small array."""
        return np.concatenate([np.zeros((0, *self.shape[1:]), self.dtype), *self.steps("rows", 2**20)])


class ArraySource(RowSource):
    """Arrays of equal length.

    Args:
        name: Of the file.
        arrays: What is in it.
        axes: What the first axes are of a foreign file; an export says itself.

    Raises:
        StoreFormatError: When a newer version exported it.
    """

    def __init__(self, name: str, arrays: Mapping[str, StoredArray], *, axes: Axes) -> None:
        self.name = name
        self._arrays = {key: array for key, array in arrays.items() if key != CARRIED_KEY}
        self.carried = self._read_carried(arrays)
        self._axes: Axes = axes if self.carried is None else "steps,lanes"
        self.columns = {key: self._column(key, array) for key, array in self._arrays.items()}
        self.looks_like = next((name for name, keys in _LOOKS.items() if keys <= set(self._arrays)), None)

    def _read_carried(self, arrays: Mapping[str, StoredArray]) -> Carried | None:
        array = arrays.get(CARRIED_KEY)
        if array is None:
            return None
        value: Any = None
        if array.problem is None and len(array.shape) == 1 and array.dtype == np.uint8:
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(array.whole().tobytes())
        return Carried.from_json(value, name=self.name)

    def _column(self, key: str, array: StoredArray) -> SourceColumn:
        if self.carried is not None and key in (ID, LANE):
            is_key = array.problem is None and len(array.shape) == 1 and array.dtype.kind in "iu"
            return SourceColumn(spec=ArraySpec((), array.dtype.newbyteorder("=")) if is_key else None, kind=array.kind)
        outer = 1 if self._axes == "rows" else 2
        if array.problem is not None or array.dtype.kind not in _DTYPES or len(array.shape) < outer:
            return SourceColumn(spec=None, kind=array.problem or array.kind)
        return SourceColumn(spec=ArraySpec(array.shape[outer:], array.dtype.newbyteorder("=")), kind=array.kind)

    def _outer(self, key: str) -> tuple[int, int]:
        """Steps and lanes of an array."""
        shape = self._arrays[key].shape
        if self._axes == "rows":
            return shape[0], 1
        return (shape[0], shape[1]) if self._axes == "steps,lanes" else (shape[1], shape[0])

    def num_lanes_of(self, names: Iterable[str]) -> int:
        """Returns how many lanes there are in arrays, which must be as many in each, like the steps.

        Raises:
            SpecError: When they aren't.
        """
        found = {name: self._outer(name) for name in names if not self._is_key(name)}
        if len(set(found.values())) > 1:
            raise SpecError(
                f"arrays of {self.name} must have equal first axes, got "
                f"{', '.join(f'{name} {list(self._arrays[name].shape)}' for name in found)}. Drop those that differ."
            )
        lanes = next(iter(found.values()))[1] if found else 1
        if not lanes:
            raise SpecError(f"arrays of {self.name} must have at least one lane, got none in {next(iter(found))!r}.")
        return lanes

    def _is_key(self, name: str) -> bool:
        return self.carried is not None and name in (ID, LANE)

    def blocks(self, wanted: Mapping[str, np.dtype[Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields the rows, by step and then lane."""
        names = [name for name in wanted if not self._is_key(name)]
        lanes = self.num_lanes_of(names)
        steps = self._outer(names[0])[0]
        step_bytes = sum(self._step_bytes(name, lanes) for name in names)
        count = max(1, _BLOCK_BYTES // max(1, step_bytes))
        ids = self._arrays[ID].whole() if ID in wanted and self._is_key(ID) else None
        lane = self._arrays[LANE].whole() if LANE in wanted and self._is_key(LANE) else None
        if ids is not None and len(ids) != steps:
            raise SpecError(f"{self.name} must have an id for each of its {steps} steps, got {len(ids)}.")
        if lane is not None and len(lane) != lanes:
            raise SpecError(f"{self.name} must have a number for each of its {lanes} lanes, got {len(lane)}.")
        parts = [self._arrays[name].steps(self._axes, count) for name in names]
        for begin in range(0, steps, count):
            end = min(steps, begin + count)
            block = {}
            for name, part in zip(names, parts, strict=True):
                found = next(part)
                leaf = found if self._axes == "rows" else found.reshape((end - begin) * lanes, *found.shape[2:])
                block[name] = leaf.astype(leaf.dtype.newbyteorder("="), copy=False)
            if ids is not None:
                block[ID] = np.repeat(ids[begin:end], lanes)
            if lane is not None:
                block[LANE] = np.tile(lane, end - begin)
            yield block

    def _step_bytes(self, name: str, lanes: int) -> int:
        spec = self.columns[name].spec
        return 0 if spec is None else lanes * math.prod(spec.shape) * spec.dtype.itemsize
