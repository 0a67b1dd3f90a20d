"""``best``: the largest (or smallest) number of all pairs and its place, the first of equals; NaN beats all.

Parameters: ``(largest,)``. A row that sees nothing better than an infinity has the place -1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..program import intervals as iv
from ..program.constructors import find_listed, listed_node
from ..program.expression import Expr, index
from ..program.symbol import Symbol
from .base import (
    FLOATS,
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
    folded_dim,
    shift_places,
    split_blocks,
    stretch,
)

NOWHERE = torch.iinfo(torch.int64).max  # behind every place
_AFTER = 2**61  # behind every place, and twice that is still an int64
_RUN, _LONG = 32, 1024


def worst(dtype: torch.dtype, largest: bool) -> float:
    """What the best of nothing is; an end of int64 stays an exact Python integer."""
    if dtype.is_floating_point:
        return -math.inf if largest else math.inf
    info = torch.iinfo(dtype)
    return info.min if largest else info.max


def is_chosen(over: str, field: Any, place: Any) -> Any:
    """Whether a pair is the one at ``place`` of the folded axis; of several equal entries of a list, the first."""
    at = index(over.rstrip("s"))
    listed = find_listed([field.expr])
    if listed is None:
        return Symbol(at) == place
    (form,) = listed.attrs
    if form[0] == "pages":  # no page is listed twice
        return Symbol(listed_node("listed_position", form, listed.args) if over == "cols" else at) == place
    return (Symbol(at) == place) & Symbol(listed_node("listed_once", form, listed.args))


def first_best(x: Tensor, dim: int, largest: bool) -> Tensor:
    """Where the best is, the first of equals: which run of numbers has it, and where in that run.

    torch finds a best number without its place in a tenth of the time that it takes with it."""
    where = functools.partial(torch.argmax if largest else torch.argmin, dim=dim, keepdim=True)
    size = x.shape[dim]
    if size < _LONG or x.device.type != "cpu":
        return where(x)
    whole = size - size % _RUN
    runs = x.narrow(dim, 0, whole).unflatten(dim, (whole // _RUN, _RUN))
    run = where((torch.amax if largest else torch.amin)(runs, dim))
    lanes = (*run.shape[:dim], 1, _RUN) if dim == -1 else (*run.shape[:dim], 1, _RUN, run.shape[-1])
    place = run * _RUN + where(runs.gather(dim - 1, run.unsqueeze(dim).expand(lanes))).squeeze(dim - 1)
    if whole == size:
        return place
    rest = where(x.narrow(dim, whole, size - whole)) + whole
    both = torch.cat([place, rest], dim)
    return both.gather(dim, where(x.gather(dim, both)))


class BestAccumulator(Accumulator):
    """The best value so far and its place; the first of equals, and NaN beats all, as in torch."""

    def start(self) -> None:
        self.largest = self.params[0]
        if self.fields[0].dtype == "float":
            self.value = self.numbers(-math.inf if self.largest else math.inf)
        else:
            info = torch.iinfo(torch.int64)
            self.value = self.numbers(info.min if self.largest else info.max, torch.int64)
        self.place = self.numbers(-1, torch.int64)

    def step(self, reducer: Any, owned: tuple[bool, ...], tile: Any, at: slice, offset: Offset) -> None:
        x = tile.full(reducer.roots[0])
        place = first_best(x, self.dim, self.largest)
        value = x.gather(self.dim, place).squeeze(self.dim).to(self.value.dtype)
        old = self.value[:, at]
        place, kept = shift_places(place.squeeze(self.dim), offset), self.place[:, at]
        better = (value > old) if self.largest else (value < old)
        equal = value == old
        if value.dtype.is_floating_point:
            better = better | (value.isnan() & ~old.isnan())
            equal = equal | (value.isnan() & old.isnan())
        better = better | (equal & (place < kept))
        self.place[:, at] = torch.where(better, place, kept)
        self.value[:, at] = torch.where(better, value, old)

    def edge(self, at: slice) -> Tensor:
        return self.value[:, at]

    def finish(self) -> list[Tensor]:
        return [self.value, self.place]


class BestLines(Lines):
    """The best value so far and its place; -1 until something better than infinity was seen."""

    def prepare(self) -> None:
        x = self.reduction.args[0]
        self.type = self.v.float if x.dtype == "float" else "tl.int64"
        self.worst = self.tools.literal(-math.inf if self.params[0] else math.inf)
        if x.dtype != "float":
            self.worst = repr(-(2**63) if self.params[0] else 2**63 - 1)
        self.better, self.extreme = ("larger", "highest") if self.params[0] else ("smaller", "lowest")

    def start(self) -> list[str]:
        n = self.name
        return [f"{n} = tl.full([KEPT], {self.worst}, {self.type})", f"{n}_at = tl.full([KEPT], -1, tl.int32)"]

    def mask_columns(self, x: Expr) -> str:
        """A tile's values, the worst where nothing is."""
        value = self.v.full(x) if x.dtype == "float" else f"{self.v.full(x)}.to(tl.int64)"
        return self.v.mask_columns(value, f"tl.full([1, 1], {self.worst}, {self.type})")

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, n = self.v, self.name
        v.inside += [
            f"{n}_new = {self.mask_columns(fields[0])}",
            f"{n}_tile = tl.reduce({n}_new, 1, {self.extreme})",
            f"{n}_here = {self._here(fields[0])}",
            f"{n}_place = tl.min(tl.where({n}_here, {self.place_of(fields)}, 2147483647), 1)",
            f"{n}, {n}_at = {self.better}({n}, {n}_at, {n}_tile, {n}_place)",
        ]

    def _here(self, x: Expr) -> str:
        """Where a tile's best is; NaN is best. NVIDIA's sums make only one bit pattern of NaN, so sums with noise are
        compared bit by bit: half the instructions, and those of a sample overlap with nothing else."""
        new, tile = f"{self.name}_new", f"{self.name}_tile[:, None]"
        if self.v.spec.native and x.op == "add" and any(a.op == "gumbel" for a in x.args):
            return f"{new}.to(tl.int32, bitcast=True) == {tile}.to(tl.int32, bitcast=True)"
        return f"({new} == {tile}) | ({new} != {new})"

    def finish(self) -> list[tuple[list[str], Any]]:
        return [([self.name], None), ([f"{self.name}_at.to(tl.int64)"], None)]


