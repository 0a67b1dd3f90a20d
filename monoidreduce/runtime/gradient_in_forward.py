"""The gradient in the forward: sums over rows whose gradients are computed from the same pairs.

Of a sum every row's cotangent is known beforehand, so forward and gradient are one program
(``program/gradient.py``) and one loop over panels (``engines/panel``): three products where the usual path,
which recomputes the pairs, needs four. The gradients wait, unscaled, for the one number that the backward brings. They
are handed out once: a second backward, or one that is itself to be differentiated, takes the usual path.

Inside a compiled graph the same loop is one registered operator, ``torch.ops.monoidreduce.loss_and_gradient``, which
returns the sums and the gradients; multiplying these by the backward's number is the graph's own arithmetic.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..engines import panel, triton
from ..engines.common import bounded_cache, matmul, oom_retry, skip_small_tiles
from ..engines.common.bounded_cache import BoundedCache
from ..engines.common.evaluate import Form, Sizes, from_layout
from ..engines.common.gradient_program import load_values, save_values, to_gradient, zero_gradient
from ..engines.common.torch_code import script
from ..engines.panel import split_into_loops, split_softmax_means
from ..errors import NoGradientError
from ..plan import budget, panel_layout, settings
from ..program.expression import Expr, topological
from ..program.gradient import LossAndGradient, compile_loss_and_gradient
from ..program.lower import compile_program, digest_nodes, looks_up
from . import autograd, dispatch
from .bind import contiguous_strides, output_form
from .dispatch import apply_settings, are_plain, is_traced, is_transformed, names_needing_gradient
from .program_operator import own_tensors
from .torch_operator import (
    VALUES,
    FixedSizes,
    fix_lengths,
    join_values,
    register_operator,
    split_values,
    unknown_name_error,
    write_lengths,
)

_ROOMS = 64  # whose panels are remembered: without a budget it is never the same


@dataclass
class _Context:
    """What the sums need besides their tensors, and what they keep for the backward."""

    outputs: tuple[Expr, ...]
    wanted: tuple[Expr, ...]  # the inputs whose gradient is wanted
    names: tuple[str, ...]  # of the tensors, in their order
    numbers: dict[str, Any]
    sizes: Sizes
    engine: str
    step_class: panel.StepClass
    program: LossAndGradient
    waiting: dict[str, Tensor] | None = field(default=None)


def is_wide(outputs: tuple[Expr, ...], sizes: Sizes) -> bool:
    """Whether a program can have products that are wide enough to be worth keeping."""
    if looks_up(outputs):  # panels do not
        return False
    vectors = [e for e in find_inputs(outputs).values() if e.feature is not None]
    return not sizes.batch and any(
        sizes.of(str(e.feature)) > panel_layout.narrow_features(sizes.device) for e in vectors
    )


class LossRunner:
    """The sums of calls of one kind: what depends on their types and sizes alone is found out once.

    ``names``: of the inputs that it is called with; ``run_usual``: the sums without gradients."""

    def __init__(
        self,
        outputs: tuple[Expr, ...],
        names: tuple[str, ...],
        sizes: Sizes,
        engine: str,
        step_class: panel.StepClass,
        run_usual: Callable[..., Any],
    ):
        self.outputs, self.names, self.sizes, self.engine, self.step_class = outputs, names, sizes, engine, step_class
        self.run_usual = run_usual
        self.plans: dict[tuple[str, ...], _Plan | None] = {}  # by the inputs that require gradients

    def __call__(self, *given: Any) -> Any:
        traced = not are_plain(given)
        # under a mode that only watches, gradients would wait in memory until they are copied
        stepwise = traced and (is_transformed() or not is_traced())
        plan = self._find_plan(given) if torch.is_grad_enabled() and not stepwise else None
        if plan is None or not plan.pays():
            return self.run_usual(*given)
        if traced:
            return self._run_traced(given, plan)
        tensors = {n: v for n, v in zip(self.names, given, strict=True) if isinstance(v, Tensor)}
        numbers = {n: v for n, v in zip(self.names, given, strict=True) if n not in tensors}
        context = _Context(
            self.outputs, plan.wanted, tuple(tensors), numbers, self.sizes, self.engine, self.step_class, plan.program
        )
        return list(_apply_loss(context, *tensors.values()))

    def _run_traced(self, given: Sequence[Any], plan: _Plan) -> list[Tensor]:
        numbers = frozenset(n for n, v in zip(self.names, given, strict=True) if not isinstance(v, Tensor))
        wanted = tuple(str(e.attrs[0]) for e in plan.wanted)
        sums = Sums(self.outputs, self.names, numbers, wanted, self.engine, FixedSizes.of(self.sizes))
        context = _TracedContext(sums, self.sizes, self.step_class, plan)
        return list(_TracedSum.apply(context, *given))[: len(self.outputs)]

    def _find_plan(self, given: Sequence[Any]) -> _Plan | None:
        needed = [isinstance(v, Tensor) and v.requires_grad for v in given]
        wanted = tuple([n for n, need in zip(self.names, needed, strict=True) if need])
        if wanted not in self.plans:
            inputs = dict(zip(self.names, given, strict=True))
            self.plans[wanted] = _make_plan(self.outputs, inputs, fix_lengths(self.sizes), self.step_class, wanted)
        return self.plans[wanted]


@dataclass(frozen=True)
class _Plan:
    """A program of sums and gradients in one loop over panels, which ``step`` chooses; ``wanted``: whose gradients."""

    program: LossAndGradient
    wanted: tuple[Expr, ...]
    step: panel.Step
    sizes: Sizes
    known: dict[int, bool] = field(default_factory=dict, compare=False)  # by the room that there is

    @functools.cached_property
    def is_small(self) -> bool:
        """True if panels have enough rows in the least memory that is used without a budget, however little is free."""
        held = self.step.choose_layout(budget.LEAST)
        return held is not None and held.is_worthwhile(self.sizes.rows)

    def pays(self) -> bool:
        """Whether the budget holds panels of enough rows."""
        if self.is_small and settings.requested_budget() is None and settings.shrink_factor() == 1:
            return True
        room = budget.allowed_bytes(lambda: matmul.free_memory(self.sizes.device), 0, budget.PANELS)
        found = self.known.get(room)
        if found is None:
            held = self.step.choose_layout(room)
            found = held is not None and held.is_worthwhile(self.sizes.rows)
            if len(self.known) < _ROOMS:
                self.known[room] = found
        return found


def find_program(
    outputs: tuple[Expr, ...], inputs: Mapping[str, Any], sizes: Sizes, step_class: panel.StepClass
) -> LossAndGradient | None:
    """The program of sums and gradients, where there is one and it pays."""
    found = _make_plan(outputs, inputs, sizes, step_class, names_needing_gradient(inputs))
    return found.program if found is not None and found.pays() else None


def _make_plan(
    outputs: tuple[Expr, ...],
    inputs: Mapping[str, Any],
    sizes: Sizes,
    step_class: panel.StepClass,
    wanted: Collection[str],
) -> _Plan | None:
    """The plan of sums and gradients, whatever the budget; only where products are wide enough to be worth keeping.
    ``wanted``: the inputs whose gradients are."""
    exprs = find_inputs(outputs)
    tensors = {n: inputs[n] for n in exprs if isinstance(inputs[n], Tensor)}
    leaves = tuple(exprs[n] for n in tensors if n in wanted)
    if not leaves or not is_wide(outputs, sizes) or not sizes.rows or not sizes.cols:
        return None
    try:
        program = compile_loss_and_gradient(outputs, leaves)
    except NoGradientError:  # an expression that only torch can differentiate, or none: the usual path will say
        return None
    if program is None:
        return None
    kinds = {v.dtype for n, v in tensors.items() if exprs[n].cols and exprs[n].feature is not None}
    found = split_into_loops(
        split_softmax_means(program.program) if step_class.splits_softmax_means else program.program
    )
    products = [f for w in found for f in w.products]
    widest = max([0, *(sizes.of(str(f.args[0].feature)) for f in products)])
    if len(found) != 1 or widest <= panel_layout.narrow_features(sizes.device):
        return None
    try:
        return _Plan(program, leaves, step_class(found[0], sizes, kinds), sizes)
    except triton.Unsupported:
        return None


def _run_loss(context: _Context, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The sums, and by name the gradients of the loss for a cotangent of one."""
    inputs = {n: t.detach() for n, t in zip(context.names, tensors, strict=True)}
    program, count = context.program.program, len(context.outputs)
    given = (program, context.numbers | inputs, context.sizes, context.step_class)
    with skip_small_tiles.apply_to_gradient() if _may_skip_tiles(context) else contextlib.nullcontext():
        found = oom_retry.run_with_retry(panel.execute, given, context.sizes)
    values = [from_layout(v, e) for v, e in zip(found, program.outputs, strict=True)]
    grads, waiting = iter(zip(values[count:], program.outputs[count:], strict=True)), {}
    for e, present in zip(context.wanted, context.program.present, strict=True):
        leaf = inputs[str(e.attrs[0])]
        made = to_gradient(*next(grads), leaf, e, _choose_waiting_type(leaf)) if present else torch.zeros_like(leaf)
        waiting[str(e.attrs[0])] = made
    return tuple(_sum_rows(v, context.sizes) for v in values[:count]), waiting


