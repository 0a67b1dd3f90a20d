"""The text of a kernel whose four warps are an instance of their own (``single_warpgroup_lines.py`` fills it in).

Two instances share a processor: while one makes weights, the other multiplies. There is no copying warp: the next
tile's blocks are asked for as soon as the products that read their places are done, and its numbers are on their way
from the beginning of a turn. ``full`` says that a tile's blocks came; its phase is the parity of the round.
"""

from __future__ import annotations

from ...codegen.kernel_text import CONSTANTS
from .attention_template import IMPORTS as _IMPORTS
from .attention_template import LANES, LAYOUTS, OWN

IMPORTS = f"""from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_init
{_IMPORTS}"""

KERNEL = """__PACKED__{own}

@gluon.jit(do_not_specialize={unspecialized})
def {name}(
{names},
    __CONSTANTS__,
):
    # four warps own a kept tile, and have all of its sums
__LAYOUTS__
    LINE: tl.constexpr = tl.BlockedLayout([1], [32], [4], [0])
{made}
    full = tl.allocate_shared_memory(tl.int64, [2, 1], mbarrier.MBarrierLayout())
    for k in tl.static_range(2):
        mbarrier.init(full.index(k), count=1)
    fence_async_shared()
{opening}
__LANES__
    line = tl.arange(0, FOLDED, LINE).to(INT)
{before}

    # the first tile
    turn = 0
    then = 0
    place = 0
    next_start = ({at_next}) * FOLDED
{copied}
{fetched}
{stored}
{kept}
    fence_async_shared()

    # running values
    blank = tl.zeros([KEPT, FOLDED], tl.float32, SCORES)
{begin}
    # whole tiles: a product is begun when its weights are made, and runs beside what is done next
    for turn in range(0, wholes):
{whole}
    if RAGGED:
        # tiles that a condition cuts, and the end of the folded side
        for turn in range(wholes, visits):
{other}
{ended}

    # results
{results}
""".replace("__CONSTANTS__", ", ".join(f"{c}: tl.constexpr" for c in CONSTANTS))
KERNEL = KERNEL.replace("__PACKED__", OWN["packed"]).replace("__LAYOUTS__", LAYOUTS).replace("__LANES__", LANES)
