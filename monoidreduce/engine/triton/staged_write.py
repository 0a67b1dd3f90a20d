"""Products that write weights, whose copies, products and arithmetic take turns as written here (see ``staged.py``).

One warp copies blocks of both sides' features into a ring in shared memory, tile after tile without a pause. Two groups
of four warps own half of a tile's rows each: while one raises powers and writes, the other may still multiply, and the
ring fills for the next tile. A tile is written in two parts, so that the room it takes is as little as one.
"""

from __future__ import annotations

import functools
import re
import textwrap
from collections.abc import Callable

from ...program.expr import Expr, topological
from ...program.reductions import KINDS
from . import deep, emit, staged_text
from .spec import Spec
from .sweep import RowValues
from .write import GUESSED, Task, guessed, reads

STAGES = 4  # blocks of 64 features in the ring
PARTS = 2  # in which a tile is written
_RING = "ring0, ring1, room, full, empty"

_TEXT = """
@gluon.jit
def copies(
{names},
    __RING__,
    SIDE: tl.constexpr, __CONSTANTS__,
):
    # one warp keeps the ring full
    turns = tl.cdiv(folded_size, FOLDED)
    slot = 0
    phase = 1
    for program in range(tl.program_id(0), tiles * turns, tl.num_programs(0)):
        tile, turn = grouped(program, tiles, turns)
        for d in range(0, {width}, {depth}):
            mbarrier.wait(empty.index(slot), phase)
            mbarrier.expect(full.index(slot), 2 * {x0}_box.block_type.nbytes + {x1}_box.block_type.nbytes)
            copy({x0}_box, [tile * KEPT, d], full.index(slot), ring0.index(2 * slot))
            copy({x0}_box, [tile * KEPT + KEPT // 2, d], full.index(slot), ring0.index(2 * slot + 1))
            copy({x1}_box, [turn * FOLDED, d], full.index(slot), ring1.index(slot))
            slot += 1
            if slot == {stages}:
                slot = 0
                phase ^= 1


@gluon.jit
def halves(x):
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def computes(
{names},
    __RING__,
    SIDE: tl.constexpr, __CONSTANTS__,
):
    # four warps own one side of the kept tiles, and write FOLDED columns at a time
    TILE: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {parts} * FOLDED, 16])
    PART: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, FOLDED, 16])
    turns = tl.cdiv(folded_size, {parts} * FOLDED)
    b0 = tl.cast(0, tl.int64)
    kept_lane = tl.arange(0, KEPT, tl.SliceLayout(1, PART)).to(INT)
    folded_lane = tl.arange(0, FOLDED, tl.SliceLayout(0, PART)).to(INT)
    slot = 0
    phase = 0
    for program in range(tl.program_id(0), tiles * turns, tl.num_programs(0)):
        tile, turn = grouped(program, tiles, turns)
        tile = tile * 2 + SIDE
        kept_at = tile * KEPT + tl.arange(0, KEPT, tl.SliceLayout(1, PART))
        kept_in = kept_at < kept_size
{before}
        scores = tl.zeros([KEPT, {parts} * FOLDED], tl.float32, TILE)
        for d in range(0, {width}, {depth}):
            mbarrier.wait(full.index(slot), phase)
            block = ring1.index(slot).permute((1, 0))
            scores = warpgroup_mma(ring0.index(2 * slot + SIDE), block, scores, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            if d > 0:  # the product before this one is done with its blocks
                mbarrier.arrive(empty.index((slot + {stages} - 1) % {stages}))
            slot += 1
            if slot == {stages}:
                slot = 0
                phase ^= 1
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(empty.index((slot + {stages} - 1) % {stages}))
{after}
    tma.store_wait(0)


@gluon.jit(do_not_specialize={unspecialized})
def {name}(
{names},
    __CONSTANTS__,
):
    ring0 = tl.allocate_shared_memory(tl.bfloat16, [2 * {stages}] + {x0}_box.block_type.shape, {x0}_box.layout)
    ring1 = tl.allocate_shared_memory(tl.bfloat16, [{stages}] + {x1}_box.block_type.shape, {x1}_box.layout)
    room = tl.allocate_shared_memory(tl.bfloat16, [2] + out_box.block_type.shape, out_box.layout)
    full = tl.allocate_shared_memory(tl.int64, [{stages}, 1], mbarrier.MBarrierLayout())
    empty = tl.allocate_shared_memory(tl.int64, [{stages}, 1], mbarrier.MBarrierLayout())
    for k in tl.static_range({stages}):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=2)
    fence_async_shared()
    tl.warp_specialize([
        (computes, (
{names},
    __RING__,
    0, KEPT // 2, FOLDED // {parts}, INT, PRECISION, RAGGED,
        )),
        (computes, (
{names},
    __RING__,
    1, KEPT // 2, FOLDED // {parts}, INT, PRECISION, RAGGED,
        )),
        (copies, (
{names},
    __RING__,
    0, KEPT, FOLDED, INT, PRECISION, RAGGED,
        )),
    ], [4, 1], [232, 40])
""".replace("__RING__", _RING).replace("__CONSTANTS__", ", ".join(f"{c}: tl.constexpr" for c in emit.CONSTANTS))


