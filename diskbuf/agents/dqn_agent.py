"""Deep Q-learning from the rows of a buffer, plain and double."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from diskbuf import specs
from diskbuf.agents.keras_training import (
    check_keras,
    checked_counter,
    checked_loss,
    checked_optimizer,
    finite_number,
    optimize,
    positive,
)
from diskbuf.agents.late_module import LateModule
from diskbuf.agents.losses import element_wise_huber_loss
from diskbuf.agents.n_step import n_step
from diskbuf.errors import OptionError, SpecError
from diskbuf.networks.action_values import DiscreteActions, check_q_network
from diskbuf.policies.epsilon_greedy_policy import EpsilonGreedyPolicy
from diskbuf.policies.greedy_policy import GreedyPolicy
from diskbuf.policies.policy import Policy
from diskbuf.trajectories import TimeStep, Trajectory
from diskbuf.tree import Structure, describe

if TYPE_CHECKING:
    import keras
    import tensorflow as tf


class LossInfo(NamedTuple):
    """What `train` answers.

    Attributes:
        loss: [] float32, what was minimized: the mean over B of the weighted `td_loss`, plus the network's own losses.
        extra: What the agent tells besides, of a DqnAgent a DqnLossInfo.
    """

    loss: Any
    extra: Any


class DqnLossInfo(NamedTuple):
    """What a DqnAgent tells of each window; 0 where its first row is no transition.

    Attributes:
        td_loss: [B] float32, before weights.
        td_error: [B] float32, target minus prediction.
    """

    td_loss: Any
    td_error: Any


class DqnAgent(LateModule):
    """Learns the values of actions from stored experience, and acts by them.

    After Mnih et al., "Human-level control through deep reinforcement learning" (2015): a network is trained towards
    the reward plus the discounted value that a target network, which follows it now and then, gives the best next
    action. With `n_step_update` above 1 the reward is that of several steps; see `diskbuf.agents.n_step`.

    Rows are those of a `Trajectory`, with a boundary row between episodes: it is no transition and counts for nothing,
    a truncated episode is bootstrapped from the observation in it, and a terminated one isn't bootstrapped.

        >>> import keras
        >>> import diskbuf
        >>> from diskbuf.drivers import DynamicStepDriver
        >>> from diskbuf.environments import suite_gym
        >>> from diskbuf.networks import QNetwork
        >>> with suite_gym.load("CartPole-v1", num_envs=8, seed=0) as env:
        ...     network = QNetwork(env.time_step_spec().observation, env.action_spec())
        ...     optimizer = keras.optimizers.Adam(1e-3)
        ...     agent = DqnAgent(env.time_step_spec(), env.action_spec(), network, optimizer, gamma=0.99, seed=0)
        ...     with diskbuf.UniformReplayBuffer(agent.collect_data_spec, batch_size=8, max_length=1000) as buffer:
        ...         _ = DynamicStepDriver(env, agent.collect_policy, [buffer.add_batch], num_steps=200).run()
        ...         for experience, info in buffer.as_dataset(sample_batch_size=32, num_steps=2).take(10):
        ...             loss_info = agent.train(experience)
        >>> int(agent.train_step_counter)
        10

    It is a `tf.Module`: `tf.train.Checkpoint(agent=agent)` saves and restores both networks, the optimizer and the
    counter. The policies always act by the network's current weights.

    Other than TF-Agents', it takes Keras models, makes the target network equal to the network when it is made, stops
    n-step returns where an episode ends, and gives actions from arrays to arrays.

    Args:
        time_step_spec: The environment's.
        action_spec: A scalar BoundedArraySpec of integers.
        q_network: A Keras model from a batch of observations to [B, num_actions], such as a QNetwork. It is built if it
            wasn't.
        optimizer: A Keras optimizer, for this agent alone.
        epsilon_greedy: How probable a random action of `collect_policy` is, from 0 to 1, or a function to that from the
            number of training steps, such as a `diskbuf.policies.LinearSchedule`.
        n_step_update: Steps n whose rewards go into a target; `train` takes windows of n + 1 rows.
        target_q_network: A model of the same weights, none of them shared, used as it is; None copies q_network.
        target_update_tau: How far the target network moves at an update, above 0 and up to 1, which copies.
        target_update_period: Training steps from one update of the target network to the next.
        td_errors_loss_fn: From targets and predictions [B] to losses [B]; None is `element_wise_huber_loss`.
        gamma: Discount of each step, from 0 to 1, on top of the environment's.
        reward_scale_factor: What rewards are multiplied by.
        gradient_clipping: Largest norm of each variable's gradient; None doesn't clip.
        debug_summaries: Whether to write histograms of errors and values for TensorBoard, besides the loss, which goes
            always: to the `tf.summary` writer that is the default when `train` is first called, without one nowhere.
        summarize_grads_and_vars: Whether to write histograms of gradients and weights, likewise.
        train_step_counter: A scalar integer tf.Variable that counts training steps; None makes one.
        seed: Of `collect_policy`; None takes entropy from the system.
        name: Of the module.

    Raises:
        SpecError: If the action_spec is something else, or a network's output doesn't match it.
        OptionError: If another argument is outside its rule.
    """

    def __init__(
        self,
        time_step_spec: TimeStep,
        action_spec: Any,
        q_network: "keras.Model",
        optimizer: "keras.Optimizer",
        *,
        epsilon_greedy: float | Callable[[int], float] = 0.1,
        n_step_update: int = 1,
        target_q_network: "keras.Model | None" = None,
        target_update_tau: float = 1.0,
        target_update_period: int = 1,
        td_errors_loss_fn: "Callable[[tf.Tensor, tf.Tensor], tf.Tensor] | None" = None,
        gamma: float = 1.0,
        reward_scale_factor: float = 1.0,
        gradient_clipping: float | None = None,
        debug_summaries: bool = False,
        summarize_grads_and_vars: bool = False,
        train_step_counter: "tf.Variable | None" = None,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        import tensorflow as tf

        self._begin_module(name)
        self._actions = DiscreteActions.of(action_spec)
        self._n_step_update = positive("n_step_update", n_step_update)
        self._target_update_period = positive("target_update_period", target_update_period)
        self._target_update_tau = finite_number("target_update_tau", target_update_tau, above=0, at_most=1)
        self._gamma = finite_number("gamma", gamma, at_least=0, at_most=1)
        self._reward_scale_factor = finite_number("reward_scale_factor", reward_scale_factor)
        self._gradient_clipping = (
            None if gradient_clipping is None else finite_number("gradient_clipping", gradient_clipping, above=0)
        )
        self._td_errors_loss_fn = checked_loss(td_errors_loss_fn or element_wise_huber_loss, label="td_errors_loss_fn")
        self._debug_summaries = debug_summaries
        self._summarize_grads_and_vars = summarize_grads_and_vars

        observation_spec = specs.as_spec(time_step_spec.observation)
        check_keras("q_network", q_network, "Model")
        check_q_network(q_network, observation_spec, actions=self._actions, label="q_network")
        target: Any = _copied(q_network) if target_q_network is None else target_q_network
        check_keras("target_q_network", target, "Model")
        check_q_network(target, observation_spec, actions=self._actions, label="target_q_network")
        _check_pair(q_network, target)
        self._q_network = q_network
        self._target_q_network = target
        if target_q_network is None:
            self.initialize()
        self._optimizer = checked_optimizer(optimizer, q_network.trainable_variables, network="q_network")
        self._train_step_counter = checked_counter(train_step_counter)

        self._policy = GreedyPolicy(time_step_spec, action_spec, q_network)
        self._collect_policy = EpsilonGreedyPolicy(
            self._policy, epsilon_greedy, step=lambda: self._train_step_counter, seed=seed
        )
        # A tf.Module would wrap a spec in classes of its own, so the policies keep them.
        self._rows = _Rows(self.collect_data_spec, num_steps=self._n_step_update + 1)
        # Without AutoGraph, as Keras compiles its own training: errors keep their class.
        self._compiled_train = tf.function(self._train_step, autograph=False)
        self._compiled_loss = tf.function(self._loss, autograph=False)

    @property
    def time_step_spec(self) -> TimeStep:
        """The specs of the time steps its policies take."""
        return self._policy.time_step_spec

    @property
    def action_spec(self) -> Any:
        """The spec of its actions."""
        return self._policy.action_spec

    @property
    def collect_data_spec(self) -> Trajectory:
        """The spec of the rows that `collect_policy` collects: the `data_spec` of a buffer for them."""
        return self._collect_policy.trajectory_spec

    @property
    def policy(self) -> Policy:
        """The greedy policy, to evaluate and to deploy."""
        return self._policy

    @property
    def collect_policy(self) -> Policy:
        """The policy that explores, to collect with."""
        return self._collect_policy

    @property
    def q_network(self) -> "keras.Model":
        """The network that is trained."""
        return self._q_network

    @property
    def target_q_network(self) -> "keras.Model":
        """The network that targets come from."""
        return self._target_q_network

    @property
    def train_step_counter(self) -> "tf.Variable":
        """[] integer, how often it was trained."""
        return self._train_step_counter

    @property
    def train_sequence_length(self) -> int:
        """T, how many rows `train` takes: the `num_steps` to read with."""
        return self._n_step_update + 1

    def initialize(self) -> None:
        """Makes the target network equal to the network.

        A target network that was copied is so from the start. Not after a checkpoint was restored: that brought the
        target network back as it was.
        """
        for weight, target in zip(self._q_network.weights, self._target_q_network.weights, strict=True):
            target.assign(weight)

    def train(self, experience: Any, weights: Any = None) -> LossInfo:
        """Takes one step of the optimizer, counts it, and moves the target network when its time has come.

        Compiled once for each shape; in a `tf.function` of yours it becomes part of that.

        Args:
            experience: A Trajectory with leaves [B, T, *shape], T = n_step_update + 1, as the first of what
                `as_dataset(batch_size, num_steps=T)` gives. Its policy_info doesn't matter.
            weights: [B] float32, or one for all, what each window's loss is multiplied by, such as importance weights;
                None for 1.

        Returns:
            The loss before the step.

        Raises:
            SpecError: If the experience or the weights don't fit; nothing was trained.
            tf.errors.InvalidArgumentError: If the loss is infinite or no number; nothing was trained.
        """
        leaves = self._rows.leaves(experience)
        loss_info: LossInfo = self._compiled_train(leaves, _checked_weights(weights, leaves))
        return loss_info

    def loss(self, experience: Any, weights: Any = None) -> LossInfo:
        """Returns the loss that `train` would minimize, and changes nothing.

        Args:
            experience: As in `train`.
            weights: As in `train`.

        Raises:
            SpecError: If the experience or the weights don't fit.
        """
        leaves = self._rows.leaves(experience)
        loss_info: LossInfo = self._compiled_loss(leaves, _checked_weights(weights, leaves), training=False)
        return loss_info

    def _train_step(self, leaves: "list[tf.Tensor]", weights: "tf.Tensor | None") -> LossInfo:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss_info = self._loss(leaves, weights, training=True)
        variables = self._q_network.trainable_variables
        gradients, step = optimize(
            tape,
            loss_info.loss,
            variables=variables,
            optimizer=self._optimizer,
            gradient_clipping=self._gradient_clipping,
            train_step_counter=self._train_step_counter,
        )
        self._summarize(loss_info, zip(variables, gradients, strict=True))
        if self._target_update_period == 1:
            self._update_target()
        else:
            tf.cond(step % self._target_update_period == 0, self._update_target, lambda: None)
        return loss_info

    def _loss(self, leaves: "list[tf.Tensor]", weights: "tf.Tensor | None", training: bool) -> LossInfo:
        import tensorflow as tf

        rows = self._rows.of(leaves)
        steps = n_step(rows.step_type, rows.next_step_type, rows.reward, rows.discount, gamma=self._gamma)
        observation = tf.nest.map_structure(lambda leaf: leaf[:, 0], rows.observation)
        next_observation = tf.nest.map_structure(
            lambda leaf: tf.gather(leaf, steps.length, batch_dims=1), rows.observation
        )
        # From here on there is no time axis: [B, num_actions] or [B].
        next_values = self._next_values(next_observation)
        targets = tf.stop_gradient(self._reward_scale_factor * steps.reward + steps.discount * next_values)
        index = self._checked_index(rows.action[:, 0], steps.is_valid)
        values = _value_of(self._q_network(observation, training=training), index)
        td_error = tf.where(steps.is_valid, targets - values, 0.0)
        td_loss = tf.where(steps.is_valid, self._td_errors_loss_fn(targets, values), 0.0)
        # Divided by B also where some windows don't count, so that each that does weighs the same in every batch.
        loss = tf.reduce_mean(td_loss if weights is None else weights * td_loss)
        if self._q_network.losses:
            loss += tf.add_n(self._q_network.losses)
        if self._debug_summaries:
            for name, tensor in {"values": values, "next_values": next_values}.items():
                tf.summary.histogram(f"dqn/{name}", tensor, tf.cast(self._train_step_counter, tf.int64))
        return LossInfo(loss, DqnLossInfo(td_loss, td_error))

    def _checked_index(self, action: "tf.Tensor", is_valid: "tf.Tensor") -> "tf.Tensor":
        """[B] int64, actions from 0 on; 0 where there is no transition. One outside its spec ends the graph."""
        import tensorflow as tf

        low, count = self._actions.minimum, self._actions.num_actions
        index = tf.where(is_valid, tf.cast(action, tf.int64) - low, 0)
        message = f"actions must lie within [{low}, {low + count - 1}], got others. Train on rows of this spec:"
        fits = tf.reduce_all((index >= 0) & (index < count))
        with tf.control_dependencies([tf.debugging.Assert(fits, [message, action])]):
            return tf.identity(index)

    def _next_values(self, observation: Any) -> "tf.Tensor":
        """[B] what the best action is worth, of which both the choice and the value are the target network's."""
        import tensorflow as tf

        return tf.reduce_max(self._target_q_network(observation, training=False), axis=-1)

    def _update_target(self) -> None:
        tau = self._target_update_tau
        for weight, target in zip(self._q_network.weights, self._target_q_network.weights, strict=True):
            if tau == 1 or not weight.trainable:  # an average of statistics, or of integers, means nothing
                target.assign(weight)
            else:
                target.assign(target + tau * (weight - target))

    def _summarize(self, loss_info: LossInfo, variables_and_gradients: "Iterable[tuple[Any, Any]]") -> None:
        import tensorflow as tf

        step = tf.cast(self._train_step_counter, tf.int64)  # the only dtype that summaries take
        tf.summary.scalar("dqn/loss", loss_info.loss, step)
        if self._debug_summaries:
            tf.summary.histogram("dqn/td_error", loss_info.extra.td_error, step)
            tf.summary.histogram("dqn/td_loss", loss_info.extra.td_loss, step)
        if self._summarize_grads_and_vars:
            for variable, gradient in variables_and_gradients:
                tf.summary.histogram(f"dqn/weights/{variable.path}", variable, step)
                if gradient is not None:
                    tf.summary.histogram(f"dqn/gradients/{variable.path}", gradient, step)


