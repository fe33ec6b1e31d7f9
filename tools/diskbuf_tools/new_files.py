"""Writing a file that is there whole or not at all."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from diskbuf.errors import OptionError


def checked_output(output: str, suffixes: tuple[str, ...], *, force: bool) -> Path:
    """Looks whether a file may be written, before the work begins.

    Args:
        output: Its path.
        suffixes: What it may end in; the case of letters doesn't matter.
        force: Whether one that is there is replaced.

    Returns:
        The path.

    Raises:
        OptionError: When it ends in something else.
        FileExistsError: When it is there, and not to be replaced.
        FileNotFoundError: When its folder isn't there.
        IsADirectoryError: When it is a folder.
    """
    path = Path(output)
    if path.suffix.lower() not in suffixes:
        raise OptionError(f"output must end in {' or '.join(suffixes)}, got {output!r}. Name it so.")
    _check(path, force=force)
    return path


def _check(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"output {path} must be a file, got a folder. Choose another name.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"folder {path.parent} of the output must be there, but is missing. Make it.")
    if not force and path.exists():
        raise FileExistsError(f"output {path} must be a new file, got one that is there. Add --force to replace it.")


@contextlib.contextmanager
def new_file(path: Path, *, force: bool) -> Iterator[Path]:
    """Takes the place of a file once all of it is written; after an error there is nothing new.

    Args:
        path: The file.
        force: Whether one that is there is replaced.

    Yields:
        A path beside it, to be written to.

    Raises:
        FileExistsError: When it is there by then, and not to be replaced.
    """
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}")
    try:
        yield temporary
        _check(path, force=force)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
