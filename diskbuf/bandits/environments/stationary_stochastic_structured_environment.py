"""Contexts of two parts, one for the lane and one for each of its arms; all arms pay by the same function."""

import abc
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.bandits.environments._draws import Draw, as_arrays, as_draw, as_numbers, as_spreads, takes
from diskbuf.bandits.environments.bandit_environment import BanditEnvironment
from diskbuf.bandits.environments.stationary_stochastic_environment import OptimalFn, as_reward, check_optimal_fn
from diskbuf.errors import OptionError, SpecError
from diskbuf.specs import ArraySpec
from diskbuf.tree import Structure, describe

GLOBAL_KEY = "global"
"""Where an observation has what is the same for all arms of a lane."""
PER_ARM_KEY = "per_arm"
"""Where it has what differs by arm, with an axis of K before the shape."""


class StructuredRewardFunction(abc.ABC):
    """The reward of any arms at once. Any other callable does as well, but is called lane by lane."""

    @abc.abstractmethod
    def mean(self, global_context: Any, arm_context: Any) -> npt.NDArray[Any]:
        """Returns [N] expected rewards.

        Args:
            global_context: Nest of [N, *shape] arrays.
            arm_context: Nest of [N, *shape] arrays, each of one arm.
        """

    @abc.abstractmethod
    def sample(self, global_context: Any, arm_context: Any, rng: np.random.Generator) -> npt.NDArray[Any]:
        """Returns [N] rewards.

        Args:
            global_context: Nest of [N, *shape] arrays.
            arm_context: Nest of [N, *shape] arrays, each of one arm.
            rng: What all that is random is drawn from.
        """


class LinearNormalStructuredReward(StructuredRewardFunction):
    """Normal reward, whose mean is global_theta times the global context plus arm_theta times the arm's.

    Args:
        global_theta: [d].
        arm_theta: [e].
        sigma: Standard deviation, at least 0.

    Raises:
        OptionError: If an argument isn't finite numbers of these shapes.
    """

    def __init__(self, global_theta: Any, arm_theta: Any, sigma: float) -> None:
        for name, theta in (("global_theta", global_theta), ("arm_theta", arm_theta)):
            if np.ndim(theta) != 1:
                raise OptionError(f"{name} must be numbers [d], got {describe(theta)}.")
        self.global_theta = as_numbers("global_theta", global_theta, (len(global_theta),))
        self.arm_theta = as_numbers("arm_theta", arm_theta, (len(arm_theta),))
        self.sigma = float(as_spreads("sigma", sigma, ()))

    def mean(self, global_context: Any, arm_context: Any) -> npt.NDArray[Any]:
        """Returns [N] expected rewards.

        Args:
            global_context: [N, d].
            arm_context: [N, e].
        """
        return np.asarray(global_context @ self.global_theta + arm_context @ self.arm_theta)

    def sample(self, global_context: Any, arm_context: Any, rng: np.random.Generator) -> npt.NDArray[Any]:
        """Returns [N] rewards.

        Args:
            global_context: [N, d].
            arm_context: [N, e].
            rng: What the noise is drawn from.
        """
        mean = self.mean(global_context, arm_context)
        return mean + self.sigma * rng.standard_normal(mean.shape)


