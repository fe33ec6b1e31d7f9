"""Whether two stores hold the same, and a checksum that only depends on what a store holds."""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diskbuf import specs
from diskbuf.errors import OptionError, WindowError
from diskbuf.replay_buffers.uniform import open as open_buffer
from diskbuf.scanning import scan
from diskbuf.transfer import Progress
from diskbuf.tree import Structure

if TYPE_CHECKING:
    from diskbuf.replay_buffers.uniform import UniformReplayBuffer

_BLOCK_BYTES = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The first row of a leaf that differs.

    Attributes:
        column: Path of the leaf.
        step_id: The id.
        lane: The lane.
        index: Where in the row, of the leaf's own axes.
        first: The value there in the first store.
        second: The value there in the second.
        rows: In how many rows, of all lanes, the leaf differs.
    """

    column: str
    step_id: int
    lane: int
    index: tuple[int, ...]
    first: Any
    second: Any
    rows: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffReport:
    """In what two stores differ.

    Attributes:
        settings: Lines for what differs beside rows and spec: lanes, windows, runs, metadata.
        spec: Lines for what differs in the spec; rows are compared of leaves of equal path, dtype and shape.
        compared: Ids [first, next) of which rows were compared, those that both have.
        rows: For each leaf that differs its first difference.
    """

    settings: tuple[str, ...]
    spec: tuple[str, ...]
    compared: tuple[int, int]
    rows: tuple[Difference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether there is no difference."""
        return not (self.settings or self.spec or self.rows)


