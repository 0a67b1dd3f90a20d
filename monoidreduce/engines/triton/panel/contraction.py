"""Contractions of a panel's weights with vectors, by ping-pong kernels where these are faster than the vendor's GEMM.

The vendor's GEMM is as fast in its K loop, and then waits for what it adds to and until results are written: where few
indices are folded, that is a tenth of the time. Here one consumer writes while the other multiplies
(``schedules/pingpong/contraction_kernel.py``). What is added to is added in float32 and rounded once; the vendor's GEMM
rounds before it adds, and again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ...common import matmul
from ..kernels import fold_kernel
from ..launch import descriptors
from ..launch.launch_cache import Again, LaunchCache
from ..schedules import hopper, spec_from_tensors
from ..schedules.gluon_parts import GROUP_ROWS
from ..schedules.kernel_plan import KernelPlan
from ..schedules.pingpong import contraction_kernel
from ..schedules.pingpong.contraction_kernel import SCHEDULE

PLAN = KernelPlan(GROUP_ROWS, SCHEDULE.depth, 4, 1)
# On an H200, time ÷ the vendor's in turns with it (and each by itself), 256000 × 2304 sums that are added to: over 512
# indices 0.76 (0.80), 1024 0.84 (0.87), 2048 0.92 (0.95), 4096 0.95 (1.01); 128256 × 4096 over 2048 0.91 (0.91), over
# 4096 0.94 (1.11). A loss of 4096 features in 1100 MB took 0.98 of its products where it took 1.02 with the vendor's
# sums over 4096, in turns with them; in blocks of calls of one kind both took 1.01, or 1.02 and 1.03.
SHORTEST, LONGEST = 512, 4096
ROUNDS = 7.5  # tiles of a processor, at least: 32768 × 768 sums have 7.8
NARROWEST = 768  # features: over 2048 0.97 (1.02), over 1024 0.91 (0.94); 512 1.04 (1.08) and 0.97 (1.01)
PADDED = 1.05  # features of tiles to those that there are, at most
_MOST = 1024


def contract_into(out: Tensor, weights: Tensor, vectors: Tensor, add: bool) -> None:
    """out[l, d] (+)= weights[l, n] @ vectors[n, d], accumulated in float32 and rounded once to the type of ``out``: by
    the kernel of this file where it is faster, else by the vendor's product."""
    if weights.dtype not in matmul.SIXTEEN or not into(out, weights, vectors, add):
        matmul.contract_into(out, weights, vectors, add)


def into(out: Tensor, weights: Tensor, vectors: Tensor, add: bool) -> bool:
    """out[l, d] (+)= weights[l, n] @ vectors[n, d], accumulated in float32 and rounded once; False where the vendor's
    product is as fast, or there is no such kernel."""
    key = (add, out.device, *map(_form, (out, weights, vectors)))
    if key not in _READY:
        while len(_READY) >= _MOST:
            del _READY[next(iter(_READY))]
        gains = _fits(out, weights, vectors) and by_turns(*out.shape, folded=len(vectors), device=out.device)
        _READY[key] = Ready(out, weights, vectors, add) if gains else None
    ready = _READY[key]
    if ready is not None:
        ready(out, weights, vectors)
    return ready is not None


def by_turns(kept: int, features: int, *, folded: int, device: torch.device) -> bool:
    """Whether sums so large and long are faster by turns."""
    tiles, turns = -(-kept // SCHEDULE.tile), -(-features // SCHEDULE.width)
    many = tiles * turns >= ROUNDS * spec_from_tensors.processors(device)
    return (
        SHORTEST <= folded <= LONGEST and many and features >= NARROWEST and turns * SCHEDULE.width <= PADDED * features
    )


def _form(t: Tensor) -> tuple:
    return t.dtype, t.shape, t.stride(), t.data_ptr() & 15


def _fits(out: Tensor, weights: Tensor, vectors: Tensor) -> bool:
    """Hopper, 16 bits, all of it where tensor descriptors can be."""
    kinds = {t.dtype for t in (out, weights, vectors)}
    panel = weights if weights.stride(1) == 1 else weights.mT
    return (
        len(kinds) == 1
        and kinds <= set(matmul.SIXTEEN)
        and hopper.runs_warp_specialized(out.device)
        and _copied(out, panel, vectors)
    )


def _copied(*tensors: Tensor) -> bool:
    return all(descriptors.fits(t) for t in tensors)


class Ready:
    """A sum on tensors of given types, shapes, strides and alignment."""

    def __init__(self, out: Tensor, weights: Tensor, vectors: Tensor, add: bool):
        self.over = "cols" if weights.stride(1) == 1 else "rows"
        run, depth = GROUP_ROWS, SCHEDULE.depth
        self.kernel = contraction_kernel.write_kernel(str(out.dtype)[6:], self.over, add)
        tiles, turns = -(-out.shape[0] // SCHEDULE.tile), -(-out.shape[1] // SCHEDULE.width)
        self.numbers = (-(-weights.shape[1] // depth), tiles, turns)
        self.grid = min(spec_from_tensors.processors(out.device), tiles * turns)
        panel, block = (weights, (run, depth)) if self.over == "cols" else (weights.mT, (depth, run))
        forms = ((panel, block), (vectors, (depth, SCHEDULE.width)), (out, (run, SCHEDULE.piece)))
        self.boxes = [descriptors.template(t, (), block, staged=True) for t, block in forms]
        self.kept = LaunchCache()

    def __call__(self, out: Tensor, weights: Tensor, vectors: Tensor) -> None:
        given = (weights if self.over == "cols" else weights.mT, vectors, out)
        arguments = [*map(descriptors.filled, self.boxes, given), *self.numbers]
        self.kept((), functools.partial(self._first, arguments, out.device), arguments)

    def _first(self, arguments: list[Any], device: torch.device) -> Again | None:
        return fold_kernel.execute(
            fold_kernel.Call(self.kernel, PLAN, self.grid, tuple(arguments), False, "ieee", False, device)
        )


_READY: dict[tuple, Ready | None] = {}
