"""A writer process that is made to be killed, and what its parent knows about it.

Every column of a step says which id and lane it belongs to, in another dtype and row size, so that a torn, mixed or
lost row shows. What was begun and what was acknowledged is counted in a small mapped file, which survives SIGKILL as
the store's own pages do: the parent knows exactly which steps must be there.

    python crash_writer.py STORE COUNTERS --kind ring --does add,extend,clear,flush,reopen

A `Nursery` forks such writers from one process that has imported everything, which is a hundred times faster than
starting an interpreter for each.
"""

import argparse
import contextlib
import dataclasses
import errno
import importlib
import json
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import diskbuf

IS_LONG = os.environ.get("DISKBUF_CRASH_TEST") == "long"  # every moment rather than some
DEADLINE_SECONDS = 30.0
LAYOUTS: dict[str, dict[str, Any]] = {"raw": {}, "zstd": {"codec": "zstd"}, "arrow": {"layout": "arrow"}}
KINDS = ("ring", "history", "unbounded")
BOOT_ID = slice(16, 32)  # of .diskbuf/live
_REBOOTED = "-rebooted"

Steps = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What the store is like.

    Attributes:
        kind: "ring" deletes what leaves the window, "history" keeps it, "unbounded" has no length limit.
        lanes: Number of lanes.
        max_length: Longest window, unless unbounded.
        frame_bytes: Bytes of the largest column's row, one lane.
        chunk_bytes: Largest chunk file.
        fsync: When steps are synced.
        fsync_seconds: How often, for "interval".
        layout: How chunks that are full are stored: one of `LAYOUTS`.
    """

    kind: str = "ring"
    lanes: int = 2
    max_length: int = 50
    frame_bytes: int = 9
    chunk_bytes: int = 512
    fsync: str = "interval"
    fsync_seconds: float = 0.02
    layout: str = "raw"

    @property
    def length(self) -> int | None:
        """Longest window, None for no limit."""
        return None if self.kind == "unbounded" else self.max_length

    @property
    def spec(self) -> Steps:
        """The data_spec."""
        return {
            "id": diskbuf.ArraySpec([], "int64"),
            "code": (diskbuf.ArraySpec([], "int16"), diskbuf.ArraySpec([3], "float64")),
            "is_odd": diskbuf.ArraySpec([], "bool"),
            "frame": diskbuf.ArraySpec([self.frame_bytes], "uint8"),
        }

    def steps(self, ids: NDArray[np.int64], lanes: NDArray[np.int64]) -> Steps:
        """The steps that ids and lanes, broadcast against each other, must hold."""
        ids, lanes = np.broadcast_arrays(ids, lanes)
        low = (ids * 31 + lanes * 7).astype(np.uint8)
        return {
            "id": ids.copy(),
            "code": (
                (ids * 3 + lanes).astype(np.int16),
                np.stack([ids, lanes, ids * 0.5 + lanes], axis=-1).astype(np.float64),
            ),
            "is_odd": (ids + lanes) % 2 == 1,
            "frame": low[..., None] + np.arange(self.frame_bytes, dtype=np.uint8),
        }

    def step(self, number: int) -> Steps:
        """One step of all lanes, [B, *shape]."""
        return self.steps(np.int64(number), np.arange(self.lanes))

    def sequence(self, first_id: int, next_id: int) -> Steps:
        """Consecutive steps of all lanes, [B, T, *shape]."""
        return self.steps(np.arange(first_id, next_id), np.arange(self.lanes)[:, None])

    def open(self, path: Path, **changes: Any) -> diskbuf.UniformReplayBuffer:
        """Creates or continues the store."""
        options = diskbuf.StoreOptions(
            chunk_bytes=self.chunk_bytes, fsync=self.fsync, fsync_seconds=self.fsync_seconds, **LAYOUTS[self.layout]
        )
        arguments = {"max_length": self.length, "keep_history": self.kind == "history", "options": options}
        return diskbuf.UniformReplayBuffer(self.spec, self.lanes, path=path, **(arguments | changes))

    def to_argv(self) -> list[str]:
        """The command line that says this."""
        return [
            word
            for name, value in dataclasses.asdict(self).items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]


def assert_equal_steps(got: Steps, wanted: Steps) -> None:
    """Fails when any column of any step differs."""
    for name in wanted:
        parts = zip(got[name], wanted[name], strict=True) if name == "code" else [(got[name], wanted[name])]
        for one, other in parts:
            np.testing.assert_array_equal(one, other, err_msg=f"column {name}", strict=True)


def assert_whole(buffer: diskbuf.UniformReplayBuffer, shape: Shape) -> tuple[int, int]:
    """Fails unless each id of the window holds its own step, whole, read in two ways; returns the window."""
    first_id, next_id = buffer.first_id, buffer.next_id
    assert_equal_steps(buffer.gather_all(), shape.sequence(first_id, next_id))
    ids = np.arange(first_id, next_id)[::-1, None]
    lanes = np.arange(shape.lanes)
    assert_equal_steps(buffer.read(ids, lanes), shape.steps(ids, lanes))
    return first_id, next_id


class Counters:
    """What a writer has begun and what was acknowledged, in a mapped file.

    Attributes:
        begun: Ids below it may be in the store.
        acknowledged: Ids below it must be.
        clearing: Where the window begins if the last `clear` took place.
        cleared: Where it begins if that didn't.
    """

    _FIELDS = ("begun", "acknowledged", "clearing", "cleared")

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(8 * len(self._FIELDS)))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 8 * len(self._FIELDS))
        self._words = memoryview(self._page).cast("q")

    def __getattr__(self, name: str) -> int:
        return int(self._words[self._FIELDS.index(name)])

    def set(self, **values: int) -> None:
        """Sets counters, in the order given."""
        for name, value in values.items():
            self._words[self._FIELDS.index(name)] = value

    def assert_agree(self, window: tuple[int, int], length: int | None) -> None:
        """Fails unless a window holds every acknowledged step and none that was never begun."""
        first_id, next_id = window
        assert self.acknowledged <= next_id <= self.begun
        shortest = 0 if length is None else next_id - length
        assert first_id in {max(self.cleared, shortest), max(self.clearing, shortest)}


class CountedWriter:
    """Writes steps and counts them.

    Args:
        path: The store's folder.
        shape: What it is like.
        counters: Where to count.
    """

    def __init__(self, path: Path, shape: Shape, counters: Counters, **changes: Any) -> None:
        self.path, self.shape, self.counters = path, shape, counters
        self._changes = changes
        self._open()

    def _open(self) -> None:
        self.buffer = self.shape.open(self.path, **self._changes)
        assert_whole(self.buffer, self.shape)
        next_id, first_id = self.buffer.next_id, self.buffer.first_id
        self.counters.assert_agree((first_id, next_id), self.buffer.max_length)
        self.counters.set(begun=next_id, acknowledged=next_id, clearing=first_id, cleared=first_id)

    def add(self, count: int = 1) -> None:
        first_id = self.counters.acknowledged
        steps = [self.shape.step(number) for number in range(first_id, first_id + count)]
        for next_id, step in enumerate(steps, first_id):  # tight, so that a kill likely comes during an add
            self.counters.set(begun=next_id + 1)
            self.buffer.add_batch(step)
            self.counters.set(acknowledged=next_id + 1)

    def extend(self, count: int) -> None:
        next_id = self.counters.acknowledged
        self.counters.set(begun=next_id + count)
        self.buffer.extend(self.shape.sequence(next_id, next_id + count))
        self.counters.set(acknowledged=next_id + count)

    def clear(self) -> None:
        next_id = self.counters.acknowledged
        self.counters.set(clearing=next_id)
        self.buffer.clear()
        self.counters.set(cleared=next_id)

    def flush(self) -> None:
        self.buffer.flush()

    def reopen(self) -> None:
        self.buffer.close()
        self._open()

    def do(self, names: list[str], rng: np.random.Generator) -> None:
        """Does things at random, until it is killed."""
        while True:
            name = names[rng.integers(len(names))]
            if name in {"add", "extend"}:
                getattr(self, name)(int(rng.integers(1, 90)))
            else:
                getattr(self, name)()

    def follow(self, script: str) -> None:
        """Does what a script says, such as "add*3,extend*7,clear", and closes."""
        for part in filter(None, script.split(",")):
            name, _, count = part.partition("*")
            getattr(self, name)(*map(int, filter(None, [count])))
        self.buffer.close()

    def fill(self) -> None:
        """Adds until there is no room, says so, waits for a line, and adds a hundred more."""
        failures = {}
        try:
            while True:
                self.add()
        except OSError as error:
            failures["errno"] = error.errno
        next_id = self.counters.acknowledged
        assert self.buffer.next_id == next_id, "the add that failed must be absent"
        assert_whole(self.buffer, self.shape)
        _say(json.dumps(failures | {"next_id": next_id}))
        sys.stdin.readline()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        give_up = time.monotonic() + DEADLINE_SECONDS
        while self.counters.acknowledged < next_id + 100:
            try:
                self.add()
            except OSError as error:  # the background sync ran out of room too, and its failure is raised once
                if "background sync" not in str(error) or time.monotonic() > give_up:
                    raise
        assert_whole(self.buffer, self.shape)
        self.buffer.close()


class WriterProcess:
    """A running writer, from its parent's side. Leaving the `with` block kills it.

    Args:
        argv: Its command line, as `writer_argv` gives it.
    """

    def __init__(self, argv: list[str]) -> None:
        self.counters = Counters(Path(argv[1]))
        self._process = subprocess.Popen(
            [sys.executable, __file__, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid

    def wait_for(self, is_true: Callable[[], bool]) -> None:
        """Waits until something is true of a writer that lives."""
        give_up = time.monotonic() + DEADLINE_SECONDS
        while not is_true():
            assert self._is_running(), "the writer ended by itself"
            assert time.monotonic() < give_up, "the writer is stuck"
            time.sleep(0.0002)

    def kill(self) -> None:
        """Sends SIGKILL and waits for the end."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL, "the writer ended before it was killed"

    def wait(self) -> int:
        """Waits for the end; returns the exit code, or minus the signal that ended it."""
        return self._process.wait(DEADLINE_SECONDS)

    def read_line(self) -> Any:
        """Reads what the writer says, as JSON."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def write_line(self) -> None:
        """Tells the writer to go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def _is_running(self) -> bool:
        return self._process.poll() is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class Nursery:
    """Forks writers from a process that has imported everything and has one thread."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, argv: list[str]) -> "ForkedWriter":
        """Starts a writer. One at a time."""
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps([str(word) for word in argv]) + "\n")
        self._server.stdin.flush()
        return ForkedWriter(argv, self)

    def answer(self) -> int:
        """Reads a number that the server says: a writer's pid when it has started, its exit code at its end."""
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, "the nursery has ended"
        return int(line)

    def close(self) -> None:
        """Ends the server."""
        self._server.communicate()


