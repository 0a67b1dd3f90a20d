"""Sums, softmax means and the best over edges on a CPU: numbers per edge in torch, products by torch's sparse kernels.

Lists of single columns for single rows have no matrix products to make of them. All numbers of a pair are computed for
a stretch of edges at once; Σ number × vector is ``embedding_bag``, which reads a vector where it lies, and products of
vectors are ``sampled_addmm``. So no vector is copied for an edge, but where a pair has vectors of its own (distances,
sums over features): these are made for some edges at a time.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ...program.constructors import ONE, Contraction, contractions
from ...program.expression import Expr, topological
from ...program.lower import scaled_result
from ...program.primitives import PRIMITIVES
from ...reductions import FastForm, all_have, kind_of
from ...reductions.best import NOWHERE, worst
from ...reductions.histogram import add_at
from ...reductions.topk import find_best
from ..common.evaluate import Evaluator, Sizes, look_up, to_compute_dtype
from .lists import Lists, LocalFold

_STRETCH = 2**16  # edges whose numbers stay in the cache
_VECTORS = 2**19  # numbers of their vectors at a time
_OF_VECTORS = ("sqdist", "fsum", "famax", "famin")
_BATCH = 64  # batch elements, which run one after the other
_MOST_PADDING = 4  # times the edges, where the best of lists of unequal lengths are sought


def can_run(local: LocalFold, lists: Lists, sizes: Sizes) -> bool:
    """True for sums, softmax means, the best and numbers of edges, of single rows and columns on a CPU."""
    if sizes.device.type != "cpu" or lists.kept_block != 1 or lists.unit != 1 or any(n != 1 for n in lists.batch):
        return False
    return 0 < torch.Size(sizes.batch).numel() <= _BATCH and _has_form(local)


@functools.lru_cache(maxsize=1024)
def _has_form(local: LocalFold) -> bool:
    """True where a pair holds numbers, products of two vectors, and vectors that are made feature by feature."""
    if local.fold is None or local.plain or any(name in ("once", "position", "listed") for name, _ in local.extra):
        return False
    if not all_have(FastForm.EDGES, local.fold.reductions):
        return False
    inside = [e for e in topological(_numbers(local), stop=lambda e: e.op == "dot" or not e.is_pair) if e.is_pair]
    made = [e for e in inside if e.feature is not None]
    return all(e.op in PRIMITIVES or e.op == "spread" for e in made) and all(e.op != "component" for e in inside)


def _contractions(r: Expr) -> list[tuple[int, Contraction]]:
    """The sums that a reduction takes, each with the number of its value."""
    return [(k, c) for k, value in enumerate(kind_of(r).summed(r.args)) for c in contractions(value, r.attrs[1])]


def _numbers(local: LocalFold) -> list[Expr]:
    """The numbers of a pair that the reductions read."""
    assert local.fold is not None
    found: list[Expr] = []
    for r in local.fold.reductions:
        found += [] if r.attrs[0] == "sum" else r.args[: 2 if r.attrs[0] == "histogram" else 1]
        found += [c.weight for _, c in _contractions(r)]
    return found


# Products of vectors and weights of sums of every edge, by batch element: for both directions.
Shared = dict[tuple[int, Expr], Tensor]


def run(
    local: LocalFold,
    given: dict[Expr, Any],
    sizes: Sizes,
    lists: Lists,
    over: str,
    edges: int,
    shared: Shared,
    both: bool = False,
) -> list[list[Tensor]]:
    """The results of each reduction, ``[*batch, kept axis, features]``; numbers of edges ``[*batch, edges]``.
    ``both``: the other direction runs too, on the same ``shared``.

    Raises :class:`Tied` where the best of a list depend on the order of its columns."""
    count = torch.Size(sizes.batch).numel()
    found = [_Element(local, given, sizes, lists, over, edges, k, shared, both).run() for k in range(count)]
    return [
        [torch.stack(ts).view(*sizes.batch, *ts[0].shape) if sizes.batch else ts[0] for ts in zip(*each, strict=True)]
        for each in zip(*found, strict=True)
    ]


class Tied(Exception):
    """Equal numbers compete for a place, or lists are too unequal: lists in the order of columns are needed."""


class _Element:
    """One batch element: values of whole rows and columns, from which stretches of edges read."""

    def __init__(
        self,
        local: LocalFold,
        given: dict[Expr, Any],
        sizes: Sizes,
        lists: Lists,
        over: str,
        edges: int,
        number: int,
        shared: Shared,
        both: bool,
    ):
        assert local.fold is not None
        self.fold, self.lists, self.over = local.fold, lists, over
        self.sizes = replace(sizes, batch=())
        self.ends = torch.cat([lists.start.new_zeros(1), lists.length.cumsum(0)])
        self.first = int(lists.start[0]) if len(lists.start) else 0  # lists lie one behind the other
        self.edges, self.number, self.shared, self.both = edges, number, shared, both
        self.kept: dict[Expr, list[tuple[int, Tensor]]] = {}  # weights by stretch, for the other direction
        self.pairs: dict[Expr, Tensor] = {}
        self.dots: dict[Expr, Tensor] = {}
        named: dict[str, Any] = {
            "_row_index": torch.arange(sizes.rows, device="cpu"), "_col_index": torch.arange(sizes.cols, device="cpu"),
            "_num_rows": sizes.of("rows"), "_num_cols": sizes.of("cols"),
        }  # fmt: skip
        for e in local.leaves:
            if e in given and isinstance(given[e], Tensor):
                value = take_element(given[e], e, sizes.batch, number)
                named[e.attrs[0]] = value
                if e.is_pair:
                    self.pairs[e] = self._to_list_order(value)
            elif e in given:
                named[e.attrs[0]] = given[e]
        self.evaluator = Evaluator(self.sizes, named)

    def run(self) -> list[list[Tensor]]:
        parts = [stretch.run() for stretch in self._iterate_stretches()]
        for e, pieces in self.kept.items():
            self.shared[self.number, e] = self._to_edge_order(torch.cat([t for _, t in pieces]), self.edges)
        results = []
        for k, (r, scale) in enumerate(self.fold.scaled):
            if r.attrs[0] == "histogram":
                results.append([torch.stack([part[k][0] for part in parts]).sum(0)])
                continue
            joined = [torch.cat(ts) for ts in zip(*(part[k] for part in parts), strict=True)]
            if kind_of(r).per_pair:
                joined = [self._to_edge_order(joined[0], self.edges)]
            if scale is not ONE:
                factor = self.value(scale)
                several = isinstance(factor, Tensor) and factor.dim() > 0
                k = scaled_result(r)
                joined[k] = joined[k] * (factor.view(-1, *(1,) * (joined[k].dim() - 1)) if several else factor)
            results.append(joined)
        return results

    def value(self, e: Expr) -> Any:
        """An expression of one side for the whole axis, ``[length(, features)]``; one number where it has no axis."""
        value = self.evaluator(e)
        if not isinstance(value, Tensor):
            return value
        value = to_compute_dtype(value, e, self.sizes.compute)
        tail = value.shape[2:] if e.feature is not None else ()
        length = value.shape[:2].numel()  # not -1: there may be no features
        return value.reshape(length, *tail) if e.rows or e.cols else value.reshape(tail)

    def products(self, e: Expr) -> Tensor:
        """The product of two vectors for every edge, in the order of these lists."""
        if e not in self.dots:
            if (self.number, e) in self.shared:
                self.dots[e] = self._to_list_order(self.shared[self.number, e])
            else:
                kept, folded = e.args if e.args[0].rows == (self.over == "cols") else e.args[::-1]
                x, y = self.value(kept), self.value(folded)
                self.dots[e] = torch.cat([stretch.products(x, y) for stretch in self._iterate_stretches()])
                self.shared[self.number, e] = self._to_edge_order(self.dots[e], self.edges)
        return self.dots[e]

    def weights(self, e: Expr, stretch: _Stretch) -> Tensor:
        """The weights of a sum for the edges of a stretch: of two directions, the second reads what the first had."""
        if not self.both or not e.is_pair:
            return stretch.number(e)
        if e not in self.dots and (self.number, e) in self.shared:
            self.dots[e] = self._to_list_order(self.shared[self.number, e])
        if e in self.dots:
            return self.dots[e][stretch.edges]
        found = stretch.number(e)
        if e not in self.kept or self.kept[e][-1][0] != stretch.edges.start:
            self.kept.setdefault(e, []).append((stretch.edges.start, found))
        return found

    @property
    def _stored(self) -> slice:
        return slice(self.first, self.first + int(self.ends[-1]))

    def _to_list_order(self, numbers: Tensor) -> Tensor:
        entry = self.lists.entry
        return numbers[self._stored] if entry is None else numbers[entry[self._stored].long()]

    def _to_edge_order(self, numbers: Tensor, edges: int) -> Tensor:
        found, entry = numbers.new_zeros(edges), self.lists.entry
        found[self._stored if entry is None else entry[self._stored].long()] = numbers
        return found

    def _iterate_stretches(self) -> list[_Stretch]:
        """Neighbouring lists with about ``_STRETCH`` edges in all."""
        last, total = len(self.ends) - 1, int(self.ends[-1])
        wanted = torch.tensor(range(_STRETCH, total, _STRETCH), dtype=torch.int64, device="cpu")
        marks = torch.searchsorted(self.ends, wanted).tolist()
        bounds = sorted({0, *marks, last})
        pairs = itertools.pairwise(bounds) if last else [(0, 0)]
        return [_Stretch(self, a, b) for a, b in pairs]


@dataclass(frozen=True, eq=False)
class _Stretch:
    """The edges of the lists from ``first`` to ``last``."""

    element: _Element
    first: int
    last: int

    @functools.cached_property
    def ends(self) -> Tensor:
        found = self.element.ends[self.first : self.last + 1]
        return found - found[:1]

    @functools.cached_property
    def edges(self) -> slice:
        """Which edges these are, counted along the lists."""
        return slice(int(self.element.ends[self.first]), int(self.element.ends[self.last]))

    @functools.cached_property
    def folded(self) -> Tensor:
        at = self.element.first
        return self.element.lists.items[at + self.edges.start : at + self.edges.stop]

    @functools.cached_property
    def kept(self) -> Tensor:
        return torch.repeat_interleave(self.ends.diff()) + self.first

    @functools.cached_property
    def evaluate(self) -> Evaluator:
        count = self.edges.stop - self.edges.start
        return Evaluator(replace(self.element.sizes, rows=1, cols=1, batch=(count,)), {})

    def run(self) -> list[list[Tensor]]:
        return [self._reduce(r) for r in self.element.fold.reductions]

    def _reduce(self, r: Expr) -> list[Tensor]:
        if kind_of(r).per_pair:
            return [self.number(r.args[0])]
        if r.attrs[0] == "histogram":
            total = torch.zeros(
                1, self.element.sizes.of(str(r.args[2].feature)), dtype=self.element.sizes.compute, device="cpu"
            )
            add_at(total, self.number(r.args[0]).unsqueeze(0), self.number(r.args[1]).unsqueeze(0))
            return [total[0]]
        if r.attrs[0] == "sum":
            return [self._sum([c for _, c in _contractions(r)], None)]
        if kind_of(r).selected(r.attrs[2]):
            return self._best(r)
        logit = self.number(r.args[0])
        peak = torch.segment_reduce(logit, "max", offsets=self.ends, initial=-torch.inf)
        safe = torch.where(peak.isinf(), 0.0, peak)
        weight = (logit - safe.index_select(0, self.kept - self.first)).exp_()
        total = self._add_up(weight)
        seen = torch.where(total == 0, 1.0, total)  # a row that sees nothing has mean 0
        means = []
        for k in range(len(r.args) - 1):
            value = self._sum([c for at, c in _contractions(r) if at == k], weight)
            means.append(value / (seen if value.dim() == 1 else seen.unsqueeze(-1)))
        log_total = total.log()
        return [log_total + safe, *means, log_total, safe]

    def _best(self, r: Expr) -> list[Tensor]:
        """The best numbers of every list and their columns, the first of equals."""
        number, lengths = self.number(r.args[0]), self.ends.diff()
        k, largest = kind_of(r).selected(r.attrs[2]), r.attrs[2][-1]
        longest, lists = int(lengths.max()) if len(lengths) else 0, len(lengths)
        if not number.is_floating_point() or longest * lists > _MOST_PADDING * max(len(number), 1):
            raise Tied
        if (r.attrs[0] == "best" or not largest) and bool(number.isnan().any()):
            raise Tied  # NaN beats all, also where the least is sought; behind it are only slots that nothing fills
        lowest = worst(number.dtype, largest)
        table = number.new_full((lists, max(longest, k)), lowest)
        at = torch.arange(len(number), device="cpu") - self.ends[:-1].index_select(0, self.kept - self.first)
        at += (self.kept - self.first) * table.shape[1]
        table.view(-1)[at] = number

        def columns(chosen: tuple[Tensor, ...]) -> Tensor:
            edge = self.ends[chosen].unsqueeze(-1) + torch.arange(table.shape[1], device="cpu")
            there = edge < self.ends[1:][chosen].unsqueeze(-1)
            return torch.where(there, self.folded[edge.clamp_(max=len(number) - 1)].long(), NOWHERE)

        value, best = find_best(table, k, largest, columns)
        edge = (self.ends[:-1].unsqueeze(-1) + best).clamp(max=max(len(number) - 1, 0))
        place = self.folded[edge].long() if len(number) else torch.zeros_like(edge)
        place = torch.where(value == lowest, -1, place)
        return [value, place] if r.attrs[0] == "topk" else [value[:, 0], place[:, 0]]

    def number(self, e: Expr) -> Tensor:
        """A number of every edge."""
        memo, count = self.evaluate.memo, self.edges.stop - self.edges.start
        stop = lambda n: n in memo or n.op in ("dot", "lookup", *_OF_VECTORS) or not n.is_pair
        for n in topological([e], stop=stop):
            if n in memo:
                continue
            if n.op == "lookup" and n.is_pair:
                table, at = self.element.value(n.args[0]), self.number(n.args[1])
                memo[n] = look_up(table, at, 1).view(-1, 1, 1)
            elif n.op == "dot":
                memo[n] = self.element.products(n)[self.edges].view(-1, 1, 1)
            elif n.op in _OF_VECTORS and n.is_pair:
                memo[n] = torch.cat([self._over_features(n, part) for part in self._parts(n.args)]).view(-1, 1, 1)
            elif n.op == "leaf" and n.is_pair:
                memo[n] = self.element.pairs[n][self.edges].view(-1, 1, 1)
            elif not n.is_pair:
                value = self.element.value(n)
                if n.rows or n.cols:
                    value = value.index_select(0, self._places(n)).view(-1, 1, 1)
                memo[n] = value.view(1, 1, 1) if isinstance(value, Tensor) and value.dim() == 0 else value
        found = self.evaluate.to_compute(self.evaluate(e), e)
        if not isinstance(found, Tensor):
            kind = {"bool": torch.bool, "int": torch.int64}.get(e.dtype, self.element.sizes.compute)
            return torch.full((count,), found, dtype=kind, device="cpu")
        return found.reshape(-1).expand(count)

    def _parts(self, vectors: Sequence[Expr]) -> list[slice]:
        """The edges, some at a time: vectors of all of them are never held."""
        count = self.edges.stop - self.edges.start
        widths = [self.element.sizes.of(str(e.feature)) for e in vectors if e.feature is not None]
        step = max(1, _VECTORS // max(1, *widths))
        return [slice(a, min(a + step, count)) for a in range(0, count, step)] or [slice(0, 0)]

    def _over_features(self, e: Expr, part: slice) -> Tensor:
        """A number of some edges that is made of vectors: a distance, a sum over features or an extreme."""
        vectors = [self._vectors(a, part) for a in e.args]
        if e.op == "sqdist":
            x, y = vectors
            return (x - y).square_().sum(-1)
        (x,) = vectors
        return x.sum(-1) if e.op == "fsum" else x.amax(-1) if e.op == "famax" else x.amin(-1)

    def _vectors(self, e: Expr, part: slice) -> Tensor:
        """A vector of some edges, ``[edges, features]``."""
        count, width = part.stop - part.start, self.element.sizes.of(str(e.feature))
        evaluate = Evaluator(replace(self.evaluate.sizes, batch=(count,)), {})
        for n in topological([e], stop=lambda n: n.feature is None or not n.is_pair):
            if n.feature is None:
                evaluate.memo[n] = n.const if n.op == "const" else self.number(n)[part].view(-1, 1, 1)
            elif not n.is_pair:
                value = self.element.value(n)
                value = value.index_select(0, self._places(n)[part]) if n.rows or n.cols else value
                evaluate.memo[n] = value.view(*(value.shape[:-1] or (1,)), 1, 1, value.shape[-1])
        found = evaluate.to_compute(evaluate(e), e)
        return found.expand(count, 1, 1, width).reshape(count, width)

    def _places(self, e: Expr) -> Tensor:
        return self.kept if e.rows == (self.element.over == "cols") else self.folded

    def products(self, x: Tensor, y: Tensor) -> Tensor:
        """The product of a kept index's and a folded one's vector for every edge."""
        more = len(self.folded) > (self.last - self.first) * len(y)  # than a sparse matrix of this shape can have
        if more or not x.is_floating_point() or not y.is_floating_point() or not _has_sampled_products():
            return (x.index_select(0, self.kept) * y.index_select(0, self.folded)).sum(-1)
        pattern = torch.sparse_csr_tensor(
            self.ends.int(),
            self.folded.int(),
            x.new_zeros(len(self.folded)),
            (self.last - self.first, len(y)),
            check_invariants=False,
            device="cpu",
        )
        return torch.sparse.sampled_addmm(pattern, x[self.first : self.last], y.T, beta=0.0).values()

    def _sum(self, parts: Sequence[Contraction], weight: Tensor | None) -> Tensor:
        """Σ weight × value of every list."""
        total: Tensor | None = None
        for c in parts:
            if c.walk or c.minus is not None:
                found = self._sum_vectors(c, weight)
                total = found if total is None else total + found
                continue
            number = self.element.weights(c.weight, self) if weight is None else self.number(c.weight) * weight
            found = self._add_up(number)
            if c.vector is not None:
                table, starts = self.element.value(c.vector), self.ends[:-1]
                number = number.to(table.dtype).contiguous()
                found = embedding_bag(self.folded, table, starts, mode="sum", per_sample_weights=number)
            total = found if total is None else total + found
        assert total is not None
        return total

    def _sum_vectors(self, c: Contraction, weight: Tensor | None) -> Tensor:
        """The same of vectors that edges have of their own: walked, or gaps between those of two sides."""
        given = [c.weight] if c.walk else [c.vector, c.minus]
        width = self.element.sizes.of(str(given[0].feature))  # type: ignore[union-attr]
        total = torch.zeros(self.last - self.first, width, dtype=self.element.sizes.compute, device="cpu")
        factor = weight if c.walk else self.number(c.weight) if weight is None else self.number(c.weight) * weight
        for part in self._parts(given):  # type: ignore[arg-type]
            value, *other = (self._vectors(e, part) for e in given)  # type: ignore[arg-type]
            value = value - other[0] if other else value
            value = value if factor is None else value * factor[part].unsqueeze(-1)
            total.index_add_(0, self.kept[part] - self.first, value.to(total.dtype))
        return total

    def _add_up(self, number: Tensor) -> Tensor:
        """The sum of numbers of every list."""
        if number.is_floating_point():
            return torch.segment_reduce(number.contiguous(), "sum", offsets=self.ends, initial=0.0)
        total = torch.zeros(self.last - self.first, dtype=torch.int64, device="cpu")
        return total.index_add_(0, self.kept - self.first, number.long())


def take_element(value: Tensor, e: Expr, batch: tuple[int, ...], number: int) -> Tensor:
    """A leaf's numbers for one batch element."""
    behind = (1 if e.is_pair else e.rows + e.cols) + (e.feature is not None)
    tail = value.shape[value.dim() - behind :]
    return value.expand(*batch, *tail).flatten(0, len(batch) - 1)[number] if batch else value.reshape(tail)


@functools.cache
def _has_sampled_products() -> bool:
    """Whether this build of torch has ``sampled_addmm``. That sparse tensors are in beta state, which torch says once
    in a process, is said here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            start, two = torch.arange(2, device="cpu").int(), torch.ones(1, 2, device="cpu")
            pattern = torch.sparse_csr_tensor(start, start[:1], two[0, :1], (1, 1), device="cpu")
            return bool(torch.sparse.sampled_addmm(pattern, two, two.mT, beta=0.0).values() == 2)
        except RuntimeError:
            return False
