"""The text of sums of vectors with a panel's weights, as two groups of warps take turns at them (``wide/contract.py``).

A tile is 128 kept indices and 192 features. ``weights`` is a block of kept and folded indices, ``vectors`` one of
folded indices and a tile's first 128 features, ``others`` one of its last 64: one warp, ahead of both groups, copies
them into a ring (see ``paired_text.py``, whose turns these are). What is written goes through places in shared memory,
32 features at a time. What is added to comes to the same places: a group asks for the first pieces before it
multiplies, and for another whenever one was written.
"""

from __future__ import annotations

import functools
import textwrap

from . import emit
from .paired_text import _IMPORTS, TILE
from .turns import in_gluon

OTHERS = 64  # features of the second block
WIDTH = TILE + OTHERS
DEPTH = 64  # folded indices of a block
PIECE = 32  # features that are written at a time: sums leave registers for no more
PLACES = 4  # pieces of a group in shared memory; the ring takes what is left

_NAMES = "weights_box, vectors_box, others_box, out_box, blocks, tiles, turns"
_RINGS = "weights, vectors, others, room, full, empty, order, came"

_KERNEL = """
@gluon.jit
def copies(
    {names},
    {rings},
    SIDE: tl.constexpr,
    {constants},
):
    at = 0
    for program in range(tl.program_id(0), tiles * turns, tl.num_programs(0)):
        row, col = grouped(program, tiles, turns, 16)
        for k in range(0, blocks):
            slot = at % {stages}
            mbarrier.wait(empty.index(slot), (at // {stages} & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, {bytes})
            copy(weights_box, {weights_at}, bar, weights.index(slot))
            copy(vectors_box, [k * FOLDED, col * {width}], bar, vectors.index(slot))
            copy(others_box, [k * FOLDED, col * {width} + {tile}], bar, others.index(slot))
            at += 1


@gluon.jit
def asked(box, place, bar, row, col):
    # begin to fetch what is added to
    mbarrier.expect(bar, box.block_type.nbytes)
    copy(box, [row, col], bar, place)


@gluon.jit
def written(box, place, row, col, block):
    place.store(block)
    fence_async_shared()
    write(box, [row, col], place)


@gluon.jit
def computes(
    {names},
    {rings},
    SIDE: tl.constexpr,
    {constants},
):
    SUMS: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {tile}, 16])
    REST: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {others}, 16])
    PIECE: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {piece}, 16])
    FIRST: tl.constexpr = SIDE * {places}
    total = tl.zeros([KEPT, {tile}], tl.float32, SUMS)
    rest = tl.zeros([KEPT, {others}], tl.float32, REST)
    at = SIDE * blocks
    phase = 1 - SIDE
    done = 0
    first = tl.program_id(0) + SIDE * tl.num_programs(0)
    for program in range(first, tiles * turns, 2 * tl.num_programs(0)):
        row, col = grouped(program, tiles, turns, 16)
        row = row * KEPT
        col = col * {width}{ask}
        # a tile's product, when it is this group's turn
        mbarrier.wait(order.index(SIDE), phase)
        for k in range(0, blocks):
            slot = at % {stages}
            mbarrier.wait(full.index(slot), at // {stages} & 1)
            block = weights.index(slot){turned}
            total = warpgroup_mma(block, vectors.index(slot), total, use_acc=k > 0, is_async=True)
            rest = warpgroup_mma(block, others.index(slot), rest, use_acc=k > 0, is_async=True)
            total, rest = warpgroup_mma_wait(2, deps=[total, rest])
            mbarrier.arrive(empty.index((at + {stages} - 1) % {stages}), pred=k > 0)
            at += 1
        mbarrier.arrive(order.index(1 - SIDE))
        total, rest = warpgroup_mma_wait(0, deps=[total, rest])
        mbarrier.arrive(empty.index((at - 1) % {stages}))
        at += blocks
        phase ^= 1
        half0, half1 = halved(total)
        piece0, piece1 = halved(half0)
        piece2, piece3 = halved(half1)
        piece4, piece5 = halved(rest)
{pieces}
        done += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=['blocks', 'tiles', 'turns'])
def {name}(
    {names},
    {constants},
):
    weights = tl.allocate_shared_memory({narrow}, [{stages}] + weights_box.block_type.shape, weights_box.layout)
    vectors = tl.allocate_shared_memory({narrow}, [{stages}] + vectors_box.block_type.shape, vectors_box.layout)
    others = tl.allocate_shared_memory({narrow}, [{stages}] + others_box.block_type.shape, others_box.layout)
    room = tl.allocate_shared_memory({narrow}, [2 * {places}] + out_box.block_type.shape, out_box.layout)
    full = tl.allocate_shared_memory(tl.int64, [{stages}, 1], mbarrier.MBarrierLayout())
    empty = tl.allocate_shared_memory(tl.int64, [{stages}, 1], mbarrier.MBarrierLayout())
    order = tl.allocate_shared_memory(tl.int64, [2, 1], mbarrier.MBarrierLayout())
    came = tl.allocate_shared_memory(tl.int64, [2 * {places}, 1], mbarrier.MBarrierLayout())
    for k in tl.static_range({stages}):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=1)
    for k in tl.static_range(2):
        mbarrier.init(order.index(k), count=1)
    for k in tl.static_range(2 * {places}):
        mbarrier.init(came.index(k), count=1)
    fence_async_shared()
    tl.warp_specialize([
        (computes, (
    {names},
    {rings},
    0, KEPT, FOLDED, INT, PRECISION, RAGGED,
        )),
        (computes, (
    {names},
    {rings},
    1, KEPT, FOLDED, INT, PRECISION, RAGGED,
        )),
        (copies, (
    {names},
    {rings},
    0, KEPT, FOLDED, INT, PRECISION, RAGGED,
        )),
    ], [4, 1], [232, 40])
"""
_EACH = list(enumerate(range(0, WIDTH, PIECE)))  # the pieces, and where each begins


