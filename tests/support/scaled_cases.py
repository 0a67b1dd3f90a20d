"""Vectors stored in 8 bits with scales: layers of them, and how tensors are stored so."""

import torch

import monoidreduce as mr
from monoidreduce import Col, Row

KINDS = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


@mr.op
def head(x: Row["f"], target: Row, w: Col["f"]):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == target, s, 0.0))


@mr.op
def mlp(x: Row["f"], up: Col["f"], down: Col["d"]):
    return mr.sum(torch.relu(x @ up) * down)


@mr.op
def near(x: Row["f"], y: Col["f"]):
    return mr.topk(mr.sqdist(x, y), 3, largest=False).values


@mr.op
def best(x: Row["f"], y: Col["f"]):
    return mr.max(x @ y)


def store(x, kind, scales="vector"):
    """A tensor in 8 bits; ``scales``: of each ``"vector"``, each ``"batch"`` element or one ``"number"``."""
    most = x.abs().amax(-1)
    scale = most if scales == "vector" else most.amax(-1, keepdim=True) if scales == "batch" else most.amax()
    scale = scale / (127 if kind is torch.int8 else 256)
    values = x / (scale.unsqueeze(-1) if scale.dim() else scale)
    scale = float(scale) if scales == "number" else scale
    return mr.scaled((values.round() if kind is torch.int8 else values).to(kind), scale)


def problem(op, kind, scales="vector", batch=(2,), width=24, dtype=torch.float64, rows=7, cols=13):
    """The arguments of a layer: plain ones, and the same with columns stored."""
    draw = lambda *shape: torch.randn(*batch, *shape, dtype=dtype)
    x, y, z = draw(rows, width), draw(cols, width), draw(cols, 5)
    y, z = store(y, kind, scales), store(z, kind, scales)
    if op is head:
        return x, torch.randint(0, cols, (*batch, rows)), y
    return (x, y) if op is near else (x, y, z)


def widen(args, dtype):
    """The same arguments as plain tensors."""
    return [a.dequantize(dtype) if not isinstance(a, torch.Tensor) else a for a in args]
