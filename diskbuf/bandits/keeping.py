"""What a bandit training keeps in its folder: the last checkpoints, and the last policies."""

import shutil
import time
from pathlib import Path
from typing import Any

from diskbuf.errors import OptionError, StoreCorruptError
from diskbuf.policies import CompiledPolicy, saving

_KEPT = 5  # checkpoints and policies
_PATIENCE = 10  # saving takes at most one part in so many of the time


class Keeper:
    """Saves an agent and what belongs to it, each time with the agent's policy, and brings the last save back.

    Args:
        root: The folder.
        agent: The agent, a trackable.
        parts: Other trackables by name.
        is_saving_policy: Whether policies are saved.

    Raises:
        OptionError: If the agent's policy can't be saved, but should be.
    """

    def __init__(self, root: Path, agent: Any, parts: dict[str, Any], *, is_saving_policy: bool) -> None:
        import tensorflow as tf

        if is_saving_policy and not isinstance(agent.policy, CompiledPolicy) and not hasattr(agent.policy, "compiled"):
            raise OptionError(
                f"agent.policy must be one that can be saved, got {type(agent.policy).__name__}. Give it a method "
                "compiled(), as diskbuf.bandits.policies.BanditPolicy has, or use save_policy=False."
            )
        self._root = root
        self._agent = agent
        self._is_saving_policy = is_saving_policy
        try:
            self._checkpoint = tf.train.Checkpoint(agent=agent, **parts)
        except ValueError as error:
            raise OptionError(
                f"agent must be a tf.Module, which a checkpoint can hold, got {type(agent).__name__}: {error}"
            ) from error
        self._manager = tf.train.CheckpointManager(self._checkpoint, str(root), max_to_keep=_KEPT)
        self._again_after = 0.0
        for left in (*root.glob("ckpt-*_temp"), *root.glob("policy_*.unfinished-*")):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)

    @property
    def latest(self) -> str | None:
        """The last checkpoint's path."""
        latest: str | None = self._manager.latest_checkpoint
        return latest

    def restore(self) -> int | None:
        """Brings back the last checkpoint, and returns its number; None if there is none.

        Raises:
            OptionError: If it is of another agent.
            StoreCorruptError: If it can't be read.
        """
        import tensorflow as tf

        if self.latest is None:
            return None
        try:
            self._checkpoint.restore(self.latest).expect_partial().assert_existing_objects_matched()
        except (ValueError, AssertionError) as error:
            raise OptionError(
                f"agent and metrics must be made as those whose checkpoint is {self.latest}, but they don't fit: "
                f"{error}. Make them so, or use another root_dir."
            ) from error
        except (tf.errors.OpError, IndexError) as error:
            raise StoreCorruptError(
                f"checkpoint {self.latest} must be whole, but can't be read: {error}. Restore its files, or begin in "
                "another root_dir.",
                path=self.latest,
            ) from error
        return int(self.latest.rpartition("-")[2])

    @property
    def is_due(self) -> bool:
        """Whether enough time has passed since it last saved, or it never did."""
        return time.monotonic() >= self._again_after

    def save_start(self) -> None:
        """Saves checkpoint 0, of before anything was done, unless there is a checkpoint."""
        if self.latest is None:
            self._manager.save(checkpoint_number=0)

    def save(self, number: int, *, policy_number: int) -> None:
        """Saves a checkpoint and the policy.

        Args:
            number: Of the checkpoint, `ckpt-NUMBER`.
            policy_number: Of the policy, `policy_NUMBER`.
        """
        started = time.monotonic()
        if self._is_saving_policy:  # before the checkpoint, which says that this much is done
            self._save_policy(policy_number)
        self._manager.save(checkpoint_number=number)
        ended = time.monotonic()
        self._again_after = ended + _PATIENCE * (ended - started)

    def _save_policy(self, number: int) -> None:
        path = self._root / f"policy_{number}"
        if not path.exists():  # else a run that was killed here has saved it
            saving.save_policy(self._agent.policy, path)
        names = (found.name.removeprefix("policy_") for found in self._root.glob("policy_*"))
        numbers = sorted(int(name) for name in names if name.isdecimal())
        for old in numbers[:-_KEPT]:
            shutil.rmtree(self._root / f"policy_{old}", ignore_errors=True)
