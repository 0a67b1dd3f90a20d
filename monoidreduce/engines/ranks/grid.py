"""Rows and columns sharded over one group: the ranks form a grid, one axis is gathered and the other travels.

With n ranks and W ``slices``, each rank folds the columns of W ranks with the rows of n / W ranks, so that every pair
is folded once. One axis is stationary: its leaves are all-gathered within a ring of ranks once, and its results are
reduce-scattered. The other axis travels around a second ring: the next shard is received while the present one is
folded, and the results that belong to a shard follow it. W = n is ring attention: columns travel, rows stay. W = 1 is
the same with rows travelling. In between, less is sent (``plan/communication.py``) and more is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...plan import communication
from ...program.lower import Fold
from ..common import combine, subproblem
from ..common.combine import State
from ..common.evaluate import Sizes
from ..common.shard import Group, Ranges, RingTransfer, Shard, count_indices
from ..common.subproblem import Engine, Subproblem


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
        shard_of = lambda owner: [
            [t.narrow(self._state_axis, *self._shard_slice(owner)) for t in state] for state in kept
        ]
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
        return [combine.merged(self.fold.reductions[k], [old, new]) for k, old, new in pairs]


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