def _choose_waiting_type(leaf: Tensor) -> torch.dtype:
    """The type in which an unscaled gradient waits: it may leave float16."""
    return torch.float32 if leaf.dtype is torch.float16 else leaf.dtype


class _LossFunction(torch.autograd.Function):
    """Forward: the sums, and the gradients of the loss for a cotangent of one."""

    @staticmethod
    def forward(ctx: Any, context: _Context, *tensors: Tensor) -> tuple[Tensor, ...]:
        sums, context.waiting = _run_loss(context, tensors)
        ctx.context, ctx.settings = context, settings.now()
        ctx.mark_non_differentiable(*(s for k, s in enumerate(sums) if k != context.program.loss))
        ctx.save_for_backward(*tensors)
        return sums

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple:
        context: _Context = ctx.context
        g = cotangents[context.program.loss]
        waiting, context.waiting = context.waiting, None
        if waiting is None or torch.is_grad_enabled():
            with apply_settings(ctx.settings):
                return None, *_differentiate_usual(context, ctx.saved_tensors, ctx.needs_input_grad[1:], g)
        found: list[Tensor | None] = []
        for name, t in zip(context.names, ctx.saved_tensors, strict=True):
            grad = waiting.get(name)
            found.append(None if grad is None else dispatch.scale_(grad, g).to(t.dtype))
        return None, *found


