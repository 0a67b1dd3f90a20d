"""Kernels on a panel: the text that writes numbers per pair to memory, and how any panel kernel is launched."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...program.expr import Expr, topological
from ...program.lower import Fold
from ..evaluate import Sizes
from . import emit, launch
from .launch import Call
from .plan import KernelPlan
from .spec import Spec
from .values import Values

# A row of numbers at a time, in blocks as long as the registers of eight warps allow; columns in strips of 128.
PLANS = {"cols": KernelPlan(1, 4096, 8, 2), "rows": KernelPlan(128, 32, 4, 2), "weights": KernelPlan(1, 4096, 8, 2)}


@functools.lru_cache(maxsize=1024)
def weights_kernel(spec: Spec) -> emit.Kernel:
    """The kernel that writes numbers per pair to memory, each over a product that it may have been made from.

    A row is walked by one program instance, and all of a block is read before any of it is written; a type of half the
    size then only ever overwrites what was read.
    """
    v = Values(spec)
    v.loop(True)
    texts = [v.full(r.args[0]) for r in spec.fold.reductions]
    used = [e for e in spec.fold.leaves if e in set(topological(spec.fold.reductions))]
    names, unspecialized = emit._arguments(spec, used, [])
    count = len(texts)
    outs = [n for k in range(count) for n in (f"out{k}", f"out{k}_r")]
    stores = []
    for k, text in enumerate(texts):
        place = f"(tl.cast(tile * KEPT, tl.int64) + kept_lane[:, None]) * out{k}_r + start + folded_lane[None, :]"
        stores.append(f"tl.store(out{k} + {place}, {text}, mask=kept_in[:, None] & folded_in[None, :])")
    body = [
        *emit._opening(spec),
        *v.before,
        "",
        "for t in range(0, tl.cdiv(folded_size, FOLDED)):",
        "    start = t * FOLDED",
        "    folded_at = start + tl.arange(0, FOLDED)",
        "    folded_in = folded_at < folded_size",
        *(f"    {line}" for line in v.inside),
        "    tl.debug_barrier()  # all of the block was read before any of it is overwritten",
        *(f"    {line}" for line in stores),
    ]
    constants = ", ".join(f"{c}: tl.constexpr" for c in emit.CONSTANTS)
    function = [
        f"@triton.jit(do_not_specialize={unspecialized!r})",
        "def panel_weights(",
        *textwrap.wrap(", ".join([*outs, *names[count:]]) + ",", 110, initial_indent="    ", subsequent_indent="    "),
        f"    {constants},",
        "):",
        *(f"    {line}" if line else "" for line in body),
    ]
    whole = "\n".join(function)
    text = "\n".join([emit._header(spec, used), *emit._copied(whole), whole, ""])
    return emit.Kernel("panel_weights", text, tuple(used))


@dataclass(frozen=True)
class Prepared:
    """What of a launch depends on types and lengths only."""

    kernel: emit.Kernel
    plan: KernelPlan
    tiles: int
    lengths: tuple[int, int]
    wide: bool


def prepare(
    write: Callable[[Spec], emit.Kernel], fold: Fold, over: str, values: Mapping[Expr, Any], here: Sizes, plan: str
) -> Prepared:
    """Write a kernel for a panel of these sizes. ``values``: leaves as numbers or tensors ``[1, length(, length)]``."""
    given = [values[e] for e in fold.leaves]
    types = tuple(str(v.dtype)[6:] if isinstance(v, Tensor) else "number" for v in given)
    letters = tuple(sorted(here.letters.items()))
    spec = Spec(fold, over, types, (0,) * len(types), letters, str(here.compute)[6:], None, 1, False, False, False)
    kernel = write(spec)
    lengths = (here.rows, here.cols) if over == "cols" else (here.cols, here.rows)
    chosen = replace(PLANS[plan], block_folded=_power(lengths[1], PLANS[plan].block_folded))
    blocks = (chosen.block_kept, chosen.block_folded)
    wide = any(_is_wide(e, values[e], blocks if over == "cols" else blocks[::-1]) for e in kernel.leaves)
    return Prepared(kernel, chosen, -(-lengths[0] // chosen.block_kept), lengths, wide)


def _power(length: int, most: int) -> int:
    """The least power of two that holds a length, at least 16 and at most ``most``."""
    return max(16, min(most, 1 << max(0, length - 1).bit_length()))


def _is_wide(e: Expr, v: Any, blocks: tuple[int, int]) -> bool:
    """Whether offsets inside a tile, or a number, need 64 bits."""
    if not isinstance(v, Tensor):
        return isinstance(v, int) and abs(v) >= launch.SMALL
    return e.is_pair and any(s * b >= 2**31 for s, b in zip(v.stride()[1:], blocks, strict=True))


def start(p: Prepared, outputs: list[Any], values: Mapping[Expr, Any], device: torch.device) -> None:
    """Launch a kernel. ``outputs``: its first arguments."""
    arguments = list(outputs)
    for e in p.kernel.leaves:
        v = values[e]
        arguments.append(v)
        if isinstance(v, Tensor):
            arguments += [0 if n == 1 else s for n, s in zip(v.shape, v.stride(), strict=True)]
    arguments += [*p.lengths, p.tiles]
    ragged = p.lengths[1] % p.plan.block_folded != 0
    launch.execute(Call(p.kernel, p.plan, p.tiles, tuple(arguments), p.wide, "ieee", ragged, device))
