"""How much memory the host has left: what the system could give without swapping, within the container's limit.

Memory that holds copies of files counts as available, since the system drops them when asked: on a machine that has
run for a while almost nothing is *free*. The answer is given in eighths of all memory, so that equal calls are cut
into equal panels (and have equal bits) while other processes come and go.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

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
