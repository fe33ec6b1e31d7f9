"""What readers are asked for: the arguments that all of them share, checked when the call is made."""

import operator
from typing import Any

from diskbuf import plan
from diskbuf.errors import OptionError


def count(name: str, value: Any, *, least: int = 1) -> int:
    """Returns an argument that counts something.

    Raises:
        OptionError: When it isn't an int of at least `least`.
    """
    if type(value) is int and value >= least:
        return value
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise OptionError(f"{name} must be an int of at least {least}, got {value!r}.")
    return number


def seed_of(value: Any) -> int | None:
    """Returns a seed, or None for none.

    Raises:
        OptionError: When it isn't an int or None.
    """
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise OptionError(f"seed must be an int or None, got {value!r}.") from None


def share_of(start: Any, shard: Any) -> plan.Share:
    """Returns which batches a reader reads.

    Args:
        start: How many batches to leave out.
        shard: None, a pair (index, count), or a `tf.distribute.InputContext`.

    Raises:
        OptionError: When start isn't an int of at least 0, or shard none of these.
    """
    first = count("start", start, least=0)
    if shard is None:
        return plan.Share(start=first)
    if hasattr(shard, "input_pipeline_id"):
        shard = (shard.input_pipeline_id, shard.num_input_pipelines)
    try:
        index, shards = (operator.index(number) for number in shard)
    except (TypeError, ValueError):
        raise OptionError(
            f"shard must be None, a pair (index, count) of ints, or a tf.distribute.InputContext, got {shard!r}."
        ) from None
    return plan.Share(start=first, index=index, shards=shards)
