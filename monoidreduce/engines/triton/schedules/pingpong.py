"""Warp-specialised kernels with a K loop: one producer fills a ring buffer, two consumers alternate (ping-pong).

The epilogue of a GEMM leaves the matrix units idle unless another warp group has something to multiply. Two consumer
warp groups have neighbouring kept tiles: while one multiplies its tile, the other runs the epilogue of its own.

**GEMMs of many features** with a fold as their epilogue, written here, or with weights that are stored
(``engines/triton/panel/epilogue.py``).

**Contractions** of a panel's weights with vectors: out (+)= Σ weights × vectors. A tile is 192 kept indices, three runs
of 64 (the rows of one wgmma), and 128 features. The producer copies blocks of weights and vectors into one ring buffer,
ahead of both consumers; a consumer runs the K loop of its tile while the other stores its own (``order`` barriers, as
in GEMMs). Results go through shared memory in pieces of 64 features of a run. What is added to comes through the same
slots: a consumer asks for the first pieces before it multiplies, and for another whenever one was written.
``engines/triton/panel/accumulators.py`` launches these kernels.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ....plan.schedule import Tile
from ....program.expression import Expr, topological
from ....program.several import OF_VECTORS
from ....reductions.base import Lines
from ....reductions.pick import PickLines
from ..codegen import compiler, tile_ranges
from ..codegen.expressions import ExpressionWriter, write_rounding
from ..codegen.kernel_spec import K_LOOP_DEPTH, WIDEST, Spec, list_k_loop_operands, rounds_products
from ..codegen.reductions import make_lines
from ..launch import driver
from . import gluon_parts as gluon
from .gluon_parts import leaf_name
from .kernel_plan import KernelPlan

# The text of a GEMM with an epilogue by two ping-pong consumers, and its schedules.
#
# It is filled with folds below, and by ``engines/triton/panel/epilogue.py`` with weights that are written. Two consumer
# warp groups take tiles of pairs in turns: while one runs the K loop of its tile, the other runs the epilogue of its
# own. The producer is ahead of both: it copies blocks of both operands for one tile after the other into one ring
# buffer. A consumer may look at the ring only when the other has seen all of its own blocks (the ``order`` barriers):
# before that, it could take the last round's blocks for this one's.
#
# A wide tile has 64 folded indices more, ``extra``, whose products are ``extra_score``: it reads fewer bytes for every
# product, and needs more registers.

TILE = 128  # kept and folded indices of a tile
EXTRA = 64  # folded indices more of a wide tile
# Features of folds and of weights, in narrow and in wide tiles: beyond, the compiler's larger tiles are as fast or
# faster on a chip at its power limit, since they read less. (H200, forwards of 4096 features in turns with others:
# 4096 x 128256 pairs 5.9 ms by ping-pong in wide tiles, 6.9 by the compiler's schedule; 8192 x 128256 12.0 and 13.6.)
DEEPEST = 3072
WIDE_DEEPEST = 8192


@dataclass(frozen=True)
class GemmSchedule:
    """How an instance of the kernel runs. Two consumers with a tile of 128 kept indices each. A value that cannot run
    raises when this module is imported."""

    stages: int  # blocks of both operands in the ring: the pipeline depth
    wide: bool = False  # whether tiles have ``EXTRA`` folded indices more
    registers: tuple[int, int] = (232, 40)  # of a thread: in the second consumer, in the producer; the first has more
    writes: bool = False  # whether weights are stored through shared memory

    def __post_init__(self) -> None:
        if self.stages < 2:
            raise ValueError(f"a ring holds at least 2 blocks, so that copies overlap products, not {self.stages}")
        if self.shared_bytes > gluon.SHARED_BYTES:
            raise ValueError(f"{self.shared_bytes} bytes of shared memory; an instance has {gluon.SHARED_BYTES}")

    @property
    def folded(self) -> int:
        """Folded indices of a tile."""
        return TILE + EXTRA if self.wide else TILE

    @property
    def shared_bytes(self) -> int:
        """All that a kernel takes: the ring of 16-bit blocks, what each consumer stores through, and barriers."""
        ring = self.stages * (TILE + self.folded) * K_LOOP_DEPTH
        return 2 * ring + (2 * 2 * TILE * EXTRA if self.writes else 0) + gluon.SPARE_BYTES


# By whether tiles are wide. A fold walks the folded axis for 256 kept indices of its own; weights go through shared
# memory, which leaves less of it to the ring.
FOLDS = {False: GemmSchedule(stages=7), True: GemmSchedule(stages=5, wide=True, registers=(240, 24))}
WRITES = {
    False: GemmSchedule(stages=6, writes=True),
    True: GemmSchedule(stages=4, wide=True, registers=(240, 24), writes=True),
}

_K_LOOP = """
@gluon.jit
def load_tile(kept_box, folded_box, {extra_box}kept_ring, folded_ring, {extra_ring}full, empty, row, col, k_block):
    # producer: begin to copy the blocks of a tile's K loop, each as soon as its slot is empty
    for d in range(0, {blocks}):
        slot = k_block % {stages}
        mbarrier.wait(empty.index(slot), (k_block // {stages} & 1) ^ 1)
        mbarrier.expect(full.index(slot), kept_box.block_type.nbytes + folded_box.block_type.nbytes{extra_bytes})
        copy(kept_box, [row, d * {depth}], full.index(slot), kept_ring.index(slot))
        copy(folded_box, [col, d * {depth}], full.index(slot), folded_ring.index(slot))
        {copy_extra}
        k_block += 1
    return k_block


@gluon.jit
def multiply_tile(
    kept_ring, folded_ring, {extra_ring}full, empty, order, k_block, phase, {scores}, GROUP: tl.constexpr
):
    # consumer: the K loop of a tile, when the other consumer has ended its own
    mbarrier.wait(order.index(GROUP), phase)
    for d in range(0, {blocks}):
        slot = k_block % {stages}
        mbarrier.wait(full.index(slot), k_block // {stages} & 1)
        block = folded_ring.index(slot).permute((1, 0))
        score = warpgroup_mma(kept_ring.index(slot), block, score, use_acc=d > 0, is_async=True)
        {multiply_extra}
        {scores} = warpgroup_mma_wait({products}, deps=[{scores}])
        mbarrier.arrive(empty.index((k_block + {stages} - 1) % {stages}), pred=d > 0)
        k_block += 1
    mbarrier.arrive(order.index(1 - GROUP))
    {scores} = warpgroup_mma_wait(0, deps=[{scores}])
    mbarrier.arrive(empty.index((k_block - 1) % {stages}))
    return {scores}
"""

# Weights are written, tile by tile in any order. They go through shared memory, by TMA.
_WRITE = """

@gluon.jit
def producer(
    {parameters}
):
    turns = tl.cdiv(folded_size, FOLDED)
    k_block = 0
    for program in range(tl.program_id(0), tiles * turns, tl.num_programs(0)):
        tile, turn = grouped(program, tiles, turns, 16)
        row, col = tile * KEPT, turn * FOLDED
        k_block = load_tile(
            {kept}_box, {folded}_box, {extra_box}kept_ring, folded_ring, {extra_ring}full, empty, row, col, k_block
        )


@gluon.jit
def store_tile(box, staging, row, col, block):
    # wait until the block before has left shared memory
    tma.store_wait(0)
    staging.store(block)
    fence_async_shared()
    write(box, [row, col], staging)


@gluon.jit
def consumer(
    {parameters}
):
    HALF: tl.constexpr = {half}
    SCORES: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {tile}, 16])
    PAIRS: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    turns = tl.cdiv(folded_size, FOLDED)
    b0 = tl.cast(0, tl.int64)
    staging = staging.index(GROUP)
    kept_lane = tl.arange(0, KEPT, tl.SliceLayout(1, PAIRS)).to(INT)
    half_lane = tl.arange(0, HALF, tl.SliceLayout(0, PAIRS)).to(INT)
    k_block = GROUP * {blocks}
    phase = 1 - GROUP
    first = tl.program_id(0) + GROUP * tl.num_programs(0)
    for program in range(first, tiles * turns, 2 * tl.num_programs(0)):
        tile, turn = grouped(program, tiles, turns, 16)
        kept_at = tile * KEPT + tl.arange(0, KEPT, tl.SliceLayout(1, PAIRS))
        kept_in = kept_at < kept_size
        {before}
        {zero_scores}
        {multiply}
        scores0, scores1 = halved(score)
        scores0, scores1 = tl.convert_layout(scores0, PAIRS), tl.convert_layout(scores1, PAIRS)
        {third_strip}
        {epilogue}
    tma.store_wait(0)
"""

# Pairs are folded: a consumer walks the folded axis for kept indices of its own.
_FOLD = """

@gluon.jit
def producer(
    {parameters}
):
    {opening}
    k_block = 0
    for turn in range(begin, end):
        for group in tl.static_range(2):
            row = (tile * 2 + group) * KEPT
            k_block = load_tile(
                {kept}_box, {folded}_box, {extra_box}kept_ring, folded_ring, {extra_ring}full, empty, row,
                turn * FOLDED, k_block
            )


@gluon.jit
def consumer(
    {parameters}
):
    SCORES: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {tile}, 16])
    PAIRS: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {strip}, 16])
    ROWS: tl.constexpr = tl.SliceLayout(1, PAIRS)
    {opening}
    tile = tile * 2 + GROUP
    kept_at = tile * KEPT + tl.arange(0, KEPT, ROWS)
    kept_in = kept_at < kept_size
    kept_lane = tl.arange(0, KEPT, ROWS).to(INT)
    {before}

    # running values
    {zero_scores}
    {begin}

    k_block = GROUP * {blocks}
    phase = 1 - GROUP
    for turn in range(begin, whole_steps):
        {multiply}
        {whole}
    if RAGGED:
        # the end of the folded axis
        for turn in range(tl.maximum(begin, whole_steps), end):
            {zero_scores}
            {multiply}
            {cut}

    # results
    {results}
