"""The formats by name and by the endings of their files; each is imported when it is used."""

import dataclasses
import importlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from diskbuf.errors import OptionError
from diskbuf.exchange.contract import Format


class _Entry(NamedTuple):
    """Where a format is. The endings of its files stand here too, so that no module is imported to find one."""

    module: str
    class_name: str
    endings: tuple[str, ...]


_FORMATS: dict[str, _Entry] = {
    "parquet": _Entry("diskbuf.exchange.parquet", "ParquetFormat", (".parquet", ".pq")),
    "arrow": _Entry("diskbuf.exchange.arrow", "ArrowFormat", (".arrow", ".feather", ".ipc")),
    "csv": _Entry("diskbuf.exchange.csv_text", "CsvFormat", (".csv",)),
    "npz": _Entry("diskbuf.exchange.npz", "NpzFormat", (".npz",)),
    "hdf5": _Entry("diskbuf.exchange.hdf5", "Hdf5Format", (".h5", ".hdf5")),
    "minari": _Entry("diskbuf.exchange.minari_datasets", "MinariFormat", ()),
    "rlds": _Entry("diskbuf.exchange.rlds", "RldsFormat", (".rlds",)),
    "tf-agents": _Entry("diskbuf.exchange.tf_agents_records", "TFAgentsRecordsFormat", ()),
    "d4rl": _Entry("diskbuf.exchange.d4rl", "D4rlFormat", ()),
    "sb3": _Entry("diskbuf.exchange.stable_baselines", "StableBaselinesFormat", ()),
}


def format_names() -> tuple[str, ...]:
    """The names of all formats."""
    return tuple(_FORMATS)


def format_of(
    place: str | os.PathLike[str],
    name: str | None = None,
    *,
    options: Mapping[str, Any] | None = None,
) -> Format:
    """Returns the format of a file, as asked for or by its ending.

    Args:
        place: A path or URL.
        name: One of `format_names`; None goes by the ending.
        options: Fields of the format.

    Raises:
        OptionError: When there is no such format, the ending doesn't tell, or an option isn't one of the format's.
    """
    if name is not None and name not in _FORMATS:
        raise OptionError(f"format must be one of {', '.join(_FORMATS)}, got {name!r}.")
    if name is None:
        text = os.fspath(place).rstrip("/").lower()
        found = [known for known, entry in _FORMATS.items() if text.endswith(entry.endings or ("\0",))]
        if not found:
            raise OptionError(
                f"format must be named where the ending doesn't tell it, as of {os.fspath(place)!r}: "
                f"one of {', '.join(_FORMATS)}."
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
