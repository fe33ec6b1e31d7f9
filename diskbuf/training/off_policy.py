"""Off-policy training: collect, train, evaluate, in turns, from a buffer on disk."""

import functools
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from diskbuf.drivers import DynamicStepDriver
from diskbuf.errors import OptionError
from diskbuf.readers.requests import count
from diskbuf.training.evaluation import average_return
from diskbuf.training.run import Intervals, TrainingRun, TrainResult, settled_seed

if TYPE_CHECKING:
    from diskbuf.metrics import Metric
    from diskbuf.policies import Policy
    from diskbuf.replay_buffers.uniform import UniformReplayBuffer


def train_off_policy(
    root_dir: str | os.PathLike[str],
    agent: Any,
    environment: Any,
    buffer: "UniformReplayBuffer",
    *,
    num_iterations: int,
    initial_collect_steps: int = 1000,
    initial_collect_policy: "Policy | None" = None,
    collect_steps_per_iteration: int = 1,
    train_steps_per_iteration: int = 1,
    sample_batch_size: int = 64,
    seed: int = 0,
    metrics: "Iterable[Metric] | None" = None,
    eval_environment: Any = None,
    num_eval_episodes: int = 10,
    eval_interval: int | None = 1000,
    summary_interval: int | None = 200,
    checkpoint_interval: int | None = 1000,
    train_steps_per_call: int = 1,
    progress: bool = False,
) -> TrainResult:
    """Trains an agent from a buffer that it collects into; killed anywhere, the same call goes on.

    An iteration collects steps with the agent's collect policy and then takes train steps. After a kill the buffer is
    as it was, the agent that of its last checkpoint, and train step k gets batch k of the seed again: train steps that
    were lost with the process are taken anew, no other batch is trained on twice. The environments begin new episodes.

    Args:
        root_dir: Folder for checkpoints (5 are kept), TensorBoard summaries, and settings and history of the training.
        agent: Such as `diskbuf.agents.DqnAgent`: has `train`, `train_step_counter`, `train_sequence_length`, `policy`
            and `collect_policy`, and can be saved by `tf.train.Checkpoint`.
        environment: A batched environment to collect in.
        buffer: Where the rows go; its `data_spec` is the agent's `collect_data_spec`. Flushed before each checkpoint.
        num_iterations: Iterations in all, those before a restart included.
        initial_collect_steps: Environment steps of all lanes to collect before the first train step.
        initial_collect_policy: Collects those; None acts at random.
        collect_steps_per_iteration: Environment steps of all lanes to an iteration, rounded up to one of each lane.
        train_steps_per_iteration: Train steps to an iteration.
        sample_batch_size: Sequences to a batch.
        seed: Which batches are drawn.
        metrics: Observe the rows, and are saved with the agent; None takes the number of environment steps and of
            episodes, and the average return and length of the newest 10 episodes, or of as
            many as there are lanes.
        eval_environment: Where the agent's policy is evaluated; None doesn't.
        num_eval_episodes: Episodes of an evaluation.
        eval_interval: Train steps between evaluations, None for one at the end only.
        summary_interval: Train steps between summaries, log lines and the losses of the result; None for none.
        checkpoint_interval: Train steps between checkpoints, None for one at the end only.
        train_steps_per_call: Train steps that TensorFlow takes before Python sees the loss, at most: fewer up to the
            end of an interval or of an iteration. Several are faster for small networks; then the agent's `train` must
            be all TensorFlow, as that of `DqnAgent` is, since its Python runs once and not with each step.
        progress: Whether to show a progress bar on standard error.

    Returns:
        How it ended.

    Raises:
        OptionError: When an argument is outside its rule, or the folder holds a training of other settings or of
            another agent.
        StoreLockedError: If another process trains in the folder.
        SpecError: When the rows that are collected don't fit the buffer.
        WindowError: When the buffer can't hold a sequence.
        OSError: When something can't be written.
    """
    per_iteration = count("train_steps_per_iteration", train_steps_per_iteration)
    last_step = count("num_iterations", num_iterations) * per_iteration
    collect_steps = count("collect_steps_per_iteration", collect_steps_per_iteration)
    wanted = count("initial_collect_steps", initial_collect_steps, least=0)
    if buffer.capacity is not None and wanted > buffer.capacity:
        raise OptionError(
            f"initial_collect_steps must be at most the {buffer.capacity} rows that the buffer keeps, got {wanted}."
        )
    chosen_seed = settled_seed(seed)
    watching = _usual_metrics(environment.batch_size) if metrics is None else tuple(metrics)
    evaluation = None
    if eval_environment is not None:
        evaluation = functools.partial(average_return, agent, eval_environment, num_eval_episodes)
    observers: list[Any] = [buffer.add_batch, *watching]
    settings = {"seed": chosen_seed, "sample_batch_size": count("sample_batch_size", sample_batch_size)}
    with TrainingRun(
        root_dir,
        agent,
        metrics=watching,
        settings=settings,
        intervals=Intervals(checkpoint=checkpoint_interval, summary=summary_interval, evaluation=eval_interval),
        before_checkpoint=buffer.flush,
        evaluation=evaluation,
        train_steps_per_call=train_steps_per_call,
        last_step=last_step,
        progress=progress,
    ) as run:
        run.evaluate_if_due()
        time_step = None
        if buffer.num_frames() < wanted:
            policy = initial_collect_policy or _random_policy(agent)
            missing = wanted - buffer.num_frames()
            time_step, _ = DynamicStepDriver(environment, policy, observers, num_steps=missing).run()
        driver = DynamicStepDriver(environment, agent.collect_policy, observers, num_steps=collect_steps)
        batches = None
        state: Any = ()
        while run.train_step < last_step:
            time_step, state = driver.run(time_step, state)
            if batches is None:  # the buffer has rows now
                dataset = buffer.as_dataset(
                    sample_batch_size, agent.train_sequence_length, seed=chosen_seed, start=run.train_step
                )
                batches = iter(dataset.prefetch(1))
            run.train(batches, run.train_step + per_iteration - run.train_step % per_iteration)
        return run.finish()


def _usual_metrics(batch_size: int) -> "tuple[Metric, ...]":
    from diskbuf import metrics

    return (
        metrics.NumberOfEpisodes(),
        metrics.EnvironmentSteps(),
        metrics.AverageReturnMetric(batch_size=batch_size, buffer_size=max(10, batch_size)),
        metrics.AverageEpisodeLengthMetric(batch_size=batch_size, buffer_size=max(10, batch_size)),
    )


def _random_policy(agent: Any) -> "Policy":
    from diskbuf.policies import RandomPolicy

    return RandomPolicy(agent.time_step_spec, agent.action_spec)
