"""Sums of vectors whose weights are made of products, by groups of warps: Gluon, on Hopper.

Perceptrons and their gradients multiply two to six times for every tile. One warp copies blocks of the folded
side into rings in shared memory. Two groups of four warps (``warp_group_split.py`` says which does what) start a
tile's scores
and the sums of the tile before, and make weights of the scores while the sums run.

The arithmetic of pairs is that of every kernel, in the same text: ``tl`` is here Gluon's language, which has its words.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import torch

from ....plan.default_tiles import Tile
from ..codegen import compiler, kernel_text
from ..codegen.kernel_spec import Spec
from . import (
    attention,
    attention_template,
    single_warpgroup_lines,
    single_warpgroup_template,
    spec_from_tensors,
    sum_of_products_template,
)
from .kernel_plan import KernelPlan
from .sum_of_products_lines import Group, Text
from .template_lines import in_gluon
from .warp_group_split import OWNED, Part, owned, parts

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
    if not attention.on(device) or kernel(spec, even) is None:
        return None
    found, many = parts(spec), spec_from_tensors.processors(device)
    kept = owned(found)
    instances = -(-length // kept)
    enough = 2 * instances > many if found[0].alone else spec_from_tensors.busy(instances, many) >= _BUSY[len(found)]
    return (kept, OWNED, 4, 2) if enough else None


def takes(plan: KernelPlan, device: torch.device) -> bool:
    """Whether a plan asks for such a kernel, and its tiles are those of one."""
    shape = plan.block_kept in (OWNED, 2 * OWNED) and (plan.block_folded, plan.num_warps) == (OWNED, 4)
    return plan.boxes == 2 and shape and attention.on(device)


def taken(spec: Spec, plan: KernelPlan, even: bool = True) -> kernel_text.Kernel | None:
    """The kernel of a spec with a plan's tiles; None where it has none, or with others."""
    found = parts(spec)
    return kernel(spec, even) if found and plan.block_kept == owned(found) else None


@functools.lru_cache(maxsize=1024)
def kernel(spec: Spec, even: bool = True) -> kernel_text.Kernel | None:
    """Write the kernel of a spec, with the arguments that any other rendering has; None where there is none.

    ``even``: whether columns come two by two, so that coins can."""
    found = parts(spec)
    if not found:
        return None
    if found[0].alone:
        return _alone(spec, found[0], even)
    plain = compiler.compile_fold(spec)
    if plain.shifts:
        return None
    names, unspecialized = kernel_text.list_arguments(spec, list(plain.leaves), 0)
    text = Text(spec, found, names, even)
    groups = [Group(text, k).rendered() for k in range(len(found))]
    arithmetic = "\n".join(line for _, lines in groups for line in lines)
    if text.toss is not None and "coin(" in arithmetic:  # words that come two by two are others
        return kernel(spec, False)
    helpers = kernel_text.copy_device_functions("\n".join([arithmetic, *text.opening()]))
    if text.depth < 2 or _STRANGE.search("\n".join([arithmetic, *helpers])):
        return None
    own = {"name": plain.name, "unspecialized": repr(unspecialized), "groups": "".join(body for body, _ in groups)}
    body = sum_of_products_template.KERNEL.format(**text.fields() | own)
    whole = "\n".join(
        [kernel_text.write_header(spec, list(plain.leaves), attention_template.IMPORTS), *in_gluon(helpers), body]
    )
    return replace(plain, text=whole, staged=True)


def _alone(spec: Spec, part: Part, even: bool) -> kernel_text.Kernel | None:
    """The kernel of a group that is an instance by itself."""
    plain = compiler.compile_fold(spec)
    names, unspecialized = kernel_text.list_arguments(spec, list(plain.leaves), len(plain.shifts))
    text = single_warpgroup_lines.Text(spec, part, plain, names)
    if spec.line or not text.clear(even):
        return None
    body = text.rendered(unspecialized)
    helpers = kernel_text.copy_device_functions("\n".join(text.arithmetic))
    if _STRANGE.search("\n".join([*text.arithmetic, *helpers])) or any("coin(" in line for line in text.arithmetic):
        return None
    whole = "\n".join(
        [
            kernel_text.write_header(spec, list(plain.leaves), single_warpgroup_template.IMPORTS),
            *in_gluon(helpers),
            body,
        ]
    )
    return replace(plain, text=whole, staged=True, alone=True)
