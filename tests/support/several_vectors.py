"""Bodies with several vectors a row or column, and the same in plain torch on whole matrices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row


class Case(NamedTuple):
    op: Any
    twin: Callable[..., Tensor]
    shapes: str  # of its arguments: names of :func:`tensors`


CASES: dict[str, Case] = {}


def case(shapes: str, twin: Callable[..., Tensor]) -> Callable:
    def keep(body: Callable) -> Callable:
        CASES[body.__name__] = Case(mr.op(body), twin, shapes)
        return body

    return keep


def products(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("...mhf,...nf->...mnh", q, k)


def tensors(names: str, rows: int, cols: int, h: int, f: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Random arguments: q and d are several vectors a row and a column, x, y, k one; v, w and u numbers of h."""
    made = torch.Generator().manual_seed(seed)
    sides = {"q": (2, rows, h, f), "d": (2, cols, h, f), "x": (2, rows, f), "y": (cols, f), "k": (2, cols, f)}
    sides |= {"w": (2, rows, h), "u": (2, cols, h), "v": (h,), "m": (f, f + 1), "z": (2, cols, f + 1), "s": (f, f)}
    scale = max(1, f) ** -0.25
    return [(torch.randn(sides[n], generator=made, dtype=torch.float64) * scale).to(dtype) for n in names.split()]


@case("q w k", lambda q, w, k: (w.unsqueeze(-2) * products(q, k).relu()).sum(-1).logsumexp(-1))
def indexer(q: Row["h", "f"], w: Row["h"], k: Col["f"]):
    return mr.logsumexp((w * torch.relu(q @ k)).sum())


@case("q w k", lambda q, w, k: (w.unsqueeze(-2) * products(q, k).relu()).sum(-1).topk(3, -1)[0])
def best_three(q: Row["h", "f"], w: Row["h"], k: Col["f"]):
    return mr.topk((w * torch.relu(q @ k)).sum(), 3).values


@case("q k", lambda q, k: products(q, k).amax(-1).sum(-1))
def largest(q: Row["h", "f"], k: Col["f"]):
    return mr.sum((q @ k).amax())


def _of_columns(x: Tensor, d: Tensor, u: Tensor) -> Tensor:
    s = torch.einsum("...mf,...nhf->...mnh", x, d).sigmoid()
    return (s * u.unsqueeze(-3)).mean(-1).softmax(-1) @ u


@case("x d u", _of_columns)
def of_columns(x: Row["f"], d: Col["h", "f"], u: Col["h"]):
    return mr.softmax_mean((u * torch.sigmoid(d @ x)).mean(), u)


@case("q d", lambda q, d: torch.einsum("...mhf,...nhf->...mnh", q, d).logsumexp(-1).tanh().sum(-2))
def of_both(q: Row["h", "f"], d: Col["h", "f"]):
    return mr.sum(torch.tanh(torch.logsumexp(q @ d, -1)), over="rows")


@case("x m z", lambda x, m, z: ((x @ m) @ z.mT).logsumexp(-1))
def bilinear(x: Row["f"], m: mr.Batch["f", "e"], z: Col["e"]):
    return mr.logsumexp((x @ m) @ z)


@case("q s k", lambda q, s, k: products(q @ s, k).sigmoid().sum(-1).logsumexp(-1))
def mapped(q: Row["h", "f"], s: mr.Batch["f", "f"], k: Col["f"]):
    return mr.logsumexp(torch.sigmoid((q @ s) @ k).sum())


@case("x y", lambda x, y: (-(x.unsqueeze(-2) - y.unsqueeze(-3)).abs().amax(-1)).logsumexp(-1))
def chebyshev(x: Row["f"], y: Col["f"]):
    return mr.logsumexp(-(x - y).abs().amax())


@case("q v k", lambda q, v, k: (v * products(q, k).sin()).sum(-2))
def of_vectors(q: Row["h", "f"], v: mr.Batch["h"], k: Col["f"]):
    return mr.sum(v * torch.sin(q @ k))


@case("q k y", lambda q, k, y: (products(q, k).softmax(-1) * products(q, k)).sum(-1).softmax(-1) @ y)
def weighted(q: Row["h", "f"], k: Col["f"], y: Col["f"]):
    s = q @ k
    return mr.softmax_mean((torch.softmax(s, -1) * s).sum(), y)


@case("q k", lambda q, k: (products(q, k)[..., 0] * products(q, k)[..., 1]).sum(-1))
def picked(q: Row["h", "f"], k: Col["f"]):
    return mr.sum((q[0] @ k) * (q @ k)[1])


def _causal(q: Tensor, x: Tensor, k: Tensor) -> Tensor:
    s = 2 * products(q / 3, k).relu().sum(-1) + x @ k.mT
    seen = torch.arange(s.shape[-1]) <= torch.arange(s.shape[-2])[:, None]
    return torch.where(seen, s, -torch.inf).logsumexp(-1)


@case("q x k", _causal)
def causal(q: Row["h", "f"], x: Row["f"], k: Col["f"]):
    s = 2 * torch.relu((q / 3) @ k).sum() + x @ k  # the gradient of k has parts of both
    return mr.logsumexp(torch.where(mr.col_index <= mr.row_index, s, -torch.inf))


@case("q d", lambda q, d: torch.einsum("...mhf,...nhf->...mn", q, d).topk(2)[0].sin())
def best_of_both(q: Row["h", "f"], d: Col["h", "f"]):
    return torch.sin(mr.topk((q @ d).sum(), 2).values)  # of another number of places than vectors


@case("x k d", lambda x, k, d: torch.einsum("...mn,...nhf,...mf->...mh", (x @ k.mT).softmax(-1), d, x))
def attended(x: Row["f"], k: Col["f"], d: Col["h", "f"]):
    return mr.softmax_mean(x @ k, d) @ x


@case("q x k", lambda q, x, k: torch.maximum(products(q, k).amax(-1), x @ k.mT).amax(-1))
def nearest(q: Row["h", "f"], x: Row["f"], k: Col["f"]):
    return mr.max(torch.maximum((q @ k).amax(), x @ k))
