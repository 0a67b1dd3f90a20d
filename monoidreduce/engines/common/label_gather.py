"""Label gather: sums against ``index == t``, computed on the matching pairs only by a gather or a scatter.

The axis that holds the targets ``t`` (say rows) keeps its order; leaves of the other axis are gathered at ``t``. Values
are then evaluated in the layout ``[batch, axis, matches]``, in chunks of the axis so that at most one tile is held.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ...program.constructors import substitute
from ...program.expression import Expr, node, topological
from .evaluate import Evaluator, Sizes, unpack

_LEAST = 1024  # numbers of an index's matches from which torch sums their vectors where they lie
_PLACE = 8  # numbers that the place of a match takes while matches are sorted


class MatchedPairs(Evaluator):
    """Evaluates on matched pairs: a product of two vectors is a sum over features, not a matrix."""

    def _node(self, e: Expr) -> Any:
        if e.op == "dot":
            x, y = (self.to_compute(self.memo[a], a) for a in e.args)
            return _dot(x, y)
        return super()._node(e)


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner products of ``[batch, part, matches, features]``; by matrix products where one side has many matches for
    one vector of the other, which reads the gathered vectors once."""
    one, many = (x, y) if x.shape[2] == 1 else (y, x)
    if one.shape[2] != 1 or many.shape[2] == 1 or x.shape[:2] != y.shape[:2]:
        return (x * y).sum(-1)
    return (many @ one.mT).squeeze(-1)


def run_pick(reduction: Expr, leaves: dict[Expr, Any], sizes: Sizes, batch: int, out: Tensor, elements: int) -> None:
    """``out`` [batch, length(, features)] += the pick, for one batch chunk whose leaves are [batch, l(, f)]."""
    _, over, (axis,) = reduction.attrs
    target, value, vector = reduction.args
    by_rows = axis == "col"  # rows hold t, columns are gathered
    side, other = (sizes.rows, sizes.cols) if by_rows else (sizes.cols, sizes.rows)
    t = leaves[target] if target.op == "leaf" else torch.arange(side, device=sizes.device).view(1, side)
    t = t.unsqueeze(-1) if target.feature is None else t
    t = t.expand(batch, side, t.shape[-1])
    (value,) = one_number_per_match((value,), target)
    gathers = (over == "cols") == by_rows
    rows = _find_rows(vector, leaves, gathers != by_rows, t.shape[-1], elements, sizes)
    read = topological([value, target] if rows is not None else [value, target, vector])
    vectors = [leaves[e] for e in read if e.feature is not None and e is not target and e in leaves]
    widest = max([1 if rows is None else _PLACE, *(v.shape[-1] for v in vectors if isinstance(v, Tensor))])
    chunk = chunk_size(elements, batch, t.shape[-1], widest)
    for at in range(0, side, chunk):
        part = slice(at, min(at + chunk, side))
        tp = t[:, part]
        inside = (tp >= 0) & (tp < other)
        safe = tp.clamp(0, max(other - 1, 0))
        if other == 0:
            return
        evaluator = MatchedPairs(sizes, {})
        for e in read:
            if e.op in ("leaf", "row_index", "col_index"):
                evaluator.memo[e] = gather_leaf(e, leaves, by_rows, part, safe, sizes)
        weight = evaluator.to_compute(evaluator(value), value)
        weight = torch.where(inside, weight, torch.zeros((), dtype=sizes.compute, device=sizes.device))
        if gathers and vector.op == "einsum" and vector.attrs[0] == "a,b->ab":  # without the products at each match
            numbers, vectors = (evaluator.to_compute(evaluator(a), a) for a in vector.args)
            out[:, part] += ((weight.unsqueeze(-1) * numbers).mT @ vectors).flatten(2)
            continue
        if rows is not None:
            _add_rows(out, gathers, part, tp, inside, weight.expand(tp.shape), rows)
            continue
        found = evaluator.to_compute(evaluator(vector), vector)
        if gathers and vector.feature is not None and 1 < found.shape[2] == weight.shape[2]:
            out[:, part] += (weight.unsqueeze(2) @ found).squeeze(2)  # Σ over matches, without their products
            continue
        if vector.feature is not None:
            weight = weight.unsqueeze(-1) * found
        elif isinstance(found, Tensor) or found != 1:
            weight = weight * found
        if gathers:
            out[:, part] += weight if reduction.attrs[0] == "picks" else weight.sum(2)
        else:
            _scatter_add(out, safe, weight)


def _find_rows(
    vector: Expr, leaves: dict[Expr, Any], by_rows: bool, matches: int, elements: int, sizes: Sizes
) -> Tensor | None:
    """The vectors ``[1 or batch, length, features]`` of several matches, where torch sums them without a copy of each:
    on a CPU, as they are given along the axis that is read; a copy in another type or order must be small."""
    v = leaves.get(vector)
    if sizes.device.type != "cpu" or vector.packing is not None or vector.is_pair:
        return None
    if not isinstance(v, Tensor) or vector.feature is None or vector.rows != by_rows or not v.numel():
        return None
    if matches == 1 or matches * v.shape[-1] < _LEAST:
        return None
    if (v.dtype != sizes.compute or not v.is_contiguous()) and v.numel() > elements:
        return None
    return v.to(sizes.compute).contiguous()


