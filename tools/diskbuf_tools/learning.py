"""Verbs that collect, train and judge: collect, train-offline, train-bandit, evaluate, bench, demo."""

import contextlib
import dataclasses
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from diskbuf.errors import OptionError
from diskbuf_tools.arguments import Json, StorageOptions, Store
from diskbuf_tools.output import bytes_text, print_facts, print_json, print_rows, text
from diskbuf_tools.stores import open_store

if TYPE_CHECKING:
    from diskbuf.policies import CompiledPolicy
    from diskbuf.replay_buffers.uniform import UniformReplayBuffer

PANEL = "Learn"

Seed = Annotated[int, typer.Option(help="Makes it repeatable.")]
OptionalSeed = Annotated[int | None, typer.Option(help="Makes it repeatable; left out, every run is another.")]
Folder = Annotated[
    Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the training; made, or gone on with.")
]
FcLayers = Annotated[str | None, typer.Option(metavar="N,N", help="Units of the hidden layers.")]
EnvironmentArguments = Annotated[
    str | None,
    typer.Option("--env-kwargs", metavar="JSON", help="""Arguments for it, such as '{"sutton_barto_reward": true}'."""),
]
FirstId = Annotated[int | None, typer.Option(help="First step id; left out, the oldest.")]
NextId = Annotated[int | None, typer.Option(help="Step id before which to stop; left out, after the newest.")]

_RANDOM = ("random", "uniform")
_COLUMN = "column:"
_BENCH_LEGEND = """
A call is one add_batch of all lanes, one batch of sequences, or one piece of a pass. The ratio is of MB/s to that of
what stands beside it, the bare machine: memcpy copies as many bytes in memory, plain writes go to files of 16 MiB,
without and with fsync, and plain reads and preads come from these. Small steps are bound by calls and not by bytes, so
that their ratios to memcpy and writes are low on every disk; look at steps/s and µs/call there."""


def collect(
    env: Annotated[str, typer.Argument(metavar="ENV", help="As Gymnasium knows it: CartPole-v1, or module:Name-v0.")],
    store: Annotated[str, typer.Argument(metavar="STORE", help="Path of the store; made, or gone on with.")],
    steps: Annotated[int, typer.Option(help="Rows to reach in the store, all lanes together.")],
    lanes: Annotated[int | None, typer.Option(help="Environments side by side: the store's, 8 for a new one.")] = None,
    policy: Annotated[
        str, typer.Option(help="random (or uniform), or the path of a saved policy or of a training.")
    ] = "random",
    epsilon: Annotated[
        float | None, typer.Option(help="Share of random actions with a saved policy.", show_default="0.1")
    ] = None,
    seed: OptionalSeed = None,
    max_length: Annotated[int | None, typer.Option(help="Steps to keep of each lane; left out, all.")] = None,
    codec: Annotated[
        Literal["zstd", "blosc", "lz4"] | None, typer.Option(help="Of a new store; left out, not compressed.")
    ] = None,
    layout: Annotated[Literal["zarr", "arrow"], typer.Option(help="Of a new store.")] = "zarr",
    env_kwargs: EnvironmentArguments = None,
    vectorization: Annotated[
        Literal["sync", "async", "vector_entry_point"],
        typer.Option(help="Lanes one after the other, each in a process of its own, or as the environment brings it."),
    ] = "sync",
    as_json: Json = False,
) -> None:
    """Collect steps of a Gymnasium environment into a store, until it has had --steps.

    A row is one step of one environment, and so is the boundary row behind each episode: 10 lanes and --steps 50 are 50
    rows in all, 5 a lane. Run again after a kill or Ctrl-C, it does what is left; with more --steps, it goes on.

    Example: diskbuf collect CartPole-v1 cartpole.zarr --steps 50000 --lanes 8
    """
    from diskbuf.options import StoreOptions
    from diskbuf.training.collecting import collect as collect_rows

    acting = None
    if policy not in _RANDOM:
        acting = _load_policy(policy)
    explores = 0.1 if epsilon is None and acting is not None and not acting.info_spec else epsilon or 0.0
    with _progress("collect") as tell:
        report = collect_rows(
            store,
            env,
            num_steps=steps,
            lanes=lanes,
            policy=acting,
            policy_name="random" if acting is None else policy,
            epsilon=explores,
            seed=seed,
            max_length=max_length,
            options=StoreOptions(codec=codec, layout=layout),
            gym_kwargs=_json_object("--env-kwargs", env_kwargs),
            vectorization=vectorization,
            progress=tell,
        )
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    rate = f", {report.added / report.seconds:,.0f} steps/s" if report.added else ""
    earned = (
        ""
        if report.mean_return is None
        else f", mean return of the last {min(report.episodes, 100)}: {report.mean_return:.4g}"
    )
    print(f"{store}: {report.rows:,} rows, {report.added:,} of them now in {report.seconds:.1f} s{rate}")
    print(f"  {report.episodes:,} episodes ended{earned}")


