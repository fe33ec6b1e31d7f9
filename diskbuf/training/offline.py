"""Offline training: from rows that are there, with no environment but to evaluate in."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

from diskbuf.readers.requests import count
from diskbuf.replay_buffers.uniform import UniformReplayBuffer
from diskbuf.replay_buffers.uniform import open as open_buffer
from diskbuf.training.evaluation import average_return
from diskbuf.training.run import Intervals, TrainingRun, TrainResult, settled_seed


def train_offline(
    root_dir: str | os.PathLike[str],
    agent: Any,
    buffer_or_path: "UniformReplayBuffer | str | os.PathLike[str]",
    num_iterations: int,
    *,
    sample_batch_size: int = 256,
    within_episodes: bool | str = False,
    seed: int = 0,
    eval_environment: Any = None,
    num_eval_episodes: int = 10,
    eval_interval: int | None = 1000,
    summary_interval: int | None = 200,
    checkpoint_interval: int | None = 1000,
    train_steps_per_call: int = 1,
    preprocess: Callable[[Any], Any] | None = None,
    progress: bool = False,
) -> TrainResult:
    """Trains an agent from a store that nobody adds to; killed anywhere, the same call ends with the same weights.

    Train step k gets batch k of the seed, before and after a restart; the agent goes on from its last checkpoint.

    Args:
        root_dir: As in `train_off_policy`.
        agent: As in `train_off_policy`.
        buffer_or_path: The rows, or where their store is; that is opened for reading.
        num_iterations: Train steps in all, those before a restart included.
        sample_batch_size: Sequences to a batch.
        within_episodes: As in `UniformReplayBuffer.as_dataset`.
        seed: Which batches are drawn.
        eval_environment: Where the agent's policy is evaluated; None doesn't.
        num_eval_episodes: Episodes of an evaluation.
        eval_interval: Train steps between evaluations, None for one at the end only.
        summary_interval: Train steps between summaries, log lines and the losses of the result; None for none.
        checkpoint_interval: Train steps between checkpoints, None for one at the end only.
        train_steps_per_call: As in `train_off_policy`.
        preprocess: Given each batch, returns what the agent trains on, in TensorFlow; None leaves it as it is.
        progress: Whether to show a progress bar on standard error.

    Returns:
        How it ended.

    Raises:
        OptionError: When an argument is outside its rule, or the folder holds a training of other settings or of
            another agent.
        StoreNotFoundError: When there is no store at the path.
        StoreLockedError: If another process trains in the folder.
        SpecError: When the rows aren't what the agent trains on.
        WindowError: When no sequence of that length is in the store.
    """
    last_step = count("num_iterations", num_iterations)
    chosen_seed = settled_seed(seed)
    settings = {"seed": chosen_seed, "sample_batch_size": count("sample_batch_size", sample_batch_size)}
    evaluation = None
    if eval_environment is not None:
        evaluation = functools.partial(average_return, agent, eval_environment, num_eval_episodes)
    with contextlib.ExitStack() as stack:
        if isinstance(buffer_or_path, UniformReplayBuffer):
            buffer = buffer_or_path
        else:
            buffer = stack.enter_context(open_buffer(buffer_or_path))
        run = stack.enter_context(
            TrainingRun(
                root_dir,
                agent,
                metrics=(),
                settings=settings,
                intervals=Intervals(checkpoint=checkpoint_interval, summary=summary_interval, evaluation=eval_interval),
                before_checkpoint=_nothing,
                evaluation=evaluation,
                train_steps_per_call=train_steps_per_call,
                last_step=last_step,
                progress=progress,
            )
        )
        dataset = buffer.as_dataset(
            sample_batch_size,
            agent.train_sequence_length,
            seed=chosen_seed,
            start=run.train_step,
            within_episodes=within_episodes,
        )
        if preprocess is not None:
            make = preprocess
            dataset = dataset.map(lambda experience, info: (make(experience), info))
        run.evaluate_if_due()
        run.train(iter(dataset.prefetch(2)), last_step)
        return run.finish()


def _nothing() -> None:
    pass
