"""What a whole call costs by every schedule.

The call is dry-run once by passes (``dry_run.py``): that gives what torch does outside of folds, and the list of folds.
For every schedule the cost of a call is then

    seconds = torch's own operators + Σ over folds (estimate of the fold's best choice of that schedule + host time)
    peak    = max over folds (bytes alive beside the fold + bytes that the fold holds)

with a fold's time from ``plan/cost.py`` and its memory from ``memory_estimate.py``. The dense form is dry-run as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..engines import dense as whole
from ..engines import panel, triton
from ..engines.auto import planner
from ..engines.common import matmul, torch_code
from ..engines.common.evaluate import Sizes
from ..engines.panel.panel_program import split_into_loops, split_softmax_means
from ..errors import BudgetError, MonoidReduceError
from ..plan import budget, candidates, communication, cost, device_rates
from ..plan.cost import Cost, Part, Scheduled
from ..plan.op_counts import Case, add_work, count_work
from ..plan.schedule import Choice
from ..program.expression import Expr, topological
from ..program.lower import Fold, Lowered
from ..reductions import kind_of
from . import autograd, gradient_in_forward, memory_estimate
from .dry_run import DryRun, FoldCall, dry_run

_NAMES = ("flash", "split", "panel")
DENSE_LIMIT = 8 * 2**20  # without a budget, a call may run dense if one matrix of pairs takes at most so many bytes
HOST = 8  # host time of a fold outside its engine (autograd, replay, planning), in launches


def estimate_program(
    program: Lowered,
    inputs: Mapping[str, Any],
    sizes: Sizes,
    backward: bool,
    ranks: int = 1,
    *,
    closely: bool = True,
) -> Cost:
    """The cost of a program on inputs whose numbers are not read (meta tensors will do).

    ``backward``: with the gradients of the inputs that require one, or of all if none does. With ``ranks``, also the
    cost of sharding rows, columns, or both over so many ranks. ``closely``: estimate each fold's memory by a dry run,
    which takes longer than choosing a schedule does.
    """
    inputs = require_gradients(inputs) if backward else inputs
    rates = device_rates.get_rates(sizes.device)
    passes = dry_run_passes(program, inputs, sizes, backward)
    cases = [planner.make_case(n.fold, n.leaves, n.sizes) for n in passes.folds]
    schedules, own = _list_schedules(cases)
    found = [_estimate_schedule(name, each, passes, cases, rates, closely) for name, each in schedules.items()]
    dense = estimate_dense(program, inputs, sizes, backward)
    if dense is not None:
        found.append(dense)
    if ranks > 1 and found:
        found += _estimate_over_ranks(found[0], passes, ranks, rates)
    most = None if triton.launches_on(sizes.device) else DENSE_LIMIT
    return Cost(tuple(sorted(found, key=lambda s: s.seconds)), rates, budget.requested(), most, backward, own)


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
        return list(autograd.make_walk(autograd.DRY_RUN, program, numbers, False)(here, *(given[n] for n in names)))

    return dry_run(
        call, inputs, sizes, device_rates.get_rates(sizes.device), _find_largest_k(program), backward=backward
    )


def _find_largest_k(program: Lowered) -> int:
    """The largest k of a program's top-k reductions; 0 without one."""
    return max([0, *(kind_of(e).selected(e.attrs[2]) for e in topological(program.outputs) if e.op == "reduce")])


def count_matrix_bytes(sizes: Sizes) -> int:
    """Bytes of one number per pair."""
    return torch.Size(sizes.batch).numel() * sizes.rows * sizes.cols * sizes.compute.itemsize


def estimate_dense(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, backward: bool) -> Scheduled | None:
    """The cost of running the program on whole matrices of pairs; None if it has no dense form."""
    if not whole.has_dense_form(program) or not count_matrix_bytes(sizes):
        return None
    made = whole.write_dense(program, frozenset(n for n, v in inputs.items() if not isinstance(v, Tensor)))

    def call(given: Mapping[str, Any], here: Sizes) -> list[Any]:
        return made.run(here, *(given[n] for n in made.inputs))

    try:
        found = dry_run(
            call, inputs, sizes, device_rates.get_rates(sizes.device), _find_largest_k(program), backward=backward
        )
    except (MonoidReduceError, NotImplementedError):  # it reads a number's value, or has no gradient
        return None
    return Scheduled("dense", found.flops, found.bytes, found.seconds, count_matrix_bytes(sizes), found.peak, ())


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
    rates: device_rates.DeviceRates,
    closely: bool,
) -> Scheduled:
    """The cost of the call with every fold run by its choice."""
    parts = []
    for fold, case, choice in zip(passes.folds, cases, choices, strict=True):
        found = cost.estimate(case, choice)
        if case.kernels:  # as choices are ranked, so that the fastest is the one that runs
            found = replace(found, seconds=cost.estimate(case.rounded(), choice).seconds)
        if closely and case.pairs():
            found = replace(found, peak=_estimate_memory(fold, choice, found.peak))
        parts.append(Part(case, choice, found, fold.backward))
    held = max([0, *(p.estimate.held for p in parts)])
    peak = max([passes.peak, *(n.beside + p.estimate.peak for n, p in zip(passes.folds, parts, strict=True))])
    seconds = passes.seconds + sum(p.estimate.seconds + HOST * rates.launch for p in parts)
    flops = passes.flops + sum(p.estimate.flops for p in parts)
    moved = passes.bytes + sum(p.estimate.bytes for p in parts)
    return Scheduled(schedule, flops, moved, seconds, held, peak, tuple(parts))


def _estimate_memory(fold: FoldCall, choice: Choice, otherwise: int) -> int:
    """Bytes that a fold holds at once, by a dry run; ``otherwise`` if the budget is too small for the choice."""
    with contextlib.suppress(BudgetError):
        return memory_estimate.estimate_peak(fold, choice)
    return otherwise


# Over ranks


def _estimate_over_ranks(
    base: Scheduled, passes: DryRun, ranks: int, rates: device_rates.DeviceRates
) -> list[Scheduled]:
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
) -> Scheduled | None:
    """The cost of ``op.total``, which takes gradients from the forward's panels; None if it cannot."""
    made = gradient_in_forward.planned(outputs, inputs, sizes, step_class)
    if made is None:
        return None
    program = split_softmax_means(made.program) if step_class.splits_softmax_means else made.program
    (loop,) = split_into_loops(program)
    dtype = next((v.dtype for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point()), sizes.compute)
    cases = [planner.case_without_leaves(s.fold, dtype, sizes) for s in loop.stages]
    products = sum(2 * sizes.of(str(f.args[0].feature)) for f in loop.products)
    work = replace(add_work([count_work(c) for c in cases]), products=products)
    case = replace(cases[0], tile=max(c.tile for c in cases))
    found = cost.estimate_panels(case, work, budget.allowed_bytes(lambda: matmul.free_memory(sizes.device)))
    return Scheduled("total", found.flops, found.bytes, found.seconds, found.held, found.peak)
