"""Sampling with top-k, top-p and min-p by its definition, on whole matrices, with the noise of ``mr.gumbel``."""

import math

import torch
import torch.nn.functional as F

import monoidreduce as mr


@mr.op
def noise(x: mr.Row, y: mr.Col["v"], seed: int):
    """The noise of every pair, where ``y`` is the identity matrix."""
    return mr.sum(mr.gumbel(seed) * y)


def keep_classes(s, top_k=None, top_p=None, min_p=None):
    """The logits of the classes that may be drawn, minus infinity elsewhere."""
    if top_k is not None:
        best = s.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
        s = s.masked_fill(~torch.zeros_like(s, dtype=torch.bool).scatter_(1, best, True), -math.inf)
    limit = -math.inf if not min_p else s.amax(-1, keepdim=True) + math.log(min_p)
    if top_p is not None and top_p < 1:
        above = ((s[:, None, :] > s[:, :, None]) * s.softmax(-1)[:, None, :]).sum(-1)
        s = s.masked_fill((above >= top_p) & (s < s.amax(-1, keepdim=True)), -math.inf)
    return s.masked_fill(s < limit, -math.inf)


def draw(x, weight, seed, bias=None, temperature=1.0, **limits):
    """The class drawn for each row, and the logarithm of its probability in the whole softmax."""
    s = F.linear(x, weight, bias) / temperature
    eye = torch.eye(s.shape[1], dtype=s.dtype)
    index = (keep_classes(s, **limits) + noise(torch.zeros(len(s), dtype=s.dtype), eye, seed)).argmax(-1)
    return index, s.log_softmax(-1).gather(1, index[:, None])[:, 0]


LIMITS = [
    dict(top_p=0.9),
    dict(top_p=0.3),
    dict(min_p=0.2),
    dict(min_p=1.0),
    dict(top_k=7),
    dict(top_k=1),
    dict(top_p=0.8, min_p=0.05, temperature=2.0),
    dict(top_k=20, top_p=0.7, min_p=0.02),
    dict(top_k=5, top_p=0.0),
    dict(top_k=53, top_p=1.0, min_p=0.0),
]


def name(limits):
    return "-".join(f"{key}={value}" for key, value in limits.items())


def arguments(dtype=torch.float64):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype) for shape in ((40, 6), (53, 6), (53,))]
