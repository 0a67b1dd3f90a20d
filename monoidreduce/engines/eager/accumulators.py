"""Running totals: how the eager engine folds each kind of reduction, tile by tile, in either direction.

An accumulator holds its state for a whole axis (numbers and vectors per row, or per column), takes one tile at a time
for a slice of it, and turns the state into results at the end. The state is the one that computes best (a running
maximum, a sum and unnormalised values), not the one users see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...algebra import fold as fold_monoid
from ...program.contract import Contraction
from ...program.expression import Expr
from ..common import combine, matmul, skip_small_tiles
from .tile_code import Reducer
from .tile_run import FEW_FEATURES, TileRun, differences

Offset = int | Tensor


class Accumulator:
    """State for ``length`` rows (``over="cols"``) or columns (``over="rows"``) of ``batch`` problems."""

    into: Tensor | None = None  # where a number per pair goes, which is not folded

    def __init__(
        self,
        reduction: Expr,
        batch: int,
        length: int,
        widths: list[int],
        compute: torch.dtype,
        device: torch.device,
        homes: Sequence[Tensor] = (),
    ):
        """``homes``: where the results will lie, in the order of ``finish``; totals that are results are kept there."""
        self.kind, self.over, self.params = reduction.attrs
        self.fields = reduction.args
        self.batch, self.length, self.widths = batch, length, widths
        self.compute, self.device, self.homes = compute, device, homes
        self.dim = -1 if self.over == "cols" else -2
        self.accumulate = skip_small_tiles.Accumulate()
        self.start()

    def start(self) -> None:
        raise NotImplementedError

    def step(self, reducer: Reducer, owned: tuple[bool, ...], tile: TileRun, at: slice, offset: Offset) -> None:
        """Fold one tile into the slice ``at``; ``offset`` is the tile's place on the folded axis, or that of each of
        its indices, ascending."""
        raise NotImplementedError

    def edge(self, at: slice) -> Tensor:
        """The number [b, l] that one more pair must reach to make a difference to the kept."""
        raise NotImplementedError

    def finish(self) -> list[Tensor]:
        raise NotImplementedError

    def numbers(self, value: float, dtype: torch.dtype | None = None) -> Tensor:
        return torch.full((self.batch, self.length), value, dtype=dtype or self.compute, device=self.device)

    def totals(self, width: int, result: int = -1) -> Tensor:
        """Zeros, of numbers where ``width`` is below 0; ``result``: which result they become, if they do."""
        if 0 <= result < len(self.homes):
            return self.homes[result].zero_()
        shape = (self.batch, self.length) if width < 0 else (self.batch, self.length, width)
        return torch.zeros(shape, dtype=self.compute, device=self.device)

    def across(self, x: Tensor) -> Tensor:
        """Numbers per kept index [b, l], shaped to meet a tile."""
        return x.unsqueeze(self.dim)

    def contract(self, total: Tensor, weight: Tensor, c: Contraction, tile: TileRun) -> None:
        """total += Σ weight × vector over the folded axis."""
        if c.walk:
            for f in range(tile.width(c.weight)):
                part = tile.component(c.weight, f)
                total[..., f] += (part if weight is None else weight * part).expand(tile.tile).sum(self.dim)
        elif c.minus is not None:
            self._contract_gap(total, weight, c, tile)
        elif c.vector is None:
            total += weight.sum(self.dim)
        else:
            vector = tile.get(c.vector)
            weight = tile.multiplied(weight, vector.dtype)
            self.accumulate(total, weight if self.over == "cols" else weight.mT, vector)

    def _contract_gap(self, total: Tensor, weight: Tensor, c: Contraction, tile: TileRun) -> None:
        """total += Σ weight (x - y): feature by feature where few, else by a product of vectors centred on the tile."""
        assert c.vector is not None and c.minus is not None
        x, y = (tile.get(v).to(total.dtype) for v in (c.vector, c.minus))
        if x.shape[-1] <= FEW_FEATURES:
            gaps, gap = differences(x, y), torch.empty(tile.tile, dtype=total.dtype, device=self.device)
            for f in range(x.shape[-1]):
                total[..., f] += gaps(f, gap).mul_(weight).sum(self.dim)
            return
        centre = y.mean(1, keepdim=True)
        kept, folded = (x - centre, centre - y) if self.over == "cols" else (centre - y, x - centre)
        total += weight.sum(self.dim).unsqueeze(-1) * kept
        matmul.accumulate(total, weight if self.over == "cols" else weight.mT, folded)


class Sum(Accumulator):
    def start(self) -> None:
        if self.fields[0].dtype == "float":
            self.total = self.totals(self.widths[0], result=0)
        else:
            tail = self.widths[:1] if self.widths[0] >= 0 else []
            self.total = torch.zeros(self.batch, self.length, *tail, dtype=torch.int64, device=self.device)

    def step(self, reducer: Reducer, owned: tuple[bool, ...], tile: TileRun, at: slice, offset: Offset) -> None:
        for c in reducer.values[0]:
            weight = None if c.walk else tile.full(c.weight)
            self.contract(self.total[:, at], weight, c, tile)  # type: ignore[arg-type]

    def finish(self) -> list[Tensor]:
        return [self.total]


class Soft(Accumulator):
    """Running maximum m, sum l = Σ exp(s - m), and Σ exp(s - m) v for each value."""

    def start(self) -> None:
        self.peak = self.numbers(-math.inf)
        self.total = self.totals(-1)
        self.values = [self.totals(w, result=k) for k, w in enumerate(self.widths[1:], 1)]

    def step(self, reducer: Reducer, owned: tuple[bool, ...], tile: TileRun, at: slice, offset: Offset) -> None:
        root = reducer.roots[0]
        logit = tile.narrow[root] if root in tile.narrow else tile.full(root)
        old = self.peak[:, at]
        peak = torch.maximum(old, logit.amax(self.dim).to(self.compute))
        safe = torch.where(peak.isinf(), 0.0, peak)  # guarded once per row, not per pair
        out = (
            tile.homes.get(root, logit) if owned[0] else torch.empty(tile.tile, dtype=self.compute, device=self.device)
        )
        weight = torch.sub(logit, self.across(safe), out=out)
        matmul.exp_into(weight, weight)
        shrink = torch.exp(old - safe)
        total = self.total[:, at]
        total.mul_(shrink).add_(weight.sum(self.dim))
        self.peak[:, at] = peak
        for value, parts in zip(self.values, reducer.values, strict=True):
            part = value[:, at]
            part.mul_(shrink if part.dim() == 2 else shrink.unsqueeze(-1))
            for c in parts:
                plain = c.walk or (c.weight.op == "const" and c.weight.const == 1)
                self.contract(part, weight if plain else weight * tile.full(c.weight), c, tile)

    def finish(self) -> list[Tensor]:
        safe = torch.where(self.peak.isinf(), 0.0, self.peak)
        seen = torch.where(self.total == 0, 1.0, self.total)  # a row that sees nothing has mean 0
        means = [v.div_(seen if v.dim() == 2 else seen.unsqueeze(-1)) for v in self.values]
        log_total = self.total.log()
        return [log_total + safe, *means, log_total, safe]


class Pick(Accumulator):
    """The number at one index of the folded axis, read from the tile that holds it."""

    def start(self) -> None:
        self.total = self.totals(-1)

    def step(self, reducer: Reducer, owned: tuple[bool, ...], tile: TileRun, at: slice, offset: Offset) -> None:
        x = tile.full(reducer.roots[0])
        size = x.shape[self.dim]
        place = tile.get(self.fields[0]).expand(*self.across(self.total[:, at]).shape) - offset
        inside = (place >= 0) & (place < size)
        found = x.gather(self.dim, place.clamp(0, size - 1))
        self.total[:, at] += torch.where(inside, found, 0.0).squeeze(self.dim)

    def finish(self) -> list[Tensor]:
        return [self.total]


class Best(Accumulator):
    """The best value so far and its place; the first of equals, and NaN beats all, as in torch."""

    def start(self) -> None:
        self.largest = self.params[0]
        if self.fields[0].dtype == "float":
            self.value = self.numbers(-math.inf if self.largest else math.inf)
        else:
            info = torch.iinfo(torch.int64)
            self.value = self.numbers(info.min if self.largest else info.max, torch.int64)
        self.place = self.numbers(-1, torch.int64)

    def step(self, reducer: Reducer, owned: tuple[bool, ...], tile: TileRun, at: slice, offset: Offset) -> None:
        x = tile.full(reducer.roots[0])
        place = _first(x, self.dim, self.largest)
        value = x.gather(self.dim, place).squeeze(self.dim).to(self.value.dtype)
        old = self.value[:, at]
        place, kept = _placed(place.squeeze(self.dim), offset), self.place[:, at]
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


def _placed(place: Tensor, offset: Offset) -> Tensor:
    """Where on the folded axis the places of a tile are."""
    return offset[place] if isinstance(offset, Tensor) else place + offset


def _first(x: Tensor, dim: int, largest: bool) -> Tensor:
    """Where the best is, the first of equals: which run of numbers has it, and where in that run.

    torch finds a best number without its place in a tenth of the time that it takes with it."""
    where = lambda t: (t.argmax if largest else t.argmin)(dim, keepdim=True)
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


_RUN, _LONG = 32, 1024


class TopK(Accumulator):
    """The k best so far, best first, kept sorted by merging each tile's own best; fewer while fewer have been seen.

    Once there are k, a tile is first looked at in groups of columns, by their best alone: of random numbers only about
    k log(N / k) of a row ever enter its list, and sorting what cannot would take most of the time.
    """

    group = 16

    def start(self) -> None:
        self.k, self.largest = self.params
        self.number = self.compute if self.fields[0].dtype == "float" else torch.int64
        self.worst = combine.worst(self.number, self.largest)
        self.best: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def step(self, reducer: Reducer, owned: tuple[bool, ...], tile: TileRun, at: slice, offset: Offset) -> None:
        x = tile.full(reducer.roots[0])
        x = (x if self.over == "cols" else x.mT).to(torch.int64 if x.dtype == torch.bool else x.dtype)
        best = self.best.get((at.start, at.stop))
        value, place = self._candidates(x, None if best is None else best[0])
        value, order = value.topk(min(self.k, value.shape[-1]), dim=-1, largest=self.largest)
        value, place = value.to(self.number), order if place is None else place.gather(-1, order)
        place = _placed(place, offset)
        if best is not None:
            value, order = torch.cat([best[0], value], -1).sort(dim=-1, descending=self.largest, stable=True)
            place = torch.cat([best[1], place], -1).gather(-1, order)
        self.best[at.start, at.stop] = value[..., : self.k].clone(), place[..., : self.k].clone()

    def edge(self, at: slice) -> Tensor:
        found = self.best.get((at.start, at.stop))
        if found is None or found[0].shape[-1] < self.k:
            shape = (self.batch, at.stop - at.start)
            return torch.full(shape, self.worst, dtype=self.number, device=self.device)
        return found[0][..., -1]

    def _candidates(self, x: Tensor, old: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What of a tile may be among the k best, and its columns there (None: all of it)."""
        count = x.shape[-1] // self.group
        if old is None or old.shape[-1] < self.k or count <= 2 * self.k or x.device.type != "cpu":
            return x, None
        whole = count * self.group
        groups = x[..., :whole].unflatten(-1, (self.group, count))  # every count-th column: these are found fastest
        key = groups.amax(-2) if self.largest else groups.amin(-2)
        blind = key.isnan()  # a group with a NaN in it says nothing of its other numbers: it is looked at
        if key.is_floating_point():
            key = torch.where(blind, torch.inf if self.largest else -torch.inf, key)
        least = old[..., -1:].to(key.dtype)
        beaten = (key < least) if self.largest else (key > least)
        most = min(self.k + int(blind.sum(-1).amax()), count - int(beaten.sum(-1).amin()))
        chosen = key.topk(most, dim=-1, largest=self.largest, sorted=False).indices
        lanes = torch.arange(self.group, device=x.device).unsqueeze(-1) * count
        rest = torch.arange(whole, x.shape[-1], device=x.device).expand(*x.shape[:-1], -1)
        place = torch.cat([(chosen.unsqueeze(-2) + lanes).flatten(-2), rest], -1)
        return x.gather(-1, place), place

    def finish(self) -> list[Tensor]:
        shape = (self.batch, self.length, self.k)
        values = torch.full(shape, self.worst, dtype=self.number, device=self.device)
        places = torch.full(shape, -1, dtype=torch.int64, device=self.device)
        for (start, stop), (value, place) in self.best.items():
            values[:, start:stop, : value.shape[-1]] = value
            places[:, start:stop, : place.shape[-1]] = place
        nothing = values == self.worst if values.is_floating_point() else places < 0
        return [values, torch.where(nothing, -1, places)]


