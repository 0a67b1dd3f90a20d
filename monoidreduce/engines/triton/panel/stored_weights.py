"""Weights stowed in the memory of column gradients until all of their rows are known.

Where a gradient is taken in the forward and whole rows do not fit, rows are folded some columns at a time by products
that measure weights from a guess (``epilogue.py``). Of the first columns these weights are written where gradients will
stand one day (``plan/in_place_layout.py``), of the others only their sums are. When rows are known, what was stowed
is summed; the
others are computed again. So there are between three products and four, whatever little memory there is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ....plan import in_place_layout
from ....program.expression import Expr
from ....program.lower import Fold
from ...common import combine
from ...common.evaluate import Sizes
from ...panel import Part
from ..launch import parallel_compile
from .epilogue import Epilogue
from .fuse_stages import FIRST, joint
from .label_corrections import Rest

_PADDED = 8  # rows: numbers of tiles are aligned
SUM = 6  # bytes of a row's greatest and sum in one tile


def bytes_of_sums(fused: Epilogue, sizes: Sizes) -> int:
    """Bytes of the greatest and the sums of all tiles."""
    return SUM * _rounded(sizes.rows) * _tiles(fused, sizes)


def _rounded(rows: int) -> int:
    return -(-rows // _PADDED) * _PADDED


def _tiles(fused: Epilogue, sizes: Sizes) -> int:
    return -(-sizes.cols // fused.plan("write_guessed", sizes).block_folded)


class Stowed:
    """What is stowed in ``host``, bytes of a column gradient. ``step``: the ``KernelStep`` whose panels these are."""

    def __init__(self, step: Any, fused: Epilogue, plan: in_place_layout.Tail, host: Tensor):
        self.step, self.fused, self.plan, self.host = step, fused, plan, host
        self.rest: Rest | None = None  # once rows are known
        self.panels = [self._panel(turn.at or 0, turn.last - turn.first) for turn in plan.stowed]

    def _panel(self, at: int, cols: int) -> Tensor:
        rows = self.step.sizes.rows
        buffer: Tensor = self.step._inside(self.host, at, rows, cols)[self.fused.product]
        return buffer[:, :cols]

    def fold(self, part: Part, here: Sizes) -> dict[Expr, Tensor]:
        """All rows with all columns: what is folded of them handed over, the weights of some stowed."""
        step, fused, group = self.step, self.fused, self.step.groups[0]
        whole = joint(step.walk, group, True)
        numbers = [step._rows(n) for names in whole.names for n in names]
        values = step._given(fused, part)
        key = ("stowed", here.cols, here.device, *here.letters.values())
        if key not in fused.met and parallel_compile.compile_ahead(
            here.device, lambda: self._folded(values, numbers, here)
        ):
            fused.met.add(key)
        factors = self._folded(values, numbers, here)
        places = [(stage, place) for stage in group for place in step.parts[stage].places["cols"]]
        fold = Fold((), tuple(r for own in whole.folds for r in own))
        for (stage, place), (_, results) in zip(places, combine.split(fold, numbers), strict=True):
            part.keep(stage, place, results, results)
        if step.without:
            own = step.without.own(step._given(step.without, part), here)
            step._keep_own(own, part)
            for turn, panel in zip(self.plan.stowed, self.panels, strict=True):
                own.clear(panel, turn.first)
        self.rest = self._scaled(Rest(factors), part)
        return {}

    def _folded(self, values: dict[Expr, Any], numbers: list[Tensor], here: Sizes) -> Tensor:
        """Results into ``numbers``, and weights where they are stowed; the factors of rows."""
        fused, rows, tiles = self.fused, here.rows, _tiles(self.fused, here)
        empty, padded = functools.partial(torch.empty, device=here.device), _rounded(rows)
        guesses, picked, factors = empty(3, padded, dtype=torch.float32)[:, :rows]
        marks = empty(rows, dtype=torch.int32)
        sums = self.host[: 4 * padded * tiles].view(torch.float32).view(tiles, padded)
        tops = self.host[4 * padded * tiles : SUM * padded * tiles].view(torch.bfloat16).view(tiles, padded)
        whole = fused._ready((guesses,), values, here)
        whole._launch("guess_peaks", [guesses], values)
        pieces = [*zip(self.plan.stowed, self.panels, strict=True), (None, self.panels[0])]
        done, written = 0, []
        for turn, panel in pieces:
            first, last = (turn.first, turn.last) if turn else (self.plan.stowed[-1].last, here.cols)
            own, some = _cut(values, first, last), self.step._sized(rows, last - first)
            ready = fused._ready((panel,), own, some)
            name = "write_guessed" if turn else "sum_guessed"
            ready._launch(name, [ready.filled(panel), guesses, tops[done:], sums[done:], padded], own)
            written += [(ready, panel, own)] if turn else []
            done += ready.turns
        if done < tiles:
            tops[done:].fill_(-torch.inf)
            sums[done:].zero_()
        if fused.task.late is not None and fused.task.late.target is not None:
            whole._launch("match_own", [picked], values)
        ends = [picked, guesses, 0, factors, guesses, guesses, marks]  # what stands in own columns is not asked for
        whole._launch("close_rows", [*numbers, guesses, tops, sums, padded, *ends], values, tiles)
        known = {name: t.unsqueeze(0) for name, t in zip(fused.task.names, numbers, strict=True)}
        for ready, panel, own in written:
            ready._launch("write_spare", [panel, panel.stride(0), marks], own | known)
        return factors

    def _scaled(self, rest: Rest, part: Part) -> Rest:
        """With the rows' vectors times their factors, behind the weights."""
        at = self.step.groups[0][-1]
        ((_, _, products),) = [s for s in self.step.parts[at].sums if s[1] == "rows"]
        vectors = part.feed(self.step.fed[at][products[0].vector])
        place = self.host[self.plan.vectors :][: vectors.numel() * self.step.stored.itemsize]
        ready = rest.scaled(vectors, self.step.stored, place.view(self.step.stored).view(vectors.shape))
        return Rest(rest.factors, ready=ready)

    def weigh(self, part: Part, here: Sizes) -> dict[Expr, Tensor]:
        """The weights of some columns, as they were stowed."""
        self.step.rest = self.rest
        at = [turn.first for turn in self.plan.stowed].index(part.cols.start)
        return {self.step.parts[self.step.groups[0][-1]].weights[0]: self.panels[at]}

    def close(self) -> None:
        """Row totals times the factors of their rows: what is added to them from now on has these in it."""
        assert self.rest is not None
        for lent in self.step.lent.values():
            for rows, totals in lent.pieces:
                Rest(self.rest.factors).of(rows).complete(totals, totals)


def _cut(values: dict[Expr, Any], first: int, last: int) -> dict[Expr, Any]:
    """What is fed of some columns."""
    found = {e: v[:, first:last] if isinstance(v, Tensor) and e.cols else v for e, v in values.items()}
    return found | {FIRST["col"]: first}
