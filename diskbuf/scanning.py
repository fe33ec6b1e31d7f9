"""Reading chosen columns of a buffer once, in order of their ids, a few MiB at a time."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from numpy.typing import NDArray

from diskbuf.errors import OptionError

if TYPE_CHECKING:
    from diskbuf.replay_buffers.uniform import UniformReplayBuffer

_BLOCK_BYTES = 2**22


class Block(NamedTuple):
    """Consecutive steps of all lanes.

    Attributes:
        first_id: Id of the first.
        columns: For each chosen leaf [B, T, *shape], by its path.
    """

    first_id: int
    columns: dict[str, NDArray[Any]]

    @property
    def next_id(self) -> int:
        """Id behind the last step."""
        steps: int = next(iter(self.columns.values())).shape[1]
        return self.first_id + steps


def scan(
    buffer: "UniformReplayBuffer",
    columns: Sequence[str] | None = None,
    *,
    first_id: int | None = None,
    next_id: int | None = None,
    block_bytes: int = _BLOCK_BYTES,
) -> Iterator[Block]:
    """Reads chosen leaves from the oldest step to the newest, and touches the files of no other one.

    Each step comes once; blocks are cut where it suits reading. Steps that a writer evicts before they were read are
    left out, so a block may begin behind the end of the one before.

        >>> import numpy as np
        >>> from diskbuf import UniformReplayBuffer, specs
        >>> spec = {"action": specs.ArraySpec([], "int64"), "frame": specs.ArraySpec([84, 84], "uint8")}
        >>> with UniformReplayBuffer(spec, 2) as buffer:
        ...     for t in range(5):
        ...         buffer.add_batch({"action": np.full(2, t), "frame": np.zeros([2, 84, 84], "uint8")})
        ...     blocks = list(scan(buffer, ["action"], first_id=2))
        >>> [block.columns["action"].tolist() for block in blocks]
        [[[2, 3, 4], [2, 3, 4]]]

    Args:
        buffer: A buffer, open for reading or writing.
        columns: Paths of leaves; None for all.
        first_id: Where to begin; None for the start of the window, at which it begins at the earliest.
        next_id: Where to stop, exclusive; None for the end of the window at the call. Later steps aren't read.
        block_bytes: Largest size of a block, all chosen leaves together; one step of all lanes it always has.

    Yields:
        Blocks, ascending.

    Raises:
        OptionError: When there is no such leaf, or block_bytes isn't positive.
        StoreCorruptError: When a chunk file is missing, short or has rotten.
        ClosedError: After the buffer's `close`.
    """
    store = buffer._opened()
    layouts = [column.layout for column in store.columns]
    paths = [layout.path for layout in layouts]
    chosen = paths if columns is None else list(columns)
    unknown = [path for path in chosen if path not in paths]
    if unknown or not chosen:
        raise OptionError(f"columns must be one or more of {', '.join(map(repr, paths))}, got {unknown or chosen!r}.")
    if block_bytes < 1:
        raise OptionError(f"block_bytes must be positive, got {block_bytes!r}.")
    numbers = [paths.index(path) for path in chosen]
    begin, end = store.window()
    begin = begin if first_id is None else max(begin, first_id)
    end = end if next_id is None else min(end, next_id)
    return _blocks(buffer, chosen, numbers, begin, end, block_bytes)


def _blocks(
    buffer: "UniformReplayBuffer", chosen: list[str], numbers: list[int], begin: int, end: int, block_bytes: int
) -> Iterator[Block]:
    store = buffer._opened()
    layouts = [store.columns[number].layout for number in numbers]
    most = max(1, block_bytes // max(1, sum(layout.row_bytes for layout in layouts)))
    chunk_rows = min(layout.chunk_rows for layout in layouts)
    while begin < end:
        # blocks end where chunks do: reading over an end costs a second file of each column
        stop = min(end, begin + most, (begin // chunk_rows + 1) * chunk_rows)
        rows = buffer._opened().read_columns(numbers, begin, stop)
        if rows is None:
            begin = max(begin + 1, buffer._opened().window()[0])
            continue
        buffer._opened().let_pages_go(numbers, begin, stop)
        yield Block(stop - rows[0].shape[1], dict(zip(chosen, rows, strict=True)))
        begin = stop
