"""The schedule ``dense``: a program on whole matrices of pairs, differentiated by autograd, for cases that are small.

It runs the program in normal form, as all engines do, so that sums of vectors are matrix products and never vectors
per pair. Nothing is recomputed in the backward: autograd keeps what it needs, a few numbers per pair. Whether that is
worth its memory is the planner's question; ``reference.py`` is the oracle that this is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..program.build import ONE
from ..program.contract import Contraction, contractions
from ..program.expr import Expr, topological
from ..program.lower import Lowered
from ..program.normal import is_pass
from .evaluate import Evaluator, Sizes, from_layout


def has_form(program: Lowered) -> bool:
    """Whether a program can be run whole: not where a pick scatters, or has several places for one index."""
    picks = [e for e in topological(program.outputs) if e.op == "reduce" and e.attrs[0] == "pick"]
    return all(r.args[0].feature is None and r.attrs[1].startswith(r.attrs[2][0]) for r in picks)


def run(program: Lowered, inputs: Mapping[str, Any], sizes: Sizes) -> list[Any]:
    """The program's outputs as users hold them: differentiable, as often as one likes."""
    evaluate = _Whole(sizes, inputs)
    return [from_layout(evaluate(e), e) for e in program.outputs]


class _Whole(Evaluator):
    """Evaluates reductions of pairs from their parts: numbers per pair, and vectors of one side."""

    def __call__(self, e: Expr) -> Any:
        for n in topological([e], stop=lambda n: n in self.memo or is_pass(n)):
            if n not in self.memo:
                self.memo[n] = self._node(n)
        return self.memo[e]

    def _node(self, e: Expr) -> Any:
        if not is_pass(e):
            return super()._node(e)
        found = _FORMS.get(e.attrs[0])
        if found is not None:
            return found(self, e)
        return self._reduce(e, [self._tensor(self.raised(self(a), a), a) for a in e.args])

    def number(self, e: Expr) -> Tensor:
        """A number per pair, as a whole matrix."""
        value = self._tensor(self.raised(self(e), e), e)
        return value.expand(*value.shape[:-2], self.sizes.rows, self.sizes.cols)

    def folded(self, parts: tuple[Contraction, ...], over: str, weight: Tensor | None = None) -> Tensor:
        """Σ of contractions, each times ``weight``, with the folded axis kept at size 1."""
        found = [self._contracted(c, over, weight) for c in parts]
        total = found[0]
        for part in found[1:]:
            total = total + part
        return total

    def _contracted(self, c: Contraction, over: str, weight: Tensor | None) -> Tensor:
        dim = -1 if over == "cols" else -2
        if c.walk or c.minus is not None:
            value = self.raised(self(c.weight), c.weight)
            if c.minus is not None and c.vector is not None:
                value = self.number(c.weight).unsqueeze(-1) * (self._side(c.vector) - self._side(c.minus))
            shape = (*value.shape[:-3], self.sizes.rows, self.sizes.cols, value.shape[-1])
            value = value.expand(shape)
            return (value if weight is None else weight.unsqueeze(-1) * value).sum(dim - 1, keepdim=True)
        plain = c.weight is ONE and weight is not None
        number = weight if plain else self.number(c.weight) if weight is None else weight * self.number(c.weight)
        assert number is not None
        if c.vector is None:
            return number.sum(dim, keepdim=True)
        vector = self._side(c.vector)
        if over == "cols":
            return (number @ vector.squeeze(-3)).unsqueeze(-2)
        return (number.mT @ vector.squeeze(-2)).unsqueeze(-3)

    def _side(self, e: Expr) -> Tensor:
        """A vector of one side with every index of it."""
        value = self._tensor(self.raised(self(e), e), e)
        rows, cols = self.sizes.rows if e.rows else 1, self.sizes.cols if e.cols else 1
        return value.expand(*value.shape[:-3], rows, cols, value.shape[-1])


def _sum(of: _Whole, e: Expr) -> list[Tensor]:
    value = e.args[0]
    if value.dtype != "float":
        return of._reduce(e, [of._tensor(of.raised(of(value), value), value)])
    return [of.folded(contractions(value, e.attrs[1]), e.attrs[1])]


def _soft(of: _Whole, e: Expr) -> list[Tensor]:
    """As the eager engine folds it: a peak that gradients do not see, guarded once per row; an empty row means 0."""
    over = e.attrs[1]
    dim = -1 if over == "cols" else -2
    logit = of.number(e.args[0])
    if not logit.shape[dim]:
        peak = logit.detach().sum(dim, keepdim=True)
    else:
        peak = logit.detach().amax(dim, keepdim=True)
    safe = torch.where(peak.isinf(), 0.0, peak)
    weight = (logit - safe).exp_()
    total = weight.sum(dim, keepdim=True)
    blind = total == 0
    seen = torch.where(blind, 1.0, total)
    log_total = torch.where(blind, -math.inf, seen.log())
    means = []
    for value in e.args[1:]:
        mean = of.folded(contractions(value, over), over, weight)
        means.append(mean / (seen if value.feature is None else seen.unsqueeze(-1)))
    return [log_total + safe, *means, log_total, safe]


def _pick(of: _Whole, e: Expr) -> list[Tensor]:
    """The number (and the vector) at one place of the folded axis; 0 where that is outside."""
    over = e.attrs[1]
    target, value, vector = e.args
    dim = -1 if over == "cols" else -2
    length = of.sizes.cols if over == "cols" else of.sizes.rows
    place = of._tensor(of(target), target)
    kept = of.sizes.rows if over == "cols" else of.sizes.cols
    shape = (*place.shape[:-2], kept, 1) if over == "cols" else (*place.shape[:-2], 1, kept)
    place = place.expand(shape)
    inside = (place >= 0) & (place < length)
    if not length:
        number = of.number(value).sum(dim, keepdim=True)
        return [number if vector.feature is None else number.unsqueeze(-1) * of._side(vector).sum(-1 + dim, True)]
    safe = place.clamp(0, length - 1)
    number = of.number(value)
    batch = torch.broadcast_shapes(number.shape[:-2], safe.shape[:-2])
    number = number.expand(*batch, *number.shape[-2:]).gather(dim, safe.expand(*batch, *safe.shape[-2:]))
    number = torch.where(inside, number, 0.0)
    if vector is ONE:
        return [number]
    if vector.feature is None:
        other = of.number(vector)
        other = other.expand(*batch, *other.shape[-2:]).gather(dim, safe.expand(*batch, *safe.shape[-2:]))
        return [torch.where(inside, number * other, 0.0)]
    found = of._side(vector).movedim(dim - 1, -2).squeeze(-3)  # [*batch, length, d]
    found = found.expand(*batch, *found.shape[-2:])
    flat = safe.expand(*batch, *safe.shape[-2:]).reshape(*batch, kept, 1).expand(*batch, kept, found.shape[-1])
    found = found.gather(-2, flat).unsqueeze(-2 if over == "cols" else -3)
    return [torch.where(inside.unsqueeze(-1), number.unsqueeze(-1) * found, 0.0)]


_FORMS: dict[str, Callable[[_Whole, Expr], list[Tensor]]] = {"sum": _sum, "soft": _soft, "pick": _pick}
