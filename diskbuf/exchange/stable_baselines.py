"""The arrays of Stable-Baselines3's replay buffers, saved with `numpy.savez`: read, not written."""

import contextlib
import dataclasses
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import OptionError, SpecError
from diskbuf.exchange.contract import Episode, EpisodeSource, Format
from diskbuf.exchange.mapping import nest_of
from diskbuf.exchange.npz import member_names
from diskbuf.exchange.places import local_file, naming_damage
from diskbuf.exchange.transitions import Nests, Transitions, check_names, episodes_of, flags
from diskbuf.specs import ArraySpec, BoundedArraySpec
from diskbuf.tree import Structure

_BLOCK_BYTES = 2**22
_NONE = "none"
_COPY_BYTES = 2**20
_LOCAL_HEADER_BYTES = 30  # of a member in a ZIP file, before its name and extra field (APPNOTE.TXT, 4.3.7)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StableBaselinesFormat(Format):
    """NPZ files of the arrays of a Stable-Baselines3 `ReplayBuffer`.

    Save them like this, or with `numpy.savez_compressed`; of a `DictReplayBuffer` each part by itself, as
    `observations/KEY` and `next_observations/KEY`. The pickles of `save_replay_buffer` are never loaded.

        numpy.savez("buffer.npz", observations=b.observations, next_observations=b.next_observations, actions=b.actions,
                    rewards=b.rewards, dones=b.dones, timeouts=b.timeouts, pos=b.pos, full=b.full)

    Arrays are [buffer_size, n_envs, ...]; of a ring that is full, the oldest step is at `pos`. Episodes come
    environment by environment, from the oldest step to the newest. `dones` says where an episode ended, `timeouts`
    where that was a time limit. The episode that goes on at the end of an environment is cut off behind its last
    action, whose observation is in the file; that of the last environment goes on, as a driver leaves it. In a full
    ring the oldest step of an environment counts as the first of an episode, because those before it have been
    overwritten. A buffer with `optimize_memory_usage` has no `next_observations`, and is refused: what was seen at the
    end of an episode isn't in it.

    Attributes:
        terminated: The array that says where episodes ended, those of time limits included.
        truncated: The array that says which of these ends were time limits; "none" where none was.
        scalar_actions: Whether actions are single numbers (`Discrete`), which such a buffer keeps as [1].
        scalar_observations: The same for observations.
        discrete: N, where actions are of `Discrete(N)`: scalars from 0 to N - 1, which are the bounds of their spec.
            Nothing in the arrays tells these from `MultiDiscrete([N])`. None for other actions.
    """

    name: ClassVar[str] = "sb3"

    terminated: str = "dones"
    truncated: str = "timeouts"
    scalar_actions: bool = False
    scalar_observations: bool = False
    discrete: int | None = None

    def __post_init__(self) -> None:
        check_names(self, "terminated", "truncated")
        for name in ("scalar_actions", "scalar_observations"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} must be True or False, got {getattr(self, name)!r}.")

        if self.discrete is not None and (type(self.discrete) is not int or self.discrete < 1):
            raise OptionError(f"discrete must be an int of at least 1, got {self.discrete!r}.")

    def open_source(self, place: str, storage_options: Mapping[str, Any] | None) -> "StableBaselinesSource":
        """Opens a file."""
        return StableBaselinesSource(str(local_file(place, storage_options)), self)


