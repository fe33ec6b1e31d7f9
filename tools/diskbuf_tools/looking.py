"""Verbs that tell what a store is, its files and some of its steps: info, ls, schema, head, tail, show, sample."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diskbuf_tools.arguments import ColumnPaths, Csv, History, Json, StorageOptions, Store
from diskbuf_tools.output import bytes_text, form, print_facts, print_json, print_rows
from diskbuf_tools.step_rows import print_step, print_steps
from diskbuf_tools.stores import chosen_paths, open_store, storage_options

if TYPE_CHECKING:
    from diskbuf.inspection import LeafFacts, StoreFacts, StoreFile
    from diskbuf.store.lock import Holder

PANEL = "Look"

_METADATA_WIDTH = 200

Count = Annotated[int, typer.Option("-n", metavar="COUNT", min=0, help="How many.")]
Limit = Annotated[
    int | None, typer.Option("-n", metavar="COUNT", min=0, help="At most so many.", show_default="all of them")
]
Lane = Annotated[int | None, typer.Option(help="Only this lane.", show_default="all")]


def info(store: Store, as_json: Json = False, storage_option: StorageOptions = None) -> None:
    """Say what a store is and holds.

    Example: diskbuf info cartpole.zarr
    """
    from diskbuf.inspection import inspect

    facts = inspect(store, storage_options=storage_options(storage_option))
    if as_json:
        print_json(_as_json(facts))
        return
    print_facts(_pairs(facts), title=facts.path)
    print("  spec")
    for line in _tree(facts.leaves):
        print(f"    {line}")


def ls(
    store: Store,
    count: Limit = None,
    as_json: Json = False,
    as_csv: Csv = False,
    storage_option: StorageOptions = None,
) -> None:
    """List the chunks and other files of a store.

    Example: diskbuf ls -n 20 cartpole.zarr
    """
    import itertools

    from diskbuf.inspection import store_files

    wanted = form(as_json=as_json, as_csv=as_csv)
    files = itertools.islice(store_files(store, storage_options=storage_options(storage_option)), count)
    if wanted != "table":
        names = ("chunk", "first_id", "next_id", "rows", "raw_bytes", "disk_bytes", "state", "name")
        if wanted == "csv":
            lines = (vars(file) | {"leaf": " ".join(path or "(array)" for path in file.leaves)} for file in files)
            print_rows(lines, ("leaf", *names), form=wanted)
        else:
            print_rows(map(vars, files), ("leaves", *names), form=wanted)
        return
    columns = ("leaf", "chunk", "ids", "rows", "raw", "on disk", "state", "file")
    print_rows(map(_file_row, files), columns, form=wanted, elsewhere="--json has all")


def schema(
    store: Store,
    as_json: Json = False,
    arrow: Annotated[bool, typer.Option("--arrow", help="The schema of the store's steps as an Arrow table.")] = False,
    storage_option: StorageOptions = None,
) -> None:
    """Show the spec of a store's steps, with bounds.

    Example: diskbuf schema cartpole.zarr
    """
    from diskbuf.errors import OptionError
    from diskbuf.inspection import arrow_schema, inspect

    options = storage_options(storage_option)
    if arrow:
        if as_json:
            raise OptionError("--json and --arrow must not be given together. Choose one.")
        print(arrow_schema(store, storage_options=options))
        return
    facts = inspect(store, storage_options=options, counts_episodes=False)
    if as_json:
        print_json([_leaf_json(leaf) | _bounds(leaf) for leaf in facts.leaves])
        return
    for line in _tree(facts.leaves, has_bounds=True):
        print(line)


def head(
    store: Store,
    count: Count = 10,
    column: ColumnPaths = None,
    lane: Lane = None,
    history: History = False,
    as_json: Json = False,
    as_csv: Csv = False,
    storage_option: StorageOptions = None,
) -> None:
    """Show the oldest steps.

    Example: diskbuf head -n 5 -c reward -c action cartpole.zarr
    """
    from diskbuf.inspection import oldest_steps

    wanted = form(as_json=as_json, as_csv=as_csv)
    with open_store(store, history=history, storage_option=storage_option) as buffer:
        print_steps(oldest_steps(buffer, chosen_paths(buffer, column), count=count, lane=lane), form=wanted)


def tail(
    store: Store,
    count: Count = 10,
    column: ColumnPaths = None,
    lane: Lane = None,
    history: History = False,
    as_json: Json = False,
    as_csv: Csv = False,
    storage_option: StorageOptions = None,
) -> None:
    """Show the newest steps.

    Example: diskbuf tail -n 5 --lane 0 cartpole.zarr
    """
    from diskbuf.inspection import newest_steps

    wanted = form(as_json=as_json, as_csv=as_csv)
    with open_store(store, history=history, storage_option=storage_option) as buffer:
        print_steps(newest_steps(buffer, chosen_paths(buffer, column), count=count, lane=lane), form=wanted)


def show(
    store: Store,
    step_id: Annotated[int, typer.Option("--id", metavar="ID", help="Id of the step.")],
    lane: Annotated[int, typer.Option(help="Its lane.")] = 0,
    column: ColumnPaths = None,
    full: Annotated[bool, typer.Option("--full", help="All values of arrays.")] = False,
    history: History = False,
    as_json: Json = False,
    storage_option: StorageOptions = None,
) -> None:
    """Show one step, leaf by leaf.

    Example: diskbuf show --id 100 --lane 3 cartpole.zarr
    """
    from diskbuf.inspection import step_at

    with open_store(store, history=history, storage_option=storage_option) as buffer:
        step = step_at(buffer, chosen_paths(buffer, column), step_id=step_id, lane=lane)
    print_step(step, as_json=as_json, is_full=full)


def sample(
    store: Store,
    count: Count = 10,
    seed: Annotated[int | None, typer.Option(help="Makes the draw repeatable.", show_default="a random one")] = None,
    num_steps: Annotated[
        int | None, typer.Option(min=1, help="Draw sequences of so many steps.", show_default="single steps")
    ] = None,
    column: ColumnPaths = None,
    history: History = False,
    as_json: Json = False,
    as_csv: Csv = False,
    storage_option: StorageOptions = None,
) -> None:
    """Draw steps, or sequences of them, as training does.

    Example: diskbuf sample -n 3 --num-steps 2 --seed 7 cartpole.zarr
    """
    from diskbuf.inspection import sampled_steps

    wanted = form(as_json=as_json, as_csv=as_csv)
    with open_store(store, history=history, storage_option=storage_option) as buffer:
        columns = chosen_paths(buffer, column)
        print_steps(sampled_steps(buffer, columns, count=count, num_steps=num_steps, seed=seed), form=wanted)


# ---- how facts are shown


def _as_json(facts: "StoreFacts") -> dict[str, Any]:
    shown = {field.name: getattr(facts, field.name) for field in dataclasses.fields(facts)}
    del shown["data_spec"], shown["leaves"]
    writer = None if facts.writer is None else facts.writer._asdict()
    return shown | {
        "writer": writer,
        "capacity": facts.capacity,
        "num_frames": facts.num_frames,
        "compression_ratio": facts.compression_ratio,
        "data_spec": [_leaf_json(leaf) for leaf in facts.leaves],
    }


def _leaf_json(leaf: "LeafFacts") -> dict[str, Any]:
    return {"path": leaf.path, "dtype": str(leaf.spec.dtype), "shape": list(leaf.spec.shape)}


def _bounds(leaf: "LeafFacts") -> dict[str, Any]:
    bounds = {name: getattr(leaf.spec, name, None) for name in ("minimum", "maximum")}
    return bounds | {"folder": leaf.folder, "chunk_rows": leaf.chunk_rows}


def _pairs(facts: "StoreFacts") -> Iterator[tuple[str, str]]:
    steps = facts.next_id - facts.first_id
    limit = "no limit" if facts.max_length is None else f"at most {facts.max_length:,}"
    yield "lanes", f"{facts.batch_size:,}"
    yield "window", f"ids [{facts.first_id}, {facts.next_id}): {steps:,} steps a lane, {limit}"
    if facts.oldest_id != facts.first_id:
        ids = f"[{facts.oldest_id}, {facts.next_id})"
        yield "history", f"ids {ids}: {facts.next_id - facts.oldest_id:,} steps a lane, read with --history"
    yield "frames", f"{facts.num_frames:,}"
    if facts.episodes is not None:
        yield "episodes", f"{facts.episodes:,}"
    elif any(leaf.path.rpartition("/")[2] == "step_type" for leaf in facts.leaves):
        yield "episodes", f"not counted; diskbuf episodes --summary {facts.path}"
    yield "layout", f"{facts.layout}, {facts.codec or 'not compressed'}"
    yield "on disk", _sizes(facts)
    if facts.published_to is not None:
        yield "published", f"chunks that are not here are at {facts.published_to}"
    newest = f", the newest from id {facts.runs[-1]} on" if len(facts.runs) > 1 else ""
    yield "runs", f"{len(facts.runs):,}{newest}"
    if not facts.is_remote:
        yield "writer", _writer_text(facts.writer)
    made = facts.created[:19].replace("T", " ")
    yield "created", f"{made} UTC; format {facts.format}, written by diskbuf {facts.package_version}"
    if facts.metadata is not None:
        text = json.dumps(facts.metadata, ensure_ascii=False)
        yield "metadata", text if len(text) <= _METADATA_WIDTH else f"{text[:_METADATA_WIDTH]}… (all with --json)"


def _sizes(facts: "StoreFacts") -> str:
    raw = f"{bytes_text(facts.raw_bytes)} of raw steps"
    if facts.disk_bytes is None:
        return f"not told; {raw}"
    ratio = facts.compression_ratio
    times = f", {ratio:.3g} times as small" if facts.codec and ratio is not None else ""
    return f"{bytes_text(facts.disk_bytes)}; {raw}{times}"


def _writer_text(writer: "Holder | None") -> str:
    if writer is None:
        return "nobody"
    who = "a process" if writer.pid is None else f"process {writer.pid}"
    who += "" if writer.host is None else f" on host {writer.host}"
    if writer.is_alive is None:
        return f"perhaps {who}, which can't be told from here"
    return f"{who}" if writer.is_alive else f"nobody; {who} ended without closing it"


def _tree(leaves: "Sequence[LeafFacts]", *, has_bounds: bool = False) -> Iterator[str]:
    """The spec as lines, groups above their leaves, dtypes and shapes below each other."""
    branches: dict[Any, Any] = {}
    for leaf in leaves:
        place = branches
        for key in leaf.keys[:-1]:
            place = place.setdefault(key, {})
        place[leaf.keys[-1] if leaf.keys else "(array)"] = leaf
    lines = list(_branch_lines(branches, ""))
    name_width = max((len(label) for label, leaf in lines if leaf is not None), default=0)
    dtype_width = max((len(str(leaf.spec.dtype)) for _, leaf in lines if leaf is not None), default=0)
    for label, found in lines:
        if found is None:
            yield label
            continue
        line = f"{label:{name_width}}  {found.spec.dtype!s:{dtype_width}}  {list(found.spec.shape)}"
        yield line + _bounds_text(found) if has_bounds else line


def _branch_lines(place: Mapping[Any, Any], before: str) -> "Iterator[tuple[str, LeafFacts | None]]":
    for number, (key, below) in enumerate(place.items()):
        is_last = number == len(place) - 1
        label = f"{before}{'└─' if is_last else '├─'} {key}"
        if isinstance(below, dict):
            yield label, None
            yield from _branch_lines(below, f"{before}{'   ' if is_last else '│  '}")
        else:
            yield label, below


def _bounds_text(leaf: "LeafFacts") -> str:
    low, high = (getattr(leaf.spec, name, None) for name in ("minimum", "maximum"))
    if low is None or high is None:
        return ""
    return f"  from {_bound_text(low)} to {_bound_text(high)}"


def _bound_text(bound: Any) -> str:
    least, most = bound.min(initial=None) if bound.size else None, bound.max(initial=None) if bound.size else None
    return f"{least}" if least == most else f"{least}…{most}"


def _file_row(file: "StoreFile") -> dict[str, Any]:
    return {
        "leaf": ", ".join(path or "(array)" for path in file.leaves),
        "chunk": file.chunk,
        "ids": None if file.first_id is None else f"[{file.first_id}, {file.next_id})",
        "rows": file.rows,
        "raw": None if file.raw_bytes is None else bytes_text(file.raw_bytes),
        "on disk": None if file.disk_bytes is None else bytes_text(file.disk_bytes),
        "state": file.state,
        "file": file.name,
    }


VERBS = (info, ls, schema, head, tail, show, sample)
