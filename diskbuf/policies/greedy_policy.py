"""The policy that does what a Q-network values most."""

from collections.abc import Callable
from typing import Any

from diskbuf import specs
from diskbuf.networks.action_values import DiscreteActions, check_q_network
from diskbuf.policies.compiled_policy import CompiledPolicy
from diskbuf.trajectories import PolicyStep, TimeStep


class GreedyPolicy(CompiledPolicy):
    """Takes the action of the highest value in each lane; of equal ones the first.

    TF-Agents wraps a QPolicy in a policy of this name. Here it takes the network itself.

        >>> import numpy as np
        >>> from diskbuf.networks import QNetwork
        >>> from diskbuf.specs import ArraySpec, BoundedArraySpec
        >>> from diskbuf.trajectories import restart, time_step_spec
        >>> observation_spec, action_spec = ArraySpec((4,), "float32"), BoundedArraySpec((), "int64", 0, 1)
        >>> network = QNetwork(observation_spec, action_spec, seed=0)
        >>> policy = GreedyPolicy(time_step_spec(observation_spec), action_spec, network)
        >>> policy.action(restart(np.ones((3, 4), np.float32), batch_size=3)).action.shape
        (3,)

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        q_network: A Keras model from a batch of observations to [B, num_actions], such as a QNetwork; any other
            callable of tensors that takes `training` will do.

    Raises:
        SpecError: If the action_spec is something else, or the network's output doesn't match it.
    """

    def __init__(self, time_step_spec: TimeStep, action_spec: Any, q_network: Callable[..., Any]) -> None:
        actions = DiscreteActions.of(action_spec)
        observation_spec = specs.as_spec(time_step_spec.observation)
        check_q_network(q_network, observation_spec, actions=actions, label="q_network")
        self._q_network = q_network

        def greedy(time_step: TimeStep, policy_state: Any) -> PolicyStep:
            import tensorflow as tf

            best = tf.argmax(q_network(time_step.observation, training=False), axis=-1)  # [B, num_actions] to [B]
            return PolicyStep(tf.cast(best + actions.minimum, actions.dtype), policy_state)

        super().__init__(greedy, time_step_spec, action_spec)

    @property
    def q_network(self) -> Callable[..., Any]:
        """The network it asks."""
        return self._q_network
