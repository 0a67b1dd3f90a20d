"""Folds of products of many features, as groups of warps take turns at them: Gluon, on Hopper.

A matrix product with a fold as its epilogue leaves the matrix units idle during that epilogue, unless somebody else has
something to multiply. Two groups of four warps own neighbouring kept tiles: while one folds, the other multiplies.

The arithmetic of pairs is that of every kernel, in the same text: ``tl`` is here Gluon's language, which has its words.
"""

from __future__ import annotations

import functools
import re

import torch

from ...program.expr import topological
from . import staged
from .plan import KernelPlan
from .spec import WIDEST, Spec
from .text import deep, emit, kinds, paired_text
from .text.values import Values

LEAST = 2 * paired_text.TILE  # kept indices, below which a group would have nothing to do


def fits(spec: Spec, device: torch.device, length: int) -> bool:
    """Whether a fold with this many kept indices has such a kernel."""
    return staged.on(device) and length >= LEAST and kernel(spec) is not None


def takes(plan: KernelPlan, device: torch.device) -> bool:
    """Whether a plan asks for such a kernel, and its tiles are those of one."""
    tile = (plan.block_kept, plan.block_folded, plan.num_warps)
    return plan.boxes == 2 and tile == (LEAST, paired_text.TILE, 4) and staged.on(device)


@functools.lru_cache(maxsize=1024)
def kernel(spec: Spec) -> emit.Kernel | None:
    """Write the kernel of a spec, with the arguments that any other rendering has; None where there is none."""
    products = [e for e in topological(spec.fold.reductions) if e.op in ("dot", "sqdist", "fsum")]
    if not spec.deep or spec.bounds or [e.op for e in products] != ["dot"] or not _light(spec):
        return None
    kept, folded = products[0].args[::-1] if spec.folds(products[0].args[0]) else products[0].args
    if any(spec.box_of.get(e) != () or spec.width(e.feature) <= WIDEST for e in (kept, folded)):
        return None
    plain = emit.kernel(spec)
    v = _Values(spec)
    reductions = [kinds.make(place, r, scale, v) for place, (r, scale) in enumerate(spec.fold.scaled)]
    turns = [_laid(emit._turn(v, reductions, {}, masked)) for masked in (False, True)]
    v.loop(False)
    stores = emit._stores(reductions, v)
    fields = {
        "opening": (4, _opening(spec)),
        "before": (4, v.before),
        "begin": (4, _laid([line for r in reductions for line in r.start()])),
        "whole": (8, turns[0]),
        "other": (12, turns[1]),
        "results": (4, _laid([*v.inside, *stores])),
    }
    if plain.shifts or any(r.helpers for r in reductions):
        return None
    signature = emit._arguments(spec, list(plain.leaves), 0)
    return paired_text.rendered(paired_text.FOLDS, plain, spec, (kept, folded), signature, fields)


def _light(spec: Spec) -> bool:
    """Whether registers suffice beside a product: one softmax, and what is picked after it or a number per index."""
    found = sorted(r.attrs[0] for r in spec.fold.reductions)
    numbers = any(e.op == "leaf" and e.feature is None and spec.folds(e) for e in topological(spec.fold.reductions))
    return not deep.draws(spec) and (found == ["soft"] or (found == ["pick", "soft"] and not numbers))


class _Values(Values):
    """Numbers of pairs whose product was made before them."""

    def product(self, x: object, y: object) -> str:
        if deep.rounds(self.spec):
            self.inside.append(deep.rounded("score"))
        return "score"

    def where_met(self, own: str, lines: list[str]) -> list[str]:
        return [f"if {paired_text.met(own, 'start')}:", *(f"    {line}" for line in lines)]


def _opening(spec: Spec) -> list[str]:
    """Which tile, and which part of the folded side."""
    lines = [line for line in emit._opening(spec) if not re.search("KEPT|FOLDED|kept_in", line)]
    lines += ["turns = tl.cdiv(folded_size, FOLDED)", "begin = 0", "end = turns"]
    if spec.split:
        lines[-3:] = emit.PART
    return [*lines, "wholes = tl.minimum(end, folded_size // FOLDED)"]


def _laid(lines: list[str]) -> list[str]:
    """Numbers that begin in a kernel are told where they lie."""
    return [_BEGUN.sub(r"\1, ROWS)", line) for line in lines]


_BEGUN = re.compile(r"(tl\.(?:zeros|full)\(\[KEPT\], [^\n]*?tl\.\w+)\)")
