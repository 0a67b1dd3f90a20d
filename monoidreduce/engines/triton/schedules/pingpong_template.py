"""The text of products with an epilogue whose copies, products and arithmetic take turns (``pingpong.py`` fills it in).

``{x0}``: the kept vectors, ``{x1}``: those they are multiplied with. Two groups of four warps take tiles of pairs by
turns: while one multiplies its tile, the other does the arithmetic of its own. ``copies`` runs in one warp, and is
ahead of both: it fetches blocks of both sides for one tile after the other. Wide tiles have 64 folded indices more,
``others``, whose products are ``rest``. A ring's ``full`` barriers say that blocks
came, its ``empty`` ones that they are done with; their phase is the parity of the round. A group may look at the ring
when the other has seen all of its own blocks (``order``): before, it could take the last round for this one.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ....program.expression import Expr
from ..codegen import k_loop, kernel_text
from ..codegen.kernel_spec import Spec
from .attention_template import IMPORTS
from .template_lines import in_gluon

_IMPORTS = f"""{IMPORTS}write = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
"""
TILE = 128  # kept and folded indices of a tile
OTHERS = 64  # folded indices more of a wide tile: fewer bytes are read for every product
# Features of folds, and of weights in narrow tiles: beyond, the compiler's larger tiles are as fast or faster on a chip
# at its power limit, since they read less (H200: a forward of 4096 features took 14.0 ms by turns, in wide tiles, and
# 13.4 otherwise, calls queued).
DEEPEST = 3072

_CONSTANTS = ", ".join(f"{c}: tl.constexpr" for c in kernel_text.CONSTANTS)
_RINGS = "kept, folded, __OTHERS__room, full, empty, order"

_KERNEL = """
@gluon.jit
def fetched(kept_box, folded_box, __BOX__kept, folded, __OTHERS__full, empty, row, col, at):
    # begin to copy a tile's blocks, wherever there is room
    for d in range(0, {blocks}):
        slot = at % {stages}
        mbarrier.wait(empty.index(slot), (at // {stages} & 1) ^ 1)
        mbarrier.expect(full.index(slot), kept_box.block_type.nbytes + folded_box.block_type.nbytes__BYTES__)
        copy(kept_box, [row, d * {depth}], full.index(slot), kept.index(slot))
        copy(folded_box, [col, d * {depth}], full.index(slot), folded.index(slot))__COPY__
        at += 1
    return at


@gluon.jit
def multiplied(kept, folded, __OTHERS__full, empty, order, at, phase, __SCORES__, SIDE: tl.constexpr):
    # a tile's product, when it is this group's turn
    mbarrier.wait(order.index(SIDE), phase)
    for d in range(0, {blocks}):
        slot = at % {stages}
        mbarrier.wait(full.index(slot), at // {stages} & 1)
        block = folded.index(slot).permute((1, 0))
        score = warpgroup_mma(kept.index(slot), block, score, use_acc=d > 0, is_async=True)__MULTIPLY__
        __SCORES__ = warpgroup_mma_wait(__BEGUN__, deps=[__SCORES__])
        mbarrier.arrive(empty.index((at + {stages} - 1) % {stages}), pred=d > 0)
        at += 1
    mbarrier.arrive(order.index(1 - SIDE))
    __SCORES__ = warpgroup_mma_wait(0, deps=[__SCORES__])
    mbarrier.arrive(empty.index((at - 1) % {stages}))
    return __SCORES__


__PARTITIONS__


@gluon.jit(do_not_specialize={unspecialized})
def {name}(
{names},
    __CONSTANTS__,
):
    kept = tl.allocate_shared_memory({narrow}, [{stages}] + {x0}_box.block_type.shape, {x0}_box.layout)
    folded = tl.allocate_shared_memory({narrow}, [{stages}] + {x1}_box.block_type.shape, {x1}_box.layout)__RING__
    room = __ROOM__
    full = tl.allocate_shared_memory(tl.int64, [{stages}, 1], mbarrier.MBarrierLayout())
    empty = tl.allocate_shared_memory(tl.int64, [{stages}, 1], mbarrier.MBarrierLayout())
    order = tl.allocate_shared_memory(tl.int64, [2, 1], mbarrier.MBarrierLayout())
    for k in tl.static_range({stages}):
        mbarrier.init(full.index(k), count=1)
        mbarrier.init(empty.index(k), count=1)
    for k in tl.static_range(2):
        mbarrier.init(order.index(k), count=1)
    fence_async_shared()
    tl.warp_specialize([
        (computes, (
{names},
    __RINGS__,
    0, __OWN__, FOLDED, INT, PRECISION, RAGGED,
        )),
        (computes, (
{names},
    __RINGS__,
    1, __OWN__, FOLDED, INT, PRECISION, RAGGED,
        )),
        (copies, (
{names},
    __RINGS__,
    0, __OWN__, FOLDED, INT, PRECISION, RAGGED,
        )),
    ], [4, 1], [__REGISTERS__])
"""

# Weights are written: tiles in any order, each as a group is free. What is written goes through shared memory.
_WRITES = """@gluon.jit
def copies(
{names},
    __RINGS__,
    SIDE: tl.constexpr, __CONSTANTS__,
):
    turns = tl.cdiv(folded_size, FOLDED)
    at = 0
    for program in range(tl.program_id(0), tiles * turns, tl.num_programs(0)):
        tile, turn = grouped(program, tiles, turns, 16)
        row, col = tile * KEPT, turn * FOLDED
        at = fetched({x0}_box, {x1}_box, __BOX__kept, folded, __OTHERS__full, empty, row, col, at)


@gluon.jit
def written(box, room, row, col, block):
    # when what was there before is on its way
    tma.store_wait(0)
    room.store(block)
    fence_async_shared()
    write(box, [row, col], room)


@gluon.jit
def computes(
{names},
    __RINGS__,
    SIDE: tl.constexpr, __CONSTANTS__,
):
    HALF: tl.constexpr = {others}
    SCORES: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {tile}, 16])
    PAIRS: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    turns = tl.cdiv(folded_size, FOLDED)
    b0 = tl.cast(0, tl.int64)
    room = room.index(SIDE)
    kept_lane = tl.arange(0, KEPT, tl.SliceLayout(1, PAIRS)).to(INT)
    half_lane = tl.arange(0, HALF, tl.SliceLayout(0, PAIRS)).to(INT)
    at = SIDE * {blocks}
    phase = 1 - SIDE
    first = tl.program_id(0) + SIDE * tl.num_programs(0)
    for program in range(first, tiles * turns, 2 * tl.num_programs(0)):
        tile, turn = grouped(program, tiles, turns, 16)
        kept_at = tile * KEPT + tl.arange(0, KEPT, tl.SliceLayout(1, PAIRS))
        kept_in = kept_at < kept_size
{first}
        __SCORES__ = __ZEROS__
        __SCORES__ = multiplied(kept, folded, __OTHERS__full, empty, order, at, phase, __SCORES__, SIDE)
        at += 2 * {blocks}
        phase ^= 1
        scores0, scores1 = halved(score)
        scores0, scores1 = tl.convert_layout(scores0, PAIRS), tl.convert_layout(scores1, PAIRS)__STRIP__
{lines}
    tma.store_wait(0)
"""

# Pairs are folded: a group walks the folded side for kept indices of its own.
_FOLDS = """@gluon.jit
def copies(
{names},
    __RINGS__,
    SIDE: tl.constexpr, __CONSTANTS__,
):
{opening}
    at = 0
    for turn in range(begin, end):
        for side in tl.static_range(2):
            row = (tile * 2 + side) * KEPT
            at = fetched({x0}_box, {x1}_box, __BOX__kept, folded, __OTHERS__full, empty, row, turn * FOLDED, at)


@gluon.jit
def computes(
{names},
    __RINGS__,
    SIDE: tl.constexpr, __CONSTANTS__,
):
    SCORES: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {tile}, 16])
    PAIRS: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, __ACROSS__, 16])
    ROWS: tl.constexpr = tl.SliceLayout(1, PAIRS)
{opening}
    tile = tile * 2 + SIDE
    kept_at = tile * KEPT + tl.arange(0, KEPT, ROWS)
    kept_in = kept_at < kept_size
    kept_lane = tl.arange(0, KEPT, ROWS).to(INT)
{before}

    # running values
    __SCORES__ = __ZEROS__
{begin}

    at = SIDE * {blocks}
    phase = 1 - SIDE
    for turn in range(begin, wholes):
        __SCORES__ = multiplied(kept, folded, __OTHERS__full, empty, order, at, phase, __SCORES__, SIDE)
        at += 2 * {blocks}
        phase ^= 1
{whole}
    if RAGGED:
        # the end of the folded side
        for turn in range(tl.maximum(begin, wholes), end):
            __SCORES__ = __ZEROS__
            __SCORES__ = multiplied(kept, folded, __OTHERS__full, empty, order, at, phase, __SCORES__, SIDE)
            at += 2 * {blocks}
            phase ^= 1
{other}

    # results
{results}
"""


# What a wide tile has besides: a block more to copy and to multiply.
_WIDE = {
    "__OTHERS__": "others, ",
    "__BOX__": "others_box, ",
    "__SCORES__": "score, rest",
    "__STRIP__": "\n        scores2 = rest",
    "__BEGUN__": "2",
    "__ACROSS__": "{others}",
    "__REGISTERS__": "240, 24",
    "__BYTES__": " + others_box.block_type.nbytes",
    "__COPY__": """
        copy(others_box, [col + {tile}, d * {depth}], full.index(slot), others.index(slot))""",
    "__MULTIPLY__": """
        block = others.index(slot).permute((1, 0))
        rest = warpgroup_mma(kept.index(slot), block, rest, use_acc=d > 0, is_async=True)""",
    "__RING__": """
    others = tl.allocate_shared_memory({narrow}, [{stages}] + others_box.block_type.shape, others_box.layout)""",
    "__ZEROS__": "tl.zeros([KEPT, {tile}], tl.float32, SCORES), tl.zeros([KEPT, {others}], tl.float32, PAIRS)",
}
_NARROW = dict.fromkeys(_WIDE, "") | {
    "__SCORES__": "score",
    "__BEGUN__": "1",
    "__ACROSS__": "{tile}",
    "__REGISTERS__": "232, 40",
    "__ZEROS__": "tl.zeros([KEPT, {tile}], tl.float32, SCORES)",
}


def _text(partitions: str, room: str, own: str, stages: int, wide: bool = False) -> str:
    text = _KERNEL.replace("__PARTITIONS__", partitions.rstrip()).replace("__ROOM__", room).replace("__OWN__", own)
    text = text.replace("__RINGS__", _RINGS).replace("__CONSTANTS__", _CONSTANTS)
    for token, found in (_WIDE if wide else _NARROW).items():
        text = text.replace(token, found)
    return text.replace("{stages}", str(stages))


# Rings take all of shared memory that is left.
_PLACE = "tl.allocate_shared_memory({narrow}, [2] + out_box.block_type.shape, out_box.layout)"
WRITES = {TILE: _text(_WRITES, _PLACE, "KEPT", 6), TILE + OTHERS: _text(_WRITES, _PLACE, "KEPT", 4, wide=True)}
FOLDS = {TILE: _text(_FOLDS, "0", "KEPT // 2", 7), TILE + OTHERS: _text(_FOLDS, "0", "KEPT // 2", 5, wide=True)}
_Strips = tuple[tuple[str, int, int], ...]  # of a tile: what, from where on, and how wide
_STRIPS: dict[int, _Strips] = {
    TILE: (("score", 0, TILE),),
    TILE + OTHERS: (("rest", TILE, OTHERS), ("score", 0, TILE)),
}
# the same where labels are looked for: 64 indices at a time need no registers that wide tiles have not
_PICKED: dict[int, _Strips] = {
    TILE: _STRIPS[TILE],
    TILE + OTHERS: (("first", 0, OTHERS), ("second", OTHERS, OTHERS), ("rest", TILE, OTHERS)),
}


def in_strips(lines: Sequence[str], folded: int, masked: bool) -> list[str]:
    """What is done to ``pairs``, for each run of a tile's folded indices: to the products where they lie, since there
    are no registers for others. The two runs have layouts of different names, in which everything lies alike."""
    found = []
    for name, at, wide in _STRIPS[folded]:
        found += [*_places(at, wide, masked), f"{name} = tl.convert_layout({name}, PAIRS)"]
        found += [re.sub(r"\bFOLDED\b", str(wide), re.sub(r"\bpairs\b", name, line)) for line in lines]
    return [*found, "score = tl.convert_layout(score, SCORES)"]


def where_met(own: str, lines: Sequence[str], folded: int) -> list[str]:
    """The same before, of lines that do nothing but where some kept index's ``own`` folded one is: runs that end before
    the next of these are left alone."""
    found = ["first, second = halved(score)"] if folded > TILE else []
    for k, (name, at, wide) in enumerate(_PICKED[folded]):
        own_lines = [*_places(at, wide, False), f"pairs = tl.convert_layout({name}, PAIRS)"]
        own_lines += [re.sub(r"\bFOLDED\b", str(wide), line) for line in lines]
        own_lines.append(f"next_own = {next_own(own, f'start + {wide}')}")
        found.append(f"if next_own < turn * FOLDED + {at + wide}:")
        found += ["    " + _OWN.sub(rf"\g<0>{k}", line) for line in own_lines]
    return found


def next_own(own: str, start: str) -> str:
    """The first folded index from ``start`` on that is some kept index's own."""
    return f"tl.min(tl.min(tl.where({own} >= {start}, {own}, 2147483647), 1), 0)"


