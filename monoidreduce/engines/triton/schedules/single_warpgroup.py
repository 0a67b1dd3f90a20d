"""Two scores and two sums of the same blocks in one warp group: attention's gradients with respect to keys and values.

Both sums fit beside the scores in a warp group's registers, with nothing to spare. There is no producer: two instances
share a multiprocessor, and while one makes weights, the other multiplies. The next tile's blocks are asked for as soon
as the MMAs that read their slots are done, and its numbers are loaded from the beginning of a step. ``full`` barriers
say that a tile's blocks came; their phase is the parity of the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....program.constructors import ONE
from ....program.expression import Expr, topological
from ..codegen import compiler, kernel_spec
from ..codegen.expressions import ExpressionWriter
from ..codegen.kernel_spec import Spec, literal
from ..codegen.lookups import has_bands, write_look_up_band
from ..codegen.reductions import substitute_truths
from . import gluon_parts as gluon
from .gluon_parts import leaf_name, suffix
from .logit_forms import INDEX_DISTANCE, match_dropped_weight
from .work_split import GroupWork, folded_numbers, kept_and_folded, name_sums

_IMPORTS = f"""from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_init
{gluon.IMPORTS}"""
_RING = 2  # tiles of folded vectors and numbers in shared memory

_KERNEL = """
@gluon.jit(do_not_specialize={unspecialized})
def {name}(
    {arguments}
):
    # one warp group has a kept tile and all of its sums
    {layouts}
    LINE: tl.constexpr = tl.BlockedLayout([1], [32], [4], [0])
    {allocate}
    full = tl.allocate_shared_memory(tl.int64, [2, 1], mbarrier.MBarrierLayout())
    for k in tl.static_range(2):
        mbarrier.init(full.index(k), count=1)
    fence_async_shared()
    {opening}
    {lanes}
    line = tl.arange(0, FOLDED, LINE).to(INT)
    {before}

    # the first tile
    step = 0
    next_step = 0
    next_slot = 0
    next_start = ({next_tile}) * FOLDED
    {next_group}
    {copy_blocks}
    {load_numbers}
    {store_numbers}
    {load}
    fence_async_shared()

    # running values
    zeros = tl.zeros([KEPT, FOLDED], tl.float32, SCORES)
    {begin}
    # whole tiles: a sum is started when its weights are made, and runs beside what is done next
    for step in range(0, whole_steps):
        {whole}
    if RAGGED:
        # tiles that a condition or the end of the folded axis cuts
        for step in range(whole_steps, steps):
            {cut}
    {wait_all}

    # results
    {results}
"""


def write_kernel(spec: Spec, work: GroupWork, plain: compiler.Kernel, even: bool) -> compiler.Kernel | None:
    """Write the kernel; None where there is none. ``even``: whether there is an even number of columns, so that dropout
    can take two at once."""
    text = _Text(spec, work, plain)
    if spec.shift_descriptors or not text.can_drop_pairs(even):
        return None
    body, generated = text.write()
    if any("coin(" in line for line in generated):
        return None
    functions = gluon.PACK_PAIRS + ("" if text.dropout is None else text.dropout.by_columns())
    functions += write_look_up_band(spec, gluon.GROUP_ROWS) if has_bands(spec.fold.tables) else ""
    functions += INDEX_DISTANCE if "index_distance(" in body else ""
    made = gluon.assemble(spec, plain, _IMPORTS, body, generated, 0, functions)
    return made and replace(made, single_warpgroup=True)


class ScoredPairs(ExpressionWriter):
    """Numbers of pairs whose scores the first MMAs made; numbers of folded indices lie in a ring."""

    pair_layout = "zeros"  # a block that is laid out as all pairs are

    def __init__(self, spec: Spec, dots: tuple[Expr, ...], shifts: Sequence[tuple[Expr, Expr]]):
        super().__init__(spec)
        self.dots, self.shifts = dots, [*shifts]
        self.ringed = [e for e in folded_numbers(spec) if not any(e in pair for pair in shifts)]

    def read_number(self, x: str) -> str:
        """One number per folded index of the tile."""
        text = f"{x}_ring.index(slot).load(tl.SliceLayout(0, SCORES))"
        return f"{self.bind((x, 'here'), text, True, f'{x}_here')}[None, :]"

    def _leaf(self, e: Expr) -> str:
        return self.read_number(leaf_name(e)) if e in self.ringed else super()._leaf(e)

    def _shift(self, number: Expr, total: Expr) -> str:
        return self.read_number(f"shift{self.shifts.index((number, total))}")

    def index_gap(self, at: str) -> str:
        return f"index_distance(tl.sum({at}, 1), start, {self.pair_layout})"

    def product(self, x: Expr, y: Expr) -> str:
        return f"score{next(k for k, e in enumerate(self.dots) if set(e.args) == {x, y})}"


class _WeightWriter(ScoredPairs):
    """The same, with the weights of sums, from which a dropout's factor is left out: it multiplies their results."""

    def weight(self, e: Expr) -> str:
        """A weight; with dropout, without the dropout's factor."""
        found = match_dropped_weight(e, self.spec)
        if found is None:
            return self.full(e)
        if e.op == "where":  # what a condition hides
            return f"tl.where({self.number(e.args[0])}, {self.weight(e.args[1])}, 0.0)"
        row, mark = self.read_number(leaf_name(found.dropout.row)), self.number(found.dropout.mark)
        mark = self.bind((found.dropout, "mark"), f"{mark} >> 1", False)
        weight = self.full(found.weight)
        left = self.bind((found.weight, "spared"), f"spared({weight}, {row}, {mark})", True)
        if found.pair is None or found.number is None:
            return left
        return f"{left} * {self.full(found.pair)} - {weight} * {self.number(found.number)}"


