"""A fold, prepared: its gathers and launches on tensors of given types, shapes, strides and alignment.

A fold becomes one kernel per direction, or several where its accumulators do not fit in registers together; labels that
no kernel needs are gathered by torch. :class:`PreparedFold` is made once and called many times: :func:`prepare` finds
it, or makes it of one for other lengths. :func:`record` runs the steps of a whole program once, and says which launches
repeat them (``launch/replay.py``).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....plan import schedule, settings
from ....program.constructors import ONE
from ....program.expression import Expr
from ....program.lower import Fold
from ....reductions import kind_of, outputs_of
from ...common import bounded_cache, evaluate
from ...common.bounded_cache import BoundedCache
from ...common.evaluate import Allocator, Sizes, describe_leaves, result_form
from ...common.label_gather import run_pick
from ...common.torch_code import BatchArithmetic, Elementwise, Step, batch_index
from ..codegen.kernel_spec import TINY, WIDEST, Unsupported, pad_width
from ..launch import driver
from ..launch.driver import compile_ahead, is_collecting, is_loaded, write_text
from ..launch.replay import NumberArithmetic, ProgramLaunch, Recipe, RecordedLaunches, TorchCall
from ..schedules import spec_from_tensors
from ..schedules.kernel_plan import find_overriding_plan, overriding_plans, use_plan
from . import elementwise, fold_kernel, pick, topk
from .fold_kernel import FoldLaunch, Layouts, Leaves, ResultLayout, describe_numbers
from .histogram import Bands, DiagonalLaunch, HistogramLaunch, SummedPlaces, rewrite_bands, rewrite_sums
from .joint_launch import JointLaunch
from .small_kernels import CombiningLaunch


def check_device(device: torch.device) -> None:
    """Raise Unsupported where no kernels run."""
    if not settings.has_triton():
        raise Unsupported("Triton is not installed")
    if device.type == "cpu" and not settings.interprets_kernels():
        raise Unsupported("the tensors are on a CPU (TRITON_INTERPRET=1 runs kernels there)")


class PreparedFold:
    """A fold on tensors like the given ones: labels to gather, launches, and the order of their results.

    Raises Unsupported where a fold has no kernel."""

    def __init__(self, fold: Fold, leaves: list[Any], sizes: Sizes, prepares_tables: bool = True):
        """``prepares_tables``: tables that pairs look up may be put in order before a launch."""
        check_device(sizes.device)
        if fold.domain is not None:
            raise Unsupported("pairs are listed (kernels/listed_fold.py)")
        if any(e.is_pair and e.dtype == "float" for e in fold.leaves):  # it may have a gradient, which tiles write
            raise Unsupported("an argument is given per pair")
        self.fold, self.given_sizes = fold, sizes  # the fold is held, so that its id stays its own
        self.prepared_tables: list[Bands | SummedPlaces] = []
        self.without_tables: PreparedFold | None = None  # for numbers by which some index lies outside of its table
        pairs = math.prod(sizes.batch) * sizes.rows * sizes.cols
        if prepares_tables and fold.tables and pairs >= spec_from_tensors.MANY:  # it takes a few launches
            for rewrite in (rewrite_bands, rewrite_sums):
                inner, prepared = rewrite(fold, leaves, sizes)
                if prepared is not None:
                    self.prepared_tables.append(prepared)
                    fold, sizes, leaves = inner, prepared.sizes, prepared(leaves) or leaves
        self.inner, self.sizes = fold, sizes
        values, self.batch, layouts, _ = merge_batches(fold, leaves, sizes)
        self.picks, kernels = list_kernels(fold, sizes)
        folds = {over: [part for o, part in kernels if o == over] for over, _ in kernels}
        made = (prepare_launches(over, parts, values, self.batch, sizes, layouts) for over, parts in folds.items())
        self.launches = [one for launches in made for one in launches]
        histograms = list_histograms(fold)
        rewritten = bool(histograms or self.prepared_tables)
        rewritten = rewritten or any(e.is_stored for e in fold.leaves)  # what they are widened to follows free memory
        single = all(len(parts) == 1 for parts in folds.values())
        self.by_direction = None if rewritten or not single else self.launches  # one each, before they are joined
        self._join_directions(values, layouts)
        for one in histograms:
            if not self._join_histogram(one, values, layouts):
                self.launches.append(HistogramLaunch(one, values, self.batch, sizes, layouts))
        self.order, self.was_run = self._find_order(), False

    def _find_order(self) -> list[int]:
        """Per result of the fold, its place among those of picks and launches."""
        found = [(r, 0) for r in self.picks] + [o for one in self.launches for o in one.returned_outputs]
        return [found.index(o) for o in self.inner.outputs]

    def at_lengths(self, leaves: Sequence[Any], sizes: Sizes) -> PreparedFold | None:
        """This fold prepared for leaves of other lengths, as a new one would be; None where more may be different."""
        if self.by_direction is None or self.fold.tables:
            return None
        values, batch, layouts, _ = merge_batches(self.fold, leaves, sizes)
        found = [one.at_lengths(values, batch, sizes, layouts) for one in self.by_direction]
        if batch != self.batch or None in found:
            return None
        other = object.__new__(PreparedFold)  # a copy
        other.__dict__.update(self.__dict__)
        other.given_sizes = other.sizes = sizes
        other.by_direction = other.launches = [one for one in found if one is not None]
        other._join_directions(values, layouts)
        other.order = other._find_order()  # joined launches have their results in another order
        return other

    def _join_directions(self, values: Leaves, layouts: Layouts) -> None:
        """Let one kernel make the sums over rows and over columns, where there is one that gains by it."""
        if [type(one) for one in self.launches] != [FoldLaunch] * 2 or self.picks or self.prepared_tables:
            return
        with contextlib.suppress(Unsupported):
            other, own = self.launches
            if (other.over, own.over) == ("cols", "rows"):
                self.launches = [JointLaunch(own, other, values, layouts)]

    def _join_histogram(self, histogram: Fold, values: Leaves, layouts: Layouts) -> bool:
        """Let the kernel of a gradient of rows add up a histogram too, where it is one that can."""
        for k, one in enumerate(self.launches):
            if type(one) is not FoldLaunch or one.over != "cols" or not one.kernel.hand_scheduled:
                continue
            with contextlib.suppress(Unsupported):
                (r,) = histogram.reductions
                self.launches[k] = DiagonalLaunch(one.fold, r, values, self.batch, self.sizes, layouts)
                return True
        return False

    def extend(self, leaves: Sequence[Any]) -> Sequence[Any] | None:
        """The leaves of ``inner``, the fold that is launched; None where an index lies outside of its table."""
        found: Sequence[Any] | None = leaves
        for one in self.prepared_tables:
            found = None if found is None else one(found)
        return found

    def __call__(self, leaves: Sequence[Any]) -> list[Tensor]:
        extended = self.extend(leaves)
        if extended is None:
            plain = self.without_tables or PreparedFold(self.fold, [*leaves], self.given_sizes, prepares_tables=False)
            self.without_tables = plain
            return plain(leaves)
        leaves = extended
        views = _Lazy(lambda: merge_batches(self.inner, leaves, self.sizes)[0])
        found: list[Tensor] = []
        known: dict[tuple[int, ...], pick.Pairs] = {}
        for r in self.picks:
            picked = gather_labels(r, views(), self.batch, self.sizes, raised=self.inner.raised, known=known)
            found.append(picked.view(*self.sizes.batch, *picked.shape[len(self.batch) :]))
        if not (self.was_run or is_collecting()):
            self.was_run = True
            if not all(one.relaunch is not None or is_loaded(one.kernel.text) for one in self.launches):
                compile_ahead(self.sizes.device, lambda: [one(leaves, views) for one in self.launches])
        for one in self.launches:
            found += one(leaves, views)
        return [found[k] for k in self.order]

    @property
    def is_repeatable(self) -> bool:
        """True when nothing but launches is done: no labels are gathered, no tables prepared, no leaves converted."""
        return not (self.picks or self.prepared_tables) and all(one.is_repeatable for one in self.launches)

    def compile(self, leaves: Sequence[Any], needed: bool = True) -> list[Tensor]:
        """Results in their form, of launches that are compiled: not run, where all of them were before, and then
        nothing unless ``needed``."""
        if False in [one.is_compiled for one in self.launches]:
            return self(leaves)
        made = [allocate() for one in self.launches for allocate in one.allocators] if needed else []
        return [made[k] for k in self.order] if needed else []

    def recipes(self, leaves: Sequence[Any]) -> list[StepLaunches] | None:
        """How a replay makes the launches again, once they are compiled, and which results each writes; None where it
        cannot."""
        if not self.is_repeatable:
            return None
        found, first = [], 0
        for one in self.launches:
            count, recipe = len(one.returned_outputs), one.recipe() if one.grid else None
            combining, shifts = one.list_combining_launches(), one.list_shift_recipes(leaves)
            if recipe is None or combining is None or shifts is None:
                return None
            results = [self.order.index(first + k) for k in range(count)]
            found.append(StepLaunches(recipe, results, combining, shifts, one.make_sum_recipe()))
            first += count
        return found


def list_histograms(fold: Fold) -> list[Fold]:
    """The histograms of a fold, each as a fold of its own."""
    found = ((r, tuple(g for g in fold.gradients if g[0] is r)) for r in fold.reductions if kind_of(r).both_axes)
    return [replace(fold, reductions=(r,), scales=(), gradients=gradients) for r, gradients in found]


class FoldSavingResults:
    """A fold that returns some results and saves the others for the backward pass, in one allocation.

    ``ready``: a :class:`PreparedFold`, or a ``ListedFold`` in its form; ``returned``: the places of the results that
    are returned."""

    def __init__(self, ready: Any, returned: tuple[int, ...]):
        self.ready, self.returned = ready, returned
        self.saved = tuple(k for k in range(len(ready.order)) if k not in returned)
        self.launch = self._find_launch()

    def _find_launch(self) -> FoldLaunch | None:
        """The only launch, if its outputs are the results as they are and those that are saved can share an
        allocation."""
        ready = self.ready
        if len(ready.launches) != 1 or ready.picks or ready.prepared_tables or len(self.saved) < 2:
            return None
        one = ready.launches[0]
        if one.combines:
            return None
        forms = {one.outputs[k] for k in self.saved}
        strided = any(one.strides[k] is not None for k in self.saved)
        if len(forms) > 1 or one.spec.split or one.topk_places or not one.grid or strided:
            return None
        ((shape, dtype),) = forms
        self.step = torch.Size(shape).numel() * dtype.itemsize
        self.allocate_saved = Allocator(((len(self.saved), *shape), dtype), ready.sizes.device)
        return None if self.step % 16 else one

    def __call__(self, leaves: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
        """The results that are returned, and the others: a list, or one tensor that holds them one after the other."""
        one = self.launch
        if one is None or one.relaunch is None:
            found = self.ready(leaves)
            return [found[k] for k in self.returned], [found[k] for k in self.saved]
        returned, saved = [one.allocators[k]() for k in self.returned], self.allocate_saved()
        addresses: list[Any] = [None] * len(one.outputs)
        for k, t in zip(self.returned, returned, strict=True):
            addresses[k] = t.data_ptr()
        start = saved.data_ptr()
        for n, k in enumerate(self.saved):
            addresses[k] = start + n * self.step
        one.launch_into(addresses, leaves, _Lazy(lambda: merge_batches(self.ready.fold, leaves, self.ready.sizes)[0]))
        return returned, [saved]


class _Lazy:
    """A value computed when it is first needed; cheaper to create in every call than ``functools.cache``."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], Any]):
        self._make, self._made = make, None

    def __call__(self) -> Any:
        if self._made is None:
            self._made = self._make()
        return self._made