# ``apply`` without its look at transforms, for what is known to have none
_apply_loss: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _LossFunction).apply


def _may_skip_tiles(context: _Context) -> bool:
    """Whether tiles may be left out: asked for, and the sums are made of numbers, so that vectors are gradients."""
    if skip_small_tiles.requested() is None:
        return False
    return not any(e.op == "result" and e.feature is not None for e in topological(context.outputs))


def _sum_rows(value: Any, sizes: Sizes) -> Tensor:
    value = value if isinstance(value, Tensor) else torch.full((), value, device=sizes.device)
    return value.expand(sizes.rows).sum()


def _differentiate_usual(context: _Context, tensors: tuple, needs: tuple, g: Tensor) -> list[Tensor | None]:
    """The gradients by the usual path: differentiable, and as often as one likes."""
    graph = torch.is_grad_enabled()
    with torch.enable_grad():
        given = [t.detach().requires_grad_(n) if not graph else t for t, n in zip(tensors, needs, strict=True)]
        inputs = context.numbers | dict(zip(context.names, given, strict=True))
        usual = compile_program((context.outputs[context.program.loss],))
        usual = dispatch.mark_exact_folds(usual, names_needing_gradient(inputs), context.sizes)
        made = script(usual, frozenset(context.numbers), False, dispatch.row_dot)
        (rows,) = made.run(context.sizes, autograd.StepRunner(context.engine), *(inputs[n] for n in made.inputs))
        wanted = [t for t, need in zip(given, needs, strict=True) if need]
        grads = iter(
            torch.autograd.grad(_sum_rows(rows, context.sizes), wanted, g, create_graph=graph, allow_unused=True)
        )
    found = [next(grads) if need else None for need in needs]
    return [zero_gradient(t) if n and f is None else f for t, n, f in zip(given, needs, found, strict=True)]


