"""Leading batch dimensions: broadcast without copies.

Adjacent batch dimensions that can be viewed as one in every tensor are merged; the last merged one becomes the batch
axis of tiles and the others are looped over, so that expanded, transposed and sliced batches are never copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...program.expression import Expr
from ...program.lower import Fold
from ...reductions import outputs_of
from .evaluate import Sizes, result_form, traced_length


def broadcast_shapes(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The broadcast of two batch shapes. ``torch.broadcast_shapes`` is called only if they differ: its first call takes
    a second, for its imports."""
    if not one or one == other:
        return other
    return tuple(torch.broadcast_shapes(one, other)) if other else one


def merge_batch_dims(batch: tuple[int, ...], tensors: list[Tensor]) -> tuple[tuple[int, ...], list[Tensor]]:
    """Expand each tensor to the batch shape and merge adjacent dimensions; returns the merged batch shape and views."""
    return merge_batch_and_strides(batch, tensors, ())[:2]


def merge_batch_and_strides(
    batch: tuple[int, ...], tensors: list[Tensor], strides: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], list[Tensor], list[tuple[int, ...]]]:
    """The same beside tensors that are yet to be allocated, of which the ``strides`` of the batch dimensions are known;
    these too with merged dimensions."""
    count = len(batch)
    views = [t.expand((*batch, *t.shape[count:])) for t in tensors]
    shape, others = list(batch), [list(s) for s in strides]
    at = 0
    while at + 1 < len(shape):
        if all(_can_merge(shape, v.stride(), at) for v in views) and all(_can_merge(shape, s, at) for s in others):
            views = [v.flatten(at, at + 1) for v in views]
            for s in others:
                s[at : at + 2] = [s[at] if shape[at + 1] == 1 else s[at + 1]]
            shape[at : at + 2] = [shape[at] * shape[at + 1]]
        else:
            at += 1
    if not shape:
        return (1,), [v.unsqueeze(0) for v in views], [(0,) for _ in others]
    return tuple(shape), views, [tuple(s) for s in others]


def _can_merge(shape: Sequence[int], strides: Sequence[int], at: int) -> bool:
    return 1 in shape[at : at + 2] or strides[at] == strides[at + 1] * shape[at + 1]


def iterate_outer(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every index into the looped (all but the last) batch dimensions."""
    return itertools.product(*(range(s) for s in shape[:-1]))


# In which order the dimensions of a fold's vectors lie in memory: as those of the input that they belong to.
#
# Attention's queries often come as ``view(B, S, H, D).transpose(1, 2)`` and its result goes back by ``transpose(1,
# 2).reshape(B, S, H * D)``. A result that lies in memory as the queries do makes that a view; so do gradients that lie
# as their inputs. The rule, for every fold and every engine that can follow it for free: a gradient takes the order of
# its leaf; any other vector per row takes that of a row vector among the leaves (of the same features, if there is
# one), and per column that of a column vector. Features stay innermost, and a result is dense even where the input is a
# slice. Numbers per row or column are contiguous.


def find_model(fold: Fold, r: Expr, k: int, leaves: Sequence[Any]) -> Tensor | None:
    """The leaf whose memory order a reduction's k-th result takes; None for numbers, and where there is none."""
    feature = outputs_of(r)[k][0]
    if feature is None or r.rows == r.cols:
        return None
    own = fold.gradient_of.get(r)
    found = {
        e: v
        for e, v in zip(fold.leaves, leaves, strict=True)
        if isinstance(v, Tensor) and e.feature is not None and (e.rows, e.cols) == (r.rows, r.cols)
    }
    if own in found:
        return found[own]
    return next((v for e, v in found.items() if e.feature == feature), next(iter(found.values()), None))


def summed_batch(fold: Fold, r: Expr, leaves: Sequence[Any], sizes: Sizes) -> tuple[int, ...]:
    """The batch shape of a gradient after it is summed over the dimensions in which its leaf has size 1; that of the
    call for any other result."""
    leaf = fold.gradient_of.get(r)
    value = None if leaf is None else leaves[fold.leaves.index(leaf)]
    if not isinstance(value, Tensor) or value.dim() < len(sizes.batch):
        return sizes.batch
    return tuple(1 if own == 1 else n for n, own in zip(sizes.batch, value.shape, strict=False))


def sum_gradients(fold: Fold, results: Sequence[Tensor], leaves: Sequence[Any], sizes: Sizes) -> list[Tensor]:
    """The results of a fold, gradients summed over the batch dimensions in which their leaf has size 1, where the
    engine has not done so."""
    found = []
    for (r, _), t in zip(fold.outputs, results, strict=True):
        batch = summed_batch(fold, r, leaves, sizes) if r in fold.gradient_of else ()
        dims = [d for d, n in enumerate(batch) if n != t.shape[d]]
        found.append(t.sum(dims, keepdim=True) if dims else t)
    return found


def find_strides(shape: tuple[int, ...], model: Tensor | None) -> tuple[int, ...] | None:
    """The strides of a dense result ``[*batch, length, features]`` in the memory order of ``model``; None where that is
    contiguous."""
    if model is None or model.dim() != len(shape):
        return None
    moved = [d for d in range(len(shape) - 1) if traced_length(shape[d]) > 1]
    # what the model does not have of its own comes first, as the outermost dimensions
    rank = {d: traced_length(model.stride(d)) if traced_length(model.shape[d]) > 1 else 0 for d in moved}
    order = sorted(moved, key=lambda d: (rank[d] > 0, -rank[d]))
    if order == moved or 0 in map(traced_length, shape):
        return None
    strides, step = [shape[-1]] * (len(shape) - 1), shape[-1]
    for d in reversed(order):
        strides[d] = step
        step *= shape[d]
    return (*strides, 1)


def allocate_result(fold: Fold, r: Expr, k: int, leaves: Sequence[Any], sizes: Sizes) -> Tensor:
    """Room for a result, in the memory order of the input that it belongs to; contiguous where that input does not
    have all batch dimensions, so that these stay merged: most such results are summed over them afterwards."""
    shape, dtype = result_form(r, k, sizes)
    model = find_model(fold, r, k, leaves)
    shared = model is not None and any(own == 1 < n for own, n in zip(model.shape, shape, strict=False))
    strides = None if shared else find_strides(shape, model)
    if strides is None:
        return torch.empty(shape, dtype=dtype, device=sizes.device)
    return torch.empty_strided(shape, strides, dtype=dtype, device=sizes.device)
