"""What passes between environment, policy and buffer: time steps, policy steps, trajectories, as TF-Agents has them.

A `Trajectory` is one row of a buffer. Row t holds observation t, action t and the reward for action t, so the reward
and the discount come from the time step after it:

    >>> import numpy as np
    >>> time_step = restart(np.array([[0.0], [5.0]]), batch_size=2)
    >>> next_time_step = termination(np.array([[1.0], [6.0]]), reward=[0.5, 2.0])
    >>> row = from_transition(time_step, PolicyStep(action=np.array([3, 4])), next_time_step)
    >>> row.observation, row.action, row.reward, row.is_last()
    (array([[0.], [5.]]), array([3, 4]), array([0.5, 2. ], dtype=float32), array([ True,  True]))

An episode of n actions is n + 1 rows. The last of them is the *boundary*: its observation is the episode's final one,
its next step is the first of the following episode, and its action, reward (0) and discount (1) mean nothing. It is
there so that the final observation can be bootstrapped from; it is no transition of the agent.

The constructors take leaves of any batch shape, usually [B, ...]; the same tuples hold specs where a spec is asked for.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from diskbuf.errors import SpecError
from diskbuf.specs import ArraySpec, BoundedArraySpec


class StepType:
    """Where a time step stands in its episode. The values are int32, as the specs ask of arrays made from them."""

    FIRST: Final = np.int32(0)
    MID: Final = np.int32(1)
    LAST: Final = np.int32(2)


class TimeStep(NamedTuple):
    """What an environment answers to `reset` and `step`.

    Attributes:
        step_type: [B] int32, values of `StepType`.
        reward: [B] float32, earned by the action that led here; 0 in a first step.
        discount: [B] float32, 0 where the episode terminated, else 1; a truncated episode keeps 1.
        observation: Nest of [B, *shape] arrays.
    """

    step_type: Any
    reward: Any
    discount: Any
    observation: Any

    def is_first(self) -> Any:
        """[B] bool, True in lanes where an episode begins."""
        return _is(self.step_type, StepType.FIRST)

    def is_mid(self) -> Any:
        """[B] bool, True in lanes inside an episode."""
        return _is(self.step_type, StepType.MID)

    def is_last(self) -> Any:
        """[B] bool, True in lanes whose episode has ended, terminated or truncated."""
        return _is(self.step_type, StepType.LAST)


class PolicyStep(NamedTuple):
    """What a policy answers to a time step.

    Attributes:
        action: Nest of [B, *shape] arrays.
        state: The policy's own state for its next call; () if it has none.
        info: What else the policy wants stored, such as log probabilities; () if nothing.
    """

    action: Any
    state: Any = ()
    info: Any = ()


class Trajectory(NamedTuple):
    """One row: a time step, the action taken in it, and what came of that action.

    Attributes:
        step_type: [B] int32, of this step.
        observation: Nest of [B, *shape] arrays, what the action was chosen from.
        action: Nest of [B, *shape] arrays.
        policy_info: The policy's info, () if none.
        next_step_type: [B] int32, of the step that followed.
        reward: [B] float32, for this action.
        discount: [B] float32, 0 where this action terminated the episode, else 1.
    """

    step_type: Any
    observation: Any
    action: Any
    policy_info: Any
    next_step_type: Any
    reward: Any
    discount: Any

    def is_first(self) -> Any:
        """[B] bool, True where the row begins an episode."""
        return _is(self.step_type, StepType.FIRST)

    def is_mid(self) -> Any:
        """[B] bool, True where the row neither begins nor ends an episode, nor is a boundary."""
        return _is(self.step_type, StepType.MID) & _is(self.next_step_type, StepType.MID)

    def is_last(self) -> Any:
        """[B] bool, True where the row's action ended the episode."""
        return _is(self.next_step_type, StepType.LAST)

    def is_boundary(self) -> Any:
        """[B] bool, True where the row lies between two episodes and is no transition of the agent."""
        return _is(self.step_type, StepType.LAST)


def restart(observation: Any, batch_size: int | None = None) -> TimeStep:
    """Returns the time step that begins an episode: FIRST, reward 0, discount 1.

    Args:
        observation: Nest of [B, *shape] arrays; kept, not copied.
        batch_size: B; None for a time step without a batch axis.
    """
    shape = () if batch_size is None else (batch_size,)
    return TimeStep(
        step_type=np.full(shape, StepType.FIRST),
        reward=np.zeros(shape, np.float32),
        discount=np.ones(shape, np.float32),
        observation=observation,
    )


