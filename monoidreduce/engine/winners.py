"""Plans that won on this device, by fold, bucket of lengths and types: how they are named, kept and found again."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError
from ..plan import budget, cost, store
from ..plan.choice import Choice
from ..plan.work import Case
from ..program.digest import lasts
from . import hardware


def key_of(case: Case, device: torch.device) -> store.Key:
    """What a measured plan depends on. Lengths go by powers of two, so that a new one is seldom tuned again."""
    lengths = " × ".join(str(store.bucket(n)) for n in (case.batch, case.rows, case.cols))
    letters = ", ".join(f"{name}={size}" for name, size in case.letters)
    types = f"{case.dtype}, arithmetic of {case.wide} bytes, {hardware.float32_precision()}"
    return store.Key(case.name, f"{lengths}; {letters}", types, device_name(device), str(budget.asked() or ""))


def recalled(case: Case, device: torch.device) -> Choice | None:
    """The plan that won for such a case; None where there is none, or it is none that could be followed here."""
    found = store.recall(key_of(case, device))
    if found is None:
        return None
    try:
        choice = Choice.from_dict(found.plan)
    except ArgumentError:
        return None
    return choice if fits(case, choice) else None


def keep(case: Case, device: torch.device, choice: Choice, measured: Mapping[str, Any]) -> bool:
    """Remember a winner; whether the next process will find it, which folds over a user's own classes do not allow."""
    record = store.Record(key_of(case, device), choice.as_dict(), measured)
    return store.remember(record, lasting=lasts(case.name))


def fits(case: Case, choice: Choice) -> bool:
    """Whether a choice could run such a case at all, within the budget."""
    kernels = [t for name, t in choice.tiles if name in ("cols", "rows")]
    if choice.schedule not in ("flash", "split", "panel") or (choice.schedule == "panel" and not case.panels):
        return False
    if (kernels and not case.kernels) or (choice.tile("tile") and case.kernels):
        return False
    if not all(_is_power(n) for t in kernels for n in t[:3]) or not all(t[0] * t[1] <= 2**16 for t in kernels):
        return False
    limit = budget.asked()
    return limit is None or cost.estimate(case, choice).held <= limit


def _is_power(n: int) -> bool:
    return n > 0 and not n & (n - 1)


@functools.cache
def _gpu(device: torch.device) -> str:
    found = torch.cuda.get_device_properties(device)
    return f"{found.name}, {found.major}.{found.minor}, {found.multi_processor_count} processors"


@functools.cache
def _cpu() -> str:
    said: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            said.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    names = [said[n] for n in ("model name", "CPU implementer", "CPU part") if n in said]
    return " ".join([platform.machine(), *(names or [platform.processor()])])


def device_name(device: torch.device) -> str:
    """The device as a plan's measurement means it: not its number, but what it is."""
    interpreted = ", interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else ""
    if device.type == "cuda":
        return _gpu(device)
    return f"{_cpu() if device.type == 'cpu' else device.type}, {torch.get_num_threads()} threads{interpreted}"
