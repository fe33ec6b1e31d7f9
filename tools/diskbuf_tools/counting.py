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

    from diskbuf.inspection import EpisodeSummary
    from diskbuf.statistics import ColumnStatistics, Statistics

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
    from diskbuf.statistics import column_statistics, save_statistics, saved_statistics

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
    if wanted == "json":
        print_json(_as_json(found))
    elif wanted == "csv":
        _print_csv(found)
    else:
        _print_table(found)


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
    from diskbuf.errors import OptionError
    from diskbuf.inspection import chosen_episodes, summarize_episodes

    wanted = form(as_json=as_json, as_csv=as_csv)
    with open_store(store, history=history, storage_option=storage_option) as buffer:
        table = diskbuf.episodes(buffer, ends=ends, reward=reward)
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
        _print_summary(summarize_episodes(table), as_json=wanted == "json")
        return
    if sort is not None or reverse:
        table = table.sort_by([(sort or "first_id", "descending" if reverse else "ascending")])
    _print_episodes(table, count, wanted)


# ---- how they are shown


def _as_json(found: "Statistics") -> dict[str, Any]:
    columns = []
    for column in found.columns:
        facts = dataclasses.asdict(column)
        facts["quantiles"] = None if column.quantiles is None else {str(q): value for q, value in column.quantiles}
        columns.append(facts)
    return dataclasses.asdict(found) | {"columns": columns}


_SCALARS = ("path", "dtype", "count", "nan_count", "infinity_count", "minimum", "maximum", "mean", "std")


def _print_csv(found: "Statistics") -> None:
    from diskbuf.statistics import QUANTILES

    names = [*_SCALARS, *(f"q{100 * q:.0f}" for q in QUANTILES), "distinct_count", "is_exact"]
    rows = []
    for column in found.columns:
        quantiles = {f"q{100 * q:.0f}": value for q, value in column.quantiles or ()}
        rows.append({name: getattr(column, name, None) for name in names} | quantiles)
    print_rows(rows, names, form="csv")


def _print_table(found: "Statistics") -> None:
    from diskbuf.statistics import QUANTILES

    quantiles = [f"{100 * q:.0f} %" for q in QUANTILES]
    names = ["column", "count", "min", "max", "mean", "std", *quantiles, "distinct", "histogram"]
    odd = [name for name in ("nan_count", "infinity_count") if any(getattr(column, name) for column in found.columns)]
    titles = {"nan_count": "NaN", "infinity_count": "inf"}
    names[2:2] = [titles[name] for name in odd]
    rows = []
    for column in found.columns:
        row = {
            "column": column.path or "(array)",
            "count": column.count,
            "min": column.minimum,
            "max": column.maximum,
            "mean": column.mean,
            "std": column.std,
            "distinct": column.distinct_count,
            "histogram": bars(column.bins or ()),
        }
        row |= {titles[name]: getattr(column, name) for name in odd}
        rows.append(row | {title: value for title, (_, value) in zip(quantiles, column.quantiles or (), strict=False)})
    saved = ", as saved" if found.is_saved else ""
    print(f"ids [{found.first_id}, {found.next_id}), {found.lanes:,} lanes{saved}")
    print_rows(rows, names, form="table")
    for column in found.columns:
        if column.distinct is not None and len(column.distinct) > 1:
            print(f"{column.path or '(array)'}: {_distinct_text(column)}")
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


def _print_summary(found: "EpisodeSummary", *, as_json: bool) -> None:
    if as_json:
        print_json(dataclasses.asdict(found))
        return
    pairs = [
        ("episodes", f"{found.count:,}, {found.whole:,} of them whole, {found.steps:,} steps"),
        ("ends", ", ".join(f"{end} {count:,}" for end, count in found.ends.items())),
    ]
    for name, spread in (("return", found.returns), ("length", found.length)):
        if spread is not None and spread.minimum is not None:
            values = f"mean {text(spread.mean)}, std {text(spread.std)}, "
            pairs.append((name, values + f"from {text(spread.minimum)} to {text(spread.maximum)}"))
    print_facts(pairs)


def _print_episodes(table: "pa.Table", count: int | None, wanted: Any) -> None:
    limit = _SHOWN_EPISODES if count is None and wanted == "table" else count
    shown = table if limit is None else table.slice(0, limit)
    plain = {"lane": str, "first_id": str, "last_id": str}
    print_rows(_rows(shown), shown.column_names, form=wanted, formats=plain)
    if wanted == "table" and len(shown) < len(table):
        print(f"{len(shown):,} of {len(table):,} episodes; -n COUNT for more, --summary for all of them in a few lines")


def _rows(table: "pa.Table") -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(max_chunksize=10_000):
        yield from batch.to_pylist()


VERBS = (stats, episodes)
