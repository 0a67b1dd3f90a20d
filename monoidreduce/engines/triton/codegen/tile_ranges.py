"""Which tiles a kernel visits: interval arithmetic on all tiles at once, where the tensors are.

The conditions of a fold (``col_index <= row_index``, equal documents) are evaluated on index ranges and on each tile's
least and greatest value of any leaf they look at. Of each kept tile the kernel is told the first and last folded tile
that is not idle, and two runs of whole tiles between them on which every condition is known. The rules here are those
of ``program/intervals.py`` for the operations that conditions are made of, on tensors; any other operation is unknown.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from ....program.constructors import substitute
from ....program.expression import Expr, const, topological
from ....program.lower import Fold, is_idle
from .kernel_spec import whole_tile_conditions

EDGES = ("first", "whole_first", "whole_last", "again_first", "again_last", "last")
# which of all tiles a split visits, as a kernel finds it: the first splits may have one tile more than the last
SPLIT_RANGE = [
    "# this part of them",
    "turns = tl.cdiv(folded_size, FOLDED)",
    "begin = turns // parts * part + tl.minimum(part, turns % parts)",
    "end = turns // parts * (part + 1) + tl.minimum(part + 1, turns % parts)",
]
_MOST_CELLS = 2**22  # tiles looked at one by one; beyond, neighbours on the folded axis are taken together


@functools.lru_cache(maxsize=1024)
def list_idle_codes(fold: Fold) -> tuple[bool, ...]:
    """For every combination of false, true and unknown of the conditions: whether every reduction sees its identity."""
    chosen = list(whole_tile_conditions(fold))
    answers = []
    for states in itertools.product((0, 1, 2), repeat=len(chosen)):
        replace = {c: const(bool(s)) for c, s in zip(chosen, states, strict=True) if s != 2}
        answers.append(all(is_idle(r, replace) for r in fold.reductions))
    return tuple(answers)


@functools.lru_cache(maxsize=1024)
def identify_table(fold: Fold) -> Any:
    """All that a table of tile ranges reads of a fold: a gradient that skips the same tiles has its forward's table."""
    alike = find_stretches(fold) is None
    return (*whole_tile_conditions(fold).items(), list_idle_codes(fold)) if alike else fold


@functools.lru_cache(maxsize=1024)
def _asks_lengths(fold: Fold) -> bool:
    return any(e.op == "size" for e in topological(whole_tile_conditions(fold)))


