"""The lines of a kernel whose four warps are an instance by themselves (``warp_group_split.py``), for
``single_warpgroup_template.py``."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from ....program.constructors import ONE
from ....program.expression import Expr, topological
from ..codegen import tile_ranges
from ..codegen.dropout import match_dropped_weight
from ..codegen.exponents import literal
from ..codegen.expressions import ExpressionWriter
from ..codegen.kernel_spec import Spec
from ..codegen.kernel_text import Kernel
from ..codegen.reductions import known
from . import single_warpgroup_template
from .template_lines import inside, name, scalars, visits
from .warp_group_split import OWNED, WIDTH, Part, folded_numbers, sides


class _Values(ExpressionWriter):
    """Numbers of pairs whose scores were made before them, and of folded indices that were fetched the turn before."""

    def __init__(self, spec: Spec, dots: tuple[Expr, ...], shifts: Sequence[tuple[Expr, Expr]]):
        super().__init__(spec)
        self.dots, self.shifts = dots, [*shifts]
        self.fetched = [e for e in folded_numbers(spec) if not any(e in pair for pair in shifts)]

    def here(self, x: str) -> str:
        """A number of a tile's folded indices."""
        text = f"{x}_ring.index(slot).load(tl.SliceLayout(0, SCORES))"
        return f"{self.bind((x, 'here'), text, True, f'{x}_here')}[None, :]"

    def _leaf(self, e: Expr) -> str:
        return self.here(name(e)) if e in self.fetched else super()._leaf(e)

    def _shift(self, number: Expr, total: Expr) -> str:
        return self.here(f"shift{self.shifts.index((number, total))}")

    def product(self, x: Expr, y: Expr) -> str:
        return f"score{next(k for k, e in enumerate(self.dots) if set(e.args) == {x, y})}"

    def weight(self, e: Expr) -> str:
        """A weight; where coins are tossed, without their factor."""
        found = match_dropped_weight(e, self.spec)
        if found is None:
            return self.full(e)
        if e.op == "where":  # what a condition hides
            return f"tl.where({self.number(e.args[0])}, {self.weight(e.args[1])}, 0.0)"
        row, mark = self.here(name(found.toss.row)), self.number(found.toss.mark)
        mark = self.bind((found.toss, "mark"), f"{mark} >> 1", False)
        weight = self.full(found.weight)
        left = self.bind((found.weight, "spared"), f"spared({weight}, {row}, {mark})", True)
        if found.pair is None or found.number is None:
            return left
        return f"{left} * {self.full(found.pair)} - {weight} * {self.number(found.number)}"