@functools.cache
def kernel(narrow: str, over: str, add: bool) -> emit.Kernel:
    """Write out[kept, features] (+)= Σ weights × vectors. ``narrow``: the type of all of them; ``over``: "cols" where
    weights lie kept index by kept index, "rows" where they lie folded index by folded index."""
    ask = ["", "tma.store_wait(0)", *(_asked(k, at) for k, at in _EACH[:PLACES])] if add else []
    body = _KERNEL.format(
        name=f"contract_{over}" + ("_added" if add else ""),
        names=_NAMES,
        rings=_RINGS,
        constants=", ".join(f"{c}: tl.constexpr" for c in emit.CONSTANTS),
        narrow=f"tl.{narrow}",
        tile=TILE,
        others=OTHERS,
        width=WIDTH,
        piece=PIECE,
        places=PLACES,
        stages=4,
        bytes=2 * DEPTH * (TILE + WIDTH),
        weights_at="[row * KEPT, k * FOLDED]" if over == "cols" else "[k * FOLDED, row * KEPT]",
        turned="" if over == "cols" else ".permute((1, 0))",
        ask=textwrap.indent("\n".join(ask), " " * 8),
        pieces=textwrap.indent("\n".join(_written(narrow, add)), " " * 8),
    )
    helpers = in_gluon(emit._copied(body))
    says = f'"""Sums of {narrow} vectors with weights, over {over}."""\n\n'
    name = body[body.rindex("def ") + 4 :].split("(")[0]
    return emit.Kernel(name, says + "\n".join([_IMPORTS, *helpers, body]), (), staged=True)


def _asked(k: int, at: int) -> str:
    place = f"FIRST + {k % PLACES}"
    return f"asked(out_box, room.index({place}), came.index({place}), row, col + {at})"


def _written(narrow: str, add: bool) -> list[str]:
    """Pieces are added to, where sums are, and written. When the next is, another is asked for in its place."""
    found = []
    for k, at in _EACH:
        place, uses = f"FIRST + {k % PLACES}", -(-(len(_EACH) - k % PLACES) // PLACES)  # of a place in a tile
        found.append(f"piece{k} = tl.convert_layout(piece{k}, PIECE)")
        if add:
            found.append(f"mbarrier.wait(came.index({place}), (done * {uses} + {k // PLACES}) & 1)")
            found.append(f"piece{k} += room.index({place}).load(PIECE).to(tl.float32)")
        else:
            found.append(f"tma.store_wait({PLACES - 1})")
        found.append(f"written(out_box, room.index({place}), row, col + {at}, piece{k}.to(tl.{narrow}))")
        later = k - 1 + PLACES
        if add and k > 0 and later < len(_EACH):
            found += ["tma.store_wait(1)", _asked(later, _EACH[later][1])]
    return found