def _add_rows(
    out: Tensor, gathers: bool, part: slice, targets: Tensor, inside: Tensor, weight: Tensor, vectors: Tensor
) -> None:
    """``out[b, row]`` (or ``out[b, target]``) += weight × the vector of the target (or row), of pairs ``[batch, part,
    matches]``. The order of every sum is that of the rows."""
    batch, length, matches = targets.shape
    at = torch.arange(targets.numel(), device=targets.device)
    target, weight = targets.reshape(-1), weight.reshape(-1)
    if not inside.all():
        at = at[inside.reshape(-1)]
        target, weight = target[at], weight[at]
    b, row = at // (length * matches), at // matches % length
    base = b * vectors.shape[1] if len(vectors) > 1 else 0
    if gathers:
        owner, source, size = b * length + row, base + target, batch * length
    else:
        owner, source, size = b * out.shape[1] + target, base + row + part.start, batch * out.shape[1]
        owner, order = (owner.int() if size < 2**31 else owner).sort(stable=True)
        source, weight = source[order], weight[order]
    first = torch.searchsorted(owner, torch.arange(size, dtype=owner.dtype, device=owner.device))
    total = embedding_bag(source, vectors.flatten(0, 1), first, per_sample_weights=weight, mode="sum")
    (out[:, part] if gathers else out).add_(total.view(batch, -1, total.shape[-1]))


def chunk_size(elements: int, batch: int, matches: int, widest: int) -> int:
    """How many target indices are evaluated at once, so that at most ``elements`` numbers are held."""
    return max(1, elements // max(1, batch * matches * widest))


def one_number_per_match(values: tuple[Expr], target: Expr) -> tuple[Expr]:
    """Where each index has several targets, vectors over the same letter are one number per target."""
    if target.feature is None:
        return values
    (value,) = values
    replace = {
        e: node("leaf", (), (f"{e.attrs[0]}/match",), rows=True, cols=True, feature=None, dtype=e.dtype)
        for e in topological([value])
        if e.op == "leaf" and e.feature == target.feature
    }
    return (substitute((value,), replace)[0],)


def gather_leaf(e: Expr, leaves: dict[Expr, Any], by_rows: bool, part: slice, safe: Tensor, sizes: Sizes) -> Any:
    """A leaf or an index at matched pairs: ``[batch, part, matches(, features)]``, or broadcasting to it. ``safe``: the
    targets of the part, inside of the other axis."""
    if e.op in ("row_index", "col_index"):
        own = (e.op == "row_index") == by_rows
        length = sizes.rows if by_rows else sizes.cols
        return torch.arange(length, device=sizes.device)[part].view(1, -1, 1) if own else safe
    if e.is_pair and e in leaves:
        v = leaves[e].expand(-1, sizes.rows, sizes.cols)  # one number may stand for a whole axis
        v = v if by_rows else v.mT
        return v[:, part].expand(*safe.shape[:2], -1).gather(2, safe)
    if e.is_pair:  # a vector over the target's letter, one number per match
        name = e.attrs[0].removesuffix("/match")
        return next(v for k, v in leaves.items() if k.attrs[0] == name)[:, part]
    if e.packing is not None:
        values, *scale = (_gather_vectors(a, leaves[a], by_rows, part, safe) for a in (e, *e.args))
        return unpack(e.packing, sizes.of(str(e.feature)), values, scale[0] if scale else None, sizes.compute)
    v = leaves[e]
    if not isinstance(v, Tensor):
        return v
    if not e.rows and not e.cols:
        return v.view(v.shape[0], 1, 1, *v.shape[1:])
    return _gather_vectors(e, v, by_rows, part, safe)


def _gather_vectors(e: Expr, v: Tensor, by_rows: bool, part: slice, safe: Tensor) -> Tensor:
    """The same of a leaf that varies along one axis."""
    if e.rows == by_rows:
        return v[:, part].unsqueeze(2)
    batch, side, matches = safe.shape
    v = v.expand(batch, *v.shape[1:])
    flat = safe.reshape(batch, side * matches)
    if e.feature is None:
        return v.gather(1, flat).view(batch, side, matches)
    rows = torch.arange(batch, device=v.device).unsqueeze(1)
    dtype = v.dtype
    if dtype.is_floating_point and dtype.itemsize == 1:  # torch 2.6 does not index 8-bit floats on a CPU
        v = v.view(torch.uint8)
    return v[rows, flat].view(dtype).view(batch, side, matches, v.shape[-1])


def _scatter_add(out: Tensor, places: Tensor, weight: Tensor) -> None:
    """out[b, places] += weight, deterministically."""
    batch, length = out.shape[:2]
    flat = (places + torch.arange(batch, device=out.device).view(-1, 1, 1) * length).reshape(-1)
    features = out.shape[2:]
    source = weight.expand(*places.shape, *features).reshape(len(flat), *features)
    whole = out.view(batch * length, *features)
    if out.device.type == "cpu":
        whole.index_add_(0, flat, source)  # in order
    else:
        whole.index_put_((flat,), source, accumulate=True)  # sorted, so deterministic on GPUs
