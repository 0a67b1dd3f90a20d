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
from ..engines.common.torch_code import inputs, missing
from ..errors import NoGradientError
from ..program.expression import Expr
from ..program.lower import Lowered, lower

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


@dataclass(frozen=True)
class Ready:
    """A gradient program: its inputs are taken from leaves, results and cotangents, in this order."""

    program: Lowered
    numbers: frozenset[str]  # the inputs that are Python numbers
    sources: tuple[int, ...]
    outputs: tuple[tuple[int, Expr | None], ...]  # per leaf asked for: its place and its gradient's expression

    @staticmethod
    def of(
        leaves: Sequence[Expr],
        others: Sequence[str],
        outputs: Sequence[Expr | None],
        wanted: tuple,
        numbers: tuple,
        exact: bool = False,
    ) -> Ready:
        """``others``: the names of the inputs that are no leaves, in their order; ``exact``: whether the products that
        results were made of are."""
        program = lower(tuple(e for e in outputs if e is not None)).having(exact)
        names = {name: k for k, name in enumerate((*(e.attrs[0] for e in leaves), *others))}
        lowered = iter(program.outputs)
        found = [(k, e if e is None else next(lowered)) for k, e in enumerate(outputs) if wanted[k]]
        known = frozenset(e.attrs[0] for e, is_number in zip(leaves, numbers, strict=True) if is_number)
        return Ready(program, known, tuple(names[n] for n in inputs(program)), tuple(found))


@dataclass
class _Run:
    """What runs a program on inputs of one kind; ``fits``: whether its outputs are gradients as they come."""

    walked: Walked
    fits: bool = False


@dataclass(frozen=True)
class Gradient:
    """A gradient program of leaves with these expressions; ``freezes``: whether passes are launches where they are."""

    ready: Ready
    leaves: tuple[Expr, ...]
    walker: Walker
    freezes: bool
    runs: dict[tuple, _Run] = field(default_factory=dict, compare=False)  # by the kind of the inputs

    def __call__(self, sizes: Sizes, leaves: Sequence[Any], others: Sequence[Any]) -> list[Tensor | None]:
        """A gradient per leaf (None where not asked)."""
        pool = [*leaves, *others]
        values = [pool[k] for k in self.ready.sources]
        alike = self.freezes and not torch.is_grad_enabled() and plain(values)
        kind = triton.describe_leaves(values) if alike else ()
        run = self.runs.get(kind) or self._run(kind)
        with skip_small_tiles.gradient() if self._skips(values) else contextlib.nullcontext():
            found = run.walked(sizes, *values)
        grads: list[Tensor | None] = [None] * len(leaves)
        if run.fits:
            for (place, _), value in zip(self.ready.outputs, found, strict=True):
                grads[place] = value
            return grads
        rest, fits = iter(found), bool(kind)
        for place, e in self.ready.outputs:
            leaf, value = leaves[place], None if e is None else next(rest)
            grads[place] = zero(leaf) if e is None else as_gradient(value, e, leaf, self.leaves[place])
            fits = fits and grads[place] is value
        run.fits = fits
        return grads

    def _skips(self, values: Sequence[Any]) -> bool:
        """Whether small tiles may be left out: of one pass, whose sums are gradients, and nothing is made of them."""
        if skip_small_tiles.asked() is None or torch.is_grad_enabled():
            return False
        return len(self.ready.program.passes) == 1 and plain(values)

    def _run(self, kind: tuple) -> _Run:
        if kind and len(self.runs) >= _MOST:
            return self.runs.get(()) or self._run(())
        return self.runs.setdefault(kind, _Run(self.walker(self.ready.program, self.ready.numbers, bool(kind))))


def zero(leaf: Tensor) -> Tensor:
    """Zeros that still depend on the leaf, so that a second derivative of them is zero and not an error."""
    if not torch.is_grad_enabled():
        return torch.zeros_like(leaf)
    return torch.where(torch.ones((), dtype=torch.bool, device=leaf.device), torch.zeros_like(leaf), leaf)


def as_gradient(value: Any, e: Expr, leaf: Tensor, expr: Expr, dtype: torch.dtype | None = None) -> Tensor:
    """A gradient in the shape and type of its leaf (or another): summed over what the leaf does not vary along."""
    if not isinstance(value, Tensor):
        return torch.full_like(leaf, value)
    if (e.rows or e.cols) and not expr.rows and not expr.cols:  # of a number beside one side's arithmetic
        value = value.sum(-1 if e.feature is None else -2)
    else:
        for at in missing(e, expr):  # an axis that the gradient does not vary along has size 1
            value = value.unsqueeze(at)
    if value.shape != leaf.shape:
        value = value.expand(torch.broadcast_shapes(value.shape, leaf.shape)).sum_to_size(leaf.shape)
    dtype = dtype or leaf.dtype
    return value if value.dtype is dtype else value.to(dtype)  # even an idle .to takes a microsecond
