"""What a leaf looks like: its shape, its dtype and perhaps its bounds.

A data_spec is a nest of these. They come from TensorFlow's and dm_env's specs and from Gymnasium's spaces, and go to
JSON and to TensorFlow. Neither TensorFlow nor Gymnasium is imported until one is asked for.
"""

import math
import operator
import sys
from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from diskbuf import tree
from diskbuf.errors import SpecError, StoreFormatError

_DTYPE_NAMES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_SIDES = ("minimum", "maximum")
_INFINITIES: dict[Any, str] = {math.inf: "Infinity", -math.inf: "-Infinity"}


class ArraySpec:
    """The shape and dtype of one step of one leaf, without batch and time axes.

    Immutable. Equal to another ArraySpec of the same shape and dtype: a name is only a label.

        >>> spec = ArraySpec((84, 84, 4), "uint8", "camera")
        >>> spec
        ArraySpec((84, 84, 4), 'uint8', name='camera')
        >>> {"observation": spec, "reward": ArraySpec((), "float32")}["reward"].shape
        ()

    Args:
        shape: Sizes of the axes, each an int of at least 0; () for a scalar.
        dtype: bool, int8 to int64, uint8 to uint64, float16 to float64, complex64 or complex128, in native byte order.
        name: A label for people.

    Raises:
        SpecError: When shape, dtype or name is something else.
    """

    __slots__ = ("_dtype", "_name", "_shape")

    def __init__(self, shape: Iterable[SupportsIndex], dtype: npt.DTypeLike, name: str | None = None) -> None:
        if name is not None and not isinstance(name, str):
            raise SpecError(f"the name of a spec must be a str or None, got {name!r}.")
        self._shape = _shape(shape)
        self._dtype = _dtype(dtype)
        self._name = name

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype, in native byte order."""
        return self._dtype

    @property
    def name(self) -> str | None:
        """A label for people."""
        return self._name

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._shape == other._shape and self._dtype == other._dtype

    def __hash__(self) -> int:
        return hash((self._shape, self._dtype))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._parts())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._shape, self._dtype, self._name)

    def _parts(self) -> list[str]:
        name = [] if self._name is None else [f"name={self._name!r}"]
        return [repr(self._shape), repr(self._dtype.name), *name]


class BoundedArraySpec(ArraySpec):
    """An ArraySpec whose elements lie between a minimum and a maximum, both included.

    Bounds describe what the environment or the policy promises; a buffer stores them, and does not test each step
    against them. Equal to another BoundedArraySpec when, broadcast to the shape, the bounds are equal too.

        >>> BoundedArraySpec((2,), "float32", minimum=-1.0, maximum=[1.0, 2.0])
        BoundedArraySpec((2,), 'float32', minimum=-1.0, maximum=[1.0, 2.0])

    Args:
        shape: As for ArraySpec.
        dtype: As for ArraySpec, but not complex.
        minimum: Smallest values, a number or an array that broadcasts to shape. For a float dtype they may be
            infinite, and floats are rounded to the nearest one of the dtype; any other value must be held exactly.
        maximum: Largest values, likewise; nowhere below minimum.
        name: A label for people.

    Raises:
        SpecError: When an argument is something else.
    """

    __slots__ = ("_maximum", "_minimum")

    def __init__(
        self,
        shape: Iterable[SupportsIndex],
        dtype: npt.DTypeLike,
        minimum: npt.ArrayLike,
        maximum: npt.ArrayLike,
        name: str | None = None,
    ) -> None:
        super().__init__(shape, dtype, name)
        self._minimum = _bound("minimum", minimum, self)
        self._maximum = _bound("maximum", maximum, self)
        if np.any(self._minimum > self._maximum):
            raise SpecError(f"minimum must be at most maximum, got {_bounds(self)}. Swap or correct them.")

    @property
    def minimum(self) -> npt.NDArray[Any]:
        """Smallest values, read-only, of the spec's dtype and in the shape they were given in."""
        return self._minimum

    @property
    def maximum(self) -> npt.NDArray[Any]:
        """Largest values, read-only, of the spec's dtype and in the shape they were given in."""
        return self._maximum

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BoundedArraySpec):
            return NotImplemented
        return super().__eq__(other) is True and not any(
            _first_unlike(getattr(self, side), getattr(other, side), self._shape) for side in _SIDES
        )

    __hash__ = ArraySpec.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._shape, self._dtype, self._minimum, self._maximum, self._name)

    def _parts(self) -> list[str]:
        shape, dtype, *name = super()._parts()
        return [shape, dtype, f"minimum={_text(self._minimum)}", f"maximum={_text(self._maximum)}", *name]