@functools.lru_cache(maxsize=1024)
def find_inputs(outputs: tuple[Expr, ...]) -> Mapping[str, Expr]:
    """The inputs that a program reads, by name."""
    return {str(e.attrs[0]): e for e in topological(outputs) if e.op == "input"}


# Inside a compiled graph


@dataclass(frozen=True)
class Sums:
    """Sums over rows, as the operator knows them; ``wanted``: the inputs whose gradients it returns."""

    outputs: tuple[Expr, ...]
    names: tuple[str, ...]  # of the inputs
    numbers: frozenset[str]  # those of them that are Python numbers
    wanted: tuple[str, ...]
    engine: str
    frame: FixedSizes

    def join_values(self, tensors: Sequence[Any], numbers: Sequence[Any] | None) -> list[Any]:
        """The inputs in their order."""
        return join_values(tensors, numbers, [k for k, n in enumerate(self.names) if n in self.numbers])


class _TracedContext(NamedTuple):
    sums: Sums
    sizes: Sizes
    step_class: panel.StepClass
    plan: _Plan


_lock = threading.Lock()
_SUMS: dict[str, Sums] = {}  # kept: a compiled graph may hold the name for as long as the process lives
_PLANS: BoundedCache[tuple, tuple[Sizes, panel.StepClass, _Plan | None, list]] = BoundedCache(1024)


@functools.lru_cache(maxsize=1024)
def _name(sums: Sums) -> str:
    others = (*sums.names, "numbers", *sorted(sums.numbers), "wanted", *sums.wanted, sums.engine, str(sums.frame))
    found = digest_nodes((sums.outputs,), *others)
    with _lock:
        _SUMS[found] = sums
    return found


def _find_sums(name: str) -> Sums:
    if name not in _SUMS:
        raise unknown_name_error("sum", "with gradients")
    return _SUMS[name]


def _list_forms(sums: Sums, values: Sequence[Any], sizes: Sizes) -> list[tuple[Form, tuple[int, ...]]]:
    """Shape, type and strides of all that the operator returns."""
    found: list[tuple[Form, tuple[int, ...]]] = []
    for e in sums.outputs:
        found.append((output_form(e, sizes, None, total=True), ()))
    inputs = dict(zip(sums.names, values, strict=True))
    for leaf in [inputs[n] for n in sums.wanted]:
        found.append(((tuple(leaf.shape), _choose_waiting_type(leaf)), contiguous_strides(leaf.shape)))
    return found


def _run(name: str, tensors: list[Tensor], numbers: list | None, lengths: list[int]) -> list[Tensor]:
    sums, device = _find_sums(name), tensors[0].device
    values, engine = sums.join_values(tensors, numbers), sums.engine
    inputs = dict(zip(sums.names, values, strict=True))
    key = (name, *triton.describe_leaves(values), *lengths, device)
    known = _PLANS.find(key)
    if known is None:
        sizes, step_class = sums.frame.read_lengths(lengths, device), dispatch.choose_step_class(engine, device)
        plan = _make_plan(sums.outputs, inputs, sizes, step_class, sums.wanted)
        known = _PLANS.keep(key, (sizes, step_class, plan, _list_forms(sums, values, sizes)))
    sizes, step_class, plan, forms = known
    given = {n: v for n, v in inputs.items() if n not in sums.numbers}
    others = {n: v for n, v in inputs.items() if n in sums.numbers}
    with torch.no_grad(), bounded_cache.allocate_in_own_thread():
        if plan is None or not plan.pays():  # memory has become scarce, or lengths are others than those traced
            found = _run_stepwise(sums, given, others, sizes, engine)
        else:
            context = _Context(sums.outputs, plan.wanted, tuple(given), others, sizes, engine, step_class, plan.program)
            totals, waiting = oom_retry.run_with_typed_error(_run_loss, (context, tuple(given.values())), sizes)
            found = [*totals, *(waiting[n] for n in sums.wanted)]
        return own_tensors(found, forms, tensors, sizes.device)


