"""The text of sums of vectors with a panel's weights, as two groups of warps take turns at them
(``engines/triton/panel/contraction.py``).

A tile is 192 kept indices, three runs of 64, and 128 features. ``weights`` is a block of a run's kept and some folded
indices, ``vectors`` one of folded indices and a tile's features: one warp, ahead of both groups, copies them into a
ring (see ``pingpong_template.py``, whose turns these are). What is written goes through places in shared memory, 64
features
of a run at a time. What is added to comes to the same places: a group asks for the first pieces before it multiplies,
and for another whenever one was written.
"""

from __future__ import annotations

import functools

from ..codegen import kernel_text
from .pingpong_template import _IMPORTS
from .template_lines import in_gluon, inside

RUN, RUNS = 64, 3  # kept indices of a run, and runs of a tile: the matrix units' own height, so that nothing is halved
TILE = RUN * RUNS
WIDTH = 128  # features of a tile
DEPTH = 64  # folded indices of a block
PIECE = 64  # features that are written at a time: sums leave registers for no more
PLACES = 4  # pieces of a group in shared memory; the ring takes what is left

_NAMES = "weights_box, vectors_box, out_box, blocks, tiles, turns"
_RINGS = "weights, vectors, room, full, empty, order, came"
_STAGES = 4  # blocks of the ring
_SUMS = ", ".join(f"sum{r}" for r in range(RUNS))

_KERNEL = """
@gluon.jit
def copies(
    {names},
    {rings},
    SIDE: tl.constexpr,
    {constants},
):
    at = 0
    for program in range(tl.program_id(0), tiles * turns, tl.num_programs(0)):
        row, col = grouped(program, tiles, turns, 16)
        for k in range(0, blocks):
            slot = at % {stages}
            mbarrier.wait(empty.index(slot), (at // {stages} & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, {bytes})
            for r in tl.static_range({runs}):
                copy(weights_box, {weights_at}, bar, weights.index(slot * {runs} + r))
            copy(vectors_box, [k * FOLDED, col * {width}], bar, vectors.index(slot))
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
    SUMS: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {width}, 16])
    PIECE: tl.constexpr = tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {piece}, 16])
    FIRST: tl.constexpr = SIDE * {places}
{begin}
    at = SIDE * blocks
    phase = 1 - SIDE
    done = 0
    first = tl.program_id(0) + SIDE * tl.num_programs(0)
    for program in range(first, tiles * turns, 2 * tl.num_programs(0)):
        row, col = grouped(program, tiles, turns, 16)
        row = row * {tile}
        col = col * {width}{ask}
        # a tile's product, when it is this group's turn
        mbarrier.wait(order.index(SIDE), phase)
        for k in range(0, blocks):
            slot = at % {stages}
            mbarrier.wait(full.index(slot), at // {stages} & 1)
            block = vectors.index(slot)
{multiply}
            {sums} = warpgroup_mma_wait({runs}, deps=[{sums}])
            mbarrier.arrive(empty.index((at + {stages} - 1) % {stages}), pred=k > 0)
            at += 1
        mbarrier.arrive(order.index(1 - SIDE))
        {sums} = warpgroup_mma_wait(0, deps=[{sums}])
        mbarrier.arrive(empty.index((at - 1) % {stages}))
        at += blocks
        phase ^= 1
{pieces}
        done += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=['blocks', 'tiles', 'turns'])
def {name}(
    {names},
    {constants},
):
    weights = tl.allocate_shared_memory({narrow}, [{slots}] + weights_box.block_type.shape, weights_box.layout)
    vectors = tl.allocate_shared_memory({narrow}, [{stages}] + vectors_box.block_type.shape, vectors_box.layout)
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
# The pieces: the run of each, and the feature at which it begins.
_EACH = [(run, at) for run in range(RUNS) for at in range(0, WIDTH, PIECE)]


@functools.cache
def kernel(narrow: str, over: str, add: bool) -> kernel_text.Kernel:
    """Write out[kept, features] (+)= Σ weights × vectors. ``narrow``: the type of all of them; ``over``: "cols" where
    weights lie kept index by kept index, "rows" where they lie folded index by folded index."""
    ask = ["tma.store_wait(0)", *map(_asked, range(PLACES))] if add else []
    kept, turned = f"row * {TILE} + r * KEPT", "" if over == "cols" else ".permute((1, 0))"
    zeros = [f"sum{r} = tl.zeros([KEPT, {WIDTH}], tl.float32, SUMS)" for r in range(RUNS)]
    runs = [f"weights.index(slot * {RUNS} + {r}){turned}" for r in range(RUNS)]
    sums = [f"sum{r} = warpgroup_mma({w}, block, sum{r}, use_acc=k > 0, is_async=True)" for r, w in enumerate(runs)]
    body = _KERNEL.format(
        name=f"contract_{over}" + ("_added" if add else ""),
        names=_NAMES,
        rings=_RINGS,
        constants=", ".join(f"{c}: tl.constexpr" for c in kernel_text.CONSTANTS),
        narrow=f"tl.{narrow}",
        tile=TILE,
        runs=RUNS,
        width=WIDTH,
        piece=PIECE,
        places=PLACES,
        stages=_STAGES,
        slots=_STAGES * RUNS,
        bytes=2 * DEPTH * (TILE + WIDTH),
        weights_at=f"[{kept}, k * FOLDED]" if over == "cols" else f"[k * FOLDED, {kept}]",
        sums=_SUMS,
        begin=inside(zeros, 4),
        multiply=inside(sums, 12),
        ask="\n" + inside(ask, 8) if add else "",
        pieces=inside(_written(narrow, add), 8),
    )
    helpers = in_gluon(kernel_text.copy_device_functions(body))
    says = f'"""Sums of {narrow} vectors with weights, over {over}."""\n\n'
    name = body[body.rindex("def ") + 4 :].split("(")[0]
    return kernel_text.Kernel(name, says + "\n".join([_IMPORTS, *helpers, body]), (), staged=True)


def _place(piece: int) -> str:
    return f"FIRST + {piece % PLACES}"


def _at(piece: int) -> str:
    run, at = _EACH[piece]
    return f"row + {run} * KEPT, col + {at}"


def _asked(piece: int) -> str:
    return f"asked(out_box, room.index({_place(piece)}), came.index({_place(piece)}), {_at(piece)})"


def _written(narrow: str, add: bool) -> list[str]:
    """Pieces are added to, where sums are, and written. When the next is, another is asked for in its place."""
    found = [f"piece{2 * r}, piece{2 * r + 1} = halved(sum{r})" for r in range(RUNS)]
    for k in range(len(_EACH)):
        place, uses = _place(k), -(-(len(_EACH) - k % PLACES) // PLACES)  # of a place in a tile
        found.append(f"piece{k} = tl.convert_layout(piece{k}, PIECE)")
        if add:
            found.append(f"mbarrier.wait(came.index({place}), (done * {uses} + {k // PLACES}) & 1)")
            found.append(f"piece{k} += room.index({place}).load(PIECE).to(tl.float32)")
        else:
            found.append(f"tma.store_wait({PLACES - 1})")
        found.append(f"written(out_box, room.index({place}), {_at(k)}, piece{k}.to(tl.{narrow}))")
        later = k - 1 + PLACES
        if add and k > 0 and later < len(_EACH):
            found += ["tma.store_wait(1)", _asked(later)]
    return found
