"""Folds over many ranks: one wrapper around any engine, for forward and gradient alike, since both are folds.

Each rank folds the pairs it has with the inner engine; then results over a divided axis meet. Where the combination
factors into maxima and sums (sums, softmax, best) it is an all-reduce of whole buffers; else states are gathered and
combined in the order of ranks. Rows and columns divided over one group make a ring, or a grid. States are
float32 or wider, so that errors do not grow with the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import NoGradientError
from ...plan import communication
from ...program.expression import Expr
from ...program.lower import Fold, Lowered
from ...reductions import State, kind_of
from ...reductions.base import Exchange
from ..common import combine, subproblem
from ..common.block_gradients import Blocks, add_gradients, iterate_block_reductions, split_cotangents
from ..common.evaluate import Evaluator, Sizes, from_layout, to_layout
from ..common.gradient_program import (
    build_gradient_program,
    constant_results,
    detach_views,
    load_values,
    save_values,
    zero_gradient,
)
from ..common.shard import (
    Group,
    Ranges,
    RingTransfer,
    Shard,
    abort_group,
    all_gather,
    all_reduce,
    count_indices,
    gather_ranks,
    own_slice,
    replicate,
    sum_replicas,
)
from ..common.subproblem import Engine, Subproblem

# Rows and columns sharded over one group: the ranks form a grid, one axis is gathered and the other travels.
#
# With n ranks and W ``slices``, each rank folds the columns of W ranks with the rows of n / W ranks, so that every pair
# is folded once. One axis is stationary: its leaves are all-gathered within a ring of ranks once, and its results are
# reduce-scattered. The other axis travels around a second ring: the next shard is received while the present one is
# folded, and the results that belong to a shard follow it. W = n is ring attention: columns travel, rows stay. W = 1 is
# the same with rows travelling. In between, less is sent (``plan/communication.py``) and more is held.


@dataclass(frozen=True)
class Ring:
    """Ranks of a group that send to their successor: ``members[at]`` is this one."""

    group: Group
    members: tuple[int, ...]
    at: int

    def __len__(self) -> int:
        return len(self.members)

    def back(self, steps: int) -> int:
        """The rank ``steps`` positions before this one: after as many steps, this rank holds its shard."""
        return self.members[(self.at - steps) % len(self)]

    def transfer(self, send: Sequence[Tensor], receive: Sequence[Tensor]) -> RingTransfer:
        return RingTransfer(send, receive, self.group, self.back(-1), self.back(1))


class Grid:
    """A fold whose rows and columns are both sharded over one group."""

    def __init__(self, fold: Fold, leaves: list[Any], sizes: Sizes, shard: Shard, engine: Engine):
        self.fold, self.leaves, self.sizes, self.shard, self.engine = fold, leaves, sizes, shard, engine
        group = shard.rows.group
        self.me, ranks = group.rank(), group.size()
        held, item, batch = bytes_per_index(fold, leaves), sizes.compute.itemsize, torch.Size(sizes.batch).numel()
        slices, self.stays = communication.choose_grid(
            fold, sizes.of, held, item, shard.totals, ranks, shard.slices, batch
        )
        self.travels = "cols" if self.stays == "rows" else "rows"
        line = ranks // slices
        u, v = divmod(self.me, line)
        self.rings = {
            "rows": Ring(group, tuple(u * line + k for k in range(line)), v),
            "cols": Ring(group, tuple(k * line + v for k in range(slices)), u),
        }
        # results of the stationary axis (which fold the travelling one) stay; those of the travelling axis go with it
        self.kept = [k for k, r in enumerate(fold.reductions) if r.attrs[1] == self.travels]
        self.carried = [k for k, r in enumerate(fold.reductions) if r.attrs[1] == self.stays]
        self.both = [k for k, r in enumerate(fold.reductions) if r.attrs[1] == "both"]  # of this rank's pairs alone
        self.into = subproblem.allocate_pair_results(fold, leaves, replace(sizes, cols=shard.cols.total))

    def run(self) -> list[State]:
        ring, here = self.rings[self.travels], self._gather_stationary()
        moving = self._leaves_along(self.travels)
        held = [self.leaves[k].contiguous() for k in moving]
        axes = [self._axis(k) for k in moving]
        kept: list[State] = []
        own: list[State] = []
        both: list[State] = []
        coming: RingTransfer | None = None
        for step in range(len(ring)):
            after = ring.back(step + 1)  # whose shard comes next
            last = step == len(ring) - 1
            leaving = None if last else ring.transfer(held, self._allocate_received(held, axes, self.travels, after))
            states = self._fold(here, dict(zip(moving, held, strict=True)), ring.back(step))
            kept = self._merge(self.kept, kept, [states[k] for k in self.kept])
            both = self._merge(self.both, both, [states[k] for k in self.both])
            load = [states[k] for k in self.carried]
            if not step:
                own = load  # stays here; the rest of it arrives last
            elif load:
                load = self._merge(self.carried, _unflatten(coming.wait(), load) if coming else [], load)
                coming = self._send(ring, load, self.travels, after)
            held = leaving.wait() if leaving is not None else held
        own = self._merge(self.carried, own, _unflatten(coming.wait(), own)) if coming else own
        found = dict(zip(self.kept + self.carried + self.both, self._scatter_results(kept) + own + both, strict=True))
        return [[self.into[k].unsqueeze(0)] if k in self.into else found[k] for k in range(len(self.fold.reductions))]

    def _fold(self, here: dict[int, Tensor], held: dict[int, Tensor], owner: int) -> list[State]:
        leaves = [held.get(k, here.get(k, v)) for k, v in enumerate(self.leaves)]
        block = {self.stays: self._block, self.travels: self.shard.axis(self.travels).ranges[owner]}
        rows, cols = block["rows"], block["cols"]
        sizes = replace(self.sizes, rows=count_indices(rows), cols=count_indices(cols))
        part = Subproblem(rows, cols, self.shard.totals, wide=True)
        return subproblem.run_subproblem(self.fold, leaves, sizes, part, self.engine, self.into)

    # The axis that stays

    @property
    def _block(self) -> Ranges:
        """The global ranges of the stationary axis held here: the shards of all ranks of the ring, in order."""
        ranges = self.shard.axis(self.stays).ranges
        return tuple(p for m in self.rings[self.stays].members for p in ranges[m])

    def _gather_stationary(self) -> dict[int, Tensor]:
        """All-gather the leaves of the stationary axis around the ring."""
        ring, which = self.rings[self.stays], self._leaves_along(self.stays)
        if len(ring) == 1:
            return {}
        held, axes = [self.leaves[k].contiguous() for k in which], [self._axis(k) for k in which]
        whole = [
            t.new_empty(*t.shape[:at], count_indices(self._block), *t.shape[at + 1 :])
            for t, at in zip(held, axes, strict=True)
        ]
        for step in range(len(ring)):
            owner, after = ring.back(step), ring.back(step + 1)
            last = step == len(ring) - 1
            coming = None if last else ring.transfer(held, self._allocate_received(held, axes, self.stays, after))
            for w, t, at in zip(whole, held, axes, strict=True):
                w.narrow(at, *self._shard_slice(owner)).copy_(t)
            held = coming.wait() if coming is not None else held
        return dict(zip(which, whole, strict=True))

    def _scatter_results(self, kept: list[State]) -> list[State]:
        """Reduce-scatter the results of the stationary axis: each rank gets those of its own shard."""
        ring = self.rings[self.stays]
        if len(ring) == 1 or not kept:
            return kept

        def shard_of(owner: int) -> list[State]:
            return [[t.narrow(self._state_axis, *self._shard_slice(owner)) for t in state] for state in kept]

        load = shard_of(ring.back(1))
        for step in range(1, len(ring)):
            after = ring.back(step + 1)
            come = _unflatten(self._send(ring, load, self.stays, after).wait(), load)
            load = self._merge(self.kept, come, shard_of(after))
        return load

    def _shard_slice(self, owner: int) -> tuple[int, int]:
        """Where a rank's shard starts in the gathered tensor, and its length."""
        ranges, members = self.shard.axis(self.stays).ranges, self.rings[self.stays].members
        return sum(count_indices(ranges[m]) for m in members[: members.index(owner)]), count_indices(ranges[owner])

    # Messages

    def _leaves_along(self, name: str) -> list[int]:
        """The positions of the leaves that have this axis alone."""
        there = [(k, e) for k, e in enumerate(self.fold.leaves) if isinstance(self.leaves[k], Tensor) and not e.is_pair]
        return [k for k, e in there if (e.rows if name == "rows" else e.cols)]

    def _axis(self, k: int) -> int:
        return self.leaves[k].dim() - 1 - (self.fold.leaves[k].feature is not None)

    @property
    def _state_axis(self) -> int:
        """The axis of a state that is rows or columns."""
        return 1 + len(self.sizes.batch)

    def _send(self, ring: Ring, load: list[State], axis: str, after: int) -> RingTransfer:
        flat = [t for state in load for t in state]
        return ring.transfer(flat, self._allocate_received(flat, [self._state_axis] * len(flat), axis, after))

    def _allocate_received(self, like: list[Tensor], axes: list[int], axis: str, owner: int) -> list[Tensor]:
        """Receive buffers for another rank's leaves (or results): like these, with its shard's length."""
        there = count_indices(self.shard.axis(axis).ranges[owner])
        return [t.new_empty(*t.shape[:at], there, *t.shape[at + 1 :]) for t, at in zip(like, axes, strict=True)]

    def _merge(self, which: list[int], before: list[State], states: list[State]) -> list[State]:
        if not before:
            return states
        pairs = zip(which, before, states, strict=True)
        return [combine.merge_states(self.fold.reductions[k], [old, new]) for k, old, new in pairs]


