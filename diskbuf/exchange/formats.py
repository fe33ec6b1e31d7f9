"""The formats by name and by the endings of their files; each is imported when it is used."""

import dataclasses
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from diskbuf.errors import OptionError
from diskbuf.exchange.contract import Format


class _Entry(NamedTuple):
    """Where a format is. The endings of its files stand here too, so that no module is imported to find one."""

    module: str
    class_name: str
    endings: tuple[str, ...]
    is_written: bool = True


_FORMATS: dict[str, _Entry] = {
    "parquet": _Entry("diskbuf.exchange.parquet", "ParquetFormat", (".parquet", ".pq")),
    "arrow": _Entry("diskbuf.exchange.arrow", "ArrowFormat", (".arrow", ".feather", ".ipc")),
    "csv": _Entry("diskbuf.exchange.csv_text", "CsvFormat", (".csv",)),
    "npz": _Entry("diskbuf.exchange.npz", "NpzFormat", (".npz",)),
    "hdf5": _Entry("diskbuf.exchange.hdf5", "Hdf5Format", (".h5", ".hdf5")),
    "minari": _Entry("diskbuf.exchange.minari_datasets", "MinariFormat", ()),
    "rlds": _Entry("diskbuf.exchange.rlds", "RldsFormat", (".rlds",)),
    "tf-agents": _Entry("diskbuf.exchange.tf_agents_records", "TFAgentsRecordsFormat", (), False),
    "d4rl": _Entry("diskbuf.exchange.d4rl", "D4rlFormat", (), False),
    "sb3": _Entry("diskbuf.exchange.stable_baselines", "StableBaselinesFormat", (), False),
}


def format_names(*, is_written: bool = False) -> tuple[str, ...]:
    """The names of all formats, or of those that are written, too: each one is read."""
    return tuple(name for name, entry in _FORMATS.items() if entry.is_written or not is_written)


def format_in(place: str | os.PathLike[str]) -> str | None:
    """Returns the format of something on this machine by what is in it, or beside it; None where that doesn't tell.

    A folder of steps in the form of RLDS, or their file, has `features.json`; a data set of Minari `metadata.json`, in
    `data` as a rule; a record file of TF-Agents has its spec beside it; a folder may be one of Parquet files.
    """
    path = Path(place)
    folder = path if path.is_dir() else path.parent
    if (folder / "features.json").is_file() and (path.is_dir() or path.suffix == ".tfrecord"):
        return "rlds"
    if path.is_dir():
        if any((path / inside / "metadata.json").is_file() for inside in ("data", "")):
            return "minari"
        return "parquet" if next(path.glob("*.parquet"), None) is not None else None
    return "tf-agents" if path.is_file() and Path(f"{path}.spec").is_file() else None


def format_of(
    place: str | os.PathLike[str],
    name: str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    is_written: bool = False,
) -> Format:
    """Returns the format of a file, as asked for, by its ending, or to read it by what is in it.

    Args:
        place: A path or URL.
        name: One of `format_names`; None goes by the ending.
        options: Fields of the format.
        is_written: Whether the file is to be written, which not all formats are.

    Raises:
        OptionError: When there is no such format, the ending doesn't tell, or an option isn't one of the format's.
    """
    known = format_names(is_written=is_written)
    if name is not None and name not in known:
        advice = " That one is only read." if name in _FORMATS else ""
        raise OptionError(f"format must be one of {', '.join(known)}, got {name!r}.{advice}")
    if name is None:
        text = os.fspath(place).rstrip("/").lower()
        found = [one for one in known if text.endswith(_FORMATS[one].endings or ("\0",))]
        if not found and not is_written and (inside := format_in(place)):
            found = [inside]
        if not found:
            raise OptionError(
                f"format must be named where the ending doesn't tell it, as of {os.fspath(place)!r}: "
                f"one of {', '.join(known)}."
            )
        name = found[0]
    return format_class(name)(**_checked(name, options or {}))


def format_class(name: str) -> type[Format]:
    """Returns the class of a format that there is."""
    entry = _FORMATS[name]
    found: type[Format] = getattr(importlib.import_module(entry.module), entry.class_name)
    return found


def endings_of(name: str) -> tuple[str, ...]:
    """Returns the endings of a format's files, as they are known without importing it."""
    return _FORMATS[name].endings


def _checked(name: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    kind = format_class(name)
    known: list[str] = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    unknown = [option for option in options if option not in known]
    if unknown:
        raise OptionError(
            f"options of the format {name} must be of {', '.join(known) or 'none at all'}, got {', '.join(unknown)}."
        )
    return options
