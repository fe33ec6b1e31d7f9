"""What a store records of the log that it holds: which column became what, so that more can be added and taken out."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self

from diskbuf.bandits.logs.columns import LogColumns
from diskbuf.bandits.logs.encodings import Encoding, Label, encoding_from_json
from diskbuf.errors import StoreFormatError

KeyKind = Literal["int", "blake2b-16"]

_ENTRY = "bandit_log"
_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogRecord:
    """What a store records of its log.

    Attributes:
        columns: The columns of the first import.
        encodings: Of each context column.
        num_actions: K, the number of arms.
        labels: [K] labels of the arms; None where actions are the arms' numbers.
        key: What keys are: ints, or digests of text (BLAKE2b of 16 bytes, as two little-endian int64).
        is_sorted: Whether timestamps never go back; None without timestamps.
        imports: Of each import its `digest`, `rows` and `first_id`.
    """

    columns: LogColumns
    encodings: Sequence[Encoding]
    num_actions: int
    labels: Sequence[Label] | None
    key: KeyKind | None
    is_sorted: bool | None
    imports: Sequence[dict[str, Any]]

    @property
    def width(self) -> int:
        """The length d of the context vector."""
        return sum(encoding.width for encoding in self.encodings)

    def slices(self) -> dict[str, tuple[int, int]]:
        """Returns where each context column is in the vector: where it starts, and where it stops, exclusive."""
        found, start = {}, 0
        for name, encoding in zip(self.columns.context, self.encodings, strict=True):
            found[name] = (start, start + encoding.width)
            start += encoding.width
        return found

    def to_json(self) -> dict[str, Any]:
        """Returns it as the metadata of a store."""
        slices = self.slices()
        return {
            _ENTRY: {
                "version": _VERSION,
                "context": [
                    {"column": name, "start": slices[name][0], "stop": slices[name][1], "encoding": encoding.to_json()}
                    for name, encoding in zip(self.columns.context, self.encodings, strict=True)
                ],
                "columns": self.columns.of_roles(),
                "num_actions": self.num_actions,
                "labels": None if self.labels is None else list(self.labels),
                "key": self.key,
                "is_sorted": self.is_sorted,
                "imports": list(self.imports),
            }
        }

    @classmethod
    def of(cls, metadata: Any) -> Self | None:
        """Returns the record in a store's metadata; None where there is none.

        Raises:
            StoreFormatError: When this version can't read it.
        """
        if not isinstance(metadata, dict) or _ENTRY not in metadata:
            return None
        entry = metadata[_ENTRY]
        try:
            if entry["version"] != _VERSION:
                raise StoreFormatError(
                    f"the record of a bandit log must be of version {_VERSION}, got {entry['version']!r}. "
                    "Read it with a newer version of diskbuf.",
                    is_newer=entry["version"] > _VERSION,
                )
            roles = {"reward": None} | entry["columns"]
            return cls(
                columns=LogColumns(context=[column["column"] for column in entry["context"]], **roles),
                encodings=tuple(encoding_from_json(column["encoding"]) for column in entry["context"]),
                num_actions=entry["num_actions"],
                labels=entry["labels"],
                key=entry["key"],
                is_sorted=entry["is_sorted"],
                imports=tuple(entry["imports"]),
            )
        except (KeyError, TypeError) as error:
            raise StoreFormatError(
                f"the record of a bandit log must be whole, got {entry!r:.200} ({error!r})."
            ) from error
