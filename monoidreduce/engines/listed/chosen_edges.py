"""Sums over the edges that rows chose, on a CPU: gradients of maxima and of top-k.

A row names the columns that won, so nothing is asked of other edges: numbers of M × k winners are added up, by rows
with ``embedding_bag``, by columns with ``index_add``. A column that is not in the row's list counts nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ...program import constructors
from ...program.constructors import ONE
from ...program.expression import Expr, const, topological
from ...program.lower import Fold
from ..common import bounded_cache
from ..common.evaluate import Evaluator, Sizes, restore_domain, to_compute_dtype
from .edge_numbers import take_element

_CHUNK = 2**20  # numbers of products at a time


def can_run(fold: Fold, sizes: Sizes, tensors: Sequence[Tensor]) -> bool:
    """True for sums over columns that rows name, of numbers of rows, where equal entries of a list count once."""
    shared = all(n == 1 for n in tensors[0].shape[:-1])
    return sizes.device.type == "cpu" and shared and 0 not in sizes.batch and _is_chosen(fold)


@functools.lru_cache(maxsize=1024)
def _is_chosen(fold: Fold) -> bool:
    if any(r.attrs[0] != "pick" or r.attrs[2] != ("col",) for r in fold.reductions) or fold.scales:
        return False
    for r in fold.reductions:
        target, value, vector = r.args
        once = any(e.op == "listed_once" for e in topological([value]))
        sides = [target, _assume_listed(value)] + ([vector] if r.attrs[1] == "rows" else [])
        if not once or any(e.cols for e in sides) or (r.attrs[1] == "cols" and vector is not ONE and vector.rows):
            return False
    return True


def _assume_listed(value: Expr) -> Expr:
    """A value of a pair that is listed, and the first of equal ones."""
    known = {e: const(True) for e in topological([value]) if e.op in ("listed", "listed_once")}
    return constructors.substitute((value,), known)[0]


def run(fold: Fold, given: dict[Expr, Any], sizes: Sizes, form: tuple, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The result of each reduction, ``[*batch, kept axis, features]``."""
    parts = ("edges in order", form, sizes.rows, sizes.cols, *tensors)
    keys = bounded_cache.compute_once(parts, lambda: _sort_edges(form, tensors, sizes), sizes.device)
    count = torch.Size(sizes.batch).numel()
    found = [_run_element(fold, given, sizes, keys, number) for number in range(count)]
    joined = (torch.stack(ts) if sizes.batch else ts[0] for ts in zip(*found, strict=True))
    return [[t.view(*sizes.batch, *t.shape[1:]) if sizes.batch else t] for t in joined]


def _sort_edges(form: tuple, tensors: Sequence[Tensor], sizes: Sizes) -> Tensor:
    """The number row × columns + column of every edge, in order."""
    lists = restore_domain(form, tensors).listing(sizes.rows, sizes.cols)
    return (lists.owners().long() * max(sizes.cols, 1) + lists.items).sort().values


def _run_element(fold: Fold, given: dict[Expr, Any], sizes: Sizes, keys: Tensor, number: int) -> list[Tensor]:
    here = replace(sizes, batch=())
    assert fold.domain is not None
    leaves = {}
    for e, v in given.items():
        if e not in fold.domain.args:
            leaves[e.attrs[0]] = take_element(v, e, sizes.batch, number) if isinstance(v, Tensor) else v
    evaluate = Evaluator(here, leaves)

    def evaluate_flat(e: Expr) -> Any:
        value = evaluate(e)
        if not isinstance(value, Tensor):
            return value
        value = to_compute_dtype(value, e, sizes.compute)
        tail = value.shape[2:]
        return value.reshape(value.shape[:2].numel(), *tail) if e.rows or e.cols else value.reshape(tail)

    found = []
    for r in fold.reductions:
        target, value, vector = r.args
        place, weight = evaluate_flat(target).reshape(sizes.rows, -1).long(), evaluate_flat(_assume_listed(value))
        wanted = torch.arange(sizes.rows, device="cpu").unsqueeze(1) * max(sizes.cols, 1) + place
        hit = (place >= 0) & (place < (sizes.cols if len(keys) else 0))
        if len(keys):
            hit &= keys[torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)] == wanted
        weight = weight.reshape(sizes.rows, -1) if isinstance(weight, Tensor) and weight.dim() else weight
        weight, place = torch.where(hit, weight, 0.0).to(sizes.compute), torch.where(hit, place, 0)
        vectors = None if vector is ONE else evaluate_flat(vector)
        by_row = r.attrs[1] == "cols"
        found.append(_sum_by_row(place, weight, vectors) if by_row else _sum_by_column(place, weight, vectors, here))
    return found


def _sum_by_row(place: Tensor, weight: Tensor, vectors: Tensor | None) -> Tensor:
    if vectors is None:
        return weight.sum(-1)
    if not len(vectors) or vectors.dim() == 1:
        return (weight * vectors[place]).sum(-1) if len(vectors) else weight.new_zeros(len(weight), *vectors.shape[1:])
    return embedding_bag(place, vectors.contiguous(), per_sample_weights=weight.to(vectors.dtype), mode="sum")


def _sum_by_column(place: Tensor, weight: Tensor, vectors: Tensor | None, sizes: Sizes) -> Tensor:
    tail = () if vectors is None else vectors.shape[1:]
    total = weight.new_zeros(sizes.cols, *tail)
    if not sizes.cols:
        return total
    if vectors is None or not tail:
        weight = weight if vectors is None else weight * vectors.unsqueeze(-1)
        return total.index_add_(0, place.flatten(), weight.flatten())
    step = max(1, _CHUNK // max(1, place.shape[1] * tail[0]))
    for a in range(0, len(place), step):
        some = slice(a, a + step)
        products = weight[some].unsqueeze(-1) * vectors[some].unsqueeze(1)
        total.index_add_(0, place[some].flatten(), products.flatten(0, 1).to(total.dtype))
    return total
