"""Verbs that bring stores to another place or layout: copy, convert."""

import dataclasses
from typing import Annotated, Any, Literal

import typer

from diskbuf_tools.arguments import Json, StorageOptions, Store
from diskbuf_tools.output import bytes_text, print_json, progress
from diskbuf_tools.stores import storage_options

PANEL = "Move"

Destination = Annotated[str, typer.Argument(metavar="DESTINATION", help="Path or URL where there is nothing yet.")]
DestinationOptions = Annotated[
    list[str] | None,
    typer.Option("--destination-option", metavar="KEY=VALUE", help="As --storage-option, for the destination; again."),
]


def copy(
    store: Store,
    destination: Destination,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Don't read back what was written.")] = False,
    as_json: Json = False,
    storage_option: StorageOptions = None,
    destination_option: DestinationOptions = None,
) -> None:
    """Copy a store as it is, with its ids, runs and history; a copy that was interrupted goes on.

    Example: diskbuf copy cartpole.zarr s3://bucket/cartpole.zarr
    """
    _copy(store, destination, {}, no_verify, as_json, storage_option, destination_option)


def convert(
    store: Store,
    destination: Destination,
    codec: Annotated[
        str | None, typer.Option(help="zstd, blosc or lz4; none for no compression; left out, the store's.")
    ] = None,
    layout: Annotated[Literal["zarr", "arrow"] | None, typer.Option(help="Left out, the store's.")] = None,
    level: Annotated[int | None, typer.Option(help="How hard the codec tries.")] = None,
    chunk_bytes: Annotated[int | None, typer.Option(help="Largest size of a chunk.")] = None,
    inner_rows: Annotated[int | None, typer.Option(help="Steps that are compressed together in a chunk.")] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Don't read back what was written.")] = False,
    as_json: Json = False,
    storage_option: StorageOptions = None,
    destination_option: DestinationOptions = None,
) -> None:
    """Copy a store into another layout or codec.

    Example: diskbuf convert pong.zarr pong-small.zarr --codec zstd --level 9
    """
    from diskbuf.errors import OptionError

    asked: dict[str, Any] = {"level": level, "chunk_bytes": chunk_bytes, "inner_rows": inner_rows}
    if codec is not None:
        asked["codec"] = None if codec == "none" else codec
    if layout is not None:
        asked["layout"] = layout
    if all(value is None for value in (codec, layout, chunk_bytes)):
        raise OptionError(
            "convert must be told --codec, --layout or --chunk-bytes. To copy as it is, use diskbuf copy."
        )
    _copy(store, destination, asked, no_verify, as_json, storage_option, destination_option)


def _copy(
    store: str,
    destination: str,
    asked: dict[str, Any],
    no_verify: bool,
    as_json: bool,
    storage_option: list[str] | None,
    destination_option: list[str] | None,
) -> None:
    import diskbuf

    with progress("copy") as tell:
        report = diskbuf.copy(
            store,
            destination,
            **asked,
            storage_options=storage_options(storage_option),
            destination_storage_options=storage_options(destination_option),
            verify=not no_verify,
            progress=tell,
        )
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    skipped = f", {report.skipped:,} were there" if report.skipped else ""
    print(
        f"{report.destination}: ids [{report.first_id}, {report.next_id}), {report.objects:,} objects{skipped}, "
        f"{bytes_text(report.bytes_written)} written in {report.seconds:.1f} s"
    )


VERBS = (copy, convert)
