"""Moments as int64 microseconds since the epoch, UTC."""

import datetime as dt
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from diskbuf.bandits.logs.encodings import is_text, is_there
from diskbuf.errors import OptionError

TimeUnit = Literal["s", "ms", "us", "ns"]
Moment = dt.datetime | dt.date | str | int

PER_SECOND: dict[str, int] = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_MICROSECOND = dt.timedelta(microseconds=1)
_TEXT_TYPES = (
    pa.timestamp("us", "UTC"),
    pa.timestamp("us"),
    pa.timestamp("ns", "UTC"),
    pa.timestamp("ns"),
)


def microseconds_of(moment: Moment, *, name: str = "moment") -> int:
    """Returns a moment as microseconds since the epoch; what has no zone is UTC, a date is its midnight.

        >>> microseconds_of("1970-01-02")
        86400000000

    Raises:
        OptionError: When it isn't one.
    """
    if isinstance(moment, int | np.integer) and not isinstance(moment, bool):
        return int(moment)
    try:
        if isinstance(moment, str):
            moment = dt.datetime.fromisoformat(moment)
        if isinstance(moment, dt.date) and not isinstance(moment, dt.datetime):
            moment = dt.datetime(moment.year, moment.month, moment.day)
        if not isinstance(moment, dt.datetime) or moment != moment:  # pandas' NaT calls itself one
            raise TypeError
    except (TypeError, ValueError):
        raise OptionError(
            f"{name} must be a datetime, a date, ISO text or int microseconds since the epoch, got {moment!r}."
        ) from None
    return ((moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)) - _EPOCH) // _MICROSECOND


def text_of_moment(microseconds: int) -> str:
    """Returns microseconds since the epoch as ISO text in UTC."""
    try:
        return (_EPOCH + microseconds * _MICROSECOND).isoformat()
    except OverflowError:
        return f"{microseconds} us"


def times_of(
    column: pa.Array, *, unit: TimeUnit | None, name: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]:
    """Reads a column of moments.

    Args:
        column: Timestamps, dates, ISO text or numbers since the epoch; what has no zone is UTC.
        unit: The unit of numbers.
        name: The column, for messages.

    Returns:
        [N] int64 microseconds, rounded down, and [N] bool, True where there is no moment; None for nowhere.

    Raises:
        OptionError: When the column has numbers and no unit was given, or something else than moments.
    """
    kind = column.type
    if pa.types.is_date(kind):
        column = column.cast(pa.timestamp("s" if pa.types.is_date32(kind) else "ms"))
        kind = column.type
    if pa.types.is_timestamp(kind):
        return _scaled(column.cast(pa.int64()), kind.unit)
    if is_text(kind):
        return _from_text(column.dictionary_decode() if pa.types.is_dictionary(kind) else column)
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
        raise OptionError(f"column {name!r} must hold moments, got {kind}. Leave it out, or convert it.")
    if unit is None:
        raise OptionError(
            f"time_unit must be 's', 'ms', 'us' or 'ns' where moments are numbers, as in column {name!r}, got None."
        )
    if pa.types.is_integer(kind):
        return _scaled(column.cast(pa.int64()), unit)
    numbers = pc.fill_null(column.cast(pa.float64()), np.nan).to_numpy(zero_copy_only=False)
    scaled = np.floor(numbers * (1e6 / PER_SECOND[unit]) + 1e-3)  # half a thousandth is what float64 has left today
    bad = ~(np.abs(scaled) < 2**62)
    return np.where(bad, 0, scaled).astype(np.int64), bad if bad.any() else None


def _scaled(column: pa.Array, unit: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]:
    numbers = pc.fill_null(column, 0).to_numpy(zero_copy_only=False)
    per_second = PER_SECOND[unit]
    bad = None if not column.null_count else ~is_there(column)
    if per_second > 1_000_000:
        return numbers // (per_second // 1_000_000), bad
    factor = 1_000_000 // per_second
    most = np.iinfo(np.int64).max // factor
    if len(numbers) and (numbers.max() > most or numbers.min() < -most):
        overflows = np.abs(numbers) > most
        bad = overflows if bad is None else bad | overflows
        numbers = np.where(overflows, 0, numbers)
    return numbers * factor, bad


def _from_text(column: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None]:
    for kind in _TEXT_TYPES:
        try:
            return _scaled(column.cast(kind).cast(pa.int64()), kind.unit)
        except pa.ArrowInvalid:
            continue
    found = np.zeros(len(column), np.int64)
    bad = np.zeros(len(column), np.bool_)
    for row, text in enumerate(column.to_pylist()):
        try:
            found[row] = microseconds_of("" if text is None else text.strip())
        except OptionError:
            bad[row] = True
    return found, bad if bad.any() else None
