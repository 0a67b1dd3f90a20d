"""The text of sums of vectors with a panel's weights, as two groups of warps take turns at them (``wide/contract.py``).

``weights`` are a block of kept and folded indices, ``vectors`` (and ``others``, the features beyond 128) one of folded
indices and features, copied into a ring by one warp that is ahead of both groups (see ``paired_text.py``, whose turns
these are). What is written goes through places in shared memory, some features at a time. What is added to comes to
the same places: a group asks for the first pieces before it multiplies, for the others as places are written.

Tiles are whole, or the last of them are in parts (``RAGGED``): each part's sums go to ``sums``, to be added up after.
"""

from __future__ import annotations

import functools
import textwrap
from dataclasses import dataclass
from typing import Any

from . import emit
from .paired_text import _IMPORTS, TILE

DEPTH = 64  # folded indices of a block
OTHERS = 64  # features of the second block, where a tile has one


@dataclass(frozen=True)
class Form:
    """What is summed and how: the type, the axis that is summed over, whether sums are added to, features of a tile."""

    narrow: str  # the type of weights and vectors, and of sums as they are written
    over: str  # "cols": weights lie kept index by kept index; "rows": folded index by folded index
    add: bool
    width: int

    @property
    def piece(self) -> int:
        """Features that are written at a time: of the wider tiles, whose sums leave few registers, fewer."""
        return 64 if self.width == TILE else 32

    @property
    def places(self) -> int:
        """Pieces of a group in shared memory: 32 KB of it."""
        return 2**15 // (TILE * self.piece * 2)

    @property
    def stages(self) -> int:
        """Of the ring: all of shared memory that is left."""
        return 5 if self.width == TILE else 4


_NAMES = "weights_box, vectors_box, {others_box}out_box, sums, whole, tail, parts, blocks, tiles, turns, units"
_RINGS = "weights, vectors, {others}room, full, empty, order, came"
_CONSTANTS = ", ".join(f"{c}: tl.constexpr" for c in emit.CONSTANTS)

