"""Folds over many ranks: one wrapper around any engine, for forward and gradient alike, since both are folds.

Each rank folds the pairs it has with the inner engine; then results over a divided axis meet. Where the combination
factors into maxima and sums (sums, softmax, best) it is an all-reduce of whole buffers; else states are gathered and
combined in the order of ranks. Rows and columns divided over one group make a ring, or a grid (``grid.py``). States are
float32 or wider, so that errors do not grow with the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...program.expression import Expr
from ...program.lower import Fold
from ..common import collectives, combine, subproblem
from ..common.collectives import Group
from ..common.combine import State
from ..common.evaluate import Sizes
from ..common.shard import Shard
from ..common.subproblem import Engine, Part
from .grid import Grid

Protocol = Generator[tuple[str, list[Tensor]], list[Tensor], State]  # yields (operation, tensors), gets the outcome


def run(fold: Fold, leaves: list[Any], sizes: Sizes, engine: Engine) -> list[Tensor]:
    """Run a fold over the ranks of ``sizes.shard``; the contract of every engine, on the local leaves."""
    shard = sizes.shard
    if shard is None:
        return engine(fold, leaves, sizes)
    inner = replace(sizes, shard=None)
    try:
        if shard.ring:
            states = Grid(fold, leaves, inner, shard, engine).run()
        else:
            states = subproblem.run(fold, leaves, inner, Part(shard.rows.own, shard.cols.own, shard.totals), engine)
            states = _reduced(fold, states, shard)
        return subproblem.results(fold, states)
    except BaseException:  # whatever it was, the others must not wait for this rank
        for group in shard.groups:
            collectives.hang_up(group)
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
    whole = collectives.gather(flat, group) if op == "GATHER" else collectives.reduce(flat, op, group)
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
