"""Exports and imports beside each other, of files that are damaged, doubled or cut, and of steps that are odd."""

import threading
from pathlib import Path

import numpy as np
import pytest
from coded_rows import SPEC, assert_rows, span

import diskbuf
from diskbuf import ArraySpec, UniformReplayBuffer
from diskbuf.errors import StoreLockedError
from diskbuf.exchange.contract import trajectories_of_episode
from diskbuf.exchange.exporting import export_store
from diskbuf.exchange.importing import import_store
from diskbuf.trajectories import PolicyStep, Trajectory, time_step_spec, trajectory_spec
from diskbuf.tree import Structure

TRAJECTORY = trajectory_spec(time_step_spec(ArraySpec([1], "float32")), PolicyStep(ArraySpec([], "int64"), (), ()))


def filled(next_id: int = 300) -> UniformReplayBuffer:
    buffer = UniformReplayBuffer(SPEC, 2, None)
    buffer.extend(span(0, next_id, 2))
    return buffer


def driven(*lengths: int) -> UniformReplayBuffer:
    """Episodes of so many actions, boundaries included, every other one cut off."""
    buffer = UniformReplayBuffer(TRAJECTORY, 1, None)
    structure = Structure(TRAJECTORY)
    for number, steps in enumerate(lengths):
        times = np.arange(steps + 1.0, dtype="float32") + 100 * number
        rows = trajectories_of_episode(
            times[:, None],
            times[:steps].astype("int64"),
            times[:steps],
            terminated=number % 2 == 0,
            truncated=number % 2 == 1,
        )
        buffer.extend(structure.unflatten([np.asarray(leaf)[None] for leaf in structure.flatten(rows)]))
    return buffer


def rows_of(store: Path) -> Trajectory:
    with diskbuf.open(store) as buffer:
        rows: Trajectory = buffer.gather_all()
        return rows


# ---- beside each other


@pytest.mark.parametrize("ending", [".parquet", ".arrow", ".npz", ".h5"])
def test_an_export_under_way_is_not_disturbed_by_another_to_the_same_place(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"a{ending}"
    refused: list[Exception] = []

    def another(done: int, total: int) -> None:
        if not refused:
            with filled(5) as small, pytest.raises(StoreLockedError, match="one export at a time") as caught:
                export_store(small, file, force=True)
            refused.append(caught.value)

    with filled() as buffer:
        export_store(buffer, file, progress=another)
    assert refused
    import_store(file, tmp_path / "a.zarr")
    with diskbuf.open(tmp_path / "a.zarr") as copy:
        assert copy.next_id == 300
        assert_rows(copy.gather_all(), np.arange(300)[None], np.arange(2)[:, None])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [f"a{ending}", "a.zarr"]


def test_a_folder_under_way_is_not_disturbed_by_another_to_the_same_place(tmp_path: Path) -> None:
    with driven(3, 2) as buffer, driven(1) as other:

        def another(done: int, total: int) -> None:
            with pytest.raises(StoreLockedError):
                export_store(other, tmp_path / "a.rlds")

        export_store(buffer, tmp_path / "a.rlds", progress=another)
    import_store(tmp_path / "a.rlds", tmp_path / "a.zarr")
    assert rows_of(tmp_path / "a.zarr").reward.tolist() == [[0, 1, 2, 0, 100, 101, 0]]


@pytest.mark.parametrize("left", ["file", "folder", "link"])
@pytest.mark.parametrize("ending", [".parquet", ".rlds"])
def test_what_a_killed_export_left_is_cleared_away_whatever_it_is(tmp_path: Path, ending: str, left: str) -> None:
    temporary, precious = tmp_path / f".a{ending}.tmp", tmp_path / "precious"
    precious.write_text("kept")
    if left == "file":
        temporary.write_bytes(bytes(10**6))
    elif left == "folder":
        (temporary / "inside").mkdir(parents=True)
        (temporary / "inside" / "file").write_text("half")
    else:
        temporary.symlink_to(precious)
    with driven(3) as buffer:
        export_store(buffer, tmp_path / f"a{ending}")
    import_store(tmp_path / f"a{ending}", tmp_path / "a.zarr")
    assert rows_of(tmp_path / "a.zarr").reward.tolist() == [[0, 1, 2, 0]]
    assert precious.read_text() == "kept"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted([f"a{ending}", "a.zarr", "precious"])


def test_of_many_exports_at_once_each_is_whole_or_refused(tmp_path: Path) -> None:
    refused: list[Exception] = []

    def export() -> None:
        try:
            with filled() as buffer:
                export_store(buffer, tmp_path / "a.arrow", force=True)
        except StoreLockedError as error:
            refused.append(error)

    threads = [threading.Thread(target=export) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) < len(threads)
    import_store(tmp_path / "a.arrow", tmp_path / "a.zarr")
    with diskbuf.open(tmp_path / "a.zarr") as copy:
        assert_rows(copy.gather_all(), np.arange(300)[None], np.arange(2)[:, None])
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


# ---- odd steps


@pytest.mark.parametrize(("first_id", "rewards"), [(3, [100, 101, 102, 0]), (7, [])])
def test_a_boundary_whose_episode_is_not_among_the_rows_is_no_transition(
    tmp_path: Path, first_id: int, rewards: list[float]
) -> None:
    with driven(3, 3) as buffer:  # the rows 3 and 7 are boundaries
        report = export_store(buffer, tmp_path / "a.rlds", first_id=first_id)
    import_store(tmp_path / "a.rlds", tmp_path / "a.zarr")
    assert rows_of(tmp_path / "a.zarr").reward.ravel().tolist() == rewards
    assert report.rows == len(rewards)
