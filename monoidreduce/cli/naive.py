"""The dense form of any op: the plain torch that one would write first, made from the traced program.

Every pair is computed and kept for autograd, as ``(q @ k.T).softmax(-1) @ v`` does; sums of vectors are products with
the matrix of pairs, so that it is as good as such code is. The arithmetic is done in the arguments' own type. It shares
neither passes nor gradients nor tiles with the engines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..engines.common.evaluate import Evaluator, Value
from ..op import Op
from ..program.constructors import Term, terms
from ..program.expression import Expr, topological
from ..runtime.bind import inputs_of
from ..runtime.call import formed


def dense(op: Op) -> Callable[..., Any]:
    """``op`` as one would write it in plain torch.

    >>> import monoidreduce as mr
    >>> @mr.op
    ... def mlp(x: mr.Row["d"], p: mr.Col["d"], q: mr.Col["n"]):
    ...     return mr.sum(torch.relu(x @ p) * q)
    >>> x, p, q = torch.randn(5, 4), torch.randn(7, 4), torch.randn(7, 3)
    >>> torch.allclose(dense(mlp)(x, p, q), torch.relu(x @ p.T) @ q)
    True
    """

    def call(*args: Any) -> Any:
        traced, bound, sizes, out = op._prepare(args, {})
        own = replace(sizes, compute=out or sizes.compute)
        evaluate = Plain(own, inputs_of(op.parameters, bound, sizes))
        return traced.pack(formed([evaluate(e) for e in traced.outputs], traced, own, out))

    return call


@dataclass
class Plain(Evaluator):
    """Evaluates a traced program densely; reductions of vectors by products of matrices where they are such."""

    def __call__(self, e: Expr) -> Value:
        for n in topological([e], stop=lambda x: x in self.memo or _parts(x) is not None):
            if n not in self.memo:
                found = _parts(n)
                self.memo[n] = self._node(n) if found is None else self._product(n, found)
        return self.memo[e]

    def _product(self, e: Expr, found: list[list[Term]]) -> list[Tensor]:
        kind, over, _ = e.attrs
        if kind == "sum":
            return [self._summed(found[0], None, over, e.args[0])]
        log_total, weight = self._softmax(e.args[0], over)
        return [log_total, *(self._summed(p, weight, over, v) for p, v in zip(found, e.args[1:], strict=True))]

    def _softmax(self, logit: Expr, over: str) -> tuple[Tensor, Tensor]:
        s = self._whole(logit)
        dim = -1 if over == "cols" else -2
        if not s.shape[dim]:
            shape = list(s.shape)
            shape[dim] = 1
            return s.new_full(shape, -math.inf), s
        blind = (s == -math.inf).all(dim, keepdim=True)
        if not blind.any():
            return torch.logsumexp(s, dim, keepdim=True), torch.softmax(s, dim)
        safe = torch.where(blind, 0.0, s)
        log_total = torch.where(blind, -math.inf, torch.logsumexp(safe, dim, keepdim=True))
        return log_total, torch.where(blind, 0.0, torch.softmax(safe, dim))

    def _whole(self, e: Expr) -> Tensor:
        """A number per pair with all its rows and columns."""
        value = self._tensor(self.raised(self(e), e), e)
        return value.expand(*value.shape[:-2], self.sizes.rows, self.sizes.cols)

    def _summed(self, found: list[Term], weight: Tensor | None, over: str, vector: Expr) -> Tensor:
        """Σ number × row vector × column vector, over one side: a product of matrices each."""
        total: Any = 0.0
        for number, row, col in found:
            outer, inner = (row, col) if over == "cols" else (col, row)
            k = self._whole(number) if weight is None else weight * self.raised(self(number), number)
            if inner is None:
                part = k.sum(-1 if over == "cols" else -2, keepdim=True).unsqueeze(-1)
            else:
                vectors = self.raised(self(inner), inner).squeeze(-3 if over == "cols" else -2)  # [..., folded, f]
                product = (k if over == "cols" else k.mT) @ vectors
                part = product.unsqueeze(-2 if over == "cols" else -3)
            total = total + (part if outer is None else part * self.raised(self(outer), outer))
        return total.expand(*total.shape[:-1], self.sizes.of(str(vector.feature)))


def _parts(e: Expr) -> list[list[Term]] | None:
    """The vectors of a reduction over the pairs as products, one list for each; None for any other expression."""
    if e.op != "reduce" or e.attrs[0] not in ("sum", "soft"):
        return None
    values = e.args if e.attrs[0] == "sum" else e.args[1:]
    on_pairs = any(a.rows for a in e.args) and any(a.cols for a in e.args)
    if not on_pairs or not values or any(v.feature is None or v.dtype != "float" for v in values):
        return None
    found = [terms(v) for v in values]
    over_rows = e.attrs[1] == "rows"
    for parts in found:
        if parts is None or any(_one_sided((u if over_rows else v), over_rows) for _, u, v in parts):
            return None
    return [parts for parts in found if parts is not None]


def _one_sided(inner: Expr | None, over_rows: bool) -> bool:
    """Whether the vector that should be folded does not live on the folded side."""
    return inner is not None and not (inner.rows if over_rows else inner.cols)
