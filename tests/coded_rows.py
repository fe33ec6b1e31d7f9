"""Rows that say in every column which id and lane they are, so that any mixing of rows or columns shows."""

from typing import Any, NamedTuple

import numpy as np
import optree

from diskbuf import ArraySpec


class Pair(NamedTuple):
    """A namedtuple inside the nest."""

    exact: Any
    coarse: Any


SPEC = {
    "image": ArraySpec((2, 3), "uint8"),
    "number": ArraySpec((), "int64"),
    "pair": Pair(ArraySpec((3,), "float64"), ArraySpec((1,), "float32")),
    "nothing": (),
    "is_odd": (ArraySpec((), "bool"),),
}
"""Several dtypes, ranks and row sizes, and every kind of container but the list."""


def rows(ids: Any, lanes: Any) -> Any:
    """Returns the nest of rows of ids and lanes, with their broadcast shape in front."""
    ids, lanes = np.broadcast_arrays(np.asarray(ids, np.int64), np.asarray(lanes, np.int64))
    number = ids * 100 + lanes
    return {
        "image": ((number * 7)[..., None, None] + np.arange(6).reshape(2, 3)).astype("uint8"),
        "number": number.astype("int64"),
        "pair": Pair(number[..., None] + np.array([0, 0.25, 0.5]), number[..., None].astype("float32")),
        "nothing": (),
        "is_odd": ((number // 100 % 2 == 1),),
    }


def step(step_id: int, lanes: int) -> Any:
    """One step of every lane: leaves [B, *shape]."""
    return rows(np.full(lanes, step_id), np.arange(lanes))


def span(first_id: int, next_id: int, lanes: int) -> Any:
    """All steps of [first_id, next_id): leaves [B, T, *shape]."""
    return rows(np.arange(first_id, next_id)[None, :], np.arange(lanes)[:, None])


def assert_rows(items: Any, ids: Any, lanes: Any) -> None:
    """Every leaf is of the spec's dtype and holds the rows of these ids and lanes."""
    assert_equal(items, rows(ids, lanes))


def assert_equal(items: Any, expected: Any) -> None:
    """Two nests of arrays are equal: structure, dtypes, shapes and values."""
    leaves, structure = optree.tree_flatten(items)
    expected_leaves, expected_structure = optree.tree_flatten(expected)
    assert structure == expected_structure
    for leaf, value in zip(leaves, expected_leaves, strict=True):
        assert np.asarray(leaf).dtype == value.dtype
        np.testing.assert_array_equal(leaf, value)


def lanes_of(items: Any) -> np.ndarray:
    """Which lane each row says it is from."""
    return np.asarray(items["number"]) % 100
