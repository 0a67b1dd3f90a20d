"""A program of one pass as two registered torch operators: its forward, and its gradients.

``torch.ops.monoidreduce.program`` runs what an uncompiled call runs, the same executables with the same recorded
launches, and returns the outputs as users hold them; behind these, if a gradient is wanted, the pass's other results.
``program_gradient`` takes the inputs, the pass's results and the cotangents; its gradients have the inputs' types.
Neither has a gradient of its own (:class:`TracedProgram` puts them under one), state, or outputs that alias anything.

A program travels as its name, a digest of its text, as folds do (``torch_operator.py``). Shapes, types and strides that
the operators' fake forms promise are those of ``bind.py``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..engines import triton
from ..engines.common import bounded_cache, oom_retry, skip_small_tiles
from ..engines.common.bounded_cache import BoundedCache
from ..engines.common.evaluate import Form, Sizes
from ..engines.common.gradient_program import load_values, save_values, zero_gradient
from ..engines.common.torch_code import inputs
from ..errors import NoGradientError
from ..plan import settings
from ..program.expression import Expr, topological
from ..program.gradient import differentiate_program, list_pass_results
from ..program.lower import Lowered, digest_program
from . import dispatch
from .autograd import GradientRunner, ReplayedProgram, Runner, make_runner
from .bind import contiguous_strides, gradient_strides, output_form, output_strides
from .dispatch import apply_settings, can_record, include_16_bits, need_gradient
from .replay import ProgramSteps, make_steps
from .torch_operator import (
    VALUES,
    FixedSizes,
    fix_lengths,
    join_values,
    list_narrow_result_forms,
    register_operator,
    split_values,
    unknown_name_error,
    write_lengths,
)

_FORWARD = f"program(str call, {VALUES}) -> Tensor[]"
_BACKWARD = f"program_gradient(str call, {VALUES}, Tensor[] results, Tensor[] cotangents) -> Tensor[]"
_MOST = 1024  # kinds of calls of all programs
_lock = threading.Lock()
_CALLS: dict[str, Call] = {}  # kept: a compiled graph may hold the name for as long as the process lives
_KNOWN: dict[str, Call] = {}  # any call of a program, by what is left of the name without the flags


@dataclass(frozen=True)
class Program:
    """A lowered program of one pass; ``numbers``: the inputs that are Python numbers; ``out``: the users' type."""

    lowered: Lowered
    numbers: frozenset[str]
    out: torch.dtype | None

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of its inputs in their order."""
        return inputs(self.lowered)

    @functools.cached_property
    def number_places(self) -> tuple[int, ...]:
        """Which of its inputs are Python numbers."""
        return tuple(k for k, n in enumerate(self.inputs) if n in self.numbers)

    @functools.cached_property
    def results(self) -> tuple[Expr, ...]:
        """The pass's results as the program's own nodes."""
        return tuple(list_pass_results(self.lowered.passes[0]))

    @functools.cached_property
    def kept(self) -> tuple[int, ...]:
        """Which of the pass's results are no outputs."""
        return tuple(k for k, e in enumerate(self.results) if e not in self.lowered.outputs)

    @functools.cached_property
    def keeping(self) -> Lowered:
        """The same program with all of the pass's results among its outputs."""
        (one,) = self.lowered.passes
        users = tuple(nodes or (e,) for nodes, e in zip(one.results, self.results, strict=True))
        more = tuple(self.results[k] for k in self.kept)
        return Lowered((replace(one, results=users),), (*self.lowered.outputs, *more))

    def join_results(self, found: Sequence[Tensor]) -> list[Tensor]:
        """The pass's results in order, of all that the forward operator returned."""
        places = {e: k for k, e in enumerate(self.keeping.outputs)}
        return [found[places[e]] for e in self.results]

    def forms(self, keep: bool, values: Sequence[Any], sizes: Sizes) -> list[tuple[Form, tuple[int, ...]]]:
        """Shape, type and strides of all that the forward operator returns."""
        named, found = dict(zip(self.inputs, values, strict=True)), []
        for k, e in enumerate(self.lowered.outputs):
            shape, dtype = output_form(e, sizes, self.out)
            found.append(((shape, dtype), output_strides(self.lowered, k, shape, named)))
        if keep:
            fold = self.lowered.passes[0].fold
            like = [_make_vector(self.out) if e.feature is not None else 0 for e in fold.leaves]
            made = list_narrow_result_forms(fold, like, sizes)
            found += [(made[k], contiguous_strides(made[k][0])) for k in self.kept]
        return found


