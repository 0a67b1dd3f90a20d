"""Thirty calls that between them use every ready-made layer's family and every sort of op: public names alone."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import monoidreduce as mr
from monoidreduce import Col, Pair, Row, ops

Call = tuple[Callable[..., Any], Callable[[], tuple]]


@mr.op
def softcap_attention(q: Row["f"], k: Col["f"], v: Col["d"], cap: float):
    return mr.softmax_mean(cap * torch.tanh(q @ k / cap), v)


@mr.op
def biased_attention(q: Row["f"], k: Col["f"], v: Col["d"], bias: Pair):
    return mr.softmax_mean(q @ k + bias, v)


@mr.op
def pooled(x: Row["d"], w: Col["d"]):
    s = x @ w
    return mr.max(s), mr.min(s, over="rows"), mr.var(s), mr.mean(s, over="rows")


@mr.op
def over_rows(q: Row["f"], k: Col["f"], v: Row["d"]):
    s = q @ k
    return mr.softmax_mean(s, v, over="rows"), mr.logsumexp(s, over="rows"), mr.topk(s, 3, over="rows").values


@mr.op
def normalised(q: Row["f"], k: Col["f"], v: Col["d"]):
    s = q @ k * 0.25
    return mr.sum(torch.exp(s - mr.logsumexp(s)) * v)


@mr.op
def target_scores(x: Row["d"], target: Row, w: Col["d"]):
    s = torch.tanh(x @ w)
    return mr.sum(torch.where(mr.col_index == target, s, 0.0)) - mr.mean(s)


@mr.op
def gaussian(x: Row["f"], y: Col["f"], b: Col["d"], gamma: float):
    return mr.sum(torch.exp(-gamma * mr.sqdist(x, y)) * b)


class LogWeighted(mr.Monoid):
    """A mean weighed by exponentials, as a user would write it."""

    z: mr.Scalar = -math.inf
    v: mr.Vector = 0.0

    def combine(a, b):
        z = torch.logaddexp(a.z, b.z)
        safe = torch.where(z == -math.inf, 0.0, z)
        return LogWeighted(z=z, v=a.v * torch.exp(a.z - safe) + b.v * torch.exp(b.z - safe))

    def pullback(c, a, g):
        w = torch.exp(a.z - c.z)
        return LogWeighted(z=w * (g.z + mr.dot(g.v, a.v - c.v)), v=w * g.v)


@mr.op
def own_monoid(q: Row["f"], k: Col["f"], v: Col["d"]):
    total = mr.reduce(LogWeighted, z=q @ k, v=v)
    return total.z, total.v


@mr.op
def product(x: Row["f"], y: Col["f"]):
    factor = 1 + 0.25 * torch.tanh(x @ y)
    return mr.reduce(mr.monoids.Prod, v=factor, p=factor, zeros=0).v


def _normal(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    gen = torch.Generator().manual_seed(5)
    return [torch.randn(s, generator=gen, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def _labels(count: int, high: int) -> Tensor:
    return torch.arange(count) * 7 % high


def _qkv(*batch: int, rows: int = 33, cols: int = 33, f: int = 16) -> Callable[[], tuple]:
    return lambda: tuple(_normal((*batch, rows, f), (*batch, cols, f), (*batch, cols, f)))


def _head(rows: int = 24, classes: int = 50, d: int = 16, dtype: torch.dtype = torch.float32) -> Callable[[], tuple]:
    return lambda: (*_normal((rows, d), (classes, d), dtype=dtype), _labels(rows, classes))


def _pairs(rows: int = 33, cols: int = 40, f: int = 16) -> Callable[[], tuple]:
    return lambda: tuple(_normal((rows, f), (cols, f)))


def _with(op: Callable, **options: Any) -> Callable:
    return lambda *args: op(*args, **options)


CALLS: dict[str, Call] = {
    "attention": (ops.attention, _qkv(2, 3)),
    "causal attention": (_with(ops.attention, causal=True), _qkv(2)),
    "window attention": (_with(ops.attention, causal=True, window=8), _qkv(rows=70, cols=70)),
    "soft cap attention": (_with(ops.attention, softcap=5.0), _qkv(2)),
    "dropout attention": (_with(ops.attention, dropout_p=0.25, seed=3), _qkv(2)),
    "alibi attention": (
        lambda q, k, v: ops.attention(q, k, v, causal=True, alibi_slopes=torch.tensor([0.5, 0.25])),
        _qkv(2),
    ),
    "grouped attention": (
        _with(ops.attention, enable_gqa=True),
        lambda: tuple(_normal((1, 4, 20, 16), (1, 2, 30, 16), (1, 2, 30, 16))),
    ),
    "attention, float16": (ops.attention, lambda: tuple(_normal(*[(2, 40, 32)] * 3, dtype=torch.float16))),
    "decoding": (
        lambda q, k, v: ops.attention_decode(q, k, v, torch.tensor([9, 30])),
        lambda: tuple(_normal((2, 2, 1, 16), (2, 2, 40, 16), (2, 2, 40, 16))),
    ),
    "attention with its logarithm": (_with(ops.attention, return_lse=True), _qkv(rows=20, cols=90)),
    "cross-entropy": (ops.linear_cross_entropy, _head()),
    "wide cross-entropy": (ops.linear_cross_entropy, _head(32, 128, 300)),
    "cross-entropy, options": (
        _with(ops.linear_cross_entropy, label_smoothing=0.1, z_loss=0.01, softcap=10.0, ignore_index=7),
        _head(),
    ),
    "log-probabilities": (_with(ops.linear_logprobs, return_entropy=True), _head()),
    "distillation": (ops.linear_kl, lambda: tuple(_normal((24, 16), (50, 16), (24, 12), (50, 12)))),
    "mlp": (ops.mlp, lambda: tuple(_normal((33, 16), (40, 16), (40, 8)))),
    "gelu mlp, dropout": (
        lambda x, p, q, b: ops.mlp(x, p, q, activation="gelu", bias=b, dropout_p=0.5, seed=4),
        lambda: tuple(_normal((33, 16), (40, 16), (40, 8), (40,))),
    ),
    "gated mlp": (ops.gated_mlp, lambda: tuple(_normal((33, 16), (40, 16), (40, 16), (40, 8)))),
    "kernel sum": (ops.kernel_sum, lambda: tuple(_normal((33, 3), (40, 3), (40, 2)))),
    "sinkhorn": (lambda x, y: ops.sinkhorn(x, y, eps=0.5, iterations=3), _pairs(f=3)),
    "neighbours": (lambda x, y: ops.knn(x, y, 3), _pairs(f=5)),
    "chamfer": (ops.chamfer, _pairs(f=3)),
    "sampling": (lambda x, w: ops.linear_sample(x, w, 7), _pairs()),
    "top k": (lambda x, w: ops.linear_topk(x, w, 4, log_probs=True), _pairs()),
    "contrastive": (_with(ops.contrastive_loss, temperature=0.1), _pairs(32, 32)),
    "sigmoid contrastive": (_with(ops.contrastive_loss, kind="siglip", scale=10.0, bias=-5.0), _pairs(32, 32)),
    "max pool": (ops.max_pool_product, _pairs()),
    "user op: soft cap": (_with(softcap_attention, cap=3.0), _qkv()),
    "user op: bias": (biased_attention, lambda: tuple(_normal((20, 8), (30, 8), (30, 4), (20, 30)))),
    "user op: pooled": (pooled, _pairs()),
    "user op: over rows": (over_rows, lambda: tuple(_normal((33, 16), (40, 16), (33, 4)))),
    "user op: two passes": (normalised, _qkv()),
    "user op: labels": (target_scores, lambda: (lambda x, w, t: (x, t, w))(*_head()())),
    "user op: gaussian, summed": (
        lambda x, y, b: gaussian.total(x, y, b, 0.5),
        lambda: tuple(_normal((33, 3), (40, 3), (40, 2))),
    ),
    "own monoid": (own_monoid, _qkv()),
    "product": (product, _pairs()),
}


def run_call(call: Call, mark: Callable[[str], None] = lambda phase: None) -> None:
    """A call and its gradients; ``mark`` is told before each."""
    op, make = call
    args = make()
    mark("forward")
    outputs = [v for v in tree_leaves(op(*args)) if isinstance(v, Tensor) and v.requires_grad]
    if outputs:
        mark("backward")
        inputs = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        torch.autograd.grad(outputs, inputs, [torch.ones_like(v) for v in outputs], allow_unused=True)
