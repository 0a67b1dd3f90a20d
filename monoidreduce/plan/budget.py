"""How much memory a call may take besides its inputs, its results and their gradients.

``mr.budget("256MB")`` bounds what is held of pairs (tiles, panels) and the float32 totals of 16-bit gradients: in a
block, for a function or one op's calls, or as the process's default. Without it a small share of the free memory is
taken. More memory means fewer, larger products; a budget that cannot be met raises :class:`BudgetError`, which says
the least that could. Where memory runs out all the same, a fold is tried once more with a part of the room
(``engines/common/oom_retry.py``).
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import re
from collections.abc import Callable, Iterator

from ..errors import ArgumentError
from .environment import Variable

LEAST = 8 * 2**20  # what is taken without a budget even where memory is short
_SHARE = 64  # of the free memory, one part in so many
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_asked: contextvars.ContextVar[int | None] = contextvars.ContextVar("budget", default=None)
_parts: contextvars.ContextVar[int] = contextvars.ContextVar("parts", default=1)
VARIABLE = "MONOIDREDUCE_BUDGET"
_process = Variable(VARIABLE)
LESS = 8  # of the room, a fold that ran out of memory is tried again with one part in so many


def parse(limit: int | str) -> int:
    """A number of bytes from an int or a text such as ``"256MB"`` or ``"1.5 GiB"``."""
    if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0:
        return limit
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", limit) if isinstance(limit, str) else None
    if found is None or found[2].upper() not in _UNITS or not float(found[1]):
        raise ArgumentError(
            detail=f"a budget was given as {limit!r}",
            fix='Give bytes, as a whole number above 0 or as a text such as "64MB" or "1.5GiB"',
        )
    return int(float(found[1]) * _UNITS[found[2].upper()])


class budget(contextlib.ContextDecorator):
    """Bound the memory of pairs: bytes, or a text such as ``"256MB"``. A block, or a decorator of any function.

    A backward keeps the budget that its forward had. ``mr.budget.default("1GB")`` sets what holds outside of any block.

    >>> import torch, monoidreduce as mr
    >>> x, weight, target = torch.randn(6, 4), torch.randn(9, 4), torch.arange(6)
    >>> with mr.budget("64MB"):
    ...     loss = mr.ops.cross_entropy(x, weight, target)
    """

    def __init__(self, limit: int | str):
        self.bytes = parse(limit)
        self._tokens: list[contextvars.Token] = []

    def _recreate_cm(self) -> budget:  # of a decorated function, for each call
        return budget(self.bytes)

    def __enter__(self) -> None:
        self._tokens.append(_asked.set(self.bytes))

    def __exit__(self, *error: object) -> None:
        _asked.reset(self._tokens.pop())

    @staticmethod
    def default(limit: int | str | None) -> None:
        """Set the budget of this process outside of any block; None: a share of the free memory again.

        The variable ``MONOIDREDUCE_BUDGET`` says the same, also to processes that this one starts.
        """
        if limit is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = str(parse(limit))


@functools.lru_cache(maxsize=8)
def _of_process(said: str) -> int:
    return parse(int(said) if said.isdigit() else said)


def asked() -> int | None:
    """The budget in force: the innermost block's, else the process's default, else None."""
    found = _asked.get()
    if found is not None:
        return found
    said = _process.said()
    return _of_process(said) if said else None


@contextlib.contextmanager
def kept(limit: int | None) -> Iterator[None]:
    """A forward's budget in its backward, which another thread may run."""
    if limit is None or limit == _asked.get():
        yield
        return
    with budget(limit):
        yield


@contextlib.contextmanager
def less() -> Iterator[None]:
    """Plans made inside the block take a part of the room that they would have taken."""
    token = _parts.set(LESS)
    try:
        yield
    finally:
        _parts.reset(token)


def parts() -> int:
    """Into how many parts the room is divided, of which one may be taken."""
    return _parts.get()


def limit(free: Callable[[], int], least: int = 0) -> int:
    """Bytes that may be taken where ``free()`` are free: what was asked for, else a share, no less than ``least``."""
    room = asked() or max(LEAST, least, free() // _SHARE)
    return max(min(room, least), room // _parts.get())


def given(size: int) -> str:
    """Bytes that were given, as people write them; rounded down, so that too little never looks like enough."""
    for unit in ("GB", "MB", "kB"):
        one = _UNITS[unit.upper()]
        if size >= 10 * one:
            whole, thousandths = divmod(size * 1000 // one, 1000)
            return f"{whole}.{thousandths:03d}".rstrip("0").rstrip(".") + unit
    return f"{size}B"


def shown(size: int) -> str:
    """Bytes as people write them; rounded up, so that what is shown suffices."""
    for unit in ("GB", "MB", "kB"):
        one = _UNITS[unit.upper()]
        if size >= 10 * one:
            return f"{-(-size // one)}{unit}"
    return f"{size}B"
