"""How much memory a call may take besides its inputs, its results and their gradients.

``mr.budget("256MB")`` bounds pairwise buffers (tiles, panels) and the float32 accumulators of 16-bit gradients: in a
block, for a function or one op's calls, or as the process's default. By default, pairwise buffers use a small fraction
of free memory. More memory means fewer, larger products. A budget that cannot be met raises :class:`BudgetError`, which
says how much would be enough. If memory runs out all the same, a fold is run once more with less
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
from .environment import EnvironmentVariable

LEAST = 8 * 2**20  # bytes allowed without a budget even if little memory is free
_SHARE = 64  # without a budget, one 64th of the free memory is used
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_block: contextvars.ContextVar[int | None] = contextvars.ContextVar("budget", default=None)
_shrink: contextvars.ContextVar[int] = contextvars.ContextVar("shrink", default=1)
VARIABLE = "MONOIDREDUCE_BUDGET"
_process = EnvironmentVariable(VARIABLE)
SHRINK = 8  # an OOM retry runs with one eighth of the memory


def parse(limit: int | str) -> int:
    """Bytes from an int or a text such as ``"256MB"`` or ``"1.5 GiB"``; raises ArgumentError for anything else."""
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
    """Bound the memory of pairs: bytes, or a text such as ``"256MB"``. A context manager, or a decorator.

    A backward keeps the budget that its forward had. ``mr.budget.default("1GB")`` sets what holds outside of any block.

    >>> import torch, monoidreduce as mr
    >>> x, weight, target = torch.randn(6, 4), torch.randn(9, 4), torch.arange(6)
    >>> with mr.budget("64MB"):
    ...     loss = mr.ops.cross_entropy(x, weight, target)
    """

    def __init__(self, limit: int | str):
        self.bytes = parse(limit)
        self._tokens: list[contextvars.Token] = []

    def _recreate_cm(self) -> budget:  # a fresh block for each call of a decorated function
        return budget(self.bytes)

    def __enter__(self) -> None:
        self._tokens.append(_block.set(self.bytes))

    def __exit__(self, *error: object) -> None:
        _block.reset(self._tokens.pop())

    @staticmethod
    def default(limit: int | str | None) -> None:
        """Set the budget of this process outside of any block; None: a fraction of free memory again.

        Sets the variable ``MONOIDREDUCE_BUDGET``, which processes started by this one inherit.
        """
        if limit is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = str(parse(limit))


@functools.lru_cache(maxsize=8)
def _parse_default(text: str) -> int:
    return parse(int(text) if text.isdigit() else text)


def requested() -> int | None:
    """The budget in force: the innermost block's, else the process's default, else None."""
    found = _block.get()
    if found is not None:
        return found
    text = _process.read()
    return _parse_default(text) if text else None


@contextlib.contextmanager
def restore(limit: int | None) -> Iterator[None]:
    """Set a forward's budget for its backward, which may run in another thread."""
    if limit is None or limit == _block.get():
        yield
        return
    with budget(limit):
        yield


@contextlib.contextmanager
def shrink() -> Iterator[None]:
    """Plans made inside the block use 1 / ``SHRINK`` of the memory: for an OOM retry."""
    token = _shrink.set(SHRINK)
    try:
        yield
    finally:
        _shrink.reset(token)


def shrink_factor() -> int:
    """``SHRINK`` in an OOM retry, else 1: memory limits are divided by it."""
    return _shrink.get()


def allowed_bytes(free: Callable[[], int], least: int = 0) -> int:
    """Bytes of pairwise buffers that may be allocated: the budget, or a share of ``free()`` and at least ``least``."""
    room = requested() or max(LEAST, least, free() // _SHARE)
    return max(min(room, least), room // _shrink.get())


def format_floor(size: int) -> str:
    """Bytes as text, rounded down: for what was given, so that too little never looks like enough."""
    for unit in ("GB", "MB", "kB"):
        one = _UNITS[unit.upper()]
        if size >= 10 * one:
            whole, thousandths = divmod(size * 1000 // one, 1000)
            return f"{whole}.{thousandths:03d}".rstrip("0").rstrip(".") + unit
    return f"{size}B"


def format_ceil(size: int) -> str:
    """Bytes as text, rounded up: for what is needed, so that what is shown suffices."""
    for unit in ("GB", "MB", "kB"):
        one = _UNITS[unit.upper()]
        if size >= 10 * one:
            return f"{-(-size // one)}{unit}"
    return f"{size}B"
