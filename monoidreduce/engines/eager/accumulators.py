"""Accumulators of the eager engine: those of the kinds of reduction, with the arithmetic that is done to tiles here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...program.contract import Contraction
from ...program.expression import Expr
from ...program.several import MIX, folds, is_product, letters
from ...reductions import kind_of
from ...reductions.accumulator import Accumulator
from ..common import matmul, skip_small_tiles
from ..common.evaluate import Sizes
from .tile_code import FEW_FEATURES
from .tile_run import TileRun, feature_differences


def make_accumulator(r: Expr, batch: int, length: int, sizes: Sizes, homes: Sequence[Tensor] = ()) -> Accumulator:
    """The accumulator of a reduction for ``length`` kept indices of ``batch`` problems. ``homes``: where its results
    will lie; totals that are results are kept there."""
    kind, widths = kind_of(r), [-1 if f.feature is None else sizes.of(str(f.feature)) for f in r.args]
    arithmetic = TileArithmetic(r.attrs[1])
    return kind.accumulator(kind, r, batch, length, widths, sizes.compute, sizes.device, homes, arithmetic)


class TileArithmetic:
    """What an accumulator asks of the engine: contractions of one sum, tile after tile, and exponentials."""

    exp_into = staticmethod(matmul.exp_into)

    def __init__(self, over: str):
        self.over, self.dim = over, -1 if over == "cols" else -2
        self.accumulate = skip_small_tiles.SkippingContraction()

    def contract(self, total: Tensor, weight: Tensor, c: Contraction, tile: TileRun) -> None:
        """total += Σ weight × vector over the folded axis."""
        if c.walk and is_product(c.weight) and folds(c.weight.args[1], self.over):
            self._contract_products(total, weight, c.weight, tile)
        elif c.walk:
            for f in range(tile.width(c.weight)):
                part = tile.component(c.weight, f, reuse=True)
                total[..., f] += (part if weight is None else weight * part).expand(tile.tile).sum(self.dim)
        elif c.minus is not None:
            self._contract_gap(total, weight, c, tile)
        elif c.vector is None:
            total += weight.sum(self.dim)
        else:
            vector = tile.get(c.vector)
            weight = tile.multiplied(weight, vector.dtype)
            self.accumulate(total, weight if self.over == "cols" else weight.mT, vector)

    def _contract_products(self, total: Tensor, weight: Tensor | None, e: Expr, tile: TileRun) -> None:
        """total += Σ weight × numbers × vectors (``program/several.py``): one matrix product for each number."""
        numbers, vectors = e.args[0], tile.pieces(e.args[1])
        mixed = e.attrs[0] == MIX
        count, width = (tile.count(name) for name in letters((e.args[1] if mixed else e).feature))
        totals = [total] * count if mixed else total.unflatten(-1, (count, width)).unbind(-2)
        for a in range(count):
            part = tile.component(numbers, a, reuse=True).expand(tile.tile)
            part = tile.multiplied(part if weight is None else weight * part, vectors[0].dtype)
            self.accumulate(totals[a], part if self.over == "cols" else part.mT, vectors[a % len(vectors)])

    def _contract_gap(self, total: Tensor, weight: Tensor, c: Contraction, tile: TileRun) -> None:
        """total += Σ weight (x - y): feature by feature where few, else by a product of vectors centred on the tile."""
        assert c.vector is not None and c.minus is not None
        x, y = (tile.get(v).to(total.dtype) for v in (c.vector, c.minus))
        if x.shape[-1] <= FEW_FEATURES:
            gaps, gap = feature_differences(x, y), torch.empty(tile.tile, dtype=total.dtype, device=total.device)
            for f in range(x.shape[-1]):
                total[..., f] += gaps(f, gap).mul_(weight).sum(self.dim)
            return
        centre = y.mean(1, keepdim=True)
        kept, folded = (x - centre, centre - y) if self.over == "cols" else (centre - y, x - centre)
        total += weight.sum(self.dim).unsqueeze(-1) * kept
        matmul.accumulate(total, weight if self.over == "cols" else weight.mT, folded)
