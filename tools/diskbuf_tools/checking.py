"""Verbs that tell whether a store is whole, mend it, and compare it with another: verify, repair, diff, checksum."""

import dataclasses
from typing import Annotated

import typer

from diskbuf_tools.arguments import ColumnPaths, DryRun, History, Json, LocalStore, StorageOptions, Store
from diskbuf_tools.output import print_json, progress, text
from diskbuf_tools.stores import chosen_paths, open_store, storage_options

PANEL = "Check"


def verify(
    store: LocalStore,
    values: Annotated[
        bool, typer.Option("--values", help="Also check every step against the bounds and step types of its spec.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Check that every file of a store is whole; exit code 1 when one isn't.

    Example: diskbuf verify --values cartpole.zarr
    """
    import diskbuf

    report = diskbuf.verify(store, values=values)
    if as_json:
        print_json(dataclasses.asdict(report) | {"is_clean": report.is_clean})
    else:
        for fault in report.faults:
            print(fault.message)
        state = "clean" if report.is_clean else f"faults: {len(report.faults)}"
        files = f"ids [{report.first_id}, {report.next_id}) in {report.chunks:,} chunk files"
        of_values = f", values of {report.steps:,} ids" if values else ""
        print(f"{report.path}: {state}, {files}{of_values}")
    return 0 if report.is_clean else 1


def repair(
    store: LocalStore,
    dry_run: DryRun = False,
    no_lock: Annotated[bool, typer.Option("--no-lock", help="For file systems that don't lock files.")] = False,
    as_json: Json = False,
) -> int:
    """Bring a damaged store to its longest consistent state; what is taken out goes to .diskbuf/quarantine.

    Example: diskbuf repair --dry-run cartpole.zarr
    """
    import diskbuf

    report = diskbuf.repair(store, dry_run, lock=not no_lock)
    if as_json:
        print_json(dataclasses.asdict(report))
        return 0
    verb = "would stay" if report.is_dry_run else "stay"
    for action in report.actions:
        print(f"would {action}" if report.is_dry_run else action)
    if not report.actions:
        print(f"{report.path}: clean, nothing to do")
    else:
        ids = f"ids [{report.first_id}, {report.next_id})"
        print(f"{report.path}: {ids} {verb}, {report.lost:,} steps a lane are lost")
    return 0


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="Path or URL of a store.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="B", help="Path or URL of another.", show_default=False)],
    column: ColumnPaths = None,
    history: History = False,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> int:
    """Tell in what two stores differ, whatever their layouts; exit code 1 when they do.

    Example: diskbuf diff cartpole.zarr copy.zarr
    """
    from diskbuf import comparing

    with progress("diff") as tell:
        report = comparing.diff(
            first,
            second,
            columns=_columns(first, column, storage_option),
            history=history,
            storage_options=storage_options(storage_option),
            progress=tell,
        )
    if as_json:
        print_json(dataclasses.asdict(report) | {"is_equal": report.is_equal})
        return 0 if report.is_equal else 1
    for line in (*report.settings, *report.spec):
        print(line)
    for one in report.rows:
        place = f"id {one.step_id}, lane {one.lane}" + (f", at {list(one.index)}" if one.index else "")
        values = f"{text(one.first)}, not {text(one.second)}"
        print(f"{one.column or '(array)'}: {values}, at {place}; rows that differ: {one.rows:,}")
    low, high = report.compared
    ids = f"ids [{low}, {high}) compared" if low < high else "no rows compared"
    print(f"{'equal' if report.is_equal else 'different'}, {ids}")
    return 0 if report.is_equal else 1


def checksum(
    store: Store,
    column: ColumnPaths = None,
    history: History = False,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Print a SHA-256 of a store's rows, the same for copies in every layout.

    Example: diskbuf checksum cartpole.zarr
    """
    from diskbuf import comparing

    with progress("checksum") as tell:
        report = comparing.checksum(
            store,
            columns=_columns(store, column, storage_option),
            history=history,
            storage_options=storage_options(storage_option),
            progress=tell,
        )
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        print(f"{report.digest}  {store}")


def _columns(store: str, wanted: list[str] | None, options: list[str] | None) -> list[str] | None:
    """The leaves that patterns stand for."""
    if not wanted:
        return None
    with open_store(store, storage_option=options) as buffer:
        return chosen_paths(buffer, wanted)


VERBS = (verify, repair, diff, checksum)
