"""Policies over a network that predicts every arm's reward: greedy, epsilon-greedy, Boltzmann, dropout sampling."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diskbuf.agents.keras_training import finite_number, positive
from diskbuf.bandits.policies.bandit_policy import BanditPolicy, ConstraintSplitter, as_certain, best_allowed
from diskbuf.bandits.policies.traced_network import TracedNetwork, context_spec_of
from diskbuf.errors import OptionError, SpecError
from diskbuf.networks.action_values import check_q_network
from diskbuf.trajectories import TimeStep

if TYPE_CHECKING:
    import tensorflow as tf

Mask = npt.NDArray[np.bool_] | None


class RewardPredictionPolicy(BanditPolicy):
    """What the policies below share: a network, asked by its current weights through a function that was traced once.

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        reward_network: A Keras model from a batch of contexts to [B, K], such as a QNetwork; any other callable of
            tensors that takes `training` will do.
        observation_and_action_constraint_splitter: Takes observations apart into contexts for the network and a mask
            of the arms that may be chosen; None allows all. Must work on arrays, and on tensors for `compiled`.
        seed: Of its draws; None takes entropy from the system.

    Raises:
        SpecError: If the action_spec is something else, or the network doesn't fit it or the contexts.
        OptionError: If the splitter isn't callable, or the seed is none.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        reward_network: Callable[..., Any],
        *,
        observation_and_action_constraint_splitter: ConstraintSplitter | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            time_step_spec,
            action_spec,
            observation_and_action_constraint_splitter=observation_and_action_constraint_splitter,
            seed=seed,
        )
        self._context_spec = context_spec_of(self.time_step_spec.observation, self._splitter)
        check_q_network(reward_network, self._context_spec, actions=self._actions, label="reward_network")
        self._reward_network = reward_network
        self._traced = TracedNetwork(self._tensor_rewards, self._context_spec)

    @property
    def reward_network(self) -> Callable[..., Any]:
        """The network it asks."""
        return self._reward_network

    @property
    def context_spec(self) -> Any:
        """Nest of specs of what the network takes, one context without its mask."""
        return self._context_spec

    def predicted_rewards(self, observation: Any) -> npt.NDArray[np.float32]:
        """Returns [B, K] float32, the reward that the network predicts of each arm, forbidden ones too.

        Args:
            observation: Nest of [B, *shape] arrays, masks and all.

        Raises:
            SpecError: If the observation doesn't fit, or a prediction isn't finite.
        """
        return self._rewards(self._split(observation)[0])

    def _rewards(self, context: Any) -> npt.NDArray[np.float32]:
        return finite_rewards(self._traced(context))

    def _tensor_rewards(self, context: Any) -> "tf.Tensor":
        import tensorflow as tf

        return tf.cast(self._reward_network(context, training=False), tf.float32)


class GreedyRewardPredictionPolicy(RewardPredictionPolicy):
    """Pulls the arm of the highest predicted reward; of equal ones the first.

        >>> from diskbuf.networks import QNetwork
        >>> from diskbuf.specs import ArraySpec, BoundedArraySpec
        >>> from diskbuf.trajectories import restart, time_step_spec
        >>> context_spec, action_spec = ArraySpec((4,), "float32"), BoundedArraySpec((), "int32", 0, 2)
        >>> network = QNetwork(context_spec, action_spec, seed=0)
        >>> policy = GreedyRewardPredictionPolicy(time_step_spec(context_spec), action_spec, network)
        >>> step = policy.action(restart(np.ones((2, 4), np.float32), batch_size=2))
        >>> step.action.shape, step.info["propensity"].tolist()
        ((2,), [1.0, 1.0])

    Arguments are those of RewardPredictionPolicy.
    """

    def _choose(self, context: Any, mask: Mask) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        best = best_allowed(self._rewards(context), mask)
        return best, np.ones(len(best), np.float32)

    def _probabilities(self, context: Any, mask: Mask) -> npt.NDArray[np.float64]:
        return as_certain(best_allowed(self._rewards(context), mask), self.num_actions)

    def _tensor_probabilities(self, context: Any, mask: "tf.Tensor | None") -> "tf.Tensor":
        import tensorflow as tf

        return tf.one_hot(
            tf.argmax(allowed(self._tensor_rewards(context), mask), axis=1), self.num_actions, dtype=tf.float64
        )


