"""Layers that people move to the language, written from its promise alone, held to dense float64 with gradients of both
orders: learned tables, several vectors, the best pairs, stored vectors, monoids without a gradient, statistics."""

import pytest
import torch

import monoidreduce as mr
from monoidreduce import Col, Row

M, N = 6, 11
I, J = torch.arange(M)[:, None], torch.arange(N)


@mr.op
def relative(q: Row["f"], k: Col["f"], v: Col["d"], bias: mr.Table["n"]):
    return mr.softmax_mean(q @ k + mr.lookup(bias, mr.row_index - mr.col_index + 3, clamp=True), v)


def dense_relative(q, k, v, bias):
    return (q @ k.mT + bias[..., (I - J + 3).clamp(0, bias.shape[-1] - 1)]).softmax(-1) @ v


@mr.op
def chosen(q: Row["h", "f"], k: Col["f"], w: Row["h"], v: Col["d"], u: Col):
    best = mr.topk((w * torch.relu(q @ k)).sum(), 4)
    return best.values, best.gather(v[1]), best.gather(u), mr.topk_mean((q @ k).amax(), v, 5)


def dense_chosen(q, k, w, v, u):
    s = torch.einsum("ihf,jf->ihj", q, k)
    best, top = torch.einsum("ih,ihj->ij", w, torch.relu(s)).topk(4), s.amax(1).topk(5)
    mean = (top.values.softmax(-1)[..., None] * v[top.indices]).sum(-2)
    return best.values, v[best.indices][..., 1], u[best.indices], mean


@mr.op
def bilinear(x: Row["d"], y: Col["e"], m: mr.Batch["d", "e"]):
    return mr.logsumexp((x @ m) @ y)


@mr.op
def statistics(q: Row["f"], k: Col["f"], t: Row["e"], u: Col["e"]):
    s, other = q @ k, t @ u
    z, z2 = mr.logsumexp(s), mr.logsumexp(other)
    distance = mr.softmax_mean(s, (mr.row_index - mr.col_index).abs())
    return (
        mr.sum(torch.exp(s - z), over="rows"),
        z - mr.softmax_mean(s, s),
        distance,
        mr.softmax_mean(s, s - other) - z + z2,
    )


def dense_statistics(q, k, t, u):
    p, log, other = (q @ k.mT).softmax(-1), (q @ k.mT).log_softmax(-1), (t @ u.mT).log_softmax(-1)
    return p.sum(-2), -(p * log).sum(-1), (p * (I - J).abs()).sum(-1), (p * (log - other)).sum(-1)


class Rotation(mr.Monoid):
    """The product of complex numbers."""

    re: mr.Scalar = 1.0
    im: mr.Scalar = 0.0

    def combine(a, b):
        return Rotation(re=a.re * b.re - a.im * b.im, im=a.re * b.im + a.im * b.re)


class Spread(mr.Monoid):
    """Weighted means and variances of vectors, as one merges them."""

    w: mr.Scalar = 0.0
    m: mr.Vector = 0.0
    c: mr.Vector = 0.0

    @staticmethod
    def domain(x):
        return (x.w >= 0) & (x.c >= 0).all(-1, keepdim=True)

    def combine(a, b):
        w, gap = a.w + b.w, b.m - a.m
        seen = torch.where(w == 0, 1.0, w)
        return Spread(w=w, m=a.m + gap * (b.w / seen), c=a.c + b.c + gap * gap * (a.w * b.w / seen))


@mr.op
def monoids(x: Row["f"], y: Col["f"], v: Col["d"]):
    s = torch.where(mr.col_index > mr.row_index + 6, 0.0, x @ y)  # the product of the others, where a factor is 0
    turn, spread = mr.reduce(Rotation, re=s, im=torch.sin(s)), mr.reduce(Spread, w=torch.exp(x @ y), m=v, c=0.0)
    return turn.re, turn.im, spread.m, spread.c


def dense_monoids(x, y, v):
    s, p = torch.where(J > I + 6, 0.0, x @ y.mT), torch.exp(x @ y.mT)
    turn, mean = torch.complex(s, torch.sin(s)).cumprod(-1)[:, -1], p @ v / p.sum(-1, keepdim=True)
    return turn.real, turn.imag, mean, (p[..., None] * (v - mean[:, None]) ** 2).sum(1)


CASES = {
    "tables of heads": (relative, dense_relative, [(2, M, 3), (2, N, 3), (2, N, 2), (2, 7)]),
    "indexer": (chosen, dense_chosen, [(M, 4, 3), (N, 3), (M, 4), (N, 2), (N,)]),
    "bilinear": (bilinear, lambda x, y, m: (x @ m @ y.mT).logsumexp(-1), [(2, M, 3), (2, N, 4), (2, 3, 4)]),
    "statistics": (statistics, dense_statistics, [(2, M, 3), (2, N, 3), (2, M, 4), (2, N, 4)]),
    "monoids": (monoids, dense_monoids, [(M, 3), (N, 3), (N, 2)]),
}


def derivatives(function, args):
    given = [a.clone().requires_grad_() for a in args]
    found = function(*given)
    values = list(found) if isinstance(found, (tuple, list)) else [found]
    cotangents = [torch.cos(torch.arange(v.numel()).to(v)).view(v.shape) for v in values]
    grads = torch.autograd.grad(values, given, cotangents, create_graph=True, materialize_grads=True)
    total = sum((g * torch.sin(1 + a)).sum() for g, a in zip(grads, args, strict=True))
    return [*values, *grads, *torch.autograd.grad(total, given, materialize_grads=True)]


@pytest.mark.parametrize("name", CASES)
def test_values_and_derivatives(name):
    op, dense, shapes = CASES[name]
    make = torch.Generator().manual_seed(4)
    args = [torch.randn(s, generator=make, dtype=torch.float64) for s in shapes]
    expected = derivatives(dense, args)
    with mr.use(engine="eager"):
        found = derivatives(op, args)
    for ours, right in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-8, atol=1e-8)
