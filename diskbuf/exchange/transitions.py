"""Cuts a stream of transitions, as offline data sets and other replay buffers keep them, into episodes.

A transition is an observation, an action, what came of it, and often the observation after it. Which observations
follow each other is checked where the stream tells: nothing is joined that doesn't belong together.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskbuf.errors import OptionError, SpecError
from diskbuf.exchange.contract import Episode
from diskbuf.tree import Structure

Leaves = Sequence[NDArray[Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transitions:
    """Consecutive transitions of one environment.

    Attributes:
        observations: Leaves [N, *shape].
        actions: Leaves [N, *shape].
        rewards: [N].
        terminated: [N] bool, whether the action ended an episode.
        truncated: [N] bool, whether the episode was cut off behind the action.
        next_observations: Leaves [N, *shape], what came after the actions; None where that isn't known.
        policy_info: Leaves [N, *shape].
    """

    observations: Leaves
    actions: Leaves
    rewards: NDArray[Any]
    terminated: NDArray[np.bool]
    truncated: NDArray[np.bool]
    next_observations: Leaves | None = None
    policy_info: Leaves = ()

    def __len__(self) -> int:
        return len(self.rewards)

    def part(self, begin: int, end: int) -> "Transitions":
        """Returns those from one place to another; views."""
        return Transitions(
            observations=[leaf[begin:end] for leaf in self.observations],
            actions=[leaf[begin:end] for leaf in self.actions],
            rewards=self.rewards[begin:end],
            terminated=self.terminated[begin:end],
            truncated=self.truncated[begin:end],
            next_observations=None
            if self.next_observations is None
            else [leaf[begin:end] for leaf in self.next_observations],
            policy_info=[leaf[begin:end] for leaf in self.policy_info],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Nests:
    """The nests that leaves are put together to.

    Attributes:
        observation: Of the observations.
        action: Of the actions.
        policy_info: Of the policy_info.
    """

    observation: Structure
    action: Structure
    policy_info: Structure


def episodes_of(
    blocks: Iterable[Transitions], nests: Nests, *, name: str, first_row: int = 0, cuts_tail: bool = False
) -> Iterator[Episode]:
    """Puts transitions together to episodes.

    With next observations, the one behind an episode's last action is its final observation. Without them, what is in
    none of the rows isn't known:

    - an episode that was cut off is cut one step earlier: the observation of its last step is its final one, and that
      step's action and reward are left out, because what came of them can't be bootstrapped from. D4RL's
      `qlearning_dataset` leaves out the same transitions. One of a single step has none left, and is left out;
    - the boundary of an episode that terminated repeats its last observation. Its discount is 0, so that nothing is
      bootstrapped from it, and no transition is lost.

    What follows the last end is an episode that goes on.

    Args:
        blocks: The transitions, in order, in blocks of any length.
        nests: What leaves are put together to.
        name: Of the source, for messages.
        first_row: Number of the first transition, for messages.
        cuts_tail: Whether what follows the last end counts as cut off, where its last next observation is known.

    Yields:
        The episodes, one in memory at a time.

    Raises:
        SpecError: When the observation after an action isn't the next one although no episode ends between them.
    """
    parts: list[Transitions] = []
    row = first_row
    for block in blocks:
        begin = 0
        for end in (np.flatnonzero(block.terminated | block.truncated) + 1).tolist():
            parts.append(block.part(begin, end))
            episode = _episode(parts, nests, name, row + end)
            parts = []
            begin = end
            if episode is not None:
                yield episode
        if begin < len(block):
            parts.append(block.part(begin, len(block)))
        row += len(block)
    if parts:
        episode = _episode(parts, nests, name, row, is_cut=cuts_tail and parts[-1].next_observations is not None)
        if episode is not None:
            yield episode


def with_final_observation(episode: Episode) -> Episode | None:
    """Returns an episode that has its final observation, for formats that can't do without.

    One that has it is returned as it is. Where it isn't known, nothing is made up: an episode that goes on, was broken
    off, or was cut off and has no boundary, is cut off one step earlier, its last observation being the final one. One
    that terminated repeats its last observation, from which nothing is bootstrapped.

    Returns:
        The episode; None when no action is left.
    """
    steps = len(episode.rewards)
    observation = Structure(episode.observations)
    observations = observation.flatten(episode.observations)
    if len(observations[0]) == steps + 1:
        return episode
    if episode.terminated:
        longer = [np.concatenate([leaf, leaf[-1:]]) for leaf in observations]
        return dataclasses.replace(episode, observations=observation.unflatten(longer))
    if steps == 1:
        return None
    rest = Structure((episode.actions, episode.policy_info))
    actions, info = rest.unflatten([leaf[:-1] for leaf in rest.flatten((episode.actions, episode.policy_info))])
    return dataclasses.replace(
        episode,
        actions=actions,
        rewards=episode.rewards[:-1],
        truncated=True,
        discounts=None if episode.discounts is None else episode.discounts[:-1],
        policy_info=info,
    )


class FinalObservations:
    """Gives episodes their final observation as `with_final_observation` does, and counts what that cost.

    Attributes:
        cut: Episodes that were cut by a step, by whether they were open.
        lost: Episodes of which no step was left.
        repeated: Episodes that terminated, and repeat their last observation.
    """

    def __init__(self) -> None:
        self.cut = {True: 0, False: 0}
        self.lost = 0
        self.repeated = 0

    def added(self, episode: Episode) -> Episode | None:
        """Returns the episode with its final observation, None when no action is left."""
        found = with_final_observation(episode)
        if found is None:
            self.lost += 1
        elif found is not episode and episode.terminated:
            self.repeated += 1
        elif found is not episode:
            self.cut[episode.is_open] += 1
        return found

    @property
    def notes(self) -> list[str]:
        """What was lost, a sentence each."""
        found = []
        for is_open, what in ((True, "open"), (False, "truncated")):
            if count := self.cut[is_open]:
                end = ", and count as truncated" if is_open else ", because their final observations aren't there"
                found.append(f"{_counted(count, f'{what} episode')} cut by a step{end}")
        if self.repeated:
            found.append(
                f"{_counted(self.repeated, 'terminated episode')} given the last observation again as the final one"
            )
        if self.lost:
            found.append(f"{_counted(self.lost, 'episode')} left out, being of one step without what came after it")
        return found


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what} was" if count == 1 else f"{count:,} {what}s were"


def is_name(value: Any) -> bool:
    """Whether an option is a name."""
    return isinstance(value, str) and bool(value)


def check_names(options: Any, *fields: str) -> None:
    """Refuses options of a format that must be names and aren't.

    Raises:
        OptionError: When one isn't.
    """
    for field in fields:
        if not is_name(getattr(options, field)):
            raise OptionError(f"{field} must be a name, got {getattr(options, field)!r}.")


def flags(values: NDArray[Any], name: str) -> NDArray[np.bool]:
    """Returns flags as bools, a copy.

    Args:
        values: [N] bools, or numbers that are 0 or 1.
        name: Which these are, for messages.

    Raises:
        SpecError: When one is something else.
    """
    if values.dtype == np.bool:
        return values.copy()
    found: NDArray[np.bool] = values == 1
    is_wrong = ~(found | (values == 0))
    if is_wrong.any():
        row = int(is_wrong.argmax())
        raise SpecError(f"{name} must be 0 or 1, got {values[row]} as value {row}.")
    return found


def _episode(
    parts: Sequence[Transitions], nests: Nests, name: str, end: int, *, is_cut: bool = False
) -> Episode | None:
    """Puts an episode together; `end` is the number of the transition behind it."""
    steps = sum(map(len, parts))
    terminated = bool(parts[-1].terminated[-1])
    truncated = (is_cut or bool(parts[-1].truncated[-1])) and not terminated
    observations = _joined([part.observations for part in parts])
    final = [leaf[-1:] for leaf in observations]
    if parts[-1].next_observations is not None:
        following = _joined([part.next_observations or () for part in parts])
        _check_follows(observations, following, nests, name=name, first_row=end - steps)
        final = [leaf[-1:] for leaf in following]
    elif truncated:
        steps -= 1
        if not steps:
            return None
        observations = [leaf[:-1] for leaf in observations]
    if terminated or truncated:
        observations = [np.concatenate(pair) for pair in zip(observations, final, strict=True)]
    return Episode(
        observations=nests.observation.unflatten(observations),
        actions=nests.action.unflatten([leaf[:steps] for leaf in _joined([part.actions for part in parts])]),
        rewards=_one([part.rewards for part in parts])[:steps],
        terminated=terminated,
        truncated=truncated,
        policy_info=nests.policy_info.unflatten(
            [leaf[:steps] for leaf in _joined([part.policy_info for part in parts])]
        ),
    )


def _check_follows(observations: Leaves, following: Leaves, nests: Nests, *, name: str, first_row: int) -> None:
    for path, leaf, after in zip(nests.observation.paths, observations, following, strict=True):
        is_same = leaf[1:] == after[:-1]
        if not is_same.all():
            if leaf.dtype.kind == "f":
                is_same |= np.isnan(leaf[1:]) & np.isnan(after[:-1])
            is_wrong = ~is_same.reshape(len(is_same), -1).all(axis=1)
            if is_wrong.any():
                row = first_row + int(is_wrong.argmax())
                raise SpecError(
                    f"the next observation of step {row} must be the observation of step {row + 1}, because no episode "
                    f"ends between them, got another one{f' in {path!r}' if path else ''}. {name} lacks the end of an "
                    "episode, or its transitions are shuffled.",
                    path=path,
                )


def _joined(parts: Sequence[Leaves]) -> list[NDArray[Any]]:
    return [_one(leaves) for leaves in zip(*parts, strict=True)]


def _one(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
