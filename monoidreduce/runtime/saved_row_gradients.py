"""Gradients of rows that the forward keeps (``program/loss_and_gradient.py``): whether it pays.

It does where kernels run and pairs are many: a product less in all, for the price of one vector per row that is held
until the backward. Under a memory budget the usual path is taken, and so it is by a backward that is itself to be
differentiated. Targets that are data (labels in any order) lie in every tile, so that no tile goes without a condition
and a running maximum: they take the usual path too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..engines import triton
from ..engines.common import matmul
from ..engines.common.evaluate import Sizes
from ..plan import budget, settings
from ..program.expression import topological
from ..program.loss_and_gradient import SavingFold, fold_saving_row_gradients
from ..program.lower import Fold

MANY = 2**24  # pairs


def has_many_pairs(sizes: Sizes) -> bool:
    """Whether pairs are so many that it pays."""
    return math.prod(sizes.batch) * sizes.rows * sizes.cols >= MANY


def may_keep(fold: Fold) -> bool:
    """Whether a forward may keep what the gradients of its rows need: where it folds a logsumexp or sums numbers."""
    return any(r.attrs[0] in ("soft", "sum") and len(r.args) == 1 for r in fold.reductions)


def find_form(fold: Fold, leaves: Sequence[Any], sizes: Sizes, engine: str) -> SavingFold | None:
    """How a fold keeps what its rows' gradients need, where that pays; in a dry run, as the real call would."""
    real = matmul.dry_run_sizes.get()
    sizes = sizes if real is None else real
    kernels = engine == "triton" or (sizes.device.type == "cuda" and (engine == "auto" or real is not None))
    if not kernels or not has_many_pairs(sizes) or fold.domain is not None:
        return None
    if budget.requested() is not None or not settings.kernels_run_on(sizes.device):
        return None
    found = fold_saving_row_gradients(fold, tuple(isinstance(v, Tensor) and v.requires_grad for v in leaves))
    if found is None or (found.target is not None and any(e.op == "leaf" for e in topological([found.target]))):
        return None
    widths = [sizes.of(str(fold.leaves[m.place].feature)) for m in found.means]
    return found if min(widths) > triton.TINY and sum(widths) <= triton.WIDEST else None
