"""The eager engine: tiles in torch, on any device that torch has.

A fold runs tile by tile: rows outside, columns inside. Leaves are only ever sliced; arithmetic happens in place in a
few tile-sized buffers; both directions are folded in the same pass, so a gradient needs one recomputation of each
pair. Tiles on which every reduction would see its identity are found by interval analysis and never computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...plan import schedule as plan
from ...program.constructors import ONE
from ...program.expression import Expr, size
from ...program.lower import Fold, scaled_result
from ...reductions import kind_of
from ..common import evaluate, skip_small_tiles
from ..common.evaluate import Sizes, allocate_result, pair_result_form
from ..common.subproblem import ChosenBlocks
from . import branch_and_bound, cpp
from .tile_code import Buffers
from .tile_walk import BatchChunk, FoldCode, compile_fold

Coder = Callable[[Fold, frozenset[Expr]], FoldCode]


def run(
    fold: Fold, leaves: list[Any], sizes: Sizes, tiles: plan.Tiles | None = None, coder: Coder = compile_fold
) -> list[Tensor]:
    """Run a fold. Leaves are ``[*batch, M or N, f]`` or Python numbers; results come back the same way."""
    if coder is compile_fold and (found := _run_otherwise(fold, leaves, sizes, tiles)) is not None:
        return found
    fold = fold if skip_small_tiles.active() is None else _move_scales_inside(fold)
    scalars = frozenset(e for e, v in zip(fold.leaves, leaves, strict=True) if not isinstance(v, Tensor))
    code = coder(fold, scalars)
    given = {e: _expand_pairs(v, e, sizes) for e, v in zip(fold.leaves, leaves, strict=True) if isinstance(v, Tensor)}
    numbers = {e: v for e, v in zip(fold.leaves, leaves, strict=True) if not isinstance(v, Tensor)}
    written = {
        r: _allocate_pair_result(leaves[fold.leaves.index(r.args[1])], sizes)
        for r in fold.reductions
        if kind_of(r).per_pair
    }
    whole = [_expand_pairs(t, r, sizes) for r, t in written.items()]
    kept = [(r, k) for r, k in fold.outputs if r not in written]
    rooms = [allocate_result(fold, r, k, leaves, sizes) for r, k in kept]
    shape, views, _ = evaluate.merge_batch_dims(
        sizes.batch, [*given.values(), *whole], [t.stride()[: len(sizes.batch)] for t in rooms]
    )
    outputs = [t.unsqueeze(0) if not sizes.batch else t.view(*shape, *t.shape[len(sizes.batch) :]) for t in rooms]
    tiles = tiles or plan.choose_tiles(
        shape[-1], sizes.rows, sizes.cols, numbers_per_pair(fold, sizes), copied=_copied_bytes(given, sizes)
    )
    tiles = replace(tiles, batch=max(1, min(tiles.batch, shape[-1])))
    constants = numbers | {size(axis): sizes.of(axis) for axis in ("rows", "cols", *sizes.letters)}
    elements = tiles.batch * min(tiles.rows, sizes.rows) * min(tiles.cols, sizes.cols)
    buffers = Buffers(elements, sizes.compute, sizes.device, constants)
    for where in evaluate.iterate_outer(shape):
        for b in range(0, max(shape[-1], 1), tiles.batch):
            chunk = slice(b, min(b + tiles.batch, shape[-1]))
            part = {e: v[where][chunk] for e, v in zip([*given, *written], views, strict=True)}
            homes = [o[where][chunk] for o in outputs]
            own = _group_by_reduction(kept, homes)
            results = BatchChunk(
                code, {**part, **numbers}, sizes, tiles, chunk.stop - chunk.start, buffers, homes=own
            ).run()
            for home, value in zip(homes, results, strict=True):
                if value is not home:  # most accumulators write to the output itself
                    home.copy_(value)
    _apply_scales(
        fold, dict(zip(kept, outputs, strict=True)), dict(zip([*given, *written], views, strict=True)) | constants
    )
    folded = iter(rooms)
    return [written[r] if r in written else next(folded) for r, _ in fold.outputs]


def _run_otherwise(fold: Fold, leaves: list[Any], sizes: Sizes, tiles: plan.Tiles | None) -> list[Tensor] | None:
    """The results of generated code, of a tree or of branch and bound, where one is faster than tiles; else None.

    Of few points all pairs in C++ are faster than a search: 0.5 times at 50,000 points of 3 features, equal at about
    150,000 (measured on one core of a Xeon)."""
    if fold.packed:
        return None
    selects = all(kind_of(r).selected(r.attrs[2]) for r in fold.reductions)
    if selects and (found := branch_and_bound.search_boxes(fold, leaves, sizes)) is not None:
        return found
    many = sizes.rows * sizes.cols > _SEARCHED
    if selects and many and (found := branch_and_bound.run(fold, leaves, sizes, tiles)) is not None:
        return found
    if (found := cpp.run(fold, leaves, sizes)) is not None:
        return _scale_results(fold, found, leaves, sizes)
    return branch_and_bound.run(fold, leaves, sizes, tiles) if selects and not many else None


_SEARCHED = 2**34  # pairs


def run_blocks(fold: Fold, leaves: list[Any], sizes: Sizes, chosen: ChosenBlocks) -> list[Tensor] | None:
    """Run a fold over chosen blocks of pairs; None where there is no C++ for it."""
    found = None if fold.packed else cpp.run(fold, leaves, sizes, chosen=chosen)
    return None if found is None else _scale_results(fold, found, leaves, sizes)


def _scale_results(fold: Fold, results: list[Tensor], leaves: list[Any], sizes: Sizes) -> list[Tensor]:
    values = dict(zip(fold.leaves, leaves, strict=True))
    values |= {size(axis): sizes.of(axis) for axis in ("rows", "cols", *sizes.letters)}
    _apply_scales(fold, dict(zip(fold.outputs, results, strict=True)), values)
    return results


@functools.lru_cache(maxsize=1024)
def _move_scales_inside(fold: Fold) -> Fold:
    """The same fold with its scales inside the sum: small tiles are decided by the scaled numbers."""
    return Fold(fold.leaves, fold.pure)


def _group_by_reduction(outputs: list[tuple[Expr, int]], homes: list[Tensor]) -> dict[Expr, list[Tensor]]:
    found: dict[Expr, list[Tensor]] = {}
    for (r, _), home in zip(outputs, homes, strict=True):
        found.setdefault(r, []).append(home)
    return found


def _expand_pairs(t: Tensor, e: Expr, sizes: Sizes) -> Tensor:
    """Expand an argument per pair to all rows and columns (a view)."""
    return t.expand(*t.shape[:-2], sizes.rows, sizes.cols) if e.is_pair else t


def _allocate_pair_result(like: Tensor, sizes: Sizes) -> Tensor:
    """Zeros for a result per pair."""
    shape, dtype = pair_result_form(like, sizes)
    return torch.zeros(shape, dtype=dtype, device=like.device)


def pair_result_bytes(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> int:
    """Bytes of the results per pair, which have the shapes of the arguments they are gradients of."""
    pairs = [leaves[fold.leaves.index(r.args[1])] for r in fold.reductions if kind_of(r).per_pair]
    return sum(t.numel() * sizes.compute.itemsize for t in pairs)


def _apply_scales(fold: Fold, outputs: dict[tuple[Expr, int], Tensor], values: dict[Expr, Any]) -> None:
    """Multiply the results that have a scale by it."""
    scale = {r: s for r, s in fold.scaled if s is not ONE}
    for (r, k), out in outputs.items():
        if r in scale and k == scaled_result(r):
            s = scale[r]
            factor = s.const if s.op == "const" else values[s]
            if isinstance(factor, Tensor):
                factor = factor.unsqueeze(-1) if s.rows or s.cols else factor.unsqueeze(-1).unsqueeze(-1)
            out *= factor


def _copied_bytes(given: dict[Expr, Tensor], sizes: Sizes) -> tuple[int, int]:
    """Bytes of a row's and of a column's vectors that are copied for a tile, as they are multiplied in another type."""
    held = [0, 0]
    for e, v in given.items():
        if e.feature is not None and e.dtype == "float" and e.rows != e.cols and v.dtype != sizes.compute:
            held[e.cols] += v.shape[-1] * sizes.compute.itemsize
    return held[0], held[1]


def numbers_per_pair(fold: Fold, sizes: Sizes) -> int:
    """How many numbers a pair holds at once: more than one only for reductions of whole vectors."""
    return max([1, *(kind_of(r).tile_width(r, sizes.of) for r in fold.reductions)])
