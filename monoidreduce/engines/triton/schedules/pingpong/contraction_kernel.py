"""Contractions of a panel's weights with vectors by two ping-pong consumers: out (+)= Σ weights × vectors.

A tile is 192 kept indices, three runs of 64 (the rows of one wgmma), and 128 features. The producer copies blocks of
weights and vectors into one ring buffer, ahead of both consumers; a consumer runs the K loop of its tile while the
other stores its own (``order`` barriers, as in ``gemm_fold.py``). Results go through shared memory in pieces of 64
features of a run. What is added to comes through the same slots: a consumer asks for the first pieces before it
multiplies, and for another whenever one was written. ``engines/triton/panel/accumulators.py`` launches these kernels.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...codegen import compiler
from .. import gluon_parts as gluon
from .gemm_fold import ORDER_INIT


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


SCHEDULE = ContractionSchedule(runs=3, width=128, depth=64, piece=64, slots=4, stages=4, registers=(232, 40))

_KERNEL = """
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
def write_kernel(narrow: str, over: str, add: bool) -> compiler.Kernel:
    """Write the kernel. ``narrow``: the type of all tensors; ``over``: "cols" where weights lie kept index by kept
    index, "rows" where they lie folded index by folded index; ``add``: whether results are added to ``out``."""
    s, dtype = SCHEDULE, f"tl.{narrow}"
    name = f"contract_{over}" + ("_added" if add else "")
    arguments = ["weights_box", "vectors_box", "out_box", "blocks", "tiles", "turns"]
    buffers = ["weights_ring", "vectors_ring", "staging", "full", "empty", "order", "loaded"]
    partitions = gluon.Partitions(arguments, buffers)
    kept, transposed = f"row * {s.tile} + r * KEPT", "" if over == "cols" else ".permute((1, 0))"
    weights = [f"weights_ring.index(slot * {s.runs} + {r}){transposed}" for r in range(s.runs)]
    body = gluon.fill(
        _KERNEL,
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
    return f"FIRST + {piece % SCHEDULE.slots}"


def _write_corner(piece: int) -> str:
    run, at = SCHEDULE.pieces[piece]
    return f"row + {run} * KEPT, col + {at}"


def _load_piece(piece: int) -> str:
    slot, corner = _write_slot(piece), _write_corner(piece)
    return f"load_piece(out_box, staging.index({slot}), loaded.index({slot}), {corner})"


def _store_pieces(narrow: str, add: bool) -> list[str]:
    """Add to pieces, where results are added, and store them; when one is stored, ask for another in its slot."""
    slots, count = SCHEDULE.slots, len(SCHEDULE.pieces)
    found = [f"piece{2 * r}, piece{2 * r + 1} = halved(sum{r})" for r in range(SCHEDULE.runs)]
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
