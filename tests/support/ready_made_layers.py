"""The ready-made layers beside their dense forms: for each, its options, a way to draw its tensors, and plain torch.

A sample chooses one value for every option (``tests/support/pairwise_options.py``). ``draw`` turns it into tensors, in
the order of the function's arguments, and keywords; ``ours`` and ``dense`` take both.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from monoidreduce import ops
from monoidreduce.ops.mlp import ACTIVATIONS
from tests.support.layers.base import coins, logsumexp
from tests.support.pairwise_options import pairwise

SIZES = [(19, 37), (1, 1), (33, 64), (59, 2), (2, 59), (16, 33), (40, 40)]
BATCHES: list[tuple[int, ...]] = [(), (3,), (2, 1), (2, 3)]
SEED = 987654321


@dataclass(frozen=True)
class Draw:
    """Random tensors, drawn in float64 and rounded to ``dtype``."""

    gen: torch.Generator
    dtype: torch.dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.gen, dtype=torch.float64).to(self.dtype)

    def number(self, low: float, high: float) -> Tensor:
        """A learned number, which is not held in 16 bits."""
        wide = torch.float32 if self.dtype.itemsize == 2 else self.dtype
        return (torch.rand((), generator=self.gen, dtype=torch.float64) * (high - low) + low).to(wide)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.gen)


@dataclass(frozen=True, eq=False)
class Ready:
    """One function of ``monoidreduce.ops``."""

    name: str
    factors: dict[str, list]
    draw: Callable[[dict[str, Any], Draw], tuple[tuple, dict[str, Any]]]
    dense: Callable[..., Any]
    allowed: Callable[[dict[str, Any]], bool] = lambda sample: True

    def ours(self, *args: Any, **options: Any) -> Any:
        return getattr(ops, self.name)(*args, **options)

    def samples(self) -> list[dict[str, Any]]:
        return pairwise(self.factors, self.allowed)

    def make(self, sample: dict[str, Any], seed: int, dtype: torch.dtype = torch.float64) -> tuple[tuple, dict]:
        return self.draw(sample, Draw(torch.Generator().manual_seed(seed), dtype))

    def __repr__(self) -> str:
        return self.name


def reduced(loss: Tensor, how: str) -> Tensor:
    return loss.mean() if how == "mean" else loss.sum() if how == "sum" else loss


# Contrastive ----------------------------------------------------------------------------------------------------------


def _contrastive_draw(s, d):
    m, n = s["size"]
    n = n if s["kind"] == "infonce" and n > m and not s["alone"] else m
    x, y = d.normal(*s["batch"], m, 5), None if s["alone"] else d.normal(*s["batch"], n, 5)
    options: dict[str, Any] = {"kind": s["kind"], "normalize": s["normalize"], "reduction": s["reduction"]}
    options["hard_negatives"] = s["hard"]
    if s["labels"]:
        rows, cols = d.integers(3, m), d.integers(3, *s["batch"][-1:], n)
        options["labels"] = (rows, cols) if s["labels"] == "pair" and not s["alone"] else rows
        options["labels"] = (rows, rows.repeat(-(-n // m))[:n]) if n != m else options["labels"]
    number = {None: None, "temperature": d.number(0.3, 1), "scale": d.number(1, 3)}[s["scale"]]
    bias = d.number(-2, 2) if s["kind"] == "siglip" and s["bias"] else None
    return (x, y, number, bias), options | {"scale": s["scale"]}


def _contrastive_ours(x, y, number, bias, *, scale, **options):
    given = {} if scale is None else {scale: number}
    return ops.contrastive_loss(x, y, bias=bias, **given, **options)


def _contrastive(x, y, number, bias, *, scale, kind, normalize, reduction, hard_negatives, labels=None):
    alone, y = y is None, x if y is None else y
    if normalize:
        x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
    s = x @ y.mT
    s = s if number is None else s * number if scale == "scale" else s / number
    own = torch.eye(*s.shape[-2:], dtype=torch.bool).expand_as(s)
    rows, cols = labels if isinstance(labels, tuple) else (labels, labels)
    same = own if labels is None else (rows.unsqueeze(-1) == cols.unsqueeze(-2)).expand_as(s)
    same = same & ~own if alone else same
    if kind == "siglip":
        s = s if bias is None else s + bias
        each = F.softplus(torch.where(same, -s, s))
        return reduced((torch.where(own, 0.0, each) if alone else each).sum(-1), reduction)
    ways = [(s, same, own), (s.mT, same.mT, own.mT)][: 1 + (kind == "clip")]
    found = [_one_way(*w, labels is not None, alone, hard_negatives, reduction) for w in ways]
    return sum(found) / len(found)


def _one_way(s, same, own, labelled, alone, hard, reduction):
    s = torch.where(own, -math.inf, s) if alone else s
    count = same.sum(-1)
    if hard:
        apart = torch.where(same, -math.inf, s)
        others = (~same).sum(-1) - int(alone)
        weights = torch.softmax(torch.where((others == 0).unsqueeze(-1), 0.0, hard * apart), -1)
        total = (torch.where(apart == -math.inf, 0.0, weights * torch.exp(apart)).sum(-1) * others).unsqueeze(-1)
        each = torch.log(torch.exp(torch.where(same, s, 0.0)) + total) - torch.where(same, s, 0.0)
    else:
        each = (logsumexp(s).unsqueeze(-1) - torch.where(same, s, 0.0)).nan_to_num(neginf=0.0)
    loss = torch.where(same, each, 0.0).sum(-1) / count.clamp(min=1)
    return loss.sum() / (count > 0).sum() if labelled and reduction == "mean" else reduced(loss, reduction)


class _Contrastive(Ready):
    def ours(self, *args, **options):
        return _contrastive_ours(*args, **options)


CONTRASTIVE = _Contrastive(
    "contrastive_loss",
    {
        "kind": ["clip", "infonce", "siglip"],
        "labels": [None, "one", "pair"],
        "alone": [False, True],
        "hard": [0.0, 0.7],
        "normalize": [False, True],
        "scale": [None, "temperature", "scale"],
        "bias": [False, True],
        "reduction": ["mean", "sum", "none"],
        "size": SIZES,
        "batch": BATCHES,
    },
    _contrastive_draw,
    _contrastive,
    lambda s: (
        (s["labels"] or not s["alone"])
        and not (s["kind"] == "siglip" and s["hard"])
        and (s["size"][0] > 1 or not s["alone"])
    ),
)


# Perceptrons ----------------------------------------------------------------------------------------------------------


def _kept(h, options):
    if not options.get("dropout_p"):
        return h
    least, (m, n) = round(options["dropout_p"] * 2**15), h.shape[-2:]
    counter = torch.arange(h[..., 0, 0].numel()).view(*h.shape[:-2], 1, 1)
    return h * (coins(SEED, counter, torch.arange(m).unsqueeze(-1), torch.arange(n)) >= least) / (1 - least / 2**15)


def _perceptron_options(s):
    return {"activation": s["activation"]} | ({"dropout_p": 0.3, "seed": SEED} if s["dropout"] else {})


def _mlp_draw(s, d):
    (m, n), lead = s["size"], s["batch"]
    weights = (d.normal(*lead, n, 4), d.normal(n, 3))
    return (
        d.normal(*lead, m, 4),
        *weights,
        d.normal(n) if s["bias"] else None,
        d.normal(3) if s["out_bias"] else None,
    ), (_perceptron_options(s))


class _MLP(Ready):
    def ours(self, x, p, q, bias, out_bias, **options):
        return ops.mlp(x, p, q, bias=bias, out_bias=out_bias, **options)


def _mlp(x, p, q, bias, out_bias, *, activation, **options):
    h = x @ p.mT if bias is None else x @ p.mT + bias
    y = _kept(ACTIVATIONS[activation](h), options) @ q
    return y if out_bias is None else y + out_bias


def _gated_draw(s, d):
    (m, n), lead = s["size"], s["batch"]
    biases = [
        d.normal(n) if s["bias"] in ("gate", "both") else None,
        d.normal(n) if s["bias"] in ("up", "both") else None,
    ]
    out = d.normal(3) if s["out_bias"] else None
    return (d.normal(*lead, m, 4), d.normal(*lead, n, 4), d.normal(n, 4), d.normal(n, 3), *biases, out), (
        _perceptron_options(s)
    )


class _Gated(Ready):
    def ours(self, x, gate, up, down, gate_bias, up_bias, out_bias, **options):
        return ops.gated_mlp(x, gate, up, down, gate_bias=gate_bias, up_bias=up_bias, out_bias=out_bias, **options)


def _gated(x, gate, up, down, gate_bias, up_bias, out_bias, *, activation, **options):
    g = x @ gate.mT if gate_bias is None else x @ gate.mT + gate_bias
    u = x @ up.mT if up_bias is None else x @ up.mT + up_bias
    y = _kept(ACTIVATIONS[activation](g) * u, options) @ down
    return y if out_bias is None else y + out_bias


_PERCEPTRON = {"activation": ["relu", "gelu", "silu", "tanh", "relu_squared"], "dropout": [False, True]}
_PERCEPTRON |= {"out_bias": [False, True], "size": SIZES, "batch": BATCHES}
MLP = _MLP("mlp", _PERCEPTRON | {"bias": [False, True]}, _mlp_draw, _mlp)
GATED = _Gated("gated_mlp", _PERCEPTRON | {"bias": [None, "gate", "up", "both"]}, _gated_draw, _gated)


# Neighbours -----------------------------------------------------------------------------------------------------------


def near(x, y, metric):
    if metric in ("dot", "cosine"):
        return F.normalize(x, dim=-1) @ F.normalize(y, dim=-1).mT if metric == "cosine" else x @ y.mT
    square = (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)
    return square if metric == "sqeuclidean" else root(square)


def root(square):
    """√square, with slope 0 at 0."""
    return torch.where(square == 0, 0.0, torch.where(square == 0, 1.0, square).sqrt())


def _clouds(s, d, features=4):
    m, n = s["size"]
    return d.normal(*s["batch"], m, features), d.normal(*s["batch"][-1:], n, features)


def _knn(x, y, k, *, metric, exclude_self=False):
    largest = metric in ("dot", "cosine")
    d = near(x, y, metric)
    if exclude_self:
        d = torch.where(torch.eye(*d.shape[-2:], dtype=torch.bool), -math.inf if largest else math.inf, d)
    return tuple(d.topk(k, -1, largest=largest))


METRICS = ["euclidean", "sqeuclidean", "dot", "cosine"]
KNN = Ready(
    "knn",
    {"metric": METRICS, "k": [1, 2, 7], "exclude_self": [False, True], "size": SIZES, "batch": BATCHES},
    lambda s, d: ((*_clouds(s, d), s["k"]), {"metric": s["metric"], "exclude_self": s["exclude_self"]}),
    _knn,
    lambda s: s["k"] <= s["size"][1] - s["exclude_self"],
)


def _assign(x, centroids, *, metric):
    found = near(x, centroids, metric)
    return tuple(found.max(-1) if metric in ("dot", "cosine") else found.min(-1))


KMEANS = Ready(
    "kmeans_assign",
    {"metric": METRICS, "size": SIZES, "batch": BATCHES},
    lambda s, d: (_clouds(s, d), {"metric": s["metric"]}),
    _assign,
)


def _lengths(name, s, high, lead, d):
    return {name: d.integers(high, *lead) + 1} if s[name] else {}


def _maxsim_draw(s, d):
    (m, n), lead = s["size"], (2, 3) if s["all_pairs"] else s["batch"]
    q, docs = ((lead[0],), (lead[1],)) if s["all_pairs"] else (lead, lead)
    options = {"normalize": s["normalize"], "all_pairs": s["all_pairs"]}
    options |= _lengths("q_lengths", s, m, q, d) | _lengths("d_lengths", s, n, docs, d)
    return (d.normal(*q, m, 4), d.normal(*docs, n, 4)), options


def _maxsim(q, d, *, normalize, all_pairs, q_lengths=None, d_lengths=None):
    if all_pairs:
        q, q_lengths = q.unsqueeze(1), None if q_lengths is None else q_lengths.unsqueeze(1)
    s = near(q, d, "cosine" if normalize else "dot")
    if d_lengths is not None:
        s = torch.where(torch.arange(s.shape[-1]) < d_lengths[..., None, None], s, -math.inf)
    best = s.max(-1).values
    if q_lengths is not None:
        best = torch.where(torch.arange(s.shape[-2]) < q_lengths[..., None], best, 0.0)
    return best.sum(-1)


MAXSIM = Ready(
    "maxsim",
    {
        "normalize": [False, True],
        "all_pairs": [False, True],
        "q_lengths": [False, True],
        "d_lengths": [False, True],
        "size": SIZES,
        "batch": BATCHES,
    },
    _maxsim_draw,
    _maxsim,
)


def _chamfer_draw(s, d):
    (m, n), lead = s["size"], s["batch"]
    options = {name: s[name] for name in ("metric", "points", "reduction")}
    options |= _lengths("x_lengths", s, m, lead, d) | _lengths("y_lengths", s, n, lead, d)
    return (d.normal(*lead, m, 3), d.normal(*lead, n, 3)), options


def _chamfer(x, y, *, metric, points, reduction, x_lengths=None, y_lengths=None):
    d = near(x, y, metric)
    m, n = d.shape[-2:]
    rows = torch.ones(m, dtype=torch.bool) if x_lengths is None else torch.arange(m) < x_lengths.unsqueeze(-1)
    cols = torch.ones(n, dtype=torch.bool) if y_lengths is None else torch.arange(n) < y_lengths.unsqueeze(-1)
    d = torch.where(rows.unsqueeze(-1) & cols.unsqueeze(-2), d, math.inf)
    found = []
    for best, seen in ((d.min(-1).values, rows), (d.min(-2).values, cols)):
        total = torch.where(seen, best, 0.0).sum(-1)
        found.append(total / seen.sum(-1) if points == "mean" else total)
    return reduced(found[0] + found[1], reduction)


CHAMFER = Ready(
    "chamfer",
    {
        "metric": ["sqeuclidean", "euclidean"],
        "points": ["mean", "sum"],
        "reduction": ["mean", "sum", "none"],
        "x_lengths": [False, True],
        "y_lengths": [False, True],
        "size": SIZES,
        "batch": BATCHES,
    },
    _chamfer_draw,
    _chamfer,
)


# Kernels and transport ------------------------------------------------------------------------------------------------


def _log_kernel(x, y, kernel, width):
    square = near(x, y, "sqeuclidean")
    if kernel == "gaussian":
        return -square / (2 * width * width)
    return -root(square) / width if kernel == "laplacian" else -torch.log1p(square / (width * width))


def _kernel_draw(weights):
    def draw(s, d):
        x, y = _clouds(s, d, s["features"])
        given = {None: None, "numbers": d.normal(y.shape[-2]), "vectors": d.normal(*y.shape[:-1], 2)}[s[weights]]
        width = d.number(0.7, 2) if s["width"] == "tensor" else s["width"]
        return (x, y, given, width), {"kernel": s["kernel"]}

    return draw


class _Kernel(Ready):
    def ours(self, x, y, given, width, **options):
        return getattr(ops, self.name)(x, y, given, bandwidth=width, **options)


def _kernel_sum(x, y, b, width, *, kernel):
    matrix = -near(x, y, "euclidean") if kernel == "energy" else torch.exp(_log_kernel(x, y, kernel, width))
    if kernel == "cauchy":
        matrix = 1 / (1 + near(x, y, "sqeuclidean") / (width * width))
    return matrix.sum(-1) if b is None else matrix @ b


_POINTS = {"features": [3, 1, 20], "width": [1.0, 0.5, "tensor"], "size": SIZES, "batch": BATCHES}
KERNEL_SUM = _Kernel(
    "kernel_sum",
    {"kernel": ["gaussian", "laplacian", "cauchy", "energy"], "b": [None, "numbers", "vectors"]} | _POINTS,
    _kernel_draw("b"),
    _kernel_sum,
)
KERNEL_LSE = _Kernel(
    "kernel_logsumexp",
    {"kernel": ["gaussian", "laplacian", "cauchy"], "weights": [None, "numbers"]} | _POINTS,
    _kernel_draw("weights"),
    lambda x, y, w, width, *, kernel: torch.logsumexp(_log_kernel(x, y, kernel, width) + (0.0 if w is None else w), -1),
)


def _softmin(x, y, h, eps, *, cost):
    return -eps * torch.logsumexp(h.unsqueeze(-2) - near(x, y, cost) / eps, -1)


class _Softmin(Ready):
    def ours(self, *args, **options):
        *tensors, eps = args
        return getattr(ops, self.name)(*tensors, eps=eps, **options)


def _softmin_draw(s, d):
    x, y = _clouds(s, d, s["features"])
    eps = d.number(0.5, 2) if s["eps"] == "tensor" else s["eps"]
    return (x, y, d.normal(*y.shape[:-1]), eps), {"cost": s["cost"]}


def _step_draw(s, d):
    (x, y, g, eps), options = _softmin_draw(s, d)
    return (x, y, g, d.normal(x.shape[-2]), d.normal(y.shape[-2]), eps), options


def _step(x, y, g, log_a, log_b, eps, *, cost):
    f = _softmin(x, y, log_b + g / eps, eps, cost=cost)
    return f, _softmin(y, x, log_a + f / eps, eps, cost=cost)


_TRANSPORT = {"cost": ["sqeuclidean", "euclidean"], "eps": [1.0, 0.3, "tensor"], "features": [3, 1, 20]}
_TRANSPORT |= {"size": SIZES, "batch": BATCHES}
SOFTMIN = _Softmin("softmin", _TRANSPORT, _softmin_draw, _softmin)
STEP = _Softmin("sinkhorn_step", _TRANSPORT, _step_draw, _step)

READY = [CONTRASTIVE, MLP, GATED, KNN, KMEANS, MAXSIM, CHAMFER, KERNEL_SUM, KERNEL_LSE, SOFTMIN, STEP]
