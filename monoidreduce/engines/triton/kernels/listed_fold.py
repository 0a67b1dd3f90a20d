"""Folds over lists: each group of kept indices folds the blocks of the folded axis that its list names, in one kernel.

:func:`run_listed` is what the engine of lists asks before it gathers anything. In the kernels (``codegen/listed.py``) a
block of a list is read where it lies, through descriptors where it is whole, and the loop over a list is split where
groups are few or unequal. A fold that has no such kernel is answered with Unsupported, which says why.

**Gradients of columns that lie in pages** are a fold along the transposed table: page p folds the rows of every
sequence that owns it. The batch dimensions that the columns do not have (sequences, and query heads that share a key)
become part of the folded axis, so that what they add to a page is added in one program instance, in a fixed order.
Nothing of the pages is copied; rows are, where their memory order is another. Where a page stands in a sequence is one
number for each entry of the table, from which positions of columns are computed.

**Gradients of numbers that are given per pair**, over blocks: a kernel stores each listed pair's number where the
argument has it. A pair is written once, by the first of the entries that name it, with what the others add: all copies
of a pair have one number, but for what goes to the first of them alone. So nothing is added in memory, and there is one
order. Where the argument is broadcast along an axis, its gradient is a sum over that axis, as any other. Along batch
dimensions it is added up, one element after the other, so that nothing larger than the argument is held.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....program import constructors
from ....program.constructors import ONE, apply
from ....program.expression import Expr, const, index, node, reduce_node, size, topological
from ....program.lower import Fold
from ....reductions import FastForm, kind_of
from ....reductions.histogram import add_at
from ...common import bounded_cache, evaluate
from ...common.bounded_cache import BoundedCache
from ...common.combine import split
from ...common.evaluate import Sizes, restore_domain
from ...common.subproblem import add_unlisted, choose_leaves, find_named_pairs, keep_reductions
from ...common.torch_code import Elementwise
from ..codegen.kernel_spec import Unsupported
from ..launch import driver
from ..launch.replay import DescriptorOf, FoundAtLaunch, Leaf, Recipe
from ..schedules.kernel_plan import overriding_plans
from . import listed_launch, topk
from .elementwise import ElementwiseLaunch
from .fold_kernel import Leaves, describe_numbers, describe_tensor
from .listed_launch import (
    COPIED,
    FIRST,
    LISTS,
    UNEVEN_WAVES,
    ListedHistogram,
    ListedLaunch,
    ListForm,
    Lists,
    ListWork,
    LocalFold,
    LongLists,
    direction_of,
    localize,
    make_lists,
    read_lists,
)
from .prepared_fold import ExtraLaunch, StepLaunches, check_device, list_histograms, list_kernels, merge_batches


class PreparedListedFold:
    """A fold over lists on tensors like the given ones: its launches, and the order of their results."""

    def __init__(
        self, fold: Fold, leaves: Sequence[Any], sizes: Sizes, lists: Callable[[str], Lists], entries: int = 0
    ):
        """``entries``: of a batch element's lists, where there are numbers for each."""
        self.fold, self.sizes = fold, sizes
        _check(fold, lists, sizes)
        self.launches: list[ListedLaunch] = []
        self.long: list[LongLists | None] = []  # what folds the long lists of each
        tables = [("cols", one) for one in list_histograms(fold)]
        for over, part in [*list_kernels(fold, sizes)[1], *tables]:
            own = lists(over)
            shape = _find_strides(own.batch, sizes.batch)
            values, batch, layouts, (steps,) = merge_batches(fold, leaves, sizes, (shape,))
            used = {*topological([*part.reductions, *part.scales])}
            small = replace(part, leaves=tuple(e for e in part.leaves if e in used))
            values = {e: values[e] for e in small.leaves}
            window = _choose_window(small, own.form, sizes)
            work = ListWork(own.form, steps, entries, window)
            make = ListedHistogram if (over, part) in tables else ListedLaunch
            one = make(small, values, batch, sizes, {} if window else layouts, work)
            self.launches.append(one)
            is_split = one.spec.listing.window
            self.long.append(_split_long_lists(one, values, batch, sizes, own) if is_split else None)
        found = [o for one in self.launches for o in one.fold.outputs]
        self.order = [found.index(o) for o in fold.outputs]

    def __call__(self, leaves: Sequence[Any], lists: Callable[[str], Lists]) -> list[Tensor]:
        given = dict(zip(self.fold.leaves, leaves, strict=True))
        found: list[Tensor] = []
        for one, long in zip(self.launches, self.long, strict=True):
            own, mine = lists(one.over), [given[e] for e in one.fold.leaves]
            tensors = own.tensors(one.spec.listing.entries)
            merged = functools.partial(self._merge_leaves, one, leaves, own, tensors)
            rest = functools.partial(long, leaves=mine, lists=tensors, merged=merged) if long is not None else None
            results = one([*mine, *tensors], merged, rest)
            found += [_sum_broadcast(t, r, given) for (r, _), t in zip(one.fold.outputs, results, strict=True)]
        return [found[k] for k in self.order]

    def recipes(
        self, leaves: Sequence[Any], places: Sequence[int], found: Callable[[ListedLaunch], FoundAtLaunch]
    ) -> list[StepLaunches] | None:
        """How a replay makes the launches again; None where it cannot. ``leaves``: of a call; ``places``: of those of
        this fold among them."""
        made, first = [], 0
        at = dict(zip(self.fold.leaves, places, strict=True))
        for one, long in zip(self.launches, self.long, strict=True):
            own = [at[e] for e in one.fold.leaves]
            numbers = [k for k, (r, _) in enumerate(one.fold.outputs) if kind_of(r).per_pair]
            of = ((one.outputs[k][0], one.fold.outputs[k][0].args[1:]) for k in numbers)  # shape, and argument if any
            if any(like and tuple(leaves[at[like[0]]].shape) != tuple(shape) for shape, like in of):
                return None  # an argument that is broadcast
            recipe = one.recipe_over(own, found(one)) if one.grid else None
            joined, after = (
                one.list_combining_launches(),
                [] if long is None else long.recipes(one.outputs, own, len(leaves), found),
            )
            if recipe is None or joined is None or after is None:
                return None
            before = [(one.clear_recipe(k), k) for k in numbers]
            count = len(one.outputs)
            results = [self.order.index(first + k) for k in range(count)]
            beside = [ExtraLaunch(clear, (k,)) for clear, k in before if clear is not None]
            if len(beside) < len(before):
                return None
            made.append(StepLaunches(recipe, results, joined, before=beside, after=after))
            first += count
        return made

    def _merge_leaves(
        self, one: ListedLaunch, leaves: Sequence[Any], lists: Lists, tensors: tuple[Tensor, ...]
    ) -> dict[Expr, Any]:
        """The leaves of a launch with merged batch dimensions, and the tensors of the lists."""
        strides = _find_strides(lists.batch, self.sizes.batch)
        values, *_ = merge_batches(self.fold, leaves, self.sizes, (strides,))
        return {**{e: values[e] for e in one.fold.leaves}, LISTS: tensors}


