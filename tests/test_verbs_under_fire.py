"""The verbs that move and tidy stores, where other things happen at the same time, are in the way, or went wrong."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from xml.dom import minidom

import numpy as np
import pytest
from diskbuf_tools import cli

import diskbuf
from diskbuf import comparing, copying, merging, splitting, trajectories, upkeep
from diskbuf.store import files
from diskbuf.store.arranged import ArrangedSnapshot, Segment, arranged_manifest
from diskbuf.store.snapshot import EvictedError, RawSnapshot, Snapshot

SCRIPT = Path(sys.executable).with_name("diskbuf")
SPEC = {"x": diskbuf.ArraySpec([], "int64"), "done": diskbuf.ArraySpec([], "bool")}
OPTIONS = {
    "raw": diskbuf.StoreOptions(chunk_bytes=64),
    "zstd": diskbuf.StoreOptions(codec="zstd", chunk_bytes=64),
    "arrow": diskbuf.StoreOptions(layout="arrow", chunk_bytes=256),
}
GOLDEN = sorted((Path(__file__).parent / "golden").glob("format-*/*"))


def make(path: Path, steps: int = 20, *, base: int = 0, max_length: int | None = None, **given: Any) -> Path:
    with diskbuf.UniformReplayBuffer(SPEC, 2, max_length, path=path, **given) as buffer:
        add(buffer, steps, base=base)
    return path


def add(buffer: diskbuf.UniformReplayBuffer, steps: int, *, base: int = 0) -> None:
    """Adds episodes of 5 steps, those of lane 1 a step ahead."""
    for _ in range(steps):
        t = buffer.next_id
        done = np.array([t % 5 == 4, t % 5 == 3])
        buffer.add_batch({"x": np.array([0, 1_000_000]) + base + t, "done": done})


def rows(path: Path | str, **given: Any) -> Any:
    with diskbuf.open(path, **given) as buffer:
        return buffer.gather_all()


def runs(path: Path | str) -> list[int]:
    with diskbuf.open(path) as buffer:
        return [run for run in buffer._opened().runs if buffer.first_id < run < buffer.next_id]


# ---- splitting


def test_parts_of_another_seed_or_store_are_never_taken_for_those_of_this_one(tmp_path: Path) -> None:
    with diskbuf.UniformReplayBuffer(SPEC, 1, None, path=tmp_path / "s") as buffer:
        buffer.extend({"x": np.arange(60)[None], "done": (np.arange(60) % 5 == 4)[None]})
    with diskbuf.UniformReplayBuffer(SPEC, 1, None, path=tmp_path / "t") as buffer:
        buffer.extend({"x": np.arange(60)[None] + 100, "done": (np.arange(60) % 5 == 4)[None]})
    parts = {tmp_path / "a": 0.5, tmp_path / "b": 0.5}
    diskbuf.split(tmp_path / "s", parts, seed=1, ends="done")
    first = rows(tmp_path / "a")["x"].tolist()
    shutil.rmtree(tmp_path / "b")
    for source, seed in (("s", 2), ("t", 1)):
        with pytest.raises(diskbuf.StoreExistsError, match="holds a store"):
            diskbuf.split(tmp_path / source, parts, seed=seed, ends="done")
        assert not (tmp_path / "b").exists()
    assert diskbuf.split(tmp_path / "s", parts, seed=1, ends="done").parts[0].bytes_written == 0
    assert rows(tmp_path / "a")["x"].tolist() == first
    assert sorted(first[0] + rows(tmp_path / "b")["x"][0].tolist()) == list(range(60))


def test_splitting_into_a_bucket_goes_on_with_the_parts_that_are_missing(tmp_path: Path) -> None:
    import fsspec

    make(tmp_path / "s")
    parts = {"memory://parts/a": 0.5, "memory://parts/b": 0.5}
    diskbuf.split(tmp_path / "s", parts, by="steps", chunk_bytes=64)
    fsspec.filesystem("memory").rm("/parts/b", recursive=True)
    report = diskbuf.split(tmp_path / "s", parts, by="steps", chunk_bytes=64)
    assert [part.bytes_written > 0 for part in report.parts] == [False, True]
    assert [rows(url)["x"][0].tolist() for url in parts] == [list(range(10)), list(range(10, 20))]
    with pytest.raises(diskbuf.StoreExistsError):
        diskbuf.split(make(tmp_path / "t", base=7), parts, by="steps", chunk_bytes=64)


def test_an_episode_that_ends_while_it_is_split_is_cut_off_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with diskbuf.UniformReplayBuffer(SPEC, 2, None, path=tmp_path / "s") as writer:
        add(writer, 12)
        open_now = splitting.open_buffer

        def open_later(*args: Any, **given: Any) -> Any:
            add(writer, 10)
            return open_now(*args, **given)

        monkeypatch.setattr(splitting, "open_buffer", open_later)
        diskbuf.split(tmp_path / "s", {tmp_path / "a": 1.0}, ends="done")
    found = rows(tmp_path / "a")
    x, done, begins = found["x"][0], found["done"][0], runs(tmp_path / "a")
    assert sorted(x.tolist()) == [*range(12), *range(1_000_000, 1_000_012)]
    for t in range(1, len(x)):
        assert done[t - 1] or t in begins or x[t] == x[t - 1] + 1


def test_an_episode_without_the_row_of_its_final_observation_is_followed_by_a_run(tmp_path: Path) -> None:
    spec = trajectories.trajectory_spec(
        trajectories.time_step_spec(diskbuf.ArraySpec([], "int64")),
        trajectories.PolicyStep(diskbuf.ArraySpec([], "int64")),
    )
    observation = np.zeros(2, np.int64)
    action = trajectories.PolicyStep(observation)
    with diskbuf.UniformReplayBuffer(spec, 2, None, path=tmp_path / "s") as buffer:
        first = trajectories.restart(observation, batch_size=2)
        last = trajectories.truncation(observation, np.zeros(2, np.float32))
        buffer.add_batch(trajectories.from_transition(first, action, last))
        buffer.add_batch(trajectories.from_transition(last, action, first))
        buffer.add_batch(trajectories.from_transition(first, action, last))  # and its boundary isn't there yet
    diskbuf.split(tmp_path / "s", {tmp_path / "a": 1.0})
    found = rows(tmp_path / "a")
    assert found.step_type[0].tolist() == [0, 2, 0, 2, 0, 0]
    assert runs(tmp_path / "a") == [5]


def test_a_chunk_is_read_once_however_many_episodes_are_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with diskbuf.UniformReplayBuffer(SPEC, 1, None, path=tmp_path / "s") as buffer:
        buffer.extend({"x": np.arange(3000)[None], "done": (np.arange(3000) % 3 == 2)[None]})
    read = RawSnapshot.rows
    calls = []

    def counted(self: RawSnapshot, number: int, first_id: int, next_id: int) -> Any:
        calls.append((number, first_id, next_id))
        return read(self, number, first_id, next_id)

    monkeypatch.setattr(RawSnapshot, "rows", counted)
    diskbuf.split(tmp_path / "s", {tmp_path / "a": 0.5, tmp_path / "b": 0.5}, seed=1, ends="done")
    assert 1 <= len(calls) <= 2 * 2  # columns, parts
    monkeypatch.undo()
    found = [rows(tmp_path / name)["x"][0].tolist() for name in "ab"]
    assert sorted(found[0] + found[1]) == list(range(3000))


def test_rows_that_were_evicted_are_not_taken_from_what_is_left_of_their_chunk() -> None:
    class Evicting(Snapshot):
        chunk_format = None

        def rows(self, number: int, first_id: int, next_id: int) -> Any:
            del number
            if first_id < self.gone_below:
                raise EvictedError(self.gone_below)
            return np.repeat(np.arange(first_id, next_id)[:, None], 2, axis=1)

        gone_below = 0

        def close(self) -> None:
            pass

    with diskbuf.UniformReplayBuffer({"x": diskbuf.ArraySpec([], "int64")}, 2, 64) as buffer:
        buffer.extend({"x": np.zeros([2, 64], np.int64)})
        store = buffer._opened()
        snapshot = Evicting(store.manifest, [column.layout for column in store.columns])
    snapshot.manifest = dataclasses.replace(snapshot.manifest, first_id=0, next_id=64, oldest_id=0)
    lanes = [Segment(snapshot=snapshot, first_id=10, next_id=40, lane=lane) for lane in (0, 1)]
    arranged = ArrangedSnapshot(arranged_manifest(lanes, first_id=0, lanes=1, metadata=None), snapshot.layouts, lanes)
    snapshot.gone_below = 20
    assert arranged.rows(0, 10, 20).tolist() == [[step] for step in range(20, 30)]
    assert arranged.rows(0, 45, 60).tolist() == [[step] for step in range(25, 40)]
    with pytest.raises(diskbuf.WindowError, match="evicted those below 20"):
        arranged.rows(0, 30, 45)


@pytest.mark.parametrize("seed", [-1, True, 1.5])
def test_seeds_that_are_none_are_refused(tmp_path: Path, seed: Any) -> None:
    make(tmp_path / "s")
    with pytest.raises(diskbuf.OptionError, match="seed must be"):
        diskbuf.split(tmp_path / "s", {tmp_path / "a": 1.0}, seed=seed, ends="done")


def test_what_was_published_to_a_folder_gets_no_store_put_into_it(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/published"
    make(tmp_path / "s", publish_to=url)
    for inside in (tmp_path / "published/in", f"{url}/in"):
        for verb in (diskbuf.copy, lambda one, other: diskbuf.split(one, {other: 1.0}, by="steps")):
            with pytest.raises(diskbuf.OptionError, match="must lie outside the source"):
                verb(url, inside)
    assert rows(url)["x"][0].tolist() == list(range(20))


# ---- deleting


@pytest.mark.parametrize("layout", OPTIONS)
@pytest.mark.parametrize(
    "name",
    ["x/notes.txt", "x/b/notes.txt", ".diskbuf/notes.txt", "x/c.0.bak", ".diskbuf/.notes.txt.tmp", "data/a"],
)
def test_somebody_elses_file_is_noticed_at_any_depth(tmp_path: Path, name: str, layout: str) -> None:
    store = make(tmp_path / "s", options=OPTIONS[layout])
    (store / name).parent.mkdir(parents=True, exist_ok=True)
    (store / name).write_text("keep me")
    for dry_run in (True, False):
        with pytest.raises(diskbuf.StoreExistsError, match="is not of it"):
            upkeep.delete(store, dry_run=dry_run)
    assert (store / name).read_text() == "keep me"
    assert rows(store)["x"][0].tolist() == list(range(20))


def test_a_leaf_folder_that_is_a_link_is_not_left_behind(tmp_path: Path) -> None:
    store = make(tmp_path / "s")
    (store / "x").rename(tmp_path / "elsewhere")
    (store / "x").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(diskbuf.StoreExistsError, match=r"s/x is not of it"):
        upkeep.delete(store)


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_stores_of_every_format_are_deleted(tmp_path: Path, golden: Path) -> None:
    shutil.copytree(golden, tmp_path / "s")
    upkeep.delete(tmp_path / "s")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("layout", OPTIONS)
def test_everything_that_diskbuf_puts_into_a_store_goes_with_it(tmp_path: Path, layout: str) -> None:
    store = tmp_path / "s"
    options = diskbuf.StoreOptions(**{**vars(OPTIONS[layout]), "fsync": "always"})
    process = f"""
