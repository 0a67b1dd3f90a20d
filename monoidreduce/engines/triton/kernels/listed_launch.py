"""The launches of a kernel that walks lists (``codegen/listed.py``): what it is given, its plan, long lists.

**What it is given**: the lists of one direction as tensors, and the fold as kernels run it. In that fold a pair is an
entry of a list, and is folded as often as it is listed. Labels are sums over all pairs, since a listed column may be
its label several times, or never. The gradient of a table over edges is two numbers for each entry: what is added, and
where.

**Long lists**: a row with far more edges than others is folded by many program instances and combined with ⊙. All
entries of the lists are cut into windows of equal size, by their place alone, so that nothing is read back from the
device. A list of more than two windows is left out by the kernel of all lists. A second launch has one program instance
a window: it searches the offsets for the list in which its window lies, and is idle where that is short. A third
combines the windows of each long list: that is a fold of the same kind, over the windows' results. Both are written by
the compiler of all kernels over lists.

**Tables**: over lists of blocks or pages the kernel of a table's gradient has a few program instances for each batch
element, of which each sums up every so many-th tile of rows; torch adds these parts, in a fixed order. Over edges there
is a number for each entry instead, so that one row with very many edges is not one instance's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....domains import ColumnLists
from ....program import constructors
from ....program.constructors import ONE, contractions
from ....program.expression import Expr, const, index, node, reduce_node, topological
from ....program.lower import Fold
from ....program.philox import DRAWS
from ....reductions import FastForm, all_have, kind_of, outputs_of
from ...common.bounded_cache import is_capturing
from ...common.combine import split
from ...common.evaluate import Form, Sizes, restore_domain, result_form
from ..codegen import compiler, few_rows, listed
from ..codegen.compiler import Kernel
from ..codegen.few_rows import FewRows, is_shared
from ..codegen.kernel_spec import COPIES, NARROW, ONCE, WIDEST, Listing, Spec, Unsupported, pad_width
from ..codegen.reductions import move_factors_to_weight
from ..launch import descriptors, driver
from ..launch.driver import Kernels
from ..launch.replay import DescriptorOf, FoundAtLaunch, Leaf, Recipe
from ..schedules import spec_from_tensors
from ..schedules.kernel_plan import (
    KernelPlan,
    Rendering,
    choose_few_plan,
    choose_plan,
    count_splits,
    find_overriding_plan,
)
from ..schedules.spec_from_tensors import Conversions
from .fold_kernel import WIDE_GAIN, FoldLaunch, Layouts, Leaves, Merged, Then
from .histogram import MOST_ENTRIES, compile_listed_histogram, default_plan
from .prepared_fold import ExtraLaunch

COPIED = node("leaf", (), (COPIES,), rows=True, cols=True, feature=None, dtype="int")  # how many equal ones there are
FIRST = node("leaf", (), (ONCE,), rows=True, cols=True, feature=None, dtype="bool")  # which of equal entries it is


class ListForm(NamedTuple):
    """What kernels, and the choice of their plans, depend on in lists: all but their numbers."""

    kept_block: int
    folded_block: int
    batch: tuple[int, ...]
    logical: bool
    ends: bool
    entry: bool
    lists: int  # how many there are
    items: int  # of all, rounded up to a power of two
    kinds: tuple  # types and alignment

    @property
    def average(self) -> int:
        """Folded indices of a list."""
        return -(-self.items * self.folded_block // max(self.lists, 1))

    def windows(self, size: int) -> int:
        """Windows of so many entries that the lists of a batch element have, at most."""
        return -(-self.items // (max(math.prod(self.batch), 1) * size))


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

    @property
    def form(self) -> ListForm:
        kinds = tuple((t.dtype, t.data_ptr() & 15) for t in self.tensors(True))
        some = self.batch, self.logical, self.ends is not None, self.entry is not None
        items = 1 << (len(self.items) - 1).bit_length()
        return ListForm(self.kept_block, self.folded_block, *some, len(self.offsets) - 1, items, kinds)

    def without_memory_of(self, given: Sequence[Tensor]) -> Lists:
        """The same lists without the memory of these tensors: what is cached for a tensor must not keep it alive."""
        theirs = {t.untyped_storage()._cdata for t in given}
        mine = {n: getattr(self, n) for n in ("offsets", "items", "ends", "entry")}
        held = {n: t.clone() for n, t in mine.items() if t is not None and t.untyped_storage()._cdata in theirs}
        return replace(self, **held) if held else self


def read_lists(given: ColumnLists, kept: int) -> Lists:
    """A domain's lists for ``kept`` indices, as kernels read them."""
    block = given.row_block if given.row_block < kept else 0
    items = given.items if len(given.items) else given.items.new_zeros(1)  # so that there is something to point to
    return Lists(given.offsets.contiguous(), items.contiguous(), block, given.col_block, given.batch, entry=given.entry)


