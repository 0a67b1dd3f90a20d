"""Gradient programs made ready: where their inputs come from, what runs them, and how their outputs become gradients.

A program is symbolic (``program/gradient.py``, ``one_sided.py``) and the same for all shapes. What runs it is found
by the
kind of its inputs: in an ordinary backward its passes are frozen (``frozen_pass.py``); one that is watched, or is
itself to
be differentiated, walks it by torch and the engine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..engines import triton
from ..engines.common import skip_small_tiles
from ..engines.common.evaluate import Sizes
from ..engines.common.gradient_program import GradientProgram
from ..errors import NoGradientError
from ..program.expression import Expr
from ..program.lower import Lowered

PLAIN = frozenset({Tensor, torch.nn.Parameter})
_MOST = 64  # kinds of inputs, of one program

Walked = Callable[..., list[Any]]  # (sizes, *inputs) -> outputs
Walker = Callable[[Lowered, frozenset[str], bool], Walked]  # of a program, its numbers, and whether calls are alike


def straight() -> bool:
    """Whether nothing watches torch's calls: no compiler, no fake tensors, no transform, no forward-mode level."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def plain(values: Sequence[Any]) -> bool:
    """Whether these are tensors with numbers in them (or no tensors), and nothing watches."""
    return straight() and all([type(v) in PLAIN for v in values if isinstance(v, Tensor)])


def asks(values: Sequence[Any]) -> bool:
    """Whether any of these asks for a gradient."""
    return True in [isinstance(v, Tensor) and v.requires_grad for v in values]


def refuse_batched(cotangents: Sequence[Tensor | None]) -> None:
    """Raise for cotangents that torch's older vmap has batched."""
    if True in [g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in cotangents]:
        raise NoGradientError(
            detail="batched cotangents (is_grads_batched=True, vectorize=True) come from torch's older vmap",
            fix="Use torch.func.jacrev, or torch.vmap over torch.func.vjp",
        )


@dataclass
class _Run:
    """What runs a program on inputs of one kind; ``fits``: whether its outputs are gradients as they come."""

    walked: Walked
    fits: bool = False


@dataclass(frozen=True)
class Gradient:
    """A gradient program of leaves with these expressions; ``freezes``: whether passes are launches where they are."""

    ready: GradientProgram
    leaves: tuple[Expr, ...]
    walker: Walker
    freezes: bool
    runs: dict[tuple, _Run] = field(default_factory=dict, compare=False)  # by the kind of the inputs

    def __call__(self, sizes: Sizes, leaves: Sequence[Any], others: Sequence[Any]) -> list[Tensor | None]:
        """A gradient per leaf (None where not asked)."""
        pool = [*leaves, *others]
        values = [pool[k] for k in self.ready.sources]
        alike = self.freezes and not torch.is_grad_enabled() and plain(values)
        kind = triton.kind(values) if alike else ()
        run = self.runs.get(kind) or self._run(kind)
        with skip_small_tiles.apply_to_gradient() if self._skips(values) else contextlib.nullcontext():
            found = run.walked(sizes, *values)
        if run.fits:
            grads: list[Tensor | None] = [None] * len(leaves)
            for (place, _), value in zip(self.ready.outputs, found, strict=True):
                grads[place] = value
            return grads
        grads, fits = self.ready.gradients(found, leaves)
        run.fits = fits and bool(kind)
        return grads

    def _skips(self, values: Sequence[Any]) -> bool:
        """Whether small tiles may be left out: of one pass, whose sums are gradients, and nothing is made of them."""
        if skip_small_tiles.requested() is None or torch.is_grad_enabled():
            return False
        return len(self.ready.program.passes) == 1 and plain(values)

    def _run(self, kind: tuple) -> _Run:
        if kind and len(self.runs) >= _MOST:
            return self.runs.get(()) or self._run(())
        return self.runs.setdefault(kind, _Run(self.walker(self.ready.program, self.ready.numbers, bool(kind))))
