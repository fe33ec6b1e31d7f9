"""What export and import share with the formats: rows and episodes on their way, and what a format has to do.

A format is a class derived from `Format`, one line in `diskbuf.exchange.formats`, and as few as two methods:

- `export` takes `StoreRows`, which yields the chosen rows block by block (`row_blocks` for tables, `grid_blocks` for
  arrays, `episodes` for formats that keep episodes), and a `Target` to write to. It knows nothing of temporary names,
  of what is at the destination, of progress.
- `open_source` returns a `RowSource` (columns of rows, which a mapping brings to leaves) or an `EpisodeSource`
  (episodes, which become rows of a `Trajectory`). It knows nothing of mappings, casts, lanes, staging.

The options of a format are the fields of its dataclass.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from diskbuf import specs
from diskbuf.errors import OptionError, SpecError, StoreFormatError
from diskbuf.specs import ArraySpec
from diskbuf.trajectories import PolicyStep, StepType, Trajectory, time_step_spec, trajectory_spec
from diskbuf.tree import Structure

if TYPE_CHECKING:
    from diskbuf.exchange.store_rows import StoreRows

ID, LANE = "id", "lane"
"""The columns of a table that say which row it is. No leaf's column is called so."""

CARRIED_KEY = "diskbuf_export"
"""Under which a file carries what its store was."""

_CARRIED_FORMAT = 1

Progress = Callable[[int, int], object]
"""Called with (steps done, steps in all), all lanes counted."""


# ---- episodes, and the rows they are


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """An episode of T actions.

    Attributes:
        observations: Nest of [T + 1, *shape] arrays, the final observation included; [T, *shape] where `is_open`.
        actions: Nest of [T, *shape] arrays.
        rewards: [T] numbers, for these actions.
        terminated: Whether the last action ended it.
        truncated: Whether it was cut off after the last action.
        discounts: [T] float32; None for 1, and 0 for the last where it terminated.
        policy_info: Nest of [T, *shape] arrays, () for none.
        lane: Which lane it is from, where it was in a store.
        first_id: Id of its first step, where it was in a store.
    """

    observations: Any
    actions: Any
    rewards: NDArray[Any]
    terminated: bool
    truncated: bool
    discounts: NDArray[Any] | None = None
    policy_info: Any = ()
    lane: int = 0
    first_id: int = 0

    @property
    def is_open(self) -> bool:
        """Whether it had not ended when the data did."""
        return not (self.terminated or self.truncated)

    def rows(self, reward_dtype: DTypeLike = np.float32) -> Trajectory:
        """Its rows, leaves [T + 1, *shape]; see `trajectories_of_episode`."""
        return trajectories_of_episode(
            self.observations,
            self.actions,
            self.rewards,
            terminated=self.terminated,
            truncated=self.truncated,
            discounts=self.discounts,
            policy_info=self.policy_info,
            reward_dtype=reward_dtype,
        )


