"""Values that change with the step, such as how often to explore."""

import dataclasses
from typing import Any

import numpy as np

from diskbuf.errors import OptionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearSchedule:
    """Goes from one value to another along a line and stays there.

        >>> epsilon = LinearSchedule(initial_value=1.0, final_value=0.1, num_steps=1000)
        >>> epsilon(0), epsilon(500), epsilon(5000)
        (1.0, 0.55, 0.1)

    Attributes:
        initial_value: At step 0.
        final_value: At step `num_steps` and after it.
        num_steps: Steps from one to the other, at least 1.

    Raises:
        OptionError: When made with a value that is not finite, or too few steps.
    """

    initial_value: float
    final_value: float
    num_steps: int

    def __post_init__(self) -> None:
        for name in ("initial_value", "final_value"):
            if not _is_finite(getattr(self, name)):
                raise OptionError(f"{name} must be a finite number, got {getattr(self, name)!r}.")
        if not _is_finite(self.num_steps) or self.num_steps < 1:
            raise OptionError(f"num_steps must be at least 1, got {self.num_steps!r}.")

    def __call__(self, step: int) -> float:
        """Returns the value at a step."""
        share = min(max(int(step) / self.num_steps, 0.0), 1.0)
        return self.initial_value * (1 - share) + self.final_value * share


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating) and bool(np.isfinite(value))