def direction_of(r: Expr) -> str:
    """The lists that the kernel of a reduction walks: those of ``"cols"`` where it folds both axes."""
    return "rows" if r.attrs[1] == "rows" else "cols"


def make_lists(form: tuple, tensors: Sequence[Tensor], sizes: Sizes, over: str) -> Lists:
    """The lists of a domain with this form and these tensors, for reductions over ``over``."""
    domain = restore_domain(form, tensors)
    if form[0] == "pages":  # the table as it is: sequence s has the pages from s * most on
        most = domain.tensors()[0].shape[-1]
        table, lengths = (t.contiguous() for t in domain.tensors())
        offsets = (_list_multiples.__wrapped__ if is_capturing(table) else _list_multiples)(
            most, len(lengths) + 1, table.device
        )
        return Lists(offsets, table.view(-1), 0, form[1], tuple(tensors[1].shape), True, lengths)
    found = domain.listing(sizes.rows, sizes.cols) if over == "cols" else domain.transposed(sizes.rows, sizes.cols)
    return read_lists(found, sizes.rows if over == "cols" else sizes.cols)


@functools.lru_cache(maxsize=64)
def _list_multiples(step: int, count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device) * step


# The fold, rewritten for entries of lists


class LocalFold(NamedTuple):
    """A fold as a kernel over lists runs it."""

    fold: Fold
    places: tuple[int, ...]  # of its leaves, among those of the whole fold
    logical: bool  # it reads positions along lists
    once: bool  # its last leaf says which of equal entries of a list are the first
    # Per reduction of the whole fold, its own reductions: two for the gradient of a table over edges, whose numbers and
    # indices are written for each entry of the lists
    parts: tuple[tuple[int, ...], ...]


@functools.lru_cache(maxsize=1024)
def localize(fold: Fold) -> LocalFold:
    """The fold with every pair listed, positions along a list as the columns' indices, and labels that count as often
    as they are listed. Raises Unsupported where equal entries of a list have numbers of their own and are told apart,
    which is an error if there are any."""
    nodes = topological([*fold.reductions, *fold.scales])
    once = [e for e in nodes if e.op == "listed_once"]
    edges = fold.domain is not None and fold.domain.attrs[0][0] == "edges"
    if edges and once and any(e.is_pair for e in fold.leaves):
        raise Unsupported("the pairs that are best, of pairs with numbers of their own")
    positions = {e: index("col") for e in nodes if e.op == "listed_position"}
    changed = {**{e: const(True) for e in nodes if e.op == "listed"}, **positions, **{e: FIRST for e in once}}
    scaled = zip(constructors.substitute(fold.reductions, changed), fold.scaled, strict=True)
    found: dict[Expr, Expr] = {}  # reductions and their scales
    parts = []
    for r, (_, scale) in scaled:
        per_entry = [reduce_node("pair", "cols", (), (a,)) for a in r.args[:2]]
        own = per_entry if edges and kind_of(r).both_axes else [_as_kernels_fold(r)]
        if len(own) == 1 and own[0] in found:
            raise Unsupported("a reduction that is also a part of a table's gradient")
        parts.append(tuple([*found, *(o for o in own if o not in found)].index(o) for o in own))
        found |= dict.fromkeys(own, constructors.substitute((scale,), changed)[0])
    reductions, scales = tuple(found), tuple(found.values()) if fold.scales else ()
    used = {*topological([*reductions, *scales])}
    places = tuple(k for k, e in enumerate(fold.leaves) if e in used)
    mapped = {r: reductions[own[0]] for r, own in zip(fold.reductions, parts, strict=True)}
    gradients = tuple((mapped[r], e) for r, e in fold.gradients if r in mapped and e in used)
    leaves = (*(fold.leaves[k] for k in places), *([FIRST] if once else []))
    made = replace(fold, leaves=leaves, reductions=reductions, scales=scales, gradients=gradients)
    return LocalFold(made, places, bool(positions), bool(once), tuple(parts))


def _as_kernels_fold(r: Expr) -> Expr:
    """A label's number as a sum over all pairs: a listed column may be its label several times, or never. Numbers of
    entries are written where rows walk their lists."""
    if kind_of(r).per_pair:
        return reduce_node("pair", "cols", r.attrs[2], r.args)
    if r.attrs[0] != "pick":
        return r
    target, value, vector = r.args
    _, over, (axis,) = r.attrs
    number = constructors.apply("where", constructors.apply("eq", index(axis), target), value, const(0.0))
    number = number if number.feature is None else constructors.fsum(number)
    return reduce_node("sum", over, (), (number if vector is ONE else constructors.apply("mul", number, vector),))


