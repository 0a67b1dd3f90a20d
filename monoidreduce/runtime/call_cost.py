"""What a whole call costs by every schedule.

The call is dry-run once by passes (``dry_run.py``): that gives what torch does outside of folds, and the list of folds.
For every schedule the cost of a call is then

    seconds = torch's own operators + Σ over folds (estimate of the fold's best choice of that schedule + host time)
    peak    = max over folds (bytes alive beside the fold + bytes that the fold holds)

with a fold's time from ``plan/candidates.py`` and its memory from ``memory_estimate.py``. The dense form is dry-run as
well.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .. import tuning
from ..engines import auto, dense, panel
from ..engines.common import evaluate, matmul, oom_retry, torch_code
from ..engines.common.bounded_cache import BoundedCache
from ..engines.common.evaluate import Sizes
from ..engines.eager import cpp
from ..engines.listed.lists import find_lists
from ..engines.panel import split_into_loops, split_softmax_means
from ..errors import BudgetError, MonoidReduceError
from ..plan import budget, candidates, communication, schedule, settings
from ..plan.candidates import Case, Cost, Part, ScheduleCost, add_work, count_work
from ..plan.schedule import Choice, round_length
from ..program import constructors
from ..program.constructors import LISTED
from ..program.expression import Expr, const, index, topological
from ..program.lower import Fold, Lowered
from ..program.trace import COL_SEQUENCE, ROW_SEQUENCE, Parameter
from ..reductions import kind_of
from . import autograd, dispatch, gradient_in_forward, memory_estimate
from .dry_run import DryRun, FoldCall, dry_run

_NAMES = ("flash", "split", "panel")
DENSE_LIMIT = 8 * 2**20  # without a budget, a call may run dense if it holds at most so many bytes of pairs at once
HOST = 8  # host time of a fold outside its engine (autograd, replay, planning), in launches


def estimate_program(
    program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, backward: bool, ranks: int = 1, *, closely: bool = True
) -> Cost:
    """The cost of a program on inputs whose numbers are not read (meta tensors will do).

    ``backward``: with the gradients of the inputs that require one, or of all if none does. With ``ranks``, also the
    cost of sharding rows, columns, or both over so many ranks. ``closely``: estimate each fold's memory by a dry run,
    which takes longer than choosing a schedule does.
    """
    inputs = require_gradients(inputs) if backward else inputs
    rates = candidates.get_rates(sizes.device)
    passes = dry_run_passes(program, inputs, sizes, backward)
    cases = [auto.make_case(n.fold, n.leaves, n.sizes) for n in passes.folds]
    schedules, own = _list_schedules(cases)
    found = [_estimate_schedule(name, each, passes, cases, rates, closely) for name, each in schedules.items()]
    dense = estimate_dense(program, inputs, sizes, backward)
    if dense is not None:
        found.append(dense)
    if ranks > 1 and found:
        found += _estimate_over_ranks(found[0], passes, ranks, rates)
    most = None if settings.launches_kernels_on(sizes.device) else DENSE_LIMIT
    decided = predict_dense(program, inputs, sizes, backward) if closely and fits_one_matrix(program, sizes) else None
    return Cost(
        tuple(sorted(found, key=lambda s: s.seconds)), rates, settings.requested_budget(), most, backward, own, decided
    )


def require_gradients(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The inputs, if one of them requires a gradient; otherwise meta tensors in their place that all do."""
    floats = {n: v for n, v in inputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
    if any(v.requires_grad for v in floats.values()):
        return inputs
    made = {n: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta") for n, v in floats.items()}
    return {**inputs, **{n: v.requires_grad_() for n, v in made.items()}}


def dry_run_passes(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, backward: bool) -> DryRun:
    """A dry run of the call by passes: folds listed, all else counted."""
    numbers = frozenset(n for n, v in inputs.items() if not isinstance(v, Tensor))
    names = torch_code.inputs(program)

    def call(given: Mapping[str, Any], here: Sizes) -> list[Any]:
        return list(
            autograd.make_stepwise_runner(autograd.DRY_RUN, program, numbers, False)(here, *(given[n] for n in names))
        )

    return dry_run(call, inputs, sizes, candidates.get_rates(sizes.device), _find_largest_k(program), backward=backward)


def _find_largest_k(program: Lowered) -> int:
    """The largest k of a program's top-k reductions; 0 without one."""
    return max([0, *(kind_of(e).selected(e.attrs[2]) for e in topological(program.outputs) if e.op == "reduce")])


def count_matrix_bytes(sizes: Sizes) -> int:
    """Bytes of one number per pair."""
    return torch.Size(sizes.batch).numel() * sizes.rows * sizes.cols * sizes.compute.itemsize


def estimate_dense(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, backward: bool) -> ScheduleCost | None:
    """The cost of running the program on whole matrices of pairs; None if it has no dense form."""
    if not dense.has_dense_form(program) or not count_matrix_bytes(sizes):
        return None
    made = dense.write_dense(program, frozenset(n for n, v in inputs.items() if not isinstance(v, Tensor)))

    def call(given: Mapping[str, Any], here: Sizes) -> list[Any]:
        return made.run(here, *(given[n] for n in made.inputs))

    try:
        found = dry_run(
            call, inputs, sizes, candidates.get_rates(sizes.device), _find_largest_k(program), backward=backward
        )
    except (MonoidReduceError, NotImplementedError):  # it reads a number's value, or has no gradient
        return None
    held, results = count_matrix_bytes(sizes), found.results
    return ScheduleCost("dense", found.flops, found.bytes, found.seconds, held, found.peak, results=results)


def _list_schedules(cases: list[Case]) -> tuple[dict[str, list[Choice]], str]:
    """By schedule, a choice for every fold: its best of that schedule, or its best of all if it has none of that name.

    What would run, each fold's own choice, stands under the last schedule of ``_NAMES`` among its choices: the second
    value."""
    own, ranked = [candidates.choose(case) for case in cases], [candidates.rank_untuned(case) for case in cases]
    found: dict[str, list[Choice]] = {}
    for name in _NAMES if cases else _NAMES[:1]:
        mine = [next((c for c in each if c.schedule == name), None) for each in ranked]
        if any(mine) or not cases:
            found[name] = [c or each[0] for c, each in zip(mine, ranked, strict=True)]
    name = max((c.schedule for c in own), key=_NAMES.index, default="flash")
    found[name] = own
    return found, name


def _estimate_schedule(
    schedule: str,
    choices: list[Choice],
    passes: DryRun,
    cases: list[Case],
    rates: candidates.DeviceRates,
    closely: bool,
) -> ScheduleCost:
    """The cost of the call with every fold run by its choice."""
    parts = []
    for fold, case, choice in zip(passes.folds, cases, choices, strict=True):
        found = candidates.estimate(case, choice)
        if case.kernels:  # as choices are ranked, so that the fastest is the one that runs
            found = replace(found, seconds=candidates.estimate(case.rounded(), choice).seconds)
        if closely and case.pairs():
            found = replace(found, peak=_estimate_memory(fold, choice, found.peak))
        parts.append(Part(case, choice, found, fold.backward))
    held = max([0, *(p.estimate.held for p in parts)])
    peak = max([passes.peak, *(n.beside + p.estimate.peak for n, p in zip(passes.folds, parts, strict=True))])
    seconds = passes.seconds + sum(p.estimate.seconds + HOST * rates.launch for p in parts)
    flops = passes.flops + sum(p.estimate.flops for p in parts)
    moved = passes.bytes + sum(p.estimate.bytes for p in parts)
    return ScheduleCost(schedule, flops, moved, seconds, held, peak, tuple(parts))


def _estimate_memory(fold: FoldCall, choice: Choice, otherwise: int) -> int:
    """Bytes that a fold holds at once, by a dry run; ``otherwise`` if the budget is too small for the choice."""
    with contextlib.suppress(BudgetError):
        return memory_estimate.estimate_peak(fold, choice)
    return otherwise


# Over ranks


def _estimate_over_ranks(
    base: ScheduleCost, passes: DryRun, ranks: int, rates: candidates.DeviceRates
) -> list[ScheduleCost]:
    """Rows over the ranks, columns over the ranks, or both over one group (a ring): equations 3 and 7 with N workers,

    seconds = seconds of one device / ranks + bytes sent / link rate + one launch per fold and rank"""
    found = []
    for name, mesh in (("shard rows", (ranks, 1)), ("shard cols", (1, ranks)), ("ring", None)):
        total = sum(
            _count_sent(fold.fold, part.case, mesh, ranks) for fold, part in zip(passes.folds, base.parts, strict=True)
        )
        seconds = base.seconds / ranks + total / rates.link + len(base.parts) * ranks * rates.launch
        peak = base.peak // ranks if mesh is None else base.peak
        found.append(
            replace(base, schedule=name, flops=base.flops / ranks, bytes=base.bytes / ranks, seconds=seconds, peak=peak)
        )
        found[-1] = replace(found[-1], sent=total, ranks=ranks)
    return found


def _count_sent(fold: Fold, case: Case, mesh: tuple[int, int] | None, ranks: int) -> float:
    """Bytes that one rank sends for a fold."""
    totals = (case.rows, case.cols)
    if mesh is not None:
        return communication.count_sent(fold, case.of, case.wide, totals, mesh, case.batch)
    reads = {side: width * case.batch for side, width in count_work(case).reads.items()}
    return communication.count_sent_in_grid(fold, case.of, reads, case.wide, totals, ranks, batch=case.batch)


# The gradient in the forward


def estimate_total(
    outputs: tuple[Expr, ...], inputs: Mapping[str, Any], sizes: Sizes, step_class: panel.StepClass
) -> ScheduleCost | None:
    """The cost of ``op.total``, which takes gradients from the forward's panels; None if it cannot."""
    made = gradient_in_forward.find_program(outputs, inputs, sizes, step_class)
    if made is None:
        return None
    program = split_softmax_means(made.program) if step_class.splits_softmax_means else made.program
    (loop,) = split_into_loops(program)
    dtype = next((v.dtype for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point()), sizes.compute)
    cases = [auto.case_without_leaves(s.fold, dtype, sizes) for s in loop.stages]
    products = sum(2 * sizes.of(str(f.args[0].feature)) for f in loop.products)
    work = replace(add_work([count_work(c) for c in cases]), products=products)
    case = replace(cases[0], tile=max(c.tile for c in cases))
    found = candidates.estimate_panels(
        case, work, budget.allowed_bytes(lambda: matmul.free_memory(sizes.device), 0, budget.PANELS)
    )
    return ScheduleCost("total", found.flops, found.bytes, found.seconds, found.held, found.peak)


# The cost of a call over listed pairs: that of the same body over as many columns as lists have on average.
#
# The cost model knows dense problems. Pieces of lists are such, so only the number of pairs differs: every row is taken
# to fold the average number of listed columns. Dense schedules and the gradient in the forward do not apply.


@dataclass(frozen=True)
class ListedPairs:
    """How many columns a row folds: on average and at most, of ``cols``; ``kind``: of the domain."""

    kind: str
    average: float
    longest: int
    cols: int

    def __str__(self) -> str:
        share = 100 * self.average / max(1, self.cols)
        digits = 3 if share > 99 else 2
        return (
            f"over {self.kind}: {self.average:.3g} of {self.cols} columns a row ({share:.{digits}g} % of the pairs), "
            f"at most {self.longest}"
        )


def count_pairs(outputs: Sequence[Expr], inputs: Mapping[str, Any], sizes: Sizes) -> ListedPairs | None:
    """How many columns a row folds; None where pairs are not listed, nor folded sequence by sequence."""
    listed = constructors.find_listed(outputs)
    if listed is not None:
        return count_listed(listed, [inputs[a.attrs[0]] for a in listed.args], sizes)
    if ROW_SEQUENCE not in inputs or sizes.device.type != "cpu":
        return None
    lengths = [
        torch.bincount(inputs[n].flatten(), minlength=int(inputs[ROW_SEQUENCE].max()) + 2 if sizes.rows else 2)
        for n in (ROW_SEQUENCE, COL_SEQUENCE)
    ]
    count = min(map(len, lengths)) - 1  # what is behind the sequences belongs to none
    rows, cols = (t[:count] for t in lengths)
    longest = int(cols.max()) if count else 0
    return ListedPairs("jagged", int((rows * cols).sum()) / max(1, sizes.rows), longest, sizes.cols)


def count_listed(listed: Expr, tensors: Sequence[Tensor], sizes: Sizes) -> ListedPairs:
    """What the lists of a call hold; of tensors without numbers, what they have room for."""
    (form,) = listed.attrs
    if any(t.device.type == "meta" for t in tensors):
        room = tensors[-1 if form[0] == "edges" else 0].shape[-1]
        each = room / max(1, sizes.rows) if form[0] == "edges" else room * form[2 if form[0] == "blocks" else 1]
        return ListedPairs(form[0], each, int(each), sizes.cols)
    lists = find_lists(form, tensors, sizes.rows, sizes.cols, "cols", False)
    lengths = lists.length * lists.unit
    first = lists.kept * lists.kept_block
    rows = (first + lists.kept_block).clamp(max=sizes.rows) - first
    every = torch.Size(lists.batch).numel() * sizes.rows
    longest = int(lengths.max()) if len(lengths) else 0
    return ListedPairs(form[0], int((rows * lengths).sum()) / max(1, every), longest, sizes.cols)


def as_dense(
    outputs: tuple[Expr, ...], inputs: Mapping[str, Any], sizes: Sizes, parameters: Mapping[str, Parameter], cols: int
) -> tuple[tuple[Expr, ...], dict[str, Any], Sizes]:
    """The program over all of ``cols`` columns, inputs without numbers, and their sizes."""
    replaced: dict[Expr, Expr] = {}
    for e in topological(outputs):
        packed = e.op == "eq" and [a.attrs[:1] for a in e.args] == [(ROW_SEQUENCE,), (COL_SEQUENCE,)]
        if e.op in LISTED or packed:
            replaced[e] = index("col") if e.op == "listed_position" else _make_true_condition()
    given = {n: _resize(v, parameters[n], sizes, cols) for n, v in inputs.items()}
    return constructors.substitute(outputs, replaced), given, replace(sizes, cols=cols)


def _make_true_condition() -> Expr:
    """A condition that holds for every pair, and that a program is not simplified by: counts stay counts of pairs."""
    pair = constructors.apply("add", index("row"), index("col"))
    return constructors.apply("ge", pair, const(0))


def _resize(value: Any, p: Parameter, sizes: Sizes, cols: int) -> Any:
    if not isinstance(value, Tensor) or p.axis not in ("cols", "pairs", "edges"):
        return value
    lead, tail = value.shape[: value.dim() - len(p.tail)], value.shape[value.dim() - len(p.tail) :]
    if p.axis == "edges":
        shape: tuple[int, ...] = (*lead, sizes.rows, cols)
    else:
        at = p.tail.index("cols")
        shape = (*lead, *(cols if k == at and n != 1 else n for k, n in enumerate(tail)))
    return torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=value.requires_grad)


# Dense or tiled: whether a call under the engine ``auto`` builds its matrix of pairs or runs by passes over tiles.
#
# Decided once for a call's shapes, types and budget. Matrices of pairs are built only if all that are alive at once
# take at most ``DENSE_LIMIT`` bytes, or fit in the budget that was given, and ``op.explain`` says so.


@dataclass
class DenseOrTiled:
    """A call of one program on arguments of one kind, by either path; ``names``: those of its inputs, in order."""

    program: Lowered
    names: tuple[str, ...]
    sizes: Sizes
    numbers: frozenset[str]  # inputs that are Python numbers
    passes: Callable[..., list[Any]]  # runs by passes over tiles
    frozen: bool  # the passes are recorded launches: dense then runs only if a followed choice says so
    decided: dict[tuple, bool] = field(default_factory=dict)

    def __call__(self, *given: Any) -> list[Any]:
        if self.frozen and not schedule.is_following() and not tuning.is_recording():
            return self.passes(*given)
        asks = torch.is_grad_enabled() and dispatch.need_gradient(given)
        tuning.note_call(self, given, asks)
        if not self._is_dense(given, asks):
            return self.passes(*given)
        try:
            return dense.write_dense(self.program, self.numbers).run(self.sizes, *given)
        except Exception as error:
            if not oom_retry.is_out_of_memory(error):
                raise
        oom_retry.release_memory(self.sizes.device)
        return self.passes(*given)

    def may_be_dense(self, given: Sequence[Any], asks: bool) -> bool:
        return may_be_dense(self.program, dict(zip(self.names, given, strict=True)), self.sizes, asks)

    def _is_dense(self, given: Sequence[Any], asks: bool) -> bool:
        if not _are_plain(given):
            return False
        key = (asks, settings.requested_budget(), settings.shrink_factor(), settings.plan_generation())
        found = self.decided.get(key)
        if found is None or schedule.is_following():
            found = runs_dense(self.program, dict(zip(self.names, given, strict=True)), self.sizes, asks)
            if not schedule.is_following():
                self.decided[key] = found
        return found


def may_be_dense(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, backward: bool) -> bool:
    """True if the program has a dense form whose matrices of pairs are small enough to be built."""
    if not fits_one_matrix(program, sizes):
        return False
    found = estimate_dense(program, inputs, sizes, backward)
    return found is not None and candidates.fits_dense(found, settings.requested_budget(), DENSE_LIMIT)


def fits_one_matrix(program: Lowered, sizes: Sizes) -> bool:
    """True if one matrix of pairs is small enough to be built, and the program has a dense form: asked first.

    Never on a GPU with kernels: at small sizes launches dominate, and a fold is one launch, the dense form many."""
    if settings.launches_kernels_on(sizes.device):
        return False
    size = count_matrix_bytes(sizes)
    return (
        0 < size <= (settings.requested_budget() or DENSE_LIMIT)
        and settings.shrink_factor() == 1
        and dense.has_dense_form(program)
    )


def runs_dense(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, backward: bool) -> bool:
    """True if a call runs dense: as followed, else if that is allowed and was tuned, or is predicted, to be faster."""
    if schedule.is_following():
        followed = schedule.get_followed("call")
        return followed is not None and followed.schedule == "dense" and dense.has_dense_form(program)
    if not fits_one_matrix(program, sizes):
        return False
    tuned = schedule.recall_choice(auto.call_key(program, inputs.values(), sizes, backward))
    if tuned is not None:
        return tuned.schedule == "dense" and may_be_dense(program, inputs, sizes, backward)
    return predict_dense(program, inputs, sizes, backward)


_KINDS = 4096
_PREDICTED: BoundedCache[tuple, tuple[Lowered, bool]] = BoundedCache(_KINDS)


def predict_dense(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, backward: bool) -> bool:
    """True if the dense form is allowed and predicted to be faster: asked once for a class of lengths, of its longest,
    whose matrices are the largest. A budget that was given is compared with the call's own."""
    known, longest = _find_inputs(program), sizes
    if settings.requested_budget() is None:
        longest = replace(sizes, rows=round_length(sizes.rows), cols=round_length(sizes.cols))
    given = {n: _at_lengths(v, known.get(n), longest) for n, v in inputs.items()}
    kinds = [
        (v.dtype, v.shape, v.requires_grad) if isinstance(v, Tensor) else (type(v), repr(v)) for v in given.values()
    ]
    asked = (settings.requested_budget(), DENSE_LIMIT, settings.plan_generation(), evaluate.float32_precision())
    key: tuple = (id(program), backward, *kinds, longest.rows, longest.cols, sizes.batch, *sizes.letters.values())
    key += (sizes.compute, sizes.device, *asked, torch.get_num_threads())
    found = _PREDICTED.find(key)
    if found is None:  # the program is kept, so that its id stays its own
        if _runs_in_cpp(program, given, longest, backward):
            return _PREDICTED.keep(key, (program, False))[1]
        cost = estimate_program(program, given, longest, backward, closely=False)
        found = _PREDICTED.keep(key, (program, cost.chosen.schedule == "dense"))
    return found[1]


def _runs_in_cpp(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, backward: bool) -> bool:
    """True if all folds of a call run as generated C++, which no dense form is faster than."""
    if sizes.device.type != "cpu" or any(not cpp.is_worthwhile(p.fold, sizes) for p in program.passes):
        return False
    for call in dry_run_passes(program, require_gradients(inputs) if backward else inputs, sizes, backward).folds:
        numbers = frozenset(e for e, v in zip(call.fold.leaves, call.leaves, strict=True) if not isinstance(v, Tensor))
        if cpp.describe(call.fold, call.sizes, numbers) != "C++":
            return False
    return True


@functools.lru_cache(maxsize=1024)
def _find_inputs(program: Lowered) -> Mapping[str, Expr]:
    """The expressions of a program's inputs by name."""
    roots = [*(e for p in program.passes for e in p.feeds), *program.outputs]
    return {e.attrs[0]: e for e in topological(roots) if e.op == "input"}


def _at_lengths(v: Any, e: Expr | None, sizes: Sizes) -> Any:
    """An input of other lengths, without numbers."""
    if not isinstance(v, Tensor) or e is None:
        return v
    shape, last = [*v.shape], v.dim() - 1 - (e.feature is not None)
    if e.cols:
        shape[last] = sizes.cols if shape[last] != 1 else 1
    if e.rows:
        at = last - 1 if e.cols else last
        shape[at] = sizes.rows if shape[at] != 1 else 1
    return torch.empty(shape, dtype=v.dtype, device="meta", requires_grad=v.requires_grad)


def _are_plain(given: Sequence[Any]) -> bool:
    """True if these are plain tensors and no transform or tracer is active, which must see folds."""
    if dispatch.is_transformed() or dispatch.is_traced():
        return False
    return all(type(v) in dispatch.PLAIN for v in given if isinstance(v, Tensor))
