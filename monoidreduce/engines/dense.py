"""The schedule ``dense``: a program on whole matrices of pairs, differentiated by autograd, for cases that are small.

It runs the program in normal form, as all engines do, so that sums of vectors are matrix products and never vectors
per pair, written once as a straight line of torch calls (``torch_code.py``). Nothing is recomputed in the backward:
autograd keeps what it needs, a few numbers per pair. Whether that is worth its memory is the planner's question;
``reference.py`` is the oracle that this is compared with.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..program.constructors import ONE
from ..program.contract import Contraction, contractions
from ..program.expression import Expr, topological
from ..program.lower import Lowered
from ..program.normal_form import is_pass
from .common import matmul
from .common.axis_reductions import REDUCERS
from .common.batching import broadcast
from .common.evaluate import Sizes
from .common.torch_code import Script, Writer, inputs


def has_form(program: Lowered) -> bool:
    """Whether a program can be run whole: not where a pick scatters, or has several places for one index."""
    picks = [e for e in topological(program.outputs) if e.op == "reduce" and e.attrs[0] == "pick"]
    return all(r.args[0].feature is None and r.attrs[1].startswith(r.attrs[2][0]) for r in picks)


@functools.lru_cache(maxsize=1024)
def whole(program: Lowered, numbers: frozenset[str] = frozenset()) -> Script:
    """Write a program down; ``run(sizes, *inputs)`` gives its outputs, differentiable as often as one likes."""
    used = {(e.args[0], e.attrs[0]) for e in topological(program.outputs) if e.op == "result"}
    writer = _Whole(numbers, used)
    for e in topological(program.outputs):
        if is_pass(e):  # those that others depend on first: a fold of folds is then never written from within another
            writer.of(e)
    return writer.script(inputs(program), program.outputs)


class _Whole(Writer):
    """Writes reductions of pairs from their parts: numbers per pair, and vectors of one side."""

    def __init__(self, numbers: frozenset[str], used: set[tuple[Expr, int]]):
        super().__init__(numbers, frozenset())
        self.used = used

    def of(self, e: Expr) -> str:
        for n in topological([e], stop=lambda n: n in self.names or is_pass(n)):
            if n not in self.names:
                self.names[n] = self._node(n)
        return self.names[e]

    def _node(self, e: Expr) -> str:
        if is_pass(e):
            return self._fold(e)
        if e.op == "result" and is_pass(e.args[0]):
            return self._line(f"{self.names[e.args[0]]}[{e.attrs[0]}]")
        if e.op in ("dot", "sqdist"):
            x, y = (self._raised(a) for a in (e.args if e.args[0].rows else e.args[::-1]))
            return self._line(f"{self._keep(_dot if e.op == 'dot' else _sqdist)}({x}, {y})")
        return super()._node(e)

    def _fold(self, e: Expr) -> str:
        kind, over, params = e.attrs
        if kind == "soft":
            parts = [self._parts(v, over) for v in e.args[1:]]
            count = len(e.args)
            logarithm = any((e, k) in self.used for k in (0, count))
            own: Any = _Soft(over, tuple(tuple(p for p, _ in each) for each in parts), logarithm)
            given = [self._number(e.args[0]), *(n for each in parts for _, names in each for n in names)]
        elif kind == "sum" and e.args[0].dtype == "float":
            found = self._parts(e.args[0], over)
            own = _Sum(over, tuple(p for p, _ in found))
            given = [n for _, names in found for n in names]
        elif kind == "pick":
            target, value, vector = e.args
            own = _Pick(over, vector is ONE, vector.feature is not None)
            given = [self._tensor(target), self._number(value)]
            given += [] if vector is ONE else [self._raised_of(vector) if own.vector else self._number(vector)]
        else:
            own = _Plain(over, kind, params, tuple(a.feature is not None for a in e.args))
            given = [self._fielded(a) for a in e.args]
        return self._line(f"{self._keep(own)}(S, {', '.join(given)})")

    def _parts(self, value: Expr, over: str) -> list[tuple[_Part, list[str]]]:
        """How Σ value is computed, and the names of what it is computed from."""
        found = []
        for c in contractions(value, over):
            part = _Part(c.weight is ONE, c.vector is not None, c.walk, c.minus is not None)
            found.append((part, self._given(c)))
        return found

    def _given(self, c: Contraction) -> list[str]:
        if c.walk:
            return [self._fielded(c.weight)]
        names = [] if c.weight is ONE and c.vector is not None and c.minus is None else [self._number(c.weight)]
        return names + [self._raised_of(v) for v in (c.vector, c.minus) if v is not None]

    def _raised_of(self, e: Expr) -> str:
        self.of(e)
        return self._raised(e)

    def _tensor(self, e: Expr) -> str:
        name = self.of(e)
        return self._line(f"filled({name}, {e.dtype!r}, S).expand((1,) * (len(S.batch)))") if e in self.plain else name

    def _number(self, e: Expr) -> str:
        """A number per pair, as a whole matrix [*batch, M, N]."""
        return self._line(f"{self._keep(_matrix)}({self._on_pairs(e)}, S)")

    def _fielded(self, e: Expr) -> str:
        """A number [*batch, M, N] or a vector [*batch, M, N, f] per pair, broadcast or not."""
        return self._on_pairs(e) if e.feature is None else self._line(f"{self._keep(_vectors)}({self._on_pairs(e)}, S)")

    def _on_pairs(self, e: Expr) -> str:
        name = self.of(e)
        if e in self.plain:
            tail = 2 + (e.feature is not None)
            return self._line(f"filled({name}, {e.dtype!r}, S).expand((1,) * (len(S.batch) + {tail}))")
        name = self._raised(e)
        at = -1 if e.feature is None else -2
        for missing, place in ((not e.cols, at), (not e.rows, at - 1)):
            if missing:
                name = self._view(name, f"{name}.unsqueeze({place})")
        return name


def _matrix(x: Tensor, sizes: Sizes) -> Tensor:
    shape = x.shape[-2:]
    return x if shape == (sizes.rows, sizes.cols) else x.expand(*x.shape[:-2], sizes.rows, sizes.cols)


def _vectors(x: Tensor, sizes: Sizes) -> Tensor:
    return x.expand(*x.shape[:-3], sizes.rows, sizes.cols, x.shape[-1])


def _dot(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype.is_floating_point:
        return matmul.product(x, y)
    return (x.unsqueeze(-2) * y.unsqueeze(-3)).sum(-1)  # integer products have no fast road on GPUs


def _sqdist(x: Tensor, y: Tensor) -> Tensor:
    return (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)


@dataclass(frozen=True)
class _Part:
    """One contraction: Σ weight × vector (a product), Σ weight, a walk over features, or a gap between two vectors."""

    plain: bool  # the weight is one
    product: bool
    walk: bool
    gap: bool

    @property
    def count(self) -> int:
        """How many values it takes."""
        return 1 if self.walk else 3 if self.gap else self.product + (not (self.plain and self.product))

    def __call__(self, values: list[Tensor], over: str, weight: Tensor | None, sizes: Sizes) -> Tensor:
        dim = -1 if over == "cols" else -2
        if self.walk or self.gap:
            value = values[0]
            if self.gap:
                x, y = values[1:]  # a row's vector and a column's
                value = value.unsqueeze(-1) * (x.unsqueeze(-2) - y.unsqueeze(-3))
            if value.dim() == len(sizes.batch) + 2:
                return (value if weight is None else weight * value).sum(dim)
            return (value if weight is None else weight.unsqueeze(-1) * value).sum(dim - 1)
        number = weight
        if not (self.plain and self.product):
            number = values[0] if weight is None else weight if self.plain else weight * values[0]
        if number is None:
            number = values[-1].new_ones(sizes.rows, sizes.cols)
        if not self.product:
            return number.sum(dim)
        return (number if over == "cols" else number.mT) @ values[-1]


def _folded(parts: tuple[_Part, ...], values: list[Tensor], over: str, weight: Tensor | None, sizes: Sizes) -> Tensor:
    total: Any = None
    at = 0
    for p in parts:
        found = p(values[at : at + p.count], over, weight, sizes)
        at += p.count
        total = found if total is None else total + found
    return total


@dataclass(frozen=True)
class _Sum:
    over: str
    parts: tuple[_Part, ...]

    def __call__(self, sizes: Sizes, *values: Tensor) -> list[Tensor]:
        return [_folded(self.parts, list(values), self.over, None, sizes)]


@dataclass(frozen=True)
class _Soft:
    """Means by torch's softmax, whose gradient cancels exactly where it should; a row that sees nothing means 0.

    The logarithm is that of the sum of exp(logit - peak), the peak a constant to gradients, guarded once per row.
    """

    over: str
    values: tuple[tuple[_Part, ...], ...]
    logarithm: bool  # whether anyone asks for it

    def __call__(self, sizes: Sizes, logit: Tensor, *given: Tensor) -> list[Tensor]:
        dim = -1 if self.over == "cols" else -2
        peak = logit.detach()
        peak = peak.amax(dim, keepdim=True) if logit.shape[dim] else peak.sum(dim, keepdim=True)
        means = self._means(sizes, logit, peak == -math.inf, dim, list(given)) if self.values else []
        safe = torch.where(peak.isinf(), 0.0, peak)
        if not self.logarithm:
            return [safe.squeeze(dim), *means, safe.squeeze(dim), safe.squeeze(dim)]
        total = (logit - safe).exp_().sum(dim)
        blind = total == 0
        log_total = torch.where(blind, -math.inf, torch.where(blind, 1.0, total).log())
        safe = safe.squeeze(dim)
        return [log_total + safe, *means, log_total, safe]

    def _means(self, sizes: Sizes, logit: Tensor, blind: Tensor, dim: int, given: list[Tensor]) -> list[Tensor]:
        weight = torch.softmax(torch.where(blind, 0.0, logit), dim)
        blind, found, at = blind.squeeze(dim), [], 0
        for parts in self.values:
            count = sum(p.count for p in parts)
            mean = _folded(parts, given[at : at + count], self.over, weight, sizes)
            found.append(torch.where(blind if mean.dim() == blind.dim() else blind.unsqueeze(-1), 0.0, mean))
            at += count
        return found


@dataclass(frozen=True)
class _Pick:
    """The number (and the vector) at one place of the folded axis; 0 where that is outside."""

    over: str
    alone: bool
    vector: bool

    def __call__(self, sizes: Sizes, target: Tensor, value: Tensor, *others: Tensor) -> list[Tensor]:
        length, kept = (sizes.cols, sizes.rows) if self.over == "cols" else (sizes.rows, sizes.cols)
        x = value if self.over == "cols" else value.mT
        if target.dim() == len(sizes.batch):
            target = target.unsqueeze(-1)
        batch = broadcast(tuple(x.shape[:-2]), tuple(target.shape[:-1]))
        place = target.expand(*batch, kept)
        inside = (place >= 0) & (place < length)
        if not length:
            found = x.sum(-1).expand(*batch, kept)
            return [found.unsqueeze(-1) * others[0].sum(-2, keepdim=True) if self.vector else found]
        safe = place.clamp(0, length - 1)
        found = torch.where(inside, x.expand(*batch, kept, length).gather(-1, safe.unsqueeze(-1)).squeeze(-1), 0.0)
        if self.alone:
            return [found]
        (other,) = others
        if not self.vector:
            other = other if self.over == "cols" else other.mT
            other = other.expand(*batch, kept, length).gather(-1, safe.unsqueeze(-1)).squeeze(-1)
            return [torch.where(inside, found * other, 0.0)]
        width = other.shape[-1]
        other = other.expand(*batch, length, width).gather(-2, safe.unsqueeze(-1).expand(*batch, kept, width))
        return [torch.where(inside.unsqueeze(-1), found.unsqueeze(-1) * other, 0.0)]


@dataclass(frozen=True)
class _Plain:
    """Every other reduction, as the oracle has it."""

    over: str
    kind: str
    params: tuple
    vectors: tuple[bool, ...]

    def __call__(self, sizes: Sizes, *fields: Tensor) -> list[Tensor]:
        found = REDUCERS[self.kind](list(fields), list(self.vectors), self.over, self.params, sizes.of(self.over))
        return [_squeezed(v, self.over, len(sizes.batch)) for v in found]


def _squeezed(v: Tensor, over: str, batch: int) -> Tensor:
    return v.squeeze(batch + (1 if over == "cols" else 0))
