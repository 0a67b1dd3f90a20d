"""Ops whose label is arithmetic on the other index, with the same condition on whole matrices in plain torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import Col, Row

B, M, N, D = 2, 7, 11, 5
R, C = mr.row_index, mr.col_index

# name -> the condition on symbols and numbers; with index tensors in place of the symbols it is plain torch
CONDITIONS: dict[str, Callable[..., Any]] = {
    "next": lambda i, j, m, n, step, own, shift: j == i + 1,
    "previous": lambda i, j, m, n, step, own, shift: j == i - step,
    "half": lambda i, j, m, n, step, own, shift: j == i // 2,
    "threefold": lambda i, j, m, n, step, own, shift: i * 3 == j,
    "reversed": lambda i, j, m, n, step, own, shift: j == n - 1 - i,
    "beyond the end": lambda i, j, m, n, step, own, shift: j == i + n,
    "remainder": lambda i, j, m, n, step, own, shift: j == (i + step) % 3,
    "own offset": lambda i, j, m, n, step, own, shift: j == i + own,
    "batch offset": lambda i, j, m, n, step, own, shift: j == i * 2 + shift,
    "column names row": lambda i, j, m, n, step, own, shift: i == j - 2,
    "half a column": lambda i, j, m, n, step, own, shift: i == j // 2,
    "several": lambda i, j, m, n, step, own, shift: i // 2 == j // 3,
    "fraction": lambda i, j, m, n, step, own, shift: j == i / 2,
    "and more": lambda i, j, m, n, step, own, shift: (j == i + 1) & (i != 3),
}


def arguments(dtype: torch.dtype = torch.float32) -> list[Any]:
    draw = torch.Generator().manual_seed(3)
    x, y = (torch.randn(B, length, D, generator=draw, dtype=dtype) for length in (M, N))
    return [x, y, 2, torch.randint(-4, 5, (B, M), generator=draw), torch.tensor([1, -2])]


def op(name: str, over: str = "cols", whole: bool = False) -> mr.Op:
    """Σ [condition] x·y, newly made; ``whole``: beside a logsumexp, so that tiles are computed anyway."""
    condition = CONDITIONS[name]

    @mr.op
    def picked(x: Row["d"], y: Col["d"], step: int, own: Row, shift: mr.Batch):
        s = x @ y
        found = mr.sum(torch.where(condition(R, C, mr.num_rows, mr.num_cols, step, own, shift), s, 0.0), over=over)
        return mr.logsumexp(s, over=over) - found if whole else found

    return picked


def dense(name: str, over: str = "cols", whole: bool = False) -> Callable[..., Tensor]:
    def picked(x: Tensor, y: Tensor, step: int, own: Tensor, shift: Tensor) -> Tensor:
        m, n = x.shape[-2], y.shape[-2]
        i, j = torch.arange(m).view(m, 1), torch.arange(n)
        chosen = CONDITIONS[name](i, j, m, n, step, own.unsqueeze(-1), shift.view(*shift.shape, 1, 1))
        s, dim = x @ y.mT, -1 if over == "cols" else -2
        found = torch.where(chosen, s, 0.0).sum(dim)
        return s.logsumexp(dim) - found if whole else found

    return picked


def run(function: Callable[..., Any], args: list[Any]) -> list[Tensor]:
    """Values, and gradients of x and y for fixed cotangents."""
    given = [a.clone().requires_grad_() if k < 2 else a for k, a in enumerate(args)]
    value = function(*given)
    weight = torch.linspace(-1, 2, value.numel(), dtype=value.dtype).view(value.shape)
    return [value.detach(), *torch.autograd.grad((value * weight).sum(), given[:2])]


def check(function: Callable[..., Any], plain: Callable[..., Tensor], args: list[Any]) -> None:
    for got, expected in zip(run(function, args), run(plain, args), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