def as_spec(nest: Any) -> Any:
    """Returns the nest with an ArraySpec for each leaf.

    A leaf may be an ArraySpec, which stays as it is; a tf.TensorSpec, or a spec of TF-Agents or dm_env; or a Gymnasium
    space, which becomes what `from_space` makes of it. Bounds are kept.

    Raises:
        SpecError: When there is no leaf at all, or one is something else; `path` names it.
    """
    structure = tree.Structure(nest)
    converted = structure.unflatten(
        _leaf_spec(leaf, path) for leaf, path in zip(structure.flatten(nest), structure.paths, strict=True)
    )
    if tree.Structure(converted).num_leaves == 0:
        raise SpecError(f"a data_spec must have at least one leaf, got {tree.describe(nest)}. Put an ArraySpec in it.")
    return converted


def from_space(space: Any) -> Any:
    """Returns a spec nest for a Gymnasium space.

    Box, Discrete, MultiDiscrete and MultiBinary become a BoundedArraySpec of the space's dtype, Dict and Tuple a dict
    and a tuple of such.

        >>> import gymnasium
        >>> from_space(gymnasium.spaces.Discrete(4, start=1))
        BoundedArraySpec((), 'int64', minimum=1, maximum=4)

    Raises:
        SpecError: When the space, or one inside it, is of another kind; `path` names it.
    """
    return _from_space(space, "")


def to_tensor_spec(nest: Any) -> Any:
    """Returns the nest with a tf.TensorSpec for each ArraySpec. Bounds are left out, as a tf.TensorSpec has none.

    Raises:
        SpecError: When `as_spec` refuses the nest.
    """
    import tensorflow as tf

    specs = as_spec(nest)
    structure = tree.Structure(specs)
    return structure.unflatten(tf.TensorSpec(spec.shape, spec.dtype, spec.name) for spec in structure.flatten(specs))


def differences(stored: Any, wanted: Any) -> list[str]:
    """Returns a line for each difference between two spec nests, none when either can stand for the other.

    Names make no difference, nor does the class of a namedtuple whose type name and fields are equal, nor the kind of
    a dict as long as the leaves are in the same order.

    Args:
        stored: The nest of ArraySpecs that a store was made with.
        wanted: The nest of ArraySpecs to compare with it.
    """
    pairs, mismatches = tree.compare(stored, wanted)
    lines = [_line(f"at {miss.path!r}" if miss.keys else "the nest", *miss[1:3]) for miss in mismatches]
    lines += [line for pair in pairs for line in _leaf_differences(pair)]
    if not lines:
        ours, theirs = tree.Structure(stored).paths, tree.Structure(wanted).paths
        if ours != theirs:
            lines = [_line("order of the leaves", ", ".join(ours), ", ".join(theirs))]
    return lines


def to_json(nest: Any) -> Any:
    """Returns a spec nest as a JSON value with nothing lost; `from_json` reads it back.

    No NaN and no infinity is in it: an infinite bound is the string "Infinity" or "-Infinity".

    Raises:
        SpecError: When `as_spec` refuses the nest.
    """
    specs = as_spec(nest)
    structure = tree.Structure(specs)
    return {"structure": structure.to_json(), "leaves": [_leaf_to_json(spec) for spec in structure.flatten(specs)]}


def from_json(value: Any) -> Any:
    """Returns the spec nest that `to_json` wrote: structure, shapes, dtypes, names and bounds.

    Namedtuple classes are found as `tree.Structure.from_json` describes.

    Raises:
        StoreFormatError: When the value isn't one that `to_json` writes.
    """
    try:
        structure = tree.Structure.from_json(value["structure"])
        return structure.unflatten([_leaf_from_json(leaf) for leaf in value["leaves"]])
    except StoreFormatError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StoreFormatError(f"a spec must be what to_json writes, got {_shortened(value)}: {error!r}.") from error


