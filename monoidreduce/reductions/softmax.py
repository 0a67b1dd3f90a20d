"""``soft``: logsumexp of one logit, and softmax means of any number of values with it.

Fields: the logit, then the values. Results: z = logsumexp, a mean per value; then, for gradients, log Σ exp(s - peak)
and the peak itself, which is finite. Every form is an online softmax: a running maximum, Σ exp(s - maximum) and
Σ exp(s - maximum) v, guarded so that a row that sees nothing has logsumexp -inf and means 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..program import constructors
from ..program import intervals as iv
from ..program.constructors import ONE, contractions
from ..program.expression import Expr, topological
from ..program.symbol import Symbol
from .base import (
    NUMBERS_PER_INSTANCE,
    Accumulator,
    CombineLaunch,
    Exchange,
    FastForm,
    Form,
    Lines,
    Offset,
    Outputs,
    Reads,
    Reduction,
    State,
    broadcast,
    folded_dim,
    stretch,
)
from .sum import WholeContraction, contract_all, contracted

LOG2E = math.log2(math.e)
_ABOVE = 60  # in powers of two: how far a guess lies above the maximum of one tile
_MOST = 2.0**40  # totals below this leave room for what weights are multiplied by
_LEAST = 2.0**-80  # totals above this lost nothing that counts
_FAR = 60  # in powers of two: up to here above what was guessed, the sums of lanes neither overflow nor lose digits
_INSTANCES = 512  # program instances that combine splits, at least, where there are so many rows
_WIDEST_MEAN = 1024  # features of a mean, up to which a kernel combines splits


class SoftmaxAccumulator(Accumulator):
    """Running maximum m, sum l = Σ exp(s - m), and Σ exp(s - m) v for each value."""

    def start(self) -> None:
        self.peak = self.numbers(-math.inf)
        self.total = self.totals(-1)
        self.values = [self.totals(w, result=k) for k, w in enumerate(self.widths[1:], 1)]

    def step(self, reducer: Any, owned: tuple[bool, ...], tile: Any, at: slice, offset: Offset) -> None:
        root = reducer.roots[0]
        logit = tile.narrow[root] if root in tile.narrow else tile.full(root)
        old = self.peak[:, at]
        peak = torch.maximum(old, logit.amax(self.dim).to(self.compute))
        safe = torch.where(peak.isinf(), 0.0, peak)  # guarded once per row, not per pair
        out = (
            tile.homes.get(root, logit) if owned[0] else torch.empty(tile.tile, dtype=self.compute, device=self.device)
        )
        weight = torch.sub(logit, self.across(safe), out=out)
        self.engine.exp_into(weight, weight)
        shrink = torch.exp(old - safe)
        total = self.total[:, at]
        total.mul_(shrink).add_(weight.sum(self.dim))
        self.peak[:, at] = peak
        for value, parts in zip(self.values, reducer.values, strict=True):
            part = value[:, at]
            part.mul_(shrink if part.dim() == 2 else shrink.unsqueeze(-1))
            for c in parts:
                plain = c.walk or (c.weight.op == "const" and c.weight.const == 1)
                self.engine.contract(part, weight if plain else weight * tile.full(c.weight), c, tile)

    def finish(self) -> list[Tensor]:
        safe = torch.where(self.peak.isinf(), 0.0, self.peak)
        seen = torch.where(self.total == 0, 1.0, self.total)  # a row that sees nothing has mean 0
        means = [v.div_(seen if v.dim() == 2 else seen.unsqueeze(-1)) for v in self.values]
        log_total = self.total.log()
        return [log_total + safe, *means, log_total, safe]


class SoftmaxLines(Lines):
    """Running maximum ``top``, Σ exp(s - top), and Σ exp(s - top) v for each value.

    With bfloat16 products whole tiles go without: ``top`` is then a little above the maximum of the first of them, and
    weights have the range of float32 on both sides. Where one is out of it (later logits lie 2¹⁰⁰ above), which the
    total shows, the program instance begins again.

    A weight is rounded to 16 bits for its product. Measured from the running maximum the largest weight is exactly 1;
    measured from a guess it is rounded too, and where it outweighs all others the mean would inherit its error. So the
    largest weights are noted (``largest``: one for each thread that holds a part of the row), and what rounding took
    off them is taken off the divisor as well: numerator and divisor hold the same weights, and the error cancels. The
    logsumexp is of the exact total.

    With 16-bit products the maximum is kept times log2(e), so that a weight is one multiply-subtract and one exp2; in
    float32 the difference is taken first, so that large logits keep their digits.
    """

    def prepare(self) -> None:
        n = self.name
        self.fast = self.v.spec.narrow is not None
        self.sloped = False
        self.means = [
            self.tools.running_sum(f"{n}_mean{k}", x.feature, "float", self.v, False)
            for k, x in enumerate(self.reduction.args[1:])
        ]
        self.level = self.v.spec.guess and self._is_level()
        self.guesses = self.level and not self._has_short_rows()
        self.rounded = [self._is_rounded(m, x) for m, x in zip(self.means, self.reduction.args[1:], strict=True)]
        self.compensates = self.guesses and any(self.rounded)
        self.restarted = False  # whether this loop has begun again with a running maximum
        self.headroom = 0.0  # by a running maximum, weights are at most two to this power
        self.above = float(_ABOVE)

    def _is_rounded(self, mean: Any, value: Expr) -> bool:
        """Whether a mean's weights, and nothing but them, are rounded to 16 bits for a matrix product."""
        parts = [self.tools.move_factors(c) for c in contractions(value, self.over)]
        plain = [c.weight is ONE and not c.walk and c.vector is not None and c.vector.op == "leaf" for c in parts]
        return all(plain) and not mean.tiny

    def _is_level(self) -> bool:
        """Whether one tile is like another: no data of the folded axis, such as a bias, raises logits.

        ``sloped``: logits fall with a distance between indices, and the tile to look at is the one nearest to the rows'
        own indices."""
        logit = self.reduction.args[0]
        while logit.op == "where" and logit.args[2].const == -math.inf:
            logit = logit.args[1]
        numbers = [e for e in topological([logit]) if e.feature is None and not e.is_pair and self.v.spec.folds(e)]
        self.sloped = bool(numbers)
        return not any(e.op == "leaf" for e in numbers)

    def _has_short_rows(self) -> bool:
        """Whether walks are too short to look at a tile twice: several conditions, or data, say what is seen."""
        logit = self.reduction.args[0]
        conditions = topological(logit.args[:1]) if logit.op == "where" else []
        return any(e.op in ("logical_and", "leaf") for e in conditions)

    def guess(self, fields: tuple[Expr, ...]) -> None:
        """A maximum for whole tiles, from one of them."""
        n, (s, factor) = self.name, self.logit_block(fields[0])
        self.v.inside += [
            f"{n}_top = tl.max({s}, 1){factor} + {self.above:g}",
            f'{n}_top = tl.where(tl.abs({n}_top) == float("inf"), 0.0, {n}_top)',
        ]

    def before_whole_tiles(self) -> list[str]:
        """What whole tiles add to where a guess stands in for the maximum: numbers of each thread's own."""
        n = self.name
        largest = [f"{n}_largest = tl.zeros([KEPT, 4], tl.int32)"] if self.compensates else []
        return [f"{n}_total = tl.zeros([KEPT, 4], {self.v.float})", *largest]

    def after_whole_tiles(self) -> list[str]:
        """The same of each row."""
        n = self.name
        largest = f"rounding(tl.cast({n}_largest, tl.float32, bitcast=True), tl.{self.v.spec.narrow})"
        rounding = [f"{n}_rounding = tl.sum({largest}, 1)"] if self.compensates else []
        return [f"{n}_total = tl.sum({n}_total, 1)", *rounding]

    def guessed(self, also: str = "") -> str:
        """Whether no weight is out of range, and what else is asked of a total; NaN is not in range."""
        near = f"({self.name}_total < {self.tools.literal(_MOST)})"
        near = f"{near} & ({self.name}_total > {self.tools.literal(_LEAST)})" if self.sloped else near
        return f"tl.max(tl.where({near}{also}, 0, 1)) == 0"

    def start(self) -> list[str]:
        n, kind = self.name, self.v.float
        lines = [f'{n}_top = tl.full([KEPT], float("-inf"), {kind})', f"{n}_total = tl.zeros([KEPT], {kind})"]
        lines += [f"{n}_rounding = tl.zeros([KEPT], {kind})"] if self.compensates else []
        return lines + [line for m in self.means for line in m.start()]

    @property
    def totals(self) -> list[Any]:
        return self.means

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, n = self.v, self.name
        parts = [[self.tools.move_factors(c) for c in contractions(value, self.over)] for value in fields[1:]]
        pairs = list(zip(self.means, parts, strict=True))
        delayed = [self.guessing and p[0].weight is ONE and mean.delays_product(p) for mean, p in pairs]
        s, factor = self.logit_block(fields[0])
        for mean, delays in zip(self.means, delayed, strict=True):
            v.inside += mean.add_delayed_product() if delays else []
        self._weigh(s, factor)
        for (mean, cs), delays in zip(pairs, delayed, strict=True):
            v.inside += [] if self.guessing else mean.scale(f"{n}_shrink")
            if delays:
                v.inside.append(mean.delay_product(f"{n}_weight"))
                continue
            for c in cs:
                plain = c.walk or c.weight is ONE
                part = f"{n}_weight" if plain else v.mask_columns(f"{n}_weight * {v.number(c.weight)}", "0.0")
                mean.add(c, part)

    def weigh(self, logit: Expr) -> None:
        """What one tile does to the maximum and to the total: its weights, and what the sums before it shrink by."""
        self._weigh(*self.logit_block(logit))

    def _weigh(self, s: str, factor: str) -> None:
        n, power = self.name, "tl.exp2" if self.fast else "tl.exp"
        if self.guessing:
            self.v.inside.append(f"{n}_weight = {power}({s}{factor} - {n}_top[:, None])")
            self.add_weights()
            return
        headroom = f" - {self.headroom}" if self.headroom else ""
        self.v.inside += [
            f"{n}_new = tl.maximum({n}_top, tl.max({s}, 1){factor}{headroom})",
            f'{n}_safe = tl.where(tl.abs({n}_new) == float("inf"), 0.0, {n}_new)  # rows that saw nothing yet',
            f"{n}_weight = {power}({s}{factor} - {n}_safe[:, None])",
            f"{n}_shrink = {power}({n}_top - {n}_safe)",
            f"{n}_total = {n}_total * {n}_shrink + tl.sum({n}_weight, 1)",
            f"{n}_top = {n}_new",
        ]
        if self.compensates and not self.restarted:
            self.v.inside += [
                f"{n}_most = tl.cast(tl.max(tl.cast({n}_weight, tl.int32, bitcast=True), 1), tl.float32, bitcast=True)",
                f"{n}_rounding = {n}_rounding * {n}_shrink + rounding({n}_most, tl.{self.v.spec.narrow})",
            ]

    def add_weights(self) -> None:
        """Add a tile's weights, measured from a guess, to the total."""
        n = self.name
        self.v.inside.append(f"{n}_total += lanes({n}_weight)")
        if self.compensates:
            self.v.inside.append(f"{n}_largest = tl.maximum({n}_largest, lane_largest({n}_weight))")

    def logit_block(self, logit: Expr) -> tuple[str, str]:
        """The name of a whole block of logits, and the text that multiplies them, if anything does."""
        v, factor = self.v, ""
        if self.fast:
            logit, factor = self.scaled_logit(logit)
        s = v.bind_masked(v.full(logit), 'float("-inf")')
        return s, f" * {factor}" if factor else ""

    def scaled_logit(self, logit: Expr) -> tuple[Expr, str]:
        """A logit as core × (positive factor), the factor taken out of a ``where`` against minus infinity too."""
        core, factor = self.v.linear(logit, positive=True)
        return (core, factor) if core.is_pair else (logit, self.v.factor(LOG2E))

    def finish(self) -> list[tuple[list[str], Any]]:
        n = self.name
        self.v.inside += [
            f'{n}_peak = tl.where(tl.abs({n}_top) == float("inf"), 0.0, {n}_top)'
            + (f" * {self.tools.literal(1 / LOG2E)}" if self.fast else ""),
            f"{n}_log = tl.log({n}_total)",
            f"{n}_seen = tl.where({n}_total == 0.0, 1.0, {n}_total)  # a row that sees nothing has mean 0",
        ]
        if self.compensates:
            self.v.inside.append(f"{n}_rounded = {n}_seen - {n}_rounding  # the total of the weights as multiplied")
        results: list[tuple[list[str], Any]] = [([f"{n}_log + {n}_peak"], None)]
        for m, rounded in zip(self.means, self.rounded, strict=True):
            block = m.feature is not None and not m.tiny
            by = f"{n}_rounded" if self.compensates and rounded else f"{n}_seen"
            texts = [self.v.divide_vectors(t, by) if block else f"{t} / {by}" for t in m.result()]
            if self.scale is not ONE:
                texts = [f"{t} * {self.v.number(self.scale)}" for t in texts]
            results.append((texts, m.feature))
        return [*results, ([f"{n}_log"], None), ([f"{n}_peak"], None)]


