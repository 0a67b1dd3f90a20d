"""A user's script, as a user would write it: ``mypy --strict`` and pyright pass on it without a word.

Nothing here imports from the tests. Ruff alone needs one line of settings, for it takes the letter of ``Row["f"]`` for
the name of a variable: F821 ignored for files with ops (``# ruff: noqa: F821`` in the file will do as well).
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import monoidreduce as mr
from monoidreduce import Batch, Col, Pair, Row, ops

Array = NDArray[Any]


@mr.op
def attention(q: Row["f"], k: Col["f"], v: Col["d"], window: int) -> Tensor:
    near = (mr.row_index - mr.col_index).abs() <= window
    return mr.softmax_mean(torch.where(near, q @ k, -torch.inf), v)


@mr.op
def unannotated(q: Row["f"], k: Col["f"], slope: Batch, bias: Pair | None = None):
    s = q @ k * slope
    return mr.logsumexp(s if bias is None else s + bias)


class Nearest(NamedTuple):
    distance: Tensor
    place: Tensor


@mr.op
def nearest(x: mr.Row["d"], weight: mr.Row, y: mr.Col["d"], shift: mr.Col["d"] | None = None) -> Nearest:
    d = mr.sqdist(x, y if shift is None else y + shift) * weight
    best = mr.topk(d, 1, largest=False)
    return Nearest(mr.min(d) / mr.num_cols + 0 * best.values.sum(-1), mr.argmin(d))


class Head(nn.Module):
    def __init__(self, classes: int, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(classes, features))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return ops.linear_cross_entropy(x, self.weight, target, label_smoothing=0.1)


def main() -> tuple[int, ...]:
    q, k, v = (torch.randn(2, 50, 8, requires_grad=True) for _ in range(3))
    y: Tensor = attention(q, k, v, window=9)
    torch.autograd.backward(y.sum())  # torch itself leaves Tensor.backward untyped
    text: str = attention.explain(q, k, v, window=9)
    lse: Tensor = unannotated(q, k, torch.ones(2))
    found: Nearest = nearest(q[0], torch.ones(50), k[0])
    loss = Head(20, 8)(q[0], torch.arange(50) % 20)

    plain = ops.attention(q, k, v, causal=True)
    both = ops.attention(q, k, v, return_lse=True)
    scored = ops.linear_cross_entropy(q[0], k[0], torch.arange(50), return_lse=True, return_accuracy=True)
    alone = ops.linear_logprobs(q[0], k[0], torch.arange(50), temperature=2.0)
    asked = ops.linear_logprobs(q[0], k[0], torch.arange(50), return_entropy=True, top_k=3)
    near = ops.knn(q[0], k[0], 3)
    stored: Tensor = ops.attention(q, mr.scaled(torch.zeros(2, 50, 8, dtype=torch.int8), 0.5), v)
    pooled = ops.max_pool_product(q[0], k[0])
    sizes = [*stored.shape, *plain.shape, *both.lse.shape, *scored.lse.shape, *alone.shape, *asked.topk_indices.shape]
    sizes += [
        *near.indices.shape,
        *pooled.shape,
        *lse.shape,
        *found.place.shape,
        len(text.splitlines()) > 1,
        loss.dim(),
    ]
    fold = attention.stream(q[0], window=9)
    fold.update(k[0], v[0])
    with mr.budget("64MB"), mr.use(engine="eager"):
        again: Tensor = attention(q, k, v, 9)
    return (*sizes, again.dim())


def arrays(points: Array) -> tuple[int, ...]:
    """numpy arrays give numpy arrays."""
    indices: Array = ops.knn(points, points, 5).indices.astype(np.int32)
    near: Array = ops.knn.prepare(points)(points, 2).values
    total: Array = ops.kernel_sum(points, points, points[:, 0], bandwidth=0.3)
    assigned: Array = ops.kmeans_assign(points, points[:3]).indices
    transport = ops.sinkhorn(points, points, eps=0.5, iterations=3)
    f, g = ops.sinkhorn_step(points, points, transport.g, total, total, eps=0.5)
    kernel = mr.linalg.matrix(ops.kernel_sum, points, bandwidth=0.3)
    helper = mr.linalg.nystroem(kernel, points, rank=5, ridge=0.1)
    solved: Array = mr.linalg.cg(kernel, kernel @ total, ridge=0.1, preconditioner=helper)
    again: Array = mr.linalg.cg(lambda u: ops.kernel_sum(points, points, u), total, ridge=0.1)
    results = (indices, near, total, assigned, transport.value, f, g, solved, again)
    return tuple(result.ndim for result in results)


if __name__ == "__main__":
    print(main(), arrays(np.random.default_rng(0).random((50, 3))))
