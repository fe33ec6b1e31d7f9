"""Whether rows come from the disk rather than from memory, as the kernel's counters tell it."""

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_FEW_FAULTS = 8
_MANY_FAULTS = 64


class ColdReads:
    """Tells whether it is worth asking the kernel for rows before they are gathered.

    A gather of rows that are not in memory waits for the disk once a row; asked for together beforehand, they come 20
    times faster. Asking costs a microsecond a row, for nothing when they are in memory. So it ends when nothing was
    read from the disk, and begins again when page faults have waited for it. A store is asked at first.

    Attributes:
        asks: Whether to ask, as of the last look.
        is_crowded: Whether rows that were asked for were gone again before they were gathered: the megabytes around a
            row, which the kernel reads with it on a fault, have driven them out.
    """

    def __init__(self) -> None:
        self._faults, self._blocks = _counters()[0], -1
        self.asks = True
        self.is_crowded = False

    def look(self) -> bool:
        """Looks at what happened since the last look; returns whether to ask."""
        faults, blocks = _counters()
        self.is_crowded |= self.asks and faults > self._faults + _MANY_FAULTS and self._blocks >= 0
        self.asks = blocks > self._blocks if self.asks else faults > self._faults + _FEW_FAULTS
        self._faults, self._blocks = faults, blocks
        return self.asks


class AlwaysAsks(ColdReads):
    """For rows that have to be fetched from elsewhere: they are always asked for, which costs little when they came."""

    def look(self) -> bool:
        """Returns True."""
        return self.asks


def _counters() -> tuple[int, int]:
    """Page faults of this process that waited for the disk, and blocks that it had read."""
    if resource is None:
        return 0, 0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_majflt, usage.ru_inblock