def trajectories_of_episode(
    observations: Any,
    actions: Any,
    rewards: NDArray[Any],
    *,
    terminated: bool,
    truncated: bool,
    discounts: NDArray[Any] | None = None,
    policy_info: Any = (),
    reward_dtype: DTypeLike = np.float32,
) -> Trajectory:
    """Returns the rows of one episode, as a driver would have collected them.

    Row t holds observation t, action t, and the reward for action t. Behind the T transitions stands the boundary row
    with the final observation; its action and policy_info, which mean nothing, are those of the last transition, its
    reward is 0 and its discount 1.

        >>> rows = trajectories_of_episode(
        ...     np.arange(3.0), np.array([7, 8]), np.array([0.5, 2.0]), terminated=True, truncated=False
        ... )
        >>> rows.observation.tolist(), rows.action.tolist(), rows.reward.tolist()
        ([0.0, 1.0, 2.0], [7, 8, 8], [0.5, 2.0, 0.0])
        >>> rows.step_type.tolist(), rows.next_step_type.tolist(), rows.discount.tolist()
        ([0, 1, 2], [1, 2, 0], [1.0, 0.0, 1.0])

    Args:
        observations: Nest of [T + 1, *shape] arrays, the final observation included. Of an episode that hasn't ended
            [T, *shape], because the observation behind its last action is in no row yet.
        actions: Nest of [T, *shape] arrays, T at least 1.
        rewards: [T] numbers, rounded to `reward_dtype`.
        terminated: Whether the last action ended the episode.
        truncated: Whether it was cut off after the last action. Where both are, it terminated.
        discounts: [T] numbers, rounded to float32; None for 1, and 0 for the last where it terminated.
        policy_info: Nest of [T, *shape] arrays.
        reward_dtype: Of the rewards; float32 is what an environment's are.

    Returns:
        Leaves [T + 1, *shape], those of an episode that hasn't ended [T, *shape]. Observations aren't copied.

    Raises:
        SpecError: When lengths don't fit, rewards aren't [T] numbers, or discounts contradict the end.
    """
    has_ended = terminated or truncated
    given = np.asarray(rewards)
    if given.ndim != 1 or given.dtype.kind not in "biuf" or not len(given):
        raise SpecError(
            f"rewards of an episode must be one number for each of its actions, got {given.dtype} {list(given.shape)}.",
            path="reward",
        )
    steps = len(given)
    rows = steps + 1 if has_ended else steps
    _check_lengths("observation", observations, rows, f"the {steps} actions{' and one behind them' * has_ended}")
    _check_lengths("action", actions, steps, f"the {steps} rewards")
    _check_lengths("policy_info", policy_info, steps, f"the {steps} rewards")
    step_type = np.full(rows, StepType.MID, np.int32)
    next_step_type = np.full(rows, StepType.MID, np.int32)
    step_type[0] = StepType.FIRST
    reward = np.zeros(rows, reward_dtype)
    reward[:steps] = given
    discount = np.ones(rows, np.float32)
    if discounts is not None:
        discount[:steps] = _checked_discounts(np.asarray(discounts), steps, terminated=terminated)
    elif terminated:
        discount[steps - 1] = 0
    if has_ended:
        next_step_type[steps - 1] = StepType.LAST
        step_type[steps], next_step_type[steps] = StepType.LAST, StepType.FIRST
        actions, policy_info = _one_longer(actions), _one_longer(policy_info)
    return Trajectory(step_type, observations, actions, policy_info, next_step_type, reward, discount)


def _check_lengths(name: str, nest: Any, length: int, like: str) -> None:
    structure = Structure(nest)
    for path, leaf in zip(structure.paths, structure.flatten(nest), strict=True):
        found = np.shape(leaf)
        if found[:1] != (length,):
            where = f"{name}/{path}" if path else name
            raise SpecError(
                f"leaf {where!r} of an episode must have {length} rows, as many as {like}, got {list(found)}.",
                path=where,
            )


def _checked_discounts(discounts: NDArray[Any], steps: int, *, terminated: bool) -> NDArray[np.float32]:
    if discounts.shape != (steps,) or discounts.dtype.kind not in "biuf":
        raise SpecError(
            f"discounts must be [{steps}] numbers, got {discounts.dtype} {list(discounts.shape)}.", path="discount"
        )
    rounded = discounts.astype(np.float32)
    if (rounded[-1] == 0) != terminated:
        raise SpecError(
            f"the last discount of an episode must be 0 where it terminated and only there, got {rounded[-1]} with "
            f"terminated {terminated}.",
            path="discount",
        )
    return rounded


def _one_longer(nest: Any) -> Any:
    structure = Structure(nest)
    return structure.unflatten([np.concatenate([leaf, leaf[-1:]]) for leaf in structure.flatten(nest)])


# ---- what a file carries


