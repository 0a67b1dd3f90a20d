"""One run of a layer: what came out, its gradients, its second gradients, and how far two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..engine import hardware
from . import memory
from .layers import SEED
from .memory import Profile, Tensors


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


def results(call: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
    return [t for t in tree_leaves(call(*args)) if isinstance(t, Tensor)]


def noise(like: list[Tensor]) -> list[Tensor]:
    """Cotangents, the same for every run, engine and type."""
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for t in like]


def gradients(found: list[Tensor], args: tuple[Any, ...], *, create_graph: bool = False) -> tuple[Tensor | None, ...]:
    """The gradients of all results together, with fixed random cotangents; none where nothing has a gradient."""
    roots = [t for t in found if t.requires_grad]
    if not roots:
        return ()
    return torch.autograd.grad(roots, learned(args), noise(roots), allow_unused=True, create_graph=create_graph)


def run(call: Callable[..., Any], args: tuple[Any, ...], backward: bool = True) -> Outcome:
    """Forward, and backward."""
    found = results(call, args)
    floats = tuple(t.detach() for t in found if t.is_floating_point())
    others = tuple(t for t in found if not t.is_floating_point())
    return Outcome(floats, others, gradients(found, args) if backward else ())


def second(call: Callable[..., Any], args: tuple[Any, ...]) -> Tensors:
    """The gradients of a random combination of the gradients."""
    first = [g for g in gradients(results(call, args), args, create_graph=True) if g is not None and g.requires_grad]
    if not first:
        return ()
    found = torch.autograd.grad(first, learned(args), noise(first), allow_unused=True)
    return tuple(torch.zeros_like(a) if g is None else g for g, a in zip(found, learned(args), strict=True))


def profiled(call: Callable[..., Any], args: tuple[Any, ...], device: torch.device, backward: bool = True) -> Profile:
    """The memory of one forward and backward, over time."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    pull = lambda found: tuple(g for g in gradients(list(found), args) if g is not None)
    return memory.record(lambda: tuple(results(call, args)), pull if backward else None, tensors, device)


def extra(call: Callable[..., Any], args: tuple[Any, ...], device: torch.device, backward: bool = True) -> int:
    """The peak of the memory beyond the arguments and their gradients, in bytes."""
    if device.type != "cuda":
        return profiled(call, args, device, backward).extra
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    outcome = run(call, args, backward)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    return max(0, peak - sum(g.nbytes for g in outcome.gradients if g is not None))


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
    need, free = HELD * pairs * batch * size, hardware.free_memory(device)
    return f"it would take about {need / 1e9:.1f} GB of {free / 1e9:.1f} GB free" if free and need > free else ""