class DdqnAgent(DqnAgent):
    """A DqnAgent whose network chooses the next action, while the target network says what that one is worth.

    Double Q-learning, which overestimates less: van Hasselt, Guez and Silver, "Deep Reinforcement Learning with Double
    Q-learning" (2015). Arguments are those of DqnAgent.
    """

    def _next_values(self, observation: Any) -> "tf.Tensor":
        import tensorflow as tf

        chosen = tf.argmax(self._q_network(observation, training=False), axis=-1)
        return _value_of(self._target_q_network(observation, training=False), chosen)


class _Rows:
    """Takes experience apart and checks it, in Python once for each call, so that what is compiled gets plain tensors.

    Args:
        data_spec: Of the rows.
        num_steps: T that they must have.
    """

    def __init__(self, data_spec: Trajectory, *, num_steps: int) -> None:
        without_info = data_spec._replace(policy_info=())
        self._structure = Structure(without_info)
        self._specs = self._structure.flatten(without_info)
        self._num_steps = num_steps

    def of(self, leaves: Iterable[Any]) -> Trajectory:
        """The leaves as a Trajectory without policy_info."""
        rows: Trajectory = self._structure.unflatten(leaves)
        return rows

    def leaves(self, experience: Any) -> "list[tf.Tensor]":
        """The leaves that matter, as tensors [B, T, *shape] of their spec's dtype.

        Raises:
            SpecError: If they are something else.
        """
        import tensorflow as tf

        if getattr(experience, "_fields", None) != Trajectory._fields:
            raise SpecError(
                f"experience must be a Trajectory, got {describe(experience)}. "
                "A dataset gives pairs of experience and info: pass the first."
            )
        try:
            given = self._structure.flatten(experience._replace(policy_info=()))
        except SpecError as error:
            raise SpecError(f"experience must be like collect_data_spec: {error}", path=error.path) from error
        tensors = []
        for path, spec, leaf in zip(self._structure.paths, self._specs, given, strict=True):
            tensor = tf.convert_to_tensor(leaf)
            if tensor.dtype != tf.as_dtype(spec.dtype) or not self._fits(tensor, spec.shape):
                raise self._unfit(path, spec, tensor)
            tensors.append(tensor)
        return tensors

    def _fits(self, tensor: Any, shape: tuple[int, ...]) -> bool:
        is_known = tensor.shape.rank is not None
        return not is_known or bool(tensor.shape.is_compatible_with([None, self._num_steps, *shape]))

    def _unfit(self, path: str, spec: Any, tensor: Any) -> SpecError:
        wanted = ", ".join(map(str, ("B", self._num_steps, *spec.shape)))
        return SpecError(
            f"leaf {path!r} of experience must be {spec.dtype} [{wanted}], for n_step_update + 1 = {self._num_steps} "
            f"steps, got {tensor.dtype.name} {tensor.shape.as_list()}. Read with "
            f"as_dataset(sample_batch_size, num_steps={self._num_steps}) from a buffer of collect_data_spec.",
            path=path,
        )