class Moments(Accumulator):
    """Welford's mean and sum of squared deviations, tiles merged by Chan's formula."""

    def start(self) -> None:
        self.mean, self.spread = self.totals(-1), self.totals(-1)
        self.count = self.numbers(0)

    def step(self, reducer: Reducer, owned: tuple[bool, ...], tile: TileRun, at: slice, offset: Offset) -> None:
        x = tile.full(reducer.roots[0])
        n = x.shape[self.dim]
        mean = x.mean(self.dim)
        spread = (x - self.across(mean)).square_().sum(self.dim)
        old = self.count[:, at]
        total = old + n
        gap = mean - self.mean[:, at]
        self.mean[:, at] += gap * (n / total)
        self.spread[:, at] += spread + gap.square() * (old * n / total)
        self.count[:, at] = total

    def finish(self) -> list[Tensor]:
        return [torch.where(self.count == 0, torch.nan, self.mean), self.spread]


class User(Accumulator):
    """Any monoid: the tile is folded as a tree by ``combine``, then combined with the state.

    In ``combine`` a Scalar carries a trailing axis of size 1 and a Vector its features.
    """

    def start(self) -> None:
        (self.monoid,) = self.params
        self.names = list(self.monoid.fields())
        self.state = []
        for (_, field), width in zip(self.monoid.fields().items(), self.widths, strict=True):
            shape = (self.batch, self.length, width if width >= 0 else 1)
            self.state.append(torch.full(shape, float(field.identity), dtype=self.compute, device=self.device))

    def step(self, reducer: Reducer, owned: tuple[bool, ...], tile: TileRun, at: slice, offset: Offset) -> None:
        elements = {}
        for name, root, width in zip(self.names, reducer.roots, self.widths, strict=True):
            elements[name] = tile.full(root) if width < 0 else self._vector(root, tile)
        folded = fold_monoid(self.monoid, elements, dim=2 if self.over == "cols" else 1)
        part = [getattr(folded, n) for n in self.names]
        part = [p.unsqueeze(-1) if w < 0 else p for p, w in zip(part, self.widths, strict=True)]
        old = self.monoid(**dict(zip(self.names, (s[:, at] for s in self.state), strict=True)))
        new = self.monoid.combine(old, self.monoid(**dict(zip(self.names, part, strict=True))))
        for s, n in zip(self.state, self.names, strict=True):
            s[:, at] = getattr(new, n)

    def _vector(self, e: Expr, tile: TileRun) -> Tensor:
        if e in tile.values and e.feature is not None:
            v: Tensor = tile.values[e].to(self.compute)
            return v.unsqueeze(2 if e.rows else 1).expand(*tile.tile, v.shape[-1])
        return torch.stack([tile.component(e, f).expand(tile.tile) for f in range(tile.width(e))], -1)

    def finish(self) -> list[Tensor]:
        return [s if w >= 0 else s.squeeze(-1) for s, w in zip(self.state, self.widths, strict=True)]


class Pair(Accumulator):
    """A number per pair, added to ``into`` [b, M, N]; where that is broadcast (stride 0), to its one element."""

    def start(self) -> None:
        pass

    def step(self, reducer: Reducer, owned: tuple[bool, ...], tile: TileRun, at: slice, offset: Offset) -> None:
        assert self.into is not None
        row, col = tile.offset
        value = tile.full(reducer.roots[0])
        here = self.into[:, row : row + value.shape[1], col : col + value.shape[2]]
        for dim in range(3):
            if here.stride(dim) == 0 and here.shape[dim] > 1:
                here, value = here.narrow(dim, 0, 1), value.sum(dim, keepdim=True)
        here += value

    def finish(self) -> list[Tensor]:
        return []


ACCUMULATORS: dict[str, Any] = {
    "sum": Sum,
    "soft": Soft,
    "best": Best,
    "topk": TopK,
    "moments": Moments,
    "user": User,
    "pick": Pick,
    "pair": Pair,
}
