"""One contract for files in a folder and for objects at a URL; what only remote ones meet: failures, forks, caches."""

import multiprocessing
import os
import pickle
import queue
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import servers
from hypothesis import given
from hypothesis import strategies as st

import diskbuf
from diskbuf.store.objects import ByteRange, LocalObjects, Objects
from diskbuf.store.remote_objects import RemoteObjects, Retries, plan_requests

# As many tries as ever, without the waiting.
QUICK = Retries(wait_seconds=0.001, timeout_seconds=10.0)
CHILD_SECONDS = 20
# What a leaf named "a b/ü" is called (Structure.file_paths), below a folder.
ODD_NAME = "data/a%20b%2F%C3%BC/c/0"

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*multi-threaded.*fork:DeprecationWarning"  # Python 3.12 warns of what these tests are about
)


@pytest.fixture(scope="module", autouse=True)
def azurite_in_the_making() -> None:
    servers.begin_installing_azurite()


@pytest.fixture(scope="module")
def s3() -> Iterator[servers.CloudServer]:
    with servers.s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def azure() -> Iterator[servers.CloudServer]:
    try:
        with servers.azure_server() as server:
            yield server
    except servers.UnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture
def web(tmp_path: Path) -> Iterator[servers.WebServer]:
    with servers.web_server(tmp_path) as server:
        yield server


@pytest.fixture
def faulty() -> Iterator[type[servers.FaultyFiles]]:
    with servers.faulty_files() as files:
        yield files


class ObjectsContract:
    """What every implementation keeps; `writer` writes to the place that `objects` reads."""

    @pytest.fixture
    def objects(self) -> Iterator[Objects]:
        raise NotImplementedError

    @pytest.fixture
    def writer(self, objects: Objects) -> Objects:
        return objects

    def test_what_is_written_reads_back(self, objects: Objects, writer: Objects) -> None:
        data = os.urandom(300_000)
        writer.write("a/b", data)
        assert objects.read("a/b") == data
        assert objects.size("a/b") == len(data)

    def test_a_memoryview_is_written_as_its_bytes(self, objects: Objects, writer: Objects) -> None:
        writer.write("a", memoryview(b"0123456789")[2:5])
        assert objects.read("a") == b"234"

    def test_ranges_are_slices_in_the_order_asked_for(self, objects: Objects, writer: Objects) -> None:
        data = {name: os.urandom(250_000) for name in ("one", "two/three")}
        for name, content in data.items():
            writer.write(name, content)
        ranges = [
            ByteRange(name=name, start=start, stop=stop)
            for start, stop in ((200_000, 200_001), (0, 7), (3, 12), (0, None), (249_990, None), (1, 249_999), (5, 5))
            for name in data
        ]
        ranges += ranges[:3]
        assert objects.read_many(ranges) == [data[r.name][r.start : r.stop] for r in ranges]
        assert objects.read_many([]) == []

    def test_an_empty_object_is_read_as_no_bytes(self, objects: Objects, writer: Objects) -> None:
        writer.write("empty", b"")
        assert objects.read("empty") == b""
        assert objects.size("empty") == 0

    def test_nothing_is_left_to_read_at_the_end(self, objects: Objects, writer: Objects) -> None:
        writer.write("a", b"0123456789")
        assert objects.read("a", 10) == b""
        assert objects.read("a", 10, 10) == b""

    @pytest.mark.parametrize(("start", "stop"), [(0, 11), (9, 12), (10, 11), (11, 15), (11, None), (11, 11)])
    def test_a_range_that_the_object_does_not_hold_is_damage(
        self, objects: Objects, writer: Objects, start: int, stop: int | None
    ) -> None:
        writer.write("short", b"0123456789")
        message = f"{re.escape(objects.place('short'))} must hold {stop or start} bytes, but ends after 10"
        with pytest.raises(diskbuf.StoreCorruptError, match=message) as caught:
            objects.read("short", start, stop)
        assert caught.value.path == objects.place("short")

    def test_a_missing_object_is_named(self, objects: Objects, writer: Objects) -> None:
        writer.write("there", b"1")
        for read in (objects.read, objects.size, lambda name: objects.read(name, 3, 5)):
            with pytest.raises(FileNotFoundError, match=re.escape(objects.place("not/there"))):
                read("not/there")
        with pytest.raises(FileNotFoundError, match=re.escape(objects.place("not/there"))):
            objects.read_many([ByteRange(name="there"), ByteRange(name="not/there")])

    def test_the_names_of_odd_leaves_are_taken_as_they_are(self, objects: Objects, writer: Objects) -> None:
        writer.write(ODD_NAME, b"odd")
        assert objects.read(ODD_NAME) == b"odd"
        assert objects.read(ODD_NAME, 1, 2) == b"d"
        assert objects.size(ODD_NAME) == 3
        with pytest.raises(FileNotFoundError):
            objects.read("data/a b/ü/c/0")

    def test_an_overwritten_object_is_the_new_one_with_another_version(self, objects: Objects, writer: Objects) -> None:
        writer.write("a", b"first")
        assert objects.read("a") == b"first"
        first = objects.version("a")
        assert objects.version("a") == first
        writer.write("a", b"second one")
        assert objects.read("a") == b"second one"
        assert objects.size("a") == 10
        second = objects.version("a")
        assert first is not None
        assert second is not None
        assert first != second
        assert re.fullmatch(r"[A-Za-z0-9-]+", second)

    def test_a_deleted_object_is_missing_and_may_be_deleted_again(self, objects: Objects, writer: Objects) -> None:
        writer.write("a/b", b"1")
        writer.delete("a/b")
        writer.delete("a/b")
        with pytest.raises(FileNotFoundError):
            objects.read("a/b")

    def test_threads_read_beside_each_other(self, objects: Objects, writer: Objects) -> None:
        writer.write("a", bytes(range(256)))
        got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threads = [
            threading.Thread(target=lambda i=i: got.put(objects.read("a", i, i + 10)), daemon=True) for i in range(8)
        ]
        for thread in threads:
            thread.start()
        read = {got.get(timeout=20) for _ in threads}
        assert read == {bytes(range(i, i + 10)) for i in range(8)}
        for thread in threads:
            thread.join(5)

    def test_closing_twice_is_fine(self, objects: Objects, writer: Objects) -> None:
        writer.write("a", b"1")
        assert objects.read("a") == b"1"
        objects.close()
        objects.close()


