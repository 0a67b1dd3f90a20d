"""Reductions and ready-made layers on shapes with nothing in them: no batch, no rows, no columns, no features."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row, ops

Sizes = tuple[tuple[int, ...], int, int, int]  # batch, rows, columns, features
EMPTY: dict[str, Sizes] = {
    "no batch": ((0,), 4, 6, 5),
    "an inner batch of none": ((2, 0), 4, 6, 5),
    "no rows": ((), 0, 6, 5),
    "no columns": ((2,), 4, 0, 5),
    "no features": ((2,), 4, 6, 0),
    "nothing": ((0,), 0, 0, 0),
}
E = 3  # features of values

# What a row of no columns gives, where it is a number
REDUCTIONS: dict[str, tuple[Callable[..., Any], float]] = {
    "sum": (lambda s, v: mr.sum(s), 0.0),
    "sum of vectors": (lambda s, v: mr.sum(torch.tanh(s) * v), 0.0),
    "mean": (lambda s, v: mr.mean(s), math.nan),
    "logsumexp": (lambda s, v: mr.logsumexp(s), -math.inf),
    "weighted_mean": (lambda s, v: mr.weighted_mean(s, v), 0.0),
    "softmax_mean": (lambda s, v: mr.softmax_mean(s, v), 0.0),
    "max": (lambda s, v: mr.max(s), -math.inf),
    "min": (lambda s, v: mr.min(s), math.inf),
    "argmax": (lambda s, v: mr.argmax(s), -1),
    "argmin": (lambda s, v: mr.argmin(s), -1),
    "var": (lambda s, v: mr.var(s), math.nan),
    "any": (lambda s, v: mr.any(s > 0), 0),
    "all": (lambda s, v: mr.all(s > 0), 1),
    "count": (lambda s, v: mr.count(s >= 0), 0),
    "sample": (lambda s, v: mr.sample(s, 3), -1),
    "gather": (lambda s, v: mr.sum(torch.where(mr.col_index == mr.row_index + 1, s, 0.0)), 0.0),
    "gather of vectors": (lambda s, v: mr.sum(torch.where(mr.col_index == mr.row_index, torch.exp(s), 0.0) * v), 0.0),
    "max and gather": (
        lambda s, v: mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == mr.row_index, s, 0.0)),
        -math.inf,
    ),
    "monoid": (lambda s, v: mr.reduce(mr.monoids.LogWSum, z=s, v=v).v, 0.0),
    "dropout": (lambda s, v: mr.sum(mr.dropout(s, 0.5, 3)), 0.0),
    "over rows": (lambda s, v: mr.max(s, over="rows"), math.nan),
    "gather over rows": (lambda s, v: mr.sum(torch.where(mr.col_index == mr.row_index, s, 0.0), over="rows"), math.nan),
    "distance": (lambda s, v: mr.sum(torch.exp(-s) * v), 0.0),
}


def tensors(sizes: Sizes) -> list[Tensor]:
    batch, m, n, d = sizes
    return [torch.randn(*batch, *shape, requires_grad=True) for shape in ((m, d), (n, d), (n, E))]


def reduction(name: str) -> mr.Op:
    f, _ = REDUCTIONS[name]

    @mr.op
    def op(x: Row["d"], y: Col["d"], v: Col["e"]):
        return f(mr.sqdist(x, y) if name == "distance" else x @ y, v)

    return op


def differentiated(value: Tensor, inputs: list[Tensor]) -> None:
    """Every gradient is there or is none, in its input's shape, and finite."""
    assert value.requires_grad or not value.is_floating_point(), value
    if not value.requires_grad:
        return
    grads = torch.autograd.grad(value, inputs, torch.ones_like(value), allow_unused=True)
    for g, x in zip(grads, inputs, strict=True):
        assert g is None or (g.shape == x.shape and g.isfinite().all()), (g, x.shape)


