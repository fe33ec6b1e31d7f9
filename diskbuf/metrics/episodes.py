"""Metrics over the last episodes: average length, average, smallest and largest return.

A *return* is the sum of an episode's rewards, not discounted. Episodes that a metric has not seen from their first row
to their last give nothing. (In TF-Agents one that was running when the metric came counts with the part seen, and the
steps of one that was cut off count for the next episode's length.)
"""

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf import specs
from diskbuf.errors import OptionError, SpecError
from diskbuf.metrics.episode_sums import EpisodeSums
from diskbuf.metrics.metric import FIRST, Metric, as_array, where_ended
from diskbuf.tree import Structure, describe


class _EpisodeMetric(Metric):
    """Holds one `EpisodeSums` for each leaf of what is summed, from the first row on, which tells the lanes."""

    def __init__(
        self, name: str, prefix: str, batch_size: int | None, buffer_size: int, shapes: tuple[tuple[int, ...], ...]
    ) -> None:
        super().__init__(name, prefix)
        self._given_batch_size = None if batch_size is None else _at_least_one("batch_size", batch_size)
        self._buffer_size = _at_least_one("buffer_size", buffer_size)
        self._shapes = shapes
        self._sums: list[EpisodeSums] = []
        self.reset()

    def reset(self) -> None:
        """Forgets all episodes; those that are running are not counted when they end."""
        self._sums = []
        if self._given_batch_size is not None:
            self._begin(self._given_batch_size)

    def _begin(self, lanes: int) -> None:
        self._sums = [EpisodeSums(lanes, shape, self._buffer_size) for shape in self._shapes]

    def _add(self, step_type: npt.NDArray[Any], next_step_type: npt.NDArray[Any], amounts: list[Any]) -> None:
        lanes = len(step_type)
        if not self._sums:
            self._begin(lanes)
        known = len(self._sums[0].has_begun)
        if lanes != known:
            raise SpecError(
                f"leaf 'step_type' must be [{known}], the batch size of {self}, got [{lanes}]. "
                f"Make a metric for each environment, with batch_size={lanes}.",
                path="step_type",
            )
        begins = step_type == FIRST
        is_first = begins if np.count_nonzero(begins) else None
        has_ended = where_ended(step_type, next_step_type)
        for sums, amount in zip(self._sums, amounts, strict=True):
            sums.add(is_first, has_ended, amount)

    def _finished(self) -> npt.NDArray[np.float64]:
        """[episodes] sums of the only leaf."""
        return self._sums[0].array() if self._sums else np.empty(0)

    def _state(self) -> dict[str, Any]:
        return {"sums": [sums.state() for sums in self._sums]}

    def _restore(self, state: dict[str, Any]) -> None:
        saved = state["sums"]
        if not saved:
            self.reset()
            return
        lanes = len(saved[0]["has_begun"])
        known = self._given_batch_size or lanes
        empty = [EpisodeSums(known, shape, self._buffer_size) for shape in self._shapes]
        try:
            self._sums = [sums.restored(leaf) for sums, leaf in zip(empty, saved, strict=True)]
        except ValueError as error:
            raise SpecError(
                f"a checkpoint for {self} must hold {known} lanes and rewards "
                f"{[list(shape) for shape in self._shapes]}, got {lanes} lanes and others ({error}). "
                "Give the metric the batch_size and reward_spec it had when it was saved.",
            ) from error


class AverageEpisodeLengthMetric(_EpisodeMetric):
    """The average number of steps, boundaries left out, of the last `buffer_size` episodes; 0 before the first ends.

    Args:
        name: What summaries and logs call it.
        prefix: What TensorBoard groups it under.
        batch_size: B; None takes it from the first row.
        buffer_size: Episodes that are averaged.
    """

    def __init__(
        self,
        name: str = "AverageEpisodeLength",
        prefix: str = "Metrics",
        *,
        batch_size: int | None = None,
        buffer_size: int = 10,
    ) -> None:
        super().__init__(name, prefix, batch_size, buffer_size, ((),))

    def result(self) -> np.float32:
        """Returns the average."""
        lengths = self._finished()
        return np.float32(lengths.mean() if len(lengths) else 0)

    def _observe(self, trajectory: Any, step_type: npt.NDArray[Any], next_step_type: npt.NDArray[Any]) -> None:  # noqa: ARG002
        self._add(step_type, next_step_type, [1])


