"""Caches of raw chunks: the contract, and what a folder that several processes share owes them."""

import abc
import collections
import errno
import mmap
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_full_disk import small_disk  # noqa: F401 (a fixture)

from diskbuf.errors import ClosedError, OptionError
from diskbuf.store import cache_folder, files
from diskbuf.store.chunk_cache import ChunkCache, DiskCache, MemoryCache

PLENTY = 2**30
needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="descriptors are counted in /proc")


def content(key: str, size: int) -> bytes:
    """What a key holds: another thing for each key, and not the same on each page."""
    return np.random.default_rng([size, *key.encode()]).bytes(size)


def fill(cache: ChunkCache, key: str, size: int) -> bytes:
    """Fetches a chunk, and returns what its descriptor reads."""
    new = cache.new(size)
    new.memory[:] = content(key, size)
    return read(new.keep(key), size)


def read(descriptor: int, size: int) -> bytes:
    try:
        assert os.fstat(descriptor).st_size == size
        with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as mapped:
            return mapped[:]
    finally:
        os.close(descriptor)


def found(cache: ChunkCache, key: str, size: int) -> bytes | None:
    descriptor = cache.find(key, size=size)
    return None if descriptor is None else read(descriptor, size)


def has(cache: ChunkCache, key: str, size: int) -> bool:
    """Whether a chunk is there whole, marking it as used."""
    data = found(cache, key, size)
    assert data in (None, content(key, size))
    return data is not None


def chunks_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("[!.]*") if path.is_file()}


def leftovers_in(folder: Path) -> list[str]:
    return [path.name for path in folder.glob(".new-*")]


def bytes_in(folder: Path) -> int:
    """Bytes of all files that are or become chunks; one that is renamed meanwhile counts once."""
    sizes: dict[int, int] = {}
    for path in [*folder.glob(".new-*"), *folder.rglob("[!.]*")]:
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            sizes[status.st_ino] = status.st_size
    return sum(sizes.values())


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class ChunkCacheContract(abc.ABC):
    """What every cache keeps to."""

    keeps = True

    @pytest.fixture
    @abc.abstractmethod
    def cache(self, tmp_path: Path) -> ChunkCache: ...

    @pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 3 * 2**20])
    def test_what_is_kept_is_what_was_written(self, cache: ChunkCache, size: int) -> None:
        assert fill(cache, "store/column/0-1", size) == content("store/column/0-1", size)

    def test_a_new_chunk_is_zeros_whatever_was_in_memory_before(self, cache: ChunkCache) -> None:
        for size in (5000, 300, 5000, 9000, 1):
            new = cache.new(size)
            assert len(new.memory) == size
            assert bytes(new.memory) == bytes(size)
            new.memory[:] = b"\xff" * size
            os.close(new.keep(f"s/c/{size}"))

    def test_what_is_written_after_keep_reaches_no_chunk(self, cache: ChunkCache) -> None:
        new = cache.new(100)
        memory = new.memory
        memory[:] = content("a", 100)
        descriptor = new.keep("a")
        memory[:] = bytes(100)
        other = cache.new(100)
        memory[:] = b"\x01" * 100
        assert bytes(other.memory) == bytes(100)
        other.drop()
        assert read(descriptor, 100) == content("a", 100)

    def test_a_kept_chunk_is_open_for_reading_only(self, cache: ChunkCache) -> None:
        descriptor = cache.new(10).keep("s/c/0")
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(descriptor, b"x")
        os.close(descriptor)

    def test_a_chunk_that_was_dropped_is_not_there(self, cache: ChunkCache) -> None:
        new = cache.new(10)
        new.drop()
        new.drop()
        assert cache.find("s/c/0", size=10) is None

    def test_a_chunk_is_kept_once(self, cache: ChunkCache) -> None:
        new = cache.new(10)
        os.close(new.keep("s/c/0"))
        new.drop()
        with pytest.raises(ClosedError, match=r"chunk 's/c/1' must be kept once"):
            new.keep("s/c/1")
        assert found(cache, "s/c/0", 10) == (bytes(10) if self.keeps else None)

    def test_nothing_is_found_that_was_not_kept(self, cache: ChunkCache) -> None:
        assert cache.find("s/c/0", size=10) is None

    def test_a_chunk_is_found_again_where_chunks_are_kept(self, cache: ChunkCache) -> None:
        fill(cache, "s/c/0-1", 5000)
        assert has(cache, "s/c/0-1", 5000) is self.keeps
        assert not has(cache, "s/c/0-2", 5000)
        assert not has(cache, "s/d/0-1", 5000)

    @needs_proc
    def test_no_descriptor_is_left_open(self, cache: ChunkCache) -> None:
        fill(cache, "s/c/0", 100)
        before = open_descriptors()
        for number in range(20):
            fill(cache, f"s/c/{number % 3}", 100)
            has(cache, f"s/c/{number % 4}", 100)
            cache.find(f"s/c/{number % 3}", size=99)
            cache.new(100).drop()
            cache.new(100)  # and forgotten
        assert open_descriptors() == before

    def test_threads_may_share_a_cache(self, cache: ChunkCache) -> None:
        wrong: list[str] = []

        def work(number: int) -> None:
            for turn in range(40):
                key = f"s/c/{(number + turn) % 6}"
                if not has(cache, key, 5000) and fill(cache, key, 5000) != content(key, 5000):
                    wrong.append(key)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_a_forked_child_uses_its_parents_cache(self, cache: ChunkCache) -> None:
        fill(cache, "s/c/0", 5000)
        filling = cache.new(5000)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                filling.__del__()  # as when the child forgets it
                if fill(cache, "s/c/1", 5000) == content("s/c/1", 5000) and has(cache, "s/c/0", 5000) is self.keeps:
                    code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        filling.memory[:] = content("s/c/2", 5000)
        assert read(filling.keep("s/c/2"), 5000) == content("s/c/2", 5000)
        assert has(cache, "s/c/1", 5000) is self.keeps
        assert has(cache, "s/c/2", 5000) is self.keeps


