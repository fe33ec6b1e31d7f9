"""Several columns of single numbers as one column of arrays: `leaf[0]`, `leaf[1]`, …, or a list of columns."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import OptionError, SpecError
from diskbuf.exchange.contract import RowSource, SourceColumn
from diskbuf.exchange.mapping import ColumnMap, cast_exactly
from diskbuf.specs import ArraySpec
from diskbuf.tree import Structure

ELEMENT = re.compile(r"(.*)\[([0-9]+(?:,[0-9]+)*)\]", re.DOTALL)
"""A name of an element of an array, and its place."""

Place = tuple[int, ...]


class _Folded(NamedTuple):
    """A column that is made of others.

    Attributes:
        columns: Those of its elements, in C order.
        column: What it is.
    """

    columns: tuple[str, ...]
    column: SourceColumn


def shape_of(places: Iterable[Place]) -> tuple[int, ...] | None:
    """Returns the shape of an array with these elements, None where one is missing.

    >>> shape_of([(0, 0), (0, 1)]), shape_of([(0,), (2,)]), shape_of([(0,), (0, 1)])
    ((1, 2), None, None)
    """
    found = set(places)
    if len({len(place) for place in found}) != 1:
        return None
    shape = tuple(max(axis) + 1 for axis in zip(*found, strict=True))
    return shape if len(found) == np.prod(shape, dtype=object) else None


def fold(mapping: ColumnMap, source: RowSource) -> tuple[ColumnMap, RowSource]:
    """Puts columns together to arrays, where the mapping names elements of a leaf, or several columns for one.

    Leaves `a[0]`, `a[1]`, … or `a[0,0]`, … become a leaf `a`, and so does `a` of the columns `x,y`. A leaf that a given
    spec has under such a name stays, and so does a column that is called so.

    Returns:
        The mapping to the new columns, and the source with them; those that were given, where there is nothing to do.

    Raises:
        OptionError: When elements are missing, or a column of one isn't there or is dropped.
        SpecError: When a column isn't of single numbers.
    """
    known = () if mapping.spec is None else Structure(mapping.spec).paths
    leaves: dict[str, str] = {}
    arrays: dict[str, dict[Place, str]] = {}
    for path, column in mapping.leaves.items():
        match = None if path in known else ELEMENT.fullmatch(path)
        if match:
            arrays.setdefault(match[1], {})[tuple(map(int, match[2].split(",")))] = column
        elif "," in column and column not in source.columns:
            arrays.setdefault(path, {}).update({(place,): name for place, name in enumerate(column.split(","))})
        else:
            leaves[path] = column
    if not arrays:
        return mapping, source
    folded: dict[str, _Folded] = {}
    for path, elements in arrays.items():
        shape = shape_of(elements)
        if shape is None or path in leaves:
            raise OptionError(
                f"the elements of leaf {path!r} must be one array without gaps, got "
                f"{', '.join(str(list(place)).replace(' ', '') for place in sorted(elements))}"
                f"{' besides the leaf itself' if path in leaves else ''}. Map each element from 0 on once."
            )
        columns = tuple(elements[place] for place in itertools.product(*map(range, shape)))
        name = ",".join(columns)
        if name in source.columns:  # of one element, or another column that is called so
            name = f"{path}[{name}]"
        folded[name] = _folded(path, columns, shape, mapping, source)
        leaves[path] = name
    return dataclasses.replace(mapping, leaves=leaves), FoldedSource(source, folded, kept=set(leaves.values()))


def _folded(
    path: str, columns: tuple[str, ...], shape: tuple[int, ...], mapping: ColumnMap, source: RowSource
) -> _Folded:
    dtypes = []
    for name in columns:
        column = source.columns.get(name)
        if column is None or name in mapping.drop:
            raise OptionError(
                f"the elements of leaf {path!r} must be columns of {source.name}, which aren't dropped, got {name!r}. "
                f"There are {', '.join(map(repr, list(source.columns)[:12]))}."
            )
        if column.spec is None or column.spec.shape:
            raise SpecError(
                f"column {name!r} of {source.name} must be single numbers to be an element of leaf {path!r}, got "
                f"{column.kind}.",
                path=path,
            )
        dtypes.append(column.spec.dtype)
    first = source.columns[columns[0]]
    spec = ArraySpec(shape, np.result_type(*dtypes))
    return _Folded(columns, SourceColumn(spec=spec, kind=f"columns of {spec.dtype}", is_text=first.is_text))


class FoldedSource(RowSource):
    """A source with columns that are made of others.

    Args:
        source: The source; whoever opened it closes it.
        folded: The new columns.
        kept: Columns that stay although they are elements, because they are leaves too.
    """

    def __init__(self, source: RowSource, folded: Mapping[str, _Folded], *, kept: Iterable[str]) -> None:
        self.name = source.name
        self.metadata = source.metadata
        self.carried = source.carried
        self.num_rows = source.num_rows
        self._source = source
        self._folded = folded
        elements = {name for array in folded.values() for name in array.columns} - set(kept)
        rest = {name: column for name, column in source.columns.items() if name not in elements}
        self.columns = rest | {name: array.column for name, array in folded.items()}

    def num_lanes_of(self, names: Iterable[str]) -> int:
        """Returns the source's lanes."""
        return self._source.num_lanes_of(self._columns_of(names))

    def _columns_of(self, names: Iterable[str]) -> list[str]:
        found = [self._folded[name].columns if name in self._folded else (name,) for name in names]
        return list(dict.fromkeys(itertools.chain.from_iterable(found)))

    def blocks(self, wanted: "Mapping[str, np.dtype[np.generic]]") -> "Iterator[dict[str, NDArray[np.generic]]]":
        """Yields the rows; elements of other dtypes are cast to that of their array, exactly or not at all."""
        read: dict[str, np.dtype[np.generic]] = {}
        for name, dtype in wanted.items():
            for column in self._columns_of([name]):
                spec = self._source.columns[column].spec
                is_text = self._source.columns[column].is_text
                as_text = np.result_type(read[column], dtype) if column in read else dtype
                read[column] = as_text if is_text or spec is None else spec.dtype
        for block in self._source.blocks(read):
            yield {name: self._array(block, name, dtype) for name, dtype in wanted.items()}

    def _array(
        self, block: "Mapping[str, NDArray[np.generic]]", name: str, dtype: "np.dtype[np.generic]"
    ) -> "NDArray[np.generic]":
        if name not in self._folded:
            return cast_exactly(block[name], dtype, path=name, where=f"column {name!r} of {self.name}")
        columns, column = self._folded[name]
        shape = () if column.spec is None else column.spec.shape
        parts = [
            cast_exactly(block[element], dtype, path=name, where=f"column {element!r} of {self.name}")
            for element in columns
        ]
        return np.stack(parts, axis=-1).reshape(len(parts[0]), *shape)
