"""How much memory a call may take besides its inputs, its results and their gradients, and how much there is.

``mr.budget("256MB")`` bounds pairwise buffers (tiles, panels) and the float32 accumulators of 16-bit gradients: in a
block, for a function or one op's calls, or as the process's default. By default, pairwise buffers use a small fraction
of free memory. More memory means fewer, larger products. A budget that cannot be met raises :class:`BudgetError`, which
says how much would be enough. If memory runs out all the same, a fold is run once more with less
(``engines/common/oom_retry.py``).

What the host has left (:func:`available_bytes`) is what the system could give without swapping, within the container's
limit. Memory that holds copies of files counts as available, since the system drops them when asked: on a machine that
has run for a while almost nothing is *free*. The answer is given in eighths of all memory, so that equal calls are cut
into equal panels (and have equal bits) while other processes come and go.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path

from . import settings
from .settings import BUDGET as VARIABLE
from .settings import UNITS
from .settings import parse_bytes as parse

LEAST = 8 * 2**20  # bytes allowed without a budget even if little memory is free
_SHARE = 64  # without a budget, one 64th of the free memory is used
# Without a budget, panels take no more than this however much is free. On an H200, vocabulary heads in 1,100 MB took
# 1.00 to 1.04 of their GEMMs' time, no more than in 2,100 (docs/internals/panel-kernels.md).
PANELS = 1_100_000_000


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
        self._before: list[dict] = []

    def _recreate_cm(self) -> budget:  # a fresh block for each call of a decorated function
        return budget(self.bytes)

    def __enter__(self) -> None:
        self._before.append(settings.put(budget=self.bytes))

    def __exit__(self, *error: object) -> None:
        settings.put(**self._before.pop())

    @staticmethod
    def default(limit: int | str | None) -> None:
        """Set the budget of this process outside of any block; None: a fraction of free memory again.

        Sets the variable ``MONOIDREDUCE_BUDGET``, which processes started by this one inherit.
        """
        if limit is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = str(parse(limit))


def allowed_bytes(free: Callable[[], int], least: int = 0, most: int | None = None) -> int:
    """Bytes of pairwise buffers that may be allocated: the budget, or a share of ``free()`` that is at least ``least``
    and otherwise at most ``most`` (:data:`PANELS`, where more would not be faster)."""
    room = settings.requested_budget()
    if room is None:
        share = free() // _SHARE
        room = max(LEAST, least, share if most is None else min(share, most))
    return max(min(room, least), room // settings.shrink_factor())


def format_floor(size: int) -> str:
    """Bytes as text, rounded down: for what was given, so that too little never looks like enough."""
    for unit in ("GB", "MB", "kB"):
        one = UNITS[unit.upper()]
        if size >= 10 * one:
            whole, thousandths = divmod(size * 1000 // one, 1000)
            return f"{whole}.{thousandths:03d}".rstrip("0").rstrip(".") + unit
    return f"{size}B"


def format_ceil(size: int) -> str:
    """Bytes as text, rounded up: for what is needed, so that what is shown suffices."""
    for unit in ("GB", "MB", "kB"):
        one = UNITS[unit.upper()]
        if size >= 10 * one:
            return f"{-(-size // one)}{unit}"
    return f"{size}B"


_STEPS = 8
_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # the first version of control groups writes a number near 2**63


def available_bytes() -> int:
    """Bytes that could be allocated now, 0 where nothing is known. Reads files of the system in every call."""
    return min(_round_down(*each) for each in [_ask_system(), *_ask_groups()])


def _round_down(left: int, total: int) -> int:
    step = max(1, total // _STEPS)
    return left // step * step or left


def _ask_system() -> tuple[int, int]:
    """What the kernel calls available, and all memory; where it does not say, a quarter of that."""
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        left, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
        return left, total
    except (OSError, KeyError, ValueError):
        pass
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        total = 0
    return total // 4, total


def _ask_groups() -> list[tuple[int, int]]:
    """What each control group of this process (a container has one) has left, and its limit."""
    found = []
    for group, limit, used, cached in _find_groups():
        try:
            total, now = int((group / limit).read_text()), int((group / used).read_text())
            fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # no limit ("max") by now
            continue
        found.append((max(0, total - now + int(fields.get(cached, 0))), total))
    return found


@functools.cache
def _find_groups() -> tuple[tuple[Path, str, str, str], ...]:
    """The control groups of this process that have a limit, and the names of what they say: the limit, what is used,
    and what of that are copies of files that nobody has read lately."""
    found = []
    try:
        lines = _OWN_GROUPS.read_text().splitlines()
    except OSError:
        return ()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2: one tree for all
            tree, names = _GROUPS, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            tree = _GROUPS / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = tree / path.lstrip("/")
        for group in (own, *own.parents):  # in a container its own path may name nothing: the root is its group
            if group == tree.parent:
                break
            try:
                limited = int((group / names[0]).read_text()) < _NO_LIMIT
            except (OSError, ValueError):
                continue
            if limited:
                found.append((group, *names))
    return tuple(found)
