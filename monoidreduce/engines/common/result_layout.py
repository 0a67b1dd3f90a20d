"""In which order the dimensions of a fold's vectors lie in memory: as those of the input that they belong to.

Attention's queries often come as ``view(B, S, H, D).transpose(1, 2)`` and its result goes back by
``transpose(1, 2).reshape(B, S, H * D)``. A result that lies in memory as the queries do makes that a view; so do
gradients that lie as their inputs. The rule, for every fold and every engine that can follow it for free: a gradient
takes the order of its leaf; any other vector per row takes that of a row vector among the leaves (of the same features,
if there is one), and per column that of a column vector. Features stay innermost, and a result is dense even where the
input is a slice. Numbers per row or column are contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...program.expression import Expr
from ...program.lower import Fold
from ...reductions import outputs_of
from .evaluate import Sizes, result_form, traced_length


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