class BestLaneLines(BestLines):
    """The best of each lane and its place, joined at the end: no warp waits for another inside the loop."""

    def start(self) -> list[str]:
        n = self.name
        worst = f"{n} = tl.full([KEPT, FOLDED], {self.worst}, {self.type})"
        return [worst, f"{n}_at = tl.full([KEPT, FOLDED], -1, tl.int32)"]

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, n = self.v, self.name
        v.inside += [
            f"{n}_x = {self.mask_columns(fields[0])}",
            f"{n}_place = tl.zeros([KEPT, FOLDED], tl.int32) + {self.place_of(fields)}",
            f"{n}, {n}_at = {self.better}({n}, {n}_at, {n}_x, {n}_place)",
        ]

    def finish(self) -> list[tuple[list[str], Any]]:
        n = self.name
        self.v.inside.append(f"{n}_row, {n}_row_at = tl.reduce(({n}, {n}_at), 1, {self.better})")
        return [([f"{n}_row"], None), ([f"{n}_row_at.to(tl.int64)"], None)]


class Best(Reduction):
    """Its state is its results: a value and a place."""

    name = "best"
    fast_forms = FastForm.CPP | FastForm.EDGES | FastForm.ALL_LISTS
    place = 1
    accumulator, lines, lane_lines = BestAccumulator, BestLines, BestLaneLines
    plain_ops, combine_ops = 40, 3

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(None, fields[0].dtype), (None, "int")]

    def result_names(self, fields: tuple[Expr, ...], params: tuple) -> tuple[str, ...]:
        return "value", "index"

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        return [torch.where(is_chosen(over, fields[0], results[1]), g[0], 0.0)]

    def absent(self, params: tuple, fields: tuple[Expr, ...]) -> Sequence[float | None]:
        return (worst(torch.float64 if fields[0].dtype == "float" else torch.int64, params[0]),)

    def idle(self, params: tuple, fields: list[iv.Interval]) -> bool:
        return fields[0] == (iv.MINUS_INF if params[0] else (iv.INF, iv.INF))

    def selected(self, params: tuple) -> int:
        return 1

    def dense(self, fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: int) -> list[Tensor]:
        (x,) = stretch(fields, vectors, over, size)
        (largest,) = params
        dim = folded_dim(over)
        if size == 0:  # of nothing, but a gradient can be asked for
            value = x.sum(dim, keepdim=True, dtype=x.dtype) + worst(x.dtype, largest)
            return [value, torch.full_like(value, -1, dtype=torch.int64)]
        at = (x.argmax if largest else x.argmin)(dim, keepdim=True)
        value = x.gather(dim, at)
        return [value, torch.where(value == worst(value.dtype, largest), -1, at)]

    def merge(self, params: tuple, state: State) -> State:
        """The best value and the first place that has it; NaN beats all, as in torch."""
        value, place = state
        top = value.amax(0, keepdim=True) if params[0] else value.amin(0, keepdim=True)
        tied = (value == top) | (value != value)
        first, winner = torch.where(tied & (place >= 0), place, NOWHERE).min(0, keepdim=True)
        return [value.gather(0, winner), torch.where(first == NOWHERE, -1, first)]

    def close(self, params: tuple, state: State) -> State:
        return state

    def merge_ordered(self, params: tuple, results: State) -> list[Tensor]:
        """Of parts in the order of their places torch takes the first of equals, and NaN before all."""
        value, winner = results[0].max(0, keepdim=True) if params[0] else results[0].min(0, keepdim=True)
        return [value[0], results[1].gather(0, winner)[0]]

    def empty_state(self, params: tuple, state: State) -> State:
        return no_places(params[0], state)

    def exchange(self, params: tuple, state: State) -> Exchange:
        """The best value; then the first place that has it, where a place of NaN comes before all others."""
        value, place = state
        (largest,) = params
        lowest = -math.inf if largest else math.inf
        nan = value != value
        seen = value.clone() if not value.is_floating_point() else value.nan_to_num(lowest, math.inf, -math.inf)
        (top,) = yield "MAX" if largest else "MIN", [seen]
        candidate = torch.where(nan, place, torch.where((value == top) & (place >= 0), place + _AFTER, 2 * _AFTER))
        (first,) = yield "MIN", [candidate]
        if value.dtype.is_floating_point:
            top = torch.where(first < _AFTER, torch.nan, top)
        return [top, torch.where(first == 2 * _AFTER, -1, first % _AFTER)]

    def tile_bytes(self, memory: Any, params: tuple, reads: Reads, owned: tuple[bool, ...]) -> int:
        return 0

    combine_text = """

@triton.jit
def highest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def lowest(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["parts"])
def unite_best(
    value_out, place_out, value, place, parts, rows,
    LARGEST: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, PARTS)
    here = at < rows
    inside = (k < parts)[:, None] & here[None, :]
    worst = float("-inf") if LARGEST else float("inf")
    v = tl.load(value + k[:, None].to(tl.int64) * rows + at[None, :], mask=inside, other=worst)
    top = tl.reduce(v, 0, highest) if LARGEST else tl.reduce(v, 0, lowest)
    tied = (v == top[None, :]) | (v != v)  # NaN is before all, as in torch
    first = tl.min(tl.where(tied, k[:, None], PARTS), 0)
    tl.store(value_out + at, top, mask=here)
    tl.store(place_out + at, tl.load(place + first.to(tl.int64) * rows + at, mask=here), mask=here)
"""

    def combine_launches(self, params: tuple, stacked: tuple[Form, ...], splits: int) -> list[CombineLaunch] | None:
        (shape, dtype), _ = stacked
        if dtype not in FLOATS:
            return None
        constants = (("LARGEST", params[0]), *split_blocks(splits))
        return [CombineLaunch("unite_best", (0, 1), (0, 1), splits, math.prod(shape[1:]), constants)]

    def exchanged_bytes(self, r: Expr, width: Callable[[Expr], int], item: int) -> tuple[int, int]:
        return (item if r.args[0].dtype == "float" else 8) + 8, 0


def no_places(largest: bool, state: State) -> State:
    """Values and places of one part that saw nothing."""
    value, place = (t.new_zeros(1, *t.shape[1:]) for t in state)
    return [value.fill_(worst(value.dtype, largest)), place.fill_(-1)]
