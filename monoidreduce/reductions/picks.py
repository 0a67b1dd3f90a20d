"""``picks``: the number at each of K given indices of the folded axis, one result per index. Only the normal form makes
this kind, of a sum of ``where(index == targets, number, 0)`` with a vector of targets.

Fields: the targets (a vector per kept index), the number per pair and the constant 1, in the places that a ``pick`` has
them. Parameters: ``("row",)`` or ``("col",)``, the index that is compared, always the folded one. Gathered in chunks by
every engine (``engines/common/label_gather.py``): K comparisons per pair would cost more than the pairs themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..program.expression import Expr, index
from ..program.symbol import Symbol
from .base import Outputs
from .pick import Gather


class Picks(Gather):
    """K indices, and the number at each."""

    name = "picks"

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(fields[0].feature, "float")]

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        """To a pair's number, the cotangents of all targets that name it."""
        hit = Symbol(index(params[0])) == fields[0]
        return [None, torch.where(hit, g[0], 0.0).sum(), None]

    def walks(self, r: Expr, reductions: Sequence[Expr]) -> bool:
        return False

    def whole_form(self, r: Expr, writer: Any, used: frozenset[int]) -> tuple[Callable[..., list[Tensor]], list[str]]:
        target, value, _ = r.args
        return WholePicks(r.attrs[1]), [writer.tensor(target), writer.matrix(value)]

    def exchanged_bytes(self, r: Expr, width: Callable[[Expr], int], item: int) -> tuple[int, int]:
        return width(r.args[0]) * item, 0


@dataclass(frozen=True)
class WholePicks:
    """The numbers at K places of the folded axis of a whole matrix; 0 where a place is outside."""

    over: str

    def __call__(self, sizes: Any, target: Tensor, value: Tensor) -> list[Tensor]:
        length, kept = (sizes.cols, sizes.rows) if self.over == "cols" else (sizes.rows, sizes.cols)
        x = value if self.over == "cols" else value.mT
        batch = torch.broadcast_shapes(x.shape[:-2], target.shape[:-2])
        place = target.expand(*batch, kept, target.shape[-1])
        if not length:
            return [x.sum(-1, keepdim=True).expand(*place.shape)]
        inside = (place >= 0) & (place < length)
        found = x.expand(*batch, kept, length).gather(-1, place.clamp(0, length - 1))
        return [torch.where(inside, found, 0.0)]
