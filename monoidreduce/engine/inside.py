"""What a fold holds at once: where torch runs it, in tiles or in panels, its engine gone through in small.

The engines themselves run, on a few tiles of prime lengths (``rehearse.py``); so what is counted is what they do,
copies and all, and stays so when they change. A few milliseconds: for who asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ..plan import budget, cost, panels, tiles
from ..plan.choice import Choice
from ..plan.work import Case
from ..program.expr import Expr
from ..program.lower import Fold
from . import batching, chunk, eager, hardware, library, panel, tally, triton
from .alive import Alive
from .combine import combine
from .evaluate import Sizes, form
from .pick import chunk_of
from .rehearse import Enlarged, Noted, Scale, forms
from .tilecode import Code
from .triton import united
from .walks import Walk, as_program, walks

_CPU, _META = torch.device("cpu"), torch.device("meta")


def peak(noted: Noted, choice: Choice) -> int:
    """Bytes alive at once in a fold, its results among them."""
    batch = torch.Size(noted.sizes.batch).numel()
    made = library.shapes(noted.fold, list(noted.leaves), noted.sizes)
    results = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in made)
    if choice.schedule == "panel":
        one = _in_panels(_of_batch(noted, 1), choice)
        return one if batch == 1 else max(one + results - results // batch, 2 * results)  # stacked in the end
    tile = tiles.Tiles(*(choice.tile("tile") or (1, tiles.ROWS, tiles.COLS)))
    merged, _ = batching.merge(noted.sizes.batch, [v for v in noted.leaves if isinstance(v, Tensor)])
    together = max(1, min(tile.batch, merged[-1]))  # what cannot be merged is walked
    return _in_tiles(_of_batch(noted, together), tile) + results - results * together // batch


def of_kernels(noted: Noted, case: Case, choice: Choice) -> int:
    """The same of generated kernels, which hold their results, and those of the parts that an axis was cut into.

    One runs after the other, beside what was made before it.
    """
    sizes = noted.sizes
    made = dict(zip(noted.fold.outputs, forms(noted.fold, noted.leaves, sizes, sizes.device), strict=True))
    bytes_of = lambda found: sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in found)
    done = peak = 0
    picks, folds = triton.kernels(noted.fold, sizes)
    for r in picks:
        peak = max(peak, done + _picked(noted, r))
        done += bytes_of([made[r, 0]])
    for over, fold in folds:
        parts = cost.parts_of(case, over, choice.tile(over) or _OWN)
        if parts > 1:
            peak = max(peak, done + _combined(fold, sizes, parts))
        done += bytes_of(made[o] for o in fold.outputs)
    return max(peak, done)


_OWN = (64, 64, 4, 2, 0)


def of_panels(noted: Noted, case: Case, choice: Choice) -> int:
    """The same of panels on a GPU: they are gone through on tensors without numbers, kernels at rest."""
    batch, sizes = torch.Size(noted.sizes.batch).numel(), replace(noted.sizes, batch=())
    (room,) = choice.tile("room") or (0,)

    class Step(_Resting):
        real, space = sizes, room

    one = _of_batch(noted, 1)
    leaves = [v[0] if isinstance(v, Tensor) else v for v in one.leaves]
    with _disable_current_modes(), torch.no_grad(), tally.nobody(), triton.resting(), _Meta(leaves) as alive:
        panel.run(noted.fold, leaves, replace(sizes, device=_META), Step, 1)
    made = forms(noted.fold, noted.leaves, noted.sizes, sizes.device)
    results = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in made)
    return alive.peak if batch == 1 else max(alive.peak + results - results // batch, 2 * results)


def _combined(fold: Fold, sizes: Sizes, parts: int) -> int:
    """Bytes alive while the results of parts are put together."""
    scale = Scale(sizes, tiles=(parts,))
    small = replace(scale.sizes(sizes), batch=tuple(map(scale.down, sizes.batch)))
    with _watched(scale, []) as alive:
        shapes = [form(r, k, small) for r, k in fold.outputs]
        made = [torch.zeros((scale.down(parts), *shape), dtype=dtype) for shape, dtype in shapes]
        combine(fold, made, [1] * scale.down(parts), ordered=True, faster={"soft": united.room})
    return alive.peak


def _picked(noted: Noted, r: Expr) -> int:
    """Bytes alive while the numbers of one column of every row (or the other way round) are gathered, in chunks."""
    sizes = noted.sizes
    _, whole = triton.merged(noted.fold, noted.leaves, sizes)
    widest = max([1, *(sizes.of(str(e.feature)) for e in noted.fold.leaves if e.feature is not None)])
    matches = 1 if r.args[0].feature is None else sizes.of(str(r.args[0].feature))
    length = chunk_of(tiles.ELEMENTS, whole[-1], matches, widest)
    scale = Scale(sizes, tiles=(length,))
    small = scale.sizes(sizes)
    leaves = [_filled(v, scale) for v in noted.leaves]
    with _watched(scale, leaves) as alive:
        values, batch = triton.merged(noted.fold, leaves, small)
        elements = scale.down(length) * batch[-1] * scale.down(matches) * scale.down(widest)
        triton.pick(r, values, batch, small, elements)
    return alive.peak


def _of_batch(noted: Noted, batch: int) -> Noted:
    """The same fold for some elements of its batch."""
    old = len(noted.sizes.batch)

    def cut(v: Any) -> Any:
        if not isinstance(v, Tensor):
            return v
        many = batch if v.shape[:old].numel() > 1 else 1
        return torch.empty((many, *v.shape[old:]), dtype=v.dtype, device="meta")

    sizes = replace(noted.sizes, batch=(batch,), device=_CPU)
    return replace(noted, leaves=tuple(map(cut, noted.leaves)), sizes=sizes)


def _in_tiles(noted: Noted, tile: tiles.Tiles) -> int:
    sizes = noted.sizes
    rows, cols = min(tile.rows, sizes.rows), min(tile.cols, sizes.cols)
    scale = Scale(sizes, tiles=(rows, cols))
    small = tiles.Tiles(*map(scale.down, (sizes.batch[0], rows, cols)))
    leaves = [_filled(v, scale) for v in noted.leaves]
    with _watched(scale, leaves) as alive:
        eager.run(noted.fold, leaves, scale.sizes(sizes), small, _Both)
    return alive.peak


def _in_panels(noted: Noted, choice: Choice) -> int:
    sizes = noted.sizes
    one = replace(sizes, batch=())
    (room,) = choice.tile("room") or (0,)
    met = list(_panels(noted, one, room))
    lengths = [n for p, t, width in met for n in (p.rows, p.cols, t.rows, t.cols, width)]
    scale = Scale(sizes, tiles=lengths)

    class Small(_SmallStep):
        real, space, by = one, room, scale

    leaves = [_filled(v, scale) for v in noted.leaves]
    with _watched(scale, leaves) as alive:
        panel.run(noted.fold, leaves, scale.sizes(sizes), Small, 1)
    return alive.peak


def _panels(noted: Noted, sizes: Sizes, room: int) -> Iterator[tuple[panels.Panels, tiles.Tiles, int]]:
    """The panels, their tiles and the width of their rows, of every walk."""
    for walk in walks(as_program(noted.fold)):
        for each in (walk, *walk.apart()):
            step = panel.TorchStep(each, sizes, _kinds(noted))
            found = step.choose(_room(step, room))
            if found is not None:
                yield found, step.cut(found), step.width(found)


def _kinds(noted: Noted) -> set[torch.dtype]:
    return {v.dtype for e, v in zip(noted.fold.leaves, noted.leaves, strict=True) if e.feature is not None}


def _room(step: panel.TorchStep, asked: int) -> int:
    return asked or budget.limit(lambda: hardware.free_memory(_CPU), step.least())


class _Both(chunk.FoldCode):
    """The first tile has all of its conditions, as tiles have that a condition cuts; of the others indices decide."""

    first = True

    def variant(self, known: dict[Expr, tuple[float, float]]) -> Code | None:
        first, self.first = self.first, False
        return super().variant({} if first else known)


class _SmallStep(panel.TorchStep):
    """Does to small panels what the real ones would have done to them."""

    real: ClassVar[Sizes]
    space: ClassVar[int]
    by: ClassVar[Scale]

    def __init__(self, walk: Walk, sizes: Sizes, kinds: set[torch.dtype]):
        super().__init__(walk, sizes, kinds)
        self.twin = panel.TorchStep(walk, self.real, kinds)

    def choose(self, room: int) -> panels.Panels | None:
        found = self.twin.choose(_room(self.twin, self.space))
        if found is None:
            return None
        self.found = found
        return replace(found, rows=self.by.down(found.rows), cols=self.by.down(found.cols))

    def code(self, fold: Fold, numbers: frozenset[Expr]) -> chunk.FoldCode:
        return _Both(fold, numbers)

    def width(self, panel: panels.Panels) -> int:
        return self.by.down(self.twin.width(self.found))

    def cut(self, panel: panels.Panels) -> tiles.Tiles:
        found = self.twin.cut(self.found)
        return tiles.Tiles(found.batch, self.by.down(found.rows), self.by.down(found.cols))


class _Resting(triton.KernelStep):
    """Does to panels without numbers what kernels would do to real ones; of panels that are alike, to one."""

    real: ClassVar[Sizes]
    space: ClassVar[int]

    def __init__(self, walk: Walk, sizes: Sizes, kinds: set[torch.dtype]):
        super().__init__(walk, sizes, kinds)
        self.twin = triton.KernelStep(walk, self.real, kinds)
        self._fused = self.twin._fused

    def choose(self, room: int) -> panels.Panels | None:
        free = lambda: hardware.free_memory(self.real.device)
        return super().choose(self.space or budget.limit(free, self.least()))

    def walk_panels(self) -> Iterator[tuple[slice, slice]]:
        seen = set()
        for rows, cols in super().walk_panels():
            kind = (rows.stop - rows.start, cols.stop - cols.start, self.over, self.buffers is self.own)
            if kind not in seen:
                seen.add(kind)
                yield rows, cols


class _Meta(Alive):
    """Bytes that tensors without numbers would take.

    torch has their shapes from Python, for most operations, and imports its compiler for it: seconds. So what is
    written somewhere is taken for written, and of what is done number by number only the form is made."""

    def __init__(self, leaves: list[Any]):
        super().__init__([v for v in leaves if isinstance(v, Tensor)])

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func._schema.is_mutable:
            return kwargs.get("out", args[0] if args else None)
        if torch.Tag.pointwise not in func.tags:
            return func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        one = tree_map_only(Tensor, lambda t: torch.ones((1,) * t.dim(), dtype=t.dtype), (args, kwargs))
        made: Tensor = func(*one[0], **one[1])
        return torch.empty(_broadcast(given), dtype=made.dtype, device=_META)

    def size(self, t: Tensor) -> int:
        return t.untyped_storage().nbytes() if t.is_meta else 0


def _broadcast(given: list[Tensor]) -> tuple[int, ...]:
    """The shape of what is done to all of these, number by number."""
    longest = max(t.dim() for t in given)
    shapes = [(1,) * (longest - t.dim()) + tuple(t.shape) for t in given]
    return tuple(next((n for n in lengths if n != 1), 1) for lengths in zip(*shapes, strict=True))


def _filled(v: Any, scale: Scale) -> Any:
    """A small leaf of many different numbers: a distance that is 0 is computed in another way."""
    if not isinstance(v, Tensor):
        return v
    shape = [scale.down(n) for n in v.shape]
    if not v.is_floating_point():
        return torch.zeros(shape, dtype=v.dtype)
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float64).mul_(0.6180339887).frac_().to(v.dtype).view(shape)


@contextlib.contextmanager
def _watched(scale: Scale, leaves: list[Any]) -> Iterator[Enlarged]:
    """Bytes alive inside the block beside the leaves; nobody else takes notice of what runs there."""
    given = [v for v in leaves if isinstance(v, Tensor)]
    with _disable_current_modes(), torch.no_grad(), tally.nobody(), Enlarged(scale, given) as alive:
        yield alive
