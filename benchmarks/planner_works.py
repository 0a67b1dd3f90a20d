"""Ten programs at three shapes each, on which the planner is compared with exhaustive search (``planner.py``).

On a GPU every length is odd and there are more than 2²² pairs: so all shapes of a program, and the short cut that a
trial is checked on, share their kernels, and all candidates are compiled in a minute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row

Size = tuple[int, int, int]  # rows, columns, features


@mr.op
@no_type_check
def attention(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(q @ k * 0.125, v)


@mr.op
@no_type_check
def causal(q: Row["f"], k: Col["f"], v: Col["d"]):
    return mr.softmax_mean(torch.where(mr.col_index <= mr.row_index, q @ k * 0.125, -torch.inf), v)


@mr.op
@no_type_check
def mlp(x: Row["d"], p: Col["d"], q: Col["n"]):
    return mr.sum(torch.relu(x @ p) * q)


@mr.op
@no_type_check
def gated(x: Row["d"], gate: Col["d"], up: Col["d"], down: Col["n"]):
    return mr.sum(F.silu(x @ gate) * (x @ up) * down)


@mr.op
@no_type_check
def cross_entropy(x: Row["d"], w: Col["d"]):
    s = x @ w
    return mr.logsumexp(s) - mr.sum(torch.where(mr.col_index == mr.row_index, s, 0.0))


@mr.op
@no_type_check
def contrastive(x: Row["d"], y: Col["d"]):
    s = x @ y
    return mr.logsumexp(s), mr.logsumexp(s, over="rows")


@mr.op
@no_type_check
def gaussian(x: Row["d"], y: Col["d"], b: Col):
    return mr.sum(torch.exp(-mr.sqdist(x, y)) * b)


@mr.op
@no_type_check
def pooling(x: Row["d"], y: Col["d"]):
    return mr.max(x @ y)


@dataclass(frozen=True)
class Work:
    """A program and the shapes of its arguments."""

    name: str
    op: Any
    sides: str  # for each argument, M or N, and d where it is a vector: "Md Nd N"
    small: tuple[Size, ...]  # on a CPU
    large: tuple[Size, ...]  # on a GPU
    exact: bool = False  # float32 on a GPU too

    def forms(self, size: Size, device: str) -> list[tuple[list[int], torch.dtype]]:
        """Shapes and types of the arguments."""
        lengths = dict(zip("MNd", size, strict=True))
        dtype = torch.bfloat16 if device == "cuda" and not self.exact else torch.float32
        return [([lengths[letter] for letter in side], dtype) for side in self.sides.split()]

    def args(self, size: Size, device: str) -> list[Tensor]:
        forms, scale = self.forms(size, device), size[2] ** -0.25
        return [(torch.randn(s, device=device) * scale).to(d).requires_grad_() for s, d in forms]

    def sizes(self, device: str) -> tuple[Size, ...]:
        return self.large if device == "cuda" else self.small


WORKS = [
    Work(
        "attention",
        attention,
        "Md Nd Nd",
        ((300, 300, 64), (1500, 1500, 64), (64, 8000, 64)),
        ((8191, 8191, 64), (32767, 4095, 64), (63, 131071, 64)),
    ),
    Work(
        "attention 128",
        attention,
        "Md Nd Nd",
        ((200, 500, 128), (2048, 1024, 128), (3000, 100, 128)),
        ((8191, 8191, 128), (16383, 4095, 128), (127, 65535, 128)),
    ),
    Work(
        "causal attention",
        causal,
        "Md Nd Nd",
        ((400, 400, 64), (1200, 1200, 64), (2500, 2500, 64)),
        ((4095, 4095, 64), (8191, 8191, 64), (24575, 24575, 64)),
    ),
    Work(
        "perceptron",
        mlp,
        "Md Nd Nd",
        ((1000, 128, 128), (1024, 4096, 128), (4000, 600, 64)),
        ((8191, 8191, 128), (32767, 2047, 128), (2047, 32767, 128)),
    ),
    Work(
        "gated perceptron",
        gated,
        "Md Nd Nd Nd",
        ((500, 256, 128), (1024, 2048, 64), (2000, 2000, 32)),
        ((8191, 4095, 128), (16383, 8191, 128), (2047, 16383, 128)),
    ),
    Work(
        "cross-entropy",
        cross_entropy,
        "Md Nd",
        ((256, 1000, 64), (1024, 8000, 64), (100, 20000, 128)),
        ((4095, 32767, 128), (16383, 8191, 128), (255, 131071, 128)),
    ),
    Work(
        "wide cross-entropy",
        cross_entropy,
        "Md Nd",
        ((128, 2000, 512), (512, 4000, 512), (1024, 1024, 1024)),
        ((4095, 8191, 1024), (2047, 32767, 1024), (511, 65535, 1024)),
    ),
    Work(
        "contrastive",
        contrastive,
        "Md Nd",
        ((300, 300, 128), (1500, 1500, 128), (3000, 1000, 64)),
        ((8191, 8191, 128), (16383, 4095, 128), (2047, 32767, 128)),
    ),
    Work(
        "gaussian kernel",
        gaussian,
        "Md Nd N",
        ((500, 500, 3), (2000, 2000, 3), (5000, 300, 3)),
        ((16383, 16383, 3), (65535, 4095, 3), (1023, 131071, 3)),
        exact=True,
    ),
    Work(
        "pooling",
        pooling,
        "Md Nd",
        ((500, 700, 64), (2000, 2000, 64), (32, 20000, 64)),
        ((8191, 16383, 64), (32767, 4095, 64), (63, 131071, 64)),
    ),
]


def cases(device: str, shapes: int, only: list[str]) -> list[tuple[Work, Size]]:
    """Every program at its first shape, then at its second, then at its third."""
    wanted = [w for w in WORKS if not only or any(word in w.name for word in only)]
    return [(w, w.sizes(device)[at]) for at in range(shapes) for w in wanted]
