"""Servers and a file system for tests of remote stores, each a context manager: S3, Azure, the web, and a faulty one.

What they serve is what diskbuf.store.remote_objects reads and writes; they stand for the services, on this machine.
"""

import contextlib
import dataclasses
import email.utils
import functools
import http.server
import logging
import os
import re
import select
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.parse
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.registry import _registry  # nothing else takes a registration back
from fsspec.spec import AbstractFileSystem

ROOT = Path(__file__).resolve().parents[1]
AZURITE = "3.37.0"
AZURITE_FOLDER = ROOT / ".azurite" / AZURITE
AZURITE_FAILED = AZURITE_FOLDER.with_name("failed")
INSTALL_SECONDS = 20
START_SECONDS = 20


class UnavailableError(Exception):
    """A server that can't be started here; a test skips for this reason."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CloudServer:
    """A service that is running.

    Attributes:
        url: Of a bucket or container.
        storage_options: What fsspec's own client needs to reach it.
        obstore_options: The same for obstore's file system.
        endpoint: Where it listens.
    """

    url: str
    storage_options: dict[str, Any]
    obstore_options: dict[str, Any]
    endpoint: str


@contextlib.contextmanager
def s3_server() -> Iterator[CloudServer]:
    """Moto's S3, with one empty bucket."""
    import botocore.session
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it tells of each request
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint, key, secret, region = f"http://{host}:{port}", "key", "secret", "us-east-1"
    try:
        client = botocore.session.get_session().create_client(
            "s3", region, endpoint_url=endpoint, aws_access_key_id=key, aws_secret_access_key=secret
        )
        client.create_bucket(Bucket="bucket")
        client.close()
        yield CloudServer(
            url="s3://bucket",
            storage_options={"key": key, "secret": secret, "endpoint_url": endpoint},
            obstore_options={
                "access_key_id": key,
                "secret_access_key": secret,
                "region": region,
                "endpoint": endpoint,
                "client_options": {"allow_http": True},
            },
            endpoint=endpoint,
        )
    finally:
        server.stop()
        server._server.server_close()