class SoftmaxLaneLines(SoftmaxLines):
    """Σ exp(s - ref) per lane, with the first tile's maximum as ``ref``, and the true maximum kept beside it.

    So a pair costs one exponential and nothing waits for a maximum. Where the maximum proves to lie too far from the
    guess, which sums could not bear, the row is walked again, measured from the true one.
    """

    def prepare(self) -> None:
        self.fast, self.guesses = self.v.spec.narrow is not None, False
        self.means = []
        self.sums = [f"{self.name}_total", *(f"{self.name}_mean{k}" for k in range(len(self.reduction.args) - 1))]

    def peek(self, fields: tuple[Expr, ...]) -> None:
        """The guess, from one tile."""
        s, factor = self.logit_block(fields[0])
        self.v.inside.append(f"{self.name}_ref = finite(tl.max({s}, 1){factor})")

    def start(self) -> list[str]:
        top = f'{self.name}_top = tl.full([KEPT, FOLDED], float("-inf"), {self.v.float})'
        return [top, *self.clear()]

    def clear(self) -> list[str]:
        return [f"{name} = tl.zeros([KEPT, FOLDED], {self.v.float})" for name in self.sums]

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, n = self.v, self.name
        s, factor = self.logit_block(fields[0])
        v.inside += [
            f"{n}_top = tl.maximum({n}_top, {s})",
            f"{n}_weight = {'tl.exp2' if self.fast else 'tl.exp'}({s}{factor} - {n}_ref[:, None])",
            f"{n}_total += {n}_weight",
        ]
        for name, value in zip(self.sums[1:], fields[1:], strict=True):
            part = f"{n}_weight * {v.full(value)}"
            v.inside.append(f"{name} += {v.mask_columns(part, '0.0')}")

    def check(self, factor: str) -> list[str]:
        """``{name}_far``: how far the guess lay from the maximum of a row that has one."""
        n = self.name
        return [
            f"{n}_most = tl.max({n}_top, 1){factor}",
            f'{n}_far = tl.max(tl.where({n}_most == float("-inf"), 0.0, tl.abs({n}_most - {n}_ref)))',
        ]

    def correct(self) -> list[str]:
        return [f"{self.name}_ref = finite({self.name}_most)", *self.clear()]

    def finish(self) -> list[tuple[list[str], Any]]:
        n = self.name
        self.v.inside += [
            *(f"{name}_row = tl.sum({name}, 1)" for name in self.sums),
            f"{n}_peak = tl.where({n}_total_row == 0.0, 0.0, {n}_ref)" + (f" * {1 / LOG2E!r}" if self.fast else ""),
            f"{n}_log = tl.log({n}_total_row)",
            f"{n}_seen = tl.where({n}_total_row == 0.0, 1.0, {n}_total_row)  # a row that sees nothing has mean 0",
        ]
        means = [([f"{name}_row / {n}_seen"], None) for name in self.sums[1:]]
        return [([f"{n}_log + {n}_peak"], None), *means, ([f"{n}_log"], None), ([f"{n}_peak"], None)]


