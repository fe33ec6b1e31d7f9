"""A log that plays the environment for a policy which learns: offline replay."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.bandits import generators
from diskbuf.bandits.environments.batched_bandit import BatchedBandit
from diskbuf.bandits.log_reader import Log, LoggedRows, LogReader
from diskbuf.errors import EndOfLogError, OptionError, SpecError
from diskbuf.readers.requests import count, seed_of
from diskbuf.replay_buffers.uniform import flag
from diskbuf.trajectories import PolicyStep, StepType, TimeStep, Trajectory, from_transition, restart
from diskbuf.tree import Structure


class ReplayEnvironment(BatchedBandit):
    """Shows a policy the contexts of a log, and keeps those events in which it chooses the logged arm.

    The rejection sampling of Li, Chu, Langford and Wang, "Unbiased Offline Evaluation of Contextual-bandit-based News
    Article Recommendation Algorithms" (2011): where the policy chooses the arm that was logged, the event becomes a
    row, with the logged reward; otherwise it is passed over, and the policy never learns of it. If arms were logged
    uniformly, rows come as they would if the policy had acted in the world. If they weren't, an event that matches is
    kept with probability `lowest_propensity / propensity`, so that every choice of the policy is kept equally often,
    whichever arm it was. That needs propensities, and none below the lowest for any arm that the policy may choose.

    It plugs into drivers and into `diskbuf.bandits.trainer.train`. B contexts are shown at a time, the next B events of
    the log; events that come after the one that completes a row are shown again, so that what is kept doesn't depend on
    B, but for the moments at which the policy learns. Rows hold the info of the policy that is replayed, so what
    comes of it is a log again.

        >>> import diskbuf
        >>> from diskbuf.bandits.agents import BernoulliThompsonSamplingAgent
        >>> from diskbuf.bandits.environments import BernoulliEnvironment
        >>> from diskbuf.drivers import DynamicStepDriver
        >>> from diskbuf.policies import RandomPolicy
        >>> world = BernoulliEnvironment([0.1, 0.8], batch_size=4, seed=0)
        >>> logging = RandomPolicy(world.time_step_spec(), world.action_spec(), seed=0)
        >>> with diskbuf.UniformReplayBuffer(logging.trajectory_spec, batch_size=4) as log:
        ...     _ = DynamicStepDriver(world, logging, [log.add_batch], num_steps=2000).run()
        ...     replay = ReplayEnvironment(log, seed=0, is_uniform=True)
        ...     agent = BernoulliThompsonSamplingAgent(replay.time_step_spec(), replay.action_spec(), seed=0)
        ...     _ = DynamicStepDriver(replay, agent.collect_policy, num_steps=500).run()
        >>> replay.num_matches, 0.4 < replay.estimate() < 0.5
        (500, True)

    Args:
        store: A buffer, which stays open; or the path of a store, which is opened with its history.
        batch_size: B.
        seed: Of what is kept of logs that aren't uniform; None takes entropy from the system.
        is_uniform: True says that all arms were equally probable in each context, for logs without propensities; None
            goes by the propensities.
        lowest_propensity: The lowest propensity that any arm could have; None takes the lowest in the log.
        first_id: First step id to replay; None is the oldest there is.
        next_id: Where to stop, exclusive; None is after the newest there is now.
        invalid: "reject" or "drop", what becomes of events that aren't finite.

    Raises:
        OptionError: If the log has no propensities and is_uniform isn't True, or an argument is outside its rule.
        SpecError: If its rows aren't those of a bandit, or a propensity isn't above 0 and at most 1.
        WindowError: If the range isn't in the log.
        StoreError: If there is no store at the path, or it can't be opened.
    """

    def __init__(
        self,
        store: Log,
        batch_size: int = 1,
        *,
        seed: int | None = None,
        is_uniform: bool | None = None,
        lowest_propensity: float | None = None,
        first_id: int | None = None,
        next_id: int | None = None,
        invalid: Any = "reject",
    ) -> None:
        if invalid not in ("reject", "drop"):
            raise OptionError(f"invalid must be 'reject' or 'drop', got {invalid!r}.")
        count("batch_size", batch_size)
        is_uniform = is_uniform is not None and flag("is_uniform", is_uniform)
        self._rng = np.random.default_rng(seed_of(seed))
        self._log = LogReader(store, first_id=first_id, next_id=next_id)
        try:
            self._invalid = invalid
            self._lowest = None if is_uniform else self._lowest_propensity(lowest_propensity)
            spec = self._log.data_spec
            super().__init__(spec.observation, spec.action, spec.reward, batch_size)
            self._structure = Structure(self._observation_spec)
            self._first = np.full(self._batch_size, StepType.FIRST)
            self._begin(0)
        except BaseException:
            self.close()
            raise

    def _lowest_propensity(self, given: float | None) -> float:
        if not self._log.has_propensity:
            raise OptionError(
                f"the log must have propensities to be replayed, got {self._log} without policy_info/propensity. "
                "If each arm was equally probable in each context, say so: is_uniform=True."
            )
        lowest = np.inf
        for rows in self._log.blocks(with_observation=False, invalid="keep"):
            propensity = rows.propensity
            if propensity is None or not len(rows):
                continue
            fits = (propensity > 0) & (propensity <= 1)
            if not fits.all():
                at = int((~fits).argmax())
                raise SpecError(
                    f"leaf 'policy_info/propensity' must be above 0 and at most 1, got {propensity[at]} in row "
                    f"{rows.ids[at]} of lane {rows.lanes[at]}.",
                    path="policy_info/propensity",
                )
            lowest = min(lowest, float(propensity.min()))
        if given is None:
            return lowest
        if not 0 < given <= lowest * (1 + 1e-6):
            raise OptionError(f"lowest_propensity must be above 0 and at most the log's {lowest}, got {given!r}.")
        return float(given)

    def _begin(self, event: int) -> None:
        """Goes to an event of the log, which are numbered from 0 without those that are left out."""
        self._blocks: Iterator[LoggedRows] = self._log.blocks(invalid=self._invalid)
        self._ahead: LoggedRows | None = None  # events that were read, the next one first
        self._event = 0
        self._matches = 0
        self._sum = 0.0
        self._kept: list[list[npt.NDArray[Any]]] = []  # leaves of the row that is being made
        self._num_kept = 0
        self._keeping: npt.NDArray[np.int64] = np.arange(0)  # of the events decided on last, those that were kept
        self._decided: LoggedRows | None = None
        self._current = None
        while event:
            rows = self._next_events(min(event, 4096))
            self._pass_over(len(rows))
            event -= len(rows)
        self._settle()

    @property
    def num_events(self) -> int:
        """Events that were decided on so far, kept or passed over."""
        return self._event

    @property
    def num_matches(self) -> int:
        """Events that were kept."""
        return self._matches

    def estimate(self) -> float | None:
        """Returns the mean reward of the events that were kept; None when none was: there is no estimate then."""
        return self._sum / self._matches if self._matches else None

    def reset(self) -> TimeStep:
        """Shows the next events; those of the last step are shown again if they weren't decided on.

        Returns:
            FIRST in every lane, reward 0, discount 1. Where fewer than B events are left, lanes at the end show the
            last one again, and are not counted.

        Raises:
            EndOfLogError: If there are none left.
        """
        rows = self._shown = self._next_events(self._batch_size)
        positions = np.minimum(np.arange(self._batch_size), len(rows) - 1)
        leaves = [leaf[positions] for leaf in self._structure.flatten(rows.observation)]
        self._current = restart(self._structure.unflatten(leaves), batch_size=self._batch_size)
        return self._current

    def step(self, action: npt.NDArray[Any]) -> TimeStep:
        """Decides on the events shown, keeps those that match as far as the row needs them, and shows the next ones.

        Args:
            action: [B] arms.

        Returns:
            LAST in every lane, with the next contexts, or the same ones at the end of the log. Rewards are in what
            `make_row` returns.

        Raises:
            SpecError: If the action doesn't fit its spec; nothing was decided on.
            EndOfLogError: If no events are left.
            OptionError: If `make_row` wasn't called after the step before.
        """
        if self._decided is not None:
            raise OptionError("make_row must be called after each step, as drivers do, got another step.")
        if self._current is None:
            return self.reset()
        rows, before = self._shown, self._current
        index = self._checked_arms(action)[: len(rows)]
        is_match = index == rows.index
        if self._lowest is not None and rows.propensity is not None:
            is_match &= self._rng.random(len(rows)) * rows.propensity < self._lowest
        wanted = self._batch_size - self._num_kept
        found = np.flatnonzero(is_match)[:wanted]
        # What comes after the event that completes the row is shown again, to a policy that may have learnt from it.
        used = int(found[-1]) + 1 if len(found) == wanted else len(rows)
        self._keeping = found
        self._num_kept += len(found)
        self._matches += len(found)
        self._sum += float(rows.reward[found].sum(dtype=np.float64))
        self._pass_over(used)
        self._decided = rows
        self._current = None
        with contextlib.suppress(EndOfLogError):
            self.reset()
        return (self._current or before)._replace(
            step_type=np.full(self._batch_size, StepType.LAST), discount=np.zeros(self._batch_size, np.float32)
        )

    def make_row(self, time_step: TimeStep, action_step: PolicyStep, next_time_step: TimeStep) -> Trajectory | None:
        """Returns the row that the last step completed, if it did; drivers call this after each step.

        Args:
            time_step: What the policy was shown.
            action_step: What it chose.
            next_time_step: What `step` returned.
        """
        rows, found = self._decided, self._keeping
        if rows is None:
            return None
        self._decided = None
        part = from_transition(
            time_step._replace(step_type=self._first), action_step, next_time_step._replace(reward=rows.reward)
        )
        if len(rows) < self._batch_size:  # the last events of the log
            reward = np.zeros(self._batch_size, rows.reward.dtype)
            reward[: len(rows)] = rows.reward
            part = part._replace(reward=reward)
        structure = Structure(part)
        self._kept.append([np.asarray(leaf)[found] for leaf in structure.flatten(part)])
        if self._num_kept < self._batch_size:
            return None
        leaves = [np.concatenate(parts) for parts in zip(*self._kept, strict=True)]
        self._kept, self._num_kept = [], 0
        self._settle()
        row: Trajectory = structure.unflatten(leaves)
        return row

    def _settle(self) -> None:
        """Notes where the last complete row ended."""
        self._settled = {
            "event": np.array(self._event),
            "matches": np.array(self._matches),
            "sum": np.array(self._sum),
            "generator": generators.state_of(self._rng),
        }

    def state(self) -> dict[str, npt.NDArray[Any]]:
        """Returns what `restore` needs to go on with the same events, arrays by name.

        Events that were kept for a row that isn't complete are given up: they are shown again.
        """
        return {name: array.copy() for name, array in self._settled.items()}

    def restore(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Becomes what it was when `state` was called.

        Args:
            state: What `state` returned, of an environment made with the same arguments.
        """
        self._begin(int(state["event"]))
        self._matches, self._sum = int(state["matches"]), float(state["sum"])
        generators.go_on(self._rng, state["generator"])
        self._settle()

    def close(self) -> None:
        """Closes the store, unless a buffer was given. Closing twice is fine."""
        self._log.close()

    def __repr__(self) -> str:
        return f"ReplayEnvironment({self._log!r}, batch_size={self._batch_size})"

    def _next_events(self, most: int) -> LoggedRows:
        """The next events of the log, at least one; those that stay in `_ahead` until they are passed over."""
        while self._ahead is None or len(self._ahead) < most:
            more = next(self._blocks, None)
            if more is None:
                break
            self._ahead = more if self._ahead is None or not len(self._ahead) else _joined(self._ahead, more)
        if self._ahead is None or not len(self._ahead):
            raise EndOfLogError(
                f"{self} has been replayed to its end: {self._matches:,} of {self._event:,} events matched. "
                "Ask for fewer steps, or give it more of a log."
            )
        return self._ahead.take(slice(most))

    def _pass_over(self, events: int) -> None:
        if self._ahead is not None:
            self._ahead = self._ahead.take(slice(events, None))
        self._event += events


def _joined(one: LoggedRows, other: LoggedRows) -> LoggedRows:
    structure = Structure(one.observation)
    leaves = zip(structure.flatten(one.observation), structure.flatten(other.observation), strict=True)
    propensity = None
    if one.propensity is not None and other.propensity is not None:
        propensity = np.concatenate([one.propensity, other.propensity])
    return LoggedRows(
        ids=np.concatenate([one.ids, other.ids]),
        lanes=np.concatenate([one.lanes, other.lanes]),
        observation=structure.unflatten([np.concatenate(pair) for pair in leaves]),
        index=np.concatenate([one.index, other.index]),
        reward=np.concatenate([one.reward, other.reward]),
        propensity=propensity,
        info={},
    )
