"""Folds over many ranks: one wrapper around any engine, for forward and gradient alike, since both are folds.

Each rank folds the pairs it has with the inner engine; then results over a divided axis meet. Where the combination
factors into maxima and sums (sums, softmax, best) it is an all-reduce of whole buffers; else states are gathered and
combined in the order of ranks. Rows and columns divided over one group make a ring, or a grid (``grid.py``). States are
float32 or wider, so that errors do not grow with the ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...program.lower import Fold
from ...reductions import State, kind_of
from ...reductions.base import Exchange
from ..common import shard as collectives
from ..common import subproblem
from ..common.evaluate import Sizes
from ..common.shard import Group, Shard
from ..common.subproblem import Engine, Subproblem
from .grid import Grid


def run(fold: Fold, leaves: list[Any], sizes: Sizes, engine: Engine) -> list[Tensor]:
    """Run a fold over the ranks of ``sizes.shard``; the contract of every engine, on the local leaves."""
    shard = sizes.shard
    if shard is None:
        return engine(fold, leaves, sizes)
    inner = replace(sizes, shard=None)
    try:
        if shard.ring:
            states = _reduced(fold, Grid(fold, leaves, inner, shard, engine).run(), shard, ("both",))
        else:
            states = subproblem.run_subproblem(
                fold, leaves, inner, Subproblem(shard.rows.own, shard.cols.own, shard.totals), engine
            )
            states = _reduced(fold, states, shard, ("cols", "rows"))
        return subproblem.finish_states(fold, states)
    except BaseException:  # whatever it was, the others must not wait for this rank
        for group in shard.groups:
            collectives.abort_group(group)
        raise


# Columns (or rows) divided: an all-reduce with ⊙ ---------------------------------------------------------------


def _reduced(fold: Fold, states: list[State], shard: Shard, axes: tuple[str, ...]) -> list[State]:
    """Every state combined with those of the ranks that share its axis: all reductions' messages of a round are one.
    One over both axes is combined along each of them; ``axes`` ``"both"`` is one group that divides both."""
    for over in axes:
        group = shard.axis(over).group
        mine = [k for k, r in enumerate(fold.reductions) if r.attrs[1] in (over, "both")]
        if group is not None and mine:
            talks = [kind_of(fold.reductions[k]).exchange(fold.reductions[k].attrs[2], states[k]) for k in mine]
            for k, state in zip(mine, _talk(talks, group), strict=True):
                states[k] = state
    return states


def _talk(talks: list[Exchange], group: Group) -> list[State]:
    """Run the kinds' exchanges side by side, round by round, one message per operation and number type."""
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
    whole = collectives.all_gather(flat, group) if op == "GATHER" else collectives.all_reduce(flat, op, group)
    at = 0
    for k, ts in asked:
        answers[k] = []
        for t in ts:
            part = whole[..., at : at + t.numel()]
            answers[k].append(part.reshape(ranks, *t.shape[1:]) if op == "GATHER" else part.view(t.shape))
            at += t.numel()