def transition(observation: Any, reward: npt.ArrayLike, discount: npt.ArrayLike = 1.0) -> TimeStep:
    """Returns a time step inside an episode: MID.

    Args:
        observation: Nest of [B, *shape] arrays; kept, not copied.
        reward: [B] numbers, rounded to float32; its shape is the batch shape.
        discount: [B] numbers, or one for all.

    Raises:
        SpecError: If reward or discount are not numbers, or the discount doesn't fit the reward's shape.
    """
    return _time_step(StepType.MID, observation, reward, discount)


def termination(observation: Any, reward: npt.ArrayLike) -> TimeStep:
    """Returns the time step of an episode that ended by itself: LAST, discount 0, nothing to bootstrap from.

    Args:
        observation: Nest of [B, *shape] arrays; kept, not copied.
        reward: [B] numbers, rounded to float32; its shape is the batch shape.

    Raises:
        SpecError: If the reward is not made of numbers.
    """
    return _time_step(StepType.LAST, observation, reward, 0.0)


def truncation(observation: Any, reward: npt.ArrayLike, discount: npt.ArrayLike = 1.0) -> TimeStep:
    """Returns the time step of an episode that was cut off, by a time limit say: LAST, and the discount stays 1.

    Args:
        observation: Nest of [B, *shape] arrays; kept, not copied.
        reward: [B] numbers, rounded to float32; its shape is the batch shape.
        discount: [B] numbers, or one for all.

    Raises:
        SpecError: If reward or discount are not numbers, or the discount doesn't fit the reward's shape.
    """
    return _time_step(StepType.LAST, observation, reward, discount)


def from_transition(time_step: TimeStep, action_step: PolicyStep, next_time_step: TimeStep) -> Trajectory:
    """Returns the row of one transition, or its spec when given specs. Nothing is copied.

    Args:
        time_step: Where the action was taken.
        action_step: The action; its state is left out.
        next_time_step: What came of it: the row's reward, discount and next_step_type.
    """
    step_type, _, _, observation = time_step
    action, _, policy_info = action_step
    next_step_type, reward, discount, _ = next_time_step
    return Trajectory(step_type, observation, action, policy_info, next_step_type, reward, discount)


def time_step_spec(observation_spec: Any) -> TimeStep:
    """Returns the specs of an environment's time steps, without a batch axis.

    Args:
        observation_spec: Nest of specs, one observation.
    """
    return TimeStep(
        step_type=ArraySpec((), np.int32, name="step_type"),
        reward=ArraySpec((), np.float32, name="reward"),
        discount=BoundedArraySpec((), np.float32, minimum=0.0, maximum=1.0, name="discount"),
        observation=observation_spec,
    )


def trajectory_spec(time_step_spec: TimeStep, policy_step_spec: PolicyStep) -> Trajectory:
    """Returns the spec of the rows that a policy collects, which is the `data_spec` of a buffer for them.

        >>> observation_spec = ArraySpec((4,), np.float32)
        >>> spec = trajectory_spec(time_step_spec(observation_spec), PolicyStep(ArraySpec((), np.int64)))
        >>> spec.observation is observation_spec, spec.policy_info
        (True, ())

    Args:
        time_step_spec: The environment's.
        policy_step_spec: The policy's specs of action, state and info.
    """
    return from_transition(time_step_spec, policy_step_spec, time_step_spec)


def _is(step_type: Any, value: np.int32) -> Any:
    # `==` keeps tensors tensors, also inside a tf.function, where np.equal fails. Lists have an == of another meaning.
    return step_type == value if hasattr(step_type, "shape") else np.equal(step_type, value)


def _time_step(step_type: np.int32, observation: Any, reward: npt.ArrayLike, discount: npt.ArrayLike) -> TimeStep:
    rewards = _float32("reward", reward)
    discounts = _float32("discount", discount)
    if discounts.shape not in ((), rewards.shape):
        raise SpecError(
            f"discount must be one number or have the reward's shape {list(rewards.shape)}, "
            f"got {list(discounts.shape)}.",
            path="discount",
        )
    return TimeStep(
        step_type=np.full(rewards.shape, step_type),
        reward=rewards,
        discount=np.full(rewards.shape, discounts),
        observation=observation,
    )


def _float32(name: str, values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise SpecError(
            f"{name} must be real numbers, got {array.dtype} {list(array.shape)}. Is a value None, or a list uneven?",
            path=name,
        )
    return array.astype(np.float32)
