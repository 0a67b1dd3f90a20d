"""Environment variables that every call reads, without the microsecond that ``os.environ.get`` takes when unset."""

from __future__ import annotations

import os


class EnvironmentVariable:
    """One environment variable, by its name.

    >>> EnvironmentVariable("MONOIDREDUCE_NO_SUCH").read() is None
    True
    """

    def __init__(self, name: str):
        self.name = name
        encode = getattr(os.environ, "encodekey", None)
        self._key = encode(name) if encode is not None else name

    def read(self) -> str | None:
        """The variable's current value; None if it is not set."""
        known = getattr(os.environ, "_data", None)  # the mapping's own dict, by encoded names
        return None if known is not None and self._key not in known else os.environ.get(self.name)