class StationaryStochasticStructuredEnvironment(BanditEnvironment):
    """Observations {"global": nest of [B, *shape], "per_arm": nest of [B, K, *shape]}.

    A sampling function returns one context, nest of [*shape], and is called B or B * K times a step. One that has a
    parameter named `shape` is called once instead, with (B,) or (B, K), and returns nest of [*shape of the batch,
    *shape of a context]. A function that has a parameter named `rng` gets the environment's generator in it.

    TF-Agents' StationaryStochasticStructuredPyEnvironment.

        >>> env = StationaryStochasticStructuredEnvironment(
        ...     lambda rng, shape: rng.normal(size=(*shape, 2)),
        ...     lambda rng, shape: rng.normal(size=(*shape, 3)),
        ...     num_actions=5,
        ...     reward_fn=LinearNormalStructuredReward([1.0, 0.0], [0.0, 1.0, 2.0], 0.1),
        ...     batch_size=4,
        ...     seed=0,
        ... )
        >>> env.reset().observation["per_arm"].shape
        (4, 5, 3)

    Args:
        global_context_sampling_fn: Of what all arms of a lane have in common.
        arm_context_sampling_fn: Of what one arm has.
        num_actions: K.
        reward_fn: From one lane's global context and one arm's context to a number, or a `StructuredRewardFunction`.
        batch_size: B.
        optimal_reward_fn: From observations to [B]; None takes the means that reward_fn tells: a
            `StructuredRewardFunction`, or a function with a parameter `enable_noise`, which is then False.
        optimal_action_fn: From observations to [B]; None takes it from the same means.
        seed: None takes entropy from the system.

    Raises:
        OptionError: If an argument is outside its rule.
        SpecError: If a function with `shape` returns another batch shape.
    """

    def __init__(
        self,
        global_context_sampling_fn: Callable[..., Any],
        arm_context_sampling_fn: Callable[..., Any],
        *,
        num_actions: int,
        reward_fn: Any,
        batch_size: int = 1,
        optimal_reward_fn: OptimalFn | None = None,
        optimal_action_fn: OptimalFn | None = None,
        seed: int | None = None,
    ) -> None:
        if not isinstance(reward_fn, StructuredRewardFunction) and not callable(reward_fn):
            raise OptionError(
                "reward_fn must be a function of a global and an arm's context, or a StructuredRewardFunction, "
                f"got {describe(reward_fn)}."
            )
        self._globals = _Contexts("global_context_sampling_fn", global_context_sampling_fn)
        self._per_arm = _Contexts("arm_context_sampling_fn", arm_context_sampling_fn)
        self._reward_fn = reward_fn
        self._draw_reward = None if isinstance(reward_fn, StructuredRewardFunction) else as_draw("reward_fn", reward_fn)
        self._optimal_reward_fn = check_optimal_fn("optimal_reward_fn", optimal_reward_fn)
        self._optimal_action_fn = check_optimal_fn("optimal_action_fn", optimal_action_fn)
        # Whether num_actions is a number of arms, the base says; the spec can't be made without.
        arms = num_actions if isinstance(num_actions, int | np.integer) and num_actions > 0 else 1
        observation_spec = {GLOBAL_KEY: self._globals.spec(()), PER_ARM_KEY: self._per_arm.spec((arms,))}
        super().__init__(observation_spec, num_actions, batch_size=batch_size, seed=seed)

    def _observe(self) -> Any:
        lanes = (self._batch_size,)
        return {
            GLOBAL_KEY: self._globals.sample(self._rng, lanes),
            PER_ARM_KEY: self._per_arm.sample(self._rng, (*lanes, self._num_actions)),
        }

    def _apply_action(self, action: npt.NDArray[Any]) -> npt.NDArray[Any]:
        observation = self.current_time_step().observation
        lanes = np.arange(self._batch_size)
        arm_context = self._per_arm.map(lambda leaf: leaf[lanes, action], observation[PER_ARM_KEY])
        rewards: Any
        if isinstance(self._reward_fn, StructuredRewardFunction):
            rewards = self._reward_fn.sample(observation[GLOBAL_KEY], arm_context, self._rng)
        else:
            draw: Any = self._draw_reward
            pairs = zip(self._globals.lanes(observation[GLOBAL_KEY]), self._per_arm.lanes(arm_context), strict=True)
            rewards = [draw(self._rng, *pair) for pair in pairs]
        return as_reward(rewards, self._reward_spec)

    def optimal_reward(self, observation: Any) -> npt.NDArray[Any]:
        """Returns [B] float32 the expected reward of the best arm in each context.

        Args:
            observation: As this environment gives it.

        Raises:
            NotImplementedError: If no function tells it.
        """
        if self._optimal_reward_fn is not None:
            return np.asarray(self._optimal_reward_fn(observation))
        return np.asarray(self._means("optimal_reward_fn", observation).max(axis=1), np.float32)

    def optimal_action(self, observation: Any) -> npt.NDArray[Any]:
        """Returns [B] int32 the arm of the highest expected reward in each context, of equal ones the first.

        Args:
            observation: As this environment gives it.

        Raises:
            NotImplementedError: If no function tells it.
        """
        if self._optimal_action_fn is not None:
            return np.asarray(self._optimal_action_fn(observation)).astype(np.int32)
        return np.asarray(self._means("optimal_action_fn", observation).argmax(axis=1), np.int32)

    def _means(self, argument: str, observation: Any) -> npt.NDArray[Any]:
        """[B, K]."""
        arms = self._num_actions
        global_context = self._globals.map(lambda leaf: np.repeat(leaf, arms, axis=0), observation[GLOBAL_KEY])
        arm_context = self._per_arm.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), observation[PER_ARM_KEY])
        if isinstance(self._reward_fn, StructuredRewardFunction):
            means = self._reward_fn.mean(global_context, arm_context)
        elif takes(self._reward_fn, "enable_noise"):
            pairs = zip(self._globals.lanes(global_context), self._per_arm.lanes(arm_context), strict=True)
            means = np.array([self._reward_fn(*pair, enable_noise=False) for pair in pairs])
        else:
            raise NotImplementedError(
                f"{self} doesn't know the best arm, because reward_fn doesn't tell its mean. "
                f"Give {argument}, or make reward_fn a StructuredRewardFunction."
            )
        return means.reshape(-1, arms)


