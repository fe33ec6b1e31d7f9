"""Collecting, training and judging from the shell."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diskbuf_tools import cli
from diskbuf_tools.demonstration import run_and_kill

import diskbuf
from diskbuf import trajectories
from diskbuf.bandits import evaluation, logs, recipes, trainer
from diskbuf.policies import RandomPolicy, newest_policy
from diskbuf.training import collecting
from diskbuf.training import run as training_run
from diskbuf.training.recipes import DqnSettings, dqn_agent, observation_scales, train_dqn_offline

SCRIPT = Path(sys.executable).with_name("diskbuf")


def in_shell(*words: object) -> "subprocess.CompletedProcess[str]":
    """Runs the console script as a user does."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}
    environment.pop("TF_CPP_MIN_LOG_LEVEL")  # the verbs are to be quiet by themselves
    return subprocess.run([SCRIPT, *map(str, words)], capture_output=True, text=True, env=environment, check=False)


def shell(*words: object) -> str:
    """Returns what the console script prints when all goes well."""
    run = in_shell(*words)
    assert (run.returncode, run.stderr) == (0, ""), run.stdout + run.stderr
    return run.stdout


def rows_of(store: Path) -> trajectories.Trajectory:
    with diskbuf.open(store) as buffer:
        rows: trajectories.Trajectory = buffer.gather_all()
    return rows


def collect(store: Path, steps: int, *more: object) -> int:
    return cli.main(["collect", "CartPole-v1", str(store), f"--steps={steps}", *map(str, more)])


def wait_for_steps(store: Path, steps: int, process: "subprocess.Popen[Any]") -> int:
    """Returns how many steps a store has in each lane, once there are so many."""
    while True:
        assert process.poll() is None
        with contextlib.suppress(diskbuf.StoreNotFoundError), diskbuf.open(store) as buffer:
            if buffer.next_id >= steps:
                return buffer.next_id
        time.sleep(0.005)


def decisions(number: int = 3000) -> dict[str, Any]:
    """Three features, three arms shown at random; arm i earns where feature i is the largest."""
    rng = np.random.default_rng(0)
    features = rng.random((number, 3)).astype(np.float32)
    arm = rng.integers(0, 3, number)
    click = rng.random(number) < np.where(features.argmax(axis=1) == arm, 0.9, 0.1)
    named = {f"f{place}": features[:, place] for place in range(3)}
    return named | {"item": arm, "click": click.astype(int), "p": np.full(number, 1 / 3)}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    rows = decisions()
    lines = [",".join(rows), *(",".join(map(str, row)) for row in zip(*rows.values(), strict=True))]
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    columns = logs.LogColumns(context=["f0", "f1", "f2"], action="item", reward="click", propensity="p")
    logs.import_log(folder / "log.csv", folder / "log.zarr", columns)
    return folder / "log.zarr"


def test_from_collecting_to_a_judged_policy(tmp_path: Path) -> None:
    store, folder = tmp_path / "cartpole.zarr", tmp_path / "dqn"
    assert "2,000 rows, 2,000 of them now" in shell("collect", "CartPole-v1", store, "--steps=2000", "--seed=1")
    facts = json.loads(shell("info", store, "--json"))
    assert (facts["batch_size"], facts["num_frames"]) == (8, 2000)
    assert facts["metadata"] == {"environment": "CartPole-v1", "policies": [{"first_id": 0, "policy": "random"}]}
    before = {file: file.stat().st_mtime_ns for file in store.rglob("*")}
    out = shell("train-offline", store, "--steps=200", "-o", folder, "--env=CartPole-v1", "--episodes=4")
    assert out.splitlines()[0].split() == ["train", "step", "loss", "mean", "return"]
    assert [line.split()[0] for line in out.splitlines()[1:11]] == [str(step) for step in range(20, 201, 20)]
    assert out.splitlines()[-1] == f"{folder}/policy_200: the greedy policy after 200 train steps"
    assert {file: file.stat().st_mtime_ns for file in store.rglob("*")} == before
    found = json.loads(shell("evaluate", folder, "--env=CartPole-v1", "--episodes=7", "--json"))
    assert (found["episodes"], len(found["returns"])) == (7, 7)
    assert found["mean_return"] == np.mean(found["returns"])
    # Collects on with what it learnt, and notes that in the store.
    shell("collect", "CartPole-v1", store, "--steps=2400", "--policy", folder, "--epsilon=0.5")
    assert json.loads(shell("info", store, "--json"))["metadata"]["policies"] == [
        {"first_id": 0, "policy": "random"},
        {"first_id": 250, "policy": str(folder), "epsilon": 0.5},
    ]