"""


def write_gemm(
    writes: bool,
    wide: bool,
    plain: compiler.Kernel,
    spec: Spec,
    operands: tuple[Expr, Expr],
    signature: tuple[list[str], list[str]],
    lines: Mapping[str, Sequence[str]],
) -> compiler.Kernel | None:
    """A GEMM that folds its pairs, or ``writes`` weights made of them, in place of another rendering (``plain``); None
    where Gluon lacks a word of it.

    ``wide``: in wide tiles, with one argument more; ``operands``: what is multiplied, the kept side first;
    ``signature``: the arguments, and those not to specialise on; ``lines``: generated ones, by the hole they fill."""
    schedule, template = (WRITES[wide], _WRITE) if writes else (FOLDS[wide], _FOLD)
    stages = schedule.stages
    arguments, unspecialized = signature
    arguments = [*arguments, "extra_box"] if wide else arguments
    extra = ["extra_ring"] if wide else []
    partitions = gluon.Partitions(arguments, ["kept_ring", "folded_ring", *extra, "staging", "full", "empty", "order"])
    narrow, (kept, folded) = f"tl.{spec.narrow}", map(leaf_name, operands)
    blocks = -(-spec.width(operands[0].feature) // K_LOOP_DEPTH)
    holes: dict[str, str | int] = {
        "kept": kept,
        "folded": folded,
        "tile": TILE,
        "half": EXTRA,
        "strip": EXTRA if wide else TILE,
        "depth": K_LOOP_DEPTH,
        "blocks": blocks,
        "stages": stages,
    }
    body = gluon.fill(
        _K_LOOP + template,
        **holes,
        **_fill_tile_holes(wide, blocks),
        parameters=partitions.parameters(),
        **lines,
    )
    rings = [("kept_ring", f"{kept}_box"), ("folded_ring", f"{folded}_box"), *((ring, "extra_box") for ring in extra)]
    staging = gluon.allocate("staging", narrow, "[2] + out_box.block_type.shape", "out_box.layout")
    runs = [("consumer", 0), ("consumer", 1), ("producer", 0)]
    own = "KEPT" if writes else "KEPT // 2"
    body += gluon.fill(
        gluon.ENTRY,
        unspecialized=repr(unspecialized),
        name=plain.name,
        arguments=partitions.entry(),
        allocate=[
            *(gluon.allocate(x, narrow, f"[{stages}] + {box}.block_type.shape", f"{box}.layout") for x, box in rings),
            staging if writes else "staging = 0",
            *(gluon.allocate_barriers(x, count) for x, count in (("full", stages), ("empty", stages), ("order", 2))),
        ],
        depth=stages,
        init=["mbarrier.init(full.index(k), count=1)", "mbarrier.init(empty.index(k), count=1)"],
        init_others=ORDER_INIT,
        specialize=partitions.specialize(
            [(function, group, own) for function, group in runs], ", ".join(map(str, schedule.registers))
        ),
    )
    generated = [line for block in lines.values() for line in block]
    return gluon.assemble(spec, plain, gluon.STORE_IMPORTS, body, generated, consumers=2)


ORDER_INIT = ["for k in tl.static_range(2):", "    mbarrier.init(order.index(k), count=1)"]


def _fill_tile_holes(wide: bool, blocks: int) -> dict[str, str | list[str]]:
    """What a wide tile has besides: a block more to copy and to multiply."""
    scores, extra_ring = ("score, extra_score", "extra_ring, ") if wide else ("score", "")
    zeros = f"tl.zeros([KEPT, {TILE}], tl.float32, SCORES)"
    zeros += f", tl.zeros([KEPT, {EXTRA}], tl.float32, PAIRS)" if wide else ""
    rings = f"kept_ring, folded_ring, {extra_ring}full, empty, order"
    extra = {
        "copy_extra": [
            f"copy(extra_box, [col + {TILE}, d * {K_LOOP_DEPTH}], full.index(slot), extra_ring.index(slot))",
        ],
        "multiply_extra": [
            "block = extra_ring.index(slot).permute((1, 0))",
            "extra_score = warpgroup_mma(kept_ring.index(slot), block, extra_score, use_acc=d > 0, is_async=True)",
        ],
        "third_strip": ["scores2 = extra_score"],
    }
    return {
        "extra_ring": extra_ring,
        "extra_box": "extra_box, " if wide else "",
        "extra_bytes": " + extra_box.block_type.nbytes" if wide else "",
        "scores": scores,
        "products": "2" if wide else "1",
        "zero_scores": [f"{scores} = {zeros}"],
        "multiply": [
            f"{scores} = multiply_tile({rings}, k_block, phase, {scores}, GROUP)",
            f"k_block += 2 * {blocks}",
            "phase ^= 1",
        ],
        **{hole: found if wide else [] for hole, found in extra.items()},
    }


# The epilogue of a fold, strip by strip of a tile's folded indices

_Strips = tuple[tuple[str, int, int], ...]  # what holds a strip's products, from where on, and how wide it is
_STRIPS: dict[bool, _Strips] = {
    False: (("score", 0, TILE),),
    True: (("extra_score", TILE, EXTRA), ("score", 0, TILE)),
}
# where labels are looked for: strips of 64 indices need no registers that wide tiles have not
_LABEL_STRIPS: dict[bool, _Strips] = {
    False: _STRIPS[False],
    True: (("first", 0, EXTRA), ("second", EXTRA, EXTRA), ("extra_score", TILE, EXTRA)),
}
_OWN_NAMES = ("start", "folded_lane", "folded_at", "folded_in", "pairs")  # names that differ from strip to strip


def fold_strips(lines: Sequence[str], wide: bool, masked: bool) -> list[str]:
    """The lines that fold ``pairs``, for each strip of a tile: on the products where they lie, since there are no
    registers for others. The strips' layouts have different names, and hold everything alike."""
    found = []
    for name, at, width in _STRIPS[wide]:
        found += [*_enter_strip(at, width, masked), f"{name} = tl.convert_layout({name}, PAIRS)"]
        found += _rename(lines, {"FOLDED": str(width), "pairs": name})
    return [*found, "score = tl.convert_layout(score, SCORES)"]


