"""Joins rewards that arrived later to the decisions of a log, by their keys, into a new store."""

import contextlib
import dataclasses
import datetime as dt
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from diskbuf.bandits.logs.converting import Fault, keys_of, numbers_of
from diskbuf.bandits.logs.opening import Format, parts_of
from diskbuf.bandits.logs.record import KeyKind, LogRecord
from diskbuf.bandits.logs.sources import UNREADABLE, Block, Kind, Malformed, Part, RetryError, TextPart
from diskbuf.bandits.logs.times import Moment, microseconds_of
from diskbuf.errors import OptionError, SpecError, StoreExistsError
from diskbuf.options import StoreOptions
from diskbuf.replay_buffers.opening import local_path
from diskbuf.replay_buffers.uniform import UniformReplayBuffer, flag
from diskbuf.replay_buffers.uniform import open as open_buffer
from diskbuf.store.layout import LOCK_FILE, STATE_FOLDER
from diskbuf.store.lock import WriterLock
from diskbuf.store.staging import Staging
from diskbuf.trajectories import Trajectory
from diskbuf.tree import Structure

Repeated = Literal["first", "last", "sum"]

_BLOCK_ROWS = 65_536
_SHOWN = 5
_MICROSECOND = dt.timedelta(microseconds=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class JoinReport:
    """What a join found and did. Print it, or keep `to_json()`.

    Attributes:
        store: The path of the new store.
        decisions: Rows in it.
        complete: Rows with a reward.
        joined: Rows that got one by this join.
        defaulted: Rows that got the default.
        pending: Rows without a reward yet.
        pending_ids: [pending] int64, their step ids.
        unknown: Rewards whose key is no decision's.
        unknown_keys: The first few of these keys.
        repeated: Rewards beyond the first of a key; those for decisions that had one already with them.
        repeated_keys: The first few of these keys.
        malformed: Rewards that couldn't be read.
        malformed_examples: The first few of them, and what was wrong.
    """

    store: str
    decisions: int
    complete: int
    joined: int
    defaulted: int
    pending: int
    pending_ids: npt.NDArray[np.int64]
    unknown: int
    unknown_keys: list[Any]
    repeated: int
    repeated_keys: list[Any]
    malformed: int
    malformed_examples: list[str]

    def to_json(self) -> str:
        """Returns it as JSON text."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps(fields | {"pending_ids": self.pending_ids.tolist()}, ensure_ascii=False, indent=2)

    def __str__(self) -> str:
        lines = [
            f"{self.decisions:,} decisions in {self.store}: {self.complete:,} complete, {self.pending:,} pending",
            f"  joined    {self.joined:,} rewards",
        ]
        if self.defaulted:
            lines.append(f"  default   {self.defaulted:,} decisions")
        for name, rows, keys in (
            ("unknown", self.unknown, self.unknown_keys),
            ("repeated", self.repeated, self.repeated_keys),
        ):
            if rows:
                lines.append(f"  {name:<9} {rows:,} rewards, of keys {', '.join(map(str, keys))}, ...")
        if self.malformed:
            lines.append(f"  malformed {self.malformed:,} rewards left out, the first of them:")
            lines += [f"    {example}" for example in self.malformed_examples]
        return "\n".join(lines)


def join_rewards(
    store: str | os.PathLike[str],
    rewards: Any,
    *,
    key: str = "key",
    reward: str = "reward",
    repeated: Repeated = "first",
    horizon: dt.timedelta | None = None,
    now: Moment | None = None,
    default: float | None = None,
    destination: str | os.PathLike[str] | None = None,
    strict: bool = True,
    format: Format | None = None,  # noqa: A002 - as in import_log
    storage_options: Mapping[str, Any] | None = None,
) -> JoinReport:
    """Joins rewards that arrived later to the decisions of a log, and leaves a new store.

    Rewards come in any order. A decision without one stays pending: its reward is NaN. The new store is made beside
    the old one and put into its place in one step, so there is a whole one at any moment; killed anywhere, call it
    again. Ids stay as they are. Memory holds the rewards, at about 30 bytes each and text keys besides, and a block
    of decisions.

    A reader that has the old store open must be opened again after it was replaced.

        >>> import tempfile
        >>> from diskbuf.bandits.logs.columns import LogColumns
        >>> from diskbuf.bandits.logs.importing import import_log
        >>> decisions = {"key": [7, 8, 9], "action": [0, 1, 0]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     columns = LogColumns(action="action", reward=None, key="key")
        ...     _ = import_log(decisions, f"{folder}/log.zarr", columns)
        ...     report = join_rewards(f"{folder}/log.zarr", {9: 1.0, 7: 0.0})
        >>> report.complete, report.pending_ids
        (2, array([1]))

    Args:
        store: The path of a log with keys.
        rewards: What `import_log` reads; a dict of key to reward; or a dict of two arrays under the two names.
        key: The column of keys in there.
        reward: The column of rewards.
        repeated: Which counts where a key has several: the first, the last, or their sum. One that the decision has
            already comes before all.
        horizon: How long a reward may take: decisions older than that without one get the default. None with a default
            gives it to all that have none.
        now: What age is measured from; None is the log's last timestamp.
        default: The reward of decisions for which none came; None leaves them pending.
        destination: Where the new store goes; None replaces the old one.
        strict: Whether the first reward that can't be read is an error; otherwise they are left out and counted.
        format: Of files of rewards; None goes by the suffix.
        storage_options: For fsspec.

    Returns:
        What was found.

    Raises:
        OptionError: If an argument is outside its rule.
        SpecError: If the store holds no keys, a reward can't be read, or two decisions have one key that a reward has.
        StoreExistsError: If there is something at the destination.
        StoreLockedError: If another process writes the store, or joins into it.
        StoreError: If there is no store, or it can't be read.
        In every case the old store is as it was.
    """
    source = local_path(store)
    if repeated not in get_args(Repeated):
        raise OptionError(f"repeated must be 'first', 'last' or 'sum', got {repeated!r}.")
    if default is not None and (
        isinstance(default, bool) or not isinstance(default, int | float) or not math.isfinite(default)
    ):
        raise OptionError(f"default must be a finite number or None, got {default!r}.")
    if (horizon is not None or now is not None) and default is None:
        raise OptionError("default must be given with horizon and now, got None.")
    if horizon is not None and not (isinstance(horizon, dt.timedelta) and horizon >= dt.timedelta(0)):
        raise OptionError(f"horizon must be a timedelta of at least 0, got {horizon!r}.")
    if now is not None and horizon is None:
        raise OptionError("now must be left out without a horizon.")
    target = source if destination is None else local_path(destination)
    if target != source and (target.is_file() or (target.is_dir() and any(target.iterdir()))):
        raise StoreExistsError(
            f"cannot create a store at {target}: the path is taken. Choose another.", path=str(target)
        )
    malformed = Malformed(strict=flag("strict", strict))
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(_read_while_locked(source))
        kind = _key_kind(log)
        part_list = _parts(rewards, key, reward, format=format, storage_options=storage_options)
        arrived = _Arrived.read(part_list, key, reward, kind=kind, malformed=malformed)
        staging = stack.enter_context(Staging(target))
        rule = _Rule(
            repeated=repeated,
            default=default,
            before=None if horizon is None else _age_limit(log, horizon, now),
        )
        joining = _Joining(log, arrived, rule)
        made = UniformReplayBuffer(
            log.data_spec,
            log.batch_size,
            None,
            path=staging.store,
            metadata=log.metadata,
            options=StoreOptions(fsync="never"),  # its close syncs everything
        )
        with made as new:
            for rows in joining.blocks():
                new.extend(rows)
        if target == source:
            staging.swap_into_place()
        else:
            staging.move_into_place()
        return joining.report(str(target), malformed)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rule:
    """Which reward a decision gets.

    Attributes:
        repeated: Which counts of several.
        default: Where none came, None for none.
        before: Only for decisions before this moment; None for all.
    """

    repeated: str
    default: float | None
    before: int | None


@contextlib.contextmanager
def _read_while_locked(path: Path) -> Iterator[UniformReplayBuffer]:
    """A store open to read, that nobody writes meanwhile."""
    with open_buffer(path) as log:
        lock = WriterLock(path / STATE_FOLDER / LOCK_FILE, store=str(path))
        try:
            if log.first_id != 0:
                raise SpecError(
                    f"a log must have its rows from id 0 on to be joined, got {path} from {log.first_id} on."
                )
            yield log
        finally:
            lock.close()


def _key_kind(log: UniformReplayBuffer) -> KeyKind:
    spec = log.data_spec
    info = spec.policy_info if isinstance(spec, Trajectory) else None
    leaf = info.get("key") if isinstance(info, dict) else None
    if leaf is None or leaf.dtype != np.int64 or leaf.shape not in ((), (2,)):
        raise SpecError(
            f"a log must have keys to be joined by, got {log.path} without. Import it with LogColumns(key=...).",
            path="policy_info/key",
        )
    record = LogRecord.of(log.metadata)
    if record is not None and record.key is not None:
        return record.key
    return "int" if leaf.shape == () else "blake2b-16"


def _age_limit(log: UniformReplayBuffer, horizon: dt.timedelta, now: Moment | None) -> int:
    if "timestamp" not in log.data_spec.policy_info:
        raise OptionError("horizon must be left out for a log without timestamps. Import it with a timestamp column.")
    if now is not None:
        return microseconds_of(now, name="now") - horizon // _MICROSECOND
    latest = None
    number = Structure(log.data_spec).paths.index("policy_info/timestamp")
    for first in range(0, log.next_id, _BLOCK_ROWS):
        leaves = log._opened().read_columns([number], first, min(log.next_id, first + _BLOCK_ROWS))
        times = cast(list[npt.NDArray[Any]], leaves)[0]
        latest = int(times.max()) if latest is None else max(latest, int(times.max()))
    return (latest or 0) - horizon // _MICROSECOND


def _parts(rewards: Any, key: str, reward: str, **options: Any) -> list[Part]:
    if isinstance(rewards, Mapping) and set(rewards) != {key, reward}:
        try:
            rewards = pa.table(
                {key: pa.array(list(rewards.keys())), reward: pa.array(list(rewards.values()), pa.float64())}
            )
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise OptionError(f"rewards as a dict must be of key to number, got {error}.") from error
    return parts_of(rewards, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arrived:
    """Rewards by key, each key once, ascending.

    Attributes:
        keys: [R] int64; of digests their first half.
        rest: [R] int64, their second half; None for keys that are ints.
        first: [R] float32, the first reward of each key.
        last: [R] float32.
        total: [R] float64.
        counts: [R] int64, how many each key has.
        places: [R] int64, where the first of each is among all that came.
        shown: From such a place to the key, for people.
    """

    keys: npt.NDArray[np.int64]
    rest: npt.NDArray[np.int64] | None
    first: npt.NDArray[np.float32]
    last: npt.NDArray[np.float32]
    total: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    places: npt.NDArray[np.int64]
    shown: Any

    @classmethod
    def read(cls, parts: list[Part], key: str, reward: str, *, kind: KeyKind, malformed: Malformed) -> "_Arrived":
        """Reads all rewards."""
        keys: list[npt.NDArray[np.int64]] = [np.zeros((0, 2) if kind == "blake2b-16" else 0, np.int64)]
        values: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)]
        texts: list[pa.Array] = []
        for part in parts:
            for found, numbers, column in _reward_blocks(part, key, reward, kind=kind, malformed=malformed):
                keys.append(found)
                values.append(numbers)
                texts.append(column)
        return cls._of(np.concatenate(keys), np.concatenate(values), pa.chunked_array(texts) if texts else None)

    @classmethod
    def _of(cls, keys: npt.NDArray[np.int64], values: npt.NDArray[np.float32], shown: Any) -> "_Arrived":
        halves = (keys,) if keys.ndim == 1 else (keys[:, 0], keys[:, 1])
        order = np.lexsort(halves[::-1])  # stable: of one key in the order in which they came
        ordered = [half[order] for half in halves]
        starts_key = np.ones(len(order), np.bool_)
        if len(order):
            starts_key[1:] = np.any([half[1:] != half[:-1] for half in ordered], axis=0)
        starts = np.flatnonzero(starts_key)
        counts = np.diff(starts, append=len(order))
        sorted_values = values[order]
        first_half = ordered[0][starts]
        if len(halves) == 2 and len(first_half) > 1 and (first_half[1:] == first_half[:-1]).any():
            raise SpecError("keys must differ in the first half of their digests, got two that don't. Rename one.")
        return cls(
            keys=first_half,
            rest=ordered[1][starts] if len(halves) == 2 else None,
            first=sorted_values[starts],
            last=sorted_values[starts + counts - 1],
            total=np.add.reduceat(sorted_values.astype(np.float64), starts) if len(starts) else np.zeros(0),
            counts=counts,
            places=order[starts],
            shown=shown,
        )

    def find(self, keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns where the keys [N] or [N, 2] of decisions are, -1 where no reward has them."""
        if not len(self.keys):
            return np.full(len(keys), -1)
        wanted = keys if self.rest is None else keys[:, 0]
        places = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        is_same = self.keys[places] == wanted
        if self.rest is not None:
            is_same &= self.rest[places] == keys[:, 1]
        return np.where(is_same, places, -1)

    def show(self, which: npt.NDArray[np.bool_]) -> list[Any]:
        """Returns the first few keys of a mask [R], in the order in which they came."""
        return [self.shown[int(place)].as_py() for place in np.sort(self.places[which])[:_SHOWN]]


def _reward_blocks(
    part: Part, key: str, reward: str, *, kind: KeyKind, malformed: Malformed
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], pa.Array]]:
    schema = part.schema()
    missing = [name for name in (key, reward) if name not in schema]
    if missing:
        raise OptionError(f"key and reward must be columns of the rewards, {list(schema)[:30]}, got {missing} besides.")
    kinds: dict[str, Kind] = {key: "text" if kind == "blake2b-16" else "integer", reward: "number"}
    reading = _Reading(key=key, reward=reward, kind=kind, malformed=malformed, is_exact=not isinstance(part, TextPart))
    before = malformed.copy()
    try:
        found = [reading.take(block) for block in part.blocks(kinds)]
    except (*UNREADABLE, RetryError) as error:
        if not isinstance(part, TextPart):
            raise SpecError(f"{part.name} must be readable, got: {error}. Nothing was joined.") from error
        malformed.count, malformed.examples = before.count, before.examples
        reading = dataclasses.replace(reading, is_exact=True)
        found = [reading.take(block) for block in part.careful_blocks(kinds, malformed)]
    yield from found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Reading:
    """How rewards are read."""

    key: str
    reward: str
    kind: KeyKind
    malformed: Malformed
    is_exact: bool

    def take(self, block: Block) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], pa.Array]:
        """Keys, rewards and keys as they were, of the rows of a block that can be read."""
        faults: list[Fault] = []
        column = block.columns[self.key]
        keys = keys_of(self.key, column, self.kind, faults)
        values = numbers_of(self.reward, block.columns[self.reward])
        if not np.isfinite(values).all():
            must = f"column {self.reward!r} must hold a finite number"
            faults.append(Fault(~np.isfinite(values), must, values))
        good = np.ones(block.rows, np.bool_)
        for fault in faults:
            rows = np.flatnonzero(fault.rows & good)
            if len(rows) and self.malformed.is_strict and not self.is_exact:
                raise RetryError
            for row in rows.tolist():
                self.malformed.tell(f"{fault.must}, got {fault.value(row)!r:.100} in {block.where(row)}")
            good[rows] = False
        return (keys, values, column) if good.all() else (keys[good], values[good], column.filter(pa.array(good)))


