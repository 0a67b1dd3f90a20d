"""The text of a product with an epilogue whose copies, products and arithmetic take turns (``wide/write.py`` fills it in).

``{x0}``: the rows' vectors, ``{x1}``: the columns'. Two groups of four warps have a tile each, of neighbouring rows and
the same columns, whose blocks they share. The second begins a few blocks after the first, and stays as far behind: so
one multiplies while the other weighs and writes. ``copies`` runs in two warps: one fetches the columns and the rows of
the first group, one the rows of the second. A ring's ``full`` barriers say that a block came, its ``empty`` ones that
whoever needs it is done with it; their phase is the parity of the round.
"""

from __future__ import annotations

from .emit import CONSTANTS
from .staged_text import IMPORTS as _IMPORTS

IMPORTS = f"""{_IMPORTS}write = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""
ROWS, COLS = 3, 6  # blocks in the rings of rows, of each group, and of columns
LAG = 2  # blocks that the second group begins later
OWNED = 128  # rows of a group, and columns of a tile

_CONSTANTS = ", ".join(f"{c}: tl.constexpr" for c in CONSTANTS)
_RINGS = "rows, cols, room, rows_full, rows_empty, cols_full, cols_empty, begun"

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
            if SIDE == 0:
                slot = at % {COLS}
                mbarrier.wait(cols_empty.index(slot), (at // {COLS} & 1) ^ 1)
                mbarrier.expect(cols_full.index(slot), {{x1}}_box.block_type.nbytes)
                copy({{x1}}_box, [turn * FOLDED, d * {{depth}}], cols_full.index(slot), cols.index(slot))
            slot = at % {ROWS} * 2 + SIDE
            mbarrier.wait(rows_empty.index(slot), (at // {ROWS} & 1) ^ 1)
            mbarrier.expect(rows_full.index(slot), {{x0}}_box.block_type.nbytes)
            copy({{x0}}_box, [(tile * 2 + SIDE) * KEPT, d * {{depth}}], rows_full.index(slot), rows.index(slot))
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
    at = 0
    if SIDE == 1:
        if tl.program_id(0) < tiles * turns:
            mbarrier.wait(begun, 0)
    for program in range(tl.program_id(0), tiles * turns, tl.num_programs(0)):
        tile, turn = grouped(program, tiles, turns)
        tile = tile * 2 + SIDE
        kept_at = tile * KEPT + tl.arange(0, KEPT, tl.SliceLayout(1, PAIRS))
        kept_in = kept_at < kept_size
{{first}}
        for d in range(0, {{blocks}}):
            slot = at % {ROWS} * 2 + SIDE
            mbarrier.wait(rows_full.index(slot), at // {ROWS} & 1)
            mbarrier.wait(cols_full.index(at % {COLS}), at // {COLS} & 1)
            block = cols.index(at % {COLS}).permute((1, 0))
            score = warpgroup_mma(rows.index(slot), block, score, use_acc=d > 0, is_async=True)
            score = warpgroup_mma_wait(1, deps=[score])
            mbarrier.arrive(rows_empty.index((at + {ROWS - 1}) % {ROWS} * 2 + SIDE), pred=d > 0)
            mbarrier.arrive(cols_empty.index((at + {COLS - 1}) % {COLS}), pred=d > 0)
            if SIDE == 0:
                mbarrier.arrive(begun, pred=at == {LAG})
            at += 1
        score = warpgroup_mma_wait(0, deps=[score])
        mbarrier.arrive(rows_empty.index((at + {ROWS - 1}) % {ROWS} * 2 + SIDE))
        mbarrier.arrive(cols_empty.index((at + {COLS - 1}) % {COLS}))
        scores0, scores1 = halved(score)
        scores0, scores1 = tl.convert_layout(scores0, PAIRS), tl.convert_layout(scores1, PAIRS)
{{lines}}
    tma.store_wait(0)


@gluon.jit(do_not_specialize={{unspecialized}})
def {{name}}(
{{names}},
    __CONSTANTS__,
):
    rows = tl.allocate_shared_memory({{narrow}}, [{2 * ROWS}] + {{x0}}_box.block_type.shape, {{x0}}_box.layout)
    cols = tl.allocate_shared_memory({{narrow}}, [{COLS}] + {{x1}}_box.block_type.shape, {{x1}}_box.layout)
    room = tl.allocate_shared_memory({{narrow}}, [2] + out_box.block_type.shape, out_box.layout)
    rows_full = tl.allocate_shared_memory(tl.int64, [{2 * ROWS}, 1], mbarrier.MBarrierLayout())
    rows_empty = tl.allocate_shared_memory(tl.int64, [{2 * ROWS}, 1], mbarrier.MBarrierLayout())
    cols_full = tl.allocate_shared_memory(tl.int64, [{COLS}, 1], mbarrier.MBarrierLayout())
    cols_empty = tl.allocate_shared_memory(tl.int64, [{COLS}, 1], mbarrier.MBarrierLayout())
    begun = tl.allocate_shared_memory(tl.int64, [1, 1], mbarrier.MBarrierLayout()).index(0)
    for k in tl.static_range({2 * ROWS}):
        mbarrier.init(rows_full.index(k), count=1)
        mbarrier.init(rows_empty.index(k), count=1)
    for k in tl.static_range({COLS}):
        mbarrier.init(cols_full.index(k), count=1)
        mbarrier.init(cols_empty.index(k), count=2)
    mbarrier.init(begun, count=1)
    fence_async_shared()
    tl.warp_specialize([
        (computes, (
{{names}},
    __RINGS__,
    0, KEPT // 2, FOLDED, INT, PRECISION, RAGGED,
        )),
        (computes, (
{{names}},
    __RINGS__,
    1, KEPT // 2, FOLDED, INT, PRECISION, RAGGED,
        )),
        (copies, (
{{names}},
    __RINGS__,
    0, KEPT // 2, FOLDED, INT, PRECISION, RAGGED,
        )),
        (copies, (
{{names}},
    __RINGS__,
    1, KEPT // 2, FOLDED, INT, PRECISION, RAGGED,
        )),
    ], [4, 1, 1], [232, 40, 40])
""".replace("__RINGS__", _RINGS).replace("__CONSTANTS__", _CONSTANTS)
