"""Exports and imports are whole or not there: full disks, kills, what was there before, writers beside, URLs."""

import errno
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from coded_rows import SPEC, assert_rows, rows, span
from servers import CloudServer, s3_server

import diskbuf
from diskbuf import ArraySpec, StoreOptions, UniformReplayBuffer
from diskbuf.exchange.exporting import export_store
from diskbuf.exchange.importing import import_store
from diskbuf.exchange.mapping import ColumnMap
from diskbuf.exchange.minari_datasets import MinariFormat
from diskbuf.exchange.parquet import ParquetFormat
from diskbuf.exchange.targets import target_of

ENDINGS = (".parquet", ".arrow", ".csv", ".npz", ".h5")
OPTIONS: dict[str, dict[str, Any]] = {".csv": {"flatten": True}}


def filled(lanes: int = 2, steps: int = 30) -> UniformReplayBuffer:
    buffer = UniformReplayBuffer(SPEC, lanes, None)
    buffer.extend(span(0, steps, lanes))
    return buffer


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_there_is_replaced_only_by_force(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"a{ending}"
    file.write_text("precious")
    with filled() as buffer:
        with pytest.raises(diskbuf.StoreExistsError, match=r"holds a file\. Choose another place, or force it"):
            export_store(buffer, file, options=OPTIONS.get(ending))
        assert file.read_text() == "precious"
        export_store(buffer, file, options=OPTIONS.get(ending), force=True)
        assert file.stat().st_size > 1000
        folder = tmp_path / f"folder{ending}"
        folder.mkdir()
        for name in ("", "some"):
            if name:
                (folder / name).write_text("precious")
            with pytest.raises(diskbuf.StoreExistsError, match="holds a folder"):
                export_store(buffer, folder, options=OPTIONS.get(ending), force=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"a{ending}", f"folder{ending}"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_export_that_fails_leaves_nothing(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"a{ending}"

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with filled() as buffer:
        with pytest.raises(KeyboardInterrupt):
            export_store(buffer, file, options=OPTIONS.get(ending), progress=fail)
        assert not list(tmp_path.iterdir())
        file.write_text("precious")
        with pytest.raises(KeyboardInterrupt):
            export_store(buffer, file, options=OPTIONS.get(ending), progress=fail, force=True)
    assert file.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_full_disk_leaves_nothing(tmp_path: Path, ending: str) -> None:
    code = f"""
        import resource, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import diskbuf
        from diskbuf.exchange.exporting import export_store
        with diskbuf.open({str(tmp_path / "a.zarr")!r}) as buffer:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            try:
                export_store(buffer, {str(tmp_path / f"a{ending}")!r}, options={OPTIONS.get(ending)!r})
            except OSError as error:
                print(error)
    """
    with UniformReplayBuffer(SPEC, 2, None, path=tmp_path / "a.zarr") as buffer:
        buffer.extend(span(0, 3000, 2))
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "File too large" in run.stdout, run.stdout + run.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.zarr"]


def test_a_full_disk_is_told_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("diskbuf.exchange.parquet._write", full)
    with filled() as buffer, pytest.raises(OSError, match=r"must be writable and have room for the export.*Make room"):
        export_store(buffer, tmp_path / "a.parquet")
    assert not list(tmp_path.iterdir())


def test_a_killed_export_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".a.parquet.tmp").write_text("half")
    with filled() as buffer:
        export_store(buffer, tmp_path / "a.parquet")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.parquet"]


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".csv"])
def test_an_object_appears_when_it_is_whole(ending: str) -> None:
    url = f"memory://exchange/a{ending}"
    system = fsspec.filesystem("memory")

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with filled() as buffer:
        with pytest.raises(KeyboardInterrupt):
            export_store(buffer, url, options=OPTIONS.get(ending), progress=fail)
        assert not system.exists(url)
        report = export_store(buffer, url, options=OPTIONS.get(ending))
        assert report.bytes_written == system.size(url)
        with pytest.raises(diskbuf.StoreExistsError, match="holds an object"):
            export_store(buffer, url, options=OPTIONS.get(ending))
        export_store(buffer, url, options=OPTIONS.get(ending), force=True)
        with pytest.raises(diskbuf.OptionError, match="must be a path on this machine for the format npz"):
            export_store(buffer, "memory://exchange/a.npz")
    system.rm("/exchange", recursive=True)


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".csv"])
def test_a_file_at_a_url_is_imported(tmp_path: Path, ending: str) -> None:
    url = f"memory://exchange/b{ending}"
    with filled() as buffer:
        export_store(buffer, url, options=OPTIONS.get(ending))
    mapping = ColumnMap(spec=SPEC) if ending == ".csv" else None
    import_store(url, tmp_path / "a.zarr", mapping=mapping)
    with diskbuf.open(tmp_path / "a.zarr") as copy:
        assert_rows(copy.gather_all(), np.arange(30)[None], np.arange(2)[:, None])
    fsspec.filesystem("memory").rm("/exchange", recursive=True)


