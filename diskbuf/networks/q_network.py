"""The usual Q-network: preprocessing, convolutions, fully connected layers, one value for each action."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from diskbuf import specs
from diskbuf.errors import OptionError, SpecError
from diskbuf.networks.action_values import DiscreteActions
from diskbuf.tree import Structure

if TYPE_CHECKING:
    import keras


def QNetwork(  # noqa: N802 - a class in TF-Agents; here, as keras.Input is, a function that makes a plain Keras model
    observation_spec: Any,
    action_spec: Any,
    *,
    fc_layer_params: Sequence[int] = (75, 40),
    conv_layer_params: Sequence[tuple[int, int, int]] | None = None,
    preprocessing_layers: Any = None,
    preprocessing_combiner: "Callable[[list[Any]], Any] | None" = None,
    dropout_layer_params: Sequence[float | None] | None = None,
    activation_fn: "str | Callable[[Any], Any]" = "relu",
    seed: int | None = None,
    name: str = "QNetwork",
) -> "keras.Model":
    """Makes a Keras model that maps a batch of observations to the values of all actions, [B, num_actions].

    The model is a functional one: it is saved, copied, looked at and trained as Keras does it. Each leaf goes through
    its preprocessing layer and becomes float32; the leaves are made one by the combiner, which, unless given, flattens
    and concatenates them; then come convolutions, fully connected layers and the layer of values. Values of a dtype
    other than float32 are only cast: scale pixels, and encode categories, in a preprocessing layer.

        >>> import keras
        >>> from diskbuf.specs import ArraySpec, BoundedArraySpec
        >>> observation_spec = {"camera": ArraySpec((84, 84, 4), "uint8"), "speed": ArraySpec((), "float32")}
        >>> camera = keras.Sequential([keras.layers.Rescaling(1 / 255), keras.layers.Conv2D(16, 8, strides=4)])
        >>> network = QNetwork(
        ...     observation_spec,
        ...     BoundedArraySpec((), "int64", 0, 5),
        ...     preprocessing_layers={"camera": camera, "speed": keras.layers.Identity()},
        ... )
        >>> network({"camera": np.zeros((2, 84, 84, 4), "uint8"), "speed": np.zeros(2, "float32")}).shape
        TensorShape([2, 6])

    Weights begin as in TF-Agents: hidden layers after He et al., "Delving Deep into Rectifiers" (2015), the values
    uniform between -0.03 and 0.03 around -0.2.

    Args:
        observation_spec: Nest of specs, one observation.
        action_spec: A scalar BoundedArraySpec of integers.
        fc_layer_params: Units of each fully connected layer, outermost last.
        conv_layer_params: (filters, kernel size, stride) of each convolution; the observation must then be one of
            [height, width, channels] after preprocessing and combining. None for no convolutions.
        preprocessing_layers: Nest like observation_spec of Keras layers, each for one leaf.
        preprocessing_combiner: A Keras layer, or a function of Keras tensors, from the list of leaves to one tensor.
        dropout_layer_params: For each fully connected layer the share of its units that training drops, from 0 to below
            1, or None; None for no dropout at all.
        activation_fn: Of convolutions and fully connected layers.
        seed: Makes weights and dropout repeatable; None leaves that to `keras.utils.set_random_seed`.
        name: Of the model.

    Raises:
        SpecError: If the action_spec is something else, or preprocessing_layers is no nest like observation_spec.
        OptionError: If a layer's sizes are not positive integers, dropout doesn't fit the layers, the seed is none, or
            convolutions have no image.
    """
    import keras

    actions = DiscreteActions.of(action_spec)
    observation_spec = specs.as_spec(observation_spec)
    _check_sizes("fc_layer_params", fc_layer_params)
    for layer in conv_layer_params or ():
        _check_sizes("conv_layer_params", layer)
    dropout_rates = _dropout_rates(dropout_layer_params, len(fc_layer_params))
    seeds = _seeds(seed)
    structure = Structure(observation_spec)
    inputs = [
        keras.Input(spec.shape, dtype=spec.dtype.name, name=_input_name(keys))
        for keys, spec in zip(structure.keys, structure.flatten(observation_spec), strict=True)
    ]
    leaves = [keras.ops.cast(leaf, "float32") for leaf in _preprocessed(inputs, structure, preprocessing_layers)]
    hidden = _combined(leaves, preprocessing_combiner, keeps_axes=bool(conv_layer_params))
    if conv_layer_params and len(hidden.shape) != 4:
        raise OptionError(
            "conv_layer_params must be None, unless the observation is one image [height, width, channels], got "
            f"{list(hidden.shape[1:])}. Put the convolutions into preprocessing_layers, or leave them out."
        )
    for filters, kernel_size, strides in conv_layer_params or ():
        hidden = keras.layers.Conv2D(
            filters, kernel_size, strides, activation=activation_fn, kernel_initializer=_he(seeds)
        )(hidden)
    hidden = keras.layers.Flatten()(hidden)
    for units, rate in zip(fc_layer_params, dropout_rates, strict=True):
        hidden = keras.layers.Dense(units, activation=activation_fn, kernel_initializer=_he(seeds))(hidden)
        if rate is not None:
            hidden = keras.layers.Dropout(rate, seed=next(seeds))(hidden)
    values = keras.layers.Dense(
        actions.num_actions,
        kernel_initializer=keras.initializers.RandomUniform(-0.03, 0.03, seed=next(seeds)),
        bias_initializer=keras.initializers.Constant(-0.2),
    )(hidden)
    return keras.Model(structure.unflatten(inputs), values, name=name)


def _input_name(keys: tuple[str | int, ...]) -> str | None:
    """Keras wants the inputs of a dict named after their keys; it finds names for all others."""
    return keys[0] if len(keys) == 1 and isinstance(keys[0], str) else None


def _preprocessed(inputs: list[Any], structure: Structure, layers: Any) -> list[Any]:
    if layers is None:
        return inputs
    try:
        flat = structure.flatten(layers)
    except SpecError as error:
        raise SpecError(
            f"preprocessing_layers must be a nest like observation_spec: {error} A leaf that needs none gets "
            "keras.layers.Identity().",
            path=error.path,
        ) from error
    return [layer(leaf) for layer, leaf in zip(flat, inputs, strict=True)]


def _combined(leaves: list[Any], combiner: Callable[[list[Any]], Any] | None, *, keeps_axes: bool) -> Any:
    import keras

    if combiner is not None:
        return combiner(leaves)
    if len(leaves) == 1:
        return leaves[0]
    if keeps_axes:
        raise OptionError(
            f"preprocessing_combiner must be given when {len(leaves)} leaves go into convolutions, got None. "
            "keras.layers.Concatenate() stacks the channels of images of one size."
        )
    return keras.layers.Concatenate()([keras.layers.Flatten()(leaf) for leaf in leaves])


def _he(seeds: Iterator[int | None]) -> Any:
    import keras

    return keras.initializers.HeNormal(seed=next(seeds))


def _seeds(seed: int | None) -> Iterator[int | None]:
    """Endless seeds for initializers, which must not share one; None leaves it to Keras."""
    if seed is None:
        return itertools.repeat(None)
    try:
        rng = np.random.default_rng(seed)
    except (TypeError, ValueError) as error:
        raise OptionError(f"seed must be None or an integer of at least 0, got {seed!r}.") from error
    return iter(lambda: int(rng.integers(2**31)), -1)


def _check_sizes(name: str, sizes: Iterable[Any]) -> None:
    wrong = [size for size in sizes if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1]
    if wrong:
        raise OptionError(f"{name} must be made of integers of at least 1, got {wrong[0]!r}.")


def _dropout_rates(rates: Sequence[float | None] | None, num_layers: int) -> list[float | None]:
    if rates is None:
        return [None] * num_layers
    if len(rates) != num_layers:
        raise OptionError(
            f"dropout_layer_params must have one for each of the {num_layers} fc_layer_params, got {len(rates)}. "
            "Put None where nothing is dropped."
        )
    for rate in rates:
        is_number = isinstance(rate, int | float | np.integer | np.floating)
        if rate is not None and not (is_number and 0 <= rate < 1):
            raise OptionError(f"dropout_layer_params must be None or numbers from 0 to below 1, got {rate!r}.")
    return [None if rate is None else float(rate) for rate in rates]
