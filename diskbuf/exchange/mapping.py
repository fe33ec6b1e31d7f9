"""Which column of a foreign file is which leaf of the new store. Knows no format; opens only the mapping file."""

import dataclasses
import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskbuf import specs
from diskbuf.errors import OptionError, SpecError, StoreFormatError
from diskbuf.exchange.bounds import Bounds, bounded, check_bounds
from diskbuf.exchange.contract import ID, LANE, RowSource, SourceColumn
from diskbuf.specs import ArraySpec
from diskbuf.trajectories import PolicyStep, time_step_spec, trajectory_spec
from diskbuf.tree import Structure

FinalObservation = Literal["required", "last"]

_FLAGS = ("terminated", "truncated")
_NESTS = ("observation", "next_observation", "action", "policy_info")
_SINGLES = ("reward", *_FLAGS, "episode")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnMap:
    """Which source column is which leaf, and what becomes of the others.

        >>> ColumnMap(leaves={"observation/speed": "v"}, casts={"observation/speed": "float32"}).leaves
        {'observation/speed': 'v'}

    A leaf of a given spec that isn't named takes the source column of its own name. Columns of single numbers become
    one array when elements are named, `{"v[0]": "x", "v[1]": "y"}` (or `v[0,0]`, …), or in short `{"v": "x,y"}`.

    Attributes:
        leaves: Source columns by the path of the leaf. With `trajectory`, of `observation`, `next_observation`,
            `action` and `policy_info` or leaves below them, and of `reward`, `terminated`, `truncated` and `episode`:
            an episode that ends because the next row is of another was truncated, unless it terminated.
        casts: dtypes by the path of the leaf, for sources of another one. Values that don't come through exactly are
            refused; but the reward of a trajectory is rounded, as that of an environment is.
        bounds: [low, high] by the path of the leaf, the same for all elements: they become those of its spec, and a
            row outside of them is refused. Policies and agents want them of actions.
        drop: Source columns that are left out.
        only_mapped: Whether all other source columns are left out.
        id: The source column of step ids, which are then kept; rows must come in their order. None takes `id` where a
            spec is given, and counts from 0 without one.
        lane: The source column of lanes; the rows of one id must follow each other in their order. None takes `lane`
            where a spec is given.
        spec: The data_spec of the store; None makes a nest of dicts of the leaves that are named, or a trajectory.
        trajectory: Whether rows are transitions, which become the rows of a `Trajectory`.
        final_observation: Where the observation behind the last action of an episode is from, with `trajectory`.
            "required" takes it from `next_observation`. "last" does without: the boundary repeats the last observation
            of an episode that terminated, which nothing is learned from, and the last transition of one that was
            truncated is left out, its observation being the boundary's.

    Raises:
        OptionError: When they are no such things, or contradict each other.
        SpecError: When the spec is none.
    """

    leaves: Mapping[str, str] = dataclasses.field(default_factory=dict)
    casts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    bounds: Bounds = dataclasses.field(default_factory=dict)
    drop: Sequence[str] = ()
    only_mapped: bool = False
    id: str | None = None
    lane: str | None = None
    spec: Any = None
    trajectory: bool = False
    final_observation: FinalObservation = "required"

    def __post_init__(self) -> None:
        for name in ("leaves", "casts"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) or not all(
                isinstance(key, str) and isinstance(entry, str) for key, entry in value.items()
            ):
                raise OptionError(f"{name} must give text by the paths of leaves, got {value!r}.")
        check_bounds(self.bounds)
        if self.bounds and self.spec is not None:
            raise OptionError("bounds must be left out with spec, which has its own. Give them there.")
        for name in ("id", "lane"):
            if not isinstance(getattr(self, name), str | None):
                raise OptionError(f"{name} must be the name of a column, got {getattr(self, name)!r}.")
        if not isinstance(self.drop, list | tuple) or not all(isinstance(name, str) for name in self.drop):
            raise OptionError(f"drop must be a list of column names, got {self.drop!r}.")
        for name in ("only_mapped", "trajectory"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if self.final_observation not in ("required", "last"):
            raise OptionError(f"final_observation must be 'required' or 'last', got {self.final_observation!r}.")
        if self.trajectory and self.spec is not None:
            raise OptionError("spec must be left out with trajectory, which makes one of the columns. Cast its leaves.")
        if self.trajectory and self.lane is not None:
            raise OptionError(
                f"lane must be left out with trajectory, got {self.lane!r}: lanes of episodes have different lengths. "
                "Sort the rows by lane, and they become one."
            )
        if self.spec is not None:
            object.__setattr__(self, "spec", specs.as_spec(self.spec))
        for leaf, dtype in self.casts.items():
            try:
                ArraySpec((), dtype)
            except SpecError as error:
                raise OptionError(f"casts must be dtypes of leaves, got {dtype!r} for {leaf!r}: {error}") from error

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> "ColumnMap":
        """Reads a mapping file, TOML or JSON, with the attributes above as keys; `spec` as `specs.to_json` writes it.

        Raises:
            OptionError: When it isn't one.
            OSError: When it can't be read.
        """
        import tomllib

        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"a mapping must be a TOML or JSON file, got {str(file)!r}. Check the path.")
        try:
            text = file.read_text(encoding="utf-8")
            found = json.loads(text) if file.suffix.lower() == ".json" else tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise OptionError(f"mapping file {file} must be TOML, or JSON with the ending .json: {error}.") from error
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(found, dict) or set(found) - set(known):
            keys = sorted(set(found) - set(known)) if isinstance(found, dict) else type(found).__name__
            raise OptionError(f"mapping file {file} must have the keys {', '.join(known)}, got {keys} besides.")
        try:
            if "spec" in found:
                found["spec"] = specs.from_json(found["spec"])
            return cls(**found)
        except (OptionError, SpecError, StoreFormatError) as error:
            raise OptionError(f"mapping file {file}: {error}") from error


