"""Data sets of Minari, the Farama Foundation's library for offline reinforcement learning: written and read with it."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from diskbuf import specs
from diskbuf.errors import MissingExtraError, OptionError, SpecError
from diskbuf.exchange.contract import Episode, EpisodeSource, Format, Target
from diskbuf.exchange.hdf5 import Sink, telling_of_failure
from diskbuf.exchange.mapping import cast_exactly, nest_of
from diskbuf.exchange.places import local_place
from diskbuf.exchange.transitions import FinalObservations, check_names
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.tree import Structure

if TYPE_CHECKING:
    from diskbuf.exchange.store_rows import StoreRows

_DATA, _METADATA, _POLICY_INFO = "data", "metadata.json", "policy_info"
_ROOT_VARIABLE = "MINARI_DATASETS_PATH"
_Fields = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MinariFormat(Format):
    """A data set of Minari: a folder that `minari.load_dataset` finds by its id.

    Export to `$MINARI_DATASETS_PATH/NAME-v0` (or `~/.minari/datasets`), and the id is NAME-v0. Leaves become Box
    spaces with the bounds of their specs, and scalar int64 ones with bounds Discrete; nests become Dict and Tuple.
    Images are kept as they are, not as JPEG. Nothing is said of seeds and of the environment. The policy_info is kept
    among the infos.

    Minari keeps an observation behind the last action of each episode. An episode whose final observation isn't in the
    store, because it goes on, say, is cut off one step earlier, and truncated there, as Minari's own collector does;
    one that terminated repeats its last observation. Minari has no discounts, so they must be 1, and 0 where an episode
    terminated.

    Importing, rewards keep their dtype, which is float64 as a rule. Infos are left out, those named by `policy_info`
    excepted. An episode of which no flag says that it ended goes on if it is the last one; the others are over, and
    count as truncated, their final observations being there.

    Attributes:
        dataset_id: Minari's id, NAME-vNUMBER; None takes the path below Minari's folder, or the folder's name.
        data_format: How Minari stores it: "hdf5", or "arrow", which is slow for many episodes.
        policy_info: The info to import as policy_info, with everything in it, such as `policy_info` of an export; None
            leaves all out.
    """

    name: ClassVar[str] = "minari"
    extra: ClassVar[str | None] = "minari"
    is_folder: ClassVar[bool] = True
    makes_folders: ClassVar[bool] = True

    dataset_id: str | None = None
    data_format: Literal["hdf5", "arrow"] = "hdf5"
    policy_info: str | None = None

    def __post_init__(self) -> None:
        if self.data_format not in ("hdf5", "arrow"):
            raise OptionError(f"data_format must be 'hdf5' or 'arrow', got {self.data_format!r}.")
        check_names(self, *(name for name in ("dataset_id", "policy_info") if getattr(self, name) is not None))

    def export(self, rows: "StoreRows", target: Target) -> None:
        """Writes episodes."""
        _check_is_installed()
        from minari import __version__ as version
        from minari.dataset.minari_storage import MinariStorage

        dataset_id = _checked_id(self.dataset_id or _id_of(target.name))
        episodes = rows.episodes()
        first = next(episodes, None)  # or refused, before anything is written
        spec: Any = rows.carried.spec
        storage = MinariStorage.new(
            target.local_path() / _DATA,
            observation_space=_space_of(spec.observation, "observation"),
            action_space=_space_of(spec.action, "action"),
            data_format=self.data_format,
            jpeg_encoding=False,
        )
        storage.update_metadata({"dataset_id": dataset_id, "minari_version": version})
        if first is None:
            return
        final = FinalObservations()
        found = (
            _buffer_of(complete)
            for episode in _chain(first, episodes)
            if (complete := final.added(episode)) is not None
        )
        _add_episodes(storage, found)
        rows.notes += final.notes

    def open_source(self, place: str, storage_options: Mapping[str, Any] | None) -> "MinariSource":
        """Opens a data set."""
        return MinariSource(str(local_place(place, storage_options)), self)


class MinariSource(EpisodeSource):
    """The episodes of a data set.

    Specs have the dtypes that the data have, which need not be those of the spaces, and the spaces' bounds.

    Args:
        path: The data set's folder, or `data` in it.
        options: What to keep.

    Raises:
        OptionError: When it is no data set of Minari, lacks its spaces, or a space holds no numbers.
        SpecError: When it can't be read.
        MissingExtraError: When Minari, or what its files need, isn't installed.
    """

    def __init__(self, path: str, options: MinariFormat) -> None:
        _check_is_installed()
        self.name = path
        self._info = options.policy_info
        folder = Path(path)
        if not (folder / _METADATA).is_file():
            folder = folder / _DATA
        self._storage = _opened(folder, path)
        self._total = int(self._storage.total_episodes)
        self.num_steps = int(self._storage.total_steps)
        self._set_specs(next(self._read(0), None) if self._total else None)

    def episodes(self) -> Iterator[Episode]:
        """Yields the episodes in order."""
        for number in range(self._total):
            for fields in self._read(number):
                yield self._episode(number, fields)

    def _read(self, number: int) -> Iterator[_Fields]:
        # One by one: of many at once, Minari's Arrow storage takes an episode's second part for the next episode.
        with _telling(f"episode {number} of {self.name}"):
            fields = next(iter(self._storage.get_episodes([number])))
            total = next(iter(self._storage.get_episode_metadata([number])))["total_steps"]
        if len(fields["rewards"]) != total:
            raise SpecError(
                f"episode {number} of {self.name} must have {total} steps, got {len(fields['rewards'])}. Minari's "
                "Arrow storage can't read longer ones. Make the data set anew with data_format='hdf5'."
            )
        if total:
            yield fields

    def _set_specs(self, fields: _Fields | None) -> None:
        storage = self._storage
        if fields is None:
            self.observation_spec = specs.from_space(storage.observation_space)
            self.action_spec = specs.from_space(storage.action_space)
            return
        self.observation_spec = _spec_of(storage.observation_space, fields["observations"], "observation")
        self.action_spec = _spec_of(storage.action_space, fields["actions"], "action")
        rewards = np.asarray(fields["rewards"])
        if rewards.ndim != 1 or rewards.dtype.kind not in "biuf":
            raise SpecError(
                f"rewards of {self.name} must be a number for each step, got {rewards.dtype} {list(rewards.shape)}."
            )
        self.reward_spec = ArraySpec((), rewards.dtype, name="reward")
        if self._info is not None:
            info = _info_of(fields, self._info)
            if info is None:
                raise OptionError(
                    f"policy_info must be an info of {self.name}, got {self._info!r}. "
                    f"There are {', '.join(map(repr, fields['infos'] or {})) or 'none'}."
                )
            specs_by_path = {path: _leaf_spec(leaf, f"policy_info/{path}") for path, leaf in _leaves_by_path(info)}
            self.policy_info_spec = nest_of(specs_by_path)

    def _episode(self, number: int, fields: _Fields) -> Episode:
        where = f"episode {number} of {self.name}"
        steps = len(fields["rewards"])
        ends = np.asarray(fields["terminations"], np.bool) | np.asarray(fields["truncations"], np.bool)
        if len(ends) != steps or ends[:-1].any():
            raise SpecError(f"{where} must have flags for its {steps} steps, and none before the last is set.")
        terminated = bool(fields["terminations"][-1])
        truncated = not terminated and (bool(ends[-1]) or number < self._total - 1)
        rows = steps + 1 if terminated or truncated else steps
        info: Any = ()
        if self._info is not None:
            info = self._leaves(_info_of(fields, self._info), self.policy_info_spec, steps, where=where)
        return Episode(
            observations=self._leaves(fields["observations"], self.observation_spec, rows, where=where),
            actions=self._leaves(fields["actions"], self.action_spec, steps, where=where),
            rewards=cast_exactly(np.asarray(fields["rewards"]), self.reward_spec.dtype, path="reward", where=where),
            terminated=terminated,
            truncated=truncated,
            policy_info=info,
        )

    def _leaves(self, nest: Any, spec: Any, rows: int, *, where: str) -> Any:
        structure = Structure(spec)
        try:
            leaves = structure.flatten(nest)
        except SpecError as error:
            raise SpecError(f"{where} must be as the first one: {error}", path=error.path) from error
        found = []
        for path, leaf, of in zip(structure.paths, leaves, structure.flatten(spec), strict=True):
            array = np.asarray(leaf)
            if len(array) < rows or array.shape[1:] != of.shape or array.dtype.kind not in "biuf":
                raise SpecError(
                    f"leaf {path!r} in {where} must be {rows} rows of {list(of.shape)} numbers, "
                    f"got {array.dtype} {list(array.shape)}.",
                    path=path,
                )
            found.append(cast_exactly(array[:rows], of.dtype, path=path, where=where))
        return structure.unflatten(found)


def _add_episodes(storage: Any, episodes: Iterator[Any]) -> None:
    """Has Minari add episodes; a file of HDF5 goes by way of a sink, because HDF5 doesn't outlive a full disk."""
    path = getattr(storage, "_file_path", None)
    if not isinstance(path, Path):
        storage.update_episodes(episodes)
        return

    def checked(sink: Sink) -> Iterator[Any]:
        for episode in episodes:
            sink.check()
            yield episode

    with path.open("r+b") as file, telling_of_failure(file) as sink:
        storage._file_path = sink
        try:
            storage.update_episodes(checked(sink))
        finally:
            storage._file_path = path


