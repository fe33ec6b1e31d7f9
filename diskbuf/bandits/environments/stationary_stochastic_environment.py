"""Contexts from a function, and a reward function for each arm."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.bandits.environments._draws import as_arrays, as_draw, spec_of_batch, takes
from diskbuf.bandits.environments.bandit_environment import BanditEnvironment
from diskbuf.bandits.environments.environment_utilities import LinearNormalReward, RewardFn, RewardFunction
from diskbuf.errors import OptionError, SpecError
from diskbuf.specs import ArraySpec
from diskbuf.tree import describe

OptimalFn = Callable[[Any], npt.ArrayLike]


class StationaryStochasticEnvironment(BanditEnvironment):
    """Draws contexts [B, *shape] from one function, and pays what the pulled arm's reward function says of a context.

    A function that has a parameter named `rng` gets the environment's generator in it, contexts and rewards alike.
    Then one seed repeats everything, and `state` and `restore` hold it; what a function draws from elsewhere, they
    don't know of. A `RewardFunction`, such as those of `environment_utilities`, is called once for all lanes that
    pulled its arm; any other function lane by lane, with one context.

    TF-Agents' StationaryStochasticPyEnvironment, without constraint functions.

        >>> from diskbuf.bandits.environments import environment_utilities
        >>> env = StationaryStochasticEnvironment(
        ...     lambda rng: rng.integers(1, 10, (4, 2)).astype(np.float32),
        ...     environment_utilities.sliding_linear_reward_fn_generator(2, 3, 0.1),
        ...     batch_size=4,
        ...     seed=0,
        ... )
        >>> env.optimal_action(env.reset().observation)
        array([2, 2, 2, 2], dtype=int32)

    Args:
        context_sampling_fn: Returns [B, *shape] numbers.
        reward_fns: One for each arm, from one context [*shape] to its reward, a number unless reward_spec says more.
        batch_size: B.
        observation_spec: Of one context; None takes it from one draw, which isn't of the seed.
        reward_spec: Of one reward; None is one float32. Rewards are rounded to its dtype.
        optimal_reward_fn: From contexts [B, *shape] to [B]; None takes the means that reward functions tell: every
            `RewardFunction`, and functions with a parameter `enable_noise`, which is then False.
        optimal_action_fn: From contexts [B, *shape] to [B]; None takes it from the same means.
        seed: None takes entropy from the system.

    Raises:
        OptionError: If an argument is outside its rule.
        SpecError: If a draw isn't [batch_size, *shape].
    """

    def __init__(
        self,
        context_sampling_fn: Callable[..., Any],
        reward_fns: Sequence[RewardFn],
        batch_size: int = 1,
        *,
        observation_spec: Any = None,
        reward_spec: Any = None,
        optimal_reward_fn: OptimalFn | None = None,
        optimal_action_fn: OptimalFn | None = None,
        seed: int | None = None,
    ) -> None:
        self._sample_context = as_draw("context_sampling_fn", context_sampling_fn)
        if observation_spec is None:
            example = np.asarray(self._sample_context(np.random.default_rng(0)))
            observation_spec, drawn = spec_of_batch("context_sampling_fn", example)
            if drawn != batch_size:
                raise SpecError(
                    f"context_sampling_fn must return batch_size = {batch_size} contexts, got {describe(example)}. "
                    "Its first axis is the batch."
                )
        self._reward_fns = check_reward_fns(reward_fns)
        self._optimal_reward_fn = check_optimal_fn("optimal_reward_fn", optimal_reward_fn)
        self._optimal_action_fn = check_optimal_fn("optimal_action_fn", optimal_action_fn)
        super().__init__(
            observation_spec, len(self._reward_fns), batch_size=batch_size, seed=seed, reward_spec=reward_spec
        )
        for name, spec in (("observation_spec", self._observation_spec), ("reward_spec", self._reward_spec)):
            if not isinstance(spec, ArraySpec):
                raise SpecError(f"{name} must be one ArraySpec, got {describe(spec)}.")
        self._arms: Arms = self._make_arms()

    def _make_arms(self) -> "Arms":
        thetas = [fn.theta for fn in self._reward_fns if type(fn) is LinearNormalReward]
        context_shape = self._observation_spec.shape
        if len(thetas) == self._num_actions and self._reward_spec.shape == ():
            for arm, theta in enumerate(thetas):
                if theta.shape != context_shape:
                    raise OptionError(
                        f"theta of arm {arm} must be {list(context_shape)} as contexts are, got {list(theta.shape)}."
                    )
            sigmas = [fn.sigma for fn in self._reward_fns if type(fn) is LinearNormalReward]
            return LinearArms(np.stack(thetas), np.array(sigmas))
        return AnyArms(self._reward_fns, self._reward_spec)

    def _observe(self) -> Any:
        return as_arrays(self._observations, self._sample_context(self._rng))

    def _apply_action(self, action: npt.NDArray[Any]) -> npt.NDArray[Any]:
        rewards = self._arms.sample(self.current_time_step().observation, action, self._rng)
        return as_reward(rewards, self._reward_spec)

    def optimal_reward(self, observation: Any) -> npt.NDArray[Any]:
        """Returns [B] float32 the expected reward of the best arm in each context.

        Args:
            observation: [B, *shape].

        Raises:
            NotImplementedError: If no function tells it.
        """
        if self._optimal_reward_fn is not None:
            return np.asarray(self._optimal_reward_fn(observation))
        return np.asarray(self._means("optimal_reward_fn", observation).max(axis=1), np.float32)

    def optimal_action(self, observation: Any) -> npt.NDArray[Any]:
        """Returns [B] int32 the arm of the highest expected reward in each context, of equal ones the first.

        Args:
            observation: [B, *shape].

        Raises:
            NotImplementedError: If no function tells it.
        """
        if self._optimal_action_fn is not None:
            return np.asarray(self._optimal_action_fn(observation)).astype(np.int32)
        return np.asarray(self._means("optimal_action_fn", observation).argmax(axis=1), np.int32)

    def _means(self, argument: str, observation: Any) -> npt.NDArray[Any]:
        means = self._arms.means(np.asarray(observation)) if self._reward_spec.shape == () else None
        if means is None:
            raise NotImplementedError(
                f"{self} doesn't know the best arm, because not every reward function tells its mean, or rewards have "
                f"several elements. Give {argument}, or make the functions RewardFunctions."
            )
        return means


class Arms(abc.ABC):
    """All arms together."""

    @abc.abstractmethod
    def sample(self, context: npt.NDArray[Any], action: npt.NDArray[Any], rng: np.random.Generator) -> Any:
        """Returns [B, *reward] what the arms action [B] pay in context [B, *shape]."""

    @abc.abstractmethod
    def means(self, context: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """Returns [B, K] expected rewards, None if an arm doesn't tell."""


