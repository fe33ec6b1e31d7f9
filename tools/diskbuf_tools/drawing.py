"""Verbs that draw what a store holds: plot, report, video."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diskbuf_tools.arguments import ColumnPaths, History, Json, StorageOptions, Store
from diskbuf_tools.output import bytes_text, print_json, progress
from diskbuf_tools.stores import chosen_paths, open_store, storage_options

if TYPE_CHECKING:
    from diskbuf import UniformReplayBuffer
    from diskbuf_tools.gathered import Gathered, Kind, Roles

PANEL = "Draw"

Kinds = Annotated[
    list[str] | None,
    typer.Option(
        "--kind",
        "-k",
        metavar="KIND",
        help="returns, lengths, actions, rewards, columns or throughput; again.",
        show_default="all that the spec allows",
    ),
]
Ends = Annotated[
    str | None,
    typer.Option(metavar="COLUMN", help="The bool that is True at the last step of an episode.", show_default=False),
]
Reward = Annotated[str | None, typer.Option(metavar="COLUMN", help="What returns are sums of.", show_default="reward")]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace an output that is there.")]


def plot(
    store: Store,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="A .png or .svg.")],
    kind: Kinds = None,
    column: ColumnPaths = None,
    ends: Ends = None,
    reward: Reward = None,
    history: History = False,
    force: Force = False,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Draw returns, lengths, actions, rewards, columns and throughput into one figure.

    Example: diskbuf plot cartpole.zarr -o cartpole.png -k returns -k lengths
    """
    from diskbuf_tools.new_files import checked_output, new_file
    from diskbuf_tools.pictures import require

    file = checked_output(output, (".png", ".svg"), force=force)
    require("matplotlib", verb="plot", extra="plot")
    from diskbuf_tools.figures import panels_of, save_grid
    from diskbuf_tools.gathered import checked_kinds, roles_of

    kinds = checked_kinds(["columns"] if column and not kind else kind)
    with open_store(store, history=history, storage_option=storage_option) as buffer:
        roles = roles_of(buffer, ends=ends, reward=reward)
        gathered = _gather(buffer, roles, kinds, column, ends, storage_option)
    panels = panels_of(gathered)
    with new_file(file, force=force) as written:
        save_grid(panels, written, format="svg" if file.suffix.lower() == ".svg" else "png", title=str(store))
    drawn = list(dict.fromkeys(panel.kind for panel in panels))
    _tell(file, ", ".join(drawn), gathered.notes, {"kinds": drawn}, as_json=as_json)