class _ReturnMetric(_EpisodeMetric):
    def _observe(self, trajectory: Any, step_type: npt.NDArray[Any], next_step_type: npt.NDArray[Any]) -> None:
        reward = as_array(trajectory.reward)
        if reward.dtype.kind not in "biuf" or reward.shape[:1] != step_type.shape:
            advice = " A nest of rewards goes to AverageReturnMultiMetric." if reward.dtype.kind not in "biuf" else ""
            raise SpecError(
                f"leaf 'reward' must be numbers [{len(step_type)}, ...], got {describe(trajectory.reward)} in {self}."
                f"{advice}",
                path="reward",
            )
        if reward.ndim > 1:  # a vector counts with its sum, as in TF-Agents
            reward = reward.reshape(len(reward), -1).sum(axis=1, dtype=np.float64)
        self._add(step_type, next_step_type, [reward])


class AverageReturnMetric(_ReturnMetric):
    """The average return of the last `buffer_size` episodes; 0 before the first ends.

        >>> from diskbuf.drivers import DynamicEpisodeDriver
        >>> from diskbuf.environments import suite_gym
        >>> from diskbuf.policies import RandomPolicy
        >>> average_return = AverageReturnMetric()
        >>> with suite_gym.load("CartPole-v1", num_envs=2, seed=0, max_episode_steps=9) as env:
        ...     policy = RandomPolicy(env.time_step_spec(), env.action_spec(), seed=0)
        ...     _ = DynamicEpisodeDriver(env, policy, [average_return], num_episodes=2).run()
        >>> print(average_return.name, average_return.result())
        AverageReturn 9.0

    Args:
        name: What summaries and logs call it.
        prefix: What TensorBoard groups it under.
        batch_size: B; None takes it from the first row.
        buffer_size: Episodes that are averaged.
    """

    def __init__(
        self,
        name: str = "AverageReturn",
        prefix: str = "Metrics",
        *,
        batch_size: int | None = None,
        buffer_size: int = 10,
    ) -> None:
        super().__init__(name, prefix, batch_size, buffer_size, ((),))

    def result(self) -> np.float32:
        """Returns the average."""
        returns = self._finished()
        return np.float32(returns.mean() if len(returns) else 0)


class MinReturnMetric(_ReturnMetric):
    """The smallest return of the last `buffer_size` episodes; the largest float32 before the first ends.

    Args:
        name: What summaries and logs call it.
        prefix: What TensorBoard groups it under.
        batch_size: B; None takes it from the first row.
        buffer_size: Episodes that are looked at.
    """

    def __init__(
        self, name: str = "MinReturn", prefix: str = "Metrics", *, batch_size: int | None = None, buffer_size: int = 10
    ) -> None:
        super().__init__(name, prefix, batch_size, buffer_size, ((),))

    def result(self) -> np.float32:
        """Returns the smallest return."""
        returns = self._finished()
        return np.float32(returns.min() if len(returns) else np.finfo(np.float32).max)


class MaxReturnMetric(_ReturnMetric):
    """The largest return of the last `buffer_size` episodes; the lowest float32 before the first ends.

    Args:
        name: What summaries and logs call it.
        prefix: What TensorBoard groups it under.
        batch_size: B; None takes it from the first row.
        buffer_size: Episodes that are looked at.
    """

    def __init__(
        self, name: str = "MaxReturn", prefix: str = "Metrics", *, batch_size: int | None = None, buffer_size: int = 10
    ) -> None:
        super().__init__(name, prefix, batch_size, buffer_size, ((),))

    def result(self) -> np.float32:
        """Returns the largest return."""
        returns = self._finished()
        return np.float32(returns.max() if len(returns) else np.finfo(np.float32).min)