def _sum_broadcast(result: Tensor, r: Expr, given: Leaves) -> Tensor:
    """Numbers of entries ``[*batch, entries]`` in the shape of the argument that they are the gradient of."""
    if not kind_of(r).per_pair or len(r.args) < 2:
        return result
    like = given[r.args[1]].shape
    extra = result.dim() - len(like)
    dims = [d for d, n in enumerate(result.shape) if n != 1 and (d < extra or like[d - extra] == 1)]
    return (result.sum(dims, keepdim=True) if dims else result).view(like)


def _choose_window(fold: Fold, lists: ListForm, sizes: Sizes) -> int:
    """Entries of a window by which long lists are split; 0 where none is, or where all lists are split alike."""
    count, each = math.prod(sizes.batch), max(math.prod(lists.batch), 1)
    if (lists.kept_block, lists.folded_block) != (1, 1) or lists.ends:
        return 0
    if lists.lists // each * count < UNEVEN_WAVES * driver.count_processors(sizes.device):
        return 0
    return listed_launch.window_size(fold, lists.average, lists.items // each)


def _split_long_lists(
    one: ListedLaunch, values: Leaves, batch: tuple[int, ...], sizes: Sizes, lists: Lists
) -> LongLists:
    fold, work = replace(one.fold, raised=True, gradients=()), one.work
    windows = ListedLaunch(fold, values, batch, sizes, {}, replace(work, role="windows"))

    def make(joined: Fold, parts: list[Tensor], among: Sizes, numbers: int) -> ListedLaunch:
        strides = _find_strides(lists.batch, sizes.batch)
        values, batch, _, (steps,) = merge_batches(joined, parts, among, (strides,))
        combining = replace(work, steps=steps, entries=0, role="combine", numbers=numbers)
        return ListedLaunch(joined, values, batch, among, {}, combining)

    return LongLists(one.fold, one.over, sizes, windows, make)


def _check(fold: Fold, lists: Callable[[str], Lists], sizes: Sizes) -> None:
    """Raise Unsupported for what kernels over lists cannot fold."""
    for r in fold.reductions:
        name, over = r.attrs[0], direction_of(r)
        own, folded = lists(over), sizes.cols if over == "cols" else sizes.rows
        cut = own.ends is not None or folded % own.folded_block
        if (FastForm.LISTS | FastForm.CUT_LISTS if cut else FastForm.LISTS) not in kind_of(r).fast_forms:
            raise Unsupported(f"{name} has no kernel over these lists")
        vectors = [a for a in r.args if a.feature is not None and a not in fold.tables]
        if kind_of(r).vector_lines is None and any(not (a.cols if over == "cols" else a.rows) for a in vectors):
            raise Unsupported("a vector does not vary along the folded axis")


def _find_strides(own: tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, ...]:
    """How many lists further each dimension of the call's batch leads; 0 where lists are shared."""
    own = (1,) * (len(batch) - len(own)) + own
    steps = [math.prod(own[k + 1 :]) for k in range(len(own))]
    return tuple(0 if n == 1 else s for n, s in zip(own, steps, strict=True))


_PREPARED: BoundedCache[tuple, PreparedListedFold | str] = BoundedCache(1024)  # or why there is none


def run_listed(fold: Fold, leaves: Sequence[Any], sizes: Sizes, gather: topk.Run | None = None) -> list[Tensor]:
    """Run a fold over the pairs that its domain lists in kernels that walk the lists; raises Unsupported where it has
    none. ``gather``: runs a fold by gathering pieces of lists, which is faster for many best.

    ``leaves``: ``[*batch, M or N(, f)]``; numbers per edge ``[*batch, edges]``."""
    if any(map(topk.is_large, fold.reductions)):
        select = functools.partial(topk.select_listed, gather=gather)
        return topk.run_large(fold, [*leaves], sizes, run_listed, select)
    if places := find_pair_gradients(fold):
        return run_pair_gradients(fold, leaves, sizes, places, run_listed, _run_lists)
    if find_page_gradients(fold):
        return _prepare_pages(fold, leaves, sizes)(leaves)
    return _run_lists(fold, leaves, sizes)


def _run_lists(fold: Fold, leaves: Sequence[Any], sizes: Sizes, at: Sequence[int | None] = ()) -> list[Tensor]:
    """Run a fold by kernels along the lists as they are; ``at``: one element of some batch dimensions (None: all)."""
    given = _find_domain(fold, leaves)
    lists: Callable[[str], Lists] = functools.cache(functools.partial(_read_domain, fold, given, sizes))
    if at:
        leaves, sizes, lists = _choose_element(fold, leaves, sizes, lists, at)
    ready, mine = _prepare(fold, leaves, sizes, lists)
    return ready.run(mine, lists, given)


def _choose_element(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes, lists: Callable[[str], Lists], at: Sequence[int | None]
) -> tuple[list[Any], Sizes, Callable[[str], Lists]]:
    """The leaves, sizes and lists of one element of some batch dimensions; a domain's tensors as they are."""
    assert fold.domain is not None
    own: list[Any] = []
    for e, v in zip(fold.leaves, leaves, strict=True):
        if isinstance(v, Tensor) and e not in fold.domain.args:
            axes = 1 if e is COPIED else e.rows + e.cols + (e.feature is not None)
            v = v[(None,) * (len(at) + axes - v.dim())]
            for d, k in enumerate(at):
                v = v.narrow(d, k, 1) if k is not None and v.shape[d] != 1 else v
        own.append(v)

    def read(over: str) -> Lists:
        found = lists(over)
        first = sum((k or 0) * s for k, s in zip(at, _find_strides(found.batch, sizes.batch), strict=True))
        groups = (len(found.offsets) - 1) // max(math.prod(found.batch), 1)
        return replace(found, offsets=found.offsets[first * groups :])

    batch = tuple(n if k is None else 1 for n, k in zip(sizes.batch, at, strict=True))
    return own, replace(sizes, batch=batch), functools.cache(read)


def prepare_listed(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> ListedFold | None:
    """A fold over lists prepared for leaves like these; None where it has no kernel."""
    with contextlib.suppress(Unsupported):
        return _prepare_listed(fold, leaves, sizes)
    return None


def _prepare_listed(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> ListedFold:
    if find_pair_gradients(fold):
        raise Unsupported("gradients of numbers per pair take several launches")
    if find_named_pairs(fold) is not None:
        raise Unsupported("pairs that are best in their lists are read at their places")
    if find_page_gradients(fold):
        return _prepare_pages(fold, leaves, sizes)
    lists = functools.partial(_read_domain, fold, _find_domain(fold, leaves), sizes)
    return _prepare(fold, leaves, sizes, lists)[0]


def _find_domain_places(fold: Fold) -> tuple[int, ...]:
    """The places of the domain's tensors among the leaves."""
    assert fold.domain is not None
    return tuple(fold.leaves.index(a) for a in fold.domain.args)


def _find_domain(fold: Fold, leaves: Sequence[Any]) -> list[Tensor]:
    return [leaves[k] for k in _find_domain_places(fold)]


def _read_domain(fold: Fold, tensors: Sequence[Tensor], sizes: Sizes, over: str) -> Lists:
    """The lists of one direction, made once for the same tensors."""
    assert fold.domain is not None
    (form,) = fold.domain.attrs
    parts = ("lists", form, over, sizes.rows, sizes.cols, *tensors)
    if over == "cols" and form[0] != "blocks":  # as they were given: nothing is computed
        return make_lists(form, tensors, sizes, over)
    return bounded_cache.compute_once(
        parts, lambda: make_lists(form, tensors, sizes, over).without_memory_of(tensors), sizes.device
    )


def _find_leaves(fold: Fold, local: LocalFold, leaves: Sequence[Any], sizes: Sizes) -> list[Any]:
    """The leaves of the fold that kernels run."""
    found = [leaves[k] for k in local.places]
    if local.once:
        assert fold.domain is not None
        (form,), tensors = fold.domain.attrs, _find_domain(fold, leaves)
        once = bounded_cache.compute_once(
            ("once", form, sizes.rows, sizes.cols, *tensors),
            lambda: restore_domain(form, tensors).first_of_equal(sizes.rows, sizes.cols),
            sizes.device,
        )
        found.append(once.view(*(1,) * len(sizes.batch), -1))
    return found


class ListedFold:
    """A fold over lists, prepared for leaves like some, in the form of a ``PreparedFold``: for replay."""

    picks: Sequence[Expr] = ()
    launches: Sequence[ListedLaunch] = ()  # none that is launched without lists

    def __init__(self, fold: Fold, sizes: Sizes, local: LocalFold, ready: PreparedListedFold):
        self.fold, self.sizes, self.local, self.ready = fold, sizes, local, ready
        self.order, self.asked = range(len(fold.outputs)), _find_domain_places(fold)
        self.found: dict[tuple[str, bool], tuple[Callable[..., tuple], bool]] = {}

    def __call__(self, leaves: Sequence[Any]) -> list[Tensor]:
        given = _find_domain(self.fold, leaves)
        read = functools.cache(lambda over: _read_domain(self.fold, given, self.sizes, over))
        return self.run(_find_leaves(self.fold, self.local, leaves, self.sizes), read, given)

    def run(self, leaves: Sequence[Any], lists: Callable[[str], Lists], given: Sequence[Tensor]) -> list[Tensor]:
        """The same of the leaves that kernels read, on the lists of each direction (``"cols"``, ``"rows"``), which are
        those of the domain's tensors ``given``."""
        found = [values for _, values in split(self.local.fold, self.ready(leaves, lists))]
        results: list[Tensor] = []
        for r, parts in zip(self.fold.reductions, self.local.parts, strict=True):
            mine = [found[k] for k in parts]
            results += mine[0] if len(mine) == 1 else [_count_entries(mine[0][0], mine[1][0], r, self.sizes)]
        return add_unlisted(self.fold, results, given, self.sizes)

    def recipes(self, leaves: Sequence[Any]) -> list[StepLaunches] | None:
        """How a replay makes the launches again; None where it cannot."""
        return self.recipes_among(leaves, range(len(leaves)))

    def recipes_among(self, leaves: Sequence[Any], places: Sequence[int]) -> list[StepLaunches] | None:
        """The same of a part of a call; ``places``: of this fold's leaves among those of the call."""
        given, asked = [leaves[places[k]] for k in self.asked], tuple(places[k] for k in self.asked)
        if self.local.once or any(len(parts) > 1 for parts in self.local.parts):
            return None
        if not all(t.is_contiguous() for t in given):  # copies would not live until a launch
            return None
        lists = functools.partial(self._find_lists, given, asked)
        return self.ready.recipes(leaves, [places[k] for k in self.local.places], lists)

    def _find_lists(self, given: Sequence[Tensor], asked: tuple[int, ...], one: ListedLaunch) -> FoundAtLaunch:
        key = one.over, one.spec.listing.entries
        if key not in self.found:  # one function for all launches along a list, which is called once for them
            self.found[key] = self._make_finder(given, *key)
        find, by_address = self.found[key]
        return FoundAtLaunch(asked, find, one.spec.listing.tensors, by_address)

    def _make_finder(self, given: Sequence[Tensor], over: str, entries: bool) -> tuple[Callable[..., tuple], bool]:
        """What finds the lists of one direction at a launch, for tensors like these; and whether it asks them for their
        addresses alone, whatever they hold: a table of pages is read as it is."""
        assert self.fold.domain is not None

        def find(*tensors: Tensor) -> tuple[Tensor, ...]:
            return _read_domain(self.fold, tensors, self.sizes, over).tensors(entries)

        if self.fold.domain.attrs[0][0] == "pages" and over == "cols" and not bounded_cache.is_capturing(given[0]):
            offsets, *rest = find(*given)
            if [t.data_ptr() for t in rest] == [t.data_ptr() for t in given]:
                return lambda *tensors: (offsets.data_ptr(), *[t.data_ptr() for t in tensors]), True
        return find, False


class PagedFold(ListedFold):
    """A fold over columns in pages with gradients of these, prepared for leaves like some: results of rows along the
    table, those of columns along the transposed one."""

    def __init__(
        self, fold: Fold, sizes: Sizes, by_row: ListedFold | None, by_col: PageGradients, ready: PreparedListedFold
    ):
        self.fold, self.sizes, self.by_row, self.by_col, self.ready = fold, sizes, by_row, by_col, ready
        self.order = range(len(fold.outputs))

    def __call__(self, leaves: Sequence[Any]) -> list[Tensor]:
        own = choose_leaves(self.fold, leaves, self.by_col.whole)
        lists = self.by_col.lists(own)
        found = self.by_col.restore_batch(self.ready(self.by_col.leaves(own), lambda _: lists))
        made = dict(zip(self.by_col.whole.outputs, found, strict=True))
        if self.by_row is not None:
            rows = self.by_row(choose_leaves(self.fold, leaves, self.by_row.fold))
            made |= dict(zip(self.by_row.fold.outputs, rows, strict=True))
        return [made[o] for o in self.fold.outputs]

    def recipes(self, leaves: Sequence[Any]) -> list[StepLaunches] | None:
        """How a replay makes the launches again; None where it cannot. Rows of all sequences are put in one order
        before those of columns."""
        at, by_col = lambda fold: [self.fold.leaves.index(e) for e in fold.leaves], self.by_col
        places = at(by_col.whole)
        own = [leaves[k] for k in places]
        asked = tuple(places[by_col.whole.leaves.index(a)] for a in by_col.whole.domain.args)  # type: ignore[union-attr]
        if not all(leaves[k].is_contiguous() for k in asked):
            return None
        fed = by_col.recipes(own, places, len(leaves))
        if fed is None:
            return None

        def find_lists(one: ListedLaunch) -> FoundAtLaunch:
            entries, count = one.spec.listing.entries, one.spec.listing.tensors
            return FoundAtLaunch(asked, lambda *tensors: by_col.transpose_table(tensors)[0].tensors(entries), count)

        of_columns = self.ready.recipes(leaves, range(len(fed[0])), find_lists)
        found = [] if self.by_row is None else self.by_row.recipes_among(leaves, at(self.by_row.fold))
        if of_columns is None or found is None or any(m.after or m.before for m in of_columns):
            return None
        outputs = self.fold.outputs.index
        found = [m._replace(results=[outputs(self.by_row.fold.outputs[k]) for k in m.results]) for m in found]  # type: ignore[union-attr]
        for m in of_columns:
            arguments = [
                fed[0][a.at] if isinstance(a, Leaf)
                else a._replace(at=fed[0][a.at].at) if isinstance(a, DescriptorOf)
                else a
                for a in m.recipe.arguments
            ]  # fmt: skip
            recipe = m.recipe._replace(arguments=tuple(arguments))
            joined = [one._replace(recipe=by_col.shape_recipe(one.recipe)) for one in m.combining]
            results = [outputs(by_col.whole.outputs[k]) for k in m.results]
            found.append(StepLaunches(recipe if joined else by_col.shape_recipe(recipe), results, joined, fed[1]))
        return found


def _prepare_pages(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> PagedFold:
    """A fold over pages some of whose reductions go over rows; raises Unsupported where it has no kernel."""
    check_device(sizes.device)
    places = find_page_gradients(fold)
    others = tuple(k for k in range(len(fold.reductions)) if k not in places)
    part = keep_reductions(fold, places)
    own = choose_leaves(fold, leaves, part)
    gradients = prepare_page_gradients(part, own, sizes)
    by_row: ListedFold | None = None
    if others:
        rest = keep_reductions(fold, others)
        by_row = _prepare_listed(rest, choose_leaves(fold, leaves, rest), sizes)
    read = {"rows": gradients.lists(own)}
    ready = _prepare_launches(gradients.fold, gradients.leaves(own), gradients.sizes, read, 0)
    return PagedFold(fold, sizes, by_row, gradients, ready)


def _prepare(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes, lists: Callable[[str], Lists]
) -> tuple[ListedFold, list[Any]]:
    """The fold as kernels run it, and the leaves that they read; raises Unsupported where it has none."""
    check_device(sizes.device)
    local = localize(fold)
    own = local.fold
    ways = dict.fromkeys(map(direction_of, own.reductions))
    read = {over: lists(over) for over in ways}
    if any(local.logical > one.logical for one in read.values()):
        raise Unsupported("positions in a sequence are read along its rows")
    mine = _find_leaves(fold, local, leaves, sizes)
    edges = fold.domain is not None and fold.domain.attrs[0][0] == "edges"
    numbered = any(e.is_pair and e is not FIRST for e in own.leaves) or any(kind_of(r).per_pair for r in own.reductions)
    entries = _find_domain(fold, leaves)[-1].shape[-1] if edges and numbered else 0
    ready = _prepare_launches(own, mine, sizes, read, entries)
    return ListedFold(fold, sizes, local, ready), mine


def _prepare_launches(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes, lists: Mapping[str, Lists], entries: int
) -> PreparedListedFold:
    """The launches of a fold on leaves like these, along the lists of each direction; raises Unsupported where it has
    no kernel."""
    key: tuple = (fold, sizes.rows, sizes.cols, sizes.batch, sizes.compute, sizes.device, evaluate.float32_precision())
    key += (overriding_plans(), entries, *(one.form for one in lists.values()))
    key += tuple([describe_tensor(v) if isinstance(v, Tensor) else (type(v), *describe_numbers([v])) for v in leaves])
    found = _PREPARED.find(key)
    if found is None:
        try:
            found = PreparedListedFold(fold, leaves, sizes, lists.__getitem__, entries)
        except Unsupported as reason:
            found = str(reason)
        _PREPARED.keep(key, found)
    if isinstance(found, str):
        raise Unsupported(found)
    return found


def _count_entries(number: Tensor, at: Tensor, r: Expr, sizes: Sizes) -> Tensor:
    """The gradient of a table ``[*batch, n]``: numbers added up by their index, both ``[*batch, entries]``."""
    total = number.new_zeros(math.prod(sizes.batch), sizes.of(str(r.args[2].feature)))
    for k in range(len(total)):  # one after the other: sorting takes memory
        add_at(total[k : k + 1], number.reshape(len(total), -1)[k : k + 1], at.reshape(len(total), -1)[k : k + 1])
    return total.view(*sizes.batch, -1)


# Gradients of columns that lie in pages

# Leaves that the rewritten fold has besides its own
_FIRST = node("leaf", (), ("page_first",), rows=True, cols=True, feature=None, dtype="int")  # per entry: its position
_ROW = node("leaf", (), ("page_row",), rows=True, cols=False, feature=None, dtype="int")  # the index in its sequence
_ROWS = node("leaf", (), ("page_rows",), rows=False, cols=False, feature=None, dtype="int")  # rows of a sequence


def find_page_gradients(fold: Fold) -> tuple[int, ...]:
    """The places of the reductions over rows, where the columns lie in pages."""
    if fold.domain is None or fold.domain.attrs[0][0] != "pages":
        return ()
    return tuple(k for k, r in enumerate(fold.reductions) if r.attrs[1] == "rows")


class PageGradients:
    """Sums over rows for columns in pages, on leaves like the given ones: ``fold`` is run on ``sizes`` along
    :meth:`lists`, with the leaves that :meth:`leaves` makes."""

    def __init__(self, whole: Fold, sizes: Sizes, removed: tuple[int, ...], varying: tuple[Expr, ...]):
        self.whole, self.given, self.removed, self.varying = whole, sizes, removed, varying
        self.copies = math.prod(sizes.batch[d] for d in removed)
        kept = tuple(n for d, n in enumerate(sizes.batch) if d not in removed)
        self.sizes = replace(sizes, rows=self.copies * sizes.rows, batch=kept)
        self.fold = _rewrite(whole, varying)

    def leaves(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of the fold that kernels run."""
        values = {e: self._leaf(e, v) for e, v in zip(self.whole.leaves, leaves, strict=True)}
        named = {e.attrs[0]: v for e, v in values.items()}
        found: list[Any] = []
        for e in self.fold.leaves:
            if e is _ROWS:
                found.append(self.given.rows)
            elif e is _ROW:
                found.append(self.transpose_table(self._tensors(leaves))[2])
            elif e is _FIRST:
                found.append(self.transpose_table(self._tensors(leaves))[1])
            else:
                found.append(named[e.attrs[0]])
        return found

    def lists(self, leaves: Sequence[Any]) -> Lists:
        """For each page, the sequences that own it."""
        return self.transpose_table(self._tensors(leaves))[0]

    def recipes(
        self, leaves: Sequence[Any], places: Sequence[int], count: int
    ) -> tuple[list[Any], list[Recipe]] | None:
        """Where a replay finds each leaf of the fold that kernels run: its place among the ``count`` leaves of a call,
        in which ``places`` are those of the given ones, or what stands for it; leaves behind those are made by recipes,
        one each, which copy rows in the order of pages. None where torch has to copy."""
        asked = tuple(places[self.whole.leaves.index(a)] for a in self._domain)
        found: list[Any] = []
        copies: list[Recipe] = []
        names = [str(e.attrs[0]) for e in self.whole.leaves]
        for e in self.fold.leaves:
            if e is _ROWS:
                found.append(self.given.rows)
                continue
            if e in (_ROW, _FIRST):
                at = 2 if e is _ROW else 1
                found.append(FoundAtLaunch(asked, lambda *tensors, at=at: (self.transpose_table(tensors)[at],), 1))
                continue
            k = names.index(str(e.attrs[0]))
            old, v = self.whole.leaves[k], leaves[k]
            moved = self._move(old, v) if isinstance(v, Tensor) and old is not self._domain[0] else v
            if isinstance(v, Tensor) and self._leaf(old, v).data_ptr() != v.data_ptr():
                copy = _copy_rows(e, moved, self.given)
                if copy is None:
                    return None
                turned = (a._replace(at=places[k]) if isinstance(a, Leaf) else a for a in copy.arguments)
                found.append(Leaf(count + len(copies), True))
                copies.append(copy._replace(arguments=tuple(turned)))
            else:
                found.append(Leaf(places[k], isinstance(v, Tensor)))
        return found, copies

    def restore_batch(self, found: Sequence[Tensor]) -> list[Tensor]:
        """Results with the batch dimensions of the call, 1 where they were folded."""
        for d in self.removed:
            found = [t.unsqueeze(d) for t in found]
        return list(found)

    def shape_recipe(self, recipe: Recipe) -> Recipe:
        """The recipe of a launch whose outputs are results, in the form of :meth:`restore_batch`."""
        forms, strides = [], []
        for k, (shape, dtype) in enumerate(recipe.outputs):
            own = recipe.strides[k] if recipe.strides else None
            t = torch.empty(shape, device="meta") if own is None else torch.empty_strided(shape, own, device="meta")
            (t,) = self.restore_batch([t])
            forms.append((tuple(t.shape), dtype))
            strides.append(None if own is None else t.stride())
        return recipe._replace(outputs=tuple(forms), strides=tuple(strides) if recipe.strides else ())

    def _leaf(self, e: Expr, v: Any) -> Any:
        """A leaf ``[*batch, rows or columns, features]`` without the batch dimensions that are folded."""
        if not isinstance(v, Tensor) or e is self._domain[0]:
            return v
        moved = self._move(e, v)
        if not (e.rows or e in self.varying):
            return moved
        kept = len(self.sizes.batch)
        behind = kept + len(self.removed) + 1
        return moved.reshape(*moved.shape[:kept], self.sizes.rows, *moved.shape[behind:])

    def _move(self, e: Expr, v: Tensor) -> Tensor:
        """A view of a leaf without the batch dimensions that are folded; of rows, with these behind the others."""
        count, tail = len(self.given.batch), 1 + (e.feature is not None)
        if e in self.varying:
            v = v.unsqueeze(count)
        elif not e.rows:
            for d in reversed(self.removed):
                v = v.select(d, 0)
            return v
        shape = [*v.shape]
        for d in self.removed:
            shape[d] = self.given.batch[d]
        shape[count] = self.given.rows
        kept = [d for d in range(count) if d not in self.removed]
        return v.expand(shape).permute(*kept, *self.removed, *range(count, count + tail))

    @property
    def _domain(self) -> Sequence[Expr]:
        assert self.whole.domain is not None
        return self.whole.domain.args

    def _tensors(self, leaves: Sequence[Any]) -> list[Tensor]:
        return [leaves[self.whole.leaves.index(a)] for a in self._domain]

    def transpose_table(self, tensors: Sequence[Tensor]) -> tuple[Lists, Tensor, Tensor]:
        """The transposed table, where the page of each of its entries stands in its sequence, and the index of each
        folded row in its own; made once. ``tensors``: the table and the lengths."""
        assert self.whole.domain is not None
        (form,) = self.whole.domain.attrs
        return bounded_cache.compute_once(
            (
                "owners of pages",
                form,
                self.given.cols,
                self.given.rows,
                self.sizes.rows,
                len(self.sizes.batch),
                *tensors,
            ),
            lambda: self._transpose(form, tensors),
            self.sizes.device,
        )

    def _transpose(self, form: tuple, tensors: Sequence[Tensor]) -> tuple[Lists, Tensor, Tensor]:
        sizes = self.given
        lists = restore_domain(form, tensors).listing(self.sizes.rows // tensors[1].numel(), sizes.cols)
        owner = lists.owners().long().clamp(max=lists.groups - 1)
        place = torch.arange(len(owner), device=owner.device) - lists.offsets[owner]
        found = read_lists(lists.transposed(sizes.cols // lists.col_block), sizes.cols).without_memory_of(tensors)
        rows = torch.arange(sizes.rows, device=owner.device).repeat(self.copies)
        shape = *(1,) * len(self.sizes.batch), -1
        return found, (place * form[1]).int().view(shape), rows.int().view(shape)


def _copy_rows(e: Expr, moved: Tensor, sizes: Sizes) -> Recipe | None:
    """How a replay copies rows ``[*batch, rows(, features)]`` in their order; None where no kernel does."""
    batch = tuple(moved.shape[: moved.dim() - 1 - (e.feature is not None)])
    try:
        one = ElementwiseLaunch(
            Elementwise("rows", (e,), (e,)),
            [moved],
            replace(sizes, batch=batch),
            types={0: moved.dtype},
            contiguous=True,
        )
    except Unsupported:
        return None
    one([moved])
    return one.recipe()


def prepare_page_gradients(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> PageGradients:
    """The form of a fold of which all reductions are gradients of columns that all sequences share; raises
    Unsupported where one is not, or where a leaf cannot be given per row."""
    if not all((sizes.rows, sizes.cols, *sizes.batch)) or any(r not in fold.gradient_of for r in fold.reductions):
        raise Unsupported("a reduction over rows that is no gradient of a column")
    if any(r.attrs[0] != "sum" for r in fold.reductions):
        raise Unsupported("gradients of columns that are no sums, over pages")
    if any(e.op == "batch_index" for e in topological([*fold.reductions, *fold.scales])):
        raise Unsupported("indices of the batch in a gradient of pages")
    assert fold.domain is not None
    table = fold.domain.args[0]
    held = [(e, v) for e, v in zip(fold.leaves, leaves, strict=True) if isinstance(v, Tensor) and e is not table]
    if any(e.is_pair or v.dim() < len(sizes.batch) for e, v in held):
        raise Unsupported("numbers per pair, over pages")
    fixed = [v for e, v in held if e.cols or e in fold.tables]  # what must not vary along a folded dimension
    removed = tuple(d for d in range(len(sizes.batch)) if all(v.shape[d] == 1 for v in fixed))
    if 0 not in removed:
        raise Unsupported("columns or tables of each sequence, over pages")
    numbers = [(e, v) for e, v in held if not (e.rows or e.cols)]
    varying = tuple(e for e, v in numbers if any(v.shape[d] != 1 for d in removed))
    return PageGradients(fold, sizes, removed, varying)


@functools.lru_cache(maxsize=1024)
def _rewrite(fold: Fold, varying: tuple[Expr, ...]) -> Fold:
    """A fold over the rows of all sequences: numbers of batch elements (``varying``) are numbers of rows."""
    assert fold.domain is not None
    per_row = {e: node("leaf", (), e.attrs, rows=True, cols=False, feature=e.feature, dtype=e.dtype) for e in varying}
    page, lengths = fold.domain.attrs[0][1], fold.domain.args[1]
    inside = apply("remainder", index("col"), page)
    position = apply("add", _FIRST, inside)
    listed = apply("lt", position, per_row.get(lengths, lengths))
    changed: dict[Expr, Expr] = {index("row"): _ROW, size("rows"): _ROWS, **per_row}
    for e in topological([*fold.reductions, *fold.scales]):
        changed |= {"listed": {e: listed}, "listed_position": {e: position}, "listed_once": {e: const(True)}}.get(
            e.op, {}
        )
    reductions, scales = [], []
    for r, scale in fold.scaled:
        (new,), (by,) = constructors.substitute((r,), changed), constructors.substitute((scale,), changed)
        if by.rows:  # a number of the batch element, which is one of the row now
            new, by = constructors.rebuild(new, (apply("mul", new.args[0], by), *new.args[1:])), ONE
        reductions.append(new)
        scales.append(by)
    used = {*topological([*reductions, *scales])}
    leaves = [changed.get(e, e) for e in fold.leaves]
    leaves = [e for e in [*leaves, _FIRST, _ROW, _ROWS] if e in used]
    pairs = ((n, fold.gradient_of[r]) for r, n in zip(fold.reductions, reductions, strict=True))
    gradients = tuple((n, e) for n, e in pairs if e in used)
    return Fold(
        tuple(leaves), tuple(reductions), tuple(scales) if fold.scales else (), fold.raised, fold.exact, gradients
    )


Launch = Callable[..., list[Tensor]]  # of a fold, leaves and sizes, and the element of each batch dimension (None: all)


# Gradients of numbers that are given per pair


def find_pair_gradients(fold: Fold) -> tuple[int, ...]:
    """The places of such reductions; over edges, numbers of pairs are numbers of entries, and pages have none."""
    if fold.domain is None or fold.domain.attrs[0][0] != "blocks":
        return ()
    return tuple(k for k, r in enumerate(fold.reductions) if kind_of(r).per_pair)


def run_pair_gradients(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes, places: Sequence[int], launch: Launch, write: Launch
) -> list[Tensor]:
    """Run a fold with such reductions at ``places``. ``launch`` runs any other fold over lists, ``write`` one such
    reduction in one kernel."""
    found: dict[tuple[Expr, int], Tensor] = {}
    others = tuple(k for k in range(len(fold.reductions)) if k not in places)
    if others:
        rest = keep_reductions(fold, others)
        found |= dict(zip(rest.outputs, launch(rest, choose_leaves(fold, leaves, rest), sizes), strict=True))
    for k in places:
        one = keep_reductions(fold, (k,))
        found[one.outputs[0]] = _run_gradient(one, choose_leaves(fold, leaves, one), sizes, launch, write)
    return [found[o] for o in fold.outputs]


def _run_gradient(fold: Fold, leaves: Sequence[Any], sizes: Sizes, launch: Launch, write: Launch) -> Tensor:
    """The gradient of an argument ``[*batch, rows, cols]``, of which any may be 1."""
    given = leaves[fold.leaves.index(fold.reductions[0].args[1])]
    shape = (1,) * (len(sizes.batch) + 2 - given.dim()) + tuple(given.shape)
    for over, dim, length in (("cols", -1, sizes.cols), ("rows", -2, sizes.rows)):
        if shape[dim] == 1 < length:
            (summed,) = launch(_sum_over(fold, over), leaves, sizes)
            return summed.unsqueeze(dim).sum_to_size(shape).view(given.shape)
    assert fold.domain is not None
    (form,) = fold.domain.attrs
    tensors = [leaves[fold.leaves.index(a)] for a in fold.domain.args]

    def count_copies() -> Tensor:
        lists = restore_domain(form, tensors).listing(sizes.rows, sizes.cols)
        return lists.copies(-(-sizes.cols // lists.col_block)).int()

    asked = ("copies", form, sizes.rows, sizes.cols, *tensors)
    copies = bounded_cache.compute_once(asked, count_copies, sizes.device)
    one, own = _add_copies(fold), [*leaves, copies.view(*(1,) * len(sizes.batch), -1)]
    repeated = [n if m == 1 < n else 0 for m, n in zip(shape, sizes.batch, strict=False)]
    if not any(repeated):
        return write(one, own, sizes)[0]
    one = replace(one, raised=True)
    parts: Tensor | None = None
    for at in itertools.product(*([*range(n)] if n else [None] for n in repeated)):
        (part,) = write(one, own, sizes, at)
        parts = part if parts is None else parts.add_(part)
    assert parts is not None
    return parts.view(given.shape)


@functools.lru_cache(maxsize=1024)
def _sum_over(fold: Fold, over: str) -> Fold:
    (r,) = fold.reductions
    return replace(fold, reductions=(reduce_node("sum", over, (), r.args[:1]),))


@functools.lru_cache(maxsize=1024)
def _add_copies(fold: Fold) -> Fold:
    """The fold whose number of a pair is that of all its copies."""
    (r,) = fold.reductions
    number, *like = r.args
    once = [e for e in topological([number]) if e.op == "listed_once"]
    at = [dict.fromkeys(once, const(is_first)) for is_first in (True, False)]
    first, other = (constructors.substitute((number,), changed)[0] for changed in at)
    more = apply("cast", apply("sub", COPIED, 1), to="float")
    total = apply("add", first, apply("where", apply("gt", COPIED, 1), apply("mul", more, other), 0.0))
    made = reduce_node("pair", r.attrs[1], r.attrs[2], (total, *like))
    return replace(fold, leaves=(*fold.leaves, COPIED), reductions=(made,), gradients=())
