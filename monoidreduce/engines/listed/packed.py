"""Folds over packed sequences on a CPU: each sequence is a small fold of its own, on slices of the leaves.

Pairs of two sequences would be the identity, because a condition ``row's number == column's number`` says so
(``mr.jagged``, documents). Where these numbers rise along both axes, only the stretches of equal numbers are folded,
without the condition. So a sequence costs what it would alone, and what lies beyond the last one is never read. Short
neighbours are one stretch, with the condition; if that gives a NaN, each is folded alone after all, since a weight of 0
does not keep a neighbour's NaN or infinity out of a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...program import constructors
from ...program.expression import Expr, const
from ...program.lower import Fold, find_same_sequence
from ...reductions import kind_of
from ..common import bounded_cache, combine, subproblem
from ..common.evaluate import Sizes, allocate_result, pair_result_form
from ..common.subproblem import Engine, Range, make_offset_leaf, offset_fold, slice_leaf
from .run import make_empty_results

_SHORT = 2**16  # pairs of all batch elements, which take less time than a fold takes to begin


@dataclass(frozen=True)
class Stretch:
    """Neighbouring sequences: ``parts``, where there are several."""

    rows: slice
    cols: slice
    parts: tuple[Stretch, ...] = ()

    @property
    def pairs(self) -> int:
        return (self.rows.stop - self.rows.start) * (self.cols.stop - self.cols.start)


def run(fold: Fold, leaves: list[Any], sizes: Sizes, engine: Engine) -> list[Tensor] | None:
    """Run a fold sequence by sequence; None where it does not fold packed sequences, or their numbers are not known."""
    same = find_same_sequence(fold.reductions)
    if same is None or sizes.device.type != "cpu":
        return None
    short = _SHORT // max(1, torch.Size(sizes.batch).numel())
    row, col = (leaves[fold.leaves.index(e)] for e in same.args)
    stretches = _find_stretches(row, col, short)
    if stretches is None:
        return None
    outputs: list[Tensor] = []
    for r, k in fold.outputs:
        if kind_of(r).per_pair:
            shape, dtype = pair_result_form(leaves[fold.leaves.index(r.args[1])], sizes)
            outputs.append(torch.zeros(shape, dtype=dtype, device="cpu"))
        else:
            outputs.append(allocate_result(fold, r, k, leaves, sizes))
    _fill_unpaired(fold, outputs, stretches, sizes)
    pairs, alone = sum(s.pairs for s in stretches), _drop_condition(fold, same)
    for s in stretches:
        alike = replace(sizes, repeats=max(1, pairs // s.pairs))
        found = _fold_stretch(fold if s.parts else alone, leaves, alike, s, engine)
        mixed = s.parts if any(t.is_floating_point() and bool(t.isnan().any()) for t in found) else ()
        for part in mixed or (s,):
            found = _fold_stretch(alone, leaves, alike, part, engine) if mixed else found
            _write_stretch(fold, found, part, len(sizes.batch), outputs)
    return outputs


def _fold_stretch(fold: Fold, leaves: list[Any], sizes: Sizes, s: Stretch, engine: Engine) -> list[Tensor]:
    row, col = Range(s.rows, s.rows.start), Range(s.cols, s.cols.start)
    own = replace(sizes, rows=s.rows.stop - s.rows.start, cols=s.cols.stop - s.cols.start)
    placed, fed = offset_fold(fold)
    cut = [slice_leaf(v, e, row, col, False) for v, e in zip(leaves, fold.leaves, strict=True)]
    starts, totals = {"row_start": row.start, "col_start": col.start}, (sizes.of("rows"), sizes.of("cols"))
    given = dict(zip(fold.leaves, cut, strict=True))
    cut += [make_offset_leaf(f, given, starts, totals, own) for f in fed]
    return subproblem.add_unseen(placed, engine(placed, cut, own), lambda over: (own.here(over), sizes.here(over)))


def _write_stretch(fold: Fold, found: list[Tensor], s: Stretch, batch: int, outputs: list[Tensor]) -> None:
    for (r, k), t, target in zip(fold.outputs, found, outputs, strict=True):
        over, kind = r.attrs[1], kind_of(r)
        if kind.per_pair:
            for axis, at in ((-2, s.rows), (-1, s.cols)):
                if target.shape[axis] != 1:
                    target = target.narrow(axis, at.start, at.stop - at.start)
            target += t
            continue
        if kind.both_axes:
            target += t
            continue
        kept, folded = (s.rows, s.cols) if over == "cols" else (s.cols, s.rows)
        if k == kind.place and folded.start:
            t = torch.where(t < 0, t, t + folded.start)
        target.narrow(batch, kept.start, kept.stop - kept.start).copy_(t)


def _fill_unpaired(fold: Fold, outputs: list[Tensor], stretches: Sequence[Stretch], sizes: Sizes) -> None:
    """What rows and columns without a partner have, which are of no stretch."""
    full = {"cols": sum(s.rows.stop - s.rows.start for s in stretches) == sizes.rows}
    full["rows"] = sum(s.cols.stop - s.cols.start for s in stretches) == sizes.cols
    for r, mine in combine.split(fold, outputs):
        if kind_of(r).both_axes:
            mine[0].zero_()
        elif not kind_of(r).per_pair and not full[r.attrs[1]]:
            for t, nothing in zip(mine, make_empty_results(r, sizes), strict=True):
                t.copy_(nothing)


@functools.lru_cache(maxsize=1024)
def _drop_condition(fold: Fold, same: Expr) -> Fold:
    """The fold of one sequence; what would no longer depend on rows and columns both keeps the condition."""
    reductions = []
    for r in fold.reductions:
        args = constructors.substitute(r.args, {same: const(True)})
        still = kind_of(r).per_pair or (any(a.rows for a in args) and any(a.cols for a in args))
        reductions.append(constructors.rebuild(r, args) if still else r)
    return Fold(fold.leaves, tuple(reductions), fold.scales, exact=fold.exact)


def _find_stretches(rows: Any, cols: Any, short: int) -> tuple[Stretch, ...] | None:
    """The stretches of equal numbers; None where the numbers do not rise, differ by batch element or have no values."""
    if any(type(t) is not Tensor or t.numel() != t.shape[-1] for t in (rows, cols)):
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return None
    make = functools.partial(_make_stretches, rows.reshape(-1), cols.reshape(-1), short)
    return bounded_cache.compute_once(("stretches", rows, cols, short), make, rows.device)


def _make_stretches(rows: Tensor, cols: Tensor, short: int) -> tuple[Stretch, ...] | None:
    if bool((rows.diff() < 0).any()) or bool((cols.diff() < 0).any()):
        return None
    found: list[Stretch] = []
    sides: list[dict[int, slice]] = []
    for t in (rows, cols):
        numbers, counts = torch.unique_consecutive(t, return_counts=True)
        places = zip(numbers.tolist(), counts.cumsum(0).tolist(), counts.tolist(), strict=True)
        sides.append({n: slice(end - count, end) for n, end, count in places})
    for row, col in ((own, sides[1][n]) for n, own in sides[0].items() if n in sides[1]):
        own, last = Stretch(row, col), found[-1] if found else None
        if last is not None and _is_short(last, row, col, short):
            both = slice(last.rows.start, row.stop), slice(last.cols.start, col.stop)
            found[-1] = Stretch(*both, (*(last.parts or (last,)), own))
        else:
            found.append(own)
    return tuple(found)


def _is_short(last: Stretch, row: slice, col: slice, short: int) -> bool:
    """Whether a sequence joins the stretch that ends where it begins: both have at most ``short`` pairs."""
    adjacent = last.rows.stop == row.start and last.cols.stop == col.start
    return adjacent and (row.stop - last.rows.start) * (col.stop - last.cols.start) <= short
