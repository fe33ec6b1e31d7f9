"""Losses of temporal differences, one number for each element."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf


def element_wise_huber_loss(td_targets: "tf.Tensor", predictions: "tf.Tensor") -> "tf.Tensor":
    """Returns half the square of each error up to 1, and beyond it the error less one half.

    From Huber, "Robust Estimation of a Location Parameter" (1964); it bounds gradients as the clipped error of Mnih et
    al., "Human-level control through deep reinforcement learning" (2015), does.

    Args:
        td_targets: [B] float.
        predictions: [B] float.

    Returns:
        [B] float.
    """
    import tensorflow as tf

    error = tf.abs(td_targets - predictions)
    return tf.where(error <= 1.0, 0.5 * tf.square(error), error - 0.5)


def element_wise_squared_loss(td_targets: "tf.Tensor", predictions: "tf.Tensor") -> "tf.Tensor":
    """Returns the square of each error.

    Args:
        td_targets: [B] float.
        predictions: [B] float.

    Returns:
        [B] float.
    """
    import tensorflow as tf

    return tf.square(td_targets - predictions)