@contextlib.contextmanager
def azure_server() -> Iterator[CloudServer]:
    """Azurite, Microsoft's emulator of Azure's blobs, with one empty container.

    Raises:
        UnavailableError: Without node and npm, or when Azurite takes too long to install.
    """
    from azure.storage.blob import BlobServiceClient

    node, script = _azurite()
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck"]
        process = subprocess.Popen(
            [node, script, *arguments, "--disableTelemetry"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
        try:
            endpoint = f"http://127.0.0.1:{_port_told_by(process)}/devstoreaccount1"
            # The account that every Azurite has; its key is in Azurite's documentation.
            key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
            connection_string = (
                f"DefaultEndpointsProtocol=http;AccountName=devstoreaccount1;AccountKey={key};BlobEndpoint={endpoint};"
            )
            with BlobServiceClient.from_connection_string(connection_string) as client:
                client.create_container("container")
            yield CloudServer(
                url="az://container",
                storage_options={"connection_string": connection_string},
                obstore_options={
                    "account_name": "devstoreaccount1",
                    "account_key": key,
                    "endpoint": endpoint,
                    "client_options": {"allow_http": True},
                },
                endpoint=endpoint,
            )
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


@functools.cache
def begin_installing_azurite() -> None:
    """Installs Azurite beside the tests, once, in the background: half a minute. It ends by itself, also after us."""
    npm = shutil.which("npm")
    if npm is None or AZURITE_FOLDER.exists():
        return
    AZURITE_FOLDER.parent.mkdir(exist_ok=True)
    AZURITE_FAILED.unlink(missing_ok=True)
    install = """
        folder=$(mktemp -d -p "$1") || exit
        timeout 300 "$2" install --prefix "$folder" --no-audit --no-fund --prefer-offline azurite@"$3" &&
            mv -T "$folder" "$1/$3" || touch "$4"
        rm -rf "$folder"
    """
    subprocess.run(
        ["sh", "-c", f"({install}) &", "sh", AZURITE_FOLDER.parent, npm, AZURITE, AZURITE_FAILED],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
    )


def _azurite() -> tuple[str, str]:
    """Node, and Azurite's script for it."""
    node = shutil.which("node")
    if node is None or shutil.which("npm") is None:
        raise UnavailableError("Azurite needs node and npm")
    begin_installing_azurite()
    deadline = time.monotonic() + INSTALL_SECONDS
    while not AZURITE_FOLDER.exists():
        if AZURITE_FAILED.exists():
            raise UnavailableError("npm can't install Azurite")
        if time.monotonic() > deadline:
            raise UnavailableError("Azurite is still being installed; the next run has it")
        time.sleep(0.1)
    return node, str(AZURITE_FOLDER / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js")


def _port_told_by(process: "subprocess.Popen[bytes]") -> int:
    told, deadline = b"", time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if select.select([process.stdout], [], [], 0.2)[0]:
            piece = os.read(process.stdout.fileno(), 4096)
            told += piece
            if found := re.search(rb"successfully listens on http://[^:]+:(\d+)|listening at http://[^:]+:(\d+)", told):
                return int(found[1] or found[2])
            if not piece:
                break
    raise UnavailableError(f"Azurite doesn't start: {told.decode(errors='replace')[-500:]}")


class WebServer:
    """What a web server serves, and what goes wrong.

    Attributes:
        url: Of the folder.
        requests: How often each path was asked for, by GET and HEAD alike; unquoted, without the first "/".
        ranges: The Range header of each GET, in order; "" without one.
        delay_seconds: Before each answer.
        knows_ranges: False answers every request with the whole file, as simple servers do.
    """

    def __init__(self, folder: Path, delay_seconds: float) -> None:
        self.folder = folder
        self.url = ""
        self.requests: Counter[str] = Counter()
        self.ranges: list[str] = []
        self.delay_seconds = delay_seconds
        self.knows_ranges = True
        self.lock = threading.Lock()
        self.faults: defaultdict[str, list[int | str]] = defaultdict(list)

    def fail(self, path: str, *faults: int | str) -> None:
        """The next answers for a path: a status, "half" of the body, a "reset" connection, or "slow", never at all."""
        with self.lock:
            self.faults[path].extend(faults)


@contextlib.contextmanager
def web_server(folder: Path, *, delay_seconds: float = 0.0) -> Iterator[WebServer]:
    """Serves a folder over http, ranges too."""
    site = WebServer(folder, delay_seconds)
    server = _Server(("127.0.0.1", 0), functools.partial(_Answer, site))
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, name="web server", daemon=True
    )
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is not this server's trouble."""


class _Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    wbufsize = -1

    def __init__(self, site: WebServer, *arguments: Any) -> None:
        self.site = site
        super().__init__(*arguments)

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, *_: Any) -> None:
        """Not a word on each request."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        name = urllib.parse.unquote(self.path).lstrip("/")
        asked = self.headers.get("Range", "")
        with self.site.lock:
            self.site.requests[name] += 1
            if self.command == "GET":
                self.site.ranges.append(asked)
            fault = self.site.faults[name].pop(0) if self.site.faults[name] else None
        time.sleep(self.site.delay_seconds)
        if isinstance(fault, int):
            self._tell(fault, b"")
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.connection.close()
            self.close_connection = True
        elif fault == "slow":
            self.rfile.read(1)  # until the client hangs up
            self.close_connection = True
        else:
            self._serve(name, asked, half=fault == "half")

    def _serve(self, name: str, asked: str, *, half: bool) -> None:
        path = self.site.folder / name
        if not path.is_file():
            return self._tell(404, b"")
        data, state = path.read_bytes(), path.stat()
        headers = {
            "ETag": f'"{state.st_mtime_ns:x}-{len(data):x}"',
            "Last-Modified": email.utils.formatdate(state.st_mtime, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked) if self.site.knows_ranges else None
        if found is None:
            return self._tell(200, data, headers, half=half)
        start, stop = int(found[1]), min(int(found[2] or len(data)) + 1, len(data))
        if start >= len(data):
            return self._tell(416, b"", {"Content-Range": f"bytes */{len(data)}"})
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        return self._tell(206, data[start:stop], headers, half=half)

    def _tell(self, status: int, body: bytes, headers: dict[str, str] | None = None, *, half: bool = False) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if half else body)
        if half:
            self.close_connection = True


class FaultyFiles(AbstractFileSystem):
    """A file system in this process's memory that does what remote ones are known to do.

    Attributes:
        objects: The bytes of each path.
        faults: What the next reads of a path do: raise an error, or leave out as many last bytes.
        requests: How often each path was read.
        put_seconds: How long an object is missing while it is overwritten.
        delay_seconds: Before each read.
        is_stale: Whether info and ls answer from the first listing of a folder until the cache is invalidated.
    """

    protocol = "faulty"
    objects: ClassVar[dict[str, bytes]] = {}
    faults: ClassVar[defaultdict[str, list[Exception | int]]] = defaultdict(list)
    requests: ClassVar[Counter[str]] = Counter()
    put_seconds: ClassVar[float] = 0.0
    delay_seconds: ClassVar[float] = 0.0
    is_stale: ClassVar[bool] = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.listed: dict[str, list[dict[str, Any]]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.partition("://")[2] if "://" in path else path

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        type(self).requests[path] += 1
        time.sleep(self.delay_seconds)
        fault = self.faults[path].pop(0) if self.faults[path] else 0
        if isinstance(fault, Exception):
            raise fault
        data = self._of(path)[start:end]
        return data[: len(data) - fault]

    def _of(self, path: str) -> bytes:
        try:
            return self.objects[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        if path in self.objects and self.put_seconds:
            del self.objects[path]
            time.sleep(self.put_seconds)
        self.objects[path] = value

    def rm_file(self, path: str) -> None:
        self._of(path)
        del self.objects[path]

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        folder = path.rstrip("/") + "/"
        if folder not in self.listed or not self.is_stale:
            there = {name: data for name, data in self.objects.copy().items() if name.startswith(folder)}
            self.listed[folder] = [{"name": name, "size": len(data), "type": "file"} for name, data in there.items()]
        found = self.listed[folder]
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        for entry in self.ls(path.rpartition("/")[0]):
            if entry["name"] == path:
                return entry
        raise FileNotFoundError(path)

    def invalidate_cache(self, path: str | None = None) -> None:
        self.listed.clear()


@contextlib.contextmanager
def faulty_files() -> Iterator[type[FaultyFiles]]:
    """`FaultyFiles` as ``faulty://``, empty and well."""
    fresh = {
        "objects": {},
        "faults": defaultdict(list),
        "requests": Counter(),
        "put_seconds": 0.0,
        "delay_seconds": 0.0,
        "is_stale": False,
    }
    kind = type("FaultyFiles", (FaultyFiles,), fresh)
    fsspec.register_implementation("faulty", kind, clobber=True)
    try:
        yield kind
    finally:
        _registry.pop("faulty")


@contextlib.contextmanager
def obstore_for(protocol: str) -> Iterator[None]:
    """Within, obstore is fsspec's client for a protocol."""
    from obstore.fsspec import register

    before = _registry.get(protocol)
    register(protocol)
    try:
        yield
    finally:
        _registry.pop(protocol)
        if before is not None:
            fsspec.register_implementation(protocol, before, clobber=True)
