"""Folds over many ranks: one wrapper around any engine, for forward and gradient alike, since both are folds.

Each rank folds the pairs it has with the inner engine; then results over a divided axis meet. Where the combination
factors into maxima and sums (sums, softmax, best) it is an all-reduce of whole buffers; else states are gathered and
combined in the order of ranks. Rows and columns divided over one group make a ring: one side travels, with the results
that belong to it, while the work goes on. States are float32 or wider, so that errors do not grow with the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..plan import communication
from ..program.expr import Expr
from ..program.lower import Fold
from . import combine, exchange, parts
from .combine import State
from .evaluate import Sizes
from .exchange import Group, Passing
from .parts import Engine, Part
from .shard import Shard, length

Protocol = Generator[tuple[str, list[Tensor]], list[Tensor], State]  # yields (operation, tensors), gets the outcome


def run(fold: Fold, leaves: list[Any], sizes: Sizes, engine: Engine) -> list[Tensor]:
    """Run a fold over the ranks of ``sizes.shard``; the contract of every engine, on the local leaves."""
    shard = sizes.shard
    if shard is None:
        return engine(fold, leaves, sizes)
    inner = replace(sizes, shard=None)
    try:
        if shard.ring:
            states = _Ring(fold, leaves, inner, shard, engine).run()
        else:
            states = parts.run(fold, leaves, inner, Part(shard.rows.own, shard.cols.own, shard.totals), engine)
            states = _reduced(fold, states, shard)
        return parts.results(fold, states)
    except BaseException:  # whatever it was, the others must not wait for this rank
        for group in shard.groups:
            exchange.hang_up(group)
        raise


# Columns (or rows) divided: an all-reduce with ⊙ ---------------------------------------------------------------


def _reduced(fold: Fold, states: list[State], shard: Shard) -> list[State]:
    """Every state combined with those of the ranks that share its axis: all reductions' messages of a round are one."""
    for over in ("cols", "rows"):
        group = shard.axis(over).group
        mine = [k for k, r in enumerate(fold.reductions) if r.attrs[1] == over]
        if group is not None and mine:
            talks = [
                _PROTOCOLS.get(fold.reductions[k].attrs[0], _gathered)(fold.reductions[k], states[k]) for k in mine
            ]
            for k, state in zip(mine, _talk(talks, group), strict=True):
                states[k] = state
    return states


def _talk(talks: list[Protocol], group: Group) -> list[State]:
    """Run protocols side by side, round by round, one message per operation and number type."""
    results: dict[int, State] = {}
    asked = {k: next(talk) for k, talk in enumerate(talks)}
    while asked:
        answers: dict[int, list[Tensor]] = {}
        for op, dtype in sorted({(op, t.dtype) for op, ts in asked.values() for t in ts}, key=str):
            mine = [(k, ts) for k, (o, ts) in asked.items() if o == op and ts[0].dtype == dtype]
            _exchange(op, mine, answers, group)
        for k in list(asked):
            try:
                asked[k] = talks[k].send(answers[k])
            except StopIteration as end:
                results[k] = end.value
                del asked[k]
    return [results[k] for k in range(len(talks))]


def _exchange(op: str, asked: list[tuple[int, list[Tensor]]], answers: dict[int, list[Tensor]], group: Group) -> None:
    """One message for many tensors: flat, behind each other."""
    tensors = [t for _, ts in asked for t in ts]
    flat = torch.cat([t.reshape(-1) for t in tensors])
    ranks = group.size()
    whole = exchange.gather(flat, group) if op == "GATHER" else exchange.reduce(flat, op, group)
    at = 0
    for k, ts in asked:
        answers[k] = []
        for t in ts:
            part = whole[..., at : at + t.numel()]
            answers[k].append(part.reshape(ranks, *t.shape[1:]) if op == "GATHER" else part.view(t.shape))
            at += t.numel()


def _sum(r: Expr, state: State) -> Protocol:
    return (yield "SUM", state)


def _soft(r: Expr, state: State) -> Protocol:
    """The largest peak first; then every rank's sums, scaled to it, add up."""
    *sums, total, peak = state
    (top,) = yield "MAX", [peak.clone()]
    weight = torch.where(peak == top, 1.0, torch.exp(peak - top))
    scaled = [s * (weight if s.dim() == weight.dim() else weight.unsqueeze(-1)) for s in (*sums, total)]
    return [*(yield "SUM", scaled), top]


def _best(r: Expr, state: State) -> Protocol:
    """The best value; then the first place that has it, where a place of NaN comes before all others."""
    value, place = state
    (largest,) = r.attrs[2]
    worst = -math.inf if largest else math.inf
    nan = value != value
    seen = value.clone() if not value.is_floating_point() else value.nan_to_num(worst, math.inf, -math.inf)
    (top,) = yield "MAX" if largest else "MIN", [seen]
    candidate = torch.where(nan, place, torch.where((value == top) & (place >= 0), place + _AFTER, 2 * _AFTER))
    (first,) = yield "MIN", [candidate]
    if value.dtype.is_floating_point:
        top = torch.where(first < _AFTER, torch.nan, top)
    return [top, torch.where(first == 2 * _AFTER, -1, first % _AFTER)]


