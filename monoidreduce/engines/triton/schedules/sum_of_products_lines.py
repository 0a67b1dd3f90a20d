"""The lines of a kernel whose groups of warps share a fold (``warp_group_split.py``), for the text of
``sum_of_products_template.py``."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Mapping, Sequence

from ....program.constructors import ONE
from ....program.expression import Expr
from ..codegen import tile_ranges
from ..codegen.dropout import DropoutFactor, match_dropped_weight
from ..codegen.exponents import literal
from ..codegen.expressions import ExpressionWriter
from ..codegen.kernel_spec import Spec
from ..codegen.reductions import known
from . import sum_of_products_template
from .template_lines import fetched, inside, name, scalars, visits
from .warp_group_split import OWNED, WIDTH, Part, Product, folded_numbers, sides

_ROOM = 224 * 1024  # bytes of shared memory
_BLOCK = OWNED * WIDTH * 2  # and of a block of vectors


class _Values(ExpressionWriter):
    """Numbers of pairs whose products were made before them."""

    def __init__(self, spec: Spec, dots: tuple[Expr, ...]):
        super().__init__(spec)
        self.dots, self.ringed = dots, folded_numbers(spec)

    def _leaf(self, e: Expr) -> str:
        return f"{name(e)}_here[None, :]" if e in self.ringed else super()._leaf(e)

    def thrown(self, e: Expr) -> str:
        """A weight whose coins are tossed two at a time, without their factor."""
        if e.op == "where":  # what a condition hides
            return f"tl.where({self.number(e.args[0])}, {self.thrown(e.args[1])}, 0.0)"
        found = match_dropped_weight(e, self.spec)
        assert found is not None and found.pair is not None and found.number is not None
        toss, number = found.toss, self.number(found.number)
        less = self.bind((found.number, "less"), f"{number} * {literal(-1 / toss.factor)}", False)
        row = f"blended({self.number(toss.row)}, {self.block_of(toss.col)}).to(tl.int32)"
        pairs = f"{self.full(found.weight)}, {self.full(found.pair)}"
        return self.bind((e, "thrown"), f"thrown({pairs}, {less}, {row}, {self.number(toss.mark)})", True)

    def product(self, x: Expr, y: Expr) -> str:
        return f"score{next(k for k, e in enumerate(self.dots) if set(e.args) == {x, y})}"


class Text:
    """What is said once in a kernel: rings and barriers, the copying warp, who runs."""

    def __init__(self, spec: Spec, parts: tuple[Part, ...], names: Sequence[str], even: bool):
        self.spec, self.parts, self.relay = spec, parts, len(parts) == 2
        found = {_tosses(p.weight, spec) for part in parts for p in part.products} if even else {None}
        self.toss = found.pop() if len(found) == 1 else None  # of all weights, where coins come two by two
        self.dots = tuple(e for part in parts for e in part.dots)
        self.kept = [list(dict.fromkeys(sides(e, spec)[0] for e in part.dots)) for part in parts]
        self.copied = list(dict.fromkeys(e for part in parts for e in self.read(part)))
        self.numbers = folded_numbers(spec)
        self.sent = len(parts[0].sends)
        self.rooms = sum(map(len, self.kept)) * (1 if self.relay else 2)
        rest = self.rooms * _BLOCK + self.sent * 2 * OWNED * OWNED * 2
        self.depth = min(4, (_ROOM - rest) // (len(self.copied) * _BLOCK))
        ringed = (*self.copied, *self.numbers)
        rings = ["room", *(f"{name(e)}_{what}" for e in ringed for what in ("ring", "full", "empty"))]
        rings += [f"sent{k}" for k in range(self.sent)] + (["sent_full", "sent_empty"] if self.sent else [])
        self.place = visits(spec)[0]
        wrap = lambda lines: textwrap.fill(", ".join(lines), 110, initial_indent="    ", subsequent_indent="    ")
        self.names, self.rings = wrap(names), wrap(rings)

    def read(self, part: Part) -> list[Expr]:
        """What a group reads of what is copied."""
        return [*(sides(e, self.spec)[1] for e in part.dots), *(p.vector for p in part.products)]

    def opening(self) -> list[str]:
        return [*scalars(self.spec), *visits(self.spec)[1]]

    def fields(self) -> dict[str, str]:
        narrow, fetches, begun = f"tl.{self.spec.narrow}", [], []
        allocated = "tl.allocate_shared_memory({}, {})".format
        barriers = lambda count: allocated(f"tl.int64, [{count}, 1]", "mbarrier.MBarrierLayout()")
        layout = f"tl.NVMMASharedLayout.get_default_for([{OWNED}, {WIDTH}], {narrow})"
        made = [f"room = {allocated(f'{narrow}, [{self.rooms}, {OWNED}, {WIDTH}]', layout)}"]
        for e in self.copied:
            x, spot = name(e), "".join(f"tl.cast(b{d}, tl.int32), " for d in self.spec.box_of[e])
            fetches += [
                f"mbarrier.wait({x}_empty.index(slot), phase)",
                f"mbarrier.expect({x}_full.index(slot), {x}_box.block_type.nbytes)",
                f"copy({x}_box, [{spot}start, 0], {x}_full.index(slot), {x}_ring.index(slot))",
            ]
            shape = f"{narrow}, [{self.depth}] + {x}_box.block_type.shape"
            made.append(f"{x}_ring = {allocated(shape, f'{x}_box.layout')}")
            made += [f"{x}_{what} = {barriers(self.depth)}" for what in ("full", "empty")]
            users = sum(e in self.read(part) for part in self.parts) if self.relay else 2
            begun += [f"mbarrier.init({x}_full.index(k), count=1)", f"mbarrier.init({x}_empty.index(k), count={users})"]
        for e in self.numbers:
            x, layout = name(e), "tl.SwizzledSharedLayout(1, 1, 1, [0])"
            made.append(f"{x}_ring = {allocated(f'tl.{self.spec.type_of[e]}, [{self.depth}, {OWNED}]', layout)}")
            made += [f"{x}_{what} = {barriers(self.depth)}" for what in ("full", "empty")]
            begun += [f"mbarrier.init({x}_full.index(k), count=1)", f"mbarrier.init({x}_empty.index(k), count=2)"]
        for k in range(self.sent):
            made.append(f"sent{k} = {allocated(f'{narrow}, [2, {OWNED}, {OWNED}]', sum_of_products_template.SENT)}")
        if self.sent:
            made += [f"sent_{what} = {barriers(2)}" for what in ("full", "empty")]
            made += [f"mbarrier.init(sent_{what}.index({k}), count=1)" for what in ("full", "empty") for k in range(2)]
        runs = [(f"group{k if self.relay else 0}", k, "KEPT" if self.relay else "KEPT // 2") for k in range(2)]
        partition = functools.partial(sum_of_products_template.PARTITION.format, names=self.names, rings=self.rings)
        partitions = [partition(function=f, side=k, own=own) for f, k, own in [*runs, ("copies", 0, "KEPT")]]
        return {
            "names": self.names,
            "own": "" if self.toss is None else self.toss.by_rows(),
            "rings": self.rings,
            "depth": str(self.depth),
            "at_any": self.place["at_any"],
            "opening": inside(self.opening(), 4),
            "fetches": inside([*fetched(self.spec, self.numbers, 2), *fetches, *self._kept()], 8),
            "made": inside(made, 4),
            "begun": inside(begun, 8),
            "partitions": "\n".join(partitions),
        }

    def _kept(self) -> list[str]:
        """Numbers, on their way since before the blocks were waited for, get their places."""
        lines = []
        for x in map(name, self.numbers):
            shift = " >> 1" if self.toss is not None and x == name(self.toss.mark) else ""
            lines += [f"mbarrier.wait({x}_empty.index(slot), phase)", f"{x}_ring.index(slot).store({x}{shift})"]
            lines.append(f"mbarrier.arrive({x}_full.index(slot))")
        return lines


class Group:
    """The function of a group: a part of the work, in every tile."""

    def __init__(self, text: Text, at: int):
        self.text, self.spec, self.part, self.at = text, text.spec, text.parts[at], at
        self.v = _Values(self.spec, text.dots)
        first = str(sum(map(len, text.kept[:at]))) if text.relay else f"SIDE * {len(text.kept[at])}"
        self.rooms = {e: f"room.index({first} + {k})" for k, e in enumerate(text.kept[at])}
        self.weights = [f"weight{k}" for k in range(len(self.part.products))]

    def rendered(self) -> tuple[str, list[str]]:
        """The function, and the lines of its arithmetic alone."""
        part, v, text = self.part, self.v, self.text
        kept = []
        for e, room in self.rooms.items():
            place = f"{v.pointer(e)} + wide_row[:, None] * {name(e)}_s + wide_lane[None, :] * {name(e)}_f"
            kept.append(f"{room}.store(tl.load({place}, mask=wide_in[:, None], other=0))")
        blocks = {e: f"{name(e)}_block" for e in [*self.rooms][: part.held]}
        held = [f"{x} = {self.rooms[e]}.load(tl.DotOperandLayout(0, SCORES, 2))" for e, x in blocks.items()]
        truths = tile_ranges.whole_tile_conditions(self.spec.fold) if self.spec.bounds else {}
        whole, other = self._weigh(truths, False), self._weigh({}, True)
        results = self._results()
        title = "four warps own one side of the kept tile"
        if text.relay:
            title = f"four warps {'are sent' if part.takes else 'send'} numbers of pairs, and have sums of their own"
        body = sum_of_products_template.GROUP.format(
            function=f"group{self.at}",
            title=title,
            names=text.names,
            rings=text.rings,
            width=WIDTH,
            across=WIDTH // 8,
            down=256 // WIDTH,
            opening=inside([*text.opening(), *([] if text.relay else ["tile = tile * 2 + SIDE"])], 4),
            before=inside(v.before, 4),
            kept=inside(kept, 4),
            begin=inside([f"sum{k} = tl.zeros([KEPT, {WIDTH}], tl.float32, SUMS)" for k in part.places], 4),
            at_any=text.place["at_any"],
            first=inside([*self._scores(self.rooms), *self._scored(0, [])], 4),
            first_whole=inside([*whole, *self._named()], 8),
            first_other=inside([*other, *self._named()], 8),
            held=inside(held, 4),
            whole=inside(self._turn(self.rooms | blocks, whole, text.place["at_whole"]), 8),
            other=inside(self._turn(self.rooms | blocks, other, text.place["at_other"]), 12),
            last=inside([*self._sums(part.products), self._summed([])], 4),
            results=inside(results, 4),
        )
        return body, [*v.before, *whole, *other]

    def _turn(self, blocks: Mapping[Expr, str], arithmetic: list[str], at: str) -> list[str]:
        """A tile's scores, the sums of the tile before, and this one's weights while they run."""
        early = self.part.early
        given_back = dict.fromkeys(name(p.vector) for p in self.part.products)
        return [
            f"start = ({at}) * FOLDED",
            "folded_at = start + tl.arange(0, FOLDED, tl.SliceLayout(0, SCORES))",
            "folded_in = folded_at < folded_size",
            *self._sums(self.part.products[:early]),
            *self._scores(blocks),
            *self._sums(self.part.products[early:]),
            *self._scored(len(self.weights) - early, self.weights[:early]),
            *arithmetic,
            self._summed(self.weights[early:]),
            *(f"mbarrier.arrive({x}_empty.index((turn - 1) % {self.text.depth}))" for x in given_back),
            *self._named(),
        ]

    def _named(self) -> list[str]:
        return [f"{w} = next{k}" for k, w in enumerate(self.weights)]

    def _scores(self, blocks: Mapping[Expr, str]) -> list[str]:
        """The scores of a tile are begun."""
        lines, waited = [], set()
        for e in self.part.dots:
            kept, folded = sides(e, self.spec)
            x, slot = name(folded), f"turn % {self.text.depth}"
            if folded not in waited:
                lines.append(f"mbarrier.wait({x}_full.index({slot}), (turn // {self.text.depth}) & 1)")
                waited.add(folded)
            block = f"{x}_ring.index({slot}).reshape([FOLDED, {WIDTH}]).permute((1, 0))"
            lines.append(
                f"{self._score(e)} = warpgroup_mma({blocks[kept]}, {block}, blank, use_acc=False, is_async=True)"
            )
        return lines

    def _score(self, e: Expr) -> str:
        return f"score{self.text.dots.index(e)}"

    def _scored(self, running: int, more: list[str]) -> list[str]:
        """Scores are waited for, while products run; what is read for them alone is given back."""
        names = ", ".join([*map(self._score, self.part.dots), *more])
        summed = {p.vector for p in self.part.products}
        free = [e for e in dict.fromkeys(sides(e, self.spec)[1] for e in self.part.dots) if e not in summed]
        return [
            f"{names} = warpgroup_mma_wait({running}, deps=[{names}])",
            *(f"mbarrier.arrive({name(e)}_empty.index(turn % {self.text.depth}))" for e in free),
        ]

    def _sums(self, products: Sequence[Product]) -> list[str]:
        """Sums of the tile before are begun; what its scores were made of is there."""
        lines, waited = [], {sides(e, self.spec)[1] for e in self.part.dots}
        for p in products:
            x, slot = name(p.vector), f"(turn - 1) % {self.text.depth}"
            if p.vector not in waited:
                lines.append(f"mbarrier.wait({x}_full.index({slot}), ((turn - 1) // {self.text.depth}) & 1)")
                waited.add(p.vector)
            weight = self.weights[self.part.products.index(p)]
            block = f"{x}_ring.index({slot}).reshape([FOLDED, {WIDTH}])"
            lines.append(f"sum{p.place} = warpgroup_mma({weight}, {block}, sum{p.place}, is_async=True)")
        return lines

    def _summed(self, more: list[str]) -> str:
        names = ", ".join([*(f"sum{k}" for k in self.part.places), *more])
        return f"{names} = warpgroup_mma_wait(0, deps=[{names}])"

    def _weigh(self, truths: dict[Expr, bool], masked: bool) -> list[str]:
        """The arithmetic of a tile, from its scores to its weights; what is sent comes first."""
        part, v, narrow = self.part, self.v, self.spec.narrow
        v.loop(masked)
        made = v.full if self.text.toss is None else v.thrown
        seen = lambda e: v.seen_name(made(known(e, truths)), "0.0")
        slot, phase = f"turn % {self.text.depth}", f"(turn // {self.text.depth}) & 1"
        for x in map(name, self.text.numbers):
            v.inside.append(f"mbarrier.wait({x}_full.index({slot}), {phase})")
            v.inside.append(f"{x}_here = {x}_ring.index({slot}).load(tl.SliceLayout(0, SCORES))")
            v.inside.append(f"mbarrier.arrive({x}_empty.index({slot}))")
        if part.takes:
            v.inside.append("mbarrier.wait(sent_full.index(turn % 2), (turn // 2) & 1)")
            v.inside += [f"{name(e)} = sent{k}.index(turn % 2).load(SCORES)" for k, e in enumerate(part.takes)]
            v.inside.append("mbarrier.arrive(sent_empty.index(turn % 2))")
            v.inside += [f"{name(e)}_wide = {name(e)}.to(tl.float32)" for e in part.takes]
            v.inner |= {e: f"{name(e)}_wide" for e in part.takes}
        if part.sends:
            texts = [seen(f) for f in part.sends]
            v.inside.append("mbarrier.wait(sent_empty.index(turn % 2), ((turn // 2) & 1) ^ 1)")
            v.inside += [f"sent{k}.index(turn % 2).store(({t}).to(tl.{narrow}))" for k, t in enumerate(texts)]
            v.inside.append("mbarrier.arrive(sent_full.index(turn % 2))")
        for k, p in enumerate(part.products):
            v.inside.append(f"next{k} = packed(tl.convert_layout(({seen(p.weight)}).to(tl.{narrow}), WEIGHTS))")
        return v.inside

    def _results(self) -> list[str]:
        """Sums go through shared memory, so that rows are written whole."""
        lines, room = [], next(iter(self.rooms.values()))
        for k in self.part.places:
            total, scale = f"sum{k}", self.spec.fold.scaled[k][1]
            total = total if self.text.toss is None else f"({total} * {literal(self.text.toss.factor)})"
            if scale is not ONE:
                factor = self.v.number(scale)
                total = f"({total} * {f'tl.convert_layout({factor}, SUMS)' if self.spec.keeps(scale) else factor})"
            place = f"out{k} + (out_at + wide_row[:, None]) * {WIDTH} + wide_lane[None, :]"
            lines += [
                f"{room}.store({total}.to(tl.{self.spec.narrow}))",
                f"tl.store({place}, {room}.load(WIDE), mask=wide_in[:, None])",
            ]
        return lines


def _tosses(weight: Expr, spec: Spec) -> DropoutFactor | None:
    """The coins of a weight of rows that can be tossed two at a time."""
    found = match_dropped_weight(weight, spec)
    return found.toss if found is not None and found.number is not None and spec.keeps(found.number) else None
