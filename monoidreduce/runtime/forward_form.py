"""The form that a forward takes for the sake of its gradients: exact products, saved row gradients.

**Products of 16-bit vectors that are not rounded.** A forward in one kernel has its products in float32. A gradient
that reads them from a panel of bfloat16 divides by the forward's sum of exponentials, which must be that of the same
numbers: of exact ones, it would miss the largest weights of a peaked softmax by several per cent. So such a forward
rounds its products, unless its gradients, too, are written by products of our own, which have theirs in float32
(``engines/triton/panel/epilogue.py``). Which it will be is predicted here, and said in the fold (``Fold.exact``).
Gradients inherit it, gradients of gradients too, and whoever runs them obeys: where panels are the vendor's after all
they hold float32. A prediction that fails costs memory and time, and no digits.

**Gradients of rows that the forward saves** (``program/loss_and_gradient.py``). It pays where kernels run and pairs are
many: a product less in all, for the price of one vector per row that is held until the backward. Under a memory budget
the usual path is taken, and so it is by a backward that is itself to be differentiated. Targets that are data (labels
in any order) lie in every tile, so that no tile goes without a condition and a running maximum: they take the usual
path too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..engines import triton
from ..engines.common import matmul
from ..engines.common.evaluate import Sizes
from ..engines.panel.panel_program import as_program, split_into_loops
from ..errors import NoGradientError
from ..plan import settings
from ..program.compile import compile_program
from ..program.expression import Expr, topological
from ..program.gradient import FoldGradient
from ..program.loss_and_gradient import SavingFold, fold_saving_row_gradients
from ..program.lower import Fold, Lowered, Pass

MANY = 2**24  # pairs from which saved row gradients pay


def mark_exact_folds(program: Lowered, needed: frozenset[str], sizes: Sizes) -> Lowered:
    """The same program; its folds say which of them keep their products exact.

    ``needed``: the inputs whose gradients may be needed; those of vectors always may."""
    if not settings.kernels_run_on(sizes.device):
        return program
    letters = {letter: sizes.of(letter) > triton.WIDEST for p in program.passes for letter in p.fold.letters}
    if not any(letters.values()) or not triton.hardware.has_fast_epilogues(sizes.device):
        return program
    given = (needed, tuple(letters.items()), sizes.device, sizes.compute)
    return _mark_passes(program, tuple(_keeps_exact(p, *given) for p in program.passes))


@functools.lru_cache(maxsize=1024)
def _mark_passes(program: Lowered, exact: tuple[bool, ...]) -> Lowered:
    pairs = zip(program.passes, exact, strict=True)
    passes = tuple(replace(p, fold=replace(p.fold, exact=True)) if is_exact else p for p, is_exact in pairs)
    return replace(program, passes=passes) if any(exact) else program


@functools.lru_cache(maxsize=1024)
def _keeps_exact(p: Pass, needed: frozenset[str], letters: tuple, device: torch.device, compute: torch.dtype) -> bool:
    """Whether a fold's products stay exact: it is a softmax-weighted mean of vectors, or it is done in one kernel and
    its gradients are sums of weights that products of our own write."""
    fold, features = p.fold, {letter: triton.WIDEST + wide for letter, wide in letters}
    if any(r.attrs[0] == "soft" and any(a.feature is not None for a in r.args[1:]) for r in fold.reductions):
        return True  # such a forward never rounds its logits, so its gradients may not either
    if not triton.k_loop.takes_fold(fold, max([0, *(features[letter] for letter in fold.letters)]), narrow=True):
        return False
    pairs = zip(fold.leaves, p.feeds, strict=True)
    wanted = tuple(e.dtype == "float" and _may_need_gradient(feed, needed) for e, feed in pairs)
    try:
        passes = compile_program(FoldGradient(fold, wanted, (True,) * len(fold.outputs))).passes
        found = [loop for one in passes for loop in split_into_loops(as_program(one.fold))]
        sizes = Sizes(1, 1, (), features, device, compute)  # however many rows and columns
        return len(found) == 1 and triton.MemoryPlan(found[0], sizes, {torch.bfloat16}).has_epilogue()
    except (NoGradientError, triton.Unsupported):
        return False


def _may_need_gradient(feed: Expr, needed: frozenset[str]) -> bool:
    inputs = [e for e in topological([feed]) if e.op == "input"]
    return any(e.feature is not None or e.attrs[0] in needed for e in inputs)


def has_many_pairs(sizes: Sizes) -> bool:
    """Whether pairs are so many that it pays."""
    return math.prod(sizes.batch) * sizes.rows * sizes.cols >= MANY


def may_save_row_gradients(fold: Fold) -> bool:
    """Whether a forward may save what the gradients of its rows need: where it folds a logsumexp or sums numbers."""
    return any(r.attrs[0] in ("soft", "sum") and len(r.args) == 1 for r in fold.reductions)


def find_saving_fold(fold: Fold, leaves: Sequence[Any], sizes: Sizes, engine: str) -> SavingFold | None:
    """How a fold saves what its rows' gradients need, where that pays; in a dry run, as the real call would."""
    real = matmul.dry_run_sizes.get()
    sizes = sizes if real is None else real
    kernels = engine == "triton" or (sizes.device.type == "cuda" and (engine == "auto" or real is not None))
    if not kernels or not has_many_pairs(sizes) or fold.domain is not None:
        return None
    if settings.requested_budget() is not None or not settings.kernels_run_on(sizes.device):
        return None
    found = fold_saving_row_gradients(fold, tuple(isinstance(v, Tensor) and v.requires_grad for v in leaves))
    if found is None or (found.target is not None and any(e.op == "leaf" for e in topological([found.target]))):
        return None
    widths = [sizes.of(str(fold.leaves[m.place].feature)) for m in found.means]
    return found if min(widths) > triton.TINY and sum(widths) <= triton.WIDEST else None
