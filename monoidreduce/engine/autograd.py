"""Passes as one differentiable torch function, and programs as a walk over passes.

The backward of a pass is built symbolically (``program/gradient.py``), lowered like any program and run by this same
walk, so that first, second and third derivatives take one road, on every engine. Plain tensors go straight to the
engine; under a tracer or a transform (``torch.compile``, ``vmap``, ``jvp``, fake tensors) the same fold goes through
the registered operator (``library.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import NoGradientError
from ..program.expr import Expr
from ..program.gradient import gradient
from ..program.lower import Fold, Lowered, lower
from ..program.reductions import KINDS
from . import asked, autocast, library, recover, sides, triton
from .evaluate import Sizes
from .frozen import Pass, freezes
from .registry import FOLDERS
from .script import inputs, missing, script
from .sides import Side

REHEARSAL = "rehearsal"  # the engine that computes nothing (``rehearse.py``): it is watched, but not traced
PLAIN = frozenset({Tensor, torch.nn.Parameter})
_KINDS = 64  # of inputs whose frozen passes a gradient program keeps


@dataclass(frozen=True)
class Context:
    """What a pass needs besides its tensors; gradient programs met so far are kept with it."""

    fold: Fold
    sizes: Sizes
    engine: str
    frozen: Pass | None = field(default=None, compare=False)  # where leaves are plain tensors of one kind
    fixed: tuple[int, ...] = ()  # of the frozen pass's results, those that are constants to gradients
    gradients: dict[tuple, Gradient] = field(default_factory=dict, compare=False)


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
        if context.frozen is None:
            found = run(context, leaves)
            return [found[k] for k in shown]
        if torch.is_grad_enabled() and asks(leaves):
            return _frozen(context, *leaves)
        return recover.twice(context.frozen, (leaves,), sizes, fold)[0]

    def _context(self, fold: Fold, sizes: Sizes, shown: tuple[int, ...]) -> Context:
        frozen = Pass(fold, sizes, self.engine, shown) if self.alike else None
        fixed = tuple(at for at, k in enumerate(shown) if _fixed(fold)[k])
        return self.contexts.setdefault(id(fold), Context(fold, sizes, self.engine, frozen, fixed))

    def side(self, side: Side, leaves: list[Any], sizes: Sizes) -> Sequence[Tensor]:
        """The arithmetic of one side, where all calls are alike; differentiable where a leaf asks for it."""
        arithmetic = self.sides.get(id(side))
        if arithmetic is None:
            arithmetic = self.sides.setdefault(id(side), Arithmetic(side, leaves, sizes, self.engine))
        if torch.is_grad_enabled() and asks(leaves):
            return _sided(arithmetic, *leaves)
        return arithmetic.run(leaves)


def run(context: Context, leaves: Sequence[Any]) -> Sequence[Tensor]:
    """Fold, differentiably where a leaf asks for it."""
    if context.engine != REHEARSAL and not plain(leaves):
        return _Traced.apply(context, *leaves)
    if torch.is_grad_enabled() and asks(leaves):
        return _Straight.apply(context, *leaves)
    return FOLDERS[context.engine](context.fold, leaves, context.sizes)


def asks(values: Sequence[Any]) -> bool:
    """Whether any of these asks for a gradient."""
    for v in values:
        if isinstance(v, Tensor) and v.requires_grad:
            return True
    return False


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
        output = tuple(FOLDERS[context.engine](context.fold, leaves, context.sizes))
        _keep(ctx, context, leaves, output)
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        return _backward(ctx, cotangents)


class _Frozen(torch.autograd.Function):
    """The same pass, frozen: only what is asked for is a result; what else a backward needs is kept as it is.

    A backward that is itself to be differentiated folds once more, for results that are."""

    @staticmethod
    def forward(ctx: Any, context: Context, *leaves: Any) -> tuple[Tensor, ...]:
        given = (context.frozen, (leaves,), context.sizes, context.fold)
        shown, rest = recover.twice(*given)
        ctx.context, ctx.asked = context, asked.now()
        ctx.set_materialize_grads(False)
        if context.fixed:
            ctx.mark_non_differentiable(*[shown[k] for k in context.fixed])
        ctx.constants = [None if isinstance(v, Tensor) else v for v in leaves]
        ctx.save_for_backward(*[v for v in leaves if isinstance(v, Tensor)], *shown, *rest)
        return tuple(shown)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        context, leaves, results = _kept(ctx)
        given: list[Tensor | None] = [None] * len(context.fold.outputs)
        for k, g in zip(context.frozen.shown, cotangents, strict=True):
            given[k] = g
        if torch.is_grad_enabled():
            with asked.again(ctx.asked):
                results = list(run(context, leaves))
        else:
            count = len(context.frozen.shown)
            results = context.frozen.whole(results[:count], results[count:])
        return _pulled(ctx, leaves, results, given)


# ``apply`` without its look at transforms, for what is known to have none
_frozen: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Frozen).apply


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


def _keep(ctx: Any, context: Context, leaves: Sequence[Any], output: tuple[Tensor, ...]) -> None:
    ctx.context = context
    ctx.asked = asked.now()
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(o for o, f in zip(output, _fixed(context.fold), strict=True) if f))
    ctx.constants = [None if isinstance(v, Tensor) else v for v in leaves]
    ctx.save_for_backward(*(v for v in leaves if isinstance(v, Tensor)), *output)


def _kept(ctx: Any) -> tuple[Context, list[Any], list[Tensor]]:
    saved = iter(ctx.saved_tensors)
    leaves = [c if c is not None else next(saved) for c in ctx.constants]
    return ctx.context, leaves, list(saved)


def _backward(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple:
    _, leaves, results = _kept(ctx)
    return _pulled(ctx, leaves, results, cotangents)


def _pulled(ctx: Any, leaves: list[Any], results: list[Tensor], cotangents: Sequence[Tensor | None]) -> tuple:
    """The gradients of a pass, as it was asked for."""
    if any([g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in cotangents]):
        raise NoGradientError(
            detail="batched cotangents (is_grads_batched=True, vectorize=True) come from torch's older vmap",
            fix="Use torch.func.jacrev, or torch.vmap over torch.func.vjp",
        )
    context, wanted = ctx.context, ctx.needs_input_grad[1:]
    if not context.sizes.rows or not context.sizes.cols:  # no pairs: nothing flows, whatever the cotangents are
        return None, *(zero(leaf) if want else None for leaf, want in zip(leaves, wanted, strict=True))
    region, given = autocast.region(results), (context, leaves, results, wanted, cotangents)
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
    """A gradient program made ready: where its inputs come from (leaves, results, cotangents), and its outputs."""

    program: Lowered
    numbers: frozenset[str]  # the inputs that are Python numbers
    sources: tuple[int, ...]
    outputs: tuple[tuple[int, Expr | None], ...]  # per leaf asked for: its place and its gradient's expression
    engine: str
    freezes: bool
    walks: dict[tuple, Callable[..., list[Any]]] = field(default_factory=dict, compare=False)  # by the inputs' kind

    def run(self, sizes: Sizes, pool: Sequence[Any]) -> Iterator[Any]:
        """The gradients that are not zero. Frozen where nothing watches, and nothing is to be differentiated again."""
        values = [pool[k] for k in self.sources]
        alike = self.freezes and not torch.is_grad_enabled() and plain(values)
        kind = triton.kind(values) if alike else ()
        walk = self.walks.get(kind) or self._walk(kind)
        return iter(walk(sizes, *values))

    def _walk(self, kind: tuple) -> Callable[..., list[Any]]:
        if kind and len(self.walks) >= _KINDS:
            return self.walks.get(()) or self._walk(())
        return self.walks.setdefault(kind, walked(self.program, self.numbers, Walk(self.engine, bool(kind))))


def walked(program: Lowered, numbers: frozenset[str], walk: Walk) -> Callable[..., list[Any]]:
    """A program as a function of its sizes and inputs, its passes run by a walk."""
    run = script(program, numbers, walk.alike).run
    return lambda sizes, *values: run(sizes, walk, *values)


def _gradients(
    context: Context,
    leaves: list[Any],
    results: list[Tensor],
    wanted: tuple[bool, ...],
    cotangents: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """The gradients of a pass, one per leaf (None where not asked)."""
    numbers = tuple([not isinstance(v, Tensor) for v in leaves])
    key = (wanted, tuple([g is not None for g in cotangents]), numbers)
    made = context.gradients.get(key)
    if made is None:
        frozen = freezes(context.engine, context.sizes)
        made = context.gradients[key] = Gradient(*_gradient_program(context.fold, *key), context.engine, frozen)
    values = made.run(context.sizes, [*leaves, *results, *cotangents])
    grads: list[Tensor | None] = [None] * len(leaves)
    for place, e in made.outputs:
        leaf = leaves[place]
        grads[place] = zero(leaf) if e is None else as_gradient(next(values), e, leaf, context.fold.leaves[place])
    return grads


@functools.lru_cache(maxsize=4096)
def _gradient_program(
    fold: Fold, wanted: tuple[bool, ...], given: tuple[bool, ...], numbers: tuple[bool, ...]
) -> tuple[Lowered, frozenset[str], tuple[int, ...], tuple[tuple[int, Expr | None], ...]]:
    results, cotangents, outputs = gradient(fold.pure, fold.leaves, wanted, given)
    return _made_ready(fold.leaves, (*results, *cotangents), outputs, wanted, numbers)


def _made_ready(
    leaves: Sequence[Expr], others: Sequence[Expr], outputs: Sequence[Expr | None], wanted: tuple, numbers: tuple
) -> tuple[Lowered, frozenset[str], tuple[int, ...], tuple[tuple[int, Expr | None], ...]]:
    program = lower(tuple(e for e in outputs if e is not None))
    names = {e.attrs[0]: k for k, e in enumerate((*leaves, *others))}
    lowered = iter(program.outputs)
    found = [(k, e if e is None else next(lowered)) for k, e in enumerate(outputs) if wanted[k]]
    plain_numbers = frozenset(e.attrs[0] for e, n in zip(leaves, numbers, strict=True) if n)
    return program, plain_numbers, tuple(names[n] for n in inputs(program)), tuple(found)


class Arithmetic:
    """A side on leaves of one kind: by its kernel, or by torch where it has none."""

    def __init__(self, side: Side, leaves: Sequence[Any], sizes: Sizes, engine: str):
        self.side, self.sizes, self.engine = side, sizes, engine
        self.numbers = tuple(not isinstance(v, Tensor) for v in leaves)
        self.fixed = tuple(k for k, e in enumerate(side.outputs) if e.dtype != "float")
        self.gradients: dict[tuple, Gradient] = {}
        self.run = triton.side(side, leaves, sizes) or self._by_torch()

    def _by_torch(self) -> Callable[[Sequence[Any]], list[Tensor]]:
        program = Lowered((), self.side.outputs)
        names = {e.attrs[0]: k for k, e in enumerate(self.side.leaves)}
        made = script(program, frozenset(n for n, k in names.items() if self.numbers[k]))
        return lambda leaves: made.run(self.sizes, None, *(leaves[names[n]] for n in made.inputs))

    def pulled(self, leaves: list[Any], wanted: tuple[bool, ...], cotangents: Sequence[Tensor | None]) -> Iterator[Any]:
        """The gradient of each leaf (None where not asked)."""
        key = (wanted, tuple([g is not None for g in cotangents]))
        made = self.gradients.get(key)
        if made is None:
            given, outputs = sides.gradient(self.side, *key)
            ready = _made_ready(self.side.leaves, given, outputs, wanted, self.numbers)
            made = self.gradients[key] = Gradient(*ready, self.engine, freezes(self.engine, self.sizes))
        values = made.run(self.sizes, [*leaves, *cotangents])
        places = dict(made.outputs)
        for k, (leaf, expr) in enumerate(zip(leaves, self.side.leaves, strict=True)):
            e = places.get(k)
            if e is None:
                yield zero(leaf) if k in places else None
                continue
            value = next(values)
            if not expr.rows and not expr.cols:
                value = value.sum(-1 if e.feature is None else -2)
            yield as_gradient(value, e, leaf, expr)


class _Sided(torch.autograd.Function):
    """The arithmetic of one side; its backward is arithmetic of the same side."""

    @staticmethod
    def forward(ctx: Any, arithmetic: Arithmetic, *leaves: Any) -> tuple[Tensor, ...]:
        output = tuple(arithmetic.run(leaves))
        ctx.arithmetic = arithmetic
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(output[k] for k in arithmetic.fixed))
        ctx.constants = [None if isinstance(v, Tensor) else v for v in leaves]
        ctx.save_for_backward(*(v for v in leaves if isinstance(v, Tensor)))
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        saved = iter(ctx.saved_tensors)
        leaves = [c if c is not None else next(saved) for c in ctx.constants]
        return None, *ctx.arithmetic.pulled(leaves, ctx.needs_input_grad[1:], cotangents)


_sided: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Sided).apply


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
