"""Which column of a log is what."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from diskbuf.errors import OptionError

_ROLES = ("action", "reward", "propensity", "timestamp", "key", "position")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogColumns:
    """Which column of a log is what.

        >>> LogColumns(context=["age", "country"], action="item", reward="click").of_roles()
        {'action': 'item', 'reward': 'click'}

    Attributes:
        context: Columns of the context vector, in its order; none for a bandit without contexts.
        action: What was done: ints from 0 on, or labels.
        reward: What came of it; None where that isn't known yet: all rows are then pending.
        propensity: How probable the action was when it was chosen; None where nobody wrote it down.
        timestamp: When it was chosen.
        key: What later rewards are joined by: ints, or text.
        position: Where it was shown, an int.

    Raises:
        OptionError: When a name is no text, or two of them are equal where they must differ.
    """

    context: Sequence[str] = ()
    action: str = "action"
    reward: str | None = "reward"
    propensity: str | None = None
    timestamp: str | None = None
    key: str | None = None
    position: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.context, str) or not isinstance(self.context, Sequence):
            raise OptionError(f"context must be a list of column names, got {self.context!r}.")
        object.__setattr__(self, "context", tuple(self.context))
        for name in self.context:
            _check_name("context", name)
        if len(set(self.context)) != len(self.context):
            raise OptionError(f"context must name each column once, got {list(self.context)}.")
        _check_name("action", self.action)
        for role, name in self.of_roles().items():
            _check_name(role, name)
        for role in ("action", "reward"):
            if getattr(self, role) in self.context:
                raise OptionError(f"context must leave out the column of the {role}, got {list(self.context)}.")

    def of_roles(self) -> dict[str, str]:
        """Returns the columns besides the context, by role; roles without one are left out."""
        named = {role: getattr(self, role) for role in _ROLES}
        return {role: name for role, name in named.items() if name is not None}

    def names(self) -> list[str]:
        """Returns every column once."""
        return list(dict.fromkeys([*self.context, *self.of_roles().values()]))


def _check_name(role: str, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise OptionError(f"{role} must name a column, got {name!r}.")
