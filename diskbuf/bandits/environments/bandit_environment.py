"""What every bandit environment is: contexts come, one arm is pulled in each lane, and a reward follows."""

import abc
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf import specs
from diskbuf.bandits import generators
from diskbuf.bandits.environments.batched_bandit import BatchedBandit
from diskbuf.errors import OptionError, SpecError
from diskbuf.readers.requests import count
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.trajectories import StepType, TimeStep, restart
from diskbuf.tree import Structure, describe


class BanditEnvironment(BatchedBandit):
    """Batched, seeded, in NumPy. A subclass writes `_observe` and `_apply_action`.

    Every step ends an episode of one step, so that the time step that `step` returns is LAST, has discount 0, and
    already holds the next context, as in TF-Agents. Drivers know such an environment by `is_bandit`: they take each
    time step as FIRST, and no row is a boundary.

        >>> class Coin(BanditEnvironment):  # of two arms the one that the context names pays 1
        ...     def __init__(self, batch_size=1, *, seed=None):
        ...         context_spec = BoundedArraySpec([1], "float32", 0, 1)
        ...         super().__init__(context_spec, num_actions=2, batch_size=batch_size, seed=seed)
        ...
        ...     def _observe(self):
        ...         return self._rng.integers(0, 2, [self.batch_size, 1]).astype(np.float32)
        ...
        ...     def _apply_action(self, action):  # [B], for the contexts of self.current_time_step()
        ...         named = self.current_time_step().observation[:, 0]
        ...         return (action == named).astype(np.float32)
        >>> coin = Coin(batch_size=3, seed=0)
        >>> coin.reset().observation[:, 0], coin.step(np.array([1, 1, 1])).reward
        (array([1., 1., 1.], dtype=float32), array([1., 1., 1.], dtype=float32))

    Everything random is to be drawn from `self._rng`. What changes from step to step besides, such as the weights of a
    drifting environment, a subclass lists in `_changing`: names of arrays and numbers, so that `state` holds them.

    Args:
        observation_spec: Nest of specs of one context.
        num_actions: Arms, 0 to num_actions - 1.
        batch_size: B, the number of lanes.
        seed: Of contexts and rewards; None takes entropy from the system.
        reward_spec: Nest of specs of one reward; None is one float32.

    Raises:
        OptionError: If num_actions or batch_size is below 1, or the seed is none.
        SpecError: If a spec is none.
    """

    _changing: tuple[str, ...] = ()  # names of attributes, arrays or numbers

    def __init__(
        self,
        observation_spec: Any,
        num_actions: int,
        *,
        batch_size: int = 1,
        seed: int | None = None,
        reward_spec: Any = None,
    ) -> None:
        arms = BoundedArraySpec((), np.int32, 0, count("num_actions", num_actions) - 1, name="action")
        reward = ArraySpec((), np.float32, name="reward") if reward_spec is None else specs.as_spec(reward_spec)
        super().__init__(specs.as_spec(observation_spec), arms, reward, batch_size)
        try:
            self._rng = np.random.default_rng(seed)
        except (TypeError, ValueError) as error:
            raise OptionError(f"seed must be None or an integer of at least 0, got {seed!r}.") from error
        self._observations, self._rewards = Structure(self._observation_spec), Structure(self._reward_spec)
        self._observation_rules = _rules("observation", self._observation_spec, self._observations, self._batch_size)
        self._reward_rules = _rules("reward", self._reward_spec, self._rewards, self._batch_size)
        self._last = np.full(self._batch_size, StepType.LAST)

    def reset(self) -> TimeStep:
        """Draws new contexts.

        Returns:
            FIRST in every lane, reward 0, discount 1.

        Raises:
            SpecError: If a context doesn't fit its spec.
        """
        observation = self._checked_observation()
        zeros = [
            np.zeros((self._batch_size, *spec.shape), spec.dtype) for spec in self._rewards.flatten(self._reward_spec)
        ]
        self._current = restart(observation, batch_size=self._batch_size)._replace(
            reward=self._rewards.unflatten(zeros)
        )
        return self._current

    def step(self, action: npt.NDArray[Any]) -> TimeStep:
        """Pulls one arm in every lane and draws the next contexts. Called before any `reset`, this resets.

        Args:
            action: [B] integers from 0 to num_actions - 1.

        Returns:
            LAST in every lane, discount 0, the rewards, and the contexts of the next step.

        Raises:
            SpecError: If the action doesn't fit its spec (nothing was pulled), or a reward or a context doesn't fit
                its own or isn't finite.
        """
        if self._current is None:
            return self.reset()
        action = self._checked_arms(action)
        reward = self._checked_reward(self._apply_action(action))
        self._current = TimeStep(
            self._last.copy(), reward, np.zeros(self._batch_size, np.float32), self._checked_observation()
        )
        return self._current

    @abc.abstractmethod
    def _observe(self) -> Any:
        """Draws and returns contexts, nest of [B, *shape] arrays."""

    @abc.abstractmethod
    def _apply_action(self, action: npt.NDArray[Any]) -> Any:
        """Returns rewards, nest of [B, *shape] arrays.

        Args:
            action: [B] intp, checked; for the contexts of `current_time_step()`.
        """

    def optimal_reward(self, observation: Any) -> npt.NDArray[Any]:
        """Returns [B] the expected reward of the best arm in each context: the baseline of regret.

        Args:
            observation: Nest of [B, *shape] arrays, contexts.

        Raises:
            NotImplementedError: If this environment doesn't know it.
        """
        raise NotImplementedError(f"{type(self).__name__} doesn't know the optimal reward.")

    def optimal_action(self, observation: Any) -> npt.NDArray[Any]:
        """Returns [B] int32 the arm of the highest expected reward in each context, of equal ones the first.

        Args:
            observation: Nest of [B, *shape] arrays, contexts.

        Raises:
            NotImplementedError: If this environment doesn't know it.
        """
        raise NotImplementedError(f"{type(self).__name__} doesn't know the optimal action.")

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Returns what `restore` needs to go on with the same contexts and rewards, arrays by name."""
        state = {"generator": generators.state_of(self._rng)}
        for name in self._changing:
            value = np.array(getattr(self, name))
            if value.dtype.kind not in "biufc":
                raise OptionError(
                    f"attribute {name!r} in _changing must be an array of numbers, got {describe(getattr(self, name))}."
                )
            state[f"changing/{name}"] = value
        if self._current is not None:
            leaves = Structure(self._current).flatten(self._current)
            state.update({f"time_step/{number}": np.array(leaf) for number, leaf in enumerate(leaves)})
        return state

    def restore(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Becomes what it was when `state` was called.

        Args:
            state: What `state` returned, of an environment made with the same arguments.

        Raises:
            OptionError: If it is the state of an environment of another kind (nothing was changed).
        """
        wanted = {"generator", *(f"changing/{name}" for name in self._changing)}
        given = {name for name in state if not name.startswith("time_step/")} if isinstance(state, dict) else set()
        if given != wanted:
            raise OptionError(
                f"state must be what state() returned, with {sorted(wanted)}, got {sorted(given)}. "
                f"Give {self} the state of an environment made with the same arguments."
            )
        current = None
        if "time_step/0" in state:
            structure = Structure(self.current_time_step())
            leaves = [state[f"time_step/{number}"].copy() for number in range(structure.num_leaves)]
            current = structure.unflatten(leaves)
        self._current = current
        for name in self._changing:
            value = state[f"changing/{name}"]
            setattr(self, name, value.copy() if value.ndim else value.item())
        generators.go_on(self._rng, state["generator"])

    def _checked_observation(self) -> Any:
        # Copied: an environment may write to the same array again, and a driver keeps what it was shown.
        observation = self._checked("observation", self._observe(), self._observations, self._observation_rules)
        if type(observation) is np.ndarray:
            return observation.copy()
        return self._observations.unflatten([leaf.copy() for leaf in self._observations.flatten(observation)])

    def _checked_reward(self, reward: Any) -> Any:
        return self._checked("reward", reward, self._rewards, self._reward_rules)

    def _checked(self, name: str, nest: Any, structure: Structure, rules: "list[_LeafRule]") -> Any:
        if type(nest) is np.ndarray and structure.paths == ("",):  # by far the most frequent
            leaves = [nest]
        else:
            try:
                leaves = structure.flatten(nest)
            except SpecError as error:
                raise SpecError(f"the {name} of {self} doesn't fit its spec: {error}", path=error.path) from error
        for leaf, rule in zip(leaves, rules, strict=True):
            if not rule.fits(leaf):
                raise rule.error(leaf, self)
        return nest