class LinearArms(Arms):
    """Arms that are all a `LinearNormalReward`: thetas [K, d], sigmas [K]."""

    def __init__(self, thetas: npt.NDArray[Any], sigmas: npt.NDArray[Any]) -> None:
        self._thetas, self._sigmas = thetas, sigmas

    def sample(self, context: npt.NDArray[Any], action: npt.NDArray[Any], rng: np.random.Generator) -> Any:
        """Returns [B]."""
        noise = self._sigmas.take(action)
        noise *= rng.standard_normal(len(action))
        noise += np.einsum("bd,bd->b", context, self._thetas.take(action, axis=0))
        return noise

    def means(self, context: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns [B, K]."""
        return np.asarray(context @ self._thetas.T)


class AnyArms(Arms):
    """Arms of any functions. If all are plain ones they are called in the order of lanes, as in TF-Agents."""

    def __init__(self, reward_fns: Sequence[RewardFn], spec: ArraySpec) -> None:
        self._fns = reward_fns
        self._draws = [as_draw(f"reward_fns[{arm}]", fn) for arm, fn in enumerate(reward_fns)]
        self._are_plain = not any(isinstance(fn, RewardFunction) for fn in reward_fns)
        self._spec = spec

    def sample(self, context: npt.NDArray[Any], action: npt.NDArray[Any], rng: np.random.Generator) -> Any:
        """Returns [B, *reward], or a list of B."""
        if self._are_plain:
            return [self._draws[arm](rng, one) for arm, one in zip(action.tolist(), context, strict=True)]
        rewards = np.empty((len(action), *self._spec.shape))
        for arm in sorted(set(action.tolist())):
            lanes = np.flatnonzero(action == arm)
            fn = self._fns[arm]
            drawn: Any
            if isinstance(fn, RewardFunction):
                drawn = fn.sample(context[lanes], rng)
            else:
                drawn = [self._draws[arm](rng, one) for one in context[lanes]]
            rewards[lanes] = as_reward(drawn, self._spec, lead=(len(lanes),))
        return rewards

    def means(self, context: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
        """Returns [B, K], or None."""
        means = []
        for fn in self._fns:
            if isinstance(fn, RewardFunction):
                means.append(fn.mean(context))
            elif takes(fn, "enable_noise"):
                means.append(np.array([fn(one, enable_noise=False) for one in context]))
            else:
                return None
        return np.stack(means, axis=1)


def as_reward(rewards: Any, spec: ArraySpec, *, lead: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
    """Returns what reward functions gave as an array of the reward's dtype.

    Args:
        rewards: An array, or a list of what each lane got.
        spec: Of one reward.
        lead: The batch shape it must have; None leaves that to the environment.

    Raises:
        SpecError: If it is no array of numbers, or has another shape than lead asks.
    """
    try:
        with np.errstate(over="ignore"):  # an infinity is found when the reward is checked
            array = np.asarray(rewards)
            if array.dtype.kind not in "biuf":
                raise TypeError(f"{array.dtype} isn't a dtype of numbers")
            array = array.astype(spec.dtype, copy=False)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"leaf 'reward' must be {spec.dtype} {list(spec.shape)} of each lane, got {describe(rewards)} from the "
            f"reward functions: {error}.",
            path="reward",
        ) from error
    if lead is not None and array.shape != (*lead, *spec.shape):
        raise SpecError(
            f"leaf 'reward' must be {[*lead, *spec.shape]}, got {list(array.shape)} from a reward function. "
            "Mend what it returns, or give reward_spec.",
            path="reward",
        )
    return array


def check_reward_fns(reward_fns: Any) -> tuple[RewardFn, ...]:
    """Returns reward functions as a tuple.

    Raises:
        OptionError: If there are none, or one isn't callable.
    """
    fns = tuple(reward_fns) if isinstance(reward_fns, Sequence) else ()
    if not fns or not all(map(callable, fns)):
        raise OptionError(f"reward_fns must be a list of functions, one for each arm, got {describe(reward_fns)}.")
    return fns


def check_optimal_fn(name: str, function: OptimalFn | None) -> OptimalFn | None:
    """Returns the function.

    Raises:
        OptionError: If it is neither None nor callable.
    """
    if function is not None and not callable(function):
        raise OptionError(f"{name} must be None or a function from contexts [B, ...] to [B], got {function!r}.")
    return function