# ---- imports


@pytest.mark.parametrize("what", ["a store", "a file", "a folder with files"])
def test_an_import_replaces_nothing(tmp_path: Path, what: str) -> None:
    place = tmp_path / "there"
    if what == "a store":
        UniformReplayBuffer(SPEC, 2, None, path=place).close()
    elif what == "a file":
        place.write_text("precious")
    else:
        place.mkdir()
        (place / "some").write_text("precious")
    with filled() as buffer:
        export_store(buffer, tmp_path / "a.parquet")
    with pytest.raises(diskbuf.StoreExistsError, match=f"holds {what}"):
        import_store(tmp_path / "a.parquet", place)


def test_an_import_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with filled() as buffer:
        export_store(buffer, tmp_path / "a.parquet")
    with pytest.raises(KeyboardInterrupt):
        import_store(tmp_path / "a.parquet", tmp_path / "b.zarr", progress=fail)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.parquet"]


def test_a_killed_import_is_swept_away_by_the_next(tmp_path: Path) -> None:
    with filled(steps=300) as buffer:
        export_store(buffer, tmp_path / "a.parquet")
    code = """
        import os, signal, sys
        sys.path.insert(0, sys.argv[3])
        from diskbuf.exchange.importing import import_store
        import_store(sys.argv[1], sys.argv[2], progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    """
    argv = [str(tmp_path / "a.parquet"), str(tmp_path / "b.zarr"), str(Path(__file__).parent)]
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code), *argv], check=False)
    assert run.returncode == -9
    assert not (tmp_path / "b.zarr").exists()
    assert (tmp_path / ".b.zarr.staging").exists()
    import_store(tmp_path / "a.parquet", tmp_path / "b.zarr")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.parquet", "b.zarr"]


# ---- a writer beside


@pytest.mark.parametrize("ending", ENDINGS)
def test_rows_that_a_writer_evicts_are_left_out_and_counted(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"a{ending}"
    options = StoreOptions(chunk_bytes=2**8)
    with UniformReplayBuffer(SPEC, 2, 100, path=tmp_path / "a.zarr", options=options) as writer:
        writer.extend(span(0, 100, 2))
        with diskbuf.open(tmp_path / "a.zarr") as reader:
            added = threading.Event()

            def go_on(done: int, total: int) -> None:
                if not added.is_set():  # behind the first block that is handed out
                    added.set()
                    writer.extend(span(100, 160, 2))

            report = export_store(reader, file, options=OPTIONS.get(ending), progress=go_on)
    assert report.next_id == 100
    assert report.evicted >= 60 - 60 // 8 - 8
    assert report.rows == 2 * (100 - report.evicted)
    mapping = ColumnMap(spec=SPEC) if ending == ".csv" else None
    import_store(file, tmp_path / "b.zarr", mapping=mapping)
    with diskbuf.open(tmp_path / "b.zarr") as copy:
        found = copy.gather_all()
        ids = found["number"][0] // 100
        assert len(ids) == report.rows // 2
        np.testing.assert_array_equal(found["image"], rows(ids[None], np.arange(2)[:, None])["image"])
        np.testing.assert_array_equal(found["number"], rows(ids[None], np.arange(2)[:, None])["number"])


# ---- memory


def peak_mib(code: str, *argv: str) -> float:
    """MiB that a process needs, beyond those of one that only imports what it does."""
    script = f"""
        import resource, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        def peak():
            with open("/proc/self/status") as file:
                return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024
        import diskbuf, numpy, pyarrow, pyarrow.parquet, h5py
        from diskbuf.exchange.exporting import export_store
        from diskbuf.exchange.importing import import_store
        before = peak()
        {code}
        print(peak() - before)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), *argv]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


MEGABYTES = 400


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that is larger than what an export or import may take."""
    path = tmp_path_factory.mktemp("large") / "a.zarr"
    spec = {"frame": ArraySpec([2**14], "float32"), "reward": ArraySpec([], "float32")}
    block = {"frame": np.zeros([2, 100, 2**14], "float32"), "reward": np.zeros([2, 100], "float32")}
    with UniformReplayBuffer(spec, 2, None, path=path) as buffer:
        while buffer.num_frames() * 2**16 < MEGABYTES * 2**20:
            buffer.extend(block)
    return path


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".npz", ".h5"])
def test_memory_is_bounded_whatever_the_size(tmp_path: Path, large: Path, ending: str) -> None:
    file, copy = str(tmp_path / f"a{ending}"), str(tmp_path / "b.zarr")
    assert peak_mib("export_store(diskbuf.open(sys.argv[1]), sys.argv[2])", str(large), file) < 0.75 * MEGABYTES
    assert peak_mib("import_store(sys.argv[1], sys.argv[2])", file, copy) < 0.75 * MEGABYTES
    with diskbuf.open(copy) as buffer, diskbuf.open(large) as whole:
        assert buffer.num_frames() == whole.num_frames()