def met(own: str) -> str:
    """Whether a tile holds some kept index's own folded one."""
    return f"{next_own(own, 'turn * FOLDED')} < (turn + 1) * FOLDED"


_OWN = re.compile(r"\b(start|folded_lane|folded_at|folded_in|pairs)\b")  # names that are meant for one strip


def _places(at: int, wide: int, masked: bool) -> list[str]:
    return [
        f"start = turn * FOLDED + {at}",
        f"folded_lane = tl.arange(0, {wide}, tl.SliceLayout(0, PAIRS)).to(INT)",
        f"folded_at = start + tl.arange(0, {wide}, tl.SliceLayout(0, PAIRS))",
        *(["folded_in = folded_at < folded_size"] if masked else []),
    ]


# What Gluon has not, or has to be told a layout for.
_STRANGE = re.compile(r"tl\.(philox|PropagateNan|dot|trans)\b|tl\.(zeros|full|arange)\((?!.*(ROWS|PAIRS)\))")


def rendered(
    text: str,
    plain: kernel_text.Kernel,
    spec: Spec,
    sides: tuple[Expr, Expr],
    signature: tuple[list[str], list[str]],
    lines: Mapping[str, tuple[int, Sequence[str]]],
) -> kernel_text.Kernel | None:
    """A text filled in, in place of another rendering of a kernel; None where its lines have strange words.

    ``sides``: what is multiplied, the kept side first; ``signature``: the arguments, and those not to specialize on;
    ``lines``: by field, and by how much they are indented."""
    width = spec.width(sides[0].feature)
    names, unspecialized = signature
    fields = {field: textwrap.indent("\n".join(found), " " * by) for field, (by, found) in lines.items()}
    body = text.format(
        name=plain.name,
        names=textwrap.fill(", ".join(names), 110, initial_indent="    ", subsequent_indent="    "),
        unspecialized=repr(unspecialized),
        x0=sides[0].attrs[0],
        x1=sides[1].attrs[0],
        narrow=f"tl.{spec.narrow}",
        tile=TILE,
        others=OTHERS,
        depth=k_loop.DEPTH,
        blocks=-(-width // k_loop.DEPTH),
        **fields,
    )
    helpers = in_gluon(kernel_text.copy_device_functions(body))
    if _STRANGE.search("\n".join([*fields.values(), *helpers])):
        return None
    whole = "\n".join([kernel_text.write_header(spec, list(plain.leaves), _IMPORTS), *helpers, body])
    return replace(plain, text=whole, staged=True)
