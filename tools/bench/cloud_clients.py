"""Measures fsspec's own clients beside obstore's: what chose the packages of the extra cloud.

Against servers of this machine: a quick one that holds bytes in memory, with and without 20 ms before each answer, and
moto's S3. Each client runs in a fresh process, through diskbuf's RemoteObjects.

    python tools/bench/cloud_clients.py
"""

import argparse
import asyncio
import contextlib
import importlib.metadata
import multiprocessing
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CLIENTS = ("s3fs", "obstore s3", "aiohttp", "obstore http")
PART_BYTES, PARTS = 4 * 2**20, 16
SMALL_BYTES, SMALL_GETS, SINGLE_GETS, PUTS, PUT_BYTES = 4096, 500, 50, 32, 2**20
ROUNDS = 5
LONGEST_SECONDS = 120


# A server that holds one object's bytes and takes what it is given: the client is what is measured


async def _answer(data: bytes, delay: float, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = {key.lower(): value for key, value in (line.split(": ", 1) for line in lines)}
            if "expect" in headers:
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            if length := int(headers.get("content-length", 0)):
                await reader.readexactly(length)
            await asyncio.sleep(delay)
            method, path, _ = first.split()
            status, body, extra = "200 OK", data, ""
            if fault := re.search(r"/status(\d+)", path):
                status, body = f"{fault[1]} Told", b""
            elif method == "PUT":
                body = b""
            elif found := re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", "")):
                start, stop = int(found[1]), min(int(found[2] or len(data)) + 1, len(data))
                if start >= len(data):
                    status, body = "416 Range Not Satisfiable", b""
                else:
                    status, body = "206 Partial Content", memoryview(data)[start:stop]
                    extra = f"Content-Range: bytes {start}-{stop - 1}/{len(data)}\r\n"
            head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{extra}"
            stamp = 'ETag: "abc"\r\nLast-Modified: Wed, 21 Oct 2015 07:28:00 GMT\r\n\r\n'
            writer.write((head + stamp).encode())
            if method != "HEAD":
                writer.write(body)
            await writer.drain()


def _serve(ports: Any, delay: float) -> None:
    async def serve() -> None:
        data = os.urandom(PARTS * PART_BYTES)
        server = await asyncio.start_server(lambda r, w: _answer(data, delay, r, w), "127.0.0.1", 0, limit=2**20)
        ports.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


def _serve_moto(ports: Any) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    import servers
    from fsspec import filesystem

    with servers.s3_server() as server:
        s3 = filesystem("s3", **server.storage_options)
        s3.pipe_file("bucket/x", os.urandom(PARTS * PART_BYTES))
        ports.send(int(server.endpoint.rpartition(":")[2]))
        time.sleep(3600)


@contextlib.contextmanager
def _running(serve: Callable[..., None], *arguments: Any) -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=serve, args=(sender, *arguments), daemon=True)
    process.start()
    try:
        if not receiver.poll(LONGEST_SECONDS):
            raise TimeoutError("the server doesn't start")
        yield f"http://127.0.0.1:{receiver.recv()}"
    finally:
        process.kill()
        process.join()


# The clients


def _objects(client: str, endpoint: str, **settings: Any) -> Any:
    from obstore.fsspec import register

    from diskbuf.store.remote_objects import RemoteObjects

    http = {"client_options": {"allow_http": True}}
    if client == "s3fs":
        options = {"key": "key", "secret": "secret", "endpoint_url": endpoint}
        return RemoteObjects("s3://bucket", storage_options=options, **settings)
    if client == "aiohttp":
        return RemoteObjects(f"{endpoint}/bucket", **settings)
    protocol = client.split()[1]
    register(protocol)
    if protocol == "http":
        return RemoteObjects(f"{endpoint}/bucket", storage_options=http, **settings)
    keys = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}
    return RemoteObjects("s3://bucket", storage_options={**keys, "endpoint": endpoint, **http}, **settings)


def _measure(results: Any, client: str, endpoint: str, quick: bool) -> None:
    from diskbuf.store.objects import ByteRange

    objects = _objects(client, endpoint)
    parts = [ByteRange(name="x", start=i * PART_BYTES, stop=(i + 1) * PART_BYTES) for i in range(PARTS)]
    # Far enough from each other not to become one request.
    count = SMALL_GETS if quick else SMALL_GETS // 10
    step = PARTS * PART_BYTES // count
    small = [ByteRange(name="x", start=i * step, stop=i * step + SMALL_BYTES) for i in range(count)]

    def seconds(work: Callable[[], Any]) -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    objects.read_many(parts)
    found = {
        "MiB/s": PARTS * PART_BYTES / 2**20 / min(seconds(lambda: objects.read_many(parts)) for _ in range(ROUNDS)),
        "one get ms": 1e3
        * statistics.median(seconds(lambda: objects.read_many(small[:1])) for _ in range(SINGLE_GETS)),
        "small gets/s": count / seconds(lambda: objects.read_many(small)),
    }
    if "s3" in client:
        data = os.urandom(PUT_BYTES)
        found["1 MiB puts/s"] = PUTS / seconds(lambda: [objects.write(f"y{i}", data) for i in range(PUTS)])
    objects.close()
    results.send(found)


