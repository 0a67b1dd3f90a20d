"""The warp-specialised attention forward: a softmax-weighted sum of vectors, with a producer warp and consumer groups.

``exp2`` of a tile takes half as long as its two MMAs, so both must run side by side. One producer warp
(``gluon_parts.PRODUCER``) copies blocks of the folded axis into ring buffers. Each consumer warp group (four warps,
``GROUP``) has 64 kept indices: it starts the scores of a tile and the sums of the tile before, and makes weights of the
scores while the sums run. With bfloat16 the maximum is guessed from the first tile; rows whose guess was too low are
computed again with a running maximum (online softmax). Vectors of any number of features are multiplied in slices that
are powers of two (``Spec.slices``).

The tiles are one frozen value per class of head widths. **To give the kernel another tile, edit** ``SCHEDULES``. A
value says how wide vectors may be, how many consumer groups an instance has, how many folded indices a tile has, how
deep the ring buffers are, and how registers are shared out; everything else follows: the plan that is chosen, the
kernel's text, the compiler's options. The first value that is wide enough runs by default, from ``above`` features on.
A value with ``above=widest`` runs where a plan asks for its tile, and nowhere else; a plan may ask for any value with
another ``folded`` and ``ring``. A value that cannot run raises when this module is imported.
``docs/internals/schedules.md`` shows it step by step, with what to run afterwards.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ....plan.schedule import Tile
from ....program.constructors import ONE, contractions
from ....program.expression import Expr, topological
from ....program.several import OF_VECTORS
from ....reductions.softmax import SoftmaxLines
from ..codegen import compiler, kernel_spec, listed
from ..codegen.expressions import ExpressionWriter
from ..codegen.kernel_spec import Slices, Spec, gluon_type, literal
from ..codegen.lookups import has_bands, write_look_up_band
from ..codegen.reductions import make_lines, move_factors_to_weight, substitute_truths
from ..launch import driver
from . import gluon_parts as gluon
from . import spec_from_tensors
from .gluon_parts import GROUP_ROWS, PACK_PAIRS, SHARED_BYTES, SPARE_BYTES, leaf_name, suffix
from .kernel_plan import KernelPlan
from .logit_forms import (
    ALIBI_LINE,
    COEFFICIENTS,
    INDEX_DISTANCE,
    POLYNOMIAL_RANGE,
    AlibiLine,
    DropoutFactor,
    SoftcapPolynomial,
    match_alibi,
    match_dropout_factor,
    match_softcap,
)

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


# In powers of two, weights of 8-bit floats, of which the largest is 448: by a running maximum they are at most this,
# and by a guessed one those of the first tile; a row whose largest weight left the range is computed again.
_LARGEST, _GUESSED, _IN_RANGE = 8.0, 4.0, (1.0, 448.0)
_LEAST_FOLDED = 64  # folded indices of a tile, where blocks of a list are smaller than the schedule's
_LEAST = 2.0**-80  # totals above this were not rounded to nothing


def has_tile(plan: KernelPlan) -> bool:
    """True when a plan's tile may be one of these kernels'."""
    schedules = (*SCHEDULES, *STORED_SCHEDULES, *CUT_SCHEDULES)
    return plan.num_warps == 4 and any(s.kept == plan.block_kept for s in schedules)


def choose_tile(spec: Spec, device: torch.device, length: int, count: int) -> Tile | None:
    """The tile of ``count`` folds of ``length`` kept indices each. None when there is no such kernel, when it would
    leave multiprocessors idle, or when the compiler's schedule is faster.

    Conditions on data make loops short, as within packed documents: those end before they pay for the ring buffers'
    start-up (H200: 0.44 ms, by the compiler's schedule 0.28)."""
    if not driver.runs_warp_specialized(device) or (schedule := find_schedule(spec)) is None:
        return None
    short = spec_from_tensors.walks_are_short(spec)
    few = count * length < schedule.kept * driver.count_processors(device)
    if spec.listed is not None and spec.listed.folded_block < schedule.folded:  # a tile lies in one block
        tile = (schedule.kept, spec.listed.folded_block, 4, schedule.ring * schedule.folded // spec.listed.folded_block)
        schedule = find_schedule(spec, tile) if tile[1] >= _LEAST_FOLDED else None
    return None if short or few or schedule is None or write_kernel(spec, schedule) is None else schedule.tile


@dataclass(frozen=True)
class Operands:
    """The vectors: queries and keys make scores, weights and values make sums (whichever side is folded)."""

    queries: Expr
    keys: Expr
    values: Expr


@functools.lru_cache(maxsize=1024)
def find_operands(spec: Spec) -> Operands | None:
    """The vectors of a fold that is one softmax-weighted sum, its logits made of one product, and maybe weighted means
    of numbers that are made of the same product and of indices; None for any other."""
    (r, *others) = spec.fold.reductions
    if others or r.attrs[0] != "soft" or len(r.args) < 2 or spec.narrow is None or spec.split or spec.k_loop:
        return None
    if len(r.args) > 2 and not all(_is_made_of_pairs(e) for e in r.args[2:]):
        return None
    sums = [move_factors_to_weight(c) for c in contractions(r.args[1], spec.over)]
    dots = [e for e in topological(r.args) if e.op in OF_VECTORS]
    if [e.op for e in dots] != ["dot"] or len(sums) != 1 or sums[0].walk or sums[0].minus is not None:
        return None
    queries, keys = dots[0].args[::-1] if spec.folds(dots[0].args[0]) else dots[0].args
    values = sums[0].vector
    vectors = {e for e in topological(r.args) if e.op == "leaf" and e.feature is not None} - spec.fold.tables
    if values is None or values is keys or vectors != {queries, keys, values} or spec.folds(queries):
        return None
    copied = keys in spec.descriptor_dims and values in spec.descriptor_dims
    if spec.is_stored_softmax:  # rounded weights must not be scaled: scales of values are of all columns
        copied &= sums[0].weight is ONE and spec.listed is None and len(r.args) == 2 and not spec.fold.tables
    else:
        copied &= spec.type_of[queries] == spec.narrow
    return Operands(queries, keys, values) if copied else None


def _is_made_of_pairs(e: Expr) -> bool:
    """True for a number per pair without numbers of one axis: what each thread holds already."""
    leaves = [n for n in topological([e]) if n.op == "leaf" and n.feature is None]
    return e.is_pair and e.feature is None and not any(n.rows or n.cols for n in leaves)


def find_schedule(spec: Spec, tile: Tile | None = None) -> AttentionSchedule | None:
    """The schedule of a spec, by how wide its vectors are; where a plan asks for a ``tile``, the value for plans alone
    that has it, else the first one with as many kept indices, changed to it. None where there is none."""
    operands = find_operands(spec)
    if operands is None:
        return None
    queries, values = (spec.slices(e.feature) for e in (operands.queries, operands.values))
    widths = [sum(size for _, size in slices) for slices in (queries, values)]
    numbers = len(_list_ringed_numbers(spec))
    stored = spec.is_stored_softmax
    staged = sum(size for _, size in (values if stored else _find_staging_slices(queries, values)))
    schedules = SCHEDULES if not stored else CUT_SCHEDULES if spec.bounds else STORED_SCHEDULES
    for schedule in sorted(schedules, key=lambda s: 1 if s.runs_by_default else 2 * (s.tile != tile)):
        folded, ring = (schedule.folded, schedule.ring) if tile is None else (tile[1], max(tile[3], schedule.groups, 2))
        above = schedule.above_with_tables if spec.fold.tables else schedule.above
        by_default = schedule.runs_by_default and max(widths) > above
        suits = by_default if tile is None else (schedule.kept, 4) == (tile[0], tile[2])
        suits = suits and max(widths) <= schedule.widest
        taken = schedule.shared_bytes(widths[0], widths[1], staged, folded, ring, numbers)
        if suits and taken <= gluon.SHARED_BYTES:
            if tile is None:
                return schedule
            with contextlib.suppress(ValueError):  # a tile that breaks a limit
                return replace(schedule, widest=max(widths), folded=folded, ring=ring)
    return None


def _find_staging_slices(queries: Slices, values: Slices) -> Slices:
    """The slices of results for which the resident tile has none of their size: they are stored through another."""
    sizes = [size for _, size in queries]
    found = []
    for each in values:
        if each[1] in sizes:
            sizes.remove(each[1])
        else:
            found.append(each)
    return tuple(found)


def write_kernel_for_plan(spec: Spec, plan: KernelPlan, even: bool, aligned: bool) -> compiler.Kernel | None:
    """The kernel of a spec with a plan's tile; None where there is none."""
    schedule = find_schedule(spec, (plan.block_kept, plan.block_folded, plan.num_warps, plan.num_stages))
    return None if schedule is None else write_kernel(spec, schedule, even, aligned)


@functools.lru_cache(maxsize=1024)
def write_kernel(
    spec: Spec, schedule: AttentionSchedule | None = None, even: bool = True, aligned: bool = True
) -> compiler.Kernel | None:
    """Write the kernel of a spec, with the arguments that any other rendering has; None where there is none.

    ``even``: whether there is an even number of columns, so that dropout can take two at once; ``aligned``: whether one
    folded tile holds the nearest index of every kept index of an instance, so that no other tile crosses the
    diagonal."""
    operands, schedule = find_operands(spec), schedule or find_schedule(spec)
    if operands is None or schedule is None:
        return None
    plain = compiler.compile_fold(spec)
    if plain.shifts:
        return None
    text = _Text(spec, schedule, operands, even, aligned)
    if text.ends and text.means:  # numbers beyond the end of a list are not cleared
        return None
    names, unspecialized = compiler.list_arguments(spec, list(plain.leaves), 0)
    names += COEFFICIENTS if text.softcap else ()
    body, generated = text.write(plain.name, names, unspecialized)
    functions = text.device_functions(body)
    made = gluon.assemble(spec, plain, gluon.IMPORTS, body, generated, schedule.groups, functions)
    transposed = operands.values if spec.is_stored_softmax else None
    return made and replace(
        made, coefficients=text.softcap.coefficients() if text.softcap else (), transposed=transposed
    )


class _PairValues(ExpressionWriter):
    """Numbers of pairs whose score the first MMA made."""

    ringed: tuple[Expr, ...] = ()  # numbers that the producer loads
    dropout: DropoutFactor | None = None  # the dropout of the weights; its factor is applied at the end
    totals: list[str] = []  # the accumulators, one for each slice of features
    retries = False  # this step is of a group that retries, without the producer
    pair_layout = "zeros"  # a block that is laid out as all pairs are

    def _leaf(self, e: Expr) -> str:
        if e not in self.ringed or self.retries:
            return f"({super()._leaf(e)} >> 1)" if self.dropout and e is self.dropout.mark else super()._leaf(e)
        x = leaf_name(e)
        return f"load_numbers({x}_ring, {x}_full, step, tl.SliceLayout(0, SCORES))[None, :]"

    def index_gap(self, at: str) -> str:
        place = "step * FOLDED" if self.spec.listed and self.spec.listed.logical else "start"
        return f"index_distance(tl.sum({at}, 1), {place}, score)"

    def product(self, x: Expr, y: Expr) -> str:
        return "score"

    def lane(self, feature: str | int | None, room: int = 0) -> tuple[str, str | None]:
        return "wide_lane", None

    def divide_vectors(self, block: str, name: str) -> str:
        factor = literal(self.dropout.factor if self.dropout else 1.0)
        layout = f"SUMS{suffix(self.totals.index(block))}"
        return f"{block} * tl.convert_layout({factor} / {name}, tl.SliceLayout(1, {layout}))[:, None]"


class _Text:
    """The parts of one kernel's text."""

    def __init__(self, spec: Spec, schedule: AttentionSchedule, operands: Operands, even: bool, aligned: bool):
        self.spec, self.schedule, self.operands, self.narrow = spec, schedule, operands, f"tl.{spec.narrow}"
        self.stored = spec.is_stored_softmax
        self.v = v = _PairValues(spec)
        (part,) = contractions(spec.fold.reductions[0].args[1], spec.over)
        v.ringed = _list_ringed_numbers(spec)
        v.dropout = (
            match_dropout_factor(move_factors_to_weight(part).weight, spec) if even and spec.over == "cols" else None
        )
        soft = make_lines(0, *spec.fold.scaled[0], v)
        assert isinstance(soft, SoftmaxLines)
        self.soft = soft
        self.n, v.totals = soft.name, soft.means[0].names
        self.totals = ", ".join(v.totals)
        self.guesses = soft.level
        self.means = [f"{soft.name}_mean{k}" for k in range(1, len(soft.means))]  # of numbers, beside the vectors'
        # dropout masks weights when they are rounded
        soft.rounded = [soft.rounded[0] or v.dropout is not None, *(False for _ in self.means)]
        soft.compensates = self.guesses and soft.rounded[0]
        if self.stored:
            soft.headroom, soft.above = _LARGEST, -_GUESSED
        self.ends = spec.listed is not None and spec.listed.ends  # the last block of a list is cut
        limited = self.ends and listed.find_upper_limits(spec) is not None
        self.truths = kernel_spec.whole_tile_conditions(spec.fold) if spec.bounds or limited else {}
        logit = substitute_truths(soft.reduction.args[0], self.truths)
        forms = self.guesses and not self.stored  # cheaper forms of a logit reckon with the range of bfloat16
        self.softcap = match_softcap(soft, logit) if forms else None
        self.alibi = match_alibi(soft, logit) if forms and aligned and spec.listed is None else None
        sloped = self.guesses and soft.sloped and spec.listed is None
        self.order = gluon.TileOrder(spec, schedule.kept if sloped else 0, schedule.kept)
        self.keys = gluon.Ring.of(operands.keys, spec, schedule.ring, schedule.groups)
        self.values = gluon.Ring.of(
            operands.values, spec, schedule.ring + schedule.more_values, schedule.groups, transposed=self.stored
        )
        self.residents = [f"resident{suffix(k)}" for k in range(len(self.keys.slices))]
        queries, values = self.keys.slices, self.values.slices
        self.staging_slices = values if self.stored else _find_staging_slices(queries, values)
        self.staging = [f"staged{suffix(k)}" for k in range(len(self.staging_slices))]
        self.rows = gluon.VectorRows.of([self.values.slices, self.keys.slices])
        self._carry_weights()

    def _carry_weights(self) -> None:
        """How weights get from one step to the next: packed two to a register or, after dropout, joined in words."""
        rounded = f"{self.n}_part.to({self.narrow})"
        self.operand, self.last, self.unpack = "weights", "weights", list[str]()
        if self.v.dropout:
            self.weights, self.operand, self.last = f"join_words({rounded})", "operand", "split_words(weights, WEIGHTS)"
            self.unpack = [f"operand = {self.last}"]
        elif self.stored:
            self.weights, self.last = f"join_bytes({self.n}_part)", "split_bytes(weights, WEIGHTS)"
            self.unpack, self.operand = [f"operand = {self.last}"], "operand"
        else:
            weights = f"tl.convert_layout({rounded}, WEIGHTS)"
            packs = self.spec.bounds or self.ends or self.softcap or self.means or self.spec.fold.tables
            self.weights = f"pack_pairs({weights})" if packs else weights

    def write(self, name: str, arguments: Sequence[str], unspecialized: Sequence[str]) -> tuple[str, list[str]]:
        """The kernel's text, and of it the lines that come from code generation."""
        numbers = [leaf_name(e) for e in self.v.ringed]
        both = (self.keys, self.values)
        buffers = [*self.residents, *self.staging, "retry_full", "done", *(ring for r in both for ring in r.rings)]
        buffers += [f"{r.name}_{state}" for r in both for state in ("full", "empty")]
        buffers += [f"{x}_{part}" for x in numbers for part in ("ring", "full")]
        partitions = gluon.Partitions(arguments, buffers)
        consumer, generated = self._consumer(partitions)
        body = self._producer(partitions) + consumer + self._entry(partitions, name, unspecialized)
        return body, generated

    def device_functions(self, body: str) -> str:
        """Those that the kernel calls."""
        pair = {"bfloat16": "bf16x2", "float16": "f16x2"}[self.spec.narrow or "bfloat16"]
        holes = {
            "least": (self.v.dropout.least if self.v.dropout else 0) * 0x10001,
            "narrow": self.spec.narrow,
            "pair": pair,
            "ring": self.schedule.ring,
        }
        called = [text for name, text in DEVICE_FUNCTIONS.items() if f"{name}(" in body]
        bands = [write_look_up_band(self.spec, self.schedule.folded)] if has_bands(self.spec.fold.tables) else []
        return "\n".join([*(text.format(**holes) for text in called), *bands])

    @property
    def operand_types(self) -> list[str]:
        """The types of queries, keys and values in shared memory."""
        leaves = (self.operands.queries, self.operands.keys, self.operands.values)
        return [f"tl.{gluon_type(self.spec.type_of[e])}" for e in leaves]

    def _write_opening(self) -> list[str]:
        return [*gluon.scalar_opening(self.spec), *self.order.opening_lines]

    def _producer(self, partitions: gluon.Partitions) -> str:
        store = []
        for x, e in zip(map(leaf_name, self.v.ringed), self.v.ringed, strict=True):
            shift = " >> 1" if self.v.dropout and e is self.v.dropout.mark else ""
            store += [f"{x}_ring.index(slot).store({x}{shift})", f"mbarrier.arrive({x}_full.index(slot))"]
        load, ring = gluon.load_ahead(self.spec, self.v.ringed, self.schedule.folded // 32), self.schedule.ring
        return gluon.fill(
            gluon.PRODUCER,
            parameters=partitions.parameters(),
            opening=self._write_opening(),
            tile=self.order.any(),
            depth=ring,
            phase=f"(step // {ring}) & 1",
            produce=[*load, *self.keys.produce("phase ^ 1"), *self.values.produce("phase ^ 1", ring), *store],
        )

    def _entry(self, partitions: gluon.Partitions, name: str, unspecialized: Sequence[str]) -> str:
        groups, ring = self.schedule.groups, self.schedule.ring
        kept, both = f"KEPT // {groups}", (self.keys, self.values)
        layout = f"tl.NVMMASharedLayout.get_default_for([{kept}, {{}}], {{}})".format
        queries, keys, values = self.operand_types
        tiles = [(name, queries, size) for name, (_, size) in zip(self.residents, self.keys.slices, strict=True)]
        tiles += [(name, self.narrow, size) for name, (_, size) in zip(self.staging, self.staging_slices, strict=True)]
        allocate = [
            *(
                gluon.allocate(name, kind, f"[{groups}, {kept}, {size}]", layout(size, kind))
                for name, kind, size in tiles
            ),
            *self.keys.allocate_blocks(keys),
            *self.values.allocate_blocks(values),
            gluon.allocate_barriers("retry_full", groups),
            gluon.allocate_barriers("done", 1),
            *(line for r in both for line in r.allocate_barriers()),
        ]
        init = []
        for x, e in zip(map(leaf_name, self.v.ringed), self.v.ringed, strict=True):
            allocate.append(gluon.allocate_numbers(x, self.spec.type_of[e], ring, "FOLDED"))
            allocate.append(gluon.allocate_barriers(f"{x}_full", ring))
            init.append(f"mbarrier.init({x}_full.index(k), count=1)")
        runs = [("consumer", k, kept) for k in range(groups)]
        last = [self.values.init_full(), self.values.init_empty()]
        return gluon.fill(
            gluon.ENTRY,
            unspecialized=repr(unspecialized),
            name=name,
            arguments=partitions.entry(),
            allocate=allocate,
            depth=ring,
            init=[*init, *(r.init_full() for r in both), *(r.init_empty() for r in both)],
            init_others=[
                *(
                    line.replace("(k)", f"({k})")
                    for k in range(ring, ring + self.schedule.more_values)
                    for line in last
                ),
                f"for k in tl.static_range({groups}):",
                "    mbarrier.init(retry_full.index(k), count=1)",
                f"mbarrier.init(done.index(0), count={groups})",
            ],
            specialize=partitions.specialize(
                [*runs, ("producer", 0, "KEPT")], ", ".join(map(str, self.schedule.registers))
            ),
        )

    def _consumer(self, partitions: gluon.Partitions) -> tuple[str, list[str]]:
        v, truths = self.v, self.truths
        arithmetic = {
            "first_cut": self._weigh({}, True, first=True),
            "first_whole": self._weigh(truths, False, first=True),
            "whole": self._weigh(truths, False, form=self.alibi),
            "cut": self._weigh({}, True),
            "retry": self._weigh({}, True, retries=True),
            "capped": self._weigh(truths, False, form=self.softcap) if self.softcap else [],
        }
        queries, own = self.operands.queries, [*self.residents, *self.staging]
        width = self.spec.width(queries.feature)
        zero = self.spec.zero(queries)
        load = self.rows.load(v.pointer(queries), queries, width, self.keys.slices, self.residents, zero)
        begin, retry = self._begin(), self._retry(arithmetic["retry"]) if self.guesses else []
        results = self._results()
        before_whole, whole = self._whole_step(arithmetic["whole"], arithmetic["capped"])
        generated = [*v.before, *begin, *results, *(line for lines in arithmetic.values() for line in lines)]
        text = gluon.fill(
            CONSUMER,
            parameters=partitions.parameters(),
            groups=self.schedule.groups,
            layouts=[*gluon.layouts(self.values.slices, packed=4 if self.stored else 2), *self.rows.layouts()],
            opening=self._write_opening(),
            lanes=[*gluon.lanes(), *self.rows.lanes()],
            before=v.before,
            residents=[f"{name} = {name}.index(GROUP)" for name in own],
            load=load,
            begin=begin,
            sums=self._zero_sums(),
            first_scores=[self.keys.wait("0"), *self._start_scores("0", self.residents)],
            release_first=[self.keys.release("0")],
            totals=self.totals,
            enter_first=self.order.enter(self.order.any()),
            first_cut=arithmetic["first_cut"],
            first_whole=arithmetic["first_whole"],
            weights=self.weights,
            before_whole=before_whole,
            whole=whole,
            cut=self._step(arithmetic["cut"], self.order.enter(self.order.cut()), self.residents),
            last_sums=self._start_sums("(steps - 1)", self.last, self._clear_end("(steps - 1)", "steps - 1")),
            retry=retry,
            results=results,
        )
        return text, generated

    def _zero_sums(self) -> list[str]:
        return [
            f"{total} = tl.zeros([KEPT, {size}], tl.float32, SUMS{suffix(k)})"
            for k, (total, (_, size)) in enumerate(zip(self.v.totals, self.values.slices, strict=True))
        ]

    def _start_scores(self, step: str, queries: Sequence[str]) -> list[str]:
        """First MMAs: queries times the keys of a step, in the background."""
        return gluon.start_score("score", queries, self.keys.blocks(step))

    def _start_sums(self, step: str, weights: str, before: Sequence[str] = ()) -> list[str]:
        """Second MMAs: weights times the values of a step, added to the accumulators in the background."""
        blocks = self.values.blocks(step)
        return [self.values.wait(step), *before, *gluon.start_sum(self.v.totals, weights, blocks)]

    def _clear_end(self, step: str, at: str, slot: str = "") -> list[str]:
        """Zeros in place of the values beyond the end of a list: what its last block holds there may be NaN. Each group
        writes the same zeros before its own MMA reads them."""
        if not self.ends:
            return []
        lines = [f"if ({at}) * FOLDED + FOLDED > positions:"]
        blocks = self.values.blocks_in(slot) if slot else self.values.blocks(step)
        for k, (block, (_, size)) in enumerate(zip(blocks, self.values.slices, strict=True)):
            wide = self.rows.name("WIDE", size)
            inside = f"(({at}) * FOLDED + tl.arange(0, FOLDED, tl.SliceLayout(1, {wide})) < positions)[:, None]"
            lines.append(f"    held{suffix(k)} = {block}")
            lines.append(f"    held{suffix(k)}.store(tl.where({inside}, held{suffix(k)}.load({wide}), 0.0))")
        return [*lines, "    fence_async_shared()"]

    def _step(
        self, arithmetic: list[str], enter: list[str], queries: Sequence[str], ahead: Sequence[str] = ()
    ) -> list[str]:
        """One tile: start its scores and the sums of the tile before, weigh the scores while the sums run.

        ``ahead``: numbers that are loaded while both MMAs run."""
        totals, operand = self.totals, self.operand
        held = "weights" if self.stored else operand
        return [
            self.keys.wait(),
            *self._start_scores("step", queries),
            *self.unpack,
            *self._start_sums("(step - 1)", operand),
            *ahead,
            f"score = warpgroup_mma_wait({len(self.v.totals)}, deps=[score])",
            self.keys.release(),
            *enter,
            *arithmetic,
            *([f"packed = {self.weights}"] if self.stored else []),  # few registers: while the sums run
            f"{totals}, {held} = warpgroup_mma_wait(0, deps=[{totals}, {held}])",
            self.values.release("(step - 1)"),
            *([] if self.guesses else self._rescale()),
            f"weights = {'packed' if self.stored else self.weights}",
        ]

    def _whole_step(self, whole: list[str], capped: list[str]) -> tuple[list[str], list[str]]:
        """The loop over whole tiles, and what comes before it. With softcap, the polynomial runs where the first tile
        showed that it applies. Queries are held in registers unless something else needs these."""
        n, before, queries = self.n, list[str](), self.residents
        if self.softcap:
            before.append(f"{n}_capped = {self.softcap.applies()}")
            whole = [f"if {n}_capped > 0:", *gluon.indent(capped), "else:", *gluon.indent(whole)]
        elif not (self.alibi or self.spec.fold.tables or self.means) and self.schedule.holds_queries:
            packed = 4 if self.stored else 2
            block, held = leaf_name(self.operands.queries), f"load(tl.DotOperandLayout(0, SCORES, {packed}))"
            queries = [f"{block}_block{suffix(k)}" for k in range(len(self.residents))]
            before.append("# queries stay in registers")
            before += [f"{q} = {smem}.{held}" for q, smem in zip(queries, self.residents, strict=True)]
        load = " = load_numbers(" if self.v.dropout else " = look_up_band("
        ahead = dict.fromkeys(line.strip() for line in whole if load in line)
        whole = [line for line in whole if line.strip() not in ahead]
        if not self.spec.bounds and not self.ends:
            whole.append(f"{n}_total = order_before_wait({n}_total)")
        enter, early = self.order.enter(self.order.whole(), mask=False), list(ahead)
        if self.spec.fold.tables:
            enter, early = [], [*enter, *early]
        return before, self._step(whole, enter, queries, early)

    def _weigh(
        self,
        truths: dict[Expr, bool],
        masked: bool,
        first: bool = False,
        retries: bool = False,
        form: SoftcapPolynomial | AlibiLine | None = None,
    ) -> list[str]:
        """The arithmetic of a tile, from its scores to its weights, ``{n}_part``.

        ``first``: of the first tile, which guesses the maximum; ``retries``: by a running maximum, without the
        producer; ``form``: a cheaper form of the logit."""
        soft, v, n = self.soft, self.v, self.n
        v.loop(masked)
        v.retries = retries
        soft.guessing, soft.restarted = self.guesses and not retries, retries
        logit, value, *more = (substitute_truths(a, truths) for a in soft.reduction.args)
        if soft.guessing and first:
            soft.guess((logit,))
        v.inside.append(f"# {compiler.describe_reduction(soft.reduction)}")
        form.write_weights() if form else soft.weigh(logit)
        (c,) = contractions(value, soft.over)
        weight = move_factors_to_weight(c).weight
        if v.dropout:
            row = f"blended({v.number(v.dropout.row)}, {v.dropout_block(v.dropout.col)}).to(tl.int32)"
            part = v.mask_columns(f"drop_pairs({n}_weight, {row}, {v.number(v.dropout.mark)})", "0.0")
        else:
            part = f"{n}_weight" if weight is ONE else v.mask_columns(f"{n}_weight * {v.number(weight)}", "0.0")
        for mean, number in zip(self.means, more, strict=True):
            weighted = v.mask_columns(f"{n}_weight * {v.full(number)}", "0.0")
            if soft.guessing:
                v.inside.append(f"{mean} += lanes({weighted})")
            else:
                v.inside.append(f"{mean} = {mean} * {n}_shrink + tl.sum({weighted}, 1)")
        return [*v.inside, f"{n}_part = {part}"]

    def _begin(self) -> list[str]:
        """The softmax's running values."""
        n, rows = self.n, "tl.SliceLayout(1, SCORES)"
        if not self.guesses:
            return [
                f'{n}_top = tl.full([KEPT], float("-inf"), tl.float32, {rows})',
                f"{n}_total = tl.zeros([KEPT], tl.float32, {rows})",
                *self._zero_means(),
            ]
        largest = [f"{n}_largest = lane_largest(zeros)"] if self.soft.compensates else []
        return [f"{n}_total = lanes(zeros)", *largest, *(f"{mean} = lanes(zeros)" for mean in self.means)]

    def _zero_means(self) -> list[str]:
        return [f"{mean} = tl.zeros([KEPT], tl.float32, tl.SliceLayout(1, SCORES))" for mean in self.means]

    def _rescale(self) -> list[str]:
        """Rescale the accumulators to the new running maximum."""
        shrink = f"tl.convert_layout({self.n}_shrink, tl.SliceLayout(1, SUMS{{}}))[:, None]".format
        return [f"{total} = {total} * {shrink(suffix(k))}" for k, total in enumerate(self.v.totals)]

    def _retry(self, arithmetic: list[str]) -> list[str]:
        """Check the guessed maximum; compute rows again where it was wrong."""
        n, rows, compensates = self.n, "tl.SliceLayout(1, SCORES)", self.soft.compensates
        kind = "tl.float8e4nv" if self.stored else self.narrow
        rounding = [
            f"{n}_rounding = rounding(tl.cast({n}_largest, tl.float32, bitcast=True), {kind})",
            f"{n}_rounding = tl.convert_layout(tl.sum({n}_rounding, 1), {rows})",
        ]
        right = f" & {self.softcap.was_right()}" if self.softcap else ""
        if self.stored:
            most, (low, high) = f"tl.max(tl.cast({n}_largest, tl.float32, bitcast=True), 1)", _IN_RANGE
            rounding.append(f"{n}_most = tl.convert_layout({most}, {rows})")
            right = f" & ({n}_most >= {low}) & ({n}_most <= {high})"
        text = gluon.fill(
            RETRY,
            n=n,
            totals=self.totals,
            sums=self._zero_sums(),
            rounding=[
                *(rounding if compensates else []),
                *(f"{mean} = tl.convert_layout(tl.sum({mean}, 1), {rows})" for mean in self.means),
            ],
            near=self.soft.guessed(f" & ({n}_total > {literal(_LEAST)}){right} | (kept_at >= kept_size)"),
            no_rounding=[
                *([f"{n}_rounding = tl.zeros([KEPT], tl.float32, {rows})"] if compensates else []),
                *self._zero_means(),
            ],
            enter=self.order.enter(self.order.any()),
            copy_keys=self.keys.copy("start", "retry_full.index(GROUP)", "GROUP"),
            scores=gluon.start_score("score", self.residents, self.keys.blocks_in("GROUP")),
            arithmetic=arithmetic,
            rescale=self._rescale(),
            weights=self.weights,
            copy_values=self.values.copy("start", "retry_full.index(GROUP)", "GROUP"),
            add=[
                *self._clear_end("step", "step", "GROUP"),
                *gluon.start_sum(self.v.totals, self.last, self.values.blocks_in("GROUP")),
            ],
        )
        return text.split("\n")

    def _results(self) -> list[str]:
        """Numbers are stored from registers; vectors go through the resident tile's memory."""
        self.v.loop(False)
        stores = []
        for k, (texts, feature) in enumerate(self.soft.finish()):
            if feature is None:
                stores.append(f"tl.store(out{k} + out_at + kept_lane, {texts[0]}, mask=kept_in)")
            else:
                width, slices = self.spec.width(feature), self.values.slices
                stores += self.rows.store(self.spec, k, width, slices, self._find_memory(), texts)
        return [*self.v.inside, *stores]

    def _find_memory(self) -> list[str]:
        """The shared memory through which each slice of results is stored: a resident tile of its size, or its own."""
        free = [] if self.stored else list(zip(self.keys.slices, self.residents, strict=True))
        own = dict(zip(self.staging_slices, self.staging, strict=True))
        found = []
        for each in self.values.slices:
            at = next((k for k, ((_, size), _) in enumerate(free) if size == each[1] and each not in own), None)
            found.append(own[each] if at is None else free.pop(at)[1])
        return found


def _list_ringed_numbers(spec: Spec) -> tuple[Expr, ...]:
    """The numbers of folded indices that the producer loads: each thread of a group needs a quarter of them."""
    numbers = [e for e in spec.fold.leaves if e.feature is None and spec.folds(e) and not spec.keeps(e)]
    return tuple(e for e in numbers if spec.type_of[e] in ("float32", "int32"))[:NUMBER_RINGS]
