"""Bounds that an import is told: they become those of the leaves' specs, and every row is checked against them."""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from diskbuf.errors import OptionError, SpecError
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.tree import Structure

Bounds = Mapping[str, Sequence[int | float]]


def check_bounds(bounds: Any) -> None:
    """Refuses what are no bounds by the paths of leaves.

    Raises:
        OptionError: When they aren't.
    """
    if not isinstance(bounds, Mapping):
        raise OptionError(f"bounds must give [low, high] by the paths of leaves, got {bounds!r}.")
    for path, pair in bounds.items():
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or not all(type(bound) in (int, float) for bound in pair) or not pair[0] <= pair[1]:
            raise OptionError(f"bounds of leaf {path!r} must be two numbers, low and high, got {pair!r}.")


def bounded(spec: ArraySpec, path: str, bounds: Bounds) -> ArraySpec:
    """Returns the spec of a leaf with its bounds, where it has some.

    Raises:
        OptionError: When its dtype doesn't hold them.
    """
    if path not in bounds:
        return spec
    low, high = bounds[path]
    try:
        return BoundedArraySpec(spec.shape, spec.dtype, low, high, spec.name)
    except SpecError as error:
        raise OptionError(f"bounds of leaf {path!r} must fit it, but {error}") from error


def bounded_nest(spec: Any, role: str, bounds: Bounds) -> Any:
    """Returns a nest of specs with their bounds; the paths of its leaves begin with the role."""
    structure = Structure(spec)
    leaves = zip(structure.paths, structure.flatten(spec), strict=True)
    return structure.unflatten([bounded(leaf, f"{role}/{path}" if path else role, bounds) for path, leaf in leaves])


def check_inside(array: NDArray[Any], spec: ArraySpec, *, path: str, where: str, first_row: int, row: str) -> None:
    """Refuses a value outside of its spec's bounds, NaN too.

    Args:
        array: [N, *shape].
        spec: What a row of it is.
        path: The leaf, for messages.
        where: Where the array is from, for messages.
        first_row: Number of its first row, for messages.
        row: What a row is called.

    Raises:
        SpecError: When one is; names the row.
    """
    if not isinstance(spec, BoundedArraySpec):
        return
    is_wrong = ~((array >= spec.minimum) & (array <= spec.maximum))
    if is_wrong.any():
        at = int(is_wrong.reshape(len(array), -1).any(axis=1).argmax())
        value = array[at][is_wrong[at]].reshape(-1)[0]
        raise SpecError(
            f"leaf {path!r} must lie within its bounds, {spec.minimum} to {spec.maximum}, but {row} {first_row + at} "
            f"of {where} has {value}. Widen the bounds, or leave such rows out.",
            path=path,
        )
