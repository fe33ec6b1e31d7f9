"""Looking at a store again and again while it is written."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskbuf
from diskbuf.episode_table import NewEpisodes
from diskbuf.readers.watching import Sight, Watcher

SPEC = {"reward": diskbuf.ArraySpec([], "float64"), "done": diskbuf.ArraySpec([], "bool")}
LANES = 2


def steps(first_id: int, count: int, *, length: int = 4) -> dict[str, Any]:
    """Steps of episodes of `length` steps, whose reward is the episode's number in lane 0, and 100 more in lane 1."""
    ids = np.arange(first_id, first_id + count)
    lane = np.arange(LANES)[:, None]
    done = np.broadcast_to(ids % length == length - 1, (LANES, count))
    return {"reward": (ids // length + 100 * lane).astype(float), "done": done}


class Clock:
    """Time that a test moves on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def writing(path: Path, max_length: int | None = None, **options: Any) -> diskbuf.UniformReplayBuffer:
    return diskbuf.UniformReplayBuffer(SPEC, LANES, max_length, path=path, options=diskbuf.StoreOptions(**options))


def watching(path: Path, clock: Callable[[], float], **options: Any) -> Watcher:
    return Watcher(path, ends="done", reward="reward", clock=clock, **options)


def test_a_watcher_tells_speed_window_and_returns(tmp_path: Path, clock: Clock) -> None:
    with writing(tmp_path / "s") as buffer:
        buffer.extend(steps(0, 9))
        watcher = watching(tmp_path / "s", clock)
        first = watcher.look()
        assert (first.steps_per_second, first.overall_steps_per_second) == (None, None)
        assert first.new_returns == (0.0, 400.0, 4.0, 404.0)
        assert first.episodes == 0
        clock.now += 2
        buffer.extend(steps(9, 10))
        sight = watcher.look()
        assert (sight.first_id, sight.next_id, sight.num_frames) == (0, 19, 38)
        assert (sight.steps_per_second, sight.overall_steps_per_second) == (10.0, 10.0)
        assert sight.new_returns == (8.0, 408.0, 12.0, 412.0)
        assert sight.episodes == 4
        assert sight.writer is not None
        assert sight.writer.is_alive
        clock.now += 20
        assert watcher.look().new_returns == ()
        clock.now += 10
        quiet = watcher.look()
        assert quiet.steps_per_second == 0.0
        assert quiet.overall_steps_per_second == 20 / 32
        watcher.close()


def test_a_watcher_goes_on_when_the_writer_ends_and_another_begins(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "s"
    writer = writing(path)
    writer.extend(steps(0, 5))
    watcher = watching(path, clock)
    watcher.look()
    writer.close()
    assert watcher.look().writer is None
    with writing(path) as writer:  # a run of its own: it breaks off the episode that was open
        writer.extend(steps(8, 5))
        sight = watcher.look()
        assert sight.next_id == 10
        assert sight.new_returns == (1.0, 101.0, 8.0, 408.0)
    watcher.close()


def test_a_watcher_goes_on_after_a_clear_and_behind_a_fast_writer(tmp_path: Path, clock: Clock) -> None:
    with writing(tmp_path / "s", 16, chunk_bytes=64) as writer:
        watcher = watching(tmp_path / "s", clock)
        writer.extend(steps(0, 8))
        watcher.look()
        writer.clear()
        assert watcher.look().num_frames == 0
        writer.extend(steps(8, 102))
        sight = watcher.look()
        assert (sight.first_id, sight.next_id) == (94, 110)
        # The episode of ids 92 to 95 lacks its first two, and nothing is left of the one before the clear.
        assert sight.new_returns == (46.0, 246.0, 96.0, 496.0, 100.0, 500.0, 104.0, 504.0)
        watcher.close()


def test_a_store_that_is_not_there_yet_is_waited_for_only_when_asked(tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(diskbuf.StoreNotFoundError):
        watching(tmp_path / "s", clock)
    watcher = watching(tmp_path / "s", clock, waits=True)
    assert watcher.look() == Sight(seconds=0.0, is_there=False)
    with writing(tmp_path / "s") as writer:
        writer.extend(steps(0, 5))
        assert watcher.look().next_id == 5
    watcher.close()


def test_a_store_that_was_removed_and_made_anew_is_seen_as_it_is(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "s"
    with writing(path) as writer:
        writer.extend(steps(0, 50))
    watcher = watching(path, clock)
    assert watcher.look().next_id == 50
    path.rename(tmp_path / "old")
    assert not watcher.look().is_there
    with writing(path) as writer:
        writer.extend(steps(0, 5))
        sight = watcher.look()
        assert (sight.next_id, sight.new_returns) == (5, (0.0, 400.0))
    shutil.rmtree(path)
    assert not watcher.look().is_there
    watcher.close()


def test_a_store_without_episodes_is_watched_all_the_same(tmp_path: Path, clock: Clock) -> None:
    spec = {"x": diskbuf.ArraySpec([], "int64")}
    with diskbuf.UniformReplayBuffer(spec, path=tmp_path / "s") as buffer:
        buffer.add_batch({"x": np.zeros(1, "int64")})
        watcher = Watcher(tmp_path / "s", clock=clock)
        assert (watcher.look().episodes, watcher.look().new_returns) == (None, ())
        watcher.close()
        with pytest.raises(diskbuf.SpecError, match="ends must be the path"):
            Watcher(tmp_path / "s", ends="done")


def test_a_remote_store_is_followed(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"file://{tmp_path}/far"
    with diskbuf.UniformReplayBuffer(SPEC, LANES, None, path=tmp_path / "s", publish_to=url) as buffer:
        buffer.extend(steps(0, 5))
        buffer.publish_now()
        watcher = Watcher(url, clock=clock)
        sight = watcher.look()
        assert (sight.next_id, sight.disk_bytes, sight.writer) == (5, None, None)
        buffer.extend(steps(5, 5))
        buffer.publish_now()
        assert watcher.look().next_id == 10
        watcher.close()


@pytest.mark.parametrize("piece", [1, 3, 7, 50])
def test_new_episodes_are_those_of_the_table_each_once(tmp_path: Path, piece: int) -> None:
    with writing(tmp_path / "s") as buffer:
        new = NewEpisodes(buffer, ends="done", reward="reward")
        found = []
        for start in range(0, 50, piece):
            buffer.extend(steps(start, min(piece, 50 - start)))
            found += new.take().to_pylist()
        expected = diskbuf.episodes(buffer, ends="done", reward="reward").to_pylist()
        ended = [row for row in expected if row["last_id"] < 48]
        assert sorted(found, key=str) == sorted(ended, key=str)
        assert new.take().num_rows == 0
