"""What a whole call costs by every schedule: a rehearsal of what torch does, and the cost model for every fold."""

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
from ..plan.op_counts import Case, count, joined
from ..plan.schedule import Choice
from ..program.expression import Expr, topological
from ..program.lower import Lowered
from ..reductions import kind_of
from . import autograd, gradient_in_forward, kernel_memory_estimate, torch_memory_estimate
from .dry_run import Noted, Rehearsal, rehearse

_NAMES = ("flash", "split", "panel")
DENSE = 8 * 2**20  # bytes of one matrix of pairs up to which a call may run dense where no budget was given
HOST = 8  # launches' worth of host time that a fold takes besides its engine: autograd, the script, the plan


def of_program(
    program: Lowered,
    inputs: Mapping[str, Any],
    sizes: Sizes,
    backward: bool,
    ranks: int = 1,
    *,
    closely: bool = True,
) -> Cost:
    """The cost of a program on inputs whose numbers are not looked at (meta tensors will do).

    ``backward``: with the gradients of the inputs that ask for one, or of all where none does. With ``ranks`` also the
    cost of dividing rows, columns, or both over so many. ``closely``: what folds hold beside their pairs is looked at,
    which takes longer than to choose a schedule.
    """
    inputs = asking(inputs) if backward else inputs
    roof = device_rates.of(sizes.device)
    passes = by_passes(program, inputs, sizes, backward)
    cases = [planner.case_of(n.fold, n.leaves, n.sizes) for n in passes.folds]
    found = [_scheduled(name, own, passes, cases, roof, closely) for name, own in _schedules(cases).items()]
    dense = of_dense(program, inputs, sizes, backward)
    if dense is not None:
        found.append(dense)
    if ranks > 1 and found:
        found += _divided(found[0], passes, ranks, roof)
    most = None if triton.launches_on(sizes.device) else DENSE
    return Cost(tuple(sorted(found, key=lambda s: s.seconds)), roof, budget.asked(), most, backward)


