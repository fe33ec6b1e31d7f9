"""Opening the stores that verbs are given, and finding the leaves that are asked for."""

import difflib
import fnmatch
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from diskbuf.errors import OptionError

if TYPE_CHECKING:
    from diskbuf import UniformReplayBuffer

_MOST_NAMES = 3
_LEAST_LIKENESS = 0.6


def open_store(
    store: str, *, history: bool = False, storage_option: Sequence[str] | None = None
) -> "UniformReplayBuffer":
    """Opens a store for reading.

    Args:
        store: Path or URL.
        history: Whether to read from the oldest step on disk.
        storage_option: Words KEY=VALUE for the file system of a URL.

    Returns:
        The buffer; whoever asked closes it.

    Raises:
        OptionError: When a word is no KEY=VALUE.
        StoreError: When it can't be opened.
    """
    import diskbuf

    return diskbuf.open(store, mode="r", history=history, storage_options=storage_options(storage_option))


def storage_options(words: Sequence[str] | None) -> dict[str, Any] | None:
    """Reads words KEY=VALUE; values that are JSON are what they say, others are text.

    Raises:
        OptionError: When a word is no KEY=VALUE.
    """
    if not words:
        return None
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise OptionError(f"--storage-option must be KEY=VALUE, got {word!r}. Write it like anon=true.")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def leaf_paths(buffer: "UniformReplayBuffer") -> list[str]:
    """The paths of the leaves of a buffer's spec, in their order."""
    from diskbuf.tree import Structure

    return list(Structure(buffer.data_spec).paths)


def chosen_paths(buffer: "UniformReplayBuffer", wanted: Sequence[str] | None) -> list[str]:
    """The leaves that were asked for, all where none was.

    Args:
        buffer: The store.
        wanted: Paths, patterns such as `policy_info/*`, or folders of leaves such as `policy_info`.

    Returns:
        Paths in the order asked for, each once.

    Raises:
        OptionError: When one fits no leaf; names the nearest ones.
    """
    paths = leaf_paths(buffer)
    if not wanted:
        return paths
    chosen: dict[str, None] = {}
    for word in wanted:
        found = [path for path in paths if path == word or (word == "(array)" and not path)]
        found = found or [path for path in paths if path.startswith(f"{word}/") or fnmatch.fnmatchcase(path, word)]
        if not found:
            raise OptionError(unknown("column", word, paths))
        chosen.update(dict.fromkeys(found))
    return list(chosen)


def unknown(what: str, word: str, known: Sequence[str]) -> str:
    """The message for a name that isn't there, with the nearest ones that are, or the first ones where none is near."""
    near = _nearest(word, known)[:_MOST_NAMES]
    if near:
        told = f"Nearest: {', '.join(map(repr, near))}."
    else:
        more = f" and {len(known) - _MOST_NAMES:,} more" if len(known) > _MOST_NAMES else ""
        told = f"There are {', '.join(map(repr, known[:_MOST_NAMES]))}{more}."
    return f"{what} must be one that is there, got {word!r}. {told}"


def _nearest(word: str, known: Sequence[str]) -> list[str]:
    """Names that hold the word, those first of which a part begins with it; else names that are spelt alike."""
    asked = word.strip("*/").casefold()
    folded = {name: name.casefold() for name in known}
    if asked:
        begins = [name for name, low in folded.items() if any(part.startswith(asked) for part in low.split("/"))]
        holds = [name for name, low in folded.items() if asked in low and name not in begins]
        if begins or holds:
            return begins + holds
    likeness = {
        name: max(difflib.SequenceMatcher(None, asked, part).ratio() for part in (low, low.rpartition("/")[2]))
        for name, low in folded.items()
    }
    return sorted((name for name in known if likeness[name] >= _LEAST_LIKENESS), key=lambda name: -likeness[name])
