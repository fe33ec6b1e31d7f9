"""Stores read from URLs through a real server: what is read, how often it is asked for, what is said when it fails."""

import json
import multiprocessing
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from servers import WebServer, web_server

import diskbuf
from diskbuf import ReadOptions, StoreOptions, UniformReplayBuffer

LAYOUTS: dict[str, dict[str, Any]] = {
    "raw": {},
    "zstd": {"codec": "zstd"},
    "arrow": {"layout": "arrow"},
    "arrow-zstd": {"layout": "arrow", "codec": "zstd"},
}
SPEC = {"frame": diskbuf.ArraySpec([32], "uint8"), "nested/a b": {"id": diskbuf.ArraySpec([], "int64")}}
LANES, STEPS = 2, 500
QUICK = {"retries": 1, "cache_dir": ":memory:"}
IN_MEMORY = ReadOptions(cache_dir=":memory:")


def rows(first_id: int, next_id: int) -> dict[str, Any]:
    ids = np.broadcast_to(np.arange(first_id, next_id), (LANES, next_id - first_id))
    frames = np.repeat((ids % 251).astype(np.uint8)[..., None], 32, -1)
    return {"frame": frames, "nested/a b": {"id": ids.astype(np.int64)}}


def assert_rows(buffer: UniformReplayBuffer, first_id: int = 0, next_id: int = STEPS) -> None:
    assert (buffer.first_id, buffer.next_id) == (first_id, next_id)
    found, wanted = buffer.gather_all(), rows(first_id, next_id)
    np.testing.assert_array_equal(found["frame"], wanted["frame"], strict=True)
    np.testing.assert_array_equal(found["nested/a b"]["id"], wanted["nested/a b"]["id"], strict=True)


@pytest.fixture(params=LAYOUTS)
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WebServer]:
    """A web server with a store of each layout, named "store"."""
    options = StoreOptions(chunk_bytes=4096, **LAYOUTS[request.param])
    with UniformReplayBuffer(SPEC, LANES, None, path=tmp_path / "store", options=options) as buffer:
        buffer.extend(rows(0, STEPS))
    with web_server(tmp_path) as site:
        yield site


def url(site: WebServer) -> str:
    return f"{site.url}/store"


def objects_of(site: WebServer) -> list[str]:
    folder = site.folder
    found = [path for path in (folder / "store").rglob("*") if path.name.startswith(("c.", "part-"))]
    return sorted(str(path.relative_to(folder)) for path in found)


def test_every_read_gives_what_was_written(site: WebServer) -> None:
    with (
        diskbuf.open(url(site), read_options=IN_MEMORY, seed=1) as buffer,
        diskbuf.open(site.folder / "store", read_options=IN_MEMORY, seed=1) as local,
    ):
        assert_rows(buffer)
        for _ in range(5):
            mine, theirs = buffer.get_next(64, 3), local.get_next(64, 3)
            np.testing.assert_array_equal(mine[0]["frame"], theirs[0]["frame"], strict=True)
            np.testing.assert_array_equal(mine[1].ids, theirs[1].ids, strict=True)
        ids = [info.ids for _, info in buffer.as_numpy_iterator(2, 7, True)]
        assert sum(map(np.size, ids)) == LANES * STEPS
        assert buffer.path == url(site)
        assert not buffer.refresh()


def test_each_object_is_asked_for_once(site: WebServer) -> None:
    with diskbuf.open(url(site), read_options=IN_MEMORY) as buffer:
        for _ in range(3):
            assert_rows(buffer)
            buffer.get_next(200)
    assert {name: site.requests[name] for name in objects_of(site)} == dict.fromkeys(objects_of(site), 1)
    assert site.requests["store/zarr.json"] == 1


def test_chunks_on_the_disk_are_found_by_the_next_reader(site: WebServer, tmp_path: Path) -> None:
    for _ in range(2):
        with diskbuf.open(url(site), read_options=ReadOptions(cache_dir=tmp_path / "cache")) as buffer:
            assert_rows(buffer)
    assert {site.requests[name] for name in objects_of(site)} == {1}


def test_a_first_batch_asks_for_what_it_needs_in_two_rounds_after_the_manifest(site: WebServer) -> None:
    with diskbuf.open(url(site), read_options=ReadOptions(cache_dir=":memory:", prefetch_chunks=0)) as buffer:
        next(buffer.as_numpy_iterator(2, 2, True))
    columns = 1 if any("part-" in name for name in objects_of(site)) else 2
    assert sum(site.requests.values()) == 2 + columns, site.requests  # manifest, checksums, a chunk of each


@pytest.mark.parametrize("fault", [503, 500, "reset", "half"])
def test_a_request_that_fails_is_made_again(site: WebServer, fault: int | str) -> None:
    for name in [*objects_of(site)[:3], "store/zarr.json"]:
        site.fail(name, fault)
    with diskbuf.open(url(site), read_options=ReadOptions(cache_dir=":memory:", retries=3)) as buffer:
        assert_rows(buffer)


