"""The text of a grouped kernel, with room for its names and the arithmetic of its pairs (``grouped.py`` fills it in).

``copies`` runs in one warp, each group in four. A ring's ``full`` barriers say that a block came, its ``empty`` ones
that all groups are done with it; their phase is the parity of the round. ``sent`` barriers say the same of numbers of
pairs that one group makes for the other.
"""

from __future__ import annotations

from .emit import CONSTANTS

IMPORTS = """import triton.experimental.gluon.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""

_CONSTANTS = ", ".join(f"{c}: tl.constexpr" for c in CONSTANTS)

KERNEL = """
@gluon.jit
def packed(weights):
    # two to a register from turn to turn too: the compiler would take them apart, and put them together again
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [weights], dtype=weights.dtype, is_pure=True, pack=2)


@gluon.jit
def copies(
{names},
{rings},
    SIDE: tl.constexpr, __CONSTANTS__,
):
    # one warp keeps the rings full
{opening}
    for turn in range(0, visits):
        start = ({at_any}) * FOLDED
        slot = turn % {depth}
        phase = ((turn // {depth}) & 1) ^ 1
{fetches}


{groups}
@gluon.jit(do_not_specialize={unspecialized})
def {name}(
{names},
    __CONSTANTS__,
):
{made}
    for k in tl.static_range({depth}):
{begun}
    fence_async_shared()
    tl.warp_specialize([
{partitions}
    ], [4, 1], [240, 24])
""".replace("__CONSTANTS__", _CONSTANTS)

PARTITION = """        ({function}, (
{names},
{rings},
    {side}, {own}, FOLDED, INT, PRECISION, RAGGED,
        )),"""

GROUP = """@gluon.jit
def {function}(
{names},
{rings},
    SIDE: tl.constexpr, __CONSTANTS__,
):
    # {title}
    SCORES: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, FOLDED, 16])
    SUMS: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {width}, 16])
    WEIGHTS: tl.constexpr = tl.DotOperandLayout(0, SUMS, 2)
    WIDE: tl.constexpr = tl.BlockedLayout([1, 8], [{down}, {across}], [4, 1], [1, 0])
{opening}
    kept_lane = tl.arange(0, KEPT, tl.SliceLayout(1, SCORES)).to(INT)
    kept_at = tile * KEPT + tl.arange(0, KEPT, tl.SliceLayout(1, SCORES))
    kept_in = kept_at < kept_size
    folded_lane = tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES)).to(INT)
    wide_row = tl.arange(0, KEPT, tl.SliceLayout(1, WIDE)).to(INT)
    wide_lane = tl.arange(0, {width}, tl.SliceLayout(0, WIDE)).to(INT)
    wide_in = tile * KEPT + wide_row < kept_size
    out_at = tl.cast(batch, tl.int64) * kept_size + tile * KEPT
{before}
{kept}
    fence_async_shared()

    # running values
    blank = tl.zeros([KEPT, FOLDED], tl.float32, SCORES)
{begin}

    # the first tile
    turn = 0
    start = ({at_any}) * FOLDED
    folded_at = start + tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES))
    folded_in = folded_at < folded_size
{first}
    if RAGGED:
{first_other}
    else:
{first_whole}
{held}
    # whole tiles: the scores of each beside sums of the one before
    for turn in range(1, wholes):
{whole}
    if RAGGED:
        # the end of the folded side
        for turn in range(tl.maximum(wholes, 1), visits):
{other}
    turn = visits
{last}

    # results
{results}


""".replace("__CONSTANTS__", _CONSTANTS)

# Equal threads of two groups hold the same pairs: each leaves its own side by side, 16 bytes at a time.
SENT = (
    "tl.SharedLinearLayout([[0, 1], [8, 0], [0, 8], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], "
    "[16, 0], [32, 0], [0, 16], [0, 32]])"
)
