"""The text of the warp-specialised attention kernel; ``attention.py`` fills its holes.

The producer (``gluon_parts.PRODUCER``) runs in one warp. Consumers run in warp groups of four warps; consumer ``GROUP``
has 64 kept indices. Its step overlaps two MMAs with arithmetic: it starts the scores of a tile and the sums of the tile
before, and makes weights of the scores while the sums run.
"""

from __future__ import annotations

from ..gluon_parts import PACK_PAIRS
from .logit_forms import ALIBI_LINE, INDEX_DISTANCE, POLYNOMIAL_RANGE

CONSUMER = """

@gluon.jit
def consumer(
    {parameters}
):
    # a consumer warp group has its own kept indices of the tile
    {layouts}
    {opening}
    tile = tile * {groups} + GROUP
    {lanes}
    {before}
    {residents}
    {load}
    fence_async_shared()

    # running values
    zeros = tl.zeros([KEPT, FOLDED], tl.float32, SCORES)
    {begin}
    {sums}

    # the first tile
    step = 0
    {enter_first}
    {first_scores}
    score = warpgroup_mma_wait(0, deps=[score])
    {release_first}
    if RAGGED:
        {first_cut}
    else:
        {first_whole}
    weights = {weights}

    # whole tiles: the scores of each beside the sums of the one before
    {before_whole}
    for step in range(1, whole_steps):
        {whole}
    if RAGGED:
        # tiles that a condition or the end of the folded axis cuts
        for step in range(tl.maximum(whole_steps, 1), steps):
            {cut}
    {last_sums}
    {totals} = warpgroup_mma_wait(0, deps=[{totals}])
    {retry}

    # results
    {results}
"""

# Where a guessed maximum stood in for the running one. A warp group retries alone, in a slot of its own of the ring
# buffers: when all groups are done with them, the producer has ended.
RETRY = """mbarrier.arrive(done.index(0))
{n}_total = tl.convert_layout(tl.sum({n}_total, 1), tl.SliceLayout(1, SCORES))
{rounding}

# a weight was out of range, or all of a row's were too small: once more, with a running maximum (online softmax)
if not ({near}):
    {n}_top = tl.full([KEPT], float("-inf"), tl.float32, tl.SliceLayout(1, SCORES))
    {n}_total = tl.zeros([KEPT], tl.float32, tl.SliceLayout(1, SCORES))
    {no_rounding}
    {sums}
    mbarrier.wait(done.index(0), 0)
    for step in range(0, steps):
        {enter}
        {copy_keys}
        mbarrier.wait(retry_full.index(GROUP), 0)
        {scores}
        score = warpgroup_mma_wait(0, deps=[score])
        {arithmetic}
        {rescale}
        weights = {weights}
        {copy_values}
        mbarrier.wait(retry_full.index(GROUP), 1)
        {add}
        {totals} = warpgroup_mma_wait(0, deps=[{totals}])"""

# Device functions that only some kernels call, by name.
DEVICE_FUNCTIONS = {
    # One number per folded index. Its slot is given back with the values' block of the same step.
    "load_numbers": """
@gluon.jit
def load_numbers(ring, full, step, LAYOUT: tl.constexpr):
    mbarrier.wait(full.index(step % {ring}), (step // {ring}) & 1)
    return ring.index(step % {ring}).load(LAYOUT)
""",
    # Weights as 8-bit floats, four in a word from one step to the next. A thread holds columns 2t, 2t + 1, 2t + 8 and
    # 2t + 9 of sixteen, but as an operand the columns 4t to 4t + 3: those are renamed, not moved, and values are copied
    # in that order (``vector_conversions.py``).
    "join_bytes": """
@gluon.jit
def join_bytes(weights):
    rows: tl.constexpr = weights.shape[0]
    cols: tl.constexpr = weights.shape[1]
    weights = tl.permute(tl.reshape(weights, [rows, cols // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    even, odd = tl.split(weights)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    words = tl.inline_asm_elementwise(
        "{{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; "
        "mov.b32 $0, {{l, h}}; }}",
        "=r,f,f,f,f",
        [first, second, third, fourth],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    return tl.reshape(words, [rows, cols // 4])
""",
    "split_bytes": """
@gluon.jit
def split_bytes(words, LAYOUT: tl.constexpr):
    low = tl.join(words.to(tl.int8), (words >> 8).to(tl.int8))
    high = tl.join((words >> 16).to(tl.int8), (words >> 24).to(tl.int8))
    parts = tl.permute(tl.join(low, high), (0, 1, 3, 2))
    weights = tl.reshape(parts, [words.shape[0], words.shape[1] * 4]).to(tl.float8e4nv, bitcast=True)
    return tl.convert_layout(weights, LAYOUT)
""",
    "pack_pairs": PACK_PAIRS.replace("{", "{{").replace("}", "}}"),
    # Dropout: from one step to the next, two weights are one word. As 16-bit values the compiler would hold 64 of them
    # and put them together again in every step.
    "join_words": """
@gluon.jit
def join_words(weights):
    low, high = tl.split(tl.reshape(weights, [weights.shape[0], weights.shape[1] // 2, 2]))
    return tl.inline_asm_elementwise(
        "mov.b32 $0, {{$1, $2}};", "=r,h,h", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )
""",
    "split_words": """
@gluon.jit
def split_words(words, LAYOUT: tl.constexpr):
    low, high = tl.inline_asm_elementwise(
        "mov.b32 {{$0, $1}}, $2;", "=h,=h,r", [words], dtype=(tl.{narrow}, tl.{narrow}), is_pure=True, pack=1
    )
    return tl.convert_layout(tl.reshape(tl.join(low, high), [words.shape[0], words.shape[1] * 2]), LAYOUT)
""",
    # A conditional sleep that never fires keeps ptxas from hoisting the wait for the sums above exp2. Kernels that mask
    # tiles do without: they have no registers for it.
    "order_before_wait": """
@gluon.jit
def order_before_wait(total):
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
    "in_polynomial_range": POLYNOMIAL_RANGE,
    "alibi_line": ALIBI_LINE,
    "index_distance": INDEX_DISTANCE,
    # Dropout of two neighbouring columns at once: the halves of one product are their random bits, without their signs.
    # Non-negative 16-bit floats are ordered as their bits are (NaN is above all). Weights are masked when they are
    # rounded for the second MMA.
    "drop_pairs": """
@gluon.jit
def drop_pairs(weight, row, mark):
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