class TestLocal(ObjectsContract):
    @pytest.fixture
    def objects(self, tmp_path: Path) -> Objects:
        return LocalObjects(tmp_path)


class RemoteContract(ObjectsContract):
    """What remote ones keep besides."""

    def test_a_pickled_copy_reads(self, objects: Objects, writer: Objects) -> None:
        writer.write("a", b"123")
        copy = pickle.loads(pickle.dumps(objects))
        assert copy.read("a") == b"123"
        copy.close()

    def test_a_closed_one_opens_again(self, objects: Objects, writer: Objects) -> None:
        writer.write("a", b"123")
        objects.close()
        assert objects.read("a") == b"123"

    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    def test_a_child_reads_after_its_parent_has_read(self, objects: Objects, writer: Objects, method: str) -> None:
        writer.write("a", b"123")
        assert objects.read("a") == b"123"
        assert read_in_a_child(objects, "a", method) == b"123"
        assert objects.read("a") == b"123"


def read_in_a_child(objects: Objects, name: str, method: str) -> bytes:
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_what_is_read, args=(objects, name, sender), daemon=True)
    child.start()
    sender.close()
    try:
        assert receiver.poll(CHILD_SECONDS), f"a child by {method} doesn't read"
        got: Any = receiver.recv()
        child.join(CHILD_SECONDS)
        assert child.exitcode == (0 if isinstance(got, bytes) else 1)
    finally:
        receiver.close()
        child.kill()
        child.join()
        child.close()
    if isinstance(got, str):
        pytest.fail(got)
    return bytes(got)


def _send_what_is_read(objects: Objects, name: str, sender: Any) -> None:
    try:
        sender.send(objects.read(name))
        objects.close()
    except BaseException:
        sender.send(traceback.format_exc())
        raise


class TestMemory(RemoteContract):
    @pytest.fixture
    def objects(self, tmp_path: Path) -> Iterator[Objects]:
        with opened(f"memory://{tmp_path.name}") as objects:
            yield objects

    @pytest.mark.parametrize("method", ["fork"])  # another process has another memory
    def test_a_child_reads_after_its_parent_has_read(self, objects: Objects, writer: Objects, method: str) -> None:
        super().test_a_child_reads_after_its_parent_has_read(objects, writer, method)


class TestFile(RemoteContract):
    @pytest.fixture
    def objects(self, tmp_path: Path) -> Iterator[Objects]:
        with opened(f"file://{tmp_path}") as objects:
            yield objects

    def test_nothing_but_the_object_is_left_in_the_folder(self, objects: Objects, tmp_path: Path) -> None:
        objects.write("a", b"1")
        objects.write("a", b"2")
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


