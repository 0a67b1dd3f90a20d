"""The engine ``auto``: every fold runs by the plan's choice, made once for a fold, its sizes and its types.

What a choice depends on is gathered here as a :class:`~monoidreduce.plan.op_counts.Case`; what it says is done by the
other
engines, which know nothing of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...plan import budget, candidates, device_rates, plan_records, schedule, tiles
from ...plan.op_counts import Case
from ...plan.schedule import Choice
from ...program.digest import digest
from ...program.expression import Expr, index, size
from ...program.lower import Fold
from .. import eager, panel, triton
from ..common import matmul
from ..common.evaluate import Sizes
from ..eager import tile_code, tile_walk
from ..panel.panel_program import as_program, split_into_loops, split_softmax_means
from ..triton.kernels import topk
from . import tuned_plans

_CHOSEN: dict[tuple, tuple[Fold, Choice, Choice]] = {}  # as it is said, and as it is done
_MOST = 4096


def run(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """Run a fold by its choice."""
    return perform(_chosen(fold, leaves, sizes)[1], fold, leaves, sizes)


def chosen(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> Choice:
    """The choice for a fold on these leaves: found again for the next ones like them."""
    return _chosen(fold, leaves, sizes)[0]


def _chosen(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> tuple[Choice, Choice]:
    """A choice, and the same with the tiles left out that kernels take by themselves: to tell them costs time."""
    kinds = tuple([v.dtype for v in leaves if isinstance(v, Tensor)])
    key: tuple = (id(fold), sizes.rows, sizes.cols, sizes.batch, sizes.device, sizes.compute, kinds)
    key += (budget.asked(), tuple(sizes.letters.values()), matmul.asked.get(), plan_records.generation())
    if schedule.followed.get() is not None or budget.parts() > 1:  # told what to do, or to do with less
        told = candidates.choose(case_of(fold, leaves, sizes))
        return told, told
    found = _CHOSEN.get(key)
    if found is None:
        case = case_of(fold, leaves, sizes)
        best = candidates.choose(case, functools.partial(tuned_plans.recalled, device=sizes.device))
        usual = case.kernels and best.tiles == case.defaults
        found = _CHOSEN[key] = fold, best, replace(best, tiles=()) if usual else best
        while len(_CHOSEN) > _MOST:
            del _CHOSEN[next(iter(_CHOSEN))]
    return found[1:]


def perform(how: Choice, fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """Run a fold by a given choice."""
    given = list(leaves)
    if how.schedule == "panel":
        (room,) = how.tile("room") or (0,)
        if _maker(sizes.device) is triton.KernelStep and triton.is_deep(fold, given, sizes):
            with contextlib.suppress(triton.Unsupported):  # folds to numbers need no panel
                return triton.run_deep(fold, given, sizes)
        with contextlib.suppress(triton.Unsupported):  # told, and run by the eager engine, below
            return panel.run(fold, given, sizes, _maker(sizes.device), room)
        how = Choice("flash")
    if not _by_kernels(sizes.device):
        tile = how.tile("tile")
        return eager.run(fold, given, sizes, None if tile is None else tiles.Tiles(*tile))
    with _told(how):
        return triton.run(fold, given, sizes, fallback=eager.run)


def ready(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> triton.Ready | None:
    """The launches that :func:`run` would make for leaves like these, if it would do nothing else."""
    how = _chosen(fold, leaves, sizes)[1]
    if not _by_kernels(sizes.device):
        return None
    if how.schedule == "panel":
        return triton.ready_deep(fold, list(leaves), sizes)
    return launches(how, fold, leaves, sizes)


def straight(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> Callable[[Sequence[Any]], list[Tensor]] | None:
    """What :func:`run` would come to in the end for leaves like these, where it makes products besides launches."""
    deep = _by_kernels(sizes.device) and _chosen(fold, leaves, sizes)[1].schedule == "panel"
    return topk.straight(fold, leaves, sizes) if deep else None


def launches(how: Choice, fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> triton.Ready | None:
    """The launches of a choice; None where a fold has no kernel."""
    with _told(how):
        return triton.ready(fold, list(leaves), sizes)


def _told(how: Choice) -> contextlib.AbstractContextManager[Any]:
    """The tiles of a choice, where they are not those that kernels take by themselves."""
    tiles = {over: triton.KernelPlan(*t) for over, t in how.tiles}
    return triton.use_plan(tiles) if tiles else contextlib.nullcontext()


def _by_kernels(device: torch.device) -> bool:
    return triton.launches_on(device)


def _maker(device: torch.device) -> panel.StepClass:
    return triton.KernelStep if _by_kernels(device) else panel.TorchStep


# What a choice depends on


def case_of(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> Case:
    """A fold at these sizes, on these leaves (whose numbers are not looked at), as the cost model sees it."""
    vectors = [v.dtype for e, v in zip(fold.leaves, leaves, strict=True) if e.feature is not None]
    narrow = next((d for d in vectors if d in matmul.SIXTEEN), sizes.compute)
    base = bare(fold, narrow, sizes, frozenset(_numbers(fold, leaves)))
    kernels = base.gpu and triton.runs_on(sizes.device)
    defaults = triton.tiles_of(fold, list(leaves), sizes) if kernels else {}
    return replace(
        base,
        kernels=bool(defaults),
        defaults=tuple(defaults.items()),
        panels=_takes_panels(fold, sizes, set(vectors)),
        fixed=base.fixed + eager.pair_result_bytes(fold, leaves, sizes),
        seen=_seen(fold, sizes.rows, sizes.cols, tuple(_numbers(fold, leaves).items())),
    )


def _numbers(fold: Fold, leaves: Sequence[Any]) -> dict[Expr, float]:
    return {e: v for e, v in zip(fold.leaves, leaves, strict=True) if not isinstance(v, Tensor)}


def bare(fold: Fold, dtype: torch.dtype, sizes: Sizes, numbers: frozenset[Expr] = frozenset()) -> Case:
    """What can be said of a fold without its leaves; ``dtype``: of its vectors."""
    code = tile_walk.compile_unconditional(fold, numbers)
    return Case(
        fold,
        digest(fold),
        sizes.rows,
        sizes.cols,
        torch.Size(sizes.batch).numel(),
        tuple(sorted(sizes.letters.items())),
        str(dtype)[6:],
        dtype.itemsize,
        sizes.compute.itemsize,
        device_rates.of(sizes.device),
        gpu=sizes.device.type == "cuda",
        tile=tile_code.bytes_per_pair(fold, code, sizes),
        fixed=tile_code.fixed_bytes(code),
        steps=len(code.steps),
        width=eager.numbers_per_pair(fold, sizes),
    )


_BLOCKS = 12  # per side, of the grid on which conditions are looked at


@functools.lru_cache(maxsize=4096)
def _seen(fold: Fold, rows: int, cols: int, given: tuple[tuple[Expr, float], ...]) -> float:
    """The share of the pairs that conditions on indices and numbers leave; of data nothing is known here."""
    code = tile_walk.compile_fold(fold, frozenset(e for e, _ in given))
    if not code.conditions or not rows or not cols:
        return 1.0
    fixed = {e: (float(v), float(v)) for e, v in given}
    fixed |= {size("rows"): (float(rows),) * 2, size("cols"): (float(cols),) * 2}
    seen = 0
    for r in tile_walk.split_range(rows, -(-rows // _BLOCKS)):
        for c in tile_walk.split_range(cols, -(-cols // _BLOCKS)):
            ranges = {index("row"): (r.start, r.stop - 1), index("col"): (c.start, c.stop - 1)}
            if code.variant({**fixed, **ranges}) is not None:
                seen += (r.stop - r.start) * (c.stop - c.start)
    return max(0.0, seen / (rows * cols) - 0.5 / _BLOCKS) if seen < rows * cols else 1.0


def _takes_panels(fold: Fold, sizes: Sizes, kinds: set[torch.dtype]) -> bool:
    """Whether a fold has products to write to panels, and everything else can be done to them."""
    if panel.writes_pairs(fold) or not torch.Size(sizes.batch).numel():
        return False
    maker = _maker(sizes.device)
    program = as_program(fold)
    found = split_into_loops(split_softmax_means(program) if maker.splits_softmax_means else program)
    if not any(w.products for w in found):
        return False
    try:
        for w in found:
            maker(w, sizes, kinds)
    except triton.Unsupported:
        return False
    return True
