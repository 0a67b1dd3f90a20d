"""The memory estimate: bytes that one fold holds at once, by a given schedule.

:func:`estimate_peak` is the one entry point. It runs the engines' own code, without numbers (``dry_run.py``), so what
is counted is what they allocate, copies and all, and stays so when they change:

- engines in torch (eager tiles, panels in torch) run on a few tiles of small prime lengths;
- GPU engines (kernels, panels) run on meta tensors, and no kernel is launched.

It takes a few milliseconds, so it is used where somebody asks (``op.cost``, ``op.explain``). Choosing a schedule uses
the closed formulas of ``plan/candidates.py`` instead. This module sits in ``runtime/`` and not in ``plan/`` because it
executes the engines, which lie above ``plan/``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..engines import auto, eager, panel, triton
from ..engines.common import evaluate, matmul
from ..engines.common.combine import combine
from ..engines.common.evaluate import Form, Sizes, result_form
from ..engines.common.label_gather import chunk_size
from ..engines.eager import branch_and_bound, tile_walk
from ..engines.eager.tile_code import TileCode
from ..engines.panel import PanelLoop, as_program, split_into_loops
from ..plan import candidates, schedule, settings
from ..plan.panel_layout import PanelLayout, choose_in_budget
from ..plan.schedule import Choice
from ..program.expression import Expr
from ..program.lower import Fold
from ..reductions import kind_of
from . import torch_operator
from .dry_run import FoldCall, Scale, result_forms, track_meta_run, track_small_run

_CPU, _META = torch.device("cpu"), torch.device("meta")
# Bytes per index of a scatter, which torch sorts on a GPU: key and value, and both again, twice, while they are sorted
# (49 bytes were measured on an H200).
_SORT_BYTES = 6 * 8


def estimate_peak(call: FoldCall, choice: Choice) -> int:
    """Bytes alive at once while a fold runs by ``choice``, its results included; raises BudgetError if it cannot."""
    if call.sizes.device.type != "cuda":
        return estimate_torch_peak(call, choice)
    found = estimate_gpu_peak(call, choice)
    return found or estimate_torch_peak(call, Choice("flash"))  # no kernel: eager tiles of the default size


def _sum_bytes(found: Iterable[Form]) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in found)


def _take_batch(call: FoldCall, batch: int) -> FoldCall:
    """The same fold for ``batch`` elements of its batch, on the CPU."""
    old = len(call.sizes.batch)

    def cut(v: Any) -> Any:
        if not isinstance(v, Tensor):
            return v
        many = batch if v.shape[:old].numel() > 1 else 1
        return torch.empty((many, *v.shape[old:]), dtype=v.dtype, device="meta")

    sizes = replace(call.sizes, batch=(batch,), device=_CPU)
    return replace(call, leaves=tuple(map(cut, call.leaves)), sizes=sizes)


def _add_batch(one: int, results: int, batch: int) -> int:
    """The peak of a batch whose elements run one after the other, and whose results are stacked in the end."""
    return one if batch == 1 else max(one + results - results // batch, 2 * results)


# Engines in torch: small tensors ------------------------------------------------------------------------------


def estimate_torch_peak(call: FoldCall, choice: Choice) -> int:
    """The peak of a fold that torch runs: in panels, by branch and bound, or in tiles."""
    fold, leaves, sizes = call.fold, call.leaves, call.sizes
    batch = torch.Size(sizes.batch).numel()
    results = _sum_bytes(torch_operator.list_result_forms(fold, list(leaves), sizes))
    if choice.schedule == "panel":
        return _add_batch(_run_panels(_take_batch(call, 1), choice), results, batch)
    merged, *_ = evaluate.merge_batch_dims(sizes.batch, [v for v in leaves if isinstance(v, Tensor)])
    asked = choice.tile("tile")
    own = schedule.choose_tiles(merged[-1], sizes.rows, sizes.cols, eager.numbers_per_pair(fold, sizes))
    tile = own if asked is None else schedule.Tiles(*asked)
    if branch_and_bound.fits(fold, leaves, sizes):
        return results + branch_and_bound.estimate_bytes(fold, sizes)
    bounds = branch_and_bound.find_distance_bounds(fold, leaves, sizes)
    if bounds is not None:
        return _add_batch(_run_branch_and_bound(_take_batch(call, 1), tile, bounds), results, batch)
    together = max(1, min(tile.batch, merged[-1]))  # batch dimensions that cannot be merged are looped over
    return _run_tiles(_take_batch(call, together), tile) + results - results * together // batch


def _run_tiles(call: FoldCall, tile: schedule.Tiles) -> int:
    sizes = call.sizes
    rows, cols = min(tile.rows, sizes.rows), min(tile.cols, sizes.cols)
    scale = Scale(sizes, tiles=(rows, cols))
    small = schedule.Tiles(*map(scale.down, (sizes.batch[0], rows, cols)))
    leaves = [scale.varied_leaf(v) for v in call.leaves]
    with track_small_run(scale, leaves) as memory:
        eager.run(call.fold, leaves, scale.sizes(sizes), small, _FirstTileMasked)
    return memory.peak


class _FirstTileMasked(tile_walk.FoldCode):
    """The first tile evaluates all of its conditions, as a tile on a mask's edge does; other tiles by their indices."""

    first = True

    def variant(self, known: dict[Expr, tuple[float, float]]) -> TileCode | None:
        first, self.first = self.first, False
        return super().variant({} if first else known)


