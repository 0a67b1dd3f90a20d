"""``pick``: Σ [index == target] value × vector, which is a gather. Only the normal form makes this kind.

Fields: the target, the value and the vector (the constant 1 for none). Parameters: ``("row",)`` or ``("col",)``, the
index that is compared. Where it is the folded index, one pair per kept index counts; else it is a scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..program import intervals as iv
from ..program.constructors import ONE, dot, fsum
from ..program.expression import Expr, index
from ..program.several import inner as inner_product
from ..program.several import is_product
from ..program.symbol import Symbol
from .base import Accumulator, CombineLaunch, Exchange, FastForm, Form, Lines, Offset, Outputs, Reads, Reduction, State
from .sum import sum_launches


class PickAccumulator(Accumulator):
    """The number at one index of the folded axis, read from the tile that holds it."""

    def start(self) -> None:
        self.total = self.totals(-1)

    def step(self, reducer: Any, owned: tuple[bool, ...], tile: Any, at: slice, offset: Offset) -> None:
        x = tile.full(reducer.roots[0])
        size = x.shape[self.dim]
        place = tile.get(self.fields[0]).expand(*self.across(self.total[:, at]).shape) - offset
        inside = (place >= 0) & (place < size)
        found = x.gather(self.dim, place.clamp(0, size - 1))
        self.total[:, at] += torch.where(inside, found, 0.0).squeeze(self.dim)

    def finish(self) -> list[Tensor]:
        return [self.total]


class PickLines(Lines):
    """The number at one index of the folded axis.

    With 16-bit products it is computed once per kept index, from what lies there; in float32 it is read from the tile
    that holds it, so that a small loss is the difference of numbers that were rounded alike.
    """

    def prepare(self) -> None:
        spec = self.v.spec
        self.direct = spec.narrow is not None and self.tools.reads_one_pair(self.reduction.args[1], spec)
        self.total = self.tools.running_sum(self.name, None, "float", self.v, spec.lanes)

    def start(self) -> list[str]:
        return [] if self.direct else self.total.start()

    def step(self, fields: tuple[Expr, ...]) -> None:
        if self.direct:
            return
        target, value, _ = fields
        hit = f"folded_at[None, :] == {self.v.own_place(target)}"
        if self.v.masked:  # what lies beyond the axis is no match, whatever the index
            hit = f"({hit}) & folded_in[None, :]"
        self.total.add_block(self.name, f"tl.where({hit}, {self.v.full(value)}, 0.0)")

    def finish(self) -> list[tuple[list[str], Any]]:
        if not self.direct:
            return [(self.total.result(), None)]
        target, value, _ = self.reduction.args
        there = self.tools.one_pair(self.v, self.name, target)
        text = there.number(value)
        self.v.inside += there.before
        zeros = f"tl.zeros([KEPT, 1], {self.v.float})"
        return [([f"tl.reshape(tl.where({there.inside_text}, {text} + {zeros}, 0.0), [KEPT])"], None)]


class PickLaneLines(PickLines):
    """Read from where it lies: pairs of a panel are in memory."""

    def prepare(self) -> None:
        super().prepare()
        self.direct = self.tools.reads_one_pair(self.reduction.args[1], self.v.spec)


class Gather(Reduction):
    """What gathers have in common. Their state is their result: a part that lacks an index adds nothing."""

    gathers = True
    plain_ops, combine_ops = 0, 1

    def idle(self, params: tuple, fields: list[iv.Interval]) -> bool:
        return fields[1] == iv.FALSE

    def identity(self, params: tuple) -> tuple[float, ...]:
        return (0.0,)

    def merge(self, params: tuple, state: State) -> State:
        return [state[0].sum(0, keepdim=True)]

    def exchange(self, params: tuple, state: State) -> Exchange:
        return (yield "SUM", state)

    def tile_reads(self, fields: tuple[Expr, ...], over: str) -> Reads:
        return fields[1:2], ()

    def tile_width(self, r: Expr, size_of: Callable[[str], int]) -> int:
        return 1

    def no_kernel(self, r: Expr) -> str:
        return ""

    def combine_launches(self, params: tuple, stacked: tuple[Form, ...], splits: int) -> list[CombineLaunch] | None:
        return sum_launches(stacked, splits)


class Pick(Gather):
    """One index, and the sum of products there."""

    name = "pick"
    fast_forms = FastForm.CPP
    sums_vectors = True
    accumulator, lines, lane_lines = PickAccumulator, PickLines, PickLaneLines

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(fields[2].feature, "float")]

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        """Wherever the index matches, the sum's own pullback."""
        target, value, vector = fields
        hit = Symbol(index(params[0])) == target
        if vector.expr.feature is None:
            return [None, torch.where(hit, g[0] * vector, 0.0), torch.where(hit, g[0] * value, 0.0)]
        one, other = vector.expr, g[0].expr  # of several vectors too, all features are summed
        inner: Any = Symbol(fsum(inner_product(one, other)) if is_product(one) else dot(other, one))
        weight: Any = torch.where(hit, value, 0.0)
        if value.expr.feature is not None:  # one match per feature of the target (a top-k), all with the same vector
            weight = weight.sum()
        return [None, torch.where(hit, inner, 0.0), weight * g[0]]

    def walks(self, r: Expr, reductions: Sequence[Expr]) -> bool:
        """True when tiles that hold the number are computed anyway: it then sees the same rounding."""
        gathers = not self.scatters(r) and r.args[0].feature is None and r.args[2] is ONE and r.args[1].is_pair
        return gathers and any(other.attrs[0] != self.name for other in reductions)

    def scatters(self, r: Expr) -> bool:
        """True when the target is an index of the kept axis: pairs of many rows may add to one column."""
        _, over, (axis,) = r.attrs
        return not over.startswith(axis)

    def has_whole_form(self, r: Expr) -> bool:
        return r.args[0].feature is None and not self.scatters(r)

    def whole_form(self, r: Expr, writer: Any, used: frozenset[int]) -> tuple[Callable[..., list[Tensor]], list[str]]:
        target, value, vector = r.args
        own = WholePick(r.attrs[1], vector is ONE, vector.feature is not None)
        given = [writer.tensor(target), writer.matrix(value)]
        if vector is not ONE:
            given.append(writer.vectors(vector) if own.vector else writer.matrix(vector))
        return own, given

    def tile_bytes(self, memory: Any, params: tuple, reads: Reads, owned: tuple[bool, ...]) -> int:
        return 0

    def exchanged_bytes(self, r: Expr, width: Callable[[Expr], int], item: int) -> tuple[int, int]:
        return width(r.args[2]) * item, 0


