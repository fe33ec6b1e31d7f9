"""Trains a bandit agent in a bandit environment: collect, train, forget, and do so again; with the rows on disk."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from diskbuf import kept_settings, specs
from diskbuf.bandits.agents.array_state import saved_arrays
from diskbuf.bandits.keeping import Keeper
from diskbuf.bandits.log_reader import Log, LogReader
from diskbuf.bandits.logged_driver import BanditLog, LoggedDriver
from diskbuf.bandits.offline_batches import OfflineBatches
from diskbuf.errors import EndOfLogError, OptionError, SpecError, StoreCorruptError
from diskbuf.metrics import (
    AverageEpisodeLengthMetric,
    AverageReturnMetric,
    AverageReturnMultiMetric,
    EnvironmentSteps,
    Metric,
    NumberOfEpisodes,
    export_metrics,
)
from diskbuf.readers.requests import count
from diskbuf.replay_buffers.uniform import UniformReplayBuffer, flag
from diskbuf.replay_buffers.uniform import open as open_buffer
from diskbuf.specs import ArraySpec
from diskbuf.trajectories import Trajectory
from diskbuf.tree import Structure

_LOG = "log.zarr"
_SETTINGS = "trainer.json"

GetReplayBuffer = Callable[[Any, int, int, int], Any]
TrainingLoop = Callable[..., object]
GetTrainingLoop = Callable[[LoggedDriver, Any, Any, int, int], TrainingLoop]


class OfflineResult(NamedTuple):
    """How a training from a log ended.

    Attributes:
        train_steps: Batches gone through, those before a restart included.
        loss: The last one's loss; NaN when all were before a restart.
    """

    train_steps: int
    loss: float


def train(
    root_dir: str | os.PathLike[str],
    agent: Any,
    environment: Any,
    training_loops: int,
    steps_per_loop: int,
    async_steps_per_loop: int | None = None,
    additional_metrics: Sequence[Metric] = (),
    get_replay_buffer_fn: GetReplayBuffer | None = None,
    get_training_loop_fn: GetTrainingLoop | None = None,
    training_data_spec_transformation_fn: Callable[[Any], Any] | None = None,
    save_policy: bool = True,
    resume_training_loops: bool = False,
) -> None:
    """Lets an agent act in a bandit environment and trains it from what came of that, again and again.

    A loop runs the driver `async_steps_per_loop` times, each time for `steps_per_loop` rows, with the policy as it is;
    then it trains once on each of the `async_steps_per_loop` batches [B, steps_per_loop], in the order in which they
    were collected; then it clears the buffer. With `async_steps_per_loop` above 1 the policy is updated at intervals,
    as policies are that serve users. In total there are training_loops * async_steps_per_loop train steps.

    After each run of the driver the metrics are exported, and after each train step the loss, as lines
    `[step=N] NAME = VALUE.` of the logger `diskbuf.metrics` and as TensorBoard summaries in root_dir, where N is
    loop * async_steps_per_loop + i. Metrics are `NumberOfEpisodes`, `AverageEpisodeLength`, the additional ones, and
    `AverageReturn` (`AverageReturnMultiMetric` where a reward is not one number).

    What is in root_dir afterwards: `log.zarr`, the store with every row that was ever collected, open to
    `diskbuf.open(root_dir / "log.zarr", history=True)` while and after it trains; the last 5 checkpoints `ckpt-N`, N
    the number of loops; the last 5 policies `policy_N`, N the number of environment steps, for
    `diskbuf.policies.load_policy`; summaries. Checkpoint and policy are saved after the first loop, at the end, and
    in between as often as that takes at most a tenth of the time.

    Killed anywhere and called again, every row of the log is trained on once: the agent goes on from its checkpoint and
    learns from the rows logged after it as if they had just been collected, batch for batch; a loop that was cut off is
    completed, and is the first of those that this call counts. An agent and environment of diskbuf with seeds come to
    the very same rows and weights as if nothing had happened.

    Args:
        root_dir: The folder; made, or gone on with.
        agent: A `diskbuf.bandits.agents.BanditAgent`, or another `tf.Module` with `collect_policy`, `policy`, `train`.
        environment: A `diskbuf.bandits.environments.BanditEnvironment`, or a `ReplayEnvironment`; where that comes to
            the end of its log, the last batches are what is left, and the training ends.
        training_loops: Loops to do.
        steps_per_loop: Rows of a run of the driver; each is a step in every lane.
        async_steps_per_loop: Runs of the driver in a loop, and train steps; None is 1.
        additional_metrics: Metrics besides the usual ones.
        get_replay_buffer_fn: From (data_spec, batch_size, steps_per_loop, async_steps_per_loop) to the buffer; None is
            `DiskLog(root_dir=root_dir)`. With a buffer of your own a checkpoint is saved after every loop.
        get_training_loop_fn: From (driver, replay_buffer, agent, steps_per_loop, async_steps_per_loop) to a function of
            `train_step`, the number of the loop, and `metrics`, that does one loop; None is `get_training_loop`. One of
            your own must run that driver. After a kill, rows that were logged are shown to it again, and no window of
            `as_dataset` spans two writers: `driver.log.read(driver.position, count)`, before it runs, has them all.
        training_data_spec_transformation_fn: Applied to the spec of a row, and to each row [B] before it is added.
        save_policy: Whether to save policies.
        resume_training_loops: Whether training_loops counts from the very first start, so that a call that is
            repeated does what is left; otherwise from now.

    Raises:
        OptionError: If an argument is outside its rule, lanes don't match, the folder is another agent's, or a step
            count doesn't divide; nothing was collected.
        SpecError: If a reward or context doesn't fit its spec or isn't finite; that row isn't in the log.
        StoreLockedError: If another process trains in the folder.
        StoreError: If the log can't be gone on with, or lacks rows that the checkpoint has seen.
    """
    additional_metrics = _listed("additional_metrics", additional_metrics)
    save_policy = flag("save_policy", save_policy)
    resume_training_loops = flag("resume_training_loops", resume_training_loops)
    for name, function in (
        ("get_replay_buffer_fn", get_replay_buffer_fn),
        ("get_training_loop_fn", get_training_loop_fn),
        ("training_data_spec_transformation_fn", training_data_spec_transformation_fn),
    ):
        if function is not None and not callable(function):
            raise OptionError(f"{name} must be None or a function, got {function!r}.")
    steps = count("steps_per_loop", steps_per_loop)
    runs = 1 if async_steps_per_loop is None else count("async_steps_per_loop", async_steps_per_loop)
    loops = count("training_loops", training_loops)
    root = Path(root_dir)
    _check_parts(agent, environment, additional_metrics)
    data_spec = agent.collect_policy.trajectory_spec
    if training_data_spec_transformation_fn is not None:
        data_spec = training_data_spec_transformation_fn(data_spec)
    whose = {
        "agent": type(agent).__name__,
        "batch_size": environment.batch_size,
        "specs": specs.to_json(agent.collect_policy.trajectory_spec),
    }

    make = DiskLog(root_dir=root) if get_replay_buffer_fn is None else get_replay_buffer_fn
    # What history holds can be learnt from again after a kill, so a checkpoint of it may wait.
    is_sparse = isinstance(make, DiskLog) and make.keep_history and get_training_loop_fn is None
    step_metric = EnvironmentSteps()
    metrics = _usual_metrics(environment, additional_metrics)
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_settings.one_at_a_time(root))
        kept_settings.keep(root / _SETTINGS, whose)
        replay_buffer, log = _buffer_and_log(stack, make, (data_spec, environment.batch_size, steps, runs))
        _check_lanes(replay_buffer, environment)
        driver = LoggedDriver(
            environment,
            agent.collect_policy,
            log=log,
            add=_add_to(replay_buffer, training_data_spec_transformation_fn, environment),
            transform=training_data_spec_transformation_fn,
            metrics=[step_metric, *metrics],
            steps=steps,
        )
        training_loop = (get_training_loop_fn or get_training_loop)(driver, replay_buffer, agent, steps, runs)
        saver = _Saver(root, agent, driver, metrics, step_metric, is_saving_policy=save_policy)
        saver.restore()

        steps_per_round = steps * runs * environment.batch_size
        done, left = divmod(int(step_metric.result()), steps_per_round)
        if left and resume_training_loops:
            raise OptionError(
                "steps_per_loop * batch_size * async_steps_per_loop must divide the environment steps so far for "
                f"resume_training_loops, got {steps} * {environment.batch_size} * {runs} = {steps_per_round} and "
                f"{int(step_metric.result())} steps. Use the settings of the training in {root}, or "
                "resume_training_loops=False."
            )
        with _summaries(root, agent):
            while (waiting := driver.num_waiting) >= steps * runs:  # logged by one that was killed
                training_loop(train_step=done, metrics=metrics)
                if driver.num_waiting >= waiting:
                    raise OptionError(
                        "get_training_loop_fn must make a loop that runs the driver it is given, got another."
                    )
                done += 1
                saver.after_loop(is_sparse=is_sparse)
            with contextlib.suppress(EndOfLogError):  # of a log that is replayed
                for loop in range(done if resume_training_loops else 0, loops):
                    training_loop(train_step=loop, metrics=metrics)
                    saver.after_loop(is_sparse=is_sparse)
            saver.save()
        if get_training_loop_fn is None:
            _clear_trained(driver, replay_buffer)


def train_offline(
    root_dir: str | os.PathLike[str],
    agent: Any,
    store: Log,
    num_epochs: int = 1,
    batch_size: int = 256,
    async_steps_per_loop: int | None = None,
    *,
    num_steps: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    first_id: int | None = None,
    next_id: int | None = None,
    invalid: Literal["reject", "drop"] = "reject",
    save_policy: bool = True,
) -> OfflineResult:
    """Trains a bandit agent from a log: passes over its rows, with no environment.

    Each row needs the reward of the arm that was chosen, and of no other. Killed anywhere and called again, it goes on
    from the last checkpoint with the batch that comes next, and ends with the very weights of a training that nothing
    happened to.

    What is in root_dir afterwards is as with `train`, without the log: checkpoints `ckpt-N` and policies `policy_N`,
    N the number of train steps, saved after the first loop, at the end, and in between as often as that takes at most
    a tenth of the time; and the loss of each train step as a summary and a line `[step=N] loss = VALUE.`

    Args:
        root_dir: The folder; made, or gone on with.
        agent: A `diskbuf.bandits.agents.BanditAgent`, or another `tf.Module` with `policy` and `train`.
        store: A buffer, or the path of a store, which is read with its history: `log.zarr` of `train`, or an import.
        num_epochs: Passes over the rows.
        batch_size: Rows of a train step, [1, batch_size]; the last of a pass may have fewer.
        async_steps_per_loop: Train steps of a loop, between which nothing is saved; None is 1.
        num_steps: Train steps in all, in as many passes as that takes, in place of num_epochs; None for whole passes.
        shuffle: Whether each pass has an order of its own; otherwise rows come as they were logged.
        seed: Of the orders.
        first_id: First step id to train on; None is the oldest there is.
        next_id: Where to stop, exclusive; None is after the newest there is now. Give it to go on with a training whose
            log has grown.
        invalid: What becomes of rows whose reward or context isn't finite: an error, or left out.
        save_policy: Whether to save policies.

    Returns:
        How it ended.

    Raises:
        OptionError: If an argument is outside its rule, or the folder holds a training of other settings or of another
            agent; nothing was trained.
        SpecError: If rows don't fit the agent, or a reward or context isn't finite.
        WindowError: If the range isn't in the log.
        StoreLockedError: If another process trains in the folder.
        StoreError: If there is no store at the path, or it can't be opened.
    """
    steps = 1 if async_steps_per_loop is None else count("async_steps_per_loop", async_steps_per_loop)
    shuffle, save_policy, seed = (
        flag("shuffle", shuffle),
        flag("save_policy", save_policy),
        count("seed", seed, least=0),
    )
    for name in ("policy", "train"):
        if not hasattr(agent, name):
            raise OptionError(f"agent must have {name}, got {agent!r}. Make one of diskbuf.bandits.agents.")
    root = Path(root_dir)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(LogReader(store, first_id=first_id, next_id=next_id))
        if num_steps is not None and num_epochs != 1:
            raise OptionError(f"num_epochs must be left out with num_steps, got {num_epochs} and {num_steps}.")
        epochs = num_epochs if num_steps is None else count("num_steps", num_steps)  # of a step each, or of more
        batches = OfflineBatches(
            log, batch_size=batch_size, num_epochs=epochs, shuffle=shuffle, seed=seed, invalid=invalid
        )
        last_step = len(batches) if num_steps is None else epochs
        stack.enter_context(kept_settings.one_at_a_time(root))
        settings = {
            "agent": type(agent).__name__,
            "first_id": log.first_id,
            "next_id": log.next_id,
            "batch_size": count("batch_size", batch_size),
            "shuffle": shuffle,
            "seed": seed,
        }
        kept_settings.keep(root / _SETTINGS, settings)
        done = 0

        def restore(state: dict[str, npt.NDArray[Any]]) -> None:
            nonlocal done
            done = int(state["batches"])

        trained = saved_arrays(lambda: {"batches": np.array(done)}, restore)
        keeper = Keeper(root, agent, {"trainer": trained}, is_saving_policy=save_policy)
        keeper.save_start()  # what is stopped before it first saves starts from this one, and not from its rest
        saved = keeper.restore()
        loss = float("nan")
        with _summaries(root, agent):
            while done < last_step:
                for number in range(done, min(done + steps, last_step)):
                    experience = batches[number]
                    if experience is not None:
                        loss_info = agent.train(experience)
                        _export(number, (), loss_info)
                        loss = float(loss_info.loss)
                    done += 1
                if keeper.is_due:
                    saved = done
                    keeper.save(done, policy_number=done)
            if saved != done:
                keeper.save(done, policy_number=done)
    return OfflineResult(done, loss)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskLog:
    """The `get_replay_buffer_fn` that `train` uses: a `BanditReplayBuffer` at `log.zarr` in a folder.

    `train` closes the buffer that it makes; one that is made by a function of yours stays open.

    Attributes:
        root_dir: The folder.
        keep_history: Whether rows that were trained on stay on disk, for offline replay. Without, the store holds no
            more than a loop's rows, and a checkpoint is saved after every loop.
    """

    root_dir: str | os.PathLike[str]
    keep_history: bool = True

    def __call__(self, data_spec: Any, batch_size: int, steps_per_loop: int, async_steps_per_loop: int) -> Any:
        """Makes the buffer, or goes on with it."""
        from diskbuf.replay_buffers import BanditReplayBuffer

        length = None if self.keep_history else steps_per_loop * async_steps_per_loop
        path = Path(self.root_dir) / _LOG
        return BanditReplayBuffer(data_spec, batch_size, length, path=path, keep_history=self.keep_history)


def get_training_loop(
    driver: LoggedDriver, replay_buffer: Any, agent: Any, steps_per_loop: int, async_steps_per_loop: int
) -> TrainingLoop:
    """Returns the function that does one loop of `train`, as its documentation says.

    It clears the buffer when it begins, so that a checkpoint has seen the rows that go.

    Args:
        driver: What collects.
        replay_buffer: Where the driver puts rows.
        agent: What learns.
        steps_per_loop: Rows of a run of the driver.
        async_steps_per_loop: Runs, and train steps.

    Returns:
        A function of `train_step`, the number of the loop, and `metrics`.
    """

    def training_loop(train_step: int, metrics: Sequence[Metric]) -> None:
        _clear_trained(driver, replay_buffer)  # not at the end: before it is, a checkpoint must have seen the rows
        first = driver.position
        step = train_step * async_steps_per_loop
        end = None
        try:
            for number in range(async_steps_per_loop):
                driver.run()
                _export(step + number, metrics)
        except EndOfLogError as error:  # a log that is replayed
            end = error
        rows = driver.position - first
        for number, experience in enumerate(_batches(driver, replay_buffer, first, rows=rows, steps=steps_per_loop)):
            _export(step + number, (), agent.train(experience))
        if end is not None:
            raise end

    return training_loop


def _clear_trained(driver: LoggedDriver, replay_buffer: Any) -> None:
    """Empties the window, unless there are rows in it that were logged but not trained on."""
    if not driver.num_waiting:
        replay_buffer.clear()


def _batches(driver: LoggedDriver, replay_buffer: Any, first: int, *, rows: int, steps: int) -> Iterator[Any]:
    """Yields batches [B, steps] of what was collected, in order; the last has fewer where a log ended."""
    if driver.log is not None:
        # By number, which a deterministic pass is too, but for a loop that was cut off: no window spans two writers.
        for start in range(0, rows, steps):
            yield driver.log.read(first + start, min(steps, rows - start))
        return
    dataset = replay_buffer.as_dataset(
        sample_batch_size=driver.env.batch_size, num_steps=steps, single_deterministic_pass=True
    )
    for experience, _ in dataset.take(-(-rows // steps)):
        yield experience


@contextlib.contextmanager
def _summaries(root: Path, agent: Any) -> Iterator[None]:
    """Makes a summary writer in the folder the default one."""
    import tensorflow as tf

    def retrace() -> None:
        if hasattr(agent, "retrace"):
            agent.retrace()

    retrace()
    with contextlib.closing(tf.summary.create_file_writer(str(root))) as writer, writer.as_default():
        yield
    retrace()  # what it has compiled writes to this writer, which is closed


def _export(step: int, metrics: Sequence[Metric], loss_info: Any = None) -> None:
    import tensorflow as tf

    export_metrics(step, metrics, loss_info)
    for metric in metrics:
        metric.tf_summaries(train_step=step)
    if loss_info is not None:
        tf.summary.scalar("Losses/loss", loss_info.loss, step=step)


class _Saver:
    """The checkpoints of a training, and where its driver goes on."""

    def __init__(
        self,
        root: Path,
        agent: Any,
        driver: LoggedDriver,
        metrics: list[Metric],
        step_metric: EnvironmentSteps,
        *,
        is_saving_policy: bool,
    ) -> None:
        self._root = root
        self._driver = driver
        self._step_metric = step_metric
        self._position: int | None = None  # of the last checkpoint
        self._is_followed = driver.log is not None
        parts = {metric.name: metric for metric in metrics}
        parts |= {"step": step_metric, "trainer": saved_arrays(self._state, self._take)}
        self._keeper = Keeper(root, agent, parts, is_saving_policy=is_saving_policy)
        self._saved_at: int | None = None  # environment steps
        self._loops = 0

    def restore(self) -> None:
        """Brings back the last checkpoint, and sets the driver to the row that comes next."""
        log = self._driver.log
        if log is not None:
            self._driver.go_on_from(log.first, is_followed=False)
        self._keeper.save_start()  # what is stopped before the first loop's starts from this one, and not from its rest
        number = self._keeper.restore()
        if number is not None:
            self._loops = number
            self._saved_at = int(self._step_metric.result())
        if log is None:
            return
        position = log.first if self._position is None else self._position
        if not log.first <= position <= len(log):
            raise StoreCorruptError(
                f"the log must have the rows from {position} on, which the checkpoint {self._keeper.latest} hasn't "
                f"seen, got rows {log.first} to {len(log)}. Restore the store, or begin in another root_dir.",
                path=str(self._root),
            )
        self._driver.go_on_from(position, is_followed=self._is_followed)

    def after_loop(self, *, is_sparse: bool) -> None:
        """Counts a loop; saves unless it may wait and not enough time has passed since it last did."""
        self._loops += 1
        if not is_sparse or self._keeper.is_due:
            self.save()

    def save(self) -> None:
        """Saves, unless nothing was done since it last did."""
        steps = int(self._step_metric.result())
        if steps == self._saved_at:
            return
        if self._driver.log is not None:
            self._driver.log.flush()  # a checkpoint must not have seen a row that a power cut can take
        self._keeper.save(self._loops, policy_number=steps)
        self._saved_at = steps

    def _state(self) -> dict[str, npt.NDArray[Any]]:
        """What a checkpoint holds besides: where the log was, and what goes on from step to step."""
        state = {"position": np.array(self._driver.position)}
        environment = self._driver.env
        if hasattr(environment, "state"):
            state.update({f"environment/{name}": value for name, value in environment.state().items()})
        return state

    def _take(self, state: dict[str, npt.NDArray[Any]]) -> None:
        self._position = int(state.pop("position"))
        environment = self._driver.env
        if state and hasattr(environment, "restore"):
            environment.restore({name.partition("/")[2]: value for name, value in state.items()})
        else:
            self._is_followed = False


def _usual_metrics(environment: Any, additional: Sequence[Metric]) -> list[Metric]:
    lanes, reward_spec = environment.batch_size, environment.reward_spec()
    is_number = isinstance(reward_spec, ArraySpec) and not reward_spec.shape
    average = (
        AverageReturnMetric(batch_size=lanes)
        if is_number
        else AverageReturnMultiMetric(reward_spec=reward_spec, batch_size=lanes)
    )
    return [NumberOfEpisodes(), AverageEpisodeLengthMetric(batch_size=lanes), *additional, average]


def _buffer_and_log(
    stack: contextlib.ExitStack, make: GetReplayBuffer, arguments: tuple[Any, int, int, int]
) -> tuple[Any, BanditLog | None]:
    """Returns the buffer and its rows by number, which need a buffer of diskbuf."""
    replay_buffer = make(*arguments)
    if not hasattr(replay_buffer, "add_batch"):
        raise OptionError(f"get_replay_buffer_fn must return a replay buffer, got {replay_buffer!r}.")
    plain = getattr(replay_buffer, "buffer", replay_buffer)
    if not isinstance(plain, UniformReplayBuffer):
        return replay_buffer, None
    history = None
    if isinstance(make, DiskLog):
        stack.enter_context(plain)
        history = stack.enter_context(open_buffer(plain.path, history=True)) if make.keep_history else None
    return replay_buffer, BanditLog(plain, history)


def _add_to(
    replay_buffer: Any, transform: Callable[[Any], Any] | None, environment: Any
) -> Callable[[Trajectory], Any]:
    """Returns the observer that checks a row's reward, transforms the row and adds it."""
    # Underneath a drop-in is the same buffer without its conversions.
    add = getattr(replay_buffer, "buffer", replay_buffer).add_batch
    spec = environment.reward_spec()
    structure = Structure(spec)
    leaf_specs = structure.flatten(spec)

    def observe(row: Trajectory) -> None:
        for path, leaf, leaf_spec in zip(structure.paths, structure.flatten(row.reward), leaf_specs, strict=True):
            _check_reward(f"reward/{path}" if path else "reward", np.asarray(leaf), leaf_spec)
        add(row if transform is None else transform(row))

    return observe


