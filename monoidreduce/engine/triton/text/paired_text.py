"""The text of a product with an epilogue whose copies, products and arithmetic take turns (``wide/paired.py`` fills it in).

``{x0}``: the rows' vectors, ``{x1}``: the columns'. Two groups of four warps take tiles of pairs by turns: while one
multiplies its tile, the other weighs and writes the one before. ``copies`` runs in one warp, and is ahead of both: it
fetches blocks of rows and of columns for one tile after the other. A ring's ``full`` barriers say that blocks came, its
``empty`` ones that they are done with; their phase is the parity of the round. A group may look at the ring when the
other has seen all of its own blocks (``order``): before, it could take the last round for its own.
"""

from __future__ import annotations

from .emit import CONSTANTS
from .staged_text import IMPORTS as _IMPORTS

IMPORTS = f"""{_IMPORTS}write = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""
TILE = 128  # rows and columns of a tile
_STAGES = 6  # blocks of rows and columns in the rings: with what is written, all of shared memory

_CONSTANTS = ", ".join(f"{c}: tl.constexpr" for c in CONSTANTS)
_RINGS = "rows, cols, room, full, empty, order"

KERNEL = f"""
@gluon.jit
def copies(
{{names}},
    __RINGS__,
    SIDE: tl.constexpr, __CONSTANTS__,
):
    turns = tl.cdiv(folded_size, FOLDED)
    at = 0
    for program in range(tl.program_id(0), tiles * turns, tl.num_programs(0)):
        tile, turn = grouped(program, tiles, turns)
        for d in range(0, {{blocks}}):
            slot = at % {_STAGES}
            mbarrier.wait(empty.index(slot), (at // {_STAGES} & 1) ^ 1)
            mbarrier.expect(full.index(slot), {{x0}}_box.block_type.nbytes + {{x1}}_box.block_type.nbytes)
            copy({{x0}}_box, [tile * KEPT, d * {{depth}}], full.index(slot), rows.index(slot))
            copy({{x1}}_box, [turn * FOLDED, d * {{depth}}], full.index(slot), cols.index(slot))
            at += 1


@gluon.jit
def written(box, room, row, col, block):
    # through shared memory, when what was there before is on its way
    tma.store_wait(0)
    room.store(block)
    fence_async_shared()
    write(box, [row, col], room)


@gluon.jit
def computes(
{{names}},
    __RINGS__,
    SIDE: tl.constexpr, __CONSTANTS__,
):
    HALF: tl.constexpr = FOLDED // 2
    SCORES: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, FOLDED, 16])
    PAIRS: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    turns = tl.cdiv(folded_size, FOLDED)
    b0 = tl.cast(0, tl.int64)
    room = room.index(SIDE)
    kept_lane = tl.arange(0, KEPT, tl.SliceLayout(1, PAIRS)).to(INT)
    half_lane = tl.arange(0, HALF, tl.SliceLayout(0, PAIRS)).to(INT)
    score = tl.zeros([KEPT, FOLDED], tl.float32, SCORES)
    at = SIDE * {{blocks}}
    phase = 1 - SIDE
    first = tl.program_id(0) + SIDE * tl.num_programs(0)
    for program in range(first, tiles * turns, 2 * tl.num_programs(0)):
        tile, turn = grouped(program, tiles, turns)
        kept_at = tile * KEPT + tl.arange(0, KEPT, tl.SliceLayout(1, PAIRS))
        kept_in = kept_at < kept_size
{{first}}
        mbarrier.wait(order.index(SIDE), phase)
        phase ^= 1
        for d in range(0, {{blocks}}):
            slot = at % {_STAGES}
            mbarrier.wait(full.index(slot), at // {_STAGES} & 1)
            block = cols.index(slot).permute((1, 0))
            score = warpgroup_mma(rows.index(slot), block, score, use_acc=d > 0, is_async=True)
            score = warpgroup_mma_wait(1, deps=[score])
            mbarrier.arrive(empty.index((at + {_STAGES - 1}) % {_STAGES}), pred=d > 0)
            at += 1
        mbarrier.arrive(order.index(1 - SIDE))
        score = warpgroup_mma_wait(0, deps=[score])
        mbarrier.arrive(empty.index((at + {_STAGES - 1}) % {_STAGES}))
        at += {{blocks}}
        scores0, scores1 = halved(score)
        scores0, scores1 = tl.convert_layout(scores0, PAIRS), tl.convert_layout(scores1, PAIRS)
{{lines}}
    tma.store_wait(0)


@gluon.jit(do_not_specialize={{unspecialized}})
def {{name}}(
{{names}},
    __CONSTANTS__,
):
    rows = tl.allocate_shared_memory({{narrow}}, [{_STAGES}] + {{x0}}_box.block_type.shape, {{x0}}_box.layout)
    cols = tl.allocate_shared_memory({{narrow}}, [{_STAGES}] + {{x1}}_box.block_type.shape, {{x1}}_box.layout)
    room = tl.allocate_shared_memory({{narrow}}, [2] + out_box.block_type.shape, out_box.layout)
    full = tl.allocate_shared_memory(tl.int64, [{_STAGES}, 1], mbarrier.MBarrierLayout())
    empty = tl.allocate_shared_memory(tl.int64, [{_STAGES}, 1], mbarrier.MBarrierLayout())
    order = tl.allocate_shared_memory(tl.int64, [2, 1], mbarrier.MBarrierLayout())
    for k in tl.static_range({_STAGES}):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=1)
    for k in tl.static_range(2):
        mbarrier.init(order.index(k), count=1)
    fence_async_shared()
    tl.warp_specialize([
        (computes, (
{{names}},
    __RINGS__,
    0, KEPT, FOLDED, INT, PRECISION, RAGGED,
        )),
        (computes, (
{{names}},
    __RINGS__,
    1, KEPT, FOLDED, INT, PRECISION, RAGGED,
        )),
        (copies, (
{{names}},
    __RINGS__,
    0, KEPT, FOLDED, INT, PRECISION, RAGGED,
        )),
    ], [4, 1], [232, 40])
""".replace("__RINGS__", _RINGS).replace("__CONSTANTS__", _CONSTANTS)