def train_offline(
    store: Store,
    steps: Annotated[int, typer.Option(help="Train steps in all, those before a restart included.")],
    output: Folder,
    agent: Annotated[Literal["dqn", "ddqn"], typer.Option(help="Plain or double Q-learning.")] = "ddqn",
    env: Annotated[str | None, typer.Option(metavar="NAME", help="Evaluate in this environment on the way.")] = None,
    episodes: Annotated[int, typer.Option(help="Episodes of an evaluation.")] = 10,
    batch_size: Annotated[int, typer.Option(help="Transitions to a train step.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="Of Adam.")] = 5e-4,
    gamma: Annotated[float, typer.Option(help="Discount of a step.")] = 0.98,
    fc_layers: FcLayers = "100,100",
    seed: Seed = 0,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Train a DQN agent on a store, and save its greedy policy; killed and run again, it goes on.

    The store must hold Trajectories, as drivers and diskbuf collect store them, with one action out of a few. Nothing
    is collected. The folder gets checkpoints, summaries for TensorBoard, and policy_N, N the number of train steps; it
    is gone on with from the same store only. Ctrl-C saves a checkpoint. For a log of decisions there is train-bandit.

    Example: diskbuf train-offline cartpole.zarr --steps 3000 -o runs/dqn --env CartPole-v1
    """
    from diskbuf.training.recipes import DqnSettings, learnable_spec, train_dqn_offline

    settings = DqnSettings(
        agent=agent,
        fc_layer_params=_sizes("--fc-layers", fc_layers) or (),
        learning_rate=learning_rate,
        gamma=gamma,
        batch_size=batch_size,
        seed=seed,
    )
    with open_store(store, storage_option=storage_option) as buffer, _in_options(buffer, store):
        learnable_spec(buffer)  # before TensorFlow is loaded, which takes seconds
        _load_tensorflow()
        trained = train_dqn_offline(
            output,
            buffer,
            num_iterations=steps,
            settings=settings,
            environment_name=env,
            num_eval_episodes=episodes,
            progress=sys.stderr.isatty(),
        )
    result = trained.result
    if as_json:
        facts = dataclasses.asdict(trained) | {"folder": str(trained.folder), "policy": str(trained.policy)}
        print_json({name: fact for name, fact in facts.items() if name != "result"} | result._asdict())
        return
    if trained.seen_actions is not None:
        print(f"actions {trained.seen_actions[0]:,} to {trained.seen_actions[1]:,}, taken from the rows")
    if trained.train_steps_before >= steps:
        print(_nothing_left(trained.policy, trained.train_steps_before))
        return
    returns = dict(result.returns)
    losses = dict(result.losses)
    told = sorted(returns) if returns else _spread(sorted(losses), 10)
    rows = [{"train step": step, "loss": losses.get(step), "mean return": returns.get(step)} for step in told]
    print_rows(rows, ["train step", "loss", *(["mean return"] if returns else [])], form="table")
    print(f"{trained.policy}: the greedy policy after {result.train_step:,} train steps")


def train_bandit(
    store: Annotated[str, typer.Argument(metavar="STORE", help="Path or URL of a log, as imported or as collected.")],
    output: Folder,
    agent: Annotated[
        str,
        typer.Option(
            help="linucb, lints, neural-greedy, neural-epsilon-greedy, neural-boltzmann, dropout-thompson, "
            "bernoulli-thompson or exp3."
        ),
    ] = "linucb",
    steps: Annotated[int | None, typer.Option(help="Train steps in all; left out, whole passes.")] = None,
    epochs: Annotated[int, typer.Option(help="Passes over the log.")] = 1,
    batch_size: Annotated[int, typer.Option(help="Rows to a train step.")] = 256,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="An order of its own for each pass.")] = False,
    first_id: FirstId = None,
    next_id: NextId = None,
    alpha: Annotated[float | None, typer.Option(help="How far linucb and lints explore.", show_default="1")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Share of random arms.", show_default="0.1")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of neural-boltzmann.", show_default="0.1")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Of a network, or of exp3.", show_default="0.003, exp3: 0.1")
    ] = None,
    fc_layers: Annotated[
        str | None, typer.Option(metavar="N,N", help="Units of a network's hidden layers.", show_default="32")
    ] = None,
    dropout_rate: Annotated[float | None, typer.Option(help="Of dropout-thompson.", show_default="0.1")] = None,
    seed: Seed = 0,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Train a bandit agent on a log of decisions, and save its policy; killed and run again, it goes on.

    Linear agents count each row as one more observation each time, so leave them at one pass. A folder is gone on with
    from the same store only. For episodes of many steps there is train-offline.

    Example: diskbuf train-bandit clicks.zarr --agent lints -o runs/lints --next-id 50000
    """
    from diskbuf.bandits.log_reader import LogReader
    from diskbuf.bandits.recipes import BanditSettings, check_log, train_agent_offline

    settings = BanditSettings(
        agent=agent,
        alpha=alpha,
        epsilon=epsilon,
        temperature=temperature,
        learning_rate=learning_rate,
        fc_layer_params=_sizes("--fc-layers", fc_layers),
        dropout_rate=dropout_rate,
        seed=seed,
    )
    with open_store(store, history=True, storage_option=storage_option) as buffer, _in_options(buffer, store):
        check_log(buffer)  # before TensorFlow loads
        LogReader(buffer, first_id=first_id, next_id=next_id).close()
        _load_tensorflow()
        trained = train_agent_offline(
            output,
            buffer,
            settings,
            num_steps=steps,
            num_epochs=epochs,
            batch_size=batch_size,
            shuffle=shuffle,
            first_id=first_id,
            next_id=next_id,
        )
    if as_json:
        print_json(dataclasses.asdict(trained))
        return
    if trained.train_steps == trained.train_steps_before:
        print(_nothing_left(trained.policy, trained.train_steps))
        return
    loss = "" if math.isnan(trained.loss) else f", loss of the last {trained.loss:.6g}"
    print(f"{trained.policy}: {agent} after {trained.train_steps:,} train steps{loss}")


def evaluate(
    policy: Annotated[
        str, typer.Argument(metavar="POLICY", help="Saved policy, or folder of a training; or random (or uniform).")
    ],
    env: Annotated[str | None, typer.Option(metavar="NAME", help="Play in this environment.")] = None,
    log: Annotated[str | None, typer.Option(metavar="STORE", help="Judge from this log of a bandit.")] = None,
    episodes: Annotated[int | None, typer.Option(help="With --env: episodes to play.", show_default="20")] = None,
    env_kwargs: EnvironmentArguments = None,
    estimator: Annotated[
        list[str] | None,
        typer.Option(
            "--estimator",
            "-e",
            metavar="NAME,NAME",
            help="With --log: ips, snips, dm, dr, sndr, replay, clipped-ips:X, switch-dr:X, dros:X.",
            show_default="ips,snips,dm,dr",
        ),
    ] = None,
    first_id: FirstId = None,
    next_id: NextId = None,
    confidence: Annotated[float | None, typer.Option(help="With --log: of the intervals.", show_default="0.95")] = None,
    propensity_floor: Annotated[
        float | None, typer.Option(help="With --log: raise smaller propensities to it; left out, they are refused.")
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Tell what a policy earns: by playing with --env, or from a log of other decisions with --log.

    --env plays whole episodes and tells their mean return. --log estimates what a bandit policy's decisions would have
    earned, with intervals, from the decisions of another one; don't judge a policy by rows that it has learnt from.
    In place of a saved policy, random, or uniform, is one that chooses all actions alike, and column:policy_info/NAME
    one whose probabilities or arm the log has in that leaf.

    Example: diskbuf evaluate runs/dqn --env CartPole-v1 --episodes 20

    Example: diskbuf evaluate runs/lints --log clicks.zarr --first-id 50000 --estimator snips,dr
    """
    of_env = {"--episodes": episodes, "--env-kwargs": env_kwargs}
    of_log = {
        "--estimator": estimator or None,
        "--first-id": first_id,
        "--next-id": next_id,
        "--confidence": confidence,
        "--propensity-floor": propensity_floor,
        "--storage-option": storage_option or None,
    }
    if (env is None) == (log is None):
        raise OptionError(
            "evaluate must be told either --env, to play, or --log, to judge from a log"
            f", got {'neither' if env is None else 'both'}."
        )
    chosen, others = ("--env", of_log) if env is not None else ("--log", of_env)
    for name, value in others.items():
        if value is not None:
            raise OptionError(f"{name} must be left out with {chosen}, got {value!r}.")
    if env is not None:
        _play(policy, env, 20 if episodes is None else episodes, env_kwargs, seed=seed, as_json=as_json)
        return
    from diskbuf.bandits.recipes import estimators_named

    words = [word for entry in estimator or [] for word in entry.split(",")]
    options: dict[str, Any] = {
        "estimators": estimators_named(words) if words else None,
        "first_id": first_id,
        "next_id": next_id,
        "seed": seed,
        "propensity_floor": propensity_floor,
    }
    if confidence is not None:
        options["confidence"] = confidence
    _judge(policy, str(log), options, storage_option=storage_option, as_json=as_json)


def bench(
    store: Annotated[
        str | None,
        typer.Argument(metavar="[STORE]", help="Measure with the spec and steps of this store; it is only read."),
    ] = None,
    path: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder on the disk to measure: the store's, or the current one."),
    ] = None,
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 15.0,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Measure how fast this machine and disk append, sample and read, beside memcpy and plain files.

    Some hundred megabytes are written to a scratch folder, which is removed again, also on Ctrl-C. Without a store it
    is frames of 84x84 bytes and small steps. Ratios are of speeds: 1 is as fast as what stands beside it.

    Example: diskbuf bench --path /mnt/data

    Example: diskbuf bench pong.zarr --seconds 30
    """
    from diskbuf_tools import store_bench

    workloads = store_bench.usual_workloads() if store is None else []
    folder = Path() if path is None else path
    if store is not None:
        with open_store(store, storage_option=storage_option) as buffer:
            workloads = [store_bench.workload_of(buffer, name=f"steps of {store}")]
            if path is None and isinstance(buffer.path, Path):
                folder = buffer.path.absolute().parent
    with _stages() as stage:
        report = store_bench.bench(folder, workloads, seconds=seconds, stage=stage)
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    print(f"{report.folder}: {report.cpus} CPUs, diskbuf {report.version}, {report.seconds:.0f} s")
    for measured in report.workloads:
        stored = f"{measured.layout}, {measured.codec}" if measured.codec else measured.layout
        size = f"{measured.lanes:,} lanes of {bytes_text(measured.row_bytes)}, {bytes_text(measured.store_bytes)}"
        print(f"\n{measured.name}: {size}, {stored}")
        rows = [
            {
                "": figure.what,
                "steps/s": _rounded(figure.steps_per_second),
                "µs/call": _rounded(figure.seconds_per_call, 1e-6),
                "MB/s": _rounded(figure.bytes_per_second, 1e6),
                "ratio": None if figure.ratio is None else f"{figure.ratio:.2f}",
                "of MB/s": _rounded(figure.peer_bytes_per_second, 1e6),
                "beside": figure.peer,
            }
            for figure in measured.figures
        ]
        print_rows(rows, list(rows[0]), form="table")
    print(_BENCH_LEGEND)
    for note in report.notes:
        print(f"Note: {note}")


def demo(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[FOLDER]", help="Where store and training stay; left out, a temporary one that goes."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Rows to collect.")] = 50_000,
    train_steps: Annotated[int, typer.Option(help="Batches to train on.")] = 3000,
    seed: Seed = 0,
    as_json: Json = False,
) -> int:
    """Show the whole way in under a minute: collect, get killed, go on, train offline, evaluate.

    It runs the other verbs, shows them as they would be typed, and ends with code 1 when the trained policy earns less
    than 3 times what a random one does.

    Example: diskbuf demo runs/demo
    """
    from diskbuf_tools import demonstration

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    with contextlib.ExitStack() as stack:
        place = folder
        if place is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="diskbuf-demo-")))
        report = demonstration.demo(place, num_steps=steps, num_iterations=train_steps, seed=seed, say=say)
    if as_json:
        print_json(dataclasses.asdict(report) | {"faults": report.faults})
    else:
        ratio = report.greedy_return / report.random_return
        print(f"Done in {report.seconds:.0f} s: the trained policy earns {ratio:.1f} times what a random one does.")
        print(f"The store is {report.store}" if folder else "Name a folder to keep the store: diskbuf demo FOLDER")
    for fault in report.faults:
        print(f"diskbuf: {fault}", file=sys.stderr)
    return 1 if report.faults else 0