_KERNEL = """
@gluon.jit
def span(unit, whole, tail, parts, blocks, RAGGED: tl.constexpr):
    # which tile, and which of its blocks: whole tiles first, then the first parts of the others, the second, ...
    tile = unit
    begin = 0
    end = blocks
    if RAGGED:
        if unit >= whole:
            tile = whole + (unit - whole) % tail
            part = (unit - whole) // tail
            begin = part * blocks // parts
            end = (part + 1) * blocks // parts
    return tile, begin, end


@gluon.jit
def copies(
    {names},
    {rings},
    SIDE: tl.constexpr,
    {constants},
):
    at = 0
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        tile, begin, end = span(unit, whole, tail, parts, blocks, RAGGED)
        row, col = grouped(tile, tiles, turns)
        for k in range(begin, end):
            slot = at % {stages}
            mbarrier.wait(empty.index(slot), (at // {stages} & 1) ^ 1)
            mbarrier.expect(full.index(slot), {bytes})
            copy(weights_box, {weights_at}, full.index(slot), weights.index(slot))
            copy(vectors_box, [k * FOLDED, col * {width}], full.index(slot), vectors.index(slot)){copy_others}
            at += 1


@gluon.jit
def asked(box, place, bar, row, col):
    # begin to fetch what is added to
    mbarrier.expect(bar, box.block_type.nbytes)
    copy(box, [row, col], bar, place)


@gluon.jit
def written(box, place, row, col, block):
    place.store(block)
    fence_async_shared()
    write(box, [row, col], place)


@gluon.jit
def computes(
    {names},
    {rings},
    SIDE: tl.constexpr,
    {constants},
):
    SUMS: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {tile}, 16])
    PIECE: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {piece}, 16])
    FIRST: tl.constexpr = SIDE * {places}
    total = tl.zeros([KEPT, {tile}], tl.float32, SUMS){begin_others}
    step = tl.num_programs(0)
    at = 0
    if SIDE > 0:
        if tl.program_id(0) < units:
            _, begin, end = span(tl.program_id(0), whole, tail, parts, blocks, RAGGED)
            at = end - begin
    phase = 1 - SIDE
    done = 0
    for unit in range(tl.program_id(0) + SIDE * step, units, 2 * step):
        tile, begin, end = span(unit, whole, tail, parts, blocks, RAGGED)
        row, col = grouped(tile, tiles, turns)
        row = row * KEPT
        col = col * {width}{ask}
        # a tile's product, when it is this group's turn
        mbarrier.wait(order.index(SIDE), phase)
        for k in range(begin, end):
            slot = at % {stages}
            mbarrier.wait(full.index(slot), at // {stages} & 1)
            block = weights.index(slot){turned}
{multiply}
            mbarrier.arrive(empty.index((at + {stages} - 1) % {stages}), pred=k > begin)
            at += 1
        mbarrier.arrive(order.index(1 - SIDE))
        {sums} = warpgroup_mma_wait(0, deps=[{sums}])
        mbarrier.arrive(empty.index((at - 1) % {stages}))
        phase ^= 1
        if unit + step < units:
            _, begin, end = span(unit + step, whole, tail, parts, blocks, RAGGED)
            at += end - begin
{pieces}
        if unit < whole:
{whole}
            done += 1
        elif RAGGED:
            line = tl.arange(0, KEPT, tl.SliceLayout(1, PIECE))[:, None] * {width}
            lane = tl.arange(0, {piece}, tl.SliceLayout(0, PIECE))[None, :]
            place = sums + tl.cast(unit - whole, tl.int64) * (KEPT * {width}) + (line + lane)
{parted}
    tma.store_wait(0)


@gluon.jit(do_not_specialize=['whole', 'tail', 'parts', 'blocks', 'tiles', 'turns', 'units'])
def {name}(
    {names},
    {constants},
):
    weights = tl.allocate_shared_memory({narrow}, [{stages}] + weights_box.block_type.shape, weights_box.layout)
    vectors = tl.allocate_shared_memory({narrow}, [{stages}] + vectors_box.block_type.shape, vectors_box.layout){others}
    room = tl.allocate_shared_memory({narrow}, [2 * {places}] + out_box.block_type.shape, out_box.layout)
    full = tl.allocate_shared_memory(tl.int64, [{stages}, 1], mbarrier.MBarrierLayout())
    empty = tl.allocate_shared_memory(tl.int64, [{stages}, 1], mbarrier.MBarrierLayout())
    order = tl.allocate_shared_memory(tl.int64, [2, 1], mbarrier.MBarrierLayout())
    came = tl.allocate_shared_memory(tl.int64, [2 * {places}, 1], mbarrier.MBarrierLayout())
    for k in tl.static_range({stages}):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=1)
    for k in tl.static_range(2):
        mbarrier.init(order.index(k), count=1)
    for k in tl.static_range(2 * {places}):
        mbarrier.init(came.index(k), count=1)
    fence_async_shared()
    tl.warp_specialize([
        (computes, (
    {names},
    {rings},
    0, KEPT, FOLDED, INT, PRECISION, RAGGED,
        )),
        (computes, (
    {names},
    {rings},
    1, KEPT, FOLDED, INT, PRECISION, RAGGED,
        )),
        (copies, (
    {names},
    {rings},
    0, KEPT, FOLDED, INT, PRECISION, RAGGED,
        )),
    ], [4, 1], [232, 40])
"""

_ONE = """
total = warpgroup_mma(block, vectors.index(slot), total, use_acc=k > begin, is_async=True)
total = warpgroup_mma_wait(1, deps=[total])
"""
_TWO = """
total = warpgroup_mma(block, vectors.index(slot), total, use_acc=k > begin, is_async=True)
rest = warpgroup_mma(block, others.index(slot), rest, use_acc=k > begin, is_async=True)
total, rest = warpgroup_mma_wait(2, deps=[total, rest])
"""


# What tiles of more than 128 features have besides: a second block of vectors, and its sums.
_OTHERS = {
    "others": """
    others = tl.allocate_shared_memory({narrow}, [{stages}] + others_box.block_type.shape, others_box.layout)""",
    "begin_others": """
    REST: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rest = tl.zeros([KEPT, 64], tl.float32, REST)""",
    "copy_others": """
            copy(others_box, [k * FOLDED, col * {width} + {tile}], full.index(slot), others.index(slot))""",
}


