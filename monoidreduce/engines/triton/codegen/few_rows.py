"""Folds of few kept indices against many folded ones, as in decoding: which they are, and their kernels.

They are bound by reading the folded axis. One loop visits every tile with masks, whose cost is hidden by the reads, so
that all reads are pipelined; the softmax keeps a running maximum. Which tiles are visited is found in the
kernel, from limits such as ``col_index < lengths``: lengths change in every step of a decoder, and a table of ranges
would be computed anew. All splits share what is visited, however little of the axis that is.

A batch dimension along which no folded leaf varies (the query heads that share keys) may be part of the kept axis, so
that the folded axis is read once for all of them: kept index k is then row k % period of group k // period, and each
kept leaf has a stride for both.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from ....plan.schedule import FEW_ROWS
from ....program.constructors import substitute
from ....program.expression import Expr, const, node, topological
from ....program.lower import Fold, is_idle
from ....program.philox import DRAWS
from ....reductions import FastForm, all_have
from . import kernel_spec
from .expressions import ExpressionWriter
from .kernel_spec import TINY, WIDEST, Spec

_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


class Limit(NamedTuple):
    """A condition on a folded index that hides all pairs beyond it: it is less (or more) than ``bound``, or equal."""

    op: str
    bound: Expr


@functools.lru_cache(maxsize=1024)
def find_limits(fold: Fold, over: str) -> tuple[Limit, ...] | None:
    """The limits that a fold's conditions are made of; None where some condition is not."""
    found: list[Limit] = []
    for c in kernel_spec.whole_tile_conditions(fold):
        limits = [_match(atom, over) for atom in _split_condition(c)]
        if None in limits or not all(is_idle(r, {c: const(False)}) for r in fold.reductions):
            return None
        found += [limit for limit in limits if limit is not None]
    return tuple(dict.fromkeys(found))


def _split_condition(condition: Expr) -> list[Expr]:
    """The conditions that all must hold."""
    if condition.op != "logical_and":
        return [condition]
    return [atom for a in condition.args for atom in _split_condition(a)]


def _match(c: Expr, over: str) -> Limit | None:
    """A comparison of a folded index with an integer that does not vary along the folded axis."""
    if c.op not in _MIRRORED:
        return None
    index = f"{over[:3]}_index"
    for op, (j, bound) in ((c.op, c.args), (_MIRRORED[c.op], c.args[::-1])):
        if j.op == index and bound.dtype == "int" and not (bound.cols if over == "cols" else bound.rows):
            return Limit(op, bound)
    return None


def write_tile_range(v: ExpressionWriter, size: str = "folded_size", limited: bool = True) -> list[str]:
    """Lines that say which tiles this program instance visits: from ``begin`` to before ``end``.

    ``size``: how many folded indices there are to visit; ``limited``: whether limits of the folded index count."""
    spec = v.spec
    limits = (find_limits(spec.fold, spec.over) or ()) if limited else ()
    if not limits:
        lines = ["first = 0", f"visited = tl.cdiv({size}, FOLDED)"]
    else:
        lines = ["# the folded indices that some kept index sees", "first_at = 0", f"last_at = {size}"]
        for op, bound in limits:
            value = f"{v.number(bound)} + tl.zeros([KEPT, 1], tl.int64)"
            if op in ("lt", "le"):
                most = f"tl.max(tl.where(kept_in[:, None], {value}, 0))"
                lines.append(f"last_at = tl.minimum(last_at, {most}{' + 1' if op == 'le' else ''})")
            else:
                least = f"tl.min(tl.where(kept_in[:, None], {value}, {size}))"
                lines.append(f"first_at = tl.maximum(first_at, {least}{' + 1' if op == 'gt' else ''})")
        lines += [
            "first = (first_at // FOLDED).to(tl.int32)",
            "visited = tl.maximum(tl.cdiv(tl.maximum(last_at, 0), FOLDED).to(tl.int32) - first, 0)",
        ]
    if not spec.split:
        return [*lines, "begin = first", "end = first + visited"]
    share = "first + visited // parts * {0} + tl.minimum({0}, visited % parts)"
    return [*lines, f"begin = {share.format('part')}", f"end = {share.format('(part + 1)')}"]