@dataclasses.dataclass(frozen=True, kw_only=True)
class Carried:
    """What a file carries of the store it was exported from, so that an import restores that store.

    Attributes:
        spec: The whole data_spec.
        names: For each exported leaf its name in the file, by its path.
        lanes: The exported lanes, by their number in the store.
        batch_size: How many lanes the store had.
        first_id: First exported id.
        window_first_id: Where the window began, which is behind it where history was exported.
        runs: First id of each run, ascending.
        max_length: The store's.
        keep_history: The store's.
        metadata: The user's own JSON.
        is_grid: Whether there is a row for each id and lane; not where episodes were chosen.
    """

    spec: Any
    names: dict[str, str]
    lanes: tuple[int, ...]
    batch_size: int
    first_id: int
    window_first_id: int
    runs: tuple[int, ...]
    max_length: int | None
    keep_history: bool
    metadata: Any
    is_grid: bool

    @property
    def is_whole(self) -> bool:
        """Whether every leaf of the spec is there."""
        return set(self.names) == set(Structure(self.spec).paths)

    def to_json(self) -> dict[str, Any]:
        """It as a JSON value."""
        value = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return value | {
            "format": _CARRIED_FORMAT,
            "spec": specs.to_json(self.spec),
            "lanes": list(self.lanes),
            "runs": list(self.runs),
        }

    @classmethod
    def from_json(cls, value: Any, *, name: str) -> "Carried":
        """Reads it back.

        Args:
            value: What `to_json` gave.
            name: The file, for messages.

        Raises:
            StoreFormatError: When a newer version wrote it, or it isn't whole.
        """
        written = value.get("format") if isinstance(value, Mapping) else None
        if isinstance(written, int) and written > _CARRIED_FORMAT:
            raise StoreFormatError(
                f"the export {name} must be of format {_CARRIED_FORMAT} at most, got {written}. Update diskbuf.",
                path=name,
                is_newer=True,
            )
        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(value, Mapping) or set(value) != fields | {"format"}:
            raise StoreFormatError(f"the key {CARRIED_KEY!r} of {name} must be what an export writes.", path=name)
        try:
            _check_carried(value)
            found = cls(
                **{
                    **{field: value[field] for field in fields},
                    "spec": specs.from_json(value["spec"]),
                    "lanes": tuple(int(lane) for lane in value["lanes"]),
                    "runs": tuple(int(run) for run in value["runs"]),
                    "names": {str(path): str(column) for path, column in value["names"].items()},
                }
            )
            if unknown := set(found.names) - set(Structure(found.spec).paths):
                raise ValueError(f"names must be those of its leaves, got {sorted(unknown)}")
            return found
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            raise StoreFormatError(
                f"the key {CARRIED_KEY!r} of {name} must be what an export writes: {error}.", path=name
            ) from error


def _check_carried(value: Mapping[str, Any]) -> None:
    """Refuses what isn't of the types that an export writes."""
    ids = [value["first_id"], value["window_first_id"], value["batch_size"], *value["lanes"], *value["runs"]]
    if value["max_length"] is not None:
        ids.append(value["max_length"])
    if any(type(entry) is not int or not 0 <= entry < 2**63 for entry in ids):
        raise ValueError("ids, lanes and lengths must be ints of at least 0")
    if not value["lanes"] or not value["batch_size"] or value["max_length"] == 0:
        raise ValueError("lanes and lengths must be at least 1")
    if any(type(value[name]) is not bool for name in ("keep_history", "is_grid")):
        raise ValueError("keep_history and is_grid must be true or false")


# ---- exporting


class RowBlock(NamedTuple):
    """Rows of a table, by id and then lane.

    Attributes:
        ids: [N] int64.
        lanes: [N] int32, by their number in the store.
        columns: For each chosen leaf [N, *shape], by its path.
    """

    ids: NDArray[np.int64]
    lanes: NDArray[np.int32]
    columns: dict[str, NDArray[Any]]


class Target:
    """Where a format writes: a file or an empty folder that gets its right name when all is well.

    Attributes:
        path: The file or the folder, which is empty; None at a URL.
        name: The destination, for messages.
    """

    def __init__(self, *, path: Path | None, name: str, opened: Callable[[], BinaryIO]) -> None:
        self.path = path
        self.name = name
        self._opened = opened

    @contextlib.contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Opens the file to write to, once."""
        with self._opened() as file:
            yield file

    def local_path(self) -> Path:
        """The path, for formats that can't write to a URL."""
        if self.path is None:
            raise OptionError(f"destination must be a path on this machine for this format, got {self.name!r}.")
        return self.path


# ---- importing


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceColumn:
    """A column of a foreign file.

    Attributes:
        spec: What a row of it is; None where that is nothing that a leaf can hold.
        kind: What it is in the words of its format, for messages (`list<item: double>`, `object`).
        is_text: Whether it is text, which is read as whatever dtype is asked for; `spec` then is what it looks like.
    """

    spec: ArraySpec | None
    kind: str
    is_text: bool = False


