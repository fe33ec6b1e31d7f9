"""One HTML page that tells of a store: facts, figures and pictures, all of it in the file itself.

The page stays below 8 MiB whatever the store holds: there are so many figures, rows of tables and characters of
metadata at most, and pictures are made small and end when there are 4 MiB of them. What was left out is said.
"""

import base64
import dataclasses
import datetime as dt
import html
import importlib.resources
import io
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import diskbuf
from diskbuf.errors import WindowError
from diskbuf.specs import BoundedArraySpec
from diskbuf_tools.figures import Panel, in_the_dark, panels_of, svg_of
from diskbuf_tools.gathered import Episode, Gathered, Roles, RunPace, Sample, sample_column
from diskbuf_tools.output import bytes_text, drawable, text
from diskbuf_tools.pictures import PictureLeaf, Pixels, boundary_follows, picture_leaves

if TYPE_CHECKING:
    from diskbuf import UniformReplayBuffer
    from diskbuf.inspection import StoreFacts

_PICTURE_BYTES = 2**22
_MOST_LEAVES = 200
_MOST_RUNS = 50
_MOST_METADATA = 20_000
_MOST_PICTURE_LEAVES = 8
_MOST_STRIP_LEAVES = 3
_THUMBNAILS = 8
_STRIP = 10
_LARGEST_SIDE = 192
_SHOWN_SIDE = 124
_STRIP_SIDE = 100
_PNG_BYTES = 2**14
_TRIES = 3
_MOMENT = "%Y-%m-%d %H:%M:%S UTC"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thumbnail:
    """A picture of a step.

    Attributes:
        uri: The picture itself.
        width: Its width on the page.
        height: Its height there.
        words: What stands below it.
        alt: What it is, for those who don't see it.
        has_hard_pixels: Whether it is so small that its pixels are shown as squares.
    """

    uri: str
    width: int
    height: int
    words: str
    alt: str
    has_hard_pixels: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strip:
    """An episode and frames of it.

    Attributes:
        name: Which one it is, such as "best".
        episode: The episode.
        frames: Some of its frames for each leaf of pictures.
    """

    name: str
    episode: Episode
    frames: Mapping[str, Sequence[Thumbnail]]


class _Budget:
    """Makes pictures until there are enough bytes of them."""

    def __init__(self) -> None:
        self.left = _PICTURE_BYTES
        self.refused = 0

    def thumbnail(self, pixels: Pixels, *, words: str, alt: str, side: int) -> Thumbnail | None:
        """Encodes a picture, [H, W, C]; None when there is no room for it any more."""
        uri, (height, width) = _encoded(pixels)
        if len(uri) > self.left:
            self.refused += 1
            return None
        self.left -= len(uri)
        grown = side / max(height, width)
        return Thumbnail(
            uri=uri,
            width=max(1, round(width * grown)),
            height=max(1, round(height * grown)),
            words=words,
            alt=alt,
            has_hard_pixels=grown > 1,
        )


def _encoded(pixels: Pixels) -> tuple[str, tuple[int, int]]:
    """A picture as a data URI, its longer side at most `_LARGEST_SIDE`, and its (height, width)."""
    from PIL import Image

    mode = {1: "L", 3: "RGB", 4: "RGBA"}[pixels.shape[2]]
    image = Image.fromarray(np.ascontiguousarray(pixels[..., 0] if mode == "L" else pixels))
    image.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE), Image.Resampling.BOX)
    out, kind = io.BytesIO(), "png"
    image.save(out, "PNG")
    if out.tell() > _PNG_BYTES and mode != "RGBA":
        out, kind = io.BytesIO(), "jpeg"
        image.save(out, "JPEG", quality=85)
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}", (image.height, image.width)


# ---- reading what the figures don't show


def column_samples(buffer: "UniformReplayBuffer", roles: Roles, gathered: Gathered) -> list[Sample]:
    """Samples of the leaves, in spec order; those that were gathered already are not read again."""
    there = {entry.path: entry for entry in (*gathered.actions, *gathered.columns)}
    if gathered.reward is not None:
        there[gathered.reward.path] = gathered.reward
    paths = itertools.islice(roles.leaves, _MOST_LEAVES)
    return [there.get(path) or sample_column(buffer, roles, path) for path in paths]


