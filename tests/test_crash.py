"""Writers that are killed with SIGKILL: everything acknowledged is there, whole, and the next writer goes on."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from crash_writer import IS_LONG, KINDS, Counters, Nursery, Shape, assert_no_leftovers, assert_whole, writer_argv

import diskbuf

EVERYTHING = "add,extend,clear,flush,reopen"
KILLS = 80 if IS_LONG else 4  # of each writer
LARGE_FRAME = 5000  # a row of it takes the pwrite path


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def kill_at_a_random_moment(nursery: Nursery, argv: list[str], rng: np.random.Generator) -> Counters:
    with nursery.start([*argv, "--seed", str(rng.integers(2**31))]) as writer:
        reach = writer.counters.acknowledged + int(rng.integers(1, 400))
        writer.wait_for(lambda: writer.counters.acknowledged >= reach)
        writer.kill()
    return writer.counters


@pytest.mark.parametrize(
    ("shape", "does"),
    [
        *((Shape(kind=kind), EVERYTHING) for kind in KINDS),
        (Shape(kind="ring", frame_bytes=LARGE_FRAME, chunk_bytes=2**16), "add,extend"),
        (Shape(kind="unbounded", frame_bytes=LARGE_FRAME, chunk_bytes=2**18, fsync="never"), "add,extend,clear"),
        (Shape(kind="ring", fsync="always", chunk_bytes=4096), "add,extend,clear"),
        (Shape(kind="ring", max_length=3, chunk_bytes=1, fsync="never"), "add,clear"),
        (Shape(kind="ring", layout="zstd"), EVERYTHING),
        (Shape(kind="unbounded", layout="zstd", fsync="always"), "add,extend,clear"),
        (Shape(kind="history", layout="arrow"), EVERYTHING),
        (Shape(kind="ring", layout="arrow", fsync="never"), EVERYTHING),
    ],
    ids=lambda value: (
        f"{value.kind}-{value.layout}-{value.frame_bytes}-{value.fsync}" if isinstance(value, Shape) else value
    ),
)
def test_a_writer_killed_at_any_moment_leaves_every_acknowledged_step(
    tmp_path: Path, nursery: Nursery, shape: Shape, does: str, request: pytest.FixtureRequest
) -> None:
    store, counters = tmp_path / "store", tmp_path / "counters"
    rng = np.random.default_rng([*request.node.name.encode()])
    argv = writer_argv(store, counters, shape, "--does", does)
    shape.open(store).close()
    for _ in range(KILLS):
        with diskbuf.open(store) as earlier:
            counted = kill_at_a_random_moment(nursery, argv, rng)
            with diskbuf.open(store) as reader:
                window = assert_whole(reader, shape)
            counted.assert_agree(window, shape.length)
            assert assert_whole(earlier, shape) == window
            if shape.kind == "history":
                with diskbuf.open(store, history=True) as reader:
                    assert assert_whole(reader, shape) == (0, window[1])

            with shape.open(store) as buffer:
                assert (buffer.first_id, buffer.next_id) == window
                assert_no_leftovers(store, window, shape)
                buffer.add_batch(shape.step(window[1]))
                assert_whole(buffer, shape)
                assert assert_whole(earlier, shape)[1] == window[1] + 1
            counted.set(begun=window[1] + 1, acknowledged=window[1] + 1, clearing=window[0], cleared=window[0])