class TestDiskCache(ChunkCacheContract):
    @pytest.fixture
    def cache(self, tmp_path: Path) -> ChunkCache:
        return DiskCache(tmp_path / "cache", most_bytes=PLENTY)


class TestMemoryCache(ChunkCacheContract):
    keeps = False

    @pytest.fixture
    def cache(self, tmp_path: Path) -> ChunkCache:
        return MemoryCache()


class TestMemoryCacheWithoutMemoryFiles(ChunkCacheContract):
    keeps = False

    @pytest.fixture
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChunkCache:
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        return MemoryCache()

    def test_it_leaves_no_file(self, cache: ChunkCache, tmp_path: Path) -> None:
        new = cache.new(100)
        assert list(tmp_path.iterdir()) == []
        new.drop()


def test_the_chunks_that_were_not_used_for_longest_go_first(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, most_bytes=300)
    for name in "abc":
        fill(cache, f"s/{name}", 100)
    assert has(cache, "s/a", 100)
    fill(cache, "s/d", 100)
    assert chunks_in(tmp_path) == {"s/a", "s/c", "s/d"}
    assert has(cache, "s/c", 100)
    fill(cache, "s/e", 150)
    assert chunks_in(tmp_path) == {"s/c", "s/e"}


def test_a_chunk_fits_that_takes_all_the_room_and_a_larger_one_is_not_kept(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, most_bytes=100)
    fill(cache, "a", 100)
    assert fill(cache, "b", 101) == content("b", 101)
    assert chunks_in(tmp_path) == {"a"}
    fill(cache, "c", 100)
    assert chunks_in(tmp_path) == {"c"}


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever a folder is listed."""
    found: list[int] = []
    real = cache_folder.CacheFolder._list
    monkeypatch.setattr(cache_folder.CacheFolder, "_list", lambda self: found.append(1) or real(self))
    return found


def test_eviction_leaves_nine_tenths_so_that_the_folder_is_listed_seldom(tmp_path: Path, listings: list[int]) -> None:
    cache = DiskCache(tmp_path, most_bytes=100 * 10)
    for number in range(300):
        fill(cache, f"s/{number}", 10)
        assert number < 100 or 90 <= len(chunks_in(tmp_path)) <= 100
    assert len(listings) <= 2 + 200 // 10 + 1
    assert chunks_in(tmp_path) >= {f"s/{number}" for number in range(211, 300)}


def test_what_was_not_kept_does_not_count(tmp_path: Path, listings: list[int]) -> None:
    cache = DiskCache(tmp_path / "cache", most_bytes=1000)
    (tmp_path / "cache/taken").mkdir()
    raw = tmp_path / "raw"
    raw.write_bytes(bytes(100))
    for _ in range(50):
        cache.new(100).drop()
        assert not cache.take_over(raw, "taken")
    assert len(listings) <= 2


def test_folders_that_become_empty_go_too(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, most_bytes=100)
    fill(cache, "one/column/0", 100)
    fill(cache, "two/column/0", 100)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["two"]


def test_a_mapped_chunk_outlives_its_removal(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, most_bytes=100)
    new = cache.new(100)
    new.memory[:] = content("a", 100)
    descriptor = new.keep("a")
    fill(cache, "b", 100)
    assert chunks_in(tmp_path) == {"b"}
    assert read(descriptor, 100) == content("a", 100)


def test_chunks_in_the_making_count_and_what_finds_no_room_is_not_kept(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, most_bytes=250)
    making = [cache.new(100) for _ in range(3)]
    assert bytes_in(tmp_path) == 200
    for number, new in enumerate(making):
        new.memory[:] = content(str(number), 100)
        assert read(new.keep(str(number)), 100) == content(str(number), 100)
    assert chunks_in(tmp_path) == {"0", "1"}
    making = [cache.new(100) for _ in range(2)]
    making[0].drop()
    del making
    assert leftovers_in(tmp_path) == []
    fill(cache, "c", 250)
    assert chunks_in(tmp_path) == {"c"}


def test_a_file_of_the_wrong_size_is_removed_and_counts_as_absent(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, most_bytes=PLENTY)
    fill(cache, "s/0", 100)
    os.truncate(tmp_path / "s/0", 99)
    assert cache.find("s/0", size=100) is None
    assert chunks_in(tmp_path) == set()
    fill(cache, "s/0", 100)
    assert has(cache, "s/0", 100)


@pytest.mark.parametrize("kind", ["folder", "symlink", "fifo"])
def test_what_is_not_a_regular_file_is_not_a_chunk(tmp_path: Path, kind: str) -> None:
    cache = DiskCache(tmp_path / "cache", most_bytes=PLENTY)
    fill(cache, "real", 100)
    path = tmp_path / "cache/key"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("real")
    assert cache.find("key", size=100) is None
    assert cache.find("real/below", size=100) is None
    if kind != "folder":
        fill(cache, "key", 100)
        assert has(cache, "key", 100)
        assert has(cache, "real", 100)


def test_a_file_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    cache = DiskCache(tmp_path, most_bytes=PLENTY)
    fill(cache, "a", 100)
    os.chown(tmp_path / "a", 12345, 12345)
    assert cache.find("a", size=100) is None
    fill(cache, "a", 100)
    assert has(cache, "a", 100)


def test_both_of_two_that_fill_one_key_succeed(tmp_path: Path) -> None:
    caches = [DiskCache(tmp_path, most_bytes=PLENTY) for _ in range(2)]
    making = [cache.new(100) for cache in caches]
    for new in making:
        new.memory[:] = content("s/0", 100)
    assert [read(new.keep("s/0"), 100) for new in making] == [content("s/0", 100)] * 2
    assert chunks_in(tmp_path) == {"s/0"}
    assert leftovers_in(tmp_path) == []


def test_another_process_finds_what_one_kept(tmp_path: Path) -> None:
    fill(DiskCache(tmp_path, most_bytes=PLENTY), "s/c/0", 5000)
    code = (
        "from test_chunk_cache import *; import sys;"
        "print(has(DiskCache(Path(sys.argv[1]), most_bytes=PLENTY), 's/c/0', 5000))"
    )
    assert in_process(code, str(tmp_path)) == "True\n"


def in_process(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=60).stdout


def test_a_cache_goes_on_when_its_folder_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache = DiskCache(folder, most_bytes=PLENTY)
    fill(cache, "s/0", 100)
    new = cache.new(100)
    new.memory[:] = content("s/1", 100)
    shutil.rmtree(folder)
    assert cache.find("s/0", size=100) is None
    assert read(new.keep("s/1"), 100) == content("s/1", 100)
    fill(cache, "s/2", 100)
    assert has(cache, "s/2", 100)
    DiskCache(folder, most_bytes=PLENTY)


def test_the_count_is_made_anew_when_it_is_lost_or_wrong(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, most_bytes=300)
    for name in "abc":
        fill(cache, name, 100)
    (tmp_path / ".lock").write_bytes(b"")
    fill(cache, "d", 100)
    assert chunks_in(tmp_path) == {"b", "c", "d"}
    for name in "bcd":
        (tmp_path / name).unlink()
    for name in "efg":
        fill(cache, name, 100)
    assert chunks_in(tmp_path) == {"e", "f", "g"}


# What a folder must be


def test_the_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    DiskCache(tmp_path / "a/b", most_bytes=1)
    assert stat.S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o700


@pytest.mark.parametrize("most_bytes", [0, -1, True, 2.5, None])
def test_the_most_bytes_are_an_int_of_at_least_1(tmp_path: Path, most_bytes: int) -> None:
    with pytest.raises(OptionError, match="most_bytes must be an int of at least 1, got"):
        DiskCache(tmp_path, most_bytes=most_bytes)


@pytest.mark.parametrize("name", ["file", "file/below", "", "\0x"])
def test_a_folder_that_can_not_be_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    if not name:
        (tmp_path / "loop").symlink_to("loop")
        name = "loop"
    if "\0" in name:
        name = "x" * 300
    with pytest.raises(OptionError, match=r"cache_dir must be a folder that can be written, got .* ':memory:' to keep"):
        DiskCache(tmp_path / name, most_bytes=1)
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_folder_that_is_read_only_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    if os.geteuid() == 0:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], check=False).returncode:
            pytest.skip("a tmpfs can't be mounted here")
    else:
        folder.chmod(0o500)
    try:
        with pytest.raises(OptionError, match="cache_dir must be a folder that can be written, got"):
            DiskCache(folder, most_bytes=1)
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", folder], check=True)


def test_a_folder_that_all_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(OptionError, match=r"that others can't write to, got '.*' with mode 777"):
        DiskCache(tmp_path, most_bytes=1)
    tmp_path.chmod(0o770)
    DiskCache(tmp_path, most_bytes=1)


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(OptionError, match=r"must be a folder of the user 0, who reads, got .* the user 12345"):
        DiskCache(tmp_path, most_bytes=1)


def test_a_folder_with_files_of_others_is_refused_and_they_stay(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(OptionError, match=r"must be a folder of its own, .* which holds 'thesis.tex'"):
        DiskCache(tmp_path, most_bytes=1)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_the_root_of_a_disk_will_do(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lost+found/kept").write_bytes(bytes(200))
    cache = DiskCache(tmp_path, most_bytes=100)
    fill(cache, "a", 100)
    fill(cache, "b", 100)
    assert chunks_in(tmp_path) == {"b", "lost+found/kept"}


# What is moved in


def test_a_file_is_taken_over_by_moving_it(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache", most_bytes=250)
    fill(cache, "a", 100)
    fill(cache, "b", 100)
    raw = tmp_path / "raw"
    raw.write_bytes(content("s/c/0", 150))
    inode = raw.stat().st_ino
    assert cache.take_over(raw, "s/c/0")
    assert not raw.exists()
    assert (tmp_path / "cache/s/c/0").stat().st_ino == inode
    assert has(cache, "s/c/0", 150)
    assert chunks_in(tmp_path / "cache") == {"b", "s/c/0"}


@pytest.mark.parametrize("kind", ["absent", "too large", "empty", "symlink", "a folder in its place"])
def test_a_file_that_can_not_be_taken_over_stays_where_it_was(tmp_path: Path, kind: str) -> None:
    cache = DiskCache(tmp_path / "cache", most_bytes=100)
    raw, target = tmp_path / "raw", tmp_path / "target"
    if kind == "symlink":
        target.write_bytes(b"x")
        raw.symlink_to(target)
    elif kind != "absent":
        raw.write_bytes(bytes({"too large": 101, "empty": 0}.get(kind, 50)))
    if kind == "a folder in its place":
        (tmp_path / "cache/key").mkdir()
    assert not cache.take_over(raw, "key")
    assert raw.exists() is (kind != "absent")
    assert cache.find("key", size=50) is None
    fill(cache, "a", 100)
    assert has(cache, "a", 100)


def test_a_file_of_another_disk_is_not_taken_over(tmp_path: Path, small_disk: Path) -> None:  # noqa: F811
    cache = DiskCache(tmp_path / "cache", most_bytes=PLENTY)
    raw = small_disk / "raw"
    raw.write_bytes(b"raw")
    assert not cache.take_over(raw, "key")
    assert raw.read_bytes() == b"raw"


# A full disk


def test_a_full_disk_removes_chunks_and_then_says_what_to_do(small_disk: Path) -> None:  # noqa: F811
    folder, ballast, size = small_disk / "cache", small_disk / "ballast", 2**20
    cache = DiskCache(folder, most_bytes=PLENTY)
    ballast.write_bytes(bytes(4 * 2**20))
    for number in range(10):  # there is room for three
        assert fill(cache, f"s/{number}", size) == content(f"s/{number}", size)
    assert "s/9" in chunks_in(folder)
    with pytest.raises(
        OSError, match=f"{folder} must have room for a chunk of .* but its disk .* is full. Free"
    ) as raised:
        cache.new(5 * size)
    assert raised.value.errno == errno.ENOSPC
    assert bytes_in(folder) == 0
    ballast.unlink()
    assert fill(cache, "large", 5 * size) == content("large", 5 * size)


def test_a_disk_that_is_full_when_a_chunk_is_written_is_an_error_too(
    small_disk: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where space can't be reserved, writing finds out; the process lives."""

    def cannot_reserve(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", cannot_reserve)
    cache = DiskCache(small_disk / "cache", most_bytes=PLENTY)
    new = cache.new(100)
    assert bytes_in(small_disk / "cache") == 100  # counted though it takes no space yet
    new.drop()
    (small_disk / "ballast").write_bytes(bytes(5 * 2**20))
    for number in range(4):
        fill(cache, f"s/{number}", 2**20)
    assert 1 <= len(chunks_in(small_disk / "cache")) <= 2
    new = cache.new(4 * 2**20)
    with pytest.raises(OSError, match="must have room for a chunk of 4194304 bytes") as raised:
        new.keep("large")
    assert raised.value.errno == errno.ENOSPC
    assert bytes_in(small_disk / "cache") == 0


# Power cuts


def boot_as(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(files, "boot_id", lambda: bytes([number] * 16))


def test_what_was_written_shortly_before_the_machine_stopped_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot_as(monkeypatch, 1)
    cache = DiskCache(tmp_path, most_bytes=PLENTY)
    for name in ("old", "late", "last"):
        fill(cache, name, 100)
    written = time.time_ns()
    for name, seconds in (("old", 700), ("late", 500)):
        os.utime(tmp_path / name, ns=(written, written - seconds * 10**9))
    assert has(cache, "old", 100)  # that it was used doesn't make it newly written
    DiskCache(tmp_path, most_bytes=PLENTY)
    assert chunks_in(tmp_path) == {"old", "late", "last"}
    boot_as(monkeypatch, 2)
    cache = DiskCache(tmp_path, most_bytes=PLENTY)
    assert chunks_in(tmp_path) == {"old"}
    fill(cache, "new", 100)
    boot_as(monkeypatch, 1)  # another machine that has the folder too
    DiskCache(tmp_path, most_bytes=PLENTY)
    assert chunks_in(tmp_path) == {"old", "new"}


# Processes that die

FILLER = """
import sys, random
from test_chunk_cache import *
rng = random.Random(int(sys.argv[3]))
cache = DiskCache(Path(sys.argv[1]), most_bytes=int(sys.argv[2]))
print("ready", flush=True)
count = int(sys.argv[4])
while count:
    count -= 1
    key = f"s/{rng.randrange(40)}"
    size = 20_000 + 1000 * int(key[2:])
    if not has(cache, key, size):
        assert fill(cache, key, size) == content(key, size)
"""


def start_filler(folder: Path, most_bytes: int, *, seed: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FILLER, str(folder), str(most_bytes), str(seed), str(count)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def fillers() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_processes_that_fill_at_once_stay_within_the_bytes_together(
    tmp_path: Path, fillers: list[subprocess.Popen[str]]
) -> None:
    folder, most_bytes = tmp_path / "cache", 400_000
    fillers += [start_filler(folder, most_bytes, seed=seed, count=300) for seed in range(3)]
    for process in fillers:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    largest = 0
    while any(process.poll() is None for process in fillers):
        largest = max(largest, bytes_in(folder))
    assert [process.returncode for process in fillers] == [0, 0, 0]
    # What is renamed between two looks is seen once, but what is removed after it was seen still counts.
    assert most_bytes * 0.5 < largest <= most_bytes * 1.2
    assert most_bytes * 0.8 < bytes_in(folder) <= most_bytes
    assert leftovers_in(folder) == []


def test_killed_processes_leave_whole_chunks_and_nothing_else_for_long(
    tmp_path: Path, fillers: list[subprocess.Popen[str]]
) -> None:
    folder, most_bytes = tmp_path / "cache", 600_000
    rng = random.Random(3)
    seen: collections.Counter[str] = collections.Counter()
    for turn in range(8):
        process = start_filler(folder, most_bytes, seed=turn, count=-1)
        fillers.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0, 0.1))  # a random moment is what is tested
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen["leftovers"] += len(leftovers_in(folder))
        assert bytes_in(folder) <= most_bytes
        cache = DiskCache(folder, most_bytes=most_bytes)
        assert leftovers_in(folder) == []
        for number in range(40):
            seen["found"] += has(cache, f"s/{number}", 20_000 + 1000 * number)
    assert seen["found"] > 40


def test_a_leftover_goes_once_its_process_is_dead_and_not_before(tmp_path: Path) -> None:
    code = """
import sys, os, signal
from test_chunk_cache import *
new = DiskCache(Path(sys.argv[1]), most_bytes=PLENTY).new(1000)
print("ready", flush=True)
sys.stdin.readline()
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        DiskCache(tmp_path, most_bytes=PLENTY)
        assert len(leftovers_in(tmp_path)) == 1
        assert f"-{process.pid}-" in leftovers_in(tmp_path)[0]
        process.kill()
        process.wait()
        assert len(leftovers_in(tmp_path)) == 1
        DiskCache(tmp_path, most_bytes=PLENTY)
        assert leftovers_in(tmp_path) == []


def test_where_files_can_not_be_locked_leftovers_go_after_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_lock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", cannot_lock)
    cache = DiskCache(tmp_path, most_bytes=300)
    for name in "abcd":
        (tmp_path / ".lock").write_bytes(b"dbcache1" + bytes(8))  # a count of 0, by a process that didn't see the rest
        fill(cache, name, 100)
    assert chunks_in(tmp_path) == {"b", "c", "d"}
    for name, age in (("young", 3000), ("old", 4000)):
        path = tmp_path / f".new-1-{name}"
        path.write_bytes(b"")
        os.utime(path, (time.time() - age,) * 2)
    DiskCache(tmp_path, most_bytes=300)
    assert leftovers_in(tmp_path) == [".new-1-young"]


# Against a dict

KEYS = st.sampled_from([f"{store}/{number}" for store in "ab" for number in range(4)])
SIZES = st.sampled_from([1, 70, 100, 240, 400, 401])


class CacheMachine(RuleBasedStateMachine):
    """A cache of 400 bytes against an ordered dict of what is in it, that which was used last at the end."""

    @initialize()
    def begin(self) -> None:
        import tempfile

        self.root = tempfile.TemporaryDirectory()
        self.folder = Path(self.root.name, "cache")
        self.model: collections.OrderedDict[str, int] = collections.OrderedDict()
        self.making: list[tuple[object, int, bool]] = []
        self.reopen()

    def reopen(self) -> None:
        self.cache = DiskCache(self.folder, most_bytes=400)

    @property
    def used(self) -> int:
        return sum(self.model.values()) + sum(size for _, size, is_kept in self.making if is_kept)

    def make_room(self, size: int) -> bool:
        if size > 400:
            return False
        if self.used + size > 400:
            while self.model and self.used > min(400 - size, 360):
                self.model.popitem(last=False)
        return self.used + size <= 400

    @rule(key=KEYS, size=SIZES)
    def find(self, key: str, size: int) -> None:
        size = self.model.get(key, size)
        assert has(self.cache, key, size) is (key in self.model)
        if key in self.model:
            self.model.move_to_end(key)

    @rule(key=KEYS)
    def find_another_size(self, key: str) -> None:
        assert self.cache.find(key, size=self.model.pop(key, 0) + 1) is None
        self.recount()

    @precondition(lambda self: len(self.making) < 3)
    @rule(size=SIZES)
    def new(self, size: int) -> None:
        is_kept = self.make_room(size)
        self.making.append((self.cache.new(size), size, is_kept))

    @precondition(lambda self: self.making)
    @rule(key=KEYS, at=st.integers(0, 2))
    def keep(self, key: str, at: int) -> None:
        new, size, is_kept = self.making.pop(at % len(self.making))
        new.memory[:] = content(key, size)
        assert read(new.keep(key), size) == content(key, size)
        if is_kept:
            self.model.pop(key, None)
            self.model[key] = size
        self.recount()

    @precondition(lambda self: self.making)
    @rule(at=st.integers(0, 2))
    def drop(self, at: int) -> None:
        self.making.pop(at % len(self.making))[0].drop()

    @rule(key=KEYS, size=SIZES)
    def take_over(self, key: str, size: int) -> None:
        raw = Path(self.root.name, "raw")
        raw.write_bytes(content(key, size))
        is_moved = self.make_room(size)
        assert self.cache.take_over(raw, key) is is_moved
        assert raw.exists() is not is_moved
        raw.unlink(missing_ok=True)
        if is_moved:
            self.model.pop(key, None)
            self.model[key] = size
        self.recount()

    @rule()
    def open_again(self) -> None:
        self.reopen()

    def recount(self) -> None:
        """A count that is too high, after a file was replaced, evicts nothing too early: the folder is listed first."""
        assert bytes_in(self.folder) == self.used

    @invariant()
    def the_folder_holds_what_the_dict_holds(self) -> None:
        if hasattr(self, "model"):
            assert chunks_in(self.folder) == set(self.model)
            assert bytes_in(self.folder) == self.used <= 400

    def teardown(self) -> None:
        if hasattr(self, "root"):
            for new, _, _ in self.making:
                new.drop()
            self.root.cleanup()


TestCacheAgainstADict = CacheMachine.TestCase
TestCacheAgainstADict.settings = settings(max_examples=60, stateful_step_count=30)
