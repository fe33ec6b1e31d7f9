"""Verbs that bring stores to and from files of other programs: export, import."""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import typer

from diskbuf.errors import DiskbufError, OptionError
from diskbuf_tools.arguments import ColumnPaths, History, Json, StorageOptions, Store
from diskbuf_tools.output import bytes_text, print_json, progress
from diskbuf_tools.stores import chosen_paths, open_store, storage_options

PANEL = "Exchange"

_LOG = "log"

_LOG_PANEL = "Of a bandit's log"

# As diskbuf.exchange.formats has them, which is imported when a verb runs.
WRITTEN = ("parquet", "arrow", "csv", "npz", "hdf5", "minari", "rlds")
READ = (*WRITTEN, "tf-agents", "d4rl", "sb3")

ExportFormat = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help=f"{', '.join(WRITTEN)}, or {_LOG} for a bandit's log; left out, by the file's ending.",
        show_default=False,
    ),
]
ImportFormat = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help=f"{', '.join(READ)}, or {_LOG} for a bandit's log; left out, by the file's ending or a folder's files.",
        show_default=False,
    ),
]
FormatOptions = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="KEY=VALUE", help="Of the format, such as compression=gzip for Parquet; again."),
]

_WORDS = {
    "final_observation='last' does without": "--final-observation last does without",
    "or force it to be replaced": "or --force replaces it",
    "flatten the arrays": "--flatten the arrays",
    "format must be": "--format must be",
    "Drop it by name, or take only what is mapped": "Add --drop COLUMN, or --only-mapped",
    "Map it, drop it, or take only what is mapped": "Add --map LEAF=COLUMN, --drop COLUMN or --only-mapped",
    "a mapping file, a ColumnMap)": "--mapping FILE)",
    " (--like STORE, ColumnMap.spec)": " (--like STORE)",
    " (--format log, diskbuf.bandits.logs)": " (--format log)",
    "Cast it: ": "Add --cast ",
    "say truncated=none": "say --option truncated=none",
    "say terminated=none": "say --option terminated=none",
    "an import must be given the store's spec": "import it with --like STORE",
    "an import must map its columns": "import must --map its columns",
    "an import can't restore it, and must map its columns": "import can't restore it, and must --map its columns",
}
"""What the package says in Python's terms, and what it is on the command line."""


def export(
    store: Store,
    destination: Annotated[str, typer.Argument(metavar="FILE", help="Path or URL of the file.", show_default=False)],
    format: ExportFormat = None,  # noqa: A002 - the option is called so
    column: ColumnPaths = None,
    first_id: Annotated[int | None, typer.Option(help="First id; left out, the oldest.")] = None,
    next_id: Annotated[int | None, typer.Option(help="End, exclusive; left out, behind the newest.")] = None,
    lane: Annotated[list[int] | None, typer.Option(help="Lane to export; again.")] = None,
    episode: Annotated[
        list[int] | None, typer.Option(help="Episode, by its row in the table of episodes; again.")
    ] = None,
    flatten: Annotated[bool, typer.Option("--flatten", help="Of CSV: a column for each element of an array.")] = False,
    option: FormatOptions = None,
    history: History = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace a file that is there.")] = False,
    as_json: Json = False,
    storage_option: StorageOptions = None,
    destination_option: Annotated[
        list[str] | None,
        typer.Option("--destination-option", metavar="KEY=VALUE", help="As --storage-option, for the file; again."),
    ] = None,
) -> None:
    """Write a store, or some of it, to a file of another format, which import makes a store of again.

    Example: diskbuf export cartpole.zarr cartpole.parquet
    """
    if format == _LOG:
        _refuse(
            "export --format log",
            {"--column": column, "--lane": lane, "--episode": episode, "--option": option, "--force": force},
        )
        _export_log(store, destination, first_id, next_id, history, as_json, storage_option, destination_option)
        return
    _check_format(format, WRITTEN)
    from diskbuf.exchange.exporting import export_store

    options = _pairs("--option", option) | ({"flatten": True} if flatten else {})
    with (
        _in_words(),
        open_store(store, history=history, storage_option=storage_option) as buffer,
        progress("export", unit="steps") as tell,
    ):
        report = export_store(
            buffer,
            destination,
            format=format,
            columns=chosen_paths(buffer, column) if column else None,
            first_id=first_id,
            next_id=next_id,
            lanes=sorted(set(lane)) if lane else None,
            episodes=episode or None,
            options=options,
            force=force,
            storage_options=storage_options(destination_option),
            progress=tell,
        )
    notes = [_worded(note) for note in report.notes]
    if as_json:
        print_json(dataclasses.asdict(report) | {"notes": notes})
        return
    size = "" if report.bytes_written is None else f", {bytes_text(report.bytes_written)}"
    evicted = f"; {report.evicted:,} ids were evicted meanwhile" if report.evicted else ""
    print(
        f"{report.destination}: {report.rows:,} rows, ids [{report.first_id}, {report.next_id}){size} "
        f"in {report.seconds:.1f} s{evicted}"
    )
    for note in notes:
        print(f"note: {note}.")


