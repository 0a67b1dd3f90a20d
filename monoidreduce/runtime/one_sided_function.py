"""The arithmetic of one side (``one_sided.py``) as one differentiable step: a kernel, or torch where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engines import triton
from ..engines.common import one_sided
from ..engines.common.evaluate import Sizes
from ..engines.common.gradient_program import GradientProgram
from ..engines.common.one_sided import Side
from ..engines.common.torch_code import script
from ..program.lower import Lowered
from .gradient_programs import Gradient, Walker, asks

Run = Callable[[Sequence[Any]], list[Tensor]]


class Arithmetic:
    """A side on leaves of one kind."""

    def __init__(self, side: Side, leaves: Sequence[Any], sizes: Sizes, walker: Walker):
        self.side, self.sizes, self.walker = side, sizes, walker
        self.numbers = tuple(not isinstance(v, Tensor) for v in leaves)
        self.fixed = tuple(k for k, e in enumerate(side.outputs) if e.dtype != "float")
        self.gradients: dict[tuple, Gradient] = {}
        self.run: Run = self._launch(leaves) or self._by_torch()

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        """Its outputs, differentiably where a leaf asks for it."""
        return _sided(self, *leaves) if torch.is_grad_enabled() and asks(leaves) else self.run(leaves)

    def _launch(self, leaves: Sequence[Any]) -> Run | None:
        return triton.side(self.side, leaves, self.sizes)

    def _by_torch(self) -> Run:
        names = {e.attrs[0]: k for k, e in enumerate(self.side.leaves)}
        made = script(Lowered((), self.side.outputs), frozenset(n for n, k in names.items() if self.numbers[k]))
        return lambda leaves: made.run(self.sizes, None, *(leaves[names[n]] for n in made.inputs))

    def gradient(self, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> Gradient:
        found = self.gradients.get((wanted, given))
        if found is None:
            cotangents, outputs = one_sided.differentiate_side(self.side, wanted, given)
            names = [e.attrs[0] for e in cotangents]
            ready = GradientProgram.of(self.side.leaves, names, outputs, wanted, self.numbers)
            found = self.gradients[wanted, given] = Gradient(ready, self.side.leaves, self.walker, True)
        return found


ARITHMETIC: dict[str, type[Arithmetic]] = {}  # by engine, where it has its own


class _Sided(torch.autograd.Function):
    """The arithmetic of one side; its backward is arithmetic of the same side."""

    @staticmethod
    def forward(ctx: Any, arithmetic: Arithmetic, *leaves: Any) -> tuple[Tensor, ...]:
        output = tuple(arithmetic.run(leaves))
        ctx.arithmetic = arithmetic
        ctx.set_materialize_grads(False)
        if arithmetic.fixed:
            ctx.mark_non_differentiable(*[output[k] for k in arithmetic.fixed])
        ctx.constants = [None if isinstance(v, Tensor) else v for v in leaves]
        ctx.save_for_backward(*[v for v in leaves if isinstance(v, Tensor)])
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        saved = iter(ctx.saved_tensors)
        leaves = [c if c is not None else next(saved) for c in ctx.constants]
        made = ctx.arithmetic.gradient(ctx.needs_input_grad[1:], tuple([g is not None for g in cotangents]))
        return None, *made(ctx.arithmetic.sizes, leaves, cotangents)


# ``apply`` without its look at transforms: all calls are on plain tensors, and nothing watches
_sided: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Sided).apply
