"""Passes as one differentiable torch function, and programs as a walk over passes.

The backward of a pass is built symbolically (``program/gradient.py``), lowered like any program and run by this same
walk, so that first, second and third derivatives take one road, on every engine. Plain tensors go straight to the
engine; under a tracer or a transform (``torch.compile``, ``vmap``, ``jvp``, fake tensors) the same fold goes through
the registered operator (``library.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import NoGradientError
from ..program.early import Early, gradients
from ..program.expr import Expr
from ..program.gradient import gradient
from ..program.lower import Fold, lower
from ..program.reductions import KINDS
from . import asked, autocast, early, filtering, library, recover
from .evaluate import Sizes
from .registry import FOLDERS
from .script import Script, missing, script

REHEARSAL = "rehearsal"  # the engine that computes nothing (``rehearse.py``): it is watched, but not traced
PLAIN = frozenset({Tensor, torch.nn.Parameter})


@dataclass(frozen=True)
class Context:
    """What a pass needs besides its tensors; gradient programs met so far are kept with it."""

    fold: Fold
    sizes: Sizes
    engine: str
    gradients: dict[tuple, Gradient] = field(default_factory=dict, compare=False)


class Walk:
    """Runs the passes of one call: a context for each fold, made once."""

    def __init__(self, engine: str):
        self.engine = engine
        self.contexts: dict[Fold, Context] = {}

    def __call__(self, fold: Fold, leaves: list[Any], sizes: Sizes) -> Sequence[Tensor]:
        context = self.contexts.get(fold)
        if context is None:
            context = self.contexts.setdefault(fold, Context(fold, sizes, self.engine))
        return run(context, leaves)


def run(context: Context, leaves: Sequence[Any]) -> Sequence[Tensor]:
    """Fold, differentiably where a leaf asks for it."""
    if context.engine != REHEARSAL and not plain(leaves):
        return _Traced.apply(context, *leaves)
    asks = any(isinstance(v, Tensor) and v.requires_grad for v in leaves)
    if asks and torch.is_grad_enabled():
        return _Straight.apply(context, *leaves)
    return FOLDERS[context.engine](context.fold, leaves, context.sizes)


def straight() -> bool:
    """Whether nothing watches torch's calls: no compiler, no fake tensors, no transform, no forward-mode level."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def plain(values: Sequence[Any]) -> bool:
    """Whether these are tensors with numbers in them (or no tensors), and nothing watches."""
    return straight() and all(type(v) in PLAIN for v in values if isinstance(v, Tensor))


class _Straight(torch.autograd.Function):
    """One pass over the pairs by an engine; its backward is a program."""

    @staticmethod
    def forward(ctx: Any, context: Context, *leaves: Any) -> tuple[Tensor, ...]:
        form = early.form(context.fold, leaves, context.sizes, context.engine)
        if form is None:
            output = tuple(FOLDERS[context.engine](context.fold, leaves, context.sizes))
            _keep(ctx, context, leaves, output)
            return output
        found = FOLDERS[context.engine](form.fold, [leaves[k] for k in form.feeds], context.sizes)
        output = tuple(found[k] for k in form.own)
        _keep(ctx, context, leaves, output, form, tuple(found[k] for k in form.more))
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        return _backward(ctx, cotangents)


class _Traced(torch.autograd.Function):
    """The same pass through the registered operator, for whoever traces or transforms it."""

    @staticmethod
    def forward(context: Context, *leaves: Any) -> tuple[Tensor, ...]:
        return tuple(library.call(context.fold, context.engine, leaves, context.sizes))

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
        context, leaves, results = _kept(ctx)
        leaves, results = [_primal(v) for v in leaves], [_primal(r) for r in results]
        moving = [k for k, f in enumerate(_fixed(context.fold)) if not f]
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
        moved = library.in_front(context.fold, leaves, in_dims[1:], info.batch_size)
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
    ctx.asked = asked.now()
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(o for o, f in zip(output, _fixed(context.fold), strict=True) if f))
    ctx.constants = [None if isinstance(v, Tensor) else v for v in leaves]
    ctx.save_for_backward(*(v for v in leaves if isinstance(v, Tensor)), *output, *more)


def _kept(ctx: Any) -> tuple[Context, list[Any], list[Tensor]]:
    """The context, the leaves and the results; what was kept beside them for gradients comes after these."""
    saved = iter(ctx.saved_tensors)
    leaves = [c if c is not None else next(saved) for c in ctx.constants]
    return ctx.context, leaves, list(saved)