class EpsilonGreedyRewardPredictionPolicy(RewardPredictionPolicy):
    """With probability epsilon pulls any allowed arm, each as probable; otherwise that of the highest prediction.

    The best arm's propensity is 1 - epsilon + epsilon / A, that of another allowed one epsilon / A, A being how many
    are allowed. What `compiled` returns keeps the epsilon of the moment.

    Args:
        time_step_spec: As of RewardPredictionPolicy.
        action_spec: Likewise.
        reward_network: Likewise.
        epsilon: From 0 to 1, or a function of the step to one, such as a `diskbuf.policies.LinearSchedule`.
        step: A function that tells the step, such as `lambda: agent.train_step_counter`; where epsilon is a function.
        observation_and_action_constraint_splitter: Likewise.
        seed: Likewise.

    Raises:
        SpecError: As RewardPredictionPolicy.
        OptionError: If epsilon or another argument is outside its rule; where epsilon is a function it is called once.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        reward_network: Callable[..., Any],
        *,
        epsilon: float | Callable[[int], float],
        step: Callable[[], Any] | None = None,
        observation_and_action_constraint_splitter: ConstraintSplitter | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            time_step_spec,
            action_spec,
            reward_network,
            observation_and_action_constraint_splitter=observation_and_action_constraint_splitter,
            seed=seed,
        )
        self._epsilon = scheduled("epsilon", epsilon, step, at_least=0, at_most=1)

    @property
    def epsilon(self) -> float:
        """How probable a random arm is now.

        Raises:
            OptionError: If the function that epsilon is returns something else than a number from 0 to 1.
        """
        return self._epsilon()

    def _probabilities(self, context: Any, mask: Mask) -> npt.NDArray[np.float64]:
        return epsilon_greedy(self._rewards(context), mask, self._epsilon())

    def _tensor_probabilities(self, context: Any, mask: "tf.Tensor | None") -> "tf.Tensor":
        return tensor_epsilon_greedy(self._tensor_rewards(context), mask, at_this_moment(self._epsilon))


class BoltzmannRewardPredictionPolicy(RewardPredictionPolicy):
    """Pulls an allowed arm with a probability proportional to exp(predicted reward / temperature).

    What `compiled` returns keeps the temperature of the moment.

    Args:
        time_step_spec: As of RewardPredictionPolicy.
        action_spec: Likewise.
        reward_network: Likewise.
        temperature: Above 0, or a function of the step to one, such as a `diskbuf.policies.LinearSchedule`. The lower,
            the greedier.
        step: A function that tells the step, such as `lambda: agent.train_step_counter`; where temperature is a
            function.
        observation_and_action_constraint_splitter: Likewise.
        seed: Likewise.

    Raises:
        SpecError: As RewardPredictionPolicy.
        OptionError: If the temperature or another argument is outside its rule; where it is a function it is called
            once.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        reward_network: Callable[..., Any],
        *,
        temperature: float | Callable[[int], float] = 1.0,
        step: Callable[[], Any] | None = None,
        observation_and_action_constraint_splitter: ConstraintSplitter | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            time_step_spec,
            action_spec,
            reward_network,
            observation_and_action_constraint_splitter=observation_and_action_constraint_splitter,
            seed=seed,
        )
        self._temperature = scheduled("temperature", temperature, step, above=0)

    @property
    def temperature(self) -> float:
        """What rewards are divided by now.

        Raises:
            OptionError: If the function that temperature is returns something else than a number above 0.
        """
        return self._temperature()

    def _probabilities(self, context: Any, mask: Mask) -> npt.NDArray[np.float64]:
        rewards = self._rewards(context).astype(np.float64)
        if mask is not None:
            rewards[~mask] = -np.inf
        # The best becomes 0 before the division, so that no temperature is too low.
        with np.errstate(over="ignore"):
            chances = np.exp((rewards - rewards.max(axis=1, keepdims=True)) / self._temperature())
        normalized: npt.NDArray[np.float64] = chances / chances.sum(axis=1, keepdims=True)
        return normalized

    def _tensor_probabilities(self, context: Any, mask: "tf.Tensor | None") -> "tf.Tensor":
        import tensorflow as tf

        rewards = allowed(tf.cast(self._tensor_rewards(context), tf.float64), mask)
        temperature = at_this_moment(self._temperature)
        return tf.nn.softmax((rewards - tf.reduce_max(rewards, axis=1, keepdims=True)) / temperature)