def asking(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Inputs of which at least one asks for a gradient: where none does, stand-ins that all do."""
    floats = {n: v for n, v in inputs.items() if isinstance(v, Tensor) and v.is_floating_point()}
    if any(v.requires_grad for v in floats.values()):
        return inputs
    made = {n: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta") for n, v in floats.items()}
    return {**inputs, **{n: v.requires_grad_() for n, v in made.items()}}


def by_passes(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, backward: bool) -> Rehearsal:
    """A rehearsal of the call as passes: folds noted, all else counted."""
    numbers = frozenset(n for n, v in inputs.items() if not isinstance(v, Tensor))

    names = torch_code.inputs(program)

    def call(given: Mapping[str, Any], here: Sizes) -> list[Any]:
        return autograd.walk(autograd.REHEARSAL, program, numbers, False)(here, *(given[n] for n in names))

    return rehearse(call, inputs, sizes, device_rates.of(sizes.device), _most(program), backward=backward)


def _most(program: Lowered) -> int:
    """The most of an axis that a program asks for at once."""
    return max([0, *(kind_of(e).selected(e.attrs[2]) for e in topological(program.outputs) if e.op == "reduce")])


def matrix(sizes: Sizes) -> int:
    """Bytes of one number per pair."""
    return torch.Size(sizes.batch).numel() * sizes.rows * sizes.cols * sizes.compute.itemsize


def of_dense(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, backward: bool) -> Scheduled | None:
    """The cost of running the program on whole matrices; None where it has no such form."""
    if not whole.has_dense_form(program) or not matrix(sizes):
        return None
    made = whole.write_dense(program, frozenset(n for n, v in inputs.items() if not isinstance(v, Tensor)))

    def call(given: Mapping[str, Any], here: Sizes) -> list[Any]:
        return made.run(here, *(given[n] for n in made.inputs))

    try:
        found = rehearse(call, inputs, sizes, device_rates.of(sizes.device), _most(program), backward=backward)
    except (MonoidReduceError, NotImplementedError):  # a number's value is asked for, or it has no gradient
        return None
    return Scheduled("dense", found.flops, found.bytes, found.seconds, matrix(sizes), found.peak, ())


def _schedules(cases: list[Case]) -> dict[str, list[Choice]]:
    """By name, a choice for every fold: its best of that schedule, or of all where it has none of that name. What runs
    is each fold's best of all, and stands for the schedule that it is named after."""
    own, ranked = [candidates.choose(case) for case in cases], [candidates.offered(case) for case in cases]
    found: dict[str, list[Choice]] = {}
    for name in _NAMES if cases else _NAMES[:1]:
        mine = [next((c for c in each if c.schedule == name), None) for each in ranked]
        if any(mine) or not cases:
            found[name] = [c or each[0] for c, each in zip(mine, ranked, strict=True)]
    found[max((c.schedule for c in own), key=_NAMES.index, default="flash")] = own
    return found


def _scheduled(
    schedule: str,
    choices: list[Choice],
    passes: Rehearsal,
    cases: list[Case],
    roof: device_rates.Ceilings,
    closely: bool,
) -> Scheduled:
    """The call with every fold by its choice."""
    parts = []
    for noted, case, choice in zip(passes.folds, cases, choices, strict=True):
        found = cost.estimate(case, choice)
        if closely and case.pairs():
            found = replace(found, peak=_peak(noted, case, choice, found.peak))
        parts.append(Part(case, choice, found, noted.backward))
    held = max([0, *(p.estimate.held for p in parts)])
    peak = max([passes.peak, *(n.beside + p.estimate.peak for n, p in zip(passes.folds, parts, strict=True))])
    seconds = passes.seconds + sum(p.estimate.seconds + HOST * roof.launch for p in parts)
    flops = passes.flops + sum(p.estimate.flops for p in parts)
    moved = passes.bytes + sum(p.estimate.bytes for p in parts)
    return Scheduled(schedule, flops, moved, seconds, held, peak, tuple(parts))


def _peak(noted: Noted, case: Case, choice: Choice, otherwise: int) -> int:
    """Bytes that a fold holds at once, looked at closely; as the model has it where a budget leaves no room."""
    with contextlib.suppress(BudgetError):
        if not case.gpu:
            return torch_memory_estimate.peak(noted, choice)
        return kernel_memory_estimate.peak(noted, choice) or torch_memory_estimate.peak(
            noted, Choice("flash")
        )  # with tiles of its own
    return otherwise


# Over ranks


def _divided(base: Scheduled, passes: Rehearsal, ranks: int, roof: device_rates.Ceilings) -> list[Scheduled]:
    """Rows over the ranks, columns over the ranks, or both over one group: a ring. Equations 3 and 7 with N workers."""
    found = []
    for name, mesh in (("shard rows", (ranks, 1)), ("shard cols", (1, ranks)), ("ring", None)):
        total = sum(_sent(noted, part.case, mesh, ranks) for noted, part in zip(passes.folds, base.parts, strict=True))
        seconds = base.seconds / ranks + total / roof.link + len(base.parts) * ranks * roof.launch
        peak = base.peak // ranks if mesh is None else base.peak
        found.append(
            replace(base, schedule=name, flops=base.flops / ranks, bytes=base.bytes / ranks, seconds=seconds, peak=peak)
        )
        found[-1] = replace(found[-1], sent=total, ranks=ranks)
    return found


def _sent(noted: Noted, case: Case, mesh: tuple[int, int] | None, ranks: int) -> float:
    """Bytes that one rank sends for a fold."""
    totals = (case.rows, case.cols)
    if mesh is not None:
        return communication.sent(noted.fold, case.of, case.wide, totals, mesh, case.batch)
    reads = {side: width * case.batch for side, width in count(case).reads.items()}
    return communication.sent_in_a_grid(noted.fold, case.of, reads, case.wide, totals, ranks, batch=case.batch)


# The gradient in the forward


def of_total(
    outputs: tuple[Expr, ...], inputs: Mapping[str, Any], sizes: Sizes, maker: panel.StepClass
) -> Scheduled | None:
    """The sums of a program's numbers per row with their gradients from the same panels; None where it cannot be."""
    made = gradient_in_forward.planned(outputs, inputs, sizes, maker)
    if made is None:
        return None
    program = split_softmax_means(made.program) if maker.splits_softmax_means else made.program
    (loop,) = split_into_loops(program)
    dtype = next((v.dtype for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point()), sizes.compute)
    cases = [planner.bare(s.fold, dtype, sizes) for s in loop.stages]
    products = sum(2 * sizes.of(str(f.args[0].feature)) for f in loop.products)
    work = replace(joined([count(c) for c in cases]), products=products)
    case = replace(cases[0], tile=max(c.tile for c in cases))
    found = cost.panels(case, work, budget.limit(lambda: matmul.free_memory(sizes.device)))
    return Scheduled("total", found.flops, found.bytes, found.seconds, found.held, found.peak)
