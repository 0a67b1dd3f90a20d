"""The warp-specialised attention forward: a softmax-weighted sum of vectors, with a producer warp and consumer groups.

``exp2`` of a tile takes half as long as its two MMAs, so both must run side by side. One producer warp copies blocks of
the folded axis into ring buffers. Each consumer warp group has 64 kept indices: it starts the scores of a tile and the
sums of the tile before, and makes weights of the scores while the sums run. With bfloat16 the maximum is guessed from
the first tile; rows whose guess was too low are computed again with a running maximum (online softmax).

**To give it another tile, edit** ``SCHEDULE``. That one value says how many consumer groups an instance has (64 kept
indices each), how many folded indices a tile has, how deep the ring buffers are, and how registers are shared out;
everything else follows: the plan that is chosen, the kernel's text, the compiler's options.
``docs/internals/schedules.md`` shows it step by step, with what to run afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .....plan.default_tiles import Tile
from .....program.contract import contractions
from .....program.expression import Expr, topological
from .....reductions.softmax import SoftmaxLines
from ...codegen import compiler, kernel_text, tile_ranges
from ...codegen.accumulators import move_factors_to_weight
from ...codegen.dropout import DropoutFactor, match_dropout_factor
from ...codegen.exponents import literal
from ...codegen.expressions import ExpressionWriter, is_one
from ...codegen.kernel_spec import Spec
from ...codegen.reductions import known, make
from .. import gluon_parts, hopper, spec_from_tensors
from ..gluon_parts import GROUP_ROWS, Partitions, Ring, TileOrder, enter_tile, fill, indent, leaf_name
from ..kernel_plan import KernelPlan
from . import attention_template
from .logit_forms import COEFFICIENTS, AlibiLine, SoftcapPolynomial, match_alibi, match_softcap

_SHARED = 227 * 1024  # bytes of shared memory of a Hopper multiprocessor that one kernel may have


@dataclass(frozen=True)
class AttentionSchedule:
    """How an instance of the kernel runs."""

    groups: int  # consumer warp groups, of 64 kept indices each
    folded: int  # folded indices of a tile: a power of two
    ring: int  # blocks of each operand in flight
    registers: tuple[int, ...]  # of a thread: in each consumer group but the first, which has the rest; in the producer
    width: int = 128  # features of all vectors. Of 64, the compiler's own schedule is 7 % faster (H200)

    def __post_init__(self) -> None:
        if len(self.registers) != self.groups:
            raise ValueError(f"{self.groups} groups need {self.groups} register counts, not {self.registers}")
        if self.shared_bytes > _SHARED:
            raise ValueError(f"{self.shared_bytes} bytes of shared memory; an instance has {_SHARED}")

    @property
    def kept(self) -> int:
        """Kept indices of an instance."""
        return self.groups * GROUP_ROWS

    @property
    def tile(self) -> Tile:
        """The tile as plans have it: kept and folded indices, warps (of the first group), ring depth."""
        return self.kept, self.folded, 4, self.ring

    @property
    def shared_bytes(self) -> int:
        """The resident tile, two rings of blocks, and a block of each group for retries, in 16 bits."""
        return 2 * self.width * (self.kept + 2 * self.ring * self.folded + self.groups * self.folded)


SCHEDULE = AttentionSchedule(groups=2, folded=128, ring=2, registers=(232, 40))

_NUMBER_RINGS = 2  # rings of one number per folded index, at most: shared memory holds no more
_LEAST = 2.0**-80  # totals above this were not rounded to nothing


def matches_plan(plan: KernelPlan, device: torch.device) -> bool:
    """True when a plan asks for a warp-specialised kernel, and its tile is this schedule's."""
    tile = plan.block_kept == SCHEDULE.kept and plan.num_warps == 4
    return plan.boxes == 2 and tile and hopper.runs_warp_specialized(device)