@functools.cache
def _make_vector(dtype: torch.dtype | None) -> Tensor:
    return torch.empty(0, dtype=dtype, device="cpu")


@dataclass(frozen=True)
class Call:
    """All that is fixed of calls of an operator, and that its name stands for: few arguments take the dispatcher little
    time.

    ``keep``: the forward returns all of its pass's results; ``needs`` and ``given``: of a backward, the inputs whose
    gradients are asked for and the outputs that have a cotangent."""

    program: Program
    engine: str
    frame: FixedSizes
    keep: bool = False
    needs: tuple[bool, ...] = ()
    given: tuple[bool, ...] = ()

    @functools.cached_property
    def steps(self) -> ProgramSteps:
        return make_steps(self.engine, self.program.lowered, self.program.numbers)

    def join_values(self, tensors: Sequence[Any], numbers: Sequence[Any] | None) -> list[Any]:
        """The program's inputs in their order."""
        return join_values(tensors, numbers, self.program.number_places) if numbers else list(tensors)


@functools.lru_cache(maxsize=4096)
def name(call: Call) -> str:
    """The name of a call: a digest of its program's text, and what else it holds."""
    program = call.program
    parts = [digest_program(program.lowered), ".".join(sorted(program.numbers)), program.out, call.engine, call.frame]
    flags = ["".join("01"[one] for one in part) for part in ((call.keep,), call.needs, call.given)]
    which = " ".join(map(str, parts))
    found = "|".join([which, *flags])
    with _lock:
        _CALLS[found] = call
        _KNOWN.setdefault(which, call)
    return found


def _find_call(name: str) -> Call:
    """The call of this name; a backward is known where its forward is."""
    found = _CALLS.get(name)
    if found is not None:
        return found
    which, *flags = name.split("|")
    if which not in _KNOWN:
        raise unknown_name_error("program")
    (keep,), needs, given = (tuple(one == "1" for one in part) for part in flags)
    return _CALLS.setdefault(name, replace(_KNOWN[which], keep=keep, needs=needs, given=given))


# Calls of the operators


