"""The trace that runs: what symbols belong to, and how a body's question for a number's value leaves it."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping


class Trace:
    """One run of a body on symbols; ``tensors``: the names of the tensors that it can read besides its arguments."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: Mapping[int, str]):
        self.tensors = tensors


current_trace: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("current_trace", default=None)


class NeedValue(BaseException):
    """The body asked for the Python value of a number: trace again with it fixed (never seen by users)."""

    def __init__(self, names: frozenset[str]):
        self.names = names