def diff(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    history: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> DiffReport:
    """Compares two stores: spec, lanes, windows, runs, metadata, and every row of the ids that both have.

    Layout, codec, chunks and who wrote them when make no difference. Values are equal when their bytes are, so NaN
    equals the same NaN, and 0.0 differs from -0.0.

    Args:
        first: Path or URL.
        second: Path or URL.
        columns: Paths of the leaves to compare; None for all.
        history: Whether to begin with the oldest step on disk, where a store keeps history.
        storage_options: What fsspec's file systems of the URLs' protocols take.
        progress: Called with (bytes done, bytes in all) of one of the stores.

    Returns:
        What differs.

    Raises:
        OptionError: When there is no such leaf in the first store.
        StoreNotFoundError: When there is no store.
        WindowError: When a writer evicted steps before they were read.
        StoreCorruptError: When a chunk file is missing, short or has rotten.
    """
    with (
        open_buffer(first, history=history, storage_options=storage_options) as one,
        open_buffer(second, history=history, storage_options=storage_options) as other,
    ):
        theirs = _leaves(other)
        shared = []
        for path in _wanted(one, columns):
            mine = _leaves(one)[path]
            found = theirs.get(path)
            if found is not None and (found.dtype, found.shape) == (mine.dtype, mine.shape):
                shared.append(path)
        low = max(one.first_id, other.first_id)
        high = max(low, min(one.next_id, other.next_id))
        rows: tuple[Difference, ...] = ()
        if shared and one.batch_size == other.batch_size:
            rows = tuple(_different_rows(one, other, shared, (low, high), progress or _nothing))
        return DiffReport(
            settings=tuple(_different_settings(one, other)),
            spec=tuple(
                line.replace("the store has", "the first has").replace("the data_spec", "the second")
                for line in specs.differences(one.data_spec, other.data_spec)
            ),
            compared=(low, high) if one.batch_size == other.batch_size else (0, 0),
            rows=rows,
        )


def _leaves(buffer: "UniformReplayBuffer") -> dict[str, specs.ArraySpec]:
    structure = Structure(buffer.data_spec)
    return dict(zip(structure.paths, structure.flatten(buffer.data_spec), strict=True))


def _wanted(buffer: "UniformReplayBuffer", columns: Sequence[str] | None) -> list[str]:
    known = list(_leaves(buffer))
    wanted = known if columns is None else list(columns)
    if missing := [path for path in wanted if path not in known]:
        raise OptionError(f"columns must be leaves of the store ({', '.join(map(repr, known))}), got {missing}.")
    return wanted


def _different_settings(one: "UniformReplayBuffer", other: "UniformReplayBuffer") -> Iterator[str]:
    def window(buffer: "UniformReplayBuffer") -> str:
        return f"ids [{buffer.first_id}, {buffer.next_id})"

    def runs(buffer: "UniformReplayBuffer") -> str:
        inside = [run for run in buffer._opened().runs if buffer.first_id < run < buffer.next_id]
        return ", ".join(map(str, inside)) or "one"

    pairs = (
        ("lanes", one.batch_size, other.batch_size),
        ("window", window(one), window(other)),
        ("max_length", one.max_length, other.max_length),
        ("runs begin at", runs(one), runs(other)),
        ("metadata", json.dumps(one.metadata, sort_keys=True), json.dumps(other.metadata, sort_keys=True)),
    )
    for name, mine, theirs in pairs:
        if mine != theirs:
            yield f"{name}: {mine!s:.200}, not {theirs!s:.200}"


def _different_rows(
    one: "UniformReplayBuffer",
    other: "UniformReplayBuffer",
    columns: Sequence[str],
    ids: tuple[int, int],
    progress: Progress,
) -> Iterator[Difference]:
    leaves = _leaves(one)
    row_bytes = sum(leaves[path].dtype.itemsize * int(np.prod(leaves[path].shape)) for path in columns)
    total = max(0, ids[1] - ids[0]) * one.batch_size * row_bytes
    found: dict[str, Difference] = {}
    expected = ids[0]
    for block in scan(one, columns, first_id=ids[0], next_id=ids[1], block_bytes=_BLOCK_BYTES):
        _check_follows(block.first_id, expected)
        expected = block.next_id
        for path, mine, theirs, first_id in _beside(other, block.columns, block.first_id, block.next_id):
            different = _rows_that_differ(mine, theirs)
            count = int(different.sum())
            if not count:
                continue
            if path in found:
                found[path] = dataclasses.replace(found[path], rows=found[path].rows + count)
            else:
                found[path] = _first(path, mine, theirs, different, first_id, rows=count)
        progress((block.next_id - ids[0]) * one.batch_size * row_bytes, total)
    _check_follows(ids[1], expected)
    yield from (found[path] for path in columns if path in found)


def _beside(
    other: "UniformReplayBuffer", columns: Mapping[str, NDArray[Any]], first_id: int, next_id: int
) -> Iterator[tuple[str, NDArray[Any], NDArray[Any], int]]:
    """The same ids of the other store, a leaf at a time."""
    for path, mine in columns.items():
        expected = first_id
        for block in scan(other, [path], first_id=first_id, next_id=next_id, block_bytes=_BLOCK_BYTES):
            _check_follows(block.first_id, expected)
            expected = block.next_id
            begin = block.first_id - first_id
            theirs = block.columns[path]
            yield path, mine[:, begin : begin + theirs.shape[1]], theirs, block.first_id
        _check_follows(next_id, expected)


def _check_follows(first_id: int, expected: int) -> None:
    """Refuses a gap between what was read and what comes."""
    if first_id > expected:
        raise WindowError(
            f"steps must stay in the window until they are read, but the writer evicted those from {expected} on. "
            "Try again while fewer are added."
        )


def _rows_that_differ(mine: NDArray[Any], theirs: NDArray[Any]) -> NDArray[np.bool]:
    """[B, T] whether the bytes of a row differ."""
    shape = mine.shape[:2]
    first, second = (np.ascontiguousarray(rows).reshape(*shape, -1).view(np.uint8) for rows in (mine, theirs))
    found: NDArray[np.bool] = (first != second).any(axis=2)
    return found


def _first(
    path: str, mine: NDArray[Any], theirs: NDArray[Any], different: NDArray[np.bool], first_id: int, *, rows: int
) -> Difference:
    step, lane = (int(number) for number in np.argwhere(different.T)[0])
    one, other = mine[lane, step], theirs[lane, step]
    same = np.ascontiguousarray(one).reshape(-1, 1).view(np.uint8) == np.ascontiguousarray(other).reshape(-1, 1).view(
        np.uint8
    )
    place = int(np.flatnonzero(~same.reshape(one.size, -1).all(axis=1))[0])
    index = tuple(int(number) for number in np.unravel_index(place, one.shape)) if one.ndim else ()
    return Difference(
        column=path,
        step_id=first_id + step,
        lane=lane,
        index=index,
        first=one[index].item(),
        second=other[index].item(),
        rows=rows,
    )


def _nothing(done: int, total: int) -> None:
    del done, total


# ---- checksums


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChecksumReport:
    """A digest of what a store holds.

    Attributes:
        digest: SHA-256 in hexadecimal, of spec, lanes and all rows.
        columns: SHA-256 of each leaf's rows, by its path.
        first_id: First id that went in.
        next_id: Where they end, exclusive.
    """

    digest: str
    columns: dict[str, str]
    first_id: int
    next_id: int


def checksum(
    path: str | os.PathLike[str],
    *,
    columns: Sequence[str] | None = None,
    history: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> ChecksumReport:
    """Takes a SHA-256 of the rows of a store.

    It is the same for stores with equal leaves (path, dtype, shape), lanes and rows, in whatever layout, codec and
    place, and whatever their ids. A leaf's own digest is that of its rows as little-endian bytes in C order, id by id
    and lane by lane in it; the store's is that of one line of JSON for lanes and number of ids, and then one for each
    leaf (path, dtype, shape, digest) in the order of the spec.

    Args:
        path: The store's folder, or a URL.
        columns: Paths of the leaves that go in; None for all.
        history: Whether to begin with the oldest step on disk, where the store keeps history.
        storage_options: What fsspec's file system of the URL's protocol takes.
        progress: Called with (bytes done, bytes in all).

    Returns:
        The digests.

    Raises:
        OptionError: When there is no such leaf.
        WindowError: When a writer evicted steps before they were read.
        StoreNotFoundError: When there is no store.
        StoreCorruptError: When a chunk file is missing, short or has rotten.
    """
    tell = progress or _nothing
    with contextlib.closing(open_buffer(path, history=history, storage_options=storage_options)) as buffer:
        wanted = _wanted(buffer, columns)
        leaves = _leaves(buffer)
        sums = {leaf: hashlib.sha256() for leaf in wanted}
        first_id, next_id = buffer.first_id, buffer.next_id
        row_bytes = buffer.batch_size * sum(
            leaves[leaf].dtype.itemsize * int(np.prod(leaves[leaf].shape)) for leaf in wanted
        )
        expected = first_id
        for block in scan(buffer, wanted, first_id=first_id, next_id=next_id):
            _check_follows(block.first_id, expected)
            for leaf, rows in block.columns.items():
                little = rows.swapaxes(0, 1).astype(rows.dtype.newbyteorder("<"), copy=False)
                sums[leaf].update(np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)
            expected = block.next_id
            tell((expected - first_id) * row_bytes, (next_id - first_id) * row_bytes)
        _check_follows(next_id, expected)
    found = {leaf: digest.hexdigest() for leaf, digest in sums.items()}
    lines: list[list[Any]] = [[buffer.batch_size, next_id - first_id]]
    lines += [[leaf, leaves[leaf].dtype.name, list(leaves[leaf].shape), found[leaf]] for leaf in wanted]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return ChecksumReport(
        digest=hashlib.sha256(text.encode()).hexdigest(), columns=found, first_id=first_id, next_id=next_id
    )
