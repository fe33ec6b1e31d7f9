"""Steps as the verbs print them: a row each, arrays summed up, spread over columns or as nested lists."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from diskbuf.errors import OptionError
from diskbuf_tools.output import Form, print_facts, print_json, print_rows, text

if TYPE_CHECKING:
    from diskbuf.inspection import Steps

_MOST_CELLS = 64
"""Values of an array that are spread over columns of CSV."""

_SHOWN_VALUES = 6
_CLASHES = re.compile(r"_*(id|lane|sequence)")


def column_name(path: str) -> str:
    """What a leaf is called in rows: its path, with "_" before it where rows have a column of that name themselves."""
    return f"_{path}" if _CLASHES.fullmatch(path) else path or "(array)"


def print_steps(steps: "Steps", *, form: Form) -> None:
    """Prints steps, a row each.

    Raises:
        OptionError: When CSV is asked for, and an array has too many values for columns.
    """
    own = ["id", "lane"] if steps.sequences is None else ["sequence", "id", "lane"]
    if form == "csv":
        spread = {path: _spread_names(path, rows.shape[1:]) for path, rows in steps.columns.items()}
        names = [*own, *(name for names in spread.values() for name in names)]
        print_rows(_spread_rows(steps, spread), names, form=form)
        return
    names = [*own, *map(column_name, steps.columns)]
    print_rows(
        _rows(steps, is_table=form == "table"),
        names,
        form=form,
        formats=_PLAIN,
        one_line=True,
        keep=len(own) + 1,
        elsewhere="-c chooses, --json has all",
    )


_PLAIN = {"id": str, "lane": str, "sequence": str}


def _rows(steps: "Steps", *, is_table: bool) -> Iterator[dict[str, Any]]:
    for number, own in enumerate(_own(steps)):
        values = {path: rows[number] for path, rows in steps.columns.items()}
        shown = {
            column_name(path): summary(value) if is_table and value.ndim else value for path, value in values.items()
        }
        yield own | shown


def _own(steps: "Steps") -> Iterator[dict[str, Any]]:
    sequences = [None] * len(steps.ids) if steps.sequences is None else steps.sequences.tolist()
    for sequence, step_id, lane in zip(sequences, steps.ids.tolist(), steps.lanes.tolist(), strict=True):
        yield {"sequence": sequence, "id": step_id, "lane": lane}


def _spread_names(path: str, shape: Sequence[int]) -> list[str]:
    import math

    import numpy as np

    if math.prod(shape) > _MOST_CELLS:
        raise OptionError(
            f"columns of CSV must have at most {_MOST_CELLS} values a row, got {math.prod(shape):,} in {path!r}. "
            "Choose others with -c, or take --json."
        )
    if not shape:
        return [column_name(path)]
    return [f"{column_name(path)}[{','.join(map(str, place))}]" for place in np.ndindex(*shape)]


def _spread_rows(steps: "Steps", spread: dict[str, list[str]]) -> Iterator[dict[str, Any]]:
    for number, own in enumerate(_own(steps)):
        row = own
        for path, names in spread.items():
            row |= zip(names, steps.columns[path][number].reshape(-1).tolist(), strict=True)
        yield row


def print_step(step: "Steps", *, as_json: bool, is_full: bool) -> None:
    """Prints one step, a leaf a line.

    Args:
        step: The step, one row.
        as_json: Whether as one JSON object: of each leaf dtype and shape, and all of its values or their summary.
        is_full: Whether all values of arrays are printed.
    """
    values = {path: rows[0] for path, rows in step.columns.items()}
    own = {"id": int(step.ids[0]), "lane": int(step.lanes[0])}
    if as_json:
        whole = {
            column_name(path): value if is_full or not value.ndim else facts(value) for path, value in values.items()
        }
        print_json(own | whole)
        return
    pairs = [
        (column_name(path), text(value) if not value.ndim else long_summary(value)) for path, value in values.items()
    ]
    if not is_full:
        print_facts(pairs, title=f"id {own['id']}, lane {own['lane']}")
        return
    import sys

    import numpy as np

    print(f"id {own['id']}, lane {own['lane']}")
    with np.printoptions(threshold=sys.maxsize, linewidth=120):
        for path, value in values.items():
            shown = np.array2string(value, separator=", ") if value.ndim else text(value)
            joint = "\n" if "\n" in shown else "  "
            print(f"  {column_name(path)}{joint}{shown}")


def summary(value: Any) -> str:
    """An array in a few words: its values, or what they are like."""
    if value.size <= _SHOWN_VALUES and value.ndim == 1:
        return f"[{' '.join(text(entry) for entry in value)}]"
    shape = ",".join(map(str, value.shape))
    return f"{value.dtype}[{shape}]{_range(value)}"


def _range(value: Any) -> str:
    known = facts(value)
    if "minimum" not in known:
        return ""
    return f" {text(known['minimum'])}…{text(known['maximum'])} mean {text(known['mean'])}"


def long_summary(value: Any) -> str:
    """An array in a line: dtype, shape, range, mean and its first values."""
    first = " ".join(text(entry) for entry in value.reshape(-1)[:_SHOWN_VALUES])
    more = " …" if value.size > _SHOWN_VALUES else ""
    return f"{value.dtype} {list(value.shape)}{_range(value)}: {first}{more}"


def facts(value: Any) -> dict[str, Any]:
    """An array in numbers: dtype, shape, least, greatest and mean of what is finite, and its first values."""
    import numpy as np

    known: dict[str, Any] = {"dtype": str(value.dtype), "shape": list(value.shape)}
    finite = value[np.isfinite(value)] if value.dtype.kind in "fc" else value
    if finite.size and value.dtype.kind != "c":
        known |= {"minimum": finite.min(), "maximum": finite.max(), "mean": float(finite.mean(dtype=np.float64))}
    return known | {"first": value.reshape(-1)[:_SHOWN_VALUES]}