def _shape(shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(shape)
    except TypeError as error:
        raise SpecError(f"shape must be a tuple of ints, got {shape!r}. Write (4,) for four elements.") from error
    if any(size is None for size in sizes):
        raise SpecError(f"shape must have a fixed size in every axis, got {sizes}. Leave out batch and time axes.")
    try:
        ints = tuple(operator.index(size) for size in sizes)
    except TypeError as error:
        raise SpecError(f"shape must be a tuple of ints, got {sizes}. Give each axis its size.") from error
    if any(isinstance(size, bool | np.bool) for size in sizes) or any(size < 0 for size in ints):
        raise SpecError(f"shape must be ints of at least 0, got {sizes}. Give each axis its size.")
    return ints


def _dtype(dtype: Any) -> np.dtype[Any]:
    found: np.dtype[Any] | None
    try:
        found = None if dtype is None else np.dtype(dtype)  # numpy takes None for float64.
    except (TypeError, ValueError):
        found = None
    if found is None or found.name not in _DTYPE_NAMES:
        shown = dtype if found is None else found
        raise SpecError(f"dtype must be one of {', '.join(_DTYPE_NAMES)}, got {shown}. {_dtype_advice(found)}")
    if not found.isnative:
        raise SpecError(f"dtype must be in native byte order, got {found}. Use {found.name!r} and cast with astype.")
    canonical: np.dtype[Any] = np.dtype(found.name)
    return canonical


def _dtype_advice(found: np.dtype[Any] | None) -> str:
    kind = None if found is None else found.kind
    if kind in ("O", "S", "U", "T"):
        return "Encode text and objects as numbers, or as uint8 arrays of a fixed length."
    if kind in ("M", "m"):
        return "Store times as int64, with astype('int64')."
    if found is not None and found.names:
        return "Use a dict with one leaf per field."
    return "Cast to the nearest one of these."


def _bound(label: str, value: Any, spec: ArraySpec) -> npt.NDArray[Any]:
    if spec.dtype.kind == "c":
        raise SpecError(f"a bounded spec must have a dtype with an order, got {spec.dtype}. Use ArraySpec.")
    try:
        raw = np.asarray(value)
        np.broadcast_to(raw, spec.shape)
    except (OverflowError, ValueError) as error:
        raise SpecError(f"{label} must broadcast to {list(spec.shape)}, got {value!r}.") from error
    with np.errstate(all="ignore"):  # Whatever goes wrong in the cast is found below.
        try:
            bound = raw.astype(spec.dtype) if raw.dtype.kind in "biufO" else None
        except (OverflowError, TypeError, ValueError):
            bound = None
    if bound is None or not all(map(_holds, bound.ravel().tolist(), raw.ravel().tolist())):
        raise SpecError(f"{label} must be values that {spec.dtype} can hold, got {_text(raw)}. Give one in its range.")
    bound.flags.writeable = False
    return bound


def _holds(cast: Any, raw: Any) -> bool:
    """Whether a bound came through its cast; Python compares ints and floats exactly."""
    if isinstance(cast, float) and isinstance(raw, float):
        return not math.isnan(cast) and math.isinf(cast) == math.isinf(raw)
    return bool(cast == raw)


def _text(bound: npt.NDArray[Any]) -> str:
    """A bound in a few characters, each element as short as it can be and still be told from its neighbours."""
    if bound.ndim == 0:
        return str(bound[()])
    return np.array2string(bound, threshold=6, edgeitems=2, separator=", ", formatter={"all": str}).replace("\n", "")


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _leaf_spec(leaf: Any, path: str) -> Any:
    if isinstance(leaf, ArraySpec):
        return leaf
    gymnasium = sys.modules.get("gymnasium")  # Whoever has a space has imported it.
    if gymnasium is not None and isinstance(leaf, gymnasium.Space):
        return _from_space(leaf, path)
    # Arrays, variables and the columns of data frames have a shape and a dtype too, some even a name.
    if hasattr(leaf, "__array__") or not all(hasattr(leaf, fact) for fact in ("shape", "dtype", "name")):
        raise _at(path, f"a spec must be an ArraySpec, got {tree.describe(leaf)}. Write ArraySpec(shape, dtype).")
    try:
        shape = tuple(leaf.shape)
        dtype = getattr(leaf.dtype, "as_numpy_dtype", leaf.dtype)
        if hasattr(leaf, "minimum") and hasattr(leaf, "maximum"):
            return BoundedArraySpec(shape, dtype, leaf.minimum, leaf.maximum, leaf.name)
        return ArraySpec(shape, dtype, leaf.name)
    except SpecError as error:
        raise _at(path, str(error)) from error
    except (TypeError, ValueError) as error:  # A TensorFlow shape of unknown rank can't be taken apart.
        raise _at(path, f"shape must be a tuple of ints, got {leaf.shape}. Give each axis its size.") from error


def _from_space(space: Any, path: str) -> Any:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {key: _from_space(child, _below(path, key)) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_from_space(child, _below(path, index)) for index, child in enumerate(space.spaces))
    bounds: tuple[Any, Any]
    if isinstance(space, spaces.Box):
        bounds = space.low, space.high
    elif isinstance(space, spaces.Discrete):
        bounds = int(space.start), int(space.start) + int(space.n) - 1
    elif isinstance(space, spaces.MultiDiscrete):
        bounds = space.start, space.start.astype(object) + space.nvec.astype(object) - 1  # Python ints can't overflow.
    elif isinstance(space, spaces.MultiBinary):
        bounds = 0, 1
    else:
        kinds = "Box, Discrete, MultiDiscrete, MultiBinary, Dict or Tuple"
        raise _at(path, f"a space must be {kinds}, got {type(space).__name__}. Wrap the environment so that it is one.")
    try:
        return BoundedArraySpec(space.shape or (), space.dtype, *map(_one_if_all_equal, bounds))
    except SpecError as error:
        raise _at(path, str(error)) from error


def _one_if_all_equal(bound: Any) -> Any:
    array = np.asarray(bound)
    return array.flat[0] if array.size and (array == array.flat[0]).all() else array


def _below(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _at(path: str, message: str) -> SpecError:
    return SpecError(f"leaf {path!r}: {message}" if path else message, path=path or None)


def _line(place: str, stored: str, wanted: str) -> str:
    return f"{place}: the store has {stored}, the data_spec {wanted}"


def _leaf_differences(pair: tree.Pair) -> list[str]:
    place = f"leaf {pair.path!r}" if pair.keys else "the leaf"
    stored, wanted = pair.expected, pair.given
    if (stored.shape, stored.dtype) != (wanted.shape, wanted.dtype):
        return [_line(place, tree.describe(stored), tree.describe(wanted))]
    if not (isinstance(stored, BoundedArraySpec) and isinstance(wanted, BoundedArraySpec)):
        return [] if type(stored) is type(wanted) else [_line(place, _bounds(stored), _bounds(wanted))]
    unlike = [_first_unlike(getattr(stored, side), getattr(wanted, side), stored.shape) for side in _SIDES]
    return [
        _line(place, f"{side} {found[0]}", f"{side} {found[1]}")
        for side, found in zip(_SIDES, unlike, strict=True)
        if found is not None
    ]


def _bounds(spec: ArraySpec) -> str:
    if isinstance(spec, BoundedArraySpec):
        return f"minimum {_text(spec.minimum)} and maximum {_text(spec.maximum)}"
    return "no bounds"


def _first_unlike(left: npt.NDArray[Any], right: npt.NDArray[Any], shape: tuple[int, ...]) -> tuple[str, str] | None:
    """The first elements that differ once both are broadcast, as text; None when all are equal."""
    left, right = np.broadcast_arrays(left, right)
    unlike = np.argwhere(np.broadcast_to(left != right, shape))
    if not len(unlike):
        return None
    where = "" if left.ndim == 0 else f" at {unlike[0].tolist()}"
    index = tuple(unlike[0])
    return f"{np.broadcast_to(left, shape)[index]}{where}", f"{np.broadcast_to(right, shape)[index]}{where}"


def _leaf_to_json(spec: ArraySpec) -> dict[str, Any]:
    leaf = {"shape": list(spec.shape), "dtype": spec.dtype.name, "name": spec.name}
    if isinstance(spec, BoundedArraySpec):
        leaf |= {side: _bound_to_json(getattr(spec, side)) for side in _SIDES}
    return leaf


def _leaf_from_json(leaf: Any) -> ArraySpec:
    if not isinstance(leaf["shape"], list):
        raise TypeError(f"the shape of a leaf must be a list, got {leaf['shape']!r}")
    spec = ArraySpec(leaf["shape"], leaf["dtype"], leaf["name"])
    if not leaf.keys() & set(_SIDES):
        return spec
    minimum, maximum = (_bound_from_json(leaf[side], spec.dtype) for side in _SIDES)
    return BoundedArraySpec(spec.shape, spec.dtype, minimum, maximum, spec.name)


def _bound_to_json(bound: npt.NDArray[Any]) -> Any:
    values = [_INFINITIES.get(value, value) for value in bound.ravel().tolist()]
    if bound.ndim == 0:
        return values[0]
    if bound.tobytes() == bound.ravel()[:1].tobytes() * bound.size:  # Bytes, because 0.0 and -0.0 are equal.
        values = values[:1]  # Most bounds are the same everywhere, and those of an image would fill the file.
    return {"shape": list(bound.shape), "values": values}


def _bound_from_json(value: Any, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    shape, values = (value["shape"], value["values"]) if isinstance(value, dict) else ([], [value])
    numbers = [float(value) if value in _INFINITIES.values() else value for value in values]
    types: set[type] = {bool} if dtype.kind == "b" else {float, int} if dtype.kind == "f" else {int}
    if not all(type(number) in types for number in numbers):
        raise TypeError(f"the bounds of {dtype} must be of its kind, got {_shortened(values)}")
    return np.full(shape, numbers[0]) if len(numbers) == 1 else np.array(numbers).reshape(shape)