def choose_tile(spec: Spec, device: torch.device, length: int, count: int) -> Tile | None:
    """The tile of ``count`` folds of ``length`` kept indices each. None when there is no such kernel, when it would
    leave multiprocessors idle, or when the compiler's schedule is faster.

    Conditions on data make walks short, as within packed documents: those end before they pay for the ring buffers'
    start-up (H200: 0.44 ms, by the compiler's schedule 0.28)."""
    short = spec.bounds and spec_from_tensors.condition_leaves(spec.fold)
    few = count * length < SCHEDULE.kept * spec_from_tensors.processors(device)
    if not hopper.runs_warp_specialized(device) or short or few or write_kernel(spec) is None:
        return None
    return SCHEDULE.tile


@dataclass(frozen=True)
class Operands:
    """The vectors: queries and keys make scores, weights and values make sums (whichever side is folded)."""

    queries: Expr
    keys: Expr
    values: Expr


@functools.lru_cache(maxsize=1024)
def find_operands(spec: Spec) -> Operands | None:
    """The vectors of a fold that is one softmax-weighted sum, its logits made of one product; None for any other."""
    (r, *others) = spec.fold.reductions
    if others or r.attrs[0] != "soft" or len(r.args) != 2 or spec.narrow is None or spec.split or spec.deep:
        return None
    sums = [move_factors_to_weight(c) for c in contractions(r.args[1], spec.over)]
    dots = [e for e in topological(r.args) if e.op in ("dot", "sqdist", "fsum")]
    if [e.op for e in dots] != ["dot"] or len(sums) != 1 or sums[0].walk or sums[0].minus is not None:
        return None
    queries, keys = dots[0].args[::-1] if spec.folds(dots[0].args[0]) else dots[0].args
    values = sums[0].vector
    vectors = {e for e in topological(r.args) if e.op == "leaf" and e.feature is not None}
    if values is None or values is keys or vectors != {queries, keys, values} or spec.folds(queries):
        return None
    copied = keys in spec.box_of and values in spec.box_of and spec.type_of[queries] == spec.narrow
    fits = copied and all(spec.width(e.feature) == SCHEDULE.width for e in vectors)
    return Operands(queries, keys, values) if fits else None


@functools.lru_cache(maxsize=1024)
def write_kernel(spec: Spec, even: bool = True, aligned: bool = True) -> kernel_text.Kernel | None:
    """Write the kernel of a spec, with the arguments that any other rendering has; None where there is none.

    ``even``: whether there is an even number of columns, so that dropout can take two at once; ``aligned``: whether one
    folded tile holds the nearest index of every kept index of an instance, so that no other tile meets the diagonal."""
    operands = find_operands(spec)
    if operands is None:
        return None
    plain = compiler.compile_fold(spec)
    if plain.shifts:
        return None
    text = _Text(spec, operands, even, aligned)
    names, unspecialized = kernel_text.list_arguments(spec, list(plain.leaves), 0)
    names += COEFFICIENTS if text.softcap else ()
    body, generated = text.write(plain.name, names, unspecialized)
    functions = text.device_functions(body)
    made = gluon_parts.assemble(spec, plain, gluon_parts.IMPORTS, body, generated, SCHEDULE.groups, functions)
    return made and replace(made, made=text.softcap.coefficients() if text.softcap else ())


class _PairValues(ExpressionWriter):
    """Numbers of pairs whose score the first MMA made."""

    ringed: tuple[Expr, ...] = ()  # numbers that the producer loads
    toss: DropoutFactor | None = None  # the dropout of the weights; its factor is applied at the end
    alone = False  # whether this step is of a group that retries, without the producer

    def _leaf(self, e: Expr) -> str:
        if e not in self.ringed or self.alone:
            return f"({super()._leaf(e)} >> 1)" if self.toss and e is self.toss.mark else super()._leaf(e)
        x = leaf_name(e)
        return f"load_numbers({x}_ring, {x}_full, step, tl.SliceLayout(0, SCORES))[None, :]"

    def apart(self, at: str) -> str:
        return f"index_distance(tl.sum({at}, 1), start, score)"

    def product(self, x: Expr, y: Expr) -> str:
        return "score"

    def lane(self, feature: str | int | None, room: int = 0) -> tuple[str, str | None]:
        return "wide_lane", None

    def divided(self, block: str, name: str) -> str:
        factor = literal(self.toss.factor if self.toss else 1.0)
        return f"{block} * tl.convert_layout({factor} / {name}, tl.SliceLayout(1, SUMS))[:, None]"


