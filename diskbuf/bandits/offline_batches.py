"""The batches of a pass over a log by their number, in the order of the log or shuffled."""

import operator

import numpy as np

from diskbuf import plan
from diskbuf.bandits.log_reader import LogReader
from diskbuf.errors import OptionError, SpecError
from diskbuf.readers.requests import count
from diskbuf.trajectories import StepType, Trajectory
from diskbuf.tree import Structure


class OfflineBatches:
    """Batch number n of `num_epochs` passes over the rows of a log: the same whenever and wherever it is asked for.

    Args:
        log: The rows.
        batch_size: Rows of a batch; the last one of a pass may have fewer, and so has one with rows that are left out.
        num_epochs: Passes.
        shuffle: Whether each pass has an order of its own, drawn from the seed; otherwise it is that of the log.
        seed: Of the orders.
        invalid: "reject" or "drop", what becomes of rows whose reward or context isn't finite.

    Raises:
        OptionError: If an argument is outside its rule, or the log is empty.
    """

    def __init__(
        self, log: LogReader, *, batch_size: int, num_epochs: int, shuffle: bool, seed: int, invalid: str
    ) -> None:
        if invalid not in ("reject", "drop"):
            raise OptionError(f"invalid must be 'reject' or 'drop', got {invalid!r}.")
        if not log.num_rows:
            raise OptionError(f"the log must have rows to train on, got none in {log}.")
        self._log = log
        self._batch_size = count("batch_size", batch_size)
        self._epochs = count("num_epochs", num_epochs)
        self._shuffle = shuffle
        self._seed = operator.index(seed)
        self._invalid = invalid
        self._lanes = log.buffer.batch_size

    @property
    def per_epoch(self) -> int:
        """Batches of a pass."""
        return -(-self._log.num_rows // self._batch_size)

    def __len__(self) -> int:
        return self._epochs * self.per_epoch

    def __getitem__(self, number: int) -> Trajectory | None:
        """Returns a batch, leaves [1, N, *shape], or None if all its rows are left out.

        Raises:
            SpecError: If a reward or context isn't finite and such rows are to be refused.
        """
        epoch, place = divmod(number, self.per_epoch)
        rows = np.arange(place * self._batch_size, min((place + 1) * self._batch_size, self._log.num_rows))
        if self._shuffle:
            rows = plan.permuted(rows, self._log.num_rows, seed=plan.derive_seed(self._seed, epoch))
        ids, lanes = self._log.first_id + rows // self._lanes, rows % self._lanes
        batch: Trajectory = self._log.buffer.read(ids[None], lanes[None])
        kept = np.asarray(batch.step_type[0] != StepType.LAST)
        structure = Structure(batch)
        for path, leaf in zip(structure.paths, structure.flatten(batch), strict=True):
            if path.partition("/")[0] not in ("reward", "observation") or leaf.dtype.kind != "f":
                continue
            fits = np.isfinite(leaf[0]).reshape(len(rows), -1).all(axis=1)
            wrong = kept & ~fits
            if wrong.any() and self._invalid == "reject":
                at = int(wrong.argmax())
                raise SpecError(
                    f"leaf {path!r} must be finite, got {leaf[0, at]} in row {ids[at]} of lane {lanes[at]}. "
                    "Leave such rows out with invalid='drop'.",
                    path=path,
                )
            kept &= fits
        if kept.all():
            return batch
        return structure.unflatten([leaf[:, kept] for leaf in structure.flatten(batch)]) if kept.any() else None