class Source(abc.ABC):
    """Something to import, open; a context manager.

    Attributes:
        name: For messages.
        metadata: JSON to keep with the store, where the source has such and the caller gives none; else None.
    """

    name: str
    metadata: Any = None

    def close(self) -> None:  # noqa: B027 - not every source has something to close
        """Closes its files."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RowSource(Source):
    """Columns of rows.

    Attributes:
        columns: What there is, by name.
        looks_like: A format that its columns' names are those of, None where they are of no other.
        carried: What it was exported from, None for a foreign file.
        num_rows: How many rows there are, None where that isn't known before they are read.
    """

    columns: dict[str, SourceColumn]
    looks_like: str | None = None
    carried: Carried | None = None
    num_rows: int | None = None

    def num_lanes_of(self, names: Iterable[str]) -> int:  # noqa: ARG002
        """Returns how many rows in turn are lanes of one id, where no column says so: 1 in a table.

        Args:
            names: Columns that are wanted.
        """
        return 1

    @abc.abstractmethod
    def blocks(self, wanted: Mapping[str, np.dtype[Any]]) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields the rows in order, a few MiB at a time; columns that aren't wanted are not read.

        Args:
            wanted: By name of columns that have a spec, what they are read as: another dtype than the spec's only
                where `is_text`.

        Yields:
            For each of them [N, *shape] of its dtype.

        Raises:
            SpecError: When a row is missing a value, or has one that doesn't fit; names where it is.
        """


class EpisodeSource(Source):
    """Episodes, which become rows of a `Trajectory` in one lane, one after the other.

    Attributes:
        observation_spec: Nest of ArraySpec.
        action_spec: Nest of ArraySpec.
        policy_info_spec: Nest of ArraySpec, () for none.
        reward_spec: Of the rewards, whose dtype is kept; float32 where a source doesn't say.
        num_steps: How many actions there are in all, None where that isn't known.
        unmapped: What is in the source and would be left out, by name, and what it is; an import refuses unless the
            caller drops these by name.
    """

    observation_spec: Any
    action_spec: Any
    policy_info_spec: Any = ()
    reward_spec: ArraySpec = ArraySpec((), np.float32, name="reward")
    num_steps: int | None = None
    unmapped: Mapping[str, str] = {}

    @property
    def data_spec(self) -> Trajectory:
        """The spec of the rows."""
        steps = time_step_spec(self.observation_spec)._replace(reward=self.reward_spec)
        return trajectory_spec(steps, PolicyStep(self.action_spec, (), self.policy_info_spec))

    @abc.abstractmethod
    def episodes(self) -> Iterator[Episode]:
        """Yields the episodes in order, one in memory at a time.

        Only the last may be open: an observation that was never seen can't be made up.
        """


class Format(abc.ABC):
    """A format. Its options are the fields of the dataclass that derives from it.

    Attributes:
        name: As `--format` has it.
        endings: Of the files, in lower case with the dot; () for a format that must be named.
        extra: The extra of diskbuf that brings its package, None where none is needed.
        takes_urls: Whether it is written to and read from what fsspec opens.
        is_folder: Whether an export is a folder.
        carries: Whether an export says what its store was, so that an import restores it.
        makes_folders: Whether an export makes the folders that it is in, because they are a part of its name.
    """

    name: ClassVar[str]
    endings: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str | None] = None
    takes_urls: ClassVar[bool] = False
    is_folder: ClassVar[bool] = False
    carries: ClassVar[bool] = False
    makes_folders: ClassVar[bool] = False

    def export(self, rows: "StoreRows", target: Target) -> None:  # noqa: ARG002
        """Writes rows.

        Raises:
            OptionError: When the format can't hold them; names the leaf and what to do.
            SpecError: When they aren't what the format needs, a `Trajectory` say.
            OSError: When it can't be written.
        """
        raise OptionError(f"format must be one that diskbuf writes, got {self.name!r}, which it only reads.")

    def open_source(self, place: str, storage_options: Mapping[str, Any] | None) -> Source:  # noqa: ARG002
        """Opens what is to be imported.

        Args:
            place: A path, or a URL where `takes_urls`.
            storage_options: For fsspec.

        Raises:
            OptionError: When it is no such file, or the options don't fit it.
            OSError: When it can't be read.
        """
        raise OptionError(f"format must be one that diskbuf reads, got {self.name!r}, which it only writes.")
