"""Importing a bandit log, beside Arrow's own reading of the same file."""

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import beside
import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pa_parquet
from beside import Measurement
from measure import SECONDS, Record, Target, against, interleave

from diskbuf.bandits.logs import Categories, LogColumns, import_log

_NUMBERS = 20
_COUNTRIES = ["de", "es", "fr", "it"]
_ARMS = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        rows: Of the log.
        rounds: Rounds.
    """

    rows: int = 1_000_000
    rounds: int = 5


QUICK = Size(rows=2_000, rounds=2)
_COLUMNS = LogColumns(
    context=[*(f"x{number}" for number in range(_NUMBERS)), "country"],
    action="item",
    reward="click",
    propensity="probability",
    timestamp="at",
    key="id",
)


def measure_log_import(folder: Path, size: Size) -> list[Record]:
    """Seconds for a file of 20 numbers, a category of four, and the usual columns, by its format."""
    table = _table(size.rows)
    files = {"csv": folder / "log.csv", "parquet": folder / "log.parquet"}
    pa_csv.write_csv(table, files["csv"])
    pa_parquet.write_table(table, files["parquet"])
    del table
    records = []
    for kind, read, least in (("csv", _read_csv, 2.0), ("parquet", _read_parquet, 2.0)):
        file, target = files[kind], folder / "log.zarr"
        figures = interleave(
            {
                "found": _timed(lambda f=file, t=target: import_log(f, t, _COLUMNS), clear=target),
                "given": _timed(
                    lambda f=file, t=target: import_log(
                        f, t, _COLUMNS, num_actions=_ARMS, encodings={"country": Categories(_COUNTRIES)}
                    ),
                    clear=target,
                ),
                "read": _timed(lambda f=file, r=read: r(f)),
                "copied": _timed(lambda f=file, r=read, t=folder / "copy": _copy(r(f), t), clear=folder / "copy"),
            },
            rounds=size.rounds,
        )
        megabytes = file.stat().st_size / 1e6
        for ours, what in (("found", "categories and arms found"), ("given", "categories and arms given")):
            for peer, of_peer in (
                ("read", "Arrow reads it"),
                ("copied", "Arrow reads it, float32 rows synced to a file"),
            ):
                records.append(
                    against(
                        f"import_{kind}_{ours}_vs_{peer}",
                        f"import {size.rows:,} rows of {kind}, {megabytes:.0f} MB, {what}",
                        ours=figures[ours],
                        peer=of_peer,
                        peer_figures=figures[peer],
                        unit=SECONDS,
                        target=Target(at_most=least) if peer == "read" else None,
                    )
                )
    return records


def _table(rows: int) -> pa.Table:
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {
        f"x{number}": rng.normal(size=rows).astype(np.float32).round(4) for number in range(_NUMBERS)
    }
    columns["country"] = np.array(_COUNTRIES)[rng.integers(0, len(_COUNTRIES), rows)]
    columns["item"] = rng.integers(0, _ARMS, rows)
    columns["click"] = rng.integers(0, 2, rows)
    columns["probability"] = np.full(rows, 1 / _ARMS)
    columns["at"] = pa.array(10**15 + np.arange(rows) * 10**6).cast(pa.timestamp("us", "UTC"))
    columns["id"] = np.arange(rows)
    return pa.table(columns)


def _read_csv(file: Path) -> list[pa.RecordBatch]:
    options = pa_csv.ConvertOptions(include_columns=_COLUMNS.names())
    return list(pa_csv.open_csv(file, convert_options=options))


def _read_parquet(file: Path) -> list[pa.RecordBatch]:
    return list(pa_parquet.ParquetFile(file).iter_batches(columns=_COLUMNS.names()))


def _copy(batches: list[pa.RecordBatch], target: Path) -> None:
    """The least that has to be done to have the numbers of the rows on the disk."""
    import os

    with target.open("wb", buffering=0) as file:
        for batch in batches:
            for name in _COLUMNS.names():
                column = batch.column(batch.schema.get_field_index(name))
                if not pa.types.is_string(column.type):
                    kind = np.int64 if name in ("at", "id") else np.float32
                    file.write(column.to_numpy(zero_copy_only=False).astype(kind).data)
        os.fsync(file.fileno())


def _timed(call: Callable[[], object], *, clear: Path | None = None) -> Callable[[], float]:
    def timed() -> float:
        if clear is not None and clear.is_dir():
            shutil.rmtree(clear)
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return timed


if __name__ == "__main__":
    beside.main(
        {"import": Measurement("log_import", "measure_log_import")}, what="importing bandit logs", name="log-import"
    )
