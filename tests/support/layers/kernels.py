"""The zoo's kernels and matchings: sums over pairs of points, transport, nearest neighbours."""

import math

import torch

import monoidreduce as mr
from monoidreduce import Col, Row
from tests.support.layers.base import gaps, layer, pairs, sqdist


def _points(d, f=3):
    return d.rows(f), d.cols(f), d.cols()


def _far_points(d):
    """Rows and columns apart, so that no distance is near 0, where its root has no derivative."""
    return d.rows(3), d.cols(3) + 5, d.cols()


def _weigh(kernel, b):
    return (kernel * b.unsqueeze(-2)).sum(-1)


@layer(lambda x, y, b, gamma: torch.exp(-gamma * sqdist(x, y)) @ b, lambda d: (d.rows(3), d.cols(3), d.cols(2), 0.5))
def gaussian_kernel(x: Row["f"], y: Col["f"], b: Col["d"], gamma: float):
    return mr.sum(torch.exp(-gamma * mr.sqdist(x, y)) * b)


@layer(
    lambda x, y, b, width: _weigh(torch.exp(-sqdist(x, y) / (2 * width.unsqueeze(-1).square())), b),
    lambda d: (*_points(d, 12), d.uniform(d.M, low=1.5, high=3.0)),
)
def gaussian_kernel_of_many_features(x: Row["f"], y: Col["f"], b: Col, width: Row):
    return mr.sum(torch.exp(-((x - y) ** 2).sum() / (2 * width**2)) * b)


@layer(lambda x, y, b: _weigh(torch.exp(-pairs(x, y).abs().sum(-1)), b), _points)
def laplacian_kernel(x: Row["f"], y: Col["f"], b: Col):
    return mr.sum(torch.exp(-(x - y).abs().sum()) * b)


@layer(lambda x, y, b: _weigh(1 / (1 + sqdist(x, y)), b), _points)
def cauchy_kernel(x: Row["f"], y: Col["f"], b: Col):
    return mr.sum(b / (1 + mr.sqdist(x, y)))


def _rational(x, y, b, alpha):
    return _weigh((1 + sqdist(x, y) / (2 * alpha)) ** -alpha, b)


@layer(_rational, lambda d: (*_points(d), torch.tensor(1.25, dtype=d.dtype)))
def rational_quadratic_kernel(x: Row["f"], y: Col["f"], b: Col, alpha: float):
    return mr.sum((1 + mr.sqdist(x, y) / (2 * alpha)) ** -alpha * b)


@layer(lambda x, y, b: (_weigh(sqdist(x, y).sqrt(), b), sqdist(x, y).sqrt().mean(-2)), _far_points)
def energy_distance(x: Row["f"], y: Col["f"], b: Col):
    r = torch.sqrt(mr.sqdist(x, y))
    return mr.sum(r * b), mr.mean(r, over="rows")


def _matern(x, y, b):
    r = math.sqrt(3) * torch.linalg.vector_norm(pairs(x, y), dim=-1)
    return _weigh((1 + r) * torch.exp(-r), b)


@layer(_matern, lambda d: (d.rows(3), d.cols(3) + 1, d.cols()))
def matern_kernel(x: Row["f"], y: Col["f"], b: Col):
    r = math.sqrt(3) * torch.linalg.vector_norm(x - y)
    return mr.sum((1 + r) * torch.exp(-r) * b)


def _intersection(x, y, b):
    low = torch.minimum(x.unsqueeze(-2), y.unsqueeze(-3)).sum(-1)
    high = torch.maximum(x.unsqueeze(-2), y.unsqueeze(-3)).sum(-1)
    return _weigh(low, b), _weigh(low / high, b)


@layer(_intersection, lambda d: (d.uniform(d.M, 4, low=0.1), d.uniform(d.N, 4, low=0.1), d.cols()))
def histogram_intersection(x: Row["f"], y: Col["f"], b: Col):
    low, high = torch.minimum(x, y).sum(), torch.maximum(x, y).sum()
    return mr.sum(low * b), mr.sum(low / high * b)


@layer(lambda x, y, b: _weigh((x @ y.mT / x.shape[-1] + 1) ** 3, b), lambda d: _points(d, 5))
def polynomial_kernel(x: Row["f"], y: Col["f"], b: Col):
    return mr.sum(((x * y).mean() + 1) ** 3 * b)


@layer(
    lambda x, y, b: _weigh((pairs(x, y).square() / (x.unsqueeze(-2) + y.unsqueeze(-3))).sum(-1), b),
    lambda d: (d.uniform(d.M, 4, low=0.2), d.uniform(d.N, 4, low=0.2), d.cols()),
)
def chi_square_kernel(x: Row["f"], y: Col["f"], b: Col):
    return mr.sum(((x - y) ** 2 / (x + y)).sum() * b)


@layer(
    lambda a, t, b: _weigh(torch.exp(-2 * torch.sin(math.pi * gaps(a, t)).square()), b),
    lambda d: (d.rows(), d.cols(), d.cols()),
)
def periodic_kernel(a: Row, t: Col, b: Col):
    return mr.sum(torch.exp(-2 * torch.sin(math.pi * (a - t)) ** 2) * b)


