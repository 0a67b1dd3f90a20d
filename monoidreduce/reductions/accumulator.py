"""Accumulators: how tiles in torch fold a kind of reduction, tile by tile, in either direction.

An accumulator holds its state for a whole axis (numbers and vectors per row, or per column), takes one tile at a time
for a slice of it, and turns the state into results at the end. The state is the one that computes best (a running
maximum, a sum and unnormalised values), not the one users see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..program.expression import Expr

Offset = int | Tensor


class Accumulator:
    """State for ``length`` rows (``over="cols"``) or columns (``over="rows"``) of ``batch`` problems."""

    into: Tensor | None = None  # where a number per pair goes, which is not folded

    def __init__(
        self,
        kind: Any,
        reduction: Expr,
        batch: int,
        length: int,
        widths: list[int],
        compute: torch.dtype,
        device: torch.device,
        homes: Sequence[Tensor] = (),
        engine: Any = None,
    ):
        """``kind``: the row of the table. ``widths``: features of each field, -1 for a number. ``homes``: where the
        results will lie, in the order of ``finish``; totals that are results are kept there. ``engine``: what adds
        contractions of tiles to totals (``contract``) and takes exponentials in place (``exp_into``)."""
        self.kind, self.engine = kind, engine
        _, self.over, self.params = reduction.attrs
        self.fields = reduction.args
        self.batch, self.length, self.widths = batch, length, widths
        self.compute, self.device, self.homes = compute, device, homes
        self.dim = -1 if self.over == "cols" else -2
        self.start()

    def start(self) -> None:
        """Make the state of no pairs."""
        raise NotImplementedError

    def step(self, reducer: Any, owned: tuple[bool, ...], tile: Any, at: slice, offset: Offset) -> None:
        """Fold one tile into the slice ``at``.

        ``reducer`` has what the kind's ``tile_reads`` asked for (``roots`` and ``values``), ``owned`` says which roots
        may be overwritten, ``tile.full(root)`` is a number per pair. ``offset`` is the tile's place on the folded axis,
        or that of each of its indices, ascending."""
        raise NotImplementedError

    def edge(self, at: slice) -> Tensor:
        """The number [b, l] that one more pair must reach to make a difference; for kinds that select pairs."""
        raise NotImplementedError

    def finish(self) -> list[Tensor]:
        """The results."""
        raise NotImplementedError

    def numbers(self, value: float, dtype: torch.dtype | None = None) -> Tensor:
        """A number per kept index."""
        return torch.full((self.batch, self.length), value, dtype=dtype or self.compute, device=self.device)

    def totals(self, width: int, result: int = -1) -> Tensor:
        """Zeros, of numbers where ``width`` is below 0; ``result``: which result they become, if they do."""
        if 0 <= result < len(self.homes):
            return self.homes[result].zero_()
        shape = (self.batch, self.length) if width < 0 else (self.batch, self.length, width)
        return torch.zeros(shape, dtype=self.compute, device=self.device)

    def across(self, x: Tensor) -> Tensor:
        """Numbers per kept index [b, l], shaped to broadcast with a tile."""
        return x.unsqueeze(self.dim)


def shift_places(place: Tensor, offset: Offset) -> Tensor:
    """Places in a tile as places on the folded axis."""
    return offset[place] if isinstance(offset, Tensor) else place + offset
