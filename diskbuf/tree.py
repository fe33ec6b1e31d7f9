"""Nested structures: taking them apart, putting them together, explaining why one doesn't fit another.

A nest is any mix of dicts (also OrderedDict and defaultdict), tuples, lists, namedtuples and None; whatever else it
holds is a leaf. None and empty containers have no leaves. This is the one module that knows optree.
"""

import collections
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import optree

from diskbuf.errors import SpecError, StoreFormatError

_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_CONTAINERS = frozenset({*_DICTS, tuple, list, type(None)})
_PLAIN_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")


class Structure:
    """The containers of a nest, without its leaves.

    Leaves are in optree's order: dicts and defaultdicts by sorted key, everything else as it stands.

        >>> structure = Structure({"reward": 0.0, "observation": (1, 2)})
        >>> structure.paths
        ('observation/0', 'observation/1', 'reward')
        >>> structure.flatten({"reward": 5.0, "observation": (3, 4)})
        [3, 4, 5.0]

    Attributes:
        treespec: The optree treespec. `treespec.flatten_up_to(items)` is a little faster than `flatten`, but it takes
            a container where a leaf belongs, refuses namedtuples of an equal class, and explains little. Its errors
            are slow too, because they print the items.
        num_leaves: How many leaves there are.
        keys: The way to each leaf: dict keys, positions in tuples and lists, field names of namedtuples.
        paths: The same ways as text, `observation/camera`; a bare leaf has ''.
        file_paths: A relative path for each leaf, safe as a zarr v3 node and as a file name, all of them distinct.

    Raises:
        SpecError: When a dict key is neither a str nor an int.
    """

    __slots__ = ("file_paths", "keys", "latest", "num_leaves", "paths", "treespec")

    treespec: optree.PyTreeSpec
    num_leaves: int
    keys: tuple[tuple[str | int, ...], ...]
    paths: tuple[str, ...]
    file_paths: tuple[str, ...]

    def __init__(self, nest: Any) -> None:
        _refuse_odd_keys(nest, ())
        self.treespec = _treespec(nest)
        self.latest = self.treespec  # The one that fitted last: the same, with other classes of equal namedtuples.
        self.num_leaves = self.treespec.num_leaves
        self.keys = tuple(
            tuple(entry.field if isinstance(entry, optree.NamedTupleEntry) else entry.entry for entry in accessor)
            for accessor in self.treespec.accessors()
        )
        self.paths = tuple(map(_path, self.keys))
        self.file_paths = tuple("/".join(map(_file_name, keys)) or "data" for keys in self.keys)

    def flatten(self, items: Any) -> list[Any]:
        """Returns the leaves of items, in the order of `paths`.

        A namedtuple of another class is taken when its type name and fields are equal, and any dict for a dict;
        everything else must be exactly as in this structure. Leaves are handed out as they are, not copied.

        Raises:
            SpecError: When items has another structure; the message shows both, where they part, and the fix.
        """
        try:
            leaves = self.latest.flatten_up_to(items)
        except ValueError:  # Perhaps only the class of a namedtuple; if not, the slow way says what is wrong.
            return self._flatten_slowly(items)
        return self._flatten_slowly(items) if any(map(_is_container_type, map(type, leaves))) else leaves

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """Returns a nest of this structure with these leaves, dict keys in their first order.

        Raises:
            ValueError: When there are more or fewer leaves than `num_leaves`.
        """
        return self.treespec.unflatten(leaves)

    def to_json(self) -> Any:
        """Returns the structure as a JSON value; `from_json` reads it back.

        A defaultdict is written as a dict, because its factory is code.
        """
        return _to_json(self.unflatten([_LEAF] * self.num_leaves))

    @classmethod
    def from_json(cls, value: Any) -> "Structure":
        """Returns the structure that `to_json` wrote.

        The class of a namedtuple is taken from its module when that is imported already, or diskbuf's own. Where there
        is none of that name with these fields, an equal class is made; reading again gives that class.

        Raises:
            StoreFormatError: When the value isn't one that `to_json` writes.
        """
        try:
            return cls(_from_json(value))
        except (RecursionError, SpecError) as error:
            raise StoreFormatError(f"the structure of a spec can't be read: {error}.") from error

    def __eq__(self, other: object) -> bool:
        return self.treespec == other.treespec if isinstance(other, Structure) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.treespec)

    def __repr__(self) -> str:
        return f"Structure({describe(self.unflatten([_LEAF] * self.num_leaves))})"

    def _flatten_slowly(self, items: Any) -> list[Any]:
        expected = self.unflatten([_LEAF] * self.num_leaves)
        pairs, mismatches = compare(expected, items)
        if mismatches:
            raise _explained(mismatches)
        fitting = _treespec(items)
        if fitting.paths() == self.treespec.paths():  # Otherwise an OrderedDict has the leaves in another order.
            self.latest = fitting
        leaves = {pair.keys: pair.given for pair in pairs}
        return [leaves[keys] for keys in self.keys]


