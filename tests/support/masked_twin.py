"""The dense call with the same mask, of any op over listed pairs: the body again, its reductions under a condition.

The twin takes four more arguments: which pairs exist, the places of rows and columns, which stand for ``mr.row_index``
and ``mr.col_index``, and how many columns there are in all. It knows nothing of ``cols=``; run it on the reference
engine.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Batch, Col, Pair, Row  # noqa: F401  (bodies name them in annotations)
from monoidreduce.domains import Domain, Edges, Jagged, Pages
from tests.support.comparison import flatten
from tests.support.layers.base import Layer

INF = float("inf")


@functools.cache
def twin(op: mr.Op) -> mr.Op:
    """An op of the same body whose reductions fold the pairs that its last arguments name."""
    own = inspect.signature(op.function)
    hidden = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind) for name, kind in _HIDDEN]

    def body(*args: Any, exists: Any, row: Any, col: Any, count: Any, **numbers: Any) -> Any:
        with _only(exists, row, col, count):
            return op.function(*args, **numbers)

    body.__annotations__ = {**op.function.__annotations__, **dict(_HIDDEN)}
    body.__name__ = f"masked_{op.function.__name__}"
    body.__signature__ = own.replace(parameters=[*own.parameters.values(), *hidden])  # type: ignore[attr-defined]
    return mr.op(body)


_HIDDEN = (("exists", Pair), ("row", Row), ("col", Col), ("count", int))


@contextlib.contextmanager
def _only(exists: Any, row: Any, col: Any, count: Any) -> Iterator[None]:
    """Reductions of the pair language that fold some pairs, and indices that are given."""
    held = {name: getattr(mr, name) for name in (*_MASKED, "row_index", "col_index", "num_cols")}
    try:
        for name, make in _MASKED.items():
            setattr(mr, name, make(exists, held))
        mr.row_index, mr.col_index, mr.num_cols = row, col, count
        yield
    finally:
        for name, value in held.items():
            setattr(mr, name, value)


def _absent(value: Any) -> Callable:
    """A reduction of one number in whose place ``value`` stands where a pair does not exist."""

    def make(name: str) -> Callable:
        return lambda e, held: lambda x=True, *more, **options: held[name](torch.where(e, x, value), *more, **options)

    return make


def _mean(e: Any, held: dict) -> Callable:
    return lambda x, over="cols": held["sum"](torch.where(e, x, 0.0), over=over) / held["count"](e, over=over)


def _weighted_mean(e: Any, held: dict) -> Callable:
    return lambda weight, *rest, **options: held["weighted_mean"](torch.where(e, weight, 0.0), *rest, **options)


def _var(e: Any, held: dict) -> Callable:
    def var(x: Any, correction: float = 1, over: str = "cols") -> Any:
        count = held["count"](e, over=over)
        gap = x - held["sum"](torch.where(e, x, 0.0), over=over) / count.clamp(min=1)
        return held["sum"](torch.where(e, gap.square(), 0.0), over=over) / (count - correction).clamp(min=0)

    return var


def _topk(e: Any, held: dict) -> Callable:
    return lambda x, k, largest=True, over="cols": held["topk"](
        torch.where(e, x, -INF if largest else INF), k, largest=largest, over=over
    )


def _reduce(e: Any, held: dict) -> Callable:
    def fold(monoid: Any, over: str = "cols", **fields: Any) -> Any:
        nothing = monoid.fields()
        return held["reduce"](
            monoid, over=over, **{n: torch.where(e, x, nothing[n].identity) for n, x in fields.items()}
        )

    return fold


_MASKED: dict[str, Callable] = {
    **{name: _absent(0.0)(name) for name in ("sum",)},
    **{name: _absent(-INF)(name) for name in ("logsumexp", "softmax_mean", "max", "argmax", "sample", "topk_mean")},
    **{name: _absent(INF)(name) for name in ("min", "argmin")},
    **{name: _absent(False)(name) for name in ("any", "count")},
    "all": _absent(True)("all"),
    "mean": _mean,
    "var": _var,
    "weighted_mean": _weighted_mean,
    "topk": _topk,
    "reduce": _reduce,
}


# Layers of the zoo over each domain


@dataclass(frozen=True)
class Case:
    """A layer over a domain: ``listed(*args)`` is to be ``dense(*args)``."""

    layer: Layer
    domain: Domain
    rows: int
    cols: int

    def args(self, seed: int, dtype: torch.dtype = torch.float64) -> tuple:
        """Inputs of the layer; over pages, of two heads and as many sequences as there are."""
        if not isinstance(self.domain, Pages):
            return self.layer.args(self.rows, self.cols, seed, dtype)
        draws = [self.layer.args(self.rows, self.cols, seed + k, dtype) for k in range(2 * len(self.domain.lengths))]
        found = []
        for p, each in zip(self.layer.parameters, zip(*draws, strict=True), strict=False):
            single = [a[(0,) * (a.dim() - len(p.tail))] if isinstance(a, Tensor) else a for a in each]  # of one head
            if p.axis == "rows":
                found.append(torch.stack(single).unflatten(0, (-1, 2)))
            elif p.axis == "cols":
                found.append(torch.stack(single[:2], 1).unflatten(0, (-1, self.domain.page)))
            else:
                found.append(torch.stack(single[:2]) if p.axis == "batch" else single[0])
        return tuple(found)

    def listed(self, *args: Any) -> Any:
        """The call with ``cols=``."""
        if isinstance(self.domain, Edges):  # numbers of pairs as numbers of edges
            owner = torch.repeat_interleave(self.domain.rowptr.diff())
            args = self._change("pairs", args, lambda a: a[owner, self.domain.index.long()])
        found = flatten(self.layer.op(*args, cols=self.domain))
        if isinstance(self.domain, Pages):  # results of all places in all pages, in the order of each sequence
            at = _places(self.domain)
            take = lambda t: torch.stack([t[s].index_select(1, at[s]) for s in range(len(at))])
            found = [self._own(take(t)) if t.shape[2:3] == (self.cols,) else t for t in found]
        return found

    def dense(self, *args: Any) -> Any:
        """The twin, run by the reference engine."""
        row, col, exists = torch.arange(self.rows), torch.arange(self.cols), None
        if isinstance(self.domain, Pages):
            most, lengths = self.domain.most, self.domain.lengths.unsqueeze(1)
            args = self._change("cols", args, lambda a: a.flatten(0, 1)[_places(self.domain)].transpose(1, 2))
            row, col = (lengths - self.rows + row).unsqueeze(1), torch.arange(most)
            exists = (col < lengths)[:, None, None].expand(-1, -1, self.rows, -1)
        elif isinstance(self.domain, Jagged):
            row, col = self.domain.row_positions(self.rows).long(), self.domain.col_positions(self.cols).long()
        exists = self.domain.mask(self.rows, self.cols) > 0 if exists is None else exists
        with mr.use(engine="reference"):
            found = flatten(twin(self.layer.op)(*args, exists=exists, row=row, col=col, count=self.cols))
        return [self._own(t) for t in found] if isinstance(self.domain, Pages) else found

    def _change(self, axis: str, args: tuple, change: Callable) -> tuple:
        pairs = zip(self.layer.parameters, args, strict=False)  # what is left out stands last
        return tuple(change(a) if p.axis == axis else a for p, a in pairs)

    def _own(self, t: Tensor) -> Tensor:
        """Results of columns with 0 beyond the end of each sequence; others as they are."""
        most = self.domain.most  # type: ignore[attr-defined]
        if t.shape[2:3] != (most,):
            return t
        inside = torch.arange(most) < self.domain.lengths.unsqueeze(1)  # type: ignore[attr-defined]
        return torch.where(inside.view(-1, 1, most, *(1,) * (t.dim() - 3)), t, torch.zeros((), dtype=t.dtype))


def _places(pages: Pages) -> Tensor:
    """Where in all pages each sequence's columns lie: [S, most]; beyond its end, anywhere."""
    place = torch.arange(pages.most)
    return pages.table[:, place // pages.page] * pages.page + place % pages.page


def make_domain(kind: str, empty: bool = True) -> tuple[Domain, int, int]:
    """A domain and the sizes of a call: ragged ends, a list of all columns, and with ``empty`` lists without any and
    columns that no list has."""
    if kind == "pages":
        table = torch.tensor([[5, 2, 7], [1, 0, 0], [2, 3, 4], [6, 6, 6]])  # page 2 is two sequences'
        if not empty:
            return mr.pages(table[[0, 2]], torch.tensor([12, 12]), page=4), 3, 32
        return mr.pages(table, torch.tensor([9, 3, 12, 0]), page=4), 3, 32
    chance = torch.Generator().manual_seed(3)
    rows, cols = 11, 13
    if kind == "jagged":
        own, other = ([0, 4, 4, 5, 7, 10], [0, 3, 5, 5, 9, 12]) if empty else ([0, 4, 5, 9, 11], [0, 3, 7, 9, 13])
        return mr.jagged(torch.tensor(own), torch.tensor(other)), rows, cols
    if kind == "blocks":
        keep = torch.rand(4, 5, generator=chance) > 0.5
        keep[:, 0] = keep[2] = True
        if empty:
            keep[1] = keep[:, 4] = False
        return mr.blocks.from_mask(keep, rows=3, cols=3), rows, cols
    keep = torch.rand(rows, cols, generator=chance) > 0.6
    keep[:, 0] = keep[5] = True
    if empty:
        keep[2] = keep[:, 7] = False
    owner, index = keep.nonzero().unbind(1)
    order = torch.rand(len(owner), generator=chance).argsort()
    order = order[owner[order].argsort(stable=True)]  # not sorted within a list
    pointer = torch.cat([torch.zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0)])
    return mr.edges(pointer, index[order]), rows, cols


def make_repeats(kind: str) -> tuple[Domain, int, int]:
    """Lists that name columns several times, one of them long, one empty."""
    chance = torch.Generator().manual_seed(4)
    if kind == "blocks":
        index = torch.randint(0, 5, (4, 6), generator=chance)
        return mr.blocks(index, torch.tensor([6, 0, 3, 5]), rows=3, cols=3), 11, 13
    lengths = torch.tensor([3, 0, 500, 1, 7])
    pointer = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return mr.edges(pointer, torch.randint(0, 13, (int(pointer[-1]),), generator=chance)), 5, 13
