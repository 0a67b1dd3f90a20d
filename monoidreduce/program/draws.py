"""Random numbers per pair: functions of (seed, batch, i, j), the same for every tile, engine and recomputation."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ArgumentError, shown
from . import constructors, philox
from .expression import Expr, index
from .symbol import Symbol, check_call, expr_of


@check_call
def uniform(seed: Any) -> torch.Tensor:
    """A uniform number in (0, 1) per pair, from Philox on (seed, batch, i, j).

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def fair(x: mr.Row, y: mr.Col):
    ...     return mr.mean(mr.uniform(seed=7) < 0.5)
    >>> fair(torch.zeros(1), torch.zeros(10_000)).round(decimals=1)
    tensor([0.5000])
    """
    return _draw("uniform", seed)


def _seed_key(seed: Any) -> Expr:
    key = expr_of(seed)
    if key.dtype != "int" or (key.op == "const" and not -(2**63) <= key.const < 2**63) or key.rows or key.cols:
        raise ArgumentError(detail=f"a seed was given as {shown(seed)}", fix="Give one whole number of 64 bits")
    return key


def _draw(name: str, seed: Any) -> Any:
    return Symbol(constructors.apply(name, _seed_key(seed), index("batch"), index("row"), index("col")))


@check_call
def gumbel(seed: Any) -> torch.Tensor:
    """A standard Gumbel number per pair, the same for every tile, engine and recomputation.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def drawn(x: mr.Row, y: mr.Col):
    ...     return mr.argmax(x * y + mr.gumbel(7)) == mr.sample(x * y, 7)
    >>> drawn(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0]))
    tensor([True, True])
    """
    return _draw("gumbel", seed)


@check_call
def dropout(x: Any, p: Any, seed: Any) -> torch.Tensor:
    """x with probability 1 - p, scaled by 1 / (1 - p), else 0; the mask depends on (seed, batch, i, j) alone.

    p is rounded to a multiple of 2**-15, other than 0 and 1 unless it is one of them: so the mean is kept.

    >>> import torch, monoidreduce as mr
    >>> @mr.op
    ... def kept(x: mr.Row, y: mr.Col):
    ...     return mr.sum(mr.dropout(x * y, 0.5, seed=7))
    >>> kept(torch.zeros(2), torch.ones(3))
    tensor([0., 0.])
    """
    p = float(p)  # a fixed choice: it is checked here, and a new one is a new trace
    if not 0 <= p <= 1:
        raise ArgumentError(detail=f"dropout was given p = {p}", fix="A probability lies between 0 and 1")
    least = min(max(round(p * philox.COINS), int(p > 0)), philox.COINS - int(p < 1))
    kept, scale = _draw_coin(seed) >= least, 1 / (1 - least / philox.COINS) if p < 1 else 0.0
    vector = isinstance(x, Symbol) and x.expr.feature is not None
    return x * torch.where(kept, scale, 0.0) if vector else torch.where(kept, x * scale, 0.0)


def _draw_coin(seed: Any) -> Any:
    """15 bits per pair. Rows have words of their own in each batch element, columns the same in all of them."""
    key, col = _seed_key(seed), index("col")
    row = constructors.apply("word", key, index("batch"), index("row"))
    return Symbol(constructors.apply("coin", row, constructors.apply("mark", key, col), col))