class TestWeb(RemoteContract):
    @pytest.fixture
    def objects(self, web: servers.WebServer) -> Iterator[Objects]:
        with opened(web.url) as objects:
            yield objects

    @pytest.fixture
    def writer(self, tmp_path: Path) -> Objects:
        return LocalObjects(tmp_path)


class TestS3(RemoteContract):
    @pytest.fixture
    def objects(self, s3: servers.CloudServer, tmp_path: Path) -> Iterator[Objects]:
        with opened(f"{s3.url}/{tmp_path.name}", s3.storage_options) as objects:
            yield objects

    def test_another_process_s_objects_are_seen_with_the_listing_cache_on(
        self, objects: Objects, s3: servers.CloudServer
    ) -> None:
        options = {**s3.storage_options, "use_listings_cache": True}
        with opened(objects.place(""), options) as reader:
            objects.write("old", b"1")
            reader._connect()._files.ls(reader._connect()._root)  # the cache now holds what is there
            for commit in range(5):
                objects.write("old", bytes(commit + 2))
                objects.write(f"new{commit}", b"123")
                assert reader.size("old") == len(reader.read("old")) == commit + 2
                assert reader.size(f"new{commit}") == len(reader.read(f"new{commit}")) == 3

    def test_no_credentials_are_an_access_error(
        self, s3: servers.CloudServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        options = {"endpoint_url": s3.endpoint}
        with opened(s3.url, options) as objects:
            with pytest.raises(diskbuf.StoreAccessError, match=r"s3://bucket/a must be open to us, got NoCredentials"):
                objects.read("a")
            with pytest.raises(diskbuf.StoreAccessError, match=r"s3://bucket/a must be open to us"):
                objects.write("a", b"1")

    def test_a_large_object_goes_in_parts_and_comes_whole(self, objects: Objects) -> None:
        data = os.urandom(2**20) * 101  # s3fs puts what is longer than 100 MB in parts
        objects.write("large", data)
        assert objects.read("large") == data


class TestS3WithObstore(RemoteContract):
    @pytest.fixture
    def objects(self, s3: servers.CloudServer, tmp_path: Path) -> Iterator[Objects]:
        with servers.obstore_for("s3"), opened(f"{s3.url}/{tmp_path.name}", s3.obstore_options) as objects:
            yield objects

    # In a spawned process fsspec's own client would be asked, unless that process registers obstore too.
    @pytest.mark.parametrize("method", ["fork"])
    def test_a_child_reads_after_its_parent_has_read(self, objects: Objects, writer: Objects, method: str) -> None:
        """It is refused at once; obstore itself waits for ever."""
        writer.write("a", b"123")
        assert objects.read("a") == b"123"
        with pytest.raises(
            pytest.fail.Exception, match="OptionError: obstore must be used in processes that are spawned"
        ):
            read_in_a_child(objects, "a", method)

    def test_no_connection_is_an_error_of_the_store(self, objects: Objects) -> None:
        options = {"skip_signature": True, "endpoint": "http://127.0.0.1:9", "client_options": {"allow_http": True}}
        with (
            opened("s3://bucket", options) as elsewhere,
            pytest.raises(
                diskbuf.StoreUnreachableError, match=r"s3://bucket/a must answer, got GenericError each time"
            ),
        ):
            elsewhere.read("a")


class TestAzure(RemoteContract):
    @pytest.fixture
    def objects(self, azure: servers.CloudServer, tmp_path: Path) -> Iterator[Objects]:
        with opened(f"{azure.url}/{tmp_path.name}", azure.storage_options) as objects:
            yield objects


class TestAzureWithObstore(TestAzure):
    @pytest.fixture
    def objects(self, azure: servers.CloudServer, tmp_path: Path) -> Iterator[Objects]:
        with servers.obstore_for("az"), opened(f"{azure.url}/{tmp_path.name}", azure.obstore_options) as objects:
            yield objects

    test_a_child_reads_after_its_parent_has_read = None  # see TestS3WithObstore


class opened:  # noqa: N801 - reads as a function
    """RemoteObjects with small parts and no waiting, closed at the end."""

    def __init__(self, url: str, options: dict[str, Any] | None = None, *, retries: Retries = QUICK) -> None:
        self.objects = RemoteObjects(url, storage_options=options, range_bytes=2**16, retries=retries)

    def __enter__(self) -> RemoteObjects:
        return self.objects

    def __exit__(self, *_: object) -> None:
        self.objects.close()


# What goes wrong on the way


def test_a_store_that_is_busy_and_then_misses_the_chunk_is_asked_again_and_named(
    web: servers.WebServer, tmp_path: Path
) -> None:
    (tmp_path / "chunk").write_bytes(b"")
    web.fail("chunk", 503, 503, *[404] * 9)
    with opened(web.url) as objects, pytest.raises(FileNotFoundError, match=f"{web.url}/chunk"):
        objects.read("chunk", 0, 4)
    assert web.requests["chunk"] == 2 + 1 + QUICK.missing_times


@pytest.mark.parametrize("fault", [500, 503, 429, 404, "half", "reset"])
def test_what_passes_is_tried_again(web: servers.WebServer, tmp_path: Path, fault: int | str) -> None:
    (tmp_path / "a").write_bytes(bytes(1000))  # of zeros, which are data as well
    web.fail("a", fault, fault)
    with opened(web.url) as objects:
        assert objects.read("a") == bytes(1000)
        assert web.requests["a"] == 3
        web.fail("a", fault, fault)
        assert objects.read("a", 10, 500) == bytes(490)


@pytest.mark.parametrize("fault", [503, "half", "reset"])
def test_what_does_not_pass_is_an_error_that_names_the_object(
    web: servers.WebServer, tmp_path: Path, fault: int | str
) -> None:
    (tmp_path / "a").write_bytes(bytes(1000))
    web.fail("a", *[fault] * 100)
    with opened(web.url) as objects, pytest.raises(diskbuf.StoreUnreachableError, match=f"{web.url}/a must") as caught:
        objects.read("a")
    assert caught.value.path == f"{web.url}/a"
    assert caught.value.__cause__ is not None
    tries = 1 + QUICK.times
    assert tries <= web.requests["a"] <= 2 * tries  # aiohttp, too, asks again after a reset


def test_a_server_that_never_answers_is_given_up(web: servers.WebServer, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    web.fail("a", *["slow"] * 9)
    impatient = Retries(times=2, wait_seconds=0.001, timeout_seconds=0.1)
    with (
        opened(web.url, retries=impatient) as objects,
        pytest.raises(diskbuf.StoreUnreachableError, match="must answer, got TimeoutError each time"),
    ):
        objects.read("a")


def test_nobody_at_the_address_is_an_error_that_names_the_object() -> None:
    with (
        opened("http://127.0.0.1:9/x") as objects,
        pytest.raises(diskbuf.StoreUnreachableError, match=r"http://127\.0\.0\.1:9/x/a must answer"),
    ):
        objects.read("a")


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_told_at_once(web: servers.WebServer, tmp_path: Path, status: int) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    web.fail("a", status)
    with (
        opened(web.url) as objects,
        pytest.raises(diskbuf.StoreAccessError, match=f"a must be open to us, got status {status}"),
    ):
        objects.read("a")
    assert web.requests["a"] == 1


@pytest.mark.parametrize("status", [401, 403, 503])
def test_a_size_that_is_refused_is_not_taken_for_a_missing_object(
    web: servers.WebServer, tmp_path: Path, status: int
) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    web.fail("a", *[status] * 99)
    with opened(web.url) as objects, pytest.raises((diskbuf.StoreAccessError, diskbuf.StoreUnreachableError)):
        objects.size("a")


def test_a_server_without_ranges_is_refused(web: servers.WebServer, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1000))
    web.knows_ranges = False
    with opened(web.url) as objects:
        assert objects.read("a") == bytes(1000)
        with pytest.raises(
            diskbuf.StoreUnreachableError, match="a must be on a server that answers requests for ranges"
        ):
            objects.read("a", 100, 200)


def test_an_answer_that_is_short_is_asked_for_once_more(faulty: type[servers.FaultyFiles]) -> None:
    faulty.objects["x/a"] = b"0123456789"
    faulty.faults["x/a"] = [3]
    with opened("faulty://x") as objects:
        assert objects.read("a", 2, 8) == b"234567"
        assert faulty.requests["x/a"] == 2
        faulty.faults["x/a"] = [3, 3]
        with pytest.raises(diskbuf.StoreCorruptError, match="faulty://x/a must hold 8 bytes, but ends after 5"):
            objects.read("a", 2, 8)


def test_a_reader_never_fails_while_an_object_is_deleted_and_put(faulty: type[servers.FaultyFiles]) -> None:
    faulty.put_seconds = 0.01
    reads: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    with opened("faulty://x", retries=Retries(missing_times=9, wait_seconds=0.005)) as objects:
        objects.write("a", b"0")

        def overwrite() -> None:
            for number in range(1, 10):
                reads.get(timeout=20)
                objects.write("a", b"%d" % number)

        thread = threading.Thread(target=overwrite, daemon=True)
        thread.start()
        last = b""
        while last != b"9":
            last = objects.read("a")
            reads.put(last)
        thread.join(5)
    assert faulty.requests["x/a"] > reads.qsize() + 9  # it was missing at times


def test_a_stale_listing_hides_nothing(faulty: type[servers.FaultyFiles]) -> None:
    faulty.is_stale = True
    with opened("faulty://x") as objects:
        objects.write("a", b"1")
        assert objects.size("a") == 1
        faulty.objects["x/a"] = b"22"  # another process
        faulty.objects["x/b"] = b"333"
        assert objects.size("a") == 2
        assert objects.size("b") == 3
        assert objects.read_many([ByteRange(name="a"), ByteRange(name="b")]) == [b"22", b"333"]


def test_one_failure_among_many_ends_the_others(faulty: type[servers.FaultyFiles]) -> None:
    faulty.objects.update({f"x/{i}": b"1" for i in range(100)})
    faulty.delay_seconds = 0.005
    with opened("faulty://x", retries=Retries(missing_times=0)) as objects:
        ranges = [ByteRange(name="none"), *(ByteRange(name=str(i)) for i in range(100))]
        with pytest.raises(FileNotFoundError, match="faulty://x/none"):
            objects.read_many(ranges)
    assert sum(faulty.requests.values()) < 100


# How requests are made


def test_requests_are_made_at_once(web: servers.WebServer, tmp_path: Path) -> None:
    for i in range(16):
        (tmp_path / str(i)).write_bytes(bytes([i]))
    web.delay_seconds = 0.05
    with opened(web.url) as objects:
        start = time.perf_counter()
        assert objects.read_many([ByteRange(name=str(i)) for i in range(16)]) == [bytes([i]) for i in range(16)]
        assert time.perf_counter() - start < 16 * 0.05 / 2


def test_near_ranges_are_one_request_and_long_ones_several(web: servers.WebServer, tmp_path: Path) -> None:
    data = os.urandom(2**18)
    (tmp_path / "a").write_bytes(data)
    with opened(web.url) as objects:
        objects.read_many([ByteRange(name="a", start=i, stop=i + 5) for i in (0, 2, 100, 1000)])
        assert web.ranges == ["bytes=0-1004"]
        web.ranges.clear()
        assert objects.read("a", 0, 2**18) == data
        assert sorted(web.ranges) == sorted(f"bytes={i * 2**16}-{(i + 1) * 2**16 - 1}" for i in range(4))
        web.ranges.clear()
        assert objects.read("a") == data
        assert len(web.ranges) == 1


RANGES = st.lists(
    st.builds(
        lambda name, start, length: ByteRange(name=name, start=start, stop=None if length is None else start + length),
        name=st.sampled_from(["a", "b"]),
        start=st.integers(0, 300),
        length=st.none() | st.integers(0, 200),
    ),
    max_size=20,
)


@given(ranges=RANGES, gap_bytes=st.integers(0, 50), range_bytes=st.integers(1, 80))
def test_planned_requests_hold_every_byte_and_few_others(
    ranges: list[ByteRange], gap_bytes: int, range_bytes: int
) -> None:
    requests = plan_requests(ranges, gap_bytes=gap_bytes, range_bytes=range_bytes)
    wanted = {(r.name, i) for r in ranges if r.stop is not None for i in range(r.start, r.stop)}
    fetched = [(r.name, i) for r in requests if r.stop is not None for i in range(r.start, r.stop)]
    assert len(fetched) == len(set(fetched))
    assert wanted <= set(fetched)
    assert {r for r in requests if r.stop is None} == {r for r in ranges if r.stop is None}
    for request in requests:
        assert request.stop is None or request.stop - request.start <= range_bytes
    for name, i in set(fetched) - wanted:  # in a gap between two that are near
        assert any((name, j) in wanted for j in range(max(i - gap_bytes, 0), i))
        assert any((name, j) in wanted for j in range(i, i + gap_bytes + 1))


@given(ranges=RANGES)
def test_ranges_read_together_are_as_read_one_by_one(ranges: list[ByteRange]) -> None:
    with servers.faulty_files() as files, opened("faulty://x") as objects:
        for name in "ab":
            files.objects[f"x/{name}"] = bytes(i % 251 for i in range(500))
        assert objects.read_many(ranges) == [files.objects[f"x/{r.name}"][r.start : r.stop] for r in ranges]


# URLs, options, secrets


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("/a/folder", "must be one URL such as s3://bucket/folder, got '/a/folder'"),
        ("simplecache::s3://bucket", "must be one URL"),
        ("https://host/store?signature=geheim", r"without query and fragment, got 'https://host/store\?…'"),
        ("https://host/store#geheim", "without query and fragment"),
        ("https://user:geheim@host/store", "must hold no password"),
        ("sftp://user:geheim@host/store", "must hold no password"),
        ("nosuch://x", r"must begin with a protocol that fsspec knows \(.*s3.*\), got nosuch://"),
    ],
)
def test_urls_that_are_not_taken_are_refused(url: str, message: str) -> None:
    with pytest.raises(diskbuf.OptionError, match=message) as caught:
        RemoteObjects(url)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"range_bytes": 0}])
