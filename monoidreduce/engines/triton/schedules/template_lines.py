"""Lines that kernels by turns have in common: how they begin, which tiles they meet, numbers that are fetched ahead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ....program.expression import Expr
from ..codegen import kernel_text
from ..codegen.kernel_spec import Spec


def inside(lines: Iterable[str], by: int) -> str:
    """Lines of a block, as far to the right as it stands."""
    return "\n".join(f"{' ' * by}{line}" for line in lines)


def name(e: Expr) -> str:
    """What a leaf is called in a kernel."""
    return str(e.attrs[0])


def in_gluon(helpers: Iterable[str]) -> list[str]:
    """The helpers of any kernel, as Gluon's compiler is told of them."""
    return [text.replace("@triton.jit", "@gluon.jit") for text in helpers]


def scalars(spec: Spec) -> list[str]:
    """How any kernel begins, but for what has a layout, or is of a group's own tile."""
    return [line for line in kernel_text.write_prologue(spec) if not re.search("KEPT|FOLDED|kept_in", line)]


def fetched(spec: Spec, leaves: Sequence[Expr], each: int) -> list[str]:
    """Numbers of a tile's folded indices as the copying warp loads them, ``each`` lane as many."""
    lane = f"folded_at = start + tl.arange(0, FOLDED, tl.BlockedLayout([{each}], [32], [1], [0]))"
    lines = [lane, "folded_in = folded_at < folded_size"] if leaves else []
    for x in map(name, leaves):
        base = f"{x}_ptr" + "".join(f" + b{k} * {x}_b{k}" for k in range(spec.rank))
        lines.append(f"{x} = tl.load({base} + folded_at.to(tl.int64) * {x}_s, mask=folded_in, other=0)")
    return lines


def visits(spec: Spec) -> tuple[dict[str, str], list[str]]:
    """The tile of a ``turn``, and the lines before, which say how many tiles are whole and how many there are.

    Whole tiles come first, then those that a condition cuts: the tile's place where it is whole (``at_whole``), is not
    (``at_other``), or may be either (``at_any``)."""
    if not spec.bounds:
        ranges = ["wholes = folded_size // FOLDED", "visits = tl.cdiv(folded_size, FOLDED)"]
        return dict.fromkeys(("at_whole", "at_other", "at_any"), "turn"), ranges
    whole = "whole_first + turn + tl.where(turn < whole, 0, between)"
    other = "first + rest + tl.where(rest < before, 0, whole) + tl.where(rest < before + between, 0, again)"
    other = other.replace("rest", "(turn - wholes)")
    place = {"at_whole": whole, "at_other": other, "at_any": f"tl.where(turn < wholes, {whole}, {other})"}
    ranges = [*kernel_text.write_tile_range(spec), "wholes = whole + again"]
    return place, [*ranges, "visits = tl.maximum(wholes + before + between + last - again_last, 1)"]