LISTS: Any = "lists"  # beside the leaves of a call: the tensors of its lists
_LEAST_TILE = 64  # folded indices of a tile that lies in one block; narrower blocks share a tile
_MOST_PACKED = 64  # kept indices of a group and its query heads that are packed into one tile
_FEW = 32  # kept indices of a group up to which what bounds a kernel is reading the folded axis
_SHORT = 64  # entries of an average list up to which lists share a program instance
UNEVEN_WAVES = 16  # program instances per multiprocessor that even out lists of unknown length
# and where only the longest list that there may be is known (pages): with 5 splits 81 % of the bandwidth, with 16 86 %
# (H200, 64 sequences of 1k to 32k, 32/8 heads)
_UNKNOWN_WAVES = 64
_LEAST_SPLIT = 16  # tiles of a split, on average
_LANES = 1024
_TEXT = """
@triton.jit(do_not_specialize=["size"])
def clear(out, size, LANES: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    tl.store(out + at, tl.zeros([LANES], out.dtype.element_ty), mask=at < size)
"""
_kernels = Kernels("Zeros, where numbers of entries are written.", _TEXT)


@dataclass(frozen=True)
class ListWork:
    """Which lists a kernel walks, and what it does of their work (:class:`LongLists`)."""

    lists: ListForm
    steps: tuple[int, ...]  # how many lists further each batch dimension leads
    entries: int = 0  # of a batch element's lists, where there are numbers for each
    window: int = 0  # entries of a window, where long lists are split
    role: str = "lists"  # or "windows", "combine": as in ``Listing``
    numbers: int = 1  # that a window has to combine


