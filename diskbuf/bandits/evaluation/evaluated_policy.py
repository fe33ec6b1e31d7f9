"""The policy that is evaluated, whatever form it comes in: as probabilities of arms that are checked."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from diskbuf.bandits.log_reader import LoggedRows
from diskbuf.bandits.policies.bandit_policy import BanditPolicy, ConstraintSplitter
from diskbuf.errors import OptionError, SpecError
from diskbuf.networks.action_values import DiscreteActions
from diskbuf.policies.compiled_policy import CompiledPolicy
from diskbuf.tree import describe


@dataclasses.dataclass(frozen=True)
class LoggedColumn:
    """A policy that was asked when the log was written: a leaf of policy_info has its probabilities, or its arm.

    Attributes:
        name: Of the leaf, its path in policy_info: [K] probabilities, or one int, the arm that it would have chosen.
    """

    name: str


Floats = npt.NDArray[np.float64]
PolicyLike = BanditPolicy | CompiledPolicy | LoggedColumn | Callable[[Any], Any] | npt.ArrayLike
"""A BanditPolicy, one that was saved and loaded, a column of the log, a function from observations [N, *shape] to
probabilities [N, K], or [K] probabilities for all."""

# Probabilities in float32 over many arms miss 1 by a few millionths.
_TOLERANCE = 1e-5


class EvaluatedPolicy:
    """Gives checked probabilities for rows of a log.

    Args:
        policy: What is evaluated.
        num_actions: K, the arms of the log.
        minimum: The action of arm 0 in the log.

    Attributes:
        fixed: [K], when the probabilities are the same for every row; else None.
        column: Name of the leaf of policy_info that has them, for which rows must be read with it; else None.
        splitter: What takes masks off observations, where the policy has one.

    Raises:
        OptionError: If it is nothing of the kind, or has other arms than the log.
        SpecError: If fixed probabilities aren't [K] that sum to 1.
    """

    def __init__(self, policy: PolicyLike, *, num_actions: int, minimum: int) -> None:
        self._num_actions = num_actions
        self._minimum = minimum
        self.fixed: Floats | None = None
        self.column: str | None = None
        self.splitter: ConstraintSplitter | None = None
        self._function: Callable[[Any], Any] | None = None
        if isinstance(policy, BanditPolicy | CompiledPolicy):
            theirs = DiscreteActions.of(policy.action_spec)
            if (theirs.num_actions, theirs.minimum) != (num_actions, minimum):
                raise OptionError(
                    f"policy must choose among the log's {num_actions} arms from {minimum} on, got one that chooses "
                    f"among {theirs.num_actions} from {theirs.minimum} on. Map its arms to the log's."
                )
            self._function = policy.probabilities
            self.splitter = getattr(policy, "observation_and_action_constraint_splitter", None)
        elif isinstance(policy, LoggedColumn):
            self.column = policy.name
        elif callable(policy):
            self._function = policy
        else:
            self.fixed = self._checked(np.asarray(_numbers(policy))[None], 1, None, f"[{num_actions}]")[0]

    def probabilities(self, rows: LoggedRows) -> Floats:
        """Returns [N, K].

        Args:
            rows: N rows, with observations unless the probabilities are fixed.

        Raises:
            SpecError: If what the policy gives isn't [N, K], or a row isn't a distribution.
        """
        if self.column is not None:
            logged = rows.info[self.column]
            if logged.ndim == 1 and logged.dtype.kind in "iu":  # arms
                logged = logged[:, None] == np.arange(self._num_actions) + self._minimum
            return self._checked(logged, len(rows), rows, f"[{len(rows)}, {self._num_actions}]")
        if self._function is None:
            return np.broadcast_to(self.fixed_or_error(), (len(rows), self._num_actions))
        found = np.asarray(_numbers(self._function(rows.observation)))
        return self._checked(found, len(rows), rows, f"[{len(rows)}, {self._num_actions}]")

    def fixed_or_error(self) -> Floats:
        """Returns [K] of a policy that is the same for all rows."""
        if self.fixed is None:
            raise OptionError("policy must be fixed probabilities, got one that looks at observations.")
        return self.fixed

    def _checked(self, found: npt.NDArray[Any], number: int, rows: LoggedRows | None, shape: str) -> Floats:
        if found.shape != (number, self._num_actions):
            got = list(found.shape) if rows is not None else list(found.shape[1:])
            raise SpecError(
                f"the policy's probabilities must be {shape}, one for each of the log's arms, got {got}. Give each arm "
                "one, 0 where it is never chosen."
            )
        chances = found.astype(np.float64, copy=False)
        # NaN fails both comparisons.
        fits = (chances >= 0).all(axis=1)
        fits &= np.abs(chances.sum(axis=1) - 1) <= _TOLERANCE
        if not fits.all():
            at = int((~fits).argmax())
            where = "" if rows is None else f" for row {rows.ids[at]} of lane {rows.lanes[at]}"
            raise SpecError(
                "the policy's probabilities must be at least 0 and sum to 1, got "
                f"{np.array2string(found[at], precision=6, threshold=8)}, which sum to {chances[at].sum():g}{where}. "
                "Divide them by their sum."
            )
        return chances


def _numbers(found: Any) -> npt.NDArray[Any]:
    try:
        array = np.asarray(found)
    except ValueError as error:  # rows of different lengths
        raise SpecError(f"the policy's probabilities must be an array of numbers, got {describe(found)}.") from error
    if array.dtype.kind not in "buif":
        raise OptionError(
            "policy must be a BanditPolicy, a function from observations to probabilities [N, K], or probabilities "
            f"[K], got {found!r}."
        )
    return array