def pick_labels(own: str, lines: Sequence[str], wide: bool) -> list[str]:
    """Lines that matter only in strips that hold some kept index's label (``own``); other strips are skipped."""
    found = ["first, second = halved(score)"] if wide else []
    for k, (name, at, width) in enumerate(_LABEL_STRIPS[wide]):
        own_lines = [*_enter_strip(at, width, False), f"pairs = tl.convert_layout({name}, PAIRS)"]
        own_lines += _rename(lines, {"FOLDED": str(width)})
        own_lines.append(f"next_own = {next_label(own, f'start + {width}')}")
        found.append(f"if next_own < turn * FOLDED + {at + width}:")
        found += gluon.indent(_rename(own_lines, {x: f"{x}{k}" for x in _OWN_NAMES}))
    return found


def next_label(own: str, start: str) -> str:
    """The first folded index from ``start`` on that is some kept index's label."""
    return f"tl.min(tl.min(tl.where({own} >= {start}, {own}, 2147483647), 1), 0)"


def holds_label(own: str) -> str:
    """A condition as text: a tile holds some kept index's label."""
    return f"{next_label(own, 'turn * FOLDED')} < (turn + 1) * FOLDED"


def _enter_strip(at: int, width: int, masked: bool) -> list[str]:
    return [
        f"start = turn * FOLDED + {at}",
        f"folded_lane = tl.arange(0, {width}, tl.SliceLayout(0, PAIRS)).to(INT)",
        f"folded_at = start + tl.arange(0, {width}, tl.SliceLayout(0, PAIRS))",
        *(["folded_in = folded_at < folded_size"] if masked else []),
    ]


