"""Sums of vectors whose weights are made of products, by groups of warps: Gluon, on Hopper.

Perceptrons and their gradients multiply two to six times for every tile. One warp copies blocks of the folded
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
from .groups import OWNED, Part, owned, parts
from .plan import KernelPlan
from .spec import Spec
from .text import alone, alone_text, emit, grouped_text, staged_text
from .text.grouped import Group, Text
from .text.turns import in_gluon

# The share of processors that must be busy on average: what one is faster by than the compiler's schedule (on an H200
# 0.85 to 0.9 of its time; where two kernels of eight products become one of six, 0.75).
_BUSY = {1: 0.9, 2: 0.8}
# what Gluon has not, or says otherwise
_STRANGE = re.compile(r"tl\.(philox|PropagateNan|dot|trans|zeros|full|arange)\b")


def tile(spec: Spec, device: torch.device, length: int, even: bool = True) -> Tile | None:
    """The tile of a fold with this many kept indices in all; None where it has no such kernel, or leaves a GPU idle.

    A processor runs one instance at a time, where the compiler's schedule has two: the last round must be full enough.
    A group that is alone leaves room for another, as the compiler's do; walks that are cut are not for it.
    """
    if not staged.on(device) or kernel(spec, even) is None:
        return None
    found, many = parts(spec), describe.processors(device)
    kept = owned(found)
    instances = -(-length // kept)
    enough = 2 * instances > many if found[0].alone else describe.busy(instances, many) >= _BUSY[len(found)]
    return (kept, OWNED, 4, 2) if enough else None


def takes(plan: KernelPlan, device: torch.device) -> bool:
    """Whether a plan asks for such a kernel, and its tiles are those of one."""
    shape = plan.block_kept in (OWNED, 2 * OWNED) and (plan.block_folded, plan.num_warps) == (OWNED, 4)
    return plan.boxes == 2 and shape and staged.on(device)


def taken(spec: Spec, plan: KernelPlan, even: bool = True) -> emit.Kernel | None:
    """The kernel of a spec with a plan's tiles; None where it has none, or with others."""
    found = parts(spec)
    return kernel(spec, even) if found and plan.block_kept == owned(found) else None


@functools.lru_cache(maxsize=1024)
def kernel(spec: Spec, even: bool = True) -> emit.Kernel | None:
    """Write the kernel of a spec, with the arguments that any other rendering has; None where there is none.

    ``even``: whether columns come two by two, so that coins can."""
    found = parts(spec)
    if not found:
        return None
    if found[0].alone:
        return _alone(spec, found[0], even)
    plain = emit.kernel(spec)
    if plain.shifts:
        return None
    names, unspecialized = emit._arguments(spec, list(plain.leaves), 0)
    text = Text(spec, found, names, even)
    groups = [Group(text, k).rendered() for k in range(len(found))]
    arithmetic = "\n".join(line for _, lines in groups for line in lines)
    if text.toss is not None and "coin(" in arithmetic:  # words that come two by two are others
        return kernel(spec, False)
    helpers = emit._copied("\n".join([arithmetic, *text.opening()]))
    if text.depth < 2 or _STRANGE.search("\n".join([arithmetic, *helpers])):
        return None
    own = {"name": plain.name, "unspecialized": repr(unspecialized), "groups": "".join(body for body, _ in groups)}
    body = grouped_text.KERNEL.format(**text.fields() | own)
    whole = "\n".join([emit._header(spec, list(plain.leaves), staged_text.IMPORTS), *in_gluon(helpers), body])
    return replace(plain, text=whole, guesses=False, staged=True)


def _alone(spec: Spec, part: Part, even: bool) -> emit.Kernel | None:
    """The kernel of a group that is an instance by itself."""
    plain = emit.kernel(spec)
    names, unspecialized = emit._arguments(spec, list(plain.leaves), len(plain.shifts))
    text = alone.Text(spec, part, plain, names)
    if spec.line or not text.clear(even):
        return None
    body = text.rendered(unspecialized)
    helpers = emit._copied("\n".join(text.arithmetic))
    if _STRANGE.search("\n".join([*text.arithmetic, *helpers])) or any("coin(" in line for line in text.arithmetic):
        return None
    whole = "\n".join([emit._header(spec, list(plain.leaves), alone_text.IMPORTS), *in_gluon(helpers), body])
    return replace(plain, text=whole, guesses=False, staged=True, alone=True)
