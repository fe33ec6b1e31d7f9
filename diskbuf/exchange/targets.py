"""Where exports go: under another name first, so that what is at the destination is always whole."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from diskbuf.errors import MissingExtraError, OptionError, StoreExistsError, StoreLockedError
from diskbuf.exchange.contract import Format, Target
from diskbuf.store import files

_PART = ".part"
_ADVICE = {
    errno.ENOSPC: "Make room, or export less of it; nothing was left there",
    errno.EDQUOT: "Make room, or export less of it; nothing was left there",
    errno.EACCES: "Choose another place, or change its permissions",
    errno.EPERM: "Choose another place, or change its permissions",
    errno.EROFS: "Choose another place",
}


@contextlib.contextmanager
def target_of(
    destination: str | os.PathLike[str],
    kind: Format,
    *,
    force: bool,
    storage_options: Mapping[str, Any] | None,
) -> Iterator[Target]:
    """Yields a target, and puts what was written there in its place when the block ends well.

    On this machine a file is written beside the destination and renamed, data and name on the disk; a folder likewise.
    At a URL the object appears when it is complete. When the block raises, nothing is left. One process at a time
    writes to a place.

    Args:
        destination: A path or URL.
        kind: The format.
        force: Whether a file or object that is there is replaced. A folder never is.
        storage_options: For fsspec.

    Raises:
        OptionError: When the format can't go to a URL, or storage_options are given for a path.
        StoreExistsError: When something is there that isn't to be replaced.
        StoreLockedError: When another export to the same place is under way.
        FileNotFoundError: When there is no folder for it.
        OSError: When it can't be written.
    """
    text = os.fspath(destination)
    if "://" in text and not text.startswith("file://"):
        with _remote_target(text, kind, force=force, storage_options=storage_options) as target:
            yield target
        return
    if storage_options:
        raise OptionError(f"storage_options must be left out for a path on this machine, got them with {text!r}.")
    path = Path(os.path.abspath(text.removeprefix("file://")))  # noqa: PTH100 - links stay as they are
    _check_is_free(path, kind, force=force)
    with (
        _folders_of(path, are_made=kind.makes_folders),
        _telling_what_to_do(path),
        _held_temporary(path, is_folder=kind.is_folder) as temporary,
    ):
        try:
            yield Target(path=temporary, name=text, opened=lambda: temporary.open("w+b"))
            _sync(temporary)
            if os.path.lexists(path):
                _check_is_free(path, kind, force=force)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                _remove(temporary)
            raise
        files.sync_folder(path.parent)


@contextlib.contextmanager
def _held_temporary(path: Path, *, is_folder: bool) -> Iterator[Path]:
    """Yields where something is prepared, an empty file or folder that is ours while the block runs.

    It is locked, which tells the export of another process, which must not be disturbed, from what a killed one left.

    Raises:
        StoreLockedError: When another export prepares something there.
    """
    temporary = files.temporary_of(path)
    descriptor: int | None = None
    while descriptor is None:
        descriptor = _made_and_locked(temporary, path, is_folder=is_folder)
    try:
        yield temporary
    finally:
        os.close(descriptor)


def _made_and_locked(temporary: Path, path: Path, *, is_folder: bool) -> int | None:
    """Makes an empty file or folder, and returns the open file that has it locked; None when that is to be tried again.

    What a killed process left there is removed.
    """
    with contextlib.suppress(FileExistsError):
        if is_folder:
            temporary.mkdir()
        else:
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:  # another export has ended in this moment
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        temporary.unlink(missing_ok=True)  # a link, which we never make
        return None
    try:
        _lock(descriptor, path)
        found = os.fstat(descriptor)
        if _is_still(temporary, found):
            is_empty = not any(temporary.iterdir()) if stat.S_ISDIR(found.st_mode) else not found.st_size
            if is_empty and stat.S_ISDIR(found.st_mode) == is_folder:
                return descriptor
            _remove(temporary)
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreLockedError(
            f"destination must be written by one export at a time, but another one to {path} is under way. "
            "Wait for it, or choose another place.",
            path=str(path),
        ) from error
    except OSError:  # a file system that locks nothing
        return


def _is_still(path: Path, found: os.stat_result) -> bool:
    """Whether what was opened at a path is still there."""
    try:
        return os.path.samestat(path.lstat(), found)
    except FileNotFoundError:
        return False


def bytes_at(destination: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None) -> int | None:
    """Returns how large an export is; None where that can't be told."""
    text = os.fspath(destination)
    if "://" in text and not text.startswith("file://"):
        system, inside = file_system(text, storage_options)
        with contextlib.suppress(OSError):
            return int(system.size(inside))
        return None
    path = Path(text.removeprefix("file://"))
    if path.is_dir():
        return sum(entry.stat().st_size for entry in path.rglob("*") if entry.is_file())
    return path.stat().st_size


