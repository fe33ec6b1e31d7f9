"""What a policy earns: whole episodes played, nothing stored."""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.readers.requests import count

if TYPE_CHECKING:
    from diskbuf.policies import Policy


def evaluate(policy: "Policy", environment: Any, *, num_episodes: int = 10) -> NDArray[np.float64]:
    """Plays episodes and returns what each earned.

    The lanes share the episodes evenly, and each plays its share one after the other: were the first `num_episodes`
    that end taken from all lanes, short episodes would count too often.

    Args:
        policy: Chooses the actions.
        environment: A batched environment of B lanes; it is reset first.
        num_episodes: Episodes to play, rounded up to a multiple of B.

    Returns:
        [episodes] undiscounted sums of rewards, lane by lane.

    Raises:
        OptionError: When num_episodes isn't an int of at least 1.
    """
    lanes = environment.batch_size
    share = -(-count("num_episodes", num_episodes) // lanes)
    returns = np.zeros((lanes, share))
    episode = np.zeros(lanes, np.int64)
    time_step = environment.reset()
    state = policy.get_initial_state(lanes)
    while (episode < share).any():
        step = policy.action(time_step, state)
        before, time_step, state = time_step, environment.step(step.action), step.state
        is_counted = (episode < share) & ~before.is_last()  # behind a LAST a reset follows, which earns nothing
        lane = np.flatnonzero(is_counted)
        returns[lane, episode[lane]] += time_step.reward[lane]
        episode += is_counted & time_step.is_last()
    return returns.reshape(-1)


def average_return(agent: Any, environment: Any, num_episodes: int) -> float:
    """Returns what an episode of the agent's policy earns on average."""
    return float(evaluate(agent.policy, environment, num_episodes=num_episodes).mean())