class _Joining:
    """One join on its way: decisions go through it, block by block.

    Args:
        log: The decisions.
        arrived: The rewards.
        rule: Which counts.
    """

    def __init__(self, log: UniformReplayBuffer, arrived: _Arrived, rule: _Rule) -> None:
        self._log, self._arrived, self._rule = log, arrived, rule
        self._structure = Structure(log.data_spec)
        self._matches = np.zeros(len(arrived.keys), np.int64)
        self._had_one = np.zeros(len(arrived.keys), np.bool_)
        self._decisions = self._joined = self._defaulted = self._complete = 0
        self._pending: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]

    def blocks(self) -> Iterator[Trajectory]:
        """Yields the rows [B, T] of the new store."""
        store = self._log._opened()
        numbers = range(len(self._structure.paths))
        steps = max(1, _BLOCK_ROWS // self._log.batch_size)
        for first in range(0, self._log.next_id, steps):
            leaves = store.read_columns(numbers, first, min(self._log.next_id, first + steps))
            rows: Trajectory = self._structure.unflatten(cast(list[Any], leaves))
            yield rows._replace(reward=self._rewarded(rows, first))

    def _rewarded(self, rows: Trajectory, first_id: int) -> npt.NDArray[Any]:
        """The rewards [B, T] of a block, those that came among them."""
        keys = rows.policy_info["key"]
        is_step = ~rows.is_boundary()
        places = self._arrived.find(keys.reshape(-1, *keys.shape[2:])).reshape(rows.reward.shape)
        found = is_step & (places >= 0)
        self._count_matches(places, found, first_id)
        had_one = ~np.isnan(rows.reward)
        self._had_one[places[found & had_one]] = True
        reward: npt.NDArray[Any] = rows.reward.copy()
        reward[found] = self._counting(places[found], rows.reward[found])
        missing = is_step & np.isnan(reward)
        if self._rule.default is not None:
            gets = missing
            if self._rule.before is not None:
                gets = missing & (rows.policy_info["timestamp"] < self._rule.before)
            reward[gets] = self._rule.default
            self._defaulted += int(gets.sum())
            missing &= ~gets
        self._decisions += int(is_step.sum())
        self._joined += int((found & (reward != rows.reward)).sum())
        self._complete += int((is_step & ~missing).sum())
        self._pending.append(np.unique(missing.nonzero()[1]) + first_id)
        return reward

    def _count_matches(self, places: npt.NDArray[np.int64], found: npt.NDArray[np.bool_], first_id: int) -> None:
        self._matches += np.bincount(places[found], minlength=len(self._matches))
        several = self._matches > 1
        if several.any():
            of_key = found & several[np.maximum(places, 0)]
            step_id = first_id + int(of_key.nonzero()[1].max())
            raise SpecError(
                f"a key must be of one decision to be joined by, got {self._arrived.show(several)[:1]} in row "
                f"{step_id} and before. Nothing was joined. Give each decision a key of its own.",
                path="policy_info/key",
            )

    def _counting(self, places: npt.NDArray[np.int64], known: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The reward [N] that counts of those that came and the one that is there."""
        arrived, is_new = self._arrived, np.isnan(known)
        if self._rule.repeated == "last":
            return arrived.last[places]
        if self._rule.repeated == "first":
            return np.where(is_new, arrived.first[places], known)
        with np.errstate(over="ignore"):  # is found below
            total: npt.NDArray[Any] = (np.where(is_new, 0.0, known) + arrived.total[places]).astype(known.dtype)
        if not np.isfinite(total).all():
            raise SpecError(
                "leaf 'reward' must be finite in float32, got a sum that isn't. Nothing was joined. "
                "Use repeated='first' or 'last', or smaller rewards.",
                path="reward",
            )
        return total

    def report(self, store: str, malformed: Malformed) -> JoinReport:
        """Returns what was found, after all blocks have gone through."""
        arrived = self._arrived
        is_unknown = self._matches == 0
        beyond = np.where(is_unknown, 0, arrived.counts - 1 + self._had_one)
        pending_ids = np.concatenate(self._pending)
        return JoinReport(
            store=store,
            decisions=self._decisions,
            complete=self._complete,
            joined=self._joined,
            defaulted=self._defaulted,
            pending=self._decisions - self._complete,
            pending_ids=pending_ids,
            unknown=int(arrived.counts[is_unknown].sum()),
            unknown_keys=arrived.show(is_unknown),
            repeated=int(beyond.sum()),
            repeated_keys=arrived.show(beyond > 0),
            malformed=malformed.count,
            malformed_examples=malformed.examples,
        )