class _Text:
    """The parts of one kernel's text. It has two scores and two sums, the first of which needs one score alone."""

    def __init__(self, spec: Spec, work: GroupWork, plain: compiler.Kernel):
        self.spec, self.work, self.plain, self.v = spec, work, plain, _WeightWriter(spec, work.dots, plain.shifts)
        kept = dict.fromkeys(kept_and_folded(e, spec)[0] for e in work.dots)
        names = {e: [suffix(k) for k in range(len(spec.slices(e.feature)))] for e in kept}
        self.residents = {e: [f"{leaf_name(e)}_kept{k}" for k in names[e]] for e in kept}
        copied = dict.fromkeys(kept_and_folded(e, spec)[1] for e in work.dots)
        self.rings = {e: gluon.Ring.of(e, spec, _RING, 1) for e in copied}
        self.sums = [name_sums(p, spec) for p in work.products]
        self.rows = gluon.VectorRows.of(spec.slices(e.feature) for e in kept)
        self.order = gluon.TileOrder(spec)
        self.dropped = [match_dropped_weight(p.weight, spec) for p in work.products]
        self.dropout = next((found.dropout for found in self.dropped if found is not None), None)
        self.load_numbers, self.store_numbers = self._number_lines()
        self.generated: list[str] = []  # lines that come from code generation

    def can_drop_pairs(self, even: bool) -> bool:
        """True when dropout, where there is some, is of kept columns and takes two at once (there is an ``even`` number
        of them), and what is stored for it has no other use."""
        found = [each for each in self.dropped if each is not None]
        rest = [p.weight for p, each in zip(self.work.products, self.dropped, strict=True) if each is None]
        rest += [e for each in found for e in (each.weight, each.pair) if e is not None]
        own = {e for each in found for e in (each.dropout.row, each.number)}
        one = even and self.spec.over == "rows" and len({each.dropout for each in found}) == 1
        return not found or (one and own.isdisjoint(topological(rest)))

    def write(self) -> tuple[str, list[str]]:
        """The kernel's text, and of it the lines that come from code generation."""
        v, spec, plain = self.v, self.spec, self.plain
        names, unspecialized = compiler.list_arguments(spec, list(plain.leaves), len(plain.shifts))
        whole = self._step(
            kernel_spec.whole_tile_conditions(spec.fold) if spec.bounds else {}, False, self.order.whole()
        )
        cut = self._step({}, True, self.order.cut())
        load = []
        for e, smem in self.residents.items():
            load += self.rows.load(v.pointer(e), e, spec.width(e.feature), spec.slices(e.feature), smem)
        results, running = self._results(), ", ".join(self._list_running())
        opening = [*gluon.scalar_opening(spec), *self.order.opening_lines]
        begin = []
        for p, sums, layout in zip(self.work.products, self.sums, self._layout_names(), strict=True):
            for k, (total, (_, size)) in enumerate(zip(sums, spec.slices(p.vector.feature), strict=True)):
                zeros = f"tl.zeros([KEPT, {size}], tl.float32, {layout}{suffix(k)})"
                begin.append(f"{total} = warpgroup_mma_init({zeros})")
        for k, layout in enumerate(self._layout_names("WEIGHTS")):
            begin.append(f"weight{k} = pack_pairs(tl.zeros([KEPT, FOLDED], tl.{spec.narrow}, {layout}))")
        self.generated += [*opening, *v.before, *self.store_numbers]
        order = "{}" if self.dropout is None else "neighbours({})"
        text = gluon.fill(
            _KERNEL,
            name=plain.name,
            unspecialized=repr(unspecialized),
            arguments=[*gluon.wrap_names(names), f"{gluon.CONSTANTS},"],
            layouts=self._layouts(),
            allocate=self._allocate(),
            opening=opening,
            # with dropout, a thread's two columns are neighbours, which share random bits
            lanes=[*gluon.lanes(order), *self.rows.lanes(order)],
            before=v.before,
            next_tile=self.order.any("next_step"),
            next_group=self.order.enter_group("next_step"),
            copy_blocks=self._copy_blocks(),
            load_numbers=self.load_numbers,
            store_numbers=self.store_numbers,
            load=load,
            begin=begin,
            whole=whole,
            cut=cut,
            wait_all=[f"{running} = warpgroup_mma_wait(0, deps=[{running}])"],
            results=results,
        )
        return text, self.generated

    def _list_running(self) -> list[str]:
        return [*(name for sums in self.sums for name in sums), "weight0", "weight1"]

    def _allocate(self) -> list[str]:
        """Shared memory: the resident tile, and rings of folded vectors and numbers."""
        narrow = f"tl.{self.spec.narrow}"
        layout = f"tl.NVMMASharedLayout.get_default_for({{}}, {narrow})".format
        lines = []
        for e, smem in self.residents.items():
            for name, (_, size) in zip(smem, self.spec.slices(e.feature), strict=True):
                shape = f"[{gluon.GROUP_ROWS}, {size}]"
                lines.append(gluon.allocate(name, narrow, shape, layout(shape)))
        lines += [line for ring in self.rings.values() for line in ring.allocate_blocks(narrow)]
        for x, (kind, _) in self._number_places().items():
            lines.append(gluon.allocate_numbers(x, kind, _RING, gluon.GROUP_ROWS))
        return lines

    def _number_places(self) -> dict[str, tuple[str, str]]:
        """The numbers of folded indices: their types, and where the next tile's begin."""
        found, start, group = {}, "tl.cast(next_start, tl.int64)", self.spec.folded_batch_dim
        for k in range(len(self.v.shifts)):
            base = f"shift{k}_ptr + tl.cast({self.spec.batch_number()}, tl.int64) * folded_size"
            if group is None:
                base = self.v.bind((f"shift{k}", "base"), base, False, f"shift{k}_base")
            found[f"shift{k}"] = "float32", f"{base} + {start} + line"
        for e in self.v.ringed:
            x = leaf_name(e)
            base = self.v.base(e) + ("" if group is None else f" + b{group} * {x}_b{group}")
            found[x] = self.spec.type_of[e], f"{base} + {start} * {x}_s + line * {x}_s"
        return found

    def _number_lines(self) -> tuple[list[str], list[str]]:
        """Load the next tile's numbers; store them, prepared by one thread instead of by all that need them."""
        load, store = ["next_in = (next_start + line < folded_size) | (not RAGGED)"], []
        divided = {
            leaf_name(p.number): p.dropout.factor for p in self.dropped if p is not None and p.number is not None
        }
        for x, (_, place) in self._number_places().items():
            load.append(f"{x}_next = tl.load({place}, mask=next_in, other=0)")
            text = f"{x}_next"
            if self.dropout is not None and x == leaf_name(self.dropout.row):
                text = f"blended({text}, (tile * KEPT) >> 7).to(tl.int32)"
            text += f" * {literal(1 / divided[x])}" if x in divided else ""
            store.append(f"{x}_ring.index(next_slot).store({text})")
        return load, store

    def _copy_blocks(self) -> list[str]:
        """Begin to copy the next tile's blocks; one barrier counts the bytes of all."""
        size = " + ".join(ring.bytes for ring in self.rings.values())
        lines = [f"mbarrier.expect(full.index(next_slot), {size})"]
        for ring in self.rings.values():
            lines += ring.copy_counted("next_start", "full.index(next_slot)", "next_slot")
        return lines

    def _step(self, truths: dict[Expr, bool], masked: bool, tile: str) -> list[str]:
        """One tile: weights of the first score while the second is made, and sums beside the weights that follow.

        With dropout weights are used twice, and registers hold nothing else: then both sums are started at the end."""
        v, running = self.v, ", ".join(self._list_running())
        v.loop(masked)
        v.inside += [
            f"slot = step % {_RING}",
            *gluon.enter_tile(tile),
            "next_step = tl.minimum(step + 1, steps - 1)",
            "next_slot = 1 - slot",
            f"next_start = ({self.order.any('next_step')}) * FOLDED",
            *self.order.enter_group("next_step"),
            *self.load_numbers,
            f"mbarrier.wait(full.index(slot), (step // {_RING}) & 1)",
            *self._start_score(0),
            f"{running} = warpgroup_mma_wait({self._count_parts(0)}, deps=[{running}])",
            *self.store_numbers,
            "if step + 1 < steps:",
            *gluon.indent(self._copy_blocks()),
            *self._start_score(1),
        ]
        wait = "score{0} = warpgroup_mma_wait({1}, deps=[score{0}])".format
        weights = [substitute_truths(p.weight, truths) for p in self.work.products]
        for e in topological(weights):
            if e.op == "lookup":  # loaded while scores are made
                v.full(e)
        v.inside.append(wait(0, self._count_parts(1)))
        if (found := match_dropped_weight(weights[0], self.spec)) is None:
            for k, weight in enumerate(weights):
                v.inside += [] if k == 0 else [wait(1, len(self.sums[0]))]
                self._weigh(k, weight)
                v.inside += self._start_sum(k)
            return v.inside
        first = len(v.inside)
        v.full(found.weight)
        self.generated += v.inside[first:]
        v.inside.append(wait(1, 0))
        for k, weight in enumerate(weights):
            self._weigh(k, weight)
        v.inside += [line for k in range(2) for line in self._start_sum(k)]
        return v.inside

    def _weigh(self, k: int, weight: Expr) -> None:
        """Write the weights of a sum, as they are multiplied."""
        v, first = self.v, len(self.v.inside)
        text = f"({v.mask_columns(v.weight(weight), '0.0')}).to(tl.{self.spec.narrow})"
        layout = self._layout_names("WEIGHTS")[k]
        v.inside.append(f"weight{k} = pack_pairs(tl.convert_layout({text}, {layout}))")
        self.generated += v.inside[first:]

    def _start_sum(self, k: int) -> list[str]:
        ring, weights = self.rings[self.work.products[k].vector], self._layout_names("WEIGHTS")[k]
        return gluon.start_sum(self.sums[k], f"weight{k}", ring.blocks_in("slot"), weights)

    def _count_parts(self, k: int) -> int:
        """How many MMAs a score has: one for each slice of features."""
        return len(self.spec.slices(self.work.dots[k].args[0].feature))

    def _layout_names(self, kind: str = "SUMS") -> list[str]:
        """The names of the layouts of both sums, or of their weights: the same where both are equally wide."""
        slices = [self.spec.slices(p.vector.feature) for p in self.work.products]
        return [kind, kind if slices[0] == slices[1] else f"{kind}_OTHER"]

    def _layouts(self) -> list[str]:
        names = self._layout_names("")
        slices = {x: self.spec.slices(p.vector.feature) for x, p in zip(names, self.work.products, strict=True)}
        lines = [line for other, each in slices.items() for line in gluon.layouts(each, other)]
        return [*dict.fromkeys(lines), *self.rows.layouts()]

    def _start_score(self, k: int) -> list[str]:
        kept, folded = kept_and_folded(self.work.dots[k], self.spec)
        return gluon.start_score(f"score{k}", self.residents[kept], self.rings[folded].blocks_in("slot"))

    def _results(self) -> list[str]:
        lines, free = [], dict(self.residents)
        layouts = self._layout_names()
        for p, found, sums, layout in zip(self.work.products, self.dropped, self.sums, layouts, strict=True):
            scale, slices = self.spec.fold.scaled[p.place][1], self.spec.slices(p.vector.feature)
            factors = [] if found is None else [literal(found.dropout.factor)]
            texts = [" * ".join([total, *factors]) for total in sums]
            if scale is not ONE:
                factor = self.v.number(scale)
                kept = f"tl.convert_layout({factor}, {layout}{{}})" if self.spec.keeps(scale) else factor
                texts = [f"{text} * {kept.format(suffix(k))}" for k, text in enumerate(texts)]
            like = next(e for e in free if self.spec.slices(e.feature) == slices)
            width = self.spec.width(p.vector.feature)
            lines += self.rows.store(self.spec, p.place, width, slices, free.pop(like), texts)
        return lines