def thumbnails_of(
    buffer: "UniformReplayBuffer", roles: Roles, budget: _Budget, notes: list[str]
) -> dict[str, list[Thumbnail]]:
    """Pictures of steps that are spread evenly over the window and the lanes, by leaf."""
    leaves = picture_leaves(roles.leaves)
    if len(leaves) > _MOST_PICTURE_LEAVES:
        notes.append(f"images: the first {_MOST_PICTURE_LEAVES} of {len(leaves)} leaves that are pictures")
    leaves = leaves[:_MOST_PICTURE_LEAVES]
    for _ in range(_TRIES if leaves else 0):
        first_id, next_id = buffer.first_id, buffer.next_id
        count = min(_THUMBNAILS, next_id - first_id)
        if not count:
            return {}
        ids = np.unique(np.linspace(first_id, next_id - 1, count).round().astype(np.int64))
        lanes = np.arange(len(ids)) * buffer.batch_size // len(ids)
        try:
            rows = _rows(buffer, ids, lanes)
        except WindowError:  # a writer evicted the first ones
            continue
        found = {}
        for leaf in leaves:
            told = leaf.told_by(rows[leaf.path])
            made = [
                budget.thumbnail(
                    pixels,
                    words=f"id {step:,}, lane {lane}",
                    alt=f"{_name(leaf.path)} at id {step:,} in lane {lane}",
                    side=_SHOWN_SIDE,
                )
                for step, lane, pixels in zip(ids.tolist(), lanes.tolist(), told.pixels(rows[leaf.path]), strict=True)
            ]
            found[leaf.path] = [entry for entry in made if entry is not None]
        return found
    if leaves:
        notes.append("images: the writer evicts steps faster than they are read")
    return {}


def strips_of(
    buffer: "UniformReplayBuffer",
    roles: Roles,
    episodes: Sequence[tuple[str, Episode]],
    budget: _Budget,
    notes: list[str],
) -> list[Strip]:
    """Frames of episodes."""
    leaves = picture_leaves(roles.leaves)[:_MOST_STRIP_LEAVES]
    return [
        Strip(name=name, episode=episode, frames=_frames(buffer, roles, leaves, name, episode, budget, notes))
        for name, episode in episodes
    ]


def _frames(
    buffer: "UniformReplayBuffer",
    roles: Roles,
    leaves: Sequence[PictureLeaf],
    name: str,
    episode: Episode,
    budget: _Budget,
    notes: list[str],
) -> dict[str, list[Thumbnail]]:
    if not leaves:
        return {}
    stop = episode.last_id + 1
    boundaries = roles.boundaries
    if boundaries is not None and boundary_follows(buffer, boundaries, lane=episode.lane, last_id=episode.last_id):
        stop += 1
    count = min(_STRIP, stop - episode.first_id)
    ids = np.unique(np.linspace(episode.first_id, stop - 1, count).round().astype(np.int64))
    try:
        rows = _rows(buffer, ids, np.full(len(ids), episode.lane))
    except WindowError:
        notes.append(f"frames of the {name} episode: they left the window while the page was made")
        return {}
    found: dict[str, list[Thumbnail]] = {}
    for leaf in leaves:
        told = leaf.told_by(rows[leaf.path])
        made = []
        for step, pixels in zip(ids.tolist(), told.pixels(rows[leaf.path]), strict=True):
            words = "final" if step > episode.last_id else f"step {step - episode.first_id:,}"
            alt = f"{_name(leaf.path)}, {words} of the {name} episode"
            made.append(budget.thumbnail(pixels, words=words, alt=alt, side=_STRIP_SIDE))
        found[leaf.path] = [entry for entry in made if entry is not None]
    return found


def _rows(buffer: "UniformReplayBuffer", ids: Any, lanes: Any) -> dict[str, Any]:
    from diskbuf.tree import Structure

    structure = Structure(buffer.data_spec)
    return dict(zip(structure.paths, structure.flatten(buffer.read(ids, lanes)), strict=True))


def named_episodes(gathered: Gathered) -> list[tuple[str, Episode]]:
    """The best, the median and the worst episode by return, or the last one where there are no returns."""
    episodes = gathered.episodes
    if episodes is None:
        return []
    found: dict[Episode, str] = {}
    for name in ("best", "median", "worst"):
        episode = getattr(episodes, name)
        if episode is not None:
            found[episode] = f"{found[episode]}, {name}" if episode in found else name
    if not found and episodes.last is not None:
        found[episodes.last] = "last"
    return [(name, episode) for episode, name in found.items()]


# ---- the page


