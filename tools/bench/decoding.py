"""Measures decoding whole chunks of each layout.

The frames are made to compress as those of games do: a background of tiles of one shade, a few sprites that walk over
it, and noise in one pixel of a hundred. zstd makes them about eighteen times as small.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measure import GIGABYTES_PER_SECOND, Record, Target, against, interleave
from numpy.typing import NDArray

from diskbuf.store.chunk_format import ChunkFormat
from diskbuf.store.chunk_formats import chunk_format_of
from diskbuf.store.chunk_formats.codecs import codec_json
from diskbuf.store.layout import ColumnLayout

_SIDE = 84
_CODECS = ("zstd", "blosc", "lz4")
_SHARD_ROWS = 2048
_INNER_ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        shards: Shards of 2048 frames.
        rounds: Rounds.
    """

    shards: int = 6
    rounds: int = 15


QUICK = Size(shards=1, rounds=2)


def frames_like_games(count: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """Returns [count, 84, 84] frames: tiles of 12 by 12, sprites of 8 by 8 that walk a pixel a frame, noise."""
    rng = np.random.default_rng(seed)
    background = np.kron(rng.integers(0, 256, (7, 7), np.uint8), np.ones((12, 12), np.uint8))
    frames = np.repeat(background[None], count, axis=0)
    walks = (rng.integers(0, 76, (6, 2)) + rng.integers(-1, 2, (count, 6, 2)).cumsum(axis=0)) % 76
    for frame, places in zip(frames, walks, strict=True):
        for shade, (top, left) in enumerate(places):
            frame[top : top + 8, left : left + 8] = 40 * shade
    is_noisy = rng.random(frames.shape, np.float32) < 0.01
    frames[is_noisy] = rng.integers(0, 256, int(is_noisy.sum()), np.uint8)
    return frames


def measure_shards(folder: Path, size: Size) -> list[Record]:
    """Reading all frames of a zarr array of shards: ours, TensorStore's and zarr-python's way, from the page cache."""
    column = _column()
    frames = frames_like_games(size.shards * _SHARD_ROWS)[:, None]
    contenders: dict[str, Callable[[], float]] = {}
    for codec in _CODECS:
        made = codec_json("zarr", codec, level=None, inner_rows=_INNER_ROWS, layouts=[column])
        chunk_format = chunk_format_of([column], layout="zarr", codec=made)
        array = _write_array(folder / codec, chunk_format, frames)
        contenders[codec] = functools.partial(
            _rate, functools.partial(_decode_all, chunk_format, folder / codec), frames
        )
        contenders[f"{codec}_tensorstore"] = functools.partial(_rate, _reader_of_tensorstore(array), frames)
        contenders[f"{codec}_zarr"] = functools.partial(_rate, _reader_of_zarr(array), frames)
    for contender in contenders.values():
        contender()  # imports, and files that aren't in the page cache yet
    figures = interleave(contenders, rounds=size.rounds)
    return [
        against(
            f"decode_{codec}_vs_{peer}",
            f"decode shards of frames, codec={codec!r}",
            ours=figures[codec],
            peer=name,
            peer_figures=figures[f"{codec}_{peer}"],
            unit=GIGABYTES_PER_SECOND,
            target=Target(at_least=0.8) if peer == "tensorstore" else None,
        )
        for codec in _CODECS
        for peer, name in (("tensorstore", "TensorStore"), ("zarr", "zarr-python"))
    ]


def measure_arrow(folder: Path, size: Size) -> list[Record]:  # noqa: ARG001
    """Decoding one Arrow file, and one raw chunk, out of memory and into memory, against memcpy of as much."""
    column = _column()
    rows = frames_like_games(_SHARD_ROWS)[:, None]
    into = np.zeros_like(rows)
    contenders = {"copy": functools.partial(_rate_of_call, functools.partial(np.copyto, into, rows), rows.nbytes)}
    for layout in ("zarr", "arrow"):
        chunk_format = chunk_format_of([column], layout=layout, codec=None)
        data = bytes(chunk_format.encode(0, 0, [rows]))
        decode = functools.partial(chunk_format.decode, 0, 0, data, [into])
        contenders[layout] = functools.partial(_rate_of_call, decode, rows.nbytes)
    for contender in contenders.values():
        contender()
    figures = interleave(contenders, rounds=4 * size.rounds)
    return [
        against(
            f"decode_{layout}_vs_copy",
            f"decode {name}, {rows.nbytes / 1e6:.1f} MB",
            ours=figures[layout],
            peer="numpy.copyto of as much",
            peer_figures=figures["copy"],
            unit=GIGABYTES_PER_SECOND,
            target=Target(at_least=0.8),
        )
        for layout, name in (("zarr", "a raw chunk"), ("arrow", "an Arrow file"))
    ]


def _column() -> ColumnLayout:
    return ColumnLayout(
        path="frame",
        file_path="frame",
        dtype=np.dtype(np.uint8),
        shape=(_SIDE, _SIDE),
        lanes=1,
        chunk_rows=_SHARD_ROWS,
        slots=None,
    )


def _write_array(folder: Path, chunk_format: ChunkFormat, frames: NDArray[np.uint8]) -> Path:
    """Writes a real zarr array of whole shards, and returns its folder."""
    (column,) = chunk_format.layouts
    path = folder / column.file_path
    path.mkdir(parents=True)
    document = chunk_format.documents()[column.file_path]
    document["shape"] = list(frames.shape)
    (path / "zarr.json").write_text(json.dumps(document), encoding="utf-8")
    for chunk, start in enumerate(range(0, len(frames), column.chunk_rows)):
        data = chunk_format.encode(0, chunk, [frames[start : start + column.chunk_rows]])
        (folder / chunk_format.object_name(0, chunk)).write_bytes(data)
    return path


def _decode_all(chunk_format: ChunkFormat, folder: Path) -> NDArray[np.uint8]:
    (column,) = chunk_format.layouts
    chunks = len(list((folder / column.file_path).glob("c.*")))
    out = np.empty((chunks * column.chunk_rows, column.lanes, *column.shape), column.dtype)
    for chunk in range(chunks):
        data = (folder / chunk_format.object_name(0, chunk)).read_bytes()
        chunk_format.decode(0, chunk, data, [out[chunk * column.chunk_rows : (chunk + 1) * column.chunk_rows]])
    return out


def _reader_of_tensorstore(array: Path) -> Callable[[], Any]:
    import tensorstore

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{array.resolve()}/"}}
    store = tensorstore.open(spec, read=True).result()
    return lambda: store.read().result()


def _reader_of_zarr(array: Path) -> Callable[[], Any]:
    import zarr

    opened: Any = zarr.open_array(array, mode="r")
    return lambda: opened[:]


def _rate(read: Callable[[], NDArray[np.uint8]], frames: NDArray[np.uint8]) -> float:
    """GB/s of a read, which must be right."""
    start = time.perf_counter()
    found = read()
    seconds = time.perf_counter() - start
    if not np.array_equal(found, frames):
        raise RuntimeError("what was read must be what was written, but isn't.")
    return frames.nbytes / seconds / 1e9


def _rate_of_call(call: Callable[[], object], nbytes: int) -> float:
    start = time.perf_counter()
    call()
    return nbytes / (time.perf_counter() - start) / 1e9
