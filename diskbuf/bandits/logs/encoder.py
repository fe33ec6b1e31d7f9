"""The encodings that a store records, for new rows: what is needed to act by a policy that was trained on an import."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from diskbuf.bandits.log_reader import Log, LogReader
from diskbuf.bandits.logs.encodings import Label
from diskbuf.bandits.logs.record import LogRecord
from diskbuf.errors import OptionError, SpecError


class LogEncoder:
    """Makes contexts of rows, and labels of arms, as the import of a log did.

        >>> import tempfile
        >>> from diskbuf.bandits.logs.columns import LogColumns
        >>> from diskbuf.bandits.logs.importing import import_log
        >>> rows = {"age": [31, 54], "country": ["fr", "de"], "action": ["news", "film"], "reward": [0, 1]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = import_log(rows, f"{folder}/log.zarr", LogColumns(context=["age", "country"]))
        ...     encoder = LogEncoder(f"{folder}/log.zarr")
        >>> encoder.context({"age": [40], "country": ["fr"]})
        array([[40.,  0.,  1.]], dtype=float32)
        >>> encoder.labels_of(np.array([1, 0])), encoder.actions_of(["news"])
        (['news', 'film'], array([1], dtype=int32))

    Args:
        store: A log that was imported, or its path.

    Raises:
        OptionError: If it wasn't imported.
        StoreError: If there is no store, or it can't be opened.
    """

    def __init__(self, store: Log) -> None:
        with LogReader(store) as log:
            record = LogRecord.of(log.buffer.metadata)
        if record is None:
            raise OptionError(f"store must be one that import_log made, got {store!r}, which records no encodings.")
        self._record = record

    @property
    def columns(self) -> tuple[str, ...]:
        """The context columns, in the order of the vector."""
        return tuple(self._record.columns.context)

    @property
    def slices(self) -> dict[str, tuple[int, int]]:
        """Where each context column is in the vector: where it starts, and where it stops, exclusive."""
        return self._record.slices()

    @property
    def labels(self) -> list[Label]:
        """[K] labels of the arms, in order; the arms' numbers where actions were numbers."""
        if self._record.labels is None:
            return list(range(self._record.num_actions))
        return list(self._record.labels)

    def context(self, rows: Mapping[str, Sequence[Any]]) -> npt.NDArray[np.float32]:
        """Returns contexts [N, d] for a policy.

        Args:
            rows: For each context column N values, as they were in the log.

        Raises:
            OptionError: If a column isn't there.
            SpecError: If a value has no place in the recorded encoding.
        """
        if not isinstance(rows, Mapping):
            raise OptionError(f"rows must be lists of values by column, got {rows!r:.200}.")
        missing = [name for name in self.columns if name not in rows]
        if missing:
            raise OptionError(f"rows must have the columns {list(self.columns)}, got none for {missing}.")
        try:
            columns = {name: pa.array(rows[name], from_pandas=True) for name in self.columns}
        except (pa.ArrowException, TypeError, OverflowError) as error:
            raise OptionError(f"rows must be lists of values by column, got {rows!r:.200} ({error}).") from error
        lengths = {len(column) for column in columns.values()}
        if len(lengths) > 1:
            raise OptionError(f"rows must have as many values in each column, got {sorted(lengths)}.")
        size = lengths.pop() if lengths else 1
        found = np.zeros((size, max(1, self._record.width)), np.float32)
        for (name, (start, stop)), encoding in zip(self.slices.items(), self._record.encodings, strict=True):
            out = found[:, start:stop]
            try:
                bad = encoding.encode(columns[name], out)
            except pa.ArrowException as error:
                raise SpecError(f"column {name!r} must hold what {encoding} knows, got {error}.", path=name) from error
            wrong = ~np.isfinite(out).all(axis=1) if bad is None else bad
            if wrong.any():
                row = int(wrong.argmax())
                got = columns[name][row].as_py()
                raise SpecError(
                    f"column {name!r} must hold what {encoding} knows, got {got!r} in row {row}.", path=name
                )
        return found

    def labels_of(self, actions: npt.ArrayLike) -> list[Label]:
        """Returns the labels [N] of arms [N].

        Raises:
            OptionError: If there is no such arm.
        """
        labels, numbers = self.labels, np.asarray(actions)
        if not numbers.size and numbers.ndim == 1:
            return []
        if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or (len(numbers) and not self._has(numbers)):
            raise OptionError(f"actions must be arms [N] from 0 to {len(labels) - 1}, got {actions!r:.200}.")
        return [labels[number] for number in numbers]

    def actions_of(self, labels: Sequence[Label]) -> npt.NDArray[np.int32]:
        """Returns the arms [N] of labels [N].

        Raises:
            OptionError: If a label is none of the arms'.
        """
        places = {label: place for place, label in enumerate(self.labels)}
        if isinstance(labels, str):
            raise OptionError(f"labels must be a list of them, got {labels!r}.")
        unknown = [label for label in labels if not isinstance(label, str | int) or label not in places]
        if unknown:
            raise OptionError(f"labels must be those of the arms, {self.labels[:20]}, got {unknown[0]!r}.")
        return np.array([places[label] for label in labels], np.int32)

    def _has(self, numbers: npt.NDArray[Any]) -> bool:
        return bool(numbers.min() >= 0 and numbers.max() < len(self.labels))
