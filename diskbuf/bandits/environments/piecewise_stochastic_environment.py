"""Linear rewards that stay for a while, and then are drawn anew."""

from typing import Any

import numpy as np

from diskbuf.bandits.environments._draws import as_parameter_draw
from diskbuf.bandits.environments._linear_environment import LinearEnvironment
from diskbuf.errors import OptionError


class PiecewiseStochasticEnvironment(LinearEnvironment):
    """Pays context @ observation_to_reward + additive_reward, both drawn anew when an interval is over.

    Intervals are counted in pulls, B a step. They begin and end between steps, and one ends in a step at most.

    TF-Agents' environment of that name takes distributions of TensorFlow Probability. These are functions that return
    arrays, and get the environment's generator if they have a parameter named `rng`, or the numbers themselves. As in
    TF-Agents, what the observations are says B and d, and what is added says K; one draw of each, which isn't of the
    seed, tells.

        >>> env = PiecewiseStochasticEnvironment(
        ...     lambda rng: rng.normal(size=(2, 3)).astype(np.float32),
        ...     lambda rng: rng.integers(100, 200),
        ...     observation_to_reward_distribution=lambda rng: rng.normal(size=(3, 4)),
        ...     additive_reward_distribution=lambda rng: rng.normal(size=4),
        ...     seed=0,
        ... )
        >>> env
        PiecewiseStochasticEnvironment(batch_size=2, num_actions=4)

    Args:
        observation_distribution: Draws [B, d] contexts.
        interval_distribution: Draws the length of an interval, or is it: a number of at least 1, cut to a whole one.
        observation_to_reward_distribution: Draws [d, K], or is it.
        additive_reward_distribution: Draws [K], or is it.
        reward_std: Standard deviation of normal noise on each reward; TF-Agents has none.
        seed: None takes entropy from the system.

    Raises:
        OptionError: If an argument is outside its rule, or something that is drawn is.
        SpecError: If contexts aren't [B, d].
    """

    _changing = (*LinearEnvironment._changing, "_time", "_interval_end")

    def __init__(
        self,
        observation_distribution: Any,
        interval_distribution: Any,
        *,
        observation_to_reward_distribution: Any,
        additive_reward_distribution: Any,
        reward_std: float = 0.0,
        seed: int | None = None,
    ) -> None:
        self._draw_interval = as_parameter_draw("interval_distribution", interval_distribution, ())
        super().__init__(
            observation_distribution,
            observation_to_reward_distribution,
            additive_reward_distribution=additive_reward_distribution,
            reward_std=reward_std,
            seed=seed,
        )
        self._time = 0
        self._interval_end = self._interval()

    def _interval(self) -> int:
        length = int(np.trunc(self._draw_interval(self._rng)))
        if length < 1:
            raise OptionError(f"interval_distribution must be at least 1, got {length}. It is a number of pulls.")
        return length

    def _advance(self) -> None:
        if self._time >= self._interval_end:
            self._interval_end += self._interval()
            self._weights = self._draw_weights(self._rng)
            self._additive = self._draw_additive(self._rng)
        self._time += self._batch_size