class StableBaselinesSource(EpisodeSource):
    """The episodes in the arrays of a replay buffer.

    Args:
        path: The file.
        options: What its arrays mean.

    Raises:
        OptionError: When it is no NPZ file, lacks an array, or holds objects, which are pickles.
        SpecError: When an array isn't what it must be, or the file is damaged.
        OSError: When it can't be read.
    """

    def __init__(self, path: str, options: StableBaselinesFormat) -> None:
        self.name = path
        self._closing = contextlib.ExitStack()
        try:
            self._open(options)
        except BaseException:
            self.close()
            raise

    def _open(self, options: StableBaselinesFormat) -> None:
        self._arrays = arrays = self._closing.enter_context(contextlib.closing(NpzArrays(self.name)))
        self._terminated = self._flag(options.terminated)
        self._truncated = None if options.truncated == _NONE else self._flag(options.truncated)
        self._grid = arrays.shape(options.terminated)
        if len(self._grid) != 2:
            raise SpecError(
                f"{options.terminated!r} of {self.name} must be [buffer_size, n_envs], got {list(self._grid)}."
            )
        for name in filter(None, (self._truncated,)):
            if arrays.shape(name) != self._grid:
                raise SpecError(f"{name!r} of {self.name} must be {list(self._grid)}, got {list(arrays.shape(name))}.")
        self._order = self._ring()
        self.observation_spec, self._observations = self._nest("observations", options.scalar_observations)
        following, self._next = self._nest("next_observations", options.scalar_observations)
        if following != self.observation_spec:
            raise SpecError(f"'next_observations' of {self.name} must be as 'observations' in shape and dtype.")
        is_scalar = options.scalar_actions or options.discrete is not None
        self.action_spec, self._actions = self._nest("actions", is_scalar)
        self._discrete = options.discrete
        if self._discrete is not None:
            self.action_spec = self._discrete_spec(self.action_spec, self._discrete)
        self._reward = self._leaf("rewards", is_scalar=False)
        if self._reward.spec.shape or self._reward.spec.dtype.kind not in "biuf":
            raise SpecError(f"'rewards' of {self.name} must be [buffer_size, n_envs] numbers.")
        self.reward_spec = self._reward.spec
        self.num_steps = len(self._order) * self._grid[1]
        used = {leaf.name for leaf in self._leaves()} | {options.terminated, options.truncated, "pos", "full"}
        self.unmapped = {
            name: f"{arrays.dtype(name)} {list(arrays.shape(name))}" for name in arrays.names if name not in used
        }

    def episodes(self) -> Iterator[Episode]:
        """Yields the episodes, environment by environment."""
        nests = Nests(
            observation=Structure(self.observation_spec), action=Structure(self.action_spec), policy_info=Structure(())
        )
        environments = self._grid[1]
        for environment in range(environments):
            yield from episodes_of(
                self._blocks(environment),
                nests,
                name=f"environment {environment} of {self.name}",
                cuts_tail=environment < environments - 1,
            )

    def close(self) -> None:
        """Closes the file."""
        self._closing.close()

    def _discrete_spec(self, spec: Any, count: int) -> BoundedArraySpec:
        if not isinstance(spec, ArraySpec) or spec.dtype.kind not in "iu":
            raise SpecError(f"'actions' of {self.name} must be ints to be one of {count}, got {spec}.", path="action")
        return BoundedArraySpec((), spec.dtype, 0, count - 1)

    def _checked(self, actions: list[NDArray[Any]], steps: NDArray[np.int64], environment: int) -> list[NDArray[Any]]:
        if self._discrete is not None:
            is_wrong = (actions[0] < 0) | (actions[0] >= self._discrete)
            if is_wrong.any():
                at = int(is_wrong.argmax())
                raise SpecError(
                    f"'actions' of {self.name} must be from 0 to {self._discrete - 1}, got {actions[0][at]} in step "
                    f"{steps[at]} of environment {environment}. Give the number of actions as discrete.",
                    path="action",
                )
        return actions

    def _blocks(self, environment: int) -> Iterator[Transitions]:
        row_bytes = sum(leaf.spec.dtype.itemsize * int(np.prod(leaf.spec.shape)) for leaf in self._leaves())
        most = max(1, _BLOCK_BYTES // max(1, row_bytes))
        for begin in range(0, len(self._order), most):
            steps = self._order[begin : begin + most]
            ended = self._flags(self._terminated, steps, environment)
            timed_out = np.zeros(len(steps), np.bool)
            if self._truncated is not None:
                timed_out = self._flags(self._truncated, steps, environment)
            if (timed_out & ~ended).any():
                step = int(steps[(timed_out & ~ended).argmax()])
                raise SpecError(
                    f"{self._truncated!r} of {self.name} must be 0 where {self._terminated!r} is, "
                    f"got 1 in step {step} of environment {environment}."
                )
            yield Transitions(
                observations=self._read(self._observations, steps, environment),
                actions=self._checked(self._read(self._actions, steps, environment), steps, environment),
                rewards=self._read([self._reward], steps, environment)[0],
                terminated=ended & ~timed_out,
                truncated=ended & timed_out,
                next_observations=self._read(self._next, steps, environment),
            )

    def _read(self, leaves: Sequence["_Leaf"], steps: NDArray[np.int64], environment: int) -> list[NDArray[Any]]:
        return [
            self._arrays.array(leaf.name)[steps, environment]
            .reshape(len(steps), *leaf.spec.shape)
            .astype(leaf.spec.dtype, copy=False)
            for leaf in leaves
        ]

    def _flags(self, name: str, steps: NDArray[np.int64], environment: int) -> NDArray[np.bool]:
        return flags(self._arrays.array(name)[steps, environment], f"{name!r} of {self.name}")

    def _ring(self) -> NDArray[np.int64]:
        """The steps that are filled, from the oldest to the newest."""
        size = self._grid[0]
        position = self._number("pos", size)
        if not self._number("full", 1):
            return np.arange(position)
        return (np.arange(size) + position) % max(size, 1)

    def _number(self, name: str, most: int) -> int:
        self._has(name)
        array = self._arrays.array(name)
        if array.size != 1 or array.dtype.kind not in "biu" or not 0 <= int(array.reshape(-1)[0]) <= most:
            raise SpecError(f"{name!r} of {self.name} must be one number from 0 to {most}, got {array!r:.60}.")
        return int(array.reshape(-1)[0])

    def _flag(self, name: str) -> str:
        self._has(name)
        return name

    def _has(self, name: str) -> None:
        if name not in self._arrays.names:
            advice = {
                "next_observations": " A buffer with optimize_memory_usage=True doesn't keep them.",
                "timeouts": f" Where no episode was cut off, say truncated={_NONE}.",
            }.get(name, "")
            raise OptionError(
                f"{self.name} must have an array {name!r} to be of the format sb3, "
                f"got {', '.join(map(repr, self._arrays.names)) or 'none'}.{advice}"
            )

    def _leaves(self) -> list["_Leaf"]:
        return [*self._observations, *self._next, *self._actions, self._reward]

    def _nest(self, name: str, is_scalar: bool) -> tuple[Any, list["_Leaf"]]:
        """The spec of an array, or of those below a name, and the arrays in the order of its leaves."""
        known = [known for known in self._arrays.names if known == name or known.startswith(f"{name}/")]
        found = {one[len(name) + 1 :]: self._leaf(one, is_scalar=is_scalar) for one in known or [name]}
        nest = nest_of({path: leaf.spec for path, leaf in found.items()})
        return nest, [found[path] for path in Structure(nest).paths]

    def _leaf(self, name: str, *, is_scalar: bool) -> "_Leaf":
        self._has(name)
        shape, dtype = self._arrays.shape(name), self._arrays.dtype(name)
        if shape[:2] != self._grid:
            raise SpecError(
                f"{name!r} of {self.name} must be {list(self._grid)} and what a step is, got {list(shape)}."
            )
        if not is_scalar:
            return _Leaf(name, ArraySpec(shape[2:], dtype.newbyteorder("=")))
        if shape[2:] != (1,):
            raise SpecError(f"{name!r} of {self.name} must be one number a step to be scalars, got {list(shape[2:])}.")
        return _Leaf(name, ArraySpec((), dtype.newbyteorder("=")))


class _Leaf(NamedTuple):
    name: str
    spec: ArraySpec


class NpzArrays:
    """The arrays of an NPZ file, mapped: nothing but what is looked at is in memory.

    Each is read through once when it is asked for first, which compares its checksum. One that is compressed is
    unpacked to a temporary file.

    Args:
        path: The file.

    Attributes:
        names: Of the arrays.

    Raises:
        OptionError: When it is no NPZ file, or an array holds objects.
        SpecError: When it is damaged.
        OSError: When it can't be read.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._closing = contextlib.ExitStack()
        self._arrays: dict[str, NDArray[Any]] = {}
        file = self._closing.enter_context(open(path, "rb"))  # noqa: SIM115 - close() does
        try:
            if not zipfile.is_zipfile(file):
                raise OptionError(f"{path} must be an NPZ file, as numpy.savez writes it, got something else.")
            with naming_damage(path, "an NPZ file"):
                self._zip = self._closing.enter_context(zipfile.ZipFile(file))
            names = [name for name in member_names(self._zip, path) if name.endswith(".npy")]
            self._members = {name.removesuffix(".npy"): self._zip.getinfo(name) for name in names}
            self._headers = {name: self._header(name) for name in self._members}
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arrays."""
        return tuple(self._members)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array."""
        return self._headers[name].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """The dtype of an array."""
        return self._headers[name].dtype

    def array(self, name: str) -> NDArray[Any]:
        """Returns an array, mapped from the file.

        Raises:
            SpecError: When it is damaged.
            OSError: When it can't be read, or unpacked.
        """
        if name not in self._arrays:
            self._arrays[name] = self._mapped(name)
        return self._arrays[name]

    def close(self) -> None:
        """Closes the file, and removes what was unpacked."""
        self._arrays.clear()
        self._closing.close()

    def _mapped(self, name: str) -> NDArray[Any]:
        info, header = self._members[name], self._headers[name]
        file: Any = None
        if info.compress_type != zipfile.ZIP_STORED:
            file = self._closing.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - close() does
        size = 0
        with self._naming_damage(name), self._zip.open(info) as member:
            while part := member.read(_COPY_BYTES):
                size += len(part)
                if file is not None:
                    file.write(part)
        count = int(np.prod(header.shape))
        if size < header.bytes + count * header.dtype.itemsize:
            raise self._damaged(name, "it is cut short")
        if not count:
            return np.empty(header.shape, header.dtype)
        offset = header.bytes
        if file is not None:
            file.flush()
        else:
            file, offset = self._zip.fp, header.bytes + self._begin(info)
        order: Any = "F" if header.is_fortran else "C"
        return np.memmap(file, header.dtype, "r", offset, header.shape, order)

    def _begin(self, info: zipfile.ZipInfo) -> int:
        """Where a member that is stored as it is begins in the file."""
        with open(self._path, "rb") as file:
            file.seek(info.header_offset)
            head = file.read(_LOCAL_HEADER_BYTES)
        return (
            info.header_offset
            + len(head)
            + int.from_bytes(head[26:28], "little")
            + int.from_bytes(head[28:30], "little")
        )

    def _header(self, name: str) -> "_Header":
        with self._naming_damage(name), self._zip.open(self._members[name]) as member:
            version = np.lib.format.read_magic(member)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, is_fortran, dtype = read(member)
            size = member.tell()
        if dtype.hasobject:
            raise OptionError(
                f"array {name!r} of {self._path} must hold numbers, got Python objects, which are pickles: those are "
                "never loaded. Save it as an array of numbers."
            )
        return _Header(shape, dtype, is_fortran, size)

    def _naming_damage(self, name: str) -> contextlib.AbstractContextManager[None]:
        return naming_damage(f"array {name!r} of {self._path}", "as it was written")

    def _damaged(self, name: str, problem: str) -> SpecError:
        return SpecError(f"array {name!r} of {self._path} must be as it was written, but {problem}. Copy it again.")


class _Header(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool
    bytes: int