class MappedLeaf(NamedTuple):
    """A leaf, and where its values come from.

    Attributes:
        path: The leaf's.
        column: The source column.
        spec: What the leaf is.
        read_as: The dtype that the column is read as.
        is_rounded: Whether values need not come through a cast exactly.
    """

    path: str
    column: str
    spec: ArraySpec
    read_as: np.dtype[Any]
    is_rounded: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MappedColumns:
    """A mapping that fits a source.

    Attributes:
        leaves: In the order of the spec; with a trajectory, of the roles.
        spec: The data_spec of the store.
        id: The column of ids, None to count from 0.
        lane: The column of lanes, None for one lane.
        dropped: Source columns that are left out.
        is_trajectory: Whether rows are transitions.
        final_observation: As in `ColumnMap`.
        is_bounded: Whether rows are checked against bounds, those that the mapping gives.
    """

    leaves: tuple[MappedLeaf, ...]
    spec: Any
    id: str | None
    lane: str | None
    dropped: tuple[str, ...]
    is_trajectory: bool = False
    final_observation: FinalObservation = "required"
    is_bounded: bool = False

    @property
    def wanted(self) -> dict[str, np.dtype[Any]]:
        """What is read of the source, by column."""
        keys = {name: np.dtype(np.int64) for name in (self.id, self.lane) if name is not None}
        return {leaf.column: leaf.read_as for leaf in self.leaves} | keys