import os, numpy as np, diskbuf
spec = {{"x": diskbuf.ArraySpec([], "int64"), "n/a": {{"b c": diskbuf.ArraySpec([2], "uint8")}}}}
buffer = diskbuf.UniformReplayBuffer(spec, 2, 40, path={str(store)!r}, options=diskbuf.{options!r})
for t in range(100):
    buffer.add_batch({{"x": np.full(2, t), "n/a": {{"b c": np.full([2, 2], t, "uint8")}}}})
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", process], check=False).returncode == -9
    with diskbuf.open(store, mode="r+") as buffer:
        x = buffer.gather_all()["x"][0].tolist()
    assert x == list(range(60, 100))
    cli.main(["stats", str(store)])
    chunk = next(path for path in sorted(store.rglob("*")) if path.name.startswith(("c.", "part-")))
    chunk.with_name(f".{chunk.name}.tmp").write_bytes(b"of a kill")
    chunk.write_bytes(b"rotten")
    diskbuf.repair(store)
    upkeep.delete(store)
    assert not list(tmp_path.iterdir())


def test_deleting_again_removes_what_an_interrupted_deletion_left(tmp_path: Path) -> None:
    store = make(tmp_path / "s")
    make(tmp_path / "s.deleted-01234567", 3)
    code = f"""
import os, shutil, signal
shutil.rmtree = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
from diskbuf import upkeep
upkeep.delete({str(store)!r})
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert len(list(tmp_path.iterdir())) == 2
    assert upkeep.delete(store, dry_run=True).files > 5
    assert len(list(tmp_path.iterdir())) == 2
    assert upkeep.delete(store).files > 5
    assert [path.name for path in tmp_path.iterdir()] == ["s.deleted-01234567"]
    with pytest.raises(diskbuf.StoreNotFoundError):
        upkeep.delete(store)


def test_names_as_long_as_they_may_be_are_deleted(tmp_path: Path) -> None:
    for name in ("n" * 250, "ü" * 127):
        upkeep.delete(make(tmp_path / name, 3))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_can_be_made_room_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path / "s")

    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    monkeypatch.setattr(files, "replace_file", full)
    for verb in (upkeep.compact, upkeep.upgrade, lambda path: upkeep.trim(path, keep=3)):
        with pytest.raises(OSError, match="Make a little room, and do it again") as caught:
            verb(store)
        assert caught.value.errno == errno.ENOSPC
    assert rows(store)["x"].shape == (2, 20)
    upkeep.delete(store)
    assert not list(tmp_path.iterdir())


def test_of_two_that_delete_a_store_one_is_told_that_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path / "s")
    take_lock = upkeep._lock_there

    def late(*args: Any) -> Any:
        monkeypatch.undo()
        threading.Thread(target=upkeep.delete, args=[store]).run()
        return take_lock(*args)

    monkeypatch.setattr(upkeep, "_lock_there", late)
    with pytest.raises(diskbuf.StoreNotFoundError):
        upkeep.delete(store)
    assert not list(tmp_path.iterdir())


def test_a_store_that_took_the_place_of_the_one_to_delete_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(tmp_path / "s")
    take_lock = upkeep._lock_there

    def late(*args: Any) -> Any:
        shutil.rmtree(store)
        make(store, 3)
        return take_lock(*args)

    monkeypatch.setattr(upkeep, "_lock_there", late)
    with pytest.raises(diskbuf.StoreExistsError, match="another one has come"):
        upkeep.delete(store)
    assert rows(store)["x"][0].tolist() == [0, 1, 2]


# ---- the command line


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_get_no_file_of_a_store(tmp_path: Path, closed: str) -> None:
    make(tmp_path / "s")
    command = f"exec {SCRIPT} copy {tmp_path}/s {tmp_path}/t {closed}"
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert diskbuf.verify(tmp_path / "t", values=True).is_clean
    assert comparing.diff(tmp_path / "s", tmp_path / "t").is_equal


def test_nobody_is_asked_over_a_closed_stream(tmp_path: Path) -> None:
    make(tmp_path / "s")
    command = f"exec {SCRIPT} trim {tmp_path}/s --keep 3 <&-"
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "Add --yes" in run.stderr
    assert rows(tmp_path / "s")["x"].shape == (2, 20)


def test_errors_that_cannot_be_printed_are_in_the_exit_code(tmp_path: Path) -> None:
    make(tmp_path / "s")
    for words, code in ((["info", "s"], 1), (["info", "none"], 1), (["verify"], 2)):
        with open("/dev/full", "wb") as full:
            run = subprocess.run([SCRIPT, *words], cwd=tmp_path, stdout=full, stderr=full, check=False)
        assert run.returncode == code


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_names_that_are_no_text_are_printed(tmp_path: Path, encoding: str) -> None:
    name = os.fsdecode(b"\xc3\xbc\xff ")
    make(tmp_path / name)
    environment = os.environ | {"PYTHONIOENCODING": f"{encoding}:strict"}

    def call(*words: str) -> str:
        run = subprocess.run(
            [SCRIPT, *words], cwd=tmp_path, env=environment, capture_output=True, encoding=encoding, check=False
        )
        assert (run.returncode, run.stderr) == (0, "")
        return run.stdout

    assert "\\udcff" in call("info", name)
    assert json.loads(call("info", "--json", name))["path"] == f"{tmp_path}/{name}"
    assert call("delete", "--yes", name).endswith("deleted\n")


def test_names_with_control_characters_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make(tmp_path / f"a\x1b\n{os.fsdecode(bytes([255]))}")
    for verb, output in (("plot", "a.svg"), ("plot", "a.png"), ("report", "a.html")):
        words = [verb, str(store), "-o", str(tmp_path / output), "--ends", "done"]
        assert cli.main(words) == 0, capsys.readouterr().err
    minidom.parse(str(tmp_path / "a.svg"))
    assert "\x1b" not in (tmp_path / "a.html").read_text(encoding="utf-8")


def test_what_does_not_fit_into_memory_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "s")
    words = ["convert", str(tmp_path / "s"), str(tmp_path / "t"), "--codec", "zstd", "--chunk-bytes", "9" * 23]
    assert cli.main(words) == 1
    assert capsys.readouterr().err.count("\n") == 1


# ---- beside a writer


@pytest.mark.parametrize("layout", OPTIONS)
@pytest.mark.parametrize("added", [12, 30, 70, 300])
@pytest.mark.parametrize("chunk_bytes", [None, 128])
def test_no_step_is_made_up_for_those_that_a_writer_evicts_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, added: int, chunk_bytes: int | None
) -> None:
    options = diskbuf.StoreOptions(**{**vars(OPTIONS[layout]), "chunk_bytes": 1024})
    with diskbuf.UniformReplayBuffer(SPEC, 2, 40, path=tmp_path / "s", options=options) as writer:
        for verb in (copying, merging, splitting):
            add(writer, 100, base=1)

            def late(*args: Any, move: Any = verb.transfer, **given: Any) -> Any:
                add(writer, added, base=1)
                return move(*args, **given)

            monkeypatch.setattr(verb, "transfer", late)
        verbs = {
            "copy": lambda to: diskbuf.copy(tmp_path / "s", to, chunk_bytes=chunk_bytes),
            "merge": lambda to: diskbuf.merge([tmp_path / "s"], to, chunk_bytes=chunk_bytes),
            "lanes": lambda to: diskbuf.merge([tmp_path / "s"], to, lanes=1, chunk_bytes=chunk_bytes),
            "split": lambda to: diskbuf.split(tmp_path / "s", {to: 1.0}, by="steps", chunk_bytes=chunk_bytes),
        }
        for name, verb in verbs.items():
            end = writer.next_id
            try:
                verb(tmp_path / name)
            except diskbuf.WindowError:
                assert name != "copy" or added >= 40
                continue
            x = rows(tmp_path / name)["x"]
            if name == "lanes":
                x = x.reshape(2, -1)
            np.testing.assert_array_equal(x[0], np.arange(end - x.shape[1], end) + 1)
            np.testing.assert_array_equal(x[1], x[0] + 1_000_000)
