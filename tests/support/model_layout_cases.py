"""Attention as models call it: heads are split off one projection or three, several query heads share keys, and the
result goes back by ``transpose(1, 2).reshape``. Run by ``tests/unit``, ``tests/interpret`` and ``tests/gpu``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import ops


@dataclass(frozen=True)
class Model:
    """Sizes of an attention; ``fused``: queries, keys and values are slices of one projection."""

    batch: int
    heads: int
    shared: int
    length: int
    width: int
    fused: bool = False

    @property
    def counts(self) -> list[int]:
        return [self.heads, self.shared, self.shared]

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> tuple[list[Tensor], Tensor]:
        """The projections, and a cotangent for what goes to the output projection: numbers that 16 bits hold."""
        gen = torch.Generator().manual_seed(0)
        counts = [sum(self.counts)] if self.fused else self.counts
        shapes = [(self.batch, self.length, n * self.width) for n in (*counts, self.heads)]
        *given, y = (torch.randn(s, generator=gen).bfloat16().to(device, dtype) for s in shapes)
        return [x.requires_grad_() for x in given], y

    def split(self, given: list[Tensor]) -> list[Tensor]:
        """Queries, keys and values ``[batch, heads, length, width]``."""
        seen = [x.view(self.batch, self.length, -1, self.width) for x in given]
        return [x.transpose(1, 2) for x in (seen[0].split(self.counts, 2) if self.fused else seen)]

    def run(self, attend: Callable[..., Tensor], given: list[Tensor], y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The layer's result, and the result for the output projection followed by the projections' gradients."""
        found = attend(*self.split(given))
        flat = found.transpose(1, 2).reshape(y.shape)
        return found, [flat, *torch.autograd.grad(flat, given, y)]


def attend(engine: str, **options: Any) -> Callable[..., Tensor]:
    """Attention by an engine."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        given = {name: o.to(q) if _is_float(o) else o for name, o in options.items()}
        with mr.use(engine=engine):
            return ops.attention(q, k, v, enable_gqa=True, **given)

    return run


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def gather(model: Model, engine: str, dtype: torch.dtype, device: str = "cpu", **options: Any) -> Any:
    """As :meth:`Model.run`."""
    with mr.use(engine=engine):  # for the backward
        return model.run(attend(engine, **options), *model.inputs(dtype, device))


def check(model: Model, found: list[Tensor], dtype: torch.dtype, device: str = "cpu", **options: Any) -> None:
    """Not more than twice the error of plain torch in the same precision, both against float64."""
    exact, plain = (gather(model, "reference", t, device, **options)[1] for t in (torch.float64, dtype))
    for got, right, theirs in zip(found, exact, plain, strict=True):
        allowed = max(2 * (theirs.double() - right).norm().item(), 2 * torch.finfo(dtype).eps * right.norm().item())
        assert (got.double() - right).norm() <= allowed
