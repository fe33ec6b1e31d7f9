"""What n steps of experience are worth: their rewards, and how much of a bootstrapped value to add to them."""

from typing import TYPE_CHECKING, NamedTuple

from diskbuf.trajectories import StepType

if TYPE_CHECKING:
    import tensorflow as tf


class NStep(NamedTuple):
    """The n-step transition that a window of T = n + 1 rows holds in each lane.

    Attributes:
        reward: [B] float32, rewards of the rows that count, discounted to the first.
        discount: [B] float32, what the value of the observation in row `length` is multiplied by; gamma is in it.
        length: [B] int32, how many rows count, 0 to n.
        is_valid: [B] bool, whether any does.
    """

    reward: "tf.Tensor"
    discount: "tf.Tensor"
    length: "tf.Tensor"
    is_valid: "tf.Tensor"


def n_step(
    step_type: "tf.Tensor",
    next_step_type: "tf.Tensor",
    reward: "tf.Tensor",
    discount: "tf.Tensor",
    *,
    gamma: float,
) -> NStep:
    """Adds up the transitions at the beginning of each window, as far as they belong to one episode.

    The n-step return of Sutton and Barto, "Reinforcement Learning: An Introduction" (2nd edition, 2018), equation 7.1,
    with a discount d of the environment's for each step:

        R = r[0] + gamma d[0] r[1] + ... + gamma^(m-1) d[0]...d[m-2] r[m-1],    D = gamma^m d[0]...d[m-1]

    A row counts if the row after it holds what came of it, and all rows before it count. So a window stops

    - where an episode ends in it: the row after that is a boundary, which is no transition. It holds the observation to
      bootstrap from; after a termination d is 0, and it isn't.
    - at a boundary in its first row: nothing counts.
    - where the next row isn't the one that this row announced, because a driver went on after a failure; the last row
      before the gap is bootstrapped from.

    Args:
        step_type: [B, T] int32.
        next_step_type: [B, T] int32.
        reward: [B, T] float32; the last row's doesn't matter.
        discount: [B, T] float32; likewise.
        gamma: The agent's discount.
    """
    import tensorflow as tf

    is_transition = (step_type[:, :-1] != StepType.LAST) & (next_step_type[:, :-1] == step_type[:, 1:])
    counts = tf.math.cumprod(tf.cast(is_transition, tf.int32), axis=1)  # [B, n]
    factor = tf.where(counts > 0, gamma * discount[:, :-1], 1.0)
    until = tf.math.cumprod(factor, axis=1, exclusive=True)
    length = tf.reduce_sum(counts, axis=1)
    return NStep(
        reward=tf.reduce_sum(tf.where(counts > 0, until * reward[:, :-1], 0.0), axis=1),
        discount=tf.reduce_prod(factor, axis=1),
        length=length,
        is_valid=length > 0,
    )
