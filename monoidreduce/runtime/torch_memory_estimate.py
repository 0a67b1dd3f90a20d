"""What a fold holds at once: where torch runs it, in tiles or in panels, its engine gone through in small.

The engines themselves run, on a few tiles of prime lengths (``dry_run.py``); so what is counted is what they do,
copies and all, and stays so when they change. A few milliseconds: for who asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..engines import eager, panel
from ..engines.common import batching, matmul, tile_counter
from ..engines.common.evaluate import Sizes, result_form
from ..engines.eager import branch_and_bound, tile_walk
from ..engines.eager.tile_code import TileCode
from ..engines.panel.panel_program import PanelLoop, as_program, split_into_loops
from ..plan import budget, panel_layout, tiles
from ..plan.schedule import Choice
from ..program.expression import Expr
from ..program.lower import Fold
from ..reductions import kind_of
from . import torch_operator
from .dry_run import Enlarged, Noted, Scale

_CPU = torch.device("cpu")


def peak(noted: Noted, choice: Choice) -> int:
    """Bytes alive at once in a fold, its results among them."""
    batch = torch.Size(noted.sizes.batch).numel()
    made = torch_operator.shapes(noted.fold, list(noted.leaves), noted.sizes)
    results = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in made)
    if choice.schedule == "panel":
        one = _in_panels(of_batch(noted, 1), choice)
        return one if batch == 1 else max(one + results - results // batch, 2 * results)  # stacked in the end
    merged, _ = batching.merge_batch_dims(noted.sizes.batch, [v for v in noted.leaves if isinstance(v, Tensor)])
    told, sizes = choice.tile("tile"), noted.sizes
    own = tiles.choose(merged[-1], sizes.rows, sizes.cols, eager.numbers_per_pair(noted.fold, sizes))
    tile = own if told is None else tiles.Tiles(*told)
    bounds = branch_and_bound.find_distance_bounds(noted.fold, noted.leaves, sizes)
    if bounds is not None:
        one = _by_distance(of_batch(noted, 1), tile, bounds)
        return one if batch == 1 else max(one + results - results // batch, 2 * results)  # joined in the end
    together = max(1, min(tile.batch, merged[-1]))  # what cannot be merged is walked
    return _in_tiles(of_batch(noted, together), tile) + results - results * together // batch


def of_batch(noted: Noted, batch: int) -> Noted:
    """The same fold for some elements of its batch."""
    old = len(noted.sizes.batch)

    def cut(v: Any) -> Any:
        if not isinstance(v, Tensor):
            return v
        many = batch if v.shape[:old].numel() > 1 else 1
        return torch.empty((many, *v.shape[old:]), dtype=v.dtype, device="meta")

    sizes = replace(noted.sizes, batch=(batch,), device=_CPU)
    return replace(noted, leaves=tuple(map(cut, noted.leaves)), sizes=sizes)


def _in_tiles(noted: Noted, tile: tiles.Tiles) -> int:
    sizes = noted.sizes
    rows, cols = min(tile.rows, sizes.rows), min(tile.cols, sizes.cols)
    scale = Scale(sizes, tiles=(rows, cols))
    small = tiles.Tiles(*map(scale.down, (sizes.batch[0], rows, cols)))
    leaves = [filled(v, scale) for v in noted.leaves]
    with watched(scale, leaves) as alive:
        eager.run(noted.fold, leaves, scale.sizes(sizes), small, _Both)
    return alive.peak


def _by_distance(noted: Noted, tile: tiles.Tiles, bounds: list[Tensor]) -> int:
    """Points are sorted, and a block of them meets as many others as a tile holds."""
    sizes, kept = noted.sizes, branch_and_bound.KEPT_BLOCK
    scale = Scale(sizes, tiles=(kept, tile.rows * tile.cols // kept))
    small = tiles.Tiles(1, scale.down(kept), scale.down(tile.rows * tile.cols // kept))
    leaves = [filled(v, scale) for v in noted.leaves]
    with watched(scale, leaves) as alive:
        branch_and_bound.run_by_distance(noted.fold, leaves, scale.sizes(sizes), small, bounds, _OneBlock)
    lists = {r: 0 for r in noted.fold.reductions}  # of the best: kept block by block, until all are joined
    for r, k in noted.fold.outputs:
        shape, dtype = result_form(r, k, sizes)
        lists[r] += torch.Size(shape).numel() * dtype.itemsize if kind_of(r).unsorted else 0
    return alive.peak + max(lists.values())


class _OneBlock(branch_and_bound.NearestSearch):
    """Of all blocks the first, which meets all that it can at once."""

    def walk(self) -> None:
        at = slice(0, self.tiles.rows)
        values = self.load_axis(self.kept[at], self.over == "cols")
        self.fold_pairs(at, self.kept[at], values, self.folded[: self.tiles.cols])


def _in_panels(noted: Noted, choice: Choice) -> int:
    sizes = noted.sizes
    one = replace(sizes, batch=())
    (room,) = choice.tile("room") or (0,)
    met = list(_panels(noted, one, room))
    lengths = [n for p, t, width in met for n in (p.rows, p.cols, t.rows, t.cols, width)]
    scale = Scale(sizes, tiles=lengths)

    class Small(_SmallStep):
        real, space, by = one, room, scale

    leaves = [filled(v, scale) for v in noted.leaves]
    with watched(scale, leaves) as alive:
        panel.run(noted.fold, leaves, scale.sizes(sizes), Small, 1)
    return alive.peak


def _panels(noted: Noted, sizes: Sizes, room: int) -> Iterator[tuple[panel_layout.PanelLayout, tiles.Tiles, int]]:
    """The panels, their tiles and the width of their rows, of every loop."""
    for loop in split_into_loops(as_program(noted.fold)):
        for each in (loop, *loop.split_directions()):
            step = panel.TorchStep(each, sizes, _kinds(noted))
            found = step.choose_layout(_room(step, room))
            if found is not None:
                yield found, step.cut_tiles(found), step.pitch(found)


def _kinds(noted: Noted) -> set[torch.dtype]:
    return {v.dtype for e, v in zip(noted.fold.leaves, noted.leaves, strict=True) if e.feature is not None}


def _room(step: panel.TorchStep, asked: int) -> int:
    return asked or budget.limit(lambda: matmul.free_memory(_CPU), step.least_bytes())


class _Both(tile_walk.FoldCode):
    """The first tile has all of its conditions, as tiles have that a condition cuts; of the others indices decide."""

    first = True

    def variant(self, known: dict[Expr, tuple[float, float]]) -> TileCode | None:
        first, self.first = self.first, False
        return super().variant({} if first else known)


class _SmallStep(panel.TorchStep):
    """Does to small panels what the real ones would have done to them."""

    real: ClassVar[Sizes]
    space: ClassVar[int]
    by: ClassVar[Scale]

    def __init__(self, loop: PanelLoop, sizes: Sizes, dtypes: set[torch.dtype]):
        super().__init__(loop, sizes, dtypes)
        self.twin = panel.TorchStep(loop, self.real, dtypes)

    def choose_layout(self, limit: int) -> panel_layout.PanelLayout | None:
        found = self.twin.choose_layout(_room(self.twin, self.space))
        if found is None:
            return None
        self.found = found
        return replace(found, rows=self.by.down(found.rows), cols=self.by.down(found.cols))

    def code(self, fold: Fold, numbers: frozenset[Expr]) -> tile_walk.FoldCode:
        return _Both(fold, numbers)

    def pitch(self, layout: panel_layout.PanelLayout) -> int:
        return self.by.down(self.twin.pitch(self.found))

    def cut_tiles(self, layout: panel_layout.PanelLayout) -> tiles.Tiles:
        found = self.twin.cut_tiles(self.found)
        return tiles.Tiles(found.batch, self.by.down(found.rows), self.by.down(found.cols))


def filled(v: Any, scale: Scale) -> Any:
    """A small leaf of many different numbers: a distance that is 0 is computed in another way."""
    if not isinstance(v, Tensor):
        return v
    shape = [scale.down(n) for n in v.shape]
    if not v.is_floating_point():
        return torch.zeros(shape, dtype=v.dtype, device="cpu")
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64, device="cpu").mul_(0.6180339887).frac_().to(v.dtype).view(shape)


@contextlib.contextmanager
def watched(scale: Scale, leaves: list[Any]) -> Iterator[Enlarged]:
    """Bytes alive inside the block beside the leaves; nobody else takes notice of what runs there."""
    given = [v for v in leaves if isinstance(v, Tensor)]
    with _disable_current_modes(), torch.no_grad(), tile_counter.pause_counting(), Enlarged(scale, given) as alive:
        yield alive