def report(
    store: Store,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="An .html.")],
    episode: Annotated[
        list[str] | None,
        typer.Option(
            "--episode",
            metavar="EPISODE",
            help="Show frames of this one: LANE:ID, best, median, worst or last; again.",
            show_default="best, median and worst",
        ),
    ] = None,
    ends: Ends = None,
    reward: Reward = None,
    history: History = False,
    force: Force = False,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Make one HTML page of facts, figures and pictures, with nothing outside of the file.

    Example: diskbuf report pong.zarr -o pong.html --episode 0:1200
    """
    from diskbuf.inspection import inspect
    from diskbuf_tools.new_files import checked_output, new_file
    from diskbuf_tools.pictures import require

    file = checked_output(output, (".html", ".htm"), force=force)
    require("matplotlib", verb="report", extra="plot")
    from diskbuf_tools.gathered import chosen_episode, roles_of
    from diskbuf_tools.report_page import make_page, named_episodes

    options = storage_options(storage_option)
    with open_store(store, history=history, storage_option=storage_option) as buffer:
        roles = roles_of(buffer, ends=ends, reward=reward)
        chosen = [(word, chosen_episode(buffer, roles, word, ends=ends)) for word in episode or ()]
        gathered = _gather(buffer, roles, None, None, ends, storage_option)
        facts = inspect(buffer.path, storage_options=options, counts_episodes=False)
        page, notes = make_page(buffer, facts, roles, gathered, episodes=chosen or named_episodes(gathered))
    with new_file(file, force=force) as written:
        written.write_text(page, encoding="utf-8")
    _tell(file, f"{gathered.next_id - gathered.first_id:,} steps a lane", tuple(notes), {}, as_json=as_json)


def video(
    store: Store,
    episode: Annotated[
        str,
        typer.Argument(
            metavar="EPISODE",
            help="LANE:ID, the episode that this step is of; an id alone with --lane; best, median, worst or last.",
        ),
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="A .gif or .mp4.")],
    column: Annotated[
        str | None, typer.Option("--column", "-c", metavar="COLUMN", help="The pictures.", show_default="the only ones")
    ] = None,
    fps: Annotated[float, typer.Option(help="Frames a second.")] = 30.0,
    scale: Annotated[int, typer.Option(help="Each pixel becomes so many pixels high and wide.")] = 1,
    lane: Annotated[int | None, typer.Option(help="Of an id that is given alone.", show_default=False)] = None,
    ends: Ends = None,
    reward: Reward = None,
    history: History = False,
    force: Force = False,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Make a video of an episode, with its final observation where the store has that.

    Example: diskbuf video pong.zarr best -o best.mp4 --scale 4
    """
    from diskbuf_tools import moving_pictures
    from diskbuf_tools.gathered import chosen_episode, roles_of
    from diskbuf_tools.new_files import checked_output, new_file
    from diskbuf_tools.pictures import chosen_picture, episode_pixels, require

    file = checked_output(output, (".gif", ".mp4"), force=force)
    suffix = file.suffix.lower()
    require("PIL" if suffix == ".gif" else "imageio_ffmpeg", verb="video", extra="video")
    with open_store(store, history=history, storage_option=storage_option) as buffer:
        path = _one_path(buffer, column)
        roles = roles_of(buffer, ends=ends, reward=reward)
        leaf = chosen_picture(roles.leaves, path)
        moving_pictures.check(suffix, leaf.size, fps=fps, scale=scale)
        found = chosen_episode(buffer, roles, episode, lane=lane, ends=ends)
        with new_file(file, force=force) as written, progress("draw", unit="steps") as tell:
            pixels = episode_pixels(buffer, leaf, found, boundaries=roles.boundaries)
            frames = moving_pictures.write(
                moving_pictures.counted(pixels, tell, found.length), written, suffix, fps=fps, scale=scale
            )
    facts = {
        "lane": found.lane,
        "first_id": found.first_id,
        "last_id": found.last_id,
        "return": found.value,
        "frames": frames,
        "column": leaf.path,
    }
    what = f"lane {found.lane}, ids [{found.first_id}, {found.last_id + 1}), {frames:,} frames of {frames / fps:.1f} s"
    _tell(file, what, (), facts, as_json=as_json)


def _one_path(buffer: "UniformReplayBuffer", column: str | None) -> str | None:
    from diskbuf.errors import OptionError

    if column is None:
        return None
    paths = chosen_paths(buffer, [column])
    if len(paths) > 1:
        raise OptionError(f"--column must be one leaf, got {column!r} for {', '.join(map(repr, paths))}. Choose one.")
    return paths[0]


def _gather(
    buffer: "UniformReplayBuffer",
    roles: "Roles",
    kinds: "list[Kind] | None",
    column: list[str] | None,
    ends: str | None,
    storage_option: list[str] | None,
) -> "Gathered":
    from diskbuf.inspection import inspect
    from diskbuf_tools.gathered import gather

    columns = chosen_paths(buffer, column) if column else None
    options = storage_options(storage_option)
    runs = inspect(buffer.path, storage_options=options, counts_episodes=False).runs
    with progress("read", unit="steps") as tell:
        return gather(buffer, roles, kinds, columns=columns, ends=ends, runs=runs, tell=tell)


def _tell(file: Path, drawn: str, notes: "tuple[str, ...]", facts: dict[str, Any], *, as_json: bool) -> None:
    size = file.stat().st_size
    if as_json:
        print_json({"path": str(file), "bytes": size, **facts, "notes": list(notes)})
        return
    print(f"{file}: {drawn or 'nothing'}, {bytes_text(size)}")
    for note in notes:
        print(f"  left out: {note}")


VERBS = (plot, report, video)
