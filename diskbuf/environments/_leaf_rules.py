"""What the leaves of a batch of observations or actions must be: dtype, shape, bounds, finite numbers."""

from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.errors import SpecError
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.tree import Structure


class LeafRule:
    """What one leaf of a batch must be. Checked at every step, so it is worked out beforehand.

    Args:
        name: What messages call it, `observation/camera`.
        spec: Of one lane.
        batch_size: B.
        is_finite: Whether `check` refuses NaN and infinity.
    """

    def __init__(self, name: str, spec: ArraySpec, batch_size: int, *, is_finite: bool) -> None:
        self.name = name
        self.dtype = np.dtype(spec.dtype)
        self.shape = (batch_size, *spec.shape)
        self.is_finite = is_finite and self.dtype.kind == "f"
        self.low: Any = None
        self.high: Any = None
        if isinstance(spec, BoundedArraySpec) and 0 not in self.shape:
            # Two scalars are compared several times faster than two arrays.
            low, high = np.asarray(spec.minimum), np.asarray(spec.maximum)
            uniform = (low == low.flat[0]).all() and (high == high.flat[0]).all()
            self.low, self.high = (low.flat[0], high.flat[0]) if uniform else (low, high)
            self.uniform = bool(uniform)

    def check(self, array: npt.NDArray[Any]) -> None:
        """Refuses an array of another dtype or shape, or with numbers that must be finite and aren't.

        Raises:
            SpecError: If it doesn't fit; it names the leaf.
        """
        if array.dtype != self.dtype or array.shape != self.shape:
            raise SpecError(
                f"leaf {self.name!r} must be {self.dtype} {list(self.shape)}, got {array.dtype} {list(array.shape)}. "
                f"{self._advice(array)}",
                path=self.name,
            )
        if self.is_finite and not np.isfinite(array).all():
            where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
            place = f"lane {where[0]}" + (f" at {list(where[1:])}" if where[1:] else "")
            raise SpecError(
                f"leaf {self.name!r} must be finite, got {array[where]} in {place}. "
                "Mend the environment, or use check_finite=False to let such numbers through.",
                path=self.name,
            )

    def check_bounds(self, array: npt.NDArray[Any]) -> None:
        """Refuses an array that fits but has an element outside the spec's bounds.

        Raises:
            SpecError: If there is one; it names the leaf and the lane.
        """
        if self.low is None:
            return
        if self.uniform:
            fits = self.low <= array.min() and array.max() <= self.high  # False for NaN
        else:
            fits = bool(np.all((array >= self.low) & (array <= self.high)))
        if not fits:
            outside = ~((array >= self.low) & (array <= self.high))
            where = tuple(int(i) for i in np.argwhere(outside)[0])
            low = np.broadcast_to(self.low, self.shape)[where]
            high = np.broadcast_to(self.high, self.shape)[where]
            raise SpecError(
                f"leaf {self.name!r} must lie within [{low}, {high}], got {array[where]} in lane {where[0]}. "
                "Clip it, or give the policy this environment's action_spec.",
                path=self.name,
            )

    def _advice(self, array: npt.NDArray[Any]) -> str:
        if array.shape == self.shape:
            return "Cast it."
        if array.shape == self.shape[1:]:
            return "Add the batch axis: array[None]."
        return "Leaves are [batch_size, *shape]."


def leaf_rules(
    name: str, spec: Any, structure: Structure, batch_size: int, *, is_finite: bool = False
) -> list[LeafRule]:
    """Returns the rules for the leaves of a nest, in the structure's order.

    Args:
        name: What the whole nest is called.
        spec: Nest of specs of one lane.
        structure: The spec's.
        batch_size: B.
        is_finite: Whether NaN and infinity are refused.
    """
    leaves = structure.flatten(spec)
    names = [f"{name}/{path}" if path else name for path in structure.paths]
    return [LeafRule(n, leaf, batch_size, is_finite=is_finite) for n, leaf in zip(names, leaves, strict=True)]