def fit(mapping: ColumnMap, source: RowSource) -> MappedColumns:
    """Finds the source column of each leaf.

    Raises:
        OptionError: When a named column isn't there, a source column is neither mapped nor dropped, or a leaf has no
            column.
        SpecError: When a column's dtype or shape isn't its leaf's; says what to cast.
    """
    for name in (*mapping.leaves.values(), *mapping.drop, *filter(None, (mapping.id, mapping.lane))):
        if name not in source.columns:
            raise OptionError(_unknown("column", name, source.columns, source.name))
    has_spec = mapping.spec is not None
    ids = mapping.id or (ID if has_spec and ID in source.columns else None)
    lanes = mapping.lane or (LANE if has_spec and LANE in source.columns else None)
    for name in filter(None, (ids, lanes)):
        _check_is_key(name, source)
    keys = {name for name in (ids, lanes) if name is not None}
    if mapping.trajectory:
        leaves, spec = _of_trajectory(mapping, source)
    elif has_spec:
        leaves, spec = _of_spec(mapping, source, keys), mapping.spec
    else:
        leaves, spec = _of_names(mapping, source)
    unused = [path for path in mapping.casts if path not in {leaf.path for leaf in leaves}]
    if unused:
        raise OptionError(_unknown("casts of a leaf", unused[0], [leaf.path for leaf in leaves], source.name))
    paths = [leaf.path for leaf in leaves if leaf.path.partition("/")[0] not in _unbounded(mapping)]
    if unused := [path for path in mapping.bounds if path not in paths]:
        raise OptionError(_unknown("bounds of a leaf", unused[0], paths, source.name))
    taken = {leaf.column for leaf in leaves} | keys
    both = [name for name in mapping.drop if name in taken]
    if both:
        raise OptionError(f"drop must leave out columns that are mapped, got {both!r}.")
    rest = [name for name in source.columns if name not in taken]
    if left := [name for name in rest if name not in mapping.drop and not mapping.only_mapped]:
        raise OptionError(
            f"every column of {source.name} must be mapped or dropped, got {', '.join(map(repr, left[:8]))} besides. "
            "Map it, drop it, or take only what is mapped."
        )
    return MappedColumns(
        leaves=tuple(leaves),
        spec=spec,
        id=ids,
        lane=lanes,
        dropped=tuple(rest),
        is_trajectory=mapping.trajectory,
        final_observation=mapping.final_observation,
        is_bounded=bool(mapping.bounds),
    )


def _check_is_key(name: str, source: RowSource) -> None:
    spec = source.columns[name].spec
    if spec is None or spec.shape or spec.dtype.kind not in "iu":
        raise SpecError(f"column {name!r} of {source.name} must be ints, got {source.columns[name].kind}.", path=name)


def _of_spec(mapping: ColumnMap, source: RowSource, keys: Iterable[str]) -> list[MappedLeaf]:
    structure = Structure(mapping.spec)
    for path in mapping.leaves:
        if path not in structure.paths:
            raise OptionError(_unknown("leaf", path, structure.paths, "the spec"))
    found, missing = [], []
    for path, spec in zip(structure.paths, structure.flatten(mapping.spec), strict=True):
        column = mapping.leaves.get(path, path)
        if column not in source.columns or (column in keys and path not in mapping.leaves):
            missing.append(path)
            continue
        found.append(_mapped(path, column, source, spec, mapping.casts))
    if missing:
        raise OptionError(
            f"every leaf must have a column of {source.name}, but {', '.join(map(repr, missing[:8]))} has none. "
            f"Map it to one of {', '.join(map(repr, list(source.columns)[:12]))}."
        )
    return found


def _of_names(mapping: ColumnMap, source: RowSource) -> tuple[list[MappedLeaf], Any]:
    if not mapping.leaves:
        raise OptionError(
            f"a mapping must say which column of {source.name} is which leaf, got none. Its columns are "
            f"{', '.join(map(repr, list(source.columns)[:12]))}."
        )
    pairs = mapping.leaves.items()
    leaves = [_bounded(_mapped(path, column, source, None, mapping.casts), mapping) for path, column in pairs]
    nest = nest_of({leaf.path: leaf.spec for leaf in leaves})
    places = {path: place for place, path in enumerate(Structure(nest).paths)}
    return sorted(leaves, key=lambda leaf: places[leaf.path]), nest


