"""Contexts as rows of numbers, for models that are linear in them."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diskbuf import specs
from diskbuf.bandits.policies.bandit_policy import ConstraintSplitter
from diskbuf.errors import SpecError
from diskbuf.tree import Structure

if TYPE_CHECKING:
    import tensorflow as tf


class ContextFeatures:
    """Flattens the leaves of a context and sets them side by side, in the order of `Structure.paths`.

    Integers and booleans become the same numbers in floating point, as in TF-Agents, which takes one leaf only.

    Args:
        observation_spec: Nest of specs.
        splitter: What takes masks off observations; None if there are none.
        add_bias: Whether a feature that is always 1 comes after the others.

    Attributes:
        num_features: d, with the bias.

    Raises:
        SpecError: If a leaf isn't numbers, or there is nothing to learn from.
    """

    def __init__(self, observation_spec: Any, splitter: ConstraintSplitter | None, *, add_bias: bool) -> None:
        observation_spec = specs.as_spec(observation_spec)
        observations = Structure(observation_spec)
        zeros = [np.zeros((1, *spec.shape), spec.dtype) for spec in observations.flatten(observation_spec)]
        context = observations.unflatten(zeros)
        if splitter is not None:
            context, _ = splitter(context)
        self._structure = Structure(context)
        leaves = [np.asarray(leaf) for leaf in self._structure.flatten(context)]
        for path, leaf in zip(self._structure.paths, leaves, strict=True):
            if leaf.dtype.kind not in "biuf":
                raise SpecError(
                    f"leaf 'observation{path and '/'}{path}' must be numbers, got {leaf.dtype}. Encode it, or take it "
                    "off in observation_and_action_constraint_splitter.",
                    path=path,
                )
        self._shapes = [leaf.shape[1:] for leaf in leaves]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self._is_vector = len(leaves) == 1 and leaves[0].ndim == 2
        self._add_bias = add_bias
        self.num_features = sum(self._sizes) + add_bias
        if not self.num_features:
            raise SpecError("the context must have a number at least, got none. Set add_bias to learn without one.")

    def of(self, context: Any) -> npt.NDArray[np.float64]:
        """Returns [B, d] float64.

        Args:
            context: Nest of [B, *shape] arrays.

        Raises:
            SpecError: If a leaf has another shape, or isn't finite.
        """
        leaves = [np.asarray(leaf) for leaf in ([context] if self._is_vector else self._structure.flatten(context))]
        for path, leaf, shape in zip(self._structure.paths, leaves, self._shapes, strict=True):
            if leaf.shape[1:] != shape or not leaf.ndim:
                raise SpecError(
                    f"leaf 'observation{path and '/'}{path}' must be [B, {', '.join(map(str, shape))}], got "
                    f"{list(leaf.shape)}. Give what the time_step_spec says.",
                    path=path,
                )
        if self._is_vector and not self._add_bias:
            features = leaves[0].astype(np.float64)
        else:
            lanes = len(leaves[0]) if leaves else 0
            flat = [leaf.reshape(lanes, size) for leaf, size in zip(leaves, self._sizes, strict=True)]
            features = np.concatenate([*flat, np.ones((lanes, int(self._add_bias)))], axis=1, dtype=np.float64)
        if not np.isfinite(features).all():
            lane = int((~np.isfinite(features)).any(axis=1).argmax())
            raise SpecError(f"a context must be finite, got {features[lane]} in lane {lane}. Leave such rows out.")
        return features

    def of_tensors(self, context: Any) -> "tf.Tensor":
        """Returns [B, d] float64.

        Args:
            context: Nest of [B, *shape] tensors.
        """
        import tensorflow as tf

        leaves = self._structure.flatten(context)
        lanes = tf.shape(leaves[0])[0]
        flat = [
            tf.reshape(tf.cast(leaf, tf.float64), [lanes, size]) for leaf, size in zip(leaves, self._sizes, strict=True)
        ]
        return tf.concat([*flat, tf.ones([lanes, int(self._add_bias)], tf.float64)], axis=1)