@functools.cache
def kernel(form: Form) -> emit.Kernel:
    """Write out[kept, features] (+)= Σ weights × vectors."""
    wide = form.width > TILE
    copied = ("weights_box", "vectors_box", "others_box")[: 2 + wide]
    fields: dict[str, Any] = {
        "name": f"contract_{form.over}" + ("_added" if form.add else ""),
        "names": _NAMES.format(others_box="others_box, " if wide else ""),
        "rings": _RINGS.format(others="others, " if wide else ""),
        "constants": _CONSTANTS,
        "narrow": f"tl.{form.narrow}",
        "tile": TILE,
        "width": form.width,
        "piece": form.piece,
        "places": form.places,
        "stages": form.stages,
        "weights_at": "[row * KEPT, k * FOLDED]" if form.over == "cols" else "[k * FOLDED, row * KEPT]",
        "turned": "" if form.over == "cols" else ".permute((1, 0))",
        "sums": "total, rest" if wide else "total",
        "bytes": " + ".join(f"{x}.block_type.nbytes" for x in copied),
        "multiply": _lines(12, (_TWO if wide else _ONE).strip().splitlines()),
        "pieces": _lines(8, _pieces(form)),
        "whole": _lines(12, _whole(form)),
        "parted": _lines(12, [f"tl.store(place + {at}, piece{k})" for k, at in _each(form)]),
    }
    fields["ask"] = "\n" + _lines(8, ["if unit < whole:", "    tma.store_wait(0)", *_asks(form)]) if form.add else ""
    fields |= {name: text.format(**fields) if wide else "" for name, text in _OTHERS.items()}
    body = _KERNEL.format(**fields)
    helpers = [helper.replace("@triton.jit", "@gluon.jit") for helper in emit._copied(body)]
    says = f'"""Sums of {form.narrow} vectors with weights, over {form.over}."""\n\n'
    return emit.Kernel(fields["name"], says + "\n".join([_IMPORTS, *helpers, body]), (), staged=True)


def _lines(by: int, lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines), " " * by)


def _each(form: Form) -> list[tuple[int, int]]:
    """The pieces, and where each begins."""
    return list(enumerate(range(0, form.width, form.piece)))


def _pieces(form: Form) -> list[str]:
    """A tile's sums, cut into pieces."""
    blocks, found = [("total", TILE), *([("rest", OTHERS)] if form.width > TILE else [])], []
    while any(width > form.piece for _, width in blocks):
        smaller: list[tuple[str, int]] = []
        for name, width in blocks:
            halves = (f"{name}0", f"{name}1") if width > form.piece else ()
            found += [f"{halves[0]}, {halves[1]} = halved({name})"] if halves else []
            smaller += [(half, width // 2) for half in halves] or [(name, width)]
        blocks = smaller
    return found + [f"piece{k} = tl.convert_layout({name}, PIECE)" for k, (name, _) in enumerate(blocks)]


def _asks(form: Form) -> list[str]:
    return [f"    {_asked(form, k, at)}" for k, at in _each(form)[: form.places]]


def _asked(form: Form, k: int, at: int) -> str:
    place = f"FIRST + {k % form.places}"
    return f"asked(out_box, room.index({place}), came.index({place}), row, col + {at})"


def _whole(form: Form) -> list[str]:
    """Pieces are added to, where sums are, and written; the next is asked for when the one before was read."""
    found, each, places = [], _each(form), form.places
    for k, at in each:
        place = f"FIRST + {k % places}"
        if form.add:
            uses = -(-(len(each) - k % places) // places)  # of a place in a tile
            found.append(f"mbarrier.wait(came.index({place}), (done * {uses} + {k // places}) & 1)")
            found.append(f"piece{k} += room.index({place}).load(PIECE).to(tl.float32)")
        else:
            found.append(f"tma.store_wait({places - 1})")
        found.append(f"written(out_box, room.index({place}), row, col + {at}, piece{k}.to(tl.{form.narrow}))")
        later = k - 1 + places
        if form.add and k > 0 and later < len(each):
            found += ["tma.store_wait(1)", _asked(form, later, each[later][1])]
    return found