def check(name: str, engine: str, kind: str) -> None:
    """Shapes are those of any other sizes; values are the identity, or those of a score of 0."""
    sizes = EMPTY[kind]
    batch, m, n, d = sizes
    given = tensors(sizes)
    with mr.use(engine=engine):
        value = reduction(name)(*given)
        full = reduction(name)(*tensors(((1,) * len(batch), m or 4, n or 6, d or 5)))
        length = n if name.endswith("over rows") else m
        assert value.shape == (*batch, length, *full.shape[len(batch) + 1 :]) and value.dtype == full.dtype
        differentiated(value, given)
        if n == 0 and value.numel():
            torch.testing.assert_close(value, torch.full_like(value, REDUCTIONS[name][1]), equal_nan=True)
        if d == 0 and value.numel():
            zeros = [torch.zeros(*batch, length, 1) for length in (m, n)]
            torch.testing.assert_close(value, reduction(name)(*zeros, given[2]), equal_nan=True)


# name -> (x, y of the layer's own shapes) -> its value
LAYERS: dict[str, Callable[..., Any]] = {
    "attention": lambda x, y, v: ops.attention(x, y, v),
    "causal attention": lambda x, y, v: ops.attention(x, y, v, causal=True, window=2),
    "cross_entropy": lambda x, y, v: ops.linear_cross_entropy(x, _one(y), _labels(x, y), reduction="sum"),
    "smoothed": lambda x, y, v: ops.linear_cross_entropy(
        x, _one(y), _labels(x, y), label_smoothing=0.1, reduction="none"
    ),
    "logprobs": lambda x, y, v: ops.linear_logprobs(x, _one(y), _labels(x, y)),
    "entropy": lambda x, y, v: ops.linear_entropy(x, _one(y)),
    "kl": lambda x, y, v: ops.linear_kl(x, _one(y), x.detach(), _one(y).detach(), reduction="none"),
    "jsd": lambda x, y, v: ops.linear_jsd(x, _one(y), x.detach(), _one(y).detach(), reduction="none"),
    "contrastive": lambda x, y, v: ops.contrastive_loss(x, x * 2, reduction="none"),
    "mlp": lambda x, y, v: ops.mlp(x, _one(y), _one(v)),
    "gated_mlp": lambda x, y, v: ops.gated_mlp(x, _one(y), _one(y), _one(v)),
    "kmeans": lambda x, y, v: tuple(ops.kmeans_assign(x, y)),
    "maxsim": lambda x, y, v: ops.maxsim(x, y),
    "chamfer": lambda x, y, v: ops.chamfer(x, y, reduction="none"),
    "kernel_sum": lambda x, y, v: ops.kernel_sum(x, y, v),
    "kernel_logsumexp": lambda x, y, v: ops.kernel_logsumexp(x, y, v[..., 0]),
    "softmin": lambda x, y, v: ops.softmin(x, y, v[..., 0], eps=0.5),
    "sample": lambda x, y, v: ops.linear_sample(x, _one(y), 3),
    "argmax": lambda x, y, v: ops.linear_argmax(x, _one(y)),
    "max_pool": lambda x, y, v: ops.max_pool_product(x, y),
}


def _one(y: Tensor) -> Tensor:
    """A weight without a batch."""
    return y.new_ones(y.shape[-2:]).requires_grad_()


def _labels(x: Tensor, y: Tensor) -> Tensor:
    return torch.zeros(x.shape[:-1], dtype=torch.int64) - (100 if y.shape[-2] == 0 else 0)


def check_layer(name: str, engine: str, kind: str) -> None:
    given = tensors(EMPTY[kind])
    with mr.use(engine=engine):
        found = LAYERS[name](*given)
        for value in found if isinstance(found, tuple) else (found,):
            if isinstance(value, Tensor) and value.is_floating_point():
                safe = torch.where(value.isfinite(), value, 0.0)
                differentiated(safe, given)
