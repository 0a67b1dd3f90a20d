"""The tiles and the text of the warp-specialised attention forward, which ``attention.py`` fills.

The tiles are one frozen value per class of head widths.

**To give the kernel another tile, edit** ``SCHEDULES``. A value says how wide vectors may be, how many consumer groups
an instance has (64 kept indices each), how many folded indices a tile has, how deep the ring buffers are, and how
registers are shared out; everything else follows: the plan that is chosen, the kernel's text, the compiler's options.
The first value that is wide enough runs by default, from ``above`` features on. A value with ``above=widest`` runs
where a plan asks for its tile, and nowhere else; a plan may ask for any value with another ``folded`` and ``ring``.
A value that cannot run raises when this module is imported. ``docs/internals/schedules.md`` shows it step by step, with
what to run afterwards.

In the text, the producer (``gluon_parts.PRODUCER``) runs in one warp. Consumers run in warp groups of four warps;
consumer ``GROUP`` has 64 kept indices. Its step overlaps two MMAs with arithmetic: it starts the scores of a tile and
the sums of the tile before, and makes weights of the scores while the sums run.
"""

from __future__ import annotations

from dataclasses import dataclass

from .....plan.schedule import Tile
from ..gluon_parts import GROUP_ROWS, PACK_PAIRS, SHARED_BYTES, SPARE_BYTES
from .logit_forms import ALIBI_LINE, INDEX_DISTANCE, POLYNOMIAL_RANGE

_WIDEST = 256  # features: the longest block that TMA copies
_REGISTERS = 65536 // 128  # that a multiprocessor has for each thread of a warp group
NUMBER_RINGS = 2  # rings of one number per folded index, at most: shared memory holds no more


@dataclass(frozen=True)
class AttentionSchedule:
    """How an instance of the kernel runs, for vectors of up to so many features."""

    widest: int  # features, of the slices that hold them: a multiple of 16
    groups: int  # consumer warp groups, of 64 kept indices each
    folded: int  # folded indices of a tile: a power of two, at least 16
    ring: int  # blocks of keys in flight, and of values
    registers: tuple[int, ...]  # of a thread: in each consumer group but the first, which has the rest; in the producer
    holds_queries: bool = True  # in registers, in whole tiles
    item: int = 2  # bytes of a number of queries, keys and values
    more_values: int = 0  # blocks of values in flight beyond those of keys: they are released a step later
    above: int = 64  # features up to which the compiler's own schedule is faster (H200: by 7 %)
    above_with_tables: int = 32  # the same of pairs that look up tables: those compete with MMAs' operands there

    def __post_init__(self) -> None:
        if not 16 <= self.widest <= _WIDEST or self.widest % 16:
            raise ValueError(f"widest is a multiple of 16 up to {_WIDEST}, not {self.widest}")
        if self.folded < 16 or self.folded & (self.folded - 1):
            raise ValueError(f"folded is a power of two, at least 16, not {self.folded}")
        if len(self.registers) != self.groups:
            raise ValueError(f"{self.groups} groups need {self.groups} register counts, not {self.registers}")
        if any(count % 8 or not 24 <= count <= 256 for count in self.registers):
            raise ValueError(f"registers are multiples of 8 from 24 to 256, not {self.registers}")
        if (left := _REGISTERS - sum(self.registers)) < max(self.registers[:-1], default=24):
            raise ValueError(
                f"{self.registers} leave the first group {left} of {_REGISTERS} registers, fewer than another has"
            )
        if self.ring < max(2, self.groups):
            raise ValueError(
                f"a ring holds at least 2 blocks, so that copies overlap, and as many as there are groups "
                f"({self.groups}), which need them in flight to retry, not {self.ring}"
            )
        staged = self.widest if self.item == 1 else 0
        taken = self.shared_bytes(self.widest, self.widest, staged, numbers=NUMBER_RINGS)
        if taken > SHARED_BYTES:
            raise ValueError(f"{taken} bytes of shared memory; an instance has {SHARED_BYTES}")

    @property
    def runs_by_default(self) -> bool:
        """False where only a plan chooses it."""
        return self.above < self.widest

    @property
    def kept(self) -> int:
        """Kept indices of an instance."""
        return self.groups * GROUP_ROWS

    @property
    def tile(self) -> Tile:
        """The tile as plans have it: kept and folded indices, warps (of the first group), ring depth."""
        return self.kept, self.folded, 4, self.ring

    def shared_bytes(
        self, queries: int, values: int, staged: int = 0, folded: int = 0, ring: int = 0, numbers: int = 0
    ) -> int:
        """All that a kernel takes: the resident tile and two rings of blocks for queries and values of so many
        features; ``staged`` features of results that are stored through 16-bit memory of their own; rings of
        ``numbers`` 32-bit numbers per folded index; barriers. ``folded``, ``ring``: if others."""
        folded, ring = folded or self.folded, ring or self.ring
        in_flight = ring * queries + (ring + self.more_values) * values
        blocks = self.item * (self.kept * queries + folded * in_flight) + 4 * numbers * ring * folded
        return blocks + 2 * self.kept * staged + SPARE_BYTES


SCHEDULES = (
    AttentionSchedule(widest=128, groups=2, folded=128, ring=2, registers=(232, 40)),
    AttentionSchedule(widest=192, groups=2, folded=64, ring=3, registers=(240, 24), holds_queries=False),
    AttentionSchedule(widest=256, groups=2, folded=64, ring=2, registers=(240, 24), holds_queries=False, more_values=1),
)

# Queries, keys and values in 8-bit floats. H200, as CUDA graphs, 64 heads of 4096 tokens, 128 features: 0.61 ms, in
# bfloat16 0.76; 16 heads of 16384: 2.72 (a ring of three 2.84) and 2.84. 32 heads of 256 features: 0.50 and 0.77. By
# three groups of 64 x 64 0.95 of bfloat16's time; groups that start their MMAs by turns were 2 % slower.
STORED_SCHEDULES = (
    AttentionSchedule(widest=128, groups=2, folded=128, ring=4, registers=(240, 24), holds_queries=False, item=1),
    AttentionSchedule(widest=256, groups=2, folded=128, ring=2, registers=(240, 24), holds_queries=False, item=1),
)
# The same where conditions cut tiles. 64 causal heads of 4096 tokens, 128 features: 0.44 ms, in bfloat16 0.48; by the
# schedule above, with groups by turns, 0.57.
CUT_SCHEDULES = (
    AttentionSchedule(widest=128, groups=2, folded=128, ring=2, registers=(232, 40), item=1),
    *STORED_SCHEDULES[1:],
)


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
    # in that order (``spec_from_tensors.py``).
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