def _unflatten(flat: list[Tensor], like: list[State]) -> list[State]:
    rest = iter(flat)
    return [[next(rest) for _ in state] for state in like]


def bytes_per_index(fold: Fold, leaves: list[Any]) -> dict[str, int]:
    """Bytes of all leaves per row and per column."""
    found = {"rows": 0, "cols": 0}
    for e, v in zip(fold.leaves, leaves, strict=True):
        if isinstance(v, Tensor) and e.rows != e.cols:
            shape = list(v.shape)
            del shape[v.dim() - 1 - (e.feature is not None)]  # which may be 0 here and not elsewhere
            found["rows" if e.rows else "cols"] += torch.Size(shape).numel() * v.element_size()
    return found


def run(fold: Fold, leaves: list[Any], sizes: Sizes, engine: Engine) -> list[Tensor]:
    """Run a fold over the ranks of ``sizes.shard``; the contract of every engine, on the local leaves."""
    shard = sizes.shard
    if shard is None:
        return engine(fold, leaves, sizes)
    inner = replace(sizes, shard=None)
    try:
        if shard.ring:
            states = _combine_over_ranks(fold, Grid(fold, leaves, inner, shard, engine).run(), shard, ("both",))
        else:
            states = subproblem.run_subproblem(
                fold, leaves, inner, Subproblem(shard.rows.own, shard.cols.own, shard.totals), engine
            )
            states = _combine_over_ranks(fold, states, shard, ("cols", "rows"))
        return subproblem.finish_states(fold, states)
    except BaseException:  # whatever it was, the others must not wait for this rank
        for group in shard.groups:
            abort_group(group)
        raise


