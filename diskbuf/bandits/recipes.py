"""Makes bandit agents and estimators from names and a few numbers, and trains the agents: for the command line."""

import dataclasses
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from diskbuf import kept_settings
from diskbuf.bandits import agents, evaluation, trainer
from diskbuf.bandits.log_reader import LogReader
from diskbuf.bandits.recognition import is_log
from diskbuf.errors import OptionError
from diskbuf.networks import QNetwork
from diskbuf.policies.saving import newest_policy
from diskbuf.replay_buffers.uniform import UniformReplayBuffer
from diskbuf.trajectories import TimeStep, time_step_spec
from diskbuf.tree import Structure

if TYPE_CHECKING:
    import keras

Specs = tuple[TimeStep, Any]

_AGENT = "agent.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BanditSettings:
    """How a bandit agent is made. What is None is as usual for the agent; what the agent has no use for must be None.

    Attributes:
        agent: One of `agent_names()`.
        alpha: Of linear agents, what widths are multiplied by.
        epsilon: Share of random arms.
        temperature: Of Boltzmann agents.
        learning_rate: Of Adam; of exp3 its own.
        fc_layer_params: Units of the hidden layers of a network.
        dropout_rate: Share of units that dropout leaves out.
        seed: Of the network and the draws.

    Raises:
        OptionError: If there is no such agent, or it has no use for a setting.
    """

    agent: str
    alpha: float | None = None
    epsilon: float | None = None
    temperature: float | None = None
    learning_rate: float | None = None
    fc_layer_params: Sequence[int] | None = None
    dropout_rate: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.agent not in _AGENTS:
            raise OptionError(f"agent must be one of {', '.join(_AGENTS)}, got {self.agent!r}.")
        taken = [name for name in inspect.signature(_AGENTS[self.agent]).parameters if name not in ("specs", "seed")]
        for name, value in self.chosen().items():
            if name not in taken:
                used = f"takes {', '.join(taken)}" if taken else "takes none of these"
                raise OptionError(f"{name} must be left out with the agent {self.agent}, got {value!r}. It {used}.")

    def chosen(self) -> dict[str, Any]:
        """The numbers that are not None."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("agent", "seed")]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


def agent_names() -> tuple[str, ...]:
    """The agents that `bandit_agent` makes."""
    return tuple(_AGENTS)


def bandit_agent(specs: Specs, settings: BanditSettings) -> agents.BanditAgent:
    """Makes an agent.

        >>> from diskbuf.specs import ArraySpec, BoundedArraySpec
        >>> from diskbuf.trajectories import time_step_spec
        >>> specs = time_step_spec(ArraySpec((2,), "float32")), BoundedArraySpec((), "int32", 0, 4)
        >>> type(bandit_agent(specs, BanditSettings(agent="linucb", alpha=0.5))).__name__
        'LinearUCBAgent'

    Args:
        specs: Of the time steps, and of the arms.
        settings: Which one, and how.

    Raises:
        OptionError: If a setting is outside its rule.
        SpecError: If contexts or arms are nothing for it.
    """
    made: agents.BanditAgent = _AGENTS[settings.agent](specs, settings.seed, **settings.chosen())
    return made


def estimators_named(names: Sequence[str]) -> list[evaluation.Estimator]:
    """Makes the estimators of names such as `ips`, or `clipped-ips:10`, with the number that some need.

        >>> estimators_named(["snips", "switch-dr:5"])
        [SNIPS(), SwitchDR(tau=5.0)]

    Raises:
        OptionError: If there is no such estimator, or a number is missing, too much or outside its rule.
    """
    found = []
    for word in names:
        name, colon, number = word.strip().lower().partition(":")
        if name not in _ESTIMATORS:
            raise OptionError(f"estimator must be one of {', '.join(_ESTIMATORS)}, got {word!r}.")
        kind: Any = _ESTIMATORS[name]
        takes = dataclasses.fields(kind)
        if bool(colon) != bool(takes):
            wanted = (
                f"followed by {takes[0].name.rstrip('_')}, such as {name}:10" if takes else "written without a number"
            )
            raise OptionError(f"estimator {name} must be {wanted}, got {word!r}.")
        try:
            found.append(kind(float(number)) if takes else kind())
        except ValueError as error:
            if isinstance(error, OptionError):
                raise
            raise OptionError(f"estimator {name} must be followed by a number, got {word!r}.") from error
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedBandit:
    """How a training from a log ended.

    Attributes:
        folder: Of the training.
        policy: Where the agent's policy was saved.
        train_steps: Batches gone through, those before a restart included.
        loss: The last one's loss; NaN when all were before a restart.
        train_steps_before: Those before a restart.
    """

    folder: Path
    policy: Path
    train_steps: int
    loss: float
    train_steps_before: int


def train_agent_offline(
    folder: str | os.PathLike[str],
    buffer: UniformReplayBuffer,
    settings: BanditSettings,
    *,
    num_steps: int | None = None,
    num_epochs: int = 1,
    batch_size: int = 256,
    shuffle: bool = False,
    first_id: int | None = None,
    next_id: int | None = None,
) -> TrainedBandit:
    """Trains an agent of `bandit_agent` on a log with `trainer.train_offline`; how it was made is kept in `agent.json`.

    Args:
        folder: Made, or gone on with.
        buffer: The log.
        settings: Which agent, and how; the seed is that of the orders too.
        num_steps: As in `trainer.train_offline`, and so are the others.
        num_epochs: See there.
        batch_size: See there.
        shuffle: See there.
        first_id: See there.
        next_id: See there.

    Returns:
        How it ended.

    Raises:
        OptionError: If an argument is outside its rule, the rows are steps of longer episodes, or the folder holds a
            training of other settings or from another store.
        SpecError: If the rows are not those of a log, or nothing for the agent.
        WindowError: If the range isn't in the log.
        StoreLockedError: If another process trains in the folder.
    """
    folder = Path(folder)
    check_log(buffer)
    kept_settings.check_origin(folder / _AGENT, buffer)
    spec = buffer.data_spec
    agent = bandit_agent((time_step_spec(spec.observation), spec.action), settings)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = dataclasses.asdict(settings)
    layers = settings.fc_layer_params
    chosen["fc_layer_params"] = None if layers is None else list(layers)
    kept_settings.keep(folder / _AGENT, chosen, kept_settings.origin(buffer))
    before = max((int(file.stem.rpartition("-")[2]) for file in folder.glob("ckpt-*.index")), default=0)
    result = trainer.train_offline(
        folder,
        agent,
        buffer,
        num_epochs,
        batch_size,
        num_steps=num_steps,
        shuffle=shuffle,
        seed=settings.seed,
        first_id=first_id,
        next_id=next_id,
    )
    return TrainedBandit(
        folder=folder,
        policy=newest_policy(folder),
        train_steps=result.train_steps,
        loss=result.loss,
        train_steps_before=before,
    )


def check_log(buffer: UniformReplayBuffer) -> None:
    """Refuses rows that aren't decisions of their own, by a sample of them.

    Raises:
        OptionError: If they are steps of longer episodes.
        SpecError: If they are no Trajectories with one action of a few and a reward.
    """
    LogReader(buffer).close()
    if is_log(buffer) is False:
        raise OptionError(
            f"the store must be a log, whose rows are decisions of their own, got {buffer.path} with episodes of many "
            "steps. A DQN agent learns from these: diskbuf train-offline."
        )


def uniform_policy(buffer: UniformReplayBuffer) -> npt.NDArray[np.float64]:
    """Returns [K] equal probabilities for the arms of a log.

    Raises:
        SpecError: If the buffer is no log.
    """
    with LogReader(buffer) as log:
        return np.full(log.num_actions, 1 / log.num_actions)


def logged_policy(buffer: UniformReplayBuffer, path: str) -> evaluation.LoggedColumn:
    """Returns the policy whose choices a leaf of a log holds, such as `policy_info/other`.

    Raises:
        SpecError: If the buffer is no log.
        OptionError: If there is no such leaf, or it is neither [K] probabilities nor an arm.
    """
    with LogReader(buffer) as log:
        arms = log.num_actions
    structure = Structure(buffer.data_spec)
    leaves = dict(zip(structure.paths, structure.flatten(buffer.data_spec), strict=True))
    fitting = [
        name
        for name, leaf in leaves.items()
        if name.startswith("policy_info/")
        and ((leaf.shape == (arms,) and leaf.dtype.kind == "f") or (not leaf.shape and leaf.dtype.kind in "iu"))
    ]
    if path not in fitting:
        raise OptionError(
            f"column must be a leaf of policy_info with {arms} probabilities or with an arm, got {path!r}. "
            + (f"Such are {', '.join(fitting)}." if fitting else "This log has none.")
        )
    return evaluation.LoggedColumn(path.removeprefix("policy_info/"))


def _adam(learning_rate: float) -> "keras.Optimizer":
    import keras

    if not learning_rate > 0:
        raise OptionError(f"learning_rate must be above 0, got {learning_rate!r}.")
    return keras.optimizers.Adam(learning_rate)


def _network(specs: Specs, fc_layer_params: Sequence[int], seed: int) -> "keras.Model":
    return QNetwork(specs[0].observation, specs[1], fc_layer_params=fc_layer_params, seed=seed)


def _linucb(specs: Specs, seed: int, *, alpha: float = 1.0) -> Any:
    return agents.LinearUCBAgent(specs[0], specs[1], alpha=alpha, add_bias=True, seed=seed)


def _lints(specs: Specs, seed: int, *, alpha: float = 1.0) -> Any:
    return agents.LinearThompsonSamplingAgent(specs[0], specs[1], alpha=alpha, add_bias=True, seed=seed)


def _neural_greedy(
    specs: Any, seed: int, *, learning_rate: float = 3e-3, fc_layer_params: Sequence[int] = (32,)
) -> Any:
    network = _network(specs, fc_layer_params, seed)
    return agents.GreedyRewardPredictionAgent(specs[0], specs[1], network, _adam(learning_rate), seed=seed)


def _neural_epsilon_greedy(
    specs: Specs,
    seed: int,
    *,
    epsilon: float = 0.1,
    learning_rate: float = 3e-3,
    fc_layer_params: Sequence[int] = (32,),
) -> Any:
    network = _network(specs, fc_layer_params, seed)
    return agents.NeuralEpsilonGreedyAgent(
        specs[0], specs[1], network, _adam(learning_rate), epsilon=epsilon, seed=seed
    )


def _neural_boltzmann(
    specs: Specs,
    seed: int,
    *,
    temperature: float = 0.1,
    learning_rate: float = 3e-3,
    fc_layer_params: Sequence[int] = (32,),
) -> Any:
    network = _network(specs, fc_layer_params, seed)
    return agents.NeuralBoltzmannAgent(
        specs[0], specs[1], network, _adam(learning_rate), temperature=temperature, seed=seed
    )


def _dropout_thompson(
    specs: Specs,
    seed: int,
    *,
    dropout_rate: float = 0.1,
    learning_rate: float = 3e-3,
    fc_layer_params: Sequence[int] = (32,),
) -> Any:
    return agents.DropoutThompsonSamplingAgent(
        specs[0], specs[1], _adam(learning_rate), dropout_rate=dropout_rate, network_layers=fc_layer_params, seed=seed
    )


def _bernoulli_thompson(specs: Specs, seed: int) -> Any:
    return agents.BernoulliThompsonSamplingAgent(specs[0], specs[1], seed=seed)


def _exp3(specs: Specs, seed: int, *, learning_rate: float = 0.1) -> Any:
    return agents.Exp3Agent(specs[0], specs[1], learning_rate=learning_rate, seed=seed)


_AGENTS: dict[str, Callable[..., Any]] = {
    "linucb": _linucb,
    "lints": _lints,
    "neural-greedy": _neural_greedy,
    "neural-epsilon-greedy": _neural_epsilon_greedy,
    "neural-boltzmann": _neural_boltzmann,
    "dropout-thompson": _dropout_thompson,
    "bernoulli-thompson": _bernoulli_thompson,
    "exp3": _exp3,
}
_ESTIMATORS: dict[str, type[evaluation.Estimator]] = {
    "ips": evaluation.IPS,
    "snips": evaluation.SNIPS,
    "dm": evaluation.DirectMethod,
    "dr": evaluation.DoublyRobust,
    "sndr": evaluation.SelfNormalizedDR,
    "clipped-ips": evaluation.ClippedIPS,
    "switch-dr": evaluation.SwitchDR,
    "dros": evaluation.DRos,
    "replay": evaluation.Replay,
}
