"""Tiles of a gradient that are left out because they are small: ``mr.skip_below``.

A gradient contracts cotangents of pairs with vectors: dx_i = Σ_j c_ij y_j. Of a peaked softmax almost all c_ij are
tiny; where every c_ij of a tile is, its two products can be left out, at the price of an error that is known
beforehand. Off unless it is asked for. How many tiles were contracted is counted where they are: on a GPU in a tensor
that is read only when somebody asks.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import ArgumentError

TILE = 128  # rows and columns of a tile that is contracted or left out


class skip_below(contextlib.ContextDecorator):
    """Leave tiles out of gradients where every pair's cotangent is below a bound. A block, or a decorator.

    A tile is 128 rows × 128 columns of pairs (less at the edges). It is left out of Σ_j c_ij y_j and Σ_i c_ij x_i where
    all its |c_ij| < t, with t = ``bound`` × the largest |cotangent| that the backward was given; with ``op.total`` and
    the losses' ``reduction="mean"`` and ``"sum"`` that is a row's. So every entry of a gradient is off by less than

        |Δ dx_i| < t Σ_j |y_j|  and  |Δ dy_j| < t Σ_i |x_i|,  the sums over the pairs in tiles left out,

    where y_j and x_i are the vectors that numbers of pairs multiply in the gradient, with what else of their own side
    multiplies them. Values, and gradients of numbers per row or column, are never touched; nor is a gradient that is
    itself to be differentiated, one that is compiled or transformed, or anything where kernels hold whole vectors (up
    to 256 features on a GPU) or the problem is run dense: there all tiles are contracted. A backward keeps the bound of
    its forward.

    ``tiles`` says how many tiles gradients have met inside the block so far, ``kept`` which share of them was
    contracted; on a GPU asking waits for it.

    >>> import torch, monoidreduce as mr
    >>> x, weight = torch.randn(300, 300, requires_grad=True), torch.randn(5000, 300) * 3
    >>> with mr.use(engine="panel"), mr.skip_below(2**-12) as skipped:
    ...     mr.ops.cross_entropy(x, weight, torch.zeros(300, dtype=torch.int64)).backward()
    >>> skipped.tiles, 0 < skipped.kept < 1
    (120, True)
    """

    def __init__(self, bound: float):
        usual = isinstance(bound, (int, float)) and not isinstance(bound, bool)
        if not usual or not 0 < bound < 1 or not math.isfinite(bound):
            raise ArgumentError(
                detail=f"skip_below was given {bound!r}",
                fix="Give a number between 0 and 1, such as 2**-12; to leave nothing out, leave skip_below out",
            )
        self.bound = float(bound)
        self.tiles = 0
        self._counts: dict[torch.device, Tensor] = {}
        self._kept = 0
        self._tokens: list[contextvars.Token] = []

    def __enter__(self) -> skip_below:
        self._tokens.append(_asked.set(self))
        return self

    def __exit__(self, *error: object) -> None:
        _asked.reset(self._tokens.pop())

    def __repr__(self) -> str:
        return f"skip_below({self.bound!r})"

    @property
    def kept(self) -> float:
        """The share of tiles that was contracted; 1.0 where none was met."""
        kept = self._kept + sum(int(count) for count in self._counts.values())
        return kept / self.tiles if self.tiles else 1.0

    def count(self, kept: int | Tensor, tiles: int) -> None:
        """Add tiles: how many were kept, as a number or as counts on a device, which are not waited for."""
        self.tiles += tiles
        if isinstance(kept, Tensor):
            total = self._counts.setdefault(kept.device, torch.zeros((), dtype=torch.int64, device=kept.device))
            total += kept.sum()
        else:
            self._kept += kept


_asked: contextvars.ContextVar[skip_below | None] = contextvars.ContextVar("skip_below", default=None)


@dataclass(frozen=True)
class Threshold:
    """What cotangents are compared with while a gradient runs."""

    asked: skip_below
    least: Tensor  # one number, on the device: tiles whose |cotangents| are all below it are left out


_now: contextvars.ContextVar[Threshold | None] = contextvars.ContextVar("threshold", default=None)


def asked() -> skip_below | None:
    """The bound in force, if there is one."""
    return _asked.get()


def now() -> Threshold | None:
    """The threshold of the gradient that runs, if it leaves tiles out."""
    return _now.get()


@contextlib.contextmanager
def again(then: skip_below | None) -> Iterator[None]:
    """A forward's bound in its backward, which another thread may run."""
    token = _asked.set(then)
    try:
        yield
    finally:
        _asked.reset(token)