class Pair(NamedTuple):
    """Two leaves in the same place of two nests."""

    keys: tuple[str | int, ...]
    expected: Any
    given: Any

    @property
    def path(self) -> str:
        """The place as text, `observation/camera`."""
        return _path(self.keys)


class Mismatch(NamedTuple):
    """A place where two nests differ in structure: what is there in each, as text, and how to mend the given one."""

    keys: tuple[str | int, ...]
    expected: str
    given: str
    fix: str

    @property
    def path(self) -> str:
        """The place as text, `observation/camera`."""
        return _path(self.keys)


def compare(expected: Any, given: Any) -> tuple[list[Pair], list[Mismatch]]:
    """Walks two nests side by side.

    Dicts of all kinds count as equal, and so do namedtuples with equal type name and fields.

    Returns:
        The leaves that stand in the same place of both, and the places where the structures differ. Where there are no
        such places, the pairs are all the leaves, in no particular order.
    """
    pairs: list[Pair] = []
    mismatches: list[Mismatch] = []
    _compare(expected, given, (), pairs, mismatches)
    return pairs, mismatches


def describe(nest: Any) -> str:
    """Returns a nest as one short line, `{'camera': uint8 [84, 84, 4], 'lidar': float32 [5]}`.

    Leaves with a shape and a dtype are shown by them, others by their type; deep and long nests are cut with '...'.
    """
    return _describe(nest, depth=5)


class _Leaf:
    """Stands for any leaf where only the structure is known."""

    def __repr__(self) -> str:
        return "array"


_LEAF = _Leaf()


@functools.lru_cache(maxsize=256)
def _is_container_type(cls: type) -> bool:
    return cls in _CONTAINERS or optree.is_namedtuple_class(cls)


def _is_container(node: Any) -> bool:
    cls: Any = type(node)
    return _is_container_type(cls)


def _treespec(nest: Any) -> optree.PyTreeSpec:
    return optree.tree_structure(nest, is_leaf=lambda node: not _is_container(node))


def _children(node: Any) -> dict[Any, Any]:
    """The children of a container by key, position or field name."""
    if node is None:
        return {}
    if isinstance(node, dict):
        return node
    if optree.is_namedtuple_instance(node):
        return dict(zip(node._fields, node, strict=True))
    return dict(enumerate(node))


def _path(keys: Sequence[str | int]) -> str:
    return "/".join(map(str, keys))


def _refuse_odd_keys(nest: Any, keys: tuple[str | int, ...]) -> None:
    if not _is_container(nest):
        return
    for key, child in _children(nest).items():
        if type(key) not in {str, int}:
            where = f"at {_path(keys)!r}" if keys else "at the top"
            advice = f"Use {str(key)!r} instead."
            raise SpecError(
                f"a dict key of a spec must be a str or an int, got {key!r} {where}. {advice}", path=_path(keys) or None
            )
        _refuse_odd_keys(child, (*keys, key))


def _file_name(key: str | int) -> str:
    """One component of a zarr path. `urllib.parse.unquote` undoes it, save for the empty key, which is '%'."""
    if isinstance(key, int):
        return str(key)
    if not key:
        return "%"
    name = "".join(chr(b) if b in _PLAIN_BYTES else f"%{b:02X}" for b in key.encode("utf-8", "surrogatepass"))
    # Zarr v3 reserves "zarr.json", names that begin with "__" and names of periods alone; names that begin with "."
    # are ours (.diskbuf), a last "." is lost on Windows, and a number in a string must not look like an int.
    if name.startswith((".", "__")) or name == "zarr.json" or re.fullmatch(r"0|-?[1-9][0-9]*", name):
        name = f"%{ord(name[0]):02X}{name[1:]}"
    return f"{name[:-1]}%2E" if name.endswith(".") else name