def join_loop(tile: list[str]) -> list[str]:
    """The loop over all visited tiles; ``tile``: what one adds to the accumulators, with masks."""
    return [
        "for t in range(begin, end):",
        "    start = t * FOLDED",
        "    folded_at = start + tl.arange(0, FOLDED)",
        "    folded_in = within(folded_at, folded_size, RAGGED)",
        *(f"    {line}" for line in tile),
    ]


def vary_by_row(fold: Fold, over: str, leaves: list[Expr]) -> Fold:
    """The same fold with these numbers of batch elements given per kept index."""
    axes = dict(rows=over == "cols", cols=over == "rows")
    changed = {e: node(e.op, e.args, e.attrs, **axes, feature=e.feature, dtype=e.dtype) for e in leaves}
    reductions, scales = substitute(fold.reductions, changed), substitute(fold.scales, changed)
    return Fold(tuple(changed.get(e, e) for e in fold.leaves), reductions, scales, fold.raised, fold.exact)


# Which folds they are, and a batch dimension as rows

LEAST = 256  # folded indices from which on it counts
_MOST_ROWS = 32  # of a batch element, from which on tiles of them are full enough


@dataclass(frozen=True)
class FewRows:
    """A fold as a kernel of few kept indices runs it."""

    spec: Spec
    batch: tuple[int, ...]
    period: int  # rows of a group, where a batch dimension is part of the kept axis; 0 elsewhere
    kept: int  # kept indices, those of all groups
    added_batch: bool = False  # the groups were the only batch dimension: one of size 1 was added

    def regroup(self, values: Mapping[Expr, Any]) -> dict[Expr, Any]:
        """The leaves with the batch dimensions of this fold: kept ones ``[*batch, groups, rows(, features)]``."""
        if not self.period:
            return dict(values)
        return {e: self._regroup(e, v) for e, v in zip(self.spec.fold.leaves, values.values(), strict=True)}

    def _regroup(self, e: Expr, v: Any) -> Any:
        if not isinstance(v, Tensor):
            return v
        v = v.unsqueeze(0) if self.added_batch else v
        at = len(self.batch)
        if not self.spec.keeps(e):
            return v.select(at, 0)
        return v if v.dim() > at + 1 else v.unsqueeze(-1)  # of each group, where it was of each batch element


def find(spec: Spec, values: Mapping[Expr, Any], batch: tuple[int, ...], lengths: tuple[int, int]) -> FewRows | None:
    """A fold as few kept indices; None where they are many, or where it has no such kernel.

    ``values``: tensors ``[*batch, length(, features)]``; ``lengths``: of the kept and the folded axis."""
    kept, folded = lengths
    if folded < LEAST or not batch[-1] or not _has_kernel(spec):
        return None
    groups = batch[-1]
    shared = groups > 1 and all(is_shared(v, len(batch) - 1) for e, v in values.items() if spec.folds(e))
    if kept > _MOST_ROWS and (not shared or kept * groups > FEW_ROWS):
        return None
    spec = replace(spec, few_rows=True, guess=False, bounds=False, precomputed_shifts=False)
    if not shared:
        return FewRows(spec, batch, 0, kept)
    own = [
        e
        for e, v in values.items()
        if isinstance(v, Tensor) and not e.rows and not e.cols and not is_shared(v, len(batch) - 1)
    ]
    fold = vary_by_row(spec.fold, spec.over, own)
    rest = batch[:-1] or (1,)
    spec = replace(spec, fold=fold, grouped=True, rank=len(rest))
    return FewRows(spec, rest, kept, groups * kept, added_batch=len(batch) == 1)


def is_shared(v: Any, at: int) -> bool:
    """True for a number, or a tensor that does not vary along a dimension."""
    return not isinstance(v, Tensor) or v.stride(at) == 0


def _has_kernel(spec: Spec) -> bool:
    """True when a fold is sums and softmaxes of 16-bit vectors, hidden by nothing but limits of the folded index."""
    if spec.narrow is None or spec.k_loop or spec.pieces or any(spec.padded_widths) or spec.fold.tables:
        return False
    under = topological([*spec.fold.reductions, *spec.fold.scales])
    widths = [spec.width(e.feature) for e in under if e.op == "leaf" and e.feature is not None]
    plain = all_have(FastForm.FEW_ROWS, spec.fold.reductions) and not any(e.op in DRAWS for e in under)
    fits = bool(widths) and min(widths) > TINY and max(widths) <= WIDEST
    return plain and fits and find_limits(spec.fold, spec.over) is not None
