"""What the command line draws: figures, a page in a real browser, and videos that are decoded again."""

import base64
import io
import json
import math
import os
import re
import subprocess
import sys
import threading
import tracemalloc
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import open_browser
from diskbuf_tools import cli, figures, gathered, moving_pictures, pictures, report_page
from diskbuf_tools.gathered import Sample
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import diskbuf
from diskbuf import ArraySpec, BoundedArraySpec, OptionError, UniformReplayBuffer, episode_table, trajectories
from diskbuf.trajectories import StepType

FIRST, MID, LAST = map(int, (StepType.FIRST, StepType.MID, StepType.LAST))
HEIGHT, WIDTH = 21, 15
SCRIPT = "<script>alert(1)</script>"
FORCE = ["--force"]


def step_types_of(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """step_type and next_step_type of whole episodes of some lengths, boundaries included."""
    step_type: list[int] = []
    for length in lengths:
        step_type += [FIRST, *[MID] * (length - 1), LAST]
    following = [*step_type[1:], FIRST]
    return np.array(step_type, "int32"), np.array(following, "int32")


def frames_of(count: int, shape: Sequence[int], *, colors: int = 200, seed: int = 0) -> np.ndarray:
    """Noise of so many grey levels or colours that drifts, so that neighbouring frames are alike in part."""
    rng = np.random.default_rng(seed)
    palette = rng.integers(0, 256, (colors, 3), dtype="uint8")
    places = rng.integers(0, colors, shape[:2])
    found = np.empty((count, *shape[:2], 3), "uint8")
    for number in range(count):
        places[number % shape[0], : shape[1] // 2] = rng.integers(0, colors, shape[1] // 2)
        found[number] = palette[places]
    return found


def spec_of(observation: Any, action: Any = None) -> Any:
    time_steps = trajectories.time_step_spec(observation)
    choice = BoundedArraySpec([], "int64", 0, 3) if action is None else action
    return trajectories.from_transition(time_steps, trajectories.PolicyStep(choice), time_steps)


def rows_of(lengths: Sequence[int], observation: Any, *, rewards: np.ndarray | None = None) -> Any:
    """Rows of one lane, [1, T, ...], of whole episodes."""
    step_type, following = step_types_of(lengths)
    count = len(step_type)
    reward = np.arange(count, dtype="float32") if rewards is None else rewards
    reward = np.where(step_type == LAST, 1000, reward)  # a boundary's means nothing, so it must not be seen
    action = np.where(step_type == LAST, 99, np.arange(count) % 4)
    discount = np.where(following == LAST, 0, 1)
    return trajectories.Trajectory(
        step_type[None],
        observation,
        action[None].astype("int64"),
        (),
        following[None],
        reward[None].astype("float32"),
        discount[None].astype("float32"),
    )


LENGTHS = (5, 3, 9, 4)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """One lane, four episodes of RGB frames, the best of them the third."""
    count = sum(LENGTHS) + len(LENGTHS)
    path = tmp_path / "bounce.zarr"
    spec = spec_of({"camera": ArraySpec([HEIGHT, WIDTH, 3], "uint8"), "position": ArraySpec([2], "float32")})
    camera = frames_of(count, (HEIGHT, WIDTH))
    position = np.random.default_rng(1).normal(size=(1, count, 2)).astype("float32")
    rewards = np.repeat([1, 0, 2, 0.5], np.array(LENGTHS) + 1)
    with UniformReplayBuffer(spec, path=path, metadata={"by": SCRIPT}) as buffer:
        buffer.extend(rows_of(LENGTHS, {"camera": camera[None], "position": position}, rewards=rewards))
    return path


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = cli.main([str(word) for word in words])
    return code, *capsys.readouterr()


def is_refused(capsys: pytest.CaptureFixture[str], *words: object, code: int, because: str) -> None:
    found, out, err = run(capsys, *words)
    assert (found, out) == (code, "")
    assert err.startswith("diskbuf: ")
    assert err.count("\n") == 1
    assert because in err


# ---- plot


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_draws_all_that_the_spec_allows(store: Path, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = store.with_suffix(f".{suffix}")
    code, out, err = run(capsys, "plot", store, "-o", file)
    assert (code, err) == (0, "")
    assert "returns, lengths, actions, rewards, columns" in out
    assert "left out: throughput: it can't be told; rows carry no times" in out
    if suffix == "png":
        with Image.open(file) as image:
            image.load()
            assert min(image.size) > 800
            assert len(image.convert("RGB").getcolors(2**24) or []) > 50
    else:
        assert ET.parse(file).getroot().tag.endswith("svg")
    assert [path.name for path in store.parent.iterdir() if path.name.startswith(".")] == []


def test_a_long_store_becomes_a_small_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, episodes = tmp_path / "long.zarr", 50_000
    count = episodes * 8
    rng = np.random.default_rng(0)
    with UniformReplayBuffer(spec_of(ArraySpec([4], "float32")), 1, None, path=path) as buffer:
        observation = rng.normal(size=(1, count, 4)).astype("float32")
        buffer.extend(rows_of([7] * episodes, observation, rewards=rng.normal(size=count)))
    file = tmp_path / "long.svg"
    assert run(capsys, "plot", path, "-o", file)[0] == 0
    assert file.stat().st_size < 400_000
    assert sum(1 for _ in ET.parse(file).getroot().iter()) < 4000


def test_kinds_and_columns_are_chosen(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = store.with_suffix(".png")
    code, out, _ = run(capsys, "plot", store, "-o", file, "-k", "lengths", "--kind", "returns", "--json")
    assert code == 0
    assert json.loads(out)["kinds"] == ["returns", "lengths"]
    code, out, _ = run(capsys, "plot", store, "-o", file, "-c", "observation/*", "--json", *FORCE)
    assert code == 0
    assert json.loads(out)["kinds"] == ["columns"]


def test_a_store_without_step_types_is_drawn_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plain.zarr"
    spec = {"x$_^$": ArraySpec([], "float64"), "done": ArraySpec([], "bool"), "reward": ArraySpec([], "float32")}
    with UniformReplayBuffer(spec, 2, path=path) as buffer:
        done = np.arange(40).reshape(1, -1) % 10 == 9
        rows = {"x$_^$": np.ones([2, 40]), "done": np.repeat(done, 2, 0), "reward": np.ones([2, 40], "float32")}
        buffer.extend(rows)
    code, out, _ = run(capsys, "plot", path, "-o", tmp_path / "a.svg", "--json")
    told = json.loads(out)
    assert (code, told["kinds"]) == (0, ["rewards", "columns"])
    assert any(note.startswith("returns: no leaf 'step_type'") and "--ends done" in note for note in told["notes"])
    assert any(note.startswith("actions: ") for note in told["notes"])
    is_refused(capsys, "plot", path, "-o", tmp_path / "b.svg", "-k", "returns", code=2, because="--ends done")
    code, out, _ = run(capsys, "plot", path, "-o", tmp_path / "c.svg", "--ends", "done", "--json")
    assert (code, json.loads(out)["kinds"]) == (0, ["returns", "lengths", "rewards", "columns"])


@pytest.mark.parametrize("what", ["empty", "array", "odd"])
def test_odd_stores_are_drawn(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.zarr"
    values = np.array([np.nan, np.inf, -np.inf, 1e300, -1e300, 0.0])
    odd = {
        "complex": (np.array([1 + 1j, np.nan * 1j] * 3)).astype("complex64"),
        "floats": values,
        "none": np.zeros([6, 0]),
        "all not a number": np.full(6, np.nan),
        "large": np.array([2**63 - 1, -(2**63), 0, 1, 2, 3]),
        "unsigned": np.array([2**64 - 1, 0, 1, 2, 3, 4], "uint64"),
        "bool": np.array([True, False] * 3),
        "small": np.array([-128, 127, 0, 0, 1, 2], "int8"),
    }
    made: Any = {"empty": {}, "array": np.arange(6), "odd": odd}[what]
    spec: Any = ArraySpec([], "int64")
    if what != "array":
        spec = {name: ArraySpec(rows.shape[1:], rows.dtype) for name, rows in odd.items()}
    with UniformReplayBuffer(spec, path=path) as buffer:
        if what != "empty":
            buffer.extend({name: rows[None] for name, rows in made.items()} if what == "odd" else made[None])
    assert run(capsys, "plot", path, "-o", tmp_path / "a.png")[::2] == (0, "")
    assert run(capsys, "report", path, "-o", tmp_path / "a.html")[::2] == (0, "")


@pytest.mark.parametrize(
    ("words", "code", "because"),
    [
        (["plot", "-o", "a.pdf"], 2, "output must end in .png or .svg"),
        (["plot", "-o", "a.png", "-k", "reward"], 2, "Nearest: 'rewards'"),
        (["plot", "-o", "a.png", "-c", "rewrd"], 2, "Nearest: 'reward'"),
        (["plot", "-o", "a.png", "--ends", "reward"], 2, "--ends must be a bool"),
        (["plot", "-o", "a.png", "--reward", "observation/camera"], 2, "--reward must be one real number"),
        (["plot", "-o", "nowhere/a.png"], 1, "folder"),
        (["report", "-o", "a.txt"], 2, "output must end in .html"),
        (["report", "-o", "a.html", "--episode", "first"], 2, "EPISODE must be"),
        (["video", "best", "-o", "a.avi"], 2, "output must end in .gif or .mp4"),
        (["video", "best", "-o", "a.gif", "--fps", "60"], 2, "--fps must be above 0 and at most 50"),
        (["video", "best", "-o", "a.gif", "--fps", "nan"], 2, "--fps must be above 0"),
        (["video", "best", "-o", "a.gif", "--scale", "0"], 2, "--scale must be from 1"),
        (["video", "best", "-o", "a.mp4", "--scale", "1000"], 2, "--scale must be from 1 to 390"),
        (["video", "best", "-o", "a.gif", "--lane", "0"], 2, "--lane must"),
        (["video", "first", "-o", "a.gif"], 2, "best, median, worst or last"),
        (["video", "5", "-o", "a.gif"], 2, "--lane must say"),
        (["video", "0:5", "-o", "a.gif", "--lane", "0"], 2, "--lane must not"),
        (["video", "7:5", "-o", "a.gif"], 1, "lanes must be from 0 to 0"),
        (["video", "0:500", "-o", "a.gif"], 1, "ids must be in the window [0, 25), got 500"),
        (["video", "0:5", "-o", "a.gif"], 1, "which holds a final observation"),
        (["video", "best", "-o", "a.gif", "-c", "reward"], 2, "must be a picture"),
        (["video", "best", "-o", "a.gif", "-c", "observation/*"], 2, "--column must be one leaf"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(
    words: list[str], code: int, because: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = words.index("-o") + 1
    words = [words[0], str(store), *words[1:]]
    words[place + 1] = str(store.parent / words[place + 1])
    is_refused(capsys, *words, code=code, because=because)
    assert [path.name for path in store.parent.iterdir()] == [store.name]


@pytest.mark.parametrize(("verb", "suffix"), [("plot", "png"), ("report", "html"), ("video", "gif")])
def test_a_file_that_is_there_is_replaced_only_by_force(
    verb: str, suffix: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = store.with_suffix(f".{suffix}")
    file.write_bytes(b"mine")
    words = [verb, store, *(["best"] if verb == "video" else []), "-o", file]
    is_refused(capsys, *words, code=1, because="Add --force to replace it")
    assert file.read_bytes() == b"mine"
    assert run(capsys, *words, *FORCE)[0] == 0
    assert len(file.read_bytes()) > 100


def test_a_figure_that_fails_leaves_the_old_one(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = store.with_suffix(".png")
    file.write_bytes(b"mine")

    def fill_the_disk(panels: object, written: Path, **_: object) -> None:
        written.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(written))

    monkeypatch.setattr(figures, "save_grid", fill_the_disk)
    is_refused(capsys, "plot", store, "-o", file, *FORCE, code=1, because="No space left on device")
    assert file.read_bytes() == b"mine"
    assert sorted(path.name for path in store.parent.iterdir()) == [file.name, store.name]


def test_no_display_and_no_setting_of_the_user_is_used(store: Path, tmp_path: Path) -> None:
    settings = tmp_path / "matplotlibrc"
    settings.write_text(
        "backend: TkAgg\ntext.usetex: True\nfont.family: No Such Font\naxes.prop_cycle: cycler('ls', [':'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"}
    environment |= {"MATPLOTLIBRC": str(settings), "MPLBACKEND": "TkAgg"}
    script = Path(sys.executable).with_name("diskbuf")
    file = tmp_path / "a.png"
    done = subprocess.run(
        [script, "plot", store, "-o", file, "-k", "actions"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert run_plainly(store, tmp_path / "b.png") == file.read_bytes()


def run_plainly(store: Path, file: Path) -> bytes:
    assert cli.main(["plot", str(store), "-o", str(file), "-k", "actions"]) == 0
    return file.read_bytes()


@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (["plot", "-o", "a.png"], "matplotlib", "plot"),
        (["report", "-o", "a.html"], "matplotlib", "plot"),
        (["video", "best", "-o", "a.gif"], "PIL", "video"),
        (["video", "best", "-o", "a.mp4"], "imageio_ffmpeg", "video"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    words: list[str],
    package: str,
    extra: str,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(store.parent)
    monkeypatch.setitem(sys.modules, package, None)
    is_refused(capsys, words[0], store, *words[1:], code=1, because=f"pip install 'diskbuf[{extra}]'")


# ---- what figures are drawn from


@given(st.integers(0, 500), st.integers(0, 300), st.integers(1, 200), st.integers(1, 20))
def test_stretches_are_apart_in_the_window_and_not_too_long(first: int, steps: int, most: int, pieces: int) -> None:
    found = gathered.spread(first, first + steps, most=most, pieces=pieces)
    ids = [step for start, stop in found for step in range(start, stop)]
    assert ids == sorted(set(ids))
    assert set(ids) <= set(range(first, first + steps))
    assert len(ids) <= most or most >= steps
    assert len(found) <= max(1, pieces)
    assert (len(ids) == steps) if steps <= most else (ids != [])


@pytest.mark.parametrize("dtype", ["float32", "uint8", "int64", "bool", "float64"])
@pytest.mark.parametrize("shape", [(), (3,), (4, 5)])
def test_a_sample_of_a_column_has_its_numbers(
    dtype: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    values = rng.integers(0, 2 if dtype == "bool" else 200, (2, 300, *shape)).astype(dtype)
    if dtype.startswith("float"):
        values = values + rng.normal(size=values.shape).round(1).astype(dtype)
        values.reshape(-1)[[3, 50, 51]] = np.nan, np.inf, 0
    with UniformReplayBuffer({"x": ArraySpec(shape, dtype)}, 2) as buffer:
        buffer.extend({"x": values})
        found = gathered.sample_column(buffer, gathered.roles_of(buffer), "x")
        monkeypatch.setattr(gathered, "_READ_VALUES", values.size // 3)
        part = gathered.sample_column(buffer, gathered.roles_of(buffer), "x")
    told = values[np.isfinite(values)].astype("float64")
    assert (found.size, found.not_finite, found.zeros) == (values.size, values.size - told.size, (told == 0).sum())
    assert numbers_of(found) == pytest.approx((told.mean(), told.std(), told.min(), told.max()))
    assert (found.is_all, found.steps_read) == (True, 600)
    assert not part.is_all
    assert 180 <= part.steps_read <= 200
    assert abs(part.mean - found.mean) < found.std


def numbers_of(sample: Sample) -> tuple[float, float, float, float]:
    return sample.mean, sample.std, sample.minimum, sample.maximum


def test_boundary_rows_count_where_they_mean_something(store: Path) -> None:
    with diskbuf.open(store) as buffer:
        roles = gathered.roles_of(buffer)
        found = {path: gathered.sample_column(buffer, roles, path) for path in roles.leaves}
    assert found["action"].maximum == 3
    assert found["reward"].maximum == 2
    assert {path: sample.steps_read for path, sample in found.items()} == {
        "step_type": 25,
        "observation/camera": 25,
        "observation/position": 25,
        "action": 21,
        "next_step_type": 25,
        "reward": 21,
        "discount": 21,
    }


def test_chosen_episodes_are_those_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_table, "BLOCK_VALUES", 100)  # so that there are many tables
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 9, 300)
    rewards = rng.integers(-3, 9, int(lengths.sum()) + len(lengths)).astype("float32")
    with UniformReplayBuffer(spec_of(ArraySpec([], "float32")), 1, 1500, path=tmp_path / "s") as buffer:
        observation = np.zeros((1, len(rewards)), "float32")
        buffer.extend(rows_of(lengths.tolist(), observation, rewards=rewards))
        table = diskbuf.episodes(buffer).to_pylist()
        roles = gathered.roles_of(buffer)
        found = gathered.gather_episodes(buffer, roles)
        seventh = gathered.chosen_episode(buffer, roles, f"0:{table[7]['last_id']}")
    whole = [entry for entry in table if entry["is_whole"] and entry["end"] == "terminated"]
    returns = sorted(entry["return"] for entry in whole)
    assert (found.pieces, found.complete, found.count) == (len(table), len(whole), len(whole))
    assert found.best is not None
    assert found.median is not None
    assert found.worst is not None
    assert found.last is not None
    assert (found.best.value, found.worst.value) == (returns[-1], returns[0])
    assert found.median.value == returns[(len(returns) - 1) // 2]
    assert found.last.last_id == whole[-1]["last_id"]
    assert found.returns.mean == pytest.approx(np.mean(returns))
    assert (seventh.first_id, seventh.length) == (table[7]["first_id"], table[7]["length"])
    each = found.lengths.each()
    assert each is not None
    assert each[1].tolist() == [entry["length"] for entry in whole]


def test_the_middle_of_very_many_episodes_is_about_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered, "_THINNED", 64)
    lengths = np.arange(1, 2001) % 50 + 1
    with UniformReplayBuffer(spec_of(ArraySpec([], "bool")), 1, None) as buffer:
        count = int(lengths.sum()) + len(lengths)
        buffer.extend(rows_of(lengths.tolist(), np.zeros((1, count), "bool"), rewards=np.ones(count)))
        found = gathered.gather_episodes(buffer, gathered.roles_of(buffer))
    assert found.median is not None
    assert 18 <= found.median.value <= 32


def test_the_pace_of_runs_is_told_by_when_their_chunks_were_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runs.zarr"
    options = diskbuf.StoreOptions(chunk_bytes=4096)  # 128 ids of two lanes of two floats
    spec = {"x": ArraySpec([2], "float64")}
    for _ in range(2):
        with UniformReplayBuffer(spec, 2, None, path=path, options=options) as buffer:
            buffer.extend({"x": np.zeros([2, 640, 2])})
            runs = buffer._opened().runs
    chunks = {int(file.name.split(".")[1]): file for file in (path / "x").glob("c.*")}
    assert sorted(chunks) == list(range(10))
    for chunk, file in chunks.items():
        os.utime(file, (0, 1000 + 2 * chunk if chunk < 5 else 5000 + 4 * chunk))
    paces = gathered.run_paces(str(path), runs, first_id=0, next_id=1280, lanes=2)
    assert [(pace.first_id, pace.next_id, pace.rows_per_second) for pace in paces] == [(0, 640, 128), (640, 1280, 64)]
    code, out, _ = run(capsys, "plot", path, "-o", tmp_path / "a.png", "-k", "throughput", "--json")
    assert (code, json.loads(out)["notes"]) == (0, [])
    assert run(capsys, "report", path, "-o", tmp_path / "a.html")[0] == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "of 2 of 2 runs, by when chunk files were written" in page
    assert '<td class="n">1,280</td><td class="n">64</td>' in page
    os.utime(chunks[7], (0, 1))  # as a copy may have it
    paces = gathered.run_paces(str(path), runs, first_id=0, next_id=1280, lanes=2)
    assert [pace.rows_per_second for pace in paces] == [128, None]


# ---- report


@pytest.fixture(scope="module")
def showcase(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of every kind, names and metadata that look like markup, two runs, some of it evicted."""
    path = tmp_path_factory.mktemp("showcase") / "show case.zarr"
    shapes = {
        "grey": ([HEIGHT, WIDTH], "uint8"),
        "grey last": ([HEIGHT, WIDTH, 1], "uint8"),
        "camera": ([HEIGHT, WIDTH, 3], "uint8"),
        "sprite": ([HEIGHT, WIDTH, 4], "uint8"),
        "first": ([3, HEIGHT, WIDTH], "uint8"),
        "grey first": ([1, HEIGHT, WIDTH], "uint8"),
        "sprite first": ([4, HEIGHT, WIDTH], "uint8"),
        "unit": ([HEIGHT, WIDTH, 3], "float32"),
        SCRIPT: ([], "float32"),
        "a_leaf_with_" + "_".join(["a", "very", "long", "name"] * 12): ([], "float64"),
    }
    observation = {
        name: BoundedArraySpec(shape, dtype, 0, 1) if name == "unit" else ArraySpec(shape, dtype)
        for name, (shape, dtype) in shapes.items()
    }
    spec = spec_of(observation, {"move": BoundedArraySpec([], "int64", 0, 3), "force": ArraySpec([2], "float32")})
    metadata = {"note": f'{SCRIPT} & "quotes"', "long": "x" * 500, "nested": {"seed": [1, 2, 3]}}
    lengths = [6, 11, 3, 8] * 12
    count = sum(lengths) + len(lengths)
    rng = np.random.default_rng(3)
    for run_number in range(2):
        rows = rows_of(lengths, (), rewards=rng.normal(size=count))
        values = {}
        for name, (shape, dtype) in shapes.items():
            noise = rng.random((1, count, *shape))
            values[name] = (noise * 255).astype(dtype) if dtype == "uint8" else noise.astype(dtype)
        values["sprite"][..., 3] = np.where(values["sprite"][..., 3] > 100, 255, 0)
        action = {"move": rows.action, "force": rng.normal(size=(1, count, 2)).astype("float32")}
        with UniformReplayBuffer(spec, 1, 500, path=path, metadata=None if run_number else metadata) as buffer:
            buffer.extend(rows._replace(observation=values, action=action))
    return path


@pytest.fixture(scope="module")
def page_file(showcase: Path) -> Path:
    """The report of it."""
    file = showcase.parent / "report.html"
    assert cli.main(["report", str(showcase), "-o", str(file)]) == 0
    return file


def test_a_report_is_one_page_that_a_browser_shows_whole(page_file: Path) -> None:
    file = page_file
    with open_browser() as browser:
        for scheme, width in (("light", 1280), ("dark", 1280), ("light", 400), ("dark", 400)):
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page = context.new_page()
            said: list[str] = []
            asked: list[str] = []
            page.on("console", lambda message, said=said: said.append(message.text))
            page.on("pageerror", lambda error, said=said: said.append(str(error)))
            page.on("dialog", lambda dialog, said=said: (said.append(dialog.message), dialog.dismiss()))
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.goto(file.as_uri())
            # Chromium tells of data URIs as if they were requests.
            assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]
            assert said == []
            images: list[dict[str, Any]] = page.evaluate(
                "() => Promise.all([...document.images].map(async image => (await image.decode(), "
                "{wide: image.naturalWidth, alt: image.alt, used: image.currentSrc, shown: image.clientWidth})))"
            )
            assert len(images) > 60
            assert all(image["wide"] > 0 and image["alt"] and image["shown"] > 20 for image in images)
            widths = page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            assert widths[0] <= widths[1] == width
            told = page.inner_text("body")
            for fact in (
                "show case.zarr",
                "Episodes",
                "500",
                "observation/camera",
                "Best episode",
                "Statistics",
                SCRIPT,
            ):
                assert fact in told
            colors = page.evaluate(
                "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
            )
            dark, bright = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors][
                :: 1 if scheme == "dark" else -1
            ]
            assert dark < 150 < 600 < bright
            assert page.locator("script").count() == 0
            context.close()


def test_figures_of_a_report_follow_the_colour_scheme(page_file: Path) -> None:
    with open_browser() as browser:
        used = {}
        for scheme in ("light", "dark"):
            context = browser.new_context(color_scheme=scheme)
            page = context.new_page()
            page.goto(page_file.as_uri())
            used[scheme] = page.evaluate("[...document.querySelectorAll('picture img')].map(image => image.currentSrc)")
            context.close()
    assert len(used["light"]) >= 5
    assert not set(used["light"]) & set(used["dark"])
    svg = {scheme: base64.b64decode(uris[0].partition(",")[2]).decode() for scheme, uris in used.items()}
    assert figures.LIGHT.colors[0] in svg["light"]
    assert figures.LIGHT.colors[0] not in svg["dark"]
    assert figures.DARK.colors[0] in svg["dark"]
    assert figures.LIGHT.muted not in svg["dark"]


def test_what_users_wrote_is_no_markup(page_file: Path) -> None:
    page = page_file.read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert re.findall(r"""(?:src|href|srcset)=["'](?!data:|#)""", page) == []
    assert "url(" not in page


def test_thumbnails_are_the_pictures(showcase: Path) -> None:
    with diskbuf.open(showcase) as buffer:
        roles = gathered.roles_of(buffer)
        notes: list[str] = []
        found = report_page.thumbnails_of(buffer, roles, report_page._Budget(), notes)
        ids = np.linspace(buffer.first_id, buffer.next_id - 1, 8).round().astype(int)
        rows = buffer.read(ids, 0).observation
    assert notes == []
    names = ("grey", "grey last", "camera", "sprite", "first", "grey first", "sprite first", "unit")
    assert sorted(found) == sorted(f"observation/{name}" for name in names)
    shown = {name: [decoded(entry.uri) for entry in found[f"observation/{name}"]] for name in names}
    for number in range(8):
        assert (shown["grey"][number] == rows["grey"][number]).all()
        assert (shown["grey last"][number] == rows["grey last"][number, ..., 0]).all()
        assert (shown["camera"][number] == rows["camera"][number]).all()
        assert (shown["sprite"][number] == rows["sprite"][number]).all()
        assert (shown["first"][number] == np.moveaxis(rows["first"][number], 0, -1)).all()
        assert (shown["grey first"][number] == rows["grey first"][number, 0]).all()
        assert (shown["sprite first"][number] == rows["sprite first"][number, 3]).all()  # noise: a stack's newest
        assert (shown["unit"][number] == np.rint(rows["unit"][number] * 255)).all()


def decoded(uri: str) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) as image:
        return np.array(image)


def test_frames_of_chosen_episodes_are_shown(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--episode", "0:1", "--episode", "last"]
    assert run(capsys, "report", store, "-o", tmp_path / "a.html", *words)[0] == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "ids [0, 5), terminated" in page
    assert "ids [20, 24), terminated" in page
    assert "Best episode" not in page
    assert page.count(", final of the last episode") == 1
    assert run(capsys, "report", store, "-o", tmp_path / "b.html")[0] == 0
    page = (tmp_path / "b.html").read_text(encoding="utf-8")
    assert "return 18, 9 steps, lane 0, ids [10, 19), terminated" in page
    assert re.findall(r"<h3>(\w+) episode", page) == ["Best", "Median", "Worst"]


def test_what_a_report_leaves_out_is_a_note_at_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "numbers.zarr"
    rows = rows_of([4, 9, 5], ())
    with UniformReplayBuffer(spec_of(ArraySpec([], "float32")), path=path) as buffer:
        buffer.extend(rows._replace(observation=np.zeros(rows.reward.shape, "float32")))
    assert run(capsys, "report", path, "-o", tmp_path / "a.html")[0] == 0
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert page.index("Left out") > page.rindex("<figure>")
    # There are no frames to put below headings, but the episodes are told.
    assert "<h3>Best episode" not in page
    assert page.count("<dt>Best</dt>") == 1


@pytest.mark.parametrize("count", [6, 9, 30])
def test_the_legend_of_a_course_hides_no_dot(count: int) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    course = gathered.Course(0, count)
    course.add(np.arange(count), np.where(np.arange(count) % 2, 0.0, 100.0))  # in every corner, and between
    figure = Figure(figsize=(4.0, 2.5), layout="constrained")
    axes = figure.subplots()
    figures._draw_course(axes, figures.LIGHT, course, "return")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    legend = axes.get_legend()
    assert legend is not None
    box = legend.get_window_extent(canvas.get_renderer())
    dots = axes.transData.transform(np.stack(axes.lines[0].get_data(), -1))
    assert len(dots) == count
    assert not any(box.padded(4).contains(*dot) for dot in dots)


def test_an_empty_store_gives_a_page_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_of({"camera": ArraySpec([HEIGHT, WIDTH], "uint8")})
    with UniformReplayBuffer(spec, path=tmp_path / "empty.zarr"):
        pass
    assert run(capsys, "report", tmp_path / "empty.zarr", "-o", tmp_path / "a.html")[::2] == (0, "")
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "The store is empty" in page
    assert "observation/camera" in page
    assert "<img" not in page
    because = "must hold an episode"
    is_refused(capsys, "video", tmp_path / "empty.zarr", "best", "-o", tmp_path / "a.gif", code=1, because=because)


def test_a_page_stays_small_however_much_there_is_to_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gathered, "_MOST_COLUMNS", 3)  # for speed; a figure takes some 20 kB of the page
    spec = {f"camera {number}": ArraySpec([200, 200, 4], "uint8") for number in range(10)}
    spec |= {f"leaf {number}": ArraySpec([], "float32") for number in range(230)}
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (1, 8, 200, 200, 4), "uint8")
    noise[..., 3] = 255
    rows = {name: noise if leaf.shape else rng.random((1, 8), "float32") for name, leaf in spec.items()}
    with UniformReplayBuffer(spec, path=tmp_path / "s", metadata={"much": "<" * 500_000}) as buffer:
        buffer.extend(rows)
    code, out, _ = run(capsys, "report", tmp_path / "s", "-o", tmp_path / "a.html")
    assert code == 0
    assert 2**20 < (tmp_path / "a.html").stat().st_size < 2**23
    assert "would have made the page too large" in out
    assert "the first 200 of 240 leaves" in out
    assert "the first 8 of 10 leaves that are pictures" in out


def test_stores_at_a_url_are_drawn(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"memory://drawing/{tmp_path.name}"
    diskbuf.copy(store, url, codec="zstd")
    code, out, err = run(capsys, "report", url, "-o", tmp_path / "a.html")
    assert (code, err) == (0, "")
    assert "throughput: it can't be told; rows carry no times, and a remote store none of its files" in out
    assert f'<p class="path">{url}</p>' in (tmp_path / "a.html").read_text(encoding="utf-8")
    assert run(capsys, "plot", url, "-o", tmp_path / "a.svg")[0] == 0
    assert run(capsys, "video", url, "best", "-o", tmp_path / "a.gif")[0] == 0
    assert run(capsys, "video", store, "best", "-o", tmp_path / "b.gif")[0] == 0
    assert (tmp_path / "a.gif").read_bytes() == (tmp_path / "b.gif").read_bytes()


def test_a_store_that_is_being_written_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "live.zarr"
    spec = spec_of(ArraySpec([HEIGHT, WIDTH], "uint8"))
    frames = frames_of(40, (HEIGHT, WIDTH))[None, ..., 0]
    rows = rows_of([3, 5, 2, 4, 3, 4, 6, 5], frames)
    options = diskbuf.StoreOptions(chunk_bytes=8192)
    is_over = threading.Event()

    def write() -> None:
        while not is_over.is_set():
            buffer.extend(rows)

    with UniformReplayBuffer(spec, 1, 400, path=path, options=options) as buffer:
        buffer.extend(rows)
        writer = threading.Thread(target=write)
        writer.start()
        try:
            assert run(capsys, "report", path, "-o", tmp_path / "a.html")[0] == 0
            assert run(capsys, "plot", path, "-o", tmp_path / "a.png")[0] == 0
        finally:
            is_over.set()
            writer.join()


# ---- video


def gif_of(file: Path) -> tuple[np.ndarray, list[int]]:
    """Frames [T, H, W, 3] and their milliseconds."""
    frames, lengths = [], []
    with Image.open(file) as image:
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            frames.append(np.array(image.convert("RGB")))
            lengths.append(int(image.info["duration"]))
    return np.stack(frames), lengths


def mp4_of(file: Path, height: int, width: int) -> np.ndarray:
    import imageio_ffmpeg

    words = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", str(file), "-f", "rawvideo"]
    matrix = "scale=in_color_matrix=bt709"
    raw = subprocess.run([*words, "-vf", matrix, "-pix_fmt", "rgb24", "-"], capture_output=True, check=True).stdout
    return np.frombuffer(raw, "uint8").reshape(-1, height, width, 3)


def test_a_gif_has_the_frames_of_the_episode_and_its_final_one(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = frames_of(25, (HEIGHT, WIDTH))
    for words, first_id, next_id in (
        (["best"], 10, 20),
        (["worst"], 6, 10),
        (["last"], 20, 25),
        (["0:0"], 0, 6),
        (["0:3"], 0, 6),
        (["22", "--lane", "0"], 20, 25),
    ):
        code, out, _ = run(capsys, "video", store, *words, "-o", tmp_path / "a.gif", "--json", *FORCE)
        assert code == 0
        told = json.loads(out)
        assert (told["first_id"], told["last_id"], told["frames"]) == (first_id, next_id - 2, next_id - first_id)
        frames, lengths = gif_of(tmp_path / "a.gif")
        assert (frames == expected[first_id:next_id]).all()
        assert sum(lengths) == pytest.approx(1000 * len(frames) / 30, abs=5)


def test_pixels_of_a_gif_become_squares(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["video", store, "best", "-o", tmp_path / "a.GIF", "--scale", "3", "--fps", "10"]
    assert run(capsys, *words)[0] == 0
    frames, lengths = gif_of(tmp_path / "a.GIF")
    assert (frames == frames_of(25, (HEIGHT, WIDTH))[10:20].repeat(3, axis=1).repeat(3, axis=2)).all()
    assert lengths == [100] * 10


@pytest.mark.parametrize("colors", [1, 2, 3, 16, 17, 256])
@pytest.mark.parametrize("channels", [1, 3])
def test_up_to_256_colours_are_kept(colors: int, channels: int, tmp_path: Path) -> None:
    frames = frames_of(7, (9, 40), colors=colors)[..., :channels]
    frames[3] = frames[2]  # nothing changes
    moving_pictures.write(iter([frames[:3], frames[3:]]), tmp_path / "a.gif", ".gif", fps=50, scale=1)
    found, lengths = gif_of(tmp_path / "a.gif")
    assert (found == frames).all()
    assert lengths == [20] * 7


def test_more_colours_are_brought_down_to_the_nearest(tmp_path: Path) -> None:
    frames = np.stack(np.meshgrid(*[np.arange(64) * 4] * 2, indexing="ij"), -1).astype("uint8")
    frames = np.concatenate([frames, 255 - frames[..., :1]], -1)[None]
    moving_pictures.write([frames], tmp_path / "a.gif", ".gif", fps=5, scale=1)
    found, _ = gif_of(tmp_path / "a.gif")
    assert np.abs(found.astype(int) - frames).mean() < 8


@pytest.mark.parametrize(("channels", "scale"), [(1, 1), (3, 1), (3, 3), (3, 4)])
def test_an_mp4_looks_like_the_frames(channels: int, scale: int, tmp_path: Path) -> None:
    down, across = np.mgrid[:33, :41]
    waves = [np.sin(down / 6 + t / 5 + c) * np.cos(across / 9 - c) for t in range(20) for c in range(channels)]
    smooth = (120 + 100 * np.stack(waves)).reshape(20, channels, 33, 41)
    frames = np.moveaxis(smooth, 1, -1).astype("uint8")
    assert moving_pictures.write([frames], tmp_path / "a.mp4", ".mp4", fps=25, scale=scale) == 20
    high, wide = 33 * scale, 41 * scale
    found = mp4_of(tmp_path / "a.mp4", high + high % 2, wide + wide % 2)
    assert len(found) == 20
    expected = frames.repeat(scale, axis=1).repeat(scale, axis=2)
    apart = np.abs(found[:, :high, :wide].astype(int) - expected)
    assert apart.mean() < (7 if scale == 1 else 4)  # colours have half the resolution
    if high % 2:
        assert found[:, high:].mean() < 40  # the line that was added


def test_colours_of_an_mp4_stay_what_they_were(tmp_path: Path) -> None:
    colors = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0], [255, 255, 255], [0, 0, 0]], "uint8")
    frames = np.broadcast_to(colors[:, None, None], (6, 32, 32, 3)).copy()
    moving_pictures.write([frames], tmp_path / "a.mp4", ".mp4", fps=1, scale=1)
    found = mp4_of(tmp_path / "a.mp4", 32, 32)
    assert np.abs(found.astype(int) - frames).max() < 12


def test_floats_are_drawn_where_the_spec_bounds_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = np.linspace(0, 1, 6 * HEIGHT * WIDTH, dtype="float32").reshape(1, 6, HEIGHT, WIDTH)
    spec = spec_of(
        {
            "depth": BoundedArraySpec([HEIGHT, WIDTH], "float32", 0, 1),
            "free": ArraySpec([HEIGHT, WIDTH], "float32"),
            "sensor": BoundedArraySpec([HEIGHT, WIDTH], "float32", -1, 1),
        }
    )
    with UniformReplayBuffer(spec, path=tmp_path / "s") as buffer:
        buffer.extend(rows_of([5], {"depth": values, "free": values, "sensor": values}))
    words = ["video", tmp_path / "s", "last", "-o", tmp_path / "a.gif"]
    assert run(capsys, *words)[0] == 0  # the only one that is a picture
    frames, _ = gif_of(tmp_path / "a.gif")
    assert (frames[..., 0] == np.rint(values[0] * 255)).all()
    for path in ("free", "sensor"):
        because = "Floats are drawn where the spec bounds them by 0 and 1"
        is_refused(capsys, *words, "-c", f"observation/{path}", *FORCE, code=2, because=because)


def test_several_pictures_are_told_apart(showcase: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["video", showcase, "best", "-o", tmp_path / "a.gif"]
    is_refused(capsys, *words, code=2, because="Choose one of 'observation/camera'")
    assert run(capsys, *words, "-c", "observation/first", *FORCE)[0] == 0


def test_see_through_pixels_lie_on_white() -> None:
    leaf = pictures.PictureLeaf(path="x", spec=ArraySpec([2, 2, 4], "uint8"), axes="HWC")
    frame = np.array([[[10, 20, 30, 255], [10, 20, 30, 0]], [[0, 0, 0, 51], [1, 2, 3, 255]]], "uint8")
    told = leaf.told_by(frame[None])
    assert not told.is_stack
    assert told.opaque(frame[None])[0].tolist() == [[[10, 20, 30], [255] * 3], [[204] * 3, [1, 2, 3]]]


@pytest.mark.parametrize("axes", ["HWC", "CHW"])
def test_of_a_stack_the_newest_frame_is_shown(axes: Any) -> None:
    frames = np.random.default_rng(0).integers(0, 200, (3, 5, 6, 4), dtype="uint8")
    stored = frames if axes == "HWC" else np.moveaxis(frames, -1, 1)
    leaf = pictures.PictureLeaf(path="x", spec=ArraySpec(stored.shape[1:], "uint8"), axes=axes).told_by(stored)
    assert leaf.is_stack
    assert (leaf.opaque(stored) == frames[..., 3:]).all()


@pytest.mark.parametrize(("lanes", "others"), [(1, 1), (3, 1), (3, 5000)])
def test_a_video_is_of_its_lane(lanes: int, others: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frames = np.stack([frames_of(9, (HEIGHT, WIDTH), seed=lane)[..., 0] for lane in range(lanes)])
    one = rows_of([3, 4], frames[:1])
    rows = one._replace(
        observation={"camera": frames, "others": np.zeros((lanes, 9, others))},
        **{
            name: np.repeat(getattr(one, name), lanes, 0)
            for name in ("step_type", "action", "next_step_type", "reward", "discount")
        },
    )
    spec = spec_of({"camera": ArraySpec([HEIGHT, WIDTH], "uint8"), "others": ArraySpec([others], "float64")})
    with UniformReplayBuffer(spec, lanes, path=tmp_path / "s") as buffer:
        buffer.extend(rows)
    assert run(capsys, "video", tmp_path / "s", f"{lanes - 1}:4", "-o", tmp_path / "a.gif")[0] == 0
    assert (gif_of(tmp_path / "a.gif")[0][..., 0] == frames[-1, 4:9]).all()


@pytest.mark.parametrize("suffix", [".gif", ".mp4"])
def test_frames_of_a_long_episode_are_not_held(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    blocks, shape = 40, (16, 64, 64, 1)

    def make() -> Iterator[np.ndarray]:
        for number in range(blocks):
            yield np.full(shape, number, "uint8")

    moving_pictures.write(first_of(make()), tmp_path / f"warm{suffix}", suffix, fps=30, scale=1)
    tracemalloc.start()
    try:
        moving_pictures.write(make(), tmp_path / f"a{suffix}", suffix, fps=30, scale=1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * math.prod(shape)


def first_of(blocks: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
    yield next(blocks)


def test_an_encoder_that_fails_leaves_no_file(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = store.parent / "ffmpeg"
    broken.write_text("#!/bin/sh\necho 'it broke' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(broken))
    file = store.with_suffix(".mp4")
    is_refused(
        capsys, "video", store, "best", "-o", file, code=1, because="ffmpeg must write the video, but failed: it broke"
    )
    assert sorted(path.name for path in store.parent.iterdir()) == ["bounce.zarr", "ffmpeg"]


def test_a_video_without_frames_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="at least one frame"):
        moving_pictures.write([], tmp_path / "a.gif", ".gif", fps=30, scale=1)
