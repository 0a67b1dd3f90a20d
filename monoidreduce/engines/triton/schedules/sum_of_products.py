"""Warp-specialised sums of vectors whose weights are made of products: MLPs and the gradients of layers.

These kernels have two to six MMAs in every tile. One producer warp copies blocks of the folded axis into ring buffers.
Two consumer warp groups (``work_split.py`` says which does what) start a tile's scores and the sums of the tile before,
and make weights of the scores while the sums run. Either each group has 64 kept indices of its own, or both have the
same 64 and divide the sums: then one group sends factors of weights to the other through shared memory. A fold of two
scores and two sums (attention's column gradients) runs in one warp group without a producer (``single_warpgroup.py``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ....plan.schedule import Tile
from ....program.constructors import ONE
from ....program.expression import Expr, topological
from ..codegen import compiler, kernel_spec
from ..codegen.expressions import ExpressionWriter
from ..codegen.kernel_spec import Spec, literal
from ..codegen.lookups import has_bands, write_look_up_band
from ..codegen.reductions import substitute_truths
from ..launch import driver
from . import diagonal_sums, single_warpgroup, spec_from_tensors
from . import gluon_parts as gluon
from .gluon_parts import leaf_name, suffix
from .kernel_plan import KernelPlan
from .logit_forms import DropoutFactor, match_dropped_weight
from .work_split import (
    GroupWork,
    Product,
    count_features,
    count_kept,
    divide_work,
    folded_numbers,
    kept_and_folded,
    name_sums,
)


@dataclass(frozen=True)
class SumOfProductsSchedule:
    """How an instance of the kernel runs. Two consumer groups; kept indices follow from how they divide the work."""

    folded: int  # folded indices of a tile
    deepest_ring: int  # blocks of each operand in flight, where shared memory holds as many
    shared_bytes: int  # that rings, resident tiles and sent factors may take
    registers: tuple[int, int]  # of a thread: in the second consumer group, in the producer; the first has the rest


SCHEDULE = SumOfProductsSchedule(folded=64, deepest_ring=4, shared_bytes=224 * 1024, registers=(240, 24))
# The share of multiprocessors that must be busy on average, by how many kinds of group there are: how much faster one
# is than by the compiler's schedule (on an H200 0.85 to 0.9 of its time; where two kernels of eight products become one
# of six, 0.75).
_BUSY = {1: 0.9, 2: 0.8}


def choose_tile(spec: Spec, device: torch.device, length: int, even: bool = True) -> Tile | None:
    """The tile of a fold with this many kept indices in all. None where there is no such kernel, or where it would
    leave multiprocessors idle.

    A multiprocessor runs one instance at a time, where the compiler's schedule has two: the last wave must be full
    enough. A single warp group leaves room for another instance, as the compiler's do."""
    if not driver.runs_warp_specialized(device) or write_kernel(spec, even) is None:
        return None
    work, processors = divide_work(spec), driver.count_processors(device)
    kept = count_kept(work)
    instances = -(-length // kept)
    busy = spec_from_tensors.busy_share(instances, processors)
    enough = 2 * instances > processors if work[0].single_warpgroup else busy >= _BUSY[len(work)]
    return (kept, SCHEDULE.folded, 4, 2) if enough else None


def has_tile(plan: KernelPlan) -> bool:
    """True when a plan's tile is one of these kernels'."""
    kept = plan.block_kept in (gluon.GROUP_ROWS, 2 * gluon.GROUP_ROWS)
    return kept and (plan.block_folded, plan.num_warps) == (SCHEDULE.folded, 4)


def write_kernel_for_plan(spec: Spec, plan: KernelPlan, even: bool = True) -> compiler.Kernel | None:
    """The kernel of a spec with a plan's tile; None where it has none, or with another tile."""
    work = divide_work(spec)
    return write_kernel(spec, even) if work and plan.block_kept == count_kept(work) else None


@functools.lru_cache(maxsize=1024)
def write_kernel(spec: Spec, even: bool = True) -> compiler.Kernel | None:
    """Write the kernel of a spec, with the arguments that any other rendering has; None where there is none.

    ``even``: whether there is an even number of columns, so that dropout can take two at once."""
    work = divide_work(spec)
    if not work:
        return None
    plain = compiler.compile_fold(spec)
    if spec.diagonals is not None:
        if len(work) == 2 or work[0].single_warpgroup or spec.folded_batch_dim is not None:
            return None
        more = (e for e in topological([spec.diagonals]) if e.op == "leaf")
        plain = replace(plain, leaves=tuple(dict.fromkeys((*plain.leaves, *more))))
    if work[0].single_warpgroup:
        return single_warpgroup.write_kernel(spec, work[0], plain, even)
    if plain.shifts and (spec.shift_descriptors or len(work) == 1):
        return None
    names, unspecialized = compiler.list_arguments(spec, list(plain.leaves), len(plain.shifts))
    text = _KernelText(spec, work, names, plain.shifts, even)
    groups = [_ConsumerText(text, k).write() for k in range(len(work))]
    generated = [line for _, lines in groups for line in lines]
    if text.dropout is not None and any("coin(" in line for line in generated):  # random bits of two columns differ
        return write_kernel(spec, False)
    if text.depth < 1 or (text.dropout is not None and spec.diagonals is not None):
        return None
    body = text.write(plain.name, unspecialized, "".join(body for body, _ in groups))
    functions = gluon.PACK_PAIRS + ("" if text.dropout is None else text.dropout.by_rows())
    functions += write_look_up_band(spec, SCHEDULE.folded) if has_bands(spec.fold.tables) else ""
    functions += "" if spec.diagonals is None else diagonal_sums.FUNCTION
    return gluon.assemble(spec, plain, gluon.IMPORTS, body, generated, 2, functions)


class _PairValues(single_warpgroup.ScoredPairs):
    """Numbers of pairs whose scores the first MMAs made; ``_weigh`` reads the rings of numbers."""

    index_gap = ExpressionWriter.index_gap

    def read_number(self, x: str) -> str:
        return f"{x}_here[None, :]"

    def drop_weight(self, e: Expr) -> str:
        """A weight with dropout of two columns at once, without the dropout's factor."""
        if e.op == "where":  # what a condition hides
            return f"tl.where({self.number(e.args[0])}, {self.drop_weight(e.args[1])}, 0.0)"
        found = match_dropped_weight(e, self.spec)
        assert found is not None and found.pair is not None and found.number is not None
        dropout, number = found.dropout, self.number(found.number)
        less = self.bind((found.number, "less"), f"{number} * {literal(-1 / dropout.factor)}", False)
        row = f"blended({self.number(dropout.row)}, {self.dropout_block(dropout.col)}).to(tl.int32)"
        pairs = f"{self.full(found.weight)}, {self.full(found.pair)}"
        return self.bind((e, "thrown"), f"thrown({pairs}, {less}, {row}, {self.number(dropout.mark)})", True)


class _KernelText:
    """What a kernel has once: ring buffers and barriers, the producer, the partitions."""

    def __init__(
        self,
        spec: Spec,
        work: tuple[GroupWork, ...],
        names: Sequence[str],
        shifts: tuple[tuple[Expr, Expr], ...],
        even: bool,
    ):
        self.spec, self.work, self.shares_kept, self.shifts = spec, work, len(work) == 2, shifts
        found = {_find_dropout(p.weight, spec) for group in work for p in group.products} if even else {None}
        self.dropout = found.pop() if len(found) == 1 else None  # the dropout of all weights, two columns at once
        self.dots = tuple(e for group in work for e in group.dots)
        self.kept = [list(dict.fromkeys(kept_and_folded(e, spec)[0] for e in group.dots)) for group in work]
        self.numbers = tuple(e for e in folded_numbers(spec) if not any(e in pair for pair in shifts))
        self.ringed_numbers = {f"shift{k}": "float32" for k in range(len(shifts))}
        self.ringed_numbers |= {leaf_name(e): spec.type_of[e] for e in self.numbers}
        self.sent, self.sent_type = len(work[0].sends), work[0].sent or str(spec.narrow)
        self.tiles = self._list_resident_tiles()
        copied = list(dict.fromkeys(e for group in work for e in self._read(group)))
        self._size_rings(copied)
        users = {e: sum(e in self._read(group) for group in work) if self.shares_kept else 2 for e in copied}
        self.rings = {e: gluon.Ring.of(e, spec, self.depths[e], users[e]) for e in copied}
        self.order = gluon.TileOrder(spec)
        self.rows = gluon.VectorRows.of(
            spec.slices(e.feature) for e in dict.fromkeys((*itertools.chain(*self.kept), *self._list_summed()))
        )
        ringed = [name for ring in self.rings.values() for name in (*ring.rings, *_write_barriers(ring.name))]
        ringed += [name for x in self.ringed_numbers for name in (f"{x}_ring", *_write_barriers(x))]
        sent = [f"sent{k}" for k in range(self.sent)] + (["sent_full", "sent_empty"] if self.sent else [])
        self.bands = [] if spec.diagonals is None else ["band0", "band1"]
        self.order_kept = "{}" if spec.diagonals is None else "(KEPT - 1 - {})"  # diagonals are then antidiagonals
        self.partitions = gluon.Partitions(names, [*self.tiles, *ringed, *sent, *self.bands])

    def _list_summed(self) -> list[Expr]:
        return [p.vector for group in self.work for p in group.products]

    def _list_resident_tiles(self) -> dict[str, int]:
        """The resident tiles, and those through which sums are stored that are as wide as no resident tile of their
        group: the features of each slice, by name."""
        found: dict[str, int] = {}
        for at, group in enumerate(self.work):
            for e in self.kept[at]:
                found |= {f"{leaf_name(e)}_kept{suffix(k)}": n for k, (_, n) in enumerate(self.spec.slices(e.feature))}
            for p in group.products:
                if self.find_memory(at, p) is None:
                    slices = self.spec.slices(p.vector.feature)
                    found |= {f"staged{p.place}{'_' if k else ''}{suffix(k)}": n for k, (_, n) in enumerate(slices)}
        return found

    def find_memory(self, at: int, p: Product) -> Expr | None:
        """The kept vectors of a group through whose memory a sum can be stored."""
        like = self.spec.slices(p.vector.feature)
        return next((e for e in self.kept[at] if self.spec.slices(e.feature) == like), None)

    def _size_rings(self, copied: Sequence[Expr]) -> None:
        """How many blocks of each operand are in flight: as many as shared memory holds. Where it holds fewer than two
        of each, blocks that only scores read (which are released early) have one."""
        block = {e: 2 * SCHEDULE.folded * count_features(e, self.spec) for e in copied}
        room = SCHEDULE.shared_bytes - 2 * gluon.GROUP_ROWS * sum(self.tiles.values()) * (1 if self.shares_kept else 2)
        room -= 0 if self.spec.diagonals is None else 2 * diagonal_sums.SHARED_BYTES
        room -= self.sent * 2 * gluon.GROUP_ROWS * SCHEDULE.folded * (4 if self.sent_type == "float32" else 2)
        self.depth = min(SCHEDULE.deepest_ring, room // sum(block.values()))
        self.depths = dict.fromkeys(copied, self.depth)
        if self.depth == 1:
            self.depths |= dict.fromkeys(self._list_summed(), 2)
            self.depth = 2 if sum(self.depths[e] * block[e] for e in copied) <= room else 0

    def _read(self, group: GroupWork) -> list[Expr]:
        """The folded vectors that a group reads."""
        return [*(kept_and_folded(e, self.spec)[1] for e in group.dots), *(p.vector for p in group.products)]

    def opening_lines(self) -> list[str]:
        return [*gluon.scalar_opening(self.spec), *self.order.opening_lines]

    def write(self, name: str, unspecialized: Sequence[str], consumers: str) -> str:
        """The kernel, given its consumers' functions."""
        produce = [line for ring in self.rings.values() for line in ring.produce("phase", self.depth)]
        producer = gluon.fill(
            gluon.PRODUCER,
            parameters=self.partitions.parameters(),
            opening=self.opening_lines(),
            tile=self.order.any(),
            depth=self.depth,
            phase=f"((step // {self.depth}) & 1) ^ 1",
            produce=[
                *self.order.enter_group(),
                *gluon.load_ahead(self.spec, self.numbers, 2, len(self.shifts)),
                *produce,
                *self._store_numbers(),
            ],
        )
        return producer + consumers + self._entry(name, unspecialized)

    def _store_numbers(self) -> list[str]:
        """In the producer: numbers that were loaded ahead go into their rings."""
        lines = []
        for x in self.ringed_numbers:
            shift = " >> 1" if self.dropout is not None and x == leaf_name(self.dropout.mark) else ""
            lines += [f"mbarrier.wait({x}_empty.index(slot), phase)", f"{x}_ring.index(slot).store({x}{shift})"]
            lines.append(f"mbarrier.arrive({x}_full.index(slot))")
        return lines

    def _entry(self, name: str, unspecialized: Sequence[str]) -> str:
        narrow, depth, folded = f"tl.{self.spec.narrow}", self.depth, SCHEDULE.folded
        layout = f"tl.NVMMASharedLayout.get_default_for([{gluon.GROUP_ROWS}, {{}}], {narrow})".format
        count = 1 if self.shares_kept else 2
        allocate, init, init_single = [], [], []
        for tile, size in self.tiles.items():
            allocate.append(gluon.allocate(tile, narrow, f"[{count}, {gluon.GROUP_ROWS}, {size}]", layout(size)))
        for ring in self.rings.values():
            allocate += [*ring.allocate_blocks(narrow), *ring.allocate_barriers()]
            if ring.depth == depth:
                init += [ring.init_full(), ring.init_empty()]
            else:
                init_single += [line.replace("index(k)", "index(0)") for line in (ring.init_full(), ring.init_empty())]
        for x, kind in self.ringed_numbers.items():
            allocate.append(gluon.allocate_numbers(x, kind, depth, folded))
            allocate += [gluon.allocate_barriers(f"{x}_{state}", depth) for state in ("full", "empty")]
            init += [f"mbarrier.init({x}_full.index(k), count=1)", f"mbarrier.init({x}_empty.index(k), count=2)"]
        for k in range(self.sent):
            shape, layout_of = f"[2, {gluon.GROUP_ROWS}, {folded}]", _SENT_LAYOUTS[self.sent_type == "float32"]
            allocate.append(gluon.allocate(f"sent{k}", f"tl.{self.sent_type}", shape, layout_of))
        if self.sent:
            allocate += [gluon.allocate_barriers(f"sent_{state}", 2) for state in ("full", "empty")]
            allocate += [
                f"mbarrier.init(sent_{state}.index({k}), count=1)" for state in ("full", "empty") for k in range(2)
            ]
        allocate += map(diagonal_sums.allocate, self.bands)
        own = "KEPT" if self.shares_kept else "KEPT // 2"
        runs = [(f"consumer{k if self.shares_kept else 0}", k, own) for k in range(2)]
        return gluon.fill(
            gluon.ENTRY,
            unspecialized=repr(unspecialized),
            name=name,
            arguments=self.partitions.entry(),
            allocate=allocate,
            depth=depth,
            init=init,
            init_others=init_single,
            specialize=self.partitions.specialize(
                [*runs, ("producer", 0, "KEPT")], ", ".join(map(str, SCHEDULE.registers))
            ),
        )


# Equal threads of two groups hold the same pairs: each leaves its own side by side, 16 bytes at a time.
# By whether they have 32 bits.
_SENT_LAYOUTS = {
    False: "tl.SharedLinearLayout([[0, 1], [8, 0], [0, 8], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], "
    "[16, 0], [32, 0], [0, 16], [0, 32]])",
    True: "tl.SharedLinearLayout([[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], "
    "[16, 0], [32, 0], [0, 8], [0, 16], [0, 32]])",
}
_CONSUMER = """

@gluon.jit
def {function}(
    {parameters}
):
    # {title}
    {layouts}
    {opening}
    {lanes}
    {before}
    {load}
    fence_async_shared()

    # running values
    zeros = tl.zeros([KEPT, FOLDED], tl.float32, SCORES)
    {begin}

    # the first tile
    step = 0
    {enter_first}
    {first_scores}
    if RAGGED:
        {first_cut}
    else:
        {first_whole}
    {hold}
    # whole tiles: the scores of each beside the sums of the one before
    for step in range(1, whole_steps):
        {whole}
    if RAGGED:
        # tiles that a condition or the end of the folded axis cuts
        for step in range(tl.maximum(whole_steps, 1), steps):
            {cut}
    step = steps
    {last}

    # results
    {results}
"""


class _ConsumerText:
    """The function of a consumer warp group: its share of the work, in every tile."""

    def __init__(self, text: _KernelText, at: int):
        self.text, self.spec, self.work, self.at = text, text.spec, text.work[at], at
        self.v = _PairValues(self.spec, text.dots, text.shifts)
        self.residents = {e: self._name_memory(f"{leaf_name(e)}_kept", "", e) for e in text.kept[at]}
        self.weights = [f"weight{k}" for k in range(len(self.work.products))]

    def _name_memory(self, name: str, between: str, e: Expr) -> list[str]:
        """The tiles of shared memory under a name, one for each slice of vectors like ``e``."""
        group = 0 if self.text.shares_kept else "GROUP"
        count = len(self.spec.slices(e.feature))
        return [f"{name}{between if k else ''}{suffix(k)}.index({group})" for k in range(count)]

    def write(self) -> tuple[str, list[str]]:
        """The function, and of it the lines that come from code generation."""
        work, v, text = self.work, self.v, self.text
        load = []
        for e, smem in self.residents.items():
            width, slices = self.spec.width(e.feature), self.spec.slices(e.feature)
            load += text.rows.load(v.pointer(e), e, width, slices, smem)
        blocks, hold = {}, []
        for e in [*self.residents][: work.held]:
            blocks[e] = [f"{leaf_name(e)}_block{suffix(k)}" for k in range(len(self.residents[e]))]
            for x, tile in zip(blocks[e], self.residents[e], strict=True):
                hold.append(f"{x} = {tile}.load(tl.DotOperandLayout(0, SCORES, 2))")
        begin = []
        for p in {p.place: p for p in work.products}.values():
            for k, (_, size) in enumerate(self.spec.slices(p.vector.feature)):
                begin.append(f"{name_sums(p, self.spec)[k]} = tl.zeros([KEPT, {size}], tl.float32, SUMS{suffix(k)})")
        truths = kernel_spec.whole_tile_conditions(self.spec.fold) if self.spec.bounds else {}
        whole, cut = self._weigh(truths, False), self._weigh({}, True)
        results = self._results()
        title = "a consumer warp group has its own kept indices of the tile"
        if text.shares_kept:
            title = (
                f"a consumer warp group {'is sent' if work.takes else 'sends'} factors of weights, and has its own sums"
            )
        body = gluon.fill(
            _CONSUMER,
            function=f"consumer{self.at}",
            title=title,
            parameters=text.partitions.parameters(),
            layouts=[*self._layouts(), *text.rows.layouts(), *(diagonal_sums.LAYOUTS if text.bands else [])],
            opening=[*text.opening_lines(), *([] if text.shares_kept else ["tile = tile * 2 + GROUP"])],
            lanes=[*gluon.lanes(text.order_kept), *text.rows.lanes(text.order_kept), *self._enter_bands()],
            before=v.before,
            load=load,
            begin=begin,
            enter_first=gluon.enter_tile(text.order.any()),
            first_scores=[*self._start_scores(self.residents), *self._wait_scores(0, [])],
            first_cut=[*cut, *self._rename_weights()],
            first_whole=[*whole, *self._rename_weights()],
            hold=hold,
            whole=self._step(self.residents | blocks, whole, text.order.whole()),
            cut=self._step(self.residents | blocks, cut, text.order.cut()),
            last=[*self._start_sums(work.products), self._wait_sums([])],
            results=results,
        )
        return body, [*text.opening_lines(), *v.before, *whole, *cut]

    def _enter_bands(self) -> list[str]:
        """Where sums along diagonals go."""
        if not self.text.bands:
            return []
        place = len(self.spec.fold.outputs)
        strip = "(tl.cast(batch, tl.int64) * tiles * 2 + tile) * tl.cdiv(folded_size, FOLDED)"
        return [
            "band = band0 if GROUP == 0 else band1",
            diagonal_sums.clear("band"),
            f"band_at = out{place} + {strip} * {diagonal_sums.SUMS}",
        ]

    def _layouts(self) -> list[str]:
        """The layouts of scores, and of the sums, which are alike (``work_split.py``) or have one width each."""
        (found,) = {self.spec.slices(p.vector.feature) for p in self.work.products}
        return gluon.layouts(found)

    def _step(self, blocks: Mapping[Expr, Sequence[str]], arithmetic: list[str], tile: str) -> list[str]:
        """One tile: start its scores and the sums of the tile before, make weights of the scores while the sums run."""
        early, products = self.work.early, self.work.products
        used = dict.fromkeys(p.vector for p in products)
        ahead = [line for line in arithmetic if " = look_up_band(" in line]  # while the scores are made
        arithmetic = [line for line in arithmetic if line not in ahead]
        return [
            *gluon.enter_tile(tile),
            *self._start_sums(products[:early]),
            *self._start_scores(blocks),
            *self._start_sums(products[early:]),
            *ahead,
            *self._wait_scores(sum(len(name_sums(p, self.spec)) for p in products[early:]), self.weights[:early]),
            *arithmetic,
            self._wait_sums(self.weights[early:]),
            *(self.text.rings[e].release("(step - 1)") for e in used),
            *self._rename_weights(),
        ]

    def _rename_weights(self) -> list[str]:
        return [f"{w} = next{k}" for k, w in enumerate(self.weights)]

    def _start_scores(self, blocks: Mapping[Expr, Sequence[str]]) -> list[str]:
        """Start the first MMAs of a tile."""
        lines, waited = [], set()
        for e in self.work.dots:
            kept, folded = kept_and_folded(e, self.spec)
            ring = self.text.rings[folded]
            if folded not in waited:
                lines.append(ring.wait())
                waited.add(folded)
            lines += gluon.start_score(self._score(e), blocks[kept], ring.blocks())
        return lines

    def _score(self, e: Expr) -> str:
        return f"score{self.text.dots.index(e)}"

    def _wait_scores(self, running: int, more: list[str]) -> list[str]:
        """Wait for the scores while so many MMAs run on; release blocks that only scores read."""
        names = ", ".join([*map(self._score, self.work.dots), *more])
        summed = {p.vector for p in self.work.products}
        free = [e for e in dict.fromkeys(kept_and_folded(e, self.spec)[1] for e in self.work.dots) if e not in summed]
        return [
            f"{names} = warpgroup_mma_wait({running}, deps=[{names}])",
            *(self.text.rings[e].release() for e in free),
        ]

    def _start_sums(self, products: Sequence[Product]) -> list[str]:
        """Start the second MMAs of the tile before; blocks that its scores read have come."""
        lines, waited = [], {kept_and_folded(e, self.spec)[1] for e in self.work.dots}
        for p in products:
            ring = self.text.rings[p.vector]
            if p.vector not in waited:
                lines.append(ring.wait("(step - 1)"))
                waited.add(p.vector)
            weight = self.weights[self.work.products.index(p)]
            lines += gluon.start_sum(name_sums(p, self.spec), weight, ring.blocks("(step - 1)"))
        return lines

    def _wait_sums(self, more: list[str]) -> str:
        sums = dict.fromkeys(name for p in self.work.products for name in name_sums(p, self.spec))
        names = ", ".join([*sums, *more])
        return f"{names} = warpgroup_mma_wait(0, deps=[{names}])"

    def _weigh(self, truths: dict[Expr, bool], masked: bool) -> list[str]:
        """The arithmetic of a tile, from its scores to its weights, ``next{k}``; what is sent comes first."""
        work, v, narrow, depth = self.work, self.v, self.spec.narrow, self.text.depth
        v.loop(masked)
        write = v.full if self.text.dropout is None else v.drop_weight

        def weigh(e: Expr) -> str:
            return v.bind_masked(write(substitute_truths(e, truths)), "0.0")

        for x in self.text.ringed_numbers:
            v.inside.append(f"mbarrier.wait({x}_full.index(step % {depth}), (step // {depth}) & 1)")
            v.inside.append(f"{x}_here = {x}_ring.index(step % {depth}).load(tl.SliceLayout(0, SCORES))")
            v.inside.append(f"mbarrier.arrive({x}_empty.index(step % {depth}))")
        if work.takes:
            v.inside.append("mbarrier.wait(sent_full.index(step % 2), (step // 2) & 1)")
            v.inside += [f"{leaf_name(e)} = sent{k}.index(step % 2).load(SCORES)" for k, e in enumerate(work.takes)]
            v.inside.append("mbarrier.arrive(sent_empty.index(step % 2))")
            v.inside += [f"{leaf_name(e)}_wide = {leaf_name(e)}.to(tl.float32)" for e in work.takes]
            v.inner |= {e: f"{leaf_name(e)}_wide" for e in work.takes}
        if work.sends:
            texts = [weigh(f) for f in work.sends]
            v.inside.append("mbarrier.wait(sent_empty.index(step % 2), ((step // 2) & 1) ^ 1)")
            kind = self.text.sent_type
            v.inside += [f"sent{k}.index(step % 2).store(({t}).to(tl.{kind}))" for k, t in enumerate(texts)]
            v.inside.append("mbarrier.arrive(sent_full.index(step % 2))")
        for k, p in enumerate(work.products):
            v.inside.append(f"next{k} = pack_pairs(tl.convert_layout(({weigh(p.weight)}).to(tl.{narrow}), WEIGHTS))")
        if self.spec.diagonals is not None:
            place = f"band_at + start // FOLDED * {diagonal_sums.SUMS}"
            v.inside += diagonal_sums.add_tile(weigh(self.spec.diagonals), "band", place)
        return v.inside

    def _results(self) -> list[str]:
        lines = []
        for p in {p.place: p for p in self.work.products}.values():
            scale, like = self.spec.fold.scaled[p.place][1], self.text.find_memory(self.at, p)
            factors = [] if self.text.dropout is None else [literal(self.text.dropout.factor)]
            factors += [] if scale is ONE else [self.v.number(scale)]
            totals = []
            for k, total in enumerate(name_sums(p, self.spec)):
                for factor in factors:
                    kept = scale is not ONE and factor == factors[-1] and self.spec.keeps(scale)
                    total = f"({total} * {f'tl.convert_layout({factor}, SUMS{suffix(k)})' if kept else factor})"
                totals.append(total)
            width, slices = self.spec.width(p.vector.feature), self.spec.slices(p.vector.feature)
            smem = self._name_memory(f"staged{p.place}", "_", p.vector) if like is None else self.residents[like]
            lines += self.text.rows.store(self.spec, p.place, width, slices, smem, totals)
        return lines


def _write_barriers(x: str) -> list[str]:
    return [f"{x}_full", f"{x}_empty"]


def _find_dropout(weight: Expr, spec: Spec) -> DropoutFactor | None:
    """The dropout of a weight, where it can take two columns at once."""
    found = match_dropped_weight(weight, spec)
    return found.dropout if found is not None and found.number is not None and spec.keeps(found.number) else None