@contextlib.contextmanager
def _in_options(buffer: "UniformReplayBuffer", store: str) -> Iterator[None]:
    """Says what the package refuses with the options' names, and with the store's path as it was typed."""
    try:
        yield
    except OptionError as error:
        said = str(error).replace(str(buffer.path), store)
        for name, option in (
            ("another root_dir", "another -o"),
            ("num_iterations", "--steps"),
            ("num_steps", "--steps"),
            ("num_eval_episodes", "--episodes"),
            ("sample_batch_size", "--batch-size"),
            ("fc_layer_params", "--fc-layers"),
        ):
            said = said.replace(name, option)
        raise OptionError(said) from error


def _nothing_left(policy: Path, train_steps: int) -> str:
    return f"{policy}: nothing left to do, it has had {train_steps:,} train steps"


def _spread(numbers: list[int], most: int) -> list[int]:
    """The first, the last and some between, evenly."""
    if len(numbers) <= most:
        return numbers
    return [numbers[round(place * (len(numbers) - 1) / (most - 1))] for place in range(most)]


def _rounded(value: float | None, unit: float = 1.0) -> float | None:
    """To three digits, which is more than two runs have in common."""
    if not value:
        return value
    number = value / unit
    digits = 2 - math.floor(math.log10(number))
    return round(number, digits) if digits > 0 else round(round(number, digits))


