"""The Triton engine: one generated kernel per direction of a fold, for GPUs.

``run`` has the contract of every engine: this fold, on these tensors, of these sizes. A fold that has no kernel (a
top-k, a monoid with vectors, more features than registers hold) is handed to ``fallback`` with a warning that says
why. Importing this room does not import Triton: the generated text does.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import EngineError, FallbackWarning
from ...plan import budget, tiles
from ...program.constructors import ONE
from ...program.expression import Expr
from ...program.lower import Fold
from ...reductions import kind_of, outputs_of
from ..common import batching, matmul
from ..common.evaluate import Allocator, Sizes
from ..common.label_gather import run_pick
from ..common.one_sided import Side
from .codegen import k_loop
from .codegen.kernel_spec import TINY, WIDEST, Unsupported, padded
from .kernels import elementwise, fold_kernel, topk
from .kernels.record_launches import Made, record
from .launch import jit_module
from .launch.availability import available, launches_on, runs_on
from .launch.jit_module import resting
from .launch.launch_recipes import Buffer, NumberArithmetic, ProgramReplay, RecordedLaunches
from .panel.kernel_step import KernelStep
from .schedules import spec_from_tensors
from .schedules.kernel_plan import KernelPlan, overriding_plans, use_plan
from .schedules.spec_from_tensors import as_for

__all__ = [
    "Buffer",
    "KernelPlan",
    "KernelStep",
    "NumberArithmetic",
    "Parted",
    "ProgramReplay",
    "Ready",
    "RecordedLaunches",
    "Unsupported",
    "as_for",
    "available",
    "is_deep",
    "kind",
    "launches_on",
    "overriding_plans",
    "ready",
    "ready_deep",
    "record",
    "resting",
    "run",
    "run_deep",
    "runs_on",
    "side",
    "signs",
    "sources",
    "store",
    "tell",
    "tiles_of",
    "use_plan",
]

_told: set[tuple[Fold, str]] = set()
_READY: dict[tuple, Ready] = {}


def run(
    fold: Fold, leaves: list[Any], sizes: Sizes, fallback: Callable[..., list[Tensor]] | None = None
) -> list[Tensor]:
    """Run a fold. Leaves are ``[*batch, M or N, f]`` or Python numbers; results come back the same way."""
    try:
        return _run(fold, leaves, sizes)
    except Unsupported as reason:
        tell(fold, reason, None if fallback is None else "the eager engine runs")
        assert fallback is not None
        return fallback(fold, leaves, sizes)


def is_deep(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> bool:
    """Whether a fold is one to numbers of wide 16-bit vectors, or the k best of wide products: not for panels."""
    return topk.factors(fold, leaves, sizes) is not None or _to_numbers(fold, leaves, sizes)


def _to_numbers(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> bool:
    vectors = [(e, v) for e, v in zip(fold.leaves, leaves, strict=True) if e.feature is not None]
    narrow = any(v.dtype in matmul.SIXTEEN for _, v in vectors)
    return k_loop.fits(fold, max([0, *(sizes.of(str(e.feature)) for e, _ in vectors)]), narrow)


def run_deep(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[Tensor]:
    """Run such a fold; raises Unsupported for all others."""
    factors = topk.factors(fold, leaves, sizes)
    if factors is None and not _to_numbers(fold, leaves, sizes):
        raise Unsupported("products of 16 bits that are folded to numbers have kernels of their own")
    return topk.of_product(fold, *factors, sizes) if factors else _run(fold, leaves, sizes)


def ready_deep(fold: Fold, leaves: list[Any], sizes: Sizes) -> Ready | None:
    """The launches of such a fold on leaves like these; None where it is another, or something else is done too."""
    alone = topk.factors(fold, leaves, sizes) is None and _to_numbers(fold, leaves, sizes)
    return ready(fold, leaves, sizes) if alone else None


def tiles_of(fold: Fold, leaves: list[Any], sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The tiles that the kernels of a fold would take, by direction; nothing where there is nothing to choose."""
    try:
        ready = Ready(fold, leaves, sizes)
    except Unsupported:
        return {}
    found = {one.over: one.plan for one in ready.launches if not one.spec.deep}
    return {
        o: (p.block_kept, p.block_folded, p.num_warps, p.num_stages, p.parts, int(p.boxes)) for o, p in found.items()
    }


def sources(fold: Fold) -> list[Path]:
    """The files of the kernels that were made for a fold so far."""
    made = [one for ready in _READY.values() if ready.fold is fold for one in ready.launches]
    return list(dict.fromkeys(jit_module.write(one.kernel.text) for one in made))


def tell(fold: Fold, reason: Unsupported, instead: str | None) -> None:
    """Warn once that something else runs a fold; an error where nothing else is there, or ``strict`` is asked for."""
    if instead is None or matmul.asked.get()[1]:
        raise EngineError(
            detail=f"the Triton engine cannot run this fold: {reason}",
            fix='Use mr.use(engine="eager"), or leave strict out to let that engine run it with a warning',
        ) from None
    if (fold, str(reason)) not in _told:
        _told.add((fold, str(reason)))
        warnings.warn(FallbackWarning(f"{instead} what has no kernel: {reason}"), stacklevel=3)