@contextlib.contextmanager
def summed(device: torch.device) -> Iterator[None]:
    """Gradients for a cotangent of one in every row run inside the block."""
    with _threshold(torch.ones((), dtype=torch.float64, device=device)):
        yield


def gradients(run: Callable[..., Sequence[Any]], given: Sequence[Any], cotangents: Sequence[int]) -> list[Any]:
    """``run(*given)``, which is linear in some of what is given, with tiles left out.

    A program may multiply a cotangent with a pair's number or with a row's vector. So that neither exceeds what the
    bound allows, they are given divided by a power of two just above the largest, and what is found is multiplied by
    it: both are exact.
    """
    sizes = [given[k].abs().amax().double() for k in cotangents if given[k].numel()]
    if not sizes:
        return list(run(*given))
    largest = torch.stack(sizes).amax()
    usual = torch.isfinite(largest) & (largest > 0)
    by = torch.where(usual, torch.exp2(torch.frexp(largest).exponent), 1.0)
    divided = [v / by if k in cotangents else v for k, v in enumerate(given)]
    with _threshold(torch.where(usual, largest / by, 0.0)):  # beside an infinite cotangent nothing is small
        found = run(*divided)
    held = {v.untyped_storage().data_ptr() for v in divided if isinstance(v, Tensor)}
    return [_times(v, by, held) for v in found]


def _times(value: Any, by: Tensor, held: set[int]) -> Any:
    """In place, unless it is something that was given."""
    if isinstance(value, Tensor) and value.untyped_storage().data_ptr() not in held:
        return value.mul_(by)
    return value * by


@contextlib.contextmanager
def _threshold(largest: Tensor) -> Iterator[None]:
    found = _asked.get()
    token = _now.set(None if found is None else Threshold(found, largest * found.bound))
    try:
        yield
    finally:
        _now.reset(token)


def accumulate(total: Tensor, weights: Tensor, vectors: Tensor, add: Any) -> None:
    """``add(total, weights, vectors)``, [b, l, d] += [b, l, n] @ [b, n, d], without the tiles that are left out.

    The kept parts of the folded axis are gathered for 128 kept indices at a time. On a GPU looking would mean waiting:
    all tiles are contracted there (kernels on panels look for themselves, ``triton/filtered.py``).
    """
    threshold = _now.get()
    if threshold is None or weights.device.type != "cpu":
        add(total, weights, vectors)
        return
    least, folded = float(threshold.least), weights.shape[2]
    for b in range(weights.shape[0]):
        for at in range(0, weights.shape[1], TILE):
            part = weights[b, at : at + TILE]
            strong = _strong(part, least)
            kept = int(strong.sum())
            threshold.asked.count(kept, len(strong))
            one = slice(b, b + 1)
            if kept == len(strong):
                add(total[one, at : at + TILE], part.unsqueeze(0), vectors[one])
            elif kept:
                chosen = strong.repeat_interleave(TILE)[:folded].nonzero().squeeze(1)
                add(total[one, at : at + TILE], part[:, chosen].unsqueeze(0), vectors[b, chosen].unsqueeze(0))


def _strong(part: Tensor, least: float) -> Tensor:
    """Which runs of 128 columns have a number that is not below; NaN is not."""
    weak = (part.abs().amax(0) < least).to(torch.uint8)
    return torch.stack([run.amin() for run in weak.split(TILE)]) == 0
