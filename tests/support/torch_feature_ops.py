"""Ops of every shape for the tests of torch's features: what they return, what they take, and the same densely."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import monoidreduce as mr
from monoidreduce import Col, Row


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"], scale: float, causal: bool = False):
    s = q @ k * scale
    if causal:
        s = torch.where(mr.col_index <= mr.row_index, s, -torch.inf)
    return mr.softmax_mean(s, v)


def dense_attention(q, k, v, scale, causal=False):
    s = q @ k.mT * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return torch.softmax(s, -1) @ v


class Best(NamedTuple):
    value: Any
    at: Any


@mr.op
def several(q: Row["f"], k: Col["f"], activation: Callable):
    s = activation(q @ k)
    return {"z": mr.logsumexp(s), "best": Best(mr.max(s), mr.argmax(s)), "more": [mr.sum(s), (mr.mean(s),)]}


def dense_several(q, k, activation):
    s = activation(q @ k.mT)
    best = s.max(-1)
    return {"z": s.logsumexp(-1), "best": Best(best.values, best.indices), "more": [s.sum(-1), (s.mean(-1),)]}


def together(found):
    """One tensor of all that ``several`` returns."""
    return found["z"] + found["best"].value + 0.1 * found["best"].at + found["more"][0] * found["more"][1][0]


@mr.op
def both_ways(x: Row["d"], y: Col["d"], temperature: float):
    s = x @ y / temperature
    return mr.logsumexp(s), mr.logsumexp(s, over="rows")


class LogWSum(mr.Monoid):
    z: mr.Scalar = -math.inf
    v: mr.Vector = 0.0

    def combine(a, b):
        top = torch.maximum(a.z, b.z)
        top = torch.where(top == -math.inf, 0.0, top)
        wa, wb = torch.exp(a.z - top), torch.exp(b.z - top)
        total = wa + wb
        return LogWSum(z=top + torch.log(total), v=(wa * a.v + wb * b.v) / torch.where(total == 0, 1.0, total))

    def pullback(c, a, g):
        w = torch.exp(a.z - torch.where(c.z == -math.inf, 0.0, c.z))
        return LogWSum(z=w * (g.z + mr.dot(g.v, a.v - c.v)), v=w * g.v)


@mr.op
def own_monoid(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.reduce(LogWSum, z=q @ k, v=v)


@mr.op
def biased(q: Row["f"], k: Col["f"], v: Col["d"], bias: mr.Pair):
    return mr.softmax_mean(q @ k + bias, v)


@mr.op
def noisy(q: Row["f"], k: Col["f"], seed: int):
    return mr.sum(mr.dropout(q @ k, 0.5, seed))


def doubled_tanh(x):
    return torch.tanh(x) * 2


def make(*shapes, dtype=torch.float64, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(s, dtype=dtype, generator=generator).requires_grad_(grad) for s in shapes)