class AverageReturnMultiMetric(_EpisodeMetric):
    """The average return of the last `buffer_size` episodes for each element of a reward that is a nest or a vector.

        >>> spec = {"speed": specs.ArraySpec((), np.float32), "costs": specs.ArraySpec((2,), np.float32)}
        >>> AverageReturnMultiMetric(spec).result()
        {'speed': np.float32(0.0), 'costs': array([0., 0.], dtype=float32)}

    In TensorBoard each element has a tag of its own: `prefix/name/LEAF`; the elements of a vector have `LEAF0`, `LEAF1`
    and so on, or `LEAF/0`, `LEAF/1` when there are other leaves. LEAF is the name of the leaf's spec; without one it is
    `Metric` and the leaf's number in the order of the keys, or just `Metric` if there is only one leaf.

    Args:
        reward_spec: Nest of specs of one lane's reward.
        name: What summaries and logs call it.
        prefix: What TensorBoard groups it under.
        batch_size: B; None takes it from the first row.
        buffer_size: Episodes that are averaged.

    Raises:
        SpecError: If reward_spec is no nest of specs of real numbers.
        OptionError: If batch_size or buffer_size is below 1.
    """

    def __init__(
        self,
        reward_spec: Any,
        name: str = "AverageReturnMultiMetric",
        *,
        prefix: str = "Metrics",
        batch_size: int | None = None,
        buffer_size: int = 10,
    ) -> None:
        spec = specs.as_spec(reward_spec)
        self._structure = Structure(spec)
        self._leaves: list[specs.ArraySpec] = self._structure.flatten(spec)
        self._names = [f"reward/{path}" if path else "reward" for path in self._structure.paths]
        for path, leaf in zip(self._names, self._leaves, strict=True):
            if leaf.dtype.kind not in "biuf":
                raise SpecError(f"leaf {path!r} must be real numbers, got {leaf.dtype}.", path=path)
        super().__init__(name, prefix, batch_size, buffer_size, tuple(leaf.shape for leaf in self._leaves))

    def result(self) -> Any:
        """Returns the averages as `reward_spec` has them, of its float dtypes; float32 for ints and booleans."""
        return self._structure.unflatten(self._averages())

    def _averages(self) -> list[Any]:
        averages = []
        for number, leaf in enumerate(self._leaves):
            returns = self._sums[number].array() if self._sums else np.empty((0, *leaf.shape))
            average = returns.mean(axis=0) if len(returns) else np.zeros(leaf.shape)
            dtype = leaf.dtype if leaf.dtype.kind == "f" else np.float32
            averages.append(np.asarray(average, dtype)[()])  # a scalar where the shape is ()
        return averages

    def _observe(self, trajectory: Any, step_type: npt.NDArray[Any], next_step_type: npt.NDArray[Any]) -> None:
        try:
            rewards = self._structure.flatten(trajectory.reward)
        except SpecError as error:
            raise SpecError(f"the reward doesn't fit the reward_spec: {error}", path=error.path) from error
        amounts = [as_array(reward) for reward in rewards]
        for path, amount, leaf in zip(self._names, amounts, self._leaves, strict=True):
            if amount.dtype.kind not in "biuf" or amount.shape != (len(step_type), *leaf.shape):
                raise SpecError(
                    f"leaf {path!r} must be numbers {[len(step_type), *leaf.shape]}, got {describe(amount)} in {self}.",
                    path=path,
                )
        self._add(step_type, next_step_type, amounts)

    def _scalars(self) -> list[tuple[str, Any]]:
        is_alone = len(self._leaves) == 1
        scalars: list[tuple[str, Any]] = []
        for number, (leaf, average) in enumerate(zip(self._leaves, self._averages(), strict=True)):
            label = leaf.name or ("Metric" if is_alone else f"Metric{number}")
            if leaf.shape == ():
                scalars.append((label, average))
            else:
                separator = "" if is_alone else "/"
                scalars += [(f"{label}{separator}{element}", value) for element, value in enumerate(average.ravel())]
        return scalars


def _at_least_one(name: str, value: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise OptionError(f"{name} must be an integer of at least 1, got {value!r}.")
    return number
