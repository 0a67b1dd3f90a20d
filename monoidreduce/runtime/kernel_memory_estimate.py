"""What a fold holds at once on a GPU: its kernels and panels gone through, with nothing computed.

Apart from ``torch_memory_estimate.py``, which goes through what torch runs. What is allocated here is allocated by
the code that would
do it, in its order; only kernels rest, and tensors have no numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ..engines import panel, triton
from ..engines.auto import planner
from ..engines.common import matmul, tile_counter
from ..engines.common.combine import combine
from ..engines.common.evaluate import Form, Sizes, result_form
from ..engines.common.label_gather import chunk_size
from ..engines.panel.panel_program import PanelLoop
from ..engines.triton.kernels import split_combine, topk
from ..engines.triton.panel import epilogue
from ..engines.triton.panel.memory_plan import MemoryPlan
from ..plan import budget, cost, tiles
from ..plan.schedule import Choice
from ..program.expression import Expr
from .dry_run import Noted, Scale, forms
from .live_memory import Alive
from .torch_memory_estimate import filled, of_batch, watched

_META = torch.device("meta")
# bytes of a place that is scattered to, which torch sorts on a GPU: where it is and whose, and both again, twice, while
# they are sorted (an H200 was seen to take 49)
_SORTED = 6 * 8


def peak(noted: Noted, choice: Choice) -> int | None:
    """Bytes alive at once in a fold, its results among them; None where it has no kernels, and torch runs it."""
    fold, leaves, sizes = noted.fold, noted.leaves, noted.sizes
    if choice.schedule == "panel":
        if not triton.is_deep(fold, leaves, sizes):
            return _of_panels(noted, choice)
        if topk.factors(fold, leaves, sizes):  # a few rows at a time, by the vendor's product
            return _rested(noted, lambda given, meant: triton.run_deep(fold, given, meant))
        choice = Choice("flash")
    ready = planner.launches(choice, fold, leaves, sizes)
    return None if ready is None else _of_kernels(noted, ready)


def _of_kernels(noted: Noted, ready: triton.Ready) -> int:
    """Gathers and kernels one after the other, beside what was made before them."""
    sizes = noted.sizes
    made = dict(zip(noted.fold.outputs, forms(noted.fold, noted.leaves, sizes, sizes.device), strict=True))
    done = peak = 0
    for r in ready.picks:
        peak = max(peak, done + _picked(noted, r))
        done += _bytes([made[r, 0]])
    for one in ready.launches:
        peak = max(peak, done + _launched(noted, one))
        if one.parts > 1 or one.lists:
            peak = max(peak, done + _completed(one, sizes))
        done += _bytes(made[o] for o in one.fold.outputs)
    return max(peak, done)


def _launched(noted: Noted, one: Any) -> int:
    """Bytes alive while a kernel runs: what leaves were converted to, and what it writes."""
    spare = copy.copy(one)
    spare.sizes, spare.again = replace(noted.sizes, device=_META), lambda *arguments: None
    spare._bounds = lambda *given: []  # which tiles are visited is found out once for a condition's data

    def run(leaves: list[Any], sizes: Sizes) -> None:
        outputs = [torch.empty(shape, dtype=dtype, device=_META) for shape, dtype in one.outputs]
        spare.launched(outputs, leaves, lambda: triton.merged(noted.fold, leaves, sizes)[0])

    return _rested(noted, run)


def _completed(one: Any, sizes: Sizes) -> int:
    """Bytes alive while the results of parts are put together, and lists of the best sorted."""
    parts, scale = one.parts, Scale(sizes, tiles=(one.parts,))
    small = replace(scale.sizes(sizes), batch=tuple(map(scale.down, sizes.batch)))
    with watched(scale, []) as alive:
        count = scale.down(parts)
        shapes = [result_form(r, k, small) for r, k in one.fold.outputs]
        first = (count,) if parts > 1 else ()
        made = [torch.zeros((*first, *shape), dtype=dtype, device="cpu") for shape, dtype in shapes]
        if parts > 1:
            made[:] = combine(one.fold, made, [1] * count, ordered=True, faster=split_combine.room)
        for at in one.lists:
            made[at : at + 2] = topk.tidy(one.fold.outputs[at][0], *made[at : at + 2])
    return alive.peak


def _picked(noted: Noted, r: Expr) -> int:
    """Bytes alive while the numbers of one column of every row (or the other way round) are gathered, in chunks."""
    sizes = noted.sizes
    _, whole = triton.merged(noted.fold, noted.leaves, sizes)
    widest = max([1, *(sizes.of(str(e.feature)) for e in noted.fold.leaves if e.feature is not None)])
    matches = 1 if r.args[0].feature is None else sizes.of(str(r.args[0].feature))
    length = chunk_size(tiles.ELEMENTS, whole[-1], matches, widest)
    scale = Scale(sizes, tiles=(length,))
    small = scale.sizes(sizes)
    leaves = [filled(v, scale) for v in noted.leaves]
    with watched(scale, leaves) as alive:
        values, batch = triton.merged(noted.fold, leaves, small)
        elements = scale.down(length) * batch[-1] * scale.down(matches) * scale.down(widest)
        triton.pick(r, values, batch, small, elements)
    side = "rows" if r.attrs[2] == ("col",) else "cols"  # which holds the places
    places = min(length, sizes.here(side)) * whole[-1] * matches
    return alive.peak + (_SORTED * places if r.attrs[1] == side else 0)  # scattered, not gathered


def _bytes(found: Iterable[Form]) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in found)


# Without numbers ------------------------------------------------------------------------------------------------


def _of_panels(noted: Noted, choice: Choice) -> int:
    batch, alone = torch.Size(noted.sizes.batch).numel(), replace(noted.sizes, batch=())
    own = [v[0] if isinstance(v, Tensor) else v for v in of_batch(noted, 1).leaves]
    there = budget.asked() is not None or torch.cuda.is_available()
    (room,) = choice.tile("room") or (0 if there else cost.ROOM,)  # of a device elsewhere nobody knows what is free

    class Step(_Resting):
        real = alone

    one = replace(noted, leaves=tuple(own), sizes=alone)
    held = _rested(one, lambda leaves, sizes: panel.run(noted.fold, leaves, sizes, Step, room))
    results = _bytes(forms(noted.fold, noted.leaves, noted.sizes, noted.sizes.device))
    return held if batch == 1 else max(held + results - results // batch, 2 * results)  # stacked in the end


def _rested(noted: Noted, run: Callable[[list[Any], Sizes], Any]) -> int:
    """Bytes alive while an engine runs on tensors without numbers, kernels at rest."""
    leaves = [torch.empty_like(v, device=_META) if isinstance(v, Tensor) else v for v in noted.leaves]
    token = matmul.rehearsed.set(noted.sizes)
    try:
        with (
            _disable_current_modes(),
            torch.no_grad(),
            tile_counter.pause_counting(),
            triton.resting(),
            _Meta(leaves) as alive,
        ):
            run(leaves, replace(noted.sizes, device=_META))
    finally:
        matmul.rehearsed.reset(token)
    return alive.peak


class _RestingPlan(MemoryPlan):
    """A memory plan on tensors without numbers, whose GEMMs are those of the real device."""

    def __init__(self, loop: PanelLoop, sizes: Sizes, dtypes: set[torch.dtype], real: Sizes):
        self.twin = MemoryPlan(loop, real, dtypes)
        super().__init__(loop, sizes, dtypes)

    def epilogue(self, shifted: bool) -> epilogue.EpilogueGemm | None:
        return self.twin.epilogue(shifted)


class _Resting(triton.KernelStep):
    """Does to panels without numbers what kernels would do to real ones; of panels that are alike, to one."""

    real: ClassVar[Sizes]

    def __init__(self, loop: PanelLoop, sizes: Sizes, dtypes: set[torch.dtype]):
        super().__init__(loop, sizes, dtypes)
        self.plan = _RestingPlan(loop, sizes, dtypes, self.real)

    def iterate_panels(self) -> Iterator[tuple[slice, slice]]:
        seen = set()
        for rows, cols in super().iterate_panels():
            own = self.arena.panel is self.arena.own
            kind = (rows.stop - rows.start, cols.stop - cols.start, self.directions, own)
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
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if not any(t.is_meta for t in given):
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return kwargs.get("out", args[0])
        if torch.Tag.pointwise not in func.tags:
            return func(*args, **kwargs)
        one = tree_map_only(Tensor, lambda t: torch.ones((1,) * t.dim(), dtype=t.dtype, device="cpu"), (args, kwargs))
        made: Tensor = func(*one[0], **one[1])
        return torch.empty(_broadcast(given), dtype=made.dtype, device=_META)

    def size(self, t: Tensor) -> int:
        return t.untyped_storage().nbytes() if t.is_meta else 0


def _broadcast(given: list[Tensor]) -> tuple[int, ...]:
    """The shape of what is done to all of these, number by number."""
    longest = max(t.dim() for t in given)
    shapes = [(1,) * (longest - t.dim()) + tuple(t.shape) for t in given]
    return tuple(next((n for n in lengths if n != 1), 1) for lengths in zip(*shapes, strict=True))