_AFTER = 2**61  # behind every place


def _gathered(r: Expr, state: State) -> Protocol:
    """What does not factor: all ranks' states, combined in their order on each of them."""
    found = []
    for t in state:  # a state may mix number types, a message does not
        found += yield "GATHER", [t]
    return combine.merged(r, [found])


_PROTOCOLS = {"sum": _sum, "pick": _sum, "soft": _soft, "best": _best}


# Rows and columns divided over one group: a ring ---------------------------------------------------------------


class _Ring:
    """One side travels: its leaves, and behind them the results that belong to it, which are home after a turn."""

    def __init__(self, fold: Fold, leaves: list[Any], sizes: Sizes, shard: Shard, engine: Engine):
        self.fold, self.leaves, self.sizes, self.shard, self.engine = fold, leaves, sizes, shard, engine
        self.group = shard.rows.group
        self.me, self.count = self.group.rank(), self.group.size()
        self.travels = communication.travels(
            fold, sizes.of, _widths(fold, leaves), sizes.compute.itemsize, shard.totals
        )
        moving = [e.rows if self.travels == "rows" else e.cols for e in fold.leaves]
        self.moving = [k for k, moves in enumerate(moving) if moves and isinstance(leaves[k], Tensor)]
        self.kept = [k for k, r in enumerate(fold.reductions) if r.attrs[1] == self.travels]  # fold the travellers
        self.carried = [k for k, r in enumerate(fold.reductions) if r.attrs[1] != self.travels]  # belong to them

    def run(self) -> list[State]:
        held = [self.leaves[k].contiguous() for k in self.moving]
        axes = [t.dim() - 1 - (self.fold.leaves[k].feature is not None) for k, t in zip(self.moving, held, strict=True)]
        kept: list[State] = []
        coming: Passing | None = None
        for step in range(self.count):
            owner = (self.me - step) % self.count
            after = (owner - 1) % self.count  # whose come next
            leaving = Passing(held, self._room(held, axes, after), self.group) if step < self.count - 1 else None
            states = self._fold(held, owner)
            kept = self._merged(self.kept, kept, states) if step else [states[k] for k in self.kept]
            load = [states[k] for k in self.carried]
            if coming is not None:
                load = self._merged(self.carried, _shaped(coming.done(), load), states)
            flat = [t for state in load for t in state]
            at = [1 + len(self.sizes.batch)] * len(flat)
            coming = Passing(flat, self._room(flat, at, after), self.group) if flat else None
            held = leaving.done() if leaving is not None else held
        home = _shaped(coming.done(), load) if coming is not None else []
        found = dict(zip(self.kept + self.carried, kept + home, strict=True))
        return [found[k] for k in range(len(states))]

    def _merged(self, which: list[int], before: list[State], states: list[State]) -> list[State]:
        return [combine.merged(self.fold.reductions[k], [old, states[k]]) for k, old in zip(which, before, strict=True)]

    def _fold(self, held: list[Tensor], owner: int) -> list[State]:
        leaves = list(self.leaves)
        for k, t in zip(self.moving, held, strict=True):
            leaves[k] = t
        there = self.shard.axis(self.travels).pieces[owner]
        rows, cols = (there, self.shard.cols.own) if self.travels == "rows" else (self.shard.rows.own, there)
        sizes = replace(self.sizes, rows=length(rows), cols=length(cols))
        return parts.run(self.fold, leaves, sizes, Part(rows, cols, self.shard.totals), self.engine)

    def _room(self, like: list[Tensor], axes: list[int], owner: int) -> list[Tensor]:
        """Where another rank's leaves (or results) will come to lie: as these, but of its length."""
        there = length(self.shard.axis(self.travels).pieces[owner])
        return [t.new_empty(*t.shape[:at], there, *t.shape[at + 1 :]) for t, at in zip(like, axes, strict=True)]


def _shaped(flat: list[Tensor], like: list[State]) -> list[State]:
    rest = iter(flat)
    return [[next(rest) for _ in state] for state in like]


def _widths(fold: Fold, leaves: list[Any]) -> dict[str, int]:
    """Bytes of all leaves per row and per column."""
    found = {"rows": 0, "cols": 0}
    for e, v in zip(fold.leaves, leaves, strict=True):
        if isinstance(v, Tensor) and (e.rows or e.cols):
            shape = list(v.shape)
            del shape[v.dim() - 1 - (e.feature is not None)]
            found["rows" if e.rows else "cols"] += torch.Size(shape).numel() * v.element_size()
    return found
