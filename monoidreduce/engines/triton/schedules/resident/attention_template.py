"""The text of a staged kernel, with room for its names and for the arithmetic of its pairs (``attention.py`` fills it
in).

``{x0}``: the kept vectors, ``{x1}``: those they are multiplied with, ``{x2}``: those that are summed, ``{n}``: the
softmax. ``copies`` runs in one warp, ``computes`` in groups of four, each with one SIDE of the kept tile. A ring's
``full`` barriers say that a block came, its ``empty`` ones that all groups are done with it; their phase is the parity
of the round.
"""

from __future__ import annotations

from ...codegen.kernel_text import CONSTANTS
from .alibi import SLANTED
from .softcap import BOUNDED

IMPORTS = """import triton.experimental.gluon.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""

# How a group of four warps holds pairs, sums and weights, and which indices are whose.
LAYOUTS = """    SCORES: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, FOLDED, 16])
    SUMS: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {width}, 16])
    WEIGHTS: tl.constexpr = tl.DotOperandLayout(0, SUMS, 2)
    WIDE: tl.constexpr = tl.BlockedLayout([1, 8], [{down}, {across}], [4, 1], [1, 0])"""
LANES = """    kept_lane = tl.arange(0, KEPT, tl.SliceLayout(1, SCORES)).to(INT)
    kept_at = tile * KEPT + tl.arange(0, KEPT, tl.SliceLayout(1, SCORES))
    kept_in = kept_at < kept_size
    folded_lane = tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES)).to(INT)
    wide_row = tl.arange(0, KEPT, tl.SliceLayout(1, WIDE)).to(INT)
    wide_lane = tl.arange(0, {width}, tl.SliceLayout(0, WIDE)).to(INT)
    wide_in = tile * KEPT + wide_row < kept_size
    out_at = tl.cast(batch, tl.int64) * kept_size + tile * KEPT"""

# Arguments are given one by one: from a tuple the compiler learns neither which are constants nor what divides them.
_CONSTANTS = ", ".join(f"{c}: tl.constexpr" for c in CONSTANTS)
_RINGS = "room, spare, came, {x1}_ring, {x2}_ring, {x1}_full, {x1}_empty, {x2}_full, {x2}_empty{rings}"

# What a group does where a guess of the maximum stood in for the running one.
JUDGED = """    {n}_total = tl.convert_layout(tl.sum({n}_total, 1), tl.SliceLayout(1, SCORES))
{compensated}
    # where a weight was out of range, or all of a row's too small, everything begins again with a running maximum
    if not ({near}):
        {n}_top = tl.full([KEPT], float("-inf"), tl.float32, tl.SliceLayout(1, SCORES))
        {n}_total = tl.zeros([KEPT], tl.float32, tl.SliceLayout(1, SCORES))
{exact}        {n}_mean0 = tl.zeros([KEPT, {width}], tl.float32, SUMS)
        for turn in range(0, visits):
            start = ({at_any}) * FOLDED
            folded_at = start + tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES))
            folded_in = folded_at < folded_size
            mbarrier.expect(came, {x1}_box.block_type.nbytes)
            copy({x1}_box, [{spot1}start, 0], came, spare)
            mbarrier.wait(came, 0)
            block = spare.reshape([FOLDED, {width}])
            score = warpgroup_mma(room, block.permute((1, 0)), blank, use_acc=False)
{again}
            {n}_mean0 = {n}_mean0 * tl.convert_layout({n}_shrink, tl.SliceLayout(1, SUMS))[:, None]
            weights = {weights}
            mbarrier.expect(came, {x2}_box.block_type.nbytes)
            copy({x2}_box, [{spot2}start, 0], came, {spare2})
            mbarrier.wait(came, 1)
            {n}_mean0 = warpgroup_mma({last}, block, {n}_mean0)
"""

# Whole tiles, from one turn to another; the kept vectors are read from registers or, where those are few, from room.
WHOLE = "    # whole tiles: the scores of each beside the sums of the one before"
LOADED = "    {x0}_block = room.load(tl.DotOperandLayout(0, SCORES, 2))  # the kept vectors are in registers"
LOOP = """    for turn in range(1, wholes):
        score = scores({kept_block}, {x1}_ring, {x1}_full, turn, blank)
{taken}        {n}_mean0 = sums({operand}, {x2}_ring, {x2}_full, turn - 1, {n}_mean0){ahead}
        score = warpgroup_mma_wait(1, deps=[score])
        mbarrier.arrive({x1}_empty.index(turn % {ring}))
        start = ({at_whole}) * FOLDED
        folded_at = start + tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES))
{whole}{held}
        {n}_mean0, {operand} = warpgroup_mma_wait(0, deps=[{n}_mean0, {operand}])
        mbarrier.arrive({x2}_empty.index((turn - 1) % {ring})){shrunk}
        weights = {weights}"""

# What only some kernels need, by name.
OWN = {
    "numbers": """
