"""Measures reading a store from a web server that takes 20 ms for each answer, beside plain range requests to it.

Once as fast as this machine sends bytes to itself, where copying them once more already shows, and once at the pace of
a network of 2.4 Gbit/s.

The server holds the store's files in memory, in a process of its own; the client is fsspec's, the same for both.
"""

import asyncio
import contextlib
import dataclasses
import functools
import math
import multiprocessing
import re
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from decoding import frames_like_games
from measure import GIGABYTES_PER_SECOND, Record, Target, Unit, against, interleave, single
from stored_layouts import write_frames

import diskbuf
from diskbuf import ReadOptions, StoreOptions

_DELAY_SECONDS = 0.02
_PACE_BYTES_PER_SECOND = 300e6
_PART_BYTES = 4 * 2**20
_REQUESTS = 16
_PIECE_BYTES = 2**18
_ROUND_TRIPS = Unit(label="round trips")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured.

    Attributes:
        frames: Frames in the store.
        rounds: Rounds.
    """

    frames: int = 2**16
    rounds: int = 7


QUICK = Size(frames=2**10, rounds=2)


def measure_streaming(folder: Path, size: Size) -> list[Record]:
    """A pass and random batches through a store at a URL, and the time to the first batch."""
    frames = frames_like_games(size.frames)
    write_frames(folder / "steps.zarr", frames, StoreOptions())
    with (
        _served(folder, _DELAY_SECONDS) as url,
        _served(folder, 0.0) as near_url,
        _served(folder, _DELAY_SECONDS, pace=_PACE_BYTES_PER_SECOND) as paced_url,
    ):
        store = f"{url}/steps.zarr"
        figures = interleave(
            {
                "plain": functools.partial(_plain_rate, folder, url),
                "gather_all": functools.partial(_gather_rate, store, frames.nbytes),
                "pass": functools.partial(_pass_rate, store, frames.nbytes),
                "resident": functools.partial(_resident_rate, store, frames.nbytes),
            },
            rounds=size.rounds,
        )
        paced = interleave(
            {
                "plain": functools.partial(_plain_rate, folder, paced_url),
                "pass": functools.partial(_pass_rate, f"{paced_url}/steps.zarr", frames.nbytes),
                "resident": functools.partial(_resident_rate, f"{paced_url}/steps.zarr", frames.nbytes),
            },
            rounds=max(2, size.rounds // 2),
        )
        first = interleave(
            {"far": functools.partial(_first_seconds, store), "near": lambda: _first_seconds(f"{near_url}/steps.zarr")},
            rounds=2 * size.rounds,
        )
    trips = [(far - near) / _DELAY_SECONDS for far, near in zip(first["far"], first["near"], strict=True)]
    whats = {
        "gather_all": "gather_all of frames over the web",
        "pass": "deterministic pass of frames over the web, 256 steps an element",
        "resident": "an epoch of random batches of 256, shuffle='resident'",
    }
    records = [
        against(
            f"streaming_{name}",
            what,
            ours=figures[name],
            peer="16 range requests at once",
            peer_figures=figures["plain"],
            unit=GIGABYTES_PER_SECOND,
            target=Target(at_least=0.8) if name == "pass" else None,
        )
        for name, what in whats.items()
    ]
    records += [
        against(
            f"streaming_paced_{name}",
            f"{whats[name]}, 300 MB/s",
            ours=paced[name],
            peer="16 range requests at once",
            peer_figures=paced["plain"],
            unit=GIGABYTES_PER_SECOND,
            target=Target(at_least=0.8),
        )
        for name in ("pass", "resident")
    ]
    what = "from the manifest to the first batch, over the same without the delay"
    return [
        *records,
        single("streaming_first", what, figures=trips, unit=_ROUND_TRIPS, target=Target(at_most=3)),
    ]


def _plain_rate(folder: Path, url: str) -> float:
    """GB/s of reading the same objects in ranges of 4 MiB, sixteen at a time."""
    import fsspec
    from fsspec.asyn import sync

    paths = sorted((folder / "steps.zarr" / "frame").glob("c.*"))
    ranges = [
        (f"{url}/{path.relative_to(folder)}", start, min(start + _PART_BYTES, path.stat().st_size))
        for path in paths
        for start in range(0, path.stat().st_size, _PART_BYTES)
    ]
    files = fsspec.filesystem("http", skip_instance_cache=True)

    async def read_all() -> int:
        free = asyncio.Semaphore(_REQUESTS)

        async def read(place: str, start: int, stop: int) -> int:
            async with free:
                return len(await files._cat_file(place, start, stop))

        return sum(await asyncio.gather(*(read(*wanted) for wanted in ranges)))

    start = time.perf_counter()
    read = sync(files.loop, read_all)
    return read / (time.perf_counter() - start) / 1e9


def _gather_rate(url: str, nbytes: int) -> float:
    start = time.perf_counter()
    with diskbuf.open(url, read_options=ReadOptions(cache_dir=":memory:", cache_bytes=2**28)) as buffer:
        buffer.gather_all()
    return nbytes / (time.perf_counter() - start) / 1e9


def _pass_rate(url: str, nbytes: int) -> float:
    start = time.perf_counter()
    with diskbuf.open(url, read_options=ReadOptions(cache_dir=":memory:", cache_bytes=2**28)) as buffer:
        for _ in buffer.as_numpy_iterator(1, 256, True):
            pass
    return nbytes / (time.perf_counter() - start) / 1e9


def _resident_rate(url: str, nbytes: int) -> float:
    start = time.perf_counter()
    with diskbuf.open(url, read_options=ReadOptions(cache_dir=":memory:", cache_bytes=2**28), seed=1) as buffer:
        batches = buffer.as_numpy_iterator(256, shuffle="resident")
        for _ in range(buffer.num_frames() // 256):
            next(batches)
    return nbytes / (time.perf_counter() - start) / 1e9


def _first_seconds(url: str) -> float:
    with diskbuf.open(url, read_options=ReadOptions(cache_dir=":memory:")) as buffer:
        start = time.perf_counter()
        next(buffer.as_numpy_iterator(1, 10, True))
        return time.perf_counter() - start


@contextlib.contextmanager
def _served(folder: Path, delay_seconds: float, *, pace: float = math.inf) -> Iterator[str]:
    """Serves the files of a folder as they are now, so many bytes a second in all; yields the URL."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    server = context.Process(target=_serve, args=(folder, delay_seconds, pace, there), daemon=True)
    server.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        server.kill()
        server.join()


