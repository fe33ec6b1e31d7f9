"""Opening what is imported, here or at a URL."""

import contextlib
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from diskbuf.errors import DiskbufError, OptionError, SpecError
from diskbuf.exchange.targets import file_system

_OF_LIBRARIES = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, RuntimeError),
    *(ValueError, TypeError, LookupError, OverflowError, SyntaxError, OSError),
)
"""What libraries raise when a file isn't what they take it for; not one of them has a type for it."""


@contextlib.contextmanager
def naming_damage(name: str, what: str) -> Iterator[None]:
    """Says which file a library can't read.

    Args:
        name: What it is, for the message.
        what: What it must be.

    Raises:
        SpecError: When it is damaged, or something else.
        OSError: When the system can't read it.
    """
    try:
        yield
    except (DiskbufError, MemoryError):
        raise
    except _OF_LIBRARIES as error:
        if isinstance(error, OSError) and error.errno:
            raise
        said = str(error) or type(error).__name__
        raise SpecError(f"{name} must be {what}, but it can't be read: {said}. Copy the file again.") from error


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
