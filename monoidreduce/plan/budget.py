"""How much memory a call may take besides its inputs, its results and their gradients.

``mr.budget("256MB")`` bounds what is held of pairs (tiles, panels) and the float32 totals of 16-bit gradients. Without
it a small share of the free memory is taken. More memory means fewer, larger products; a budget that cannot be met
raises :class:`BudgetError`, which says the least that could.
"""

from __future__ import annotations

import contextlib
import contextvars
import re
from collections.abc import Callable, Iterator

from ..errors import ArgumentError

LEAST = 8 * 2**20  # what is taken without a budget even where memory is short
_SHARE = 64  # of the free memory, one part in so many
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_asked: contextvars.ContextVar[int | None] = contextvars.ContextVar("budget", default=None)


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


@contextlib.contextmanager
def budget(limit: int | str) -> Iterator[None]:
    """Bound the memory of pairs inside the block: bytes, or a text such as ``"256MB"``.

    >>> import torch, monoidreduce as mr
    >>> x, weight, target = torch.randn(6, 4), torch.randn(9, 4), torch.arange(6)
    >>> with mr.budget("64MB"):
    ...     loss = mr.ops.cross_entropy(x, weight, target)
    """
    token = _asked.set(parse(limit))
    try:
        yield
    finally:
        _asked.reset(token)


def asked() -> int | None:
    """The budget of the innermost block, None outside of any."""
    return _asked.get()


def limit(free: Callable[[], int], least: int = 0) -> int:
    """Bytes that may be taken where ``free()`` are free: what was asked for, else a share, no less than ``least``."""
    return _asked.get() or max(LEAST, least, free() // _SHARE)


def shown(size: int) -> str:
    """Bytes as people write them; rounded up, so that what is shown suffices."""
    for unit in ("GB", "MB", "kB"):
        one = _UNITS[unit.upper()]
        if size >= 10 * one:
            return f"{-(-size // one)}{unit}"
    return f"{size}B"