class _Text:
    """The parts of one kernel's text."""

    def __init__(self, spec: Spec, operands: Operands, even: bool, aligned: bool):
        self.spec, self.operands, self.narrow = spec, operands, f"tl.{spec.narrow}"
        self.v = v = _PairValues(spec)
        (part,) = contractions(spec.fold.reductions[0].args[1], spec.over)
        v.ringed = _ringed_numbers(spec)
        v.toss = (
            match_dropout_factor(move_factors_to_weight(part).weight, spec) if even and spec.over == "cols" else None
        )
        soft = make(0, *spec.fold.scaled[0], v)
        assert isinstance(soft, SoftmaxLines)
        self.soft = soft
        self.n, self.total = soft.name, f"{soft.name}_mean0"
        self.guesses = soft.level
        soft.rounded = [soft.rounded[0] or v.toss is not None]  # dropout masks weights when they are rounded
        soft.compensates = self.guesses and soft.rounded[0]
        self.truths = tile_ranges.whole_tile_conditions(spec.fold) if spec.bounds else {}
        logit = known(soft.reduction.args[0], self.truths)
        self.softcap = match_softcap(soft, logit) if self.guesses else None
        self.alibi = match_alibi(soft, logit) if self.guesses and aligned else None
        self.order = TileOrder(spec, SCHEDULE.kept if self.guesses and soft.sloped else 0)
        self.keys = Ring.of(operands.keys, spec, SCHEDULE.ring, SCHEDULE.groups)
        self.values = Ring.of(operands.values, spec, SCHEDULE.ring, SCHEDULE.groups)
        self._carry_weights()

    def _carry_weights(self) -> None:
        """How weights get from one step to the next: packed two to a register or, after dropout, joined in words."""
        rounded = f"{self.n}_part.to({self.narrow})"
        self.operand, self.last, self.unpack = "weights", "weights", list[str]()
        if self.v.toss:
            self.weights, self.operand, self.last = f"join_words({rounded})", "operand", "split_words(weights, WEIGHTS)"
            self.unpack = [f"operand = {self.last}"]
        else:
            weights = f"tl.convert_layout({rounded}, WEIGHTS)"
            self.weights = f"pack_pairs({weights})" if self.spec.bounds or self.softcap else weights

    def write(self, name: str, arguments: Sequence[str], unspecialized: Sequence[str]) -> tuple[str, list[str]]:
        """The kernel's text, and of it the lines that come from code generation."""
        numbers = [leaf_name(e) for e in self.v.ringed]
        both = (self.keys.name, self.values.name)
        buffers = ["resident", "retry_block", "retry_full", *(f"{x}_ring" for x in both)]
        buffers += [f"{x}_{state}" for x in both for state in ("full", "empty")]
        buffers += [f"{x}_{part}" for x in numbers for part in ("ring", "full")]
        partitions = Partitions(arguments, buffers)
        consumer, generated = self._consumer(partitions)
        body = self._producer(partitions) + consumer + self._entry(partitions, name, unspecialized)
        return body, generated

    def device_functions(self, body: str) -> str:
        """Those that the kernel calls."""
        pair = {"bfloat16": "bf16x2", "float16": "f16x2"}[self.spec.narrow or "bfloat16"]
        holes = {
            "least": (self.v.toss.least if self.v.toss else 0) * 0x10001,
            "narrow": self.spec.narrow,
            "pair": pair,
            "ring": SCHEDULE.ring,
        }
        called = [text for name, text in attention_template.DEVICE_FUNCTIONS.items() if f"{name}(" in body]
        return "\n".join(text.format(**holes) for text in called)

    def _opening(self) -> list[str]:
        return [*gluon_parts.scalar_opening(self.spec), *self.order.opening]

    def _producer(self, partitions: Partitions) -> str:
        store = []
        for x, e in zip(map(leaf_name, self.v.ringed), self.v.ringed, strict=True):
            shift = " >> 1" if self.v.toss and e is self.v.toss.mark else ""
            store += [f"{x}_ring.index(slot).store({x}{shift})", f"mbarrier.arrive({x}_full.index(slot))"]
        load = gluon_parts.load_ahead(self.spec, self.v.ringed, SCHEDULE.folded // 32)
        return fill(
            gluon_parts.PRODUCER,
            parameters=partitions.parameters(),
            opening=self._opening(),
            tile=self.order.any(),
            depth=SCHEDULE.ring,
            phase=f"(step // {SCHEDULE.ring}) & 1",
            produce=[*load, *self.keys.produce("phase ^ 1"), *self.values.produce("phase ^ 1"), *store],
        )

    def _entry(self, partitions: Partitions, name: str, unspecialized: Sequence[str]) -> str:
        groups, ring, width = SCHEDULE.groups, SCHEDULE.ring, SCHEDULE.width
        kept, both = f"KEPT // {groups}", (self.keys, self.values)
        layout = f"tl.NVMMASharedLayout.get_default_for([{kept}, {width}], {self.narrow})"
        allocate = [
            gluon_parts.allocate("resident", self.narrow, f"[{groups}, {kept}, {width}]", layout),
            *(r.allocate_blocks(self.narrow) for r in both),
            self.keys.allocate_blocks(self.narrow, "retry_block", groups),
            gluon_parts.allocate_barriers("retry_full", groups),
            *(line for r in both for line in r.allocate_barriers()),
        ]
        init = []
        for x, e in zip(map(leaf_name, self.v.ringed), self.v.ringed, strict=True):
            allocate.append(gluon_parts.allocate_numbers(x, self.spec.type_of[e], ring, "FOLDED"))
            allocate.append(gluon_parts.allocate_barriers(f"{x}_full", ring))
            init.append(f"mbarrier.init({x}_full.index(k), count=1)")
        runs = [("consumer", k, kept) for k in range(groups)]
        return fill(
            gluon_parts.ENTRY,
            unspecialized=repr(unspecialized),
            name=name,
            arguments=partitions.entry(),
            allocate=allocate,
            depth=ring,
            init=[*init, *(r.init_full() for r in both), *(r.init_empty() for r in both)],
            init_others=[
                f"for k in tl.static_range({groups}):",
                "    mbarrier.init(retry_full.index(k), count=1)",
            ],
            specialize=partitions.specialize([*runs, ("producer", 0, "KEPT")], ", ".join(map(str, SCHEDULE.registers))),
        )

    def _consumer(self, partitions: Partitions) -> tuple[str, list[str]]:
        v, truths = self.v, self.truths
        arithmetic = {
            "first_cut": self._weigh({}, True, first=True),
            "first_whole": self._weigh(truths, False, first=True),
            "whole": self._weigh(truths, False, form=self.alibi),
            "cut": self._weigh({}, True),
            "retry": self._weigh({}, True, retries=True),
            "capped": self._weigh(truths, False, form=self.softcap) if self.softcap else [],
        }
        load = gluon_parts.load_resident(v.pointer(self.operands.queries), self.operands.queries, "resident")
        begin, retry = self._begin(), self._retry(arithmetic["retry"]) if self.guesses else []
        results = self._results()
        before_whole, whole = self._whole_step(arithmetic["whole"], arithmetic["capped"])
        generated = [*v.before, *begin, *results, *(line for lines in arithmetic.values() for line in lines)]
        text = fill(
            attention_template.CONSUMER,
            parameters=partitions.parameters(),
            ring=SCHEDULE.ring,
            width=SCHEDULE.width,
            groups=SCHEDULE.groups,
            layouts=gluon_parts.layouts(SCHEDULE.width),
            opening=self._opening(),
            lanes=gluon_parts.lanes(SCHEDULE.width),
            before=v.before,
            load=[load],
            begin=begin,
            total=self.total,
            keys=self.keys.name,
            values=self.values.name,
            enter_first=enter_tile(self.order.any()),
            first_cut=arithmetic["first_cut"],
            first_whole=arithmetic["first_whole"],
            weights=self.weights,
            before_whole=before_whole,
            whole=whole,
            cut=self._step(arithmetic["cut"], enter_tile(self.order.cut()), "resident"),
            operand=self.last,
            retry=retry,
            results=results,
        )
        return text, generated

    def _step(self, arithmetic: list[str], enter: list[str], queries: str, ahead: Sequence[str] = ()) -> list[str]:
        """One tile: start its scores and the sums of the tile before, weigh the scores while the sums run.

        ``ahead``: numbers that are loaded while both MMAs run."""
        keys, values, total, operand = self.keys.name, self.values.name, self.total, self.operand
        return [
            f"score = start_scores({queries}, {keys}_ring, {keys}_full, step, zeros)",
            *self.unpack,
            f"{total} = start_sums({operand}, {values}_ring, {values}_full, step - 1, {total})",
            *ahead,
            "score = warpgroup_mma_wait(1, deps=[score])",
            self.keys.release(),
            *enter,
            *arithmetic,
            f"{total}, {operand} = warpgroup_mma_wait(0, deps=[{total}, {operand}])",
            self.values.release("(step - 1)"),
            *([] if self.guesses else [self._rescale()]),
            f"weights = {self.weights}",
        ]

    def _whole_step(self, whole: list[str], capped: list[str]) -> tuple[list[str], list[str]]:
        """The loop over whole tiles, and what comes before it. With softcap, the polynomial runs where the first tile
        showed that it applies. Queries are held in registers unless softcap or ALiBi need these."""
        n, before, queries = self.n, list[str](), "resident"
        if self.softcap:
            before.append(f"{n}_capped = {self.softcap.applies()}")
            whole = [f"if {n}_capped > 0:", *indent(capped), "else:", *indent(whole)]
        elif not self.alibi:
            queries = f"{leaf_name(self.operands.queries)}_block"
            before.append(f"{queries} = resident.load(tl.DotOperandLayout(0, SCORES, 2))  # queries stay in registers")
        ahead = dict.fromkeys(line.strip() for line in whole if self.v.toss and " = load_numbers(" in line)
        whole = [line for line in whole if line.strip() not in ahead]
        if not self.spec.bounds:
            whole.append(f"{n}_total = order_before_wait({n}_total)")
        return before, self._step(whole, enter_tile(self.order.whole(), mask=False), queries, list(ahead))

    def _weigh(
        self,
        truths: dict[Expr, bool],
        masked: bool,
        first: bool = False,
        retries: bool = False,
        form: SoftcapPolynomial | AlibiLine | None = None,
    ) -> list[str]:
        """The arithmetic of a tile, from its scores to its weights, ``{n}_part``.

        ``first``: of the first tile, which guesses the maximum; ``retries``: by a running maximum, without the
        producer; ``form``: a cheaper form of the logit."""
        soft, v, n = self.soft, self.v, self.n
        v.loop(masked)
        v.alone = retries
        soft.guessing, soft.restarted = self.guesses and not retries, retries
        logit, value = (known(a, truths) for a in soft.reduction.args)
        if soft.guessing and first:
            soft.guess((logit,))
        v.inside.append(f"# {kernel_text.describe_reduction(soft.reduction)}")
        form.write_weights() if form else soft.weigh(logit)
        (c,) = contractions(value, soft.over)
        weight = move_factors_to_weight(c).weight
        if v.toss:
            row = f"blended({v.number(v.toss.row)}, {v.block_of(v.toss.col)}).to(tl.int32)"
            part = v.seen(f"drop_pairs({n}_weight, {row}, {v.number(v.toss.mark)})", "0.0")
        else:
            part = f"{n}_weight" if is_one(weight) else v.seen(f"{n}_weight * {v.number(weight)}", "0.0")
        return [*v.inside, f"{n}_part = {part}"]

    def _begin(self) -> list[str]:
        """The softmax's running values."""
        n, rows = self.n, "tl.SliceLayout(1, SCORES)"
        if not self.guesses:
            return [
                f'{n}_top = tl.full([KEPT], float("-inf"), tl.float32, {rows})',
                f"{n}_total = tl.zeros([KEPT], tl.float32, {rows})",
            ]
        largest = [f"{n}_largest = lane_largest(zeros)"] if self.soft.compensates else []
        return [f"{n}_total = lanes(zeros)", *largest]

    def _rescale(self) -> str:
        """Rescale the accumulator to the new running maximum."""
        return f"{self.total} = {self.total} * tl.convert_layout({self.n}_shrink, tl.SliceLayout(1, SUMS))[:, None]"

    def _retry(self, arithmetic: list[str]) -> list[str]:
        """Check the guessed maximum; compute rows again where it was wrong."""
        n, rows, compensates = self.n, "tl.SliceLayout(1, SCORES)", self.soft.compensates
        rounding = [
            f"{n}_rounding = rounding(tl.cast({n}_largest, tl.float32, bitcast=True), {self.narrow})",
            f"{n}_rounding = tl.convert_layout(tl.sum({n}_rounding, 1), {rows})",
        ]
        right = f" & {self.softcap.was_right()}" if self.softcap else ""
        block = "retry_block"
        if self.keys.corner.count(",") != self.values.corner.count(","):
            block = f"retry_block.reshape({self.values.name}_box.block_type.shape)"
        text = fill(
            attention_template.RETRY,
            n=n,
            total=self.total,
            width=SCHEDULE.width,
            rounding=rounding if compensates else [],
            near=self.soft.guessed(f" & ({n}_total > {literal(_LEAST)}){right} | (kept_at >= kept_size)"),
            no_rounding=[f"{n}_rounding = tl.zeros([KEPT], tl.float32, {rows})"] if compensates else [],
            enter=enter_tile(self.order.any()),
            copy_keys=self.keys.copy("start", "retry_full", "retry_block"),
            arithmetic=arithmetic,
            rescale=[self._rescale()],
            weights=self.weights,
            copy_values=self.values.copy("start", "retry_full", block),
            operand=self.last,
        )
        return text.split("\n")

    def _results(self) -> list[str]:
        """Numbers are stored from registers; vectors go through the resident tile's memory."""
        self.v.loop(False)
        stores = []
        for k, (texts, feature) in enumerate(self.soft.finish()):
            if feature is None:
                stores.append(f"tl.store(out{k} + out_at + kept_lane, {texts[0]}, mask=kept_in)")
            else:
                width = self.spec.width(feature)
                stores += gluon_parts.store_vectors(self.spec, k, width, "resident", texts[0])
        return [*self.v.inside, *stores]


def _ringed_numbers(spec: Spec) -> tuple[Expr, ...]:
    """The numbers of folded indices that the producer loads: each thread of a group needs a quarter of them."""
    numbers = [e for e in spec.fold.leaves if e.feature is None and spec.folds(e) and not spec.keeps(e)]
    return tuple(e for e in numbers if spec.type_of[e] in ("float32", "int32"))[:_NUMBER_RINGS]
