"""What the verbs print with: tables, JSON and CSV, progress and questions."""

import contextlib
import csv
import json
import math
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from diskbuf.errors import OptionError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn

_PIPED_WIDTH = 100_000
"""Nothing is cut where no terminal sets a width."""

_GAP = 2
_LEAST_TEXT = 12
"""Text of a table is shortened to so many letters, or to its heading, before columns are left out."""

Form = Literal["table", "json", "csv"]
Progress = Callable[[int, int], object]


def form(*, as_json: bool, as_csv: bool = False) -> Form:
    """Which form was asked for.

    Raises:
        OptionError: When both were.
    """
    if as_json and as_csv:
        raise OptionError("--json and --csv must not be given together. Choose one.")
    return "json" if as_json else "csv" if as_csv else "table"


def console() -> "Console":
    """Standard output as rich prints to it: in colour on a terminal, plain and never cut elsewhere."""
    from rich.console import Console

    is_terminal = sys.stdout.isatty()
    return Console(width=None if is_terminal else _PIPED_WIDTH, highlight=False, soft_wrap=not is_terminal)


def print_json(value: object) -> None:
    """Prints one JSON document. NaN and the infinities, which JSON lacks, become strings; arrays become lists."""
    plain = _plain(value)
    line = json.dumps(plain, ensure_ascii=False, allow_nan=False)
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # a name that is no text, or a stream of less than Unicode: JSON has its own escapes
        line = json.dumps(plain, allow_nan=False)
    print(line)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if hasattr(value, "tolist"):  # NumPy's arrays and scalars
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def print_rows(
    rows: Iterable[Mapping[str, Any]],
    columns: Sequence[str],
    *,
    form: Form,
    formats: Mapping[str, Callable[[Any], str]] | None = None,
    one_line: bool = False,
    keep: int = 1,
    first_to_go: Sequence[str] = (),
    elsewhere: str = "",
) -> None:
    """Prints rows: a table, a JSON array of objects, or CSV.

    On a terminal that is too narrow for a table, long text gives way first; then whole columns do, which a last line
    names.

    Args:
        rows: A mapping each.
        columns: Names of the columns, in order; those of the rows that aren't named are left out.
        form: Which of the three.
        formats: How values of a column are written in a table; others are written as `text` writes them.
        one_line: Whether a row of a table is cut to the terminal's width, rather than to go on below.
        keep: How many columns of a table, from the left, are never left out.
        first_to_go: Columns that are left out before others; others go from the right.
        elsewhere: Where a user finds the columns that were left out.
    """
    if form == "json":
        print_json([{name: row.get(name) for name in columns} for row in rows])
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            writer.writerow([_cell(row.get(name)) for name in columns])
    else:
        cells = [[_shown(row.get(name), (formats or {}).get(name)) for name in columns] for row in rows]
        order = [columns.index(name) for name in first_to_go if name in columns]
        order += [number for number in reversed(range(keep, len(columns))) if number not in order]
        _print_table(cells, columns, one_line=one_line, order=order, elsewhere=elsewhere)


