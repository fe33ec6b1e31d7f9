"""The policy that looks at nothing and chooses uniformly."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.errors import OptionError, SpecError
from diskbuf.policies.policy import Policy
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import PolicyStep, TimeStep
from diskbuf.tree import Structure


class RandomPolicy(Policy):
    """Draws every action anew, independently for each lane and each element.

        >>> from diskbuf.trajectories import restart, time_step_spec
        >>> observation_spec, action_spec = ArraySpec((4,), np.float32), BoundedArraySpec((), np.int64, 0, 1)
        >>> policy = RandomPolicy(time_step_spec(observation_spec), action_spec, seed=0)
        >>> policy.action(restart(np.zeros((6, 4), np.float32), batch_size=6)).action
        array([1, 1, 1, 0, 0, 0])

    Integers and booleans are uniform over their bounds, both included; without bounds over their dtype. Floats are
    uniform between their bounds. Where a float lacks one or both bounds there is no uniform distribution; then, like
    `gymnasium.spaces.Box.sample`, it is one standard exponential away from the bound it has, or standard normal.

    Args:
        time_step_spec: The environment's.
        action_spec: Nest of specs.
        seed: Equal seeds give equal actions, while batch shapes are equal too; None takes entropy from the system.

    Raises:
        OptionError: If the seed is no integer of at least 0.
        SpecError: If an action's dtype is neither boolean, integer nor float.
    """

    def __init__(self, time_step_spec: TimeStep, action_spec: Any, *, seed: int | None = None) -> None:
        super().__init__(time_step_spec, action_spec)
        try:
            self._rng = np.random.default_rng(seed)
        except (TypeError, ValueError) as error:
            raise OptionError(f"seed must be None or an integer of at least 0, got {seed!r}.") from error
        self._structure = Structure(action_spec)
        leaves = self._structure.flatten(action_spec)
        self._leaves = [_Uniform(path, spec) for path, spec in zip(self._structure.paths, leaves, strict=True)]
        self._is_bare = len(self._leaves) == 1 and not self._structure.keys[0]

    def action(self, time_step: TimeStep, policy_state: Any = ()) -> PolicyStep:
        """Draws one action for each lane.

        Args:
            time_step: Only its batch shape matters.
            policy_state: Given back as it came.

        Returns:
            The actions, leaves [B, *shape], never written to again.
        """
        batch_shape = np.shape(time_step.step_type)
        if self._is_bare:  # the common case, ten times faster than through a nest
            return PolicyStep(self._leaves[0].draw(self._rng, batch_shape), policy_state)
        actions = [leaf.draw(self._rng, batch_shape) for leaf in self._leaves]
        return PolicyStep(self._structure.unflatten(actions), policy_state)


# A call of the generator takes as long for one small action as for hundreds, so those are drawn ahead.
_BLOCK_BYTES = 16 * 1024


class _Uniform:
    """Draws one leaf, a block of actions at a time."""

    def __init__(self, path: str, spec: ArraySpec) -> None:
        self._shape = tuple(spec.shape)
        self._dtype = np.dtype(spec.dtype)
        if self._dtype.kind not in "biuf":
            name = f"action/{path}" if path else "action"
            raise SpecError(
                f"leaf {name!r} must be boolean, integer or float to be drawn at random, got {self._dtype}.", path=name
            )
        low, high = (spec.minimum, spec.maximum) if isinstance(spec, BoundedArraySpec) else _widest(self._dtype)
        if self._dtype.kind == "f":
            low, high = low.astype(np.float64), high.astype(np.float64)
            self._is_finite = bool(np.isfinite(low).all() and np.isfinite(high).all())
        self._low, self._high = _scalar_if_uniform(low), _scalar_if_uniform(high)
        self._batch_shape: tuple[int, ...] | None = None
        self._block = np.empty(0, self._dtype)  # [actions, *batch_shape, *shape], each handed out once
        self._used = 0

    def draw(self, rng: np.random.Generator, batch_shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Returns [*batch_shape, *shape], an array of its own or a part of one that nothing else writes to."""
        if self._used == len(self._block) or batch_shape != self._batch_shape:
            action_bytes = self._dtype.itemsize * math.prod(batch_shape + self._shape)
            actions = max(1, _BLOCK_BYTES // max(1, action_bytes))
            self._block, self._used = self._drawn(rng, (actions, *batch_shape, *self._shape)), 0
            self._batch_shape = batch_shape
        self._used += 1
        return self._block[self._used - 1, ...]

    def _drawn(self, rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        if self._dtype.kind != "f":
            return np.asarray(rng.integers(self._low, self._high, size=shape, dtype=self._dtype, endpoint=True))
        if self._is_finite:
            return self._between(rng.random(shape))
        with np.errstate(invalid="ignore"):  # the branch not taken computes with infinity
            has_low, has_high = np.isfinite(self._low), np.isfinite(self._high)
            away = rng.standard_exponential(shape)
            drawn = np.where(
                has_low, self._low + away, np.where(has_high, self._high - away, rng.standard_normal(shape))
            )
            drawn = np.where(has_low & has_high, self._between(rng.random(shape)), drawn)
        return np.asarray(drawn, self._dtype)

    def _between(self, unit: npt.NDArray[np.float64]) -> npt.NDArray[Any]:
        # Two products, because high - low may be more than a float can hold; then what rounding put outside comes back.
        drawn = self._low * (1 - unit) + self._high * unit
        return np.asarray(np.clip(drawn, self._low, self._high), self._dtype)


def _widest(dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """The smallest and the largest value of a dtype."""
    if dtype.kind == "f":
        return np.array(-np.inf, dtype), np.array(np.inf, dtype)
    if dtype.kind == "b":
        return np.array(False), np.array(True)
    limits = np.iinfo(dtype)
    return np.array(limits.min, dtype), np.array(limits.max, dtype)


def _scalar_if_uniform(bound: npt.NDArray[Any]) -> Any:
    """The bound as one Python number where all elements have the same, which draws faster."""
    return bound.flat[0].item() if bound.size and (bound == bound.flat[0]).all() else bound
