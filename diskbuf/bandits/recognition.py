"""Tells a log of decisions from the steps of episodes, by a sample of the rows."""

import numpy as np

from diskbuf.replay_buffers.uniform import UniformReplayBuffer
from diskbuf.scanning import scan
from diskbuf.trajectories import StepType

_STEPS = 256


def is_log(buffer: UniformReplayBuffer) -> bool | None:
    """Returns whether each row is a decision of its own, as in a bandit's log.

    There an episode is one row, FIRST with LAST behind it; a row that is MID, or has one behind it, is of a longer one.

        >>> from diskbuf import trajectories
        >>> from diskbuf.specs import ArraySpec, BoundedArraySpec
        >>> spec = trajectories.trajectory_spec(
        ...     trajectories.time_step_spec(ArraySpec([], "float32")),
        ...     trajectories.PolicyStep(BoundedArraySpec([], "int32", 0, 2)),
        ... )
        >>> with UniformReplayBuffer(spec, 2) as buffer:
        ...     seen = np.zeros(2, np.float32)
        ...     first = trajectories.restart(seen, batch_size=2)
        ...     chosen = trajectories.PolicyStep(np.zeros(2, np.int32))
        ...     found = [is_log(buffer)]
        ...     after = trajectories.termination(seen, np.ones(2))
        ...     buffer.add_batch(trajectories.from_transition(first, chosen, after))
        ...     found.append(is_log(buffer))
        ...     after = trajectories.transition(seen, np.ones(2))
        ...     buffer.add_batch(trajectories.from_transition(first, chosen, after))
        ...     found.append(is_log(buffer))
        >>> found
        [None, True, False]

    Args:
        buffer: Trajectories; the oldest and the newest steps are looked at.

    Returns:
        None when no row tells.
    """
    is_any = False
    columns = ["step_type", "next_step_type"]
    middle = max(buffer.first_id + _STEPS, buffer.next_id - _STEPS)
    for first, last in ((buffer.first_id, buffer.first_id + _STEPS), (middle, buffer.next_id)):
        for block in scan(buffer, columns, first_id=first, next_id=last):
            here, behind = (np.asarray(block.columns[name]) for name in columns)
            if (here == StepType.MID).any() or (behind == StepType.MID).any():
                return False
            is_any = is_any or bool(((here == StepType.FIRST) & (behind == StepType.LAST)).any())
    return True if is_any else None
