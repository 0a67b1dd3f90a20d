"""The text of a grouped kernel, with room for its names and the arithmetic of its pairs (``sum_of_products_lines.py``
fills it in).

``copies`` runs in one warp, each group in four. A ring's ``full`` barriers say that a block came, its ``empty`` ones
that all groups are done with it; their phase is the parity of the round. ``sent`` barriers say the same of numbers of
pairs that one group makes for the other.
"""

from __future__ import annotations

from ...codegen.kernel_text import CONSTANTS
from .attention_template import LANES, LAYOUTS, OWN

_CONSTANTS = ", ".join(f"{c}: tl.constexpr" for c in CONSTANTS)

KERNEL = """__PACKED__{own}

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
""".replace("__CONSTANTS__", _CONSTANTS).replace("__PACKED__", OWN["packed"])

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
__LAYOUTS__
{opening}
__LANES__
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
GROUP = GROUP.replace("__LAYOUTS__", LAYOUTS).replace("__LANES__", LANES)

# Equal threads of two groups hold the same pairs: each leaves its own side by side, 16 bytes at a time.
SENT = (
    "tl.SharedLinearLayout([[0, 1], [8, 0], [0, 8], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], "
    "[16, 0], [32, 0], [0, 16], [0, 32]])"
)