def _run_branch_and_bound(call: FoldCall, tile: schedule.Tiles, bounds: list[Tensor]) -> int:
    """Points are sorted, and a block of them is compared with as many others as fill a tile."""
    sizes, kept = call.sizes, branch_and_bound.KEPT_BLOCK
    scale = Scale(sizes, tiles=(kept, tile.rows * tile.cols // kept))
    small = schedule.Tiles(1, scale.down(kept), scale.down(tile.rows * tile.cols // kept))
    leaves = [scale.varied_leaf(v) for v in call.leaves]
    with track_small_run(scale, leaves) as memory:
        branch_and_bound.run_by_distance(call.fold, leaves, scale.sizes(sizes), small, bounds, _FirstBlock)
    lists = {r: 0 for r in call.fold.reductions}  # top-k lists are kept block by block, and concatenated in the end
    for r, k in call.fold.outputs:
        shape, dtype = result_form(r, k, sizes)
        lists[r] += torch.Size(shape).numel() * dtype.itemsize if kind_of(r).unsorted else 0
    return memory.peak + max(lists.values())


class _FirstBlock(branch_and_bound.NearestSearch):
    """Only the first block, compared with as many points as it can be at once."""

    def fold_tiles(self) -> None:
        at = slice(0, self.tiles.rows)
        values = self.load_axis(self.kept[at], self.over == "cols")
        self.fold_pairs(at, self.kept[at], values, self.folded[: self.tiles.cols])


def _run_panels(call: FoldCall, choice: Choice) -> int:
    sizes = call.sizes
    one = replace(sizes, batch=())
    (limit,) = choice.tile("room") or (0,)
    layouts = list(_list_panels(call, one, limit))
    lengths = [n for p, t, pitch in layouts for n in (p.rows, p.cols, t.rows, t.cols, pitch)]
    scale = Scale(sizes, tiles=lengths)

    class Step(_SmallStep):
        real_sizes, asked, by = one, limit, scale

    leaves = [scale.varied_leaf(v) for v in call.leaves]
    with track_small_run(scale, leaves) as memory:
        panel.run(call.fold, leaves, scale.sizes(sizes), Step, 1)
    return memory.peak


def _list_panels(call: FoldCall, sizes: Sizes, limit: int) -> Iterator[tuple[PanelLayout, schedule.Tiles, int]]:
    """Of every loop over panels: the panels, their tiles and the pitch of their rows."""
    dtypes = {v.dtype for e, v in zip(call.fold.leaves, call.leaves, strict=True) if e.feature is not None}
    for loop in split_into_loops(as_program(call.fold)):
        for each in (loop, *loop.split_directions()):
            step = panel.TorchStep(each, sizes, dtypes)
            found = _choose_layout(step, limit)
            if found is not None:
                yield found, step.cut_tiles(found), step.pitch(found)


def _choose_layout(step: panel.TorchStep, asked: int) -> PanelLayout | None:
    if asked:
        return step.choose_layout(asked)
    return choose_in_budget(step.choose_layout, lambda: matmul.free_memory(_CPU), step.least_bytes())[1]


class _SmallStep(panel.TorchStep):
    """Runs on small panels, laid out as the panels of the real sizes."""

    real_sizes: ClassVar[Sizes]
    asked: ClassVar[int]
    by: ClassVar[Scale]

    def __init__(self, loop: PanelLoop, sizes: Sizes, dtypes: set[torch.dtype]):
        super().__init__(loop, sizes, dtypes)
        self.real = panel.TorchStep(loop, self.real_sizes, dtypes)

    def choose_layout(self, limit: int) -> PanelLayout | None:
        found = _choose_layout(self.real, self.asked)
        if found is None:
            return None
        self.found = found
        return replace(found, rows=self.by.down(found.rows), cols=self.by.down(found.cols))

    def code(self, fold: Fold, numbers: frozenset[Expr]) -> tile_walk.FoldCode:
        return _FirstTileMasked(fold, numbers)

    def pitch(self, layout: PanelLayout) -> int:
        return self.by.down(self.real.pitch(self.found))

    def cut_tiles(self, layout: PanelLayout) -> schedule.Tiles:
        found = self.real.cut_tiles(self.found)
        return schedule.Tiles(found.batch, self.by.down(found.rows), self.by.down(found.cols))


# GPU engines: meta tensors ------------------------------------------------------------------------------------


def estimate_gpu_peak(call: FoldCall, choice: Choice, *, replayed: bool = True) -> int | None:
    """The peak of a fold that kernels or panels on a GPU run; None if it has no kernel. A replayed call, as users make
    it, holds small results of splits until it is done; the tuner's calls (``replayed=False``) let them go."""
    fold, leaves, sizes = call.fold, call.leaves, call.sizes
    if choice.schedule == "panel":
        if not triton.is_k_loop_fold(fold, leaves, sizes):
            return _run_gpu_panels(call, choice)
        if triton.topk.find_product(fold, leaves, sizes):  # a few rows at a time, by a vendor GEMM
            return _run_on_meta(call, lambda given, meant: triton.run_k_loop_fold(fold, given, meant))
        choice = Choice("flash")
    if triton.topk.selects_from_panels(fold):
        return _run_panel_topk(call, choice)
    ready = auto.prepare_choice(choice, fold, leaves, sizes)
    return None if ready is None else _run_kernels(call, ready, replayed)


def _run_on_meta(call: FoldCall, run: Callable[[list[Any], Sizes], Any]) -> int:
    """Bytes alive while ``run(leaves, sizes)`` executes an engine on meta tensors, without launching kernels."""
    leaves = [torch.empty_like(v, device=_META) if isinstance(v, Tensor) else v for v in call.leaves]
    with track_meta_run(leaves, call.sizes) as memory:
        run(leaves, replace(call.sizes, device=_META))
    return memory.peak


def _run_kernels(call: FoldCall, ready: triton.PreparedFold, replayed: bool = True) -> int:
    """Gathers and kernels one after the other, each beside the results of those before it."""
    call = replace(call, fold=ready.inner, leaves=tuple(ready.extend(call.leaves) or call.leaves), sizes=ready.sizes)
    sizes = call.sizes
    made = dict(zip(call.fold.outputs, result_forms(call.fold, call.leaves, sizes, sizes.device), strict=True))
    done = peak = 0
    for r in ready.picks:
        peak = max(peak, done + _run_gather(call, r))
        done += _sum_bytes([made[r, 0]])
    for one in ready.launches:
        peak = max(peak, done + _run_launch(call, one))
        if one.splits > 1 or one.topk_places:
            peak = max(peak, done + _run_combine(one, sizes))
        if replayed and one.holds_splits and len(ready.launches) > 1:
            done += _sum_bytes(one.outputs)
        done += _sum_bytes(made[o] for o in one.returned_outputs)
    return max(peak, done)


def _run_panel_topk(call: FoldCall, choice: Choice) -> int | None:
    """A top-k that is selected from panels, after all else of its fold."""
    rest, large = triton.topk.split_large(call.fold)
    ready = rest and auto.prepare_choice(choice, rest, call.leaves, call.sizes)
    if rest and ready is None:
        return None
    found = [triton.topk.estimate_large_bytes(one, call.sizes) for one in large]
    return sum(found) + (_run_kernels(replace(call, fold=rest), ready) if rest and ready else 0)


def _run_launch(call: FoldCall, one: Any) -> int:
    """Bytes alive while one kernel runs: converted leaves, and what it writes."""
    spare = copy.copy(one)
    spare.sizes, spare.relaunch = replace(call.sizes, device=_META), lambda *arguments: None
    spare._bounds = lambda *given: []  # tile ranges are computed once for a condition's data, and cached

    def run(leaves: list[Any], sizes: Sizes) -> None:
        held = [torch.empty(shape, dtype=dtype, device=_META) for shape, dtype in (*one.outputs, *one.extra_forms)]
        spare.launch_into(held[: len(one.outputs)], leaves, lambda: triton.merge_batches(call.fold, leaves, sizes)[0])

    return _run_on_meta(call, run)


def _run_combine(one: Any, sizes: Sizes) -> int:
    """Bytes alive while the partial results of splits are combined, and top-k lists sorted."""
    splits, scale = one.splits, Scale(sizes, tiles=(one.splits,))
    small = replace(scale.sizes(sizes), batch=tuple(map(scale.down, sizes.batch)))
    with track_small_run(scale) as memory:
        count = scale.down(splits)
        shapes = [result_form(r, k, small) for r, k in one.fold.outputs]
        first = (count,) if splits > 1 else ()
        made = [torch.zeros((*first, *shape), dtype=dtype, device="cpu") for shape, dtype in shapes]
        if splits > 1:
            made[:] = combine(one.fold, made, [1] * count, ordered=True, faster=triton.small_kernels.allocate_results)
        for at in one.topk_places:
            made[at : at + 2] = triton.topk.sort_list(one.fold.outputs[at][0], *made[at : at + 2])
    return memory.peak


def _run_gather(call: FoldCall, r: Expr) -> int:
    """Bytes alive while single pairs (a label's logit) are gathered or scattered, in chunks."""
    sizes = call.sizes
    given, whole, *_ = triton.merge_batches(call.fold, call.leaves, sizes)
    if triton.pick.has_kernel(r, sizes):
        return triton.pick.estimate_bytes(r, given, sizes, whole, call.fold.raised)
    widest = max([1, *(sizes.of(str(e.feature)) for e in call.fold.leaves if e.feature is not None)])
    matches = 1 if r.args[0].feature is None else sizes.of(str(r.args[0].feature))
    length = chunk_size(schedule.ELEMENTS, whole[-1], matches, widest)
    scale = Scale(sizes, tiles=(length,))
    small = scale.sizes(sizes)
    leaves = [scale.varied_leaf(v) for v in call.leaves]
    with track_small_run(scale, leaves) as memory:
        values, batch, *_ = triton.merge_batches(call.fold, leaves, small)
        elements = scale.down(length) * batch[-1] * scale.down(matches) * scale.down(widest)
        triton.gather_labels(r, values, batch, small, elements)
    side = "rows" if r.attrs[2] == ("col",) else "cols"  # the side that holds the indices
    places = min(length, sizes.here(side)) * whole[-1] * matches
    scattered = r.attrs[1] == side
    return memory.peak + (_SORT_BYTES * places if scattered else 0)


def _run_gpu_panels(call: FoldCall, choice: Choice) -> int:
    batch, alone = torch.Size(call.sizes.batch).numel(), replace(call.sizes, batch=())
    own = [v[0] if isinstance(v, Tensor) else v for v in _take_batch(call, 1).leaves]
    known = settings.requested_budget() is not None or torch.cuda.is_available()
    (asked,) = choice.tile("room") or (0 if known else candidates.ROOM,)  # free memory of an absent device is unknown

    class Step(triton.MetaStep):
        real_sizes = alone

    one = replace(call, leaves=tuple(own), sizes=alone)
    held = _run_on_meta(one, lambda leaves, sizes: panel.run(call.fold, leaves, sizes, Step, asked))
    results = _sum_bytes(result_forms(call.fold, call.leaves, call.sizes, call.sizes.device))
    return _add_batch(held, results, batch)
