"""Gradient programs: where their inputs come from, and how their outputs become gradients.

A gradient program is symbolic (``program/gradient.py``, ``program/backward.py``, ``one_sided.py``) and the same for all
shapes. ``autograd.py`` runs it, ``replay.py`` records its launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engines.common.torch_code import inputs, missing
from ..program.compile import compile_program
from ..program.expression import Expr
from ..program.lower import Lowered


@dataclass(frozen=True)
class GradientProgram:
    """A lowered gradient program. Its inputs are taken from a list of leaves, results and cotangents, in this order."""

    program: Lowered
    numbers: frozenset[str]  # the inputs that are Python numbers
    sources: tuple[int, ...]  # per input, its place in that list
    outputs: tuple[tuple[int, Expr | None], ...]  # per leaf asked for: its place and its gradient's expression
    leaves: tuple[Expr, ...]

    @staticmethod
    def of(
        leaves: Sequence[Expr],
        others: Sequence[str],
        outputs: Sequence[Expr | None],
        wanted: tuple,
        numbers: tuple,
        exact: bool = False,
    ) -> GradientProgram:
        """Lower the gradients ``outputs`` of ``leaves`` (those ``wanted``). ``others``: the names of the inputs besides
        the leaves; ``numbers``: which leaves are Python numbers."""
        program = compile_program(tuple(e for e in outputs if e is not None)).having(exact)
        names = {name: k for k, name in enumerate((*(e.attrs[0] for e in leaves), *others))}
        lowered = iter(program.outputs)
        found = [(k, e if e is None else next(lowered)) for k, e in enumerate(outputs) if wanted[k]]
        known = frozenset(e.attrs[0] for e, is_number in zip(leaves, numbers, strict=True) if is_number)
        sources = tuple(names[n] for n in inputs(program))
        return GradientProgram(program, known, sources, tuple(found), tuple(leaves))

    def gradients(self, values: Sequence[Any], leaves: Sequence[Any]) -> tuple[list[Tensor | None], bool]:
        """The program's results as gradients, one per leaf (None where not asked); and whether they were gradients as
        they came, without a sum or a cast."""
        grads: list[Tensor | None] = [None] * len(leaves)
        rest, fits = iter(values), True
        for place, e in self.outputs:
            leaf, value = leaves[place], None if e is None else next(rest)
            grads[place] = zero(leaf) if e is None else as_gradient(value, e, leaf, self.leaves[place])
            fits = fits and grads[place] is value
        return grads, fits


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
