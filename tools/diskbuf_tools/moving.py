"""Verbs that bring stores to another place or layout, or make others of them: copy, convert, merge, split."""

import dataclasses
from typing import Annotated, Any, Literal

import typer

from diskbuf_tools.arguments import History, Json, StorageOptions, Store
from diskbuf_tools.output import bytes_text, print_json, progress
from diskbuf_tools.stores import storage_options

PANEL = "Move"

_CODECS = ("zstd", "blosc", "lz4", "none")
Destination = Annotated[str, typer.Argument(metavar="DESTINATION", help="Path or URL where there is nothing yet.")]
DestinationOptions = Annotated[
    list[str] | None,
    typer.Option("--destination-option", metavar="KEY=VALUE", help="As --storage-option, for the destination; again."),
]

Codec = Annotated[str | None, typer.Option(help="zstd, blosc or lz4; none for no compression; left out, the store's.")]
LayoutName = Annotated[Literal["zarr", "arrow"] | None, typer.Option("--layout", help="Left out, the store's.")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Don't read back what was written.")]


def copy(
    store: Store,
    destination: Destination,
    no_verify: NoVerify = False,
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
    codec: Codec = None,
    layout: LayoutName = None,
    level: Annotated[int | None, typer.Option(help="How hard the codec tries.")] = None,
    chunk_bytes: Annotated[int | None, typer.Option(help="Largest size of a chunk.")] = None,
    inner_rows: Annotated[int | None, typer.Option(help="Steps that are compressed together in a chunk.")] = None,
    no_verify: NoVerify = False,
    as_json: Json = False,
    storage_option: StorageOptions = None,
    destination_option: DestinationOptions = None,
) -> None:
    """Copy a store into another layout or codec.

    Example: diskbuf convert pong.zarr pong-small.zarr --codec zstd --level 9
    """
    from diskbuf.errors import OptionError

    asked = _laid_out(codec, layout) | {"level": level, "chunk_bytes": chunk_bytes, "inner_rows": inner_rows}
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
    skipped = f" ({report.skipped:,} were there)" if report.skipped else ""
    print(
        f"{report.destination}: ids [{report.first_id}, {report.next_id}), chunks: {report.objects:,}{skipped}, "
        f"{_written(report.bytes_written, report.seconds)}"
    )


def merge(
    stores: Annotated[list[str], typer.Argument(metavar="STORE...", help="Paths or URLs of stores.")],
    into: Annotated[str, typer.Option("--into", metavar="DESTINATION", help="Path or URL where there is nothing yet.")],
    one_lane: Annotated[
        bool, typer.Option("--one-lane", help="Put lanes one after another; takes stores of different lanes.")
    ] = False,
    history: History = False,
    codec: Codec = None,
    layout: LayoutName = None,
    no_verify: NoVerify = False,
    as_json: Json = False,
    storage_option: StorageOptions = None,
    destination_option: DestinationOptions = None,
) -> None:
    """Make one store of several with equal specs, one after another; runs stay apart.

    Example: diskbuf merge monday.zarr tuesday.zarr --into week.zarr
    """
    import diskbuf

    with progress("merge") as tell:
        report = diskbuf.merge(
            stores,
            into,
            lanes=1 if one_lane else "keep",
            history=history,
            **_laid_out(codec, layout),
            storage_options=storage_options(storage_option),
            destination_storage_options=storage_options(destination_option),
            verify=not no_verify,
            progress=tell,
        )
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    for source in report.sources:
        print(f"{source.path}: ids [{source.first_id}, {source.next_id}) are [{source.begins_at}, {source.ends_at})")
    steps = f"{report.next_id:,} steps a lane, lanes: {report.batch_size:,}"
    print(f"{report.destination}: {steps}, {_written(report.bytes_written, report.seconds)}")


def split(
    store: Store,
    into: Annotated[
        list[str],
        typer.Option(
            "--into",
            metavar="DESTINATION=PART",
            help="A new store and what it gets: 0.8 of all, ids:LOW:HIGH, run:N, or episodes:LOW:HIGH; again.",
        ),
    ],
    by: Annotated[
        Literal["episodes", "steps"], typer.Option(help="What fractions are of: whole episodes, or ranges of ids.")
    ] = "episodes",
    seed: Annotated[int | None, typer.Option(help="Deal episodes out at random, the same for the same seed.")] = None,
    ends: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Bool leaf that ends episodes, where there are no step types.")
    ] = None,
    history: History = False,
    codec: Codec = None,
    layout: LayoutName = None,
    no_verify: NoVerify = False,
    as_json: Json = False,
    storage_option: StorageOptions = None,
    destination_option: DestinationOptions = None,
) -> None:
    """Make stores of parts of one: by episodes, fractions, ids or runs.

    Episodes go one behind the other into a store of one lane; parts of ids and runs keep lanes and ids.

    Example: diskbuf split all.zarr --into train.zarr=0.8 --into test.zarr=0.2 --seed 1
    """
    import diskbuf
    from diskbuf.splitting import parse_part

    parts = {}
    for word in into:
        destination, equals, part = word.rpartition("=")
        if not equals or not destination or destination in parts:
            raise diskbuf.OptionError(
                f"--into must be DESTINATION=PART, each place once, got {word!r}. Say train.zarr=0.8."
            )
        parts[destination] = parse_part(part)
    with progress("split") as tell:
        report = diskbuf.split(
            store,
            parts,
            by=by,
            seed=seed,
            ends=ends,
            history=history,
            **_laid_out(codec, layout),
            storage_options=storage_options(storage_option),
            destination_storage_options=storage_options(destination_option),
            verify=not no_verify,
            progress=tell,
        )
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    for one in report.parts:
        episodes = "" if one.episodes is None else f"{one.episodes:,} episodes, "
        print(
            f"{one.destination}: {episodes}ids [{one.first_id}, {one.next_id}), lanes: {one.batch_size:,}, "
            f"{bytes_text(one.bytes_written)} written"
        )


def _laid_out(codec: str | None, layout: str | None) -> dict[str, Any]:
    """The arguments for the layout that was asked for."""
    from diskbuf.errors import OptionError

    asked: dict[str, Any] = {}
    if codec is not None:
        if codec not in _CODECS:
            raise OptionError(
                f"--codec must be one of {', '.join(_CODECS)}, got {codec!r}. Left out, it is the store's."
            )
        asked["codec"] = None if codec == "none" else codec
    if layout is not None:
        asked["layout"] = layout
    return asked


def _written(count: int, seconds: float) -> str:
    return f"{bytes_text(count)} written in {seconds:.1f} s"


VERBS = (copy, convert, merge, split)
