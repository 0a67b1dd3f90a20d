"""Folds over lists: each group of kept indices folds the blocks of the folded axis that its list names, in one kernel.

:func:`run_listed` is what the engine of lists asks before it gathers anything. In the kernels (``codegen/listed.py``) a
block of a list is read where it lies, through descriptors where it is whole, and the walk of a list is split where
groups are few or unequal. A fold that has no such kernel is answered with None.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....plan import settings
from ....program.contract import contractions
from ....program.expression import Expr, topological
from ....program.lower import Fold
from ....program.philox import DRAWS
from ....reductions import kind_of
from ....reductions.histogram import add_at
from ...common import bounded_cache, matmul
from ...common.combine import split
from ...common.evaluate import Form, Sizes, restore_domain, result_form
from ..codegen import compiler, few_rows, listed
from ..codegen.accumulators import move_factors_to_weight
from ..codegen.kernel_spec import NARROW, WIDEST, Listing, Spec, Unsupported
from ..launch import descriptors
from ..launch.availability import available
from ..launch.launch_recipes import DescriptorOf, FoundAtLaunch, Leaf, Recipe
from ..schedules import spec_from_tensors
from ..schedules.few_rows import FewRows
from ..schedules.kernel_plan import KernelPlan, choose_few_plan, choose_plan, count_splits, overriding_plans
from . import long_lists
from .fold_kernel import SMALL, WIDE_GAIN, FoldLaunch, Layouts, Leaves
from .list_tensors import ListForm, Lists, make_lists
from .listed_program import FIRST, LocalFold, localize
from .long_lists import LongLists
from .prepared_fold import list_kernels, merge_batches_and_strides
from .record_launches import Made

_LISTS: Any = "lists"  # beside the leaves of a call: the tensors of its lists
_SPLIT_KINDS = ("soft", "sum", "best")  # combined from results alone; other kinds must know how many pairs a split has
_KINDS = (*_SPLIT_KINDS, "moments", "user", "topk", "pair")
_LEAST_TILE = 64  # folded indices of a tile that lies in one block; narrower blocks share a tile
_MOST_PACKED = 64  # kept indices of a group and its query heads that are packed into one tile
_FEW = 32  # kept indices of a group up to which what bounds a kernel is reading the folded axis
_SHORT = 64  # entries of an average list up to which lists share a program instance
_UNEVEN_WAVES = 16  # program instances per multiprocessor that even out lists of unknown length
# and where nothing but the room for them is known (pages): with 5 splits 81 % of the bandwidth, with 16 86 % (H200, 64
# sequences of 1k to 32k, 32/8 heads)
_UNKNOWN_WAVES = 64
_LEAST_SPLIT = 16  # tiles of a split, on average


class ListedLaunch(FoldLaunch):
    """One kernel of a fold over lists, with its arguments."""

    ordered = False  # lists may be unsorted: of equal ones the smallest place wins, not the first

    def __init__(
        self,
        fold: Fold,
        values: Leaves,
        batch: tuple[int, ...],
        sizes: Sizes,
        layouts: Layouts,
        lists: ListForm,
        steps: tuple[int, ...],
        entries: int = 0,
        window: int = 0,
        role: str = "lists",
        numbers: int = 1,
    ):
        """``steps``: how many lists further each batch dimension leads; ``entries``: of a batch element's lists, where
        there are numbers for each; ``window``, ``role``, ``numbers``: ``long_lists.py``."""
        self.lists_of, self.steps, self.window, self.role, self.entries = lists, steps, window, role, entries
        self.numbers = numbers
        (over,) = {r.attrs[1] for r in fold.reductions}
        super().__init__(fold, over, values, batch, sizes, layouts)

    def _describe(self, values: Leaves) -> None:
        """The spec: leaves are read as they are, since copies of a whole axis may cost more than the lists' share."""
        with spec_from_tensors.as_for(replace(self.sizes, rows=1, cols=1)):  # float32 vectors are not split
            spec, (splits, casts, *_) = spec_from_tensors.describe_fold(
                self.fold, self.over, values, self.batch, self.sizes
            )
        if splits or spec.deep:
            raise Unsupported("vectors that are split or wider than a block have no kernel over lists")
        read = {e: values[e].dtype for e, _, _ in casts if isinstance(values[e], Tensor)}
        types = tuple(str(read[e])[6:] if e in read else t for e, t in zip(spec.fold.leaves, spec.types, strict=True))
        rooms = tuple(0 if e in read else n for e, n in zip(spec.fold.leaves, spec.rooms, strict=True))
        self.before = ((), tuple(c for c in casts if c[0] not in read), (), ())
        placed = any(e.op in ("row_index", "col_index") for e in topological(spec.fold.reductions))
        guess = spec.guess and not placed and not spec.bounds  # one tile must be like another
        self.may_guess = spec.guess
        self.spec = replace(spec, types=types, rooms=rooms, bounds=False, join=False, guess=guess)
        self.few = self._pack_heads(values)
        if self.few is not None:
            self.spec, self.batch, self.lengths = self.few.spec, self.few.batch, (self.few.kept, self.lengths[1])
            self.steps = self.steps[:-1] or (0,)
            self.layouts = {}

    def _pack_heads(self, values: Leaves) -> FewRows | None:
        """The last batch dimension as kept indices, where groups are narrow and share lists and folded leaves."""
        spec, kept, heads = self.spec, self.lengths[0], self.batch[-1]
        at = len(self.batch) - 1
        rows = (self.lists_of.kept_block or kept) * heads
        shared = lambda v: not isinstance(v, Tensor) or v.stride(at) == 0
        if (
            self.role != "lists"
            or heads < 2
            or not 0 < rows <= _MOST_PACKED
            or self.steps[at]
            or any(e.is_pair for e in spec.fold.leaves)
        ):
            return None
        if any(self.before):  # what is converted has the batch dimensions of the call
            return None
        drawn = any(e.op in DRAWS for e in topological(spec.fold.reductions))
        if drawn or not all(shared(v) for e, v in values.items() if spec.folds(e)):
            return None
        own = [e for e, v in values.items() if isinstance(v, Tensor) and not (e.rows or e.cols or shared(v))]
        fold = few_rows.vary_by_row(spec.fold, spec.over, own)
        rest = self.batch[:-1] or (1,)
        spec = replace(spec, fold=fold, grouped=True, rank=len(rest), guess=False)
        return FewRows(spec, rest, kept, heads * kept, alone=at == 0)

    def _find_group(self, leaves: Leaves) -> int | None:
        return None  # results are summed over the batch afterwards

    def _choose_plan(self, leaves: Leaves, plan: KernelPlan | None) -> tuple:
        lists, device = self.lists_of, self.sizes.device
        group = (lists.kept_block or self.lengths[0]) * (self.lengths[0] // self.few.period if self.few else 1)
        single = group == 1
        pairs = [e for e in self.spec.fold.leaves if e.is_pair]
        entries = lists.entry and bool(pairs)
        listing = Listing(lists.kept_block, lists.folded_block, True, single, lists.logical, lists.ends, entries)
        several = math.prod(lists.batch) > 1 and any(e is not FIRST for e in pairs)
        written = any(kind_of(r).per_pair for r in self.fold.reductions)
        window = self.window if single else 0
        listing = replace(listing, window=window, role=self.role, numbered=several or written, numbers=self.numbers)
        self.spec = replace(self.spec, listed=listing)
        plainly = compiler.compile_fold(replace(self.spec, split=False, boxes=(), guess=False))
        asked = plan or ((settings.current.get().tiles or {}).get(self.over) if self.role == "lists" else None)
        copied = self._copied(plainly, leaves) if descriptors.are_supported(device) else ()
        joined = self._pairs() >= spec_from_tensors.MANY and self.few is None
        tiled = replace(self.spec, listed=replace(listing, gathered=False), join=joined)
        staged = self._choose_staged(tiled, copied, asked) if any(dims is not None for dims in copied) else None
        copied = () if lists.ends and staged is None else copied  # only such a kernel clears what lies beyond an end
        few = not any(dims is not None for dims in copied)
        plan = asked or (self._plan_single(plainly) if single else self._plan_tiles(plainly, group, not few))
        tile = 1 if single else plan.block_folded
        while lists.folded_block % tile:
            tile //= 2
        if (tile < min(_LEAST_TILE, plan.block_folded) and not (asked and tile == plan.block_folded)) or single:
            self.spec = replace(self.spec, guess=False)
            each = single and plan.block_kept > 1 and self.role == "lists" and _can_share_tiles(self.spec)
            self.plan = replace(plan, block_kept=1 if single and not each else plan.block_kept, boxes=0)
            if each:
                self.spec = replace(self.spec, listed=replace(listing, each=True))
                return copied
        else:
            guess = tiled.guess or (staged is not None and self._guesses_staged(tiled))
            self.spec = replace(tiled, guess=guess)
            plain = replace(plan, block_folded=tile, boxes=min(plan.boxes, 0 if few else 1))
            self.plan = staged or plain
        if self.role != "lists":
            return copied
        if self.few is None and not (lists.kept_block or self.plan.block_kept) % self.plan.block_kept:
            tiles = max(lists.kept_block // self.plan.block_kept, 1)
            gathered = self.spec.listed.gathered if self.spec.listed else True
            self.spec = replace(self.spec, listed=replace(listing, gathered=gathered, tiles=tiles))
        return copied

    def _guesses_staged(self, spec: Spec) -> bool:
        """Whether a hand-scheduled kernel may guess a maximum where indices are compared: all see the first tile."""
        return self.may_guess and bool(listed.find_upper_limits(spec))

    def _choose_staged(self, spec: Spec, copied: tuple, asked: KernelPlan | None) -> KernelPlan | None:
        """The plan of a hand-scheduled kernel, where there is one whose tiles divide groups and blocks."""
        lists = self.lists_of
        if (
            self.fold.tables
            or self.few is not None
            or self.lengths[1] % lists.folded_block
            or (asked is not None and asked.boxes != 2)
        ):
            return None
        boxes = descriptors.keep_vectors(self.spec.fold, copied)
        spec = replace(spec, boxes=boxes, guess=spec.guess or self._guesses_staged(spec))
        tile = self._turns(spec, self.count)
        if asked is not None:
            tile = (asked.block_kept, asked.block_folded, asked.num_warps, asked.num_stages)
        if tile is None or (lists.kept_block or tile[0]) % tile[0] or lists.folded_block % tile[1]:
            return None
        return KernelPlan(*tile, boxes=2)

    def _pairs(self) -> int:
        """How many pairs are listed, at most; batch elements may share lists."""
        lists, shared = self.lists_of, math.prod(self.batch) // max(math.prod(self.lists_of.batch), 1)
        return lists.items * lists.folded_block * (lists.kept_block or self.lengths[0]) * shared

    def _copied(self, plainly: Any, leaves: Leaves) -> tuple:
        """The leaves that descriptors may copy, where pairs are many."""
        least = spec_from_tensors.VERY_MANY // (WIDE_GAIN if plainly.widths.folded > 2 * NARROW else 1)
        if self._pairs() < least or self.few is not None:
            return ()
        return descriptors.find_copied_leaves(self.spec, plainly.folded, leaves, len(self.batch))

    def _plan_tiles(self, plainly: Any, group: int, boxes: bool) -> KernelPlan:
        family = spec_from_tensors.family(self.sizes.device)
        item = getattr(torch, self.spec.narrow or self.spec.compute).itemsize
        most = max(16, 1 << (group - 1).bit_length())
        if most <= _FEW and item == 2 and plainly.widths.folded:
            plan = choose_few_plan(plainly, self.over, family, (group, self.lengths[1]), 1, 1)
        else:
            plan = choose_plan(plainly, self.over, item, family, boxes, group, None)
        return replace(plan, block_kept=min(plan.block_kept, most), parts=0)

    def _plan_single(self, plainly: Any) -> KernelPlan:
        """One kept index: about as many folded ones as a list has, at most 16 KiB of vectors in flight, and a warp for
        each 4,096 of their numbers: one warp need not wait for others. Short lists share a warp, several to each.

        H200, graph attention, 10⁶ lists of 20 ± 15, 64 features of 16 bits, forward: 0.77 ms in tiles of 4 lists × 8
        entries, 0.86 of 2 × 16, 1.10 of 1 × 32; two warps take twice the time of one."""
        width = max(plainly.widths.folded, 16)
        item = getattr(torch, self.spec.narrow or self.spec.compute).itemsize
        average = self.lists_of.average
        if self.role == "lists" and average <= _SHORT and width <= WIDEST and _can_share_tiles(self.spec):
            entries = max(16, min(32, 2**13 // (width * max(item, 4))))  # of all lists of a tile
            folded = max(4, min(16, 1 << max(average // 4, 1).bit_length() - 1))
            return KernelPlan(entries // folded, folded, 1, 2)
        most = 1 << (2**14 // (width * item)).bit_length() - 1
        length = average if self.role == "lists" else self.window
        folded = max(16, min(1 << max(length - 1, 1).bit_length(), 128, most))
        warps = max(1, min(4, folded * width // 4096))
        return KernelPlan(1, folded, warps, 2)

    def _split_folded_axis(self) -> None:
        lists, kept = self.lists_of, self.lengths[0]
        heads = kept // self.few.period if self.few is not None else 1
        rows = kept // heads
        self.groups = -(-rows // lists.kept_block) if lists.kept_block else min(rows, 1)
        if self.role != "lists":
            self.tiles, self.beside, self.parts = lists.windows(self.window), 0, 1
            self.grid = self.tiles * self.count
            return
        per_group = -(-(lists.kept_block or rows) * heads // self.plan.block_kept)
        self.tiles, self.beside = self.groups * per_group, 0
        assert self.spec.listed is not None
        if self.spec.listed.each:
            self.tiles = -(-self.groups // self.plan.block_kept)
        folded = -(-lists.average // self.plan.block_folded)
        instances, processors = self.tiles * self.count, spec_from_tensors.processors(self.sizes.device)
        self.parts = count_splits(self.plan, instances, folded, processors)
        waves = _UNKNOWN_WAVES if lists.ends else _UNEVEN_WAVES
        if not self.plan.parts and 0 < instances < waves * processors:
            even = -(-waves * processors // instances)
            self.parts = max(self.parts, min(even, folded // _LEAST_SPLIT, 64))
        if (
            self.plan.boxes == 2
            or self.spec.listed.window
            or any(r.attrs[0] not in _SPLIT_KINDS for r in self.fold.reductions)
        ):
            self.parts = 1
        self.grid = self.tiles * self.count * self.parts

    def _lay_out_arguments(self, values: Leaves) -> None:
        super()._lay_out_arguments(values)
        lists, listed = self.lists_of, self.spec.listed
        assert listed is not None
        for k in range(2 + listed.ends + listed.entries):
            self.fill.append((len(self.template), len(self.spec.fold.leaves) + k, True))
            self.template.append(None)
        self.template += [self.groups, *[self.entries] * listed.numbered, *self.steps]
        cut = lists.ends or self.lengths[1] % lists.folded_block != 0
        folded = [v for e, v in values.items() if isinstance(v, Tensor) and self.spec.folds(e)]
        far = listed.gathered and any(
            v.stride(d) * n >= 2**31 for v in folded for d, n in list(enumerate(v.shape))[len(self.batch) :]
        )
        cut |= self.kernel.staged  # an empty list is one tile beyond the axis
        self.how |= dict(ragged=cut, wide=self.how["wide"] or far)

    def _lay_out_results(self) -> None:
        super()._lay_out_results()
        for k, (r, _) in enumerate(self.fold.outputs):
            if kind_of(r).per_pair:  # entries that are in no list have none
                shape, dtype = self.outputs[k]
                zeros = functools.partial(torch.zeros, shape, dtype=dtype, device=self.sizes.device)
                self.rooms[k] = zeros  # type: ignore[call-overload]

    def _output(self, r: Expr, k: int) -> Form:
        if kind_of(r).per_pair:
            kind = self.sizes.compute if r.args[0].dtype == "float" else torch.int64
            return (*self.sizes.batch, self.entries), kind
        if self.role != "windows":
            return super()._output(r, k)
        rows, cols = (self.tiles, 0) if self.over == "cols" else (0, self.tiles)
        return result_form(r, k, replace(self.sizes, rows=rows, cols=cols))

    def _cuts(self) -> list[int]:
        return [1] * self.parts  # kinds that are split do not ask how much each split covers

    def recipe_over(self, places: Sequence[int], found: FoundAtLaunch) -> Recipe | None:
        """How a replay launches it again; ``places``: of its leaves among the whole fold's; ``found``: the lists."""
        if self.shifts or (self.spec.split and any(r.attrs[0] == "best" for r in self.fold.reductions)):
            return None  # torch combines what has no order
        made, count = self.recipe(), len(self.spec.fold.leaves)
        if made is None:
            return None
        arguments: list[Any] = []
        for a in made.arguments:
            if isinstance(a, Leaf) and a.at >= count:
                arguments += [found] if a.at == count else []
            else:
                arguments.append(a._replace(at=places[a.at]) if isinstance(a, Leaf | DescriptorOf) else a)
        return made._replace(arguments=tuple(arguments))

    def prepare(self, values: Leaves, plan: KernelPlan | None = None) -> None:
        super().prepare({e: v for e, v in values.items() if e is not _LISTS}, plan)

    def _converted(self, values: Leaves) -> list[Any]:
        own = {e: v for e, v in values.items() if e is not _LISTS}
        return [*super()._converted(own), *values.get(_LISTS, ())]


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
        for over, part in list_kernels(fold, sizes)[1]:
            own = lists(over)
            shape = _strides(own.batch, sizes.batch)
            values, batch, layouts, (steps,) = merge_batches_and_strides(fold, leaves, sizes, (shape,))
            used = {*topological([*part.reductions, *part.scales])}
            small = replace(part, leaves=tuple(e for e in part.leaves if e in used))
            values = {e: values[e] for e in small.leaves}
            window = _choose_window(small, own.form, sizes)
            how = (own.form, steps, entries, window)
            one = ListedLaunch(small, values, batch, sizes, {} if window else layouts, *how)
            self.launches.append(one)
            split_ones = one.spec.listed is not None and one.spec.listed.window
            self.long.append(_split_long_lists(one, values, batch, sizes, own) if split_ones else None)
        found = [o for one in self.launches for o in one.fold.outputs]
        self.order = [found.index(o) for o in fold.outputs]

    def __call__(self, leaves: Sequence[Any], lists: Callable[[str], Lists]) -> list[Tensor]:
        given = dict(zip(self.fold.leaves, leaves, strict=True))
        found: list[Tensor] = []
        for one, long in zip(self.launches, self.long, strict=True):
            own, mine = lists(one.over), [given[e] for e in one.fold.leaves]
            tensors = own.tensors(one.spec.listed is not None and one.spec.listed.entries)
            merged = functools.partial(self._merged, one, leaves, own, tensors)
            rest = functools.partial(long, leaves=mine, lists=tensors, merged=merged) if long is not None else None
            results = one([*mine, *tensors], merged, rest)
            found += [_sum_broadcast(t, r, given) for (r, _), t in zip(one.fold.outputs, results, strict=True)]
        return [found[k] for k in self.order]

    def recipes(self, places: Sequence[int], found: Callable[[ListedLaunch], FoundAtLaunch]) -> list[Made] | None:
        """How a replay makes the launches again; None where it cannot. ``places``: of the leaves in those of a call."""
        if any(long is not None for long in self.long) or any(kind_of(r).per_pair for r in self.fold.reductions):
            return None
        made, first = [], 0
        at = dict(zip(self.fold.leaves, places, strict=True))
        for one in self.launches:
            recipe = one.recipe_over([at[e] for e in one.fold.leaves], found(one)) if one.grid else None
            joined = one.united()
            if recipe is None or joined is None:
                return None
            count = len(one.outputs)
            made.append(Made(recipe, [self.order.index(first + k) for k in range(count)], joined))
            first += count
        return made

    def _merged(
        self, one: ListedLaunch, leaves: Sequence[Any], lists: Lists, tensors: tuple[Tensor, ...]
    ) -> dict[Expr, Any]:
        """The leaves of a launch with merged batch dimensions, and the tensors of the lists."""
        strides = _strides(lists.batch, self.sizes.batch)
        values, *_ = merge_batches_and_strides(self.fold, leaves, self.sizes, (strides,))
        return {**{e: values[e] for e in one.fold.leaves}, _LISTS: tensors}


def _can_share_tiles(spec: Spec) -> bool:
    """Whether rows with lists of their own may share a program instance: lists are of single indices, and folded
    vectors are in products of two leaves, or multiplied by numbers and summed."""
    listed = spec.listed
    if listed is None or (listed.kept_block, listed.folded_block) != (1, 1) or listed.ends:
        return False
    for r in spec.fold.reductions:
        if r.attrs[0] not in ("soft", "sum", "pair", "best", "topk"):
            return False
        values = r.args[1:] if r.attrs[0] == "soft" else r.args[:1] if r.attrs[0] == "sum" else ()
        for c in (move_factors_to_weight(c) for a in values for c in contractions(a, r.attrs[1])):
            if c.walk or c.minus is not None or not (c.vector is None or c.vector.op == "leaf"):
                return False
        nodes = topological(r.args, stop=lambda e: e.op in ("dot", "sqdist"))
        if any(e.op in ("fsum", "famax", "famin", "einsum", "component") for e in nodes):
            return False
        if any(a.op != "leaf" for e in nodes if e.op in ("dot", "sqdist") for a in e.args):
            return False
    return True


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
    if lists.lists // each * count < _UNEVEN_WAVES * spec_from_tensors.processors(sizes.device):
        return 0
    return long_lists.window_size(fold, lists.average, lists.items // each)


def _split_long_lists(
    one: ListedLaunch, values: Leaves, batch: tuple[int, ...], sizes: Sizes, lists: Lists
) -> LongLists:
    fold, form, window = replace(one.fold, raised=True, gradients=()), lists.form, one.window
    windows = ListedLaunch(fold, values, batch, sizes, {}, form, one.steps, one.entries, window, "windows")

    def make(joined: Fold, parts: list[Tensor], among: Sizes, numbers: int) -> ListedLaunch:
        strides = _strides(lists.batch, sizes.batch)
        values, batch, _, (steps,) = merge_batches_and_strides(joined, parts, among, (strides,))
        return ListedLaunch(joined, values, batch, among, {}, form, steps, 0, window, "combine", numbers)

    return LongLists(one.fold, one.over, sizes, windows, make)


def _check(fold: Fold, lists: Callable[[str], Lists], sizes: Sizes) -> None:
    """Raise Unsupported for what kernels over lists cannot fold."""
    for r in fold.reductions:
        name, over, _ = r.attrs
        own, folded = lists(over), sizes.cols if over == "cols" else sizes.rows
        if name not in _KINDS or (name == "moments" and (own.ends is not None or folded % own.folded_block)):
            raise Unsupported(f"{name} has no kernel over these lists")
        if any(a.feature is not None and not (a.cols if over == "cols" else a.rows) for a in r.args):
            raise Unsupported("a vector does not vary along the folded axis")


def _strides(own: tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, ...]:
    """How many lists further each dimension of the call's batch leads; 0 where lists are shared."""
    own = (1,) * (len(batch) - len(own)) + own
    steps = [math.prod(own[k + 1 :]) for k in range(len(own))]
    return tuple(0 if n == 1 else s for n, s in zip(own, steps, strict=True))


_PREPARED: dict[tuple, PreparedListedFold | None] = {}
_MOST = 1024


def run_listed(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> list[Tensor] | None:
    """Run a fold over the pairs that its domain lists in kernels that walk the lists; None where it has none.

    ``leaves``: ``[*batch, M or N(, f)]``; numbers per edge ``[*batch, edges]``."""
    lists = functools.cache(functools.partial(_read_domain, fold, _find_domain(fold, leaves), sizes))
    found = _prepare(fold, leaves, sizes, lists)
    return None if found is None else found[0].run(found[1], lists)


def prepare_listed(fold: Fold, leaves: Sequence[Any], sizes: Sizes) -> ListedFold | None:
    """A fold over lists prepared for leaves like these; None where it has no kernel."""
    found = _prepare(fold, leaves, sizes, functools.partial(_read_domain, fold, _find_domain(fold, leaves), sizes))
    return None if found is None else found[0]


def _domain_places(fold: Fold) -> tuple[int, ...]:
    """The places of the domain's tensors among the leaves."""
    assert fold.domain is not None
    return tuple(fold.leaves.index(a) for a in fold.domain.args)


def _find_domain(fold: Fold, leaves: Sequence[Any]) -> list[Tensor]:
    return [leaves[k] for k in _domain_places(fold)]


def _read_domain(fold: Fold, tensors: Sequence[Tensor], sizes: Sizes, over: str) -> Lists:
    """The lists of one direction, made once for the same tensors."""
    assert fold.domain is not None
    (form,) = fold.domain.attrs
    parts = ("lists", form, over, sizes.rows, sizes.cols, *tensors)
    if over == "cols" and form[0] != "blocks":  # as they were given: nothing is computed
        return make_lists(form, tensors, sizes, over)
    make = lambda: make_lists(form, tensors, sizes, over).own(tensors)
    return bounded_cache.compute_once(parts, make, sizes.device)


def _find_leaves(fold: Fold, local: LocalFold, leaves: Sequence[Any], sizes: Sizes) -> list[Any]:
    """The leaves of the fold that kernels run."""
    found = [leaves[k] for k in local.places]
    if local.once:
        assert fold.domain is not None
        (form,), tensors = fold.domain.attrs, _find_domain(fold, leaves)
        make = lambda: restore_domain(form, tensors).first_of_equal(sizes.rows, sizes.cols)
        once = bounded_cache.compute_once(("once", form, sizes.rows, sizes.cols, *tensors), make, sizes.device)
        found.append(once.view(*(1,) * len(sizes.batch), -1))
    return found


class ListedFold:
    """A fold over lists, prepared for leaves like some, in the form of a ``PreparedFold``: for replay."""

    picks: Sequence[Expr] = ()
    launches: Sequence[ListedLaunch] = ()  # none that is launched without lists

    def __init__(self, fold: Fold, sizes: Sizes, local: LocalFold, ready: PreparedListedFold):
        self.fold, self.sizes, self.local, self.ready = fold, sizes, local, ready
        self.order, self.asked = range(len(fold.outputs)), _domain_places(fold)

    def __call__(self, leaves: Sequence[Any]) -> list[Tensor]:
        given = _find_domain(self.fold, leaves)
        read = functools.cache(lambda over: _read_domain(self.fold, given, self.sizes, over))
        return self.run(_find_leaves(self.fold, self.local, leaves, self.sizes), read)

    def run(self, leaves: Sequence[Any], lists: Callable[[str], Lists]) -> list[Tensor]:
        """The same of the leaves that kernels read, on the lists of each direction (``"cols"``, ``"rows"``)."""
        found = [values for _, values in split(self.local.fold, self.ready(leaves, lists))]
        results: list[Tensor] = []
        for r, parts in zip(self.fold.reductions, self.local.parts, strict=True):
            mine = [found[k] for k in parts]
            results += mine[0] if len(mine) == 1 else [_count_entries(mine[0][0], mine[1][0], r, self.sizes)]
        return results

    def recipes(self, leaves: Sequence[Any]) -> list[Made] | None:
        """How a replay makes the launches again; None where it cannot."""
        if self.local.once or any(len(parts) > 1 for parts in self.local.parts):
            return None
        return self.ready.recipes(
            self.local.places, functools.partial(self._find_lists, _find_domain(self.fold, leaves))
        )

    def _find_lists(self, given: Sequence[Tensor], one: ListedLaunch) -> FoundAtLaunch:
        listed = one.spec.listed
        assert listed is not None and self.fold.domain is not None
        places = 2 + listed.ends + listed.entries
        if self.fold.domain.attrs[0][0] == "pages" and one.over == "cols" and not bounded_cache.is_capturing(given[0]):
            offsets, *rest = _read_domain(self.fold, given, self.sizes, "cols").tensors(listed.entries)
            if [t.data_ptr() for t in rest] == [t.data_ptr() for t in given]:  # as they are, whatever they hold
                at = lambda *tensors: (offsets.data_ptr(), *[t.data_ptr() for t in tensors])
                return FoundAtLaunch(self.asked, at, places, by_address=True)

        def find(*tensors: Tensor) -> tuple[Tensor, ...]:
            return _read_domain(self.fold, tensors, self.sizes, one.over).tensors(listed.entries)

        return FoundAtLaunch(self.asked, find, places)


def _prepare(
    fold: Fold, leaves: Sequence[Any], sizes: Sizes, lists: Callable[[str], Lists]
) -> tuple[ListedFold, list[Any]] | None:
    """The fold as kernels run it, and the leaves that they read; None where it has none."""
    local = localize(fold)
    if local is None or not available() or (sizes.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"):
        return None
    own = local.fold
    ways = dict.fromkeys(r.attrs[1] for r in own.reductions)
    if not ways.keys() <= {"cols", "rows"}:
        return None
    read = {over: lists(over) for over in ways}
    if any((one.logical and over == "rows") or local.logical > one.logical for over, one in read.items()):
        return None
    mine = _find_leaves(fold, local, leaves, sizes)
    if any(e.is_pair and v.dim() > len(sizes.batch) + 1 for e, v in zip(own.leaves, mine, strict=True)):
        return None  # a number per pair of the whole axes, not per edge
    key: tuple = (id(own), sizes.rows, sizes.cols, sizes.batch, sizes.compute, sizes.device, matmul.float32_precision())
    numbered = any(e.is_pair and e is not FIRST for e in own.leaves) or any(kind_of(r).per_pair for r in own.reductions)
    entries = _find_domain(fold, leaves)[-1].shape[-1] if numbered else 0
    key += (overriding_plans(), _describe(mine), entries, *(one.form for one in read.values()))
    if key not in _PREPARED:
        if len(_PREPARED) >= _MOST:
            _PREPARED.clear()
        try:
            _PREPARED[key] = PreparedListedFold(own, mine, sizes, read.__getitem__, entries)
        except Unsupported:
            _PREPARED[key] = None
    ready = _PREPARED[key]
    return None if ready is None else (ListedFold(fold, sizes, local, ready), mine)


def _count_entries(number: Tensor, at: Tensor, r: Expr, sizes: Sizes) -> Tensor:
    """The gradient of a table ``[*batch, n]``: numbers added up by their index, both ``[*batch, entries]``."""
    total = number.new_zeros(math.prod(sizes.batch), sizes.of(str(r.args[2].feature)))
    for k in range(len(total)):  # one after the other: sorting takes memory
        add_at(total[k : k + 1], number.reshape(len(total), -1)[k : k + 1], at.reshape(len(total), -1)[k : k + 1])
    return total.view(*sizes.batch, -1)


def _describe(leaves: Sequence[Any]) -> tuple:
    """What kernels depend on in leaves besides their values."""
    found: list[Any] = []
    for v in leaves:
        if isinstance(v, Tensor):
            found += (v.dtype, v.shape, v.stride(), v.data_ptr() & 15)
        else:
            found += (type(v), v > 0, abs(v) >= SMALL)
    return tuple(found)
