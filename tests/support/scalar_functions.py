"""Bodies of inverse, gamma and error functions and of bits, for the tests of several engines."""

import math

import torch

import monoidreduce as mr
from monoidreduce import Col, Row


def smooth_values(s, t):
    """Functions of a pair's numbers; t is positive and s between -1 and 1."""
    return {
        "sinc": torch.sinc(3 * s),
        "asin": torch.asin(0.9 * s),
        "acos": torch.acos(0.9 * s),
        "atan2": torch.atan2(s, t - 1.2),
        "hypot": torch.hypot(s, t),
        "asinh": torch.asinh(5 * s),
        "acosh": torch.acosh(1.05 + t),
        "atanh": torch.atanh(0.9 * s),
        "erfinv": torch.erfinv(0.9 * s),
        "lgamma": torch.lgamma(t) + torch.lgamma(0.4 * s - 1.5),
        "digamma": torch.digamma(t) + torch.digamma(0.4 * s - 3.5),
        "polygamma": torch.polygamma(1, t) + torch.polygamma(1, 0.4 * s - 1.5),
        "log10": torch.log10(t),
        "logit": torch.logit(0.5 + 0.4 * s),
        "xlogy": torch.xlogy(s, t),
        "fmod": torch.fmod(4 * s, 0.7 + t),
        "copysign": torch.copysign(s, t - 1.2),
    }


@mr.op
def smooth(x: Row["f"], y: Col["f"], names: str):
    """The sum of the named functions."""
    s = torch.tanh(x @ y)
    values = smooth_values(s, torch.exp(s))
    return mr.sum(sum(values[name] for name in names.split()))


def smooth_dense(x, y, names):
    s = torch.tanh(x @ y.mT)
    values = smooth_values(s, torch.exp(s))
    return sum(values[name] for name in names.split()).sum(-1)


NAMES = tuple(smooth_values(torch.zeros(1), torch.ones(1)))
# sums of many: functions whose derivatives have a form in C++, and the others
MANY = " ".join(n for n in NAMES if n not in ("sinc", "polygamma", "fmod")), "sinc polygamma fmod"


def bit_values(i, j):
    """Whole numbers of a pair, in torch and in a body alike."""
    return [
        i & j,
        i | j,
        i ^ j,
        ~i + j,
        (i ^ j) + (i & j),
        (i & 7) << (j & 15),
        i >> (j & 31),
        i << 3 >> 2,
        (i ^ 0xFFFFFFFF) & 0x123456789A,
        torch.bitwise_left_shift(i, j),
        torch.bitwise_right_shift(i, j),
        torch.fmod(i, (j & 15) + 1),
        (i > j) & 1 | i,
    ]


@mr.op
def bits(i: Row, j: Col):
    return tuple(f(v) for v in bit_values(i, j) for f in (mr.sum, mr.max))


def bits_dense(i, j):
    values = bit_values(*torch.broadcast_tensors(i.long()[:, None], j.long()))
    return tuple(f(v) for v in values for f in (lambda v: v.sum(1), lambda v: v.amax(1)))


@mr.op
def hamming(x: Row["w"], y: Col["w"], width: int):
    d = mr.popcount(x ^ y, int(width)).sum()
    return mr.topk(d, 2, largest=False)


def hamming_dense(x, y, width):
    def count(v):
        return sum((v >> k) & 1 for k in range(width)).sum(-1)

    return count(x.long()[:, None] ^ y.long())


def interleave(x):
    """The lowest 16 bits of a number, each followed by a zero."""
    for step, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        x = (x | (x << step)) & mask
    return x


@mr.op
def same_cell(x: Row["two"], y: Col["two"], size: int):
    """How many points share the first bits of their Morton code."""
    a, b = (interleave(v[0] & 65535) | interleave(v[1] & 65535) << 1 for v in (x, y))
    return mr.count(a >> size == b >> size)


def codes(dtype, rows, cols, words, seed=0):
    bits = torch.iinfo(dtype).bits
    g = torch.Generator().manual_seed(seed)
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    if bits == 64:
        low, high = -(2**63), 2**63 - 1
    draw = lambda n: torch.randint(low, high, (n, words), generator=g).to(dtype)
    return draw(rows), draw(cols), bits


SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 1e-30, 40.0, -40.3, math.inf, -math.inf, math.nan])
