"""Rows and columns divided over one group: its ranks stand in a grid, one side is gathered and the other travels.

Of n ranks, each takes the columns of W (``slices``): they stand in W lines of n / W. A rank folds the rows of its line
with the columns of its file, so that every pair is folded once. One of the two sides stays: its leaves are gathered
along the line (or the file) once, and its results go home, combined on their way. The other travels round the file (or
line), the next part on its way while the present one is folded, followed by the results that belong to it. W = n is the
ring that everybody knows: columns travel, rows stay. W = 1 is the same with rows travelling. In between less is sent
(``plan/communication.py``), and more is held.
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
from ..common.collectives import Group, RingTransfer
from ..common.combine import State
from ..common.evaluate import Sizes
from ..common.shard import Ranges, Shard, count_indices
from ..common.subproblem import Engine, Subproblem


@dataclass(frozen=True)
class Ring:
    """Ranks of a group that hand on to each other: ``members[at]`` is this one."""

    group: Group
    members: tuple[int, ...]
    at: int

    def __len__(self) -> int:
        return len(self.members)

    def back(self, steps: int) -> int:
        """The rank so many places before this one: after as many steps, what is here is its own."""
        return self.members[(self.at - steps) % len(self)]

    def passing(self, send: Sequence[Tensor], receive: Sequence[Tensor]) -> RingTransfer:
        return RingTransfer(send, receive, self.group, self.back(-1), self.back(1))


class Grid:
    """A fold with both sides divided over one group."""

    def __init__(self, fold: Fold, leaves: list[Any], sizes: Sizes, shard: Shard, engine: Engine):
        self.fold, self.leaves, self.sizes, self.shard, self.engine = fold, leaves, sizes, shard, engine
        group = shard.rows.group
        self.me, ranks = group.rank(), group.size()
        held, item, batch = bytes_per_index(fold, leaves), sizes.compute.itemsize, torch.Size(sizes.batch).numel()
        slices, self.stays = communication.arrange(fold, sizes.of, held, item, shard.totals, ranks, shard.slices, batch)
        self.travels = "cols" if self.stays == "rows" else "rows"
        line = ranks // slices
        u, v = divmod(self.me, line)
        self.circles = {
            "rows": Ring(group, tuple(u * line + k for k in range(line)), v),
            "cols": Ring(group, tuple(k * line + v for k in range(slices)), u),
        }
        self.kept = [k for k, r in enumerate(fold.reductions) if r.attrs[1] == self.travels]  # fold the travellers
        self.carried = [k for k, r in enumerate(fold.reductions) if r.attrs[1] == self.stays]  # belong to them
        self.into = subproblem.allocate_pair_results(fold, leaves, replace(sizes, cols=shard.cols.total))

    def run(self) -> list[State]:
        circle, here = self.circles[self.travels], self._gathered()
        moving = self._side(self.travels)
        held = [self.leaves[k].contiguous() for k in moving]
        axes = [self._axis(k) for k in moving]
        kept: list[State] = []
        own: list[State] = []
        coming: RingTransfer | None = None
        for step in range(len(circle)):
            after = circle.back(step + 1)  # whose come next
            last = step == len(circle) - 1
            leaving = None if last else circle.passing(held, self._room(held, axes, self.travels, after))
            states = self._fold(here, dict(zip(moving, held, strict=True)), circle.back(step))
            kept = self._merged(self.kept, kept, [states[k] for k in self.kept])
            load = [states[k] for k in self.carried]
            if not step:
                own = load  # stays at home, where the rest of it comes last
            elif load:
                load = self._merged(self.carried, _unflatten(coming.wait(), load) if coming else [], load)
                coming = self._send(circle, load, self.travels, after)
            held = leaving.wait() if leaving is not None else held
        own = self._merged(self.carried, own, _unflatten(coming.wait(), own)) if coming else own
        found = dict(zip(self.kept + self.carried, self._home(kept) + own, strict=True))
        return [[self.into[k].unsqueeze(0)] if k in self.into else found[k] for k in range(len(self.fold.reductions))]

    def _fold(self, here: dict[int, Tensor], held: dict[int, Tensor], owner: int) -> list[State]:
        leaves = [held.get(k, here.get(k, v)) for k, v in enumerate(self.leaves)]
        block = {self.stays: self._block, self.travels: self.shard.axis(self.travels).ranges[owner]}
        rows, cols = block["rows"], block["cols"]
        sizes = replace(self.sizes, rows=count_indices(rows), cols=count_indices(cols))
        part = Subproblem(rows, cols, self.shard.totals, wide=True)
        return subproblem.run_subproblem(self.fold, leaves, sizes, part, self.engine, self.into)

    # The side that stays

    @property
    def _block(self) -> Ranges:
        """Which part of its axis stays here: that of all members of the circle, in their order."""
        pieces = self.shard.axis(self.stays).ranges
        return tuple(p for m in self.circles[self.stays].members for p in pieces[m])

    def _gathered(self) -> dict[int, Tensor]:
        """The leaves of the side that stays, of all members: passed on from one to the next."""
        circle, which = self.circles[self.stays], self._side(self.stays)
        if len(circle) == 1:
            return {}
        held, axes = [self.leaves[k].contiguous() for k in which], [self._axis(k) for k in which]
        whole = [
            t.new_empty(*t.shape[:at], count_indices(self._block), *t.shape[at + 1 :])
            for t, at in zip(held, axes, strict=True)
        ]
        for step in range(len(circle)):
            owner, after = circle.back(step), circle.back(step + 1)
            last = step == len(circle) - 1
            coming = None if last else circle.passing(held, self._room(held, axes, self.stays, after))
            for w, t, at in zip(whole, held, axes, strict=True):
                w.narrow(at, *self._where(owner)).copy_(t)
            held = coming.wait() if coming is not None else held
        return dict(zip(which, whole, strict=True))

    def _home(self, kept: list[State]) -> list[State]:
        """Every member's part of the results, combined on its way home from the member behind it."""
        circle = self.circles[self.stays]
        if len(circle) == 1 or not kept:
            return kept
        part = lambda owner: [[t.narrow(self._results, *self._where(owner)) for t in state] for state in kept]
        load = part(circle.back(1))
        for step in range(1, len(circle)):
            after = circle.back(step + 1)
            come = _unflatten(self._send(circle, load, self.stays, after).wait(), load)
            load = self._merged(self.kept, come, part(after))
        return load

    def _where(self, owner: int) -> tuple[int, int]:
        """Where a member's part starts in the block, and how long it is."""
        pieces, members = self.shard.axis(self.stays).ranges, self.circles[self.stays].members
        return sum(count_indices(pieces[m]) for m in members[: members.index(owner)]), count_indices(pieces[owner])

    # What is sent

    def _side(self, name: str) -> list[int]:
        """The leaves of one side."""
        there = [(k, e) for k, e in enumerate(self.fold.leaves) if isinstance(self.leaves[k], Tensor) and not e.is_pair]
        return [k for k, e in there if (e.rows if name == "rows" else e.cols)]

    def _axis(self, k: int) -> int:
        return self.leaves[k].dim() - 1 - (self.fold.leaves[k].feature is not None)

    @property
    def _results(self) -> int:
        """The axis of a state that is rows or columns."""
        return 1 + len(self.sizes.batch)

    def _send(self, circle: Ring, load: list[State], side: str, after: int) -> RingTransfer:
        flat = [t for state in load for t in state]
        return circle.passing(flat, self._room(flat, [self._results] * len(flat), side, after))

    def _room(self, like: list[Tensor], axes: list[int], side: str, owner: int) -> list[Tensor]:
        """Where another rank's leaves (or results) will come to lie: as these, but of its length."""
        there = count_indices(self.shard.axis(side).ranges[owner])
        return [t.new_empty(*t.shape[:at], there, *t.shape[at + 1 :]) for t, at in zip(like, axes, strict=True)]

    def _merged(self, which: list[int], before: list[State], states: list[State]) -> list[State]:
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