def run_forward(program: Program, engine: str, keep: bool, values: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """The outputs, and where ``keep`` the pass's other results, by the operator."""
    call = Call(program, engine, FixedSizes.of(sizes), keep)
    return torch.ops.monoidreduce.program(name(call), *split_values(values)[:2], write_lengths(sizes))


def run_gradient(
    program: Program,
    engine: str,
    needs: Sequence[bool],
    values: Sequence[Any],
    results: Sequence[Tensor],
    cotangents: Sequence[Tensor | None],
    sizes: Sizes,
) -> list[Tensor | None]:
    """A gradient for each input that ``needs`` one, by the operator; ``cotangents``: one for each output, or None."""
    given = tuple(g is not None for g in cotangents)
    call = Call(program, engine, FixedSizes.of(sizes), needs=tuple(needs), given=given)
    there = [g for g in cotangents if g is not None]
    found = iter(
        torch.ops.monoidreduce.program_gradient(
            name(call), *split_values(values)[:2], write_lengths(sizes), list(results), there
        )
    )
    return [next(found) if need else None for need in needs]


# What they do

_forwards: BoundedCache[tuple, tuple[Sizes, Runner, list]] = BoundedCache(_MOST)
# recorded launches, by the settings and numbers too; with the engine's cache that they are from, and their inputs
_replays: BoundedCache[tuple, tuple[Any, Sequence[int], Callable[..., tuple] | None]] = BoundedCache(_MOST)
_backwards: BoundedCache[tuple, tuple[Sizes, GradientRunner, list]] = BoundedCache(_MOST)


def _forward(name: str, tensors: list[Tensor], numbers: list | None, lengths: list[int]) -> list[Tensor]:
    call = _find_call(name)
    values = call.join_values(tensors, numbers)
    key = (name, *triton.describe_leaves(values), *lengths, tensors[0].device)
    asked = (dispatch.launch_key(), *map(repr, numbers or ()), *key)
    found = _replay(asked, values)
    if found is not None:
        return found
    known = _forwards.find(key)
    if known is None:
        made, sizes = call.program, call.frame.read_lengths(lengths, tensors[0].device)
        lowered = made.keeping if call.keep else made.lowered
        run = make_runner(call.engine, lowered, made.numbers, can_record(call.engine, sizes))
        known = _forwards.keep(key, (sizes, run, made.forms(call.keep, values, sizes)))
    sizes, run, forms = known
    with torch.no_grad(), bounded_cache.allocate_in_own_thread():
        made = oom_retry.run_with_typed_error(run, (sizes, *values), sizes)
        owned = own_tensors(made, forms, tensors, sizes.device)
        recorded = run.replays.find(sizes, values) if isinstance(run, ReplayedProgram) else None
        launches = None if recorded is None else recorded.launches.run
        _keep_replay(asked, owned, made, launches, range(len(values)))
        return owned


def _replay(asked: tuple, values: Sequence[Any]) -> list[Tensor] | None:
    """What the launches that were recorded for a call like this return; None where there are none, or memory runs out.

    ``asked``: all that they depend on, numbers by their text, which tells 0.0 from -0.0."""
    store, sources, launches = _replays.find(asked, (None, (), None))
    if launches is None or store is not triton.prepared_folds():
        return None
    try:
        with bounded_cache.allocate_in_own_thread():
            return list(launches(*[values[k] for k in sources])[0])
    except Exception as error:
        oom_retry.find_reason(error)
    return None


def _keep_replay(
    asked: tuple,
    owned: Sequence[Tensor],
    found: Sequence[Any],
    launches: Callable[..., tuple] | None,
    sources: Sequence[int],
) -> None:
    """Keep recorded launches whose results an operator may return as they are: each is memory of its own, in the form
    that was promised."""
    if asked[0] is None or launches is None or len(owned) != len(found):
        return
    if all(a is b for a, b in zip(owned, found, strict=True)):
        _replays.keep(asked, (triton.prepared_folds(), tuple(sources), launches))


def _make_fake_forward(name: str, tensors: list[Tensor], numbers: list | None, lengths: list[int]) -> list[Tensor]:
    call = _find_call(name)
    sizes = call.frame.read_lengths(lengths, tensors[0].device)
    forms = call.program.forms(call.keep, call.join_values(tensors, numbers), sizes)
    return [torch.empty_strided(shape, strides, dtype=dtype, device=sizes.device) for (shape, dtype), strides in forms]


def _backward(
    name: str,
    tensors: list[Tensor],
    numbers: list | None,
    lengths: list[int],
    results: list[Tensor],
    cotangents: list[Tensor],
) -> list[Tensor]:
    call, there = _find_call(name), iter(cotangents)
    values = call.join_values(tensors, numbers)
    key = (name, *triton.describe_leaves(values), *lengths, tensors[0].device)
    pool = [*values, *results, *(next(there) if one else None for one in call.given)]
    launch = dispatch.launch_key() if skip_small_tiles.requested() is None else None
    asked = (launch, *map(repr, numbers or ()), *key, *triton.describe_leaves(pool[len(values) :]))
    found = _replay(asked, pool)
    if found is not None:
        return found
    known = _backwards.find(key)
    if known is None:
        sizes = call.frame.read_lengths(lengths, tensors[0].device)
        gradients = call.steps.gradient(call.needs, call.given, len(call.program.results), include_16_bits(values))
        runner = GradientRunner(gradients, call.engine, can_record(call.engine, sizes))
        leaves = [v for v, need in zip(values, call.needs, strict=True) if need]
        forms: list = [((v.shape, v.dtype), gradient_strides(v)) for v in leaves]
        known = _backwards.keep(key, (sizes, runner, forms))
    sizes, runner, forms = known
    with torch.no_grad(), bounded_cache.allocate_in_own_thread():
        made = oom_retry.run_with_typed_error(runner, (sizes, values, pool[len(values) :]), sizes)
        grads = [g for g in made if g is not None]
        owned = own_tensors(grads, forms, [*tensors, *results, *cotangents], sizes.device)
        _keep_replay(asked, owned, grads, runner.find_launches(sizes, pool), runner.made.sources)
        return owned


def _make_fake_backward(name: str, tensors: list[Tensor], numbers: list | None, *rest: Any) -> list[Tensor]:
    call = _find_call(name)
    leaves = [v for v, need in zip(call.join_values(tensors, numbers), call.needs, strict=True) if need]
    return [v.new_empty_strided(v.shape, gradient_strides(v)) for v in leaves]


def own_tensors(
    found: Sequence[Any], forms: Sequence[tuple[Form, tuple[int, ...]]], given: Sequence[Tensor], device: torch.device
) -> list[Tensor]:
    """Results in the forms that were promised, none of them the memory of another or of what the operator was given."""
    seen = {t.untyped_storage()._cdata for t in given}
    owned: list[Tensor] = []
    for value, ((shape, dtype), strides) in zip(found, forms, strict=True):
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=dtype, device=device)
        place = value.untyped_storage()._cdata
        fits = value.shape == shape and value.dtype is dtype and _has_strides(value, strides)
        if not fits or place in seen:
            new = torch.empty_strided(shape, strides, dtype=dtype, device=device)
            owned.append(new.copy_(value))
        else:
            seen.add(place)
            owned.append(value.detach() if value._base is not None else value)
    return owned