def _errors(results: Any, client: str, endpoint: str) -> None:
    """What each status becomes, below and in ours."""
    from diskbuf.store.remote_objects import Retries

    objects, found = _objects(client, endpoint, retries=Retries(times=1, missing_times=0, wait_seconds=0.0)), {}
    for name, start in (("status404", 0), ("status403", 0), ("status503", 0), ("x", PARTS * PART_BYTES + 1)):
        try:
            objects.read(name, start, start + 10)
        except Exception as error:  # noqa: BLE001 - to be told
            below = error.__cause__
            found[name if start == 0 else "after the end"] = f"{type(below).__name__} -> {type(error).__name__}"
    objects.close()
    results.send(found)


def _import_seconds(results: Any, module: str) -> None:
    start = time.perf_counter()
    __import__(module)
    results.send(time.perf_counter() - start)


def _forked(results: Any, client: str, endpoint: str) -> None:
    """Whether a forked process reads, by fsspec alone: ours refuses obstore there."""
    objects = _objects(client, endpoint)
    objects.read("x", 0, 10)

    def read() -> None:
        copy = objects._class(**objects._options, skip_instance_cache=True)
        copy.cat_file("bucket/x" if "s3" in client else f"{endpoint}/bucket/x", start=0, end=10)

    child = multiprocessing.get_context("fork").Process(target=read, daemon=True)
    child.start()
    child.join(10)
    outcome = {0: "reads", None: "hangs"}.get(child.exitcode, "fails")
    child.kill()
    child.join()
    results.send(outcome)


def _in_a_fresh_process(work: Callable[..., None], *arguments: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(sender, *arguments))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(LONGEST_SECONDS) else "takes too long"
    except EOFError:
        return "fails"
    finally:
        process.kill()
        process.join()


def _installed(package: str, seen: set[str]) -> Iterator[tuple[str, int]]:
    """A package and those it needs, each with its bytes."""
    name = re.sub(r"[-_.]+", "-", package).lower()
    if name in seen:
        return
    seen.add(name)
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return
    paths = (Path(str(file.locate())) for file in found.files or ())
    yield name, sum(path.stat().st_size for path in paths if path.is_file())
    for need in found.requires or ():
        if "extra ==" not in need:
            yield from _installed(re.split(r"[^A-Za-z0-9_.-]", need, maxsplit=1)[0], seen)


def main() -> None:
    """Prints a table for each server, and what is to know besides."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for title, clients, quick, server in (
        ("a server in memory", CLIENTS, True, (_serve, 0.0)),
        ("the same, 20 ms before each answer", CLIENTS, True, (_serve, 0.02)),
        ("moto's S3", ("s3fs", "obstore s3"), False, (_serve_moto,)),
    ):
        print(f"\n{title}")
        with _running(*server) as endpoint:
            for client in clients:
                found = _in_a_fresh_process(_measure, client, endpoint, quick)
                numbers = found if isinstance(found, str) else "  ".join(f"{k} {v:8.1f}" for k, v in found.items())
                print(f"  {client:13} {numbers}", flush=True)
    print("\nerrors, below and ours; after a fork")
    with _running(_serve, 0.0) as endpoint:
        for client in CLIENTS:
            print(f"  {client:13} {_in_a_fresh_process(_errors, client, endpoint)}", flush=True)
            print(f"  {client:13} a forked child {_in_a_fresh_process(_forked, client, endpoint)}", flush=True)
    print("\nimport, packages with what they need")
    for module, package in (
        ("s3fs", "s3fs"),
        ("gcsfs", "gcsfs"),
        ("adlfs", "adlfs"),
        ("aiohttp", "aiohttp"),
        ("obstore.fsspec", "obstore"),
    ):
        seconds = statistics.median(_in_a_fresh_process(_import_seconds, module) for _ in range(3))
        sizes = dict(_installed(package, set()))
        print(f"  {package:8} {seconds * 1e3:4.0f} ms  {len(sizes):2} packages  {sum(sizes.values()) / 1e6:5.1f} MB")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:  # no keys of whoever runs this
        os.environ.update({"AWS_SHARED_CREDENTIALS_FILE": f"{home}/none", "AWS_CONFIG_FILE": f"{home}/none"})
        main()
