"""Kernels whose copies, products and arithmetic take turns as written here, not as a compiler finds: Gluon, on Hopper.

A softmax-weighted sum of vectors takes half as long to raise its powers as to multiply, so the two must run side by
side. One warp copies blocks of the folded side into rings in shared memory. Two groups of four warps own half a kept
tile each: a group starts a tile's scores and the sums of the tile before, and weighs the scores while the sums run.

The arithmetic of pairs is that of every kernel, in the same text: ``tl`` is here Gluon's language, which has its words.
"""

from __future__ import annotations

import functools
import re
import textwrap
from dataclasses import dataclass, replace

import torch

from ...program.contract import contractions
from ...program.expr import Expr, topological
from . import emit, skip, source
from .describe import processors
from .exponents import literal
from .kinds import Soft, known, make
from .plan import KernelPlan
from .spec import Spec
from .totals import factored
from .values import Values, is_one

_OWNED = 64  # indices of a group of four warps
OPTIONS = {"maxnreg": 168}  # of a thread when the kernel starts; then the copying warp leaves most of its own to the others
_LEAST = 2.0**-80  # totals above this were not rounded to nothing
_WIDTHS = {64, 128}  # of all vectors
_WORDS = frozenset(  # of Triton's language that Gluon's has too
    "abs arange cast cdiv ceil erf exp exp2 float16 bfloat16 float32 floor fma full int1 int32 int64 load log log2 max "
    "maximum minimum sqrt store sum uint32 where zeros".split()
)

