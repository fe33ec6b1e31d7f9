"""The verb that looks at a store while it is written: watch."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diskbuf_tools.arguments import StorageOptions, Store
from diskbuf_tools.output import bytes_text, console, print_json, text
from diskbuf_tools.stores import storage_options

if TYPE_CHECKING:
    from diskbuf.readers.watching import Sight

PANEL = "Look"

_SHOWN_RETURNS = 8


def watch(
    store: Store,
    interval: Annotated[float, typer.Option(metavar="SECONDS", min=0.01, help="Between two looks.")] = 1.0,
    count: Annotated[
        int | None, typer.Option("--count", min=1, metavar="COUNT", help="End after so many.", show_default="on Ctrl-C")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="There need be no store yet.")] = False,
    ends: Annotated[
        str | None, typer.Option(metavar="LEAF", help="Bool leaf that is true at an episode's last step.")
    ] = None,
    reward: Annotated[str | None, typer.Option(metavar="LEAF", help="Leaf to sum up to returns.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines, a document an update.")] = False,
    storage_option: StorageOptions = None,
) -> None:
    """Watch a store being written, until Ctrl-C; when piped, a line an update.

    Example: diskbuf watch --interval 5 cartpole.zarr
    """
    from diskbuf.errors import StoreNotFoundError
    from diskbuf.readers.watching import Watcher

    options = storage_options(storage_option)
    try:
        opened = Watcher(store, storage_options=options, waits=wait, ends=ends, reward=reward)
    except StoreNotFoundError as error:
        raise StoreNotFoundError(f"{error} Give --wait where it is yet to come.", path=error.path) from error
    with (
        contextlib.suppress(KeyboardInterrupt),  # how it is meant to end
        contextlib.closing(opened) as watcher,
        _printer(store, as_json=as_json) as show,
    ):
        looked = 0
        while count is None or looked < count:
            if looked:
                time.sleep(interval)
            show(watcher.look())
            looked += 1


@contextlib.contextmanager
def _printer(store: str, *, as_json: bool) -> Iterator[Any]:
    """Yields what shows a look: in its place on a terminal, else as a line of its own."""
    if as_json:
        yield _print_json
    elif not sys.stdout.isatty():
        yield _print_line
    else:
        from rich.live import Live
        from rich.text import Text

        newest: list[float] = []

        def show(sight: "Sight") -> None:
            newest.extend(sight.new_returns)
            del newest[:-_SHOWN_RETURNS]
            live.update(Text(_panel(store, sight, newest)), refresh=True)

        with Live(console=console(), auto_refresh=False) as live:
            yield show


def _print_json(sight: "Sight") -> None:
    writer = None if sight.writer is None else sight.writer._asdict()
    print_json(dataclasses.asdict(sight) | {"num_frames": sight.num_frames, "writer": writer})
    sys.stdout.flush()


def _print_line(sight: "Sight") -> None:
    print("  ".join(_words(sight, list(sight.new_returns[-_SHOWN_RETURNS:]))), flush=True)


def _words(sight: "Sight", returns: list[float]) -> Iterator[str]:
    yield f"{sight.seconds:.1f} s"
    if not sight.is_there:
        yield "no store yet"
        return
    yield f"ids [{sight.first_id}, {sight.next_id})"
    yield f"{sight.num_frames:,} frames"
    yield f"{_rate(sight.steps_per_second)}/s"
    yield f"{_rate(sight.overall_steps_per_second)}/s overall"
    if sight.disk_bytes is not None:
        yield bytes_text(sight.disk_bytes)
        yield f"writer {_writer(sight)}"
    if sight.episodes is not None:
        yield f"{sight.episodes:,} new episodes"
    if returns:
        yield f"latest returns {' '.join(map(text, returns))}"


def _panel(store: str, sight: "Sight", returns: list[float]) -> str:
    if not sight.is_there:
        return f"{store}\n  no store yet, {sight.seconds:.0f} s"
    lines = [
        ("window", f"ids [{sight.first_id}, {sight.next_id}), {sight.num_frames:,} frames"),
        ("speed", f"{_rate(sight.steps_per_second)} steps/s, overall {_rate(sight.overall_steps_per_second)}"),
    ]
    if sight.disk_bytes is not None:
        lines += [("on disk", bytes_text(sight.disk_bytes)), ("writer", _writer(sight))]
    if sight.episodes is not None:
        lines += [("episodes", f"{sight.episodes:,} new"), ("latest returns", " ".join(map(text, returns)))]
    lines.append(("watched", f"{sight.seconds:.0f} s"))
    width = max(len(name) for name, _ in lines)
    return "\n".join([store, *(f"  {name:{width}}  {value}" for name, value in lines)])


def _rate(steps: float | None) -> str:
    return "–" if steps is None else f"{steps:,.0f}"


def _writer(sight: "Sight") -> str:
    writer = sight.writer
    if writer is None or writer.is_alive is False:
        return "none"
    return f"{writer.pid}" if writer.is_alive else f"perhaps {writer.pid} on {writer.host}"


VERBS = (watch,)
