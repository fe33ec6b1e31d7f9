"""What a log is read from: parts, such as files and tables, that yield their rows block by block.

Text is read twice as carefully when it has to be: Arrow reads fast and says little of what is wrong, so what it refuses
is read once more line by line, which names the line.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from diskbuf.errors import SpecError

Kind = Literal["number", "real", "integer", "text", "time", "any"]

BATCH_ROWS = 32_768
UNREADABLE = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError)  # and not that memory was short


class Block(NamedTuple):
    """Rows that were read together.

    Attributes:
        columns: Arrow arrays [N] by name.
        rows: N.
        name: Where they come from.
        numbers: [N] int64, the number of each row's line or row in there, from 1.
        unit: What these numbers count, "line" or "row".
    """

    columns: dict[str, pa.Array]
    rows: int
    name: str
    numbers: npt.NDArray[np.int64]
    unit: str

    def where(self, row: int) -> str:
        """Returns where a row comes from, as a message says it."""
        return f"{self.unit} {self.numbers[row]} of {self.name}"


class RetryError(Exception):
    """Something is wrong in a text that was read fast: read it carefully, to say on which line."""


class Malformed:
    """What becomes of lines that can't be read: an error, or a count and the first few.

    Args:
        strict: Whether the first one is an error.
        most: How many are kept.

    Attributes:
        count: How many there were.
        examples: The first few, each as its message.
    """

    def __init__(self, *, strict: bool, most: int = 5) -> None:
        self._strict, self._most = strict, most
        self.count = 0
        self.examples: list[str] = []

    @property
    def is_strict(self) -> bool:
        """Whether the first one is an error."""
        return self._strict

    def tell(self, problem: str) -> None:
        """Takes one.

        Raises:
            SpecError: When the first one is an error.
        """
        if self._strict:
            raise SpecError(f"{problem}. Nothing was imported. Mend it, or leave such rows out with strict=False.")
        self.count += 1
        if len(self.examples) < self._most:
            self.examples.append(problem)

    def copy(self) -> "Malformed":
        """Returns one that counts on by itself."""
        other = Malformed(strict=self._strict, most=self._most)
        other.count, other.examples = self.count, list(self.examples)
        return other


class Part(ABC):
    """One file or table of a log.

    Attributes:
        name: For messages.
    """

    name: str

    @abstractmethod
    def schema(self) -> dict[str, pa.DataType]:
        """Returns the types of the columns, those of text as its first rows look."""

    @abstractmethod
    def blocks(self, kinds: Mapping[str, Kind]) -> Iterator[Block]:
        """Yields the rows.

        Args:
            kinds: What the columns to read are taken for, by name.

        Raises:
            pa.ArrowInvalid: When something can't be read.
        """


class TextPart(Part):
    """A part in text, of which `blocks` may refuse something and `careful_blocks` says what and where."""

    @abstractmethod
    def careful_blocks(self, kinds: Mapping[str, Kind], malformed: Malformed) -> Iterator[Block]:
        """Yields the rows, and tells of those that can't be read.

        Args:
            kinds: As for `blocks`.
            malformed: Who is told.

        Raises:
            SpecError: When there is one, and `malformed` is strict.
        """


class ArrowPart(Part):
    """A table, or a file that Arrow knows the types of.

    Args:
        name: For messages.
        types: Its schema.
        batches: From the names of the columns to record batches with at least these.
        is_repeatable: Whether a second reading of few columns gives them again, at little cost.

    Raises:
        SpecError: When two columns have one name.

    Attributes:
        is_repeatable: As given.
    """

    def __init__(
        self,
        name: str,
        types: pa.Schema,
        batches: Callable[[list[str]], Iterator[pa.RecordBatch]],
        *,
        is_repeatable: bool = False,
    ) -> None:
        twice = sorted(column for column in set(types.names) if types.names.count(column) > 1)
        if twice:
            raise SpecError(f"{name} must name each column once, got {twice[0]!r} more often. Rename or leave it out.")
        self.name = name
        self.is_repeatable = is_repeatable
        self._schema, self._batches = types, batches

    def schema(self) -> dict[str, pa.DataType]:
        """Returns the types of the columns."""
        return {field.name: field.type for field in self._schema}

    def blocks(self, kinds: Mapping[str, Kind]) -> Iterator[Block]:
        """Yields the rows; where that is known to be safe, the next ones are read meanwhile."""
        return _read_ahead(self._blocks(kinds)) if self.is_repeatable else self._blocks(kinds)

    def _blocks(self, kinds: Mapping[str, Kind]) -> Iterator[Block]:
        first = 1
        for whole in self._batches(list(kinds)):
            for start in range(0, whole.num_rows, BATCH_ROWS):
                batch = whole.slice(start, BATCH_ROWS)
                numbers = np.arange(first, first + batch.num_rows)
                columns = {name: batch.column(batch.schema.get_field_index(name)) for name in kinds}
                yield Block(columns, batch.num_rows, self.name, numbers, "row")
                first += batch.num_rows


def _read_ahead(blocks: Iterator[Block]) -> Iterator[Block]:
    """The same blocks; a thread reads the next one while one is worked on."""
    with contextlib.closing(cast(Any, blocks)), ThreadPoolExecutor(1, thread_name_prefix="diskbuf-log") as thread:
        coming = thread.submit(next, blocks, None)
        while (block := coming.result()) is not None:
            coming = thread.submit(next, blocks, None)
            yield block
