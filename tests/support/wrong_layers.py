"""Layers and monoids as users write them, most of them wrong in one way each: what ``monoidreduce check`` must find."""

import torch

import monoidreduce as mr
from monoidreduce import Col, Row

NUMBER = 3


# Monoids


class Total(mr.Monoid):
    """A sum: nothing is wrong with it."""

    v: mr.Scalar = 0.0

    def combine(a, b):
        return Total(v=a.v + b.v)

    def pullback(c, a, g):
        return Total(v=g.v)


class Halves(mr.Monoid):
    """The mean of two: grouping matters."""

    v: mr.Scalar = 0.0

    def combine(a, b):
        return Halves(v=(a.v + b.v) / 2)


class Affine(mr.Monoid):
    """x -> scale x + shift, one after the other: order matters."""

    scale: mr.Scalar = 1.0
    shift: mr.Scalar = 0.0

    def combine(a, b):
        return Affine(scale=a.scale * b.scale, shift=a.shift * b.scale + b.shift)


class WrongPullback(mr.Monoid):
    """A sum whose gradient is doubled."""

    v: mr.Scalar = 0.0

    def combine(a, b):
        return WrongPullback(v=a.v + b.v)

    def pullback(c, a, g):
        return WrongPullback(v=2 * g.v)


class WrongIdentity(mr.Monoid):
    """A maximum that begins at 0."""

    v: mr.Scalar = 0.0

    def combine(a, b):
        return WrongIdentity(v=torch.maximum(a.v, b.v))


# Ops


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k, v)


@mr.op
def branches(q: Row["f"], k: Col["f"], v: Col["d"]):
    s = q @ k
    if s > 0:
        s = 2 * s
    return mr.softmax_mean(s, v)


@mr.op
def with_wrong_monoid(q: Row["f"], k: Col["f"]):
    return mr.reduce(WrongPullback, v=torch.tanh(q @ k)).v


@mr.op
def stumbles(q: Row["f"], k: Col["f"]):
    raise ValueError("no such thing")


def helper(x):
    return x


# The papers' factories: the same perceptron in one tile, which is the whole matrix, and in tiles


def perceptron(name, cut):
    return mr.MonoidReduce(
        name,
        init=lambda a, b: (a[0].new_zeros(len(a[0]), b[1].shape[1]),),
        avals=1,
        bvals=2,
        islice=cut,
        jslice=cut,
        proj_fold=lambda a, b: (torch.relu(a[0] @ b[0].T) @ b[1],),
        binary_reduce=lambda p, q: (p[0] + q[0],),
        D=lambda p, p_local, g: g,
    )


Whole = perceptron("Whole", lambda parts: [tuple(parts)])
Tiled = perceptron("Tiled", lambda parts: zip(*(part.split(64) for part in parts), strict=True))


def Whole_inputs(rows, cols):
    return torch.randn(rows, 8), torch.randn(cols, 8), torch.randn(cols, 8)


def Whole_dense(x, p, q):
    return torch.relu(x @ p.T) @ q


Tiled_inputs, Tiled_dense = Whole_inputs, Whole_dense


# Functions around an op


def vectors(rows, cols):
    return torch.randn(rows, 6), torch.randn(cols, 6), torch.randn(cols, 6)


def dense_attention(q, k, v):
    return (q @ k.T).softmax(-1) @ v


def masked(q, k, v):
    """Only truth values are built for all pairs."""
    seen = torch.arange(len(q))[:, None] >= torch.arange(len(k))
    return attention(q, k, v) * seen.sum(-1, keepdim=True)


masked_inputs = vectors


def masked_dense(q, k, v):
    seen = torch.arange(len(q))[:, None] >= torch.arange(len(k))
    return dense_attention(q, k, v) * seen.sum(-1, keepdim=True)


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return 2 * g


def doubled(q, k, v):
    return Doubles.apply(attention(q, k, v))


def shifted(q, k, v):
    return attention(q, k, v) + 1e-3


def random(q, k, v):
    return attention(q, k, v) * (1 + 1e-3 * torch.rand(()))


def undocumented(q, k, v):
    return attention(q, k, v)


doubled_inputs = shifted_inputs = random_inputs = undocumented_inputs = vectors
doubled_dense = shifted_dense = random_dense = dense_attention