def _run(fold: Fold, leaves: list[Any], sizes: Sizes) -> list[Tensor]:
    return _ready(fold, leaves, sizes)(leaves)


def ready(fold: Fold, leaves: list[Any], sizes: Sizes) -> Ready | None:
    """The launches of a fold on leaves like these; None where it has no kernel."""
    try:
        return _ready(fold, leaves, sizes)
    except Unsupported:
        return None


def _ready(fold: Fold, leaves: list[Any], sizes: Sizes) -> Ready:
    key: tuple = (id(fold), sizes.rows, sizes.cols, sizes.batch, sizes.compute, sizes.device)
    key += (
        matmul.float32_precision(),
        budget.requested() is None,
        overriding_plans(),
        spec_from_tensors.like.get(),
        kind(leaves),
    )
    key += signs([v for v in leaves if not isinstance(v, Tensor)])
    found = _READY.get(key)
    if found is None:
        found = _READY[key] = Ready(fold, leaves, sizes)
        while len(_READY) > 4096:
            del _READY[next(iter(_READY))]
    return found


def side(side: Side, leaves: Sequence[Any], sizes: Sizes) -> Callable[[Sequence[Any]], list[Tensor]] | None:
    """The arithmetic of one side as one launch, for leaves like these; None where it has no kernel."""
    try:
        return elementwise.Launch(side, leaves, sizes)
    except Unsupported:
        return None


def store() -> Any:
    """Where launches are kept."""
    return _READY


def kind(leaves: Sequence[Any]) -> tuple:
    """All that kernels look at in leaves besides their numbers."""
    found: list[Any] = []
    for v in leaves:
        if isinstance(v, Tensor):
            found += (v.dtype, v.shape, v.stride(), v.data_ptr() & 15)
        else:
            found.append(type(v))
    return tuple(found)


def signs(numbers: Sequence[Any]) -> tuple:
    """What a kernel's text depends on in Python numbers: their sign, and whether they fit in 32 bits."""
    found: list[bool] = []
    for v in numbers:
        found += (v > 0, abs(v) >= fold_kernel.SMALL)
    return tuple(found)


class Ready:
    """A fold on tensors of given types, shapes, strides and alignment: its launches, made once."""

    def __init__(self, fold: Fold, leaves: list[Any], sizes: Sizes):
        if not available():
            raise Unsupported("Triton is not installed")
        if sizes.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise Unsupported("the tensors are on a CPU (TRITON_INTERPRET=1 runs kernels there)")
        if any(e.is_pair for e in fold.leaves):
            raise Unsupported("an argument is given per pair")
        self.fold, self.sizes = fold, sizes  # the fold is held, so that its id stays its own
        values, self.batch = merged(fold, leaves, sizes)
        self.picks, parts = kernels(fold, sizes)
        ways = {over: [part for o, part in parts if o == over] for over, _ in parts}
        made = (fold_kernel.launches(over, folds, values, self.batch, sizes) for over, folds in ways.items())
        self.launches = [one for launches in made for one in launches]
        found = [(r, 0) for r in self.picks] + [o for one in self.launches for o in one.fold.outputs]
        self.order = [found.index(o) for o in fold.outputs]

    def __call__(self, leaves: Sequence[Any]) -> list[Tensor]:
        views = _Once(lambda: merged(self.fold, leaves, self.sizes)[0])
        found: list[Tensor] = []
        for r in self.picks:
            picked = pick(r, views(), self.batch, self.sizes)
            found.append(picked.view(*self.sizes.batch, *picked.shape[len(self.batch) :]))
        for one in self.launches:
            found += one(leaves, views)
        return [found[k] for k in self.order]

    def recipes(self, leaves: Sequence[Any]) -> list[Made] | None:
        """Which results each launch makes of such leaves, and how again; None where something else is done too."""
        if self.picks:
            return None
        found, first = [], 0
        for one in self.launches:
            count, recipe, joined = len(one.outputs), one.recipe() if one.grid else None, one.united()
            shifted = one.shifted(leaves)
            if recipe is None or joined is None or shifted is None:
                return None
            found.append(Made(recipe, [self.order.index(first + k) for k in range(count)], joined, shifted))
            first += count
        return found