@gluon.jit
def numbers(ring, full, turn, LAYOUT: tl.constexpr):
    # of a tile's folded indices; their place is given back with the block that is summed
    mbarrier.wait(full.index(turn % {ring}), (turn // {ring}) & 1)
    return ring.index(turn % {ring}).load(LAYOUT)
""",
    # where conditions cut tiles
    "packed": """
@gluon.jit
def packed(weights):
    # two to a register from turn to turn too: the compiler would take them apart, and put them together again
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [weights], dtype=weights.dtype, is_pure=True, pack=2)
""",
    # where coins are tossed: two weights are one word from turn to turn
    "joined": """
@gluon.jit
def joined(weights):
    low, high = tl.split(tl.reshape(weights, [weights.shape[0], weights.shape[1] // 2, 2]))
    return tl.inline_asm_elementwise(
        "mov.b32 $0, {{$1, $2}};", "=r,h,h", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )
""",
    "parted": """
@gluon.jit
def parted(words, LAYOUT: tl.constexpr):
    low, high = tl.inline_asm_elementwise(
        "mov.b32 {{$0, $1}}, $2;", "=h,=h,r", [words], dtype=(tl.{narrow}, tl.{narrow}), is_pure=True, pack=1
    )
    return tl.convert_layout(tl.reshape(tl.join(low, high), [words.shape[0], words.shape[1] * 2]), LAYOUT)
""",
    # where none do; else there are not the registers for it
    "weighed": """
@gluon.jit
def weighed(total):
    # the assembler is free to wait for the sums before it raises powers, and does: it may not pass what can stop here
    return tl.inline_asm_elementwise(
        "{{ .reg .pred p; setp.lt.f32 p, $2, 0f00000000; setp.lt.or.f32 p, $3, 0f00000000, p; "
        "@p nanosleep.u32 1; mov.b32 $0, $2; mov.b32 $1, $3; }}",
        "=r,=r,r,r",
        [total],
        dtype=tl.float32,
        is_pure=False,
        pack=2,
    )
""",
    "bounded": BOUNDED,
    "slanted": SLANTED,
    "apart": """
@gluon.jit
def apart(at, start, like):
    # how far kept indices lie above a tile's folded ones: of eight, and each further eight by a constant less
    KEPT: tl.constexpr = like.shape[0]
    EIGHTS: tl.constexpr = like.shape[1] // 8
    LAYOUT: tl.constexpr = tl.reshape(like, [KEPT, EIGHTS, 8]).type.layout
    eight: tl.constexpr = tl.SliceLayout(1, LAYOUT)
    above = tl.convert_layout((at - start).to(tl.float32), tl.SliceLayout(1, eight))
    above = above[:, None] - tl.arange(0, 8, tl.SliceLayout(0, eight)).to(tl.float32)[None, :]
    less = tl.arange(0, EIGHTS, tl.SliceLayout(0, tl.SliceLayout(2, LAYOUT))).to(tl.float32) * 8.0
    gap = above[:, None, :] - less[None, :][:, :, None]
    return tl.convert_layout(tl.reshape(gap, [KEPT, EIGHTS * 8]), like.type.layout)
""",
    # Two neighbours at once: a product has their coins in its halves, without their signs, and numbers of 16 bits are
    # in the order of their bits (what is no number is above all). Weights are masked as they go to the matrix units.
    "tossed": """
@gluon.jit
def tossed(weight, row, mark):
    return tl.inline_asm_elementwise(
        "{{ .reg .b32 t, w, l; mul.lo.u32 t, $3, $6; abs.f16x2 t, t; mov.b32 l, {least}; "
        "set.geu.u32.f16x2 t, t, l; cvt.rn.{pair}.f32 w, $2, $1; and.b32 $0, w, t; }}",
        "=r,f,f,r,r,r,r",
        [weight, row, mark],
        dtype=tl.{narrow},
        is_pure=True,
        pack=2,
    )
""",
}

KERNEL = """{own}
@gluon.jit
def copies(
{names},
    __RINGS__,
    SIDE: tl.constexpr, __CONSTANTS__,
):
    # one warp keeps the rings full
{opening}
    for turn in range(0, visits):
        start = ({at_any}) * FOLDED
        slot = turn % {ring}
        phase = (turn // {ring}) & 1{fetched}
        mbarrier.wait({x1}_empty.index(slot), phase ^ 1)
        mbarrier.expect({x1}_full.index(slot), {x1}_box.block_type.nbytes)
        copy({x1}_box, [{spot1}start, 0], {x1}_full.index(slot), {x1}_ring.index(slot))
        mbarrier.wait({x2}_empty.index(slot), phase ^ 1)
        mbarrier.expect({x2}_full.index(slot), {x2}_box.block_type.nbytes)
        copy({x2}_box, [{spot2}start, 0], {x2}_full.index(slot), {x2}_ring.index(slot)){kept}


@gluon.jit
def scores(kept, ring, full, turn, blank):
    # begin the products of a tile's block with the kept vectors
    mbarrier.wait(full.index(turn % {ring}), (turn // {ring}) & 1)
    block = ring.index(turn % {ring}).reshape([blank.shape[1], {width}])
    return warpgroup_mma(kept, block.permute((1, 0)), blank, use_acc=False, is_async=True)


@gluon.jit
def sums(weights, ring, full, turn, total):
    # begin to add the weighted vectors of a tile
    mbarrier.wait(full.index(turn % {ring}), (turn // {ring}) & 1)
    return warpgroup_mma(weights, ring.index(turn % {ring}).reshape([weights.shape[1], {width}]), total, is_async=True)


@gluon.jit
def computes(
{names},
    __RINGS__,
    SIDE: tl.constexpr, __CONSTANTS__,
):
    # four warps own one side of the kept tile
__LAYOUTS__
{opening}
    tile = tile * {groups} + SIDE
__LANES__
{before}
    room, spare, came = room.index(SIDE), spare.index(SIDE), came.index(SIDE)
    room.store(tl.load({at} + wide_row[:, None] * {x0}_s + wide_lane[None, :] * {x0}_f, mask=wide_in[:, None], other=0))
    fence_async_shared()

    # running values
    blank = tl.zeros([KEPT, FOLDED], tl.float32, SCORES)
{begin}
    {n}_mean0 = tl.zeros([KEPT, {width}], tl.float32, SUMS)

    # the first tile
    turn = 0
    start = ({at_any}) * FOLDED
    folded_at = start + tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES))
    folded_in = folded_at < folded_size
    score = warpgroup_mma_wait(0, deps=[scores(room, {x1}_ring, {x1}_full, 0, blank)])
    mbarrier.arrive({x1}_empty.index(0))
    if RAGGED:
{first}
    else:
{first_whole}
    weights = {weights}

{loop}
    if RAGGED:
        # the others
        for turn in range(tl.maximum(wholes, 1), visits):
            score = scores(room, {x1}_ring, {x1}_full, turn, blank)
{taken_other}            {n}_mean0 = sums({operand}, {x2}_ring, {x2}_full, turn - 1, {n}_mean0)
            score = warpgroup_mma_wait(1, deps=[score])
            mbarrier.arrive({x1}_empty.index(turn % {ring}))
            start = ({at_other}) * FOLDED
            folded_at = start + tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES))
            folded_in = folded_at < folded_size
{other}
            {n}_mean0, {operand} = warpgroup_mma_wait(0, deps=[{n}_mean0, {operand}])
            mbarrier.arrive({x2}_empty.index((turn - 1) % {ring})){shrunk_other}
            weights = {weights}
    {n}_mean0 = warpgroup_mma_wait(0, deps=[sums({last}, {x2}_ring, {x2}_full, visits - 1, {n}_mean0)])
{judged}
    # results
{results}


@gluon.jit(do_not_specialize={unspecialized})
def {name}(
{names},
    __CONSTANTS__,
):
    room = tl.allocate_shared_memory(
        {narrow}, [{groups}, {own_kept}, {width}], tl.NVMMASharedLayout.get_default_for([{own_kept}, {width}], {narrow})
    )
    {x1}_ring = tl.allocate_shared_memory({narrow}, [{ring}] + {x1}_box.block_type.shape, {x1}_box.layout)
    {x2}_ring = tl.allocate_shared_memory({narrow}, [{ring}] + {x2}_box.block_type.shape, {x2}_box.layout)
    spare = tl.allocate_shared_memory({narrow}, [{groups}] + {x1}_box.block_type.shape, {x1}_box.layout)
    came = tl.allocate_shared_memory(tl.int64, [{groups}, 1], mbarrier.MBarrierLayout())
    {x1}_full = tl.allocate_shared_memory(tl.int64, [{ring}, 1], mbarrier.MBarrierLayout())
    {x1}_empty = tl.allocate_shared_memory(tl.int64, [{ring}, 1], mbarrier.MBarrierLayout())
    {x2}_full = tl.allocate_shared_memory(tl.int64, [{ring}, 1], mbarrier.MBarrierLayout())
    {x2}_empty = tl.allocate_shared_memory(tl.int64, [{ring}, 1], mbarrier.MBarrierLayout())
{made}    for k in tl.static_range({ring}):{begun}
        mbarrier.init({x1}_full.index(k), count=1)
        mbarrier.init({x2}_full.index(k), count=1)
        mbarrier.init({x1}_empty.index(k), count={groups})
        mbarrier.init({x2}_empty.index(k), count={groups})
    for k in tl.static_range({groups}):
        mbarrier.init(came.index(k), count=1)
    fence_async_shared()
    tl.warp_specialize([
{sides}
        (copies, (
{names},
    __RINGS__,
    0, KEPT, FOLDED, INT, PRECISION, RAGGED,
        )),
    ], [{fours}1], [{registers}])
""".replace("__RINGS__", _RINGS)
SIDE = """        (computes, (
{names},
    __RINGS__,
    {side}, {own_kept}, FOLDED, INT, PRECISION, RAGGED,
        )),""".replace("__RINGS__", _RINGS)
KERNEL = KERNEL.replace("__CONSTANTS__", _CONSTANTS).replace("__LAYOUTS__", LAYOUTS).replace("__LANES__", LANES)
