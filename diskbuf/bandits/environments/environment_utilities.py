"""Rewards and contexts to make a stationary environment of, by TF-Agents' names where it has one."""

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.bandits.environments._draws import as_numbers, as_spreads
from diskbuf.errors import OptionError
from diskbuf.tree import describe

RewardFn = Callable[..., Any]


class RewardFunction(abc.ABC):
    """The reward of one arm, of any number of contexts at once; an environment calls it once for all its lanes.

    A subclass writes `mean` and `sample`. Any other callable does as an arm's reward too, but is called lane by lane.
    """

    @abc.abstractmethod
    def mean(self, context: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns [..., *reward] expected rewards.

        Args:
            context: [..., *shape], with any number of batch axes.
        """

    @abc.abstractmethod
    def sample(self, context: npt.NDArray[Any], rng: np.random.Generator) -> npt.NDArray[Any]:
        """Returns [..., *reward] rewards.

        Args:
            context: [..., *shape], with any number of batch axes.
            rng: What all that is random is drawn from.
        """

    def __call__(self, x: Any, enable_noise: bool = True, rng: np.random.Generator | None = None) -> Any:
        """Returns [...] rewards, or expected rewards; the call that TF-Agents' reward functions have.

        Args:
            x: [..., *shape] contexts.
            enable_noise: Whether to draw rewards; False returns expected ones.
            rng: What to draw from; None takes entropy from the system.
        """
        x = np.asarray(x)
        return self.sample(x, np.random.default_rng() if rng is None else rng) if enable_noise else self.mean(x)


class LinearNormalReward(RewardFunction):
    """Normal reward, whose mean is the product of the context and theta.

        >>> LinearNormalReward([1.0, 2.0], 0.1).mean(np.array([[3.0, 4.0]]))
        array([11.])

    Args:
        theta: [d].
        sigma: Standard deviation, at least 0.

    Raises:
        OptionError: If theta or sigma aren't finite numbers of these shapes.
    """

    def __init__(self, theta: Any, sigma: float) -> None:
        if np.ndim(theta) != 1:
            raise OptionError(f"theta must be numbers [d], got {describe(theta)}.")
        self.theta = as_numbers("theta", theta, (len(theta),))
        self.sigma = float(as_spreads("sigma", sigma, ()))

    def mean(self, context: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns [...] expected rewards.

        Args:
            context: [..., d].
        """
        return np.asarray(context @ self.theta)

    def sample(self, context: npt.NDArray[Any], rng: np.random.Generator) -> npt.NDArray[Any]:
        """Returns [...] rewards.

        Args:
            context: [..., d].
            rng: What the noise is drawn from.
        """
        mean = self.mean(context)
        return mean + self.sigma * rng.standard_normal(mean.shape)


class LinearNormalMultipleRewards(RewardFunction):
    """Several rewards at once, each the product of the context and a column of thetas; without noise, as in TF-Agents.

    Args:
        thetas: [d, R], or [d] for one reward without an axis.

    Raises:
        OptionError: If thetas aren't finite numbers of such a shape.
    """

    def __init__(self, thetas: Any) -> None:
        if np.ndim(thetas) not in (1, 2):
            raise OptionError(f"thetas must be numbers [d, R] or [d], got {describe(thetas)}.")
        self.thetas = as_numbers("thetas", thetas, np.shape(thetas))

    def mean(self, context: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns [..., R] expected rewards.

        Args:
            context: [..., d].
        """
        return np.asarray(context @ self.thetas)

    def sample(self, context: npt.NDArray[Any], rng: np.random.Generator) -> npt.NDArray[Any]:  # noqa: ARG002
        """Returns [..., R], the same.

        Args:
            context: [..., d].
            rng: Nothing is drawn from it.
        """
        return self.mean(context)


def context_sampling_fn(
    batch_size: int, context_dim: int, *, rng: np.random.Generator | None = None
) -> npt.NDArray[np.float32]:
    """Returns [batch_size, context_dim] float32 whole numbers from -10 to 9, each as likely.

    `functools.partial(context_sampling_fn, 8, 3)` is a `context_sampling_fn` of an environment, and gets its generator.

    Args:
        batch_size: B.
        context_dim: d.
        rng: What to draw from; None takes entropy from the system.
    """
    rng = np.random.default_rng() if rng is None else rng
    return rng.integers(-10, 10, (batch_size, context_dim)).astype(np.float32)


def linear_reward_fn_generator(theta_list: Sequence[Any], variance: float) -> list[LinearNormalReward]:
    """Returns a linear reward for each theta.

    Args:
        theta_list: K of [d].
        variance: The standard deviation of each, in spite of its name, which is TF-Agents'.

    Raises:
        OptionError: If an argument is outside its rule.
    """
    return [LinearNormalReward(theta, variance) for theta in theta_list]


def sliding_linear_reward_fn_generator(context_dim: int, num_actions: int, variance: float) -> list[LinearNormalReward]:
    """Returns linear rewards; the theta of arm a is a, a + 1, ..., a + context_dim - 1.

    Args:
        context_dim: d.
        num_actions: K.
        variance: The standard deviation of each.

    Raises:
        OptionError: If an argument is outside its rule.
    """
    return linear_reward_fn_generator([np.arange(arm, arm + context_dim) for arm in range(num_actions)], variance)


def normalized_sliding_linear_reward_fn_generator(
    context_dim: int, num_actions: int, variance: float
) -> list[LinearNormalReward]:
    """Returns the linear rewards of `sliding_linear_reward_fn_generator`, thetas divided by context_dim + num_actions.

    Args:
        context_dim: d.
        num_actions: K.
        variance: The standard deviation of each.

    Raises:
        OptionError: If an argument is outside its rule.
    """
    whole = context_dim + num_actions
    thetas = [np.arange(arm, arm + context_dim) / whole for arm in range(num_actions)]
    return linear_reward_fn_generator(thetas, variance)


def structured_linear_reward_fn_generator(
    context_dim: int, num_actions: int, variance: float, *, drift_coefficient: float = 0.1, seed: int | None = None
) -> list[LinearNormalReward]:
    """Returns linear rewards of arms that are alike: each theta is the one before it, plus a little.

    The first theta is uniform in [0, 1), and so is what is added, times drift_coefficient.

    Args:
        context_dim: d.
        num_actions: K.
        variance: The standard deviation of each.
        drift_coefficient: How unlike neighbours are.
        seed: Of the thetas; None takes entropy from the system.

    Raises:
        OptionError: If an argument is outside its rule.
    """
    steps = np.random.default_rng(seed).random((num_actions, context_dim))
    steps[1:] *= drift_coefficient
    return linear_reward_fn_generator(list(steps.cumsum(axis=0)), variance)


def linear_multiple_reward_fn_generator(per_action_theta_list: Sequence[Any]) -> list[LinearNormalMultipleRewards]:
    """Returns linear multiple rewards for each thetas.

    Args:
        per_action_theta_list: K of [d, R].

    Raises:
        OptionError: If an argument is outside its rule.
    """
    return [LinearNormalMultipleRewards(thetas) for thetas in per_action_theta_list]


def random_linear_multiple_reward_fn_generator(
    context_dim: int, num_actions: int, *, num_rewards: int, squeeze_dims: bool = True, seed: int | None = None
) -> list[LinearNormalMultipleRewards]:
    """Returns linear multiple rewards with thetas uniform in [0, 1).

    Args:
        context_dim: d.
        num_actions: K.
        num_rewards: R.
        squeeze_dims: Whether one reward is a number, without an axis of 1.
        seed: Of the thetas; None takes entropy from the system.
    """
    thetas = np.random.default_rng(seed).random((num_actions, context_dim, num_rewards))
    if squeeze_dims and num_rewards == 1:
        thetas = thetas[..., 0]
    return linear_multiple_reward_fn_generator(list(thetas))


def compute_optimal_reward(
    observation: Any, per_action_reward_fns: Sequence[RewardFn], enable_noise: bool = False
) -> npt.NDArray[Any]:
    """Returns [B] the highest reward of all arms in each context.

    Args:
        observation: [B, *shape].
        per_action_reward_fns: One for each arm, called with all contexts at once, and with enable_noise.
        enable_noise: Whether to draw rewards instead of taking expected ones.
    """
    return np.asarray(_all_rewards(observation, per_action_reward_fns, enable_noise).max(axis=-1))


def compute_optimal_action(
    observation: Any, per_action_reward_fns: Sequence[RewardFn], enable_noise: bool = False
) -> npt.NDArray[np.int32]:
    """Returns [B] int32 the arm with the highest reward in each context, of equal ones the first.

    Args:
        observation: [B, *shape].
        per_action_reward_fns: One for each arm, called with all contexts at once, and with enable_noise.
        enable_noise: Whether to draw rewards instead of taking expected ones.
    """
    return np.asarray(_all_rewards(observation, per_action_reward_fns, enable_noise).argmax(axis=-1), np.int32)


def _all_rewards(observation: Any, reward_fns: Sequence[RewardFn], enable_noise: bool) -> npt.NDArray[Any]:
    return np.stack([reward_fn(observation, enable_noise) for reward_fn in reward_fns], axis=-1)
