"""GEMMs of many features with a fold as their epilogue, by two ping-pong consumers.

The epilogue of a GEMM leaves the matrix units idle unless another warp group has something to multiply. Two consumer
warp groups have neighbouring kept tiles: while one folds, the other multiplies (``gemm_template.py``).
"""

from __future__ import annotations

import functools
import re

import torch

from .....plan.tiles import Tile
from .....program.expression import Expr, topological
from .....program.several import OF_VECTORS
from .....reductions.kernel_lines import Lines
from .....reductions.pick import PickLines
from ...codegen import compiler, k_loop, kernel_text, tile_ranges
from ...codegen import reductions as kinds
from ...codegen.expressions import ExpressionWriter
from ...codegen.kernel_spec import WIDEST, Spec
from .. import gluon_parts, kernel_plan
from ..kernel_plan import KernelPlan
from . import gemm_template
from .gemm_template import FOLDS, TILE

KEPT = 2 * TILE  # kept indices of an instance; a fold with fewer would leave a consumer without work
# Features above which wide tiles are faster, since they read less. (H200, a forward of 65536 x 65536 pairs of 768
# features: 0.91 of the products' time in turns with them, 0.86 each by itself; 0.96 and 0.88 in narrow tiles. Of 512 it
# took 0.94 and 0.96, and 0.92 and 0.95 in narrow ones, which end sooner.)
_NARROW_FEATURES = 512


def choose_tile(spec: Spec, device: torch.device, length: int) -> Tile | None:
    """The tile of a fold with this many kept indices; None where it has no such kernel."""
    if not kernel_plan.runs_warp_specialized(device) or length < KEPT or write_kernel(spec) is None:
        return None
    return KEPT, FOLDS[_prefers_wide_tiles(spec)].folded, 4, 1


def _prefers_wide_tiles(spec: Spec) -> bool:
    """Whether a fold is faster in wide tiles. They have no registers for numbers per folded index."""
    many = all(spec.width(e.feature) > _NARROW_FEATURES for e in k_loop.list_operands(spec))
    return many and not _has_folded_numbers(spec) and kernel_plan.has_registers_for_wide_tiles()


def matches_plan(plan: KernelPlan, device: torch.device) -> bool:
    """True when a plan asks for a warp-specialised kernel, and its tile is one of these kernels'."""
    tile = (plan.block_kept, plan.num_warps) == (KEPT, 4) and plan.block_folded in {s.folded for s in FOLDS.values()}
    return plan.boxes == 2 and tile and kernel_plan.runs_warp_specialized(device)


@functools.lru_cache(maxsize=1024)
def write_kernel(spec: Spec, wide: bool = False) -> kernel_text.Kernel | None:
    """Write the kernel of a spec, with the arguments that any other rendering has; None where there is none.

    ``wide``: in wide tiles, with one argument more, a descriptor of the blocks of extra folded indices."""
    products = [e for e in topological(spec.fold.reductions) if e.op in OF_VECTORS]
    if not spec.deep or spec.bounds or [e.op for e in products] != ["dot"] or not _has_registers(spec):
        return None
    kept, folded = products[0].args[::-1] if spec.folds(products[0].args[0]) else products[0].args
    if spec.width(kept.feature) > (gemm_template.WIDE_DEEPEST if _prefers_wide_tiles(spec) else gemm_template.DEEPEST):
        return None
    if any(spec.box_of.get(e) != () or spec.width(e.feature) <= WIDEST for e in (kept, folded)):
        return None
    plain = compiler.compile_fold(spec)
    v = _PairValues(spec)
    reductions = [kinds.make(place, r, scale, v) for place, (r, scale) in enumerate(spec.fold.scaled)]
    whole, cut = (_write_epilogue(v, reductions, wide, masked) for masked in (False, True))
    v.loop(False)
    stores = kernel_text.write_stores(reductions, v)
    begin = _add_row_layout([line for r in reductions for line in r.start()])
    lines = {
        "opening": _opening(spec),
        "before": v.before,
        "begin": begin + _find_first_label(v, reductions),
        "whole": whole,
        "cut": cut,
        "results": _add_row_layout([*v.inside, *stores]),
    }
    if plain.shifts or any(r.helpers for r in reductions):
        return None
    signature = kernel_text.list_arguments(spec, list(plain.leaves), 0)
    return gemm_template.write_fold(wide, plain, spec, (kept, folded), signature, lines)


def _has_registers(spec: Spec) -> bool:
    """Whether registers suffice beside a product: for one softmax, and a label or a number per folded index."""
    found = sorted(r.attrs[0] for r in spec.fold.reductions)
    return not k_loop.draws_random_numbers(spec) and (
        found == ["soft"] or (found == ["pick", "soft"] and not _has_folded_numbers(spec))
    )


def _has_folded_numbers(spec: Spec) -> bool:
    return any(e.op == "leaf" and e.feature is None and spec.folds(e) for e in topological(spec.fold.reductions))


def _write_epilogue(v: _PairValues, reductions: list[Lines], wide: bool, masked: bool) -> list[str]:
    """What is done to a tile: labels first, in strips that hold any, so that scores can be let go after them."""
    picks = [r for r in reductions if isinstance(r, PickLines)]
    lines = _add_row_layout(kernel_text.write_tile_body(v, [r for r in reductions if r not in picks], {}, masked))
    found = gemm_template.fold_strips(lines, wide, masked)
    for pick in picks:
        lines = _add_row_layout(kernel_text.write_tile_body(v, [pick], {}, False))  # no label lies beyond the end
        found = gemm_template.pick_labels(v.own_place(pick.reduction.args[0]), lines, wide) + found
    return found


def _find_first_label(v: _PairValues, reductions: list[Lines]) -> list[str]:
    own = [v.own_place(r.reduction.args[0]) for r in reductions if isinstance(r, PickLines)]
    return [f"next_own = {gemm_template.next_label(name, 'begin * FOLDED')}" for name in own]


class _PairValues(ExpressionWriter):
    """Numbers of pairs whose product the K loop made."""

    def product(self, x: object, y: object) -> str:
        if k_loop.rounds_products(self.spec):
            self.inside.append(k_loop.write_rounding("pairs"))
        return "pairs"

    def own_place(self, target: Expr) -> str:
        """A kept index's label, in the type of the index: half the registers."""
        t = self.number(target)
        text = f"tl.where(({t} >= 0) & ({t} < folded_size), {t}, -1).to(tl.int32)"
        return self.bind((target, "place"), text, False)


def _opening(spec: Spec) -> list[str]:
    """Which kept tile, and which split of the folded axis."""
    lines = gluon_parts.scalar_opening(spec)
    lines += ["turns = tl.cdiv(folded_size, FOLDED)", "begin = 0", "end = turns"]
    if spec.split:
        lines[-3:] = tile_ranges.SPLIT_RANGE
    return [*lines, "whole_steps = tl.minimum(end, folded_size // FOLDED)"]


def _add_row_layout(lines: list[str]) -> list[str]:
    """Generated lines that create one number per kept index, with the layout that Gluon wants to be told."""
    return [_CREATES.sub(r"\1, ROWS)", line) for line in lines]


_CREATES = re.compile(r"(tl\.(?:zeros|full)\(\[KEPT\], [^\n]*?tl\.\w+)\)")