def merge_batches(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes, others: Sequence[Sequence[int]] = ()
) -> tuple[dict[Expr, Any], tuple[int, ...], dict[tuple[Expr, int], ResultLayout], list[tuple[int, ...]]]:
    """The leaves of a fold, tensors with as few batch dimensions as their strides allow; these dimensions; and how
    those results are laid out that are not contiguous, or may be summed over the batch.

    ``others``: the strides of the batch dimensions of other tensors; they come last, merged."""
    found: dict[tuple[Expr, int], tuple[tuple[int, ...], tuple[int, ...] | None, bool]] = {}
    for r, k in fold.outputs:
        batch, model = evaluate.summed_batch(fold, r, leaves, sizes), evaluate.find_model(fold, r, k, leaves)
        if model is None and batch == sizes.batch:
            continue
        shape, _ = result_form(r, k, sizes, batch)
        strides = evaluate.find_strides(shape, model)
        if strides is not None or batch != sizes.batch:
            found[r, k] = shape, strides, batch != sizes.batch
    rank = len(sizes.batch)
    wanted = [
        [
            0 if own == 1 < n else s
            for n, own, s in zip(sizes.batch, shape, _drop_broadcast_dims(shape, strides), strict=False)
        ]
        for shape, strides, _ in found.values()
    ]
    given = [e for e, v in zip(fold.leaves, leaves, strict=True) if isinstance(v, Tensor)]
    tensors = [v for v in leaves if isinstance(v, Tensor)]
    merged, views, steps = evaluate.merge_batch_dims(sizes.batch, tensors, [*wanted, *others])
    layouts = {
        key: ResultLayout(shape, strides, summed, (*own, _drop_broadcast_dims(shape, strides)[rank]))
        for (key, (shape, strides, summed)), own in zip(found.items(), steps, strict=False)
    }
    values = dict(zip(fold.leaves, leaves, strict=True)) | dict(zip(given, views, strict=True))
    return values, merged, layouts, steps[len(found) :]