def _compare(
    expected: Any, given: Any, keys: tuple[str | int, ...], pairs: list[Pair], mismatches: list[Mismatch]
) -> None:
    if not _is_container(expected) and not _is_container(given):
        pairs.append(Pair(keys, expected, given))
        return
    if not _same_container(expected, given):
        mismatches.append(Mismatch(keys, describe(expected), describe(given), _fix(expected, given)))
        return
    ours, theirs = _children(expected), _children(given)
    for key, child in ours.items():
        if key in theirs:
            _compare(child, theirs[key], (*keys, key), pairs, mismatches)
        else:
            mismatches.append(Mismatch((*keys, key), describe(child), "nothing", f"Add the key {key!r}."))
    for key, child in theirs.items():
        if key not in ours:
            mismatches.append(Mismatch((*keys, key), "nothing", describe(child), f"Leave the key {key!r} out."))


def _same_container(expected: Any, given: Any) -> bool:
    if type(expected) in _DICTS:
        return type(given) in _DICTS
    if optree.is_namedtuple_instance(expected):
        return optree.is_namedtuple_instance(given) and _kind(expected) == _kind(given)
    return type(expected) is type(given) and (expected is None or len(expected) == len(given))


def _kind(node: Any) -> tuple[str, tuple[str, ...]]:
    return type(node).__name__, node._fields


def _fix(expected: Any, given: Any) -> str:
    """One thing to do about a given node that has to become like the expected one."""
    if type(given) in {tuple, list} and len(given) == 1 and not compare(expected, given[0])[1]:
        return f"Remove the extra {type(given).__name__} around it."
    if type(expected) in {tuple, list} and len(expected) == 1 and not compare(expected[0], given)[1]:
        return f"Wrap it in a {type(expected).__name__} of one."
    if not _is_container(expected):
        return "Pass one array; numpy.asarray makes one of a list." if type(given) is list else "Pass one array."
    if not _children(expected):
        return f"Pass {describe(expected)}, or give the data_spec leaves to hold it."
    if _is_container(given) and not _children(given):
        return f"Fill it in, or have {describe(given)} in the data_spec too."
    return _conversion(expected, given)


def _conversion(expected: Any, given: Any) -> str:
    name = type(expected).__name__
    if isinstance(expected, dict):
        return "Pass a dict with these keys."
    if not isinstance(given, tuple | list) or len(given) != len(expected):
        return f"Pass a {name} of {len(expected)}."
    if not optree.is_namedtuple_instance(expected):
        return f"Convert it with {name}(...)."
    return f"Pass a {name}." if optree.is_namedtuple_instance(given) else f"Convert it with {name}(*...)."


def _explained(mismatches: Sequence[Mismatch]) -> SpecError:
    first = mismatches[0]
    problems = [_problem(mismatch) for mismatch in mismatches[:3]]
    if len(mismatches) > len(problems):
        problems.append(f"and {len(mismatches) - len(problems)} more")
    return SpecError(f"{'; '.join(problems)}. {first.fix}", path=first.path if first.keys else None)


def _problem(mismatch: Mismatch) -> str:
    place = f"items at {mismatch.path!r}" if mismatch.keys else "items"
    expected = "an array" if mismatch.expected == repr(_LEAF) else mismatch.expected
    return f"{place} must be {expected}, got {mismatch.given}"


def _describe(nest: Any, *, depth: int) -> str:
    if not _is_container(nest):
        return _describe_leaf(nest)
    if nest is None:
        return "None"
    children = _children(nest)
    if depth == 0 and children:
        body = ["..."]
    else:
        named = isinstance(nest, dict) or optree.is_namedtuple_instance(nest)
        separator = ": " if isinstance(nest, dict) else "="
        body = []
        for key, child in list(children.items())[:8]:
            text = _describe(child, depth=depth - 1)
            label = repr(key) if isinstance(nest, dict) else str(key)
            body.append(f"{label}{separator}{text}" if named else text)
        if len(children) > len(body):
            body.append("...")
    if isinstance(nest, dict):
        return f"{{{', '.join(body)}}}"
    if isinstance(nest, list):
        return f"[{', '.join(body)}]"
    if optree.is_namedtuple_instance(nest):
        return f"{type(nest).__name__}({', '.join(body)})"
    return f"({body[0]},)" if len(body) == 1 else f"({', '.join(body)})"


def _describe_leaf(leaf: Any) -> str:
    if leaf is _LEAF:
        return "array"
    try:
        return f"{getattr(leaf.dtype, 'name', leaf.dtype)} {list(leaf.shape)}"
    except (AttributeError, TypeError, ValueError):
        return type(leaf).__name__


