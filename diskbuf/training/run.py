"""What trainings share: a folder with checkpoints, summaries, and the settings that a restart must not change."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from diskbuf.errors import OptionError
from diskbuf.readers.requests import count, seed_of
from diskbuf.store import files

if TYPE_CHECKING:
    import tensorflow as tf

    from diskbuf.metrics import Metric

_SETTINGS = "training.json"
_KEPT = 5


class TrainResult(NamedTuple):
    """How a training ended.

    Attributes:
        train_step: Train steps that the agent has taken, those before a restart included.
        loss: The last one's loss; NaN when none was taken because all were before.
        returns: (train step, average return) of the evaluations since the last start.
    """

    train_step: int
    loss: float
    returns: list[tuple[int, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intervals:
    """After how many train steps something happens; None for never.

    Attributes:
        checkpoint: A checkpoint is written.
        summary: Loss and metrics go to TensorBoard and the log.
        evaluation: The policy is evaluated.
    """

    checkpoint: int | None
    summary: int | None
    evaluation: int | None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                count(f"{name}_interval", value)


class TrainingRun:
    """A training in a folder: begins it, or goes on from its last checkpoint.

    Args:
        root_dir: The folder; made when it isn't there.
        agent: What is trained; a `tf.Module` with `train_step_counter`.
        metrics: What is saved and told with it.
        settings: What must be the same after a restart, JSON values by name; decides which batch a train step gets.
        intervals: When what happens.
        before_checkpoint: Called before each checkpoint, so that nothing it counts on is lost when it isn't.
        evaluation: Returns the average return of the policy; None evaluates never.

    Raises:
        OptionError: When the folder holds a training of other settings, or of another agent.
    """

    def __init__(
        self,
        root_dir: str | os.PathLike[str],
        agent: Any,
        *,
        metrics: "Iterable[Metric]",
        settings: dict[str, Any],
        intervals: Intervals,
        before_checkpoint: Callable[[], object],
        evaluation: Callable[[], float] | None,
    ) -> None:
        import tensorflow as tf

        self.folder = Path(root_dir)
        self.agent = agent
        self.metrics = tuple(metrics)
        self.intervals = intervals
        self.returns: list[tuple[int, float]] = []
        self.loss_info: Any = None
        self._before_checkpoint = before_checkpoint
        self._evaluation = evaluation
        self.folder.mkdir(parents=True, exist_ok=True)
        self._settle(settings)
        watched = {f"metric_{number}": metric for number, metric in enumerate(self.metrics)}
        checkpoint = tf.train.Checkpoint(agent=agent, **watched)
        self._manager = tf.train.CheckpointManager(checkpoint, str(self.folder / "checkpoints"), max_to_keep=_KEPT)
        try:
            self._manager.restore_or_initialize()
        except ValueError as error:
            raise OptionError(
                f"agent must be made as the one whose checkpoint is {self._manager.latest_checkpoint}, "
                f"but its variables don't fit: {error}. Make it so, or use another root_dir."
            ) from error
        self._saved_at = self.train_step if self._manager.latest_checkpoint else None
        self._writers = contextlib.ExitStack()
        self._train_writer = self._writer("train")
        self._eval_writer = self._writer("eval") if evaluation is not None else None

    def _settle(self, settings: dict[str, Any]) -> None:
        """Writes the settings down, or compares them with those of the training that is there."""
        path = self.folder / _SETTINGS
        try:
            known = json.loads(path.read_text())
        except FileNotFoundError:
            files.replace_file(path, json.dumps(settings, indent=2).encode(), sync=True)
            return
        except ValueError as error:
            raise OptionError(
                f"{path} must hold the settings of a training as JSON, but doesn't. Remove it."
            ) from error
        for name, value in settings.items():
            if known.get(name) != value:
                raise OptionError(
                    f"{name} must be {known.get(name)!r} to go on with the training in {self.folder}, got {value!r}. "
                    "Use that, or another root_dir."
                )

    def _writer(self, name: str) -> "tf.summary.SummaryWriter":
        import tensorflow as tf

        writer = tf.summary.create_file_writer(str(self.folder / name))
        self._writers.callback(writer.close)
        return writer

    @property
    def train_step(self) -> int:
        """Train steps taken."""
        return int(self.agent.train_step_counter)

    def train(self, batches: Iterator[tuple[Any, Any]]) -> None:
        """Takes one train step on the next batch, and does what is due after it.

        A checkpoint goes first, so that what is told of later was saved.
        """
        experience, _ = next(batches)
        self.loss_info = self.agent.train(experience)
        step = self.train_step
        if _is_due(step, self.intervals.checkpoint):
            self.save()
        if _is_due(step, self.intervals.summary):
            self._summarize(step)
        if self._evaluation is not None and _is_due(step, self.intervals.evaluation):
            self.evaluate()

    def save(self) -> None:
        """Writes a checkpoint, unless there is one of this train step."""
        step = self.train_step
        if self._saved_at != step:
            self._before_checkpoint()
            self._manager.save(checkpoint_number=step)
            self._saved_at = step

    def _summarize(self, step: int) -> None:
        import tensorflow as tf

        from diskbuf.metrics import export_metrics

        export_metrics(step, self.metrics, self.loss_info)
        with self._train_writer.as_default(step=step):
            tf.summary.scalar("Losses/loss", self.loss_info.loss)
            for metric in self.metrics:
                metric.tf_summaries(train_step=step)

    def evaluate(self) -> None:
        """Evaluates the policy, unless that was done at this train step."""
        step = self.train_step
        if self._evaluation is None or self._eval_writer is None or (self.returns and self.returns[-1][0] == step):
            return
        import tensorflow as tf

        self.returns.append((step, self._evaluation()))
        with self._eval_writer.as_default(step=step):
            tf.summary.scalar("Metrics/AverageReturn", self.returns[-1][1])

    def finish(self) -> TrainResult:
        """Writes the last checkpoint and evaluates once more; returns how it ended."""
        self.save()
        self.evaluate()
        loss = np.nan if self.loss_info is None else float(self.loss_info.loss)
        return TrainResult(self.train_step, loss, self.returns)

    def close(self) -> None:
        """Closes the summaries; closing twice is fine."""
        self._writers.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def settled_seed(seed: Any) -> int:
    """Returns a seed that a restart can be given too.

    Raises:
        OptionError: When it isn't an int.
    """
    found = seed_of(seed)
    if found is None:
        raise OptionError("seed must be an int, so that a restart goes on with the same batches, got None.")
    return found


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
