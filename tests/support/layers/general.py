"""The zoo's remaining rooms: perceptrons, pooling, statistics, monoids of one's own, odd corners of the language."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import Col, Row
from tests.support.layers.attention import noise
from tests.support.layers.base import at_target, gaps, layer, pairs

# Perceptrons: every column is a hidden unit


def _mlp_inputs(d):
    return d.rows(5), d.cols(5), d.cols(3)


@layer(lambda x, p, q: torch.relu(x @ p.mT) @ q, _mlp_inputs)
def relu_mlp(x: Row["d"], p: Col["d"], q: Col["n"]):
    return mr.sum(torch.relu(x @ p) * q)


@layer(lambda x, p, q, bias: F.gelu(x @ p.mT + bias) @ q, lambda d: (*_mlp_inputs(d), d.cols()))
def gelu_mlp(x: Row["d"], p: Col["d"], q: Col["n"], bias: Col):
    return mr.sum(F.gelu(x @ p + bias) * q)


@layer(lambda x, p, q: F.gelu(x @ p.mT, approximate="tanh") @ q, _mlp_inputs)
def gelu_tanh_mlp(x: Row["d"], p: Col["d"], q: Col["n"]):
    return mr.sum(F.gelu(x @ p, approximate="tanh") * q)


@layer(lambda x, p, q: F.silu(x @ p.mT) @ q, _mlp_inputs)
def silu_mlp(x: Row["d"], p: Col["d"], q: Col["n"]):
    return mr.sum(F.silu(x @ p) * q)


@layer(lambda x, p, q, act: act(x @ p.mT) @ q, lambda d: (*_mlp_inputs(d), torch.tanh))
def mlp_of_any_activation(x: Row["d"], p: Col["d"], q: Col["n"], act: Callable):
    return mr.sum(act(x @ p) * q)


@layer(
    lambda x, a, b, out: (F.silu(x @ a.mT) * (x @ b.mT)) @ out, lambda d: (*_mlp_inputs(d)[:2], d.cols(5), d.cols(3))
)
def swiglu(x: Row["d"], a: Col["d"], b: Col["d"], out: Col["n"]):
    return mr.sum(F.silu(x @ a) * (x @ b) * out)


# Pooling and statistics


@layer(
    lambda x, w, bias: ((x @ w.mT + bias).amax(-1), (x @ w.mT + bias).argmax(-1), (x @ w.mT + bias).amin(-2)),
    lambda d: (d.rows(5), d.cols(5), d.cols()),
)
def pooling(x: Row["d"], w: Col["d"], bias: Col):
    s = x @ w + bias
    return mr.max(s), mr.argmax(s), mr.min(s, over="rows")


def _moments(x, w):
    s = x @ w.mT
    return s.mean(-1), s.var(-1, correction=0), s.var(-2, correction=0)


@layer(_moments, lambda d: (d.rows(5), d.cols(5)))
def moments(x: Row["d"], w: Col["d"]):
    s = x @ w
    return mr.mean(s), mr.var(s, correction=0), mr.var(s, correction=0, over="rows")


@layer(lambda a, b: torch.logsumexp(-gaps(a, b).abs(), -1), lambda d: (d.rows(), d.cols()))
def soft_nearest_number(a: Row, b: Col):
    return mr.logsumexp(-(a - b).abs())


def _standard(x, w, q):
    s = x @ w.mT
    mean, spread = s.mean(-1, keepdim=True), s.var(-1, correction=0, keepdim=True)
    return torch.tanh((s - mean) / torch.sqrt(spread + 0.1)) @ q


@layer(_standard, _mlp_inputs)
def normalized_mlp(x: Row["d"], w: Col["d"], q: Col["n"]):
    s = x @ w
    return mr.sum(torch.tanh((s - mr.mean(s)) * torch.rsqrt(mr.var(s, correction=0) + 0.1)) * q)


def _top_mean(x, w):
    s = x @ w.mT
    top = s.topk(3)
    return top.values.mean(-1), torch.exp(s - top.values[..., :1]).sum(-1)


@layer(_top_mean, lambda d: (d.rows(5), d.cols(5)), least_cols=3)
def mean_of_the_best(x: Row["d"], w: Col["d"]):
    s = x @ w
    best = mr.topk(s, 3).values
    return best.mean(), mr.sum(torch.exp(s - best[0]))


def _gumbel_sample(q, k, seed):
    s = q @ k.mT
    return (s + noise(*s.shape, seed)[1]).argmax(-1)


@layer(_gumbel_sample, lambda d: (d.rows(5), d.cols(5), 99), differentiable=False)
def categorical_sample(q: Row["f"], k: Col["f"], seed: int):
    return mr.sample(q @ k, seed)


# Gathers and scatters: sums against an index that equals a given one


@layer(F.embedding, lambda d: (d.targets(), d.cols(3)))
def embedding_lookup(word: Row, table: Col["d"]):
    return mr.sum(torch.where(mr.col_index == word, table, 0.0))


def _segments(x, label, like):
    total = torch.zeros(len(like), x.shape[-1], dtype=x.dtype).index_add(0, label, x)
    return total * like.unsqueeze(-1), torch.bincount(label, minlength=len(like))


@layer(_segments, lambda d: (d.rows(3), d.targets(), d.cols()))
def segment_sums(x: Row["d"], label: Row, like: Col):
    hit = mr.col_index == label
    return mr.sum(torch.where(hit, x, 0.0), over="rows") * like, mr.count(hit, over="rows")


def _target_scores(x, target, other, w):
    s = torch.tanh(x @ w.mT)
    return at_target(s, target) - at_target(s, other).square()


@layer(_target_scores, lambda d: (d.rows(5), d.targets(), d.targets(), d.cols(5)))
def target_scores(x: Row["d"], target: Row, other: Row, w: Col["d"]):
    s = torch.tanh(x @ w)
    chosen, rejected = (mr.sum(torch.where(mr.col_index == t, s, 0.0)) for t in (target, other))
    return chosen - rejected**2


# Monoids of one's own


class LogWSum(mr.Monoid):
    """Values weighed by exponentials, in the obvious form."""

    z: mr.Scalar = -math.inf
    v: mr.Vector = 0.0

    def combine(a, b):
        z = torch.logaddexp(a.z, b.z)
        safe = torch.where(z == -math.inf, 0.0, z)
        return LogWSum(z=z, v=a.v * torch.exp(a.z - safe) + b.v * torch.exp(b.z - safe))

    def pullback(c, a, g):
        w = torch.exp(a.z - c.z)
        return LogWSum(z=w * (g.z + mr.dot(g.v, a.v - c.v)), v=w * g.v)


def _log_wsum(q, k, v):
    """Column after column, as the monoid says: its rounding is the monoid's own, not softmax's."""
    z, mean = q @ k[0], v[0].expand(len(q), -1)
    for key, value in zip(k[1:], v[1:], strict=True):
        old, s = z, q @ key
        z = torch.logaddexp(old, s)
        mean = mean * torch.exp(old - z).unsqueeze(-1) + value * torch.exp(s - z).unsqueeze(-1)
    return z, mean


@layer(_log_wsum, lambda d: d.qkv())
def attention_of_ones_own_monoid(q: Row["f"], k: Col["f"], v: Col["d"]):
    total = mr.reduce(LogWSum, z=q @ k, v=v)
    return total.z, total.v


class Power(mr.Monoid):
    """Root of the sum of squares; brings ``remove`` and no pullback."""

    v: mr.Scalar = 0.0

    def combine(a, b):
        return Power(v=torch.sqrt(a.v * a.v + b.v * b.v))

    def remove(c, a):
        return Power(v=torch.sqrt(torch.clamp(c.v * c.v - a.v * a.v, min=0.0)))


# One column leaves nothing to remove, where the root has no derivative.
@layer(
    lambda x, y: torch.linalg.vector_norm(2 + torch.tanh(x @ y.mT), dim=-1),
    lambda d: (d.rows(4), d.cols(4)),
    least_cols=2,
)
def norm_of_ones_own_monoid(x: Row["f"], y: Col["f"]):
    return mr.reduce(Power, v=2 + torch.tanh(x @ y)).v


def _column_monoids(q, k, v):
    return (k @ q.mT).topk(3).values, *_log_wsum(k, q, v)


@layer(_column_monoids, lambda d: (d.rows(5), d.cols(5), d.rows(3)), least_rows=3)
def monoids_over_rows(q: Row["f"], k: Col["f"], v: Row["d"]):
    s = q @ k
    total = mr.reduce(LogWSum, z=s, v=v, over="rows")
    return mr.topk(s, 3, over="rows").values, total.z, total.v


@layer(lambda x, y: (1 + 0.25 * torch.tanh(x @ y.mT)).prod(-1), lambda d: (d.rows(4), d.cols(4)))
def product_over_columns(x: Row["f"], y: Col["f"]):
    factor = 1 + 0.25 * torch.tanh(x @ y)
    return mr.reduce(mr.monoids.Prod, v=factor, p=factor, zeros=0).v


# Odd corners of the language


def _planar(x, y, b):
    dx, dy = gaps(x[..., 0], y[..., 0]), gaps(x[..., 1], y[..., 1])
    return (torch.exp(-dx.square()) * torch.atan(dy) * b.unsqueeze(-2)).sum(-1)


@layer(_planar, lambda d: (d.rows(3), d.cols(3), d.cols()))
def planar_components(x: Row["f"], y: Col["f"], b: Col):
    gap = x - y
    return mr.sum(torch.exp(-(gap[0] ** 2)) * torch.atan(gap[1]) * b)


def _minkowski(x, y, p):
    return (pairs(x, y).abs() ** p).sum(-1).pow(1 / p).mean(-1)


@layer(_minkowski, lambda d: (d.rows(3), d.cols(3) + 4, 3.0))
def minkowski_distance(x: Row["f"], y: Col["f"], p: float):
    return mr.mean((x - y).abs().pow(p).sum().pow(1 / p))


def _huber_chain(a, b, low, high):
    gap = gaps(a, b)
    smooth = torch.logaddexp(gap.clamp(low, high), -gap)
    return torch.where(gap > 1, gap, torch.where(gap < -1, 0.25 * gap, gap**3)).sum(-1) + smooth.sum(-1)


@layer(_huber_chain, lambda d: (d.rows(), d.cols(), -1.5, 0.75))
def clamps_and_choices(a: Row, b: Col, low: float, high: float):
    gap = a - b
    smooth = torch.logaddexp(gap.clamp(low, high), -gap)
    return mr.sum(torch.where(gap > 1, gap, torch.where(gap < -1, 0.25 * gap, gap**3))) + mr.sum(smooth)


def _logic(x, y, flag, kind):
    s = x @ y.mT
    i, j = torch.arange(s.shape[-2]).unsqueeze(-1), torch.arange(s.shape[-1])
    odd, even = (i + j) % 2 == 1, kind.unsqueeze(-2) == 0
    chosen = (flag.unsqueeze(-1) & odd) ^ (even | ~odd)
    weight = chosen.to(s.dtype) + 0.5 * odd.to(s.dtype)
    return (weight * s).sum(-1), chosen.sum(-1), ((s * weight).sum(-2) / chosen.sum(-2).clamp(min=1))


@layer(_logic, lambda d: (d.rows(4), d.cols(4), d.integers(d.M) == 1, d.integers(d.N, high=3)))
def logic_and_casts(x: Row["f"], y: Col["f"], flag: Row, kind: Col):
    s = x @ y
    odd, even = (mr.row_index + mr.col_index) % 2 == 1, kind == 0
    chosen = torch.logical_xor(torch.logical_and(flag, odd), even | torch.logical_not(odd))
    weight = chosen.float() + 0.5 * odd.to(torch.float32)
    counted = mr.sum(chosen.int(), over="rows").clamp(min=1)
    return mr.sum(weight * s), mr.count(chosen), mr.sum(s * weight, over="rows") / counted


def _optional(x, y, bias):
    return torch.exp(torch.sin(x @ y.mT) - bias.unsqueeze(-1)).sum(-1)


@layer(_optional, lambda d: (d.rows(4), d.cols(4), d.rows()))
def optional_bias(x: Row["f"], y: Col["f"], bias: Row | None = None, gain: Col | None = None):
    s = torch.sin(x @ y)
    s = s if bias is None else s - bias
    return mr.sum(torch.exp(s if gain is None else s * gain))


def _rational_map(x, y, c):
    s = torch.sigmoid(x @ y.mT) + 0.5
    r = s.reciprocal() + torch.log(s) * torch.rsqrt(s) + torch.exp2(-s) - torch.expm1(-s * c)
    return r.sum(-1), torch.log2(s).sum(-1), torch.erf(s).mean(-2), torch.cos(s).sum(-1)


@layer(_rational_map, lambda d: (d.rows(4), d.cols(4), torch.tensor(0.5, dtype=d.dtype)))
def table_of_functions(x: Row["f"], y: Col["f"], c: float):
    s = torch.sigmoid(x @ y) + 0.5
    r = s.reciprocal() + torch.log(s) * torch.rsqrt(s) + torch.exp2(-s) - torch.expm1(-s * c)
    return mr.sum(r), mr.sum(torch.log2(s)), mr.mean(torch.erf(s), over="rows"), mr.sum(torch.cos(s))


def _steps(a, b):
    gap = gaps(a, b)
    steep = torch.sinh(gap / 2) + torch.erfc(gap) * gap.sign() + torch.floor(2 * gap) * gap
    edges = torch.ceil(gap) + torch.trunc(gap) * b.unsqueeze(-2) + torch.div(gap, 0.75, rounding_mode="floor")
    odd = torch.where(gap.abs() > 0.5, gap, torch.nan)
    return (
        (steep + edges).sum(-1),
        odd.nan_to_num(0.25).sum(-1),
        torch.where(odd.isnan() | odd.isinf(), gap, 0.0).sum(-1),
    )


@layer(_steps, lambda d: (d.rows(), d.cols()))
def steps_and_holes(a: Row, b: Col):
    gap = a - b
    steep = torch.sinh(gap / 2) + torch.erfc(gap) * gap.sign() + torch.floor(2 * gap) * gap
    edges = torch.ceil(gap) + torch.trunc(gap) * b + torch.div(gap, 0.75, rounding_mode="floor")
    odd = torch.where(gap.abs() > 0.5, gap, torch.nan)
    holes = mr.sum(torch.where(odd.isnan() | odd.isinf(), gap, 0.0))
    return mr.sum(steep + edges), mr.sum(odd.nan_to_num(0.25)), holes


def _rows_and_sides(x, y, a):
    s = x @ y.mT
    return torch.softmax(s, -2).mT @ x, (a.unsqueeze(-1) * s).sum(-2), x.sum(-2), a.logsumexp(-1)


@layer(_rows_and_sides, lambda d: (d.rows(4), d.cols(4), d.rows()))
def folds_of_rows(x: Row["f"], y: Col["f"], a: Row):
    s = x @ y
    whole, soft = mr.sum(x, over="rows"), mr.logsumexp(a, over="rows")
    return mr.softmax_mean(s, x, over="rows"), mr.sum(a * s, over="rows"), whole, soft