def _to_json(nest: Any) -> Any:
    if nest is _LEAF:
        return "leaf"
    if nest is None:
        return None
    if isinstance(nest, dict):
        kind = "OrderedDict" if type(nest) is collections.OrderedDict else "dict"
        return {"type": kind, "items": [[key, _to_json(child)] for key, child in nest.items()]}
    children = [_to_json(child) for child in nest]
    if not optree.is_namedtuple_instance(nest):
        return {"type": type(nest).__name__, "items": children}
    cls = type(nest)
    where = {"module": cls.__module__, "qualname": cls.__qualname__, "fields": list(cls._fields)}
    return {"type": "namedtuple", **where, "items": children}


def _from_json(value: Any) -> Any:
    if value == "leaf":
        return _LEAF
    if value is None:
        return None
    kind, items = (value.get("type"), value.get("items")) if isinstance(value, dict) else (None, None)
    reader = _READERS.get(kind) if isinstance(kind, str) else None
    if reader is None or not isinstance(items, list):
        raise _malformed(value)
    return reader(value, items)


def _read_dict(value: Mapping[str, Any], items: list[Any], kind: type[dict[Any, Any]]) -> Any:
    if not all(isinstance(item, list) and len(item) == 2 and type(item[0]) in {str, int} for item in items):
        raise _malformed(value)
    nest = kind((key, _from_json(child)) for key, child in items)
    if len(nest) != len(items):
        raise _malformed(value)
    return nest


def _read_namedtuple(value: Mapping[str, Any], items: list[Any]) -> Any:
    module, qualname, fields = value.get("module"), value.get("qualname"), value.get("fields")
    if not isinstance(fields, list) or not all(isinstance(part, str) for part in (module, qualname, *fields)):
        raise _malformed(value)
    if len(fields) != len(items):
        raise _malformed(value)
    try:
        cls = _imported(module, qualname, tuple(fields)) or _made(module, qualname, tuple(fields))
    except ValueError as error:  # A name or a field that no namedtuple can have.
        raise _malformed(value) from error
    return cls._make(map(_from_json, items))


_READERS: dict[str, Callable[[Mapping[str, Any], list[Any]], Any]] = {
    "dict": functools.partial(_read_dict, kind=dict),
    "OrderedDict": functools.partial(_read_dict, kind=collections.OrderedDict),
    "list": lambda _, items: [_from_json(item) for item in items],
    "tuple": lambda _, items: tuple(_from_json(item) for item in items),
    "namedtuple": _read_namedtuple,
}


def _imported(module: Any, qualname: Any, fields: tuple[str, ...]) -> Any:
    """The namedtuple class of that name with these fields, None where there is none.

    Looks in modules that are imported already and in diskbuf's own: a store must not be able to run a module's import,
    nor to bring TensorFlow in because it holds a Trajectory of TF-Agents.
    """
    try:
        is_own = module.partition(".")[0] == __package__
        found: Any = importlib.import_module(module) if is_own else sys.modules[module]
        for name in qualname.split("."):
            found = getattr(found, name)
    except (Exception, SystemExit):  # noqa: BLE001 - a module may fail in any way; an equal class does as well.
        return None
    same = optree.is_namedtuple_class(found) and _same_class(found, qualname, fields)
    return found if same else None


def _same_class(cls: Any, qualname: str, fields: tuple[str, ...]) -> bool:
    return bool(cls._fields == fields and cls.__name__ == qualname.rpartition(".")[2])


@functools.cache
def _made(module: Any, qualname: Any, fields: tuple[str, ...]) -> Any:
    """A namedtuple class that says it is module.qualname, and that can be pickled although it can't be imported."""
    name = qualname.rpartition(".")[2]
    base: Any = collections.namedtuple(name, fields, rename=True)  # type: ignore[misc]  # noqa: PYI024
    if base._fields != fields:  # rename=True lets _0, _1 ... through, but only in their own places.
        raise ValueError(f"the fields of a namedtuple must be identifiers, got {fields}")
    body = {
        "__slots__": (),
        "__module__": module,
        "__qualname__": qualname,
        "__reduce__": lambda self: (_restored, (module, qualname, fields, tuple(self))),
    }
    return type(name, (base,), body)


def _restored(module: str, qualname: str, fields: tuple[str, ...], values: tuple[Any, ...]) -> Any:
    """Unpickles an instance of a made class, in a process where the class may well be importable."""
    cls = _imported(module, qualname, fields) or _made(module, qualname, fields)
    return cls._make(values)


def _malformed(value: Any) -> StoreFormatError:
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    return StoreFormatError(f"the structure of a spec must be what Structure.to_json writes, got {shown}.")