@contextlib.contextmanager
def _stages() -> Iterator["Callable[[str], object] | None"]:
    """Shows what is being done on a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status("bench") as status:
        yield status.update


def _play(policy: str, env: str, episodes: int, env_kwargs: str | None, *, seed: int, as_json: bool) -> None:
    from diskbuf.policies import RandomPolicy
    from diskbuf.training import evaluate as play
    from diskbuf.training.collecting import check_fits, load_environment

    if episodes < 1:
        raise OptionError(f"--episodes must be at least 1, got {episodes}.")
    arguments = _json_object("--env-kwargs", env_kwargs)
    with load_environment(env, min(episodes, 10), seed=seed, gym_kwargs=arguments) as environment:
        acting: Any = (
            RandomPolicy(environment.time_step_spec(), environment.action_spec(), seed=seed)
            if policy in _RANDOM
            else _load_policy(policy)
        )
        check_fits(acting, environment)
        returns = play(acting, environment, num_episodes=episodes)
    facts = {
        "policy": policy,
        "environment": env,
        "episodes": len(returns),
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std()),
        "min_return": float(returns.min()),
        "max_return": float(returns.max()),
    }
    if as_json:
        print_json(facts | {"returns": returns})
        return
    print_facts(
        [
            ("episodes", f"{len(returns):,}"),
            ("mean return", text(facts["mean_return"])),
            ("deviation", text(facts["std_return"])),
            ("from, to", f"{text(facts['min_return'])}, {text(facts['max_return'])}"),
        ],
        title=f"{policy} in {env}",
    )


def _judge(
    policy: str,
    log: str,
    options: dict[str, Any],
    *,
    storage_option: list[str] | None,
    as_json: bool,
) -> None:
    from diskbuf.bandits import evaluation
    from diskbuf.bandits.recipes import logged_policy, uniform_policy

    with open_store(log, history=True, storage_option=storage_option) as buffer:
        judged: Any
        if policy in _RANDOM:
            judged = uniform_policy(buffer)
        elif policy.startswith(_COLUMN):
            judged = logged_policy(buffer, policy.removeprefix(_COLUMN))
        else:
            judged = _load_policy(policy)
        found = evaluation.evaluate(buffer, judged, **options)
    print(json.dumps(json.loads(found.to_json())) if as_json else found)


def _load_policy(path: str) -> "CompiledPolicy":
    """A saved policy; one that isn't there is refused before TensorFlow is loaded."""
    from diskbuf.policies import load_policy, newest_policy

    folder = newest_policy(path)
    _load_tensorflow()
    return load_policy(folder)