def _drop_broadcast_dims(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> tuple[int, ...]:
    return strides or tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def prepare_launches(
    over: str, folds: Sequence[Fold], values: Leaves, batch: tuple[int, ...], sizes: Sizes, layouts: Layouts
) -> list[FoldLaunch]:
    """The launches of one direction.

    Several kernels have a tile each, while a plan names one: if it is the default tile of the last kernel, as
    ``list_tiles`` shows it, all keep their defaults, with as many splits as the plan says."""
    if len(folds) > 1 and (one := _share_one_launch(over, folds, values, batch, sizes, layouts)) is not None:
        return [one]

    def make() -> list[FoldLaunch]:
        return [FoldLaunch(fold, over, values, batch, sizes, layouts) for fold in folds]

    asked = find_overriding_plan(over)
    if asked is None or len(folds) == 1:
        return make()
    with use_plan({}):
        found = make()
    if replace(found[-1].plan, splits=asked.splits) != asked:
        return make()
    for one in found:
        if one.plan.splits != asked.splits:
            one.prepare(values, replace(one.plan, splits=asked.splits))
    return found


def _share_one_launch(
    over: str, folds: Sequence[Fold], values: Leaves, batch: tuple[int, ...], sizes: Sizes, layouts: Layouts
) -> FoldLaunch | None:
    """One launch in place of several, where two consumer warp groups can divide the accumulators."""
    if not driver.runs_warp_specialized(sizes.device):
        return None
    scaled = [pair for fold in folds for pair in fold.scaled]
    whole = replace(folds[0], reductions=tuple(r for r, _ in scaled), scales=tuple(s for _, s in scaled))
    one = FoldLaunch(whole, over, values, batch, sizes, layouts)
    return one if one.kernel.hand_scheduled else None


def list_kernels(fold: Fold, sizes: Sizes) -> tuple[list[Expr], list[tuple[str, Fold]]]:
    """In the order in which they run: labels that are gathered, then the fold of each kernel with its direction."""
    widens = any(spec_from_tensors.pays_widening(e, "cols", fold.leaves, sizes) for e in fold.leaves if e.is_stored)
    found = _split_directions(fold, widens)
    return [r for *_, picks in found for r in picks], [
        (o, f) for o, part, _ in found for f in _fit_registers(part, sizes)
    ]


def _fit_registers(fold: Fold, sizes: Sizes) -> list[Fold]:
    """A fold as one kernel, or as several where its accumulators do not fit in registers together: recomputing pairs
    costs less than accumulators in memory."""
    parts: list[list[tuple[Expr, Expr]]] = []
    held = WIDEST
    for r, scale in fold.scaled:
        shapes = [feature for feature, _ in outputs_of(r) if feature is not None]
        width = sum(pad_width(sizes.of(str(f))) for f in shapes if sizes.of(str(f)) > TINY)
        if not parts or (width and held + width > WIDEST):
            parts.append([])
            held = 0
        parts[-1].append((r, scale))
        held += width
    return [replace(fold, reductions=tuple(r for r, _ in part), scales=tuple(s for _, s in part)) for part in parts]


@functools.lru_cache(maxsize=1024)
def _split_directions(fold: Fold, widens: bool = False) -> tuple[tuple[str, Fold, tuple[Expr, ...]], ...]:
    """Per direction: the fold of its kernels, and the labels (picks) that are gathered without one; with ``widens``,
    where columns are widened before the launch, all labels: beside scales, their kernel has no registers for them."""
    found = []
    for over in ("cols", "rows"):
        mine = {r: s for r, s in fold.scaled if r.attrs[1] == over}
        whole = Fold(fold.leaves, tuple(mine))
        labels = [r for r in mine if widens and r.attrs[0] == "pick" and r.attrs[2] == ("col",)]
        picks = tuple(r for r in mine if r in labels or not kind_of(r).walks(r, whole.reductions))
        kept = {r: s for r, s in mine.items() if r not in picks}
        found.append((over, replace(fold, reductions=tuple(kept), scales=tuple(kept.values())), picks))
    return tuple(found)


def gather_labels(
    r: Expr,
    values: dict[Expr, Any],
    batch: tuple[int, ...],
    sizes: Sizes,
    elements: int = schedule.ELEMENTS,
    raised: bool = True,
    known: dict[tuple[int, ...], pick.Pairs] | None = None,
) -> Tensor:
    """A pick by kernels, or by torch's gather in chunks of ``elements``; where each row names its own column, by a
    copy. ``raised``: vectors in float32, whatever was given; ``known``: what other picks of these values found."""
    target, value, vector = r.args
    own = (r.attrs[1], target.op, vector.op) == ("cols", "row_index", "leaf") and vector.feature is not None
    if own and value is ONE and sizes.rows <= sizes.cols:
        return values[vector][..., : sizes.rows, :].to(sizes.compute, copy=True).expand(*batch, -1, -1)
    if pick.has_kernel(r, sizes):
        known, found = {} if known is None else known, []
        for where in evaluate.iterate_outer(batch):
            pairs = known.get(where)
            if pairs is None:
                pairs = known[where] = pick.Pairs(_take_chunk(values, where), sizes, batch[-1])
            found.append(pick.run(r, pairs, raised))
        return found[0] if len(batch) == 1 else torch.stack(found).view(*batch, *found[0].shape[1:])
    length = sizes.rows if r.attrs[1] == "cols" else sizes.cols
    ((feature, _),) = outputs_of(r)
    tail = () if feature is None else (sizes.of(str(feature)),)
    out = torch.zeros(*batch, length, *tail, dtype=sizes.compute, device=sizes.device)
    for where in evaluate.iterate_outer(batch):
        run_pick(r, _take_chunk(values, where), sizes, batch[-1], out[where], elements)
    return out


def _take_chunk(values: dict[Expr, Any], where: tuple[int, ...]) -> dict[Expr, Any]:
    """The leaves of one index into the looped batch dimensions."""
    return {e: v[where] if isinstance(v, Tensor) else v for e, v in values.items()}


# The cache of prepared folds

_MOST = 4096
_PREPARED: dict[tuple, PreparedFold] = {}
# The last fold prepared for some lengths, by all else that folds are prepared for
_OTHER_LENGTHS: BoundedCache[tuple, tuple[dict, PreparedFold]] = BoundedCache(1024)


def prepared_folds() -> dict[tuple, PreparedFold]:
    """The cache; another object after it was cleared by replacing it."""
    return _PREPARED


def prepare(fold: Fold, leaves: list[Any], sizes: Sizes) -> PreparedFold | None:
    """A fold prepared for leaves like these; None where it has no kernel."""
    try:
        return prepare_or_refuse(fold, leaves, sizes)
    except Unsupported:
        return None


def prepare_or_refuse(fold: Fold, leaves: list[Any], sizes: Sizes) -> PreparedFold:
    """The same; raises Unsupported, which says why, where it has no kernel."""
    if fold.domain is not None:
        raise Unsupported("lists of columns have kernels of their own")
    asked = (
        id(fold),
        sizes.batch,
        sizes.compute,
        sizes.device,
        evaluate.float32_precision(),
        settings.requested_budget() is None,
        overriding_plans(),
        spec_from_tensors.like.get(),
        *describe_numbers([v for v in leaves if not isinstance(v, Tensor)]),
    )
    key = (*asked, sizes.rows, sizes.cols, describe_leaves(leaves))
    store = _PREPARED
    found = store.get(key)
    if found is None:
        kinds = [spec_from_tensors.describe_leaf(e, v) for e, v in zip(fold.leaves, leaves, strict=True)]
        kinds += [spec_from_tensors.list_thresholds(over, sizes.batch, sizes) for over in ("cols", "rows")]
        alike = (id(store), *asked, *sizes.letters.values(), *kinds)
        other = _OTHER_LENGTHS.find(alike)
        found = None if other is None else other[1].at_lengths(leaves, sizes)
        found = store[key] = PreparedFold(fold, leaves, sizes) if found is None else found
        _OTHER_LENGTHS.keep(alike, (store, found))  # the store is held, so that its id stays its own
        while len(store) > _MOST:
            del store[next(iter(store))]
    return found


def list_tiles(fold: Fold, leaves: list[Any], sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """The tiles that the kernels of a fold would take, by direction; nothing where there is nothing to choose."""
    folds = topk.list_panel_folds(fold) if selects_from_panels(fold) else [fold]
    every = [prepare(one, leaves, sizes) for one in folds]
    found = {over: plan for ready in every if ready for one in ready.launches for over, plan in one.plans.items()}
    if None in every:
        return {}
    return {
        o: (p.block_kept, p.block_folded, p.num_warps, p.num_stages, p.splits, int(p.rendering))
        for o, p in found.items()
    }


def selects_from_panels(fold: Fold) -> bool:
    """True where a fold has a top-k whose list does not fit in registers: ``topk.py`` runs its parts."""
    return any(r.attrs[0] == "topk" for r in fold.reductions) and topk.selects_from_panels(fold)


def list_sources(fold: Fold) -> list[Path]:
    """The files of the kernels that were generated for a fold so far."""
    made = [one for ready in _PREPARED.values() if ready.fold is fold for one in ready.launches]
    return list(dict.fromkeys(write_text(one.kernel.text) for one in made))


# The launches of a program's steps


class ExtraLaunch(NamedTuple):
    """A launch beside that of a step. It writes to some of the step's results (their number among those of
    :class:`StepLaunches`) or to memory of its own (a name), and has memory of others after the step's leaves."""

    recipe: Recipe
    written: tuple[int | str, ...]
    read: tuple[str, ...] = ()


class StepLaunches(NamedTuple):
    """How a replay repeats a launch, and all launches around it."""

    recipe: Recipe
    results: Sequence[int]  # of the step, that it writes
    combining: Sequence[CombiningLaunch] = ()  # launches that combine the partial results of splits
    shifts: Sequence[Recipe] = ()  # launches before it, each of which computes one more leaf
    buffer: Recipe | None = None  # makes the memory in which the launch adds up its last result: its last leaf
    before: Sequence[ExtraLaunch] = ()  # that write to the same results
    after: Sequence[ExtraLaunch] = ()

    def list_launches(self, feeds: tuple[str | float, ...], names: Sequence[str]) -> Iterator[ProgramLaunch]:
        """These launches in a program, where the step's leaves and results are called so."""
        whole = tuple(names[k] for k in self.results)
        written = {k for one in self.combining for k in one.written}
        parts = tuple(f"{name}_parts" if k in written else name for k, name in enumerate(whole))
        last = parts[-1:] if self.buffer is not None else ()
        made = tuple(f"{whole[0]}_shift{k}" for k in range(len(self.shifts)))
        for name, recipe in zip(made, self.shifts, strict=True):
            yield ProgramLaunch(recipe, feeds, (name,))
        if self.buffer is not None:
            yield ProgramLaunch(self.buffer, feeds, last)

        def name_extra(one: ExtraLaunch) -> ProgramLaunch:
            read, written = (
                tuple(whole[k] if isinstance(k, int) else f"{whole[0]}_{k}" for k in names)
                for names in (one.read, one.written)
            )
            return ProgramLaunch(one.recipe, (*feeds, *read), written)

        yield from map(name_extra, self.before)
        yield ProgramLaunch(self.recipe, (*feeds, *made, *last), parts[: len(self.recipe.outputs)])
        yield from map(name_extra, self.after)
        for one in self.combining:
            yield ProgramLaunch(one.recipe, (*parts, *feeds), tuple(whole[k] for k in one.written))


# The results of a fold (perhaps nothing, for the last step), and its launches; None: something else is done
Folder = Callable[[Fold, list[Any], bool], tuple[Sequence[Tensor], Sequence[StepLaunches] | None]]


def record(
    steps: Sequence[Step],
    values: dict[str, Any],
    folder: Folder,
    sizes: Sizes,
    numbers: NumberArithmetic | None = None,
    total: bool = False,
    types: Mapping[str, torch.dtype] | None = None,
) -> RecordedLaunches | None:
    """The launches of steps on these inputs, which are run on the way; None where there is more to them.

    ``numbers``: the arithmetic of numbers among them; ``total``: the sums of the last step's results are asked for;
    ``types``: of vectors that arithmetic of one side returns in another type than its own."""
    if numbers is not None:
        values.update(zip(numbers.results, numbers(*(values[name] for name in numbers.names)), strict=True))
    if not driver.can_relaunch(sizes.device) or any(
        isinstance(v, int) and abs(v) >= fold_kernel.SMALL for v in values.values()
    ):
        return None  # (other integers of the same kind may be larger than kernels take)
    found: list[ProgramLaunch] = []
    calls: list[TorchCall] = []
    given = set(values)
    constants: dict[str, Tensor] = {}
    called: tuple[str, ...] = ()
    for n, step in enumerate(steps):
        if isinstance(step.what, Expr):
            if step.what.op == "batch_index":
                if sizes.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                    return None  # what is constants must not lie in a graph's memory
                parts = ("batch_index", sizes.batch, sizes.device)
                same = bounded_cache.compute_once(parts, functools.partial(batch_index, sizes), sizes.device)
                constants[str(step.results[0])] = values[str(step.results[0])] = same
            continue
        leaves = [values[name] if isinstance(name, str) else name for name in step.feeds]
        if isinstance(step.what, BatchArithmetic):
            if not given.issuperset(name for name in step.feeds if isinstance(name, str)):
                return None  # of what is made on the way addresses alone are known
            run, name = functools.partial(step.what.run, sizes), str(step.results[0])
            values[name] = run(*leaves)
            calls.append(TorchCall(run, step.feeds, name))
            continue
        names = tuple(name or f"r{n}_{k}" for k, name in enumerate(step.results))
        if isinstance(step.what, Fold):
            called = names
            results, launches = folder(step.what, leaves, step is steps[-1])
        else:
            asked = {k: (types or {})[name] for k, name in enumerate(names) if name in (types or {})}
            results, launches = _compute_side(step.what, leaves, sizes, total and step is steps[-1], asked)
        if not launches and not (results and is_collecting()):
            return None
        for one in launches or ():
            found += one.list_launches(step.feeds, names)
        values.update(zip(names, results, strict=False))
    recorded = RecordedLaunches(found, called, numbers, constants, calls)
    return recorded if recorded.read_by_host <= given else None  # of what is made on the way addresses alone are known


def _compute_side(
    side: Elementwise, leaves: list[Any], sizes: Sizes, total: bool, types: Mapping[int, torch.dtype]
) -> tuple[Sequence[Tensor], Sequence[StepLaunches] | None]:
    try:
        one = elementwise.ElementwiseLaunch(side, leaves, sizes, total, types)
    except Unsupported:
        return [], None
    results, recipe = one(leaves), one.recipe()
    return results, None if recipe is None else [StepLaunches(recipe, range(len(side.outputs)))]
