"""One way to run a fold on trial: is its result right, and how long does it take?

A result is right that equals a safe plan's to rounding: on the call itself and, by the same kernels, on a cut of it so
short that every tile weighs (in a long sum a forgotten tile would hide in the rounding). Before that, all memory that
the candidate allocates is filled with NaN, or with absurd whole numbers: what it forgets to write, or reads before it
writes, is then seen, and not the right numbers that an earlier run left there.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..engines import triton
from ..engines.common import combine, matmul
from ..engines.common.evaluate import Sizes
from ..plan.schedule import Choice
from ..program.expression import Expr
from ..program.lower import Fold
from ..reductions import kind_of

Perform = Callable[[Choice, Fold, Sequence[Any], Sizes], list[Tensor]]
FAR = 1.5  # what at first takes so many times as long as the best so far is not run often
SPILLS = 1024  # bytes a thread may keep out of its registers: winners on an H200 had up to 256
# Of a result's own size, how far two plans may differ: a few roundings of the coarsest type that products are made in.
_APART = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: 2.0**-12, torch.float64: 2.0**-30}
_APART_TF32 = 2.0**-8
_aten = torch.ops.aten
_EMPTY = (
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
)


@dataclass(frozen=True)
class Trial:
    """How a candidate did: its time, or why it may not win."""

    choice: Choice
    seconds: float | None
    refused: str = ""


class Poison(TorchDispatchMode):
    """Memory allocated inside the block holds NaN, absurd whole numbers or True."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY and result.numel():
            if result.is_floating_point():
                result.fill_(torch.nan)
            else:
                result.fill_(True if result.dtype is torch.bool else torch.iinfo(result.dtype).min // 3)
        return result


# Right? -------------------------------------------------------------------------------------------------------


def wrong(
    perform: Perform, choice: Choice, safe: Choice, fold: Fold, leaves: Sequence[Any], sizes: Sizes, truth: list[Tensor]
) -> str:
    """What is wrong with a candidate's results, "" where nothing is. ``truth``: the safe plan's for these leaves."""
    limit = apart(leaves)
    with Poison():
        found = perform(choice, fold, leaves, sizes)
    if problem := differs(settled(fold, found), settled(fold, truth), limit):
        return problem
    short = shortened(fold, leaves, sizes, choice)
    if short is None:
        return ""
    with triton.as_for(sizes):
        expected = perform(safe, fold, *short)
        with Poison():
            found = perform(choice, fold, *short)
    problem = differs(settled(fold, found), settled(fold, expected), limit)
    return f"at {short[1].rows} × {short[1].cols}, {problem}" if problem else ""


def settled(fold: Fold, results: Sequence[Tensor]) -> list[Tensor]:
    """The results of a fold that are the same by every plan.

    A softmax's peak is each plan's own, a maximum or a guess of one by its first tile.
    """
    return [t for r, own in combine.split(fold, list(results)) for t in kind_of(r).settled(own)]


def differs(found: Sequence[Tensor], truth: Sequence[Tensor], limit: float) -> str:
    """How two lists of results differ beyond rounding; whole numbers, infinities and NaN must be the same."""
    for at, (a, b) in enumerate(zip(found, truth, strict=True)):
        if a.shape != b.shape:
            return f"result {at} has the shape {tuple(a.shape)} instead of {tuple(b.shape)}"
        if not b.is_floating_point():
            off = a != b
        else:
            a, b = (t if t.dtype is torch.float64 else t.float() for t in (a, b))
            off = ~((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= limit * _size(b)))
        if count := int(off.sum()):
            return f"result {at} is wrong in {count} of {off.numel()} numbers"
    return ""


def _size(b: Tensor) -> Tensor:
    """How large a result is, number by number: its own size, its row's, and something of the whole tensor's.

    The last for rows that are small because large numbers cancelled: their rounding is that of the large ones.
    """
    b = torch.where(b.isfinite(), b, 0).abs()
    return b + b.square().mean(-1, keepdim=True).sqrt() + b.square().mean().sqrt() / 8


def apart(leaves: Sequence[Any]) -> float:
    """How far results of these leaves may differ, as a share of their size."""
    coarse = matmul.float32_precision() == "tf32"
    tensors = [v for v in leaves if isinstance(v, Tensor) and v.dtype in _APART]
    found = [_APART_TF32 if coarse and v.is_cuda and v.itemsize == 4 else _APART[v.dtype] for v in tensors]
    return max(found, default=_APART[torch.float32])


def shortened(fold: Fold, leaves: Sequence[Any], sizes: Sizes, choice: Choice) -> tuple[list[Any], Sizes] | None:
    """The first rows and columns of a call: two tiles and a ragged third; None where that is all of it, or a part."""
    blocks = {"rows": 1, "cols": 1}
    for name, tile in choice.tiles:
        if name == "tile":
            blocks = {"rows": max(blocks["rows"], tile[1]), "cols": max(blocks["cols"], tile[2])}
        elif name in blocks:  # a kernel over one axis owns tiles of the other
            other = "rows" if name == "cols" else "cols"
            blocks = {other: max(blocks[other], tile[0]), name: max(blocks[name], tile[1] * max(1, tile[4]))}
    rows, cols = (min(sizes.here(axis), 2 * max(16, blocks[axis]) + 3) for axis in ("rows", "cols"))
    if (rows, cols) == (sizes.rows, sizes.cols) or sizes.shard is not None:
        return None
    cut = [_cut(v, e, rows, cols) if isinstance(v, Tensor) else v for e, v in zip(fold.leaves, leaves, strict=True)]
    return cut, replace(sizes, rows=rows, cols=cols)


def _cut(v: Tensor, e: Expr, rows: int, cols: int) -> Tensor:
    """The first indices of a leaf ``[*batch, M or N, f]``, or ``[*batch, M, N]``; what is broadcast stays."""
    last = v.dim() - 1 - (e.feature is not None)
    if e.cols:
        v = v.narrow(last, 0, min(cols, v.shape[last]))
    at = last - 1 if e.cols else last
    return v.narrow(at, 0, min(rows, v.shape[at])) if e.rows else v


# How long? ----------------------------------------------------------------------------------------------------


def seconds(run: Callable[[], Any], device: torch.device, spend: float | None = None, best: float = math.inf) -> float:
    """The median time of a call that has run before: a few calls, or as many as ``spend`` seconds hold.

    ``best``: of what it is compared with."""
    clock = _GpuClock() if device.type == "cuda" else _cpu_clock
    first = clock(run)
    spend = 0.0 if first > FAR * best else usual(device) if spend is None else spend
    count = max(2, min(25, int(spend / max(first, 1e-7)))) if first < 1.0 else 0
    return statistics.median([first, *(clock(run) for _ in range(count))])


def usual(device: torch.device) -> float:
    """Seconds that are spent on the time of one plan."""
    return 0.005 if device.type == "cuda" else 0.03


def _cpu_clock(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


_CYCLES = 2e9  # of a device, a second, about
_AHEAD = 2e-4  # seconds that the device is kept busy for before a call
_LONGEST = 5e-3


class _GpuClock:
    """Seconds of calls on the device, which is kept busy until the host has said all of one: no gaps are timed."""

    def __init__(self) -> None:
        self.ahead = _AHEAD

    def __call__(self, run: Callable[[], Any]) -> float:
        while True:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(self.ahead * _CYCLES))
            start = time.perf_counter()
            begin.record()
            run()
            end.record()
            said = time.perf_counter() - start
            end.synchronize()
            if said < self.ahead or self.ahead >= _LONGEST:  # a call that waits for the device is timed as it waits
                return begin.elapsed_time(end) / 1000
            self.ahead = min(_LONGEST, 2 * said)
