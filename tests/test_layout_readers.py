"""Stores of each layout read without diskbuf, while they are written and when they are closed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow.dataset as ds
import pytest
import tensorstore
import zarr

import diskbuf
from diskbuf import StoreOptions, UniformReplayBuffer

SPEC = {"frame": diskbuf.ArraySpec([4, 3], "uint8"), "policy": {"probability": diskbuf.ArraySpec([], "float32")}}
LANES, STEPS = 2, 1000


def rows(first_id: int, next_id: int) -> dict[str, Any]:
    ids = np.broadcast_to(np.arange(first_id, next_id), (LANES, next_id - first_id))
    frames = np.broadcast_to((ids % 251).astype(np.uint8)[..., None, None], (*ids.shape, 4, 3))
    return {"frame": frames, "policy": {"probability": (ids + np.arange(LANES)[:, None] / 4).astype(np.float32)}}


def write(path: Path, **layout: Any) -> UniformReplayBuffer:
    options = StoreOptions(chunk_bytes=4096, fsync_seconds=0.01, **layout)
    buffer = UniformReplayBuffer(SPEC, LANES, None, path=path, options=options)
    for first_id in range(0, STEPS, 100):
        buffer.extend(rows(first_id, first_id + 100))
    return buffer


def seal_all_full_chunks(buffer: UniformReplayBuffer) -> None:
    """What the background thread does when it comes to it, and the commit that goes with it."""
    writer = buffer._writer
    assert writer is not None
    with writer._alone(writer._flushing):
        while writer._seal_next():
            pass
        writer._commit(writer._extent(buffer.next_id))


@pytest.mark.parametrize("codec", ["zstd", "blosc", "lz4"])
def test_zarr_python_and_tensorstore_read_the_sealed_chunks_of_a_live_store_and_all_of_a_closed_one(
    tmp_path: Path, codec: str
) -> None:
    path, expected = tmp_path / "s.zarr", rows(0, STEPS)
    wanted = {"frame": expected["frame"], "policy/probability": expected["policy"]["probability"]}

    def check(*, is_closed: bool) -> None:
        group = zarr.open_group(path, mode="r")
        for name, leaf in wanted.items():
            array = group[name]
            assert array.shape[0] == STEPS if is_closed else 100 < array.shape[0] <= STEPS
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path / name}/"}}
            for found in (array[:], tensorstore.open(spec, read=True).result().read().result()):
                np.testing.assert_array_equal(found.swapaxes(0, 1), leaf[:, : array.shape[0]], strict=True)

    with write(path, codec=codec) as buffer:
        seal_all_full_chunks(buffer)
        check(is_closed=False)
    check(is_closed=True)


@pytest.mark.parametrize("codec", [None, "zstd", "lz4"])
def test_pyarrow_pandas_and_polars_read_the_files_of_an_arrow_store(tmp_path: Path, codec: str | None) -> None:
    path = tmp_path / "s.arrow"
    with write(path, layout="arrow", codec=codec) as buffer:
        seal_all_full_chunks(buffer)
        assert 100 < ds.dataset(path / "data", format="ipc").count_rows() < STEPS * LANES
    table = ds.dataset(path / "data", format="ipc").to_table().sort_by([("id", "ascending"), ("lane", "ascending")])
    expected = rows(0, STEPS)
    by_row = {"frame": expected["frame"], "probability": expected["policy"]["probability"]}
    assert table["id"].to_pylist() == np.repeat(np.arange(STEPS), LANES).tolist()
    assert table["lane"].to_pylist() == list(range(LANES)) * STEPS
    found = table["frame"].combine_chunks().to_numpy_ndarray()
    np.testing.assert_array_equal(found, by_row["frame"].swapaxes(0, 1).reshape(-1, 4, 3))
    probability = by_row["probability"].T.reshape(-1)
    np.testing.assert_array_equal(table["policy/probability"], probability)
    parts = sorted((path / "data").iterdir())
    frame = pd.concat([pd.read_feather(part, columns=["id", "policy/probability"]) for part in parts])
    np.testing.assert_array_equal(frame["policy/probability"], probability)
    polars = pl.scan_ipc(parts).select("id", "policy/probability").collect()
    np.testing.assert_array_equal(polars["policy/probability"], probability)


def test_duckdb_queries_an_arrow_store(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    write(tmp_path / "s.arrow", layout="arrow").close()
    steps = ds.dataset(tmp_path / "s.arrow" / "data", format="ipc").scanner(
        columns=["id", "lane", "policy/probability"]
    )
    with duckdb.connect() as database:
        database.register("steps", steps)
        found = database.sql('select count(*), max("policy/probability") from steps where lane = 1').fetchall()
    assert found == [(STEPS, STEPS - 1 + 0.25)]


def test_the_schema_of_an_arrow_store_says_what_it_is(tmp_path: Path) -> None:
    write(tmp_path / "s.arrow", layout="arrow").close()
    schema = ds.dataset(tmp_path / "s.arrow" / "data", format="ipc").schema
    assert schema.metadata is not None
    assert json.loads(schema.metadata[b"diskbuf"])["batch_size"] == LANES