def _rename(lines: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Generated lines with other names."""
    words = re.compile(rf"\b(?:{'|'.join(names)})\b")
    return [words.sub(lambda found: names[found[0]], line) for line in lines]


KEPT = 2 * TILE  # kept indices of an instance; a fold with fewer would leave a consumer without work
# Features above which wide tiles are faster, since they read less. (H200, a forward of 65536 x 65536 pairs of 768
# features: 0.91 of the products' time in turns with them, 0.86 each by itself; 0.96 and 0.88 in narrow tiles. Of 512 it
# took 0.94 and 0.96, and 0.92 and 0.95 in narrow ones, which end sooner.)
_NARROW_FEATURES = 512


def choose_tile(spec: Spec, device: torch.device, length: int) -> Tile | None:
    """The tile of a fold with this many kept indices; None where it has no such kernel."""
    if not driver.runs_warp_specialized(device) or length < KEPT or write_kernel(spec) is None:
        return None
    return KEPT, FOLDS[_prefers_wide_tiles(spec)].folded, 4, 1


def _prefers_wide_tiles(spec: Spec) -> bool:
    """True when a fold is faster in wide tiles. They have no registers for numbers per folded index."""
    many = all(spec.width(e.feature) > _NARROW_FEATURES for e in list_k_loop_operands(spec))
    return many and not _has_folded_numbers(spec) and driver.has_registers_for_wide_tiles()


def has_tile(plan: KernelPlan) -> bool:
    """True when a plan's tile is one of these kernels'."""
    return (plan.block_kept, plan.num_warps) == (KEPT, 4) and plan.block_folded in {s.folded for s in FOLDS.values()}


@functools.lru_cache(maxsize=1024)
def write_kernel(spec: Spec, wide: bool = False) -> compiler.Kernel | None:
    """Write the kernel of a spec, with the arguments that any other rendering has; None where there is none.

    ``wide``: in wide tiles, with one argument more, a descriptor of the blocks of extra folded indices."""
    products = [e for e in topological(spec.fold.reductions) if e.op in OF_VECTORS]
    if not spec.k_loop or spec.bounds or [e.op for e in products] != ["dot"] or not _has_registers(spec):
        return None
    kept, folded = products[0].args[::-1] if spec.folds(products[0].args[0]) else products[0].args
    if spec.width(kept.feature) > (WIDE_DEEPEST if _prefers_wide_tiles(spec) else DEEPEST):
        return None
    if any(spec.descriptor_dims.get(e) != () or spec.width(e.feature) <= WIDEST for e in (kept, folded)):
        return None
    plain = compiler.compile_fold(spec)
    v = _PairValues(spec)
    reductions = [make_lines(place, r, scale, v) for place, (r, scale) in enumerate(spec.fold.scaled)]
    whole, cut = (_write_epilogue(v, reductions, wide, masked) for masked in (False, True))
    v.loop(False)
    stores = compiler.write_stores(reductions, v)
    begin = _add_row_layout([line for r in reductions for line in r.start()])
    lines = {
        "opening": _write_opening(spec),
        "before": v.before,
        "begin": begin + _find_first_label(v, reductions),
        "whole": whole,
        "cut": cut,
        "results": _add_row_layout([*v.inside, *stores]),
    }
    if plain.shifts or any(r.helpers for r in reductions):
        return None
    signature = compiler.list_arguments(spec, list(plain.leaves), 0)
    return write_gemm(False, wide, plain, spec, (kept, folded), signature, lines)


def _has_registers(spec: Spec) -> bool:
    """True when registers suffice beside a product: for one softmax, and a label or a number per folded index."""
    found = sorted(r.attrs[0] for r in spec.fold.reductions)
    return not spec.draws_numbers and (
        found == ["soft"] or (found == ["pick", "soft"] and not _has_folded_numbers(spec))
    )


def _has_folded_numbers(spec: Spec) -> bool:
    return any(e.op == "leaf" and e.feature is None and spec.folds(e) for e in topological(spec.fold.reductions))


def _write_epilogue(v: _PairValues, reductions: list[Lines], wide: bool, masked: bool) -> list[str]:
    """What is done to a tile: labels first, in strips that hold any, so that scores can be let go after them."""
    picks = [r for r in reductions if isinstance(r, PickLines)]
    lines = _add_row_layout(compiler.write_tile_body(v, [r for r in reductions if r not in picks], {}, masked))
    found = fold_strips(lines, wide, masked)
    for pick in picks:
        lines = _add_row_layout(compiler.write_tile_body(v, [pick], {}, False))  # no label lies beyond the end
        found = pick_labels(v.own_place(pick.reduction.args[0]), lines, wide) + found
    return found


def _find_first_label(v: _PairValues, reductions: list[Lines]) -> list[str]:
    own = [v.own_place(r.reduction.args[0]) for r in reductions if isinstance(r, PickLines)]
    return [f"next_own = {next_label(name, 'begin * FOLDED')}" for name in own]


class _PairValues(ExpressionWriter):
    """Numbers of pairs whose product the K loop made."""

    def product(self, x: object, y: object) -> str:
        if rounds_products(self.spec):
            self.inside.append(write_rounding("pairs"))
        return "pairs"

    def own_place(self, target: Expr) -> str:
        """A kept index's label, in the type of the index: half the registers."""
        t = self.number(target)
        text = f"tl.where(({t} >= 0) & ({t} < folded_size), {t}, -1).to(tl.int32)"
        return self.bind((target, "place"), text, False)


def _write_opening(spec: Spec) -> list[str]:
    """Which kept tile, and which split of the folded axis."""
    lines = gluon.scalar_opening(spec)
    lines += ["turns = tl.cdiv(folded_size, FOLDED)", "begin = 0", "end = turns"]
    if spec.split:
        lines[-3:] = tile_ranges.SPLIT_RANGE
    return [*lines, "whole_steps = tl.minimum(end, folded_size // FOLDED)"]


def _add_row_layout(lines: list[str]) -> list[str]:
    """Generated lines that create one number per kept index, with the layout that Gluon needs."""
    return [_CREATES.sub(r"\1, ROWS)", line) for line in lines]


_CREATES = re.compile(r"(tl\.(?:zeros|full)\(\[KEPT\], [^\n]*?tl\.\w+)\)")


# Contractions of weights with vectors


@dataclass(frozen=True)
class ContractionSchedule:
    """How an instance of the kernel runs."""

    runs: int  # of 64 kept indices in a tile
    width: int  # features of a tile
    depth: int  # folded indices of a block
    piece: int  # features that are stored at a time: accumulators leave registers for no more
    slots: int  # pieces of a consumer in shared memory
    stages: int  # blocks in the ring, which takes the shared memory that is left
    registers: tuple[int, int]  # of a thread: in the second consumer, in the producer; the first has the rest

    @property
    def tile(self) -> int:
        """Kept indices of a tile."""
        return self.runs * gluon.GROUP_ROWS

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """The run of each piece, and the feature at which it begins."""
        return [(run, at) for run in range(self.runs) for at in range(0, self.width, self.piece)]


CONTRACTION = ContractionSchedule(runs=3, width=128, depth=64, piece=64, slots=4, stages=4, registers=(232, 40))

_CONTRACT = """
@gluon.jit
def producer(
    {parameters}
):
    k_block = 0
    for program in range(tl.program_id(0), tiles * turns, tl.num_programs(0)):
        row, col = grouped(program, tiles, turns, 16)
        for k in range(0, blocks):
            slot = k_block % {stages}
            mbarrier.wait(empty.index(slot), (k_block // {stages} & 1) ^ 1)
            barrier = full.index(slot)
            mbarrier.expect(barrier, {bytes})
            for r in tl.static_range({runs}):
                copy(weights_box, {weights_at}, barrier, weights_ring.index(slot * {runs} + r))
            copy(vectors_box, [k * FOLDED, col * {width}], barrier, vectors_ring.index(slot))
            k_block += 1


@gluon.jit
def load_piece(box, staging, barrier, row, col):
    # begin to copy what is added to
    mbarrier.expect(barrier, box.block_type.nbytes)
    copy(box, [row, col], barrier, staging)


@gluon.jit
def store_piece(box, staging, row, col, block):
    staging.store(block)
    fence_async_shared()
    write(box, [row, col], staging)


@gluon.jit
def consumer(
    {parameters}
):
    SUMS: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {width}, 16])
    PIECE: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {piece}, 16])
    FIRST: tl.constexpr = GROUP * {slots}
    {begin}
    k_block = GROUP * blocks
    phase = 1 - GROUP
    done = 0
    first = tl.program_id(0) + GROUP * tl.num_programs(0)
    for program in range(first, tiles * turns, 2 * tl.num_programs(0)):
        row, col = grouped(program, tiles, turns, 16)
        row = row * {tile}
        col = col * {width}
        {load_first_pieces}
        # the K loop of a tile, when the other consumer has ended its own
        mbarrier.wait(order.index(GROUP), phase)
        for k in range(0, blocks):
            slot = k_block % {stages}
            mbarrier.wait(full.index(slot), k_block // {stages} & 1)
            block = vectors_ring.index(slot)
            {multiply}
            {sums} = warpgroup_mma_wait({runs}, deps=[{sums}])
            mbarrier.arrive(empty.index((k_block + {stages} - 1) % {stages}), pred=k > 0)
            k_block += 1
        mbarrier.arrive(order.index(1 - GROUP))
        {sums} = warpgroup_mma_wait(0, deps=[{sums}])
        mbarrier.arrive(empty.index((k_block - 1) % {stages}))
        k_block += blocks
        phase ^= 1
        {store_pieces}
        done += 1
    tma.store_wait(0)
"""


@functools.cache
def write_contraction(narrow: str, over: str, add: bool) -> compiler.Kernel:
    """Write the kernel. ``narrow``: the type of all tensors; ``over``: "cols" where weights lie kept index by kept
    index, "rows" where they lie folded index by folded index; ``add``: whether results are added to ``out``."""
    s, dtype = CONTRACTION, f"tl.{narrow}"
    name = f"contract_{over}" + ("_added" if add else "")
    arguments = ["weights_box", "vectors_box", "out_box", "blocks", "tiles", "turns"]
    buffers = ["weights_ring", "vectors_ring", "staging", "full", "empty", "order", "loaded"]
    partitions = gluon.Partitions(arguments, buffers)
    kept, transposed = f"row * {s.tile} + r * KEPT", "" if over == "cols" else ".permute((1, 0))"
    weights = [f"weights_ring.index(slot * {s.runs} + {r}){transposed}" for r in range(s.runs)]
    body = gluon.fill(
        _CONTRACT,
        parameters=partitions.parameters(),
        stages=s.stages,
        tile=s.tile,
        runs=s.runs,
        width=s.width,
        piece=s.piece,
        slots=s.slots,
        bytes=2 * s.depth * (s.tile + s.width),
        weights_at=f"[{kept}, k * FOLDED]" if over == "cols" else f"[k * FOLDED, {kept}]",
        sums=", ".join(f"sum{r}" for r in range(s.runs)),
        begin=[f"sum{r} = tl.zeros([KEPT, {s.width}], tl.float32, SUMS)" for r in range(s.runs)],
        multiply=[
            f"sum{r} = warpgroup_mma({w}, block, sum{r}, use_acc=k > 0, is_async=True)" for r, w in enumerate(weights)
        ],
        load_first_pieces=["tma.store_wait(0)", *map(_load_piece, range(s.slots))] if add else [],
        store_pieces=_store_pieces(narrow, add),
    )
    shape = "[{}] + {}_box.block_type.shape".format
    body += gluon.fill(
        gluon.ENTRY,
        unspecialized="['blocks', 'tiles', 'turns']",
        name=name,
        arguments=partitions.entry(),
        allocate=[
            gluon.allocate("weights_ring", dtype, shape(s.stages * s.runs, "weights"), "weights_box.layout"),
            gluon.allocate("vectors_ring", dtype, shape(s.stages, "vectors"), "vectors_box.layout"),
            gluon.allocate("staging", dtype, shape(f"2 * {s.slots}", "out"), "out_box.layout"),
            *(
                gluon.allocate_barriers(x, count)
                for x, count in (("full", s.stages), ("empty", s.stages), ("order", 2))
            ),
            gluon.allocate_barriers("loaded", f"2 * {s.slots}"),
        ],
        depth=s.stages,
        init=["mbarrier.init(full.index(k), count=1)", "mbarrier.init(empty.index(k), count=1)"],
        init_others=[
            *ORDER_INIT,
            f"for k in tl.static_range(2 * {s.slots}):",
            "    mbarrier.init(loaded.index(k), count=1)",
        ],
        specialize=partitions.specialize(
            [("consumer", 0, "KEPT"), ("consumer", 1, "KEPT"), ("producer", 0, "KEPT")],
            ", ".join(map(str, s.registers)),
        ),
    )
    title = f'"""Sums of {narrow} vectors with weights, over {over}."""\n\n'
    helpers = gluon.in_gluon(compiler.copy_device_functions(body))
    text = title + "\n".join([gluon.STORE_IMPORTS, *helpers, body])
    return compiler.Kernel(name, text, (), hand_scheduled=True, consumers=2)


def _write_slot(piece: int) -> str:
    return f"FIRST + {piece % CONTRACTION.slots}"


def _write_corner(piece: int) -> str:
    run, at = CONTRACTION.pieces[piece]
    return f"row + {run} * KEPT, col + {at}"


def _load_piece(piece: int) -> str:
    slot, corner = _write_slot(piece), _write_corner(piece)
    return f"load_piece(out_box, staging.index({slot}), loaded.index({slot}), {corner})"


def _store_pieces(narrow: str, add: bool) -> list[str]:
    """Add to pieces, where results are added, and store them; when one is stored, ask for another in its slot."""
    slots, count = CONTRACTION.slots, len(CONTRACTION.pieces)
    found = [f"piece{2 * r}, piece{2 * r + 1} = halved(sum{r})" for r in range(CONTRACTION.runs)]
    for k in range(count):
        slot, uses = _write_slot(k), -(-(count - k % slots) // slots)  # how often a tile uses this slot
        found.append(f"piece{k} = tl.convert_layout(piece{k}, PIECE)")
        if add:
            found.append(f"mbarrier.wait(loaded.index({slot}), (done * {uses} + {k // slots}) & 1)")
            found.append(f"piece{k} += staging.index({slot}).load(PIECE).to(tl.float32)")
        else:
            found.append(f"tma.store_wait({slots - 1})")
        found.append(f"store_piece(out_box, staging.index({slot}), {_write_corner(k)}, piece{k}.to(tl.{narrow}))")
        later = k - 1 + slots
        if add and k > 0 and later < count:
            found += ["tma.store_wait(1)", _load_piece(later)]
    return found