def _of_trajectory(mapping: ColumnMap, source: RowSource) -> tuple[list[MappedLeaf], Any]:
    roles = dict(mapping.leaves)
    for role in (*_NESTS, *_SINGLES):  # by their own names, where nothing else is said
        if role in source.columns and not _below(roles, role):
            roles[role] = role
    for path in roles:
        if path not in _SINGLES and path.partition("/")[0] not in _NESTS:
            raise OptionError(_unknown("leaf", path, (*_NESTS, *_SINGLES), "a trajectory"))
    missing = [role for role in ("observation", "action", "reward") if not _below(roles, role)]
    if missing:
        raise OptionError(
            f"a trajectory must have a column of {source.name} as {missing[0]}, got none. "
            f"Map one of {', '.join(map(repr, list(source.columns)[:12]))}."
        )
    if not _below(roles, "terminated"):
        raise OptionError(
            f"a trajectory must have a column of {source.name} as terminated, got none. Map the one that is true where "
            "an action ended the episode by itself, and as truncated the one where it was cut off, by a time limit say."
        )
    if mapping.final_observation == "required" and not _below(roles, "next_observation"):
        raise OptionError(
            "next_observation must be mapped, because the final observation of an episode is in no other column. "
            "Where there is none, final_observation='last' does without."
        )
    leaves = []
    for path, column in roles.items():
        leaf = _bounded(_mapped(path, column, source, None, mapping.casts), mapping)
        if path == "reward":
            leaf = _as_reward(leaf, source, is_cast=path in mapping.casts)
        elif path in _FLAGS and (leaf.spec.shape or leaf.spec.dtype.kind not in "biu"):
            raise SpecError(
                f"column {column!r} of {source.name} must be true or false to be {path}, "
                f"got {source.columns[column].kind}.",
                path=path,
            )
        elif path == "episode" and (leaf.spec.shape or leaf.spec.dtype.kind not in "iu"):
            raise SpecError(
                f"column {column!r} of {source.name} must be ints to be {path}, got {source.columns[column].kind}.",
                path=path,
            )
        leaves.append(leaf)
    nests = {
        role: nest_of({leaf.path[len(role) + 1 :]: leaf.spec for leaf in leaves if _is_below(leaf.path, role)})
        for role in _NESTS
    }
    if _below(roles, "next_observation"):
        found = specs.differences(nests["observation"], nests["next_observation"])
        if found:
            raise SpecError(f"next_observation must be as observation: {found[0]}.", path="next_observation")
    policy = PolicyStep(nests["action"], (), nests["policy_info"])
    reward = next(leaf.spec for leaf in leaves if leaf.path == "reward")
    return leaves, trajectory_spec(time_step_spec(nests["observation"])._replace(reward=reward), policy)


def _unbounded(mapping: ColumnMap) -> tuple[str, ...]:
    """Roles without bounds of their own: boundaries have a reward of 0, next observations the observations' bounds."""
    return ("next_observation", *_SINGLES) if mapping.trajectory else ()


def _bounded(leaf: MappedLeaf, mapping: ColumnMap) -> MappedLeaf:
    role, *below = leaf.path.split("/")
    of = "/".join(["observation", *below]) if mapping.trajectory and role == "next_observation" else leaf.path
    return leaf._replace(spec=bounded(leaf.spec, of, mapping.bounds))


def _as_reward(leaf: MappedLeaf, source: RowSource, *, is_cast: bool) -> MappedLeaf:
    """A reward stays the float that it is, other numbers become float32; a cast rounds it, as an environment does."""
    if leaf.spec.shape or leaf.spec.dtype.kind not in "biuf":
        raise SpecError(
            f"column {leaf.column!r} of {source.name} must be one number to be the {leaf.path}, "
            f"got {source.columns[leaf.column].kind}.",
            path=leaf.path,
        )
    is_kept = is_cast or leaf.spec.dtype in (np.float32, np.float64)
    dtype = leaf.spec.dtype if is_kept else np.dtype(np.float32)
    return leaf._replace(spec=ArraySpec((), dtype, name="reward"), is_rounded=is_cast)


def _is_below(path: str, role: str) -> bool:
    return path == role or path.startswith(f"{role}/")


def _below(paths: Iterable[str], role: str) -> list[str]:
    return [path for path in paths if _is_below(path, role)]


