"""Trials: is a candidate plan's result right, and how long does it take?

A result is right if it equals the safe plan's up to rounding, on the call itself and, with the same kernels, on a cut
of it so short that every tile matters (in a long sum a missing tile would hide in the rounding). All memory that the
candidate allocates is filled with NaN, or with absurd integers, first: so numbers it forgets to write, or reads before
it writes, are seen, and are not the right ones that an earlier run left there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..engines import triton
from ..engines.common import batching, combine, matmul
from ..engines.common.evaluate import Sizes
from ..plan.schedule import Choice
from ..program.expression import Expr
from ..program.lower import Fold
from ..reductions import kind_of

Perform = Callable[[Choice, Fold, Sequence[Any], Sizes], list[Tensor]]
FAR = 1.5  # a candidate whose first run takes more than so many times the best so far is timed only twice more
MOST_SPILLED = 1024  # bytes per thread of register spills; the fastest kernels on an H200 had up to 256
# The relative difference allowed between two plans: a few roundings of the coarsest type that products are made in.
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
    """The result of one trial: the candidate's time, or why it was refused."""

    choice: Choice
    seconds: float | None
    refused: str = ""


class Poison(TorchDispatchMode):
    """Fills memory allocated inside the block with NaN, absurd integers or True."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY and result.numel():
            if result.is_floating_point():
                result.fill_(torch.nan)
            else:
                result.fill_(True if result.dtype is torch.bool else torch.iinfo(result.dtype).min // 3)
        return result


# Is the result right? -----------------------------------------------------------------------------------------


def find_error(
    perform: Perform, choice: Choice, safe: Choice, fold: Fold, leaves: Sequence[Any], sizes: Sizes, truth: list[Tensor]
) -> str:
    """What is wrong with a candidate's results, "" if nothing is. ``truth``: the safe plan's for these leaves."""
    limit = tolerance(leaves)
    with Poison():
        found = perform(choice, fold, leaves, sizes)
    got, right = (comparable_results(fold, given, leaves, sizes) for given in (found, truth))
    if problem := describe_difference(got, right, limit):
        return problem
    short = shorten(fold, leaves, sizes, choice)
    if short is None:
        return ""
    with triton.as_for(sizes):
        expected = perform(safe, fold, *short)
        with Poison():
            found = perform(choice, fold, *short)
    got, right = (comparable_results(fold, given, *short) for given in (found, expected))
    problem = describe_difference(got, right, limit)
    return f"at {short[1].rows} × {short[1].cols}, {problem}" if problem else ""


def comparable_results(fold: Fold, results: Sequence[Tensor], leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """The results of a fold in a form that is the same by every plan.

    A softmax's shift differs between plans: the maximum, or a guessed maximum. Gradients are summed over the batch
    inside some kernels.
    """
    summed = batching.sum_gradients(fold, results, leaves, sizes)
    return [t for r, own in combine.split(fold, summed) for t in kind_of(r).settled(own)]


def describe_difference(found: Sequence[Tensor], truth: Sequence[Tensor], limit: float) -> str:
    """How two lists of results differ beyond ``limit``, "" if they do not; integers, infinities and NaN are exact."""
    for at, (a, b) in enumerate(zip(found, truth, strict=True)):
        if a.shape != b.shape:
            return f"result {at} has the shape {tuple(a.shape)} instead of {tuple(b.shape)}"
        if not b.is_floating_point():
            off = a != b
        else:
            a, b = (t if t.dtype is torch.float64 else t.float() for t in (a, b))
            off = ~((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= limit * _scale_of(b)))
        if count := int(off.sum()):
            return f"result {at} is wrong in {count} of {off.numel()} numbers"
    return ""


def _scale_of(b: Tensor) -> Tensor:
    """The magnitude that rounding errors are compared with, per number: |b| + RMS of its row + RMS of all / 8.

    The last term is for rows that are small because large numbers cancelled.
    """
    b = torch.where(b.isfinite(), b, 0).abs()
    return b + b.square().mean(-1, keepdim=True).sqrt() + b.square().mean().sqrt() / 8


def tolerance(leaves: Sequence[Any]) -> float:
    """The relative difference allowed between results of these leaves."""
    coarse = matmul.float32_precision() == "tf32"
    tensors = [v for v in leaves if isinstance(v, Tensor) and v.dtype in _APART]
    found = [_APART_TF32 if coarse and v.is_cuda and v.itemsize == 4 else _APART[v.dtype] for v in tensors]
    return max(found, default=_APART[torch.float32])


def shorten(fold: Fold, leaves: Sequence[Any], sizes: Sizes, choice: Choice) -> tuple[list[Any], Sizes] | None:
    """The first rows and columns of a call: two tiles and a ragged third. None if the call is no longer, or a shard."""
    blocks = {"rows": 1, "cols": 1}
    for name, tile in choice.tiles:
        if name == "tile":
            blocks = {"rows": max(blocks["rows"], tile[1]), "cols": max(blocks["cols"], tile[2])}
        elif name in blocks:  # a kernel that folds one axis keeps tiles of the other
            other = "rows" if name == "cols" else "cols"
            blocks = {other: max(blocks[other], tile[0]), name: max(blocks[name], tile[1] * max(1, tile[4]))}
    rows, cols = (min(sizes.here(axis), 2 * max(16, blocks[axis]) + 3) for axis in ("rows", "cols"))
    if (rows, cols) == (sizes.rows, sizes.cols) or sizes.shard is not None:
        return None
    cut = [
        _cut_leaf(v, e, rows, cols) if isinstance(v, Tensor) else v for e, v in zip(fold.leaves, leaves, strict=True)
    ]
    return cut, replace(sizes, rows=rows, cols=cols)


def _cut_leaf(v: Tensor, e: Expr, rows: int, cols: int) -> Tensor:
    """The first indices of a leaf ``[*batch, M or N, f]``, or ``[*batch, M, N]``; broadcast dimensions stay."""
    last = v.dim() - 1 - (e.feature is not None)
    if e.cols:
        v = v.narrow(last, 0, min(cols, v.shape[last]))
    at = last - 1 if e.cols else last
    return v.narrow(at, 0, min(rows, v.shape[at])) if e.rows else v


# How long does it take? ---------------------------------------------------------------------------------------


def measure_seconds(
    run: Callable[[], Any], device: torch.device, spend: float | None = None, best: float = math.inf
) -> float:
    """The median seconds of a call that has run before, over as many calls as ``spend`` seconds hold.

    ``best``: the best time so far; a call that is much slower is timed only twice more."""
    clock = _GpuClock() if device.type == "cuda" else _cpu_clock
    first = clock(run)
    spend = 0.0 if first > FAR * best else default_spend(device) if spend is None else spend
    count = max(2, min(25, int(spend / max(first, 1e-7)))) if first < 1.0 else 0
    return float(numpy.median([first, *(clock(run) for _ in range(count))]))


def default_spend(device: torch.device) -> float:
    """Seconds spent on timing one plan."""
    return 0.005 if device.type == "cuda" else 0.03


def _cpu_clock(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


_CYCLES = 2e9  # GPU clock cycles per second, about
_AHEAD = 2e-4  # seconds that the GPU is kept busy before a call
_LONGEST = 5e-3


class _GpuClock:
    """Seconds of GPU time. The GPU sleeps until the host has enqueued the whole call, so that no gaps are timed."""

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
            enqueued = time.perf_counter() - start
            end.synchronize()
            if enqueued < self.ahead or self.ahead >= _LONGEST:  # a call that waits for the GPU is timed as it is
                return begin.elapsed_time(end) / 1000
            self.ahead = min(_LONGEST, 2 * enqueued)
