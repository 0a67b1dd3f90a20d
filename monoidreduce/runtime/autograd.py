"""Programs as differentiable torch functions.

A program runs by replay where its launches were recorded (``replay.py``), else step by step: torch's arithmetic, and
one ``autograd.Function`` for each pass over the pairs. The backward of anything here is again a program, built
symbolically (``program/gradient.py``) and run by the same functions, so that first, second and third derivatives take
one path, on every engine. That recursion is the reason why all of it is in this file.

Plain tensors go straight to the engine; under a tracer or a transform (``torch.compile``, ``vmap``, ``jvp``, fake
tensors) the same fold goes through the registered operator (``torch_operator.py``).
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

from ..engines import triton
from ..engines.common import matmul, oom_retry, skip_small_tiles, torch_code
from ..engines.common.block_gradients import differentiate_by_blocks, lack_local_gradient, split_cotangents
from ..engines.common.evaluate import Form, Sizes
from ..engines.common.gradient_program import (
    GradientProgram,
    build_gradient_program,
    constant_results,
    detach_views,
    load_saved,
    load_values,
    save_values,
    zero_gradient,
)
from ..engines.common.torch_code import Elementwise, define, script, tuple_text
from ..errors import NoGradientError
from ..plan import settings
from ..program.gradient import SavingFold, row_gradients
from ..program.lower import Fold, Lowered
from . import dispatch, torch_operator
from .dispatch import BLOCK_GRADIENTS, FOLDERS, apply_settings, are_plain, can_record, include_16_bits, need_gradient
from .replay import CallViews, ForwardReplay, ForwardReplays, PassReplay, ProgramSteps, SavedValues, make_steps
from .torch_replay import FoldReplay

DRY_RUN = "dry run"  # the engine that computes nothing (``dry_run.py``): operators are counted, folds listed
_KINDS = 64  # kinds of inputs of one gradient program
Runner = Callable[..., Sequence[Any]]  # (sizes, *inputs) -> outputs


# Programs


def make_runner(engine: str, program: Lowered, numbers: frozenset[str], one_kind: bool) -> Runner:
    """A program as a function of its sizes and inputs. ``numbers``: the inputs that are Python numbers; ``one_kind``:
    all calls are on plain tensors of one kind, nothing traces them, and folds are launches."""
    run_stepwise = make_stepwise_runner(engine, program, numbers, one_kind)
    return with_replay(make_steps(engine, program, numbers), run_stepwise) if one_kind else run_stepwise


def make_stepwise_runner(engine: str, program: Lowered, numbers: frozenset[str], one_kind: bool) -> Runner:
    """The same, always step by step."""
    grouped = one_kind or (engine == DRY_RUN and matmul.dry_run_sizes.get() is not None)
    steps, run = StepRunner(engine, one_kind), script(program, numbers, grouped, dispatch.row_dot).run
    return lambda sizes, *values: run(sizes, steps, *values)


def with_replay(steps: ProgramSteps, run_stepwise: Runner, forms: Sequence[Form] = ()) -> Runner:
    """``run_stepwise``, replaced by recorded launches where the program is nothing else. ``forms``: the shapes and
    types in which the outputs are expected; those of launches that have them come as a tuple, all others as a list."""
    return ReplayedProgram(steps, run_stepwise, forms) if steps.are_launches else run_stepwise


class StepRunner:
    """Runs the steps of one program: its passes, and the elementwise arithmetic of rows or columns between them; see
    :func:`make_runner`."""

    def __init__(self, engine: str, one_kind: bool = False):
        self.engine, self.one_kind = engine, one_kind
        self.passes: dict[int, PassContext] = {}  # by the ids of folds, which contexts keep alive
        self.elementwise: dict[int, ElementwiseStep] = {}  # likewise

    def __call__(self, fold: Fold, leaves: list[Any], sizes: Sizes, returned: tuple[int, ...]) -> Sequence[Tensor]:
        """The results of a fold that are asked for."""
        context = self.passes.get(id(fold)) or self._make_context(fold, sizes, returned)
        grads = torch.is_grad_enabled() and need_gradient(leaves)
        if context.replay is None or (grads and context.find_saving_form(leaves) is not None):
            found = run_pass(context, leaves)
            return [found[k] for k in returned]
        if grads:
            return _replay_pass(context, *leaves)
        return oom_retry.run_with_retry(context.replay, (leaves,), sizes, fold)[0]

    def _make_context(self, fold: Fold, sizes: Sizes, returned: tuple[int, ...]) -> PassContext:
        replay = PassReplay(fold, sizes, self.engine, returned) if self.one_kind else None
        constants = tuple(at for at, k in enumerate(returned) if self.one_kind and constant_results(fold)[k])
        return self.passes.setdefault(id(fold), PassContext(fold, sizes, self.engine, replay, constants))

    def run_elementwise(self, group: Elementwise, leaves: list[Any], sizes: Sizes) -> Sequence[Tensor]:
        """Elementwise arithmetic of rows or columns, where all calls are of one kind."""
        found = self.elementwise.get(id(group))
        if found is None:
            make = ELEMENTWISE_STEPS.get(self.engine, ElementwiseStep)
            found = self.elementwise.setdefault(id(group), make(group, leaves, sizes, self.engine))
        return found(leaves)


class ReplayedProgram:
    """A program of one pass on inputs of one kind: its recorded launches, or ``run_stepwise`` where there are none."""

    def __init__(self, steps: ProgramSteps, run_stepwise: Runner, forms: Sequence[Form] = ()):
        self.replays, self.run_stepwise = ForwardReplays(steps, forms), run_stepwise
        self.gradients: dict[tuple, GradientRunner] = {}

    def __call__(self, sizes: Sizes, *values: Any) -> Sequence[Any]:
        replay = self.replays.find(sizes, values)
        if replay is None:
            return self.run_stepwise(sizes, *values)
        if torch.is_grad_enabled() and True in [values[k].requires_grad for k in self.replays.tensors]:
            if self.replays.steps.contributions is None or replay.is_wide:
                return self.run_stepwise(sizes, *values)
            found = _replay_program((replay, self), *values)
        else:
            found = self.forward(replay, values)[0]
        return found if replay.has_forms else list(found)

    def fix(
        self,
        sizes: Sizes,
        values: Sequence[Any],
        otherwise: Runner,
        form: Callable[[list[Any]], Sequence[Any]],
        given: Sequence[Any] = (),
        views: CallViews | None = None,
    ) -> Callable[..., Sequence[Any]] | None:
        """This program for inputs like these with the same numbers, while ``launch_key`` is what it is now: a function
        without look-ups. None where there is no recording. ``otherwise`` runs where its launches are gone; ``form``
        gives the outputs the form that is expected, where they do not have it. With ``views`` the function takes what
        the inputs are views of (``given``, now), and returns views of the outputs; so does ``otherwise``."""
        replay, count = self.replays.find(sizes, values), len(values)
        if replay is None or self.replays.steps.contributions is None or replay.is_wide:
            return None
        if views is not None and (replay := self.replays.with_views(replay, given, views)) is None:
            return None
        names, store = [f"v{k}" for k in range(count)], triton.prepared_folds()
        asks = " or ".join(f"v{k}.requires_grad" for k in self.replays.tensors)
        given, result = ", ".join(names), "{}" if replay.has_forms else "form(list({}))"
        lines = [
            "if folds() is not store:",
            f"    return otherwise({given})",
            f"if graded() and ({asks}):",
            # a checkpoint compares what is saved with what the first calls saved: views of the tensors given here
            *([] if views is None else ["    if hooks(True) is not None:", f"        return otherwise({given})"]),
            f"    return {result.format(f'apply(call, {given})')}",
            f"return {result.format(f'forward(replay, {tuple_text(names)})[0]')}",
        ]
        scope = dict(folds=triton.prepared_folds, store=store, otherwise=otherwise, form=form)
        scope |= dict(graded=torch.is_grad_enabled, apply=_replay_program, call=(replay, self))
        scope |= dict(forward=self.forward, replay=replay, hooks=torch._C._autograd._top_saved_tensors_default_hooks)
        return define("fixed", names, lines, scope)

    def forward(
        self, replay: ForwardReplay, values: Sequence[Any]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple]:
        """The outputs, and for a backward the tensors it needs (without what is kept, where memory ran out) and the
        numbers."""
        try:
            return replay.launches.run(*values)
        except Exception as error:
            oom_retry.find_reason(error)
        oom_retry.release_memory(replay.sizes.device)
        return self._run_stepwise(replay, *values)

    def _run_stepwise(
        self, replay: ForwardReplay, *values: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple]:
        replays, views = self.replays, replay.backwards.views
        found = self.run_stepwise(replay.sizes, *(values if views is None else views.enter(values)))
        output = detach_views(found if views is None else views.leave(found))
        tensors = tuple(values[k] for k in replays.tensors)
        return output, (*tensors, *output), tuple(values[k] for k in replays.numbers)

    def backward(self, replay: ForwardReplay, needs: tuple[bool, ...], saved: SavedValues) -> Sequence[Tensor | None]:
        """The gradients by their program, step by step."""
        backwards, key = replay.backwards, (needs, saved.given)
        runner = self.gradients.get(key)
        if runner is None:
            runner = self.gradients[key] = GradientRunner(backwards.program(*key), self.replays.steps.engine, True)
        return backwards.gradients(runner(replay.sizes, backwards.leaves(saved), backwards.other_inputs(saved)))

    def backward_again(self, replay: ForwardReplay, needs: tuple[bool, ...], saved: SavedValues) -> list[Tensor | None]:
        """The gradients of a forward that is run once more; differentiable where that is asked for."""
        graph, leaves = torch.is_grad_enabled(), replay.backwards.leaves(saved)
        steps, sizes = self.replays.steps, replay.sizes
        run = make_stepwise_runner(steps.engine, steps.program, steps.numbers, False)
        with torch.enable_grad():
            given = [v.detach().requires_grad_() if n and not graph else v for v, n in zip(leaves, needs, strict=True)]
            found = run(sizes, *given)
            cotangents = replay.backwards.cotangents(saved)
            pairs = zip(sum_rows(found, sizes) if steps.total else found, cotangents, strict=True)
            seeded = [(y, g) for y, g in pairs if g is not None and y.requires_grad]
            wanted = [v for v, n in zip(given, needs, strict=True) if n]
            roots, seeds = [y for y, _ in seeded], [g for _, g in seeded]
            grads = iter(torch.autograd.grad(roots, wanted, seeds, create_graph=graph, allow_unused=True))
        made = [next(grads) if n else None for n in needs]
        filled = [zero_gradient(v) if n and g is None else g for v, n, g in zip(given, needs, made, strict=True)]
        return replay.backwards.gradients(filled)


def sum_rows(found: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """The sums over all rows, of every batch element, of numbers per row."""
    shape = (*sizes.batch, sizes.rows)
    filled = functools.partial(torch.full, (), dtype=sizes.compute, device=sizes.device)
    return [(v if isinstance(v, Tensor) else filled(v)).expand(shape).sum() for v in found]


class _ReplayedFunction(torch.autograd.Function):
    """A program by its recorded launches; so is its backward."""

    @staticmethod
    def forward(ctx: Any, call: tuple[ForwardReplay, ReplayedProgram], *values: Any) -> tuple[Tensor, ...]:
        replay, program = call
        try:
            output, kept, numbers = replay.launches.run(*values)
        except Exception:
            output, kept, numbers = program.forward(replay, values)
        ctx.kept = replay, program, numbers, len(kept) == replay.saved, settings.current.get().skip_below
        ctx.set_materialize_grads(False)
        if not program.replays.steps.all_contribute:
            ctx.mark_non_differentiable(*[output[k] for k in program.replays.find_constant_outputs(values)])
        ctx.save_for_backward(*kept)
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        _refuse_batched(cotangents)
        replay, program, numbers, complete, skipped = ctx.kept
        first = len(program.replays.tensors)
        tensors, unchanged = load_saved(ctx, range(first, first + len(cotangents)))
        needs, given = ctx.needs_input_grad[1:], SavedValues(tensors, cotangents, numbers)
        plain = complete and unchanged and not torch.is_grad_enabled()
        launches = replay.backwards.find(needs, given) if plain and dispatch.is_untraced() else None

        def run_stepwise() -> tuple:
            """Otherwise, with the settings of the forward."""
            run = program.backward if plain else program.backward_again
            then = replace(replay.backwards.settings, skip_below=skipped)
            with apply_settings(then), dispatch.without_autocast(tensors):
                return None, *oom_retry.run_with_typed_error(run, (replay, needs, given), replay.sizes)

        if launches is None:
            return run_stepwise()
        try:
            return launches.run(*tensors, *cotangents, *numbers)
        except Exception as error:
            oom_retry.find_reason(error)
        oom_retry.release_memory(replay.sizes.device)
        return run_stepwise()


# ``apply`` without its check for transforms, for what is known to have none
_replay_program: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _ReplayedFunction).apply


# Gradients


@dataclass
class _Run:
    """What runs a gradient program on inputs of one kind; ``fits``: its outputs are gradients as they come."""

    run: Runner
    fits: bool = False


class GradientRunner:
    """Runs a gradient program, by the kind of its inputs: in an ordinary backward by replay (``records``), under a
    tracer, or where it is itself to be differentiated, by torch and the engine. ``sizes``: of all its calls, where
    their torch calls may be recorded."""

    def __init__(self, made: GradientProgram, engine: str, records: bool, sizes: Sizes | None = None):
        self.made, self.engine, self.records = made, engine, records
        self.runs: dict[tuple, _Run] = {}
        self.calls: FoldReplay | None = None
        if sizes is not None and not records:
            run, count = functools.partial(self._gradients, sizes), len(made.leaves)
            self.calls = FoldReplay.make(lambda pool: run(pool[:count], pool), engine, sizes)

    def __call__(self, sizes: Sizes, leaves: Sequence[Any], others: Sequence[Any]) -> Sequence[Tensor | None]:
        """A gradient per leaf (None where not asked); ``others``: results and cotangents."""
        pool = [*leaves, *others]
        if self.calls is None or torch.is_grad_enabled() or settings.current.get().skip_below or not are_plain(pool):
            return self._gradients(sizes, leaves, pool)
        return self.calls(pool)

    def _gradients(self, sizes: Sizes, leaves: Sequence[Any], pool: Sequence[Any]) -> list[Tensor | None]:
        values = [pool[k] for k in self.made.sources]
        by_kind = self.records and not torch.is_grad_enabled() and are_plain(values)
        kind = triton.describe_leaves(values) if by_kind else ()
        run = self.runs.get(kind) or self._run(kind)
        with skip_small_tiles.apply_to_gradient() if self._skips(values) else contextlib.nullcontext():
            found = run.run(sizes, *values)
        if run.fits:
            grads: list[Tensor | None] = [None] * len(leaves)
            for (place, _), value in zip(self.made.outputs, found, strict=True):
                grads[place] = value
            return grads
        grads, fits = self.made.gradients(found, leaves)
        run.fits = fits and bool(kind)
        return grads

    def find_launches(self, sizes: Sizes, pool: Sequence[Any]) -> Callable[..., tuple] | None:
        """The recorded launches that give the gradients of leaves, and of others behind them, as they are returned: a
        function of the program's inputs. None where there are none, or small tiles are skipped."""
        values = [pool[k] for k in self.made.sources]
        run = self.runs.get(triton.describe_leaves(values)) if self.records else None
        if run is None or not run.fits or not isinstance(run.run, ReplayedProgram) or self._skips(values):
            return None
        found = run.run.replays.find(sizes, values)
        return None if found is None else found.launches.run

    def _skips(self, values: Sequence[Any]) -> bool:
        """Whether small tiles may be skipped: of one pass, whose sums are the gradients themselves."""
        if settings.current.get().skip_below is None or torch.is_grad_enabled():
            return False
        return len(self.made.program.passes) == 1 and are_plain(values)

    def _run(self, kind: tuple) -> _Run:
        if kind and len(self.runs) >= _KINDS:
            return self.runs.get(()) or self._run(())
        runner = make_runner(self.engine, self.made.program, self.made.numbers, bool(kind))
        return self.runs.setdefault(kind, _Run(runner))