def _chain(first: Episode, rest: Iterator[Episode]) -> Iterator[Episode]:
    yield first
    yield from rest


def _buffer_of(episode: Episode) -> Any:
    """The episode as Minari takes it."""
    from minari.data_collector.episode_buffer import EpisodeBuffer

    steps = len(episode.rewards)
    if episode.discounts is not None:
        expected = np.ones(steps, np.float32)
        expected[-1] = 0 if episode.terminated else 1
        if (episode.discounts != expected).any():
            at = int((episode.discounts != expected).argmax())
            raise OptionError(
                "discounts must be 1, and 0 where an episode terminated, because Minari has none, got "
                f"{episode.discounts[at]} in id {episode.first_id + at} of lane {episode.lane}. Export to rlds."
            )
    ends = np.zeros((2, steps), np.bool)
    ends[:, -1] = episode.terminated, episode.truncated
    # One by one, as Minari's Arrow storage can't read infos inside infos; of numbers it wants lists.
    infos = {
        f"{_POLICY_INFO}/{path}" if path else _POLICY_INFO: list(leaf) if leaf.ndim == 1 else leaf
        for path, leaf in _leaves_by_path(episode.policy_info, longer=True)
    }
    return EpisodeBuffer(
        observations=_plain(episode.observations),
        actions=_plain(episode.actions),
        rewards=episode.rewards,
        terminations=ends[0],
        truncations=ends[1],
        infos=infos or None,
    )


