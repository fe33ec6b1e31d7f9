"""Arguments and options that several verbs share, so that they are called and explained alike everywhere."""

from typing import Annotated

import typer

Store = Annotated[str, typer.Argument(metavar="STORE", help="Path or URL of a store.", show_default=False)]
LocalStore = Annotated[str, typer.Argument(metavar="STORE", help="Path of a store on this machine.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print CSV with a header line.")]
ColumnPaths = Annotated[
    list[str] | None,
    typer.Option(
        "--column", "-c", metavar="COLUMN", help="Leaf to show, such as observation/camera or 'policy_info/*'; again."
    ),
]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option", metavar="KEY=VALUE", help="For the file system of a URL, such as anon=true; again."
    ),
]
History = Annotated[
    bool, typer.Option("--history", help="From the oldest step on disk, where the store keeps history.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
