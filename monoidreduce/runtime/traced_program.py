"""Programs that something traces: by which operators they enter its graph.

A compiler (or a tracer, a dispatch mode, fake tensors) sees a program of one pass as one operator and its backward as
another (``program_operator.py``), wherever kernels run its folds: inside a graph the same kernels run with the same
memory as outside. All others are traced step by step, a registered operator for each pass (``autograd.py``): where
torch's transforms are active (``vmap``, ``jvp``, ``torch.func.grad``), where there are several passes, and where a
forward keeps gradients of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engines.common.evaluate import Sizes
from ..engines.common.gradient_program import zero_gradient
from ..engines.common.saved_tensors import load_saved
from ..errors import NoGradientError
from ..plan import settings
from ..program.expression import Expr, topological
from ..program.loss_and_gradient import differentiate_program
from . import call_context, program_operator, saved_row_gradients
from .call_context import apply_settings, need_gradient
from .program_operator import Program
from .replay import ProgramSteps, can_record
from .torch_operator import fix_lengths


class TracedProgram:
    """A program on inputs of which nothing is known but their sizes: by its operators where something traces it, else
    ``walk``, step by step."""

    def __init__(self, steps: ProgramSteps, sizes: Sizes, out: torch.dtype | None, walk: Callable[..., list[Any]]):
        self.steps, self.sizes, self.walk = steps, sizes, walk
        self.program = Program(steps.program, steps.numbers, out)

    def __call__(self, *values: Any) -> list[Any]:
        if call_context.are_plain(values) or call_context.is_transformed() or not self._has_operators(values):
            return self.walk(*values)
        if torch.is_grad_enabled() and need_gradient(values):
            return list(_Traced.apply(self, *values))[: len(self.steps.program.outputs)]
        return program_operator.run_forward(self.program, self.steps.engine, False, values, self.sizes)

    def _has_operators(self, values: Sequence[Any]) -> bool:
        steps, sizes = self.steps, self.sizes
        if len(steps.program.passes) != 1 or steps.program.is_listed or not can_record(steps.engine, sizes):
            return False
        if not torch.is_grad_enabled() or not need_gradient(values):
            return True
        fold = steps.program.passes[0].fold
        asking = [self._asks(e, values) for e in steps.program.passes[0].feeds]
        if saved_row_gradients.form(fold, asking, fix_lengths(sizes), steps.engine) is not None:
            return False
        needs = tuple(isinstance(v, Tensor) and v.requires_grad for v in values)
        try:
            steps.gradient(needs, (True,) * len(steps.program.outputs), len(fold.outputs))
        except NoGradientError:  # torch may have one
            return False
        return True

    def _asks(self, feed: Expr, values: Sequence[Any]) -> Any:
        """An input that asks for a gradient and that this is computed of; None where there is none."""
        named = dict(zip(self.program.inputs, values, strict=True))
        found = (
            [named[str(e.attrs[0])] for e in topological([feed]) if e.op == "input"] if feed.dtype == "float" else []
        )
        return next((v for v in found if isinstance(v, Tensor) and v.requires_grad), None)

    def moves(self, output: int, needs: tuple[bool, ...]) -> bool:
        """Whether an output has a part in the gradients asked for; what is kept behind the outputs has none."""
        program = self.steps.program
        given = tuple(k == output for k in range(len(program.outputs)))
        return any(given) and any(
            e is not None for e in differentiate_program(program, self.steps.inputs, needs, given)
        )

    def differentiate(
        self, values: Sequence[Any], needs: Sequence[bool], cotangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """The gradients of a program that is run once more, step by step: differentiable themselves."""
        with torch.enable_grad():
            found = self.walk(*values)
            pairs = [(y, g) for y, g in zip(found, cotangents, strict=True) if g is not None and y.requires_grad]
            wanted = [v for v, need in zip(values, needs, strict=True) if need]
            roots, seeds = [y for y, _ in pairs], [g.to(y.dtype) for y, g in pairs]
            grads = iter(torch.autograd.grad(roots, wanted, seeds, create_graph=True, allow_unused=True))
        made = [next(grads) if need else None for need in needs]
        return [zero_gradient(v) if n and g is None else g for v, n, g in zip(values, needs, made, strict=True)]


class _Traced(torch.autograd.Function):
    """A program by its operators."""

    @staticmethod
    def forward(traced: TracedProgram, *values: Any) -> tuple[Tensor, ...]:
        return tuple(program_operator.run_forward(traced.program, traced.steps.engine, True, values, traced.sizes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        traced, *values = inputs
        ctx.traced, ctx.settings = traced, settings.now()
        ctx.set_materialize_grads(False)
        needs = tuple(isinstance(v, Tensor) and v.requires_grad for v in values)
        ctx.mark_non_differentiable(*(t for k, t in enumerate(output) if not traced.moves(k, needs)))
        ctx.constants = [None if isinstance(v, Tensor) else v for v in values]
        ctx.save_for_backward(*(v for v in values if isinstance(v, Tensor)), *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        traced, needs = ctx.traced, ctx.needs_input_grad[1:]
        first, count = ctx.constants.count(None), len(traced.steps.program.outputs)
        tensors, unchanged = load_saved(ctx, range(first, first + len(cotangents)))
        rest, given = iter(tensors), cotangents[:count]
        values = [c if c is not None else next(rest) for c in ctx.constants]
        with apply_settings(ctx.settings), call_context.without_autocast(tensors):
            if torch.is_grad_enabled():
                return None, *traced.differentiate(values, needs, given)
            program, engine, sizes = traced.program, traced.steps.engine, traced.sizes
            found = list(rest) if unchanged else program_operator.run_forward(program, engine, True, values, sizes)
            results = program.join_results(found)
            return None, *program_operator.run_gradient(program, engine, needs, values, results, given, sizes)
