"""Trains a usual agent on a store of which nothing is known but its path: what the command line does."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from diskbuf import kept_settings
from diskbuf.agents import DdqnAgent, DqnAgent
from diskbuf.bandits.recognition import is_log
from diskbuf.errors import OptionError, SpecError
from diskbuf.networks import QNetwork
from diskbuf.networks.action_values import DiscreteActions
from diskbuf.policies.saving import save_policy
from diskbuf.readers.requests import count
from diskbuf.replay_buffers.uniform import UniformReplayBuffer
from diskbuf.scanning import scan
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.training.collecting import check_fits, load_environment
from diskbuf.training.offline import train_offline
from diskbuf.training.run import TrainResult, settled_seed
from diskbuf.trajectories import Trajectory, time_step_spec
from diskbuf.tree import Structure, describe

if TYPE_CHECKING:
    import keras

Kind = Literal["dqn", "ddqn"]

_KINDS: dict[str, type[DqnAgent]] = {"dqn": DqnAgent, "ddqn": DdqnAgent}
_AGENT = "agent.json"
_SCALED_BYTES = 2**24  # of rows that are looked at for scales
_SCALED_ROWS = 8192
_SCALED_ALONE = 4096  # elements of a leaf that get a scale each; a leaf of more has one for all
_CATEGORIES = 1024
_MOST_ACTIONS = 1024  # when only the rows tell how many; ids of something have more
# Mnih et al., "Human-level control through deep reinforcement learning" (2015).
_CONVOLUTIONS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
_LEAST_PIXELS = 36  # a side that leaves something after these
_MOST_CHANNELS = 16
_EVALUATIONS = 10
_LOSSES = 40
_LANES = 10
_STEPS_PER_CALL = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class DqnSettings:
    """How a DQN agent is made and trained; the numbers are for small environments such as CartPole.

    Attributes:
        agent: "ddqn" for double Q-learning, "dqn" for the plain one.
        fc_layer_params: Units of the hidden layers.
        learning_rate: Of Adam.
        gamma: Discount of a step.
        target_update_tau: How far the target network follows at each step.
        batch_size: Sequences to a train step.
        seed: Of the network and the batches.

    Raises:
        OptionError: When agent or seed is outside its rule. What the others must be is said by who uses them.
    """

    agent: Kind = "ddqn"
    fc_layer_params: Sequence[int] = (100, 100)
    learning_rate: float = 5e-4
    gamma: float = 0.98
    target_update_tau: float = 0.01
    batch_size: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.agent not in _KINDS:
            raise OptionError(f"agent must be one of {', '.join(map(repr, _KINDS))}, got {self.agent!r}.")
        settled_seed(self.seed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """How a training from a store ended.

    Attributes:
        folder: Of the training.
        policy: Where the greedy policy was saved.
        result: Losses and returns.
        train_steps_before: Those before a restart.
        seen_actions: The least and the largest action, where they were taken from the rows; None where the spec has
            them.
    """

    folder: Path
    policy: Path
    result: TrainResult
    train_steps_before: int
    seen_actions: tuple[int, int] | None


def train_dqn_offline(
    folder: str | os.PathLike[str],
    buffer: UniformReplayBuffer,
    *,
    num_iterations: int,
    settings: DqnSettings | None = None,
    environment_name: str | None = None,
    num_eval_episodes: int = 10,
    progress: bool = False,
) -> Trained:
    """Trains a DQN agent on the rows of a store, and saves its greedy policy; killed anywhere, the same call goes on.

    Observations are brought to about [-1, 1] by the largest that some rows of the store show, once, when the training
    begins; single bounded integers are made one-hot; a picture goes through convolutions. Actions without bounds, as
    imports may leave them, get those of the rows; an action of shape [1] is made a scalar. Checkpoints, losses and
    returns are as of `train_offline`; besides them the folder has `agent.json`, how the agent was made, and `policy_N`,
    N the number of train steps.

    Args:
        folder: Made, or gone on with.
        buffer: The rows.
        num_iterations: Train steps in all, those before a restart included.
        settings: None for the usual ones.
        environment_name: Where the policy is evaluated ten times on the way; None doesn't.
        num_eval_episodes: Episodes of an evaluation.
        progress: Whether to show a progress bar on standard error.

    Returns:
        How it ended.

    Raises:
        OptionError: When the rows are nothing that DQN learns from, an argument is outside its rule, the environment
            is another than the store's, or the folder holds a training of other settings or from another store.
        StoreLockedError: If another process trains in the folder.
        WindowError: When the store has no sequence of two steps.
    """
    settings = DqnSettings() if settings is None else settings
    steps = count("num_iterations", num_iterations)
    folder = Path(folder)
    spec = learnable_spec(buffer)
    kept_settings.check_origin(folder / _AGENT, buffer)
    spec = _with_kept_actions(folder / _AGENT, buffer, spec)
    agent = dqn_agent(spec, settings, scales=_kept_scales(folder, buffer, spec, settings))
    before = max((int(file.stem.rpartition("-")[2]) for file in folder.glob("checkpoints/ckpt-*.index")), default=0)
    environment = None
    if environment_name is not None:
        lanes = min(_LANES, count("num_eval_episodes", num_eval_episodes))
        environment = load_environment(environment_name, lanes, seed=settings.seed)
    try:
        if environment is not None:
            check_fits(agent.policy, environment)
        result = train_offline(
            folder,
            agent,
            buffer,
            steps,
            sample_batch_size=settings.batch_size,
            seed=settings.seed,
            eval_environment=environment,
            num_eval_episodes=num_eval_episodes,
            eval_interval=max(1, steps // _EVALUATIONS),
            summary_interval=max(1, steps // _LOSSES),
            train_steps_per_call=_STEPS_PER_CALL,
            preprocess=_scalar_action if buffer.data_spec.action.shape else None,
            progress=progress,
        )
    finally:
        if environment is not None:
            environment.close()
    policy = folder / f"policy_{result.train_step}"
    if not policy.exists():
        save_policy(agent.policy, policy)
    is_seen = not isinstance(buffer.data_spec.action, BoundedArraySpec)
    return Trained(
        folder=folder,
        policy=policy,
        result=result,
        train_steps_before=before,
        seen_actions=(int(spec.action.minimum), int(spec.action.maximum)) if is_seen else None,
    )


def learnable_spec(buffer: UniformReplayBuffer) -> Trajectory:
    """Returns the spec of a buffer's rows as an agent takes them: with a scalar action, and bounds on it.

    Bounds that the spec lacks are the least and the largest action of all rows.

    Raises:
        OptionError: If they are no Trajectories with one action of a few, or a log of decisions, and so nothing that
            DQN learns from.
    """
    spec = buffer.data_spec
    if not isinstance(spec, Trajectory):
        raise OptionError(
            f"the store must hold Trajectory rows to train on, got {describe(spec)} in {buffer.path}. Collect them "
            "with a driver, or with diskbuf collect."
        )
    if is_log(buffer):
        raise OptionError(
            f"the store must hold episodes of more than one step, got {buffer.path}, a log whose rows are decisions of "
            "their own. A bandit agent learns from these: diskbuf train-bandit."
        )
    try:
        action = _counted(buffer, spec.action)
        DiscreteActions.of(action)
    except SpecError as error:
        raise OptionError(f"the store must hold actions that can be counted: {error} That is {buffer.path}.") from error
    return spec._replace(action=action)


def _counted(buffer: UniformReplayBuffer, action: Any) -> Any:
    """A scalar spec with bounds for one integer; another spec as it is."""
    if not isinstance(action, ArraySpec) or action.shape not in ((), (1,)) or action.dtype.kind not in "iu":
        return action
    if isinstance(action, BoundedArraySpec):
        return BoundedArraySpec([], action.dtype, int(action.minimum.min()), int(action.maximum.max()), action.name)
    least, largest = _action_range(buffer)
    if least < 0 or largest - least >= _MOST_ACTIONS:
        raise OptionError(
            f"actions without bounds must be from 0 on and at most {_MOST_ACTIONS:,} for a Q-network, got {least} to "
            f"{largest} in {buffer.path}. Number them from 0 on, and import them anew."
        )
    return BoundedArraySpec([], action.dtype, least, largest, action.name)


def _action_range(buffer: UniformReplayBuffer) -> tuple[int, int]:
    blocks = (block.columns["action"] for block in scan(buffer, ["action"]))
    found = [(int(actions.min()), int(actions.max())) for actions in blocks]
    if not found:
        raise OptionError(f"the store must have rows, which tell its actions, got {buffer.path} without any.")
    return min(least for least, _ in found), max(largest for _, largest in found)


def _with_kept_actions(path: Path, buffer: UniformReplayBuffer, spec: Trajectory) -> Trajectory:
    """The spec with the actions that a training began with, where the rows told them: a network stays as it is."""
    try:
        kept = json.loads(path.read_text()).get("seen_actions")
    except (OSError, ValueError, AttributeError):
        kept = None
    if isinstance(buffer.data_spec.action, BoundedArraySpec) or kept is None:
        return spec
    least, largest = int(spec.action.minimum), int(spec.action.maximum)
    if not kept[0] <= least <= largest <= kept[1]:
        raise OptionError(
            f"actions must be {kept[0]} to {kept[1]} to go on with the training in {path.parent}, got {least} to "
            f"{largest} in {buffer.path}, which has had more rows since. Use another root_dir."
        )
    return spec._replace(action=BoundedArraySpec([], spec.action.dtype, kept[0], kept[1], spec.action.name))


def _scalar_action(experience: Trajectory) -> Trajectory:
    """[B, T, 1] actions as [B, T]."""
    return experience._replace(action=experience.action[..., 0])


def dqn_agent(spec: Trajectory, settings: DqnSettings, *, scales: dict[str, Any]) -> DqnAgent:
    """Makes an agent for rows of a spec.

    Args:
        spec: Of the rows.
        settings: How.
        scales: What `observation_scales` returns.

    Raises:
        OptionError: When a setting is outside its rule.
    """
    import keras

    observation, action = spec.observation, spec.action
    structure = Structure(observation)
    leaves = structure.flatten(observation)
    is_picture = len(leaves) == 1 and _is_picture(leaves[0])
    layers = [_layer(leaf, scales[path]) for path, leaf in zip(structure.paths, leaves, strict=True)]
    network = QNetwork(
        observation,
        action,
        fc_layer_params=settings.fc_layer_params,
        conv_layer_params=_CONVOLUTIONS if is_picture else None,
        preprocessing_layers=structure.unflatten([_channels_last(leaves[0], layers[0])] if is_picture else layers),
        seed=settings.seed,
    )
    if not settings.learning_rate > 0:
        raise OptionError(f"learning_rate must be above 0, got {settings.learning_rate!r}.")
    return _KINDS[settings.agent](
        time_step_spec(observation),
        action,
        network,
        keras.optimizers.Adam(settings.learning_rate),
        target_update_tau=settings.target_update_tau,
        gamma=settings.gamma,
        seed=settings.seed,
    )


def observation_scales(buffer: UniformReplayBuffer, *, seed: int) -> dict[str, Any]:
    """Returns by what each leaf of the observations is to be divided to be in about [-1, 1].

    Args:
        buffer: Rows; some thousands drawn at random are looked at, fewer where they are large.
        seed: Of the draw.

    Returns:
        By path of the leaf in the observation: JSON numbers, a list for each element of a small leaf, or one for all of
        it; None for a single integer of at most 1,024 values, which is made one-hot.

    Raises:
        WindowError: When the buffer is empty.
    """
    spec = buffer.data_spec
    structure = Structure(spec.observation)
    row_bytes = sum(leaf.dtype.itemsize * int(np.prod(leaf.shape)) for leaf in Structure(spec).flatten(spec))
    rows = min(_SCALED_ROWS, max(1, _SCALED_BYTES // max(1, row_bytes)))
    drawn, _ = next(buffer.as_numpy_iterator(rows, seed=seed))
    scales = {}
    for path, leaf, values in zip(
        structure.paths, structure.flatten(spec.observation), structure.flatten(drawn.observation), strict=True
    ):
        scales[path] = None if _is_category(leaf) else _scale(leaf, np.asarray(values))
    return scales


def _scale(leaf: ArraySpec, values: Any) -> Any:
    """One over nothing is left alone: what is always 0 is divided by 1."""
    if isinstance(leaf, BoundedArraySpec) and leaf.dtype.kind in "iu":
        return float(max(1, np.abs(np.asarray([leaf.minimum.min(), leaf.maximum.max()], np.float64)).max()))
    size = np.abs(values.astype(np.float64))
    size[~np.isfinite(size)] = 0
    alone = leaf.shape and int(np.prod(leaf.shape)) <= _SCALED_ALONE
    largest = size.max(axis=0) if alone else size.max()
    found = np.where(largest > 0, largest, 1.0)
    return np.float32(found).astype(np.float64).tolist()


def _is_category(leaf: ArraySpec) -> bool:
    if not isinstance(leaf, BoundedArraySpec) or leaf.shape or leaf.dtype.kind not in "iu":
        return False
    return int(leaf.minimum) == 0 and int(leaf.maximum) < _CATEGORIES


def _layer(leaf: ArraySpec, scale: Any) -> "keras.layers.Layer":
    import keras

    if scale is None:
        maximum = leaf.maximum if isinstance(leaf, BoundedArraySpec) else 0
        return keras.layers.CategoryEncoding(int(maximum) + 1, output_mode="one_hot")
    return keras.layers.Rescaling((1 / np.asarray(scale, np.float64)).tolist())


def _is_picture(leaf: ArraySpec) -> bool:
    """Whether it is uint8 [height, width], [height, width, channels] or [channels, height, width]."""
    if leaf.dtype.name != "uint8" or len(leaf.shape) not in (2, 3):
        return False
    sides = sorted(leaf.shape, reverse=True)
    return sides[1] >= _LEAST_PIXELS and (len(sides) == 2 or sides[2] <= _MOST_CHANNELS)


def _channels_last(leaf: ArraySpec, scaled: "keras.layers.Layer") -> "keras.Model":
    import keras

    if len(leaf.shape) == 2:
        return keras.Sequential([scaled, keras.layers.Reshape((*leaf.shape, 1))])
    if leaf.shape[0] == min(leaf.shape):
        return keras.Sequential([scaled, keras.layers.Permute((2, 3, 1))])
    return keras.Sequential([scaled])


def _kept_scales(folder: Path, buffer: UniformReplayBuffer, spec: Trajectory, settings: DqnSettings) -> dict[str, Any]:
    """The scales of the training in a folder; those of the buffer where one begins. Refuses other settings."""
    path = folder / _AGENT
    named = dataclasses.asdict(settings) | {"fc_layer_params": list(settings.fc_layer_params)}
    named = {name: value for name, value in named.items() if name not in ("batch_size", "seed")}  # kept by the training
    if path.exists():
        kept_settings.keep(path, named)
        scales: dict[str, Any] = json.loads(path.read_text()).get("scales", {})
        if _fit(scales, spec.observation):
            return scales
        raise OptionError(f"{path} must be of a training on rows like those of {buffer.path}, but isn't. Remove it.")
    scales = observation_scales(buffer, seed=settings.seed)
    folder.mkdir(parents=True, exist_ok=True)
    notes = kept_settings.origin(buffer) | {"scales": scales}
    if not isinstance(buffer.data_spec.action, BoundedArraySpec):
        notes["seen_actions"] = [int(spec.action.minimum), int(spec.action.maximum)]
    kept_settings.keep(path, named, notes)
    return scales


def _fit(scales: dict[str, Any], observation: Any) -> bool:
    structure = Structure(observation)
    leaves = dict(zip(structure.paths, structure.flatten(observation), strict=True))
    return scales.keys() == leaves.keys() and all(
        np.shape(scales[path]) in ((), leaf.shape) for path, leaf in leaves.items()
    )