def _refuse_batched(cotangents: Sequence[Tensor | None]) -> None:
    """Raise for cotangents that torch's older vmap has batched."""
    if True in [g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in cotangents]:
        raise NoGradientError(
            detail="batched cotangents (is_grads_batched=True, vectorize=True) come from torch's older vmap",
            fix="Use torch.func.jacrev, or torch.vmap over torch.func.vjp",
        )


# Passes over the pairs


@dataclass(frozen=True)
class PassContext:
    """What a pass needs besides its tensors, and the gradient programs that were needed so far."""

    fold: Fold
    sizes: Sizes
    engine: str
    replay: PassReplay | None = field(default=None, compare=False)  # where leaves are plain tensors of one kind
    constants: tuple[int, ...] = ()  # of the replay's results, those that gradients treat as constants
    gradients: dict[tuple, GradientRunner] = field(default_factory=dict, compare=False)

    def find_saving_form(self, leaves: Sequence[Any], sizes: Sizes | None = None) -> SavingFold | None:
        """How the forward also saves gradients of its rows, where that pays."""
        if not self.may_save:
            return None
        return dispatch.find_saving_fold(self.fold, leaves, sizes or self.sizes, self.engine)

    @property
    def may_save(self) -> bool:
        """Whether a forward may save gradients of its rows at all."""
        return self.engine == DRY_RUN or settings.kernels_run_on(self.sizes.device)

    def fold_leaves(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        """All results, by the engine or by the torch calls that it made before on leaves like these."""
        return (self._fold if self.calls is None else self.calls)(leaves)

    def _fold(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        return FOLDERS[self.engine](self.fold, leaves, self.sizes)

    @functools.cached_property
    def calls(self) -> FoldReplay | None:
        """The recorded torch calls, where small folds on a CPU have some."""
        return FoldReplay.make(self._fold, self.engine, self.sizes) if self.fold.domain is None else None


def run_pass(context: PassContext, leaves: Sequence[Any]) -> Sequence[Tensor]:
    """Fold, differentiably where a leaf asks for it."""
    if context.engine != DRY_RUN and not are_plain(leaves):
        return _run_traced_pass(context, leaves)
    if torch.is_grad_enabled() and need_gradient(leaves):
        return _Pass.apply(context, *leaves)
    return context.fold_leaves(leaves)


class _Pass(torch.autograd.Function):
    """One pass over the pairs by an engine; its backward is a program."""

    @staticmethod
    def forward(ctx: Any, context: PassContext, *leaves: Any) -> tuple[Tensor, ...]:
        form = context.find_saving_form(leaves)
        if form is None:
            output = detach_views(context.fold_leaves(leaves))
            _save(ctx, context, leaves, output)
            return output
        found = FOLDERS[context.engine](form.fold, [leaves[k] for k in form.feeds], context.sizes)
        output = detach_views([found[k] for k in form.own])
        _save(ctx, context, leaves, output, form, tuple(found[k] for k in form.more))
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        return _backward(ctx, cotangents)


class _ReplayedPass(torch.autograd.Function):
    """The same pass by its launches (:class:`~monoidreduce.runtime.replay.PassReplay`): only what is asked for is a
    result; what else a backward needs is saved as it is.

    A backward that is itself to be differentiated folds once more, for results that are."""

    @staticmethod
    def forward(ctx: Any, context: PassContext, *leaves: Any) -> tuple[Tensor, ...]:
        assert context.replay is not None
        found, saved = oom_retry.run_with_retry(context.replay, (leaves,), context.sizes, context.fold)
        returned = detach_views(found)
        ctx.context, ctx.form, ctx.settings = context, None, settings.now()
        ctx.set_materialize_grads(False)
        if context.constants:
            ctx.mark_non_differentiable(*[returned[k] for k in context.constants])
        save_values(ctx, leaves, *returned, *saved)
        return returned

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        context = ctx.context
        leaves, results, unchanged = load_values(ctx, len(cotangents))
        given: list[Tensor | None] = [None] * len(context.fold.outputs)
        replay = context.replay
        assert replay is not None
        for k, g in zip(replay.returned, cotangents, strict=True):
            given[k] = g
        if torch.is_grad_enabled() or not unchanged:
            with apply_settings(ctx.settings):
                results = list(run_pass(context, leaves))
        else:
            count = len(replay.returned)
            results = replay.join(results[:count], results[count:])
        return _differentiate(ctx, leaves, results, given)


# ``apply`` without its check for transforms, for what is known to have none
_replay_pass: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _ReplayedPass).apply


class _TracedPass(torch.autograd.Function):
    """The same pass through the registered operator, for whoever traces or transforms it."""

    @staticmethod
    def forward(context: PassContext, *leaves: Any) -> tuple[Tensor, ...]:
        return tuple(torch_operator.call(context.fold, context.engine, leaves, context.sizes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        context, *leaves = inputs
        _save(ctx, context, leaves, output)
        ctx.save_for_forward(*(v for v in leaves if isinstance(v, Tensor)), *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        return _backward(ctx, cotangents)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple:
        """J t, as the derivative of ⟨Jᵀ g, t⟩ by g: the gradient program is linear in its cotangents."""
        context = ctx.context
        leaves, results = load_values(ctx, len(context.fold.outputs))[:2]
        leaves, results = [_drop_tangent(v) for v in leaves], [_drop_tangent(r) for r in results]
        varying = [k for k, constant in enumerate(constant_results(context.fold)) if not constant]
        wanted = tuple(isinstance(t, Tensor) for t in tangents)
        tangents_given = [t for t in tangents if isinstance(t, Tensor)]
        if not context.sizes.rows or not context.sizes.cols or not varying or not tangents_given:
            return tuple(torch.zeros_like(r) if k in varying else None for k, r in enumerate(results))

        def gradients(*g: Tensor) -> tuple[Tensor, ...]:
            cotangents: list[Tensor | None] = [None] * len(results)
            for k, value in zip(varying, g, strict=True):
                cotangents[k] = value
            return tuple(t for t in _pass_gradients(context, leaves, results, wanted, cotangents) if t is not None)

        with forward_ad._set_fwd_grad_enabled(True):  # an outer level's tangents go on, this level's were taken off
            transpose: Any = torch.func.vjp(gradients, *(torch.zeros_like(results[k]) for k in varying))[1]
            found = iter(transpose(tuple(tangents_given)))
        return tuple(next(found) if k in varying else None for k in range(len(results)))

    @staticmethod
    def vmap(info: Any, in_dims: tuple, context: PassContext, *leaves: Any) -> tuple:
        """A mapped dimension is one more batch dimension, in front; leaves that do not have it broadcast."""
        moved = torch_operator.move_batch_to_front(context.fold, leaves, in_dims[1:], info.batch_size)
        sizes = replace(context.sizes, batch=(info.batch_size, *context.sizes.batch))
        fold = torch_operator.keep_batch(context.fold)  # a mapped element has results of its own
        results = _TracedPass.apply(replace(context, fold=fold, sizes=sizes, gradients={}), *moved)
        return tuple(results), (0,) * len(results)


class _TracedSavingPass(torch.autograd.Function):
    """The same where the forward keeps gradients of its rows; never under a transform."""

    @staticmethod
    def forward(call: tuple[PassContext, SavingFold], *leaves: Any) -> tuple[Tensor, ...]:
        context, form = call
        found = torch_operator.call(form.fold, context.engine, [leaves[k] for k in form.feeds], context.sizes)
        return tuple(found[k] for k in (*form.own, *form.more))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        (context, form), *leaves = inputs
        count = len(form.own)
        _save(ctx, context, leaves, output[:count], form, output[count:])
        ctx.mark_non_differentiable(*ctx.non_differentiable, *output[count:])

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        return _backward(ctx, cotangents[: len(ctx.form.own)])


def _run_traced_pass(context: PassContext, leaves: Sequence[Any]) -> Sequence[Tensor]:
    """Fold through the registered operator."""
    form = None
    if torch.is_grad_enabled() and not dispatch.is_transformed():
        sizes = torch_operator.fix_lengths(context.sizes)
        form = context.find_saving_form(leaves, sizes)
    if form is None:
        return _TracedPass.apply(context, *leaves)
    return _TracedSavingPass.apply((context, form), *leaves)[: len(form.own)]


def _drop_tangent(value: Any) -> Any:
    """Without the tangent of the present level, which would call ``jvp`` again."""
    return forward_ad.unpack_dual(value).primal if isinstance(value, Tensor) else value


def _save(
    ctx: Any,
    context: PassContext,
    leaves: Sequence[Any],
    output: tuple[Tensor, ...],
    form: SavingFold | None = None,
    more: tuple[Tensor, ...] = (),
) -> None:
    ctx.context, ctx.form = context, form
    ctx.settings = settings.now()
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(o for o, f in zip(output, constant_results(context.fold), strict=True) if f))
    save_values(ctx, leaves, *output, *more)


def _backward(ctx: Any, cotangents: Sequence[Tensor | None]) -> tuple:
    leaves, results, unchanged = load_values(ctx, len(cotangents))
    if not unchanged:
        with apply_settings(ctx.settings):
            results = list(run_pass(ctx.context, leaves))
        ctx.form = None  # the results alone: the gradients are the usual program of these
    return _differentiate(ctx, leaves, results, cotangents)


def _differentiate(ctx: Any, leaves: list[Any], results: list[Tensor], cotangents: Sequence[Tensor | None]) -> tuple:
    """The gradients of a pass, with the settings of its forward."""
    _refuse_batched(cotangents)
    context, wanted = ctx.context, ctx.needs_input_grad[1:]
    if not context.sizes.rows or not context.sizes.cols:  # no pairs: nothing flows, whatever the cotangents are
        return None, *(zero_gradient(leaf) if want else None for leaf, want in zip(leaves, wanted, strict=True))
    usual = dispatch.autocast_device(results) is None and ctx.settings == settings.now()
    try:
        if usual:
            return None, *_pass_gradients(context, leaves, results, wanted, cotangents, ctx.form)
        with apply_settings(ctx.settings), dispatch.without_autocast(results):
            return None, *_pass_gradients(context, leaves, results, wanted, cotangents, ctx.form)
    except Exception as error:
        reason = oom_retry.find_reason(error)
    oom_retry.raise_typed(reason, context.sizes)


def _pass_gradients(
    context: PassContext,
    leaves: list[Any],
    results: list[Tensor],
    wanted: tuple[bool, ...],
    cotangents: Sequence[Tensor | None],
    form: SavingFold | None = None,
) -> Sequence[Tensor | None]:
    """The gradients of a pass, one per leaf (None where not asked)."""
    if any(lack_local_gradient(context.fold)) and any(
        g is not None for g in split_cotangents(context.fold, cotangents)[1]
    ):
        local, others = split_cotangents(context.fold, cotangents)
        differentiate = BLOCK_GRADIENTS.get(context.engine, differentiate_by_blocks)
        grads = differentiate(context.fold, leaves, context.sizes, wanted, others)
        if any(g is not None for g in local):
            more = _pass_gradients(context, leaves, results, wanted, local, form)
            grads = [g if m is None else m if g is None else g + m for g, m in zip(grads, more, strict=True)]
        return [zero_gradient(v) if w and g is None else g for v, w, g in zip(leaves, wanted, grads, strict=True)]
    form = None if torch.is_grad_enabled() else form  # a second derivative asks for the first as a program of leaves
    count, numbers = len(cotangents), tuple([not isinstance(v, Tensor) for v in leaves])
    key = (form, wanted, tuple([g is not None for g in cotangents]), numbers, include_16_bits(leaves))
    runner = context.gradients.get(key)
    if runner is None:
        program, records = _pass_gradient_program(context.fold, *key), can_record(context.engine, context.sizes)
        recorded = context.sizes if context.fold.domain is None else None
        runner = context.gradients[key] = GradientRunner(program, context.engine, records, recorded)
    return runner(context.sizes, leaves, [*results[:count], *cotangents, *results[count:]])


@functools.lru_cache(maxsize=4096)
def _pass_gradient_program(
    fold: Fold,
    form: SavingFold | None,
    wanted: tuple[bool, ...],
    given: tuple[bool, ...],
    numbers: tuple[bool, ...],
    narrow: bool,
) -> GradientProgram:
    if form is None:
        return build_gradient_program(fold, wanted, given, numbers, narrow=narrow)
    saved = tuple((k, e) for k, e in row_gradients(form, given) if wanted[k])
    return build_gradient_program(fold, wanted, given, numbers, saved, tuple(form.names), narrow)


# Elementwise arithmetic of rows or of columns

ElementwiseRun = Callable[[Sequence[Any]], list[Tensor]]


class ElementwiseStep:
    """Elementwise arithmetic of rows or columns on leaves of one kind, as one differentiable step: a kernel, or torch
    where there is none."""

    def __init__(self, group: Elementwise, leaves: Sequence[Any], sizes: Sizes, engine: str):
        self.group, self.sizes, self.engine = group, sizes, engine
        self.numbers = tuple(not isinstance(v, Tensor) for v in leaves)
        self.constants = tuple(k for k, e in enumerate(group.outputs) if e.dtype != "float")
        self.gradients: dict[tuple, GradientRunner] = {}
        self.run: ElementwiseRun = self._prepare_launch(leaves) or self._run_in_torch()

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        """Its outputs, differentiably where a leaf asks for it."""
        needed = torch.is_grad_enabled() and need_gradient(leaves)
        return _apply_elementwise(self, *leaves) if needed else self.run(leaves)

    def _prepare_launch(self, leaves: Sequence[Any]) -> ElementwiseRun | None:
        return triton.prepare_side(self.group, leaves, self.sizes)

    def _run_in_torch(self) -> ElementwiseRun:
        names = {e.attrs[0]: k for k, e in enumerate(self.group.leaves)}
        numbers = frozenset(n for n, k in names.items() if self.numbers[k])
        made = script(Lowered((), self.group.outputs), numbers, False, dispatch.row_dot)
        return lambda leaves: made.run(self.sizes, None, *(leaves[names[n]] for n in made.inputs))

    def gradient(self, wanted: tuple[bool, ...], given: tuple[bool, ...]) -> GradientRunner:
        """What computes the gradients that are wanted from the cotangents that are given."""
        found = self.gradients.get((wanted, given))
        if found is None:
            cotangents, outputs = torch_code.differentiate_elementwise(self.group, wanted, given)
            names = [e.attrs[0] for e in cotangents]
            made = GradientProgram.of(self.group.leaves, names, outputs, wanted, self.numbers)
            found = self.gradients[wanted, given] = GradientRunner(made, self.engine, True)
        return found


ELEMENTWISE_STEPS: dict[str, type[ElementwiseStep]] = {}  # by engine, where it has its own


class _Elementwise(torch.autograd.Function):
    """An :class:`ElementwiseStep`; its backward is elementwise arithmetic of the same axis."""

    @staticmethod
    def forward(ctx: Any, step: ElementwiseStep, *leaves: Any) -> tuple[Tensor, ...]:
        output = tuple(step.run(leaves))
        ctx.step = step
        ctx.set_materialize_grads(False)
        if step.constants:
            ctx.mark_non_differentiable(*[output[k] for k in step.constants])
        save_values(ctx, leaves)
        return output

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        leaves = load_values(ctx)[0]
        runner = ctx.step.gradient(ctx.needs_input_grad[1:], tuple([g is not None for g in cotangents]))
        return None, *runner(ctx.step.sizes, leaves, cotangents)


# ``apply`` without its check for transforms: all calls are on plain tensors, and nothing traces them
_apply_elementwise: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Elementwise).apply
