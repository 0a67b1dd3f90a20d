"""The papers' proof of concept, as a peer to measure against: tile functions in torch on 256 × 256 tiles.

Three layers on :func:`monoidreduce.blockwise.mk_GeMMMapReduce`, in the form of the proof of concept: unpacked
arguments, a chunker per layer, a backward by hand per layer, one tile after the other. Matrices only, no batch
dimensions. Legend: M rows, N columns (or hidden units), F and D features.

16-bit inputs keep their normaliser in float32; everything else is in the inputs' type.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from monoidreduce.blockwise import mk_GeMMMapReduce

__all__ = ["attention", "cross_entropy", "mlp"]

TILE = 256
Tensors = tuple[Tensor, ...]


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``(q @ k.T).softmax(1) @ v``, for q [M, F], k [N, F], v [N, D]; the [M, N] weights are never built."""
    _, value = _Attention.apply(q, k, v)
    return value


def mlp(x: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """``torch.relu(x @ p.T) @ q``, for x [M, F], p [N, F], q [N, D]; the [M, N] hidden layer is never built."""
    (y,) = _Mlp.apply(x, p, q)
    return y


def cross_entropy(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """``F.cross_entropy(x @ w.T, target, reduction="none")``, for x [M, F], w [N, F], target [M] of integers."""
    z, s = _CrossEntropy.apply(x, target, w, torch.arange(len(w), device=w.device))
    return z - s


def slicer(length: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most ``size`` that cover ``range(length)``."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def tiles(rows: int, cols: int, row_inputs: tuple[int, ...], n_inputs: int) -> Iterator[tuple[Any, Any]]:
    """A chunker's yield: functions that cut products, and inputs (``row_inputs`` by rows, the others by columns)."""
    for row in slicer(rows, TILE):
        for col in slicer(cols, TILE):
            cuts = [row if i in row_inputs else col for i in range(n_inputs)]
            yield (
                lambda a, row=row: tuple(part[row] for part in a),
                lambda x, cuts=cuts: tuple(part[cut] for part, cut in zip(x, cuts, strict=True)),
            )


def scores(x_mf: Tensor, w_nf: Tensor) -> Tensor:
    """``x @ w.T`` in a type that can be exponentiated: 16-bit products are widened to float32."""
    s_mn = x_mf @ w_nf.T
    return s_mn.float() if s_mn.dtype.itemsize < 4 else s_mn


def _identity(x: Tensor) -> Tensor:
    return x.new_full((len(x),), -torch.inf, dtype=torch.promote_types(x.dtype, torch.float32))


# Attention: T = {z: log weight, v: weighted mean}


def _attention_init(query: Tensor, key: Tensor, value: Tensor) -> Tensors:
    return _identity(query), query.new_zeros(len(query), value.shape[1])


def _attention_fold(query: Tensor, key: Tensor, value: Tensor) -> Tensors:
    s_mn = scores(query, key)
    z_m = s_mn.logsumexp(1)
    return z_m, (s_mn - z_m[:, None]).exp().to(value.dtype) @ value


def _attention_reduce(a: Tensors, b: Tensors) -> Tensors:
    (a_z, a_v), (b_z, b_v) = a, b
    z = torch.logaddexp(a_z, b_z)
    return z, a_v * (a_z - z).exp()[:, None] + b_v * (b_z - z).exp()[:, None]


def _attention_bwd(query: Tensor, key: Tensor, value: Tensor, a: Tensors, ga: Tensors) -> Tensors:
    (a_z, a_v), (g_z, g_v) = a, ga
    w_mn = (scores(query, key) - a_z[:, None]).exp()
    gs_mn = (g_z[:, None] + g_v @ value.T - (g_v * a_v).sum(1, keepdim=True)) * w_mn
    gs_mn = gs_mn.to(query.dtype)
    return gs_mn @ key, gs_mn.T @ query, w_mn.to(g_v.dtype).T @ g_v


_Attention = mk_GeMMMapReduce(
    "Attention",
    init=_attention_init,
    chunker=lambda query, key, value: tiles(len(query), len(key), row_inputs=(0,), n_inputs=3),
    proj_fold=_attention_fold,
    proj_fold_bwd=_attention_bwd,
    binary_reduce=_attention_reduce,
)


# Two-layer perceptron: T = {y: sum}


def _mlp_bwd(x: Tensor, p: Tensor, q: Tensor, a: Tensors, ga: Tensors) -> Tensors:
    (gy_md,) = ga
    h_mn = torch.relu(x @ p.T)
    gh_mn = (gy_md @ q.T) * (h_mn > 0)
    return gh_mn @ p, gh_mn.T @ x, h_mn.T @ gy_md


_Mlp = mk_GeMMMapReduce(
    "Mlp",
    init=lambda x, p, q: (x.new_zeros(len(x), q.shape[1]),),
    chunker=lambda x, p, q: tiles(len(x), len(p), row_inputs=(0,), n_inputs=3),
    proj_fold=lambda x, p, q: (torch.relu(x @ p.T) @ q,),
    proj_fold_bwd=_mlp_bwd,
    binary_reduce=lambda a, b: (a[0] + b[0],),
)


# Cross-entropy against classes: T = {z: log normaliser, s: the target's score}; the column's number is an input


def _cross_entropy_fold(x: Tensor, target: Tensor, w: Tensor, index: Tensor) -> Tensors:
    s_mn = scores(x, w)
    return s_mn.logsumexp(1), torch.where(target[:, None] == index, s_mn, 0.0).sum(1)


def _cross_entropy_bwd(
    x: Tensor, target: Tensor, w: Tensor, index: Tensor, a: Tensors, ga: Tensors
) -> tuple[Tensor | None, ...]:
    (a_z, _), (g_z, g_s) = a, ga
    softmax_mn = (scores(x, w) - a_z[:, None]).exp()
    gs_mn = softmax_mn * g_z[:, None] + torch.where(target[:, None] == index, g_s[:, None], 0.0)
    gs_mn = gs_mn.to(x.dtype)
    return gs_mn @ w, None, gs_mn.T @ x, None


_CrossEntropy = mk_GeMMMapReduce(
    "CrossEntropy",
    init=lambda x, target, w, index: (_identity(x), torch.zeros_like(_identity(x))),
    chunker=lambda x, target, w, index: tiles(len(x), len(w), row_inputs=(0, 1), n_inputs=4),
    proj_fold=_cross_entropy_fold,
    proj_fold_bwd=_cross_entropy_bwd,
    binary_reduce=lambda a, b: (torch.logaddexp(a[0], b[0]), a[1] + b[1]),
)
