"""Imports a bandit log: a source is read block by block, staged beside the store, and added when it is whole."""

import contextlib
import copy
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from diskbuf import trajectories
from diskbuf.bandits.logs.columns import LogColumns
from diskbuf.bandits.logs.converting import Conversion, Fault, Invalid, default_encoding, value_faults
from diskbuf.bandits.logs.encodings import Categories, Encoding, Label, Vector, checked_labels, is_text
from diskbuf.bandits.logs.opening import Format, parts_of
from diskbuf.bandits.logs.record import LogRecord
from diskbuf.bandits.logs.report import ImportReport, Tally
from diskbuf.bandits.logs.sources import UNREADABLE, ArrowPart, Block, Malformed, Part, RetryError, TextPart
from diskbuf.bandits.logs.staging import StagedRows, checksum_on, digest_of
from diskbuf.bandits.logs.times import TimeUnit, text_of_moment
from diskbuf.bandits.logs.vowpal_wabbit import ACTION, PROPENSITY, REWARD, VowpalWabbitPart
from diskbuf.errors import OptionError, SpecError, StoreExistsError, StoreMismatchError
from diskbuf.options import StoreOptions
from diskbuf.readers.requests import count
from diskbuf.replay_buffers.opening import local_path
from diskbuf.replay_buffers.uniform import UniformReplayBuffer, flag
from diskbuf.replay_buffers.uniform import open as open_buffer
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.store.staging import Staging
from diskbuf.trajectories import StepType, Trajectory

Order = Literal["check", "sort", "as_is"]

_BLOCK_ROWS = 65_536
_INFO_SPECS: dict[str, ArraySpec] = {
    "propensity": BoundedArraySpec((), np.float32, 0.0, 1.0, name="propensity"),
    "timestamp": ArraySpec((), np.int64, name="timestamp"),
    "key": ArraySpec((), np.int64, name="key"),
    "position": ArraySpec((), np.int32, name="position"),
}


