"""Folds of products of many features, as groups of warps take turns at them: Gluon, on Hopper.

A matrix product with a fold as its epilogue leaves the matrix units idle during that epilogue, unless somebody else has
something to multiply. Two groups of four warps own neighbouring kept tiles: while one folds, the other multiplies.

The arithmetic of pairs is that of every kernel, in the same text: ``tl`` is here Gluon's language, which has its words.
"""

from __future__ import annotations

import functools
import re

import torch

from ....program.expression import Expr, topological
from ....reductions.kernel_lines import Lines
from ....reductions.pick import PickLines
from ..codegen import compiler, k_loop, kernel_text, tile_ranges
from ..codegen import reductions as kinds
from ..codegen.expressions import ExpressionWriter
from ..codegen.kernel_spec import WIDEST, Spec
from ..launch import jit_module
from . import attention, pingpong_template
from .kernel_plan import KernelPlan
from .pingpong_template import OTHERS, TILE
from .template_lines import scalars

LEAST = 2 * TILE  # kept indices, below which a group would have nothing to do
# Features: above, wide tiles are faster, since they read less. (H200, a forward of 65536 x 65536 pairs of 768 features:
# 0.91 of a product in turns with it, 0.86 each by itself; 0.96 and 0.88 in narrow tiles. Of 512 it took 0.94 and 0.96,
# and 0.92 and 0.95 in narrow ones, which end sooner.)
_FEW = 512


def fits(spec: Spec, device: torch.device, length: int) -> bool:
    """Whether a fold with this many kept indices has such a kernel."""
    return attention.on(device) and length >= LEAST and kernel(spec) is not None


def wide(spec: Spec) -> bool:
    """Whether a fold has wide tiles: not beside numbers per folded index, for which there are no registers, nor where a
    later Triton compiles it (3.9 spills some of what 3.6 keeps in registers)."""
    many = all(spec.width(e.feature) > _FEW for e in k_loop.list_operands(spec))
    return many and not _numbers(spec) and jit_module.triton_version() < (3, 7)


def takes(plan: KernelPlan, device: torch.device) -> bool:
    """Whether a plan asks for such a kernel, and its tiles are those of one."""
    tile = (plan.block_kept, plan.block_folded, plan.num_warps)
    return plan.boxes == 2 and tile in ((LEAST, TILE, 4), (LEAST, TILE + OTHERS, 4)) and attention.on(device)


@functools.lru_cache(maxsize=1024)
def kernel(spec: Spec, wide: bool = False) -> kernel_text.Kernel | None:
    """Write the kernel of a spec, with the arguments that any other rendering has; None where there is none.

    ``wide``: with tiles of more folded indices, and one argument more, a descriptor of blocks of those."""
    products = [e for e in topological(spec.fold.reductions) if e.op in ("dot", "sqdist", "fsum")]
    if not spec.deep or spec.bounds or [e.op for e in products] != ["dot"] or not _light(spec):
        return None
    kept, folded = products[0].args[::-1] if spec.folds(products[0].args[0]) else products[0].args
    if spec.width(kept.feature) > pingpong_template.DEEPEST:
        return None
    if any(spec.box_of.get(e) != () or spec.width(e.feature) <= WIDEST for e in (kept, folded)):
        return None
    plain = compiler.compile_fold(spec)
    v = _Values(spec)
    reductions = [kinds.make(place, r, scale, v) for place, (r, scale) in enumerate(spec.fold.scaled)]
    folded_by = TILE + OTHERS if wide else TILE
    turns = [_turn(v, reductions, folded_by, masked) for masked in (False, True)]
    v.loop(False)
    stores = kernel_text.write_stores(reductions, v)
    fields = {
        "opening": (4, _opening(spec)),
        "before": (4, v.before),
        "begin": (4, _laid([line for r in reductions for line in r.start()]) + _first_own(v, reductions)),
        "whole": (8, turns[0]),
        "other": (12, turns[1]),
        "results": (4, _laid([*v.inside, *stores])),
    }
    if plain.shifts or any(r.helpers for r in reductions):
        return None
    names, unspecialized = kernel_text.list_arguments(spec, list(plain.leaves), 0)
    signature = [*names, "others_box"] if wide else names, unspecialized
    return pingpong_template.rendered(
        pingpong_template.FOLDS[folded_by], plain, spec, (kept, folded), signature, fields
    )


def _light(spec: Spec) -> bool:
    """Whether registers suffice beside a product: one softmax, and what is picked after it or a number per index."""
    found = sorted(r.attrs[0] for r in spec.fold.reductions)
    return not k_loop.draws_random_numbers(spec) and (
        found == ["soft"] or (found == ["pick", "soft"] and not _numbers(spec))
    )


def _numbers(spec: Spec) -> bool:
    """Whether there are numbers per folded index."""
    return any(e.op == "leaf" and e.feature is None and spec.folds(e) for e in topological(spec.fold.reductions))


def _turn(v: _Values, reductions: list[Lines], folded: int, masked: bool) -> list[str]:
    """What is done to a tile: labels first, in strips that hold any, so that scores can be let go after them."""
    picks = [r for r in reductions if isinstance(r, PickLines)]
    lines = _laid(kernel_text.write_tile_body(v, [r for r in reductions if r not in picks], {}, masked))
    found = pingpong_template.in_strips(lines, folded, masked)
    for pick in picks:
        lines = _laid(kernel_text.write_tile_body(v, [pick], {}, False))  # places beyond the end are no one's own
        found = pingpong_template.where_met(v.own_place(pick.reduction.args[0]), lines, folded) + found
    return found


def _first_own(v: _Values, reductions: list[Lines]) -> list[str]:
    own = [v.own_place(r.reduction.args[0]) for r in reductions if isinstance(r, PickLines)]
    return [f"next_own = {pingpong_template.next_own(name, 'begin * FOLDED')}" for name in own]


class _Values(ExpressionWriter):
    """Numbers of pairs whose product was made before them."""

    def product(self, x: object, y: object) -> str:
        if k_loop.rounds_products(self.spec):
            self.inside.append(k_loop.write_rounding("pairs"))
        return "pairs"

    def own_place(self, target: Expr) -> str:
        """In the type of the index, so that it takes half the registers."""
        t = self.number(target)
        text = f"tl.where(({t} >= 0) & ({t} < folded_size), {t}, -1).to(tl.int32)"
        return self.bind((target, "place"), text, False)


def _opening(spec: Spec) -> list[str]:
    """Which tile, and which part of the folded side."""
    lines = scalars(spec)
    lines += ["turns = tl.cdiv(folded_size, FOLDED)", "begin = 0", "end = turns"]
    if spec.split:
        lines[-3:] = tile_ranges.SPLIT_RANGE
    return [*lines, "wholes = tl.minimum(end, folded_size // FOLDED)"]


def _laid(lines: list[str]) -> list[str]:
    """Numbers that begin in a kernel are told where they lie."""
    return [_BEGUN.sub(r"\1, ROWS)", line) for line in lines]


_BEGUN = re.compile(r"(tl\.(?:zeros|full)\(\[KEPT\], [^\n]*?tl\.\w+)\)")
