"""The plan of a kernel: how many indices a program instance owns, how many folded ones a tile has, warps, stages.

The defaults are in a table (``plan/schedule.py``), by what a kernel holds; here they are made to fit in shared
memory. Equal tiles combine in equal order: only a plan's tile sizes can change a result's last digits.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ....plan import settings
from ....plan.schedule import (
    COPIED,
    DEEP,
    FAMILIES,
    FEW,
    FEW_ROWS,
    FEW_STORED,
    FEW_STORED_PAGES,
    MOST_FEW,
    Family,
    Tile,
)
from ..codegen.compiler import Kernel
from ..codegen.kernel_spec import pad_width

FAMILY = FAMILIES["hopper"]  # used when there is no device
WAVES = 4  # program instances of few kept indices, at most, that a multiprocessor has because of splits
LEAST_TILES = 2  # of a split of few kept indices
# Program instances of few kept indices beside one another on a multiprocessor, where vectors are stored in 8 bits or
# fewer: each widens its tile between two barriers, and one alone waits. H200, 128 instances of 8192 columns, 128
# features in int8 and FP8: 0.099 and 0.090 ms by two with three tiles each in flight; by three with two tiles each,
# which is what fits, 0.104 and 0.128.
WIDENING = 2
MOST_SPLITS = 128
BUSY = 0.7  # share of multiprocessors whose reads are nearly all that memory can give
ONE_WAVE = 0.9  # share of multiprocessors below which some are left idle
LONG_TILES = 16  # of a split
# Registers of a thread for a tile's numbers and for sums, by a count above which kernels spill. H200, 16384 x 16384
# pairs of 128 features, a logsumexp with 384 of them and its gradients: 3.59 ms, with half the tile 1.53 (1.58 with two
# stages). With 256 of them half the tile takes 0.87 and 1.10 of the time of two sums.
HELD = 256
NARROWEST = 64  # folded indices to which a tile is cut for registers' sake


class Rendering(enum.IntEnum):
    """Which rendering of a kernel runs: how blocks come to a tile, and who schedules it."""

    LOADS = 0  # scheduled by Triton's compiler; blocks are loaded by pointers
    DESCRIPTORS = 1  # the same; tensor descriptors (TMA) copy blocks where they can
    HAND_SCHEDULED = 2  # written in Gluon, where there is such a kernel (``schedules``)


@dataclass(frozen=True)
class KernelPlan:
    """Tile sizes and how the hardware runs one."""

    block_kept: int
    block_folded: int
    num_warps: int = 4  # of a hand-scheduled kernel: of its first warp group
    num_stages: int = 2  # of the compiler's pipeline; of hand-scheduled attention: blocks in a ring buffer
    splits: int = 0  # of the folded axis (as in split-K); 0: as many as keep the device busy
    rendering: int = Rendering.LOADS  # a ``Rendering``; plan records hold its number


def use_plan(plans: Mapping[str, KernelPlan]) -> contextlib.AbstractContextManager[None]:
    """Fix the plan of kernels over ``"cols"`` or ``"rows"`` inside the block: for tests and tuning."""
    return settings.change(tiles=plans)


def overriding_plans() -> tuple:
    """The plans that ``use_plan`` fixes, as a key of caches."""
    found = settings.current.get().tiles
    return () if found is None else tuple(found.items())


def find_overriding_plan(over: str) -> KernelPlan | None:
    """The plan that ``use_plan`` fixes for a direction, if it does."""
    return (settings.current.get().tiles or {}).get(over)


def choose_plan(
    kernel: Kernel,
    over: str,
    item: int,
    family: Family | None = None,
    copies: bool = False,
    length: int = 0,
    tile: Tile | None = None,
) -> KernelPlan:
    """The plan of a kernel whose matrix products have ``item`` bytes a number, on a family of devices.

    ``copies``: whether tensor descriptors can copy; ``length``: of the kept axis; ``tile``: that of a hand-scheduled
    kernel, where there is one."""
    asked = find_overriding_plan(over)
    if asked:
        return asked
    if tile is not None:
        return KernelPlan(*tile, rendering=Rendering.HAND_SCHEDULED)
    if kernel.traits.pair_features:
        return _plan_pair_vectors(kernel, item)
    if kernel.traits.k_loop:
        return _plan_k_loop(kernel, length, family or FAMILY)
    return _fit_shared_memory(kernel, item, family or FAMILY, copies)


# By features: at most 32 registers a thread for a tile's vectors (64 above 16 features), and few kept indices, whose
# numbers are held by all threads of a vector. With these little spills (compiled for Hopper): nothing by Triton 3.9;
# Triton 3.6 spilled 640 bytes of float32 and 9 kB of float64, with inner products 33 and 223 kB, in tiles of 32 x 16.
_PAIR_VECTOR_TILES = {64: (16, 16, 8), 128: (4, 16, 8), 256: (2, 16, 8)}


def _plan_pair_vectors(kernel: Kernel, item: int) -> KernelPlan:
    """The plan of a kernel that holds a vector per pair."""
    features = kernel.traits.pair_features * (2 if item == 8 else 1)
    widest = max(_PAIR_VECTOR_TILES)
    return next(KernelPlan(*tile, 1) for most, tile in _PAIR_VECTOR_TILES.items() if min(features, widest) <= most)


def _plan_k_loop(kernel: Kernel, length: int, family: Family) -> KernelPlan:
    """The plan of a GEMM of many features with a fold as its epilogue."""
    kind = "draws" if kernel.traits.draws else "", length > FEW_ROWS
    own = family.own.get("product") if length > FEW_ROWS else None
    plan = KernelPlan(*(own or DEEP[kind]), rendering=Rendering.DESCRIPTORS)
    while plan.num_stages > 1 and (plan.block_kept + plan.block_folded) * 128 * plan.num_stages > (
        family.shared * family.spare
    ):
        plan = replace(plan, num_stages=plan.num_stages - 1)
    return plan


def count_splits(plan: KernelPlan, instances: int, tiles: int, processors: int, beside: int = 0) -> int:
    """How many splits the folded axis has: several where kept tiles are too few to fill the device and loops are long.

    A split has at least eight tiles, so that combining the splits costs little beside them. ``beside``: of GEMMs of
    many features, how many kept tiles run at the same time; their splits then fill the device.
    """
    if plan.splits:
        return max(1, min(plan.splits, tiles))
    if beside:
        return _count_even_splits(instances, tiles, processors, -(-processors // beside) if beside < instances else 1)
    if not instances or instances * 2 > processors:
        return 1
    return max(1, min(2 * processors // instances, tiles // 8, 64))


def choose_few_plan(
    kernel: Kernel,
    over: str,
    family: Family | None,
    lengths: tuple[int, int],
    count: int,
    processors: int,
    widens: bool = False,
    pages: bool = False,
) -> KernelPlan:
    """The plan of a kernel of few kept indices, with its splits; ``lengths``: of the kept and the folded axis,
    ``count``: batch elements; ``widens``: whether vectors of the folded axis are stored in 8 bits or fewer; ``pages``:
    whether they lie in pages.

    Where instances are fewer than multiprocessors and long, their tiles are twice as long, so that each has more reads
    in flight (H200, 96 instances of 4096 columns: 49.8 us, else 59.6)."""
    asked = find_overriding_plan(over)
    if asked:
        return asked
    family = family or FAMILY
    widest = next((w for w in FEW if _find_widest(kernel) <= w), max(FEW))
    block = min(MOST_FEW, max(16, 1 << (lengths[0] - 1).bit_length()))
    stored = FEW_STORED_PAGES if pages else FEW_STORED
    folded, warps, stages = (stored if widens else FEW)[widest]
    plan = KernelPlan(block, folded, warps, stages)
    room, least = family.shared * family.spare, 1 + family.ahead
    while (smaller := shrink(plan, least)) is not None and shared_bytes(plan, kernel, 2, family) > room:
        plan = smaller
    if processors <= 1:  # of a device elsewhere: the cost model chooses the splits
        return plan
    instances, tiles = count * -(-lengths[0] // block), -(-lengths[1] // plan.block_folded)
    plan = replace(plan, splits=count_few_splits(instances, tiles, processors * (WIDENING if widens else 1)))
    idle = instances * plan.splits < ONE_WAVE * processors
    longer = replace(plan, block_folded=2 * plan.block_folded, num_stages=max(least, plan.num_stages - 1))
    fits = block <= 32 and shared_bytes(longer, kernel, 2, family) <= room
    return longer if idle and fits and tiles >= LONG_TILES * plan.splits else plan


def count_few_splits(instances: int, tiles: int, processors: int) -> int:
    """How many splits few kept indices have: as many as fit on the device at once, where these leave few
    multiprocessors idle; else the fewest that do.

    One program instance per multiprocessor keeps enough reads in flight: with two or three, more partial results are
    combined and nothing is read faster."""
    most = max(1, min(WAVES * processors // max(instances, 1), tiles // LEAST_TILES, MOST_SPLITS))
    once = min(most, processors // max(instances, 1))
    if instances * once >= BUSY * processors:
        return once
    found, best = 1, 0.0
    for count in range(1, most + 1):
        busy = instances * count / (-(-instances * count // processors) * processors)
        if busy > best * 1.05:
            found, best = count, busy
    return found


def _count_even_splits(instances: int, tiles: int, processors: int, least: int) -> int:
    """The number of splits, each of at least two tiles, that leaves the fewest multiprocessors idle in the last wave.
    Splits differ by a tile at most, the first ones being the longer, so that all multiprocessors have about as much."""
    found, best = 1, 0.0
    most = max(1, min(max(2 * processors // max(1, instances), 2 * least), tiles // 2))
    for count in range(min(least, most), most + 1):
        rounds = -(-instances * count // processors)
        longest = -(-rounds * tiles // count)  # tiles of the multiprocessor that has most
        busy = instances * tiles / (longest * processors)
        if busy > best * 1.01:
            found, best = count, busy
    return found


# Numbers of pairs made of 8-bit products. H200, 10 nearest of 4096 x 10⁶ points, 128 features: 6.7 ms; 64 x 64: 8.9,
# 128 x 64: 7.3, 128 x 128 by 8 warps: 8.5. 32 kept indices (late interaction) by tiles of 32 x 128 and two stages took
# 1.98 of the time in bfloat16, by these 1.60 (two runs, host included).
_EIGHT_BITS = KernelPlan(64, 128, 4, 3)


def _look_up(kernel: Kernel, item: int, family: Family, copies: bool) -> KernelPlan:
    if item == 1:
        return _EIGHT_BITS
    if kernel.traits.pieces:
        return KernelPlan(*family.tile(_find_float32_split_kind(kernel)), rendering=Rendering(copies))
    if kernel.traits.several and item == 2 and not (kernel.widths.state or kernel.widths.stored):
        return KernelPlan(*family.tile("several vectors, 16 bits"), rendering=Rendering(copies))
    copied = COPIED.get(_find_copied_kind(kernel)) if copies and item == 2 else None
    return (
        KernelPlan(*copied, rendering=Rendering.DESCRIPTORS)
        if copied
        else KernelPlan(*family.tile(_find_loaded_kind(kernel, item)))
    )


def _find_copied_kind(kernel: Kernel) -> tuple[int, int, str]:
    """The key of the table for copied blocks: the widest features, how many sums of them are held, what is done."""
    widest = _find_widest(kernel)
    alone = kernel.widths.kept_blocks <= 1 or kernel.widths.state >= 2 * widest
    how = _describe_work(kernel, widest)
    how += "" if alone else " apart" if kernel.traits.sums_other_block and how == "plain" else " gradient"
    few = kernel.widths.folded <= 3 * widest
    return pad_width(widest) if few else 0, min(kernel.widths.state // widest, 2), how


def _describe_work(kernel: Kernel, widest: int) -> str:
    if kernel.widths.state and kernel.widths.folded <= widest:
        return "one block, softmax" if kernel.traits.guesses else "one block"
    if kernel.traits.bounds or kernel.traits.guesses or kernel.traits.exponentials:
        passes = "reads" if kernel.traits.data_masks else "short" if kernel.traits.few_tiles else "passes"
        return passes if kernel.traits.bounds else "softmax" if kernel.traits.guesses else "powers"
    return "gated" if kernel.widths.folded > 2 * widest else "plain"


def _find_widest(kernel: Kernel) -> int:
    return max(kernel.widths.kept // max(kernel.widths.kept_blocks, 1), kernel.widths.state // 2, 16)


def _find_loaded_kind(kernel: Kernel, item: int) -> str:
    """The key of the table for loaded blocks: what a kernel holds."""
    if not kernel.widths.folded and not kernel.widths.state:
        return "few features"
    widest = _find_widest(kernel)
    if item == 8:
        return "float64" if widest <= 128 else "float64, wide"
    if item == 4:
        return "float32, exact" if kernel.traits.exact else "float32" if widest <= 64 else "float32, wide"
    light = widest <= 128 and kernel.widths.kept_blocks <= 1 and kernel.widths.folded <= 2 * widest
    return "16 bits" if widest <= 64 or light else "16 bits, wide"


def _find_float32_split_kind(kernel: Kernel) -> str:
    """The key of the table for float32 vectors that are multiplied in 16-bit pieces."""
    widths, traits = kernel.widths, kernel.traits
    found = "float32, halves" if traits.pieces == 2 else "float32, thirds"
    if traits.close_pairs:
        return f"{found}, close, powers" if traits.exponentials and traits.pieces == 2 else f"{found}, close"
    wide = max(widths.kept // max(widths.kept_blocks, 1) // traits.pieces, widths.state // 2) > 64
    return f"{found}, wide" if wide and traits.pieces == 3 else f"{found}, sums" if widths.state else found


@functools.lru_cache(maxsize=1024)
def _fit_shared_memory(kernel: Kernel, item: int, family: Family, copies: bool) -> KernelPlan:
    """The table's plan, reduced until what it holds fits in registers and its blocks fit in shared memory."""
    plan = _look_up(kernel, item, family, copies)
    while item == 2 and plan.block_folded > NARROWEST and count_registers(plan, kernel) > HELD:
        plan = replace(plan, block_folded=plan.block_folded // 2, num_stages=max(plan.num_stages, 3))
    room, least = family.shared * family.spare, 1 + family.ahead  # fewer stages would hold as much
    while (smaller := shrink(plan, least)) is not None and shared_bytes(plan, kernel, item, family) > room:
        plan = smaller
    return plan


def count_registers(plan: KernelPlan, kernel: Kernel) -> int:
    """Registers of a thread that hold numbers of a tile's pairs, where these are most, and running sums of vectors."""
    held = plan.block_folded * kernel.traits.held_pairs + kernel.widths.state
    return plan.block_kept * held // (32 * plan.num_warps)


def shared_bytes(plan: KernelPlan, kernel: Kernel, item: int, family: Family) -> int:
    """Bytes of the blocks that a plan's kernel holds in shared memory; on Hopper weights stay in registers."""
    widths, stages = kernel.widths, max(1, plan.num_stages - family.ahead)
    kept, folded = widths.kept, widths.folded * stages
    if kernel.traits.several:  # the loop over the vectors is pipelined, not that over tiles
        kept, folded = kept + widths.each_kept * (stages - 1), widths.folded + widths.each_folded * (stages - 1)
    weights = plan.block_kept * plan.block_folded if family.ahead else 0
    stored = plan.block_kept * widths.stored * max(item, 4)
    return (plan.block_kept * kept + plan.block_folded * folded + weights) * item + stored


def shrink(plan: KernelPlan, stages: int = 1) -> KernelPlan | None:
    """The next smaller plan; None at the smallest. ``stages``: the fewest."""
    if plan.num_stages > stages:
        return replace(plan, num_stages=plan.num_stages - 1)
    if plan.block_folded > 16:
        return replace(plan, block_folded=plan.block_folded // 2)
    return replace(plan, block_kept=plan.block_kept // 2) if plan.block_kept > 16 else None


def limit_registers(consumers: int) -> dict[str, int]:
    """Compiler options of a kernel with so many consumer warp groups and a producer; none without a producer.

    A multiprocessor has 65536 registers. At the start every warp group has as many, also the producer's, of which three
    warps are idle; ``warp_specialize`` then reassigns them. The count is a multiple of 8."""
    return {"maxnreg": 65536 // (128 * (consumers + 1)) // 8 * 8} if consumers else {}
