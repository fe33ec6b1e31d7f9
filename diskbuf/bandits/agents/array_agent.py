"""Bandit agents that learn in NumPy, and how a checkpoint holds what they have learnt."""

import numpy as np

from diskbuf.bandits.agents.array_state import Arrays, array_state
from diskbuf.bandits.agents.bandit_agent import BanditAgent
from diskbuf.bandits.policies.bandit_policy import BanditPolicy

_COUNTER = "train_step_counter"


class ArrayAgent(BanditAgent):
    """Keeps what it has learnt in arrays. A subclass calls `_begin_arrays`, writes `_train`, and calls `_learnt`.

    A checkpoint holds the arrays.
    """

    train_step_counter: int

    def _begin_arrays(self, policy: BanditPolicy, arrays: Arrays) -> None:
        """Takes the policy and the arrays; called by a subclass when it is made, after `_begin_module`."""
        self._begin(policy)
        self.train_step_counter = 0
        self._learning = array_state(arrays | {_COUNTER: np.array(0, np.int64)}, self._restored)

    def _learnt(self, arrays: Arrays) -> None:
        """Takes new arrays, of the same names, dtypes and shapes, and counts one step."""
        self.train_step_counter += 1
        self._learning.values = arrays | {_COUNTER: np.array(self.train_step_counter, np.int64)}

    def _restored(self) -> None:
        arrays: Arrays = self._learning.values
        self.train_step_counter = int(arrays[_COUNTER])
        self._use(arrays)

    def _use(self, arrays: Arrays) -> None:
        """Makes the policy act by the arrays, which a checkpoint brought back."""
        raise NotImplementedError
