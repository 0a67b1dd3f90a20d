"""Which tiles a kernel visits: interval arithmetic on all tiles at once, where the tensors are.

The conditions of a fold (``col_index <= row_index``, equal documents) are evaluated on index ranges and on each tile's
least and greatest value of any leaf they look at. Of each kept tile the kernel is told the first and last folded tile
that is not idle, and two runs of whole tiles between them on which every condition is known. The rules here are those
of ``program/intervals.py`` for the operations that conditions are made of, on tensors; any other operation is unknown.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...program.build import substitute
from ...program.contract import conditions, interval
from ...program.expr import Expr, const, topological
from ...program.lower import Fold
from ...program.normal import hot_condition
from ...program.reductions import KINDS

Range = tuple[Tensor, Tensor]
EDGES = ("first", "whole_first", "whole_last", "again_first", "again_last", "last")
# which of all tiles a part walks, as a kernel finds it: the first parts may have one tile more than the last
PART = [
    "# this part of them",
    "turns = tl.cdiv(folded_size, FOLDED)",
    "begin = turns // parts * part + tl.minimum(part, turns % parts)",
    "end = turns // parts * (part + 1) + tl.minimum(part + 1, turns % parts)",
]
_MOST_CONDITIONS = 4
_MOST_CELLS = 2**22  # tiles looked at one by one; beyond, neighbours on the folded axis are taken together


@functools.lru_cache(maxsize=1024)
def preferred(fold: Fold) -> dict[Expr, bool]:
    """The conditions that bounds are computed from, and the truth that whole tiles are written for.

    One index compared with data is left out: its range over a tile says nothing. Compared with the other index it is
    false almost everywhere.
    """
    chosen: dict[Expr, bool] = {}
    for c in conditions(fold):
        if len(chosen) == _MOST_CONDITIONS:
            break
        hot, _ = hot_condition(c)
        if hot is None:
            chosen[c] = True
        elif not any(e.op == "leaf" for e in topological([hot[1]])):
            chosen[c] = False
    return chosen


@functools.lru_cache(maxsize=1024)
def idle_codes(fold: Fold) -> tuple[bool, ...]:
    """For every combination of false, true and unknown of the conditions: whether every reduction sees its identity."""
    chosen = list(preferred(fold))
    answers = []
    for states in itertools.product((0, 1, 2), repeat=len(chosen)):
        replace = {c: const(bool(s)) for c, s in zip(chosen, states, strict=True) if s != 2}
        answers.append(all(_idle(r, replace) for r in fold.reductions))
    return tuple(answers)


def _idle(r: Expr, replace: dict[Expr, Expr]) -> bool:
    kind, _, params = r.attrs
    fields = substitute(r.args, replace)
    if kind == "pick":  # nothing to read where its value is zero
        return interval(fields[1], {}) == (0.0, 0.0)
    return KINDS[kind].idle(params, [interval(f, {}) for f in fields])


def bounds(
    fold: Fold, over: str, values: Mapping[Expr, Any], lengths: tuple[int, int], blocks: tuple[int, int], device: Any
) -> Tensor:
    """``[batch or 1, kept tiles, 6]``: ``EDGES``, in folded tiles.

    ``values``: leaves as Python numbers or tensors ``[batch, length]`` (``[batch]`` for one number per batch element);
    ``lengths`` and ``blocks``: of the kept and the folded axis.
    """
    kept_tiles, folded_tiles = (-(-n // b) for n, b in zip(lengths, blocks, strict=True))
    if not folded_tiles:
        return torch.zeros(1, kept_tiles, len(EDGES), dtype=torch.int32, device=device)
    chosen = preferred(fold)
    batch = max([1, *(v.shape[0] for v in values.values() if isinstance(v, Tensor))])
    group = max(1, -(-batch * kept_tiles * folded_tiles // _MOST_CELLS))
    steps = (blocks[0], blocks[1] * group)
    ranges = _Ranges(over, values, lengths, steps, device)
    codes = torch.zeros((), dtype=torch.int64, device=device)
    whole: Any = True
    for c, truth in chosen.items():
        low, high = ranges(c)
        state = torch.where(low == high, low.to(torch.int64), 2)
        codes = codes * 3 + state
        whole = whole & (state == int(truth))
    groups = -(-folded_tiles // group)
    table = torch.tensor(idle_codes(fold), device=device)
    active = ~table[codes].expand(codes.shape[0], kept_tiles, groups)
    at = torch.arange(groups, device=device)
    whole = whole & active & ((at + 1) * steps[1] <= lengths[1])
    first = torch.where(active, at, groups).amin(-1)
    last = torch.where(active, at + 1, 0).amax(-1)
    first = torch.minimum(first, last)
    runs = [first]
    for wanted in (whole, ~whole, whole, ~whole):  # where a run of whole tiles begins and ends, twice
        found = torch.where(wanted & (at >= runs[-1].unsqueeze(-1)), at, groups).amin(-1)
        runs.append(torch.minimum(found, last))
    edges = [*runs, last]
    return (torch.stack(edges, -1) * group).clamp_(max=folded_tiles).to(torch.int32).contiguous()


class _Ranges:
    """Least and greatest value of expressions on every tile, shaped to broadcast to [batch, kept tile, folded tile]."""

    def __init__(self, over: str, values: Mapping[Expr, Any], lengths: Any, steps: Any, device: Any):
        self.over, self.values, self.lengths, self.steps, self.device = over, values, lengths, steps, device

    def __call__(self, e: Expr) -> Range:
        memo: dict[Expr, Range] = {}
        for n in topological([e]):
            memo[n] = self._node(n, [memo[a] for a in n.args])
        return memo[e]

    def _node(self, e: Expr, args: list[Range]) -> Range:
        if e.op == "const":
            return self._number(float(e.const))
        if e.op == "size" and e.attrs[0] in ("rows", "cols"):
            return self._number(float(self.lengths[1 if e.attrs[0] == self.over else 0]))
        if e.op in ("row_index", "col_index"):
            return self._index(1 if e.op.startswith(self.over[:3]) else 0)
        if e.op == "leaf":
            return self._leaf(e, self.values[e])
        if e.op == "cast":
            return _truth(args[0]) if e.attrs[0] == "bool" else args[0] if e.attrs[0] == "float" else _whole(args[0])
        rule = _RULES.get(e.op)
        if rule is None:
            return self._number(0.0)[0] - torch.inf, self._number(0.0)[0] + torch.inf
        low, high = rule(*args)
        lost = low.isnan() | high.isnan()
        return torch.where(lost, -torch.inf, low), torch.where(lost, torch.inf, high)

    def _number(self, value: float) -> Range:
        t = torch.full((1, 1, 1), value, dtype=torch.float64, device=self.device)
        return t, t

    def _index(self, axis: int) -> Range:
        low = torch.arange(0, self.lengths[axis], self.steps[axis], dtype=torch.float64, device=self.device)
        high = (low + self.steps[axis] - 1).clamp(max=self.lengths[axis] - 1)
        shape = (1, -1, 1) if axis == 0 else (1, 1, -1)
        return low.view(shape), high.view(shape)

    def _leaf(self, e: Expr, value: Any) -> Range:
        if not isinstance(value, Tensor):
            return self._number(float(value))
        value = value.to(torch.float64)
        if not e.rows and not e.cols:
            return value.view(-1, 1, 1), value.view(-1, 1, 1)
        axis = 1 if (e.cols if self.over == "cols" else e.rows) else 0
        step = self.steps[axis]
        missing = -value.shape[1] % step
        if missing:
            value = torch.cat([value, value[:, -1:].expand(-1, missing)], 1)
        low, high = value.view(value.shape[0], -1, step).aminmax(dim=-1)
        lost = low.isnan() | high.isnan()
        low, high = torch.where(lost, -torch.inf, low), torch.where(lost, torch.inf, high)
        return (low.unsqueeze(2), high.unsqueeze(2)) if axis == 0 else (low.unsqueeze(1), high.unsqueeze(1))


def _truth(x: Range) -> Range:
    low, high = x
    surely, never = (low > 0) | (high < 0), (low == 0) & (high == 0)
    return surely.double(), (~never).double()


def _whole(x: Range) -> Range:
    return x[0].trunc(), x[1].trunc()


def _between(surely: Tensor, never: Tensor) -> Range:
    return surely.double(), (~never).double()


def _mul(x: Range, y: Range) -> Range:
    ends = torch.stack(torch.broadcast_tensors(*(a * b for a in x for b in y)))
    return ends.amin(0), ends.amax(0)


def _abs(x: Range) -> Range:
    low = torch.where((x[0] <= 0) & (x[1] >= 0), 0.0, torch.minimum(x[0].abs(), x[1].abs()))
    return low, torch.maximum(x[0].abs(), x[1].abs())


def _less(x: Range, y: Range) -> Range:
    return _between(x[1] < y[0], x[0] >= y[1])


def _less_equal(x: Range, y: Range) -> Range:
    return _between(x[1] <= y[0], x[0] > y[1])


def _equal(x: Range, y: Range) -> Range:
    return _between((x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0]), (x[1] < y[0]) | (x[0] > y[1]))


def _not(x: Range) -> Range:
    low, high = _truth(x)
    return 1 - high, 1 - low


def _and(x: Range, y: Range) -> Range:
    (a, b), (c, d) = _truth(x), _truth(y)
    return torch.minimum(a, c), torch.minimum(b, d)


def _or(x: Range, y: Range) -> Range:
    (a, b), (c, d) = _truth(x), _truth(y)
    return torch.maximum(a, c), torch.maximum(b, d)


_RULES: dict[str, Callable[..., Range]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "neg": lambda x: (-x[1], -x[0]),
    "mul": _mul,
    "abs": _abs,
    "minimum": lambda x, y: (torch.minimum(x[0], y[0]), torch.minimum(x[1], y[1])),
    "maximum": lambda x, y: (torch.maximum(x[0], y[0]), torch.maximum(x[1], y[1])),
    "lt": _less,
    "le": _less_equal,
    "gt": lambda x, y: _less(y, x),
    "ge": lambda x, y: _less_equal(y, x),
    "eq": _equal,
    "ne": lambda x, y: _not(_equal(x, y)),
    "logical_and": _and,
    "logical_or": _or,
    "logical_not": _not,
    "detach": lambda x: x,
}
