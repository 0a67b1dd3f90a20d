"""The backward of a whole program of one pass, as one program: what comes before and after the pass is pulled too.

Apart, every piece has a backward of its own, and what lies between is written and read again. Of a program the inputs
are leaves ``x0``, ``x1``, ..., the results of its pass ``P0``, ``P1``, ..., which the forward keeps, and the cotangents
of its outputs ``c0``, ``c1``, ....
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from .constructors import substitute
from .expression import Expr, node
from .loss_and_gradient import of_pass, pulled
from .lower import Lowered


def numbered(letter: str, exprs: Sequence[Expr]) -> tuple[Expr, ...]:
    """Leaves that stand for expressions."""
    return tuple(
        node("leaf", (), (f"{letter}{k}",), rows=e.rows, cols=e.cols, feature=e.feature, dtype=e.dtype)
        for k, e in enumerate(exprs)
    )


@functools.lru_cache(maxsize=4096)
def backward(
    forward: Lowered, inputs: tuple[Expr, ...], asked: tuple[bool, ...], given: tuple[bool, ...]
) -> tuple[Expr | None, ...]:
    """One gradient per input (None where not asked, or zero), given some outputs' cotangents.

    Raises NoGradientError where an expression has no symbolic derivative."""
    (one,) = forward.passes
    cotangents = numbered("c", forward.outputs)
    pairs = zip(forward.outputs, cotangents, given, strict=True)
    seeds = [(e, c) for e, c, there in pairs if there and e.dtype == "float"]
    wrt = [e for e, want in zip(inputs, asked, strict=True) if want]
    found = dict(zip(wrt, pulled(forward, seeds, wrt), strict=True))
    results = of_pass(one)
    replace = dict(zip(results, numbered("P", results), strict=True))
    for users, leaf in zip(one.results, replace.values(), strict=True):
        replace |= dict.fromkeys(users, leaf)
    replace |= dict(zip(inputs, numbered("x", inputs), strict=True))
    there = [e for e in inputs if found.get(e) is not None]
    made = dict(zip(there, substitute(tuple(g for e in there if (g := found[e]) is not None), replace), strict=True))
    return tuple(made.get(e) for e in inputs)
