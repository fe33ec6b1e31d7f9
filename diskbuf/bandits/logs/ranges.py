"""The rows of a log between two moments."""

from typing import Any

from diskbuf.bandits.log_reader import Log, LogReader
from diskbuf.bandits.logs.record import LogRecord
from diskbuf.bandits.logs.times import Moment, microseconds_of
from diskbuf.errors import OptionError, SpecError


def time_range(store: Log, start: Moment | None, end: Moment | None) -> tuple[int, int]:
    """Finds the rows from one moment to another, by bisection: a day can be read without reading the rest.

    Args:
        store: A log with timestamps in order, or its path.
        start: The first moment; None is the log's first.
        end: The first moment that is too late; None is after the last. Both as datetime, date, ISO text (UTC where
            they name no zone) or int microseconds since the epoch.

    Returns:
        The first id and where to stop, exclusive, for `LogReader` and the like; equal when there are no such rows.

    Raises:
        SpecError: If the log has no timestamps, or they were imported out of order.
        OptionError: If a moment isn't one, or end is before start.
        StoreError: If there is no store, or it can't be opened.
    """
    low = None if start is None else microseconds_of(start, name="start")
    high = None if end is None else microseconds_of(end, name="end")
    if low is not None and high is not None and high < low:
        raise OptionError(f"end must not be before start, got {end!r} and {start!r}.")
    with LogReader(store) as log:
        info = log.data_spec.policy_info
        if not isinstance(info, dict) or "timestamp" not in info:
            raise SpecError("a log must have timestamps to be searched by time, got one without.", path="policy_info")
        record = LogRecord.of(log.buffer.metadata)
        if record is not None and record.is_sorted is False:
            raise SpecError(
                "timestamps must not go back where a log is searched by time, but were imported with order='as_is'. "
                "Import it with order='sort'.",
                path="policy_info/timestamp",
            )
        first_id = log.first_id if low is None else _bisect(log, low)
        return first_id, log.next_id if high is None else _bisect(log, high)


def _bisect(log: LogReader, moment: int) -> int:
    """The first id whose timestamp is not before a moment."""
    low, high = log.first_id, log.next_id
    while low < high:
        middle = (low + high) // 2
        if _timestamp(log.buffer, middle) < moment:
            low = middle + 1
        else:
            high = middle
    return low


def _timestamp(buffer: Any, step_id: int) -> int:
    """The latest of the lanes' timestamps at an id."""
    return int(buffer.read([step_id] * buffer.batch_size, range(buffer.batch_size)).policy_info["timestamp"].max())
