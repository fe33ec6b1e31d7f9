"""Verbs that change a store where it is: trim, compact, upgrade, delete."""

import dataclasses
from typing import Annotated

import typer

from diskbuf_tools.arguments import DryRun, Json, LocalStore, StorageOptions, Store, Yes
from diskbuf_tools.output import bytes_text, confirm, print_json
from diskbuf_tools.stores import storage_options

PANEL = "Tidy"


def trim(
    store: LocalStore,
    before: Annotated[int | None, typer.Option(metavar="ID", help="Let steps with ids below this one go.")] = None,
    keep: Annotated[int | None, typer.Option("--keep", "-n", help="Let all but the newest so many steps go.")] = None,
    drop_history: Annotated[
        bool, typer.Option("--drop-history", help="Also remove what isn't in the window from the disk.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Let the oldest steps of a store go, for good.

    Example: diskbuf trim cartpole.zarr --keep 100000
    """
    from diskbuf import upkeep
    from diskbuf.errors import OptionError

    if (before is not None) + (keep is not None) > 1 or (before is None and keep is None and not drop_history):
        raise OptionError("trim must be told one of --before ID and --keep COUNT, or --drop-history. Say what goes.")
    dry = upkeep.trim(store, first_id=before, keep=keep, drop_history=drop_history, dry_run=True)
    if not dry_run and (dry.removed or drop_history):
        of_history = ", and all history with them" if drop_history else ""
        confirm(f"Let {dry.removed:,} steps of each lane of {dry.path} go{of_history}?", is_confirmed=yes)
    # the id that was agreed to: with --keep the window may have moved since
    report = dry
    if not dry_run:
        report = upkeep.trim(store, first_id=dry.first_id, drop_history=drop_history)
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    freed = "" if report.freed_bytes is None else f", {bytes_text(report.freed_bytes)} freed"
    print(
        f"{report.path}: {report.removed:,} steps of each lane {_verb(dry_run, 'went', 'would go')}, ids "
        f"[{report.first_id}, {report.next_id}) {_verb(dry_run, 'stay', 'would stay')}{freed}"
    )


def compact(store: LocalStore, dry_run: DryRun = False, yes: Yes = False, as_json: Json = False) -> None:
    """Free the space of files that hold no step: chunks that wait, leftovers of kills, the quarantine.

    Example: diskbuf compact --dry-run cartpole.zarr
    """
    from diskbuf import upkeep

    report = upkeep.compact(store, dry_run=True)
    if report.files and not dry_run:
        confirm(
            f"Remove {len(report.files):,} files of {report.path} that hold no step, and its quarantine?",
            is_confirmed=yes,
        )
    if not dry_run:
        report = upkeep.compact(store)
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    for name in report.files:
        print(f"{_verb(dry_run, 'removed', 'would remove')} {name}")
    print(
        f"{report.path}: {len(report.files):,} files, {bytes_text(report.freed_bytes)} "
        f"{_verb(dry_run, 'freed', 'would be freed')}"
    )


def upgrade(store: LocalStore, as_json: Json = False) -> None:
    """Bring what an older version wrote to what this one writes; rows and format stay.

    Example: diskbuf upgrade old.zarr
    """
    from diskbuf import upkeep

    report = upkeep.upgrade(store)
    if as_json:
        print_json(dataclasses.asdict(report))
    elif report.is_changed:
        print(f"{report.path}: format {report.format}, brought up to date from diskbuf {report.package_version}")
    else:
        print(f"{report.path}: format {report.format}, up to date")


def delete(
    store: Store,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Delete a store, and nothing else.

    Example: diskbuf delete --dry-run old.zarr
    """
    from diskbuf import upkeep

    options = storage_options(storage_option)
    report = upkeep.delete(store, storage_options=options, dry_run=True)
    if not dry_run:
        confirm(
            f"Delete {report.path} with {report.steps:,} steps of each lane ({bytes_text(report.bytes)})?",
            is_confirmed=yes,
        )
        report = upkeep.delete(store, storage_options=options)
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        print(
            f"{report.path}: {report.files:,} files, {bytes_text(report.bytes)} "
            f"{_verb(dry_run, 'deleted', 'would be deleted')}"
        )


def _verb(is_dry_run: bool, done: str, would: str) -> str:
    return would if is_dry_run else done


VERBS = (trim, compact, upgrade, delete)