@layer(
    lambda x, y, b, scale: _weigh(torch.exp(-(pairs(x, y) * scale[..., None, None, :]).square().sum(-1)), b),
    lambda d: (d.normal(2, d.M, 3), d.normal(2, d.N, 3), d.normal(2, d.N), d.uniform(2, 3, low=0.2)),
)
def relevance_kernel(x: Row["f"], y: Col["f"], b: Col, scale: mr.Batch["f"]):
    return mr.sum(torch.exp(-((x - y) * scale).square().sum()) * b)


def _nadaraya_watson(x, y, value, gamma):
    weight = torch.exp(-gamma * sqdist(x, y))
    return weight @ value / weight.sum(-1, keepdim=True)


@layer(_nadaraya_watson, lambda d: (d.rows(3), d.cols(3), d.cols(2), 0.5))
def nadaraya_watson(x: Row["f"], y: Col["f"], value: Col["d"], gamma: float):
    return mr.weighted_mean(torch.exp(-gamma * mr.sqdist(x, y)), value)


def _compact_mean(a, t, value):
    weight = torch.relu(1 - gaps(a, t).square())
    total = weight.sum(-1)
    return torch.where(total != 0, (weight * value.unsqueeze(-2)).sum(-1) / torch.where(total != 0, total, 1.0), 0.0)


@layer(_compact_mean, lambda d: (d.rows(), d.cols(), d.cols()))
def epanechnikov_mean(a: Row, t: Col, value: Col):
    return mr.weighted_mean(torch.relu(1 - (a - t) ** 2), value)


# Transport and matching


def _sinkhorn(x, y, f, g, eps):
    cost = sqdist(x, y)
    rows = -eps * torch.logsumexp((g.unsqueeze(-2) - cost) / eps, -1)
    cols = -eps * torch.logsumexp((f.unsqueeze(-1) - cost) / eps, -2)
    return 0.5 * (f + rows), 0.5 * (g + cols)


@layer(_sinkhorn, lambda d: (d.rows(3), d.cols(3), d.rows(), d.cols(), 0.5))
def sinkhorn_step(x: Row["f"], y: Col["f"], f: Row, g: Col, eps: float):
    cost = mr.sqdist(x, y)
    rows = -eps * mr.logsumexp((g - cost) / eps)
    cols = -eps * mr.logsumexp((f - cost) / eps, over="rows")
    return 0.5 * (f + rows), 0.5 * (g + cols)


@layer(lambda x, y: (sqdist(x, y).amin(-1), sqdist(x, y).amin(-2)), lambda d: (d.rows(3), d.cols(3)))
def chamfer(x: Row["f"], y: Col["f"]):
    cost = mr.sqdist(x, y)
    return mr.min(cost), mr.min(cost, over="rows")


def _neighbours(x, y):
    found = sqdist(x, y).topk(4, largest=False)
    return found.values, found.indices


@layer(_neighbours, lambda d: (d.rows(3), d.cols(3)), least_cols=4)
def nearest_neighbours(x: Row["f"], y: Col["f"]):
    found = mr.topk(mr.sqdist(x, y), 4, largest=False)
    return found.values, found.indices


@layer(lambda q, p: (q @ p.mT).amax(-1), lambda d: (d.normal(d.M, 4), d.normal(3, d.N, 4)))
def maxsim(q: Row["f"], p: Col["f"]):
    return mr.max(q @ p)


@layer(lambda x, c: (sqdist(x, c).argmin(-1), sqdist(x, c).amin(-1)), lambda d: (d.rows(3), d.cols(3)))
def kmeans_assign(x: Row["f"], c: Col["f"]):
    cost = mr.sqdist(x, c)
    return mr.argmin(cost), mr.min(cost)


# Kernels of the index


def _wave(M, N, period):
    i, j = torch.arange(M).unsqueeze(-1), torch.arange(N)
    return torch.cos(2 * math.pi / period * torch.remainder(i - j, period).double())


@layer(
    lambda a, v, period: a.unsqueeze(-1) * (_wave(a.shape[-1], v.shape[-2], period).to(v.dtype) @ v),
    lambda d: (d.rows(), d.cols(3), 7),
)
def circular_convolution(a: Row, v: Col["d"], period: int):
    phase = torch.remainder(mr.row_index - mr.col_index, period)
    return a * mr.sum(torch.cos(2 * math.pi / period * phase) * v)


def _blocks(a, b, size):
    i, j = torch.arange(a.shape[-1]).unsqueeze(-1), torch.arange(b.shape[-1])
    near = torch.div(i, size, rounding_mode="floor") == torch.div(j, size, rounding_mode="floor")
    steps = torch.round((i - j) / 4).to(a.dtype)
    return torch.where(near, gaps(a, b).abs(), torch.exp(-steps.abs()) * b.unsqueeze(-2)).sum(-1)


@layer(_blocks, lambda d: (d.rows(), d.cols(), 8))
def block_steps(a: Row, b: Col, size: int):
    near = torch.floor(mr.row_index / size) == mr.col_index // size
    steps = torch.round((mr.row_index - mr.col_index) / 4)
    return mr.sum(torch.where(near, (a - b).abs(), torch.exp(-steps.abs()) * b))