class _Values(RowValues):
    """Numbers of pairs whose product was made before them."""

    def product(self, x: Expr, y: Expr) -> str:
        return "score"


@functools.lru_cache(maxsize=1024)
def kernel(name: str, task: Task, spec: Spec, masked: bool) -> emit.Kernel | None:
    """Write ``write_known`` or ``write_guessed``, with the arguments that ``write.py``'s have; None where there is no
    way to: what a number per pair needs is not in this language."""
    v = _Values(spec)
    v.loop(masked)
    outs, after = _LINES[name](v, task, masked)
    (product,) = (e for e in topological(reads(name, task)) if e.op == "dot")
    sides = [str(e.attrs[0]) for e in (product.args if product.args[0].rows else product.args[::-1])]
    lines = "\n".join([*v.before, *after])
    helpers = emit._copied(lines + " grouped")
    if re.search(r"tl\.(philox|PropagateNan|full|zeros\(\[KEPT, FOLDED\])", "\n".join([lines, *helpers])):
        return None
    under = set(topological(spec.fold.reductions))
    used = [e for e in spec.fold.leaves if e in under]
    names, unspecialized = emit._arguments(spec, used, 0)
    count = sum(len(KINDS[r.attrs[0]].outputs(r.args, r.attrs[2])) for r in spec.fold.reductions)
    fields = {
        "names": textwrap.fill(
            ", ".join([*outs, *names[count:]]), 110, initial_indent="    ", subsequent_indent="    "
        ),
        "unspecialized": repr(unspecialized),
        "name": name,
        "width": str(spec.width(product.args[0].feature)),
        "depth": str(deep.DEPTH),
        "stages": str(STAGES),
        "parts": str(PARTS),
        "x0": sides[0],
        "x1": sides[1],
        "before": textwrap.indent("\n".join(v.before), " " * 8),
        "after": textwrap.indent("\n".join(after), " " * 8),
    }
    helpers = [text.replace("@triton.jit", "@gluon.jit") for text in helpers]
    text = "\n".join([emit._header(spec, used, staged_text.IMPORTS + _STORE), *helpers, _TEXT.format(**fields)])
    return emit.Kernel(name, text, tuple(used), staged=True)


_STORE = 'put = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global\n'


def _in_parts(v: RowValues, masked: bool, weight: Callable[[], str]) -> list[str]:
    """A tile's parts one after the other: the scores, what is made of them, and their way to memory."""
    names = [f"scores{k}" for k in range(PARTS)]
    lines = [f"{', '.join(names)} = halves(scores)"]
    for k, name in enumerate(names):
        v.loop(masked)
        made = weight()
        lines += [
            f"part = turn * {PARTS} + {k}",
            "start = part * FOLDED",
            "folded_at = start + tl.arange(0, FOLDED, tl.SliceLayout(0, PART))",
            "folded_in = folded_at < folded_size",
            f"score = tl.convert_layout({name}, PART)",
            *(["score = score.to(tl.bfloat16).to(tl.float32)  # as a panel would hold it"] * deep.rounds(v.spec)),
            *v.inside,
            f"weights = ({made}).to(tl.bfloat16)",
            "tma.store_wait(0)",
            "room.index(SIDE).store(weights)",
            "fence_async_shared()",
            "put(out_box, [tile * KEPT, start], room.index(SIDE))",
        ]
    return lines


def _known(v: RowValues, task: Task, masked: bool) -> tuple[list[str], list[str]]:
    return ["out_box"], _in_parts(v, masked, lambda: v.full(task.weight))


def _guessed(v: RowValues, task: Task, masked: bool) -> tuple[list[str], list[str]]:
    return GUESSED, _in_parts(v, masked, lambda: guessed(v, task))


_LINES = {"write_known": _known, "write_guessed": _guessed}
