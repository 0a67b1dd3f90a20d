"""The sums over both axes whose weights are the same, in one kernel: attention's gradients by queries, keys and values.

Two kernels take seven products a tile (three for rows, four for columns), this one five. An instance owns 128 columns,
which stay in shared memory; two consumer warp groups have 64 columns each, with both of their sums in registers. A
producer warp fills a ring with blocks of 64 rows, or 128 of few features, and their numbers. In a step a group

1. makes weights of the first score (which the step before started) and starts the first sum of columns,
2. makes weights of the second score, leaves them in shared memory, and starts the second sum,
3. multiplies the weights of all 128 columns for half of the features, or of the rows: a part of the rows' sums,
4. starts the first score of the next step, and leaves that part in shared memory meanwhile.

Writer warps, in turn, add such parts to float32 sums in memory, by the copy engine. **In a fixed order**: a counter
per batch element and block of rows says which column tile may add next. Column tiles wait only for tiles of the same
batch element that were launched before them, so some instance can always go on, however few are resident. The first
tile stores instead of adding, so nothing is cleared. ``kernels/joint_launch.py`` rounds the sums afterwards.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ....program.constructors import ONE
from ....program.expression import Expr, topological
from ..codegen import compiler, kernel_spec
from ..codegen.kernel_spec import Spec
from ..codegen.reductions import substitute_truths
from . import gluon_parts as gluon
from .gluon_parts import leaf_name
from .logit_forms import INDEX_DISTANCE
from .single_warpgroup import ScoredPairs
from .work_split import GroupWork, count_features, divide_joint_work, kept_and_folded

KEPT = 2 * gluon.GROUP_ROWS
PART = 64  # rows, and features, of what a group adds to the sums of rows in a step


@dataclass(frozen=True)
class JointSchedule:
    """How an instance runs, by the features of all vectors."""

    features: int
    rows: int  # of a block: 64 x 128 numbers of rows' sums are a step's, half of them each group's
    ring: int  # blocks of rows in flight
    writers: int
    weights: int  # steps whose weights are in shared memory

    @property
    def registers(self) -> str:
        """Of a thread: in the second consumer group, the producer, the writers."""
        return ", ".join(["240", "24", *["24"] * self.writers])


# H200, rounding counted: 0.82 to 0.95 of the time of two kernels (docs/internals/attention-kernels.md).
SCHEDULES = (
    JointSchedule(64, rows=128, ring=2, writers=1, weights=2),
    JointSchedule(128, rows=64, ring=2, writers=2, weights=1),
)

_FUNCTIONS = """
@builtin
def add_block(box, at, block, _semantic=None):
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, box.handle, at, block.handle)


@gluon.jit
def read_count(place):
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.u32 $0, [$1];", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
    )


@gluon.jit
def count_when_added(place, count):
    # what this warp wrote is in memory: the next column tile may add
    tl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; fence.proxy.async; "
        "st.release.gpu.global.u32 [$1], $2; mov.u32 $0, 0;",
        "=r,l,r", [place, count], dtype=tl.int32, is_pure=False, pack=1,
    )


@gluon.jit
def side_by_side(program, tiles, batches, beside):
    # which tile of which batch element: a tile of several batch elements, then the next tile of each, so that few tiles
    # of one batch element run at the same time and wait for each other
    first = program // (tiles * beside) * beside
    many = tl.minimum(beside, batches - first)
    rest = program - first * tiles
    return rest // many, first + rest % many
"""
_IMPORTS = f"""from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin
{gluon.STORE_IMPORTS}"""
_PRODUCER = """