def _leaves_by_path(nest: Any, *, longer: bool = False) -> list[tuple[str, NDArray[Any]]]:
    """The leaves of a nest by path; longer by a copy of the last row, as infos are as many as observations."""
    structure = Structure(nest)
    leaves = [np.asarray(leaf) for leaf in structure.flatten(nest)]
    if longer:
        leaves = [np.concatenate([leaf, leaf[-1:]]) for leaf in leaves]
    return list(zip(structure.paths, leaves, strict=True))


def _plain(nest: Any) -> Any:
    """Dicts and tuples, whatever kinds of them a nest is made of."""
    if isinstance(nest, Mapping):
        return {key: _plain(value) for key, value in nest.items()}
    return tuple(map(_plain, nest)) if isinstance(nest, list | tuple) else nest


def _space_of(nest: Any, path: str) -> Any:
    from gymnasium import spaces

    if isinstance(nest, Mapping):
        return spaces.Dict({str(key): _space_of(value, f"{path}/{key}") for key, value in nest.items()})
    if isinstance(nest, list | tuple):
        return spaces.Tuple([_space_of(value, f"{path}/{index}") for index, value in enumerate(nest)])
    if 0 in nest.shape:
        raise OptionError(f"leaf {path!r} must have a number in it for Minari, got {list(nest.shape)}. Export to rlds.")
    if isinstance(nest, BoundedArraySpec):
        low, high = nest.minimum, nest.maximum
        if nest.dtype == np.int64 and not nest.shape and int(high) - int(low) < np.iinfo(np.int64).max:
            return spaces.Discrete(int(high) - int(low) + 1, start=int(low))
        return spaces.Box(np.broadcast_to(low, nest.shape), np.broadcast_to(high, nest.shape), nest.shape, nest.dtype)
    if nest.dtype.kind in "iu":
        limits = np.iinfo(nest.dtype)
        return spaces.Box(limits.min, limits.max, nest.shape, nest.dtype)
    return (
        spaces.Box(0, 1, nest.shape, np.bool)
        if nest.dtype == np.bool
        else spaces.Box(-np.inf, np.inf, nest.shape, nest.dtype)
    )