def _cell(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return json.dumps(_plain(value)) if isinstance(value, list | tuple | dict) else "" if value is None else value


def _shown(value: Any, write: Callable[[Any], str] | None) -> tuple[str, bool]:
    is_number = isinstance(value, int | float) or (hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0)
    return (text(value) if write is None or value is None else write(value)), is_number


def _print_table(
    cells: Sequence[Sequence[tuple[str, bool]]],
    columns: Sequence[str],
    *,
    one_line: bool,
    order: Sequence[int],
    elsewhere: str,
) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    numeric = [
        bool(cells) and all(row[place][1] or not row[place][0] for row in cells) for place in range(len(columns))
    ]
    widths = _fitted(cells, columns, numeric, out.width, order)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
    for place, width in widths.items():
        table.add_column(
            Text(columns[place]),
            justify="right" if numeric[place] else "left",
            overflow="ellipsis" if one_line else "fold",
            no_wrap=one_line,
            width=width,
        )
    for row in cells:
        table.add_row(*(Text(row[place][0]) for place in widths))
    _print_without_trailing_spaces(table)
    left_out = [name for place, name in enumerate(columns) if place not in widths]
    if left_out:
        print(f"not shown: {', '.join(left_out)}{'; ' if elsewhere else ''}{elsewhere}")


def _fitted(
    cells: Sequence[Sequence[tuple[str, bool]]],
    columns: Sequence[str],
    numeric: Sequence[bool],
    room: int,
    order: Sequence[int],
) -> dict[int, int]:
    """Widths of the columns that are shown, by their place: numbers and short text keep theirs, long text gives way."""
    from rich.cells import cell_len

    wanted, least = {}, {}
    for place, name in enumerate(columns):
        heading = cell_len(name)
        wanted[place] = max(
            [heading, *(cell_len(line) for row in cells for line in row[place][0].split("\n"))],
        )
        least[place] = wanted[place] if numeric[place] else min(wanted[place], max(heading, _LEAST_TEXT))
    for place in order:
        if sum(least.values()) + _GAP * (len(least) - 1) <= room:
            break
        del wanted[place], least[place]
    spare = sum(wanted.values()) + _GAP * (len(wanted) - 1) - room
    while spare > 0:
        longest = max(wanted, key=lambda place: (wanted[place] > least[place], wanted[place]))
        if wanted[longest] <= least[longest]:
            break  # a terminal narrower than what is never left out
        wanted[longest] -= 1
        spare -= 1
    return wanted


def print_facts(facts: Iterable[tuple[str, str]], *, title: str | None = None) -> None:
    """Prints names and values, a pair a line, below a title."""
    pairs = list(facts)
    width = max((len(name) for name, _ in pairs), default=0)
    if title is not None:
        print(title)
    for name, value in pairs:
        print(f"  {name:{width}}  {value}".rstrip())


def _print_without_trailing_spaces(renderable: Any) -> None:
    out = console()
    if out.is_terminal:
        out.print(renderable)
        return
    with out.capture() as captured:
        out.print(renderable)
    for line in captured.get().splitlines():
        print(line.rstrip())


def text(value: Any) -> str:
    """A value as tables show it: thousands separated, floats to six digits."""
    if value is None:
        return ""
    if hasattr(value, "item") and getattr(value, "ndim", 1) == 0:
        value = value.item()
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.6g}"
    return str(value)


def drawable(words: str) -> str:
    """Words for a picture or a page: bytes of a path that are no text, and control characters, are replaced."""
    return "".join("\N{REPLACEMENT CHARACTER}" if _is_no_text(letter) else letter for letter in words)


def _is_no_text(letter: str) -> bool:
    return letter != "\n" and unicodedata.category(letter) in ("Cc", "Cs")


def bytes_text(count: int) -> str:
    """A number of bytes in the unit that suits it."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count:,} B" if unit == "B" else f"{size:,.1f} {unit}"


@contextlib.contextmanager
def progress(label: str, *, unit: Literal["bytes", "steps", "files"] = "bytes") -> Iterator[Progress]:
    """Shows how far long work is, with rate and time left, on a terminal; elsewhere it is quiet.

    Yields:
        What is called with how much is done and how much there is in all.
    """
    if not sys.stderr.isatty():
        yield _nothing
        return
    from rich import progress as bars
    from rich.console import Console

    rate = (
        [bars.DownloadColumn(), bars.TransferSpeedColumn()]
        if unit == "bytes"
        else [bars.MofNCompleteColumn(), _rate_column(unit)]
    )
    columns = [bars.TextColumn("{task.description}"), bars.BarColumn(), *rate, bars.TimeRemainingColumn()]
    shown = bars.Progress(*columns, console=Console(stderr=True))
    with shown:
        task = shown.add_task(label, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


def _rate_column(unit: str) -> "ProgressColumn":
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class RateColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("" if task.speed is None else f"{task.speed:,.0f} {unit}/s")

    return RateColumn()


def _nothing(done: int, total: int) -> None:
    del done, total


def confirm(question: str, *, is_confirmed: bool) -> None:
    """Asks before something is destroyed.

    Raises:
        OptionError: When the answer is no, or there is nobody to ask.
    """
    if is_confirmed:
        return
    if not sys.stdin.isatty():
        raise OptionError(f"{question} Add --yes to say so where nobody can be asked.")
    import typer

    if not typer.confirm(question, err=True):
        raise typer.Exit(1)
