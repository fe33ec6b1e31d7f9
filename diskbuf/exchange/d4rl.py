"""HDF5 files in the form of D4RL, the data sets for offline reinforcement learning: read, not written."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import MissingExtraError, OptionError, SpecError
from diskbuf.exchange.contract import Episode, EpisodeSource, Format
from diskbuf.exchange.mapping import nest_of
from diskbuf.exchange.places import local_file, naming_damage
from diskbuf.exchange.transitions import Nests, Transitions, check_names, episodes_of, flags, is_name
from diskbuf.specs import ArraySpec
from diskbuf.tree import Structure

_BLOCK_BYTES = 2**22
_NONE = "none"
_OBSERVATIONS, _NEXT_OBSERVATIONS, _ACTIONS, _REWARDS = "observations", "next_observations", "actions", "rewards"


@dataclasses.dataclass(frozen=True, kw_only=True)
class D4rlFormat(Format):
    """HDF5 files of transitions in order, as D4RL has them.

    They have datasets `observations`, `actions`, `rewards`, `terminals`, `timeouts`, and often `next_observations`,
    each [N, ...] (Fu et al., "D4RL: Datasets for Deep Data-Driven Reinforcement Learning", 2020).

    The observation behind an episode's last action is only in `next_observations`. A file without them has no final
    observations, and none is made up: an episode that was cut off at a timeout is cut one step earlier, its last
    observation being the final one, as D4RL's own `qlearning_dataset` does it (so the action and the reward of the
    timeout's step are left out, and an episode of that step alone); the boundary of one that terminated, from which
    nothing is bootstrapped, repeats its last observation. What follows the last end is an episode that goes on.

    Where episodes end is never guessed: a file in which one of `terminals` and `timeouts` isn't there is refused until
    it is said what stands for it, or that nothing does.

    Attributes:
        terminated: The dataset that says where an episode terminated; "none" where none did.
        truncated: The dataset that says where an episode was cut off; "none" where none was.
        policy_info: Datasets to keep as policy_info, such as infos/action_log_probs; each gets the last part of its
            name. Others under `infos/` are left out only where the import is told to drop them.
    """

    name: ClassVar[str] = "d4rl"
    extra: ClassVar[str | None] = "hdf5"

    terminated: str = "terminals"
    truncated: str = "timeouts"
    policy_info: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        check_names(self, "terminated", "truncated")
        if not is_name(self.policy_info) and not (
            isinstance(self.policy_info, list | tuple) and all(map(is_name, self.policy_info))
        ):
            raise OptionError(f"policy_info must be a dataset, or a list of them, got {self.policy_info!r}.")

    def open_source(self, place: str, storage_options: Mapping[str, Any] | None) -> "D4rlSource":
        """Opens a file."""
        return D4rlSource(str(local_file(place, storage_options)), self)


class D4rlSource(EpisodeSource):
    """The episodes of a file.

    Args:
        path: The file.
        options: What its datasets mean.

    Raises:
        OptionError: When it is no HDF5, lacks a dataset, or nothing says where its episodes end.
        SpecError: When a dataset isn't what it must be.
        MissingExtraError: When h5py isn't installed.
        OSError: When it can't be read.
    """

    def __init__(self, path: str, options: D4rlFormat) -> None:
        self.name = path
        self._file = _opened(path)
        try:
            self._open(options)
        except BaseException:
            self.close()
            raise

    def _open(self, options: D4rlFormat) -> None:
        with naming_damage(self.name, "an HDF5 file of numbers"):
            datasets = _datasets(self._file)
        self._datasets = datasets
        self._rows = self._dataset(_REWARDS).shape[:1]
        self._flags = [self._flag(options.terminated, "terminated"), self._flag(options.truncated, "truncated")]
        self._reward = self._leaf(_REWARDS)
        if self._reward.spec.shape:
            raise SpecError(f"{_REWARDS!r} of {self.name} must be [N], got {list(self._datasets[_REWARDS].shape)}.")
        self.observation_spec, self._observations = self._nest(_OBSERVATIONS)
        self.action_spec, self._actions = self._nest(_ACTIONS)
        self._next = self._nest(_NEXT_OBSERVATIONS)[1] if self._names(_NEXT_OBSERVATIONS) else None
        if self._next is not None and [leaf.spec for leaf in self._next] != [leaf.spec for leaf in self._observations]:
            raise SpecError(f"{_NEXT_OBSERVATIONS!r} of {self.name} must be as {_OBSERVATIONS!r} in shape and dtype.")
        kept = [options.policy_info] if isinstance(options.policy_info, str) else options.policy_info
        self._policy_info = [self._leaf(name) for name in kept]
        self.reward_spec = self._reward.spec
        self.policy_info_spec = {leaf.name.rpartition("/")[2]: leaf.spec for leaf in self._policy_info} or ()
        if len(self.policy_info_spec) < len(self._policy_info):
            raise OptionError(f"policy_info must name datasets that end differently, got {list(kept)}.")
        self.num_steps = self._rows[0]
        used = {leaf.name for leaf in self._all_leaves()} | {name for name in self._flags if name}
        self.unmapped = {
            name: f"{dataset.dtype} {list(dataset.shape)}"
            for name, dataset in datasets.items()
            if name not in used and dataset.shape[:1] == self._rows and not name.startswith("metadata/")
        }

    def episodes(self) -> Iterator[Episode]:
        """Yields the episodes in order."""
        nests = Nests(
            observation=Structure(self.observation_spec),
            action=Structure(self.action_spec),
            policy_info=Structure(self.policy_info_spec),
        )
        return episodes_of(self._blocks(), nests, name=self.name)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _blocks(self) -> Iterator[Transitions]:
        row_bytes = sum(leaf.spec.dtype.itemsize * int(np.prod(leaf.spec.shape)) for leaf in self._all_leaves())
        most = max(1, _BLOCK_BYTES // max(1, row_bytes))
        for begin in range(0, self._rows[0], most):
            end = min(self._rows[0], begin + most)
            terminated, truncated = (self._read_flags(name, begin, end) for name in self._flags)
            yield Transitions(
                observations=self._read(self._observations, begin, end),
                actions=self._read(self._actions, begin, end),
                rewards=self._read([self._reward], begin, end)[0],
                terminated=terminated,
                truncated=truncated,
                next_observations=None if self._next is None else self._read(self._next, begin, end),
                policy_info=self._read(self._policy_info, begin, end),
            )

    def _read(self, leaves: Sequence["_Leaf"], begin: int, end: int) -> list[NDArray[Any]]:
        return [self._part(leaf.name, begin, end).astype(leaf.spec.dtype, copy=False) for leaf in leaves]

    def _part(self, name: str, begin: int, end: int) -> NDArray[Any]:
        with naming_damage(f"{name!r} of {self.name}", "whole"):
            return np.asarray(self._datasets[name][begin:end])

    def _read_flags(self, name: str | None, begin: int, end: int) -> NDArray[np.bool]:
        if name is None:
            return np.zeros(end - begin, np.bool)
        return flags(self._part(name, begin, end), f"{name!r} of {self.name} from row {begin} on")

    def _flag(self, name: str, role: str) -> str | None:
        if name == _NONE:
            return None
        if name not in self._datasets:
            raise OptionError(
                f"{role} must be the dataset that says where an episode {_MEANINGS[role]}, but {self.name} has no "
                f"{name!r}; it has {', '.join(map(repr, self._datasets))}. Name one, or say {role}={_NONE}."
            )
        shape = self._dataset(name).shape
        if shape != self._rows:
            raise SpecError(f"{name!r} of {self.name} must be {list(self._rows)}, got {list(shape)}.")
        return name

    def _all_leaves(self) -> list["_Leaf"]:
        return [*self._observations, *self._actions, self._reward, *(self._next or ()), *self._policy_info]

    def _names(self, name: str) -> list[str]:
        """A dataset, or those below a group."""
        return [known for known in self._datasets if known == name or known.startswith(f"{name}/")]

    def _nest(self, name: str) -> tuple[Any, list["_Leaf"]]:
        """The spec of a dataset or group, and its datasets in the order of its leaves."""
        found = {known[len(name) + 1 :]: self._leaf(known) for known in self._names(name) or [name]}
        nest = nest_of({path: leaf.spec for path, leaf in found.items()})
        return nest, [found[path] for path in Structure(nest).paths]

    def _leaf(self, name: str) -> "_Leaf":
        dataset = self._dataset(name)
        if dataset.dtype.kind not in "biuf" or dataset.shape[:1] != self._rows:
            raise SpecError(
                f"{name!r} of {self.name} must be {self._rows[0]} rows of numbers, "
                f"got {dataset.dtype} {list(dataset.shape)}."
            )
        return _Leaf(name, ArraySpec(dataset.shape[1:], dataset.dtype.newbyteorder("=")))

    def _dataset(self, name: str) -> Any:
        if name not in self._datasets:
            raise OptionError(
                f"{self.name} must have a dataset {name!r} to be of the format d4rl, "
                f"got {', '.join(map(repr, self._datasets)) or 'none'}."
            )
        return self._datasets[name]


_MEANINGS = {"terminated": "terminated", "truncated": "was cut off"}


class _Leaf(NamedTuple):
    name: str
    spec: ArraySpec


def _opened(path: str) -> Any:
    try:
        import h5py
    except ImportError as error:
        raise MissingExtraError(
            "reading HDF5 must have h5py, which isn't installed. Install it: pip install 'diskbuf[hdf5]'."
        ) from error
    with open(path, "rb"):  # or h5py would say of a file that can't be read that it is none
        pass
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise OptionError(f"{path} must be an HDF5 file, got something else: {error}.") from error


def _datasets(file: Any) -> dict[str, Any]:
    import h5py

    found: dict[str, Any] = {}

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = item
            _ = item.dtype  # which NumPy may not have

    file.visititems(visit)
    return found
