"""What a training has told so far, in a file that outlives its process."""

import json
from pathlib import Path
from typing import Any

from diskbuf.store import files


class History:
    """Losses and average returns by train step, each a line of JSON that is appended as it is told.

    Args:
        path: The file; made when it isn't there.
        train_step: Where the training goes on. What was told of later steps is dropped: they are taken anew.

    Attributes:
        losses: (train step, loss).
        returns: (train step, average return).

    Raises:
        OSError: When the file can't be read or written.
    """

    def __init__(self, path: Path, *, train_step: int) -> None:
        self.losses: list[tuple[int, float]] = []
        self.returns: list[tuple[int, float]] = []
        kept = [record for record in _records(path) if record["train_step"] <= train_step]
        for record in kept:
            self._take(record)
        files.replace_file(path, b"".join(map(_line, kept)), sync=False)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - until `close`

    def add_loss(self, train_step: int, loss: float) -> None:
        """Tells the loss of a train step, once."""
        if not self.losses or self.losses[-1][0] != train_step:
            self._add({"train_step": train_step, "loss": loss})

    def add_return(self, train_step: int, average_return: float) -> None:
        """Tells what the policy earned after a train step."""
        self._add({"train_step": train_step, "average_return": average_return})

    def _add(self, record: dict[str, Any]) -> None:
        self._file.write(_line(record))
        self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        if "loss" in record:
            self.losses.append((record["train_step"], record["loss"]))
        else:
            self.returns.append((record["train_step"], record["average_return"]))

    def close(self) -> None:
        """Closes the file; closing twice is fine."""
        self._file.close()


def _records(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines[:-1]]  # behind the last line break is nothing, or a torn line


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"
