"""Figures of what was gathered from a store, drawn with matplotlib's Agg and SVG canvases: no display, no settings.

A figure has some hundred marks, however long the store is.
"""

import contextlib
import dataclasses
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from diskbuf_tools.gathered import Course, Episodes, Gathered, Kind, RunPace, Sample
from diskbuf_tools.output import drawable, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BARS = 24
_HISTOGRAM_BINS = 60
_MOST_RUNS = 40
_SMOOTHED_BINS = 9
_LARGEST = 1e300
"""What is larger lies beyond every histogram: widths of its bins would be infinite."""
_DPI = 150
_LEGEND_ROOM = 0.22
"""Of the height of the marks, above them: a legend among a few dots would hide some wherever it is."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Theme:
    """The colours of a figure, all of them different.

    Attributes:
        paper: Behind everything.
        ink: Of titles.
        muted: Of ticks and small text.
        rule: Of axes and grid lines.
        colors: Of the marks, in the order in which they are taken.
    """

    paper: str
    ink: str
    muted: str
    rule: str
    colors: tuple[str, ...]


# The colours of marks differ in lightness too, for those who don't see some of them and for prints in grey.
LIGHT = Theme(
    paper="#ffffff",
    ink="#1a1f26",
    muted="#59636e",
    rule="#dfe3e8",
    colors=("#2563c9", "#d9730d", "#0f8a6d", "#a23db5", "#c43d4b", "#5f6b7a"),
)
DARK = Theme(
    paper="#14181d",
    ink="#e8ebef",
    muted="#9aa5b1",
    rule="#333b45",
    colors=("#6ea3ff", "#f0a35a", "#4cc9a6", "#d58be6", "#f2858f", "#aab5c2"),
)


_IN_THE_DARK = {
    LIGHT.ink: DARK.ink,
    LIGHT.muted: DARK.muted,
    LIGHT.rule: DARK.rule,
    **dict(zip(LIGHT.colors, DARK.colors, strict=True)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture, not yet drawn.

    Attributes:
        kind: What it shows.
        title: Of what; it may hold names that users gave.
        caption: What more there is to know, in a line.
        alt: What is to be seen, for those who don't.
        draw: Draws it.
    """

    kind: Kind
    title: str
    caption: str
    alt: str
    draw: "Callable[[Axes, Theme], None]"


# ---- what there is to draw


def panels_of(gathered: Gathered) -> list[Panel]:
    """Returns the pictures of what was gathered, kind by kind."""
    found: list[Panel] = []
    episodes = gathered.episodes
    for kind in gathered.kinds:
        if kind in ("returns", "lengths") and episodes is not None:
            found.append(_course_panel(kind, episodes))
        elif kind == "actions":
            found += [_values_panel("actions", f"Actions: {_name(entry)}", entry) for entry in gathered.actions]
        elif kind == "rewards" and gathered.reward is not None:
            found.append(_values_panel("rewards", f"Rewards: {_name(gathered.reward)}", gathered.reward))
        elif kind == "columns":
            found += [_values_panel("columns", _name(entry), entry) for entry in gathered.columns]
        elif kind == "throughput":
            found.append(_pace_panel(gathered.paces))
    return found


def _name(sample: Sample) -> str:
    return sample.path or "(array)"


def _course_panel(kind: Literal["returns", "lengths"], episodes: Episodes) -> Panel:
    course = episodes.returns if kind == "returns" else episodes.lengths
    facts = "no episode yet"
    if course.count:
        numbers = _numbers(course.mean, course.minimum, course.maximum)
        facts = f"{course.count:,} episode{'s' if course.count != 1 else ''}, {numbers}"
    title = "Episode returns" if kind == "returns" else "Episode lengths"
    return Panel(
        kind=kind,
        title=title,
        caption="; ".join(filter(None, [facts, episodes.note])),
        alt=f"{title} over the id of their first step: {facts}.",
        draw=lambda axes, theme: _draw_course(axes, theme, course, "return" if kind == "returns" else "steps"),
    )


def _numbers(mean: float, low: float, high: float) -> str:
    return f"always {low:,.4g}" if low == high else f"mean {mean:,.4g}, {low:,.4g} to {high:,.4g}"


