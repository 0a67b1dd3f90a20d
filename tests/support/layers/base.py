"""What a layer of the zoo is: a body in the pair language, the plain PyTorch people would write, a way to draw inputs.

``dense`` builds the M × N matrix on purpose. In float64 it is the truth; in float32 or 16 bits it is "plain torch in
the same precision", whose error sets the bar. Legend: M rows, N columns, ``f`` and ``d`` features.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce.program import philox

ZOO: list["Layer"] = []


@dataclass(frozen=True)
class Draw:
    """Random inputs of one problem: drawn in float64 and rounded to ``dtype``."""

    M: int
    N: int
    gen: torch.Generator
    dtype: torch.dtype

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.gen, dtype=torch.float64) * scale).to(self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        return (torch.rand(shape, generator=self.gen, dtype=torch.float64) * (high - low) + low).to(self.dtype)

    def integers(self, *shape: int, low: int = 0, high: int = 2) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.gen)

    def rows(self, *features: int, scale: float = 1.0) -> Tensor:
        """[M, *features]"""
        return self.normal(self.M, *features, scale=scale)

    def cols(self, *features: int, scale: float = 1.0) -> Tensor:
        """[N, *features]"""
        return self.normal(self.N, *features, scale=scale)

    def qkv(self, f: int = 5, d: int = 3) -> tuple[Tensor, Tensor, Tensor]:
        return self.rows(f), self.cols(f), self.cols(d)

    def targets(self) -> Tensor:
        """A class for each row."""
        return self.integers(self.M, high=self.N)


@dataclass(frozen=True)
class Layer:
    """One layer: ``op(*make(...))`` should be ``dense(*make(...))``."""

    name: str
    op: mr.Op
    dense: Callable[..., Any]
    draw: Callable[[Draw], tuple]
    differentiable: bool = True
    least_cols: int = 1  # fewer are refused (a top-k) or leave the plain form undefined
    least_rows: int = 0

    def make(self, M: int, N: int, gen: torch.Generator, dtype: torch.dtype) -> tuple:
        return self.draw(Draw(M, N, gen, dtype))

    def args(self, M: int, N: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple:
        """Inputs of at least as many rows and columns as the layer needs."""
        return self.make(max(M, self.least_rows), max(N, self.least_cols), torch.Generator().manual_seed(seed), dtype)

    @property
    def parameters(self) -> list[Any]:
        return list(self.op.parameters.values())

    def __repr__(self) -> str:
        return self.name


def layer(dense: Callable, draw: Callable[[Draw], tuple], **options: Any) -> Callable[[Callable], mr.Op]:
    """Decorate a body: make it an op and enter it, with its plain form and its inputs, in the zoo."""

    def enter(body: Callable) -> mr.Op:
        op = mr.op(body)
        ZOO.append(Layer(body.__name__, op, dense, draw, **options))
        return op

    return enter


# Words of the plain forms


def places(s: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers [M, 1] and column numbers [N] of a matrix of pairs."""
    return torch.arange(s.shape[-2]).unsqueeze(-1), torch.arange(s.shape[-1])


def pairs(x: Tensor, y: Tensor) -> Tensor:
    """x_i - y_j: [M, N, f]"""
    return x.unsqueeze(-2) - y.unsqueeze(-3)


def gaps(a: Tensor, b: Tensor) -> Tensor:
    """a_i - b_j: [M, N]"""
    return a.unsqueeze(-1) - b.unsqueeze(-2)


def sqdist(x: Tensor, y: Tensor) -> Tensor:
    return pairs(x, y).square().sum(-1)


def only(mask: Tensor, s: Tensor) -> Tensor:
    return torch.where(mask, s, -math.inf)


def softmax(s: Tensor) -> Tensor:
    """Softmax over columns; zeros, with zero gradients, where a row sees nothing."""
    blind = (s == -math.inf).all(-1, keepdim=True)
    return torch.where(blind, 0.0, torch.softmax(torch.where(blind, 0.0, s), -1))


def logsumexp(s: Tensor, dim: int = -1) -> Tensor:
    """Log of the sum of exponentials; -inf, with zero gradients, where there is nothing to see."""
    blind = (s == -math.inf).all(dim, keepdim=True)
    total = torch.logsumexp(torch.where(blind, 0.0, s), dim)
    return torch.where(blind.squeeze(dim), -math.inf, total)


def at_target(s: Tensor, target: Tensor) -> Tensor:
    return s.gather(-1, target.unsqueeze(-1)).squeeze(-1)


def coins(seed: int, batch: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """The 15 bits that decide what dropout drops, for tensors of places that broadcast."""
    return philox.coin(philox.word(seed, batch, rows), philox.mark(seed, cols), cols)
