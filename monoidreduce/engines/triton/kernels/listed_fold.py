"""Folds over lists: each group of kept indices folds the blocks of the folded axis that its list names, in one kernel.

:func:`run_listed` is what the engine of lists asks before it gathers anything. In the kernels (``codegen/listed.py``) a
block of a list is read where it lies, through descriptors where it is whole, and the walk of a list is split where
groups are few or unequal. A fold that has no such kernel is answered with None.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....plan import settings
from ....program import constructors
from ....program.constructors import ONE
from ....program.expression import Expr, const, index, reduce_node, topological
from ....program.lower import Fold
from ....program.philox import DRAWS
from ....reductions import kind_of
from ...common import matmul
from ...common.evaluate import Sizes
from ..codegen import compiler, few_rows
from ..codegen.kernel_spec import NARROW, Listing, Unsupported
from ..launch import descriptors
from ..launch.availability import available
from ..schedules import spec_from_tensors
from ..schedules.few_rows import FewRows
from ..schedules.kernel_plan import KernelPlan, choose_few_plan, choose_plan, count_splits, overriding_plans
from .fold_kernel import WIDE_GAIN, FoldLaunch, Layouts, Leaves
from .prepared_fold import list_kernels, merge_batches_and_strides

_SPLIT_KINDS = ("soft", "sum", "best")  # combined from results alone; other kinds must know how many pairs a split has
_KINDS = (*_SPLIT_KINDS, "moments", "user")
_LEAST_TILE = 64  # folded indices of a tile that lies in one block; narrower blocks share a tile
_MOST_PACKED = 64  # kept indices of a group and its query heads that are packed into one tile
_FEW = 32  # kept indices of a group up to which what bounds a kernel is reading the folded axis
_UNEVEN_WAVES = 16  # program instances per multiprocessor that even out lists of unknown length
_LEAST_SPLIT = 16  # tiles of a split, on average


@dataclass(frozen=True, eq=False)
class Lists:
    """The lists of one direction, as kernels read them.

    Group g of list l folds the blocks ``items[offsets[l * G + g]:offsets[l * G + g + 1]]``, where ``kept_block`` kept
    indices make a group (0: all of them) and ``folded_block`` folded ones a block; ``batch``: the dimensions of l."""

    offsets: Tensor
    items: Tensor
    kept_block: int
    folded_block: int
    batch: tuple[int, ...] = ()
    logical: bool = False  # the folded index counts along the list
    ends: Tensor | None = None  # [lists · groups]: how many folded indices each has; the last block is cut there
    entry: Tensor | None = None  # [items]: the place of each item in the lists that numbers per entry belong to

    def tensors(self, entries: bool) -> tuple[Tensor, ...]:
        """The arguments of a kernel; ``entries``: whether it reads which entry each item is."""
        found = self.offsets, self.items, self.ends, self.entry if entries else None
        return tuple(t for t in found if t is not None)

    def form(self) -> tuple:
        """What kernels, and the choice of their plans, depend on."""
        kinds = tuple((t.dtype, t.data_ptr() & 15) for t in self.tensors(True))
        some = (self.ends is None, self.entry is None, self.items.shape[0].bit_length(), self.offsets.shape[0])
        return (self.kept_block, self.folded_block, self.batch, self.logical, *some, *kinds)


def read_lists(given: Any, kept: int) -> Lists:
    """Lists as kernels read them, from ``domains.ColumnLists`` or anything with its fields."""
    rows = given.row_block if given.row_block < kept else 0
    get = lambda name, default: getattr(given, name, default)
    return Lists(
        given.offsets.contiguous(),
        given.items.contiguous(),
        rows,
        given.col_block,
        tuple(get("batch", ())),
        bool(get("logical", False)),
        get("ends", None),
        get("entry", None),
    )


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
        lists: Lists,
        steps: tuple[int, ...],
    ):
        self.lists_of, self.steps = lists, steps
        (over,) = {r.attrs[1] for r in fold.reductions}
        super().__init__(fold, over, values, batch, sizes, layouts)

    def _describe(self, values: Leaves) -> None:
        """The spec: leaves are read as they are, since copies of a whole axis may cost more than the lists' share."""
        with spec_from_tensors.as_for(replace(self.sizes, rows=1, cols=1)):  # float32 vectors are not split
            spec, (splits, casts) = spec_from_tensors.describe_fold(
                self.fold, self.over, values, self.batch, self.sizes
            )
        if splits or spec.deep:
            raise Unsupported("vectors that are split or wider than a block have no kernel over lists")
        read = {e: values[e].dtype for e, _, _ in casts if isinstance(values[e], Tensor)}
        types = tuple(str(read[e])[6:] if e in read else t for e, t in zip(spec.fold.leaves, spec.types, strict=True))
        rooms = tuple(0 if e in read else n for e, n in zip(spec.fold.leaves, spec.rooms, strict=True))
        self.before = ((), tuple(c for c in casts if c[0] not in read))
        guess = spec.guess and not spec.bounds  # whole tiles must be alike
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
        if heads < 2 or not 0 < rows <= _MOST_PACKED or self.steps[at] or any(e.is_pair for e in spec.fold.leaves):
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
        entries = lists.entry is not None and any(e.is_pair for e in self.spec.fold.leaves)
        ends = lists.ends is not None
        listing = Listing(lists.kept_block, lists.folded_block, True, single, lists.logical, ends, entries)
        self.spec = replace(self.spec, listed=listing)
        plainly = compiler.compile_fold(replace(self.spec, split=False, boxes=(), guess=False))
        asked = plan or (settings.current.get().tiles or {}).get(self.over)
        copied = () if ends or not descriptors.are_supported(device) else self._copied(plainly, leaves)
        plan = asked or (self._plan_single(plainly) if single else self._plan_tiles(plainly, group, any(copied)))
        if single:
            plan = replace(plan, block_kept=1, boxes=0)
        tile = plan.block_folded if not single else 1
        while lists.folded_block % tile:
            tile //= 2
        if tile >= min(_LEAST_TILE, plan.block_folded) > 1 or (asked and tile == plan.block_folded > 1):
            plan = replace(plan, block_folded=tile)
            self.spec = replace(self.spec, listed=replace(listing, gathered=False))
        else:
            plan = replace(plan, boxes=0)
            self.spec = replace(self.spec, guess=False)
        self.plan = plan
        return copied

    def _copied(self, plainly: Any, leaves: Leaves) -> tuple:
        """The leaves that descriptors may copy, where pairs are many."""
        lists = self.lists_of
        pairs = lists.items.shape[0] * lists.folded_block * (lists.kept_block or self.lengths[0])
        least = spec_from_tensors.VERY_MANY // (WIDE_GAIN if plainly.widths.folded > 2 * NARROW else 1)
        if pairs < least or self.few is not None:
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
        each 4,096 of their numbers: one warp need not wait for others."""
        lists = self.lists_of
        average = -(-lists.items.shape[0] * lists.folded_block // max(lists.offsets.shape[0] - 1, 1))
        width = max(plainly.widths.folded, 16)
        item = getattr(torch, self.spec.narrow or self.spec.compute).itemsize
        most = 1 << (2**14 // (width * item)).bit_length() - 1
        folded = max(16, min(1 << max(average - 1, 1).bit_length(), 128, most))
        warps = max(1, min(4, folded * width // 4096))
        return KernelPlan(1, folded, warps, 2)

    def _split_folded_axis(self) -> None:
        lists, kept = self.lists_of, self.lengths[0]
        heads = kept // self.few.period if self.few is not None else 1
        rows = kept // heads
        self.groups = -(-rows // lists.kept_block) if lists.kept_block else min(rows, 1)
        per_group = -(-(lists.kept_block or rows) * heads // self.plan.block_kept)
        self.tiles, self.beside = self.groups * per_group, 0
        average = lists.items.shape[0] * lists.folded_block // max(lists.offsets.shape[0] - 1, 1)
        folded = -(-average // self.plan.block_folded)
        instances, processors = self.tiles * self.count, spec_from_tensors.processors(self.sizes.device)
        self.parts = count_splits(self.plan, instances, folded, processors)
        if not self.plan.parts and 0 < instances < _UNEVEN_WAVES * processors:
            even = -(-_UNEVEN_WAVES * processors // instances)
            self.parts = max(self.parts, min(even, folded // _LEAST_SPLIT, 64))
        if any(r.attrs[0] not in _SPLIT_KINDS for r in self.fold.reductions):
            self.parts = 1
        self.grid = self.tiles * self.count * self.parts

    def _lay_out_arguments(self, values: Leaves) -> None:
        super()._lay_out_arguments(values)
        lists, listed = self.lists_of, self.spec.listed
        assert listed is not None
        self.given = lists.tensors(listed.entries)
        for k in range(len(self.given)):
            self.fill.append((len(self.template), len(self.spec.fold.leaves) + k, True))
            self.template.append(None)
        self.template += [self.groups, *self.steps]
        cut = lists.ends is not None or self.lengths[1] % lists.folded_block != 0
        folded = [v for e, v in values.items() if isinstance(v, Tensor) and self.spec.folds(e)]
        far = listed.gathered and any(
            v.stride(d) * n >= 2**31 for v in folded for d, n in list(enumerate(v.shape))[len(self.batch) :]
        )
        self.how |= dict(ragged=cut, wide=self.how["wide"] or far)

    def _cuts(self) -> list[int]:
        return [1] * self.parts  # kinds that are split do not ask how much each split covers

    def _converted(self, values: Leaves) -> list[Any]:
        return [*super()._converted(values), *self.given]

    def launched(self, outputs: list[Any], leaves: Sequence[Any], merged: Callable[[], Leaves]) -> bool:
        return super().launched(outputs, [*leaves, *self.given], merged)


class PreparedListedFold:
    """A fold over lists on tensors like the given ones: its launches, and the order of their results."""

    def __init__(self, fold: Fold, leaves: Sequence[Any], sizes: Sizes, lists: Callable[[str], Lists]):
        self.fold, self.sizes = fold, sizes
        _check(fold)
        self.launches: list[ListedLaunch] = []
        for over, part in list_kernels(fold, sizes)[1]:
            own = lists(over)
            shape = _strides(own.batch, sizes.batch)
            values, batch, layouts, (steps,) = merge_batches_and_strides(fold, leaves, sizes, (shape,))
            used = {*topological([*part.reductions, *part.scales])}
            small = replace(part, leaves=tuple(e for e in part.leaves if e in used))
            values = {e: values[e] for e in small.leaves}
            self.launches.append(ListedLaunch(small, values, batch, sizes, layouts, own, steps))
        found = [o for one in self.launches for o in one.fold.outputs]
        self.order = [found.index(o) for o in fold.outputs]

    def __call__(self, leaves: Sequence[Any], lists: Callable[[str], Lists]) -> list[Tensor]:
        given = dict(zip(self.fold.leaves, leaves, strict=True))
        found: list[Tensor] = []
        for one in self.launches:
            own = lists(one.over)
            one.given = own.tensors(one.spec.listed is not None and one.spec.listed.entries)
            shape = _strides(own.batch, self.sizes.batch)
            merged = lambda one=one, shape=shape: {
                e: v
                for e, v in merge_batches_and_strides(self.fold, leaves, self.sizes, (shape,))[0].items()
                if e in one.fold.leaves
            }
            found += one([given[e] for e in one.fold.leaves], merged)
        return [found[k] for k in self.order]


def _check(fold: Fold) -> None:
    for r in fold.reductions:
        kind = kind_of(r)
        if kind.per_pair or r.attrs[0] not in _KINDS:
            raise Unsupported(f"{r.attrs[0]} has no kernel over lists")


def _strides(own: tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, ...]:
    """How many lists further each dimension of the call's batch leads; 0 where lists are shared."""
    own = (1,) * (len(batch) - len(own)) + own
    steps = [math.prod(own[k + 1 :]) for k in range(len(own))]
    return tuple(0 if n == 1 else s for n, s in zip(own, steps, strict=True))


