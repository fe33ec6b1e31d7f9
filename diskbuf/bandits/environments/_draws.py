"""Functions that environments are given to draw from: which of them take the generator, and what specs follow."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.errors import OptionError, SpecError
from diskbuf.specs import ArraySpec
from diskbuf.tree import Structure, describe

Draw = Callable[..., Any]
"""Takes a generator, and whatever else its function takes."""


def takes(function: Any, name: str) -> bool:
    """Returns whether a function has a parameter of that name which is still to be given.

    A built-in function that doesn't tell its parameters has none.
    """
    if isinstance(function, functools.partial) and name in function.keywords:
        return False
    try:
        parameter = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def as_draw(name: str, function: Any) -> Draw:
    """Returns the function as one that is called with a generator first, which it gets as `rng` if it takes one.

    Args:
        name: What messages call it.
        function: What the user gave.

    Raises:
        OptionError: If it isn't callable.
    """
    if not callable(function):
        raise OptionError(
            f"{name} must be a function that draws, got {describe(function)}. "
            "Write lambda rng: rng.normal(size=...), say."
        )
    if takes(function, "rng"):
        return lambda rng, *arguments, **named: function(*arguments, rng=rng, **named)
    return lambda _rng, *arguments, **named: function(*arguments, **named)


def as_parameter_draw(name: str, source: Any, shape: tuple[int, ...]) -> Callable[[np.random.Generator], Any]:
    """Returns a function from a generator to float64 [*shape], of a function or of numbers that stay the same.

    Args:
        name: What messages call it.
        source: A function, with or without a parameter `rng`, or numbers.
        shape: What it must draw.

    Raises:
        OptionError: If the numbers are none, aren't finite, or have another shape; the returned function raises it
            for what the user's function draws.
    """
    if callable(source):
        draw = as_draw(name, source)
        return lambda rng: _numbers(name, draw(rng), shape)
    constant = _numbers(name, source, shape)
    return lambda _rng: constant


def as_numbers(name: str, value: Any, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Returns finite numbers of a shape as a float64 array of their own.

    Raises:
        OptionError: If they are none, aren't finite, or have another shape.
    """
    return _numbers(name, value, shape)


def as_spreads(name: str, value: Any, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    """Returns standard deviations of a shape, or one for all, as a float64 array.

    Raises:
        OptionError: If they are no finite numbers of at least 0, or have another shape.
    """
    shape = () if np.ndim(value) == 0 else shape
    spreads = as_numbers(name, value, shape)
    if (spreads < 0).any():
        raise OptionError(f"{name} must be at least 0, got {value!r}. Give a standard deviation.")
    return spreads


def spec_of_batch(name: str, nest: Any) -> tuple[Any, int]:
    """Returns the spec of one lane of a nest of arrays, and how many lanes it has.

    Raises:
        SpecError: If a leaf has no batch axis, or another one than the leaves before it.
    """
    structure = Structure(nest)
    arrays = [np.asarray(leaf) for leaf in structure.flatten(nest)]
    batch_sizes = {array.shape[:1] for array in arrays}
    if len(batch_sizes) != 1 or batch_sizes == {()} or batch_sizes == {(0,)}:
        raise SpecError(f"{name} must return arrays [B, ...] with one batch axis for all, got {describe(nest)}.")
    ((batch_size,),) = batch_sizes
    return structure.unflatten(ArraySpec(array.shape[1:], array.dtype) for array in arrays), batch_size


def as_arrays(structure: Structure, nest: Any) -> Any:
    """Returns a nest of arrays of their own: a user's function may fill the same array again and again.

    Raises:
        SpecError: If the nest has another structure.
    """
    if structure.paths == ("",):
        return np.array(nest)
    return structure.unflatten(np.array(leaf) for leaf in structure.flatten(nest))


def _numbers(name: str, value: Any, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    try:
        given = np.asarray(value)
    except ValueError as error:
        raise OptionError(f"{name} must be numbers {list(shape)}, got an uneven list, {describe(value)}.") from error
    if given.dtype.kind not in "iuf" or given.shape != shape:
        wanted = f"numbers {list(shape)}" if shape else "a number"
        shown = repr(value) if given.ndim == 0 else describe(given)
        raise OptionError(f"{name} must be {wanted}, got {shown}.")
    numbers = given.astype(np.float64)  # a copy
    if not np.isfinite(numbers).all():
        raise OptionError(f"{name} must be finite, got {numbers}.")
    return numbers