def walk_again_if_far(guessing: Sequence[SoftmaxLaneLines], walk: list[str], again: list[str]) -> list[str]:
    """A walk, and another one where a guess was too far off."""
    if not guessing:
        return walk
    checks = [line for k in guessing for line in k.check(k.logit_block(k.reduction.args[0])[1])]
    far = " | ".join(f"({k.name}_far > {_FAR})" for k in guessing)
    corrections = [line for k in guessing for line in k.correct()]
    return [*walk, *checks, f"if {far}:", *(f"    {line}" for line in [*corrections, *again])]


class Softmax(Reduction):
    """Its state: Σ exp(s - peak) × value for each value, Σ exp(s - peak), and the peak (-inf: nothing was seen)."""

    name = "soft"
    fast_forms = FastForm.CPP | FastForm.EDGES | FastForm.FEW_ROWS | FastForm.ALL_LISTS
    fixed = (-1,)  # the peak
    accumulator, lines, lane_lines = SoftmaxAccumulator, SoftmaxLines, SoftmaxLaneLines
    sums_vectors = True
    combine_ops = 1

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(None, "float"), *((v.feature, "float") for v in fields[1:]), (None, "float"), (None, "float")]

    def result_names(self, fields: tuple[Expr, ...], params: tuple) -> tuple[str, ...]:
        means = (f"mean{k}" for k in range(1, len(fields)))
        return "logsumexp", *means, "log_total", "peak"

    def summed(self, fields: tuple[Expr, ...]) -> tuple[Expr, ...]:
        return fields[1:]

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        """LogWSum: one pair (s, v) has weight w = exp(s - z), and D(c, a) g = (w (g_z + ⟨g_v, v - mean⟩), w g_v).

        The weight is exp(s - peak) / Σ exp(s - peak): z itself, rounded, would cost digits where logits are large.
        """
        logit, *values = fields
        _, *means, log_total, peak = results
        raised: Any = torch.exp(logit - peak)  # of a symbol, so a symbol
        weight = raised * Symbol(constructors.apply("decay", log_total.expr))
        inner: Any = 0.0
        for g_log in (g[0], g[-2]):  # z and log_total differ by the peak, a constant: they move alike
            inner = inner if g_log is None else g_log + inner
        for value, mean, gm in zip(values, means, g[1:-2], strict=True):
            if gm is not None:
                gap = value - mean
                one = gap.expr.feature is None
                inner = (gm * gap if one else Symbol(constructors.dot(gm.expr, gap.expr))) + inner
        return [weight * inner, *(None if gm is None else weight * gm for gm in g[1:-2])]

    def idle(self, params: tuple, fields: list[iv.Interval]) -> bool:
        return fields[0] == iv.MINUS_INF

    def absent(self, params: tuple, fields: tuple[Expr, ...]) -> Sequence[float | None]:
        return (-math.inf, *(0.0 if f.is_pair and f.feature is None else None for f in fields[1:]))

    def dense(self, fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: int) -> list[Tensor]:
        """The logsumexp and the means alone."""
        logit, *values = stretch(fields, vectors, over, size)
        dim = folded_dim(over)
        if size == 0:  # of nothing, but a gradient can be asked for
            sums = (v.sum(folded_dim(over, is_v), keepdim=True) for v, is_v in zip(values, vectors[1:], strict=True))
            return [logit.sum(dim, keepdim=True) - math.inf, *sums]
        blind = (logit == -math.inf).all(dim, keepdim=True)
        safe = torch.where(blind, 0.0, logit)
        z = torch.where(blind, -math.inf, torch.logsumexp(safe, dim, keepdim=True))
        weight = torch.where(blind, 0.0, torch.softmax(safe, dim))
        means = []
        for v, vector in zip(values, vectors[1:], strict=True):
            weighted = weight.unsqueeze(-1) * v if vector else weight * v
            means.append(weighted.sum(folded_dim(over, vector), keepdim=True))
        return [z, *means]

    def dense_results(self, results: list[Tensor]) -> list[Tensor]:
        peak = torch.where(results[0].isinf(), 0.0, results[0]).detach()
        return [*results, results[0] - peak, peak]

    def whole_form(self, r: Expr, writer: Any, used: frozenset[int]) -> tuple[Callable[..., list[Tensor]], list[str]]:
        logit, *values = r.args
        found = [contracted(v, r.attrs[1], writer) for v in values]
        logarithm = bool(used & {0, len(r.args)})
        own = WholeSoftmax(r.attrs[1], tuple(parts for parts, _ in found), logarithm)
        return own, [writer.matrix(logit), *(n for _, names in found for n in names)]

    def open(self, params: tuple, results: State, lengths: Sequence[int]) -> State:
        _, *means, log_total, peak = results
        total = log_total.exp()
        peak = torch.where(log_total.isinf(), log_total, peak)  # what saw nothing has none, what saw infinity has that
        return [*(m * broadcast(total, m) for m in means), total, peak]

    def merge(self, params: tuple, state: State) -> State:
        *sums, total, peak = state
        top = peak.amax(0, keepdim=True)
        weight = torch.where(peak == top, 1.0, torch.exp(peak - top))
        return [*((s * broadcast(weight, s)).sum(0, keepdim=True) for s in (*sums, total)), top]

    def close(self, params: tuple, state: State) -> State:
        *sums, total, peak = state
        safe = torch.where(peak.isinf(), 0.0, peak)
        seen = torch.where(total == 0, 1.0, total)  # a row that sees nothing has mean 0
        log_total = torch.where(total == 0, -math.inf, seen.log())  # so written, its gradient is 0 there
        return [log_total + safe, *(s / broadcast(seen, s) for s in sums), log_total, safe]

    def empty_state(self, params: tuple, state: State) -> State:
        empty = [t.new_zeros(1, *t.shape[1:]) for t in state]
        return [*empty[:-1], empty[-1].fill_(-math.inf)]

    def settled(self, results: list[Tensor]) -> list[Tensor]:
        """A peak may be a maximum or a guess of one: what is the same is its sum with the logarithm beside it."""
        z = results[-2] + results[-1]
        return [*results[:-2], z, z]

    def exchange(self, params: tuple, state: State) -> Exchange:
        """The largest peak first; then every rank's sums, scaled to it, add up."""
        *sums, total, peak = state
        (top,) = yield "MAX", [peak.clone()]
        weight = torch.where(peak == top, 1.0, torch.exp(peak - top))
        return [*(yield "SUM", [s * broadcast(weight, s) for s in (*sums, total)]), top]

    def tile_reads(self, fields: tuple[Expr, ...], over: str) -> Reads:
        return fields[:1], tuple(contractions(v, over) for v in fields[1:])

    def tile_width(self, r: Expr, size_of: Callable[[str], int]) -> int:
        return 1

    def tile_bytes(self, memory: Any, params: tuple, reads: Reads, owned: tuple[bool, ...]) -> int:
        weighted = max([0, *(memory.contraction(c, weighted=True) for v in reads[1] for c in v)])
        return (0 if owned[0] else memory.wide) + weighted

    def no_kernel(self, r: Expr) -> str:
        return ""

    combine_text = """

@triton.jit
def part(log, peak, place, here):
    # the total's logarithm and the peak of one part: what saw nothing has none, what saw infinity has that
    of_total = tl.load(log + place, mask=here, other=float("-inf"))
    top = tl.load(peak + place, mask=here, other=0.0)
    return of_total, tl.where(tl.abs(of_total) == float("inf"), of_total, top)


@triton.jit
def share(of_total, own, top):
    # what a part's sums count in the whole; infinities too. The choice stands between this product and the sum of all
    # shares: fused with it, threads that hold the same sum would differ in its last bit
    equal = own == top[:, None]
    weight = tl.exp(tl.where(equal, 0.0, own) - tl.where(equal, 0.0, top[:, None])) * tl.exp(of_total)
    return tl.where(of_total == float("-inf"), 0.0, weight)


@triton.jit(do_not_specialize=["parts"])
def unite_softmax(
    z_out, mean_out, log_out, peak_out, mean, log, peak, parts, rows,
    WIDTH: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, NUMBERS: tl.constexpr, ALL: tl.constexpr,
    SOME: tl.constexpr, WAIT: tl.constexpr,
):
    if WAIT:
        tl.extra.cuda.gdc_wait()  # for the kernel that writes the parts
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)
    here = at < rows
    inside = here[:, None] & (lane < WIDTH)[None, :]
    each = tl.arange(0, ALL)[None, :]
    of_total, own = part(log, peak, at[:, None] + each.to(tl.int64) * rows, here[:, None] & (each < parts))
    top = tl.max(own, 1)  # where one is NaN, so is its weight
    total = tl.sum(share(of_total, own, top), 1)
    sums = tl.zeros([ROWS, LANES], tl.float32)
    if WIDTH:
        for first in range(0, parts, SOME):  # several at once, so that their loads run side by side
            some = first + tl.arange(0, SOME)[None, :]
            place, known = at[:, None] + some.to(tl.int64) * rows, here[:, None] & (some < parts)
            their_total, theirs = part(log, peak, place, known)
            block = mean + place[:, :, None] * WIDTH + lane[None, None, :]
            block = tl.load(block, mask=known[:, :, None] & (lane < WIDTH)[None, None, :], other=0.0)
            sums += tl.sum(share(their_total, theirs, top)[:, :, None] * block, 1)
    seen = tl.where(total == 0.0, 1.0, total)  # a row that sees nothing has mean 0
    if WIDTH:
        tl.store(mean_out + at[:, None] * WIDTH + lane[None, :], sums / seen[:, None], mask=inside)
    if NUMBERS:
        of_total = tl.where(total == 0.0, float("-inf"), tl.log(seen))
        safe = tl.where(tl.abs(top) == float("inf"), 0.0, top)
        tl.store(z_out + at, of_total + safe, mask=here)
        tl.store(log_out + at, of_total, mask=here)
        tl.store(peak_out + at, safe, mask=here)
"""

    def combine_launches(self, params: tuple, stacked: tuple[Form, ...], splits: int) -> list[CombineLaunch] | None:
        """One launch for each mean; the first of them writes the numbers too."""
        (numbers, _), count = stacked[0], len(stacked)
        widths = [shape[-1] if len(shape) > len(numbers) else 1 for shape, _ in stacked[1:-2]]
        if any(dtype is not torch.float32 for _, dtype in stacked) or max([1, *widths]) > _WIDEST_MEAN:
            return None
        found = []
        for k, width in enumerate(widths or [0]):
            lanes, mean = 1 << max(width - 1, 0).bit_length(), 1 + k if widths else 0
            every = math.prod(numbers[1:])
            whole = max(2, 1 << (splits - 1).bit_length())
            rows = max(1, min(32, NUMBERS_PER_INSTANCE // max(lanes, whole), every // _INSTANCES))
            rows = 1 << (rows.bit_length() - 1)
            some = max(1, min(whole, 4 * NUMBERS_PER_INSTANCE // (rows * lanes)))
            lengths = (("WIDTH", width), ("LANES", lanes), ("ROWS", rows))
            constants = (*lengths, ("NUMBERS", k == 0), ("ALL", whole), ("SOME", some))
            written, read = (0, mean, count - 2, count - 1), (mean, count - 2, count - 1)
            found.append(CombineLaunch("unite_softmax", written, read, splits, every, constants))
        return found

    def count_pair(self, counter: Any, r: Expr) -> None:
        counter.count_number(r.args[0])
        counter.plain += 3  # its maximum, the difference, the sum
        counter.special += 1
        for value in r.args[1:]:
            for c in contractions(value, r.attrs[1]):
                counter.count_contraction(c, weighted=True)

    def exchanged_bytes(self, r: Expr, width: Callable[[Expr], int], item: int) -> tuple[int, int]:
        return (2 + sum(map(width, r.args[1:]))) * item, 0


@dataclass(frozen=True)
class WholeSoftmax:
    """Means by torch's softmax, whose gradient cancels exactly where it should; a row that sees nothing has mean 0.

    The logarithm is that of the sum of exp(logit - peak), the peak a constant to gradients, guarded once per row.
    """

    over: str
    values: tuple[tuple[WholeContraction, ...], ...]
    logarithm: bool  # whether it is read

    def __call__(self, sizes: Any, logit: Tensor, *given: Tensor) -> list[Tensor]:
        dim = -1 if self.over == "cols" else -2
        peak = logit.detach()
        peak = peak.amax(dim, keepdim=True) if logit.shape[dim] else peak.sum(dim, keepdim=True)
        means = self._means(sizes, logit, peak == -math.inf, dim, given) if self.values else []
        safe = torch.where(peak.isinf(), 0.0, peak)
        if not self.logarithm:
            return [safe.squeeze(dim), *means, safe.squeeze(dim), safe.squeeze(dim)]
        total = (logit - safe).exp_().sum(dim)
        blind = total == 0
        log_total = torch.where(blind, -math.inf, torch.where(blind, 1.0, total).log())
        safe = safe.squeeze(dim)
        return [log_total + safe, *means, log_total, safe]

    def _means(self, sizes: Any, logit: Tensor, blind: Tensor, dim: int, given: Sequence[Tensor]) -> list[Tensor]:
        weight = torch.softmax(torch.where(blind, 0.0, logit), dim)
        blind, found, at = blind.squeeze(dim), [], 0
        for parts in self.values:
            count = sum(p.count for p in parts)
            mean = contract_all(parts, given[at : at + count], self.over, weight, sizes)
            found.append(torch.where(broadcast(blind, mean), 0.0, mean))
            at += count
        return found
