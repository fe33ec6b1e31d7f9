"""Writes a log to a file: the reverse of an import, with labels and categories as they were."""

import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet

from diskbuf.bandits.log_reader import Log, LoggedRows, LogReader
from diskbuf.bandits.logs.opening import Format, format_of
from diskbuf.bandits.logs.record import LogRecord
from diskbuf.errors import OptionError
from diskbuf.tree import Structure

_BLOCK_ROWS = 65_536
_INFO = "policy_info/"


def export_log(
    store: Log,
    file: str | os.PathLike[str],
    *,
    format: Format | None = None,  # noqa: A002 - as in import_log
    first_id: int | None = None,
    next_id: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> int:
    """Writes a log to a file, block by block; what an import read comes out under the names it had.

    Numbers are float32, moments are in UTC, missing rewards are empty (NaN in Parquet and Arrow files). What an import
    has hashed isn't known any more: of a `Hashed` column the bucket is written, of a key that was text its digest in
    hex. A log that wasn't imported comes out as `observation_0` and so on, `action`, `reward` and the leaves of its
    policy_info.

    A local file is written under another name and then renamed, so that it is whole or not there.

    Args:
        store: A log, or its path.
        file: A path, or any URL of fsspec.
        format: "csv", "jsonl", "parquet" or "arrow"; None goes by the suffix.
        first_id: First id to write; None is the oldest.
        next_id: Where to stop, exclusive; None is after the newest.
        storage_options: For fsspec.

    Returns:
        How many rows were written.

    Raises:
        OptionError: If an argument is outside its rule.
        SpecError: If the store holds no log.
        StoreError: If there is no store, or it can't be read.
        OSError: If the file can't be written.
    """
    kind = format_of(file, format)
    if kind == "vw":
        raise OptionError("format must be 'csv', 'jsonl', 'parquet' or 'arrow' to write, got 'vw'.")
    with LogReader(store, first_id=first_id, next_id=next_id) as log, _opened(file, storage_options) as target:
        record = LogRecord.of(log.buffer.metadata)
        columns = _plain_columns if record is None else _recorded_columns(record)
        leaves = [path.removeprefix(_INFO) for path in Structure(log.data_spec).paths if path.startswith(_INFO)]
        # A log without rows has columns too.
        with _WRITERS[kind](target, columns(_no_rows(log, leaves)).schema) as writer:
            written = 0
            for rows in log.blocks(info=leaves, invalid="keep", block_rows=_BLOCK_ROWS):
                if len(rows):
                    writer.write(columns(rows))
                    written += len(rows)
            return written


def _no_rows(log: LogReader, leaves: Sequence[str]) -> LoggedRows:
    spec, nothing = log.data_spec, np.zeros(0, np.int64)
    structure = Structure(spec.observation)
    info = Structure(spec.policy_info)
    of_info = dict(zip(info.paths, info.flatten(spec.policy_info), strict=True))
    return LoggedRows(
        ids=nothing,
        lanes=nothing,
        observation=structure.unflatten(
            [np.zeros((0, *leaf.shape), leaf.dtype) for leaf in structure.flatten(spec.observation)]
        ),
        index=nothing,
        reward=np.zeros(0, spec.reward.dtype),
        propensity=np.zeros(0, np.float32) if log.has_propensity else None,
        info={name: np.zeros((0, *of_info[name].shape), of_info[name].dtype) for name in leaves},
    )


def _recorded_columns(record: LogRecord) -> Callable[[LoggedRows], pa.RecordBatch]:
    """Columns as the import found them."""
    slices, columns = record.slices(), record.columns

    def decoded(rows: LoggedRows) -> pa.RecordBatch:
        found: dict[str, pa.Array] = {}
        for (name, (start, stop)), encoding in zip(slices.items(), record.encodings, strict=True):
            found[name] = encoding.decode(rows.observation[:, start:stop])
        index = pa.array(rows.index)
        found[columns.action] = index if record.labels is None else pa.array(list(record.labels)).take(index)
        found[columns.reward or "reward"] = pa.array(rows.reward)
        for role, leaf in rows.info.items():
            name = getattr(columns, role) or role
            found.setdefault(name, _info_column(role, leaf))
        return pa.RecordBatch.from_pydict(found)

    return decoded


def _plain_columns(rows: LoggedRows) -> pa.RecordBatch:
    """Columns of a log that nobody imported."""
    structure = Structure(rows.observation)
    found: dict[str, pa.Array] = {}
    for path, leaf in zip(structure.paths, structure.flatten(rows.observation), strict=True):
        flat = leaf.reshape(len(leaf), -1) if len(leaf) else leaf.reshape(0, int(np.prod(leaf.shape[1:])))
        name = "_".join(("observation", *path.split("/"))).rstrip("_")
        for place in range(flat.shape[1]):
            found[name if leaf.ndim == 1 else f"{name}_{place}"] = pa.array(np.ascontiguousarray(flat[:, place]))
    found["action"] = pa.array(rows.index)
    found["reward"] = pa.array(rows.reward)
    for name, leaf in rows.info.items():
        found.setdefault(name.replace("/", "_"), _info_column(name, leaf))
    return pa.RecordBatch.from_pydict(found)


def _info_column(name: str, leaf: npt.NDArray[Any]) -> pa.Array:
    if name == "timestamp" and leaf.dtype == np.int64 and leaf.ndim == 1:
        return pa.array(leaf).cast(pa.timestamp("us", "UTC"))
    if name == "key" and leaf.ndim == 2:
        return pa.array([row.tobytes().hex() for row in leaf.astype("<i8")], pa.string())
    if leaf.ndim == 1:
        return pa.array(leaf)
    width = int(np.prod(leaf.shape[1:]))
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(leaf).reshape(-1)), width)


