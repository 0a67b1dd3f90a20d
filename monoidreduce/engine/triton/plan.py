"""The tiles of a kernel: how many indices a program instance owns, how many it meets at a time, warps and stages.

The defaults won, or came within a few per cent of what won, on an H200 over attention (full and causal), perceptrons,
contrastive losses and kernel sums, each kernel alone (``benchmarks/tiles.py``). Equal tiles combine in equal order:
only a plan's tile sizes can change a result's last digits."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from .emit import Kernel

SHARED = 232_448  # bytes of shared memory of a program instance on Hopper; 166,912 on Ampere
_SPARE = 0.86  # what the estimate below may take of them: layouts and reductions need some too


@dataclass(frozen=True)
class KernelPlan:
    """Tile sizes and how the hardware runs one."""

    block_kept: int
    block_folded: int
    num_warps: int = 4
    num_stages: int = 2
    parts: int = 0  # into which the folded axis is cut; 0: as many as keep the device busy


_override: contextvars.ContextVar[Mapping[str, KernelPlan] | None] = contextvars.ContextVar("plan", default=None)


@contextlib.contextmanager
def use_plan(plans: Mapping[str, KernelPlan]) -> Iterator[None]:
    """Fix the plan of kernels over ``"cols"`` or ``"rows"`` inside the block: for tests and for tuning."""
    token = _override.set(plans)
    try:
        yield
    finally:
        _override.reset(token)


def overrides() -> tuple:
    """What ``use_plan`` asks for, as a key."""
    return tuple((_override.get() or {}).items())


def choose(kernel: Kernel, over: str, item: int, shared: int = 0, length: int = 0) -> KernelPlan:
    """The plan of a kernel whose matrix products are of ``item`` bytes a number, on hardware with ``shared`` bytes.

    ``length``: of the kept axis, if a plan may depend on it."""
    asked = (_override.get() or {}).get(over)
    if asked:
        return asked
    room = (shared or SHARED) * _SPARE
    return _deep(kernel, length, room) if kernel.deep else _fitting(_default(kernel, item), kernel, item, room)


def _deep(kernel: Kernel, length: int, room: float) -> KernelPlan:
    """The tiles of a matrix product with a fold as its epilogue; random numbers need registers of their own."""
    if length > 64:
        plan = KernelPlan(128, 64, 8, 4) if kernel.draws else KernelPlan(128, 256, 8, 3)
    else:
        plan = KernelPlan(64, 128, 8 if kernel.draws else 4, 4)
    while plan.num_stages > 1 and (plan.block_kept + plan.block_folded) * 128 * plan.num_stages > room:
        plan = replace(plan, num_stages=plan.num_stages - 1)
    return plan


def parts(plan: KernelPlan, instances: int, tiles: int, processors: int, deep: bool = False) -> int:
    """Into how many parts the folded axis is cut: where kept tiles are too few to fill the device, and the walk long.

    A part has at least eight tiles, so that combining the parts costs little beside them.
    """
    if plan.parts:
        return max(1, min(plan.parts, tiles))
    if deep:
        return _even(instances, tiles, processors)
    if not instances or instances * 2 > processors:
        return 1
    return max(1, min(2 * processors // instances, tiles // 8, 64))


def _even(instances: int, tiles: int, processors: int) -> int:
    """The number of parts, each of at least two tiles, that leaves the fewest processors idle in the last round."""
    found, best = 1, 0.0
    for count in range(1, max(1, min(2 * processors // max(1, instances), tiles // 2)) + 1):
        longest = -(-tiles // count) * -(-instances * count // processors)  # tiles that a processor does, at most
        busy = instances * tiles / (longest * processors)
        if busy > best * 1.01:
            found, best = count, busy
    return found


def _default(kernel: Kernel, item: int) -> KernelPlan:
    if not kernel.folded_width and not kernel.state_width:  # numbers and few features: all in registers
        return KernelPlan(32, 32, 4, 2) if kernel.few_width <= 1 else KernelPlan(32, 128, 4, 2)
    widest = max(kernel.kept_width // max(kernel.kept_blocks, 1), kernel.state_width // 2, 16)
    if item == 8:
        return KernelPlan(32, 32, 4, 1) if widest <= 128 else KernelPlan(16, 16, 4, 1)
    if item == 4 and kernel.exact:
        return KernelPlan(32, 32, 4, 2)  # no matrix units: one stage, or larger tiles, spill
    if item == 4:
        return KernelPlan(64, 64, 4, 2) if widest <= 64 else KernelPlan(64, 32, 4, 2)
    if widest <= 64 or (widest <= 128 and kernel.kept_blocks <= 1 and kernel.folded_width <= 2 * widest):
        return KernelPlan(64, 64, 4, 3)
    return KernelPlan(128, 64, 8, 3)


def _fitting(plan: KernelPlan, kernel: Kernel, item: int, shared: float) -> KernelPlan:
    """The plan, made smaller until its blocks fit in shared memory."""
    while (smaller := shrink(plan)) is not None and _bytes(plan, kernel, item) > shared:
        plan = smaller
    return plan


def _bytes(plan: KernelPlan, kernel: Kernel, item: int) -> int:
    kept = plan.block_kept * kernel.kept_width
    folded = plan.block_folded * kernel.folded_width * plan.num_stages
    return (kept + folded + plan.block_kept * plan.block_folded) * item


def shrink(plan: KernelPlan) -> KernelPlan | None:
    """The next smaller plan, None at the smallest."""
    if plan.num_stages > 1:
        return replace(plan, num_stages=plan.num_stages - 1)
    if plan.block_folded > 16:
        return replace(plan, block_folded=plan.block_folded // 2)
    return replace(plan, block_kept=plan.block_kept // 2) if plan.block_kept > 16 else None