# Columns (or rows) divided: an all-reduce with ⊙ ---------------------------------------------------------------


def _combine_over_ranks(fold: Fold, states: list[State], shard: Shard, axes: tuple[str, ...]) -> list[State]:
    """Every state combined with those of the ranks that share its axis: all reductions' messages of a round are one.
    One over both axes is combined along each of them; ``axes`` ``"both"`` is one group that divides both."""
    for over in axes:
        group = shard.axis(over).group
        mine = [k for k, r in enumerate(fold.reductions) if r.attrs[1] in (over, "both")]
        if group is not None and mine:
            talks = [kind_of(fold.reductions[k]).exchange(fold.reductions[k].attrs[2], states[k]) for k in mine]
            for k, state in zip(mine, _run_exchanges(talks, group), strict=True):
                states[k] = state
    return states


def _run_exchanges(talks: list[Exchange], group: Group) -> list[State]:
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
    whole = all_gather(flat, group) if op == "GATHER" else all_reduce(flat, op, group)
    at = 0
    for k, ts in asked:
        answers[k] = []
        for t in ts:
            part = whole[..., at : at + t.numel()]
            answers[k].append(part.reshape(ranks, *t.shape[1:]) if op == "GATHER" else part.view(t.shape))
            at += t.numel()


# Programs over many ranks: the passes in order, and the arithmetic between them on each rank's shard.
#
# Each pass is one differentiable function of the global tensors: its backward is a symbolic program
# (``gradient_program.py``) that is executed here in the same way, so that its communication, too, is that of folds.
# Between passes the evaluator keeps replicated values and their gradients equal on all ranks (``shard.py``).


@dataclass(frozen=True)
class Context:
    """The arguments of a pass that are not tensors."""

    fold: Fold
    sizes: Sizes
    engine: Callable[..., list[Tensor]]


def execute_program(
    program: Lowered, inputs: Mapping[str, Any], sizes: Sizes, engine: Callable[..., list[Tensor]]
) -> list[Any]:
    """Run a lowered program: feed each pass, fold it, then evaluate the outputs (in the evaluator's layout)."""
    evaluate = Evaluator(sizes, inputs)
    for p in program.passes:
        feeds = [evaluate.feed(e) for e in p.feeds]
        results = _Pass.apply(Context(p.fold, sizes, engine), *feeds)
        for value, nodes in zip(results, p.results, strict=True):
            for n in nodes:
                evaluate.memo[n] = to_layout(value, n)
    return [evaluate(e) for e in program.outputs]