def _backward(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple:
    if any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in cotangents):
        raise NoGradientError(
            detail="batched cotangents (is_grads_batched=True, vectorize=True) come from torch's older vmap",
            fix="Use torch.func.jacrev, or torch.vmap over torch.func.vjp",
        )
    context, leaves, results = _kept(ctx)
    wanted = ctx.needs_input_grad[1:]
    if not context.sizes.rows or not context.sizes.cols:  # no pairs: nothing flows, whatever the cotangents are
        return None, *(zero(leaf) if want else None for leaf, want in zip(leaves, wanted, strict=True))
    region, given = autocast.region(results), (context, leaves, results, wanted, cotangents, ctx.form)
    if region is None and ctx.asked == asked.now():
        return None, *recover.typed(_gradients, given, context.sizes)
    with asked.again(ctx.asked), torch.autocast(region, enabled=False) if region else contextlib.nullcontext():
        return None, *recover.typed(_gradients, given, context.sizes)


@functools.lru_cache(maxsize=4096)
def _fixed(fold: Fold) -> tuple[bool, ...]:
    """Which results are constants to gradients."""
    found = []
    for r, k in fold.outputs:
        kind, _, params = r.attrs
        outputs = KINDS[kind].outputs(r.args, params)
        found.append(outputs[k][1] != "float" or not KINDS[kind].moves(k, len(outputs)))
    return tuple(found)


@dataclass(frozen=True)
class Gradient:
    """A gradient program made ready: where its inputs come from (leaves, results, cotangents, what was kept), and its
    outputs."""

    script: Script
    sources: tuple[int, ...]
    outputs: tuple[tuple[int, Expr | None], ...]  # per leaf asked for: its place and its gradient's expression
    single: bool  # whether it is one pass: its sums are gradients, and nothing is made of them
    walk: Walk


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
    count, numbers = len(cotangents), tuple(not isinstance(v, Tensor) for v in leaves)
    key = (form, wanted, tuple(g is not None for g in cotangents), numbers)
    made = context.gradients.get(key)
    if made is None:
        made = context.gradients[key] = Gradient(*_gradient_program(context.fold, *key), Walk(context.engine))
    pool = [*leaves, *results[:count], *cotangents, *results[count:]]
    given = [pool[k] for k in made.sources]
    skips = filtering.asked() is not None and made.single and not torch.is_grad_enabled() and plain(given)
    with filtering.gradient() if skips else contextlib.nullcontext():
        values = iter(made.script.run(context.sizes, made.walk, *given))
    grads: list[Tensor | None] = [None] * len(leaves)
    for place, e in made.outputs:
        leaf = leaves[place]
        grads[place] = zero(leaf) if e is None else as_gradient(next(values), e, leaf, context.fold.leaves[place])
    return grads


@functools.lru_cache(maxsize=4096)
def _gradient_program(
    fold: Fold, form: Early | None, wanted: tuple[bool, ...], given: tuple[bool, ...], numbers: tuple[bool, ...]
) -> tuple[Script, tuple[int, ...], tuple[tuple[int, Expr | None], ...], bool]:
    kept = {} if form is None else {k: e for k, e in gradients(form, given) if wanted[k]}
    rest = tuple(want and k not in kept for k, want in enumerate(wanted))
    results, cotangents, others = gradient(fold.pure, fold.leaves, rest, given)
    outputs = [kept.get(k, e) for k, e in enumerate(others)]
    program = lower(tuple(e for e in outputs if e is not None))
    names = [*(e.attrs[0] for e in (*fold.leaves, *results, *cotangents)), *(() if form is None else form.names)]
    made = script(program, frozenset(e.attrs[0] for e, n in zip(fold.leaves, numbers, strict=True) if n))
    lowered = iter(program.outputs)
    found = [(k, e if e is None else next(lowered)) for k, e in enumerate(outputs) if wanted[k]]
    return made, tuple(names.index(n) for n in made.inputs), tuple(found), len(program.passes) == 1


def zero(leaf: Tensor) -> Tensor:
    """Zeros that still depend on the leaf, so that a second derivative of them is zero and not an error."""
    if not torch.is_grad_enabled():
        return torch.zeros_like(leaf)
    return torch.where(torch.ones((), dtype=torch.bool, device=leaf.device), torch.zeros_like(leaf), leaf)


def as_gradient(value: Any, e: Expr, leaf: Tensor, expr: Expr, dtype: torch.dtype | None = None) -> Tensor:
    """A gradient in the shape and type of its leaf (or another): summed over batch dimensions that were broadcast."""
    if not isinstance(value, Tensor):
        return torch.full_like(leaf, value)
    for at in missing(e, expr):  # an axis that the gradient does not vary along has size 1
        value = value.unsqueeze(at)
    if value.shape != leaf.shape:
        value = value.expand(torch.broadcast_shapes(value.shape, leaf.shape)).sum_to_size(leaf.shape)
    dtype = dtype or leaf.dtype
    return value if value.dtype is dtype else value.to(dtype)  # even an idle .to takes a microsecond