# ---- files


@contextlib.contextmanager
def _opened(file: str | os.PathLike[str], options: Mapping[str, Any] | None) -> Iterator[Any]:
    text = os.fspath(file)
    if "://" in text:
        import fsspec

        with fsspec.open(text, "wb", **(options or {})) as target:
            yield target
        return
    if options is not None:
        raise OptionError(f"storage_options must be left out for a local file, got them with {text!r}.")
    path = Path(text)
    partial = path.with_name(f".{path.name}.part")
    try:
        with partial.open("wb") as target:
            yield target
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class _Writer(ABC):
    """Writes record batches to an open file."""

    def __init__(self, target: Any, schema: pa.Schema) -> None:
        self._closing = contextlib.ExitStack()
        self._begin(target, schema)

    @abstractmethod
    def _begin(self, target: Any, schema: pa.Schema) -> None: ...

    @abstractmethod
    def write(self, batch: pa.RecordBatch) -> None:
        """Writes rows."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.close()


class _ArrowWriter(_Writer):
    def _begin(self, target: Any, schema: pa.Schema) -> None:
        self._writer = self._closing.enter_context(pa.ipc.new_file(target, schema))

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)


class _ParquetWriter(_Writer):
    def _begin(self, target: Any, schema: pa.Schema) -> None:
        self._writer = self._closing.enter_context(pa_parquet.ParquetWriter(target, schema))

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)


class _CsvWriter(_Writer):
    def _begin(self, target: Any, schema: pa.Schema) -> None:
        lists = [field.name for field in schema if pa.types.is_fixed_size_list(field.type)]
        if lists:
            raise OptionError(f"format must be another than 'csv' for the lists in columns {lists}. Use 'parquet'.")
        plain = pa.schema([field.with_type(_as_text(field.type)) for field in schema])
        self._writer = self._closing.enter_context(pa_csv.CSVWriter(target, plain))
        self._schema = plain

    def write(self, batch: pa.RecordBatch) -> None:
        columns = [_no_nan(column).cast(field.type) for column, field in zip(batch.columns, self._schema, strict=True)]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))


class _JsonLinesWriter(_Writer):
    def _begin(self, target: Any, schema: pa.Schema) -> None:  # noqa: ARG002 - names stand in every line
        self._target = target

    def write(self, batch: pa.RecordBatch) -> None:
        parts: list[Any] = []
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            parts += [f"{', ' if parts else '{'}{json.dumps(name)}: ", _as_json(column)]
        lines = pc.binary_join_element_wise(*parts, "}\n", "")
        self._target.write("".join(lines.to_pylist()).encode())


_WRITERS: dict[str, type[_Writer]] = {
    "csv": _CsvWriter,
    "jsonl": _JsonLinesWriter,
    "parquet": _ParquetWriter,
    "arrow": _ArrowWriter,
}


def _as_text(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_timestamp(kind) else kind


def _no_nan(column: pa.Array) -> pa.Array:
    """NaN as an empty cell, which other programs read as missing too."""
    if not pa.types.is_floating(column.type):
        return column
    return pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)


def _as_json(column: pa.Array) -> pa.Array:
    """The JSON text [N] of values; NaN is null, infinity a number too large for any float."""
    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        flat = _as_json(column.flatten()).to_pylist()
        size = kind.list_size
        rows = (flat[start : start + size] for start in range(0, len(flat), size))
        return pa.array([f"[{', '.join(row)}]" for row in rows], pa.string())
    if pa.types.is_floating(kind):
        text = _no_nan(column).cast(pa.string())
        text = pc.replace_substring_regex(text, "^(-?)inf$", r"\11e999")
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        text = column.cast(pa.string())
    else:
        coded = column.cast(pa.string()).dictionary_encode()
        escaped = [json.dumps(value, ensure_ascii=False) for value in coded.dictionary.to_pylist()]
        text = pa.array(escaped, pa.string()).take(coded.indices)
    return pc.fill_null(text, "null")