def test_from_a_csv_log_to_a_judged_bandit_policy(log: Path, tmp_path: Path) -> None:
    folder = tmp_path / "lints"
    train = ("train-bandit", log, "--agent=lints", "--alpha=0.1", "-o", folder, "--next-id=1500", "--batch-size=100")
    assert f"{folder}/policy_9: lints after 9 train steps" in shell(*train, "--steps=9")
    assert f"{folder}/policy_15: lints after 15 train steps" in shell(*train)  # a pass; what is done isn't done again
    judged = json.loads(shell("evaluate", folder, "--log", log, "--first-id=1500", "-e", "ips,snips,dr", "--json"))
    assert list(judged["estimates"]) == ["IPS", "SNIPS", "DoublyRobust"]
    snips = judged["estimates"]["SNIPS"]
    assert snips["lower"] < snips["value"] < snips["upper"]
    assert snips["lower"] > 0.6  # the arm of the largest feature earns 0.9


def test_rows_are_counted_over_all_lanes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert collect(tmp_path / "s.zarr", 50, "--lanes=10", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["rows"], report["added"]) == (50, 50)
    assert rows_of(tmp_path / "s.zarr").reward.shape == (10, 5)
    assert collect(tmp_path / "t.zarr", 11, "--lanes=5") == 0  # every add is one to all lanes
    assert rows_of(tmp_path / "t.zarr").reward.shape == (5, 3)


def test_collecting_again_does_what_is_left_and_repeats_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "s.zarr"
    assert collect(store, 400, "--lanes=4", "--seed=3") == 0
    assert collect(store, 800, "--seed=3") == 0
    rows = rows_of(store)
    assert rows.reward.shape == (4, 200)
    assert (rows.step_type[:, 100] == trajectories.StepType.FIRST).all()
    assert not np.isin(rows.observation[:, :100, 0], rows.observation[:, 100:, 0]).any()
    capsys.readouterr()
    assert collect(store, 800, "--seed=3") == 0
    assert "800 rows, 0 of them now" in capsys.readouterr().out
    assert collect(tmp_path / "t.zarr", 400, "--lanes=4", "--seed=3") == 0
    assert np.array_equal(rows_of(tmp_path / "t.zarr").observation, rows.observation[:, :100])


def test_a_window_keeps_its_length_and_the_count_goes_on(tmp_path: Path) -> None:
    store = tmp_path / "s.zarr"
    assert collect(store, 800, "--max-length=20", "--codec=lz4", "--layout=arrow") == 0
    assert collect(store, 1600) == 0
    with diskbuf.open(store) as buffer:
        assert (buffer.first_id, buffer.next_id, buffer.max_length) == (180, 200, 20)
        assert (buffer.layout, buffer.codec) == ("arrow", "lz4")