def import_(
    source: Annotated[str, typer.Argument(metavar="FILE", help="Path or URL of the file.", show_default=False)],
    store: Annotated[str, typer.Argument(metavar="STORE", help="Where the new store is to be.", show_default=False)],
    format: ImportFormat = None,  # noqa: A002 - the option is called so
    mapping: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="TOML or JSON that says all of this; see above.", show_default=False),
    ] = None,
    map_: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="LEAF=COLUMN", help="Which column a leaf is from, or x,y of an array; again."),
    ] = None,
    cast: Annotated[
        list[str] | None, typer.Option(metavar="LEAF=DTYPE", help="Cast a leaf, exactly or not at all; again.")
    ] = None,
    bounds: Annotated[
        list[str] | None, typer.Option(metavar="LEAF=LOW:HIGH", help="Least and most of all elements; again.")
    ] = None,
    drop: Annotated[list[str] | None, typer.Option(metavar="COLUMN", help="Leave a column out; again.")] = None,
    only_mapped: Annotated[
        bool, typer.Option("--only-mapped", help="Leave out every column that isn't mapped.")
    ] = False,
    like: Annotated[
        str | None, typer.Option(metavar="STORE", help="A store that has the spec to import to.", show_default=False)
    ] = None,
    trajectory: Annotated[
        bool, typer.Option("--trajectory", help="Rows are transitions; make rows of a Trajectory of them.")
    ] = False,
    final_observation: Annotated[
        Literal["required", "last"] | None,
        typer.Option(help="With --trajectory: last does without a column of next observations.", show_default=False),
    ] = None,
    id_: Annotated[str | None, typer.Option("--id", metavar="COLUMN", help="Step ids, which are kept.")] = None,
    lane: Annotated[str | None, typer.Option("--lane", metavar="COLUMN", help="Lanes.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Most steps of a lane in the window.")] = None,
    layout: Annotated[Literal["zarr", "arrow"], typer.Option(help="Of the store.")] = "zarr",
    codec: Annotated[
        str | None, typer.Option(help="Of the store: zstd, blosc or lz4; left out, none.", show_default=False)
    ] = None,
    option: FormatOptions = None,
    as_json: Json = False,
    storage_option: StorageOptions = None,
    context: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN", help="Context; again.", rich_help_panel=_LOG_PANEL)
    ] = None,
    action: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="What was done.", rich_help_panel=_LOG_PANEL)
    ] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="What came of it.", rich_help_panel=_LOG_PANEL)
    ] = None,
    propensity: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="How probable it was.", rich_help_panel=_LOG_PANEL)
    ] = None,
    timestamp: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="When it was chosen.", rich_help_panel=_LOG_PANEL)
    ] = None,
    key: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="What rewards are joined by.", rich_help_panel=_LOG_PANEL)
    ] = None,
    position: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Where it was shown.", rich_help_panel=_LOG_PANEL)
    ] = None,
    file_format: Annotated[
        Literal["csv", "jsonl", "parquet", "arrow", "vw"] | None,
        typer.Option(help="Of its file; left out, by the ending.", rich_help_panel=_LOG_PANEL, show_default=False),
    ] = None,
    num_actions: Annotated[int | None, typer.Option(help="Number of arms.", rich_help_panel=_LOG_PANEL)] = None,
    order: Annotated[
        Literal["check", "sort", "as_is"] | None,
        typer.Option(help="What its timestamps do.", rich_help_panel=_LOG_PANEL),
    ] = None,
    invalid: Annotated[
        Literal["reject", "drop", "keep"] | None,
        typer.Option(help="Rows with values out of range.", rich_help_panel=_LOG_PANEL),
    ] = None,
    pending: Annotated[
        bool, typer.Option("--pending", help="Keep rows without a reward yet.", rich_help_panel=_LOG_PANEL)
    ] = False,
    lenient: Annotated[
        bool, typer.Option("--lenient", help="Count lines that can't be read, and go on.", rich_help_panel=_LOG_PANEL)
    ] = False,
    append: Annotated[
        bool, typer.Option("--append", help="Add to the store that is there.", rich_help_panel=_LOG_PANEL)
    ] = False,
) -> None:
    """Make a store of a file: of an export as it was, of any other by a mapping of its columns to leaves.

    Example: diskbuf import log.parquet log.zarr --map observation=speed --map action=pedal --only-mapped

    A --mapping file has the keys leaves, casts, bounds, drop, only_mapped, id, lane, trajectory, final_observation:

    \b
    trajectory = true
    final_observation = "last"
    drop = ["note"]
    leaves = { observation = "x,y", action = "a", reward = "r", terminated = "done" }
    casts = { observation = "float32" }
    bounds = { action = [0, 1] }
    """  # noqa: D301 - the backspace keeps the lines of a paragraph apart
    of_log = {
        "--context": context,
        "--action": action,
        "--reward": reward,
        "--propensity": propensity,
        "--timestamp": timestamp,
        "--key": key,
        "--position": position,
        "--file-format": file_format,
        "--num-actions": num_actions,
        "--order": order,
        "--invalid": invalid,
        "--pending": pending,
        "--lenient": lenient,
        "--append": append,
    }
    of_map = {
        "--mapping": mapping,
        "--map": map_,
        "--cast": cast,
        "--bounds": bounds,
        "--drop": drop,
        "--only-mapped": only_mapped,
        "--like": like,
        "--trajectory": trajectory,
        "--final-observation": final_observation,
        "--id": id_,
        "--lane": lane,
    }
    if format == _LOG:
        codec_word = {"--codec": codec, "--option": option, "--max-length": max_length}
        _refuse("import --format log", of_map | codec_word | {"--layout": layout if layout != "zarr" else None})
        _import_log(source, store, {name: value for name, value in of_log.items() if value}, as_json, storage_option)
        return
    _refuse("import without --format log", of_log, advice=f"Add --format {_LOG}, or leave it out.")
    _check_format(format, READ)
    from diskbuf.exchange.importing import import_store
    from diskbuf.options import StoreOptions

    with _in_words(), progress("import", unit="steps") as tell:
        report = import_store(
            source,
            store,
            format=format,
            mapping=_column_map(of_map, storage_option) if any(of_map.values()) else None,
            options=_pairs("--option", option),
            max_length=max_length,
            store_options=StoreOptions(layout=layout, codec=codec),
            storage_options=storage_options(storage_option),
            progress=tell,
        )
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    episodes = "" if report.episodes is None else f", {report.episodes:,} episodes"
    dropped = f"; left out {', '.join(report.dropped)}" if report.dropped else ""
    gaps = f"; ids were missing in {report.gaps:,} places" if report.gaps else ""
    print(
        f"{report.store}: {report.rows:,} rows{episodes}, ids [{report.first_id}, {report.next_id}) "
        f"in {report.seconds:.1f} s{gaps}{dropped}"
    )


