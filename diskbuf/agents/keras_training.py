"""What agents share that train a Keras model: the rules of their arguments, and one step of the optimizer."""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from diskbuf.errors import OptionError
from diskbuf.tree import describe

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


def optimize(
    tape: "tf.GradientTape",
    loss: "tf.Tensor",
    *,
    variables: list[Any],
    optimizer: Any,
    gradient_clipping: float | None,
    train_step_counter: Any,
) -> "tuple[list[Any], tf.Tensor]":
    """Takes one step of the optimizer and counts it, in the graph of a compiled training step.

    Args:
        tape: Recorded the loss.
        loss: [] float32. If it or a gradient isn't finite the graph ends in an error before anything changes.
        variables: What is trained.
        optimizer: What trains it.
        gradient_clipping: Largest norm of each variable's gradient; None doesn't clip.
        train_step_counter: The tf.Variable that counts.

    Returns:
        The gradients, clipped, None for a variable that the loss doesn't depend on, and the step counted up to.
    """
    import tensorflow as tf

    gradients = tape.gradient(loss, variables)
    if gradient_clipping is not None:
        gradients = [
            gradient if gradient is None else tf.clip_by_norm(gradient, gradient_clipping) for gradient in gradients
        ]
    # A loss can be finite where gradients aren't: relu(NaN) is 0 on some devices.
    size = tf.linalg.global_norm([gradient for gradient in gradients if gradient is not None])
    checks = [
        tf.debugging.check_numerics(loss, "the loss must be finite"),
        tf.debugging.check_numerics(size, "the loss's gradients must be finite; is an observation NaN?"),
    ]
    with tf.control_dependencies(checks):
        optimizer.apply(gradients, variables)
        step = train_step_counter.assign_add(1)
    return gradients, step


def check_keras(name: str, value: Any, kind: str) -> None:
    """Refuses what isn't of a class of Keras.

    Args:
        name: Of the argument.
        value: The argument.
        kind: "Model" or "Optimizer".

    Raises:
        OptionError: If it is something else.
    """
    import keras

    if not isinstance(value, getattr(keras, kind)):
        raise OptionError(f"{name} must be a keras.{kind}, got {describe(value)}. Make one with Keras 3.")


def checked_optimizer(optimizer: Any, variables: list[Any], *, network: str) -> "keras.Optimizer":
    """Returns the optimizer, built for the variables, so that a checkpoint restored before training finds it.

    Args:
        optimizer: A Keras optimizer.
        variables: What it will train.
        network: Name of the argument they come from.

    Raises:
        OptionError: If it isn't one, is in use, or has nothing to train.
    """
    check_keras("optimizer", optimizer, "Optimizer")
    if not variables:
        raise OptionError(f"{network} must have trainable weights, got a model with none. Set its trainable to True.")
    if optimizer.built:
        raise OptionError("optimizer must be one that trains nothing else, got one in use. Make another one.")
    optimizer.build(variables)
    return optimizer


def checked_counter(counter: Any) -> "tf.Variable":
    """Returns the counter, or a new one for None.

    Raises:
        OptionError: If it is no scalar integer tf.Variable.
    """
    import tensorflow as tf

    if counter is None:
        return tf.Variable(0, trainable=False, dtype=tf.int64, name="train_step_counter")
    if not isinstance(counter, tf.Variable) or counter.shape.rank != 0 or not counter.dtype.is_integer:
        raise OptionError(
            f"train_step_counter must be a scalar integer tf.Variable, got {describe(counter)}. "
            "Leave it out, or pass tf.Variable(0, dtype=tf.int64)."
        )
    return counter


def checked_loss(loss_fn: Callable[..., Any], *, label: str) -> Callable[..., Any]:
    """Returns a loss that gives one number for each element.

    Args:
        loss_fn: From targets and predictions [B] to losses [B].
        label: Name of the argument.

    Raises:
        OptionError: If it gives something else.
    """
    import tensorflow as tf

    losses = loss_fn(tf.constant([0.0, 1.0, 2.0]), tf.zeros([3]))
    if getattr(losses, "shape", None) != (3,):
        raise OptionError(
            f"{label} must give a loss for each element, [B] for [B], got {describe(losses)} for B = 3. "
            "Losses of Keras average; use element_wise_huber_loss, element_wise_squared_loss or a function like these."
        )
    return loss_fn


def positive(name: str, value: Any) -> int:
    """Returns an integer of at least 1.

    Raises:
        OptionError: If it is something else.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise OptionError(f"{name} must be an integer of at least 1, got {value!r}.")
    return number


def finite_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    below: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> float:
    """Returns a finite number within limits.

    Raises:
        OptionError: If it is something else.
    """
    rules = {
        "above": (above, operator.gt),
        "below": (below, operator.lt),
        "at least": (at_least, operator.ge),
        "at most": (at_most, operator.le),
    }
    limits = {text: (limit, holds) for text, (limit, holds) in rules.items() if limit is not None}
    is_finite = isinstance(value, int | float | np.integer | np.floating) and bool(np.isfinite(value))
    if not is_finite or not all(holds(value, limit) for limit, holds in limits.values()):
        text = "".join(f", {text} {limit}" for text, (limit, _) in limits.items())
        raise OptionError(f"{name} must be a finite number{text}, got {value!r}.")
    return float(value)
