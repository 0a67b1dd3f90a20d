"""What kernels over lists are given: the lists of one direction as tensors, and the fold as they run it.

In that fold a pair is an entry of a list, and is folded as often as it is listed. Labels are sums over all pairs, since
a listed column may be its label several times, or never. The gradient of a table over edges is two numbers for each
entry: what is added, and where.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ....domains import ColumnLists
from ....program import constructors
from ....program.constructors import ONE
from ....program.expression import Expr, const, index, node, reduce_node, topological
from ....program.lower import Fold
from ....reductions import kind_of
from ...common.bounded_cache import is_capturing
from ...common.evaluate import Sizes, restore_domain
from ..codegen.kernel_spec import COPIES, ONCE, Unsupported

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
