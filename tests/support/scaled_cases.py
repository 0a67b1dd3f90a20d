"""Vectors stored in 8 bits with scales: layers of them, and how tensors are stored so."""

import torch
import torch.nn.functional as F

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


@mr.op
def cosine(x: Row["f"], y: Col["f"], z: Col["d"]):
    """What is computed of stored vectors alone: norms, one feature."""
    return mr.softmax_mean(F.normalize(x) @ F.normalize(y) + torch.tanh(z[0]), z)


def store(x, kind, scales="vector"):
    """A tensor in 8 bits; ``scales``: of each ``"vector"``, each ``"batch"`` element or one ``"number"``."""
    most = x.abs().amax(-1)
    scale = most if scales == "vector" else most.amax(-1, keepdim=True) if scales == "batch" else most.amax()
    scale = scale / (127 if kind is torch.int8 else 256)
    values = x / (scale.unsqueeze(-1) if scale.dim() else scale)
    scale = float(scale) if scales == "number" else scale
    return mr.scaled((values.round() if kind is torch.int8 else values).to(kind), scale)


def store_blocks(x, block, kind=torch.uint8):
    """A tensor with a scale for each block of features: of uint8 in 4 bits, two in a byte."""
    width, most = x.shape[-1], {torch.uint8: 7, torch.int8: 127}.get(kind, 256)
    scale = F.pad(x, (0, -width % block)).unflatten(-1, (-1, block)).abs().amax(-1) / most
    values = x / scale.repeat_interleave(block, -1)[..., :width]
    if kind is not torch.uint8:
        return mr.scaled((values.round() if kind is torch.int8 else values).to(kind), scale, block=block)
    nibbles = (values.round() + 8).to(torch.uint8)
    return mr.scaled(nibbles[..., ::2] | nibbles[..., 1::2] << 4, scale, block=block, bits=4)


PACKED = {
    "4 bits, blocks of 16": lambda x: store_blocks(x, 16),
    "int8, blocks of 10": lambda x: store_blocks(x, 10, torch.int8),
    "FP8, blocks of 32": lambda x: store_blocks(x, 32, torch.float8_e4m3fn),
    "4 bits, scales of vectors": lambda x: _of_vectors(store_blocks(x, x.shape[-1])),
}


def _of_vectors(stored):
    return mr.scaled(stored.values, stored.scale.squeeze(-1), bits=4)


def problem(op, kind, scales="vector", batch=(2,), width=24, dtype=torch.float64, rows=7, cols=13):
    """The arguments of a layer: plain ones, and the same with columns stored; ``kind``: in a type, or by a function."""
    draw = lambda *shape: torch.randn(*batch, *shape, dtype=dtype)
    x, y, z = draw(rows, width), draw(cols, width), draw(cols, 6)
    y, z = (kind(t) if callable(kind) else store(t, kind, scales) for t in (y, z))
    if op is head:
        return x, torch.randint(0, cols, (*batch, rows)), y
    return (x, y) if op is near else (x, y, z)


def widen(args, dtype):
    """The same arguments as plain tensors."""
    return [a.dequantize(dtype) if not isinstance(a, torch.Tensor) else a for a in args]
