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
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..engines import triton
from ..engines.common.evaluate import Sizes
from ..engines.panel.panel_program import as_program, split_into_loops
from ..errors import NoGradientError
from ..plan import settings
from ..program.compile import compile_program
from ..program.expression import Expr, topological
from ..program.gradient import FoldGradient
from ..program.lower import Lowered, Pass


def marked(program: Lowered, asks: frozenset[str], sizes: Sizes) -> Lowered:
    """A program whose folds say which of them keep their products exact.

    ``asks``: the inputs whose gradients may be asked for; those of vectors may always be."""
    if not settings.kernels_run_on(sizes.device):
        return program
    letters = {letter: sizes.of(letter) > triton.WIDEST for p in program.passes for letter in p.fold.letters}
    if not any(letters.values()) or not triton.hardware.has_fast_epilogues(sizes.device):
        return program
    given = (asks, tuple(letters.items()), sizes.device, sizes.compute)
    return _told(program, tuple(_stays(p, *given) for p in program.passes))


def asking(values: Mapping[str, Any]) -> frozenset[str]:
    """The values that ask for a gradient."""
    return frozenset(n for n, v in values.items() if isinstance(v, Tensor) and v.requires_grad)


@functools.lru_cache(maxsize=1024)
def _told(program: Lowered, stays: tuple[bool, ...]) -> Lowered:
    pairs = zip(program.passes, stays, strict=True)
    passes = tuple(replace(p, fold=replace(p.fold, exact=True)) if stay else p for p, stay in pairs)
    return replace(program, passes=passes) if any(stays) else program


@functools.lru_cache(maxsize=1024)
def _stays(p: Pass, asks: frozenset[str], letters: tuple, device: torch.device, compute: torch.dtype) -> bool:
    """Whether a fold's products stay exact: it is a softmax-weighted mean of vectors, or it is done in one kernel and
    its gradients are sums of weights that products of our own write."""
    fold, features = p.fold, {letter: triton.WIDEST + wide for letter, wide in letters}
    if any(r.attrs[0] == "soft" and any(a.feature is not None for a in r.args[1:]) for r in fold.reductions):
        return True  # such a forward never rounds its logits, so its gradients may not either
    if not triton.k_loop.takes_fold(fold, max([0, *(features[letter] for letter in fold.letters)]), narrow=True):
        return False
    wanted = tuple(e.dtype == "float" and _moves(f, asks) for e, f in zip(fold.leaves, p.feeds, strict=True))
    try:
        passes = compile_program(FoldGradient(fold, wanted, (True,) * len(fold.outputs))).passes
        found = [loop for one in passes for loop in split_into_loops(as_program(one.fold))]
        sizes = Sizes(1, 1, (), features, device, compute)  # however many rows and columns
        return len(found) == 1 and triton.MemoryPlan(found[0], sizes, {torch.bfloat16}).has_epilogue()
    except (NoGradientError, triton.Unsupported):
        return False


def _moves(feed: Expr, asks: frozenset[str]) -> bool:
    inputs = [e for e in topological([feed]) if e.op == "input"]
    return any(e.feature is not None or e.attrs[0] in asks for e in inputs)
