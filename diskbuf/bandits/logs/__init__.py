"""Bandit logs from elsewhere: files and tables into a store that agents and estimators read, and back out of it."""

from diskbuf.bandits.logs.columns import LogColumns
from diskbuf.bandits.logs.encoder import LogEncoder
from diskbuf.bandits.logs.encodings import Categories, Encoding, Hashed, Numbers, Vector
from diskbuf.bandits.logs.exporting import export_log
from diskbuf.bandits.logs.importing import import_log
from diskbuf.bandits.logs.joining import JoinReport, join_rewards
from diskbuf.bandits.logs.ranges import time_range
from diskbuf.bandits.logs.report import ImportReport

__all__ = [
    "Categories",
    "Encoding",
    "Hashed",
    "ImportReport",
    "JoinReport",
    "LogColumns",
    "LogEncoder",
    "Numbers",
    "Vector",
    "export_log",
    "import_log",
    "join_rewards",
    "time_range",
]