def test_an_object_that_is_not_there_is_an_error_that_names_it_and_never_zeros(site: WebServer) -> None:
    gone = objects_of(site)[1]
    (site.folder / gone).unlink()
    with diskbuf.open(url(site), read_options=ReadOptions(**QUICK)) as buffer:
        with pytest.raises(diskbuf.StoreCorruptError, match="is missing") as caught:
            buffer.gather_all()
        assert Path(gone).name in str(caught.value)
        with pytest.raises(diskbuf.StoreCorruptError, match="is missing"):
            buffer.get_next(2000)


def test_an_object_cut_short_or_changed_is_an_error_that_names_it(site: WebServer) -> None:
    path = site.folder / objects_of(site)[1]
    whole = path.read_bytes()
    for data in (whole[:-1], whole[: len(whole) // 2], b"", whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        path.write_bytes(data)
        with (
            diskbuf.open(url(site), read_options=ReadOptions(**QUICK)) as buffer,
            pytest.raises(diskbuf.StoreCorruptError, match=path.name[-12:]),
        ):
            buffer.gather_all()


def test_a_server_that_stays_down_is_told_with_the_object(site: WebServer) -> None:
    name = objects_of(site)[0]
    site.fail(name, *[503] * 20)
    with diskbuf.open(url(site), read_options=ReadOptions(**QUICK)) as buffer:
        with pytest.raises(diskbuf.StoreUnreachableError, match=Path(name).name):
            buffer.gather_all()
        site.faults[name].clear()
        assert_rows(buffer)  # and goes on when it is back


@pytest.mark.parametrize("status", [401, 403])
def test_credentials_that_are_refused_are_told_at_once(site: WebServer, status: int) -> None:
    site.fail("store/zarr.json", *[status] * 3)
    with pytest.raises(diskbuf.StoreAccessError, match=r"zarr\.json"):
        diskbuf.open(url(site), read_options=IN_MEMORY, storage_options={"headers": {"secret": "s3cr3t"}})
    assert site.requests["store/zarr.json"] == 1


def test_a_url_without_a_store_is_told(site: WebServer) -> None:
    with pytest.raises(diskbuf.StoreNotFoundError, match=r"it is no store, .*nothing/zarr.json is missing"):
        diskbuf.open(f"{site.url}/nothing", read_options=ReadOptions(**QUICK))
    (site.folder / "store/zarr.json").write_text("{}")
    with pytest.raises(diskbuf.StoreNotFoundError, match="not one of diskbuf's"):
        diskbuf.open(url(site), read_options=ReadOptions(**QUICK))
    (site.folder / "store/zarr.json").write_text("{")
    with pytest.raises(diskbuf.StoreCorruptError, match="must be JSON"):
        diskbuf.open(url(site), read_options=ReadOptions(**QUICK))


def test_a_newer_format_is_refused(site: WebServer) -> None:
    path = site.folder / "store/zarr.json"
    document = json.loads(path.read_bytes())
    document["attributes"]["diskbuf"]["format"] = 99
    del document["attributes"]["diskbuf_crc32"]
    path.write_text(json.dumps(document))
    with pytest.raises(diskbuf.StoreFormatError, match="Update diskbuf"):
        diskbuf.open(url(site), read_options=ReadOptions(**QUICK))


def test_what_a_url_cannot_do_is_refused(site: WebServer) -> None:
    with pytest.raises(diskbuf.OptionError, match="publish_to"):
        diskbuf.open(url(site), mode="r+")
    with pytest.raises(diskbuf.OptionError, match="skip_damaged"):
        diskbuf.open(url(site), skip_damaged=True)
    with pytest.raises(diskbuf.OptionError, match="must be on a local file system"):
        UniformReplayBuffer(SPEC, LANES, path=url(site))
    with pytest.raises(diskbuf.OptionError, match="storage_options must be a dict"):
        diskbuf.open(url(site), storage_options="key")  # type: ignore[arg-type]
    with diskbuf.open(url(site), read_options=IN_MEMORY) as buffer, pytest.raises(diskbuf.ReadOnlyError):
        buffer.clear()
    with pytest.raises(diskbuf.ClosedError):
        buffer.refresh()


def test_a_cache_folder_that_cannot_be_used_is_told(site: WebServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with (
        diskbuf.open(url(site), read_options=ReadOptions(cache_dir=tmp_path / "file")) as buffer,
        pytest.raises((diskbuf.OptionError, OSError), match=r"cache_dir .*file"),
    ):
        buffer.gather_all()


def _read(buffer: UniformReplayBuffer, told: Any) -> None:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        assert_rows(buffer)
    told.put(os.getpid())


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_of_a_process_that_has_read_reads_too(site: WebServer, method: str) -> None:
    with diskbuf.open(url(site), read_options=IN_MEMORY) as buffer:
        assert_rows(buffer)
        assert pickle.loads(pickle.dumps(buffer)).next_id == STEPS
        context = multiprocessing.get_context(method)
        told = context.SimpleQueue()
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            child = context.Process(target=_read, args=(buffer, told))
            child.start()
        child.join(60)
        assert child.exitcode == 0
        assert told.get() == child.pid
