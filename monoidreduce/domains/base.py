"""What the four domains share: tensors and static form, checks of shapes and values, moving; and what engines read.

Engines read a domain as :class:`ColumnLists`: for each group of rows, the column blocks that it folds, in compressed
rows (CSR) of column blocks. Everything is made on the lists' device, in a fixed order, without a host sync
and in memory proportional to the lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from .. import arrays
from ..errors import ArgumentError, ColumnListError, DeviceError, DTypeError, ShapeError, shown
from ..plan import settings

D = TypeVar("D", bound="Domain")
T = TypeVar("T")


@dataclass(frozen=True, eq=False, repr=False)
class Domain:
    """Which pairs of a call exist. Built by ``mr.blocks``, ``mr.pages``, ``mr.jagged`` or ``mr.edges``.

    A pair exists once for each time that the lists name it: a column that is listed twice is folded twice. The order
    of a list does not matter. Tensors are read, never copied or changed; changing them in place changes the domain, by
    torch's functions: of memory that numpy changes (``torch.from_numpy``) torch cannot tell, so give the array itself.
    Arrays that are no tensors are copied.
    """

    kind: ClassVar[str]

    def take_arrays(self, *names: str) -> None:
        """Put tensors in place of arrays that are no tensors."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not isinstance(value, Tensor):
                object.__setattr__(self, name, take_array(name, value))

    def tensors(self) -> tuple[Tensor, ...]:
        """The domain's tensors, in a fixed order."""
        raise NotImplementedError

    @property
    def form(self) -> tuple:
        """The domain without its tensors, hashable: its kind and its static sizes."""
        raise NotImplementedError

    @classmethod
    def _restore(cls: type[D], form: tuple, tensors: tuple[Tensor, ...]) -> D:
        raise NotImplementedError

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading dimensions of the lists, which broadcast against those of the call."""
        return ()

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.tensors()[0].device

    def to(self: D, device: Any) -> D:
        """The same domain on another device.

        >>> import torch, monoidreduce as mr
        >>> mr.jagged(torch.tensor([0, 2, 5])).to("cpu").device
        device(type='cpu')
        """
        moved: dict[int, Tensor] = {}
        for t in self.tensors():  # one tensor that is given twice stays one
            moved.setdefault(id(t), t.to(device))
        return type(self)._restore(self.form, tuple(moved[id(t)] for t in self.tensors()))

    def check(self, rows: int, cols: int) -> None:
        """Raise unless the domain fits a call of ``rows`` and ``cols``: :class:`ShapeError` for its sizes, and
        :class:`ColumnListError` for its numbers, which are looked at on a CPU always, elsewhere with
        ``mr.use(check=True)`` (a host sync)."""
        self._check_sizes(rows, cols)
        if can_inspect(*self.tensors()):
            self._once("checked", (rows, cols), lambda: self._check_values(rows, cols))

    def _check_sizes(self, rows: int, cols: int) -> None:
        pass

    def _check_values(self, rows: int, cols: int) -> None:
        raise NotImplementedError

    def listing(self, rows: int, cols: int) -> ColumnLists:
        """The lists of columns of each group of rows."""
        return self._once("listing", (rows, cols), lambda: self._make_listing(rows, cols))

    def _make_listing(self, rows: int, cols: int) -> ColumnLists:
        raise NotImplementedError

    def transposed(self, rows: int, cols: int) -> ColumnLists:
        """The same lists the other way round: the groups of rows that fold each column block."""
        lists = self.listing(rows, cols)
        return self._once("transposed", (rows, cols), lambda: lists.transposed(-(-cols // lists.col_block)))

    def first_of_equal(self, rows: int, cols: int) -> Tensor:
        """Which items of :meth:`listing` are the first of their list's equal ones."""
        lists = self.listing(rows, cols)
        return self._once("first", (rows, cols), lambda: lists.first_of_equal(-(-cols // lists.col_block)))

    def mask(self, rows: int, cols: int) -> Tensor:
        """How often each pair is folded, as dense integers [*batch, rows, cols]: for tests and small sizes.

        >>> import torch, monoidreduce as mr
        >>> mr.edges(torch.tensor([0, 2, 3]), torch.tensor([0, 2, 1])).mask(2, 3)
        tensor([[1, 0, 1],
                [0, 1, 0]])
        """
        return self.listing(rows, cols).multiplicity(rows, cols)

    def _once(self, name: str, key: tuple, make: Callable[[], T]) -> T:
        """What was made for this key, unless a tensor has changed since; only the last key's is held.

        It is held beside the fields, not in one: torch 2.6's ``torch.compile`` gives the first argument to a field that
        the constructor does not take."""
        if any(t.is_inference() for t in self.tensors()):  # these have no version
            return make()
        key = (*key, *(t._version for t in self.tensors()))
        memo = self.__dict__.setdefault("_memo", {})
        found = memo.get(name)
        if found is None or found[0] != key:
            found = memo[name] = (key, outside_inference_mode(make))
        return found[1]

    def __reduce__(self) -> tuple:
        return _restore_domain, (type(self), self.form, self.tensors())

    def __repr__(self) -> str:
        where = "" if self.device.type == "cpu" else f", on {self.device}"
        return f"mr.{self.kind}({self._sizes()}{where})"

    def _sizes(self) -> str:
        raise NotImplementedError


def _restore_domain(kind: type[Domain], form: tuple, tensors: tuple[Tensor, ...]) -> Domain:
    return kind._restore(form, tensors)


def build(kind: type[D], **fields: Any) -> D:
    """A domain with these fields, without the checks of its constructor."""
    made = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


# Checks


def can_inspect(*tensors: Tensor) -> bool:
    """Whether values may be read: on a CPU, or where ``mr.use(check=True)`` asks for it; never while a compiler or a
    function transform runs, under which there are none."""
    here = all(t.device.type == "cpu" for t in tensors) or settings.now().check
    return here and is_plain(*tensors)


def is_plain(*tensors: Tensor) -> bool:
    """Whether these are tensors with memory, and no compiler or function transform runs."""
    return (
        not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and all(type(t) is Tensor and t.device.type != "meta" for t in tensors)
    )


def outside_inference_mode(make: Callable[[], T]) -> T:
    """What ``make`` makes, to be kept for later calls: of a tensor made in inference mode none of these could have a
    gradient."""
    if not torch.is_inference_mode_enabled():
        return make()
    with torch.inference_mode(False), torch.no_grad():
        return make()


def wrong_domain_error(
    name: str, value: Any, kinds: Sequence[str] = ("blocks", "pages", "jagged", "edges")
) -> ArgumentError:
    """The error of ``value``, given where a domain of one of these ``kinds`` belongs."""
    fix = "Give " + " or ".join(f"mr.{kind}(...)" for kind in kinds)
    if hasattr(value, "kv_num_blocks") and "blocks" in kinds:
        fix = "mr.blocks.from_block_mask takes FlexAttention's BlockMask"
    elif isinstance(value, Tensor) and value.layout is torch.sparse_csr and "edges" in kinds:
        fix = "mr.edges.from_csr takes a CSR tensor"
    elif isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64):
        fix += "; mr.edges.from_neighbours takes columns [M, K], mr.edges.from_edge_index PyG's edge_index"
    elif isinstance(value, Tensor):
        fix += "; mr.blocks.from_block_mask takes FlexAttention's BlockMask, mr.blocks.from_mask one truth value for "
        fix += "each block of pairs"
    given = repr(value) if isinstance(value, (Domain, str)) else shown(value)
    return ArgumentError(detail=f"{name} was given {given}", fix=fix)


def take_array(name: str, value: Any) -> Any:
    """A tensor of a list that is a numpy array or has DLPack: a copy, since what is derived from a list is kept."""
    if value is None or isinstance(value, Tensor) or not arrays.is_array(value):
        return value
    return arrays.to_tensor(value, name).clone()


def check_integers(name: str, value: Any, shape: str, least: int, most: int | None = None) -> None:
    """Raise unless ``value`` is an int32 or int64 tensor with ``least`` to ``most`` dimensions, as ``shape`` shows."""
    if not isinstance(value, Tensor):
        raise ArgumentError(
            detail=f"{name} was given {shown(value)}",
            fix=f"Give a tensor of integers {shape}; "
            + (
                "mr.blocks.from_block_mask takes FlexAttention's BlockMask"
                if hasattr(value, "kv_num_blocks")
                else "a numpy array or an array with DLPack will do"
            ),
        )
    if value.dtype not in (torch.int32, torch.int64):
        raise DTypeError(
            detail=f"{name} is {shown(value)}", fix="Give int32 or int64, for example with .to(torch.int32)"
        )
    if value.layout is not torch.strided or value.dim() < least or (most is not None and value.dim() > most):
        raise ShapeError(detail=f"{name} has shape {tuple(value.shape)}", fix=f"{shape} was expected")


def check_one_device(**tensors: Tensor) -> None:
    """Raise DeviceError unless all are on one device."""
    if len({t.device for t in tensors.values()}) > 1:
        mixed = ", ".join(f"{name} on {t.device}" for name, t in tensors.items())
        raise DeviceError(detail=f"arguments are on different devices: {mixed}")


def check_whole_number(name: str, value: Any) -> None:
    """Raise ArgumentError unless ``value`` is a whole number from 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(detail=f"{name} was given {shown(value)}", fix="Give a whole number from 1")


def check_range(name: str, value: Tensor, last: int, what: str, seen: Tensor | None = None, else_fix: str = "") -> None:
    """Raise ColumnListError unless all numbers (those that are ``seen``) are from 0 to ``last``. ``else_fix``: what
    else a user may do."""
    flat = value if seen is None else value[seen.expand_as(value)]
    if not flat.numel():
        return
    low, high = map(int, torch.aminmax(flat))
    if low < 0 or high > last:
        bad = (value < 0) | (value > last)
        at = (bad if seen is None else bad & seen).nonzero()[0].tolist()
        given = int(value[tuple(at)])
        raise ColumnListError(
            detail=f"{name}{at} is {given}, but {what} are numbered from 0 to {last}"
            if last >= 0
            else f"{name}{at} is {given}, but there are no {what}",
            fix=f"Give numbers in that range{else_fix}" if last >= 0 else "Give an empty list",
        )


_TOTALS = "Offsets are running totals of lengths, from 0: F.pad(lengths.cumsum(0), (1, 0)) makes them"


def check_offsets(name: str, offsets: Tensor, last: int, what: str) -> None:
    """Raise ColumnListError unless offsets [..., S + 1] start at 0, never decrease and end at ``last`` or before."""
    if int(offsets[..., 0].abs().max() if offsets.numel() else 0):
        raise ColumnListError(detail=f"{name} starts at {int(offsets[..., 0].abs().max())}", fix=_TOTALS)
    falls = offsets[..., 1:] < offsets[..., :-1]
    if bool(falls.any()):
        *lead, at = falls.nonzero()[0].tolist()
        pair = offsets[(*lead, slice(at, at + 2))].tolist()
        raise ColumnListError(detail=f"{name} decreases from {pair[0]} to {pair[1]} at position {at + 1}", fix=_TOTALS)
    if offsets.numel() and int(offsets[..., -1].max()) > last:
        raise ColumnListError(
            detail=f"{name} ends at {int(offsets[..., -1].max())}, but there are {last} {what}",
            fix=f"The last offset is at most {last}",
        )


@dataclass(frozen=True, eq=False)
class ColumnLists:
    """Group g folds the column blocks ``items[offsets[g]:offsets[g + 1]]``, in that order.

    ``row_block`` rows make a group and ``col_block`` columns a block; the last of each may be cut by the size of the
    axis. The groups of all elements of the domain's ``batch`` follow each other; items count within their element.
    ``items`` may be longer than ``offsets[-1]``: the rest of it holds zeros and belongs to no group, so that its size
    is known without reading the lists. ``entry``: where each item stands in the list that this one was made of; None
    where that is the same place.

    >>> import torch, monoidreduce as mr
    >>> lists = mr.edges(torch.tensor([0, 2, 3]), torch.tensor([4, 1, 4])).listing(2, 5)
    >>> lists.transposed(5).items.tolist()
    [0, 0, 1]
    """

    offsets: Tensor  # [groups + 1]
    items: Tensor  # [capacity]
    row_block: int
    col_block: int
    batch: tuple[int, ...] = ()
    entry: Tensor | None = None

    @property
    def groups(self) -> int:
        """How many groups there are in all elements of the batch."""
        return self.offsets.shape[0] - 1

    def owners(self) -> Tensor:
        """The group of each item; ``groups`` for what is beyond the last list."""
        if self.items.device.type == "cpu":  # where lengths may be read
            found = torch.repeat_interleave(self.offsets.diff())
            rest = found.new_full((self.items.shape[0] - found.shape[0],), self.groups)
            found = torch.cat([found, rest]) if len(rest) else found
            return found.to(torch.int32) if _fits(self.groups) else found
        at = torch.arange(self.items.shape[0], device=self.items.device, dtype=self.offsets.dtype)
        return torch.searchsorted(self.offsets[1:].contiguous(), at, right=True, out_int32=_fits(self.groups))

    def transposed(self, blocks: int) -> ColumnLists:
        """For each of the ``blocks`` column blocks of an element, the groups that fold it, in increasing order.

        ``entry`` says where each stands in this list: which number of an edge, or which page of a sequence, it is.
        """
        elements = torch.Size(self.batch).numel()
        each = self.groups // max(elements, 1)
        owner = self.owners()
        total = elements * blocks
        key = (owner // max(each, 1) * blocks if self.batch else 0) + self.items
        key = torch.where(owner < self.groups, key, total)
        key, entry = key.to(torch.int32 if _fits(total) else torch.int64).sort(stable=True)
        bounds = torch.arange(total + 1, device=key.device, dtype=key.dtype)
        offsets = torch.searchsorted(key, bounds, out_int32=_fits(key.shape[0]))
        items = owner.index_select(0, entry)
        items = torch.where(items < self.groups, items % max(each, 1) if self.batch else items, 0)
        entry = entry.to(torch.int32) if _fits(key.shape[0]) else entry
        return ColumnLists(offsets, items, self.col_block, self.row_block, self.batch, entry)

    def first_of_equal(self, blocks: int) -> Tensor:
        """Which items are the first of their list's equal ones; ``blocks``: of an element."""
        return self.copies(blocks) > 0

    def copies(self, blocks: int) -> Tensor:
        """How often each item is in its list, at the first of equal ones; 0 at the others. ``blocks``: of an element.

        >>> import torch, monoidreduce as mr
        >>> mr.edges(torch.tensor([0, 2, 5]), torch.tensor([1, 1, 1, 0, 1])).listing(2, 2).copies(2).tolist()
        [2, 0, 2, 1, 0]
        """
        key, order = (self.owners().long() * blocks + self.items).sort(stable=True)
        place = torch.arange(len(key), device=key.device)
        count = torch.searchsorted(key, key, right=True) - place
        count[1:].masked_fill_(key[1:] == key[:-1], 0)
        return torch.empty_like(count).scatter_(0, order, count)

    def multiplicity(self, rows: int, cols: int) -> Tensor:
        """How often each pair is folded, dense: [*batch, rows, cols]."""
        blocks = -(-cols // self.col_block)
        owner = self.owners().long()
        found = torch.zeros(self.groups, blocks, dtype=torch.int64, device=self.items.device)
        inside = owner < self.groups
        if found.numel():
            at = torch.where(inside, owner, 0) * blocks + torch.where(inside, self.items, 0)
            found.view(-1).scatter_add_(0, at, inside.long())
        found = found.view(*self.batch, -(-rows // self.row_block), blocks)
        spread = found.repeat_interleave(self.row_block, -2).repeat_interleave(self.col_block, -1)
        return spread[..., :rows, :cols]


def pack(index: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The first ``count[g]`` entries of each row of ``index`` [G, most] behind each other: offsets [G + 1] and items
    [G · most], of which the rest is 0. Every place is written once, so the result does not depend on an order."""
    groups, most = index.shape
    offsets = count.new_zeros(groups + 1, dtype=torch.int32 if _fits(groups * most) else torch.int64)
    offsets[1:] = count.cumsum(0)
    place = torch.arange(most, device=index.device)
    kept = place < count.unsqueeze(1)
    # What is not kept goes to one place beyond the end, which is cut off.
    at = torch.where(kept, offsets[:-1].unsqueeze(1) + place, groups * most)
    items = torch.zeros(groups * most + 1, dtype=index.dtype, device=index.device)
    items = items.scatter(0, at.reshape(-1), torch.where(kept, index, 0).reshape(-1))  # in place, nothing is mapped
    return offsets, items[:-1]


def _fits(count: int) -> bool:
    return count < 2**31 - 1