def _load_tensorflow() -> None:
    """Imports TensorFlow without what its libraries write while they load, before they heed any setting."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when it is imported
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # does nothing for small networks, and logs that it is on
    import logging

    with _no_stderr():
        import tensorflow as tf  # noqa: F401
    logging.getLogger("tensorflow").setLevel(logging.ERROR)  # it tells of every policy that is saved


@contextlib.contextmanager
def _progress(label: str) -> Iterator["Callable[[int, int, float], object] | None"]:
    """Shows rows, their rate and the mean return on a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress as bars
    from rich.console import Console

    words = "{task.fields[rate]:,.0f} steps/s  {task.fields[earned]}"
    columns = [bars.TextColumn("{task.description}"), bars.BarColumn(), bars.MofNCompleteColumn()]
    with bars.Progress(
        *columns, bars.TextColumn(words), bars.TimeRemainingColumn(), console=Console(stderr=True)
    ) as shown:
        task = shown.add_task(label, total=None, rate=0.0, earned="")

        def tell(done: int, total: int, earned: float) -> None:
            rate = shown.tasks[0].speed or 0.0
            told = "" if math.isnan(earned) else f"mean return {earned:.4g}"
            shown.update(task, completed=done, total=total, rate=rate, earned=told)

        yield tell


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    """Hides what is written to the process's standard error. Exceptions still show."""
    stderr = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _json_object(option: str, word: str | None) -> dict[str, Any] | None:
    if word is None:
        return None
    try:
        found = json.loads(word)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OptionError(f"""{option} must be a JSON object such as '{{"name": 1}}', got {word!r}.""")
    return found


def _sizes(option: str, word: str | None) -> tuple[int, ...] | None:
    if word is None:
        return None
    try:
        return tuple(int(size) for size in word.split(","))
    except ValueError:
        raise OptionError(f"{option} must be numbers such as 100,100, got {word!r}.") from None


VERBS = (collect, train_offline, train_bandit, evaluate, bench, demo)
