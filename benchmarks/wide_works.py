"""Works of wide features that are timed on a GPU (``gpu_wide.py``): their inputs, plain forms and products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row

from .planner_works import cross_entropy as own_index

BUDGETS = ("8MB", "64MB", "550MB", "1100MB")
Loss = Callable[..., Tensor]


@mr.op
@no_type_check
def top(x: Row["d"], w: Col["d"]):
    return mr.argmax(x @ w)


@mr.op
@no_type_check
def draw(x: Row["d"], w: Col["d"], seed: int):
    return mr.sample(x @ w, seed)


@mr.op
@no_type_check
def best50(x: Row["d"], w: Col["d"]):
    return mr.topk(x @ w, 50)


@dataclass(frozen=True)
class Work:
    """Something to do: its inputs, whose first ``grads`` get gradients, the plain form, and how many products of it."""

    name: str
    make: Callable[[], tuple[Tensor, ...]]
    ours: Loss
    plain: Loss  # of rows of the first inputs against all columns: a sum over rows
    rows: int
    by_rows: tuple[int, ...]  # which inputs have one entry per row
    grads: int
    gemms: Callable[[tuple[Tensor, ...]], Callable[[], Any]]
    budgets: tuple[str, ...] = BUDGETS
    brief: bool = False  # ours and plain torch only


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def head(M: int, D: int, V: int, peaked: bool) -> Callable[[], tuple[Tensor, ...]]:
    """A linear head; peaked: each row's own class stands out so far that its mean probability is about 0.6."""

    def make() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        w, target = normal(V, D), torch.randint(V, (M,), device="cuda")
        x = torch.randn(M, D, device="cuda") / math.sqrt(D)
        if peaked:
            x = x + w[target].float() * ((math.log(V) + 0.9 + 3 * torch.randn(M, 1, device="cuda")) / D)
        return x.bfloat16(), w, target

    return make


def cross_entropy(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy((x @ w.mT).float(), t, reduction="sum")


def contrastive(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy((x @ y.mT).float(), t, reduction="sum")


def distill(p: Tensor, q: Tensor, c: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy((p @ c.mT).float(), torch.softmax((q @ t.mT).float(), -1), reduction="sum")


def _three(*pairs: tuple[int, int]) -> Callable[[tuple[Tensor, ...]], Callable[[], Any]]:
    """The products alone: forward and both gradients, of the given (row, column) inputs."""

    def prepare(args: tuple[Tensor, ...]) -> Callable[[], Any]:
        def call() -> None:
            for r, c in pairs:
                x, w = args[r], args[c]
                s = x @ w.mT
                s @ w
                s.mT @ x

        return call

    return prepare


def works() -> list[Work]:
    found = []
    for name, M, D, V in (("g", 8192, 2304, 256000), ("l", 8192, 4096, 128256), ("m", 8192, 5120, 32000)):
        for peaked in (False, True) if name != "m" else (False,):
            kind = "peaked" if peaked else "random"
            found.append(
                Work(
                    f"cross-entropy {name} M{M} D{D} V{V}, {kind}",
                    head(M, D, V, peaked),
                    lambda x, w, t: mr.ops.cross_entropy(x, w, t),
                    cross_entropy,
                    M,
                    (0, 2),
                    2,
                    _three((0, 1)),
                    brief=peaked,
                )
            )
    for N, D in ((32768, 512), (65536, 768)):

        def pairs(N: int = N, D: int = D) -> tuple[Tensor, ...]:
            torch.manual_seed(0)
            x, y = (F.normalize(torch.randn(N, D, device="cuda"), dim=-1) for _ in range(2))
            y = F.normalize(y + 0.5 * x, dim=-1)
            return (x * 14).bfloat16(), torch.arange(N, device="cuda"), y.bfloat16()

        found.append(
            Work(
                f"contrastive N{N} D{D}",
                pairs,
                lambda x, t, y: own_index.total(x, y) / len(x),
                contrastive,
                N,
                (0, 1),
                3,
                _three((0, 2)),
                BUDGETS[1:],
            )
        )

    def teachers() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        p, q = normal(4096, 2048, scale=2048**-0.5), normal(4096, 4096, scale=2 * 4096**-0.5)
        return p, q, normal(128256, 2048), normal(128256, 4096)

    found.append(
        Work(
            "two distributions M4096 D2048 E4096 V128256 (student's gradients)",
            teachers,
            lambda p, q, c, t: mr.ops.cross_entropy_distributions(p, c, q.detach(), t.detach()),
            distill,
            4096,
            (0, 1),
            4,
            lambda args: lambda: [_three((0, 2))(args)(), args[1] @ args[3].mT],
            ("300MB", "550MB", "1100MB"),
        )
    )
    return found
