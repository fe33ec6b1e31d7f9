"""Items on their way in and out: nests checked against a spec, never cast, and taken apart into columns."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import SpecError
from diskbuf.specs import ArraySpec
from diskbuf.tree import Structure


class ItemFormat:
    """What the items of a buffer look like.

    Args:
        data_spec: Nest of ArraySpec.
        batch_size: Number of lanes.

    Attributes:
        structure: The nest's structure.
        specs: Its leaves, in column order.
        flatten_up_to: The fastest way to the leaves of items, for classes of namedtuples like the last ones' that
            `rows` took; checks no leaf and explains nothing.
    """

    def __init__(self, data_spec: Any, batch_size: int) -> None:
        self.data_spec = data_spec
        self.batch_size = batch_size
        self.structure = Structure(data_spec)
        self.specs: list[ArraySpec] = self.structure.flatten(data_spec)
        self.flatten_up_to = self.structure.treespec.flatten_up_to

    def rows(self, items: Any) -> list[NDArray[Any]]:
        """Takes one step of every lane apart.

        Args:
            items: Nest with leaves [B, *shape], numpy arrays or tensors.

        Returns:
            The leaves as numpy arrays, in column order.

        Raises:
            SpecError: When structure, dtype, rank, lanes or shape don't fit.
        """
        leaves = self.structure.flatten(items)
        self.flatten_up_to = self.structure.latest.flatten_up_to
        return self._checked(leaves, has_time=False)

    def sequences(self, items: Any) -> tuple[list[NDArray[Any]], int]:
        """Takes T steps of every lane apart.

        Args:
            items: Nest with leaves [B, T, *shape].

        Returns:
            The leaves as numpy arrays, in column order, and T.

        Raises:
            SpecError: As `rows`, or when leaves differ in T.
        """
        leaves = self._checked(self.structure.flatten(items), has_time=True)
        return leaves, leaves[0].shape[1]

    def _checked(self, given: list[Any], *, has_time: bool) -> list[NDArray[Any]]:
        leaves = [_as_array(leaf, path) for leaf, path in zip(given, self.structure.paths, strict=True)]
        steps = leaves[0].shape[1] if has_time and leaves[0].ndim > 1 else None
        for leaf, spec, path in zip(leaves, self.specs, self.structure.paths, strict=True):
            outer: tuple[int | str, ...] = (
                (self.batch_size, "T" if steps is None else steps) if has_time else (self.batch_size,)
            )
            if leaf.dtype != spec.dtype or leaf.shape != (*outer, *spec.shape):
                raise SpecError(
                    f"leaf {path!r} must be {spec.dtype} {_shape(outer, spec.shape)}, "
                    f"got {leaf.dtype} {_shape(leaf.shape)}. " + self._advice(leaf, spec, outer),
                    path=path,
                )
        return leaves

    def _advice(self, leaf: NDArray[Any], spec: ArraySpec, outer: tuple[int | str, ...]) -> str:
        lanes = self.batch_size
        if leaf.dtype != spec.dtype:
            return f"Cast it with .astype('{spec.dtype}'), or create the store with that spec."
        if leaf.ndim == len(spec.shape) + len(outer) - 1 and leaf.shape[leaf.ndim - len(spec.shape) :] == spec.shape:
            if lanes == 1 and len(outer) == 1:
                return "The batch axis is missing: add it with x[None]."
            return f"An axis is missing: stack the {lanes} lanes on axis 0" + (
                " and the steps on axis 1." if len(outer) > 1 else "."
            )
        if leaf.ndim == len(spec.shape) + len(outer) and leaf.shape[len(outer) :] == spec.shape:
            if leaf.shape[0] != lanes:
                return f"The buffer has {lanes} lanes (batch_size): give one step of each."
            return "Every leaf must have the same number of steps."
        if len(outer) == 1 and leaf.ndim == len(spec.shape) + 2 and leaf.shape[2:] == spec.shape:
            return "To add many steps at once use extend, with [lanes, steps] in front."
        return "Reshape it, or create the store with that spec."


def _as_array(leaf: Any, path: str) -> NDArray[Any]:
    if isinstance(leaf, np.ma.MaskedArray):
        raise SpecError(f"leaf {path!r} must be an array without a mask. Use numpy.ma.filled.", path=path)
    if isinstance(leaf, np.ndarray | np.generic) or hasattr(leaf, "__array__"):
        try:
            return np.asarray(leaf)
        except NotImplementedError as error:
            raise SpecError(
                f"leaf {path!r} must be an array or an eager tensor, got a symbolic one of a tf.function. "
                "Add outside of it, or through tf.numpy_function.",
                path=path,
            ) from error
    raise SpecError(
        f"leaf {path!r} must be a numpy array or a tensor, got {type(leaf).__name__}. "
        "Use numpy.asarray with the spec's dtype.",
        path=path,
    )


def _shape(*parts: tuple[Any, ...]) -> str:
    return "[" + ", ".join(str(length) for part in parts for length in part) + "]"
