"""Weights stored in the memory of the column gradient until all of their rows are known.

Where a gradient is taken in the forward and whole rows do not fit, rows are folded some columns at a time by GEMMs that
measure weights from a guessed maximum (``epilogue.py``). The weights of the first columns are stored where the column
gradient will be written (:func:`monoidreduce.plan.panel_layout.plan_in_place`), of the others only their sums. When
rows are known, stored weights are summed; the others are computed again. So there are between three and four GEMMs,
however little memory there is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....plan.panel_layout import InPlaceLayout
from ....program.expression import Expr
from ....program.lower import Fold
from ...common import combine
from ...common.evaluate import Sizes
from ...panel import Panel
from ..launch import jit_module
from .accumulators import Accumulators, PanelWeights
from .arena import pad_rows
from .epilogue import EpilogueGemm
from .row_factor import RowCorrections
from .row_kernel import FIRST, fuse_stages

Feed = Callable[[EpilogueGemm, Panel], dict[Expr, Any]]


class StoredWeights:
    """The stored panels of one loop. Call ``fold_columns`` once for all rows and columns, then ``take_weights`` for
    every stored panel, then ``close``.

    ``labels``: the GEMM that weighs label columns, where there are any; ``feed``: what a GEMM's leaves are fed."""

    def __init__(
        self,
        accumulators: Accumulators,
        layout: InPlaceLayout,
        gemm: EpilogueGemm,
        labels: EpilogueGemm | None,
        feed: Feed,
    ):
        self.accumulators, self.layout, self.gemm, self.labels, self.feed = accumulators, layout, gemm, labels, feed
        self.plan, self.arena, self.sizes = accumulators.plan, accumulators.arena, accumulators.sizes
        self.corrections: RowCorrections | None = None  # once rows are known
        self.panels = [self._place(one.at or 0, one.last - one.first) for one in layout.stored]

    def _place(self, at: int, cols: int) -> Tensor:
        return self.arena.place_panel(at, self.sizes.rows, cols)[self.gemm.product][:, :cols]

    def fold_columns(self, panel: Panel, here: Sizes) -> PanelWeights:
        """Fold all columns of all rows: results are handed over, the weights of some columns stored."""
        gemm, group = self.gemm, self.plan.groups[0]
        stages = fuse_stages(self.plan.loop, group, True)
        results = [self.arena.get_scalars(n) for names in stages.names for n in names]
        values = self.feed(gemm, panel)
        key = ("stored", here.cols, here.device, *here.letters.values())
        launch = functools.partial(self._launch_fold, values, results, here)
        if key not in gemm.compiled and jit_module.compile_ahead(here.device, launch):
            gemm.compiled.add(key)
        factors = launch()
        places = [(stage, place) for stage in group for place in self.plan.splits[stage].places["cols"]]
        fold = Fold((), tuple(r for own in stages.folds for r in own))
        for (stage, place), (_, values_of) in zip(places, combine.split(fold, results), strict=True):
            panel.keep_results(stage, place, values_of, values_of)
        if self.labels:
            terms = self.labels.weigh_labels(self.feed(self.labels, panel), here)
            self.accumulators.keep_label_terms(terms, panel)
            for one, stored in zip(self.layout.stored, self.panels, strict=True):
                terms.clear_label_weights(stored, one.first)
        self.corrections = self._scale_vectors(RowCorrections(factors), panel)
        return PanelWeights({})

    def _launch_fold(self, values: dict[Expr, Any], results: list[Tensor], here: Sizes) -> Tensor:
        """Write the folds' results, and weights where they are stored; returns the factors of rows."""
        gemm, rows, late = self.gemm, here.rows, self.gemm.epilogue.late
        tiles = -(-here.cols // gemm.plan_kernel("write_guessed", here).block_folded)
        empty, padded = functools.partial(torch.empty, device=here.device), pad_rows(rows)
        guesses, label_logits, factors = empty(3, padded, dtype=torch.float32)[:, :rows]
        marks = empty(rows, dtype=torch.int32)
        maxima, sums = self.arena.place_tile_sums(tiles)
        whole = gemm.prepare((guesses,), values, here)
        whole.launch("guess_maxima", [guesses], values)
        spans = [(one.first, one.last) for one in self.layout.stored]
        rest = (spans[-1][1], here.cols)
        done, written = 0, []
        for (first, last), panel in zip([*spans, rest], [*self.panels, self.panels[0]], strict=True):
            own = _select_columns(values, first, last)
            prepared = gemm.prepare((panel,), own, replace(self.sizes, rows=rows, cols=last - first))
            is_stored = (first, last) != rest
            outputs = [prepared.describe_output(panel), guesses, maxima[done:], sums[done:], padded]
            prepared.launch("write_guessed" if is_stored else "sum_guessed", outputs, own)
            written += [(prepared, panel, own)] if is_stored else []
            done += prepared.tiles
        if done < tiles:
            maxima[done:].fill_(-torch.inf)
            sums[done:].zero_()
        if late is not None and late.label is not None:
            whole.launch("multiply_labels", [label_logits], values)
        # label columns are weighed elsewhere: no panel, no label weights
        ends = [label_logits, guesses, 0, factors, guesses, guesses, marks]
        whole.launch("finish_rows", [*results, guesses, maxima, sums, padded, *ends], values, tiles)
        known = {name: t.unsqueeze(0) for name, t in zip(gemm.epilogue.names, results, strict=True)}
        for prepared, panel, own in written:
            prepared.launch("recompute_rows", [panel, panel.stride(0), marks], own | known)
        return factors

    def _scale_vectors(self, corrections: RowCorrections, panel: Panel) -> RowCorrections:
        """The same with the rows' vectors times their factors, which lie behind the weights."""
        at, dtype = self.plan.groups[0][-1], self.plan.narrow_dtype
        (one,) = [s for s in self.plan.splits[at].sums if s.over == "rows"]
        assert one.products[0].vector is not None and dtype is not None
        vectors = panel.feed(self.accumulators.feeds[at][one.products[0].vector])
        place = self.arena.view_host(self.layout.vectors, vectors.shape, dtype)
        return replace(corrections, scaled=corrections.scale_vectors(vectors, dtype, place))

    def take_weights(self, panel: Panel, here: Sizes) -> PanelWeights:
        """The stored weights of some columns."""
        at = [one.first for one in self.layout.stored].index(panel.cols.start)
        weight = self.plan.splits[self.plan.groups[0][-1]].weights[0]
        return PanelWeights({weight: self.panels[at]}, self.corrections)

    def close(self) -> None:
        """Multiply row totals by the factors of their rows: what is added from now on has these in it."""
        assert self.corrections is not None
        self.accumulators.scale_borrowed(RowCorrections(self.corrections.factors))


def _select_columns(values: dict[Expr, Any], first: int, last: int) -> dict[Expr, Any]:
    """What is fed of some columns."""
    found = {e: v[:, first:last] if isinstance(v, Tensor) and e.cols else v for e, v in values.items()}
    return found | {FIRST["col"]: first}