def _column_map(given: dict[str, Any], storage_option: Sequence[str] | None) -> Any:
    """What the options say on top of the mapping file."""
    from diskbuf.exchange.mapping import ColumnMap

    mapping = ColumnMap() if given["--mapping"] is None else ColumnMap.from_file(given["--mapping"])
    changes: dict[str, Any] = {
        "leaves": {**mapping.leaves, **_words("--map", given["--map"])},
        "casts": {**mapping.casts, **_words("--cast", given["--cast"])},
        "bounds": {**mapping.bounds, **_bounds(given["--bounds"])},
        "drop": [*mapping.drop, *(given["--drop"] or [])],
    }
    for name in ("--only-mapped", "--trajectory", "--final-observation", "--id", "--lane"):
        if given[name]:
            changes[name.removeprefix("--").replace("-", "_")] = given[name]
    if given["--like"] is not None:
        del storage_option  # of the file that is imported
        with open_store(given["--like"]) as buffer:
            changes["spec"] = buffer.data_spec
    return dataclasses.replace(mapping, **changes)


def _export_log(
    store: str,
    destination: str,
    first_id: int | None,
    next_id: int | None,
    history: bool,
    as_json: bool,
    storage_option: Sequence[str] | None,
    destination_option: Sequence[str] | None,
) -> None:
    from diskbuf.bandits.logs import export_log

    with open_store(store, history=history, storage_option=storage_option) as buffer:
        rows = export_log(
            buffer,
            destination,
            first_id=first_id,
            next_id=next_id,
            storage_options=storage_options(destination_option),
        )
    if as_json:
        print_json({"destination": destination, "rows": rows})
    else:
        print(f"{destination}: {rows:,} rows")