class _Contexts:
    """A sampling function, and the nest that it returns."""

    def __init__(self, name: str, function: Any) -> None:
        self._name = name
        self._draw: Draw = as_draw(name, function)
        self._takes_shape = takes(function, "shape")
        rng = np.random.default_rng(0)  # the example isn't of the seed
        example = self._draw(rng, shape=(1,)) if self._takes_shape else self._draw(rng)
        self._structure = Structure(example)
        if self._structure.num_leaves == 0:
            raise OptionError(f"{name} must return at least one array, got {describe(example)}.")
        leaves = list(map(np.asarray, self._structure.flatten(example)))
        if self._takes_shape:
            self._check_lead(leaves, (1,))
        axes = 1 if self._takes_shape else 0
        self._specs = [ArraySpec(leaf.shape[axes:], leaf.dtype) for leaf in leaves]

    def spec(self, lead: tuple[int, ...]) -> Any:
        """Returns the spec of one lane's contexts, with lead axes before."""
        return self._structure.unflatten(ArraySpec((*lead, *spec.shape), spec.dtype) for spec in self._specs)

    def sample(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Any:
        """Returns contexts, nest of [*lead, *shape]."""
        if self._takes_shape:
            nest = as_arrays(self._structure, self._draw(rng, shape=lead))
            self._check_lead(self._structure.flatten(nest), lead)
            return nest
        drawn = [self._structure.flatten(self._draw(rng)) for _ in range(int(np.prod(lead)))]
        try:
            stacked = [np.stack(leaves) for leaves in zip(*drawn, strict=True)]
        except ValueError as error:
            raise SpecError(f"{self._name} must return the same shapes in every call: {error}.") from error
        return self._structure.unflatten(leaf.reshape(*lead, *leaf.shape[1:]) for leaf in stacked)

    def map(self, function: Callable[[npt.NDArray[Any]], npt.NDArray[Any]], nest: Any) -> Any:
        """Returns the nest with what the function makes of each leaf."""
        return self._structure.unflatten(function(leaf) for leaf in self._structure.flatten(nest))

    def lanes(self, nest: Any) -> list[Any]:
        """Returns a nest without a batch axis for each lane."""
        return [self._structure.unflatten(lane) for lane in zip(*self._structure.flatten(nest), strict=True)]

    def _check_lead(self, leaves: list[npt.NDArray[Any]], lead: tuple[int, ...]) -> None:
        if any(leaf.shape[: len(lead)] != lead for leaf in leaves):
            raise SpecError(
                f"{self._name} must return arrays that begin with shape = {list(lead)}, got {describe(leaves)}."
            )
