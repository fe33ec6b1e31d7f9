"""The examples, run as programs, in short forms."""

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr

import diskbuf
from diskbuf.environments import suite_gym
from diskbuf.readers import stack_frames
from diskbuf.trajectories import StepType, Trajectory

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PNG = b"\x89PNG\r\n\x1a\n"


def command(program: str, *arguments: object) -> list[str]:
    return [sys.executable, str(EXAMPLES / program), *map(str, arguments)]


def run(program: str, *arguments: object) -> str:
    result = subprocess.run(command(program, *arguments), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def rows_of(store: Path) -> Trajectory:
    with diskbuf.open(store) as buffer:
        rows: Trajectory = buffer.gather_all()
    return rows


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("collected") / "cartpole.zarr"
    run("cartpole_collect.py", path, "--num-steps=4000", "--num-envs=4", "--seed=1")
    return path


def returns_of(rows: Trajectory) -> list[float]:
    """What each whole episode earned."""
    returns = []
    for lane in range(rows.reward.shape[0]):
        earned, is_whole = 0.0, False
        for t in range(rows.reward.shape[1]):
            if rows.step_type[lane, t] == StepType.FIRST:
                earned, is_whole = 0.0, True
            earned += rows.reward[lane, t]
            if is_whole and rows.next_step_type[lane, t] == StepType.LAST:
                returns.append(earned)
    return returns


def test_the_collector_stops_at_the_steps_asked_for(store: Path) -> None:
    rows = rows_of(store)
    assert rows.reward.shape == (4, 1000)
    assert rows.is_last().sum() > 100
    assert (rows.reward == np.where(rows.is_boundary(), 0, 1)).all()


def test_the_collector_run_again_goes_on_without_repeating_itself(tmp_path: Path) -> None:
    store = tmp_path / "cartpole.zarr"
    for steps in (800, 1600):
        run("cartpole_collect.py", store, f"--num-steps={steps}", "--seed=3")
    rows = rows_of(store)
    assert rows.reward.shape == (8, 200)
    assert (rows.step_type[:, 100] == StepType.FIRST).all()
    assert not np.isin(rows.observation[:, :100, 0], rows.observation[:, 100:, 0]).any()
    assert "added 0 steps to 1,600" in run("cartpole_collect.py", store, "--num-steps=1600", "--seed=3")


def test_the_collector_killed_on_the_way_loses_nothing_and_goes_on(tmp_path: Path) -> None:
    store = tmp_path / "cartpole.zarr"
    collector = command("cartpole_collect.py", store, "--num-steps=1000000", "--seed=4")
    process = subprocess.Popen(collector, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        seen, before = 0, None
        while seen < 2000:
            assert process.poll() is None
            time.sleep(0.005)
            with contextlib.suppress(diskbuf.StoreNotFoundError), diskbuf.open(store) as buffer:
                before, seen = buffer.gather_all(), buffer.next_id
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()

    kept = rows_of(store)
    assert kept.reward.shape[1] >= seen
    run("cartpole_collect.py", store, f"--num-steps={kept.reward.size + 800}", "--seed=4")
    rows = rows_of(store)
    assert rows.reward.shape == (8, kept.reward.shape[1] + 100)
    for earlier in (before, kept):
        for name in ("observation", "action", "reward", "step_type", "next_step_type", "discount"):
            then, now = getattr(earlier, name), getattr(rows, name)
            assert np.array_equal(then, now[:, : then.shape[1]]), name
    assert (rows.step_type[:, kept.reward.shape[1]] == StepType.FIRST).all()


def test_the_offline_example_trains_and_reports(store: Path, tmp_path: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in store.rglob("*")}
    figure, report_file = tmp_path / "figures" / "cartpole.png", tmp_path / "report.json"
    output = run(
        "cartpole_offline.py", store, "--num-iterations=120", f"--plot={figure}", f"--report={report_file}", "--seed=2"
    )
    report = json.loads(report_file.read_text())
    assert report["random_return"] == np.mean(returns_of(rows_of(store)))
    assert report["ratio"] == report["greedy_return"] / report["random_return"]
    assert report["train_step"] == 120
    assert [at for at, _ in report["losses"]] == list(range(3, 121, 3))
    assert [at for at, _ in report["returns"]] == list(range(12, 121, 12))
    assert report["greedy_return"] == np.mean(report["greedy_returns"])
    assert len(report["greedy_returns"]) == 20
    assert "mean of 20 episodes" in output
    assert figure.read_bytes().startswith(PNG)
    assert {file: file.stat().st_mtime_ns for file in store.rglob("*")} == before


def test_the_offline_example_killed_on_the_way_goes_on(store: Path, tmp_path: Path) -> None:
    folder, report_file = store.with_name("cartpole_offline"), tmp_path / "report.json"
    shutil.rmtree(folder, ignore_errors=True)
    trainer = command("cartpole_offline.py", store, "--num-iterations=100000")
    process = subprocess.Popen(trainer, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not (folder / "checkpoints" / "ckpt-1000.index").exists():
            assert process.poll() is None
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    output = run("cartpole_offline.py", store, "--num-iterations=1200", f"--report={report_file}")
    assert "trained        1,200 batches" in output
    assert {path.stem for path in (folder / "checkpoints").glob("*.index")} >= {"ckpt-1000", "ckpt-1200"}
    report = json.loads(report_file.read_text())
    assert [at for at, _ in report["losses"]][-1] == 1200


def test_the_demo_fails_when_the_greedy_policy_is_no_better(tmp_path: Path) -> None:
    demo = command("demo.py", f"--folder={tmp_path}", "--num-steps=6000", "--num-iterations=1")
    result = subprocess.run(demo, capture_output=True, text=True, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Killed with SIGKILL" in result.stdout
    assert "must earn at least 3 times the random return" in result.stderr
    assert (tmp_path / "cartpole.png").read_bytes().startswith(PNG)
    rows = rows_of(tmp_path / "cartpole.zarr")
    assert rows.reward.size == 6000


def test_the_dqn_example_trains_and_goes_on(tmp_path: Path) -> None:
    first = run("cartpole_dqn.py", tmp_path / "run", "--short")
    assert "after 300 train steps: average return" in first
    steps = int(re.search(r"([\d,]+) environment steps, 300 train steps", first)[1].replace(",", ""))  # type: ignore[index]
    with diskbuf.open(tmp_path / "run" / "store.zarr") as buffer:
        assert buffer.next_id * 8 == steps
    again = run("cartpole_dqn.py", tmp_path / "run", "--num-iterations=320")
    assert "320 train steps" in again
    with diskbuf.open(tmp_path / "run" / "store.zarr") as buffer:
        assert buffer.next_id * 8 > steps


def test_the_tutorial_runs_from_section_to_section() -> None:
    out = run("replay_buffer_tutorial.py")
    assert "frames: 320" in out
    assert "still there when it is opened again: 320" in out
    assert "loss after 50 train steps" in out


def check_replay(rows: Trajectory, seed: int) -> None:
    """Plays the actions of a run's rows again, in games that stack their frames themselves."""
    lanes, num_rows = rows.reward.shape
    stacks = stack_frames(rows, 4).observation  # [lanes, num_rows - 3, 4, 84, 84]
    with suite_gym.load("ale_py:ALE/Breakout-v5", lanes, seed=seed, vectorization="vector_entry_point") as env:
        time_step, age = env.reset(), np.zeros(lanes, int)
        for t in range(num_rows):
            assert (time_step.step_type == rows.step_type[:, t]).all()
            assert (time_step.observation[:, 3] == rows.observation[:, t]).all()
            age = np.where(time_step.is_first(), 0, age + 1)
            if t >= 3:
                # ALE shows black before an episode begins, where Gymnasium's wrapper and we repeat the first frame.
                is_before = np.arange(4) < 3 - age[:, None]
                ours = np.where(is_before[..., None, None], 0, stacks[:, t - 3])
                assert (time_step.observation == ours).all(), t
            time_step = env.step(rows.action[:, t])
            assert (time_step.reward == rows.reward[:, t]).all()


def test_the_atari_example_stores_single_frames_reads_stacks_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, figure = tmp_path / "breakout.zarr", tmp_path / "figures" / "stack.png"
    arguments = (store, "--game=Breakout", "--num-envs=4", "--seed=3")
    output = run("atari_collect.py", *arguments, "--short", f"--plot={figure}")
    assert "added 3,000 steps to 0" in output
    assert "batches [32, 2, 4, 84, 84] a second" in output
    assert 3.9 < float(re.search(r"([\d.]+) times as much", output)[1]) < 4.0  # type: ignore[index]
    assert figure.read_bytes().startswith(PNG)
    assert {path.name for path in tmp_path.iterdir()} == {"breakout.zarr", "figures"}  # the store beside it is gone
    frames = zarr.open_group(store, mode="r")["observation"][:750]  # type: ignore[index]
    assert (frames.shape, frames.dtype) == ((750, 4, 84, 84), np.uint8)
    on_disk = sum(file.stat().st_blocks * 512 for file in (store / "observation").iterdir())
    assert frames.nbytes <= on_disk < 1.05 * frames.nbytes

    process = subprocess.Popen(
        command("atari_collect.py", *arguments, "--num-steps=1000000"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with diskbuf.open(store) as buffer:
            while buffer.next_id < 900:
                assert process.poll() is None
                time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()

    monkeypatch.setattr(os, "environ", dict(os.environ))  # what the example sets is for its own process
    seeds = runpy.run_path(str(EXAMPLES / "atari_collect.py"))["seeds"]
    rows = rows_of(store)
    assert (rows.observation[:, :750] == frames.swapaxes(0, 1)).all()
    runs = [
        Trajectory(*(leaf if isinstance(leaf, tuple) else leaf[:, part] for leaf in rows))  # policy_info is ()
        for part in (slice(750), slice(750, None))
    ]
    assert runs[0].is_last().sum() > 4
    assert (runs[0].action[:, :100] != runs[1].action[:, :100]).any()  # it doesn't repeat itself
    check_replay(runs[0], seeds(3, 0)[0])
    check_replay(runs[1], seeds(3, 750)[0])


def test_the_atari_example_refuses_the_store_of_another_game(tmp_path: Path) -> None:
    spec = {"observation": diskbuf.ArraySpec((), "uint8")}
    diskbuf.UniformReplayBuffer(spec, path=tmp_path / "pong.zarr", metadata={"environment": "ALE/Pong-v5"}).close()
    arguments = command("atari_collect.py", tmp_path / "pong.zarr", "--game=Breakout", "--seed=1")
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "must hold rows of ALE/Breakout-v5 to go on with it, got ALE/Pong-v5" in result.stderr


def test_the_bandit_example_draws_the_regret_of_every_agent_and_goes_on(tmp_path: Path) -> None:
    first = run("bandit_wheel.py", tmp_path, "--short")
    lines = re.findall(r"(wheel|linear): (.+) regretted ([\d.]+) in (\d+) rounds", first)
    assert len(lines) == 16
    assert {rounds for *_, rounds in lines} == {"30"}
    assert (tmp_path / "regret.png").read_bytes().startswith(PNG)
    with diskbuf.open(tmp_path / "wheel" / "linear_UCB" / "log.zarr", history=True) as log:
        assert log.num_frames() == 30 * 8


def test_the_offline_bandit_example_goes_from_csv_to_estimates(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    feature, item = rng.integers(0, 3, 3000), rng.integers(0, 4, 3000)
    click = rng.random(3000) < np.where(feature == item, 0.9, 0.1)  # one item for each feature, item 3 for none
    lines = ["timestamp,item_id,click,propensity_score,user_feature_0"]
    lines += [
        f"2024-01-01 00:{n // 60:02}:{n % 60:02}.{n:06},{item[n]},{int(click[n])},0.25,feature{feature[n]}"
        for n in range(3000)
    ]
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    arguments = [tmp_path / "log.csv", f"--folder={tmp_path / 'run'}", "--context=user_feature_0", "--num-epochs=40"]
    for output in (run("open_bandit_offline.py", *arguments), run("open_bandit_offline.py", *arguments)):
        estimates = {
            name: float(re.search(rf"^{name}\n(?:.*\n)*?IPS +([\d.]+)", output, re.MULTILINE)[1])  # type: ignore[index]
            for name in ("uniform", "linear_ucb", "linear_thompson", "epsilon_greedy")
        }
        assert 0.2 < estimates["uniform"] < 0.4
        assert min(estimates["linear_ucb"], estimates["linear_thompson"]) > 0.8
        assert estimates["epsilon_greedy"] > 0.6


def test_the_cloud_example_learns_from_what_another_process_publishes() -> None:
    output = run("stream_from_cloud.py", "--num-steps=30000", "--seed=2")
    told = re.findall(r"upright is worth ([\d.]+), leaning ([\d.]+)", output)
    upright, leaning = map(float, told[-1])
    assert 8 < upright < 20  # at most 1 / (1 - 0.95), which the random policy stays below
    assert 0 < leaning < upright - 1
    published = re.search(r"pairs of ([\d,]+) steps at s3://bucket/cartpole.zarr", output)
    assert published is not None
    assert int(published[1].replace(",", "")) >= 30_000
