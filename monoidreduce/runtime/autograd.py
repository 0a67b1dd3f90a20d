"""Passes as one differentiable torch function, and programs as a walk over passes.

The backward of a pass is built symbolically (``program/gradient.py``), lowered like any program and run by this same
walk, so that first, second and third derivatives take one road, on every engine. Plain tensors go straight to the
engine; under a tracer or a transform (``torch.compile``, ``vmap``, ``jvp``, fake tensors) the same fold goes through
the registered operator (``torch_operator.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..engines.common import matmul, oom_retry
from ..engines.common.evaluate import Sizes
from ..engines.common.gradient_program import (
    GradientProgram,
    build_gradient_program,
    constant_results,
    zero_gradient,
)
from ..engines.common.one_sided import Side
from ..engines.common.saved_tensors import detach_views, load_saved
from ..engines.common.torch_code import script
from ..program.lower import Fold, Lowered
from ..program.saved_row_gradients import Early, gradients
from . import autocast, forward_settings, saved_row_gradients, torch_operator
from .forward_replay import Program
from .frozen_pass import Pass, freezes
from .gradient_programs import Gradient, Walked, asks, plain, refuse_batched
from .one_sided_function import ARITHMETIC, Arithmetic
from .registry import FOLDERS
from .replay_steps import Steps

REHEARSAL = "rehearsal"  # the engine that computes nothing (``dry_run.py``): it is watched, but not traced


@dataclass(frozen=True)
class Context:
    """What a pass needs besides its tensors; gradient programs met so far are kept with it."""

    fold: Fold
    sizes: Sizes
    engine: str
    frozen: Pass | None = field(default=None, compare=False)  # where leaves are plain tensors of one kind
    fixed: tuple[int, ...] = ()  # of the frozen pass's results, those that are constants to gradients
    gradients: dict[tuple, Gradient] = field(default_factory=dict, compare=False)

    @property
    def launches(self) -> Pass:
        """The frozen pass, where there is one."""
        assert self.frozen is not None
        return self.frozen


class Walk:
    """Runs the passes of one call: a context for each fold, made once.

    ``alike``: all calls are on plain tensors of one kind, nothing watches them, and folds are launches: passes are
    frozen, and the arithmetic between them is launched too."""

    def __init__(self, engine: str, alike: bool = False):
        self.engine, self.alike = engine, alike
        self.contexts: dict[int, Context] = {}  # by the folds' identities, which contexts hold
        self.sides: dict[int, Arithmetic] = {}  # likewise

    def __call__(self, fold: Fold, leaves: list[Any], sizes: Sizes, shown: tuple[int, ...]) -> Sequence[Tensor]:
        """The results of a fold that are asked for."""
        context = self.contexts.get(id(fold)) or self._context(fold, sizes, shown)
        grads = torch.is_grad_enabled() and asks(leaves)
        if context.frozen is None or (grads and saved_row_gradients.form(fold, leaves, sizes, self.engine) is not None):
            found = run(context, leaves)
            return [found[k] for k in shown]
        if grads:
            return _frozen(context, *leaves)
        return oom_retry.run_with_retry(context.frozen, (leaves,), sizes, fold)[0]

    def _context(self, fold: Fold, sizes: Sizes, shown: tuple[int, ...]) -> Context:
        frozen = Pass(fold, sizes, self.engine, shown) if self.alike else None
        fixed = tuple(at for at, k in enumerate(shown) if constant_results(fold)[k])
        return self.contexts.setdefault(id(fold), Context(fold, sizes, self.engine, frozen, fixed))

    def side(self, side: Side, leaves: list[Any], sizes: Sizes) -> Sequence[Tensor]:
        """The arithmetic of one side, where all calls are alike."""
        found = self.sides.get(id(side))
        if found is None:
            make = ARITHMETIC.get(self.engine, Arithmetic)
            made = make(side, leaves, sizes, functools.partial(walked, self.engine))
            found = self.sides.setdefault(id(side), made)
        return found(leaves)


def walked(engine: str, program: Lowered, numbers: frozenset[str], alike: bool) -> Walked:
    """A program as a function of its sizes and inputs: where calls are alike (see :class:`Walk`) by its tape."""
    plainly, steps = walk(engine, program, numbers, alike), Steps(engine, program, numbers)
    return Program(steps, plainly, functools.partial(walked, engine)) if alike and steps.launches else plainly


def walk(engine: str, program: Lowered, numbers: frozenset[str], alike: bool) -> Walked:
    """The same, step by step; so is what stands for a call whose steps would be launches."""
    gathered = alike or (engine == REHEARSAL and matmul.rehearsed.get() is not None)
    folder, run = Walk(engine, alike), script(program, numbers, gathered).run
    return lambda sizes, *values: run(sizes, folder, *values)


def run(context: Context, leaves: Sequence[Any]) -> Sequence[Tensor]:
    """Fold, differentiably where a leaf asks for it."""
    if context.engine != REHEARSAL and not plain(leaves):
        return _Traced.apply(context, *leaves)
    if torch.is_grad_enabled() and asks(leaves):
        return _Straight.apply(context, *leaves)
    return FOLDERS[context.engine](context.fold, leaves, context.sizes)


class _Straight(torch.autograd.Function):
    """One pass over the pairs by an engine; its backward is a program."""

    @staticmethod
    def forward(ctx: Any, context: Context, *leaves: Any) -> tuple[Tensor, ...]:
        form = saved_row_gradients.form(context.fold, leaves, context.sizes, context.engine)
        if form is None:
            output = detach_views(FOLDERS[context.engine](context.fold, leaves, context.sizes))
            _keep(ctx, context, leaves, output)
            return output
        found = FOLDERS[context.engine](form.fold, [leaves[k] for k in form.feeds], context.sizes)
        output = detach_views([found[k] for k in form.own])
        _keep(ctx, context, leaves, output, form, tuple(found[k] for k in form.more))
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        return _backward(ctx, cotangents)


class _Frozen(torch.autograd.Function):
    """The same pass, frozen: only what is asked for is a result; what else a backward needs is kept as it is.

    A backward that is itself to be differentiated folds once more, for results that are."""

    @staticmethod
    def forward(ctx: Any, context: Context, *leaves: Any) -> tuple[Tensor, ...]:
        found, rest = oom_retry.run_with_retry(context.launches, (leaves,), context.sizes, context.fold)
        shown = detach_views(found)
        ctx.context, ctx.form, ctx.asked = context, None, forward_settings.now()
        ctx.set_materialize_grads(False)
        if context.fixed:
            ctx.mark_non_differentiable(*[shown[k] for k in context.fixed])
        ctx.constants = [None if isinstance(v, Tensor) else v for v in leaves]
        ctx.save_for_backward(*[v for v in leaves if isinstance(v, Tensor)], *shown, *rest)
        return shown

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        context, leaves, results, unchanged = _kept(ctx, len(cotangents))
        given: list[Tensor | None] = [None] * len(context.fold.outputs)
        launches = context.launches
        for k, g in zip(launches.shown, cotangents, strict=True):
            given[k] = g
        if torch.is_grad_enabled() or not unchanged:
            with forward_settings.again(ctx.asked):
                results = list(run(context, leaves))
        else:
            count = len(launches.shown)
            results = launches.whole(results[:count], results[count:])
        return _pulled(ctx, leaves, results, given)


# ``apply`` without its look at transforms, for what is known to have none
_frozen: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Frozen).apply


class _Traced(torch.autograd.Function):
    """The same pass through the registered operator, for whoever traces or transforms it."""

    @staticmethod
    def forward(context: Context, *leaves: Any) -> tuple[Tensor, ...]:
        return tuple(torch_operator.call(context.fold, context.engine, leaves, context.sizes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        context, *leaves = inputs
        _keep(ctx, context, leaves, output)
        ctx.save_for_forward(*(v for v in leaves if isinstance(v, Tensor)), *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        return _backward(ctx, cotangents)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple:
        """J t, as the derivative of ⟨Jᵀ g, t⟩ by g: the gradient program is linear in its cotangents."""
        context, leaves, results = _kept(ctx, len(ctx.context.fold.outputs))[:3]
        leaves, results = [_primal(v) for v in leaves], [_primal(r) for r in results]
        moving = [k for k, f in enumerate(constant_results(context.fold)) if not f]
        wanted = tuple(isinstance(t, Tensor) for t in tangents)
        tangents_given = [t for t in tangents if isinstance(t, Tensor)]
        if not context.sizes.rows or not context.sizes.cols or not moving or not tangents_given:
            return tuple(torch.zeros_like(r) if k in moving else None for k, r in enumerate(results))

        def pulled(*g: Tensor) -> tuple[Tensor, ...]:
            cotangents: list[Tensor | None] = [None] * len(results)
            for k, value in zip(moving, g, strict=True):
                cotangents[k] = value
            return tuple(t for t in _gradients(context, leaves, results, wanted, cotangents) if t is not None)

        with forward_ad._set_fwd_grad_enabled(True):  # an outer level's tangents go on, this level's were taken off
            pull: Any = torch.func.vjp(pulled, *(torch.zeros_like(results[k]) for k in moving))[1]
            found = iter(pull(tuple(tangents_given)))
        return tuple(next(found) if k in moving else None for k in range(len(results)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, context: Context, *leaves: Any) -> tuple:
        """A mapped dimension is one more batch dimension, in front; leaves that do not have it broadcast."""
        moved = torch_operator.in_front(context.fold, leaves, in_dims[1:], info.batch_size)
        sizes = replace(context.sizes, batch=(info.batch_size, *context.sizes.batch))
        results = _Traced.apply(replace(context, sizes=sizes, gradients={}), *moved)
        return tuple(results), (0,) * len(results)


def _primal(value: Any) -> Any:
    """Without the tangent of the present level, which would call ``jvp`` again."""
    return forward_ad.unpack_dual(value).primal if isinstance(value, Tensor) else value


def _keep(
    ctx: Any,
    context: Context,
    leaves: Sequence[Any],
    output: tuple[Tensor, ...],
    form: Early | None = None,
    more: tuple[Tensor, ...] = (),
) -> None:
    ctx.context, ctx.form = context, form
    ctx.asked = forward_settings.now()
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(o for o, f in zip(output, constant_results(context.fold), strict=True) if f))
    ctx.constants = [None if isinstance(v, Tensor) else v for v in leaves]
    ctx.save_for_backward(*(v for v in leaves if isinstance(v, Tensor)), *output, *more)


def _kept(ctx: Any, count: int) -> tuple[Context, list[Any], list[Tensor], bool]:
    """The context, the leaves and the results; what was kept beside them for gradients comes after these.

    ``count``: how many of the results are outputs. Last, whether these are unchanged since the forward."""
    first = ctx.constants.count(None)  # tensors among the leaves
    tensors, unchanged = load_saved(ctx, range(first, first + count))
    rest = iter(tensors)
    leaves = [c if c is not None else next(rest) for c in ctx.constants]
    return ctx.context, leaves, list(rest), unchanged


def _backward(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple:
    context, leaves, results, unchanged = _kept(ctx, len(cotangents))
    if not unchanged:
        with forward_settings.again(ctx.asked):
            results = list(run(context, leaves))
        ctx.form = None  # the results alone: the gradients are the usual program of these
    return _pulled(ctx, leaves, results, cotangents)


def _pulled(ctx: Any, leaves: list[Any], results: list[Tensor], cotangents: Sequence[Tensor | None]) -> tuple:
    """The gradients of a pass, as it was asked for."""
    refuse_batched(cotangents)
    context, wanted = ctx.context, ctx.needs_input_grad[1:]
    if not context.sizes.rows or not context.sizes.cols:  # no pairs: nothing flows, whatever the cotangents are
        return None, *(zero_gradient(leaf) if want else None for leaf, want in zip(leaves, wanted, strict=True))
    region, given = autocast.region(results), (context, leaves, results, wanted, cotangents, ctx.form)
    if region is None and ctx.asked == forward_settings.now():
        return None, *oom_retry.run_with_typed_error(_gradients, given, context.sizes)
    with (
        forward_settings.again(ctx.asked),
        torch.autocast(region, enabled=False) if region else contextlib.nullcontext(),
    ):
        return None, *oom_retry.run_with_typed_error(_gradients, given, context.sizes)


def _gradients(
    context: Context,
    leaves: list[Any],
    results: list[Tensor],
    wanted: tuple[bool, ...],
    cotangents: Sequence[Tensor | None],
    form: Early | None = None,
) -> list[Tensor | None]:
    """The gradients of a pass, one per leaf (None where not asked)."""
    form = None if torch.is_grad_enabled() else form  # a second derivative asks for the first as a program of leaves
    count, numbers = len(cotangents), tuple([not isinstance(v, Tensor) for v in leaves])
    key = (form, wanted, tuple([g is not None for g in cotangents]), numbers)
    made = context.gradients.get(key)
    if made is None:
        ready, frozen = _gradient_program(context.fold, *key), freezes(context.engine, context.sizes)
        made = Gradient(ready, context.fold.leaves, functools.partial(walked, context.engine), frozen)
        context.gradients[key] = made
    return made(context.sizes, leaves, [*results[:count], *cotangents, *results[count:]])


@functools.lru_cache(maxsize=4096)
def _gradient_program(
    fold: Fold, form: Early | None, wanted: tuple[bool, ...], given: tuple[bool, ...], numbers: tuple[bool, ...]
) -> GradientProgram:
    if form is None:
        return build_gradient_program(fold, wanted, given, numbers)
    saved = tuple((k, e) for k, e in gradients(form, given) if wanted[k])
    return build_gradient_program(fold, wanted, given, numbers, saved, tuple(form.names))
