"""Verbs that tell what a store holds: info."""

import contextlib
import json
from pathlib import Path
from typing import Any

import diskbuf
from diskbuf_tools.arguments import Json, StorageOptions, Store
from diskbuf_tools.output import print_json
from diskbuf_tools.stores import storage_options

PANEL = "Look"


def info(store: Store, as_json: Json = False, storage_option: StorageOptions = None) -> None:
    """Say what a store holds.

    Example: diskbuf info cartpole.zarr
    """
    facts = _facts(store, storage_options(storage_option))
    if as_json:
        print_json(facts)
    else:
        print(_as_text(facts))


def _facts(path: str, options: dict[str, Any] | None) -> dict[str, Any]:
    """What `info` tells, in JSON's own types."""
    from diskbuf.tree import Structure  # imports optree, which `diskbuf --version` can do without

    with (
        diskbuf.open(path, mode="r", storage_options=options) as buffer,
        diskbuf.open(path, history=True, storage_options=options) as with_history,
    ):
        structure = Structure(buffer.data_spec)
        return {
            "path": str(buffer.path),
            "batch_size": buffer.batch_size,
            "max_length": buffer.max_length,
            "capacity": buffer.capacity,
            "oldest_id": min(with_history.first_id, buffer.first_id),
            "first_id": buffer.first_id,
            "next_id": buffer.next_id,
            "num_frames": int(buffer.num_frames()),
            "layout": buffer.layout,
            "codec": buffer.codec,
            "disk_bytes": None if isinstance(buffer.path, str) else _disk_bytes(buffer.path),
            "metadata": buffer.metadata,
            "data_spec": [
                {"path": leaf_path, "dtype": str(leaf.dtype), "shape": list(leaf.shape)}
                for leaf_path, leaf in zip(structure.paths, structure.flatten(buffer.data_spec), strict=True)
            ],
        }


def _disk_bytes(folder: Path) -> int:
    """Bytes that the file system has set aside: less than the sum of the file sizes where files have holes."""
    blocks = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # the writer may have evicted it since it was listed
            blocks += file.lstat().st_blocks
    return blocks * 512  # the unit of st_blocks, whatever the file system's own


def _history_line(facts: dict[str, Any]) -> list[str]:
    if facts["oldest_id"] == facts["first_id"]:
        return []
    steps = facts["next_id"] - facts["oldest_id"]
    ids = f"[{facts['oldest_id']}, {facts['next_id']})"
    return [f"  history   ids {ids}: {steps:,} steps a lane, for diskbuf.open(path, history=True)"]


def _as_text(facts: dict[str, Any]) -> str:
    steps = facts["next_id"] - facts["first_id"]
    limit = "no limit" if facts["max_length"] is None else f"at most {facts['max_length']:,}"
    lines = [
        facts["path"],
        f"  lanes     {facts['batch_size']:,}",
        f"  window    ids [{facts['first_id']}, {facts['next_id']}): {steps:,} steps a lane, {limit}",
        *_history_line(facts),
        f"  frames    {facts['num_frames']:,}",
        f"  layout    {facts['layout']}" + (f", {facts['codec']}" if facts["codec"] else ", not compressed"),
    ]
    if facts["disk_bytes"] is not None:
        lines.append(f"  on disk   {facts['disk_bytes'] / 2**20:,.1f} MiB")
    if facts["metadata"]:
        lines.append(f"  metadata  {json.dumps(facts['metadata'])}")
    lines.append("  spec")
    # A spec that is one leaf has no path.
    leaves = [(leaf["path"] or "(array)", leaf["dtype"], leaf["shape"]) for leaf in facts["data_spec"]]
    path_width = max((len(leaf_path) for leaf_path, _, _ in leaves), default=0)
    dtype_width = max((len(dtype) for _, dtype, _ in leaves), default=0)
    lines += [f"    {leaf_path:{path_width}}  {dtype:{dtype_width}}  {shape}" for leaf_path, dtype, shape in leaves]
    return "\n".join(lines)


VERBS = (info,)
