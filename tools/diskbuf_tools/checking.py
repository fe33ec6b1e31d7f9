"""Verbs that tell whether a store is whole, and mend it: verify, repair."""

import dataclasses
from typing import Annotated

import typer

from diskbuf_tools.arguments import DryRun, Json, LocalStore
from diskbuf_tools.output import print_json

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


VERBS = (verify, repair)