class Text:
    """What is said in such a kernel. Its part has two scores and two sums, the first of which needs one score alone."""

    def __init__(self, spec: Spec, part: Part, plain: Kernel, names: Sequence[str]):
        self.spec, self.part, self.plain, self.v = spec, part, plain, _Values(spec, part.dots, plain.shifts)
        self.kept = {e: f"room.index({k})" for k, e in enumerate(dict.fromkeys(sides(e, spec)[0] for e in part.dots))}
        self.copied = list(dict.fromkeys(sides(e, spec)[1] for e in part.dots))
        self.place, self.ranges = visits(spec)
        self.next = re.sub(r"\bturn\b", "then", self.place["at_any"])
        self.names = textwrap.fill(", ".join(names), 110, initial_indent="    ", subsequent_indent="    ")
        self.parted = [match_dropped_weight(p.weight, spec) for p in part.products]
        self.toss = next((found.toss for found in self.parted if found is not None), None)
        self.fetched, self.stored = self._numbers()
        self.arithmetic: list[str] = []  # of pairs, and what it needs

    def clear(self, even: bool) -> bool:
        """Whether coins, where there are some, are of kept columns and come two by two, as those do where they are
        ``even``, and what is kept for them has no other use."""
        found = [each for each in self.parted if each is not None]
        rest = [p.weight for p, each in zip(self.part.products, self.parted, strict=True) if each is None]
        rest += [e for each in found for e in (each.weight, each.pair) if e is not None]
        own = {e for each in found for e in (each.toss.row, each.number)}
        one = even and self.spec.over == "rows" and len({each.toss for each in found}) == 1
        return not found or (one and own.isdisjoint(topological(rest)))

    def rendered(self, unspecialized: Sequence[str]) -> str:
        """The kernel's function."""
        v, spec = self.v, self.spec
        whole = self._turn(tile_ranges.whole_tile_conditions(spec.fold) if spec.bounds else {}, False, "at_whole")
        other = self._turn({}, True, "at_other")
        kept = []
        for e, room in self.kept.items():
            place = f"{v.pointer(e)} + wide_row[:, None] * {name(e)}_s + wide_lane[None, :] * {name(e)}_f"
            kept.append(f"{room}.store(tl.load({place}, mask=wide_in[:, None], other=0))")
        results, running = self._results(), ", ".join(self._running())
        opening = [*scalars(spec), *self.ranges]
        begin = [
            f"sum{p.place} = warpgroup_mma_init(tl.zeros([KEPT, {WIDTH}], tl.float32, SUMS))"
            for p in self.part.products
        ]
        begin += [f"weight{k} = packed(tl.zeros([KEPT, FOLDED], tl.{spec.narrow}, WEIGHTS))" for k in range(2)]
        self.arithmetic += [*opening, *v.before, *self.stored]
        text = single_warpgroup_template.KERNEL.format(
            name=self.plain.name,
            unspecialized=repr(unspecialized),
            names=self.names,
            own="" if self.toss is None else self.toss.by_columns(),
            made=inside(self._made(), 4),
            opening=inside(opening, 4),
            before=inside(v.before, 4),
            at_next=self.next,
            copied=inside(self._copies(), 4),
            fetched=inside(self.fetched, 4),
            stored=inside(self.stored, 4),
            kept=inside(kept, 4),
            begin=inside(begin, 4),
            whole=inside(whole, 8),
            other=inside(other, 12),
            ended=f"    {running} = warpgroup_mma_wait(0, deps=[{running}])",
            results=inside(results, 4),
            width=WIDTH,
            across=WIDTH // 8,
            down=256 // WIDTH,
        )
        if self.toss is not None:
            text = re.sub(r"(tl\.arange\(0, KEPT, tl\.SliceLayout\(1, \w+\)\))", r"neighbours(\1)", text)
        return text

    def _running(self) -> list[str]:
        return [*(f"sum{p.place}" for p in self.part.products), "weight0", "weight1"]

    def _made(self) -> list[str]:
        """What lies in shared memory: kept vectors, and two tiles of folded ones and of numbers."""
        narrow, allocated = f"tl.{self.spec.narrow}", "tl.allocate_shared_memory({}, {})".format
        layout = f"tl.NVMMASharedLayout.get_default_for([{OWNED}, {WIDTH}], {narrow})"
        lines = [f"room = {allocated(f'{narrow}, [{len(self.kept)}, {OWNED}, {WIDTH}]', layout)}"]
        for x in map(name, self.copied):
            lines.append(f"{x}_ring = {allocated(f'{narrow}, [2] + {x}_box.block_type.shape', f'{x}_box.layout')}")
        for x, (kind, _) in self._places().items():
            lines.append(f"{x}_ring = {allocated(f'tl.{kind}, [2, {OWNED}]', 'tl.SwizzledSharedLayout(1, 1, 1, [0])')}")
        return lines

    def _places(self) -> dict[str, tuple[str, str]]:
        """The numbers of folded indices: their types, and where the next tile's begin."""
        found, start = {}, "tl.cast(next_start, tl.int64)"
        for k in range(len(self.v.shifts)):
            base = f"shift{k}_ptr + tl.cast(batch, tl.int64) * folded_size"
            base = self.v.bind((f"shift{k}", "base"), base, False, f"shift{k}_base")
            found[f"shift{k}"] = "float32", f"{base} + {start} + line"
        for e in self.v.fetched:
            x = name(e)
            found[x] = self.spec.type_of[e], f"{self.v.base(e)} + {start} * {x}_s + line * {x}_s"
        return found

    def _numbers(self) -> tuple[list[str], list[str]]:
        """The next tile's numbers: on their way, and kept, made ready by one thread, not by all that need them."""
        fetched, stored = ["next_in = (next_start + line < folded_size) | (not RAGGED)"], []
        divided = {name(p.number): p.toss.factor for p in self.parted if p is not None and p.number is not None}
        for x, (_, place) in self._places().items():
            fetched.append(f"{x}_next = tl.load({place}, mask=next_in, other=0)")
            text = f"{x}_next"
            if self.toss is not None and x == name(self.toss.row):
                text = f"blended({text}, (tile * KEPT) >> 7).to(tl.int32)"
            text += f" * {literal(1 / divided[x])}" if x in divided else ""
            stored.append(f"{x}_ring.index(place).store({text})")
        return fetched, stored

    def _copies(self) -> list[str]:
        """The next tile's blocks are asked for."""
        size = " + ".join(f"{name(e)}_box.block_type.nbytes" for e in self.copied)
        lines = [f"mbarrier.expect(full.index(place), {size})"]
        for e in self.copied:
            x, spot = name(e), "".join(f"tl.cast(b{d}, tl.int32), " for d in self.spec.box_of[e])
            lines.append(f"copy({x}_box, [{spot}next_start, 0], full.index(place), {x}_ring.index(place))")
        return lines

    def _turn(self, truths: dict[Expr, bool], masked: bool, at: str) -> list[str]:
        """A tile: weights of the first score while the second is made, and sums beside the weights that follow.

        Where coins are tossed, weights are needed twice, and registers hold nothing else: sums are begun at the end."""
        v, running = self.v, ", ".join(self._running())
        v.loop(masked)
        v.inside += [
            "slot = turn % 2",
            f"start = ({self.place[at]}) * FOLDED",
            "folded_at = start + tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES))",
            "folded_in = folded_at < folded_size",
            "then = tl.minimum(turn + 1, visits - 1)",
            "place = 1 - slot",
            f"next_start = ({self.next}) * FOLDED",
            *self.fetched,
            "mbarrier.wait(full.index(slot), (turn // 2) & 1)",
            self._score(0),
            f"{running} = warpgroup_mma_wait(1, deps=[{running}])",
            *self.stored,
            "if turn + 1 < visits:",
            *(f"    {line}" for line in self._copies()),
            self._score(1),
        ]
        waited = "score{0} = warpgroup_mma_wait({1}, deps=[score{0}])".format
        weights = [known(p.weight, truths) for p in self.part.products]
        v.inside.append(waited(0, 1))
        if (found := match_dropped_weight(weights[0], self.spec)) is None:
            for k, weight in enumerate(weights):
                v.inside += [] if k == 0 else [waited(1, 1)]
                self._weigh(k, weight)
                v.inside.append(self._sum(k))
            return v.inside
        first = len(v.inside)
        v.full(found.weight)
        self.arithmetic += v.inside[first:]
        v.inside.append(waited(1, 0))
        for k, weight in enumerate(weights):
            self._weigh(k, weight)
        v.inside += [self._sum(k) for k in range(2)]
        return v.inside

    def _weigh(self, k: int, weight: Expr) -> None:
        """Weights as they are multiplied."""
        v, first = self.v, len(self.v.inside)
        text = f"({v.seen(v.weight(weight), '0.0')}).to(tl.{self.spec.narrow})"
        v.inside.append(f"weight{k} = packed(tl.convert_layout({text}, WEIGHTS))")
        self.arithmetic += v.inside[first:]

    def _sum(self, k: int) -> str:
        p = self.part.products[k]
        return f"sum{p.place} = warpgroup_mma(weight{k}, {self._block(p.vector)}, sum{p.place}, is_async=True)"

    def _score(self, k: int) -> str:
        kept, folded = sides(self.part.dots[k], self.spec)
        block = f"{self._block(folded)}.permute((1, 0))"
        return f"score{k} = warpgroup_mma({self.kept[kept]}, {block}, blank, use_acc=False, is_async=True)"

    def _block(self, e: Expr) -> str:
        return f"{name(e)}_ring.index(slot).reshape([FOLDED, {WIDTH}])"

    def _results(self) -> list[str]:
        """Sums go through shared memory, so that rows are written whole."""
        lines = []
        for p, found, room in zip(self.part.products, self.parted, self.kept.values(), strict=True):
            k, scale = p.place, self.spec.fold.scaled[p.place][1]
            factors = [] if found is None else [literal(found.toss.factor)]
            if scale is not ONE:
                factor = self.v.number(scale)
                factors.append(f"tl.convert_layout({factor}, SUMS)" if self.spec.keeps(scale) else factor)
            total = " * ".join([f"sum{k}", *factors])
            place = f"out{k} + (out_at + wide_row[:, None]) * {WIDTH} + wide_lane[None, :]"
            lines += [
                f"{room}.store(({total}).to(tl.{self.spec.narrow}))",
                f"tl.store({place}, {room}.load(WIDE), mask=wide_in[:, None])",
            ]
        return lines