class ListedLaunch(FoldLaunch):
    """One kernel of a fold over lists, with its arguments."""

    ordered = False  # lists may be unsorted: of equal ones the smallest place wins, not the first

    def __init__(
        self, fold: Fold, values: Leaves, batch: tuple[int, ...], sizes: Sizes, layouts: Layouts, work: ListWork
    ):
        self.work, self.lists, self.steps = work, work.lists, work.steps
        (over,) = {direction_of(r) for r in fold.reductions}
        super().__init__(fold, over, values, batch, sizes, layouts)

    def _describe(self, values: Leaves) -> None:
        """The spec: leaves are read as they are, since copies of a whole axis may cost more than the lists' share."""
        given = self.fold, self.over, values, self.batch, self.sizes
        pairs = [v for e, v in values.items() if e.is_pair and isinstance(v, Tensor)]
        self.whole_pairs = any(v.dim() == len(self.batch) + 2 for v in pairs)
        with spec_from_tensors.as_for(replace(self.sizes, rows=1, cols=1)):  # float32 vectors are not split
            spec, (splits, casts, *_) = spec_from_tensors.describe_fold(*given)
        if splits or spec.k_loop:
            raise Unsupported("vectors that are split or wider than a block have no kernel over lists")
        leaves = spec.fold.leaves
        uncast = {e: str(values[e].dtype)[6:] for e, _, _ in casts if isinstance(values[e], Tensor)}
        types = tuple(uncast.get(e, kind) for e, kind in zip(leaves, spec.types, strict=True))
        widths = tuple(0 if e in uncast else n for e, n in zip(leaves, spec.padded_widths, strict=True))
        self.conversions = Conversions(casts=tuple(c for c in casts if c[0] not in uncast))
        placed = any(e.op in ("row_index", "col_index") for e in topological(spec.fold.reductions))
        self.may_guess = spec.guess
        guess = spec.guess and not placed and not spec.bounds  # one tile must be like another
        self.spec = replace(
            spec, types=types, padded_widths=widths, bounds=False, precomputed_shifts=False, guess=guess
        )
        self.few_rows = self._pack_heads(values)
        if self.few_rows is not None:
            self.spec, self.batch = self.few_rows.spec, self.few_rows.batch
            self.lengths = self.few_rows.kept, self.lengths[1]
            self.steps, self.layouts = self.steps[:-1] or (0,), {}

    def _pack_heads(self, values: Leaves) -> FewRows | None:
        """The last batch dimension as kept indices, where groups are narrow and share lists and folded leaves."""
        spec, kept, heads = self.spec, self.lengths[0], self.batch[-1]
        at, rows = len(self.batch) - 1, (self.lists.kept_block or kept) * heads
        if self.work.role != "lists" or heads < 2 or not 0 < rows <= _MOST_PACKED or self.steps[at]:
            return None
        if any(self.conversions) or any(e.is_pair for e in spec.fold.leaves):  # these have the batch of the call
            return None
        drawn = any(e.op in DRAWS for e in topological(spec.fold.reductions))
        folded = [v for e, v in values.items() if spec.folds(e) or e in spec.fold.tables]
        if drawn or not all(is_shared(v, at) for v in folded):
            return None
        own = [e for e, v in values.items() if isinstance(v, Tensor) and not (e.rows or e.cols or is_shared(v, at))]
        fold = few_rows.vary_by_row(spec.fold, spec.over, own)
        rest = self.batch[:-1] or (1,)
        spec = replace(spec, fold=fold, grouped=True, rank=len(rest), guess=False)
        return FewRows(spec, rest, kept, heads * kept, added_batch=at == 0)

    def _find_summed_dim(self, leaves: Leaves) -> int | None:
        return None  # results are summed over the batch afterwards

    def _choose_plan(self, leaves: Leaves, plan: KernelPlan | None) -> None:
        lists, role = self.lists, self.work.role
        heads = self.lengths[0] // self.few_rows.period if self.few_rows else 1
        group = (lists.kept_block or self.lengths[0]) * heads  # kept indices that share a list
        listing = self._describe_lists(single=group == 1)
        self.spec = replace(self.spec, listed=listing)
        plain = self._compile_plain()
        asked = plan or (find_overriding_plan(self.over) if role == "lists" else None)
        copied = self._find_copied_vectors(plain, leaves)
        shifts = self._count_pairs() >= spec_from_tensors.MANY and self.few_rows is None
        tiled = replace(self.spec, listed=replace(listing, gathered=False), precomputed_shifts=shifts)
        by_hand = self._plan_hand_scheduled(tiled, copied, asked) if copied else None
        self.copied = () if lists.ends and by_hand is None else copied  # other kernels do not clear the cut block
        if listing.single:
            self._plan_single_rows(asked or self._plan_single(plain), listing)
            if self.spec.listing.each:
                return
        else:
            self._plan_groups(asked or self._plan_tiles(plain, group, bool(self.copied)), asked, tiled, by_hand)
        if role == "lists" and self.few_rows is None:
            kept, gathered = lists.kept_block or self.plan.block_kept, self.spec.listing.gathered
            if not kept % self.plan.block_kept:
                tiles = max(lists.kept_block // self.plan.block_kept, 1)
                self.spec = replace(self.spec, listed=replace(listing, gathered=gathered, tiles=tiles))

    def _compile_plain(self) -> Kernel:
        return compiler.compile_fold(replace(self.spec, split=False, descriptors=(), guess=False))

    def _describe_lists(self, single: bool) -> Listing:
        """The lists as a kernel that gathers their entries reads them."""
        lists, work = self.lists, self.work
        pairs = [e for e in self.spec.fold.leaves if e.is_pair and (e in (FIRST, COPIED) or not self.whole_pairs)]
        several = math.prod(lists.batch) > 1 and any(e not in (FIRST, COPIED) for e in pairs)
        return Listing(
            lists.kept_block,
            lists.folded_block,
            gathered=True,
            single=single,
            logical=lists.logical,
            ends=lists.ends,
            entries=lists.entry and bool(pairs),
            numbered=several or (not self.whole_pairs and any(kind_of(r).per_pair for r in self.fold.reductions)),
            window=work.window if single else 0,
            role=work.role,
            numbers=work.numbers,
            whole_pairs=self.whole_pairs,
        )

    def _plan_single_rows(self, plan: KernelPlan, listing: Listing) -> None:
        """One kept index a program instance, or several with a list each."""
        self.spec = replace(self.spec, guess=False)
        each = plan.block_kept > 1 and listing.role == "lists" and _can_share_tiles(self.spec)
        self.plan = replace(plan, block_kept=plan.block_kept if each else 1, rendering=Rendering.LOADS)
        if each:
            self.spec = replace(self.spec, listed=replace(listing, each=True))

    def _plan_groups(self, plan: KernelPlan, asked: KernelPlan | None, tiled: Spec, by_hand: KernelPlan | None) -> None:
        """Groups of kept indices: by tiles that lie in one block where these are long enough, else gathered."""
        folded = plan.block_folded
        while self.lists.folded_block % folded:
            folded //= 2
        if folded < min(_LEAST_TILE, plan.block_folded) and not (asked and folded == plan.block_folded):
            self.spec, self.plan = replace(self.spec, guess=False), replace(plan, rendering=Rendering.LOADS)
            return
        guesses = tiled.guess or (by_hand is not None and self._guesses_by_hand(tiled))
        self.spec = replace(tiled, guess=guesses)
        rendering = min(plan.rendering, Rendering.DESCRIPTORS) if self.copied else Rendering.LOADS
        self.plan = by_hand or replace(plan, block_folded=folded, rendering=rendering)

    def _guesses_by_hand(self, spec: Spec) -> bool:
        """True where a hand-scheduled kernel may guess a maximum though indices are compared: all see the first
        tile."""
        return self.may_guess and bool(listed.find_upper_limits(spec))

    def _plan_hand_scheduled(self, spec: Spec, copied: tuple, asked: KernelPlan | None) -> KernelPlan | None:
        """The plan of a hand-scheduled kernel, where there is one whose tiles divide groups and blocks."""
        lists = self.lists
        if self.fold.tables or self.few_rows is not None or self.lengths[1] % lists.folded_block:
            return None
        if any(e.is_pair for e in spec.fold.leaves):
            return None
        if asked is not None and asked.rendering != Rendering.HAND_SCHEDULED:
            return None
        vectors = descriptors.keep_vectors(self.spec.fold, copied)
        spec = replace(spec, descriptors=vectors, guess=spec.guess or self._guesses_by_hand(spec))
        tile = self._choose_hand_scheduled(spec, self.count)
        if asked is not None:
            tile = (asked.block_kept, asked.block_folded, asked.num_warps, asked.num_stages)
        if tile is None or (lists.kept_block or tile[0]) % tile[0] or lists.folded_block % tile[1]:
            return None
        return KernelPlan(*tile, rendering=Rendering.HAND_SCHEDULED)

    def _count_pairs(self) -> int:
        """How many pairs are listed, at most; batch elements may share lists."""
        lists, shared = self.lists, math.prod(self.batch) // max(math.prod(self.lists.batch), 1)
        return lists.items * lists.folded_block * (lists.kept_block or self.lengths[0]) * shared

    def _find_copied_vectors(self, plain: Any, leaves: Leaves) -> tuple:
        """Per leaf, the dimensions of the descriptor that may copy it, where pairs are many; empty where none can."""
        least = spec_from_tensors.VERY_MANY // (WIDE_GAIN if plain.widths.folded > 2 * NARROW else 1)
        if self._count_pairs() < least or self.few_rows is not None:
            return ()
        if not driver.has_descriptors(self.sizes.device):
            return ()
        found = descriptors.find_copied_leaves(self.spec, plain.folded, leaves, len(self.batch))
        return found if any(dims is not None for dims in found) else ()

    def _plan_tiles(self, plain: Any, group: int, copies: bool) -> KernelPlan:
        family = driver.find_family(self.sizes.device)
        item = getattr(torch, self.spec.narrow or self.spec.compute).itemsize
        most = max(16, 1 << (group - 1).bit_length())
        if any(r.attrs[0] == "next_best" for r in self.fold.reductions):
            most = 16  # rows of a tile wait for each other's lists
        if most <= _FEW and item == 2 and plain.widths.folded and not plain.traits.pair_features:
            widens = any(e.is_stored and self.spec.folds(e) for e in self.spec.fold.leaves)
            plan = choose_few_plan(plain, self.over, family, (group, self.lengths[1]), 1, 1, widens, True)
        else:
            plan = choose_plan(plain, self.over, item, family, copies, group, None)
        if any(map(self.spec.is_per_entry, self.spec.fold.leaves)):  # gradients of pages: most have one sequence
            average = 1 << max(self.lists.average - 1, 1).bit_length()
            plan = replace(plan, block_folded=min(plan.block_folded, max(16, average)))
        return replace(plan, block_kept=min(plan.block_kept, most), splits=0)

    def _plan_single(self, plain: Any) -> KernelPlan:
        """One kept index: about as many folded ones as a list has, at most 16 KiB of vectors in flight, and a warp for
        each 4,096 of their numbers: one warp need not wait for others. Short lists share a warp, several to each.

        H200, graph attention, 10⁶ lists of 20 ± 15, 64 features of 16 bits, forward: 0.77 ms in tiles of 4 lists × 8
        entries, 0.86 of 2 × 16, 1.10 of 1 × 32; two warps take twice the time of one."""
        width = max(plain.widths.folded, 16)
        item = getattr(torch, self.spec.narrow or self.spec.compute).itemsize
        average = self.lists.average
        if self.work.role == "lists" and average <= _SHORT and width <= WIDEST and _can_share_tiles(self.spec):
            entries = max(16, min(32, 2**13 // (width * max(item, 4))))  # of all lists of a tile
            folded = max(4, min(16, 1 << max(average // 4, 1).bit_length() - 1))
            return KernelPlan(entries // folded, folded, 1, 2)
        most = 1 << (2**14 // (width * item)).bit_length() - 1
        length = average if self.work.role == "lists" else self.work.window
        features = plain.traits.pair_features
        if features:  # of the vectors that are held for every pair: 32 numbers of them a thread
            folded = max(16, min(1 << max(length - 1, 1).bit_length(), 128, 2**12 // features))
            return KernelPlan(1, folded, max(1, min(4, folded * features // 1024)), 1)
        folded = max(16, min(1 << max(length - 1, 1).bit_length(), 128, most))
        warps = max(1, min(4, folded * width // 4096))
        return KernelPlan(1, folded, warps, 2)

    def _split_folded_axis(self) -> None:
        lists, kept = self.lists, self.lengths[0]
        heads = kept // self.few_rows.period if self.few_rows is not None else 1
        rows = kept // heads
        self.groups = -(-rows // lists.kept_block) if lists.kept_block else min(rows, 1)
        if self.work.role != "lists":
            self.tiles, self.beside, self.splits = lists.windows(self.work.window), 0, 1
            self.grid = self.tiles * self.count
            return
        per_group = -(-(lists.kept_block or rows) * heads // self.plan.block_kept)
        self.tiles, self.beside = self.groups * per_group, 0
        if self.spec.listing.each:
            self.tiles = -(-self.groups // self.plan.block_kept)
        folded = -(-lists.average // self.plan.block_folded)
        instances, processors = self.tiles * self.count, driver.count_processors(self.sizes.device)
        self.splits = count_splits(self.plan, instances, folded, processors)
        waves = _UNKNOWN_WAVES if lists.ends else UNEVEN_WAVES
        if not self.plan.splits and 0 < instances < waves * processors:
            even = -(-waves * processors // instances)
            self.splits = max(self.splits, min(even, folded // _LEAST_SPLIT, 64))
        if (
            self.plan.rendering == Rendering.HAND_SCHEDULED
            or self.spec.listing.window
            or not all_have(FastForm.SPLIT_LISTS, self.fold.reductions)
        ):
            self.splits = 1
        self.grid = self.tiles * self.count * self.splits

    def _lay_out_arguments(self, values: Leaves) -> None:
        super()._lay_out_arguments(values)
        lists, listed = self.lists, self.spec.listing
        for k in range(listed.tensors):
            self.template.add_gap(len(self.spec.fold.leaves) + k, True)
        self.template.values += [self.groups, *[self.work.entries] * listed.numbered, *self.steps]
        cut = lists.ends or self.lengths[1] % lists.folded_block != 0
        folded = [v for e, v in values.items() if isinstance(v, Tensor) and self.spec.folds(e)]
        far = listed.gathered and any(
            v.stride(d) * n >= 2**31 for v in folded for d, n in list(enumerate(v.shape))[len(self.batch) :]
        )
        cut |= self.kernel.hand_scheduled  # an empty list is one tile beyond the axis
        self.call_options |= dict(ragged=cut, wide=self.call_options["wide"] or far)

    def _lay_out_results(self) -> None:
        super()._lay_out_results()
        for k, (r, _) in enumerate(self.fold.outputs):
            if kind_of(r).per_pair:  # entries that are in no list have none
                shape, dtype = self.outputs[k]
                zeros = functools.partial(torch.zeros, shape, dtype=dtype, device=self.sizes.device)
                self.allocators[k] = zeros  # type: ignore[call-overload]

    def _output(self, r: Expr, k: int) -> Form:
        if kind_of(r).per_pair:
            kind = self.sizes.compute if r.args[0].dtype == "float" else torch.int64
            if not self.whole_pairs:
                return (*self.sizes.batch, self.work.entries), kind
            kind = kind if self.fold.raised else getattr(torch, self.spec.type_of[r.args[1]])  # as its argument
            return (*self.sizes.batch, self.sizes.rows, self.sizes.cols), kind
        if self.work.role != "windows":
            return super()._output(r, k)
        rows, cols = (self.tiles, 0) if self.over == "cols" else (0, self.tiles)
        return result_form(r, k, replace(self.sizes, rows=rows, cols=cols))

    def _measure_splits(self) -> list[int]:
        return [1] * self.splits  # kinds that are split do not ask how much each split covers

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
                arguments.append(a._replace(at=places[a.at]) if isinstance(a, (Leaf, DescriptorOf)) else a)
        return made._replace(arguments=tuple(arguments))

    def clear_recipe(self, k: int) -> Recipe | None:
        """How a replay clears the k-th result, numbers of entries, of which some may be in no list."""
        shape, dtype = self.outputs[k]
        out = torch.empty(shape, dtype=dtype, device=self.sizes.device)
        relaunch = _kernels("clear", (-(-out.numel() // _LANES),), (out, out.numel()), dict(LANES=_LANES))
        return None if relaunch is None else Recipe(relaunch, (self.outputs[k],), (out.numel(),))

    def prepare(self, values: Leaves, plan: KernelPlan | None = None) -> None:
        super().prepare({e: v for e, v in values.items() if e is not LISTS}, plan)

    def _convert(self, values: Leaves) -> list[Any]:
        own = {e: v for e, v in values.items() if e is not LISTS}
        return [*super()._convert(own), *values.get(LISTS, ())]


def _can_share_tiles(spec: Spec) -> bool:
    """True when rows with lists of their own may share a program instance: lists are of single indices, and folded
    vectors are in products of two leaves, or multiplied by numbers and summed."""
    listed = spec.listing
    if (listed.kept_block, listed.folded_block) != (1, 1) or listed.ends:
        return False
    if not all_have(FastForm.SHARED_TILES, spec.fold.reductions):
        return False
    for r in spec.fold.reductions:
        for c in (move_factors_to_weight(c) for a in kind_of(r).summed(r.args) for c in contractions(a, r.attrs[1])):
            if c.walk or c.minus is not None or not (c.vector is None or c.vector.op == "leaf"):
                return False
        nodes = topological(r.args, stop=lambda e: e.op in ("dot", "sqdist"))
        if any(e.op in ("fsum", "famax", "famin", "einsum", "component") for e in nodes):
            return False
        if any(a.op != "leaf" for e in nodes if e.op in ("dot", "sqdist") for a in e.args):
            return False
    return True


LEAST_WINDOW = 2048  # entries
_TIMES_AVERAGE = 4  # a window has at least so many times the entries of an average list
_LEAST_WINDOWS = 4  # that all entries make, below which nothing is split


def window_size(fold: Fold, average: int, entries: int) -> int:
    """Entries of a window; 0 where no list is split. ``average``: entries of a list, ``entries``: of all."""
    best = {r.attrs[2] for r in fold.reductions if r.attrs[0] == "topk"}
    if not all_have(FastForm.LONG_LISTS, fold.reductions) or (best and len(fold.reductions) > 1):
        return 0  # of a top-k, k numbers of each window are combined
    size = max(LEAST_WINDOW, _TIMES_AVERAGE << max(average - 1, 0).bit_length())
    return size if entries > _LEAST_WINDOWS * size else 0


def combining_fold(fold: Fold, over: str) -> tuple[Fold, tuple[int, ...]]:
    """The fold over windows whose results are those of whole lists, and which of the windows' results it reads."""
    leaves: list[Expr] = []
    reductions: list[Expr] = []
    read: list[int] = []
    for r, places in split(fold, list(range(len(fold.outputs)))):
        if kind_of(r).per_pair:  # written where it is computed
            continue
        chosen = list(zip(places, outputs_of(r), strict=True))
        chosen = chosen[:-2] if r.attrs[0] == "soft" else chosen  # its logarithm and means say all
        flat = r.attrs[0] == "topk"  # its k numbers of a window are as many entries
        fields = tuple(
            node(
                "leaf", (), (f"window{k}",), rows=over == "rows", cols=over == "cols",
                feature=None if flat else feature, dtype=dtype,
            )
            for k, (feature, dtype) in chosen
        )  # fmt: skip
        leaves += fields
        read += [k for k, _ in chosen]
        reductions.append(reduce_node(r.attrs[0], over, r.attrs[2], fields))
    return Fold(tuple(leaves), tuple(reductions), raised=True), tuple(read)


MakeLaunch = Callable[[Fold, list[Any], Sizes, int], ListedLaunch]


class LongLists:
    """The two launches after that of all lists, on tensors like the given ones.

    ``make(fold, values, sizes, numbers)`` prepares a launch of a fold on leaves ``[*batch, length(, features)]``, of
    which each window has so many numbers."""

    def __init__(self, fold: Fold, over: str, sizes: Sizes, windows: ListedLaunch, make: MakeLaunch):
        self.fold, self.windows = fold, windows
        self.whole = [k for k, (r, _) in enumerate(fold.outputs) if not kind_of(r).per_pair]
        self.combine: ListedLaunch | None = None
        if self.whole:
            joined, self.read = combining_fold(fold, over)
            numbers = next((r.attrs[2][0] for r in fold.reductions if r.attrs[0] == "topk"), 1)
            self.flat = any(r.attrs[0] == "topk" for r in fold.reductions)
            count = windows.tiles * numbers
            among = replace(sizes, cols=count) if over == "cols" else replace(sizes, rows=count)
            like = [self._entries(windows.allocators[k]()) for k in self.read]
            self.combine = make(joined, like, among, numbers)

    def _entries(self, part: Tensor) -> Tensor:
        """Results of windows as what is combined."""
        return part.flatten(-2) if self.flat else part

    def __call__(self, outputs: list[Tensor], leaves: Sequence[Any], lists: tuple[Tensor, ...], merged: Merged) -> None:
        """Fold what the launch of all lists left out, into its ``outputs``."""
        if not self.windows.grid:
            return
        parts = [allocate() if k in self.whole else outputs[k] for k, allocate in enumerate(self.windows.allocators)]
        while not self.windows.launch_into(parts, [*leaves, *lists], merged):
            pass
        if self.combine is not None:
            own = [outputs[k] for k in self.whole]
            while not self.combine.launch_into(own, [*(self._entries(parts[k]) for k in self.read), *lists[:2]], dict):
                pass

    def recipes(
        self, outputs: Sequence[Form], places: Sequence[int], feeds: int, find: Callable[[Any], FoundAtLaunch]
    ) -> list[ExtraLaunch] | None:
        """How a replay makes these launches again after that of all lists, into its ``outputs``; None where it cannot.

        ``places``: of the leaves among the step's, of which there are ``feeds``; ``find``: the lists of a launch."""
        if not self.windows.grid:
            return []
        names = {k: f"window{k}" for k in self.whole}
        recipe = self.windows.recipe_over(places, find(self.windows))
        if recipe is None:
            return None
        made = [ExtraLaunch(recipe, tuple(names.get(k, k) for k in range(len(self.windows.allocators))))]
        if self.combine is not None:
            recipe = self.combine.recipe_over(range(feeds, feeds + len(self.read)), find(self.combine))
            if recipe is None:
                return None
            recipe = recipe._replace(outputs=tuple(outputs[k] for k in self.whole))  # in their types
            made.append(ExtraLaunch(recipe, tuple(self.whole), tuple(names[k] for k in self.read)))
        return made


_LIST_INSTANCES = 4  # of a multiprocessor; more of them even out lists of unequal length, and are as many more parts


class ListedHistogram(ListedLaunch):
    """The kernel of one histogram over lists, on tensors like the given ones."""

    combines = True

    def _describe(self, values: Leaves) -> None:
        self.table_size = self.sizes.of(str(self.fold.reductions[0].args[2].feature))
        self.entries = min(MOST_ENTRIES, pad_width(self.table_size))
        super()._describe(values)
        self.spec, self.may_guess = replace(self.spec, guess=False), False

    def _pack_heads(self, values: Leaves) -> FewRows | None:
        return None  # there is a result for each batch element

    def _find_copied_vectors(self, plain: Any, leaves: Leaves) -> tuple:
        return ()

    def _plan_tiles(self, plain: Any, group: int, copies: bool) -> KernelPlan:
        plan = default_plan(self.spec, None)
        return replace(plan, block_kept=min(plan.block_kept, max(16, 1 << (group - 1).bit_length())))

    def _compile_plain(self) -> Kernel:
        return compile_listed_histogram(replace(self.spec, guess=False), self.entries)

    def _write_kernel(self, leaves: Leaves) -> None:
        self.spec = replace(self.spec, guess=False, precomputed_shifts=False)
        self.kernel = compile_listed_histogram(self.spec, self.entries)

    def _split_folded_axis(self) -> None:
        super()._split_folded_axis()
        shares = -(-self.table_size // self.entries)
        enough = -(-_LIST_INSTANCES * driver.count_processors(self.sizes.device) // max(1, self.count * shares))
        self.tiles, self.splits = min(self.tiles, max(1, enough)), 1
        self.grid = self.tiles * shares * self.count

    def _output(self, r: Expr, k: int) -> Form:
        return (self.count, self.tiles, self.table_size), self.sizes.compute

    def recipe(self) -> None:
        return None  # torch adds the parts

    def __call__(self, leaves: Sequence[Any], merged: Merged, then: Then = None) -> list[Tensor]:
        shape = (*self.sizes.batch, self.table_size)
        if not self.grid or not math.prod(shape):
            return [torch.zeros(shape, dtype=self.sizes.compute, device=self.sizes.device)]
        (parts,) = super().__call__(leaves, merged)
        return [parts.sum(1).view(shape)]
