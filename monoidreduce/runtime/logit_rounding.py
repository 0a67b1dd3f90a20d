"""Products of 16-bit vectors that are not rounded: whose, and that gradients see the same ones.

A forward in one kernel has its products in float32. A gradient that reads them from a panel of bfloat16 divides by the
forward's sum of exponentials, which must be that of the same numbers: of exact ones, it would miss the largest weights
of a peaked softmax by several per cent. So such a forward rounds its products, unless its gradients, too, are written
by products of our own, which have theirs in float32 (``engines/triton/panel/epilogue.py``).

Which it will be is predicted here, and said in the fold (``Fold.exact``). Gradients inherit it, gradients of gradients
too, and whoever runs them obeys: where panels are the vendor's after all they hold float32. A prediction that fails
costs memory and time, and no digits.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ..engines import triton
from ..engines.common.evaluate import Sizes
from ..engines.panel.panel_program import as_program, split_into_loops
from ..errors import NoGradientError
from ..plan import settings
from ..program.compile import compile_program
from ..program.expression import Expr, topological
from ..program.gradient import FoldGradient
from ..program.lower import Lowered, Pass


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