def file_system(url: str, storage_options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """Returns fsspec's file system of a URL, and the path in it.

    Raises:
        MissingExtraError: When its package isn't installed.
        OptionError: When there is no such protocol, or the options don't fit it.
    """
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url, **dict(storage_options or {}))
    except ImportError as error:
        raise MissingExtraError(
            f"{url} must have the package for its protocol installed: {error}. pip install 'diskbuf[cloud]'."
        ) from error
    except (TypeError, ValueError) as error:
        raise OptionError(f"destination must be a URL that fsspec opens, got {url!r}: {error}.") from error
    return system, cast(str, path)


@contextlib.contextmanager
def _remote_target(
    url: str, kind: Format, *, force: bool, storage_options: Mapping[str, Any] | None
) -> Iterator[Target]:
    if not kind.takes_urls:
        raise OptionError(
            f"destination must be a path on this machine for the format {kind.name}, got {url!r}. "
            "Export to a file and upload it."
        )
    system, path = file_system(url, storage_options)
    if not force and system.exists(path):
        raise _taken(url, "an object", advice="Choose another place, or force it to be replaced.")
    opened: list[tuple[Any, str]] = []

    def open_once() -> BinaryIO:
        opened.append(_begin(system, path))
        return cast(BinaryIO, _Uncommitted(opened[-1][0]))

    try:
        yield Target(path=None, name=url, opened=open_once)
    except BaseException:
        for file, written in opened:
            _discard(file, system, written)
        raise
    for file, written in opened:
        file.close()
        if written != path:
            system.mv(written, path)


def _begin(system: Any, path: str) -> tuple[Any, str]:
    """Opens an object to write to, or beside it a file of a system that shows files before they are whole."""
    from fsspec.spec import AbstractBufferedFile

    file = system.open(path + _PART, "wb")
    if not isinstance(file, AbstractBufferedFile):
        return file, path + _PART
    _discard(file, system, None)  # nothing was sent yet
    return system.open(path, "wb"), path


class _Uncommitted:
    """An object's file that its user closes, but that only we make appear."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True

    def write(self, data: Any) -> int:
        return int(self._file.write(data))

    def tell(self) -> int:
        return int(self._file.tell())

    def flush(self) -> None:
        """Left to the end: a part of an object has a least size."""

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False


def _discard(file: Any, system: Any, path: str | None) -> None:
    """Lets go of a file that must not appear; closing an object's file would make an object of what was sent."""
    from fsspec.spec import AbstractBufferedFile

    if isinstance(file, AbstractBufferedFile):
        with contextlib.suppress(Exception):
            file.discard()
        file.closed = True
        return
    with contextlib.suppress(Exception):
        file.close()
        system.rm(path)


def _check_is_free(path: Path, kind: Format, *, force: bool) -> None:
    if not os.path.lexists(path):
        return
    if path.is_dir():
        if any(path.iterdir()):
            raise _taken(str(path), "a folder with files", advice="Choose another place, or remove it first.")
        if not kind.is_folder:
            raise _taken(str(path), "a folder", advice="Choose another place, or remove it first.")
        return
    if kind.is_folder or not force:
        advice = "Choose another place." if kind.is_folder else "Choose another place, or force it to be replaced."
        raise _taken(str(path), "a file", advice=advice)


def _taken(place: str, what: str, *, advice: str) -> StoreExistsError:
    return StoreExistsError(f"destination must be free, but {place} holds {what}. {advice}", path=place)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    if path.is_dir():
        for entry in path.iterdir():
            _sync(entry)
        files.sync_folder(path)
    else:
        files.sync_file(path)


@contextlib.contextmanager
def _folders_of(path: Path, *, are_made: bool) -> Iterator[None]:
    """Sees to the folders that something is in; those that were made go again when the block raises."""
    missing = [folder for folder in path.parents if not os.path.lexists(folder)]
    if missing and not are_made:
        raise FileNotFoundError(
            f"folder {missing[0]} must exist to hold {path.name}. Make it first, or check the path."
        )
    try:
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
        yield
    except BaseException:
        with contextlib.suppress(OSError):  # one that isn't empty stays
            for folder in missing:
                folder.rmdir()
        raise


@contextlib.contextmanager
def _telling_what_to_do(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0)
        if advice is None or isinstance(error, StoreExistsError) or str(error.strerror).startswith(str(path)):
            raise
        raise OSError(
            error.errno, f"{path} must be writable and have room for the export, but: {error.strerror}. {advice}"
        ) from error