def make_page(
    buffer: "UniformReplayBuffer",
    facts: "StoreFacts",
    roles: Roles,
    gathered: Gathered,
    *,
    episodes: Sequence[tuple[str, Episode]],
) -> tuple[str, list[str]]:
    """Makes the page of a store.

    Args:
        buffer: The store, open for reading.
        facts: What it is.
        roles: What its leaves are.
        gathered: What its figures are drawn from.
        episodes: Names and episodes to show frames of.

    Returns:
        The page, and what was left out of it.
    """
    notes = list(gathered.notes)
    is_empty = gathered.first_id == gathered.next_id
    budget = _Budget()
    pictures = thumbnails_of(buffer, roles, budget, notes)
    strips = strips_of(buffer, roles, episodes, budget, notes)
    samples = [] if is_empty else column_samples(buffer, roles, gathered)
    if len(roles.leaves) > _MOST_LEAVES:
        notes.append(f"tables: the first {_MOST_LEAVES} of {len(roles.leaves)} leaves")
    if len(facts.runs) > _MOST_RUNS:
        notes.append(f"runs: the last {_MOST_RUNS} of {len(facts.runs):,}")
    if budget.refused:
        notes.append(f"images: {budget.refused} that would have made the page too large")
    panels = [] if is_empty else panels_of(gathered)
    sections = [
        ("store", "Store", _store_section(facts, roles, gathered)),
        ("episodes", "Episodes", _episodes_section(panels, strips)),
        (
            "decisions",
            "Actions and rewards",
            _figures(panel for panel in panels if panel.kind in ("actions", "rewards")),
        ),
        ("columns", "Columns", _columns_section(panels, samples)),
        ("images", "Images", _images_section(pictures)),
        ("throughput", "Throughput", _figures(panel for panel in panels if panel.kind == "throughput")),
    ]
    sections = [entry for entry in sections if entry[2]]
    name = _store_name(facts.path)
    ids = f"[{gathered.first_id:,}, {gathered.next_id:,})"
    now = dt.datetime.now(dt.UTC).strftime(_MOMENT)
    links = "".join(f'<a href="#{key}">{_escaped(title)}</a>' for key, title, content in sections)
    body = "".join(
        f'<section aria-labelledby="{key}"><h2 id="{key}">{_escaped(title)}</h2>{content}</section>'
        for key, title, content in sections
    )
    empty = (
        "<section><h2>The store is empty</h2><p>No step is in its window, so there is nothing to draw.</p></section>"
    )
    left_out = ""
    if notes:
        items = "".join(f"<li>{_escaped(note)}</li>" for note in notes)
        left_out = f'<section class="notes"><p>Left out</p><ul>{items}</ul></section>'
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="generator" content="diskbuf {_escaped(diskbuf.__version__)}">
<title>{_escaped(name)}: replay buffer report</title>
<link rel="icon" href="data:,">
<style>
{_style()}</style>
</head>
<body>
<header>
<h1>{_escaped(name)}</h1>
<p class="path">{_escaped(facts.path)}</p>
{_tiles(facts, gathered)}
<nav aria-label="Sections">{links}</nav>
</header>
<main>
{empty if is_empty else ""}{body}{left_out}
</main>
<footer>Made {now} by diskbuf {_escaped(diskbuf.__version__)} of ids {ids}.</footer>
</body>
</html>
"""
    return page, notes


def _escaped(words: object) -> str:
    return html.escape(drawable(str(words)), quote=True)


def _style() -> str:
    return importlib.resources.files("diskbuf_tools").joinpath("report_page.css").read_text(encoding="utf-8")


def _name(path: str) -> str:
    return path or "(array)"


def _store_name(path: str) -> str:
    return path.rstrip("/").replace("\\", "/").rpartition("/")[2] or path


def _tiles(facts: "StoreFacts", gathered: Gathered) -> str:
    steps = gathered.next_id - gathered.first_id
    told = [("Steps", f"{steps * gathered.lanes:,}"), ("Lanes", f"{gathered.lanes:,}")]
    if gathered.episodes is not None and gathered.episodes.pieces:
        told.append(("Episodes", f"{gathered.episodes.count:,}"))
        for name, course in (("Mean return", gathered.episodes.returns), ("Mean length", gathered.episodes.lengths)):
            if course.count:
                told.append((name, f"{course.mean:,.4g}"))
    if facts.disk_bytes is not None:
        told.append(("On disk", bytes_text(facts.disk_bytes)))
    return (
        f'<dl class="tiles">{"".join(f"<div><dt>{_escaped(n)}</dt><dd>{_escaped(v)}</dd></div>" for n, v in told)}</dl>'
    )


def _store_section(facts: "StoreFacts", roles: Roles, gathered: Gathered) -> str:
    steps = gathered.next_id - gathered.first_id
    limit = "no limit" if facts.max_length is None else f"at most {facts.max_length:,}"
    pairs = [
        ("Window", f"ids [{gathered.first_id:,}, {gathered.next_id:,}): {steps:,} steps a lane, {limit}"),
        ("Lanes", f"{gathered.lanes:,}"),
        ("Layout", f"{facts.layout}, {facts.codec or 'not compressed'}"),
        ("Raw size", bytes_text(facts.raw_bytes)),
    ]
    if facts.oldest_id < gathered.first_id:
        pairs.insert(1, ("History", f"from id {facts.oldest_id:,} on; read with --history"))
    if facts.disk_bytes is not None:
        ratio = facts.compression_ratio
        smaller = f", a byte for {ratio:.3g} of the steps" if ratio and facts.codec else ""
        pairs.append(("On disk", bytes_text(facts.disk_bytes) + smaller))
    if facts.published_to:
        pairs.append(("Published to", facts.published_to))
    if facts.writer is not None:
        pairs.append(
            ("Written by", "a process that has it open" if facts.writer.is_alive else "a process that was killed")
        )
    pairs += [
        ("Made", _moment(facts.created)),
        ("Format", f"{facts.format}, by diskbuf {facts.package_version}"),
    ]
    if gathered.episodes is not None and gathered.episodes.ends:
        ends = ", ".join(f"{count:,} {end}" for end, count in gathered.episodes.ends.items())
        pairs.append(("Episodes", ends))
    listed = "".join(f"<div><dt>{_escaped(name)}</dt><dd>{_escaped(value)}</dd></div>" for name, value in pairs)
    parts = [f'<dl class="facts">{listed}</dl>', "<h3>Spec of a step</h3>", _spec_table(roles)]
    runs = _runs_table(facts, gathered)
    if runs:
        parts += ["<h3>Runs of the writer</h3>", runs]
    if facts.metadata:
        words = json.dumps(facts.metadata, indent=2, ensure_ascii=False)
        if len(words) > _MOST_METADATA:
            words = f"{words[:_MOST_METADATA]}…\n({len(words) - _MOST_METADATA:,} more characters)"
        parts += ["<h3>Metadata</h3>", f'<pre tabindex="0">{_escaped(words)}</pre>']
    return "".join(parts)


def _moment(words: str) -> str:
    try:
        return dt.datetime.fromisoformat(words).astimezone(dt.UTC).strftime(_MOMENT)
    except ValueError:
        return words


def _spec_table(roles: Roles) -> str:
    rows = []
    for path, spec in itertools.islice(roles.leaves.items(), _MOST_LEAVES):
        bounds = ("", "")
        if isinstance(spec, BoundedArraySpec):
            bounds = (_bound(spec.minimum), _bound(spec.maximum))
        size = spec.dtype.itemsize * math.prod(spec.shape)
        rows.append((_name(path), str(spec.dtype), str(list(spec.shape)), *bounds, bytes_text(size)))
    return _table(("leaf", "dtype", "shape", "minimum", "maximum", "a step of a lane"), rows, right=(3, 4, 5))


def _bound(values: Any) -> str:
    flat = np.unique(values)
    return text(flat[0]) if len(flat) == 1 else f"{text(flat[0])} … {text(flat[-1])}"


def _runs_table(facts: "StoreFacts", gathered: Gathered) -> str:
    paces = {pace.first_id: pace for pace in gathered.paces}
    stops = [*facts.runs[1:], gathered.next_id]
    rows = []
    for start, stop in list(zip(facts.runs, stops, strict=True))[-_MOST_RUNS:]:
        begin = max(start, gathered.first_id)
        if begin < stop:
            pace = paces.get(begin, RunPace(begin, stop, None, None)).rows_per_second
            shown = "" if pace is None else f"{pace:,.0f}"
            rows.append((f"{begin:,}", f"{stop:,}", f"{(stop - begin) * gathered.lanes:,}", shown))
    return _table(("first id", "end", "steps", "rows a second"), rows, right=(1, 2, 3)) if rows else ""


def _episodes_section(panels: Sequence[Panel], strips: Sequence[Strip]) -> str:
    parts = [_figures((panel for panel in panels if panel.kind in ("returns", "lengths")), is_wide=True)]
    without_frames = "".join(
        f"<div><dt>{_escaped(strip.name.capitalize())}</dt><dd>{_escaped(_episode_words(strip.episode))}</dd></div>"
        for strip in strips
        if not any(strip.frames.values())
    )
    if without_frames:
        parts.append(f'<dl class="facts">{without_frames}</dl>')
    for strip in strips:
        if not any(strip.frames.values()):
            continue
        parts.append(
            f"<h3>{_escaped(strip.name.capitalize())} episode "
            f"<span class='muted'>{_escaped(_episode_words(strip.episode))}</span></h3>"
        )
        for path, frames in strip.frames.items():
            if frames:
                label = f"Frames of {_name(path)}, {strip.name} episode"
                listed = "".join(map(_thumbnail, frames))
                parts.append(f'<p class="muted">{_escaped(_name(path))}</p>' if len(strip.frames) > 1 else "")
                parts.append(f'<ol class="strip" tabindex="0" aria-label="{_escaped(label)}">{listed}</ol>')
    return "".join(parts)


def _episode_words(episode: Episode) -> str:
    value = "" if math.isnan(episode.value) else f"return {episode.value:,.4g}, "
    end = f", {episode.end}" if episode.end else ""
    whole = "" if episode.is_whole else ", its beginning is not there"
    return (
        f"{value}{episode.length:,} steps, lane {episode.lane}, "
        f"ids [{episode.first_id:,}, {episode.last_id + 1:,}){end}{whole}"
    )


def _columns_section(panels: Sequence[Panel], samples: Sequence[Sample]) -> str:
    if not samples:
        return ""
    rows = []
    for sample in samples:
        told = sample.size - sample.not_finite
        zeros = f"{100 * sample.zeros / told:.3g} %" if told else ""
        numbers = [sample.mean, sample.std, sample.minimum, sample.maximum]
        rows.append(
            (
                _name(sample.path),
                *("" if math.isnan(number) else f"{number:,.5g}" for number in numbers),
                zeros,
                f"{sample.not_finite:,}" if sample.not_finite else "",
                f"{sample.steps_read:,}" + ("" if sample.is_all else " of more"),
            )
        )
    head = ("leaf", "mean", "std", "least", "greatest", "zeros", "not finite", "steps read")
    table = _table(head, rows, right=range(1, 8))
    return _figures(panel for panel in panels if panel.kind == "columns") + "<h3>Statistics</h3>" + table


def _images_section(pictures: Mapping[str, Sequence[Thumbnail]]) -> str:
    parts = []
    for path, entries in pictures.items():
        if entries:
            parts.append(
                f'<h3>{_escaped(_name(path))}</h3><ul class="pictures">{"".join(map(_thumbnail, entries))}</ul>'
            )
    return "".join(parts)


def _thumbnail(entry: Thumbnail) -> str:
    sharp = ' class="pixels"' if entry.has_hard_pixels else ""
    size = f'width="{entry.width}" height="{entry.height}"'
    return f'<li><img src="{entry.uri}" alt="{_escaped(entry.alt)}" {size}{sharp}>{_escaped(entry.words)}</li>'


def _figures(panels: Iterable[Panel], *, is_wide: bool = False) -> str:
    drawn = []
    for panel in panels:
        svg = svg_of(panel)
        light, dark = _svg_uri(svg), _svg_uri(in_the_dark(svg))
        drawn.append(
            f"<figure><figcaption><strong>{_escaped(panel.title)}</strong><span>{_escaped(panel.caption)}</span></figcaption>"
            f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
            f'<img src="{light}" alt="{_escaped(panel.alt)}" width="400" height="250"></picture></figure>'
        )
    kind = "figures wide" if is_wide else "figures"
    return f'<div class="{kind}">{"".join(drawn)}</div>' if drawn else ""


def _svg_uri(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int]) -> str:
    """A table whose first column names the rows."""
    aligned = set(right)

    def cell(tag: Literal["th", "td"], number: int, words: str, scope: str = "") -> str:
        side = ' class="n"' if number in aligned else ""
        inside = f"<div>{_escaped(words)}</div>" if tag == "th" and not number else _escaped(words)
        return f"<{tag}{scope}{side}>{inside}</{tag}>"

    top = "".join(cell("th", number, words, ' scope="col"') for number, words in enumerate(head))
    body = "".join(
        "<tr>"
        + cell("th", 0, row[0], ' scope="row"')
        + "".join(cell("td", number, words) for number, words in enumerate(row[1:], 1))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_escaped(f"Table by {head[0]}")}">'
        f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
    )
