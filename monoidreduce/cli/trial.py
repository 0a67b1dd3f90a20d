"""Runs of a layer: what came out, its gradients, time and memory, and how far two runs are apart."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..engines.common import matmul
from . import memory
from .layers import SEED
from .memory import Profile, Tensors

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Outcome:
    """Results of floating type, other results, and the gradients of every argument that has one (None if unused)."""

    values: Tensors
    choices: Tensors = ()
    gradients: tuple[Tensor | None, ...] = ()

    @property
    def everything(self) -> Tensors:
        return (*self.values, *self.choices, *(g for g in self.gradients if g is not None))


def learned(args: tuple[Any, ...]) -> list[Tensor]:
    """The arguments that gradients are asked of."""
    return [a for a in args if isinstance(a, Tensor) and a.requires_grad]


class Trial:
    """A call with its arguments, to be run again and again: for what comes out, for its time, for its memory."""

    def __init__(
        self, call: Callable[..., Any], args: tuple[Any, ...], device: torch.device = CPU, backward: bool = True
    ):
        self.call, self.args, self.device, self.backward = call, args, device, backward
        self.learned = learned(args)
        self.forward_seconds = self.seconds = math.inf  # the best so far
        self._cotangents: list[Tensor] = []  # made once: neither their time nor their memory is the layer's

    def results(self) -> list[Tensor]:
        return [t for t in tree_leaves(self.call(*self.args)) if isinstance(t, Tensor)]

    def gradients(self, found: Sequence[Tensor], create_graph: bool = False) -> tuple[Tensor | None, ...]:
        """Of all results together, with fixed random cotangents; none where nothing has a gradient."""
        roots = [t for t in found if t.requires_grad]
        if not roots or not self.backward:
            return ()
        self._cotangents = self._cotangents or _noise(roots)
        return torch.autograd.grad(roots, self.learned, self._cotangents, allow_unused=True, create_graph=create_graph)

    def once(self) -> Outcome:
        """Forward, and backward."""
        found = self.results()
        floats = tuple(t.detach() for t in found if t.is_floating_point())
        return Outcome(floats, tuple(t for t in found if not t.is_floating_point()), self.gradients(found))

    def timed(self) -> None:
        """A run by the clock; the best time stays."""
        start = self._now()
        found = self.results()
        middle = self._now()
        self.gradients(found)
        self.forward_seconds = min(self.forward_seconds, middle - start)
        self.seconds = min(self.seconds, self._now() - start)

    def profiled(self) -> Profile:
        """The memory of one run, over time; of a run after the first, which may trace and plan."""
        tensors = [t for t in (*self.args, *self._cotangents) if isinstance(t, Tensor)]
        pull = lambda found: tuple(g for g in self.gradients(found) if g is not None)
        return memory.record(lambda: tuple(self.results()), pull if self.backward else None, tensors, self.device)

    def extra(self) -> int:
        """The peak of the memory beyond the arguments and their gradients, in bytes."""
        if self.device.type != "cuda":
            return self.profiled().extra
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        outcome = self.once()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - before
        return max(0, peak - sum(g.nbytes for g in outcome.gradients if g is not None))

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _noise(like: Sequence[Tensor]) -> list[Tensor]:
    """Cotangents, the same for every layer, engine and type."""
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in like]


def run(call: Callable[..., Any], args: tuple[Any, ...], backward: bool = True) -> Outcome:
    """One run."""
    return Trial(call, args, backward=backward).once()


def second(call: Callable[..., Any], args: tuple[Any, ...]) -> Tensors:
    """The gradients of a random combination of the gradients."""
    trial = Trial(call, args)
    first = [g for g in trial.gradients(trial.results(), create_graph=True) if g is not None and g.requires_grad]
    if not first:
        return ()
    found = torch.autograd.grad(first, trial.learned, _noise(first), allow_unused=True)
    return tuple(torch.zeros_like(a) if g is None else g for g, a in zip(found, trial.learned, strict=True))


def apart(found: tuple[Tensor | None, ...], truth: tuple[Tensor | None, ...], least: float = 1e-3) -> float:
    """The largest relative difference ‖x − truth‖ / ‖truth‖ of any pair; infinite where shapes or infinities differ.

    A truth that is small beside the largest of them, below ``least``, is measured by that part of the largest: a
    gradient that is exactly zero has no relative error.

    >>> apart((torch.tensor([1.0, 2.0]),), (torch.tensor([1.0, 2.0]),))
    0.0
    """
    if len(found) != len(truth):
        return math.inf
    finite = [t[t.isfinite()].double().norm().item() for t in truth if t is not None]
    floor = least * max(finite, default=0.0)
    return max((_apart(x, t, floor) for x, t in zip(found, truth, strict=True)), default=0.0)


def _apart(x: Tensor | None, truth: Tensor | None, floor: float) -> float:
    if x is None:  # not used, which is the same as zero
        if truth is None:
            return 0.0
        x = torch.zeros_like(truth)
    if truth is None:
        truth = torch.zeros_like(x)
    if x.shape != truth.shape:
        return math.inf
    x, truth = x.double(), truth.to(x.device).double()
    finite = truth.isfinite()
    if not torch.equal(x.isfinite(), finite) or not torch.equal(
        x[~finite].nan_to_num(1.5), truth[~finite].nan_to_num(1.5)
    ):
        return math.inf
    gap, size = (x[finite] - truth[finite]).norm().item(), max(truth[finite].norm().item(), floor)
    return gap / size if size > 1e-300 else gap


def double(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same numbers in float64."""
    return tuple(
        a.detach().double().requires_grad_(a.requires_grad) if isinstance(a, Tensor) and a.is_floating_point() else a
        for a in args
    )


HELD = 6  # matrices of pairs that a dense form may hold at once, with those of its backward


def too_large(pairs: int, args: tuple[Any, ...], device: torch.device) -> str:
    """Why a dense form should not be tried, if it would not fit in the free memory; "" if it does."""
    size = max((a.element_size() for a in learned(args)), default=4)
    batch = max((a.shape[:-2].numel() for a in learned(args)), default=1)
    need, free = HELD * pairs * batch * size, matmul.free_memory(device)
    return f"it would take about {need / 1e9:.1f} GB of {free / 1e9:.1f} GB free" if free and need > free else ""