class Parted:
    """The launches of a fold whose results are not all shown: those kept for a backward alone share one allocation."""

    def __init__(self, ready: Ready, shown: tuple[int, ...]):
        self.ready, self.shown = ready, shown
        self.rest = tuple(k for k in range(len(ready.order)) if k not in shown)
        self.one = self._alone()

    def _alone(self) -> fold_kernel.Launch | None:
        """The one launch, if its results are its outputs as they are, and those not shown can share an allocation."""
        if len(self.ready.launches) != 1 or self.ready.picks or len(self.rest) < 2:
            return None
        one = self.ready.launches[0]
        forms = {one.outputs[k] for k in self.rest}
        if len(forms) > 1 or one.spec.split or one.lists or not one.grid:
            return None
        ((shape, dtype),) = forms
        self.step = torch.Size(shape).numel() * dtype.itemsize
        self.room = Allocator(((len(self.rest), *shape), dtype), self.ready.sizes.device)
        return None if self.step % 16 else one

    def __call__(self, leaves: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """The results that are shown, and the others: as they are, or one behind the other in one tensor."""
        one = self.one
        if one is None or one.again is None:
            found = self.ready(leaves)
            return [found[k] for k in self.shown], [found[k] for k in self.rest]
        shown, rest = [one.rooms[k]() for k in self.shown], self.room()
        places: list[Any] = [None] * len(one.outputs)
        for k, t in zip(self.shown, shown, strict=True):
            places[k] = t.data_ptr()
        start = rest.data_ptr()
        for n, k in enumerate(self.rest):
            places[k] = start + n * self.step
        one.launched(places, leaves, _Once(lambda: merged(self.ready.fold, leaves, self.ready.sizes)[0]))
        return shown, [rest]


class _Once:
    """What is made when it is first asked for; lighter than ``functools.cache``, which is made anew in every call."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], Any]):
        self._make, self._made = make, None

    def __call__(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made


def merged(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> tuple[dict[Expr, Any], tuple[int, ...]]:
    """The leaves of a fold, tensors with as few batch dimensions as they allow; and those."""
    given = [e for e, v in zip(fold.leaves, leaves, strict=True) if isinstance(v, Tensor)]
    batch, views = batching.merge_batch_dims(sizes.batch, [v for v in leaves if isinstance(v, Tensor)])
    return dict(zip(fold.leaves, leaves, strict=True)) | dict(zip(given, views, strict=True)), batch


def kernels(fold: Fold, sizes: Sizes) -> tuple[list[Expr], list[tuple[str, Fold]]]:
    """In the order in which they run: what is gathered, and then what each kernel folds, with its axis."""
    found = _directions(fold)
    return [r for *_, picks in found for r in picks], [(o, f) for o, part, _ in found for f in _held(part, sizes)]


def _held(fold: Fold, sizes: Sizes) -> list[Fold]:
    """A fold as one kernel, or as several where its running sums do not fit in registers together: to compute pairs
    again costs less than to keep sums in memory."""
    parts: list[list[tuple[Expr, Expr]]] = []
    held = WIDEST
    for r, scale in fold.scaled:
        shapes = [feature for feature, _ in outputs_of(r) if feature is not None]
        width = sum(padded(sizes.of(str(f))) for f in shapes if sizes.of(str(f)) > TINY)
        if not parts or (width and held + width > WIDEST):
            parts.append([])
            held = 0
        parts[-1].append((r, scale))
        held += width
    return [replace(fold, reductions=tuple(r for r, _ in part), scales=tuple(s for _, s in part)) for part in parts]


@functools.lru_cache(maxsize=1024)
def _directions(fold: Fold) -> tuple[tuple[str, Fold, tuple[Expr, ...]], ...]:
    """Per direction: what one kernel folds, and the picks that are gathers of their own."""
    found = []
    for over in ("cols", "rows"):
        mine = {r: s for r, s in fold.scaled if r.attrs[1] == over}
        whole = Fold(fold.leaves, tuple(mine))
        picks = tuple(r for r in mine if not kind_of(r).walks(r, whole.reductions))
        kept = {r: s for r, s in mine.items() if r not in picks}
        found.append((over, replace(fold, reductions=tuple(kept), scales=tuple(kept.values())), picks))
    return tuple(found)


def pick(
    r: Expr, values: dict[Expr, Any], batch: tuple[int, ...], sizes: Sizes, elements: int = tiles.ELEMENTS
) -> Tensor:
    """A gather needs no kernel of ours; each row's own column is not even that. ``elements``: of a chunk."""
    target, value, vector = r.args
    own = (r.attrs[1], target.op, vector.op) == ("cols", "row_index", "leaf") and vector.feature is not None
    if own and value is ONE and sizes.rows <= sizes.cols:
        return values[vector][..., : sizes.rows, :].to(sizes.compute, copy=True).expand(*batch, -1, -1)
    length = sizes.rows if r.attrs[1] == "cols" else sizes.cols
    feature = r.args[2].feature
    tail = () if feature is None else (sizes.of(str(feature)),)
    out = torch.zeros(*batch, length, *tail, dtype=sizes.compute, device=sizes.device)
    for where in batching.iterate_outer(batch):
        part = {e: v[where] if isinstance(v, Tensor) else v for e, v in values.items()}
        run_pick(r, part, sizes, batch[-1], out[where], elements)
    return out