_IMPORTS = """import triton.experimental.gluon.language as tl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""


@functools.cache
def on(device: torch.device) -> bool:
    """Whether the device has these matrix units, and this Triton these words."""
    if device.type != "cuda" or source.version() < (3, 6) or not torch.cuda.is_available():
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def takes(plan: KernelPlan, device: torch.device) -> bool:
    """Whether a plan asks for such a kernel, and its tiles are those of one."""
    return plan.boxes == 2 and plan.block_kept == 2 * _OWNED and plan.num_warps == 4 and on(device)


def fits(spec: Spec, device: torch.device, length: int) -> bool:
    """Whether a fold with this many kept indices in all has such a kernel, and keeps the device busy with it."""
    return on(device) and length >= 2 * _OWNED * processors(device) and kernel(spec) is not None


@dataclass(frozen=True)
class Leaves:
    """What is multiplied: vectors of the kept and the folded side to scores, weights with vectors to sums."""

    kept: Expr
    folded: Expr
    summed: Expr


@functools.lru_cache(maxsize=1024)
def leaves(spec: Spec) -> Leaves | None:
    """The vectors of a fold that is one softmax-weighted sum, its logits made of one product; None for any other."""
    (r, *others) = spec.fold.reductions
    if others or r.attrs[0] != "soft" or len(r.args) != 2 or spec.narrow is None or spec.split or spec.deep:
        return None
    sums = [factored(c) for c in contractions(r.args[1], spec.over)]
    dots = [e for e in topological(r.args[:1]) if e.op == "dot"]
    if len(sums) != 1 or len(dots) != 1 or sums[0].walk or sums[0].minus is not None or not is_one(sums[0].weight):
        return None
    kept, folded = dots[0].args[::-1] if spec.folds(dots[0].args[0]) else dots[0].args
    vectors = {e for e in topological(r.args) if e.feature is not None}
    found = Leaves(kept, folded, sums[0].vector)
    copied = folded in spec.box_of and found.summed in spec.box_of and folded is not found.summed
    widths = {spec.width(e.feature) for e in vectors}
    fits = vectors == {kept, folded, found.summed} and len(widths) == 1 and widths <= _WIDTHS
    return found if copied and fits and spec.type_of[kept] == spec.narrow else None


@functools.lru_cache(maxsize=1024)
def kernel(spec: Spec) -> emit.Kernel | None:
    """Write the kernel of a spec, with the arguments that any other rendering has; None where there is none."""
    found = leaves(spec)
    plain = emit.kernel(spec)
    if found is None or plain.shifts:
        return None
    v = _Values(spec)
    soft = make(0, *spec.fold.scaled[0], v)
    assert isinstance(soft, Soft)
    if not soft.guesses:
        return None
    truths = skip.preferred(spec.fold) if spec.bounds else {}
    turns = {
        "first": _turn(soft, {}, masked=True, guess=True),
        "whole": _turn(soft, truths, masked=False),
        "other": _turn(soft, {}, masked=True),
        "again": _turn(soft, {}, masked=True, near=False),
    }
    at = v.pointer(found.kept)
    arithmetic = "\n".join(line for lines in (v.before, *turns.values()) for line in lines)
    if not set(re.findall(r"(?<!\w)tl\.(\w+)", arithmetic)) <= _WORDS:
        return None
    names, unspecialized = emit._arguments(spec, list(plain.leaves), 0)
    fields = _fields(spec, found) | {
        "names": textwrap.fill(", ".join(names), 110, initial_indent="    ", subsequent_indent="    "),
        "unspecialized": repr(unspecialized),
        "name": plain.name,
        "at": at,
        "n": soft.name,
        "near": soft.guessed(f" & ({soft.name}_total > {literal(_LEAST)}) | (kept_at >= kept_size)"),
        "before": _inside(v.before, 4),
        "first": _inside(turns["first"], 4),
        "whole": _inside(turns["whole"], 8),
        "other": _inside(turns["other"], 12),
        "again": _inside(turns["again"], 12),
        "results": _inside(_results(soft, spec), 4),
    }
    body = _TEXT.format(**fields)
    helpers = [line.replace("@triton.jit", "@gluon.jit") for line in emit._copied(body)]
    text = "\n".join([emit._header(spec, list(plain.leaves), _IMPORTS), *helpers, body])
    return replace(plain, text=text, guesses=False, staged=True)


class _Values(Values):
    """Numbers of pairs whose product was made before them."""

    def product(self, x: Expr, y: Expr) -> str:
        return "score"

    def lane(self, feature: str | int | None, room: int = 0) -> tuple[str, str | None]:
        return "wide_lane", None

    def added(self, name: str) -> str:
        return f"lanes({name})"

    def across(self, name: str) -> str:
        return f"tl.convert_layout({name}, tl.SliceLayout(1, SUMS))[:, None]"


def _turn(soft: Soft, truths: dict[Expr, bool], masked: bool, near: bool = True, guess: bool = False) -> list[str]:
    """The arithmetic of a tile: from its scores to its weights. ``near``: by the guess of a maximum, which holds."""
    soft.v.loop(masked)
    soft.guessing = near
    logit = known(soft.reduction.args[0], truths)
    if guess:
        soft.guess((logit,))
    soft.v.inside.append(f"# {emit._described(soft.reduction)}")
    soft.weigh(logit)
    return soft.v.inside


def _results(soft: Soft, spec: Spec) -> list[str]:
    """Numbers are stored from where they are; vectors go through shared memory, so that rows are written whole."""
    v = soft.v
    v.loop(False)
    stores = []
    for k, (texts, feature) in enumerate(soft.finish()):
        if feature is None:
            stores.append(f"tl.store(out{k} + out_at + kept_lane, {texts[0]}, mask=kept_in)")
            continue
        place = f"(out_at + wide_row[:, None]) * {spec.width(feature)} + wide_lane[None, :]"
        stores += [
            f"room.store(({texts[0]}).to(tl.{spec.narrow}))",
            f"tl.store(out{k} + {place}, room.load(WIDE), mask=wide_in[:, None])",
        ]
    return [*v.inside, *stores]


def _fields(spec: Spec, found: Leaves) -> dict[str, str]:
    """What a kernel's text says of its leaves and of the tiles that it meets."""
    width = spec.width(found.kept.feature)
    scalars = [line for line in emit._opening(spec) if not re.search("KEPT|FOLDED|kept_in", line)]
    place = dict.fromkeys(("at_whole", "at_other", "at_any"), "turn")
    ranges = ["wholes = folded_size // FOLDED", "visits = tl.cdiv(folded_size, FOLDED)"]
    if spec.bounds:
        whole = "whole_first + turn + tl.where(turn < whole, 0, between)"
        other = "first + rest + tl.where(rest < before, 0, whole) + tl.where(rest < before + between, 0, again)"
        other = other.replace("rest", "(turn - wholes)")
        place = {"at_whole": whole, "at_other": other, "at_any": f"tl.where(turn < wholes, {whole}, {other})"}
        ranges = [*emit._range(spec), "wholes = whole + again"]
        ranges.append("visits = tl.maximum(wholes + before + between + last - again_last, 1)")
    spots = ["".join(f"tl.cast(b{d}, tl.int32), " for d in spec.box_of[e]) for e in (found.folded, found.summed)]
    return place | {
        "x0": str(found.kept.attrs[0]),
        "x1": str(found.folded.attrs[0]),
        "x2": str(found.summed.attrs[0]),
        "spot1": spots[0],
        "spot2": spots[1],
        "width": str(width),
        "across": str(width // 8),
        "down": str(256 // width),
        "narrow": f"tl.{spec.narrow}",
        "opening": _inside([*scalars, *ranges], 4),
    }


def _inside(lines: list[str], by: int) -> str:
    return "\n".join(f"{' ' * by}{line}" for line in lines)


_CONSTANTS = ", ".join(f"{c}: tl.constexpr" for c in emit.CONSTANTS)
_RINGS = "room, spare, came, {x1}_ring, {x2}_ring, {x1}_full, {x1}_empty, {x2}_full, {x2}_empty"

_TEXT = '''
@gluon.jit
def copies(
    given, SIDE: tl.constexpr,
    __CONSTANTS__,
):
    # one warp keeps the rings full
    (
{names},
        __RINGS__,
    ) = given
{opening}
    for turn in range(0, visits):
        start = ({at_any}) * FOLDED
        slot = turn % 2
        phase = (turn // 2) & 1
        mbarrier.wait({x1}_empty.index(slot), phase ^ 1)
        mbarrier.expect({x1}_full.index(slot), {x1}_box.block_type.nbytes)
        copy({x1}_box, [{spot1}start, 0], {x1}_full.index(slot), {x1}_ring.index(slot))
        mbarrier.wait({x2}_empty.index(slot), phase ^ 1)
        mbarrier.expect({x2}_full.index(slot), {x2}_box.block_type.nbytes)
        copy({x2}_box, [{spot2}start, 0], {x2}_full.index(slot), {x2}_ring.index(slot))


@gluon.jit
def scores(kept, ring, full, turn, blank):
    # begin the products of a tile's block with the kept vectors
    mbarrier.wait(full.index(turn % 2), (turn // 2) & 1)
    block = ring.index(turn % 2).reshape([blank.shape[1], {width}])
    return warpgroup_mma(kept, block.permute((1, 0)), blank, use_acc=False, is_async=True)


@gluon.jit
def sums(weights, ring, full, turn, total):
    # begin to add the weighted vectors of a tile
    mbarrier.wait(full.index(turn % 2), (turn // 2) & 1)
    return warpgroup_mma(weights, ring.index(turn % 2).reshape([weights.shape[1], {width}]), total, is_async=True)


@gluon.jit
def lanes(block):
    # sums over what a thread holds of a row; its four threads are added at the end
    return tl.sum(tl.sum(tl.reshape(block, [block.shape[0], block.shape[1] // 8, 4, 2]), 1), 2)


@gluon.jit
def computes(
    given, SIDE: tl.constexpr,
    __CONSTANTS__,
):
    # four warps own one side of the kept tile
    (
{names},
        __RINGS__,
    ) = given
    SCORES: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, FOLDED, 16])
    SUMS: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {width}, 16])
    WEIGHTS: tl.constexpr = tl.DotOperandLayout(0, SUMS, 2)
    WIDE: tl.constexpr = tl.BlockedLayout([1, 8], [{down}, {across}], [4, 1], [1, 0])
{opening}
    tile = tile * 2 + SIDE
    kept_lane = tl.arange(0, KEPT, tl.SliceLayout(1, SCORES)).to(INT)
    kept_at = tile * KEPT + tl.arange(0, KEPT, tl.SliceLayout(1, SCORES))
    kept_in = kept_at < kept_size
    folded_lane = tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES)).to(INT)
    wide_row = tl.arange(0, KEPT, tl.SliceLayout(1, WIDE)).to(INT)
    wide_lane = tl.arange(0, {width}, tl.SliceLayout(0, WIDE)).to(INT)
    wide_in = tile * KEPT + wide_row < kept_size
    out_at = tl.cast(batch, tl.int64) * kept_size + tile * KEPT
{before}
    room, spare, came = room.index(SIDE), spare.index(SIDE), came.index(SIDE)
    room.store(tl.load({at} + wide_row[:, None] * {x0}_s + wide_lane[None, :] * {x0}_f, mask=wide_in[:, None], other=0))
    {x0}_block = room.load(tl.DotOperandLayout(0, SCORES, 2))

    # running values
    blank = tl.zeros([KEPT, FOLDED], tl.float32, SCORES)
    {n}_total = lanes(blank)
    {n}_mean0 = tl.zeros([KEPT, {width}], tl.float32, SUMS)

    # the first tile: its maximum stands in for the running one in all of them
    turn = 0
    start = ({at_any}) * FOLDED
    folded_at = start + tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES))
    folded_in = folded_at < folded_size
    score = warpgroup_mma_wait(0, deps=[scores({x0}_block, {x1}_ring, {x1}_full, 0, blank)])
    mbarrier.arrive({x1}_empty.index(0))
{first}
    weights = tl.convert_layout({n}_weight.to({narrow}), WEIGHTS)

    # whole tiles: the scores of each beside the sums of the one before
    for turn in range(1, wholes):
        score = scores({x0}_block, {x1}_ring, {x1}_full, turn, blank)
        {n}_mean0 = sums(weights, {x2}_ring, {x2}_full, turn - 1, {n}_mean0)
        score = warpgroup_mma_wait(1, deps=[score])
        mbarrier.arrive({x1}_empty.index(turn % 2))
        start = ({at_whole}) * FOLDED
        folded_at = start + tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES))
{whole}
        {n}_mean0, weights = warpgroup_mma_wait(0, deps=[{n}_mean0, weights])
        mbarrier.arrive({x2}_empty.index((turn - 1) % 2))
        weights = tl.convert_layout({n}_weight.to({narrow}), WEIGHTS)
    if RAGGED:
        # the others
        for turn in range(tl.maximum(wholes, 1), visits):
            score = scores({x0}_block, {x1}_ring, {x1}_full, turn, blank)
            {n}_mean0 = sums(weights, {x2}_ring, {x2}_full, turn - 1, {n}_mean0)
            score = warpgroup_mma_wait(1, deps=[score])
            mbarrier.arrive({x1}_empty.index(turn % 2))
            start = ({at_other}) * FOLDED
            folded_at = start + tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES))
            folded_in = folded_at < folded_size
{other}
            {n}_mean0, weights = warpgroup_mma_wait(0, deps=[{n}_mean0, weights])
            mbarrier.arrive({x2}_empty.index((turn - 1) % 2))
            weights = tl.convert_layout({n}_weight.to({narrow}), WEIGHTS)
    {n}_mean0 = warpgroup_mma_wait(0, deps=[sums(weights, {x2}_ring, {x2}_full, visits - 1, {n}_mean0)])
    {n}_total = tl.convert_layout(tl.sum({n}_total, 1), tl.SliceLayout(1, SCORES))

    # where a weight was out of range, or all of a row's too small, everything begins again with a running maximum
    if not ({near}):
        {n}_top = tl.full([KEPT], float("-inf"), tl.float32, tl.SliceLayout(1, SCORES))
        {n}_total = tl.zeros([KEPT], tl.float32, tl.SliceLayout(1, SCORES))
        {n}_mean0 = tl.zeros([KEPT, {width}], tl.float32, SUMS)
        for turn in range(0, visits):
            start = ({at_any}) * FOLDED
            folded_at = start + tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES))
            folded_in = folded_at < folded_size
            mbarrier.expect(came, {x1}_box.block_type.nbytes)
            copy({x1}_box, [{spot1}start, 0], came, spare)
            mbarrier.wait(came, 0)
            block = spare.reshape([FOLDED, {width}])
            score = warpgroup_mma({x0}_block, block.permute((1, 0)), blank, use_acc=False)
{again}
            {n}_mean0 = {n}_mean0 * tl.convert_layout({n}_shrink, tl.SliceLayout(1, SUMS))[:, None]
            weights = tl.convert_layout({n}_weight.to({narrow}), WEIGHTS)
            mbarrier.expect(came, {x2}_box.block_type.nbytes)
            copy({x2}_box, [{spot2}start, 0], came, spare)
            mbarrier.wait(came, 1)
            {n}_mean0 = warpgroup_mma(weights, block, {n}_mean0)

    # results
{results}


@gluon.jit(do_not_specialize={unspecialized})
def {name}(
{names},
    __CONSTANTS__,
):
    room = tl.allocate_shared_memory(
        {narrow}, [2, KEPT // 2, {width}], tl.NVMMASharedLayout.get_default_for([KEPT // 2, {width}], {narrow})
    )
    {x1}_ring = tl.allocate_shared_memory({narrow}, [2] + {x1}_box.block_type.shape, {x1}_box.layout)
    {x2}_ring = tl.allocate_shared_memory({narrow}, [2] + {x2}_box.block_type.shape, {x2}_box.layout)
    spare = tl.allocate_shared_memory({narrow}, [2] + {x1}_box.block_type.shape, {x1}_box.layout)
    came = tl.allocate_shared_memory(tl.int64, [2, 1], mbarrier.MBarrierLayout())
    {x1}_full = tl.allocate_shared_memory(tl.int64, [2, 1], mbarrier.MBarrierLayout())
    {x1}_empty = tl.allocate_shared_memory(tl.int64, [2, 1], mbarrier.MBarrierLayout())
    {x2}_full = tl.allocate_shared_memory(tl.int64, [2, 1], mbarrier.MBarrierLayout())
    {x2}_empty = tl.allocate_shared_memory(tl.int64, [2, 1], mbarrier.MBarrierLayout())
    for k in tl.static_range(2):
        mbarrier.init({x1}_full.index(k), count=1)
        mbarrier.init({x2}_full.index(k), count=1)
        mbarrier.init({x1}_empty.index(k), count=2)
        mbarrier.init({x2}_empty.index(k), count=2)
        mbarrier.init(came.index(k), count=1)
    fence_async_shared()
    given = (
{names},
        __RINGS__,
    )
    tl.warp_specialize(
        [
            (computes, (given, 0, KEPT // 2, FOLDED, INT, PRECISION, RAGGED)),
            (computes, (given, 1, KEPT // 2, FOLDED, INT, PRECISION, RAGGED)),
            (copies, (given, 0, KEPT, FOLDED, INT, PRECISION, RAGGED)),
        ],
        [4, 1],
        [232, 40],
    )
'''.replace("__RINGS__", _RINGS).replace("__CONSTANTS__", _CONSTANTS)