_PREPARED: dict[tuple, PreparedListedFold | None] = {}
_LOCAL: dict[int, tuple[Fold, tuple[Fold, bool] | None]] = {}
_MOST = 1024


def localize(fold: Fold) -> tuple[Fold, bool] | None:
    """The fold as a kernel over lists runs it: every pair is listed, a position along a list is the column's index, and
    a label counts as often as it is listed. And whether positions are read. None where entries of a list are told
    apart."""
    known = _LOCAL.get(id(fold))
    if known is None:
        if len(_LOCAL) >= _MOST:
            _LOCAL.clear()
        known = _LOCAL[id(fold)] = (fold, _localize(fold))  # the fold is held, so that its id stays its own
    return known[1]


def _localize(fold: Fold) -> tuple[Fold, bool] | None:
    nodes = topological([*fold.reductions, *fold.scales])
    if any(e.op == "listed_once" for e in nodes):
        return None
    changed = {e: const(True) for e in nodes if e.op == "listed"}
    places = {e: index("col") for e in nodes if e.op == "listed_position"}
    changed |= places
    reductions = constructors.substitute(fold.reductions, changed)
    mapped = dict(zip(fold.reductions, map(_sum_of_labels, reductions), strict=True))
    scales = constructors.substitute(fold.scales, changed) if fold.scales else ()
    gradients = tuple((mapped[r], e) for r, e in fold.gradients if r in mapped)
    made = replace(fold, reductions=tuple(mapped.values()), scales=scales, gradients=gradients)
    return made, bool(places)


