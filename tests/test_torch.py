"""`torch_dataset`: here what needs no torch, and what does in the environment that `make peers` makes."""

import gc
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import diskbuf
from diskbuf import readers
from diskbuf.plan import Share
from diskbuf.readers import pytorch
from diskbuf.readers.agreed_window import AgreedWindow
from diskbuf.readers.rows import Pass

ROOT = Path(__file__).resolve().parents[1]
PYTHON = ROOT / ".venv-torch" / "bin" / "python"


def test_beside_torch() -> None:
    """Runs tests/peers/beside_torch.py, whose failures are shown."""
    if not (PYTHON.parents[1] / ".installed").exists():
        reason = "needs PyTorch: make peers"
        pytest.fail(reason) if os.environ.get("DISKBUF_PEERS") == "required" else pytest.skip(reason)
    program = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/peers/beside_torch.py"]
    result = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert result.returncode == 0, result.stdout[-12000:] + result.stderr[-2000:]
    assert "passed" in result.stdout


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    pytorch._dataset_class.cache_clear()
    with pytest.raises(diskbuf.MissingExtraError, match=r"pip install 'diskbuf\[torch\]'"):
        readers.torch_dataset("anything")
    assert "torch" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_readers_export_what_they_have() -> None:
    assert dir(readers)
    assert readers.torch_dataset is pytorch.torch_dataset
    assert {*readers.__all__} == {*readers._MODULES} <= {*dir(readers)}
    with pytest.raises(AttributeError, match="no attribute 'torch_datset'"):
        _ = readers.torch_datset


@given(start=st.integers(0, 50), shards=st.integers(1, 5), workers=st.integers(1, 6), data=st.data())
def test_workers_in_turn_read_the_elements_of_a_share_in_order(
    start: int, shards: int, workers: int, data: st.DataObject
) -> None:
    share = Share(start=start, index=data.draw(st.integers(0, shards - 1)), shards=shards)
    own = [pytorch.worker_share(share, worker, workers) for worker in range(workers)]
    found = [own[turn % workers].number(turn // workers) for turn in range(20)]
    assert found == [share.number(element) for element in range(20)]


# ---- the window that workers agree on


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def moments() -> "itertools.count[int]":
    return itertools.count(1)


def test_workers_take_the_window_of_the_first_and_the_next_pass_another(folder: Path) -> None:
    agreed, moment = AgreedWindow(), moments()
    others = [AgreedWindow(agreed.path) for _ in range(3)]  # as other processes have it

    def now() -> Pass:
        return Pass(0, next(moment))

    for number in range(200):
        name = f"pass {number // 2}"  # also when a name comes again
        windows = {other.take(name, worker, now) for worker, other in enumerate(others)}
        assert windows == {Pass(0, number + 1)}
    assert agreed.path.stat().st_size < 10_000


def test_passes_at_the_same_time_have_windows_of_their_own(folder: Path) -> None:
    agreed = AgreedWindow()
    assert agreed.take("a", 0, lambda: Pass(0, 1)) == Pass(0, 1)
    assert agreed.take("b", 1, lambda: Pass(0, 2)) == Pass(0, 2)
    assert agreed.take("a", 1, lambda: Pass(0, 3)) == Pass(0, 1)
    assert agreed.take("b", 0, lambda: Pass(0, 4)) == Pass(0, 2)


def test_a_worker_that_is_killed_or_fails_keeps_nobody_from_going_on(folder: Path) -> None:
    agreed = AgreedWindow()
    agreed.path.write_text('[{"name": "a", "wind')
    assert agreed.take("a", 0, lambda: Pass(0, 1)) == Pass(0, 1)

    def fails() -> Pass:
        raise diskbuf.EmptyBufferError("empty")

    with pytest.raises(diskbuf.EmptyBufferError):
        agreed.take("b", 0, fails)
    assert agreed.take("b", 1, lambda: Pass(0, 2)) == Pass(0, 2)
    assert agreed.take("a", 1, lambda: Pass(0, 3)) == Pass(0, 1)


def _take(path: Path, worker: int, barrier: object, found: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    window = AgreedWindow(path).take("a", worker, lambda: Pass(worker, worker + 1))
    found.put(window)  # type: ignore[attr-defined]


def test_processes_that_begin_at_once_agree(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    for _ in range(10):
        agreed, barrier, found = AgreedWindow(), context.Barrier(6), context.SimpleQueue()
        children = [context.Process(target=_take, args=(agreed.path, worker, barrier, found)) for worker in range(6)]
        for child in children:
            child.start()
        windows = {found.get() for _ in children}
        for child in children:
            child.join()
        assert len(windows) == 1


def _forget(agreed: list[AgreedWindow]) -> None:
    agreed.clear()
    gc.collect()


def test_the_file_goes_with_its_maker_and_not_with_a_forked_child(folder: Path) -> None:
    agreed = [AgreedWindow()]
    child = multiprocessing.get_context("fork").Process(target=_forget, args=(agreed,))
    child.start()
    child.join()
    AgreedWindow(agreed[0].path)
    gc.collect()
    assert len(list(folder.iterdir())) == 1
    _forget(agreed)
    assert list(folder.iterdir()) == []