def _serve(folder: Path, delay_seconds: float, pace: float, told: Connection) -> None:
    held = {f"/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    async def run() -> None:
        server = await asyncio.start_server(
            functools.partial(_answer, held, delay_seconds, _Pace(pace)), "127.0.0.1", 0, limit=2**20
        )
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


class _Pace:
    """A line that so many bytes a second go through, one answer's after the other's."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    async def take(self, count: int) -> None:
        """Waits until as many bytes have gone through."""
        self._free_at = max(self._free_at, time.monotonic()) + count / self._bytes_per_second
        await asyncio.sleep(self._free_at - time.monotonic())


async def _answer(
    held: dict[str, bytes],
    delay_seconds: float,
    pace: _Pace,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            text = (await reader.readuntil(b"\r\n\r\n")).decode()
            await asyncio.sleep(delay_seconds)
            body = held.get(text.split()[1])
            wanted = re.search(r"range: bytes=(\d+)-(\d+)", text, re.IGNORECASE)
            status, extra = ("404 Not Found", "") if body is None else ("200 OK", "")
            body = body or b""
            if wanted and body:
                start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(body))
                status, extra = "206 Partial Content", f"Content-Range: bytes {start}-{stop - 1}/{len(body)}\r\n"
                body = memoryview(body)[start:stop]
            writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode())
            for start in range(0, len(body), _PIECE_BYTES):
                await pace.take(len(body[start : start + _PIECE_BYTES]))
                writer.write(body[start : start + _PIECE_BYTES])
            await writer.drain()