def _value_of(values: "tf.Tensor", index: "tf.Tensor") -> "tf.Tensor":
    """[B, num_actions] and [B] to [B]."""
    import tensorflow as tf

    return tf.gather(values, index, batch_dims=1)


def _checked_weights(weights: Any, leaves: "list[tf.Tensor]") -> "tf.Tensor | None":
    import tensorflow as tf

    if weights is None:
        return None
    tensor = tf.cast(tf.convert_to_tensor(weights), tf.float32)
    if tensor.shape.rank and not tensor.shape.is_compatible_with(leaves[0].shape[:1]):
        raise SpecError(
            f"weights must be one number or float32 {leaves[0].shape[:1].as_list()}, one for each window, got "
            f"{tensor.shape.as_list()}.",
            path="weights",
        )
    return tensor


def _copied(q_network: "keras.Model") -> "keras.Model":
    import keras

    try:
        return keras.models.clone_model(q_network)
    except Exception as error:
        raise OptionError(
            f"q_network must be a model that Keras can copy, got {type(error).__name__}: {error}. Pass a "
            "target_q_network, made as q_network is, or give the class get_config()."
        ) from error


def _check_pair(q_network: "keras.Model", target_q_network: "keras.Model") -> None:
    shapes, target_shapes = ([tuple(weight.shape) for weight in net.weights] for net in (q_network, target_q_network))
    if shapes != target_shapes:
        raise OptionError(
            f"target_q_network must have weights of the same shapes as q_network, {shapes}, got {target_shapes}. "
            "Make both in the same way."
        )
    shared = {id(weight) for weight in q_network.weights}.intersection(map(id, target_q_network.weights))
    if shared:
        raise OptionError(
            f"target_q_network must have weights of its own, got {len(shared)} that are q_network's too. "
            "Make its layers anew."
        )