def _has_strides(t: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether a tensor has these strides, along the axes where they say anything."""
    found = t.stride()
    return found == strides or all(
        length == 1 or one == other for length, one, other in zip(t.shape, found, strides, strict=True)
    )


register_operator(_FORWARD, _forward, _make_fake_forward)
register_operator(_BACKWARD, _backward, _make_fake_backward)


# Programs that something traces: by which operators they enter its graph.
#
# A compiler (or a tracer, a dispatch mode, fake tensors) sees a program of one pass as one operator and its backward as
# another (``program_operator.py``), wherever kernels run its folds: inside a graph the same kernels run with the same
# memory as outside. All others are traced step by step, a registered operator for each pass (``autograd.py``): where
# torch's transforms are active (``vmap``, ``jvp``, ``torch.func.grad``), where there are several passes, and where a
# forward keeps gradients of its rows.


class TracedProgram:
    """A program on inputs of which nothing is known but their sizes: by its operators where something traces it, else
    ``run_stepwise``."""

    def __init__(
        self, steps: ProgramSteps, sizes: Sizes, out: torch.dtype | None, run_stepwise: Callable[..., list[Any]]
    ):
        self.steps, self.sizes, self.run_stepwise = steps, sizes, run_stepwise
        self.program = Program(steps.program, steps.numbers, out)

    def __call__(self, *values: Any) -> list[Any]:
        if dispatch.are_plain(values) or dispatch.is_transformed() or not self._has_operators(values):
            return self.run_stepwise(*values)
        if torch.is_grad_enabled() and need_gradient(values):
            return list(_TracedFunction.apply(self, *values))[: len(self.steps.program.outputs)]
        return run_forward(self.program, self.steps.engine, False, values, self.sizes)

    def _has_operators(self, values: Sequence[Any]) -> bool:
        steps, sizes = self.steps, self.sizes
        if len(steps.program.passes) != 1 or steps.program.is_listed or not can_record(steps.engine, sizes):
            return False
        if not torch.is_grad_enabled() or not need_gradient(values):
            return True
        fold = steps.program.passes[0].fold
        asking = [self._asks(e, values) for e in steps.program.passes[0].feeds]
        if dispatch.find_saving_fold(fold, asking, fix_lengths(sizes), steps.engine) is not None:
            return False
        needs = tuple(isinstance(v, Tensor) and v.requires_grad for v in values)
        try:
            steps.gradient(needs, (True,) * len(steps.program.outputs), len(fold.outputs), include_16_bits(values))
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
            found = self.run_stepwise(*values)
            pairs = [(y, g) for y, g in zip(found, cotangents, strict=True) if g is not None and y.requires_grad]
            wanted = [v for v, need in zip(values, needs, strict=True) if need]
            roots, seeds = [y for y, _ in pairs], [g.to(y.dtype) for y, g in pairs]
            grads = iter(torch.autograd.grad(roots, wanted, seeds, create_graph=True, allow_unused=True))
        made = [next(grads) if need else None for need in needs]
        return [zero_gradient(v) if n and g is None else g for v, n, g in zip(values, needs, made, strict=True)]


class _TracedFunction(torch.autograd.Function):
    """A program by its operators."""

    @staticmethod
    def forward(traced: TracedProgram, *values: Any) -> tuple[Tensor, ...]:
        return tuple(run_forward(traced.program, traced.steps.engine, True, values, traced.sizes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        traced, *values = inputs
        ctx.traced, ctx.settings = traced, settings.now()
        ctx.set_materialize_grads(False)
        needs = tuple(isinstance(v, Tensor) and v.requires_grad for v in values)
        ctx.mark_non_differentiable(*(t for k, t in enumerate(output) if not traced.moves(k, needs)))
        save_values(ctx, values, *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        traced, needs = ctx.traced, ctx.needs_input_grad[1:]
        values, results, unchanged = load_values(ctx, len(cotangents))
        given = cotangents[: len(traced.steps.program.outputs)]
        with apply_settings(ctx.settings), dispatch.without_autocast((*values, *results)):
            if torch.is_grad_enabled():
                return None, *traced.differentiate(values, needs, given)
            program, engine, sizes = traced.program, traced.steps.engine, traced.sizes
            found = results if unchanged else run_forward(program, engine, True, values, sizes)
            return None, *run_gradient(program, engine, needs, values, program.join_results(found), given, sizes)
