"""float32 layers whose operands are split into bfloat16 parts for the tensor cores, each beside its dense form."""

import torch
import torch.nn.functional as F

import monoidreduce as mr
from monoidreduce import Col, Row, ops


def gaussian(x, y, b):
    return torch.exp(-(x[..., :, None, :] - y[..., None, :, :]).square().sum(-1) / 18) @ b


def near(x, y, b):
    return ops.kernel_sum(x, y, b, bandwidth=3.0)


def loss(x, y):
    return F.cross_entropy(x @ y.mT, torch.arange(len(x), device=x.device) % len(y), reduction="none")


@mr.op
def own_loss(x: Row["d"], y: Col["d"], n: int):
    s = x @ y
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == mr.row_index % n, s, 0.0))


def causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def shapes(*given):
    return lambda gen: tuple(torch.randn(*s, generator=gen) for s in given)


def strided(gen):
    """Features, or every second vector, of larger tensors."""
    x, y, b = (torch.randn(*s, generator=gen) for s in ((19, 40), (111, 20), (37, 1)))
    return x[:, ::2], y[::3], b


WORKS = {
    "Gaussian sum": (near, gaussian, shapes((19, 59), (37, 59), (37, 1))),
    "vectors": (near, gaussian, shapes((2, 1, 9, 16), (2, 33, 16), (33, 20))),
    "strided": (near, gaussian, strided),
    "attention": (ops.attention, F.scaled_dot_product_attention, shapes((2, 33, 64), (2, 31, 64), (2, 31, 17))),
    "causal": (lambda *a: ops.attention(*a, causal=True), causal, shapes((40, 32), (40, 32), (40, 32))),
    "perceptron": (ops.mlp, lambda x, p, q: torch.relu(x @ p.mT) @ q, shapes((1, 16), (65, 16), (65, 111))),
    "loss": (lambda x, y: own_loss(x, y, len(y)), loss, shapes((33, 20), (19, 20))),
}