class _Pass(torch.autograd.Function):
    """One pass over the pairs; its backward is a program."""

    @staticmethod
    def forward(context: Context, *leaves: Any) -> tuple[Tensor, ...]:
        detached = [v.detach() if isinstance(v, Tensor) else v for v in leaves]
        return detach_views(context.engine(context.fold, detached, context.sizes))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.context, *leaves = inputs
        ctx.set_materialize_grads(False)
        constant = constant_results(ctx.context.fold)
        ctx.mark_non_differentiable(*(o for o, is_constant in zip(output, constant, strict=True) if is_constant))
        save_values(ctx, leaves, *output)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple:
        context: Context = ctx.context
        leaves, results, unchanged = load_values(ctx, len(cotangents))
        results = results if unchanged else list(_Pass.apply(context, *leaves))
        wanted = tuple(ctx.needs_input_grad[1:])
        if not context.sizes.of("rows") or not context.sizes.of("cols"):  # no pairs: all gradients are zero
            return None, *(zero_gradient(leaf) if want else None for leaf, want in zip(leaves, wanted, strict=True))
        local, others = split_cotangents(context.fold, cotangents)
        given = tuple(g is not None for g in local)
        made = build_gradient_program(context.fold, wanted, given)
        values = execute_program(made.program, made.bind(leaves, results, local), context.sizes, context.engine)
        values = [from_layout(v, e) for v, e in zip(values, made.program.outputs, strict=True)]
        grads = made.gradients(values, leaves)[0]
        if any(g is not None for g in others):
            more = sharded_other_gradients(context.fold, leaves, context.sizes, wanted, others)
            grads = [g if m is None or g is None else g + m for g, m in zip(grads, more, strict=True)]
        return None, *grads


# Gradients of monoids that have no local one (``common/block_gradients.py``), over many ranks.
# Where the folded axis is divided, a rank's share is one more block: the ranks' states are gathered, and the
# cotangent of this rank's comes from their fold. All of it is differentiable, so that second derivatives communicate
# by themselves.


def sharded_other_gradients(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes, wanted: Sequence[bool], cotangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of this rank's leaves; see ``block_gradients.differentiate_by_blocks``."""
    shard = sizes.shard
    assert shard is not None
    grads: list[Tensor | None] = [None] * len(leaves)
    used = [_replicate(v, e, shard) for v, e in zip(leaves, fold.leaves, strict=True)]
    for one, given in iterate_block_reductions(fold, cotangents):
        _refuse_ring(shard, one.reductions[0])
        job = Blocks(one, sizes, tuple(used), tuple(wanted))
        group = shard.axis(one.reductions[0].attrs[1]).group
        if group is not None:
            gathered = [gather_ranks(t, group) for t in job.states()]
            pulled = torch.func.vjp(job.merge(0), *gathered)[1](tuple(job.fill_cotangents(given)))
            given = [own_slice(t, group) for t in pulled]
        add_gradients(grads, job, job.gradients(given))
    return [g if g is None else _sum_over_ranks(g, e, shard) for g, e in zip(grads, fold.leaves, strict=True)]


def _find_replicating_groups(leaf: Expr, shard: Shard) -> list[Group]:
    """The groups over which a leaf is replicated: those of divided axes that it does not have."""
    axes = ((leaf.rows, shard.rows), (leaf.cols, shard.cols))
    return [axis.group for has, axis in axes if not has and axis.group is not None]


def _replicate(value: Any, leaf: Expr, shard: Shard) -> Any:
    """A leaf as this rank uses it: second derivatives by a replicated one are summed over the ranks."""
    if isinstance(value, Tensor) and value.requires_grad:
        for group in _find_replicating_groups(leaf, shard):
            value = replicate(value, group)
    return value


def _sum_over_ranks(g: Tensor, leaf: Expr, shard: Shard) -> Tensor:
    for group in _find_replicating_groups(leaf, shard):
        g = sum_replicas(g, group)
    return g


def _refuse_ring(shard: Shard, r: Expr) -> None:
    if shard.ring:
        raise NoGradientError(
            detail=f"the gradient of {r.attrs[2][0].__name__} needs all other pairs of a row at once, but rows and "
            "columns are divided over one group of ranks",
            fix="Divide rows or columns alone, or add pullback(c, a, g) to the monoid",
        )