def test_a_parquet_file_has_row_groups_of_the_size_asked_for(tmp_path: Path) -> None:
    with UniformReplayBuffer(SPEC, 2, 1000, options=StoreOptions(chunk_bytes=2**8)) as buffer:
        buffer.extend(span(0, 1000, 2))
        export_store(buffer, tmp_path / "many.parquet", options={"row_group_bytes": 20_000, "compression": "none"})
        export_store(buffer, tmp_path / "one.parquet")
    assert pq.ParquetFile(tmp_path / "one.parquet").num_row_groups == 1  # however small the store's chunks are
    many = pq.ParquetFile(tmp_path / "many.parquet")
    assert 5 < many.num_row_groups < 20
    assert pq.read_table(tmp_path / "one.parquet").equals(pq.read_table(tmp_path / "many.parquet"))


@pytest.fixture(scope="module")
def bucket() -> Iterator[CloudServer]:
    with s3_server() as server:
        yield server


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".csv"])
def test_a_bucket_shows_an_export_only_when_it_is_whole(bucket: CloudServer, tmp_path: Path, ending: str) -> None:
    # A folder of its own: moto keeps one bucket for all tests of a process.
    url, options = f"{bucket.url}/{tmp_path.name}/a{ending}", bucket.storage_options
    system, path = fsspec.core.url_to_fs(url, **options)

    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    def export(**more: Any) -> None:
        export_store(buffer, url, options=OPTIONS.get(ending), storage_options=options, **more)

    with filled() as buffer:
        with pytest.raises(KeyboardInterrupt):
            export(progress=fail)
        system.invalidate_cache()
        assert not system.exists(path)
        export()
        before = system.cat(path)
        with pytest.raises(diskbuf.StoreExistsError, match="holds an object"):
            export()
        with pytest.raises(KeyboardInterrupt):
            export(progress=fail, force=True)
        system.invalidate_cache()
        assert system.cat(path) == before
        assert [name.rpartition("/")[2] for name in system.ls(path.rpartition("/")[0])] == [f"a{ending}"]
    mapping = ColumnMap(spec=SPEC) if ending == ".csv" else None
    import_store(url, tmp_path / "a.zarr", mapping=mapping, storage_options=options)
    with diskbuf.open(tmp_path / "a.zarr") as copy:
        assert_rows(copy.gather_all(), np.arange(30)[None], np.arange(2)[:, None])
    system.rm(path)


def test_folders_that_are_a_part_of_a_name_are_made_and_go_again_on_failure(tmp_path: Path) -> None:
    kind = MinariFormat()
    place = tmp_path / "a" / "b" / "c-v0"
    with pytest.raises(RuntimeError), target_of(place, kind, force=False, storage_options=None):
        raise RuntimeError
    assert not list(tmp_path.iterdir())
    with target_of(place, kind, force=False, storage_options=None) as target:
        (target.local_path() / "file").write_text("x")
    assert (place / "file").read_text() == "x"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b.parquet"
    with (
        pytest.raises(FileNotFoundError, match=r"folder .*a must exist to hold b\.parquet\. Make it first"),
        target_of(place, ParquetFormat(), force=False, storage_options=None),
    ):
        pass