def test_numbers_below_1_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(diskbuf.OptionError, match="must be at least 1, got 0"):
        RemoteObjects("memory://x", **options)


def test_retries_are_not_negative() -> None:
    with pytest.raises(diskbuf.OptionError, match="times must be positive, got -1"):
        Retries(times=-1)
    with pytest.raises(diskbuf.OptionError, match="timeout_seconds must be positive, got 0"):
        Retries(timeout_seconds=0)


@pytest.mark.parametrize(("start", "stop"), [(-1, None), (3, 2)])
def test_a_range_runs_forward(start: int, stop: int | None) -> None:
    with pytest.raises(diskbuf.OptionError, match=f"start {start} and stop {stop}"):
        ByteRange(name="a", start=start, stop=stop)


@pytest.mark.parametrize(
    ("protocol", "package"), [("s3", "s3fs"), ("gs", "gcsfs"), ("az", "adlfs"), ("https", "aiohttp")]
)
def test_a_package_that_is_not_installed_is_named_by_its_extra(
    monkeypatch: pytest.MonkeyPatch, protocol: str, package: str
) -> None:
    for known in [known for known in servers._registry if known == protocol]:
        monkeypatch.delitem(servers._registry, known)
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        diskbuf.MissingExtraError, match=re.escape(f"{protocol}:// needs a package") + r".*diskbuf\[cloud\]"
    ):
        RemoteObjects(f"{protocol}://bucket")


