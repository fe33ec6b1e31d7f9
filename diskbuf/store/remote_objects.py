"""Objects at a URL, over fsspec: what is read there and written there, retried, checked, and its errors named.

Knows no format and no store. The clients of the protocols (s3fs, gcsfs, adlfs, aiohttp, obstore) are fsspec's; what
they raise becomes ours in `_translated`.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import errno
import os
import random
import re
import threading
import urllib.parse
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

from diskbuf.errors import (
    MissingExtraError,
    OptionError,
    ReadOnlyError,
    StoreAccessError,
    StoreCorruptError,
    StoreUnreachableError,
)
from diskbuf.store.objects import ByteRange, Objects

_Result = TypeVar("_Result")

# Ranges of one object that are this near are fetched as one: about what a request's round trip of 1 ms is worth at
# 100 MB/s, and little where a round trip takes longer.
_GAP_BYTES = 2**16

# Of the protocols that users of stores ask for; fsspec knows more, and takes them as well.
_CLOUD_PROTOCOLS = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "http", "https")
_HTTP_PROTOCOLS = ("http", "https")
_FOLDER_PROTOCOLS = ("file", "local", "memory")  # "?" and "#" are letters of their names

# Whose pipe_file can be seen half done: there we write beside the object, and move.
_PROTOCOLS_WITHOUT_WHOLE_PUTS = ("file", "local", "sftp", "ssh", "smb", "ftp", "arrow_hdfs", "hdfs", "webhdfs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retries:
    """How often and how patiently a request is tried again.

    Attributes:
        times: How often after a failure that can pass: a status of 5xx or 429, a timeout, a broken connection.
        missing_times: How often when an object isn't there; some stores overwrite by deleting first.
        wait_seconds: The first wait, doubled with each further one; a random part of up to a half is left out.
        longest_wait_seconds: Where the doubling ends.
        timeout_seconds: Longest time of one request.

    Raises:
        OptionError: When one is negative, or the timeout is 0.
    """

    times: int = 5
    missing_times: int = 3
    wait_seconds: float = 0.1
    longest_wait_seconds: float = 5.0
    timeout_seconds: float = 120.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value < 0 or (field.name == "timeout_seconds" and not value):
                raise OptionError(f"{field.name} must be positive, got {value}.")

    def wait(self, failures: int) -> float:
        """Seconds to wait after so many failures."""
        longest = min(self.wait_seconds * 2 ** (failures - 1), self.longest_wait_seconds)
        return float(longest * random.uniform(0.5, 1.0))


class RemoteObjects(Objects):
    """Objects below a URL that fsspec can open.

    Safe to be used by several threads. Goes to other processes pickled, and through a fork: each process makes its own
    connections. What obstore has connected does not survive a fork, and is refused there.

    Args:
        url: Where: ``s3://bucket/folder``, ``gs://``, ``az://``, ``https://`` (for reading), ``memory://``, ``file://``,
            or any other of fsspec's. Where the protocol has been registered with fsspec by ``obstore.fsspec.register``,
            obstore is the client.
        storage_options: What fsspec's file system of that protocol takes: keys, endpoints. Never shown in a message.
        concurrency: How many requests are under way at once.
        range_bytes: Longer ranges are fetched in parts of this size, at once.
        retries: How often and how patiently a request is tried again.

    Raises:
        OptionError: When the URL isn't one of a known protocol, holds a query, a fragment or a password, or when a
            number is below 1.
        MissingExtraError: When the package of that protocol isn't installed.
    """

    def __init__(
        self,
        url: str,
        *,
        storage_options: Mapping[str, Any] | None = None,
        concurrency: int = 16,
        range_bytes: int = 4 * 2**20,
        retries: Retries = Retries(),
    ) -> None:
        for name, number in {"concurrency": concurrency, "range_bytes": range_bytes}.items():
            if number < 1:
                raise OptionError(f"{name} must be at least 1, got {number}.")
        self._protocol = _checked_protocol(url)
        self._class = _file_system_class(self._protocol)
        self.url = url.rstrip("/") if not url.endswith("://") else url
        self._options = dict(storage_options or {})
        self._concurrency = concurrency
        self._range_bytes = range_bytes
        self._retries = retries
        self._lock = threading.Lock()
        self._connection: _Connection | None = None
        _ALL.add(self)

    def __repr__(self) -> str:
        """Without the options, which hold secrets."""
        return f"RemoteObjects({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its arguments; connections are the process's own."""
        arguments = {
            "storage_options": self._options,
            "concurrency": self._concurrency,
            "range_bytes": self._range_bytes,
            "retries": self._retries,
        }
        return _rebuilt, (self.url, arguments)

    def place(self, name: str) -> str:
        """Its URL."""
        if not name:
            return self.url
        # The names of leaves hold "%", which a URL of a web server takes for an escape.
        name = urllib.parse.quote(name) if self._protocol in _HTTP_PROTOCOLS else name
        return f"{self.url}{'' if self.url.endswith('/') else '/'}{name}"

    def read_many(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Reads all at once, near ranges of one object together and long ones in parts.

        Raises as the contract says; an object that isn't there, or is shorter, is looked for again first.
        """
        if not ranges:
            return []
        requests = plan_requests(ranges, gap_bytes=_GAP_BYTES, range_bytes=self._range_bytes)
        connection = self._connect()

        async def fetch(request: ByteRange) -> bytes:
            return await self._fetch(connection, request)

        parts = connection.run(_gathered([fetch(request) for request in requests]))
        return _cut(ranges, requests, parts)

    def read_into(self, name: str, into: memoryview) -> None:
        """Reads in parts, all at once, each of which goes to its place as soon as it is here."""
        connection = self._connect()

        async def fetch(request: ByteRange) -> None:
            into[request.start : request.stop] = await self._fetch(connection, request)

        whole = [ByteRange(name=name, start=0, stop=len(into))]
        requests = plan_requests(whole, gap_bytes=0, range_bytes=self._range_bytes) if into else []
        connection.run(_gathered([fetch(request) for request in requests]))

    async def _fetch(self, connection: "_Connection", wanted: ByteRange) -> bytes:
        """All bytes of a range, in one request."""
        place, path = self.place(wanted.name), connection.path(wanted.name)
        got, short = b"", None
        for _ in range(2):  # an object that is being replaced can be short for a moment
            try:
                got = await self._persist(connection, place, lambda: connection.cat(path, wanted.start, wanted.stop))
            except _BeyondTheEndError as error:
                got, short = b"", error
                continue
            if wanted.stop is None and (got or not wanted.start):
                return got
            if wanted.stop is not None and len(got) == wanted.stop - wanted.start:
                return got
            if wanted.stop is not None and len(got) > wanted.stop - wanted.start:
                raise StoreUnreachableError(
                    f"{place} must be on a server that answers requests for ranges, got {len(got)} bytes for "
                    f"{wanted.stop - wanted.start}. Serve it with one that does.",
                    path=place,
                )
        size = await self._persist(connection, place, lambda: connection.size(path))
        if wanted.stop is None and size == wanted.start:
            return b""
        end = wanted.start + len(got) if got else size
        raise StoreCorruptError(
            f"{place} must hold {wanted.start if wanted.stop is None else wanted.stop} bytes, but ends after {end}. "
            "Restore that object.",
            path=place,
        ) from short

    def size(self, name: str) -> int:
        """Its bytes, as the remote tells."""
        connection = self._connect()
        return connection.run(
            self._persist(connection, self.place(name), lambda: connection.size(connection.path(name)))
        )

    def version(self, name: str) -> str | None:
        """Its version, generation or ETag; of files inode, time and size."""
        connection = self._connect()
        return _version(
            connection.run(self._persist(connection, self.place(name), lambda: connection.info(connection.path(name))))
        )

    def write(self, name: str, data: bytes | memoryview) -> None:
        """Puts it; where a put can be seen half done, beside its place, and moves it there.

        Raises:
            ReadOnlyError: Over http and https.
            OSError: When it can't be written.
            StoreAccessError: When writing is refused.
            StoreUnreachableError: When it failed, and failed again after waiting.
        """
        self._refuse_web_servers(name, "written")
        connection, whole = self._connect(), data if isinstance(data, bytes) else bytes(data)
        put = self._persist(
            connection,
            self.place(name),
            lambda: connection.put(connection.path(name), whole),
            timeout_seconds=self._retries.timeout_seconds * (1 + len(whole) // self._range_bytes),
            missing_times=0,
        )
        connection.run(put)

    def delete(self, name: str) -> None:
        """Removes it; raises as `write`."""
        self._refuse_web_servers(name, "deleted")
        connection = self._connect()
        remove = self._persist(
            connection, self.place(name), lambda: connection.remove(connection.path(name)), missing_times=0
        )
        with contextlib.suppress(FileNotFoundError):
            connection.run(remove)

    def close(self) -> None:
        """Closes the connections of this process; the next use opens new ones."""
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _refuse_web_servers(self, name: str, verb: str) -> None:
        if self._protocol in _HTTP_PROTOCOLS:
            raise ReadOnlyError(
                f"{self.place(name)} can't be {verb}: {self._protocol}:// is for reading. Write through the protocol "
                "of the store behind it (s3://, gs://, az://)."
            )

    def _connect(self) -> "_Connection":
        with self._lock:
            if self._connection is None:
                self._connection = self._new_connection()
            return self._connection

    def _new_connection(self) -> "_Connection":
        _refuse_forked_obstore(self._class, self.url)
        options = _completed_options(self._class, self._options, self._concurrency)
        try:
            found = {**self._class._get_kwargs_from_urls(self.url), **options}
            file_system = self._class(**found, skip_instance_cache=True)
        except Exception as error:
            if isinstance(error, ImportError):  # a package that the client's own needs
                raise _missing_extra(self._protocol, error) from error
            if isinstance(error, ValueError | TypeError):
                raise OptionError(
                    f"storage_options must fit {self._protocol}://, but {self._class.__name__} refuses the "
                    f"{sorted(self._options)}. Opening {self.url}. See its documentation for what it takes."
                ) from error
            raise _translated(error, self.url) from error
        return _Connection(file_system, str(self._class._strip_protocol(self.url)), self._protocol, self._concurrency)

    async def _persist(
        self,
        connection: "_Connection",
        place: str,
        request: Callable[[], Awaitable[_Result]],
        *,
        timeout_seconds: float | None = None,
        missing_times: int | None = None,
    ) -> _Result:
        """The result of a request, tried again as `Retries` says; each failure is translated here."""
        failures, left = 0, {"passing": self._retries.times, "missing": self._retries.missing_times}
        if missing_times is not None:
            left["missing"] = missing_times
        while True:
            try:
                async with connection.turns, asyncio.timeout(timeout_seconds or self._retries.timeout_seconds):
                    return await request()
            except Exception as error:
                kind = _kind(error)
                if not left.get(kind):
                    ours = _translated(error, place)
                    if ours is error:
                        raise
                    raise ours from error
                left[kind] -= 1
            failures += 1
            await asyncio.sleep(self._retries.wait(failures))


def _rebuilt(url: str, arguments: dict[str, Any]) -> RemoteObjects:
    return RemoteObjects(url, **arguments)


# Every one of this process, and the connections that a fork left without a thread to serve them.
_ALL: "weakref.WeakSet[RemoteObjects]" = weakref.WeakSet()
_ABANDONED: "list[_Connection]" = []
# The process that first used obstore, whose threads a fork leaves behind.
_OBSTORE_PROCESS: list[int] = []


def _forget_connections() -> None:
    """In a forked child: its parent's connections are kept, so that nothing waits for a thread that isn't here."""
    for objects in _ALL:
        objects._lock = threading.Lock()
        if objects._connection is not None:
            _ABANDONED.append(objects._connection)
            objects._connection = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_connections)


class _Connection:
    """A file system of this process, and the thread that its requests run on."""

    def __init__(self, file_system: Any, root: str, protocol: str, concurrency: int) -> None:
        from fsspec.asyn import get_loop

        self._files = file_system
        self._root = root.rstrip("/")
        self._puts_whole = file_system.async_impl or protocol not in _PROTOCOLS_WITHOUT_WHOLE_PUTS
        self._loop: asyncio.AbstractEventLoop = file_system.loop if file_system.async_impl else get_loop()
        self._threads: concurrent.futures.ThreadPoolExecutor | None = None
        if not file_system.async_impl:
            self._threads = concurrent.futures.ThreadPoolExecutor(concurrency, thread_name_prefix="diskbuf-objects")
        self.turns = asyncio.Semaphore(concurrency)

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Waits for `work` on fsspec's thread; interrupted, it is cancelled there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def path(self, name: str) -> str:
        """What the file system calls an object."""
        name = urllib.parse.quote(name) if self._root.startswith(("http://", "https://")) else name
        return f"{self._root}/{name}" if self._root else name

    async def cat(self, path: str, start: int, stop: int | None) -> bytes:
        """Some bytes of an object; the file system may cut them short.

        Raises:
            _BeyondTheEndError: When it says that the range begins after the end.
        """
        if stop == start:
            size = await self.size(path)
            if size < start:
                raise _BeyondTheEndError
            return b""
        if stop is None and _is_obstore(type(self._files)) and start:
            stop = await self.size(path)  # it has no requests for "from here to the end"
            if stop <= start:
                raise _BeyondTheEndError
        # s3fs asks for the size first when it is to read a whole object; "from 0 on" is one request.
        begin = None if stop is None and not start and not hasattr(self._files, "_s3creator") else start
        try:
            return bytes(await self._call("cat_file", path, start=begin, end=stop))
        except Exception as error:
            if _status(error) == 416 or _says_range_is_beyond(error):
                raise _BeyondTheEndError from error
            raise

    async def info(self, path: str) -> dict[str, Any]:
        """What the file system knows of an object now; a folder isn't one."""
        self._files.invalidate_cache()
        found: dict[str, Any] = await self._call("info", path)
        if found.get("type") == "directory":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found

    async def size(self, path: str) -> int:
        """Bytes of an object."""
        size = (await self.info(path)).get("size")
        if size is None:
            raise OSError(errno.ENOTSUP, "its size isn't told", path)
        return int(size)

    async def put(self, path: str, data: bytes) -> None:
        """Puts an object, whole or not at all."""
        if self._puts_whole:
            await self._call("pipe_file", path, data)
        else:
            await self._call("_put_beside", path, data)
        self._files.invalidate_cache()

    def _put_beside(self, path: str, data: bytes) -> None:
        folder, _, name = path.rpartition("/")
        self._files.makedirs(folder, exist_ok=True)
        temporary = f"{folder}/.{name}.{os.getpid()}-{threading.get_ident()}.tmp"
        try:
            self._files.pipe_file(temporary, data)
            self._files.mv(temporary, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._files.rm_file(temporary)
            raise

    async def remove(self, path: str) -> None:
        """Removes an object."""
        await self._call("rm_file", path)
        self._files.invalidate_cache()

    async def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """One of the file system's methods: on its loop, or on one of our threads."""
        if self._threads is None:
            return await getattr(self._files, f"_{method}")(*arguments, **keywords)
        call = self._put_beside if method == "_put_beside" else getattr(self._files, method)
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: call(*arguments, **keywords))

    def close(self) -> None:
        """Closes what the clients leave open until they are collected."""
        if self._threads is not None:
            self._threads.shutdown()
        if self._loop.is_running():
            self.run(self._close_clients())

    async def _close_clients(self) -> None:
        files = self._files
        if (creator := getattr(files, "_s3creator", None)) is not None:  # s3fs
            await creator.__aexit__(None, None, None)
        elif (service := getattr(files, "service_client", None)) is not None:  # adlfs
            await service.close()
            if asyncio.iscoroutinefunction(getattr(files.credential, "close", None)):
                await files.credential.close()
        elif (session := getattr(files, "_session", None)) is not None:  # http, gcsfs
            await session.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Span:
    """A range among those asked for, or a request for some of them."""

    start: int
    stop: int


def plan_requests(ranges: Sequence[ByteRange], *, gap_bytes: int, range_bytes: int) -> list[ByteRange]:
    """The requests that fetch every byte of `ranges`: near ranges of one object as one, long ones in parts.

    Args:
        ranges: What is wanted.
        gap_bytes: Ranges with at most so many bytes between them are near.
        range_bytes: No request is longer, save for those up to an object's end.
    """
    requests = list(dict.fromkeys(wanted for wanted in ranges if wanted.stop is None or wanted.stop == wanted.start))
    by_name: dict[str, list[_Span]] = {}
    for wanted in ranges:
        if wanted.stop is not None and wanted.stop > wanted.start:
            by_name.setdefault(wanted.name, []).append(_Span(start=wanted.start, stop=wanted.stop))
    for name, spans in by_name.items():
        for span in _merged(spans, gap_bytes):
            requests.extend(
                ByteRange(name=name, start=start, stop=min(start + range_bytes, span.stop))
                for start in range(span.start, span.stop, range_bytes)
            )
    return requests


def _merged(spans: list[_Span], gap_bytes: int) -> list[_Span]:
    """Spans in order, those that overlap or are near as one."""
    merged: list[_Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if merged and span.start - merged[-1].stop <= gap_bytes:
            merged[-1] = _Span(start=merged[-1].start, stop=max(merged[-1].stop, span.stop))
        else:
            merged.append(span)
    return merged


def _cut(ranges: Sequence[ByteRange], requests: Sequence[ByteRange], parts: Sequence[bytes]) -> list[bytes]:
    """The bytes of each range, out of those of the requests that were planned for them."""
    whole = dict(zip(requests, parts, strict=True))
    by_name: dict[str, list[tuple[ByteRange, bytes]]] = {}
    for request, part in whole.items():
        if request.stop is not None:
            by_name.setdefault(request.name, []).append((request, part))
    results = []
    for wanted in ranges:
        if wanted in whole:
            results.append(whole[wanted])
            continue
        pieces = [
            part[max(wanted.start - request.start, 0) : wanted.stop - request.start]
            for request, part in by_name[wanted.name]
            if wanted.stop is not None and request.start < wanted.stop and wanted.start < request.start + len(part)
        ]
        results.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
    return results


async def _gathered(work: Sequence[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """All results; the first failure ends the others."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _BeyondTheEndError(Exception):
    """A range that begins after the end of its object."""


_Kind = Literal["missing", "refused", "passing", "beyond", "ours", "lasting"]

# Clients are optional, so their errors are known by the names of their classes and of their bases.
_REFUSED_NAMES = {
    "CredentialRetrievalError",  # botocore's
    "NoAuthTokenError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "ClientAuthenticationError",  # azure's
    "GoogleAuthError",
    "PermissionDeniedError",  # obstore's
    "UnauthenticatedError",
}
_PASSING_NAMES = {
    "BotoCoreError",  # what isn't an answer: endpoints, timeouts, bodies that end early
    "HTTPClientError",
    "ClientError",  # aiohttp's; botocore's of this name has a status
    "IncompleteReadError",
    "ServiceRequestError",  # azure's
    "ServiceResponseError",
    "TransportError",  # google's
    "RequestException",
    "ChecksumError",  # gcsfs'
    "GenericError",  # obstore's: everything that has no class of its own, 5xx too
    "JoinError",
}


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what caused it, outermost first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__
    return chain


def _status(error: BaseException) -> int | None:
    """The status of the answer behind an error, None where there is none."""
    for link in _chain(error):
        response = getattr(link, "response", None)  # botocore's
        values = [response.get("ResponseMetadata", {}).get("HTTPStatusCode")] if isinstance(response, dict) else []
        values += [getattr(link, "status", None), getattr(link, "status_code", None)]  # aiohttp's, azure's
        if type(link).__name__ == "HttpError":  # gcsfs'; a code of aiohttp's can be its own, when a body ends early
            values.append(getattr(link, "code", None))
        for value in values:
            if str(value).isdecimal() and 100 <= int(str(value)) < 600:
                return int(str(value))
    return None


def _says_range_is_beyond(error: BaseException) -> bool:
    """Whether obstore found out for itself, after an answer that it took for a right one."""
    told = r"InvalidRange|range start(ing|ed) at|Requested range was invalid|416 Range Not Satisfiable"
    return type(error).__name__ == "GenericError" and re.search(told, str(error), re.IGNORECASE) is not None


def _kind(error: BaseException) -> _Kind:
    """What an error of whatever client means to us."""
    if isinstance(error, _BeyondTheEndError):
        return "beyond"
    if isinstance(error, StoreAccessError | StoreUnreachableError | StoreCorruptError | OptionError):
        return "ours"
    names = {base.__name__ for link in _chain(error) for base in type(link).__mro__}
    status = _status(error)
    if status is not None and status >= 400:
        if status in (401, 403, 407):
            return "refused"
        if status in (404, 410):
            return "missing"
        return "passing" if status in (408, 425, 429) or status >= 500 else "lasting"
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "missing"
    # google's TransportError is also a GoogleAuthError; gcsfs tells 403 by its text alone, and obstore asks the address
    # of a cloud machine's own metadata when it has no credentials.
    if "TransportError" not in names and names & _REFUSED_NAMES:
        return "refused"
    if isinstance(error, PermissionError) or (isinstance(error, OSError) and str(error).startswith("Forbidden: ")):
        return "refused"
    if "GenericError" in names and re.search(r"169\.254\.|metadata\.google", str(error)):
        return "refused"
    if isinstance(error, TimeoutError | ConnectionError | EOFError) or names & _PASSING_NAMES:
        return "passing"
    if isinstance(error, OSError) and error.errno in (errno.EREMOTEIO, errno.EBUSY):  # s3fs' 5xx
        return "passing"
    return "lasting"


def _translated(error: Exception, place: str) -> Exception:
    """Our error for one of a client's, which is its cause. The only place where they are told apart."""
    kind, status = _kind(error), _status(error)
    got = type(error).__name__ if status is None else f"status {status}"
    if isinstance(error, TypeError):  # names the option that isn't known, and not what it was
        got = f"{got}: {' '.join(str(error).split()):.200}"
    if kind in ("ours", "beyond"):
        return error
    if kind == "missing":
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), place)
    if kind == "refused":
        return StoreAccessError(
            f"{place} must be open to us, got {got}. Check the credentials, in storage_options or where the protocol's "
            "client looks for them, and what they allow.",
            path=place,
        )
    if kind == "lasting" and isinstance(error, OSError) and status is None and error.errno is not None:
        return error  # a full disk, a name that is too long
    tries, check = (" each time", "the network") if kind == "passing" else ("", "storage_options")
    return StoreUnreachableError(
        f"{place} must answer, got {got}{tries}. Check {check} and the service, then try again.", path=place
    )


def _version(info: Mapping[str, Any]) -> str | None:
    """Letters, digits and "-" that change with the object; None where the remote tells nothing of the kind."""
    for key in ("VersionId", "version_id", "generation", "version", "ETag", "etag", "e_tag"):
        if (value := info.get(key)) not in (None, "", "null"):
            return re.sub(r"[^A-Za-z0-9]", lambda match: f"-{ord(match[0]):02x}", str(value).strip('"'))
    if "ino" in info and "mtime" in info:  # files
        return f"{info['ino']}-{int(info['mtime'] * 1e9)}-{info['size']}"
    if "created" in info and hasattr(info["created"], "timestamp"):  # memory
        return f"{int(info['created'].timestamp() * 1e6)}-{info['size']}"
    return None


def _checked_protocol(url: str) -> str:
    """The protocol of a URL.

    Raises:
        OptionError: When it has none, or holds what we don't take.
    """
    protocol, separator, rest = url.partition("://")
    if not separator or "::" in url:
        raise OptionError(
            f"url must be one URL such as s3://bucket/folder, got {_shown(url)!r}. A folder of this machine is a path."
        )
    if protocol not in _FOLDER_PROTOCOLS:
        authority = rest.partition("/")[0].rpartition("@")[0]
        if ":" in authority or (authority and protocol in _HTTP_PROTOCOLS):
            raise OptionError(f"url must hold no password, got {_shown(url)!r}. Put it in storage_options.")
        if "?" in rest or "#" in rest:
            raise OptionError(
                f"url must be of a folder, without query and fragment, got {_shown(url)!r}. "
                "What a signature allows is one object; give credentials in storage_options."
            )
    return protocol


def _shown(url: str) -> str:
    """A URL without what may be secret in it."""
    return re.sub(r"(?<=://)[^/@]*:[^/@]*@", "…@", re.sub(r"[?#].*", "?…", url))


def _file_system_class(protocol: str) -> Any:
    """The file system that fsspec has for a protocol.

    Raises:
        OptionError: When fsspec knows none.
        MissingExtraError: When its package isn't installed.
    """
    import fsspec

    try:
        return fsspec.get_filesystem_class(protocol)
    except ValueError as error:
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise OptionError(f"url must begin with a protocol that fsspec knows ({known}), got {protocol}://.") from error
    except ImportError as error:
        raise _missing_extra(protocol, error) from error


def _missing_extra(protocol: str, error: ImportError) -> MissingExtraError:
    if protocol in _CLOUD_PROTOCOLS:
        return MissingExtraError(
            f"{protocol}:// needs a package that isn't installed. Install it with: pip install 'diskbuf[cloud]'."
        )
    return MissingExtraError(f"{protocol}:// needs a package that isn't installed. fsspec says: {error}.")


def _is_obstore(file_system_class: Any) -> bool:
    return any(base.__module__.split(".")[0] == "obstore" for base in file_system_class.__mro__)


def _refuse_forked_obstore(file_system_class: Any, url: str) -> None:
    """A fork leaves the threads of obstore behind, and what is asked of it there is never answered (0.12)."""
    if not _is_obstore(file_system_class):
        return
    if not _OBSTORE_PROCESS:
        _OBSTORE_PROCESS.append(os.getpid())
    if _OBSTORE_PROCESS[0] != os.getpid():
        raise OptionError(
            f"obstore must be used in processes that are spawned, got one that was forked from one that had used it. "
            f"Reading {url}. Start it with multiprocessing's 'spawn' or 'forkserver', or use fsspec's own client."
        )


def _completed_options(file_system_class: Any, options: Mapping[str, Any], concurrency: int) -> dict[str, Any]:
    """storage_options, and what we set where they say nothing: we retry, so the clients need not, and don't list."""
    if _is_obstore(file_system_class):
        return {"retry_config": {"max_retries": 0}, **options}
    completed = {"use_listings_cache": False, **options}
    names = {base.__name__ for base in file_system_class.__mro__}
    if "S3FileSystem" in names:
        config = {"max_pool_connections": max(concurrency, 10), "retries": {"total_max_attempts": 1}}
        completed["config_kwargs"] = {**config, **options.get("config_kwargs", {})}
    elif "HTTPFileSystem" in names:  # ranges are of the bytes that are stored, not of packed ones
        completed["headers"] = {"Accept-Encoding": "identity", **options.get("headers", {})}
    return completed
