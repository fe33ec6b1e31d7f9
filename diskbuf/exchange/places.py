"""Opening what is imported, here or at a URL."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from diskbuf.errors import OptionError
from diskbuf.exchange.targets import file_system


@contextlib.contextmanager
def opened_for_reading(place: str, storage_options: Mapping[str, Any] | None) -> Iterator[BinaryIO]:
    """Opens a file or an object.

    Raises:
        OptionError: When storage_options are given for a path.
        FileNotFoundError: When it isn't there.
    """
    if "://" in place and not place.startswith("file://"):
        system, path = file_system(place, storage_options)
        with system.open(path, "rb") as file:
            yield cast(BinaryIO, file)
        return
    with local_file(place, storage_options).open("rb") as file:
        yield file


def local_place(place: str, storage_options: Mapping[str, Any] | None) -> Path:
    """Returns the path of something on this machine, which need not be there.

    Raises:
        OptionError: When storage_options are given, or it is at a URL.
    """
    if storage_options:
        raise OptionError(f"storage_options must be left out for a path on this machine, got them with {place!r}.")
    path = place.removeprefix("file://")
    if "://" in path:
        raise OptionError(f"source must be on this machine for this format, got {place!r}. Download it first.")
    return Path(path)


def local_file(place: str, storage_options: Mapping[str, Any] | None) -> Path:
    """Returns the path of a file on this machine.

    Raises:
        OptionError: When storage_options are given, or it is at a URL.
        FileNotFoundError: When it isn't there.
    """
    path = local_place(place, storage_options)
    if not path.is_file():
        raise FileNotFoundError(f"a source must be a file, got {place!r}. Check the path.")
    return path