def test_a_web_server_is_for_reading(web: servers.WebServer) -> None:
    with opened(web.url) as objects:
        with pytest.raises(diskbuf.ReadOnlyError, match=f"{web.url}/a can't be written"):
            objects.write("a", b"1")
        with pytest.raises(diskbuf.ReadOnlyError, match=f"{web.url}/a can't be deleted"):
            objects.delete("a")


def test_no_secret_is_shown(s3: servers.CloudServer) -> None:
    options = {**s3.storage_options, "secret": "geheim", "client_kwargs": {"nosuch": "geheim"}}
    objects = RemoteObjects(s3.url, storage_options=options, retries=QUICK)
    assert "geheim" not in repr(objects)
    assert "geheim" not in str(vars(objects).get("url"))
    with pytest.raises(diskbuf.DiskbufError) as caught:
        objects.read("a")
    assert "geheim" not in str(caught.value)
    assert b"geheim" not in pickle.dumps(caught.value)
    objects.close()


def test_options_that_a_client_does_not_take_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(diskbuf.OptionError, match=r"storage_options must fit az://.*\['account_key'\]") as caught:
        RemoteObjects("az://container", storage_options={"account_key": "geheim"}).read("a")
    assert "geheim" not in str(caught.value)


def test_a_write_that_fails_leaves_the_object_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(f"file://{tmp_path}") as objects:
        objects.write("a", b"old")
        files = objects._connect()._files

        def half(path: str, value: bytes, **_: Any) -> None:
            Path(path).write_bytes(value[: len(value) // 2])
            raise OSError(28, "No space left on device", path)

        monkeypatch.setattr(files, "pipe_file", half)
        with pytest.raises(OSError, match="No space left on device"):
            objects.write("a", b"a new one")
        assert objects.read("a") == b"old"
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
