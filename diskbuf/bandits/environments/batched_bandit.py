"""What drivers see of every bandit: lanes, specs, and arms that are checked."""

import abc
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from diskbuf.errors import SpecError
from diskbuf.networks.action_values import DiscreteActions
from diskbuf.readers.requests import count
from diskbuf.trajectories import TimeStep, time_step_spec

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class BatchedBandit(abc.ABC):
    """Lanes of a bandit, each an episode of one step at every step. Drivers know it by `is_bandit`.

    Args:
        observation_spec: Nest of specs of one context.
        action_spec: A scalar BoundedArraySpec of integers.
        reward_spec: Nest of specs of one reward.
        batch_size: B, the number of lanes.

    Raises:
        OptionError: If batch_size is below 1.
        SpecError: If the action_spec is something else.
    """

    is_bandit = True

    def __init__(self, observation_spec: Any, action_spec: Any, reward_spec: Any, batch_size: int) -> None:
        self._batch_size = count("batch_size", batch_size)
        self._observation_spec, self._action_spec, self._reward_spec = observation_spec, action_spec, reward_spec
        actions = DiscreteActions.of(action_spec)
        self._num_actions, self._minimum_action = actions.num_actions, actions.minimum
        self._current: TimeStep | None = None

    @property
    def batch_size(self) -> int:
        """B, the number of lanes."""
        return self._batch_size

    @property
    def batched(self) -> bool:
        """True: leaves have a batch axis."""
        return True

    @property
    def num_actions(self) -> int:
        """K, the number of arms."""
        return self._num_actions

    def observation_spec(self) -> Any:
        """Nest of specs of one context, without the batch axis."""
        return self._observation_spec

    def action_spec(self) -> Any:
        """The spec of an arm, a scalar of integers."""
        return self._action_spec

    def reward_spec(self) -> Any:
        """Nest of specs of one reward, without the batch axis."""
        return self._reward_spec

    def time_step_spec(self) -> TimeStep:
        """The specs of one lane's time step."""
        return time_step_spec(self._observation_spec)._replace(reward=self._reward_spec)

    def current_time_step(self) -> TimeStep:
        """Returns the last time step that was returned; resets first if there is none."""
        return self.reset() if self._current is None else self._current

    @abc.abstractmethod
    def reset(self) -> TimeStep:
        """Returns contexts, FIRST in every lane."""

    @abc.abstractmethod
    def step(self, action: npt.NDArray[Any]) -> TimeStep:
        """Pulls one arm in every lane and returns the contexts that follow, LAST in every lane.

        Args:
            action: [B] arms.
        """

    def close(self) -> None:  # noqa: B027  most have nothing to close
        """Closes what is open; closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(batch_size={self._batch_size}, num_actions={self._num_actions})"

    def _checked_arms(self, action: Any) -> npt.NDArray[np.intp]:
        """[B] arms from 0 on, of actions [B].

        Raises:
            SpecError: If they don't fit the action_spec.
        """
        array = np.asarray(action)
        if array.dtype.kind not in "iu" or array.shape != (self._batch_size,):
            raise SpecError(
                f"leaf 'action' must be integers [{self._batch_size}], got {array.dtype} {list(array.shape)}. "
                "Give one arm for each lane.",
                path="action",
            )
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        low = self._minimum_action
        if low:
            array = array.astype(np.int64) - low
        within = array.view(_UNSIGNED[array.dtype.itemsize]) < self._num_actions  # as unsigned, -1 is a large number
        if np.count_nonzero(within) != self._batch_size:
            lane = int((~within).argmax())
            high, got = low + self._num_actions - 1, int(array[lane]) + low
            raise SpecError(
                f"leaf 'action' must lie within [{low}, {high}], got {got} in lane {lane}. "
                "Give the policy this environment's action_spec.",
                path="action",
            )
        return array.astype(np.intp, copy=False)  # which indexes fastest, whatever the policy's dtype
