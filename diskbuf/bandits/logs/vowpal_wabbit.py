"""Vowpal Wabbit's text format for contextual bandits, one decision to a line: `action:cost:probability | features`.

Described at https://github.com/VowpalWabbit/vowpal_wabbit/wiki/Input-format and .../Contextual-Bandit-algorithms. Read
are lines for `--cb`: among the actions, which count from 1, one has a cost and a probability. The reward is the cost
with its sign turned. A feature is `name` or `name:value`, in a namespace `|name` or `|name:scale`; its column here is
`namespace^name`, or the name alone in the namespace without one. What comes before the bar besides actions, a weight
or a tag, is refused, as are the several lines of a decision that `--cb_adf` takes.
"""

import io
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from diskbuf.bandits.logs.sources import Block, Kind, Malformed, RetryError, TextPart
from diskbuf.errors import OptionError

ACTION, REWARD, PROPENSITY = "action", "reward", "propensity"
_MOST_FEATURES = 4096
_ROWS = 8_192


class VowpalWabbitPart(TextPart):
    """A file of Vowpal Wabbit's format.

    Its columns are `action` (from 1 on), `reward`, `propensity`, and one for each feature.

    Args:
        name: For messages.
        open_bytes: Opens it anew.
    """

    def __init__(self, name: str, open_bytes: Callable[[], Any]) -> None:
        self.name = name
        self._open = open_bytes
        self._features: list[str] | None = None

    def features(self) -> list[str]:
        """Returns the names of all features, sorted, from a reading of the whole file.

        Raises:
            OptionError: When they are too many for a column each.
        """
        if self._features is None:
            found: set[str] = set()
            for _, line in self._lines():
                try:
                    found.update(_parsed(line)[3])
                except ValueError:
                    continue  # told of when rows are read
                if len(found) > _MOST_FEATURES:
                    raise OptionError(
                        f"{self.name} must have at most {_MOST_FEATURES} features for a column each, got more. "
                        "Name those to take: LogColumns(context=[...])."
                    )
            self._features = sorted(found)
        return self._features

    def schema(self) -> dict[str, pa.DataType]:
        """Returns the types of the columns."""
        types = {ACTION: pa.int64(), REWARD: pa.float64(), PROPENSITY: pa.float64()}
        return types | dict.fromkeys(self.features(), pa.float32())

    def blocks(self, kinds: Mapping[str, Kind]) -> Iterator[Block]:  # noqa: ARG002 - what each part takes
        """Refuses to: this format is only read line by line."""
        raise RetryError

    def careful_blocks(self, kinds: Mapping[str, Kind], malformed: Malformed) -> Iterator[Block]:
        """Yields the rows, and tells of lines that can't be read."""
        features = [name for name in kinds if name not in (ACTION, REWARD, PROPENSITY)]
        places = {name: place for place, name in enumerate(features)}
        labels: list[tuple[int, float, float]] = []
        lines: list[int] = []
        matrix = np.zeros((_ROWS, len(features)), np.float32)
        for number, line in self._lines():
            try:
                action, cost, probability, values = _parsed(line)
            except ValueError as error:
                malformed.tell(f"line {number} of {self.name} must {error}, got {line[:100]!r}")
                continue
            for name, value in values.items():
                if name in places:
                    matrix[len(lines), places[name]] = value
            labels.append((action, -cost, probability))
            lines.append(number)
            if len(lines) == _ROWS:
                yield self._block(kinds, labels, matrix, places, lines)
                labels, lines = [], []
                matrix[:] = 0.0
        if lines:
            yield self._block(kinds, labels, matrix, places, lines)

    def _block(
        self,
        kinds: Mapping[str, Kind],
        labels: list[tuple[int, float, float]],
        matrix: npt.NDArray[np.float32],
        places: Mapping[str, int],
        lines: list[int],
    ) -> Block:
        actions, rewards, propensities = zip(*labels, strict=True)
        known = {ACTION: pa.array(actions), REWARD: pa.array(rewards), PROPENSITY: pa.array(propensities)}
        columns = {
            name: known[name] if name in known else pa.array(matrix[: len(lines), places[name]].copy())
            for name in kinds
        }
        return Block(columns, len(lines), self.name, np.array(lines), "line")

    def _lines(self) -> Iterator[tuple[int, str]]:
        """The numbers and texts of lines that aren't blank."""
        with self._open() as file:
            for number, line in enumerate(io.TextIOWrapper(file, "utf-8", errors="surrogateescape"), start=1):
                if line.strip():
                    yield number, line.rstrip("\n")


def _parsed(line: str) -> tuple[int, float, float, dict[str, float]]:
    """Action, cost, probability and features of a line; a ValueError says what it must."""
    before, bar, after = line.partition("|")
    if not bar:
        raise ValueError("have a bar before its features")
    words = before.split()
    if words and words[0] == "shared":
        raise ValueError("be a decision of its own (several lines for one, as --cb_adf takes, aren't read)")
    chosen: list[tuple[int, float, float]] = []
    for word in words:
        parts = word.split(":")
        if len(parts) == 1 and parts[0].isdecimal():
            continue  # an action that could have been chosen
        if len(parts) != 3:
            raise ValueError("have words like action:cost:probability before the bar")
        try:
            chosen.append((int(parts[0]), float(parts[1]), float(parts[2])))
        except ValueError:
            raise ValueError("have numbers in action:cost:probability") from None
    if len(chosen) != 1:
        raise ValueError(f"have one action with a cost, not {len(chosen)},")
    if chosen[0][0] < 1:
        raise ValueError("have actions from 1 on")
    return *chosen[0], _features_of(after)


def _features_of(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for space in text.split("|"):
        words = space.split()
        prefix, scale = "", 1.0
        if words and not space[:1].isspace():
            name, _, factor = words.pop(0).partition(":")
            prefix, scale = f"{name}^", _number(factor)
        for word in words:
            name, _, value = word.partition(":")
            found[prefix + name] = found.get(prefix + name, 0.0) + scale * _number(value)
    return found


def _number(text: str) -> float:
    """The number behind a colon, 1 where there is none."""
    try:
        number = float(text) if text else 1.0
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("have finite numbers as values of features")
    return number