def _check_reward(name: str, reward: npt.NDArray[Any], spec: ArraySpec) -> None:
    low, high = getattr(spec, "minimum", None), getattr(spec, "maximum", None)
    fits = np.isfinite(reward)
    if low is not None and high is not None:
        fits = fits & (reward >= low) & (reward <= high)
    if not fits.all():
        lane = int((~fits).reshape(len(reward), -1).any(axis=1).argmax())
        rule = "be finite" if low is None or high is None else f"lie within [{low}, {high}]"
        raise SpecError(
            f"leaf {name!r} must {rule}, got {reward[lane]} in lane {lane}. The row was not logged; "
            "mend the environment.",
            path=name,
        )


def _listed(name: str, values: Any) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError as error:
        raise OptionError(f"{name} must be a list, got {values!r}.") from error


def _check_parts(agent: Any, environment: Any, additional: Sequence[Metric]) -> None:
    if not getattr(environment, "is_bandit", False):
        raise OptionError(
            f"environment must be a bandit environment, got {environment!r}. Derive yours from "
            "diskbuf.bandits.environments.BanditEnvironment; episodes of many steps go to diskbuf.training."
        )
    for name in ("collect_policy", "policy", "train"):
        if not hasattr(agent, name):
            raise OptionError(f"agent must have {name}, got {agent!r}. Make one of diskbuf.bandits.agents.")
    for number, metric in enumerate(additional):
        if not isinstance(metric, Metric):
            raise OptionError(f"additional_metrics[{number}] must be a diskbuf.metrics.Metric, got {metric!r}.")
    names = [metric.name for metric in _usual_metrics(environment, additional)] + ["agent", "step", "trainer"]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"metrics must have names of their own, got {name!r} twice. Give name= to one of them.")
    for name, mine, theirs in (
        ("observation", agent.collect_policy.time_step_spec.observation, environment.observation_spec()),
        ("action", agent.collect_policy.action_spec, environment.action_spec()),
    ):
        if specs.to_json(specs.as_spec(mine)) != specs.to_json(specs.as_spec(theirs)):
            raise OptionError(
                f"agent must be made for the environment's {name} spec {theirs}, got {mine}. "
                "Make it with environment.time_step_spec() and environment.action_spec()."
            )


def _check_lanes(replay_buffer: Any, environment: Any) -> None:
    lanes = getattr(replay_buffer, "batch_size", environment.batch_size)
    if lanes != environment.batch_size:
        raise OptionError(
            f"batch_size of the replay buffer must be the environment's {environment.batch_size}, got {lanes}. "
            "Make it with the batch_size that get_replay_buffer_fn is given."
        )
