"""From what a log is given as to the parts that it is read from."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pa_parquet

from diskbuf.bandits.logs.sources import BATCH_ROWS, ArrowPart, Part
from diskbuf.bandits.logs.text_sources import CsvPart, JsonLinesPart
from diskbuf.bandits.logs.vowpal_wabbit import VowpalWabbitPart
from diskbuf.errors import OptionError, SpecError

Format = Literal["csv", "jsonl", "parquet", "arrow", "vw"]

FORMATS: tuple[str, ...] = get_args(Format)
_SUFFIXES = {
    ".csv": "csv",
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
    ".vw": "vw",
}
_COMPRESSIONS = {".gz", ".bz2", ".zst", ".lz4"}


def parts_of(source: Any, *, format: str | None, storage_options: Mapping[str, Any] | None) -> list[Part]:  # noqa: A002
    """Returns the parts of a source, in order.

    Args:
        source: A path or URL that fsspec knows, or a list of them; a pyarrow Table, RecordBatch or
            RecordBatchReader; a pandas or Polars frame, or anything else that gives an Arrow stream; a dict of arrays.
        format: Of files; None goes by the suffix.
        storage_options: For fsspec.

    Raises:
        OptionError: When the source or format is something else.
        FileNotFoundError: When a file isn't there.
    """
    if format is not None and format not in FORMATS:
        raise OptionError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {format!r}.")
    if isinstance(source, str | os.PathLike):
        return [_file_part(source, format, storage_options)]
    if isinstance(source, Sequence) and source and all(isinstance(item, str | os.PathLike) for item in source):
        return [_file_part(item, format, storage_options) for item in source]
    if format is not None or storage_options is not None:
        raise OptionError("format and storage_options must be left out where the source is no file.")
    return [_table_part(source)]


def _table_part(source: Any) -> Part:
    if isinstance(source, Mapping):
        try:
            source = pa.table({name: _flat(values) for name, values in source.items()})
        except (pa.ArrowInvalid, pa.ArrowTypeError, TypeError) as error:
            raise OptionError(f"a dict as source must hold arrays [N], all of one N; got {error}.") from error
    if isinstance(source, pa.RecordBatchReader):
        return ArrowPart("the reader", source.schema, lambda _: source)
    if isinstance(source, pa.Table | pa.RecordBatch):
        table = pa.Table.from_batches([source]) if isinstance(source, pa.RecordBatch) else source
        return ArrowPart(
            "the table",
            table.schema,
            lambda names: iter(table.select(names).to_batches(max_chunksize=BATCH_ROWS)),
            is_repeatable=True,
        )
    if hasattr(source, "__arrow_c_stream__"):
        reader = pa.RecordBatchReader.from_stream(source)
        return ArrowPart(f"the {type(source).__name__}", reader.schema, lambda _: reader)
    if hasattr(source, "iloc") and hasattr(source, "columns"):  # pandas before 2.2
        return _table_part(pa.Table.from_pandas(source, preserve_index=False))
    if hasattr(source, "to_arrow"):
        return _table_part(source.to_arrow())
    raise OptionError(
        "source must be a path, a URL, a list of these, or a table of Arrow, pandas or Polars, got "
        f"{type(source).__name__}."
    )


def _flat(values: Any) -> Any:
    if isinstance(values, np.ma.MaskedArray) and values.ndim == 1:
        return pa.array(values.data, mask=np.ma.getmaskarray(values))
    array = np.asarray(values) if isinstance(values, np.ndarray) else values
    if isinstance(array, np.ndarray) and array.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])
    return array


def format_of(path: str | os.PathLike[str], format: str | None) -> str:  # noqa: A002
    """Returns the format of a file, as asked for or by its suffix.

    Raises:
        OptionError: When the suffix doesn't tell.
    """
    if format is not None:
        if format not in FORMATS:
            raise OptionError(f"format must be one of {', '.join(map(repr, FORMATS))}, got {format!r}.")
        return format
    plain = Path(os.fspath(path))
    if plain.suffix in _COMPRESSIONS:
        plain = plain.with_suffix("")
    found = _SUFFIXES.get(plain.suffix.lower())
    if found is None:
        raise OptionError(
            f"format must be given where the suffix doesn't tell it, as of {os.fspath(path)!r}: "
            f"one of {', '.join(map(repr, FORMATS))}."
        )
    return found


def _file_part(path: str | os.PathLike[str], format: str | None, options: Mapping[str, Any] | None) -> Part:  # noqa: A002
    kind = format_of(path, format)
    text = os.fspath(path)
    name = text.rpartition("/")[2] or text
    if "://" not in text and options is not None:
        raise OptionError(f"storage_options must be left out for a local file, got them with {text!r}.")
    if "://" not in text and not Path(text).is_file():
        raise FileNotFoundError(f"a source must be a file, got {text!r}. Check the path.")

    def open_bytes() -> Any:
        if "://" not in text:
            if kind in ("parquet", "arrow"):
                return pa.memory_map(text)
            return pa.input_stream(text, compression="detect", buffer_size=None)
        import fsspec

        return fsspec.open(text, "rb", compression=None if kind in ("parquet", "arrow") else "infer", **(options or {}))

    if kind == "csv":
        return CsvPart(name, _opener(open_bytes))
    if kind == "jsonl":
        return JsonLinesPart(name, _opener(open_bytes))
    if kind == "vw":
        return VowpalWabbitPart(name, _opener(open_bytes))
    return (_parquet_part if kind == "parquet" else _ipc_part)(name, _opener(open_bytes))


def _opener(open_bytes: Callable[[], Any]) -> Callable[[], Any]:
    """Opens a file in a `with`; what fsspec gives only opens when entered."""

    @contextlib.contextmanager
    def opened() -> Iterator[Any]:
        with open_bytes() as file:
            yield file

    return opened


def _parquet_part(name: str, opened: Callable[[], Any]) -> Part:
    def batches(names: list[str]) -> Iterator[pa.RecordBatch]:
        with opened() as file:
            yield from pa_parquet.ParquetFile(file).iter_batches(batch_size=BATCH_ROWS, columns=names)

    with opened() as file, _named(name, "Parquet"):
        return ArrowPart(name, pa_parquet.ParquetFile(file).schema_arrow, batches, is_repeatable=True)


def _ipc_part(name: str, opened: Callable[[], Any]) -> Part:
    """An Arrow file, of the random-access format or of the streaming one."""

    def batches(names: list[str]) -> Iterator[pa.RecordBatch]:
        with opened() as file:
            if not _is_random_access(file):
                yield from pa.ipc.open_stream(file)
                return
            schema = pa.ipc.open_file(file).schema
            included = sorted(schema.get_field_index(column) for column in names)
            reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=included))
            for number in range(reader.num_record_batches):
                yield reader.get_batch(number)

    with opened() as file, _named(name, "Arrow"):
        reader = pa.ipc.open_file(file) if _is_random_access(file) else pa.ipc.open_stream(file)
        return ArrowPart(name, reader.schema, batches, is_repeatable=True)


def _is_random_access(file: Any) -> bool:
    magic = file.read(6)
    file.seek(0)
    return bool(magic == b"ARROW1")


@contextlib.contextmanager
def _named(name: str, kind: str) -> Iterator[None]:
    try:
        yield
    except pa.ArrowInvalid as error:
        raise SpecError(f"{name} must be a file of {kind}, got something else ({error}).") from error