def _values_panel(kind: Kind, title: str, sample: Sample) -> Panel:
    facts = [f"{sample.spec.dtype} {list(sample.spec.shape)}", f"{sample.steps_read:,} steps"]
    if not sample.is_all:
        facts[-1] += " spread evenly"
    if math.isfinite(sample.mean):
        facts.append(_numbers(sample.mean, sample.minimum, sample.maximum))
    if sample.not_finite:
        facts.append(f"{sample.not_finite:,} not finite")
    caption = "; ".join(facts)
    return Panel(
        kind=kind,
        title=title,
        caption=caption,
        alt=f"How the values of {title} are distributed. {caption}.",
        draw=lambda axes, theme: _draw_values(axes, theme, sample),
    )


def _pace_panel(paces: Sequence[RunPace]) -> Panel:
    told = [pace.rows_per_second for pace in paces if pace.rows_per_second is not None]
    facts = "it can't be told: rows carry no times, and those of the files don't say"
    if told:
        whose = "the run" if len(paces) == 1 else f"{len(told):,} of {len(paces):,} runs"
        facts = f"of {whose}, by when chunk files were written (in a copy: copied)"
    return Panel(
        kind="throughput",
        title="Rows per second",
        caption=facts,
        alt=f"Rows per second of each run: {', '.join(text(round(pace)) for pace in told[-10:]) or facts}.",
        draw=lambda axes, theme: _draw_pace(axes, theme, paces),
    )


# ---- drawing it


