"""The version of the package; builds read it here."""

__version__ = "0.1.0"