def _run_stepwise(
    sums: Sums, tensors: dict[str, Tensor], numbers: dict[str, Any], sizes: Sizes, engine: str
) -> list[Tensor | None]:
    """The same, forward and backward one after the other."""
    with torch.enable_grad():
        given = {n: t.detach().requires_grad_(n in sums.wanted) for n, t in tensors.items()}
        inputs = numbers | given
        usual = dispatch.mark_exact_folds(compile_program(sums.outputs), frozenset(sums.wanted), sizes)
        made = script(usual, frozenset(numbers), False, dispatch.row_dot)
        rows = made.run(sizes, autograd.StepRunner(engine), *(inputs[n] for n in made.inputs))
        totals = [_sum_rows(v, sizes) for v in rows]
        wanted = [given[n] for n in sums.wanted]
        roots = [t for t in totals if t.requires_grad]
        grads = torch.autograd.grad(roots, wanted, allow_unused=True)
    found = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, grads, strict=True)]
    return [*(t.detach() for t in totals), *found]


def _make_fake(name: str, tensors: list[Tensor], numbers: list | None, lengths: list[int]) -> list[Tensor]:
    sums = _find_sums(name)
    sizes = sums.frame.read_lengths(lengths, tensors[0].device)
    forms = _list_forms(sums, sums.join_values(tensors, numbers), sizes)
    return [torch.empty_strided(shape, strides, dtype=dtype, device=sizes.device) for (shape, dtype), strides in forms]


register_operator(f"loss_and_gradient(str sums, {VALUES}) -> Tensor[]", _run, _make_fake)


class _TracedSum(torch.autograd.Function):
    """The sums by their operator; the backward scales the gradients that it returned."""

    @staticmethod
    def forward(context: _TracedContext, *values: Any) -> tuple[Tensor, ...]:
        tensors, numbers, _ = split_values(values)
        lengths = write_lengths(context.sizes)
        return tuple(torch.ops.monoidreduce.loss_and_gradient(_name(context.sums), tensors, numbers, lengths))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        context, *values = inputs
        ctx.context, ctx.settings = context, settings.now()
        ctx.mark_non_differentiable(*(t for k, t in enumerate(output) if k != context.plan.program.loss))
        ctx.set_materialize_grads(False)
        save_values(ctx, values, *output[len(context.sums.outputs) :])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        context, needs = ctx.context, ctx.needs_input_grad[1:]
        values, saved, _ = load_values(ctx)
        sums, plan, g = context.sums, context.plan, cotangents[context.plan.program.loss]
        if g is None:
            return None, *(None for _ in values)
        if torch.is_grad_enabled():
            pairs = zip(sums.names, values, strict=True)
            numbers = {n: v for n, v in pairs if n in sums.numbers}
            tensors = tuple(v for v in values if isinstance(v, Tensor))
            names = tuple(n for n in sums.names if n not in sums.numbers)
            sizes, step_class, program = context.sizes, context.step_class, plan.program
            call = _Context(sums.outputs, plan.wanted, names, numbers, sizes, sums.engine, step_class, program)
            needs = tuple(need for n, need in zip(sums.names, needs, strict=True) if n not in sums.numbers)
            with apply_settings(ctx.settings):
                found = iter(_differentiate_usual(call, tensors, needs, g))
            return None, *(None if n in sums.numbers else next(found) for n in sums.names)
        waiting = dict(zip(sums.wanted, saved, strict=True))
        pairs = zip(sums.names, values, strict=True)
        return None, *(_scale(waiting[n], g, v.dtype) if n in waiting else None for n, v in pairs)


def _scale(waiting: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """A waiting gradient times a number, in the number's precision; a compiler makes one kernel of it."""
    return (waiting.to(g.dtype) * g).to(dtype)
