"""The text of sums of vectors with a panel's weights, as two groups of warps take turns at them (``wide/contract.py``).

``weights`` are a block of kept and folded indices, ``vectors`` one of folded indices and features, both copied into a
ring by one warp that is ahead of both groups (see ``paired_text.py``, whose turns these are). What is added to comes
through the ring too, behind a tile's last block: in its place fit as many bytes. Such a place is full at once for
whoever counts rounds; that its numbers came is said by a barrier of its own (``came``).

Tiles are whole, or the last of them are in parts (``RAGGED``): each part's sums go to ``sums``, to be added up after.
"""

from __future__ import annotations

import functools
import textwrap
from typing import Any

from . import emit
from .paired_text import _IMPORTS, TILE

STAGES = 6  # with what is written, all of shared memory
DEPTH = 64  # folded indices of a block

_NAMES = "weights_box, vectors_box, out_box, sums, whole, tail, parts, blocks, tiles, turns, units"
_RINGS = "weights, vectors, room, full, empty, order, came"
_CONSTANTS = ", ".join(f"{c}: tl.constexpr" for c in emit.CONSTANTS)

_KERNEL = """
@gluon.jit
def span(unit, whole, tail, parts, blocks, RAGGED: tl.constexpr):
    # which tile, and which of its blocks: whole tiles first, then the first parts of the others, the second, ...
    tile = unit
    begin = 0
    end = blocks
    if RAGGED:
        if unit >= whole:
            tile = whole + (unit - whole) % tail
            part = (unit - whole) // tail
            begin = part * blocks // parts
            end = (part + 1) * blocks // parts
    return tile, begin, end


@gluon.jit
def taken(unit, whole, tail, parts, blocks, RAGGED: tl.constexpr):
    # places of the ring that a tile, or a part of one, takes
    _, begin, end = span(unit, whole, tail, parts, blocks, RAGGED)
    return end - begin{behind_whole}


@gluon.jit
def copies(
    {names},
    {rings},
    SIDE: tl.constexpr, {constants},
):
    at = 0
    side = 1
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        side ^= 1
        tile, begin, end = span(unit, whole, tail, parts, blocks, RAGGED)
        row, col = grouped(tile, tiles, turns)
        for k in range(begin, end):
            slot = at % {stages}
            mbarrier.wait(empty.index(slot), (at // {stages} & 1) ^ 1)
            mbarrier.expect(full.index(slot), weights_box.block_type.nbytes + vectors_box.block_type.nbytes)
            copy(weights_box, {weights_at}, full.index(slot), weights.index(slot))
            copy(vectors_box, [k * FOLDED, col * {tile}], full.index(slot), vectors.index(slot))
            at += 1{fetched}


@gluon.jit
def written(box, room, row, col, block):
    # when what was there before is on its way
    tma.store_wait(0)
    room.store(block)
    fence_async_shared()
    write(box, [row, col], room)


@gluon.jit
def computes(
    {names},
    {rings},
    SIDE: tl.constexpr, {constants},
):
    SUMS: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {tile}, 16])
    PIECE: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {piece}, 16])
    room = room.index(SIDE)
    total = tl.zeros([KEPT, {tile}], tl.float32, SUMS)
    step = tl.num_programs(0)
    at = 0
    if SIDE > 0:
        if tl.program_id(0) < units:
            at = taken(tl.program_id(0), whole, tail, parts, blocks, RAGGED)
    phase = 1 - SIDE
    coming = 0
    for unit in range(tl.program_id(0) + SIDE * step, units, 2 * step):
        tile, begin, end = span(unit, whole, tail, parts, blocks, RAGGED)
        row, col = grouped(tile, tiles, turns)
        # a tile's product, when it is this group's turn
        mbarrier.wait(order.index(SIDE), phase)
        for k in range(begin, end):
            slot = at % {stages}
            mbarrier.wait(full.index(slot), at // {stages} & 1)
            block = weights.index(slot){turned}
            total = warpgroup_mma(block, vectors.index(slot), total, use_acc=k > begin, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total])
            mbarrier.arrive(empty.index((at + {stages} - 1) % {stages}), pred=k > begin)
            at += 1
        mbarrier.arrive(order.index(1 - SIDE))
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(empty.index((at - 1) % {stages}))
        phase ^= 1
{halves}
        if unit < whole:
{whole}
        elif RAGGED:
            line = tl.arange(0, KEPT, tl.SliceLayout(1, PIECE))[:, None] * {tile}
            lane = tl.arange(0, {piece}, tl.SliceLayout(0, PIECE))[None, :]
            place = sums + tl.cast(unit - whole, tl.int64) * (KEPT * {tile}) + (line + lane)
{parted}
        if unit + step < units:
            at += taken(unit + step, whole, tail, parts, blocks, RAGGED)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["whole", "tail", "parts", "blocks", "tiles", "turns", "units"])
def {name}(
    {names},
    {constants},
):
    weights = tl.allocate_shared_memory({narrow}, [{stages}] + weights_box.block_type.shape, weights_box.layout)
    vectors = tl.allocate_shared_memory({narrow}, [{stages}] + vectors_box.block_type.shape, vectors_box.layout)
    room = tl.allocate_shared_memory({kind}, [2] + out_box.block_type.shape, out_box.layout)
    full = tl.allocate_shared_memory(tl.int64, [{stages}, 1], mbarrier.MBarrierLayout())
    empty = tl.allocate_shared_memory(tl.int64, [{stages}, 1], mbarrier.MBarrierLayout())
    order = tl.allocate_shared_memory(tl.int64, [2, 1], mbarrier.MBarrierLayout())
    came = tl.allocate_shared_memory(tl.int64, [2, 1], mbarrier.MBarrierLayout())
    for k in tl.static_range({stages}):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=1)
    for k in tl.static_range(2):
        mbarrier.init(order.index(k), count=1)
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

_LENT = """
@gluon.jit
def lent(place, box):
    # a block's place, for a piece of what is added to
    return place._reinterpret({kind}, box.block_type.shape, box.layout)

