"""Plans that won on this device, by program, bucket of lengths and types: how they are named, kept and found again."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import ArgumentError
from ...plan import budget, cost, plan_records
from ...plan.op_counts import Case
from ...plan.schedule import Choice
from ...program.lower import Fold, Lowered, digest_fold, is_digest_portable
from ..common import matmul
from ..common.evaluate import Sizes


def key_of(case: Case, device: torch.device) -> plan_records.Key:
    """What a measured plan of a fold depends on."""
    types = f"{case.dtype}, arithmetic of {case.wide} bytes"
    return _key(case.name, "", (case.batch, case.rows, case.cols), case.letters, types, device)


def key_of_call(program: Lowered, given: Iterable[Any], sizes: Sizes, backward: bool) -> plan_records.Key:
    """What the road of a whole call depends on: by passes over the pairs, or dense."""
    lengths = (torch.Size(sizes.batch).numel(), sizes.rows, sizes.cols)
    kinds = sorted({str(v.dtype)[6:] for v in given if isinstance(v, Tensor)})
    types = f"{', '.join(kinds)}, {'with' if backward else 'without'} gradients"
    name = digest_fold(Fold((), program.outputs))
    return _key(name, "call ", lengths, sorted(sizes.letters.items()), types, sizes.device)


def _key(
    name: str, what: str, lengths: Iterable[int], letters: Iterable[tuple[str, int]], types: str, device: torch.device
) -> plan_records.Key:
    """Lengths go by powers of two, so that a new one is seldom tuned again."""
    shape = " × ".join(str(plan_records.bucket(n)) for n in lengths)
    features = ", ".join(f"{letter}={size}" for letter, size in letters)
    precision = matmul.float32_precision()
    asked = str(budget.asked() or "")
    return plan_records.Key(name, f"{what}{shape}; {features}", f"{types}, {precision}", device_name(device), asked)


def found(key: plan_records.Key) -> Choice | None:
    """What was measured to win, if anything that can be read was."""
    record = plan_records.recall(key)
    try:
        return None if record is None else Choice.from_dict(record.plan)
    except ArgumentError:
        return None


def recalled(case: Case, device: torch.device) -> Choice | None:
    """The plan that won for such a case; None where there is none, or it is none that could be followed here."""
    choice = found(key_of(case, device))
    return choice if choice is not None and fits(case, choice) else None


def keep(key: plan_records.Key, choice: Choice, measured: Mapping[str, Any]) -> bool:
    """Remember a winner; whether the next process will find it: not where a user's own class is part of the program."""
    return plan_records.remember(
        plan_records.Record(key, choice.as_dict(), measured), lasting=is_digest_portable(key.program)
    )


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
