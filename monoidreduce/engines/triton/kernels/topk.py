"""The k best of each row by kernels: of a panel, and of a product of matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ....errors import BudgetError
from ....plan import budget
from ....program.constructors import ONE
from ....program.expression import Expr
from ....program.lower import Fold
from ....reductions import kind_of
from ...common import matmul
from ...common.evaluate import Sizes
from ..launch import jit_module, replay
from . import topk_rows


def tidy(r: Expr, values: Tensor, places: Tensor) -> list[Tensor]:
    """A list as users get it: best first, and no place where there was nothing."""
    merged = kind_of(r).merge(r.attrs[2], [values.unsqueeze(0), places.unsqueeze(0)])
    values, places = (t.squeeze(0) for t in merged)
    worst = float("-inf") if r.attrs[2][1] else float("inf")
    return [values, places.masked_fill(values == worst, -1)]


# Of a panel -----------------------------------------------------------------------------------------------------


def of_panel(panel: Tensor, r: Expr, compute: torch.dtype) -> list[Tensor]:
    """The best of each row of a panel, as the eager engine keeps them."""
    k, largest = r.attrs[2]
    return topk_rows.best(panel, min(k, panel.shape[1]), largest, compute)


def factors(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> tuple[Tensor, Tensor] | None:
    """Rows and columns, where a fold is the k best products of each row with all columns and nothing else."""
    places = _places(fold, sizes)
    if places is None:
        return None
    x, y = (leaves[k] for k in places)
    return (x, y) if x.dtype == y.dtype and x.dtype.is_floating_point else None


def straight(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> Callable[[Sequence[Any]], list[Tensor]] | None:
    """What finds them for leaves like these, if a fold is that: for calls whose host would take longer than they."""
    places = _places(fold, sizes)
    if places is None or factors(fold, leaves, sizes) is None:
        return None
    return _Straight(fold, places, sizes)


class _Straight:
    """The k best products for leaves of one kind: the first call is recorded, later ones are replayed, in as many
    panels as there was memory for then.

    ``replays``: by whether rows and columns are the same tensor; None: it cannot be recorded."""

    def __init__(self, fold: Fold, places: tuple[int, int], sizes: Sizes):
        self.fold, self.places, self.sizes = fold, places, sizes
        self.replays: dict[bool, Any] = {}

    def __call__(self, leaves: Sequence[Any]) -> list[Tensor]:
        x, y = (leaves[k] for k in self.places)
        same = x.data_ptr() == y.data_ptr()
        made = self.replays.get(same, self)
        if made is self:
            return self._met(x, y, same)
        found = None if made is None else made.run(x, y)
        return of_product(self.fold, x, y, self.sizes) if found is None else list(found)

    def _met(self, x: Tensor, y: Tensor, same: bool) -> list[Tensor]:
        run = functools.partial(of_product, self.fold, sizes=self.sizes)
        if not jit_module.repeats(self.sizes.device):
            return run(x, y)
        found, self.replays[same], _ = replay.record(run, (x, y), self.sizes.device)
        return found


def _places(fold: Fold, sizes: Sizes) -> tuple[int, int] | None:
    (r, *others), product = fold.reductions, fold.reductions[0].args[0]
    if others or r.attrs[:2] != ("topk", "cols") or product.op != "dot" or sizes.batch or not sizes.rows:
        return None
    if any(e.op != "leaf" or e.is_pair for e in product.args) or fold.scaled[0][1] is not ONE:
        return None
    x, y = product.args if product.args[0].rows else product.args[::-1]
    return fold.leaves.index(x), fold.leaves.index(y)


def of_product(fold: Fold, x: Tensor, y: Tensor, sizes: Sizes) -> list[Tensor]:
    """The k best products of each row with all columns, some rows at a time.

    What a panel does, without its book-keeping, which takes longer than the work where rows are few.
    """
    r = fold.reductions[0]
    kind = torch.bfloat16 if x.dtype is torch.bfloat16 else sizes.compute
    held = sizes.compute if fold.raised else kind  # as the caller will hold them, where nothing is computed of them
    row = sizes.cols * kind.itemsize
    room = budget.allowed_bytes(lambda: matmul.free_memory(sizes.device), row)
    if room < row:
        raise BudgetError(given=budget.format_floor(room), least=budget.format_ceil(row))
    step = min(sizes.rows, room // row)
    panel = torch.empty(step, sizes.cols, dtype=kind, device=sizes.device)
    if step == sizes.rows:
        matmul.multiply_into_panel(panel, x, y)
        return of_panel(panel, r, held)
    parts = []
    for at in range(0, sizes.rows, step):
        some = x[at : at + step]
        matmul.multiply_into_panel(panel[: len(some)], some, y)
        parts.append(of_panel(panel[: len(some)], r, held))
    return [torch.cat(t) for t in zip(*parts, strict=True)]
