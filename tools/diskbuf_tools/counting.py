"""Verbs that sum up what a store holds: stats, episodes."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diskbuf_tools.arguments import ColumnPaths, Csv, History, Json, StorageOptions, Store
from diskbuf_tools.output import form, print_facts, print_json, print_rows, progress, text
from diskbuf_tools.stores import chosen_paths, open_store, unknown

if TYPE_CHECKING:
    import pyarrow as pa

    from diskbuf import DiskbufError, SpecError, UniformReplayBuffer
    from diskbuf.inspection import EpisodeSummary
    from diskbuf.statistics import ColumnStatistics, Statistics
    from diskbuf_tools.output import Form

PANEL = "Look"

_SHOWN_EPISODES = 20
_BLOCKS = " ▁▂▃▄▅▆▇█"
_SHOWN_DISTINCT = 8


def stats(
    store: Store,
    column: ColumnPaths = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Quantiles and histograms of all values, by more passes.")
    ] = False,
    sample_size: Annotated[int, typer.Option(min=1, help="Values that these are made of otherwise.")] = 100_000,
    seed: Annotated[int, typer.Option(min=0, help="Makes the sample repeatable.")] = 0,
    save: Annotated[bool, typer.Option("--save", help="Keep the result in the store until its window moves.")] = False,
    history: History = False,
    as_json: Json = False,
    as_csv: Csv = False,
    storage_option: StorageOptions = None,
) -> None:
    """Say what the values of columns are like: range, mean, quantiles, NaN, distinct values.

    Example: diskbuf stats -c reward -c 'policy_info/*' cartpole.zarr
    """
    from diskbuf.statistics import column_statistics, count_boundaries, save_statistics, saved_statistics

    wanted = form(as_json=as_json, as_csv=as_csv)
    with open_store(store, history=history, storage_option=storage_option) as buffer:
        columns = chosen_paths(buffer, column)
        found = saved_statistics(buffer, columns, exact=exact, sample_size=sample_size, seed=seed)
        if found is None:
            with progress("stats") as tell:
                found = column_statistics(
                    buffer, columns, exact=exact, sample_size=sample_size, seed=seed, progress=tell
                )
            if save and not save_statistics(buffer, found, exact=exact, sample_size=sample_size, seed=seed):
                print("diskbuf: not saved, because the window has moved since.", file=sys.stderr)
        boundaries = None
        if wanted != "csv":
            boundaries = count_boundaries(buffer, columns, first_id=found.first_id, next_id=found.next_id)
    if wanted == "json":
        print_json(_as_json(found) | {"boundaries": boundaries})
    elif wanted == "csv":
        _print_csv(found)
    else:
        _print_table(found, boundaries)


def episodes(
    store: Store,
    count: Annotated[
        int | None, typer.Option("-n", metavar="COUNT", min=0, help="At most so many.", show_default="20 in a table")
    ] = None,
    sort: Annotated[str | None, typer.Option(metavar="COLUMN", help="Sort by it.", show_default="first_id")] = None,
    reverse: Annotated[bool, typer.Option("--reverse", help="Greatest first.")] = False,
    lane: Annotated[int | None, typer.Option(help="Only this lane.", show_default="all")] = None,
    end: Annotated[str | None, typer.Option(help="Only those that are terminated, truncated, open or broken.")] = None,
    min_return: Annotated[float | None, typer.Option(help="Least return.")] = None,
    max_return: Annotated[float | None, typer.Option(help="Greatest return.")] = None,
    min_length: Annotated[int | None, typer.Option(help="Least length.")] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Only those whose first step is there.")] = False,
    summary: Annotated[
        bool, typer.Option("--summary", help="Only how many there are, and what they are like.")
    ] = False,
    ends: Annotated[
        str | None, typer.Option(metavar="LEAF", help="Bool leaf that is true at the last step, such as done.")
    ] = None,
    reward: Annotated[str | None, typer.Option(metavar="LEAF", help="Leaf to sum up to returns.")] = None,
    history: History = False,
    as_json: Json = False,
    as_csv: Csv = False,
    storage_option: StorageOptions = None,
) -> None:
    """List the episodes of a store, or sum them up.

    Example: diskbuf episodes --sort return --reverse -n 5 cartpole.zarr
    """
    import diskbuf
    from diskbuf.errors import OptionError, SpecError
    from diskbuf.inspection import check_lane, chosen_episodes, numbered_episodes, summarize_episodes

    wanted = form(as_json=as_json, as_csv=as_csv)
    with open_store(store, history=history, storage_option=storage_option) as buffer:
        if lane is not None:
            check_lane(buffer, lane)
        try:
            table = numbered_episodes(diskbuf.episodes(buffer, ends=ends, reward=reward))
        except SpecError as error:
            raise _in_options(error, buffer, ends, reward) from error
    if sort is not None and sort not in table.column_names:
        raise OptionError(unknown("--sort", sort, table.column_names))
    table = chosen_episodes(
        table,
        lane=lane,
        end=end,
        min_return=min_return,
        max_return=max_return,
        min_length=min_length,
        only_whole=whole,
    )
    if summary:
        _print_summary(summarize_episodes(table), wanted)
        return
    if sort is not None or reverse:
        table = table.sort_by([(sort or "first_id", "descending" if reverse else "ascending")])
    _print_episodes(table, count, wanted)


def _in_options(
    error: "SpecError", buffer: "UniformReplayBuffer", ends: str | None, reward: str | None
) -> "DiskbufError":
    """What is wrong with the spec, or with the options that name leaves of it, in the words of the command line."""
    from diskbuf.errors import OptionError, SpecError
    from diskbuf_tools.gathered import roles_of

    try:
        roles = roles_of(buffer, ends=ends, reward=reward)
    except OptionError as refusal:
        return refusal
    if roles.rule is not None:
        return error
    return SpecError(f"episodes must be told apart, but {roles.why_no_episodes}. Name a bool leaf with --ends.")


# ---- how they are shown

# What a column's numbers are called, in tables and for programs alike.
_NAMES = {
    "column": "path",
    "dtype": "dtype",
    "count": "count",
    "nan": "nan_count",
    "inf": "infinity_count",
    "min": "minimum",
    "max": "maximum",
    "mean": "mean",
    "std": "std",
}


def _quantiles(column: "ColumnStatistics") -> dict[str, float]:
    return {f"q{round(100 * q):02}": value for q, value in column.quantiles or ()}


def _as_json(found: "Statistics") -> dict[str, Any]:
    columns = []
    for column in found.columns:
        rest = dataclasses.asdict(column)
        facts: dict[str, Any] = {name: rest.pop(attribute) for name, attribute in _NAMES.items()}
        quantiles = None if rest.pop("quantiles") is None else _quantiles(column)
        columns.append(facts | {"quantiles": quantiles} | rest)
    return dataclasses.asdict(found) | {"columns": columns}


def _table_row(column: "ColumnStatistics") -> dict[str, Any]:
    return {name: getattr(column, attribute) for name, attribute in _NAMES.items()} | _quantiles(column)


def _quantile_names() -> list[str]:
    from diskbuf.statistics import QUANTILES

    return [f"q{round(100 * q):02}" for q in QUANTILES]


def _print_csv(found: "Statistics") -> None:
    names = [*_NAMES, *_quantile_names(), "distinct", "is_exact"]
    more = [{"distinct": column.distinct_count, "is_exact": column.is_exact} for column in found.columns]
    print_rows([_table_row(column) | own for column, own in zip(found.columns, more, strict=True)], names, form="csv")


def _print_table(found: "Statistics", boundaries: int | None) -> None:
    quantiles = _quantile_names()
    names = ["column", "count", "min", "max", "mean", "std", *quantiles, "distinct", "histogram"]
    rows = []
    for column in found.columns:
        more = {
            "column": column.path or "(array)",
            "distinct": column.distinct_count,
            "histogram": bars(column.bins or ()),
        }
        rows.append(_table_row(column) | more)
    names[2:2] = [name for name in ("nan", "inf") if any(row[name] for row in rows)]
    saved = ", as saved" if found.is_saved else ""
    print(f"ids [{found.first_id}, {found.next_id}), {found.lanes:,} lane{'s' if found.lanes != 1 else ''}{saved}")
    # The outer quantiles go before the inner ones.
    outward = sorted(quantiles, key=lambda name: (-abs(quantiles.index(name) - len(quantiles) // 2), name))
    print_rows(
        rows, names, form="table", first_to_go=("histogram", *outward, "std"), elsewhere="--json and --csv have all"
    )
    for column in found.columns:
        if column.distinct is not None and len(column.distinct) > 1:
            print(f"{column.path or '(array)'}: {_distinct_text(column)}")
    if boundaries:
        rows_in_all = (found.next_id - found.first_id) * found.lanes
        print(
            f"{boundaries:,} of the {rows_in_all:,} steps are boundaries between episodes, which only hold a final "
            "observation: their actions, rewards and discounts mean nothing, but are counted above"
        )
    sampled = [column.path or "(array)" for column in found.columns if not column.is_exact]
    if sampled:
        of_what = "Quantiles and histogram, of frames mean and std too,"
        print(f"{of_what} of a sample (--exact for all values): {', '.join(sampled)}")


def _distinct_text(column: "ColumnStatistics") -> str:
    from operator import itemgetter

    values = sorted(column.distinct or (), key=itemgetter(1), reverse=True)
    whole = sum(count for _, count in values)
    shown = [f"{text(value)} {100 * count / whole:.3g} %" for value, count in values[:_SHOWN_DISTINCT]]
    return ", ".join(shown) + (", …" if len(values) > _SHOWN_DISTINCT else "")


def bars(counts: Sequence[int]) -> str:
    """A histogram in a line of text; a bin that isn't empty has at least the lowest bar."""
    most = max(counts, default=0)
    steps = len(_BLOCKS) - 1
    return "".join(_BLOCKS[-(-count * steps // most)] if most else _BLOCKS[0] for count in counts)


def _print_summary(found: "EpisodeSummary", wanted: "Form") -> None:
    if wanted == "json":
        print_json(dataclasses.asdict(found))
        return
    spreads = {"return": found.returns, "length": found.length}
    if wanted == "csv":
        row: dict[str, Any] = {name: getattr(found, name) for name in ("count", "whole", "complete", "steps")}
        row |= {end: found.ends.get(end, 0) for end in ("terminated", "truncated", "open", "broken", "unknown")}
        for name, spread in spreads.items():
            for part in ("mean", "std", "minimum", "maximum"):
                value = None if spread is None or spread.minimum is None else getattr(spread, part)
                row[f"{name}_{part[:3] if part.endswith('imum') else part}"] = value
        print_rows([row], list(row), form=wanted)
        return
    pairs = [
        ("episodes", f"{found.count:,}, {found.whole:,} of them whole, {found.steps:,} steps"),
        ("ends", ", ".join(f"{end} {count:,}" for end, count in found.ends.items())),
    ]
    for name, spread in spreads.items():
        if spread is not None and spread.minimum is not None:
            values = f"mean {text(spread.mean)}, std {text(spread.std)}, "
            pairs.append((name, values + f"from {text(spread.minimum)} to {text(spread.maximum)}"))
    print_facts(pairs)
    if found.count:
        whose = f"of the {found.complete:,} that are whole and have ended" if found.complete else ""
        print(f"  return and length {whose or 'are not told: no episode is whole and has ended'}")


def _print_episodes(table: "pa.Table", count: int | None, wanted: "Form") -> None:
    limit = _SHOWN_EPISODES if count is None and wanted == "table" else count
    shown = table if limit is None else table.slice(0, limit)
    plain = {"episode": str, "lane": str, "first_id": str, "last_id": str}
    print_rows(_rows(shown), shown.column_names, form=wanted, formats=plain, elsewhere="--json has all")
    if wanted == "table" and not len(table):
        print("no episodes")
    elif wanted == "table" and len(shown) < len(table):
        print(f"{len(shown):,} of {len(table):,} episodes; -n COUNT for more, --summary for all of them in a few lines")


def _rows(table: "pa.Table") -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=10_000):
        yield from batch.to_pylist()


VERBS = (stats, episodes)