def import_log(
    source: Any,
    path: str | os.PathLike[str],
    columns: LogColumns | None = None,
    *,
    format: Format | None = None,  # noqa: A002 - zarr's and pandas' name for it
    strict: bool = True,
    order: Order = "check",
    encodings: Mapping[str, Encoding] | None = None,
    num_actions: int | None = None,
    actions: Sequence[Label] | None = None,
    mappings: Mapping[str, Mapping[Label, Label]] | None = None,
    invalid: Invalid = "reject",
    pending: bool = False,
    time_unit: TimeUnit | None = None,
    append: bool = False,
    repeat: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> ImportReport:
    """Imports a bandit log into a store that agents learn from and estimators read.

    A CSV column of digits holds numbers, so that 007 is 7: ids like that are text only where `actions` or `encodings`
    say so.

    The store has one lane of Trajectory rows, each an episode of one step: the context columns as one float32 vector
    (in the order given, each as its encoding has it; a number 0 without context columns), the action as an int32 from
    0 on, the reward as float32, and as policy_info those of propensity (float32), timestamp (int64 microseconds since
    the epoch, UTC), key (int64, or two of them that are the digest of text) and position (int32) that have a column.

    All of it is imported or nothing: rows are staged beside the store, in the folder `.NAME.staging`, which takes as
    much room again. A new store is then renamed to its path; to one that is there the rows are added at once. Killed
    anywhere, call it again: what the first one left is swept away, or it had come to its end and that is said. Memory
    is bounded by blocks of rows, whatever the size; order="sort" takes 16 bytes a row besides.

        >>> import tempfile
        >>> rows = {"age": [31, 54, 22], "country": ["fr", "de", "fr"], "item": [0, 1, 1], "click": [0, 1, 0],
        ...         "probability": [0.5, 0.5, 0.5]}
        >>> columns = LogColumns(context=["age", "country"], action="item", reward="click", propensity="probability")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = import_log(rows, f"{folder}/log.zarr", columns)
        >>> report.rows, report.context, report.support
        (3, {'age': (0, 1), 'country': (1, 3)}, [1, 2])

    Args:
        source: A path or any URL of fsspec, or a list of them; a pyarrow Table, RecordBatch or RecordBatchReader; a
            pandas or Polars frame; a dict of arrays [N].
        path: The store's folder.
        columns: Which column is what. None takes those of the store that is added to; for Vowpal Wabbit's format
            `action`, `reward`, `propensity` and all features.
        format: Of files: "csv" (with a header line), "jsonl" (an object to a line), "parquet", "arrow" or "vw"; None
            goes by the suffix.
        strict: Whether the first line that can't be read is an error that names it; otherwise they are left out and
            counted, and the report has the first few.
        order: What timestamps do: "check" refuses one that goes back, "sort" sorts by them, "as_is" keeps the order.
        encodings: Of context columns; without one, numbers are as they are and text becomes the categories that are
            found, sorted.
        num_actions: K; None finds it.
        actions: [K] labels, in the order of the arms; None finds those of text, sorted.
        mappings: By column, values to take for others: `{"item": {"A-1": "A1"}}`. For a log that calls the same
            things by other names than the store.
        invalid: What becomes of rows whose reward or context isn't finite or whose propensity isn't above 0 and at most
            1: an error, left out, or kept; the latter two are counted.
        pending: Whether a missing reward means one that hasn't arrived yet, and is kept as NaN. Always so without a
            reward column.
        time_unit: The unit of moments that are numbers since the epoch: "s", "ms", "us" or "ns".
        append: Whether to add to the store at the path, when there is one: by its recorded encodings and labels.
        repeat: Whether to add rows although the very same were imported before.
        storage_options: For fsspec.

    Returns:
        What was found.

    Raises:
        OptionError: If an argument is outside its rule, a column isn't there, or the same rows were imported before.
        SpecError: If a row can't be read or has an invalid value, or timestamps go back; the message names it.
        StoreExistsError: If there is something at the path and append is False.
        StoreMismatchError: If the store records other encodings, labels or columns, or wasn't made by an import.
        StoreLockedError: If another process writes the store or imports into it.
        FileNotFoundError: If a file isn't there.
        OSError: If a file can't be read or written.
        In every case nothing was imported.
    """
    where = local_path(path)
    options = _Options(
        strict=flag("strict", strict),
        order=_one_of("order", order, get_args(Order)),
        invalid=_one_of("invalid", invalid, get_args(Invalid)),
        pending=flag("pending", pending),
        repeat=flag("repeat", repeat),
    )
    if time_unit is not None:
        _one_of("time_unit", time_unit, get_args(TimeUnit))
    if columns is not None and not isinstance(columns, LogColumns):
        raise OptionError(f"columns must be LogColumns, got {columns!r:.100}.")
    parts = parts_of(source, format=format, storage_options=storage_options)
    existing = _existing(where, flag("append", append))
    request = _Request(
        encodings=dict(encodings or {}),
        num_actions=None if num_actions is None else count("num_actions", num_actions),
        actions=None if actions is None else checked_labels("actions", actions),
        mappings=dict(mappings or {}),
        time_unit=time_unit,
    )
    conversion = _conversion(parts[0], columns, request, existing, where)
    is_direct = existing is None and options.order != "sort" and all(_is_repeatable(part) for part in parts)
    if is_direct:
        conversion = _looked_through(conversion, parts)
    with Staging(where) as staging:
        importing = _Import(conversion, options, staging, is_direct=is_direct)
        with contextlib.closing(importing):
            for part in parts:
                importing.take(part)
            return importing.finish(existing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    strict: bool
    order: str
    invalid: str
    pending: bool
    repeat: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """What was asked for of encodings and arms."""

    encodings: dict[str, Encoding]
    num_actions: int | None
    actions: tuple[Label, ...] | None
    mappings: dict[str, Mapping[Label, Label]]
    time_unit: TimeUnit | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Existing:
    """The store that is added to.

    Attributes:
        record: What it records.
        next_id: The id that the next row gets.
        last_time: Its last timestamp; None without rows or timestamps.
        spec: Of its rows.
    """

    record: LogRecord
    next_id: int
    last_time: int | None
    spec: Any


def _is_repeatable(part: Part) -> bool:
    return isinstance(part, ArrowPart) and part.is_repeatable


def _looked_through(conversion: Conversion, parts: Sequence[Part]) -> Conversion:
    """A conversion with nothing left to find, from a first reading of the columns in which there is something."""
    wanted = conversion.to_find
    for part in parts if wanted else ():
        kinds = conversion.kinds(part.schema())
        for block in part.blocks({name: kinds[name] for name in wanted}):
            conversion.look_at(block.columns)
    return conversion.with_found()


def _one_of(name: str, value: Any, known: Sequence[str]) -> str:
    if value not in known:
        raise OptionError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}.")
    return cast(str, value)


def _existing(path: Path, append: bool) -> _Existing | None:
    is_taken = path.is_file() or (path.is_dir() and any(path.iterdir()))
    if not is_taken:
        return None
    if not append:
        raise StoreExistsError(
            f"cannot create a store at {path}: the path is taken. Choose another path, or append=True to add to it.",
            path=str(path),
        )
    with open_buffer(path) as buffer:
        record = LogRecord.of(buffer.metadata)
        if record is None:
            raise StoreMismatchError(
                f"cannot add to {path}: it records no log, as those of import_log do. Import into another path.",
                path=str(path),
            )
        last = None
        if record.is_sorted is not None and buffer.next_id > buffer.first_id:
            last = int(buffer.read([buffer.next_id - 1], [0]).policy_info["timestamp"][0])
        return _Existing(record=record, next_id=buffer.next_id, last_time=last, spec=buffer.data_spec)


def _conversion(
    part: Part, columns: LogColumns | None, request: _Request, existing: _Existing | None, path: Path
) -> Conversion:
    record = None if existing is None else existing.record
    if columns is None:
        if record is not None:
            columns = record.columns
        elif isinstance(part, VowpalWabbitPart):
            columns = LogColumns(context=part.features(), action=ACTION, reward=REWARD, propensity=PROPENSITY)
        else:
            raise OptionError("columns must say which column is what, got None. Give LogColumns(context=[...], ...).")
    schema = part.schema()
    for name in (*request.encodings, *request.mappings):
        if name not in columns.names():
            raise OptionError(f"encodings and mappings must be of columns that are imported, got {name!r}.")
    for name, encoding in request.encodings.items():
        if name not in columns.context or not isinstance(encoding, Encoding):
            raise OptionError(f"encodings must give context columns an Encoding, got {name!r}: {encoding!r}.")
    if request.num_actions is not None and request.actions is not None and len(request.actions) != request.num_actions:
        raise OptionError(f"num_actions must be the {len(request.actions)} of actions, got {request.num_actions}.")
    missing = [name for name in columns.names() if name not in schema]
    if missing:
        raise OptionError(f"columns must be those of the log, {list(schema)[:30]}, got {missing} besides.")
    key = None
    if columns.key is not None:
        key = "blake2b-16" if is_text(schema[columns.key]) else "int"
    if record is not None:
        _check_agrees(columns, request, record, path)
        if record.key == "blake2b-16" and key == "int":  # text that looks like ints in this one
            key = "blake2b-16"
        if key != record.key:
            raise _mismatch(path, [f"keys: the store has {record.key or 'none'}, the log {key or 'none'}"])
        return Conversion(
            columns=columns,
            encodings=list(record.encodings),
            labels=record.labels,
            finds_labels=False,
            num_actions=record.num_actions,
            key=record.key,
            mappings=request.mappings,
            time_unit=request.time_unit,
        )
    action_type = schema[columns.action]
    labels = request.actions
    if isinstance(part, VowpalWabbitPart) and labels is None and request.num_actions is not None:
        labels = tuple(range(1, request.num_actions + 1))
    is_labelled = is_text(action_type) or pa.types.is_dictionary(action_type) or pa.types.is_boolean(action_type)
    finds = (
        labels is None
        and (is_labelled or isinstance(part, VowpalWabbitPart))
        and columns.action not in request.mappings
    )
    if finds and request.num_actions is not None:
        raise OptionError("actions must list the labels where num_actions is given, got None.")
    return Conversion(
        columns=columns,
        encodings=[request.encodings.get(name) or default_encoding(name, schema[name]) for name in columns.context],
        labels=labels,
        finds_labels=finds,
        num_actions=request.num_actions if labels is None else len(labels),
        key=cast(Any, key),
        mappings=request.mappings,
        time_unit=request.time_unit,
    )


def _check_agrees(columns: LogColumns, request: _Request, record: LogRecord, path: Path) -> None:
    found = []
    if tuple(columns.context) != tuple(record.columns.context):
        found.append(f"context: the store has {list(record.columns.context)}, the log {list(columns.context)}")
    for role in ("propensity", "timestamp", "position"):
        ours, theirs = getattr(record.columns, role), getattr(columns, role)
        if (ours is None) != (theirs is None):
            found.append(f"{role}: the store has {'none' if ours is None else 'one'}, the log {theirs or 'none'}")
    for name, encoding in zip(record.columns.context, record.encodings, strict=True):
        asked = request.encodings.get(name, encoding)
        is_open = asked == Categories() or asked == Vector()  # found there, recorded here
        if not is_open and asked.to_json() != encoding.to_json():
            found.append(f"encoding of {name!r}: the store has {encoding!r:.200}, asked for is {asked!r:.200}")
    if request.actions is not None and list(request.actions) != record.labels:
        found.append(f"actions: the store has {record.labels!r:.200}, asked for is {list(request.actions)!r:.200}")
    if request.num_actions is not None and request.num_actions != record.num_actions:
        found.append(f"num_actions: the store has {record.num_actions}, asked for is {request.num_actions}")
    if found:
        raise _mismatch(path, found)


def _mismatch(path: Path, found: list[str]) -> StoreMismatchError:
    return StoreMismatchError(
        f"cannot add to {path}: it records otherwise than is asked for now.\n  "
        + "\n  ".join(found)
        + "\nLeave that out to take the store's, with mappings for what is called otherwise, or use another path.",
        path=str(path),
        differences=found,
    )


class _WrittenRows:
    """Rows that go straight into a new store: everything about it is known, and nothing has to be read twice.

    Args:
        path: Where the store is made.
        record: What it records, so far.
    """

    def __init__(self, path: Path, record: LogRecord) -> None:
        self._record = record
        # Nothing of it counts before it is closed, which syncs all of it.
        self._buffer = UniformReplayBuffer(_spec(record), 1, None, path=path, options=StoreOptions(fsync="never"))
        self._checksums: dict[str, int] = {}
        self.rows = 0

    def append(self, rows: int, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Adds rows [N, *shape] of every leaf."""
        if rows:
            arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items() if array.size}
            self._buffer.extend(_trajectory(arrays, rows, self._record))
            for name, array in arrays.items():
                self._checksums[name] = checksum_on(self._checksums.get(name, 0), array)
            self.rows += rows

    def digest(self) -> str:
        """Returns what tells these rows from others."""
        return digest_of(self._checksums)

    def complete(self, record: LogRecord) -> None:
        """Closes the store with its final record, which goes to the disk with the rows."""
        store = self._buffer._opened()
        store.manifest = dataclasses.replace(store.manifest, metadata=record.to_json())
        self._buffer.close()

    def close(self) -> None:
        """Closes the store; closing twice is fine."""
        self._buffer.close()


class _Import:
    """One import on its way.

    Args:
        conversion: From columns to leaves.
        options: What becomes of rows at fault.
        staging: Where rows wait.
        is_direct: Whether rows go straight into a new store; nothing is then left to find, or to put in order.
    """

    def __init__(self, conversion: Conversion, options: _Options, staging: Staging, *, is_direct: bool) -> None:
        self._is_direct = is_direct
        self._conversion = conversion
        self._options = options
        self._staging = staging
        self._malformed = Malformed(strict=options.strict)
        self._tally = Tally(conversion.num_actions)
        self._types: dict[str, str] = {}
        self._rows: StagedRows | _WrittenRows | None = None
        self._latest: int | None = None  # timestamp
        self._latest_where = ""
        self._is_sorted = True
        self._pending = options.pending or conversion.columns.reward is None

    def close(self) -> None:
        """Closes the staged files."""
        if self._rows is not None:
            self._rows.close()

    # ---- reading

    def take(self, part: Part) -> None:
        """Stages the rows of a part."""
        kinds = self._conversion.kinds(part.schema())
        self._types |= {name: str(kind) for name, kind in part.schema().items() if name in kinds}
        mark = self._mark()
        try:
            self._take_all(part.blocks(kinds), is_exact=not isinstance(part, TextPart))
        except (*UNREADABLE, RetryError) as error:
            if not isinstance(part, TextPart):
                raise SpecError(f"{part.name} must be readable, got: {error}. Nothing was imported.") from error
            self._go_back(mark)
            self._take_all(part.careful_blocks(kinds, self._malformed), is_exact=True)

    def _take_all(self, blocks: Iterator[Block], *, is_exact: bool) -> None:
        with contextlib.closing(cast(Any, blocks)):
            for block in blocks:
                self._take_block(block, is_exact=is_exact)

    def _take_block(self, block: Block, *, is_exact: bool) -> None:
        if self._rows is None:
            self._conversion.settle(block.columns)
            self._rows = self._begun()
        leaves, faults = self._conversion.arrays(block.columns, block.rows)
        good = np.ones(block.rows, np.bool_)
        for fault in faults:
            rows = np.flatnonzero(fault.rows & good)
            if not is_exact and self._options.strict and len(rows):
                raise RetryError
            self._tell(fault, block, rows)
            good[rows] = False
        invalid = value_faults(leaves, pending=self._pending)
        for fault in invalid:
            good &= self._judge(fault, block, good, is_exact=is_exact)
        if not good.all():
            leaves = {name: leaf[good] for name, leaf in leaves.items()}
            block = block._replace(numbers=block.numbers[good], rows=int(good.sum()))
        self._count(leaves, has_invalid=bool(invalid))
        self._check_order(leaves, block, is_exact=is_exact)
        self._rows.append(block.rows, leaves)

    def _begun(self) -> StagedRows | _WrittenRows:
        conversion = self._conversion
        if not self._is_direct:
            return StagedRows(self._staging.folder, conversion.staged())
        record = LogRecord(
            columns=conversion.columns,
            encodings=conversion.encodings,
            num_actions=conversion.num_actions or 1,
            labels=conversion.labels,
            key=conversion.key,
            is_sorted=None,
            imports=[],
        )
        return _WrittenRows(self._staging.store, record)

    def _tell(self, fault: Fault, block: Block, rows: npt.NDArray[np.int64]) -> None:
        for row in rows.tolist():
            advice = f". {fault.advice}" if fault.advice else ""
            self._malformed.tell(f"{fault.must}, got {fault.value(row)!r:.100} in {block.where(row)}{advice}")

    def _judge(
        self, fault: Fault, block: Block, good: npt.NDArray[np.bool_], *, is_exact: bool
    ) -> npt.NDArray[np.bool_]:
        """Which rows stay of those with a fault of their values."""
        bad = fault.rows & good
        rows, reason = int(bad.sum()), cast(str, fault.reason)
        if not rows:
            return good
        if fault.leaf == "policy_info/propensity":
            self._tally.out_of_range += rows
        if self._options.invalid == "keep":
            self._tally.kept[reason] = self._tally.kept.get(reason, 0) + rows
            return good
        if self._options.invalid == "drop":
            self._tally.dropped[reason] = self._tally.dropped.get(reason, 0) + rows
            return ~bad
        if not is_exact:
            raise RetryError
        row = int(bad.argmax())
        raise SpecError(
            f"{fault.must}, got {fault.value(row)} in {block.where(row)}. Nothing was imported. "
            f"{_advice(fault.leaf)}Leave such rows out with invalid='drop', or keep them with 'keep'.",
            path=fault.leaf,
        )

    def _count(self, leaves: Mapping[str, npt.NDArray[Any]], *, has_invalid: bool) -> None:
        tally = self._tally
        tally.add_actions(leaves["action"])
        reward = leaves["reward"]
        if self._pending:
            tally.pending += int(np.isnan(reward).sum())
        if has_invalid:
            found = {
                "observation": int(np.isnan(leaves["context"]).any(axis=1).sum()),
                "reward": 0 if self._pending else int(np.isnan(reward).sum()),
            }
            if "propensity" in leaves:
                found["policy_info/propensity"] = int(np.isnan(leaves["propensity"]).sum())
            for leaf, rows in found.items():
                if rows:
                    tally.not_a_number[leaf] = tally.not_a_number.get(leaf, 0) + rows
        if "propensity" in leaves:
            tally.add_propensities(leaves["propensity"])
        if "timestamp" in leaves:
            tally.add_times(leaves["timestamp"])

    def _check_order(self, leaves: Mapping[str, npt.NDArray[Any]], block: Block, *, is_exact: bool) -> None:
        times = leaves.get("timestamp")
        if times is None or not len(times):
            return
        before = np.concatenate(([times[0] if self._latest is None else self._latest], times[:-1]))
        backwards = times < before
        if backwards.any():
            if self._options.order == "check":
                if not is_exact:
                    raise RetryError
                row = int(backwards.argmax())
                raise SpecError(
                    f"timestamps must not go back, got {text_of_moment(int(times[row]))} after "
                    f"{text_of_moment(int(before[row]))} in {block.where(row)}. Nothing was imported. "
                    "Sort them with order='sort', or keep the order with 'as_is'.",
                    path="policy_info/timestamp",
                )
            self._is_sorted = False
        self._latest = int(times[-1])

    def _mark(self) -> Any:
        rows = self._rows.mark() if isinstance(self._rows, StagedRows) else None
        tally, malformed = copy.deepcopy(self._tally), self._malformed.copy()
        return rows, tally, malformed, self._latest, self._is_sorted, self._conversion.mark()

    def _go_back(self, mark: Any) -> None:
        rows, self._tally, self._malformed, self._latest, self._is_sorted, conversion = mark
        if isinstance(self._rows, StagedRows):
            self._rows.go_back(rows or self._rows.nothing)
        self._conversion.go_back(conversion)

    # ---- bringing it to its end

    def finish(self, existing: _Existing | None) -> ImportReport:
        """Adds the staged rows to the store, or makes it of them."""
        if self._rows is None or not self._rows.rows:
            raise SpecError(
                "a log must have at least one row, got none"
                + (
                    f" but {self._malformed.count} malformed ones: {self._malformed.examples}."
                    if self._malformed.count
                    else "."
                )
            )
        conversion, rows = self._conversion, self._rows
        order = self._order(rows, existing)
        labels, arm_places = conversion.found_arms()
        found = conversion.found_categories()
        support = self._tally.support
        if arm_places is not None:
            support = _placed(support, arm_places)
        num_actions = conversion.num_actions or len(support)
        ready: StagedRows | _WrittenRows = rows
        if isinstance(rows, StagedRows):
            ready = _arranged(rows, found, arm_places, order, folder=self._staging.folder)
        with contextlib.closing(ready):
            record = self._record(ready, existing, [encoding for encoding, _ in found], num_actions, labels)
            self._add(ready, record, existing)
        return self._report(record, existing, support, rows.rows)

    def _order(self, rows: StagedRows | _WrittenRows, existing: _Existing | None) -> npt.NDArray[np.int64] | None:
        """The order to put rows in, None for the one they have; refuses those from before what the store has."""
        has_times = self._conversion.columns.timestamp is not None
        if self._options.order == "sort" and not has_times:
            raise OptionError("order must be 'check' or 'as_is' without a column of timestamps, got 'sort'.")
        if not has_times or self._tally.times is None:
            return None
        earliest, last = self._tally.times[0], None if existing is None else existing.last_time
        if self._options.order != "as_is" and last is not None and earliest < last:
            raise SpecError(
                f"timestamps must not go back, got {text_of_moment(earliest)} after {text_of_moment(last)}, the last "
                "of the store. Nothing was imported. Import older logs first, or keep the order with order='as_is'.",
                path="policy_info/timestamp",
            )
        if self._options.order == "as_is" and isinstance(rows, StagedRows):
            self._is_sorted = self._is_sorted and (last is None or int(rows.array("timestamp")[0]) >= last)
            return None
        if self._is_sorted or not isinstance(rows, StagedRows):
            return None
        self._is_sorted = True
        return np.argsort(rows.array("timestamp"), kind="stable")

    def _record(
        self,
        rows: StagedRows | _WrittenRows,
        existing: _Existing | None,
        encodings: list[Encoding],
        num_actions: int,
        labels: list[Label] | None,
    ) -> LogRecord:
        first_id = 0 if existing is None else existing.next_id
        entry = {"digest": rows.digest(), "rows": rows.rows, "first_id": first_id}
        is_sorted = None if self._conversion.columns.timestamp is None else self._is_sorted
        if existing is None:
            return LogRecord(
                columns=self._conversion.columns,
                encodings=encodings,
                num_actions=num_actions,
                labels=labels,
                key=self._conversion.key,
                is_sorted=is_sorted,
                imports=[entry],
            )
        # An import that was killed before its rows were added has left its entry.
        done = [known for known in existing.record.imports if known["first_id"] < first_id]
        for known in done:
            if (known["digest"], known["rows"]) == (entry["digest"], entry["rows"]) and not self._options.repeat:
                stop = known["first_id"] + known["rows"]
                raise OptionError(
                    f"the rows must be new to the store, got those of ids {known['first_id']} to {stop} again: an "
                    "import had come to its end. repeat=True adds them once more."
                )
        return dataclasses.replace(
            existing.record,
            is_sorted=None if is_sorted is None else is_sorted and existing.record.is_sorted is not False,
            imports=[*done, entry],
        )

    def _add(self, rows: StagedRows | _WrittenRows, record: LogRecord, existing: _Existing | None) -> None:
        path = self._staging.store if existing is None else self._staging.path
        if isinstance(rows, _WrittenRows):
            rows.complete(record)
            self._staging.move_into_place()
            return
        spec = _spec(record) if existing is None else existing.spec
        options = StoreOptions(fsync="never") if existing is None else None  # a close syncs everything
        with UniformReplayBuffer(spec, 1, None, path=path, metadata=record.to_json(), options=options) as buffer:
            if existing is not None and buffer.next_id != existing.next_id:
                raise StoreMismatchError(
                    f"{path} must stay as it is while a log is imported, got rows meanwhile. Import again.",
                    path=str(path),
                )
            arrays = {name: rows.array(name) for name in rows.leaves()}
            buffer.extend(_trajectory(arrays, rows.rows, record))  # all at once: a kill leaves all of them or none
        if existing is None:
            self._staging.move_into_place()

    def _report(
        self, record: LogRecord, existing: _Existing | None, support: npt.NDArray[np.int64], rows: int
    ) -> ImportReport:
        tally = self._tally
        first_id = 0 if existing is None else existing.next_id
        start_time, end_time = tally.time_texts()
        padded = np.zeros(record.num_actions, np.int64)
        padded[: len(support)] = support
        return ImportReport(
            store=str(self._staging.path),
            rows=rows,
            first_id=first_id,
            next_id=first_id + rows,
            types=self._types,
            context=record.slices(),
            num_actions=record.num_actions,
            labels=None if record.labels is None else list(record.labels),
            support=padded.tolist(),
            propensity=None if self._conversion.columns.propensity is None else tally.propensity_report(),
            pending=tally.pending,
            not_a_number=tally.not_a_number,
            dropped=tally.dropped,
            kept=tally.kept,
            malformed=self._malformed.count,
            malformed_examples=self._malformed.examples,
            start_time=start_time,
            end_time=end_time,
            is_sorted=record.is_sorted,
        )


def _placed(counts: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    placed = np.zeros(len(places), np.int64)
    placed[places] = counts[: len(places)]
    return placed


def _arranged(
    rows: StagedRows,
    found: Sequence[tuple[Encoding, npt.NDArray[np.int64] | None]],
    arm_places: npt.NDArray[np.int64] | None,
    order: npt.NDArray[np.int64] | None,
    *,
    folder: Path,
) -> StagedRows:
    """The staged rows as they go into the store: in order, and with what was found in its place."""
    if order is None and arm_places is None and all(places is None for _, places in found):
        return rows
    target = folder / "arranged"
    target.mkdir()
    leaves = {name: leaf for name, leaf in rows.leaves().items() if name != "codes"}
    leaves["context"] = (np.float32, (sum(encoding.width for encoding, _ in found),))
    arranged = StagedRows(target, leaves)
    arrays = {name: rows.array(name) for name in rows.leaves()}
    for start in range(0, rows.rows, _BLOCK_ROWS):
        chosen: Any = slice(start, start + _BLOCK_ROWS) if order is None else order[start : start + _BLOCK_ROWS]
        block = {name: array[chosen] for name, array in arrays.items()}
        if arm_places is not None:
            block["action"] = arm_places[block["action"]]
        block["context"] = _assembled(block["context"], block.pop("codes"), found)
        arranged.append(len(block["action"]), block)
    return arranged


def _assembled(
    context: npt.NDArray[np.float32],
    codes: npt.NDArray[np.int32],
    found: Sequence[tuple[Encoding, npt.NDArray[np.int64] | None]],
) -> npt.NDArray[np.float32]:
    rows = len(context)
    whole = np.zeros((rows, sum(encoding.width for encoding, _ in found)), np.float32)
    start = given = finder = 0
    for encoding, places in found:
        if places is None:
            whole[:, start : start + encoding.width] = context[:, given : given + encoding.width]
            given += encoding.width
        else:
            whole[np.arange(rows), start + places[codes[:, finder]]] = 1.0
            finder += 1
        start += encoding.width
    return whole


def _spec(record: LogRecord) -> Trajectory:
    names = {"propensity": record.columns.propensity, "timestamp": record.columns.timestamp}
    names |= {"key": record.columns.key, "position": record.columns.position}
    info = {name: _INFO_SPECS[name] for name, column in names.items() if column is not None}
    if record.key == "blake2b-16":
        info["key"] = ArraySpec((2,), np.int64, name="key")
    shape = (record.width,) if record.width else ()
    return trajectories.trajectory_spec(
        trajectories.time_step_spec(ArraySpec(shape, np.float32, "observation")),
        trajectories.PolicyStep(
            BoundedArraySpec((), np.int32, 0, record.num_actions - 1, name="action"), info=info or ()
        ),
    )


def _trajectory(arrays: Mapping[str, npt.NDArray[Any]], rows: int, record: LogRecord) -> Trajectory:
    """Leaves [N, *shape] as steps [1, N]; constant ones take no memory."""

    def constant(value: Any) -> npt.NDArray[Any]:
        return np.broadcast_to(value, (1, rows))

    info = {name: arrays[name][None] for name in _INFO_SPECS if name in arrays}
    return Trajectory(
        step_type=constant(StepType.FIRST),
        observation=arrays["context"][None] if record.width else constant(np.float32(0)),
        action=arrays["action"][None],
        policy_info=info or (),
        next_step_type=constant(StepType.LAST),
        reward=arrays["reward"][None],
        discount=constant(np.float32(0)),
    )


def _advice(leaf: str | None) -> str:
    return "If it is a reward that hasn't arrived yet, say pending=True. " if leaf == "reward" else ""