def _spec_of(space: Any, values: Any, path: str) -> Any:
    """The spec of data: their dtypes, with the bounds of their space."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {key: _spec_of(child, values[key], f"{path}/{key}") for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        pairs = enumerate(zip(space.spaces, values, strict=True))
        return tuple(_spec_of(child, value, f"{path}/{index}") for index, (child, value) in pairs)
    found = _leaf_spec(values, path)
    try:
        of_space = specs.from_space(space)
        return BoundedArraySpec(found.shape, found.dtype, of_space.minimum, of_space.maximum)
    except SpecError:  # bounds that its dtype doesn't have
        return found


def _info_of(fields: _Fields, name: str) -> Any:
    """An info as a nest of dicts, None where there is none of that name."""
    infos = fields["infos"] or {}
    if name in infos:
        return infos[name]
    below = {key[len(name) + 1 :]: value for key, value in infos.items() if key.startswith(f"{name}/")}
    return nest_of(below) if below else None


def _leaf_spec(values: Any, path: str) -> ArraySpec:
    array: NDArray[Any] = np.asarray(values)
    if array.dtype.kind not in "biuf" or not array.ndim:
        raise OptionError(f"leaf {path!r} must be numbers, got {array.dtype} {list(array.shape)}, a text say.")
    return ArraySpec(array.shape[1:], array.dtype)


def _opened(folder: Path, name: str) -> Any:
    from minari.dataset.minari_storage import MinariStorage

    if not (folder / _METADATA).is_file():
        raise OptionError(f"{name} must be a data set of Minari, a folder with {_DATA}/{_METADATA} in it.")
    try:
        described = json.loads((folder / _METADATA).read_text())
    except ValueError as error:
        raise SpecError(f"{folder / _METADATA} must be JSON, but {error}.") from error
    missing = {"observation_space", "action_space", "data_format", "total_episodes", "total_steps"} - set(described)
    if missing:  # Minari would make the environment to ask it for its spaces, and so run what a file names
        raise OptionError(f"{folder / _METADATA} must have {', '.join(sorted(missing))}, but it hasn't.")
    with _telling(name):
        return MinariStorage.read(folder)


@contextlib.contextmanager
def _telling(where: str) -> Iterator[None]:
    """Minari's own errors, which it has no types for."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(f"{where} must have what its files need installed: {error}.") from error
    except (
        AssertionError,
        LookupError,
        ValueError,
        TypeError,
        StopIteration,
        RuntimeError,
        OverflowError,
        OSError,
    ) as error:
        if isinstance(error, OSError) and error.errno:
            raise
        raise SpecError(f"{where} must be as Minari writes it, but {type(error).__name__}: {error}.") from error


def _check_is_installed() -> None:
    try:
        import minari  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "data sets of Minari must have minari installed. Install it: pip install 'diskbuf[minari]'."
        ) from error


def _id_of(destination: str) -> str:
    """The id of a data set at a place: its path below Minari's folder, else its name."""
    place = Path(destination).absolute()
    root = Path(os.environ.get(_ROOT_VARIABLE) or Path.home() / ".minari" / "datasets").absolute()
    return place.relative_to(root).as_posix() if place.is_relative_to(root) else place.name


def _checked_id(dataset_id: str) -> str:
    from minari.dataset.minari_dataset import parse_dataset_id

    try:
        parse_dataset_id(dataset_id)
    except (ValueError, TypeError) as error:  # a version that isn't there is a TypeError
        raise OptionError(
            f"dataset_id must be NAME-vNUMBER, with folders before it if you like, got {dataset_id!r}. "
            "Name the destination so, or give dataset_id."
        ) from error
    return dataset_id
