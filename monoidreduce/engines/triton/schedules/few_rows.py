"""Folds of few kept indices against many folded ones (decoding): which they are, and a batch dimension as rows.

What bounds such a fold is reading the folded axis. Where no folded leaf varies along the last batch dimension (query
heads that share keys), that dimension joins the kept axis, so that the folded axis is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ....plan.tiles import FEW_ROWS
from ....program.expression import Expr, topological
from ....program.philox import DRAWS
from ..codegen import few_rows
from ..codegen.kernel_spec import TINY, WIDEST, Spec

LEAST = 256  # folded indices from which on it counts
_KINDS = ("soft", "sum")
_MOST_ROWS = 32  # of a batch element, from which on tiles of them are full enough


@dataclass(frozen=True)
class FewRows:
    """A fold as a kernel of few kept indices runs it."""

    spec: Spec
    batch: tuple[int, ...]
    period: int  # rows of a group, where a batch dimension is part of the kept axis; 0 elsewhere
    kept: int  # kept indices, those of all groups
    alone: bool = False  # whether the groups were the only batch dimension

    def regroup(self, values: Mapping[Expr, Any]) -> dict[Expr, Any]:
        """The leaves with the batch dimensions of this fold: kept ones ``[*batch, groups, rows(, features)]``."""
        if not self.period:
            return dict(values)
        return {e: self._regroup(e, v) for e, v in zip(self.spec.fold.leaves, values.values(), strict=True)}

    def _regroup(self, e: Expr, v: Any) -> Any:
        if not isinstance(v, Tensor):
            return v
        v = v.unsqueeze(0) if self.alone else v
        at = len(self.batch)
        if not self.spec.keeps(e):
            return v.select(at, 0)
        return v if v.dim() > at + 1 else v.unsqueeze(-1)  # of each group, where it was of each batch element


def find(spec: Spec, values: Mapping[Expr, Any], batch: tuple[int, ...], lengths: tuple[int, int]) -> FewRows | None:
    """A fold as few kept indices; None where they are many, or where it has no such kernel.

    ``values``: tensors ``[*batch, length(, features)]``; ``lengths``: of the kept and the folded axis."""
    kept, folded = lengths
    if not 0 < kept <= FEW_ROWS or folded < LEAST or not batch[-1] or not _has_kernel(spec):
        return None
    groups = batch[-1]
    shared = groups > 1 and all(_is_shared(v, len(batch) - 1) for e, v in values.items() if spec.folds(e))
    if kept > _MOST_ROWS and (not shared or kept * groups > FEW_ROWS):
        return None
    spec = replace(spec, few=True, guess=False, bounds=False, join=False)
    if not shared:
        return FewRows(spec, batch, 0, kept)
    own = [
        e
        for e, v in values.items()
        if isinstance(v, Tensor) and not e.rows and not e.cols and not _is_shared(v, len(batch) - 1)
    ]
    fold = few_rows.vary_by_row(spec.fold, spec.over, own)
    rest = batch[:-1] or (1,)
    spec = replace(spec, fold=fold, grouped=True, rank=len(rest))
    return FewRows(spec, rest, kept, groups * kept, alone=len(batch) == 1)


def _is_shared(v: Any, at: int) -> bool:
    return not isinstance(v, Tensor) or v.stride(at) == 0


def _has_kernel(spec: Spec) -> bool:
    """Whether a fold is sums and softmaxes of 16-bit vectors, hidden by nothing but limits of the folded index."""
    if spec.narrow is None or spec.deep or spec.pieces or any(spec.rooms) or spec.fold.tables:
        return False
    under = topological([*spec.fold.reductions, *spec.fold.scales])
    widths = [spec.width(e.feature) for e in under if e.op == "leaf" and e.feature is not None]
    plain = all(r.attrs[0] in _KINDS for r in spec.fold.reductions) and not any(e.op in DRAWS for e in under)
    fits = bool(widths) and min(widths) > TINY and max(widths) <= WIDEST
    return plain and fits and few_rows.find_limits(spec.fold, spec.over) is not None