def _draw_course(axes: "Axes", theme: Theme, course: Course, unit: str) -> None:
    if not course.count:
        _say(axes, theme, "no episodes")
        return
    each = course.each()
    main, second = theme.colors[0], theme.colors[1]
    if each is not None:
        ids, values = each
        size = 5.0 if len(values) < 60 else 2.8
        axes.plot(ids, values, "o", color=main, markersize=size, alpha=0.6, markeredgewidth=0, label="an episode")
        window = max(1, min(len(values), max(5, len(values) // 20)))
        if len(values) > window:
            mean = np.convolve(values, np.ones(window) / window, "valid")
            axes.plot(ids[window - 1 :], mean, color=second, linewidth=1.8, label=f"mean of the last {window}")
    else:
        there = course.counts > 0
        edges = course.first_id + (np.arange(len(there)) + 0.5) * (course.next_id - course.first_id) / len(there)
        axes.fill_between(
            edges[there],
            course.lowest[there],
            course.highest[there],
            color=main,
            alpha=0.22,
            linewidth=0,
            label="least to greatest",
        )
        kernel = np.ones(_SMOOTHED_BINS)
        mean = np.convolve(course.sums, kernel, "same")[there] / np.convolve(course.counts, kernel, "same")[there]
        axes.plot(edges[there], mean, color=second, linewidth=1.8, label="running mean")
    axes.set_xlabel("id of the first step")
    axes.set_ylabel(unit)
    if len(axes.get_legend_handles_labels()[0]) > 1:
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + _LEGEND_ROOM * (high - low))
    _legend(axes, columns=2, loc="upper right")
    _count_x(axes)


def _draw_values(axes: "Axes", theme: Theme, sample: Sample) -> None:
    from matplotlib.ticker import MaxNLocator

    values = sample.values
    if not np.isfinite(values).any():
        _say(axes, theme, "no values" if not sample.size else "no finite values")
        return
    axes.set_ylabel("share of values")
    axes.yaxis.set_major_formatter(_percent())
    axes.set_xlabel("absolute value" if sample.spec.dtype.kind == "c" else "value")
    found = _few_values(sample)
    if found is not None:
        _draw_bars(axes, theme, *found, is_bool=sample.spec.dtype == np.bool)
        return
    low, high = _shown_range(values)
    is_whole = sample.spec.dtype.kind in "iu" and high - low < _HISTOGRAM_BINS
    count = round(2 * len(values) ** (1 / 3))  # the Rice rule: more bins would show noise
    count = min(_HISTOGRAM_BINS, max(10, count))
    bins = np.arange(low - 0.5, high + 1) if is_whole else np.linspace(low, high, count + 1)
    for column in range(values.shape[1]):
        told = values[:, column][np.isfinite(values[:, column])]
        counts, edges = np.histogram(told, bins)
        shares = counts / max(1, len(told))
        color = theme.colors[column % len(theme.colors)]
        if values.shape[1] == 1:
            axes.stairs(shares, edges, fill=True, color=color, alpha=0.85)
        else:
            axes.stairs(shares, edges, color=color, linewidth=1.5, label=_element(column, sample.spec.shape))
    beyond = np.count_nonzero((values < low) | (values > high)) / np.isfinite(values).sum()
    if beyond:
        axes.text(
            0.99, 0.97, f"{100 * beyond:.1g} % lie beyond", transform=axes.transAxes, ha="right", va="top",
            color=theme.muted, fontsize=8,
        )  # fmt: skip
    if values.shape[1] > 1:
        _legend(axes, columns=2 if values.shape[1] > 3 else 1)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_ylim(bottom=0)


def _element(number: int, shape: Sequence[int]) -> str:
    return str([int(place) for place in np.unravel_index(number, tuple(shape))])


def _few_values(sample: Sample) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Values and their shares, where they are few; None otherwise."""
    if sample.counts is not None:
        numbers = np.array(sorted(sample.counts))
        counts = np.array([sample.counts[number] for number in numbers.tolist()])
        return numbers, counts / counts.sum()
    if sample.values.shape[1] != 1 or (sample.spec.dtype.kind in "iu" and sample.minimum != sample.maximum):
        return None
    told = sample.values[np.isfinite(sample.values)]
    numbers, counts = np.unique(told, return_counts=True)
    # A sample of continuous values has few of them when it is small.
    if len(numbers) > _BARS or (len(numbers) > 1 and len(numbers) * 4 > len(told)):
        return None
    return numbers, counts / counts.sum()


def _draw_bars(
    axes: "Axes", theme: Theme, numbers: NDArray[np.float64], shares: NDArray[np.float64], *, is_bool: bool
) -> None:
    axes.bar(np.arange(len(numbers)), shares, width=0.72, color=theme.colors[0], alpha=0.9)
    labels = ["False" if not number else "True" for number in numbers] if is_bool else [f"{n:,.5g}" for n in numbers]
    every = max(1, -(-sum(map(len, labels)) // 44))
    axes.set_xticks(np.arange(len(numbers))[::every], labels[::every])
    _room(axes, len(numbers))
    if len(numbers) <= 8:
        for place, share in enumerate(shares.tolist()):
            shown = f"{100 * share:.3g} %" if share >= 0.001 else "<0.1 %"
            axes.text(place, share, shown, ha="center", va="bottom", fontsize=8, color=theme.muted)
        axes.set_ylim(0, 1.12 * float(shares.max()))


def _shown_range(values: NDArray[np.float64]) -> tuple[float, float]:
    """The range of a histogram: all of it, but for a few values that lie far from all others."""
    told = values[np.abs(values) < _LARGEST]
    if not len(told):
        return -_LARGEST, _LARGEST
    low, high = float(told.min()), float(told.max())
    inner_low, inner_high = (float(edge) for edge in np.quantile(told, [0.005, 0.995]))
    margin = inner_high - inner_low
    if margin > 0 and high - low > 8 * margin:
        low, high = max(low, inner_low - margin), min(high, inner_high + margin)
    if low == high:
        room = max(abs(low) * 1e-3, 0.5)
        return low - room, high + room
    return low, high


def _draw_pace(axes: "Axes", theme: Theme, paces: Sequence[RunPace]) -> None:
    told = [pace for pace in paces if pace.rows_per_second is not None]
    if not told:
        _say(axes, theme, "can't be told")
        return
    shown = list(paces)[-_MOST_RUNS:]
    places = np.arange(len(shown))
    heights = [pace.rows_per_second or 0.0 for pace in shown]
    axes.bar(places, heights, width=0.72, color=theme.colors[2], alpha=0.9)
    for place, pace in enumerate(shown):
        if pace.rows_per_second is None:
            axes.text(place, 0, "?", ha="center", va="bottom", color=theme.muted, fontsize=9)
    every = max(1, len(shown) // 5)
    axes.set_xticks(places[::every], [f"{pace.first_id:,}" for pace in shown[::every]])
    _room(axes, len(shown))
    axes.set_xlabel("first id of the run")
    axes.set_ylabel("rows per second")
    axes.yaxis.set_major_formatter(_thousands())
    axes.set_ylim(bottom=0)


def _room(axes: "Axes", bars: int) -> None:
    """Makes few bars no wider than these would be if there were four."""
    margin = max(0.75, 2 - bars / 2)
    axes.set_xlim(-margin, bars - 1 + margin)


def _say(axes: "Axes", theme: Theme, message: str) -> None:
    axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center", color=theme.muted)
    axes.set_xticks([])
    axes.set_yticks([])


def _legend(axes: "Axes", *, columns: int = 1, loc: Literal["best", "upper right"] = "best") -> None:
    if len(axes.get_legend_handles_labels()[0]) > 1:
        axes.legend(
            labelcolor=axes.xaxis.label.get_color(),
            frameon=False,
            fontsize=8,
            ncols=columns,
            loc=loc,
            handlelength=1.2,
        )


def _count_x(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(_thousands())


def _thousands() -> Any:
    from matplotlib.ticker import StrMethodFormatter

    return StrMethodFormatter("{x:,.0f}")


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(1.0, symbol=" %")


# ---- figures


@contextlib.contextmanager
def _own_settings(theme: Theme, *, has_real_text: bool) -> Iterator[None]:
    """Matplotlib's defaults and ours for a while, whatever the user's matplotlibrc says."""
    import matplotlib as mpl

    settings: dict[Any, Any] = {
        "font.family": ["DejaVu Sans"],
        "font.size": 9,
        "axes.edgecolor": theme.rule,
        "axes.facecolor": "none",
        "axes.labelcolor": theme.muted,
        "axes.labelsize": 8.5,
        "axes.titlecolor": theme.ink,
        "axes.titlelocation": "left",
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": theme.rule,
        "grid.linewidth": 0.8,
        "text.color": theme.ink,
        "xtick.color": theme.rule,
        "ytick.color": theme.rule,
        "xtick.labelcolor": theme.muted,
        "ytick.labelcolor": theme.muted,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "ytick.major.size": 0,
        "svg.hashsalt": "diskbuf",
        # Real text is a tenth of the size, and in the fonts of whoever looks; letters as paths look alike everywhere.
        "svg.fonttype": "none" if has_real_text else "path",
    }
    with mpl.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # names are in any script
        mpl.rcdefaults()
        mpl.rcParams.update(settings)
        yield


def save_grid(panels: Sequence[Panel], file: Path, *, format: Literal["png", "svg"], title: str) -> None:  # noqa: A002
    """Draws panels into one figure and writes it.

    Args:
        panels: At least one.
        file: Where to.
        format: As what.
        title: Above all of them.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with _own_settings(LIGHT, has_real_text=False):
        across = 1 if len(panels) == 1 else 2 if len(panels) <= 4 else 3
        down = -(-len(panels) // across)
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)
        figure = Figure(figsize=(5.4 * across, 3.5 * down + 0.5), dpi=_DPI, layout=layout, facecolor=LIGHT.paper)
        figure.suptitle(
            _shortened(title, 60 * across), x=0.012, ha="left", fontsize=12.5, fontweight="bold", parse_math=False
        )
        places = figure.subplots(down, across, squeeze=False).flatten()
        for place, panel in zip(places, panels, strict=False):
            panel.draw(place, LIGHT)
            place.set_title(_shortened(panel.title, 58), pad=20, parse_math=False)
            place.annotate(
                _shortened(panel.caption, 84),
                (0, 1),
                (0, 7),
                xycoords="axes fraction",
                textcoords="offset points",
                fontsize=7.5,
                color=LIGHT.muted,
                parse_math=False,
            )
        for place in places[len(panels) :]:
            place.set_axis_off()
        _save(figure, file, format)


def svg_of(panel: Panel) -> str:
    """Draws one panel in `LIGHT`, without its title and caption; returns an <svg> element with nothing behind it."""
    from matplotlib.figure import Figure

    with _own_settings(LIGHT, has_real_text=True):
        figure = Figure(figsize=(4.0, 2.5), layout="constrained", facecolor="none")
        panel.draw(figure.subplots(), LIGHT)
        written = io.StringIO()
        _save(figure, written, "svg")
    svg = written.getvalue()
    # Fonts that people read in; DejaVu, which the figure was laid out with, is wider than these.
    svg = svg.replace("'DejaVu Sans'", "system-ui, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif")
    return svg[svg.index("<svg") :]


def in_the_dark(svg: str) -> str:
    """The same figure in the colours of `DARK`; drawing takes much longer than this."""
    return re.sub(r"#[0-9a-f]{6}\b", lambda found: _IN_THE_DARK.get(found[0], found[0]), svg)


def _save(figure: "Figure", file: Any, format: Literal["png", "svg"]) -> None:  # noqa: A002
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    canvas: Any = FigureCanvasSVG(figure) if format == "svg" else FigureCanvasAgg(figure)
    if format == "svg":
        canvas.print_svg(file, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    else:
        canvas.print_png(file)


def _shortened(words: str, length: int) -> str:
    words = drawable(words)
    return words if len(words) <= length else f"{words[: length - 1]}…"