class DropoutThompsonSamplingPolicy(RewardPredictionPolicy):
    """Pulls an arm as often as it is the best one under random dropout of the network's units.

    Dropout that stays on when a network is used draws from an approximate posterior: Gal and Ghahramani, "Dropout as a
    Bayesian Approximation" (2016); as a bandit: Riquelme, Tucker and Snoek, "Deep Bayesian Bandits Showdown" (2018).
    How probable an arm is to be the best has no closed form, so each context passes the network num_samples times,
    each time with units dropped anew. An arm's probability is the share of passes in which it is the best allowed one,
    and the arm is drawn from these shares.

    So the propensity is exact given what was dropped, and a multiple of 1 / num_samples. An arm that is best in no pass
    has none at all, where the posterior may well give it some: off-policy estimates that divide by propensities lack
    that arm. More samples make this rarer. `probabilities` drops anew whenever it is called. The predicted rewards are
    those of the network without dropout.

    Args:
        time_step_spec: As of RewardPredictionPolicy.
        action_spec: Likewise.
        reward_network: A Keras model with dropout layers, such as a QNetwork with `dropout_layer_params`. It is called
            with `training=True`, so it must have no layers that learn from being called, as BatchNormalization does.
        num_samples: S, passes for each context.
        observation_and_action_constraint_splitter: As of RewardPredictionPolicy.
        seed: Of the arms it draws from the shares. What is dropped is drawn by the network's layers.

    Raises:
        SpecError: As RewardPredictionPolicy.
        OptionError: If num_samples or another argument is outside its rule.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        reward_network: Callable[..., Any],
        *,
        num_samples: int = 32,
        observation_and_action_constraint_splitter: ConstraintSplitter | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            time_step_spec,
            action_spec,
            reward_network,
            observation_and_action_constraint_splitter=observation_and_action_constraint_splitter,
            seed=seed,
        )
        self._num_samples = positive("num_samples", num_samples)
        self._traced_samples = TracedNetwork(self._tensor_samples, self._context_spec)

    @property
    def num_samples(self) -> int:
        """S, passes for each context."""
        return self._num_samples

    def sampled_rewards(self, observation: Any) -> npt.NDArray[np.float32]:
        """Returns [B, S, K] float32, the predictions of S passes with units dropped anew.

        Args:
            observation: Nest of [B, *shape] arrays, masks and all.

        Raises:
            SpecError: If the observation doesn't fit, or a prediction isn't finite.
        """
        return self._samples(self._split(observation)[0])

    def _samples(self, context: Any) -> npt.NDArray[np.float32]:
        return finite_rewards(self._traced_samples(context))

    def _tensor_samples(self, context: Any) -> "tf.Tensor":
        import tensorflow as tf

        repeated = tf.nest.map_structure(lambda leaf: tf.repeat(leaf, self._num_samples, axis=0), context)  # [B * S]
        rewards = tf.cast(self._reward_network(repeated, training=True), tf.float32)
        return tf.reshape(rewards, [-1, self._num_samples, self.num_actions])

    def _probabilities(self, context: Any, mask: Mask) -> npt.NDArray[np.float64]:
        samples = self._samples(context)
        if mask is not None:
            samples = np.where(mask[:, None, :], samples, -np.inf)
        best = samples.argmax(axis=2)  # [B, S]
        shares: npt.NDArray[np.float64] = (best[:, :, None] == np.arange(self.num_actions)).mean(axis=1)
        return shares

    def _tensor_probabilities(self, context: Any, mask: "tf.Tensor | None") -> "tf.Tensor":
        import tensorflow as tf

        samples = allowed(self._tensor_samples(context), None if mask is None else mask[:, None, :])
        best = tf.one_hot(tf.argmax(samples, axis=2), self.num_actions, dtype=tf.float64)  # [B, S, K]
        return tf.reduce_mean(best, axis=1)


def scheduled(
    name: str, value: float | Callable[[int], float], step: Callable[[], Any] | None, **limits: float
) -> Callable[[], float]:
    """Returns a function to the value of now, from a number or a function of the step.

    Args:
        name: Of the argument.
        value: A number, or a function of the step to one; the function is called once here.
        step: Tells the step, where value is a function.
        limits: As of `finite_number`.

    Raises:
        OptionError: If the number is outside its limits, also when the returned function is called.
    """
    if not callable(value):
        constant = finite_number(name, value, **limits)
        return lambda: constant
    if not callable(step):
        raise OptionError(
            f"step must be a function that tells the step where {name} is a function of it, got {step!r}. "
            "For a counter: lambda: counter."
        )

    def now() -> float:
        try:
            number = value(int(step()))
        except TypeError as error:
            raise OptionError(
                f"{name} must be a number, or a function of the step to one, got {value!r}: {error}. "
                "Let it take the step."
            ) from error
        return finite_number(name, number, **limits)

    now()  # refused now rather than in the middle of a run
    return now


def at_this_moment(read: Callable[[], Any]) -> Any:
    """Returns what a function reads from variables as a constant, also inside a graph."""
    import tensorflow as tf

    with tf.init_scope():
        return read()


def finite_rewards(rewards: npt.NDArray[Any], *, what: str = "predicted rewards") -> npt.NDArray[Any]:
    """Returns what a network gave, [B, ..., K].

    Args:
        rewards: What it gave.
        what: Its name in the message.

    Raises:
        SpecError: If a number isn't finite: no arm could be told from another then.
    """
    if not np.isfinite(rewards).all():
        lane = int((~np.isfinite(rewards)).reshape(len(rewards), -1).any(axis=1).argmax())
        raise SpecError(
            f"{what} must be finite, got {rewards[lane].tolist()} in lane {lane} from the network. See whether the "
            "context is finite; if it is, the network diverged: train with a lower learning rate or gradient_clipping."
        )
    return rewards


def epsilon_greedy(rewards: npt.NDArray[Any], mask: Mask, epsilon: float) -> npt.NDArray[np.float64]:
    """Returns [B, K] float64, epsilon shared among the allowed arms, and the rest to the best of them.

    Args:
        rewards: [B, K].
        mask: [B, K], or None.
        epsilon: From 0 to 1.
    """
    best = best_allowed(rewards, mask)
    if mask is None:
        chances = np.full(rewards.shape, epsilon / rewards.shape[1])
    else:
        chances = mask * (epsilon / mask.sum(axis=1, keepdims=True))
    chances[np.arange(len(best)), best] += 1 - epsilon
    return chances


def tensor_epsilon_greedy(rewards: "tf.Tensor", mask: "tf.Tensor | None", epsilon: float) -> "tf.Tensor":
    """Returns the same for tensors, float64."""
    import tensorflow as tf

    arms = tf.ones_like(rewards, tf.float64) if mask is None else tf.cast(tf.cast(mask, tf.bool), tf.float64)
    best = tf.one_hot(tf.argmax(allowed(rewards, mask), axis=1), rewards.shape[1], dtype=tf.float64)
    return epsilon * arms / tf.reduce_sum(arms, axis=1, keepdims=True) + (1 - epsilon) * best


def allowed(scores: "tf.Tensor", mask: "tf.Tensor | None") -> "tf.Tensor":
    """Returns scores [..., K] with minus infinity where the mask, which may lack leading axes, is zero."""
    import tensorflow as tf

    if mask is None:
        return scores
    return tf.where(tf.cast(mask, tf.bool), scores, tf.constant(-np.inf, scores.dtype))
