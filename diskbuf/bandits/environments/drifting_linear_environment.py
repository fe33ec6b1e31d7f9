"""Linear rewards whose weights turn a little with each step."""

import math
from typing import Any

import numpy as np

from diskbuf.bandits.environments._draws import as_parameter_draw
from diskbuf.bandits.environments._linear_environment import LinearEnvironment
from diskbuf.errors import OptionError


class DriftingLinearEnvironment(LinearEnvironment):
    """Pays context @ observation_to_reward + additive_reward; before each step the weights turn by a drawn angle.

    A turn is a Givens rotation (Golub and Van Loan, "Matrix Computations", section 5.1) in the plane of two
    neighbouring coordinates of the context, drawn with equal chances. It leaves the norm of each arm's weights as it
    is, and turns all arms alike. What is added to the rewards is drawn anew before each step.

    TF-Agents' environment of that name takes distributions of TensorFlow Probability. These are functions that return
    arrays, and get the environment's generator if they have a parameter named `rng`, or the numbers themselves. As in
    TF-Agents, what the observations are says B and d, and what is added says K; one draw of each, which isn't of the
    seed, tells.

        >>> env = DriftingLinearEnvironment(
        ...     lambda rng: rng.normal(size=(2, 3)).astype(np.float32),
        ...     lambda rng: rng.normal(size=(3, 4)),
        ...     drift_distribution=lambda rng: rng.normal(scale=0.01),
        ...     additive_reward_distribution=np.zeros(4),
        ...     seed=0,
        ... )
        >>> env
        DriftingLinearEnvironment(batch_size=2, num_actions=4)

    Args:
        observation_distribution: Draws [B, d] contexts, d at least 2.
        observation_to_reward_distribution: Draws [d, K] the first weights, or is them.
        drift_distribution: Draws an angle in radians, or is it.
        additive_reward_distribution: Draws [K], or is it.
        reward_std: Standard deviation of normal noise on each reward; TF-Agents has none.
        seed: None takes entropy from the system.

    Raises:
        OptionError: If an argument is outside its rule, or something that is drawn is.
        SpecError: If contexts aren't [B, d].
    """

    def __init__(
        self,
        observation_distribution: Any,
        observation_to_reward_distribution: Any,
        *,
        drift_distribution: Any,
        additive_reward_distribution: Any,
        reward_std: float = 0.0,
        seed: int | None = None,
    ) -> None:
        self._draw_angle = as_parameter_draw("drift_distribution", drift_distribution, ())
        super().__init__(
            observation_distribution,
            observation_to_reward_distribution,
            additive_reward_distribution=additive_reward_distribution,
            reward_std=reward_std,
            seed=seed,
        )
        self._dimension = len(self._weights)
        if self._dimension < 2:
            raise OptionError(
                f"contexts must have at least 2 coordinates to turn weights in, got {self._dimension} from "
                "observation_distribution."
            )

    def _advance(self) -> None:
        angle = float(self._draw_angle(self._rng))
        row = int(self._rng.integers(self._dimension - 1))
        cos, sin = math.cos(angle), math.sin(angle)
        weights = np.array(self._weights)
        weights[row : row + 2] = np.array([[cos, -sin], [sin, cos]]) @ weights[row : row + 2]
        self._weights = weights
        self._additive = self._draw_additive(self._rng)
