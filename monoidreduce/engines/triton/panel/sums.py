"""What the panels of a walk add up to: sums of vectors, in the type and the place that keep them exact.

Apart from ``kernel_step.py``, which makes the weights that are summed here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....plan import panel_layout
from ....program.contract import Contraction
from ...panel import Panel
from ...panel.panel_program import list_feeds
from . import sparse_contraction
from .arena import Room
from .label_corrections import Rest
from .lent_memory import Lent, lendable

Key = tuple[int, int]  # of a sum: its stage, and its place there


class Sums(Room):
    """The totals of a walk, direction by direction."""

    contract: sparse_contraction.Contract  # of the panel that is summed

    def _begin_sums(self, panel: panel_layout.Panels) -> None:
        self.panel = panel
        self.rest: Rest | None = None  # what is left to do to sums of a panel's weights
        within = panel.outer == "rows" and panel.rows < self.sizes.rows and panel.cols < self.sizes.cols
        self.without = self._without() if panel.tail or within else None
        self.mine: tuple[slice | None, Rest | None] = (None, None)  # of which rows, and what is in their own columns
        self.totals: dict[Key, Tensor] = {}  # of vectors, whole
        self.lent: dict[Key, Lent] = {}  # of rows, in the memory of their own gradients
        self.complete: dict[Key, Tensor] = {}  # vectors of all rows
        self.columns: dict[Key, Tensor] = {}  # what rows' totals are sums of, all of it
        self.adding: dict[Key, Tensor] = {}  # of some columns' vectors, before they are rounded
        self.block: panel_layout.Block | None = None  # of rows, that is walked
        self.labels: dict[Key, list[tuple[Rest, Tensor]]] = {}  # that wait until all panels are done
        self.fed = [dict(list_feeds(stage)) for stage in self.walk.stages]
        self.spare: Tensor | None = None  # what holds panels, when they are done with

    def _gradients(self) -> dict[str, dict[Key, int]]:
        """Memory for the gradients of both sides, before anything is summed; by direction, their widths."""
        found = {}
        for over, length in (("rows", self.sizes.cols), ("cols", self.sizes.rows)):
            at = self.groups[0][-1]
            keys = [(at, place) for place, o, _ in self.parts[at].sums if o == over]
            found[over] = dict(zip(keys, self._widths(over), strict=True))
            for key, width in found[over].items():
                self.totals[key] = torch.empty(length, width, dtype=self.kind, device=self.sizes.device)
        return found

    def _lent_rows(self, block: panel_layout.Block) -> int:
        """Of how many rows of a block the totals lie in gradients, its own and those of the rows after it: of all, or
        of none."""
        count = block.last - block.first
        free = (self.sizes.rows - block.first) * self.kind.itemsize // self.sizes.compute.itemsize
        return count if self._lends() and count <= free else 0

    def _apart(self, block: panel_layout.Block) -> int:
        """Bytes of the totals of the others."""
        return (block.last - block.first - self._lent_rows(block)) * self._each("cols")

    def _begin_block(self, block: panel_layout.Block, widths: dict[str, dict[Key, int]], place: Tensor) -> None:
        """The totals of a block's rows, in ``place`` (bytes) where gradients have no room for them; those of a strip's
        columns behind them, where it has strips."""
        self.block, self.adding = block, {}
        count, lent, compute = block.last - block.first, self._lent_rows(block), self.sizes.compute
        for key, width in widths["cols"].items():
            own = self.totals[key][block.first :]
            self.lent[key] = Lent.zeros(own, count, lent, compute, place, block.first)
            place = place[(count - lent) * width * compute.itemsize :]
            for other, wide in widths["rows"].items() if block.strips else ():
                free = own.view(-1).view(compute)[count * width :]
                self.adding[other] = free[: block.cols * wide].view(block.cols, wide)

    def _keep_own(self, own: Rest, part: Panel) -> None:
        """What some rows add in their own columns: kept for the end of their totals, and for that of all panels."""
        self.mine = part.rows, own
        at = self.groups[0][-1]
        for place, over, products in self.parts[at].sums:
            vector = products[0].vector
            assert vector is not None
            vectors = part.feed(self.fed[at][vector])
            if over == "cols":
                self.columns[at, place] = vectors
            else:
                self.labels.setdefault((at, place), []).append((own, vectors))

    def _close_lent(self) -> None:
        """The gradients of rows from their totals, and from what stands in their own columns. Panels are done with."""
        own = self.mine[1]
        for key, lent in self.lent.items():
            for rows, totals in lent.pieces:
                if own:
                    own.of(rows).complete(totals, self.columns[key])
            lent.close(self.spare)
        self.lent = {}

    def _contract(
        self, key: Key, over: str, products: tuple[Contraction, ...], weights: Any, part: Panel
    ) -> Tensor | None:
        """Σ weight × vector: returned where it is complete, else added to what the panels before gave."""
        rows, cols = part.rows, part.cols
        feeds = [self.fed[key[0]][c.vector] for c in products if c.vector is not None]
        vectors = [part.feed(f) for f in feeds]
        kept, folded = (rows, cols) if over == "cols" else (cols, rows)
        alone = over == "cols" and self.panel.cols == self.sizes.cols
        width = vectors[0].shape[-1]
        outs = [(slice(None), self._alone(key, rows, width))] if alone else self._total(key, over, kept, folded, width)
        for k, (c, vector) in enumerate(zip(products, vectors, strict=True)):
            weight = weights[c.weight]
            rest = self.rest if over == "rows" else None
            vector = rest.scaled(vector, weight.dtype) if rest else vector.to(weight.dtype)
            begun = not alone and (folded.start > self._span(over)[0] or key in self.lent)
            for piece, out in outs:
                self.contract(out, weight[piece], vector, over, add=k > 0 or begun)
        if self.rest and over == "rows":
            self._add_labels(key, self.rest, out, vectors[0], given=feeds[0].op == "input")
        if alone:
            return self.rest.complete(out, vectors[0]) if self.rest else out
        first, last = self._span(over)
        if key in self.adding and folded.stop == last:
            whole, own = self.totals[key][kept], self.adding[key][: kept.stop - kept.start]
            whole.add_(own) if first else whole.copy_(own)
        return None

    def _span(self, over: str) -> tuple[int, int]:
        """The folded indices over which totals are added up before they are rounded."""
        if over == "rows" and self.block and self.block.strips:
            return self.block.first, self.block.last
        return 0, self.sizes.cols if over == "cols" else self.sizes.rows

    def _add_labels(self, key: Key, rest: Rest, out: Tensor, vectors: Tensor, given: bool) -> None:
        """What a panel's rows add in their own columns: after all panels, so that 16 bits round it once, where the
        vectors are there anyway."""
        if given:
            self.labels.setdefault(key, []).append((rest, vectors))
        else:
            rest.add(out, vectors)

    def add_waiting(self, at: int) -> None:
        """The labels of a stage that waited for all panels."""
        for key in [key for key in self.labels if key[0] == at]:
            for rest, vectors in self.labels.pop(key):
                rest.add(self.totals[key], vectors)

    def _alone(self, key: Key, rows: slice, width: int) -> Tensor:
        """Where sums go that are complete with their panel: to those of all rows, unless a later stage reads them."""
        empty = functools.partial(torch.empty, dtype=self.kind, device=self.sizes.device)
        if key[0] < len(self.walk.stages) - 1:
            return empty(rows.stop - rows.start, width)
        if key not in self.complete:
            self.complete[key] = empty(self.sizes.rows, width)
        return self.complete[key][rows]

    def _total(self, key: Key, over: str, kept: slice, folded: slice, width: int) -> Sequence[tuple[slice, Tensor]]:
        """Where to add: the whole total, or a float32 part of it where 16 bits would be rounded too often.

        An axis whose parts are walked one after the other completes each before the next; its whole total may then be
        of 16 bits. So may column totals over few enough panels of whole rows.
        """
        if key in self.lent:
            return self.lent[key].of(kept)
        count = kept.stop - kept.start
        if self.block:
            return [(slice(None), self.adding[key][:count] if key in self.adding else self.totals[key][kept])]
        length, own = (self.sizes.cols, self.panel.cols) if over == "rows" else (self.sizes.rows, self.panel.rows)
        other, step = (self.sizes.rows, self.panel.rows) if over == "rows" else (self.sizes.cols, self.panel.cols)
        in_turn = self.panel.outer != over and own < length
        narrow = None if self.panel.wide or not (in_turn or over == "rows") else self.stored
        empty = functools.partial(torch.empty, device=self.sizes.device)
        if key not in self.totals:
            self.totals[key] = empty(length, width, dtype=narrow or self.sizes.compute)
        if not (narrow and in_turn and step < other):
            return [(slice(None), self.totals[key][kept])]
        if over == "cols":
            gradients = self.totals[key][kept.start :]
            lent = lendable(gradients, count, self.sizes.compute) if self._lends() else 0
            self.lent[key] = Lent.zeros(gradients, count, lent, self.sizes.compute, first=kept.start)
            return self.lent[key].pieces
        if key not in self.adding:
            self.adding[key] = empty(own, width, dtype=self.sizes.compute)
        return [(slice(None), self.adding[key][:count])]
