"""What trainings share: a folder with checkpoints, summaries, and the settings that a restart must not change."""

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from diskbuf import kept_settings
from diskbuf.errors import OptionError
from diskbuf.readers.requests import count, seed_of
from diskbuf.training.history import History

if TYPE_CHECKING:
    import tensorflow as tf

    from diskbuf.metrics import Metric

_SETTINGS = "training.json"
_HISTORY = "history.jsonl"
_KEPT = 5
_FIRST_SAVE_SECONDS = 5.0  # of training, or a kill of a short one would cost all of it
_SAVE_SECONDS = 60.0
_SAVE_SHARE = 0.02  # of the time, at most, goes to checkpoints that are made because of the time
_CALL_SECONDS = (0.2, 0.8)  # shorter calls get more train steps, longer ones fewer: Ctrl-C waits for a call


class TrainResult(NamedTuple):
    """How a training ended.

    Attributes:
        train_step: Train steps that the agent has taken, those before a restart included.
        loss: The last one's loss; NaN when none was taken because all were before.
        returns: (train step, average return) of all evaluations, those before a restart included.
        losses: (train step, loss) of the train steps at the end of each summary interval, likewise.
    """

    train_step: int
    loss: float
    returns: list[tuple[int, float]]
    losses: list[tuple[int, float]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intervals:
    """After how many train steps something happens; None for never.

    Attributes:
        checkpoint: A checkpoint is written; after some seconds too, where so many train steps take longer.
        summary: Loss and metrics go to TensorBoard and the log, the loss to the result too.
        evaluation: The policy is evaluated.
    """

    checkpoint: int | None
    summary: int | None
    evaluation: int | None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                count(f"{name}_interval", value)

    def left(self, step: int) -> int | None:
        """Train steps from `step` until the next after which something happens; None when nothing ever does."""
        return min((value - step % value for value in vars(self).values() if value is not None), default=None)


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
        train_steps_per_call: Train steps that are compiled into one call, at most.
        last_step: Train steps in all, for the progress bar.
        progress: Whether to show one on standard error.

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
        train_steps_per_call: int,
        last_step: int,
        progress: bool,
    ) -> None:
        import tensorflow as tf

        self.folder = Path(root_dir)
        self.agent = agent
        self.metrics = tuple(metrics)
        self.intervals = intervals
        self.loss_info: Any = None
        self._steps_per_call = count("train_steps_per_call", train_steps_per_call)
        self._steps_now = 1
        self._save_again_at: float | None = None
        self._is_torn = False  # a train step was cut off, so the agent's variables are no state of its own
        self._take_steps = compiled_train_steps(agent)
        self._before_checkpoint = before_checkpoint
        self._evaluation = evaluation
        with contextlib.ExitStack() as closing:
            closing.enter_context(kept_settings.one_at_a_time(self.folder))
            self._closing = closing
            kept_settings.keep(self.folder / _SETTINGS, settings)
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
            self._history = History(self.folder / _HISTORY, train_step=self.train_step)
            self._closing.callback(self._history.close)
            self._train_writer = self._writer("train")
            self._eval_writer = self._writer("eval") if evaluation is not None else None
            self._bar = self._closing.enter_context(_bar(self.train_step, last_step)) if progress else None
            self._closing = closing.pop_all()

    def _writer(self, name: str) -> "tf.summary.SummaryWriter":
        import tensorflow as tf

        writer = tf.summary.create_file_writer(str(self.folder / name))
        self._closing.callback(writer.close)
        return writer

    @property
    def train_step(self) -> int:
        """Train steps taken."""
        return int(self.agent.train_step_counter)

    def train(self, batches: Iterator[tuple[Any, Any]], last_step: int) -> None:
        """Takes train steps up to `last_step`, each on the next batch, and does what is due on the way.

        Args:
            batches: An iterator of a `tf.data.Dataset` of (experience, info).
            last_step: Counted from the beginning of the training.
        """
        while (step := self.train_step) < last_step:
            steps = min(self._steps_now, last_step - step, self.intervals.left(step) or last_step)
            started = time.monotonic()
            with _interrupt_waits():
                self._is_torn = True
                if self._steps_per_call == 1:
                    experience, _ = next(batches)
                    self.loss_info = self.agent.train(experience)
                else:
                    self.loss_info = self._take_steps(batches, np.int64(steps))
                self._is_torn = False
            taken = time.monotonic() - started
            if taken < _CALL_SECONDS[0]:
                self._steps_now = min(self._steps_per_call, 2 * self._steps_now)
            elif taken > _CALL_SECONDS[1]:
                self._steps_now = max(1, self._steps_now // 2)
            self._do_what_is_due()

    def _do_what_is_due(self) -> None:
        """A checkpoint goes before what is told, so that what is told was saved.

        Only the history has the loss before, because a restart from that checkpoint can't tell it any more.
        """
        step = self.train_step
        if _is_due(step, self.intervals.summary):
            self._history.add_loss(step, float(self.loss_info.loss))
        if _is_due(step, self.intervals.checkpoint) or self._is_long_since_saved():
            self.save()
        if _is_due(step, self.intervals.summary):
            self._summarize(step)
        self.evaluate_if_due()
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def _is_long_since_saved(self) -> bool:
        """Whether a kill would cost too much time; counted from the first train step on, which takes its own."""
        if self.intervals.checkpoint is None:
            return False
        now = time.monotonic()
        if self._save_again_at is None:
            self._save_again_at = now + _FIRST_SAVE_SECONDS
        return now >= self._save_again_at

    def save(self) -> None:
        """Writes a checkpoint, unless there is one of this train step."""
        step = self.train_step
        if self._saved_at != step:
            started = time.monotonic()
            self._before_checkpoint()
            self._manager.save(checkpoint_number=step)
            self._saved_at = step
            now = time.monotonic()
            self._save_again_at = now + max(_SAVE_SECONDS, (now - started) / _SAVE_SHARE)

    def _summarize(self, step: int) -> None:
        import tensorflow as tf

        from diskbuf.metrics import export_metrics

        export_metrics(step, self.metrics, self.loss_info)
        with self._train_writer.as_default(step=step):
            tf.summary.scalar("Losses/loss", self.loss_info.loss)
            for metric in self.metrics:
                metric.tf_summaries(train_step=step)

        if self._bar is not None:
            self._bar.set_postfix(self._latest(), refresh=False)

    def _latest(self) -> dict[str, str]:
        """The newest loss and return, as the progress bar shows them."""
        told = {"loss": self._history.losses, "return": self._history.returns}
        return {name: f"{values[-1][1]:.3g}" for name, values in told.items() if values}

    def evaluate_if_due(self) -> None:
        """Evaluates the policy where the interval says so; at the beginning, where a kill came between."""
        if self.train_step and _is_due(self.train_step, self.intervals.evaluation):
            self.evaluate()

    def evaluate(self) -> None:
        """Evaluates the policy, unless that was done at this train step."""
        step, known = self.train_step, self._history.returns
        if self._evaluation is None or self._eval_writer is None or (known and known[-1][0] == step):
            return
        import tensorflow as tf

        earned = self._evaluation()
        self._history.add_return(step, earned)
        with self._eval_writer.as_default(step=step):
            tf.summary.scalar("Metrics/AverageReturn", earned)

    def finish(self) -> TrainResult:
        """Writes the last checkpoint and evaluates once more; returns how it ended."""
        self.save()
        self.evaluate()
        loss = np.nan if self.loss_info is None else float(self.loss_info.loss)
        return TrainResult(self.train_step, loss, self._history.returns, self._history.losses)

    def close(self) -> None:
        """Closes summaries, history and progress bar; closing twice is fine."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes it; after Ctrl-C with a checkpoint of the train steps that were taken."""
        try:
            if kind is not None and issubclass(kind, KeyboardInterrupt) and self.train_step and not self._is_torn:
                self.save()
        finally:
            self.close()


@contextlib.contextmanager
def _interrupt_waits() -> Iterator[None]:
    """Lets a first Ctrl-C wait for the end of the block; a second one doesn't. Other handlers than Python's stay."""
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    is_interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            signal.default_int_handler(number, frame)
        is_interrupted = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if is_interrupted:
        raise KeyboardInterrupt


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


def compiled_train_steps(agent: Any) -> Callable[[Iterator[tuple[Any, Any]], Any], Any]:
    """Returns a function that takes some train steps and answers what the last one does."""
    import tensorflow as tf

    def take_steps(batches: Iterator[tuple[Any, Any]], steps: Any) -> Any:
        def take_one(taken: Any) -> Any:
            agent.train(next(batches)[0])
            return taken + 1

        tf.while_loop(lambda taken: taken < steps - 1, take_one, [tf.constant(0, tf.int64)], parallel_iterations=1)
        return agent.train(next(batches)[0])

    compiled: Callable[[Iterator[tuple[Any, Any]], Any], Any] = tf.function(take_steps, autograph=False)
    return compiled


def _bar(train_step: int, last_step: int) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=last_step, initial=train_step, unit=" train steps")