@gluon.jit
def producer(
    {parameters}
):
    # the producer warp fills the ring with blocks of rows and their numbers, step by step
    {opening}
    for step in range(0, steps):
        start = ({tile}) * FOLDED
        slot = step % {depth}
        {group}
        {load}
        mbarrier.wait(empty.index(slot), ((step // {depth}) & 1) ^ 1)
        mbarrier.expect(full.index(slot), {bytes})
        {copy}
        {store}
        mbarrier.arrive(full.index(slot))
"""
_WRITER = """

@gluon.jit
def writer(
    {parameters}
):
    # a writer warp adds every other step's part to the sums in memory, when it is this column tile's turn
    {opening}
    for step in range(GROUP, steps, {writers}):
        block = {tile}
        {group}
        place = ({batch}) * row_blocks + block
        opens = tl.load(joint_first + block) == turn
        while read_count(joint_ptr + place) < turn:
            pass
        mbarrier.wait(part_full.index(GROUP), (step // {writers}) & 1)
        for half in tl.static_range(2):
            at = joint_start + (place * 2 + half) * {part}
            if opens:
                write(joint_box, [tl.cast(at, tl.int32), 0], part.index(GROUP * 2 + half))
            else:
                add_block(joint_box, [tl.cast(at, tl.int32), 0], part.index(GROUP * 2 + half))
        count_when_added(joint_ptr + place, turn + 1)
        mbarrier.arrive(part_empty.index(GROUP))
"""
_CONSUMER = """

@gluon.jit
def consumer(
    {parameters}
):
    # a consumer warp group has its own columns, both of their sums, and half of the features of the rows' sums
    {layouts}
    {opening}
    tile = tile * 2 + GROUP
    {lanes}
    {before}
    {load}
    fence_async_shared()

    # running values; the first score of the first step
    zeros = tl.zeros([KEPT, FOLDED], tl.float32, SCORES)
    {begin}
    mbarrier.wait(full.index(0), 0)
    {first_score}
    score0 = warpgroup_mma_wait(0, deps=[score0])
    for step in range(0, whole_steps):
        {whole}
    if RAGGED:
        # tiles that a condition or the end of the folded axis cuts
        for step in range(whole_steps, steps):
            {cut}

    # both groups are done with all kept vectors
    mbarrier.arrive(done.index(0))
    mbarrier.wait(done.index(0), 0)
    # results
    {results}
"""


@functools.lru_cache(maxsize=256)
def write_kernel(spec: Spec) -> compiler.Kernel | None:
    """Write the kernel of a spec that has ``joint``; None where there is none."""
    work, schedule = divide_joint_work(spec), find_schedule(spec)
    if work is None or schedule is None or spec.shift_descriptors:
        return None
    plain = compiler.compile_fold(replace(spec, joint=None))
    text = _Text(spec, work, schedule, plain)
    body, generated = text.write()
    if any("coin(" in line for line in generated):
        return None
    functions = gluon.PACK_PAIRS + _FUNCTIONS + (INDEX_DISTANCE if "index_distance(" in body else "")
    return gluon.assemble(spec, plain, _IMPORTS, body, generated, 2, functions)


def find_schedule(spec: Spec) -> JointSchedule | None:
    """The schedule of a spec: all of its vectors have as many features."""
    vectors = [e for e in topological(spec.fold.reductions) if e.op == "leaf" and e.feature is not None]
    widths = {spec.width(e.feature) for e in vectors} | {count_features(e, spec) for e in vectors}
    return schedule_of(widths)


def schedule_of(widths: set[int]) -> JointSchedule | None:
    """The schedule of vectors of these widths, if they have one."""
    return next((one for one in SCHEDULES if widths == {one.features}), None)


class _Text:
    """The parts of one kernel's text."""

    def __init__(self, spec: Spec, work: GroupWork, schedule: JointSchedule, plain: compiler.Kernel):
        self.spec, self.work, self.schedule, self.plain = spec, work, schedule, plain
        self.v = ScoredPairs(spec, work.dots, plain.shifts)
        self.vector = kept_and_folded(work.dots[0], spec)[0]  # of the rows' sums
        self.kept = list(dict.fromkeys(kept_and_folded(e, spec)[0] for e in work.dots))
        copied = dict.fromkeys(kept_and_folded(e, spec)[1] for e in work.dots)
        self.rings = {e: gluon.Ring.of(e, spec, schedule.ring, 2) for e in copied}
        self.rows = gluon.VectorRows.of([spec.slices(self.vector.feature)])
        self.order = gluon.TileOrder(spec, backwards=True)
        self.numbers = {f"shift{k}": "float32" for k in range(len(plain.shifts))}
        self.numbers |= {leaf_name(e): spec.type_of[e] for e in self.v.ringed}
        names, self.unspecialized = compiler.list_arguments(spec, list(plain.leaves), len(plain.shifts))
        buffers = [f"{leaf_name(e)}_kept" for e in self.kept]
        buffers += [name for ring in self.rings.values() for name in ring.rings] + [f"{x}_ring" for x in self.numbers]
        self.partitions = gluon.Partitions(
            names, [*buffers, "pairs", "part", "full", "empty", "pairs_full", "part_full", "part_empty", "done"]
        )
        self.generated: list[str] = []  # lines that come from code generation

    def write(self) -> tuple[str, list[str]]:
        """The kernel's text, and of it the lines that come from code generation."""
        consumer = self._consumer()
        return self._producer() + self._writer() + consumer + self._entry(), self.generated

    def _write_opening(self) -> list[str]:
        lines = [line for line in gluon.scalar_opening(self.spec) if "tl.program_id" not in line]
        place = "turn, batch = side_by_side(tl.program_id(0), tiles, joint_batches, joint_beside)"
        tile = "tile = turn + flip * (tiles - 1 - 2 * turn)" if self.spec.bounds else "tile = turn"
        return [place, tile, *lines, *self.order.opening_lines]

    def _producer(self) -> str:
        return gluon.fill(
            _PRODUCER,
            parameters=self.partitions.parameters(),
            opening=self._write_opening(),
            tile=self.order.any(),
            depth=self.schedule.ring,
            group=self.order.enter_group(),
            load=gluon.load_ahead(self.spec, self.v.ringed, self.schedule.rows // 32, len(self.plain.shifts)),
            bytes=" + ".join(ring.bytes for ring in self.rings.values()),
            copy=[line for r in self.rings.values() for line in r.copy_counted("start", "full.index(slot)", "slot")],
            store=[f"{x}_ring.index(slot).store({x})" for x in self.numbers],
        )

    def _writer(self) -> str:
        return gluon.fill(
            _WRITER,
            parameters=self.partitions.parameters(),
            opening=[*self._write_opening(), "row_blocks = tl.cdiv(folded_size, FOLDED)"],
            writers=self.schedule.writers,
            part=PART,
            tile=self.order.any(),
            group=self.order.enter_group(),
            batch=self.spec.batch_number(),
        )

    def _consumer(self) -> str:
        spec, v = self.spec, self.v
        features, group = self.schedule.features, "GROUP"
        load = []
        for e in self.kept:
            smem = [f"{leaf_name(e)}_kept.index({group})"]
            load += self.rows.load(v.pointer(e), e, features, spec.slices(e.feature), smem)
        truths = kernel_spec.whole_tile_conditions(spec.fold) if spec.bounds else {}
        whole, cut = self._step(truths, False, self.order.whole()), self._step({}, True, self.order.cut())
        results = self._results()
        self.generated += [*self._write_opening(), *v.before, *whole, *cut]
        mma = "tl.NVMMADistributedLayout([3, 0], [4, 1], [16, {}, 16])".format
        return gluon.fill(
            _CONSUMER,
            parameters=self.partitions.parameters(),
            layouts=[
                *gluon.layouts(spec.slices(self.vector.feature)),
                f"ROW_SUMS: tl.constexpr = {mma(PART)}",
                *self.rows.layouts(),
            ],
            opening=self._write_opening(),
            lanes=[*gluon.lanes(), *self.rows.lanes()],
            before=v.before,
            load=load,
            begin=[f"sum{p.place} = tl.zeros([KEPT, {features}], tl.float32, SUMS)" for p in self.work.products],
            first_score=self._start_score(0, "0"),
            whole=whole,
            cut=cut,
            results=results,
        )

    def _start_score(self, k: int, slot: str) -> list[str]:
        kept, folded = kept_and_folded(self.work.dots[k], self.spec)
        resident = [f"{leaf_name(kept)}_kept.index(GROUP)"]
        return gluon.start_score(f"score{k}", resident, self.rings[folded].blocks_in(slot))

    def _start_sum(self, k: int) -> list[str]:
        p = self.work.products[k]
        return gluon.start_sum([f"sum{p.place}"], f"weight{k}", self.rings[p.vector].blocks_in("slot"))

    def _start_part(self, group: str, total: str) -> str:
        """Start the MMAs of the weights of a group's columns: half of the features of all rows, or half of the rows."""
        weights = f"pairs.index(step % {self.schedule.weights} * 2 + {group})"
        vectors = f"{leaf_name(self.vector)}_kept.index({group})"
        mine = f".slice(GROUP * {PART}, {PART}, dim=1)"
        if self.schedule.rows > PART:
            weights += mine
        else:
            vectors += mine
        return f"parts = warpgroup_mma({weights}.permute((1, 0)), {vectors}, {total}, is_async=True)"

    def _step(self, truths: dict[Expr, bool], masked: bool, tile: str) -> list[str]:
        v, depth, narrow = self.v, self.schedule.ring, self.spec.narrow
        writers, buffers = self.schedule.writers, self.schedule.weights
        v.loop(masked)
        first, second = (substitute_truths(p.weight, truths) for p in self.work.products)
        v.inside += [f"slot = step % {depth}", *gluon.enter_tile(tile), *self._start_score(1, "slot")]
        text = v.mask_columns(v.full(first), "0.0")
        v.inside.append(f"weight0 = tl.convert_layout(({text}).to(tl.{narrow}), WEIGHTS)")
        v.inside += [*self._start_sum(0), "score1 = warpgroup_mma_wait(1, deps=[score1])"]
        text = v.mask_columns(v.full(second), "0.0")
        if (
            self.spec.joint is not None and self.spec.joint.ragged
        ):  # weights of columns that are not there may be infinite
            text = f"tl.where(kept_in[:, None], {text}, 0.0)"
        before = f"mbarrier.wait(empty.index((step - {buffers}) % {depth}), ((step - {buffers}) // {depth}) & 1)"
        v.inside += [
            f"narrow_weights = ({text}).to(tl.{narrow})",
            "weight1 = tl.convert_layout(narrow_weights, WEIGHTS)",
            f"if step >= {buffers}:",  # the other group has multiplied what is overwritten
            *gluon.indent([before]),
            f"pairs.index(step % {buffers} * 2 + GROUP).store(narrow_weights)",
            "fence_async_shared()",
            f"mbarrier.arrive(pairs_full.index(step % {buffers}))",
            *self._start_sum(1),
            self._start_part("GROUP", f"tl.zeros([{PART}, {PART}], tl.float32, ROW_SUMS), use_acc=False"),
            f"mbarrier.wait(pairs_full.index(step % {buffers}), (step // {buffers}) & 1)",
            self._start_part("1 - GROUP", "parts"),
            "after = tl.minimum(step + 1, steps - 1)",
            f"mbarrier.wait(full.index(after % {depth}), (after // {depth}) & 1)",
        ]
        names = ", ".join([*(f"sum{p.place}" for p in self.work.products), "parts", "weight0", "weight1"])
        assert self.spec.joint is not None
        scale = self.spec.joint.scale
        parts = "parts" if scale is ONE else f"parts * {v.number(scale)}"
        v.inside += [
            f"{names} = warpgroup_mma_wait(0, deps=[{names}])",
            *self._start_score(0, f"after % {depth}"),
            "mbarrier.arrive(empty.index(slot))",
            f"mbarrier.wait(part_empty.index(step % {writers}), ((step // {writers}) & 1) ^ 1)",
            f"part.index(step % {writers} * 2 + GROUP).store({parts})",
            "fence_async_shared()",
            f"mbarrier.arrive(part_full.index(step % {writers}))",
            "score0 = warpgroup_mma_wait(0, deps=[score0])",
        ]
        return v.inside

    def _results(self) -> list[str]:
        lines, free = [], [*self.kept]
        for p in self.work.products:
            scale = self.spec.fold.scaled[p.place][1]
            total = f"sum{p.place}"
            if scale is not ONE:
                factor = self.v.number(scale)
                total += f" * tl.convert_layout({factor}, SUMS)" if self.spec.keeps(scale) else f" * {factor}"
            smem = [f"{leaf_name(free.pop())}_kept.index(GROUP)"]
            slices = self.spec.slices(p.vector.feature)
            lines += self.rows.store(self.spec, p.place, self.schedule.features, slices, smem, [total])
        return lines

    def _entry(self) -> str:
        narrow, features, depth = f"tl.{self.spec.narrow}", self.schedule.features, self.schedule.ring
        rows, writers, buffers = self.schedule.rows, self.schedule.writers, self.schedule.weights
        layout = f"tl.NVMMASharedLayout.get_default_for([{gluon.GROUP_ROWS}, {{}}], {{}})".format
        lines = []
        for e in self.kept:
            shape = f"[2, {gluon.GROUP_ROWS}, {features}]"
            lines.append(gluon.allocate(f"{leaf_name(e)}_kept", narrow, shape, layout(features, narrow)))
        lines += [line for ring in self.rings.values() for line in ring.allocate_blocks(narrow)]
        lines += [gluon.allocate_numbers(x, kind, depth, rows) for x, kind in self.numbers.items()]
        shape = f"[{2 * buffers}, {gluon.GROUP_ROWS}, {rows}]"
        lines.append(gluon.allocate("pairs", narrow, shape, layout(rows, narrow)))
        shape = f"[{2 * writers}, {PART}, {PART}]"
        lines.append(gluon.allocate("part", "tl.float32", shape, "joint_box.layout"))
        counts = {"full": (depth, 2), "empty": (depth, 2), "pairs_full": (buffers, 2), "part_full": (writers, 2)}
        counts |= {"part_empty": (writers, 1), "done": (1, 2)}
        init = []
        for name, (many, count) in counts.items():
            lines.append(gluon.allocate_barriers(name, many))
            init += [f"mbarrier.init({name}.index({k}), count={count})" for k in range(many)]
        runs = [("consumer", k, "KEPT // 2") for k in range(2)] + [("producer", 0, "KEPT")]
        runs += [("writer", k, "KEPT") for k in range(writers)]
        return gluon.fill(
            gluon.ENTRY,
            unspecialized=repr(self.unspecialized),
            name=self.plain.name,
            arguments=self.partitions.entry(),
            allocate=lines,
            depth=1,
            init=["pass"],
            init_others=init,
            specialize=self.partitions.specialize(runs, self.schedule.registers, 1 + writers),
        )