def find_longest(fold: Fold, lengths: tuple[int, int], blocks: tuple[int, int]) -> tuple[int, int]:
    """The longest lengths of as many tiles, of which the last folded one is as whole as here: where conditions ask for
    no length, one table serves all of them."""
    if _asks_lengths(fold):
        return lengths
    kept, folded = (-(-n // b) * b for n, b in zip(lengths, blocks, strict=True))
    return kept, folded - (folded != lengths[1])


def compute_tile_ranges(
    fold: Fold, over: str, values: Mapping[Expr, Any], lengths: tuple[int, int], blocks: tuple[int, int], device: Any
) -> Tensor:
    """``[batch or 1, kept tiles, 6]``: ``EDGES``, in folded tiles.

    ``values``: leaves as Python numbers or tensors ``[batch, length]`` (``[batch]`` for one number per batch element);
    ``lengths`` and ``blocks``: of the kept and the folded axis.
    """
    kept_tiles, folded_tiles = (-(-n // b) for n, b in zip(lengths, blocks, strict=True))
    if not folded_tiles:
        return torch.zeros(1, kept_tiles, len(EDGES), dtype=torch.int32, device=device)
    stretch = find_stretches(fold)
    if stretch is not None:
        bounds = functools.partial(compute_tile_ranges, values=values, lengths=lengths, blocks=blocks, device=device)
        own = _stretch_ranges(stretch, over, values, lengths, blocks)
        rest = _hold_everywhere(fold, stretch)
        return _intersect(own, bounds(rest, over)) if whole_tile_conditions(rest) else own
    chosen = whole_tile_conditions(fold)
    batch = max([1, *(v.shape[0] for v in values.values() if isinstance(v, Tensor))])
    group = max(1, -(-batch * kept_tiles * folded_tiles // _MOST_CELLS))
    steps = (blocks[0], blocks[1] * group)
    on_host = torch.device(device).type == "cpu" and not any(isinstance(v, Tensor) for v in values.values())
    with numpy.errstate(all="ignore"):  # what is unknown is infinite
        edges = _find_edges(fold, chosen, _Ranges(over, values, lengths, steps, None if on_host else device))
    edges = torch.from_numpy(edges) if on_host else edges
    return (edges * group).clamp_(max=folded_tiles).to(torch.int32).contiguous()


def _find_edges(fold: Fold, chosen: Mapping[Expr, bool], ranges: _Ranges) -> Any:
    """``EDGES`` of every kept tile, in steps along the folded axis."""
    (kept_tiles, groups), folded = ranges.counts, ranges.lengths[1]
    codes: Any = 0
    whole: Any = True
    for c, truth in chosen.items():
        low, high, _ = ranges(c)
        state = _where(low == high, _long(low), 2)
        codes = codes * 3 + state
        whole = whole & (state == int(truth))
    active, shape = ~_make_idle_table(fold, ranges.device)[codes], (codes.shape[0], kept_tiles, groups)
    active = active if active.shape == shape else _expand(active, shape)
    at = ranges.count_up(0, groups, 1)
    whole = whole & active & ((at + 1) * ranges.steps[1] <= folded)
    first = _least(_where(active, at, groups), -1)
    last = _most(_where(active, at + 1, 0), -1)
    first = _minimum(first, last)
    runs = [first]
    for wanted in (whole, ~whole, whole, ~whole):  # where a run of whole tiles begins and ends, twice
        found = _least(_where(wanted & (at >= runs[-1][..., None]), at, groups), -1)
        runs.append(_minimum(found, last))
    edges = [*runs, last]
    return numpy.array(edges).transpose(1, 2, 0) if ranges.device is None else torch.stack(edges, -1)


@functools.lru_cache(maxsize=1024)
def _make_idle_table(fold: Fold, device: Any) -> Any:
    found = list_idle_codes(fold)
    return numpy.array(found) if device is None else torch.tensor(found, device=device)


# What is done to all tiles at once. Where nothing but numbers is asked, numpy does it: a table of a few tiles takes
# fifty operations, each of which costs torch several times as much, and every new length has a table of its own.


def _choose(of_numpy: Callable[..., Any], of_torch: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays or tensors, by what the first one is."""
    return lambda x, *more: (of_torch if isinstance(x, Tensor) else of_numpy)(x, *more)


_where = _choose(numpy.where, torch.where)
_minimum = _choose(numpy.minimum, torch.minimum)
_maximum = _choose(numpy.maximum, torch.maximum)
_least = _choose(numpy.minimum.reduce, torch.amin)
_most = _choose(numpy.maximum.reduce, torch.amax)
_expand = _choose(numpy.broadcast_to, Tensor.expand)
_double = _choose(lambda x: x.astype(numpy.float64), Tensor.double)
_long = _choose(lambda x: x.astype(numpy.int64), Tensor.long)
_truncate = _choose(numpy.trunc, torch.trunc)
_right_shift = _choose(numpy.right_shift, torch.bitwise_right_shift)


# Stretches: of numbers that rise along both axes, equal ones lie side by side


@functools.lru_cache(maxsize=1024)
def find_stretches(fold: Fold) -> Expr | None:
    """The condition that holds in stretches of both axes, under which all reductions are; None where there is none."""
    found = {e for e in topological(whole_tile_conditions(fold)) if e.op == "stretches"}
    (one, *others) = found or (None,)
    if one is None or others or [a.op for a in one.args[0].args] != ["leaf", "leaf"]:
        return None
    return one if all(is_idle(r, {one: const(False)}) for r in fold.reductions) else None


@functools.lru_cache(maxsize=1024)
def _hold_everywhere(fold: Fold, condition: Expr) -> Fold:
    """The fold where a condition always holds."""
    return Fold(fold.leaves, substitute(fold.reductions, {condition: const(True)}))


def _stretch_ranges(
    stretch: Expr, over: str, values: Mapping[Expr, Any], lengths: tuple[int, int], blocks: tuple[int, int]
) -> Tensor:
    """``EDGES`` of the condition alone: no cell is looked at, so that sequences of any number cost little."""
    first, second = stretch.args[0].args
    kept, folded = (values[e] for e in sorted((first, second), key=lambda e: e.cols if over == "cols" else e.rows))
    batch = max(kept.shape[0], folded.shape[0])
    kept, folded = kept.expand(batch, -1), folded.expand(batch, -1).contiguous()
    starts = torch.arange(0, lengths[0], blocks[0], device=kept.device)
    least, most = kept[:, starts].contiguous(), kept[:, (starts + blocks[0] - 1).clamp(max=lengths[0] - 1)].contiguous()
    begin = torch.searchsorted(folded, least, out_int32=True)
    end = torch.maximum(torch.searchsorted(folded, most, right=True, out_int32=True), begin)
    block = blocks[1]
    first_tile, last = begin // block, (end + block - 1) // block
    last = torch.where(end > begin, last, first_tile)
    whole_first = torch.where(least == most, (begin + block - 1) // block, last)
    whole_first = torch.minimum(whole_first, last)
    whole_last = torch.where(least == most, torch.maximum(end // block, whole_first), last)
    return torch.stack([first_tile, whole_first, whole_last, last, last, last], -1).to(torch.int32)


def _intersect(one: Tensor, other: Tensor) -> Tensor:
    """``EDGES`` where both of two conditions must hold; ``one`` has a single run of whole tiles."""
    first, begin, end, *_, last = one.unbind(-1)
    edges = [torch.maximum(first, other[..., 0])]
    bottom, top = edges[0], torch.maximum(torch.minimum(last, other[..., 5]), edges[0])
    for k in (1, 3):  # each run of the other's whole tiles, inside this one's
        starts = torch.maximum(other[..., k], begin).clamp(bottom, top)
        stops = torch.maximum(torch.minimum(other[..., k + 1], end).clamp(bottom, top), starts)
        nothing = top if k == 3 else bottom
        edges += [torch.where(stops > starts, edge, nothing) for edge in (starts, stops)]
    return torch.stack([*edges, top], -1).contiguous()


class Range(NamedTuple):
    """Least and greatest value on every tile, shaped to broadcast to [batch, kept tile, folded tile].

    Integers stay integers (int64): float64 cannot tell 2**53 from 2**53 + 1, and document ids may be hashes. ``most``
    bounds their magnitude and is known without looking at the data; None for float64 (numbers and truth values)."""

    low: Any  # tensors, or arrays of numpy
    high: Any
    most: int | None = None


_INT64 = torch.iinfo(torch.int64)
_NEAR_OVERFLOW = 2.0**63 * (1 - 2.0**-40)  # more than float64's rounding away from the end of int64


class _Ranges:
    """The ranges of expressions on every tile; ``device``: of tensors, None for arrays of numpy."""

    def __init__(self, over: str, values: Mapping[Expr, Any], lengths: Any, steps: Any, device: Any):
        self.over, self.values, self.lengths, self.steps, self.device = over, values, lengths, steps, device
        self.counts = tuple(-(-n // step) for n, step in zip(lengths, steps, strict=True))

    def count_up(self, start: int, stop: int, step: int) -> Any:
        return (
            numpy.arange(start, stop, step)
            if self.device is None
            else torch.arange(start, stop, step, device=self.device)
        )

    def full(self, value: float) -> Any:
        """One number for all tiles: an integer as one."""
        whole = isinstance(value, int) and not isinstance(value, bool)
        if self.device is None:
            return numpy.array([[[value]]], numpy.int64 if whole else numpy.float64)
        return torch.full((1, 1, 1), value, dtype=torch.int64 if whole else torch.float64, device=self.device)

    def __call__(self, e: Expr) -> Range:
        memo: dict[Expr, Range] = {}
        for n in topological([e]):
            memo[n] = self._node(n, [memo[a] for a in n.args])
        return memo[e]

    def _node(self, e: Expr, args: list[Range]) -> Range:
        if e.op == "const":
            return self._number(e.const)
        if e.op == "size" and e.attrs[0] in ("rows", "cols"):
            return self._number(self.lengths[1 if e.attrs[0] == self.over else 0])
        if e.op in ("row_index", "col_index"):
            return self._index(1 if e.op.startswith(self.over[:3]) else 0)
        if e.op == "leaf":
            return self._leaf(e, self.values[e])
        if e.op == "cast":
            return {"bool": _as_truth, "float": _as_float, "int": _as_integer}[e.attrs[0]](args[0])
        rule = _RULES.get(e.op)
        if rule is None:
            return self._unknown(e)
        if any(x.most is None for x in args):
            args = [_as_float(x) for x in args]
        low, high, *_ = rule(*args)
        if low.dtype in (torch.int64, numpy.int64):
            return _without_overflow(rule, e.op, args, low, high)
        lost = (low != low) | (high != high)
        return Range(_where(lost, -math.inf, low), _where(lost, math.inf, high))

    def _unknown(self, e: Expr) -> Range:
        if e.dtype == "int":
            return Range(self.full(_INT64.min), self.full(_INT64.max), 2**63)
        return Range(self.full(-math.inf), self.full(math.inf))

    def _number(self, value: float) -> Range:
        t = self.full(value)
        return Range(t, t, abs(int(value)) if t.dtype in (torch.int64, numpy.int64) else None)

    def _index(self, axis: int) -> Range:
        low = self.count_up(0, self.lengths[axis], self.steps[axis])
        high = low + (self.steps[axis] - 1)
        high[-1] = self.lengths[axis] - 1
        shape = (1, -1, 1) if axis == 0 else (1, 1, -1)
        return Range(low.reshape(shape), high.reshape(shape), self.lengths[axis])

    def _leaf(self, e: Expr, value: Any) -> Range:
        if not isinstance(value, Tensor):
            return self._number(value)
        small = value.dtype in (torch.bool, torch.uint8)
        most = None if e.dtype != "int" else 255 if small else torch.iinfo(value.dtype).max + 1
        value = value.to(torch.float64 if most is None else torch.int64)
        if not e.rows and not e.cols:
            return Range(value.view(-1, 1, 1), value.view(-1, 1, 1), most)
        axis = 1 if (e.cols if self.over == "cols" else e.rows) else 0
        step = self.steps[axis]
        missing = -value.shape[1] % step
        if missing:
            value = torch.cat([value, value[:, -1:].expand(-1, missing)], 1)
        low, high = value.view(value.shape[0], -1, step).aminmax(dim=-1)
        if most is None:
            lost = low.isnan() | high.isnan()
            low, high = torch.where(lost, -torch.inf, low), torch.where(lost, torch.inf, high)
        low, high = (end.unsqueeze(2 if axis == 0 else 1) for end in (low, high))
        return Range(low, high, most)


def _without_overflow(rule: Callable[..., Any], op: str, args: list[Range], low: Any, high: Any) -> Range:
    """The range of an integer result; any integer at all on tiles where int64 may wrap around."""
    bounds = [x.most or 0 for x in args]
    most = sum(bounds) if op in ("add", "sub") else math.prod(bounds) if op == "mul" else max(bounds)
    if most < 2**63 or op in ("minimum", "maximum", "detach", "bitwise_right_shift"):
        return Range(low, high, most)
    ends = rule(*(Range(_double(x.low), _double(x.high)) for x in args))
    far = (ends[0] <= -_NEAR_OVERFLOW) | (ends[1] >= _NEAR_OVERFLOW)
    return Range(_where(far, _INT64.min, low), _where(far, _INT64.max, high), 2**63)


def _as_truth(x: Range) -> Range:
    surely, never = (x.low > 0) | (x.high < 0), (x.low == 0) & (x.high == 0)
    return _make_truth_range(surely, never)


def _as_float(x: Range) -> Range:
    """Integers as floating-point numbers. A kernel may round them to float32: beyond 2**24 the range is widened."""
    if x.most is None:
        return x
    low, high = _double(x.low), _double(x.high)
    if x.most <= 2**24:
        return Range(low, high)
    return Range(low - abs(low) * 2.0**-23, high + abs(high) * 2.0**-23)


def _as_integer(x: Range) -> Range:
    if x.most is not None:
        return x
    low, high = _truncate(x.low), _truncate(x.high)
    far = (low <= -_NEAR_OVERFLOW) | (high >= _NEAR_OVERFLOW)
    low, high = (_long(_where(far, 0.0, end)) for end in (low, high))
    return Range(_where(far, _INT64.min, low), _where(far, _INT64.max, high), 2**63)


def _make_truth_range(surely: Any, never: Any) -> Range:
    return Range(_double(surely), _double(~never))


def _span_corners(ends: Iterable[Any]) -> Range:
    """The range of these corners."""
    every = list(ends)
    return Range(functools.reduce(_minimum, every), functools.reduce(_maximum, every))


def _compare_less(x: Range, y: Range) -> Range:
    return _make_truth_range(x.high < y.low, x.low >= y.high)


def _compare_less_equal(x: Range, y: Range) -> Range:
    return _make_truth_range(x.high <= y.low, x.low > y.high)


def _compare_equal(x: Range, y: Range) -> Range:
    same = (x.low == x.high) & (y.low == y.high) & (x.low == y.low)
    return _make_truth_range(same, (x.high < y.low) | (x.low > y.high))


def _negate(x: Range) -> Range:
    low, high, _ = _as_truth(x)
    return Range(1 - high, 1 - low)


def _shift_right(x: Range, count: Range) -> Range:
    """Monotone in each argument: the ends are among those of the four corners. A count below 0 shifts all bits out."""
    least = _where(count.low < 0, 0, _where(count.low > 63, 63, count.low))
    most = _where((count.low < 0) | (count.high > 63), 63, count.high)
    return _span_corners(_right_shift(a, b) for a in x[:2] for b in (least, most))


_RULES: dict[str, Callable[..., Range]] = {
    "add": lambda x, y: Range(x.low + y.low, x.high + y.high),
    "sub": lambda x, y: Range(x.low - y.high, x.high - y.low),
    "neg": lambda x: Range(-x.high, -x.low),
    "mul": lambda x, y: _span_corners(a * b for a in x[:2] for b in y[:2]),
    "abs": lambda x: Range(
        _where((x.low <= 0) & (x.high >= 0), 0, _minimum(abs(x.low), abs(x.high))), _maximum(abs(x.low), abs(x.high))
    ),
    "minimum": lambda x, y: Range(_minimum(x.low, y.low), _minimum(x.high, y.high)),
    "maximum": lambda x, y: Range(_maximum(x.low, y.low), _maximum(x.high, y.high)),
    "lt": _compare_less,
    "le": _compare_less_equal,
    "gt": lambda x, y: _compare_less(y, x),
    "ge": lambda x, y: _compare_less_equal(y, x),
    "eq": _compare_equal,
    "ne": lambda x, y: _negate(_compare_equal(x, y)),
    "logical_and": lambda x, y: Range(*map(_minimum, _as_truth(x)[:2], _as_truth(y)[:2])),
    "logical_or": lambda x, y: Range(*map(_maximum, _as_truth(x)[:2], _as_truth(y)[:2])),
    "logical_not": _negate,
    "detach": lambda x: x,
    "stretches": lambda x: x,
    "bitwise_right_shift": _shift_right,
}
