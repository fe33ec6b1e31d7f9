"""Random samples of stores that are larger than their cache."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskbuf
from diskbuf import ReadOptions, StoreOptions, UniformReplayBuffer

SPEC = {"frame": diskbuf.ArraySpec([64], "uint8"), "id": diskbuf.ArraySpec([], "int64")}
LANES, STEPS = 2, 2000
SMALL = ReadOptions(cache_dir=":memory:", cache_bytes=100_000)  # of 288,000 raw ones


@pytest.fixture(scope="module", params=["zstd", "arrow", "raw"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layout: dict[str, Any] = {"zstd": {"codec": "zstd"}, "arrow": {"layout": "arrow", "codec": "zstd"}, "raw": {}}
    path = tmp_path_factory.mktemp("stores") / "steps"
    options = StoreOptions(chunk_bytes=4096, **layout[request.param])
    with UniformReplayBuffer(SPEC, LANES, None, path=path, options=options) as buffer:
        ids = np.broadcast_to(np.arange(STEPS), (LANES, STEPS))
        buffer.extend({"frame": np.repeat((ids % 251).astype(np.uint8)[..., None], 64, -1), "id": ids.astype("i8")})
    return path


def test_every_step_is_drawn_once_an_epoch_on_average_and_rows_are_right(path: Path) -> None:
    drawn = np.zeros(STEPS)
    with diskbuf.open(path, read_options=SMALL, seed=3) as buffer:
        batches = buffer.as_numpy_iterator(100, shuffle="resident")
        for _ in range(5 * STEPS * LANES // 100):
            items, info = next(batches)
            assert (items["id"] == info.ids).all()
            assert (items["frame"] == (info.ids % 251)[:, None]).all()
            assert (info.probabilities == np.float32(1 / (STEPS * LANES))).all()
            np.add.at(drawn, info.ids, 1)
    assert (drawn == 0).sum() <= 2  # ten draws expected of each: one in exp(10) is missed
    assert abs(drawn.mean() - 10) < 1e-9
    assert drawn.var() < 15


def test_batches_come_from_few_blocks_and_go_on_from_a_number(path: Path) -> None:
    with diskbuf.open(path, read_options=SMALL) as buffer:
        whole = buffer.as_numpy_iterator(64, 3, seed=5, shuffle="resident")
        ids = [next(whole)[1].ids for _ in range(30)]
        later = buffer.as_numpy_iterator(64, 3, seed=5, start=20, shuffle="resident")
        np.testing.assert_array_equal([next(later)[1].ids for _ in range(10)], ids[20:])
    assert (np.diff(ids, axis=-1) == 1).all()
    assert len(np.unique(ids[0])) < 1000


def test_tensorflow_reads_the_same_batches(path: Path) -> None:
    with diskbuf.open(path, read_options=SMALL) as buffer:
        plain = buffer.as_numpy_iterator(16, 2, seed=5, shuffle="resident")
        for items, info in buffer.as_dataset(16, 2, seed=5, shuffle="resident").take(20):
            _, wanted = next(plain)
            np.testing.assert_array_equal(info.ids.numpy(), wanted.ids)
            np.testing.assert_array_equal(items["id"].numpy(), wanted.ids)


def test_a_live_window_is_followed(tmp_path: Path) -> None:
    options = StoreOptions(chunk_bytes=1024, codec="zstd", fsync_seconds=0.01)
    with UniformReplayBuffer(SPEC, LANES, 200, path=tmp_path / "s", options=options, read_options=SMALL) as buffer:
        batches = buffer.as_numpy_iterator(32, 2, shuffle="resident")
        for step in range(1000):
            ids = np.full(LANES, step)
            buffer.add_batch({"frame": np.repeat((ids % 251).astype(np.uint8)[:, None], 64, -1), "id": ids})
            if step > 1 and not step % 7:
                items, info = next(batches)
                assert (items["id"] == info.ids).all()
                assert (info.ids >= buffer.first_id).all()


def test_what_cannot_be_asked_for_is_refused(path: Path) -> None:
    with diskbuf.open(path, read_options=SMALL) as buffer:
        with pytest.raises(diskbuf.OptionError, match="shuffle must be one of 'exact', 'resident', got 'none'"):
            buffer.as_numpy_iterator(4, shuffle="none")  # type: ignore[arg-type]
        with pytest.raises(diskbuf.OptionError, match="within_episodes must be False with shuffle='resident'"):
            buffer.as_numpy_iterator(4, shuffle="resident", within_episodes="id")
