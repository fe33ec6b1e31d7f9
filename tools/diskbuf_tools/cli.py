"""The command line: parse, call, print. What it knows about a store it asks the package."""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diskbuf


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The words after `diskbuf`; None takes them from the process.

    Returns:
        The exit code: 0; or 1 when `verify` finds a fault, and after an error of diskbuf or of the file system, told in
        one line on stderr.

    Raises:
        SystemExit: With code 2 when the words make no command, with 0 after --help and --version.
    """
    arguments = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code: int = arguments.command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `diskbuf info STORE | head -1` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit would fail flushing it
        return 0
    except (diskbuf.DiskbufError, OSError) as error:
        print(f"diskbuf: {_one_line(error)}", file=sys.stderr)
        return 1
    return code


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"diskbuf: {_one_line(message)}", file=sys.stderr)


def _one_line(message: object) -> str:
    return " ".join(line.strip() for line in str(message).splitlines())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="diskbuf", description="Look into replay buffers on disk.")
    parser.add_argument("--version", action="version", version=f"diskbuf {diskbuf.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _command(commands, _info, "say what a store holds")
    verify = _command(commands, _verify, "check that every file of a store is whole; exit code 1 when one isn't")
    verify.add_argument(
        "--values", action="store_true", help="also check every row against the bounds and step types of its spec"
    )
    repair = _command(commands, _repair, "bring a damaged store to its longest consistent state")
    repair.add_argument("--dry-run", action="store_true", help="only say what would be done")
    repair.add_argument("--no-lock", action="store_true", help="for file systems that don't lock files")
    return parser


def _command(commands: Any, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(function.__name__.strip("_"), help=text, description=text)
    command.add_argument("store", metavar="STORE", help="path of the store")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.set_defaults(command=function)
    return command


def _info(arguments: argparse.Namespace) -> int:
    facts = _facts(arguments.store)
    print(json.dumps(facts) if arguments.json else _as_text(facts))
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    report = diskbuf.verify(arguments.store, values=arguments.values)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(report) | {"is_clean": report.is_clean}))
    else:
        for fault in report.faults:
            print(fault.message)
        state = "clean" if report.is_clean else f"faults: {len(report.faults)}"
        files = f"ids [{report.first_id}, {report.next_id}) in {report.chunks:,} chunk files"
        values = f", values of {report.steps:,} ids" if arguments.values else ""
        print(f"{report.path}: {state}, {files}{values}")
    return 0 if report.is_clean else 1


def _repair(arguments: argparse.Namespace) -> int:
    report = diskbuf.repair(arguments.store, arguments.dry_run, lock=not arguments.no_lock)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(report)))
    else:
        verb = "would stay" if report.is_dry_run else "stay"
        for action in report.actions:
            print(f"would {action}" if report.is_dry_run else action)
        if not report.actions:
            print(f"{report.path}: clean, nothing to do")
        else:
            print(
                f"{report.path}: ids [{report.first_id}, {report.next_id}) {verb}, "
                f"{report.lost:,} steps a lane are lost"
            )
    return 0


def _facts(path: str) -> dict[str, Any]:
    """What `info` tells, in JSON's own types."""
    from diskbuf.tree import Structure  # imports optree, which `diskbuf --version` can do without

    with diskbuf.open(path, mode="r") as buffer, diskbuf.open(path, history=True) as with_history:
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
