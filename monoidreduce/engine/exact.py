"""Products of 16-bit vectors that are not rounded: whose, and that gradients see the same ones.

A forward in one kernel has its products in float32. A gradient that reads them from a panel of bfloat16 divides by the
forward's sum of exponentials, which must be that of the same numbers: of exact ones, it would miss the largest weights
of a peaked softmax by several per cent. So such a forward rounds its products, unless its gradients, too, are written
by products of our own, which have theirs in float32 (``triton/wide/epilogue.py``).

Which it will be is predicted here, and said in the fold (``Fold.exact``). Gradients inherit it, gradients of gradients
too, and whoever runs them obeys: where panels are the vendor's after all they hold float32. A prediction that fails
costs memory and time, and no digits.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ..errors import NoGradientError
from ..program.expr import Expr, topological
from ..program.gradient import gradient
from ..program.lower import Lowered, Pass, lower
from . import panel
from .evaluate import Sizes
from .triton.spec import Unsupported
from .triton.text import deep
from .triton.wide import epilogue
from .triton.wide.room import Room
from .walks import as_program, walks


def marked(program: Lowered, numbers: frozenset[str], sizes: Sizes) -> Lowered:
    """A program whose folds say which of them keep their products exact.

    ``numbers``: the inputs that are Python numbers; every other one may ask for a gradient."""
    if not epilogue.on(sizes.device) or not any(panel.is_wide(p.fold, sizes) for p in program.passes):
        return program
    return _told(program, tuple(_stays(p, numbers, sizes) for p in program.passes))


@functools.lru_cache(maxsize=1024)
def _told(program: Lowered, stays: tuple[bool, ...]) -> Lowered:
    passes = (replace(p, fold=replace(p.fold, exact=e)) for p, e in zip(program.passes, stays, strict=True))
    return replace(program, passes=tuple(passes)) if any(stays) else program


def _stays(p: Pass, numbers: frozenset[str], sizes: Sizes) -> bool:
    """Whether a fold is done in one kernel, and its gradients are sums of weights that products of our own write."""
    fold = p.fold
    widths = [sizes.of(letter) for letter in fold.letters]
    if not deep.fits(fold, max([0, *widths]), narrow=True):
        return False
    moves = tuple(leaf.dtype == "float" and _is_tensor(feed, numbers) for leaf, feed in zip(fold.leaves, p.feeds, strict=True))
    try:
        *_, outputs = gradient(fold.pure, fold.leaves, moves, (True,) * len(fold.outputs))
        program = lower(tuple(e for e in outputs if e is not None)).having(True)
        (walk,) = (w for one in program.passes for w in walks(as_program(one.fold)))
        return Room(walk, sizes, {torch.bfloat16}).written()
    except (NoGradientError, Unsupported, ValueError):
        return False


def _is_tensor(feed: Expr, numbers: frozenset[str]) -> bool:
    return any(e.op == "input" and e.attrs[0] not in numbers for e in topological([feed]))
