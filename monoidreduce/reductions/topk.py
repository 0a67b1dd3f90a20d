"""``topk``: the k largest (or smallest) numbers of all pairs and their places, best first, the first of equals.

Parameters: ``(k, largest)``. Where fewer than k were seen, values are infinite and places -1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, overrides

from ..errors import TopKError
from ..program import intervals as iv
from ..program.expression import Expr
from .base import (
    Accumulator,
    FastForm,
    Lines,
    Local,
    Offset,
    Outputs,
    Reads,
    Reduction,
    State,
    folded_dim,
    per_part,
    shift_places,
    stretch,
)
from .best import NOWHERE, is_chosen, no_places, worst

MOST_IN_REGISTERS = 64  # k beyond which a kernel keeps no list
# The keys (``ordered32``, ``ordered64``) of minus infinity, and of infinity where the smallest are sought.
_WORST_KEY = {32: -(2**31) + 2**23 - 1, 64: -(2**63) + 2**52 - 1}
EMPTY = -2  # the place of a slot in which nothing is, while states are merged


_LOOKED_AT = 2**16  # numbers at a time, of rows with equals
_TRACING = [getattr(torch._C._TorchDispatchModeKey, name) for name in ("FAKE", "PROXY", "FUNCTIONAL")]  # modes


def find_best(
    x: Tensor, k: int, largest: bool, places: Tensor | Callable[[tuple[Tensor, ...]], Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The k best numbers along the last axis, best first and the first of equals, and where they are. ``places``: of
    the numbers, where these are in another order; of a matrix also what makes those of some rows, given their
    indices.

    torch leaves open which of equals it finds. On a CPU it is asked for one more: rows with equals are looked at again.
    Elsewhere that would wait for the device, and numbers are sorted. One call for all that records calls of torch's:
    what the numbers decide is inside."""
    if overrides.has_torch_function_unary(x):
        return overrides.handle_torch_function(find_best, (x,), x, k, largest, places)
    length = x.shape[-1]
    k = min(k, length)
    if not x.is_meta and (x.device.type != "cpu" or not _has_numbers(x)):
        places = places((torch.arange(len(x), device="cpu"),)) if callable(places) else places
        at = None if places is None else places.argsort(dim=-1)
        value, order = (x if at is None else x.gather(-1, at)).sort(dim=-1, descending=largest, stable=True)
        return value[..., :k], (order if at is None else at.gather(-1, order))[..., :k]
    value, at = x.topk(min(k + 1, length), dim=-1, largest=largest)
    found = (value, at) if k == length else (value.narrow(-1, 0, k), at.narrow(-1, 0, k))
    if x.is_meta or length < 2:
        return found
    one, other = value.narrow(-1, 0, value.shape[-1] - 1), value.narrow(-1, 1, value.shape[-1] - 1)
    if bool((one > other if largest else one < other).all()):
        return found
    value, at = found
    tied = _are_equal(one, other) & (other != worst(x.dtype, largest))
    for part in tied.any(-1).nonzero().split(max(1, _LOOKED_AT // length)):
        rows = part.unbind(-1)
        some, best = x[rows], at[rows]
        place = places(rows) if callable(places) else None if places is None else places[rows]
        if k < length:
            (cut,) = tied[..., k - 1][rows].nonzero(as_tuple=True)  # the next equals the last
            edge = value[rows][cut, -1:]
            best[cut] = _choose_places(some[cut], edge, k, largest, None if place is None else place[cut])
        order = (best if place is None else place.gather(-1, best)).argsort(dim=-1)
        best = best.gather(-1, order)
        value[rows], order = some.gather(-1, best).sort(dim=-1, descending=largest, stable=True)
        at[rows] = best.gather(-1, order)
    return found


def _has_numbers(x: Tensor) -> bool:
    """Whether a tensor has memory, and no compiler or function transform runs."""
    if type(x) is not Tensor or torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        return False
    modes = torch._C._len_torch_dispatch_stack() and [torch._C._get_dispatch_mode(key) for key in _TRACING]
    return not modes or all(mode is None for mode in modes)


def _choose_places(x: Tensor, edge: Tensor, k: int, largest: bool, places: Tensor | None = None) -> Tensor:
    """Where the k best of each row are, the first of equals; in no order. ``edge``: the k-th."""
    better, equal = _is_better(x, edge, largest), _are_equal(x, edge)
    room = k - better.sum(-1, keepdim=True)
    if places is None:
        mine = better | (equal & (equal.cumsum(-1) <= room))
    else:
        order = places.argsort(dim=-1)
        count = equal.gather(-1, order).cumsum(-1)
        mine = better | (equal & (torch.empty_like(count).scatter_(-1, order, count) <= room))
    return mine.nonzero(as_tuple=True)[-1].view(*x.shape[:-1], k)


def _sort_by_place(values: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    order = places.argsort(dim=-1)
    return values.gather(-1, order), places.gather(-1, order)


def _add_unseen(
    params: tuple, value: Tensor, place: Tensor, count: tuple[Any, int] | Callable[[], tuple[Any, int]]
) -> tuple[Tensor, Tensor]:
    """The k best of some pairs as those of the whole axis, whose other pairs are infinities without a place: where the
    smallest are sought, these stand before NaN. ``count``: of the pairs, and of the axis."""
    k, largest = params
    if largest or not value.is_floating_point() or value.device.type != "cpu":  # a device is not waited for
        return value, place
    if _has_numbers(value) and not bool(value.isnan().any()):
        return value, place
    seen, length = count() if callable(count) else count
    k = min(k, length)
    if type(seen) is int and seen == length:
        return value, place
    found, order = value[..., :k].sort(dim=-1, stable=True)
    slot, first = torch.arange(k, device=value.device), k - found.isnan().sum(-1, keepdim=True)
    more = (length - torch.as_tensor(seen, device=value.device).clamp(min=k)).clamp(min=0).unsqueeze(-1)
    source = torch.where(slot < first, slot, torch.maximum(slot - more, first)).clamp(max=k - 1)
    unseen = (slot >= first) & (slot < first + more)
    found = found.gather(-1, source).masked_fill(unseen, math.inf)
    at = place[..., :k].gather(-1, order).gather(-1, source).masked_fill(unseen, -1)
    return torch.cat([found, value[..., k:]], -1), torch.cat([at, place[..., k:]], -1)


def _is_better(value: Tensor, edge: Tensor, largest: bool) -> Tensor:
    found = value > edge if largest else value < edge
    if value.is_floating_point():  # NaN is the largest of all
        found |= value.isnan() & ~edge.isnan() if largest else edge.isnan() & ~value.isnan()
    return found


def _are_equal(one: Tensor, other: Tensor) -> Tensor:
    found = one == other
    return found | (one.isnan() & other.isnan()) if one.is_floating_point() else found


class TopKAccumulator(Accumulator):
    """The k best so far, best first, kept sorted by merging each tile's own best; fewer while fewer have been seen.

    Once there are k, a tile is first looked at in groups of columns, by their best alone: of random numbers only about
    k log(N / k) of a row ever enter its list, and sorting what cannot would take most of the time. Where k is large,
    what beats the k-th is put aside, and merged once there are k of it.
    """

    group = 16

    def start(self) -> None:
        self.k, self.largest = self.params
        self.number = self.compute if self.fields[0].dtype == "float" else torch.int64
        self.worst = worst(self.number, self.largest)
        self.best: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.aside: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        self.seen: dict[tuple[int, int], int] = {}

    def step(self, reducer: Any, owned: tuple[bool, ...], tile: Any, at: slice, offset: Offset) -> None:
        x = tile.full(reducer.roots[0])
        x = (x if self.over == "cols" else x.mT).to(torch.int64 if x.dtype == torch.bool else x.dtype)
        best = self.best.get((at.start, at.stop))
        self.seen[at.start, at.stop] = self.seen.get((at.start, at.stop), 0) + x.shape[-1]
        if self.k > MOST_IN_REGISTERS:
            self._put_aside(x, at, offset, None if best is None else best[0])
            return
        value, place = self._candidates(x, None if best is None else best[0])
        value, order = find_best(value, self.k, self.largest, place)
        value, place = value.to(self.number), order if place is None else place.gather(-1, order)
        place = shift_places(place, offset)
        if best is not None:
            value, place = torch.cat([best[0], value], -1), torch.cat([best[1], place], -1)
            if isinstance(offset, Tensor):  # not in the order of columns
                value, place = _sort_by_place(value, place)
            value, order = value.sort(dim=-1, descending=self.largest, stable=True)
            place = place.gather(-1, order)
        self.best[at.start, at.stop] = value[..., : self.k].clone(), place[..., : self.k].clone()

    def _put_aside(self, x: Tensor, at: slice, offset: Offset, old: Tensor | None) -> None:
        """Put aside what of a tile beats the k-th, in the order of its columns; merge what is aside if it is much."""
        key, value = (at.start, at.stop), x.to(self.number)
        place = torch.arange(x.shape[-1], device=x.device).expand(value.shape)
        self.in_order = not isinstance(offset, Tensor)
        if old is not None and old.shape[-1] == self.k and x.device.type == "cpu" and self.in_order:
            value, place = self._beating(value, old[..., -1:])
        elif value is x:
            value = x.clone()  # the tile's memory is used again
        aside = self.aside.setdefault(key, [])
        aside.append((value, shift_places(place, offset)))
        if sum(v.shape[-1] for v, _ in aside) >= self.k:
            self._merge_aside(key)

    def _beating(self, value: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of each row that beat its k-th and their columns, as many as most rows need; the rest of a row
        is worse than anything seen."""
        beats = _is_better(value, edge, self.largest)
        count = beats.sum(-1)
        at = beats.nonzero(as_tuple=True)
        first = (count.flatten().cumsum(0) - count.flatten()).view(count.shape)
        slot = torch.arange(len(at[0]), device=value.device) - first[at[:-1]]
        shape = (*count.shape, int(count.amax()) if count.numel() else 0)
        nothing = self.worst if self.largest or not value.is_floating_point() else math.nan
        found = value.new_full(shape, nothing).index_put_((*at[:-1], slot), value[at])
        return found, at[-1].new_zeros(shape).index_put_((*at[:-1], slot), at[-1])

    def _merge_aside(self, key: tuple[int, int]) -> None:
        aside = [*([self.best[key]] if key in self.best else []), *self.aside.pop(key, [])]
        values, places = (torch.cat(ts, -1) for ts in zip(*aside, strict=True))
        if not self.in_order:
            values, places = _sort_by_place(values, places)
        if values.shape[-1] > 2 * self.k and values.device.type == "cpu":  # to sort k is faster than to sort all
            edge = values.topk(self.k, dim=-1, largest=self.largest).values[..., -1:]
            kept = _choose_places(values, edge, self.k, self.largest)
            values, places = values.gather(-1, kept), places.gather(-1, kept)
        value, order = values.sort(dim=-1, descending=self.largest, stable=True)
        self.best[key] = value[..., : self.k].clone(), places.gather(-1, order[..., : self.k])

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
        best = key.topk(min(most + 1, count), dim=-1, largest=self.largest)
        edge, after = best.values[..., most - 1 : most], best.values[..., most:]
        if bool((_are_equal(edge, after) & ~(edge < least if self.largest else edge > least)).any()):
            return x, None  # equal groups: any of them may have the first columns
        chosen = best.indices[..., :most]
        lanes = torch.arange(self.group, device=x.device).unsqueeze(-1) * count
        rest = torch.arange(whole, x.shape[-1], device=x.device).expand(*x.shape[:-1], -1)
        place = torch.cat([(chosen.unsqueeze(-2) + lanes).flatten(-2), rest], -1)
        return x.gather(-1, place), place

    def finish(self) -> list[Tensor]:
        for key in list(self.aside):
            self._merge_aside(key)
        shape = (self.batch, self.length, self.k)
        values = torch.full(shape, self.worst, dtype=self.number, device=self.device)
        places = torch.full(shape, -1, dtype=torch.int64, device=self.device)
        for (start, stop), (value, place) in self.best.items():
            count = value.shape[-1]
            values[:, start:stop, :count], places[:, start:stop, :count] = value, place
            if self.folded is not None:
                own, seen = (values[:, start:stop], places[:, start:stop]), (self.seen[start, stop], self.folded)
                values[:, start:stop], places[:, start:stop] = _add_unseen(self.params, *own, seen)
        return [values, torch.where(values == self.worst, -1, places)]


class TopKLines(Lines):
    """A list in registers, into which a tile's better values are taken one by one.

    Values are compared as integers that are ordered like them (NaN above all, as in torch), so that there is one order
    and no special case; integers are compared as they are. A tile that has nothing better costs one comparison; of
    random values only about k log(N / k) of a row's N ever enter its list. The list is sorted at the end, by torch: it
    is small.
    """

    def prepare(self) -> None:
        self.k, self.largest = self.params
        self.is_integer = self.reduction.args[0].dtype != "float"
        self.wide = self.is_integer or self.v.spec.compute == "float64"
        self.holds_nan = not self.largest and not self.is_integer  # behind all numbers
        self.skipped = self.v.count_skipped() if self.holds_nan else ""
        self.room = self.tools.pad_width(self.k)
        self.v.bind((self.name, "slots"), f"tl.arange(0, {self.room})[None, :]", False, f"{self.name}_slots")

    def start(self) -> list[str]:
        n, kind = self.name, "tl.int64" if self.wide else "tl.int32"
        # Where no tile is visited, or too few columns are, slots keep what they begin with: an infinity, not NaN.
        least = _WORST_KEY[64 if self.wide else 32] if self.largest and not self.is_integer else self._least
        beyond = 2**63 - 1 if self.wide else 2**31 - 1  # slots that do not exist are never the worst
        nothing = f"tl.full([KEPT, {self.room}], {least}, {kind})"
        if self.skipped:  # infinities
            nothing = f"tl.where({n}_slots < {self.skipped}, {_WORST_KEY[64 if self.wide else 32]}, {nothing})"
        return [
            f"{n}_keys = tl.where({n}_slots < {self.k}, {nothing}, {beyond})",
            f"{n}_at = tl.full([KEPT, {self.room}], -1, tl.int32) - {n}_slots",
        ]

    @property
    def _least(self) -> int:
        """Of all keys: that of no column."""
        return -(2**63) if self.wide else -(2**31)

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, n = self.v, self.name
        least = f"tl.full([1, 1], {self._least}, tl.int{64 if self.wide else 32})"
        key = self.key_of(v.full(fields[0]))
        places = self.place_of(fields)
        if len(fields) > 1:  # empty slots of parts
            key = f"tl.where({places} < 0, {least}, {key})"
        # The worst that is held leaves, and of equals the last. Columns of lists, and those of tiles that a condition
        # cuts (which are visited after whole ones), may be earlier than what is held.
        last = f"{n}_last = tl.max(tl.where({n}_keys == {n}_worst[:, None], {n}_at, {-self.room - 1}), 1)"
        edge, inside = [f"{n}_worst = tl.min({n}_keys, 1)"], [last]
        enters, takes = f"tl.max({n}_new, 1) > {n}_worst", f"{n}_best > {n}_worst"
        if v.spec.listed or (v.spec.bounds and v.masked):
            edge, inside = [*edge, last], []
            before = f"({n}_new == {n}_worst[:, None]) & ({places} < {n}_last[:, None])"
            enters = f"tl.max((({n}_new > {n}_worst[:, None]) | ({before})).to(tl.int32), 1)"
            takes = f"({takes}) | (({n}_best == {n}_worst) & ({n}_place < {n}_last))"
        leaves, gone = (
            f"({n}_keys == {n}_worst[:, None]) & ({n}_at == {n}_last[:, None])",
            f"{places} == {n}_place[:, None]",
        )
        if v.spec.listed:  # a place may be listed again: one of equal entries is taken at a time, and one leaves
            inside.append(f"{n}_slot = tl.min(tl.where({leaves}, {n}_slots, {self.room}), 1)")
            leaves = f"({n}_slots == {n}_slot[:, None])"
            gone = f"first_lane(({n}_new == {n}_best[:, None]) & ({gone}))"
        v.inside += [
            f"{n}_new = {v.mask_columns(key, least)}",
            *self.leave_out(places, least),
            *edge,
            f"while tl.max(({enters}).to(tl.int32), 0) > 0:",
            f"    {n}_best = tl.max({n}_new, 1)",
            f"    {n}_place = tl.min(tl.where({n}_new == {n}_best[:, None], {places}, 2147483647), 1)",
            *(f"    {line}" for line in inside),
            f"    {n}_takes = {takes}",
            f"    {n}_here = {n}_takes[:, None] & {leaves}",
            f"    {n}_keys = tl.where({n}_here, {n}_best[:, None], {n}_keys)",
            f"    {n}_at = tl.where({n}_here, {n}_place[:, None], {n}_at)",
            f"    {n}_gone = {n}_takes[:, None] & ({gone})",
            f"    {n}_new = tl.where({n}_gone, {least}, {n}_new)",
            *(f"    {line}" for line in edge),
        ]

    def key_of(self, value: str) -> str:
        """Numbers as integers, the best largest."""
        key = f"{value}.to(tl.int64)" if self.is_integer else f"ordered{64 if self.wide else 32}({value})"
        return key if self.largest else f"~{key}"

    def leave_out(self, places: str, least: str) -> list[str]:
        """Lines that take pairs of a tile out of its keys."""
        return []

    def finish(self) -> list[tuple[list[str], Any]]:
        n, feature = self.name, f"#{self.k}"
        keys = f"{'' if self.largest else '~'}{n}_keys"
        self.v.inside.append(
            f"{n}_values = {keys if self.is_integer else f'unordered{64 if self.wide else 32}({keys})'}"
        )
        places = f"tl.maximum({n}_at, -1).to(tl.int64)"
        if self.holds_nan:
            empty = f"{n}_keys == {self._least}"
            self.v.inside.append(f"{n}_values = tl.where({empty}, float('nan'), {n}_values)")
            places = f"tl.where({empty}, {EMPTY}, {places})"
        values = f"{n}_values"
        if self.k > self.tools.tiny:
            return [([values], feature), ([places], feature)]

        def pick(text: str, zero: str, slot: int) -> str:
            return f"tl.sum(tl.where({n}_slots == {slot}, {text}, {zero}), 1)"

        return [
            ([pick(values, "0" if self.is_integer else "0.0", f) for f in range(self.k)], feature),
            ([pick(places, "0", f) for f in range(self.k)], feature),
        ]


class TopK(Reduction):
    """Its state is its results, with empty slots marked."""

    name = "topk"
    fast_forms = FastForm.CPP | FastForm.EDGES | FastForm.ALL_LISTS & ~FastForm.SPLIT_LISTS
    place = 1
    accumulator, lines = TopKAccumulator, TopKLines
    unsorted = True
    plain_ops, combine_ops = 40, 10

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        feature = f"#{params[0]}"  # a letter nobody can declare
        return [(feature, fields[0].dtype), (feature, "int")]

    def result_names(self, fields: tuple[Expr, ...], params: tuple) -> tuple[str, ...]:
        return "values", "indices"

    def pullback(self, over: str, params: tuple, fields: list, results: list, g: list) -> list:
        return [torch.where(is_chosen(over, fields[0], results[1]), g[0], 0.0).sum()]

    def absent(self, params: tuple, fields: tuple[Expr, ...]) -> Sequence[float | None]:
        return (worst(torch.float64 if fields[0].dtype == "float" else torch.int64, params[1]),)

    def idle(self, params: tuple, fields: list[iv.Interval]) -> bool:
        return fields[0] == (iv.MINUS_INF if params[1] else (iv.INF, iv.INF))

    def check_length(self, params: tuple, length: int, axis: str) -> None:
        if params[0] > length:
            raise TopKError(k=params[0], size=length, axis=axis)

    def selected(self, params: tuple) -> int:
        return params[0]

    def dense(self, fields: list[Tensor], vectors: list[bool], over: str, params: tuple, size: int) -> list[Tensor]:
        (x,) = stretch(fields, vectors, over, size)
        k, largest = params
        self.check_length(params, size, over)
        x = x if over == "cols" else x.movedim(-2, -1)
        _, at = find_best(x.detach(), k, largest)
        values = x.gather(-1, at)
        at = torch.where(values == worst(values.dtype, largest), -1, at)
        return [t.unsqueeze(folded_dim(over, vector=True)) for t in (values, at)]

    def dense_part(self, local: Local, fields: list[Tensor], params: tuple, length: int) -> list[Tensor]:
        """The best of fewer than k; the other slots are empty."""
        k, largest = params
        there = min(k, length)
        value, place = local(fields, (there, largest), length)
        rest, nothing = (*value.shape[:-1], k - there), worst(value.dtype, largest)
        return [torch.cat([value, value.new_full(rest, nothing)], -1), torch.cat([place, place.new_full(rest, -1)], -1)]

    def open(self, params: tuple, results: State, lengths: Sequence[int]) -> State:
        """Where a part is shorter than k, its empty slots are last of all: behind NaN too, when the smallest are
        kept."""
        value, place = results
        k, largest = params
        if min(lengths, default=k) >= k:
            return results
        seen = torch.arange(k, device=value.device) < per_part(lengths, place)
        # an integer beats no slot: ties are kept in the order of places
        last = largest or not value.is_floating_point()
        return [value if last else torch.where(seen, value, math.nan), torch.where(seen, place, EMPTY)]

    def merge(self, params: tuple, state: State) -> State:
        """The k best of all parts: sorted by place first, then stably by value, so that ties keep their order."""
        k, largest = params
        value, place = (t.movedim(0, -2).flatten(-2) for t in state)
        order = torch.where(place == EMPTY, NOWHERE, place).argsort(dim=-1, stable=True)
        value, place = value.gather(-1, order), place.gather(-1, order)
        value, order = value.sort(dim=-1, descending=largest, stable=True)
        return [value[..., :k].unsqueeze(0), place.gather(-1, order)[..., :k].unsqueeze(0)]

    def close(self, params: tuple, state: State) -> State:
        value, place = state
        return [torch.where(place == EMPTY, worst(value.dtype, params[1]), value), place.clamp(min=-1)]

    def add_unseen(self, params: tuple, results: State, count: Callable[[], tuple[Any, int]]) -> State:
        return list(_add_unseen(params, results[0], results[1], count))

    def empty_state(self, params: tuple, state: State) -> State:
        return no_places(params[1], state)

    def tile_bytes(self, memory: Any, params: tuple, reads: Reads, owned: tuple[bool, ...]) -> int:
        return 0 if memory.sizes.device.type in ("cpu", "meta") else memory.wide + 8  # else a tile is sorted

    def no_kernel(self, r: Expr) -> str:
        k = r.attrs[2][0]
        return f"the {k} best, more than {MOST_IN_REGISTERS}" if k > MOST_IN_REGISTERS else ""

    def exchanged_bytes(self, r: Expr, width: Callable[[Expr], int], item: int) -> tuple[int, int]:
        return 0, r.attrs[2][0] * (item + 8)


# ``next_best``: the k best of the pairs behind the last of those that are known, unsorted, for a top-k whose list does
# not fit in registers over lists of columns (``engines/triton/kernels/topk.py``).
#
# Fields: the number; of the last known pair its number and place; how many of its copies are known (a list may name a
# column several times); and how many infinities without a place are.


class NextBestLines(TopKLines):
    """The same list, of the pairs that are behind another."""

    def prepare(self) -> None:
        super().prepare()
        self.last = self.reduction.args[1:4]
        self.skipped = self.skipped and f"({self.skipped}) - {self.v.number(self.reduction.args[4])}"

    def start(self) -> list[str]:
        return [*super().start(), f"{self.name}_copies = tl.zeros([KEPT], tl.int32)"]

    def step(self, fields: tuple[Expr, ...]) -> None:
        super().step(fields[:1])

    def leave_out(self, places: str, least: str) -> list[str]:
        n, (number, place, known) = self.name, map(self.v.number, self.last)
        key = self.v.bind((self.name, "last"), self.key_of(number), False, f"{n}_known")
        return [
            f"{n}_copy = ({n}_new == {key}) & ({places} == {place})",
            f"{n}_more = tl.cumsum({n}_copy.to(tl.int32), 1) + {n}_copies[:, None] > {known}",
            f"{n}_copies += tl.sum({n}_copy.to(tl.int32), 1)",
            f"{n}_behind = ({n}_new < {key}) | (({n}_new == {key}) & ({places} > {place})) | ({n}_copy & {n}_more)",
            f"{n}_new = tl.where({n}_behind, {n}_new, {least})",
        ]


class NextBest(TopK):
    name = "next_best"
    fast_forms = FastForm.LISTS | FastForm.CUT_LISTS
    lines = NextBestLines
    unsorted = False

    def add_unseen(self, params: tuple, results: State, count: Callable[[], tuple[Any, int]]) -> State:
        return results  # whoever joins the lists does


# ``panel``: folds nothing. It writes the number of every pair into a matrix, kept axis first, as the results of the
# kept indices. The Triton engine makes this kind of a top-k whose list would not fit in registers, for some rows and
# columns at a time, and selects from what was written. It is the only reduction of its fold.
#
# Parameters: those of the top-k, ``(k, largest)``.


class PanelLines(Lines):
    """A tile is stored where it belongs: program instances and splits write different pairs."""

    def start(self) -> list[str]:
        return []

    def step(self, fields: tuple[Expr, ...]) -> None:
        v, value = self.v, self.v.full(fields[0])
        row = "(tl.cast(batch, tl.int64) * kept_size + kept_at[:, None]) * folded_size"
        mask = "kept_in[:, None]" + (" & folded_in[None, :]" if v.masked else "")
        v.inside.append(f"tl.store(out{self.place} + {row} + folded_at[None, :], {value}, mask={mask})")

    def finish(self) -> list:
        return []


class Panel(Reduction):
    """Pairs of tiles that are skipped keep what the matrix was filled with."""

    name = "panel"
    keeps_pairs = True
    lines = PanelLines
    plain_ops, combine_ops = 1, 0

    def outputs(self, fields: tuple[Expr, ...], params: tuple) -> Outputs:
        return [(None, fields[0].dtype)]

    def idle(self, params: tuple, fields: list[iv.Interval]) -> bool:
        return TopK().idle(params, fields)
