"""Variables of the environment that are asked for in every call: read as they are now, and quickly.

``os.environ.get`` takes a microsecond to say that there is none, which is the usual answer.
"""

from __future__ import annotations

import os


class Variable:
    """One variable, by its name.

    >>> Variable("MONOIDREDUCE_NO_SUCH").said() is None
    True
    """

    def __init__(self, name: str):
        self.name = name
        encode = getattr(os.environ, "encodekey", None)
        self._key = encode(name) if encode is not None else name

    def said(self) -> str | None:
        """What the variable says; None where it is not set."""
        known = getattr(os.environ, "_data", None)  # as the mapping keeps them, under their encoded names
        return None if known is not None and self._key not in known else os.environ.get(self.name)