"""

# What is added to, as the copying warp fetches it.
_FETCHED = """
        if unit < whole:
            mbarrier.expect(came.index(side), {pieces} * out_box.block_type.nbytes)
            for pair in tl.static_range({behind}):
                slot = at % {stages}
                mbarrier.wait(empty.index(slot), (at // {stages} & 1) ^ 1)
                mbarrier.arrive(full.index(slot))
                lane = col * {tile} + 2 * pair * {piece}
                copy(out_box, [row * KEPT, lane], came.index(side), lent(weights.index(slot), out_box))
                copy(out_box, [row * KEPT, lane + {piece}], came.index(side), lent(vectors.index(slot), out_box))
                at += 1"""

_CAME = ["mbarrier.wait(came.index(SIDE), coming)", "coming ^= 1"]
_ADDED = [
    "slot = at % {stages}",
    "total{0} += lent(weights.index(slot), out_box).load(PIECE).to(tl.float32)",
    "total{1} += lent(vectors.index(slot), out_box).load(PIECE).to(tl.float32)",
    "mbarrier.arrive(empty.index(slot))",
    "at += 1",
]
_WRITTEN = "written(out_box, room, row * KEPT, col * {tile} + {lane}, total{k}.to({kind}))"


@functools.cache
def kernel(narrow: str, kind: str, over: str, add: bool) -> emit.Kernel:
    """Write out[kept, features] (+)= Σ weights × vectors. ``narrow``: the type of both, ``kind``: of ``out``; ``over``:
    "cols", where weights lie kept index by kept index, or "rows", where they lie folded index by folded index."""
    piece = piece_of(kind)
    pieces = TILE // piece
    fields: dict[str, Any] = {
        "name": f"contract_{over}" + ("_added" if add else ""),
        "names": _NAMES,
        "rings": _RINGS,
        "constants": _CONSTANTS,
        "narrow": f"tl.{narrow}",
        "kind": f"tl.{kind}",
        "stages": STAGES,
        "tile": TILE,
        "piece": piece,
        "pieces": pieces,
        "behind": pieces // 2,
        "weights_at": "[row * KEPT, k * FOLDED]" if over == "cols" else "[k * FOLDED, row * KEPT]",
        "turned": "" if over == "cols" else ".permute((1, 0))",
    }
    halves = ["total0, total1 = halved(total)"]
    if pieces == 4:
        halves = ["half0, half1 = halved(total)", "total0, total1 = halved(half0)", "total2, total3 = halved(half1)"]
    halves += [f"total{k} = tl.convert_layout(total{k}, PIECE)" for k in range(pieces)]
    whole = list(_CAME) if add else []
    for k in range(pieces):
        if add and k % 2 == 0:
            whole += [line.format(k, k + 1, **fields) for line in _ADDED]
        whole.append(_WRITTEN.format(lane=k * piece, k=k, **fields))
    lines = {
        "halves": (8, halves),
        "parted": (12, [f"tl.store(place + {k * piece}, total{k})" for k in range(pieces)]),
        "whole": (12, whole),
    }
    fields |= {name: textwrap.indent("\n".join(found), " " * by) for name, (by, found) in lines.items()}
    fields["fetched"] = _FETCHED.format(**fields) if add else ""
    fields["behind_whole"] = f" + ({pieces // 2} if unit < whole else 0)" if add else ""
    body = (_LENT.format(**fields) if add else "") + _KERNEL.format(**fields)
    helpers = [helper.replace("@triton.jit", "@gluon.jit") for helper in emit._copied(body)]
    says = f'"""Sums of {narrow} vectors with weights, over {over}, in {kind}."""\n\n'
    return emit.Kernel(fields["name"], says + "\n".join([_IMPORTS, *helpers, body]), (), staged=True)


def piece_of(kind: str) -> int:
    """Features that are written at a time: 128 bytes of each."""
    return 32 if kind == "float32" else 64