class ForkedWriter(WriterProcess):
    """A writer of a nursery."""

    def __init__(self, argv: list[str], nursery: Nursery) -> None:
        self.counters = Counters(Path(argv[1]))
        self._nursery = nursery
        self.pid = nursery.answer()
        self._code: int | None = None

    def wait(self) -> int:
        if self._code is None:
            self._code = self._nursery.answer()
        return self._code

    def _is_running(self) -> bool:
        stat = Path(f"/proc/{self.pid}/stat")
        return self._code is None and stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"

    def __exit__(self, *_: object) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.wait()


def serve() -> None:
    """Forks a writer for each line of JSON on stdin; says its pid, and at its end its exit code."""
    for module in ("numpy.testing", "zarr.dtype"):  # what a writer imports on its way
        importlib.import_module(module)

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run(json.loads(line))
                code = 0
            except BaseException:  # noqa: BLE001 - a fork must not return into the server
                traceback.print_exc()
            finally:
                os._exit(code)
        _say(pid)
        _say(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _say(what: object) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


class LineBomb:
    """Kills its process before one of the lines of the store's code that its thread runs.

    Lines are finer than system calls: they also part the words of the mapped header.

    Args:
        fuse: The number of the line; None for one that never goes off.
        watched: A store whose files are looked at before each line, for `moments`.
    """

    _FILES = frozenset({"files.py", "header.py", "lock.py", "manifest.py", "writing.py", "opening.py", "columns.py"})

    def __init__(self, fuse: int | None, *, watched: Path | None = None) -> None:
        self._fuse = fuse
        self._watched = watched
        self._package = str(Path(diskbuf.__file__).parent)
        self._number = 0
        self._before: tuple[object, object] = None, None
        self._changes: dict[object, list[int]] = {}

    def __call__(self, frame: types.FrameType, event: str, _: object) -> "Callable[..., Any] | None":
        """Is called by Python for each call and line."""
        name = frame.f_code.co_filename
        if not name.startswith(self._package) or Path(name).name not in self._FILES:
            return None
        if event == "line":
            if self._number == self._fuse:
                os.kill(os.getpid(), signal.SIGKILL)
            if self._watched is not None:
                line, state = self._before
                now = _state_of(self._watched)
                if now != state:
                    self._changes.setdefault(line, []).append(self._number)
                self._before = _place_of(frame), now
            self._number += 1
        return self

    def moments(self) -> list[int]:
        """The fuses for after each line that changed a file, the first and the last time it did in that call chain."""
        return sorted({number for numbers in self._changes.values() for number in (numbers[0], numbers[-1])})


def _place_of(frame: types.FrameType | None) -> tuple[object, ...]:
    place = []
    while frame is not None:
        place.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(place)


def _state_of(store: Path) -> dict[str, bytes]:
    found = {}
    for folder, _, names in os.walk(store):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # the background thread replaces files
                descriptor = os.open(f"{folder}/{name}", os.O_RDONLY)
                found[f"{folder}/{name}"] = os.read(descriptor, 2**16)
                os.close(descriptor)
    return found


def files_of(store: Path) -> set[str]:
    """Every file of a store."""
    return {os.path.relpath(f"{folder}/{name}", store) for folder, _, names in os.walk(store) for name in names}


def assert_no_leftovers(store: Path, window: tuple[int, int], shape: Shape) -> None:
    """Fails unless a store's files, right after an opening for writing, are those that its window needs."""
    found = files_of(store) - {".diskbuf/checksums.arrow"}  # made with the first sealed chunk
    if store.name.endswith(_REBOOTED):  # its lost steps are kept aside
        found -= {name for name in found if name.startswith(".diskbuf/quarantine/")}
    if shape.layout != "raw":
        _assert_sealed_or_raw(store, found, window, shape)
        return
    expected = expected_files(store, window, shape)
    assert found <= expected
    if window[0] < window[1]:
        assert found == expected


def _assert_sealed_or_raw(store: Path, found: set[str], window: tuple[int, int], shape: Shape) -> None:
    """Fails unless each chunk of the window, and none but these, is an object or a raw file; the tail is raw."""
    manifest = json.loads((store / "zarr.json").read_bytes())["attributes"]["diskbuf"]
    low = 0 if shape.kind == "history" else window[0]
    known = {name for name in found if name.endswith("zarr.json")}
    known |= {".diskbuf/live", ".diskbuf/lock", ".diskbuf/manifest.json"}
    for column, rows in manifest["chunk_rows"].items():
        axes = {"code/1": 1, "frame": 1}.get(column, 0)
        for chunk in range(low // rows, -(-window[1] // rows)):
            raw = f".diskbuf/tail/{column}/c.{chunk}.0" + ".0" * axes
            sealed = f"data/part-{chunk:08}.arrow" if shape.layout == "arrow" else f"{column}/c.{chunk}.0" + ".0" * axes
            is_sealed = (chunk + 1) * rows <= window[1] and sealed in found
            assert low == window[1] or raw in found or is_sealed, (raw, sealed)
            known |= {raw, sealed}
    assert found <= known, found - known


def expected_files(store: Path, window: tuple[int, int], shape: Shape) -> set[str]:
    """The files that a store with a window needs; where it is empty, the tail's chunks may be missing."""
    names = {"zarr.json", "code/zarr.json", ".diskbuf/live", ".diskbuf/lock", ".diskbuf/manifest.json"}
    low = 0 if shape.kind == "history" else window[0]
    for column in ("id", "code/0", "code/1", "is_odd", "frame"):
        document = json.loads((store / column / "zarr.json").read_bytes())
        rows, _, *inner = document["chunk_grid"]["configuration"]["chunk_shape"]
        names.add(f"{column}/zarr.json")
        names |= {f"{column}/c.{n}.0" + ".0" * len(inner) for n in range(low // rows, -(-window[1] // rows))}
    return names


@contextlib.contextmanager
def after_another_boot(store: Path) -> Iterator[Path]:
    """A copy of a store as another start of the machine finds it, when everything written had reached the disk.

    The warning that the last commit counts more steps than are certain is expected, and comes or not with the timing.
    """
    copy = store.with_name(store.name + _REBOOTED)
    shutil.copytree(store, copy, ignore=shutil.ignore_patterns("*.tmp"))
    header = copy / ".diskbuf" / "live"
    page = bytearray(header.read_bytes())
    page[BOOT_ID] = bytes(range(16))
    header.write_bytes(page)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* are certain to be whole", category=RuntimeWarning)
            yield copy
    finally:
        shutil.rmtree(copy)


def writer_argv(store: Path, counters: Path, shape: Shape, *more: str) -> list[str]:
    """The command line of a writer."""
    return [str(store), str(counters), *shape.to_argv(), *more]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("store", type=Path)
    parser.add_argument("counters", type=Path)
    parser.add_argument("--does", help="what to do at random, for ever")
    parser.add_argument("--script", help="what to do once, in order")
    parser.add_argument("--fill", action="store_true", help="add until there is no room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trim", action="store_true")
    parser.add_argument("--limit-bytes", type=int, help="largest file, from the tenth add on")
    parser.add_argument("--cannot-reserve", action="store_true", help="play a file system without posix_fallocate")
    parser.add_argument("--no-sync", action="store_true", help="sync nothing: for writers that are only killed")
    parser.add_argument("--dies-at", type=int, help="number of the line of the store's code to be killed at")
    parser.add_argument("--moments", type=Path, help="file for the numbers worth giving to --dies-at")
    for field in dataclasses.fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    return parser


def _refuse_to_reserve(*_: object) -> None:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


def _do_not_sync(_: int) -> None:
    pass


def run(argv: list[str]) -> None:
    """Is a writer."""
    signal.alarm(int(2 * DEADLINE_SECONDS))  # nobody may be left to kill it
    arguments = _parser().parse_args(argv)
    shape = Shape(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Shape)})
    if arguments.cannot_reserve:
        os.posix_fallocate = _refuse_to_reserve
    if arguments.no_sync:
        os.fsync = os.fdatasync = _do_not_sync
    bomb = LineBomb(arguments.dies_at, watched=arguments.store if arguments.moments else None)
    if arguments.dies_at is not None or arguments.moments:
        sys.settrace(bomb)
    writer = CountedWriter(arguments.store, shape, Counters(arguments.counters), trim=arguments.trim)
    if arguments.limit_bytes is not None:
        writer.add(10)
        resource.setrlimit(resource.RLIMIT_FSIZE, (arguments.limit_bytes, resource.RLIM_INFINITY))
    if arguments.fill:
        writer.fill()
    elif arguments.does:
        writer.do(arguments.does.split(","), np.random.default_rng(arguments.seed))
    else:
        writer.follow(arguments.script or "")
    sys.settrace(None)
    if arguments.moments:
        arguments.moments.write_text(json.dumps(bomb.moments()))


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        run(sys.argv[1:])