@dataclass(frozen=True)
class WholePick:
    """The number (and the vector) at one place of the folded axis of whole matrices; 0 where that is outside."""

    over: str
    alone: bool
    vector: bool

    def __call__(self, sizes: Any, target: Tensor, value: Tensor, *others: Tensor) -> list[Tensor]:
        length, kept = (sizes.cols, sizes.rows) if self.over == "cols" else (sizes.rows, sizes.cols)
        x = value if self.over == "cols" else value.mT
        if target.dim() == len(sizes.batch):
            target = target.unsqueeze(-1)
        batch = _batch(tuple(x.shape[:-2]), tuple(target.shape[:-1]))
        place = target.expand(*batch, kept)
        inside = (place >= 0) & (place < length)
        if not length:
            found = x.sum(-1).expand(*batch, kept)
            return [found.unsqueeze(-1) * others[0].sum(-2, keepdim=True) if self.vector else found]
        safe = place.clamp(0, length - 1)
        found = torch.where(inside, x.expand(*batch, kept, length).gather(-1, safe.unsqueeze(-1)).squeeze(-1), 0.0)
        if self.alone:
            return [found]
        (other,) = others
        if not self.vector:
            other = other if self.over == "cols" else other.mT
            other = other.expand(*batch, kept, length).gather(-1, safe.unsqueeze(-1)).squeeze(-1)
            return [torch.where(inside, found * other, 0.0)]
        width = other.shape[-1]
        other = other.expand(*batch, length, width).gather(-2, safe.unsqueeze(-1).expand(*batch, kept, width))
        return [torch.where(inside.unsqueeze(-1), found.unsqueeze(-1) * other, 0.0)]


def _batch(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The batch shape of both; torch is asked only where they differ, since its first answer imports many modules."""
    if not one or one == other:
        return other
    return tuple(torch.broadcast_shapes(one, other)) if other else one


# ``picks``: the number at each of K given indices of the folded axis, one result per index. Only the normal form makes
# this kind, of a sum of ``where(index == targets, number, 0)`` with a vector of targets.
#
# Fields: the targets (a vector per kept index), the number per pair and the constant 1, in the places that a ``pick``
# has them. Parameters: ``("row",)`` or ``("col",)``, the index that is compared, always the folded one. Gathered in
# chunks by every engine (``engines/common/label_gather.py``): K comparisons per pair would cost more than the pairs
# themselves.


class Picks(Gather):
    """K indices, and the number at each."""

    name = "picks"

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(fields[0].feature, "float")]

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        """To a pair's number, the cotangents of all targets that name it."""
        hit = Symbol(index(params[0])) == fields[0]
        return [None, torch.where(hit, g[0], 0.0).sum(), None]

    def walks(self, r: Expr, reductions: Sequence[Expr]) -> bool:
        return False

    def whole_form(self, r: Expr, writer: Any, used: frozenset[int]) -> tuple[Callable[..., list[Tensor]], list[str]]:
        target, value, _ = r.args
        return WholePicks(r.attrs[1]), [writer.tensor(target), writer.matrix(value)]

    def exchanged_bytes(self, r: Expr, width: Callable[[Expr], int], item: int) -> tuple[int, int]:
        return width(r.args[0]) * item, 0


@dataclass(frozen=True)
class WholePicks:
    """The numbers at K places of the folded axis of a whole matrix; 0 where a place is outside."""

    over: str

    def __call__(self, sizes: Any, target: Tensor, value: Tensor) -> list[Tensor]:
        length, kept = (sizes.cols, sizes.rows) if self.over == "cols" else (sizes.rows, sizes.cols)
        x = value if self.over == "cols" else value.mT
        batch = torch.broadcast_shapes(x.shape[:-2], target.shape[:-2])
        place = target.expand(*batch, kept, target.shape[-1])
        if not length:
            return [x.sum(-1, keepdim=True).expand(*place.shape)]
        inside = (place >= 0) & (place < length)
        found = x.expand(*batch, kept, length).gather(-1, place.clamp(0, length - 1))
        return [torch.where(inside, found, 0.0)]