def _import_log(
    source: str, store: str, given: dict[str, Any], as_json: bool, storage_option: Sequence[str] | None
) -> None:
    from diskbuf.bandits.logs import LogColumns, import_log

    roles = ("context", "action", "reward", "propensity", "timestamp", "key", "position")
    columns = {role: given[f"--{role}"] for role in roles if f"--{role}" in given}
    settings = {name: given[f"--{name}"] for name in ("order", "invalid", "pending", "append") if f"--{name}" in given}
    report = import_log(
        source,
        store,
        LogColumns(**columns) if columns else None,
        format=given.get("--file-format"),
        strict="--lenient" not in given,
        num_actions=given.get("--num-actions"),
        storage_options=storage_options(storage_option),
        **settings,
    )
    print(report.to_json() if as_json else report)


def _refuse(what: str, given: dict[str, Any], *, advice: str = "Leave out one or the other.") -> None:
    words = [name for name, value in given.items() if value]
    if words:
        raise OptionError(f"{what} must be without {', '.join(words)}. {advice}")


def _check_format(name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        advice = " That one is only read." if name in READ else ""
        raise OptionError(f"--format must be one of {', '.join(known)}, {_LOG}, got {name!r}.{advice}")


@contextlib.contextmanager
def _in_words() -> Iterator[None]:
    """Tells what the package refuses in the words of the command line."""
    try:
        yield
    except DiskbufError as error:
        error.args = (_worded(str(error)), *error.args[1:])
        raise


def _worded(message: str) -> str:
    for said, meant in _WORDS.items():
        message = message.replace(said, meant)
    return message


def _bounds(words: Sequence[str] | None) -> dict[str, tuple[int | float, int | float]]:
    """Reads words LEAF=LOW:HIGH; whole numbers stay ints, of any size."""
    found = {}
    for leaf, word in _words("--bounds", words).items():
        low, _, high = word.partition(":")
        try:
            found[leaf] = _number(low), _number(high)
        except ValueError:
            raise OptionError(
                f"--bounds must be LEAF=LOW:HIGH, got {leaf}={word}. Write it like --bounds action=0:3."
            ) from None
    return found


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


def _words(flag: str, words: Sequence[str] | None) -> dict[str, str]:
    """Reads words NAME=TEXT; the name may be empty, for a spec that is a single leaf."""
    found = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise OptionError(f"{flag} must be NAME=TEXT, got {word!r}. Write it like {flag} reward=r.")
        if name in found:
            raise OptionError(f"{flag} must give each name once, got {name!r} again.")
        found[name] = value
    return found


def _pairs(flag: str, words: Sequence[str] | None) -> dict[str, Any]:
    """Reads words KEY=VALUE; values that are JSON are what they say, others are text."""
    found: dict[str, Any] = {}
    for key, value in _words(flag, words).items():
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


VERBS = (export, import_)
