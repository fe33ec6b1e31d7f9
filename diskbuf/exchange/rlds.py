"""Steps in the form of RLDS, a `tf.train.Example` each, in a TFRecord file: written and read."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from diskbuf import specs
from diskbuf.errors import OptionError, SpecError, StoreFormatError
from diskbuf.exchange.contract import Episode, EpisodeSource, Format, Target
from diskbuf.exchange.places import local_place
from diskbuf.exchange.tf_example import ExampleReader, ExampleWriter, spec_size
from diskbuf.exchange.tf_record import RecordWriter, read_blocks
from diskbuf.exchange.transitions import FinalObservations
from diskbuf.specs import ArraySpec
from diskbuf.trajectories import StepType, Trajectory
from diskbuf.tree import Structure

if TYPE_CHECKING:
    from diskbuf.exchange.store_rows import StoreRows

_STEPS, _FEATURES = "steps.tfrecord", "features.json"
_FORMAT = 1
_NESTS = ("observation", "action", "policy_info")
_FLAGS = ("is_first", "is_last", "is_terminal")
_FLAG = ArraySpec((), np.bool)
_BLOCK_BYTES = 2**22
_Steps = dict[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RldsFormat(Format):
    """A folder of steps in the form of RLDS, in a TFRecord file, one `tf.train.Example` for each step.

    A step has the features of RLDS (Ramos et al., "RLDS: an Ecosystem to Generate, Share and Use Datasets in
    Reinforcement Learning", 2021): `observation`, `action`, `reward`, `discount`, `is_first`, `is_last`, `is_terminal`,
    and `policy_info` where there is one; a nest has a feature for each leaf, such as `observation/camera`. The reward
    is that for the action in the step, and the discount too. The last step of an episode has its final observation; its
    action, reward and discount mean nothing. It is_terminal where the episode terminated, and not where it was cut off.

    RLDS itself nests the steps in an Example for each episode; here they stand one after the other, as
    `tf.data.TFRecordDataset` reads them: float32 as a float list; int64, and bool as 0 and 1, as an int64 list; others
    as their bytes, little-endian, for `tf.io.decode_raw`. Shapes and dtypes are in `features.json` beside
    `steps.tfrecord`: its key `features` has `{"dtype": ..., "shape": [...]}` by name. Whoever writes such a file for
    steps of their own needs no more than that. An export has their number there, too, as `steps`: a file that was cut
    between two of them is refused.

    An episode that goes on at the end of the store has no last step, so that it comes back as it is. Others whose final
    observation isn't in the store are cut off one step earlier; of one that terminated it is repeated.
    """

    name: ClassVar[str] = "rlds"
    endings: ClassVar[tuple[str, ...]] = (".rlds",)
    is_folder: ClassVar[bool] = True

    def export(self, rows: "StoreRows", target: Target) -> None:
        """Writes episodes."""
        folder = target.local_path()
        episodes = rows.episodes()
        spec: Any = rows.carried.spec  # a Trajectory, or there are no episodes
        with RecordWriter(folder / _STEPS) as records:
            writer: _StepWriter | None = None
            final = FinalObservations()
            for episode in _completed(episodes, final):
                writer = writer or _StepWriter(records, spec)
                writer.write(episode)
        rows.notes += final.notes
        features = {
            name: {"dtype": str(leaf.dtype), "shape": list(leaf.shape)} for name, leaf in features_of(spec).items()
        }
        steps = writer.written if writer is not None else 0
        described = {"format": _FORMAT, "features": features, "spec": specs.to_json(spec), "steps": steps}
        (folder / _FEATURES).write_text(json.dumps(described, indent=1) + "\n")

    def open_source(self, place: str, storage_options: Mapping[str, Any] | None) -> "RldsSource":
        """Opens a folder."""
        return RldsSource(str(local_place(place, storage_options)))


class RldsSource(EpisodeSource):
    """The episodes of a folder of steps.

    The discount of the last action is 0 where the episode terminated, whatever the feature says; without the feature
    discounts are 1 otherwise. An episode of one step has no action, and is left out. Steps behind the last one that
    is_last are an episode that goes on.

    Args:
        path: The folder, or the TFRecord file in it.

    Raises:
        OptionError: When there is no such file, or nothing says what its features are.
        SpecError: When a feature that is needed isn't there, or isn't what it must be.
        StoreFormatError: When a newer version of diskbuf wrote it.
    """

    def __init__(self, path: str) -> None:
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        self.name = str(folder / _STEPS if Path(path).is_dir() else path)
        described = _described(folder / _FEATURES, self.name)
        self._features = _features(described, str(folder / _FEATURES))
        self._written = described.get("steps")
        self._structures = {}
        for role in _NESTS:
            nest = _nest(described, role, self._features)
            self._structures[role] = Structure(nest)
            setattr(self, f"{role}_spec", nest)
        self.reward_spec = self._features["reward"]
        known = {*self._names(), *_FLAGS, "reward", "discount"}
        self.unmapped = {
            name: f"{spec.dtype} {list(spec.shape)}" for name, spec in self._features.items() if name not in known
        }
        self._wanted = {name: spec for name, spec in self._features.items() if name in known}

    def episodes(self) -> Iterator[Episode]:
        """Yields the episodes in order."""
        reader = ExampleReader(self._wanted)
        parts: list[_Steps] = []
        read = 0
        for first, records in read_blocks(self.name, _BLOCK_BYTES):
            read += len(records)
            block = reader.read(records, first=first, name=self.name)
            self._check_order(block, first, is_running=bool(parts))
            begin = 0
            for end in (np.flatnonzero(block["is_last"]) + 1).tolist():
                parts.append({name: leaf[begin:end] for name, leaf in block.items()})
                if sum(len(part["reward"]) for part in parts) > 1:
                    yield self._episode(parts)
                parts = []
                begin = end
            if begin < len(records):
                parts.append({name: leaf[begin:] for name, leaf in block.items()})
        if self._written not in (None, read):
            raise SpecError(
                f"{self.name} must have the {self._written} steps that were exported, got {read}. Copy it again."
            )
        if parts:
            yield self._episode(parts)

    def _check_order(self, block: "_Steps", first: int, *, is_running: bool) -> None:
        begins = np.concatenate([[not is_running], block["is_last"][:-1]])
        for name, is_wrong, problem in (
            ("is_first", block["is_first"] & ~begins, "be 0, because its episode has not ended"),
            ("is_first", ~block["is_first"] & begins, "be 1, because no episode has begun"),
            ("is_terminal", block["is_terminal"] & ~block["is_last"], "be 0 where is_last is"),
        ):
            if is_wrong.any():
                where = f"record {first + int(is_wrong.argmax())} of {self.name}"
                raise SpecError(f"{name} in {where} must {problem}.", path=name)

    def _episode(self, parts: "list[_Steps]") -> Episode:
        steps = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        has_ended = bool(steps["is_last"][-1])
        terminated = bool(steps["is_terminal"][-1])
        actions = len(steps["reward"]) - has_ended
        discounts = None
        if "discount" in steps:
            discounts = steps["discount"][:actions]
            if terminated:
                discounts[-1] = 0
        return Episode(
            observations=self._nest("observation", steps, None),
            actions=self._nest("action", steps, actions),
            rewards=steps["reward"][:actions],
            terminated=terminated,
            truncated=has_ended and not terminated,
            discounts=discounts,
            policy_info=self._nest("policy_info", steps, actions),
        )

    def _nest(self, role: str, steps: "_Steps", rows: int | None) -> Any:
        structure = self._structures[role]
        return structure.unflatten([steps[_below(role, path)][:rows] for path in structure.paths])

    def _names(self) -> list[str]:
        return [_below(role, path) for role in _NESTS for path in self._structures[role].paths]


class _StepWriter:
    """Writes the steps of episodes.

    Args:
        records: Where to.
        spec: The store's.

    Attributes:
        written: How many there are.
    """

    def __init__(self, records: RecordWriter, spec: Trajectory) -> None:
        self._records = records
        self.written = 0
        self._structure = Structure((spec.observation, spec.action, spec.policy_info))
        leaves = features_of(spec)
        self._examples = ExampleWriter(leaves)
        self._row_bytes = sum(leaf.dtype.itemsize * spec_size(leaf) for leaf in leaves.values())

    def write(self, episode: Episode) -> None:
        rows = episode.rows(episode.rewards.dtype)
        leaves = self._structure.flatten((rows.observation, rows.action, rows.policy_info))
        is_last = np.equal(rows.step_type, StepType.LAST)
        is_first = np.zeros(len(is_last), np.bool)
        is_first[0] = True
        self.written += len(is_last)
        columns = [*leaves, rows.reward, rows.discount, is_first, is_last, is_last & episode.terminated]
        most = max(1, _BLOCK_BYTES // self._row_bytes)
        for begin in range(0, len(is_last), most):
            for example in self._examples.encode([column[begin : begin + most] for column in columns]):
                self._records.write(example)


def features_of(spec: Trajectory) -> dict[str, ArraySpec]:
    """What the features of a step are, by name, in the order of the nests' leaves."""
    found = {}
    for role in _NESTS:
        nest = getattr(spec, role)
        structure = Structure(nest)
        for path, leaf in zip(structure.paths, structure.flatten(nest), strict=True):
            found[_below(role, path)] = leaf
    return {**found, "reward": spec.reward, "discount": spec.discount, **dict.fromkeys(_FLAGS, _FLAG)}


def _completed(episodes: Iterator[Episode], final: FinalObservations) -> Iterator[Episode]:
    """Gives all but the last their final observation; the last one, if it goes on, stays as it is."""
    before: Episode | None = None
    for episode in episodes:
        if before is not None and (found := final.added(before)) is not None:
            yield found
        before = episode
    if before is not None and (found := before if before.is_open else final.added(before)) is not None:
        yield found


def _below(role: str, path: str) -> str:
    return f"{role}/{path}" if path else role


def _described(path: Path, name: str) -> Mapping[str, Any]:
    if not path.is_file():
        raise OptionError(
            f"{name} must have a file {_FEATURES} beside it that says the dtypes and shapes of its features, as an "
            f'export writes it: {{"features": {{"action": {{"dtype": "int64", "shape": []}}, …}}}}. '
            "TF-Agents' own record files are of the format tf-agents."
        )
    try:
        described = json.loads(path.read_text())
    except ValueError as error:
        raise SpecError(f"{path} must be JSON, but {error}.") from error
    if not isinstance(described, dict) or not isinstance(described.get("features"), dict):
        raise SpecError(f"{path} must be an object with a key 'features'.")
    written = described.get("format", _FORMAT)
    if not isinstance(written, int) or written > _FORMAT:
        raise StoreFormatError(
            f"the features in {path} must be of format {_FORMAT} at most, got {written!r}. Update diskbuf.",
            path=str(path),
            is_newer=True,
        )
    return described


def _features(described: Mapping[str, Any], name: str) -> dict[str, ArraySpec]:
    found = {}
    for feature, value in described["features"].items():
        try:
            found[feature] = ArraySpec(value["shape"], value["dtype"])
        except (SpecError, KeyError, TypeError) as error:
            raise SpecError(f"feature {feature!r} in {name} must have a dtype and a shape: {error}.") from error
    for role in ("observation", "action"):
        if not any(feature == role or feature.startswith(f"{role}/") for feature in found):
            raise SpecError(f"{name} must have a feature {role!r}, or some below it, got {', '.join(found) or 'none'}.")
    for feature in ("reward", *_FLAGS):
        if feature not in found:
            raise SpecError(f"{name} must have the feature {feature!r}, got {', '.join(found)}.", path=feature)
    for feature in ("reward", "discount", *_FLAGS):
        spec = found.get(feature)
        if spec is not None and (spec.shape or spec.dtype.kind != ("b" if feature in _FLAGS else "f")):
            kind = "bool" if feature in _FLAGS else "a float"
            raise SpecError(f"feature {feature!r} in {name} must be {kind} [], got {spec.dtype} {list(spec.shape)}.")
    return found


def _nest(described: Mapping[str, Any], role: str, features: Mapping[str, ArraySpec]) -> Any:
    """The spec of a nest: the store's where it says the same, else dicts by the names of its features."""
    from diskbuf.exchange.mapping import nest_of

    flat = {
        name[len(role) + 1 :]: spec for name, spec in features.items() if name == role or name.startswith(f"{role}/")
    }
    if "spec" in described:
        kept = getattr(specs.from_json(described["spec"]), role, None)
        structure = Structure(kept)
        leaves = dict(zip(structure.paths, structure.flatten(kept), strict=True)) if kept is not None else {}
        if {path: (leaf.dtype, leaf.shape) for path, leaf in leaves.items()} == {
            path: (leaf.dtype, leaf.shape) for path, leaf in flat.items()
        }:
            return kept
    return nest_of(flat)