def _mapped(
    path: str, column: str, source: RowSource, wanted: ArraySpec | None, casts: Mapping[str, str]
) -> MappedLeaf:
    found: SourceColumn = source.columns[column]
    if found.spec is None:
        raise SpecError(
            f"column {column!r} of {source.name} must be numbers or bools of one shape to be leaf {path!r}, "
            f"got {found.kind}. Encode it as numbers, or drop it.",
            path=path,
        )
    dtype = np.dtype(casts[path]) if path in casts else found.spec.dtype if wanted is None else wanted.dtype
    if wanted is not None and (wanted.shape != found.spec.shape or wanted.dtype != dtype):
        raise SpecError(
            f"leaf {path!r} must be {wanted.dtype} {list(wanted.shape)}, got {dtype} {list(found.spec.shape)} "
            f"from column {column!r} of {source.name}.",
            path=path,
        )
    if not found.is_text and dtype != found.spec.dtype and path not in casts:
        raise SpecError(
            f"leaf {path!r} must be {dtype} {list(found.spec.shape)}, got {found.spec.dtype} from column {column!r} of "
            f"{source.name}. Cast it: {path}={dtype}.",
            path=path,
        )
    spec = ArraySpec(found.spec.shape, dtype) if wanted is None else wanted
    return MappedLeaf(path, column, spec, dtype if found.is_text else found.spec.dtype)


def nest_of(leaves: Mapping[str, Any]) -> Any:
    """Returns leaves by path as a nest of dicts; one of the path '' by itself, () for none.

        >>> nest_of({"a/x": 1, "a/y": 2, "b": 3})
        {'a': {'x': 1, 'y': 2}, 'b': 3}

    Raises:
        OptionError: When one of them is where another has leaves.
    """
    if not leaves:
        return ()
    if set(leaves) == {""}:
        return leaves[""]
    nest: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        node = nest
        for folder in folders:
            node = node.setdefault(folder, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or name in node or not path:
            raise OptionError(f"leaves must not lie below each other, got {', '.join(map(repr, leaves))}.")
        node[name] = leaf
    return nest


def cast_exactly(array: NDArray[Any], dtype: np.dtype[Any], *, path: str, where: str) -> NDArray[Any]:
    """Casts an array, every value of which must come through.

    Args:
        array: [N, *shape].
        dtype: Of what is returned.
        path: The leaf, for messages.
        where: Where the array is from, for messages.

    Raises:
        SpecError: When a value doesn't.
    """
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        found = (array.real if array.dtype.kind == "c" and dtype.kind != "c" else array).astype(dtype)
        is_exact = _is_exact(array, found)
    if not is_exact.all():
        value = array[~is_exact].flat[0]
        raise SpecError(
            f"leaf {path!r} must hold its values exactly, but {value} of {where} is none of {dtype}. "
            "Cast it to a wider dtype, or drop the cast.",
            path=path,
        )
    return found


def _is_exact(array: NDArray[Any], found: NDArray[Any]) -> NDArray[np.bool]:
    """Which values came through a cast; NaN comes through as any NaN."""
    if array.dtype.kind == "c" and found.dtype.kind != "c":
        return np.asarray((array.imag == 0) & _is_exact(array.real, found))
    if found.dtype.kind == "c" and array.dtype.kind != "c":
        found = found.real
    if array.dtype.kind in "fc" and found.dtype.kind in "fc":
        return np.asarray((found.astype(array.dtype) == array) | (np.isnan(array) & np.isnan(found)))
    if array.dtype.kind in "iu" and found.dtype.kind in "fc":  # a float may be just outside of the ints it is for
        inside = _is_inside(found, array.dtype)
        return np.asarray(inside & (np.where(inside, found, 0).astype(array.dtype) == array))
    if array.dtype.kind == "f" and found.dtype.kind in "iu":
        return np.asarray(_is_inside(array, found.dtype) & (found == array))
    return np.asarray((found.astype(array.dtype) == array) & ((found < 0) == (array < 0)))


def _is_inside(numbers: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.bool]:
    """Which floats lie in the range of a dtype of ints."""
    limits = np.iinfo(dtype)
    low, high = float(limits.min), float(limits.max)
    below = numbers <= high if high == limits.max else numbers < high  # 2**63 - 1 has no float, and becomes 2**63
    return np.asarray((numbers >= low) & below)


def _unknown(what: str, word: str, known: Iterable[str], where: str) -> str:
    names = list(known)
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.5) or names[:10]
    return f"{what} must be one of those of {where}, got {word!r}. Nearest: {', '.join(map(repr, near))}."
