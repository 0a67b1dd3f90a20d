"""Sums of vectors whose weights are made of several products, by two groups of warps: Gluon, on Hopper.

A gated perceptron and its gradients multiply three to six times for every tile. One warp copies blocks of the folded
side into rings in shared memory. Two groups of four warps (``groups.py`` says which does what) start a tile's scores
and the sums of the tile before, and make weights of the scores while the sums run.

The arithmetic of pairs is that of every kernel, in the same text: ``tl`` is here Gluon's language, which has its words.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import torch

from ...plan.defaults import Tile
from . import describe, staged
from .groups import OWNED, parts
from .plan import KernelPlan
from .spec import Spec
from .text import emit, grouped_text, staged_text
from .text.grouped import Group, Text
from .text.turns import in_gluon

# The share of processors that must be busy on average: what one is faster by than the compiler's schedule (on an H200
# 0.85 to 0.9 of its time; where two kernels of eight products become one of six, 0.75).
_BUSY = {1: 0.9, 2: 0.8}
# what Gluon has not, or says otherwise
_STRANGE = re.compile(r"tl\.(philox|PropagateNan|dot|trans|zeros|full|arange)\b")


def tile(spec: Spec, device: torch.device, length: int) -> Tile | None:
    """The tile of a fold with this many kept indices in all; None where it has no such kernel, or leaves a GPU idle.

    A processor runs one instance at a time, where the compiler's schedule has two: the last round must be full enough.
    Under conditions such kernels are right, but were not timed: only a plan that asks for one gets it.
    """
    if not staged.on(device) or spec.bounds or kernel(spec) is None:
        return None
    groups, many = len(parts(spec)), describe.processors(device)
    kept = OWNED * (3 - groups)
    instances = -(-length // kept)
    busy = instances / (-(-instances // many) * many)
    return (kept, OWNED, 4, 2) if busy >= _BUSY[groups] else None


def takes(plan: KernelPlan, device: torch.device) -> bool:
    """Whether a plan asks for such a kernel, and its tiles are those of one."""
    shape = plan.block_kept in (OWNED, 2 * OWNED) and (plan.block_folded, plan.num_warps) == (OWNED, 4)
    return plan.boxes == 2 and shape and staged.on(device)


def taken(spec: Spec, plan: KernelPlan) -> emit.Kernel | None:
    """The kernel of a spec with a plan's tiles; None where it has none, or with others."""
    return kernel(spec) if plan.block_kept == OWNED * (3 - len(parts(spec))) else None


@functools.lru_cache(maxsize=1024)
def kernel(spec: Spec) -> emit.Kernel | None:
    """Write the kernel of a spec, with the arguments that any other rendering has; None where there is none."""
    found = parts(spec)
    plain = emit.kernel(spec)
    if not found or plain.shifts:
        return None
    names, unspecialized = emit._arguments(spec, list(plain.leaves), 0)
    text = Text(spec, found, names)
    groups = [Group(text, k).rendered() for k in range(len(found))]
    arithmetic = "\n".join(line for _, lines in groups for line in lines)
    helpers = emit._copied("\n".join([arithmetic, *text.opening()]))
    if text.depth < 2 or _STRANGE.search("\n".join([arithmetic, *helpers])):
        return None
    own = {"name": plain.name, "unspecialized": repr(unspecialized), "groups": "".join(body for body, _ in groups)}
    body = grouped_text.KERNEL.format(**text.fields() | own)
    whole = "\n".join([emit._header(spec, list(plain.leaves), staged_text.IMPORTS), *in_gluon(helpers), body])
    return replace(plain, text=whole, guesses=False, staged=True)