class _LeafRule:
    """What one leaf of the contexts or rewards must be; worked out beforehand, because each step asks.

    `np.count_nonzero` of a comparison takes a third of the time that `all` takes of a small array.
    """

    def __init__(self, path: str, spec: ArraySpec, batch_size: int) -> None:
        self.path = path
        self.dtype = spec.dtype
        self.shape = (batch_size, *spec.shape)
        self.size = int(np.prod(self.shape))
        self.bounds = (spec.minimum, spec.maximum) if isinstance(spec, BoundedArraySpec) else None

    def fits(self, leaf: Any) -> bool:
        """Whether it is an array of the spec's dtype and shape, of finite numbers within the bounds."""
        return (
            isinstance(leaf, np.ndarray)
            and leaf.dtype == self.dtype
            and leaf.shape == self.shape
            and (self.dtype.kind not in "fc" or np.count_nonzero(np.isfinite(leaf)) == self.size)
            and (self.bounds is None or np.count_nonzero(self._within(leaf)) == self.size)
        )

    def error(self, leaf: Any, environment: BanditEnvironment) -> SpecError:
        """Says why a leaf doesn't fit."""
        if not isinstance(leaf, np.ndarray) or leaf.dtype != self.dtype or leaf.shape != self.shape:
            text = f"{self.dtype} {list(self.shape)}, got {describe(leaf)} from {environment}"
            return SpecError(f"leaf {self.path!r} must be {text}. Mend what it returns, or its spec.", path=self.path)
        if self.dtype.kind in "fc" and not np.isfinite(leaf).all():
            lane = self._lane(~np.isfinite(leaf))
            return SpecError(
                f"leaf {self.path!r} must be finite, got {leaf[lane]} in lane {lane} from {environment}.",
                path=self.path,
            )
        lane = self._lane(~self._within(leaf))
        low, high = self.bounds or (None, None)
        return SpecError(
            f"leaf {self.path!r} must lie within [{low}, {high}], got {leaf[lane]} in lane {lane} from {environment}. "
            "Mend what it returns, or its spec.",
            path=self.path,
        )

    def _within(self, leaf: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        low, high = self.bounds or (leaf, leaf)
        return np.asarray((leaf >= low) & (leaf <= high))

    def _lane(self, wrong: npt.NDArray[np.bool_]) -> int:
        return int(wrong.reshape(self.shape[0], -1).any(axis=1).argmax())


def _rules(name: str, spec: Any, structure: Structure, batch_size: int) -> list[_LeafRule]:
    return [
        _LeafRule(f"{name}/{path}" if path else name, leaf, batch_size)
        for path, leaf in zip(structure.paths, structure.flatten(spec), strict=True)
    ]