def test_a_killed_collector_leaves_a_whole_store_and_goes_on(tmp_path: Path) -> None:
    store = tmp_path / "s.zarr"
    words = [SCRIPT, "collect", "CartPole-v1", store, "--steps=10000000", "--seed=4"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        seen = wait_for_steps(store, 500, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    shell("verify", "--values", store)
    kept = rows_of(store)
    assert kept.reward.shape[1] >= seen
    shell("collect", "CartPole-v1", store, f"--steps={kept.reward.size + 800}", "--seed=4")
    rows = rows_of(store)
    assert rows.reward.shape == (8, kept.reward.shape[1] + 100)
    assert np.array_equal(rows.observation[:, : kept.reward.shape[1]], kept.observation)
    assert (rows.step_type[:, kept.reward.shape[1]] == trajectories.StepType.FIRST).all()
    shell("verify", "--values", store)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_ctrl_c_ends_collecting_with_a_closed_store(vectorization: str, tmp_path: Path) -> None:
    store = tmp_path / "s.zarr"
    words = [
        SCRIPT,
        "collect",
        "CartPole-v1",
        store,
        "--steps=10000000",
        f"--vectorization={vectorization}",
        "--lanes=2",
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        wait_for_steps(store, 100, process)
        os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to the processes of the environments too
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.endswith("diskbuf: interrupted; stores are as the last finished step left them.\n")
    assert "Traceback" not in err
    assert diskbuf.verify(store, values=True).is_clean


MISUSE = {
    "an environment that isn't there": ["collect", "CartPol-v1", "{new}", "--steps=8"],
    "a module that isn't there": ["collect", "no_such:CartPole-v1", "{new}", "--steps=8"],
    "no steps": ["collect", "CartPole-v1", "{new}", "--steps=0"],
    "arguments that are no object": ["collect", "CartPole-v1", "{new}", "--steps=8", "--env-kwargs=[1]"],
    "arguments that it doesn't take": ["collect", "CartPole-v1", "{new}", "--steps=8", '--env-kwargs={"a": 1}'],
    "the store of another environment": ["collect", "Acrobot-v1", "{store}", "--steps=8"],
    "a random policy that explores": ["collect", "CartPole-v1", "{new}", "--steps=8", "--epsilon=0.1"],
    "a codec that isn't there": ["collect", "CartPole-v1", "{new}", "--steps=8", "--codec=zip"],
    "rows that are no trajectories": ["train-offline", "{plain}", "--steps=8", "-o", "{new}"],
    "an action that can't be counted": ["train-offline", "{float}", "--steps=8", "-o", "{new}"],
    "layers that are no numbers": ["train-offline", "{store}", "--steps=8", "-o", "{new}", "--fc-layers=a"],
    "neither env nor log": ["evaluate", "uniform"],
    "both env and log": ["evaluate", "uniform", "--env=CartPole-v1", "--log={store}"],
    "estimators of an environment": ["evaluate", "uniform", "--env=CartPole-v1", "--estimator=ips"],
    "episodes of a log": ["evaluate", "uniform", "--log={store}", "--episodes=3"],
    "no episodes": ["evaluate", "uniform", "--env=CartPole-v1", "--episodes=0"],
    "an estimator that isn't there": ["evaluate", "uniform", "--log={store}", "--estimator=ipss"],
    "an estimator without its number": ["evaluate", "uniform", "--log={store}", "--estimator=clipped-ips"],
    "a number that isn't one": ["evaluate", "uniform", "--log={store}", "--estimator=clipped-ips:x"],
    "a number too much": ["evaluate", "uniform", "--log={store}", "--estimator=ips:3"],
    "a column that isn't there": ["evaluate", "column:policy_info/x", "--log={store}"],
    "an agent that isn't there": ["train-bandit", "{store}", "--agent=linuccb", "-o", "{new}"],
    "a setting of another agent": ["train-bandit", "{store}", "--agent=linucb", "--epsilon=0.1", "-o", "{new}"],
}


@pytest.mark.parametrize("words", MISUSE.values(), ids=MISUSE)
def test_misuse_is_one_line_and_exit_code_2(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stores = {name: tmp_path / f"{name}.zarr" for name in ("store", "plain", "float", "new")}
    diskbuf.UniformReplayBuffer({"x": diskbuf.ArraySpec([], "float32")}, path=stores["plain"]).close()
    step = trajectories.time_step_spec(diskbuf.ArraySpec([4], "float32"))
    for name, action in (
        ("float", diskbuf.ArraySpec([], "float32")),
        ("store", diskbuf.BoundedArraySpec([], "int64", 0, 1)),
    ):
        spec = trajectories.trajectory_spec(step, trajectories.PolicyStep(action))
        metadata = {"environment": "CartPole-v1"}
        diskbuf.UniformReplayBuffer(spec, path=stores[name], metadata=metadata).close()
    assert cli.main([_filled(word, stores) for word in words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("diskbuf: ")
    assert not stores["new"].exists()


def _filled(word: str, stores: dict[str, Path]) -> str:
    for name, path in stores.items():
        word = word.replace(f"{{{name}}}", str(path))
    return word


def test_a_misspelt_environment_gets_the_nearest_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cartpole-v1", "CartPol-v1", "CartPole-v7"):
        assert cli.main(["collect", name, str(tmp_path / "s.zarr"), "--steps=8"]) == 2
        assert f"got '{name}'. Nearest: CartPole-v1, " in capsys.readouterr().err


def test_what_is_no_policy_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", str(tmp_path / "none"), "--env=CartPole-v1"]) == 1
    assert "no folder is there" in capsys.readouterr().err
    assert cli.main(["evaluate", str(tmp_path), "--env=CartPole-v1"]) == 1
    assert "no policy_N" in capsys.readouterr().err


def test_the_newest_policy_is_the_one_of_most_steps(tmp_path: Path) -> None:
    for name in ("policy_9", "policy_100", "policy_300", "policy_200.unfinished-7", "policies"):
        (tmp_path / name).mkdir()
        if name != "policy_300":  # being copied, say
            (tmp_path / name / "policy_specs.json").write_text("{}")
    assert newest_policy(tmp_path) == tmp_path / "policy_100"
    assert newest_policy(tmp_path / "policy_9") == tmp_path / "policy_9"


def test_an_unwanted_policy_is_refused_before_a_store_is_made(tmp_path: Path) -> None:
    step = trajectories.time_step_spec(diskbuf.ArraySpec([4], "float32"))
    for observation, action, what in (
        (step, diskbuf.BoundedArraySpec([], "int64", 0, 2), "actions"),
        (
            step._replace(observation=diskbuf.ArraySpec([3], "float32")),
            diskbuf.BoundedArraySpec([], "int64", 0, 1),
            "obs",
        ),
    ):
        policy = RandomPolicy(observation, action)
        with pytest.raises(diskbuf.OptionError, match=f"policy must be made for the {what}"):
            collecting.collect(tmp_path / "s.zarr", "CartPole-v1", num_steps=8, policy=policy)
    assert not (tmp_path / "s.zarr").exists()


def test_arguments_of_the_environment_are_noted_and_kept(tmp_path: Path) -> None:
    store = tmp_path / "s.zarr"
    kwargs = {"sutton_barto_reward": True}
    collecting.collect(store, "CartPole-v1", num_steps=400, seed=0, gym_kwargs=kwargs)
    collecting.collect(store, "CartPole-v1", num_steps=800, seed=0)
    rows = rows_of(store)
    assert set(np.unique(rows.reward)) == {-1.0, 0.0}
    with diskbuf.open(store) as buffer:
        assert buffer.metadata["environment_kwargs"] == kwargs
    with pytest.raises(diskbuf.OptionError, match=r"arguments must be \{'sutton_barto_reward': True\} to go"):
        collecting.collect(store, "CartPole-v1", num_steps=900, gym_kwargs={})


def test_collecting_tells_how_far_it_is(tmp_path: Path) -> None:
    told: list[tuple[int, int, float]] = []
    tell = lambda done, total, earned: told.append((done, total, earned))  # noqa: E731
    report = collecting.collect(tmp_path / "s.zarr", "CartPole-v1", num_steps=40_000, seed=0, progress=tell)
    assert told
    assert all(total == 40_000 and 0 < done <= 40_000 for done, total, _ in told)
    assert told[-1][2] == pytest.approx(22, abs=5)
    assert report.mean_return == pytest.approx(22, abs=5)
    assert report.rows == report.added == 40_000


def test_scales_are_the_largest_that_is_there(tmp_path: Path) -> None:
    observation = {
        "arm": diskbuf.BoundedArraySpec([], "int64", 0, 9),
        "level": diskbuf.ArraySpec([2], "float32"),
        "screen": diskbuf.BoundedArraySpec([40, 40], "uint8", 0, 255),
    }
    spec = trajectories.trajectory_spec(
        trajectories.time_step_spec(observation), trajectories.PolicyStep(diskbuf.BoundedArraySpec([], "int64", 0, 1))
    )
    with diskbuf.UniformReplayBuffer(spec, 2, 10, path=tmp_path / "s.zarr") as buffer:
        for step in range(5):
            seen = {
                "arm": np.array([3, 9]),
                "level": np.array([[step, 0], [-8, 0]], np.float32),
                "screen": np.full((2, 40, 40), 7, np.uint8),
            }
            first = trajectories.restart(seen, batch_size=2)
            after = trajectories.transition(seen, np.ones(2))
            buffer.add_batch(trajectories.from_transition(first, trajectories.PolicyStep(np.zeros(2, np.int64)), after))
        scales = observation_scales(buffer, seed=0)
    assert scales == {"arm": None, "level": [8.0, 1.0], "screen": 255.0}
    agent = dqn_agent(spec, DqnSettings(fc_layer_params=(3,)), scales=scales)
    assert agent.policy.action(first).action.shape == (2,)


@pytest.mark.parametrize("shape", [(84, 84), (84, 84, 4), (4, 84, 84)])
def test_pictures_go_through_convolutions_channels_last(shape: tuple[int, ...]) -> None:
    spec = trajectories.trajectory_spec(
        trajectories.time_step_spec(diskbuf.ArraySpec(shape, "uint8")),
        trajectories.PolicyStep(diskbuf.BoundedArraySpec([], "int64", 0, 1)),
    )
    agent = dqn_agent(spec, DqnSettings(fc_layer_params=(3,)), scales={"": 255.0})
    kernels = [weight.shape for weight in agent.policy.q_network.weights if len(weight.shape) == 4]
    assert kernels == [(8, 8, 4 if len(shape) == 3 else 1, 32), (4, 4, 32, 64), (3, 3, 64, 64)]


def test_a_training_goes_on_only_with_its_own_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, folder = str(tmp_path / "s.zarr"), str(tmp_path / "dqn")
    assert collect(Path(store), 400, "--seed=0") == 0
    words = ["train-offline", store, "-o", folder, "--fc-layers=4", "--batch-size=8", "--agent=dqn"]
    assert cli.main([*words, "--steps=3"]) == 0
    kept = json.loads(Path(folder, "agent.json").read_text())
    assert collect(Path(store), 800, "--seed=0") == 0  # the scales stay those of the beginning
    capsys.readouterr()
    assert cli.main([*words, "--steps=5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["train_step"], found["policy"]) == (5, f"{folder}/policy_5")
    assert json.loads(Path(folder, "agent.json").read_text()) == kept
    for other in ("--gamma=0.5", "--learning-rate=0.1", "--fc-layers=5", "--seed=1", "--batch-size=9", "--agent=ddqn"):
        assert cli.main([*words, "--steps=5", other]) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "to go on with the training" in err


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Returns the one line with which a verb refuses."""
    capsys.readouterr()
    assert cli.main([*map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), "\x1b" in err) == ("", 1, False)
    return err


def test_a_training_goes_on_only_from_its_own_store(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, folder = tmp_path / "one.zarr", tmp_path / "other.zarr", tmp_path / "dqn"
    assert collect(one, 400, "--seed=0") == 0
    assert collect(other, 400, "--seed=0") == 0
    words = ("-o", folder, "--fc-layers=4", "--batch-size=8")
    assert cli.main(["train-offline", str(one), "--steps=2", *map(str, words)]) == 0
    said = refused(capsys, "train-offline", other, "--steps=4", *words)
    assert f"the training in {folder} began with, {one} of 2" in said
    assert f"got {other} of 2" in said
    assert said.endswith("Use that, or another -o.\n")
    one.rename(tmp_path / "moved.zarr")
    assert cli.main(["train-offline", str(tmp_path / "moved.zarr"), "--steps=4", *map(str, words)]) == 0
    # Rows of another spec are told as such.
    assert cli.main(["collect", "Acrobot-v1", str(one), "--steps=400"]) == 0
    said = refused(capsys, "train-offline", one, "--steps=4", *words)
    assert "must have the spec that the training" in said
    assert "observation" in said

    diskbuf.copy(log, tmp_path / "copied.zarr")
    with (
        diskbuf.open(log) as buffer,
        diskbuf.UniformReplayBuffer(buffer.data_spec, buffer.batch_size, None, path=tmp_path / "log.zarr") as anew,
    ):
        rows = buffer.gather_all()
        anew.add_batch(
            type(rows)(
                *(
                    diskbuf.tree.Structure(part).unflatten(
                        [leaf[:, 0] for leaf in diskbuf.tree.Structure(part).flatten(part)]
                    )
                    for part in rows
                )
            )
        )
    words = ("-o", tmp_path / "lints", "--agent=lints", "--next-id=1")
    assert cli.main(["train-bandit", str(log), *map(str, words)]) == 0
    assert "must be the one that the training" in refused(capsys, "train-bandit", tmp_path / "log.zarr", *words)
    assert cli.main(["train-bandit", str(tmp_path / "copied.zarr"), *map(str, words)]) == 0


def test_a_folder_of_scales_of_other_rows_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, folder = tmp_path / "s.zarr", tmp_path / "dqn"
    assert cli.main(["collect", "Acrobot-v1", str(store), "--steps=400"]) == 0
    folder.mkdir()
    settings = {"agent": "dqn", "fc_layer_params": [4], "learning_rate": 5e-4, "gamma": 0.98}
    kept = settings | {"target_update_tau": 0.01, "scales": {"": [1.0] * 4}}  # as written before stores were noted
    (folder / "agent.json").write_text(json.dumps(kept))
    words = ("train-offline", store, "--steps=4", "-o", folder, "--fc-layers=4", "--agent=dqn")
    assert "on rows like those of" in refused(capsys, *words)


def test_what_is_trained_to_the_end_says_so_and_tells_no_losses_again(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, folder = tmp_path / "s.zarr", tmp_path / "dqn"
    assert collect(store, 400, "--seed=0") == 0
    for words, policy in (
        (["train-offline", store, "-o", folder, "--fc-layers=4", "--batch-size=8"], folder / "policy_80"),
        (["train-bandit", log, "-o", tmp_path / "ucb", "--batch-size=100"], tmp_path / "ucb" / "policy_80"),
    ):
        capsys.readouterr()
        assert cli.main([*map(str, words), "--steps=80"]) == 0
        out = capsys.readouterr().out
        assert "nothing left" not in out
        if words[0] == "train-offline":
            steps = [int(line.split()[0]) for line in out.splitlines()[1:-1]]
            assert (len(steps), steps[0], steps[-1]) == (10, 2, 80)
        assert cli.main([*map(str, words), "--steps=80"]) == 0
        assert capsys.readouterr().out == f"{policy}: nothing left to do, it has had 80 train steps\n"


def test_each_training_names_the_other_verb_for_the_other_kind_of_store(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, folder = tmp_path / "s.zarr", tmp_path / "new"
    assert collect(store, 400, "--seed=0") == 0
    assert "diskbuf train-offline" in refused(capsys, "train-bandit", store, "-o", folder)
    assert "diskbuf train-bandit" in refused(capsys, "train-offline", log, "--steps=3", "-o", folder)
    assert not folder.exists()


def test_ctrl_c_saves_the_train_steps_and_the_same_command_goes_on(tmp_path: Path) -> None:
    store, folder = tmp_path / "s.zarr", tmp_path / "dqn"
    assert collect(store, 400, "--seed=0") == 0
    words = [SCRIPT, "train-offline", store, "--steps=1000", "-o", folder]  # no checkpoint before the last is due
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while not (folder / "history.jsonl").exists() or not (folder / "history.jsonl").stat().st_size:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.splitlines()[-1].startswith("diskbuf: interrupted"), err  # TensorFlow may have said something before
    saved = max(int(file.stem.partition("-")[2]) for file in folder.glob("checkpoints/ckpt-*.index"))
    assert 25 <= saved < 1000  # the first loss is told at 25
    more = saved + 5
    found = json.loads(shell("train-offline", store, f"--steps={more}", "-o", folder, "--json"))
    assert (found["train_step"], found["train_steps_before"]) == (more, saved)


def test_a_first_checkpoint_comes_by_time_and_not_only_by_train_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "s.zarr"
    assert collect(store, 400, "--seed=0") == 0
    monkeypatch.setattr(training_run, "_FIRST_SAVE_SECONDS", 0.0)
    with diskbuf.open(store) as buffer:
        train_dqn_offline(tmp_path / "dqn", buffer, num_iterations=9, settings=DqnSettings(fc_layer_params=(4,)))
    saved = sorted(file.stem for file in (tmp_path / "dqn" / "checkpoints").glob("*.index"))
    assert saved == ["ckpt-1", "ckpt-9"]  # after the first train step, then not for a minute


@pytest.mark.parametrize("shape", [(), (1,)])
def test_actions_without_bounds_get_those_of_the_rows(
    shape: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = trajectories.trajectory_spec(
        trajectories.time_step_spec(diskbuf.ArraySpec([3], "float32")),
        trajectories.PolicyStep(diskbuf.ArraySpec(shape, "int64")),
    )
    store, folder = tmp_path / "s.zarr", tmp_path / "dqn"

    def add(arms: list[int]) -> None:
        seen = np.ones((2, 3), np.float32)
        first = trajectories.transition(seen, np.ones(2))
        with diskbuf.UniformReplayBuffer(spec, 2, None, path=store) as buffer:
            for arm in arms:
                chosen = trajectories.PolicyStep(np.full((2, *shape), arm))
                buffer.add_batch(trajectories.from_transition(first, chosen, first))

    add([2, 1, 3, 2])
    words = ["train-offline", store, "-o", folder, "--fc-layers=4", "--batch-size=8"]
    assert cli.main([*map(str, words), "--steps=2"]) == 0
    assert capsys.readouterr().out.startswith("actions 1 to 3, taken from the rows\n")
    with diskbuf.open(store) as buffer:
        assert buffer.data_spec.action.shape == shape
    policy = json.loads((folder / "policy_2" / "policy_specs.json").read_text())
    assert '"maximum": 3' in json.dumps(policy)
    add([1, 2])
    assert cli.main([*map(str, words), "--steps=4"]) == 0  # the network stays as it is
    add([4])
    assert "actions must be 1 to 3 to go on" in refused(capsys, *words, "--steps=6")
    add([5000])
    said = refused(capsys, *words[:3], tmp_path / "new", "--steps=6")
    assert "Number them from 0 on" in said


@pytest.mark.parametrize("agent", recipes.agent_names())
def test_every_bandit_agent_learns_from_a_log(agent: str, log: Path, tmp_path: Path) -> None:
    settings = recipes.BanditSettings(agent=agent)
    with diskbuf.open(log) as buffer:
        trained = recipes.train_agent_offline(tmp_path / agent, buffer, settings, num_steps=3, next_id=600)
        assert trained.train_steps == 3
        assert newest_policy(tmp_path / agent) == trained.policy


def test_steps_of_a_bandit_training_may_end_inside_a_pass_or_take_several(log: Path, tmp_path: Path) -> None:
    def trained(folder: str, **limits: int) -> Any:
        with diskbuf.open(log) as buffer:
            specs = trajectories.time_step_spec(buffer.data_spec.observation), buffer.data_spec.action
            agent = recipes.bandit_agent(specs, recipes.BanditSettings(agent="linucb"))
            result = trainer.train_offline(
                tmp_path / folder, agent, buffer, batch_size=100, next_id=300, save_policy=False, **limits
            )
        return result.train_steps, agent.theta

    in_steps, in_passes = trained("steps", num_steps=6), trained("passes", num_epochs=2)
    assert in_steps[0] == in_passes[0] == 6
    assert np.array_equal(in_steps[1], in_passes[1])
    assert trained("five", num_steps=5)[0] == 5
    assert trained("five", num_steps=6)[0] == 6  # goes on
    with pytest.raises(diskbuf.OptionError, match="num_epochs must be left out with num_steps"):
        trained("both", num_steps=6, num_epochs=2)


def test_the_uniform_policy_and_a_logged_column_are_judged(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", "uniform", "--log", str(log), "--estimator=ips", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["estimates"]["IPS"]["value"] == pytest.approx(found["diagnostics"]["mean_reward"], rel=1e-4)

    info = {
        "propensity": diskbuf.ArraySpec([], "float32"),
        "best": diskbuf.BoundedArraySpec([], "int64", 0, 2),
        "chances": diskbuf.ArraySpec([3], "float32"),
    }
    action = diskbuf.BoundedArraySpec([], "int64", 0, 2)
    spec = trajectories.trajectory_spec(
        trajectories.time_step_spec(diskbuf.ArraySpec([3], "float32")), trajectories.PolicyStep(action, (), info)
    )
    rows = decisions(500)
    context = np.stack([rows[f"f{place}"] for place in range(3)], axis=1)
    best = context.argmax(axis=1)
    told = {
        "propensity": rows["p"].astype(np.float32),
        "best": best,
        "chances": np.eye(3, dtype=np.float32)[best] * 0.7 + np.float32(0.1),
    }
    step = trajectories.PolicyStep(rows["item"], (), told)
    after = trajectories.termination(context, rows["click"])
    row = trajectories.from_transition(trajectories.restart(context, batch_size=500), step, after)
    with diskbuf.UniformReplayBuffer(spec, 500, path=tmp_path / "told.zarr") as buffer:
        buffer.add_batch(row)
        values = {}
        for name in ("best", "chances"):
            words = ["evaluate", f"column:policy_info/{name}", "--log", str(tmp_path / "told.zarr"), "-e", "ips"]
            assert cli.main([*words, "--json"]) == 0
            values[name] = json.loads(capsys.readouterr().out)["estimates"]["IPS"]["value"]
        as_function = evaluation.evaluate(
            buffer, lambda seen: np.eye(3)[seen.argmax(axis=1)] * 0.7 + 0.1, [evaluation.IPS()]
        )
    matches = best == rows["item"]
    assert values["best"] == pytest.approx((matches * 3 * rows["click"]).mean(), rel=1e-5)
    assert values["chances"] == pytest.approx(as_function["IPS"].value, rel=1e-5)


def test_the_demo_is_killed_goes_on_and_says_when_nothing_was_learnt(tmp_path: Path) -> None:
    words = ["demo", tmp_path / "demo", "--steps=20000", "--train-steps=1"]
    run = in_shell(*words)
    assert run.returncode == 1, run.stdout + run.stderr
    assert run.stderr.count("\n") == 1
    assert "the trained policy must earn at least 3 times what a random one does" in run.stderr
    commands = [line.split()[2] for line in run.stdout.splitlines() if line.startswith("$ diskbuf ")]
    assert commands == ["collect", "verify", "collect", "info", "train-offline", "evaluate", "evaluate"]
    assert "Killed. Rows seen in the store just before" in run.stdout
    assert "--json" not in run.stdout  # what is shown is what was run, and what that prints
    assert len([line for line in run.stdout.splitlines() if line.strip().startswith("mean return ")]) == 2
    with diskbuf.open(tmp_path / "demo" / "cartpole.zarr") as buffer:
        assert buffer.num_frames() == 20_000
    again = in_shell(*words)
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    assert "demo needs a folder without a demo" in again.stderr


def test_a_collector_that_ends_by_itself_is_no_demo(tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match="must run until it is killed, but it ended with 7"):
        run_and_kill([sys.executable, "-c", "import sys; sys.exit(7)"], tmp_path / "s.zarr", at_steps=1)