def _sum_of_labels(r: Expr) -> Expr:
    """A label's number as a sum over all pairs: a listed column may be its label several times, or never."""
    if r.attrs[0] != "pick":
        return r
    target, value, vector = r.args
    _, over, (axis,) = r.attrs
    hit = constructors.apply("eq", index(axis), target)
    number = constructors.apply("where", hit, value, const(0.0))
    return reduce_node("sum", over, (), (number if vector is ONE else constructors.apply("mul", number, vector),))


def run_listed(fold: Fold, leaves: Sequence[Any], sizes: Sizes, lists: Callable[[str], Any]) -> list[Tensor] | None:
    """Run a fold in kernels that walk lists; None where it has none.

    ``leaves``: ``[*batch, M or N(, f)]``, numbers per entry ``[*batch, entries]``. ``lists``: by direction
    (``"cols"``, ``"rows"``), the lists of each group of kept indices (``domains.ColumnLists``)."""
    if not available() or (sizes.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"):
        return None
    local = localize(fold)
    if local is None:
        return None
    own, logical = local
    read: dict[str, Lists] = {}
    for over in dict.fromkeys(r.attrs[1] for r in own.reductions):
        if over == "neither":
            return None
        read[over] = read_lists(lists(over), sizes.rows if over == "cols" else sizes.cols)
        if read[over].logical and over == "rows":
            return None
    if logical and not all(one.logical for one in read.values()):
        return None
    key = (id(own), sizes.rows, sizes.cols, sizes.batch, sizes.compute, sizes.device, matmul.float32_precision())
    key += (overriding_plans(), _describe(leaves), *(one.form() for one in read.values()))
    if key not in _PREPARED:
        if len(_PREPARED) >= _MOST:
            _PREPARED.clear()
        try:
            _PREPARED[key] = PreparedListedFold(own, leaves, sizes, read.__getitem__)
        except Unsupported:
            _PREPARED[key] = None
    ready = _PREPARED[key]
    return None if ready is None else ready(leaves, read.__getitem__)


def _describe(leaves: Sequence[Any]) -> tuple:
    """What kernels depend on in leaves besides their values."""
    found: list[Any] = []
    for v in leaves:
        if isinstance(v, Tensor):
            found += (v.dtype, v.shape, v.stride(), v.data_ptr() & 15)
        else:
            found += (type(v), v > 0, abs(v) >= 2**28)
    return tuple(found)
